#!/usr/bin/env bash
# make check LAB=n [TEST=k] [FROM=dir]: runs the lab's tests on what a student has written and prints
# the points. It writes them to results.json (or RESULTS=file), in the format of Gradescope.
# Exit status 0: all points; 1: not all; 2: the command was wrong.
#
# Only two things of the student's folder are used: the code between the markers, and the run folders
# that a lab requires. The parts are inserted into a separate copy of the sources. They run in a process that has
# nothing but its inputs (apart.h; in labs 6 and 7 trials.h): another one knows what is right, compares, and proves with
# a random token that it has come to its end. TEST_USER=NAME, for root: the user of these processes, so that they cannot
# write the results.
#
# A lab provides labs/check/labNN.sh with
#   tests    lines `points|TODOs that it needs, or -|title`; test k is line k
#   build    compiles the tests in the folder $work, those that are wanted; is called again without
#            the parts that do not compile
#   run K    runs test K; at its very end it sends back the token, which it reads from its input and
#            writes to file descriptor 9. What it writes to descriptor 8 is shown first. Exit status 77: skipped,
#            with the reason
#   vet_part ID   prints what its part must not contain besides what vet() refuses
# build may use bare_sources() and only_harmless_calls(), below.
set -u
export LC_ALL=C
unset MAKEFLAGS MAKELEVEL SLURM_CPUS_PER_TASK CDPATH
# The sanitizers of some compilers fail at random where addresses are randomized, in more bits than they know.
if [ -z "${FIXED_ADDRESSES:-}" ] && setarch -R true 2>/dev/null; then
    FIXED_ADDRESSES=1 exec setarch -R bash "$0" "$@"
fi
home=$(cd "$(dirname "$0")/../.." && pwd) || exit 2
lab=${1:-} only="${*:2}" from=${FROM:-$home} limit=${LIMIT_S:-300}
# shellcheck source=labs/check/available.sh
. "$home/labs/check/available.sh"
(cd "$home" && need_lab "$lab" "make check LAB=n [TEST=k] [FROM=dir]") || exit 2
from=$(cd "$from" && pwd) || exit 2
script=$home/labs/check/$(lab_name "$lab").sh
results=${RESULTS:-$PWD/results.json}
pristine=$home
[ -d "$home/labs/pristine" ] && pristine=$home/labs/pristine
work=$(mktemp -d) && parts=$(mktemp -d) && logs=$(mktemp -d) || exit 2
trap 'rm -rf "$work" "$parts" "$logs"' EXIT
regions=$home/labs/check/regions.awk

wanted() { # wanted K...: whether one of these tests is to run
    local k
    for k; do [[ -z $only || " $only " = *" $k "* ]] && return; done
    return 1
}

vet_part() { :; }
# shellcheck source=/dev/null # of the lab
. "$script"

