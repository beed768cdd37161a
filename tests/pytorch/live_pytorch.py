#!/usr/bin/env python3
"""Trains PyTorch and our program from the same weights on the same batches, and compares.

In double the two must agree in every loss and every tensor of the trained network, which shows that
all of a training step is the same arithmetic.  In float rounding differs, and training enlarges
that: a unit that is zero in one run and not in the other is enough.  mnist and cifar stay together
nevertheless; of ResNets we ask that our losses stray from those of PyTorch in double at most twice
as far as PyTorch's own do in float, taking the farthest of FLOAT_RUNS runs of it.  All but the
first of these are disturbed as our rounding would, see disturb().

Whether two correct programs stay together depends on the training itself, so the random numbers
and the sizes of the batches were chosen with PyTorch alone, before our program was looked at: such
that disturbed runs of it agree (Case.data, make_batches()), by 2 epsilons with mnist, where 5 part
two runs of eight, by 5 with the others.  Most sets part.  With one other run as the measure, two
runs in three of PyTorch's ResNet-18 from its default weights would fail; therefore the large
ResNets start with zero_init_residual.  ResNet-50 gets 16 images a batch, and even so its runs
differ by up to 0.09.

usage: live_pytorch.py DIR     DIR holds the programs parity_float and parity_double, called as
  PARITY MODEL IN.safetensors BATCHES.bin OUT.safetensors STEPS BATCH CLASSES HEIGHT WIDTH CHANNELS
         LR MOMENTUM WEIGHT_DECAY NESTEROV OPTIMIZER
MODEL: mnist, cifar, resnet8, resnet18, resnet50.  NESTEROV: 0 or 1.  OPTIMIZER: sgd, or adadelta
with rho .9 and eps 1e-6.  Weight decay is for all parameters.  There is no dropout.
IN: every entry of PyTorch's state_dict(), F32 for parity_float, F64 for parity_double, batch norm's
num_batches_tracked I64.  OUT: the same entries with the same types and shapes, after training.
BATCHES.bin: for each step BATCH * HEIGHT * WIDTH * CHANNELS little-endian doubles, the images as
[image][row][column][channel], used as they are, and then BATCH doubles, the labels.
Standard output: a line `loss %.17g` for each step, the mean over the batch before the update.

Prints `pass parity/NAME`, `fail parity/NAME: what, expected, found`, `skip parity/NAME: why`; lines
that begin with # tell how near to its bound a result came.  resnet18 and resnet50 take turns, a day
each, whose number may be given as ROTATION=N; with LONG set both are tried, with QUICK neither.
"""
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Callable, NamedTuple

sys.dont_write_bytecode = True  # no __pycache__ in the source tree
# OSError, RuntimeError: installed, but broken or made for another PyTorch
try:
    import numpy as np
    import torch
    import torch.nn.functional as F

    MISSING = None
except (ImportError, OSError, RuntimeError) as error:
    MISSING = f"{sys.executable} cannot import PyTorch: {error}"
else:
    import make_golden as golden
    from bench_pytorch import MODELS, BasicBlock, Bottleneck, ResNet, set_threads

STEPS, CLASSES = 20, 10
FLOAT_RUNS = 4
DISTURBANCE = 8  # in machine epsilons; PyTorch's convolutions err by 0.6 to 1.8, Winograd's by 4 to 9
RTOL_DOUBLE, RTOL_FLOAT = 1e-6, 1e-5
TIME_LIMIT = 600  # seconds for a run of our program
DTYPES = {"F32": "<f4", "F64": "<f8", "I64": "<i8"}  # of safetensors and numpy
ADADELTA = (1.0, 0.0, 0.0, False, True)  # lr, momentum, weight decay, Nesterov, Adadelta
SGD = (0.001, 0.9, 0.0, False, False)
SGD_RESNET = (0.1, 0.9, 5e-4, False, False)


