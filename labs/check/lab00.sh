# Lab 0: the program builds and learns here, and the student's run folder is complete. check.sh reads this.
# shellcheck shell=bash disable=SC2154 # check.sh exports home and from

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

run() {
    local token
    read -r token
    case $1 in
    1) builds ;;
    2) learns ;;
    *) bash "$home/labs/check/runs.sh" 0 "$1" "$from" ;;
    esac && echo "$token" >&9
}
