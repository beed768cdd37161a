#!/usr/bin/env bash
# Tests study.py ablation, its plot and the argument files in slurm/configs: with a stand-in for ./cnn on a
# GPU, whose speeds and accuracies are known, so that the table can be worked out by hand; and with tiny real
# runs on the CPU and in the emulator. Prints `pass ablation/NAME`, `fail ...` or `skip ...`.
suite=ablation
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
if ! command -v python3 >/dev/null; then
    skip all "python3 is not installed"
    exit 0
fi
export PYTHONDONTWRITEBYTECODE=1
emulator=$repo/cnn-emu configs=$repo/slurm/configs
cd "$tmp" || exit 1

# shellcheck source=tests/labs/fork_python.sh
source "$repo/tests/labs/fork_python.sh"
if plotter=$("$repo/tests/python_with.sh" matplotlib); then
    start_python "$plotter" run_folders tempfile matplotlib.pyplot
else
    start_python python3 run_folders tempfile
fi

ablation() { fork_python "$out" "$err" "$repo/labs/tools/study.py" ablation "$@"; }
error() { one_error study "$@"; }

# cell FILE RUNG COLUMN
cell() {
    python3 -c 'import csv, sys
print(*(row[sys.argv[3]] for row in csv.DictReader(open(sys.argv[1])) if row["rung"] == sys.argv[2]))' "$@"
}
rungs_of() { cut -d , -f 1 "$1/ablation.csv" | tail -n +2 | xargs; }

# Stands in for ./cnn on a GPU and, as cnn-emu, for the emulator. It has the options of the ladder. What is
# absent, that it has no tensor cores, and that it switches the graph off, stand in the file `lacks`; what it trained, in `trained`. Each
# optimization doubles the speed; the first epoch takes ten times as long.
make_cnn() {
    cat >cnn <<'END'
#!/usr/bin/env python3
import json, os, sys
words = sys.argv[1:]
lacks = open("lacks").read().split() if os.path.exists("lacks") else []
emulated = sys.argv[0].endswith("-emu")
given = dict(zip(words, words[1:]))
def refuse(why):
    sys.exit("cnn: error: " + why)
if "gpu" in lacks and not emulated and "--gpus" in given:
    refuse("--gpus 1: found no GPU (stand-in); --replicas 1 does the same on the CPU")
given.setdefault("--dataset", "cifar10" if given["--model"] == "cifar" and "cifar10" not in lacks else "synthetic")
if "fashion-mnist" in lacks and given["--dataset"] == "fashion-mnist":
    refuse("fashion-mnist: expected train-images-idx3-ubyte (or .gz), found none in")
fast = {"--kernels": ["naive", "tiled", "tensor"], "--precision": ["fp32", "tf32", "bf16"],
        "--layout": ["nchw", "nhwc"], "--optimizer-launch": ["per-tensor", "fused"],
        "--zero-grad": ["memset", "none"], "--autotune": ["off", "on"], "--graph": ["off", "on"]}
for word in words:
    if word.startswith("--") and word in lacks:
        refuse("unknown option " + word)
if "tensor" in lacks and given.get("--kernels") == "tensor":
    refuse("--kernels tensor: expected a GPU with tensor cores that cnn uses in tf32 (sm_80 or newer), found GPU X, sm_75; "
           "use --kernels tiled --precision fp32")
if "graph" in lacks and "--graph" in given:
    given["--graph"] = "off"
level = sum(values.index(given[o]) for o, values in fast.items() if given.get(o) in values)
epochs, images, batch = int(given.get("--epochs", 1)), 1000, int(given.get("--global-batch", 2))
seed, switches = int(given.get("--seed", 1)), {"on": True, "off": False}
settings = {k[2:]: switches.get(v, v) for k, v in given.items() if k.startswith("--") and not v.startswith("--")}
settings.update(model=given["--model"], seed=seed, epochs=epochs, threads=1, workers=1)
settings = {"lr-scaling": "none", "kernels": "tiled", **settings}
if "--dry-run" not in words:
    print(" ".join(words), file=open("trained", "a"))
    if os.path.exists("deadly") and sum(1 for _ in open("trained")) == 9:
        os.kill(os.getppid(), 9)
        sys.exit(1)
device = "emulated GPU, sm_90" if emulated else "GPU X, sm_90, 132 multiprocessors"
device = "cpu" if "--no-cuda" in words else device
run = {"status": "complete", "emulated": emulated, "command": sys.argv,
       "machine": {"host": "a", "cpu": "CPU Y", "device": device, "driver": None if device == "cpu" else "CUDA 13.1"},
       "build": {"compiler": "gcc 1", "flags": "-O3", "commit": "abc"}, "settings": settings,
       "parallel": {"mode": "single", "world": 1, "batch_per_device": batch, "global_batch": batch},
       "classes": []}
json.dump(run, open(os.path.join(given["--out"], "run.json"), "w"))
with open(os.path.join(given["--out"], "epochs.csv"), "w") as f:
    print("epoch,images,seconds,img_per_s,loader_wait_s,train_loss,test_seconds,test_loss,accuracy,lr,weight_hash", file=f)
    for e in range(1, epochs + 1):
        seconds = (10 if e == 1 else 1 + .01 * seed) / 2 ** level
        print(e, images, seconds, round(images / seconds), 0, 1, 0, 1, 80 + seed, 1, 0, sep=",", file=f)
END
    chmod +x cnn
    ln -sf cnn cnn-emu
    rm -rf lacks trained
}

