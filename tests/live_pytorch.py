#!/usr/bin/env python3
"""Trains PyTorch and cnn.c from the same weights on the same batches for 20 steps and compares.

In double precision every loss and every tensor of weights must agree within 1e-6.  In float32 mnist
and cifar must agree within 1e-5 in every loss.  A ResNet with BatchNorm on a small batch is chaotic:
rounding errors grow a thousandfold and more within 20 steps, in PyTorch as well.  So a float32 ResNet
must agree within 1e-5 at step 1, and then stay within twice the distance that PyTorch's own float32
has from its float64, the largest of some runs whose first weights differ in the last bit.

usage: live_pytorch.py BUILD     BUILD: the folder with parity_float and parity_double
Prints `pass`, `fail` or `skip parity/NAME`.  QUICK=1: without ResNet-18 and ResNet-50.
"""
import json
import os
import struct
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True  # no __pycache__ in the source tree
try:
    import numpy as np
    import torch
    import torch.nn.functional as F
    import torchvision

    from bench_pytorch import CifarNet, MnistNet, set_threads
    from make_golden import resnet8
except (ImportError, OSError, SystemExit) as error:
    print(f"skip parity: PyTorch and torchvision are needed ({error})")
    sys.exit(0)

STEPS, CLASSES = 20, 10
RUNS = 5  # of PyTorch's float32, for its own drift
DTYPES = {"F32": np.float32, "F64": np.float64, "I64": np.int64}


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, tensor in tensors.items():
        array = np.ascontiguousarray(tensor.detach().numpy())
        dtype = next(key for key, kind in DTYPES.items() if kind == array.dtype)
        ends = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": ends}
        data += array.tobytes()
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    with open(path, "rb") as f:
        (length,) = struct.unpack("<Q", f.read(8))
        header, data = json.loads(f.read(length)), f.read()
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(data[slice(*t["data_offsets"])], DTYPES[t["dtype"]]).reshape(t["shape"])
        for name, t in header.items()
    }


def small_images(name):
    """torchvision's ResNet as CIFAR takes it: a 3x3 first layer, no max-pool."""

    def build():
        net = getattr(torchvision.models, name)(num_classes=CLASSES)
        net.conv1 = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        net.maxpool = torch.nn.Identity()
        return net

    return build


def no_dropout(net):
    for module in net.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return net


SGD = "--optimizer sgd --momentum 0.9 --weight-decay 5e-4 --lr 0.1"
CASES = {  # name: network, batch, shape of an image, options
    "mnist": (MnistNet, 32, (28, 28, 1), "--optimizer adadelta --lr 1"),
    "cifar": (lambda: CifarNet(6), 32, (32, 32, 3), "--optimizer sgd --momentum 0.9 --lr 0.001"),
    "resnet8": (resnet8, 16, (16, 16, 3), SGD),
    "resnet18": (small_images("resnet18"), 16, (16, 16, 3), SGD),
    "resnet50": (small_images("resnet50"), 16, (16, 16, 3), SGD),
}


def draw_batches(batch, shape):
    """Noise over a pattern of the class, so that there is something to learn."""
    random = np.random.default_rng(3)
    patterns = random.normal(size=(CLASSES, *shape))
    for _ in range(STEPS):
        labels = random.integers(CLASSES, size=batch)
        images = 0.5 * patterns[labels] + random.normal(size=(batch, *shape))
        yield images.astype(np.float32).astype(np.float64), labels


def train_torch(build, batches, options, dtype, nudge=0):
    """Losses and weights; nudge: a seed by which the first weights change in their last bit."""
    torch.manual_seed(1)
    net = no_dropout(build()).to(dtype).train()
    generator = torch.Generator().manual_seed(nudge)
    for p in net.parameters() if nudge else ():
        sign = torch.randint(-1, 2, p.shape, generator=generator)
        p.data *= 1 + sign * torch.finfo(dtype).eps
    words = options.split()
    value = {key: float(word) for key, word in zip(words[2::2], words[3::2])}
    if "adadelta" in words:
        optimizer = torch.optim.Adadelta(net.parameters(), value["--lr"], rho=0.9, eps=1e-6)
    else:
        decay = value.get("--weight-decay", 0)
        optimizer = torch.optim.SGD(
            net.parameters(), value["--lr"], value["--momentum"], weight_decay=decay
        )
    losses = []
    for images, labels in batches:
        optimizer.zero_grad()
        x = torch.from_numpy(images).to(dtype).permute(0, 3, 1, 2)
        loss = F.cross_entropy(net(x), torch.from_numpy(labels))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses), {k: v.double().numpy() for k, v in net.state_dict().items()}


def train_ours(program, name, case, batches, dtype, folder):
    build, batch, shape, options = case
    torch.manual_seed(1)
    paths = [os.path.join(folder, file) for file in ("in", "batches", "out")]
    write_safetensors(paths[0], build().to(dtype).state_dict())
    with open(paths[1], "wb") as f:
        for images, labels in batches:
            f.write(images.tobytes() + labels.astype(np.float64).tobytes())
    sizes = [STEPS, CLASSES, *shape]
    command = [program, *paths, *map(str, sizes), "--model", name, "--batch-size", str(batch)]
    said = subprocess.run(command + options.split(), capture_output=True, text=True, check=False)
    if said.returncode:
        raise RuntimeError(f"{program}: {said.stderr.strip()}")
    losses = [float(line.split()[1]) for line in said.stdout.splitlines() if line[:5] == "loss "]
    return np.array(losses), read_safetensors(paths[2])


def verdict(name, found, bound):
    """found must stay at or below bound at every step; a NaN fails."""
    bad = ~(np.asarray(found) <= bound)
    if bad.any():
        step = int(np.argmax(bad))
        bound = np.broadcast_to(bound, bad.shape)[step]
        print(f"fail parity/{name}: expected at most {bound:.2g} at {step + 1}, found {found[step]:.2g}")
    else:
        print(f"pass parity/{name}")
    sys.stdout.flush()


def compare(name, case, folder, build):
    batches = list(draw_batches(case[1], case[2]))
    want, weights = train_torch(case[0], batches, case[3], torch.double)
    ours, got = train_ours(f"{build}/parity_double", name, case, batches, torch.double, folder)
    verdict(f"double/{name}/loss", abs(ours - want) / want, 1e-6)
    far = [
        abs(got[key] - weights[key]).max() / max(abs(weights[key]).max(), 1e-30) for key in weights
    ]
    verdict(f"double/{name}/weights", np.array(far), 1e-6)
    ours, _ = train_ours(f"{build}/parity_float", name, case, batches, torch.float, folder)
    if name in ("mnist", "cifar"):
        theirs, _ = train_torch(case[0], batches, case[3], torch.float)
        verdict(f"float/{name}/loss", abs(ours - theirs) / theirs, 1e-5)
        return
    runs = [train_torch(case[0], batches, case[3], torch.float, k)[0] for k in range(RUNS)]
    verdict(f"float/{name}/step 1", abs(ours - runs[0])[:1] / runs[0][:1], 1e-5)
    drift = np.maximum.accumulate(np.max([abs(run - want) for run in runs], axis=0))
    verdict(f"float/{name}/drift", np.maximum.accumulate(abs(ours - want)), 2 * drift + 1e-5)


def main():
    set_threads(len(os.sched_getaffinity(0)))
    for name, case in CASES.items():
        if os.environ.get("QUICK") and name in ("resnet18", "resnet50"):
            print(f"skip parity/{name}: QUICK=1")
            continue
        with tempfile.TemporaryDirectory() as folder:
            compare(name, case, folder, sys.argv[1])


if __name__ == "__main__":
    main()
