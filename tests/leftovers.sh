# Shared by run_tests.sh and run_long.sh: what a part of the tests leaves behind - processes, temporary files, files
# in the work tree - is named, and ended or removed.
# shellcheck shell=bash

# Every process that a part starts inherits this mark in its environment, also one in a session of its own, so the mark
# finds them all. A runner that a part starts adds its own mark to the part's.
# marked MARK: the numbers of the processes that have it and run
marked() { grep -alsF -- "$1" /proc/[0-9]*/environ | grep -o '[0-9]*'; }

# end_marked MARK: ends these processes, and prints the command of each that had not ended by itself in ten seconds
end_marked() {
    local i pid pids
    for ((i = 0; i < 50; i++)); do
        pids=$(marked "$1")
        [ "$pids" ] || return
        sleep 0.2
    done
    for pid in $pids; do
        echo "process $pid, $(tr '\0\n' '  ' <"/proc/$pid/cmdline" | cut -c 1-200)"
    done 2>/dev/null # it may have ended by now
    while [ "$pids" ]; do
        # shellcheck disable=SC2086 # split into numbers
        kill -KILL $pids 2>/dev/null
        sleep 0.1
        pids=$(marked "$1")
    done
}

# watched PART LOG COMMAND...: runs the command in the background with a mark and a folder for temporary files of its own,
# and waits for it. What it leaves are lines `fail PART: left ...` at the end of its output, LOG. The status is the
# command's.
watched() {
    local part=$1 log=$2 mark temporary status left
    mark="[$1 $BASHPID]"
    shift 2
    temporary=$(mktemp -d "${TMPDIR:-/tmp}/cnn.XXXXXX") || exit 1
    chmod 711 "$temporary" # a part may start programs as another user, such as munged
    echo "$part" >"$log.begin"
    (
        # Python would write __pycache__ beside the programs of the work tree
        export TEST_PART="${TEST_PART:-}$mark" TMPDIR=$temporary PYTHONDONTWRITEBYTECODE=1
        "$@"
    ) </dev/null >"$log" 2>&1 &
    # Ctrl-C reaches no process group of its own, such as that of timeout
    # shellcheck disable=SC2064 # of this call
    trap "kill -TERM \$(marked '$mark'); end_marked '$mark' >/dev/null; rm -rf '$temporary'; exit 130" INT TERM HUP
    wait $!
    status=$?
    trap - INT TERM HUP
    left=$(end_marked "$mark")
    left+=$(find "$temporary" -mindepth 1 -maxdepth 1 -printf '\nthe temporary file %f')
    rm -rf "$temporary"
    touch "$log.end"
    echo >>"$log" # a part that broke off may have left a line unfinished
    sed -n "/./s,^,fail $part: left ,p" <<<"$left" >>"$log"
    return $status
}

# paths: all in the work tree but what git, make and pip keep in theirs
paths() { find . \( -path ./.git -o -path ./build -o -path ./.venv \) -prune -o -print | LC_ALL=C sort; }

# left_in_tree PATHS LOG...: a verdict for each file that is not in PATHS, a list from before. Parts run side by side: the
# last change of a file lies in the time of the part that left it, and of others beside it unless JOBS is 1.
left_in_tree() {
    local file log ran
    paths | LC_ALL=C comm -13 "$1" - | awk 'index($0, folder "/") != 1 { print folder = $0 }' | while read -r file; do
        ran=()
        for log in "${@:2}"; do
            [ -z "$(find "$file" -prune -newercm "$log.begin" ! -newercm "$log.end")" ] || ran+=("$(cat "$log.begin")")
        done
        case ${#ran[@]} in
        0) echo "fail run_tests.sh: left $file in the work tree, or another program did" ;;
        1) echo "fail ${ran[0]}: left $file in the work tree" ;;
        *) echo "fail one of ${ran[*]}: left $file in the work tree; which one: make test JOBS=1 PARTS='${ran[*]}'" ;;
        esac
    done
}
