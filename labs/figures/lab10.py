#!/usr/bin/env python3
"""Draws the figures of lab 10 again, in the project's folder: labs/figures/lab10.py [DIR]

fragments: which lane has which numbers of A, B and the sums
swizzle: the banks of one chunk of 4 lines, with and without the permutation
stages: three stages of tiles, copied and multiplied

into DIR (default: labs/figures) as lab10_NAME.png. Needs matplotlib: pip install -r labs/requirements.txt
"""
from drawing import arrow, blank, box, draw_all, grid, note

LANE = 6


def gray(lane):
    return 0.7 if lane == LANE else 1.0


def fragments():
    """A, 16 x 16, B, 16 x 8, and the sums, 16 x 8: the number of the lane in each cell."""
    axes = blank(7.2, 6.2, 72, 62)
    a = [[4 * (row % 8) + k % 8 // 2 for k in range(16)] for row in range(16)]
    b = [[4 * column + k % 8 // 2 for column in range(8)] for k in range(16)]
    sums = [[4 * (row % 8) + column // 2 for column in range(8)] for row in range(16)]
    cell = 1.7
    note(axes, 42, 60.5, "B: k down, columns across", 8)
    grid(axes, 42, 59, b, cell, lambda i, j: gray(b[i][j]), 5)
    note(axes, 57, 52, "b[0]: k = 0 to 7", 8)
    note(axes, 57, 38, "b[1]: k = 8 to 15", 8)
    note(axes, 10, 31, "A: rows down, k across", 8)
    grid(axes, 10, 29, a, cell, lambda i, j: gray(a[i][j]), 5)
    note(axes, 9, 22, "a[0] | a[2]", 8, "right")
    note(axes, 9, 8.5, "a[1] | a[3]", 8, "right")
    grid(axes, 42, 29, sums, cell, lambda i, j: gray(sums[i][j]), 5)
    note(axes, 57, 22, "d[0], d[1]", 8)
    note(axes, 57, 8.5, "d[2], d[3]", 8)
    note(axes, 10, 48, "In each cell: the lane that has it.\nLane = 4 g + q: g is the row of A and of the\n"
                       "sums, and the column of B; q selects two\nneighbors. Gray: lane 6, g = 1, q = 2.", 8)


def swizzle():
    """A small tile, 4 lines of 4 chunks, and 16 banks: chunk 2 of each line is gray."""
    axes = blank(7.2, 2.9, 72, 29)
    for x, title, key in ((4, "without a swizzle", lambda line: 0), (40, "with one", lambda line: line)):
        note(axes, x, 27.5, title, 9)
        chunks = [[place ^ key(line) for place in range(4)] for line in range(4)]
        grid(axes, x, 22, chunks, 4.4, lambda i, j, chunks=chunks: 0.7 if chunks[i][j] == 2 else 1.0)
        for place in range(4):
            note(axes, x + 4.4 * place + 2.2, 23.5, f"{4 * place} to {4 * place + 3}", 6, "center")
        for line in range(4):
            note(axes, x - 0.6, 19.8 - 4.4 * line, str(line), 7, "right")
        note(axes, x + 19, 23.5, "banks", 7)
    note(axes, 4, 1.8, "chunk 2 of the 4 lines: banks 8 to 11,\n4 cycles", 8)
    note(axes, 40, 1.8, "chunk 2 of the 4 lines: all 16 banks,\n1 cycle", 8)


def stages():
    """Which stage is being copied and which is multiplied, step by step."""
    axes = blank(7.2, 3.0, 72, 30)
    width = 10.4
    for stage in range(3):
        note(axes, 1, 22 - 7 * stage, f"stage {stage}", 9)
    for tile in range(5):
        y, begin, end = 20 - 7 * (tile % 3), 18 + width * max(tile - 2, -0.75), 18 + width * tile
        if begin < end:
            box(axes, begin, y, end - begin, 4, "", 0.93)
            note(axes, begin + 0.9, y + 2, f"copy {tile}", 8)
        box(axes, end, y, width, 4, "", 0.7)
        note(axes, end + 0.9, y + 2, f"multiply {tile}", 8)
    for step in range(5):
        axes.plot([18 + width * step] * 2, [4, 26], color="black", linewidth=2.5)
        note(axes, 18 + width * step, 28, f"step {step}", 8)
    arrow(axes, (8, 2.8), (70, 2.8))
    note(axes, 1, 2.8, "time", 8)
    note(axes, 70, 1, "thick lines: wait for the own copies of this step, then the barrier", 8, "right")


draw_all("lab10", (fragments, swizzle, stages))
