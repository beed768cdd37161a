#!/usr/bin/env python3
"""Predicts how long a training step takes on N devices, and compares with measurements.

Measure first: the same network on 1 and on 2 or more devices, each run in a folder of its own.
    ./cnn --replicas 1 --threads 1 --dataset synthetic --limit-train 2560 --epochs 1 --out n1
    ./cnn --replicas 2 --threads 2 --dataset synthetic --limit-train 5120 --epochs 1 --out n2
    labs/tools/scaling_model.py n1 n2
--threads is divided among the replicas: here each computes with one thread. On GPUs, use --gpus N.

The model, for ddp (section 10 of cnn.c):
    step    = compute + rest + exposed
    compute = forward + backward + optimizer as measured on the fewest devices; rest = load + copy +
              other there. With --strong all except optimizer and other shrink with the images per device.
    comm    = B * 2(N-1) * alpha + 2(N-1)/N * gradient bytes / beta
              The ring reduces each of the B buckets in 2(N-1) messages; alpha is the latency of a
              message, beta the bandwidth from a device to its neighbor in bytes per second.
    exposed = the part of comm that backward does not hide: all of it with --overlap off or B = 1, else
              max(comm / B, comm - backward * (B-1) / B)
              The last bucket cannot start before backward ends, nor the first before it is filled.
The first run has an error, too, since medians of parts do not add up: it shows how much times vary.
The model is too simple in these respects: It assumes that buckets are equal and are filled at equal
intervals. In fact the last layers of a network, which come first in backward, often have many weights
and few operations, so that more is hidden. It assumes that communication does not slow down
computation and that no device waits for a slower one, which is wrong if devices share cores or memory.
Every message has the same cost, for any distance.

What is measured is the median over the steps with full batches after the warm-up. For comm_s it takes
the minimum over the ranks of a step, since earlier ranks wait for the last one; the other times are
means over the ranks, including waiting. alpha and beta are fitted by least squares to the comm of all
runs on 2 or more devices. Pass runs with different N or --bucket-mb: one run, or several with the same
N and buckets, determine only beta, and alpha is set to 0.
"""
import argparse
import csv
import json
import math
import os
import statistics
import sys
from types import SimpleNamespace

NETWORKS = """For other networks give --alpha-us and --gb-per-s. Typical documented values, NOT MEASURED HERE:
    network                           alpha us  GB/s    GB/s: one direction, from the standard;
    Ethernet 10 Gb/s, TCP                25       1.25  programs reach less. alpha: what MPI
    Ethernet 100 Gb/s, RDMA               3      12.5   programs commonly report for a short message,
    InfiniBand HDR, 200 Gb/s              1.5    25     correct within a factor of 2 or 3; between
    InfiniBand NDR, 400 Gb/s              1.5    50     GPUs launching a kernel adds 5 us or more.
    PCIe 4.0 x16, GPUs of a machine       5      32
    NVLink 4, GPUs of a machine           5     450     (sold as 900, which counts both ways)"""
PARTS = ["load_s", "copy_s", "forward_s", "backward_s", "optimizer_s", "exposed_comm_s", "other_s",
         "seconds", "bytes_sent"]
COLUMNS = ["epoch", "step", "images", "comm_s", "warmup"] + PARTS
TABLE = {  # column of the CSV file: heading on the screen, decimal places
    "n": ("N", 0), "images_per_device": ("images", 0), "buckets": ("buckets", 0),
    "compute_ms": ("compute", 2), "compute_measured_ms": ("*", 2), "comm_ms": ("comm", 2),
    "comm_measured_ms": ("*", 2), "exposed_ms": ("exposed", 2), "exposed_measured_ms": ("*", 2),
    "step_ms": ("step", 2), "step_measured_ms": ("*", 2), "error_percent": ("error %", 1),
    "efficiency": ("effic.", 3), "efficiency_measured": ("*", 3), "kind": ("", 0), "run": ("", 0)}


def fail(where, expected, found, advice):
    sys.exit(f"scaling_model: error: {where}: expected {expected}, found {found}; {advice}")


def read_steps(path, n, batch):
    """The rows of each step that is used: after the warm-up, all ranks present, full batches."""
    steps = {}
    with open(path, newline="") as f:
        rows = csv.DictReader(f)
        missing = [c for c in COLUMNS if c not in (rows.fieldnames or [])]
        if missing:
            fail(path, "the columns of ./cnn's steps.csv", "none named " + ", ".join(missing),
                 "give a folder that this version of ./cnn has written")
        for row in rows:
            try:
                row = {c: float(row[c]) for c in COLUMNS}
            except (TypeError, ValueError):
                fail(f"{path}, line {rows.line_num}", "a number in every column", "something else",
                     "a killed run can leave an incomplete line: delete it")
            steps.setdefault((row["epoch"], row["step"]), []).append(row)
    good = [rows for rows in steps.values() if len(rows) == n
            and all(r["images"] == batch and r["warmup"] == 0 for r in rows)]
    if not good:
        fail(path, f"steps after the warm-up with {batch} images on each of {n} devices",
             f"none among {len(steps)} steps", "train for longer: more --limit-train or --epochs")
    return good


