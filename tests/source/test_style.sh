#!/usr/bin/env bash
# Limits that keep the sources readable: length of files, lines and functions, nested blocks, share of
# lines with a comment, words; and what clang-format and shellcheck find. First a violation of each kind
# is planted in a copy, which must be found, beside the longest thing that is allowed, which must not.
# Prints `pass style/NAME`, `fail style/NAME: expected ..., found ...` or `skip style/NAME: why`.
suite=style
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

program=(cnn.c cnn_kernels.c cnn_kernels.cu)
# Of cnn.c before its fast kernels moved to cnn_kernels.c: the two together must have as many comments.
least_comments=944 of_lines=7536

if ! command -v python3 >/dev/null; then
    skip all "python3 is not installed"
    exit 0
fi

# style KIND ARGUMENTS...: prints the violations
style() { python3 "$repo/tests/source/style.py" "$@" 2>&1; }

# density FILE...: "comments of lines", together
density() { "$repo/tests/source/comment_density.sh" "$@" | sed -n 's/^together: \([0-9]* of [0-9]*\) .*/\1/p'; }

# enough COMMENTS of LINES: a share as large as it was
# shellcheck disable=SC2317 # holds calls it
enough() { [ $(($1 * of_lines)) -ge $((least_comments * $3)) ]; }

# ---- Would it notice?

# repeat COUNT TEXT
repeat() { yes "$2" 2>/dev/null | head -n "$1"; }

# function_of LINES: a C function so long
function_of() { echo 'static void planted(void) {' && repeat $(($1 - 2)) '    run();' && echo '}'; }

# nested BLOCKS: a C function with so many blocks in each other, and with braces that are none
nested() {
    local i
    echo 'static void planted(int x) {'
    for ((i = 1; i <= $1; i++)); do printf '%*sif (x) {\n' $((4 * i)) ''; done
    printf '%*sPair p = {\n{1}, {2}};\n' $((4 * i)) ''
    for ((i = $1; i > 0; i--)); do printf '%*s}\n' $((4 * i)) ''; done
    echo '}'
}

# planted NAME COUNT KIND ARGUMENTS... <TEXT: behind the main() of cnn.c, it gives COUNT violations
planted() {
    local name=$1 count=$2
    shift 2
    cat "$tmp/main.c" - >"$tmp/planted.c"
    same "planted/$name" "$count" "$(style "$@" "$tmp/planted.c" | wc -l)"
}

test_planted() {
    local lines words
    sed -n '/^int main/,$p' "$repo/cnn.c" >"$tmp/main.c"
    lines=$(wc -l <"$tmp/main.c")
    repeat 1 '// one more' | planted lines/allowed 0 lines $((lines + 1))
    repeat 2 '// one more' | planted lines/found 1 lines $((lines + 1))
    printf '// %097d\n' 0 | planted columns/allowed 0 columns
    printf '// %098d\n' 0 | planted columns/found 1 columns
    function_of 60 | planted functions/allowed 0 functions
    function_of 61 | planted functions/found 1 functions
    { echo 'extern "C" int *' && function_of 61; } | planted functions/long_head 1 functions
    repeat 61 "#define MACRO \\" | planted functions/macro 1 functions
    nested 4 | planted nesting/allowed 0 nesting
    nested 5 | planted nesting/found 1 nesting
    words="two rooms,Room 4,a turn of the lock,takes turns,by turns,each turn,turns = 3,turns are,dealt out"
    words+=",dealing,a great deal,lest,whoso,have met,is told,were told,for ever,thereof"
    tr , '\n' <<<"$words" | planted words/found 18 words
    words="a broom,roomy,turn it on,turns bytes into numbers,it turns off,returned,in turn,turned out,ideal"
    words+=",metre,forever,tell,a longer return = 0;,order"
    tr , '\n' <<<"$words" | planted words/allowed 0 words
    { cat "$repo/cnn.c" && repeat 9999 'int no_comment; char text[] = "/* none // none";'; } >"$tmp/bare.c"
    # shellcheck disable=SC2046 # three words on purpose
    holds planted/comments "too few" "$(density "$tmp/bare.c")" test ! "$(
        enough $(density "$tmp/bare.c") && echo enough
    )"
    printf '%s\n' '// 1' '' 'int a; /* 2' '' '3 */ int b;' 'int c;' 'char d = '"'\"'; // 4" 'f("//");' \
        'g("\"/*"); // 5' >"$tmp/count.c"
    same planted/count_of_comments "5 of 9" "$(density "$tmp/count.c")"
}

# ---- The sources

