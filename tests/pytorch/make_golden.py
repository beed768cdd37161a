#!/usr/bin/env python3
"""Writes what PyTorch computes in float64 into golden/*.txt, which the C tests compare with.

The C tests so check forward and backward passes, batch-norm statistics, optimizers, learning-rate
schedules and label smoothing against PyTorch on machines that do not have it.  Inputs and weights
are not in the files: value(stream, i) below makes them, and C makes the same by its own Philox.

A number of a stream is 2 * uniform(philox(i / 4, stream, 0, 0xFFFE, seed 309)[i % 4]) - 1.  Streams:
  50       images, as [n][row][column][channel]      51  labels: floor((value + 1) / 2 * classes)
  60       parameters that an optimizer starts from  61 + s  gradients of its step s = 0..9
  80       logits of the label-smoothing check, 4 x 10
  100 + t  entry t of named_parameters(), in PyTorch's layout: weights value / sqrt(fan_in), fan_in
           being the entries of one output; biases .1 * value; batch norm 1 + .5 * value, .3 * value

Of the seeds 1 to 400 this one keeps the inputs of all ReLUs furthest from 0 and a max-pool's two largest
furthest apart, by 5e-6 at least: closer than rounding, they would make comparisons in floats a matter of luck.

usage: make_golden.py [DIR]     DIR: where to write, golden beside this file if left out
Lines of NET.txt, one step in training mode with the mean loss, dropout off:
  logp - NUMBERS    loss - NUMBER    eval - NUMBERS (log-probabilities in evaluation mode, after)
  grad NAME COUNT NORM SUM ENTRIES   stat NAME COUNT NORM SUM ENTRIES (running mean or variance)
  ENTRIES: m = min(64, COUNT) of them, at floor(k * COUNT / m) of PyTorch's layout, k = 0..m-1
Lines of optimizers.txt:
  optimizer NAME LR MOMENTUM WEIGHT_DECAY NESTEROV ADADELTA, then the 16 parameters after each of
           10 steps
  schedule NAME KIND GAMMA STEP_SIZE WARMUP_EPOCHS EPOCHS, then the rate of each step, 3 an epoch;
           base rate .1, cosine down to 0 over the epochs after the warm-up
  smoothing - LOSS, then its 40 derivatives by the log-probabilities
"""
import os
import sys

sys.dont_write_bytecode = True  # no __pycache__ in the source tree
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../bench"))
from bench_pytorch import BasicBlock, Bottleneck, CifarNet, MnistNet, set_threads

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

SEED, CLASSES = 309, 10
IMAGES, LABELS, START, GRADIENTS, LOGITS, WEIGHTS = 50, 51, 60, 61, 80, 100
LISTED = 64  # entries of a tensor that are written
STEPS_PER_EPOCH, EPOCHS, BASE_LR = 3, 10, 0.1
SMOOTHING = 0.1


# ---- Numbers ------------------------------------------------------------------------------------


def philox(c0, c1, c2, c3, seed):
    """Philox4x32-10 of arrays of counters: four arrays of 32-bit numbers, kept in 64 bits."""
    counters = np.broadcast_arrays(*(np.asarray(c, dtype=np.uint64) for c in (c0, c1, c2, c3)))
    c0, c1, c2, c3 = counters
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for r in range(10):
        k0 = np.uint64((seed + r * 0x9E3779B9) & 0xFFFFFFFF)
        k1 = np.uint64(((seed >> 32) + r * 0xBB67AE85) & 0xFFFFFFFF)
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ k0, p1 & low, (p0 >> half) ^ c3 ^ k1, p0 & low
    return c0, c1, c2, c3


