#!/usr/bin/env bash
# Compiles cnn_kernels.cu with nvcc for old and new GPUs: no warning, no spilled register, only what CUDA 11 has, and a
# ./cnn that starts without a GPU. Needs no GPU. __launch_bounds__ in the kernels says how many blocks have to fit on a
# multiprocessor: where the registers do not suffice, nvcc spills them.
# build/registers.txt gets what depends on nvcc's version: registers and memory of every kernel. The machine code is
# read with cuobjdump and nvdisasm. If nvcc came without them: .venv/bin/pip install nvidia-cuda-cuobjdump
# nvidia-cuda-nvdisasm.
# For sm_80 and, by turns of days, sm_75, sm_90 or the newest architecture that nvcc knows (LONG=1: all; QUICK=1: only
# sm_80). What make has just compiled for tests/ptx is not compiled again. NVCC=PATH: another.
# Prints `pass nvcc/NAME`, `fail nvcc/NAME: expected ..., found ...` or `skip nvcc/NAME: why`.
suite=nvcc
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
nvcc=${NVCC:-$(command -v nvcc || command -v "${CUDA:-/usr/local/cuda}/bin/nvcc")}
report=$repo/build/registers.txt

# What cnn_kernels.cu may call: functions of CUDA 11.4 that have the same arguments in every later
# version. CUDA 12's header appends _v2 to cudaGetDeviceProperties. Names with __ come from nvcc itself.
allowed='cudaDeviceCanAccessPeer cudaDeviceEnablePeerAccess
cudaDeviceGetStreamPriorityRange cudaDeviceSynchronize cudaDriverGetVersion cudaEventCreate cudaEventCreateWithFlags cudaEventDestroy
cudaEventElapsedTime cudaEventRecord cudaEventSynchronize cudaFree cudaFreeHost
cudaFuncGetAttributes cudaFuncSetAttribute cudaGetDevice cudaGetDeviceCount cudaGetDeviceProperties
cudaGetDeviceProperties_v2 cudaGetErrorName cudaGetErrorString cudaGetLastError cudaGraphDestroy
cudaGraphExecDestroy cudaGraphInstantiateWithFlags cudaGraphLaunch cudaHostAlloc cudaLaunchKernel cudaMalloc cudaMallocHost
cudaMemGetInfo cudaMemcpyAsync cudaMemcpyPeerAsync cudaMemsetAsync
cudaOccupancyMaxActiveBlocksPerMultiprocessor cudaPeekAtLastError cudaPointerGetAttributes
cudaProfilerStart cudaProfilerStop cudaRuntimeGetVersion cudaSetDevice cudaStreamBeginCapture
cudaStreamCreateWithFlags cudaStreamCreateWithPriority cudaStreamDestroy cudaStreamEndCapture cudaStreamIsCapturing
cudaStreamQuery cudaStreamSynchronize cudaStreamWaitEvent'

# resources <LOG OF ptxas -v: a line `KERNEL REGISTERS STACK SPILLS SHARED` for each kernel; spaces
# within a kernel's name are left out
resources() {
    awk '/Compiling entry function/ { split($0, part, "\047"); kernel = part[2] }
        /bytes stack frame/ { stack = $1; spills = $5 + $9 }
        /Used [0-9]+ registers/ {
            shared = match($0, /[0-9]+ bytes smem/) ? substr($0, RSTART) + 0 : 0
            match($0, /Used [0-9]+/)
            print kernel ";" substr($0, RSTART + 5) + 0, stack, spills, shared
        }' | { c++filt 2>/dev/null || cat; } |
        awk -F';' '{ sub(/^void /, "", $1); sub(/\(.*/, "", $1); gsub(/ /, "", $1)
            print $1, $2 }' | sort
}

# in_memory <RESOURCES: kernels that keep numbers of a thread in memory
in_memory() { awk '$3 > 0 || $4 > 0'; }

# generic <MACHINE CODE: how many instructions load or store at an address of any kind of memory, where the
# compiler did not know that it is global memory
generic() { grep -cE '^[^A-Z]*(@!?U?P[0-9T]+ )?(LD|ST)\.E'; }

# products <MACHINE CODE: multiply-adds of the kernel that measures the peak rate. The host counts 8 in each step, 32
# of which are unrolled; the compiler would leave out those whose result is not used.
products() { awk '/Function : / { peak = /peak_kernel/ } peak && /FFMA/' | wc -l; }

