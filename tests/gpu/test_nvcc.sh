#!/usr/bin/env bash
# Compiles cnn_kernels.cu with nvcc for old and new GPUs: no warning, registers and shared memory
# within bounds, only what CUDA 11 has, and a ./cnn that starts without a GPU. Needs no GPU.
# The report on every kernel goes to build/registers.txt. QUICK=1: only sm_80. What make has just compiled for
# tests/ptx is not compiled again. NVCC=PATH: another.
# Where cuobjdump and nvdisasm are, the machine code of the main loops is counted; nvcc alone comes
# without them: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm, in .venv.
# Prints `pass nvcc/NAME`, `fail nvcc/NAME: expected ..., found ...` or `skip nvcc/NAME: why`.
suite=nvcc
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
nvcc=${NVCC:-$(command -v nvcc || command -v "${CUDA:-/usr/local/cuda}/bin/nvcc")}
report=$repo/build/registers.txt

# Kernels (regular expressions; the first one that fits counts), and the most that each may use:
# registers, bytes of stack, of shared memory. A multiprocessor has 65536 registers: 128 let two
# blocks of 256 threads run on it, 64 four, 168 three of 128 threads; 96 let two of 256 run, which have 8 elements each
# under way. Stack is slow memory; 16 bytes are the four numbers of
# Philox, indexed by a variable. Spills are never allowed.
bounds='^gemm_kernel<Tile<128,128,  128  0 33792
^gemm_kernel<Tile<128,64,   168  0 25600
^gemm_kernel<Tile<64,32,    128  0 13312
^tensor_kernel<TensorTile<128,128,  255 0 0
^tensor_kernel<TensorTile<128,64,   168 0 0
^tensor_kernel<.*,1,                168 0 0
^tensor_kernel<TensorTile<64,64,    128 0 0
^batchnorm_backward_kernel<__       96  0 0
^sum_slices_kernel<__               96  0 16384
^sum_slices_kernel                  64  0  8192
^transpose_kernel                   64  0  4352
^(dropout_forward|gather)_ 64  16     0
.                                  64   0  4096'

# How many blocks of a kernel fit on a multiprocessor of a GPU, as the comments of cnn_kernels.cu say; -: not launched
# there. These are the last of a tile's template arguments (3 where WIDTH is 1), or fewer if shared memory is short.
fitting='sm                                 75 80 86 89 90 100 120
^gemm_kernel<Tile<128,128,             1  2  2  2  2  2   2
^gemm_kernel<Tile<128,64,              2  3  3  3  3  3   3
^gemm_kernel<Tile<64,32,               4  4  4  4  4  4   4
^tensor_kernel<TensorTile<128,128,     -  1  1  1  2  2   1
^tensor_kernel<TensorTile<128,64,      -  2  1  1  3  3   1
^tensor_kernel<TensorTile<64,64,.*,1,  -  3  2  2  3  3   2
^tensor_kernel<TensorTile<64,64,       -  3  2  2  4  4   2'

# The GPUs whose code is compiled for this architecture or for one that needs as many registers
gpus_of() {
    case $1 in sm_75) echo 75 ;; sm_80) echo 80 86 89 ;; sm_90) echo 90 100 ;; *) echo 120 ;; esac
}

# The emulator's table: a line `SM KB_OF_A_BLOCK KB THREADS BLOCKS` for each GPU
limits_of_gpus() {
    sed -n '/^static const Gpu gpus/,/;$/p' "$repo/tests/emulator/cuda_on_cpu_runtime.h" |
        grep -oP '{\K\d+(, \d+){5}(?=})' | tr -d , | cut -d ' ' -f 1,3-
}

