#!/usr/bin/env bash
# Tests labs/tools/scaling_model.py: run folders made up here, whose alpha and beta are known, and a
# real pair. The expected milliseconds are worked out by hand. No real time has a bound.
# CNN=PATH: another binary. Prints `pass scaling_model/NAME`, `fail ...` or `skip ...`.
suite=scaling_model
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
if ! command -v python3 >/dev/null; then
    skip all "python3 is not installed"
    exit 0
fi

# model ARGUMENTS...: runs it on folders of $tmp; then $status, $out, $err and the table $tmp/csv
model() {
    (cd "$tmp" && python3 "$repo/labs/tools/scaling_model.py" --csv csv "$@") >"$out" 2>"$err" </dev/null
    status=$?
}

# cell N COLUMN: in the table of the last run
cell() {
    awk -F, -v n="$1" -v name="$2" 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == name) c = i }
        NR > 1 && $1 == n { print $c; exit }' "$tmp/csv"
}

error() { one_error scaling_model "$@"; }

# make_run DIR N BUCKETS COMM_MS BATCH BYTES [OVERLAP]: forward 10 ms, backward 20, load 1 for 64
# images; optimizer 2, other 1, exposed 5 if N > 1. All ranks but the last wait 30 ms for it, in comm_s.
# With warm-up, short batches as at the ends of epochs, and a lame step, which a median passes over.
make_run() {
    local dir=$tmp/$1 mode=ddp
    mkdir -p "$dir"
    [ "$2" = 1 ] && mode=single
    cat >"$dir/run.json" <<END
{"emulated": false, "machine": {"host": "made-up", "cpu": "none", "device": "cpu"},
 "settings": {"model": "mnist", "width": 6, "stem": "3", "optimizer": "adadelta", "kernels": "fast",
              "threads": 1, "bucket-mb": 25, "overlap": ${7:-true}},
 "parallel": {"mode": "$mode", "world": $2, "batch_per_device": $5, "global_batch": $(($2 * $5)),
              "iterations": 9, "buckets": $3}}
END
    awk -v n="$2" -v comm="$4" -v batch="$5" -v bytes="$6" 'BEGIN {
        print "epoch,step,rank,images,loss,lr,seconds,load_s,copy_s,forward_s,backward_s," \
            "optimizer_s,comm_s,exposed_comm_s,other_s,bytes_sent,warmup"
        for (step = 1; step <= 13; step++)
            for (rank = 0; rank < n; rank++) {
                lame = step <= 3 || step == 5 ? 7 : step > 8 ? 0.1 : 1
                f = lame * 1e-3
                s = f * batch / 64
                exposed = n > 1 ? 0.005 : 0
                printf "1,%d,%d,%d,2.3,1,%.9f,%.9f,0,%.9f,%.9f,%.9f,%.9f,%.9f,%.9f,%.0f,%d\n",
                    step, rank, (step > 8) ? 1 : batch, 31 * s + 3 * f + exposed, s, 10 * s, 20 * s,
                    2 * f, comm * f + 0.03 * (rank < n - 1), exposed, f, 2 * (n - 1) / n * bytes,
                    step <= 3
            }
    }' >"$dir/steps.csv"
}

