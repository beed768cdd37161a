# Lab 7: the loss scaler, the layouts and the fused update, on a GPU or in the emulator; then run folders of
# precisions and of the ladder. check.sh reads this.
# shellcheck shell=bash disable=SC2015,SC2119,SC2154 # check.sh exports home, from and work
# shellcheck source=labs/check/kernels.sh
. "$home/labs/check/kernels.sh"

tests() {
    cat <<'END'
2|7.1|gradients that are not finite are counted: Inf, -Inf and NaN, anywhere
2|7.1|the scale is halved after a skipped step, and doubled after GROWTH_INTERVAL good ones
2|7.1|an infinite gradient skips exactly one step; all others are as if it had not been there
3|7.2|NHWC and NCHW: where each element lies, and which pixel and channel an index is
1|7.2|images of the loader, and a max-pool, in both layouts
3|7.3|the fused update computes what its definition says: sgd, adadelta, fp32, fp16
1|7.3|a step that is skipped changes nothing
2|7.3|an update is one kernel, which reads and writes each number once
2|-|precisions: the losses in bf16 and fp16 are near the fp32 losses, which are also the CPU's
2|-|the ladder: all rungs, one change each; ablation.csv has the numbers of the run folders
END
}

# What the parts may call of cnn_kernels.cu, and of CUDA besides launches.
# shellcheck disable=SC2034 # kernels.sh reads it
may_call='element first_of_pack load store load_pack store_pack load_chunk store_chunk'
may_call+=' ceil_div check stream layout_of at channel pixel update'
may_call+=' cudaGetLastError cudaError_t cudaSuccess cudaGetErrorString cudaDeviceSynchronize cudaStream_t'

# Appended to the kernels: what Layout says, for a test; and tables with what is tested
# shellcheck disable=SC2089,SC2090
appended='
static __global__ void lab_layout_kernel(unsigned *at, unsigned *channel, unsigned *pixel, Layout l, unsigned count) {
    unsigned i = element();
    if (i < count) {
        at[i] = l.at(i / l.channels, i % l.channels);
        channel[i] = l.channel(i);
        pixel[i] = l.pixel(i);
    }
}
extern "C" void lab_layout(unsigned *at, unsigned *channel, unsigned *pixel, Shape s, bool nchw, unsigned count) {
    LAUNCH(lab_layout_kernel, count, at, channel, pixel, layout_of(s, nchw), count);
}
template <class T> static Kernels tested_kernels(Precision precision) {
    Kernels k = {};
    k.device = &gpu_device;
    k.choice = TILED;
    k.precision = precision;
    k.element_bytes = sizeof(T);
    k.layers[MAXPOOL2D].forward = each<maxpool2d_forward_kernel<T>, outputs>;
    k.load_images = load_images<T>;
    k.update[ADADELTA] = update<T, Adadelta>;
    k.update[SGD] = update<T, Sgd>;
    k.count_not_finite = count_not_finite;
    k.adjust_scale = adjust_scale;
    return k;
}
extern "C" const Kernels *cuda_kernels(size_t i) {
    static const Kernels kernels[] = {tested_kernels<real>(FP32), tested_kernels<__half>(FP16)};
    return i < 2 ? &kernels[i] : NULL;
}'

build() {
    wanted 1 2 3 4 5 6 7 8 || return 0
    { cut_kernels 7 3 'static double peak_gflops(void) { return 0; }' own && echo "$appended"; } >lab07.cu
    "${CC:-gcc}" -std=gnu17 -g1 -march=native -w -c labs/check/lab07.c -o lab07.o || return
    if wanted 8; then emulated lab07_counted lab07 "${CXX:-g++}" -O1 -fsanitize=thread -DCUEMU_COUNT || return; fi
    if wanted 1; then build_races || return; fi
    emulated lab07_emulated lab07 "${CXX:-g++}" -O0 -g1 && only_emulator_calls lab07_emulated.o &&
        if on_gpu; then for_gpu lab07_gpu lab07; fi
}

build_races() { # clang's race detector is faster and finds more
    local cxx=${CXX:-g++} tsan=(-g -O1 -fsanitize=thread)
    if clang++ "${tsan[@]}" -x c++ - -o /dev/null 2>/dev/null <<<'int main() {}'; then
        cxx=clang++
    fi
    emulated_kernels lab07_races.o lab07 "$cxx" "${tsan[@]}" &&
        "$cxx" "${tsan[@]}" lab07.o lab07_races.o -o lab07_races -lm -lpthread
}

# races: a counter to which threads add one after the other, as in the emulator, is right without atomicAdd, too
races() {
    TSAN_OPTIONS='halt_on_error=1 exitcode=66' ./lab07_races race >said 2>&1 <<<"" 8>/dev/null 9>/dev/null && return
    if ! grep -q 'data race' said; then
        tail -n 5 said
        return 1
    fi
    echo "a race: two threads access the same number, and one writes it without an atomic operation:" \
        "not_finite needs atomicAdd"
    grep -E -m 2 '(Write|Read|Previous (write|read)) of size' said
    return 1
}

tested() { if on_gpu; then ./lab07_gpu "$@"; else ./lab07_emulated "$@"; fi; }

run() {
    export CUEMU_PROTECT=1
    case $1 in
    1) races && tested count ;;
    2) tested adjust ;;
    3) tested sequence ;;
    4) tested layout ;;
    5) tested images ;;
    6) tested update ;;
    7) tested skipped ;;
    8) ./lab07_emulated launches <<<none 9>/dev/null && traffic && return_token ;;
    9) # on the CPU the checker trains as the run in fp32 did
        "${CC:-gcc}" -std=gnu17 -O1 -w cnn.c -o cnn -lm -lpthread &&
            bash "$home/labs/check/runs.sh" 7 9 "$from" && return_token ;;
    10) bash "$home/labs/check/runs.sh" 7 10 "$from" && return_token ;;
    esac
}
return_token() { cat >&9; }

# traffic: what the update of 4096 parameters reads and writes, with momentum and a copy in 16 bits
traffic() {
    ./lab07_counted traffic <<<none 9>/dev/null 2>table || { tail -n 3 table; return 1; }
    # (bytes) are columns 4 and 6; a thread also reads up to 24 bytes of scale, counter and learning rate
    awk -v count=4096 '
        # the name may have blanks: of a template with two arguments
        NF >= 10 && $(NF - 8) ~ /^[0-9]+$/ && $1 != "set_step_kernel" {
            gsub(/[()]/, "")
            if ($(NF - 6) < 0 || $(NF - 4) < 0) bad = 1
            reads += $(NF - 6); writes += $(NF - 4)
        }
        END {
            if (bad || writes != 10 * count) {
                printf "the update of %d parameters has written %d bytes, expected %d: param and momentum 4 each, param16 2\n",
                    count, writes, 10 * count
                exit 1
            }
            if (reads < 12 * count || reads > 36 * count) {
                printf "the update of %d parameters has read %d bytes; expected %d for param, gradient and momentum, " \
                    "and at most %d more for scale, counter and learning rate\n", count, reads, 12 * count, 24 * count
                exit 1
            }
        }' table
}