# wrong_blocks GPUS <RESOURCES: kernels of which another number of blocks fits than is said. A block takes 1 KB of
# shared memory more on sm_80 and newer; a warp gets registers by 256.
wrong_blocks() {
    awk -v gpus="$*" -v fitting="$fitting" -v limits="$(limits_of_gpus)" '
        function least(a, b) { return a < b ? a : b }
        BEGIN {
            count = split(fitting, line, "\n")
            columns = split(line[1], head, " ")
            rows = split(limits, limit, "\n")
            for (i = 1; i <= rows; i++) {
                split(limit[i], value, " ")
                block[value[1]] = 1024 * value[2]
                shared[value[1]] = 1024 * value[3]
                threads[value[1]] = value[4]
                blocks[value[1]] = value[5]
            }
            wanted = split(gpus, gpu, " ")
        }
        {
            for (i = 2; i <= count; i++) {
                split(line[i], said, " ")
                if ($1 ~ said[1])
                    break
            }
            if (i > count)
                next
            split(substr($1, index($1, "Tile<") + 5), tile, /[,>]/)
            tensor = $1 ~ /^tensor/
            size = tensor ? 128 : tile[1] / tile[3] * tile[2] / tile[4]
            bytes = $5 + (tensor ? 384 * (tile[1] + tile[2]) : 0)
            promised = $1 ~ /^tensor_kernel<.*,1,/ ? 3 : tensor ? tile[3] : tile[5]
            registers = int(($2 + 7) / 8) * 8 * size
            for (i = 1; i <= wanted; i++) {
                sm = gpu[i]
                column = 2
                while (head[column] != sm)
                    column++
                if (said[column] == "-")
                    continue
                fit = least(promised, least(int(65536 / registers), int(threads[sm] / size)))
                fit = least(fit, least(blocks[sm], int(shared[sm] / (bytes + (sm >= 80 ? 1024 : 0)))))
                fit = bytes > block[sm] ? 0 : fit
                if (fit != said[column])
                    print $1, "on sm_" sm ": " fit " blocks, not " said[column]
            }
        }'
}

# What cnn_kernels.cu may call: functions of CUDA 11.4 that have the same arguments in every later
# version. CUDA 12's header appends _v2 to cudaGetDeviceProperties. Names with __ come from nvcc itself.
allowed='cudaDeviceCanAccessPeer cudaDeviceEnablePeerAccess cudaDeviceGetAttribute
cudaDeviceGetStreamPriorityRange
cudaDeviceSynchronize cudaDriverGetVersion cudaEventCreate cudaEventCreateWithFlags cudaEventDestroy
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

# beyond <RESOURCES: the lines that exceed a bound
beyond() {
    awk -v bounds="$bounds" 'BEGIN { count = split(bounds, line, "\n") }
        {
            for (i = 1; i <= count; i++) {
                split(line[i], most, " ")
                if ($1 ~ most[1])
                    break
            }
            if ($2 > most[2] + 0 || $3 > most[3] + 0 || $4 > 0 || $5 > most[4] + 0)
                print
        }'
}

# loops <MACHINE CODE: a line `KERNEL MULTIPLY_ADDS INSTRUCTIONS LATE` of each kernel's loop that has the
# most multiply-adds, of tensor kernels those of the tensor cores; LATE of them come before its last load of
# global memory
loops() {
    awk '
        function number(hex,    i, value) {
            for (i = 1; i <= length(hex); i++)
                value = 16 * value + index("0123456789abcdef", substr(hex, i, 1)) - 1
            return value
        }
        function report(    i, j, adds, after, most, all, late, kind) {
            kind = kernel ~ /tensor_kernel/ ? "^HMMA" : "^FFMA"
            for (i = 0; i < count; i++) {
                if (target[i] == "" || target[i] >= address[i])
                    continue
                adds = 0
                after = -1
                for (j = i; j >= 0 && address[j] >= target[i]; j--) {
                    adds += operation[j] ~ kind
                    if (after < 0 && operation[j] ~ /^LD[G.]/)
                        after = adds
                }
                if (adds > most) {
                    most = adds
                    all = i - j
                    late = after < 0 ? 0 : adds - after
                }
            }
            if (most)
                print kernel ";" most, all, late
            count = 0
        }
        /Function :/ { report(); kernel = $3 }
        match($0, /\/\*[0-9a-f][0-9a-f][0-9a-f][0-9a-f]+\*\/ +[@A-Z]/) {
            text = substr($0, RSTART + 2)
            address[count] = number(substr(text, 1, index(text, "*") - 1))
            sub(/^[^ ]+ +/, "", text)
            sub(/^@[^ ]+ +/, "", text) # the predicate
            operation[count] = text
            target[count] = ""
            if (text ~ /^BRA/ && match(text, /0x[0-9a-f]+/))
                target[count] = number(substr(text, RSTART + 2, RLENGTH - 2))
            count++
        }
        END { report() }' | { c++filt 2>/dev/null || cat; } |
        awk -F';' '{ sub(/^void /, "", $1); sub(/\(.*/, "", $1); gsub(/ /, "", $1)
            print $1, $2 }' | sort
}

