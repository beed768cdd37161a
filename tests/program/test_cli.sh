#!/usr/bin/env bash
# Tests ./cnn as its users meet it: options, output, the run folder, what it learns.
# CNN=PATH: another binary. QUICK=1: without the tests that train for long.
# Prints `pass cli/NAME`, `fail cli/NAME: expected ..., found ...` or `skip cli/NAME: why`.
suite=cli
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
small=(--dataset synthetic --limit-train 640 --limit-test 200 --epochs 1)
tiny=(--dataset synthetic --limit-train 64 --limit-test 20 --epochs 1)

# ---- A good run

test_good_run() {
    local number='[0-9]+(\.[0-9]+)?'
    run "${small[@]}" --log-interval 1
    same run/status 0 "$status"
    same run/quiet_stderr "" "$(cat "$err")"
    line run/train_size '^Train set size: 640$'
    line run/test_size '^Test set size: 200$'
    line run/data '^Data: synthetic'
    # 2 x (2 x 288 x 26^2 + 3 x (18432 x 24^2 + 1179648 + 1280)); the first layer has no gradient of its input
    line run/parameters '^  1199882 parameters, 71\.6 MFLOP to train on one image$'
    line run/first_log_line '^Train Epoch: 1 \[0/640 \(0%\)\]\tLoss: 2\.[0-9]{6}$'
    line run/second_log_line '^Train Epoch: 1 \[64/640 \(10%\)\]\tLoss: [0-9]\.[0-9]{6}$'
    same run/log_lines 10 "$(grep -c '^Train Epoch: ' "$out")"
    local loss='Average loss: [0-9]+\.[0-9]{4}' accuracy='Accuracy: [0-9]+/200 \([0-9]+%\)'
    local test_lines="\\nTest set: $loss, $accuracy\\n\\n"
    holds run/test_lines "'Test set: Average loss: X, Accuracy: a/200 (b%)' between empty lines" \
        "$(grep -n -B 1 -A 1 '^Test set: A' "$out")" grep -qPz "$test_lines" "$out"
    line run/epoch_line "^epoch=1 images=640 seconds=$number img_per_s=[0-9]+ \
loader_wait_s=$number train_loss=$number train_accuracy=$number test_seconds=$number test_loss=$number \
accuracy=$number lr=1\$"
    local correct
    correct=$(grep -oP '^Test set: .*Accuracy: \K[0-9]+' "$out")
    same run/accuracy "$(awk -v c="$correct" 'BEGIN { printf "%.2f", c / 2 }')" "$(value accuracy)"
    holds run/train_accuracy "a multiple of 1/6.4 %" "$(value train_accuracy)" \
        awk -v a="$(value train_accuracy)" \
        'BEGIN { d = a * 6.4 - int(a * 6.4 + .5); exit !(a > 10 && d * d < .04 ^ 2) }'
    run "${small[@]}" --epochs 2
    line run/lr_decays '^epoch=2 .* lr=0\.7$'
    same run/default_log_interval 2 "$(grep -c '^Train Epoch: ' "$out")"
    run "${tiny[@]}" --optimizer sgd
    line run/sgd_lr '^epoch=1 .* lr=0\.01$'
}

test_dry_run() {
    run --dataset synthetic --limit-train 640 --limit-test 200 --dry-run on --log-interval 1
    same dry_run/status 0 "$status"
    same dry_run/log_lines 1 "$(grep -c '^Train Epoch: ' "$out")"
    same dry_run/epochs 1 "$(grep -c '^epoch=' "$out")"
    line dry_run/images '^epoch=1 images=64 '
    line dry_run/tests_all '^Test set: .* Accuracy: [0-9]+/200 '
}

# The number of images tested at a time changes nothing but memory.
test_test_batch() {
    local batch model few=(--dataset synthetic --limit-train 64 --limit-test 150 --epochs 1)
    for model in mnist resnet8; do
        for batch in 1 7 150 1000; do
            run --model "$model" --batch-size 32 "${few[@]}" --test-batch-size "$batch"
            echo "$(value test_loss) $(value accuracy)"
        done >"$tmp/test_batches"
        same "test_batch/$model" "1 of 4" "$(sort -u "$tmp/test_batches" | grep -c '[0-9] [0-9]') of 4"
    done
    run --dataset synthetic --limit-train 64 --limit-test 2000 --epochs 1 --test-batch-size 2000
    holds test_batch/planned "200 MB of outputs for 2000 images" "$(grep '^Memory in MB' "$out")" \
        at_least "$(grep -oP '^Memory in MB.* activations \K[0-9.]+' "$out")" 200
    same test_batch/default "1000 4 128" "$(for model in mnist cifar resnet8; do
        run --model "$model" --dataset synthetic --limit-train 8 --limit-test 1 --max-steps 1
        setting test-batch-size
    done | paste -sd ' ')"
    run --model cifar --batch-size 20 --dataset synthetic --limit-train 20 --limit-test 1 --epochs 1
    same test_batch/as_training 20 "$(setting test-batch-size)"
}

# ---- The same seed gives the same run; tests/unit/data.c has the same of augmented images

