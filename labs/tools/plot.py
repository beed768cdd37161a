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
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter
except ImportError as missing:
    fail(sys.executable, "matplotlib", missing, "pip install -r labs/requirements.txt, or on Debian: apt-get install "
         "python3-matplotlib and /usr/bin/python3 labs/tools/plot.py DIR")

MARKERS, LINES = "os^Dv*xP", ["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1))]
HATCHES, GREYS = ["", "////", "....", "xxxx", "--", "++"], ["0.35", "0.8", "1.0", "0.9", "0.6", "1.0"]
ORDER = ["cpu", "single", "multi"]


class Skip(Exception):
    """A plot cannot be drawn, and why."""


def about(runs):
    """What all runs have in common, for the title."""
    run, machines = runs[0], list(dict.fromkeys(
        r.machine["cpu"] if r.kind == "cpu" else "emulated GPU" if r.emulated else r.machine["device"] for r in runs))
    epochs = len(run.epochs)
    return (f"{', '.join(dict.fromkeys(r.model for r in runs))}; {run.settings['dataset']}, {run.epochs[0]['images']} "
            f"images, {epochs} epoch{'s' * (epochs != 1)}\n{', '.join(machines)}; commit {run.build['commit']}")


def named(row):
    words = row["device"] + (f", {row['gpus']} GPUs, {row['parallel']}" if row["gpus"] > 1 else "")
    return words + (" (EMULATED)" if row["emulated"] else "")


def by(rows, key):
    groups = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def draw_study(runs):
    check_comparable(runs)
    if len({r.model for r in runs}) > 1:
        raise Skip("several models: draw a folder for each")
    rows = sorted(make_rows(runs), key=lambda r: ORDER.index(r["device"]) if r["device"] in ORDER else 9)
    batches, devices = sorted({r["global_batch"] for r in rows}), by(rows, named)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5))
    width = 0.8 / len(devices)
    for i, (device, group) in enumerate(devices.items()):
        x = [batches.index(r["global_batch"]) + (i - (len(devices) - 1) / 2) * width for r in group]
        for axis, height, error in (axes[0], "seconds_mean", "ci95"), (axes[1], "accuracy_mean", "accuracy_sd"):
            axis.bar(x, [r[height] for r in group], width, yerr=[r[error] or 0 for r in group], capsize=3,
                     color=GREYS[i % 6], hatch=HATCHES[i % 6], edgecolor="black", label=device)
    times = [r["seconds_mean"] for r in rows]
    if min(times) > 0 and max(times) > 20 * min(times):
        axes[0].set_yscale("log")
    repeats = " to ".join(map(str, sorted({min(r["repeats"] for r in rows), max(r["repeats"] for r in rows)})))
    axes[0].set(ylabel="training time in s, with 95 % interval", title=f"Time (repeats: {repeats})")
    axes[1].set(ylabel="test accuracy in %, with sd", title="Accuracy")
    axes[0].set_ylim(bottom=None if axes[0].get_yscale() == "log" else 0)
    axes[1].set_ylim(bottom=0)
    for axis in axes:
        axis.set_xticks(range(len(batches)), batches)
        axis.set_xlabel("images of a step on all devices (global batch)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncol=3, handleheight=1.5)
    figure.subplots_adjust(bottom=0.22, top=0.8)
    return figure


def draw_workers(runs):
    if len({r.settings["workers"] for r in runs}) < 2:
        raise Skip("all runs have the same --workers; train with --workers 1, 2, ..., each with its own --out")
    check_comparable(runs, {"workers"})
    figure, axis = plt.subplots(figsize=(7, 4.5))
    lines = by(runs, lambda r: f"{named(make_rows([r])[0])}, global batch {r.global_batch}")
    for i, (label, group) in enumerate(lines.items()):
        points = []
        for workers, several in sorted(by(group, lambda r: r.settings["workers"]).items()):
            mean, _, ci95 = summary([r.images / max(r.seconds, 1e-9) for r in several])
            points.append((workers, mean, ci95 or 0))
        x, y, error = zip(*points)
        axis.errorbar(x, y, error, color="black", linestyle=LINES[i % 5], marker=MARKERS[i % 8], capsize=3, label=label,
                      markerfacecolor="white" if i % 2 else "black")
    axis.set(xlabel="--workers: threads that load images", ylabel="images a second, with 95 % interval",
             xticks=sorted({r.settings["workers"] for r in runs}), ylim=(0, None))
    axis.legend()
    return figure


def draw_scaling(runs):
    rows = scaling_rows(make_rows(runs))
    if not any(r["devices"] > 1 for r in rows):
        raise Skip("no runs on 1 and on several devices of a kind; make study-scaling makes them")
    check_comparable(runs, {"threads"})
    rows = [r for r in rows if not r["emulated"]]
    kinds = [kind for kind in ("strong", "weak") if any(r["scaling"] == kind and r["devices"] > 1 for r in rows)]
    if not kinds:
        raise Skip("emulated devices: their times mean nothing")
    figure, axes = plt.subplots(1, len(kinds), figsize=(5.5 * len(kinds), 4.5), squeeze=False)
    for axis, kind in zip(axes[0], kinds):
        batch = "global_batch" if kind == "strong" else "batch"
        lines = by([r for r in rows if r["scaling"] == kind], lambda r: (r["model"], r["device"], r[batch]))
        for i, ((model, device, images), group) in enumerate(lines.items()):
            x, y = [r["devices"] for r in group], [r["speedup"] for r in group]
            error = [r["speedup"] * (r["ci95"] or 0) / r["seconds_mean"] if r["seconds_mean"] else 0 for r in group]
            axis.errorbar(x, y, error, color="black", linestyle=LINES[i % 5], marker=MARKERS[i % 8], capsize=3,
                          label=f"{model}, {device}, " + (f"--global-batch {images}" if kind == "strong" else
                                                         f"--batch-size {images} each"))
        counts = sorted({r["devices"] for r in rows})
        axis.plot(counts, counts, color="0.5", linestyle=":", linewidth=2, label="ideal")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        for one in axis.xaxis, axis.yaxis:
            one.set_major_locator(FixedLocator(counts))
            one.set_minor_locator(NullLocator())
            one.set_major_formatter(ScalarFormatter())
        axis.set(xlabel="devices", ylabel="speed-up over 1 device, with its time's 95 % interval",
                 title=f"{kind.capitalize()} scaling")
        axis.legend()
    return figure


def read_losses(run):
    """Mean loss of each step over its images on all ranks: (epochs done, loss)."""
    steps = {}
    path = os.path.join(run.folder, "steps.csv")
    try:
        with open(path, newline="") as f:
            for row in csv.DictReader(f):
                if row["loss"]:
                    total = steps.setdefault((int(row["epoch"]), int(row["step"])), [0, 0])
                    total[0] += float(row["images"]) * float(row["loss"])
                    total[1] += float(row["images"])
    except OSError as error:
        raise Skip(f"{path}: {error.strerror}")
    except (KeyError, ValueError, TypeError) as error:
        raise Skip(f"{path}: not as ./cnn writes it ({error})")
    iterations = max((step for _, step in steps), default=1)
    return [(epoch - 1 + step / iterations, loss / images) for (epoch, step), (loss, images) in sorted(steps.items())]


def draw_loss(runs):
    rows = by([row for row in make_rows(runs)], lambda r: (r["model"], named(r)))
    figure, axes = plt.subplots(1, len(rows), figsize=(max(6, 4.5 * len(rows)), 4.5), squeeze=False, sharey=True)
    for axis, ((model, device), group) in zip(axes[0], rows.items()):
        for i, row in enumerate(group):
            run, style = row["runs"][0], dict(color="0.45" if i % 2 else "black", marker=MARKERS[i % 8])
            points = read_losses(run)
            window = max(1, len(points) // 40)
            means = np.array([np.mean(points[k:k + window], axis=0) for k in range(0, len(points), window)])
            axis.plot(means[:, 0], means[:, 1], linestyle=LINES[i % 5], markevery=(i % 5, 8), markersize=5,
                      label=f"batch {row['global_batch']}", **style)
            axis.plot([e["epoch"] for e in run.epochs], [e["test_loss"] for e in run.epochs], linestyle="",
                      markerfacecolor="white", markersize=9, **style)
        axis.set(xlabel="epoch", title=f"{model}, {device}")
        axis.legend(title="lines: training\nlarge, white: test")
    axes[0][0].set_ylabel("loss (the first repeat)")
    return figure


def draw_roofline(runs):
    for run in runs:
        path = os.path.join(run.folder, "layers.csv")
        if os.path.exists(path):
            break
    else:
        raise Skip("no run folder has a layers.csv")
    try:
        with open(path, newline="") as f:
            layers = [(r["layer"], r["kind"], float(r["gflops"]), float(r["gb_per_s"])) for r in csv.DictReader(f)
                      if r["gflops"] and r["gb_per_s"] and float(r["gflops"]) > 0 and float(r["gb_per_s"]) > 0]
    except (KeyError, ValueError, TypeError) as error:
        raise Skip(f"{path}: expected the columns layer, kind, gflops, gb_per_s with numbers, found {error}")
    if not layers:
        raise Skip(f"{path} has no layer with gflops and gb_per_s")
    figure, axis = plt.subplots(figsize=(8, 5))
    fastest, peak = max(r[3] for r in layers), run.machine["peak_gflops"] if run.kind == "cpu" else 0
    peak = max([peak] + [r[2] for r in layers])
    where = [gflops / gb for _, _, gflops, gb in layers]
    x = np.geomspace(min(where) / 3, max(max(where), peak / fastest) * 3, 100)
    axis.plot(x, np.minimum(peak, x * fastest), color="black")
    axis.annotate(f"{peak:.0f} GFLOP/s: " + ("peak in run.json" if run.kind == "cpu" else "the fastest layer"),
                  (x[-1], peak), ha="right", va="bottom")
    axis.annotate(f"{fastest:.1f} GB/s: the most that a layer reached", (x[8], x[8] * fastest), rotation=35, va="bottom")
    for i, (kind, group) in enumerate(by(layers, lambda r: r[1]).items()):
        axis.plot([r[2] / r[3] for r in group], [r[2] for r in group], color="black", linestyle="",
                  marker=MARKERS[i % 8], markerfacecolor="white" if i % 2 else "0.4", label=kind)
        for layer, _, gflops, gb in group:
            axis.annotate(layer, (gflops / gb, gflops), xytext=(6, -9), textcoords="offset points", fontsize=8)
    axis.set(xscale="log", yscale="log", xlabel="FLOP a byte", ylabel="GFLOP/s", title=run.folder)
    axis.legend(loc="lower right")
    return figure


def draw_confusion(runs):
    runs = [r for r in runs if r.confusion]
    if not runs:
        raise Skip("no run.json has a confusion matrix")
    run = max(runs, key=lambda r: r.accuracy)
    counts, names = np.array(run.confusion, float), list(run.per_class)
    share = 100 * counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    figure, axis = plt.subplots(figsize=(7.5, 7))
    figure.colorbar(axis.imshow(share, cmap="Greys", vmin=0, vmax=100), label="% of the class's images", shrink=0.8)
    if len(names) <= 20:
        for i, j in np.ndindex(*share.shape):
            axis.text(j, i, f"{share[i, j]:.0f}", ha="center", va="center", color="white" if share[i, j] > 50 else "black")
        axis.set_xticks(range(len(names)), names, rotation=45)
        axis.set_yticks(range(len(names)), names)
    axis.set(xlabel="taken for", ylabel="class", title=f"{run.folder}: {run.accuracy:.2f} % right"
             + " (EMULATED)" * run.emulated)
    return figure


def first_filters(path):
    """Name and values of the first tensor with 4 dimensions: 8 bytes of length, a JSON header, the numbers."""
    with open(path, "rb") as f:
        length, = struct.unpack("<Q", f.read(8))
        header = json.loads(f.read(length))
        header.pop("__metadata__", None)
        for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if len(tensor["shape"]) == 4 and tensor["dtype"] == "F32":
                begin, end = tensor["data_offsets"]
                f.seek(8 + length + begin)
                return name, np.frombuffer(f.read(end - begin), "<f4").reshape(tensor["shape"])
    raise Skip(f"{path} has no 32-bit tensor with 4 dimensions, as filters have")


def draw_filters(runs):
    runs = [r for r in runs if os.path.exists(os.path.join(r.folder, "model.safetensors"))]
    if not runs:
        raise Skip("no run folder has a model.safetensors; --save-model writes it")
    path = os.path.join(max(runs, key=lambda r: r.accuracy).folder, "model.safetensors")
    try:
        name, filters = first_filters(path)
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise Skip(f"{path}: expected a safetensors file, found {error}")
    count, channels, height, width = filters.shape
    columns = min(count, 16)
    rows = -(-count // columns)
    picture = np.full((rows * (channels * height + 2) - 2, columns * (width + 1) - 1), np.nan)
    for k in range(count):  # the channels of a filter lie below each other
        y, x = k // columns * (channels * height + 2), k % columns * (width + 1)
        picture[y:y + channels * height, x:x + width] = filters[k].reshape(channels * height, width)
    figure, axis = plt.subplots(figsize=(max(5, 0.6 * columns + 2), max(3, 0.6 * rows * channels + 1.5)))
    most = np.abs(filters).max()
    figure.colorbar(axis.imshow(picture, cmap="Greys_r", vmin=-most, vmax=most), label="weight")
    axis.set(xticks=[], yticks=[], facecolor="white", title=f"{name}: {count} filters of {height} x {width}"
             + (", from top: red, green, blue" if channels == 3 else "") + f"\n{os.path.dirname(path)}")
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", help="what ./cnn --out or make study has written")
    folder = parser.parse_args().folder
    runs = read_runs(folder)
    out, drawn = os.path.join(folder, "plots"), 0
    os.makedirs(out, exist_ok=True)
    for draw in draw_study, draw_workers, draw_scaling, draw_loss, draw_roofline, draw_confusion, draw_filters:
        name = draw.__name__.removeprefix("draw_")
        try:
            figure = draw(runs)
        except (Skip, SystemExit) as why:  # SystemExit: runs that cannot be compared
            print(f"skip {name}: {why}")
            continue
        if name in ("study", "workers", "scaling", "loss"):
            figure.suptitle(about(runs), fontsize=9)
        for kind in "png", "svg":
            figure.savefig(os.path.join(out, f"{name}.{kind}"), dpi=130, bbox_inches="tight")
        plt.close(figure)
        drawn += 1
        print(f"drawn: {out}/{name}.png and .svg")
    sys.exit(0 if drawn else 1)


if __name__ == "__main__":
    main()
