# Lab 9: the warm-up; then the run folders of three studies, whose tables are computed again, and some of
# whose runs are repeated. check.sh reads this.
# shellcheck shell=bash disable=SC2119,SC2154 # check.sh exports home, from and work
# shellcheck source=labs/check/run_folders.sh
. "$home/labs/check/run_folders.sh"

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

build() { "${CC:-gcc}" -std=gnu17 -g -w labs/check/lab09.c -o rates -lm -lpthread; }
program() { [ -x cnn ] || "${CC:-gcc}" -std=gnu17 -O1 -w cnn.c -o cnn -lm -lpthread; } # which few tests need

run() {
    case $1 in
    1) ./rates warmup ;;
    2) ./rates after ;;
    3) study_complete && return_token ;;
    4) study_comparable && return_token ;;
    5) study_table && return_token ;;
    6) study_repeated && return_token ;;
    7) one_core && return_token ;;
    8) batches && return_token ;;
    9) hours_table && return_token ;;
    esac
}
return_token() { cat >&9; }

study="make study-scaling RUNS=runs/lab09 BATCH=64 EPOCHS=2 LIMIT=3200 REPEATS=5 OPTIONS='--dataset synthetic'"
core="make build/cnn-O0; make ablation RUNGS=slurm/configs/one-core.txt RUNS=runs/lab09/core MODEL=cifar BATCH=64 EPOCHS=2 LIMIT=256 REPEATS=5 OPTIONS='--no-cuda --dataset synthetic'"
large="make ablation RUNGS=slurm/configs/large-batch.txt RUNS=runs/lab09/batches MODEL=cifar EPOCHS=6 LIMIT=3200 REPEATS=5 OPTIONS='--no-cuda --dataset synthetic'"

# folders STUDY: the names of the run folders directly in it
folders() {
    local file
    for file in "$from/runs/$1"/*/run.json; do
        [ ! -f "$file" ] || basename "$(dirname "$file")"
    done
}

# open_again NAME COMMAND: open_run(), which reads a run.json only once
open_again() {
    run=runs/$1 folder=$from/runs/$1 command=$2 flat=$work/$1.flat
    [ -s "$flat" ] || open_run "$1" "$2"
}

# each STUDY COMMAND CHECK...: calls CHECK for each of its run folders, which is then the open one
each() {
    local name study=$1 count=0
    mkdir -p "$work/$study"
    for name in $(folders "$study"); do
        open_again "$study/$name" "$2" && "${@:3}" || return
        count=$((count + 1))
    done
    command=$2
    [ $count -gt 0 ] || complain "runs/$study: no run folders there"
}

# What the tables are made of: world, batch of each, global batch, seed, seconds, images, threads, wall time, accuracy
row() {
    local totals
    totals=$(awk -F , 'NR == 1 { for (i = 1; i <= NF; i++) c[$i] = i; next }
        { seconds += $c["seconds"]; images += $c["images"]; accuracy = $c["accuracy"] }
        END { print seconds, images, accuracy }' "$folder/epochs.csv")
    awk -F '\t' -v name="${run##*/}" -v totals="$totals" '
        { value[$1] = $2 }
        END {
            split(totals, total, " ")
            print name, value["parallel.world"], value["parallel.batch_per_device"], value["parallel.global_batch"],
                value["settings.seed"], total[1], total[2], value["settings.threads"], value["resources.wall_s"],
                total[3], value["machine.device"]
        }' "$flat"
}

measured_run() { complete && counts && machine_card; }

# ---- Tests 3 to 6: the scaling study

