#!/usr/bin/env python3
"""Draws the figures of lab 4 again, in the project's folder: labs/figures/lab04.py [DIR]

blocks  1000 elements, four blocks of 256 threads: the last block has 24 threads without an element
clock   when the host reads its clock, and when the device is done

Into DIR (default: labs/figures) as lab04_NAME.png. Needs matplotlib: pip install -r labs/requirements.txt
"""
from drawing import arrow, blank, box, draw_all, note


def blocks():
    axes = blank(7.2, 2.2, 72, 22)
    scale = 66 / 1024
    for b in range(4):
        box(axes, 3 + 256 * b * scale, 12, 256 * scale, 4, "", 0.95)
        note(axes, 4 + 256 * b * scale, 14, f"block {b}: threads 0 to 255", 7.5)
        note(axes, 3 + 256 * b * scale, 18, f"i = {256 * b}", 8)
    box(axes, 3, 6, 1000 * scale, 3.5, "out: elements 0 to 999", 0.8, 8)
    box(axes, 3 + 1000 * scale, 12, 24 * scale, 4, "", 0.4)
    arrow(axes, (3 + 1012 * scale, 11.8), (3 + 1012 * scale, 6.5))
    note(axes, 69, 3.5, "24 threads without an element: without a check\nthey write beyond the end", 8, "right")


def clock():
    axes = blank(7.2, 2.2, 72, 22)
    note(axes, 9, 14.5, "host", 8, "right")
    note(axes, 9, 7.5, "device", 8, "right")
    for i, name in enumerate(("launch A", "launch B")):
        box(axes, 10 + 6 * i, 13, 6, 3, name, 0.95, 7)
        box(axes, 13 + 22 * i, 6, 22, 3, f"kernel {'AB'[i]}", 0.8, 8)
    box(axes, 22, 13, 35, 3, "waits: synchronize()", 1, 8)
    for x, text in ((22, "clock here: it has\nmeasured two launches"), (57, "clock here:\nboth kernels are done")):
        arrow(axes, (x, 19), (x, 16.2))
        note(axes, x, 20.3, text, 7.5, "center")
    arrow(axes, (10, 3), (68, 3))
    note(axes, 64, 1.5, "time", 8)


draw_all("lab04", (blocks, clock))
