"""What the notebooks in this folder share: they build the project, run its commands and show its pictures.

A notebook repeats nothing that the project's tools do: each of its commands also works in a terminal, in the
project's folder. CNN_SMALL=1 in the environment makes each notebook use few images, as in the project's tests.
"""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from IPython.display import Image, Markdown, display

PROJECT = Path(__file__).resolve().parents[2]
SMALL = os.environ.get("CNN_SMALL") == "1"
# make and the programs in labs/tools find the Python of this notebook first.
ENVIRONMENT = dict(os.environ, PATH=os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"])
PICTURE = re.compile(r"!\[[^]]*\]\(([^)]+)\)")
NO_COMPILER = """This notebook needs {missing} on the machine that it runs on, found none.
- Cluster (Open OnDemand, JupyterHub): load a module with a compiler, such as `module load gcc`, before Jupyter starts.
  Open OnDemand often has a field for modules in the form that starts Jupyter. Otherwise ask your site's support.
- Your own computer, with Debian, Ubuntu or WSL: sudo apt-get install gcc make
- Where Python comes from conda: conda install -c conda-forge gcc make
Then restart the kernel, and run this cell again. labs/start.md has more, also for Windows and macOS."""


class Stop(Exception):
    """Stops the notebook with a message for its reader, which IPython shows without a traceback."""

    def _render_traceback_(self):
        return [str(self)]


def find_compiler():
    return next((name for name in ("gcc", "clang") if shutil.which(name)), None)


def has_gpu():
    return bool(shutil.which("nvidia-smi")) and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0


# Builds for this machine only, in seconds: for all GPUs that nvcc knows it takes minutes.
MAKE = "make" + " CC=clang" * (find_compiler() == "clang") + (" CUDA_ARCH=native" if has_gpu() else " NO_CUDA=1")


def run(command):
    """Runs a shell command in the project's folder and shows what it prints; Stop if it fails."""
    print("$", command)
    with subprocess.Popen(command, shell=True, cwd=PROJECT, env=ENVIRONMENT, text=True, errors="replace",
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            for line in process.stdout:
                print(line, end="")
        finally:
            process.terminate()  # if this cell was interrupted; a program that has ended ignores it
    if process.returncode:
        raise Stop(f"expected exit status 0 of `{command}`, found {process.returncode}: the lines above say why")


def build():
    """Builds ./cnn for this machine; says what to do if make or a compiler is missing."""
    missing = ["make"] * (not shutil.which("make")) + ["a C compiler"] * (not find_compiler())
    if missing:
        raise Stop(NO_COMPILER.format(missing=" and ".join(missing)))
    run(MAKE)
    (PROJECT / "runs").mkdir(exist_ok=True)
    print(f"Built {PROJECT}/cnn")


def show(picture):
    """Shows a PNG file, whose path starts in the project's folder."""
    display(Image(filename=str(PROJECT / picture)))


def plots(folder, *names):
    """Draws the plots of a run folder, or of a folder of them, and shows those with these names."""
    run(f"make plots RUNS={folder} >/dev/null")
    for name in names:
        show(f"{folder}/plots/{name}.png")


def part(name, folder):
    """Shows a part of the folder's tables.md, which `make report` has written: its tables, then its plots."""
    text = (PROJECT / folder / "tables.md").read_text(encoding="utf-8")
    found = re.search(rf"^# {name}\n(.*?)(?=^# |\Z)", text, re.DOTALL | re.MULTILINE)
    if not found:
        raise Stop(f"{folder}/tables.md: expected a part {name}, found none: its runs lack what that part needs")
    display(Markdown(PICTURE.sub("", found[1])))
    for picture in PICTURE.findall(found[1]):
        show(f"{folder}/{picture}")
