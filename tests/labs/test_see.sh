#!/usr/bin/env bash
# Tests make see: kernels whose requests, sectors and conflicts were worked out by hand (see_kernels.cu), the accesses
# against those that the emulator's table counts, the figures against what nvcc compiled (tests/ptx), errors, starters,
# and the page in chromium: the numbers that it draws against the table's, keys, the width of a phone.
# Prints `pass see/NAME`, `fail see/NAME: expected ..., found ...` or `skip see/NAME: why`.
suite=see
: "${CNN:=$(type -P true)}" # not run here
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
unset CUEMU_SEE CUEMU_SEE_BLOCK CUEMU_SEE_LAUNCH CUEMU_SEE_FILE CUEMU_ORDER CUEMU_PROTECT CUEMU_LAZY
for needed in python3 "${CXX:-g++}" addr2line objdump; do
    command -v "$needed" >/dev/null || { skip all "$needed is not installed"; exit 0; }
done
if ! make -s -C "$repo" NO_CUDA=1 NO_MPI=1 build/emu_see_kernels >"$out" 2>&1; then
    fail build "exit 0" "$(cat "$out")"
    exit 0
fi
source=$repo/tests/labs/see_kernels.cu

# see KERNEL [OPTIONS...]: its table to $out, the emulator's table of counts to counts
see() {
    rm -f see.txt
    { CUEMU_SEE=$1 "$repo/build/emu_see_kernels" all; } >"$out" 2>counts &&
        python3 "$repo/labs/tools/see.py" see.txt --source "$source" "${@:2}" >"$out" 2>"$err"
    status=$?
}

# Of each kernel, by row of the page's table (the line is left out, rows that follow each other are in the order of the
# lines): of global memory requests, lanes on, sectors, per cent used; of shared memory requests, lanes on, passes,
# conflicts. "flop N" and "unordered N", the pairs of threads without a barrier between, where there are any.
#
# 64 threads are 2 warps. 32 lanes x 4 bytes are 128 bytes: 4 sectors if neighbors, 8 with stride 2, 32 with stride 32,
# 5 if they begin at byte 4. 32 x 16 bytes: 16 sectors; in shared memory 4 parts of 8 lanes, a pass each. 32 x 2 bytes:
# 2 sectors. A column of a tile of 32 x 32 lies in one bank: 32 passes, 31 of them conflicts, for each of 32 warps.
by_hand='
stride_1           read in 2 32.0 8 100|write out 2 32.0 8 100
stride_2           read in 2 32.0 16 50|write out 2 32.0 8 100
stride_32          read in 2 32.0 64 13|write out 2 32.0 8 100
shifted            read in 2 32.0 10 80|write out 2 32.0 8 100
broadcast          read in 2 32.0 2 13|write shared 2 32.0 2 0|read shared 2 32.0 2 0|write out 2 32.0 8 100
fours              read in 2 32.0 32 100|write shared 2 32.0 8 0|read shared 2 32.0 8 0|write out 2 32.0 32 100
halves             read in 2 32.0 4 100|write out 2 32.0 4 100
transpose          read in 32 32.0 128 100|write tile 32 32.0 32 0|read tile 32 32.0 1024 992|write out 32 32.0 128 100
transpose_padded   read in 32 32.0 128 100|write tile 32 32.0 32 0|read tile 32 32.0 32 0|write out 32 32.0 128 100
two_to_a_bank      read in 2 32.0 8 100|write shared 2 32.0 4 2|read shared 2 32.0 4 2|write out 2 32.0 8 100
odd_lanes          read in 2 16.0 8 50|write out 2 16.0 8 50
by_turns           read in 8 16.0 32 50|write out 2 32.0 8 100|flop 128
ragged             read in 8 20.0 32 63|write out 2 32.0 8 100|flop 160
scaled_sum         read x 2 32.0 8 100|read y 2 32.0 8 100|write out 2 32.0 8 100|flop 128
all_add            atomic out 2 32.0 2 13
reversed           read in 2 32.0 8 100|write shared 2 32.0 2 0|read shared 2 32.0 2 0|write out 2 32.0 8 100
reversed_in_warp   read in 2 32.0 8 100|write shared 2 32.0 2 0|read shared 2 32.0 2 0|write out 2 32.0 8 100
'

