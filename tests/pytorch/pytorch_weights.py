#!/usr/bin/env python3
"""Carries weights between ./cnn and PyTorch, both ways, and compares what the two make of them.

For each network: PyTorch's random weights go by a safetensors file to `./cnn --load FILE --eval`;
./cnn trains on from there and writes them with --save-model; PyTorch loads that file with
load_state_dict(strict=True).  Each time both sides test the same images, in files that this script
writes.  The mean loss must agree within 1e-4, and the confusion matrix but for images whose two
best classes are closer than 1e-4.

CNN=PATH: another binary.  QUICK=1: without resnet18.
Prints lines `pass pytorch_weights/NAME`, `fail pytorch_weights/NAME: why`, `skip ...`.
"""
import csv
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
    from torch import nn
    from torchvision.models import resnet18
except (ImportError, OSError) as error:  # OSError: a shared library of it does not load
    print(f"skip pytorch_weights: {sys.executable} lacks PyTorch or torchvision: {error}")
    sys.exit()
from live_pytorch import read_safetensors, write_safetensors
from make_golden import cifar, mnist, resnet8

CNN = os.path.realpath(os.environ.get("CNN", os.path.join(os.path.dirname(__file__), "../../cnn")))
TRAIN, BATCH = 24, 8  # images
CLOSE = 1e-4


def resnet18_cifar():
    net = resnet18(num_classes=100)
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    net.maxpool = nn.Identity()
    return net


CIFAR10 = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
CIFAR100 = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
NETS = {  # --model and other options: network, dataset, images to test, (mean, standard deviation) of a pixel
    "mnist": (mnist, "mnist", 200, ((0.1307,), (0.3081,))),
    "cifar": (cifar, "cifar10", 200, ((0.5,) * 3, (0.5,) * 3)),
    "resnet8": (resnet8, "cifar10", 200, CIFAR10),
    "resnet8 --resize 96": (resnet8, "cifar10", 40, CIFAR10),
    "resnet18": (resnet18_cifar, "cifar100", 40, CIFAR100),
}

# ---- Safetensors files --------------------------------------------------------------------------

try:
    from safetensors.torch import load_file, save_file
except ImportError:
    def save_file(tensors, path):
        write_safetensors(path, {name: tensor.numpy() for name, tensor in tensors.items()})

    def load_file(path):
        return {name: torch.from_numpy(array.copy()) for name, array in read_safetensors(path).items()}


# ---- Images, as files and as PyTorch takes them -------------------------------------------------


