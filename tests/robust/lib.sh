# Shared by the tests of this folder, which source it after they have set suite=NAME: the run that
# they disturb, and what must be true of it afterwards.
# SECONDS_LONG=N: the long form, of about so many seconds.
# shellcheck shell=bash
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
: "${SECONDS_LONG:=}"

# shellcheck disable=SC2034 # those who source it use it
# Two epochs of three steps; saves between them and at their ends.
small=(--model cifar --dataset synthetic --limit-train 10 --limit-test 10 --epochs 2 --threads 1
    --log-interval 2 --save-every 2steps)

# undisturbed OPTIONS...: $tmp/good and the folder $tmp/good_run, which all others must equal
undisturbed() {
    rm -rf "$tmp/good" "$tmp/good_run"
    run "$@" --checkpoint "$tmp/good" --out "$tmp/good_run"
    [ "$status" -eq 0 ] || fail undisturbed "exit 0" "exit $status, $(cat "$err")"
    good_rows=$(run_rows "$tmp/good_run")
}

launcher=() # mpirun and its options, or nothing

# differs: what is not as in the undisturbed run, of $tmp/cwd/ck and the folder run beside it
differs() {
    cmp -s ck "$tmp/good" || echo "another checkpoint; "
    if [ "$(run_rows run)" != "$good_rows" ]; then
        echo "other rows: $(diff <(run_rows run) <(echo "$good_rows") | grep '^[<>]' | head -n 1); "
    fi
}

# finished OPTIONS...: goes on from $tmp/cwd/ck, if it is there, to the end; prints what went wrong
finished() {
    timeout 120 "${launcher[@]}" "$cnn" "$@" --checkpoint ck --out run --resume >"$out" 2>"$err" </dev/null
    status=$?
    [ "$status" -eq 0 ] || echo "resumed: exit $status, $(head -n 1 "$err"); "
    differs
}
