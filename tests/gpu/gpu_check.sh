#!/usr/bin/env bash
# All checks and measurements that need a GPU, without a network, in parts of at most eight minutes:
#
#   correctness   first the tensor cores' fragments; then compares the GPU's kernels with the CPU's, and trains
#   sanitizers    looks for races, invalid accesses and uninitialized memory
#   speed         trains an epoch, times whole steps and each operation, in each precision
#   pytorch       times steps beside PyTorch's on the same GPU, eager and as CUDA graphs
#   compiled      the same beside torch.compile: first the ResNets in bf16
#   ablation      each optimization on top of those before: speed and accuracy
#
# They do not show: GPUs other than this one; copies between GPUs where there is only one; NCCL; the accuracy that
# fp16 reaches; that a run on the GPU can be resumed.
#
#   tests/gpu/gpu_check.sh [PART...]    on the first GPU; COMMIT=... where git cannot tell. CUDA_ARCH=sm_90: with
#                                   kernels that `make CUDA_ARCH=sm_90` has compiled where there was no GPU
#   tests/gpu/gpu_check.sh --emulated   the same in the emulator, tiny and without speeds, to show
#                                   that this script works; writes build/gpu_check_emulated.json. QUICK=1: with
#                                   smaller networks
#
# Writes tests/gpu/results/DEVICE-DATE.json, with all parts of this call; also to $OUT if that is set. It is written
# again after each step, so that it is there if this script is stopped.
# Prints `pass gpu_check/NAME`, `fail gpu_check/NAME: why`, `skip gpu_check/NAME: why`. A step that
# fails or takes too long does not stop the others; a tool that the machine refuses is skipped, and so is a slow
# tool that has found nothing when its time is over. Exit status 1
# if a check failed; a measurement that failed is a check in the emulator only. All output of the steps:
# build/gpu_check.log. test_gpu_check.sh makes each check fail once.
set -u
cd "$(dirname "$0")/../.." || exit 1
export LC_ALL=C PYTHONDONTWRITEBYTECODE=1
total=440 # seconds of a part; the rest of its eight minutes is for what has to be killed
known=(correctness sanitizers speed pytorch compiled ablation)
patience=1 # by which the limits are multiplied: the emulator runs beside other tests
emulated=false cnn=./cnn programs=build/ settings=(CUDA_ARCH="${CUDA_ARCH:-native}")
if [ "${1:-}" = --emulated ]; then
    emulated=true cnn=./cnn-emu programs=build/emu_ settings=() patience=10
    shift
