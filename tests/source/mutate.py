#!/usr/bin/env python3
"""Do the tests notice a bug?  Changes the sources, one place at a time, and runs the tests in a copy.

usage: mutate.py [--sources FILE[:SECTIONS]...] [--tests unit|quick] [--seed N] [--count N] [--at-least N]

--sources: cnn.c, cnn_kernels.c, cnn_kernels.cu, or some sections of one; cnn.c:3-7 if not given.
Draws changes of these: an operator, a constant, an index, the bound of a loop, += to =, a statement
left out; all of them in code, never in comments or strings, nor in MEASURES.  A change counts if it
compiles and gives other object code.  It is noticed if a test fails, or if the tests take far longer
than without a change.

--tests unit: runs the unit tests in float, with QUICK=1 in the environment as in `make test`.
--tests quick: runs the parts of `make test` that run code of the changed file (PARTS), the cheapest
first, up to the first that fails.  A change that none of them notices is given to the same parts of
`make test-all`; if those do not notice it either, it is shown, and does not count: --count is the
number of changes that `make test-all` notices.  The kernels of the GPU run in the emulator.

The exit status is 1 if fewer than --at-least changes are noticed.  CC=COMPILER: another than gcc.
"""
import argparse
import glob
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

sys.dont_write_bytecode = True  # no __pycache__ in the source tree
import style

REPO = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DEFAULT = "cnn.c:3-7"
MEASURES = "cpu_peak_gflops"  # a function that only measures the machine: no test can know its result
MEMORY = 8 << 30  # bytes that changed unit tests may take
CC = os.environ.get("CC", "gcc")
MPI = "-DCNN_MPI " + (subprocess.getoutput("mpicc -show").split(" ", 1)[1] if shutil.which("mpicc") else "")

# For each source: what compiles it in every way in which `make` does, each to an object file at
# object.o, and the parts of tests/run_tests.sh that run its code. Parts that look at the text of the
# sources would notice any change, and nvcc none of these.
C = f"{CC} -std=gnu17 -O1 -march=native -fno-math-errno -w -fopenmp -c cnn.c -o object.o"
EMULATED = (
    "sed -f tests/emulator/cuda_on_cpu.sed cnn_kernels.cu | g++ -std=c++17 -O1 -march=native -fopenmp -w"
    " -I. -include tests/emulator/cuda_on_cpu.h -x c++ -c - -o object.o"
)
COMPILE = {
    "cnn.c": [C, f"{C} -DCNN_CUDA {MPI}"],
    "cnn_kernels.c": [C],
    "cnn_kernels.cu": [EMULATED],
}
PARTS = {
    "cnn.c": r"(unit|program|pytorch|cluster|labs|bench)/|gpu/(?!test_nvcc)",
    "cnn_kernels.c": r"(unit|program|pytorch)/",
    "cnn_kernels.cu": r"gpu/(?!test_nvcc)|cluster/test_parallel",
}
UNIT = ["unit/float", "unit/double"]

# Binary operators have a blank on both sides, a pointer's * has not: clang-format sees to it.
OPERATORS = {"+": "-", "-": "+", "*": "+", "/": "*", "%": "/", "<": "<=", "<=": "<", ">": ">=", ">=": ">",
             "==": "!=", "!=": "==", "&&": "||", "||": "&&", "-=": "+=", "*=": "+="}  # fmt: skip
DECLARATION = re.compile(r"\s*(?:(?:static|const|volatile|struct|enum) )*\w+ \**(?:restrict )?\w+[ ;,\[=]")


# Each of these yields the changes of one kind in a line of code: (first column, last column, new text).


def operators(code):
    for found in re.finditer(r"(?<= )(\S{1,2})(?= )", code):
        if found[1] in OPERATORS:
            yield found.start(), found.end(), OPERATORS[found[1]]


def constants(code):
    for found in re.finditer(r"(?<![\w.])\d+(?![\w.])", code):
        yield found.start(), found.end(), str(int(found[0]) + 1)
    for found in re.finditer(r"(?<![\w.])(?:\d+\.\d*|\.\d+|\d+(?=e))(?:e-?\d+)?", code):
        yield found.start(), found.end(), f"(2 * {found[0]})"


def indices(code):
    declared = DECLARATION.match(code)  # whose brackets, up to the =, are a size
    for found in re.finditer(r"\[([^][]+)\]", code):
        if not declared or "=" in code[: found.start()]:
            yield found.start(1), found.end(1), found[1] + " + 1"


