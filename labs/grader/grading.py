"""Grades one submission after the other, for labs/grade: the checker, the rules, re-runs, plots."""
import contextlib
import csv
import json
import math
import os
import random
import re
import shutil
import stat
import subprocess
import sys
from types import SimpleNamespace

import intake
import sandbox
from run_folders import Missing, other_loss, repeat_options, step_losses

TEST_S = 300        # of one test of the checker, if LIMIT_S is not set: what students have in labs/check/check.sh
BUILD_S = 600       # of the builds of the checker
EXAMINE_S = 60
PLOT_S = 120
AGAIN_S = 120
STEPS = 5           # of a re-run
JSON_BYTES = 32 << 20
PLOT_BYTES = 4 << 20
LARGEST = 1e15      # no run has larger numbers
SHARED = 0.2        # of the steps of two runs that have the same times, and at least 3: one is a copy
BUSY = 1.5          # the measured peak may be too low by this factor, as in verify.py
# Why a test has failed, if a part has done what it should not
BY_A_PART = re.compile("has no use for|has no use in this task|a part may call|ended before its end|stopped after|"
                       "instead of returning|does not return|ended by signal")
AN_ENDLESS_LOOP = ": an endless loop, or a deadlock?"


class Ungraded(Exception):
    """Nothing is known about a submission, since this program's own tools fail; the message says how."""


class Course:
    """What is the same for all students."""

    def __init__(self, options, base, jobs):
        self.lab, self.again, self.data = options.lab, options.again, options.data
        self.base, self.kind, self.jobs = base, options.isolation, jobs
        self.starter, self.tools, self.program = (os.path.join(base, n) for n in ("starter", "tools", "cnn"))
        self.seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
        self.count = 0
        self.tests, self.partless = list_tests(self.starter, self.lab)
        self.python, self.plots, self.python_files = find_python()

    def folder(self):
        self.count += 1
        return self.new(f"student{self.count}")

    def new(self, *names):
        path = os.path.join(self.base, *names)
        os.mkdir(path, 0o755)
        return path

    def run(self, command, read, write, seconds, cwd=None):
        return sandbox.run(self.kind, command, [*read, *self.python_files], write, seconds, cwd)

    def try_tools(self, folder):
        """Whether the tools that read submissions start in the sandbox."""
        done = self.run([self.python, "-c", "import examine, intake"], [self.tools], self.new(folder, "tools"),
                        EXAMINE_S, self.tools)
        if done.status:
            raise Ungraded(f"{self.python}, which reads submissions, does not start in the sandbox: "
                           f"{done.stopped or last_line(done.said)}")


def has_matplotlib(python):
    return os.path.exists(python) and subprocess.run([python, "-c", "import matplotlib"], check=False,
                                                     capture_output=True,
                                                     env={**os.environ, "MPLBACKEND": "Agg"}).returncode == 0


def find_python():
    """The Python for the sandbox, one with matplotlib if there is one: (program, whether it has it, its folders)."""
    venv = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", ".venv", "bin", "python")
    python = next(filter(has_matplotlib, (venv, sys.executable, "/usr/bin/python3")), None)
    if python is None:
        return sys.executable, False, []
    said = subprocess.run([python, "-c", "import sys; print(sys.prefix, sys.base_prefix, sep='\\n')"], check=True,
                          capture_output=True, text=True).stdout.split("\n")
    return os.path.abspath(python), True, [p for p in dict.fromkeys(said) if p and not p.startswith("/usr")]


def list_tests(starter, lab):
    """[(points, title)] of the lab's tests, and the titles of those that need no code of a student."""
    script = f'home=$PWD; . "labs/check/lab{int(lab):02d}.sh"; tests'
    said = subprocess.run(["bash", "-c", script], cwd=starter, check=True, capture_output=True, text=True).stdout
    lines = [line.split("|") for line in said.splitlines()]
    return [(int(points), title) for points, _, title in lines], [title for _, parts, title in lines if parts == "-"]


# ---- What the sandbox has written


