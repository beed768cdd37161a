#!/usr/bin/env python3
"""A timing study: trains the same network on the CPU, one GPU and several, and compares the times.

In the project's folder, after make:
    labs/tools/study.py run runs/first --batches 50 100 --repeats 3 --epochs 1 --limit 2000
trains for each device, batch and repeat, writes a run folder in runs/first for each run, and collects
the runs into runs/first/study.csv. Stop it at any time; the same command continues. A run is finished if its
run.json says `complete`, with the same command, settings and build; an unfinished run is repeated.
    labs/tools/study.py train cpu runs         one run on cpu, single or multi; it replaces runs/cpu
    labs/tools/study.py scaling runs/scaling   1, 2, 4, ... devices: scaling.csv
    labs/tools/study.py workers runs/workers   1, 2, 4, 8 threads that load images: workers.csv
    labs/tools/study.py ablation runs/ablation one optimization after the other: ablation.csv
    labs/tools/study.py collect runs/first     study.csv from any folder of run folders; lists missing runs;
                                               with --workers 1 2 ...: workers.csv;
                                               with --counts 1 2 ...: scaling.csv
    labs/tools/study.py hours runs/first       what the runs at any depth in that folder have cost: hours.csv
`make study`, `make study-scaling`, `make study-workers` and `make ablation` call these and draw the plots, and
`make cpu`, `make single` and `make multi` train once. Options of ./cnn come last, after --.

The variables of make are options: MODEL=cifar EPOCHS=20 REPEATS=10 LIMIT=2000 GPUS=2 EMULATE=1 WORKERS='1 2 4 8'
RUNGS=slurm/configs/one-core.txt (after make build/cnn-O0), BATCHES='50 100' for make study and BATCH=250 for the
others, RUNS=DIR for the folder, and OPTIONS='--width 64' for options of ./cnn.

Devices: cpu (all usable cores), single (one GPU), multi (--gpus of them, ddp). A missing device is skipped,
with a message. With --emulate a virtual GPU replaces it: ./cnn-emu runs the GPU's code on the CPU; its
results are correct, but its times mean nothing, so such rows have emulated = 1 and no speed-up.

study.csv has a row for each device and batch:
    batch, global_batch              images per step on one device, on all devices together
    seconds_mean, seconds_sd, ci95   over the repeats. A run's seconds are the sum of its epochs' `seconds` in
                                     epochs.csv: only training, no testing, no reading of files. sd divides by
                                     n - 1; mean +- ci95 is the 95 % interval of the mean (Student's t)
    speedup                          how many times as fast as the cpu row with this model and global_batch
    accuracy_mean, accuracy_sd       per cent of the test images, after the last epoch
Repeat k has --seed k: other initial weights and another order of the images, the same on each device. All
other settings, the build and the machine must be equal; otherwise the differences are printed.

scaling.csv has rows for strong scaling, where the devices share one --global-batch, and for weak scaling,
where each device has --batch-size images. All train with the same images. speedup is images per second
divided by the images per second of one device; efficiency is speedup / devices. Without a GPU, the devices
are replicas of the network on the CPU, with one thread each. With --launch, they are processes (MPI ranks),
on one machine or many: {n} is their number in that command, as in
    study.py scaling DIR --counts 2 --batches 64 --launch 'srun --mpi=pmix --ntasks={n}'
Several jobs can fill one folder, each with the --counts for which it has nodes. `collect` then writes the
table, and names the rows and repeats that are missing.

workers.csv has a row for each number of workers, on one GPU or, if there is none, on the CPU, where loaders
and training share the cores. --resident off and --augment elastic give the loaders work; options after --
can change that.
    img_per_s_mean, img_per_s_sd     over the repeats; mean +- ci95 is the 95 % interval of the mean
    loader_wait_s_mean               seconds that training waited for images, all epochs of a run

ablation.csv has a row for each rung of a ladder, a text file with one rung a line (--rungs; by default
slurm/configs/ablation.txt): its name and the options that it adds to the rungs above it; `--program FILE`
is another build of ./cnn, and `--threads cores` means all usable cores. All rungs train with the same
images, seeds and epochs, and with Fashion-MNIST; with --model, with the data set of that network, if it is found:
    img_per_s                        the median over all epochs of all repeats, except the first of each
    seconds                          seconds of training, the mean of the repeats
    accuracy, accuracy_sd            as in study.csv: what an optimization must not cost
    times_first, times_previous      img_per_s relative to the first and to the previous rung
A rung that the device cannot run, such as one that needs tensor cores, is skipped, and named with the reason below the
table. Without a GPU it is the ladder of the CPU. With --emulate and without a GPU, each rung makes two steps on a
virtual GPU, which shows that it runs: such rows have neither speed nor accuracy.

hours.csv has a row for each group of repeats, in the folder `study`, and one for their sum:
    count, unit                      what a run occupies: GPUs or, on the CPU, cores, one for each thread
    hours                            count x wall time from start to end, testing included, of all repeats:
                                     what a cluster charges for
    training_percent                 the part of the wall time that was training
"""
import argparse
import os
import signal
import subprocess
import sys
import tempfile
from types import SimpleNamespace

