#!/usr/bin/env bash
# cnn.c alone, in an empty folder, by the command that its first comment gives: it compiles without a
# warning, trains with the definitions of the layers, and gives the same weights as they do where the
# fast kernels are compiled, too. With gcc and clang, each with OpenMP and without. QUICK=1: only gcc with OpenMP
# trains, on fewer images; the others look for warnings.
# Prints `pass alone/NAME`, `fail alone/NAME: expected ..., found ...` or `skip alone/NAME: why`.
suite=alone
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

command=$(grep -oP '^ +\Kgcc .*cnn\.c -o cnn( -l\w+)+' "$repo/cnn.c" | head -n 1)
train=(--dataset synthetic --limit-train 640 --limit-test 500 --epochs 1)
[ -z "${QUICK:-}" ] || train=(--dataset synthetic --limit-train 128 --limit-test 100 --epochs 1)

# why_not COMPILER OPTION...: why it cannot be tested; nothing if it can
why_not() {
    if ! command -v "$1" >/dev/null; then
        echo "$1 is not installed"
    elif ! echo 'int main(void) { return 0; }' | "$1" -x c - "${@:2}" -o "$tmp/probe" 2>/dev/null; then
        echo "$* does not compile an empty program"
    fi
}

# compile NAME COMMAND OPTIONS...: in the folder NAME, with every warning; none may come
compile() {
    local words
    read -ra words <<<"$2"
    (cd "$tmp/$1" && "${words[@]}" -Wall -Wextra "${@:3}") >"$out" 2>&1
    same "$1/no_warning" "exit 0, " "exit $?, $(cat "$out")"
    cnn=$tmp/$1/cnn
}

# folder NAME FILE...: an empty folder with these files of the repository
folder() {
    mkdir "$tmp/$1" && (cd "$repo" && cp "${@:2}" "$tmp/$1")
}

# hash OPTIONS...: of the weights after a run of two steps
hash() {
    rm -rf "$tmp/hashed"
    run --dataset synthetic --limit-train 128 --limit-test 100 --epochs 1 --out "$tmp/hashed" "$@"
    grep -osE '[0-9a-f]{16}$' "$tmp/hashed/epochs.csv" || echo "no hash: $(cat "$err")"
}

# kernels NAME EXPECTED: those of the last run
kernels() { same "$1" "$2" "$(grep -oP '^Device: .*--kernels \K\w+' "$out")"; }

# test_compiler COMPILER: with OpenMP, as the command has it, and without
test_compiler() {
    local options name why line
    mkdir "$tmp/$1"
    for options in -fopenmp ''; do
        name=$1/$([ -n "$options" ] || echo no_)openmp
        # shellcheck disable=SC2086 # no word, if there is no option
        why=$(why_not "$1" $options)
        if [ -n "$why" ]; then
            skip "$name" "$why"
            continue
        fi
        folder "$name" cnn.c
        line=$1${command#gcc}
        [ -n "$options" ] || line=${line/ -fopenmp/}
        if [ -n "${QUICK:-}" ] && [ "$name" != gcc/openmp ]; then
            compile "$name" "${line%% -lm*}" -fsyntax-only
            continue
        fi
        compile "$name" "$line"
        run "${train[@]}"
        same "$name/status" "0 " "$status $(cat "$err")"
        kernels "$name/kernels" naive
        line "$name/trains" '^epoch=1 .* train_loss=[0-9.]+ .* accuracy=[0-9.]+ '
        same "$name/files" "cnn cnn.c" "$(cd "$tmp/$name" && echo *)"
    done
}

no_fast_kernels="--kernels fast: cnn_kernels.c was not beside cnn.c when it was compiled; expected --kernels naive"
test_refusal() {
    refused refusal/fast 2 "$no_fast_kernels" "${train[@]}" --kernels fast
    refused refusal/tiled 2 "--kernels tiled --precision (any): expected one of these on a CPU: naive in fp32" "${train[@]}" --kernels tiled
}

# --layers: the peak is measured by cnn_kernels.c. Without it no limit is known, and nothing else is missing.
test_layers() {
    run "${train[@]}" --layers --out "$tmp/layers"
    same layers/status "0 " "$status $(cat "$err")"
    line layers/title '^Layers, 64 images; this device: GFLOP/s unknown without cnn_kernels\.c, [0-9.]+ GB/s measured$'
    line layers/printed '^  conv2 +conv2d 3x3 .* [0-9.]+ +[0-9.]+ +- +1\.00  -$'
    same layers/peak '"peak_gflops":null' "$(grep -o '"peak_gflops":[^,]*' "$tmp/layers/run.json")"
    # each row of the network is one of the table: the definitions fuse nothing
    same layers/columns "11 rows,12 columns,no limit" "$(awk -F , 'NR == 1 { columns = NF; next }
        NF != columns || $10 != "" || $12 != "" || $8 == "" || $11 != "1.000" { print; wrong = 1 }
        END { print NR - 1 " rows", columns " columns", (wrong ? "a limit" : "no limit") }' OFS=, "$tmp/layers/layers.csv")"
}

# The same flags, with cnn_kernels.c beside cnn.c: it becomes the default, and changes nothing else.
test_kernels() {
    local alone
    alone=$(hash)
    kernels kernels/alone naive
    folder kernels cnn.c cnn_kernels.c
    compile kernels "$command"
    holds kernels/fast_differs "other sums, other weights" "$alone" test "$(hash)" != "$alone"
    kernels kernels/default fast
    same kernels/naive "$alone" "$(hash --kernels naive)"
    [ -z "${QUICK:-}" ] || { skip left_out "QUICK=1" && return; }
    folder left_out cnn.c cnn_kernels.c
    compile left_out "$command" -DCNN_NO_KERNELS
    same left_out/hash "$alone" "$(hash)"
    kernels left_out/default naive
    refused left_out/fast 2 "$no_fast_kernels" "${train[@]}" --kernels fast
}

holds command "a command that compiles cnn.c in its first comment" "$command" test -n "$command"
test_compiler clang
test_compiler gcc
why=$(why_not gcc -fopenmp)
if [ -n "$why" ]; then
    skip kernels "$why"
else
    cnn=$tmp/gcc/openmp/cnn
    test_refusal
    test_layers
    test_kernels
fi
exit 0
