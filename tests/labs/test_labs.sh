#!/usr/bin/env bash
# The labs, as students and teachers use them. For each lab: its starter builds without warnings and has the
# right score, the solution has all points, the commands of the handout run and print what it says, and each
# wrong answer in tests/labs/wrong/ is detected. No starter contains an answer.
#
#   tests/labs/test_labs.sh [LAB...]     if none is named, lab 0 and a quarter of the others, others each day
#                                        (LONG=1: all)
#                                        QUICK=1: if none is named, lab 0 and another one each day; the starters of all
#                                        compile, and the pictures of these labs are drawn. The handout of lab 0 is run
#                                        up to its first check, the other handouts are not. One wrong answer is tried
#                                        for each TODO of labs 1, 4, 5, 8, 9, 10 and for one of lab 3. Where the points
#                                        of lab 0 are not what is tested, its test 2, which trains, is left out
#                                        LONG=1: all wrong answers, instead of a seventh, another one each day
#   tests/labs/test_labs.sh CASE...      only these wrong answers, such as 3.1-forgets_quit
#
# tests/labs/wrong/lab03.txt has the wrong answers to lab 3; tests/README.md says what a case consists of.
suite=labs
# shellcheck source=tests/lib.sh
. "$(dirname "$0")/../lib.sh"
export NO_CUDA=1 NO_MPI=1 # a machine with nvcc compiles for minutes
unset MAKEFLAGS MAKELEVEL
python3=$(command -v python3)

# A program with the same sources and options is built only once, which saves most of the checker's time.
# shellcheck source=tests/compile_once.sh
. "$repo/tests/compile_once.sh"
[ -n "${COMPILED:-}" ] || compile_once "$tmp/compiled" || exit 1
export NO_OPTIMIZATION= # 1: -O0 instead of -O3
if [ -n "${QUICK:-}" ]; then # the commit is the same in all programs, so that more of them are
    mkdir "$tmp/quick"
    cat >"$tmp/quick/gcc" <<END
#!/usr/bin/env bash
set -- "\${@/#-DCNN_COMMIT=*/-DCNN_COMMIT=\"quick\"}"
[ -z "\${NO_OPTIMIZATION:-}" ] || set -- "\${@/#-O3/-O0}"
exec $(type -P gcc) "\$@"
END
    chmod +x "$tmp/quick/gcc"
    PATH=$tmp/quick:$PATH
fi

# shellcheck source=labs/check/available.sh
. "$repo/labs/check/available.sh"
labs() { (cd "$repo" && available); }

# the lab's lines `points|TODOs|title`
list() {
    # shellcheck disable=SC2016 # for the inner shell
    home=$repo bash -c '. "$home/labs/check/$1.sh"; tests' - "$(lab_name "$1")"
}
full() { list "$1" | awk -F '|' '{ sum += $1 } END { print sum }'; }

starter() { # starter LAB DIR
    make -s --no-print-directory -C "$repo" starter LAB="$1" OUT="$2" >"$tmp/starter$1.log" 2>&1
}

# check LAB HOME FROM FILE [TESTS]: writes the output of make check to FILE, and the points to FILE.json
check() {
    (cd "$2" && RESULTS=$4.json timeout 280 make --no-print-directory check LAB="$1" FROM="$3" TEST="${5:-}") >"$4" 2>&1
}

# tests_of LAB ID: the numbers of the tests that need this part only; if there are none, of all that need it
tests_of() {
    list "$1" | awk -F '|' -v id="$2" -v quick="${QUICK:+$1}" '
        $2 == id { own = own " " NR }
        quick == 3 && NR > 7 || quick == 4 && NR == 6 { next } # race detectors and trainings
        index(" " $2 " ", " " id " ") { all = all " " NR }
        END { print own == "" ? all : own }'
}

# verdicts FILE: lines `passed 3` from the output of make check
verdicts() { sed -nE 's/^(passed|failed|skipped) +[0-9]+\/[0-9]+ +test ([0-9]+):.*/\1 \2/p' "$1"; }

# ---- What a student does

