# Which labs there are: those with a handout and tests. starter.sh, check.sh and gradescope/pack.sh source
# this in the project's folder.
# shellcheck shell=bash

available() {
    local n
    for n in 0 1 2 3 4 5 6 7 8 9; do
        [ -f "labs/lab0$n/README.md" ] && [ -f "labs/check/lab0$n.sh" ] && echo "$n"
    done
    return 0
}

# need_lab LAB USAGE: ends with exit status 2 if LAB is none of them
need_lab() {
    available | grep -qxF -- "${1:-none}" && return
    echo "LAB=$1: there is no such lab; available: $(available | paste -sd ' '). Usage: $2" >&2
    exit 2
}
