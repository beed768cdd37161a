#!/usr/bin/env python3
"""Draws what run folders tell, each plot as PNG and SVG.

    labs/tools/plot.py runs/first     a folder of run folders, or one run folder; into runs/first/plots

study      time and accuracy by device and batch: means, with 95 % intervals (time) and sd (accuracy)
workers    images a second by --workers, for runs that differ in that
scaling    speed-up by number of devices, strong and weak, beside the ideal line
loss       training loss by epoch (averages over some steps), and the test loss as single marks
roofline   layers of the network below the roofs of the machine, where a run folder has a layers.csv
confusion  which class was taken for which, in the run with the best accuracy
filters    the first layer's filters, where a run has written model.safetensors (--save-model)

Each plot is drawn where runs have what it takes; the others are named, with the reason. Runs that cannot
be compared are not put into one plot. Everything can be told apart in black and white. Emulated runs are
named so: their times mean nothing. Needs matplotlib: pip install -r labs/requirements.txt, or on Debian
apt-get install python3-matplotlib.
"""
import argparse
import csv
import json
import os
import struct
import sys

from run_folders import check_comparable, fail, make_rows, read_runs, scaling_rows, summary

try:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np
except ImportError as missing:
    fail(sys.executable, "matplotlib", missing, "pip install -r labs/requirements.txt, or on Debian: apt-get install "
         "python3-matplotlib and /usr/bin/python3 labs/tools/plot.py DIR")

ORDER = ["cpu", "single", "multi"]
HATCHES, GREYS = ["", "////", "....", "xxxx", "--", "++"], ["0.65", "0.85", "1.0", "0.9", "0.75", "1.0"]


class Skip(Exception):
    """A plot cannot be drawn, and why."""


def line_style(i):
    """The look of line number i: marker, dashes and grey all tell it apart."""
    return dict(marker="os^Dv*xP"[i % 8], color="0.45" if i % 2 else "black", linewidth=1.5,
                linestyle=["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1))][i % 5])


def describe(runs):
    """What all runs have in common, for the title."""
    epochs = runs[0].epochs
    models = dict.fromkeys(r.model for r in runs)
    machines = dict.fromkeys(r.machine["cpu"] if r.kind == "cpu" else r.machine["device"].split(", sm_")[0] for r in runs)
    return (f"{', '.join(models)}; {runs[0].settings['dataset']}, {epochs[0]['images']} images, epochs: {len(epochs)}\n"
            f"{', '.join(machines)}; commit {runs[0].build['commit']}")


def label(row):
    words = row["device"] + (f", {row['gpus']} GPUs, {row['parallel']}" if row["gpus"] > 1 else "")
    return words + " (EMULATED)" * row["emulated"]


def by(rows, key):
    groups = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def read_csv(path, columns):
    """Those columns of the rows that have them all; the numbers as such."""
    try:
        with open(path, newline="") as f:
            rows = [[row[c] for c in columns] for row in csv.DictReader(f)]
        return [[v if c in ("layer", "kind") else float(v) for c, v in zip(columns, row)] for row in rows if all(row)]
    except (OSError, KeyError, ValueError) as error:
        raise Skip(f"{path}: expected the columns {', '.join(columns)}, found {error!r}; write it anew with ./cnn") from None


def draw_study(runs):
    check_comparable(runs)
    if len({r.model for r in runs}) > 1:
        raise Skip("several models; give each a folder of its own")
    rows = sorted(make_rows(runs), key=lambda r: ORDER.index(r["device"]) if r["device"] in ORDER else 9)
    batches, devices = sorted({r["global_batch"] for r in rows}), by(rows, label)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5))
    width = 0.8 / len(devices)
    for i, (device, group) in enumerate(devices.items()):
        x = [batches.index(r["global_batch"]) + (i - (len(devices) - 1) / 2) * width for r in group]
        for axis, height, error in (axes[0], "seconds_mean", "ci95"), (axes[1], "accuracy_mean", "accuracy_sd"):
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
        raise Skip("all runs have the same --workers; train with --workers 1, 2, ..., each with an --out of its own")
    check_comparable(runs, {"workers"})
    figure, axis = plt.subplots(figsize=(7, 4.5))
    lines = by(runs, lambda r: f"{label(make_rows([r])[0])}, global batch {r.global_batch}")
    for i, (name, group) in enumerate(lines.items()):
        points = sorted(by(group, lambda r: r.settings["workers"]).items())
        speeds = [summary([r.images / max(r.seconds, 1e-9) for r in several]) for _, several in points]
        axis.errorbar([workers for workers, _ in points], [mean for mean, _, _ in speeds],
                      [ci95 or 0 for _, _, ci95 in speeds], capsize=3, label=name, **line_style(i))
    axis.set(xlabel="--workers: threads that load images", ylabel="images a second, mean and 95 % interval",
             xticks=sorted({r.settings["workers"] for r in runs}), ylim=(0, None))
    axis.legend()
    return figure