# Copies the solutions of this lab into a starter.
solve() {
    local file
    (cd "$repo" && marked "$1") | while read -r file; do put "$tmp/parts/$1" "$2/$file"; done
}
# take_parts LAB: the solution of each of its parts to $tmp/parts/3/3.1
take_parts() {
    local file id
    mkdir -p "$tmp/parts/$1"
    (cd "$repo" && marked "$1") |
        while read -r file; do
            for id in $(ids "$1" "$file"); do
                awk -v mode=take -v id="$id" -f "$repo/labs/check/regions.awk" "$repo/$file" >"$tmp/parts/$1/$id"
            done
        done
}
ids() { awk -v mode=list -v lab="$1" -f "$repo/labs/check/regions.awk" "$repo/$2" | cut -d ' ' -f 1; }
put() { # put PARTS FILE
    awk -v mode=put -v dir="$1" -f "$repo/labs/check/regions.awk" "$2" >"$2.new" && mv "$2.new" "$2"
}

# The commands of a handout: lines `run COMMAND`, `device COMMAND`, `data COMMAND` (where Fashion-MNIST and matplotlib
# are installed), `homework COMMAND` (tests/labs/test_seeds.sh does the homework), `expect KEY A..B`, and `block` for text between them. Each expect checks the last value that the commands of its block have printed.
commands() {
    awk '
        BEGIN { kind = "run" }
        /<!-- device -->/ { kind = "device"; next }
        /<!-- data -->/ { kind = "data"; next }
        /<!-- homework -->/ { kind = "homework"; next }
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
            sub(/^for i in 1 2 3; /, "for i in 1; ", line) # repeats cost time, and test nothing
            # of the tests of single parts only the first: make check LAB=n, later, runs all of them
            if (line ~ /^make check LAB=[0-9]+ TEST=/ && checked++) next
            print kind, line
            next
        }
        /[^ ]/ { kind = "run"; print "block" }' "$1"
}

# handout LAB DIR: runs them there
handout() {
    local lab=$1 dir=$2 kind command said=$tmp/said$1 wrong=0 count=0 absent=
    while read -r kind command; do
        if [ "$kind" = data ]; then
            kind=run
            { [ -d /usr/share/datasets/fashion-mnist ] && has_matplotlib; } || kind=no-data absent=yes
        fi
        case $kind in
        block) : >"$said" && absent= ;;
        expect) [ -n "$absent" ] || within "$command" "$said" || { fail "$(lab_name "$lab")-handout" "$command" "$(tail -n 3 "$said")"; wrong=1; } ;;
        device) skip "$(lab_name "$lab")-handout: $command" "it needs a device" ;;
        homework) skip "$(lab_name "$lab")-handout: $command" "it is homework; tests/labs/test_seeds.sh does it" ;;
        no-data) skip "$(lab_name "$lab")-handout: $command" "it needs Fashion-MNIST and matplotlib" ;;
        run)
            [[ -z ${QUICK:-} || $command != make\ check* ]] || break
            count=$((count + 1))
            case $command in sbatch* | srun* | squeue*)
                skip "$(lab_name "$lab")-handout: $command" "it needs a cluster"
                continue ;;
            esac
            (cd "$dir" && timeout 900 bash -c "$command") >>"$said" 2>&1 </dev/null && continue
            # in the middle of a lab a check has not all points yet; check_all() checks the end
            [[ $command = make\ check* ]] && grep -q "^lab $lab: .* points" "$said" && continue
            [[ $command = make\ verify* ]] && grep -q '^Findings: ' "$said" && continue # verify_runs() looks at them
            fail "$(lab_name "$lab")-handout" "success of $command" "$(tail -n 5 "$said")"
            wrong=1 ;;
        esac
    done < <(commands "$repo/labs/$(lab_name "$lab")/README.md")
    [ $count -gt 0 ] || wrong=1
    holds "$(lab_name "$lab")-handout" "$count commands that run" "$wrong wrong" [ "$wrong" = 0 ]
}

has_matplotlib() { python3 -c 'import matplotlib' 2>/dev/null || /usr/bin/python3 -c 'import matplotlib' 2>/dev/null; }

