#!/usr/bin/env python3
"""Lists what is missing or implausible in DIR, its run folders and its report.md, before you hand it in.

    labs/tools/verify.py runs/first     or: make verify RUNS=runs/first

It finds run folders at any depth, and first prints the kind of each folder of run folders, since the rules
depend on it:
    timing study, scaling study, worker sweep   the folder has the table that `make study`,
                        `make study-scaling` or `make study-workers` writes, or run folders that they named
    separate runs       any other, such as the runs of a lab: each run has to be complete and consistent
The table RULES in this program lists which rules apply to which kind.

Each finding is one line: the file, what was expected, what was found, what to do. A finding need not be an
error: if you know why a number is right, explain it under Anomalies. Lines `Note:` are not findings. The tool
only reads. The exit status is 0 without findings, 1 with findings, and 2 if DIR is not a folder.

It lists as missing: unanswered questions, incomplete runs; in studies also repeats below 5, tables, plots and the
report. It lists as implausible: numbers that contradict each other or the machine (steps, images, seconds, CPU time,
peaks, intervals, speed-ups, GPUs), and tables that contradict the run folders.
`make check` applies the same rules to the runs that a lab asks for.
"""
import contextlib
import csv
import itertools
import math
import os
import re
import shlex
import sys
from collections import Counter
from types import SimpleNamespace

from report import (STEP_PHASES, free_settings, generated_files, make_tables, place, read_report, timing_rows,
                    variants)
from run_folders import (ABLATION, COLUMNS, DAMAGES, EPOCHS, HOURS, SCALING, WORKERS, Missing, ablation_rows,
                         add_speedups, by, complete, differences, find_folders, hours_rows, is_dirty, is_timed,
                         make_rows, read_confusion, read_csv, read_run, scaling_rows, start, table_lines, workers_rows)

SECTIONS = ["Project Title", "Motivating Image", "Abstract", "Methodology", "Timing Results",
            "Concluding Discussion and Future Work", "References"]
REPEATS = 5         # fewer say little about the spread
NOISE = 1.5         # a measured peak may be too low by this factor if other programs were running
LARGEST_SPEEDUP = 1.1  # per device: larger caches in total explain no more
LEAST_SPEEDUP = 0.5   # of several devices over one: with less, something else used the machine
WIDEST = 0.25       # the 95 % interval of a mean, as a part of it; with a wider one a difference means little
CACHED_MB = 128     # smaller data than --layers uses to measure the bandwidth may stay in caches
# Multiplications of the definition over those of Winograd's algorithm, where it is used.
WINOGRAD = {"conv2d 3x3 stride 1": 144 / 36, "conv2d 3x3 stride 2": 144 / 81,
            "conv2d 5x5 stride 1": 100 / 36}
NEEDED = {"settings": ["model", "dataset", "limit-train", "epochs", "batch-size", "optimizer", "seed",
                       "threads", "workers", "kernels"],
          "machine": ["host", "cpu", "cores", "memory_bytes", "peak_gflops", "device"],
          "build": ["compiler", "flags", "commit"]}
# Of these, what the rules compute with: numbers, and neither true, which counts as 1, nor 10^400, which overflows
NUMBERS = {"settings": ["limit-train", "epochs", "batch-size", "seed", "threads", "workers"],
           "machine": ["cores", "memory_bytes"], "parallel": ["world", "batch_per_device", "global_batch"],
           "resources": ["wall_s", "cpu_s"]}
COPIED = 0.5        # of the steps of two runs that have the same times, and at least 3: one is a copy
SMALLER_LR = "run it again with a smaller --lr"


def finding(where, expected, found, advice="run it again"):
    return f"{where}: expected {expected}, found {found}; {advice}"


def make_report(root):
    """The command that writes the report in this folder."""
    lab = re.search(r"(?:^|/)reports/lab0?(\d+)$", root)
    return f"make report LAB={lab[1]}" if lab else f"make report RUNS={shlex.quote(root)}"


def is_finite(number):
    return isinstance(number, (int, float)) and not isinstance(number, bool) and abs(number) <= sys.float_info.max


def path(run, name):
    return os.path.join(run.folder, name)


# ---- Each run


