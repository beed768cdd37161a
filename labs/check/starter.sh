#!/usr/bin/env bash
# make starter LAB=n OUT=dir: a copy of the project in which labs before n are done, and the parts
# that labs n to 9 ask for are missing.
set -eu
unset CDPATH
cd "$(dirname "$0")/../.."
lab=${1:-} out=${2:-}
usage="usage: make starter LAB=n OUT=dir, where n is a number from 0 to 9 and dir a new folder"
[[ $lab =~ ^[0-9]$ && -n $out ]] || { echo "$usage" >&2; exit 2; }
if [ -e "$out" ] && [ -n "$(ls -A "$out")" ]; then
    echo "$out: is there and not empty; $usage" >&2
    exit 2
fi
if [ -d labs/pristine ]; then
    echo "this folder is a starter itself: it has no other labs; make starters from the project" >&2
    exit 2
fi

# strip FILE: without the answers
strip() {
    awk -v mode=strip -v from="$lab" -v stubs=labs/stubs -v file="$(basename "$1")" \
        -f labs/check/regions.awk "$1"
}

mkdir -p "$out"
# what students use; the project's own tests hold what the labs ask for
cp -r .gitignore LICENSE Makefile README.md data slurm labs "$out"
mkdir "$out/tests" "$out/labs/pristine" "$out/runs"
cp tests/cuda_on_cpu* tests/bench* tests/check.h tests/pytorch_mnist.py "$out/tests"
find "$out" -name __pycache__ -exec rm -r {} +
{
    printf '%s\n' cnn.c cnn_kernels.cu
    grep -lE '/\* LAB [0-9.]+ BEGIN' labs/lab*/* 2>/dev/null || true
} | while read -r file; do
    strip "$file" >"$out/$file"
    mkdir -p "$out/labs/pristine/$(dirname "$file")"
    cp "$out/$file" "$out/labs/pristine/$file" # make check puts the student's parts in there
done
cat >"$out/labs/starter.mk" <<EOF
# This folder is the starter of lab $lab. What is still to be written leaves names without a use.
CFLAGS += -Wno-unused-parameter -Wno-unused-variable -Wno-unused-function
EOF
if [ -f "labs/check/lab0$lab.sh" ]; then
    labs/classroom/generate.sh "$lab" "$(cd "$out" && pwd)"
fi
echo "$out is the starter of lab $lab: read $out/labs/lab0$lab/README.md, then work in $out"