def bounds(code):
    for found in re.finditer(r"(?<=; )(\w+) < ", code):
        yield found.start(), found.end(), f"{found[1]} + 1 < "


def sums(code):
    for found in re.finditer(r"(?<= )\+=(?= )", code):
        yield found.start(), found.end(), "="


def statements(code):
    text = code.strip()
    whole = re.fullmatch(r"[^=]+ [-+*/|^]?= [^;]*;|\w[\w.>-]*\(.*\);", text)
    if whole and not DECLARATION.match(code) and text.count("(") == text.count(")"):
        start = len(code) - len(code.lstrip())
        yield start, start + len(text), ";"


KINDS = operators, constants, indices, bounds, sums, statements


def changes(source, lines, sections):
    """For each kind, its changes: (source, line number from 0, first column, last column, new text)."""
    found = {kind: [] for kind in KINDS}
    section, function, begins_statement, directive = 0, "", True, False
    for number, (line, code) in enumerate(lines):
        heading = re.match(r"/\* ==== (\d+)\.", line)
        section = int(heading[1]) if heading else section
        function = code if re.match(r"\w", code) else function
        directive = directive or code.startswith("#")
        wanted = section in sections and not directive and MEASURES not in function
        if wanted and code.startswith("    "):
            for kind in KINDS:
                if kind is not statements or begins_statement:
                    found[kind] += [(source, number, *change) for change in kind(code)]
        directive = directive and code.rstrip().endswith("\\")
        if code.strip():
            begins_statement = bool(re.search(r"[;{}:)]$|\belse$|^ *PARALLEL\w*$", code.rstrip()))
    return found


def end_session(leader):
    """Ends a program that was started in a session of its own, with all that it started."""
    for wanted in signal.SIGTERM, signal.SIGKILL:
        for path in glob.glob("/proc/[0-9]*/stat"):
            try:
                fields = style.read(path).rsplit(")", 1)[1].split()
                if int(fields[3]) == leader:
                    os.kill(int(path.split("/")[2]), wanted)
            except OSError:  # it has ended by itself
                pass
        if wanted is signal.SIGTERM:
            time.sleep(2)  # for programs that clean up


