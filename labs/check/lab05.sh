# shellcheck shell=bash disable=SC2154 # check.sh sets home and parts
# Lab 5, for check.sh: each change of the convolution, in the emulator, which counts its reads; the
# last test is for a GPU only.
# shellcheck source=labs/check/kernels.sh
. "$home/labs/check/kernels.sh"

tests() {
    cat <<'END'
3|5.1|tiles: right, for one tile, several, and ragged shapes
2|5.1|tiles: each number of a tile is read once per block
3|5.2|blocking: right
3|5.2|blocking: 16 multiply-adds for 8 reads of shared memory; tiles of 64 x 64
2|5.3|16 bytes: right
2|5.3|16 bytes: all loads and stores
3|5.4|buffers: right
2|5.4|buffers: one barrier a step, the next numbers requested before the arithmetic
0|5.4|on a GPU: the last change is faster than the naive kernel
END
}

# What a part may call, besides functions that it defines itself
may_call="one four patch_at weight_at ceil_div make_float4 $in_any_kernel"
vet_part() { [ "$1" = 5.0 ] || vet_kernel "$1" 'conv_naive|naive_kernel' "one(), four(), patch_at(), weight_at(), ceil_div()"; }

# One build finds what is wrong and counts. Without the option, gcc reads the 16 bytes of a float4 one by one.
build() {
    wanted 1 2 3 4 5 6 7 8 9 || return 0
    { echo '#line 1 "conv.cu"' && cat labs/lab05/conv.cu labs/check/lab05_device.cu; } >lab05.cu
    "${CC:-gcc}" -std=gnu17 -O1 -g1 -Wall -Wextra -c labs/check/lab05.c -o lab05.o &&
        "${CC:-gcc}" lab05.o labs/check/apart.c -o checker -lm -lpthread || return
    if wanted 1 2 3 4 5 6 7 8; then
        sed -f tests/emulator/cuda_on_cpu.sed lab05.cu >lab05.cpp
        "${CXX:-g++}" -std=c++17 -O1 -g1 -march=native -Wno-unknown-pragmas -I. \
            -fsanitize=thread -fno-tree-sra -DCUEMU_COUNT -fsanitize=alignment -fsanitize-undefined-trap-on-error \
            -include tests/emulator/cuda_on_cpu.h -Dmain=conv_main -c lab05.cpp -o lab05_emulated.o &&
            no_arrays lab05_emulated.o &&
            only_emulator_calls lab05_emulated.o "$in_its_main" &&
            "${CXX:-g++}" lab05.o lab05_emulated.o -o lab05 -lm -lpthread || return
    fi
    if wanted 9 && on_gpu; then build_for_gpu; fi
}

build_for_gpu() {
    local nvcc
    nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
    "$nvcc" -std=c++17 -O3 -arch="${CUDA_ARCH:-native}" -I. -Dmain=conv_main -c lab05.cu -o lab05_gpu.o &&
        "$nvcc" lab05.o lab05_gpu.o -o lab05_gpu
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
    8) ./checker steps ;;
    9)
        on_gpu || {
            echo "no GPU was found; this test has no points"
            return 77
        }
        WORKER_MAY_OPEN=1 WORKER=./lab05_gpu ./checker speed
        ;;
    esac
}
