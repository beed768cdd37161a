#!/usr/bin/env python3
"""Writes DIR/report.md: tables and plots from the run folders in DIR, and questions for you to answer.

    labs/tools/report.py runs/first     `make report RUNS=runs/first` draws the plots first

The report starts as a copy of report_template.md. The parts between <!-- begin NAME --> and
<!-- end NAME --> are generated from the run folders, and only these are updated when you run this again.
All other text is yours: replace each `> TODO:` with your answer, and add what you like. If your study does not
need a section, delete it together with its markers. To restore it, write the two markers where you want it.
If a marker is damaged or the text between two markers was edited, report.md is not changed and
report.new.md is written instead.

Runs that differ in more than device, batch and seed (--workers, --kernels, the compiler's flags, ...) are
not averaged: they are listed in separate rows with their differences. A speed-up compares rows that agree.
A run made before a change of the source has the same settings as a run made after it. The questions of a lab
name its folder, <!-- other source: lab02-textbook -->, and it has a row of its own.

`make report LAB=3` does the same for the runs of lab 3, in reports/lab03, with the questions of that lab,
labs/lab03/questions.md.

report.md is then converted to report.html, a single file with the plots inside, to read in a browser and to
print; for this Python needs the package markdown-it-py: pip install -r labs/requirements.txt, or on Debian
apt-get install python3-markdown-it.
"""
import contextlib
import csv
import functools
import hashlib
import os
import re
import sys
import textwrap

from run_folders import (COLUMNS_DIFFER, REPEATS_DIFFER, SCALING, Missing, add_speedups, by, by_value,
                         differences, WORKERS, facts, fail, is_dirty, make_rows, read_confusion, read_csv,
                         read_runs, scaling_rows, start, summary, workers_rows)

FREE = REPEATS_DIFFER | COLUMNS_DIFFER
STEP_PARTS = ["load_s", "copy_s", "forward_s", "backward_s", "optimizer_s", "exposed_comm_s", "other_s"]
NOTHING = "No run folder has what this table needs."
MOST_TABLES = 4  # of the same name, such as layers.csv, from several run folders


# ---- Rows


def questions_of(root):
    """The path of the questions of the lab after which the folder is named."""
    tools = os.path.dirname(os.path.abspath(__file__))
    return os.path.join(tools, "..", os.path.basename(os.path.abspath(root)), "questions.md")


@functools.lru_cache
def other_sources(root):
    """Names of the run folders in root that another version of the source has written."""
    path = questions_of(root)
    return re.findall(r"<!-- other source: (\S+) -->", read_report(path)) if os.path.exists(path) else []


def other_source(run):
    """The name of the run folder if another version of the source has written it, else None."""
    root, name = os.path.split(run.folder)
    return name if name in other_sources(root) else None


def variants(runs):
    """Groups of runs that differ in nothing but device, batch and seed."""
    groups = []
    for run in runs:
        for group in groups:
            like = {r.kind: r for r in reversed(group)}  # one of each kind, as devices of a kind must agree
            if other_source(group[0]) == other_source(run) and not any(
                    differences(other, run, free_settings(other, run)) for other in like.values()):
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def free_settings(a, b):
    """What may differ between two runs of a variant; replicas on the CPU divide --threads among them."""
    return FREE | ({"threads"} if max(a.world, b.world) > 1 else set())


def show(value):
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


def show_variant(name, run, runs):
    """One of its settings; of the compiler's flags only those that not all runs have."""
    if name == "flags":
        common = set.intersection(*(set(r.build["flags"].split()) for r in runs))
        return " ".join(f for f in run.build["flags"].split() if f not in common) or "no flag of its own"
    return f"{name} {show(facts(run).get(name))}"


def timing_rows(runs):
    """The rows of study.csv, variant by variant; `variant` says what is not the same in all."""
    groups, rows = variants(runs), []
    names = list(dict.fromkeys(name for a in groups for b in groups for name, _, _ in
                               differences(a[0], b[0], FREE | {"model"})))
    for group in groups:
        some, other = make_rows(group), other_source(group[0])
        with contextlib.redirect_stdout(None):  # its notes about missing speed-ups: the table shows them
            add_speedups(some)
        for row in some:
            kinds = dict.fromkeys("emulated" if r.emulated else r.provenance for r in row["runs"])
            differing = [show_variant(k, group[0], runs) for k in names] + [f"source of {other}"] * bool(other)
            rows.append(dict(row, variant=", ".join(differing), provenance=", ".join(kinds)))
    return rows


# ---- Tables


