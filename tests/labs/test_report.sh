#!/usr/bin/env bash
# Tests labs/tools/report.py and verify.py: a made-up study and report in which nothing is wrong, then for
# each finding one that is spoilt in one place; what a student has written stays as it is; a small real study; and
# report.html, in chromium where it is installed.
# CNN=PATH: another binary. Prints `pass report/NAME`, `fail ...` or `skip ...`.
suite=report
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
if ! command -v python3 >/dev/null; then
    skip all "python3 is not installed"
    exit 0
fi
unset MAKEFLAGS MAKELEVEL
export PYTHONDONTWRITEBYTECODE=1
python3=$(python3 -c 'import sys; print(sys.executable)') # a pyenv's python3 is a script that takes longer
cd "$tmp" || exit 1

# shellcheck source=tests/labs/fork_python.sh
source "$repo/tests/labs/fork_python.sh"
with_page=$("$repo/tests/python_with.sh" markdown_it)
start_python "${with_page:-$python3}" report verify ${with_page:+report_html}

tool() { fork_python "$out" "$err" "$repo/labs/tools/$1.py" "${@:2}"; }
error() { one_error report "$@"; }
# section NAME DIR: this table of DIR/tables.md
section() { sed -n "/^# $1\$/,/^# /p" "$2/tables.md"; }

# make_run DIR DEVICE WORLD GLOBAL_BATCH SEED SECONDS: 2 epochs of 100 images; each number fits the others
make_run() { helper make_run "$@"; }
# helper NAME ARGUMENTS...: a program below
helper() {
    fork_python /dev/null "$err" "$tmp/$1.py" "${@:2}"
    [ "$status" = 0 ] || fail "helper_$1" "exit status 0" "$(cat "$err")"
}
cat >"$tmp/make_run.py" <<'END'
import json, math, os, sys
folder, device, world, batch, seed = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
os.makedirs(folder, exist_ok=True)
each = batch // world
count = math.ceil(math.ceil(100 / world) / each)
step = round(float(sys.argv[6]) / 2 / count + seed * 1e-6, 6)
parts = [round(step / 8, 6)] * 6
parts.append(round(step - sum(parts), 6))
seconds, epochs, steps = round(count * step, 3), [], []
for epoch in 1, 2:
    epochs.append(dict(epoch=epoch, images=100, seconds=seconds, img_per_s=round(100 / seconds),
                       loader_wait_s=0, train_loss=2.3, test_seconds=0.5, test_loss=2, accuracy=75, lr=0.1,
                       weight_hash="0"))
    left = 100 // world
    for number in range(1, count + 1):
        images = min(each, left)
        left -= images
        for rank in range(world):
            load, copy, forward, backward, optimizer, exposed, other = parts
            steps.append([epoch, number, rank, images, 2.3, 0.1, step, load, copy, forward, backward, optimizer,
                          0, exposed, other, 0, int(epoch == 1 and number <= 3)])
uuid = "GPU-00000000-0000-0000-0000-00000000000"
about = dict(
    status="complete", provenance="measured", emulated=device.startswith("emulated"), command=["./cnn", "--out", folder],
    machine=dict(host="a", cpu="made-up", cores=4, memory_bytes=8e9, peak_gflops=100, device=device,
                 uuid=None if device == "cpu" else uuid + "0", driver=None, slurm=None),
    build=dict(compiler="gcc 1", flags="-O3", commit="abc"),
    settings={"model": "cifar", "dataset": "synthetic", "limit-train": 100, "seed": seed, "epochs": 2,
              "lr-scaling": "none", "optimizer": "sgd", "momentum": 0.9, "threads": 4, "workers": 1,
              "kernels": "fast", "gpus": 0 if device == "cpu" else world, "batch-size": each,
              "global-batch": batch, "no-cuda": device == "cpu", "oversubscribe": False, "out": folder},
    parallel=dict(mode="single" if world == 1 else "ddp", world=world, batch_per_device=each,
                  global_batch=batch, iterations=count, workers=1, graph=False),
    classes=["0", "1"], resources=dict(wall_s=2 * seconds + 2, cpu_s=6 * seconds, max_rss_bytes=1e8))
with open(f"{folder}/run.json", "w") as f:
    json.dump(about, f, indent=1)
head = ("epoch,step,rank,images,loss,lr,seconds,load_s,copy_s,forward_s,backward_s,optimizer_s,comm_s,"
        "exposed_comm_s,other_s,bytes_sent,warmup")
with open(f"{folder}/steps.csv", "w") as f:
    print(head, *(",".join(map(str, row)) for row in steps), sep="\n", file=f)
with open(f"{folder}/epochs.csv", "w") as f:
    print(",".join(epochs[0]), *(",".join(map(str, e.values())) for e in epochs), sep="\n", file=f)
