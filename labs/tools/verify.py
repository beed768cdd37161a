#!/usr/bin/env python3
"""Tells what is missing or implausible in DIR, its run folders and its report.md, before you hand it in.

    labs/tools/verify.py runs/first     or: make verify RUNS=runs/first

Each finding is one line: the file, what was expected, what was found, what to do. A finding is no verdict:
where you know why a number is right, say so under Anomalies. Lines `Note:` are no findings. Nothing is
changed, nothing is sent anywhere. Exit status: 0 no findings, 1 findings, 2 DIR is no folder.

Missing: questions not answered, empty sections, runs that are not complete, fewer than 5 repeats, plots that
are not there or older than the runs. Implausible: what a run's numbers should be to agree with each other and
with the machine (steps, images, seconds, CPU time, peaks, speed-ups, GPUs), and tables that do not agree with
the run folders.
"""
import contextlib
import csv
import io
import math
import os
import re
import sys

from report import (MAKERS, NOTHING, STEP_PARTS, Damaged, free_settings, make_blocks, read_report, split,
                    timing_rows, variants)
from run_folders import (COLUMNS, SCALING, Missing, add_speedups, by, differences, is_dirty,
                         make_rows, read_csv, read_run, read_runs, scaling_rows, start, table_lines)

SECTIONS = ["Project Title", "Motivating Image", "Abstract", "Methodology", "Timing Results",
            "Concluding Discussion and Future Work", "References"]
REPEATS = 5         # fewer tell little about spread
NOISE = 1.5         # a measured peak may be this much too low, since others use the machine as well
LARGEST_SPEEDUP = 1.1  # for each device: caches that grow with the devices explain no more
CACHED_MB = 128     # what moves less than --layers uses to measure the bandwidth may stay in caches
# Products by the definition over Winograd's, where he is used.
WINOGRAD = {"conv2d 3x3 stride 1": 144 / 36, "conv2d 5x5 stride 1": 100 / 36}
SKIPPING = 8        # of backward: three of four inputs of a max-pool get no gradient, nor do ReLU's zeros


def finding(where, expected, found, advice="run it again"):
    return f"{where}: expected {expected}, found {found}; {advice}"


def path(run, name):
    return os.path.join(run.folder, name)


# ---- Each run


def check_epochs(run):
    """The epochs of run.json with themselves, with epochs.csv and with what the run took."""
    where = path(run, "run.json")
    for e in run.epochs:
        low, high = (e["images"] / max(e["seconds"] + d, 1e-9) + r for d, r in ((5e-4, -0.6), (-5e-4, 0.6)))
        if e["seconds"] > 5e-4 and not low <= e["img_per_s"] <= high:
            yield finding(where, f"img_per_s x seconds = {e['images']} images in epoch {e['epoch']}",
                          f"{e['img_per_s']} x {e['seconds']}")
    keys = [k for k in run.epochs[0] if k != "weight_hash"]
    if read_csv(run, "epochs.csv", keys) != [[e[k] for k in keys] for e in run.epochs]:
        yield finding(path(run, "epochs.csv"), "the epochs of run.json", "others")
    total, wall = sum(e["seconds"] + e["test_seconds"] for e in run.epochs), run.resources["wall_s"]
    cpu, cores = run.resources["cpu_s"], run.machine["cores"]
    if wall * 1.01 + 0.01 < total:
        yield finding(where, f"a wall time of at least {total:.3f} s, the epochs' sum", f"{wall} s")
    if cpu > 1.02 * cores * wall + 0.1:
        yield finding(where, f"at most {cores} cores x {wall} s of CPU time", f"{cpu} s")
    if run.confusion:
        right = sum(row[i] for i, row in enumerate(run.confusion))
        share = 100 * right / max(1, sum(map(sum, run.confusion)))
        if abs(share - run.accuracy) > 0.006:
            yield finding(where, f"the accuracy of the confusion matrix, {share:.2f} %", f"{run.accuracy} %")


