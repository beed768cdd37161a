#!/usr/bin/env python3
"""Do the tests notice a bug?  Changes the sources, one place at a time, and runs the tests in a copy.

usage: mutate.py [--sources FILE[:SECTIONS]...] [--tests unit|quick|all] [--seed N] [--count N]
                 [--at-least N] [--minutes N]

--sources: cnn.c, cnn_kernels.c, cnn_kernels.cu, or some sections of one, as cnn.c:3-7; all if not given.
Of each source --count changes are drawn, over all its lines, from the random numbers of --seed: an
operator, a constant, an index, the bound of a loop, += to =, a statement left out; all of them in code,
never in comments or strings.  A change counts if it compiles, gives other object code, and is not in
equivalent.txt, which says why no test can notice it; another one is drawn in its place.  It is noticed
if a test fails, or if the tests take far longer than without a change.

The tests of a change end at the first that fails; those that run the changed lines come first (LIKELY).
--tests unit: only the unit tests in float.  quick: all parts, in their quick form, that run code of the changed
file (PARTS), some with sanitizers, too.  all: those that notice nothing are repeated as in `make test-all`.  The kernels of the GPU
run in the emulator.

build/mutations has what is known of each change: a call with the same sources, seed and tests goes on
where the last one ended.  --minutes: it ends after so many, and the next call goes on.  The exit status
is 1 if more than --count minus --at-least changes of a source are not noticed.  CC=COMPILER: another
than gcc.
"""
import argparse
import filecmp
import functools
import glob
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

REPO = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
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
    "cnn.c": [C, f"{C} {MPI}"],
    "cnn_kernels.c": [C],
    "cnn_kernels.cu": [EMULATED],
}
PARTS = {
    "cnn.c": r"(unit|program|pytorch|cluster|labs|bench|robust)/|gpu/(?!test_nvcc|test_hip)",
    "cnn_kernels.c": r"(unit|program|pytorch)/",
    "cnn_kernels.cu": r"gpu/(?!test_nvcc|test_hip)|cluster/test_parallel",
}
# The tests that most likely notice a change in a section of cnn.c: sections of the unit tests, then parts.
CLI, CHECKPOINTS, PARALLEL = "program/test_cli.sh", "program/test_checkpoints.sh", "cluster/test_parallel.sh"
LIKELY = {
    2: ("layers gradients",),
    3: ("helpers checkpoints instruments", CLI, CHECKPOINTS),
    4: ("network memory_plan gradients", CLI),
    5: ("network golden", CLI),
    6: ("gradients steps network",),
    7: ("optimizers steps golden", CLI),
    8: ("data", "program/test_data.sh", CLI),
    9: ("data parallel", CLI),
    10: ("parallel", PARALLEL),
    11: ("checkpoints", CHECKPOINTS),
    12: ("helpers", CLI, CHECKPOINTS),
    13: ("instruments", CLI, "robust/test_faults.sh", "labs/test_tools.sh", PARALLEL),
    14: ("steps", CLI, CHECKPOINTS, "program/test_data.sh", PARALLEL),
    15: ("steps", CLI, CHECKPOINTS, PARALLEL),
}
SANITIZED = CLI, CHECKPOINTS, "program/test_data.sh"  # once more, as in make test SANITIZED=1: leaks, indices
# What parts need that make builds; the others: test-programs, which is all of that.
PROGRAMS = {"unit/float": "build/test_float", "unit/double": "build/test_double",
            "unit/avx2": "build/test_avx2", "gpu/emulated": "build/emu_test_cuda",
            "gpu/tensor": "build/emu_test_tensor",
            "robust/test_faults": "build/cnn-cpu",
            "pytorch/live_pytorch": "build/parity_float build/parity_double", "pytorch/": "cnn",
            "(program|robust|labs)/|cluster/test_(doctor|slurm)": "cnn", "cluster/test_parallel": "cnn cnn-emu",
            "gpu/": "cnn cnn-emu build/emu_test_cuda build/emu_bench_gpu"}  # fmt: skip

