#!/usr/bin/env bash
# Submits the job scripts of slurm/ to a real Slurm: a controller and two nodes with four GPUs each, all on
# this machine, in a temporary folder and in a network of their own. The GPUs are device files that nobody
# opens; ./cnn-emu plays them, and takes those that Slurm has granted to the job.
# CNN=PATH: for jobs on the CPU (./cnn); GPU_CNN=PATH: for jobs on GPUs (./cnn-emu). QUICK=1: without the studies.
# Prints `pass slurm/NAME`, `fail slurm/NAME: expected ..., found ...` or `skip slurm/NAME: why`.
suite=slurm
PATH=$PATH:/usr/sbin:/sbin

# ---- What it needs

skip_all() {
    echo "skip slurm/all: $1"
    exit 0
}
# needs PROGRAM PACKAGE
needs() { command -v "$1" >/dev/null || skip_all "$1 is not installed; Debian: apt-get install $2"; }
needs sbatch slurm-wlm
needs slurmctld slurm-wlm
needs slurmd slurm-wlm
needs munged munge
needs ip iproute2
[ "$(id -u)" = 0 ] || skip_all "only root can start slurmd"
id munge >/dev/null 2>&1 || skip_all "there is no user munge"
if [ -z "${ALONE:-}" ]; then
    unshare --net true 2>/dev/null || skip_all "no network of its own can be made here"
    # Starts this script again in a network that ends at this machine. Names are looked up only where
    # there is an address besides 127.0.0.1, so it gets one.
    # shellcheck disable=SC2016 # for the inner shell
    ALONE=1 exec unshare --net bash -c \
        'ip link set lo up && ip address add 10.0.0.1/32 dev lo && exec "$0"' "$0"
fi

[ -z "${GPU_CNN:-}" ] || GPU_CNN=$(realpath "$GPU_CNN")
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
unset CNN "${!SLURM@}" "${!SBATCH@}" "${!SALLOC@}" "${!SRUN@}" "${!CUEMU@}" CUDA_VISIBLE_DEVICES LAUNCH
export CUEMU_DEVICES=4
# Open MPI's processes would take two nodes with one name and one memory for one node.
export OMPI_MCA_btl=self,tcp
unset OMPI_MCA_rmaps_base_oversubscribe # Slurm says how many slots there are
tiny=(--model cifar --dataset synthetic --limit-train 64 --limit-test 16 --batch-size 16 --epochs 1)
mkdir "$tmp/gpus"
mknod "$tmp/gpus/0" c 1 3 2>"$err" || skip_all "no device files can be made here"
for i in 1 2 3; do mknod "$tmp/gpus/$i" c 1 3; done
make -s -C "$repo" cnn-emu >/dev/null 2>&1 || { fail build "make cnn-emu" "exit $?"; exit 1; }
cp -r "$repo/slurm" "$repo/labs" "$repo/Makefile" . && cp "$cnn" cnn && cp "${GPU_CNN:-$repo/cnn-emu}" cnn-emu || exit 1

# ---- A Slurm of our own

pids=() running=

# daemon PROGRAM ARGUMENTS...: in the background, until stop() ends it
daemon() {
    "$@" >>"$tmp/daemons.log" 2>&1 </dev/null &
    pids=($! "${pids[@]}")
}

# shellcheck disable=SC2317 # the trap calls it
stop() {
    if [ -n "$running" ]; then
        squeue -h -o %A | xargs -r scancel
        WAIT_S=20 until_true no_jobs
    fi 2>/dev/null
    [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}" 2>/dev/null
    wait
    rm -rf "$tmp"
}
trap stop EXIT

# shellcheck disable=SC2317 # until_true calls it
no_jobs() { [ -z "$(squeue -h)" ]; }
# shellcheck disable=SC2317
two_idle_nodes() { [ "$(sinfo -h -p first -t idle -o %D 2>/dev/null)" = 2 ]; }

