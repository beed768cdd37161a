"""Reads the run folders of ./cnn --out and compares them; study.py, plot.py and report.py use it.

The columns of its tables, and what may be compared with what, are described by `study.py --help`.
"""
import argparse
import array
import csv
import json
import math
import os
import re
import shlex
import statistics
import struct
import sys
import time
from types import SimpleNamespace

COLUMNS = ["device", "parallel", "gpus", "model", "batch", "global_batch", "repeats", "seconds_mean",
           "seconds_sd", "ci95", "speedup", "accuracy_mean", "accuracy_sd", "emulated"]
SCALING = ["scaling", "device", "devices", "parallel", "model", "batch", "global_batch", "repeats",
           "seconds_mean", "seconds_sd", "ci95", "img_per_s", "speedup", "efficiency", "emulated"]
WORKERS = ["device", "model", "global_batch", "workers", "repeats", "img_per_s_mean", "img_per_s_sd", "ci95",
           "loader_wait_s_mean", "emulated"]
ABLATION = ["rung", "options", "img_per_s", "seconds", "accuracy", "accuracy_sd", "emulated", "times_first",
            "times_previous", "repeats", "model", "dataset", "device", "driver", "date", "commit"]
HOURS = ["study", "runs_of", "repeats", "count", "unit", "wall_s_mean", "training_percent", "hours", "accuracy_mean",
         "emulated"]
# Student's t: 97.5 % of all values lie below, for 1, 2, ... degrees of freedom; beyond 30 the last is taken.
T95 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
       2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
       2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042]
REPEATS_DIFFER = {"out", "seed", "save-model", "dry-run"}
COLUMNS_DIFFER = {"batch-size", "global-batch", "no-cuda", "gpus", "replicas", "parallel",
                  "test-batch-size"}  # by default the batch; neither timed nor seen in a result
ENTRIES = ["status", "emulated", "command", "machine", "build", "settings", "parallel", "classes"]
EPOCHS = ["epoch", "images", "seconds", "img_per_s", "loader_wait_s", "train_loss", "test_seconds", "test_loss",
          "accuracy", "lr", "weight_hash"]  # the columns of epochs.csv that tools need
RUN_FILES = ["run.json", "steps.csv", "output.txt"]  # one of them makes a folder a run folder
DIGITS = 300  # larger numbers do not fit in a float
# Settings that determine the losses, and what they may be: others are not passed on to a program.
NUMBER = r"-?[0-9]{1,9}(\.[0-9]{1,12})?(e-?[0-9]{1,3})?"
REPEATED = {"model": "[a-z0-9]{1,12}", "stem": "[a-z0-9]{1,8}", "dataset": "[a-z0-9-]{1,14}", "augment": "[a-z-]{1,10}",
            "optimizer": "[a-z]{1,10}", "schedule": "[a-z]{1,10}", "lr-scaling": "[a-z]{1,6}",
            "kernels": "naive|fast", "parallel": "ddp|dp",
            **dict.fromkeys(["width", "limit-train", "batch-size", "epochs", "lr", "momentum", "weight-decay",
                             "label-smoothing", "gamma", "step-size", "warmup-epochs", "seed", "bucket-mb"], NUMBER),
            "nesterov": "on|off"}
# What reading a file that ./cnn has not written may raise
DAMAGES = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError, csv.Error)
TEXTS = {"layer", "kind", "out_shape", "bound", "source"}  # columns that hold no number


sys.stdout.reconfigure(errors="backslashreplace")  # names of folders may have bytes that are not UTF-8


class Missing(Exception):
    """Data are missing, or not in the format of ./cnn."""


def fail(where, expected, found, advice):
    tool = os.path.basename(sys.argv[0]).replace(".py", "")
    sys.exit(f"{tool}: error: {where}: expected {expected}, found {found}; {advice}")