from run_folders import (ABLATION, COLUMNS, DAMAGES, HOURS, REPEATS_DIFFER, SCALING, WORKERS, ablation_rows, add_speedups,
                         check_comparable, complete, differences, fail, find_folders, hours_rows, is_dirty,
                         make_rows, name_of_data, print_columns, read_run, read_runs, save_table, scaling_rows,
                         workers_rows, write_table)

DEVICES = {"cpu": "--no-cuda", "single": "--gpus 1", "multi": "--gpus {n}",
           "gpus": "--gpus {n}", "replicas": "--no-cuda --replicas {n} --threads {n}", "ranks": ""}
LOADING = ["--resident", "off", "--augment", "elastic"]  # keeps loaders busy
NO_TENSOR_CORES = "--kernels tensor: expected a GPU with tensor cores"  # how ./cnn begins to say that
RUNGS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../slurm/configs/ablation.txt")


class Absent(Exception):
    """There is no such device, or not that many, or no such data."""


class Lacking(Exception):
    """The device lacks what a rung of the ablation needs."""


def start(program, count, options, output=None, launch=()):
    """Runs ./cnn to its end, by the command `launch` if there is one, and returns its exit status."""
    environment = dict({"CUEMU_DEVICES": str(count)}, **os.environ)  # the user's value has priority
    command = [*launch, program, *options]
    try:
        return subprocess.call(command, stdin=subprocess.DEVNULL, stdout=output,
                               stderr=output and subprocess.STDOUT, env=environment)
    except OSError as error:
        fail(command[0], "a program", error.strerror, "run make first, and make emulate for virtual GPUs")


def try_out(program, count, options, absent=(), launch=(), lacking=()):
    """The run.json of one training step: the settings and build that a run will have. absent: how error
    messages begin that say that something else than the device is missing; lacking: what the device lacks."""
    with tempfile.TemporaryDirectory(dir=os.getcwd() if launch else None) as folder, \
            open(os.path.join(folder, "output.txt"), "w+") as output:  # which all machines see
        status = start(program, count, [*options, "--dry-run", "--out", folder], output, launch)
        output.seek(0)
        error = (output.read().strip() or "nothing").splitlines()[-1].replace("cnn: error: ", "")
        own = () if launch else (f"--gpus {count}: ", f"--replicas {count}: ")
        if status and error.startswith((*own, *absent)):
            raise Absent(error)
        if status and error.startswith(lacking):
            raise Lacking(error)
        if status:
            fail(" ".join([program, *options]), "a dry run that succeeds", error, "correct that option")
        return read_run(folder)


