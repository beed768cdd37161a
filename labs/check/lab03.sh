# Lab 3: the loader's queue; see check.sh.
# shellcheck shell=bash disable=SC2154 # check.sh exports home and from

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

# compile PROGRAM FLAGS...: PROGRAM.o, the tests of the queue; without OpenMP, which they do not need
compile() {
    "${CC:-gcc}" -std=gnu17 -O1 -g1 "${by_function[@]}" -Wno-unknown-pragmas "${@:2}" -c labs/check/lab03.c -o "$1.o"
}
link() { # link PROGRAM FILES AND FLAGS...
    "${CC:-gcc}" -std=gnu17 -Wl,--wrap=pthread_mutex_lock,--wrap=pthread_mutex_unlock,--wrap=pthread_cond_wait \
        "${@:2}" -o "$1" -lm -lpthread
}
build() {
    local may_call='pthread_(mutex|cond)_[a-z]+|pthread_self|sched_yield|u?sleep|nanosleep'
    bare_sources lab03.c && compile lab03 && (cd bare && compile lab03 -w) &&
        only_harmless_calls bare/lab03.o lab03.o "$may_call" &&
        link lab03 lab03.o && link checker bare/lab03.o labs/check/apart.c
}

run() {
    [ ! -f deadlock ] || export PATIENCE_S=3
    case $1 in
    1) ./checker ./lab03 order ;;
    2) ./checker ./lab03 sizes first restless ;;
    3) ./checker ./lab03 ahead ;;
    4) ./checker ./lab03 concurrent slow_batch ;;
    5) ./checker ./lab03 left_early ;;
    6) ./checker ./lab03 end ;;
    7) ./checker ./lab03 sleep ;;
    8) races ;;
    9) ./checker ./lab03 order 9>/dev/null <<<"" && same_bits && return_token ;; # made by the workers
    10) ./checker ./lab03 order 9>/dev/null <<<"" && bash "$home/labs/check/runs.sh" 3 10 "$from" && return_token ;; # made with the queue
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
    CC=$good compile lab03_races -fsanitize=thread && CC=$good link lab03_races lab03_races.o -fsanitize=thread || return
    WORKER_MAY_OPEN=1 TSAN_OPTIONS="halt_on_error=1 report_thread_leaks=0 exitcode=66 log_path=$PWD/race" \
        ./checker ./lab03_races races 8>races.txt && return
    [ -n "$(compgen -G 'race.*')" ] || { cat races.txt >&8 && return 1; }
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

# results FOLDER: the training loss and the weights' hash of each epoch
results() {
    awk -F , 'NR == 1 { for (i = 1; i <= NF; i++) column[$i] = i }
        NR > 1 { print "epoch " $1 ":", $column["train_loss"], $column["weight_hash"] }' "$1/epochs.csv"
}