with open(f"{folder}/predictions.csv", "w") as f:
    print("image,label,predicted,epoch,shape,pixels", file=f)
    for image in range(40):
        print(image, image // 20, int(image >= 10), 0, "1x1x1", "", sep=",", file=f)
if world > 1:
    with open(f"{folder}/output.txt", "w") as f:
        for rank in range(world):
            print(f"Rank {rank}: a, {device}, {uuid}{rank}", file=f)
        for epoch in epochs:
            print(*(f"{key}={value}" for key, value in epoch.items() if key != "weight_hash"), file=f)
END

# What an honest student hands in: 5 repeats on cpu (mean 12 s), one GPU and two; answers, plots
make_honest() {
    local seed seconds=(0 10 12 14 12 12)
    for seed in 1 2 3 4 5; do
        make_run "$1/c$seed" cpu 1 50 $seed "${seconds[seed]}"
        make_run "$1/s$seed" "GPU X" 1 50 $seed 3
        make_run "$1/m$seed" "GPU X" 2 50 $seed 1.6
    done
    # conv2 is Winograd's, conv3 skips most of backward, row 5 stays in a cache: 180 % is right there
    cat >"$1/c1/layers.csv" <<'END'
layer,kind,out_shape,params,mflop,forward_ms,backward_ms,gflops,gb_per_s,percent_of_peak,saved,bound
conv1,conv2d 5x5 stride 2 padding 0,28x28x6,456,1.000,1.0,2.0,50,9.5,50,1.000,compute
conv2,conv2d 3x3 stride 1 padding 1,28x28x6,456,0.706,0.16,0.32,55,9.5,55,4.000,compute
conv3,conv2d 5x5 stride 1 padding 0,28x28x6,456,0.600,0.4,0.05,25,9.5,25,8.000,compute
row 4,avgpool2d 2x2 stride 2 padding 0,14x14x6,0,0.000,1.0,1.0,0,16.8,50,1.000,memory
row 5,add row 4 + row 2,14x14x6,0,0.000,1.0,1.0,0,60,180,1.000,memory
row 6,add row 4 + row 2,14x14x6,0,0.000,10,10,0,30,90,1.000,memory
fc1,linear 400 -> 120,1x1x120,48120,0.096,1.0,1.0,95,7.1,95,1.000,compute
END
    printf 'line,hits,time_us,per_hit_us,percent,source\n7,4,9,2.2,100,"a|b"\n' >"$1/c1/profile.csv"
    tool study collect "$1"
    helper tables "$1"
    mkdir -p "$1/plots"
    touch "$1"/plots/{study,loss,scaling,roofline,confusion}.png
    tool report "$1"
    answer "$1/report.md"
    tool report "$1"
} >/dev/null

cat >"$tmp/tables.py" <<'END'
import sys
from run_folders import *
write_table(sys.argv[1] + "/scaling.csv", SCALING, scaling_rows(make_rows(read_runs(sys.argv[1]))))
END

# Writes an answer in place of each question, and an image.
answer() { helper answer "$1"; }
cat >"$tmp/answer.py" <<'END'
import re, sys
text = open(sys.argv[1]).read()
text = re.sub(r"^> TODO:.*\n(> .*\n)*", "An answer.\n", text, flags=re.M)
open(sys.argv[1], "w").write(text.replace("# Motivating Image\n", "# Motivating Image\n\n![it](plots/loss.png)\n"))
END

test_honest() {
    make_honest honest
    tool verify honest
    same honest/verify "0 honest: 15 run folders, checked as timing study and scaling study
Nothing found in honest that is missing or implausible" "$status $(cat "$out" "$err")"
    local text line_of
    text=$(cat honest/report_full.md)
    holds honest/cpu_row "5 repeats, mean 12, sd 1.414, 2.776 * sd / sqrt(5) = 1.756" "$(grep '^| cpu' <<<"$text")" \
        grep -qxF '| cpu | 50 | 12.0 | 1.4 | 1.8 | 16.7 | 1.00 |' <<<"$text"
    line_of=$(grep '^In all rows: model' <<<"$text")
    same honest/equal "In all rows: model cifar; global batch 50; repeats 5; accuracy in % 75; sd of the accuracy 0; $(
    )provenance measured." "$line_of"
    holds honest/scaling_row "speed-up 3 / 1.6 = 1.875" "$(grep '^| strong' <<<"$text")" \
        grep -qE '^\| strong \| 2 \| ddp .*\| 1.87 \| 0.937 \| 1.76 \|$' <<<"$text" # predicted: 0.75 / (0.375 + 0.05)
    same honest/scaling_alone 1 "$(section scaling honest | grep -c 'rows: device gpu;')" # cpu is none of several devices
    holds honest/steps "2 steps an epoch, first 6 s, parts 312 ms" "$(grep '^| cpu' <<<"$text")" \
        grep -qE '^\| cpu \| 6 \| 6 \| 312 \|' <<<"$text"
    same honest/machine "In all rows: CPU made-up; usable cores 4; memory in GB 8; threads 4; measured peak, GFLOP/s 100; $(
    )its sd 0; Slurm jobs 0.

| host | device | runs |
| --- | --- | --- |
| a | cpu | 5 |
| a | GPU X | 10 |" "$(section machine honest | sed -n 3,8p)"
    holds honest/settings "what is equal, what differs" "$text" \
        grep -qzE -- '--optimizer sgd .*What differs:.*.*-seed.: 1, 2, 3, 4, 5' <<<"$text"
    holds honest/layers "the table of c1" "$text" grep -qF '| conv2 | conv2d 3x3 stride 1 padding 1 |' <<<"$text"
    holds honest/profile "its bar escaped" "$text" grep -qF 'a\|b |' <<<"$text"
    holds honest/class "class 0" "$text" grep -qF '| 0 | 50 |' <<<"$text"
    holds honest/plot "a link" "$text" grep -qF '](plots/scaling.png)' <<<"$text"
    same honest/headings "Project Title,Motivating Image,Abstract,Methodology,Timing Results,Concluding Discussion $(
    )and Future Work,References" "$(sed -n 's/^# //p' honest/report.md | paste -sd,)"
}

# What ./cnn writes without cnn_kernels.c, which measures the peak: nothing is missing.
test_no_peak() {
    cp -a honest alone
    sed -i 's/"peak_gflops": 100/"peak_gflops": null/; s/"kernels": "fast"/"kernels": "naive"/' alone/*/run.json
    sed -i -E '2,$ s/,[0-9]+,([0-9.]+),(compute|memory)$/,,\1,/' alone/c1/layers.csv
    tool report alone
    touch alone/plots/*
    tool verify alone
    same no_peak/verify "0 Nothing found in alone that is missing or implausible" "$status $(tail -n 1 "$out")"
    holds no_peak/machine "no peak" "$(section machine alone)" \
        grep -qF 'memory in GB 8; threads 4; Slurm jobs 0.' alone/tables.md
    holds no_peak/layers "no limit" "$(grep '^| fc1 ' alone/tables.md)" \
        grep -qxF '| fc1 | linear 400 -> 120 | 1x1x120 | 48120 | 0.096 | 1 | 1 | 95 | 7.1 | 1 |' alone/tables.md
}

# found NAME FILE WORDS...: verify on spoilt ends with 1 and one of its lines is about FILE, or "" for all of
# the folder, with the words
found() {
    local name=$1 lines word
    tool verify spoilt
    lines=$(grep -E "^spoilt(/$2|: expected )" "$out")
    for word in "${@:3}"; do
        lines=$(grep -F -- "$word" <<<"$lines")
    done
    holds "$name" "exit 1 and a line about $2 with: ${*:3}" "exit $status, $(cat "$err" "$out")" \
        [ "$status" = 1 -a -n "$lines" ]
}

spoilt() { rm -rf spoilt && cp -a honest spoilt && touch spoilt/plots/*; }

# spoil NAME FILE SED WORDS...: with this change to FILE
spoil() {
    spoilt
    sed -i -E "$3" "spoilt/$2"
    found "spoilt/$1" "$2" "${@:4}"
}

# spoil_lab NAME FILE SED WORDS...: with this change to the run folders of a lab
spoil_lab() {
    rm -rf spoilt && cp -a lab spoilt
    sed -i -E "$3" "spoilt/$2"
    touch spoilt/plots/*
    found "kinds/lab_$1" "$2" "${@:4}"
}

# The two ways to use several devices, as in lab 8: rows of their own in each table.
test_ways() {
    make_run ways/one cpu 1 50 1 12
    make_run ways/ddp cpu 2 50 1 8
    make_run ways/dp cpu 2 50 1 10
    sed -i 's/"mode": "ddp"/"mode": "dp"/' ways/dp/run.json
    tool report ways
    same ways/times "cpu;cpu x 2, ddp;cpu x 2, dp" \
        "$(section timing ways | sed -n 's/^| \(cpu[^|]*\) |.*/\1/p' | paste -sd ';')"
    same ways/speedups "single 1;ddp 1.5;dp 1.2" "$(section scaling ways | awk -F ' *[|] *' \
        '$2 == "strong" { print $4, $(NF - 3) }' | paste -sd ';')"
}

