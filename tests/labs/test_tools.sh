#!/usr/bin/env bash
# Tests labs/tools/to_tensorboard.py, whose event files are read by TensorBoard's own reader, labs/tools/watch.py, and
# labs/tools/monitor, with programs made up here in place of nvidia-smi and rocm-smi. No time has a bound.
# CNN=PATH: another binary. PYTHON=PATH: a python that has the package tensorboard; otherwise .venv, then
# the system's. Prints `pass tools/NAME`, `fail tools/NAME: ...` or `skip tools/NAME: ...`.
suite=tools
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
if ! command -v python3 >/dev/null; then
    skip all "python3 is not installed"
    exit 0
fi
plain=$(python3 -c 'import sys; print(sys.executable)')

# ---- to_tensorboard.py

tensorboard() {
    "$with_tb" "$repo/labs/tools/to_tensorboard.py" "$@" >"$out" 2>"$err" </dev/null
    status=$?
}

cat >"$tmp/scalars.py" <<'END'
"""scalars.py FOLDER [TAG...]: `TAG STEP VALUE` of each scalar there, as TensorBoard reads it."""
import logging, sys
logging.disable()
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
events.Reload()
for tag in sys.argv[2:] or sorted(events.Tags()["scalars"]):
    for e in events.Scalars(tag):
        print(tag, e.step, f"{e.value:.5g}")
END
scalars() { "$with_tb" "$tmp/scalars.py" "$@" 2>&1; }

# clock FOLDER: the seconds of the events, in their order, from 1 on
clock() {
    "$with_tb" - "$1" 2>&1 <<'END'
import glob, sys
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
times = [e.wall_time for e in EventFileLoader(glob.glob(sys.argv[1] + "/events*")[0]).Load() if e.step]
print(*[round(t - times[0] + 1) for t in times])
END
}

# same_epochs NAME RUN_FOLDER [EVENTS]: the scalars of each epoch are those of epochs.csv
same_epochs() {
    local tag
    for tag in loss test_loss train_accuracy accuracy lr img_per_s; do
        same "$1/$tag" "$(awk -F, -v tag=$tag 'NR == 1 { for (i = 1; i <= NF; i++) column[$i] = i; next }
            { printf "%s %d %.5g\n", tag, $1, $column[tag == "loss" ? "train_loss" : tag] }' "$2/epochs.csv")" \
            "$(scalars "${3:-$2}" $tag)"
    done
}

epoch_columns=epoch,images,seconds,img_per_s,loader_wait_s,train_loss,train_accuracy,test_seconds,test_loss,accuracy,lr,weight_hash
step_columns=epoch,step,rank,images,loss,lr,seconds,load_s,copy_s,forward_s,backward_s,optimizer_s,comm_s
step_columns+=,exposed_comm_s,other_s,bytes_sent,warmup

# status DIR STATUS [EMULATED]: its run.json
status() {
    echo "{\"status\": \"$2\", \"emulated\": ${3:-false}, \"parallel\": {\"iterations\": 3},
        \"resources\": {\"wall_s\": 9}}" >"$1/run.json.tmp" && mv "$1/run.json.tmp" "$1/run.json"
}

# make_run DIR STATUS: two ranks, 3 steps an epoch, stopped in the second one; half a line at the end
make_run() {
    mkdir -p "$1"
    status "$@"
    cat >"$1/epochs.csv" <<END
$epoch_columns
1,12,3,4,0,2.5,25,1,2.25,12.5,1,89abcdef01234567
END
    cat >"$1/steps.csv" <<END
$step_columns
1,1,0,3,2,1,0.5,0.001,0,0.01,0.02,0.004,0.003,0.002,0.0005,8,1
1,1,1,1,4,1,1,0.003,0,0.03,0.02,0.004,0.003,0.002,0.0005,8,1
1,2,0,2,,0.5,1,,0,0.01,0.02,0.004,0.003,0.002,0.0005,8,0
1,2,1,2,3,0.5,1,0.002,0,0.01,0.02,0.004,0.003,0.002,0.0005,8,0
1,3,0,2,nan,0.5,1,0.001,0,0.01,0.02,0.004,0.003,0.002,0.0005,8,0
1,3,1,2,1,0.5,1,0.001,0,0.01,0.02,0.004,0.003,0.002,0.0005,8,0
2,1,0,2,1,0.25,1,0.001,0,0.01,0.02,0.004,0.003,0.002,0.0005,8,0
END
    printf '2,1,1,2,2,0.2' >>"$1/steps.csv"
}

