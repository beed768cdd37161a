#!/usr/bin/env python3
"""Shows a run of ./cnn in the terminal while it trains, also over ssh:

    ./cnn --dataset synthetic --epochs 3 --out run        in one terminal, or as a job
    labs/tools/watch.py run                               in another, on any machine that sees the folder

It only reads the run folder, so you can start it before, during or after the run, and it does not slow the run
down. It ends with the run, or with Ctrl-C, which leaves the run alone. --once prints one picture and ends.

    loss       the loss of the training steps, each the mean over the images of all devices
    speed      images per second of the newest steps that the run has written, and how long training and
               testing will still take at that speed
    a step     its parts in milliseconds, means over the newest steps, with a column for each rank: see
               labs/options.md, "The run folder"
    epochs     the newest rows of epochs.csv

Rows are written at the log interval (--log-interval), so the picture can be that old. Times of an emulated run
mean nothing, so they are left out. Needs the Python packages rich and plotext:
pip install -r labs/requirements.txt
"""
import argparse
import csv
import json
import os
import sys
import time
from collections import deque

from run_folders import GrowingTable, fail, step_of

try:
    import plotext
    from rich.columns import Columns
    from rich.console import Console, Group
    from rich.live import Live
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text
except ImportError as problem:
    if "--help" not in sys.argv and "-h" not in sys.argv:
        fail("Python", "its packages rich and plotext", problem, "pip install -r labs/requirements.txt")

PARTS = ["load_s", "copy_s", "forward_s", "backward_s", "optimizer_s", "exposed_comm_s", "other_s", "seconds"]
NEWEST = 100  # steps of which speed and parts are means
POINTS = 400  # of the curve


def duration(seconds):
    """4000 -> 1:06:40"""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


class Run:
    """What the files of a run folder have said so far."""

    def __init__(self, folder):
        self.folder, self.steps = folder, None

    def path(self, name):
        return os.path.join(self.folder, name)

    def restart(self):
        self.steps, self.epochs = GrowingTable(self.path("steps.csv")), GrowingTable(self.path("epochs.csv"))
        self.losses, self.done = [], []  # (steps since the beginning, loss); rows of epochs.csv
        self.newest = deque()            # lists of the rows of a step, one for each rank

    def update(self):
        """Reads what is new: the status first, since rows are written before it."""
        with open(self.path("run.json")) as f:
            self.about = json.load(f)
        if self.steps is None or self.steps.replaced() or self.epochs.replaced():
            self.restart()
        for row in self.steps.rows():
            if not self.newest or step_of(self.newest[-1][0]) != step_of(row):
                self.end_step()
                self.newest.append([])
            self.newest[-1].append(row)
        self.done += self.epochs.rows()
        return self.about["status"] == "running"

    def end_step(self):
        """The rows of the last step are complete: its loss."""
        if not self.newest:
            return
        rows = [row for row in self.newest[-1] if "loss" in row and row["images"]]
        images = sum(row["images"] for row in rows)
        if images:
            step = (rows[0]["epoch"] - 1) * self.about["parallel"]["iterations"] + rows[0]["step"]
            self.losses.append((step, sum(row["loss"] * row["images"] for row in rows) / images))
        if len(self.newest) > NEWEST:
            self.newest.popleft()

    def speed(self):
        """Seconds and images of a step, as means."""
        seconds = sum(max(row["seconds"] for row in rows) for rows in self.newest)
        images = sum(row["images"] for rows in self.newest for row in rows)
        return seconds / len(self.newest), images / len(self.newest)

    def seconds_left(self):
        epochs, iterations = self.about["settings"]["epochs"], self.about["parallel"]["iterations"]
        last = self.newest[-1][0]
        steps = (epochs - last["epoch"]) * iterations + iterations - last["step"]
        test = sum(row["test_seconds"] for row in self.done) / max(len(self.done), 1)
        return steps * self.speed()[0] + (epochs - last["epoch"] + 1) * test


# ---- The picture


def headline(run):
    about = run.about
    settings, parallel, device = about["settings"], about["parallel"], about["machine"]["device"]
    words = [f"{settings['model']} on {settings['dataset']}, {parallel['world']} x {device}, "
             f"{parallel['global_batch']} images a step: {about['status']}"]
    if run.newest:
        last = run.newest[-1][0]
        words.append(f"epoch {last['epoch']} of {settings['epochs']}, step {last['step']:.0f} of "
                     f"{parallel['iterations']}")
        if about["emulated"]:
            words.append("emulated: its times mean nothing")
        else:
            seconds, images = run.speed()
            words.append(f"{images / max(seconds, 1e-9):,.0f} images/s")
            if about["status"] == "running":
                words.append(f"{duration(run.seconds_left())} left")
    return Panel(Text("\n".join(words)), title=Text(run.folder))


def curve(run, width):
    points = run.losses[::len(run.losses) // POINTS + 1]
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(max(width - 4, 30), 12)
    plotext.plot([x for x, _ in points], [y for _, y in points], marker="braille")
    return Panel(Text.from_ansi(plotext.build()), title="training loss by step")


def parts(run):
    table = Table(title=f"a step in ms, means of the newest {len(run.newest)}")
    ranks = range(run.about["parallel"]["world"])
    table.add_column("part")
    for rank in ranks:
        table.add_column(f"rank {rank}", justify="right")
    for part in PARTS:
        cells = [[1e3 * row[part] for step in run.newest for row in step if row["rank"] == rank and part in row]
                 for rank in ranks]
        table.add_row("together" if part == "seconds" else part[:-2],
                      *(f"{sum(ms) / len(ms):.2f}" if ms else "" for ms in cells))
    return table


def epochs(run, count=6):
    table = Table(title="epochs")
    for name in ("epoch", "train_loss", "test_loss", "accuracy %", "images/s"):
        table.add_column(name, justify="right")
    for row in run.done[-count:]:
        speed = "" if run.about["emulated"] else f"{row.get('img_per_s', 0):,.0f}"
        losses = [f"{row[name]:.4f}" if name in row else "" for name in ("train_loss", "test_loss")]
        table.add_row(str(row["epoch"]), *losses, f"{row['accuracy']:.2f}", speed)
    return table


def picture(run, width):
    """All panels that there is something to show in."""
    if not run.newest:
        return Group(headline(run), Text("No step yet: rows are written at the log interval."))
    tables = ([] if run.about["emulated"] else [parts(run)]) + ([epochs(run)] if run.done else [])
    return Group(headline(run), *([curve(run, width)] if run.losses else []), Columns(tables))


def watch(folder, once, interval):
    run, console = Run(folder), Console()
    with Live(Text(f"Waiting for a run in {folder}"), console=console, auto_refresh=False,
              transient=False) as live:
        going = True
        while going:
            try:
                going = run.update()
                if not going:
                    run.end_step()
                live.update(picture(run, console.width), refresh=True)
            except (FileNotFoundError, NotADirectoryError) as error:
                if once:
                    live.stop()
                    fail(error.filename, "a file of a run folder", error.strerror, "write one with ./cnn --out DIR")
            if once:
                return
            time.sleep(interval if going else 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", help="a run folder, which ./cnn --out DIR writes")
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    parser.add_argument("--interval", type=float, default=1, metavar="S", help="seconds between two (default: 1)")
    args = parser.parse_args()
    try:
        watch(args.folder, args.once, args.interval)
    except KeyboardInterrupt:
        pass
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        fail(args.folder, "what ./cnn --out writes", f"{type(error).__name__}: {error}",
             "give a folder that this version of ./cnn has written")


if __name__ == "__main__":
    main()
