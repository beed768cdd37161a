"""Tests labs/grade with the submissions of submissions.py; test_grade.sh calls it.

    grade_test.py MADE REPO     MADE has a starter of lab 0, the runs to begin with, and the program to run

All submissions are examined; a third of them goes through all of labs/grade, others each day (LONG=1: all, QUICK=1:
one). It prints `pass grade/NAME`, `fail grade/NAME: ...` or `skip grade/NAME: ...`.
"""
import csv
import glob
import html
import json
import os
import re
import signal
import subprocess
import sys
import time

MADE, REPO = sys.argv[1:3]
QUICK = bool(os.environ.get("QUICK"))
sys.path[:0] = [os.path.join(REPO, "labs", "grader"), os.path.join(REPO, "labs", "tools")]
sys.dont_write_bytecode = True

import examine  # pylint: disable=wrong-import-position
import gradebook  # pylint: disable=wrong-import-position
import grading  # pylint: disable=wrong-import-position
import intake  # pylint: disable=wrong-import-position
import sandbox  # pylint: disable=wrong-import-position
import submissions  # pylint: disable=wrong-import-position
import try_sandbox  # pylint: disable=wrong-import-position

KIND = "bwrap" if sandbox.works("bwrap") else "limits"


def verdict(name, expected, found, holds):
    name = re.sub("[^A-Za-z0-9_./-]", "_", name)
    line = " | ".join(str(found).split("\n"))[:400]
    print(f"pass grade/{name}" if holds else f"fail grade/{name}: expected {expected}, found {line}", flush=True)


def same(name, expected, found):
    verdict(name, expected, found, expected == found)


def has(flags, wanted):
    kind, place, reason = wanted
    return any(k == kind and place in p and reason in r for k, p, r in flags)


def judge(name, flags):
    """Whether the flags of a submission are the expected ones: all of BAD's, none for a good one."""
    for wanted in submissions.BAD[name][1] if name in submissions.BAD else ():
        verdict(f"flagged/{name}/{wanted[0]}-{wanted[1]}", wanted, flags, has(flags, wanted))
    if name in submissions.GOOD:
        verdict(f"not_flagged/{name}", "no flag", flags, not flags)


# ---- All of labs/grade


def grade(names, *options, to="grades"):
    """Grades these, with the options; returns (status, output, rows of the grade book, pages)."""
    folder, out = os.path.join(MADE, "given"), os.path.join(MADE, to)
    paths = [os.path.join(folder, name) for name in names]
    done = subprocess.run([os.path.join(REPO, "labs", "grade"), "--lab", "0", "--out", out, "--starter",
                           f"{MADE}/starter", "--program", f"{MADE}/cnn", "--jobs", f"{MADE}/jobs.txt", "--again", "9",
                           "--isolation", KIND, *options, *paths], capture_output=True, text=True, check=False,
                          env=dict(os.environ, CC=f"{MADE}/bin/gcc", LIMIT_S="60"))
    try:
        with open(f"{out}/gradebook.csv", newline="", encoding="utf-8") as f:
            rows = list(csv.DictReader(f))
    except OSError:
        rows = []
    pages = {}
    for row in rows:
        with open(os.path.join(out, row["page"]), encoding="utf-8") as f:
            pages[row["page"]] = f.read()
    return done.returncode, done.stdout + done.stderr, rows, pages


def flags_of(page):
    """The table of flags of a page, as a reader sees it."""
    part = page.partition("<h2>Flags</h2>")[2].partition("<h2>Rubric</h2>")[0]
    rows = re.findall("<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", part, re.S)
    return [tuple(map(html.unescape, row)) for row in rows]