def check_entries(run):
    """What a reader needs in order to repeat the run, or to compare it with another."""
    unknown = {"peak_gflops"} if run.settings.get("kernels") == "naive" else set()  # cnn_kernels.c measures it
    for part, names in NEEDED.items():
        entries = getattr(run, part)
        missing = [name for name in names
                   if entries.get(name) in (None, "") and not (name in unknown and name in entries)]
        if missing:
            yield finding(path(run, "run.json"), f"in {part} the entries {', '.join(names)}",
                          f"no {', '.join(missing)}")
    for part, names in NUMBERS.items():
        for name in names:
            value = getattr(run, part).get(name, 0)
            if not is_finite(value):
                yield finding(path(run, "run.json"), f"in {part} a number as {name}", str(value)[:60])
            elif part == "machine" and value <= 0:
                yield finding(path(run, "run.json"), f"in {part} a {name} above 0", value)


def check_command(run):
    """Each option in the command against the setting of that name."""
    if not isinstance(run.command, list) or not run.command or not all(isinstance(w, str) for w in run.command):
        yield finding(path(run, "run.json"), "a command, as a list of words", str(run.command)[:60])
        return
    words, given = run.command[1:], {}
    for word, after in zip(words, [*words[1:], "--"]):
        name, equals, value = word[2:].partition("=")
        if word.startswith("--"):
            given[name] = value if equals else True if after.startswith("--") else after
    if run.world > 1 or "global-batch" in given:  # these change them
        for name in ("threads", "batch-size", "global-batch"):
            given.pop(name, None)
    if run.settings.get("lr-scaling") != "none":
        given.pop("lr", None)
    for name, value in given.items():
        setting = run.settings.get(name)
        if setting is not None and name not in ("out", "data", "graph") and not same_value(setting, value):
            yield finding(path(run, "run.json"), f"--{name} {value}, as in its command", f"{setting} in its settings",
                          "was it edited? Run it again")


def same_value(setting, value):
    if isinstance(setting, bool):
        return setting == (value in (True, "on", "1", "true", "yes"))
    if isinstance(setting, (int, float)):
        try:
            return math.isclose(float(value), setting, rel_tol=1e-6)
        except (TypeError, ValueError):
            return False
    return str(value) == setting or setting == "" or value == "auto"


def is_printed(run):
    """Whether epochs.csv ends with the epochs' lines in output.txt, which have no hash. A run may have none."""
    if not os.path.exists(path(run, "output.txt")):
        return True
    lines = re.findall("^epoch=.*", read_report(path(run, "output.txt")), re.M)
    printed = [",".join(re.findall(r"=(\S+)", line)) for line in lines]
    rows = [line.rpartition(",")[0] for line in read_report(path(run, "epochs.csv")).splitlines()]
    return rows[len(rows) - len(printed):] == printed


def check_printed(run):
    """run.json against the lines Settings, Machine and Build in output.txt; a run with --quiet has none."""
    text = read_report(path(run, "output.txt")) if os.path.exists(path(run, "output.txt")) else ""
    last = {word: line for word, line in re.findall(r"^(Settings|Machine|Build): (.*)", text, re.M)}
    where = path(run, "run.json")
    for name, value in re.findall(r"--([a-z-]+) (\S+)", last.get("Settings", "")):
        setting = run.settings.get(name)
        if name not in ("out", "data", "load", "checkpoint", "trace") and setting is not None and \
                not same_value(setting, value):
            yield finding(where, f"--{name} {value}, as output.txt says", f"{setting} in its settings",
                          "was it edited? Run it again")
    for word, name in (("Job Wall-clock time", "wall_s"), ("CPU Utilized", "cpu_s")):
        for h, m, s in re.findall(rf"^{word}: (\d+):(\d+):(\d+)", text, re.M)[-1:]:
            printed = 3600 * int(h) + 60 * int(m) + int(s)
            if abs(printed - run.resources[name]) > 1:
                yield finding(where, f"about {printed} s as {name}, as output.txt says", run.resources[name])
    for word, fact in (("Machine", run.machine["cpu"]), ("Machine", f"{run.machine['cores']} usable cores"),
                       ("Build", run.build["compiler"]), ("Build", f"commit {run.build['commit']}")):
        if fact not in last.get(word, fact):
            yield finding(where, f"{word}: {last[word]}, as output.txt says", fact, "was it edited? Run it again")