fi
[ $# -gt 0 ] || set -- "${known[@]}"
for part; do
    [[ " ${known[*]} " == *" $part "* ]] && continue
    echo "gpu_check.sh knows --emulated and the parts ${known[*]}, not $part" >&2
    exit 2
done
if [ $emulated = true ] && ! command -v "${CXX:-g++}" >/dev/null; then
    echo "skip gpu_check/all: ${CXX:-g++} is not installed, which the emulator needs"
    exit 0
fi
commit=${COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}
date=$(date -u +%Y-%m-%dT%H:%M:%SZ)
cuda=${CUDA:-/usr/local/cuda}/bin
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
mkdir -p build tests/gpu/results
: >build/gpu_check.log
steps='' failures=0 running='' current='' file=''

# ---- JSON

quoted() { printf '"%s"' "$(tr '\n\t' '  ' <<<"$1" | sed 's/ *$//; s/[\\"]/\\&/g')"; }

# objects <LINES of key=value: a comma-separated list of JSON objects. Emulated, times are left out.
objects() {
    awk -v emulated=$emulated '{
            line = ""
            for (i = 1; i <= NF; i++) {
                if (!(at = index($i, "=")))
                    continue
                key = substr($i, 1, at - 1)
                value = substr($i, at + 1)
                if (emulated == "true" && key ~ /seconds|_s$|_ms$|flops/)
                    continue
                if (value !~ /^-?[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?$/)
                    value = "\"" value "\""
                line = line (line == "" ? "" : ", ") "\"" key "\": " value
            }
            if (line != "")
                print (count++ ? ", " : "") "{" line "}"
        }'
}

# of_run KEY: a text in the run folder of the first, shortest run
of_run() { grep -osP "\"$1\":\"\K[^\"]*" "$tmp/first.run/run.json" | head -n 1; }

# ---- Steps

# report KIND NAME pass|fail|skip WHY SECONDS: KIND is check or figure
report() {
    local why=${4:0:200} seconds=$5
    echo "$3 gpu_check/$2${why:+: $why}"
    [ $emulated = false ] || seconds=null
    steps+="${steps:+,}
    {\"step\": \"$2\", \"kind\": \"$1\", \"result\": \"$3\", \"why\": $(quoted "$why"), "
    steps+="\"seconds\": $seconds}"
    if [ "$3" = fail ] && { [ "$1" = check ] || [ $emulated = true ]; }; then
        failures=$((failures + 1))
    fi
}

# finding NAME: the first failure that a program, or compute-sanitizer after its name, has reported so far
finding() { grep -v COMPUTE-SANITIZER "$tmp/$1" | grep -m 1 -E '^fail |^========= '; }

# When this script is stopped, what the step has printed so far is a result, too.
stopped() {
    if [ -n "$running" ]; then
        kill "$running"
        wait "$running"
        cat "$tmp/$current" >>build/gpu_check.log
        report check "$current" fail "gpu_check.sh was stopped" 0
        write_results
    fi
    exit 1
}
trap stopped TERM INT HUP

# step KIND NAME LIMIT COMMAND...: at most LIMIT seconds; output goes to $tmp/NAME. KIND slow: a check that is skipped
# if there is too little time for it and it has found nothing until then
step() {
    local kind=${1/slow/check} late=fail name=$2 limit=$((patience * $3)) status
    local left=$((patience * total - SECONDS)) begin=$SECONDS result=fail why
    [ "$1" != slow ] || late=skip
    shift 3
    [ "$limit" -le "$left" ] || limit=$left
    if [ "$limit" -lt 1 ]; then
        report "$kind" "$name" $late "no time left of $total s" 0
        return 1
    fi
    printf '\n==== %s: %s\n' "$name" "$*" >>build/gpu_check.log
    # STEP: for the stand-ins of test_gpu_check.sh. In the background, so that a signal is handled at once
    STEP=$name timeout -k 5 "$limit" "$@" >"$tmp/$name" 2>&1 </dev/null &
    running=$! current=$name
    wait $running
    status=$?
    running=
    why=$(grep -m 1 '^fail ' "$tmp/$name" || grep -m 1 'error: ' "$tmp/$name" ||
        grep -v '^$' "$tmp/$name" | tail -n 1)
    case $status in
    0) [[ $why == fail\ * ]] || result=pass why= ;;
    77) result=skip why=${why#skip: } ;;
    124 | 137)
        why=$(finding "$name")
        [ -n "$why" ] || result=$late
        why="stopped after $limit s${why:+: $why}"
        ;;
    *) why="exit status $status: $why" ;;
    esac
    cat "$tmp/$name" >>build/gpu_check.log
    report "$kind" "$name" "$result" "$why" $((SECONDS - begin))
    write_results
    return $status
}

# judge NAME EXPECTED FOUND COMMAND...: a check on results of steps; the words are for the report
judge() {
    local name=$1 expected=$2 found=$3
    shift 3
    if "$@" >/dev/null 2>&1; then
        report check "$name" pass "" 0
    else
        report check "$name" fail "expected $expected, found $found" 0
    fi
}

# judge_tensor STEP NAME EXPECTED FOUND COMMAND...: the same, unless the step's program has found no tensor cores
judge_tensor() {
    local why
    if why=$(grep -oP -m 1 '^skip [^:]*: \K.*no tensor cores that cnn uses' "$tmp/$1"); then
        report check "$2" skip "$why" 0
    else
        judge "${@:2}"
    fi
}

# losses RUN: of each step; ranks have equally many images here
losses() {
    awk -F , 'NR > 1 { sum[$2] += $5; n[$2]++ }
        END { for (i = 1; i in n; i++) printf "%.9g\n", sum[i] / n[i] }' "$tmp/$1.run/steps.csv"
}

# same_losses RUN RUN: of the first steps, at least three; 1e-3 is far above the rounding error of so few, which
# training multiplies from step to step
same_losses() {
    paste -d ' ' <(losses "$1") <(losses "$2") | head -n 6 | awk '{
            d = $1 - $2
            wrong += !((d < 0 ? -d : d) <= 1e-3 * (1 + $1) && NF == 2)
        }
        END { exit wrong > 0 || NR < 3 }'
}

