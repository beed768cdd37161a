#!/usr/bin/env bash
# Runs what nvcc compiled, instruction by instruction, on the CPU (see ptx.h): the layouts of mma and ldmatrix, each
# kernel against its definition, training steps of each kind of kernels against the CPU, with and without graphs.
# QUICK=1: for sm_80, by turns of days one kind of kernels, and one model; else all kinds, and by turns of days sm_75,
# sm_90 or none of them, all shapes of one kind of kernels, and another model. LONG=1: all of these. planted.sh plants bugs.
# Prints `pass ptx/NAME`, `fail ptx/NAME: expected ..., found ...` or `skip ptx/NAME: why`.
suite=ptx
: "${CNN:=$(type -P true)}" # not run here
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
architectures=80 # PTX_TODAY in tests/programs.mk
if [ -z "${QUICK:-}" ]; then
    ! share 0 3 || architectures+=' 75'
    ! share 1 3 || architectures+=' 90'
fi
make -s -C "$repo" ptx PTX_SM="$architectures" >"$out" 2>&1
same build "exit 0" "exit $?$(grep -m 3 -E 'error|\*\*\*' "$out")"
if grep -q 'skipped$' "$out"; then
    skip all "$(tail -n 1 "$out")"
    exit 0
fi
unset CUDA_VISIBLE_DEVICES PTX_ORDER PTX_LAZY PTX_LEAKS PTX_STATS
export OMP_WAIT_POLICY=passive

# use_device N: the programs for sm_N, on devices of that kind
use_device() {
    export PTX_SM=$1
    programs=$repo/build/ptx/sm_$1 device=sm_$1
    cnn=$programs/cnn
}

# checked NAME COMMAND...: prints a program's verdicts under that name
checked() {
    local name=$device/$1
    "${@:2}" >"$out" 2>"$err" </dev/null
    status=$?
    sed -n "s#^\(pass\|fail\|skip\) cuda/#\1 ptx/$name/#p" "$out"
    same "$name/end" "exit 0, no report" \
        "exit $status, $(grep -m 1 -A 2 -E '^ptx:|^cnn: error' "$err" || echo no report)"
}

kernels_of_cnn=(naive tiled tf32 fp16 bf16)

test_kernels() {
    local kind=''
    [ -z "${QUICK:-}" ] || kind=${kernels_of_cnn[$(($(day) % 5))]}
    checked "kernels${kind:+/$kind}" env QUICK=1 "$programs/test_cuda" all '' "$kind"
    checked lazy env QUICK=1 PTX_LAZY=1 PTX_ORDER=1 "$programs/test_cuda" tiny
}

# Every shape, of one of the kinds of kernels, another one each day
test_shapes() {
    local kernels i=0
    for kernels in "${kernels_of_cnn[@]}"; do
        share $((i++)) 5 && checked "shapes/$kernels" env QUICK= "$programs/test_cuda" all '' "$kernels"
    done
}

# ---- Training steps. The CPU's losses are the reference; the bounds are those of the precisions.

# train NAME OPTIONS...
train() {
    PTX_LEAKS=1 run --dataset synthetic --limit-train $((4 * batch)) --limit-test "$batch" --batch-size "$batch" \
        --epochs 1 --model "$model" --out "$tmp/$1" "${@:2}"
    same "$device/run/$1" "exit 0, " "exit $status, $(grep -v '^cnn: warning' "$err")"
}
losses() { cut -d , -f 5 "$tmp/$1/steps.csv" | tail -n +2; }

# within NAME BOUND: its losses are that close to the CPU's
within() {
    same "$device/${1}_as_cpu" "4 losses within $2" "$(paste <(losses "${model}_cpu") <(losses "$1") |
        awk -v most="$2" 'NF == 2 && ($1 - $2) ^ 2 <= (most * $1) ^ 2 { n++ } END { print n + 0 }') losses within $2"
}

# kinds: kernels, precision, how far the losses may be from the CPU's, relative to them, as in test_cuda.c
kinds='naive fp32 1e-4
tiled fp32 1e-4
tensor tf32 1e-2
tensor fp16 1e-2
tensor bf16 3e-2'

# test_training MODEL BATCH_SIZE
test_training() {
    local model=$1 batch=$2 kernels precision bound name
    train "${model}_cpu" --no-cuda
    while read -r kernels precision bound; do
        [ "$PTX_SM" -ge 80 ] || [ "$kernels" != tensor ] || [ "$precision" = fp16 ] || continue
        name=${model}_${kernels}_$precision
        train "$name" --kernels "$kernels" --precision "$precision"
        within "$name" "$bound"
        train "${name}_graph" --kernels "$kernels" --precision "$precision" --graph on
        same "$device/${name}_graph" "$(losses "$name")" "$(losses "${name}_graph")"
    done <<<"$kinds"
}

# ---- Devices with tensor cores for fp16 only: what needs others is skipped, or refused, by name.

test_sm_75() {
    use_device 75
    local needed="expected a GPU with tensor cores that cnn uses in bf16 (sm_80 or newer; fp16: sm_75), found PTX \
on the CPU, sm_75"
    checked kernels env QUICK=1 "$programs/test_cuda" all
    same "$device/skipped" "2 precisions" "$(grep -cE '^skip cuda/(bf16|tf32): .*tensor cores' "$out") precisions"
    same "$device/fp16" yes "$(grep -q '^pass cuda/conv2d, tensor kernels, fp16' "$out" && echo yes)"
    checked weights "$programs/test_cuda" weights
    same "$device/weights/skipped" "skip cuda/weights in bf16: this GPU has no tensor cores that cnn uses in this \
precision" "$(tail -n 1 "$out")"
    refused_in_bf16
    # a driver compiles this code for newer devices as well, on which it has no more than there
    PTX_SM=90 device=sm_75_on_90
    needed="${needed%sm_75}sm_90 with code for sm_75"
    refused_in_bf16
    checked kernels env QUICK=1 "$programs/test_cuda" all conv2d fp16
    use_device 75
    test_training lenet 16
}

# what needs bf16 is refused, since it says $needed
refused_in_bf16() {
    local program
    for program in cnn "bench_gpu --tiny"; do
        # shellcheck disable=SC2086 # words
        "$programs"/$program --kernels tensor --precision bf16 >"$out" 2>"$err"
        status=$?
        holds "$device/${program%% *}" "exit 2: $needed" "exit $status: $(cat "$err")" \
            test $status -eq 2 -a -n "$(grep -F "$needed" "$err")"
    done
}

test_sm_90() {
    use_device 90
    # the others have the code of sm_80
    checked kernels env QUICK=1 "$programs/test_cuda" all '' bf16
    test_training lenet 16
}

use_device 80
checked layouts "$repo/build/ptx/test_tensor"
test_kernels
test_training lenet 16
if [ -n "${QUICK:-}" ]; then
    skip sm_75 "QUICK=1"
    skip sm_90 "QUICK=1"
    skip shapes "QUICK=1"
    exit 0
fi
test_shapes
i=0
for model in "mnist 2" "cifar 4" "resnet8 8"; do
    # shellcheck disable=SC2086 # words
    share $((i++)) && test_training $model
done
[[ $architectures != *75* ]] || test_sm_75
[[ $architectures != *90* ]] || test_sm_90
exit 0