# Of the main loops of the large tiles, the share of multiply-adds in per cent: forward and the data
# gradient (true: A is read along K), the weight gradient; of the tensor cores with 16 bits.
shares='^gemm_kernel<Tile<128,[0-9,]*>,true,  80
^gemm_kernel<Tile<128,[0-9,]*>,false, 75
^tensor_kernel<TensorTile<128,128,[0-9,]*>,true,[a-z]*,8, 25
^tensor_kernel<TensorTile<128,128,[0-9,]*>,false,[a-z]*,8, 20'

# slow_loops <LOOPS: those below their share
slow_loops() {
    awk -v shares="$shares" 'BEGIN { count = split(shares, line, "\n") }
        {
            for (i = 1; i <= count; i++) {
                split(line[i], least, " ")
                if ($1 ~ least[1] && 100 * $2 < least[2] * $3)
                    print
            }
        }'
}

# late_loads <LOOPS: those of gemm_kernel that request the next numbers after a tenth of the multiply-adds, too
# late for these to hide the latency where a multiprocessor has one block
late_loads() { awk '/^gemm_kernel/ && 10 * $4 > $2'; }

# good_peak <LOOPS: eight chains, none of which the compiler has folded away, and little else: the loop's own
# instructions would make the measured peak as much lower
good_peak() { awk '/^peak_kernel/ && $2 > 0 && $2 % 8 == 0 && 100 * $2 >= 97 * $3 { good = 1 } END { exit !good }'; }

# generic <MACHINE CODE: how many instructions load or store at an address of any kind of memory, where the
# compiler did not know that it is global memory
generic() { grep -cE '^[^A-Z]*(@!?U?P[0-9T]+ )?(LD|ST)\.E'; }

