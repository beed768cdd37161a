#!/usr/bin/env python3
"""Draws the figures of lab 6 again, in the project's folder: labs/figures/lab06.py [DIR]

gradients  a convolution in one dimension: from where a pixel, and a weight, gets its gradient
clocks     when the host queues the kernels of a step, and when the device executes them
overlap    the same work with one buffer and with two

They show rules, not measurements: the lengths in `clocks` and `overlap` are invented. Black and white, 100 dots per
inch, into DIR (default: labs/figures) as lab06_NAME.png. Needs matplotlib: pip install -r labs/requirements.txt
"""
from drawing import arrow, blank, box, draw_all, grid, note


# One part of `gradients`: title; rows of (names, those that are used, x of the first); the sum
SUMS = (
    ("forward: out[1]", ("in0 in1 in2 in3", {1, 2, 3}, 0), ("w0 w1 w2", {0, 1, 2}, 1), ("out0 out1", {1}, 0),
     "out1 = in1 w0 + in2 w1 + in3 w2"),
    ("din[2]: all windows that contain pixel 2", ("dout0 dout1", {0, 1}, 0), ("w0 w1 w2", {1, 2}, 0),
     ("din0 din1 din2 din3", {2}, 0), "din2 = dout0 w2 + dout1 w1"),
    ("dweight[1]: pixel o + 1 of each output o", ("in0 in1 in2 in3", {1, 2}, 0), ("dout0 dout1", {0, 1}, 1),
     ("dw0 dw1 dw2", {1}, 0), "dw1 = in1 dout0 + in2 dout1"),
)


def gradients():
    axes = blank(7.2, 3.0, 72, 30)
    for part, (title, *rows, total) in enumerate(SUMS):
        x = 2 + 24 * part
        note(axes, x, 28.5, title, 7.5)
        for y, (names, used, first) in zip((26, 18, 9), rows):
            dark = 0.5 if y == 9 else 0.78
            grid(axes, x + 2 + 4 * first, y, [names.split()], 4,
                 lambda row, i, used=used, dark=dark: dark if i in used else 1, 7)
        arrow(axes, (x + 10, 13.6), (x + 10, 9.4))
        note(axes, x + 2, 2, total, 7)


def tracks(axes, y, rows):
    """Rows of boxes below each other: (name, [(begin, end, text, gray), ...])."""
    for name, spans in rows:
        note(axes, 12, y, name, 8, ha="right")
        for begin, end, text, gray in spans:
            box(axes, 13 + begin, y - 1.4, end - begin, 2.8, text, gray, 7)
        y -= 3.6


# What train() does in a step, and what the device then executes: name, gray, begin and end of both
STEP = (("forward", 0.9, (0, 6), (3, 19)), ("backward", 0.75, (6, 12), (19, 43)), ("update", 0.6, (12, 17), (43, 49)))


def clocks():
    axes = blank(7.2, 2.3, 72, 23)
    host = [(*queued, name, gray) for name, gray, queued, _ in STEP]
    tracks(axes, 15, (("train()", host + [(17, 49, "waits for the device", 1.0)]),
                      ("device", [(*done, name, gray) for name, gray, _, done in STEP])))
    for x, text in ((6, "a clock here has timed\nthe launches of forward"),
                    (49, "here the host has waited:\nall of the step is done")):
        note(axes, 13 + x, 21.3, text, 7.5, ha="center")
        arrow(axes, (13 + x, 19.6), (13 + x, 16.6))
    arrow(axes, (13, 6), (66, 6))
    note(axes, 67, 6, "time")
    note(axes, 13, 3, "When train() has left the line of backward, the device has not begun it.", 8)


def overlap():
    axes = blank(7.2, 2.8, 72, 28)

    def rows(y, title, spans):
        note(axes, 1, y + 3.4, title, 9)
        tracks(axes, y, spans)
    rows(21, "one buffer: the device waits for each copy", (
        ("device", [(5, 15, "step 0", 0.9), (20, 30, "step 1", 0.9), (35, 45, "step 2", 0.9)]),
        ("copies", [(0, 5, "batch 0", 0.6), (15, 20, "batch 1", 0.6), (30, 35, "batch 2", 0.6)])))
    rows(9, "two buffers: batch 1 is copied into one while the device reads the other", (
        ("device", [(5, 15, "step 0", 0.9), (15, 25, "step 1", 0.9), (25, 35, "step 2", 0.9)]),
        ("copies", [(0, 5, "batch 0", 0.6), (5, 10, "batch 1", 0.6), (15, 20, "batch 2", 0.6)])))
    arrow(axes, (13, 1.6), (66, 1.6))
    note(axes, 67, 1.6, "time")


draw_all("lab06", (gradients, clocks, overlap))
