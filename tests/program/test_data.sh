#!/usr/bin/env bash
# Tests the data files that ./cnn reads, MNIST's and CIFAR's, and networks on their images.
# CNN=PATH: another binary. QUICK=1: fewer broken files.
# Prints `pass data/NAME`, `fail data/NAME: expected ..., found ...` or `skip data/NAME: why`.
suite=data
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

# refused_data NAME DATASET FILE REGEX: the last run, --out $tmp/out, ended in one line about FILE
refused_data() {
    local file=$3 regex=$4 wrong=''
    [ "$status" -eq 1 ] || wrong="exit $status"
    [ "$(grep -vcE '^(gzip: .*)?$' "$err")" -eq 1 ] || wrong+=" not one line"
    grep -q '^cnn: error: ' "$err" || wrong+=" no 'cnn: error:'"
    grep '^cnn: error: ' "$err" | grep -qF -- "$file" || wrong+=" does not name $file"
    grep -qP -- "$regex" "$err" || wrong+=" no $regex"
    grep -qF "data/get_data.sh $2" "$err" || wrong+=" no data/get_data.sh $2"
    if grep -qs complete "$tmp/out/run.json"; then wrong+=" a complete run.json"; fi
    if [ -z "$wrong" ]; then
        pass "$1"
    else
        fail "$1" "one line of refusal, exit 1" "$wrong: $(cat "$err")"
    fi
}

# ---- MNIST's IDX files

# bad NAME FILE REGEX COMMAND: after the command has spoilt the data, cnn refuses FILE in one line
bad() {
    make_data
    (cd "$tmp/idx" && eval "$4") || exit 1
    run --data "$tmp/idx" --dataset mnist --epochs 1 --out "$tmp/out"
    refused_data "idx/$1" mnist "$2" "$3"
}

