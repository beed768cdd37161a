#!/usr/bin/env bash
# labs/tools/lab_runs.sh N: the folder reports/lab0N with a link to each run folder of lab N, at any depth of runs/:
# `make report LAB=N` writes its report there. runs/lab03-workers/w1 becomes lab03-workers-w1.
set -eu
unset CDPATH
cd "$(dirname "$0")/../.."
lab=${1:-} folder=reports/lab0${1:-}
if [[ ! $lab =~ ^[0-9]$ ]]; then
    echo "LAB=$lab: expected the number of a lab, 0 to 9. Usage: make report LAB=n, make verify LAB=n" >&2
    exit 2
fi
mkdir -p "$folder"
find "$folder" -maxdepth 1 -type l -delete
found=
while read -r run; do
    run=$(dirname "$run") name=${run#runs/}
    ln -sfn "../../$run" "$folder/${name//\//-}"
    found=yes
done < <(find -L runs -path "runs/lab0$lab*" -name run.json 2>/dev/null | sort)
if [ -z "$found" ]; then
    echo "make report LAB=$lab: there is no run folder runs/lab0$lab...; labs/lab0$lab/README.md has the commands" >&2
    exit 2
fi