# within "KEY A..B" FILE: the last KEY=VALUE there
within() {
    local key=${1%% *} range=${1##* } found
    found=$(tr ' ' '\n' <"$2" | sed -n "s/^$key=\([0-9.eE+-]*\).*/\1/p" | tail -n 1)
    awk -v x="$found" -v a="${range%%..*}" -v b="${range##*..}" 'BEGIN { exit !(x != "" && x >= a + 0 && x <= b + 0) }'
}

# ---- One lab

try_lab() {
    local lab=$1 fresh=$tmp/fresh$1 solved=$tmp/solved$1
    starter "$lab" "$fresh" || { fail "$(lab_name "$lab")-starter" "a starter" "$(cat "$tmp/starter$lab.log")"; return; }
    # where ./cnn is only built and not used
    NO_OPTIMIZATION=$([ -z "${QUICK:-}" ] || [ "$lab" = 0 ] || echo 1)
    make -C "$fresh" cnn "OPT=$([ -n "${QUICK:-}" ] && echo -O3 || echo -O1)" >"$fresh.log" 2>&1
    same "$(lab_name "$lab")-starter-builds" "" "$(grep -E 'warning|error|No rule' "$fresh.log")"
    cp -r "$fresh" "$solved"
    solve "$lab" "$solved"
    if [ -z "${QUICK:-}" ] || [ "$lab" = 0 ]; then
        handout "$lab" "$solved"
        check_all "$lab" "$solved"
        verify_runs "$lab" "$solved"
        cp -r "$solved/runs" "$fresh"
        wrong_runs "$lab" "$solved"
    fi
    [ "${QUICK:-}" ] || [ "$lab" != 10 ] || refuses_tensor "$fresh"
    check_todos "$lab" "$fresh"
    wrong_answers "$lab" "$solved"
    [ "${QUICK:-}" ] || ! graded "$lab" || grade_class "$lab" "$solved"
}

# The starter of lab 10 has no kernel for tensor cores, and says so; it trains with the others.
refuses_tensor() {
    local kernels
    make -s --no-print-directory -C "$1" emulate OPT=-O1 EMU_OPT=-O0 >"$1.emulate" 2>&1
    for kernels in tiled tensor; do
        (cd "$1" && ./cnn-emu --model lenet --dataset synthetic --limit-train 8 --limit-test 8 --epochs 1 --batch-size 8 \
            --kernels $kernels --quiet) >"$1.$kernels" 2>&1
        echo "exit $?" >>"$1.$kernels"
    done
    same lab10-trains-with-tiled "exit 0" "$(tail -n 1 "$1.tiled")"
    same lab10-refuses-tensor "--kernels tensor: the starter of lab 10 has no such kernel exit 2" \
        "$(grep -oE -- '--kernels tensor: the starter of lab 10 has no such kernel|^exit .*' "$1.tensor" | xargs)"
}

# The solution gets all points when a teacher grades it from the project.
check_all() {
    ! lacks_python "$1" || { skip "$(lab_name "$1")-solution" "python3, which reads run folders, is not installed"; return; }
    check "$1" "$repo" "$2" "$2.said"
    holds "$(lab_name "$1")-solution" "lab $1: $(full "$1")/$(full "$1")" "$(grep -v ^passed "$2.said")" \
        grep -qx "lab $1: $(full "$1")/$(full "$1") points" "$2.said"
    results_json "$(lab_name "$1")-results.json" "$2.said.json"
}

# lacks_python LAB: whether the lab's run folders cannot be read here
lacks_python() { [ -z "$python3" ] && grep -q runs.sh "$repo/labs/check/$(lab_name "$1").sh"; }

# graded LAB: whether it comes to the grade book, one in four times; of_today() takes four days for all labs
graded() { [ -n "${LONG:-}" ] || [ $((($1 + $(day) / 4) % 4)) -eq 0 ]; }

# grade_class LAB SOLVED: the grade book of two students, of whom one has handed in the starter as it was.
grade_class() {
    local lab=$1 class=$tmp/class$1
    [ -n "$python3" ] || { skip "$(lab_name "$lab")-grade-book" "python3 is not installed"; return; }
    mkdir "$class"
    starter "$lab" "$class/starter"
    cp -r "$class/starter" "$class/idle"
    cp -r "$2" "$class/solved"
    (cd "$class/solved" && rm -rf build cnn cnn-* run) # which git ignores
    (cd "$repo" && LIMIT_S=280 labs/grade --lab "$lab" --starter "$class/starter" --again 1 --seed 1 \
        --isolation "$(bwrap --ro-bind / / true 2>/dev/null && echo bwrap || echo limits)" --out "$class/grades" "$class/solved" "$class/idle") >"$class/said" 2>&1
    # shellcheck disable=SC2016 # awk's
    holds "$(lab_name "$lab")-grade-book" "all points for who solved it, fewer for who did not, who has no flag" \
        "$(cat "$class/grades/gradebook.csv" "$class/said")" awk -F , -v full="$(full "$lab")" '
        $1 == "solved" && $3 == full || $1 == "idle" && $3 != "" && $3 < full && $5 == "" { good++ }
        END { exit !(NR == 3 && good == 2) }' "$class/grades/gradebook.csv"
    same "$(lab_name "$lab")-grade-flags" "" "$(grep -E '^solved: [a-z ]+: ' "$class/said" |
        grep -vE "$(noise "$lab")")"
}