test_made_up() {
    make_run "$tmp/two" stopped
    tensorboard "$tmp/two"
    same made_up/status "0 " "$status $(cat "$err")"
    line made_up/said "^$tmp/two: 50 values, the run is stopped; tensorboard --logdir $tmp/two\$"
    # (3 * 2 + 1 * 4) / 4; of step 2 one rank's loss is not known
    same made_up/loss "step/loss 1 2.5|step/loss 2 3|step/loss 3 nan|step/loss 4 1|" \
        "$(scalars "$tmp/two" step/loss | tr '\n' '|')"
    same made_up/lr "step/lr 1 1|step/lr 2 0.5|step/lr 3 0.5|step/lr 4 0.25|" \
        "$(scalars "$tmp/two" step/lr | tr '\n' '|')"
    same made_up/load "step_ms/load 1 2|step_ms/load 2 2|step_ms/load 3 1|step_ms/load 4 1|" \
        "$(scalars "$tmp/two" step_ms/load | tr '\n' '|')"
    same made_up/parts "forward 1 20|backward 1 20|optimizer 1 4|comm 1 3|exposed_comm 1 2|other 1 0.5|total 1 750|" \
        "$(scalars "$tmp/two" step_ms/{forward,backward,optimizer,comm,exposed_comm,other,total} |
            sed -n 's|^step_ms/\(.* 1 .*\)|\1|p' | tr '\n' '|')"
    same_epochs made_up "$tmp/two"
    # the slowest rank's seconds, then the epoch's, then its test's
    same made_up/clock "1 2 3 4 5" "$(clock "$tmp/two")"
    # an epoch that was resumed: its seconds are those of its second part, while steps.csv has all of its steps
    make_run "$tmp/resumed" stopped
    sed -i 's/^1,12,3,/1,12,0.5,/' "$tmp/resumed/epochs.csv"
    tensorboard "$tmp/resumed"
    same made_up/clock_of_resumed "1 2 3 3 4" "$(clock "$tmp/resumed")"
    # epochs of one step, whose rows are not known yet
    make_run "$tmp/single" stopped
    sed -i '2,$d' "$tmp/single/epochs.csv"
    sed -i '3,6d' "$tmp/single/steps.csv"
    sed -i '3s/^1,3/1,1/' "$tmp/single/steps.csv"
    tensorboard "$tmp/single"
    same made_up/single "step/loss 1 1.6|step/loss 4 1|" "$(scalars "$tmp/single" step/loss | tr '\n' '|')"
    echo foreign >"$tmp/two/events.out.tfevents.1.other"
    tensorboard "$tmp/two"
    tensorboard "$tmp/two"
    same twice/files 2 "$(find "$tmp/two" -name 'events*' | wc -l)"
    same twice/foreign foreign "$(cat "$tmp/two/events.out.tfevents.1.other")"
    rm "$tmp/two/events.out.tfevents.1.other"
    same twice/values 50 "$(scalars "$tmp/two" | wc -l)"
    mkdir -p "$tmp/tf/tensorflow" "$tmp/tf/torch"
    tee "$tmp/tf/torch/__init__.py" >"$tmp/tf/tensorflow/__init__.py" <<<'raise SystemExit("a big library is loaded")'
    PYTHONPATH=$tmp/tf tensorboard "$tmp/two"
    same made_up/no_big_library "0 " "$status $(cat "$err")"
    status "$tmp/two" complete true
    tensorboard --logdir "$tmp/log" "$tmp/two"
    same emulated/tags "accuracy loss lr step/loss step/lr test_loss train_accuracy" \
        "$(scalars "$tmp/log/two" | cut -d ' ' -f 1 | uniq | xargs)"
}

