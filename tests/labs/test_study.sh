#!/usr/bin/env bash
# Tests labs/tools/study.py and plot.py: run folders made up here, whose statistics are worked out by
# hand; and tiny real runs, which a killed study leaves behind and the next one completes. No real time
# has a bound. CNN=PATH: another binary. Prints `pass study/NAME`, `fail ...` or `skip ...`.
suite=study
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
if ! command -v python3 >/dev/null; then
    skip all "python3 is not installed"
    exit 0
fi
export PYTHONDONTWRITEBYTECODE=1
cd "$tmp" || exit 1

# shellcheck source=tests/labs/fork_python.sh
source "$repo/tests/labs/fork_python.sh"
if plotter=$("$repo/tests/python_with.sh" matplotlib); then
    start_python "$plotter" run_folders tempfile matplotlib.pyplot
else
    start_python python3 run_folders tempfile
fi

study() { fork_python "$out" "$err" "$repo/labs/tools/study.py" "$@"; }

# cell FILE REGEX COLUMN: of the row that matches
cell() {
    awk -F, -v row="$2" -v name="$3" 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == name) c = i }
        NR > 1 && $0 ~ row { print $c; exit }' "$1"
}

error() { one_error study "$@"; }

# make_run DIR DEVICE WORLD GLOBAL_BATCH SEED SECONDS ACCURACY: two epochs, a quarter and the rest; a tenth of
# the time went into waiting for the loader
make_run() {
    local mode=single emulated=false no_cuda=false
    mkdir -p "$1"
    [ "$3" = 1 ] || mode=ddp
    case $2 in cpu) no_cuda=true ;; emulated*) emulated=true ;; esac
    cat >"$1/run.json" <<END_OF_JSON
{"status": "complete", "emulated": $emulated, "command": ["./cnn"],
 "machine": {"host": "a", "cpu": "made-up", "device": "$2", "peak_gflops": 100},
 "build": {"compiler": "gcc 1", "flags": "-O3", "commit": "abc"},
 "settings": {"model": "cifar", "dataset": "synthetic", "limit-train": 1000, "seed": $5, "epochs": 2,
              "lr-scaling": "none", "optimizer": "sgd", "threads": 4, "workers": 1, "kernels": "fast", "gpus": $3,
              "batch-size": $(($4 / $3)), "global-batch": $4, "no-cuda": $no_cuda, "out": "$1"},
 "parallel": {"mode": "$mode", "world": $3, "batch_per_device": $(($4 / $3)), "global_batch": $4},
 "classes": ["0", "1"]}
END_OF_JSON
    awk -v s="$6" -v a="$7" 'BEGIN {
        print "epoch,images,seconds,img_per_s,loader_wait_s,train_loss,test_seconds,test_loss,accuracy,lr,weight_hash"
        e = "%d,1000,%s,%.1f,%s,2,0,2,%s,1,0\n"
        printf e e, 1, s / 4, 4000 / s, s / 40, 1, 2, 3 * s / 4, 4000 / 3 / s, 3 * s / 40, a }' >"$1/epochs.csv"
}

# A study of made-up runs: cpu 10, 12, 14 s; a GPU 3 s in all repeats; two GPUs 2 and 2.5 s.
make_study() {
    rm -rf made
    make_run made/c1 cpu 1 50 1 10 50
    make_run made/c2 cpu 1 50 2 12 52
    make_run made/c3 cpu 1 50 3 14 57
    for seed in 1 2 3; do
        make_run made/s$seed "GPU X" 1 50 $seed 3 60
    done
    make_run made/m1 "GPU X" 2 50 1 2 60
    make_run made/m2 "GPU X" 2 50 2 2.5 61
}

