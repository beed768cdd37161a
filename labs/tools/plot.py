#!/usr/bin/env python3
"""Draws plots from run folders, each as PNG and SVG.

    labs/tools/plot.py runs/first               a folder of run folders; into runs/first/plots
    labs/tools/plot.py run                      one run folder; into run/plots
    labs/tools/plot.py labs/figures/bench.csv   a table of training speeds; into labs/figures/plots

study      time and accuracy by device and batch: means, with 95 % intervals (time) and sd (accuracy). Runs may differ
           in one more option, such as --lr: then it also groups by its value; so do loss and accuracy
workers    images per second by --workers, for runs that differ in that option
ablation   images per second and accuracy (mean and sd) of each rung, from the ablation.csv in the folder
bytes      what the kernels of each run of ./cnn-count read and wrote, and how many there were
scaling    speed-up by number of devices, strong and weak, with the ideal line, and what formulas with a step's time and
           its communication predict
loss       training loss by epoch (averages over some steps), and the test loss as single marks
accuracy   accuracy by epoch, of the training images (while the weights change) and of the test images
run        for a single run folder: its loss step by step, and its confusion matrix
timeline   the trace.json in a run folder: what host, device and loader do, in all of it and in one step
precision  by how much the losses of runs that differ in --precision deviate from those in fp32, step by step
roofline   the layers and the limits of the machine, if a run folder has a layers.csv (--layers). Filled marks count
           the operations that were executed, which never exceed the limits. Hollow marks count the operations
           in the layer's definition, where Winograd's algorithm or skipped zeros save some of them. Layers that
           only move data are left out
confusion  the confusion matrix of the run with the best accuracy
samples    test images that the run with the best accuracy predicted right and wrong, with their labels
augment    what --augment makes of some test images, if a run used it
filters    the first layer's filters, if a run has written model.safetensors (--save-model); also before training,
           if there is a run folder of an untrained network next to it: ./cnn --eval --save-model
bench      for a CSV file: images per second of ./cnn and of PyTorch, by network and number of threads

A plot is drawn if the runs have the data for it; otherwise the reason is printed. Runs that cannot be
compared are not drawn in one plot. All lines and bars are distinguishable in black and white. Emulated
runs are labeled, since their times mean nothing. Needs matplotlib: pip install -r labs/requirements.txt,
or on Debian apt-get install python3-matplotlib.
"""
import csv
import os
import sys

from run_folders import (Missing, ablation_beside, by, by_precision, by_value, bytes_rows, check_comparable, fail,
                         first_difference, make_rows, name_of_data, predicted_speedups, read_confusion, read_counts,
                         read_csv, read_filters, read_losses, read_predictions, read_runs, read_trace,
                         read_untrained, scaling_rows, start, varied, workers_rows)

os.environ["MPLBACKEND"] = "Agg"  # into files; in a terminal of Jupyter its value is one that only Jupyter has
try:
    import matplotlib.pyplot as plt
    import numpy as np
except ImportError as missing:
    if "--help" not in sys.argv and "-h" not in sys.argv:
        fail(sys.executable, "matplotlib", missing, "make plots RUNS=DIR finds the Python in .venv if it has that; "
             "otherwise pip install -r labs/requirements.txt, or on Debian: apt-get install python3-matplotlib")

ORDER = ["cpu", "single", "multi"]
HATCHES, GRAYS = ["", "////", "....", "xxxx", "--", "++"], ["0.65", "0.85", "1.0", "0.9", "0.75", "1.0"]


