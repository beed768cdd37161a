#!/usr/bin/env python3
"""PyTorch's side of `make bench`: how many images a second one training step handles on the CPU.

Compared: the whole step (zero_grad, forward, loss, backward, optimizer) of the same network, batch
size, optimizer and number of threads, in 32-bit floats, on one batch of random tensors that lie in
memory.  PyTorch's CPU kernels for NCHW and NHWC tensors differ, so both layouts run, eager and, with
--compile, through torch.compile; the fastest is what counts.

Not compared: reading, shuffling and normalizing the data (pytorch_mnist.py beside this file times
training end to end), the accuracy reached, bfloat16.

PyTorch runs as installed.  With glibc, large tensors cost it page faults in every step, about a
quarter of the mnist model's time on two cores; MALLOC_MMAP_THRESHOLD_=1000000000 and
MALLOC_TRIM_THRESHOLD_=4000000000 in the environment spare it these.

usage: bench_pytorch.py --model mnist --batch-size 64 --threads 2 [--seconds 4] [--compile]
One line a layout on stdout, then one for the fastest of them.  Exit code 77 without PyTorch.
"""
import argparse
import ctypes
import os
import resource
import statistics
import sys
import time
from typing import Callable, NamedTuple

try:
    import torch
    import torch.nn.functional as F
    from torch import nn
except (ImportError, OSError):  # OSError: installed, but a shared library of it does not load
    print(f"skip: PyTorch is not installed for {sys.executable}", file=sys.stderr)
    sys.exit(77)  # what `make test` and automake count as skipped


