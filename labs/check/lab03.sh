# Lab 3: the loader's queue; see check.sh.
# shellcheck shell=bash disable=SC2119,SC2154 # home, work and from are check.sh's
# shellcheck source=labs/check/run_folders.sh
. "$home/labs/check/run_folders.sh"

tests() {
    cat <<'END'
3|3.1 3.2|each batch is what the permutation says, for 1, 2, 3 and 8 workers
2|3.1 3.2|no batch is lost or duplicated: odd batch sizes, random delays, epochs that start in the middle
3|3.1 3.2|workers prefetch batches, and do not overwrite the batch in use
2|3.1 3.2|workers make batches concurrently, and a slow batch keeps its place in the order
2|3.1 3.2|an epoch is left early, and a new one begins
1|3.1 3.2|workers end when quit is set
2|3.1 3.2|threads that wait sleep
2|3.1 3.2|no data race
1|3.1 3.2|./cnn is bit-identical with 1 worker, with 4, and without any
2|3.1 3.2|the sweep in runs/lab03-workers is complete
END
}

# compile PROGRAM FLAGS...: the tests of the queue; without OpenMP, which they do not need
compile() {
    "${CC:-gcc}" -std=gnu17 -O1 -g -Wno-unknown-pragmas "${@:2}" -c labs/check/lab03.c -o "$1.o" &&
        "${CC:-gcc}" "${@:2}" -Wl,--wrap=pthread_mutex_lock,--wrap=pthread_mutex_unlock,--wrap=pthread_cond_wait \
            "$1.o" -o "$1" -lm -lpthread
}
build() {
    compile lab03 && bare_sources lab03.c &&
        (cd bare && "${CC:-gcc}" -std=gnu17 -O1 -Wno-unknown-pragmas -c labs/check/lab03.c -o lab03.o) &&
        only_harmless_calls bare/lab03.o lab03.o 'pthread_(mutex|cond)_[a-z]+|pthread_self|sched_yield|u?sleep|nanosleep'
}

run() {
    [ ! -f deadlock ] || export PATIENCE_S=3
    case $1 in
    1) ./lab03 order ;;
    2) ./lab03 sizes first restless ;;
    3) ./lab03 ahead ;;
    4) ./lab03 concurrent slow_batch ;;
    5) ./lab03 left_early ;;
    6) ./lab03 end ;;
    7) ./lab03 sleep ;;
    8) races ;;
    9) ./lab03 order 9>/dev/null <<<"" && same_bits && return_token ;; # made by the workers
    10) ./lab03 order 9>/dev/null <<<"" && sweep && return_token ;; # made with the queue
    esac
}

return_token() { cat >&9; }

# With the thread sanitizer of $CC, clang or gcc, the first one that runs here.
races() {
    local compiler good=
    echo 'int main(void) { return 0; }' >empty.c
    for compiler in "${CC:-gcc}" clang gcc; do
        if "$compiler" -fsanitize=thread empty.c -o empty && ./empty; then good=$compiler && break; fi
    done >sanitizer.txt 2>&1
    if [ -z "$good" ]; then
        echo "found no thread sanitizer; to earn these points install gcc's libtsan, or clang, and run" \
            "make check LAB=3 again"
        return 77
    fi
    CC=$good compile lab03_races -fsanitize=thread || return
    TSAN_OPTIONS="halt_on_error=1 report_thread_leaks=0 exitcode=66 log_path=$PWD/race" ./lab03_races races && return
    [ -n "$(compgen -G 'race.*')" ] || return 1
    echo "two threads access the same memory without the lock, and at least one writes:"
    grep -hE '^ +#[0-9]+ .*cnn\.c|(rite|ead) of size' race.* | head -n 6
    return 1
}

