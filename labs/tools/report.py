#!/usr/bin/env python3
"""Writes a report of the run folders in DIR: tables and plots of them, and questions for you to answer.

    labs/tools/report.py runs/first     `make report RUNS=runs/first` draws the plots first

report.md       your text. It begins as a copy of report_template.md, and is never changed after that: replace each
                `> TODO:` by your answer, and add what you like. In place of a line [timing](tables.md#timing) the
                report has that table. If your study does not need a section, delete it.
tables.md       the tables, from the run folders
report_full.md  report.md with the tables in place: the file to hand in
report.html     the same as a single file with the plots inside, to read in a browser and to print. For this Python
                needs the package markdown-it-py: pip install -r labs/requirements.txt, or on Debian apt-get install
                python3-markdown-it.

All but report.md are written again, whenever you run this again.

Runs that differ in more than device, batch and seed (--workers, --kernels, the compiler's flags, ...) are
not averaged: they are listed in separate rows with their differences. A speed-up compares rows that agree.
A run made before a change of the source has the same settings as a run made after it. The questions of a lab
name its folder, <!-- other source: lab02-textbook -->, and it has a row of its own.

Numbers have no more digits than the standard deviation of the repeats allows: the tables of study.py have all of them.

`make report LAB=3` does the same for the runs of lab 3, in reports/lab03, with the questions of that lab,
labs/lab03/questions.md.
"""
import contextlib
import csv
import functools
import math
import os
import re
import sys
import textwrap
import urllib.parse

from run_folders import (COLUMNS_DIFFER, REPEATS_DIFFER, SCALING, Missing, ablation_beside, add_speedups, by,
                         by_precision, by_value, bytes_rows, differences, WORKERS, facts, fail, is_dirty, make_rows,
                         predicted_speedups, read_confusion, read_counts, read_csv, read_runs, scaling_rows, start,
                         step_losses, summary, workers_rows)

FREE = REPEATS_DIFFER | COLUMNS_DIFFER
UNIMPORTANT = {"--trace", "--quiet", "--save-model"}  # not named as differences, unless there are no others
STEP_PHASES = ["load_s", "copy_s", "forward_s", "backward_s", "optimizer_s", "exposed_comm_s", "other_s"]
NOTHING = "No run folder has what this table needs."
MOST_STEPS = 20  # in the table of losses
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


def variants(runs, free=frozenset()):
    """Groups of runs that differ in nothing but device, batch, seed and the settings in `free`."""
    groups = []
    for run in runs:
        for group in groups:
            like = {r.kind: r for r in reversed(group)}  # one of each kind, as devices of a kind must agree
            if other_source(group[0]) == other_source(run) and not any(
                    differences(other, run, free_settings(other, run) | free) for other in like.values()):
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


def differing_settings(groups, free):
    """The settings in which variants differ, except those in `free`."""
    names = list(dict.fromkeys(name for a in groups for b in groups for name, _, _ in
                               differences(a[0], b[0], FREE | free)))
    return [name for name in names if name not in UNIMPORTANT] or names


def timing_rows(runs):
    """The rows of study.csv, variant by variant; `variant` says what is not the same in all."""
    groups, rows = variants(runs), []
    names = differing_settings(groups, {"model"})
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


# The titles of columns, where the name with blanks in place of _ would not do
TITLES = dict(
    label="device", batch="batch on each", seconds_mean="seconds, mean", seconds_sd="sd", ci95="95 % interval, +-",
    img_per_s="img/s", img_per_s_mean="img/s, mean", img_per_s_sd="sd", speedup="speed-up", accuracy="accuracy in %",
    accuracy_mean="accuracy in %", accuracy_sd="sd of the accuracy", train_accuracy_mean="training accuracy in %",
    loader_wait_s_mean="wait for the loader, s", predicted="predicted speed-up", read_mb="MB read",
    written_mb="MB written", launches="kernels launched", upload_ms="upload, ms", upload_percent="hidden in %",
    make_ms="make a batch, ms", make_percent="hidden in %",
    variant="what differs", times_first="times the first", times_previous="times the previous",
    count="devices or cores", wall_s_mean="wall time, s", training_percent="training in %", out_shape="output",
    params="parameters", mflop="MFLOP", forward_ms="forward, ms", backward_ms="backward, ms", gflops="GFLOP/s",
    gb_per_s="GB/s", percent_of_peak="% of the peak", saved="times fewer operations", time_us="time, us",
    per_hit_us="us per hit", percent="% of the time")