def read_json(path):
    """A file that untrusted code may have written: no link, no pipe, not too large. None if there is none."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as f:
            about = os.fstat(f.fileno())
            if stat.S_ISREG(about.st_mode) and about.st_size <= JSON_BYTES:
                return json.loads(f.read(JSON_BYTES).decode("utf-8", "replace"))
    except (OSError, ValueError, RecursionError):
        pass
    return None


def text(value, most=300):
    return str(value)[:most] if isinstance(value, (str, int, float)) else ""


def is_number(value):
    """Whether it is one that sums and products of a few may be computed from: 10^400 overflows, true counts as 1."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST


# ---- One student


def new_result(student, tests=()):
    return SimpleNamespace(student=student, points=None, of=sum(points for points, _ in tests), tests=[], flags=[],
                           runs=[], parts=[], report="", again=[], plots=[], notes=[])


def grade(course, student, path):
    """All about one submission. Nothing in it can end the grading of the others: any error is a flag."""
    result = new_result(student, course.tests)
    folder = course.folder()
    try:
        course.try_tools(folder)
        given = take(course, result, path, folder)
        if not given:
            return result
        check(course, result, given, folder)
        examine(course, result, given, folder)
        begin_again(course, result, folder)
        check_jobs(course, result)
        draw_plots(course, result, given, folder)
    except Ungraded as why:
        result.flags.append(("checker", "labs/grade", f"expected its own tools to work, found: {why}"))
    except Exception as error:  # pylint: disable=broad-exception-caught
        result.flags.append(("files", student, f"expected a submission that can be read, found {text(repr(error))}"))
    finally:
        subprocess.run(["chmod", "-R", "u+rwX", folder], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(folder, ignore_errors=True)
    return result


def take(course, result, path, folder):
    """The copy of the submission, which the sandbox may read. None if it has no file of a lab."""
    given = course.new(folder, "given")
    if os.path.isdir(path):
        path = intake.archive_in(path) or path
    if os.path.isdir(path):
        left_out = intake.copy_folder(path, given)
    else:
        left_out, given = unpack(course, path, folder, given)
    result.flags += [("files", place, reason) for place, reason in left_out]
    tops = intake.find_tops(given)
    if not tops:
        names = ", ".join(sorted(os.listdir(path if os.path.isdir(path) else given))[:5])
        result.flags.append(("files", os.path.basename(path), "expected cnn.c, cnn_kernels.cu, labs or runs, in a folder "
                             f"or in the only archive, found {names or 'nothing'}; not graded"))
        return None
    if len(tops) > 1:
        used, *others = map(os.path.basename, tops)
        result.flags.append(("files", os.path.basename(path), "expected one folder with the student's files, found "
                             f"several; used {used}, not {', '.join(others)}"))
    given = tops[0]
    for above, _, names in os.walk(given):
        os.chmod(above, 0o755)
        for name in names:  # all of the same age: unpacking and git change times
            os.chmod(os.path.join(above, name), 0o644)
            os.utime(os.path.join(above, name), (0, 0))
    return given


def unpack(course, path, folder, given):
    if os.path.getsize(path) > intake.ARCHIVE_BYTES:
        return [(os.path.basename(path), f"expected an archive of at most {intake.ARCHIVE_BYTES >> 20} MB, found "
                 f"{os.path.getsize(path) >> 20} MB; not read")], given
    packed, write = course.new(folder, "packed"), course.new(folder, "unpacked")
    name = "given" + next(end for end in intake.ARCHIVES if path.endswith(end))
    with open(path, "rb") as source, open(os.path.join(packed, name), "wb") as to:
        to.write(source.read(intake.ARCHIVE_BYTES))
    os.chmod(os.path.join(packed, name), 0o644)
    out, said = os.path.join(write, "out"), os.path.join(write, "said.json")
    done = course.run(["prlimit", f"--as={2 << 30}", "--", course.python, os.path.join(course.tools, "intake.py"),
                       os.path.join(packed, name), out, said], [course.tools, packed], write, EXAMINE_S)
    if done.status and not os.path.exists(said):
        raise Ungraded(f"{os.path.basename(path)} could not be unpacked: {done.stopped or last_line(done.said)}")
    called = {name: os.path.basename(path)}  # as the student knows it
    left_out = [(called.get(text(a), text(a)), text(b)) for a, b in read_json(said) or []]
    if os.path.isdir(out):
        left_out += intake.copy_folder(out, given)
    return left_out, given


def last_line(said):
    return (said.strip().splitlines() or ["nothing was printed"])[-1][:200]


def check(course, result, given, folder):
    """Points of labs/check."""
    write = course.new(folder, "check")
    results = os.path.join(write, "results.json")
    limit = int(os.environ.get("LIMIT_S", TEST_S))
    script = os.path.join(course.starter, "labs", "check", "check.sh")
    done = course.run(["env", f"FROM={given}", f"RESULTS={results}", f"LIMIT_S={limit}", "bash", script, course.lab],
                      [course.starter, given], write, BUILD_S + limit * len(course.tests))
    found = read_json(results)
    tests = found.get("tests") if isinstance(found, dict) else None
    if done.stopped or not isinstance(tests, list) or len(tests) != len(course.tests):
        result.flags.append(("checker", f"make check LAB={course.lab}", "expected the results of all tests, found "
                             f"none: {done.stopped or last_line(done.said)}"))
        return
    for number, ((points, title), test) in enumerate(zip(course.tests, tests), 1):
        where, kind = f"test {number}: {title}", "checker" if title in course.partless else "code"
        test = test if isinstance(test, dict) else {}
        passed = test.get("score") == points and test.get("status") == "passed"
        said = text(test.get("output"), 10_000).replace(given + "/", "").replace(given, "the submission")[:2000]
        if kind == "checker":
            said = said.replace(AN_ENDLESS_LOOP, ": this test needs no code of the student; is this machine slow or "
                                f"busy? LIMIT_S={2 * limit} gives each test more time.")
        result.tests.append((title, points if passed else 0, points, said))
        if points and said.startswith("skipped:"):  # a test for a device has no points
            result.flags.append(("checker", where, f"not tested on this machine: {said}"))
        if BY_A_PART.search(said):
            result.flags.append((kind, where, said))
    points = sum(got for _, got, _, _ in result.tests)
    expected = f"lab {course.lab}: {points}/{result.of} points"
    if done.status not in (0, 1) or last_line(done.said) != expected:
        result.flags.append(("checker", f"make check LAB={course.lab}", f"expected exit status 0 or 1 and the last line "
                             f"{expected!r}, found {done.status} and {last_line(done.said)!r}; the results may be "
                             "forged, so no points are counted"))
    else:
        result.points = points
    if done.left:
        result.flags.append(("code", f"make check LAB={course.lab}", f"expected no processes after its end, found "
                             f"{done.left}; they were ended"))


def link_runs(course, given):
    """Makes the links to run folders anew that make report LAB=n has made beside a report; see lab_runs.sh."""
    lab, runs = f"lab{course.lab:0>2}", os.path.join(given, "runs")
    for folder, _, names in os.walk(runs) if os.path.isdir(f"{given}/reports/{lab}") else ():
        path = os.path.relpath(folder, runs)
        if "run.json" in names and path.startswith(lab):
            with contextlib.suppress(OSError):  # two of one name, or one that is too long
                os.symlink(f"../../runs/{path}", f"{given}/reports/{lab}/{path.replace('/', '-')}")


def examine(course, result, given, folder):
    """Flags of examine.py; the runs, parts and report."""
    link_runs(course, given)
    write = course.new(folder, "examine")
    said = os.path.join(write, "said.json")
    done = course.run(["prlimit", f"--as={4 << 30}", "--", course.python, os.path.join(course.tools, "examine.py"),
                       given, course.starter, course.lab, said],
                      [course.tools, os.path.join(course.base, f"lab{course.lab:0>2}"), course.starter, given], write,
                      EXAMINE_S)
    found = read_json(said)
    if done.status or not isinstance(found, dict):
        result.flags.append(("numbers", "run folders and report", "expected files that can be read, found none: "
                             f"{done.stopped or last_line(done.said)}"))
        return
    result.flags += [tuple(text(part) for part in flag) for flag in found["flags"] if len(flag) == 3]
    result.parts = [tuple(text(part, 20_000) for part in parts) for parts in found["parts"]]
    result.runs, result.report = list(map(clean, found["runs"])), text(found["report"], 20_000)
    result.notes += [text(note) for note in found["notes"]]


def clean(run):
    """A run that examine.py has described, with values of the types that the rest relies on."""
    numbers = {key: [float(x) if is_number(x) else math.inf for x in run[key]] for key in ("times", "losses")}
    texts = {key: text(run[key]) for key in ("folder", "kind", "command", "provenance")}
    others = dict(world=run["world"], wall_s=run["wall_s"], img_per_s=run["img_per_s"],
                  peak=run["machine"].get("peak_gflops"))
    others = {key: value if is_number(value) else None for key, value in others.items()}
    return dict(numbers, **texts, **others, settings={text(k): v for k, v in run["settings"].items()},
                job=text(run["machine"].get("slurm")), rows=list(map(text, run["rows"])),
                epochs=[list(map(text, epoch)) for epoch in run["epochs"]])


# ---- Re-runs


def begin_again(course, result, folder):
    """Re-runs some runs with the instructor's build: the first losses have to be the same."""
    measured = [r for r in result.runs if r["provenance"] == "measured" and r["losses"]]
    draw = random.Random(f"{course.seed} {result.student}")  # the same, whoever else is graded
    for number, run in enumerate(draw.sample(measured, min(course.again, len(measured)))):
        options, why = repeat_options(run["settings"], run["world"])
        if why:
            result.again.append((run["folder"], "", why))
            result.flags.append(("rerun", f"{run['folder']}/run.json", why))
            continue
        write = course.new(folder, f"again{number}")
        data = ["--data", os.path.abspath(course.data)] if course.data else []
        done = course.run([course.program, *options, *data, "--max-steps", str(STEPS), "--limit-test", "1", "--quiet",
                           "--layers", "--out", "run"],
                          [course.program, *data[1:]], write, AGAIN_S)
        losses = []
        with contextlib.suppress(Missing):
            losses = [loss for *_, loss in step_losses(SimpleNamespace(folder=os.path.join(write, "run")))]
        if done.status or not losses:
            why = f"could not be re-run: {done.stopped or last_line(done.said)}"
            result.again.append((run["folder"], "", why))
            result.flags.append(("rerun", f"{run['folder']}/run.json", why))
            continue
        wrong = other_loss(run["losses"], losses, run["settings"].get("precision", "fp32"))
        said = "the first losses are the same"
        if wrong:
            said = (f"expected the loss {wrong[2]:.6g} in step {wrong[0]}, as in a run of your own build with the same "
                    f"settings and seed, found {text(wrong[1], 20)}")
            result.flags.append(("rerun", f"{run['folder']}/steps.csv", said))
        result.again.append((run["folder"], "no" if wrong else "yes", said))
        check_flops(result, run, os.path.join(write, "run", "layers.csv"))


def check_flops(result, run, path):
    """Images per second times operations per image, below the machine's measured peak. Of an image at least twice
    the forward operations that are executed are needed."""
    try:
        with open(path, newline="", encoding="utf-8") as f:
            mflop = sum(float(row["mflop"]) / max(1, float(row["saved"] or 1)) for row in csv.DictReader(f))
    except (OSError, ValueError, KeyError):
        return
    peak, speed = run["peak"], run["img_per_s"]
    if run["kind"] == "cpu" and is_number(peak) and is_number(speed) and speed * 2 * mflop / 1000 > BUSY * peak:
        result.flags.append(("numbers", f"{run['folder']}/epochs.csv", f"expected at most {BUSY} times the "
                             f"measured peak of {peak:g} GFLOP/s, found {speed * 2 * mflop / 1000:.0f} GFLOP/s: "
                             f"{speed:g} images per second x 2 x {mflop:.1f} MFLOP"))


# ---- Jobs of the cluster


def read_jobs(path, fail):
    """{job: (user, seconds)} of what sacct prints."""
    try:
        with open(path, newline="", encoding="utf-8") as f:
            rows = list(csv.DictReader(f, delimiter="|"))
        return {row["JobIDRaw"]: (row["User"], int(row["ElapsedRaw"])) for row in rows}
    except (OSError, KeyError, TypeError, ValueError) as error:
        return fail(path, "the columns JobIDRaw, User and ElapsedRaw, with | between them", repr(error),
                    "write it with the command in labs/INSTRUCTOR.md")


def check_jobs(course, result):
    """Each run with a job's number is one of a job of the cluster, and not longer than that."""
    for run in result.runs if course.jobs is not None else ():
        job, where = run["job"], f"{run['folder']}/run.json"
        if not job:
            continue
        if job not in course.jobs:
            result.flags.append(("jobs", where, f"expected a job of the cluster, found job {job}, which "
                                 "sacct does not list"))
            continue
        user, seconds = course.jobs[job]
        if is_number(run["wall_s"]) and run["wall_s"] > seconds + 1:
            result.flags.append(("jobs", where, f"expected at most {seconds} s, as long as job {job} of {user} "
                                 f"lasted, found a run of {run['wall_s']:g} s"))


# ---- Plots


def draw_plots(course, result, given, folder):
    """What plot.py draws of each folder of run folders."""
    if not course.plots:
        result.notes.append("No plots: no python3 here has matplotlib; pip install -r labs/requirements.txt")
        return
    for number, above in enumerate(sorted({os.path.dirname(run["folder"]) for run in result.runs})[:4]):
        write = course.new(folder, f"plot{number}")
        source = os.path.join(write, os.path.basename(above) or "runs")
        intake.copy_folder(os.path.join(given, above), source)
        subprocess.run(["rm", "-rf", os.path.join(source, "plots")], check=True)
        os.makedirs(os.path.join(source, "plots"))
        if sandbox.is_root():
            os.chown(os.path.join(source, "plots"), sandbox.NOBODY, sandbox.NOBODY)
        done = course.run([course.python, os.path.join(course.tools, "plot.py"), source], [course.tools], write, PLOT_S)
        drawn = [name for name in sorted(os.listdir(os.path.join(source, "plots"))) if name.endswith(".png")]
        for name in drawn:
            picture = read_picture(os.path.join(source, "plots", name))
            if picture and re.fullmatch("[a-z]+.png", name):
                result.plots.append((f"{above}: {name[:-4]}", picture))
        if not drawn:
            result.notes.append(f"No plots of {above}: {done.stopped or last_line(done.said).replace(source, above)}")


def read_picture(path):
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as f:
        data = f.read(PLOT_BYTES + 1)
    return data if data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) <= PLOT_BYTES else None