# noise LAB: a REGEX of what a busy machine can make of honest runs: peaks that are too low, and in lab 9 wide intervals and
# a device that is slower than half of two, or two that are slower than half of one; its report lacks plots where there is no matplotlib.
noise() { echo "/layers[.]csv: $([ "$1" != 9 ] || echo '|a speed-up of at|a 95 % interval of|plots')"; }

# make verify has nothing to say about the runs of the handout.
verify_runs() {
    [ "$1" != 5 ] || return 0 # it has no run folders
    [ -n "$python3" ] || { skip "$(lab_name "$1")-verify" "python3 is not installed"; return; }
    # the report of lab 9 as a student has answered it
    if [ -f "$2/runs/lab09/report.md" ]; then
        sed -i 's/^> TODO:.*/An answer. ![a plot](plots\/scaling.png)/' "$2/runs/lab09/report.md"
        make -s --no-print-directory -C "$2" report RUNS=runs/lab09 PLOT=true >"$2.report" 2>&1
    fi
    make -s --no-print-directory -C "$2" verify RUNS=runs >"$2.verify" 2>&1
    holds "$(lab_name "$1")-verify-reads-runs" "runs: ..., checked as separate runs" "$(cat "$2.verify")" \
        grep -q '^runs: [0-9]* run folders, checked as separate runs$' "$2.verify"
    same "$(lab_name "$1")-verify" "" "$(grep -E '(: expected |error: )' "$2.verify" | grep -vE "$(noise "$1")")"
}

# most_tests LAB: under QUICK, those that neither train nor build a race detector; otherwise none, for all
most_tests() { list "$1" | awk -v quick="${QUICK:+$1}" 'quick == 0 && NR != 2 || quick == 4 && NR != 6 { print NR }' | xargs; }

