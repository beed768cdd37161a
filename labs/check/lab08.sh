# Lab 8: the ring all-reduce and the sampler, each rank in a process of its own; then both in ./cnn, and
# three run folders. check.sh reads this.
# shellcheck shell=bash disable=SC2154 # check.sh exports home and from

tests() {
    cat <<'END'
3|8.1|the ring adds up a range of numbers over 2 to 8 ranks
2|8.1|sizes that the ranks do not divide, fewer numbers than ranks, one rank
3|8.1|each rank sends 2 (R - 1) / R of the numbers, in 2 (R - 1) steps
1|8.1|all ranks have the same bits
3|8.2|rank r of R has the positions r, r + R, r + 2R, ... of each epoch's permutation
2|8.2|sizes that the ranks do not divide, fewer images than ranks: the first images are repeated
1|8.2|testing: each image once, in the order of the file
2|8.1 8.2|R replicas train as one device does, with the same global batch; all ranks of a run have the same weight hash
1|8.1 8.2|small buckets, odd batches, --overlap off; a second run is bit-identical
2|8.1 8.2|the runs lab08-one, lab08-ddp and lab08-dp are complete and can be compared
END
}

build() {
    compile_tests || return # and examine the parts
    if wanted 8 9 10; then compile_program cnn && cp bare/cnn.c alone.c && compile_program alone; fi
}

compile_tests() {
    bare_sources lab08.c && cp -r labs/check/lab08_mpi bare/labs/check && cp cnn_kernels.c bare && compile_ranks &&
        (cd bare && compile_ranks) && only_harmless_calls bare/lab08.o lab08.o 'pthread_[a-z_]+' &&
        "${CC:-gcc}" lab08.o -o lab08 -lm -lpthread &&
        "${CC:-gcc}" -std=gnu17 bare/lab08.o labs/check/apart.c -o checker -lm -lpthread
}
compile_ranks() {
    "${CC:-gcc}" -std=gnu17 -g1 -w "${by_function[@]}" -Ilabs/check/lab08_mpi -c labs/check/lab08.c -o lab08.o
}
compile_program() { "${CC:-gcc}" -std=gnu17 -O1 -w "$1.c" -o "$1" -lm -lpthread; }

run() {
    case $1 in
    1) ./checker sum ;;
    2) ./checker odd alone ;;
    3) ./checker traffic ;;
    4) ./checker bits ;;
    5) ./checker shares ;;
    6) ./checker remainder few ;;
    7) ./checker testing ;;
    8) replicas && return_token ;;
    9) variants && return_token ;;
    10) run_folders && return_token ;;
    esac
}

return_token() { cat >&9; }

# ---- Tests 8 and 9

# trained FOLDER PROGRAM OPTIONS...: a short training on the CPU, in a new run folder
trained() {
    local status=0 folder=$1 program=$2
    shift 2
    rm -rf "$folder"
    timeout 200 "./$program" --no-cuda --oversubscribe --model cifar --dataset synthetic --limit-test 30 \
        --timeout 60 "$@" --out "$folder" >output.txt 2>&1 </dev/null 9>&- || status=$?
    [ $status -eq 0 ] && return
    echo "./cnn $* ended with exit status $status; its last lines:"
    tail -n 3 output.txt
    return 1
}

# step_losses FOLDER: of each step, the mean over the images of all ranks
step_losses() {
    awk -F , 'NR > 1 { key = $1 "," $2; sum[key] += $4 * $5; images[key] += $4 }
        NR > 1 && !seen[key]++ { order[++count] = key }
        END { for (i = 1; i <= count; i++) print order[i], images[order[i]], sum[order[i]] / images[order[i]] }' \
        "$1/steps.csv"
}

