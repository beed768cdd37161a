#!/usr/bin/env python3
"""Draws the figures of lab 3 again, in the project's folder: labs/figures/lab03.py [DIR]

ring      five slots: the batch in use, batches that are ready, and which numbers may be begun
timeline  no worker, one and two: who waits for whom (t_l = 30 ms, t_c = 12 ms)

They show rules, not measurements. Into DIR (default: labs/figures) as lab03_NAME.png. Needs matplotlib: pip install
-r labs/requirements.txt
"""
from drawing import arrow, blank, box, draw_all, note


def ring():
    axes = blank(7.2, 2.4, 72, 24)
    slots = [("0", "slot 0\nno longer in use", 1), ("1", "slot 1\nin use", 0.6), ("2", "slot 2\nready", 0.85), ("3", "slot 3\nready", 0.85),
             ("4", "slot 4\nbeing made", 0.95)]
    for i, (batch, text, gray) in enumerate(slots):
        box(axes, 10 + 10 * i, 11, 9, 5, f"batch {batch}", gray)
        note(axes, 14.5 + 10 * i, 8, text, 8, "center")
    note(axes, 24.5, 19, "training loop:\nhanded = 2", 8, "center")
    arrow(axes, (24.5, 17.5), (24.5, 16.2))
    note(axes, 54.5, 19, "worker:\nstarted = 5", 8, "center")
    arrow(axes, (54.5, 17.5), (54.5, 16.2))
    note(axes, 36, 3.5, "batch b lies in slot b % 5: after the last slot comes the first one again", 8, "center")


def row(axes, y, name, begins, length, text, gray):
    note(axes, 12, y + 1.3, name, 8, "right")
    for i, begin in begins:
        box(axes, 13 + begin / 2.6, y, length / 2.6, 2.6, f"{text} {i}", gray, 7)


def timeline():
    axes = blank(7.2, 3.4, 72, 34)
    note(axes, 1, 32, "no worker: 42 ms a step", 9)
    row(axes, 28, "loop", [(i, 42 * i) for i in range(3)], 30, "load", 0.9)
    row(axes, 28, "loop", [(i, 42 * i + 30) for i in range(3)], 12, "", 0.6)
    note(axes, 1, 25.5, "one worker: 30 ms, training (dark) waits", 9)
    row(axes, 22, "worker", [(i, 30 * i) for i in range(5)], 30, "load", 0.9)
    row(axes, 18.8, "loop", [(i, 30 * i + 30) for i in range(4)], 12, "", 0.6)
    note(axes, 1, 16, "two workers: 15 ms a step", 9)
    row(axes, 12.5, "worker A", [(2 * i, 30 * i) for i in range(5)], 30, "load", 0.9)
    row(axes, 9.3, "worker B", [(2 * i + 1, 15 + 30 * i) for i in range(4)], 30, "load", 0.9)
    row(axes, 6.1, "loop", [(i, 30 + 15 * i) for i in range(8)], 12, "", 0.6)
    arrow(axes, (13, 3.5), (70, 3.5))
    note(axes, 66, 1.8, "time", 8)


draw_all("lab03", (ring, timeline))
