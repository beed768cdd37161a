#!/usr/bin/env bash
# Tests slurm/doctor.sh, which `make doctor` calls, with programs that only pretend to be there.
# CNN=PATH: another binary.
# Prints `pass doctor/NAME` or `fail doctor/NAME: expected ..., found ...`.
export suite=doctor
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
# shellcheck disable=SC2154 # lib.sh sets them
cp -r "$repo/slurm" "$repo/Makefile" . && cp "$cnn" cnn || exit 1
unset "${!SLURM@}" "${!SBATCH@}" OMP HAVE_CUDA NVCC HAVE_MPI HAVE_NCCL
export CC=${CC:-gcc}

# pretend PROGRAM <SCRIPT: lies in the folder $fakes, which comes first
# shellcheck disable=SC2154
fakes=$tmp/fakes
mkdir "$fakes"
PATH=$fakes:$PATH
pretend() {
    { echo '#!/bin/sh' && cat; } >"$fakes/$1"
    chmod +x "$fakes/$1"
}
doctor() { # [VARIABLE=VALUE...]
    # shellcheck disable=SC2154
    env "$@" slurm/doctor.sh >"$out" 2>"$err" </dev/null
    status=$?
}

pretend nvidia-smi <<'END'
echo 'GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-1)'
echo 'GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-2)'
END
pretend sinfo <<'END'
case $1 in
--version) echo slurm 24.05.1 ;;
*) printf '%s\n' 'cpu* 10 64 (null) 1-00:00:00' 'gpu 4 128 gpu:a100:4 12:00:00' ;;
esac
END
pretend srun <<'END'
echo pmi2
END
pretend mpirun <<'END'
echo 'mpirun (Open MPI) 4.1.4'
END
pretend nproc <<'END'
echo 4
END
pretend df <<'END'
printf '%s\n' 'Filesystem 1024-blocks Used Available Capacity Mounted on' '/dev/a 9 9 5000000 9% /'
END

doctor OMP=yes NVCC=nvcc HAVE_CUDA=yes HAVE_MPI=yes HAVE_NCCL=yes SBATCH_PARTITION=gpu
same all/status 0 "$status"
same all/quiet_stderr "" "$(cat "$err")"
line all/compiler '^ok +compiler +.*\d+\.\d+'
line all/openmp '^ok +OpenMP '
line all/binary '^ok +\./cnn +trains on: '
line all/nvcc '^ok +nvcc '
line all/gpu '^ok +GPU +2: 2 NVIDIA A100-SXM4-40GB$'
line all/mpi '^ok +MPI +mpirun \(Open MPI\) 4\.1\.4$'
line all/nccl '^ok +NCCL '
line all/cores '^ok +cores +4 usable$'
line all/disk '^ok +disk +5 GB free here$'
line all/slurm '^ok +Slurm +slurm 24\.05\.1'
line all/partition_cpu '^ +cpu\*: 10 nodes of 64 cores, GPUs none, at most 1-00:00:00$'
line all/partition_gpu '^ +gpu: 4 nodes of 128 cores, GPUs gpu:a100:4, at most 12:00:00$'
line all/no_pmix '^missing +PMIx .*mpirun --bind-to none'
same all/site_env 0 "$(grep -c site.env "$out" | awk '{ print $1 - 1 }')" # but for the one of PMIx

doctor SBATCH_PARTITION=gqu
same none/status 0 "$status"
line none/openmp '^missing +OpenMP '
line none/nvcc '^missing +nvcc +.*module load cuda'
line none/mpi '^missing +MPI '
line none/nccl '^missing +NCCL +.*module load nccl'
line none/partition '^note +site\.env +SBATCH_PARTITION=gqu is none of these$'

# What Slurm has granted, and the cores that are there
granted() {
    doctor SLURM_JOB_ID=7 "$2"
    line "granted/$1" "$3"
}
granted equal SLURM_CPUS_PER_TASK=4 '^ok +cores +4 usable, as granted'
granted fewer SLURM_CPUS_PER_TASK=8 '^note +cores +4 usable, .*srun --cpus-per-task=8$'
granted more SLURM_CPUS_PER_TASK=2 '^note +cores +4 usable, .*--threads 2$'
granted list SLURM_CPUS_PER_TASK=4,4 '^ok +cores +4 usable, as granted'
granted unsaid SLURM_NOTHING=1 '^note +cores +4 usable; .*--cpus-per-task'

mkdir -p data/mnist data/cifar10
touch data/mnist/train-images-idx3-ubyte.gz data/cifar10/data_batch_1.bin
for program in nvidia-smi sinfo; do echo 'exit 1' | pretend $program; done
echo 'echo "cnn: error: this CPU lacks avx512f" >&2; exit 1' | pretend cnn
cp "$fakes/cnn" cnn
doctor
same bare/status 0 "$status"
line bare/binary '^note +\./cnn +does not run here: cnn: error: this CPU lacks avx512f$'
line bare/gpu '^missing +GPU +.*srun --gres=gpu:1'
line bare/slurm '^missing +Slurm +.*logged in'
line bare/mnist '^ok +mnist +data/mnist$'
line bare/cifar10 '^ok +cifar10 +data/cifar10$'
line bare/cifar100 '^missing +cifar100 +data/get_data\.sh cifar100'
rm cnn
doctor
line bare/not_built '^note +\./cnn +not built yet: run make$'

doctor CC=no-such-compiler
same broken/status 1 "$status"
line broken/compiler '^BROKEN +compiler +no-such-compiler not found'
line broken/end '^\./cnn cannot be built here'
pretend old-compiler <<'END'
exit 1
END
doctor CC=old-compiler
same broken/old 1 "$status"
line broken/old_says '^BROKEN +compiler +old-compiler cannot build'
doctor -u CC
same make/status 0 "$status"
line make/compiler '^ok +compiler '

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
