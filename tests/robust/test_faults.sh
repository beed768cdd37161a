#!/usr/bin/env bash
# A run with a checkpoint and a run folder in which one call after the other fails, or at which the
# program is killed (faults.c). Each such run must end in time, with status 0 or with one line that says
# why; the checkpoint that it leaves must be whole, and the run that goes on from there must end like one
# that nothing has disturbed. It runs build/cnn-cpu: CUDA, MPI, NCCL and the sanitizers make calls of
# their own, and end the program where one fails. QUICK=1: some of the calls; SECONDS_LONG=N: all, also
# in a run that goes on and with two replicas.
# Prints `pass faults/NAME`, `fail faults/NAME: expected ..., found ...` or `skip faults/NAME: why`.
suite=faults half=()
CNN=$(dirname "${BASH_SOURCE[0]}")/../../build/cnn-cpu # also where the others test another program
# shellcheck source=tests/robust/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh" || exit 1

changing=write,fsync,rename,unlink,open,close,mkdir,truncate,chmod
errors=(5 28 13 4) # EIO, ENOSPC, EACCES, EINTR

# start SCENARIO: the files that its run finds
start() {
    rm -rf ck ck.tmp run
    if [ "$1" = resumed ]; then
        cp "$tmp/half" ck
        cp -r "$tmp/half_run" run
        half=(--resume)
    else
        half=()
    fi
}

# disturbed CALLS:NUMBER:ACTION: the run, with this fault
disturbed() {
    timeout 60 env LD_PRELOAD="$tmp/faults.so" FAULT="$1" FAULT_COUNT="$tmp/count" \
        "$cnn" "${options[@]}" "${half[@]}" --checkpoint ck --out run >"$out" 2>"$err" </dev/null
    status=$?
} 2>/dev/null

# says_why CALLS: status 1 and one line, or, where it does not matter, status 0
says_why() {
    if [ "$status" -eq 0 ]; then
        case $1 in
        write | fsync | rename) echo "unnoticed; " ;;
        esac
    elif [ "$status" -ne 1 ] || [ "$(wc -l <"$err")" -ne 1 ] || ! grep -q '^cnn: error: ' "$err"; then
        echo "exit $status, $(head -c 200 "$err" | tr '\n' '|'); "
    elif [ "$1" != unlink ] && [ "$(find . -name '*.tmp*')" ]; then
        echo "left $(find . -name '*.tmp*'); "
    fi
}

# walk SCENARIO CALLS ACTION EVERY: every so manyth of these calls, from the first one on
walk() {
    local scenario=$1 calls=$2 action=$3 every=$4 n total found='' why cases=0 name
    start "$scenario"
    disturbed "$calls:0:5"
    total=$(cat "$tmp/count")
    for ((n = 1; n <= total; n += every)); do
        start "$scenario"
        name=$action
        [ "$action" = error ] && name=${errors[n % ${#errors[@]}]}
        disturbed "$calls:$n:$name"
        cases=$((cases + 1)) why=
        case $action in
        kill) [ "$status" -eq 137 ] || why="exit $status; " ;;
        *) why=$(says_why "$calls") ;;
        esac
        if [ "$scenario" = resumed ] && grep -q '^No checkpoint' "$out"; then
            why+="started anew beside its checkpoint; "
        fi
        if [ "$status" -eq 0 ]; then
            why+=$(differs)
        else
            why+=$(finished "${options[@]}")
        fi
        [ -z "$why" ] && continue
        found+="call $n of $total ($name): $why"
        echo "  $scenario, $calls, call $n of $total, $name: $why" # the verdict is cut
    done
    cases "$cases" "$scenario: $action at ${calls//,/, }"
    same "$scenario/$calls/$action" "" "$found"
    [ "$cases" -gt 0 ] || fail "$scenario/$calls/some" "more than 0 calls" 0
}

scenario() { # NAME EVERY
    walk "$1" write error "$2"
    walk "$1" fsync error "$2"
    walk "$1" rename error "$2"
    walk "$1" unlink error "$2"
    walk "$1" open,close,mkdir,truncate,chmod error "$2"
    walk "$1" read,stat,access,lseek error "$2"
    walk "$1" "$changing" kill "$2"
    walk "$1" pthread_create 11 "$2"
    walk "$1" malloc 12 "$2"
}

if ! "${CC:-gcc}" -std=gnu17 -O1 -fPIC -shared "$repo/tests/robust/faults.c" -o "$tmp/faults.so" -ldl 2>"$err"; then
    skip all "faults.c does not compile here: $(head -n 1 "$err")"
    exit 0
elif ! LD_PRELOAD=$tmp/faults.so FAULT=write:0:5 "$(type -P true)" 2>"$err"; then
    skip all "$(head -n 1 "$err")"
    exit 0
fi
options=("${small[@]}" --profile)
undisturbed "${options[@]}"
run "${options[@]}" --checkpoint "$tmp/half" --out "$tmp/half_run" --max-steps 3
# Would it notice? A fault whose run is not the undisturbed one.
rm -rf ck run
same would_notice "another checkpoint; " "$(finished "${options[@]}" --max-steps 3 | grep -o '^another checkpoint; ')"
if [ "$SECONDS_LONG" ]; then
    scenario straight 1
    scenario resumed 1
    options+=(--replicas 2 --oversubscribe --timeout 20)
    undisturbed "${options[@]}"
    scenario replicas 1
elif [ "${QUICK:-}" ]; then
    scenario straight 7
    walk resumed read error 1 # the checkpoint, and the logs that it goes on with
else
    scenario straight 5
    scenario resumed 5
fi
exit 0
