#!/usr/bin/env bash
# make starter LAB=n OUT=dir: a copy of the project in which the labs before n are solved and the
# parts of labs n to 10 are replaced by stubs.
set -eu
export LC_ALL=C
unset CDPATH
cd "$(dirname "$0")/../.."
lab=${1:-} out=${2:-}
usage="make starter LAB=n OUT=dir, where dir is a new or empty folder"
# shellcheck source=labs/check/available.sh
. labs/check/available.sh
need_lab "$lab" "$usage"
if [ -z "$out" ]; then
    echo "OUT=: expected a new or empty folder, found nothing. Usage: $usage" >&2
    exit 2
fi
if [ -e "$out" ] && [ -n "$(ls -A "$out")" ]; then
    echo "$out exists and is not empty. Usage: $usage" >&2
    exit 2
fi
if [ -d labs/pristine ]; then
    echo "this folder is a starter itself and contains one lab only; make starters from the project" >&2
    exit 2
fi

# strip FILE: prints it without the answers
strip() {
    awk -v mode=strip -v from="$lab" -v stubs=labs/stubs -v file="$(basename "$1")" \
        -f labs/check/regions.awk "$1"
}

mkdir -p "$out"
# what students use; the project's own tests contain answers
cp -r .gitattributes .gitignore LICENSE Makefile README.md data slurm labs "$out"
mkdir -p "$out/tests/emulator" "$out/tests/bench" "$out/labs/pristine" "$out/runs"
cp tests/check.h "$out/tests"
cp tests/emulator/cuda_on_* "$out/tests/emulator"
cp tests/bench/*bench* tests/bench/pytorch_mnist.py "$out/tests/bench"
find "$out" -name __pycache__ -exec rm -r {} +
rm -rf "$out"/labs/{INSTRUCTOR.md,answers,grade,grader} # for instructors
[ "$lab" -gt 1 ] || rm "$out/labs/stubs/2.1" # it is an answer to 1.1
{
    printf '%s\n' cnn.c cnn_kernels.c cnn_kernels.cu
    grep -lE '/\* LAB [0-9. ]+ BEGIN' labs/lab*/* 2>/dev/null || true
} | while read -r file; do
    strip "$file" >"$out/$file"
    mkdir -p "$out/labs/pristine/$(dirname "$file")"
    cp "$out/$file" "$out/labs/pristine/$file" # make check inserts the student's parts there
done
# lab 5 begins with a naive convolution, which lab 4 asks for
[ "$lab" -ge 5 ] || rm -r "$out"/{labs/lab05/conv.cu,labs/pristine/labs/lab05,labs/check/lab05.c}
cat >"$out/labs/starter.mk" <<EOF
# This folder is the starter of lab $lab. Parts that are still missing leave variables unused.
CFLAGS += -Wno-unused-parameter -Wno-unused-variable -Wno-unused-function
export NVCC_APPEND_FLAGS += -diag-suppress=177 # nvcc's -Wno-unused-function
EOF
if [ "$lab" -ge 1 ] && [ "$lab" -le 3 ]; then # cnn.c is what these labs read: the fast kernels lie aside
    mkdir "$out/labs/kernels"
    mv "$out/cnn_kernels.c" "$out/labs/kernels"
    echo 'CFLAGS += -Ilabs/kernels' >>"$out/labs/starter.mk"
    rm -r "$out/tests/bench"
fi
labs/classroom/generate.sh "$lab" "$(cd "$out" && pwd)"
echo "$out is the starter of lab $lab: read $out/labs/$(lab_name "$lab")/README.md, then work in $out"