def table(titles, rows):
    """In Markdown; rows are dicts with the keys of titles."""
    def cell(value):
        if isinstance(value, float):
            return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
        return "" if value is None else str(value)
    texts = [list(titles.values()), ["---"] * len(titles)] + [[cell(r.get(c)) for c in titles] for r in rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in texts)


def csv_tables(root, name, folders):
    """The CSV files of that name as Markdown tables."""
    paths, texts = [os.path.join(f, name) for f in folders if os.path.exists(os.path.join(f, name))], []
    for path in paths[:MOST_TABLES]:
        with open(path, newline="", encoding="utf-8", errors="replace") as f:
            lines = list(csv.DictReader(f))
        caption = f"From `{os.path.relpath(path, root)}`:\n\n"
        texts.append(caption + table({c: c for c in (lines or [{}])[0]}, lines))
    if len(paths) > MOST_TABLES:
        texts.append(f"{len(paths) - MOST_TABLES} more run folders have a {name}.")
    return "\n\n".join(texts)


def first_runs(rows):
    return [row["runs"][0].folder for row in rows]


def picture(root, name, shows):
    there = os.path.exists(os.path.join(root, "plots", name + ".png"))
    return f"\n\n![{shows}](plots/{name}.png)" if there else ""


def make_settings(root, runs, rows):
    equal, differing = [], []
    for name in (k for k in runs[0].settings if k not in ("out", "data")):
        values = sorted({show(r.settings.get(name)) for r in runs}, key=by_value)
        if len(values) > 1:
            differing.append(f"- `--{name}`: {', '.join(v or 'none' for v in values)}")
        elif values[0]:
            equal.append(f"--{name} {values[0]}")
    builds = dict.fromkeys("- {compiler}, `{flags}`, commit {commit}".format(**r.build) for r in runs)
    notes = ["Some runs were built from sources that were not committed."] * any(map(is_dirty, runs))
    commands = dict.fromkeys(" ".join(r["runs"][0].command) for r in rows)
    return "\n\n".join(
        [f"{len(runs)} runs. Equal in all of them:",
         fence([textwrap.fill(" ".join(equal), break_on_hyphens=False)]),
         "What differs:", "\n".join(differing or ["- nothing"]), "Built with:", "\n".join(builds), *notes,
         "Commands (the first repeat of each row):", fence(commands)]) + picture(
             root, "augment", "some images, and what --augment makes of them")


def fence(lines):
    return "\n".join(["```", *lines, "```"])


def make_machine(root, runs, rows):
    titles = dict(host="host", cpu="CPU", cores="usable cores", memory="memory in GB", device="device",
                  driver="driver", threads="threads", peak="measured peak, GFLOP/s", sd="its sd", runs="runs",
                  jobs="Slurm jobs")
    lines = []
    for group in by(runs, lambda r: (*map(r.machine.get, titles), r.settings["threads"])).values():
        card = group[0].machine
        peaks = [r.machine["peak_gflops"] for r in group if r.machine["peak_gflops"] is not None]
        peak, sd, _ = summary(peaks) if peaks else (None, None, None)
        lines.append(dict(card, memory=card.get("memory_bytes", 0) / 1e9, peak=peak, sd=sd, runs=len(group),
                          threads=group[0].settings["threads"],
                          jobs=len({r.machine.get("slurm") for r in group} - {None})))
    return table(titles, lines)


def make_timing(root, runs, rows):
    titles = dict(label="device", model="model", batch="batch on each", global_batch="global batch",
                  repeats="repeats", seconds_mean="seconds, mean", seconds_sd="sd", ci95="95 % interval, +-",
                  img_per_s="img/s", speedup="speed-up over cpu", accuracy_mean="accuracy in %",
                  accuracy_sd="its sd", provenance="provenance")
    if all(r["runs"][0].kind == "cpu" and r.get("speedup") in (None, 1) for r in rows):  # over itself
        del titles["speedup"]
    if any(r["variant"] for r in rows):
        titles = dict(variant="what differs", **titles)
    return table(titles, rows) + picture(root, "study", "time and accuracy") + picture(root, "loss", "loss")


def make_steps(root, runs, rows):
    lines = []
    for row in rows:
        run, later = row["runs"][0], [e["seconds"] for r in row["runs"] for e in r.epochs[1:]]
        line = dict(row, first=summary([r.epochs[0]["seconds"] for r in row["runs"]])[0],
                    later=summary(later)[0] if later else None, steps=run.parallel.get("iterations"))
        with contextlib.suppress(Missing):
            steps = [s for s in read_csv(run, "steps.csv", STEP_PARTS + ["warmup"]) if not s[-1]]
            if steps:
                line.update((name, 1e3 * summary(times)[0]) for name, times in zip(STEP_PARTS, zip(*steps)))
        lines.append(line)
    titles = dict(label="device", global_batch="global batch", steps="steps per epoch",
                  first="first epoch, s", later="later ones, s",
                  **{name: name[:-2].replace("_", " ") + ", ms" for name in STEP_PARTS})
    if any(r["variant"] for r in rows):
        titles = dict(variant="what differs", **titles)
    return ("Epochs are means over repeats. The parts are of a step in the first repeat, without warm-up, "
            "averaged over steps and devices:\n\n" + table(titles, lines))