test_real_run() {
    run --no-cuda --threads 1 --dataset synthetic --limit-train 256 --limit-test 64 --epochs 3 --out "$tmp/real"
    same real/run 0 "$status"
    cp -r "$tmp/real" "$tmp/again"
    tensorboard "$tmp/real" "$tmp/again" --logdir "$tmp/log"
    same real/status "0 " "$status $(cat "$err")"
    same_epochs real "$tmp/real" "$tmp/log/real"
    same_epochs again "$tmp/real" "$tmp/log/again"
    # shellcheck disable=SC2016 # awk's own $
    same real/steps "$(awk -F, 'NR > 1 { printf "step/loss %d %.5g\n", NR - 1, $5 }' "$tmp/real/steps.csv")" \
        "$(scalars "$tmp/log/real" step/loss)"
    same real/folder_untouched "" "$(find "$tmp/real" -name 'events*')"
    tensorboard "$tmp/real" "$tmp/log/real" --logdir "$tmp/log"
    same real/same_names 1 "$status"
}

# until_seen COUNT: the event file holds that many values, or the follower has ended, which the next check shows
until_seen() {
    until [ "$(scalars "$tmp/live" 2>/dev/null | wc -l)" = "$1" ]; do
        kill -0 "$follower" 2>/dev/null || return
        sleep 0.2
    done
}

test_follow() {
    local follower
    "$with_tb" "$repo/labs/tools/to_tensorboard.py" --follow "$tmp/later" >"$out" 2>"$err" </dev/null &
    follower=$!
    "$cnn" --no-cuda --threads 1 --dataset synthetic --limit-train 256 --limit-test 64 --epochs 3 \
        --out "$tmp/later" >/dev/null </dev/null
    wait $follower
    same follow/status "0 " "$? $(cat "$err")"
    line follow/said '150 values, the run is complete' # 12 steps with 11, 3 epochs with 6
    same_epochs follow "$tmp/later"

    # a run that is killed, and begun anew in the same folder: that takes other files of the same names
    make_run "$tmp/live" running
    "$with_tb" "$repo/labs/tools/to_tensorboard.py" --follow "$tmp/live" >"$out" 2>"$err" </dev/null &
    follower=$!
    until_seen 39 # the last step waits for its other rank
    printf '5,1,0.001,0,0.01,0.02,0.004,0.003,0.002,0.0005,8,0\n2,2,0,2,7,0.1' >>"$tmp/live/steps.csv"
    printf '2,12,3,4,0,1.5,30,1,1.25,50,0.2,89abc' >>"$tmp/live/epochs.csv"
    sleep 2
    same follow/half_lines 39 "$(scalars "$tmp/live" | wc -l)"
    echo >>"$tmp/live/epochs.csv"
    until_seen 56
    same follow/step "step/loss 4 1.5" "$(scalars "$tmp/live" step/loss | tail -n 1)"
    make_run "$tmp/new" running
    mv "$tmp/new/epochs.csv" "$tmp/new/steps.csv" "$tmp/live/"
    until_seen 39
    status "$tmp/live" failed
    wait $follower
    same follow/failed "0 " "$? $(cat "$err")"
    line follow/failed_said '50 values, the run is failed'
    same follow/restarted "step/loss 4 1" "$(scalars "$tmp/live" step/loss | tail -n 1)"
}

refused_by() { one_error to_tensorboard "$@"; }

test_refused() {
    tensorboard "$tmp/nowhere"
    refused_by refused/no_folder "nowhere/run.json" "--out DIR" --follow
    make_run "$tmp/bad" complete
    sed -i '4s/,2,/,two,/' "$tmp/bad/steps.csv"
    tensorboard "$tmp/bad"
    refused_by refused/no_number "bad/steps.csv" "two"
    make_run "$tmp/bad" complete
    echo '{}' >"$tmp/bad/run.json"
    tensorboard "$tmp/bad"
    refused_by refused/no_entry "bad" "KeyError"
}

test_without_package() {
    mkdir -p "$tmp/none/tensorboard"
    echo 'raise ImportError("No module named tensorboard")' >"$tmp/none/tensorboard/__init__.py"
    PYTHONPATH=$tmp/none "$plain" "$repo/labs/tools/to_tensorboard.py" "$tmp/two" >"$out" 2>"$err"
    status=$?
    refused_by missing/package "its package tensorboard" "pip install tensorboard"
    PYTHONPATH=$tmp/none "$plain" "$repo/labs/tools/to_tensorboard.py" --help >"$out" 2>"$err"
    same missing/help "0 " "$? $(cat "$err")"
}

