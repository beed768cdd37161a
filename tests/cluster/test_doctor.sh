#!/usr/bin/env bash
# slurm/doctor.sh, which `make doctor` calls, with programs that only pretend to be there; and slurm/requeue.sh.
# CNN=PATH: another binary.
# Prints `pass doctor/NAME` or `fail doctor/NAME: expected ..., found ...`.
export suite=doctor
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
# shellcheck disable=SC2154 # lib.sh sets them
cp -r "$repo/slurm" "$repo/Makefile" . && cp "$cnn" cnn || exit 1
unset "${!SLURM@}" "${!SBATCH@}" OMP HAVE_CUDA NVCC HAVE_MPI HAVE_NCCL

# pretend PROGRAM SCRIPT
pretend() {
    # shellcheck disable=SC2154
    printf '#!/bin/sh\n%s\n' "$2" >"$tmp/fakes/$1" && chmod +x "$tmp/fakes/$1"
}
mkdir "$tmp/fakes" && PATH=$tmp/fakes:$PATH
pretend cc-12 'echo cc-12 12.2.0'
pretend cc-4 'exit 1'
pretend nvcc 'echo release 12.4'
pretend nvidia-smi "printf 'GPU %d: NVIDIA A100 (UUID: GPU-1)\n' 0 1"
pretend mpirun 'echo mpirun 4.1.4'
pretend srun 'echo pmi2'
pretend nproc 'echo 4'
pretend lscpu 'echo "Thread(s) per core:  1"'
pretend python3 'echo Python 3.11.2'
pretend df 'printf "%s\n" "Filesystem 1024-blocks Used Available" "/dev/a 9 9 5000000"'
# shellcheck disable=SC2016 # the script's own
pretend sinfo '[ $1 = --version ] && echo slurm 24.05.1 && exit
printf "%s\n" "cpu* 10 64 (null) 1-00:00:00" "gpu 4 128 gpu:a100:4 12:00:00"'

# doctor VARIABLE=VALUE...
doctor() {
    # shellcheck disable=SC2154
    env CC=cc-12 "$@" slurm/doctor.sh >"$out" 2>&1 </dev/null
    status=$?
}
# rows STATE: what has it; a machine may have Fashion-MNIST and hipcc
rows() { awk -v state="$1" '$1 == state && $2 !~ /^(fashion|hipcc)/ { print $2 }' "$out" | xargs; }

doctor OMP=yes NVCC=nvcc HAVE_CUDA=yes HAVE_MPI=yes HAVE_NCCL=yes SBATCH_PARTITION=gpu
same all/ok "0 compiler OpenMP ./cnn nvcc GPU MPI NCCL Python cores disk Slurm synthetic" "$status $(rows ok)"
same all/missing "PMIx mnist cifar10 cifar100, " "$(rows missing), $(rows note)"
while read -r row; do line "all/${row%% *}" "^(ok|missing| ) +$row"; done <<'END'
compiler +cc-12 12\.2\.0$
./cnn +trains on: .
nvcc +release 12\.4$
GPU +2: 2 NVIDIA A100$
Python +Python 3\.11\.2$
cores +4 usable$
disk +5 GB free here$
cpu\*: 10 nodes of 64 cores, GPUs none, at most 1-00:00:00$
gpu: 4 nodes of 128 cores, GPUs gpu:a100:4, at most 12:00:00$
END

pretend srun 'echo pmix'
mkdir -p data/mnist && touch data/mnist/train-images-idx3-ubyte.gz
printf '#!/bin/sh\necho "cnn: error: this CPU lacks avx512f"; exit 1\n' >cnn
doctor SBATCH_PARTITION=other
same none/missing "0 OpenMP nvcc MPI NCCL cifar10 cifar100" "$status $(rows missing)"
same none/note "./cnn site.env" "$(rows note)"
line none/cnn '^note +\./cnn +does not run here: cnn: error: this CPU lacks avx512f$'
line none/mnist '^ok +mnist +data/mnist$'
pretend sinfo 'exit 1'
pretend nvidia-smi 'exit 1'
pretend python3 'exit 1' # too old
pretend lscpu 'echo "Thread(s) per core:  2"'
rm cnn
doctor
same login "GPU Python Slurm, ./cnn" "$(rows missing | grep -oE 'GPU|Python|Slurm' | xargs), $(rows note)"
line hardware_threads '^ok +cores +4 usable \(hardware threads, 2 for each core\)$'
rm "$tmp/fakes/python3"
pretend lscpu 'exit 1'
for compiler in cc-4 no-such-compiler; do
    doctor CC=$compiler
    same "broken/$compiler" "1 compiler" "$status $(rows BROKEN)"
