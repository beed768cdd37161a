#!/usr/bin/env bash
# Tests the GPU's kernels on the CPU, by the emulator in cuda_on_cpu.h: each operation against its
# definition, races, accesses out of range, whole runs of ./cnn-emu against the CPU's; and whether
# bugs inserted into the kernels are noticed.
# CC, CXX, CLANGXX=COMPILER, ARCH as for make. QUICK=1: fewer shapes, precisions and runs, no sanitizers, no bugs.
# LONG=1: all of it; else, by turns of days, all shapes and accesses out of range, or races and a fifth of the bugs.
# Prints `pass cuda/NAME`, `fail cuda/NAME: expected ..., found ...` or `skip cuda/NAME: why`.
# shellcheck disable=SC2317 # some functions are called by xargs only
suite=cuda
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd) || exit 1
cc=${CC:-gcc} cxx=${CXX:-g++} clangxx=${CLANGXX:-clang++} arch=${ARCH:-native}
if ! command -v "$cxx" >/dev/null; then
    echo "skip cuda/all: $cxx is not installed"
    exit 0
fi
make -s -C "$repo" cnn-emu build/emu_test_cuda build/emu_test_tensor >/dev/null 2>&1 ||
    { echo "fail cuda/build: make cnn-emu build/emu_test_cuda build/emu_test_tensor"; exit 1; }
CNN=$repo/cnn-emu
# shellcheck source=tests/lib.sh
source "$repo/tests/lib.sh" || exit 1
export ASAN_OPTIONS=detect_leaks=0 TSAN_OPTIONS=halt_on_error=1
unset CUDA_VISIBLE_DEVICES CUEMU_DEVICES CUEMU_MEMORY CUEMU_ORDER CUEMU_LAZY CUEMU_PROTECT CUEMU_FAIL CUEMU_GRID CUEMU_SM
export CUEMU_STRICT=1
ulimit -c 0
build=$repo/build/cuda
mkdir -p "$build"

not_this_half=$([ -n "${QUICK:-}" ] && echo QUICK=1 || echo "another day; LONG=1: today")
# half I: whether half 0 or 1 of what takes longest is tried. They change every second day, since make test-all runs
# this part in full on every second day.
half() { [ -z "${QUICK:-}" ] && { [ -n "${LONG:-}" ] || [ $(($(day) / 2 % 2)) -eq "$1" ]; }; }

# kernels COMPILER OPTIONS... -o OBJECT <KERNELS.cu: compiled for the emulator
kernels() {
    { echo '#line 1 "cnn_kernels.cu"' && sed -f "$repo/tests/emulator/cuda_on_cpu.sed"; } |
        "$1" -std=c++17 "-march=$arch" -Wno-unknown-pragmas -I"$repo" \
            -include "$repo/tests/emulator/cuda_on_cpu.h" "${@:2}" -x c++ -c -
}

# link PROGRAM COMPILER OPTIONS...: the tests with the kernels in PROGRAM.o
link() { "$2" "${@:3}" "$build/test_cuda.o" "$1.o" -o "$1" -lstdc++ -lm -lpthread; }

# make_program NAME COMPILER OPTIONS...: $build/NAME
make_program() {
    kernels "${@:2}" -o "$build/$1.o" <"$repo/cnn_kernels.cu" 2>"$err" &&
        link "$build/$1" "${@:2}" 2>"$err"
    same "build/$1" "exit 0" "exit $?$(grep -m 3 error "$err")"
}

# checked NAME PROGRAM [VARIABLE=VALUE...] ARGUMENT: prints a program's verdicts under that name
checked() {
    local status reports='ERROR|WARNING|SUMMARY|^cuda_on_cpu|^cnn:'
    env "${@:3:$#-3}" timeout 600 "$build/$2" "${@: -1}" >"$out" 2>"$err" </dev/null
    status=$?
    sed "s|^\([a-z]*\) cuda/|\1 cuda/$1/|" "$out"
    same "$1/end" "exit 0, no report" \
        "exit $status, $(grep -m 3 -E "$reports" "$err" || echo no report)"
}

test_kernels() {
    local order hashes kernels=all how=()
    [ -z "${QUICK:-}" ] || kernels=tiny how=(CUEMU_LAZY=1 CUEMU_PROTECT=1) # as when bugs are inserted
    half 0 || how+=(QUICK=1) # fewer shapes
    cp "$repo/build/emu_test_cuda" "$build/plain"
    cp "$repo/build/emu_test_tensor" "$build/layouts"
    checked layouts layouts all
    checked order_0 plain CUEMU_ORDER=0 "${how[@]}" all
    checked order_1 plain CUEMU_ORDER=1 CUEMU_LAZY=1 CUEMU_PROTECT=1 QUICK=1 "$kernels"
    hashes=$(for order in 0 1 7; do
        CUEMU_ORDER=$order CUEMU_CORES=$((order % 2 + 1)) "$build/plain" weights
    done | sort | uniq -c | awk '{ print $1, $2 }' | paste -sd ,)
    same "equal_bits_in_any_order" "3 bf16,3 cifar,3 mnist,3 resnet8" "$hashes"
    [ -z "${LONG:-}" ] || checked order_7 plain CUEMU_ORDER=7 CUEMU_LAZY=1 QUICK=1 all
    half 0 || { skip sanitizers "$not_this_half" && return; }
    make_program address "$cxx" -O1 -g1 -fsanitize=address,alignment -fno-sanitize-recover=all
    checked address address QUICK=1 all
}