def make_task(args, device, count, batch, repeat, batch_option="--global-batch", workers=None, rung=None):
    """The command of a run, its folder's name and what its run.json should say. Absent: no such device;
    Lacking: it lacks what the rung needs."""
    options = DEVICES[device].format(n=count).split()
    options += ["--model", args.model, "--epochs", str(args.epochs), batch_option, str(batch)]
    if args.limit:
        options += ["--limit-train", str(args.limit), "--limit-test", str(args.limit)]
    options += ["--workers", str(workers)] if workers else []
    options += [word for option in rung.options.items() for word in option] if rung else []
    options += args.options
    first = rung.program or args.program if rung else args.program
    launch = [word.replace("{n}", str(count)) for word in args.launch.split()] if device == "ranks" else []
    key = device, count, batch, batch_option, workers, rung and rung.name
    if key not in args.tried:
        try:
            args.tried[key] = first, try_out(first, count, options, launch=launch,
                                             lacking=(NO_TENSOR_CORES,) if rung else ())
        except Absent:
            if not args.emulate or device == "replicas":
                raise
            args.tried[key] = args.program + "-emu", try_out(args.program + "-emu", count, options)
    program, expected = args.tried[key]
    name = "-".join([args.model, device + (str(count) if device == "ranks" or "{n}" in DEVICES[device] else "")]
                    + ["emulated"] * expected.emulated
                    + [("each" if batch_option == "--batch-size" else "b") + str(batch)]
                    + [f"workers{workers}"] * bool(workers)
                    + ([f"rung{rung.number}", rung.name] if rung else []) + [f"r{repeat}"])
    options += ["--seed", str(repeat)] + ["--save-model"] * (repeat == 1)  # the plots need one of them
    return SimpleNamespace(name=name, program=program, count=count, expected=expected, options=options,
                           repeat=repeat, launch=launch)


def is_finished(task, folder):
    run = read_run(folder)
    if not run or run.status != "complete":
        return False
    wrong = differences(task.expected, run, REPEATS_DIFFER)
    command = [task.program, *task.options, "--out", folder]
    if run.command != command:
        wrong.append(("the command", " ".join(command), " ".join(run.command)))
    if is_dirty(run) and os.path.getmtime(task.program) > os.path.getmtime(os.path.join(folder, "run.json")):
        wrong.append(("", f"a run of the present {task.program}",
                      "one of older sources that were not committed"))
    for name, expected, found in wrong:
        fail(folder, f"{name} {expected}".strip(), found, "finished runs are not overwritten: choose another "
             "folder (make: RUNS=DIR) or delete this one")
    return True


def run_tasks(root, tasks):
    for number, task in enumerate(tasks, 1):
        folder = os.path.join(root, task.name)
        finished = is_finished(task, folder)
        if not finished:
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, "output.txt"), "w") as output:
                status = start(task.program, task.count, [*task.options, "--out", folder], output, task.launch)
            if status:
                fail(folder, "exit status 0", status,
                     f"read {folder}/output.txt; the same command continues from here")
        run = read_run(folder)
        seconds = "" if run.emulated else f"{run.seconds:.3f} s of training, "
        print(f"[{number}/{len(tasks)}] {task.name}: {seconds}accuracy {run.accuracy:.2f} %"
              + ", emulated" * run.emulated + ", finished before" * finished)


def advice(why):
    return f"{why}; EMULATE=1 (study.py --emulate) uses virtual GPUs instead"


def train(args):
    try:
        task = make_task(args, args.device, args.gpus if args.device == "multi" else 1, args.batches[0], 1)
    except Absent as why:
        sys.exit(f"study: error: {args.device}: {advice(why)}")
    os.makedirs(args.folder, exist_ok=True)
    folder = os.path.join(args.folder, args.device)
    status = start(task.program, task.count, [*task.options, "--out", folder])
    if status == 0:
        run = read_run(folder)
        if args.device == "multi":
            how = "DataParallel" if run.settings["parallel"] == "dp" else "DistributedDataParallel"
            print(f"multi: --parallel {run.settings['parallel']}, as {how}; the other one: "
                  f"make multi OPTIONS='--parallel {'ddp' if run.settings['parallel'] == 'dp' else 'dp'}'")
        print(f"{args.device}: {run.seconds:.3f} s of training, accuracy {run.accuracy:.2f} %, see {folder}"
              + ". Emulated: the time means nothing." * run.emulated)
    sys.exit(status)


def planned(args, plan, each):
    """All of the plan, or the one run that --task selects."""
    if args.task and args.task > len(plan):
        fail("--task", f"1 to {len(plan)}, one for each {each}", args.task, "give a smaller number")
    return plan[args.task - 1:args.task] if args.task else plan


