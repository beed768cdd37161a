#!/usr/bin/env bash
# labs/tools/see_block.sh PROGRAM LAB [OPTION...], for make see: runs PROGRAM, which records a block of the kernel
# $CUEMU_SEE in the emulator, and writes the page $PAGE about it. Lab 5 has a program of its own; else it is a step of
# ./cnn-count with these options, lab 4's or lab 6's or a training step. WITH=PAGE.html: an earlier page beside it.
set -u
program=$1 lab=$2
shift 2
source=cnn_kernels.cu
training=(--model lenet --epochs 1 --limit-train 2 --batch-size 2)
one_image=(--dataset synthetic --limit-test 1 --quiet)
if [ -z "$CUEMU_SEE" ]; then
    echo "make see: expected the name of a kernel, such as LAB=5 KERNEL=naive_kernel, found none"
    exit 2
fi
folder=$(mktemp -d) || exit 1 # each call has one of its own
trap 'rm -rf "$folder"' EXIT
record=$folder/record.txt log=$folder/log
case $lab in
'') options=("${training[@]}" "${one_image[@]}" "$@") ;;
4) options=(--model cifar --kernels naive --eval "${one_image[@]}" "$@") ;;
5) options=("$folder/convolution.csv") source=labs/lab05/conv.cu ;;
6) options=("${training[@]}" --kernels naive "${one_image[@]}" "$@") ;;
*)
    echo "make see: expected LAB=4, 5 or 6, or no LAB, found LAB=$lab"
    exit 2
    ;;
esac
if ! CUEMU_SEE_FILE=$record "./$program" "${options[@]}" >"$log" 2>&1 || [ ! -f "$record" ]; then
    grep -E '^(cuda_on_cpu|cnn): ' "$log" || tail -n 5 "$log"
    exit 1
fi
"$PYTHON" labs/tools/see.py "$record" --source "$source" ${WITH:+--with "$WITH"} --out "$PAGE"