def test_whole(names):
    status, said, rows, pages = grade(names)
    same("whole/status", int("in_another_place" in names), status)  # whoever has handed in nothing is not graded
    verdict("whole/isolation", "a line Isolation: ...", said, said.startswith("Isolation: "))
    same("whole/rows", len(names), len(rows))
    for name, row in zip(names, rows):
        page = pages[row["page"]]
        judge(name, flags_of(page))
        student = re.sub(r"\.(zip|tar\.gz)$", "", name)
        same(f"whole/student/{name}", student, row["student"].lstrip("'"))
        if name in submissions.GOOD:
            same(f"whole/points/{name}", ("10", "10", ""), (row["points"], row["of"], row["flags"]))
            verdict(f"whole/again/{name}", "all re-runs agree", row["rerun"],
                    re.fullmatch(r"([1-9]) of \1", row["rerun"]))
        else:
            verdict(f"whole/row/{name}", "the kinds of its flags", row["flags"],
                    all(flag[0] in row["flags"] for flag in submissions.BAD[name][1]))
        harmless(f"whole/page/{name}", page)
    cells = "\n".join(",".join(row.values()) for row in rows)
    verdict("whole/no_formula", "no cell that begins with =", cells, not re.search("(^|,)[=+@-]", cells, re.M))
    untouched()
    _, _, later, _ = grade(names[:1])  # one student by itself, later
    same("whole/others_stay", rows, later)
    same("whole/private", 0o700, os.stat(f"{MADE}/grades").st_mode & 0o777)
    for page in pages:
        verdict(f"whole/file_name/{page}", "harmless characters", page, re.fullmatch("pages/[A-Za-z0-9._-]+", page))


def test_later():
    """Later calls find runs copied from students of earlier ones, whose rows stay where they are."""
    submissions.save(f"{MADE}/given/notes.rar", "no archive that labs/grade reads")
    status, said, _, _ = grade(["liam_the_victim", "notes.rar", "anna"], "--again", "0", to="later")
    same("later/stray/status", 1, status)
    verdict("later/stray", "the file's name", said, re.search("Not graded: .*/notes.rar: expected a", said))
    for name, flags in ("copied_run", ["", "", "1 copied"]), ("liam_the_victim", ["1 copied", "", "1 copied"]):
        _, said, rows, _ = grade([name], "--again", "0", to="later")
        same(f"later/{name}", dict(zip(["liam_the_victim", "anna", "copied_run"], flags)),
             {row["student"]: row["flags"] for row in rows})
        verdict(f"later/{name}/said", "2 students graded earlier", said, "those of 2 students graded earlier" in said)
        same(f"later/{name}/order", ["liam_the_victim", "anna", "copied_run"], [row["student"] for row in rows])


def some(names):
    """A third of them, others each day, and all with LONG=1. What is copied from another one comes with it."""
    day = int(os.environ.get("ROTATION") or time.strftime("%j"))
    return [name for i, name in enumerate(names) if os.environ.get("LONG") or (i + day) % 3 == 0 or
            name.startswith("copied_") or name.endswith("_the_victim")]


def harmless(name, page):
    """No element of a page comes from a submission."""
    wanted = set("html head meta title style body h1 h2 p table tr th td pre img".split())
    found = set(re.findall("<([^ >/]*)", re.sub("<!DOCTYPE html>|</", "", page))) - wanted
    verdict(name, "no other elements", found, not found and "<img src" not in page)


def untouched():
    same("nothing_written_outside", [], os.listdir(f"{MADE}/canary"))