# In an unchanged starter, the tests that need a TODO fail, and the others pass.
check_todos() {
    local wrong
    check "$1" "$2" "$2" "$2.said" "$(most_tests "$1")"
    wrong=$(verdicts "$2.said" | awk -v quick="${QUICK:-}" -v lab="$1" '
        NR == FNR { split($0, part, "|"); needs[FNR] = part[2]; next }
        needs[$2] != "-" && $1 != "failed" { print "test", $2, "has", $1, "without", needs[$2] }
        needs[$2] == "-" && $1 == "failed" && (quick == "" || lab == 0) { print "test", $2, "has failed" }
        END { if (FNR != length(needs) && !(quick != "" && (lab == 0 || lab == 4))) print FNR, "tests of", length(needs) }' <(list "$1") -)
    same "$(lab_name "$1")-starter-scores" "" "$wrong"
    results_json "$(lab_name "$1")-starter-results.json" "$2.said.json"
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

wrong_file() { echo "$repo/tests/labs/wrong/$(lab_name "$1").txt"; } # wrong_file LAB
cases_of() { sed -n 's/^case //p' "$(wrong_file "$1")"; }
# case_lines LAB CASE KEY: the lines of this case that begin with KEY, without it
case_lines() {
    awk -v name="$2" -v key="$3 " '
        /^case / { inside = $2 == name }
        inside && index($0, key) == 1 { print substr($0, length(key) + 1) }' "$(wrong_file "$1")"
}
expected() { case_lines "$1" "$(basename "$2")" expect; } # expected LAB CASE

# The wrong answers of all labs to $tmp/answers. An edit that does not fit the solution has failed.
make_answers() {
    local lab name why
    mkdir "$tmp/answers"
    for lab in $(labs); do
        take_parts "$lab"
        while IFS=': ' read -r name why; do
            fail "$(lab_name "$lab")-wrong/$name" "an edit of the solution" "$why"
        done < <(awk -v parts="$tmp/parts/$lab" -v out="$tmp/answers" \
            -f "$repo/tests/labs/wrong/answers.awk" "$(wrong_file "$lab")")
    done
    same wrong-answers-made "$(cat "$repo"/tests/labs/wrong/*.txt | grep -c '^case [0-9]')" \
        "$(find "$tmp/answers" -type f | wc -l)"
}

# The k-th wrong answers of all TODOs are tried together, since each fails different tests; those that expect a
# sum of points are tried alone.
wrong_answers() {
    local lab=$1 k=1 id file
    local -A answer
    while :; do
        answer=()
        for id in $(answered "$lab"); do
            [ -z "${QUICK:-}" ] || [ "$id" != 3.2 ] || continue
            # under QUICK no cheat of lab 4: those take the race detector
            file=$(find "$tmp/answers" -name "$id-*" | sort |
                awk -v quick="${QUICK:-}" 'quick == "" || !/\/4[.].-cheat/' | sed -n "${k}p")
            [ -z "$file" ] || answer[$id]=$file
        done
        [ ${#answer[@]} -gt 0 ] || break
        [ "${QUICK:-}" ] || share $k 7 || { k=$((k + 1)) && continue; }
        try_round "$lab" "$tmp/wrong$lab.$k" "${answer[@]}"
        [ -z "${QUICK:-}" ] || break
        k=$((k + 1))
    done
}
# the TODOs that have wrong answers
answered() { find "$tmp/answers" -name "$1.*-*" -printf '%f\n' | sed 's/-.*//' | sort -u; }

# try_round LAB DIR FILES...
try_round() {
    local lab=$1 dir=$2 file id tests=
    local together=()
    for file in "${@:3}"; do
        id=$(id_of "$file")
        if [[ $(expected "$lab" "$file") = *points* ]]; then
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
# must_be_caught LAB FILE SAID: if it was not caught together with others, tries it alone, with all tests
must_be_caught() {
    local said=$3 dir
    dir=$tmp/$(basename "$2")
    if ! caught "$1" "$2" "$said" && [[ $(expected "$1" "$2") != *points* ]]; then
        try_answers "$1" "$dir" "" "$2"
        said=$dir.said
    fi
    holds "$(lab_name "$1")-wrong/$(basename "$2")" "$(expected "$1" "$2")" "$(grep -v '^passed' "$said")" \
        caught "$1" "$2" "$said"
}

# try_case CASE: one wrong answer alone
try_case() {
    local lab=${1%%.*}
    [ -f "$tmp/answers/$1" ] || { fail "$1" "a case in $(wrong_file "$lab")" "none that can be tried"; return; }
    [ -d "$tmp/solved$lab" ] || { starter "$lab" "$tmp/solved$lab" && solve "$lab" "$tmp/solved$lab"; }
    try_round "$lab" "$tmp/alone.$1" "$tmp/answers/$1"
}

# try_answers LAB DIR TESTS FILES...: a solved starter with these answers
try_answers() {
    local lab=$1 dir=$2 file
    cp -r "$tmp/solved$lab" "$dir"
    mkdir "$dir.parts"
    for file in "${@:4}"; do cp "$file" "$dir.parts/$(id_of "$file")"; done
    (cd "$repo" && marked "$lab") | while read -r file; do put "$dir.parts" "$dir/$file"; done
    LIMIT_S=40 check "$lab" "$repo" "$dir" "$dir.said" "$3" # some of them never end
    rm -rf "$dir"
}
marked() { grep -lE "/\* LAB( [0-9.]+)* $1\.[0-9]+( [0-9.]+)* BEGIN" cnn.c cnn_kernels.cu labs/lab*/* 2>/dev/null; }
id_of() { basename "$1" | sed 's/-.*//'; }

# caught LAB FILE SAID: a test that needs its TODO fails with the expected words; for a cheat, all such tests
caught() {
    local id failed of words
    id=$(id_of "$2")
    words=$(expected "$1" "$2")
    failed=$(verdicts "$3" | awk '$1 == "failed" { print $2 }')
    of=$(list "$1" | awk -F '|' -v id="$id" 'index(" " $2 " ", " " id " ") { print NR }')
    grep -qxF "$of" <<<"$failed" && [ -n "$words" ] && grep -qE -- "$words" "$3" || return 1
    [[ $2 != *cheat* ]] || [ -z "$(comm -23 <(tests_of "$1" "$id" | tr ' ' '\n' | sed '/^$/d' | sort) \
        <(sort <<<"$failed"))" ]
}

# reading LAB: the tests that read run folders; the others cannot tell a wrong one
reading() {
    case $1 in
        0) echo 3 4 5 6 ;;
        2) echo 1 2 3 4 5 6 7 ;;
        3 | 8) echo 10 ;;
        6) echo 8 ;;
        7) echo 9 10 ;;
        9) echo 3 4 5 6 7 8 9 ;;
    esac
}