# trained PROGRAM WORKERS SECONDS: the losses and the weights' hash of every epoch
trained() {
    local status=0
    timeout --kill-after=2 "$3" "./$1" --no-cuda --model cifar --dataset synthetic --limit-train 500 --limit-test 100 --epochs 2 \
        --augment elastic --workers "$2" --out "trained-$1-$2" >output.txt 2>&1 </dev/null 8>&- 9>&- || status=$?
    [ $status -ne 124 ] && [ $status -ne 137 ] || echo "deadlock: ./cnn --workers $2 did not finish in $3 s and was stopped; its last lines:"
    [ $status -eq 0 ] || { tail -n 3 output.txt && return 1; }
    cut -d, -f1-6 "trained-$1-$2/steps.csv"
    results "trained-$1-$2"
}

# Without workers: the program with the starter's stubs.
same_bits() {
    local flags="-std=gnu17 -O1 -Wno-unknown-pragmas" name workers alone found
    cp bare/cnn.c alone.c
    for name in cnn alone; do
        # shellcheck disable=SC2086 # several words
        "${CC:-gcc}" $flags "$name.c" -o "$name" -lm -lpthread || return 1
    done
    SECONDS=0
    alone=$(trained alone 1 240) || { echo "$alone" && return 1; }
    local patience=$((10 + 5 * SECONDS)) # longer: a deadlock
    for workers in 1 4; do
        found=$(trained cnn "$workers" "$patience") || { echo "$found" && return 1; }
        [ "$found" = "$alone" ] && continue
        echo "with --workers $workers the losses differ from those of batches made one after the other:"
        diff <(echo "$alone") <(echo "$found") | grep '^[<>]' | head -n 4
        return 1
    done
}

# facts FOLDER: lines `KEY<tab>VALUE` of its run.json; fact FOLDER KEY: one of these values
facts() { awk -f "$home/labs/check/json.awk" "$1/run.json"; }
fact() { facts "$1" | awk -F '\t' -v key="$2" '$1 == key { print $2 }'; }

# results FOLDER: the training loss and the weights' hash of each epoch
results() {
    awk -F , 'NR == 1 { for (i = 1; i <= NF; i++) column[$i] = i }
        NR > 1 { print "epoch " $1 ":", $column["train_loss"], $column["weight_hash"] }' "$1/epochs.csv"
}

# conditions FOLDER: what has to be the same in all rows
conditions() {
    facts "$1" | awk -F '\t' '
        $1 ~ /^settings\.(model|width|dataset|limit-train|batch-size|epochs|seed|threads|kernels)$/ ||
        $1 ~ /^machine\.(cpu|device)$/'
    results "$1"
}

# row_of WORKERS: the name of the run folder with that many workers
row_of() {
    local file
    for file in "$sweep"/*/run.json; do
        [ -f "$file" ] || continue
        [ "$(fact "$(dirname "$file")" settings.workers)" != "$1" ] || { basename "$(dirname "$file")" && return; }
    done
}

# fits FIRST: the open run differs from FIRST, a row of the sweep, in nothing but --workers
fits() {
    local why
    why=$(diff <(conditions "$1") <(conditions "$folder")) && return
    echo "$1 and $folder differ in more than --workers; run both on the same machine with the same options:"
    grep '^[<>]' <<<"$why" | head -n 4
    return 1
}

options="--no-cuda --threads 1 --model cifar --dataset synthetic --limit-train 6400 --limit-test 500 --epochs 2"
options+=" --batch-size 64 --resident off --augment elastic"

sweep() {
    local sweep=$from/runs/lab03-workers workers row missing="" first=
    for workers in 1 2 4 8; do
        row=$(row_of "$workers")
        [ -n "$row" ] || { missing+=" $workers" && continue; }
        open_run "lab03-workers/$row" "./cnn $options --workers $workers --out runs/lab03-workers/$row" && complete && counts && machine_card &&
            is settings.resident false "loading has to cost something" &&
            is settings.augment elastic "loading has to cost something" &&
            own_times "$sweep"/*/ || return
        first=${first:-$folder}
        fits "$first" || return
    done
    [ -z "$missing" ] || {
        echo "no run folder in $sweep for --workers$missing; step 6 of the handout has the commands"
        return 1
    }
}
