#!/usr/bin/env bash
# Limits that keep the sources readable: the width of lines and nested blocks; and the findings of clang-format
# and of shellcheck. First a violation of each kind is planted in a copy, which must be found, beside the largest
# thing that is allowed, which must not.
# Prints `pass style/NAME`, `fail style/NAME: expected ..., found ...` or `skip style/NAME: why`.
suite=style
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

program=(cnn.c cnn_kernels.c cnn_kernels.cu)

if ! command -v python3 >/dev/null; then
    skip all "python3 is not installed"
    exit 0
fi

# style KIND ARGUMENTS...: prints the violations
style() { python3 "$repo/tests/source/style.py" "$@" 2>&1; }

# ---- Would it notice?

# nested BLOCKS: a C function with so many blocks in each other, and with braces that are none
nested() {
    local i
    echo 'static void planted(int x) {'
    for ((i = 1; i <= $1; i++)); do printf '%*sif (x) {\n' $((4 * i)) ''; done
    printf '%*sPair p = {\n{1}, {2}};\n' $((4 * i)) ''
    for ((i = $1; i > 0; i--)); do printf '%*s}\n' $((4 * i)) ''; done
    echo '}'
}

# planted NAME COUNT KIND ARGUMENTS... <TEXT: after the main() of cnn.c, it gives COUNT violations
planted() {
    local name=$1 count=$2
    shift 2
    cat "$tmp/main.c" - >"$tmp/planted.c"
    same "planted/$name" "$count" "$(style "$@" "$tmp/planted.c" | wc -l)"
}

test_planted() {
    sed -n '/^int main/,$p' "$repo/cnn.c" >"$tmp/main.c"
    printf '// %097d\n' 0 | planted columns/allowed 0 columns
    printf '// %098d\n' 0 | planted columns/found 1 columns
    nested 4 | planted nesting/allowed 0 nesting
    nested 5 | planted nesting/found 1 nesting
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
    local c
    cd "$repo" || exit 1
    c=("${program[@]}" tests/*.h tests/*/*.[ch] tests/ptx/*.cpp labs/check/*.[ch] labs/lab*/*.c)
    each columns "${c[@]}" < <(style columns "${c[@]}")
    each nesting "${program[@]}" < <(style nesting "${program[@]}")
}

# ---- What other tools find

# clang-format's versions differ in what they write; Debian 12 has 14.
test_format() {
    local files=("${program[@]}" tests/*.h tests/*/*.[ch] tests/*/*.cu tests/ptx/*.cpp labs/check/*.[ch] labs/lab*/*.c)
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