# Compute 32 ms, with load and other 34; gradients 8 MB, 2 buckets; alpha 100 us, beta 1 GB/s:
#   N = 2: comm = 2 * 2 * 0.1 + 8 = 8.4, exposed = max(4.2, 8.4 - 10) = 4.2
#   N = 4: comm = 2 * 6 * 0.1 + 12 = 13.2, exposed = max(6.6, 13.2 - 10) = 6.6
test_fit() {
    make_run w1 1 0 0 64 8000000
    make_run w2 2 2 8.4 64 8000000
    make_run w4 4 2 13.2 64 8000000
    model w4 w1 w2
    same fit/status "0 " "$status $(cat "$err")"
    line fit/network '^alpha 100\.00 us per message, beta 1\.000 GB/s: least squares over 2 runs$'
    line fit/gradients '^Weak scaling, gradients 8\.000 MB$'
    near formula/step_1 34 "$(cell 1 step_ms)"
    near formula/comm_2 8.4 "$(cell 2 comm_ms)"
    near formula/exposed_2 4.2 "$(cell 2 exposed_ms)"
    near formula/step_2 38.2 "$(cell 2 step_ms)"
    near formula/comm_4 13.2 "$(cell 4 comm_ms)"
    near formula/exposed_4 6.6 "$(cell 4 exposed_ms)"
    near formula/step_4 40.6 "$(cell 4 step_ms)"
    near formula/efficiency_4 0.837438 "$(cell 4 efficiency)"
    near measured/step_4 39 "$(cell 4 step_measured_ms)"
    near measured/comm_4 13.2 "$(cell 4 comm_measured_ms)"
    near measured/error_4 4.10256 "$(cell 4 error_percent)"
    near measured/efficiency_4 0.871795 "$(cell 4 efficiency_measured)"
    # 1024: 2 * 2046 * 0.1 + 2 * 1023 / 1024 * 8 = 409.2 + 15.984375; hidden are 10
    near projection/step_1024 449.184375 "$(cell 1024 step_ms)"
    same projection/labels "8 64 1024" "$(awk -F, '$15 == "projection" { print $1 }' "$tmp/csv" | xargs)"
    same projection/unmeasured "" "$(cell 8 step_measured_ms)$(cell 8 efficiency_measured)"
    line projection/sentence '^projection: not measured'
    same projection/alpha_known 0 "$(grep -c '^With alpha = 0' "$out")"
    model w1 w2
    line projection/alpha_0 '^With alpha = 0 it ignores the latency'
    model w1 w2 --project ''
    line fit/one_run '^alpha 0\.00 us per message, beta 0\.952 GB/s: alpha set to 0, since one run, .* determine beta only'
    same projection/none "0" "$(grep -c projection "$out")"
    # 5 buckets instead of 2: 6 messages more, 0.6 ms
    make_run w2b 2 5 9 64 8000000
    model w2 w2b
    line fit/bucket_sizes '^alpha 100\.00 us per message, beta 1\.000 GB/s: least squares over 2 runs$'
    # more buckets, less time: no alpha explains that
    make_run w2c 2 5 5 64 8000000
    model w2 w2c
    line fit/negative '^alpha 0\.00 us .* over 2 runs gave a negative value'
}

# Given: alpha 50 us, beta 2 GB/s. 16 MB, 4 buckets, N = 4: comm = 4 * 6 * 0.05 + 1.5 * 8 = 13.2,
# exposed = max(3.3, 13.2 - 15) = 3.3; at beta 0.5 GB/s comm = 49.2, exposed = 49.2 - 15 = 34.2
test_given() {
    local given=(--alpha-us 50 --gradient-mb 16)
    make_run g4 4 4 1 64 8000000
    model g4 "${given[@]}" --gb-per-s 2
    near given/comm 13.2 "$(cell 4 comm_ms)"
    near given/exposed 3.3 "$(cell 4 exposed_ms)"
    same given/no_base_no_efficiency "" "$(cell 4 efficiency_measured)"
    line given/said ': given, not measured here$'
    model g4 "${given[@]}" --gb-per-s 0.5
    near given/exposed_slow 34.2 "$(cell 4 exposed_ms)"
    make_run g4 4 4 1 64 8000000 false
    model g4 "${given[@]}" --gb-per-s 2
    near given/overlap_off 13.2 "$(cell 4 exposed_ms)"
    # One device: 60 MB in buckets of 25 make 1 + 59 / 25, which is 4
    model w1 --alpha-us 50 --gb-per-s 2 --gradient-mb 60 --project 2
    same given/buckets 4 "$(cell 2 buckets)"
    model w1 --alpha-us 50
    holds given/one_of_two "exit 2, 'found one'" "$status $(cat "$err")" grep -q 'found one$' "$err"
    model w1 --gb-per-s -1 --alpha-us 1
    same given/negative 2 "$status"
}