class Case(NamedTuple):
    make: Callable  # () -> nn.Module whose output is log-probabilities
    batch: int
    shape: tuple  # of an image: height, width, channels
    optimizer: tuple
    data: int  # which of the sets of random numbers
    drifts: bool  # in float: a ResNet


CASES = {
    "mnist": Case(lambda: golden.mnist(), 32, (28, 28, 1), ADADELTA, 166, False),
    "cifar": Case(lambda: golden.cifar(), 32, (32, 32, 3), SGD, 0, False),
    "resnet8": Case(lambda: golden.resnet8(), 8, (16, 16, 3), SGD_RESNET, 79, True),
    "resnet18": Case(lambda: resnet(BasicBlock, (2, 2, 2, 2)), 8, (16, 16, 3), SGD_RESNET, 54, True),
    "resnet50": Case(lambda: resnet(Bottleneck, (3, 4, 6, 3)), 16, (16, 16, 3), SGD_RESNET, 0, True),
}


def resnet(block, depths):
    """With torchvision's initial values under zero_init_residual: each block begins as its shortcut."""
    net = ResNet(block, depths, CLASSES)
    for module in net.modules():
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if isinstance(module, block):
            last = module.bn3 if block is Bottleneck else module.bn2
            torch.nn.init.zeros_(last.weight)
    return net


# ---- Files --------------------------------------------------------------------------------------


def write_safetensors(path, tensors):
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    header, begin = {}, 0
    for name, tensor in tensors.items():
        end, dtype = begin + tensor.nbytes, names[tensor.dtype]
        header[name] = dict(dtype=dtype, shape=tensor.shape, data_offsets=[begin, end])
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()  # the style of the library
    text += b" " * (-len(text) % 8)  # so that the numbers are aligned
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())


def read_safetensors(path):
    with open(path, "rb") as file:
        data = file.read()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            flat = np.frombuffer(data[start + begin : start + end], DTYPES[entry["dtype"]])
            tensors[name] = flat.reshape(entry["shape"])
    return tensors


def make_batches(case):
    """Noise over a pattern for each class; every number is exact in float."""
    count = int(np.prod(case.shape))
    first = 100000 * case.data  # of the streams of this set
    patterns = np.stack([golden.value(first + 1000 + k, count) for k in range(CLASSES)])
    batches = []
    for step in range(STEPS):
        labels = golden.draw_labels(first + 3000 + step, case.batch, CLASSES).numpy()
        noise = golden.value(first + 2000 + step, case.batch * count).reshape(-1, count)
        images = (0.25 * noise + 1.5 * patterns[labels]).astype(np.float32).astype("<f8")
        batches.append((images.reshape(-1, *case.shape), labels))
    return batches


def write_batches(path, batches):
    with open(path, "wb") as file:
        for images, labels in batches:
            file.write(images.tobytes())
            file.write(labels.astype("<f8").tobytes())


# ---- Training -----------------------------------------------------------------------------------


def initial_weights(case):
    """PyTorch's own under a fixed seed, and batch norm's statistics, as numpy arrays."""
    torch.manual_seed(1)
    return to_numpy(case.make())


def to_numpy(net):
    return {name: tensor.numpy().copy() for name, tensor in net.state_dict().items()}


def disturb(net, dtype, seed):
    """Adds to every layer's sums an error as large as that of another way to compute them."""
    random = torch.Generator().manual_seed(seed)

    def add_error(module, inputs, output):
        size = DISTURBANCE * torch.finfo(dtype).eps * output.detach().std()
        return output + size * torch.randn(output.shape, dtype=dtype, generator=random)

    for module in net.modules():
        if isinstance(module, (torch.nn.Conv2d, torch.nn.Linear, torch.nn.BatchNorm2d)):
            module.register_forward_hook(add_error)