test_idx() {
    make_data
    run --data "$tmp/idx" --dataset mnist --epochs 1
    same idx/plain_status 0 "$status"
    line idx/plain_size '^Train set size: 20$'
    line idx/plain_folder "^Data: mnist from $tmp/idx\$"
    figures >"$tmp/plain"
    gzip "$tmp/idx/"*-ubyte
    run --data "$tmp/idx" --dataset mnist --epochs 1
    same idx/gz_status 0 "$status"
    same idx/gz_equals_plain "$(cat "$tmp/plain")" "$(figures)"
    ignoring_children "$cnn" --data "$tmp/idx" --dataset mnist --epochs 1 >"$out" 2>"$err"
    same idx/gz_of_a_parent_that_ignores_sigchld "0 $(cat "$tmp/plain")" "$? $(figures)"
    mkdir "$tmp/killed" && printf '#!/bin/sh\nkill -KILL $$\n' >"$tmp/killed/gzip" && chmod +x "$tmp/killed/gzip"
    PATH=$tmp/killed:$PATH run --data "$tmp/idx" --dataset mnist --epochs 1
    one_error cnn idx/gz_killed "$train_images.gz: gzip was killed by signal 9"
    run --data "$tmp/idx" --dataset mnist --epochs 1 --limit-train 7
    line idx/gz_limit '^Train set size: 7$'
    mkdir "$tmp/idx/mnist" && mv "$tmp/idx/"*.gz "$tmp/idx/mnist/"
    run --data "$tmp/idx" --dataset mnist --epochs 1
    line idx/subfolder "^Data: mnist from $tmp/idx/mnist\$"

    local both='expected .*, found ' f
    for f in $train_images $train_labels $test_images $test_labels; do
        bad "missing_$f" "$f" "$both" "rm $f"
        bad "truncated_$f" "$f" "$both" "truncate -s -1 $f"
        bad "short_header_$f" "$f" "$both" "truncate -s 5 $f"
        bad "empty_$f" "$f" "$both" ": >$f"
        make_data && rm "$tmp/idx/$f" && mkdir "$tmp/idx/$f"
        refused "idx/folder_$f" 1 "cannot read $tmp/idx/$f: Is a directory" --data "$tmp/idx" --dataset mnist
        bad "too_long_$f" "$f" "$both" "echo >>$f"
        bad "no_gz_name_$f" "$f" "$both" "gzip $f && mv $f.gz $f"
        bad "broken_gz_$f" "$f.gz" 'gzip' "gzip $f && truncate -s -9 $f.gz"
        bad "not_gz_$f" "$f.gz" 'gzip' "mv $f $f.gz"
        bad "short_gz_$f" "$f.gz" "$both" "truncate -s -1 $f && gzip $f"
        bad "long_gz_$f" "$f.gz" "$both" "echo >>$f && gzip $f"
    done
    bad magic_images $train_images "$both" "images 20 2049 >$train_images"
    bad magic_labels $test_labels "$both" "labels 10 2051 >$test_labels"
    bad swapped $train_images "$both" "cp $train_labels $train_images"
    bad label_10 $train_labels 'from 0 to 9, found 10 at image 19; a data set with other classes needs a row in' \
        "truncate -s -1 $train_labels && printf '\\x0a' >>$train_labels"
    bad fewer_labels $train_labels "$both" "labels 19 >$train_labels"
    bad more_labels $test_labels "$both" "labels 11 >$test_labels"
    bad rows $train_images '28 x 28 .*found 14 x 28' "images 20 2051 14 28 >$train_images"
    bad columns $test_images '28 x 28 .*found 28 x 14' "images 10 2051 28 14 >$test_images"
    bad count_0_images $train_images "$both" "images 0 >$train_images"
    bad count_0_labels $test_labels "$both" "labels 0 >$test_labels"
    bad huge_count $train_images "$both" \
        "{ be32 2051; be32 4294967295; be32 28; be32 28; } >$train_images"
    bad huge_count_gz $train_images.gz "$both" "rm $train_images &&
        { be32 2051; be32 4294967295; be32 28; be32 28; } | gzip >$train_images.gz"
    # 10 million images, of which there are none: no memory is taken for them
    bad large_count_gz $train_images.gz 'compressed bytes cannot hold them' "rm $train_images &&
        { be32 2051; be32 10000000; be32 28; be32 28; } | gzip >$train_images.gz"

    # A failed run must not leave an older run's success behind in its folder.
    make_data
    run --data "$tmp/idx" --dataset mnist --epochs 1 --out "$tmp/reused"
    echo >>"$tmp/idx/$test_labels"
    run --data "$tmp/idx" --dataset mnist --epochs 1 --out "$tmp/reused"
    same idx/stale_run_json 0 "$(grep -cs '"complete"' "$tmp/reused/run.json")"

    run --data "$tmp/nowhere" --dataset mnist --epochs 1
    same idx/nowhere_status 1 "$status"
    same idx/nowhere_lines 1 "$(wc -l <"$err")"
    holds idx/nowhere_command "data/get_data.sh" "$(cat "$err")" grep -qF data/get_data.sh "$err"
}

# ---- CIFAR's files

# records BYTES_OF_LABELS: 20 records to stdout, of ten classes in turn
records() {
    local i
    for i in {0..19}; do
        [ "$1" -eq 1 ] || printf '\x13'
        printf '%b' "\\x0$((i % 10))"
        yes "Image $i" 2>/dev/null | head -c 3072
    done
}

# cifar_file NAME IMAGES: most records are the zeros of a sparse file, black images of class 0
cifar_file() {
    local labels=1
    [[ $1 == *_batch* ]] || labels=2
    [ -e "$tmp/records_$labels" ] || records $labels >"$tmp/records_$labels"
    cp "$tmp/records_$labels" "$tmp/cifar/$1" || exit 1
    truncate -s $(($2 * (labels + 3072))) "$tmp/cifar/$1"
}

cifar10_files="data_batch_1.bin data_batch_2.bin data_batch_3.bin data_batch_4.bin data_batch_5.bin
test_batch.bin"
make_cifar() {
    local file
    rm -rf "$tmp/cifar"
    mkdir "$tmp/cifar" || exit 1
    if [ "$1" = cifar10 ]; then
        for file in $cifar10_files; do cifar_file "$file" 10000; done
    else
        cifar_file train.bin 50000
        cifar_file test.bin 10000
    fi
}

