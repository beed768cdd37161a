# Which labs there are: those with a handout and tests. starter.sh, check.sh, ../gradescope/pack.sh and
# ../classroom/generate.sh source this in the project's folder.
# shellcheck shell=bash

# lab_name LAB: lab03, lab10
lab_name() { printf 'lab%2s' "$1" | tr ' ' 0; }

available() {
    local n
    for n in 0 1 2 3 4 5 6 7 8 9 10; do
        [ -f "labs/$(lab_name "$n")/README.md" ] && [ -f "labs/check/$(lab_name "$n").sh" ] && echo "$n"
    done
    return 0
}

# need_lab LAB USAGE: ends with exit status 2 if LAB is none of them
need_lab() {
    available | grep -qxF -- "${1:-none}" && return
    echo "LAB=$1: there is no such lab; available: $(available | paste -sd ' '). Usage: $2" >&2
    exit 2
}