# 128 images: compute 62, with load and other 65; on 2 devices 64 each: 32 and 34
test_strong() {
    make_run s1 1 0 0 128 8000000
    make_run s2 2 2 8.4 64 8000000
    model --strong s1 s2 --project 4,100
    near strong/step_1 65 "$(cell 1 step_ms)"
    near strong/compute_2 32 "$(cell 2 compute_ms)"
    # the fit knows beta alone; comm and what is exposed are as above
    near strong/step_2 38.2 "$(cell 2 step_ms)"
    near strong/efficiency_2 0.850785 "$(cell 2 efficiency)"
    near strong/efficiency_measured_2 0.833333 "$(cell 2 efficiency_measured)"
    same strong/images_4 32 "$(cell 4 images_per_device)"
    line strong/no_multiple '^No projection for 100 devices: 128 images'
    model s1 s2
    error strong/as_weak s2 "expected 128 images of each device as in s1" "found 64"
    model --strong w1 w2
    error strong/weak_as_strong w2 "--global-batch"
}

# refuse NAME SED WORDS...: w2 with that change to both files is refused
refuse() {
    rm -rf "$tmp/bad"
    cp -r "$tmp/w2" "$tmp/bad"
    sed -i "$2" "$tmp/bad/run.json" "$tmp/bad/steps.csv"
    model w1 bad
    error "refused/$1" "bad" "${@:3}"
}

test_refused() {
    refuse emulated 's/"emulated": false/"emulated": true/' emulated "times mean nothing"
    refuse dp 's/"mode": "ddp"/"mode": "dp"/' "mode dp"
    refuse column 's/comm_s,exposed/seconds_of_comm,exposed/' "bad/steps.csv" "none named comm_s;"
    refuse half_line '19s/,2\.3,.*/,2.3/' "bad/steps.csv, line 19" "an incomplete line"
    refuse no_steps 's/,0$/,1/' "bad/steps.csv" "none among 13 steps" --limit-train
    refuse half_the_ranks '/^1,[0-9]*,1,/d' "none among 13 steps"
    refuse other_network 's/mnist/cifar/' "same network"
    refuse no_entry 's/"world"/"ranks"/' "bad/run.json" "'world'"
    refuse no_json 's/^{/[/' "bad/run.json" JSON
    model w1 nowhere
    error refused/no_folder "nowhere/run.json" "No such file" "--out DIR"
    model w1
    error refused/one_device w1 --gradient-mb
    rm -rf "$tmp/bad"
    cp -r "$tmp/w2" "$tmp/bad"
    sed -i 's/made-up/another/' "$tmp/bad/run.json"
    model w1 bad
    line noted/machine "^Note: bad ran on .*'another'"
    model w1 w2 --csv nowhere/csv
    error refused/csv nowhere/csv "No such file"
}

test_real_runs() {
    local n measured
    for n in 1 2; do
        run --no-cuda --replicas $n --oversubscribe --threads $n --dataset synthetic --limit-train 1280 \
            --limit-test 64 --epochs 1 --out "$tmp/real$n"
        same "real/run_$n" 0 "$status"
    done
    model real1 real2
    same real/status "0 " "$status $(cat "$err")"
    line real/gradients '^Weak scaling, gradients 4\.800 MB$' # 1199882 parameters of 4 bytes
    same real/buckets 2 "$(cell 2 buckets)" # fc2 and fc1, more than 1 MB; the convolutions
    for n in 1 2; do
        measured=$(cell $n step_measured_ms)
        holds "real/measured_$n" "a time" "$measured" at_least "$measured" 1e-6
        line "real/row_$n" "^ +$n +64 .* run real$n\$"
    done
}

test_fit
test_given
test_strong
test_refused
test_real_runs
exit 0
