#!/usr/bin/env bash
# Tests cuda_on_cpu.h: emulator_test.cu must pass in every build and order of threads; each bug
# planted in it must be reported, and no longer when it is fixed.
# CXX=COMPILER: another than g++; CLANGXX likewise. QUICK=1: only the plain build.
# Prints `pass emulator/NAME`, `fail emulator/NAME: expected ..., found ...` or
# `skip emulator/NAME: why`.
suite=emulator
: "${CNN:=$(type -P true)}" # not run here
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
unset CUDA_VISIBLE_DEVICES CUEMU_CLOCK CUEMU_LEAKS CUEMU_DEVICES CUEMU_MEMORY CUEMU_ORDER CUEMU_LAZY CUEMU_PROTECT
unset CUEMU_STRICT CUEMU_FAIL CUEMU_GRID CUEMU_SM
ulimit -c 0
gxx=${CXX:-g++} clangxx=${CLANGXX:-clang++}

# rewrite FILE.cu: to stdout
rewrite() { echo "#line 1 \"$1\"" && sed -f "$repo/tests/emulator/cuda_on_cpu.sed" "$1"; }

# compile COMPILER OPTIONS...: the source on stdin
compile() {
    local compiler=$1
    shift
    "$compiler" -std=c++17 -Wall -Wextra -Wno-unknown-pragmas -include "$repo/tests/emulator/cuda_on_cpu.h" \
        "$@" -x c++ -
}

# build BUILD COMPILER OPTIONS...: $tmp/BUILD from emulator_test.cu, without a warning
build() {
    local name=$1 compiler=$2
    shift 2
    if ! command -v "$compiler" >/dev/null; then
        skip "build/$name" "$compiler is not installed"
        return 1
    fi
    if ! echo 'int main() {}' | "$compiler" "$@" -x c++ - -o "$tmp/empty" 2>"$err"; then
        skip "build/$name" "$compiler does not know $*"
        return 1
    fi
    cd "$repo/tests/emulator" && rewrite emulator_test.cu | compile "$compiler" "$@" -o "$tmp/$name" 2>"$err"
    local made=${PIPESTATUS[1]}
    cd "$tmp/cwd" || exit 1
    same "build/$name" "exit 0, " "exit $made, $(cat "$err")"
    return "$made"
}

# start BUILD [VARIABLE=VALUE...] ARGUMENT: a program's output to $out, its report to $err
start() {
    local name=$1
    shift
    timeout 100 env "${@:1:$#-1}" "$tmp/$name" "${@: -1}" >"$out" 2>"$err" </dev/null
    status=$?
} 2>/dev/null