test_statistics() {
    make_study
    make_run made/e1 "emulated GPU" 1 50 1 77 50
    study collect made --repeats 2
    same collect/status "0 " "$status $(cat "$err")"
    same collect/columns "device,parallel,gpus,model,batch,global_batch,repeats,seconds_mean,seconds_sd,ci95,speedup,$(
    )accuracy_mean,accuracy_sd,emulated" "$(head -n 1 made/study.csv)"
    same collect/cpu "cpu,single,0,cifar,50,50,3" "$(grep ^cpu made/study.csv | cut -d , -f 1-7)"
    same collect/multi "multi,ddp,2,cifar,25,50,2" "$(grep ^multi made/study.csv | cut -d , -f 1-7)"
    near statistics/mean 12 "$(cell made/study.csv ^cpu seconds_mean)"
    near statistics/sd 2 "$(cell made/study.csv ^cpu seconds_sd)"
    near statistics/ci95 4.96868 "$(cell made/study.csv ^cpu ci95)" # 4.303 * 2 / sqrt(3)
    near statistics/accuracy 53 "$(cell made/study.csv ^cpu accuracy_mean)"
    near statistics/accuracy_sd 3.60555 "$(cell made/study.csv ^cpu accuracy_sd)" # sqrt((9 + 1 + 16) / 2)
    near statistics/two 3.1765 "$(cell made/study.csv ^multi ci95)"               # 12.706 * 0.353553 / sqrt(2)
    near speedup/cpu 1 "$(cell made/study.csv ^cpu speedup)"
    near speedup/single 4 "$(cell made/study.csv ^single.*,0$ speedup)"
    near speedup/multi 5.33333 "$(cell made/study.csv ^multi speedup)"
    same emulated/no_speedup "77,,,,50,,1" "$(grep ',1$' made/study.csv | cut -d , -f 8-)"
    # 1 to 31: sd sqrt(31 * 32 / 12); t for 30 degrees of freedom: 2.042
    near statistics/t_30 3.33457 "$(cd "$repo/labs/tools" && python3 -c \
        'from run_folders import summary; print(summary(range(1, 32))[2])')"
    study collect made
    same missing/status 1 "$status"
    same missing/named "missing: multi, global batch 50: repeat 3" "$(cat "$err")"
    study collect made --devices cpu --batches 50 100 --repeats 3
    same missing/batch "missing: cpu, global batch 100: repeat 1, 2, 3" "$(cat "$err")"
    sed -i 's/"status": "complete"/"status": "running"/' made/c3/run.json
    study collect made --repeats 2
    same left_out/running "left out: made/c3: status running, not complete" "$(cat "$err")"
    same left_out/repeats 2 "$(cell made/study.csv ^cpu repeats)"
    make_run made/c3 cpu 1 50 3 14 57
    sed -i 's/"epochs": 2/"epochs": 3/' made/c3/run.json
    study collect made --repeats 2
    holds left_out/resumed "2 of 3 epochs" "$(cat "$err")" grep -q 'made/c3: epochs.csv has 2 of 3 epochs' "$err"
    make_run made/c3 cpu 1 50 3 14 57
    sed -i 's/^2,1000,10.5,/2,1000,5.5,/' made/c3/epochs.csv # 5 s were before the checkpoint
    study collect made --repeats 2
    same left_out/resumed_within_an_epoch \
        "left out: made/c3: it was resumed within an epoch, whose seconds are only those since then" "$(cat "$err")"
    printf '1,1000,0.1' >>made/c3/epochs.csv # the disk was full
    study collect made --repeats 2
    error left_out/short_row made/c3/epochs.csv "the columns epoch"
    make_run made/c3 cpu 1 100 3 14 57
    make_run made/s4 "GPU X" 1 150 1 3 60
    study collect made --repeats 1
    line speedup/no_cpu_row '^Note: no speed-up for single, cifar, global batch 150'
    same speedup/none "" "$(cell made/study.csv ^single.*,150, speedup)"
    # a link to a folder is not another run, and runs of another model are no repeats
    rm -rf made
    make_run made/c1 cpu 1 50 1 10 50
    make_run made/c2 cpu 1 50 1 10 50
    sed -i 's/"model": "cifar"/"model": "lenet"/' made/c2/run.json
    ln -s c1 made/a
    study collect made --repeats 2
    same models/missing "1 missing: cifar, cpu, global batch 50: repeat 2|missing: lenet, cpu, global batch 50: repeat 2|" \
        "$status $(tr '\n' '|' <"$err")"
    same models/repeats "1 1" "$(awk -F, 'NR > 1 { print $7 }' made/study.csv | xargs)"
    study collect made --workers 1 --repeats 2
    same models/workers "1 missing: cifar, 1 workers: repeat 2|missing: lenet, 1 workers: repeat 2|" \
        "$status $(tr '\n' '|' <"$err")"
}

# refuse NAME RUN SED WORDS...: with that change to a run nothing is compared
refuse() {
    make_study
    sed -i "$3" "made/$2"/{run.json,epochs.csv}
    study collect made
    error "refused/$1" "made/$2" "${@:4}"
}

test_refused() {
    refuse limit s2 's/"limit-train": 1000/"limit-train": 500/' "--limit-train 1000 as in made/" "found 500"
    refuse epochs s2 's/"epochs": 2/"epochs": 1/; /^1,1000,/d' "--epochs 2 as in made/" "found 1"
    refuse setting m2 's/sgd/adadelta/' "--optimizer 'sgd'" "found 'adadelta'"
    refuse workers m2 's/"workers": 1/"workers": 2/' "--workers 1"
    refuse threads c2 's/"threads": 4/"threads": 3/' "--threads 4"
    refuse kernels c2 's/"kernels": "fast"/"kernels": "naive"/' "--kernels 'fast'"
    refuse commit s3 's/abc/abd/' "commit 'abc'" "found 'abd'"
    refuse flags s3 's/-O3/-O0/' "flags '-O3'"
    refuse cpu c2 's/made-up/other/' "cpu 'made-up'"
    refuse gpu m2 's/GPU X/GPU Y/' "device 'GPU X'" "found 'GPU Y'"
    refuse json c2 's/^{/[/' "made/c2/run.json" JSON
    refuse entry c2 's/"world"/"ranks"/' "the entry 'world'"
    make_study
    sed -i 's/"host": "a"/"host": "b"/' made/s2/run.json
    sed -i 's/"kernels": "fast"/"kernels": "tiled"/; s/"threads": 4/"threads": 1/' made/[sm]*/run.json
    study collect made --repeats 2
    same allowed/status "0 " "$status $(cat "$err")"
    line allowed/host '^Note: hosts differ: a, b$'
    study collect nowhere
    error refused/no_folder nowhere "No such file"
    mkdir empty
    study collect empty
    error refused/empty empty "found none"
}

