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

# What a part may call, besides functions that it defines itself. The words before ( in C count as calls.
may_call='one four patch_at weight_at ceil_div CHECK CHECK_LAUNCH __syncthreads min max fmaf make_float4 printf'
may_call+=' if for while switch return sizeof int unsigned float const static_assert __launch_bounds__ __align__'

# vet_part ID: other calls, and what only the host has a use for. dim3 grid(...) declares variables.
vet_part() {
    local words='emu|EMU_.*|CUEMU.*|lab_.*|__tsan.*|__builtin.*|cu[A-Z].*|cuda.*|conv_naive|naive_kernel|changes'
    words+='|std|w?mem(cpy|move|set|ccpy)|w?mempcpy|bcopy|swab|st[pr]n?cpy' # copies that nobody would count
    [ "$1" != 5.0 ] || return 0
    awk -f "$home/labs/check/code.awk" "$parts/$1" | awk -v id="$1" -v may_call="$may_call" -v words="^($words)$" '
        BEGIN { split(may_call, list, " "); for (i in list) may[list[i]] = 1 }
        { text[NR] = $0; sub(/__launch_bounds__ *\([^)]*\)/, "") }
        /auto +[a-z_]+ *= *\[/ && match($0, /auto +[a-z_]+/) { may[substr($0, RSTART + 5, RLENGTH - 5)] = 1 }
        # a definition, whose name may also stand at the beginning of its second line
        /^(static|template|inline|__global__|__device__|void|float|int|[A-Za-z_0-9]+\(|    [a-z_0-9]+\(Conv)/ &&
            !/;[ \t]*$/ && match($0, /[A-Za-z_][A-Za-z0-9_]*\(/) { may[substr($0, RSTART, RLENGTH - 1)] = 1 }
        END {
            for (n = 1; n <= NR; n++)
                for (line = text[n]; match(line, /[A-Za-z_][A-Za-z0-9_]*[ \t]*(\(|<<<)?/);) {
                    word = substr(line, RSTART, RLENGTH)
                    line = substr(line, RSTART + RLENGTH)
                    call = sub(/[ \t]*(\(|<<<)$/, "", word)
                    if (word ~ words || call && !(word in may) && text[n] !~ /dim3/) {
                        print "TODO " id ", line " n ": " word ": a part may call one(), four(), patch_at(), " \
                            "weight_at(), ceil_div() and what it defines itself"
                        exit
                    }
                }
        }'
}

# One build finds what is wrong and counts. Without the option, gcc reads the 16 bytes of a float4 one by one.
build() {
    wanted 1 2 3 4 5 6 7 8 9 || return 0
    { echo '#line 1 "conv.cu"' && cat labs/lab05/conv.cu labs/check/lab05_device.cu; } >lab05.cu
    "${CC:-gcc}" -std=gnu17 -O1 -g -Wall -Wextra -c labs/check/lab05.c -o lab05.o || return
    if wanted 1 2 3 4 5 6 7 8; then
        sed -f tests/emulator/cuda_on_cpu.sed lab05.cu >lab05.cpp
        "${CXX:-g++}" -std=c++17 -O1 -g -march=native -Wno-unknown-pragmas -I. \
            -fsanitize=thread -fno-tree-sra -DCUEMU_COUNT -fsanitize=alignment -fsanitize-undefined-trap-on-error \
            -include tests/emulator/cuda_on_cpu.h -Dmain=conv_main -c lab05.cpp -o lab05_emulated.o &&
            no_arrays lab05_emulated.o && "${CXX:-g++}" lab05.o lab05_emulated.o -o lab05 -lm -lpthread || return
    fi
    if wanted 9 && on_gpu; then build_for_gpu; fi
}

# The parts have no arrays outside of a kernel: accesses to those would not be counted.
no_arrays() {
    local found
    found=$(nm -C "$1" | sed -nE 's/^[0-9a-f]+ [bBdDu] (guard variable for )?//p' |
        grep -vE '^(emu::|std::|lab_|changes$|__tls_guard$)')
    [ -z "$found" ] || {
        echo "error: variable $(head -n 1 <<<"$found"): declare it in the kernel, and not static"
        return 1
    }
}

build_for_gpu() {
    local nvcc
    nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
    "$nvcc" -std=c++17 -O3 -arch="${CUDA_ARCH:-native}" -I. -Dmain=conv_main -c lab05.cu -o lab05_gpu.o &&
        "$nvcc" lab05.o lab05_gpu.o -o lab05_gpu
}

# The threads of a block run in this order, and in the reverse one.
right() {
    CUEMU_ORDER=1 ./lab05 right "$1" <<<"" 9>/dev/null && ./lab05 right "$1"
}

run() {
    export CUEMU_PROTECT=1 CUEMU_CORES=1
    case $1 in
    1) right 1 ;;
    2) ./lab05 counts 1 ;;
    3) right 2 ;;
    4) ./lab05 counts 2 ;;
    5) right 3 ;;
    6) ./lab05 counts 3 ;;
    7) right 4 ;;
    8) ./lab05 steps ;;
    9)
        on_gpu || {
            echo "no GPU was found; this test has no points"
            return 77
        }
        ./lab05_gpu speed
        ;;
    esac
}