def train_pytorch(case, weights, batches, dtype, seed=None):
    """Losses and trained tensors; with a seed, disturbed."""
    net = case.make().to(dtype).train()
    net.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    if seed is not None:
        disturb(net, dtype, seed)
    optimizer = golden.make_optimizer(net.parameters(), *case.optimizer)
    losses = []
    for images, labels in batches:
        x = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().to(dtype)
        optimizer.zero_grad()
        loss = F.nll_loss(net(x), torch.from_numpy(labels))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses), to_numpy(net)


def train_ours(program, model, case, weights, batches, dtype):
    """Losses and trained tensors; raises ValueError with what went wrong."""
    typed = {n: w.astype(dtype) if w.dtype.kind == "f" else w for n, w in weights.items()}
    lr, momentum, weight_decay, nesterov, adadelta = case.optimizer
    with tempfile.TemporaryDirectory() as folder:
        before, data, after = (os.path.join(folder, n) for n in ("in", "batches", "out"))
        write_safetensors(before, typed)
        write_batches(data, batches)
        command = [program, model, before, data, after, STEPS, case.batch, CLASSES, *case.shape]
        command += [lr, momentum, weight_decay, int(nesterov), "adadelta" if adadelta else "sgd"]
        losses = run_program([str(word) for word in command])
        try:
            tensors = read_safetensors(after)
        except (OSError, ValueError, KeyError) as why:
            raise ValueError(f"tensors written, expected a safetensors file, found {why}") from why
    return losses, tensors


def run_program(command):
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIME_LIMIT
        )
    except (OSError, subprocess.TimeoutExpired) as why:
        raise ValueError(f"program, expected to run, found {why}") from why
    if done.returncode:
        said = " ".join(done.stderr.split()[-40:])
        raise ValueError(f"exit status, expected 0, found {done.returncode}: {said}")
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("loss ")]
    if len(lines) != STEPS:
        raise ValueError(f"lines 'loss', expected {STEPS}, found {len(lines)}")
    return np.array([float(words[1]) for words in lines])


# ---- Comparison ---------------------------------------------------------------------------------


def report(name, problem=None):
    print(f"fail parity/{name}: {problem}" if problem else f"pass parity/{name}", flush=True)


def check_near(name, what, expected, found, bounds):
    """Each number within its bound; `what` names them."""
    expected, found, bounds = (np.asarray(a, dtype=float) for a in (expected, found, bounds))
    with np.errstate(invalid="ignore"):
        part = np.abs(found - expected) / np.maximum(bounds, np.finfo(float).tiny)
    worst = int(np.argmax(part))  # the first NaN if there is one
    print(f"# parity/{name}: {part[worst]:.2g} of the bound at {what[worst]}")
    if part[worst] <= 1:
        report(name)
    else:
        wanted = f"{expected[worst]:.17g} within {bounds[worst]:.2g}"
        report(name, f"{what[worst]}, expected {wanted}, found {found[worst]:.17g}")


def check_losses(name, expected, found, rtol):
    steps = [f"loss of step {step + 1}" for step in range(len(expected))]
    check_near(name, steps, expected, found, rtol * np.abs(expected))


def check_tensors(name, expected, found):
    """The same names, shapes and types."""
    for tensor in sorted(set(expected) | set(found)):
        kinds = [
            f"{side[tensor].dtype.name} {list(side[tensor].shape)}" if tensor in side else "none"
            for side in (expected, found)
        ]
        if kinds[0] != kinds[1]:
            report(name, f"{tensor}, expected {kinds[0]}, found {kinds[1]}")
            return False
    report(name)
    return True


def check_weights(name, expected, found):
    """Every tensor, by its largest difference, relative to its largest entry."""
    rows = []
    for tensor, array in expected.items():
        worst = int(np.argmax(np.abs(found[tensor] - array)))
        bound = RTOL_DOUBLE * np.abs(array).max()
        rows.append((f"{tensor}[{worst}]", array.flat[worst], found[tensor].flat[worst], bound))
    check_near(name, *zip(*rows))