# Of a lab on the CPU and one on the GPU: the file, the part, code in place of that part, and the flag that it gets.
RELU_KERNEL = """static __global__ void relu_forward_kernel(real *out, const real *in, unsigned count) {
    for (unsigned i = element(); i < count; KERNEL)
        out[i] = in[i] < 0 ? 0 : in[i];
}
static void relu_forward(Work w) {
    HOST
    LAUNCH(relu_forward_kernel, outputs(w), w.out, w.in, outputs(w));
}
"""
HOSTILE = {
    "1": ("cnn.c", "1.1", {
        "never_ends": ("for (;;)\n    ;", ("code", "test 1", "stopped after")),
        "forks": ("for (;;)\n    fork();", ("code", "test 1", "uses fork, which this task has no use for")),
        "uses_a_socket": ("extern int socket(int, int, int);\n    socket(2, 1, 0);",
                          ("code", "test 1", "uses socket, which this task has no use for")),
        "removes_files": ('remove("CANARY/kept");', ("code", "test 1", "uses remove, which this task has no use for")),
        "writes_files": ('mkdir("CANARY/made", 0777);',
                         ("code", "test 1", "uses mkdir, which this task has no use for"))}),
    "4": ("cnn_kernels.cu", "4.1", {
        "kernel_never_ends": (RELU_KERNEL.replace("KERNEL", "").replace("HOST", ""),
                              ("code", "test 1", "stopped after")),
        "launch_removes_files": (RELU_KERNEL.replace("KERNEL", "i += count").replace("HOST", 'remove("CANARY/kept");'),
                                 ("code", "test 1", "uses remove, which this task has no use for"))})}


def test_hostile_code(lab):
    """Parts of a lab that do harm if they are run; none of them earns a point."""
    file, part, made = HOSTILE[lab]
    starter, given, grades = (f"{MADE}/{name}{lab}" for name in ("starter", "given", "grades"))
    subprocess.run([f"{REPO}/labs/check/starter.sh", lab, starter], check=True, stdout=subprocess.DEVNULL)
    text = submissions.load(f"{starter}/{file}")
    begin, end = (re.search(rf"/\* LAB {part} {word}.*\n", text) for word in ("BEGIN", "END"))
    for name, (code, _) in made.items():
        code = code.replace("CANARY", f"{MADE}/canary")
        submissions.save(f"{given}/{name}/{file}", f"{text[:begin.end()]}{code}\n    {text[end.start():]}")
    os.chmod(f"{MADE}/canary", 0o777)
    submissions.save(f"{MADE}/canary/kept", "kept")
    done = subprocess.run([f"{REPO}/labs/grade", "--lab", lab, "--out", grades, "--starter", starter,
                           "--again", "0", "--isolation", KIND, *(f"{given}/{name}" for name in made)],
                          capture_output=True, text=True,
                          check=False, env=dict(os.environ, LIMIT_S="15"))
    same(f"hostile/lab {lab}/status", 0, done.returncode)
    for name, (_, wanted) in made.items():
        page = submissions.load(f"{grades}/pages/{name}.html")
        verdict(f"hostile/{name}", wanted, flags_of(page), has(flags_of(page), wanted))
        verdict(f"hostile/{name}/points", "0 of 20", page[:2000], "0 of 20 auto-graded points" in page)
        harmless(f"hostile/{name}/page", page)
    same(f"hostile/lab {lab}/canary", ["kept"], os.listdir(f"{MADE}/canary"))
    os.remove(f"{MADE}/canary/kept")


# ---- All submissions, without the checker


class Plain:
    """What grading.py needs of a course, without a sandbox."""

    def __init__(self):
        self.base, self.starter, self.tools = MADE, f"{MADE}/starter", f"{MADE}/tools"
        self.lab, self.python, self.count, self.partless = "0", sys.executable, 0, []
        self.program, self.again, self.data, self.seed = f"{MADE}/cnn", 9, None, 1
        self.jobs = grading.read_jobs(f"{MADE}/jobs.txt", None)

    folder, new = grading.Course.folder, grading.Course.new

    @staticmethod
    def run(command, _read, write, _seconds, cwd=None):
        """Runs our own programs only: those that unpack, examine and train. A child of this process starts faster than
        another Python."""
        if command[0] != "prlimit":
            done = subprocess.run(command, cwd=cwd or write, capture_output=True, text=True, check=False)
            return grading.SimpleNamespace(status=done.returncode, stopped="", left=0, said=done.stdout + done.stderr)
        program, *words = command[command.index("--") + 2:]
        child = os.fork()
        if child == 0:
            sys.stderr = open(os.path.join(write, "stderr"), "w", encoding="utf-8")
            status = 1
            try:
                (intake if program.endswith("intake.py") else examine).main(*words)
                status = 0
            finally:
                os._exit(status)
        status = os.waitpid(child, 0)[1]
        return grading.SimpleNamespace(status=status, stopped="", left=0, said="")