test_determinism() {
    local name first='' options
    while read -r name options; do
        # shellcheck disable=SC2086 # several words on purpose
        run "${small[@]}" --log-interval 1 --save-model --out "$tmp/run_$name" $options
        figures >"$tmp/figures_$name"
        if [ -z "$first" ]; then
            first=$name
            same same_seed/status 0 "$status"
            same same_seed/figures 15 "$(wc -l <"$tmp/figures_$name")"
            continue
        fi
        local differ=0 weights=equal figures=equal wanted=equal
        cmp -s "$tmp/run_$first/model.safetensors" "$tmp/run_$name/model.safetensors" || differ=$?
        [ "$differ" -eq 0 ] || weights=different
        [ "$differ" -lt 2 ] || weights=missing
        cmp -s "$tmp/figures_$first" "$tmp/figures_$name" || figures=different
        [[ $name != other_* ]] || wanted=different
        same "same_seed/$name/log" "$wanted" "$figures"
        same "same_seed/$name/weights" "$wanted" "$weights"
    done <<END
first --workers 1 --threads 1
again --workers 1 --threads 1
workers_4 --workers 4 --threads 1
threads_2 --workers 1 --threads 2
both --workers 4 --threads 2
other_seed --workers 1 --threads 1 --seed 2
other_images --workers 1 --threads 1 --augment crop-flip
other_shapes --workers 1 --threads 1 --augment elastic
END
}

# ---- Options

# usage NAME WORD OPTIONS...
usage() { refused "options/$1" 2 "${@:2}"; }

test_options() {
    usage unknown "unknown option --batchsize; ./cnn --help lists all options" "${tiny[@]}" --batchsize 4
    usage unknown_value "unknown option --batchsize=4; " "${tiny[@]}" --batchsize=4
    usage not_an_option 'unknown option help; ' "${tiny[@]}" help
    usage zero --batch-size "${tiny[@]}" --batch-size 0
    usage fraction --batch-size "${tiny[@]}" --batch-size 1.5
    usage negative --epochs "${tiny[@]}" --epochs -1
    usage empty --epochs "${tiny[@]}" --epochs=
    usage too_large --seed "${tiny[@]}" --seed 99999999999999999999
    usage word --lr "${tiny[@]}" --lr abc
    usage trailing --lr "${tiny[@]}" --lr 0.5x
    usage nan --lr "${tiny[@]}" --lr nan
    usage inf --lr "${tiny[@]}" --lr inf
    usage choice --optimizer "${tiny[@]}" --optimizer adam
    usage part_of_choice --optimizer "${tiny[@]}" --optimizer ada
    usage two_choices --optimizer "${tiny[@]}" --optimizer 'adadelta|sgd'
    usage no_value --epochs "${tiny[@]}" --epochs
    usage empty_text "--load: expected a value (FILE) after it, found nothing" "${tiny[@]}" --load ""
    usage option_as_value "--out: expected a value (DIR) after it, found --profile" "${tiny[@]}" --out --profile
    usage gpu_and_replicas "--gpus: expected no --replicas" "${tiny[@]}" --gpus 1 --replicas 2
    usage equals_switch --profile "${tiny[@]}" --profile=maybe

    run "${tiny[@]}" --batch-size=32 --log-interval=1 --profile=off --dry-run off
    same options/equals_status 0 "$status"
    same options/equals_used 2 "$(grep -c '^Train Epoch: ' "$out")"
    same options/profile_off 0 "$(grep -c '^Line #' "$out")"

    run "${tiny[@]}" --no-accel --dry-run
    line options/no_accel '^Settings: .* --no-cuda on'
    run "${tiny[@]}" --no-accel=off --dry-run
    line options/no_accel_off '^Settings: .* --no-cuda off'
    usage resize "expected a multiple of the 28 x 28 pixels of the images of synthetic, such as 224, found 100" \
        "${tiny[@]}" --resize 100
    usage resize_too_small "--resize: expected a multiple of the 28 x 28 pixels" "${tiny[@]}" --resize 14
    usage resize_too_large "--resize: expected a whole number from 0 to 1024, found \"1120\"" \
        "${tiny[@]}" --resize 1120

    run --help
    same options/help_status 0 "$status"
    same options/help_stderr "" "$(cat "$err")"
    local name missing='' names
    names=$(grep -oP '^ *\{"\K--[a-z-]+(?=")' "$repo/cnn.c")
    for name in $names; do
        grep -q -- "^  $name " "$out" || missing+=" $name"
    done
    holds options/table "15 options or more in cnn.c" "$names" test "$(wc -w <<<"$names")" -ge 15
    same options/help_names_all "" "$missing"
    line options/help_default '^  --epochs .*default: 14\)'
    line options/help_file '^  @FILE '
    line options/help_model '^  --model cifar .*--momentum 0.9'
    same options/help_empty_lines "" "$(sed -n '/^options:/,/^  --help/p' "$out" | grep -n '^$')"
}

# ---- Options of SGD and of its schedules that exclude each other

test_usage() {
    local sgd=("${tiny[@]}" --optimizer sgd)
    usage nesterov_without_momentum --nesterov "${sgd[@]}" --nesterov
    usage nesterov_with_adadelta --nesterov "${tiny[@]}" --nesterov
    usage momentum_with_adadelta --momentum "${tiny[@]}" --momentum 0.9
    usage momentum_1 --momentum "${sgd[@]}" --momentum 1
    usage label_smoothing_1 --label-smoothing "${tiny[@]}" --label-smoothing 1
    usage warm_up_too_long --warmup-epochs "${tiny[@]}" --epochs 2 --warmup-epochs 2
    usage resume_without_checkpoint --checkpoint "${tiny[@]}" --resume
    local every
    for every in 0 0steps 1.5 10step steps -1 '' 10stepss; do
        usage "save_every_$every" --save-every "${tiny[@]}" --checkpoint "$tmp/none" \
            --save-every "$every"
    done
    same options/usage_wrote_nothing "" "$(find "$tmp" -name 'none*')"
}