def check_steps(run):
    """Each epoch of steps.csv with run.json: steps of each rank, images, seconds and their parts."""
    where = path(run, "steps.csv")
    rows = read_csv(run, "steps.csv", ["epoch", "step", "rank", "images", "seconds", *STEP_PARTS])
    epochs = by(rows, lambda row: row[0])
    for e in run.epochs:
        ranks = list(by(epochs.get(e["epoch"], []), lambda row: row[2]).values())
        shard, batch = math.ceil(e["images"] / run.world), run.batch
        if run.mode == "dp":  # the master deals all images out
            shard, batch = e["images"], run.global_batch
        counts, steps = [len(rank) for rank in ranks], math.ceil(shard / batch)
        images, seconds = sum(row[3] for rank in ranks for row in rank), e["seconds"]
        total = sum(row[4] for rank in ranks for row in rank if row[2] == 0)  # rank 0 times the epoch
        if counts != [steps] * run.world:
            yield finding(where, f"{steps} steps = ceil({shard} images / batch {batch}), ranks: "
                          f"{run.world}, in epoch {e['epoch']}", counts)
        if images != e["images"]:
            yield finding(where, f"{e['images']} images in epoch {e['epoch']}, as in run.json", f"{images:g}")
        if not 0.9 * seconds - 0.05 <= total <= 1.01 * seconds + 0.005:
            yield finding(where, f"{seconds} s in all steps of rank 0 in epoch {e['epoch']}, as in run.json",
                          f"{total:.3f} s")
    for epoch, step, _, _, seconds, *parts in rows:
        if abs(seconds - sum(parts)) > 1e-5:
            yield finding(where, f"seconds = sum of the parts in epoch {epoch:g}, step {step:g}",
                          f"{seconds} and {sum(parts):.6f}")
            break


def check_layers(run):
    """Per cent of the peak count the operations of the definition; where the program needs fewer, more than
    100 is right: Winograd's convolutions, and backward where it skips what a max-pool left out."""
    if not os.path.exists(path(run, "layers.csv")):
        return
    images = min(run.batch, math.ceil(run.epochs[0]["images"] / run.world))
    for layer, kind, bound, percent, gflops, gb_per_s, mflop, forward, backward in read_csv(
            run, "layers.csv", ["layer", "kind", "bound", "percent_of_peak", "gflops", "gb_per_s", "mflop",
                                "forward_ms", "backward_ms"]):
        most = 100 * NOISE
        limited = bound == "compute" or gb_per_s * (forward + backward) > CACHED_MB
        found = {f"{layer}, bound by {bound}": (percent, most * (SKIPPING if "conv2d" in kind else 1))}
        if bound == "compute" and min(gflops, forward) > 0:  # forward alone; MFLOP a ms are GFLOP/s
            found[f"forward of {layer}"] = (percent / gflops * mflop * images / forward,
                                            most * WINOGRAD.get(kind.partition(" padding")[0], 1))
        for what, (share, limit) in found.items():
            if share > limit and limited and not run.emulated:
                yield finding(path(run, "layers.csv"), f"{what}: at most {limit:.0f} % of the measured peak",
                              f"{share:.0f} %", "measure again while nothing else runs")


def check_devices(run):
    """Whether each rank had a device of its own, as the lines `Rank 0: host, GPU, uuid` tell."""
    where, cores = path(run, "output.txt"), run.machine["cores"]
    if run.kind == "cpu" and run.settings["oversubscribe"] and run.world > cores:
        yield finding(path(run, "run.json"), f"a core for each of {run.world} replicas", f"{cores} cores",
                      "its time is not that of so many devices: delete the folder")
    if run.world == 1 or run.kind != "gpu":
        return
    if not os.path.exists(where):
        yield finding(where, f"what the run printed, with its {run.world} GPUs", "no such file",
                      "save its output there, as make study does")
        return
    places = re.findall(r"^Rank \d+: ([^,]*),.*, (GPU-[-0-9a-f]+)$", read_report(where), re.M)
    if len(places) != run.world or len(set(places)) != run.world:
        yield finding(where, f"{run.world} ranks on as many GPUs", f"{len(set(places))} different GPUs",
                      "ask for more GPUs, and leave --oversubscribe out")


def check_nature(run):
    """Whether it is a run of training, on the device that it names."""
    where = path(run, "run.json")
    if run.settings.get("dry-run") or run.settings.get("eval"):
        yield finding(where, "a run that trains", "--dry-run or --eval", "delete the folder")
    program = os.path.basename(run.command[0])
    if not run.emulated and ("emulated" in run.machine["device"] or re.search("-(emu|count)$", program)):
        yield finding(where, '"emulated": true, as its device or program says', "false",
                      "times of the emulator mean nothing: run it on a device")


RUN_CHECKS = [check_nature, check_epochs, check_steps, check_layers, check_devices]


# ---- All runs together


