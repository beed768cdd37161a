#!/usr/bin/env python3
"""Draws the figures of lab 5's handout: labs/figures/lab05.py [FOLDER]"""
from drawing import arrow, blank, box, draw_all, grid, note


def product():
    """A 4 x 4 image, a 2 x 2 filter and two channels out: A, B and C."""
    axes = blank(7.2, 3.6, 72, 36)
    row, side = 5, 3
    y, x = divmod(row, side)
    image = [[4 * i + j for j in range(4)] for i in range(4)]
    patch = {(y + i, x + j) for i in range(2) for j in range(2)}
    note(axes, 1, 32, "image, 4 x 4", 9)
    grid(axes, 1, 30, image, 3, lambda i, j: 0.75 if (i, j) in patch else 1.0)
    note(axes, 1, 15, "under the filter (gray)\nfor row 5: y = 1, x = 2", 8)
    a = [[4 * (r // side + k // 2) + r % side + k % 2 for k in range(4)] for r in range(side * side)]
    note(axes, 22, 32, "A: 9 rows, depth 4", 9)
    grid(axes, 22, 30, a, 3, lambda i, j: 0.75 if i == row else 1.0)
    for r in range(side * side):
        note(axes, 21.4, 28.5 - 3 * r, str(r), 7, "right")
    note(axes, 36.5, 22, "x", 12)
    note(axes, 41, 32, "B: depth 4, 2 columns", 9)
    grid(axes, 41, 30, [[f"b{k}{c}" for c in range(2)] for k in range(4)], 3.4, lambda i, j: 0.9 if j == 1 else 1.0, 7)
    note(axes, 51, 22, "=", 12)
    note(axes, 56, 32, "C: 9 rows, 2 columns", 9)
    grid(axes, 56, 30, [["" for _ in range(2)] for _ in range(side * side)], 3,
         lambda i, j: 0.75 if (i, j) == (row, 1) else 1.0)
    note(axes, 39, 10, "C[5][1] = 6 b01 + 7 b11\n      + 10 b21 + 11 b31", 8)


def tiles():
    """A block's tile of C, and the tiles of A and B of one step."""
    axes = blank(7.2, 4.2, 72, 42)
    box(axes, 4, 2, 24, 24, gray=1.0)
    note(axes, 5, 28, "A: rows x depth", 9)
    box(axes, 32, 2, 24, 24, gray=1.0)
    note(axes, 57.5, 24, "C: rows x columns", 9)
    box(axes, 32, 28, 24, 12, gray=1.0)
    note(axes, 57.5, 38, "B: depth x columns", 9)
    box(axes, 4, 12, 24, 6, gray=0.93)
    box(axes, 40, 28, 6, 12, gray=0.93)
    for step in range(1, 8):
        axes.plot([4 + 3 * step] * 2, [12, 18], color="black", linewidth=0.4)
        axes.plot([40, 46], [28 + 1.5 * step] * 2, color="black", linewidth=0.4)
    box(axes, 13, 12, 3, 6, gray=0.6)
    box(axes, 40, 34, 6, 1.5, gray=0.6)
    box(axes, 40, 12, 6, 6, "T x T", gray=0.75)
    arrow(axes, (4, 10.5), (28, 10.5))
    note(axes, 12, 9, "steps along k", 8)
    note(axes, 57.5, 31.5, "dark: tiles of one step,\nT x 16 and 16 x T,\nin shared memory", 8)
    note(axes, 57.5, 15, "gray: what one block\ncomputes", 8)


def buffers():
    """Who waits for whom: one buffer with two barriers a step, two buffers with one."""
    axes = blank(7.2, 2.9, 72, 29)
    load, put, compute = 0.6, 0.8, 0.95
    note(axes, 1, 27, "one buffer: a step loads, waits, stores, computes; two barriers (black)", 9)
    at = 2
    for step in range(3):
        for width, text, gray in ((6, f"load {step}", load), (3, "put", put), (0.6, "", 0.0),
                                  (9, f"compute {step}", compute), (0.6, "", 0.0)):
            box(axes, at, 20, width, 4, text, gray, 7)
            at += width
    note(axes, 1, 16, "two buffers: the next loads are under way while a step computes; one barrier", 9)
    box(axes, 2, 7.5, 6, 4, "load 0", load, 7)
    at = 8
    for step in range(3):
        box(axes, at, 7.5, 3, 4, "put", put, 7)
        box(axes, at + 3, 7.5, 0.6, 4, "", 0.0)
        box(axes, at + 3.6, 7.5, 9, 4, f"compute {step}", compute, 7)
        if step < 2:
            box(axes, at + 3.6, 3, 6, 3.6, f"load {step + 1}", load, 7)
        at += 12.6
    arrow(axes, (2, 1.2), (62, 1.2))
    note(axes, 63, 1.2, "time", 8)


draw_all("lab05", (product, tiles, buffers))
