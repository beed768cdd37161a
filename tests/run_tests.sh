#!/usr/bin/env bash
# Runs all parts of the tests, or those that are named, on all usable cores, and shows how far it is:
#
#   tests/run_tests.sh [PART...]      for example tests/run_tests.sh unit/float program/test_cli.sh
#
# make test builds what the parts use and calls this program; `make test PARTS='unit/float'` runs one.
# QUICK=1: without repetitions (`make test`). CNN=PATH: the program to test. JOBS=N: parts at a time; two more than
# there are cores if not given, since some wait, for Slurm or for the moment at which they send a signal.
# AGAIN: the call of make, to show how to repeat a part. A part prints lines `pass NAME`, `fail NAME: why` and
# `skip NAME: why`; its whole output stays in build/tests. A part that breaks off, hangs, prints no verdict, or leaves a
# process or a file behind has failed. The last line is `N passed, N failed, N skipped`.
set -u
export LC_ALL=C
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
self=tests/run_tests.sh logs=build/tests
# shellcheck source=tests/leftovers.sh
source tests/leftovers.sh || exit 1

# Part, command. Those that take longest come first, so that no core is idle at the end.
parts='
cluster/test_slurm.sh       tests/cluster/test_slurm.sh
labs/test_labs.sh           tests/labs/test_labs.sh
program/test_readme.sh      tests/program/test_readme.sh
labs/test_grade.sh          tests/labs/test_grade.sh
gpu/test_cuda.sh            tests/gpu/test_cuda.sh
cluster/test_parallel.sh    tests/cluster/test_parallel.sh
labs/test_study.sh          tests/labs/test_study.sh
gpu/gpu_check.sh            tests/gpu/gpu_check.sh --emulated
labs/test_ablation.sh       tests/labs/test_ablation.sh
source/test_static.sh       tests/source/test_static.sh
gpu/test_gpu_check.sh       tests/gpu/test_gpu_check.sh
pytorch/live_pytorch.py     python_with_torch tests/pytorch/live_pytorch.py build
ptx/test_ptx.sh             tests/ptx/test_ptx.sh
gpu/test_nvcc.sh            tests/gpu/test_nvcc.sh
source/test_style.sh        tests/source/test_style.sh
robust/test_soak.sh         tests/robust/test_soak.sh
robust/test_faults.sh       tests/robust/test_faults.sh
labs/test_tools.sh          tests/labs/test_tools.sh
labs/test_notebooks.sh      tests/labs/test_notebooks.sh
program/test_checkpoints.sh tests/program/test_checkpoints.sh
program/test_robust.sh      tests/program/test_robust.sh
program/test_data.sh        tests/program/test_data.sh
labs/test_report.sh         tests/labs/test_report.sh
program/test_get_data.sh    tests/program/test_get_data.sh
program/test_make.sh        tests/program/test_make.sh
program/test_alone.sh       tests/program/test_alone.sh
emulator/test_emulator.sh   tests/emulator/test_emulator.sh
unit/double                 build/test_double
program/test_cli.sh         tests/program/test_cli.sh
labs/test_see.sh            tests/labs/test_see.sh
labs/test_seeds.sh          tests/labs/test_seeds.sh
gpu/test_hip.sh             tests/gpu/test_hip.sh
robust/test_fuzz.sh         tests/robust/test_fuzz.sh
pytorch/pytorch_weights.py  python_with_torch tests/pytorch/pytorch_weights.py
unit/float                  build/test_float
unit/avx2                   tests/unit/avx2.sh
bench/test_bench.sh         tests/bench/test_bench.sh
labs/test_scaling_model.sh  tests/labs/test_scaling_model.sh
labs/test_apart.sh          tests/labs/test_apart.sh
source/test_runner.sh       tests/source/test_runner.sh
source/test_tree.sh         tests/source/test_tree.sh
program/test_containers.sh  tests/program/test_containers.sh
cluster/test_doctor.sh      tests/cluster/test_doctor.sh
'

