#!/usr/bin/env bash
# What users and strangers give cnn to read, changed at random by libFuzzer, with the sanitizers for
# addresses and undefined behavior: IDX and CIFAR files, checkpoints, options and argument files.
# fuzz.c has the targets and what they demand. SECONDS_LONG=N: for so long, instead of a few thousand
# inputs, from the inputs in build/fuzz that earlier calls have found.
# Prints `pass fuzz/NAME`, `fail fuzz/NAME: expected ..., found ...` or `skip fuzz/NAME: why`.
suite=fuzz
: "${CNN:=$(type -P true)}" # not run here
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
export TMPDIR=$tmp ASAN_OPTIONS=quarantine_size_mb=8:detect_leaks=0
flags=(-std=gnu17 -O1 -g1 -DUNROLL= -fno-math-errno -w -fno-sanitize-recover=all)

# Target, inputs of the short form: about a second each.
targets='
idx     8000
cifar   8000
resume  10000
options 2000
'

# build COMMAND...: the program of fuzz.c, as $tmp/fuzz
build() { "$@" "${flags[@]}" "$repo/tests/robust/fuzz.c" -o "$tmp/fuzz" -lm -lpthread 2>"$err"; }

# replayed TARGET: the good inputs, one by one
replayed() {
    local input found=
    mkdir -p "$tmp/seeds/$1"
    FUZZ=$1 SEEDS=$tmp/seeds/$1 "$tmp/fuzz" 2>"$err" || found=$(cat "$err")
    for input in "$tmp/seeds/$1"/*; do
        FUZZ=$1 timeout 60 "$tmp/fuzz" "$input" >"$err" 2>&1 ||
            found+="$(basename "$input"): $(grep -aE '^finding|ERROR|runtime error' "$err" | head -n 1); "
    done
    same "replayed/$1" "" "$found"
}

# searched TARGET INPUTS
searched() {
    local corpus=$tmp/corpus/$1 limit=(-runs="$2" -seed=1) log=$tmp/$1.log inputs status
    if [ "${SECONDS_LONG:-}" ]; then
        corpus=$repo/build/fuzz/$1 limit=(-max_total_time=$((SECONDS_LONG * jobs / 4)))
    fi
    mkdir -p "$corpus" "$repo/build/fuzz"
    FUZZ=$1 "$tmp/fuzz" "${limit[@]}" -timeout=60 -rss_limit_mb=4000 -close_fd_mask=2 -print_final_stats=1 \
        -artifact_prefix="$repo/build/fuzz/$1-" "$corpus" "$tmp/seeds/$1" >"$log" 2>&1
    status=$?
    inputs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    cases "${inputs:-0}" "inputs of $1"
    same "searched/$1" "exit 0" \
        "exit $status$([ "$status" -eq 0 ] || grep -aE '^finding|SUMMARY|Test unit|timeout' "$log")"
}

cd "$repo" || exit 1
if ! build clang -fsanitize=fuzzer,address,undefined; then
    if ! build "${CC:-gcc}" -DREPLAY -fsanitize=address,undefined; then
        skip all "neither clang's libFuzzer nor ${CC:-gcc} with the sanitizers: $(head -n 1 "$err")"
        exit 0
    fi
    skip searched "clang with libFuzzer is not installed; on Debian: apt-get install clang libclang-rt-14-dev"
fi
while read -r target _; do
    [ -z "$target" ] || replayed "$target"
done <<<"$targets"
if nm "$tmp/fuzz" 2>/dev/null | grep -q LLVMFuzzerRunDriver; then
    jobs=$(($(nproc) < 4 ? $(nproc) : 4)) # that search at a time, in the long form
    while read -r target inputs; do
        if [ -z "$target" ]; then
            continue
        elif [ -z "${SECONDS_LONG:-}" ]; then
            searched "$target" "$inputs"
            continue
        fi
        [ "$(jobs -r | wc -l)" -lt "$jobs" ] || wait -n
        searched "$target" "$inputs" &
    done <<<"$targets"
    wait
fi
# A search that finds nothing is worth something only if it would find: an array that is too short.
sed 's/uint8_t header\[16\];/uint8_t header[8];/' cnn.c >"$tmp/cwd/cnn.c"
mkdir -p "$tmp/cwd/tests/robust" && cp tests/robust/fuzz.c "$tmp/cwd/tests/robust/"
repo=$tmp/cwd
build "${CC:-gcc}" -DREPLAY -fsanitize=address,undefined
FUZZ=idx "$tmp/fuzz" "$tmp/seeds/idx/seed0" >"$err" 2>&1
holds would_notice "a sanitizer's report" "$(head -n 3 "$err")" grep -q 'stack-buffer-overflow' "$err"
exit 0