def advice_on_times(run):
    """What to do if times do not fit each other."""
    if run.settings.get("resume"):
        return ("it was resumed within an epoch, whose seconds are only those since then: for times, run it without "
                "--resume")
    return "run it again"


def check_epochs(run):
    """The rows of epochs.csv: consistent with each other, what the run printed, its predictions, wall time and CPU
    time."""
    where = path(run, "epochs.csv")
    for e in run.epochs:
        if not is_timed(e):
            yield finding(where, f"img_per_s x seconds = {e['images']} images in epoch {e['epoch']}",
                          f"{e['img_per_s']} x {e['seconds']}", advice_on_times(run))
        for name in filter(lambda name: name != "weight_hash", EPOCHS):
            if not is_finite(e[name]):
                yield finding(where, f"a finite {name} in epoch {e['epoch']}", e[name],
                              SMALLER_LR if name.endswith("_loss") else "was it edited? Run it again")
    if not is_printed(run):
        yield finding(where, "the epochs that output.txt has", "others")
    total, wall = sum(e["seconds"] + e["test_seconds"] for e in run.epochs), run.resources["wall_s"]
    cpu, cores = run.resources["cpu_s"], run.machine["cores"]
    where = path(run, "run.json")
    if wall * 1.01 + 0.01 < total and not run.settings.get("resume"):
        yield finding(where, f"a wall time of at least {total:.3f} s, the epochs' sum", f"{wall} s")
    if cpu > 1.02 * cores * wall + 0.1:
        yield finding(where, f"at most {cores} cores x {wall} s of CPU time", f"{cpu} s")
    counts = read_confusion(run)
    images = [row[0] for row in read_csv(run, "predictions.csv", ["image", "epoch"]) if row[1] == 0]
    limit = run.settings.get("limit-test") or len(images)
    if sorted(images) != list(range(len(images))) or len(images) != limit:
        yield finding(path(run, "predictions.csv"), f"the test images 0 to {limit - 1}, each once",
                      f"{len(images)} rows")
    share = 100 * sum(row[i] for i, row in enumerate(counts)) / sum(map(sum, counts))
    if abs(share - run.accuracy) > 0.006:
        yield finding(path(run, "epochs.csv"), f"the accuracy of predictions.csv, {share:.2f} %", f"{run.accuracy} %")


def check_steps(run):
    """Each epoch of steps.csv against epochs.csv: steps of each rank, images, loss, seconds and their phases."""
    where = path(run, "steps.csv")
    rows = read_csv(run, "steps.csv", ["epoch", "step", "rank", "images", "seconds", "loss", *STEP_PHASES])
    epochs = by(rows, lambda row: row[0])
    for e in run.epochs:
        ranks = list(by(epochs.get(e["epoch"], []), lambda row: row[2]).values())
        shard, batch = math.ceil(e["images"] / run.world), run.batch
        if run.mode == "dp":  # the master distributes all images
            shard, batch = e["images"], run.global_batch
        counts, steps = [len(rank) for rank in ranks], math.ceil(shard / batch)
        images, seconds = sum(row[3] for rank in ranks for row in rank), e["seconds"]
        total = sum(row[4] for rank in ranks for row in rank if row[2] == 0)  # rank 0 times the epoch
        if counts != [steps] * run.world:
            yield finding(where, f"{steps} steps = ceil({shard} images / batch {batch}), ranks: "
                          f"{run.world}, in epoch {e['epoch']}", counts)
        if not run.settings.get("max-steps") and run.parallel["iterations"] != steps:
            yield finding(path(run, "run.json"), f"{steps} iterations, the steps of epoch {e['epoch']}",
                          run.parallel["iterations"])
        if images != e["images"]:
            yield finding(where, f"{e['images']} images in epoch {e['epoch']}, as in epochs.csv", f"{images:g}")
        if not 0.9 * seconds - 0.05 <= total <= 1.01 * seconds + 0.005:
            yield finding(where, f"{seconds} s in all steps of rank 0 in epoch {e['epoch']}, as in epochs.csv",
                          f"{total:.3f} s", advice_on_times(run))
        loss = sum(row[3] * row[5] for rank in ranks for row in rank) / max(images, 1)
        if is_finite(e["train_loss"]) and not abs(loss - e["train_loss"]) <= 1e-3 * e["train_loss"] + 6e-5:
            yield finding(where, f"the loss {e['train_loss']} in epoch {e['epoch']}, as in epochs.csv",
                          f"{loss:.4f}, the mean of its steps")
    for epoch, step, _, _, _, loss, *_ in rows:
        if not is_finite(loss):
            yield finding(where, f"a finite loss in epoch {epoch:g}, step {step:g}", loss, SMALLER_LR)
            break
    for epoch, step, _, _, seconds, _, *phases in rows:
        if not abs(seconds - sum(phases)) <= 1e-5:  # nor NaN
            yield finding(where, f"seconds = sum of the phases in epoch {epoch:g}, step {step:g}",
                          f"{seconds} and {sum(phases):.6f}")
            break