# right BUILD [VARIABLE=VALUE...]: all correct kernels pass
right() {
    local name=$1/right
    start "$@" ""
    shift
    local settings="$*"
    settings=${settings//CUEMU_/}
    name=$name${1:+/}${settings// /,}
    local wrong
    wrong=$(grep -hE '^fail|ERROR|WARNING|^cuda_on_cpu' "$out" "$err")
    same "$name" "exit 0, 14 passes, " "exit $status, $(grep -c '^pass ' "$out") passes, $wrong"
}

# bug NAME BUILD REGEX [VARIABLE=VALUE...]: the report matches REGEX; fixed, it passes
bug() {
    local name=$1 build=$2 regex=$3
    shift 3
    tried+=("$name")
    [ -x "$tmp/$build" ] || { skip "bug/$name/$build" "it is not built"; return; }
    start "$build" "$@" "bug_$name"
    if [ "$status" -ne 0 ] && cat "$out" "$err" | grep -qE -- "$regex"; then
        pass "bug/$name/$build"
    else
        fail "bug/$name/$build" "a report $regex" "exit $status, $(cat "$out" "$err")"
    fi
    start "$build" "$@" "mended_$name"
    same "bug/$name/$build/mended" "exit 0, pass mended/$name" "exit $status, $(cat "$out")"
}

# refuses NAME REGEX: the program from stdin does not compile, for that reason
refuses() {
    cat >refused.cu
    rewrite refused.cu | compile "$gxx" -fsyntax-only 2>"$err"
    same "refuses/$1" "exit 1, for the reason" \
        "exit ${PIPESTATUS[1]}, $(grep -qE "$2" "$err" && echo for the reason)"
}

test_plain() {
    local order
    build plain "$gxx" -O2 -fsanitize=alignment -fsanitize-undefined-trap-on-error || return
    right plain CUEMU_DEVICES=2
    for order in 0 1 7; do
        right plain CUEMU_DEVICES=3 CUEMU_LAZY=1 CUEMU_PROTECT=1 CUEMU_ORDER=$order
    done
}

test_bugs() {
    local wrong='^fail bug/'
    local place='^cuda_on_cpu: kernel [a-z_]* launched at emulator_test.cu:[0-9]+'
    local thread="$place, block \\([0-9],0,0\\), thread \\([0-9]+,0,0\\): "
    local line='emulator_test.cu:[0-9]+'
    bug out_of_range plain "${thread/\[0-9]+,0,0/64,0,0}memory fault: out of range" CUEMU_PROTECT=1
    bug divergent_barrier plain "${thread}divergent barrier: waits in __syncthreads\\(\\) at $line"
    bug early_exit plain "${thread}has ended while 40 threads wait for it .* at $line"
    bug exited_lanes plain "$thread$line: waits forever"
    bug outside_mask plain "$thread$line: lane [0-9]+ is not in the mask 0xff"
    bug source_outside_mask plain "$thread$line: reads lane 20, which is not in the mask"
    bug divergent_shuffle plain "$thread$line: lane [0-9]+ waits for this one in another"
    bug uninitialized_shared plain "$wrong"
    bug uninitialized_global plain "$wrong"
    bug missing_wait plain "$wrong"
    bug never_waited plain "${thread}has ended without waiting for its last 1 cp.async"
    bug misaligned_copy plain "$thread$line: cp.async: .* is not aligned"
    bug misaligned_ldmatrix plain "$thread$line: ldmatrix: .* is not aligned"
    bug host_pointer plain "$place: argument 1 is no pointer to memory of a GPU"
    bug freed_pointer plain "$place: argument 1 is no pointer to memory of a GPU"
    bug other_device plain "$place: argument 1 is memory of device 0" CUEMU_DEVICES=2
    bug other_devices_stream plain "$place: in a stream of device 1" CUEMU_DEVICES=2
    bug freed_twice plain '^cuda_on_cpu: cudaFree: .* was freed before'
    bug host_access plain 'the host touches memory of a GPU' CUEMU_PROTECT=1
    bug missing_synchronize plain "$wrong" CUEMU_LAZY=1
    bug missing_event plain "$wrong" CUEMU_LAZY=1
    bug much_shared plain "$place: 65536 bytes of dynamic shared memory"
    bug many_threads plain "$place: 1025 threads in a block"
    bug empty_grid plain "$place: an empty grid or block"
    bug tall_grid plain "$place: a grid of .*; y and z are at most 1$" CUEMU_GRID=1
    bug wrong_direction plain '^cuda_on_cpu: copy to: .* is memory of a GPU'
    bug long_copy plain '^cuda_on_cpu: copy to: 260 bytes, of which only 256 are there'
    bug wrong_peer plain '^cuda_on_cpu: copy from: .* is memory of device 0, not 1'
    bug no_device plain '^cuda_on_cpu: cudaEventSynchronize: .* not called cudaSetDevice' CUEMU_STRICT=1
    bug spinning_wait plain '^cuda_on_cpu: cudaEventSynchronize: .* would spin' CUEMU_STRICT=1
    bug low_priority plain "$place: would queue behind" CUEMU_STRICT=1
    bug copy_by_host plain '^cuda_on_cpu: copy between devices 0 and 1 without peer access' \
        CUEMU_STRICT=1 CUEMU_DEVICES=2
    bug waits_in_capture plain '^cuda_on_cpu: cudaStreamSynchronize: the stream is being captured'
    bug allocates_in_capture plain '^cuda_on_cpu: cudaMalloc: not allowed while a stream is'
    bug allocates_beside_capture plain '^cuda_on_cpu: cudaMalloc: not allowed while a stream is'
    bug pageable_in_capture plain '^cuda_on_cpu: cudaMemcpyAsync: .* is pageable memory of the host'
    bug freed_in_graph plain "$place: argument 1 is no pointer to memory of a GPU"
    bug copy_of_freed_in_graph plain '^cuda_on_cpu: copy: .* was freed after the copy was queued'
    [[ $gxx = *clang* ]] || bug misaligned_four plain "${thread}misaligned access"
    bug full_stack plain "${thread}memory fault at .* stack is full"
}

test_environment() {
    same devices/default "1 cudaSuccess" "$("$tmp/plain" devices 2>/dev/null)"
    same devices/3 "3 cudaSuccess" "$(CUEMU_DEVICES=3 "$tmp/plain" devices 2>/dev/null)"
    same devices/visible "2 cudaSuccess" \
        "$(CUEMU_DEVICES=3 CUDA_VISIBLE_DEVICES=2,0,7,1 "$tmp/plain" devices 2>/dev/null)"
    local none
    for none in "" -1; do
        same "devices/visible_'$none'" "0 cudaErrorNoDevice" \
            "$(CUEMU_DEVICES=3 CUDA_VISIBLE_DEVICES=$none "$tmp/plain" devices 2>/dev/null)"
    done
    start plain CUEMU_MEMORY=1000 ""
    same memory "exit 3, out of memory" "exit $status, $(grep -o 'out of memory' "$err")"
    same sm/default "sm_90 132 232448 233472 2048 32" "$("$tmp/plain" properties 2>/dev/null)"
    same sm/80 "sm_80 108 166912 167936 2048 32" "$(CUEMU_SM=80 "$tmp/plain" properties 2>/dev/null)"
    start plain CUEMU_SM=70 properties
    holds sm/unknown "a report" "$(cat "$err")" grep -qx 'cuda_on_cpu: CUEMU_SM=70: expected 75, 80, .* or 120' "$err"
    local function
    for function in cudaMalloc cudaMallocHost cudaFuncSetAttribute; do
        start plain CUEMU_FAIL=$function ""
        same "fails/$function" "exit 3, unknown error" "exit $status, $(grep -o 'unknown error' "$err")"
    done
    same says_so "emulated CUDA on the CPU: results are real, times mean nothing" \
        "$("$tmp/plain" bugs 2>&1 >"$tmp/bugs")"
}

test_refuses() {
    refuses float_atomics 'atomicAdd of floats: the sum would depend on the order' <<'END'
__global__ void k(float *a) { atomicAdd(a, 1.0f); }
END
    refuses half_arithmetic 'no match for|invalid operands' <<'END'
__global__ void k(__half *a) { a[0] = a[1] + a[2]; }
END
    refuses two_shared_arrays write_one_shared_array_per_declaration <<'END'
__global__ void k(float *a) { __shared__ float s[2], t[2]; s[0] = t[0] = a[0]; }
END
    refuses much_static_shared_memory 'ends at 48 KB' <<'END'
__global__ void k(float *a) { __shared__ float s[12289]; s[0] = a[0]; }
END
}

test_address_sanitizer() {
    build asan "$gxx" -O1 -g1 -fsanitize=address -fno-omit-frame-pointer || return
    right asan CUEMU_DEVICES=2 CUEMU_ORDER=1
    local report='AddressSanitizer: heap-buffer-overflow'
    bug out_of_range asan "$report"
    bug out_of_shared asan "$report"
    bug out_of_dynamic asan "$report"
    start asan bug_out_of_shared
    line_in_report asan/names_line 'emulator_test.cu:[0-9]+'
    line_in_report asan/names_thread '^cuda_on_cpu: kernel .*block \(0,0,0\), thread \(31,0,0\)'
}

line_in_report() { holds "$1" "a line $2" "$(head -n 30 "$err")" grep -qE -- "$2" "$err"; }

test_race_detector() {
    local name=tsan order
    build tsan "$clangxx" -O1 -g1 -fsanitize=thread || return # gcc's finds less
    for order in 0 1 7; do
        right tsan CUEMU_DEVICES=2 CUEMU_ORDER=$order
    done
    local report='ThreadSanitizer: data race' bug
    for bug in missing_barrier missing_second_barrier missing_syncwarp race_between_blocks \
        missing_fence; do
        bug $bug tsan "$report"
    done
    bug missing_barrier tsan "$report" CUEMU_ORDER=1
    start tsan bug_missing_barrier
    line_in_report tsan/names_line 'emulator_test.cu:[0-9]+'
    line_in_report tsan/names_thread 'block \(0,0,0\), thread \([0-9]+,0,0\) of reverse'
}

# counted KERNEL LAUNCHES READS WRITES SHARED_READS SHARED_WRITES, each as accesses (bytes)
counted() {
    same "counts/$1" "$*" "$(grep "^$1 " "$err" | tr -s ' ')"
}

test_counting() {
    cd "$repo/tests/emulator" && rewrite emulator_test.cu |
        compile "$gxx" -O1 -fsanitize=thread -DCUEMU_COUNT -c -o "$tmp/count.o" 2>"$err"
    same build/count "exit 0, " "exit ${PIPESTATUS[1]}, $(cat "$err")"
    cd "$tmp/cwd" && "$gxx" "$tmp/count.o" -o "$tmp/count" -lm || return
    right count
    start count mended_missing_barrier
    counted reverse 1 "0 (0)" "64 (256)" "64 (256)" "64 (256)"
    start count mended_missing_wait # 8 threads copy 16 bytes each, poisoned before
    counted copies 1 "8 (128)" "8 (32)" "8 (32)" "8 (128)"
    start count mended_misaligned_ldmatrix # 264 elements; 32 lanes load a row of 16 bytes each
    counted loads_matrix 1 "0 (0)" "128 (512)" "32 (512)" "264 (528)"
    start count mended_race_between_blocks
    counted all_add 1 "0 (0)" "4 (16)" "0 (0)" "0 (0)"
    start count mended_misaligned_four # 16 threads copy 16 bytes each, one access
    counted copies_fours 1 "16 (256)" "16 (256)" "0 (0)" "0 (0)"
}

if ! command -v "$gxx" >/dev/null; then
    skip all "$gxx is not installed"
    exit 0
fi
tried=()
test_plain
test_environment
test_bugs
test_refuses
if [ -n "${QUICK:-}" ]; then
    skip sanitizers "QUICK=1"
    exit 0
fi
test_address_sanitizer
test_race_detector
test_counting
same tried_all "$(sort "$tmp/bugs")" "$(printf '%s\n' "${tried[@]}" | sort -u)"
exit 0