# Of one lab: its run folders at any depth, its questions, and nothing of other labs.
test_lab() {
    local w text
    mkdir -p project/labs/lab03
    cp -r "$repo/labs/tools" project/labs
    cp "$repo/labs/lab03/questions.md" project/labs/lab03
    cp -r "$repo/labs/lab02" project/labs
    for w in 1 2; do
        make_run "project/runs/lab03-workers/w$w" cpu 1 50 1 "1$w"
        sed -i "s/\"workers\": 1/\"workers\": $w/" "project/runs/lab03-workers/w$w/run.json"
    done
    make_run project/runs/lab03-before cpu 1 50 1 16
    make_run project/runs/lab02-naive cpu 1 50 1 9
    make_run project/runs/lab02-textbook cpu 1 50 1 40 # before the change of the source: not a repeat
    project/labs/tools/lab_runs.sh 3 && project/labs/tools/lab_runs.sh 3 # a second time: the same links
    same lab/links "lab03-before lab03-workers-w1 lab03-workers-w2" "$(find project/reports/lab03 -type l -printf '%f\n' |
        sort | paste -sd ' ')"
    tool report project/reports/lab03
    text=$(cat project/reports/lab03/report_full.md "$err")
    holds lab/questions "those of labs/lab03/questions.md" "$text" grep -q '^> TODO: your name. Which numbers may a worker' <<<"$text"
    same lab/workers "1 2" "$(section workers project/reports/lab03 | awk -F ' *[|] *' '$2 == "cpu" { print $3 }' |
        paste -sd ' ')"
    same lab/no_speedup "" "$(grep -o 'speed-up over cpu' <<<"$text")"
    mkdir -p project/reports/lab03/plots && touch -d 2000-01-01 project/reports/lab03/plots/old.png
    tool verify project/reports/lab03
    line lab/command 'old.png: .*; make report LAB=3$'
    project/labs/tools/lab_runs.sh 2
    tool report project/reports/lab02
    same lab/other_source "1 1" "$(section timing project/reports/lab02 | grep -c 'repeats 1;') $(
        )$(section timing project/reports/lab02 | grep -c '^| source of lab02-textbook |')"
    same lab/none "2 make report LAB=7: there is no run folder runs/lab07..." \
        "$(project/labs/tools/lab_runs.sh 7 2>&1 >/dev/null | cut -d ';' -f 1 | sed 's/^/2 /')"
}

# What labs 6 and 7 are about: the losses in each precision, the part of the loading that is hidden, the bytes of each
# rung; and the training accuracy where ./cnn has written it.
test_own_results() {
    local run
    for run in fp32 bf16 tf32; do
        make_run own/$run "emulated GPU" 1 50 1 12
        sed -i "s/\"workers\": 1,/& \"precision\": \"$run\",/" own/$run/run.json
    done
    sed -i 's/"momentum": 0.9/"momentum": 0/' own/tf32/run.json # differs in more than precision
    sed -i '2s/,2.3,/,2.4,/' own/fp32/steps.csv
    sed -i '2s/,2.3,/,2.424,/; 3s/,2.3,/,2.29999,/' own/bf16/steps.csv
    echo 'steps=4 device_us=9 make_us=0.0 upload_us=2000.0 make_hidden_us=0.0 upload_hidden_us=500.0' >own/bf16/overlap.txt
    cat >own/tf32/output.txt <<'END'
kernel                   launches global reads        (bytes)       writes        (bytes) shared reads        (bytes)
a_kernel<float, true>           4         3254        (3000000)     1627        (1000000)            7           (70)
END
    mkdir own/plots && touch own/plots/{precision,timeline,bytes}.png
    tool report own
    same own/losses "| 1 | 2.40000 | 2.42400 | +1.000 |;| 2 | 2.30000 | 2.29999 | 0.000 |" "$(section precision own |
        grep '^| [12] ' | sed 's/[+-]0.000/0.000/' | paste -sd ';')"
    same own/titles "| step | fp32 | bf16 | difference in % |" "$(section precision own | grep '^| step')"
    same own/overlap "| run | workers | steps | upload, ms | hidden in % | make a batch, ms |
| bf16 | 1 | 4 | 2 | 25 | 0 |" "$(section overlap own | grep '^| [rb]')"
    same own/bytes "| tf32 | 4 | 3 | 1 | 1 |" "$(section bytes own | grep '^| tf32')"
    same own/pictures "bytes precision timeline" "$(grep -oP '\]\(plots/\K[a-z]*' own/tables.md | sort | xargs)"
    rm own/plots/*
    tool report own
    same own/no_picture "0 2.42400" "$(grep -c '](plots' own/tables.md) $(grep -o 2.42400 own/tables.md)"

    cp -a honest accuracy
    sed -Ei '1s/train_loss/&,train_accuracy/; 2,$ s/^([^,]*,){6}/&81.25,/' accuracy/*/epochs.csv
    tool report accuracy
    holds own/train_accuracy "beside the test's" "$(section timing accuracy)" \
        grep -q '; training accuracy in % 81.2;' accuracy/tables.md
    same own/no_train_accuracy 0 "$(grep -c 'training accuracy' honest/tables.md)"
}

