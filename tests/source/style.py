#!/usr/bin/env python3
"""Finds what tests/source/test_style.sh forbids.

usage: style.py columns FILE...      no line has more than 100 characters
       style.py nesting FILE...      C: no block lies more than 4 blocks deep in a function

Prints `FILE:LINE: what, expected, found` for each violation; the exit status is 1 if there are any.
The C files are formatted by clang-format, which is what the search for functions and blocks builds
on: a function begins and ends in the first column, a block opens at the end of a line.
"""
import re
import sys

COLUMNS, NESTING = 100, 4

# A block comment, a line comment, a string, a character: what remains of a C file is code.
NO_CODE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)
# The first line of a definition: neither indented nor a directive, a label or a closing }
DEFINITION = re.compile(r"\w.*[^;:]$")


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def code_lines(path):
    """The lines of a C file, with blanks instead of comments and strings."""
    return NO_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), read(path)).split("\n")


def functions(path):
    """For each function and macro: the number of its first line, and its lines."""
    lines = code_lines(path)
    first = 0
    while first < len(lines):
        end = first
        if lines[first].startswith("#define"):
            while lines[end].rstrip().endswith("\\"):
                end += 1
            yield first + 1, lines[first : end + 1]
        elif DEFINITION.match(lines[first].rstrip()):
            while end + 1 < len(lines) and not re.search(r"[;{}]\s*$", lines[end]):
                end += 1
            head = " ".join(lines[first : end + 1]).rstrip()
            if re.search(r"\)[^=]*\{$", head):  # parameters and a body, and no initial value
                while end + 1 < len(lines) and not lines[end].startswith("}"):
                    end += 1
                yield first + 1, lines[first : end + 1]
        first = end + 1


def find_columns(path):
    for number, line in enumerate(read(path).splitlines(), 1):
        if len(line) > COLUMNS:
            yield path, number, f"expected at most {COLUMNS} columns, found {len(line)}"


def find_nesting(path):
    for number, lines in functions(path):
        blocks = []  # for each open brace: whether a block begins there, not an initial value
        for i, line in enumerate(lines):
            code = line.rstrip(" \\")
            for brace in re.finditer(r"[{}]", code):
                if brace[0] == "}":
                    del blocks[-1:]
                    continue
                end_of_line = brace.end() == len(code)
                blocks.append(end_of_line and not re.search(r"[=(,]\s*\{$", code))
                depth = sum(blocks) - 1  # the first block is the body of the function
                if depth > NESTING and blocks[-1]:
                    yield path, number + i, f"expected at most {NESTING} blocks, found {depth}"


def main():
    kind, paths = sys.argv[1], sys.argv[2:]
    find = globals()["find_" + kind]
    violations = [violation for path in paths for violation in find(path)]
    for path, number, what in violations:
        print(f"{path}:{number}: {what}")
    return bool(violations)


if __name__ == "__main__":
    sys.exit(main())
