#!/usr/bin/env python3
"""Executes a notebook as a reader does, from its first cell on, in the notebook's folder or another one.

    run_notebook.py NOTEBOOK [FOLDER]

Prints for each code cell that was executed a line `== ID`, the text of its outputs, and a line `picture BYTES` for each picture. If a
cell fails, it prints what the reader sees, and ends with status 1. Needs nbclient and ipykernel.
"""
import os
import re
import sys

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

TERMINAL = re.compile(r"\x1b\[[0-9;]*m")  # colors


def show(output):
    """Prints an output of a cell as text."""
    if output.output_type == "stream":
        print(output.text, end="")
    elif output.output_type == "error":
        print(TERMINAL.sub("", "\n".join(output.traceback)))
    elif "image/png" in output.data:
        print("picture", len(output.data["image/png"]))
    else:
        print(output.data.get("text/markdown", output.data.get("text/plain")))


def main(path, folder):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    client = NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": folder}})
    try:
        client.execute()
        failed = False
    except CellExecutionError:
        failed = True
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.execution_count:
            print("==", cell.id)
            for output in cell.outputs:
                show(output)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else os.path.dirname(os.path.abspath(sys.argv[1]))))