# Of the compiler's flags a row names those that not all runs have.
test_flags() {
    make_run flags/o3 cpu 1 50 1 12
    make_run flags/o0 cpu 1 50 1 24
    sed -i 's/"flags": "-O3"/"flags": "-std=gnu17 -O3 -g"/' flags/o3/run.json
    sed -i 's/"flags": "-O3"/"flags": "-std=gnu17 -O0 -g"/' flags/o0/run.json
    tool report flags
    same flags/differing "-O0 -O3" "$(section timing flags | sed -n 's/^| \(-O[^ |]*\) |.*/\1/p' | sort | paste -sd ' ')"
}

test_missing() {
    spoil status c2/run.json 's/"complete"/"running"/' "expected status complete, found running"
    same spoilt/status_once 1 "$(cat "$out" "$err" | grep -c 'not complete\|status complete')"
    spoil resumed c2/run.json 's/"epochs": 2,/"epochs": 3,/' "expected all 3 epochs, found 2"
    spoil json c2/run.json '1s/\{/[/' "expected JSON"
    same spoilt/json_once 1 "$(grep -c JSON "$out")"
    spoil dry_run c2/run.json 's/"lr-scaling"/"dry-run": true, "lr-scaling"/' "expected a run that trains"
    spoil entry c2/run.json 's/"cpu_s"/"cpu"/' "what ./cnn --out writes, found KeyError('cpu_s')"
    spoil setting c2/run.json '/"optimizer":/d' "in settings the entries" "found no optimizer"
    spoil machine c2/run.json 's/"host": "a"/"host": ""/' "in machine the entries" "found no host"
    spoil peak c2/run.json 's/"peak_gflops": 100/"peak_gflops": null/' "in machine the entries" "found no peak_gflops"
    spoil build c2/run.json 's/"compiler": "gcc 1",?//' "in build the entries" "found no compiler"
    spoil epochs_csv_gone c2/epochs.csv '1s/accuracy/other/' "epochs.csv: expected the columns"
    spoilt && rm spoilt/c2/run.json spoilt/c2/epochs.csv
    found missing/run_json c2/run.json "expected a run.json, found none"
    spoilt && rm -r spoilt/c5
    found missing/repeats "" "expected 5 repeats or more of cpu, global batch 50, found 4"
    spoilt && make_run spoilt/c6 cpu 1 25 1 12
    found missing/batch "" "runs of single with the batches of the other devices, found none with 25"
    spoilt && rm spoilt/plots/study.png
    found missing/plot tables.md "found '![time and accuracy](plots/study.png)'"
    spoilt && rm -r spoilt/plots
    found missing/plots plots "expected plots, found none"
    spoilt && touch -d yesterday spoilt/plots/loss.png
    found missing/old_plot plots/loss.png "found one older than a run"
    spoilt && rm spoilt/report.md
    found missing/report report.md "expected your report, found no such file"
    spoil question report.md 's/^# References/> TODO: why?\n&/' "expected your answer, found > TODO: why?"
    spoil heading report.md 's/^# References/# Links/' "expected the heading References"
    spoil part report.md '/^.timing./d' "expected the table timing" "write a line [timing](tables.md#timing) there"
    spoilt && rm spoilt/tables.md
    found missing/tables tables.md "found 'no such file'"
    spoilt && rm spoilt/report_full.md
    found missing/full report_full.md "found 'no such file'"
    rm -rf spoilt && mkdir spoilt
    found missing/all "" "folders of complete runs"
}

