#!/usr/bin/env bash
# What cppcheck, clang-tidy and gcc -fanalyzer find in cnn.c and, but for gcc, in cnn_kernels.c, which cnn.c includes.
# First each has to find a bug that is planted. QUICK=1: without the two that follow every path, which take a minute
# each.
# Prints `pass static/NAME`, `fail static/NAME: expected ..., found ...` or `skip static/NAME: why`.
suite=static
: "${CNN:=$(type -P true)}" # not run here
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
cd "$repo" || exit 1

# What is no bug: the check, a part of the line of the source, and why.
accepted='
invalidPointerCast|->arenas|an arena is bytes; each tensor in it is aligned for its own type
invalidPointerCast|(real *)|an arena is bytes; each tensor in it is aligned for its own type
invalidFunctionArg|log((double)sum)|the sum has the summand exp(0) = 1 of the largest logit
compareBoolExpressionWithInt|i <= out|output 0 always, output 1 if there is a run folder
uninitvar|alloc[p->arenas|an array of functions with an initial value
uninitvar|same_memory_as[i]|set by the loop before, for the same rows
legacyUninitvar|read_exactly(f, skipped|read_exactly() writes to it and reads nothing there
ctuuninitvar|f->|atomic_open() sets all of f
core.UndefinedBinaryOperatorResult|hash ^|the bytes of an array of size_t without padding
core.NullDereference|w.key|a dropout keeps all in a test, before it draws; only training draws
core.uninitialized.Assign|same_memory_as[i]|each row comes after the row that it reads, so it has been set
core.CallAndMessage|fmaf(weights|blur_weights() fills all of them; the tool loses count of the loop
core.DivideZero|% info->classes|a data set has 10 or 100 classes
bugprone-sizeof-expression|LENGTH(|the length of an array of pointers
bugprone-integer-division|/ s|whole steps, epochs or rows are meant
bugprone-integer-division|l->weight_count|weights are a multiple of the channels
bugprone-macro-parentheses||the argument is a declaration, or an operator
bugprone-suspicious-include|cnn_kernels.c|one file to compile: cnn.c alone trains, too
bugprone-reserved-identifier|_GNU_SOURCE|libc asks for this name
bugprone-misplaced-widening-cast|snprintf|an entry of a header has at most 256 characters
'

# Checks that suit this program. Not: easily-swappable-parameters (functions have the parameters of their
# formulas), implicit-widening and narrowing (gcc -Wconversion would say it of every index).
tidy_checks='-*,bugprone-*,-bugprone-easily-swappable-parameters,-bugprone-implicit-widening*'
tidy_checks+=',-bugprone-narrowing-conversions,performance-*,portability-*,misc-redundant-expression'
tidy_checks+=',misc-misplaced-const,cert-err60-cpp,cert-flp30-c'

# found: of the lines FILE:LINE...: ... CHECK of the tools, those that are not accepted
found() {
    local finding file line code
    grep -E '^[^ :]+:[0-9]+:' | sort -u | while read -r finding; do
        IFS=: read -r file line _ <<<"$finding"
        code=$(sed -n "${line}p" "$file" 2>/dev/null)
        while IFS='|' read -r check part _; do
            [ "$check" ] && [[ $finding == *"$check"* && $code == *"$part"* ]] && continue 2
        done <<<"$accepted"
        echo "${finding#"$repo/"}"
    done
}

# cppcheck cannot parse a vector as the value of an expression.
# shellcheck disable=SC2317 # checked calls these
cppcheck_of() {
    mkdir -p "$tmp/copies"
    sed 's/(vec){0}/no_vec/g' cnn_kernels.c >"$tmp/copies/cnn_kernels.c"
    cp "$1" "$tmp/copies/" && cd "$tmp/copies" || exit 1
    cppcheck --enable=warning,performance,portability --std=c11 --max-configs=1 -D_OPENMP -D__linux__ \
        -D'__has_include(x)=1' --quiet --template='{file}:{line}: {message} [{id}]' "$(basename "$1")" 2>&1
}
# shellcheck disable=SC2317
tidy_of() { clang-tidy --quiet --checks="$tidy_checks" "$1" -- -std=gnu17 2>/dev/null | grep warning:; }
# shellcheck disable=SC2317
paths_of() {
    clang-tidy --quiet --checks='-*,clang-analyzer-core*,clang-analyzer-unix*' "$1" -- -std=gnu17 2>/dev/null |
        grep warning:
}
# In a folder without cnn_kernels.c: clang follows the paths of the kernels in a second, gcc in three minutes.
# shellcheck disable=SC2317
analyzer_of() {
    mkdir -p "$tmp/alone"
    cp "$1" "$tmp/alone/" && cd "$tmp/alone" || exit 1
    gcc -std=gnu17 -O0 -fanalyzer -c "$(basename "$1")" -o /dev/null 2>&1 | grep warning:
}

# checked NAME TOOL FUNCTION: first the planted bugs, then the sources
checked() {
    if ! command -v "$2" >/dev/null; then
        skip "$1" "$2 is not installed; on Debian: apt-get install $2"
        return
    fi
    holds "planted/$1" "a finding" "none" test "$("$3" "$tmp/planted.c" | found)"
    same "$1" "" "$("$3" cnn.c | found)"
}

cat >"$tmp/planted.c" <<'END'
#include <stdlib.h>
int planted(int *p, int n) {
    int a[4], sum;
    if (n == 3 && n == 3)
        a[n + 1] = 0;
    free(p);
    return *p + sum + (n == 3 || n == 3) + a[4];
}
END
checked cppcheck cppcheck cppcheck_of
checked clang_tidy clang-tidy tidy_of
if [ -z "${QUICK:-}" ]; then
    checked clang_tidy/paths clang-tidy paths_of
    checked gcc_analyzer gcc analyzer_of
fi
exit 0
