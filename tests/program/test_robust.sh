#!/usr/bin/env bash
# What may happen to a run from outside: signals, other kinds of files, closed or full outputs, limits of
# memory and of files, a disk that fails, another run in the same folder.
# CNN=PATH: another binary. QUICK=1: fewer signals and moments.
# Prints `pass robust/NAME`, `fail robust/NAME: expected ..., found ...` or `skip robust/NAME: why`.
suite=robust
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

# Two epochs of three steps.
tiny=(--model cifar --threads 1 --dataset synthetic --limit-train 10 --limit-test 10 --epochs 2)
small=("${tiny[@]}" --max-steps 1)
replicas=(--threads 2 --replicas 2 --oversubscribe)

# ---- Signals

# starts OPTIONS...: in the background, in $pid; returns when it has trained a few steps
starts() {
    rm -rf "$tmp/signals"
    # nice: on a busy machine the program does not end before this script has seen its rows
    env --default-signal nice -n 19 "$cnn" "$@" --out "$tmp/signals" --log-interval 2 >"$out" 2>"$err" </dev/null &
    pid=$!
    until_true grep -qs '^1,8,' "$tmp/signals/steps.csv"
}

# ends NAME SIGNAL STATUS OPTIONS...: the step is finished, the checkpoint saved, the program ends with
# STATUS, and a resumed run equals one that was not disturbed, $tmp/straight.
ends() {
    local name=signals/$1 signal=$2 number=$3
    shift 3
    rm -f "$tmp/signalled"
    starts "$@" --checkpoint "$tmp/signalled" --resume --save-every 2
    kill "-$signal" "$pid"
    wait "$pid"
    same "$name/status" "$number stopped" "$? $(status_of "$tmp/signals")"
    line "$name/state" "^State: STOPPED \(exit code $number\)"
    same "$name/saved" "in epoch 1" "in epoch $(position "$tmp/signalled" epoch)"
    same "$name/temporary" "" "$(find "$tmp" -name '*.tmp')"
    run "$@" --checkpoint "$tmp/signalled" --resume --out "$tmp/signals" --log-interval 50
    same_file "$name/equal" "$tmp/signalled" "$tmp/straight"
    same "$name/folder" "$(run_rows "$tmp/straight_run")" "$(run_rows "$tmp/signals")"
}

test_signals() {
    local long=(--model cifar --dataset synthetic --threads 1 --limit-train 2000 --limit-test 40 --epochs 2) pid
    run "${long[@]}" --checkpoint "$tmp/straight" --out "$tmp/straight_run" --log-interval 50
    ends TERM TERM 143 "${long[@]}"
    ends INT INT 130 "${long[@]}"
    ends HUP HUP 129 "${long[@]}"
    rm -f "$tmp/signalled"
    starts "${long[@]}" --checkpoint "$tmp/signalled" --save-every 3
    kill -USR1 "$pid"
    until_true test -s "$tmp/signalled"
    same signals/USR1/saves "epoch 1, running" \
        "epoch $(position "$tmp/signalled" epoch), $(status_of "$tmp/signals")"
    wait "$pid"
    same signals/USR1/goes_on "0 complete" "$? $(status_of "$tmp/signals")"
    same_file signals/USR1/equal "$tmp/signalled" "$tmp/straight"
    starts "${long[@]}" --epochs 1000 --limit-test 10000
    kill -INT "$pid"
    kill -INT "$pid"
    wait "$pid"
    same signals/twice 130 $?
    # Ignored signals, as by nohup, stay ignored.
    (trap '' HUP && exec "$cnn" "${long[@]}" --out "$tmp/nohup" --log-interval 2 >"$out" 2>"$err") &
    pid=$!
    until_true grep -qs '^1,8,' "$tmp/nohup/steps.csv"
    kill -HUP "$pid"
    wait "$pid"
    same signals/nohup "0 complete" "$? $(status_of "$tmp/nohup")"
    # A --dry-run whose only step was interrupted has tested nothing.
    env --default-signal "$cnn" --dataset synthetic --kernels naive --threads 1 --limit-train 128 --limit-test 1 \
        --dry-run --per-class --out "$tmp/dry" >"$out" 2>"$err" </dev/null &
    pid=$!
    until_true grep -qs '"status": "running"' "$tmp/dry/run.json"
    kill -TERM "$pid"
    wait "$pid"
    same signals/dry_run "143 stopped, no predictions.csv, 0 classes" "$? $(status_of "$tmp/dry"), $(
        [ -e "$tmp/dry/predictions.csv" ] || echo no) predictions.csv, $(grep -c '^Accuracy for class' "$out") classes"
    local both=("${long[@]}" "${replicas[@]}" --global-batch 4) parallel
    for parallel in ddp dp; do
        run "${both[@]}" --parallel $parallel --checkpoint "$tmp/straight" --out "$tmp/straight_run" --log-interval 50
        ends $parallel TERM 143 "${both[@]}" --parallel $parallel
    done
}

