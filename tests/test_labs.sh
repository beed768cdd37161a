#!/usr/bin/env bash
# The labs, as a student and as a teacher use them. For each lab that is there: its starter builds without
# warnings and scores what it should, the solution scores full marks, the handout's commands run and
# print what they promise, and each wrong answer in tests/labs/ is caught. And no starter holds an answer.
#
#   tests/test_labs.sh [LAB...]     QUICK=1: one wrong answer for each TODO, and no handout but lab 0's
#
# tests/labs/0N/ID-what_is_wrong   instead of what stands between the markers of ID;
#                                  the first line is a comment `// expect: REGEX` of what make check says.
#                                  ID-cheat_...: none of the tests that need ID may pass
# tests/labs/0N/NAME/edit, expect  labs of run folders: what a shell does in runs/, and the REGEX
suite=labs
# shellcheck source=tests/lib.sh
. "$(dirname "$0")/lib.sh"
export NO_CUDA=1 NO_MPI=1 OMP_WAIT_POLICY=passive # a machine with nvcc compiles for minutes
unset MAKEFLAGS MAKELEVEL
python3=$(command -v python3)

# gcc, but a program with the same sources and options is built once only: most of the checker's time.
real_gcc=$(command -v gcc)
mkdir "$tmp/bin" "$tmp/built"
cat >"$tmp/bin/gcc" <<END
#!/usr/bin/env bash
out= last=
for word; do
    [ "\$last" != -o ] || out=\$word
    [ "\$word" != - ] || exec $real_gcc "\$@"
    last=\$word