def check_layer_times(run):
    """GFLOP/s x saved x time = passes x MFLOP x images: forward, and two passes backward, one in the first layer, whose
    input needs no gradient. percent_of_peak refers to the same limit in all rows with the same bound; where the peak
    was not measured, no row has a bound."""
    where = path(run, "layers.csv")
    if not os.path.exists(where) or run.emulated:
        return
    images = min(run.batch, math.ceil(run.epochs[0]["images"] / run.world))
    rows = read_csv(run, "layers.csv", ["layer", "mflop", "forward_ms", "backward_ms", "gflops", "saved"])
    for layer, mflop, forward, backward, gflops, saved in rows:
        ms = forward + backward
        if not ms > 0:
            yield finding(where, f"a time above 0 in row {layer}", ms)
        elif mflop > 0.1 and gflops > 0:
            passes = gflops * saved * ms / (mflop * images)
            rounding = 0.02 + 0.01 / gflops + 1e-4 / ms
            if not min(abs(passes - 2) / 2, abs(passes - 3) / 3) <= rounding:
                yield finding(where, f"2 or 3 passes = gflops x saved x ms / (mflop x {images} images) in row {layer}",
                              f"{passes:.2f}")
    limited = read_csv(run, "layers.csv", ["layer", "bound", "percent_of_peak", "gflops", "gb_per_s"])
    yield from check_limits(where, len(rows), limited)


def check_limits(where, count, limited):
    """The rows of layers.csv that have a bound, of `count` rows."""
    limits = {}
    if len(limited) not in (0, count):
        yield finding(where, "a bound and a percentage in all rows, or in none", f"them in {len(limited)} of {count}")
    for layer, bound, percent, gflops, gb_per_s in limited:
        if bound not in ("compute", "memory"):
            yield finding(where, f"bound compute or memory in row {layer}", bound)
        elif not 0 <= percent < 1000:
            yield finding(where, f"percent_of_peak from 0 to 1000 in row {layer}", percent)
        elif percent >= 10:  # smaller ones are rounded too coarsely
            peak = 100 * (gflops if bound == "compute" else gb_per_s) / percent
            first = limits.setdefault(bound, peak)
            if not abs(peak - first) <= 0.03 * first:
                yield finding(where, f"percent_of_peak of {first:.4g} in row {layer}, as in the other rows",
                              f"of {peak:.4g}")


def check_layers(run):
    """percent_of_peak counts the operations that are executed. For forward alone only the definition's
    operations are known, of which Winograd's algorithm needs fewer."""
    if not os.path.exists(path(run, "layers.csv")):
        return
    images = min(run.batch, math.ceil(run.epochs[0]["images"] / run.world))
    for layer, kind, bound, percent, gflops, gb_per_s, mflop, forward, backward in read_csv(
            run, "layers.csv", ["layer", "kind", "bound", "percent_of_peak", "gflops", "gb_per_s", "mflop",
                                "forward_ms", "backward_ms"]):
        most = 100 * NOISE
        limited = bound == "compute" or gb_per_s * (forward + backward) > CACHED_MB
        found = {f"{layer}, bound by {bound}": (percent, most)}
        if bound == "compute" and min(gflops, forward) > 0:  # forward alone; MFLOP a ms are GFLOP/s
            found[f"forward of {layer}"] = (percent / gflops * mflop * images / forward,
                                            most * WINOGRAD.get(kind.partition(" padding")[0], 1))
        for what, (share, limit) in found.items():
            if share > limit and limited and not run.emulated:
                yield finding(path(run, "layers.csv"), f"{what}: at most {limit:.0f} % of the measured peak",
                              f"{share:.0f} %", "measure again while no other program runs")