check_loops() {
    local name=$1 tools
    tools=$(find "$repo/.venv" -path '*/nvidia/*/bin' -type d 2>/dev/null | head -n 1)
    if ! PATH=$PATH:${nvcc%/*}:$tools cuobjdump -sass "$tmp/kernels.o" >"$tmp/sass" 2>"$err"; then
        skip "$name/loops" "cuobjdump and nvdisasm are not there: see the top of this file"
        return
    fi
    loops <"$tmp/sass" >"$tmp/loops"
    awk '{ printf "%s: %d of %d instructions of the main loop are multiply-adds, %.1f %%\n", $1, $2, $3,
        100 * $2 / $3 }' "$tmp/loops" >>"$report"
    holds "$name/loops/some" "6 gemm_kernels with large tiles" "$(cat "$tmp/loops")" \
        test "$(grep -c '^gemm_kernel<Tile<128' "$tmp/loops")" -eq 6
    holds "$name/loops/tensor" "36 tensor_kernels, on sm_75 6 of half" "$(cat "$tmp/loops")" \
        test "$(grep -c '^tensor_kernel' "$tmp/loops")" -eq "$([ "${name#sm_}" -lt 80 ] && echo 6 || echo 36)"
    same "$name/loops" "" "$(slow_loops <"$tmp/loops")"
    same "$name/generic" 0 "$(generic <"$tmp/sass")"
    same "$name/loads" "" "$(late_loads <"$tmp/loops")"
    # shellcheck disable=SC2094 # both only read
    holds "$name/peak" "a multiple of 8 multiply-adds, 97 % of the loop" "$(grep peak_kernel "$tmp/loops")" \
        good_peak <"$tmp/loops"
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
    same "$1/bounds" "" "$(beyond <"$tmp/resources")"
    # shellcheck disable=SC2046 # words
    same "$1/blocks" "" "$(wrong_blocks $(gpus_of "$1") <"$tmp/resources")"
    check_loops "$1"
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

# The checks themselves must fail where they should.
same "self/registers" "gemm_kernel<Tile<128,128,8,8,2>,A> 129 0 0 0" \
    "$(beyond <<<"gemm_kernel<Tile<128,128,8,8,2>,A> 129 0 0 0")"
same "self/loops" "gemm_kernel<Tile<128,64,8,8,3>,true,false,4> 79 100" \
    "$(printf 'gemm_kernel<Tile<128,64,8,8,3>,%s,4> %d 100\n' true,false 79 true,true 80 false,false 75 |
        slow_loops)"
same "self/loops/tensor" "tensor_kernel<TensorTile<128,128,2>,true,true,8,__half> 24 100" \
    "$(printf 'tensor_kernel<TensorTile<128,128,2>,%s,8,__half> %d 100\n' true,true 24 true,false 25 false,false 20 |
        slow_loops)"
same "self/generic" 2 \
    "$(printf '        /*0e80*/       %s [R8.64] ;  /* 0x1 */\n' 'LD.E.128 R4,' '@!P0 ST.E' 'LDG.E R5,' LDS | generic)"
same "self/loads" "gemm_kernel<A> 100 120 11" "$(printf 'gemm_kernel<A> 100 120 %s\n' 10 11 | late_loads)"
same "self/peak" "256 of 260" "$(for loop in "32 36" "250 252" "256 260"; do
    good_peak <<<"peak_kernel $loop" && echo "${loop/ / of }"; done)"
# 136 registers let three blocks run, 168 KB hold none
same "self/blocks" "tensor_kernel<TensorTile<64,64,4>,true,8,A> on sm_90: 3 blocks, not 4" \
    "$(printf 'tensor_kernel<TensorTile<64,64,4>,true,8,A> %d 0 0 0\n' 128 136 | wrong_blocks 90)"
same "self/blocks/shared" "gemm_kernel<Tile<128,128,8,8,2>,A> on sm_75: 0 blocks, not 1" \
    "$(printf 'gemm_kernel<Tile<128,128,8,8,2>,A> 128 0 0 %d\n' 33792 66000 | wrong_blocks 75)"
same "self/blocks/gpus" 7 "$(limits_of_gpus | wc -l)"
same "self/spills" "add_kernel 20 0 4 0" "$(beyond <<<"add_kernel 20 0 4 0")"
same "self/within" "" "$(beyond <<<"gemm_kernel<Tile<128,64,8,8,3>,A> 168 0 0 25600")"

if [ -z "$nvcc" ]; then
    skip architectures "nvcc is not installed"
else
    known=$("$nvcc" --list-gpu-arch 2>/dev/null | sed 's/compute_/sm_/')
    architectures=$(printf '%s\n' sm_75 sm_80 sm_90 "$(sort -V <<<"$known" | tail -n 1)" | sort -uV)
    mkdir -p "$repo/build"
    "$nvcc" --version | tail -n 2 | head -n 1 >"$report"
    rm -f "$tmp/kernels.o"
    [ -z "${QUICK:-}" ] || architectures=sm_80
    for architecture in $architectures; do
        check_architecture "$architecture"
    done
    [ ! -e "$tmp/kernels.o" ] || check_symbols
    # the programs of labs 5 and 10, with what their checkers append
    for program in 05/conv 10/matmul; do
        cat "$repo/labs/lab$program.cu" "$repo/labs/check/lab${program%/*}_device.cu" >"$tmp/program.cu"
        "$nvcc" -std=c++17 -arch="$architecture" -Werror all-warnings -Xcompiler -Wall,-Wextra -c "$tmp/program.cu" \
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