head_of_csv=rung,options,img_per_s,seconds,accuracy,accuracy_sd,emulated,times_first,times_previous,repeats,$(
)model,dataset,device,driver,date,commit

test_ladder() {
    make_cnn
    ablation gpu
    same ladder/status "0 " "$status $(cat "$err")"
    same ladder/columns "$head_of_csv" "$(head -n 1 gpu/ablation.csv)"
    same ladder/rungs "naive tiled tf32 bf16 nhwc extra graph" "$(rungs_of gpu)"
    same ladder/runs 21 "$(wc -l <trained)"
    same ladder/seeds "7 1 7 2 7 3" "$(grep -oP 'seed \K\d' trained | sort | uniq -c | xargs)"
    # Each rung has the options above it, each of them once
    same ladder/first "--kernels naive --precision fp32 --layout nchw --optimizer-launch per-tensor $(
        )--zero-grad memset --autotune off --graph off" "$(sed -n 1p trained | grep -o -- '--kernels.*--graph off')"
    same ladder/bf16 "--kernels tensor --precision bf16 --layout nchw --optimizer-launch per-tensor $(
        )--zero-grad memset --autotune off --graph off" "$(sed -n 4p trained | grep -o -- '--kernels.*--graph off')"
    same ladder/last "--kernels tensor --precision bf16 --layout nhwc --optimizer-launch fused --zero-grad none $(
        )--autotune on --graph on" "$(sed -n 7p trained | grep -o -- '--kernels.*--graph on')"
    same ladder/defaults 21 "$(grep -c -- '--model resnet18 --epochs 3 --global-batch 128 ' trained)"
    same ladder/data 21 "$(grep -c -- '--dataset fashion-mnist' trained)"
    same ladder/adds "--layout nhwc" "$(cell gpu/ablation.csv nhwc options)"
    # The epochs after the first take 1.01, 1.02 and 1.03 s, two of each
    near ladder/median 980.392 "$(cell gpu/ablation.csv naive img_per_s)"
    near ladder/seconds 12.04 "$(cell gpu/ablation.csv naive seconds)" # 10 + 2 * 1.02
    near ladder/accuracy 82 "$(cell gpu/ablation.csv naive accuracy)"
    near ladder/accuracy_sd 1 "$(cell gpu/ablation.csv naive accuracy_sd)"
    # tf32 has two things more than tiled: --kernels tensor and --precision tf32
    near ladder/previous 4 "$(cell gpu/ablation.csv tf32 times_previous)"
    near ladder/times_first 8 "$(cell gpu/ablation.csv tf32 times_first)"
    near ladder/graph 512 "$(cell gpu/ablation.csv graph times_first)"
    same ladder/row "0 3 resnet18 fashion-mnist CUDA 13.1 abc" \
        "$(for key in emulated repeats model dataset driver commit; do cell gpu/ablation.csv graph $key; done | xargs)"
    line ladder/what '^Ablation: resnet18, fashion-mnist, 1000 images, batch 128, epochs: 3, seeds: 3$'
    line ladder/where '^GPU X, sm_90, 132 multiprocessors, driver CUDA 13.1, \d{4}-\d\d-\d\d, commit abc$'
    line ladder/head '^rung +img/s +x first +x previous +accuracy % +sd +adds$'
    line ladder/table '^tf32 +7843.14 +8.00 +4.00 +82.00 +1.00 +--kernels tensor --precision tf32$'
    ablation gpu
    same again/status "0 " "$status $(cat "$err")"
    same again/trained 21 "$(wc -l <trained)"
    ablation gpu --epochs 4
    error again/other_epochs gpu/resnet18-single-b128-rung1-naive-r1 "--epochs"
}