class MnistNet(nn.Module):
    """The network of PyTorch's MNIST example, under its parameter names."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        x = self.fc2(self.dropout2(x))
        return F.log_softmax(x, dim=1)


class CifarNet(nn.Module):
    """The network of PyTorch's CIFAR-10 tutorial, with `width` channels in its first layer."""

    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 5)
        self.conv2 = nn.Conv2d(width, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc3(F.relu(self.fc2(x))), dim=1)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut. This and the next two have torchvision's names and operations."""

    expansion = 1

    def __init__(self, inputs, planes, stride=1, downsample=None):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = downsample

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        out += self.downsample(x) if self.downsample else x
        return F.relu(out, inplace=True)


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution, and a shortcut; the 3x3 one has the stride."""

    expansion = 4

    def __init__(self, inputs, planes, stride=1, downsample=None):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, 4 * planes, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * planes)
        self.downsample = downsample

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = F.relu(self.bn2(self.conv2(out)), inplace=True)
        out = self.bn3(self.conv3(out))
        out += self.downsample(x) if self.downsample else x
        return F.relu(out, inplace=True)


class ResNet(nn.Module):
    """With a 3x3 first layer and no max-pool, as for CIFAR-100."""

    def __init__(self, block, depths, classes=100):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        inputs = 64
        for stage, depth in enumerate(depths):
            planes, blocks = 64 << stage, []
            for i in range(depth):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(block(inputs, planes, stride, self.shortcut(inputs, planes * block.expansion, stride)))
                inputs = planes * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inputs, classes)

    @staticmethod
    def shortcut(inputs, outputs, stride):
        if inputs == outputs:
            return None
        return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)
        return F.log_softmax(self.fc(x), dim=1)


def adadelta(parameters, lr=1.0):
    return torch.optim.Adadelta(parameters, lr=lr, rho=0.9, eps=1e-6)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, weight_decay=5e-4)


class Model(NamedTuple):
    network: Callable  # () -> nn.Module whose output is log-probabilities
    shape: tuple  # of one image: channels, height, width
    classes: int
    optimizer: Callable  # (parameters) -> torch.optim.Optimizer


# One row a model; nothing else has to change for a new one.
MODELS = {
    "mnist": Model(MnistNet, (1, 28, 28), 10, adadelta),
    "cifar6": Model(lambda: CifarNet(6), (3, 32, 32), 10, sgd),
    "cifar64": Model(lambda: CifarNet(64), (3, 32, 32), 10, sgd),
    "resnet18": Model(lambda: ResNet(BasicBlock, (2, 2, 2, 2)), (3, 32, 32), 100, sgd),
    "resnet50": Model(lambda: ResNet(Bottleneck, (3, 4, 6, 3)), (3, 32, 32), 100, sgd),
}
LAYOUTS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}


def cpus():
    """The cores this process may run on, which under Slurm are fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def rss_mb():
    """The most memory that this process has held so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def set_threads(threads):
    """Holds PyTorch and its BLAS to so many threads; warns if that BLAS spoils the comparison."""
    torch.set_num_threads(threads)
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            loaded = {line.split(maxsplit=5)[5].strip() for line in maps if "blas" in line}
    except OSError:
        return  # not Linux: nothing more to find out
    # Distributions build PyTorch against whichever libblas.so.3 is installed.  OpenBLAS has
    # threads of its own there, which set_num_threads does not reach.
    for path in loaded:
        if "openblas" in path:
            try:
                ctypes.CDLL(path).openblas_set_num_threads(threads)
            except (OSError, AttributeError):
                pass  # a build with other symbol names: it follows OMP_NUM_THREADS
    # The reference BLAS runs the fully connected layers some fifty times slower than OpenBLAS:
    # winning against that would prove nothing.
    fast = ("openblas", "blis", "atlas", "mkl")
    plain = [p for p in loaded if "libblas.so" in p and not any(name in p for name in fast)]
    if plain:
        print(f"warning: PyTorch runs on the slow reference BLAS ({plain[0]}), so its figures are"
              " no fair measure; on Debian: apt-get install libopenblas0-openmp", file=sys.stderr)


def median_seconds(step, seconds):
    """The median time of a step, measured for so many seconds, after some that are not."""
    # The first steps compile kernels, allocate memory and create optimizer state.
    end = time.perf_counter() + min(0.5, seconds / 4)
    warm = 0
    while warm < 3 or time.perf_counter() < end:
        step()
        warm += 1

    # The median, since other programs on the machine slow single steps down.
    times = []
    now = time.perf_counter()
    end = now + seconds
    while len(times) < 3 or now < end:
        start = now
        step()
        now = time.perf_counter()
        times.append(now - start)
    return statistics.median(times)


def time_steps(model, layout, batch, seconds, compiled):
    """Median images a second of training steps, measured for so many seconds."""
    torch.manual_seed(1)
    net = model.network().train().to(memory_format=LAYOUTS[layout])
    if compiled:
        net = torch.compile(net)
    images = torch.randn(batch, *model.shape).contiguous(memory_format=LAYOUTS[layout])
    labels = torch.randint(model.classes, (batch,))
    optimizer = model.optimizer(net.parameters())

    def step():
        optimizer.zero_grad(set_to_none=True)
        F.nll_loss(net(images), labels).backward()
        optimizer.step()

    return batch / median_seconds(step, seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="mnist")
    parser.add_argument("--batch-size", type=positive, default=64)
    parser.add_argument("--threads", type=positive, default=cpus())
    parser.add_argument("--seconds", type=float, default=4, help="to measure, each layout")
    parser.add_argument("--compile", action="store_true", help="time torch.compile as well")
    args = parser.parse_args()

    set_threads(args.threads)
    # Training on one batch for long can drive numbers below 1e-38, where many CPUs compute slowly.
    # That would be this benchmark's doing, so PyTorch must not pay for it.
    torch.set_flush_denormal(True)

    case = f"torch model={args.model} batch={args.batch_size} threads={args.threads}"
    # PyTorch's memory without the interpreter and its libraries: what one layout's training adds.
    idle = rss_mb()
    best, memory = 0, None
    for compiled in (False, True) if args.compile else (False,):
        for layout in LAYOUTS:
            mode = f"layout={layout} mode={'compiled' if compiled else 'eager'}"
            try:
                rate = time_steps(
                    MODELS[args.model], layout, args.batch_size, args.seconds, compiled
                )
            except Exception as error:  # torch.compile fails in many ways
                if not compiled:
                    raise
                print(f"{case} {mode} does not work here: {type(error).__name__}", flush=True)
                continue
            best = max(best, rate)
            memory = memory or rss_mb() - idle  # a peak never falls: only the first layout's is known
            print(f"{case} {mode} img_per_s={rate:.1f}", flush=True)
    print(f"{case} layout=best version={torch.__version__} rss_mb={memory:.0f} img_per_s={best:.1f}")


if __name__ == "__main__":
    main()
