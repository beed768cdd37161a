#!/usr/bin/env bash
# Runs the commands of README.md as a new user would, in a copy of the sources: each indented line
# that begins with make or ./cnn, in order, and the network that README tells to add.
# Left out are those that take long or need more: make test runs us, make bench and make data.
set -u
export LC_ALL=C
unset SLURM_CPUS_PER_TASK MAKEFLAGS MAKELEVEL
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || exit 1
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
mkdir "$tmp/project"
cp -r "$repo"/{.gitignore,LICENSE,README.md,cnn.c,cnn_kernels.cu,Makefile,data,labs,slurm,tests} "$tmp/project" &&
    cd "$tmp/project" || exit 1

# command_runs COMMAND
command_runs() {
    if [ -n "${QUICK:-}" ] && [ "$1" = "make run" ]; then
        echo "skip readme/$1: QUICK=1"
    elif [[ $1 = mpirun* ]] && ! ldd ./cnn | grep -q libmpi; then
        echo "skip readme/$1: ./cnn was built without MPI"
    elif bash -c "$1" >out 2>err </dev/null; then
        echo "pass readme/$1"
    else
        echo "fail readme/$1: expected exit status 0, found $? and $(tail -n 3 err | tr '\n' ' ')"
    fi
}

# says NAME REGEX: the output of the last command has such a line
says() {
    if grep -qP -- "$2" out; then
        echo "pass readme/$1"
    else
        echo "fail readme/$1: expected a line $2, found $(tail -n 5 out | tr '\n' '|')"
    fi
}

holds_count() {
    if grep -q '^conv2d_forward_naive_kernel *10 ' err; then
        echo "pass readme/count"
    else
        echo "fail readme/count: expected 10 launches of a kernel, found $(tail -n 5 err | tr '\n' '|')"
    fi
}

# Room 7 with README's builder before the table of models and its row behind the table's first line.
add_network() {
    sed -n '/^\/\/ No pooling/,/^}/p' "$repo/README.md" >builder
    grep -m 1 '^    {"strided"' "$repo/README.md" >row
    awk '/^typedef struct Model \{/ { while ((getline line < "builder") > 0) print line; print "" }
        { print }
        /^static const Model models\[\]/ { while ((getline line < "row") > 0) print line }' \
        cnn.c >with_network && mv with_network cnn.c
}

commands=$(grep -oP '^    \K(CUEMU_DEVICES=2 )?(make|mpirun|\./cnn(-emu|-count)?)( .*)?$' "$repo/README.md" | sed 's/ *#.*//' |
    grep -vE '^make (test|bench|data)')
if [ "$(wc -l <<<"$commands")" -lt 8 ]; then
    echo "fail readme/commands: expected at least 8, found $(wc -l <<<"$commands")"
fi
while read -r command; do
    case $command in *strided*)
        add_network
        command_runs make
        command_runs "$command"
        says own_parameters '^  56394 parameters, 16\.5 MFLOP to train on one image$'
        continue
        ;;
    esac
    command_runs "$command"
    case $command in
        *--resume*) says resume '^Going on from run.ckpt: epoch 3, step 6$' ;;
        ./cnn-emu*) says emulated '^Emulated: CUDA code on the CPU' ;;
        ./cnn-count*) holds_count ;;
        'make study EPOCHS'*) says study '^Written: runs/cifar-1-epochs-2000-images/study.csv$' ;;
        'make study EMULATE'*) says virtual '^ *multi +ddp +2 +cifar +25 +50 +2 .* 1$' ;;
        make\ study-scaling*) says study_scaling '^Written: runs/scaling-cifar-1-epochs-2048-images/scaling.csv$' ;;
        'make report'*) says report '^Written: runs/cifar-1-epochs-2000-images/report.md, ' ;;
        make\ study-workers*) says study_workers '^Written: runs/workers-cifar-1-epochs-2000-images/workers.csv$' ;;
        *--eval*) says eval '^Loaded the weights in mnist_cnn.safetensors$' ;;
        'make doctor') says doctor '^This machine: ' ;;
    esac
done <<<"$commands"