# The race detector: clang's is four times as fast as gcc's, and finds more.
choose_tsan() {
    local options=(-O1 -g1 -fsanitize=thread)
    tsan=("$cxx" "${options[@]}")
    if "$clangxx" -fsanitize=thread -x c++ - -o /dev/null 2>/dev/null <<<'int main() {}'; then
        tsan=("$clangxx" "${options[@]}")
    fi
}

test_races() {
    local order
    make_program thread "${tsan[@]}"
    for order in 1 ${LONG:+0 7}; do
        checked "races/order_$order" thread "CUEMU_ORDER=$order" tiny
    done
}

# ---- Runs

# train NAME OPTIONS...: a run whose folder is NAME; at its end all memory and graphs of the GPU are freed
train() {
    local name=$1
    shift
    CUEMU_LEAKS=1 run --dataset synthetic --limit-test 8 --epochs 1 --out "$tmp/$name" "$@"
    same "run/$name" "exit 0, " "exit $status, $(grep -v '^cnn: warning' "$err")"
}
losses() { cut -d , -f 5 "$tmp/$1/steps.csv"; }
scratch_mb() { grep -oP '^Memory in MB.* scratch \K[\d.]+' "$out"; } # of the last run

# equal A B: the same losses; close A B: within 1e-4 of each other
equal() { same "$1_as_$2" "$(losses "$2")" "$(losses "$1")"; }
close() {
    same "$1_as_$2" "$(losses "$2" | wc -l) losses" "$(paste <(losses "$2") <(losses "$1") |
        awk '$1 == $2 || ($1 - $2) ^ 2 <= (1e-4 * $1) ^ 2 { n++ } END { print n + 0 }') losses"
}