start() {
    local node
    chmod 711 "$tmp"
    mkdir -p "$tmp"/{munge,state} "$tmp"/{spool,scratch}/node{1,2}
    head -c 1024 /dev/urandom >"$tmp/munge/key"
    chmod 400 "$tmp/munge/key"
    chown -R munge "$tmp/munge"
    cat >"$tmp/slurm.conf" <<END
ClusterName=cnn
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=6817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$tmp/munge/socket,cred_expire=5
StateSaveLocation=$tmp/state
SlurmdSpoolDir=$tmp/spool/%n
# A folder for each node: otherwise the MPI of one would meet the other's files
TmpFS=$tmp/scratch/%n
SlurmctldPidFile=$tmp/slurmctld.pid
SlurmdPidFile=$tmp/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# The nodes have what stands here, whatever this machine has
SlurmdParameters=config_overrides
ReturnToService=2
# A job that was queued again begins after cred_expire + 1 seconds; the scheduler looks every 2 seconds, not every 60.
SchedulerParameters=sched_interval=2,bf_interval=2
KillWait=5
GresTypes=gpu
NodeName=node1 NodeHostname=localhost NodeAddr=127.0.0.1 Port=6818 CPUs=16 RealMemory=64000 Gres=gpu:4
NodeName=node2 NodeHostname=localhost NodeAddr=127.0.0.1 Port=6819 CPUs=16 RealMemory=64000 Gres=gpu:4
PartitionName=first Nodes=node[1-2] Default=YES
PartitionName=second Nodes=node[1-2]
END
    echo "Name=gpu File=$tmp/gpus/[0-3]" >"$tmp/gres.conf"
    echo CgroupAutomount=no >"$tmp/cgroup.conf"
    export SLURM_CONF=$tmp/slurm.conf
    daemon setpriv --reuid=munge --regid=munge --clear-groups munged --foreground \
        --key-file="$tmp/munge/key" --socket="$tmp/munge/socket" --pid-file="$tmp/munge/pid" \
        --seed-file="$tmp/munge/seed"
    until_true test -S "$tmp/munge/socket"
    daemon slurmctld -D -c
    for node in node1 node2; do daemon slurmd -D -N $node; done
    if until_true two_idle_nodes; then
        running=yes
        pass start
    else
        fail start "two idle nodes" "$(sinfo 2>&1) $(grep -E 'error|fatal' "$tmp/daemons.log" | tail -n 5)"
        exit 1
    fi
}

# ---- Jobs

# shellcheck disable=SC2317 # until_true calls it
state() { scontrol -o show job "$1" 2>/dev/null | grep -oP 'JobState=\K\w+'; }
# shellcheck disable=SC2317
ended() { [[ $(state "$1") =~ COMPLETED|FAILED|CANCELLED|TIMEOUT ]]; }
# shellcheck disable=SC2317
running() { [ "$(state "$1")" = RUNNING ]; }
# shellcheck disable=SC2317
logged() { grep -q "$2" "$1" 2>/dev/null; }

# submit OPTIONS... SCRIPT ARGUMENTS...: the number of the job, in $job
submit() {
    job=$(sbatch --parsable "$@" 2>"$err") || fail "submit" "sbatch $* works" "$(cat "$err")"
}