# Binary operators have a blank on both sides, a pointer's * has not: clang-format sees to it.
OPERATORS = {"+": "-", "-": "+", "*": "+", "/": "*", "%": "/", "<": "<=", "<=": "<", ">": ">=", ">=": ">",
             "==": "!=", "!=": "==", "&&": "||", "||": "&&", "-=": "+=", "*=": "+="}  # fmt: skip
DECLARATION = re.compile(r"\s*(?:(?:static|const|volatile|struct|enum) )*\w+ \**(?:restrict )?\w+[ ;,\[=]")


# A block comment, a line comment, a string, a character: what remains of a C file is code.
NO_CODE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def code_lines(text):
    """The lines of a C file, with blanks instead of comments and strings."""
    return NO_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text).split("\n")


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


def changes(lines, sections):
    """For each kind, its changes: ((section, function), line number from 0, first and last column, new text)."""
    found = {kind: [] for kind in KINDS}
    section, function, begins_statement, directive = 0, "", True, False
    for number, (line, code) in enumerate(lines):
        heading = re.match(r"/\* ==== (\d+)\.", line)
        section = int(heading[1]) if heading else section
        head = re.sub(r"\b__\w+__(\(.*?\))?", "", code) if re.match(r"\w", code) else ""
        head = re.search(r"\b(\w+)(?:\(|\[.*=|\s*=)", head)
        function = head[1] if head else function  # or table
        directive = directive or code.startswith("#")
        if section in sections and not directive and code.startswith("    "):
            for kind in KINDS:
                if kind is not statements or begins_statement:
                    found[kind] += [((section, function), number, *change) for change in kind(code)]
        directive = directive and code.rstrip().endswith("\\")
        if code.strip():
            begins_statement = bool(re.search(r"[;{}:)]$|\belse$|^ *PARALLEL\w*$", code.rstrip()))
    return found


def end_session(leader):
    """Ends a program that was started in a session of its own, with all that it started."""
    for wanted in signal.SIGTERM, signal.SIGKILL:
        for path in glob.glob("/proc/[0-9]*/stat"):
            try:
                fields = read(path).rsplit(")", 1)[1].split()
                if int(fields[3]) == leader:
                    os.kill(int(path.split("/")[2]), wanted)
            except OSError:  # it has ended by itself
                pass
        if wanted is signal.SIGTERM:
            time.sleep(2)  # for programs that clean up


