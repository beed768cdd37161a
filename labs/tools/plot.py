#!/usr/bin/env python3
"""Draws what run folders tell, each plot as PNG and SVG.

    labs/tools/plot.py runs/first     a folder of run folders, or one run folder; into runs/first/plots

study      time and accuracy by device and batch: means, with 95 % intervals (time) and sd (accuracy)
workers    images a second by --workers, for runs that differ in that
scaling    speed-up by number of devices, strong and weak, beside the ideal line
loss       training loss by epoch (averages over some steps), and the test loss as single marks
roofline   layers below the roofs of the machine, where a run folder has a layers.csv (--layers); without
           those that only move data, and Winograd's and skipped products may take others above the roof
confusion  which class was taken for which, in the run with the best accuracy
filters    the first layer's filters, where a run has written model.safetensors (--save-model)

Each plot is drawn where runs have what it takes; the others are named, with the reason. Runs that cannot
be compared are not put into one plot. Everything can be told apart in black and white. Emulated runs are
named so: their times mean nothing. Needs matplotlib: pip install -r labs/requirements.txt, or on Debian
apt-get install python3-matplotlib.
"""
import os
import sys

from run_folders import (Missing, by, check_comparable, fail, make_rows, read_csv, read_filters, read_losses,
                         read_runs, scaling_rows, start, workers_rows)

try:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np
except ImportError as missing:
    fail(sys.executable, "matplotlib", missing, "pip install -r labs/requirements.txt, or on Debian: apt-get "
         "install python3-matplotlib, and call /usr/bin/python3 labs/tools/plot.py DIR")

ORDER = ["cpu", "single", "multi"]
HATCHES, GREYS = ["", "////", "....", "xxxx", "--", "++"], ["0.65", "0.85", "1.0", "0.9", "0.75", "1.0"]


def line_style(i):
    """The look of line number i: marker, dashes and grey all tell it apart."""
    return dict(marker="os^Dv*xP"[i % 8], color="0.45" if i % 2 else "black", linewidth=1.5,
                linestyle=["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1))][i % 5])


def describe(runs):
    """What all runs have in common, for the title."""
    epochs = runs[0].epochs
    models = dict.fromkeys(r.model for r in runs)
    names = (r.machine["cpu" if r.kind == "cpu" else "device"] for r in runs)
    machines = dict.fromkeys(name.split(", sm_")[0] for name in names)
    return (f"{', '.join(models)}; {runs[0].settings['dataset']}, {epochs[0]['images']} images, epochs: "
            f"{len(epochs)}\n{', '.join(machines)}; commit {runs[0].build['commit']}")


def draw_study(runs):
    check_comparable(runs)
    if len({r.model for r in runs}) > 1:
        raise Missing("several models; give each a folder of its own")
    rows = sorted(make_rows(runs), key=lambda r: ORDER.index(r["device"]) if r["device"] in ORDER else 9)
    batches, devices = sorted({r["global_batch"] for r in rows}), by(rows, lambda r: r["label"])
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5))
    width = 0.8 / len(devices)
    for i, (device, group) in enumerate(devices.items()):
        x = [batches.index(r["global_batch"]) + (i - (len(devices) - 1) / 2) * width for r in group]
        for axis, height, error in zip(axes, ("seconds_mean", "accuracy_mean"), ("ci95", "accuracy_sd")):
            axis.bar(x, [r[height] for r in group], width, yerr=[r[error] or 0 for r in group], capsize=3,
                     color=GREYS[i % 6], hatch=HATCHES[i % 6], edgecolor="black", label=device)
    times = [r["seconds_mean"] for r in rows]
    if max(times) > 20 * min(times) > 0:
        axes[0].set_yscale("log")
    else:
        axes[0].set_ylim(bottom=0)
    axes[1].set_ylim(bottom=0)
    axes[0].set(ylabel="training time in s, mean and 95 % interval", title="Time")
    axes[1].set(ylabel="test accuracy in %, mean and sd", title="Accuracy")
    for axis in axes:
        axis.set_xticks(range(len(batches)), batches)
        axis.set_xlabel("images of a step, on all devices together")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncol=3, handleheight=1.5)
    figure.subplots_adjust(bottom=0.22, top=0.82)
    return figure