def make_scaling(root, runs, rows):
    lines = []
    for some in by(rows, lambda r: r["variant"]).values():
        groups = by(scaling_rows(some, ("ddp", "dp")), lambda r: (r["scaling"], r["device"], r["model"], r[
            "global_batch" if r["scaling"] == "strong" else "batch"]))
        lines += [r for group in groups.values() if len(group) > 1 for r in group]
    if not lines:
        return ""
    columns = [c for c in SCALING if c != "emulated"] + ["provenance"]
    titles = {c: c.replace("_", " ") for c in columns}
    return table(titles, lines) + picture(root, "scaling", "speed-up by devices")


def make_workers(root, runs, rows):
    text = csv_tables(root, "workers.csv", [root])
    swept = [r for r in runs if sum(not differences(r, o, FREE | {"workers"}) for o in runs) > 1]
    if not text and len({r.settings["workers"] for r in swept}) > 1:
        text = table({c: c.replace("_", " ") for c in WORKERS[:6]}, workers_rows(swept))
    return (text + picture(root, "workers", "images per second by workers")).strip()


def make_timeline(root, runs, rows):
    return picture(root, "timeline", "what host, device and loader do in the steps of a trace").strip()


def make_precision(root, runs, rows):
    return picture(root, "precision", "how much the losses deviate from those in fp32").strip()


def make_ablation(root, runs, rows):
    """Of this folder and of those in it, such as the two of lab 9."""
    texts = []
    for folder in [root, *sorted(e.path for e in os.scandir(root) if e.is_dir())]:
        text = csv_tables(root, "ablation.csv", [folder])
        there = os.path.exists(os.path.join(folder, "plots", "ablation.png"))
        name = os.path.relpath(os.path.join(folder, "plots", "ablation.png"), root)
        texts += [text + f"\n\n![speed and accuracy of each rung]({name})" * there] if text else []
    return "\n\n".join(texts)


def make_hours(root, runs, rows):
    return csv_tables(root, "hours.csv", [root])


def make_layers(root, runs, rows):
    text = csv_tables(root, "layers.csv", first_runs(rows))
    return text and text + picture(root, "roofline", "layers and the limits of the machine")


def make_profile(root, runs, rows):
    return csv_tables(root, "profile.csv", first_runs(rows))


def make_classes(root, runs, rows):
    known = [r for r in runs if os.path.exists(os.path.join(r.folder, "predictions.csv")) and not r.emulated]
    if not known:
        return ""
    best = max(known, key=lambda r: r.accuracy)
    try:
        counts = read_confusion(best)
    except Missing as why:
        fail(best.folder, "predictions as ./cnn writes them", why, "run it again")
    lines = [dict(name=name, accuracy=100 * row[i] / sum(row) if any(row) else None)
             for i, (name, row) in enumerate(zip(best.classes, counts))]
    return (f"Of `{os.path.relpath(best.folder, root)}`, the run with the best accuracy:\n\n"
            + table(dict(name="class", accuracy="accuracy in %"), lines)
            + picture(root, "confusion", "confusion matrix")
            + picture(root, "samples", "test images with what was predicted"))


MAKERS = dict(settings=make_settings, machine=make_machine, timing=make_timing, steps=make_steps,
              scaling=make_scaling, hours=make_hours, ablation=make_ablation, workers=make_workers,
              layers=make_layers, profile=make_profile, timeline=make_timeline, precision=make_precision,
              classes=make_classes)
MARKER = re.compile(rf"<!-- (begin|end) ({'|'.join(MAKERS)})(?: ([0-9a-f]{{8}}))?\b[^>]*-->\s*")


def make_blocks(root, runs):
    """Name and text of each generated part; "" if the runs lack the data for it."""
    rows = timing_rows(runs)
    return {name: maker(root, runs, rows) for name, maker in MAKERS.items()}


# ---- The file


class Damaged(Exception):
    """A marker is wrong; the message says how, and in which line."""


def digest(lines):
    return hashlib.sha1("\n".join(line.strip() for line in lines).strip().encode(
        "utf-8", "surrogateescape")).hexdigest()[:8]