# shellcheck disable=SC2317 # eval calls it
# put BYTE FILE OFFSET: overwrites one byte, given as two hexadecimal digits
put() { printf '%b' "\\x$1" | dd of="$2" bs=1 seek="$3" conv=notrunc status=none; }

# bad_cifar NAME DATASET FILE REGEX COMMAND
bad_cifar() {
    make_cifar "$2"
    (cd "$tmp/cifar" && eval "$5") || exit 1
    run --model cifar --data "$tmp/cifar" --dataset "$2" --limit-train 4 --limit-test 4 --epochs 1 \
        --out "$tmp/out"
    refused_data "$2/$1" "$2" "$3" "$4"
}

cifar_tiny=(--model cifar --limit-train 22 --limit-test 22 --epochs 1)
test_cifar10() {
    make_cifar cifar10
    run --data "$tmp/cifar" --dataset cifar10 "${cifar_tiny[@]}" --out "$tmp/cifar_run"
    same cifar10/status 0 "$status"
    line cifar10/folder "^Data: cifar10 from $tmp/cifar\$"
    line cifar10/limit_train '^Train set size: 22$'
    line cifar10/limit_test '^Test set size: 22$'
    figures >"$tmp/cifar_figures"
    same cifar10/labels "4 0 2 1 2 2 2 3 2 4 2 5 2 6 2 7 2 8 2 9" \
        "$(tail -n +2 "$tmp/cifar_run/predictions.csv" | cut -d , -f 2 | sort | uniq -c | xargs)"
    run --data "$tmp/cifar" --dataset cifar10 --model cifar --eval --limit-test 4
    line cifar10/all_train '^Train set size: 50000$'
    run --data "$tmp/cifar" --dataset cifar10 --model cifar --eval --limit-train 10003 \
        --batch-size 500
    line cifar10/limit_in_second_file '^Train set size: 10003$'
    line cifar10/all_test '^Test set size: 10000$'
    mkdir "$tmp/cifar/cifar10" && mv "$tmp/cifar/"*.bin "$tmp/cifar/cifar10/"
    run --data "$tmp/cifar" --dataset cifar10 "${cifar_tiny[@]}"
    line cifar10/subfolder "^Data: cifar10 from $tmp/cifar/cifar10\$"
    same cifar10/subfolder_equals "$(cat "$tmp/cifar_figures")" "$(figures)"
    (cd "$tmp/cifar/cifar10" && gzip -1 data_batch_1.bin test_batch.bin)
    run --data "$tmp/cifar" --dataset cifar10 "${cifar_tiny[@]}"
    same cifar10/gz_equals_plain "$(cat "$tmp/cifar_figures")" "$(figures)"

    local file both='expected .*, found ' size=30730000
    local files=$cifar10_files
    [ -z "${QUICK:-}" ] || files="data_batch_3.bin"
    for file in $files; do
        bad_cifar "missing_$file" cifar10 "$file" "$both" "rm $file"
        bad_cifar "truncated_$file" cifar10 "$file" "$size bytes .*, found $((size - 1));" \
            "truncate -s -1 $file"
        bad_cifar "too_long_$file" cifar10 "$file" "$size bytes .*, found $((size + 1));" \
            "echo >>$file"
        bad_cifar "label_10_$file" cifar10 "$file" 'from 0 to 9, found 10 at image 9999' \
            "put 0a $file $((9999 * 3073))"
    done
    bad_cifar empty cifar10 data_batch_5.bin "$both" ": >data_batch_5.bin"
    bad_cifar records_missing cifar10 test_batch.bin "$both" "truncate -s 3073 test_batch.bin"
    bad_cifar not_gz cifar10 data_batch_2.bin.gz gzip "mv data_batch_2.bin data_batch_2.bin.gz"
    bad_cifar still_gz cifar10 data_batch_2.bin "$both" \
        "gzip -1 data_batch_2.bin && mv data_batch_2.bin.gz data_batch_2.bin"
    bad_cifar short_gz cifar10 test_batch.bin.gz "$both" \
        "truncate -s -1 test_batch.bin && gzip -1 test_batch.bin"
}