# The files with markers of this lab, as paths in the project.
marked_files() {
    (cd "$pristine" && grep -lE "/\* LAB( [0-9.]+)* $lab\.[0-9]+( [0-9.]+)* BEGIN" cnn.c cnn_kernels.cu labs/lab*/* 2>/dev/null)
}
todos() { # lines `1.2 name file`
    local file
    for file in $(marked_files); do
        awk -v mode=list -v lab="$lab" -f "$regions" "$pristine/$file" | sed "s|\$| $file|"
    done
}

# vet ID: prints what a part must not contain, since it acts on more than the part when the tests are compiled: a
# brace that ends the function around it; directives other than harmless pragmas, and _Pragma, which change what
# follows or read files; attributes and assembler, which put code and names elsewhere.
vet() {
    awk -f "$home/labs/check/code.awk" "$parts/$1" | awk -v id="$1" '
        function follow_braces(braces,    i) {
            gsub(/[^{}]/, "", braces)
            for (i = 1; i <= length(braces) && depth >= 0; i++)
                depth += substr(braces, i, 1) == "{" ? 1 : -1
        }
        /^[ \t]*#/ && !/^[ \t]*#[ \t]*pragma[ \t]+(omp|unroll|GCC (unroll|ivdep)|clang loop)/ { bad = "`" $1 "`" }
        /(^|[^A-Za-z0-9_])(u8|[uUL])?R""/ { bad = "a raw string" }
        match($0, /(^|[^A-Za-z0-9_])(_Pragma|(__)?asm(__)?|__attribute(__)?)([^A-Za-z0-9_]|$)/) {
            word = substr($0, RSTART, RLENGTH)
            gsub(/[^A-Za-z_]/, "", word)
            bad = "`" word "`"
        }
        (last $0) ~ /\[[ \t]*\[/ { bad = "`[[`" } # an attribute, too
        NF { last = substr($NF, length($NF)) }
        { follow_braces($0) }
        bad != "" {
            print "TODO " id ", line " NR ": found " bad ", which this task has no use for; remove it"
            exit
        }
        depth < 0 { print "TODO " id ": one } too many; the braces of a part must be balanced"; bad = "}"; exit }
        END {
            if (depth > 0 && bad == "")
                print "TODO " id ": one } is missing; the braces of a part must be balanced"
        }'
}

# bare_sources FILES...: the folder bare, with the starter's cnn.c and these files of labs/check
bare_sources() {
    mkdir -p bare/labs/check && cp labs/check/{apart,report}.h "${@/#/labs/check/}" bare/labs/check &&
        awk -v mode=strip -v from="$lab" -v stubs=labs/stubs -f "$regions" cnn.c >bare/cnn.c
}

# uses OBJECT: lines `SECTION NAME`: the functions and variables of the system to which a section of OBJECT refers
uses() {
    objdump -r "$1" | awk -v undefined=" $(nm -u "$1" | awk '{ print $NF }' | paste -sd ' ') " '
        /^RELOCATION RECORDS/ { section = $4 }
        $2 ~ /^R_/ { sub(/[-+]0x[0-9a-f]+$/, "", $3) }
        $2 ~ /^R_/ && index(undefined, " " $3 " ") { print section, $3 }' | sort -u
}

# starters_functions: their names, and others before a parenthesis
starters_functions() {
    cat bare/cnn.c labs/check/*.[ch] labs/lab*/*.c 2>/dev/null | grep -oE '[A-Za-z_][A-Za-z0-9_]*\(' | tr -d '(' | sort -u
}

# not_of_the_starter: of such lines, those of sections that are not functions of the starter outside of the parts
not_of_the_starter() {
    awk -v parts=" $(todos | cut -d ' ' -f 2 | paste -sd ' ') " '
        NR == FNR { starters[$1] = 1; next }
        {
            name = $1
            sub(/^\[\.text\.(unlikely\.)?/, "", name); sub(/\]:$/, "", name)
            nested = name ~ /^[A-Za-z0-9_]+\.[0-9]+/
            sub(/\..*/, "", name)
        }
        nested || !(name in starters) || index(parts, " " name " ")' <(starters_functions) -
}

# only_harmless_calls BARE OBJECT [MORE]: prints which functions and variables of the system OBJECT, compiled with
# the student's parts, uses where BARE, compiled with the starter's stubs, does not; those that compute or print, or
# match the regular expression MORE, are allowed. Both are compiled with $by_function, so that a call counts even if
# cnn.c has it elsewhere. This is for what the parts could do to the files of the tests and in ./cnn, which some tests
# train with; a result does not depend on it. A nested function whose address is taken needs an executable stack, which
# could execute an array, too.
# shellcheck disable=SC2034 # the labs' build() reads it
by_function=(-ffunction-sections -fno-inline)
only_harmless_calls() {
    local names='(mem|str)[a-z]+|v?s?n?f?printf|f?put(s|c|char)|fwrite|fflush|std(out|err)|assert_fail'
    if readelf -SW "$2" | grep -q '\.note\.GNU-stack .* X '; then
        echo "refused: it takes the address of a nested function; define the function outside"
        return 1
    fi
    names+='|(f?(abs|max|min)|exp[2m1]*|log[0-9p]*|sqrt|pow|floor|ceil|round|a?tanh?|fma)[fl]?|i?math_[a-z]+'
    names+='|(GOMP|omp|kmpc)_[a-z0-9_]+|stack_chk_(fail|guard)|calloc|malloc|free'
    names+='|aarch64_(cas|swp|ld[a-z]+)[0-9]+_[a-z_]+' # atomic operations
    comm -13 <(uses "$1") <(uses "$2") | not_of_the_starter | awk '{ print $NF }' | sort -u |
        grep -vE "^_*(isoc[0-9]+_)?($names${3:+|$3})(_chk|_finite)?(@.*)?\$" | paste -sd ' ' |
        awk 'NF { print "refused: it uses " $0 ", which this task has no use for"; bad = 1 } END { exit bad }'
}

mkdir -p "$logs/refused"
# assemble IDS...: the sources in $work, with these of the student's parts
assemble() {
    local file id taken=$logs/taken
    rm -rf "$taken" "$work" && mkdir -p "$taken" "$work" || exit 2
    for id in "$@"; do cp "$parts/$id" "$taken/$id"; done
    cp -r "$home"/{Makefile,data,labs,tests} "$work"
    rm -rf "$work/labs/pristine"
    echo 'CFLAGS += -Wno-unused-parameter -Wno-unused-variable -Wno-unused-function' >"$work/labs/starter.mk"
    for file in cnn.c cnn_kernels.c cnn_kernels.cu $(marked_files); do
        mkdir -p "$work/$(dirname "$file")"
        awk -v mode=strip -v from="$lab" -v stubs="$home/labs/stubs" -v file="$(basename "$file")" \
            -f "$regions" "$pristine/$file" |
            awk -v mode=put -v dir="$taken" -f "$regions" >"$work/$file"
    done
}

# refuse ID WHY: tests that need this part fail, with this reason
refuse() { echo "$2" >"$logs/refused/$1"; }

# part_of FILE ID: the code of a part, without comments
part_of() { awk -v mode=take -v id="$2" -f "$regions" "$1" | awk -f "$home/labs/check/code.awk"; }

# Takes the student's parts; those that equal the starter's stub are not done.
take_parts() {
    local id name file why
    assemble
    while read -r id name file; do
        if [ ! -f "$from/$file" ]; then
            refuse "$id" "there is no $file in $from"
        elif ! why=$(awk -v mode=take -v id="$id" -f "$regions" "$from/$file" 2>&1 >"$parts/$id"); then
            refuse "$id" "$why"
        elif diff -qbB <(part_of "$work/$file" "$id") <(part_of "$from/$file" "$id") >/dev/null; then
            refuse "$id" "TODO $id is not done: $name in $file; see labs/$(lab_name "$lab")/README.md"
        else
            why=$(vet "$id"; vet_part "$id")
            [ -z "$why" ] || refuse "$id" "$why"
        fi
    done < <(todos)
}
accepted() {
    todos | while read -r id _; do [ -f "$logs/refused/$id" ] || echo "$id"; done
}

why_not_built() { # why_not_built ID: from what build has printed
    if grep -q '^refused: ' "$logs/build"; then
        sed -n "s/^refused: it/TODO $1/p" "$logs/build" | head -n 1
    else
        echo "TODO $1 does not compile in the test program, which has of your code only what is between the markers:"
        grep -E 'error|undefined' "$logs/build" | grep -v '^cc1' | awk '!seen[$0]++' | head -n 3
    fi
}

# Builds with all parts, or, if that fails, without those that do not compile by themselves.
build_parts() {
    local id
    # shellcheck disable=SC2046 # one word an id
    assemble $(accepted)
    (cd "$work" && build) >"$logs/build" 2>&1 && return
    for id in $(accepted); do
        assemble "$id"
        (cd "$work" && build) >"$logs/build" 2>&1 || refuse "$id" "$(why_not_built "$id")"
    done
    # shellcheck disable=SC2046
    assemble $(accepted)
    (cd "$work" && build) >"$logs/build" 2>&1 && return
    echo "make check: the tests do not compile:" >&2
    grep -m 5 -E 'error|undefined' "$logs/build" >&2 || tail -n 5 "$logs/build" >&2
    exit 2
}

# run_test K NEEDS: sets verdict to passed, failed or skipped, and said to the reason
run_test() {
    local id token status
    verdict=failed said=
    for id in $2; do
        if [ "$id" != - ] && [ -f "$logs/refused/$id" ]; then
            said=$(cat "$logs/refused/$id")
            return
        fi
    done
    [ -z "${TEST_USER:-}" ] || chown -R "$TEST_USER" "$work"
    token=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
    (cd "$work" && run_limited "$1" <<<"$token" 8>"$logs/verdict" 9>"$logs/token") >"$logs/said" 2>&1
    status=$?
    # without the shell's own line about a signal, which is reported below
    said=$(grep -vE ': line [0-9]+: +[0-9]+ [A-Z]' "$logs/said" | tail -n 40 | cut -c1-400)
    if [ -s "$logs/verdict" ]; then
        [ -z "$said" ] || said="$(printf '\nYour code printed, at the end:\n%s' "$(tail -n 10 <<<"$said")")"
        said=$(head -c 8000 "$logs/verdict")$said
    fi
    if [ "$status" -eq 77 ]; then
        verdict=skipped
    elif [ "$status" -eq 0 ] && [ "$(cat "$logs/token")" = "$token" ]; then
        verdict=passed
    elif [ "$status" -eq 0 ]; then
        said="the test ended before its end; does your code end the program or its thread? $said"
    elif [ "$status" -eq 124 ]; then
        said="stopped after $limit s: an endless loop, or a deadlock? $said"
    elif [ "$status" -gt 128 ]; then
        # the emulator says why; else it is a guess
        [[ $said = *cuda_on_cpu:* ]] || said="an access outside of an array? $said"
        said="ended by signal $((status - 128)) ($(kill -l $((status - 128)))): $said"
    fi
}
run_limited() {
    local as_user=()
    [ -z "${TEST_USER:-}" ] || as_user=(setpriv --reuid "$TEST_USER" --regid "$TEST_USER" --clear-groups --no-new-privs
        --inh-caps=-all --bounding-set=-all --)
    export work from home
    ulimit -f 200000 # kB: a part that prints forever must not fill the disk
    # shellcheck disable=SC2016 # for the inner shell
    "${as_user[@]}" timeout --kill-after=5 "$limit" bash -c '. "$1"; run "$2"' - "$script" "$1"
}

json_string() { # the input as a JSON string
    awk 'BEGIN { printf "\"" }
        { gsub(/\\/, "\\\\"); gsub(/"/, "\\\""); gsub(/\t/, "\\t"); gsub(/[\001-\037\177-\377]/, "?")
          printf "%s%s", (NR > 1 ? "\\n" : ""), $0 }
        END { printf "\"" }'
}

take_parts
build_parts
k=0 sum=0 most=0 lines=
declare -A told # the first test with this reason
while IFS='|' read -r points needs title; do
    k=$((k + 1))
    wanted "$k" || continue
    run_test "$k" "$needs"
    got=0
    [ "$verdict" = passed ] && got=$points
    sum=$((sum + got)) most=$((most + points))
    printf '%-7s %2d/%-2d  test %d: %s\n' "$verdict" "$got" "$points" "$k" "$title"
    [ -z "$said" ] || [ "$verdict" = passed ] || [ -z "${told[$said]:-}" ] || said="as in test ${told[$said]}"
    [ -z "$said" ] || told[$said]=${told[$said]:-$k}
    # shellcheck disable=SC2001 # each line
    [ "$verdict" = passed ] || [ -z "$said" ] || sed 's/^/        /' <<<"$said"
    lines+="${lines:+,
}  {\"number\": \"$k\", \"name\": $(json_string <<<"$title"), \"score\": $got, \"max_score\": $points, \
\"status\": \"${verdict/skipped/failed}\", \"output\": $( { [ "$verdict" != skipped ] || echo "skipped:"
        [ "$verdict" = passed ] || echo "$said"; } | json_string)}"
done < <(tests)
if [ "$most" -eq 0 ]; then
    echo "lab $lab has no test $only; it has $k" >&2
    exit 2
fi
if ! printf '{"score": %d, "tests": [\n%s\n]}\n' "$sum" "$lines" >"$results"; then
    echo "cannot write $results; choose another file with RESULTS=file" >&2
    exit 2
fi
echo "lab $lab: $sum/$most points"
[ "$sum" -eq "$most" ]
