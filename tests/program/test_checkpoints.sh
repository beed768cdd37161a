#!/usr/bin/env bash
# Tests what ./cnn writes to go on later, and how it does: --checkpoint, --resume, --load, --eval.
# CNN=PATH: another binary. QUICK=1: fewer places to stop at.
# Prints `pass checkpoints/NAME`, `fail checkpoints/NAME: expected ..., found ...` or
# `skip checkpoints/NAME: why`.
suite=checkpoints
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

# Two epochs of three steps, of which the last has 2 images instead of 4.
cifar=(--model cifar --dataset synthetic --limit-train 10 --limit-test 10 --epochs 2)

# The metadata at the begin of a checkpoint
metadata() { head -c 3000 "$1" | tail -c +9 | grep -aoP '^\{"__metadata__":\{\K[^}]*'; }

# ---- Stopped anywhere, a run goes on to the same bytes

# stops NAME STEPS LAST OPTIONS...: stops after each of STEPS and resumes, up to LAST steps in all
stops() {
    local name=$1 steps=$2 last=$3 k
    shift 3
    run "$@" --checkpoint "$tmp/straight"
    same "stops/$name/status" 0 "$status"
    for k in $steps; do
        rm -f "$tmp/stopped"
        run "$@" --checkpoint "$tmp/stopped" --max-steps "$k"
        same "stops/$name/$k/differs" 1 "$(cmp -s "$tmp/stopped" "$tmp/straight"; echo $?)"
        run "$@" --checkpoint "$tmp/stopped" --resume
        line "stops/$name/$k/goes_on" \
            "^Resuming from $tmp/stopped: epoch $((k / 3 + 1)), step $((k % 3 + 1))\$"
        same_file "stops/$name/$k/equal" "$tmp/stopped" "$tmp/straight"
    done
    same "stops/$name/end" "$((last / 3 + 1)) 0" \
        "$(position "$tmp/straight" epoch) $(position "$tmp/straight" batch)"
}

test_stops() {
    local steps='1 2 3 4 5' more=' 6 7 8'
    [ -z "${QUICK:-}" ] || { steps='2 3' && more=''; }
    stops mnist_adadelta "$steps" 6 --dataset synthetic --limit-train 20 --batch-size 8 \
        --limit-test 10 --epochs 2
    stops cifar_momentum "$steps" 6 "${cifar[@]}"
    stops cifar_no_momentum "3 4" 6 "${cifar[@]}" --momentum 0 --weight-decay 0.01
    stops cifar_resized "3 4" 6 "${cifar[@]}" --resize 64 --augment crop-flip
    stops resnet8 "$steps$more" 9 --model resnet8 --dataset synthetic --limit-train 20 \
        --batch-size 8 --limit-test 10 --epochs 3 --nesterov --schedule cosine --warmup-epochs 1 \
        --augment crop-flip --label-smoothing 0.1
    if [ -n "${QUICK:-}" ]; then
        skip stops/resnet18 "QUICK=1"
    else
        stops resnet18 2 3 --model resnet18 --dataset synthetic --limit-train 6 --batch-size 2 \
            --limit-test 2 --epochs 1
    fi
    # Resumed before every step, with other threads, and once more when there is nothing left to do.
    run "${cifar[@]}" --checkpoint "$tmp/straight"
    rm -f "$tmp/stopped"
    local k
    for k in 1 2 3 4 5 6 7; do
        run "${cifar[@]}" --checkpoint "$tmp/stopped" --resume --max-steps "$k" \
            --threads $((k % 2 + 1)) --workers $((k % 3 + 1))
    done
    same_file stops/before_every_step "$tmp/stopped" "$tmp/straight"
    same stops/nothing_left "exit 0, 1 epochs" "exit $status, $(grep -c '^epoch=0 ' "$out") epochs"
}

