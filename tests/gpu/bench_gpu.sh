#!/usr/bin/env bash
# make bench-gpu: training steps of ./cnn on the GPU, beside PyTorch's on the same GPU in the same run, and how
# close they come to the limits of the device. Quote ratios within one run; the clocks of a GPU vary.
#
#   tests/gpu/bench_gpu.sh              the networks and variants below, then PyTorch, if a python3 has it
#   EMULATE=1 tests/gpu/bench_gpu.sh    tiny networks in the emulator, without speeds or PyTorch, to see it work
#
# NETS="mnist,64 resnet18,128": only these; cifar64 is --model cifar --width 64. VARIANTS="fp32 bf16": only these.
# MODES="eager graph": how PyTorch runs (compiling resnet50 takes minutes), or none. PYTHON=...: one that imports
# torch. LIMITS=none: without the limits of the device.
# OUT=DIR: build/bench_gpu's JSON, one file for each variant.
#
# A line of key=value for each measurement, then a table, also of what was measured if this is stopped. step_ms is the
# median of a step of ./cnn on a data set in the GPU's memory, loader, log and the loss's way to the host included.
# roofline_ms is what build/bench_gpu explains.
# Exit status 77 without a GPU; 1 if ./cnn failed, but not if it refused a variant, which the line then says.
set -u
cd "$(dirname "$0")/../.." || exit 1
export LC_ALL=C PYTHONDONTWRITEBYTECODE=1
# The variants: name, the precision of PyTorch to compare with, options of ./cnn
variants='
fp32       fp32 --kernels tiled
tf32       tf32 --kernels tensor --precision tf32
bf16       bf16 --kernels tensor --precision bf16
fp16       fp16 --kernels tensor --precision fp16
bf16+graph bf16 --kernels tensor --precision bf16 --graph on
'
nets=${NETS:-"mnist,64 resnet18,128 cifar64,250 resnet50,256 cifar64,50"}
cnn=./cnn operations=build/bench_gpu emulated='' device=cuda
if [ "${EMULATE:-0}" != 0 ]; then
    nets=${NETS:-"mnist,2 cifar6,3 resnet8,2"}
    cnn=./cnn-emu operations=build/emu_bench_gpu emulated=yes device=cpu
    MODES=${MODES:-none} # PyTorch would run on the CPU
fi
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
failed=0

# of_variants FIELDS: of the lines above, those of the wanted variants
of_variants() {
    awk -v wanted=" ${VARIANTS:-} " 'NF && (wanted == "  " || index(wanted, " " $1 " "))' <<<"$variants" |
        tr -s ' ' | cut -d ' ' -f "$1"
}

# say LINE: to stdout, and kept for the table
say() { echo "$*" | tee -a "$tmp/lines"; }
value() { grep -oP "(^| )$1=\K[^ ]+" | tail -n 1; }
reason() { grep -m 1 -oP 'error: \K.*' "$1" || tail -n 1 "$1"; }

# Without PyTorch: no comparison
python=
[ "${MODES:-}" = none ] || python=$(tests/python_with.sh torch)
[ -n "$python" ] || [ "${MODES:-}" = none ] || echo "No Python with PyTorch was found: no comparison"

# limits VARIANT OPTIONS...: the roofline of every network, by build/bench_gpu
limits() {
    local variant=$1 status json=()
    shift
    [ -z "${OUT:-}" ] || json=(--json "$tmp/operations")
    "$operations" --nets "$nets" "${json[@]}" "$@" >"$tmp/limits-$variant" 2>"$tmp/err" </dev/null
    status=$?
    case $status in
    0)
        say "variant=$variant $(grep '^emulated=' "$tmp/limits-$variant")"
        [ -z "${OUT:-}" ] || mv "$tmp/operations" "$OUT/operations-$variant.json" # never half of it
        ;;
    2) say "variant=$variant refused: $(reason "$tmp/err")" ;;
    77) cat "$tmp/err" >&2 && exit 77 ;;
    *) say "variant=$variant failed: $(reason "$tmp/err")" && failed=1 ;;
    esac
    return $status
}

# median_step: milliseconds, of the steps after the warm-up
median_step() {
    awk -F , 'NR == 1 { for (i = 1; i <= NF; i++) column[$i] = i }
        NR > 1 && !$column["warmup"] { print 1e3 * $column["seconds"] }' "$tmp/run/steps.csv" |
        sort -g | awk '{ ms[NR] = $1 } END { print NR, (ms[int((NR + 1) / 2)] + ms[int(NR / 2) + 1]) / 2 }'
}