# ---- watch.py

watch() {
    COLUMNS=100 "$with_tb" "$repo/labs/tools/watch.py" "$@" >"$out" 2>"$err" </dev/null
    status=$?
}

# about DIR STATUS EMULATED: its run.json, with what watch.py shows
about() {
    cat >"$1/run.json" <<END
{"status": "$2", "emulated": $3, "parallel": {"iterations": 3, "world": 2, "global_batch": 4},
 "machine": {"device": "a device"}, "settings": {"model": "lenet", "dataset": "mnist", "epochs": 4}}
END
}

test_watch() {
    make_run "$tmp/watched" running
    about "$tmp/watched" running false
    watch "$tmp/watched" --once
    same watch/status "0 " "$status $(cat "$err")"
    line watch/run 'lenet on mnist, 2 x a device, 4 images a step: running'
    line watch/position 'epoch 2 of 4, step 1 of 3'
    # 14 images in 3.5 s of 4 steps; 8 steps and 3 tests of 1 s are left
    line watch/speed ' 4 images/s'
    line watch/left ' 0:00:11 left'
    line watch/parts 'load .* 1.00 .* 2.00 .*'
    line watch/epochs ' 1 .* 2.5000 .* 2.2500 .* 12.50 .* 4 '
    holds watch/curve "a curve" "$(cat "$out")" grep -q 'training loss by step' "$out"
    about "$tmp/watched" complete true
    watch "$tmp/watched"
    same watch/ends "0 " "$status $(cat "$err")"
    line watch/emulated 'emulated: its times mean nothing'
    same watch/emulated_times "" "$(grep -E 'images/s +.*[0-9]|left|a step in ms' "$out")"
    make_run "$tmp/single_step" running # epochs of one step
    about "$tmp/single_step" running false
    sed -i -e '4,7d' "$tmp/single_step/steps.csv"
    watch "$tmp/single_step" --once
    line watch/single_step 'a step in ms, means of the newest 2'
    rm "$tmp/watched/steps.csv"
    watch "$tmp/watched" --once
    one_error watch watch/no_file "watched/steps.csv" "--out DIR"
    make_run "$tmp/watched" running
    echo '{"status": "running"}' >"$tmp/watched/run.json"
    watch "$tmp/watched" --once
    one_error watch watch/no_entry watched KeyError
}

# It waits for a run, shows it and ends with it.
test_watch_live() {
    local watcher
    "$with_tb" "$repo/labs/tools/watch.py" "$tmp/soon" --interval 0.1 >"$out" 2>"$err" </dev/null &
    watcher=$!
    "$cnn" --no-cuda --threads 1 --dataset synthetic --limit-train 256 --limit-test 64 --epochs 2 \
        --out "$tmp/soon" >/dev/null </dev/null
    wait $watcher
    same watch/live "0 " "$? $(cat "$err")"
    line watch/live_end 'mnist on synthetic, 1 x cpu, 64 images a step: complete'
    line watch/live_epochs '  2 .*\d'
}

test_watch_without_package() {
    mkdir -p "$tmp/none/plotext"
    echo 'raise ImportError("No module named plotext")' >"$tmp/none/plotext/__init__.py"
    PYTHONPATH=$tmp/none "$plain" "$repo/labs/tools/watch.py" "$tmp/two" >"$out" 2>"$err"
    status=$?
    one_error watch watch/package "its packages rich and plotext" "pip install"
}

# ---- monitor. Its PATH has nothing but what the tests need, so that a real nvidia-smi is not found.

mkdir "$tmp/bin" "$tmp/gpu"
for program in bash sh true cat sleep wc touch; do
    ln -s "$(type -P $program)" "$tmp/bin/$program"
done

# monitor ARGUMENTS...: in $tmp; then $status, $out, $err and, by default, the table $tmp/monitor.csv
monitor() {
    (cd "$tmp" && PATH=$tmp/gpu:$tmp/bin exec "$plain" "$repo/labs/tools/monitor" "$@") >"$out" 2>"$err" </dev/null
    status=$?
}