study_complete() {
    each lab09 "$study" measured_run || return
    each lab09 "$study" row >rows
    awk '
        { key = $2 " " $3 " " $4; if (!seen[key " " $5]++) seeds[key]++; world[key] = $2; batch[key] = $3; all[key] = $4 }
        END {
            for (one in seeds)
                if (world[one] == 1) {
                    ones++
                    need("one device, " batch[one] " images", seeds[one])
                    for (k in seeds)
                        if (world[k] > 1) {
                            most = world[k] > most ? world[k] : most
                            if (all[k] == batch[one]) { strong++; need(world[k] " devices, strong scaling", seeds[k]) }
                            else if (batch[k] == batch[one]) { weak++; need(world[k] " devices, weak scaling", seeds[k]) }
                        }
                }
            if (ones != 1) say("found " ones + 0 " different batches on one device; expected one")
            if (!strong || strong != weak)
                say("found " strong + 0 " numbers of devices with strong scaling and " weak + 0 " with weak scaling; expected as many of both, at least one")
            exit bad
        }
        function need(what, count) { if (count < 5) say(what ": found " count " seeds, expected 5") }
        function say(what) { print "runs/lab09: " what; bad = 1 }' rows ||
        complain "a mean of fewer repeats says nothing about the spread"
}

# What must be equal in all runs of a study, but for the keys given
facts() {
    awk -F '\t' '$1 ~ /^(settings|build)\./ || $1 ~ /^machine\.(cpu|device)$/' "$1" |
        grep -vE "^settings\.(out|quiet|seed|save-model|test-batch-size$2)	" | sort
}

# like_first KEYS: the open run has the facts of the first one
like_first() {
    local other
    [ -s "$work/first.flat" ] || cp "$flat" "$work/first.flat"
    other=$(diff <(facts "$work/first.flat" "$1") <(facts "$flat" "$1") | sed -n 's/^[<>] //p' | cut -f 1 | sort -u)
    [ -z "$other" ] || complain "$run differs from another run of the study also in $(paste -sd ' ' <<<"$other"), so a difference in speed has more than one possible cause"
}

own_times() {
    local times other
    times=$(cut -d , -f 7 "$folder/steps.csv" | cksum)
    other=$(sed -n "s|^$times ||p" "$work/times")
    [ -z "$other" ] || { complain "$run and $other have exactly the same times: one is a copy of the other"; return 1; }
    echo "$times $run" >>"$work/times"
}

study_comparable() {
    rm -f "$work/first.flat" && : >"$work/times"
    each lab09 "$study" like_first '|replicas|gpus|threads|batch-size|global-batch' && each lab09 "$study" own_times
}