def needs_a_run(name):
    """Whether only a re-run finds what is wrong, or could fail because of it."""
    flags = submissions.BAD.get(name, (None, []))[1]
    return "overflows" in name or any(flag[0] == "rerun" or "times the measured peak" in flag[2] for flag in flags)


def test_examined(names):
    course, results = Plain(), []
    for name in names:
        result = grading.new_result(name)
        folder = course.folder()
        results.append(result)
        given = grading.take(course, result, os.path.join(MADE, "given", name), folder)
        if not given:
            continue
        grading.examine(course, result, given, folder)
        grading.check_jobs(course, result)
        if needs_a_run(name):
            grading.begin_again(course, result, folder)
    grading.compare(results)
    for result in results:
        judge(result.student, result.flags)
        empty = [note for note in result.notes if note.startswith("empty: ")]
        same(f"empty/{result.student}", result.student == "starter_as_it_was", bool(empty))
    untouched()


# ---- Parts of it


def test_cells():
    for given, found in (("=1+1", "'=1+1"), ("a\nb", "a b"), ("+a", "'+a"), ("@a", "'@a"), ("-a", "'-a"), ("a", "a")):
        same(f"cell/{given}", found, gradebook.cell(given))
    names = [gradebook.page_name(name) for name in ("a", "../a", "<a>", "a b", "a/b", "")]
    verdict("page_name", "harmless and different", names, len(set(names)) == len(names) and all(
        re.fullmatch("[A-Za-z0-9._-]+", name) and not name.startswith(".") for name in names))


def test_refused():
    folder, no_bwrap = os.path.join(MADE, "given", "anna"), f"{MADE}/no_bwrap/bwrap"
    submissions.save(no_bwrap, "#!/bin/sh\nexit 1\n")
    os.chmod(no_bwrap, 0o755)
    head, row = ",".join(gradebook.COLUMNS), "anna,0,10,10,,,"
    books = {"of_lab_0": f"{head}\n{row}\n", "own_column": f"{head},mine\n{row},35\n",
             "own_cell": f"{head}\n{row},35\n", "semicolons": f"{head}\n{row}\n".replace(",", ";"),
             "latin1": f"{head}\n{row}\udcfc\n"}
    for name, text in books.items():
        submissions.save(f"{MADE}/{name}/gradebook.csv", text)
    for name in ("a b", "a  b"):
        os.makedirs(f"{MADE}/twice/{name}")
    for name, words, wanted in (
            ("no_folder", ["--lab", "0", "nowhere"], "nowhere: expected a folder or an archive"),
            ("no_bubblewrap", ["--lab", "0", folder], "add --isolation limits"),
            ("same_name", ["--lab", "0", folder, folder], "a name of its own for each student"),
            ("same_row", ["--lab", "0", f"{MADE}/twice/a b", f"{MADE}/twice/a  b"], "a name of its own for each"),
            ("no_lab", ["--lab", "99", folder], "there is no such lab"),
            ("no_number", ["--lab", "x", folder], "--lab: expected a whole number, found 'x'"),
            ("two_labs", ["--lab", "1", "--out", f"{MADE}/of_lab_0", folder], "expected a folder for one lab"),
            *((name, ["--lab", "0", "--out", f"{MADE}/{name}", folder],
               f"{name}/gradebook.csv, line {line}: expected {head}, found {found}") for name, line, found in (
                   ("own_column", 1, f"{head},mine;"), ("own_cell", 2, f"{row},35;"),
                   ("semicolons", 1, "student;lab;"), ("latin1", 1, "'utf-8' codec can't"))),
            ("no_program", ["--lab", "0", "--program", "none", folder], "none: expected your build of cnn"),
            ("no_starter", ["--lab", "0", "--starter", folder, folder], "the starter of lab 0, found no starter"),
            ("other_starter", ["--lab", "1", "--starter", f"{MADE}/starter", folder],
             "the starter of lab 1, found that of lab 0"),
            ("no_submission", ["--lab", "0", f"{folder}/cnn.c"], "cnn.c: expected a folder or an archive"),
            ("no_jobs", ["--lab", "0", "--jobs", f"{folder}/cnn.c", folder], "expected the columns JobIDRaw")):
        environment = dict(os.environ, PATH=f"{MADE}/no_bwrap:{os.environ['PATH']}")
        if name != "no_bubblewrap":
            words, environment = ["--isolation", KIND, *words], None
        done = subprocess.run([sys.executable, os.path.join(REPO, "labs", "grade"), *words], capture_output=True,
                              text=True, check=False, cwd=MADE, env=environment)
        verdict(f"refused/{name}", f"exit 2 and {wanted}", f"{done.returncode} {done.stderr}",
                done.returncode == 2 and wanted in done.stderr and "Traceback" not in done.stderr)
    for name, text in books.items():
        with open(f"{MADE}/{name}/gradebook.csv", encoding="utf-8", errors="surrogateescape") as f:
            same(f"refused/{name}/stays", text, f.read())


