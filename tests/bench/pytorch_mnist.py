#!/usr/bin/env python3
"""Trains PyTorch's MNIST example end to end, to set beside the same training with our program.

Compared: seconds an epoch, waiting for the data included, and the loss and accuracy on the test
images.  Network, batches, Adadelta, StepLR, NLL loss, Normalize(.1307, .3081) and the DataLoader
that fetches one image at a time are those of the example; `loader_wait_s` is the part of `seconds`
spent waiting for that DataLoader.

Not compared: the numbers bit for bit (PyTorch draws other random weights, orders and dropout
masks), reading the files at the start, and GPUs.  Unlike the example, the order is shuffled on the
CPU too, no loss is printed every few steps, and there is no --dry-run or --save-model.

usage: pytorch_mnist.py --data DIR [--epochs 14] [--batch-size 64] [--lr 1] [--gamma 0.7]
       [--seed 1] [--workers 0] [--threads N] [--limit-train N] [--limit-test N]
DIR holds the four IDX files of MNIST or Fashion-MNIST, plain or .gz.  One line says what runs, then
comes one line an epoch, in our program's format.  Exit code 77 without PyTorch.
"""
import argparse
import gzip
import os
import shutil
import sys
import tempfile
import time

sys.dont_write_bytecode = True  # no __pycache__ in the source tree
from bench_pytorch import MnistNet, adadelta, cpus, positive, set_threads

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

# A torchvision that is broken or made for another PyTorch fails with the last two of these.
try:
    import torchvision
    from torchvision import datasets, transforms
except (ImportError, OSError, RuntimeError):
    torchvision = None

MEAN, STD = 0.1307, 0.3081
TEST_BATCH = 1000  # as in the example
PREFIXES = {True: "train", False: "t10k"}


def find(folder, name):
    for path in (os.path.join(folder, name), os.path.join(folder, name + ".gz")):
        if os.path.exists(path):
            return path
    sys.exit(f"pytorch_mnist.py: {folder} holds neither {name} nor {name}.gz")


def open_idx(path):
    return gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")


class IdxDataset(Dataset):
    """Stands in for torchvision.datasets.MNIST: the same items, without the detour over PIL."""

    def __init__(self, folder, train):
        self.data = self.read(find(folder, f"{PREFIXES[train]}-images-idx3-ubyte"), 3)
        self.targets = self.read(find(folder, f"{PREFIXES[train]}-labels-idx1-ubyte"), 1)

    @staticmethod
    def read(path, dims):
        with open_idx(path) as file:
            raw = bytearray(file.read())  # not bytes: torch.frombuffer wants it writable
        # Header: 0, 0, 8 for unsigned bytes, number of dimensions; then each as 32-bit big-endian.
        header = 4 + 4 * dims
        shape = [int.from_bytes(raw[i:i + 4], "big") for i in range(4, header, 4)]
        if raw[:4] != bytes((0, 0, 8, dims)) or len(raw) != header + torch.Size(shape).numel():
            sys.exit(f"pytorch_mnist.py: {path} is not an IDX file of {dims} dimensions")
        return torch.frombuffer(raw, dtype=torch.uint8, offset=header).reshape(shape)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        # What ToTensor and Normalize do: bytes to [0, 1] with a channel dimension, then scale.
        image = self.data[index].unsqueeze(0).float().div(255)
        return image.sub_(MEAN).div_(STD), int(self.targets[index])


def torchvision_datasets(folder):
    """Both parts through torchvision, which wants <root>/MNIST/raw/<uncompressed files>."""
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
    with tempfile.TemporaryDirectory() as root:
        raw = os.path.join(root, "MNIST", "raw")
        os.makedirs(raw)
        for prefix in PREFIXES.values():
            for name in (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"):
                with open_idx(find(folder, name)) as source:
                    with open(os.path.join(raw, name), "wb") as target:
                        shutil.copyfileobj(source, target)
        # FashionMNIST is the same class with other download addresses, so this one reads both.
        # It reads all into memory here; the folder is not needed afterwards.
        return [datasets.MNIST(root, train=train, transform=transform) for train in PREFIXES]


def limit(dataset, count):
    """Keeps the first images.  Not with Subset: that would add a call to every item fetched."""
    dataset.data, dataset.targets = dataset.data[:count], dataset.targets[:count]
    return dataset


def train(net, loader, optimizer):
    """One epoch; returns seconds, those of them spent waiting for data, and the mean loss."""
    net.train()
    loss_sum = wait = 0.0
    start = before = time.perf_counter()
    for images, labels in loader:  # starts the worker processes, so that is waiting as well
        wait += time.perf_counter() - before
        optimizer.zero_grad()
        loss = F.nll_loss(net(images), labels)
        loss.backward()
        optimizer.step()
        loss_sum += loss.item() * len(labels)
        before = time.perf_counter()
    return time.perf_counter() - start, wait, loss_sum / len(loader.dataset)


def test(net, loader):
    """Returns seconds, mean loss and accuracy in per cent."""
    net.eval()
    loss_sum, correct = 0.0, 0
    start = time.perf_counter()
    with torch.no_grad():
        for images, labels in loader:
            output = net(images)
            loss_sum += F.nll_loss(output, labels, reduction="sum").item()
            correct += (output.argmax(1) == labels).sum().item()
    seconds = time.perf_counter() - start
    return seconds, loss_sum / len(loader.dataset), 100 * correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, metavar="DIR", help="folder of the IDX files")
    parser.add_argument("--epochs", type=positive, default=14)
    parser.add_argument("--batch-size", type=positive, default=64)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7, help="lr's factor after each epoch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0, help="DataLoader processes; 0: none")
    parser.add_argument("--threads", type=positive, default=cpus())
    parser.add_argument("--limit-train", type=positive, metavar="N", help="first N images only")
    parser.add_argument("--limit-test", type=positive, metavar="N", help="first N images only")
    args = parser.parse_args()

    set_threads(args.threads)
    torch.manual_seed(args.seed)

    if torchvision:
        kind = f"torchvision.datasets.MNIST torchvision={torchvision.__version__}"
        train_set, test_set = torchvision_datasets(args.data)
    else:
        kind = "pytorch_mnist.IdxDataset torchvision=none"
        train_set, test_set = (IdxDataset(args.data, part) for part in PREFIXES)
    limit(train_set, args.limit_train)
    limit(test_set, args.limit_test)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, num_workers=args.workers)
    test_loader = DataLoader(test_set, TEST_BATCH, num_workers=args.workers)
    print(f"torch model=mnist batch={args.batch_size} threads={args.threads}"
          f" workers={args.workers} version={torch.__version__} dataset={kind}", flush=True)

    net = MnistNet()
    optimizer = adadelta(net.parameters(), args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    images = len(train_set)
    for epoch in range(1, args.epochs + 1):
        lr = optimizer.param_groups[0]["lr"]
        seconds, wait, train_loss = train(net, train_loader, optimizer)
        test_seconds, test_loss, accuracy = test(net, test_loader)
        scheduler.step()
        print(f"epoch={epoch} images={images} seconds={seconds:.2f}"
              f" img_per_s={images / seconds:.0f} loader_wait_s={wait:.2f}"
              f" train_loss={train_loss:.4f} test_seconds={test_seconds:.2f}"
              f" test_loss={test_loss:.4f} accuracy={accuracy:.2f} lr={lr:g}", flush=True)


if __name__ == "__main__":
    main()
