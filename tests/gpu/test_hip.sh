#!/usr/bin/env bash
# Builds ./cnn for AMD's GPUs with hipcc, by `make HIP=1` in build/hip: no warning, no register spilled, and a
# program that starts without a GPU. Needs no GPU; no AMD GPU has run it. The report on every kernel goes to
# build/hip/registers.txt. QUICK=1: only gfx90a. HIPCC=PATH: another; Debian: apt-get install hipcc.
# Prints `pass hip/NAME`, `fail hip/NAME: expected ..., found ...` or `skip hip/NAME: why`.
suite=hip
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
hipcc=${HIPCC:-hipcc}
build=$repo/build/hip
unset MAKEFLAGS MAKELEVEL

# resources <REMARKS OF hipcc: a line `KERNEL REGISTERS STACK SPILLS WAVES` for each kernel; spaces within a kernel's
# name are left out
resources() {
    { c++filt 2>/dev/null || cat; } | awk '
        !sub(/.* remark: +/, "") { next }
        { sub(/ \[-Rpass.*/, ""); at = index($0, ": "); of[substr($0, 1, at - 1)] = substr($0, at + 2) }
        /^LDS Size/ {
            kernel = of["Function Name"]
            sub(/^void /, "", kernel); sub(/\(.*/, "", kernel); gsub(/ /, "", kernel)
            print kernel, of["VGPRs"] + of["AGPRs"], of["ScratchSize [bytes/lane]"] + 0,
                of["SGPRs Spill"] + of["VGPRs Spill"], of["Occupancy [waves/SIMD]"]
        }' | sort
}

# build_for ARCHITECTURES TARGET: without a warning, with code for each of them
build_for() {
    local architecture
    rm -rf "$build" && mkdir -p "$build/tests/emulator" &&
        cp "$repo"/{Makefile,cnn.c,cnn_kernels.c,cnn_kernels.cu} "$build" &&
        cp "$repo/tests/emulator/cuda_on_hip.h" "$build/tests/emulator" || exit 1
    # hipcc leaves temporary files
    TMPDIR=$tmp make -C "$build" HIP=1 HIP_ARCH="$1" NO_MPI=1 OPT=-O1 "$2" \
        HIPCC="$hipcc -Wall -Wextra -Werror -Rpass-analysis=kernel-resource-usage" >"$out" 2>&1
    status=$?
    same "$1/no warning" "exit 0: " "exit $status: $(grep -iE '(error|warning):' "$out" | head -n 5)"
    for architecture in $1; do
        holds "$1/code for $architecture" "its name in $2" "none" \
            grep -qas "amdgcn-amd-amdhsa--$architecture" "$build/$2"
    done
    [ $status -eq 0 ]
}

same "arguments of __launch_bounds__" "" "$(grep -nE '__launch_bounds__\([^,)]*\)' "$repo/cnn_kernels.cu")" # two
if ! command -v "$hipcc" >/dev/null; then
    skip build "hipcc is not installed"
    exit 0
fi
if [ -z "${QUICK:-}" ]; then
    build_for "gfx908 gfx1030" build/cnn_kernels.o # waves of 64 threads, and of 32
fi
build_for gfx90a cnn || exit 0
resources <"$out" >"$tmp/resources"
{
    printf 'gfx90a: vector registers, bytes of stack, spills, waves on a SIMD unit\n'
    awk '{ printf "%9d %5d %6d %6d  %s\n", $2, $3, $4, $5, $1 }' "$tmp/resources"
} >"$build/registers.txt"
holds gfx90a/report "at least 20 kernels, gemm_kernel among them" "$(cat "$tmp/resources")" \
    awk '/gemm_kernel/ { gemm = 1 } END { exit !(gemm && NR >= 20) }' "$tmp/resources"
same gfx90a/in_memory "" "$(awk '$3 > 0 || $4 > 0' "$tmp/resources")"

# It starts without a GPU, and says why it uses the CPU.
cnn=$build/cnn
HIP_VISIBLE_DEVICES=-1 run --dry-run --dataset synthetic --limit-train 64 --limit-test 64
same "no GPU/exit" 0 "$status"
line "no GPU/one line" '^Device: cpu \(.*[Dd]evice.*\), --kernels '