# rows: the table in $out in that form, each row sorted within its line's order
rows() {
    awk '
        $2 ~ /^(read|write|atomic)$/ {
            text = $3 == "shared" ? $5 " " $6 " " $8 " " $9 : $5 " " $6 " " $8 " " $10
            print $2, $4, text
        }
        $2 == "FLOP," && $1 > 0 { print "flop", $1 }
        /^no barrier between/ { sub(/.*\(/, ""); print "unordered", $1 }' "$out"
}
in_order() { tr '|' '\n' | sort; }

# Without the compiler's help (g++ before 12), lanes that skip a step of a loop are not told apart, and nothing counts
# FLOP.
traces() { grep -qE '^thread 0 [0-9a-f]+ ' see.txt; }

test_by_hand() {
    local kernel expected
    while read -r kernel expected; do
        [ "$kernel" ] || continue
        see "$kernel"
        if ! traces && [[ $expected = *flop* ]]; then
            skip "by_hand/$kernel" "${CXX:-g++} has no -fsanitize-coverage=trace-pc that can be left out of a function"
            continue
        fi
        same "by_hand/$kernel" "exit 0: $(in_order <<<"$expected")" "exit $status: $(rows | sort)"
        test_counts "$kernel"
    done <<<"$by_hand"
}

# test_counts KERNEL: accesses and bytes of the page, summed over its lines, are those that the emulator has counted.
test_counts() {
    local expected found
    expected=$(awk -v kernel="$1" '$1 == kernel { gsub(/[()]/, ""); $1 = $2 = ""; print }' counts | xargs)
    found=$(awk '
        $2 ~ /^(read|write|atomic)$/ {
            kind = $3 " " ($2 == "read" ? "read" : "write")
            bytes[kind] += $7
            lanes[kind] += $5 * $6
        }
        END {
            count = split("global read,global write,shared read,shared write", kinds, ",")
            for (i = 1; i <= count; i++) printf "%s%d %d", (i > 1 ? " " : ""), lanes[kinds[i]], bytes[kinds[i]]
        }' "$out")
    same "counts/$1" "$expected" "$found"
}

test_hazards() {
    see reversed_too_early
    same hazard/found "no barrier between: thread 0 writes in line 122, thread 63 uses the same bytes in line 123" \
        "$(grep -o '^no barrier.*line [0-9]*' "$out")"
    same hazard/pairs "unordered 64" "$(rows | grep unordered)"
    for kernel in reversed reversed_in_warp; do # a barrier of the block, and one of the warp
        see $kernel
        same "hazard/$kernel" "exit 0, " "exit $status, $(grep '^no barrier' "$out")"
    done
}

# What nvcc compiled of the same kernels makes the same requests: sectors a request, and passes without conflicts.
test_ptx() {
    local program=$repo/build/ptx/see_kernels kernel expected found
    [ -z "${QUICK:-}" ] || { skip ptx "QUICK=1" && return; }
    if [ ! -x "$program" ]; then
        skip ptx "make test-all builds build/ptx/see_kernels where there are nvcc and a CPU with AVX2"
        return
    fi
    for kernel in stride_1 stride_2 stride_32 shifted broadcast fours halves transpose transpose_padded two_to_a_bank \
        odd_lanes; do
        PTX_STATS=$kernel "$program" >"$out" 2>"$err"
        found=$(awk -v kernel="$kernel" '/^[^ ]/ { mine = $1 == kernel } # its name contains the one that was wanted
            mine && $1 ~ /^(ld|st)\.(global|shared):/ {
                match($0, /[0-9.]+ (sectors|passes)/)
                split(substr($0, RSTART), number, " ")
                print $1, number[1] + 0
            }' "$err" | sort)
        see "$kernel"
        expected=$(awk '
            $2 ~ /^(read|write)$/ {
                kind = ($2 == "read" ? "ld." : "st.") $3 ":"
                many[kind] += $8
                of[kind] += $3 == "shared" ? $8 - $9 : $5
            }
            END { for (kind in many) print kind, sprintf("%.2f", many[kind] / of[kind]) + 0 }' "$out" | sort)
        same "ptx/$kernel" "$expected" "$found"
    done
}

# FLOP of instructions: of x86-64's, packed ones and multiply-adds among them, and of ARM's
test_flop() {
    python flop "$repo/labs/tools" <<'END'
import sys
sys.path.insert(0, sys.argv[1])
import see
for name, operands, flop in (("vaddss", "%xmm0", 1), ("mulsd", "%xmm0", 1), ("vdivps", "%ymm1", 8),
                             ("vaddpd", "%xmm1", 2), ("vfmadd231ss", "%xmm2", 2),
                             ("vfnmadd132ps", "%zmm2", 32), ("vmovss", "%xmm0", 0),
                             ("add", "%rax", 0), ("fadd", "s0", 1), ("fmadd", "s0", 2), ("fmov", "s0", 0)):
    found = see.flop_of_instruction(name, operands)
    if found != flop:
        print(f"{name} {operands}: expected {flop}, found {found}")
END
}

test_errors() {
    see nothing_like_it
    same errors/kernel "exit 1, see.py: error: see.txt: No such file" "exit $status, $(cut -c 1-36 "$err")"
    holds errors/names "the kernels that were launched" "$(cat counts)" \
        grep -q '^cuda_on_cpu: CUEMU_SEE=nothing_like_it: .* launched were: all_add (1) broadcast (1) ' counts
    CUEMU_SEE_BLOCK=1 see stride_1
    holds errors/block "exit 134 or so, blocks 0 to 0" "exit $status, $(cat counts)" grep -q 'has blocks 0 to 0$' counts
    CUEMU_SEE_LAUNCH=1 see stride_1
    holds errors/launch "launch 1 was not found" "$(cat counts)" grep -q 'launch 1 of it was not found' counts
    echo nonsense >see.txt
    python3 "$repo/labs/tools/see.py" see.txt --source "$source" >"$out" 2>"$err"
    same errors/record "exit 1, see.py: error: see.txt: expected a record" "exit $?, $(cut -c 1-41 "$err")"
    see stride_1 --out page.html --with "$source"
    same errors/with "exit 1, see.py: error: --with: " "exit $status, $(cut -c 1-23 "$err")"
    make -s -C "$repo" see >"$out" 2>&1
    holds errors/no_kernel "which kernel?" "$(cat "$out")" grep -q 'expected the name of a kernel' "$out"
    same errors/lab "make see: expected LAB=4, 5 or 6, or no LAB, found LAB=10" \
        "$(make --no-print-directory -C "$repo" see LAB=10 KERNEL=mma_kernel 2>"$err")" # and nothing is compiled
}

# Two calls in one folder: neither reads the other's record. Both have written theirs before either goes on.
test_two_at_once() {
    local kernel calls=()
    cat >recorder <<'END'
#!/bin/sh
echo "$CUEMU_SEE" >"$CUEMU_SEE_FILE"
touch "$CUEMU_SEE.written"
until [ -e first.written ] && [ -e second.written ]; do sleep 0.05; done
END
    # shellcheck disable=SC2016 # the variables are the script's
    printf '#!/bin/sh\ncat "$2" >"$CUEMU_SEE.read"\n' >reader
    chmod +x recorder reader
    for kernel in first second; do
        CUEMU_SEE=$kernel PYTHON=./reader PAGE=$kernel.html WITH='' "$repo/labs/tools/see_block.sh" recorder 5 &
        calls+=($!)
    done
    wait "${calls[@]}"
    same two/records "first second" "$(cat first.read second.read 2>&1 | xargs)"
}

# ---- The page

test_page() {
    local browser=(env HOME="$tmp/browser" timeout -k 5 120 chromium --headless --no-sandbox --disable-gpu
        --disable-dev-shm-usage --hide-scrollbars --disable-background-networking) measured
    see transpose --out first.html
    see reversed_too_early --out page.html --with first.html
    same page/written "exit 0, page.html: open it in a browser" \
        "exit $status, $(grep -o '^page.html: [^(]*browser' "$out")"
    same page/requests "" "$(grep -oE '(src|href)=|https?://[^"]*' page.html | grep -v 'http://www.w3.org/2000/svg')"
    if ! command -v chromium >/dev/null ||
        ! "${browser[@]}" --dump-dom 'data:text/html,<p>it works' 2>"$err" | grep -q 'it works'; then
        skip page/browser "no chromium that works; on Debian: apt-get install chromium"
        return
    fi
    python3 "$repo/tests/labs/see_page.py" page.html frame.html
    "${browser[@]}" --dump-dom frame.html 2>"$err" >"$out"
    measured=$(sed -n 's/.*<pre id="measured">\([^<]*\)<.*/\1/p' "$out")
    same page/browser "" "$(python3 "$repo/tests/labs/see_page.py" judge page.html <<<"$measured")"
}

test_by_hand
test_hazards
test_ptx
test_flop
test_errors
test_two_at_once
test_page
exit 0