# A standard deviation, and the numbers that have no more digits than it allows
SPREADS = {"seconds_sd": ["seconds_mean", "ci95"], "img_per_s_sd": ["img_per_s_mean", "ci95"],
           "accuracy_sd": ["accuracy_mean", "accuracy"], "train_accuracy_sd": ["train_accuracy_mean"],
           "peak_sd": ["peak"]}
RATES = ["img_per_s", "speedup", "predicted", "efficiency"]  # as exact as the seconds from which they are computed
MOST_COLUMNS = 6  # of a table with one row; a longer row is written as a column


def titles_of(names):
    return {name: TITLES.get(name, name.replace("_", " ")) for name in names}


def number(value):
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def rounded(value, spread):
    """With two digits of the spread, but at most five digits."""
    spread = max(spread, 1e-3 * abs(value))
    if spread == 0 or not math.isfinite(spread):
        return number(value)
    decimals = 1 - math.floor(math.log10(spread))
    return f"{round(value, decimals):.{max(0, decimals)}f}"


def round_to_spread(row):
    """The row with texts in place of the numbers of which the spread is known."""
    texts, numbers = dict(row), {name: value for name, value in row.items() if isinstance(value, (int, float))}
    for spread, names in SPREADS.items():
        if numbers.get(spread):
            texts.update((name, rounded(numbers[name], numbers[spread])) for name in (spread, *names) if name in numbers)
    if numbers.get("seconds_sd"):
        relative = numbers["seconds_sd"] / numbers["seconds_mean"]
        texts.update((name, rounded(numbers[name], relative * numbers[name])) for name in RATES if name in numbers)
    return texts


def cell(value):
    text = number(value) if isinstance(value, float) else "" if value is None else str(value)
    return text.replace("|", "\\|")


def markdown(lines):
    head, *rows = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, "|" + " --- |" * len(lines[0]), *rows])


def table(titles, rows):
    """In Markdown; rows are dicts with the keys of titles. To be narrow, it lacks columns without an entry, and columns
    with the same in all rows, which the sentence before it names; a single long row is written as a column."""
    lines = [[cell(row.get(name)) for name in titles] for row in map(round_to_spread, rows)]
    columns = [(title, cells) for title, cells in zip(titles.values(), zip(*lines)) if any(cells)]
    if len(rows) == 1 and len(columns) > MOST_COLUMNS:
        return markdown([(title, cells[0]) for title, cells in columns])
    equal = [(title, cells) for title, cells in columns[1:] if len(rows) > 1 and len(set(cells)) == 1]
    about = "; ".join(f"{title} {cells[0]}" for title, cells in equal)
    columns = [column for column in columns if column not in equal]
    text = markdown([[title for title, _ in columns], *zip(*(cells for _, cells in columns))])
    return f"In all rows: {about}.\n\n{text}" if equal else text


def as_number(text):
    """An entry of a CSV file: a number, or the text."""
    return float(text) if re.fullmatch(r"-?\d+(\.\d+)?", text or "") else text


