#!/usr/bin/env bash
# The fast kernels of a processor without AVX-512, on any with AVX2. They are compiled as for AMD's Zen, where gcc makes
# fewer multiply-adds than elsewhere: all tiles have to be rounded equally there, too.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
if ! grep -qw avx2 /proc/cpuinfo; then
    echo "skip avx2/kernels: this processor has no AVX2"
    exit
fi
exec build/test_avx2 kernels