def read_run(folder):
    path = os.path.join(folder, "run.json")
    try:
        with open(path) as f:
            about = json.load(f)
        parallel, settings, machine = about["parallel"], about["settings"], about["machine"]
        run = SimpleNamespace(
            folder=folder, n=parallel["world"], images=parallel["batch_per_device"],
            global_batch=parallel["global_batch"], buckets=parallel.get("buckets", 0),
            bucket_mb=settings["bucket-mb"], overlap=settings["overlap"],
            network=[settings[k] for k in ("model", "width", "stem", "optimizer", "kernels")],
            machine=[machine[k] for k in ("host", "cpu", "device")] + [settings["threads"]])
        if about["emulated"]:
            fail(path, "times of a real device", '"emulated": true',
                 "the emulator runs a GPU's code on the CPU: its results are correct, but its times "
                 "mean nothing; measure with ./cnn")
        if parallel["mode"] not in ("single", "ddp"):
            fail(path, "one device or --parallel ddp", "mode " + parallel["mode"],
                 "only ddp has the ring all-reduce that the model describes")
        steps = read_steps(os.path.join(folder, "steps.csv"), run.n, run.images)
    except OSError as error:
        fail(error.filename, "a file of a run folder", error.strerror,
             "write one with ./cnn ... --out DIR")
    except ValueError as error:
        fail(path, "JSON", error, "run ./cnn once more")
    except csv.Error as error:
        fail(os.path.join(folder, "steps.csv"), "what ./cnn writes", error, "was it edited? Run it again")
    except (KeyError, TypeError) as error:
        fail(path, f"the entry {error}", "none", "give a folder that this version of ./cnn has written")
    for name in PARTS:
        setattr(run, name, statistics.median(statistics.mean(r[name] for r in rows) for rows in steps))
    run.comm_s = statistics.median(min(r["comm_s"] for r in rows) for rows in steps)
    return run


def compare_runs(runs, strong):
    """Ends with an error if runs cannot be compared; prints a note if they differ in machine."""
    first = runs[0]
    for run in runs[1:]:
        if run.network != first.network:
            fail(run.folder, f"model, width, stem, optimizer, kernels {first.network} as in {first.folder}",
                 run.network, "compare runs of the same network only")
        found, wanted = (run.global_batch, first.global_batch) if strong else (run.images, first.images)
        if found != wanted:
            fail(run.folder, f"{wanted} images of {'all devices' if strong else 'each device'} as in "
                 f"{first.folder}", found, "weak scaling needs runs with the same --batch-size, strong "
                 "scaling (--strong) runs with the same --global-batch")
        if run.machine != first.machine:
            print(f"Note: {run.folder} ran on {run.machine}, {first.folder} on {first.machine} (host, cpu, "
                  "device, threads of a rank); the model assumes that all devices are equal.")


def count_buckets(gradient_bytes, bucket_mb):
    """For a run.json without it. Close enough if no layer is larger than a bucket; at most 64."""
    first = min(1, bucket_mb)
    return min(64, 1 + math.ceil(max(0, gradient_bytes / 1e6 - first) / bucket_mb))


def wire(n, buckets, gradient_bytes):
    """Messages of a rank, and bytes that it sends."""
    return buckets * 2 * (n - 1), 2 * (n - 1) / n * gradient_bytes


def fit(points):
    """alpha, seconds per byte and how they were found; points: (messages, bytes, seconds)."""
    mm, mb, bb, mt, bt = (sum(p[i] * p[j] for p in points)
                          for i, j in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2)))
    determinant = mm * bb - mb * mb
    if determinant < 1e-9 * mm * bb:
        return 0, bt / bb, ("alpha set to 0, since one run, or several alike, determine beta only. Add a run "
                            "with another N or --bucket-mb")
    alpha, per_byte = (mt * bb - bt * mb) / determinant, (bt * mm - mt * mb) / determinant
    if alpha < 0 or per_byte <= 0:
        return 0, bt / bb, (f"alpha set to 0, since least squares over {len(points)} runs gave a negative "
                            "value: their times differ for other reasons")
    return alpha, per_byte, f"least squares over {len(points)} runs"


def predict(base, run, n, images, gradient_bytes, alpha, per_byte):
    """Milliseconds of a step on n devices, from the times of base, with run's buckets."""
    share, b = images / base.images, run.buckets
    backward = base.backward_s * share
    compute = base.forward_s * share + backward + base.optimizer_s
    rest = (base.load_s + base.copy_s) * share + base.other_s
    messages, sent = wire(n, b, gradient_bytes)
    comm = messages * alpha + sent * per_byte
    exposed = max(comm / b, comm - backward * (b - 1) / b) if run.overlap else comm
    return {"n": n, "images_per_device": images, "buckets": b, "compute_ms": 1e3 * compute,
            "comm_ms": 1e3 * comm, "exposed_ms": 1e3 * exposed, "step_ms": 1e3 * (compute + rest + exposed)}