# Ctrl-Z for longer than --timeout, and a pager that pauses, are nobody's fault. Beside other programs a second is too
# short: a replica may wait as long for its core.
test_stopped() {
    local long=(--model cifar --dataset synthetic --threads 1 --limit-train 2000 --limit-test 40 --epochs 1 "${replicas[@]}") pid
    starts "${long[@]}" --timeout 5
    kill -STOP "$pid"
    sleep 6
    kill -CONT "$pid"
    wait "$pid"
    same stopped/ctrl_z "0 complete" "$? $(status_of "$tmp/signals")"
    "$cnn" "${long[@]}" --timeout 5 --log-interval 1 2>"$err" | { sleep 7 && cat >/dev/null; }
    same stopped/pager "0, " "${PIPESTATUS[0]}, $(cat "$err")"
}

# ---- What kind of file it is

test_kinds_of_files() {
    run "${small[@]}" --checkpoint "$tmp/plain"
    echo old >"$tmp/target"
    ln -s target "$tmp/link"
    run "${small[@]}" --checkpoint "$tmp/link"
    same files/link/stays target "$(readlink "$tmp/link")"
    same_file files/link/target "$tmp/target" "$tmp/plain"
    chmod 600 "$tmp/target"
    run "${small[@]}" --checkpoint "$tmp/target"
    same files/mode 600 "$(stat -c %a "$tmp/target")"
    # what is written at the end must not replace the checkpoint, however it is spelled
    refused files/trace_is_checkpoint 2 --trace "${small[@]}" --checkpoint "$tmp/plain" --trace "$tmp/plain"
    refused files/trace_is_target 2 --trace "${small[@]}" --checkpoint "$tmp/link" --trace "$tmp/target"
    refused files/model_is_checkpoint 2 --save-model "${small[@]}" --save-model --out "$tmp/model" \
        --checkpoint "$tmp/./model/model.safetensors"
    refused files/model_is_resumed 2 --save-model "${small[@]}" --save-model --out "$tmp/model" \
        --checkpoint "$tmp/model/model.safetensors" --resume
    ln -s loop "$tmp/loop"
    refused files/unreadable_is_not_missing 1 "$tmp/loop" "${small[@]}" --checkpoint "$tmp/loop" --resume
    refused files/eval_of_nothing 1 "$tmp/typo" "${small[@]}" --checkpoint "$tmp/typo" --resume --eval
    local path irregular="it exists and is not a regular file; choose another name"
    mkdir "$tmp/folder" && mkfifo "$tmp/pipe" && ln -s pipe "$tmp/link_to_pipe"
    for path in "$tmp"/{folder,pipe,link_to_pipe} /dev/null; do
        refused "files/irregular/trace/${path##*/}" 1 "cannot write $path: $irregular" "${small[@]}" --trace "$path"
        refused "files/irregular/checkpoint/${path##*/}" 1 "cannot write $path: $irregular" "${small[@]}" --checkpoint "$path"
    done
    same files/irregular/kept "directory fifo symbolic link character special file" \
        "$(stat -c %F "$tmp"/{folder,pipe,link_to_pipe} /dev/null | xargs)"
    refused files/pipe_to_load 1 "$tmp/pipe" "${small[@]}" --load "$tmp/pipe"
    refused files/pipe_to_resume 1 "$tmp/pipe" "${small[@]}" --checkpoint "$tmp/pipe" --resume
    mkdir "$tmp/data" && mkfifo "$tmp/data/train-images-idx3-ubyte" "$tmp/data/train-labels-idx1-ubyte"
    refused files/pipe_as_data 1 "$tmp/data/train-images-idx3-ubyte" --data "$tmp/data" --dataset mnist
}

# ---- Outputs

