#!/usr/bin/env python3
"""Draws the figures of lab 7 again, in the project's folder: labs/figures/lab07.py [DIR]

formats  the bits of the four formats of numbers
scale    the loss scale over the steps of a training
layouts  the same image in NHWC and in NCHW
fusion   what an update reads and writes, as four kernels and as one
race     two threads that add to one number, without and with an atomic addition

They show rules, not measurements: the steps in `scale` are invented. Black and white, 100 dots per inch, into DIR
(default: labs/figures) as lab07_NAME.png. Needs matplotlib: pip install -r labs/requirements.txt
"""

from drawing import arrow, blank, box, draw_all, grid, note, plt


def formats():
    axes = blank(7.2, 2.0, 72, 20)
    for row, (name, exponent, fraction) in enumerate((("fp32", 8, 23), ("tf32", 8, 10), ("bf16", 8, 7), ("fp16", 5, 10))):
        x, y = 8, 14 - 4 * row
        note(axes, 1, y + 1.5, name, 9)
        for width, text, gray in ((1, "", 0.3), (exponent, f"exponent {exponent}", 0.8), (fraction, f"fraction {fraction}", 1)):
            box(axes, x, y, 1.6 * width, 3, text, gray, 7)
            x += 1.6 * width
    note(axes, 8, 18.7, "sign", 7, ha="center")
    note(axes, 42, 7, "exponent: how large, how small\nfraction: how many digits", 8)


def scale():
    figure, axes = plt.subplots(figsize=(7.2, 2.4))
    steps, scales, value, good = [], [], 65536, 0
    skipped = {3, 4, 6, 5200, 9000}
    for step in range(12000):
        if step in skipped:
            value, good = value / 2, 0
        elif good + 1 == 2000:
            value, good = value * 2, 0
        else:
            good += 1
        steps.append(step)
        scales.append(value)
    axes.step(steps, scales, color="black", linewidth=1.2)
    for step in skipped:
        axes.plot(step, scales[step], "x", color="black", markersize=6)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("step (x: an update that was skipped)", fontsize=8)
    axes.set_ylabel("loss scale", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(True, linewidth=0.3)
    figure.tight_layout()


def layouts():
    axes = blank(7.2, 2.6, 72, 26)
    colors = {"r": 1.0, "g": 0.8, "b": 0.55}

    def cells(x, y, names):
        grid(axes, x, y, [names], 4.2, lambda row, column: colors[names[column][0]], 8)
    for i, channel in enumerate("rgb"):
        x = 12 + 18 * i
        note(axes, x - 1, 21, f"c = {i}", 8, ha="right")
        names = [[f"{channel}{2 * row + column}" for column in range(2)] for row in range(2)]
        grid(axes, x, 25, names, 4.2, lambda row, column, c=channel: colors[c], 8)
    note(axes, 1, 11.3, "NHWC", 9)
    cells(10, 13.4, [f"{c}{p}" for p in range(4) for c in "rgb"])
    note(axes, 1, 4.3, "NCHW", 9)
    cells(10, 6.4, [f"{c}{p}" for c in "rgb" for p in range(4)])
    note(axes, 8.5, 0.9, "at", 7, ha="right")
    for i in range(12):
        note(axes, 12.1 + 4.2 * i, 0.9, str(i), 7, ha="center")


def fusion():
    axes = blank(7.2, 3.0, 72, 30)
    note(axes, 1, 28.5, "four kernels: each reads (down) and writes (up)", 9)
    box(axes, 1, 23.6, 68, 2.6, "memory", 0.85, 8)
    for i, (name, reads, writes) in enumerate((("divide by\nthe scale", 1, 1), ("add weight\ndecay", 2, 1),
                                               ("rule", 3, 2), ("16-bit copy", 1, 1))):
        x = 3 + 17 * i
        box(axes, x, 16.5, 12, 3.6, name, 1, 7)
        for k in range(reads):
            arrow(axes, (x + 1.5 + 1.6 * k, 23.6), (x + 1.5 + 1.6 * k, 20.1))
        for k in range(writes):
            arrow(axes, (x + 10.5 - 1.6 * k, 20.1), (x + 10.5 - 1.6 * k, 23.6))
    note(axes, 1, 13.4, "one kernel", 9)
    box(axes, 1, 8.6, 68, 2.6, "memory", 0.85, 8)
    box(axes, 10, 1.5, 46, 3.6, "divide, decay, rule, copy: in registers", 1, 8)
    for k in range(3):
        arrow(axes, (13 + 2.5 * k, 8.6), (13 + 2.5 * k, 5.1))
        arrow(axes, (48 + 2.5 * k, 5.1), (48 + 2.5 * k, 8.6))


# The instructions of two threads that both add 1, from top to bottom: thread, text, what is then in memory
RACES = (
    ("not_finite += 1: a race", ((0, "reads 0", 0), (1, "reads 0", 0), (0, "writes 0 + 1", 1), (1, "writes 0 + 1", 1)),
     "one of two is lost"),
    ("atomicAdd(&not_finite, 1)", ((0, "reads 0, writes 1", 1), (1, "reads 1, writes 2", 2)), "both are counted"))


def race():
    axes = blank(7.2, 2.9, 72, 29)
    for part, (title, instructions, result) in enumerate(RACES):
        x = 4 + 36 * part
        note(axes, x, 27.5, title, 9)
        for column, head in enumerate(("thread A", "thread B", "memory")):
            note(axes, x + 5 + 10.5 * column, 24.5, head, 8, ha="center")
        tall = 16 / len(instructions)
        for row, (thread, text, memory) in enumerate(instructions):
            y = 22.5 - tall * (row + 1)
            box(axes, x + 10.5 * thread, y + 0.4, 10, tall - 0.8, text, 0.85, 7)
            box(axes, x + 23.5, y + 0.4, 5, tall - 0.8, str(memory), 1.0, 8)
        arrow(axes, (x - 1.5, 22.5), (x - 1.5, 6))
        note(axes, x + 14, 3, result, 8.5, ha="center")
    note(axes, 1, 4, "time", 7.5)


draw_all("lab07", (formats, scale, layouts, fusion, race))
