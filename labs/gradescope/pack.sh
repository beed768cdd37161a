#!/usr/bin/env bash
# make gradescope LAB=n [OUT=file.zip]: makes the file to upload as a Gradescope autograder. It contains
# the lab's starter, without answers, since a student's program could read files while it is tested.
set -eu
cd "$(dirname "$0")/../.."
lab=${1:-}
# shellcheck source=labs/check/available.sh
. labs/check/available.sh
need_lab "$lab" "make gradescope LAB=n [OUT=file.zip]"
out=${2:-$(lab_name "$lab")-gradescope.zip}
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
    echo "found no zip, python3, bsdtar or 7z: Gradescope expects a zip file, so repack $out"
fi
echo "Written: $out; upload it to Gradescope, Configure Autograder, for lab $lab"
