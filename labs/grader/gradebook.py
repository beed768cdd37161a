"""Writes gradebook.csv and a page for each student, for labs/grade. All text of a submission is escaped."""
import base64
import collections
import csv
import hashlib
import html
import io
import json
import os
import re
from types import SimpleNamespace

COLUMNS = ["student", "lab", "points", "of", "flags", "rerun", "page"]
RUBRIC = [("correctness", 35), ("measurement", 25), ("explanation", 25), ("reproducibility", 10), ("style", 5)]
STYLE = """body { font: 15px/1.45 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse } td, th { border: 1px solid #999; padding: .2em .6em; text-align: left;
vertical-align: top; overflow-wrap: anywhere } pre { background: #f4f4f4; padding: .6em; overflow-x: auto;
white-space: pre-wrap } img { max-width: 100% }"""


def plain(words):
    """For a terminal: printable, on one line."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(str(words).split()))[:400]


def cell(value):
    """For a spreadsheet, which would take a cell that begins with one of these for a formula."""
    value = plain(value)
    return "'" + value if value[:1] in ("=", "+", "-", "@", "|", "%") else value


def page_name(student):
    """A file name of harmless characters, different for each student."""
    name = re.sub("[^A-Za-z0-9._-]", "_", student).lstrip(".-")[:60]
    digest = hashlib.sha1(student.encode("utf-8", "replace")).hexdigest()[:8]
    return name if name == student != "" else f"{name}-{digest}"


def again(result):
    known = [word for _, word, _ in result.again if word]
    return f"{known.count('yes')} of {len(known)}" if known else "none"


def kinds(result):
    return "; ".join(f"{count} {kind}" for kind, count in collections.Counter(f[0] for f in result.flags).items())


def summary(result):
    points = "not graded" if result.points is None else f"{result.points}/{result.of} points"
    empty = "".join(f"; {note}" for note in result.notes if note.startswith("empty: "))
    return f"{points}, flags: {kinds(result) or 'none'}, re-runs: {again(result)}{empty}"


def page_of(result):
    return f"pages/{page_name(result.student)}.html"


def rows_of(out, fail):
    """The rows of an earlier call. A grade book with others ends this program: to replace it would lose them."""
    path = os.path.join(out, "gradebook.csv")
    try:
        with open(path, newline="", encoding="utf-8") as f:
            rows = list(filter(None, csv.reader(f)))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, csv.Error) as error:
        rows = [[str(error)]]
    for number, row in enumerate(rows, 1):
        is_own = row == COLUMNS or (number > 1 and len(row) == len(COLUMNS))
        if not is_own:
            fail(f"{path}, line {number}", ",".join(COLUMNS), plain(",".join(row)),
                 "undo the change and keep your own columns in another file, or give another folder: --out DIR")
    return rows[1:]


def other_labs(options, fail):
    return sorted({row[COLUMNS.index("lab")] for row in rows_of(options.out, fail)} - {options.lab})


def runs_of(out):
    """{student: runs} of earlier calls, with what grading.compare() needs of a run."""
    try:
        with open(os.path.join(out, "runs.json"), encoding="utf-8") as f:
            return json.load(f)
    except FileNotFoundError:
        return {}


def earlier(options, results):
    """The students whom only earlier calls have graded, and their runs."""
    graded = {result.student for result in results}
    return [SimpleNamespace(student=student, runs=runs, flags=[]) for student, runs in runs_of(options.out).items()
            if student not in graded]


def write(options, results, new, fail):
    """The grade book of all results so far, and the pages of the new ones. Only this user can read them."""
    os.makedirs(options.out, mode=0o700, exist_ok=True)
    os.makedirs(os.path.join(options.out, "pages"), exist_ok=True)
    for result in new:
        save(os.path.join(options.out, page_of(result)), make_page(options, result))
    runs = {result.student: [{key: run[key] for key in ("folder", "rows", "times")} for run in result.runs]
            for result in new if result.runs}
    save(os.path.join(options.out, "runs.json"), json.dumps({**runs_of(options.out), **runs}))
    rows = [[result.student, options.lab, "" if result.points is None else result.points, result.of, kinds(result),
             again(result), page_of(result)] for result in results]
    book = {row[0]: row for row in [*rows_of(options.out, fail), *(list(map(cell, row)) for row in rows)]}
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows([COLUMNS, *book.values()])  # each student where they were
    save(os.path.join(options.out, "gradebook.csv"), lines.getvalue())


def save(path, text):
    """Replaces the file as a whole, so that a full disk loses nothing."""
    with open(path + ".part", "w", newline="", encoding="utf-8", errors="replace") as f:
        f.write(text)
    os.replace(path + ".part", path)


# ---- Pages


def element(name, content, **attributes):
    """Of HTML; content and attributes are escaped, unless the content is made of elements."""
    words = "".join(f' {key}="{html.escape(str(value))}"' for key, value in attributes.items())
    inner = "".join(content) if isinstance(content, list) else html.escape(str(content))
    return Element(f"<{name}{words}>{inner}</{name}>")


class Element(str):
    """Text that is HTML already."""


def table(head, rows):
    def line(name, cells):
        return element("tr", [element(name, [c] if isinstance(c, Element) else c) for c in cells])
    return element("table", [line("th", head), *(line("td", row) for row in rows)])


def pre(words):
    return element("pre", words)


def make_page(options, result):
    of = max(1, result.of)
    points = "not graded" if result.points is None else f"{result.points} of {result.of} auto-graded points"
    correct = "" if result.points is None else f"{RUBRIC[0][1] * result.points / of:.1f}"
    body = [element("h1", f"{result.student}, lab {options.lab}"), element("p", points),
            element("h2", "Flags"),
            table(["kind", "place", "reason"], result.flags) if result.flags else element("p", "none"),
            element("p", "A flag is a reason to look, not a deduction."),
            element("h2", "Rubric"),
            table(["part", "of", "points"], [[name, most, correct if name == "correctness" else ""]
                                             for name, most in RUBRIC]),
            element("h2", "Tests"),
            table(["test", "points", "of", "output"],
                  [[title, got, most, pre(said)] for title, got, most, said in result.tests]),
            element("h2", "Runs"), table(["run", "command", "epoch, seconds, loss, accuracy"],
                                         [[r["folder"], r["command"], pre(epochs(r))] for r in result.runs]),
            element("h2", "Re-run with the instructor's build"),
            table(["run", "agrees", "because"], result.again) if result.again else element("p", "none")]
    for title, picture in result.plots:
        data = base64.b64encode(picture).decode()
        body += [element("h2", f"Plot: {title}"), Element(f'<img alt="plot" src="data:image/png;base64,{data}">')]
    body += [element("p", note) for note in result.notes]
    body += [element("h2", "Report"), pre(result.report or "none")]
    for name, todo, text in result.parts:
        body += [element("h2", f"TODO {todo} in {name}"), pre(text)]
    body.append(element("p", f"Isolation: {options.isolation}"))
    head = [Element('<meta charset="utf-8">'), Element(
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; style-src '
        '\'unsafe-inline\'">'), element("title", f"{result.student}, lab {options.lab}"),
            Element(f"<style>{STYLE}</style>")]
    return "<!DOCTYPE html>\n" + element("html", [element("head", head), element("body", body)]) + "\n"


def epochs(run):
    return "\n".join(" ".join(str(x)[:20] for x in epoch) for epoch in run["epochs"][:20])