def line_style(i):
    """The style of line i, distinguished by marker, dashes and gray."""
    return dict(marker="os^Dv*xP"[i % 8], color="0.45" if i % 2 else "black", linewidth=1.5,
                linestyle=["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1))][i % 5])


def describe(runs):
    """What all runs have in common, for the title."""
    images = sorted({r.epochs[0]["images"] for r in runs})
    epochs = sorted({len(r.epochs) for r in runs})
    data = dict.fromkeys(map(name_of_data, runs))
    models = dict.fromkeys(r.model for r in runs)
    names = (r.machine["cpu" if r.kind == "cpu" else "device"] for r in runs)
    machines = dict.fromkeys(name.split(", sm_")[0] for name in names)
    return (f"{', '.join(models)}; {', '.join(data)}, {', '.join(map(str, images))} images, epochs: "
            f"{', '.join(map(str, epochs))}\n{', '.join(machines)}; commit {runs[0].build['commit']}")


def drawable(name):
    """A name that a user has chosen: a $ would begin a formula, and fonts have no bytes that are not UTF-8."""
    return os.fsencode(name).decode("utf-8", "replace").replace("$", r"\$")


def name_of(run):
    """For the title of a plot that shows one run: its folder, without those around it."""
    return drawable(os.path.basename(os.path.abspath(run.folder))) + " (EMULATED)" * run.emulated


def compare(runs, free=frozenset()):
    """As check_comparable(), but runs that a plot cannot compare are no error: the plot is not drawn."""
    different = first_difference(runs, free)
    if different:
        run, name, found, other, expected = different
        raise Missing(f"it is for runs with the same {name}; here {name} is {expected} in {other.folder} and "
                      f"{found} in {run.folder}")
    check_comparable(runs, free)


def rows_of_variants(runs, free=frozenset()):
    """The rows of make_rows(), which may differ in one more option: `variant` says in what, or is empty."""
    name = varied(runs)
    if not name:
        compare(runs, free)
        return [dict(row, variant="") for row in make_rows(runs)]
    compare(runs, free | {name})
    groups = by(runs, lambda r: r.settings[name])
    return [dict(row, variant=f", --{name} {drawable(str(value)) or 'none'}")
            for value, group in sorted(groups.items(), key=lambda item: by_value(item[0])) for row in make_rows(group)]


def as_numbers(values):
    """Nothing is drawn for those that are not known."""
    return [np.nan if value is None else value for value in values]


def draw_study(runs):
    if len({r.model for r in runs}) > 1:
        raise Missing("several models; give each a folder of its own")
    rows = sorted(rows_of_variants(runs), key=lambda r: ORDER.index(r["device"]) if r["device"] in ORDER else 9)
    batches, devices = sorted({r["global_batch"] for r in rows}), by(rows, lambda r: r["label"] + r["variant"])
    repeated = any(r["repeats"] > 1 for r in rows)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5))
    width = 0.8 / len(devices)
    for i, (device, group) in enumerate(devices.items()):
        x = [batches.index(r["global_batch"]) + (i - (len(devices) - 1) / 2) * width for r in group]
        for axis, height, error in zip(axes, ("seconds_mean", "accuracy_mean"), ("ci95", "accuracy_sd")):
            axis.bar(x, [r[height] for r in group], width, capsize=3,
                     yerr=as_numbers(r[error] for r in group) if repeated else None,
                     color=GRAYS[(i + i // 6) % 6],  # from the seventh bar on, a hatch comes with another gray
                     hatch=HATCHES[i % 6], edgecolor="black", label=device)
        trained = as_numbers(r["train_accuracy_mean"] for r in group)
        axes[1].plot(x, trained, "D", color="black", markerfacecolor="white")
    times = [r["seconds_mean"] for r in rows]
    if max(times) > 20 * min(times) > 0:
        axes[0].set_yscale("log")
    else:
        axes[0].set_ylim(bottom=0)
    axes[1].set_ylim(bottom=0)
    axes[0].set(ylabel="training time in s, " + ("mean and 95 % interval" if repeated else "one run"), title="Time")
    known = any(r["train_accuracy_mean"] is not None for r in rows)
    axes[1].set(ylabel="test accuracy in %, " + ("mean and sd" if repeated else "one run"),
                title="Accuracy" + known * "; diamonds: of the training images")
    for axis in axes:
        axis.set_xticks(range(len(batches)), batches)
        axis.set_xlabel("images per step, all devices together")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="upper center", ncol=3, handleheight=1.5,
                  bbox_to_anchor=(0.5, 0.1))
    figure.subplots_adjust(bottom=0.22, top=0.82)
    return figure


def draw_workers(runs):
    if len({r.settings["workers"] for r in runs}) < 2:
        raise Missing("all runs have the same --workers; make study-workers varies them")
    compare(runs, {"workers"})
    figure, axis = plt.subplots(figsize=(7, 4.5))
    lines = by(workers_rows(runs), lambda row: f"{row['model']}, {row['label']}, global batch {row['global_batch']}")
    for i, (name, group) in enumerate(lines.items()):
        axis.errorbar([row["workers"] for row in group], [row["img_per_s_mean"] for row in group],
                      as_numbers(row["ci95"] for row in group), capsize=3, label=name, **line_style(i))
    axis.set(xlabel="--workers: threads that load images", ylabel="images per second, mean and 95 % interval",
             xticks=sorted({r.settings["workers"] for r in runs}), ylim=(0, None))
    axis.legend()
    return figure


def draw_ablation(runs):
    path = next(filter(None, map(ablation_beside, runs)), None)
    if not path:
        raise Missing("no ablation.csv; make ablation writes it")
    with open(path, newline="") as f:
        rows = [dict(r, rung=drawable(r["rung"])) for r in csv.DictReader(f) if r["img_per_s"]]
    if not rows:
        raise Missing("emulated devices: they show no speed")
    figure, axes = plt.subplots(1, 2, figsize=(11, 1.5 + 0.5 * len(rows)), sharey=True)
    names = [row["rung"] for row in rows]
    speeds, accuracies = [[float(row[k]) for row in rows] for k in ("img_per_s", "accuracy")]
    axes[0].barh(names, speeds, color=GRAYS[1], hatch=HATCHES[1], edgecolor="black")
    for row, speed in zip(rows, speeds):
        axes[0].annotate(f" {speed:.0f}, x {float(row['times_first']):.3g}", (speed, row["rung"]), va="center")
    axes[1].errorbar(accuracies, names, xerr=[float(row["accuracy_sd"] or 0) for row in rows], fmt="o",
                     capsize=3, color="black")
    axes[0].set(title="Speed; x: relative to the first rung", xlabel="images per second",
                xlim=(0, 1.45 * max(speeds)))
    axes[1].set(title="Accuracy", xlabel=f"test accuracy in %, mean and sd of {rows[0]['repeats']} seeds")
    figure.subplots_adjust(top=0.78)
    axes[0].invert_yaxis()  # the first rung on top
    figure.suptitle(describe([r for r in runs if ablation_beside(r) == path]), fontsize=9, y=1.02)
    return figure


def draw_bytes(runs):
    rows = bytes_rows(runs)
    if not rows:
        raise Missing("no run of ./cnn-count, which make count builds, with what it has printed in output.txt")
    names = [drawable(row["rung"]) for row in rows]
    read, written = ([row[k] for row in rows] for k in ("read_mb", "written_mb"))
    figure, axes = plt.subplots(1, 2, figsize=(11, 1.7 + 0.5 * len(rows)), sharey=True)
    axes[0].barh(names, read, color=GRAYS[0], edgecolor="black", label="read")
    axes[0].barh(names, written, left=read, color=GRAYS[2], hatch=HATCHES[1], edgecolor="black", label="written")
    for name, row in zip(names, rows):
        axes[0].annotate(f" {row['moved_mb']:.3g}, x {row['times_first']:.3g}", (row["moved_mb"], name), va="center")
        axes[1].annotate(f" {row['launches']}", (row["launches"], name), va="center")
    axes[1].barh(names, [row["launches"] for row in rows], color=GRAYS[1], edgecolor="black")
    axes[0].set(title="Global memory; x: relative to the first", xlabel="MB, of all kernels",
                xlim=(0, 1.45 * max(row["moved_mb"] for row in rows)))
    axes[1].set(title="Kernels", xlabel="launches", xlim=(0, 1.2 * max(row["launches"] for row in rows)))
    axes[0].invert_yaxis()  # the first on top
    figure.suptitle(describe([r for r in runs if read_counts(r)]), fontsize=9)
    figure.tight_layout()
    figure.legend(loc="lower center", ncol=2, handleheight=1.5, bbox_to_anchor=(0.3, -0.08))
    return figure


def draw_scaling(runs):
    rows = scaling_rows(make_rows(runs))
    if not any(r["devices"] > 1 for r in rows):
        raise Missing("no runs on one and on several devices of a kind; make study-scaling makes them")
    compare(runs, {"threads"})
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
                seconds = np.maximum([r["seconds_mean"] for r in group], 1e-9)
                relative = np.array(as_numbers(r["ci95"] for r in group)) / seconds
                error = [r["speedup"] * np.hypot(part, relative[0]) if r["devices"] > 1 else np.nan
                         for r, part in zip(group, relative)]  # of a ratio: both times vary
                axis.errorbar([r["devices"] for r in group], [r["speedup"] for r in group], error, capsize=3,
                              label=name, **line_style(i))
                predicted = predicted_speedups(group)
                axis.plot([n for _, n in predicted], list(predicted.values()), "D", color="black",
                          markerfacecolor="white", markersize=9,
                          label="predicted from t_c and t_k" if predicted and not i else None)
        axis.plot(counts, counts, color="0.5", linestyle=":", linewidth=2.5, label="ideal")
        axis.set(xlabel="devices", title=f"{scaling.capitalize()} scaling", xticks=counts, ylim=(0, None))
        axis.legend(loc="upper left")
    axes[0].set_ylabel("speed-up over one device, 95 % interval")
    return figure


def panels_of(runs):
    """A figure with a panel for each network and device, and (axis, its rows) of each."""
    panels = by(rows_of_variants(runs, {"threads", "workers"}), lambda r: f"{r['model']}, {r['label']}")
    size = 2 + 4.5 * len(panels), 4.5
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, sharey=True)
    for axis, name in zip(axes[0], panels):
        axis.set(xlabel="epoch", title=name)
    return figure, list(zip(axes[0], panels.values()))


