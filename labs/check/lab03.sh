# Lab 3: the loader's queue; see check.sh.
# shellcheck shell=bash disable=SC2154 # home, work and from are check.sh's

tests() {
    cat <<'END'
3|3.1 3.2|each batch is what the permutation says, for 1, 2, 3 and 8 workers
2|3.1 3.2|nothing is lost or comes twice: odd batch sizes, threads that dawdle, epochs begun in the middle
3|3.1 3.2|workers run ahead, and leave the batch in use alone
2|3.1 3.2|workers fill batches side by side, and a slow one keeps its place
2|3.1 3.2|an epoch is left early, and a new one begins
1|3.1 3.2|workers end when they are told to
2|3.1 3.2|whoever waits sleeps
2|3.1 3.2|no data race
1|3.1 3.2|./cnn computes the same bits with 1 and 4 workers, and without any
2|3.1 3.2|the sweep in runs/lab03-workers is complete
END
}

# compile PROGRAM FLAGS...: the tests of the queue; without OpenMP, which they do not need
compile() {
    "${CC:-gcc}" -std=gnu17 -O1 -g -Wno-unknown-pragmas "${@:2}" labs/check/lab03.c -o "$1" -lm -lpthread
}
build() { compile lab03; }

run() {
    case $1 in
    1) ./lab03 order ;;
    2) ./lab03 sizes first restless ;;
    3) ./lab03 ahead ;;
    4) ./lab03 side_by_side slow_batch ;;
    5) ./lab03 left_early ;;
    6) ./lab03 end ;;
    7) ./lab03 sleep ;;
    8) races ;;
    9) ./lab03 order 9>/dev/null <<<"" && same_bits && say_word ;; # by the workers
    10) ./lab03 order 9>/dev/null <<<"" && sweep && say_word ;; # with the queue
    esac
}

say_word() { cat >&9; }

# The thread sanitizer of $CC, gcc or clang, whichever has one that runs here.
races() {
    local compiler good=
    echo 'int main(void) { return 0; }' >empty.c
    for compiler in "${CC:-gcc}" clang gcc; do
        if "$compiler" -fsanitize=thread empty.c -o empty && ./empty; then good=$compiler && break; fi
    done >sanitizer.txt 2>&1
    if [ -z "$good" ]; then
        echo "no compiler here has a thread sanitizer that runs; to earn these points run" \
            "make check LAB=3 where gcc (with libtsan) or clang has one"
        return 77
    fi
    CC=$good compile lab03_races -fsanitize=thread || return
    TSAN_OPTIONS="halt_on_error=1 exitcode=66 log_path=$PWD/race" ./lab03_races races && return
    [ -n "$(compgen -G 'race.*')" ] || return 1
    echo "two threads use the same memory, at least one writes, and nothing keeps them apart:"
    grep -hE '^ +#[0-9]+ .*cnn\.c|(rite|ead) of size' race.* | head -n 6
    return 1
}

# trained PROGRAM WORKERS SECONDS: the losses and the weights' hash of every epoch
trained() {
    local status=0
    timeout "$3" "./$1" --no-cuda --model cifar --dataset synthetic --limit-train 500 --limit-test 100 --epochs 2 \
        --augment elastic --workers "$2" --out "trained-$1-$2" >output.txt 2>&1 </dev/null || status=$?
    [ $status -ne 124 ] || echo "deadlock: ./cnn --workers $2 stood still and was stopped after $3 s; its last lines:"
    [ $status -eq 0 ] || { tail -n 3 output.txt && return 1; }
    cut -d, -f1-6 "trained-$1-$2/steps.csv"
    grep -o '"weight_hash":"[^"]*"' "trained-$1-$2/run.json"
}

# Without any: the program in which these two parts are the starter's.
same_bits() {
    local flags="-std=gnu17 -O1 -Wno-unknown-pragmas" name workers alone found
    awk -v mode=strip -v from=3 -v stubs=labs/stubs -f labs/check/regions.awk cnn.c >alone.c
    for name in cnn alone; do
        # shellcheck disable=SC2086 # several words
        "${CC:-gcc}" $flags "$name.c" -o "$name" -lm -lpthread || return 1
    done
    SECONDS=0
    alone=$(trained alone 1 240) || { echo "$alone" && return 1; }
    local patience=$((20 + 10 * SECONDS)) # a run that stands still
    for workers in 1 4; do
        found=$(trained cnn "$workers" "$patience") || { echo "$found" && return 1; }
        [ "$found" = "$alone" ] && continue
        echo "with --workers $workers the losses are others than those of batches made one after the other:"
        diff <(echo "$alone") <(echo "$found") | grep '^[<>]' | head -n 4
        return 1
    done
}

# setting FOLDER NAME: what run.json says
setting() { sed -n "s/^ *\"$2\": \"\{0,1\}\([^\",]*\)\"\{0,1\},\{0,1\}$/\1/p" "$1/run.json" | head -n 1; }
status() { grep -o '"status": "[^"]*"' "$1/run.json" | head -n 1 | cut -d'"' -f4; }
results() { grep -o '"train_loss":[^,]*\|"weight_hash":"[^"]*"' "$1/run.json"; }
conditions() { # what has to be the same in all rows
    local name
    for name in model width dataset limit-train batch-size epochs seed threads kernels; do
        echo "$name=$(setting "$1" $name)"
    done
    grep -o '"cpu": "[^"]*"\|"device": "[^"]*"' "$1/run.json"
    results "$1"
}

# bad_row FOLDER: says why a run is no row of the sweep
bad_row() {
    local name value
    [ "$(status "$1")" = complete ] || { echo "is not complete: its status is $(status "$1")" && return; }
    grep -q '"provenance": "measured", "emulated": false' "$1/run.json" ||
        { echo "is emulated or supplied, and its times say nothing about this machine" && return; }
    for name in resident=false augment=elastic; do
        value=$(setting "$1" "${name%=*}")
        [ "$value" = "${name#*=}" ] ||
            { echo "has --${name%=*} $value; the sweep asks for --resident off --augment elastic" && return; }
    done
    grep -q '^1,' "$1/epochs.csv" || echo "has no epoch in epochs.csv"
}

# row_of FOLDER WORKERS: the run folder with so many workers
row_of() {
    local file
    for file in "$1"/*/run.json; do
        [ -f "$file" ] || continue
        [ "$(setting "$(dirname "$file")" workers)" != "$2" ] || { dirname "$file" && return; }
    done
}

# fits ROW OTHERS...: says why a row cannot stand in one table with the others
fits() {
    local row=$1 other why
    for other in "${@:2}"; do
        if why=$(diff <(conditions "$other") <(conditions "$row")); then
            cmp -s "$other/epochs.csv" "$row/epochs.csv" || continue
            echo "$other and $row have the same times to the last digit: one is a copy of the other"
        else
            echo "$other and $row differ in more than their workers:"
            grep '^[<>]' <<<"$why" | head -n 4
        fi
        return 1
    done
}

sweep() {
    local folder=$from/runs/lab03-workers workers row why rows=() missing=""
    for workers in 1 2 4 8; do
        row=$(row_of "$folder" "$workers")
        [ -n "$row" ] || { missing+=" $workers" && continue; }
        why=$(bad_row "$row")
        [ -z "$why" ] || { echo "$row: $why" && return 1; }
        fits "$row" "${rows[@]}" || return 1
        rows+=("$row")
    done
    [ -z "$missing" ] || {
        echo "no run folder in $folder for --workers$missing; step 6 of the handout has the commands"
        return 1
    }
}