def start(main, about, reads):
    """Calls main(DIR) of a tool that has no other argument; its help is `about`, and DIR is what it `reads`.

    Edited run folders can contain anything: they give an error message, not a traceback."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", help=reads)
    folder = parser.parse_args().folder
    try:
        main(folder)
    except BrokenPipeError:
        sys.exit(1)  # whoever read the output has seen enough
    except DAMAGES as error:
        fail("a run folder", "files as ./cnn writes them", f"{type(error).__name__}: {error}",
             "was one edited? To find it, give the tool fewer folders")


# ---- Reading


def read_epochs(folder):
    """The rows of epochs.csv; a loss that is not finite is None, and so is a training accuracy that is not known, as in
    the files of an older ./cnn. A run that has failed early has no such file."""
    path = os.path.join(folder, "epochs.csv")
    if not os.path.exists(path):
        return []
    try:
        with open(path, newline="") as f:
            return [read_epoch(row) for row in csv.DictReader(f)]
    except OSError as error:
        fail(path, "a file that can be read", error.strerror, "fix its permissions")
    except (AttributeError, KeyError, TypeError, ValueError, csv.Error) as error:  # a cell of a short row is None
        fail(path, f"the columns {', '.join(EPOCHS)}", repr(error),
             "give folders that this version of ./cnn has written")


def read_epoch(row):
    epoch = {name: epoch_value(name, row[name]) for name in EPOCHS}
    epoch["train_accuracy"] = epoch_value("train_accuracy", row.get("train_accuracy") or "")
    return epoch


def epoch_value(name, text):
    if name == "weight_hash":
        return text
    if name in ("train_loss", "test_loss", "train_accuracy") and text == "":
        return None
    return int(text) if text.isdigit() and len(text) < DIGITS else float(text)


def json_number(text):
    """Of run.json. Neither 10^400, an int that no float can hold, nor NaN is one that ./cnn writes."""
    if not math.isfinite(float(text)):
        raise ValueError(f"the number {text[:20]}")
    return int(text) if text.lstrip("-").isdigit() else float(text)


def read_run(folder):
    """What run.json and epochs.csv say; None if there is no run.json."""
    path = os.path.join(folder, "run.json")
    if not os.path.exists(path):
        return None
    try:
        with open(path, encoding="utf-8") as f:
            about = json.load(f, parse_int=json_number, parse_float=json_number, parse_constant=json_number)
        run = SimpleNamespace(folder=folder, **{k: about[k] for k in ENTRIES})
        run.provenance, run.resources = about.get("provenance", "measured"), about.get("resources", {})
        run.kind = "emulated" if run.emulated else "cpu" if run.machine["device"] == "cpu" else "gpu"
        run.mode, run.world = run.parallel["mode"], run.parallel["world"]
        run.batch, run.global_batch = run.parallel["batch_per_device"], run.parallel["global_batch"]
        run.model, run.seed = run.settings["model"], run.settings["seed"]
        run.epochs = read_epochs(folder)
        run.seconds = sum(e["seconds"] for e in run.epochs)
        run.images = sum(e["images"] for e in run.epochs)
        run.loader_wait_s = sum(e["loader_wait_s"] for e in run.epochs)
        run.accuracy = run.epochs[-1]["accuracy"] if run.epochs else math.nan
        run.train_accuracy = run.epochs[-1]["train_accuracy"] if run.epochs else None
        if run.kind != "cpu":
            run.device = "single" if run.world == 1 else "multi"
        else:
            run.device = "cpu" if run.world == 1 else f"cpu x {run.world}"
    except OSError as error:
        fail(path, "a file that can be read", error.strerror, "fix its permissions")
    except ValueError as error:
        fail(path, "JSON", error, "delete the folder and run it again")
    except (KeyError, TypeError) as error:
        fail(path, f"the entry {error}", "none", "give folders that this version of ./cnn has written")
    return run


def step_of(row):
    """What rows of the same step of all ranks have in common. An epoch may have one step only."""
    return row["epoch"], row["step"]


class GrowingTable:
    """A CSV file that grows: yields new rows, each only when its line is complete."""

    def __init__(self, path):
        self.path, self.file = path, open(path, newline="")
        self.half, self.columns = "", None

    def replaced(self):
        """A resumed run goes on at an earlier row, and a new one at the first."""
        now = os.stat(self.path)
        return now.st_ino != os.fstat(self.file.fileno()).st_ino or now.st_size < self.file.tell()

    def rows(self):
        lines = (self.half + self.file.read()).split("\n")
        self.half = lines.pop()
        for cells in csv.reader(lines):
            if self.columns is None:
                self.columns = cells
                continue
            try:  # a cell is empty where nothing was measured
                row = {name: float(cells[i]) for i, name in enumerate(self.columns)
                       if cells[i] and name != "weight_hash"}
                row["epoch"] = int(row["epoch"])
            except (IndexError, KeyError, ValueError):
                fail(self.path, "a row of numbers as ./cnn writes it", ",".join(cells),
                     "give a folder that ./cnn --out has written")
            yield row


def find_folders(root):
    """The run folders below root, at any depth: {folder: those directly in it}; root itself is in root."""
    groups, seen = {}, {os.path.realpath(root)}
    for folder, names, _ in os.walk(root, followlinks=True):
        paths = []
        for path in sorted((os.path.join(folder, name) for name in names), key=lambda p: (os.path.islink(p), p)):
            if os.path.realpath(path) not in seen:  # else a link to it, or from it to a folder above
                seen.add(os.path.realpath(path))
                paths.append(path)
        names[:] = [os.path.basename(path) for path in paths]
        found = [p for p in [root] * (folder == root) + paths
                 if any(os.path.exists(os.path.join(p, name)) for name in RUN_FILES)]
        if found:
            groups[folder] = found
    return groups


def is_timed(epoch):
    """Whether the seconds of an epoch are those of all its images. Those of a run that was resumed within the epoch
    are not."""
    low, high = (epoch["images"] / max(epoch["seconds"] + d, 1e-9) + r for d, r in ((5e-4, -0.6), (-5e-4, 0.6)))
    return epoch["seconds"] <= 5e-4 or low <= epoch["img_per_s"] <= high


def timed(runs):
    """Those whose epochs are timed; prints which ones are left out."""
    for run in runs:
        if not all(map(is_timed, run.epochs)):
            print(f"left out: {run.folder}: it was resumed within an epoch, whose seconds are only those since then",
                  file=sys.stderr)
    return [run for run in runs if all(map(is_timed, run.epochs))]


def complete(folders):
    """The complete runs among these; prints which ones are left out."""
    runs = []
    for run in filter(None, map(read_run, folders)):
        if run.settings.get("eval"):
            continue  # it has not trained
        if run.status != "complete":
            print(f"left out: {run.folder}: status {run.status}, not complete", file=sys.stderr)
        elif len(run.epochs) != run.settings["epochs"]:
            print(f"left out: {run.folder}: epochs.csv has {len(run.epochs)} of {run.settings['epochs']} epochs",
                  file=sys.stderr)
        else:
            runs.append(run)
    return runs


def read_runs(root):
    """The complete runs directly in root. It only says which folders below root contain more of them: these
    are other studies, and no table or plot mixes them."""
    try:
        os.listdir(root)
    except OSError as error:
        fail(root, "a folder of run folders", error.strerror, "make study writes one")
    groups = find_folders(root)
    runs = timed(complete(groups.pop(root, [])))
    others = ", ".join(f"{len(folders)} in {folder}" for folder, folders in groups.items())
    if not runs and others:
        fail(root, "complete runs directly in it", f"none, but run folders below it: {others}",
             f"give one of these folders (make: RUNS={shlex.quote(next(iter(groups)))})")
    if not runs:
        fail(root, "folders of complete runs, without --eval", "none", "make study writes them, and so does ./cnn --out")
    if others:
        print(f"not read: run folders below {root}: {others}; to read them, give their folder "
              f"(make: RUNS={shlex.quote(next(iter(groups)))})", file=sys.stderr)
    return runs


def read_csv(run, name, columns, absent=None):
    """Those columns of the rows that have them all; numbers, but for TEXTS. `absent`: columns that a file of an
    older ./cnn may lack, with the value that they then have."""
    path = os.path.join(run.folder, name)
    try:
        with open(path, newline="") as f:
            rows = [[{**(absent or {}), **row}[c] for c in columns] for row in csv.DictReader(f)]
        return [[v if c in TEXTS else float(v) for c, v in zip(columns, row)]
                for row in rows if all(row)]
    except (OSError, KeyError, ValueError, csv.Error) as error:
        raise Missing(f"{path}: expected the columns {', '.join(columns)}, found {error!r}") from None


def step_losses(run):
    """(epoch, step, images, loss) of each training step; the loss is the mean over the images of all ranks."""
    steps = by(read_csv(run, "steps.csv", ["epoch", "step", "images", "loss"]), lambda row: (row[0], row[1]))
    if not steps:
        raise Missing(f"{run.folder}/steps.csv has no step with a loss")
    table = []
    for (epoch, step), ranks in sorted(steps.items()):
        images = sum(row[2] for row in ranks)
        table.append((epoch, step, images, sum(row[2] * row[3] for row in ranks) / max(1, images)))
    return table


PRECISION_DIFFERS = {"out", "quiet", "save-model", "trace", "trace-steps", "precision", "kernels"}


def by_precision(runs):
    """{precision: run}: a run in fp32, first, and those that differ from it in precision and kernels only; of several
    such groups one with most precisions, and among these with most images. Empty if there is no run in fp32."""
    groups = [{}]
    for base in (r for r in runs if r.settings.get("precision") == "fp32"):
        group = {"fp32": base}
        for run in runs:
            if not differences(base, run, PRECISION_DIFFERS):
                group.setdefault(run.settings.get("precision"), run)
        groups.append(group)
    return max(groups, key=lambda group: (len(group), group["fp32"].images if group else 0))


def read_counts(run):
    """What ./cnn-count has counted, from output.txt: (launches, bytes read, bytes written) of global memory for each
    kernel but that which measures the device's peak. Empty if the run was another program's."""
    path = os.path.join(run.folder, "output.txt")
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8", errors="replace") as f:
        rows = re.findall(r"^(\S.*?) +(\d+) +\d+ +\((\d+)\) +\d+ +\((\d+)\) ", f.read(), re.M)
    return {name: tuple(map(int, numbers)) for name, *numbers in rows if name != "peak_kernel"}


def bytes_rows(runs):
    """For each run of ./cnn-count its rung, its kernels' launches and the megabytes that they read and wrote."""
    table = []
    for run, counts in ((run, read_counts(run)) for run in runs):
        if not counts:
            continue
        launches, read, written = map(sum, zip(*counts.values()))
        rung = re.sub(r".*-rung\d+-|-r\d+$", "", os.path.basename(os.path.abspath(run.folder)))
        table.append(dict(rung=rung, launches=launches, read_mb=read / 1e6, written_mb=written / 1e6,
                          moved_mb=(read + written) / 1e6))
    return [dict(row, times_first=row["moved_mb"] / table[0]["moved_mb"]) for row in table]


