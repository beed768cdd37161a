#!/usr/bin/env bash
# The short form of mutate.py: three random changes of one source, another one each day, against the unit
# tests alone (of cnn.c in the sections that these test), of which at least one must be noticed.
# SEED=N: other changes. ROTATION=N: the source of another day.
# Prints `pass mutate/NAME`, `fail mutate/NAME: expected ..., found ...` or `skip mutate/NAME: why`.
suite=mutate
: "${CNN:=$(type -P true)}" # not run here
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
if [ -n "${QUICK:-}" ]; then
    skip all "QUICK is set"
elif ! command -v python3 >/dev/null; then
    skip all "no python3; on Debian: apt-get install python3"
else
    sources=(cnn.c:2-7 cnn_kernels.c cnn_kernels.cu)
    for i in 0 1 2; do
        share $i || continue
        source=${sources[i]}
        python3 "$repo/tests/source/mutate.py" --sources "$source" --tests unit --count 3 --at-least 1 \
            --seed "${SEED:-1}" >"$out" 2>&1 </dev/null
        same "$source" "exit 0, of 3 changes" "exit $?, $(grep -oE 'of [0-9]+ changes' "$out" | tail -n 1)"
        cat "$out"
    done
fi
exit 0
