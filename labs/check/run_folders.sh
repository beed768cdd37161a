# Checks of run folders for labs 0, 2, 3 and 6 to 9, sourced by their labNN.sh. Numbers have to be consistent with
# each other. What is missing or wrong is printed on stdout.
# shellcheck shell=bash disable=SC2154 # check.sh exports home, from and work; run() reads token

# complain WHAT: prints what is wrong and the command that makes the run, and fails
complain() {
    echo "$1"
    echo "run: $command"
    return 1
}

# open_run NAME COMMAND: reads $from/runs/NAME, which COMMAND has made
open_run() {
    run=runs/$1 folder=$from/runs/$1 command=$2 flat=$work/${1//\//-}.flat
    [ -d "$folder" ] || { complain "$run: there is no such folder in $from"; return 1; }
    local file said
    for file in run.json epochs.csv steps.csv; do
        [ -f "$folder/$file" ] || { complain "$run/$file: missing"; return 1; }
    done
    if ! said=$(awk -f "$home/labs/check/json.awk" "$folder/run.json" 2>&1 >"$flat"); then
        complain "$run/run.json is not valid JSON, $said; was it truncated or edited?"
    fi
}

# value KEY: the value of a key such as settings.epochs in run.json
value() { awk -F '\t' -v key="$1" '$1 == key { print $2 }' "$flat"; }

# is KEY EXPECTED WHY: run.json has this value
is() {
    local found
    found=$(value "$1")
    [ "$found" = "$2" ] || complain "$run/run.json: $1 should be $2, found ${found:-nothing}: $3"
}

# The run is complete, has trained as its settings say, and was measured.
complete() {
    is status complete "the run was stopped or has failed" &&
        is provenance measured "only your own measurements count" &&
        is emulated false "the emulator's times mean nothing" &&
        is settings.dry-run false "a dry run trains one batch only" &&
        is settings.eval false "an evaluation trains nothing" &&
        is settings.resume false "a resumed run has only the times since its checkpoint" &&
        is settings.max-steps 0 "the run ended before the epoch did" && same_command
}

# same_command: the options of the command in run.json are those of its settings; of an option given twice the last
same_command() {
    awk -F '\t' -v run="$run" '
        BEGIN { n = split("model dataset limit-train epochs seed threads workers kernels augment profile layers parallel precision", names, " ")
            for (i = 1; i <= n; i++) compared[names[i]] = 1 }
        /^settings\./ { setting[substr($1, 10)] = $2 }
        /^command\[/ { word[++words] = $2 }
        $1 == "parallel.world" && $2 > 1 { delete compared["threads"] } # replicas share what the command gives
        function given(name, value) { if (name in compared && name in setting) last[name] = value }
        END {
            for (i = 2; i <= words; i++)
                if (match(word[i], /^--[a-z-]+=/))
                    given(substr(word[i], 3, RLENGTH - 3), substr(word[i], RLENGTH + 1))
                else if (word[i] ~ /^--/)
                    given(substr(word[i], 3), i < words && word[i + 1] !~ /^--/ ? word[i + 1] : "on")
            for (name in last) {
                found = setting[name] == "true" ? "on" : setting[name] == "false" ? "off" : setting[name]
                if (found != last[name] && found + 0 != last[name] + 0 || (found != last[name] && found !~ /^[0-9]/)) {
                    if (last[name] == "auto") continue
                    printf "%s/run.json: its command has --%s %s, but settings.%s is %s\n", run, name, last[name], name, found
                    bad = 1
                }
            }
            exit bad
        }' "$flat" || complain "$run/run.json contradicts itself: was it edited?"
}

# own_times FOLDERS...: the open run is no copy of one of these: two runs never have the same times, to the microsecond,
# in half of their steps
own_times() {
    local other
    for other; do
        other=${other%/}
        if [ "$other" = "$folder" ] || [ ! -f "$other/steps.csv" ]; then continue; fi
        paste -d ' ' <(cut -d , -f 7 "$other/steps.csv") <(cut -d , -f 7 "$folder/steps.csv") 2>/dev/null |
            awk 'NR > 1 && NF == 2 { rows++; same += $1 == $2 } END { exit rows > 3 && 2 * same >= rows }' || {
            complain "$run and $(basename "$other") have the same times: one is a copy of the other"
            return 1
        }
    done
}

# counts.awk with the settings of the run
count() {
    awk -F , -v run="$run" -v epochs="$(value settings.epochs)" -v n="$(value settings.limit-train)" \
        -v batch="$(value parallel.global_batch)" -v world="$(value parallel.world)" \
        -v iterations="$(value parallel.iterations)" -f "$home/labs/check/counts.awk" \
        "$@" 2>&1 || complain "the numbers of $run contradict each other: was a file edited or replaced?"
}

# Epochs, steps and images; throughput x time; the loss of an epoch against those of its steps.
counts() { count "$folder/epochs.csv" "$folder/steps.csv"; }

# losses FILE: the first three steps' losses in a steps.csv
losses() { awk -F , 'NR > 1 && NR <= 4 { print $5 }' "$1"; }

# same_losses FILE WHAT: the run's first losses equal those of FILE, a steps.csv, up to rounding
same_losses() {
    losses "$1" | paste -d , - <(losses "$folder/steps.csv") | awk -F , -v what="$2" -v run="$run" '
        $1 == "" { next } # the checker trains one epoch only
        { compared = 1; d = $1 - $2; if (NF != 2 || $2 !~ /^[0-9.]+(e[-+]?[0-9]+)?$/ || d > .01 * $1 || d < -.01 * $1) {
            printf "%s/steps.csv: the loss of step %d should be %s, as %s; found %s\n",
                run, NR, $1, what, ($2 == "" ? "nothing" : $2); exit 1 } }
        END { if (!compared) { print "found no losses to compare with"; exit 1 } }' ||
        complain "the same images and initial weights give the same losses on every machine"
}

# step_losses FOLDER: of each step, the mean over the images of all ranks
step_losses() {
    awk -F , 'NR > 1 { key = $1 "," $2; sum[key] += $4 * $5; images[key] += $4 }
        NR > 1 && !seen[key]++ { order[++count] = key }
        END { for (i = 1; i <= count; i++) print order[i], images[order[i]], sum[order[i]] / images[order[i]] }' \
        "$1/steps.csv"
}

# retrain OPTIONS...: a short training by the checker with the run's images, batches and seed, in the folder own
# shellcheck disable=SC2120 # its options are optional
retrain() {
    local key number arguments=()
    is settings.dataset synthetic "the lab uses the images that cnn generates" &&
        is settings.model mnist "the lab trains the network mnist" || return 1
    for key in limit-train batch-size seed; do
        number=$(value "settings.$key")
        [[ $number =~ ^[0-9]{1,9}$ ]] || {
            complain "$run/run.json: settings.$key should be a number, found ${number:-nothing}"
            return 1
        }
        arguments+=("--$key" "$number")
    done
    ./cnn --no-cuda --dataset synthetic "${arguments[@]}" --max-steps 3 --epochs 1 --limit-test 1 \
        --threads 1 --out own "$@" >own.log 2>&1 || { cat own.log; return 1; }
}

# machine_card: run.json says on which machine it was measured
machine_card() {
    local key
    for key in host cpu device; do
        [[ $(value "machine.$key") =~ [A-Za-z0-9] ]] || {
            complain "$run/run.json: machine.$key is empty"
            return 1
        }
    done
    for key in cores memory_bytes peak_gflops; do
        # cnn_kernels.c measures the peak; ./cnn without it has naive kernels only
        [ "$key:$(value machine.$key):$(value settings.kernels)" = peak_gflops:null:naive ] && continue
        awk -v x="$(value "machine.$key")" 'BEGIN { exit !(x + 0 > 0) }' || {
            complain "$run/run.json: machine.$key should be above 0, found $(value "machine.$key")"
            return 1
        }
    done
    [ -n "$(value build.compiler)" ] || complain "$run/run.json: build.compiler is empty"
}

# send_token: the last step of a passed test
send_token() { echo "$token" >&9; }

# Functions for awk programs that read what the run folders say, then the table that a study has written of them.
# near(): the table's number is the wanted one, within 0.2 %; median(r): of speed[r, 1] to speed[r, count[r]]
# shellcheck disable=SC2034 # labs 7 and 9 read it
table_awk='
    function near(what, wanted, found,    d) {
        d = wanted - found
        if (found == "" || d > .002 * wanted + 1e-9 || d < -.002 * wanted - 1e-9) {
            printf "%s: %s should be %.6g, found %s\n", FILENAME, what, wanted, (found == "" ? "nothing" : found)
            bad = 1
        }
    }
    function median(r,    i, j, x) {
        for (i = 2; i <= count[r]; i++)
            for (j = i; j > 1 && speed[r, j] < speed[r, j - 1]; j--) {
                x = speed[r, j]; speed[r, j] = speed[r, j - 1]; speed[r, j - 1] = x
            }
        i = int((count[r] + 1) / 2)
        return count[r] % 2 ? speed[r, i] : (speed[r, i] + speed[r, i + 1]) / 2
    }'