# csv FILE: a comma-separated list of JSON objects, one for each row
csv() {
    [ ! -e "$1" ] || python3 - "$1" <<'END'
import csv, json, sys
def cell(text):
    try:
        return float(text)
    except ValueError:
        return text or None
rows = csv.DictReader(open(sys.argv[1], newline=""))
print(",\n  ".join(json.dumps({k: cell(v) for k, v in row.items()}) for row in rows))
END
}

# same_accuracy CSV: no rung is more than 5 points below the first; the seeds of one differ by less
same_accuracy() {
    python3 - "$1" <<'END'
import csv, sys
found = [float(row["accuracy"]) for row in csv.DictReader(open(sys.argv[1], newline=""))]
sys.exit(not found or min(found) < found[0] - 5)
END
}

rungs() { tail -qn +2 "$@" 2>/dev/null | cut -d , -f 1 | xargs; }

learned() { awk '/^epoch=/ { sub(/.*accuracy=/, ""); exit !($0 + 0 >= 50) }' "$tmp/$1"; }

epoch_lines() {
    grep -hs '^epoch=' "$tmp/mnist" | sed 's/^/net=mnist /'
    grep -hs '^epoch=' "$tmp/cifar" | sed 's/^/net=cifar /'
}

hash_of() { grep -osE '[0-9a-f]{16}$' "$tmp/$1.run/epochs.csv" || echo "no hash of $1"; }

# ---- Results

driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)
nvcc=$({ nvcc --version || "$cuda/nvcc" --version; } 2>/dev/null | grep -om 1 'V[0-9][0-9.]*')

# file_of DEVICE: where the results are written
file_of() {
    local slug
    slug=$(tr '[:upper:]' '[:lower:]' <<<"${1%%,*}" | sed 's/[^a-z0-9]\+/-/g; s/^-//; s/-$//')
    if [ $emulated = true ]; then
        echo build/gpu_check_emulated.json
    elif [[ $1 == *sm_* ]]; then
        echo "tests/gpu/results/$slug-$(tr -d : <<<"${date%:*}").json"
    else
        echo build/gpu_check_without_gpu.json
    fi
}

# write_results: of all steps until now, of which the last one may still run
write_results() {
    [ -n "$file" ] || return
    {
        printf '{"device": %s, "uuid": %s,\n' "$(quoted "$(of_run device)")" "$(quoted "$(of_run uuid)")"
        printf ' "driver": %s, "driver_version": %s, "nvcc": %s,\n' "$(quoted "$(of_run driver)")" \
            "$(quoted "$driver")" "$(quoted "$nvcc")"
        printf ' "date": "%s", "commit": %s, "emulated": %s,\n' "$date" "$(quoted "$commit")" $emulated
        printf ' "steps": [%s],\n' "$steps"
        printf ' "epochs": [%s],\n' "$(epoch_lines | objects)"
        printf ' "training_steps": [%s],\n' "$(grep -hs '^net=.* step' "$tmp"/{bench,pytorch,compiled*} | objects)"
        printf ' "operations": [%s],\n' "$(find "$tmp" -path '*/operations/*.json' | sort |
            xargs -r paste -sd ' ' | sed '$!s/$/,/')"
        printf ' "ablation": [%s],\n' "$(csv "$tmp/ablation.run/ablation.csv")"
        printf ' "pytorch": [%s]}\n' "$(grep -hs '^torch .* precision=.*=' "$tmp"/{pytorch,compiled*} |
            grep -v ' does not work ' | objects)"
    } >"$tmp/results.json"
    cp "$tmp/results.json" "$file.new" && mv "$file.new" "$file" # never half of it
    [ -z "${OUT:-}" ] || cp "$file" build/gpu_check.log "$OUT"
}

# ---- The steps

targets=("${cnn#./}" "${programs}bench_gpu" "${programs}test_cuda" "${programs}test_tensor")
synthetic=(--dataset synthetic --epochs 1)
first=("${synthetic[@]}" --limit-train 8 --limit-test 8 --batch-size 8)
few=("${synthetic[@]}" --limit-train 1280 --limit-test 100 --log-interval 1) batch=64
if [ $emulated = true ]; then
    few=("${synthetic[@]}" --limit-train 12 --limit-test 4 --batch-size 4) batch=4
    export CUEMU_DEVICES=2
    mnist=("${few[@]}") cifar=(--model cifar "${few[@]}")
    tests=(tiny) bench=(EMULATE=1) ladder=(--program "$cnn" --model mnist)
    [ -z "${QUICK:-}" ] || bench+=(NETS="cifar6,3 resnet8,1") ladder=(--program "$cnn" --model cifar)