class Sandboxed(Plain):
    """A course whose tools run in the sandbox."""

    tests, plots, try_tools = [(10, "a test")], False, grading.Course.try_tools

    @staticmethod
    def run(command, read, write, seconds, cwd=None):
        return sandbox.run(KIND, command, read, write, seconds, cwd)


def test_forged():
    """Results count only if the checker ends as it should and its last line has their sum."""
    for name, last, status, points in (("both", "lab 0: 3/10 points", 1, 3), ("all", "lab 0: 10/10 points", 0, None),
                                       ("status", "lab 0: 3/10 points", 2, None),
                                       ("after", "lab 0: 3/10 points\ncannot write results.json", 1, None)):
        course, folder = Plain(), os.path.join(MADE, "forged", name)
        done = grading.SimpleNamespace(status=status, stopped="", left=0, said=last)
        os.makedirs(folder)
        course.tests = [(3, "a test"), (7, "another")]

        def run(_command, _read, write, _seconds, ended=done):
            submissions.save(os.path.join(write, "results.json"),
                             '{"tests": [{"score": 3, "status": "passed"}, {"score": 0}]}')
            return ended

        course.run = run
        result = grading.new_result("mallory", course.tests)
        grading.check(course, result, folder, folder)
        same(f"forged/{name}", (points, points is None), (result.points, bool(result.flags)))


def test_out_of_time():
    """A test without code of the student does not blame it, and no text names a folder of the grader."""
    said = "stopped after 300 s: an endless loop, or a deadlock? "
    for partless, kind in (["a test"], "checker"), ([], "code"):
        course, given = Plain(), os.path.join(MADE, "out_of_time", kind)
        os.makedirs(given)
        course.tests, course.partless = [(3, "a test"), (7, "another")], partless

        def run(_command, _read, write, _seconds, given=given):
            tests = [{"output": said}, {"output": f"runs/lab00: there is no such folder in {given}; {given}/cnn.c"}]
            submissions.save(os.path.join(write, "results.json"), json.dumps({"tests": tests}))
            return grading.SimpleNamespace(status=1, stopped="", left=0, said="lab 0: 0/10 points")

        course.run = run
        result = grading.new_result("mallory", course.tests)
        grading.check(course, result, given, given)
        same(f"out_of_time/{kind}", [kind], [flag[0] for flag in result.flags])
        same(f"out_of_time/{kind}/loop", kind == "code", "loop" in result.flags[0][2] and "loop" in result.tests[0][3])
        same(f"out_of_time/{kind}/path", "runs/lab00: there is no such folder in the submission; cnn.c",
             result.tests[1][3])