# strong: 8, 5, 4 s; weak: 8, 4 s. Emulated: no speed-up
test_scaling_table() {
    make_run up/1 cpu 1 40 1 8 50
    make_run up/2 cpu 2 40 1 5 50
    make_run up/4 cpu 4 40 1 4 50
    make_run up/2w cpu 2 80 1 4 50
    make_run up/e1 "emulated GPU" 1 40 1 8 50
    make_run up/e2 "emulated GPU" 2 40 1 5 50
    (cd "$repo/labs/tools" && python3 -c 'import sys; from run_folders import *
write_table(sys.argv[1] + "/scaling.csv", SCALING, scaling_rows(make_rows(read_runs(sys.argv[1]))))' "$tmp/up") >"$out"
    same scaling/rows "strong 1 strong 2 strong 4 weak 1 weak 2" \
        "$(awk -F, '$NF == 0 { print $1, $3 }' up/scaling.csv | xargs)"
    near scaling/speedup 1.6 "$(cell up/scaling.csv strong,cpu,2 speedup)"
    near scaling/efficiency 0.5 "$(cell up/scaling.csv strong,cpu,4 efficiency)"
    near scaling/img_per_s 500 "$(cell up/scaling.csv weak,cpu,2 img_per_s)" # 2 epochs of 1000 in 4 s
    near scaling/weak 2 "$(cell up/scaling.csv weak,cpu,2 speedup)"
    same scaling/emulated "strong,gpu,2 " "$(grep strong,gpu,2 up/scaling.csv | cut -d , -f 1-3) $(
        cell up/scaling.csv strong,gpu,2 speedup)"
}

# One worker: 2000 images in 8 and in 10 s; two workers: in 4 s
test_workers_table() {
    make_run load/1a cpu 1 50 1 8 50
    make_run load/1b cpu 1 50 2 10 50
    make_run load/2 cpu 1 50 1 4 50
    sed -i 's/"workers": 1/"workers": 2/' load/2/run.json
    study collect load --workers 1 2 --repeats 1
    same workers/status "0 " "$status $(cat "$err")"
    same workers/columns "device,model,global_batch,workers,repeats,img_per_s_mean,img_per_s_sd,ci95,$(
    )loader_wait_s_mean,emulated" "$(head -n 1 load/workers.csv)"
    same workers/rows "cpu,cifar,50,1,2 cpu,cifar,50,2,1" "$(tail -n 2 load/workers.csv | cut -d , -f 1-5 | xargs)"
    near workers/mean 225 "$(cell load/workers.csv cifar,50,1 img_per_s_mean)"
    near workers/sd 35.3553 "$(cell load/workers.csv cifar,50,1 img_per_s_sd)" # 25 * sqrt(2)
    near workers/two 500 "$(cell load/workers.csv cifar,50,2 img_per_s_mean)"
    near workers/wait 0.9 "$(cell load/workers.csv cifar,50,1 loader_wait_s_mean)"
    study collect load --workers 1 2 4
    same workers/missing "1 missing: 2 workers: repeat 2|missing: 4 workers: repeat 1, 2|" \
        "$status $(tr '\n' '|' <"$err")"
    sed -i 's/"threads": 4/"threads": 3/' load/2/run.json
    study collect load --workers 1 2
    error workers/refused load/2 "--threads 4" "found 3"
}

# A program that notes what it trains, and in its third training is killed with the study that called it:
# what it leaves says `running`.
make_program() {
    cat >counted <<END_OF_PROGRAM
#!/usr/bin/env bash
case " \$* " in *" --dry-run "*) exec -a "\$0" "$1" "\$@" ;; esac
echo "\$*" >>trained
if [ -e deadly ] && [ "\$(wc -l <trained)" = 3 ]; then
    mkdir -p "\${!#}"
    sed 's/"status": "complete"/"status": "running"/' tiny/cifar-cpu-b16-r1/run.json >"\${!#}/run.json"
    kill -KILL \$PPID
    exit 1
fi
exec -a "\$0" "$1" "\$@"
END_OF_PROGRAM
    chmod +x counted
}

small=(--epochs 1 --limit 64)
tiny=(run tiny --program ./counted --devices cpu --batches 16 32 --repeats 2 "${small[@]}")

test_resumed() {
    make_program "$cnn"
    touch deadly
    { study "${tiny[@]}" -- --dataset synthetic; } 2>/dev/null # bash would say that it was killed
    same killed/status 137 "$status"
    same killed/trained 3 "$(wc -l <trained)"
    rm deadly trained
    study "${tiny[@]}" -- --dataset synthetic
    same resumed/status "0 " "$status $(cat "$err")"
    # Of four runs, in the order of repeats, two were finished
    same resumed/trained "16,2 32,2" "$(sed 's/.*--global-batch \([0-9]*\) .*--seed \([0-9]*\).*/\1,\2/' trained | xargs)"
    same resumed/said 2 "$(grep -c 'finished before$' "$out")"
    same resumed/rows "16,2 32,2" "$(awk -F, 'NR > 1 { print $6 "," $7 }' tiny/study.csv | xargs)"
    rm trained
    study "${tiny[@]}" -- --dataset synthetic
    same again/nothing_trained "0 0" "$status $(grep -c . trained 2>/dev/null || echo 0)"
    study "${tiny[@]}" --epochs 2 -- --dataset synthetic
    error again/other_epochs tiny/cifar-cpu-b16-r1 "--epochs 2, found 1" "not overwritten"
    study "${tiny[@]}" -- --dataset synthetic --lr 0.1
    error again/other_options tiny/cifar-cpu-b16-r1 "--lr 0.1, found 0.001"
    study "${tiny[@]}" -- --dataset synthetic --lr 0.001
    error again/other_command tiny/cifar-cpu-b16-r1 "the command ./counted" "--lr 0.001"
    sed -i 's/"commit":"[^"]*"/"commit":"0000000"/' tiny/cifar-cpu-b32-r2/run.json
    study "${tiny[@]}" -- --dataset synthetic
    error again/other_commit tiny/cifar-cpu-b32-r2 "found 0000000"
    study "${tiny[@]}" --task 4 --repeats 3 -- --dataset synthetic
    error again/task tiny/cifar-cpu-b32-r2 "found 0000000"
    study "${tiny[@]}" --task 5 --repeats 3 -- --dataset synthetic
    same task/status "0 " "$status $(cat "$err")"
    line task/one '^\[1/1\] cifar-cpu-b16-r3: '
    study "${tiny[@]}" --batches 15 -- --dataset synthetic --global-batch 0
    error options/refused "--global-batch" "dry run"
    study run none --program ./no_such_program
    error options/program ./no_such_program "run make first"
    ignoring_children python3 "$repo/labs/tools/study.py" run none --program false --devices cpu >"$out" 2>"$err"
    status=$?
    error options/parent_ignores_sigchld "a dry run that succeeds"
}