class Tests:
    """The tests in a copy of the tree."""

    def __init__(self, folder):
        self.folder = folder
        names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=REPO, check=True,
                               stdout=subprocess.PIPE, text=True).stdout.splitlines()  # fmt: skip
        for name in names:
            if os.path.exists(os.path.join(REPO, name)):
                os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
                shutil.copy(os.path.join(REPO, name), os.path.join(folder, name))
        runner = style.read(os.path.join(REPO, "tests/run_tests.sh"))
        listed = re.search(r"^parts='\n(.*?)^'", runner, re.S | re.M)[1].splitlines()
        self.parts = [line.split()[0] for line in reversed(listed)]  # the longest come first there
        self.seconds = {}  # that a stage takes without a change

    def write(self, name, text):
        with open(os.path.join(self.folder, name), "w", encoding="utf-8") as file:
            file.write(text)

    def compile(self, source):
        """The object code, or None if it does not compile."""
        code = []
        for command in COMPILE[source]:
            if subprocess.run(command, shell=True, cwd=self.folder, stderr=subprocess.DEVNULL).returncode:
                return None
            with open(os.path.join(self.folder, "object.o"), "rb") as file:
                code.append(file.read())
        return code

    def stages(self, source, tests):
        """What is run one after the other: (name, target of make, parts, value of QUICK)."""
        programs = ["build/test_float", "build/test_double"]
        if tests == "unit":
            return [("unit/float", programs[:1], UNIT[:1], os.environ.get("QUICK", ""))]
        parts = [part for part in self.parts if re.match(PARTS[source], part)]
        unit = [part for part in parts if part in UNIT]
        rest = [part for part in parts if part not in UNIT]
        rest.sort(key=lambda part: not re.match("program|gpu", part))  # these run most of the code
        return ([("make test", programs, unit, "1")] if unit else []) + [
            ("make test", ["test-programs"], rest, "1"), ("make test-all", ["test-programs"], parts, "")]  # fmt: skip

    def run(self, stage, seconds):
        """What shows the bug, or None."""
        _, targets, parts, quick = stage
        make = subprocess.run(["make", "-s", "-j2", *targets], cwd=self.folder, env=ENVIRONMENT, text=True,
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip
        if make.returncode:
            return "make: " + make.stderr.strip().split("\n")[-1]
        # only for programs without a thread sanitizer, which reserves terabytes
        limit = lambda: set(parts) <= set(UNIT) and resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        program = subprocess.Popen(
            ["tests/run_tests.sh", *parts], cwd=self.folder, env={**ENVIRONMENT, "QUICK": quick}, preexec_fn=limit,
            text=True, errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        alarm = threading.Timer(seconds, end_session, [program.pid])
        alarm.start()
        started, why = time.monotonic(), None
        try:
            for line in program.stdout:
                if line.startswith("fail "):
                    why = line.strip()
                    break
        finally:  # also when this program is interrupted
            alarm.cancel()
            if why or sys.exc_info()[0]:
                end_session(program.pid)
        status = program.wait()
        if why is None and time.monotonic() - started >= seconds:
            return f"hangs: ended after {seconds:.0f} s"
        return why or (f"exit status {status}" if status else None)

    def notice(self, source, good, changed, tests):
        """The name of the stage that notices the change, and why; or None, None."""
        for stage in self.stages(source, tests):
            key = str(stage)
            if key not in self.seconds:
                self.write(source, good)
                started = time.monotonic()
                problem = self.run(stage, 7200)
                if problem:
                    sys.exit(f"mutate.py: error: {stage[0]} fails without a change: {problem}")
                self.seconds[key] = time.monotonic() - started
            self.write(source, changed)
            why = self.run(stage, 60 + 3 * self.seconds[key])
            if why:
                return stage[0], why
        return None, None


ENVIRONMENT = {**os.environ, "NO_CUDA": "1", "OMP_WAIT_POLICY": "passive"}


def parse_source(text):
    """FILE or FILE:FIRST-LAST: the name and the sections."""
    found = re.fullmatch(r"([^:]+)(?::(\d+)-(\d+))?", text)
    if not found or found[1] not in COMPILE:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(COMPILE)}, or sections of one as in "
                                         f"{DEFAULT}, found {text}")  # fmt: skip
    return found[1], range(int(found[2]), int(found[3]) + 1) if found[2] else range(100)


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].split("\n")[0])
    parser.add_argument("--sources", nargs="+", type=parse_source, default=[parse_source(DEFAULT)])
    parser.add_argument("--tests", choices=("unit", "quick"), default="unit")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--at-least", type=int, default=0)
    options = parser.parse_args()
    texts, found = {}, {kind: [] for kind in KINDS}
    for source, sections in options.sources:
        if options.tests == "unit" and source == "cnn_kernels.cu":
            parser.error("the unit tests do not run cnn_kernels.cu: give --tests quick")
        path = os.path.join(REPO, source)
        texts[source] = style.read(path)
        lines = list(zip(texts[source].split("\n"), style.code_lines(path)))
        for kind, places in changes(source, lines, sections).items():
            found[kind] += places
    if not any(found.values()):
        parser.error("nothing to change there: only cnn.c and cnn_kernels.cu have numbered sections")
    draw = random.Random(options.seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # after it has ended the tests
    with tempfile.TemporaryDirectory() as folder:
        tests, good = Tests(folder), {}
        done = noticed = 0
        while done < options.count and any(found.values()):
            kind = draw.choice([kind for kind in KINDS if found[kind]])
            source, number, first, last, text = found[kind].pop(draw.randrange(len(found[kind])))
            if source not in good:
                good[source] = tests.compile(source)
            lines = texts[source].split("\n")
            line = lines[number]
            lines[number] = line[:first] + text + line[last:]
            tests.write(source, "\n".join(lines))
            if tests.compile(source) not in (None, good[source]):
                stage, why = tests.notice(source, texts[source], "\n".join(lines), options.tests)
                done += stage is not None or options.tests == "unit"
                noticed += stage not in (None, "make test-all")
                print(f"{f'noticed by {stage}' if stage else 'NOT NOTICED'}: {source}:{number + 1}: "
                      f"{kind.__name__}: {line.strip()}  ->  {lines[number].strip()}  [{why}]", flush=True)  # fmt: skip
            tests.write(source, texts[source])
    print(f"{noticed} of {done} changes noticed, seed {options.seed}")
    return noticed < options.at_least


if __name__ == "__main__":
    sys.exit(main())