# pretend NAME: the program of that name prints stdin; its arguments are kept in $tmp/asked
pretend() {
    cat >"$tmp/answer"
    printf '#!%s\necho "$@" >%s/asked\ncat %s/answer\n' "$(command -v sh)" "$tmp" "$tmp" >"$tmp/gpu/$1"
    chmod +x "$tmp/gpu/$1"
}

# enough ROWS: a command for the monitor, which ends when the table has that many
enough() { echo "until [ \"\$(wc -l <$tmp/monitor.csv)\" -gt $1 ]; do sleep 0.05; done"; }

test_nvidia() {
    pretend nvidia-smi <<'END'
0, GPU-aaaa, 50, 1000, 100.25, 61, 400.00
1, GPU-bbbb, [N/A], 2000, [Not Supported], [N/A], [N/A]
END
    monitor --interval 0.05 bash -c "$(enough 4)"
    same nvidia/status 0 "$status"
    same nvidia/header time_s,device,gpu_percent,memory_mb,power_w,temperature_c,cpu_percent \
        "$(head -n 1 "$tmp/monitor.csv")"
    same nvidia/row_0 gpu0,50.0,1048.6,100.2,61.0 "$(sed -n 2p "$tmp/monitor.csv" | cut -d, -f 2-6)"
    same nvidia/row_1 gpu1,,2097.2,, "$(sed -n 3p "$tmp/monitor.csv" | cut -d, -f 2-6)"
    same nvidia/rows_of_each "2 columns" "$(awk -F, 'NF != 7 { print } NR > 1 { n[$2]++; last = $1 }
        NR > 3 && NR % 2 == 1 && $1 != last { print } END { print (n["gpu0"] == n["gpu1"] ? 2 : 0), "columns" }' \
        "$tmp/monitor.csv")"
    same nvidia/asked 1 "$(grep -c -- --query-gpu= "$tmp/asked")"
    grep -q '^monitor: gpu0 drew 100 W on average, 25 % of its limit of 400 W\. Power is the best' "$err"
    same nvidia/power_said 0 $?
    same nvidia/power_unknown 0 "$(grep -c 'gpu1 drew' "$err")"
    same nvidia/visible gpu1 "$(CUDA_VISIBLE_DEVICES=1 monitor true && sed -n 2p "$tmp/monitor.csv" | cut -d, -f 2)"
    same nvidia/uuid gpu0 "$(CUDA_VISIBLE_DEVICES=GPU-aa monitor true && sed -n 2p "$tmp/monitor.csv" | cut -d, -f 2)"
    same nvidia/hidden cpu, "$(CUDA_VISIBLE_DEVICES='' monitor true && sed -n 2p "$tmp/monitor.csv" | cut -d, -f 2,3)"
}

# The summary's numbers against the table's. shellcheck disable=SC2016 # awk's own $
test_summary() {
    local column=0 name
    # watts that change: 110 before the command begins, then 120, 130, ...
    cat >"$tmp/gpu/nvidia-smi" <<END
#!$(command -v bash)
echo >>$tmp/calls
echo "0, GPU-aaaa, 7, 1000, \$((100 + 10 * \$(wc -l <$tmp/calls))), \$((40 + \$(wc -l <$tmp/calls))), 400"
END
    monitor --interval 0.05 bash -c "$(enough 6)"
    for name in gpu_percent memory_mb power_w temperature_c cpu_percent; do
        column=$((column + 1))
        # the table and the summary are each rounded to a tenth, so their means may differ by a tenth
        same "summary/$name" "the table's min, mean and max" "$(awk -v name=$name -v c=$((column + 2)) '
            function near(a, b) { return (a - b) ^ 2 < 0.11 ^ 2 }
            NR == FNR { split($0, field, ","); x = field[c] }
            NR == FNR && FNR == 2 { min = max = x }
            NR == FNR && FNR > 1 { n++; sum += x; if (x < min) min = x; if (x > max) max = x }
            NR != FNR && $3 == name {
                said = $4 " " $5 " " $6
                ok = near($4, min) && near($5, sum / n) && near($6, max)
            }
            END { print ok ? "the table\047s min, mean and max" : said ", in the table " min " " sum / n " " max }' \
            "$tmp/monitor.csv" "$err")"
    done
    same summary/several "1" "$(awk '$3 == "power_w" { print ($4 < $5 && $5 < $6) }' "$err")"
}

