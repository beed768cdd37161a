#!/usr/bin/env bash
# tests/bench/bench.sh, with a build/bench, a ./cnn and a Python that only pretend to measure: the rows of its table,
# where PyTorch works and where it fails, and under a locale with a decimal comma.
# Prints `pass bench/NAME`, `fail bench/NAME: expected ..., found ...` or `skip bench/NAME: why`.
suite=bench
: "${CNN:=$(type -P true)}" # not run here
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

mkdir -p tests/bench build
cp "$repo/tests/bench/bench.sh" tests/bench
cp "$repo/tests/python_with.sh" tests
pretend() { # PROGRAM <SCRIPT
    { echo '#!/bin/sh' && cat; } >"$1"
    chmod +x "$1"
}
pretend build/bench <<<'echo "steps_img_per_s=1234.6 times_one_thread=1.85 two_programs=1.91 percent_of_peak=51.4 rss_mb=98"'
pretend cnn <<<'echo "epoch=1 img_per_s=4321"'
pretend works <<<'echo "torch img_per_s=500.5 rss_mb=300"'
pretend fails <<'END'
[ "$1" = -c ] || { echo "no such model" >&2; exit 1; }
END

# row PYTHON: the first row of the table
row() {
    NETS=mnist,64 THREADS=1 PYTHON=./$1 tests/bench/bench.sh 2>"$err" | grep '^mnist ' | tr -s ' '
}
same works "mnist 64 1 1234.6 1.85 1.91 51.4 98 500.5 300 2.47" "$(row works)"
same fails "mnist 64 1 1234.6 1.85 1.91 51.4 98 - - -" "$(row fails)"
same fails/says_why "no such model" "$(sort -u "$err")" # once for each table
comma=$(locale -a 2>/dev/null | grep -m 1 -iE '^(de|fr|es|it)_.*utf-?8$')
if [ -n "$comma" ]; then
    same comma "$(row works)" "$(LC_ALL=$comma row works)"
else
    skip comma "no locale with a decimal comma; Debian: apt-get install locales-all"
fi

# build/bench itself. --layers: the passes of each product.
bench=$repo/build/bench
if [ ! -x "$bench" ]; then
    skip itself "build/bench was not built: make test-all does"
    exit 0
fi
"$bench" --model mnist --batch-size 2 --threads 1 >"$out"
line itself ' steps_img_per_s=[\d.]+ times_one_thread=1\.00 .* percent_of_peak=[\d.]+ rss_mb=\d+ '
"$bench" --model mnist --batch-size 2 --threads 1 --layers >"$out"
same layers "conv1 forward weights,conv2 forward weights data,fc1 forward weights data,fc2 forward weights data" \
    "$(grep ' forward' "$out" | grep -oE '^[a-z0-9]+|forward|weights|data' | xargs | sed 's/ \(conv2\|fc[12]\)/,\1/g')"
exit 0
