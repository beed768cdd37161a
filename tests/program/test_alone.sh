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

# rules_say NAME EXPECTED: what two rules of the labs say of the run folder in $tmp/runs/layers
rules_say() {
    python "$1" "$repo/labs/tools" "$tmp/runs/layers" "$2" <<'END'
import sys
sys.path.append(sys.argv[1])
import run_folders, verify
run = run_folders.read_run(sys.argv[2])
found = [*verify.check_entries(run), *verify.check_layer_times(run)]
if " ".join(line.partition(": expected ")[2] for line in found) != sys.argv[3]:
    print(*found or ["nothing"], sep="\n")
END
}

# --layers: the peak is measured by cnn_kernels.c. Without it no limit is known, and nothing else is missing.
test_layers() {
    local made=$tmp/runs/layers
    mkdir "$tmp/runs"
    run "${train[@]}" --layers --out "$made"
    same layers/status "0 " "$status $(cat "$err")"
    line layers/title '^Layers, 64 images; this device: GFLOP/s unknown without cnn_kernels\.c, [0-9.]+ GB/s measured$'
    line layers/printed '^  conv2 +conv2d 3x3 .* [0-9.]+ +[0-9.]+ +- +1\.00  -$'
    same layers/peak '"peak_gflops":null' "$(grep -o '"peak_gflops":[^,]*' "$made/run.json")"
    # each row of the network is one of the table: the definitions fuse nothing
    same layers/columns "11 rows,12 columns,no limit" "$(awk -F , 'NR == 1 { columns = NF; next }
        NF != columns || $10 != "" || $12 != "" || $8 == "" || $11 != "1.000" { print; wrong = 1 }
        END { print NR - 1 " rows", columns " columns", (wrong ? "a limit" : "no limit") }' OFS=, "$made/layers.csv")"
    rules_say layers/rules ""
    cp "$made/layers.csv" "$tmp/whole"
    awk -F , '$1 == "conv2" { $10 = 50; $12 = "memory" } { print }' OFS=, "$tmp/whole" >"$made/layers.csv"
    rules_say layers/half "a bound and a percentage in all rows, or in none, found them in 1 of 11; run it again"
    cp "$tmp/whole" "$made/layers.csv"
    sed -i 's/"kernels": "naive"/"kernels": "fast"/' "$made/run.json"
    rules_say layers/no_peak_of_fast "in machine the entries host, cpu, cores, memory_bytes, peak_gflops, device, found no \
peak_gflops; run it again"
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