test_broken_nvidia() {
    printf '#!%s\necho "NVIDIA-SMI has failed: no driver"\nexit 9\n' "$(command -v sh)" >"$tmp/gpu/nvidia-smi"
    monitor --interval 0.05 bash -c "$(enough 3); exit 4"
    same broken/status 4 "$status"
    same broken/said_once 1 "$(grep -c '^monitor: nvidia-smi failed; .*: NVIDIA-SMI has failed: no driver$' "$err")"
    same broken/device cpu "$(tail -n 1 "$tmp/monitor.csv" | cut -d, -f 2)"
    echo nonsense | pretend nvidia-smi
    monitor true
    same broken/nonsense "0 cpu" "$status $(tail -n 1 "$tmp/monitor.csv" | cut -d, -f 2)"
    cat >"$tmp/gpu/nvidia-smi" <<END
#!$(command -v bash)
echo >>$tmp/calls_2
[ "\$(wc -l <$tmp/calls_2)" -le 3 ] && echo "0, GPU-aaaa, 7, 1000, 100, 50, 400"
END
    monitor --interval 0.05 bash -c "$(enough 4)"
    same broken/on_the_way "gpu0 gpu0 cpu cpu" "$(sed -n 2,5p "$tmp/monitor.csv" | cut -d, -f 2 | xargs)"
    rm "$tmp/gpu/nvidia-smi"
}

test_rocm() {
    pretend rocm-smi <<'END'
{"card0": {"GPU use (%)": "99", "Max Graphics Package Power (W)": "560.0", "Average Graphics Package Power (W)":
 "280.0", "VRAM Total Memory (B)": "68702699520", "VRAM Total Used Memory (B)": "5000000",
 "Temperature (Sensor edge) (C)": "48.0", "Temperature (Sensor junction) (C)": "55.0"},
 "card1": {"GPU use (%)": "0", "Current Socket Graphics Package Power (W)": "N/A",
 "Temperature (Sensor edge) (C)": "N/A", "Temperature (Sensor junction) (C)": "39.0"}, "system": {"x": "y"}}
END
    monitor true
    same rocm/rows "gpu0,99.0,5.0,280.0,48.0 gpu1,0.0,,,39.0" \
        "$(tail -n +2 "$tmp/monitor.csv" | cut -d, -f 2-6 | xargs)"
    same rocm/asked 1 "$(grep -c -- --json "$tmp/asked")"
    same rocm/power 1 "$(grep -c 'gpu0 drew 280 W on average, 50 % of its limit of 560 W' "$err")"
    rm "$tmp/gpu/rocm-smi"
}

test_without_gpu() {
    monitor bash -c 'echo "$@"; cat; exit 3' name --csv other
    same no_gpu/status 3 "$status"
    same no_gpu/stdout "--csv other" "$(cat "$out")" # the command's own options, and its output alone
    same no_gpu/at_once "cpu,,,,," "$(tail -n +2 "$tmp/monitor.csv" | grep -o 'cpu,,,,,')"
    same no_gpu/sentence 1 "$(grep -c '^monitor: The command kept .* cores busy on average\.$' "$err")"
    monitor bash -c 'kill -KILL $$'
    same exit/killed 137 "$status"
    (trap '' CHLD && monitor bash -c 'exit 3' && exit "$status")
    same exit/parent_ignores_sigchld 3 $?
    monitor "$tmp/nowhere"
    same exit/not_found 127 "$status"
    monitor "$tmp"
    same exit/no_program 126 "$status"
    monitor
    same exit/no_command 2 "$status"
    monitor --pid $$ true
    same exit/both 2 "$status"
    monitor --pid 999999999
    same exit/no_process "1 monitor: process 999999999 is not running (any more): nothing to record" \
        "$status $(cat "$err")"
    monitor --interval 0 true
    same exit/interval 2 "$status"
    monitor --csv new/monitor.csv -- true
    same csv/new_folder "0 2" "$status $(wc -l <"$tmp/new/monitor.csv")"
    monitor --csv no/where/monitor.csv true
    same csv/nowhere "1 1" "$status $(grep -c 'error: no/where/monitor.csv: expected a file' "$err")"
}