def check_devices(run):
    """Whether each rank had a device of its own, according to the lines `Rank 0: host, GPU, uuid`."""
    where, cores = path(run, "output.txt"), run.machine["cores"]
    if run.kind == "cpu" and run.settings["oversubscribe"] and run.world > cores:
        yield finding(path(run, "run.json"), f"a core for each of {run.world} replicas", f"{cores} cores",
                      "replicas that share a core do not measure scaling: delete the folder")
    if run.world == 1 or run.kind != "gpu":
        return
    if not os.path.exists(where):
        yield finding(where, f"what the run printed, with its {run.world} GPUs", "no such file",
                      "save the output of the run there, as make study does")
        return
    places = re.findall(r"^Rank \d+: ([^,]*),.*, (GPU-[-0-9a-f]+)$", read_report(where), re.M)
    if len(places) != run.world or len(set(places)) != run.world:
        yield finding(where, f"{run.world} ranks on as many GPUs", f"{len(set(places))} different GPUs",
                      "request more GPUs, and remove --oversubscribe")


def check_nature(run):
    """Whether the run trains, on the device that it records."""
    where = path(run, "run.json")
    if run.settings.get("dry-run"):
        yield finding(where, "a run that trains", "--dry-run", "delete the folder")
    program = os.path.basename(run.command[0])
    device = run.machine["device"]
    if not run.emulated and ("emulated" in device or device != "cpu" and re.search("-(emu|count)$", program)):
        yield finding(where, '"emulated": true, as its device or program says', "false",
                      "times of the emulator mean nothing: run it on a device")


# ---- All runs together


def check_complete(folder):
    """The run in a folder, or None, and the findings if it is not a complete one."""
    where = os.path.join(folder, "run.json")
    try:
        run = read_run(folder)
    except SystemExit as why:
        return None, [str(why).partition(": error: ")[2]]
    if run is None:
        return None, [finding(where, "a run.json", "none", "run it again, or delete the folder")]
    if run.settings.get("eval"):  # it has not trained: no measurement
        trained = [e["epoch"] for e in run.epochs if e["images"] > 0]
        found = finding(where, "no epoch with images, as the setting eval says", len(trained))
        return None, [found] * bool(trained)
    if run.status != "complete":
        return None, [finding(where, "status complete", run.status, "run it again, or delete the folder")]
    if len(run.epochs) != run.settings["epochs"]:
        return None, [finding(where, f"all {run.settings['epochs']} epochs", len(run.epochs),
                              "time a whole run")]
    return run, []


def check_measured(root, runs):
    if all(run.emulated or run.provenance != "measured" for run in runs):
        yield finding(root, "runs that you measured", "emulated or supplied ones only",
                      "you need measurements of your own: train at least on the CPU")


def check_outputs(root, runs):
    """study.py writes output.txt beside each run, which other rules compare with it."""
    for run in runs:
        named = any(re.fullmatch(study.names, os.path.basename(run.folder)) for study in KINDS.values())
        if named and run.provenance == "measured" and not os.path.exists(path(run, "output.txt")):
            yield finding(path(run, "output.txt"), "what the run printed", "no such file")


def check_hours(root, runs):
    """hours.csv, which `study.py hours` writes, against the runs at any depth."""
    where = os.path.join(root, "hours.csv")
    if not os.path.exists(where):
        return
    folders = [folder for some in find_folders(root).values() for folder in some]
    with contextlib.redirect_stderr(None):  # it says which runs are not complete
        expected = table_lines(HOURS, hours_rows(complete(folders), root))
    yield from compare_table(where, HOURS, HOURS, expected, "study.py hours writes it again")