test_runs() {
    local model images=48
    [ -n "${QUICK:-}" ] || images=256
    for model in "mnist $images 64" "cifar $((images / 4)) 4" "resnet8 80 16"; do
        read -ra model <<<"$model"
        [ -n "${QUICK:-}" ] && [ "${model[0]}" = resnet8 ] && continue
        local options=(--model "${model[0]}" --limit-train "${model[1]}" --batch-size "${model[2]}")
        train "${model[0]}" "${options[@]}"
        line "${model[0]}_says_emulated" '^Emulated: '
        same "${model[0]}_uuid" GPU-63756461-5f6f-6e5f-6370-752030303000 \
            "$(grep -oP '"uuid":"\K[^"]*' "$tmp/${model[0]}/run.json")" # "cuda_on_cpu 000"
        train "${model[0]}_cpu" "${options[@]}" --no-cuda
        close "${model[0]}" "${model[0]}_cpu"
    done
    python run_json "$tmp/cifar/run.json" <<'END'
import json, sys
def find(tree, key):
    if isinstance(tree, dict):
        return [v for k, v in tree.items() if k == key] + [x for v in tree.values()
                                                           for x in find(v, key)]
    return []
run = json.load(open(sys.argv[1]))
if find(run, "emulated") != [True]:
    print("emulated:", find(run, "emulated"))
if "emulated GPU" not in json.dumps(run):
    print("no device is named")
END
}

# How the data reach the device, and the number of launches, must not change a bit.
test_options() {
    local small=(--model cifar --limit-train 22 --batch-size 4 --save-model) workers way
    train base "${small[@]}"
    for way in "resident off" "optimizer-launch per-tensor"; do
        train "${way// /_}" "${small[@]}" "--${way% *}" "${way#* }"
        equal "${way// /_}" base
    done
    train pageable "${small[@]}" --resident off --pin-memory off # with resident data nothing is copied
    line pageable/says_so ' from pageable memory$'
    equal pageable base
    for workers in 1 3; do
        train "workers_$workers" "${small[@]}" --workers $workers --resident off
        holds "workers_$workers/bits" "the same weights" "others" \
            cmp "$tmp/base/model.safetensors" "$tmp/workers_$workers/model.safetensors"
    done
    train crop_flip "${small[@]}" --augment crop-flip
    train crop_flip_copied "${small[@]}" --augment crop-flip --resident off
    equal crop_flip_copied crop_flip
    train elastic "${small[@]}" --augment elastic
    train elastic_cpu "${small[@]}" --augment elastic --no-cuda
    close elastic elastic_cpu # but for a few gray levels
    local resized=(--model cifar --limit-train 6 --batch-size 4 --resize 64 --augment crop-flip)
    train resized "${resized[@]}"
    line resized/row_0 ' 0 +input .* 64 x 64 x 3 '
    for way in "resident off" "layout nchw"; do
        train "resized_${way// /_}" "${resized[@]}" "--${way% *}" "${way#* }"
        close "resized_${way// /_}" resized
    done
    train resized_cpu "${resized[@]}" --no-cuda
    close resized resized_cpu
    same augmented_otherwise different \
        "$([ "$(losses base)" = "$(losses elastic)" ] || echo different)"
    train naive "${small[@]}" --kernels naive
    close naive base
    refused kernels_of_the_gpu 2 "--kernels tiled --precision (any): expected one of these on a CPU: naive in fp32, fast in fp32" \
        --kernels tiled --no-cuda --dataset synthetic
    refused kernels_of_the_cpu 2 "--kernels fast --precision (any): expected one of these on a GPU: naive in fp32, tiled in fp32" \
        --kernels fast --dataset synthetic
    CUDA_VISIBLE_DEVICES='' train no_device "${small[@]}"
    line no_device/says_so '^Device: cpu \(no CUDA-capable device is detected\)'
    train no_device_cpu "${small[@]}" --no-cuda
    equal no_device no_device_cpu
}

# ---- Graphs

graph_of() { grep -o '"graph":[a-z]*}' "$tmp/$1/run.json"; }
hashes_of() { grep -oE '[0-9a-f]{16}$' "$tmp/$1/epochs.csv"; }

# graphed NAME OPTIONS...: the same bits with --graph on as without, in three epochs of full batches and a
# smaller last one: the latter is executed, captured and replayed
graphed() {
    local name=graph_$1
    shift
    train "$name" "$@" --epochs 3
    train "${name}_on" "$@" --epochs 3 --graph on
    equal "${name}_on" "$name"
    same "run/$name/weights" "$(hashes_of "$name")" "$(hashes_of "${name}_on")"
    same "run/$name/used" '"graph":false} "graph":true}' "$(graph_of "$name") $(graph_of "${name}_on")"
}

test_graph() {
    local cifar=(--model cifar --limit-train 14 --batch-size 4) sgd=(--optimizer sgd --lr .1 --momentum .9)
    local adadelta=(--optimizer adadelta --momentum 0 --lr 1 --schedule step) why
    local mnist=(--limit-train 20 --batch-size 8)
    [ -z "${QUICK:-}" ] || mnist=(--limit-train 5 --batch-size 2)
    graphed mnist "${mnist[@]}"
    CUEMU_LAZY=1 graphed cifar_lazy "${cifar[@]}" "${adadelta[@]}" --resident off --augment crop-flip
    graphed cifar_per_tensor "${cifar[@]}" "${sgd[@]}" --nesterov --optimizer-launch per-tensor \
        --warmup-epochs 1
    if [ -z "${QUICK:-}" ]; then
        graphed resnet8 --model resnet8 --limit-train 20 --batch-size 8
        CUEMU_LAZY=1 graphed cifar_elastic "${cifar[@]}" --augment elastic --kernels naive --workers 3
    fi
    # stopped in the middle of the second epoch, and resumed
    local resumed=("${cifar[@]}" "${adadelta[@]}" --resident off --augment crop-flip --epochs 3 --graph on)
    train graph_stopped "${resumed[@]}" --checkpoint graph.ckpt --max-steps 6
    train graph_resumed "${resumed[@]}" --checkpoint graph.ckpt --resume
    same graph_resumed/weights "$(hashes_of graph_cifar_lazy | tail -n 1)" "$(hashes_of graph_resumed | tail -n 1)"
    # what needs the single operations switches it off, and says so
    for why in "--profile" "--trace trace.json" "--layers" "--gpus 2 --oversubscribe"; do
        # shellcheck disable=SC2086 # words
        train graph_off "${cifar[@]}" --graph on --max-steps 3 $why
        line "graph_off/${why%% *}" '^CUDA graph: off, '
        same "graph_off/${why%% *}/run_json" '"graph":false}' "$(graph_of graph_off)"
    done
    refused graph_on_cpu 2 "--graph on: expected a GPU" --graph on --no-cuda --dataset synthetic
}

# blind NAME SED_SCRIPT: with this bug, an argument passed by value, a run without a graph is right, and one
# with a graph is not. QUICK=1: whether it can be planted.
blind() {
    local name=blind_$1 program=$build/blind cnn
    sed -E "$2" "$repo/cnn_kernels.cu" >"$program.cu"
    holds "$name/there" "other kernels" "the same" test -n "$(diff "$repo/cnn_kernels.cu" "$program.cu")"
    if [ -n "${QUICK:-}" ]; then
        kernels "$cxx" -fsyntax-only <"$program.cu" 2>"$err"
        same "$name/compiles" "exit 0" "exit $?$(grep -m 3 error "$err")"
        return
    fi
    kernels "$cxx" -O1 -fopenmp -o "$program.o" <"$program.cu" 2>"$err" &&
        "$cxx" -fopenmp "$build/cnn.o" "$program.o" -o "$program" -lm -lpthread 2>>"$err"
    same "$name/build" "exit 0" "exit $?$(grep -m 3 error "$err")"
    cnn=$program
    train "$name" "${seen[@]}"
    close "$name" seen
    train "${name}_on" "${seen[@]}" --graph on
    same "$name/noticed" yes "$([ "$(losses "${name}_on")" = "$(losses "$name")" ] && echo no || echo yes)"
}

test_blind_graphs() {
    local seen=(--limit-train 16 --batch-size 4 --epochs 2 --gamma .1)
    if [ -z "${QUICK:-}" ]; then
        "$cc" -std=gnu17 -O2 "-march=$arch" -fopenmp -c "$repo/cnn.c" -o "$build/cnn.o" 2>"$err"
        train seen "${seen[@]}"
    fi
    blind learning_rate 's/update_kernel\(Update u\) \{/update_kernel(Update u, StepInputs step) { u.step = \&step;/
        s/(Pack<real>::N\), u)\);/\1, *u.step);/'
    blind key 's/dropout_forward_kernel\(Row r,/dropout_forward_kernel(RandomKey key, Row r,/
        s/\*r\.key, image/key, image/; s/r\.key->epoch/key.epoch/; s/r\.key->seed/key.seed/; s/w\.n \* blocks_of_image, row_of\(w\)/w.n * blocks_of_image, *w.key, row_of(w)/'
}