# What `make test` leaves to `make test-all` unless it is named: a cluster, tools for those who change the kernels and
# who grade, and what the other parts test in another way, as unit/ does with PyTorch's numbers.
only_in_all='cluster/test_slurm.sh pytorch/live_pytorch.py pytorch/pytorch_weights.py labs/test_grade.sh'
only_in_all+=' gpu/gpu_check.sh gpu/test_gpu_check.sh gpu/test_hip.sh ptx/test_ptx.sh labs/test_seeds.sh'
only_in_all+=' robust/test_soak.sh unit/avx2'

# The python3 of a version manager is often a shell script, whose start takes longer than most of our calls.
real=$(python3 -c 'import os, sys; print(os.path.dirname(sys.executable))' 2>/dev/null)
[[ -z $real || :$PATH: = *:$real:* ]] || PATH=$real:$PATH

# limited COMMAND...: in place of this shell, for 40 minutes at most
limited() { exec timeout -k 60 2400 "$@"; }

# python_with_torch PROGRAM ARGUMENTS...: by the first python3 that has PyTorch
python_with_torch() {
    local python
    python=$(tests/python_with.sh torch) && limited "$python" "$@"
    echo "skip pytorch/$(basename "$1" .py): no python3 with PyTorch; on Debian: apt-get install python3-torch"
}

# The command that repeats a part.
repeat_command() {
    if [ -n "${AGAIN:-}" ]; then
        echo "$AGAIN PARTS=$1" | tr -s ' '
    else
        echo "QUICK=${QUICK:-} $self $1"
    fi
}

count() { cat "${@:2}" | grep -ac "^$1 "; }

# quickly_today PART: of the longest parts, each runs in full on every third day, by turns, and quickly on the others.
quickly_today() {
    local day=$((10#${ROTATION:-$(date +%j)}))
    [ -z "${LONG:-}" ] || return
    case $1 in
    program/test_readme.sh) [ $((day % 3)) -ne 0 ] ;;
    gpu/test_cuda.sh) [ $((day % 3)) -ne 1 ] ;;
    cluster/test_parallel.sh | gpu/gpu_check.sh) [ $((day % 3)) -ne 2 ] ;;
    *) false ;;
    esac
}

# run_part PART NUMBER TOTAL
run_part() {
    local part=$1 command status begin=$SECONDS log
    log=$logs/${part//\//-}.log
    read -r _ command < <(grep "^$part " <<<"$parts")
    printf '[%2d of %d] %s begins\n' "$2" "$3" "$part"
    ! quickly_today "$part" || export QUICK=1
    case $command in
    python_with_torch*) ;;
    *) command="limited $command" ;;
    esac
    # shellcheck disable=SC2086 # the command is split into words
    watched "$part" "$log" $command
    status=$?
    [ $status -eq 0 ] || echo "fail $part: broke off with exit status $status" >>"$log"
    grep -qaE '^(pass|fail|skip) ' "$log" || echo "fail $part: no verdict" >>"$log"
    times >"$log.times" # line 2: user and system time of the part and all that it has waited for
    awk -F '[ms ]+' -v wall=$((SECONDS - begin)) 'NR == 2 { printf "%d %.0f\n", wall, 60 * ($1 + $3) + $2 + $4 }' \
        "$log.times" >"${log%.log}.seconds"
    # shellcheck disable=SC2046,SC2183 # two numbers
    printf '          %s: %d passed, %d failed, %d skipped, %d s (%d s of CPU time)\n' "$part" "$(count pass "$log")" \
        "$(count fail "$log")" "$(count skip "$log")" $(cat "${log%.log}.seconds")
    if grep -qa '^fail ' "$log"; then
        grep -aE '^fail |ERROR|runtime error' "$log"
        [ $status -eq 0 ] || { echo "  its last lines:" && tail -n 20 "$log" | sed 's/^/  /'; }
        echo "  all of its output: $log; to repeat it: $(repeat_command "$part")"
    fi
}