check_machine_code() {
    local name=$1 tools found
    tools=$(find "$repo/.venv" -path '*/nvidia/*/bin' -type d 2>/dev/null | head -n 1)
    if ! PATH=$PATH:${nvcc%/*}:$tools cuobjdump -sass "$tmp/kernels.o" >"$tmp/sass" 2>"$err"; then
        skip "$name/machine_code" "cuobjdump and nvdisasm are not there: see the top of this file"
        return
    fi
    same "$name/generic" 0 "$(generic <"$tmp/sass")"
    found=$(products <"$tmp/sass")
    holds "$name/peak" "256 multiply-adds or more" "$found" [ "$found" -ge 256 ]
}

# compile ARCHITECTURE: must succeed without a warning of nvcc, ptxas or the host's compiler
compile() {
    local made=$repo/build/cnn_kernels_$1.o
    if [ "$made.log" -nt "$repo/cnn_kernels.cu" ] && [ "$made" -nt "$repo/cnn_kernels.cu" ]; then
        cp "$made" "$tmp/kernels.o"
        cp "$made.log" "$out"
        status=0
    else
        "$nvcc" -std=c++17 -O3 -arch="$1" -lineinfo -Werror all-warnings -Xcompiler -Wall,-Wextra \
            -Xptxas -v -c "$repo/cnn_kernels.cu" -o "$tmp/kernels.o" >"$out" 2>&1
        status=$?
    fi
    same "$1/no warning" "exit 0: " \
        "exit $status: $(grep -iE '(error|warning)' "$out" | head -n 5)"
    [ "$status" -eq 0 ]
}

check_architecture() {
    if [ -n "$known" ] && ! grep -qx "$1" <<<"$known"; then
        skip "$1" "this nvcc does not know it"
        return
    fi
    compile "$1" || return
    resources <"$out" >"$tmp/resources"
    {
        printf '%s: registers, bytes of stack, of spills, of shared memory\n' "$1"
        awk '{ printf "%9d %5d %6d %6d  %s\n", $2, $3, $4, $5, $1 }' "$tmp/resources"
    } >>"$report"
    holds "$1/report" "at least 20 kernels, gemm_kernel among them" "$(cat "$tmp/resources")" \
        awk '/gemm_kernel/ { gemm = 1 } END { exit !(gemm && NR >= 20) }' "$tmp/resources"
    same "$1/in_memory" "" "$(in_memory <"$tmp/resources")"
    check_machine_code "$1"
}

check_symbols() {
    if ! command -v nm >/dev/null; then
        skip "CUDA 11" "nm is not installed"
        return
    fi
    local called
    called=$(nm -u "$tmp/kernels.o" | grep -oE ' cuda[A-Za-z0-9_]+$' | sort -u)
    holds "CUDA 11/some calls" "cudaMalloc and others" "$called" grep -q cudaMalloc <<<"$called"
    same "CUDA 11/no other calls" "" \
        "$(for name in $called; do grep -qw -- "$name" <<<"$allowed" || echo "$name"; done)"
}

if [ -z "$nvcc" ]; then
    skip architectures "nvcc is not installed"
else
    known=$("$nvcc" --list-gpu-arch 2>/dev/null | sed 's/compute_/sm_/')
    newest=$(sort -V <<<"$known" | tail -n 1)
    architectures=sm_80
    if [ -z "${QUICK:-}" ]; then
        for another in "0 sm_75" "1 sm_90" "2 $newest"; do
            ! share "${another% *}" 3 || architectures+=" ${another#* }"
        done
    fi
    mkdir -p "$repo/build"
    "$nvcc" --version | tail -n 2 | head -n 1 >"$report"
    rm -f "$tmp/kernels.o"
    for architecture in $architectures; do
        check_architecture "$architecture"
    done
    [ ! -e "$tmp/kernels.o" ] || check_symbols
    # the programs of labs 5 and 10, with what their checkers append
    for program in 05/conv 10/matmul; do
        cat "$repo/labs/lab$program.cu" "$repo/labs/check/lab${program%/*}_device.cu" >"$tmp/program.cu"
        "$nvcc" -std=c++17 -arch=sm_80 -Werror all-warnings -Xcompiler -Wall,-Wextra -c "$tmp/program.cu" \
            -o "$tmp/program.o" >"$out" 2>&1
        same "lab ${program%/*}/no warning" "exit 0: " "exit $?: $(head -n 5 "$out")"
    done
fi

# A program with the kernels starts without a GPU, and says why it uses the CPU.
CUDA_VISIBLE_DEVICES='' run --dry-run --dataset synthetic --limit-train 64 --limit-test 64
if grep -q '^Device: .*built without CUDA' "$out"; then
    skip "no GPU" "this ./cnn is built without CUDA"
else
    same "no GPU/exit" 0 "$status"
    line "no GPU/one line" '^Device: cpu \(.*(driver|device).*\), --kernels '
fi