# ends NAME JOB STATE: waits until it does, and looks into FOLDER/SCRIPT-JOB.out from then on
ends() {
    until_true ended "$2"
    out=$(ls ./*-"$2".out 2>/dev/null || echo /dev/null)
    holds "$1/state" "$3" "$(state "$2"), with $(tail -n 5 "$out")" [ "$(state "$2")" = "$3" ]
}

# trained NAME SCRIPT JOB MODE WORLD: a job that trained, in so many processes or devices
trained() {
    local json=runs/$2-$3/run.json
    ends "$1" "$3" COMPLETED
    line "$1/host" '^Running on host '
    line "$1/facts" "^SLURM_JOB_ID=$3$"
    line "$1/epoch" '^epoch=1 images=64 '
    same "$1/epochs" 1 "$(grep -c '^epoch=' "$out")"
    holds "$1/run_json" "complete, of job $3" "$(grep -E 'status|slurm' "$json" 2>&1)" \
        grep -sPzq "(?s)\"status\": \"complete\".*\"slurm\":\"$3\"" "$json"
    holds "$1/parallel" "mode $4, world $5" "$(grep '"parallel"' "$json" 2>&1)" \
        grep -sq "\"mode\":\"$4\",\"world\":$5," "$json"
}

# no_monitor CSV: no python3 is installed, so the last job's output says why it has no such file.
no_monitor() {
    ! command -v python3 >/dev/null && [ ! -e "$1" ] && grep -q "^monitor: not started, and no $1: it needs python3" "$out"
}

# monitored NAME SCRIPT: the last job's output has the commands to follow it, whose file and folder exist, and the
# summary of the monitor, which has written monitor.csv in the run folder.
monitored() {
    local shown
    shown=$(grep -A 2 '^To follow this job' "$out" | grep -oE '[^ ]*[0-9]+(\.out)?$' | xargs)
    same "$1/follow" "$2-$job.out runs/$2-$job" "$shown"
    # shellcheck disable=SC2086 # two words
    holds "$1/follow_exists" "a file and a folder" "$(ls -d $shown 2>&1)" ls -d $shown
    no_monitor "runs/$2-$job/monitor.csv" && pass "$1/no_monitor" && return
    holds "$1/monitor" "rows" "$(head "runs/$2-$job/monitor.csv" 2>&1)" \
        grep -qE '^[0-9.]+,(cpu|gpu[0-9]+),' "runs/$2-$job/monitor.csv"
    line "$1/monitor_summary" "^monitor: .* in runs/$2-$job/monitor.csv$"
}

# Nsight Systems is not here: a stand-in that notes its options and starts the program.
mkdir "$tmp/bin"
cat >"$tmp/bin/nsys" <<'END'
#!/bin/sh
while [ "$1" = profile ] || [ "${1#--}" != "$1" ]; do echo "nsys option $1" && shift; done
exec "$@"
END
chmod +x "$tmp/bin/nsys"

# The commands of labs/slurm.md in the same order, with a smaller run after those that submit a job.
test_readme() {
    local command script gpus jobs=() i cnn_of_job more
    while read -r command; do
        script=$(grep -oP 'slurm/\K\w+(?=\.sb)' <<<"$command")
        gpus=$(grep -oP -- '--gres=gpu:\K\d+' <<<"$command" || echo 2)
        cnn_of_job=./cnn-emu more=''
        case $script in
        '')
            bash -c "$command" >"$out" 2>&1
            same "readme/$command" 0 $?
            continue
            ;;
        cpu) cnn_of_job=./cnn more='--kernels naive --limit-test 10000' ;; # it still runs when the monitor starts
        multinode) can_train_over_mpi "$script" || continue ;;
        *_array | scaling) continue ;; # test_timing_array, test_workers_array, test_scaling
        esac
        command="source slurm/site.env && ${command/sbatch/sbatch --parsable} ${tiny[*]} $more"
        job=$(PATH=$tmp/bin:$PATH CNN=$cnn_of_job bash -c "$command" 2>"$err") || fail "readme/$script" works "$(cat "$err")"
        jobs+=("$script:$job:$gpus")
    done < <(grep -oP '^    \K(source|sbatch|squeue) .*' "$repo/labs/slurm.md" | sed 's/ *#.*//')
    for i in "${jobs[@]}"; do
        IFS=: read -r script job gpus <<<"$i"
        case $script in
        cpu | single | profile) trained "$script" "$script" "$job" single 1 ;;
        dp) trained dp dp "$job" dp "$gpus" ;;
        *) trained "$script" "$script" "$job" ddp "$gpus" ;;
        esac
        [ "$script" = profile ] || monitored "$script" "$script"
        case $script in
        cpu) line cpu/threads '^Device: cpu .*--threads 4, --workers 4' ;;
        single) line single/device '^Device: emulated GPU' ;;
        profile) line profile/output "^nsys option --output=runs/profile-$job\$" ;;
        ddp | dp)
            line "$script/gpus" "^CUDA_VISIBLE_DEVICES=\d(,\d){$((gpus - 1))}\$"
            same "$script/uuids" "$gpus" "$(grep -oP '^Rank \d: .* \KGPU-.*' "$out" | sort -u | wc -l)"
            ;;
        multinode)
            line multinode/rank_0 '^Rank 0 on node1, GPUs \d$'
            line multinode/rank_1 '^Rank 1 on node2, GPUs \d$'
            ;;
        esac
    done
    holds readme/scripts "each job script stands in labs/slurm.md" "${jobs[*]}" \
        test "$(grep -oP '^    sbatch .*slurm/\K\w+\.sb' "$repo/labs/slurm.md" | sort -u | wc -l)" = \
        "$(find "$repo/slurm" -name '*.sb' | wc -l)"
}