# Killed in the ninth run: the first seed is complete; then the others follow.
test_resumed() {
    make_cnn
    touch deadly
    { ablation stopped --limit 100; } 2>/dev/null
    same killed/status 137 "$status"
    same killed/table "naive tiled tf32 bf16 nhwc extra graph 1" \
        "$(rungs_of stopped) $(cell stopped/ablation.csv graph repeats)"
    rm deadly trained
    ablation stopped --limit 100
    same resumed/status "0 13" "$status$(cat "$err") $(wc -l <trained)"
    same resumed/repeats 3 "$(cell stopped/ablation.csv graph repeats)"
    same resumed/limit 13 "$(grep -c -- '--limit-train 100 --limit-test 100' trained)"
}

test_lacks() {
    make_cnn
    echo fashion-mnist >lacks
    ablation made_up --repeats 1 --model resnet8 --batches 64
    same data/status "0 " "$status $(cat "$err")"
    line data/said '^Fashion-MNIST is not here, so all rungs train with generated images; data/get_data.sh '
    line data/head '^Ablation: resnet8, synthetic \(generated images\), 1000 images, batch 64,'
    same data/csv "synthetic (generated images)" "$(cell made_up/ablation.csv nhwc dataset)"
    same data/one_seed "81 " "$(cell made_up/ablation.csv nhwc accuracy) $(cell made_up/ablation.csv nhwc accuracy_sd)"
    rm trained
    ablation own_model --repeats 1 --model cifar # its data set is here, Fashion-MNIST is not
    same data/of_the_model "0 7" "$status $(grep -c -- '--dataset cifar10' trained)"
    line data/of_the_model_head '^Ablation: cifar, cifar10, 1000 images,'
    echo cifar10 >lacks
    rm trained
    ablation other_data --repeats 1 --model cifar
    same data/other "0 7" "$status $(grep -c -- '--dataset fashion-mnist' trained)"
    line data/other_said '^The data set of cifar is not here, so all rungs train with Fashion-MNIST; data/get_data.sh '
    echo fashion-mnist >lacks
    rm trained
    ablation own_data --repeats 1 -- --dataset cifar10
    same data/own "0 7" "$status $(grep -c -- '--dataset cifar10' trained)"

    echo tensor >lacks
    ablation older --repeats 1
    same older/status "0 " "$status $(cat "$err")"
    local why='--kernels tensor: expected a GPU with tensor cores that cnn uses .*, found GPU X, sm_75; use --kernels tiled --precision fp32$'
    same older/skip "tf32 bf16 nhwc extra graph" "$(grep -oP "^skip \K\w+(?=: $why)" "$out" | xargs)"
    line older/note "^Skipped: tf32, bf16, nhwc, extra, graph: $why"
    same older/rungs "naive tiled" "$(rungs_of older)"
    ablation older_emulate --emulate --repeats 1 # which replaces no rung of a real GPU
    same older/not_emulated "0 naive tiled 0 0" \
        "$status $(rungs_of older_emulate) $(cut -d , -f 7 older_emulate/ablation.csv | tail -n +2 | xargs)"
    printf 'gpu %s --precision tf32\n' one two one >rungs
    ablation none --rungs rungs --repeats 1
    error rungs/same_name "rungs, line 3" "a name that no other rung has, found one"
    printf 'gpu tf32 --kernels tensor --precision tf32\n' >rungs
    ablation none --rungs rungs --repeats 1
    error older/nothing_left "a rung that this device has"

    echo graph >lacks
    ablation no_graph --repeats 1
    same no_graph/status "0 " "$status $(cat "$err")"
    line no_graph/skip '^skip graph: ./cnn runs with --graph off instead of on$'
    line no_graph/note '^Skipped: graph: ./cnn runs with --graph off instead of on$'
    same no_graph/rungs "naive tiled tf32 bf16 nhwc extra" "$(rungs_of no_graph)"

    echo --graph >lacks
    ablation older_cnn --repeats 1
    error older_cnn/option "unknown option --graph" "dry run"

    echo gpu >lacks
    rm -f trained
    ablation without --repeats 2
    same cpu/status "0 " "$status $(cat "$err")"
    line cpu/why '^No GPU: --gpus 1: found no GPU \(stand-in\).*; EMULATE=1 .* uses virtual GPUs instead$'
    line cpu/said '^The ladder of the CPU, with a small network: --model mnist, 1000 images$'
    same cpu/rungs "naive fast" "$(rungs_of without)"
    same cpu/runs "4 4" "$(wc -l <trained) $(grep -c -- '--no-cuda --model mnist .*--limit-train 1000' trained)"
    line cpu/where '^CPU Y, \d{4}-\d\d-\d\d, commit abc$'

    rm trained
    ablation virtual --emulate
    same emulated/status "0 " "$status $(cat "$err")"
    same emulated/rungs "naive tiled tf32 bf16 nhwc extra graph" "$(rungs_of virtual)"
    same emulated/two_steps "7 7" \
        "$(wc -l <trained) $(grep -c -- '--epochs 1 --global-batch 2 --limit-train 4 ' trained)"
    line emulated/said '^Emulated: every rung runs'
    line emulated/table '^graph +n/a +n/a +n/a +n/a +n/a +--graph on$'
    same emulated/csv "graph,--graph on,,,,,1,,,1" "$(grep ^graph virtual/ablation.csv | cut -d , -f 1-10)"
    holds emulated/no_speed "no seconds, no img/s" "$(cat "$out")" test -z "$(grep -E '[0-9] (s|img)' "$out")"
}