test_cifar100() {
    make_cifar cifar100
    run --data "$tmp/cifar" --dataset cifar100 "${cifar_tiny[@]}"
    same cifar100/status 0 "$status"
    line cifar100/size '^Train set size: 22$'
    line cifar100/classes ' linear 84 -> 100 '
    figures >"$tmp/cifar_figures"
    mkdir "$tmp/cifar/cifar100" && mv "$tmp/cifar/"*.bin "$tmp/cifar/cifar100/"
    run --data "$tmp/cifar" --dataset cifar100 "${cifar_tiny[@]}"
    same cifar100/subfolder_equals "$(cat "$tmp/cifar_figures")" "$(figures)"
    bad_cifar missing_test cifar100 test.bin 'expected .*, found ' "rm test.bin"
    bad_cifar truncated cifar100 test.bin '30740000 bytes .*, found 30739999;' \
        "truncate -s -1 test.bin"
    bad_cifar too_long cifar100 test.bin '30740000 bytes .*, found 30740001;' \
        "echo >>test.bin"
    bad_cifar coarse_label_20 cifar100 train.bin 'from 0 to 19, found 20 at image 49999' \
        "put 14 train.bin $((49999 * 3074))"
    bad_cifar fine_label_100 cifar100 train.bin 'from 0 to 99, found 100 at image 7' \
        "put 64 train.bin $((7 * 3074 + 1))"
}

# ---- Which pixel is where: weights that tell channel and quadrant of what is bright in an image