# Three jobs of the array, one for each device; its collector, which names a row that is missing and a repeat;
# and that the array in the script has as many jobs as the study has runs.
test_timing_array() {
    local study=labs/tools/study.py last
    if ! command -v python3 >/dev/null; then
        skip timing_array "python3 is not installed"
        return
    fi
    submit --array=1-3 slurm/timing_array.sb --epochs 1 --limit 64 --batches 16 --emulate \
        --repeats 1 -- --dataset synthetic
    until_true no_jobs
    same timing_array/jobs "3 of 3 runs" \
        "$(grep -l '"status": "complete"' runs/timing/*/run.json | wc -l) of 3 runs"
    $study collect runs/timing --devices cpu single multi --batches 16 --repeats 1 >"$out" 2>&1
    same timing_array/collected "exit 0, rows cpu,1 multi,1 single,1" \
        "exit $?, rows $(awk -F, 'NR > 1 { print $1 "," $7 }' runs/timing/study.csv | sort | xargs)"
    $study collect runs/timing --repeats 2 >"$out" 2>&1
    line timing_array/missing '^missing: single, global batch 16: repeat 2$'
    rm -r runs/timing/cifar-multi*
    $study collect runs/timing --devices cpu single multi --batches 16 --repeats 1 >"$out" 2>&1
    line timing_array/missing_row '^missing: multi, global batch 16: repeat 1$'
    last=$(grep -oP '^#SBATCH --array=1-\K\d+' slurm/timing_array.sb)
    submit --array=$((last + 1)) slurm/timing_array.sb --epochs 1 --limit 64 --emulate
    until_true no_jobs
    out=$(echo timing-*_$((last + 1)).out)
    line timing_array/size "--task: expected 1 to $last, one for each device, batch and repeat, found $((last + 1))"
}

# Two jobs of the other array; its collector names the run of a third.
test_workers_array() {
    local study=labs/tools/study.py
    if ! command -v python3 >/dev/null; then
        skip workers_array "python3 is not installed"
        return
    fi
    submit --array=1-2 slurm/workers_array.sb --limit 64 --batches 16 --emulate --workers 1 3 \
        -- --dataset synthetic
    until_true no_jobs
    $study collect runs/workers --workers 1 3 --repeats 1 >"$out" 2>&1
    same workers_array/collected "exit 0, rows 1,1,1 3,1,1" \
        "exit $?, rows $(awk -F, 'NR > 1 { print $4 "," $5 "," $NF }' runs/workers/workers.csv | xargs)"
    $study collect runs/workers --workers 1 3 --repeats 2 >"$out" 2>&1
    line workers_array/missing '^missing: 3 workers: repeat 2$'
}

