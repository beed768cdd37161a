#!/usr/bin/env python3
"""Converts run folders of ./cnn to event files, so that TensorBoard shows the runs.

    ./cnn --dataset synthetic --limit-train 6400 --epochs 3 --out run
    labs/tools/to_tensorboard.py run
    tensorboard --logdir run            then open the address that it prints in a browser

To watch a run while it trains, start `to_tensorboard.py --follow run` in a second terminal, before or
after ./cnn, and `tensorboard --logdir run` in a third. It ends when the status in run.json is complete,
stopped or failed. The status of a killed run stays `running`: then end the tool with Ctrl-C. Files of an
earlier run in the same folder are used until ./cnn starts, so start ./cnn first if that run is complete.

The event file is written to the run folder: to compare the runs a/, b/ and c/ of a folder, convert all
three and give TensorBoard that folder. With --logdir DIR it is written to DIR/a instead, where a is the
last part of the run folder's name. Each call first deletes the event file of an earlier call there, and no
other file, so nothing is shown twice.

    loss test_loss accuracy lr img_per_s   for each epoch, step = epoch; accuracy is in per cent, loss is the
                                           mean over the epoch's training images
    step/loss step/lr                      for each training step, numbered from 1 through all epochs; loss
                                           is the mean over the images of all devices
    step_ms/load, forward, backward, ...   the columns of steps.csv in milliseconds, means over the
                                           devices; step_ms/total is the whole step
TensorBoard's axis "Relative" is the time from the start of training, tests included. For an emulated run,
whose times mean nothing, img_per_s and step_ms are left out. Values are rounded to float32, as in TensorBoard.

Needs the Python package tensorboard, but neither TensorFlow nor PyTorch.
"""
import argparse
import glob
import json
import os
import sys
import sysconfig
import time
import types

from run_folders import GrowingTable, fail, step_of

EPOCH = {"loss": "train_loss", "test_loss": "test_loss", "train_accuracy": "train_accuracy", "accuracy": "accuracy",
         "lr": "lr", "img_per_s": "img_per_s"}  # TensorBoard's name: column of epochs.csv
MS = ["load_s", "copy_s", "forward_s", "backward_s", "optimizer_s", "comm_s", "exposed_comm_s", "other_s",
      "seconds"]
SUFFIX = ".cnn"  # marks the event files of this tool


def pip_command():
    """The command that installs tensorboard; a system Python such as Debian's requires a venv."""
    managed = os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
    if sys.prefix == sys.base_prefix and os.path.exists(managed):
        return ("python3 -m venv .venv && .venv/bin/pip install tensorboard, "
                "then run this tool with .venv/bin/python")
    return f"{sys.executable} -m pip install tensorboard"


# Prevents that an installed TensorFlow is loaded, which takes seconds.
sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")
try:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
except ImportError as problem:
    if "--help" not in sys.argv and "-h" not in sys.argv:
        fail("Python", "its package tensorboard", problem, pip_command())


