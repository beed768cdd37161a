#!/usr/bin/env python3
"""PyTorch's side of bench_gpu.c: bench_pytorch.py's training steps on a GPU.

MODES lists how they run: eager in both layouts, with autocast to bfloat16 or to float16, which takes a
GradScaler, and channels_last, through torch.compile, which fuses operations and replays a CUDA graph,
and with the whole step captured in a CUDA graph.  TF32, the tensor cores' 10-bit mantissas, is pinned off or on, since cuDNN
takes it by default for convolutions: it must be told apart from plain 32-bit arithmetic.  cuDNN
picks its fastest algorithm.  Every step ends with a wait for the GPU, as one of ./cnn does.  A
matrix product of 8192 x 8192 shows what the GPU itself can do.

usage: bench_pytorch_gpu.py [--nets "mnist,64 cifar64,250"] [--modes "eager graph"]
                            [--precisions "fp32 bf16"] [--seconds 1] [--device cuda]
One line of key=value a measurement; a mode that PyTorch refuses is named on a line of its own.  Exit
code 77 without PyTorch or a GPU that it can use.
"""
import argparse
import os
import statistics
import sys
import time
from typing import NamedTuple

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../bench"))
from bench_pytorch import LAYOUTS, MODELS, F, median_seconds, torch

NETS = "mnist,64 resnet18,128 cifar64,250 resnet50,256 cifar64,50"


class Mode(NamedTuple):
    run: str  # eager, compiled or graph
    layout: str
    precision: str  # fp32, tf32, or bf16 and fp16 by autocast


MODES = (
    Mode("eager", "nchw", "fp32"),
    Mode("eager", "nhwc", "fp32"),
    Mode("eager", "nchw", "tf32"),
    Mode("eager", "nhwc", "tf32"),
    Mode("eager", "nhwc", "bf16"),
    Mode("eager", "nhwc", "fp16"),
    Mode("compiled", "nhwc", "fp32"),
    Mode("compiled", "nhwc", "tf32"),
    Mode("compiled", "nhwc", "bf16"),
    Mode("graph", "nhwc", "fp32"),
    Mode("graph", "nhwc", "tf32"),
    Mode("graph", "nhwc", "bf16"),
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # of autocast


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


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


def captured(step):
    """A function that replays a step as a CUDA graph; the first steps run on a stream of their own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def training_step(model, mode, batch, device):
    """A function that does one step, on random tensors that lie in the device's memory."""
    torch.manual_seed(1)
    net = model.network().train().to(memory_format=LAYOUTS[mode.layout])
    if mode.run == "compiled":
        torch.compiler.reset()  # otherwise another batch size compiles for a variable one
        net = torch.compile(net, mode="reduce-overhead", dynamic=False)
    images = torch.randn(batch, *model.shape).contiguous(memory_format=LAYOUTS[mode.layout])
    labels = torch.randint(model.classes, (batch,))
    optimizer = model.optimizer(net.parameters())
    for group in optimizer.param_groups:
        if mode.run == "graph" and "capturable" in group:
            group["capturable"] = True

    # small gradients would be 0 in fp16; in the other precisions it does nothing
    scaler = torch.amp.GradScaler(device, enabled=mode.precision == "fp16" and device == "cuda")

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, DTYPES.get(mode.precision, torch.bfloat16), enabled=mode.precision in DTYPES):
            outputs = net(images)
        scaler.scale(F.nll_loss(outputs.float(), labels)).backward()
        scaler.step(optimizer)
        scaler.update()

    return captured(step) if mode.run == "graph" else step


def time_mode(model, mode, batch, seconds, device):
    """Seconds of a step, which ends when the device has done all of it."""
    allow_tf32(mode.precision == "tf32")
    step = training_step(model, mode, batch, device)

    def step_and_wait():
        step()
        synchronize(device)

    return median_seconds(step_and_wait, seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", default=NETS, help="model,batch size, ...")
    parser.add_argument("--modes", default="eager compiled graph", help="of these: %(default)s")
    parser.add_argument("--precisions", default="fp32 tf32 bf16 fp16", help="of these: %(default)s")
    parser.add_argument("--seconds", type=float, default=1, help="to measure, each case")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it")
    args = parser.parse_args()
    if args.device == "cuda":
        if not torch.cuda.is_available() or not hasattr(torch, "set_default_device"):
            print(f"skip: PyTorch {torch.__version__} has no GPU here", file=sys.stderr)
            sys.exit(77)
        torch.set_default_device("cuda")  # where training_step() makes its tensors
        torch.backends.cudnn.benchmark = True

    name = torch.cuda.get_device_name().replace(" ", "_") if args.device == "cuda" else "cpu"
    case = f"torch version={torch.__version__} device={name}"
    for precision in ("fp32", "tf32"):
        allow_tf32(precision == "tf32")
        size = 8192 if args.device == "cuda" else 256
        print(f"{case} product={size} precision={precision} "
              f"gflops={product_gflops(size, args.device):.0f}", flush=True)
    for net in args.nets.split():
        name, batch = net.split(",")
        for mode in MODES:
            if mode.run not in args.modes.split() or mode.precision not in args.precisions.split():
                continue
            line = (f"{case} net={name} batch={batch} run={mode.run} layout={mode.layout} "
                    f"precision={mode.precision}")
            try:
                seconds = time_mode(MODELS[name], mode, int(batch), args.seconds, args.device)
            except Exception as error:  # torch.compile, capture and older devices fail in many ways
                if mode.run == "eager" and mode.precision == "fp32":
                    raise
                print(f"{line} does not work here: {type(error).__name__}", flush=True)
                continue
            print(f"{line} step_ms={1e3 * seconds:.3f} img_per_s={int(batch) / seconds:.1f}",
                  flush=True)


if __name__ == "__main__":
    main()