# each KIND FILE... <WHAT A TOOL FOUND, lines `FILE:LINE: ...`: a verdict for each file, and one for a tool that
# says something else, such as why it broke off
each() {
    local kind=$1 file first found=''
    shift
    cat >"$tmp/found"
    for file; do
        first=$(awk -v file="$file:" 'index($0, file) == 1 { print; exit }' "$tmp/found")
        same "$kind/$file" "" "$first"
        found+=$first
    done
    same "$kind/tool" "" "$([ -n "$found" ] || head -n 1 "$tmp/found")"
}

test_sources() {
    local c words file
    cd "$repo" || exit 1
    c=("${program[@]}" tests/*.h tests/*/*.[ch] labs/check/*.[ch] labs/lab*/*.c)
    words=("${program[@]}" README.md labs/*.md labs/tools/README.md labs/lab*/* Makefile slurm/*.* slurm/configs/* \
        data/*.sh)
    same lines/cnn.c "" "$(style lines 6142 cnn.c)" # the aim is 5,850; 5 % more are accepted
    same lines/cnn_kernels.c "" "$(style lines 1660 cnn_kernels.c)" # the aim is 1,620
    same lines/cnn_kernels.cu "" "$(style lines 2362 cnn_kernels.cu)"
    for file in tests/unit/*.[ch]; do
        same "lines/$file" "" "$(style lines 700 "$file")"
    done
    each columns "${c[@]}" < <(style columns "${c[@]}")
    each functions "${program[@]}" < <(style functions "${program[@]}")
    each nesting "${program[@]}" < <(style nesting "${program[@]}")
    each words "${words[@]}" < <(style words "${words[@]}")
    # shellcheck disable=SC2046 # three words on purpose
    holds comments "at least $least_comments of $of_lines" "$(density cnn.c cnn_kernels.c)" \
        enough $(density cnn.c cnn_kernels.c)
    run --help
    same words/help/status 0 "$status"
    same words/help "" "$(style words "$out")"
}

# ---- What other tools find

# clang-format's versions differ in what they write; Debian 12 has 14.
test_format() {
    local files=("${program[@]}" tests/*.h tests/*/*.[ch] tests/*/*.cu labs/check/*.[ch] labs/lab*/*.c)
    if ! clang-format --version 2>/dev/null | grep -q ' version 14\.'; then
        skip format "clang-format 14 is not installed"
        return
    fi
    sed 's/^    return/  return/' cnn.c >"$tmp/planted.c"
    holds planted/format "an error" "none" \
        test "$(clang-format --style="file:$repo/.clang-format" --dry-run "$tmp/planted.c" 2>&1)"
    each format "${files[@]}" < <(clang-format --dry-run "${files[@]}" 2>&1)
}

test_shellcheck() {
    local file
    if ! command -v shellcheck >/dev/null; then
        skip shellcheck "shellcheck is not installed"
        return
    fi
    # shellcheck disable=SC2016 # not expanded on purpose
    printf '#!/bin/sh\nrm $1\n' >"$tmp/planted.sh"
    holds planted/shellcheck "an error" "none" test "$(shellcheck "$tmp/planted.sh")"
    for file in data/*.sh tests/*.sh tests/*/*.sh slurm/*.* .ci/run labs/*/*.sh labs/gradescope/run_autograder; do
        same "shellcheck/$file" "" "$(shellcheck -x "$file" 2>&1 | head -n 4)"
    done
}

# Under a locale with a decimal comma, awk takes 1.5 for 1 and prints 1,5, as do printf and times.
test_locale() {
    local file found scripts
    local decimals='^[^#]*(\bawk\b|printf .*%[-0-9]*\.[0-9]|\btimes\b|EPOCHREALTIME)'
    local safe='^(export )?[^#]*LC_ALL=C\b|^(source|\.) .*/lib\.sh'
    mapfile -t scripts < <(grep -lE '^#!.*sh$' .ci/run data/* labs/*/* slurm/* tests/* tests/*/* 2>/dev/null)
    printf '#!/bin/sh\nawk 1\n' >"$tmp/planted.sh"
    for file in "${scripts[@]}" "$tmp/planted.sh"; do
        found=$(grep -nE "$decimals" "$file" | head -n 1)
        ! grep -qE "$safe" "$file" || found=
        [ "$file" = "$tmp/planted.sh" ] || same "locale/$file" "" "${found:+without LC_ALL=C, line $found}"
    done
    same planted/locale "2:awk 1" "$found"
}

# Git for Windows is installed with core.autocrlf=true.
test_line_ends() {
    if ! git -C "$repo" rev-parse HEAD >/dev/null 2>&1; then
        skip line_ends "this folder is no clone"
        return
    fi
    git clone -q -c core.autocrlf=true "$repo" "$tmp/clone" 2>"$err"
    same line_ends "" "$(git -C "$tmp/clone" ls-files --eol | grep -E ' w/(crlf|mixed) ' | head -n 3)"
}

test_planted
test_sources
test_locale
test_line_ends
test_format
test_shellcheck
exit 0