# ---- All students together


def compare(results):
    """Finds runs with the times of another one: of the same student or another, unchanged, in part or scaled."""
    owners, orders, runs = {}, {}, []
    for result in results:
        for run in result.runs:
            number = len(runs)
            runs.append((result, run))
            shared = {}
            for row in set(run["rows"]):
                for other in owners.setdefault(row, [])[:8]:
                    shared[other] = shared.get(other, 0) + 1
                owners[row].append(number)
            copies = [other for other, count in shared.items() if count >= max(3, SHARED * len(run["rows"]))]
            for other in copies:
                copied(runs[other], runs[number], f"{shared[other]} of {len(run['rows'])} steps with times of their "
                       "own, found those")
            order = order_of(run["times"])
            for other in orders.setdefault(order, [])[:8] if order else ():
                if other not in copies and scaled(runs[other][1]["times"], run["times"]):
                    copied(runs[other], runs[number], "times of their own, found those, times a factor,")
            if order:
                orders[order].append(number)


def copied(one, two, what):
    for (result, run), (other, run_of_other) in ((one, two), (two, one)):
        whose = "" if other is result else f" of {other.student}"
        result.flags.append(("copied", f"{run['folder']}/steps.csv", f"expected {what} of "
                             f"{run_of_other['folder']}{whose}"))


def order_of(times):
    """The order of the longest steps, which a factor does not change; None if there are too few."""
    if len(times) < 16:
        return None
    return len(times), tuple(sorted(range(len(times)), key=lambda i: -times[i])[:8])


def scaled(a, b):
    """Whether each time of b is the time in a multiplied by the same factor, but for rounding."""
    factor = sum(b) / max(sum(a), 1e-9)
    return all(abs(y - factor * x) <= 1e-3 * y + 2e-6 * (1 + factor) for x, y in zip(a, b))