def check_complete(root):
    """Folders whose run has not come to its end."""
    for folder in [root] + [os.path.join(root, name) for name in sorted(os.listdir(root))]:
        where = os.path.join(folder, "run.json")
        begun = any(os.path.exists(os.path.join(folder, name)) for name in ("steps.csv", "output.txt"))
        try:
            run = read_run(folder)
        except SystemExit as why:
            yield str(why).replace("verify: error: ", "")
            continue
        if run is None and begun:
            yield finding(where, "a run.json", "none", "run it again, or delete the folder")
        elif run and run.status != "complete":
            yield finding(where, "status complete", run.status, "run it again, or delete the folder")
        elif run and len(run.epochs) != run.settings["epochs"]:
            yield finding(where, f"all {run.settings['epochs']} epochs", len(run.epochs),
                          "after --resume a run.json tells of the last part alone: time a whole run")


def check_measured(root, runs):
    if all(run.emulated or run.provenance != "measured" for run in runs):
        yield finding(root, "runs that you measured", "emulated or supplied ones only",
                      "their times are none of yours: train on the CPU at least")


def check_copies(root, runs):
    """Two runs never take the same microseconds for everything, not even with the same seed."""
    seen = {}
    for run in runs:
        with contextlib.suppress(OSError, IndexError), open(path(run, "steps.csv")) as f:
            times = hash(tuple(line.split(",", 6)[6] for line in f))  # the columns from seconds on
            other = seen.setdefault(times, run)
            if other is not run:
                yield finding(path(run, "steps.csv"), "times of its own", f"all those of {other.folder}",
                              "delete the copy and run it again")


def check_same(root, runs):
    """Runs may differ in device, batch, seed and one thing more, a step at a time: else nothing follows."""
    def differing(pair):
        return differences(*pair, free_settings(*pair))
    first, *left = [group[0] for group in variants(runs)]
    linked = [first]
    while left:
        a, b = nearest = min(((a, b) for a in linked for b in left), key=lambda pair: len(differing(pair)))
        if len(differing(nearest)) > 1:
            yield finding(b.folder, f"one difference at most from {a.folder}, beside device, batch and seed",
                          ", ".join(f"{name} {old!r} and {new!r}" for name, old, new in differing(nearest)),
                          "change one thing at a time, or give them folders of their own")
        linked.append(b)
        left.remove(b)


def check_rows(root, runs):
    rows = timing_rows(runs)
    for row in rows:
        if len(row["runs"]) < REPEATS and row["provenance"] == "measured":
            which = f"{row['label']}, global batch {row['global_batch']} {row['variant']}".rstrip()
            yield finding(root, f"{REPEATS} repeats or more of {which}", len(row["runs"]),
                          f"too few to see the spread: add some with other seeds (make: REPEATS={REPEATS})")
    for group in by(rows, lambda r: r["variant"]).values():
        for row in scaling_rows(group):
            if (row.get("speedup") or 0) > LARGEST_SPEEDUP * row["devices"]:
                yield finding(root, f"a speed-up of at most {LARGEST_SPEEDUP} x {row['devices']} devices "
                              f"({row['scaling']}, {row['label']}, global batch {row['global_batch']})",
                              f"{row['speedup']:.2f}", "look for what else differs; was the machine busy?")


def check_csv(root, runs):
    """study.csv and scaling.csv against the run folders."""
    with contextlib.redirect_stdout(None):
        rows = make_rows(runs)
        add_speedups(rows)
    for name, columns, table in (("study.csv", COLUMNS, rows), ("scaling.csv", SCALING, scaling_rows(rows))):
        where = os.path.join(root, name)
        if not os.path.exists(where):
            continue
        with open(where, newline="", encoding="utf-8", errors="replace") as f:
            found = list(csv.reader(f))
        expected = table_lines(columns, table)
        for number, (old, new) in enumerate(zip(found + [None] * len(expected), expected), 1):
            if old != new:
                yield finding(f"{where}, line {number}", ",".join(new), ",".join(old) if old else "none",
                              "it does not agree with the run folders: make study writes it again")
                break
        if len(found) > len(expected):
            yield finding(where, f"{len(expected)} lines", len(found), "make study writes it again")


def check_plots(root, runs):
    folder, newest = os.path.join(root, "plots"), max(os.path.getmtime(path(r, "run.json")) for r in runs)
    plots = [n for n in os.listdir(folder) if n.endswith(".png")] if os.path.isdir(folder) else []
    if not plots:
        yield finding(folder, "plots", "none", f"make report RUNS={root}")
    for name in sorted(plots):
        if os.path.getmtime(os.path.join(folder, name)) < newest:
            yield finding(os.path.join(folder, name), "a plot of the runs as they are", "one older than they",
                          f"make report RUNS={root}")