# ---- Defaults of the models, as the line "Settings:" tells them

# defaults MODEL PARAMETERS WORDS...: the run of --model MODEL says these words of its settings
defaults() {
    local model=$1 parameters=$2 missing='' settings i
    shift 2
    run --model "$model" --dataset synthetic --limit-train 1 --limit-test 1 --eval
    settings="$(grep '^Settings:' "$out") "
    for ((i = 1; i < $#; i += 2)); do
        [[ $settings == *" --${!i} ${*:i+1:1} "* ]] || missing+=" --${!i} ${*:i+1:1}"
    done
    same "defaults/$model" "exit 0, " "exit $status, $missing"
    line "defaults/$model/parameters" "\\b$parameters parameters"
}

test_defaults() {
    defaults mnist 1199882 optimizer adadelta lr 1 momentum 0 nesterov off weight-decay 0 \
        batch-size 64 test-batch-size 1000 epochs 14 schedule step gamma 0.7 step-size 1 \
        log-interval 10 seed 1 augment none label-smoothing 0 warmup-epochs 0 max-steps 0 \
        lr-scaling none save-every 1
    defaults cifar 62006 optimizer sgd lr 0.001 momentum 0.9 nesterov off weight-decay 0 \
        batch-size 4 epochs 2 schedule step gamma 1 width 6 log-interval 10 seed 1
    local model models=resnet8:78042
    # with 100 classes and the 3 x 3 stem, as torchvision counts them
    [ -n "${QUICK:-}" ] || models+=" resnet18:11220132 resnet34:21328292 resnet50:23705252 \
resnet101:42697380 resnet152:58341028"
    for model in $models; do
        defaults "${model%:*}" "${model#*:}" optimizer sgd lr 0.1 momentum 0.9 nesterov off \
            weight-decay 0.0005 batch-size 128 epochs 100 schedule cosine log-interval 20 stem 3
    done
    [ -z "${QUICK:-}" ] || skip defaults/resnet18_to_152 "QUICK=1"
    run --model resnet8 --dataset synthetic --limit-train 1 --limit-test 1 --eval --stem 7
    line defaults/stem_7 '\b79962 parameters'
    line defaults/stem_7_layer '  conv1 +conv2d 7x7 stride 1 padding 3 +32 x 32 x 16 '
    run --model resnet8 --dataset synthetic --limit-train 1 --limit-test 1 --eval --stem imagenet
    line defaults/stem_imagenet '\b79962 parameters'
    line defaults/stem_imagenet_layer '  conv1 +conv2d 7x7 stride 2 padding 3 +16 x 16 x 16 '
    run --model cifar --dataset synthetic --limit-train 1 --limit-test 1 --eval --width 64
    line defaults/width_64 '\b89614 parameters'
}

# ---- Argument files

# in_file NAME SETTING EXPECTED ARGUMENTS...
in_file() {
    local name=$1 setting=$2 expected=$3
    shift 3
    run --dataset synthetic --limit-test 1 --eval "$@"
    same "argument_file/$name" "$expected" "$(setting "$setting")"
}

test_argument_files() {
    local file=$tmp/a.args other=$tmp/b.args
    printf '%s\n' '# a comment' '--epochs 2 # --epochs 7' '' '  --batch-size=32' '--limit-train' \
        '  64' $'--nesterov\t--optimizer sgd\r' '--momentum 0.5' '#--lr 3' --profile >"$file"
    printf '%s' '--epochs 4 --model cifar' >"$other"
    in_file words epochs 2 "@$file"
    local part
    for part in batch-size:32 limit-train:64 nesterov:on optimizer:sgd momentum:0.5 lr:0.01 \
        profile:on; do
        same "argument_file/words/${part%:*}" "${part#*:}" "$(setting "${part%:*}")"
    done
    in_file option_before epochs 2 --epochs 5 "@$file"
    in_file option_after epochs 3 "@$file" --epochs 3
    in_file two_files epochs 4 "@$file" "@$other"
    in_file two_files_turned epochs 2 "@$other" "@$file"
    in_file two_files/other_settings batch-size 32 "@$file" "@$other"
    in_file model batch-size 4 --limit-train 1 "@$other"
    in_file option_before_model lr 0.5 --limit-train 1 --lr 0.5 "@$other"
    : >"$tmp/empty.args"
    in_file empty epochs 14 --limit-train 1 "@$tmp/empty.args"
    echo "--data $tmp/no#comment # --epochs 7" >"$tmp/mark.args"
    in_file mark_in_a_word data "$tmp/no#comment" "@$tmp/mark.args"

    refused argument_file/missing 2 "$tmp/nowhere.args" "@$tmp/nowhere.args"
    refused argument_file/no_name 2 '@' "@"
    refused argument_file/folder 2 "@$tmp: expected a regular file" "@$tmp"
    # as a pipe, which can be read only once
    refused argument_file/device 2 "@/dev/null: expected a regular file" "${tiny[@]}" @/dev/null
    echo '--epochs 1 --batchsize 3' >"$file"
    refused argument_file/unknown_option 2 '--batchsize' "@$file"
    echo '--dataset synthetic --epochs' >"$file"
    refused argument_file/no_value 2 '--epochs' "@$file" 1
    echo "@$other" >"$file"
    refused argument_file/in_a_file 2 "@$other" "@$file"
    printf -- '--epochs 1\0 --epochs 2' >"$file"
    refused argument_file/zero_byte 2 "@$file" "@$file"
    yes '# a comment' 2>/dev/null | head -c 65512 >"$file" # 65536 with the model's
    in_file longest epochs 14 --limit-train 1 "@$file"
    yes x 2>/dev/null | head -c 65500 >"$file" # as many words as fit; sanitizers see them all in the list
    refused argument_file/most_words 2 'option x' "@$file"
    yes '# a comment' 2>/dev/null | head -c 70000 >"$file"
    refused argument_file/too_long 2 "@$file" "@$file"
}

# ---- The learning rate

# scaled NAME EXPECTED OPTIONS...: lr after --lr-scaling
scaled() {
    run --dataset synthetic --limit-train 1 --limit-test 1 --eval "${@:3}"
    same "lr_scaling/$1" "$2" "$(setting lr)"
}

# rates NAME EXPECTED OPTIONS...: lr in the lines of the epochs, of a step each
rates() {
    run --model cifar --dataset synthetic --limit-train 4 --limit-test 1 --lr 0.01 "${@:3}"
    same "schedule/$1" "$2" "$(grep -oP '^epoch=.* lr=\K.*' "$out" | paste -sd ' ')"
}

test_learning_rate() {
    scaled none 0.01 --optimizer sgd --batch-size 128
    scaled mnist_linear 0.02 --optimizer sgd --batch-size 128 --lr-scaling linear
    scaled mnist_adadelta 2 --batch-size 128 --lr-scaling linear
    scaled mnist_sqrt 2 --batch-size 256 --lr-scaling sqrt
    scaled cifar_linear 0.0625 --model cifar --batch-size 250 --lr-scaling linear
    scaled resnet_sqrt 0.05 --model resnet8 --batch-size 32 --lr-scaling sqrt
    scaled own_lr 0.25 --model resnet8 --batch-size 64 --lr 0.5 --lr-scaling linear

    rates step "0.01 0.01 0.005 0.005 0.0025" --epochs 5 --gamma 0.5 --step-size 2
    rates step_gamma_1 "0.01 0.01 0.01" --epochs 3
    rates cosine "0.01 0.00853553 0.005 0.00146447" --epochs 4 --schedule cosine
    rates warm_up_step "0.005 0.01 0.01 0.005" --epochs 4 --warmup-epochs 2 --gamma 0.5
    rates warm_up_cosine "0.01 0.01 0.005" --epochs 3 --warmup-epochs 1 --schedule cosine
    # within an epoch of four steps the warm-up grows; the first rate that is used is not 0
    run --model cifar --dataset synthetic --limit-train 14 --limit-test 1 --lr 0.01 --epochs 3 \
        --warmup-epochs 2 --out "$tmp/warm_up"
    same schedule/warm_up_steps \
        "0.00125 0.0025 0.00375 0.005 0.00625 0.0075 0.00875 0.01 0.01 0.01 0.01 0.01" \
        "$(cut -d , -f 6 "$tmp/warm_up/steps.csv" | tail -n +2 | paste -sd ' ')"
}

# ---- What a ResNet logs: the lines of the SC20 tutorial

test_sc20() {
    local number='[0-9]+\.[0-9]+'
    run --model resnet8 --dataset synthetic --limit-train 82 --batch-size 2 --limit-test 2 \
        --epochs 2
    same sc20/status 0 "$status"
    same sc20/start "INFO - Starting Training Loop...|INFO - Epoch: 1, Iteration: 0" \
        "$(grep -oE '^INFO - (Starting Training Loop\.\.\.|Epoch: 1, Iteration: 0)' "$out" | paste -sd '|')"
    same sc20/iterations "1 0 1 20 1 40 2 0 2 20 2 40" "$(grep -oP \
        "^INFO - Epoch: \\K[0-9]+, Iteration: [0-9]+(?=, Avg img/sec: $number\$)" "$out" |
        sed 's/, Iteration://' | paste -sd ' ')"
    same sc20/epochs "1 2" "$(grep -oP \
        "^INFO - Time taken for epoch \\K[0-9]+(?= is $number sec\$)" "$out" | paste -sd ' ')"
    same sc20/order "Iteration: 40,|Time taken|epoch=1" "$(grep -B 2 '^epoch=1 ' "$out" |
        grep -oE 'Iteration: 40,|Time taken|epoch=1' | paste -sd '|')"
    same sc20/no_other_lines "" "$(grep -E '^(Train Epoch|Test set: )' "$out")"
    run --model resnet8 --dataset synthetic --limit-train 6 --batch-size 2 --limit-test 2 \
        --epochs 1 --log-interval 1
    same sc20/log_interval 3 "$(grep -c '^INFO - Epoch: 1, Iteration: ' "$out")"
}

