#!/usr/bin/env bash
# tests/run_tests.sh itself, with parts that pass, fail, break off, hang, say nothing or leave something behind: each must
# be counted.
# Prints `pass runner/NAME` or `fail runner/NAME: expected ..., found ...`.
suite=runner
: "${CNN:=$(type -P true)}" # not run here
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

# runner PART...: a copy of the runner with these made-up parts. LIMIT=1: each has one second. What it leaves running has
# one, too.
mkdir "$tmp/project" "$tmp/project/tests"
# shellcheck disable=SC2016 # the copy expands it
sed -e "/^parts='/,/^'/c parts=\$(cat parts)" -e 's/-k 60 2400/-k 1 "${LIMIT:-60}"/' "$repo/tests/run_tests.sh" \
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
LIMIT=1 runner
same all "1 [ 5 of 5] 4 failed" "$status $(grep -o '\[ 5 of 5\]' "$out") $(tail -n 1 "$out" | grep -o '[0-9]* failed')"
runner made/good made/good
same once "0 2 passed, 0 failed, 1 skipped" "$status $(tail -n 1 "$out")"
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
made_up leaves_a_loop <<<'echo "pass a"; (trap "" TERM; while :; do sleep 0.01; done) &'
runner made/good made/leaves_a_loop
line left/leaves_a_loop '^fail made/leaves_a_loop: left process \d+, bash ./leaves_a_loop $'
mark="TEST_PART=${TEST_PART:-}[made/"
same left/ended "" "$(grep -alsF -- "$mark" /proc/[0-9]*/environ)"
# shellcheck disable=SC2016 # the part's own variables
made_up leaves_temporary_files <<<'echo "pass a"; cd "$TMPDIR" && pwd >where && cp where "$OLDPWD/build"'
left leaves_temporary_files "the temporary file where"
same left/removed "" "$(ls -d "$(cat "$tmp/project/build/where")" 2>/dev/null)"
made_up leaves_a_file <<<'echo "pass a"; mkdir -p runs/a; touch runs/a/b build/c'
jobs=1 runner made/good made/leaves_a_file made/silent
line left/one_at_a_time '^fail made/leaves_a_file: left ./runs in the work tree$'
rm -r "$tmp/project/runs"
made_up beside <<<'touch build/beside; until [ -e build/c ]; do sleep 0.05; done; echo "pass a"'
made_up leaves_a_file_beside <<<'until [ -e build/beside ]; do sleep 0.05; done; bash ./leaves_a_file; sleep 0.1'
rm -f "$tmp/project/build/c"
runner made/beside made/leaves_a_file_beside
line left/side_by_side "^fail one of (made/beside made/leaves_a_file_beside): left ./runs .*; which one: make test JOBS=1 PARTS='\1'"

# .ci/run: its stages, with a make that writes a log and fails
# shellcheck disable=SC2016 # as it stands there
sed -n '/^failed=/,/^}/p; /^\[ -z "\$failed" \]/p' "$repo/.ci/run" >"$tmp/stages"
sed -i '/^\[ -z/i stage one make test\nstage two make test' "$tmp/stages"
# shellcheck disable=SC2317 # the stages call it
make() {
    [ "$1" = clean ] || { mkdir -p build/tests && echo 'fail a: expected 1, found 2' >build/tests/a.log && false; }
}
(
    set -euo pipefail # as .ci/run does
    # shellcheck source=/dev/null
    source "$tmp/stages"
) >"$out" 2>&1
same ci/fails "1" "$?"
same ci/shows_at_the_end \
    "one: fail a: expected 1, found 2|two: fail a: expected 1, found 2|failed: [one] [two]|" \
    "$(tail -n 3 "$out" | one_line)"
exit 0