# by_folder PART...: a table of verdicts, seconds and seconds of CPU time
by_folder() {
    local folder logs_of
    printf '%-10s %7s %7s %8s %8s %6s\n' folder passed failed skipped seconds CPU
    for folder in $(printf '%s\n' "${@%%/*}" | sort -u); do
        logs_of=("$logs/$folder"-*.log)
        # shellcheck disable=SC2046,SC2183 # two numbers
        printf '%-10s %7d %7d %8d %8d %6d\n' "$folder" "$(count pass "${logs_of[@]}")" \
            "$(count fail "${logs_of[@]}")" "$(count skip "${logs_of[@]}")" \
            $(awk '{ wall += $1; cpu += $2 } END { print wall, cpu }' "${logs_of[@]/%.log/.seconds}")
    done
}

# in_memory: keeps temporary files in memory if 4 GiB are free, since each run of ./cnn syncs a dozen files to the disk.
# TMPDIR=/tmp make test: on the disk. make test-all needs 0.7 GB.
# shellcheck disable=SC2031 # watched() changes TMPDIR for its command only
in_memory() {
    local free folder
    [ -z "${TMPDIR:-}" ] || return
    free=$(df -k --output=avail /dev/shm 2>/dev/null | tail -n 1)
    [ "${free:-0}" -gt $((4 << 20)) ] || return
    [ "$(awk '/^MemAvailable:/ { print $2 }' /proc/meminfo)" -gt $((4 << 20)) ] || return
    folder=$(mktemp -d /dev/shm/cnn-tests.XXXXXX) || return
    # A runner that is stopped by a signal ends its parts first. TMPDIR is unset, so that it does not end itself.
    # shellcheck disable=SC2064 # this folder
    trap "unset TMPDIR; end_marked 'TMPDIR=$folder' >/dev/null; rm -rf '$folder'" EXIT
    chmod 711 "$folder" # see watched()
    # on some machines no program may run there
    ! { cp "$(type -P true)" "$folder" && "$folder/true"; } 2>/dev/null || export TMPDIR=$folder
}

if [ "${1:-}" = --part ]; then # xargs calls this program again for each part
    run_part "${@:2}"
    exit 0
fi
all=$(awk 'NF { print $1 }' <<<"$parts")
unnamed=$all
[ -z "${QUICK:-}" ] || unnamed=$(grep -vxF "${only_in_all// /$'\n'}" <<<"$all")
# shellcheck disable=SC2046 # names without blanks
set -- $(printf '%s\n' "${@:-$unnamed}" | awk '!named[$0]++')
for part; do
    grep -qx "$part" <<<"$all" && continue
    echo "$self: there is no part $part; the parts are: ${all//$'\n'/ }" >&2
    exit 2
done
rm -rf "$logs" && mkdir -p "$logs" && paths >"$logs/paths" || exit 1
in_memory
begin=$SECONDS n=0
for part; do echo "$part $((++n)) $#"; done | xargs -P "${JOBS:-$(($(nproc) + 2))}" -L 1 bash "$self" --part

left_in_tree "$logs/paths" "$logs"/*.log >"$logs/left_in_tree.log"
cat "$logs"/*.log | grep -a '^skip '
[ "$*" != "$(xargs <<<"$unnamed")" ] || [ "$unnamed" = "$all" ] || echo "Only make test-all runs: $only_in_all"
by_folder "$@"
echo "in $((SECONDS - begin)) s, logs in $logs"
passed=$(count pass "$logs"/*.log) failed=$(count fail "$logs"/*.log) skipped=$(count skip "$logs"/*.log)
if [ "$(find "$logs" -name '*.seconds' | wc -l)" -ne $# ]; then
    echo "fail run_tests.sh: some parts did not come to their end"
    failed=$((failed + 1))
fi
# Again: whoever reads the end of a log sees what failed, not only that something did.
grep -ah '^fail ' "$logs"/*.log
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