# craft.py DIR CLASSES: a test file of CIFAR in which an image of class k shows pattern k, with some
# exceptions; DIR/weights, with which `--model cifar --width 3` tells patterns; DIR/expected.json.
write_craft() {
    cat >"$tmp/craft.py" <<'END'
import json, math, struct, sys

folder, classes = sys.argv[1], int(sys.argv[2])
labels = [k for k in range(10) for _ in range(23 if k == 0 else k + 1)]
shown = [1 if k == 0 and i >= 13 else 2 if k == 9 and i % 2 else k for i, k in enumerate(labels)]


def planes(k):  # 255 in one quadrant of one channel
    channel, down, right = k % 3, k // 6, k // 3 % 2
    return bytes(255 * ((c, y // 16, x // 16) == (channel, down, right))
                 for c in range(3) for y in range(32) for x in range(32))


with open(folder + ("/test_batch.bin" if classes == 10 else "/test.bin"), "wb") as f:
    for label, pattern in zip(labels, shown):
        f.write(bytes([label] if classes == 10 else [19 - label, label]) + planes(pattern))
    f.truncate(10000 * (3073 if classes == 10 else 3074))

# Both convolutions pass their first three channels on; 5 x 5 pixels are left before fc1.
shapes = {"conv1.weight": [3, 3, 5, 5], "conv1.bias": [3], "conv2.weight": [16, 3, 5, 5],
          "conv2.bias": [16], "fc1.weight": [120, 400], "fc1.bias": [120], "fc2.weight": [84, 120],
          "fc2.bias": [84], "fc3.weight": [classes, 84], "fc3.bias": [classes]}
tensors = {name: [0] * math.prod(shape) for name, shape in shapes.items()}
for c in range(3):
    for name in "conv1.weight", "conv2.weight":
        tensors[name][(c * 3 + c) * 25 + 2 * 5 + 2] = 1
for k in range(10):
    for y in (3, 4) if k // 6 else (0, 1):
        for x in (3, 4) if k // 3 % 2 else (0, 1):
            tensors["fc1.weight"][k * 400 + k % 3 * 25 + y * 5 + x] = 1
    tensors["fc2.weight"][k * 120 + k] = tensors["fc3.weight"][k * 84 + k] = 1
header, data = {}, b""
for name, shape in shapes.items():
    numbers = struct.pack("<%df" % len(tensors[name]), *tensors[name])
    offsets = [len(data), len(data) + len(numbers)]
    header[name] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
    data += numbers
text = json.dumps(header, separators=(",", ":")).encode()
open(folder + "/weights", "wb").write(struct.pack("<Q", len(text)) + text + data)

# The logit of the pattern is 4, the others' are 0.
right = [label for label, pattern in zip(labels, shown) if label == pattern]
json.dump({"loss": math.log(math.exp(4) + classes - 1) - 4 * len(right) / len(labels),
           "accuracy": 100 * len(right) / len(labels),
           "by_class": [100 * right.count(k) / labels.count(k) if k in labels else None for k in range(classes)]},
          open(folder + "/expected.json", "w"))
END
}

test_pixels() {
    local dataset
    write_craft
    for dataset in cifar10 cifar100; do
        if ! command -v python3 >/dev/null; then
            skip "pixels/$dataset" "python3 is not installed"
            continue
        fi
        make_cifar $dataset
        python3 "$tmp/craft.py" "$tmp/cifar" "${dataset#cifar}"
        run --model cifar --width 3 --data "$tmp/cifar" --dataset $dataset --limit-train 1 \
            --limit-test 77 --load "$tmp/cifar/weights" --eval --per-class --out "$tmp/pixels"
        same "pixels/$dataset/status" 0 "$status"
        python "pixels/$dataset/seen" "$tmp/pixels/epochs.csv" "$tmp/cifar/expected.json" "$out" <<'END'
import csv, json, re, sys
(epoch,), expected = csv.DictReader(open(sys.argv[1])), json.load(open(sys.argv[2]))
if abs(float(epoch["test_loss"]) - expected["loss"]) > 1e-4:
    print("loss", epoch["test_loss"], "instead of", expected["loss"])
if abs(float(epoch["accuracy"]) - expected["accuracy"]) > .006:
    print("accuracy", epoch["accuracy"], "instead of", expected["accuracy"])
said = re.findall("^Accuracy for class: .* is (?:(.*) %|unknown.*)$", open(sys.argv[3]).read(), re.M)
wanted = ["" if share is None else f"{share:.1f}" for share in expected["by_class"]]
if said != wanted:
    print("by class", said, "instead of", wanted)
END
        python "pixels/$dataset/predictions" "$tmp/pixels/predictions.csv" "$tmp/cifar" "${dataset#cifar}" <<'END'
import csv, sys
rows, folder, classes = list(csv.DictReader(open(sys.argv[1]))), sys.argv[2], int(sys.argv[3])
size, skip, seen = (3073, 1, [0, 0]) if classes == 10 else (3074, 2, [0, 0])
data = open(folder + ("/test_batch.bin" if classes == 10 else "/test.bin"), "rb").read()
if len(rows) != 77:
    print(len(rows), "rows")
for i, row in enumerate(rows):
    record = data[i * size:(i + 1) * size]
    planes = record[skip:]
    brightest = max(range(3072), key=lambda p: planes[p])
    pattern = brightest // 1024 + 3 * (brightest % 32 // 16) + 6 * (brightest % 1024 // 512)
    pixels = bytes(planes[c * 1024 + p] for p in range(1024) for c in range(3))
    right = record[skip - 1] == pattern
    seen[right] += 1
    expected = [str(i), str(record[skip - 1]), str(pattern), "0", "32x32x3", pixels.hex() if seen[right] <= 32 else ""]
    if list(row.values()) != expected:
        print("row", i, [v[:20] for v in row.values()], "expected", [v[:20] for v in expected])
END
        [ $dataset = cifar10 ] && same pixels/per_class_lines "Accuracy for class: plane is 56.5 %
Accuracy for class: car   is 100.0 %
Accuracy for class: bird  is 100.0 %
Accuracy for class: cat   is 100.0 %
Accuracy for class: deer  is 100.0 %
Accuracy for class: dog   is 100.0 %
Accuracy for class: frog  is 100.0 %
Accuracy for class: horse is 100.0 %
Accuracy for class: ship  is 100.0 %
Accuracy for class: truck is 50.0 %" "$(grep '^Accuracy for class: ' "$out")"
    done
}

# Variants of the first two images that are right and the first two that are wrong, in 7 epochs: of crop-flip, each
# is one of the 162 views of the image; of elastic, none is the image; at most two are the same.
test_augmented() {
    local kind
    for kind in crop-flip elastic; do
        run --model cifar --dataset synthetic --limit-train 64 --limit-test 60 --epochs 1 --batch-size 16 \
            --augment $kind --out "$tmp/augmented"
        python "predictions/$kind" "$tmp/augmented/predictions.csv" $kind <<'END'
import csv, sys
rows = list(csv.DictReader(open(sys.argv[1])))
images = {}
for row in rows:
    images.setdefault(row["image"], []).append(bytes.fromhex(row["pixels"]))
varied = [variants for variants in images.values() if len(variants) > 1]
first = {}
for row in rows:
    first.setdefault((row["label"] == row["predicted"], row["image"]), None)
expected = [i for good in (True, False) for i in [i for g, i in first if g == good][:2]]
if sorted(expected) != sorted(i for i, v in images.items() if len(v) > 1):
    print("augmented", [i for i, v in images.items() if len(v) > 1], "expected", expected)
def views(image):
    pixel = lambda y, x: image[(y * 32 + x) * 3:(y * 32 + x) * 3 + 3] if 0 <= y < 32 and 0 <= x < 32 else bytes(3)
    for top in range(-4, 5):
        for left in range(-4, 5):
            lines = [[pixel(y + top, x + left) for x in range(32)] for y in range(32)]
            yield b"".join(b"".join(line) for line in lines)
            yield b"".join(b"".join(line[::-1]) for line in lines)
for image, *variants in varied:
    if len(variants) != 7 or len(set(variants)) < 6:
        print(len(variants), "variants,", len(set(variants)), "different")
    if sys.argv[2] == "elastic" and image in variants:
        print("not moved")
    if sys.argv[2] == "crop-flip" and not set(variants) <= set(views(image)):
        print("no view of the image")
END
    done
}

# ---- Accuracy by class

class_names() { grep -oP '^Accuracy for class: \K.*(?= is [0-9]+\.[0-9] %$)' "$out" | paste -sd ,; }

test_per_class() {
    make_data
    run --data "$tmp/idx" --dataset fashion-mnist --epochs 1 --per-class
    same per_class/fashion_mnist \
        "t-shirt,trouser,pullover,dress,coat ,sandal,shirt,sneaker,bag  ,boot " "$(class_names)"
    run --data "$tmp/idx" --dataset mnist --epochs 1 --per-class --out "$tmp/per_class"
    same per_class/mnist "0    ,1    ,2    ,3    ,4    ,5    ,6    ,7    ,8    ,9    " \
        "$(class_names)"
    python per_class/predictions "$tmp/per_class/predictions.csv" "$out" "$(value accuracy)" <<'END'
import csv, re, sys
rows = list(csv.DictReader(open(sys.argv[1])))
right = [row["label"] for row in rows if row["label"] == row["predicted"]]
if sorted(int(row["label"]) for row in rows) != list(range(10)):
    print("labels", [row["label"] for row in rows])
if abs(10 * len(right) - float(sys.argv[3])) > .006:
    print("right", right, "accuracy", sys.argv[3])
lines = re.findall("^Accuracy for class: (.{5}) is (.*) %$", open(sys.argv[2]).read(), re.M)
if lines != [(f"{k:<5}", "100.0" if str(k) in right else "0.0") for k in range(10)]:
    print(lines, "right", right)
END
    run --model cifar --dataset synthetic --limit-train 4 --limit-test 50 --epochs 1 --per-class
    same per_class/synthetic "0    ,1    ,2    ,3    ,4    ,5    ,6    ,7    ,8    ,9    " \
        "$(class_names)"
    run --data "$tmp/idx" --dataset mnist --epochs 1
    same per_class/unasked "" "$(class_names)"
    run --data "$tmp/idx" --dataset mnist --epochs 1 --limit-test 3 --per-class
    same per_class/class_without_images "exit 0, no nan" \
        "exit $status, $(grep -o 'is -*nan.*' "$out" | head -n 1 | grep . || echo no nan)"
}

# ---- Networks on images of other shapes. All sets have 28 x 28 pixels or more, on which every
# network can be built: there is no shape that must be refused.

# shape NAME PARAMETERS OPTIONS...: trains two steps
shape() {
    run --limit-train 4 --batch-size 2 --limit-test 2 --epochs 1 "${@:3}"
    same "shapes/$1" "exit 0, $2 parameters, 4 images" \
        "exit $status, $(grep -oP '^ *\K[0-9]+ parameters' "$out"), $(value images) images"
}

test_shapes() {
    make_data
    shape cifar_28x28x1 44426 --model cifar --dataset mnist --data "$tmp/idx"
    shape resnet8_28x28x1 77754 --model resnet8 --dataset fashion-mnist --data "$tmp/idx"
    shape resnet8_imagenet_28x28x1 78394 --model resnet8 --dataset mnist --data "$tmp/idx" \
        --stem imagenet
    shape resnet8_imagenet_224 78394 --model resnet8 --dataset mnist --data "$tmp/idx" \
        --stem imagenet --resize 224
    line shapes/resnet8_imagenet_224/row_0 ' 0 +input .* 224 x 224 x 1 '
    if [ -n "${QUICK:-}" ]; then
        skip shapes/resnet18_28x28x1 "QUICK=1"
    else
        shape resnet18_28x28x1 11172810 --model resnet18 --dataset fashion-mnist --data "$tmp/idx"
    fi
    make_cifar cifar10
    shape mnist_32x32x3 1626442 --model mnist --dataset cifar10 --data "$tmp/cifar"
    shape resnet8_32x32x3 78042 --model resnet8 --dataset cifar10 --data "$tmp/cifar"
    line shapes/resnet_without_cifar100 '^Data: cifar10 from '
    make_cifar cifar100
    shape mnist_100_classes 1638052 --model mnist --dataset cifar100 --data "$tmp/cifar"
}

# ---- --dataset auto

test_auto() {
    local name folder first expected=synthetic
    for name in fashion-mnist mnist; do
        if compgen -G "/usr/share/datasets/$name/$train_images*" >/dev/null; then expected=$name; fi
    done
    mkdir "$tmp/empty" && cp "$cnn" "$tmp/empty/cnn"
    (cd "$tmp/empty" && ./cnn --limit-train 64 --limit-test 20 --epochs 1) >"$out" 2>"$err"
    line auto/data "^Data: $expected "

    # --data DIR with all sets of DIR/DATASET, with one of them, with none, and with files of an unnamed set
    local tiny=(--limit-train 2 --limit-test 2 --eval)
    mkdir "$tmp/sets" && make_cifar cifar10 && cp -r "$tmp/cifar" "$tmp/sets/cifar10"
    for name in resnet8 cifar; do
        run --model $name --data "$tmp/sets" "${tiny[@]}"
        line auto/${name}_finds_cifar10 '^Data: cifar10 '
    done
    make_cifar cifar100 && cp -r "$tmp/cifar" "$tmp/sets/cifar100"
    for name in resnet8:cifar100 cifar:cifar10; do
        run --model "${name%:*}" --data "$tmp/sets" "${tiny[@]}"
        line "auto/${name%:*}_finds_both" "^Data: ${name#*:} "
    done
    while read -r name folder first; do
        refused "auto/${name}_in_$folder" 1 "/$first or, with --dataset $first, in $tmp/$folder; run:" \
            --model "$name" --data "$tmp/$folder" "${tiny[@]}"
    done <<END
mnist sets mnist
resnet8 empty cifar100
resnet8 cifar cifar100
END
    run --dataset synthetic --data "$tmp/empty" "${tiny[@]}"
    line auto/synthetic_by_name '^Data: synthetic '
}

test_idx
test_cifar10
test_cifar100
test_pixels
test_augmented
test_per_class
test_shapes
test_auto
exit 0
