# shellcheck shell=bash disable=SC2154 # check.sh sets home and parts
# Lab 10, for check.sh: each change of the matrix product, in the emulator, where lab10_counts.h counts; the last test
# is for a GPU only.
# shellcheck source=labs/check/kernels.sh
. "$home/labs/check/kernels.sh"

tests() {
    cat <<'END'
3|10.1|mma: right, for one product, several steps and several tiles
2|10.1|mma: all products are computed by mma, each number loaded once per mma
3|10.2|tiles: right
2|10.2|tiles: each number of a tile is read once per block, 16 bytes at a time; one ldmatrix for two mma
2|10.3|swizzle: right
3|10.3|swizzle: no bank conflicts, in tiles of the same size
3|10.4|stages: right, and what cp.async copies is waited for
2|10.4|stages: two steps' tiles are on their way during the arithmetic, one barrier a step
0|10.4|on a GPU: right, and the last change is faster than the naive kernel
END
}

# What a part may call, besides functions that it defines itself
may_call="mma ldmatrix ldmatrix_transposed cp_async cp_async_commit cp_async_wait
    two pack chunk_at store_sums __uint_as_float $in_any_kernel"
vet_part() {
    [ "$1" = 10.0 ] || vet_kernel "$1" 'matmul_naive|naive_kernel|emulated|counts|begin_counts|end_counts' \
        "the instructions, two(), pack(), chunk_at(), store_sums()"
}

build() {
    wanted 1 2 3 4 5 6 7 8 9 || return 0
    { echo '#line 1 "matmul.cu"' && cat labs/lab10/matmul.cu labs/check/lab10_device.cu; } >lab10.cu
    "${CC:-gcc}" -std=gnu17 -O1 -g1 -Wall -Wextra -c labs/check/lab10.c -o lab10.o &&
        "${CC:-gcc}" lab10.o labs/check/apart.c -o checker -lm -lpthread || return
    if wanted 1 2 3 4 5 6 7 8; then
        sed -f tests/emulator/cuda_on_cpu.sed lab10.cu >lab10.cpp
        "${CXX:-g++}" -std=c++17 -O1 -g1 -march=native -Wno-unknown-pragmas -I. \
            -fsanitize=thread -fno-tree-sra -DCUEMU_COUNT -fsanitize=alignment -fsanitize-undefined-trap-on-error \
            -include tests/emulator/cuda_on_cpu.h -include labs/check/lab10_counts.h -Dmain=matmul_main \
            -c lab10.cpp -o lab10_emulated.o && no_arrays lab10_emulated.o &&
            only_emulator_calls lab10_emulated.o "$in_its_main" &&
            "${CXX:-g++}" lab10.o lab10_emulated.o -o lab10 -lm -lpthread || return
    fi
    if wanted 9 && on_gpu; then build_for_gpu; fi
}

build_for_gpu() {
    local nvcc
    nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
    "$nvcc" -std=c++17 -O3 -arch="${CUDA_ARCH:-native}" -I. -Dmain=matmul_main -c lab10.cu -o lab10_gpu.o &&
        "$nvcc" lab10.o lab10_gpu.o -o lab10_gpu
}

# The threads of a block run in this order, and in the reverse one.
right() {
    CUEMU_ORDER=1 ./checker right "$1" <<<"" 9>/dev/null && ./checker right "$1"
}

run() {
    export CUEMU_PROTECT=1 CUEMU_CORES=1
    case $1 in
    1) right 1 ;;
    2) ./checker counts 1 ;;
    3) right 2 ;;
    4) ./checker counts 2 ;;
    5) right 3 ;;
    6) ./checker counts 3 ;;
    7) right 4 ;;
    8) ./checker counts 4 ;;
    9)
        on_gpu || {
            echo "no GPU was found; this test has no points"
            return 77
        }
        WORKER_MAY_OPEN=1 WORKER=./lab10_gpu ./checker speed
        ;;
    esac
}