test_devices() {
    local emulator=$repo/cnn-emu word
    if "$cnn" --dataset synthetic --dry-run --limit-train 64 | grep -q '^Device: cpu'; then
        study run absent --program "$cnn" --batches 16 --repeats 1 "${small[@]}" -- --dataset synthetic
        same absent/status 0 "$status"
        for word in single multi; do
            line "absent/$word" "^skip $word: .*GPU.*--emulate"
        done
        same absent/rows cpu "$(awk -F, 'NR > 1 { print $1 }' absent/study.csv)"
        study train single absent --program "$cnn" "${small[@]}"
        error absent/train single "found no GPU"
    else
        skip absent "there is a GPU"
    fi
    study train cpu trained_cpu --program "$cnn" --batches 16 "${small[@]}" -- --dataset synthetic
    same train/cpu "0 complete" "$status $(grep -o complete trained_cpu/cpu/run.json | head -n 1)"
    if [ -x "$emulator" ]; then
        study train multi trained_multi --program "$emulator" --emulate --batches 16 "${small[@]}" -- --dataset synthetic
        line train/multi "^multi: --parallel ddp, as DistributedDataParallel.*OPTIONS='--parallel dp'\$"
        study train multi trained_multi --program "$emulator" --emulate --batches 16 "${small[@]}" -- --dataset synthetic \
            --parallel dp
        line train/multi_dp "^multi: --parallel dp, as DataParallel; the other one: make multi OPTIONS='--parallel ddp'\$"
    fi
    study scaling replicas --program "$cnn" --batches 16 --counts 1 2 --repeats 2 "${small[@]}" \
        -- --dataset synthetic --oversubscribe
    same scaling/status "0 " "$status $(cat "$err")"
    same scaling/real_rows "strong,1 strong,2 weak,1 weak,2" \
        "$(awk -F, 'NR > 1 { print $1 "," $3 }' replicas/scaling.csv | xargs)"
    if [ ! -x "$emulator" ]; then
        skip emulated "no ./cnn-emu; make emulate"
        return
    fi
    make_program "$cnn" && ln -s "$emulator" counted-emu
    study run virtual --program ./counted --emulate --batches 16 --repeats 2 "${small[@]}" -- --dataset synthetic
    same virtual/status "0 " "$status $(cat "$err")"
    if "$cnn" --dataset synthetic --dry-run --limit-train 64 | grep -q '^Device: cpu'; then
        same virtual/marked "cpu,0 multi,1 single,1" \
            "$(awk -F, 'NR > 1 { print $1 "," $NF }' virtual/study.csv | sort | xargs)"
        same virtual/speedups "cpu,1 multi, single," \
            "$(awk -F, 'NR > 1 { print $1 "," $11 }' virtual/study.csv | sort | xargs)"
    fi
    near virtual/same_accuracy "$(cell virtual/study.csv ^single accuracy_mean)" \
        "$(cell virtual/study.csv ^multi accuracy_mean)"
}

test_workers() {
    local loaders=(workers loaders --program "$cnn" --batches 16 --workers 1 2 "${small[@]}")
    study "${loaders[@]}" --repeats 1 -- --dataset synthetic --layers
    same loaders/status "0 " "$status $(cat "$err")"
    same loaders/rows "1,1 2,1" "$(awk -F, 'NR > 1 { print $4 "," $5 }' loaders/workers.csv | xargs)"
    same loaders/work 2 "$(grep -lPz '(?s)"resident": false.*' loaders/*/run.json | xargs grep -l '"augment": "elastic"' | wc -l)"
    study "${loaders[@]}" --repeats 2 --task 4 -- --dataset synthetic --layers
    same loaders/task "0 [1/1] 2" "$status $(grep -oP '^\[1/1\](?= cifar-.*-b16-workers2-r2: )' "$out") $(
        awk -F, 'NR > 1 { n += $5 } END { print n }' loaders/workers.csv)"
    study "${loaders[@]}" --repeats 2 --task 5 -- --dataset synthetic --layers
    error loaders/no_such_task "--task" "expected 1 to 4" "found 5"
}