test_implausible() {
    spoil train_loss c2/epochs.csv '2s/,2.3,/,nan,/' "a finite train_loss in epoch 1, found nan"
    spoil test_loss c2/epochs.csv '2s/,2,75,/,,75,/' "a finite test_loss in epoch 1, found None"
    spoil accuracy c2/epochs.csv '3s/,75,/,nan,/' "a finite accuracy in epoch 2" "was it edited? Run it again"
    spoil step_loss c2/steps.csv '3s/,2.3,/,inf,/' "a finite loss in epoch 1, step 2, found inf"
    spoil throughput c2/epochs.csv '2s/,17,/,19,/' "img_per_s x seconds = 100" "19 x 6"
    spoilt && sed -i '2s/,2.3,/,2.2,/' spoilt/c2/epochs.csv
    found spoilt/other_loss c2/steps.csv "the loss 2.2 in epoch 1" "found 2.3000, the mean of its steps"
    spoil printed m2/epochs.csv '2s/,75,/,76,/' "expected the epochs that output.txt has, found others"
    spoil no_hash c2/epochs.csv 's/,[^,]*$//' "expected the columns epoch, images" "weight_hash"
    spoil wall c2/run.json 's/"wall_s": [0-9.]*/"wall_s": 9/' "a wall time of at least 13.0"
    spoil cpu_time c2/run.json 's/"cpu_s": [0-9.]*/"cpu_s": 99/' "at most 4 cores x 14.0 s of CPU time, found 99 s"
    spoil accuracy c2/epochs.csv '3s/,75,/,80,/' "the accuracy of predictions.csv, 75.00 %, found 80 %"
    spoilt && sed -i '2s/,0,0,/,0,1,/' spoilt/c2/predictions.csv
    found spoilt/predictions c2/epochs.csv "the accuracy of predictions.csv, 72.50 %, found 75 %"
    spoil classes c2/predictions.csv '2s/,0,0,/,0,2,/' "expected 2 classes, found others"
    spoilt && rm spoilt/c2/predictions.csv
    found spoilt/no_predictions c2/predictions.csv "expected the columns label, predicted, epoch"
    spoil steps c2/steps.csv '$ d' "2 steps = ceil(100 images / batch 50), ranks: 1, in epoch 2, found [1]"
    spoil ddp_steps m2/steps.csv '$ d' "2 steps = ceil(50 images / batch 25), ranks: 2, in epoch 2, found [2, 1]"
    spoil images c2/steps.csv '2s/,50,/,49,/' "expected 100 images in epoch 1, as in epochs.csv, found 99"
    spoilt && sed -i 's/,100,6.0,17,/,100,3.0,33,/' spoilt/c2/epochs.csv
    found spoilt/seconds c2/steps.csv "expected 3.0 s in all steps of rank 0 in epoch 1" "found 6.0"
    spoil parts c2/steps.csv '3s/0,0\.37/0,0.47/' "seconds = sum of the phases in epoch 1, step 2"
    spoil bounds c1/layers.csv '2s/50,1.000,compute/,1.000,/' "a bound and a percentage in all rows, or in none" "6 of 7"
    spoil linear c1/layers.csv 's/95,1.000,compute/180,1.000,compute/' "fc1, bound by compute: at most 150 %" "found 180 %"
    spoil conv c1/layers.csv '/^conv1/s/,1.0,2.0/,0.1,2.9/' "forward of conv1: at most 150 %" "found 500 %"
    spoil winograd c1/layers.csv '/^conv2/s/,0.16,/,0.05,/' "forward of conv2: at most 600 %" "found 706 %"
    spoil backward c1/layers.csv 's/25,8.000/180,8.000/' "conv3, bound by compute: at most 150 %"
    spoil bandwidth c1/layers.csv 's/90,1.000,memory/180,1.000,memory/' "row 6, bound by memory: at most 150 %"
    spoil gpus m2/output.txt '2s/.$/0/' "2 ranks on as many GPUs, found 1 different GPUs"
    spoilt && rm spoilt/m2/output.txt
    found implausible/no_output m2/output.txt "with its 2 GPUs, found no such file"
    spoilt && make_run spoilt/o1 cpu 8 48 1 3 && sed -i 's/"oversubscribe": false/"oversubscribe": true/' spoilt/o1/run.json
    found implausible/oversubscribed o1/run.json "expected a core for each of 8 replicas, found 4 cores"
    spoil emulated s2/run.json 's/GPU X/emulated GPU/' '"emulated": true, as its device or program says'
    spoil emulator s2/run.json 's/"\.\/cnn"/".\/cnn-emu"/' '"emulated": true, as its device or program says'
    spoilt && cp spoilt/c2/steps.csv spoilt/c4/
    found implausible/copy c4/steps.csv "expected times of its own, found all those of spoilt/c2"
    spoilt && cp spoilt/m1/steps.csv spoilt/m5/
    found implausible/copy_ranks m5/steps.csv "expected times of its own, found all those of spoilt/m1"
    spoilt && sed -i 's/"momentum": 0.9/"momentum": 0/; s/"workers": 1/"workers": 2/' spoilt/s[1-5]/run.json
    found implausible/two_differences s1 "one difference at most" "--momentum 0.9 and 0, --workers 1 and 2"
    spoilt && sed -i 's/"workers": 1/"workers": 2/' spoilt/s*/run.json
    tool verify spoilt
    same implausible/one_difference 0 "$(grep -c 'one difference at most' "$out")"
    for seed in 1 2 3 4 5; do
        make_run spoilt/m$seed "GPU X" 2 50 $seed 1.2
    done
    sed -i 's/"workers": 2/"workers": 1/' spoilt/s*/run.json
    found implausible/speedup "" "a speed-up of at most 1.1 x 2 devices" "found 2.50"
    for seed in 1 2 3 4 5; do
        make_run spoilt/m$seed "GPU X" 2 50 $seed 60
    done
    found implausible/slower "" "a speed-up of at least 0.5 on 2 devices" "found 0.05"
    spoilt && make_run spoilt/c1 cpu 1 50 1 6 && make_run spoilt/c3 cpu 1 50 3 20
    found implausible/interval "" "a 95 % interval of +-25% of the mean or less (cpu, global batch 50)" "found +-50%"
    spoil study_csv study.csv '2s/,12,/,11,/' "line 2: expected seconds_mean 12, found 11"
    spoil scaling_csv scaling.csv '$ d' "found none"
    spoil scaling_csv_more scaling.csv '$ p' "lines, found"
    spoil table tables.md 's/\| 12.0 \| 1.4/| 11.0 | 1.4/' "the generated line '| cpu | 50 | 12.0 | 1.4 |" "found '| cpu | 50 | 11.0 |"
    spoil full_table report_full.md 's/\| 12.0 \| 1.4/| 11.0 | 1.4/' "the generated line '| cpu | 50 | 12.0 | 1.4 |"
    spoil full_more report_full.md '$ a A row more' "found 'A row more'" "make report RUNS=spoilt writes it again"
    spoilt && sed -i 's/^An answer/Another answer/' spoilt/report.md
    found implausible/full_old report_full.md "the generated line 'Another answer.'" "found 'An answer.'"
    spoilt && make_run spoilt/c2 cpu 1 50 2 13
    found implausible/stale_table tables.md "the generated line '| cpu | 50 | 12.2 | 1.5 |"
}