# ---- The report


def check_sections(root, where, pieces):
    """What the student has written: questions left, headings, empty sections, images."""
    for number, line in enumerate(read_report(where).splitlines(), 1):
        if "TODO:" in line:
            yield finding(f"{where}, line {number}", "your answer", line.strip()[:60] + "...",
                          "write it in place of the question")
    text = "".join("generated\n" if name else "".join(lines) for name, lines in pieces).replace("\r", "")
    text = re.sub("^> .*TODO:.*\n(> .*\n)*", "TODO\n", text, flags=re.M)
    text = re.sub("^```.*?^```", "code", text, flags=re.M | re.S)
    parts = re.split("^(#+) *(.*?) *$", text, flags=re.M)
    sections = list(zip(parts[1::3], parts[2::3], parts[3::3]))
    for (level, name, body), after in zip(sections, sections[1:] + [("", "", "")]):
        body = re.sub("<!--.*?-->|generated", "", body, flags=re.S)
        if not body.strip() and len(after[0]) <= len(level):
            yield finding(where, f"a text of yours under {name}", "none", "write it")
        if name == SECTIONS[1] and "TODO" not in body and "![" not in body:
            yield finding(where, f"an image under {name}", "none", "write ![what it shows](file.png)")
    for name in SECTIONS:
        if not any(n.startswith(name) for _, n, _ in sections):
            yield finding(where, f"the heading {name}", "none", "write it and its section")
    for image in re.findall(r"!\[[^\]]*\]\(([^) ]*)", text + str([p[1] for p in pieces if p[0]])):
        if not re.match("https?:", image) and not os.path.exists(os.path.join(root, image)):
            yield finding(where, f"the image {image}", "no such file",
                          f"make plots RUNS={root}, or mend the link")


def check_report(root, runs):
    where = os.path.join(root, "report.md")
    if not os.path.exists(where):
        yield finding(where, "your report", "no such file", f"make report RUNS={root}")
        return
    try:
        pieces = split(read_report(where))
    except Damaged as why:
        yield finding(where, "whole markers", why, "make report writes report.new.md to copy from")
        return
    yield from check_sections(root, where, pieces)
    generated, blocks = dict(pieces), make_blocks(root, runs)
    for name in MAKERS:
        if name in generated and "".join(generated[name]).split() != (blocks[name] or NOTHING).split():
            yield finding(where, f"the part {name} as the run folders are now", "another one",
                          f"make report RUNS={root}")
        if name not in generated and name in ("settings", "machine", "timing"):
            yield finding(where, f"the part {name}, from the run folders", "none",
                          f"write <!-- begin {name} --> and <!-- end {name} --> there, then make report")


def findings(root):
    told = list(check_complete(root))
    yield from told
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # it names runs that are not complete, as we did
            runs = read_runs(root)
    except SystemExit as why:
        yield from {str(why).replace("verify: error: ", "")}.difference(told)
        return
    for run in runs:
        for check in RUN_CHECKS:
            try:
                yield from check(run)
            except Missing as why:
                yield f"{why}; run it again"
            except (KeyError, TypeError, ZeroDivisionError) as why:
                yield finding(path(run, "run.json"), "what ./cnn --out writes", repr(why))
    for check in (check_measured, check_copies, check_same, check_rows, check_csv, check_plots, check_report):
        yield from check(root, runs)
    supplied = [r for r in runs if r.provenance != "measured"]
    for what, those in (("supplied, not your own measurements", supplied),
                        ("emulated, their times mean nothing", [r for r in runs if r.emulated]),
                        ("built from sources that nobody committed", list(filter(is_dirty, runs)))):
        if those:
            print(f"Note: {what}: {', '.join(os.path.relpath(r.folder, root) for r in those)}")


def main(root):
    if not os.path.isdir(root):
        print(f"verify: error: {root}: expected a folder of run folders, found none; make study writes one",
              file=sys.stderr)
        sys.exit(2)
    count = 0
    for line in findings(root):
        print(line)
        count += 1
    print(f"Findings: {count}" if count else f"Nothing found in {root} that is missing or implausible")
    sys.exit(1 if count else 0)


if __name__ == "__main__":
    start(main, __doc__, "what make study and make report have written")
