#!/usr/bin/env bash
# Other compilers, C libraries and processors: the unit tests in float, and a training run, with each gcc
# and clang of this machine, without OpenMP, with musl, and on aarch64, which qemu emulates; there the
# GPU's kernels in the emulator, too. Some minutes each.
# Prints `pass portability/NAME`, `fail portability/NAME: expected ..., found ...` or
# `skip portability/NAME: why`.
suite=portability
: "${CNN:=$(type -P true)}" # not run here
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
export QUICK=1
cd "$repo" || exit 1
warnings=(-std=gnu17 -O2 -fno-math-errno -Wall -Wextra -Werror -Wno-unused-function)
training=(--model lenet --dataset synthetic --limit-train 256 --limit-test 64 --epochs 1 --quiet)

# verdicts NAME COMMAND...: those of a program of the tests, as one
verdicts() {
    local name=$1
    shift
    timeout 3000 "$@" >"$out" 2>"$err" </dev/null
    status=$?
    cases "$(grep -c '^pass' "$out")" "tests on $name"
    same "$name" "exit 0, no failure" "exit $status, $(grep -m 3 '^fail' "$out" || echo no failure)"
    holds "$name/some" "more than 10 tests that pass" "$(grep -c '^pass' "$out")" \
        at_least "$(grep -c '^pass' "$out")" 11
}

# built NAME COMMAND...: whether it compiles, without a warning
built() {
    "${@:2}" >"$err" 2>&1 && return
    fail "$1/builds" "no error, no warning" "$(grep -E -m 2 'error|warning|undefined' "$err")"
    return 1
}

# tried NAME COMPILER OPTIONS... -- RUNNER...: the unit tests and a training run; the runner runs programs
# of another processor
tried() {
    local name=$1 options=() program=$tmp/$1
    shift
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    shift
    built "$name" "${options[@]}" "${warnings[@]}" tests/unit/unit.c -o "$program" -lm -lpthread -ldl || return
    verdicts "$name/unit" "$@" "$program"
    built "$name/cnn" "${options[@]}" "${warnings[@]}" cnn.c -o "$program" -lm -lpthread || return
    (cd "$tmp/cwd" && timeout 600 "$@" "$program" "${training[@]}") >"$out" 2>"$err" </dev/null
    same "$name/trains" "exit 0, 1 epoch" "exit $?, $(grep -c '^epoch=1 ' "$out") epoch"
}

# installed NAME PACKAGE: else skips it
installed() {
    command -v "$1" >/dev/null && return
    skip "$1" "not installed; on Debian: apt-get install $2"
    return 1
}

native=(-march=native)
[ "$(uname -m)" = x86_64 ] || native=()
# The versions that Debian 11 to 13 has, and whatever else is here
for compiler in $({
    printf '%s\n' gcc-{10..14} clang-{13..19}
    compgen -c gcc- | grep -x 'gcc-[0-9]*'
    compgen -c clang- | grep -x 'clang-[0-9]*'
} | sort -uV); do
    installed "$compiler" "$compiler" || continue
    omp=(-fopenmp)
    "$compiler" -fopenmp -x c - -o /dev/null 2>/dev/null <<<'int main(void) { return 0; }' ||
        omp=(-Wno-unknown-pragmas) # no OpenMP library for this clang
    tried "$compiler" "$compiler" "${native[@]}" "${omp[@]}" --
done
tried no_openmp "${CC:-gcc}" "${native[@]}" -Wno-unknown-pragmas --
tried x86-64-v3 "${CC:-gcc}" -march=x86-64-v3 -fopenmp --
installed musl-gcc musl-tools && tried musl musl-gcc "${native[@]}" -static -Wno-unknown-pragmas --
if installed aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu && installed qemu-aarch64 qemu-user; then
    tried aarch64 aarch64-linux-gnu-gcc -fopenmp -- qemu-aarch64 -L /usr/aarch64-linux-gnu
    if installed aarch64-linux-gnu-g++ g++-aarch64-linux-gnu; then
        sed -f tests/emulator/cuda_on_cpu.sed cnn_kernels.cu >"$tmp/kernels.cpp"
        built aarch64/emulator aarch64-linux-gnu-g++ -std=c++17 -O2 -fopenmp -w -I. \
            -include tests/emulator/cuda_on_cpu.h -c "$tmp/kernels.cpp" -o "$tmp/kernels.o" &&
            built aarch64/emulator aarch64-linux-gnu-gcc "${warnings[@]}" -static -fopenmp \
                tests/gpu/test_cuda.c "$tmp/kernels.o" -o "$tmp/test_cuda" -lstdc++ -lm -lpthread &&
            verdicts aarch64/emulator env CUEMU_STRICT=1 qemu-aarch64 "$tmp/test_cuda" tiny
    fi
fi
exit 0
