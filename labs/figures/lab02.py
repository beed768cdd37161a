#!/usr/bin/env python3
"""Draws the figures of lab 2 again, in the project's folder: labs/figures/lab02.py [DIR]

roofline  the two limits of a machine of 120 GFLOP/s and 15 GB/s, and three points
order     which weights two orders of loops read one after the other

The points are the handout's examples, not measurements. Into DIR (default: labs/figures) as lab02_NAME.png. Needs
matplotlib: pip install -r labs/requirements.txt
"""
import numpy as np
from drawing import blank, box, draw_all, note, plt

PEAK, BANDWIDTH = 120, 15


def roofline():
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    x = np.geomspace(1 / 16, 512, 200)
    axes.plot(x, np.minimum(x * BANDWIDTH, PEAK), "k-", linewidth=2)
    axes.plot([91 / 4, 91], [100, 4 * 100], "k-", linewidth=0.8)  # the same bytes in the same time
    axes.plot([91 / 4, 0.125], [100, 1.6], "ks", markersize=7)
    axes.plot([91], [4 * 100], "s", color="white", markeredgecolor="black", markersize=7)
    axes.annotate("conv2 as executed", (91 / 4, 100), (4, -13), textcoords="offset points", fontsize=8)
    axes.annotate("conv2 as its definition counts:\n4 times as many multiplications", (91, 400), (-138, 0),
                  textcoords="offset points", fontsize=8)
    axes.annotate("ReLU", (0.125, 1.6), (8, -8), textcoords="offset points", fontsize=8)
    axes.annotate("P: no layer executes more", (10, PEAK), (-128, 2), textcoords="offset points", fontsize=8)
    axes.annotate("slope M: twice the intensity,\ntwice the speed", (0.8, 12), (-110, 12), textcoords="offset points", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="operations per byte (FLOP/byte)", ylabel="GFLOP/s", ylim=(0.5, 1000))
    figure.tight_layout()


def order():
    axes = blank(7.2, 3.0, 72, 30)
    for y, text, every in ((19, "textbook: input channels c innermost; four reads of weight[tap][c][k], k = 0", 4),
                           (6, "output channels k innermost; four reads of weight[tap][c][k], c = 0", 1)):
        note(axes, 2, y + 7.5, text, 9)
        for i in range(16):
            read = i % every == 0 and i // every < 4
            box(axes, 2 + 4.2 * i, y, 4.2, 4, str(i // every + 1) if read else "", 0.6 if read else 1)
            note(axes, 4.1 + 4.2 * i, y - 1.4, f"c{i // 4} k{i % 4}", 6.5, "center")
    note(axes, 2, 1.6, "one vector instruction reads and multiplies the four gray weights at once", 8)


draw_all("lab02", (roofline, order))