# A process that the command's child starts uses a second of CPU time. Seen while it runs, and at the end.
test_cpu() {
    cat >"$tmp/burn.py" <<'END'
"""Uses a second of CPU time; with a table's name, goes on until it has another row after that."""
import sys, time
rows = lambda: sum(1 for _ in open(sys.argv[1]))
while time.process_time() < 1:
    pass
if sys.argv[1:]:
    before = rows()
    while rows() == before:
        pass
END
    monitor --interval 86400 sh -c "sh -c '$plain $tmp/burn.py; true'; true"
    # shellcheck disable=SC2016 # awk's own $
    holds cpu/ended "a second of CPU time" "$(cat "$tmp/monitor.csv")" \
        awk -F, 'NR == 2 { good = $1 * $7 / 100 > 0.95 } END { exit !good }' "$tmp/monitor.csv"
    monitor --interval 0.05 sh -c "sh -c '$plain $tmp/burn.py $tmp/monitor.csv; true'; true"
    # shellcheck disable=SC2016 # awk's own $
    holds cpu/running "a second of CPU time in all rows, of one core at a time" "$(cat "$tmp/monitor.csv")" \
        awk -F, 'NR > 1 { used += ($1 - before) * $7 / 100; before = $1 }
            END { exit !(used > 0.95 && used < 1.1 * before + 0.1) }' "$tmp/monitor.csv"
}

# A process that is already running: its CPU time, signals that the monitor does not pass on, and its end. Then
# tasks that srun has started, which do not descend from it, in the job of the monitor and in another one.
test_pid() {
    local watched watcher rows task
    rm "$tmp/monitor.csv"
    "$plain" "$tmp/burn.py" /dev/null & # until it is killed
    watched=$!
    (cd "$tmp" && exec env PATH="$tmp/bin" "$plain" "$repo/labs/tools/monitor" --interval 0.05 --pid $watched \
        >"$out" 2>"$err") &
    watcher=$!
    until grep -qs , "$tmp/monitor.csv" && [ "$(wc -l <"$tmp/monitor.csv")" -gt 3 ]; do sleep 0.05; done
    kill -TERM $watcher
    rows=$(wc -l <"$tmp/monitor.csv")
    until [ "$(wc -l <"$tmp/monitor.csv")" -gt $((rows + 1)) ]; do sleep 0.05; done
    same pid/left_alone 0 "$(kill -0 $watched; echo $?)"
    kill -KILL $watched
    wait $watched 2>/dev/null
    wait $watcher
    same pid/status "0 " "$? $(cat "$out")"
    same pid/said 1 "$(grep -c '^monitor: The command kept [0-9.]* of .* cores busy on average\.$' "$err")"
    # shellcheck disable=SC2016 # awk's own $
    holds pid/cpu "CPU time in a row" "$(cat "$tmp/monitor.csv")" \
        awk -F, 'NR > 1 && $7 > 0 { busy = 1 } END { exit !busy }' "$tmp/monitor.csv"
    for task in 7 8; do
        (cd "$tmp" && SLURM_JOB_ID=7 SLURM_STEP_ID=0 exec "$plain" "$tmp/burn.py" /dev/null) &
        watched=$!
        SLURM_JOB_ID=$task monitor --interval 0.2 sleep 1
        kill -KILL $watched
        wait $watched 2>/dev/null
        # the first row has the start of sleep. shellcheck disable=SC2016 # awk's own $
        same "pid/task_of_job_$task" "$((8 - task))" \
            "$(awk -F, 'NR > 2 && $7 > 0 { busy = 1 } END { print busy + 0 }' "$tmp/monitor.csv")"
    done
}