def check_copies(root, runs):
    """Two runs never have the same times to the microsecond in many steps, not even with the same seed."""
    owners = {}
    for run in runs:
        with contextlib.suppress(OSError, IndexError), open(path(run, "steps.csv")) as f:
            times = set(enumerate(line.split(",", 6)[6] for line in list(f)[1:]))  # the columns from seconds on
            shared = Counter(other for row in times for other in owners.get(row, ()))
            for row in times:
                owners.setdefault(row, []).append(run.folder)
            for other, count in shared.items():
                if count >= max(min(3, len(times)), COPIED * len(times)):
                    yield finding(path(run, "steps.csv"), "times of its own", "all those of " * (count == len(times))
                                  + f"{count} of {len(times)} those of " * (count < len(times)) + other,
                                  "delete the copy and run it again")
                    break


def check_same(root, runs):
    """Besides device, batch and seed, runs may differ in one thing at a time: else no cause is known."""
    def differing(pair):
        return differences(*pair, free_settings(*pair))
    first, *left = [group[0] for group in variants(runs)]
    linked = [first]
    while left:
        a, b = nearest = min(((a, b) for a in linked for b in left), key=lambda pair: len(differing(pair)))
        if len(differing(nearest)) > 1:
            yield finding(b.folder, f"one difference at most from {a.folder}, besides device, batch and seed",
                          ", ".join(f"{name} {old!r} and {new!r}" for name, old, new in differing(nearest)),
                          "change one thing at a time, or move it to another folder of run folders")
        linked.append(b)
        left.remove(b)


def check_repeats(root, runs):
    for row in timing_rows(runs):
        seeds = len({run.seed for run in row["runs"]})  # the same training twice shows no other accuracy
        if seeds < REPEATS and row["provenance"] == "measured":
            which = f"{row['label']}, global batch {row['global_batch']} {row['variant']}".rstrip()
            yield finding(root, f"{REPEATS} repeats or more of {which}", seeds,
                          f"too few to see the spread: add runs with other seeds (make: REPEATS={REPEATS})")


def check_spread(root, runs):
    for row in timing_rows(runs):
        if row["provenance"] == "measured" and len(row["runs"]) >= REPEATS and row["ci95"] > WIDEST * row["seconds_mean"]:
            which = f"{row['label']}, global batch {row['global_batch']} {row['variant']}".rstrip()
            yield finding(root, f"a 95 % interval of +-{WIDEST:.0%} of the mean or less ({which})",
                          f"+-{row['ci95'] / row['seconds_mean']:.0%}",
                          "was the machine busy? Repeat all runs of that row, not only the slow ones")


def check_grid(root, runs):
    """Each device has run each batch, so that the columns of a table can be compared."""
    for group in variants(runs):
        rows = by(make_rows(group), lambda row: row["label"])
        batches = {device: {row["global_batch"] for row in some} for device, some in rows.items()}
        for device, found in batches.items():
            missing = sorted(set().union(*batches.values()) - found)
            if missing:
                yield finding(root, f"runs of {device} with the batches of the other devices",
                              f"none with {', '.join(map(str, missing))}", "the same make study adds them")


def check_speedups(root, runs):
    for group in by(timing_rows(runs), lambda r: r["variant"]).values():
        for row in scaling_rows(group):
            if (row.get("speedup") or 0) > LARGEST_SPEEDUP * row["devices"]:
                yield finding(root, f"a speed-up of at most {LARGEST_SPEEDUP} x {row['devices']} devices "
                              f"({row['scaling']}, {row['label']}, global batch {row['global_batch']})",
                              f"{row['speedup']:.2f}", "find what else differs; was the machine busy?")
            if row["devices"] > 1 and (row.get("speedup") or 1) < LEAST_SPEEDUP:
                yield finding(root, f"a speed-up of at least {LEAST_SPEEDUP} on {row['devices']} devices "
                              f"({row['scaling']}, {row['label']}, global batch {row['global_batch']})",
                              f"{row['speedup']:.2f}", "was the machine busy? Replicas wait for the slowest of them")


def compare_table(where, columns, compared, expected, again):
    """Finds the first line of a CSV file that is not as expected, in the columns that are compared."""
    with open(where, newline="", encoding="utf-8", errors="replace") as f:
        found = list(csv.reader(f))
    for number, (old, new) in enumerate(zip(found + [[]] * len(expected), expected), 1):
        cells = [(name, a, b) for name, a, b in zip(columns, old, new) if a != b and name in compared]
        if cells or len(old) != len(new):
            name, a, b = cells[0] if cells and number > 1 else ("", ",".join(old), ",".join(new))
            yield finding(f"{where}, line {number}", f"{name} {b or 'empty'}".strip(), a or "none",
                          f"it contradicts the run folders: {again}")
            break
    if len(found) > len(expected):
        yield finding(where, f"{len(expected)} lines", len(found), again)


