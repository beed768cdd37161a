#!/usr/bin/env bash
# What takes longer than make test-all: the long forms of some tests, which share the minutes.
#
#   tests/run_long.sh [ROW...]      MINUTES=N in the environment (default 60)
#
# make test-long builds what they use and calls this program; `make test-long MINUTES=10 ROWS=fuzz` runs
# one. Each row ends with a line: what is promised, how many cases were tried, and the result. A row that
# needs a certain time is skipped where its share is shorter. Fuzzing and mutations go on where the last
# call ended (build/fuzz, build/mutations). All output is in build/long.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export LC_ALL=C LONG=1 CNN=${CNN:-./cnn}
logs=build/long minutes=${MINUTES:-60}
# shellcheck source=tests/leftovers.sh
source tests/leftovers.sh || exit 1

# Row, parts of 100 of the minutes, least seconds (0: as many cases as fit), promise, command
rows='
fuzz        25  0    bad files, options and checkpoints cannot hurt        tests/robust/test_fuzz.sh
soak        15  0    after any signal a run goes on to the same bytes      tests/robust/test_soak.sh
mutations   40  0    the tests would notice a bug                          python3 tests/source/mutate.py --at-least 28 --minutes @
faults      5   180  no failed call and no kill loses a checkpoint         tests/robust/test_faults.sh
portability 15  540  other compilers, libc and processors compute the same tests/robust/test_portability.sh
containers  0   300  the images of labs/containers build the program and train tests/program/test_containers.sh
ptx         0   900  what nvcc compiled shows planted bugs                 tests/ptx/planted.sh
kernels     0   900  the kernels have no races; planted bugs are noticed   tests/run_tests.sh gpu/test_cuda.sh gpu/test_nvcc.sh
'

count() { grep -ac "^$1 " "$logs/$2.log"; }

# run_row NAME PARTS LEAST PROMISE COMMAND...
run_row() {
    local name=$1 seconds=$(($2 * minutes * 60 / 100)) least=$3 promise=$4 result begin=$SECONDS
    shift 4
    [ "$least" -eq 0 ] || [ $((minutes * 60)) -ge $((3 * least)) ] || [ "$named" ] || {
        echo "skip $name: $promise: takes $((least / 60)) minutes, so give MINUTES=$((least / 20)) or ROWS=$name"
        return
    }
    [ -z "$named" ] || seconds=$((minutes * 60 / rows_named))
    SECONDS_LONG=$seconds watched "$name" "$logs/$name.log" "${@/#@/$((seconds / 60))}"
    result=$?
    if [ $result -ne 0 ] || [ "$(count fail "$name")" -gt 0 ]; then
        echo "fail $name: exit status $result" >>"$logs/$name.log"
        result=FAILED
    else
        result=passed
    fi
    printf '%-12s %-56s %9d cases  %s, %d skipped, %d s\n' "$name" "$promise" \
        "$(awk '/^cases / { n += $3 } /^pass / { p++ } /^[0-9]+ passed, / { p += $1 } END { print n ? n : p + 0 }' "$logs/$name.log")" \
        "$result" "$(count skip "$name")" "$((SECONDS - begin))"
}

names=$(awk 'NF { print $1 }' <<<"$rows")
for row; do
    grep -qx -- "$row" <<<"$names" && continue
    echo "$0: there is no row $row; the rows are: ${names//$'\n'/ }" >&2
    exit 2
done
named=$* rows_named=$#
# shellcheck disable=SC2086 # names without blanks
[ "$named" ] || set -- $names
rm -rf "$logs" && mkdir -p "$logs" && paths >"$logs/paths" || exit 1
for row; do
    read -r name parts least line < <(grep "^$row " <<<"$rows")
    promise=$(sed 's/  *\(tests\/\|python3 \).*//' <<<"$line")
    # shellcheck disable=SC2086 # the command is split into words
    run_row "$name" "$parts" "$least" "$promise" ${line#"$promise"}
done
left_in_tree "$logs/paths" "$logs"/*.log >"$logs/left_in_tree.log"
cat "$logs"/*.log | grep -a '^skip ' | sort | uniq
cat "$logs"/*.log | grep -a '^fail '
[ "$(cat "$logs"/*.log | grep -ac '^fail ')" -eq 0 ]