def make_rows(runs, strong, projected, *network):
    base, rows = runs[0], []

    def images(n):
        return base.global_batch // n if strong else base.images

    for kind, n, run in [("run", r.n, r) for r in runs] + [("projection", n, runs[-1]) for n in projected]:
        if strong and base.global_batch % n:
            print(f"No projection for {n} devices: {base.global_batch} images are no multiple of them.")
            continue
        row = predict(base, run, n, images(n), *network)
        ideal = predict(base, run, 1, images(1), *network)["step_ms"] / (n if strong else 1)
        row.update(kind=kind, efficiency=ideal / row["step_ms"])
        if kind == "run":
            row.update(run=run.folder, comm_measured_ms=1e3 * run.comm_s, step_measured_ms=1e3 * run.seconds,
                       compute_measured_ms=1e3 * (run.forward_s + run.backward_s + run.optimizer_s),
                       exposed_measured_ms=1e3 * run.exposed_comm_s,
                       error_percent=100 * (1e-3 * row["step_ms"] / run.seconds - 1))
            if base.n == 1:
                row["efficiency_measured"] = base.seconds / (run.seconds * (n if strong else 1))
        rows.append(row)
    return rows


def print_table(rows):
    print("In ms. Each column: model; *: measured.")
    print("".join(f"{heading:>8}" for heading, _ in TABLE.values()).rstrip())
    for row in rows:
        cells = [f"{row[k]:8.{places}f}" if k in row else f"{'-':>8}"
                 for k, (heading, places) in TABLE.items() if heading]
        print("".join(cells) + f"  {row['kind']} {row.get('run', '')}".rstrip())


def write_csv(path, rows):
    try:
        with open(path, "w", errors="surrogateescape", newline="") as f:
            writer = csv.DictWriter(f, TABLE, lineterminator="\n")
            writer.writeheader()
            for row in rows:
                writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    except OSError as error:
        fail(path, "a file that can be written", error.strerror, "give another --csv FILE")


def positive(text):
    if not 0 < float(text) < math.inf:
        raise ValueError
    return float(text)


def devices(text):
    counts = [int(n) for n in text.split(",") if n]
    if min(counts, default=1) < 1:
        raise ValueError
    return counts


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, epilog=NETWORKS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folders", nargs="+", metavar="DIR", help="what ./cnn ... --out DIR has written")
    add("--strong", action="store_true", help="runs with the same --global-batch, not the same --batch-size")
    add("--alpha-us", type=positive, metavar="US", help="latency of a message in microseconds")
    add("--gb-per-s", type=positive, metavar="G", help="beta: 10^9 bytes, not bits, per second")
    add("--gradient-mb", type=positive, metavar="MB", help="10^6 bytes of gradients, 4e-6 times the "
        "parameters that ./cnn prints; needed if all runs have one device")
    add("--project", type=devices, default="8,64,1024", metavar="N,N", help="default: 8,64,1024; none: ''")
    add("--csv", metavar="FILE", help="write the table there as well")
    args = parser.parse_args()
    if (args.alpha_us is None) != (args.gb_per_s is None):
        parser.error("--alpha-us and --gb-per-s: expected both or none of them, found one")
    return args


def main():
    args = parse_options()
    runs = sorted((read_run(folder) for folder in args.folders), key=lambda r: r.n)
    compare_runs(runs, args.strong)
    several = [r for r in runs if r.n > 1]
    if not several and not (args.gradient_mb and args.alpha_us):
        fail(", ".join(args.folders), "a run on 2 or more devices, which shows the time of communication and "
             "the size of the gradients", "one device only",
             "add one, or give --gradient-mb, --alpha-us and --gb-per-s")
    gradient_bytes = 1e6 * args.gradient_mb if args.gradient_mb else statistics.median(
        r.bytes_sent * r.n / (2 * (r.n - 1)) for r in several)
    for run in runs:
        run.buckets = run.buckets or count_buckets(gradient_bytes, run.bucket_mb)
    if args.alpha_us:
        alpha, per_byte, how = 1e-6 * args.alpha_us, 1e-9 / args.gb_per_s, "given, not measured here"
    else:
        alpha, per_byte, how = fit([(*wire(r.n, r.buckets, gradient_bytes), r.comm_s) for r in several])
    if per_byte <= 0:
        fail(", ".join(r.folder for r in several), "comm_s above 0", "0", "was steps.csv edited?")
    print(f"{'Strong' if args.strong else 'Weak'} scaling, gradients {gradient_bytes / 1e6:.3f} MB")
    print(f"alpha {1e6 * alpha:.2f} us per message, beta {1e-9 / per_byte:.3f} GB/s: {how}\n")
    rows = make_rows(runs, args.strong, args.project, gradient_bytes, alpha, per_byte)
    print_table(rows)
    if args.project:
        print("\nprojection: not measured. It assumes that all devices are as fast as those of the first "
              "run, and the\nalpha and beta above.")
        if alpha == 0:
            print("With alpha = 0 it ignores the latency of messages, whose share grows with N.")
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