def draw_workers(runs):
    if len({r.settings["workers"] for r in runs}) < 2:
        raise Missing("all runs have the same --workers; make study-workers varies them")
    check_comparable(runs, {"workers"})
    figure, axis = plt.subplots(figsize=(7, 4.5))
    lines = by(workers_rows(runs), lambda row: f"{row['label']}, global batch {row['global_batch']}")
    for i, (name, group) in enumerate(lines.items()):
        axis.errorbar([row["workers"] for row in group], [row["img_per_s_mean"] for row in group],
                      [row["ci95"] or 0 for row in group], capsize=3, label=name, **line_style(i))
    axis.set(xlabel="--workers: threads that load images", ylabel="images a second, mean and 95 % interval",
             xticks=sorted({r.settings["workers"] for r in runs}), ylim=(0, None))
    axis.legend()
    return figure


def draw_scaling(runs):
    rows = scaling_rows(make_rows(runs))
    if not any(r["devices"] > 1 for r in rows):
        raise Missing("no runs on one and on several devices of a kind; make study-scaling makes them")
    check_comparable(runs, {"threads"})
    rows = [r for r in rows if not r["emulated"]]
    if all(r["devices"] == 1 for r in rows):
        raise Missing("emulated devices: their times mean nothing")
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharex=True, sharey=True)
    counts = sorted({r["devices"] for r in rows})
    for axis, scaling in zip(axes, ("strong", "weak")):
        batch = {"strong": ("--global-batch", "global_batch"), "weak": ("--batch-size", "batch")}[scaling]
        lines = by([r for r in rows if r["scaling"] == scaling],
                   lambda r: f"{r['model']}, {r['device']}, {batch[0]} {r[batch[1]]}")
        for i, (name, group) in enumerate(lines.items()):
            if len(group) > 1:
                error = [r["speedup"] * (r["ci95"] or 0) / max(r["seconds_mean"], 1e-9) for r in group]
                axis.errorbar([r["devices"] for r in group], [r["speedup"] for r in group], error, capsize=3,
                              label=name, **line_style(i))
        axis.plot(counts, counts, color="0.5", linestyle=":", linewidth=2.5, label="ideal")
        axis.set(xlabel="devices", title=f"{scaling.capitalize()} scaling", xticks=counts, ylim=(0, None))
        axis.legend(loc="upper left")
    axes[0].set_ylabel("speed-up over one device, 95 % interval")
    return figure


