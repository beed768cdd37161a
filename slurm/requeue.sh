# Sourced by the job scripts, so that a job whose time is over is queued again and resumes:
#
#     train ./cnn "${saved[@]}" OPTIONS...
#
# A minute before the time is over, Slurm sends SIGUSR1 to the job script, as its line #SBATCH --signal says. The
# program gets the signal, too, and saves; then the job is queued again. The job keeps its number, and so its folder
# and its checkpoint. The checkpoint is also used when a node has failed.
#
# If Slurm ends the job earlier (scancel, preemption, the end of a reservation), it sends SIGTERM to every process of
# the job, and SIGKILL to those that are left when this script has ended. So the script waits until the program has
# saved. (srun and mpirun may send their processes a second SIGTERM, which ends them at once, before they have saved.)
#
# labs/tools/monitor writes monitor.csv into the folder. It runs next to the program and does not start it, since Slurm
# sends SIGTERM to every process of a job, and a second SIGTERM, forwarded by the monitor, would end the program before
# it has saved. It samples only the machine of this script, and needs Python. A job that was queued again writes
# monitor-1.csv, then monitor-2.csv.
# shellcheck shell=bash disable=SC2034 # the job scripts use `saved`
folder=runs/$SLURM_JOB_NAME-$SLURM_JOB_ID
checkpoint=$folder/checkpoint.safetensors
saved=(--out "$folder" --checkpoint "$checkpoint")
[ ! -e "$checkpoint" ] || saved+=(--resume)
mkdir -p "$folder"
shown=$folder # where the run is
[[ ! " $* " =~ .*\ --out[\ =]([^\ ]+) ]] || shown=${BASH_REMATCH[1]}
cat <<END
To follow this job, on the login node:
    tail -f $SLURM_JOB_NAME-$SLURM_JOB_ID.out
    .venv/bin/python labs/tools/watch.py $shown
END

# shellcheck disable=SC2317 # the trap calls it
requeue() {
    local i=0
    trap '' USR1 # a second one changes nothing
    interrupted=1
    touch "$folder/signalled"
    kill -USR1 "$pid" 2>/dev/null
    until [ "$checkpoint" -nt "$folder/signalled" ] || ! kill -0 "$pid" 2>/dev/null || [ $((++i)) -gt 250 ]; do
        sleep 0.2 # 50 seconds in all
    done
    rm -f "$folder/signalled"
    ! kill -0 "$pid" 2>/dev/null || scontrol requeue "$SLURM_JOB_ID"
}

# watch_machine CSV: replaces this shell with the monitor, until the program has ended
watch_machine() {
    if python3 -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null; then
        exec labs/tools/monitor --pid "$pid" --csv "$1"
    fi
    echo "monitor: not started, and no $1: it needs python3, 3.8 or newer; load its module in slurm/site.env" >&2
}

# train COMMAND...: its exit status. A signal ends `wait` early, with a status of its own.
train() {
    local status monitor
    "$@" &
    pid=$!
    trap requeue USR1
    trap 'interrupted=1' TERM # without it, this shell would end at once
    watch_machine "$folder/monitor${SLURM_RESTART_COUNT:+-$SLURM_RESTART_COUNT}.csv" &
    monitor=$!
    interrupted=1
    while [ "$interrupted" ]; do
        interrupted=
        wait "$pid"
        status=$?
    done
    trap '' USR1
    wait $monitor # for its summary
    return $status
}
