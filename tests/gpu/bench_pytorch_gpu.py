#!/usr/bin/env python3
"""PyTorch's side of bench_gpu.c: bench_pytorch.py's training steps on a GPU, eager.

Both layouts run, each with TF32 off and on: the tensor cores' 10-bit mantissas, which cuDNN takes
by default for convolutions, must be told apart from plain 32-bit arithmetic.  cuDNN picks its
fastest algorithm.  Every step ends with a wait for the GPU, as one of ./cnn does.  A matrix product
of 8192 x 8192 shows what the GPU itself can do.

usage: bench_pytorch_gpu.py [--nets "mnist,64 cifar64,250"] [--seconds 1] [--device cuda]
One line of key=value a measurement.  Exit code 77 without PyTorch or a GPU that it can use.
"""
import argparse
import os
import statistics
import sys
import time

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../bench"))
from bench_pytorch import LAYOUTS, MODELS, time_steps, torch

NETS = "mnist,64 mnist,256 cifar64,250 resnet18,128 resnet50,64"


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def waiting(model, device):
    """The model with an optimizer whose step() returns when the device has done all of it."""

    def optimizer(parameters):
        made = model.optimizer(parameters)
        step = made.step

        def step_and_wait():
            step()
            synchronize(device)

        made.step = step_and_wait
        return made

    return model._replace(optimizer=optimizer)


def allow_tf32(allowed):
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def product_gflops(size, device):
    a, b = torch.randn(size, size), torch.randn(size, size)
    times = []
    for _ in range(7):
        synchronize(device)
        start = time.perf_counter()
        torch.matmul(a, b)
        synchronize(device)
        times.append(time.perf_counter() - start)
    return 2e-9 * size**3 / statistics.median(times[2:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", default=NETS, help="model,batch size, ...")
    parser.add_argument("--seconds", type=float, default=1, help="to measure, each case")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it")
    args = parser.parse_args()
    if args.device == "cuda":
        if not torch.cuda.is_available() or not hasattr(torch, "set_default_device"):
            print(f"skip: PyTorch {torch.__version__} has no GPU here", file=sys.stderr)
            sys.exit(77)
        torch.set_default_device("cuda")  # where time_steps() makes its tensors
        torch.backends.cudnn.benchmark = True

    name = torch.cuda.get_device_name().replace(" ", "_") if args.device == "cuda" else "cpu"
    case = f"torch version={torch.__version__} device={name}"
    for tf32 in ("off", "on"):
        allow_tf32(tf32 == "on")
        size = 8192 if args.device == "cuda" else 256
        print(f"{case} product={size} tf32={tf32} gflops={product_gflops(size, args.device):.0f}",
              flush=True)
    for net in args.nets.split():
        model, batch = net.split(",")
        for tf32 in ("off", "on"):
            allow_tf32(tf32 == "on")
            for layout in LAYOUTS:
                rate = time_steps(waiting(MODELS[model], args.device), layout, int(batch),
                                  args.seconds, False)
                print(f"{case} net={model} batch={batch} layout={layout} tf32={tf32} "
                      f"step_ms={1e3 * int(batch) / rate:.3f} img_per_s={rate:.1f}", flush=True)


if __name__ == "__main__":
    main()
