#!/usr/bin/env bash
# Limits that keep the sources readable: the width of lines and nested blocks; and the findings of clang-format
# and of shellcheck.
# Prints `pass style/NAME`, `fail style/NAME: expected ..., found ...` or `skip style/NAME: why`.
suite=style
: "${CNN:=$(type -P true)}" # not run here
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

program=(cnn.c cnn_kernels.c cnn_kernels.cu)
cd "$repo" || exit 1
shopt -s globstar
c=("${program[@]}" tests/**/*.[ch] tests/ptx/*.cpp labs/check/*.[ch] labs/lab*/*.c)

# none NAME REGEX FILE...: no line of these files matches; clang-format leaves long comments and strings as they are
none() { same "$1" "" "$(LC_ALL=C.UTF-8 grep -nP -- "$2" "${@:3}" | head -n 3)"; }
none columns '^.{101}' "${c[@]}"
none nesting '^ {24,}(if|for|while|do|switch)\b' "${program[@]}" # more than four blocks in a function

# ---- What other tools find

# clang-format's versions differ in what they write; Debian 12 has 14.
test_format() {
    if ! clang-format --version 2>/dev/null | grep -q ' version 14\.'; then
        skip format "clang-format 14 is not installed"
        return
    fi
    same format "" "$(clang-format --dry-run "${c[@]}" tests/*/*.cu 2>&1 | head -n 3)"
}

test_shellcheck() {
    local file
    if ! command -v shellcheck >/dev/null; then
        skip shellcheck "shellcheck is not installed"
        return
    fi
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
    for file in "${scripts[@]}"; do
        found=$(grep -nE "$decimals" "$file" | head -n 1)
        ! grep -qE "$safe" "$file" || found=
        same "locale/$file" "" "${found:+without LC_ALL=C, line $found}"
    done
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

test_locale
test_line_ends
test_format
test_shellcheck
exit 0