# ours NET VARIANT OPTIONS...: a line with the median of a step
ours() {
    local net=$1 variant=$2 model=${1%,*} batch=${1#*,} width=6 steps=300 status line count ms limit
    shift 2
    case $model in
    cifar*) width=${model#cifar} model=cifar ;;
    resnet*) steps=40 ;;
    esac
    [ -z "$emulated" ] || steps=2
    line="net=${net%,*} batch=$batch variant=$variant options=$(tr ' ' , <<<"$*")"
    rm -rf "$tmp/run" && mkdir "$tmp/run"
    "$cnn" --model "$model" --width "$width" --batch-size "$batch" --dataset synthetic --epochs 1 \
        --limit-train $((batch * steps)) --limit-test "$batch" --log-interval 100000 --quiet --out "$tmp/run" \
        "$@" >"$tmp/out" 2>"$tmp/err" </dev/null
    status=$?
    if [ $status = 2 ]; then
        say "$line refused: $(reason "$tmp/err")"
    elif [ $status != 0 ]; then
        failed=1
        say "$line failed: $(reason "$tmp/err")"
    elif [ -n "$emulated" ]; then
        say "$line steps=$(($(wc -l <"$tmp/run/steps.csv") - 1)) emulated=true"
    else
        read -r count ms < <(median_step)
        limit=$(grep -s "^net=$model width=$width batch=$batch " "$tmp/limits-${variant%+*}")
        say "$line steps=$count step_ms=$ms $(awk -v batch="$batch" -v ms="$ms" \
            -v roofline="$(value roofline_ms <<<"$limit")" -v mflop="$(value mflop <<<"$limit")" '
                BEGIN {
                    printf "img_per_s=%.1f", 1e3 * batch / ms
                    if (mflop)
                        printf " gflops=%.0f roofline_ms=%s percent_of_roofline=%.1f", mflop / ms, roofline,
                            100 * roofline / ms
                }')"
    fi
}

# theirs NET: PyTorch's lines; the first time also the products that it times to show what the GPU can do
lines_of_torch='^torch '
theirs() {
    local options=(--precisions "$(of_variants 2 | sort -u | xargs)")
    [ -n "$python" ] || return
    [ -z "${MODES:-}" ] || options+=(--modes "$MODES")
    "$python" tests/gpu/bench_pytorch_gpu.py --nets "$1" --device $device "${options[@]}" >"$tmp/out" 2>"$tmp/err"
    case $? in
    0) grep "$lines_of_torch" "$tmp/out" | tee -a "$tmp/lines" && lines_of_torch=' net=' ;;
    77) python= && cat "$tmp/err" ;;
    *) say "torch net=${1%,*} failed: $(tail -n 1 "$tmp/err")" ;;
    esac
}

table() {
    awk '
        function get(key,    i) {
            for (i = 1; i <= NF; i++)
                if (index($i, key "=") == 1)
                    return substr($i, length(key) + 2)
        }
        function least(key, ms) { if (!(key in best) || ms < best[key]) best[key] = ms }
        function ratio(key, ms) { return key in best && ms > 0 ? sprintf("%.2f", best[key] / ms) : "-" }
        function or_dash(key, format) { return get(key) == "" ? "-" : sprintf(format, get(key)) }
        function or_none(key) { return key in best ? sprintf("%.3f", best[key]) : "-" }
        /^torch .* step_ms=/ {
            key = get("net") "," get("batch") "," get("precision")
            least((get("run") == "eager" ? "eager," : "graph,") key, get("step_ms") + 0)
        }
        FNR == NR { next }
        FNR == 1 {
            printf "\n%-9s %5s %-10s %10s %10s %10s %10s %12s %6s %12s %6s\n", "network", "batch", "variant",
                "step ms", "img/s", "GFLOP/s", "% roofline", "torch eager", "ratio", "torch graph", "ratio"
        }
        /^net=.* step_ms=/ {
            precision = get("variant")
            sub(/\+.*/, "", precision)
            key = get("net") "," get("batch") "," precision
            ms = get("step_ms")
            printf "%-9s %5d %-10s %10.3f %10.1f %10s %10s %12s %6s %12s %6s\n", get("net"), get("batch"),
                get("variant"), ms, get("img_per_s"), or_dash("gflops", "%.0f"),
                or_dash("percent_of_roofline", "%.1f"), or_none("eager," key), ratio("eager," key, ms),
                or_none("graph," key), ratio("graph," key, ms)
        }' "$tmp/lines" "$tmp/lines"
    echo "torch eager: ms of the faster of NCHW and NHWC in the same precision; torch graph: of torch.compile and"
    echo "a CUDA graph; ratio: how many times as fast ./cnn is. % roofline: of tensor cores, relative to the best"
    echo "that these kernels reach in a large convolution (peak=own_product above)."
}

# Bash waits for a program before it handles the signal, which that program gets as well
trap '[ -n "$emulated" ] || table; exit 143' TERM

while read -r variant _ options; do
    # a graph does not change the operations
    # shellcheck disable=SC2086 # the options are several words
    case ${LIMITS:-}$variant in none* | *+graph) ;; *) limits "$variant" $options ;; esac
done < <(of_variants 1-)
for net in $nets; do
    while read -r variant _ options; do
        # shellcheck disable=SC2086
        ours "$net" "$variant" $options
    done < <(of_variants 1-)
    theirs "$net"
done
[ -n "$emulated" ] || table
exit $failed
