#!/usr/bin/env bash
# Training that gets SIGTERM, SIGINT, SIGUSR1 or SIGKILL at random times, again and again, and is resumed
# each time: with two replicas, and with two MPI ranks, of which one is killed. No run may hang, and in
# the end the checkpoint must be that of an undisturbed run, byte by byte.
# Under MPI the signals go to the ranks, as from Slurm, not to mpirun: Open MPI 4.1's mpirun can crash when it
# has to forward one while it starts its ranks (7 of 240 times). They are sent only once a rank has printed
# something, that is, after MPI_Init, whose failures are Open MPI's.
# CNN=PATH: another binary. SIGNALS=N: so many of each kind (default 4); SECONDS_LONG=N: as many as fit.
# SEED=N: other random numbers.
# Prints `pass soak/NAME`, `fail soak/NAME: expected ..., found ...` or `skip soak/NAME: why`.
suite=soak
# shellcheck source=tests/robust/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh" || exit 1
seed=${SEED:-$((SECONDS_LONG ? $(date +%s) % 32768 : 1))}
signals=(TERM INT USR1 KILL)

# a moment within the life of a run, in seconds
moment() { echo "$((RANDOM % 2)).$((RANDOM % 900 + 100))"; }

# cnn_processes PID: the processes of the program, which are PID itself or the ranks of mpirun
cnn_processes() {
    if [ ${#launcher[@]} -eq 0 ]; then
        echo "$1"
    else
        pgrep -r R,S,D,T -P "$1" "^cnn" # no zombies
    fi
}

# send SIGNAL PID: to each process of the program, but SIGKILL to only one; fails if it is too early or too late
send() {
    local processes
    [ ${#launcher[@]} -eq 0 ] || [ -s "$out" ] || return 1
    mapfile -t processes < <(cnn_processes "$2")
    [ ${#processes[@]} -gt 0 ] || return 1
    [ "$1" != KILL ] || processes=("${processes[RANDOM % ${#processes[@]}]}")
    kill -"$1" "${processes[@]}"
    sent=$((sent + 1))
}

# ended PID: waits for it, and sets status; after a minute it hangs. If mpirun hangs after its ranks have
# ended, that is only printed.
ended() {
    local i
    for ((i = 0; i < 600; i++)); do
        kill -0 "$1" 2>/dev/null || break
        sleep 0.1
    done
    if kill -0 "$1" 2>/dev/null; then
        ps -o pid,ppid,etime,stat,wchan:20,args -p "$1" --ppid "$1"
        if cnn_processes "$1" >/dev/null; then
            found+="hangs${signal:+ after SIG$signal}; "
        else
            echo "mpirun hangs although its ranks have ended"
        fi
        kill -KILL "$1"
    fi
    wait "$1"
    status=$?
} 2>/dev/null

# one_life: starts or resumes the run, sends signals, of which SIGUSR1 may let it live
one_life() {
    "${launcher[@]}" "$cnn" "${options[@]}" --checkpoint ck --out run --resume >"$out" 2>"$err" </dev/null &
    local pid=$! next begin=$SECONDS
    signal=
    sleep "$(moment)"
    while kill -0 $pid 2>/dev/null && [ $((SECONDS - begin)) -lt 120 ]; do
        next=${signals[RANDOM % 4]}
        if send "$next" $pid; then
            signal=$next
            [ "$signal" = USR1 ] || break
        fi
        sleep "$(moment)"
    done
    ended $pid
    [ "$signal" ] || [ "$status" -eq 0 ] || found+="exit $status: $(head -n 1 "$err"); "
} 2>/dev/null # bash tells of each signal

# soak KIND OPTIONS...: until SIGNALS have been sent, or the seconds are over; a run that is complete is
# compared, and the next one begins
soak() {
    local kind=$1 options=("${@:2}") sent=0 found='' complete=0 begin=$SECONDS lives=0 signal
    rm -rf ck run
    while [ -z "$found" ] && if [ "$SECONDS_LONG" ]; then
        [ $((SECONDS - begin)) -lt $((SECONDS_LONG / 2)) ]
    else
        [ $sent -lt "${SIGNALS:-4}" ]
    fi; do
        one_life
        lives=$((lives + 1))
        if grep -qs '"status": "complete"' run/run.json; then
            complete=$((complete + 1))
            found+=$(differs)
            rm -rf ck run
        fi
    done
    [ ! -e ck ] || found+=$(finished "${options[@]}")
    cases "$sent" "signals to $kind in $lives lives of $((complete + 1)) runs, seed $seed"
    same "$kind" "" "$found"
}

RANDOM=$seed
settings=(--model cifar --dataset synthetic --limit-train 256 --limit-test 10 --batch-size 4 --no-cuda
    --epochs 60 --log-interval 5 --save-every 3steps --timeout 20)
undisturbed "${settings[@]}" --threads 2 --replicas 2 --oversubscribe
soak replicas "${settings[@]}" --threads 2 --replicas 2 --oversubscribe
if ! command -v mpirun >/dev/null || ! ldd "$cnn" | grep -q libmpi; then
    skip mpi "no mpirun, or $cnn was built without MPI"
    exit 0
fi
launcher=(mpirun -n 2)
export TMPDIR=$tmp # what a killed mpirun leaves is removed with it
soak mpi "${settings[@]}" --threads 1 # the same numbers as with replicas: so is the checkpoint
exit 0