# Run folders of the solution, edited so that they are wrong.
wrong_runs() {
    local lab=$1 name dir
    ! lacks_python "$lab" || { skip "$(lab_name "$lab")-runs" "python3 is not installed"; return; }
    for name in $(cases_of "$lab" | grep -v '^[0-9]'); do
        dir=$tmp/runs$lab-$name
        mkdir "$dir"
        # shellcheck disable=SC2046 # a word for each file
        (cd "$2" && cp -r --parents runs $(marked "$lab") "$dir")
        case_lines "$lab" "$name" '$' >"$dir.edit"
        (cd "$dir/runs" && bash -e "$dir.edit") || fail "$(lab_name "$lab")-runs/$name" "an edit that works" "none"
        ! diff -r "$2/runs" "$dir/runs" >"$dir.diff" || fail "$(lab_name "$lab")-runs/$name" "an edit of the runs" "none"
        check "$lab" "$repo" "$dir" "$dir.said" "$(reading "$lab")" && fail "$(lab_name "$lab")-runs/$name" "not all points" "all points"
        holds "$(lab_name "$lab")-runs/$name" "$(expected "$lab" "$name")" "$(grep -v ^passed "$dir.said")" \
            grep -qE -- "$(expected "$lab" "$name")" "$dir.said"
        [ -z "${QUICK:-}" ] || break
    done
}

# ---- No starter holds an answer

# squeeze FILES...: their long lines, without white space
squeeze() { cat "$@" | tr -d ' \t' | awk 'length > 25' | sort -u; }