# One device 8 s of training, two 5 s; each ran two seconds longer: 1 x 4 threads x 10 s, 2 x 4 x 7 s of a core
test_hours() {
    make_run cost/strong/one-r1 cpu 1 40 1 8 50
    make_run cost/strong/one-r2 cpu 1 40 2 8 50
    make_run cost/weak/two-r1 cpu 2 40 1 5 50
    make_run cost/gpus-r1 "GPU X" 2 40 1 5 50
    make_run cost/e-r1 "emulated GPU" 2 40 1 5 50
    local file
    for file in cost/*/*/run.json cost/*/run.json; do
        sed -i "s/^ \"classes\"/ \"resources\": {\"wall_s\": $([[ $file = *one* ]] && echo 10 || echo 7)},\n&/" "$file"
    done
    study hours cost
    same hours/status "0 " "$status $(cat "$err")"
    same hours/rows "strong,one,2,4,core weak,two,1,8,core .,gpus,1,2,GPU .,e,1,2,GPU sum,,1,,GPU sum,,3,,core" \
        "$(grep -E '^(strong|weak)' cost/hours.csv | cut -d , -f 1-5 | xargs) $(grep '^[.],gpus' cost/hours.csv | cut -d , -f 1-5) $(
            grep '^[.],e,' cost/hours.csv | cut -d , -f 1-5) $(grep '^sum' cost/hours.csv | cut -d , -f 1-5 | xargs)"
    near hours/strong 0.0222222 "$(cell cost/hours.csv ^strong hours)" # 4 x 2 x 10 / 3600
    near hours/training 80 "$(cell cost/hours.csv ^strong training_percent)"
    near hours/cores 0.0377778 "$(cell cost/hours.csv ^sum.*core hours)" # and 8 x 7 / 3600
    near hours/gpus 0.00388889 "$(cell cost/hours.csv ^sum.*GPU hours)"  # not the emulated one
    sed -i 's/"wall_s": 10/"wall_s": 3/' cost/strong/one-r2/run.json
    study hours cost
    same hours/resumed "Note: cost/strong/one-r2 was resumed; its hours are only those since then" "$(cat "$err")"
    mkdir -p nothing
    study hours nothing
    error hours/none nothing "folders of complete runs"
}

# Two calls fill one folder, as jobs of different sizes do. The launcher is no MPI: it notes how many processes it
# was asked for, and starts replicas in their place.
test_launched() {
    cat >launcher <<'END_OF_PROGRAM'
#!/usr/bin/env bash
echo "$1" >>launched
exec "${@:2}" --replicas "$1" --oversubscribe
END_OF_PROGRAM
    chmod +x launcher
    local count
    for count in 1 2; do
        study scaling ranks --program "$cnn" --batches 16 --counts $count --repeats 2 "${small[@]}" \
            --launch './launcher {n}' -- --dataset synthetic --no-cuda --threads $count
        same "launched/$count" "0 " "$status $(cat "$err")"
    done
    same launched/processes "1 2" "$(sort -u launched | xargs)"
    holds launched/no_table "none before it is collected" "$(ls ranks)" [ ! -e ranks/scaling.csv ]
    mv ranks/cifar-ranks1* .
    study collect ranks --counts 1 2
    error launched/not_one ranks "runs on one device"
    mv cifar-ranks1* ranks/
    rm -r ranks/cifar-ranks2-each16-r2
    study collect ranks --counts 1 2 4
    same launched/missing "1 missing: weak scaling, devices: 2: repeat 2|missing: strong scaling, devices: 4: repeat 1, 2|$(
        )missing: weak scaling, devices: 4: repeat 1, 2|" "$status $(tr '\n' '|' <"$err")"
    same launched/rows "strong,1,2 strong,2,2 weak,1,2 weak,2,1" \
        "$(awk -F, 'NR > 1 { print $1 "," $3 "," $8 }' ranks/scaling.csv | xargs)"
}

# More than a frame without anything in it
# shellcheck disable=SC2317 # holds calls it
is_png() { [ "$(head -c 4 "$1" | tail -c 3)" = PNG ] && [ "$(wc -c <"$1")" -gt 8000 ]; }

# plots NAME DIR WORDS...: draws DIR; these plots are there as PNG and SVG, the others are named
plots() {
    local name=$1 dir=$2 plot
    shift 2
    fork_python "$out" "$err" "$repo/labs/tools/plot.py" "$dir"
    same "$name/status" "0 " "$status $(cat "$err")"
    holds "$name/no_failure" "no error among the reasons" "$(grep error "$out")" test ! -s <(grep error "$out")
    for plot in study workers ablation bytes scaling loss accuracy precision run timeline roofline confusion samples \
        augment filters; do
        case " $* " in *" $plot "*)
            holds "$name/$plot.png" "a picture" "$(wc -c <"$dir/plots/$plot.png")" \
                is_png "$dir/plots/$plot.png"
            holds "$name/$plot.svg" "a drawing" "$(tail -n 1 "$dir/plots/$plot.svg")" \
                grep -q '</svg>' "$dir/plots/$plot.svg"
            ;;
        *) line "$name/no_$plot" "^not drawn: $plot: " ;;
        esac
    done
}

has_plotter() {
    [ -n "$plotter" ] || skip "${FUNCNAME[1]#test_}" "no python3 with matplotlib; on Debian: apt-get install python3-matplotlib"
    [ -n "$plotter" ]
}

# Names of folders as users choose them: a formula, and bytes that are not UTF-8; in a terminal of Jupyter
test_names() {
    has_plotter || return
    local name
    for name in 'p_{$\frac$}' $'x\xffy'; do
        mkdir names
        cp -r tiny/cifar-cpu-b16-r1 "names/$name"
        for tool in plot verify; do
            PYTHONIOENCODING=utf-8:strict MPLBACKEND=module://matplotlib_inline.backend_inline \
                "$plotter" "$repo/labs/tools/$tool.py" "names/$name" >"$out" 2>"$err"
            same "names/$tool/${name:0:1}" "0 " "$? $(cat "$err")"
        done
        rm -r names
    done
}

test_plots() {
    has_plotter || return
    cat >tiny/cifar-cpu-b16-r1/layers.csv <<'END_OF_LAYERS'
layer,kind,out_shape,params,mflop,forward_ms,backward_ms,gflops,gb_per_s,percent_of_peak,saved,bound
conv1,conv2d,28x28x6,456,0.706,0.5,1.0,38,9.5,32,1,memory
conv2,conv2d,28x28x6,456,0.706,0.5,1.0,40,2.5,34,2.25,compute
relu,relu,28x28x6,0,,0.1,0.1,,11.0,,1,memory
fc1,linear,120,48120,0.096,1.2,2.4,62,7.1,52,1,compute
END_OF_LAYERS
    sed -i "s/0000000/$(grep -oP '"commit":"\K[^"]*' tiny/cifar-cpu-b16-r1/run.json)/" tiny/*/run.json
    plots plots tiny study loss roofline confusion samples filters
    plots plots_scaling replicas scaling loss confusion samples filters
    line plots_scaling/why "^not drawn: study: it is for runs with the same --threads; here --threads is 1 in .* and 2 in "
    plots plots_workers loaders workers loss roofline confusion samples augment filters
    plots plots_one_run loaders/*workers2-r2 study loss run roofline confusion samples augment
    roofline_marks
    filters_before
    one_option_varied
    cp -a tiny alone # as ./cnn without cnn_kernels.c
    sed -i -E 's/"peak_gflops":[0-9.]+/"peak_gflops":null/' alone/*/run.json
    sed -i -E '2,$ s/,[0-9]+,([0-9.]+),(compute|memory)$/,,\1,/' alone/*/layers.csv
    plots plots_alone alone study loss confusion samples filters
    line plots_alone/why "^not drawn: roofline: the limits of the machine were not measured: "
    sed -i 's/gflops/flops/' tiny/cifar-cpu-b16-r1/layers.csv
    head -c 100 tiny/cifar-cpu-b32-r1/model.safetensors >tiny/cifar-cpu-b16-r1/model.safetensors
    cp tiny/cifar-cpu-b16-r1/model.safetensors tiny/cifar-cpu-b32-r1/
    printf 'image,label,predicted,epoch,shape,pixels\n0,1,2,0,28x28x1,00ff\n' | tee tiny/*/predictions.csv >/dev/null
    plots plots_broken tiny study loss confusion
    line plots_broken/predictions "^not drawn: samples: .*predictions.csv: .*2 pixels for"
    local row reason
    while read -r row reason; do
        printf 'image,label,predicted,epoch,shape,pixels\n%s\n' "$row" | tee tiny/*/predictions.csv >/dev/null
        fork_python "$out" "$err" "$repo/labs/tools/plot.py" tiny
        line "plots_broken/$row" "^not drawn: samples: .*predictions.csv: .*$reason"
    done <<'END'
0,1,2,0,-1x-1x2,0011 2 pixels for
0,1,2,0,2,0011 not enough values
0,-1,2,0,1x1x1,00 KeyError
0,1,77,0,1x1x1,00 KeyError
0,1,2,0,1x1x1, no image with pixels
END
    line plots_broken/column "^not drawn: roofline: .*layers.csv: .*gflops"
    line plots_broken/weights "^not drawn: filters: .*model.safetensors: "
}

# What the pictures of labs 6, 7 and 9 show, from numbers made up here
test_pictures() {
    has_plotter || return
    local run
    for run in fp32 bf16 fp16 tf32; do # tf32 has other images, as a rung of the ladder
        make_run precisions/$run "emulated GPU" 1 50 1 8 50
        sed -i "s/\"workers\": 1/\"precision\": \"$run\", &/" precisions/$run/run.json
    done
    sed -i 's/"limit-train": 1000/"limit-train": 4/' precisions/tf32/run.json
    sed -Ei '1s/train_loss/&,train_accuracy/; 2s/^([^,]*,){6}/&,/; 3s/^([^,]*,){6}/&40,/' precisions/fp32/epochs.csv
    printf 'epoch,step,images,loss\n1,%d,50,%s\n1,%d,50,%s\n' 1 2 2 1 >precisions/fp32/steps.csv
    printf 'epoch,step,images,loss\n1,%d,50,%s\n1,%d,50,%s\n' 1 2.02 2 1.01 >precisions/bf16/steps.csv
    printf 'epoch,step,images,loss\n1,%d,50,%s\n1,%d,50,%s\n' 1 2 2 0.995 >precisions/fp16/steps.csv
    cp precisions/fp32/steps.csv precisions/tf32/
    cat >precisions/fp32/trace.json <<'END'
{"traceEvents": [
 {"ph": "M", "pid": 0, "tid": 0, "name": "thread_name", "args": {"name": "train()"}},
 {"ph": "M", "pid": 0, "tid": 1, "name": "thread_name", "args": {"name": "device"}},
 {"ph": "M", "pid": 0, "tid": 2, "name": "thread_name", "args": {"name": "steps"}},
 {"ph": "M", "pid": 1, "tid": 0, "name": "thread_name", "args": {"name": "another rank"}},
 {"ph": "X", "pid": 1, "tid": 0, "name": "of another rank", "ts": 0, "dur": 90000},
 {"ph": "X", "pid": 0, "tid": 0, "name": "forward(net)", "ts": 1000, "dur": 4000},
 {"ph": "X", "pid": 0, "tid": 0, "name": "waits", "ts": 5000, "dur": 6000},
 {"ph": "X", "pid": 0, "tid": 1, "name": "conv1 forward", "ts": 2000, "dur": 15000},
 {"ph": "X", "pid": 0, "tid": 2, "name": "step 0", "ts": 1000, "dur": 10000},
 {"ph": "X", "pid": 0, "tid": 2, "name": "step 1", "ts": 11000, "dur": 10000}]}
END
    counted precisions/fp32 3000000 1000000
    counted precisions/bf16 1500000 0
    cp -r up predicted
    printf 'seconds,exposed_comm_s,warmup\n9,9,1\n0.02,0,0\n' | tee predicted/{1,e1}/steps.csv >/dev/null
    printf 'seconds,exposed_comm_s,warmup\n0.03,0.002,0\n' | tee predicted/{2,4,2w,e2}/steps.csv >/dev/null
    cat >pictures.py <<'END'
import sys
sys.path.insert(0, sys.argv[1])
import plot
runs = plot.read_runs("precisions")

def lines(axis):
    return {line.get_label(): [round(float(y), 3) for y in line.get_ydata()] for line in axis.get_lines()}

print(plot.draw_precision(runs).axes[0].get_ylabel(), lines(plot.draw_precision(runs).axes[0]))
for axis in plot.draw_timeline(runs).axes:
    print(*map(float, axis.get_xlim()), [label.get_text() for label in axis.get_yticklabels()], len(axis.collections),
          [text.get_text() for text in axis.texts])
for axis in plot.draw_bytes(runs).axes:
    print([label.get_text() for label in axis.get_yticklabels()],
          [round(float(bar.get_width()), 3) for bar in axis.patches], [text.get_text().strip() for text in axis.texts])
print(*(list(lines(axis).values()) for axis in plot.draw_accuracy(runs[2:3]).axes))
print(*(list(lines(axis).values()) for axis in plot.draw_accuracy(runs[:1]).axes))
for axis in plot.draw_scaling(plot.read_runs("predicted")).axes:
    print(lines(axis)["predicted from t_c and t_k"])
END
    same pictures/numbers "loss / loss in fp32 - 1, in % {'fp32': [0.0, 0.0], 'bf16': [1.0, 1.0], 'fp16': [0.0, -0.5]}
0.0 20.0 ['train()', 'device', 'steps'] 5 ['forward', 'waits', 'conv1 forward', 'step 0', 'step 1']
10.0 20.0 ['train()', 'device', 'steps'] 2 ['conv1 forward', 'step 1']
['bf16', 'fp32'] [1.5, 3.0, 1.0, 2.0] ['2.5, x 1', '5, x 2']
[] [5.0, 5.0] ['5', '5']
[[nan, 40.0], [1.0, 50.0]]
[[nan, nan], [1.0, 50.0]]
[1.667, 2.857]
[1.818]" "$("$plotter" pictures.py "$repo/labs/tools" 2>&1)"
    plots pictures precisions bytes precision timeline
}

# counted DIR READ WRITTEN: what ./cnn-count prints at its end; the first kernel has read and written so many bytes
counted() {
    cat >"$1/output.txt" <<END
epoch=1 images=1 seconds=7.017 (1) 2 (3) 4
kernel                   launches global reads        (bytes)       writes        (bytes) shared reads        (bytes)
add_kernel<float, true>         4         3254      ($2)         1627      ($3)            7           (70)
set_kernel                      1            0            (0)          250      (1000000)            0            (0)
peak_kernel                     1            0            (0)         2500     (10000000)            0            (0)
END
}

# Runs that differ in --lr alone have a bar and a line for each value, in the order of the numbers; in two options, none.
one_option_varied() {
    cat >varied.py <<'END'
import sys
sys.path.insert(0, sys.argv[1])
import plot
runs = plot.read_runs("rates")
for figure in plot.draw_study(runs), plot.draw_loss(runs):
    print(*(text.get_text() for text in (figure.legends or [figure.axes[0].get_legend()])[0].get_texts()), sep=";")
print(plot.draw_study(runs).axes[0].get_ylabel())
END
    local lr small=(--no-cuda --model cifar --dataset synthetic --limit-train 64 --limit-test 16 --epochs 1 --batch-size 16)
    mkdir rates
    for lr in 0.01 0.2 10; do "$cnn" "${small[@]}" --lr $lr --out rates/$lr >/dev/null 2>&1; done
    same varied/labels "cpu, --lr 0.01;cpu, --lr 0.2;cpu, --lr 10|$(
        )batch 16, --lr 0.01;batch 16, --lr 0.2;batch 16, --lr 10|training time in s, one run" \
        "$("$plotter" varied.py "$repo/labs/tools" 2>&1 | grep -v ^Note | paste -sd '|')"
    mkdir words # one of the values is empty
    "$cnn" "${small[@]}" --save-model --out words/a >/dev/null 2>&1
    "$cnn" "${small[@]}" --save-model --load words/a/model.safetensors --out words/b >/dev/null 2>&1
    plots varied/words words study loss confusion samples filters
    "$cnn" "${small[@]}" --lr 10 --momentum 0.5 --out rates/other >/dev/null 2>&1
    plots varied/two rates confusion samples
    line varied/two_says "^not drawn: loss: it is for runs with the same --"
}

# The filters of an untrained network beside the runs, with another seed and with theirs; it is no run of the study.
filters_before() {
    cat >filters.py <<'END'
import sys
sys.path.insert(0, sys.argv[1])
import plot
runs = plot.read_runs("tiny")
print(len(runs), *(axis.get_title() for axis in plot.draw_filters(runs).axes if axis.get_title()), sep=",")
END
    local seed runs
    runs=$(find tiny -name run.json | wc -l)
    for seed in 9 1; do
        "$cnn" --no-cuda --model cifar --dataset synthetic --limit-train 16 --limit-test 16 --eval --save-model \
            --seed $seed --out tiny/untrained >/dev/null
        same "filters/seed_$seed" "$runs,$([ $seed = 9 ] || echo before training,)after training" \
            "$("$plotter" filters.py "$repo/labs/tools" 2>&1)"
    done
    mkdir tiny/tampered tiny/unsaved && echo '{' >tiny/tampered/run.json && cp tiny/untrained/run.json tiny/unsaved/
    set -- tiny/cifar-cpu-*
    same filters/beside 1 "$("$plotter" -c 'import sys
sys.path.insert(0, sys.argv[1])
import run_folders
runs = [run_folders.read_run(sys.argv[2])]
print(len([r for r in runs if run_folders.read_untrained(r)]))' "$repo/labs/tools" "$1" 2>&1)"
    rm -r tiny/tampered tiny/unsaved
    "$repo/labs/tools/verify.py" tiny >"$out" 2>"$err"
    same filters/verify_ignores "" "$(grep -e untrained "$out" "$err")"
    rm -r tiny/untrained
}

# The roofline's points: each layer at its executed GFLOP/s, below the limits; conv2 also with the operations
# that its definition counts, 2.25 times as many. Without the column `saved`, none of those.
roofline_marks() {
    cat >marks.py <<'END'
import sys
sys.path.insert(0, sys.argv[1])
import plot
for axis in plot.draw_roofline(plot.read_runs(sys.argv[2])).axes:
    for line in axis.get_lines():
        if line.get_marker() not in ("None", None, ""):
            print(line.get_label(), *(f"{x:.4g},{y:.4g}" for x, y in line.get_xydata()))
END
    same roofline/marks "conv2d: executed 4,38 16,40|conv2d: as the definition counts 16,40 36,90|linear: executed 8.732,62" \
        "$("$plotter" marks.py "$repo/labs/tools" tiny 2>&1 | paste -sd '|')"
    cp tiny/cifar-cpu-b16-r1/layers.csv layers.kept
    cut -d , -f 1-10,12 layers.kept >tiny/cifar-cpu-b16-r1/layers.csv
    same roofline/older_file "conv2d: executed 4,38 16,40|linear: executed 8.732,62" \
        "$("$plotter" marks.py "$repo/labs/tools" tiny 2>&1 | paste -sd '|')"
    cp layers.kept tiny/cifar-cpu-b16-r1/layers.csv
}

# labs/figures/make.sh with a tiny run, and its table with a mistake
test_figures() {
    local figure
    [ -z "${QUICK:-}" ] || { skip figures "QUICK=1" && return; }
    has_plotter || return
    (cd "$repo" && CNN=$cnn labs/figures/make.sh "$tmp/figures" --dataset synthetic --limit-train 640 \
        --limit-test 100) >"$out" 2>"$err"
    same figures/status "0 " "$? $(cat "$err")"
    for figure in run roofline samples augment filters study loss bench; do
        holds "figures/$figure" "a picture" "$(wc -c <"figures/$figure.png")" is_png "figures/$figure.png"
        holds "figures/$figure/path" "no path of this machine" "$(strings "figures/$figure.png" | grep -m 1 "$tmp")" \
            test -z "$(strings "figures/$figure.png" | grep -m 1 -e "$tmp" -e "$repo")"
        holds "figures/$figure/committed" "at most 150 KB" "$(wc -c <"$repo/labs/figures/$figure.png")" \
            test "$(wc -c <"$repo/labs/figures/$figure.png")" -le 150000
        is_png "$repo/labs/figures/$figure.png" || fail "figures/$figure/committed_picture" "a picture" "none"
    done
    sed '1s/img_per_s/speed/' "$repo/labs/figures/bench.csv" >bench.csv
    "$plotter" "$repo/labs/tools/plot.py" bench.csv >"$out" 2>"$err"
    status=$?
    one_error plot figures/bench_column "bench.csv: expected the columns network, batch" "'img_per_s'"
}

# The targets as a user calls them, in a copy; quickly built
test_make() {
    mkdir copy && cp -r "$repo"/{cnn.c,cnn_kernels.cu,Makefile,tests,labs} copy && cd copy || exit 1
    local build=(NO_CUDA=1 NO_MPI=1 "CFLAGS=-std=gnu17 -O$([ -z "${QUICK:-}" ] && echo 1 || echo 0)" COMMIT=unknown)
    make "${build[@]}" cpu EPOCHS=1 LIMIT=200 BATCH=50 >"$out" 2>"$err" </dev/null
    same make/cpu "0 " "$? $(cat "$err")"
    line make/cpu_said '^cpu: [0-9.]+ s of training, accuracy [0-9.]+ %, see runs/cpu$'
    holds make/cpu_settings "1 epoch, 200 images, batch 50" "$(cat runs/cpu/run.json)" \
        grep -qz '"limit-train": 200,.*"batch-size": 50,.*"epochs": 1,' runs/cpu/run.json
    make "${build[@]}" multi EPOCHS=1 LIMIT=200 BATCH=50 >"$out" 2>"$err" </dev/null
    status=$?
    holds make/multi "exit 2, no GPU" "$status $(cat "$err")" grep -q 'error: multi: .*found no GPU' "$err"
    local small_study=(study EPOCHS=1 LIMIT=64 BATCHES=16 REPEATS=1 RUNS=runs/small)
    make "${build[@]}" "${small_study[@]}" >"$out" 2>&1 </dev/null
    same make/study 0 "$?"
    line make/study_csv '^Written: runs/small/study.csv$'
    touch cnn # as if built from other sources, which no commit tells apart
    make "${build[@]}" "${small_study[@]}" >"$out" 2>"$err" </dev/null
    holds make/uncommitted "older sources" "$(cat "$err")" grep -q 'runs/small/.* older sources' "$err"
    cd "$tmp" || exit 1
}

test_statistics
test_refused
test_scaling_table
test_workers_table
test_resumed
test_devices
test_workers
test_hours
test_launched
test_names
test_plots
test_pictures
test_figures
test_make
exit 0