done
[ -n "\$out" ] && [ -f cnn.c ] || exec $real_gcc "\$@"
key=$tmp/built/\$({ echo "\$@"; cat cnn.c cnn_kernels.cu tests/*.h labs/check/*.[ch]; } 2>&1 | sha1sum | cut -c1-40)
if [ ! -f "\$key" ]; then
    $real_gcc "\$@" 2>"\$key.said" || { cat "\$key.said" >&2; exit 1; }
    cp "\$out" "\$key.\$\$" && mv "\$key.\$\$" "\$key"
fi
cat "\$key.said" >&2
cp "\$key" "\$out"
END
chmod +x "$tmp/bin/gcc"
PATH=$tmp/bin:$PATH

labs() {
    local n
    for n in 0 1 2 3 4 5 6 7 8 9; do
        [ -f "$repo/labs/check/lab0$n.sh" ] && [ -f "$repo/labs/lab0$n/README.md" ] && echo "$n"
    done
}

# the lab's lines `points|TODOs|title`
list() {
    # shellcheck disable=SC2016 # for the inner shell
    home=$repo bash -c '. "$home/labs/check/lab0$1.sh"; tests' - "$1"
}
full() { list "$1" | awk -F '|' '{ sum += $1 } END { print sum }'; }

starter() { # starter LAB DIR
    make -s --no-print-directory -C "$repo" starter LAB="$1" OUT="$2" >"$tmp/starter$1.log" 2>&1
}

# check LAB HOME FROM FILE [TESTS]: what make check says, in FILE, and FILE.json
check() {
    (cd "$2" && RESULTS=$4.json timeout 280 make --no-print-directory check LAB="$1" FROM="$3" TEST="${5:-}") >"$4" 2>&1
}

# tests_of LAB ID: the numbers of the tests that need it and no other part; if there is none, of all that need it
tests_of() {
    list "$1" | awk -F '|' -v id="$2" '
        $2 == id { own = own " " NR }
        index(" " $2 " ", " " id " ") { all = all " " NR }
        END { print own == "" ? all : own }'
}

# verdicts FILE: lines `passed 3` of what make check has said
verdicts() { sed -nE 's/^(passed|failed|skipped) +[0-9]+\/[0-9]+ +test ([0-9]+):.*/\1 \2/p' "$1"; }

# ---- What a student does

# Copies the solutions of this lab into a starter.
solve() {
    local lab=$1 dir=$2 file id
    rm -rf "$dir.parts" && mkdir "$dir.parts"
    (cd "$repo" && marked "$lab") |
        while read -r file; do
            for id in $(ids "$lab" "$file"); do
                awk -v mode=take -v id="$id" -f "$repo/labs/check/regions.awk" "$repo/$file" >"$dir.parts/$id"
            done
            put "$dir.parts" "$dir/$file"
        done
}
ids() { awk -v mode=list -v lab="$1" -f "$repo/labs/check/regions.awk" "$repo/$2" | cut -d ' ' -f 1; }
put() { # put PARTS FILE
    awk -v mode=put -v dir="$1" -f "$repo/labs/check/regions.awk" "$2" >"$2.new" && mv "$2.new" "$2"
}

# The handout's commands: lines `run COMMAND`, `device COMMAND`, `expect KEY A..B`, `block` where text stands
# between them; what is expected is the last value that the commands since then have printed.
commands() {
    awk '
        /<!-- device -->/ { device = 1; next }
        /<!-- expect / { print "expect", $3, $4; next }
        /^    / {
            line = $0
            sub(/^ +/, "", line)
            if (joined != "") line = joined line
            joined = ""
            bare = line
            while (bare ~ /^[A-Z_]+=[^ ]* /) sub(/^[^ ]* /, "", bare)
            if (bare !~ /^(make|\.\/cnn[a-z-]*|labs\/[^ ]*|slurm\/[^ ]*|mpirun|srun|sbatch|squeue|source|mkdir|cp|cat|head|tail|grep|diff|cut|awk|python3|for [a-z]+ in)( |$)/)
                next
            if (line ~ /\\$/) { joined = substr(line, 1, length(line) - 1); next }
            print (device ? "device" : "run"), line
            next
        }
        /[^ ]/ { device = 0; print "block" }' "$1"
}

# handout LAB DIR: runs them there
handout() {
    local lab=$1 dir=$2 kind command said=$tmp/said$1 wrong=0 count=0
    while read -r kind command; do
        case $kind in
        block) : >"$said" ;;
        expect) within "$command" "$said" || { fail "lab0$lab-handout" "$command" "$(tail -n 3 "$said")"; wrong=1; } ;;
        device) skip "lab0$lab-handout: $command" "it needs a device" ;;
        run)
            count=$((count + 1))
            case $command in sbatch* | srun* | squeue*)
                skip "lab0$lab-handout: $command" "it needs a cluster"
                continue ;;
            esac
            (cd "$dir" && timeout 300 bash -c "$command") >>"$said" 2>&1 </dev/null && continue
            # in the middle of a lab not all points can be there; check_all looks at the end
            [[ $command = make\ check* ]] && grep -q "^lab $lab: .* points" "$said" && continue
            fail "lab0$lab-handout" "success of $command" "$(tail -n 5 "$said")"
            wrong=1 ;;
        esac
    done < <(commands "$repo/labs/lab0$lab/README.md")
    [ $count -gt 0 ] || wrong=1
    holds "lab0$lab-handout" "$count commands that run" "$wrong wrong" [ "$wrong" = 0 ]
}