# The ranges for Nsight: steps, in them the lines of train(), in these the rows; they open and close in pairs.
test_ranges() {
    local small=(--model cifar --dataset synthetic --limit-train 16 --batch-size 4 --limit-test 8 --epochs 1)
    CUEMU_RANGES=1 run "${small[@]}" --gpus 2 --oversubscribe --trace-steps 0:2
    same ranges "2 threads with steps, 2 with all-reduces, rows in lines in steps" "$(
        sed -n 's/^cuda_on_cpu: thread //p' "$err" | awk '
            { thread = $1 }
            $2 == "pop" { if (--depth[thread] < 0) bad = bad " pop"; next }
            { depth[thread]++; name = substr($0, index($0, "push ") + 5) }
            name ~ /^step [0-9]+$/ { steps[thread] = 1; if (depth[thread] != 1) bad = bad " step" }
            name == "all-reduce" { sums[thread] = 1; if (depth[thread] != 1) bad = bad " all-reduce" }
            name ~ / (forward|backward)$/ { rows++; if (depth[thread] != 3) bad = bad " row" }
            END {
                for (thread in depth) if (depth[thread] != 0) bad = bad " open"
                printf "%d threads with steps, %d with all-reduces, rows in lines in steps%s", length(steps),
                    length(sums), (rows > 20 ? bad : " none")
            }')"
    CUEMU_RANGES=1 run "${small[@]}" --graph on
    holds ranges/graph "no row in a replayed step" "some" awk '/push step 2/ { on = 1 } /push step 3/ { on = 0 }
        on && / (forward|backward)$/ { exit 1 }' "$err"
    run "${small[@]}" --zero-grad memset --trace "$tmp/zero.json"
    same trace/zero_grad 4 "$(grep -c '"name":"zero_grad"' "$tmp/zero.json")"
}