# The ladder that counts bytes has the rungs of the other one, but for what would be counted, too, or launches the same.
test_bytes() {
    make_cnn
    ln -s cnn cnn-count
    ablation counted --rungs "$configs/bytes.txt" --repeats 1 --model lenet -- --dataset synthetic
    same bytes/program "0 6" "$status $(grep -l '"./cnn-count"' counted/*/run.json | wc -l)"
    same bytes/rungs "$(rungs_in ablation | sed -E 's/ --(autotune|graph) [a-z]+//g; /^graph$/d')" \
        "$(rungs_in bytes | sed 's/ --program [^ ]*//')"
}
rungs_in() { sed -nE 's/^gpu +//p' "$configs/$1.txt" | tr -s ' '; }

test_refused() {
    make_cnn
    ablation none --epochs 1
    error refused/epochs "--epochs: expected 2 or more"
    ablation none --rungs no_such_file
    error refused/no_file no_such_file "a file of rungs"
    printf '# a comment\ngpu one --kernels\n' >rungs
    ablation none --rungs rungs
    error refused/no_value "rungs, line 2" "gpu one --kernels"
    echo 'tpu one --kernels naive' >rungs
    ablation none --rungs rungs
    error refused/device "rungs, line 1" tpu
    echo 'cpu one --kernels naive' >rungs
    ablation none --rungs rungs
    error refused/no_rung "rungs of the device gpu"
    same refused/nothing_trained "" "$(cat trained 2>/dev/null)"
}