def check_table(study, compared=None):
    """The rule that the table of a study is there and agrees with the runs, in the columns `compared` or in all."""
    def rule(root, runs):
        where, again = os.path.join(root, study.table), f"{study.target} writes it again"
        if not os.path.exists(where):
            yield finding(where, "the table of this study", "no such file", f"{study.target} writes it")
            return
        expected = table_lines(study.columns, study.rows(runs))
        yield from compare_table(where, study.columns, compared or study.columns, expected, again)
    return rule


def study_rows(runs):
    rows = make_rows(runs)
    with contextlib.redirect_stdout(None):  # its notes about missing speed-ups
        add_speedups(rows)
    return rows


def plots_of(root):
    folder = os.path.join(root, "plots")
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return [os.path.join(folder, name) for name in names if name.endswith(".png")]


def check_plots(root, runs):
    if not plots_of(root):
        yield finding(os.path.join(root, "plots"), "plots", "none", make_report(root))


def check_plots_are_new(root, runs):
    newest = max(os.path.getmtime(path(r, "run.json")) for r in runs)
    for plot in plots_of(root):
        if os.path.getmtime(plot) < newest:
            yield finding(plot, "a plot of the present runs", "one older than a run", make_report(root))


# ---- The report


def check_report(root, runs):
    """Questions in report.md without an answer; and what make report generates is what it would write again."""
    source = os.path.join(root, "report.md")
    if not os.path.exists(source):
        return
    for number, line in enumerate(read_report(source).splitlines(), 1):
        if "TODO:" in line:
            yield finding(f"{source}, line {number}", "your answer", line.strip()[:60] + "...",
                          "replace the question by it")
    for name, text in generated_files(root, make_tables(root, runs)).items():
        where = os.path.join(root, name)
        found = read_report(where) if os.path.exists(where) else "no such file"
        yield from check_generated(root, where, text.splitlines(), found.splitlines())


def check_generated(root, where, expected, found):
    """The first line that is not as generated from report.md and the present run folders, if there is one."""
    for number, (new, old) in enumerate(itertools.zip_longest(expected, found, fillvalue=""), 1):
        if new.strip() != old.strip():
            yield finding(f"{where}, line {number}", f"the generated line {new.strip()[:200]!r}",
                          repr(old.strip()[:200]), f"{make_report(root)} writes it again")
            break


def check_outline(root, runs):
    """What report.md has to contain."""
    where = os.path.join(root, "report.md")
    if not os.path.exists(where):
        yield finding(where, "your report", "no such file", make_report(root))
        return
    text = read_report(where)
    for name in SECTIONS:
        if not re.search(f"^#+ *{name}", text, re.M):
            yield finding(where, f"the heading {name}", "none", "add it and its section")
    for name in ("settings", "machine", "timing"):
        if place(name) not in text:
            yield finding(where, f"the table {name}, from the run folders", "none", f"write a line {place(name)} there")


# ---- Which rule applies to what

TIMING, SCALED, LOADED, ABLATED, SEPARATE = ("timing study", "scaling study", "worker sweep", "ablation",
                                             "separate runs")
ABLATED_COLUMNS = ["rung", "img_per_s", "seconds", "accuracy", "accuracy_sd", "emulated", "times_first",
                   "times_previous", "repeats", "commit"]  # options and date are not in the run folders


def rung_rows(runs):
    """The rows of ablation.csv, from the names that study.py gives to run folders."""
    rungs = {}
    for run in runs:
        found = re.search(r"-rung(\d+)-(.+)-r\d+$", run.folder)
        if found:
            rungs.setdefault((int(found[1]), found[2]), []).append(run)
    return ablation_rows([(SimpleNamespace(name=name, adds=""), rungs[number, name]) for number, name in sorted(rungs)])


