#!/usr/bin/env bash
# make bench: our training steps next to PyTorch's, on the same cores in the same run; then an
# epoch. Absolute figures vary with the machine and its neighbors; quote ratios and per cents.
# THREADS="1 2": other numbers of threads. PYTHON=...: one that can import torch.
# NETS="mnist,64 resnet18,32": only these networks and batch sizes.
set -u
export LC_ALL=C # the point of decimals, in what awk reads and prints
cd "$(dirname "$0")/../.." || exit 1
threads=${THREADS:-"1 $(nproc)"}
nets=${NETS:-"mnist,64 cifar64,50 cifar64,250 cifar6,100 resnet18,32 resnet50,32"}

python=$(tests/python_with.sh torch) || echo "No Python with PyTorch was found: no comparison"

# ours NET BATCH THREADS: the line of build/bench; cifar64 is --model cifar --width 64
ours() {
    local model=$1 width=6
    case $1 in cifar*) model=cifar width=${1#cifar} ;; esac
    build/bench --model "$model" --width "$width" --batch-size "$2" --threads "$3"
}
# mean NAME [FORMAT]: of the values of NAME in the lines read; -: there are none
mean() {
    grep -oP "\b$1=\K[0-9.]+" |
        awk -v f="${2:-%.1f}" '{ s += $1 } END { if (NR) printf f, s / NR; else printf "-" }'
}
value() { grep -oP "\b$1=\K[0-9.]+" | tail -n 1; }
quotient() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.2f", a / b }'; }

echo "Training steps, data in memory, no loader; images a second, per cent of the FMA peak:"
row='%-10s %6s %8s %10s %10s %10s %8s %7s %10s %7s %7s\n'
# shellcheck disable=SC2059 # the format of every row
printf "$row" network batch threads img/s "x 1 thread" "2 programs" "% peak" MB PyTorch MB ratio
for net in $nets; do
    model=${net%,*} batch=${net#*,}
    for t in $threads; do
        line=$(ours "$model" "$batch" "$t") || exit 1
        theirs=- ratio=- memory=-
        if [ -n "$python" ]; then
            lines=$("$python" tests/bench/bench_pytorch.py --model "$model" --batch-size "$batch" \
                --threads "$t" ${COMPILE:+--compile})
            theirs=$(value img_per_s <<<"$lines") memory=$(value rss_mb <<<"$lines")
            theirs=${theirs:--} memory=${memory:--} # it has failed, and said why
            # a second measurement of ours brackets theirs, in case the machine's speed drifted
            line+=$'\n'$(ours "$model" "$batch" "$t")
        fi
        speed=$(mean steps_img_per_s <<<"$line")
        [ "$theirs" = - ] || ratio=$(quotient "$speed" "$theirs")
        # shellcheck disable=SC2059
        printf "$row" "$model" "$batch" "$t" "$speed" "$(mean times_one_thread %.2f <<<"$line")" \
            "$(mean two_programs %.2f <<<"$line")" "$(mean percent_of_peak <<<"$line")" \
            "$(value rss_mb <<<"$line")" "$theirs" "$memory" "$ratio"
    done
done

# epoch OPTIONS...: images a second of an epoch of the mnist network
epoch() {
    ./cnn --no-cuda --dataset synthetic --limit-train 12800 --limit-test 100 --epochs 1 "$@" |
        value img_per_s
}
median() { sort -n | sed -n "$(((rounds + 1) / 2))p"; }

if [ "${threads##* }" -eq 2 ]; then
    rounds=9 one='' two=''
    for ((i = 0; i < rounds; i++)); do
        one+=$(epoch --threads 2 --batch-size 128)$'\n'
        two+=$(epoch --replicas 2 --threads 2 --global-batch 128)$'\n'
    done
    one=$(printf %s "$one" | median) two=$(printf %s "$two" | median)
    echo "mnist, 128 images a step, medians of $rounds epochs: one network with 2 threads"
    echo "  $one img/s, two replicas with 1 thread each $two img/s, $(quotient "$two" "$one") of it"
fi

echo "One epoch end to end, with the loader (Fashion-MNIST, the first 20000 images):"
data=/usr/share/datasets/fashion-mnist
if [ ! -d "$data" ]; then
    echo "  needs Debian's dataset-fashion-mnist: skipped"
    exit 0
fi
limits="--limit-train 20000 --limit-test 1000 --epochs 1"
# shellcheck disable=SC2086 # several words on purpose
./cnn --dataset fashion-mnist --data "$data" $limits | grep '^epoch=' | sed 's/^/  cnn    /'
if [ -n "$python" ]; then
    # shellcheck disable=SC2086
    "$python" tests/bench/pytorch_mnist.py --data "$data" --threads "${threads##* }" $limits |
        grep '^epoch=' | sed 's/^/  torch  /'
fi