def study(args):
    plan = [(device, args.gpus if device == "multi" else 1, batch, repeat)
            for repeat in range(1, args.repeats + 1) for device in args.devices for batch in args.batches]
    tasks, absent = [], {}
    for entry in planned(args, plan, "device, batch and repeat"):
        try:
            tasks += [make_task(args, *entry)] if entry[0] not in absent else []
        except Absent as why:
            absent[entry[0]] = why
            print(f"skip {entry[0]}: {advice(why)}")
    run_tasks(args.folder, tasks)
    if args.task:
        sys.exit(0 if tasks else 1)
    args.devices = [device for device in args.devices if device not in absent]
    collect_study(args)


def name_missing(found, repeats, row):
    """True if a row has fewer runs than repeats; prints the missing seeds."""
    seeds = {run.seed for run in found}
    if len(seeds) >= repeats:
        return False
    missing = [str(k) for k in range(1, repeats + 1) if k not in seeds]
    print(f"missing: {row}: repeat {', '.join(missing)}", file=sys.stderr)
    return True


def collect(args):
    (collect_workers if args.workers else collect_scaling if args.counts else collect_study)(args)


def collect_study(args):
    """study.csv; exit status 1 if runs are missing, by default compared with the row that has most."""
    runs = read_runs(args.folder)
    check_comparable(runs)
    rows = make_rows(runs)
    add_speedups(rows)
    write_table(os.path.join(args.folder, "study.csv"), COLUMNS, rows)
    repeats = args.repeats or max(row["repeats"] for row in rows)
    models = sorted({run.model for run in runs})
    missing = [name_missing([r for r in runs if (r.model, r.device, r.global_batch) == (model, device, batch)], repeats,
                            f"{model}, " * (len(models) > 1) + f"{device}, global batch {batch}")
               for model in models
               for device in args.devices or sorted({row["device"] for row in rows})
               for batch in args.batches or sorted({row["global_batch"] for row in rows})]
    sys.exit(1 if any(missing) else 0)


def workers(args):
    args.options, device, batch = LOADING + args.options, "single", args.batches[0]
    try:
        make_task(args, device, 1, batch, 1, workers=args.workers[0])
    except Absent as why:
        device = "cpu"
        print(f"Trains on the CPU. {why}")
    plan = [(count, repeat) for repeat in range(1, args.repeats + 1) for count in args.workers]
    run_tasks(args.folder, [make_task(args, device, 1, batch, repeat, workers=count)
                            for count, repeat in planned(args, plan, "number of workers and repeat")])
    if not args.task:
        collect_workers(args)


def collect_workers(args):
    """workers.csv; exit status 1 if runs are missing, as in collect_study()."""
    runs = read_runs(args.folder)
    check_comparable(runs, {"workers"})
    rows = workers_rows(runs)
    write_table(os.path.join(args.folder, "workers.csv"), WORKERS, rows)
    repeats = args.repeats or max(row["repeats"] for row in rows)
    models = sorted({run.model for run in runs})
    missing = [name_missing([r for r in runs if (r.model, r.settings["workers"]) == (model, count)], repeats,
                            f"{model}, " * (len(models) > 1) + f"{count} workers")
               for model in models for count in args.workers]
    sys.exit(1 if any(missing) else 0)


def scaling(args):
    batch, device = args.batches[0], "ranks" if args.launch else "gpus"
    try:
        one = make_task(args, device, args.counts[0] if args.launch and args.counts else 1, batch, 1)
        args.emulate = one.expected.emulated  # never mixed with real ones
    except Absent as why:
        device = "replicas"
        print(f"{why}: the devices are replicas on the CPU, with one thread each")
    tasks = []
    for count in args.counts or [1, 2] if args.emulate else args.counts or [2 ** i for i in range(12)]:
        try:
            for repeat in range(1, args.repeats + 1):
                tasks.append(make_task(args, device, count, batch, repeat))
                if count > 1:
                    tasks.append(make_task(args, device, count, batch, repeat, "--batch-size"))
        except Absent as why:
            print(f"skip {count} devices and more: {why}")
            break
    run_tasks(args.folder, sorted(tasks, key=lambda task: task.repeat))
    if not args.launch:
        collect_scaling(args)