def csv_tables(root, name, folders):
    """The CSV files of that name as Markdown tables."""
    paths, texts = [os.path.join(f, name) for f in folders if os.path.exists(os.path.join(f, name))], []
    for path in paths[:MOST_TABLES]:
        with open(path, newline="", encoding="utf-8", errors="replace") as f:
            lines = [{name: as_number(text) for name, text in line.items()} for line in csv.DictReader(f)]
        if lines:
            texts.append(f"From `{os.path.relpath(path, root)}`:\n\n" + table(titles_of(lines[0]), lines))
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
                  driver="driver", threads="threads", peak="measured peak, GFLOP/s", peak_sd="its sd", runs="runs",
                  jobs="Slurm jobs")
    lines = []
    for group in by(runs, lambda r: (*map(r.machine.get, titles), r.settings["threads"])).values():
        card = group[0].machine
        peaks = [r.machine["peak_gflops"] for r in group if r.machine["peak_gflops"] is not None]
        peak, sd, _ = summary(peaks) if peaks else (None, None, None)
        lines.append(dict(card, memory=card.get("memory_bytes", 0) / 1e9, peak=peak, peak_sd=sd, runs=len(group),
                          threads=group[0].settings["threads"],
                          jobs=len({r.machine.get("slurm") for r in group} - {None})))
    return table(titles, lines)


def make_timing(root, runs, rows):
    titles = titles_of(["label", "model", "batch", "global_batch", "repeats", "seconds_mean", "seconds_sd", "ci95",
                        "img_per_s", "speedup", "accuracy_mean", "accuracy_sd", "train_accuracy_mean", "provenance"])
    titles["speedup"] = "speed-up over cpu"
    if all(r["runs"][0].kind == "cpu" and r.get("speedup") in (None, 1) for r in rows):  # over itself
        del titles["speedup"]
    if any(r["variant"] for r in rows):
        titles = dict(variant="what differs", **titles)
    return (table(titles, rows) + picture(root, "study", "time and accuracy") + picture(root, "loss", "loss")
            + picture(root, "accuracy", "accuracy of the training and of the test images"))


def make_steps(root, runs, rows):
    lines = []
    for row in rows:
        run, later = row["runs"][0], [e["seconds"] for r in row["runs"] for e in r.epochs[1:]]
        line = dict(row, first=summary([r.epochs[0]["seconds"] for r in row["runs"]])[0],
                    later=summary(later)[0] if later else None, steps=run.parallel.get("iterations"))
        with contextlib.suppress(Missing):
            steps = [s for s in read_csv(run, "steps.csv", STEP_PHASES + ["warmup"]) if not s[-1]]
            if steps:
                line.update((name, 1e3 * summary(times)[0]) for name, times in zip(STEP_PHASES, zip(*steps)))
        lines.append(line)
    titles = dict(label="device", global_batch="global batch", steps="steps per epoch",
                  first="first epoch, s", later="later ones, s",
                  **{name: name[:-2].replace("_", " ") + ", ms" for name in STEP_PHASES})
    if any(r["variant"] for r in rows):
        titles = dict(variant="what differs", **titles)
    return ("Epochs are means over repeats. The parts are of a step in the first repeat, without warm-up, "
            "averaged over steps and devices:\n\n" + table(titles, lines))


def make_scaling(root, runs, rows):
    lines = []
    for some in by(rows, lambda r: r["variant"]).values():
        groups = by(scaling_rows(some, ("ddp", "dp")), lambda r: (r["scaling"], r["device"], r["model"], r[
            "global_batch" if r["scaling"] == "strong" else "batch"]))
        for group in (g for g in groups.values() if len(g) > 1):
            predicted = {} if group[0]["emulated"] else predicted_speedups(group)
            lines += [dict(r, predicted=predicted.get((r["parallel"], r["devices"]))) for r in group]
    if not lines:
        return ""
    titles = titles_of([c for c in SCALING if c != "emulated"] + ["predicted", "provenance"])
    return table(titles, lines) + picture(root, "scaling", "speed-up by devices")


def make_workers(root, runs, rows):
    text = csv_tables(root, "workers.csv", [root])
    swept = [group for group in variants(runs, {"workers"}) if len({r.settings["workers"] for r in group}) > 1]
    names = differing_settings(swept, {"workers"})
    for group in swept if not text else []:
        what = ", ".join(show_variant(name, group[0], runs) for name in names)
        text += f"{what}:\n\n" * bool(what) + table(titles_of(WORKERS[:7]), workers_rows(group)) + "\n\n"
    return (text + picture(root, "workers", "images per second by workers")).strip()


