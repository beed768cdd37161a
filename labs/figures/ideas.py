#!/usr/bin/env python3
"""Draws the figures of labs/ideas.md again, in the project's folder: labs/figures/ideas.py [DIR]

relu      max(x, 0)
gradient  steps against the slope of a curve, with a small and with a large learning rate

Into DIR (default: labs/figures) as ideas_NAME.png. Needs matplotlib: pip install -r labs/requirements.txt
"""
import numpy as np
from drawing import draw_all, plt


def relu():
    figure, axes = plt.subplots(figsize=(3.6, 2.2))
    axes.plot([-2, 0, 2], [0, 0, 2], "k-", linewidth=2)
    axes.set(xlabel="x", ylabel="max(x, 0)", xticks=(-2, -1, 0, 1, 2), yticks=(0, 1, 2))
    axes.grid(color="0.85")
    figure.tight_layout()


def gradient():
    figure, panels = plt.subplots(1, 2, figsize=(7, 2.6), sharey=True)
    x = np.linspace(-1.6, 3.6, 200)
    for axes, rate, title in zip(panels, (0.2, 1.05), ("learning rate 0.2", "learning rate 1.05: too large")):
        axes.plot(x, (x - 1) ** 2, color="0.6")
        weights = [-0.5]
        for _ in range(5):
            weights.append(weights[-1] - rate * 2 * (weights[-1] - 1))
        axes.plot(weights, [(w - 1) ** 2 for w in weights], "ko--", markersize=5, linewidth=0.8)
        axes.annotate("start", (weights[0], (weights[0] - 1) ** 2), (-30, -3), textcoords="offset points", fontsize=8)
        axes.set(xlabel="weight", title=title)
        axes.title.set_fontsize(10)
    panels[0].set_ylabel("loss")
    figure.tight_layout()


draw_all("ideas", (relu, gradient))
