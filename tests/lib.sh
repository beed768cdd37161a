# Shared by the tests of ./cnn, which source it after they have set suite=NAME: helpers to run ./cnn
# in a folder of its own and to print `pass NAME/TEST`, `fail NAME/TEST: expected ..., found ...` or
# `skip NAME/TEST: why`. CNN=PATH: another binary.
# shellcheck shell=bash
set -u
: "${suite:?}"
export LC_ALL=C
# The sanitizers of some compilers fail at random where addresses are randomized, in more bits than they know.
if [ -z "${FIXED_ADDRESSES:-}" ] && setarch -R true 2>/dev/null; then
    FIXED_ADDRESSES=1 exec setarch -R bash "$0" "$@"
fi
unset SLURM_CPUS_PER_TASK
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || exit 1
# shellcheck source=tests/open_mpi.sh
source "$repo/tests/open_mpi.sh" || exit 1
cnn=$(realpath -e "${CNN:-$repo/cnn}" 2>/dev/null) || {
    echo "$0: there is no ${CNN:-$repo/cnn}; build it first: make cnn NO_CUDA=1" >&2
    exit 1
}
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
mkdir "$tmp/cwd" && cp "$repo/cnn.c" "$tmp/cwd/" && cd "$tmp/cwd" || exit 1

one_line() { tr '\n\t' '| ' | cut -c 1-300; }
pass() { echo "pass $suite/$1"; }
fail() { echo "fail $suite/$1: expected $(one_line <<<"$2"), found $(one_line <<<"$3")"; }
skip() { echo "skip $suite/$1: $2"; }
cases() { echo "cases $suite: $1 $2"; } # how many were tried; make test-long adds them up