class Tree:
    """A copy of the project, and the tests in it."""

    def __init__(self, folder):
        self.folder = folder
        names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=REPO, check=True,
                               stdout=subprocess.PIPE, text=True).stdout.splitlines()  # fmt: skip
        for name in names:
            at = os.path.join(folder, name)
            if os.path.exists(os.path.join(REPO, name)):
                os.makedirs(os.path.dirname(at), exist_ok=True)
                if not os.path.exists(at) or not filecmp.cmp(os.path.join(REPO, name), at, shallow=False):
                    shutil.copy(os.path.join(REPO, name), at)

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

    def run(self, stage, seconds):
        """What shows the bug, or None."""
        name, targets, command, quick = stage
        environment = {**ENVIRONMENT, "QUICK": quick}
        make = subprocess.run(["make", "-s", "-j2", f"QUICK={quick}", *targets], cwd=self.folder, env=environment,
                              text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip
        if make.returncode:
            return "make: " + make.stderr.strip().split("\n")[-1]
        # only for programs without a thread sanitizer, which reserves terabytes
        limit = lambda: name.startswith("unit") and resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        program = subprocess.Popen(
            command, cwd=self.folder, env=environment, preexec_fn=limit, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True)  # fmt: skip
        alarm = threading.Timer(seconds, end_session, [program.pid])
        alarm.start()
        started, why, said = time.monotonic(), None, ""
        try:
            for line in program.stdout:
                said = line.strip() or said
                if line.startswith("fail "):
                    why = said
                    break
        finally:  # also when this program is interrupted
            alarm.cancel()
            if why or sys.exc_info()[0]:
                end_session(program.pid)
        status = program.wait()
        if why is None and time.monotonic() - started >= seconds:
            return f"hangs: ended after {seconds:.0f} s"
        return why or (f"exit status {status}: {said}" if status else None)


def all_parts():
    """The parts of tests/run_tests.sh, the shortest first, and the command of each."""
    runner = read(os.path.join(REPO, "tests/run_tests.sh"))
    listed = re.search(r"^parts='\n(.*?)^'", runner, re.S | re.M)[1].splitlines()
    return {line.split()[0]: line.split()[1:] for line in reversed(listed)}


def stages(source, section, tests):
    """What is run one after the other: (name, targets of make, command, value of QUICK)."""
    commands = {part: command for part, command in all_parts().items() if re.match(PARTS[source], part)}
    unit, *likely = LIKELY.get(section, ("",)) if source == "cnn.c" else ("kernels steps",)
    found = []

    def add(part, quick, command=None):
        command = command or commands.get(part)
        if not command or any(stage[2:] == (command, quick) for stage in found):
            return
        if command[0] == "python_with_torch":
            python = subprocess.run([os.path.join(REPO, "tests/python_with.sh"), "torch"], capture_output=True, text=True)
            if python.returncode:
                return
            command = [python.stdout.strip(), *command[1:]]
        targets = next((PROGRAMS[key] for key in PROGRAMS if re.match(key, part)), "test-programs")
        found.append((part, targets.split(), command, quick))

    if source == "cnn_kernels.cu":
        add("gpu/emulated", "1", ["build/emu_test_cuda", "all"])
        add("gpu/tensor", "1", ["build/emu_test_tensor"])
    else:
        for section_of_tests in unit.split():
            add("unit/float", "1", ["build/test_float", section_of_tests])
        add("unit/float", "1")
    if tests == "unit":
        return found
    for part in likely:
        add(part, "1")
    for part in SANITIZED if source != "cnn_kernels.cu" else ():
        found.append((f"{part} with sanitizers", ["cnn-debug"], ["env", "CNN=./cnn-debug", *commands[part]], "1"))
    for part in commands:
        add(part, "1")
    for part in [*likely, *commands] if tests == "all" else ():
        add(part, "")
    return found


class Known:
    """What earlier calls have found out, in a file of lines of JSON; a line for each change."""

    def __init__(self, *names):
        folder = os.path.join(REPO, "build/mutations")
        os.makedirs(folder, exist_ok=True)
        self.path = os.path.join(folder, "-".join(names) + ".jsonl")
        lines = read(self.path).splitlines() if os.path.exists(self.path) else []
        self.known = dict(json.loads(line) for line in lines)

    def __contains__(self, key):
        return key in self.known

    def __getitem__(self, key):
        return self.known[key]

    def __setitem__(self, key, value):
        self.known[key] = value
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps([key, value]) + "\n")


def equivalents():
    """The changes of equivalent.txt: its lines that are neither a comment nor indented, a proof."""
    text = read(os.path.join(REPO, "tests/source/equivalent.txt"))
    return {line.rstrip() for line in text.splitlines() if line and line[0] not in "# "}