test_nature() {
    spoilt && sed -i 's/"provenance": "measured"/"provenance": "supplied"/' spoilt/s*/run.json
    tool verify spoilt
    line supplied/named '^Note: supplied, not your own measurements: s1, s2, s3, s4, s5$'
    tool report spoilt
    holds supplied/marked "supplied in the table, no speed-up over cpu" "$(grep '^| .*single' spoilt/tables.md)" \
        grep -qE '^\| provenance supplied \| single \| .*\| 66.7 \|  \| supplied \|$' spoilt/tables.md
    sed -i 's/"provenance": "measured"/"provenance": "supplied"/' spoilt/*/run.json
    found supplied/all "" "expected runs that you measured, found emulated or supplied ones only"
    rm -rf spoilt
    make_run spoilt/e1 "emulated GPU" 1 50 1 3
    tool study collect spoilt
    tool report spoilt
    same emulated/marked "device single (EMULATED);provenance emulated" "$(section timing spoilt |
        sed -nE 's/^\| (device|provenance|speed-up.*) \| (.*) \|$/\1 \2/p' | paste -sd ';')"
    found emulated/all "" "expected runs that you measured, found emulated or supplied ones only"
    line emulated/named '^Note: emulated, their times mean nothing: e1$'
    sed -i 's/"abc"/"abc-dirty"/' spoilt/e1/run.json
    tool verify spoilt
    line dirty/named '^Note: built from uncommitted sources: e1$'
    tool verify nowhere
    same usage/no_folder "2 1" "$status $(wc -l <"$err")"
    tool verify
    same usage/no_argument 2 "$status"
    tool report nowhere
    error usage/report_no_folder nowhere "No such file"
}

# The rules depend on what a folder of run folders is.
test_kinds() {
    # a lab's: each run once, several things differ, no report
    make_run lab/a cpu 1 50 1 12
    make_run lab/b cpu 1 25 1 8
    make_run lab/c cpu 1 50 2 3
    make_run lab/d "emulated GPU" 1 50 1 3
    sed -i 's/"workers": 1/"workers": 2/; s/"momentum": 0.9/"momentum": 0/' lab/c/run.json
    tool verify lab
    same kinds/lab "0 lab: 4 run folders, checked as separate runs
Nothing found in lab that is missing or implausible" "$status $(grep -v ^Note "$out")"
    mkdir lab/plots
    touch lab/plots/loss.png
    tool report lab
    answer lab/report.md
    sed -i '/^# Abstract/,/^# Meth/{/^# Meth/!d}' lab/report.md # which headings it needs, the lab says
    tool report lab
    tool verify lab
    same kinds/lab_report "0 " "$status $(grep ': expected' "$out")"
    spoil_lab status a/run.json 's/"complete"/"running"/' "expected status complete"
    spoil_lab settings a/run.json '/"optimizer":/d' "in settings the entries"
    spoil_lab times a/run.json 's/"wall_s": [0-9.]*/"wall_s": 9/' "a wall time of at least"
    spoil_lab loss b/epochs.csv '2s/,2.3,/,nan,/' "a finite train_loss"
    spoil_lab steps b/steps.csv '$ d' "4 steps = ceil(100 images / batch 25)"
    spoil_lab question report.md '$ a > TODO: why?' "expected your answer"
    spoil_lab table tables.md 's/\| 12 \|/| 11 |/' "the generated line" "| 12 |" "found"
    rm -rf spoilt && mkdir spoilt && cp -a lab/d spoilt
    tool verify spoilt
    same kinds/lab_emulated "0 0" "$status $(grep -c ': expected' "$out")"
    # a study that was stopped: its names show what it is
    make_run stopped/cifar-cpu-b50-r1 cpu 1 50 1 12
    tool verify stopped
    line kinds/stopped '^stopped: 1 run folders, checked as timing study$'
    line kinds/stopped_table '^stopped/study.csv: expected the table of this study, found no such file; make study '
    line kinds/stopped_repeats '^stopped: expected 5 repeats or more of cpu, global batch 50, found 1'
    line kinds/stopped_report '^stopped/report.md: expected your report'
    make_run sweep/cifar-cpu-b50-workers2-r1 cpu 1 50 1 12
    tool study collect sweep --workers 1
    tool verify sweep
    line kinds/sweep '^sweep: 1 run folders, checked as worker sweep$'
    line kinds/sweep_repeats '^sweep: expected 5 repeats or more'
    same kinds/sweep_no_report 0 "$(grep -c 'report.md\|plots\|study.csv' "$out")"
    sed -i '2s/,12*,/,3,/' sweep/workers.csv
    tool verify sweep
    line kinds/sweep_table '^sweep/workers.csv, line 2: expected workers 1, found 3; .* make study-workers writes it again$'
    make_run scaled/cifar-replicas2-each50-r1 cpu 2 100 1 12
    tool verify scaled
    line kinds/scaled '^scaled: 1 run folders, checked as scaling study$'
    line kinds/scaled_table '^scaled/scaling.csv: expected the table of this study'
}

# Run folders below the one that is given: verify reads them, the others say where they are.
test_nested() {
    local name folder
    local -A collect=([study]=collect)
    make_run deep/lab00 cpu 1 50 1 12
    cp -a honest deep/study
    cp -a honest/c2 deep/study/c2/again
    make_run deep/more/lab02/a cpu 1 50 1 12
    sed -i 's/"complete"/"running"/' deep/more/lab02/a/run.json
    tool verify deep
    same nested/verify "deep: 1 run folders, checked as separate runs
deep/more/lab02: 1 run folders, checked as separate runs
deep/more/lab02/a/run.json: expected status complete, found running; run it again, or delete the folder
deep/study: 15 run folders, checked as timing study and scaling study
deep/study/c2: 1 run folders, checked as separate runs
Findings: 1" "$(cat "$out")"
    tool report deep/
    holds nested/report_reads "lab00 only" "$(cat deep/tables.md)" grep -q '^1 runs[.] Equal' deep/tables.md
    for folder in 1\ in\ deep/more/lab02 15\ in\ deep/study "RUNS=deep/more/lab02"; do
        holds "nested/report_names $folder" "not read: ... $folder" "$(cat "$err")" grep -q "^not read: .*$folder" "$err"
    done
    rm -r deep/lab00 deep/report.md deep/report_full.md deep/tables.md
    for name in report plot study; do
        # shellcheck disable=SC2086 # no word, or one
        "$python3" "$repo/labs/tools/$name.py" ${collect[$name]:-} deep >"$out" 2>"$err"
        status=$?
        [ $name != plot ] || ! grep -q matplotlib "$err" || continue
        one_error $name nested/$name "deep: expected complete runs directly in it" "15 in deep/study" \
            "(make: RUNS=deep/more/lab02)"
    done
}

# report.md is the student's: no byte of it changes, and report_full.md has all of it.
test_kept() {
    spoilt
    printf '%s\n' '[timing](tables.md#timing)' 'Not here: [timing](tables.md#timing)' \
        $'[settings](tables.md#settings)\r' '<!-- begin timing -->' '| cpu | 1 |' >>spoilt/report.md
    printf 'Caf\xe9 in another encoding.\r\n<!-- my own comment -->\nThe last line, without an end' >>spoilt/report.md
    cp spoilt/report.md before.md
    make_run spoilt/c1 cpu 1 50 1 11
    tool report spoilt
    same kept/status "0 " "$status $(cat "$err")"
    same kept/text "" "$(cmp before.md spoilt/report.md 2>&1)"
    same kept/lines "$(grep -av '](tables.md#\|^$' before.md | od -c)" "$(grep -avFxf spoilt/tables.md spoilt/report_full.md |
        grep -av 'Generated from\|](tables.md#\|^$' | od -c)"
    same kept/table_twice 2 "$(grep -acF '| cpu | 50 | 12.2 | 1.1 |' spoilt/report_full.md)"
    same kept/end_of_windows 2 "$(grep -ac '^15 runs[.] Equal' spoilt/report_full.md)"
    same kept/sentence 1 "$(grep -ac '^Not here: .timing.(tables.md#timing)$' spoilt/report_full.md)"
    same kept/write_protected "444 444" "$(stat -c %a spoilt/report_full.md spoilt/tables.md | xargs)"
    # A section that is deleted stays so; where a line is put, the table comes back
    sed -i '/^## Layers/,/^## Lines/{/^## Lines/!d}' spoilt/report.md
    tool report spoilt
    same deleted/stays "0 0" "$status $(grep -ac '^| conv2 ' spoilt/report_full.md)"
    line deleted/told '^Note: the runs have data for the table layers, .* write a line .layers..tables.md#layers. there'
    printf '\n[layers](tables.md#layers)\n' >>spoilt/report.md
    tool report spoilt
    same deleted/back 1 "$(grep -ac '^| conv2 | conv2d 3x3' spoilt/report_full.md)"
    rm spoilt/c1/layers.csv
    tool report spoilt
    same deleted/nothing "No run folder has what this table needs." "$(tail -n 1 spoilt/report_full.md)"
}

