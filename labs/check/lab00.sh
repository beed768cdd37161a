# Lab 0: the program builds and learns here, and the student's run folder is complete. check.sh reads this.
# shellcheck shell=bash disable=SC2119,SC2154 # check.sh exports home, from and work
# shellcheck source=labs/check/run_folders.sh
. "$home/labs/check/run_folders.sh"

tests() {
    cat <<'END'
1|-|the program builds without a warning
2|-|it learns: on 12800 synthetic images, far better than guessing
2|-|your run folder exists, run.json is valid and the run is complete
2|-|its counts agree: epochs x ceil(N / B) steps, images, throughput x time
2|-|its losses are the ones that its images and seed give
1|-|run.json has the machine card
END
}

# Lab 0 has no student code: a build error is the result of test 1.
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
        { echo "expected an accuracy above 60 %, where guessing gives 10 %; found ${accuracy:-none}: $(tail -n 2 <<<"$said")"
          echo "run: make doctor"; return 1; }
}

own_run() {
    open_run lab00 "./cnn --dataset synthetic --limit-train 12800 --limit-test 1000 --epochs 1 --out runs/lab00"
}
reproducible() { retrain && same_losses own/steps.csv "in the checker's run with your images and seed"; }

run() {
    local token
    read -r token
    case $1 in
    1) builds ;;
    2) learns ;;
    3) own_run && complete ;;
    4) own_run && counts ;;
    5) own_run && reproducible ;;
    6) own_run && machine_card ;;
    esac && send_token
}