def test_broken_tools():
    """Where this program's own Python does not start, nobody gets a grade, not even 0 points."""
    course = Sandboxed()
    course.base = os.path.join(MADE, "sandboxed")
    os.mkdir(course.base)
    course.python = f"{MADE}/no_python"
    for name in ("anna", "dora.zip"):
        result = grading.grade(course, name, os.path.join(MADE, "given", name))
        same(f"broken_tools/{name}/points", None, result.points)
        wanted = "checker", "labs/grade", "does not start"
        verdict(f"broken_tools/{name}", wanted, result.flags, has(result.flags, wanted))


def test_ended(number):
    """A signal after the first of two students: the first is in the grade book, and no folder is left. While it runs,
    only its user can enter its folder."""
    temporary, out = f"{MADE}/temporary{number}", f"{MADE}/grades-ended{number}"
    os.mkdir(temporary, 0o755)
    # env: nohup has SIGHUP ignored, and the grader leaves it so
    command = ["env", f"--default-signal={signal.Signals(number).name}", os.path.join(REPO, "labs", "grade"), "--lab",
               "0", "--out", out, "--starter", f"{MADE}/starter", "--again", "0", "--isolation", KIND,
               f"{MADE}/given/anna", f"{MADE}/given/chen_report"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True,
                          env=dict(os.environ, CC=f"{MADE}/bin/gcc", TMPDIR=temporary)) as grader:
        said = [grader.stdout.readline(), grader.stdout.readline()]
        modes = [oct(entry.stat().st_mode & 0o7007) for entry in os.scandir(temporary)
                 if entry.name.startswith("grade-")]
        grader.send_signal(number)
        time.sleep(0.05)
        grader.send_signal(number)
    same("ended/said", "anna: 10/10 points", said[1].partition(",")[0])
    same("ended/status", 128 + number, grader.returncode)
    same("ended/private", ["0o0"], modes)
    same("ended/nothing_left", [], os.listdir(temporary))
    same("ended/grade_book", ["student", "anna"], [line.split(",")[0] for line in
                                                   submissions.load(f"{out}/gradebook.csv").splitlines()])
    verdict("ended/page", "its page", os.listdir(f"{out}/pages"), os.path.exists(f"{out}/pages/anna.html"))


def test_refusals():
    """The phrases by which labs/grade knows what a part has done are the checker's."""
    checker = "".join(submissions.load(path) for path in glob.glob(f"{REPO}/labs/check/*.*"))
    for phrase in (*grading.BY_A_PART.pattern.split("|"), grading.AN_ENDLESS_LOOP, f"LIMIT_S:-{grading.TEST_S}}}"):
        verdict(f"refusals/{phrase.replace(' ', '_')}", "in labs/check", "nowhere", phrase in checker)


def main():
    every = [*submissions.GOOD, *submissions.BAD]
    submissions.make_all(MADE, os.path.join(MADE, "given"), every)
    verdict("submissions", "30 or more", len(every), len(every) >= 30)
    test_cells()
    test_refusals()
    test_refused()
    test_examined(every)
    test_forged()
    test_out_of_time()
    test_broken_tools()
    for number in (signal.SIGHUP,) if QUICK else (signal.SIGHUP, signal.SIGTERM):
        test_ended(number)
    try_sandbox.test_all(verdict, MADE, QUICK)
    test_whole(["anna"] if QUICK else some(every))
    if not QUICK:
        test_later()
        for lab in ["1", *some(["4"])]:
            test_hostile_code(lab)


if __name__ == "__main__":
    main()