# One thing that differs gets rows of its own, and the workers' table is shown where study.py wrote one
test_variants() {
    local line_of
    spoilt && sed -i 's/"workers": 1/"workers": 2/; s/^\([12]\),100,\([^,]*\),[^,]*,/\1,60000,\2,10000,/' spoilt/c[45]/{run.json,epochs.csv}
    printf 'workers,img_per_s\n1,100\n2,150\n' >spoilt/workers.csv
    printf '%s\n' rung,img_per_s,accuracy,accuracy_sd O0,1234.5,75,0.126 O3,20.25,n/a,n/a >spoilt/ablation.csv
    tool report spoilt
    same variants/ablation "| O0 | 1234 | 75.00 | 0.13 |;| O3 | 20.2 | n/a | n/a |" "$(section ablation spoilt |
        grep '^| O' | paste -sd ';')"
    same variants/rows "--workers 1 3;--workers 2 2" "$(section timing spoilt |
        awk -F ' *[|] *' '$3 == "cpu" { print $2, $5 }' | paste -sd ';')"
    line_of=$(section timing spoilt | grep '^| --workers 2 | cpu')
    holds variants/large "10000 images a second" "$line_of" grep -qF '| 10000 |' <<<"$line_of"
    holds variants/workers "the rows of workers.csv" "$(section workers spoilt)" grep -qxF '| 2 | 150 |' spoilt/tables.md
    # without it, runs that differ in more have tables of their own
    spoilt
    sed -i 's/"workers": 1/"workers": 2/' spoilt/c[45]/run.json
    sed -i 's/"kernels": "fast"/"kernels": "naive"/' spoilt/c[25]/run.json
    tool report spoilt
    same variants/workers_of_each "--kernels fast: 1 2 --kernels naive: 1 2" \
        "$(section workers spoilt | awk -F ' *[|] *' '/^--kernels/ { print } $2 == "cpu" { print $3 }' | xargs)"
}

# What ./cnn never writes: a message, no traceback.
# shellcheck disable=SC2317 # holds calls it
no_traceback() { ! grep -q Traceback "$out" "$err"; }
test_edited() {
    local name
    for name in report verify; do
        spoilt
        sed -i 's/"cpu":/"processor":/' spoilt/*/run.json
        tool $name spoilt
        one_error $name edited/$name "a run folder: expected files as ./cnn writes them" cpu
    done
    for name in study report verify plot; do # with numbers that overflow
        spoilt
        sed -i "s/\"wall_s\": [0-9.]*/\"wall_s\": 1$(printf '%0400d' 0)/" spoilt/*/run.json
        sed -i "2s/,[0-9.]*,/,1$(printf '%0400d' 0),/" spoilt/*/epochs.csv
        if [ $name = study ]; then tool study collect spoilt; else tool $name spoilt; fi
        holds edited/overflow/$name "no traceback" "$(cat "$out" "$err")" no_traceback
    done
    for name in report verify plot; do # with a cell of more than the 131,072 characters that Python's csv reads
        spoilt
        printf '"%0200000d"\n' 0 | tee -a spoilt/*/steps.csv >/dev/null
        tool $name spoilt
        holds edited/long_cell/$name "no traceback" "$(tail -n 1 "$out" "$err")" no_traceback
    done
    for name in watch scaling_model; do
        tool $name "$(dirname "$(find spoilt -name steps.csv | head -n 1)")"
        holds "edited/long_cell/$name" "a message" "$(tail -n 1 "$out" "$err")" grep -q '^[a-z_]*: error: ' "$err"
        holds "edited/long_cell/$name/no_traceback" "no traceback" "$(tail -n 1 "$out" "$err")" no_traceback
    done
}

test_real() {
    "$python3" "$repo/labs/tools/study.py" run real --program "$cnn" --devices cpu --batches 50 --repeats 2 \
        --epochs 1 --limit 200 -- --dataset synthetic --layers --profile >"$out" 2>&1
    same real/study 0 "$?"
    make -s -C "$repo" report RUNS="$tmp/real" >"$out" 2>"$err" </dev/null
    same real/report 0 "$?"
    line real/report_said '^Written: .*/real/report_full.md, to hand in; 14 questions left for you to answer in report.md$'
    same real/no_plot_is_said_to_be_missing 0 "$(grep -c '^not drawn' "$out")"
    [ -z "$with_page" ] || line real/page_said '^Written: .*/real/report.html, to read in a browser'
    make -s -C "$repo" verify RUNS="$tmp/real" >"$out" 2>"$err" </dev/null
    same real/verify_status 2 "$?" # make's
    same real/questions 14 "$(grep -c 'expected your answer' "$out")"
    answer real/report.md
    tool verify real
    line real/full_stale '^real/report_full.md, line [0-9]*: expected the generated line'
    tool report real
    [ -z "$with_page" ] || same real/page "" "$(page_tool check real)"
    tool verify real
    if [ -d real/plots ]; then # what a busy machine does to times in CSV files is not tested
        same real/findings "real: expected 5 repeats or more of cpu, global batch 50, found 2" \
            "$(sed '/^Note: /d; /^Findings: /d; /, checked as /d; /[.]csv: /d; s/;.*//' "$out")"
    else
        skip real/findings "no plots, since no python3 has matplotlib"
    fi
}

# edited NAME FILE SED WORDS...: with this change to a run that ./cnn has written, and that another file contradicts
edited() {
    rm -rf spoilt && cp -a real spoilt
    sed -i -E "$3" "spoilt/$2"
    found "contradicted/$1" "$2" "${@:4}"
}

