#!/usr/bin/env bash
# Plants bugs in the kernels, one at a time, which what nvcc makes of them must show; and says which of them the
# emulator of the source (tests/emulator) misses. Each takes nvcc 20 seconds.
#
#   tests/ptx/planted.sh [NAME...]       all of the list below, or those that are named
#
# Prints `pass ptx/planted/NAME` or `fail ptx/planted/NAME: expected ..., found ...`.
suite=ptx
: "${CNN:=$(type -P true)}" # not run here
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
cd "$repo" || exit 1
make -s ptx build/test_cuda.o >"$out" 2>&1
same planted/build "exit 0" "exit $?$(grep -m 3 -E 'error|\*\*\*' "$out")"
if grep -q 'skipped$' "$out"; then
    skip planted "$(tail -n 1 "$out")"
    exit 0
fi
nvcc=$(command -v nvcc || command -v "${CUDA:-/usr/local/cuda}/bin/nvcc")
export OMP_WAIT_POLICY=passive CUEMU_STRICT=1 CUEMU_LAZY=1 CUEMU_PROTECT=1 QUICK=1
ulimit -c 0
wanted=" $* " misses=''

# kernels_of KIND <KERNELS: without the tables of the others, which would take nvcc a minute
kernels_of() {
    local kept
    case $1 in
    naive) kept=conv2d_forward_naive ;;
    tiled) kept='real, Tiled' ;;
    bf16) kept='__nv_bfloat16, Tensor' ;;
    tf32) kept='real, Tensor' ;;
    esac
    awk -v kept="$kept" '!/^ +make_kernels</ || index($0, kept)'
}

# noticed_by PROGRAM TEST: the first report or failure
noticed_by() {
    # shellcheck disable=SC2086 # words
    timeout 600 "$1" $2 >"$out" 2>"$err"
    status=$?
    if grep -q '^ptx: ' "$err"; then
        grep -A 1 '^ptx: ' "$err" | tr -s '\n ' ' ' | sed 's/^ptx: //'
    else
        cat "$out" "$err" | grep -m 1 -E '^fail |^cuda_on_cpu: |^cnn: error' || [ $status -eq 0 ] || echo "exit $status"
    fi
}

with_emulator() {
    { echo '#line 1 "cnn_kernels.cu"' && sed -f tests/emulator/cuda_on_cpu.sed "$tmp/$1.cu"; } |
        g++ -std=c++17 -O1 -march=native -g1 -w -I. -include tests/emulator/cuda_on_cpu.h -fsanitize=alignment \
            -fsanitize-undefined-trap-on-error -x c++ -c - -o "$tmp/emu.o" 2>"$err" &&
        gcc -fopenmp build/test_cuda.o "$tmp/emu.o" -o "$tmp/emu" -lstdc++ -lm -lpthread
}

