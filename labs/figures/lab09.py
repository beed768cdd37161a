#!/usr/bin/env python3
"""Draws the figures of lab 9 again, in the project's folder: labs/figures/lab09.py [DIR]

scaling  how the images of a step are divided in strong and in weak scaling, and what it means for the time
rates    the learning rate of a run on one device, and on four with linear scaling and a warm-up
hours    two runs as rectangles: devices x time, of which only a part is training

They show rules, not measurements: the numbers are invented. Black and white, 100 dots per inch, into DIR
(default: labs/figures) as lab09_NAME.png. Needs matplotlib: pip install -r labs/requirements.txt
"""

from drawing import arrow, blank, box, draw_all, plt


def scaling():
    axes = blank(7.2, 3.3, 72, 33)
    for x, title, work in ((2, "strong: 64 images together", [24, 12, 6]), (38, "weak: 64 images each", [24, 24, 24])):
        axes.text(x, 31, title, fontsize=9)
        y = 26
        for devices, length in zip((1, 2, 4), work):
            axes.text(x + 3, y + 1.2 - 2.4 * (devices - 1) / 2, str(devices), ha="right", va="center", fontsize=9)
            for device in range(devices):
                box(axes, x + 4, y - 2.4 * device, length, 2.2, f"{64 * length // 24}", 0.85, 7)
                if devices > 1:
                    box(axes, x + 4 + length, y - 2.4 * device, 4 * (devices - 1) / devices, 2.2, "", 1, 7, "////")
            y -= 2.4 * devices + 2.2
        arrow(axes, (x + 4, 3.2), (x + 32, 3.2))
        axes.text(x + 18, 1, "time of a step", ha="center", fontsize=8)
    axes.text(19, 11, "hatched: communication,\nwhich does not shrink", fontsize=8, va="center", ha="left")


def rates():
    figure, axes = plt.subplots(figsize=(7.2, 2.8))
    steps = [i / 50 for i in range(301)]
    one = [0.01 * 0.7 ** int(t) for t in steps]
    four = [0.04 * min(1, t + 0.02) if t < 1 else 0.04 * 0.7 ** int(t - 1) for t in steps]
    axes.plot(steps, four, "k-", linewidth=1.8, label="4 devices, 64 images: 4 x lr, warm-up of 1 epoch")
    axes.plot(steps, one, "k--", linewidth=1.5, label="1 device, 16 images: lr")
    axes.set(xlabel="epoch", ylabel="learning rate", xlim=(0, 6), ylim=(0, 0.045))
    axes.legend(fontsize=8)
    figure.subplots_adjust(0.1, 0.18, 0.98, 0.96)


def hours():
    axes = blank(7.2, 2.6, 72, 26)
    arrow(axes, (6, 5), (6, 25))
    axes.text(1, 15, "devices", rotation=90, va="center", fontsize=8)
    arrow(axes, (6, 5), (70, 5))
    axes.text(38, 1.5, "time from start to end", ha="center", fontsize=8)
    for x, height, parts in ((8, 4, ((3, "s"), (28, "training"), (4, "t"))), (46, 16, ((3, "s"), (9, "training"), (4, "t")))):
        for width, text in parts:
            box(axes, x, 5, width, height, text, 0.85 if text == "training" else 1, 8, None if text == "training" else "////")
            x += width
    axes.text(8, 11, "1 device: area 35", fontsize=8)
    axes.text(46, 22.3, "4 devices: area 4 x 16 = 64", fontsize=8)
    axes.text(8, 20, "hatched: s starting, t testing and saving,\nwhich the cluster charges, too", fontsize=8, va="center")


draw_all("lab09", (scaling, rates, hours))
