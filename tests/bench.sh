#!/usr/bin/env bash
# make bench: our training speed, PyTorch's on the same cores in the same run, and whole epochs.
# Absolute figures vary with the machine and its neighbours; quote the ratios.
set -u
cd "$(dirname "$0")/.." || exit 1
threads=$(nproc)

# Debian's torch belongs to the system's python3, which need not be the first in PATH.
python=
for candidate in "${PYTHON:-python3}" /usr/bin/python3; do
    if "$candidate" -c 'import torch' 2>/dev/null; then
        python=$candidate
        break
    fi
done

echo "Training steps, data in memory, no loader:"
ours=$(build/bench --threads "$threads") || exit 1
echo "  $ours"
if [ -z "$python" ]; then
    echo "  PyTorch is not installed for ${PYTHON:-python3}: no comparison"
else
    theirs=$("$python" tests/bench_pytorch.py --model mnist --batch-size 64 --threads "$threads")
    printf '%s\n' "$theirs" | sed 's/^/  /'
    # A second measurement of ours brackets theirs, in case the machine's speed drifted.
    again=$(build/bench --threads "$threads")
    echo "  $again"
    printf '%s\n%s\n%s\n' "$ours" "$again" "$theirs" | awk '
        match($0, /steps_img_per_s=[0-9.]+/) { us += substr($0, RSTART + 16, RLENGTH - 16) / 2 }
        /layout=best/ && match($0, /img_per_s=[0-9.]+/) { it = substr($0, RSTART + 10, RLENGTH - 10) }
        END { printf "  ratio to PyTorch: %.2f\n", us / it }'
fi

echo "One epoch end to end, with the loader (Fashion-MNIST, the first 20000 images):"
data=/usr/share/datasets/fashion-mnist
if [ ! -d "$data" ]; then
    echo "  needs Debian's dataset-fashion-mnist: skipped"
    exit 0
fi
limits="--limit-train 20000 --limit-test 1000 --epochs 1"
# shellcheck disable=SC2086 # several words on purpose
./cnn --dataset fashion-mnist --data "$data" $limits | grep '^epoch=' | sed 's/^/  cnn    /'
if [ -n "$python" ]; then
    # shellcheck disable=SC2086
    "$python" tests/pytorch_mnist.py --data "$data" --threads "$threads" $limits |
        grep '^epoch=' | sed 's/^/  torch  /'
fi