def draw_scaling(runs):
    rows = scaling_rows(make_rows(runs))
    if not any(r["devices"] > 1 for r in rows):
        raise Skip("no runs on one and on several devices of a kind; make study-scaling makes them")
    check_comparable(runs, {"threads"})
    rows = [r for r in rows if not r["emulated"]]
    if all(r["devices"] == 1 for r in rows):
        raise Skip("emulated devices: their times mean nothing")
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharex=True, sharey=True)
    counts = sorted({r["devices"] for r in rows})
    for axis, scaling in zip(axes, ("strong", "weak")):
        lines = by([r for r in rows if r["scaling"] == scaling],
                   lambda r: f"{r['model']}, {r['device']}, " + (f"--global-batch {r['global_batch']}" if scaling == "strong"
                                                                 else f"--batch-size {r['batch']} each"))
        for i, (name, group) in enumerate(lines.items()):
            if len(group) > 1:
                error = [r["speedup"] * (r["ci95"] or 0) / max(r["seconds_mean"], 1e-9) for r in group]
                axis.errorbar([r["devices"] for r in group], [r["speedup"] for r in group], error, capsize=3, label=name,
                              **line_style(i))
        axis.plot(counts, counts, color="0.5", linestyle=":", linewidth=2.5, label="ideal")
        axis.set(xlabel="devices", title=f"{scaling.capitalize()} scaling", xticks=counts, ylim=(0, None))
        axis.legend(loc="upper left")
    axes[0].set_ylabel("speed-up over one device, 95 % interval")
    return figure


