#!/usr/bin/env bash
# labs/tools/lab_runs.sh 3: the folder reports/lab03 with a link to each run folder of lab 3, at any depth of runs/:
# `make report LAB=3` writes its report there. runs/lab03-workers/w1 becomes lab03-workers-w1.
set -eu
unset CDPATH
cd "$(dirname "$0")/../.."
lab=${1:-} name=$(printf 'lab%2s' "${1:-}" | tr ' ' 0)
folder=reports/$name
if [[ ! $lab =~ ^([0-9]|10)$ ]]; then
    echo "LAB=$lab: expected the number of a lab, 0 to 10. Usage: make report LAB=n, make verify LAB=n" >&2
    exit 2
fi
mkdir -p "$folder"
find "$folder" -maxdepth 1 -type l -delete
found=
while read -r run; do
    run=$(dirname "$run") link=${run#runs/}
    ln -sfn "../../$run" "$folder/${link//\//-}"
    found=yes
done < <(find -L runs -path "runs/$name*" -name run.json 2>/dev/null | sort)
if [ -z "$found" ]; then
    echo "make report LAB=$lab: there is no run folder runs/$name...; labs/$name/README.md says what to run and what to hand in" >&2
    exit 2
fi
