"""Examines the folder of a student, for labs/grade, which calls it in its sandbox, beside a copy of labs/tools:

    examine.py FOLDER STARTER SAID    writes what it finds to SAID, as JSON

It applies the rules of verify.py to the run folders and the report, and those below, which are for instructors.
STARTER is the folder that students were given.

    flags  [kind, place, what]: kind is one of numbers, report, files
    runs   a dictionary for each run that is complete: what labs/grade compares with other students, runs again
           and shows
    parts  [file, TODO, text] of the code that the student has written
"""
import contextlib
import filecmp
import glob
import hashlib
import io
import json
import os
import re
import sys

import verify
from report import as_utf8, generated_files, make_tables
from run_folders import DAMAGES, Missing, differences, find_folders, read_csv, step_losses

MOST = 40               # flags of each kind
STEPS = 2000            # of a run that are compared
AGAIN = 5               # of a run that is repeated
GFLOPS_PER_CORE = 400   # more than any core does: 6 GHz x 64 operations
EMPTY = "empty: no run folder, no report, and every part is the starter's"
TEXT = 20_000           # characters of a part, or of the report, that are shown
# The checker and the tools of a starter: labs/grade uses its own, and these need no edit.
TOOLS = ["Makefile", "labs/programs.mk", "labs/check", "labs/tools", "labs/pristine", "labs/stubs", "tests"]
REPORT = re.compile(r"(^|/)(report|report_full|tables)\.md(, line \d+)?$")
MARKER = re.compile(r"^[ \t]*/\* LAB (\d+\.\d+(?: \d+\.\d+)*) (BEGIN|END)", re.M)


# ---- Run folders and the report


def split_finding(line):
    """A finding of verify.py as (place, what), without the advice, which is for students."""
    place, colon, what = line.partition(": expected ")
    return (place, "expected " + what.rpartition("; ")[0]) if colon and ";" in what else (line[:80], line)


def guarded(where, findings):
    """The findings; what ./cnn never writes, and what the rules did not expect, is a finding, too."""
    lines = []
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            for line in findings:
                lines.append(line)
    except (Missing, SystemExit) as why:
        lines.append(str(why))
    except DAMAGES as error:
        lines.append(verify.finding(where, "files as ./cnn writes them", f"{type(error).__name__}: {error}"))
    return lines


def complete_run(folder):
    """The run, or None; the reason is one of the findings of verify.py, or what it did not expect."""
    try:
        return verify.check_complete(folder)[0]
    except DAMAGES:
        return None


def check_all_speedups(root, runs):
    yield from verify.check_speedups(root, runs)
    yield from check_threads(runs)


def check_threads(runs):
    """Of two runs that differ in --threads only, how many times as fast the one with more threads is."""
    def speed(run):
        return max(e["img_per_s"] for e in run.epochs)
    def key(run):
        return run.settings["threads"]
    for a in runs:
        for b in runs:
            if a.kind != "cpu" or b.kind != "cpu" or a.world + b.world > 2 or key(a) >= key(b):
                continue
            if differences(a, b, {"threads", "out", "seed"}):
                continue
            most = verify.LARGEST_SPEEDUP * key(b) / key(a)
            if speed(b) > most * speed(a):
                yield verify.finding(verify.path(b, "run.json"), f"with {key(b)} threads a speed-up of at most "
                                     f"{most:.1f} over {a.folder}, which has {key(a)}", f"{speed(b) / speed(a):.2f}")


def check_machine(run):
    peak, cores = run.machine["peak_gflops"], run.machine["cores"]
    if run.kind == "cpu" and peak is not None and peak > GFLOPS_PER_CORE * cores:
        yield verify.finding(verify.path(run, "run.json"), f"a peak of at most {GFLOPS_PER_CORE} GFLOP/s for each of "
                             f"{cores} cores", f"{peak} GFLOP/s")


def check_own(run):
    """A run that says that it is not one escapes the re-runs."""
    if run.provenance != "measured":
        yield verify.finding(verify.path(run, "run.json"), "a run of the student's own, with the provenance measured",
                             str(run.provenance)[:40])


def examine_runs(flags, root):
    """Applies all rules; returns the complete runs."""
    runs = []
    for folder, members in find_folders(root).items():
        if folder.split("/")[0] == "labs":
            continue  # recorded runs that the handouts supply
        complete = list(filter(None, map(complete_run, members)))
        kinds = verify.kinds_of(folder, members) or [verify.SEPARATE]
        lines = guarded(folder, verify.findings(folder, members, kinds))
        if complete:
            extra = [*map(verify.each, (check_own, check_machine)), check_all_speedups]
            for rule in extra:
                lines += guarded(folder, rule(folder, complete))
        for line in dict.fromkeys(lines):
            place, what = split_finding(line)
            flags.append(["report" if REPORT.search(place) else "numbers", place, what])
        runs += complete
    return runs


# ---- What other students' runs are compared with


def describe(run):
    """A run for labs/grade: its times are those of rank 0."""
    steps = []
    with contextlib.suppress(Missing):
        steps = read_csv(run, "steps.csv", ["rank", "loss", "seconds", *verify.STEP_PHASES])[:STEPS]
    rows = [[f"{x:.6f}" for x in row[2:]] for row in steps if row[2] > 0]
    times = [row[2] for row in steps if row[0] == 0]
    return dict(folder=run.folder, kind=run.kind, world=run.world, mode=run.mode, settings=run.settings,
                machine=run.machine, wall_s=run.resources.get("wall_s"), command=" ".join(map(str, run.command))[:500],
                provenance=run.provenance, accuracy=run.accuracy, times=times,
                img_per_s=max(e["img_per_s"] for e in run.epochs),
                epochs=[[e["epoch"], e["seconds"], e["train_loss"], e["accuracy"]] for e in run.epochs[:100]],
                rows=[hashlib.sha1(",".join(row).encode()).hexdigest()[:12] for row in rows],
                losses=first_losses(run))


