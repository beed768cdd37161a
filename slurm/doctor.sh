#!/usr/bin/env bash
# Shows what this machine provides for cnn.c, and how to get what is missing.
# `make doctor` calls it with what the Makefile found: CC, OMP, NVCC, NVCC_WORKS, HAVE_CUDA, HAVE_MPI, HAVE_NCCL.
# Exit status 1 only where ./cnn cannot be built.
set -u
cd "$(dirname "$0")/.." || exit 1
export LC_ALL=C
status=0
row() { printf '%-9s%-15s%s\n' "$1" "$2" "$3"; }
ok() { row ok "$@"; }
missing() { row missing "$@"; } # optional
note() { row note "$@"; }
broken() {
    row BROKEN "$@"
    status=1
}
todo() { row '' '' "$1"; }
have() { command -v "$1" >/dev/null; }
version() { "$@" 2>/dev/null | grep -m 1 -oE '.*[0-9]+\.[0-9]+.*'; }

if ! have make; then
    broken make "not found; Debian: apt-get install make; on a cluster: module avail"
    exit 1
fi
[ -n "${CC:-}" ] || exec make --no-print-directory doctor

# ---- Building

compiler() {
    local program='#if !defined(__clang__) && __GNUC__ < 9
        #error
        #endif
        int main(void) { return 0; }'
    if ! have "${CC%% *}"; then
        broken compiler "${CC%% *} not found; Debian: apt-get install gcc; on a cluster: module load gcc"
    elif ! echo "$program" | $CC -std=gnu17 -x c - -o /dev/null -lm -lpthread 2>/dev/null; then
        broken compiler "$CC cannot build ./cnn: it is older than gcc 9, or lacks the C library's headers"
        todo "Debian: apt-get install gcc libc6-dev; on a cluster: module load gcc"
    else
        ok compiler "$(version "${CC%% *}" --version)"
        if [ -n "${OMP:-}" ]; then
            ok OpenMP "several threads compute"
        else
            missing OpenMP "--kernels naive uses one thread; Debian: gcc has it, for clang apt-get install libomp-dev"
        fi
    fi
}

# Trains ./cnn on a single image, and shows the device that it reports.
binary() {
    local tiny=(--dataset synthetic --limit-train 1 --limit-test 1 --batch-size 1 --dry-run) said
    if [ ! -x cnn ]; then
        note ./cnn "not built yet: run make"
    elif said=$(timeout 60 ./cnn "${tiny[@]}" 2>&1); then
        ok ./cnn "trains on: $(grep -oP '^Device: \K.*(?=, --kernels)' <<<"$said")"
    else
        note ./cnn "does not run here: $(tail -n 1 <<<"$said")"
        todo "if it was built on another machine: run make clean, then make, on this one"
    fi
}

cuda() {
    if [ -n "${HAVE_CUDA:-}" ]; then
        ok nvcc "$(version "$NVCC" --version | sed 's/.*\(release\)/\1/')"
    elif [ -n "${NVCC:-}" ] && [ -z "${NVCC_WORKS:-}" ]; then
        missing nvcc "$NVCC does not accept this g++: load an older gcc, or export NVCC_CCBIN=g++-13"
    elif [ -n "${NVCC:-}" ]; then
        missing nvcc "$NVCC found, but its library cudart_static is missing or does not link"
    else
        missing nvcc "needed to build for a GPU: module load cuda, or make CUDA=DIR"
        todo "without a GPU: make emulate runs the kernels on the CPU"
    fi
    ! have hipcc || ok hipcc "make HIP=1 compiles for AMD GPUs"
    local gpus
    gpus=$(have nvidia-smi && nvidia-smi -L 2>/dev/null | grep ^GPU)
    if [ -n "$gpus" ]; then
        ok GPU "$(wc -l <<<"$gpus"): $(sed 's/^GPU [0-9]*: //; s/ (UUID.*//' <<<"$gpus" | sort | uniq -c |
            sed 's/^ *//' | paste -sd ';')"
    else
        missing GPU "none here, as on most login nodes; in a job: srun --gres=gpu:1 make doctor"
    fi
}