def draw_loss(runs):
    figure, panels = panels_of(runs)
    for axis, rows in panels:
        for i, row in enumerate(rows):
            run, style = row["runs"][0], line_style(i)
            points = read_losses(run)
            window = max(1, len(points) // 25)
            means = np.array([np.mean(points[k:k + window], axis=0) for k in range(0, len(points), window)])
            axis.plot(means[:, 0], means[:, 1], markevery=(i % 5, 8), markersize=5,
                      label=f"batch {row['global_batch']}{row['variant']}", **style)
            style.update(linestyle="", markerfacecolor="none", markersize=10)
            axis.plot([e["epoch"] for e in run.epochs], [e["test_loss"] for e in run.epochs], **style)
        axis.legend(title="lines: training\nlarge, hollow: test", loc="best")
    panels[0][0].set_ylabel("loss (cross-entropy, in nats), first repeat")
    return figure


def draw_accuracy(runs):
    if all(len(r.epochs) < 2 for r in runs):
        raise Missing("all runs have one epoch")
    figure, panels = panels_of(runs)
    for axis, rows in panels:
        for i, row in enumerate(rows):
            epochs, style = row["runs"][0].epochs, line_style(i)
            numbers = [e["epoch"] for e in epochs]
            axis.plot(numbers, as_numbers(e["train_accuracy"] for e in epochs),
                      label=f"batch {row['global_batch']}{row['variant']}", **style)
            style.update(linestyle="", markerfacecolor="none", markersize=10)
            axis.plot(numbers, [e["accuracy"] for e in epochs], **style)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(title="lines: training\nlarge, hollow: test", loc="best")
    panels[0][0].set_ylabel("accuracy in %, first repeat")
    return figure


def draw_run(runs):
    if len(runs) > 1:
        raise Missing("there are several runs; plot.py draws it for one run folder")
    run = runs[0]
    points, counts = np.array(read_losses(run)), np.array(read_confusion(run), float)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.9), gridspec_kw={"width_ratios": [1, 1.15]})
    left.plot(points[:, 0], points[:, 1], color="0.75", linewidth=0.8, label="each training step")
    window = max(1, len(points) // 40)
    means = np.array([points[k:k + window].mean(axis=0) for k in range(0, len(points), window)])
    left.plot(means[:, 0], means[:, 1], color="black", linewidth=1.8,
              label="mean of a step" if window == 1 else f"mean of {window} steps")
    left.plot([e["epoch"] for e in run.epochs], [e["test_loss"] for e in run.epochs], "o", color="black",
              markerfacecolor="white", markersize=9, label="test set, after an epoch")
    top = max([points[:, 1].max()] + [e["test_loss"] for e in run.epochs if e["test_loss"] is not None])
    left.set(xlabel="epoch", ylabel="loss (cross-entropy, in nats)", ylim=(0, 1.1 * top), title="Loss")
    left.legend(loc="lower left")
    draw_matrix(right, counts, run.classes, 8)
    right.set_title(f"Confusion matrix: {run.accuracy:.2f} % correct")
    figure.suptitle(describe(runs))
    figure.tight_layout()
    return figure


TRACKS_SHOWN = 8
UNNAMED = 0.07  # of the width: shorter events get no name


def draw_track(axis, spans, y, begin, end):
    """The events of one track between two times; neighbors differ in gray, and a name is where there is room."""
    shown = [s for s in spans if s[2] < end and s[2] + s[3] > begin]
    for i, (_, name, start, length) in enumerate(sorted(shown, key=lambda s: s[2])):
        axis.broken_barh([(start, length)], (y - 0.4, 0.8), facecolor=GRAYS[i % 2 * 2], edgecolor="black",
                         linewidth=0.4)
        left, right = max(start, begin), min(start + length, end)
        if right - left > UNNAMED * (end - begin):
            axis.text((left + right) / 2, y, drawable(name.split("(")[0]), ha="center", va="center", fontsize=6,
                      clip_on=True)


def draw_timeline(runs):
    found = [r for r in runs if os.path.exists(os.path.join(r.folder, "trace.json"))]
    if not found:
        raise Missing("no run folder has a trace.json; ./cnn --trace DIR/trace.json --out DIR writes one")
    tracks = read_trace(found[0])
    steps = tracks.get("steps", [])
    if len(steps) < 2:
        raise Missing(f"{found[0].folder}/trace.json has fewer than two steps")
    names = list(tracks)[:TRACKS_SHOWN]
    last = max(start + length for spans in tracks.values() for _, _, start, length in spans)
    figure, axes = plt.subplots(2, 1, figsize=(11, 1.6 + 0.9 * len(names)))
    for axis, (begin, end), title in zip(axes, ((0, last), (steps[1][2], steps[1][2] + steps[1][3])),
                                         ("All steps of the trace", "The second step")):
        for y, name in enumerate(names):
            draw_track(axis, tracks[name], y, begin, end)
        axis.set(xlim=(begin, end), ylim=(len(names) - 0.5, -0.5), title=title, xlabel="ms from the first event")
        axis.set_yticks(range(len(names)), [drawable(n) for n in names])
    figure.suptitle(f"{name_of(found[0])}: {describe(found[:1])}", fontsize=9)
    figure.tight_layout()
    return figure


def draw_precision(runs):
    group = by_precision(runs)
    if len(group) < 2:
        raise Missing("it is for runs in fp32 and in another --precision that differ in nothing else")
    figure, axis = plt.subplots(figsize=(7, 4.5))
    figure.suptitle(describe(list(group.values())), fontsize=9, y=1.0)
    want = np.array(read_losses(group.pop("fp32")))
    axis.axhline(0, color="0.5", linestyle=":", label="fp32")
    for i, (name, run) in enumerate(group.items()):
        got = np.array(read_losses(run))[:len(want)]
        axis.plot(range(1, len(got) + 1), 100 * (got[:, 1] / want[:len(got), 1] - 1), label=name, **line_style(i))
    axis.set(xlabel="step", ylabel="loss / loss in fp32 - 1, in %")
    axis.legend()
    return figure


def draw_roofline(runs):
    found = [r for r in runs if os.path.exists(os.path.join(r.folder, "layers.csv"))]
    if not found:
        raise Missing("no run folder has a layers.csv; --layers writes it")
    found = [r for r in found if r.machine["peak_gflops"] is not None]
    if not found:
        raise Missing("the limits of the machine were not measured: ./cnn was compiled without cnn_kernels.c")
    run = found[0]
    every = read_csv(run, "layers.csv", ["layer", "kind", "bound", "percent_of_peak", "gflops", "gb_per_s", "saved"],
                     {"saved": 1})
    layers = [r for r in every if r[4] > 0 and r[5] > 0]
    if not layers:
        raise Missing(f"{run.folder}/layers.csv has no layer with gflops and gb_per_s")

    def roof(bound, column):
        """The limit that percent_of_peak refers to, by its largest value, which is rounded least."""
        percent, speed = max([(r[3], r[column]) for r in every if r[2] == bound and r[3] > 0],
                             default=(100, max(r[column] for r in every)))
        return 100 * speed / percent
    peak, bandwidth = roof("compute", 4), roof("memory", 5)
    intensities = [r[4] / r[5] for r in layers] + [r[6] * r[4] / r[5] for r in layers]
    figure, axis = plt.subplots(figsize=(8.5, 5.5))
    x = np.geomspace(min(intensities) / 3, 3 * max(max(intensities), peak / bandwidth), 300)
    axis.plot(x, np.minimum(x * bandwidth, peak), "k-", linewidth=2,
              label=f"limit: {bandwidth:.3g} GB/s, {peak:.3g} GFLOP/s")
    where = np.where(x < peak / bandwidth)
    axis.plot(x[where], 0 * x[where] + peak, "k:", linewidth=1)
    for i, (kind, group) in enumerate(by(layers, lambda r: r[1].split()[0]).items()):
        axis.plot([r[4] / r[5] for r in group], [r[4] for r in group], "os^Dv*xP"[i % 8], color="0.3",
                  markersize=9, label=f"{kind}: executed")
        for *_, gflops, gb, saved in (r for r in group if r[6] != 1):
            look = dict(linestyle="-", linewidth=0.8, color="black", markevery=[1], marker="os^Dv*xP"[i % 8])
            axis.plot([gflops / gb, saved * gflops / gb], [gflops, saved * gflops], markersize=9,
                      markerfacecolor="white", label=f"{kind}: as the definition counts", **look)
    for number, (name, *_, gflops, gb, _) in enumerate(layers, 1):
        label = name if len(layers) <= 8 else str(number)
        axis.annotate(label, (gflops / gb, gflops), (8, -12), textcoords="offset points")
    if len(layers) > 8:
        axis.text(1.02, 1, "\n".join(f"{number}  {r[0]}" for number, r in enumerate(layers, 1)), va="top",
                  fontsize=min(8, 280 / len(layers)), transform=axis.transAxes)
    heights = [r[4] for r in layers] + [r[4] * r[6] for r in layers]
    axis.set(xscale="log", yscale="log", xlabel="operations per byte moved (FLOP/byte)", ylabel="speed in GFLOP/s",
             ylim=(min(heights) / 2, 3 * max(peak, *heights)), title="Each layer's speed, and the limits of "
             f"the machine\n{name_of(run)}: {describe([run])}")
    labeled = {label: line for line, label in zip(*axis.get_legend_handles_labels())}  # each once
    axis.legend(labeled.values(), labeled, loc="lower right")
    return figure


def draw_matrix(axis, counts, names, size):
    """The confusion matrix, in per cent of each class; the names in letters of that size."""
    share = 100 * counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    picture = axis.imshow(share, cmap="Greys", vmin=0, vmax=100)
    axis.figure.colorbar(picture, ax=axis, label="% of the class's images", shrink=0.8)
    if len(names) <= 20:
        for i, j in zip(*np.where(share.round() > 0)):
            axis.text(j, i, f"{share[i, j]:.0f}", ha="center", va="center", fontsize=size,
                      color="white" if share[i, j] > 50 else "black")
        axis.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor", fontsize=size)
        axis.set_yticks(range(len(names)), names, fontsize=size)
    axis.set(xlabel="predicted class", ylabel="true class")


def draw_confusion(runs):
    run = max(with_predictions(runs), key=lambda r: r.accuracy)
    counts = np.array(read_confusion(run), float)
    figure, axis = plt.subplots(figsize=(7.5, 7))
    draw_matrix(axis, counts, run.classes, 10)
    axis.set_title(f"{name_of(run)}: {describe([run])}\n{run.accuracy:.2f} % correct")
    return figure


NO_TICKS = {"xticks": [], "yticks": []}  # placing ticks takes a third of the time, though they are not shown


def show_image(axis, row, title, size=9):
    axis.imshow(np.reshape(list(row["pixels"]), row["shape"]).astype(np.uint8), "Greys_r", vmin=0, vmax=255)
    axis.set_title(title, fontsize=size)


def with_predictions(runs):
    found = [r for r in runs if os.path.exists(os.path.join(r.folder, "predictions.csv"))]
    if not found:
        raise Missing("no run folder has a predictions.csv; runs of this version of ./cnn do")
    return [r for r in found if not r.emulated] or found  # as the table of classes in the report


def draw_samples(runs):
    run = max(with_predictions(runs), key=lambda r: r.accuracy)
    rows = [r for r in read_predictions(run) if r["epoch"] == 0]
    right, wrong = ([r for r in rows if (r["label"] == r["predicted"]) == good][:16] for good in (True, False))
    cells = [row for some in (right, wrong) for row in some + [None] * (-len(some) % 8)]  # each begins a line
    count = len(cells) // 8
    figure, axes = plt.subplots(count, 8, figsize=(10, 1.55 * count + 0.9), squeeze=False, subplot_kw=NO_TICKS)
    for axis, row in zip(axes.flat, cells):
        axis.axis("off")
        if row in right:
            show_image(axis, row, row["label"])
        elif row:
            show_image(axis, row, f"{row['label']}\npredicted: {row['predicted']}", 7.5)
    figure.suptitle(f"{name_of(run)}: {describe([run])}\nThe first {len(right)} test images that were predicted right, "
                    f"with their label, and the first {len(wrong)} that were not", fontsize=9)
    figure.tight_layout()
    return figure


def draw_augment(runs):
    found = [r for r in with_predictions(runs) if r.settings["augment"] != "none"]
    if not found:
        raise Missing("no run has --augment crop-flip or elastic")
    images = by(read_predictions(found[0]), lambda r: r["image"])
    lines = [rows[:8] for rows in images.values() if len(rows) > 1][:8]
    if not lines:
        raise Missing(f"{found[0].folder}/predictions.csv has no augmented images")
    figure, axes = plt.subplots(len(lines), 8, figsize=(10, 1.3 * len(lines) + 0.9), squeeze=False,
                                subplot_kw=NO_TICKS)
    for axis in axes.flat:
        axis.axis("off")
    for axis, row in ((axis, row) for some, rows in zip(axes, lines) for axis, row in zip(some, rows)):
        show_image(axis, row, f"epoch {row['epoch']}" if row["epoch"] else f"{row['label']}, as it is")
    figure.suptitle(f"What --augment {found[0].settings['augment']} makes of test images\n{name_of(found[0])}: commit "
                    f"{found[0].build['commit']}", fontsize=9)
    figure.tight_layout()
    return figure


def draw_filters(runs):
    found = [r for r in runs if os.path.exists(os.path.join(r.folder, "model.safetensors"))]
    if not found:
        raise Missing("no run folder has a model.safetensors; --save-model writes it")
    run = max(found, key=lambda r: r.accuracy)
    before, (name, shape, weights) = read_untrained(run), read_filters(run)
    sets = {"after training": weights}
    if before and before[1] == shape:
        sets = {"before training": before[2], **sets}
    count, channels, height, width = shape
    columns, most = min(count, 16), max(np.abs(w).max() for w in sets.values())
    rows = -(-count // columns)
    figure, axes = plt.subplots(len(sets), 1, squeeze=False, figsize=(
        3 + 0.5 * columns, 1.5 + (0.4 + 0.5 * rows * channels) * len(sets)))
    for axis, (when, numbers) in zip(axes.flat, sets.items()):
        filters = np.reshape(numbers, shape)
        for k, c in np.ndindex(count, channels):  # the channels of a filter, one below the other
            x, y = k % columns * 1.2, -1.05 * (c + k // columns * (channels + 0.4))
            picture = axis.imshow(filters[k, c], "Greys_r", vmin=-most, vmax=most, extent=(x, x + 1, y, y + 1))
            axis.add_patch(plt.Rectangle((x, y), 1, 1, fill=False, linewidth=0.6))
        axis.set(xlim=(-0.1, columns * 1.2), ylim=(y - 0.1, 1.1))
        axis.set_title(when, fontsize=9)
        axis.axis("off")
    colors = "red, green, blue from top\n" * (channels == 3)
    figure.suptitle(f"{name}: {count} filters of {height} x {width}\n{colors}{name_of(run)}: {describe([run])}",
                    fontsize=9, y=1.02 + 0.1 / len(sets))
    figure.colorbar(picture, ax=axes, label="weight")
    return figure


def draw_bench(path):
    columns = ["network", "batch", "threads", "img_per_s", "pytorch_img_per_s", "date", "commit", "machine", "pytorch"]
    try:
        with open(path, newline="") as f:
            rows = [{c: row[c] for c in columns} for row in csv.DictReader(f)]
        speeds = [(float(r["img_per_s"]), float(r["pytorch_img_per_s"])) for r in rows]
    except OSError as error:
        fail(path, "a table of training speeds", error.strerror, "labs/figures/bench.csv is one")
    except (KeyError, TypeError, ValueError) as error:
        fail(path, f"the columns {', '.join(columns)}, with numbers for img/s", repr(error),
             "labs/figures/bench.csv is such a table")
    panels = by(zip(rows, speeds), lambda r: f"{r[0]['network']}, batch {r[0]['batch']}")
    if not panels:
        fail(path, "a row for each network", "none", "labs/figures/bench.csv is such a table")
    columns = min(3, len(panels))
    figure, axes = plt.subplots(-(-len(panels) // columns), columns, squeeze=False,
                                figsize=(3.1 * columns, 2.7 * -(-len(panels) // columns) + 0.9))
    for axis in axes.flat[len(panels):]:
        axis.axis("off")
    for axis, (name, group) in zip(axes.flat, panels.items()):
        for k, who in enumerate(("cnn", "PyTorch")):
            axis.bar([i + 0.4 * k - 0.2 for i in range(len(group))], [speed[k] for _, speed in group], 0.4,
                     color=GRAYS[k], hatch=HATCHES[k], edgecolor="black", label=who)
        for i, (_, (ours, theirs)) in enumerate(group):
            axis.annotate(f"{ours / theirs:.1f} x", (i - 0.2, ours), (0, 3), textcoords="offset points", ha="center")
        axis.set(title=name, ylim=(0, 1.2 * max(max(speed) for _, speed in group)))
        axis.set_xticks(range(len(group)), [f"{r['threads']} thread" + "s" * (r["threads"] != "1") for r, _ in group])
        axis.ticklabel_format(axis="y", style="plain")
    for axis in axes[:, 0]:
        axis.set_ylabel("images per second")
    about = "; ".join(", ".join(dict.fromkeys(r[c] for r in rows)) for c in ("machine", "date", "commit", "pytorch"))
    figure.suptitle(f"Training steps: cnn, and how many times as fast as PyTorch\n{about}", fontsize=11)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncol=2, handleheight=1.5)
    return figure


def save(figure, out, name):
    """As PNG and SVG, without the date of the drawing: the same data give the same files."""
    try:
        os.makedirs(out, exist_ok=True)
        for kind, metadata in ("png", {}), ("svg", {"Date": None}):
            figure.savefig(os.path.join(out, f"{name}.{kind}"), dpi=110, bbox_inches="tight", metadata=metadata)
    except OSError as error:
        fail(error.filename or out, "a file that can be written", error.strerror, "fix its permissions")
    plt.close(figure)
    print(f"drawn: {out}/{name}.png and .svg")


# Their title says what the runs have in common.
OF_RUNS = [draw_study, draw_workers, draw_scaling, draw_loss, draw_accuracy]
PLOTS = OF_RUNS + [draw_ablation, draw_bytes, draw_precision, draw_run, draw_timeline, draw_roofline, draw_confusion,
                   draw_samples, draw_augment, draw_filters]


def main(source):
    if source.endswith(".csv"):
        save(draw_bench(source), os.path.join(os.path.dirname(source), "plots"), "bench")
        return
    runs = read_runs(source)
    drawn = 0
    for draw in PLOTS:
        name = draw.__name__[len("draw_"):]
        try:
            figure = draw(runs)
        except Missing as why:
            print(f"not drawn: {name}: {why}")
            continue
        if draw in OF_RUNS:
            figure.suptitle(describe(runs), fontsize=9, y=1.02)
        save(figure, os.path.join(source, "plots"), name)
        drawn += 1
    sys.exit(0 if drawn else 1)


if __name__ == "__main__":
    start(main, __doc__, "what ./cnn --out or make study has written, or a table such as labs/figures/bench.csv")
