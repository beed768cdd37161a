#!/usr/bin/env bash
# Draws the figures of README.md, labs/results.md and labs/tools/README.md again, in the project's folder after `make`:
#
#     labs/figures/make.sh [DIR [OPTIONS...]]
#
# It trains for one epoch, as `make run` does, and makes a small study on the CPU. Of the first it draws run.png,
# roofline.png, samples.png and, with an untrained network, filters.png, of the second study.png and loss.png, of a
# short run with augmentation augment.png, and of bench.csv bench.png, into DIR (default: labs/figures). OPTIONS are
# passed to ./cnn. Layers and runs are timed: nothing else should run. CNN=PATH: another program. Needs a python3 with matplotlib.
set -eu
unset CDPATH
cd "$(dirname "$0")/../.."
out=${1:-labs/figures}
[ $# -eq 0 ] || shift
for python in .venv/bin/python python3 /usr/bin/python3 ""; do
    "$python" -c 'import matplotlib' 2>/dev/null && break
done
[ -n "$python" ] || { echo "make.sh: error: no python3 with matplotlib; on Debian: apt-get install python3-matplotlib" >&2; exit 1; }
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cnn=${CNN:-./cnn}
"$cnn" --epochs 1 --layers --save-model --quiet --out "$tmp/first-epoch" "$@"
"$cnn" --eval --save-model --limit-test 100 --quiet --out "$tmp/untrained" "$@"
"$cnn" --epochs 1 --augment elastic --limit-train 640 --limit-test 1000 --quiet --out "$tmp/augmented" "$@"
"$python" labs/tools/study.py run "$tmp/study" --program "$cnn" --model lenet --devices cpu --batches 16 64 256 \
    --repeats 3 --epochs 3 -- --limit-train 1000 --limit-test 1000 "$@"
cp labs/figures/bench.csv "$tmp"
for source in first-epoch augmented study bench.csv; do
    "$python" labs/tools/plot.py "$tmp/$source" >>"$tmp/drawn"
done
mkdir -p "$out"
for figure in first-epoch/plots/{run,roofline,samples,filters} augmented/plots/augment study/plots/{study,loss} \
    plots/bench; do
    if [ ! -f "$tmp/$figure.png" ]; then
        grep "^not drawn: ${figure##*/}:" "$tmp/drawn" >&2
        exit 1
    fi
    cp "$tmp/$figure.png" "$out"
    echo "drawn: $out/${figure##*/}.png"
done