def draw_loss(runs):
    panels = by(make_rows(runs), lambda r: f"{r['model']}, {r['label']}")
    size = 2 + 4.5 * len(panels), 4.5
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, sharey=True)
    for axis, (name, rows) in zip(axes[0], panels.items()):
        for i, row in enumerate(rows):
            run, style = row["runs"][0], line_style(i)
            points = read_losses(run)
            window = max(1, len(points) // 25)
            means = np.array([np.mean(points[k:k + window], axis=0) for k in range(0, len(points), window)])
            axis.plot(means[:, 0], means[:, 1], markevery=(i % 5, 8), markersize=5,
                      label=f"batch {row['global_batch']}", **style)
            style.update(linestyle="", markerfacecolor="none", markersize=10)
            axis.plot([e["epoch"] for e in run.epochs], [e["test_loss"] for e in run.epochs], **style)
        axis.set(xlabel="epoch", title=name)
        axis.legend(title="lines: training\nlarge, hollow: test", loc="best")
    axes[0][0].set_ylabel("loss, first repeat")
    return figure


def draw_roofline(runs):
    found = [r for r in runs if os.path.exists(os.path.join(r.folder, "layers.csv"))]
    if not found:
        raise Missing("no run folder has a layers.csv")
    run = found[0]
    every = read_csv(run, "layers.csv", ["layer", "kind", "bound", "percent_of_peak", "gflops", "gb_per_s"])
    layers = [r for r in every if r[4] > 0 and r[5] > 0]
    if not layers:
        raise Missing(f"{run.folder}/layers.csv has no layer with gflops and gb_per_s")

    def roof(bound, column):
        """The limit of which percent_of_peak are per cent; the largest of them are the least rounded."""
        percent, speed = max([(r[3], r[column]) for r in every if r[2] == bound and r[3] > 0],
                             default=(100, max(r[column] for r in every)))
        return 100 * speed / percent
    peak, bandwidth, where = roof("compute", 4), roof("memory", 5), [r[4] / r[5] for r in layers]
    figure, axis = plt.subplots(figsize=(8, 5))
    x = np.geomspace(min(where) / 3, 3 * max(max(where), peak / bandwidth), 100)
    axis.plot(x, x * bandwidth, "k--", label=f"{bandwidth:.3g} GB/s")
    axis.plot(x, 0 * x + peak, "k-", label=f"{peak:.3g} GFLOP/s")
    for i, (kind, group) in enumerate(by(layers, lambda r: r[1].split()[0]).items()):
        look = dict(line_style(i), linestyle="", color="black", markerfacecolor="white" if i % 2 else "0.4")
        axis.plot([r[4] / r[5] for r in group], [r[4] for r in group], markersize=8, label=kind, **look)
    for number, (*_, gflops, gb) in enumerate(layers, 1):
        axis.annotate(str(number), (gflops / gb, gflops), (6, -9), textcoords="offset points", fontsize=8)
    axis.text(1.02, 1, "\n".join(f"{number}  {r[0]}" for number, r in enumerate(layers, 1)), va="top",
              fontsize=min(8, 280 / len(layers)), transform=axis.transAxes)
    axis.set(xscale="log", yscale="log", xlabel="FLOP a byte", ylabel="GFLOP/s", ylim=(None, 3 * peak),
             title=run.folder + " (EMULATED)" * run.emulated)
    axis.legend(loc="lower right")
    return figure


def draw_confusion(runs):
    found = [r for r in runs if r.confusion]
    if not found:
        raise Missing("no run.json has a confusion matrix")
    run = max(found, key=lambda r: r.accuracy)
    counts, names = np.array(run.confusion, float), list(run.per_class)
    share = 100 * counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    figure, axis = plt.subplots(figsize=(7.5, 7))
    picture = axis.imshow(share, cmap="Greys", vmin=0, vmax=100)
    figure.colorbar(picture, label="% of the class's images", shrink=0.8)
    if len(names) <= 20:
        for i, j in np.ndindex(*share.shape):
            axis.text(j, i, f"{share[i, j]:.0f}", ha="center", va="center",
                      color="white" if share[i, j] > 50 else "black")
        axis.set_xticks(range(len(names)), names, rotation=45)
        axis.set_yticks(range(len(names)), names)
    axis.set(xlabel="taken for", ylabel="class", title=f"{run.folder}\n{run.accuracy:.2f} % right")
    return figure


def draw_filters(runs):
    found = [r for r in runs if os.path.exists(os.path.join(r.folder, "model.safetensors"))]
    if not found:
        raise Missing("no run folder has a model.safetensors; --save-model writes it")
    run = max(found, key=lambda r: r.accuracy)
    name, shape, weights = read_filters(run)
    filters, (count, channels, height, width) = np.reshape(weights, shape), shape
    columns, most = min(count, 16), np.abs(filters).max()
    rows = -(-count // columns)
    figure, axis = plt.subplots(figsize=(3 + 0.5 * columns, 1.5 + 0.5 * rows * channels))
    for k, c in np.ndindex(count, channels):  # the channels of a filter lie below each other
        x, y = k % columns * 1.2, -1.05 * (c + k // columns * (channels + 0.4))
        picture = axis.imshow(filters[k, c], "Greys_r", vmin=-most, vmax=most, extent=(x, x + 1, y, y + 1))
        axis.add_patch(plt.Rectangle((x, y), 1, 1, fill=False, linewidth=0.6))
    axis.set(xlim=(-0.1, columns * 1.2), ylim=(y - 0.1, 1.1))
    axis.axis("off")
    colours = "red, green, blue from top\n" * (channels == 3)
    axis.set_title(f"{name}: {count} filters of {height} x {width}\n{colours}{run.folder}", fontsize=9)
    figure.colorbar(picture, label="weight")
    return figure


PLOTS = [draw_study, draw_workers, draw_scaling, draw_loss, draw_roofline, draw_confusion, draw_filters]


def main(folder):
    runs = read_runs(folder)
    out, drawn = os.path.join(folder, "plots"), 0
    try:
        os.makedirs(out, exist_ok=True)
        for draw in PLOTS:
            name = draw.__name__[len("draw_"):]
            try:
                figure = draw(runs)
            except (Missing, SystemExit) as why:  # SystemExit: runs that cannot be compared
                print(f"skip {name}: {why}")
                continue
            if draw in PLOTS[:4]:
                figure.suptitle(describe(runs), fontsize=9, y=1.02)
            for kind in "png", "svg":
                figure.savefig(os.path.join(out, f"{name}.{kind}"), dpi=130, bbox_inches="tight")
            plt.close(figure)
            drawn += 1
            print(f"drawn: {out}/{name}.png and .svg")
    except OSError as error:
        fail(error.filename or out, "a file that can be written", error.strerror, "mend its permissions")
    sys.exit(0 if drawn else 1)


if __name__ == "__main__":
    start(main, __doc__, "what ./cnn --out or make study has written")
