# Lab 2: six runs that differ from the first in one thing each, a line profile and a table of layers.
# check.sh reads this.
# shellcheck shell=bash disable=SC2119,SC2154 # check.sh exports home, from and work
# shellcheck source=labs/check/run_folders.sh
. "$home/labs/check/run_folders.sh"

tests() {
    cat <<'END'
2|-|the six run folders exist, are valid and complete
3|-|their counts agree: epochs x ceil(N / B) steps, images, throughput x time
3|-|the line profile counts every step: hits = epochs x ceil(N / B)
3|-|the profile's lines cover at least 95 % of the training time
4|-|each run differs from lab02-o3 in one thing only
2|-|all runs have the same losses: faster code computes the same
3|-|layers.csv has all rows, and its numbers agree
END
}

build() { make cnn CC="${CC:-gcc}" NO_CUDA=1 NO_MPI=1 COMMIT=checker; }

folders="o3 o0 naive threads2 profile layers"
options="--no-cuda --threads 1 --dataset synthetic --limit-train 400 --limit-test 100 --epochs 2"

open_lab_run() {
    local more build=make
    case $1 in
    o0) build="make OPT=-O0" more= ;;
    naive) more="--kernels naive" ;;
    threads2) more="--threads 2" ;;
    profile | layers) more="--$1" ;;
    *) more= ;;
    esac
    open_run "lab02-$1" "$build; ./cnn $options ${more:+$more }--out runs/lab02-$1" &&
        own_times "$from"/runs/lab02-*
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

# only_in KEY BASE_VALUE VALUE: the open run differs from the base in this fact alone
only_in() {
    local base=$work/lab02-o3.flat other
    other=$(diff <(facts "$base") <(facts "$flat") | sed -n 's/^[<>] //p' | cut -f 1 | sort -u | grep -vx "$1")
    [ -z "$other" ] || {
        complain "$run differs from runs/lab02-o3 also in $(paste -sd ' ' <<<"$other"), so a difference in speed has more than one possible cause"
        return 1
    }
    [ "$(awk -F '\t' -v k="$1" '$1 == k { print $2 }' "$base")" = "$2" ] ||
        { complain "runs/lab02-o3/run.json: $1 should be $2"; return 1; }
    is "$1" "$3" "this is the one setting that the run varies"
}

differ() {
    local flags wrong=0
    open_lab_run o3 || return 1
    flags=$(value build.flags)
    open_lab_run o0 && only_in build.flags "${flags/-O0/-O3}" "${flags/-O3/-O0}" || wrong=1
    open_lab_run naive && only_in settings.kernels fast naive || wrong=1
    open_lab_run threads2 && only_in settings.threads 1 2 || wrong=1
    open_lab_run profile && only_in settings.profile false true || wrong=1
    open_lab_run layers && only_in settings.layers false true || wrong=1
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

losses_agree() {
    local base=$from/runs/lab02-o3/steps.csv
    open_lab_run o3 && retrain && same_losses own/steps.csv "in the checker's run with your images and seed" &&
        every same_losses "$base" "in runs/lab02-o3"
}

run() {
    local token
    read -r token
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