test_signals() {
    local name pid
    for name in TERM USR1 HUP; do
        rm -f "$tmp/ready" "$tmp/got"
        # shellcheck disable=SC2016 # for the command's shell
        # env: nohup has SIGHUP ignored, and bash cannot trap that
        (cd "$tmp" && exec env --default-signal="$name" PATH="$tmp/gpu:$tmp/bin" "$plain" \
            "$repo/labs/tools/monitor" --interval 86400 bash -c '
            trap "echo $1 >got; exit 7" "$1"; touch ready; while :; do sleep 0.05; done' x $name) >"$out" 2>"$err" &
        pid=$!
        until [ -e "$tmp/ready" ]; do sleep 0.05; done
        kill -$name $pid
        wait $pid
        same "signal/$name" "7 $name" "$? $(cat "$tmp/got")"
        same "signal/${name}_row" 2 "$(wc -l <"$tmp/monitor.csv")"
    done
    # Ctrl-C at a terminal reaches monitor and command both: the command must not get it twice
    same signal/ctrl_c "1 5" "$("$plain" - "$repo/labs/tools/monitor" "$tmp" 2>&1 <<'END'
import os, pty, signal, sys
monitor, tmp = sys.argv[1:]
pid, terminal = pty.fork()
if pid == 0:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.chdir(tmp)
    os.execv(sys.executable, [sys.executable, monitor, "--interval", "86400", sys.executable, "-c", """
import signal, sys, time
got = []
signal.signal(signal.SIGINT, lambda *_: got.append(1))
print("ready", flush=True)
while not got:
    time.sleep(0.05)
time.sleep(0.5)
open("ctrl_c", "w").write(str(len(got)))
sys.exit(5)"""])
said = b""
while b"ready" not in said:
    said += os.read(terminal, 99)
os.write(terminal, b"\x03")
try:
    while os.read(terminal, 99):
        pass
except OSError:
    pass  # so ends a terminal
status = os.WEXITSTATUS(os.waitpid(pid, 0)[1])
print(open(f"{tmp}/ctrl_c").read(), status)
END
)"
}

# The table of labs/tools/README.md has each tool that a user calls, and each of its pictures is there and small.
test_readme() {
    local page=$repo/labs/tools/README.md picture
    # shellcheck disable=SC2016 # backquotes of the page
    same readme/table "$(cd "$repo/labs/tools" && find . -maxdepth 1 -type f ! -name '*.md' -printf '%f\n' |
        grep -vx 'lab_runs.sh\|see_block.sh\|run_folders.py\|report_html.py\|see.html' | sort | xargs)" \
        "$(grep -oP '^\| `\K[^` ]+(?=[^|]*\|[^|]*\? \|)' "$page" | sort -u | xargs)"
    same readme/pictures 5 "$(grep -c '^!\[' "$page")"
    while read -r picture; do
        holds "readme/${picture##*/}" "a PNG of at most 150 kB" "$(wc -c "$repo/labs/tools/$picture" 2>&1)" \
            test -n "$(find "$repo/labs/tools/$picture" -size -150k 2>/dev/null)"
    done < <(grep -oP '^!\[.*\]\(\K[^)]+' "$page")
}

test_with_cnn() {
    monitor --interval 0.05 --csv watched/monitor.csv "$cnn" --no-cuda --threads 1 --dataset synthetic \
        --limit-train 256 --limit-test 64 --epochs 1 --out "$tmp/watched"
    same cnn/status 0 "$status"
    holds cnn/rows "a row in monitor.csv" "$(cat "$tmp/watched/monitor.csv")" \
        at_least "$(wc -l <"$tmp/watched/monitor.csv")" 2
    same cnn/run_folder complete "$(grep -o complete "$tmp/watched/run.json")"
}

test_without_package
if with_tb=$("$repo/tests/python_with.sh" tensorboard.backend.event_processing.event_accumulator); then
    test_made_up
    test_real_run
    test_follow
    test_refused
else
    skip to_tensorboard "no python3 with tensorboard: python3 -m venv .venv && .venv/bin/pip install tensorboard"
fi
test_watch_without_package
if "${with_tb:-$plain}" -c 'import plotext, rich' 2>/dev/null; then
    with_tb=${with_tb:-$plain}
    test_watch
    test_watch_live
else
    skip watch "no python3 with rich and plotext: .venv/bin/pip install -r labs/requirements.txt"
fi
test_nvidia
test_summary
test_broken_nvidia
test_rocm
test_without_gpu
test_cpu
test_pid
test_signals
test_readme
test_with_cnn
exit 0
