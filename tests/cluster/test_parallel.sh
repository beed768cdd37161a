#!/usr/bin/env bash
# Tests data parallelism: replicas on the CPU, virtual GPUs and MPI ranks against one device.
# CNN=PATH: another binary. QUICK=1: fewer combinations.
# Prints `pass parallel/NAME`, `fail parallel/NAME: expected ..., found ...` or
# `skip parallel/NAME: why`.
suite=parallel
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
emulator=$repo/cnn-emu
export OMPI_MCA_btl=self,vader,tcp
worlds=(2 3 4) models=(mnist cifar) bits_of=(mnist resnet8)
[ -z "${QUICK:-}" ] || worlds=(3) models=(cifar) bits_of=(resnet8)

# have_mpi: says why not, if there is none in this binary
why_no_mpi() {
    command -v mpirun >/dev/null || { echo "mpirun is not installed" && return; }
    ldd "$cnn" | grep -q libmpi || echo "$cnn was built without MPI"
}

# with KIND N OPTIONS...: a run on N devices of a kind, with its folder in $tmp/run
with() {
    local kind=$1 n=$2
    shift 2
    rm -rf "$tmp/run"
    case $kind in
    replicas) run --no-cuda --oversubscribe --replicas "$n" --out "$tmp/run" "$@" ;;
    gpus)
        CUEMU_STRICT=1 CUEMU_DEVICES=$n "$emulator" --gpus "$n" --out "$tmp/run" "$@" >"$out" 2>"$err"
        status=$?
        ;;
    mpi)
        mpirun -n "$n" "$cnn" --no-cuda --threads 1 --out "$tmp/run" "$@" >"$out" 2>"$err" \
            </dev/null
        status=$?
        ;;
    esac
}

# losses FOLDER: of each step, the mean over all images of all ranks
losses() {
    awk -F , 'NR > 1 { key = $1 "," $2; sum[key] += $4 * $5; n[key] += $4 }
        NR > 1 && !seen[key]++ { order[++count] = key }
        END { for (i = 1; i <= count; i++) printf "%s %.9g\n", order[i], sum[order[i]] / n[order[i]] }' \
        "$1/steps.csv"
}

