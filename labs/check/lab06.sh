# Lab 6: the backward kernels, on a GPU or in the emulator; overlap(), and the trace of a run. check.sh reads this.
# shellcheck shell=bash disable=SC2015,SC2119,SC2154 # check.sh exports home, from and work
# shellcheck source=labs/check/kernels.sh
. "$home/labs/check/kernels.sh"

tests() {
    cat <<'END'
3|6.1|data gradient: one image, filters of several sizes, stride 1
2|6.1|data gradient: strides, padding, several images, linear layers, accumulate
3|6.2|weight gradient: one image, filters of several sizes, stride 1
2|6.2|weight gradient: strides, padding, several images, linear layers
2|6.1 6.2|each gradient is one kernel, with a thread for each result
2|6.3|overlap of spans that are in order
2|6.3|overlap of spans in any order, nested and equal ones
4|6.1 6.2 6.3|the trace of the run lab06: complete, nested, and the overlap that is computed from it
END
}

# What the parts may call of cnn_kernels.cu, and of CUDA besides launches.
# shellcheck disable=SC2034 # kernels.sh reads it
may_call='element unravel input_pixel output_pixel window_of inputs outputs stream ceil_div check data_gradient'
may_call+=' weight_gradient cudaGetLastError cudaError_t cudaSuccess cudaGetErrorString cudaDeviceSynchronize'

appended='
extern "C" void lab_data_gradient(Work w) { data_gradient(w); }
extern "C" void lab_weight_gradient(Work w) { weight_gradient(w); }'

build() {
    if wanted 6 7 8; then "${CC:-gcc}" -std=gnu17 -O1 -w labs/lab06/overlap.c -o overlap || return; fi
    { cut_kernels 6 6 "$without_products" && echo "$appended"; } >lab06.cu
    strip_overlap && compile_overlap && (cd bare && compile_overlap) && only_harmless_calls bare/overlap.o overlap.o &&
        "${CC:-gcc}" -std=gnu17 -g1 -march=native -w -c labs/check/lab06.c -o lab06_tests.o &&
        ld -r lab06_tests.o overlap.o -o lab06.o && emulated lab06_emulated lab06 "${CXX:-g++}" -O0 -g1 &&
        only_emulator_calls lab06_emulated.o && if on_gpu; then for_gpu lab06_gpu lab06; fi
}
strip_overlap() { # with the starter's stub, in the folder bare
    mkdir -p bare/labs/lab06 && cp cnn.c bare && awk -v mode=strip -v from=6 -v stubs=labs/stubs -v file=overlap.c \
        -f labs/check/regions.awk labs/lab06/overlap.c >bare/labs/lab06/overlap.c
}
compile_overlap() {
    "${CC:-gcc}" -std=gnu17 -g1 -w "${by_function[@]}" -Dmain=overlap_main -c labs/lab06/overlap.c -o overlap.o
}
tested() { if on_gpu; then ./lab06_gpu "$@"; else ./lab06_emulated "$@"; fi; }

run() {
    export CUEMU_PROTECT=1
    case $1 in
    1) tested data ;;
    2) tested data-general ;;
    3) tested weight ;;
    4) tested weight-general ;;
    5) ./lab06_emulated launches ;;
    6) ./lab06_emulated overlap ;;
    7) ./lab06_emulated overlap-general ;;
    8) parts_are_right && trace_of_run && return_token ;;
    esac
}
return_token() { cat >&9; }

# ---- Test 8

# The run shows the student's own kernels, so these have to be right.
parts_are_right() {
    local part
    for part in data-general weight-general overlap-general; do
        ./lab06_emulated $part >/dev/null 2>&1 <<<"" 8>/dev/null 9>/dev/null && continue
        echo "tests 1 to 7 have to pass first: this one checks a run with correct parts only"
        return 1
    done
}

trace_of_run() {
    "${CC:-gcc}" -std=gnu17 -O1 -w cnn.c -o cnn -lm -lpthread && bash "$home/labs/check/runs.sh" 6 8 "$from"
}