def collect_scaling(args):
    """scaling.csv; exit status 1 if runs of the --counts are missing, as in collect_study()."""
    runs = read_runs(args.folder)
    check_comparable(runs, {"threads"})
    rows = scaling_rows(make_rows(runs))
    write_table(os.path.join(args.folder, "scaling.csv"), SCALING, rows)
    if all(run.world > 1 for run in runs):
        fail(args.folder, "runs on one device, with which the others are compared", "none", "make those first")
    repeats = args.repeats or max([row["repeats"] for row in rows], default=1)
    there = {(row["scaling"], row["devices"]): row["runs"] for row in rows}
    missing = [name_missing(there.get((kind, count), []), repeats, f"{kind} scaling, devices: {count}")
               for count in args.counts or [] for kind in ("strong", "weak")]
    sys.exit(1 if any(missing) else 0)


def hours(args):
    """hours.csv of all runs at any depth."""
    groups = find_folders(args.folder)
    runs = complete([folder for folders in groups.values() for folder in folders])
    if not runs:
        fail(args.folder, "folders of complete runs", "none", "make study writes them, and so does ./cnn --out")
    for run in runs:
        seconds = sum(e["seconds"] + e["test_seconds"] for e in run.epochs)
        if run.settings.get("resume") or seconds > 1.01 * run.resources["wall_s"] + 0.01:
            print(f"Note: {run.folder} was resumed; its hours are only those since then", file=sys.stderr)
    write_table(os.path.join(args.folder, "hours.csv"), HOURS, hours_rows(runs, args.folder))


# ---- The ablation


def read_rungs(path, device):
    """The rungs of the ladder of a device, "gpu" or "cpu": number, name, the options that it adds, as text, all
    that it has, as {option: value}, and its program, if it is another one."""
    rungs, options, program = [], {}, None
    try:
        with open(path) as f:
            lines = [line.split("#")[0].split() for line in f]
    except OSError as error:
        fail(path, "a file of rungs", error.strerror, "see slurm/configs/ablation.txt")
    for number, words in enumerate(lines, 1):
        if words and (words[0] not in ("gpu", "cpu") or len(words) < 4 or len(words) % 2
                      or any(not word.startswith("--") for word in words[2::2])):
            fail(f"{path}, line {number}", "gpu or cpu, a name, options with their values", " ".join(words),
                 "correct that line")
        if words and words[0] == device:
            if words[1] in [rung.name for rung in rungs]:
                fail(f"{path}, line {number}", "a name that no other rung has", words[1], "choose another one")
            cores = str(len(os.sched_getaffinity(0)))
            options = {**options, **dict(zip(words[2::2], (cores if w == "cores" else w for w in words[3::2])))}
            program = options.pop("--program", program)
            rungs.append(SimpleNamespace(number=len(rungs) + 1, name=words[1], adds=" ".join(words[2:]),
                                         options=options, program=program))
    if not rungs:
        fail(path, f"rungs of the device {device}", "none", f"add a line that begins with {device}")
    return rungs


def find_device(args):
    """Where the ladder is climbed: "gpu", "emulated" or "cpu", and by which program."""
    tiny = ["--model", "mnist", "--dataset", "synthetic", "--limit-train", "2", "--limit-test", "2"]
    if "--no-cuda" in args.options:
        return "cpu", args.program
    try:
        return "emulated" if try_out(args.program, 1, ["--gpus", "1", *tiny]).emulated else "gpu", args.program
    except Absent as why:
        if args.emulate:
            return "emulated", args.program + "-emu"
        print(f"No GPU: {advice(why)}")
        return "cpu", args.program


def find_data(args, program, device, options):
    """The data set that ./cnn reads with these options: `synthetic` if none is found."""
    tiny = ["--model", args.model, "--batch-size", "2", "--limit-train", "2", "--limit-test", "2"]
    try:
        run = try_out(program, 1, DEVICES[device].format(n=1).split() + tiny + options, ("fashion-mnist: ",))
    except Absent:
        return "synthetic"
    return run.settings["dataset"]


def choose_data(args, program, device, own):
    """Options for what all rungs train with: the data set on which ./cnn trains that network, if `own`; else, or if
    that is not found, Fashion-MNIST; else images that ./cnn generates."""
    name = find_data(args, program, device, []) if own else "synthetic"
    if name == "synthetic":
        name = find_data(args, program, device, ["--dataset", "fashion-mnist"])
        if own and name != "synthetic":
            print(f"The data set of {args.model} is not here, so all rungs train with Fashion-MNIST; data/get_data.sh "
                  "downloads others")
    if name == "synthetic":
        print("Fashion-MNIST is not here, so all rungs train with generated images; data/get_data.sh "
              "fashion-mnist downloads it")
    return ["--dataset", name]


