#!/usr/bin/env python3
"""Draws the figures of lab 8 again, in the project's folder: labs/figures/lab08.py [DIR]

ring      which part each of four ranks sends and receives, step by step
sampler   which images each of four ranks gets, of 10
timeline  one training step on one device, with ddp and with dp

They show rules, not measurements: the lengths in the timeline are invented. Black and white, 100 dots per
inch, into DIR (default: labs/figures) as lab08_NAME.png. Needs matplotlib: pip install -r labs/requirements.txt
"""
from drawing import arrow, blank, box, draw_all

RANKS = 4


def after(steps):
    """What each rank has of each part after so many steps: the number of ranks whose numbers are in it."""
    has = [[1] * RANKS for _ in range(RANKS)]
    for step in range(steps):
        before = [row[:] for row in has]
        for rank in range(RANKS):
            part = (rank - step - 1) % RANKS
            came = before[(rank - 1) % RANKS][part]
            has[rank][part] = came + 1 if step < RANKS - 1 else came
    return has


def ring():
    axes = blank(7.2, 4.0, 72, 40)
    for s in range(2 * RANKS - 1):
        x, y = 9 + (s % 4) * 16, (21, 1)[s // 4]
        what = "before" if s == 0 else f"after step {s}"
        axes.text(x + 6, y + 15.4, what, ha="center", fontsize=9)
        for rank, row in enumerate(after(s)):
            for part, count in enumerate(row):
                box(axes, x + 3 * part, y + 3.5 * (RANKS - 1 - rank), 3, 3, str(count), 1 - count * count / 22, 8)
        if s % 4 == 0:
            for rank in range(RANKS):
                axes.text(x - 1, y + 3.5 * (RANKS - 1 - rank) + 1.5, f"rank {rank}", ha="right", va="center", fontsize=8)
    axes.text(56, 8, "1: a rank's own numbers\n4: the sum of all four\n\nsteps 1 to 3: reduce-scatter\n"
              "steps 4 to 6: all-gather", fontsize=7.5, va="center")


def sampler():
    images, order = 10, [7, 2, 9, 4, 0, 5, 1, 8, 3, 6]
    padded = order + order[:-images % RANKS]
    axes = blank(7.2, 2.3, 72, 23)
    axes.text(1, 19.5, "permutation", fontsize=9, va="center")
    for place, image in enumerate(padded):
        box(axes, 13 + 4.8 * place, 18, 4.2, 3.2, str(image), 1 if place < images else 0.75)
    axes.text(13 + 4.8 * images, 21.8, "repeated", fontsize=8)
    for rank in range(RANKS):
        y = 12 - 3.8 * rank
        axes.text(1, y + 1.5, f"rank {rank}", fontsize=9, va="center")
        for place in range(rank, len(padded), RANKS):
            box(axes, 13 + 4.8 * place, y, 4.2, 3, str(padded[place]), 1 if place < images else 0.75)


def bar(axes, y, row):
    """One line of the timeline: (begin, end, text, gray)"""
    for begin, end, text, gray in row:
        box(axes, 11 + begin, y, end - begin, 2.6, text, gray, 7, "////" if text == "" else None)


def timeline():
    axes = blank(7.2, 3.6, 72, 36)
    forward, backward, update, talk = 0.95, 0.8, 0.6, 0.3

    def name(y, text):
        axes.text(10, y + 1.3, text, ha="right", va="center", fontsize=8)
    axes.text(1, 34, "one device, the whole batch", fontsize=9)
    name(30.5, "device 0")
    bar(axes, 30.5, [(0, 18, "forward", forward), (18, 54, "backward", backward), (54, 57, "upd.", update)])
    axes.text(1, 27.5, "ddp: each half of the batch; the all-reduce runs beside backward", fontsize=9)
    for rank, y in enumerate((24, 18.4)):
        name(y, f"device {rank}")
        bar(axes, y, [(0, 9, "forward", forward), (9, 27, "backward", backward), (34, 37, "upd.", update)])
        name(y - 2.7, "ring")
        bar(axes, y - 2.7, [(17, 25, "bucket 0", talk), (27, 34, "bucket 1", talk)])
    axes.text(1, 12.7, "dp: the master scatters and gathers, while the others wait (hatched)", fontsize=9)
    name(9, "0 (master)")
    bar(axes, 9, [(0, 4, "scatter", talk), (4, 13, "forward", forward), (13, 17, "loss", update),
                  (17, 35, "backward", backward), (35, 42, "gradients", talk), (42, 45, "upd.", update)])
    name(5.4, "device 1")
    bar(axes, 5.4, [(0, 4, "images", talk), (4, 13, "forward", forward), (13, 17, "", 1),
                    (17, 35, "backward", backward), (35, 45, "", 1), (45, 51, "parameters", talk)])
    arrow(axes, (11, 2.6), (66, 2.6))
    axes.text(66.5, 2.6, "time", fontsize=8, va="center")


draw_all("lab08", (ring, sampler, timeline))