# Jobs of one and of two nodes fill one folder; the collector names the rows of a job that was not submitted.
test_scaling() {
    local study=labs/tools/study.py n
    if ! command -v python3 >/dev/null; then
        skip scaling "python3 is not installed"
        return
    fi
    can_train_over_mpi scaling || return
    for n in 1 2; do
        submit --nodes=$n --gres=none slurm/scaling.sb --batches 16 --epochs 1 --limit 64 --repeats 2 \
            -- --no-cuda --dataset synthetic
    done
    until_true no_jobs
    $study collect runs/scaling --counts 1 2 --repeats 2 >"$out" 2>&1
    same scaling/collected "exit 0, rows strong,1,2 strong,2,2 weak,1,2 weak,2,2" \
        "exit $?, rows $(awk -F, 'NR > 1 { print $1 "," $3 "," $8 }' runs/scaling/scaling.csv | xargs)"
    $study collect runs/scaling --counts 1 2 4 --repeats 2 >"$out" 2>&1
    line scaling/missing '^missing: weak scaling, devices: 4: repeat 1, 2$'
}

# The jobs of lab 8, with a small network: one device, ddp and dp on two, at the same global batch.
test_lab08() {
    local command jobs=() i
    while read -r command; do
        command="${command/sbatch/sbatch --parsable} --model cifar --dataset synthetic --limit-train 64 --limit-test 16"
        job=$(CNN=./cnn-emu bash -c "$command --global-batch 16 --epochs 1" 2>"$err") || fail lab08 works "$(cat "$err")"
        jobs+=("$(grep -oP 'slurm/\K\w+(?=\.sb)' <<<"$command"):$job")
    done < <(grep -oP '^ +\Ksbatch .*' "$repo/labs/lab08/README.md")
    same lab08/jobs "single ddp dp" "$(printf '%s\n' "${jobs[@]%:*}" | xargs)"
    for i in "${jobs[@]}"; do
        case $i in
        single:*) trained lab08/single single "${i#*:}" single 1 ;;
        *) trained "lab08/${i%:*}" "${i%:*}" "${i#*:}" "${i%:*}" 2 ;;
        esac
    done
}

can_train_over_mpi() {
    grep -aq MPI_Init cnn-emu && return
    skip "$1" "./cnn was built without MPI; Debian: apt-get install openmpi-bin libopenmpi-dev"
    return 1
}