# same_losses NAME STEPS RUN RUN: what rounding does to a few steps is far below 2e-6
same_losses() {
    local worst
    worst=$(paste -d ' ' <(losses "$3") <(losses "$4") | awk -v steps="$2" '
        $1 != $3 || NF != 4 { print "other steps: " $0; exit }
        { d = ($2 - $4) / $2; d = d < 0 ? -d : d; worst = d > worst ? d : worst }
        END { if (NR != steps) print NR " steps"; else if (!(worst <= 2e-6)) print worst }')
    same "$1" "" "$worst"
}

# accuracies FOLDER: of training and of the test, in each epoch
accuracies() { tail -n +2 "$1/epochs.csv" | cut -d , -f 7,10 | paste -sd ' '; }

hash_of() { grep -oE '[0-9a-f]{16}$' "$1/epochs.csv" | paste -sd ' '; }

# ---- N devices make the update of one

# Data that N divides and whose last batch is smaller, with everything that draws random numbers.
equal_losses() {
    local kind=$1 model=$2 steps=$3 n
    shift 3
    local small=(--model "$model" --dataset synthetic --limit-test 10 --epochs 2 --log-interval 2 "$@")
    run --no-cuda "${small[@]}" --batch-size 12 --augment crop-flip --out "$tmp/one"
    for n in "${worlds[@]}"; do
        with "$kind" "$n" "${small[@]}" --global-batch 12 --augment crop-flip
        same "$kind/$model/$n/status" 0 "$status"
        same_losses "$kind/$model/$n/losses" "$steps" "$tmp/one" "$tmp/run"
        same "$kind/$model/$n/accuracies" "$(accuracies "$tmp/one")" "$(accuracies "$tmp/run")"
        same "$kind/$model/$n/predictions" "" "$(diff "$tmp/one/predictions.csv" "$tmp/run/predictions.csv" 2>&1)"
        [ "$kind" != mpi ] || continue
        with "$kind" "$n" "${small[@]}" --batch-size 12 --parallel dp --augment crop-flip
        same_losses "$kind/$model/$n/dp_losses" "$steps" "$tmp/one" "$tmp/run"
        same "$kind/$model/$n/dp_accuracies" "$(accuracies "$tmp/one")" "$(accuracies "$tmp/run")"
    done
    rm -rf "$tmp/one"
}

test_equal_losses() {
    local why model
    why=$(why_no_mpi)
    equal_losses replicas mnist 10 --limit-train 60
    for model in "${models[@]}"; do
        [ "$model" = mnist ] || equal_losses replicas "$model" 10 --limit-train 60
        [ ! -x "$emulator" ] || equal_losses gpus "$model" 4 --limit-train 24
        [ -n "$why" ] || equal_losses mpi "$model" 10 --limit-train 60
    done
    local resized=(cifar 2 --limit-train 12 --resize 64)
    equal_losses replicas "${resized[@]}"
    [ ! -x "$emulator" ] || equal_losses gpus "${resized[@]}"
    [ -n "$why" ] || equal_losses mpi "${resized[@]}"
    [ -x "$emulator" ] || skip gpus "no cnn-emu: make emulate"
    [ -z "$why" ] || skip mpi "$why"
}

# Sizes that nothing divides: padding in the epoch, parts without an image under dp.
test_odd_sizes() {
    local sizes
    for sizes in "7 4" "5 8" "2 2" "61 24" "7 1"; do
        read -r count batch <<<"$sizes"
        local odd=(--model cifar --dataset synthetic --limit-train "$count" --limit-test 2 --epochs 2)
        with replicas 3 "${odd[@]}" --batch-size "$batch"
        same "odd/$count/ddp" "exit 0, $((3 * ((count + 2) / 3) * 2)) images" \
            "exit $status, $(awk -F , 'NR > 1 { n += $4 } END { print n }' "$tmp/run/steps.csv") images"
        run --no-cuda "${odd[@]}" --batch-size "$batch" --out "$tmp/one"
        with replicas 3 "${odd[@]}" --batch-size "$batch" --parallel dp
        same_losses "odd/$count/dp" $((2 * ((count + batch - 1) / batch))) "$tmp/one" "$tmp/run"
        if [ -x "$emulator" ] && [ "$count" -le 7 ]; then
            with gpus 3 "${odd[@]}" --batch-size "$batch" --parallel dp
            same_losses "odd/$count/dp_gpus" $((2 * ((count + batch - 1) / batch))) "$tmp/one" "$tmp/run"
        fi
        rm -rf "$tmp/one"
    done
    # dp on GPUs: a rank's images are more numbers than the network's parameters, and one buffer receives both
    if [ -x "$emulator" ]; then
        local large=(--model cifar --dataset synthetic --limit-train 64 --limit-test 2 --batch-size 64 --epochs 1)
        run --no-cuda "${large[@]}" --out "$tmp/one"
        with gpus 2 "${large[@]}" --parallel dp
        same_losses odd/large/dp_gpus 1 "$tmp/one" "$tmp/run"
        rm -rf "$tmp/one"
    fi
    # a test whose batches are smaller than a rank's share: the sanitizers see who writes where
    local tested=(--dataset synthetic --limit-train 24 --limit-test 3 --batch-size 12 --epochs 2)
    run --no-cuda "${tested[@]}" --test-batch-size 1 --out "$tmp/one"
    with replicas 3 "${tested[@]}" --test-batch-size 1 --parallel dp
    same odd/small_tests/status 0 "$status"
    same_losses odd/small_tests/dp 4 "$tmp/one" "$tmp/run"
    rm -rf "$tmp/one"
}

# ---- The same N, the same bits, however the ranks talk

test_same_bits() {
    local n model first options why
    why=$(why_no_mpi)
    for model in "${bits_of[@]}"; do
        local small=(--model "$model" --dataset synthetic --limit-train 24 --limit-test 6 --epochs 2)
        for n in "${worlds[@]}"; do
            with replicas "$n" "${small[@]}" --global-batch 12
            first=$(hash_of "$tmp/run")
            same "bits/$model/$n/epochs" 2 "$(wc -w <<<"$first")"
            while read -r kind options; do
                if [ "$kind" = mpi ] && [ -n "$why" ]; then
                    skip "bits/$model/$n/mpi" "$why"
                    continue
                fi
                # shellcheck disable=SC2086 # several words on purpose
                with "$kind" "$n" "${small[@]}" --global-batch 12 $options
                same "bits/$model/$n/$kind$options" "$first" "$(hash_of "$tmp/run")"
            done <<'END'
replicas
replicas --overlap off
replicas --workers 3 --log-interval 1
mpi
mpi --overlap off
END
        done
    done
    if [ ! -x "$emulator" ]; then
        skip bits/gpus "no cnn-emu: make emulate"
        return
    fi
    with gpus 2 "${small[@]}" --global-batch 12
    first=$(hash_of "$tmp/run")
    for options in "--overlap off" "--resident off"; do
        # shellcheck disable=SC2086
        with gpus 2 "${small[@]}" --global-batch 12 $options
        same "bits/gpus$options" "$first" "$(hash_of "$tmp/run")"
    done
    export CUEMU_LAZY=1 # work that nobody waits for has not been done
    with gpus 2 "${small[@]}" --global-batch 12
    same bits/gpus_lazy "$first" "$(hash_of "$tmp/run")"
    CUEMU_LAZY=1 with gpus 2 "${small[@]}" --batch-size 12 --parallel dp
    first=$(hash_of "$tmp/run")
    unset CUEMU_LAZY
    with gpus 2 "${small[@]}" --batch-size 12 --parallel dp
    same bits/gpus_dp_lazy "$first" "$(hash_of "$tmp/run")"
}

# ---- NCCL, by a stand-in that knows MPI and emulated GPUs

# build_nccl: $tmp/cnn-nccl, as make builds ./cnn where it finds CUDA, MPI and NCCL
build_nccl() {
    local flags
    flags=$(mpicc -show) && flags=${flags#* }
    # shellcheck disable=SC2086 # several words on purpose
    sed -f "$repo/tests/emulator/cuda_on_cpu.sed" "$repo/cnn_kernels.cu" |
        g++ -std=c++17 -O2 -march=native -fopenmp -w -DCNN_NCCL -I"$repo" -I"$repo/tests/cluster" \
            $flags -include "$repo/tests/emulator/cuda_on_cpu.h" -x c++ -c - -o "$tmp/nccl.o" &&
        gcc -std=gnu17 -O2 -march=native -fno-math-errno -fopenmp -w -DCNN_MPI \
            "$repo/cnn.c" "$tmp/nccl.o" -o "$tmp/cnn-nccl" $flags -lstdc++ -lm -lpthread
}

# with_nccl GPUS OPTIONS...: a run on two ranks
with_nccl() {
    local gpus=$1
    shift
    rm -rf "$tmp/run"
    CUEMU_STRICT=1 CUEMU_DEVICES=$gpus mpirun -n 2 "$tmp/cnn-nccl" --threads 1 --out "$tmp/run" "$@" \
        >"$out" 2>"$err" </dev/null
    status=$?
}

test_nccl() {
    local why small=(--model cifar --dataset synthetic --limit-train 24 --limit-test 6 --epochs 1
        --global-batch 12)
    why=$([ -z "${QUICK:-}" ] || echo "QUICK=1")
    [ -n "$why" ] || why=$(why_no_mpi)
    command -v g++ >/dev/null || why="g++ is not installed, which the emulator needs"
    if [ -n "$why" ]; then
        skip nccl "$why"
        return
    fi
    if ! build_nccl 2>"$err"; then
        fail nccl/build "a program" "$(head -n 3 "$err")"
        return
    fi
    with replicas 2 "${small[@]}"
    mv "$tmp/run" "$tmp/replicas"
    with_nccl 2 "${small[@]}"
    same nccl/status 0 "$status"
    same nccl/joined 2 "$(grep -c 'NCCL: rank [01] of 2' "$err")"
    same nccl/left 2 "$(grep -c 'NCCL: left a group of 2' "$err")"
    line nccl/named '^Gradients: ddp, added up by NCCL'
    same_losses nccl/losses 2 "$tmp/replicas" "$tmp/run"
    NCCL_PEER_FAILS=1 CUEMU_LAZY=1 with_nccl 2 "${small[@]}" --timeout 60
    holds nccl/failed_peer "an error by name, not a time-out" "$(cat "$err")" \
        test "$status" -ne 0 -a "$(grep -c 'all-reduce, in another rank.*: remote process exited' "$err")" -gt 0
    with_nccl 1 "${small[@]}"
    holds nccl/shared_gpu "our own message, before NCCL's" "$(cat "$out" "$err")" \
        test "$status" -eq 2 -a "$(grep -c 'share a GPU on .*--oversubscribe' "$err")" -gt 0 -a \
        "$(cat "$out" "$err" | grep -c 'NCCL: rank\|Duplicate')" -eq 0
    with_nccl 1 "${small[@]}" --oversubscribe
    same nccl/oversubscribe "0 0" "$status $(grep -c 'NCCL: rank' "$err")"
    line nccl/oversubscribe/ring '^Gradients: ddp, added up by a ring of MPI processes'
    same_losses nccl/oversubscribe/losses 2 "$tmp/replicas" "$tmp/run"
}

# ---- What the run folder says

test_run_folder() {
    with replicas 3 --dataset synthetic --limit-train 3000 --limit-test 10 --dry-run
    line folder/images_are_shared '^Memory in MB of each device: .* data set 0\.8,' # of 3010 * 785 bytes
    with replicas 3 --dataset synthetic --limit-train 60 --limit-test 10 --epochs 1 --batch-size 5 \
        --trace "$tmp/trace.json"
    same folder/ranks 12 "$(tail -n +2 "$tmp/run/steps.csv" | grep -c '^1,')"
    # 2 (N - 1) / N of the gradients' 4 * 1199882 bytes, and of the gaps between tensors
    same folder/bytes_sent 12 "$(awk -F , 'NR > 1 && $16 >= 6399370 && $16 < 6399370 * 1.001' \
        "$tmp/run/steps.csv" | wc -l)"
    line folder/rank_table '^Rank 2: .*, cpu'
    line folder/images '^epoch=1 images=60 '
    local number='[0-9]+\.[0-9]+'
    line folder/summary "^ranks=3 compute_s=$number load_s=$number comm_s=$number \
exposed_comm_s=$number other_s=$number mb_sent=25\.6 "
    line folder/first_line '^Train Epoch: 1 \[0/60 \(0%\)\]'
    python folder/json "$tmp/run" "$tmp/trace.json" <<'END'
import collections, csv, json, sys
run = json.load(open(sys.argv[1] + "/run.json"))
want = {"mode": "ddp", "world": 3, "batch_per_device": 5, "global_batch": 15, "iterations": 4,
        "buckets": 2, "workers": 1, "graph": False}
if run["parallel"] != want:
    print(run["parallel"])
for row in csv.DictReader(open(sys.argv[1] + "/steps.csv")):
    parts = ["load", "copy", "forward", "backward", "optimizer", "exposed_comm", "other"]
    sum_s = sum(float(row[part + "_s"]) for part in parts)
    if abs(sum_s - float(row["seconds"])) > 1e-5:
        print("parts add up to", sum_s, "of", row["seconds"])
# comm_s is the time of all buckets of a step
comm, traced = collections.Counter(), collections.Counter()
for row in csv.DictReader(open(sys.argv[1] + "/steps.csv")):
    comm[int(row["rank"])] += float(row["comm_s"])
for event in json.load(open(sys.argv[2]))["traceEvents"]:
    if event["name"] == "all-reduce":
        traced[event["pid"]] += event["dur"] / 1e6
for rank in range(3):
    if not traced[rank] > 0 or abs(comm[rank] - traced[rank]) > 2e-5:
        print("rank", rank, "communicates for", comm[rank], "s, in the trace", traced[rank])
END
    with replicas 2 --dataset synthetic --limit-train 40 --limit-test 4 --epochs 1 --parallel dp \
        --batch-size 10
    python folder/dp "$tmp/run" <<'END'
import json, sys
run = json.load(open(sys.argv[1] + "/run.json"))["parallel"]
if (run["mode"], run["batch_per_device"], run["global_batch"], run["iterations"]) != ("dp", 5, 10, 4):
    print(run)
END
}

# Two virtual GPUs: their compute and their all-reduce, each on its track
test_trace() {
    local first="conv1 forward" last="conv1 backward"
    if [ ! -x "$emulator" ]; then
        skip trace "no cnn-emu: make emulate"
        return
    fi
    with gpus 2 --dataset synthetic --limit-train 24 --limit-test 8 --epochs 1 --global-batch 8 \
        --trace "$tmp/trace.json" --trace-steps 0:2
    same trace/status "0 4" "$status $(grep -c '"name":"step [01]"' "$tmp/trace.json")"
    trace_is_good trace/gpus "$tmp/trace.json" "0:device:$first,0:device:$last,1:device:$first,\
1:device:$last,0:communication:all-reduce,1:communication:all-reduce,0:steps:step 0,1:steps:step 1"
}

# ---- Stopping and going on

# ranks_of PID: the processes of this job that are ranks
ranks_of() { pgrep -P "$1" | while read -r p; do [[ $(ps -o comm= -p "$p") = cnn* ]] && echo "$p"; done; }

test_resume() {
    local kind why small=(--model cifar --dataset synthetic --limit-train 30 --limit-test 4 --epochs 2)
    why=$(why_no_mpi)
    for kind in replicas mpi; do
        [ "$kind" = replicas ] || [ -z "$why" ] || { skip resume/mpi "$why" && continue; }
        rm -f "$tmp/straight" "$tmp/stopped"
        with "$kind" 3 "${small[@]}" --batch-size 2 --checkpoint "$tmp/straight"
        with "$kind" 3 "${small[@]}" --batch-size 2 --checkpoint "$tmp/stopped" --max-steps 7
        with "$kind" 3 "${small[@]}" --batch-size 2 --checkpoint "$tmp/stopped" --resume
        same_file "resume/$kind" "$tmp/stopped" "$tmp/straight"
    done
    refused resume/other_world 2 "was saved with devices=3, but this run has devices=1" "${small[@]}" \
        --batch-size 6 --resume --checkpoint "$tmp/straight"
    run --model cifar --dataset synthetic --limit-train 30 --limit-test 7 --eval \
        --load "$tmp/straight"
    local one
    one=$(value accuracy)
    run --model cifar --dataset synthetic --limit-train 30 --limit-test 7 --eval \
        --load "$tmp/straight" --replicas 4 --oversubscribe
    same eval/accuracy "$one" "$(value accuracy)"
}

# A signal that one rank gets: all of them learn of it at the log interval, save, and end after the same step.
test_signal() {
    local why job rank small=(--model cifar --dataset synthetic --limit-train 12000 --limit-test 4
        --batch-size 4 --epochs 1)
    why=$(why_no_mpi)
    if [ -n "$why" ]; then
        skip signal "$why"
        return
    fi
    # what mpirun says counts, also in a job whose own step has another size
    SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=0 with mpi 3 "${small[@]}" --checkpoint "$tmp/straight"
    line mpi/resources '^RESOURCES of the process of rank 0$'
    same signal/straight "0, " "$status, $(cat "$err")"
    rm -rf "$tmp/run" "$tmp/signalled"
    nice -n 19 mpirun -n 3 "$cnn" --no-cuda --threads 1 --out "$tmp/run" "${small[@]}" --log-interval 7 \
        --checkpoint "$tmp/signalled" >"$out" 2>"$err" </dev/null &
    job=$!
    until_true grep -qs '^1,8,' "$tmp/run/steps.csv"
    rank=$(ranks_of $job | tail -n 1)
    kill -TERM "$rank"
    wait $job
    holds signal/status "an exit status of 143, and \"stopped\"" "exit $?, $(head -n 2 "$tmp/run/run.json"), $(cat "$err")" \
        grep -q '"status": "stopped"' "$tmp/run/run.json"
    line signal/state '^State: STOPPED \(exit code 143\)$'
    # steps 1, 8, 15, ... of an epoch are at the log interval
    same signal/at_the_interval "1 1" "$(head -c 3000 "$tmp/signalled" | grep -aoP '"(epoch|batch)":"\K[0-9]+' |
        paste -sd ' ' | awk '{ print $1, $2 % 7 }')"
    with mpi 3 "${small[@]}" --checkpoint "$tmp/signalled" --resume
    same_file signal/goes_on "$tmp/signalled" "$tmp/straight"
}

# ---- A rank that dies or hangs ends the job

test_dead_rank() {
    local why signal job rank left
    why=$(why_no_mpi)
    if [ -n "$why" ]; then
        skip dead "$why"
        return
    fi
    for signal in KILL STOP; do
        mpirun -n 3 "$cnn" --no-cuda --threads 1 --timeout 4 --dataset synthetic --limit-test 10 \
            --limit-train 6000 --epochs 1000 --checkpoint "$tmp/dying" --save-every 5steps \
            --batch-size 4 >"$out" 2>"$err" </dev/null &
        job=$!
        until_true test -s "$tmp/dying"
        rank=$(ranks_of $job | tail -n 1)
        kill -$signal "$rank"
        WAIT_S=30 until_true eval "! kill -0 $job 2>/dev/null"
        left=$(ranks_of $job | grep -cvx "$rank")
        [ $signal = KILL ] || kill -KILL "$rank" 2>/dev/null
        if kill -0 $job 2>/dev/null; then
            fail "dead/$signal/ends" "the job to end within 30 s" "it runs"
            kill -KILL $job
        fi
        wait $job
        status=$?
        holds "dead/$signal/status" "an exit status above 0, no rank left" \
            "exit $status, $left ranks left" test $status -gt 0 -a "$left" -eq 0
        holds "dead/$signal/named" "rank N in the message" "$(cat "$err")" grep -q 'rank 2' "$err"
        run --model mnist --eval --load "$tmp/dying" --dataset synthetic --limit-train 12 --limit-test 10
        same "dead/$signal/checkpoint" 0 "$status"
        with mpi 3 --dataset synthetic --limit-test 10 --limit-train 6000 --batch-size 4 --epochs 1 \
            --max-steps 30 --checkpoint "$tmp/dying" --resume
        holds "dead/$signal/goes_on" "exit 0, Resuming from" "$(cat "$out" "$err")" \
            grep -q '^Resuming from' "$out"
        rm -f "$tmp/dying"
    done
}

# ---- No races: under the thread sanitizer, without OpenMP, whose threads it does not know

test_races() {
    local options flags="-std=gnu17 -O1 -g1 -DUNROLL= -fsanitize=thread -Wno-unknown-pragmas" most=4
    [ -z "${QUICK:-}" ] || most=1
    # shellcheck disable=SC2086 # several words on purpose
    if ! clang $flags "$repo/cnn.c" -o "$tmp/tsan" -lm -lpthread 2>/dev/null; then
        skip races "no clang with -fsanitize=thread"
        return
    fi
    while read -r options; do
        # shellcheck disable=SC2086
        "$tmp/tsan" --dataset synthetic --limit-train 48 --limit-test 8 --epochs 2 --oversubscribe \
            --replicas 3 $options >"$out" 2>"$err" </dev/null
        status=$?
        same "races/$options" "exit 0, 0 reports" \
            "exit $status, $(grep -c 'WARNING: Thread' "$err") reports"
    done < <(head -n $most <<'END'
--model cifar --global-batch 12 --bucket-mb 0.01 --augment crop-flip --workers 2 --threads 6
--model resnet8 --batch-size 10 --parallel dp --threads 6
--model resnet8 --global-batch 12 --overlap off
--model mnist --global-batch 12
END
    )
}

# ---- What makes no sense is refused

test_refusals() {
    local d=(--dataset synthetic --limit-train 16 --limit-test 4)
    refused refusals/replicas 2 "expected at most" "${d[@]}" --replicas 64
    refused refusals/gpus 2 "--replicas 2" "${d[@]}" --no-cuda --gpus 2
    refused refusals/both 2 "expected no --replicas" "${d[@]}" --gpus 2 --replicas 2
    refused refusals/batch 2 "multiple of the 2" "${d[@]}" --replicas 2 --oversubscribe --global-batch 9
    refused refusals/parallel 2 "ddp|dp" "${d[@]}" --parallel hogwild
    local why
    why=$(why_no_mpi)
    if [ -n "$why" ]; then
        skip refusals/mpi "$why"
        return
    fi
    with mpi 2 "${d[@]}" --parallel dp
    holds refusals/mpi_dp "no 0, a word on --parallel" "exit $status, $(cat "$err")" \
        grep -q 'expected --parallel ddp' "$err"
    with mpi 2 "${d[@]}" --replicas 2
    holds refusals/mpi_replicas "a word on --replicas" "exit $status, $(cat "$err")" \
        grep -q 'without --gpus or --replicas' "$err"
}

test_equal_losses
test_odd_sizes
test_same_bits
test_nccl
test_run_folder
test_trace
test_resume
test_signal
test_dead_rank
test_races
test_refusals