# within "KEY A..B" FILE: the last KEY=VALUE there
within() {
    local key=${1%% *} range=${1##* } found
    found=$(tr ' ' '\n' <"$2" | sed -n "s/^$key=\([0-9.eE+-]*\).*/\1/p" | tail -n 1)
    awk -v x="$found" -v a="${range%%..*}" -v b="${range##*..}" 'BEGIN { exit !(x != "" && x >= a + 0 && x <= b + 0) }'
}

# ---- One lab

try_lab() {
    local lab=$1 fresh=$tmp/fresh$1 solved=$tmp/solved$1
    starter "$lab" "$fresh" || { fail "lab0$lab-starter" "a starter" "$(cat "$tmp/starter$lab.log")"; return; }
    make -C "$fresh" cnn >"$fresh.log" 2>&1
    same "lab0$lab-starter-builds" "" "$(grep -E 'warning|error|No rule' "$fresh.log")"
    cp -r "$fresh" "$solved"
    solve "$lab" "$solved"
    if [ -z "${QUICK:-}" ] || [ "$lab" = 0 ]; then
        handout "$lab" "$solved"
        check_all "$lab" "$solved"
        cp -r "$solved/runs" "$fresh"
        wrong_runs "$lab" "$solved"
    fi
    check_todos "$lab" "$fresh"
    wrong_answers "$lab" "$solved"
}

# The solution gets all points, also from a teacher's project.
check_all() {
    check "$1" "$repo" "$2" "$2.said"
    holds "lab0$1-solution" "lab $1: $(full "$1")/$(full "$1")" "$(grep -v ^passed "$2.said")" \
        grep -qx "lab $1: $(full "$1")/$(full "$1") points" "$2.said"
    results_json "lab0$1-results.json" "$2.said.json"
}

# In a starter that nobody has touched, the tests that need a TODO fail and say so, and the rest passes.
check_todos() {
    local wrong
    check "$1" "$2" "$2" "$2.said"
    wrong=$(verdicts "$2.said" | awk -v quick="${QUICK:-}" -v lab="$1" '
        NR == FNR { split($0, part, "|"); needs[FNR] = part[2]; next }
        needs[$2] != "-" && $1 != "failed" { print "test", $2, "has", $1, "without", needs[$2] }
        needs[$2] == "-" && $1 == "failed" && (quick == "" || lab == 0) { print "test", $2, "has failed" }
        END { if (FNR != length(needs)) print FNR, "tests of", length(needs) }' <(list "$1") -)
    same "lab0$1-starter-scores" "" "$wrong"
    results_json "lab0$1-starter-results.json" "$2.said.json"
}

results_json() {
    [ -n "$python3" ] || { skip "$1" "python3 is not installed"; return; }
    "$python3" -m json.tool "$2" >/dev/null 2>&1 || { fail "$1" "JSON" "$(head -c 300 "$2")"; return; }
    python "$1" "$2" <<'END'
import json, sys
results = json.load(open(sys.argv[1]))
for test in results["tests"]:
    if not (0 <= test["score"] <= test["max_score"] and test["status"] in ("passed", "failed")
            and isinstance(test["output"], str) and isinstance(test["name"], str)):
        print(test)
    if test["status"] == "failed" and (test["score"] or not test["output"]):
        print("failed, but", test)
if results["score"] != sum(test["score"] for test in results["tests"]):
    print("the sum is", results["score"])
END
}

# ---- Wrong answers

# The k-th wrong answers of all TODOs are tried at once, since each fails tests of its own; those of which the
# sum of all points is expected by themselves.
wrong_answers() {
    local lab=$1 k=1 id file
    local -A answer
    while :; do
        answer=()
        for id in $(answered "$lab"); do
            file=$(find "$repo/tests/labs/0$lab" -maxdepth 1 -type f -name "$id-*" | sort | sed -n "${k}p")
            [ -z "$file" ] || answer[$id]=$file
        done
        [ ${#answer[@]} -gt 0 ] || break
        try_round "$lab" "$tmp/wrong$lab.$k" "${answer[@]}"
        [ -z "${QUICK:-}" ] || break
        k=$((k + 1))
    done
}
answered() { # the TODOs that have wrong answers
    find "$repo/tests/labs/0$1" -maxdepth 1 -type f -name "$1.*-*" -printf '%f\n' 2>/dev/null | sed 's/-.*//' | sort -u
}

# try_round LAB DIR FILES...
try_round() {
    local lab=$1 dir=$2 file id tests=
    local together=()
    for file in "${@:3}"; do
        id=$(id_of "$file")
        if [[ $(expected "$file") = *points* ]]; then
            try_answers "$lab" "$dir.$id" "" "$file"
            must_be_caught "$lab" "$file" "$dir.$id.said"
        else
            together+=("$file")
            tests+=" $(tests_of "$lab" "$id")"
        fi
    done
    [ ${#together[@]} -gt 0 ] || return
    try_answers "$lab" "$dir" "$tests" "${together[@]}"
    for file in "${together[@]}"; do must_be_caught "$lab" "$file" "$dir.said"; done
}
# must_be_caught LAB FILE SAID: where another answer may have been in the way, alone and by all tests
must_be_caught() {
    local said=$3 dir
    dir=$tmp/$(basename "$2")
    if ! caught "$1" "$2" "$said" && [[ $(expected "$2") != *points* ]]; then
        try_answers "$1" "$dir" "" "$2"
        said=$dir.said
    fi
    holds "lab0$1-wrong/$(basename "$2")" "$(expected "$2")" "$(grep -v '^passed' "$said")" caught "$1" "$2" "$said"
}

# try_answers LAB DIR TESTS FILES...: a solved starter with these answers
try_answers() {
    local lab=$1 dir=$2 file
    cp -r "$tmp/solved$lab" "$dir"
    mkdir "$dir.parts"
    for file in "${@:4}"; do cp "$file" "$dir.parts/$(id_of "$file")"; done
    (cd "$repo" && marked "$lab") | while read -r file; do put "$dir.parts" "$dir/$file"; done
    LIMIT_S=40 check "$lab" "$repo" "$dir" "$dir.said" "$3" # some of them wait for ever
    rm -rf "$dir"
}
marked() { grep -lE "/\* LAB $1\.[0-9]+ BEGIN" cnn.c cnn_kernels.cu labs/lab*/* 2>/dev/null; }
id_of() { basename "$1" | sed 's/-.*//'; }
expected() { sed -n '1s/.*expect: //p' "$1"; }

# caught LAB FILE SAID: a test that needs its TODO fails, with the words expected; after a cheat, all its own do
caught() {
    local id failed of
    id=$(id_of "$2")
    failed=$(verdicts "$3" | awk '$1 == "failed" { print $2 }')
    of=$(list "$1" | awk -F '|' -v id="$id" 'index(" " $2 " ", " " id " ") { print NR }')
    grep -qxF "$of" <<<"$failed" && [ -n "$(expected "$2")" ] && grep -qE -- "$(expected "$2")" "$3" || return 1
    [[ $2 != *cheat* ]] || [ -z "$(comm -23 <(tests_of "$1" "$id" | tr ' ' '\n' | sed '/^$/d' | sort) \
        <(sort <<<"$failed"))" ]
}

# Wrong run folders: the right ones, edited.
wrong_runs() {
    local lab=$1 folder name dir
    for folder in "$repo/tests/labs/0$lab"/*/; do
        [ -f "$folder/edit" ] || continue
        name=$(basename "$folder") dir=$tmp/runs$lab-$(basename "$folder")
        mkdir "$dir" && cp -r "$2/runs" "$dir"
        (cd "$dir/runs" && bash -e "$folder/edit") || fail "lab0$lab-runs/$name" "an edit that works" "none"
        check "$lab" "$repo" "$dir" "$dir.said" && fail "lab0$lab-runs/$name" "not all points" "all points"
        holds "lab0$lab-runs/$name" "$(cat "$folder/expect")" "$(grep -v ^passed "$dir.said")" \
            grep -qE -- "$(cat "$folder/expect")" "$dir.said"
        [ -z "${QUICK:-}" ] || break
    done
}

# ---- No starter holds an answer

# squeeze FILES...: their lines without spaces, the long ones
squeeze() { cat "$@" | tr -d ' \t' | awk 'length > 25' | sort -u; }

# answers LAB: the lines that stand only in regions of labs LAB to 9
answers() {
    (cd "$repo" && for file in cnn.c cnn_kernels.cu $(grep -lE '/\* LAB [0-9]+\.[0-9]+ BEGIN' labs/lab*/* 2>/dev/null); do
        awk -v from="$1" -v inside="$tmp/inside$1" -v outside="$tmp/outside$1" '
            /\/\* LAB [0-9]+\.[0-9]+ BEGIN/ { split($3, id, "."); open = id[1] >= from }
            { print >(open ? inside : outside) }
            /\/\* LAB [0-9]+\.[0-9]+ END/ { open = 0 }
            END { print "" >inside }' "$file"
        mv "$tmp/inside$1" "$tmp/in.$1.${file//\//_}" && mv "$tmp/outside$1" "$tmp/out.$1.${file//\//_}"
    done)
    # also no part of a line outside, or of what a starter gets instead, such as a function's first line
    squeeze "$tmp/in.$1".* | grep -v '^/\*LAB' | awk '
        NR == FNR { text = text $0 "\n"; next }
        !index(text, $0)' <(squeeze "$tmp/out.$1".* "$repo"/labs/stubs/*) -
}

no_answers() {
    local n
    for n in 0 1 2 3 4; do
        starter "$n" "$tmp/bare$n" || { fail "starter$n" "a starter" "$(cat "$tmp/starter$n.log")"; continue; }
        answers "$n" >"$tmp/answers$n"
        if [ ! -s "$tmp/answers$n" ]; then
            skip "starter$n-has-no-answers" "no region of labs $n to 9 is marked yet"
            continue
        fi
        find "$tmp/bare$n" -type f -exec cat {} + | tr -d ' \t' >"$tmp/text$n"
        same "starter$n-has-no-answers" "" "$(grep -F -f "$tmp/answers$n" "$tmp/text$n" | head -n 3)"
    done
    holds answers-are-found "answers of lab 1 in cnn.c" "none" \
        grep -qF -f "$tmp/answers1" <(tr -d ' \t' <"$repo/cnn.c")
}

# ---- What teachers do

# A student's checker, Makefile and instruments are not used: nothing but parts and run folders count.
own_checker() {
    local dir=$tmp/own
    starter 0 "$dir"
    printf '#!/bin/sh\necho "lab 0: 10/10 points"\n' >"$dir/labs/check/check.sh"
    printf 'check:\n\t@echo "lab 0: 10/10 points"\n' >"$dir/Makefile"
    printf 'tests() { echo "10|-|all is well"; }\nbuild() { :; }\nrun() { cat >&9; }\n' >"$dir/labs/check/lab00.sh"
    check 0 "$repo" "$dir" "$dir.said"
    same own-checker-counts-nothing "lab 0: 3/10 points" "$(grep '^lab 0' "$dir.said")"
}

gradescope() {
    local root=$tmp/scope/autograder
    mkdir -p "$root/source" "$root/submission/mine"
    make -s --no-print-directory -C "$repo" gradescope LAB=0 OUT="$tmp/scope.zip" >"$tmp/scope.log" 2>&1
    if [ -z "$python3" ] || [ ! -f "$tmp/scope.zip" ]; then
        holds gradescope "a zip" "$(cat "$tmp/scope.log")" [ -f "$tmp/scope.zip" ]
        return
    fi
    (cd "$root/source" && "$python3" -m zipfile -e "$tmp/scope.zip" .)
    cp "$root/source/run_autograder" "$root"
    cp -r "$tmp/solved0/runs" "$root/submission/mine"
    (cd "$root" && PREFIX=$tmp/scope bash ./run_autograder) >"$tmp/scope.log" 2>&1
    holds gradescope "10 points" "$(tail -n 3 "$tmp/scope.log")" \
        grep -q '^{"score": 10, "tests"' "$root/results/results.json"
    results_json gradescope-results.json "$root/results/results.json"
    rm -r "$root/source/labs/check"
    (cd "$root" && PREFIX=$tmp/scope bash ./run_autograder) >"$tmp/scope.log" 2>&1
    results_json_says=$(cat "$root/results/results.json")
    same gradescope-says-that-it-broke '{"score": 0, "output": "The tests could not be run: tell your teacher."}' \
        "$results_json_says"
}

# Both files have one command for each test, and the lab's points.
classroom() {
    local n workflow
    for n in $(labs); do
        workflow=$tmp/bare$n/.github/workflows/classroom.yml
        same "lab0$n-workflow" "$(list "$n" | awk -F '|' -v n="$n" '{ print "make check LAB=" n " TEST=" NR }')" \
            "$(sed -n 's/^        run: \(.* TEST=.*\)/\1/p' "$workflow")"
        [ -z "$python3" ] || same "lab0$n-classroom-points" "$(full "$n")" "$("$python3" -c '
import json, sys
print(sum(test["points"] for test in json.load(open(sys.argv[1]))))' "$tmp/bare$n/labs/classroom/tests.json")"
    done
}

wanted=${*:-$(labs)}
# Two at a time, as most of it keeps one core busy; labs 1 and 4 have the most wrong answers.
lane() {
    local n
    for n; do [[ " ${wanted//$'\n'/ } " != *" $n "* ]] || try_lab "$n"; done
}
lane 4 1 &
lane 0 2 3 5 6 7 8 9
no_answers
classroom
[[ " $(tr '\n' ' ' <<<"$wanted")" != *" 0 "* ]] || { own_checker && gradescope; }
wait
