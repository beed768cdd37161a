# Lab 0: the program builds and learns here, and the student's own run is whole. check.sh reads this.
# shellcheck shell=bash disable=SC2119,SC2154 # check.sh exports home, from and work
# shellcheck source=labs/check/run_folders.sh
. "$home/labs/check/run_folders.sh"

tests() {
    cat <<'END'
1|-|the program builds without a warning
2|-|it learns: on 12800 made-up images, far above guessing
2|-|your run folder is there, run.json is valid and the run is complete
2|-|its counts add up: epochs x ceil(N / B) steps, images, throughput x time
2|-|its losses are those of its images and seed
1|-|run.json has the machine card
END
}

# Lab 0 has nothing of the student's to compile: what goes wrong here is test 1's result.
build() { make cnn CC="${CC:-gcc}" NO_CUDA=1 NO_MPI=1 COMMIT=checker >build.log 2>&1 || true; }

builds() {
    if [ ! -x cnn ]; then
        grep -m 3 -E 'error|undefined|not found' build.log || tail -n 3 build.log
        echo "run: make doctor"
        return 1
    fi
    ! grep -m 3 warning build.log || { echo "run: make clean, then make"; return 1; }
}

learns() {
    local said accuracy
    said=$(./cnn --no-cuda --threads 1 --dataset synthetic --limit-train 12800 --limit-test 1000 --epochs 1 --quiet 2>&1)
    accuracy=$(tr ' ' '\n' <<<"$said" | sed -n 's/^accuracy=//p')
    awk -v x="$accuracy" 'BEGIN { exit !(x >= 60) }' ||
        { echo "accuracy should be above 60 %, guessing is 10; found ${accuracy:-none}: $(tail -n 2 <<<"$said")"
          echo "run: make doctor"; return 1; }
}

own_run() {
    open_run lab00 "./cnn --dataset synthetic --limit-train 12800 --limit-test 1000 --epochs 1 --out runs/lab00"
}
as_ours() { retrain && same_losses own/steps.csv "in our own run with your images and seed"; }

run() {
    local word
    read -r word
    case $1 in
    1) builds ;;
    2) learns ;;
    3) own_run && complete ;;
    4) own_run && counts ;;
    5) own_run && as_ours ;;
    6) own_run && machine_card ;;
    esac && say_word
}