# The number by which tests that take a part of their cases each day choose it. ROTATION=N: another day's.
day() { echo $((10#${ROTATION:-$(date +%j)})); }

# share I [N]: whether case number I, counted from 0, is among those that this run tries: in make test-all one
# of N (a third), others each day, in make test-long (LONG=1) all.
share() { [ -n "${LONG:-}" ] || [ $((($1 + $(day)) % ${2:-3})) -eq 0 ]; }

# same NAME EXPECTED FOUND
same() { if [ "$2" = "$3" ]; then pass "$1"; else fail "$1" "$2" "$3"; fi; }

# holds NAME EXPECTED FOUND COMMAND...: the command must succeed; the words are for the report
holds() {
    local name=$1 expected=$2 found=$3
    shift 3
    if "$@" >/dev/null; then pass "$name"; else fail "$name" "$expected" "$found"; fi
}

# line NAME REGEX: a line of the last run's output matches
line() { holds "$1" "a line $2" "$(tail -n 30 "$out")" grep -qP -- "$2" "$out"; }

# at_least NUMBER BOUND
# shellcheck disable=SC2317 # holds calls it
at_least() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a != "" && a + 0 >= b) }'; }

# near NAME EXPECTED FOUND: to 5 digits
near() {
    # shellcheck disable=SC2016 # awk's own $
    holds "$1" "$2" "$3" awk -v a="$2" -v b="$3" \
        'BEGIN { d = a - b; if (d < 0) d = -d; s = a < 0 ? -a : a; exit !(b != "" && d <= 1e-5 * s) }'
}

out=$tmp/stdout err=$tmp/stderr

# one_error PROGRAM NAME WORDS...: the last command ended with status 1 and one line on stderr,
# `PROGRAM: error: ...`, with these words
one_error() {
    local word wrong=0
    [ "$status" -eq 1 ] && [ "$(wc -l <"$err")" -eq 1 ] || wrong=1
    for word in "$1: error: " "${@:3}"; do
        grep -qF -- "$word" "$err" || wrong=1
    done
    holds "$2" "exit 1 and one line with: ${*:3}" "exit $status and $(cat "$err")" [ $wrong = 0 ]
}
run() {
    "$cnn" "$@" >"$out" 2>"$err" </dev/null
    status=$?
}
value() { grep '^epoch=' "$out" | tail -n 1 | tr ' ' '\n' | sed -n "s/^$1=//p"; }

# ignoring_children COMMAND...: as a parent starts it that ignores SIGCHLD, which the command inherits
ignoring_children() { (trap '' CHLD && exec "$@"); }

# setting NAME: its value in the line "Settings:" of the last run
setting() { grep '^Settings:' "$out" | grep -oP -- " --$1 \K[^ ]+"; }

# refused NAME STATUS WORD OPTIONS...: ends with that status and one line on stderr, with the word.
# A program that ends with an error frees nothing, so leaks are not looked for.
refused() {
    local name=$1 wanted=$2 word=$3
    shift 3
    ASAN_OPTIONS=detect_leaks=0 run "$@"
    if [ "$status" -eq "$wanted" ] && [ "$(wc -l <"$err")" -eq 1 ] &&
        grep -q '^cnn: error: ' "$err" && grep -qF -- "$word" "$err"; then
        pass "$name"
    else
        fail "$name" "exit $wanted and one line 'cnn: error: ...$word...'" \
            "exit $status and $(cat "$err")"
    fi
}

# Everything that a run computed, without its times.
figures() {
    grep -E '^(Train Epoch|Test set: A)' "$out"
    grep -oE '\b(train_loss|train_accuracy|test_loss|accuracy)=[^ ]+' "$out"
}

# python NAME ARGUMENTS... <PROGRAM: passes if it prints nothing, else fails with what it printed
python() {
    local name=$1
    shift
    if ! command -v python3 >/dev/null; then
        skip "$name" "python3 is not installed"
        return
    fi
    local said
    said=$(python3 - "$@" 2>&1)
    same "$name" "" "$said"
}

# trace_is_good NAME FILE EVENTS: strict JSON; events of a track nest, and a device's events lie within a
# step of their rank. EVENTS, RANK:TRACK or RANK:TRACK:EVENT with commas between them, are there.
trace_is_good() {
    python "$1" "$2" "$3" <<'END'
import json, sys
def no_constant(word):
    raise ValueError(word)
events = json.load(open(sys.argv[1]), parse_constant=no_constant)["traceEvents"]
names = {(e["pid"], e["tid"]): "%d:%s" % (e["pid"], e["args"]["name"])
         for e in events if e["name"] == "thread_name"}
tracks = {}
for e in events:
    if e["ph"] == "X":
        tracks.setdefault(names.get((e["pid"], e["tid"]), "0:nameless"), []).append(e)
found = set(tracks) | {track + ":" + e["name"] for track in tracks for e in tracks[track]}
if "0:nameless" in found:
    print("a track without a name:", tracks["0:nameless"][0])
for wanted in sys.argv[2].split(","):
    if wanted not in found:
        print("expected", wanted, "among", sorted(found))
def inside(e, outer):
    return outer["ts"] <= e["ts"] + .01 and e["ts"] + e["dur"] <= outer["ts"] + outer["dur"] + .01
for name, track in tracks.items():
    open_ones = []
    for e in sorted(track, key=lambda e: (e["ts"], -e["dur"])):
        while open_ones and open_ones[-1]["ts"] + open_ones[-1]["dur"] <= e["ts"] + .01:
            open_ones.pop()
        if e["dur"] < 0 or (open_ones and not inside(e, open_ones[-1])):
            print(name, e, "does not nest")
        open_ones.append(e)
    steps = tracks.get(name.replace("device", "steps"), [])
    for e in track:
        if name.endswith(":device") and not any(inside(e, step) for step in steps):
            print(name, e, "lies in no step")
END
}

# ---- Files of a run

# same_file NAME A B
same_file() { holds "$1" "$2 equal to $3" "other bytes, or none" cmp -s "$2" "$3"; }

# position CHECKPOINT epoch|batch: from the metadata, at the begin of the file
position() { head -c 3000 "$1" 2>/dev/null | grep -aoP -m1 "\"$2\":\"\K[0-9]+"; }

status_of() { grep -oP '"status": "\K[a-z]+' "$1/run.json"; } # FOLDER

# run_rows FOLDER: its steps and epochs, without times and rates
run_rows() {
    cut -d, -f1-6,16 "$1/steps.csv"
    cut -d, -f1,2,6,7,9- "$1/epochs.csv"
}

# until_true COMMAND...: waits until it succeeds. Fails after WAIT_S seconds, which is more than what works takes on
# a busy machine.
until_true() {
    local end=$((SECONDS + ${WAIT_S:-240}))
    until "$@"; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.05
    done
}

# ---- Data files

be32() {
    local hex
    hex=$(printf '%08x' "$1")
    printf '%b' "\\x${hex:0:2}\\x${hex:2:2}\\x${hex:4:2}\\x${hex:6:2}"
}

# images COUNT [MAGIC [ROWS [COLUMNS]]], labels COUNT [MAGIC]: an IDX file to stdout
images() {
    local rows=${3:-28} columns=${4:-28}
    be32 "${2:-2051}" && be32 "$1" && be32 "$rows" && be32 "$columns"
    yes 'Any bytes do: images of nothing.' 2>/dev/null | head -c $(($1 * rows * columns))
}
labels() {
    local i
    be32 "${2:-2049}" && be32 "$1"
    for ((i = 0; i < $1; i++)); do printf '%b' "\\x0$((i % 10))"; done
}

train_images=train-images-idx3-ubyte train_labels=train-labels-idx1-ubyte
test_images=t10k-images-idx3-ubyte test_labels=t10k-labels-idx1-ubyte
make_data() {
    rm -rf "$tmp/idx"
    mkdir "$tmp/idx" && cd "$tmp/idx" || exit 1
    images 20 >$train_images
    labels 20 >$train_labels
    images 10 >$test_images
    labels 10 >$test_labels
    cd "$tmp/cwd" || exit 1
}