# Edits of one file of a run, or of a table
test_contradicted() {
    local run=cifar-cpu-b50-r1
    printf '%s\n' 'cpu slow --kernels naive' 'cpu fast --kernels fast' >rungs.txt
    "$python3" "$repo/labs/tools/study.py" ablation real/ladder --program "$cnn" --rungs rungs.txt --model lenet --epochs 2 \
        --limit 64 --batches 16 --repeats 1 -- --no-cuda --dataset synthetic >"$out" 2>&1
    same contradicted/ladder 0 "$?"
    "$python3" "$repo/labs/tools/study.py" hours real >"$out" 2>&1
    edited rate $run/run.json 's/"lr": ?[0-9.]+/"lr": 0.5/' "--lr 0.001, as output.txt says" "found 0.5"
    edited commit $run/run.json 's/"commit": ?"[^"]*"/"commit": "abc"/' "as output.txt says, found commit abc"
    edited cores $run/run.json 's/"cores": ?[0-9]+/"cores": 640/' "as output.txt says, found 640 usable cores"
    edited predictions $run/predictions.csv '5,9d' "the test images 0 to" "each once"
    edited hours hours.csv '2s/[0-9.]+$/77/; 2s/,[0-9]+,core/,99,core/' "it contradicts the run folders: study.py hours writes"
    edited ablation ladder/ablation.csv '2s/^([^,]*,[^,]*),[0-9.]+/\1,99999/' "line 2: expected img_per_s" "found 99999"
    rm -rf spoilt && cp -a real spoilt && rm spoilt/$run/output.txt
    found contradicted/no_output $run/output.txt "what the run printed, found no such file"
    rm -rf spoilt && cp -a real spoilt && sed -i 's/"seed": *2/"seed": 1/' spoilt/*-r2/run.json
    found contradicted/same_seed "" "expected 5 repeats or more of cpu, global batch 50, found 1"
}

page_tool() { "$python3" "$repo/tests/labs/report_page.py" "$@" 2>&1; }

# report.html: what a report with hostile text becomes, and where a package is missing, a message.
test_page() {
    local note
    mkdir missing_package
    echo 'raise ModuleNotFoundError("gone", name="markdown_it")' >missing_package/markdown_it.py
    make_run page cpu 1 50 1 12
    PYTHONPATH=$tmp/missing_package "$python3" "$repo/labs/tools/report.py" page >"$out" 2>"$err"
    same page/missing_package "0 yes no" "$? $([ -f page/report.md ] && echo yes) $([ -f page/report.html ] || echo no)"
    line page/missing_said '^Not written: page/report.html, since .* has no markdown_it; .venv/bin/pip install -r labs/'
    if [ -z "$with_page" ]; then
        skip page "no python3 with markdown-it-py; on Debian: apt-get install python3-markdown-it"
        return
    fi
    sed -i 's/^# Project Title/# A <b>title<\/b>/' page/report.md
    page_tool pictures page
    tool report page
    same page/status "0 " "$status $(cat "$err")"
    same page/check "" "$(page_tool check page)"
    holds page/language "lang and title" "$(head -n 12 page/report.html)" \
        grep -qzE '<html lang="en">.*<title>A &lt;b&gt;title&lt;/b&gt;</title>' page/report.html
    same page/pictures "4 11" "$(grep -o '<img ' page/report.html | wc -l) $(grep -c '^Note: the picture' "$out")"
    for note in "https://example.org/a.png is not .*it is a web address" "//example.org/a.png .*it is a web address" \
        ".*etc/passwd .*it is outside" "/etc/passwd .*it is outside" "plots/link.png .*it is outside" \
        "elsewhere/outside.png .*it is outside" "plots/drawing.svg .*it is not a PNG" "plots/text.png .*it is not a PNG" \
        "plots/large.png .*more than 8 MiB" "plots/gone.png .*no such file" "plots is .*no such file"; do
        line "page/absent $note" "^Note: the picture $note"
    done
    holds page/list "a list" "$(grep -A2 'without a blank' page/report.html)" grep -q '^<li>two</li>' page/report.html
    holds page/question "marked" "$(grep -B1 'a question' page/report.html)" \
        grep -qzE '<blockquote class="todo">.<p>TODO: a question' page/report.html
    same page/markers 0 "$(grep -c 'a private remark\|-- Generated' page/report.html)"
    # comments and code without an end, 4 MB: quadratic time would be hours
    same page/unclosed "4000000 4000000 6000000" "$(timeout 120 "$with_page" -c "import sys
sys.path.insert(0, '$repo/labs/tools')
from report_html import without_comments
print(*(len(without_comments(text * 1000000)) for text in ('<!--', '\`x\`y', '~~~~\n\`')))" 2>&1)"
    same page/code 2 "$(grep -c '&lt;!-- code --&gt;\|&lt;!-- a comment in code' page/report.html)"
    same page/cells '<td><code>a|b</code></td>
<td class="number">12.5</td>' "$(grep -A1 'a|b' page/report.html)"
}

# Layout on a phone, pictures, requests and pages, in a browser.
test_browser() {
    local browser=(env HOME="$tmp/browser" timeout -k 5 120 chromium --headless --no-sandbox --disable-gpu
        --disable-dev-shm-usage --hide-scrollbars --disable-background-networking)
    if [ -z "$with_page" ] || ! command -v chromium >/dev/null; then
        skip browser "no chromium, or no markdown-it-py; on Debian: apt-get install chromium python3-markdown-it"
        return
    fi
    if ! "${browser[@]}" --dump-dom 'data:text/html,<p>it works' 2>"$err" | grep -q 'it works'; then
        skip browser "chromium does not work on this machine: $(tail -n 1 "$err")"
        return
    fi
    page_tool frames page frames.html
    "${browser[@]}" --dump-dom frames.html 2>"$err" >"$out"
    local one='{"width":390,"needs":390,"pictures":[2000,2000,2000,2000],"title":"A <b>title</b>","requests":[]}'
    same browser/measured "[$one,$one,$one]" "$(sed -n '/<pre>/{s/.*<pre>//;s/<.pre>.*//;s/&lt;/</g;s/&gt;/>/g;p;q}' "$out")"
    "${browser[@]}" --print-to-pdf=page.pdf page/report.html >"$out" 2>&1
    holds browser/printed "a PDF of two pages or more" "$(tail -n 3 "$out")" \
        at_least "$(grep -ac '/Type /Page$' page.pdf)" 2
}

test_honest
test_no_peak
test_ways
test_lab
test_own_results
test_flags
test_missing
test_implausible
test_nature
test_kinds
test_nested
test_kept
test_variants
test_edited
test_page
test_browser
test_real
test_contradicted
exit 0