test_max_steps() {
    run "${cifar[@]}" --max-steps 5 --out "$tmp/max_steps"
    same max_steps/status 0 "$status"
    same max_steps/images "10 8" "$(grep -oP '^epoch=.* images=\K[0-9]+' "$out" | paste -sd ' ')"
    same max_steps/tests 2 "$(grep -c '^Test set: A' "$out")"
    local json=$tmp/max_steps/run.json
    holds max_steps/stopped '"status": "stopped"' "$(head -n 2 "$json")" \
        grep -q '"status": "stopped"' "$json"
    run "${cifar[@]}" --max-steps 6 --out "$tmp/max_steps"
    holds max_steps/complete '"status": "complete"' "$(head -n 2 "$json")" \
        grep -q '"status": "complete"' "$json"
    run "${cifar[@]}" --max-steps 0
    same max_steps/0_means_none 2 "$(grep -c '^epoch=' "$out")"
}

# ---- The folder of a run that was stopped, resumed

# same_folder NAME FOLDER FOLDER
same_folder() { same "$1" "$(run_rows "$2")" "$(run_rows "$3")"; }

# Stopped anywhere, a run goes on as if nothing had happened. Kills at each call that changes a file:
# tests/robust/test_faults.sh.
test_same_folder() {
    local long=("${cifar[@]}" --limit-train 400 --limit-test 400 --epochs 4 --log-interval 30) k
    run "${long[@]}" --checkpoint "$tmp/straight" --out "$tmp/straight_run"
    same folder/rows 404 "$(run_rows "$tmp/straight_run" | grep -c '^[0-9]')"
    for k in 7steps:7 100steps:99 1:150 100steps:100; do
        rm -rf "$tmp/cut" "$tmp/cut_run"
        run "${long[@]}" --checkpoint "$tmp/cut" --out "$tmp/cut_run" --save-every "${k%:*}" --max-steps "${k#*:}"
        run "${long[@]}" --checkpoint "$tmp/cut" --out "$tmp/cut_run" --resume --max-steps $((${k#*:} + 20))
        run "${long[@]}" --checkpoint "$tmp/cut" --out "$tmp/cut_run" --resume
        same_folder "folder/stopped/$k" "$tmp/straight_run" "$tmp/cut_run"
    done
    same folder/warmup_of_each_process "1,1 1,2 1,3 2,1 2,2 2,3 2,21 2,22 2,23" \
        "$(awk -F, '$NF == 1 { print $1 "," $2 }' "$tmp/cut_run/steps.csv" | paste -sd ' ')"
    run "${long[@]}" --checkpoint "$tmp/cut" --out "$tmp/cut_run" --resume
    same_folder folder/nothing_left "$tmp/straight_run" "$tmp/cut_run"
    # --max-steps has ended the run within an epoch: nothing is left to do there, either
    run "${long[@]}" --checkpoint "$tmp/ended" --out "$tmp/ended_run" --max-steps 150
    cp -r "$tmp/ended_run" "$tmp/ended_once"
    run "${long[@]}" --checkpoint "$tmp/ended" --out "$tmp/ended_run" --resume --max-steps 150
    same_folder folder/nothing_left_within_epoch "$tmp/ended_once" "$tmp/ended_run"
    run "${long[@]}" --checkpoint "$tmp/ended" --out "$tmp/ended_run" --resume --eval
    same folder/eval_adds_a_row "1 2 0" "$(tail -n +2 "$tmp/ended_run/epochs.csv" | cut -d , -f 1 | xargs)"
    # at another line than a row, the rest is cut off
    run "${long[@]}" --checkpoint "$tmp/half" --out "$tmp/damaged" --max-steps 150
    sed -i 20s/^1,/x,/ "$tmp/damaged/steps.csv"
    run "${long[@]}" --checkpoint "$tmp/half" --out "$tmp/damaged" --resume --max-steps 151
    same folder/damaged "0 20" "$status $(sed 151q "$tmp/damaged/steps.csv" | wc -l)"
    run "${cifar[@]}" --out "$tmp/cut_run"
    same folder/fresh_run_starts_anew 7 "$(wc -l <"$tmp/cut_run/steps.csv")"
    # without a checkpoint yet, a resumed run is a fresh one: its logs have its own header
    sed -i 1s/lr/rate/ "$tmp/cut_run/epochs.csv" "$tmp/cut_run/steps.csv"
    run "${cifar[@]}" --out "$tmp/cut_run" --checkpoint "$tmp/none_yet" --resume
    same folder/resumed_afresh "0 0" "$status $(cat "$tmp/cut_run"/*.csv | grep -c rate)"
    same folder/no_temporary_left "" "$(find "$tmp" -name '*.tmp')"
}

# The length of a cosine belongs to the settings.
test_cosine() {
    local cosine=("${cifar[@]}" --schedule cosine)
    run "${cosine[@]}" --checkpoint "$tmp/cosine" --max-steps 2
    refused resume/other_cosine 2 "was saved with epochs=2, but this run has epochs=3" "${cosine[@]}" \
        --epochs 3 --checkpoint "$tmp/cosine" --resume
}

# ---- Which settings a checkpoint keeps

kept=(model width stem dataset limit-train augment global-batch parallel bucket-mb optimizer lr
    momentum nesterov weight-decay label-smoothing schedule gamma step-size warmup-epochs lr-scaling seed
    kernels resize precision layout)

# differs NAME OPTIONS...: the checkpoint $tmp/base of the run "${base[@]}" is not resumed with them
differs() {
    local name=$1
    shift
    cp "$tmp/base" "$tmp/refused"
    refused "resume/refuses_$name" 2 "was saved with ${name%:*}=" "${base[@]}" \
        --checkpoint "$tmp/refused" --resume "$@"
    same_file "resume/refuses_$name/keeps_file" "$tmp/refused" "$tmp/base"
}

test_resume_refuses() {
    local base=("${cifar[@]}")
    run "${base[@]}" --checkpoint "$tmp/base" --max-steps 2
    same resume/keeps "$(printf '%s\n' format epoch batch devices images train_loss train_correct cnn.version cnn.checksum "${kept[@]}" | sort)" \
        "$(metadata "$tmp/base" | grep -oP '(^|,)"\K[a-z._-]+(?=":")' | sort)"
    # a word, a number, one with which the optimizer has other tensors, a switch, and one that is computed
    differs model --model mnist --optimizer sgd --lr 0.001 --momentum 0.9 --batch-size 4 --gamma 1
    differs lr --lr 0.002
    differs momentum:0 --momentum 0
    differs nesterov --nesterov
    differs global-batch --batch-size 5
    # another version, with an option that this one lacks
    sed 's/"gamma"/"other"/' "$tmp/base" >"$tmp/other"
    refused resume/other_option 2 "$tmp/other: expected gamma in its metadata, found \"other=1\"; another version of cnn \
wrote it: start afresh from its weights with --load" "${base[@]}" --checkpoint "$tmp/other" --resume
}

test_resume() {
    run "${cifar[@]}" --checkpoint "$tmp/straight"
    run "${cifar[@]}" --checkpoint "$tmp/afresh" --resume
    line resume/afresh "^No checkpoint $tmp/afresh yet: starting at epoch 1\$"
    same_file resume/afresh_equal "$tmp/afresh" "$tmp/straight"
    run "${cifar[@]}" --checkpoint "$tmp/free" --epochs 1 --threads 1 --workers 1
    run "${cifar[@]}" --checkpoint "$tmp/free" --resume --threads 2 --workers 3 --log-interval 1 \
        --limit-test 3 --test-batch-size 2 --save-every 2steps --per-class --profile \
        --out "$tmp/free_run"
    same resume/may_differ/status 0 "$status"
    same_file resume/may_differ "$tmp/free" "$tmp/straight"
    # A second run without --resume begins again and overwrites the file.
    run "${cifar[@]}" --checkpoint "$tmp/free"
    same_file resume/unasked "$tmp/free" "$tmp/straight"
    same resume/unasked_says "" "$(grep '^Going on' "$out")"

    run "${cifar[@]}" --checkpoint "$tmp/free" --resume --per-class
    same resume/finished_per_class "exit 0, no nan" \
        "exit $status, $(grep -o 'is -*nan.*' "$out" | head -n 1 | grep . || echo no nan)"

    run "${cifar[@]}" --save-model --out "$tmp/model"
    refused resume/a_model 1 "$tmp/model/model.safetensors" "${cifar[@]}" --resume \
        --checkpoint "$tmp/model/model.safetensors"
    run "${cifar[@]}" --checkpoint "$tmp/base" --max-steps 2
    local what
    for what in batch:2:3 batch:2:x epoch:1:0; do
        IFS=: read -r name old new <<<"$what"
        sed "s/\"$name\":\"$old\"/\"$name\":\"$new\"/" "$tmp/base" >"$tmp/spoilt"
        refused "resume/spoilt_$name/$new" 1 "$tmp/spoilt" "${cifar[@]}" --resume \
            --checkpoint "$tmp/spoilt"
    done
}

# --load counts until there is a checkpoint.
test_load_and_resume() {
    local loading=("${cifar[@]}" --resume --load "$tmp/start/model.safetensors")
    run "${cifar[@]}" --seed 7 --save-model --out "$tmp/start"
    run "${cifar[@]}" --load "$tmp/start/model.safetensors" --checkpoint "$tmp/straight"
    run "${loading[@]}" --checkpoint "$tmp/loaded" --max-steps 2
    run "${loading[@]}" --checkpoint "$tmp/loaded"
    same_file resume/and_load "$tmp/loaded" "$tmp/straight"
}

# ---- Weights: --save-model, --load, --eval

# evaluated NAME FILE OPTIONS...: --load FILE --eval says what the run in $tmp/saved said
evaluated() {
    local name=$1 file=$2
    shift 2
    run "$@" --seed 9 --load "$file" --eval --save-model --out "$tmp/eval"
    same "load/$name/status" 0 "$status"
    same "load/$name/figures" "$wanted" "epoch=0 $(value test_loss) $(value accuracy)"
    same_file "load/$name/predictions" "$tmp/eval/predictions.csv" "$tmp/saved/predictions.csv"
    same "load/$name/no_training" "" "$(grep -E '^(Train Epoch|INFO)' "$out")"
    same "load/$name/no_figures_of_training" "nan nan ," \
        "$(value train_loss) $(value train_accuracy) $(tail -n 1 "$tmp/eval/epochs.csv" | cut -d , -f 6,7)"
    same_file "load/$name/same_weights" "$tmp/eval/model.safetensors" "$tmp/saved/model.safetensors"
}

test_load() {
    local model wanted options
    for model in mnist cifar resnet8; do
        options=(--model "$model" --dataset synthetic --limit-train 40 --limit-test 60
            --batch-size 8)
        run "${options[@]}" --epochs 1 --save-model --checkpoint "$tmp/with_optimizer" \
            --out "$tmp/saved"
        wanted="epoch=0 $(value test_loss) $(value accuracy)"
        evaluated "$model" "$tmp/saved/model.safetensors" "${options[@]}"
        line "load/$model/says" "^Loaded the weights in $tmp/saved/model.safetensors\$"
        evaluated "$model/checkpoint" "$tmp/with_optimizer" "${options[@]}"
        run "${options[@]}" --seed 9 --eval
        same "load/$model/matters" different \
            "$([ "$wanted" = "epoch=0 $(value test_loss) $(value accuracy)" ] || echo different)"
        run "${options[@]}" --eval --out "$tmp/saved"
        holds "load/$model/kept" "the model in the folder of --out" "none" test -s "$tmp/saved/model.safetensors"
    done
    python load/order "$tmp/with_optimizer" <<'END'
import json, struct, sys
data = open(sys.argv[1], "rb").read()
length, = struct.unpack("<Q", data[:8])
header = json.loads(data[8:8 + length])
del header["__metadata__"]
names = sorted(header, key=lambda name: (header[name]["dtype"] != "I64", name))  # as the safetensors library
begins = [header[name]["data_offsets"][0] for name in names]
if list(header) != names or begins != sorted(begins) or sum(name.startswith("optimizer.") for name in names) < 9:
    print("tensors", list(header))
END
    run "${cifar[@]}" --checkpoint "$tmp/straight"
    wanted=$(figures | grep -E '^(test_loss|accuracy)' | tail -n 2)
    run "${cifar[@]}" --checkpoint "$tmp/straight" --resume --eval
    same load/eval_of_resumed "$wanted" "$(figures | grep -E '^(test_loss|accuracy)')"
    # Training goes on from the weights, not from the place.
    run "${cifar[@]}" --load "$tmp/straight" --epochs 1 --log-interval 1
    local first='^Train Epoch: 1 \[0/10 ' loss
    loss=$(grep "$first" "$out")
    run "${cifar[@]}" --epochs 1 --log-interval 1
    same load/then_train "1 line, another one" "$(grep -c "$first" <<<"$loss") line, \
$([ "$loss" = "$(grep "$first" "$out")" ] && echo the same || echo another) one"
}

# not_loaded NAME WORD FILE: refused, in one line about FILE that has WORD
not_loaded() {
    refused "load/$1" 1 "$2" "${cifar[@]}" --load "$3" --eval
    holds "load/$1/names_file" "$3" "$(cat "$err")" grep -qF -- "$3" "$err"
}

test_load_refuses() {
    local model
    run --dataset synthetic --limit-train 4 --limit-test 4 --epochs 1 --save-model
    run "${cifar[@]}" --save-model
    not_loaded missing "No such file" "$tmp/nowhere"
    not_loaded folder "Is a directory" "$tmp"
    not_loaded other_model \
        '"shape":[6],"data_offsets":[0,24]}, found ""conv1.bias":{"dtype":"F32","shape":[32]' \
        "$PWD/mnist_cnn.safetensors"
    cp cifar_cnn.safetensors cifar.st
    refused load/other_model_turned 1 '"conv1.bias"' --dataset synthetic --limit-train 4 \
        --limit-test 4 --load cifar.st --eval
    for model in resnet8 resnet18; do
        refused "load/cifar_in_$model" 1 'expected a tensor of this model, found ""conv1.bias"' --model $model --dataset synthetic \
            --limit-train 4 --limit-test 4 --load cifar.st --eval
    done
    printf 'PK\3\4\24\0\0\0model/data.pkl' >saved.pth
    printf '\200\2\212\12l\374\234F\371 j\250P\31.' >saved_before_2020.pth
    for file in saved.pth saved_before_2020.pth; do
        refused load/$file 1 "$file: expected a safetensors file, found one of torch.save()" "${cifar[@]}" --load $file
    done
    refused load/other_width 1 '"conv1.bias"' "${cifar[@]}" --width 8 --load cifar.st --eval
    local size length
    size=$(stat -c %s cifar.st)
    length=$(($(od -An -tu8 -N8 cifar.st)))
    for length in 0 7 8 9 $((length + 7)) $((length + 8)) $((size - 1)); do
        head -c "$length" cifar.st >cut.st
        not_loaded "cut_at_$length" cut.st cut.st
    done
    { cat cifar.st && echo; } >long.st
    not_loaded too_long long.st long.st
    yes 'No such tensors.' 2>/dev/null | head -c 5000 >text.st
    not_loaded text text.st text.st
    head -c 5000 /dev/zero >zeros.st
    not_loaded zeros zeros.st zeros.st
    gzip -c cifar.st >gzip.st
    not_loaded gzipped gzip.st gzip.st
    test_headers
}

# Headers that lie, each of a file that is right otherwise, and a word of what is said to it; none:
# the file is good.
test_headers() {
    if ! command -v python3 >/dev/null; then
        skip load/headers "python3 is not installed"
        return
    fi
    mkdir headers && python3 - cifar.st headers >headers.txt <<'END'
import json, re, struct, sys
data = open(sys.argv[1], "rb").read()
length, = struct.unpack("<Q", data[:8])
good, numbers = data[8:8 + length].decode(), data[8 + length:]


def write(name, word, text, numbers=numbers, length=None):
    text = text.encode("latin-1")
    length = len(text) if length is None else length
    open(sys.argv[2] + "/" + name, "wb").write(struct.pack("<Q", length) + text + numbers)
    print(name, word, sep="\t")


def json_text(header):
    return json.dumps(header, separators=(",", ":"))  # the style of the safetensors library


def change(name, word, numbers=numbers, **entries):
    header = json.loads(good)
    for tensor, entry in entries.items():
        tensor = tensor.replace("_", ".")
        header[tensor] = None if entry is None else dict(header.get(tensor, {}), **entry)
    write(name, word, json_text({k: v for k, v in header.items() if v is not None}), numbers)


header = json.loads(good)
good = good.rstrip()
entry = header["fc3.weight"]  # the last one
begin, end = entry["data_offsets"]
SIZE = end - begin
last = '"fc3.weight":' + json_text(entry)
write("good", "", good + " ")
change("good_in_python", "", fc3_weight={})
write("good_turned", "", json_text({"__metadata__": header.pop("__metadata__"),
                                    **dict(reversed(header.items()))}))
places, turned = 0, {}  # the values in another order, as older versions and programs wrote them
for name in reversed(header):
    size = header[name]["data_offsets"][1] - header[name]["data_offsets"][0]
    turned[name] = dict(header[name], data_offsets=[places, places + size])
    places += size
write("values_turned", "", json_text(turned), b"".join(
    numbers[slice(*header[name]["data_offsets"])] for name in turned))
write("white_space", 'found ""__metadata__": {', json.dumps(json.loads(good)))
write("metadata_last", 'a tensor of this model, found ""__metadata__"', json_text(header)[:-1] + ',"__metadata__":{"a":"b"}}')
change("extra_tensor", 'a tensor of this model, found ""new"', numbers + bytes(4),
       new={"dtype": "F32", "shape": [1], "data_offsets": [end, end + 4]})
change("missing_tensor", 'expected a tensor fc3.weight, found', numbers[:-SIZE], fc3_weight=None)
change("hole", "fc3.weight: expected its values at byte", numbers + bytes(4),
       fc3_weight={"data_offsets": [begin + 4, end + 4]})
change("overlap", "fc3.weight: expected its values at byte", numbers[:-4],
       fc3_weight={"data_offsets": [begin - 4, end - 4]})
change("negative_offset", 'expected "fc3.weight":{', fc3_weight={"data_offsets": [-SIZE, 0]})
change("float16", 'found ""fc3.weight":{"dtype":"F16"', numbers[:-SIZE // 2], fc3_weight={
    "dtype": "F16", "data_offsets": [begin, end - SIZE // 2]})
change("turned_shape", '"shape":[84,10]', fc3_weight={"shape": [84, 10]})
change("huge_shape", '"shape":[4294967296,', fc3_weight={"shape": [4294967296, 4294967296]})
change("unknown_key", "%s,%s]}, found" % (begin, end), fc3_weight={"strides": [1]})
for way in "module", "_orig_mod": # of DataParallel and torch.compile
    write(way, f"save net.{way}.state_dict() instead", good.replace("fc3.weight", way + ".fc3.weight"))
change("optimizer", 'a tensor of this model, found ""optimizer.x"', numbers + bytes(4),
       optimizer_x={"dtype": "F32", "shape": [1], "data_offsets": [end, end + 4]})
write("one_twice", "each tensor once", good[:-1] + "," + last + "}")
for cut in range(1, len(good), len(good) // 20):
    write(f"cut_{cut}", "in its header: expected", good[:cut])
write("trailing", 'a comma and a tensor, or the end, found "}{}"', good + "{}")
write("trailing_comma", 'found "}"', good[:-1] + ",}")
write("zero_byte", "no zero byte", good.replace("fc3.weight", "fc3.\0ias"))
write("list", "starts with {", "[" + good + "]")
write("empty", "starts with {", "")
write("no_tensors", "found none", "{}", b"")
write("longer_name", "a tensor of this model", good.replace("fc3.weight", "fc3.weight.fc3"))
write("nested", 'metadata as "key":"value"', good.replace('{"format"', '{"a":{"b":"c"},"format"'))
write("backslash", "without backslashes", good.replace('"format":"pt"', '"format":"\\u0041"'))
write("damaged", "damaged", good.replace('"format":"pt"', '"format":"pT"'))
write("checksum_first", "damaged", re.sub(
    '"__metadata__":{.*?}', '"__metadata__":{"cnn.checksum":"fnv1a64:0123456789abcdef"}', good))
write("no_checksum", "damaged", re.sub(',"cnn.checksum":"[^"]*"', "", good))
write("first_version", "", re.sub(',"cnn.version".*?(?=})', "", good))
write("much_metadata", "at most 4096 bytes of metadata",
      '{"__metadata__":{"a":"%s"},' % (9000 * "x") + good[good.index('"conv1.weight"'):])
write("much_header", "at most 1048576", good + 1048577 * " ")
for i, text in enumerate(('{', '{{', '{"abc', '{"__metadata__":{},')):
    write(f"garbage_{i}", "a tensor of this model", text, b"")
write("length_beyond", "truncated", good, length=len(good) + len(numbers) + 1)
write("length_-8", "at most 1048576", good, length=2 ** 64 - 8)
write("length_short", 'expected "fc3.weight"', good, length=good.index(last) + len(last) - 3)
END
    same load/headers 0 $?
    local name word
    while IFS=$'\t' read -r name word; do
        if [ "$word" ]; then
            not_loaded "headers/$name" "$word" "headers/$name"
        else
            run "${cifar[@]}" --load "headers/$name" --eval
            same "load/headers/$name" "exit 0, " "exit $status, $(cat "$err")"
        fi
    done <headers.txt
}

# ---- Runs that diverge: the checkpoint is the last good one

test_diverged() {
    local options=("${cifar[@]}" --epochs 9 --lr 1e6)
    run "${options[@]}" --checkpoint "$tmp/diverged" --save-every 1steps
    same diverged/status 1 "$status"
    run "${options[@]}" --load "$tmp/diverged" --eval
    same diverged/loss_of_checkpoint "finite, or refused" \
        "$(grep -oE 'test_loss=[-+]?(nan|inf)' "$out" || echo "finite, or refused")"
    run "${options[@]}" --log-interval 1000
    holds diverged/names_the_row "the first row that is not finite" "exit $status, $(cat "$err")" grep -qP \
        '^cnn: error: epoch 1, step [23]: the loss is -?(nan|inf); the first output that is not finite is in row \d+ \((\w+: )?[a-z].*\); try a smaller --lr$' "$err"
    run --model resnet8 --dataset synthetic --limit-train 8 --limit-test 8 --batch-size 8 --epochs 1 --lr 1e6
    holds diverged/in_the_test "the step and both causes" "exit $status, $(cat "$err")" grep -qP \
        "^cnn: error: after step 1 the test loss is -?(nan|inf); the weights .* --lr\. .* BatchNorm's running statistics" "$err"
    # The step that spoils the weights is the last one: no later loss can tell.
    run "${options[@]}" --max-steps 2 --out "$tmp/diverged_run"
    same diverged/in_the_last_step "exit 1, failed" \
        "exit $status, $(grep -oP '"status": "\K[a-z]+' "$tmp/diverged_run/run.json")"
    python diverged/run_json "$tmp/diverged_run/run.json" <<'END'
import json, sys
try:
    json.load(open(sys.argv[1]))
except ValueError as error:
    print("no JSON:", error)
END
}

# ---- Disks that fail

test_write_errors() {
    local dir name
    : >"$tmp/file"
    while read -r name dir; do
        refused "write/$name" 1 "$dir" "${cifar[@]}" --checkpoint "$dir"
        same "write/$name/before_training" 0 "$(grep -c '^Train Epoch' "$out")"
    done <<END
no_folder $tmp/no/such/folder
in_a_file $tmp/file/checkpoint
not_creatable /proc/checkpoint
END
    # No file may grow beyond 100 KiB, as if the disk were full; the older checkpoint survives that.
    run "${cifar[@]}" --checkpoint "$tmp/old" --max-steps 2
    cp "$tmp/old" "$tmp/full"
    (
        trap '' XFSZ
        ulimit -f 100
        run "${cifar[@]}" --checkpoint "$tmp/full" --resume
        exit "$status"
    )
    same write/full_disk/status 1 "$?"
    same write/full_disk/one_line 1 "$(grep -c "^cnn: error: .*$tmp/full" "$err")"
    same_file write/full_disk/keeps_old "$tmp/full" "$tmp/old"
    same write/full_disk/no_temporary "" "$(find "$tmp" -name 'full.tmp')"
    # What a killed run left beside the checkpoint does no harm.
    echo rubbish >"$tmp/full.tmp"
    run "${cifar[@]}" --checkpoint "$tmp/full" --resume
    run "${cifar[@]}" --checkpoint "$tmp/straight"
    same_file write/old_temporary "$tmp/full" "$tmp/straight"
    same write/old_temporary_gone "" "$(find "$tmp" -name '*.tmp')"
}

test_stops
test_same_folder
test_cosine
test_max_steps
test_resume_refuses
test_resume
test_load_and_resume
test_load
test_load_refuses
test_diverged
test_write_errors
exit 0
