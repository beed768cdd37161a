# Lab 7: the loss scaler, the layouts and the fused update, on a GPU or in the emulator; then run folders of
# precisions and of the ladder. check.sh reads this.
# shellcheck shell=bash disable=SC2119,SC2154 # check.sh exports home, from and work
# shellcheck source=labs/check/kernels.sh
. "$home/labs/check/kernels.sh"

tests() {
    cat <<'END'
2|7.1|gradients that are not finite are counted: Inf, -Inf and NaN, anywhere
2|7.1|the scale is halved after a skipped step, and doubled after SCALE_STEPS good ones
2|7.1|an infinite gradient skips exactly one step; the others go on as if it had not been
3|7.2|NHWC and NCHW: where each element lies, and which pixel and channel an index is
1|7.2|images of the loader, and a max-pool, in both layouts
3|7.3|the fused update computes what its definition says: sgd, adadelta, fp32, fp16
1|7.3|a step that is skipped changes nothing
2|7.3|an update is one kernel, which reads and writes each number once
END
}

# shellcheck disable=SC2034 # check.sh reads it
harmless='read write' # cnn_kernels.cu has functions of these names

# What the parts may call of cnn_kernels.cu, and of CUDA besides launches.
# shellcheck disable=SC2034 # kernels.sh reads it
may_call='element first_of_pack load store read write ceil_div check stream layout_of at channel pixel update'
may_call+=' cudaGetLastError cudaError_t cudaSuccess cudaGetErrorString cudaDeviceSynchronize cudaStream_t'

# Appended to the kernels: what Layout says, for a test
layout_test='
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
}'

build() {
    { cut_kernels 7 && echo "$layout_test"; } >lab07.cu
    "${CC:-gcc}" -std=gnu17 -g -march=native -w -DCNN_CUDA -c labs/check/lab07.c -o lab07.o || return
    if wanted 8; then emulated lab07_counted lab07 "${CXX:-g++}" -O1 -fsanitize=thread -DCUEMU_COUNT || return; fi
    emulated lab07_emulated lab07 "${CXX:-g++}" -O1 -g && if on_gpu; then for_gpu lab07_gpu lab07; fi
}
tested() { if on_gpu; then ./lab07_gpu "$@"; else ./lab07_emulated "$@"; fi; }

run() {
    export CUEMU_PROTECT=1
    case $1 in
    1) tested count ;;
    2) tested adjust ;;
    3) tested sequence ;;
    4) tested layout ;;
    5) tested images ;;
    6) tested update ;;
    7) tested skipped ;;
    8) ./lab07_emulated launches <<<none 9>/dev/null && traffic && return_token ;;
    esac
}
return_token() { cat >&9; }

# traffic: what the update of 4096 parameters reads and writes, with momentum and a copy in 16 bits
traffic() {
    ./lab07_counted traffic <<<none 9>/dev/null 2>table || { tail -n 3 table; return 1; }
    # (bytes) are columns 4 and 6; a thread also reads up to 24 bytes of scale, counter and learning rate
    awk -v count=4096 '
        NF == 10 && $2 ~ /^[0-9]+$/ && $1 != "set_step_kernel" {
            gsub(/[()]/, "")
            if ($4 < 0 || $6 < 0) bad = 1
            reads += $4; writes += $6
        }
        END {
            if (bad || writes != 10 * count) {
                printf "the update of %d parameters has written %d bytes, expected %d: param and momentum 4 each, low 2\n",
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