def draw_images(count, channels, classes, rng):
    """Images of random squares under noise, as [n][channel][row][column], and random labels."""
    size = 28 if channels == 1 else 32
    squares = rng.integers(0, 200, (count, channels, size // 4, size // 4))
    images = squares.repeat(4, axis=2).repeat(4, axis=3)
    images += rng.integers(0, 56, images.shape)
    return images.astype(np.uint8), rng.integers(0, classes, count).astype(np.uint8)


def write_idx(folder, prefix, images, labels):
    with open(f"{folder}/{prefix}-images-idx3-ubyte", "wb") as f:
        f.write(struct.pack(">4I", 0x0803, len(images), 28, 28) + images.tobytes())
    with open(f"{folder}/{prefix}-labels-idx1-ubyte", "wb") as f:
        f.write(struct.pack(">2I", 0x0801, len(labels)) + labels.tobytes())


def write_cifar(path, images, labels, label_bytes, records):
    """Behind the images given, the file is sparse: black ones of class 0."""
    with open(path, "wb") as f:
        for image, label in zip(images, labels):
            f.write(bytes(label_bytes - 1) + bytes([label]) + image.tobytes())
        f.truncate(records * (label_bytes + 3072))


def write_data(folder, dataset, train, test):
    if dataset == "mnist":
        write_idx(folder, "train", *train)
        write_idx(folder, "t10k", *test)
    elif dataset == "cifar10":
        for i in range(1, 6):
            write_cifar(f"{folder}/data_batch_{i}.bin", *train, 1, 10000)
        write_cifar(f"{folder}/test_batch.bin", *test, 1, 10000)
    else:
        write_cifar(f"{folder}/train.bin", *train, 2, 50000)
        write_cifar(f"{folder}/test.bin", *test, 2, 10000)


def normalized(images, mean, std, size=None):
    mean, std = (torch.tensor(x).reshape(1, -1, 1, 1) for x in (mean, std))
    images = (torch.from_numpy(images).float() / 255 - mean) / std
    return F.interpolate(images, size, mode="bilinear", align_corners=False) if size else images


# ---- The two sides ------------------------------------------------------------------------------


def randomize(net, inputs):
    """Random BatchNorms, whose statistics nearly fit, and outputs that favor no class."""
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.weight.data.uniform_(0.5, 1.5)
        norm.bias.data.normal_(0, 0.2)
        norm.momentum = 1
    net.train()(inputs)
    for norm in norms:
        norm.running_mean *= torch.empty(norm.num_features).uniform_(0.9, 1.1)
        norm.running_var *= torch.empty(norm.num_features).uniform_(0.9, 1.1)
        norm.num_batches_tracked.fill_(7)
    last = list(net.modules())[-1]
    outputs = []
    hook = last.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    net.eval()(inputs)
    hook.remove()
    std, mean = torch.std_mean(outputs[0], 0)
    last.weight.data /= std.reshape(-1, 1)
    last.bias.data.sub_(mean).div_(std)


def evaluate(net, inputs, labels):
    """Mean loss, confusion matrix, and how many images are too close to call."""
    log_p = F.log_softmax(net.eval()(inputs), 1)  # of log-probabilities: the same ones
    best = log_p.topk(2).values
    classes = log_p.shape[1]
    confusion = np.zeros((classes, classes), int)
    np.add.at(confusion, (labels, log_p.argmax(1).numpy()), 1)
    loss = F.nll_loss(log_p.double(), torch.from_numpy(labels).long()).item()
    return loss, confusion, int((best[:, 0] - best[:, 1] < CLOSE).sum())


def run_cnn(folder, *arguments):
    """Runs ./cnn; its loss and accuracy, and the confusion matrix of its predictions."""
    command = [CNN, "--data", folder, "--batch-size", str(BATCH), "--limit-train", str(TRAIN),
               "--out", f"{folder}/run", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr.strip()}")
    with open(f"{folder}/run/epochs.csv", encoding="utf-8", newline="") as f:
        epoch = list(csv.DictReader(f))[-1]
    with open(f"{folder}/run/run.json", encoding="utf-8") as f:
        classes = len(json.load(f)["classes"])
    with open(f"{folder}/run/predictions.csv", encoding="utf-8", newline="") as f:
        pairs = [(int(row["label"]), int(row["predicted"])) for row in csv.DictReader(f)]
    confusion = np.zeros((classes, classes), int)
    np.add.at(confusion, tuple(zip(*pairs)), 1)
    return {key: float(epoch[key]) for key in ("test_loss", "accuracy")}, confusion


def differences(net, inputs, labels, epoch, confusion):
    """What the two sides disagree on, in words; empty: nothing."""
    loss, expected, close = evaluate(net, inputs, labels)
    accuracy = 100 * np.trace(expected) / len(labels)
    problems = []
    if not abs(epoch["test_loss"] - loss) <= 1e-4:
        problems.append(f"loss {loss:.6f} in PyTorch, {epoch['test_loss']} in cnn")
    if np.abs(expected - confusion).sum() > 2 * close:
        problems.append(f"{np.abs(expected - confusion).sum() // 2} images in other classes")
    if not abs(epoch["accuracy"] - accuracy) <= 0.006 + 100 * close / len(labels):
        problems.append(f"accuracy {accuracy:.2f} in PyTorch, {epoch['accuracy']} in cnn")
    if np.count_nonzero(expected.sum(0)) < 5:
        problems.append(f"classes predicted: {np.flatnonzero(expected.sum(0))}, fewer than 5")
    return "; ".join(problems)


def report(name, problems):
    verdict, why = ("fail", f": {problems}") if problems else ("pass", "")
    print(f"{verdict} pytorch_weights/{name}{why}")


def check_net(name, folder):
    make, dataset, count, (mean, std) = NETS[name]
    rng = np.random.default_rng(1)
    torch.manual_seed(1)
    classes = 100 if dataset == "cifar100" else 10
    train, test = (draw_images(n, len(mean), classes, rng) for n in (TRAIN, count))
    write_data(folder, dataset, train, test)
    model, *resize = name.split()
    inputs, labels = normalized(test[0], mean, std, *map(int, resize[1:])), test[1]
    options = "--model", model, *resize, "--dataset", dataset, "--limit-test", str(count)
    name = name.replace(" --resize ", "_")

    theirs = make()
    randomize(theirs, inputs)
    save_file(theirs.state_dict(), f"{folder}/theirs")
    result = run_cnn(folder, *options, "--load", f"{folder}/theirs", "--eval")
    report(f"{name}/theirs_in_cnn", differences(theirs, inputs, labels, *result))

    run_cnn(folder, *options, "--load", f"{folder}/theirs", "--epochs", "1", "--lr", "1e-4",
            "--save-model")
    state = load_file(f"{folder}/run/model.safetensors")
    ours = make()
    ours.load_state_dict(state, strict=True)
    result = run_cnn(folder, *options, "--load", f"{folder}/run/model.safetensors", "--eval")
    report(f"{name}/ours_in_pytorch", differences(ours, inputs, labels, *result))

    before = theirs.state_dict()
    same = [key for key in state if torch.equal(state[key], before[key])]
    report(f"{name}/training_changed_all", ", ".join(same))
    tracked = {int(v) for key, v in state.items() if key.endswith("num_batches_tracked")}
    report(f"{name}/batches_tracked", "" if tracked <= {7 + TRAIN // BATCH} else tracked)


@torch.no_grad()
def main():
    for name in NETS:
        if name == "resnet18" and os.environ.get("QUICK"):
            print("skip pytorch_weights/resnet18: QUICK=1")
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                check_net(name, folder)
            except (RuntimeError, OSError, ValueError, KeyError) as error:
                report(name, " ".join(str(error).split()))


main()