mpi() {
    if [ -n "${HAVE_MPI:-}" ]; then
        ok MPI "$(version mpirun --version)"
    elif have mpicc; then
        missing MPI "mpicc found, but it cannot build a program"
    else
        missing MPI "needed for several machines: module load openmpi"
        todo "Debian: apt-get install openmpi-bin libopenmpi-dev"
    fi
    if [ -n "${HAVE_NCCL:-}" ]; then
        ok NCCL "communication between GPUs of several machines"
    else
        missing NCCL "needed for GPUs of several machines: module load nccl"
        todo "if its module only sets NCCL_HOME: export CPATH=\$NCCL_HOME/include LIBRARY_PATH=\$NCCL_HOME/lib"
    fi
}

python() {
    if python3 -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null; then
        ok Python "$(version python3 --version)"
    else
        missing Python "3.8 or newer is needed for studies, reports and monitor.csv: module load python"
    fi
}

# ---- This machine

cores() {
    local usable said per_core granted=${SLURM_CPUS_PER_TASK:-}
    granted=${granted%%[!0-9]*} # of a list such as 4,4 the first, as ./cnn reads it
    usable=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
    said="$usable usable"
    per_core=$(lscpu 2>/dev/null | awk -F : '/^Thread\(s\) per core/ { print $2 + 0 }')
    [ "${per_core:-1}" -lt 2 ] || said+=" (hardware threads, $per_core for each core)"
    if [ -z "${SLURM_JOB_ID:-}" ]; then
        ok cores "$said"
    elif [ -z "$granted" ]; then
        note cores "$said; the job did not set --cpus-per-task; the default is often one core"
    elif [ "$usable" -lt "$granted" ]; then
        note cores "$said, but --cpus-per-task is $granted: start with srun --cpus-per-task=$granted"
    elif [ "$usable" -gt "$granted" ]; then
        note cores "$said, but the job was granted $granted: give ./cnn --threads $granted"
    else
        ok cores "$said, as granted by Slurm"
    fi
}

disk() {
    local kilobytes
    kilobytes=$(df -Pk . | awk 'NR == 2 { print $4 }')
    if [ "${kilobytes:-0}" -lt 2000000 ]; then
        note disk "$((kilobytes / 1000)) MB free here; all data sets and a few runs need 2000"
    else
        ok disk "$((kilobytes / 1000000)) GB free here"
    fi
}

data_sets() {
    local name file folder found
    while read -r name file; do
        found=
        for folder in data /usr/share/datasets; do
            if [ -e "$folder/$name/$file" ] || [ -e "$folder/$name/$file.gz" ]; then
                found=${found:-$folder/$name}
            fi
        done
        if [ -n "$found" ]; then
            ok "$name" "$found"
        else
            missing "$name" "data/get_data.sh $name, where there is a network: on the login node"
        fi
    done <<END
mnist train-images-idx3-ubyte
fashion-mnist train-images-idx3-ubyte
cifar10 data_batch_1.bin
cifar100 train.bin
END
    ok synthetic "generated by ./cnn"
}

# ---- Slurm

slurm() {
    local partitions name
    if ! have sinfo; then
        missing Slurm "not found; needed only on a cluster"
        return
    fi
    # partition, nodes, cores of a node, GPUs of a node, longest time
    if ! partitions=$(timeout 20 sinfo -h -o '%P %D %c %G %l' 2>/dev/null) || [ -z "$partitions" ]; then
        missing Slurm "sinfo found, but Slurm does not respond: are you logged in to the cluster?"
        return
    fi
    ok Slurm "$(version sinfo --version); * is the default partition"
    while read -r name nodes cores gpus longest; do
        todo "$name: $nodes nodes of $cores cores, GPUs ${gpus/(null)/none}, at most $longest"
    done <<<"$partitions"
    name=${SBATCH_PARTITION:-}
    if [ -n "$name" ] && ! grep -qE "^${name%%,*}\*? " <<<"$partitions"; then
        note site.env "SBATCH_PARTITION=$name is none of these"
    elif [ -z "$name" ] && ! grep -q '^[^ ]*\* ' <<<"$partitions"; then
        note site.env "there is no default partition: choose one in slurm/site.env"
    fi
    if srun --mpi=list 2>&1 | grep -qw pmix; then
        ok PMIx "srun starts MPI programs"
    else
        missing PMIx "srun cannot start MPI programs: LAUNCH=\"mpirun --bind-to none\" in slurm/site.env"
    fi
}

echo "This machine: $(hostname)${SLURM_JOB_ID:+, in job $SLURM_JOB_ID of Slurm}"
compiler
binary
cuda
mpi
python
cores
disk
slurm
data_sets
[ $status -eq 0 ] || echo "./cnn cannot be built here: see the lines marked BROKEN above."
exit $status