def ablation_beside(run):
    """The path of the ablation.csv of which a run is a part; None if there is none. The run folder may be a link."""
    folders = map(os.path.dirname, (os.path.abspath(run.folder), os.path.realpath(run.folder)))
    return next((path for path in (os.path.join(f, "ablation.csv") for f in folders) if os.path.exists(path)), None)


def read_losses(run):
    """[epochs done, loss] of each training step."""
    steps = step_losses(run)
    last = max(step for _, step, _, _ in steps)
    return [(epoch - 1 + step / last, loss) for epoch, step, _, loss in steps]


def read_trace(run):
    """The spans of rank 0 in trace.json by track: (track, name, begin, length), in ms from the first one."""
    path = os.path.join(run.folder, "trace.json")
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            events = [e for e in json.load(f)["traceEvents"] if e["pid"] == 0]
        names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        spans = [(names[e["tid"]], e["name"], e["ts"] / 1e3, e["dur"] / 1e3) for e in events if e["ph"] == "X"]
        start = min(begin for _, _, begin, _ in spans)
        return by([(track, name, begin - start, length) for track, name, begin, length in spans], lambda s: s[0])
    except (OSError, ValueError, KeyError, TypeError) as why:
        raise Missing(f"{path}: expected a trace that ./cnn --trace has written, found {why}") from None