# answers LAB: the lines that occur only in regions of labs LAB to 10
answers() {
    (cd "$repo" && for file in cnn.c cnn_kernels.c cnn_kernels.cu $(grep -lE '/\* LAB [0-9. ]+ BEGIN' labs/lab*/* 2>/dev/null); do
        awk -v from="$1" -v inside="$tmp/inside$1" -v outside="$tmp/outside$1" '
            /\/\* LAB [0-9. ]+ BEGIN/ { # by the last lab; 10.0 is missing in the starter of lab 10 only
                split($(NF - 3), id, ".")
                open = id[1] >= from && ($(NF - 3) != "10.0" || from == 10)
            }
            { print >(open ? inside : outside) }
            /\/\* LAB [0-9. ]+ END/ { open = 0 }
            END { print "" >inside }' "$file"
        mv "$tmp/inside$1" "$tmp/in.$1.${file//\//_}" && mv "$tmp/outside$1" "$tmp/out.$1.${file//\//_}"
    done)
    # without those that are part of a line outside or in a stub, such as the first line of a function
    squeeze "$tmp/in.$1".* | grep -v '^/\*LAB' | awk '
        NR == FNR { text = text $0 "\n"; next }
        !index(text, $0)' <(squeeze "$tmp/out.$1".* "$repo"/labs/stubs/*) -
}

no_answers() {
    local n
    for n in $(labs); do
        starter "$n" "$tmp/bare$n" || { fail "starter$n" "a starter" "$(cat "$tmp/starter$n.log")"; continue; }
        (cd "$tmp/bare$n" && gcc -std=gnu17 -fsyntax-only -fopenmp -Wall -Wextra -Werror -Wno-unused-function \
            -Wno-unused-parameter -Wno-unused-variable cnn.c) >"$tmp/starter$n.log" 2>&1
        same "starter$n-compiles" "" "$(cat "$tmp/starter$n.log")"
        answers "$n" >"$tmp/answers$n"
        if [ ! -s "$tmp/answers$n" ]; then
            skip "starter$n-has-no-answers" "no region of labs $n to 10 is marked yet"
            continue
        fi
        find "$tmp/bare$n" -type f -exec cat {} + | tr -d ' \t' >"$tmp/text$n"
        same "starter$n-has-no-answers" "" "$(grep -aF -f "$tmp/answers$n" "$tmp/text$n" | head -n 3)"
    done
    same stubs-have-text "" "$(find "$repo/labs/stubs" -type f -empty)"
    holds answers-are-found "answers of lab 1 in cnn.c" "none" \
        grep -qF -f "$tmp/answers1" <(tr -d ' \t' <"$repo/cnn.c")
}

# ---- What teachers do

# A student's checker and Makefile are not used: only parts and run folders count.
own_checker() {
    local dir=$tmp/own
    starter 0 "$dir"
    printf '#!/bin/sh\necho "lab 0: 10/10 points"\n' >"$dir/labs/check/check.sh"
    printf 'check:\n\t@echo "lab 0: 10/10 points"\n' >"$dir/Makefile"
    printf 'tests() { echo "10|-|all is well"; }\nbuild() { :; }\nrun() { cat >&9; }\n' >"$dir/labs/check/lab00.sh"
    check 0 "$repo" "$dir" "$dir.said" "$(most_tests 0)"
    same own-checker-counts-nothing "lab 0: $([ -z "${QUICK:-}" ] && echo 3/10 || echo 1/8) points" "$(grep '^lab 0' "$dir.said")"
}

# In a starter without Python, tests of run folders are skipped, with how to earn their points.
without_python() {
    mkdir "$tmp/no_python" && printf '#!/bin/sh\nexit 127\n' >"$tmp/no_python/python3" && chmod +x "$tmp/no_python/python3"
    PATH=$tmp/no_python:$PATH check 0 "$tmp/fresh0" "$tmp/solved0" "$tmp/no_python.said" "1 4"
    same no-python "passed 1/1 skipped 0/2 to earn these points install python3 and run make check LAB=0 again" \
        "$(grep -oE '^(passed|skipped) +[0-9/]+|to earn these points .*again' "$tmp/no_python.said" | tr -s ' ' | paste -sd ' ')"
}

gradescope() {
    # shellcheck disable=SC2016 # what a student may have named a folder
    local root=$tmp/scope/autograder mine="O'Neil"'s $(touch no) $(shell touch no)'
    mkdir -p "$root/source" "$root/submission/$mine"
    make -s --no-print-directory -C "$repo" gradescope LAB=0 OUT="$tmp/scope.zip" >"$tmp/scope.log" 2>&1
    if [ -z "$python3" ]; then
        skip gradescope "python3 is not installed"
        return
    fi
    (cd "$root/source" && "$python3" -m zipfile -e "$tmp/scope.zip" .)
    cp "$root/source/run_autograder" "$root"
    cp -r "$tmp/solved0/runs" "$root/submission/$mine"
    mkdir -p "$root/submission/__MACOSX/$mine/runs" # as a Mac packs it
    touch "$root/submission/.DS_Store" "$root/submission/$mine/runs/._lab00" "$root/submission/__MACOSX/$mine/._runs"
    chmod 755 "$tmp" # as root, students' code runs as another user
    chmod 700 "$root/submission/$mine"
    (cd "$root" && PREFIX=$tmp/scope bash ./run_autograder) >"$tmp/scope.log" 2>&1
    holds gradescope "10 points" "$(tail -n 3 "$tmp/scope.log")" \
        grep -q '^{"score": 10, "tests"' "$root/results/results.json"
    results_json gradescope-results.json "$root/results/results.json"
    # shellcheck disable=SC2016 # for the checker
    printf '%s\n' 'tests() { echo "1|-|a test"; }' 'build() { :; }' 'run() { id -u >&8; touch "$RESULTS" "$from" || return' \
        '    cat >&9; }' >"$root/source/labs/check/lab00.sh"
    (cd "$root" && PREFIX=$tmp/scope bash ./run_autograder) >"$tmp/scope.log" 2>&1
    if [ "$(id -u)" = 0 ]; then
        holds gradescope-other-user "0 points, as user 65534, who cannot write the results" "$(cat "$root/results/results.json")" \
            grep -q '"output": "65534.n.*touch: ' "$root/results/results.json"
    else
        skip gradescope-other-user "it needs root"
    fi
    rm -r "$root/source/labs/check"
    (cd "$root" && PREFIX=$tmp/scope bash ./run_autograder) >"$tmp/scope.log" 2>&1
    results_json_says=$(cat "$root/results/results.json")
    same gradescope-says-that-it-broke '{"score": 0, "output": "The tests could not be run: tell your teacher."}' \
        "$results_json_says"
}

# A lab without handout and tests is refused by each target that takes LAB, before anything is written.
unavailable_labs() {
    local target lab wanted
    wanted=$(labs | paste -sd ' ')
    for target in starter check gradescope; do
        for lab in 5 7 12 none ''; do
            [[ -z $lab || " $wanted " != *" $lab "* ]] || continue
            RESULTS=$tmp/no_lab make -s --no-print-directory -C "$repo" $target LAB="$lab" \
                OUT="$tmp/no_lab" >"$out" 2>"$err"
            same "$target-refuses-lab-${lab:-without-number}" \
                "2 LAB=$lab: there is no such lab; available: $wanted. Usage: make $target LAB=n" \
                "$? $(grep -o '^LAB=.* LAB=n' "$err")"
        done
    done
    holds refused-labs-write-nothing "no file or folder" "$(ls -d "$tmp/no_lab" 2>&1)" [ ! -e "$tmp/no_lab" ]
}

# The workflow has one command for each test, tests.json also the lab's points.
classroom() {
    local n workflow
    for n in $(labs); do
        workflow=$tmp/bare$n/.github/workflows/classroom.yml
        same "$(lab_name "$n")-workflow" "$(list "$n" | awk -F '|' -v n="$n" '{ print "make check LAB=" n " TEST=" NR }')" \
            "$(sed -n 's/^        run: \(.* TEST=.*\)/\1/p' "$workflow")"
        [ -z "$python3" ] || same "$(lab_name "$n")-classroom-points" "$(full "$n")" "$("$python3" -c '
import json, sys
print(sum(test["points"] for test in json.load(open(sys.argv[1]))))' "$tmp/bare$n/labs/classroom/tests.json")"
    done
}

# The pictures of the handouts exist, and the scripts beside them draw them.
figures() {
    local n picture python script lab scripts
    for n in $(labs); do
        grep -o '(\.\./figures/[^)]*)' "$repo/labs/$(lab_name "$n")/README.md" | tr -d '()'
    done >"$tmp/pictures"
    grep -o '(figures/[^)]*)' "$repo/labs/ideas.md" | tr -d '()' | sed 's|^|../|' >>"$tmp/pictures"
    sort -u -o "$tmp/pictures" "$tmp/pictures"
    while read -r picture; do
        holds "figures/$(basename "$picture")" "a PNG of at most 100 kB" "$(wc -c "$repo/labs/lab00/$picture" 2>&1)" \
            test -n "$(find "$repo/labs/lab00/$picture" -size -100k 2>/dev/null)"
    done <"$tmp/pictures"
    if ! python=$("$repo/tests/python_with.sh" matplotlib); then
        skip figures/drawn "no python3 has matplotlib"
        return
    fi
    scripts=("$repo"/labs/figures/{lab*,ideas}.py)
    if [ -n "${QUICK:-}" ]; then
        scripts=()
        for n in $wanted; do scripts+=("$repo/labs/figures/$(lab_name "$n").py"); done
    fi
    for script in "${scripts[@]}"; do
        lab=$(basename "$script" .py)
        same "figures/$lab-drawn" "$(grep -o "${lab}_.*" "$tmp/pictures" | sort -u | paste -sd ' ')" \
            "$("$python" "$script" "$tmp/figures" 2>&1 | sed 's|.*/||' | sort | paste -sd ' ')"
    done
}

# Under QUICK lab 0 and another one each day; else lab 0 and a quarter of the others, others each day
of_today() {
    local -a all turn=(0 1 0 1 2 3 1 2 3 2 0) # of labs 0 to 10, so that the days have about the same work
    local n
    mapfile -t all < <(labs)
    echo 0
    if [ -n "${QUICK:-}" ]; then
        echo "${all[1 + $(day) % (${#all[@]} - 1)]}"
        return
    fi
    for n in "${all[@]:1}"; do
        ! share "${turn[n]:-$n}" 4 || echo "$n"
    done
}

wanted=${*:-$(of_today)}
if ! command -v g++ >/dev/null; then
    skip labs-4-to-7-and-10 "g++ is not installed, which the emulator of a GPU needs"
    wanted=$(grep -vxE '[4567]|10' <<<"${wanted// /$'\n'}")
fi
make_answers
if [[ $* = *-* ]]; then
    for name; do try_case "$name"; done
    exit 0
fi
# Two lanes, most of whose work keeps one core busy. Each takes the next lab that the other one has not taken.
lane() {
    local n
    for n in $wanted; do
        ! mkdir "$tmp/taken$n" 2>/dev/null || try_lab "$n"
    done
}
lane &
lane
NO_OPTIMIZATION=
unavailable_labs
no_answers
classroom
figures
wait
[ ! -d "$tmp/solved0" ] || { own_checker && without_python && gradescope; }
