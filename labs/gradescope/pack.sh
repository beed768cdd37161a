#!/usr/bin/env bash
# make gradescope LAB=n [OUT=file.zip]: what to upload as a Gradescope autograder. It holds the lab's
# starter, which has no answers in it, since a student's program might look around while it is tested.
set -eu
cd "$(dirname "$0")/../.."
lab=${1:-} out=${2:-lab0$1-gradescope.zip}
if [[ ! $lab =~ ^[0-9]$ ]] || [ ! -f "labs/check/lab0$lab.sh" ]; then
    echo "usage: make gradescope LAB=n [OUT=file.zip]; there is no checker for lab '$lab'" >&2
    exit 2
fi
[[ $out = /* ]] || out=$PWD/$out
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
labs/check/starter.sh "$lab" "$folder" >/dev/null
cp labs/gradescope/setup.sh labs/gradescope/run_autograder "$folder"
chmod +x "$folder"/setup.sh "$folder"/run_autograder
echo "$lab" >"$folder/lab"
cd "$folder"
rm -f "$out"
if command -v zip >/dev/null; then
    zip -qr "$out" .
elif command -v python3 >/dev/null; then
    python3 -m zipfile -c "$out" ./*
elif command -v bsdtar >/dev/null; then
    bsdtar -a -cf "$out" ./*
elif command -v 7z >/dev/null; then
    7z a -bd "$out" ./* >/dev/null
else
    out=${out%.zip}.tar.gz
    tar -czf "$out" ./*
    echo "no zip, python3, bsdtar or 7z here: Gradescope wants a zip, so repack $out"
fi
echo "$out: upload it on Gradescope, Configure Autograder, for lab $lab"
