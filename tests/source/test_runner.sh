#!/usr/bin/env bash
# tests/run_tests.sh itself, with parts that pass, fail, break off, hang, say nothing or leave something behind: each must
# be counted. And tests/compile_once.sh, which must not take one program for another.
# Prints `pass runner/NAME` or `fail runner/NAME: expected ..., found ...`.
suite=runner
: "${CNN:=$(type -P true)}" # not run here
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

# runner PART...: a copy of the runner with these made-up parts. LIMIT=1: each has one second. What it leaves running has
# one, too.
mkdir "$tmp/project" "$tmp/project/tests"
# shellcheck disable=SC2016 # the copy expands it
sed -e "/^parts='/,/^'/c parts=\$(cat parts)" -e '/^only_in_all/c only_in_all=made/bad' -e 's/-k 60 2400/-k 1 "${LIMIT:-60}"/' "$repo/tests/run_tests.sh" \
    >"$tmp/project/tests/run_tests.sh"
sed 's/i < 50/i < 5/' "$repo/tests/leftovers.sh" >"$tmp/project/tests/leftovers.sh"
runner() {
    (cd / && AGAIN="${again:-}" JOBS=${jobs:-2} bash "$tmp/project/tests/run_tests.sh" "$@") >"$out" 2>&1 </dev/null
    status=$?
}
made_up() { # NAME <SCRIPT
    cat >"$tmp/project/$1"
    echo "made/$1 bash ./$1" >>"$tmp/project/parts"
}

made_up good <<<'echo "pass a"; echo "skip b: why"; printf "pass c"'
made_up bad <<<'echo "pass a"; echo "fail b: expected 1, found 2"'
QUICK=1 runner
same only_in_all/quick "0 2 passed, 0 failed, 1 skipped, said 1" \
    "$status $(tail -n 1 "$out"), said $(grep -c '^Only make test-all runs: made/bad$' "$out")"
QUICK=1 runner made/bad
same only_in_all/named 1 "$status"
QUICK='' runner
same only_in_all/all "1 3 passed, 1 failed, 1 skipped" "$status $(tail -n 1 "$out")"
made_up breaks_off <<<'printf "pass a\npass b"; exit 3'
made_up hangs <<<'trap "" TERM; printf "pass a"; sleep 100'
made_up silent <<<':'
runner made/good
same good "0 2 passed, 0 failed, 1 skipped" "$status $(tail -n 1 "$out")"
line good/skipped '^skip b: why$'
for part in bad breaks_off hangs silent; do
    LIMIT=1 runner made/good made/$part
    same $part "1 2" "$status $(grep -c "^fail " "$out")" # when it happens, and at the end
done
again='make test CC=clang' runner made/bad
line bad/shown '^fail b: expected 1, found 2$'
same bad/shown_again_at_the_end "fail b: expected 1, found 2|1 passed, 1 failed, 0 skipped|" \
    "$(tail -n 2 "$out" | one_line)"
line bad/again 'to repeat it: make test CC=clang PARTS=made/bad$'
runner made/none
same unknown "2 1" "$status $(grep -c 'no part made/none; the parts are: made/good made/bad' "$out")"

# ---- What a part leaves behind: it is named, and it is gone

# left PART WHAT...: beside a good part, this one fails alone, with these lines
left() {
    local name=$1
    shift
    runner made/good "made/$name"
    same "left/$name" "$(printf '%s|' "${@/#/fail made/$name: left }" "3 passed, $# failed, 1 skipped")" \
        "$(tail -n $(($# + 1)) "$out" | sed 's/process [0-9]*/process N/' | one_line)"
}
made_up leaves_a_process <<<'echo "pass a"; setsid sleep 987 >/dev/null 2>&1 &'
left leaves_a_process "process N, sleep 987 "
same left/ended "" "$(grep -alsF -- "TEST_PART=${TEST_PART:-}[made/" /proc/[0-9]*/environ)"
# shellcheck disable=SC2016 # the part's own variables
made_up leaves_temporary_files <<<'echo "pass a"; cd "$TMPDIR" && pwd >where && cp where "$OLDPWD/build"'
left leaves_temporary_files "the temporary file where"
same left/removed "" "$(ls -d "$(cat "$tmp/project/build/where")" 2>/dev/null)"
made_up leaves_a_file <<<'echo "pass a"; mkdir -p runs/a; touch runs/a/b build/c'
jobs=1 runner made/good made/leaves_a_file made/silent
line left/in_the_tree '^fail made/leaves_a_file: left ./runs in the work tree$'

# ---- tests/compile_once.sh

# compiled NAME NEW PRINTED ARGUMENTS...: with these arguments gcc makes `program`, which prints that; NEW of the
# compilations are done by the compiler itself
compiled() {
    local before
    before=$(find "$tmp/kept" -name '*.said' | wc -l)
    gcc "${@:4}" -o program <"$tmp/stdin" >"$out" 2>&1
    same "compile_once/$1" "$2 new, $3" "$(($(find "$tmp/kept" -name '*.said' | wc -l) - before)) new, $(./program)"
    rm -f program
}

# shellcheck source=tests/compile_once.sh
source "$repo/tests/compile_once.sh" && compile_once "$tmp/kept"
mkdir "$tmp/one" "$tmp/two" && cd "$tmp/one" || exit 1
echo '#define WORD "a"' >word.h
printf '#include <stdio.h>\n#include "word.h"\nint main(void) { int unused; puts(WORD TEXT); }\n' >a.c
cp a.c word.h "$tmp/two"
cp a.c "$tmp/stdin"
compiled first 1 ab '-DTEXT="b"' -g -Wall a.c
cd "$tmp/two" || exit 1
compiled in_another_folder 0 ab '-DTEXT="b"' -g -Wall a.c
line compile_once/warning 'unused variable'
compiled another_definition 1 ac '-DTEXT="c"' -g -Wall a.c
compiled another_option 1 ab '-DTEXT="b"' -O1 a.c
compiled a_pipe 1 ab '-DTEXT="b"' -O1 -I. -x c -
compiled the_same_pipe 0 ab '-DTEXT="b"' -O1 -I. -x c -
echo '#define WORD "d"' >word.h
compiled another_header 1 db '-DTEXT="b"' -g -Wall a.c
echo 'const char *word = "e";' >word.c && gcc -c word.c -o word.o
echo '#include <stdio.h>
extern const char *word;
int main(void) { puts(word); }' >main.c
compiled an_object 1 e main.c word.o
sed -i 's/"e"/"f"/' word.c && gcc -c word.c -o word.o
compiled another_object 1 f main.c word.o
echo 'int main(void) { return 0 }' >wrong.c
for how in first again; do
    gcc wrong.c -o wrong 2>"$err"
    same "compile_once/error_$how" "1 1" "$? $(grep -c 'error: expected' "$err")"
done
exit 0
