#!/usr/bin/env bash
# Gradescope runs this once, as root on Ubuntu, when it builds the autograder's image.
set -e
apt-get update
apt-get install -y --no-install-recommends gcc g++ make gzip python3