def first_losses(run):
    """The loss of the first steps."""
    with contextlib.suppress(Missing):
        return [loss for *_, loss in step_losses(run)[:AGAIN]]
    return []


# ---- Code and other files


def marked_parts(path, lab):
    """The parts between the markers of this lab: (ID, text)."""
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            text = f.read()
    except OSError:
        return
    marks = list(MARKER.finditer(text))
    for begin, end in zip(marks, marks[1:]):
        ids = [part for part in begin[1].split() if part.split(".")[0] == lab]
        if ids and (begin[2], end[2]) == ("BEGIN", "END"):
            yield ids[0], text[begin.end():end.start()].partition("\n")[2]


def parts_of(folder, lab, starter):
    """[file, ID, text] of each part of this lab in a folder, which may be the starter itself."""
    return [[name, part, text[:TEXT]] for name in marked_files(starter)
            for part, text in marked_parts(os.path.join(folder, name), lab)]


def marked_files(starter):
    found = [path for pattern in ("*.c", "*.cu")
             for path in glob.glob(os.path.join(glob.escape(starter), "labs/lab[0-9][0-9]", pattern))]
    return ["cnn.c", "cnn_kernels.c", "cnn_kernels.cu", *(os.path.relpath(path, starter) for path in sorted(found))]


def examine_tools(flags, starter):
    """The starter's tools that were changed; labs/grade uses its own."""
    for name in TOOLS:
        top = os.path.join(starter, name)
        files = [name] if os.path.isfile(top) else [os.path.relpath(os.path.join(folder, file), starter)
                                                    for folder, _, names in os.walk(top) for file in names]
        for file in files:
            if os.path.exists(file) and not filecmp.cmp(file, os.path.join(starter, file), shallow=False):
                flags.append(["files", file, "expected the starter's file, found a changed one; it was not used"])


def read_text(path):
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as f:
        return f.read(TEXT)
    return ""


def report_of(root, folders):
    """report.md with the tables of the run folders in root, whatever tables.md and report_full.md say."""
    if not os.path.exists(os.path.join(root, "report.md")):
        return ""
    try:
        runs = list(filter(None, map(complete_run, folders)))
        return as_utf8(generated_files(root, make_tables(root, runs))["report_full.md"])[:TEXT]
    except (Missing, SystemExit, *DAMAGES):  # flags say why
        return read_text(os.path.join(root, "report.md"))


def all_reports(root, beside):
    """The reports among the run folders, and the one that make report LAB=n has written in the folder `beside`."""
    groups = {**find_folders(root), **find_folders(beside)}
    found = [report_of(folder, members) for folder, members in groups.items()]
    handed_in = read_text(f"{beside}/report_full.md")
    if handed_in and not (beside in groups and os.path.exists(f"{beside}/report.md")):
        found.append("The tables below are as handed in: they were not compared with the runs.\n\n" + handed_in)
    return "\n\n".join(filter(None, found))


def examine_report(flags, folder):
    """The report that make report LAB=n writes: what was handed in of it, questions or text with tables or both."""
    source, full = f"{folder}/report.md", f"{folder}/report_full.md"
    runs = list(filter(None, map(complete_run, find_folders(folder).get(folder, []))))
    if runs and os.path.exists(source):
        lines = guarded(folder, verify.check_report(folder, runs))
    else:
        source = source if os.path.exists(source) else full
        lines = [verify.finding(f"{source}, line {number}", "your answer", line.strip()[:60])
                 for number, line in enumerate(read_text(source).splitlines(), 1) if "TODO:" in line]
        if not runs:
            lines.append(verify.finding(full, "the run folders of its tables", "no complete one"))
    for place, what in map(split_finding, lines):
        if os.path.exists(place.partition(", line ")[0]):
            flags.append(["report", place, what])


def main(folder, starter, lab, said):
    os.chdir(folder)
    flags, root, beside = [], "runs" if os.path.isdir("runs") else ".", f"reports/lab{lab:0>2}"
    runs = examine_runs(flags, root)
    examine_report(flags, beside)
    examine_tools(flags, starter)
    described = []
    for run in runs:
        try:
            described.append(describe(run))
        except DAMAGES as error:
            flags.append(["numbers", verify.path(run, "run.json"), "expected what ./cnn --out writes, found "
                          f"{type(error).__name__}: {error}"])
    report = all_reports(root, beside) or read_text("report.md")
    parts, unchanged = parts_of(folder, lab, starter), parts_of(starter, lab, starter)
    own = [part for part in parts if part not in unchanged]
    found = own or report or runs or any(flag[0] != "files" for flag in flags)
    notes = [] if found else [EMPTY]
    counts, kept = {}, []
    for flag in flags:
        counts[flag[0]] = counts.get(flag[0], 0) + 1
        if counts[flag[0]] <= MOST:
            kept.append(flag)
    with open(said, "w", encoding="utf-8", errors="replace") as f:
        json.dump(dict(flags=kept, runs=described, parts=parts, notes=notes, report=report), f)


if __name__ == "__main__":
    main(*sys.argv[1:])
