#!/usr/bin/env bash
# tests/run_tests.sh itself, with parts that pass, fail, break off, hang or say nothing: each must be counted.
# Prints `pass runner/NAME` or `fail runner/NAME: expected ..., found ...`.
suite=runner
: "${CNN:=$(type -P true)}" # not run here
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

# runner PART...: a copy of the runner in which each part has one second, with these made-up parts
mkdir "$tmp/project" "$tmp/project/tests"
sed -e "/^parts='/,/^'/c parts=\$(cat parts)" -e 's/-k 60 3600/-k 1 1/' "$repo/tests/run_tests.sh" \
    >"$tmp/project/tests/run_tests.sh"
runner() {
    (cd / && AGAIN="${again:-}" JOBS=2 bash "$tmp/project/tests/run_tests.sh" "$@") >"$out" 2>&1 </dev/null
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
    runner made/good made/$part
    same $part "1 2" "$status $(grep -c "^fail " "$out")" # when it happens, and at the end
done
again='make test CC=clang' runner made/bad
line bad/shown '^fail b: expected 1, found 2$'
same bad/shown_again_at_the_end "fail b: expected 1, found 2|1 passed, 1 failed, 0 skipped|" \
    "$(tail -n 2 "$out" | one_line)"
line bad/again 'to repeat it: make test CC=clang PARTS=made/bad$'
runner
same all "1 [ 5 of 5] 4 failed" "$status $(grep -o '\[ 5 of 5\]' "$out") $(tail -n 1 "$out" | grep -o '[0-9]* failed')"
runner made/good made/good
same once "0 2 passed, 0 failed, 1 skipped" "$status $(tail -n 1 "$out")"
runner made/none
same unknown "2 1" "$status $(grep -c 'no part made/none; the parts are: made/good made/bad' "$out")"

# .ci/run: its stages, with a make that writes a log and fails
# shellcheck disable=SC2016 # as it stands there
sed -n '/^failed=/,/^}/p; /^\[ -z "\$failed" \]/p' "$repo/.ci/run" >"$tmp/stages"
sed -i '/^\[ -z/i stage one test\nstage two test' "$tmp/stages"
# shellcheck disable=SC2317 # the stages call it
make() {
    [ "$1" = clean ] || { mkdir -p build/tests && echo 'fail a: expected 1, found 2' >build/tests/a.log && false; }
}
(
    # shellcheck source=/dev/null
    source "$tmp/stages"
) >"$out" 2>&1
same ci/fails "1" "$?"
same ci/shows_at_the_end \
    "one: fail a: expected 1, found 2|two: fail a: expected 1, found 2|failed: [one] [two]|" \
    "$(tail -n 3 "$out" | one_line)"
exit 0
