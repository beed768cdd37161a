# shellcheck shell=bash disable=SC2154 # check.sh exports home
# Lab 4, for check.sh: the kernels between guard zones, on a GPU or in the emulator, and the timer
# on a simulated device.
# shellcheck source=labs/check/kernels.sh
. "$home/labs/check/kernels.sh"

tests() {
    cat <<'END'
3|4.1|ReLU: all elements of each size are written, and nothing else
1|4.1|ReLU in place; a NaN stays a NaN
3|4.2|bias: each channel gets its own
4|4.3|convolution: filters of several sizes, stride 1, no padding
3|4.3|convolution: strides, padding, several images, linear layers
2|4.1 4.2 4.3|no element is written by two threads (race detector, three orders of threads)
1|4.1 4.2 4.3|kernels do the work, with one thread per element
2|4.4|the timer waits until the device has done what it measures
1|4.4|the timer counts neither the slow first call nor earlier work
END
}

# What the parts in sections 2 and 5 may call of cnn_kernels.cu, and of CUDA besides launches.
# shellcheck disable=SC2034 # kernels.sh reads it
may_call='element unravel input_pixel window_of inputs outputs stream ceil_div check'
may_call+=' cudaGetLastError cudaPeekAtLastError cudaError_t cudaSuccess cudaGetErrorString'
may_call+=' cudaDeviceSynchronize cudaStreamSynchronize cudaStream_t'
# shellcheck disable=SC2034
launching='4.1 4.2 4.3'

# Compiling takes longer than any test, hence -O1.
build() {
    local pids=() pid failed=0
    if wanted 1 2 3 4 5 6 7; then
        cut_kernels 4 6 "$without_products" >lab04.cu
        echo 'extern "C" void lab_add_bias(Work w) { add_bias(w); }' >>lab04.cu
        "${CC:-gcc}" -std=gnu17 -g1 -march=native -w -c labs/check/lab04.c -o lab04.o &&
            "${CC:-gcc}" -std=gnu17 lab04.o labs/check/apart.c -o checker -lm -lpthread || return
        emulated lab04_emulated lab04 "${CXX:-g++}" -O1 -g1 &
        pids+=($!)
    fi
    if wanted 6; then
        build_races &
        pids+=($!)
    fi
    if on_gpu && wanted 1 2 3 4 5; then
        for_gpu lab04_gpu lab04 &
        pids+=($!)
    fi
    if wanted 8 9; then build_timer || failed=1; fi
    for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
    [ $failed = 0 ] || return
    ! wanted 1 2 3 4 5 6 7 || only_emulator_calls lab04_emulated.o
}

build_races() { # clang's race detector is faster and finds more
    local cxx=${CXX:-g++} tsan=(-g -fsanitize=thread)
    if clang++ "${tsan[@]}" -x c++ - -o /dev/null 2>/dev/null <<<'int main() {}'; then
        cxx=clang++
    elif ! "$cxx" "${tsan[@]}" -x c++ - -o /dev/null 2>/dev/null <<<'int main() {}'; then
        return 0 # test 6 says so
    fi
    emulated_kernels lab04_races.o lab04 "$cxx" "${tsan[@]}" &&
        "$cxx" "${tsan[@]}" lab04.o lab04_races.o -o lab04_races -lm -lpthread
}

build_timer() { # it reads our clock, and no GPU is in its program
    bare_sources && mkdir -p bare/labs/lab04 && compile_crossover . &&
        awk -v mode=strip -v from=4 -v stubs=labs/stubs -v file=crossover.c -f labs/check/regions.awk \
            labs/lab04/crossover.c >bare/labs/lab04/crossover.c && compile_crossover bare &&
        only_harmless_calls bare/lab04_crossover.o lab04_crossover.o lab_clock_gettime || return
    "${CC:-gcc}" -std=gnu17 -g1 -Wall -Wextra -c labs/check/lab04_timer.c -o lab04_timer.o &&
        "${CC:-gcc}" lab04_timer.o lab04_crossover.o -o lab04_timer -lm -lpthread &&
        "${CC:-gcc}" -std=gnu17 lab04_timer.o labs/check/apart.c -o timer -lm -lpthread
}
compile_crossover() { # compile_crossover FOLDER: of the sources there
    # the fast kernels, which use the system's threads, are in neither
    (cd "$1" && "${CC:-gcc}" -std=gnu17 -g1 -w "${by_function[@]}" -DCNN_NO_KERNELS \
        -Dclock_gettime=lab_clock_gettime -Dmain=crossover_main -c labs/lab04/crossover.c -o lab04_crossover.o)
}

# Runs the race detector and prints its report in terms of the lab.
races() {
    local order
    if [ ! -e lab04_races ]; then
        echo "found no thread sanitizer; to earn these points install gcc's libtsan, or clang, and run" \
            "make check LAB=4 again"
        return 77
    fi
    for order in 0 1 7; do
        CUEMU_ORDER=$order TSAN_OPTIONS=halt_on_error=1 WORKER_MAY_OPEN=1 WORKER=./lab04_races \
            ./checker 6 >said 2>&1 </dev/null 8>&- 9>&- && continue
        if grep -q 'data race' said; then
            echo "a race: two threads access the same number in the device's memory, and at least one" \
                "writes it; only one thread may write each element of the output"
            grep -E -m 2 '(Write|Read|Previous (write|read)) of size' said
            grep -E -m 2 'block \(' said
        else
            tail -n 5 said
        fi
        return 1
    done
}

# Kernels that do nothing have no races.
right() {
    local test
    for test in 1 3 4; do
        ./checker $test >/dev/null 2>&1 <<<"" 8>/dev/null 9>/dev/null && continue
        echo "test $test has to pass first: this one checks correct kernels only"
        return 1
    done
}

run() {
    export CUEMU_PROTECT=1
    case $1 in
        6) right && races && ./checker 0 ;;
        7) right && ./checker 7 ;;
        8 | 9) ./timer "$1" ;;
        *) if on_gpu; then WORKER_MAY_OPEN=1 WORKER=./lab04_gpu ./checker "$1"; else ./checker "$1"; fi ;;
    esac
}