else
    mnist=("${synthetic[@]}")
    cifar=("${synthetic[@]}" --model cifar --width 64 --batch-size 250)
    # few enough images for the slowest rung, which takes up to 50 s for each of the three seeds
    tests=(all) bench=() ladder=(--program "$cnn" --limit 2560)
fi

step check build 200 make -s -j "$(nproc)" COMMIT="$commit" "${settings[@]}" "${targets[@]}"
step check first 30 $cnn "${first[@]}" --out "$tmp/first.run"
file=$(file_of "$(of_run device)")
judge on_gpu "a line Device: with sm_" "$(grep '^Device' "$tmp/first")" grep '^Device:.*sm_' "$tmp/first"

part_correctness() {
    # Which lane has which element of a fragment: convolutions of small integers, whose sums are exact
    step check tensor 60 env QUICK=1 "${programs}test_cuda" "${tests[@]}" conv2d tensor
    judge_tensor tensor tensor_tests "a test of the tensor kernels" "$(grep -v comparison "$tmp/tensor" | head -n 1)" \
        grep '^pass .*tensor' "$tmp/tensor"
    step check layouts 30 "${programs}test_tensor"
    judge_tensor layouts all_layouts "10 tests that passed" "$(cat "$tmp/layouts")" \
        test "$(grep -c '^pass ' "$tmp/layouts")" -eq 10
    step check test_cuda 120 "${programs}test_cuda" "${tests[@]}"
    judge some_tests "10 tests that passed" "$(grep -c '^pass ' "$tmp/test_cuda")" \
        test "$(grep -c '^pass ' "$tmp/test_cuda")" -ge 10

    for name in once again; do
        step check $name 30 $cnn "${few[@]}" --out "$tmp/$name.run"
    done
    step check on_cpu 30 $cnn "${few[@]}" --no-cuda --out "$tmp/on_cpu.run"
    judge same_again "$(hash_of once)" "$(hash_of again)" \
        test "$(hash_of once)" = "$(hash_of again)"
    step check graph 30 $cnn "${few[@]}" --graph on --out "$tmp/graph.run"
    judge graph_same "$(hash_of once)" "$(hash_of graph)" \
        test "$(hash_of once)" = "$(hash_of graph)"
    judge graph_replayed '"graph":true' "$(grep -o '"graph":[a-z]*}' "$tmp/graph.run/run.json")" \
        grep -q '"graph":true}' "$tmp/graph.run/run.json"
    judge same_as_cpu "the same losses to 1e-3" "$(losses once | paste -sd ' ' | cut -c 1-100)" \
        same_losses once on_cpu

    # Two replicas, on two GPUs if there are two: the same losses as one.
    for mode in ddp dp; do
        step check $mode 30 $cnn "${few[@]}" --gpus 2 --oversubscribe --parallel $mode \
            --global-batch $batch --out "$tmp/$mode.run"
        judge ${mode}_same "the same losses to 1e-3" \
            "$(losses $mode | paste -sd ' ' | cut -c 1-100)" same_losses once $mode
    done
}

tools='memcheck check 100
synccheck check 60
initcheck slow 100
racecheck slow 150'

# tool NAME: its path
tool() { command -v "$1" || command -v "$cuda/$1"; }

# Not every machine with a GPU permits it: the first, smallest run shows that. Two of the tools can take longer than
# a part has.
part_sanitizers() {
    local sanitizer name kind limit why='' options
    [ $emulated = false ] || return
    if ! sanitizer=$(tool compute-sanitizer); then
        why="compute-sanitizer is not installed"
    elif ! timeout -k 5 30 "$sanitizer" $cnn "${first[@]}" 2>&1 | tee "$tmp/dry" | grep -q SUMMARY; then
        why="compute-sanitizer does not work here: $(finding dry)"
    fi
    while read -r name kind limit; do
        if [ -n "$why" ]; then
            report check "$name" skip "$why" 0
        else
            options=(--tool "$name" --error-exitcode 9)
            # test_cuda provokes errors of CUDA's functions; memcheck alone would report them
            [ "$name" != memcheck ] || options+=(--report-api-errors no)
            step "$kind" "$name" "$limit" "$sanitizer" "${options[@]}" "${programs}test_cuda" tiny
        fi
    done <<<"$tools"
}