# Precisions and layouts in whole runs.
test_precisions() {
    local cifar=(--model cifar --limit-train 22 --batch-size 4 --save-model) how scratch
    local resnet=(--model resnet8 --limit-train 16 --batch-size 8) overflow
    local ways=(tf32 bf16 fp16) sm sms=(80 86 120)
    [ -z "${QUICK:-}" ] || ways=(bf16) sms=(86)
    for how in "${ways[@]}"; do
        train "$how" "${cifar[@]}" --precision "$how"
        train "${how}_graph" "${cifar[@]}" --precision "$how" --graph on
        equal "${how}_graph" "$how"
        train "${how}_dp" "${cifar[@]}" --precision "$how" --gpus 2 --oversubscribe --parallel dp
    done
    for sm in "${sms[@]}"; do # other multiprocessors, and less shared memory, which suffices for each tile
        CUEMU_SM=$sm train "sm_$sm" "${cifar[@]}" --precision bf16
        equal "sm_$sm" bf16
    done
    if [ -z "${QUICK:-}" ]; then
        train resnet "${resnet[@]}" --precision tf32
        train resnet_nchw "${resnet[@]}" --precision tf32 --layout nchw
        equal resnet_nchw resnet
    fi
    CUEMU_CLOCK=1 train autotune "${cifar[@]}" --precision bf16 --autotune on --graph on
    equal autotune bf16
    line autotune/says_so '^Autotune: .*, weight gradient: tiles of '
    same autotune/not_faster "" "$(sed -nE 's/^Autotune: .*, ([0-9.]+) us; .*, ([0-9.]+) us$/\1 \2/p' "$out" |
        awk '!($1 > 0 && $1 < $2)')"
    if [ -z "${QUICK:-}" ]; then
        train autotune_tiled "${resnet[@]}" --autotune on
        train resnet_tiled "${resnet[@]}"
        equal autotune_tiled resnet_tiled
    fi
    train nchw "${cifar[@]}" --layout nchw --resident off
    scratch=$(scratch_mb)
    train nhwc "${cifar[@]}"
    equal nchw nhwc
    holds nchw/transposes "more than the $(scratch_mb) MB of scratch with nhwc" "$scratch" \
        awk -v nchw="$scratch" -v nhwc="$(scratch_mb)" 'BEGIN { exit !(nchw > nhwc) }'
    # Gradients beyond 65504 skip one update and halve the scale; that is no error, and a resumed run knows it.
    overflow=(--model cifar --precision fp16 --batch-size 1 --lr 1 --limit-train 12 --save-model)
    train skipped "${overflow[@]}"
    line skipped/says_so '^fp16: skipped 1 updates because gradients were not finite; the loss scale is now 32768$'
    train resumed "${overflow[@]}" --max-steps 6 --checkpoint "$tmp/fp16.ckpt"
    train resumed "${overflow[@]}" --checkpoint "$tmp/fp16.ckpt" --resume
    holds skipped/resumed "the same weights" "others" \
        cmp "$tmp/skipped/model.safetensors" "$tmp/resumed/model.safetensors"
    refused resumed/precision 2 "was saved with precision=fp16, but this run has precision=bf16" "${overflow[@]}" \
        --precision bf16 --checkpoint "$tmp/fp16.ckpt" --resume
    refused resumed/layout 2 "was saved with layout=nhwc, but this run has layout=nchw" "${overflow[@]}" \
        --layout nchw --checkpoint "$tmp/fp16.ckpt" --resume
    # Finite losses and infinite gradients, since 1e-30 * 1e22 * 1e22 is finite and 1e22 * 1e22 is not.
    train extreme "${cifar[@]}"
    python not_finite/weights "$tmp/extreme/model.safetensors" "$tmp/extreme.safetensors" <<'EOF'
import json, struct, sys
data = open(sys.argv[1], "rb").read()
size = 8 + struct.unpack("<Q", data[:8])[0]
header = json.loads(data[8:size])
header["__metadata__"] = {"format": "pt"}
values = bytearray(data[size:])
for name, tensor in header.items():
    large, small = name in ("fc2.weight", "fc3.weight"), name[-4:] == "bias" or name == "conv1.weight"
    factor = 1e22 if large else 1e-30 if small else 1
    if name[0] != "_":
        begin, end = tensor["data_offsets"]
        old = struct.unpack(f"<{(end - begin) // 4}f", values[begin:end])
        values[begin:end] = struct.pack(f"<{len(old)}f", *(factor * x for x in old))
text = json.dumps(header, separators=(",", ":")).encode()
open(sys.argv[2], "wb").write(struct.pack("<Q", len(text)) + text + values)
EOF
    for how in "fp32 --log-interval 1" "fp32 --log-interval 1 --graph on" \
        "bf16 --save-every 2steps --checkpoint $tmp/bad"; do
        [ -e "$tmp/extreme.safetensors" ] || break # no python3
        # shellcheck disable=SC2086 # options
        refused "not_finite/${how%% --ch*}" 1 "epoch 1, at most 1 steps ago: a gradient was not finite; try a smaller --lr" \
            "${cifar[@]}" --load "$tmp/extreme.safetensors" --precision $how
    done
    same not_finite/nothing_saved "" "$(find "$tmp" -name 'bad*')"
    refused precision_on_cpu 2 "--kernels (any) --precision bf16: expected one of these on a CPU: naive in fp32, fast in fp32" \
        --precision bf16 --no-cuda
    refused layout_on_cpu 2 "--layout nchw: expected a GPU" --layout nchw --no-cuda --dataset synthetic
    refused autotune_on_cpu 2 "--autotune on: expected a GPU" --autotune on --no-cuda --dataset synthetic
    refused tensor_fp32 2 "--kernels tensor --precision fp32: expected one of these on a GPU: naive in fp32, tiled in \
fp32, tensor in fp16, tensor in bf16, tensor in tf32" --kernels tensor --precision fp32
    # A GPU with older tensor cores: what the message advises works, also after a file that asks for newer ones.
    local needed="--kernels tensor: expected a GPU with tensor cores that cnn uses in"
    printf -- '--kernels tensor --precision bf16\n' >"$tmp/amp.args"
    for how in "tf32 --kernels tensor" "tf32 --precision tf32" "bf16 --precision bf16" "bf16 @$tmp/amp.args"; do
        # shellcheck disable=SC2086 # words
        CUEMU_SM=75 refused "older/${how##*/}" 2 "$needed ${how%% *} (sm_80 or newer; fp16: sm_75), found " \
            --dataset synthetic "${cifar[@]}" ${how#* }
    done
    same older/named "emulated GPU, sm_75; use --kernels tiled --precision fp32" \
        "$(grep -oP 'found \Kemulated GPU, sm_75(?=[,;])|; use .*' "$err" | tr -d '\n')"
    CUEMU_SM=75 train older "${cifar[@]}" "@$tmp/amp.args" --kernels tiled --precision fp32
    equal older nhwc
    CUEMU_SM=75 train older_default "${cifar[@]}"
    equal older_default nhwc
    if [ -z "${QUICK:-}" ]; then # fp16 in the smallest tile; autotune finds no other one
        CUEMU_SM=75 train older_fp16 "${cifar[@]}" --precision fp16 --autotune on
        equal older_fp16 fp16
        same older_fp16/autotune "" "$(grep '^Autotune: ' "$out")"
    fi
}