study_table() {
    [ -f "$from/runs/lab09/scaling.csv" ] || { command=$study; complain "runs/lab09/scaling.csv: missing"; return 1; }
    each lab09 "$study" row >rows || { cat rows; return 1; }
    (cd "$from" && awk "$table_awk"'
        NR == FNR {
            key = $2 " " $3 " " $4; n[key]++; sum[key] += $6; images[key] = $7
            if ($2 == 1) one = key
            next
        }
        FNR == 1 { FS = ","; $0 = $0; for (i = 1; i <= NF; i++) c[$i] = i; next }
        {
            key = $c["devices"] " " $c["batch"] " " $c["global_batch"]
            what = $c["scaling"] " scaling, devices: " $c["devices"]
            if (!n[key]) { print FILENAME ": " what ": there are no such runs"; bad = 1; next }
            rows++
            mean = sum[key] / n[key]
            near(what ", repeats", n[key], $c["repeats"])
            near(what ", seconds_mean", mean, $c["seconds_mean"])
            near(what ", speedup", (images[key] / mean) / (images[one] / (sum[one] / n[one])), $c["speedup"])
            near(what ", efficiency", (images[key] / mean) / (images[one] / (sum[one] / n[one])) / $c["devices"], $c["efficiency"])
        }
        END {
            for (key in n) if (key != one) wanted++
            wanted += 2 # one device, in both kinds
            if (!bad && rows != wanted) { print FILENAME ": expected " wanted " rows, found " rows + 0; bad = 1 }
            exit bad
        }' "$work/rows" runs/lab09/scaling.csv) || { command="$study"; complain "the table does not belong to these run folders: the same command writes it again"; }
}

# repeated: three steps of the open run, by the checker, with as many replicas, have the same losses and rates
repeated() {
    local key number arguments=()
    is settings.dataset synthetic "the lab uses the images that cnn generates" &&
        is settings.model cifar "the lab trains the network cifar" || return 1
    for key in settings.limit-train settings.seed settings.lr settings.momentum settings.gamma settings.warmup-epochs \
        settings.epochs parallel.global_batch parallel.world; do
        number=$(value $key)
        [[ $number =~ ^[0-9.]{1,9}$ ]] || { complain "$run/run.json: $key should be a number, found ${number:-nothing}"; return 1; }
        key=${key#*.} && key=${key/global_batch/global-batch}
        arguments+=("--${key/world/replicas}" "$number")
    done
    rm -rf own
    program || return
    timeout 200 ./cnn --no-cuda --oversubscribe --model cifar --dataset synthetic --max-steps 3 --limit-test 1 \
        "${arguments[@]}" --out own >own.log 2>&1 </dev/null 9>&- || { tail -n 2 own.log; return 1; }
    paste -d ' ' <(step_losses own) <(step_losses "$folder") <(rates_of own) <(rates_of "$folder") | head -n 3 |
        awk -v run="$run" '
            NF != 8 || $2 != $5 || !near($3, $6) || !near($7, $8) {
                printf "%s/steps.csv: step %s (epoch,step) has %s images, loss %s, lr %s; repeated by the checker: %s, %s, %s\n",
                    run, $1, $5, $6, $8, $2, $3, $7
                exit 1
            }
            function near(a, b) { return a - b <= .01 * a && b - a <= .01 * a }' ||
        complain "the same images, seed and settings give the same losses on every machine"
}
rates_of() { awk -F , 'NR > 1 && $3 == 0 { print $6 }' "$1/steps.csv"; }

study_repeated() {
    local name chosen
    chosen=$({ folders lab09 | grep -m 1 -v '1-b'; folders lab09 | shuf -n 2; } | sort -u | head -n 2)
    mkdir -p "$work/lab09"
    command=$study
    [ -n "$chosen" ] || complain "runs/lab09: no run folders there" || return
    for name in $chosen; do
        open_again "lab09/$name" "$study" && repeated || return
    done
}

# ---- Tests 7 and 8: ladders

# rung NUMBER: the names of its run folders, in the study in $ladder
rung() { folders "$ladder" | grep -E -- "-rung$1-"; }

# ladder_of STUDY COMMAND KEYS...: rung k + 1 differs from rung k in the k-th of KEYS alone; five seeds each
ladder_of() {
    local k=1 key name last='' other count
    ladder=$1
    : >"$work/times"
    each "$1" "$2" measured_run && each "$1" "$2" own_times && each "$1" "$2" named_by_seed || return
    for key in first "${@:3}"; do
        count=$(rung "$k" | sed 's/.*-r//' | sort -u | wc -l) # study.py gives repeat r the seed r
        [ "$count" -ge 5 ] || { complain "runs/$1, rung $k: found $count seeds, expected 5"; return 1; }
        name=$(rung "$k" | sort | head -n 1)
        open_again "$1/$name" "$2" || return
        if [ "$key" != first ]; then
            other=$(diff <(facts "$last" '|none') <(facts "$flat" '|none') | sed -n 's/^[<>] //p' | cut -f 1 | sort -u |
                grep -vE '^settings\.batch-size$' | paste -sd ' ')
            [ "$other" = "$key" ] || {
                complain "$run differs from rung $((k - 1)) in ${other:-nothing}; expected: in $key alone"
                return 1
            }
        fi
        last=$flat
        k=$((k + 1))
    done
}

named_by_seed() { is settings.seed "${run##*-r}" "repeat r of a rung has the seed r"; }

# ladder_table COMMAND: speeds and accuracies in ablation.csv follow from the run folders
ladder_table() {
    local file=runs/$ladder/ablation.csv
    [ -f "$from/$file" ] || { complain "$file: missing"; return 1; }
    each "$ladder" "$1" speed_of >speeds || return
    (cd "$from" && awk "$table_awk"'
        NR == FNR {
            if ($2 == "speed") speed[$1, ++count[$1]] = $3
            else { sum[$1] += $3; n[$1]++ }
            next
        }
        FNR == 1 { FS = ","; $0 = $0; for (i = 1; i <= NF; i++) c[$i] = i; next }
        {
            k++
            near("img_per_s of rung " $1, median(k), $c["img_per_s"])
            near("times_first of rung " $1, median(k) / median(1), $c["times_first"])
            near("accuracy of rung " $1, sum[k] / n[k], $c["accuracy"])
        }
        END { for (r in n) rungs++; if (!bad && k != rungs) { print FILENAME ": expected " rungs " rows, found " k + 0; bad = 1 }; exit bad }' "$work/speeds" "$file") || { command=$1; complain "the table does not belong to these run folders: the same command writes it again"; }
}
# The open run: lines `RUNG speed IMG_PER_S` of its epochs but the first, and `RUNG accuracy PERCENT`
speed_of() {
    local number=${run##*-rung}
    awk -F , -v rung="${number%%-*}" 'NR > 2 { print rung, "speed", $2 / $3 } END { print rung, "accuracy", accuracy }
        NR == 1 { for (i = 1; i <= NF; i++) c[$i] = i } NR > 1 { accuracy = $c["accuracy"] }' "$folder/epochs.csv"
}

# All rungs have the losses of the first one, seed by seed: faster code computes the same.
same_as_first() {
    local name
    name=$(rung 1 | grep -E -- "-r$(value settings.seed)\$")
    same_losses "$from/runs/$ladder/$name/steps.csv" "on the first rung, with this seed"
}

one_core() {
    ladder_of lab09/core "$core" build.flags settings.kernels settings.threads || return
    open_again "lab09/core/$(rung 1 | head -n 1)" "$core" || return
    [[ $(value build.flags) = *-O0* ]] || { complain "$run/run.json: build.flags should have -O0, found $(value build.flags)"; return 1; }
    is settings.threads 1 "the first rungs use one core" && is settings.kernels naive "the first rungs compute by the definition" &&
        each lab09/core "$core" same_as_first && ladder_table "$core"
}

batches() {
    local name
    ladder_of lab09/batches "$large" settings.global-batch settings.lr settings.warmup-epochs || return
    name=$(rung 4 | shuf -n 1)
    open_again "lab09/batches/$name" "$large" && repeated && ladder_table "$large"
}

# ---- Test 9

hours_table() {
    local folder_of
    rm -f rows
    command="labs/tools/study.py hours runs/lab09"
    [ -f "$from/runs/lab09/hours.csv" ] || { complain "runs/lab09/hours.csv: missing"; return 1; }
    for folder_of in lab09 lab09/core lab09/batches; do
        each "$folder_of" "$command" true || return
        each "$folder_of" "$command" row >>rows
    done
    (cd "$from" && awk "$table_awk"'
        NR == FNR { hours[$NF == "cpu" ? "core" : "GPU"] += ($NF == "cpu" ? $2 * $8 : $2) * $9 / 3600; next }
        FNR == 1 { FS = ","; $0 = $0; for (i = 1; i <= NF; i++) c[$i] = i; next }
        $1 == "sum" { near("the sum of all " $c["unit"] " hours", hours[$c["unit"]], $c["hours"]); seen[$c["unit"]] = 1 }
        END { for (unit in hours) if (!seen[unit]) { print FILENAME ": no sum of the " unit " hours"; bad = 1 }; exit bad }' \
        "$work/rows" runs/lab09/hours.csv) || complain "runs have been added or changed since: the same command writes the table again"
}