test_outputs() {
    "$cnn" "${small[@]}" --out "$tmp/closed" >&- 2>"$err"
    same closed/stdout "1, cnn: error: cannot write to standard output: Bad file descriptor" "$?, $(cat "$err")"
    same closed/logs 0 "$(grep -vc '^[1e]' "$tmp/closed/epochs.csv")"
    "$cnn" "${small[@]}" --out "$tmp/closed" --checkpoint "$tmp/closed/ck" >&- 2>&- <&-
    same closed/all "1 failed" "$? $(status_of "$tmp/closed")"
    "$cnn" "${small[@]}" --quiet >&- 2>"$err"
    same closed/quiet "1, cnn: error: cannot write to standard output: Bad file descriptor" "$?, $(cat "$err")"
    "$cnn" "${small[@]}" --quiet >/dev/full 2>"$err"
    same full/quiet "1, cnn: error: cannot write to standard output: No space left on device" "$?, $(cat "$err")"
    local name=$'\x1b[31m\xc3\xa4"\\\x7f'
    run "${small[@]}" --out "$tmp/$name"
    holds names/utf8 "UTF-8" "other bytes" iconv -f UTF-8 -t UTF-8 "$tmp/$name/run.json"
    same names/json $'\\u001b[31m\xc3\xa4\\"\\\\\x7f' "$(grep -oP '"out": ".*/\K.*(?=",)' "$tmp/$name/run.json")"
    python names/read "$tmp/$name/run.json" <<'END'
import json, sys
path = sys.argv[1].encode("utf-8", "surrogateescape").decode()[:-len("/run.json")]
if json.load(open(sys.argv[1], encoding="utf-8"))["settings"]["out"] != path:
    print("another name of its folder")
END
    printf -- '--model \033[31mred\n' >"$tmp/arguments"
    refused names/escape 2 'found "?[31mred"' "@$tmp/arguments"
    printf -- '--model m\303\274ll\177\n' >"$tmp/arguments"
    refused names/utf8_in_errors 2 'found "müll?"' "@$tmp/arguments"
    refused seed/too_large 2 --seed "${small[@]}" --seed 9007199254740993
}

# ---- Limits

test_limits() {
    SLURM_MEM_PER_CPU='' SLURM_MEM_PER_NODE=300 refused memory/slurm 1 "314.6 MB available on this device (cpu); try a --batch-size below \
4096, a smaller --test-batch-size, fewer --workers or a smaller --model" --model mnist --dataset synthetic \
        --batch-size 4096 --limit-train 8192 --epochs 1
    SLURM_MEM_PER_CPU=100 SLURM_CPUS_ON_NODE=3 refused memory/slurm_by_core 1 "314.6 MB available" \
        --model mnist --dataset synthetic --batch-size 4096 --limit-train 8192 --epochs 1
    local option limit wrong=
    for option in --quiet --profile --layers; do # 3: stdin, stdout, stderr; libraries need another one
        for limit in 4 5 6 7 8; do
            (exec >"$out" 2>"$err" && ulimit -n $limit && exec "$cnn" "${small[@]}" "$option")
            status=$?
            [ "$status, $(cat "$err")" = "0, " ] || grep -q '^cnn: error: .*: Too many open files$' "$err" ||
                wrong+="|$option, $limit: exit $status, $(cat "$err")"
        done
    done
    same descriptors "" "$wrong"
    if [ -z "${SANITIZED:-}" ]; then # their shadow memory is larger than the limit
        (exec >"$out" 2>"$err" && ulimit -v 900000 && exec "$cnn" "${small[@]}" --workers 256)
        status=$?
        same threads "1, cnn: error: cannot start a loader worker: Resource temporarily unavailable; ulimit -u limits \
threads, and ulimit -v their memory" "$status, $(tail -n 1 "$err")"
    fi
    run "${small[@]}" --layers
    holds layers/planned "more than 134 MB of buffers" "$(grep '^Memory in MB' "$out")" \
        at_least "$(grep -oP ' buffers \K[0-9.]+' "$out")" 134
    run "${small[@]}" --trace "$tmp/trace" --trace-steps 0:900000000 --epochs 100000
    same trace/room "0, one step" "$status, $(grep -c '"name":"step ' "$tmp/trace" | sed 's/^1$/one step/')"
    run --model cifar --threads 1 --dataset synthetic --limit-train 30000 --limit-test 1 --epochs 1 --log-interval 10000 \
        --trace "$tmp/trace" --trace-steps 0:30000
    line trace/full "^Wrote 262144 events to $tmp/trace; more did not fit: use fewer --trace-steps\$"
    same trace/full/events "0, 262144" "$status, $(grep -c '"ph":"X"' "$tmp/trace")"
}

# ---- Another run in the folder

test_folders() {
    run "${small[@]}" --out "$tmp/used" --save-model --layers --profile
    run "${small[@]}" --out "$tmp/used"
    same folders/used "epochs.csv predictions.csv run.json steps.csv" "$(cd "$tmp/used" && echo *)"
    run "${small[@]}" --out "$tmp/used" --save-model
    run "${small[@]}" --out "$tmp/used" --load "$tmp/used/model.safetensors"
    same folders/model_it_loads "0 epochs.csv model.safetensors predictions.csv run.json steps.csv" "$status $(cd "$tmp/used" && echo *)"
    # The model is there before anything else can fail.
    mkdir -p "$tmp/blocked/predictions.csv"
    refused folders/predictions 1 "predictions.csv: it exists and is not a regular file" "${small[@]}" --out "$tmp/blocked" --save-model
    same folders/model_first model.safetensors "$(cd "$tmp/blocked" && echo model*)"
    local pid
    starts --model cifar --dataset synthetic --threads 1 --limit-train 2000 --limit-test 10 --epochs 10000 \
        --checkpoint "$tmp/signals.checkpoint" --save-every 4steps
    refused folders/two_at_once 1 "another run" "${small[@]}" --out "$tmp/signals"
    refused checkpoint/two_at_once 1 "another run" "${small[@]}" --checkpoint "$tmp/signals.checkpoint"
    ln -s signals.checkpoint "$tmp/second_name"
    refused checkpoint/two_names 1 "another run" "${small[@]}" --checkpoint "$tmp/second_name" --resume
    # A run waits for one that is about to end.
    { sleep 1 && kill -9 "$pid"; } &
    run "${small[@]}" --out "$tmp/signals"
    same folders/waits_for_the_other 0 "$status"
    wait "$pid" 2>/dev/null
    run "${small[@]}" --checkpoint "$tmp/signals.checkpoint"
    same checkpoint/after_a_killed_one "0 signals.checkpoint" "$status $(cd "$tmp" && echo signals.checkpoint*)"
    run "${small[@]}" --out "$tmp/signals"
    same folders/after_a_killed_one "0 stopped" "$status $(status_of "$tmp/signals")"
    # A run that has waited for another one holds the lock, although the other one has removed the file.
    local first long
    long=(--model cifar --dataset synthetic --threads 1 --limit-train 2000 --limit-test 10 --epochs 10000)
    starts "${long[@]}" --checkpoint "$tmp/signals.checkpoint"
    first=$pid
    nice -n 19 "$cnn" "${long[@]}" --checkpoint "$tmp/signals.checkpoint" >"$tmp/waits" 2>&1 </dev/null &
    pid=$!
    sleep 1.5 # it waits for 5 seconds
    kill "$first" && wait "$first"
    until_true grep -q '^Train Epoch' "$tmp/waits"
    refused checkpoint/held_by_the_second 1 "another run" "${small[@]}" --checkpoint "$tmp/signals.checkpoint"
    kill -9 "$pid"
    wait "$pid" 2>/dev/null
    # No replica reads the checkpoint before the first one holds the lock: a run that was killed may still save.
    local two=("${tiny[@]}" "${replicas[@]}" --global-batch 4)
    run "${two[@]}" --checkpoint "$tmp/saved" --max-steps 2
    cp "$tmp/saved" "$tmp/newer"
    run "${two[@]}" --checkpoint "$tmp/newer" --resume --max-steps 4
    flock "$tmp/saved.lock" sh -c "touch '$tmp/held'; sleep 2; mv '$tmp/newer' '$tmp/saved'" &
    until_true test -e "$tmp/held"
    run "${two[@]}" --checkpoint "$tmp/saved" --resume --max-steps 5
    wait $!
    same checkpoint/replicas_wait_for_the_lock "0, 1 line, " \
        "$status, $(grep -c "^Resuming from $tmp/saved: epoch 2, step 2$" "$out") line, $(cat "$err")"
    # srun without MPI starts copies
    local plain number
    run "${small[@]}"
    plain=$(figures)
    for number in 0 1; do
        SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=$number run "${small[@]}"
        same folders/srun_without_mpi/$number "0 $plain $((1 - number))" \
            "$status $(figures) $(grep -c '^cnn: warning: srun has started 2 processes without MPI' "$err")"
    done
    # A log that cannot be read is not an empty one.
    run "${small[@]}" --out "$tmp/signals" --checkpoint "$tmp/goes_on"
    rm "$tmp/signals/steps.csv" && ln -s steps.csv "$tmp/signals/steps.csv"
    refused folders/unreadable_log 1 "$tmp/signals/steps.csv" "${tiny[@]}" --out "$tmp/signals" \
        --checkpoint "$tmp/goes_on" --resume
}

# ---- A disk that fails

# In the program's place, fsync() fails from call number FSYNC on, after DELAY seconds; FOLDERS=1: of folders only
make_shim() {
    cat >"$tmp/shim.c" <<'END'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
int fsync(int fd) {
    static int calls;
    struct stat info;
    const char *folders = getenv("FOLDERS");
    const int counts = !folders || (fstat(fd, &info) == 0 && S_ISDIR(info.st_mode));
    if (!counts || __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED) < atoi(getenv("FSYNC")))
        return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
    sleep((unsigned)atoi(getenv("DELAY")));
    errno = EIO;
    return -1;
}
END
    ${CC:-cc} -shared -fPIC "$tmp/shim.c" -o "$tmp/shim.so" -ldl 2>/dev/null
}