# The table that each study has, and the names that study.py gives to its run folders. An ablation is known by its table
# alone: (?!) matches no name.
KINDS = {
    TIMING: SimpleNamespace(target="make study", table="study.csv", columns=COLUMNS, rows=study_rows,
                            names=r".*-(cpu|single|multi\d+)(-emulated)?-b\d+-r\d+"),
    SCALED: SimpleNamespace(target="make study-scaling", table="scaling.csv", columns=SCALING,
                            rows=lambda runs: scaling_rows(make_rows(runs)),
                            names=r".*-(gpus|replicas|ranks)\d+(-emulated)?-(b|each)\d+-r\d+"),
    LOADED: SimpleNamespace(target="make study-workers", table="workers.csv", columns=WORKERS,
                            rows=workers_rows, names=r".*-b\d+-workers\d+-r\d+"),
    ABLATED: SimpleNamespace(target="make ablation", table="ablation.csv", columns=ABLATION, rows=rung_rows,
                             names="(?!)", compared=ABLATED_COLUMNS)}
STUDIES = {TIMING, SCALED, LOADED}
ALL = {*KINDS, SEPARATE}


def each(check):
    """The rule that each run passes this check."""
    def rule(root, runs):
        for run in runs:
            try:
                yield from check(run)
            except Missing as why:
                yield f"{why}; run it again"
            except DAMAGES as why:
                yield finding(path(run, "run.json"), "what ./cnn --out writes", repr(why))
    return rule


# Before them, check_complete() applies to all.
RULES = [
    (each(check_entries), ALL),
    (each(check_command), ALL),
    (each(check_nature), ALL),
    (each(check_printed), ALL),
    (each(check_epochs), ALL),
    (check_outputs, STUDIES),
    (check_hours, ALL),
    (each(check_steps), ALL),
    (each(check_layer_times), ALL),
    (each(check_layers), ALL),
    (each(check_devices), ALL),
    (check_copies, ALL),
    (check_measured, STUDIES),
    (check_same, STUDIES),
    (check_repeats, STUDIES),
    (check_spread, {TIMING, SCALED}),
    (check_grid, {TIMING}),
    (check_speedups, {TIMING, SCALED}),
    *((check_table(study, getattr(study, "compared", None)), {kind}) for kind, study in KINDS.items()),
    (check_plots, {TIMING, SCALED}),
    (check_plots_are_new, ALL),
    (check_report, ALL),
    (check_outline, {TIMING, SCALED}),
]


def kinds_of(root, folders):
    """The kinds of study that a folder of run folders is; usually one."""
    names = [os.path.basename(folder) for folder in folders if folder != root]
    return [kind for kind, study in KINDS.items() if os.path.exists(os.path.join(root, study.table))
            or any(re.fullmatch(study.names, name) for name in names)]


def findings(root, folders, kinds):
    """Those of the run folders that are directly in root."""
    runs = []
    for folder in folders:
        run, why = check_complete(folder)
        yield from why
        runs += [run] if run else []
    if not runs:
        return
    for rule, applies in RULES:
        if applies & set(kinds):
            yield from rule(root, runs)
    supplied = [r for r in runs if r.provenance != "measured"]
    for what, those in (("supplied, not your own measurements", supplied),
                        ("emulated, their times mean nothing", [r for r in runs if r.emulated]),
                        ("built from uncommitted sources", list(filter(is_dirty, runs)))):
        if those:
            print(f"Note: {what}: {', '.join(os.path.relpath(r.folder, root) for r in those)}")


def main(root):
    if not os.path.isdir(root):
        print(f"verify: error: {root}: expected a folder of run folders, found none; make study writes one",
              file=sys.stderr)
        sys.exit(2)
    count, groups = 0, find_folders(root)
    if not groups:
        count = 1
        print(finding(root, "folders of complete runs", "none",
                      "make study writes them, and so does ./cnn --out"))
    for folder, members in groups.items():
        kinds = kinds_of(folder, members) or [SEPARATE]
        print(f"{folder}: {len(members)} run folders, checked as {' and '.join(kinds)}")
        for line in findings(folder, members, kinds):
            print(line)
            count += 1
    print(f"Findings: {count}" if count else f"Nothing found in {root} that is missing or implausible")
    sys.exit(1 if count else 0)


if __name__ == "__main__":
    start(main, __doc__, "what make study and make report have written")