def as_word(value):
    """A setting of run.json as it stands on the command line."""
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


def ran_instead(rung, settings):
    """The options with which ./cnn ran other than the rung asks for, such as --graph beside --profile."""
    def same(wanted, found):
        try:
            return float(wanted) == float(found)
        except ValueError:
            return wanted == found
    found = {option: as_word(settings.get(option[2:], "no such option")) for option in rung.options}
    return [f"{option} {found[option]} instead of {wanted}" for option, wanted in rung.options.items()
            if not same(wanted, found[option])]


def make_first_task(args, device, rung):
    """The task of a rung's first repeat; Lacking: why it cannot be measured."""
    task = make_task(args, device, 1, args.batches[0], 1, rung=rung)
    other = ran_instead(rung, task.expected.settings)
    if other:
        raise Lacking(f"./cnn runs with {', '.join(other)}")
    return task


def make_rung_tasks(args, device, rungs):
    """The tasks of each rung, for all repeats, and why rungs are skipped: {name: why}."""
    tasks, skipped = {}, {}
    for rung in rungs:
        try:
            task = make_first_task(args, device, rung)
        except Lacking as why:
            print(f"skip {rung.name}: {why}")
            skipped[rung.name] = str(why)
            continue
        tasks[rung.name] = [task] + [make_task(args, device, 1, args.batches[0], repeat, rung=rung)
                                     for repeat in range(2, args.repeats + 1)]
    if not tasks:
        fail(args.rungs, "a rung that this device has", "none", "correct the options")
    return tasks, skipped


def print_ablation(rows, runs, skipped):
    """The table, with what was measured in its head, and below it the rungs that were not."""
    run, first = runs[0], rows[0]
    print(f"\nAblation: {run.model}, {name_of_data(run)}, {run.epochs[0]['images']} images, "
          f"batch {run.global_batch}, epochs: {len(run.epochs)}, seeds: {first['repeats']}")
    print(", ".join([first["device"], *(f"driver {first['driver']}",) * bool(first["driver"]), first["date"],
                     f"commit {first['commit']}"]))
    if first["emulated"]:
        print("Emulated: every rung runs; a virtual GPU shows no speed, and a few steps no accuracy.")
    heads = {"rung": "rung", "img_per_s": "img/s", "times_first": "x first", "times_previous": "x previous",
             "accuracy": "accuracy %", "accuracy_sd": "sd", "options": "adds"}
    print_columns([list(heads.values())] + [[
        row[key] if isinstance(row[key], str) else "n/a" if row[key] is None else f"{row[key]:.2f}"
        for key in heads] for row in rows], left=(0, len(heads) - 1))
    for why in dict.fromkeys(skipped.values()):
        print(f"Skipped: {', '.join(name for name in skipped if skipped[name] == why)}: {why}")


def ablation(args):
    own = bool(args.model)
    where, program = find_device(args)
    device = "cpu" if where == "cpu" else "single"
    if where == "emulated":
        print("Emulated: one or two steps on each rung, with one seed")
        args.epochs, args.limit, args.batches, args.repeats = 1, 4, [2], 1
    elif args.epochs < 2:
        fail("--epochs", "2 or more, since the first is not counted", args.epochs, "give a larger number")
    if where == "cpu" and not args.model:
        args.model, args.limit = "mnist", args.limit or 1000
        print(f"The ladder of the CPU, with a small network: --model mnist, {args.limit} images")
    args.model = args.model or "resnet18"
    if "--dataset" not in args.options:
        args.options = choose_data(args, program, device, own) + args.options
    rungs = read_rungs(args.rungs, "cpu" if where == "cpu" else "gpu")
    (tasks, skipped), path = make_rung_tasks(args, device, rungs), os.path.join(args.folder, "ablation.csv")
    for repeat in range(args.repeats):  # a study that is stopped then has the same seeds on all rungs
        run_tasks(args.folder, [group[repeat] for group in tasks.values()])
        groups = [(rung, [read_run(os.path.join(args.folder, task.name))
                          for task in tasks[rung.name][:repeat + 1]]) for rung in rungs if rung.name in tasks]
        rows, runs = ablation_rows(groups), [run for _, group in groups for run in group]
        save_table(path, ABLATION, rows)
    free = {option[2:] for rung in rungs for option in rung.options}
    check_comparable(runs, free | ({"flags"} if any(rung.program for rung in rungs) else set()))
    print_ablation(rows, runs, skipped)
    print(f"Written: {path}")