done
doctor NVCC=nvcc
line nvcc/refuses '^missing +nvcc +nvcc does not accept this g\+\+: '
doctor NVCC=nvcc NVCC_WORKS=yes
line nvcc/no_library '^missing +nvcc +nvcc found, but its library'
env -u CC slurm/doctor.sh >"$out" 2>&1 </dev/null # by way of make
same make "0 compiler" "$? $(rows ok | grep -o compiler)"

# What Slurm has granted, and the four cores that are there
while read -r cores said; do
    doctor SLURM_JOB_ID=7 ${cores:+SLURM_CPUS_PER_TASK=${cores#none}}
    line "granted/$cores" "$said"
done <<'END'
4 ^ok +cores +4 usable, as granted
4,4 ^ok +cores +4 usable, as granted
8 ^note +cores +4 usable, .*srun --cpus-per-task=8$
2 ^note +cores +4 usable, .*--threads 2$
none ^note +cores +4 usable; .*--cpus-per-task
END

# ---- slurm/site.env: srun gets nodes with the same feature as sbatch; a step of a job asks for none

# shellcheck disable=SC2016
said() { bash -c 'source slurm/site.env; echo "${SLURM_CONSTRAINT:-}, ${SALLOC_CONSTRAINT:-}"'; }
same site/constraint "a100, a100" "$(SBATCH_CONSTRAINT=a100 said)"
same site/constraint_in_job ", a100" "$(SBATCH_CONSTRAINT=a100 SLURM_CONSTRAINT=a100 SLURM_JOB_ID=7 said)"

# ---- slurm/requeue.sh: the status is the program's, also of one that ends while the script handles the signal; the
# monitor beside it changes nothing, and writes monitor.csv
mkdir -p labs/tools && cp "$repo/labs/tools/monitor" labs/tools/

# requeued NAME WANTED PROGRAM: what the script says if it gets the signal when the program is ready for it
requeued() {
    local said
    # shellcheck disable=SC2016
    said=$(SLURM_JOB_NAME=$1 SLURM_JOB_ID=1 timeout 60 bash -c '
        source slurm/requeue.sh >/dev/null
        scontrol() { echo "$@"; touch "$folder/requeued"; }
        {
            until [ -e "$folder/ready" ] && { [ -e "$folder/monitor.csv" ] || ! command -v python3; }; do
                sleep 0.1
            done
            kill -USR1 $$
        } >/dev/null 2>&1 &
        signaller=$!
        train bash -c "$1; touch $folder/ready; until [ -e $folder/requeued ]; do sleep 0.1; done; exit 6"
        echo $?
        kill $signaller 2>/dev/null # which waits for ever where the program has ended first' - "$3" 2>&1)
    same "requeue/$1" "$2" "$(grep -v '^monitor: ' <<<"$said")"
    if ! command -v python3 >/dev/null; then
        holds "requeue/$1/no_monitor" "that python3 is missing" "$said" grep -q '^monitor: not started.*python3' <<<"$said"
    elif [ "$1" != ends_before ]; then
        holds "requeue/$1/monitor" "monitor.csv with a row" "$(ls "runs/$1-1")" \
            test "$(wc -l <"runs/$1-1/monitor.csv")" -ge 2
    fi
}
# shellcheck disable=SC2016 # the script's own variables
save='touch runs/$SLURM_JOB_NAME-1/checkpoint.safetensors'
requeued goes_on "requeue 1
6" "trap '$save' USR1"
requeued ends_first 0 "trap 'exit 0' USR1"
requeued fails_first 5 "trap 'exit 5' USR1"
requeued saves_and_ends 0 "trap '$save; exit 0' USR1"
# shellcheck disable=SC2016
requeued ends_before 4 'touch runs/$SLURM_JOB_NAME-1/{ready,monitor.csv}; exit 4'

# Where to watch a run that has a folder of its own, as in lab 0
# shellcheck disable=SC2016,SC2086 # two words
same requeue/shown "runs/given-1 runs/lab00" "$(for option in '' '--out runs/lab00'; do
    SLURM_JOB_NAME=given SLURM_JOB_ID=1 bash -c 'source slurm/requeue.sh' - --epochs 1 $option --quiet
done | grep -oP 'watch.py \K.*' | xargs)"

# Slurm ends the job, with SIGTERM to the script and to the program: the script waits until the program has saved.
# shellcheck disable=SC2016
same requeue/ended "saved 143" "$(SLURM_JOB_NAME=ended SLURM_JOB_ID=1 timeout 60 bash -c '
    source slurm/requeue.sh >/dev/null
    { until [ -s "$folder/pid" ]; do sleep 0.1; done; kill -TERM $$ "$(<"$folder/pid")"; } &
    train bash -c "trap \"sleep 1; echo saved; exit 143\" TERM; echo \$\$ >$folder/pid; while sleep 0.1; do :; done"
    echo $?' 2>"$err" | xargs)"