# How close the kernels of convolutions come to the device's limits, by its own counters, which only some
# machines let a user read: the last forward passes of ResNet-18 and the first backward passes.
as_is=(--clock-control none) # the clocks of the device, which others use as well, stay as they are
counters() {
    local ncu why=''
    if ! ncu=$(tool ncu); then
        why="ncu is not installed"
    elif ! timeout -k 5 60 "$ncu" "${as_is[@]}" --launch-count 1 $cnn "${first[@]}" >"$tmp/dry" 2>&1 ||
        ! grep -q '^==PROF== Profiling' "$tmp/dry"; then
        why="ncu does not work here: $(grep -m 1 '^==ERROR' "$tmp/dry")"
    fi
    profile ncu "$why" --kernels tiled --precision fp32
    [ -n "$why" ] || [ "$(compute_capability)" -ge 80 ] || why="this GPU has no tensor cores that cnn uses"
    profile ncu_tensor "$why" --kernels tensor --precision bf16
}

compute_capability() { of_run device | grep -oP 'sm_\K\d+' || echo 0; }

# profile NAME WHY_NOT OPTIONS...
profile() {
    if [ -n "$2" ]; then
        report figure "$1" skip "$2" 0
    else
        step figure "$1" 80 "$ncu" "${as_is[@]}" --section SpeedOfLight --section Occupancy --launch-skip 12 \
            --launch-count 30 --kernel-name 'regex:gemm|tensor' $cnn "${synthetic[@]}" --model resnet18 --batch-size 128 \
            --limit-train 128 --limit-test 8 "${@:3}"
    fi
}

part_speed() {
    step check mnist 60 $cnn "${mnist[@]}" --out "$tmp/mnist.run"
    step check cifar 60 $cnn "${cifar[@]}" --out "$tmp/cifar.run"
    if [ $emulated = false ]; then
        judge mnist_learns "an accuracy of at least 50 %" "$(grep '^epoch=' "$tmp/mnist")" \
            learned mnist
    fi
    mkdir -p "$tmp/operations"
    step figure bench 240 env "${bench[@]}" MODES=none OUT="$tmp/operations" tests/gpu/bench_gpu.sh
    if [ $emulated = true ]; then # on a GPU, a device may lack a precision
        judge variants "no variant that is refused" "$(grep -m 1 refused "$tmp/bench")" \
            test -z "$(grep refused "$tmp/bench")"
    else
        counters
    fi
}

# beside_pytorch NAME LIMIT SETTINGS...: bench_gpu.sh, without the limits of the device, which `speed` has measured
beside_pytorch() {
    [ $emulated = false ] || return
    if tests/python_with.sh torch >/dev/null; then
        step figure "$1" "$2" env LIMITS=none "${@:3}" tests/gpu/bench_gpu.sh
    else
        report figure "$1" skip "PyTorch is not installed" 0
    fi
}

part_pytorch() { beside_pytorch pytorch 420 MODES="eager graph"; }

# torch.compile takes a minute for a large network: first what is to be compared.
part_compiled() {
    beside_pytorch compiled 300 MODES=compiled NETS="resnet18,128 resnet50,256" VARIANTS="bf16 bf16+graph"
    beside_pytorch compiled_rest 420 MODES=compiled VARIANTS="fp32 tf32"
}

part_ablation() {
    local rows=$tmp/ablation.run/ablation.csv ladder_of_gpu
    if ! command -v python3 >/dev/null; then
        report figure ablation skip "python3 is not installed" 0
        return
    fi
    step figure ablation 420 labs/tools/study.py ablation "$tmp/ablation.run" "${ladder[@]}"
    ladder_of_gpu=$(awk '$1 == "gpu" { print $2 }' slurm/configs/ablation.txt | xargs)
    if [ $emulated = true ]; then
        judge rungs "the rungs $ladder_of_gpu" "$(rungs "$rows")" test "$(rungs "$rows")" = "$ladder_of_gpu"
    elif [ -s "$rows" ]; then
        judge same_accuracy "no rung more than 5 points below the first" \
            "$(cut -d , -f 1,5 "$rows" 2>/dev/null | xargs)" same_accuracy "$rows"
    fi
}

for part; do
    "part_$part"
    SECONDS=0
done

write_results
if command -v python3 >/dev/null; then
    judge json "JSON" "$(python3 -m json.tool "$file" 2>&1 | tail -n 1)" python3 -m json.tool "$file"
fi
write_results
echo "$failures failed; results: $file"
[ "$failures" -eq 0 ]
