#!/usr/bin/env bash
# Runs every test program, counts their lines `pass NAME`, `fail NAME: why`, `skip NAME: why`,
# and ends with one line `N passed, N failed, N skipped`. A program that breaks off or hangs has failed.
set -u
export OMP_WAIT_POLICY=passive # threads that spin while they wait starve whatever runs beside us
cd "$(dirname "$0")/.." || exit 1
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

run() {
    local name=$1
    shift
    timeout 1800 "$@" </dev/null 2>&1 | tee -a "$log" | grep -E '^(fail|skip|.*(ERROR|runtime error))'
    local status=${PIPESTATUS[0]}
    if [ "$status" -ne 0 ]; then
        echo "fail $name: broke off with exit status $status" | tee -a "$log"
        tail -n 20 "$log"
    fi
}

# run_torch NAME PROGRAM ARGUMENTS...: by the first python3 that has PyTorch
run_torch() {
    local python
    for python in python3 /usr/bin/python3; do
        if "$python" -c 'import torch' 2>/dev/null; then
            run "$1" "$python" "${@:2}"
            return
        fi
    done
    echo "skip $1: no python3 with PyTorch; on Debian: apt-get install python3-torch" | tee -a "$log"
}

# Two lanes side by side, since most of the tests keep one core busy. Only the second one calls make.
lane() {
    log=$logs/$1
    "$1"
    echo "pass lanes/$1" >>"$log" # it has come to its end
}

host() {
    run float build/test_float
    run double build/test_double
    run cli tests/test_cli.sh
    run data tests/test_data.sh
    run checkpoints tests/test_checkpoints.sh
    run readme tests/test_readme.sh
    run doctor tests/test_doctor.sh
    run get_data tests/test_get_data.sh
    run scaling_model tests/test_scaling_model.sh
    run tools tests/test_tools.sh
    run report tests/test_report.sh
    run labs tests/test_labs.sh
    run instructions tests/test_instructions.sh
    run_torch pytorch_weights tests/pytorch_weights.py
    run_torch live_pytorch tests/live_pytorch.py build
}

gpu_and_slurm() {
    run emulator tests/test_emulator.sh
    run cuda tests/test_cuda.sh
    run parallel tests/test_parallel.sh
    run nvcc tests/test_nvcc.sh
    run study tests/test_study.sh
    run gpu_check tests/gpu_check.sh --emulated
    run slurm tests/slurm_test.sh
}

lane host &
lane gpu_and_slurm
wait
log=$logs/all
cat "$logs"/host "$logs"/gpu_and_slurm >"$log"
[ "$(grep -c '^pass lanes/' "$log")" = 2 ] || echo "fail lanes: one broke off" | tee -a "$log"

passed=$(grep -c '^pass ' "$log")
failed=$(grep -c '^fail ' "$log")
skipped=$(grep -c '^skip ' "$log")
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