def read_filters(run):
    """Name, shape and numbers of the first tensor with 4 dimensions in model.safetensors.

    The file: the length of the header in 8 bytes, the header in JSON, the numbers."""
    path = os.path.join(run.folder, "model.safetensors")
    try:
        with open(path, "rb") as f:
            length, = struct.unpack("<Q", f.read(8))
            header = json.loads(f.read(length))
            numbers = f.read()
        header.pop("__metadata__", None)
        (begin, end), name, shape = min((t["data_offsets"], name, t["shape"]) for name, t in header.items()
                                        if len(t["shape"]) == 4 and t["dtype"] == "F32")
        weights = array.array("f", numbers[begin:end])  # our machines are little-endian, as the file is
        if len(weights) != math.prod(shape):
            raise ValueError(f"{len(weights)} numbers for {shape}")
        return name, shape, weights
    except (OSError, OverflowError, ValueError, KeyError, struct.error) as error:
        raise Missing(f"{path}: expected filters in a safetensors file, found {error!r}") from None


def read_untrained(run):
    """The first layer's filters, as read_filters(), from a run folder beside this run's that
    `./cnn --eval --save-model` has written for the same network before any training; None if there is none. Other
    folders there are ignored."""
    expected = dict({k: run.settings[k] for k in ("model", "width", "stem", "seed", "dataset")},
                    eval=True, load="", checkpoint="")
    for folder in sorted(e.path for e in os.scandir(os.path.dirname(os.path.abspath(run.folder))) if e.is_dir()):
        try:
            with open(os.path.join(folder, "run.json"), encoding="utf-8") as f:
                settings = json.load(f)["settings"]
            if all(settings.get(k) == v for k, v in expected.items()):
                return read_filters(SimpleNamespace(folder=folder))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, Missing):
            continue
    return None


