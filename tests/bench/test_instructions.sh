#!/usr/bin/env bash
# Counts the instructions of a training step with Callgrind, on one thread of a build for x86-64-v3, and
# compares with tests/bench/instructions.txt: a slower kernel shows here, whatever else the machine does.
# Counts depend on the compiler, so they are compared for the one they were taken with only.
# UPDATE=1 writes the file anew.
set -u
cd "$(dirname "$0")/../.." || exit 1
export LC_ALL=C OMP_NUM_THREADS=1
file=tests/bench/instructions.txt
nets="mnist:6:2 cifar:6:4 cifar:64:2 resnet8:6:1" # model:width:batch

compiler=$(${CC:-gcc} --version 2>/dev/null | head -n 1 | grep -oE '^(gcc|clang)|[0-9]+\.[0-9]+' | head -n 2 | paste -sd ' ')
reason=
[ "$(uname -m)" = x86_64 ] || reason="not an x86-64 machine"
grep -q avx2 /proc/cpuinfo || reason="no AVX2"
command -v valgrind >/dev/null || reason="valgrind is not installed"
[ -x build/bench-v3 ] || reason="build/bench-v3 is not built"
[ -n "${UPDATE:-}" ] || grep -q "^$compiler " $file || reason="no counts for $compiler in $file"
[ -z "${QUICK:-}" ] || reason="QUICK=1"

# count MODEL WIDTH BATCH: instructions of two steps
count() {
    valgrind --tool=callgrind --callgrind-out-file=/dev/null --collect-atstart=no \
        --toggle-collect="train_step*" build/bench-v3 --model "$1" --width "$2" --batch-size "$3" \
        --threads 1 --max-steps 2 2>&1 >/dev/null | grep -oP 'Collected : \K[0-9]+'
}

[ -z "${UPDATE:-}" ] || : >$file
for net in $nets; do
    IFS=: read -r model width batch <<<"$net"
    name="instructions/$model width $width batch $batch"
    if [ -n "$reason" ]; then
        echo "skip $name: $reason"
        continue
    fi
    found=$(count "$model" "$width" "$batch")
    if [ -n "${UPDATE:-}" ]; then
        echo "$compiler $net $found" | tee -a $file
        continue
    fi
    expected=$(sed -n "s/^$compiler $net //p" $file)
    if awk -v f="$found" -v e="$expected" 'BEGIN { exit !(f > 0 && f <= 1.03 * e) }'; then
        echo "pass $name"
    else
        echo "fail $name: expected $expected instructions and at most 3 % more, found $found"
    fi
done

# --layers: a line for each product, with its three passes, and one for each group
name=instructions/layers
if [ -n "$reason" ]; then
    echo "skip $name: $reason"
    exit
fi
found=$(build/bench-v3 --model mnist --batch-size 2 --threads 1 --layers | grep ' forward' |
    grep -oE '^[a-z0-9]+|forward|weights|data' | paste -sd ' ')
expected="conv1 forward weights conv2 forward weights data fc1 forward weights data fc2 forward weights data"
if [ "$found" = "$expected" ]; then
    echo "pass $name"
else
    echo "fail $name: expected $expected, found $found"
fi
