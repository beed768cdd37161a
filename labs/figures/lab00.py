#!/usr/bin/env python3
"""Draws the figures of lab 0 again, in the project's folder: labs/figures/lab00.py [DIR]

loop  one training step, and what repeats it
loss  the loss of one image by the probability of its class: -log p

Into DIR (default: labs/figures) as lab00_NAME.png. Needs matplotlib: pip install -r labs/requirements.txt
"""
import numpy as np
from drawing import arrow, blank, box, draw_all, note, plt


def loop():
    axes = blank(7.2, 2.2, 72, 22)
    names = ["batch of\nB images", "forward", "loss", "backward", "new\nweights"]
    for i, name in enumerate(names):
        box(axes, 2 + 14 * i, 9, 10, 6, name, 0.95 if i in (0, 4) else 0.85)
        if i:
            arrow(axes, (14 * i - 2, 12), (14 * i + 2, 12))
    for x, text in ((16, "10 probabilities\nan image"), (30, "how wrong:\n-log p"), (44, "gradient: how the loss\nchanges with each weight")):
        note(axes, x + 5, 17.5, text, 7, "center")
    axes.plot([63, 63, 7, 7], [9, 4.5, 4.5, 6], "k-", linewidth=0.8)
    arrow(axes, (7, 4.5), (7, 9))
    note(axes, 35, 2.8, "a step; ceil(N / B) steps are an epoch: every image once", 8, "center")


def loss():
    figure, axes = plt.subplots(figsize=(5, 2.8))
    p = np.linspace(0.01, 1, 200)
    axes.plot(p, -np.log(p), "k-")
    for at, text in ((0.1, "guessing, p = 0.1: 2.303"), (0.9, "p = 0.9: 0.105")):
        axes.plot([at], [-np.log(at)], "ko")
        axes.annotate(text, (at, -np.log(at)), (8 if at < 0.5 else -60, 8), textcoords="offset points", fontsize=8)
    axes.set(xlabel="probability p of the correct class", ylabel="loss of one image, -log p", xlim=(0, 1.02), ylim=(0, 4.7))
    figure.tight_layout()


draw_all("lab00", (loop, loss))