def read_confusion(run):
    """How many test images of each class, a row, were predicted as each class: predictions.csv of the last test."""
    counts = [[0] * len(run.classes) for _ in run.classes]
    rows = read_csv(run, "predictions.csv", ["label", "predicted", "epoch"])
    for label, predicted, _ in (row for row in rows if row[2] == 0):  # else a variant that --augment makes
        if not 0 <= min(label, predicted) <= max(label, predicted) < len(counts):
            raise Missing(f"{run.folder}/predictions.csv: expected {len(counts)} classes, found others")
        counts[int(label)][int(predicted)] += 1
    if not any(map(any, counts)):
        raise Missing(f"{run.folder}/predictions.csv has no test image")
    return counts


def read_predictions(run):
    """The images in predictions.csv that have pixels: dicts with image, label, predicted, epoch (0: as it is, else
    as --augment makes it in that epoch), shape (height, width, channels) and pixels, as bytes."""
    path = os.path.join(run.folder, "predictions.csv")
    try:
        with open(path, newline="") as f:
            rows = [dict(row, shape=tuple(map(int, row["shape"].split("x"))), pixels=bytes.fromhex(row["pixels"]),
                         **{k: int(row[k]) for k in ("image", "label", "predicted", "epoch")})
                    for row in csv.DictReader(f) if row["pixels"]]
        names = dict(enumerate(run.classes))
        for row in rows:
            height, width, channels = row["shape"]
            if channels not in (1, 3) or min(height, width) < 1 or len(row["pixels"]) != height * width * channels:
                raise ValueError(f"{len(row['pixels'])} pixels for {row['shape']}")
            row["label"], row["predicted"] = names[row["label"]], names[row["predicted"]]
        if not rows:
            raise ValueError("no image with pixels")
        return rows
    except (OSError, AttributeError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise Missing(f"{path}: expected test images with their predictions, found {error!r}") from None


# ---- Running again


def repeat_options(settings, world):
    """The options with which a CPU repeats a run of somebody else, or why there are none: (options, why)."""
    options = []
    for name, pattern in REPEATED.items():
        value = settings.get(name)
        value = ("off", "on")[value] if isinstance(value, bool) else str(value)[:40] if value is not None else ""
        if not value:
            continue
        if name == "kernels" and value not in ("naive", "fast"):
            value = "fast"
        if not re.fullmatch(pattern, value):
            return [], f"expected a setting as ./cnn writes it, found --{name} {value}; it was not run"
        options += [f"--{name}", value]
    if world not in range(1, 17):
        return [], f"expected 1 to 16 devices, found {world}; it was not run"
    options += ["--no-cuda", "--threads", str(int(world)), "--replicas", str(int(world))]
    return options + ["--oversubscribe"] * (world > 1), ""


def other_loss(found, expected, precision="fp32"):
    """(step, loss found, loss expected) where two trainings with the same settings first have other losses; None if
    nowhere. Step 1 depends on images, order and weights only; later ones also on rounding."""
    for step, (a, b) in enumerate(zip(found, expected), 1):
        most = 0.03 if precision != "fp32" else 0.0005 if step == 1 else 0.01
        if not abs(a - b) <= most * max(abs(b), 0.1):
            return step, a, b
    return None


# ---- Comparing


def facts(run):
    """Everything that determines what a run computes and how fast."""
    known = {f"--{k}": v for k, v in run.settings.items()}
    known["--threads"] *= run.world if run.kind == "cpu" else 1
    return dict(known, compiler=run.build["compiler"], flags=run.build["flags"], commit=run.build["commit"],
                cpu=run.machine["cpu"], device=run.machine["device"], provenance=run.provenance)


def differences(a, b, free):
    """What differs between two runs: (name, value in a, value in b), without the settings in `free`, which may
    also contain "flags", the compiler's options."""
    left, right = facts(a), facts(b)
    free = {k if k == "flags" else f"--{k}" for k in free}
    if a.kind != b.kind:
        free |= {"--kernels", "device"}  # what --kernels fast means depends on the device
    if {a.kind, b.kind} != {"cpu"}:
        free.add("--threads")  # a GPU does not compute with them
    if a.settings["lr-scaling"] != "none":
        free.add("--lr")  # it follows the batch
    return [(k, left.get(k), right.get(k)) for k in dict.fromkeys([*left, *right])
            if k not in free and left.get(k) != right.get(k)]


def first_difference(runs, free=frozenset()):
    """The first that runs of a model differ in but the columns and the settings in `free`: (run, name, value,
    other run, its value); None if they are comparable."""
    first = {}
    for run in runs:
        # runs on the same kind of device must have the same device; all kinds must agree in the rest
        for other in first.setdefault(run.model, run), first.setdefault((run.model, run.kind), run):
            for name, expected, found in differences(other, run, REPEATS_DIFFER | COLUMNS_DIFFER | set(free)):
                return run, name, found, other, expected
    return None


def varied(runs):
    """The one option besides device, batch and seed in which runs differ, such as lr; None if there are none or
    several, or if it has plots of its own."""
    names = {name for run in runs for name, _, _ in differences(runs[0], run, REPEATS_DIFFER | COLUMNS_DIFFER)}
    name = names.pop() if len(names) == 1 else ""
    return name[2:] if name.startswith("--") and name not in ("--model", "--threads", "--workers") else None


def by_value(value):
    """A key to sort an option's values by: numbers before words."""
    try:
        return 0, float(value), ""
    except (TypeError, ValueError):
        return 1, 0, str(value)


def check_comparable(runs, free=frozenset()):
    """Ends with an error if there is a first_difference(); prints what makes a comparison less reliable."""
    different = first_difference(runs, free)
    if different:
        run, name, found, other, expected = different
        fail(run.folder, f"{name} {expected!r} as in {other.folder}", repr(found),
             "runs that differ in more than device, batch and seed are not compared: delete one, or "
             "move it to a folder of its own")
    hosts = list(dict.fromkeys(run.machine["host"] for run in runs))
    if len(hosts) > 1:
        print(f"Note: hosts differ: {', '.join(hosts)}")
    if any(is_dirty(run) for run in runs):
        print("Note: built from sources that are not committed, which cannot be reproduced: commit them (git init "
              "first if there is no repository), and run make")


def is_dirty(run):
    return "dirty" in run.build["commit"] or run.build["commit"] == "unknown"


# ---- Tables


def summary(values):
    """Mean, standard deviation and half the 95 % interval; of one value the last two are None."""
    n, mean = len(values), statistics.mean(values)
    if n < 2:
        return mean, None, None
    sd = statistics.stdev(values)  # divides by n - 1
    return mean, sd, T95[min(n - 1, len(T95)) - 1] * sd / math.sqrt(n)


def by(rows, key):
    groups = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def make_rows(runs):
    """A row for each device, batch and model: all columns but the speed-up, and more for its callers."""
    def key(run):
        return run.model, run.kind, run.world, run.mode, run.global_batch
    rows = []
    for group in by(sorted(runs, key=lambda r: (key(r), r.seed)), key).values():
        run = group[0]
        label = run.device + (f", {run.world} GPUs" if run.device == "multi" else "")
        label += f", {run.mode}" if run.world > 1 else ""
        seconds, sd, ci95 = summary([r.seconds for r in group])
        accuracy, accuracy_sd, _ = summary([r.accuracy for r in group])
        known = all(r.train_accuracy is not None for r in group)
        trained, trained_sd, _ = summary([r.train_accuracy for r in group]) if known else (None, None, None)
        rows.append(dict(
            device=run.device, parallel=run.mode, gpus=0 if run.kind == "cpu" else run.world, model=run.model,
            batch=run.batch, global_batch=run.global_batch, repeats=len(group), seconds_mean=seconds,
            seconds_sd=sd, ci95=ci95, accuracy_mean=accuracy, accuracy_sd=accuracy_sd, runs=group,
            train_accuracy_mean=trained, train_accuracy_sd=trained_sd,
            kind=run.kind, devices=run.world, img_per_s=run.images / max(seconds, 1e-9),
            emulated=int(run.emulated), label=label + " (EMULATED)" * run.emulated))
    return rows


def add_speedups(rows):
    """Relative to the cpu row of the same model and global batch; emulated rows have none."""
    cpu = {(r["model"], r["global_batch"]): r for r in rows if r["device"] == "cpu"}
    for row in rows:
        base = cpu.get((row["model"], row["global_batch"]))
        if base and not row["emulated"]:
            row["speedup"] = row["img_per_s"] / base["img_per_s"]
        elif not row["emulated"]:
            print(f"Note: no speed-up for {row['device']}, {row['model']}, global batch "
                  f"{row['global_batch']}: no cpu row has that batch")


def step_means(run):
    """Seconds of a step and of its exposed communication, in the mean over the ranks and the steps after warm-up."""
    rows = [row for row in read_csv(run, "steps.csv", ["seconds", "exposed_comm_s", "warmup"]) if not row[-1]]
    if not rows:
        raise Missing(f"{run.folder}/steps.csv has no step after the warm-up")
    return statistics.mean(row[0] for row in rows), statistics.mean(row[1] for row in rows)


def predicted_speedups(rows):
    """{("ddp", devices N): speed-up S} for rows of scaling_rows() that belong together, from the steps in two of them:
    t_c, a step on one device, and t_k, the communication that a step on the fewest several devices does not hide.
    strong: S = t_c / (t_c / N + t_k), weak: S = N t_c / (t_c + t_k). Empty if the steps are not known."""
    first, *several = sorted((r for r in rows if r["parallel"] != "dp"), key=lambda r: r["devices"])
    try:
        compute = statistics.mean(step_means(run)[0] for run in first["runs"])
        communicate = statistics.mean(step_means(run)[1] for run in several[0]["runs"])
    except (IndexError, Missing):
        return {}
    counts = [r["devices"] for r in several]
    if first["scaling"] == "strong":
        return {("ddp", n): compute / (compute / n + communicate) for n in counts}
    return {("ddp", n): n * compute / (compute + communicate) for n in counts}


def scaling_rows(rows, modes=("ddp",)):
    """For each row of one device: those of several devices that share its batch (strong) or each have one as
    large (weak)."""
    table = []
    for one in (r for r in rows if r["devices"] == 1):
        for scaling, batch in ("strong", "global_batch"), ("weak", "batch"):
            for row in rows:
                if row is not one and row["parallel"] not in modes or any(
                        row[k] != one[k] for k in ("model", "kind", batch)):
                    continue
                row = dict(row, scaling=scaling, device=row["kind"].replace("emulated", "gpu"))
                if not row["emulated"]:
                    row["speedup"] = row["img_per_s"] / one["img_per_s"]
                    row["efficiency"] = row["speedup"] / row["devices"]
                table.append(row)
    return table


def hours_rows(runs, root):
    """A row for each group of repeats, as study.py names them, and the sum of all measured hours, by unit."""
    def key(run):
        folder, name = os.path.split(os.path.relpath(run.folder, root))
        return folder or ".", re.sub(r"-r\d+$", "", name)
    table = []
    for (study, name), group in sorted(by(runs, key).items()):
        run = group[0]
        wall = [r.resources["wall_s"] for r in group]
        count, unit = (run.world, "GPU") if run.kind != "cpu" else (run.world * run.settings["threads"], "core")
        percent = 100 * sum(r.seconds for r in group) / max(sum(wall), 1e-9)
        table.append(dict(study=study, runs_of=name, repeats=len(group), count=count, unit=unit,
                          wall_s_mean=statistics.mean(wall), hours=count * sum(wall) / 3600,
                          training_percent=None if any(r.settings.get("resume") for r in group) else percent,
                          accuracy_mean=statistics.mean(r.accuracy for r in group), emulated=int(run.emulated)))
    for unit, rows in by([r for r in table if not r["emulated"]], lambda r: r["unit"]).items():
        table.append(dict(study="sum", unit=unit, repeats=sum(r["repeats"] for r in rows),
                          hours=sum(r["hours"] for r in rows)))
    return table


def workers_rows(runs):
    """A row for each --workers, device and batch."""
    table = []
    for workers, group in sorted(by(runs, lambda r: r.settings["workers"]).items()):
        for row in make_rows(group):
            mean, sd, ci95 = summary([r.images / max(r.seconds, 1e-9) for r in row["runs"]])
            wait = statistics.mean(r.loader_wait_s for r in row["runs"])
            table.append(dict(row, workers=workers, img_per_s_mean=mean, img_per_s_sd=sd, ci95=ci95,
                              loader_wait_s_mean=wait))
    return table


def name_of_data(run):
    name = run.settings["dataset"]
    return name + " (generated images)" * (name == "synthetic")


def ablation_rows(groups):
    """A row for each (rung, its runs). Those of the emulator have neither speed nor accuracy."""
    table = []
    for rung, runs in groups:
        run = runs[0]
        accuracy, accuracy_sd, _ = summary([r.accuracy for r in runs])
        # the first epoch warms up; what a step takes does not depend on the seed
        speed = statistics.median(e["images"] / max(e["seconds"], 1e-9) for r in runs
                                  for e in r.epochs[1:] or r.epochs)
        row = dict.fromkeys(ABLATION)
        row.update(rung=rung.name, options=rung.adds, emulated=int(run.emulated), repeats=len(runs), model=run.model,
                   dataset=name_of_data(run), commit=run.build["commit"], driver=run.machine.get("driver"),
                   device=run.machine["cpu" if run.kind == "cpu" else "device"],
                   date=time.strftime("%Y-%m-%d", time.gmtime(max(
                       os.path.getmtime(os.path.join(r.folder, "run.json")) for r in runs))))
        if not run.emulated:
            row.update(img_per_s=speed, seconds=statistics.mean(r.seconds for r in runs), accuracy=accuracy,
                       accuracy_sd=accuracy_sd, times_first=speed / (table[0]["img_per_s"] if table else speed),
                       times_previous=speed / (table[-1]["img_per_s"] if table else speed))
        table.append(row)
    return table


def table_lines(columns, rows):
    """The header and the rows as strings."""
    def cell(value):
        return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return [columns] + [[cell(row.get(c)) for c in columns] for row in rows]


def save_table(path, columns, rows):
    try:
        with open(path, "w", errors="surrogateescape", newline="") as f:
            csv.writer(f, lineterminator="\n").writerows(table_lines(columns, rows))
    except OSError as error:
        fail(path, "a file that can be written", error.strerror, "fix the folder's permissions")


def print_columns(lines, left=()):
    """The cells below each other, aligned to the right, but to the left in the columns `left`."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("  ".join(cell.ljust(width) if i in left else cell.rjust(width)
                        for i, (cell, width) in enumerate(zip(line, widths))).rstrip())


def write_table(path, columns, rows):
    print_columns(table_lines(columns, rows))
    save_table(path, columns, rows)
    print(f"Written: {path}")