with_nvcc() {
    "$nvcc" -std=c++17 -O3 -lineinfo -gencode arch=compute_80,code=compute_80 --no-compress -I. \
        -c "$tmp/$1.cu" -o "$tmp/$1.o" 2>"$err" &&
        gcc -fopenmp build/test_cuda.o "$tmp/$1.o" build/ptx/*.o -o "$tmp/ptx" -lstdc++ -ldl -lm -lpthread
}

# bug NAME KIND TEST REPORT FROM TO: TO in the first place where FROM is; REPORT: what must be said
bug() {
    local text new found by
    [ "$wanted" = "  " ] || [[ $wanted == *" $1 "* ]] || return
    text=$(<cnn_kernels.cu)
    new=${text/"$5"/"$6"}
    [ "$new" != "$text" ] || { fail "planted/$1" "its place in cnn_kernels.cu" "none" && return; }
    { echo '#line 1 "cnn_kernels.cu"' && kernels_of "$2" <<<"$new"; } >"$tmp/$1.cu"
    with_nvcc "$1" || { fail "planted/$1" "that nvcc compiles it" "$(head -n 2 "$err")" && return; }
    found=$(noticed_by "$tmp/ptx" "$3")
    by="does not compile: $(with_emulator "$1" || grep -m 1 error "$err")"
    [ ! -x "$tmp/emu" ] || by=$(noticed_by "$tmp/emu" "$3")
    holds "planted/$1" "a report of $4" "$found" grep -qE -- "$4" <<<"$found"
    echo "  tests/ptx: $(cut -c 1-200 <<<"$found")"
    echo "  tests/emulator: $(cut -c 1-200 <<<"${by:-nothing}")"
    [ -n "$by" ] || misses+=" $1"
    rm -f "$tmp/$1".* "$tmp"/{ptx,emu,emu.o}
}

bug mma_b_swapped bf16 tiny '^fail' '{%8,%9}, {%0,%1,%2,%3};"' '{%9,%8}, {%0,%1,%2,%3};"'
bug mma_a_swapped bf16 tiny '^fail' '{%4,%5,%6,%7}' '{%4,%6,%5,%7}'
bug ldmatrix_row bf16 tiny '^fail|never written' 'lane / 16 * 8 + lane % 8;' 'lane / 16 * 8 + lane % 4;'
bug ldmatrix_swapped bf16 tiny '^fail' '{%0,%1,%2,%3}, [%4];"' '{%0,%2,%1,%3}, [%4];"'
bug ldmatrix_not_transposed bf16 tiny '^fail' 'x4.trans.shared.b16' 'x4.shared.b16'
bug copy_misaligned bf16 tiny misaligned 'global [%0], [%1], 16' 'global [%0+8], [%1], 16'
bug copy_without_zeros bf16 tiny '^fail' '"l"(from), "r"(valid ? 16 : 0)' '"l"(from), "r"(16)'
bug no_wait bf16 tiny 'no wait_group' 'cp_async_wait<STAGES - 2>(); // this' '// this'
bug wait_too_lax bf16 tiny 'no wait_group' 'wait_group %0;" ::"n"(PENDING)' 'wait_group %0;" ::"n"(PENDING + 1)'
bug no_commit bf16 tiny 'no wait_group|ends while a cp.async' '"cp.async.commit_group;" ::' '"" ::'
bug no_barrier_in_tensor_loop bf16 tiny 'race in shared|no wait_group' \
    '        __syncthreads();             // the other' '        // the other'
bug no_barrier_before_staging bf16 tiny 'race in shared' '    __syncthreads(); // the last tile has been read' \
    '    // the last tile has been read'
bug no_barrier_in_tiled_loop tiled tiny 'race in shared|never written' \
    '        __syncthreads(); // the tiles are complete' '        // the tiles are complete'
bug no_barrier_in_sums tiled tiny 'race in shared|never written' '= kinds[j].b;
    }
    __syncthreads();' '= kinds[j].b;
    }'
bug misaligned_float4 tiled tiny 'misaligned|never written' '(tile + outer * PITCH + walk.inner);' \
    '(tile + outer * PITCH + walk.inner + 1);'
bug misaligned_pitch tiled tiny misaligned 'PITCH = LINES + 4 };' 'PITCH = LINES + 2 };'
bug beyond_the_end tiled "all relu" allocation 'chunk = *(const Chunk<T, N> *)((const T *)from + i);' \
    'chunk = *(const Chunk<T, N> *)((const T *)from + i + 1024 * 1024);'
bug return_before_barrier tiled tiny 'have ended|has ended' \
    '    KIND kinds[N];' \
    '    if (first + threadIdx.x * N >= channels) return;
    KIND kinds[N];'
bug too_little_shared_memory bf16 tiny 'of shared memory' 'DYNAMIC_BYTES = STAGES * CHUNKS * 16 };' \
    'DYNAMIC_BYTES = STAGES * CHUNKS * 16 - 4096 };'
bug shuffle_without_all_lanes tiled "all softmax" 'lane' 'largest = -INFINITY, sum = 0;
    if (image >= r.n)' 'largest = -INFINITY, sum = 0;
    if (image >= r.n || lane > 30)'
bug no_barrier_in_join tiled tiny 'race in shared|never written' '        __syncthreads();
        if (line < other)' '        if (line < other)'
bug rounding_of_tf32_missing tf32 "all rounding" '^fail' '? x + 0x1000 : x;' '? x : x;'
bug host_pointer tiled "all dropout" "may be the host's" '? d.v[j] * (1 / (1 - r.p)) : 0;' \
    '? d.v[j] * (1 / (1 - r.l->p)) : 0;'
bug argument_type naive tiny 'allocation|^fail' \
    '    LAUNCH(bias_kernel, outputs(w), w.out, w.bias, outputs(w), w.l->out.c);' \
    '    unsigned count = outputs(w);
    float channels = w.l->out.c;
    void *args[] = {&w.out, &w.bias, &count, &channels};
    const dim3 blocks(ceil_div(count, THREADS));
    CHECK(cudaLaunchKernel((const void *)bias_kernel, blocks, dim3(THREADS), args, 0, stream()));'
bug unwritten_shared_memory tiled tiny 'never written' 'for (int i = 0; i < Chunks::COUNT; i++) {
            const int outer' 'for (int i = 0; i < Chunks::COUNT - 1; i++) {
            const int outer'
bug two_threads_write naive "all relu" 'race in global' '    unsigned i = element();
    if (i < count)
        out[i] = in[i] < 0 ? 0 : in[i];' '    unsigned i = min(element(), count - 1);
    out[i] = in[i] < 0 ? 0 : in[i];'
echo "The emulator misses:${misses:- none}"
exit 0
