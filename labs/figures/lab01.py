#!/usr/bin/env python3
"""Draws the figures of lab 1 again, in the project's folder: labs/figures/lab01.py [DIR]

convolution  the handout's example: a 2x2 filter on an image of 4x4
gradient     the same backwards: one pixel lies in two windows

Into DIR (default: labs/figures) as lab01_NAME.png. Needs matplotlib: pip install -r labs/requirements.txt
"""
from drawing import arrow, blank, draw_all, grid, note

IMAGE = [[1, 2, 0, 1], [0, 1, 3, 2], [2, 0, 1, 1], [1, 1, 0, 2]]
FILTER = [[1, 0], [-1, 2]]
OUT = [[sum(FILTER[i][j] * IMAGE[y + i][x + j] for i in (0, 1) for j in (0, 1)) + 1 for x in range(3)] for y in range(3)]
DOUT = [[1, 2, 0], [0, 0, 0], [0, 0, 0]]


def within(first, row, column):
    return first <= column <= first + 1 and row <= 1


def convolution():
    axes = blank(7.2, 2.2, 72, 22)
    for x, text, numbers, gray in (
            (3, "in", IMAGE, lambda r, c: 0.75 if within(1, r, c) else 1), (24, "weight", FILTER, lambda r, c: 0.75),
            (38, "out, bias 1", OUT, lambda r, c: 0.75 if (r, c) == (0, 1) else 1)):
        grid(axes, x, 17, numbers, 4, gray)
        note(axes, x, 19, text)
    arrow(axes, (33.5, 13), (37, 13))
    note(axes, 53, 14, "out[0][1] = 2*1 + 0*0\n + 1*(-1) + 3*2 + 1 = 8", 8)
    note(axes, 53, 7, "stride 1: the window\nmoves by one pixel;\n4 - 2 + 1 = 3 places", 8)


def gradient():
    axes = blank(7.2, 2.2, 72, 22)
    for x, text, gray in ((3, "window of out[0][0]", lambda r, c: 0.6 if (r, c) == (0, 1) else 0.85 if within(0, r, c) else 1),
                          (23, "window of out[0][1]", lambda r, c: 0.6 if (r, c) == (0, 1) else 0.85 if within(1, r, c) else 1)):
        grid(axes, x, 17, IMAGE, 4, gray)
        note(axes, x, 19, text)
    grid(axes, 43, 17, DOUT, 4)
    note(axes, 43, 19, "dout")
    note(axes, 57, 15, "pixel (0, 1), dark, is\nthe upper right of one\nand the upper left of\nthe other window:", 8)
    note(axes, 57, 6.5, "din[0][1] = 1 * weight[0][1]\n  + 2 * weight[0][0] = 2", 7.5)


draw_all("lab01", (convolution, gradient))