def check_drift(name, exact, theirs, ours):
    """Our losses: at most twice as far from the exact ones as PyTorch's up to that step."""
    drift = np.maximum.accumulate(np.abs(np.array(theirs) - exact).max(axis=0))
    print(f"# parity/{name}: PyTorch's drift", " ".join(f"{d:.1g}" for d in drift))
    steps = [f"loss of step {step + 1}" for step in range(STEPS)]
    check_near(name, steps, exact, ours, 2 * drift + RTOL_FLOAT)


def compare_double(folder, model, case, weights, batches, exact):
    name = f"{model}_double"
    program = os.path.join(folder, "parity_double")
    try:
        losses, tensors = train_ours(program, model, case, weights, batches, np.float64)
    except ValueError as problem:
        report(name, problem)
        return
    check_losses(f"{name}_losses", exact[0], losses, RTOL_DOUBLE)
    if check_tensors(f"{name}_tensors", exact[1], tensors):
        check_weights(f"{name}_weights", exact[1], tensors)


def compare_float(folder, model, case, weights, batches, exact):
    name = f"{model}_float"
    program = os.path.join(folder, "parity_float")
    try:
        losses, tensors = train_ours(program, model, case, weights, batches, np.float32)
    except ValueError as problem:
        report(name, problem)
        return
    theirs, trained = train_pytorch(case, weights, batches, torch.float)
    check_tensors(f"{name}_tensors", trained, tensors)
    if not case.drifts:
        check_losses(f"{name}_losses", theirs, losses, RTOL_FLOAT)
        return
    check_losses(f"{name}_first_loss", theirs[:1], losses[:1], RTOL_FLOAT)
    runs = [theirs]
    for seed in range(1, FLOAT_RUNS):
        losses_of_run, _ = train_pytorch(case, weights, batches, torch.float, seed)
        runs.append(losses_of_run)
    check_drift(f"{name}_drift", exact[0], runs, losses)


def compare_torchvision(name):
    """Our ResNets are torchvision's with another first layer and without the max-pool: the same tensors, and from
    the same weights the same numbers."""
    try:
        import torchvision
    except (ImportError, OSError, RuntimeError) as error:
        print(f"skip parity/torchvision_{name}: {sys.executable} cannot import torchvision: {error}", flush=True)
        return
    torch.manual_seed(1)
    ours = MODELS[name].network().double()
    theirs = getattr(torchvision.models, name)(num_classes=MODELS[name].classes).double()
    theirs.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False).double()
    theirs.maxpool = torch.nn.Identity()
    if check_tensors(f"torchvision_{name}_tensors", to_numpy(theirs), to_numpy(ours)):
        theirs.load_state_dict(ours.state_dict())
        images = torch.randn(2, *MODELS[name].shape, dtype=torch.double)
        same = torch.equal(ours(images), F.log_softmax(theirs(images), dim=1))
        report(f"torchvision_{name}", None if same else "expected the same log-probabilities, found others")


def left_out(model):
    """Why this run does not try a model, or None."""
    large = ("resnet18", "resnet50")
    day = int(os.environ.get("ROTATION") or time.strftime("%j"))
    if MISSING or model not in large:
        return MISSING
    if os.environ.get("QUICK"):
        return "QUICK is set"
    if os.environ.get("LONG") or model == large[day % 2]:
        return None
    return "another day; LONG=1: today"


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: live_pytorch.py DIR")
    for name in () if MISSING else ("resnet18", "resnet50"):
        compare_torchvision(name)
    for model, case in CASES.items():
        why = left_out(model)
        if why:
            print(f"skip parity/{model}: {why}", flush=True)
            continue
        set_threads(1)
        weights, batches = initial_weights(case), make_batches(case)
        exact = train_pytorch(case, weights, batches, torch.double)
        compare_double(sys.argv[1], model, case, weights, batches, exact)
        compare_float(sys.argv[1], model, case, weights, batches, exact)


if __name__ == "__main__":
    main()