def make_timeline(root, runs, rows):
    return picture(root, "timeline", "what host, device and loader do in the steps of a trace").strip()


def make_overlap(root, runs, rows):
    """What `make overlap` has written beside the traces: how much of the loading is hidden."""
    lines = []
    for run in runs:
        path = os.path.join(run.folder, "overlap.txt")
        sums = re.search("^steps=.*", read_report(path), re.M) if os.path.exists(path) else None
        found = dict(re.findall(r"(\w+)=(\d+(?:\.\d+)?)", sums[0])) if sums else {}
        line = dict(run=os.path.basename(run.folder), workers=run.settings["workers"], steps=found.get("steps"))
        for what in "upload", "make":
            busy, hidden = (float(found.get(f"{what}_{part}", 0)) for part in ("us", "hidden_us"))
            line.update({f"{what}_ms": busy / 1e3, f"{what}_percent": 100 * hidden / busy if busy else None})
        lines += [line] if found else []
    return table(titles_of(lines[0]), lines) if lines else ""


def make_precision(root, runs, rows):
    """The losses, step by step, of runs that differ in precision only, and their difference from those in fp32."""
    group = by_precision(runs)
    if len(group) < 2:
        return ""
    with contextlib.suppress(Missing):
        losses = {name: [loss for *_, loss in step_losses(run)] for name, run in group.items()}
        titles, lines = dict(step="step"), []
        for step, numbers in enumerate(zip(*losses.values())):
            line = dict(step=step + 1)
            for name, loss in zip(losses, numbers):
                percent = round(100 * (loss / numbers[0] - 1), 3) + 0  # no -0
                line.update({name: f"{loss:.5f}", f"{name}_percent": f"{percent:+.3f}"})
            lines.append(line)
        for name in losses:
            titles.update({name: name} if name == "fp32" else {name: name, f"{name}_percent": "difference in %"})
        every = -(-len(lines) // MOST_STEPS)
        return table(titles, lines[::every]) + picture(root, "precision", "the losses compared with those in fp32")
    return ""


def make_bytes(root, runs, rows):
    lines = bytes_rows(runs)
    titles = titles_of(["rung", "launches", "read_mb", "written_mb", "times_first"])
    return table(titles, lines) + picture(root, "bytes", "bytes and kernels of each rung") if lines else ""


def make_ablation(root, runs, rows):
    """Of this folder and of those in it, such as the two of lab 9; and of those to which links of a lab lead, but for
    runs of ./cnn-count, which make_bytes() shows."""
    texts = []
    inside = [root, *sorted(e.path for e in os.scandir(root) if e.is_dir())]
    linked = {os.path.dirname(ablation_beside(r) or "") for r in runs if not read_counts(r)} - {""}
    linked = sorted(linked - {*map(os.path.abspath, inside)})
    for folder in inside + linked:
        text = csv_tables(root, "ablation.csv", [folder])
        plot = os.path.join(root if folder in linked else folder, "plots", "ablation.png")
        address = urllib.parse.quote(os.path.relpath(plot, root))
        shown = f"\n\n![speed and accuracy of each rung]({address})" * os.path.exists(plot)
        texts += [text + shown] if text else []
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
              layers=make_layers, profile=make_profile, timeline=make_timeline, overlap=make_overlap,
              precision=make_precision, bytes=make_bytes, classes=make_classes)
# The line of report.md in whose place report_full.md has a table
PLACE = re.compile(rf"^\[({'|'.join(MAKERS)})\]\(tables\.md#\1\)[ \t\r]*$", re.M)


def make_tables(root, runs):
    """Name and text of each table, with its plots; "" if the runs lack the data for it."""
    rows = timing_rows(runs)
    return {name: maker(root, runs, rows) for name, maker in MAKERS.items()}