# same_steps ONE FOLDER DEVIATION MOST: the losses and images of all steps, at most MOST of them, are those of ONE
same_steps() {
    paste -d ' ' <(step_losses "$1") <(step_losses "$2") | head -n "${4:-100000}" | awk -v most="$3" -v many="$2" '
        $1 != $4 || $2 != $5 {
            printf "%s: one device has %s images in step %s (epoch,step), all ranks together %s in step %s\n",
                many, $2, $1, $5, $4
            exit 1
        }
        { d = ($3 - $6) / $3 }
        !(d < most && d > -most) {
            printf "%s: the loss of step %s (epoch,step) is %s, on one device %s: %s\n", many, $1, $6, $3,
                NR == 1 ? "other images, or they are counted twice" : "the sum of gradients, or the images, differ"
            exit 1
        }
        END { if (NR == 0) { print many ": no steps"; exit 1 } }'
}

# sends FOLDER RANKS PARAMETERS: each rank sends 2 (R - 1) / R of the gradients in each step
sends() {
    awk -F , -v run="$1" -v ranks="$2" -v bytes="$(($3 * 4))" '
        NR > 1 { want = 2 * (ranks - 1) / ranks * bytes }
        NR > 1 && ($16 < .99 * want || $16 > 1.02 * want) {
            printf "%s/steps.csv: rank %s sent %s bytes in step %s, expected about 2 (R - 1) / R P = %d\n",
                run, $3, $16, $2, want
            exit 1
        }' "$1/steps.csv"
}

hash_of() { tail -n 1 "$1/epochs.csv" | grep -oE '[0-9a-f]{16}$'; }

replicas() {
    local n
    trained one alone --limit-train 96 --global-batch 24 --epochs 2 || return
    for n in 2 3 4; do
        trained "with-$n" cnn --limit-train 96 --global-batch 24 --epochs 2 --replicas "$n" &&
            same_steps one "with-$n" 1e-4 && sends "with-$n" "$n" 62006 || return
    done
}

# With 101 images, 3 ranks have 34 each, and their last batches of 8 have 2.
variants() {
    local uneven="--replicas 3 --limit-train 101 --batch-size 8 --epochs 1" images
    # shellcheck disable=SC2086 # several words
    trained plain cnn $uneven && trained again cnn $uneven && trained after cnn $uneven --overlap off &&
        trained small cnn $uneven --bucket-mb 0.001 || return
    images=$(step_losses plain | cut -d ' ' -f 2 | paste -sd ' ')
    [ "$images" = "24 24 24 24 6" ] || {
        echo "101 images on 3 ranks with 8 each: expected steps of 24 24 24 24 6 images, found $images"
        return 1
    }
    [ "$(hash_of plain)" = "$(hash_of again)" ] || {
        echo "two equal runs have other weights: sums must be taken in the same order each time"
        return 1
    }
    [ "$(hash_of plain)" = "$(hash_of after)" ] || {
        echo "with --overlap off the weights differ from those with --overlap on"
        return 1
    }
    same_steps plain small 1e-4 && sends small 3 62006 &&
        trained few cnn --replicas 3 --limit-train 2 --batch-size 4 --epochs 1
}

# ---- Test 10

run_folders() {
    local said world iterations one=$from/runs/lab08-one name
    said=$(bash "$home/labs/check/runs.sh" 8 10 "$from") || { set -- $? && echo "$said" && return "$1"; }
    read -r world iterations <<<"$said"
    for name in ddp dp; do
        same_steps "$one" "$from/runs/lab08-$name" .01 $((2 * iterations)) || return
    done
    sends "$from/runs/lab08-ddp" "$world" 1199882 && master_receives "$from/runs/lab08-dp" "$world"
}

# master_receives FOLDER RANKS: dp's master receives the gradients of the others, which receive its parameters
master_receives() {
    awk -F , -v run="$1" -v ranks="$2" -v bytes=$((1199882 * 4)) '
        NR > 1 { want = ($3 == 0 ? ranks - 1 : 1) * bytes }
        NR > 1 && ($16 < .99 * want || $16 > 1.2 * want) {
            printf "%s/steps.csv: rank %s has %s bytes in step %s, expected about %d\n", run, $3, $16, $2, want
            exit 1
        }' "$1/steps.csv"
}