class Run:
    def __init__(self, folder, logdir):
        self.folder, self.logdir = folder, logdir
        self.writer, self.status, self.done, self.written = None, "running", False, 0

    def path(self, name):
        return os.path.join(self.folder, name)

    def start(self, about):
        self.steps, self.epochs = GrowingTable(self.path("steps.csv")), GrowingTable(self.path("epochs.csv"))
        self.emulated, self.iterations = about["emulated"], about["parallel"]["iterations"]
        self.ranks = []  # rows of a step so far, one for each rank
        self.clock = os.stat(self.path("run.json")).st_mtime - about["resources"]["wall_s"]
        self.epoch_clock = self.clock
        os.makedirs(self.logdir, exist_ok=True)
        if not os.access(self.logdir, os.W_OK):
            raise PermissionError(0, "one without write permission", self.logdir)
        for old in glob.glob(os.path.join(glob.escape(self.logdir), "events.out.tfevents.*" + SUFFIX)):
            os.remove(old)
        if self.writer:
            self.writer.close()
        self.writer, self.written = EventFileWriter(self.logdir, filename_suffix=SUFFIX), 0

    def update(self):
        """Converts what is new in the folder. It reads the status first, since rows are written before it."""
        with open(self.path("run.json")) as f:
            about = json.load(f)
        if self.writer is None or self.steps.replaced() or self.epochs.replaced():
            self.start(about)
        steps, epochs = list(self.steps.rows()), list(self.epochs.rows())
        for row in sorted(steps + epochs, key=lambda row: (row["epoch"], "rank" not in row)):
            if "rank" not in row:
                self.end_step()
                self.end_epoch(row)
                continue
            if self.ranks and step_of(row) != step_of(self.ranks[0]):
                self.end_step()
            self.ranks.append(row)
        self.status = about["status"]
        self.done = self.status != "running"
        if self.done:
            self.end_step()
        self.writer.flush()

    def end_step(self):
        rows, self.ranks = self.ranks, []
        if not rows:
            return
        with_loss = [row for row in rows if "loss" in row and row["images"]]
        values = {"step/lr": rows[0]["lr"]}
        if with_loss:
            images = sum(row["images"] for row in with_loss)
            values["step/loss"] = sum(row["loss"] * row["images"] for row in with_loss) / images
        for name in MS if not self.emulated else []:
            cells = [row[name] for row in rows if name in row]
            if cells:
                tag = "total" if name == "seconds" else name[:-len("_s")]
                values["step_ms/" + tag] = 1e3 * sum(cells) / len(cells)
        self.clock += max(row["seconds"] for row in rows)
        self.write((rows[0]["epoch"] - 1) * self.iterations + rows[0]["step"], values)

    def end_epoch(self, row):
        end = self.epoch_clock + row["seconds"] + row["test_seconds"]
        self.clock = self.epoch_clock = max(self.clock, end)  # of an epoch that was resumed, seconds lack its beginning
        self.write(row["epoch"], {tag: row[column] for tag, column in EPOCH.items()
                                  if column in row and not (self.emulated and tag == "img_per_s")})

    def write(self, step, values):
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=v) for tag, v in values.items()])
        self.writer.add_event(Event(wall_time=self.clock, step=int(step), summary=summary))
        self.written += len(values)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folders", nargs="+", metavar="RUN_FOLDER", help="what ./cnn --out has written, or will write")
    add("--logdir", metavar="DIR", help="write to DIR/NAME, where NAME is the run folder's")
    add("--follow", action="store_true", help="continue until the runs have ended")
    args = parser.parse_args()
    names = [os.path.basename(os.path.abspath(folder)) for folder in args.folders]
    if args.logdir and len(set(names)) < len(names):
        fail("--logdir", "folders of different names", " ".join(args.folders), "leave --logdir out")
    runs = [Run(folder, os.path.join(args.logdir, name) if args.logdir else folder)
            for folder, name in zip(args.folders, names)]
    try:
        while not all(run.done for run in runs):
            for run in runs:
                try:
                    if not run.done:
                        run.update()
                except FileNotFoundError as error:
                    if not args.follow:
                        fail(error.filename, "a file of a run folder", error.strerror,
                             "write one with ./cnn ... --out DIR, or wait for it with --follow")
                except OSError as error:
                    fail(error.filename, "a folder that can be written", error.strerror,
                         "give another --logdir DIR")
                except (KeyError, TypeError, ValueError) as error:
                    fail(run.folder, "what ./cnn --out writes", f"{type(error).__name__}: {error}",
                         "give a folder that this version of ./cnn has written")
            if not args.follow:
                break
            time.sleep(1)
    except KeyboardInterrupt:
        print()
    for run in runs:
        if run.writer:
            run.end_step()
            run.writer.close()
            print(f"{run.folder}: {run.written} values, the run is {run.status}; "
                  f"tensorboard --logdir {run.logdir}")


if __name__ == "__main__":
    main()