def split(text):
    """The report as pieces (name, lines): the student's text has the name None; a block's lines are without
    its markers. A marker holds a digest of its block, which shows whether the block was edited."""
    pieces, begun = [(None, [])], None
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        marker = MARKER.fullmatch(line)
        what, name, stamp = marker.groups() if marker else (None, None, None)
        where = f"line {number}: {line.strip()}"
        if what == "end" and (not begun or name != begun[0]):
            raise Damaged(f"{where}: expected its begin marker before it")
        if what == "begin" and (begun or any(name == n for n, _ in pieces)):
            raise Damaged(f"{where}: expected each part once, after the end of the previous one")
        if what == "begin":
            begun = name, stamp
            pieces.append((name, []))
        elif what == "end":
            if begun[1] != digest(pieces[-1][1]) and "".join(pieces[-1][1]).strip():
                raise Damaged(f"{where}: the text between it and its begin marker was edited")
            begun = None
            pieces.append((None, []))
        else:
            pieces[-1][1].append(line)
    if begun:
        raise Damaged(f"expected <!-- end {begun[0]} -->, found none")
    return pieces


def block(name, text):
    stamp = digest(text.splitlines())
    return (f"<!-- begin {name} {stamp}: generated from the run folders; do not edit this part -->\n"
            f"{text}\n<!-- end {name} -->\n")


def fresh_report(blocks, root):
    """The template without the sections for which the runs have no data; for a lab its questions, all of them."""
    if os.path.exists(questions_of(root)):
        return renewed_report(read_report(questions_of(root)), blocks)
    template = read_report(os.path.join(os.path.dirname(os.path.abspath(__file__)), "report_template.md"))
    unfit = [f"<!-- begin {name} -->" for name, text in blocks.items() if not text]
    sections = [s for s in re.split("(?m)^(?=#)", template) if not any(marker in s for marker in unfit)]
    return renewed_report("".join(sections), blocks)


def renewed_report(text, blocks):
    return "".join("".join(lines) if name is None else
                   block(name, blocks[name] or NOTHING)
                   for name, lines in split(text))


def read_report(path):
    """Preserves all bytes, including line endings, when the text is written again."""
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as f:
        return f.read()


def write_file(path, text):
    """Replaces the file as a whole, so that a full disk loses nothing."""
    with open(path + ".part", "w", encoding="utf-8", errors="surrogateescape", newline="") as f:
        f.write(text)
    os.replace(path + ".part", path)


def write_report(path, text):
    write_file(path, text)
    print(f"Written: {path}, {len(re.findall('^> TODO:', text, re.M))} questions left for you to answer")


def write_page(root, text):
    """report.html, of the text of report.md."""
    path = os.path.join(root, "report.html")
    try:
        from report_html import make_page
    except ModuleNotFoundError as missing:
        print(f"Not written: {path}, since {sys.executable} has no {missing.name}; .venv/bin/pip install -r "
              "labs/requirements.txt, or on Debian: apt-get install python3-markdown-it; then make report again")
        with contextlib.suppress(OSError):
            os.remove(path)  # of an earlier report.md
        return
    page, absent = make_page(root, text.encode("utf-8", "surrogateescape").decode("utf-8", "replace"),
                             digest(text.splitlines()))
    write_file(path, page)
    print(*(f"Note: {note}" for note in absent), sep="\n", end="\n" * bool(absent))
    print(f"Written: {path}, to read in a browser and to print; after you have changed report.md, make report again")


def main(root):
    path = os.path.join(root, "report.md")
    try:
        blocks = make_blocks(root, read_runs(root))
        old = read_report(path) if os.path.exists(path) else None
        try:
            text = fresh_report(blocks, root) if old is None else renewed_report(old, blocks)
        except Damaged as why:
            new = os.path.join(root, "report.new.md")
            if os.path.exists(new):
                fail(path, "intact markers", why, f"fix it, or copy what you need from {new} and delete that")
            write_report(new, fresh_report(blocks, root))
            fail(path, "intact markers", why, f"{path} was not changed; copy the parts you need from {new}")
        write_report(path, text)
        write_page(root, text)
        for name in (n for n, part in blocks.items() if old and part and f"<!-- begin {n}" not in old):
            print(f"Note: the runs have data for the part {name}, which report.md does not contain. To add "
                  f"it, write a line <!-- begin {name} --> and a line <!-- end {name} --> there.")
    except OSError as error:
        fail(error.filename or path, "a file that can be read and written", error.strerror,
             "fix its permissions")


if __name__ == "__main__":
    start(main, __doc__, "what ./cnn --out or make study has written")