# what_fits NAME OPTIONS...: the largest batch that is not refused can be trained
what_fits() {
    local name=$1 fits=0 too_large=128 middle
    shift
    while [ $((too_large - fits)) -gt 1 ]; do
        middle=$(((fits + too_large) / 2))
        run "$@" --batch-size $middle --eval # plans the same memory
        if [ "$status" -eq 0 ]; then fits=$middle; else too_large=$middle; fi
    done
    holds "$name/some" "a batch from 1 to 127" "$fits" test "$fits" -gt 0
    run "$@" --batch-size "$fits"
    same "$name/runs" "exit 0, " "exit $status, $(cat "$err")"
}

test_memory() {
    export CUEMU_MEMORY=30000000
    local mnist=(--model mnist --dataset synthetic --limit-train 128 --limit-test 8 --max-steps 1)
    refused memory 1 "try a --batch-size below 128, a smaller --test-batch-size, fewer --workers or a smaller --model" "${mnist[@]}" --batch-size 128
    line memory/ledger '^Memory in MB: parameters [0-9.]+, .* together'
    what_fits memory/what_fits "${mnist[@]}"
    what_fits memory/what_fits_copied "${mnist[@]}" --resident off --workers 2
    unset CUEMU_MEMORY
    # Each of the two ranks needs 12.7 MB on the host, which has 21.
    SLURM_MEM_PER_CPU='' SLURM_MEM_PER_NODE=20 refused memory/host_of_two 1 "21.0 MB available on this machine" \
        "${mnist[@]}" --limit-train 8192 --gpus 2 --oversubscribe
    # Only one of the ranks has the trace's 21 MB, so together they fit into 42 MB.
    local two=("${mnist[@]}" --gpus 2 --oversubscribe --trace "$tmp/trace.json")
    SLURM_MEM_PER_CPU='' SLURM_MEM_PER_NODE=40 run "${two[@]}"
    same memory/host_of_unequal_two "exit 0, " "exit $status, $(cat "$err")"
}

# Lab 5's program refuses more images than a grid has blocks for, before it allocates their memory.
test_lab5() {
    { echo '#line 1 "conv.cu"' && sed -f "$repo/tests/emulator/cuda_on_cpu.sed" "$repo/labs/lab05/conv.cu"; } |
        "$cxx" -std=c++17 -O0 -include "$repo/tests/emulator/cuda_on_cpu.h" -x c++ - -o "$build/convolution" 2>"$err"
    same lab5/build "exit 0" "exit ${PIPESTATUS[1]}$(grep -m 3 error "$err")"
    timeout 60 "$build/convolution" "$tmp/lab5.csv" 4096 >"$out" 2>"$err"
    same lab5/images "exit 2, usage: convolution FILE.csv [IMAGES], 1 to 4095 images" "exit $?, $(tail -n 1 "$err")"
}

# ---- Would the tests notice?

# noticed PROGRAM ARGUMENTS...: fails, crashes, hangs, or is reported
# shellcheck disable=SC2317 # xargs calls it, and the next ones
noticed() {
    # the pipe ends the program at its first failure
    QUICK=1 CUEMU_CORES=1 CUEMU_LAZY=1 CUEMU_PROTECT=1 timeout 300 "$@" 2>&1 |
        grep -qE -m 1 '^fail|ThreadSanitizer: data race'
    local status=("${PIPESTATUS[@]}")
    [ "${status[1]}" -eq 0 ] || [ "${status[0]}" -ne 0 ]
}

# without_barrier K: the kernels without their K-th barrier must be reported
without_barrier() {
    local program=$build/barrier_$1
    awk -v k="$1" '/__syncthreads\(\);/ && ++n == k { sub(/__syncthreads\(\);/, ";") } 1' \
        "$repo/cnn_kernels.cu" >"$program.cu"
    if ! kernels "${tsan[@]}" -o "$program.o" <"$program.cu" || ! link "$program" "${tsan[@]}"; then
        fail "barrier/$1" "a program" "none"
    elif noticed "$program" tiny; then
        pass "barrier/$1"
    else
        fail "barrier/$1" "a report" "none without $(diff "$repo/cnn_kernels.cu" "$program.cu")"
    fi
    rm -f "$program"*
}