test_plot() {
    if [ -z "$plotter" ]; then
        skip plot "no python3 with matplotlib; on Debian: apt-get install python3-matplotlib"
        return
    fi
    fork_python "$out" "$err" "$repo/labs/tools/plot.py" made_up
    line plot/drawn '^drawn: made_up/plots/ablation.png and .svg$'
    for other in study loss; do # rungs are not one study
        line plot/not_$other "^not drawn: $other: it is for runs with the same --"
    done
    cat >marks.py <<'END'
import sys
sys.path.insert(0, sys.argv[1])
import plot
runs = plot.read_runs("made_up")
axes = plot.draw_ablation(runs).axes
print(len(axes[0].patches), axes[0].texts[1].get_text().strip(), axes[0].patches[1].get_width())
print(plot.describe(runs).replace("\n", "; "))
END
    same plot/bars "7 1980, x 2 1980.2" "$("$plotter" marks.py "$repo/labs/tools" 2>&1 | head -n 1)"
    same plot/title "resnet8; synthetic (generated images), 1000 images, epochs: 3; GPU X; commit abc" \
        "$("$plotter" marks.py "$repo/labs/tools" 2>&1 | tail -n 1)"
    fork_python "$out" "$err" "$repo/labs/tools/plot.py" virtual
    line plot/emulated '^not drawn: ablation: emulated'
    mv made_up/ablation.csv kept.csv
    fork_python "$out" "$err" "$repo/labs/tools/plot.py" made_up
    line plot/no_csv '^not drawn: ablation: no ablation.csv; make ablation writes it$'
    mv kept.csv made_up/ablation.csv
}

# The argument files: what a name promises is what changes
options_in() { sed 's/ *#.*//' "$configs/$1.args" | grep .; }
changed() { diff <(options_in "$1") <(options_in "$2") | sed -n 's/^> //p' | xargs; }

test_configs() {
    local name last=bs256
    same configs/amp "--kernels tensor --precision fp16" "$(changed bs256 bs256-amp)"
    same configs/nhwc "--layout nhwc" "$(changed bs256-amp bs256-amp-nhwc)"
    same configs/extra "--optimizer-launch fused --zero-grad none --autotune on" \
        "$(changed bs256-amp-nhwc bs256-amp-nhwc-extra-opts)"
    for name in bs256 bs256-amp bs256-amp-nhwc bs256-amp-nhwc-extra-opts; do
        same "configs/$name-prof" "--epochs 2 --limit-train 20480 --trace-steps 80:160" "$(changed $name $name-prof)"
        last=$name
    done
    same configs/bs128 "--batch-size 256 --lr 0.14" "$(changed bs128 bs256)"
    same configs/bs128-opt "--global-batch 128 --lr 0.1" "$(changed bs256-amp-nhwc-extra-opts bs128-opt)"
    same configs/bs512 "--global-batch 512 --lr 0.2" "$(changed bs128-opt bs512-opt)"
    same configs/bs1024 "--global-batch 1024 --lr 0.28" "$(changed bs512-opt bs1024-opt)"
    same configs/bs2048 "--global-batch 2048 --lr 0.4" "$(changed bs1024-opt bs2048-opt)"
    same configs/bs1024-warmup "--warmup-epochs 8" "$(changed bs1024-opt bs1024-warmup-opt)"
    same configs/bs2048-warmup "--warmup-epochs 16" "$(changed bs2048-opt bs2048-warmup-opt)"
    same configs/labels "1 AMP 3 EXTRA 1 NHWC 2 PROF" \
        "$(grep -ohP '# \K(PROF|AMP|NHWC|EXTRA)\b' "$configs/$last-prof.args" | sort | uniq -c | xargs)"
}