# Two jobs on one machine get one GPU each; the first one is cancelled while it trains.
test_two_gpus_and_cancel() {
    local first
    export CNN=./cnn-emu
    submit --nodelist=node1 slurm/single.sb "${tiny[@]}" --epochs 100000
    first=$job
    until_true logged "single-$first.out" '^epoch=1 '
    submit --nodelist=node1 slurm/single.sb "${tiny[@]}"
    trained two_gpus single "$job" single 1
    line two_gpus/second '^CUDA_VISIBLE_DEVICES=1$'
    out=single-$first.out
    line two_gpus/first '^CUDA_VISIBLE_DEVICES=0$'
    same two_gpus/uuids 2 \
        "$(cat runs/single-{"$first","$job"}/run.json | grep -o '"uuid":"[^"]*"' | sort -u | wc -l)"
    same cancel/before RUNNING "$(state "$first")"
    same cancel/process_before 1 "$(processes "cnn-emu .*--out runs/single-$first " | wc -l)"
    scancel "$first"
    ends cancel "$first" CANCELLED
    until_true no_process "runs/single-$first"
    same cancel/process_after "" "$(processes "runs/single-$first")"
    unset CNN
}

# processes REGEX: those whose command line matches, except those of another Slurm, whose jobs may have the same numbers
processes() {
    local pid
    for pid in $(pgrep -f "$1"); do
        [ ! "/proc/$pid/cwd" -ef . ] || echo "$pid"
    done
}
# shellcheck disable=SC2317 # until_true calls it
no_process() { [ -z "$(processes "$1")" ]; }

# programs FOLDER: those that write their run there. signal_program SIGNAL FOLDER: sends them the signal
programs() { processes "^(/bin/sh )?[^ ]*cnn .*--out $1 "; }
signal_program() { programs "$2" | xargs -r kill "-$1"; }
# shellcheck disable=SC2317 # until_true calls it
sampled() { ! command -v python3 >/dev/null || [ "$(wc -l <"$1")" -ge 2 ]; } 2>/dev/null

# requeued NAME SCRIPT SBATCH_OPTIONS...: submits SCRIPT with the options in `long`, lets it be queued again while it
# trains, and waits until it has resumed. Fails when it could not be paused in training. Training takes seconds, so
# the program waits before it starts until the monitor has a sample, and while Slurm delivers the signal and queues the
# job again. While the program runs, nothing here asks Slurm, whose answer may take longer than the training.
requeued() {
    # shellcheck disable=SC2317 # until_true calls it. CONT every time: a rank may stop later than the others.
    trains() { signal_program CONT "$folder"; grep -qs '^1,40,' "$folder/steps.csv"; }
    # shellcheck disable=SC2317
    restarted() { scontrol -o show job "$job" | grep -q ' Restarts=[1-9]'; }
    # shellcheck disable=SC2317
    resumes() { signal_program CONT "$folder"; logged "$1" '^Resuming from'; }
    is_trained() { grep -qs '^24,' "$folder/epochs.csv"; }
    local folder paused
    CNN=$tmp/waits/cnn submit "${@:3}" slurm/"$2".sb "${long[@]}" --no-cuda
    folder=runs/$2-$job
    until_true sampled "$folder/monitor.csv"
    WAIT_S=100 until_true trains || return
    signal_program STOP "$folder"
    [ -n "$(programs "$folder")" ] && ! is_trained || return
    scancel --batch --signal=USR1 "$job"
    holds "requeue/$1/signalled" "the signal" "none" until_true test -e "$folder/signalled"
    signal_program CONT "$folder"
    until_true test "$folder/checkpoint.safetensors" -nt "$folder/signalled" # it has saved
    signal_program STOP "$folder"
    ! is_trained || return
    paused=$(programs "$folder")
    holds "requeue/$1/restarted" "queued again" "$(tail -n 5 "$2-$job.out")" until_true restarted
    xargs -r kill -CONT <<<"$paused" 2>/dev/null # Slurm may have ended them
    until_true sampled "$folder/monitor-1.csv"
    until_true resumes "$2-$job.out"
    return 0
}

# A job whose time is over, or whose script gets the signal that Slurm sends before that, is queued again, and
# ends with the bits of one that was not disturbed.
test_requeue() {
    local name script options world attempt long=("${tiny[@]}" --limit-train 2000 --batch-size 4 --epochs 24 --log-interval 20 --threads 1)
    mkdir "$tmp/waits"
    printf '%s\n' '#!/bin/sh' 'kill -STOP $$' 'exec ./cnn "$@"' >"$tmp/waits/cnn"
    chmod +x "$tmp/waits/cnn"
    while read -r name script options; do
        [ "$name" != multinode ] || can_train_over_mpi requeue/multinode || continue
        # Rarely (once in some hundred jobs), Slurm's PMIx does not get the ranks through MPI_Init: then once more.
        # A machine that is busy may also give this script no time before the training has ended.
        for attempt in first second third; do
            # shellcheck disable=SC2086 # several words
            requeued "$name" "$script" $options && break
            echo "requeue/$name: job $job, the $attempt, was not paused in training; its output ends:"
            tail -n 8 "$script-$job.out"
            [ "$attempt" = third ] || scancel "$job"
        done
        ends "requeue/$name" "$job" COMPLETED
        line "requeue/$name/resumed" '^Resuming from runs/.*: epoch ([1-9]|1\d|2[0-4]), step '
        world=$(grep -oP '"world":\K\d+' "runs/$script-$job/run.json")
        # shellcheck disable=SC2046 # several words, or none
        ./cnn "${long[@]}" --no-cuda $([ "$world" = 1 ] || echo --replicas "$world" --oversubscribe) \
            --checkpoint "$tmp/straight" >"$err" 2>&1
        holds "requeue/$name/bits" "those of an undisturbed run" "others" \
            cmp "runs/$script-$job/checkpoint.safetensors" "$tmp/straight"
        if no_monitor "runs/$script-$job/monitor-1.csv"; then
            pass "requeue/$name/no_monitors"
        else
            holds "requeue/$name/monitors" "rows in monitor.csv and in monitor-1.csv" \
                "$(tail -n 2 "runs/$script-$job"/monitor*.csv 2>&1)" \
                awk 'FNR == 2 { n++ } END { exit n < 2 }' "runs/$script-$job"/monitor{,-1}.csv
        fi
        same "requeue/$name/steps" 12000 "$(tail -n +2 "runs/$script-$job/steps.csv" | sort -u -t, -k1,3 | wc -l)"
    done <<END
cpu cpu
multinode multinode --gres=none --cpus-per-task=1
END
}

# What site.env says holds, and the command line beats it. Jobs that fail are seen to have failed.
test_site() {
    local where show="scontrol -o show job \$SLURM_JOB_ID"
    sed -i -e 's/^# \(export SBATCH_PARTITION=\)gpu /\1second /' -e 's/^# \(export SBATCH_ACCOUNT=\)course_1234 /\1course /' \
        slurm/site.env
    while read -r name options; do
        # shellcheck disable=SC2086 # several words
        job=$(bash -c 'source slurm/site.env && sbatch --parsable --hold "$@"' - $options slurm/cpu.sb)
        where=$(scontrol -o show job "$job" | grep -oP ' (Partition|Account)=\K\S+' | paste -sd ' ')
        scancel "$job"
        case $name in
        file) same site/file "course second" "$where" ;;
        command_line) same site/command_line "course first" "$where" ;;
        esac
    done <<END
