#!/usr/bin/env bash
# make test on machines with less: makes them of this one by hiding programs, and runs there, in a fresh clone, the parts
# of the tests that depend on what is hidden. Nothing may fail; what is skipped is listed.
#
#   tests/environments.sh [ENVIRONMENT...]      all of the table below, or those that are named
#
# It needs Debian, since dpkg says what a minimal system has, and root: the programs are removed from an overlay of /usr,
# which only this program and those that it starts see (man unshare). The clone has what is committed.
set -u
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || exit 1
export LC_ALL=C
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# shellcheck source=tests/compile_once.sh
source "$repo/tests/compile_once.sh" || exit 1

# Environment, lane, what is hidden (patterns of programs; rest: all that is neither in a minimal Debian nor in gcc, make,
# gzip and git), targets of make, parts. CI has run all parts with everything there, so a part is repeated only if it
# differs: it calls what is hidden, or it disturbs ./cnn, which then contains another library (faults, robust). What needs
# Python alone is skipped in bare, too; in no-python are the parts that have something else there, such as an emulator or
# Slurm. Two lanes run at the same time: the first one keeps the cores busy, the second one mostly waits for Slurm.
# To see all parts pass in such an environment: PARTS=all tests/environments.sh bare
environments='
bare       1  rest              run,test program/test_cli.sh program/test_robust.sh program/test_data.sh program/test_readme.sh program/test_make.sh program/test_alone.sh program/test_get_data.sh program/test_containers.sh labs/test_labs.sh labs/test_study.sh labs/test_seeds.sh labs/test_grade.sh labs/test_ablation.sh labs/test_tools.sh labs/test_notebooks.sh labs/test_report.sh labs/test_scaling_model.sh gpu/test_cuda.sh gpu/gpu_check.sh gpu/test_gpu_check.sh gpu/test_hip.sh gpu/test_nvcc.sh ptx/test_ptx.sh emulator/test_emulator.sh cluster/test_slurm.sh cluster/test_doctor.sh bench/test_bench.sh pytorch/live_pytorch.py pytorch/pytorch_weights.py robust/test_faults.sh source/test_style.sh source/test_static.sh source/test_tree.sh
no-mpi     2  mpi*,orte*,ompi*  test     cluster/test_slurm.sh cluster/test_parallel.sh robust/test_soak.sh robust/test_faults.sh program/test_robust.sh
no-cuda    1  nvcc              test     robust/test_faults.sh program/test_robust.sh gpu/test_nvcc.sh ptx/test_ptx.sh
no-python  2  python*,nvcc      test     cluster/test_slurm.sh gpu/gpu_check.sh
'
# Packages beside those that are essential or required
packages='^(gcc|cpp|binutils|libc6-dev|libc-dev-bin|make|gzip|git|perl)(-[0-9.]+|-common|-base|-man|-x86-64-linux-gnu|-aarch64-linux-gnu)?$'

# kept: the programs of a minimal Debian with these packages
kept() {
    dpkg-query -W -f '${Essential} ${Priority} ${Package}\n' | grep -E "^yes|^[a-z]* required" | awk '{ print $3 }'
    dpkg-query -W -f '${Package}\n' | grep -E "$packages"
}

# programs PATTERN...: whatever has such a name, where programs lie
programs() {
    local pattern folders
    IFS=: read -r -a folders <<<"$PATH:${CUDA:-/usr/local/cuda}/bin"
    for pattern; do
        find -L "${folders[@]}" -maxdepth 1 -type f -name "$pattern" 2>/dev/null
    done | xargs -r realpath | sort -u
}

# hide PATTERN,...|rest: removes these programs from an overlay of /usr
hide() {
    local patterns layer
    layer=$(mktemp -d) && mount -t tmpfs none "$layer" && mkdir "$layer/upper" "$layer/work" &&
        mount -t overlay none -o "lowerdir=/usr,upperdir=$layer/upper,workdir=$layer/work" /usr && umount -l "$layer" &&
        rmdir "$layer" || exit 1
    if [ "$1" = rest ]; then
        # shellcheck disable=SC2046 # names without blanks
        comm -23 <(programs '*') <({ dpkg -L $(kept) | grep bin/; type -P awk; } | xargs realpath -q | sort -u)
    else
        IFS=, read -r -a patterns <<<"$1"
        programs "${patterns[@]}"
    fi | xargs -r rm || exit 1
}

# inside HIDDEN TARGETS PARTS...: in a namespace of its own, in the clone
inside() {
    local target parts="${PARTS:-${*:3}}"
    hide "$1" && compile_once "$COMPILED" || exit 1
    for target in ${2//,/ }; do
        make "$target" PARTS="${parts#all}" || exit 1
    done
}

if [ "${1:-}" = --inside ]; then # this program calls itself
    inside "${@:2}"
    exit 0
fi
names=$(awk 'NF { print $1 }' <<<"$environments")
# shellcheck disable=SC2086 # names without blanks
[ $# -gt 0 ] || set -- $names
for name; do
    grep -qx -- "$name" <<<"$names" && continue
    echo "$0: there is no environment $name; these are: ${names//$'\n'/ }" >&2
    exit 2
done
if ! dpkg-query -W gcc >/dev/null 2>&1 || ! unshare -m true; then
    echo "$0: it needs Debian with the package gcc, and root in a machine or container that may mount" >&2
    exit 1
fi
logs=$repo/build/environments
rm -rf "$logs" && mkdir -p "$logs" || exit 1

# run_there ENVIRONMENT: in a fresh clone
run_there() {
    local name=$1 line home begin=$SECONDS log=$logs/$1.log failed=''
    read -r _ _ line < <(grep "^$name " <<<"$environments")
    home=$(mktemp -d) && git clone -q "$repo" "$home/clone" || exit 1
    # shellcheck disable=SC2086 # split into words
    (set -f && cd "$home/clone" && HOME=$home unshare -m bash "$repo/tests/environments.sh" --inside $line) \
        >"$log" 2>&1 </dev/null || failed=' FAILED:'
    rm -rf "$home"
    grep -aE '^(skip|fail) |\*\*\*' "$log" | sed "s/^/$name: /"
    echo "$name:$failed $(tail -n 200 "$log" | grep -a 'passed, .*skipped$' | tail -n 1), $((SECONDS - begin)) s;" \
        "all of it: $log"
    [ -z "$failed" ]
}

# lane NUMBER ENVIRONMENT...: those of this lane, one after the other
lane() {
    local name status=0
    for name in "${@:2}"; do
        ! grep -q "^$name  *$1 " <<<"$environments" || run_there "$name" || status=1
    done
    return $status
}

# The environments build the same programs.
mine=''
[ -n "${COMPILED:-}" ] || { mine=$(mktemp -d) && export COMPILED=$mine; } || exit 1
lane 1 "$@" &
first=$! # a process substitution in lane 2 changes $!
lane 2 "$@"
status=$?
wait $first || status=1
[ -z "$mine" ] || rm -rf "$mine"
exit $status
