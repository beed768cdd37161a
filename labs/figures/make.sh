#!/usr/bin/env bash
# Draws the figures of README.md and labs/results.md again, in the project's folder after `make`:
#
#     labs/figures/make.sh [DIR [OPTIONS...]]
#
# It trains for one epoch, as `make run` does, and writes run.png, roofline.png and, from bench.csv, bench.png
# into DIR (default: labs/figures). OPTIONS are passed to ./cnn. Layers are timed: nothing else should run.
# CNN=PATH: another program. Needs a python3 with matplotlib.
set -eu
unset CDPATH
cd "$(dirname "$0")/../.."
out=${1:-labs/figures}
[ $# -eq 0 ] || shift
for python in .venv/bin/python python3 /usr/bin/python3 ""; do
    "$python" -c 'import matplotlib' 2>/dev/null && break
done
[ -n "$python" ] || { echo "make.sh: error: no python3 with matplotlib; on Debian: apt-get install python3-matplotlib" >&2; exit 1; }
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"${CNN:-./cnn}" --epochs 1 --layers --quiet --out "$tmp/first-epoch" "$@"
cp labs/figures/bench.csv "$tmp"
"$python" labs/tools/plot.py "$tmp/first-epoch" >"$tmp/drawn"
"$python" labs/tools/plot.py "$tmp/bench.csv" >>"$tmp/drawn"
mkdir -p "$out"
for figure in first-epoch/plots/run first-epoch/plots/roofline plots/bench; do
    if [ ! -f "$tmp/$figure.png" ]; then
        grep "^not drawn: ${figure##*/}:" "$tmp/drawn" >&2
        exit 1
    fi
    cp "$tmp/$figure.png" "$out"
    echo "drawn: $out/${figure##*/}.png"
done
