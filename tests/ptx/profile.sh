#!/usr/bin/env bash
# Prints what a kernel executes in a training step: instructions by kind, sectors a request, conflicts of banks, lanes
# that are active; of PTX, not of machine code. Needs nvcc, no GPU.
#
#   tests/ptx/profile.sh KERNEL [OPTIONS of ./cnn]       KERNEL: a part of its name, such as gemm_kernel
#
# Without options: ResNet-18 with 8 images, by tensor cores in bf16 if the name has "tensor", else by tiles.
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ $# -gt 0 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2 && exit 2; }
kernel=$1 options=("${@:2}")
if [ $# -eq 1 ]; then
    options=(--model resnet18 --batch-size 8 --limit-train 8)
    case $kernel in *tensor*) options+=(--kernels tensor --precision bf16) ;; *) options+=(--kernels tiled) ;; esac
fi
make -s ptx
PTX_STATS=$kernel build/ptx/sm_80/cnn --dataset synthetic --epochs 1 --max-steps 1 --limit-test 8 --quiet \
    "${options[@]}"