def positive(text):
    if int(text) < 1:
        raise ValueError
    return int(text)


def parse_options():
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="train|run|scaling|workers|ablation|collect|hours")
    known = ["cpu", "single", "multi"]
    for name, does, devices, batches, repeats in (
            ("train", train, None, [250], 1), ("run", study, known, [50, 100, 150, 200, 250], 10),
            ("scaling", scaling, None, [256], 5), ("workers", workers, None, [250], 5),
            ("ablation", ablation, None, [128], 3),
            ("collect", collect, None, None, None), ("hours", hours, None, None, None)):
        command = commands.add_parser(name)
        command.set_defaults(does=does, devices=devices, options=words[end + 1:], tried={}, launch=None)
        add = command.add_argument
        if name == "train":
            add("device", choices=known)
        add("folder", metavar="DIR", help="of the run folders")
        if name == "hours":
            continue
        add("--batches", nargs="+" if name in ("run", "collect") else 1, type=positive, metavar="B", default=batches,
            help=f"images per step, all devices together (default: {batches or 'those of the runs'})")
        if name in ("run", "collect"):
            add("--devices", nargs="+", choices=known, metavar="NAME", help="cpu, single, multi")
        if name != "train":
            add("--repeats", type=positive, metavar="N", default=repeats,
                help=f"default: {repeats or 'the most that a row has'}")
        if name in ("workers", "collect"):
            counts = [1, 2, 4, 8] if name == "workers" else None
            add("--workers", nargs="+", type=positive, metavar="N", default=counts,
                help=f"threads that load images (default: {counts or 'study.csv instead'})")
        if name in ("scaling", "collect"):
            add("--counts", nargs="+", type=positive, metavar="N", help="numbers of devices (default: "
                + ("1 2 4 ... up to all)" if name == "scaling" else "study.csv instead)"))
        if name == "collect":
            continue
        if name == "ablation":
            add("--model", help="default: resnet18; on a CPU mnist, with 1000 images")
            add("--rungs", default=RUNGS, metavar="FILE",
                help="the ladder (default: slurm/configs/ablation.txt)")
        else:
            add("--model", default="cifar", help="default: cifar")
        epochs = 3 if name == "ablation" else 20
        add("--epochs", type=positive, default=epochs, metavar="N", help=f"default: {epochs}")
        add("--limit", type=positive, metavar="N", help="only the first N images, to train and to test")
        add("--gpus", type=positive, default=2, metavar="N", help="GPUs of multi (default: 2)")
        add("--emulate", action="store_true", help="replace missing GPUs by virtual ones, by PROGRAM-emu")
        add("--program", default="./cnn", help="default: ./cnn")
        if name in ("run", "workers"):
            add("--task", type=positive, metavar="N", help="only the Nth run, for array jobs")
        if name == "scaling":
            add("--launch", metavar="COMMAND", help="starts {n} processes of ./cnn, on one machine or several")
    return parser.parse_args(words[:end])


if __name__ == "__main__":
    try:
        sys.stdout.reconfigure(line_buffering=True)  # keeps output and errors in order
        arguments = parse_options()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if the parent ignores it, exit statuses are lost
        arguments.does(arguments)
    except KeyboardInterrupt:
        sys.exit("study: stopped; finished runs are kept, and the same command continues from here")
    except BrokenPipeError:
        sys.exit(1)  # whoever read the output has seen enough
    except OSError as problem:
        fail(problem.filename, "a file that can be written", problem.strerror, "fix its permissions")
    except DAMAGES as problem:
        fail("a run folder", "files as ./cnn writes them", f"{type(problem).__name__}: {problem}", "was one edited?")
