# Sourced by the job scripts, which start $program: ./cnn, or what CNN names. The job ends here if ./cnn cannot do
# what was asked of Slurm: without CUDA it would train on the CPU, or stop, while the GPU waits.
# shellcheck shell=bash
program=${CNN:-./cnn}

# trains_on_gpu OPTIONS...: whether the job has a GPU and the options want one
trains_on_gpu() {
    [ -n "${SLURM_GPUS_ON_NODE:-}" ] && [[ ! " $* " =~ " "--(no-cuda|no-accel|emulate)(=on)?" " ]]
}

# missing OPTIONS...: what ./cnn lacks for this job, if anything
missing() {
    if [ ! -x cnn ]; then
        echo "there is no ./cnn in $PWD"
    elif trains_on_gpu "$@" && ! grep -aqE '(cuda|hip)GetDeviceCount' cnn; then
        echo "this job has a GPU, but ./cnn was built without CUDA"
    fi
}

if [ "$program" = ./cnn ] && [ -n "$(missing "$@")" ]; then
    echo "$SLURM_JOB_NAME: $(missing "$@"): run \`make\` where \`make doctor\` finds nvcc, and submit the job again" >&2
    exit 1
fi