file
command_line --partition=first
END
    # srun has the same partition and account; in a job, its steps run where the job does
    bash -c "source slurm/site.env && srun sh -c '$show'" >"$out" 2>&1
    same site/srun "course second" "$(grep -oP ' (Partition|Account)=\K\S+' "$out" | paste -sd ' ')"
    job=$(bash -c 'source slurm/site.env && sbatch --parsable --partition=first --wrap "srun printenv SLURM_JOB_PARTITION"')
    until_true ended "$job"
    same site/step "first" "$(xargs <"slurm-$job.out")"
    cp "$repo/slurm/site.env" slurm/
    sed -i 's/^# module load .*/module load no-such-module || return 1/' slurm/site.env
    submit slurm/cpu.sb "${tiny[@]}"
    ends no_module "$job" FAILED
    line no_module/says_so 'module'
    cp "$repo/slurm/site.env" slurm/
    submit slurm/cpu.sb --no-such-option
    ends bad_option "$job" FAILED
    line bad_option/says_so '^cnn: error: .*--no-such-option'
    mkdir -p elsewhere
    submit --chdir=elsewhere slurm/cpu.sb "${tiny[@]}"
    until_true ended "$job"
    same elsewhere/state FAILED "$(state "$job")"
    out=elsewhere/cpu-$job.out
    line elsewhere/says_so 'slurm/site.env: No such file'
}