test_disk() {
    if ldd "$cnn" | grep -q 'libasan\|libtsan' || ! make_shim; then
        skip disk "needs a C compiler, and a program without sanitizers"
        return
    fi
    local call calls='2 5 8' pids=() i=0
    [ -z "${QUICK:-}" ] || calls='5 8'
    # A rank whose disk hangs and fails is given up by the other; both end, and within seconds.
    for call in $calls; do
        (FSYNC=$call DELAY=4 LD_PRELOAD=$tmp/shim.so timeout 40 "$cnn" "${tiny[@]}" --epochs 3 "${replicas[@]}" --timeout 1 \
            --checkpoint "$tmp/disk$call.ck" --out "$tmp/disk$call" >/dev/null 2>"$tmp/disk$call.err") &
        pids+=($!)
    done
    for call in $calls; do
        wait "${pids[i++]}"
        same "disk/hangs/$call" "exit 1, 1 line" "exit $?, $(grep -c '^cnn: error: ' "$tmp/disk$call.err") line"
    done
    rm -f "$tmp/synced"
    FOLDERS=1 FSYNC=1 DELAY=0 LD_PRELOAD=$tmp/shim.so refused disk/folder 1 "cannot sync the folder of" "${small[@]}" \
        --checkpoint "$tmp/synced"
    rm -f "$tmp/synced"
    FSYNC=1 DELAY=0 LD_PRELOAD=$tmp/shim.so refused disk/file 1 "cannot write $tmp/synced.tmp: Input/output error" "${small[@]}" \
        --checkpoint "$tmp/synced"
    same disk/nothing_left "" "$(find "$tmp" -name 'synced*')"
    # A resumed run that ends early leaves no predictions of the run before.
    run "${small[@]}" --epochs 1 --checkpoint "$tmp/synced" --out "$tmp/resumed"
    FSYNC=1 DELAY=0 LD_PRELOAD=$tmp/shim.so run "${small[@]}" --epochs 2 --checkpoint "$tmp/synced" --resume \
        --out "$tmp/resumed"
    same disk/old_predictions "1 " "$status $(find "$tmp/resumed" -name 'predictions*')"
    rm "$tmp/synced"
    # The first save is after so many steps, or epochs of 5 steps: the program ends there.
    local every
    for every in 1steps:1 3steps:3 7steps:7 1:5 2:10; do
        FSYNC=1 DELAY=0 LD_PRELOAD=$tmp/shim.so run --no-cuda --model cifar --dataset synthetic --limit-train 20 --limit-test 4 \
            --batch-size 4 --epochs 3 --log-interval 1 --checkpoint "$tmp/synced" --save-every "${every%:*}"
        same "disk/first_save/${every%:*}" "1 ${every#*:}" "$status $(grep -c '^Train Epoch' "$out")"
    done
}

test_signals
test_stopped
test_kinds_of_files
test_outputs
test_limits
test_folders
test_disk
exit 0