# ---- The files


def place(name):
    return f"[{name}](tables.md#{name})"


def first_copy(root, tables):
    """What report.md begins as: the questions of a lab, or the template without the sections that have no table."""
    if os.path.exists(questions_of(root)):
        return read_report(questions_of(root))
    template = read_report(os.path.join(os.path.dirname(os.path.abspath(__file__)), "report_template.md"))
    sections = re.split("(?m)^(?=#)", template)
    return "".join(s for s in sections if all(tables[name] for name in PLACE.findall(s)))


def with_tables(text, tables):
    return PLACE.sub(lambda found: tables[found[1]] or NOTHING, text)


def generated_files(root, tables):
    """Name and text of what is generated from report.md and the tables, besides report.html."""
    parts = [f"# {name}\n\n{text}\n" for name, text in tables.items() if text]
    return {"tables.md": "\n".join([TABLES_ARE, *parts]),
            "report_full.md": REPORT_IS + with_tables(read_report(os.path.join(root, "report.md")), tables)}


TABLES_ARE = "<!-- Generated from the run folders by make report, which overwrites this file. -->\n"
REPORT_IS = "<!-- Generated from report.md by make report, which overwrites this file: write in report.md. -->\n"


def read_report(path):
    """Preserves all bytes, including line endings, when the text is written again."""
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as f:
        return f.read()


def as_utf8(text):
    """With a mark in place of each byte that is not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def write_file(path, text):
    """Replaces the file as a whole, so that a full disk loses nothing."""
    with open(path + ".part", "w", encoding="utf-8", errors="surrogateescape", newline="") as f:
        f.write(text)
    os.replace(path + ".part", path)


def write_generated(path, text):
    """Not to be written to, so that an editor warns whoever has opened it in place of report.md."""
    write_file(path, text)
    os.chmod(path, 0o444)


def write_page(root, text):
    """report.html, of the text of report_full.md."""
    path = os.path.join(root, "report.html")
    try:
        from report_html import make_page
    except ModuleNotFoundError as missing:
        print(f"Not written: {path}, since {sys.executable} has no {missing.name}; .venv/bin/pip install -r "
              "labs/requirements.txt, or on Debian: apt-get install python3-markdown-it; then make report again")
        with contextlib.suppress(OSError):
            os.remove(path)  # of an earlier report.md
        return
    page, absent = make_page(root, as_utf8(text))
    write_generated(path, page)
    print(*(f"Note: {note}" for note in absent), sep="\n", end="\n" * bool(absent))
    print(f"Written: {path}, to read in a browser and to print")


def without_place(root, text, tables):
    """The tables that report.md does not show. Which of them the report of a lab needs, its questions say."""
    if os.path.exists(questions_of(root)):
        return []
    return [name for name, table_text in tables.items() if table_text and place(name) not in text]


def main(root):
    path = os.path.join(root, "report.md")
    try:
        tables = make_tables(root, read_runs(root))
        if not os.path.exists(path):
            write_file(path, first_copy(root, tables))
            print(f"Written: {path}, for you to write in; make report will not change it again")
        text, generated = read_report(path), generated_files(root, tables)
        for name, generated_text in generated.items():
            write_generated(os.path.join(root, name), generated_text)
        for name in without_place(root, text, tables):
            print(f"Note: the runs have data for the table {name}, which report.md does not contain. To add it, write "
                  f"a line {place(name)} there.")
        left = len(re.findall("^> TODO:", text, re.M))
        print(f"Written: {os.path.join(root, 'tables.md')}")
        print(f"Written: {os.path.join(root, 'report_full.md')}, to hand in; {left} questions left for you to answer "
              "in report.md")
        write_page(root, generated["report_full.md"])
    except OSError as error:
        fail(error.filename or path, "a file that can be read and written", error.strerror,
             "fix its permissions")


if __name__ == "__main__":
    start(main, __doc__, "what ./cnn --out or make study has written")