# The two ladders of lab 9: another build, all cores; another batch and learning rate
test_lab09() {
    local options=(--model cifar --epochs 2 --repeats 1 --batches 16)
    rm -f cnn && cp "$cnn" cnn && mkdir -p build && cp "$cnn" build/cnn-O0
    ablation core --rungs "$configs/one-core.txt" "${options[@]}" --limit 32 -- --no-cuda --dataset synthetic
    same core/rungs "0 O0 O3 fast OpenMP" "$status $(rungs_of core)"
    same core/programs "build/cnn-O0 ./cnn ./cnn ./cnn" "$(grep -ohP '"command": \["\K[^"]*' core/*/run.json | xargs)"
    same core/threads "1 1 1 $(nproc)" "$(grep -ohP '"threads": \K\d+' core/*/run.json | xargs)"
    ablation batches --rungs "$configs/large-batch.txt" "${options[@]}" --limit 256 -- --no-cuda --dataset synthetic
    same batches/rungs "0 small large scaled warm-up huge" "$status $(rungs_of batches)"
    same batches/steps "16 4 4 4 1" "$(grep -ohP '"iterations":\K\d+' batches/*/run.json | xargs)"
}

# Real runs: of the CPU's ladder; of the GPU's, and of each argument file, in the emulator
test_real() {
    ablation real --program "$cnn" --epochs 2 --repeats 1 --limit 64 --batches 32 -- --no-cuda --dataset synthetic
    same real/status "0 " "$status $(cat "$err")"
    same real/rungs "naive fast" "$(rungs_of real)"
    same real/same_accuracy "$(cell real/ablation.csv naive accuracy)" "$(cell real/ablation.csv fast accuracy)"
    # Numbers, however they are written; 0 and 1 are no switches
    printf 'cpu plain --momentum 0 --lr 1e-2\ncpu one --seed 1 --lr 0.010\n' >rungs
    ablation numbers --program "$cnn" --rungs rungs --epochs 2 --repeats 1 --limit 64 -- --no-cuda --dataset synthetic
    same numbers/rungs "0 plain one" "$status $(rungs_of numbers)"
    test_lab09
    if [ ! -x "$emulator" ]; then
        skip real_emulated "no ./cnn-emu; make emulate"
        return
    fi
    printf 'gpu naive --kernels naive --optimizer-launch per-tensor\ngpu tiled --kernels tiled\n' >rungs
    ablation real_emulated --program "$emulator" --rungs rungs --model cifar
    same real_emulated/status "0 " "$status $(cat "$err")"
    same real_emulated/rungs "naive,1 tiled,1" \
        "$(awk -F , 'NR > 1 { print $1 "," $7 }' real_emulated/ablation.csv | xargs)"
    local files=("$configs"/*.args) file small
    local tiny=(--model resnet8 --dataset synthetic --batch-size 2 --limit-train 2 --limit-test 2 --epochs 1)
    if [ -n "${QUICK:-}" ]; then
        skip real_ladder "QUICK=1; gpu_check.sh --emulated climbs it, too"
        files=("$configs/bs256-amp-nhwc-extra-opts-prof.args")
    else
        ablation real_ladder --program "$emulator" --model resnet8
        same real_ladder/status "0 " "$status $(cat "$err")"
        same real_ladder/rungs "naive tiled tf32 bf16 nhwc extra graph" "$(rungs_of real_ladder)"
    fi
    for file in "${files[@]}"; do
        small=("${tiny[@]}")
        # one epoch has no warm-up before it; trying the tiles once is enough
        [[ $file != */bs*[0-9p]-opt.args ]] || small+=(--global-batch 2 --warmup-epochs 0 --autotune off)
        "$emulator" "@$file" "${small[@]}" >"$out" 2>"$err" </dev/null
        status=$?
        same "real_configs/${file##*/}" "0 " "$status $(cat "$err")"
    done
    CUEMU_SM=75 "$emulator" "@$configs/bs256-amp-nhwc-extra-opts.args" --kernels tiled --precision fp32 "${tiny[@]}" \
        >"$out" 2>"$err" </dev/null
    status=$?
    same real_configs/no_tensor_cores "0 " "$status $(cat "$err")"
}

test_ladder
test_resumed
test_lacks
test_bytes
test_refused
test_plot
test_configs
test_real
exit 0