class Mutations:
    """The changes of one source."""

    def __init__(self, source, sections, options, trees):
        self.source, self.options, (self.good, self.changed) = source, options, trees
        self.path = os.path.join(REPO, source)
        self.text = read(self.path)
        version = hashlib.sha1(self.text.encode()).hexdigest()[:8]
        self.known = Known(source, options.tests, str(options.seed), version)
        self.seconds = Known("seconds")
        lines = list(zip(self.text.split("\n"), code_lines(self.text)))
        self.places = changes(lines, sections)

    def draw(self):
        """Yields one change after the other: a key that names it, its section, the changed source."""
        random_numbers = random.Random(self.options.seed)
        while any(self.places.values()):
            kind = random_numbers.choice([kind for kind in KINDS if self.places[kind]])
            places = self.places[kind]
            (section, function), number, first, last, text = places.pop(random_numbers.randrange(len(places)))
            lines = self.text.split("\n")
            line = lines[number]
            lines[number] = line[:first] + text + line[last:]
            # the line's number is shown, but what is said of a change outlives lines that move
            key = f"{self.source}: {function}: {line.strip()}  ->  {lines[number].strip()}"
            yield key, number + 1, section, "\n".join(lines)

    @functools.cached_property
    def good_code(self):
        self.good.write(self.source, self.text)
        return self.good.compile(self.source)

    def usual_seconds(self, stage):
        """How long the tests take without a change, in which they must pass."""
        key = json.dumps([*stage, self.text.count("\n")])
        if key not in self.seconds:
            started = time.monotonic()
            problem = self.good.run(stage, 7200)
            if problem:
                sys.exit(f"mutate.py: error: {stage[0]} fails without a change: {problem}")
            self.seconds[key] = time.monotonic() - started
        return self.seconds[key]

    def try_change(self, section, changed):
        """What a change is: "same code", "no program", "not noticed", or what noticed it."""
        self.changed.write(self.source, changed)
        try:
            code = self.changed.compile(self.source)
            if code in (None, self.good_code):
                return "no program" if code is None else "same code"
            for stage in stages(self.source, section, self.options.tests):
                usual = self.usual_seconds(stage)
                why = self.changed.run(stage, 60 + 5 * usual)
                if why:
                    return f"noticed by {stage[0]}{'' if stage[3] else ' of make test-all'}: {why}"
            return "not noticed"
        finally:
            self.changed.write(self.source, self.text)

    def run(self, deadline):
        """(changes tried, noticed)"""
        equivalent, tried, noticed = equivalents(), 0, 0
        for key, number, section, changed in self.draw():
            if tried == self.options.count or (key not in self.known and time.monotonic() > deadline):
                break
            if key in equivalent:
                print(f"equivalent: line {number}: {key}", flush=True)
                continue
            if key not in self.known:
                self.known[key] = self.try_change(section, changed)
            found = self.known[key]
            if found in ("same code", "no program"):
                continue
            tried += 1
            noticed += found != "not noticed"
            print(f"{found.upper() if found == 'not noticed' else found[:150]}: line {number}: {key}", flush=True)
        return tried, noticed


# -O1: compiling takes longer than running.
ENVIRONMENT = {**os.environ, "MAKEFLAGS": "NO_CUDA=1 OPT=-O1", "NO_CUDA": "1", "CNN": "./cnn"}


def parse_source(text):
    """FILE or FILE:FIRST-LAST: the name and the sections."""
    found = re.fullmatch(r"([^:]+)(?::(\d+)-(\d+))?", text)
    if not found or found[1] not in COMPILE:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(COMPILE)}, or sections of one as in "
                                         f"cnn.c:3-7, found {text}")  # fmt: skip
    return found[1], range(int(found[2]), int(found[3]) + 1) if found[2] else range(100)


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].split("\n\n")[0])
    parser.add_argument("--sources", nargs="+", type=parse_source, default=[(name, range(100)) for name in COMPILE])
    parser.add_argument("--tests", choices=("unit", "quick", "all"), default="quick")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--at-least", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # after it has ended the tests
    failed = False
    print(f"seed {options.seed}, {options.count} changes of each source, --tests {options.tests}", flush=True)
    trees = [Tree(os.path.join(REPO, "build/mutations", name)) for name in ("good", "changed")]
    deadline = time.monotonic() + 60 * options.minutes
    for i, (source, sections) in enumerate(options.sources):
        mutations = Mutations(source, sections, options, trees)
        if not any(mutations.places.values()):
            parser.error("nothing to change there: only cnn.c and cnn_kernels.cu have numbered sections")
        left = (deadline - time.monotonic()) / (len(options.sources) - i)
        tried, noticed = mutations.run(time.monotonic() + left)
        print(f"{source}: {noticed} of {tried} changes noticed, seed {options.seed}", flush=True)
        print(f"cases mutations: {tried} changes of {source}, of which {noticed} were noticed", flush=True)
        failed |= tried - noticed > options.count - options.at_least
    return failed


if __name__ == "__main__":
    sys.exit(main())
