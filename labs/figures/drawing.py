"""What the scripts of the labs' figures share: a page without axes, boxes, and how the figures are saved.

Black and white, 100 dots per inch. Needs matplotlib: pip install -r labs/requirements.txt
"""
import os
import sys

os.environ["MPLBACKEND"] = "Agg"  # into files; in a terminal of Jupyter its value is one that only Jupyter has
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle


def blank(width, height, right, top):
    """An empty page of that size in inches; coordinates from 0 to right and to top."""
    figure, axes = plt.subplots(figsize=(width, height))
    axes.set_xlim(0, right)
    axes.set_ylim(0, top)
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    return axes


def box(axes, x, y, width, height, text="", gray=1.0, size=9, hatch=None):
    """A rectangle with a text in its middle; gray from 0, black, to 1, white."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor=str(gray), edgecolor="black", linewidth=0.8, hatch=hatch))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size,
              color="white" if gray < 0.4 else "black")


def note(axes, x, y, text, size=8, ha="left", **options):
    axes.text(x, y, text, ha=ha, va="center", fontsize=size, **options)


def arrow(axes, begin, end):
    axes.annotate("", end, begin, arrowprops={"arrowstyle": "->"})


def grid(axes, x, y, numbers, cell=3, gray=lambda row, column: 1.0, size=8):
    """A table of numbers (or texts), its upper left corner at (x, y)."""
    for row, line in enumerate(numbers):
        for column, number in enumerate(line):
            box(axes, x + cell * column, y - cell * (row + 1), cell, cell, str(number), gray(row, column), size)


def draw_all(prefix, figures):
    """Saves each figure, a function, as PREFIX_NAME.png in the folder argv[1] (default: this one)."""
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
    os.makedirs(folder, exist_ok=True)
    for figure in figures:
        figure()
        path = os.path.join(folder, f"{prefix}_{figure.__name__}.png")
        plt.savefig(path, dpi=100, metadata={"Software": None})
        plt.close()
        print("drawn:", path)