def training_loss(run):
    """[epochs done, loss]: means over the images of all ranks and, in long runs, over some steps."""
    path = os.path.join(run.folder, "steps.csv")
    steps = by(read_csv(path, ["epoch", "step", "images", "loss"]), lambda row: (row[0], row[1]))
    if not steps:
        raise Skip(f"{path} has no step with a loss")
    last = max(step for _, step in steps)
    points = [(epoch - 1 + step / last, np.average([r[3] for r in ranks], weights=[r[2] for r in ranks]))
              for (epoch, step), ranks in sorted(steps.items())]
    window = max(1, len(points) // 40)
    return np.array([np.mean(points[k:k + window], axis=0) for k in range(0, len(points), window)])


def draw_loss(runs):
    panels = by(make_rows(runs), lambda r: f"{r['model']}, {label(r)}")
    figure, axes = plt.subplots(1, len(panels), figsize=(2 + 4.5 * len(panels), 4.5), squeeze=False, sharey=True)
    for axis, (name, rows) in zip(axes[0], panels.items()):
        for i, row in enumerate(rows):
            run, style = row["runs"][0], line_style(i)
            points = training_loss(run)
            axis.plot(points[:, 0], points[:, 1], markevery=(i % 5, 8), markersize=5, label=f"batch {row['global_batch']}",
                      **style)
            style.update(linestyle="", markerfacecolor="none", markersize=10)
            axis.plot([e["epoch"] for e in run.epochs], [e["test_loss"] for e in run.epochs], **style)
        axis.set(xlabel="epoch", title=name)
        axis.legend(title="lines: training\nlarge, hollow: test", loc="upper right")
    axes[0][0].set_ylabel("loss, first repeat")
    return figure


def draw_roofline(runs):
    found = [r for r in runs if os.path.exists(os.path.join(r.folder, "layers.csv"))]
    if not found:
        raise Skip("no run folder has a layers.csv")
    run = found[0]
    layers = [r for r in read_csv(os.path.join(run.folder, "layers.csv"), ["layer", "kind", "gflops", "gb_per_s"])
              if r[2] > 0 and r[3] > 0]
    if not layers:
        raise Skip(f"{run.folder}/layers.csv has no layer with gflops and gb_per_s")
    peak, source = max((r[2], "the fastest layer") for r in layers)
    if run.kind == "cpu":
        peak, source = run.machine["peak_gflops"], "the peak in run.json"
    bandwidth, where = max(r[3] for r in layers), [r[2] / r[3] for r in layers]
    figure, axis = plt.subplots(figsize=(8, 5))
    x = np.geomspace(min(where) / 3, 3 * max(max(where), peak / bandwidth), 100)
    axis.plot(x, x * bandwidth, color="black", linestyle="--", label=f"{bandwidth:.3g} GB/s, the most of any layer")
    axis.plot(x, 0 * x + peak, color="black", label=f"{peak:.3g} GFLOP/s, {source}")
    for i, (kind, group) in enumerate(by(layers, lambda r: r[1]).items()):
        axis.plot([r[2] / r[3] for r in group], [r[2] for r in group], markersize=8, label=kind,
                  **dict(line_style(i), linestyle="", color="black", markerfacecolor="white" if i % 2 else "0.4"))
        for name, _, gflops, gb in group:
            axis.annotate(name, (gflops / gb, gflops), xytext=(7, -10), textcoords="offset points", fontsize=8)
    axis.set(xscale="log", yscale="log", xlabel="FLOP a byte", ylabel="GFLOP/s", ylim=(None, 3 * peak),
             title=run.folder + " (EMULATED)" * run.emulated)
    axis.legend(loc="lower right")
    return figure


def draw_confusion(runs):
    found = [r for r in runs if r.confusion]
    if not found:
        raise Skip("no run.json has a confusion matrix")
    run = max(found, key=lambda r: r.accuracy)
    counts, names = np.array(run.confusion, float), list(run.per_class)
    share = 100 * counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    figure, axis = plt.subplots(figsize=(7.5, 7))
    figure.colorbar(axis.imshow(share, cmap="Greys", vmin=0, vmax=100), label="% of the class's images", shrink=0.8)
    if len(names) <= 20:
        for i, j in np.ndindex(*share.shape):
            axis.text(j, i, f"{share[i, j]:.0f}", ha="center", va="center", color="white" if share[i, j] > 50 else "black")
        axis.set_xticks(range(len(names)), names, rotation=45)
        axis.set_yticks(range(len(names)), names)
    axis.set(xlabel="taken for", ylabel="class", title=f"{run.folder}\n{run.accuracy:.2f} % right")
    return figure


def first_filters(path):
    """The first tensor with 4 dimensions. The file: 8 bytes of length, that much JSON, the numbers."""
    with open(path, "rb") as f:
        length, = struct.unpack("<Q", f.read(8))
        header = json.loads(f.read(length))
        numbers = f.read()
    header.pop("__metadata__", None)
    tensors = [(t["data_offsets"], name, t["shape"]) for name, t in header.items()
               if len(t["shape"]) == 4 and t["dtype"] == "F32"]
    (begin, end), name, shape = min(tensors)  # ValueError: there is none
    return name, np.frombuffer(numbers[begin:end], "<f4").reshape(shape)


def draw_filters(runs):
    paths = [os.path.join(r.folder, "model.safetensors") for r in sorted(runs, key=lambda r: -r.accuracy)]
    path = next(filter(os.path.exists, paths), None)
    if not path:
        raise Skip("no run folder has a model.safetensors; --save-model writes it")
    try:
        name, filters = first_filters(path)
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise Skip(f"{path}: expected filters in a safetensors file, found {error!r}; write it anew") from None
    count, channels, height, width = filters.shape
    columns, most = min(count, 16), np.abs(filters).max()
    rows = -(-count // columns)
    figure, axis = plt.subplots(figsize=(3 + 0.5 * columns, 1.5 + 0.5 * rows * channels), layout="constrained")
    for k, c in np.ndindex(count, channels):  # the channels of a filter lie below each other
        x, y = k % columns * 1.2, -1.05 * (c + k // columns * (channels + 0.4))
        picture = axis.imshow(filters[k, c], cmap="Greys_r", vmin=-most, vmax=most, extent=(x, x + 1, y, y + 1))
        axis.add_patch(plt.Rectangle((x, y), 1, 1, fill=False, linewidth=0.6))
    axis.set(xlim=(-0.1, columns * 1.2), ylim=(y - 0.1, 1.1))
    axis.axis("off")
    axis.set_title(f"{name}: {count} filters of {height} x {width}" + "\nred, green, blue from top" * (channels == 3)
                   + f"\n{os.path.dirname(path)}", fontsize=9)
    figure.colorbar(picture, label="weight")
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", help="what ./cnn --out or make study has written")
    folder = parser.parse_args().folder
    runs = read_runs(folder)
    out, drawn = os.path.join(folder, "plots"), 0
    try:
        os.makedirs(out, exist_ok=True)
        for draw in draw_study, draw_workers, draw_scaling, draw_loss, draw_roofline, draw_confusion, draw_filters:
            name = draw.__name__.removeprefix("draw_")
            try:
                figure = draw(runs)
            except (Skip, SystemExit) as why:  # SystemExit: runs that cannot be compared
                print(f"skip {name}: {why}")
                continue
            if draw in (draw_study, draw_workers, draw_scaling, draw_loss):
                figure.suptitle(describe(runs), fontsize=9, y=1.02)
            for kind in "png", "svg":
                figure.savefig(os.path.join(out, f"{name}.{kind}"), dpi=130, bbox_inches="tight")
            plt.close(figure)
            drawn += 1
            print(f"drawn: {out}/{name}.png and .svg")
    except OSError as error:
        fail(error.filename or out, "a file that can be written", error.strerror, "mend the folder's permissions")
    sys.exit(0 if drawn else 1)


if __name__ == "__main__":
    main()