# Four ranks on two nodes talk to each other, however they are started, and each knows the GPUs that are
# free on its own node: on the second one, GPU 0 is taken.
test_mpi() {
    local name launch rank taken hashes=() gpus=("0,1" "0,1" "1,2" "1,2")
    if ! command -v mpicc >/dev/null || ! command -v mpirun >/dev/null; then
        skip mpi "no mpicc and mpirun; Debian: apt-get install openmpi-bin libopenmpi-dev"
        return
    fi
    cat >ranks.c <<'END'
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
int main(int count, char **words) {
    int rank, world, sum;
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    printf("MPI rank %d of %d on %s, sum %d, last argument %s\n", rank, world,
           getenv("SLURMD_NODENAME"), sum, words[count - 1]);
    return MPI_Finalize();
}
END
    mpicc ranks.c -o ranks 2>"$err" || fail mpi/build "exit 0" "$(cat "$err")"
    submit --nodelist=node2 --gres=gpu:1 --output=/dev/null --wrap="sleep 600"
    taken=$job
    until_true running "$taken"
    while read -r name launch; do
        if [ "$name" = srun ] && ! srun --mpi=list 2>&1 | grep -qw pmix; then
            skip mpi/srun "Slurm was built without PMIx"
            continue
        fi
        [ -z "$launch" ] || export LAUNCH=$launch
        CNN=./ranks submit --ntasks-per-node=2 --gres=gpu:2 slurm/multinode.sb the_last
        ends "mpi/$name" "$job" COMPLETED
        for rank in 0 1 2 3; do
            line "mpi/$name/$rank" \
                "^MPI rank $rank of 4 on node$((rank / 2 + 1)), sum 6, last argument the_last$"
            line "mpi/$name/table_$rank" "^Rank $rank on node$((rank / 2 + 1)), GPUs ${gpus[rank]}$"
        done
        if can_train_over_mpi "mpi/$name/cnn"; then
            CNN=./cnn-emu submit --ntasks-per-node=2 --gres=gpu:2 slurm/multinode.sb "${tiny[@]}"
            trained "mpi/$name/gpus" multinode "$job" ddp 4
            hashes+=("$(grep -oE '[0-9a-f]{16}$' "runs/multinode-$job/epochs.csv")")
            CNN=./cnn-emu submit --gres=none slurm/multinode.sb --no-cuda "${tiny[@]}"
            trained "mpi/$name/cpu" multinode "$job" ddp 2
            line "mpi/$name/cpu/rank_1" '^Rank 1 on node2, GPUs none$'
        fi
        unset LAUNCH
    done <<END
srun
mpirun mpirun --bind-to none
END
    scancel "$taken"
    if can_train_over_mpi mpi/no_gpu; then # the job has one, but the program cannot use it
        local tries=0 # MPI_Abort() ends all processes, and on a busy machine srun may lose what they have just written
        while [ $((++tries)) -le 3 ] && ! grep -sq '^cnn: error: --gpus 1: ' ./*-"$job".out; do
            CNN=$PWD/cnn submit slurm/multinode.sb "${tiny[@]}"
            until_true ended "$job"
        done
        ends mpi/no_gpu "$job" FAILED
        line mpi/no_gpu/says_so '^cnn: error: --gpus 1: '
    fi
    LAUNCH="srun --mpi=none" CNN=./ranks submit slurm/multinode.sb
    ends mpi/no_ranks "$job" FAILED
    line mpi/no_ranks/says_so 'MPI gives no rank: see LAUNCH in slurm/site.env'
    [ ${#hashes[@]} -lt 2 ] || same mpi/same_bits "${hashes[0]}" "${hashes[1]}"
}

test_doctor() {
    srun --gres=gpu:1 --cpus-per-task=3 make doctor >"$out" 2>&1 </dev/null
    same doctor/status 0 $?
    line doctor/job '^This machine: .*, in job \d+ of Slurm$'
    line doctor/default 'first\*: 2 nodes of 16 cores, GPUs gpu:4, at most infinite'
    line doctor/other 'second: 2 nodes of 16 cores'
    line doctor/cores '^(ok|note) +cores +\d+ usable.*( 3|granted by Slurm)'
    SBATCH_PARTITION=third slurm/doctor.sh >"$out" 2>&1
    line doctor/partition '^note +site.env +SBATCH_PARTITION=third is none of these'
}

start
test_doctor
test_two_gpus_and_cancel
test_requeue
test_site
test_mpi
test_readme
test_lab08
if [ -n "${QUICK:-}" ]; then
    skip studies "QUICK=1"
else
    test_timing_array
    test_workers_array
    test_scaling
fi
exit 0
