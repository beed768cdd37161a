# Lab 2: a convolution whose loops the compiler can vectorise, and seven runs: a line profile, a table of layers, and
# five that differ in one thing each. check.sh reads this.
# shellcheck shell=bash disable=SC2119,SC2154 # check.sh exports home, from and work
# shellcheck source=labs/check/run_folders.sh
. "$home/labs/check/run_folders.sh"
# shellcheck source=labs/check/lab01.sh
. "$home/labs/check/lab01.sh"

tests() {
    cat <<'END'
2|-|the seven run folders exist, are valid and complete
2|-|their counts agree: epochs x ceil(N / B) steps, images, throughput x time
2|-|the line profile counts every step: hits = epochs x ceil(N / B)
2|-|the profile's lines cover at least 95 % of the training time
3|-|each run differs from another one in only one thing
2|-|all runs have the same losses: faster code computes the same
2|-|layers.csv has all rows, and its numbers agree
3|2.1|the convolution computes what it did before
2|2.1|its innermost loop goes from one number to the next: it runs over the output channels
END
}

build() {
    if wanted 6 7; then make cnn CC="${CC:-gcc}" NO_CUDA=1 NO_MPI=1 COMMIT=checker || return; fi
    if wanted 8; then build_layers || return; fi
    if wanted 9; then build_order; fi
}

# Without OpenMP, and with a function call at each load and store; lab02.c counts them.
build_order() {
    bare_sources lab02.c && instrument . && (cd bare && instrument .) &&
        only_harmless_calls bare/part.o part.o 'tsan_[a-z0-9_]+' &&
        "${CC:-gcc}" -std=gnu17 -O1 -g -Wno-unknown-pragmas labs/check/lab02.c part.o -o lab02 -lm
}
instrument() {
    { sections 1. 2. && echo 'void part(Work w) { conv2d_forward_naive(w); }'; } >part.c &&
        "${CC:-gcc}" -std=gnu17 -O1 -g -w -fsanitize=thread -c part.c -o part.o
}

folders="o3 o0 textbook naive threads2 profile layers"
options="--no-cuda --threads 1 --dataset synthetic --limit-test 100 --epochs 2"

open_lab_run() {
    local more="--limit-train 1600" build=make
    case $1 in
    o0) build="make OPT=-O0" more="--limit-train 128" ;;
    textbook | naive) more="--limit-train 128 --kernels naive --profile --layers" ;;
    threads2) more+=" --threads 2" ;;
    profile | layers) more+=" --$1" ;;
    esac
    open_run "lab02-$1" "$build; ./cnn $options $more --out runs/lab02-$1" &&
        is status complete "the run was stopped or has failed" && own_times "$from"/runs/lab02-*
}

# every COMMAND...: checks each run, and prints all that is wrong
every() {
    local name wrong=0
    for name in $folders; do
        open_lab_run "$name" && "$@" || wrong=1
    done
    return $wrong
}

# profile_says WHAT
profile_says() {
    open_lab_run profile || return 1
    [ -f "$folder/profile.csv" ] || { complain "$run/profile.csv: missing"; return 1; }
    awk -F , -v what="$1" -v run="$run" -v epochs="$(value settings.epochs)" \
        -v n="$(value settings.limit-train)" -v batch="$(value parallel.global_batch)" \
        -f "$home/labs/check/profile.awk" "$folder/epochs.csv" "$folder/profile.csv" ||
        complain "$run/profile.csv does not belong to this run, or was edited"
}

# What must be equal in two runs that are compared, without the name of the folder.
facts() {
    awk -F '\t' '$1 ~ /^(settings|build|parallel)\./ || $1 ~ /^machine\.(host|cpu|cores|device)$/' "$1" |
        grep -v '^settings.out	' | sort
}

# only_in BASE KEYS...: the open run differs from another one in these facts alone
only_in() {
    local base=$work/lab02-$1.flat other
    other=$(diff <(facts "$base") <(facts "$flat") | sed -n 's/^[<>] //p' | cut -f 1 | sort -u |
        grep -vxF -f <(printf '%s\n' "${@:2}" none))
    [ -z "$other" ] || complain "$run differs from runs/lab02-$1 also in $(paste -sd ' ' <<<"$other"), so a difference in speed has more than one possible cause"
}
# varies KEY VALUE: in the open run
varies() { is "settings.$1" "$2" "this is the one setting that the run varies"; }

differ() {
    local flags wrong=0 small=(settings.limit-train parallel.iterations)
    open_lab_run o3 && varies kernels fast && varies threads 1 || return 1
    flags=$(value build.flags)
    case $flags in *-O3*) ;; *) complain "$run/run.json: build.flags should contain -O3, found $flags" && return 1 ;; esac
    open_lab_run o0 && only_in o3 build.flags "${small[@]}" &&
        is build.flags "${flags/-O3/-O0}" "the compiler must not optimise this one" || wrong=1
    open_lab_run threads2 && only_in o3 settings.threads && varies threads 2 || wrong=1
    open_lab_run profile && only_in o3 settings.profile && varies profile true || wrong=1
    open_lab_run layers && only_in o3 settings.layers && varies layers true || wrong=1
    open_lab_run textbook && only_in o3 settings.{kernels,profile,layers} "${small[@]}" && varies kernels naive || wrong=1
    open_lab_run naive && only_in textbook && varies kernels naive || wrong=1
    return $wrong
}

layer_table() {
    open_lab_run layers || return 1
    [ -f "$folder/layers.csv" ] || { complain "$run/layers.csv: missing"; return 1; }
    retrain --layers || return 1
    if ! diff <(cut -d , -f 1-5 own/layers.csv) <(cut -d , -f 1-5 "$folder/layers.csv") >table; then
        complain "$run/layers.csv: rows differ from those of the network: $(sed -n 2p table)"
        return 1
    fi
    awk -F , -v run="$run" -v batch="$(value parallel.global_batch)" -f "$home/labs/check/layers.awk" \
        "$folder/layers.csv" || complain "$run/layers.csv: its columns contradict each other: was it edited?"
}

# The checker trains twice, since a run with fewer images has others in its batches.
losses_agree() {
    local name own="in the checker's run with your images and seed" wrong=0
    open_lab_run o3 && retrain && same_losses own/steps.csv "$own" || return 1
    for name in threads2 profile layers; do
        open_lab_run $name && same_losses "$from/runs/lab02-o3/steps.csv" "in runs/lab02-o3" || wrong=1
    done
    open_lab_run textbook && rm -r own && retrain && same_losses own/steps.csv "$own" || return 1
    for name in o0 naive; do
        open_lab_run $name && same_losses "$from/runs/lab02-textbook/steps.csv" "in runs/lab02-textbook" || wrong=1
    done
    return $wrong
}

run() {
    local token
    case $1 in
    8) LAB_AND_TEST='LAB=2 TEST=8' ./lab01 1 && return ;;
    9) ./lab02 && return ;;
    esac
    [ "$1" -lt 8 ] && read -r token || return 1
    case $1 in
    1) every complete ;;
    2) every counts ;;
    3) profile_says hits ;;
    4) profile_says cover ;;
    5) differ ;;
    6) losses_agree ;;
    7) layer_table ;;
    esac && send_token
}