# ---- The run folder

test_out() {
    local dir=$tmp/run
    run "${small[@]}" --log-interval 3 --save-model on --profile --out "$dir"
    same out/status 0 "$status"
    same out/steps_header "epoch,step,rank,images,loss,lr,seconds,load_s,copy_s,forward_s,\
backward_s,optimizer_s,comm_s,exposed_comm_s,other_s,bytes_sent,warmup" \
        "$(head -n 1 "$dir/steps.csv")"
    same out/steps_rows 10 "$(tail -n +2 "$dir/steps.csv" | grep -c '^1,')"
    same out/epochs_csv "$(grep '^epoch=' "$out" | sed 's/=[^ ]*//g; s/ /,/g'),weight_hash
$(grep '^epoch=' "$out" | sed 's/[a-z_]*=//g; s/ /,/g'),HASH" "$(sed -E 's/,[0-9a-f]{16}$/,HASH/' "$dir/epochs.csv")"
    same out/profile_header 'line,hits,time_us,per_hit_us,percent,source' \
        "$(head -n 1 "$dir/profile.csv")"
    line out/profile_table \
        '^Line #      Hits         Time  Per Hit   % Time  Line Contents$'
    line out/profile_forward '^ +[0-9]+ +10 .* AT\(FORWARD, forward\(net, '
    # shellcheck disable=SC2016 # awk's own $
    holds out/profile_txt "the table of stdout" "$(head -n 5 "$dir/profile.txt")" \
        awk 'NR == FNR { want[$0]; next } !($0 in want) { exit 1 }' "$out" "$dir/profile.txt"
    line out/profile_waits '^Times include waiting until the device is done with the line$'
    # The lines' times, 13 to 28 characters into the table, add up to the total.
    local sum total
    sum=$(awk '/^=====/ { on = 1; next } /^$/ { on = 0 } on { s += substr($0, 18, 12) }
        END { print s / 1e6 }' "$out")
    total=$(sed -n 's/^Total time: \([0-9.e+-]*\) s$/\1/p' "$out")
    holds out/profile_sum "$total within 1 %" "$sum" \
        awk -v s="$sum" -v t="$total" 'BEGIN { d = s - t; exit !(t > 0 && d * d < 1e-4 * t * t) }'
    grep -oP '^ *\{"--\K[a-z-]+(?=")' "$repo/cnn.c" >"$tmp/options"

    python out/run_json "$dir/run.json" "$tmp/options" <<'END'
import json, sys
run = json.load(open(sys.argv[1]))
for key, value in {"status": "complete", "provenance": "measured", "emulated": False}.items():
    if run.get(key) != value:
        print(key, run.get(key))
missing = set(open(sys.argv[2]).read().split()) ^ set(run["settings"])
if missing:
    print("settings differ from the options:", *sorted(missing))
if run["settings"]["batch-size"] != 64 or run["settings"]["dataset"] != "synthetic":
    print("settings:", run["settings"])
if run["classes"] != [str(k) for k in range(10)]:
    print("classes", run["classes"])
if run["resources"]["wall_s"] <= 0 or not run["machine"]["cpu"]:
    print("machine or resources", run["machine"], run["resources"])
END
    python out/steps_csv "$dir/steps.csv" "$out" <<'END'
import csv, re, sys
rows = list(csv.DictReader(open(sys.argv[1])))
log = re.findall(r"^Train Epoch: 1 \[(\d+)/.*Loss: (.*)$", open(sys.argv[2]).read(), re.M)
if [int(n) for n, _ in log] != [0, 192, 384, 576]:
    print("log lines at", log)
for images, loss in log:
    row = rows[int(images) // 64]
    if abs(float(row["loss"]) - float(loss)) > 6e-7:
        print("step", row["step"], "loss", row["loss"], "log", loss)
for i, row in enumerate(rows):
    if (row["epoch"], row["step"], row["rank"], row["images"]) != ("1", str(i + 1), "0", "64"):
        print("row", row)
END
    python out/safetensors "$dir/model.safetensors" <<'END'
import json, struct, sys
data = open(sys.argv[1], "rb").read()
length, = struct.unpack("<Q", data[:8])
header = json.loads(data[8:8 + length])
expected = {
    "conv1.weight": [32, 1, 3, 3], "conv1.bias": [32],
    "conv2.weight": [64, 32, 3, 3], "conv2.bias": [64],
    "fc1.weight": [128, 9216], "fc1.bias": [128], "fc2.weight": [10, 128], "fc2.bias": [10],
}
found = {k: v["shape"] for k, v in header.items() if k != "__metadata__"}
if found != expected:
    print("tensors", found)
at = 0
for name, shape in sorted(expected.items()):
    count = 1
    for n in shape:
        count *= n
    begin, end = header[name]["data_offsets"]
    if begin != at or end - begin != 4 * count or header[name]["dtype"] != "F32":
        print(name, header[name], "expected to begin at", at)
    at = end
if len(data) != 8 + length + at or length % 8:
    print("file of", len(data), "bytes, header", length, "tensors", at)
weights = struct.unpack("<%df" % (at // 4), data[8 + length:])
if not all(abs(w) < 10 for w in weights) or len(set(weights)) < 1000000:
    print("weights are not finite and varied")
END

    run --model lenet --dataset synthetic --limit-train 256 --limit-test 1 --epochs 1 --batch-size 16 \
        --augment elastic --workers 1 --out "$tmp/waits"
    same out/loader_wait "" "$(awk -F , 'NR == FNR { sum += $8; next } FNR == 2 && ($5 - sum) ^ 2 > 1e-6 {
        print "loader_wait_s", $5, "; sum of load_s", sum }' "$tmp/waits/steps.csv" "$tmp/waits/epochs.csv")"
    run "${tiny[@]}" --out "$tmp/without"
    same out/no_model_unasked "" "$(find "$tmp/without" "$tmp/cwd" -name '*.safetensors')"
    run "${tiny[@]}" --eval --profile --out "$tmp/evaluated"
    line out/profile_of_no_step '^No training step to profile$'
    same out/no_profile_unasked "" "$(find "$tmp/without" -name 'profile*')"
    same out/files "epochs.csv predictions.csv run.json steps.csv" \
        "$(find "$tmp/without" -type f -printf '%f\n' | sort | paste -sd ' ')"
    run "${tiny[@]}" --save-model
    same out/model_here ./mnist_cnn.safetensors "$(find . -name '*.safetensors')"
    rm -f ./*.safetensors

    run "${tiny[@]}" --lr 1e6 --optimizer sgd --epochs 3 --log-interval 1 --out "$tmp/diverged"
    same out/diverged_status 1 "$status"
    same out/diverged_lines 1 "$(wc -l <"$err")"
    local failed='"status": "failed"'
    holds out/diverged_json "$failed" "$(head -n 2 "$tmp/diverged/run.json")" \
        grep -qF "$failed" "$tmp/diverged/run.json"
}

# profile_is_good FOLDER: of 3 epochs of 11 steps. What is wrong with its profile.csv and steps.csv
profile_is_good() {
    python3 - "$1" cnn.c 2>&1 <<'END'
import csv, sys
def read(name):
    return list(csv.DictReader(open(sys.argv[1] + "/" + name)))
lines, steps, source = read("profile.csv"), read("steps.csv"), open(sys.argv[2]).read().split("\n")
for line in lines:
    if line["source"] != source[int(line["line"]) - 1].strip():
        print("not in cnn.c:", line)
first, = [int(line["line"]) for line in lines if "start_epoch" in line["source"]]
last, = [int(line["line"]) for line in lines if "finish_epoch" in line["source"]]
for number in range(first + 1, last):
    text = source[number - 1].strip()
    hits = "".join(line["hits"] for line in lines if line["line"] == str(number))
    graph = "uses_graph" in text or "replay_step" in text  # --graph on
    if hits != "33" and text not in ("while (!over) {", "}", "} else {") and not graph:
        print("expected 33 hits of", text, "found", hits)
if len(steps) != 33:
    print("expected 33 steps, found", len(steps))
parts = ["load_s", "copy_s", "forward_s", "backward_s", "optimizer_s", "exposed_comm_s", "other_s"]
for step in steps: # a microsecond is the last digit of each
    if abs(sum(float(step[part]) for part in parts) - float(step["seconds"])) > 5e-6:
        print("parts do not add up:", step)
seconds = sum(float(epoch["seconds"]) for epoch in read("epochs.csv"))
for name, found in (("lines", sum(float(line["time_us"]) for line in lines) / 1e6),
                    ("steps", sum(float(step["seconds"]) for step in steps))):
    if not .95 * seconds <= found <= seconds + .002: # each epoch's is rounded to a millisecond
        print(name, "take", found, "of", seconds, "s")
END
}

# 11 steps in an epoch, of which the last has 10 images. Another program may take the core between the
# two clocks that are compared, but not three times.
test_profile() {
    local said
    if ! command -v python3 >/dev/null; then
        skip profile "python3 is not installed"
        return
    fi
    for _ in 1 2 3; do
        run --dataset synthetic --limit-train 650 --limit-test 10 --batch-size 64 --epochs 3 --profile \
            --out "$tmp/profile"
        said=$(profile_is_good "$tmp/profile")
        [ -n "$said" ] || break
    done
    same profile/is_good "" "$said"
}

test_write_errors() {
    local dir name
    : >"$tmp/file"
    while read -r name dir; do
        run "${tiny[@]}" --out "$dir"
        same "write/$name" "exit 1, 1 line, 1 with the name" "exit $status, $(wc -l <"$err") line, \
$(grep -cF -- "$dir" "$err") with the name"
    done <<END
no_parent $tmp/no/such/parent
a_file $tmp/file
not_creatable /proc/cnn_run
END
    if [ -w /dev/full ]; then
        local what
        for what in train help; do
            local options=("${tiny[@]}" --out "$tmp/full_$what")
            [ $what = train ] || options=(--help)
            "$cnn" "${options[@]}" >/dev/full 2>"$err"
            status=$?
            holds "write/full_stdout_$what" "an exit status other than 0, and a reason" \
                "$status $(cat "$err")" test "$status" -ne 0 -a -s "$err"
        done
        same write/full_stdout_not_complete 0 "$(grep -cs '"complete"' "$tmp/full_train/run.json")"
    else
        skip write/full_stdout "no /dev/full"
    fi
}

# ---- Learning

# Seeds 1, 2 and 3 reached 25.6, 27.0 and 31.5; guessing gives 10.
test_learns() {
    if [ -n "${QUICK:-}" ]; then
        skip learns/synthetic "QUICK=1"
        skip learns/fashion_mnist "QUICK=1"
        return
    fi
    run --dataset synthetic --limit-train 6000 --limit-test 1000 --epochs 1
    holds learns/synthetic "accuracy >= 20" "$(value accuracy)" at_least "$(value accuracy)" 20
    if ! compgen -G "/usr/share/datasets/fashion-mnist/$train_images*" >/dev/null; then
        skip learns/fashion_mnist "not installed; run: data/get_data.sh fashion-mnist"
        return
    fi
    run --dataset fashion-mnist --epochs 1 --seed 1
    holds learns/fashion_mnist "accuracy >= 88" "$(value accuracy)" \
        at_least "$(value accuracy)" 88
}

# ---- What the run took, and how much it says

# what_differs FOLDER: between /usr/bin/time, run.json and the block RESOURCES of the last run
what_differs() {
    python3 - "$tmp/time" "$1/run.json" "$out" 2>&1 <<'END'
import json, re, sys
wall, user, system, kb = map(float, open(sys.argv[1]).read().split())
took = json.load(open(sys.argv[2]))["resources"]
block = open(sys.argv[3]).read().split("RESOURCES")[1]
def seconds(line):
    hours, minutes, rest = re.search(line + r": (\d+):(\d+):(\d+)\n", block).groups()
    return 3600 * int(hours) + 60 * int(minutes) + int(rest)
gb = float(re.search(r"Memory Utilized: ([\d.]+) GB", block)[1])
for name, ours, theirs, least in (("wall", took["wall_s"], wall, .05),
                                  ("cpu", took["cpu_s"], user + system, .05),
                                  ("memory", took["max_rss_bytes"], 1024 * kb, 0),
                                  ("Job Wall-clock time", seconds("Job Wall-clock time"), wall, .55),
                                  ("CPU Utilized", seconds("CPU Utilized"), user + system, .55),
                                  ("Memory Utilized", gb * 2 ** 30, 1024 * kb, .005 * 2 ** 30)):
    if abs(ours - theirs) > .05 * theirs + least:
        print(name, ours, "expected", theirs)
END
}

test_resources() {
    local time='[0-9]{2,}:[0-9]{2}:[0-9]{2}' number='[0-9]+\.[0-9]{2}'
    run "${tiny[@]}"
    holds resources/lines "seff's lines at the end" "$(tail -n 8 "$out")" \
        grep -qPz "\nRESOURCES\nState: COMPLETED \(exit code 0\)\nCores: [0-9]+\nCPU Utilized: $time\n\
CPU Efficiency: $number% of $time core-walltime\nJob Wall-clock time: $time\n\
Memory Utilized: $number GB\nMemory Efficiency: $number% of $number GB\n\$" "$out"
    SLURM_CPUS_PER_TASK=3 SLURM_MEM_PER_NODE=512 run "${tiny[@]}"
    line resources/slurm_cores '^Cores: 3$'
    line resources/slurm_memory '^Memory Efficiency: .* of 0\.50 GB$'
    if [ ! -x /usr/bin/time ] || ! command -v python3 >/dev/null; then
        skip resources/time "/usr/bin/time or python3 is not installed"
        return
    fi
    case $cnn in *debug)
        skip resources/time "a sanitizer takes more memory at the very end"
        return
        ;;
    esac
    local said=
    for _ in 1 2 3; do # another program may take the core while the run begins or ends
        /usr/bin/time -f '%e %U %S %M' -o "$tmp/time" "$cnn" "${small[@]}" --out "$tmp/took" >"$out"
        said=$(what_differs "$tmp/took")
        [ -n "$said" ] || break
    done
    same resources/time "" "$said"
}

test_layers() {
    run --model cifar --dataset synthetic --limit-train 40 --limit-test 10 --batch-size 20 --epochs 1 \
        --layers --save-model --out "$tmp/layers"
    line layers/title '^Layers, 20 images; this device: [0-9.]+ GFLOP/s, [0-9.]+ GB/s measured$'
    line layers/conv2 '^  conv2 +conv2d 5x5 stride 1 padding 0 .*(compute|memory)$'
    same layers/header "layer,kind,out_shape,params,mflop,forward_ms,backward_ms,gflops,gb_per_s,\
percent_of_peak,saved,bound" "$(head -n 1 "$tmp/layers/layers.csv")"
    python layers/csv "$tmp/layers/layers.csv" <<'END'
import csv, sys
rows = {r["layer"]: r for r in csv.DictReader(open(sys.argv[1]))}
if sum(int(r["params"]) for r in rows.values()) != 62006:
    print("parameters", [r["params"] for r in rows.values()])
want = {"conv1": ("28x28x6", .7056, 2), "conv2": ("10x10x16", .48, 3), "fc1": ("1x1x120", .096, 3)}
for name, (shape, mflop, passes) in want.items():
    r = rows[name]
    seconds = 1e-3 * (float(r["forward_ms"]) + float(r["backward_ms"]))
    gflops = passes * 20 * mflop / 1e3 / seconds
    if (r["out_shape"], r["mflop"]) != (shape, "%.3f" % mflop):
        print(name, r["out_shape"], r["mflop"])
    if abs(gflops - float(r["gflops"]) * float(r["saved"])) > .02 * gflops + .1 or r["bound"] not in ("compute", "memory"):
        print(name, "expected", gflops, "found", r["gflops"])
if all(float(r["percent_of_peak"]) == 0 for r in rows.values()):
    print("per cent", [r["percent_of_peak"] for r in rows.values()])
# At most a quarter of the gradients before a max-pool is not 0.
saved = {name: float(r["saved"]) for name, r in rows.items()}
if not (saved["conv1"] >= 1.6 and saved["conv2"] >= 2 and saved["fc1"] == 1):
    print("expected at least 2 / (1 + 1 / 4), 3 / (1 + 2 / 4) and 1, found", saved)
END
    python layers/columns_agree "$repo/labs/tools" "$tmp/layers" <<'END'
import sys
sys.path.append(sys.argv[1])
import run_folders, verify
print(*verify.check_layer_times(run_folders.read_run(sys.argv[2])), sep="\n", end="")
END
    local tiny_layers=(--dataset synthetic --limit-train 8 --limit-test 1 --batch-size 8 --epochs 1 --layers)
    run --model resnet8 "${tiny_layers[@]}" --out "$tmp/saved"
    # 3 x 3 with padding: rows of taps outside for 6 pixels are skipped; by Winograd: 36 products of 16 x 9; 1 x 1,
    # stride 2: a few of the data gradient are computed for nothing
    same layers/saved "1.020 4.000 0.994" "$(awk -F , '$1 ~ /^(conv1|layer1.0.conv1|layer2.0.downsample.0)$/ {
        print $11 }' "$tmp/saved/layers.csv" | paste -sd ' ')"
    run --model cifar --kernels naive "${tiny_layers[@]}" --out "$tmp/none_saved"
    same layers/naive_saves_nothing 1.000 "$(awk -F , 'NR > 1 { print $11 }' "$tmp/none_saved/layers.csv" | sort -u)"
    run --model cifar --dataset synthetic --limit-train 40 --limit-test 10 --batch-size 20 --epochs 1 \
        --save-model --out "$tmp/no_layers"
    holds layers/changes_nothing "equal weights" "others" \
        cmp -s "$tmp/layers/model.safetensors" "$tmp/no_layers/model.safetensors"
}

test_trace() {
    run "${small[@]}" --batch-size 32 --trace "$tmp/trace.json" --trace-steps 0:6
    line trace/wrote "^Wrote [0-9]+ events to $tmp/trace.json\$"
    trace_is_good trace/one "$tmp/trace.json" "0:steps:step 0,0:train(),0:device:conv2 forward,0:loader worker 0"
    same trace/steps 6 "$(grep -c '"name":"step [0-5]"' "$tmp/trace.json")"
    same trace/rows "6 6" "$(grep -c '"conv2 forward"' "$tmp/trace.json") $(grep -c \
        '"fc1 backward"' "$tmp/trace.json")"
    holds trace/lines "lines of train()" "none" grep -q '"name":"backward(net, batch->n)"' \
        "$tmp/trace.json"
    run "${small[@]}" --batch-size 32 --replicas 2 --oversubscribe --epochs 2 \
        --trace "$tmp/trace.json" --trace-steps 8:12
    trace_is_good trace/ddp "$tmp/trace.json" "0:communication:all-reduce,1:communication:all-reduce,\
1:device:fc1 backward,1:steps:step 11"
    same trace/over_epochs 8 "$(grep -cE '"name":"step (8|9|10|11)"' "$tmp/trace.json")"
    # all batches of a run of four, also those that a worker makes before the first step begins
    run --dataset synthetic --limit-train 32 --limit-test 8 --epochs 1 --batch-size 8 --resident off --augment elastic \
        --trace "$tmp/trace.json" --trace-steps 0:4
    same trace/batches 4 "$(grep -c '"make a batch"' "$tmp/trace.json")"
    refused trace/steps_text 2 "--trace-steps" "${tiny[@]}" --trace "$tmp/x.json" --trace-steps 5
    refused trace/steps_order 2 "--trace-steps" "${tiny[@]}" --trace "$tmp/x.json" --trace-steps 5:5
    refused trace/no_folder 1 "$tmp/none/x.json" "${tiny[@]}" --trace "$tmp/none/x.json"
}

test_quiet() {
    local option table
    run "${tiny[@]}" --epochs 2 --quiet
    same quiet/stdout "epoch=1 epoch=2" "$(cut -d ' ' -f 1 "$out" | paste -sd ' ')"
    while read -r option table; do # what is asked for is printed
        run "${tiny[@]}" --quiet "$option" --out "$tmp/quiet"
        line "quiet/$option" "$table"
        same "quiet/$option/no_more" 0 "$(grep -cE '^(Device|Train Epoch|RESOURCES)' "$out")"
    done <<'END'
--per-class ^Accuracy for class: 0 .* is
--profile ^ *\d+ .*BACKWARD, backward
--layers ^  fc2 .* (compute|memory)$
END
    run "${tiny[@]}" --quiet --per-class --profile --layers
    same quiet/in_order "epoch Accuracy Timer Layers" \
        "$(grep -oE '^(epoch|Accuracy|Timer|Layers)' "$out" | uniq | paste -sd ' ')"
    same quiet/stderr "" "$(cat "$err")"
    refused quiet/errors 2 "--epochs" --quiet --epochs 0
}

# The progress line, which only a terminal gets, stays in its width.
test_progress() {
    local width widest
    if ! script -qec true /dev/null </dev/null >/dev/null 2>&1; then
        skip progress "script cannot open a terminal here"
        return
    fi
    for width in 20 100; do
        script -qec "stty cols $width; $cnn ${tiny[*]} --log-interval 1 --batch-size 8" "$tmp/terminal" \
            >/dev/null 2>&1 </dev/null
        widest=$(tr '\r' '\n' <"$tmp/terminal" | grep -a 'epoch 1:' | sed 's/\x1b\[K//' |
            awk 'length > w { w = length } END { print w + 0 }')
        holds "progress/$width" "1 to $((width - 1)) letters" "$widest" \
            test "$widest" -gt 0 -a "$widest" -lt "$width"
    done
    # It is cleared before other text takes its place.
    same progress/cleared "" "$(grep -aP 'epoch 1: [^\r]*\r++(?!\x1b\[K)' "$tmp/terminal")"
    script -qec "printf 'mine '; $cnn ${tiny[*]} --quiet" "$tmp/terminal" >/dev/null 2>&1 </dev/null
    holds progress/quiet "mine epoch=1" "$(head -n 3 "$tmp/terminal")" grep -qa '^mine epoch=1 ' "$tmp/terminal"
}

test_good_run
test_dry_run
test_test_batch
test_determinism
test_options
test_usage
test_defaults
test_argument_files
test_learning_rate
test_sc20
test_out
test_profile
test_write_errors
test_resources
test_layers
test_trace
test_quiet
test_progress
test_learns
exit 0