def value(stream, count):
    """The first `count` numbers of a stream, in [-1, 1), exact in 32-bit floats too."""
    bits = np.stack(philox(np.arange((count + 3) // 4), stream, 0, 0xFFFE, SEED), axis=1)
    return 2 * ((bits.reshape(-1)[:count] >> np.uint64(8)) / 2.0**24) - 1


def draw_labels(stream, count, classes=CLASSES):
    return torch.from_numpy(np.floor((value(stream, count) + 1) / 2 * classes).astype(np.int64))


def check_philox():
    zero = [int(c) for c in philox(0, 0, 0, 0, 0)]
    assert zero == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    # From the known answers that come with Random123: a seed whose halves differ.
    pi = philox(0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0x299F31D0A4093822)
    assert [int(c) for c in pi] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


# ---- Networks -----------------------------------------------------------------------------------


class SmallResNet(nn.Module):
    """A ResNet for small images: 3x3 stem, no max-pool; torchvision's blocks, parameter names."""

    def __init__(self, width, blocks, features):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        for i, layer in enumerate(blocks, 1):
            self.add_module(f"layer{i}", nn.Sequential(*layer))
        self.depth = len(blocks)
        self.fc = nn.Linear(features, CLASSES)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        for i in range(1, self.depth + 1):
            x = getattr(self, f"layer{i}")(x)
        return F.log_softmax(self.fc(x.mean((2, 3))), dim=1)


def projected(block, inputs, planes, stride):
    """A block whose shortcut is a 1x1 convolution with batch norm."""
    outputs = planes * block.expansion
    shortcut = nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
    )
    return block(inputs, planes, stride, shortcut)


def mnist():
    net = MnistNet()
    net.dropout1.p = net.dropout2.p = 0.0
    return net


def cifar():
    return CifarNet(6)


def bottleneck():
    layer1 = [projected(Bottleneck, 8, 8, 1)]
    layer2 = [projected(Bottleneck, 32, 16, 2), Bottleneck(64, 16)]
    return SmallResNet(8, [layer1, layer2], 64)


def resnet8():
    layer2, layer3 = projected(BasicBlock, 16, 32, 2), projected(BasicBlock, 32, 64, 2)
    net = SmallResNet(16, [[BasicBlock(16, 16)], [layer2], [layer3]], 64)
    assert parameter_count(net) == 78042
    return net


def parameter_count(net):
    return sum(p.numel() for p in net.parameters())


NETS = {  # name: network, batch, shape of an image as height, width, channels
    "mnist": (mnist, 4, (28, 28, 1)),
    "cifar": (cifar, 4, (32, 32, 3)),
    "bottleneck": (bottleneck, 6, (12, 12, 3)),
    "resnet8": (resnet8, 6, (16, 16, 3)),
}


def set_parameters(net):
    """Every parameter from its stream; of those with one dimension, only batch norm's differ."""
    norms = {n for n, m in net.named_modules() if isinstance(m, nn.BatchNorm2d)}
    for t, (name, p) in enumerate(net.named_parameters()):
        module, kind = name.rsplit(".", 1)
        v = value(WEIGHTS + t, p.numel())
        if p.dim() >= 2:
            v = 1 / np.sqrt(p.numel() / p.shape[0]) * v
        elif module not in norms:
            v = 0.1 * v
        else:
            v = 1 + 0.5 * v if kind == "weight" else 0.3 * v
        p.data.copy_(torch.from_numpy(v).reshape(p.shape))


# ---- Lines --------------------------------------------------------------------------------------


def line(keyword, name, *numbers):
    return " ".join([keyword, name] + [format(float(n), ".17g") for n in numbers])


def tensor_line(keyword, name, tensor):
    flat = tensor.detach().reshape(-1).numpy()
    m = min(LISTED, len(flat))
    listed = [flat[k * len(flat) // m] for k in range(m)]
    return line(keyword, name, len(flat), np.sqrt(np.sum(flat**2)), np.sum(flat), *listed)


def net_lines(make, batch, shape):
    net = make().double().train()
    set_parameters(net)
    images = torch.from_numpy(value(IMAGES, batch * int(np.prod(shape))))
    x = images.reshape(batch, *shape).permute(0, 3, 1, 2).contiguous()
    logp = net(x)
    loss = F.nll_loss(logp, draw_labels(LABELS, batch))
    loss.backward()
    lines = [line("logp", "-", *logp.reshape(-1)), line("loss", "-", loss)]
    lines += [tensor_line("grad", name, p.grad) for name, p in net.named_parameters()]
    lines += [tensor_line("stat", name, b) for name, b in net.named_buffers() if b.dim()]
    with torch.no_grad():
        lines.append(line("eval", "-", *net.eval()(x).reshape(-1)))
    return lines


OPTIMIZERS = {  # name: lr, momentum, weight decay, Nesterov, Adadelta
    "adadelta": (1.0, 0.0, 0.0, False, True),
    "adadelta_decay": (1.0, 0.0, 0.01, False, True),
    "sgd": (0.1, 0.0, 0.0, False, False),
    "sgd_momentum": (0.1, 0.9, 0.0, False, False),
    "sgd_decay": (0.1, 0.9, 0.01, False, False),
    "sgd_nesterov": (0.1, 0.9, 0.01, True, False),
}


def make_optimizer(params, lr, momentum, weight_decay, nesterov, adadelta):
    if adadelta:
        return torch.optim.Adadelta(params, lr, rho=0.9, eps=1e-6, weight_decay=weight_decay)
    return torch.optim.SGD(params, lr, momentum, weight_decay=weight_decay, nesterov=nesterov)


def optimizer_line(name, settings):
    p = torch.from_numpy(value(START, 16)).requires_grad_()
    optimizer = make_optimizer([p], *settings)
    numbers = list(settings)
    for step in range(10):
        p.grad = torch.from_numpy(value(GRADIENTS + step, 16))
        optimizer.step()
        numbers += p.tolist()
    return line("optimizer", name, *numbers)


SCHEDULES = {  # name: kind, gamma, step size, warm-up epochs; 0 where the kind does not have it
    "step": ("step", 0.7, 1, 0),
    "step3": ("step", 0.5, 3, 0),
    "cosine": ("cosine", 0, 0, 0),
    "step_warmup": ("step", 0.7, 1, 2),
    "cosine_warmup": ("cosine", 0, 0, 2),
}


def rates(make_scheduler, count):
    """The learning rates of so many steps of a scheduler."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], BASE_LR)
    scheduler = make_scheduler(optimizer)
    found = []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def warmup_rates(steps):
    """Linear from base / steps up to the base rate, one step of the scheduler a batch."""
    by_lambda = rates(lambda o: lr_scheduler.LambdaLR(o, lambda s: (s + 1) / steps), steps)
    by_linear = rates(lambda o: lr_scheduler.LinearLR(o, 1 / steps, 1.0, steps - 1), steps)
    assert np.allclose(by_lambda, by_linear, rtol=1e-14, atol=0)
    return by_lambda


def schedule_line(name, kind, gamma, step_size, warmup):
    epochs = EPOCHS - warmup  # the schedule begins when the warm-up ends, with its own epoch 0
    make = {
        "step": lambda o: lr_scheduler.StepLR(o, step_size, gamma),
        "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=epochs),
    }[kind]
    found = warmup_rates(warmup * STEPS_PER_EPOCH) if warmup else []
    for rate in rates(make, epochs):
        found += [rate] * STEPS_PER_EPOCH
    return line("schedule", f"{name} {kind}", gamma, step_size, warmup, EPOCHS, *found)


def smoothing_line():
    logits = torch.from_numpy(value(LOGITS, 4 * CLASSES)).reshape(4, CLASSES).requires_grad_()
    labels = draw_labels(LABELS, 4)
    logp = F.log_softmax(logits, dim=1)
    logp.retain_grad()
    chosen = logp.gather(1, labels[:, None])[:, 0]
    loss = -((1 - SMOOTHING) * chosen + SMOOTHING * logp.mean(dim=1)).mean()
    loss.backward()
    expected = F.cross_entropy(logits, labels, label_smoothing=SMOOTHING)
    (by_logits,) = torch.autograd.grad(expected, logits)
    assert torch.allclose(loss, expected, rtol=1e-14)
    assert torch.allclose(logits.grad, by_logits, rtol=1e-12, atol=1e-15)
    return line("smoothing", "-", loss, *logp.grad.reshape(-1))


def write(path, lines):
    made = f"# Made by tests/pytorch/make_golden.py, which explains it, with PyTorch {torch.__version__}"
    with open(path, "w", encoding="ascii", newline="\n") as file:
        file.write("\n".join([f"{made} in float64"] + lines) + "\n")
    print(f"{path}: {len(lines)} lines, {os.path.getsize(path)} bytes")


def main():
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden")
    folder = sys.argv[1] if len(sys.argv) > 1 else beside
    os.makedirs(folder, exist_ok=True)
    check_philox()
    set_threads(1)  # sums in one order
    for name, (make, batch, shape) in NETS.items():
        print(f"{name}: {parameter_count(make())} parameters")
        write(os.path.join(folder, f"{name}.txt"), net_lines(make, batch, shape))
    lines = [optimizer_line(name, settings) for name, settings in OPTIMIZERS.items()]
    lines += [schedule_line(name, *settings) for name, settings in SCHEDULES.items()]
    write(os.path.join(folder, "optimizers.txt"), lines + [smoothing_line()])


if __name__ == "__main__":
    main()