# The program into which a bug is inserted, the test that should notice it, and the bug. Bugs of one
# program are independent: none affects what another's test checks.
bugs=$(cat <<'END'
1 relu /relu_forward_kernel/,/^}/s/i < count/i <= count/
1 dropout s/blocks_of_image = (size + 7)/blocks_of_image = (size + 6)/
1 maxpool2d s/value > best ||/value >= best ||/
1 avgpool2d s/sum \/ pixels)/sum \/ (pixels - 1))/
1 optimizers s/one_minus_rho \* delta \* delta/one_minus_rho * delta * g/
1 gather s/(bits\[0\] % (2 \* CROP_PADDING + 1))/(bits[0] % (2 * CROP_PADDING))/
1 batchnorm2d s/d \* d \* s.count \* share/d * d * t.count * share/
1 softmax s/value = fmaxf(value/value = fminf(value/
1 tiled s/o.inside(p)) \&\& k_here < end/o.inside(p)) \&\& k_here <= end/
2 relu s/o.v\[j\] > 0 ? d.v/o.v[j] >= 0 ? d.v/
2 dropout s/(16 \* (j % 2))/(16 * (j % 3))/
2 maxpool2d /maxpool2d_backward_kernel(/,/^}/s/taps.v\[j\] == tap/taps.v[j] >= tap/
2 optimizers s/ ? g + momentum/ ? p + momentum/
2 gather s/w - 1 - column/w - column/
2 batchnorm2d s/s.count > 1 ? s.count - 1/s.count > 1 ? s.count/
2 softmax s/label ? at_label : elsewhere/label ? elsewhere : at_label/
2 tiled s/rx = (px + padding) % stride/rx = px % stride/
3 relu s/r.relu \&\& sum.v\[j\] < 0/sum.v[j] < 0/
3 gather s/d <= ELASTIC_REACH; d++/d < ELASTIC_REACH; d++/
3 batchnorm2d s/sums.v\[j\] \* share - distance/sums.v[j] * share + distance/
3 maxpool2d /maxpool2d_backward_apart_kernel(/,/^}/s/taps.v\[j\] == tap/taps.v[j] >= tap/
3 tiled s/m < p.rows ? p.c.at(/m <= p.rows ? p.c.at(/
4 batchnorm2d s/ + other\[e\].v\[j\];/;/
4 gather s/first = i % blocks \* 4/first = i % blocks \* 3/
4 naive s/weight\[(tap \* s.c + c) \* s.oc + o.c\]/weight[(tap * s.c + c) * s.c + o.c]/
4 tiled s/p.parts + split \* p.elements, /p.parts + split * p.elements - split, /
5 naive s/bias\[i % channels\]/bias[i \/ channels % channels]/
5 batchnorm2d s/shift + mean, squares/mean, squares/
5 maxpool2d s/rows = o.y == s.oh - 1 ? s.h - top : s.stride/rows = s.stride/
5 relu /store_chunk(void \*to, unsigned i, unsigned count/,/^}/s/i + j < count/i + j <= count/
5 tiled s/i \/ 4 \* APART_M + i % 4/i \/ 4 * APART_N + i % 4/
6 tiled s/wanted = accumulate \&\& at/wanted = false \&\& at/
7 tiled s/return max(parts, sums)/return max(sums, sums)/
8 tiled s/top = (py + padding) \/ stride/top = (py + padding + 1) \/ stride/
8 fused s/w.fused.relu_backward \&\& (w.residual/w.fused.relu_backward \&\& (!w.residual/
8 softmax s/other == largest \&\& k < best/other == largest \&\& k > best/
9 copies s/gpu_of(to) < 0 || gpu_of/gpu_of(to) < 0 \&\& gpu_of/
9 softmax /int most_likely(/,/^}/s/logp\[k\] > largest/logp[k] >= largest/
9 tiled s/own_line + i \* NEXT_LINE, count/own_line + i * STEP, count/
10 tiled s/o.k.digits(STEP);/o.k.digits(STEP + 1);/
10 batchnorm2d s/end = min(begin + slice, pixels)/end = min(begin + slice - 1, pixels)/
11 bf16 s/line \* PITCH + (chunk ^/line * PITCH + (chunk |/
11 optimizers s/(u.param16, i, u.count, p.v)/(u.param16, i, u.count, g.v)/
12 bf16 s/lane \/ 16 \* 8 + lane % 8/lane \/ 16 * 8 + lane % 4/
12 loss_scale s/skipped ? .5f : grows/skipped ? .5f : !grows/
12 relu s/sum.accumulate = w.accumulate_residual/sum.accumulate = false/
13 bf16 s/cp_async_wait<STAGES - 2>()/cp_async_wait<STAGES - 1>()/
13 loss_scale s/(u.scale \&\& u.scale->not_finite)/u.scale == NULL/
13 fused s/w.fused.relu_backward \&\& !w.residual/w.fused.relu_backward/
14 bf16 /auto load_next/,/};/s/cp_async_commit();/;/
15 bf16 s/previous = stage > 0 ? stage - 1 : STAGES - 1/previous = stage/
16 tf32 s/eight = IS_A ? r % 2 : r \/ 2/eight = IS_A ? r \/ 2 : r \/ 2/
17 bf16 s/(at\[r\], column, columns, chunk/(at[r], column, columns + 8, chunk/
18 fp16 s/sums\[i \/ 2\]\[j\]\[i % 2 \* 2 + 1\]/sums[i \/ 2][j][i % 2 * 2]/
19 bf16 s/y\[j \/ 2\] + j % 2 \* 2)/y[j \/ 2] + j % 2)/
20 bf16 s/v\[piece\] = valid ? \*in_global(from)/v[piece] = valid ? *in_global(from + piece)/
21 bf16 s/const int row = warp \/ 2 \* Tile::WARP_M/const int row = warp % 2 * Tile::WARP_M/
22 fp16 s/tile + TILE_A, j, pair)/tile + TILE_A, j, pair ^ 1)/
23 tiled s/o.k.add(k_digits, step < STEPS - 1/o.k.add(k_digits, step < STEPS/
24 tiled s/split += blockDim.y/split += blockDim.y + 1/
END
)

# Each bug changes one line; all are tried, also where QUICK or the day leaves bugs out.
test_bugs_apply() {
    local program test bug
    same bugs/apply "" "$(while read -r program test bug; do
        changed=$(sed "$bug" "$repo/cnn_kernels.cu" | diff "$repo/cnn_kernels.cu" - | grep -c '^>')
        [ "$changed" = 1 ] || echo "$changed lines by $program $test $bug"
    done <<<"$bugs")"
}

# with_bugs PROGRAM FILE: adds to FILE a line for each of its bugs: caught or missed
with_bugs() {
    local report=$2 program=$build/bugs_$1 test bug arguments
    cp "$repo/cnn_kernels.cu" "$program.cu"
    while read -r test bug; do sed -i "$bug" "$program.cu"; done < <(bugs_of "$1")
    kernels "$cxx" -O1 -fopenmp -o "$program.o" <"$program.cu" && link "$program" "$cxx" -fopenmp
    while read -r test bug; do
        arguments=(all "$test")
        case $test in naive | tiled | tf32 | bf16 | fp16) arguments=(all conv2d "$test") ;; esac
        if [ -x "$program" ] && noticed "$program" "${arguments[@]}"; then
            echo "caught: $bug" >>"$report"
        else
            echo "missed: $bug" >>"$report"
        fi
    done < <(bugs_of "$1")
    rm -f "$program"*
}
bugs_of() { sed -n "s/^$1 //p" <<<"$bugs"; }

# some <LINES: those whose number, the first word, is in this run's share
some() { while read -r line; do share "${line%% *}" 5 && echo "$line"; done; }

test_mutations() {
    local report=$tmp/mutations k begin=$SECONDS planted programs line
    : >"$report"
    k=$(grep -c '__syncthreads();' "$repo/cnn_kernels.cu")
    programs=$(cut -d ' ' -f 1 <<<"$bugs" | uniq | some)
    planted=$(some <<<"$bugs" | wc -l)
    export -f without_barrier with_bugs bugs_of noticed kernels link pass fail one_line
    export suite repo build arch cxx cc bugs
    seq "$k" | some | xargs -P 2 -I{} bash -c "tsan=(${tsan[*]}); without_barrier {}" 2>/dev/null
    xargs <<<"$programs" -P 2 -I{} bash -c "with_bugs {} '$report'" 2>/dev/null
    same mutations/none "" "$(noticed "$build/thread" tiny && echo noticed in a good program)"
    holds mutations "$planted bugs, at least $((planted * 46 / 48)) of them caught" "$(grep -v '^caught' "$report")" \
        test "$(grep -c '^caught' "$report")" -ge $((planted * 46 / 48)) -a "$(wc -l <"$report")" -eq "$planted"
    echo "mutations took $((SECONDS - begin)) s, $(grep -c '^caught' "$report") caught" >&2
}

# For other builds than make's.
build_tests() {
    "$cc" -std=gnu17 -O2 "-march=$arch" -fno-math-errno -g1 -Wall -Wextra -Wno-unused-function \
        -Wno-unknown-pragmas -c "$repo/tests/gpu/test_cuda.c" -o "$build/test_cuda.o" 2>"$err"
    same build/tests "exit 0, " "exit $?, $(cat "$err")"
    choose_tsan
}

[ -n "${QUICK:-}" ] || build_tests
if [ "${1:-}" = races ]; then # make races
    [ -z "${QUICK:-}" ] || build_tests
    test_races
    rm -rf "$build"
    exit 0
fi
test_kernels
test_runs
test_options
test_graph
test_precisions
test_ranges
test_memory
test_lab5
test_bugs_apply
test_blind_graphs
if half 1; then
    test_races
    test_mutations
else
    skip races "$not_this_half"
    skip mutations "$not_this_half"
fi
rm -rf "$build"
exit 0
