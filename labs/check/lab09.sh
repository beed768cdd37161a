# Lab 9: the warm-up; then the run folders of three studies, whose tables are computed again, and some of
# whose runs are repeated. check.sh reads this.
# shellcheck shell=bash disable=SC2154 # check.sh exports home and from

tests() {
    cat <<'END'
3|9.1|warm-up: each step adds as much as the first one has, up to --lr
2|9.1|after the warm-up the schedule begins; without a warm-up, at once
3|-|the scaling study is complete: one device and more, strong and weak, five seeds each
2|-|its runs differ in nothing but devices, batch and seed, and have times of their own
2|-|scaling.csv has the seconds, speed-ups and efficiencies of the run folders
2|-|two of its runs, chosen at random, have the same losses when the checker repeats them
3|-|one core, before and after: one change per rung, the same losses, and ablation.csv has their speeds
2|9.1|large batches: five seeds per rung, one change each; a run with warm-up is repeated
1|-|hours.csv has what all runs have cost
END
}

build() {
    bare_sources lab09.c && compile && (cd bare && compile) && only_harmless_calls bare/lab09.o lab09.o &&
        "${CC:-gcc}" lab09.o -o rates -lm -lpthread &&
        "${CC:-gcc}" -std=gnu17 bare/lab09.o labs/check/apart.c -o checker -lm -lpthread
}
compile() { "${CC:-gcc}" -std=gnu17 -g1 -w "${by_function[@]}" -c labs/check/lab09.c -o lab09.o; }
program() { [ -x cnn ] || "${CC:-gcc}" -std=gnu17 -O1 -w cnn.c -o cnn -lm -lpthread; } # which few tests need
runs() { bash "$home/labs/check/runs.sh" 9 "$1" "$from" && cat >&9; }

run() {
    case $1 in
    1) ./checker warmup ;;
    2) ./checker after ;;
    6 | 8) program && runs "$1" ;;
    *) runs "$1" ;;
    esac
}
