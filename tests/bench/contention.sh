#!/usr/bin/env bash
# What is left of the training speed beside other busy programs: one in all, one for each core, two for each core.
# Prints, for each network and batch size, images a second alone and the share of it that is left, beside the share
# that is fair: threads / (threads + busy programs), at most 1. With PyTorch installed, the same for it.
#
#   tests/bench/contention.sh       ROUNDS=5 EACH=10 CASES='mnist,64 ...' CNN=./cnn PYTHON=python3 in the environment
#
# A round runs every case once under each load, for EACH seconds, so that all of them meet the same neighbors; the
# shares are medians of the rounds. Takes ROUNDS * (EACH + 2) * 24 seconds: 24 minutes, with PyTorch 60.
set -u
cd "$(dirname "$0")/../.." || exit 1
export LC_ALL=C
cnn=${CNN:-./cnn} rounds=${ROUNDS:-5} each=${EACH:-10} cores=$(nproc)
cases=${CASES:-"mnist,64 cifar6,100 resnet8,32 resnet18,32 replicas,64 loader,100"}
loads="0 1 $cores $((2 * cores))" # busy programs
results=$(mktemp -d) || exit 1
pids=()
end() {
    [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}"
    rm -rf "$results"
}
trap end EXIT
trap 'exit 130' INT TERM

begin_load() { # N busy programs
    local i
    for ((i = 0; i < $1; i++)); do
        while :; do :; done &
        pids+=($!)
    done
}
end_load() {
    [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}"
    wait "${pids[@]}" 2>/dev/null
    pids=()
}

# options CASE: of ./cnn
options() {
    local name=${1%,*} batch=${1#*,}
    case $name in
    replicas) echo "--model mnist --replicas 2 --threads 2 --global-batch $batch" ;; # one thread each
    loader) echo "--model cifar --workers 2 --resident off --augment crop-flip --batch-size $batch" ;;
    cifar*) echo "--model cifar --width ${name#cifar} --batch-size $batch" ;;
    *) echo "--model $name --batch-size $batch" ;;
    esac
}

# ours CASE: images a second, from the steps of a run that is ended after EACH seconds
ours() {
    # shellcheck disable=SC2046 # several options
    timeout -s TERM $((each + 1)) "$cnn" --no-cuda --quiet --dataset synthetic --limit-train 6400 --limit-test 100 \
        --epochs 10000 --schedule step --log-interval 1 --out "$results/run" $(options "$1") >/dev/null
    # shellcheck disable=SC2016 # awk's own $
    awk -F , 'NR == 1 { for (i = 1; i <= NF; i++) column[$i] = i; next }
        !$column["warmup"] { images += $column["images"] / 1; if ($column["rank"] == 0) seconds += $column["seconds"] }
        END { if (seconds) print images / seconds }' "$results/run/steps.csv"
    rm -rf "$results/run"
}

theirs() {
    "$python" tests/bench/bench_pytorch.py --model "${1%,*}" --batch-size "${1#*,}" --threads "$cores" \
        --seconds "$each" 2>/dev/null | grep -oP '\bimg_per_s=\K[0-9.]+' | tail -n 1
}

python=$(tests/python_with.sh torch) || echo "No Python with PyTorch was found: no comparison"

for ((round = 1; round <= rounds; round++)); do
    for load in $loads; do
        begin_load "$load"
        for case in $cases; do
            ours "$case" >>"$results/ours-$case-$load"
            case $case in
            mnist* | cifar* | resnet18*)
                [ -z "$python" ] || theirs "$case" >>"$results/theirs-$case-$load"
                ;;
            esac
        done
        end_load
    done
done

median() { sort -n "$1" | sed -n "$((($(wc -l <"$1") + 1) / 2))p"; }

grep -m 1 'model name' /proc/cpuinfo
row='%-14s %-8s %10s %10s %10s %10s\n'
# shellcheck disable=SC2059 # the format of every row
printf "$row" "network,batch" program "img/s" "1 busy" "$cores busy" "$((2 * cores)) busy"
# shellcheck disable=SC2059,SC2046 # a number for each load
printf "$row" "fair" "" "" \
    $(for load in $loads; do awk -v t="$cores" -v b="$load" 'BEGIN { if (b) printf "%.2f ", t / (t + b) }'; done)
for who in ours theirs; do
    for case in $cases; do
        [ -f "$results/$who-$case-0" ] || continue
        alone=$(median "$results/$who-$case-0")
        # shellcheck disable=SC2059,SC2046
        printf "$row" "$case" "$([ $who = ours ] && echo cnn || echo PyTorch)" "$(printf %.0f "$alone")" \
            $(for load in $loads; do
                [ "$load" -eq 0 ] || awk -v a="$alone" -v b="$(median "$results/$who-$case-$load")" \
                    'BEGIN { printf "%.2f ", b / a }'
            done)
    done
done
