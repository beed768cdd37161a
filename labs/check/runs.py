"""What the labs require of run folders. labs/check/runs.sh calls it, in the folder that has the checker's ./cnn:

    runs.py LAB TEST FROM    FROM: the student's folder, which has the folder runs

The exit status is 0 if the test has passed, and 1 if not; then it has printed what is wrong. Whether the numbers of a
run agree is decided by the rules of labs/tools/verify.py. What is here is which runs a lab asks for, how they may
differ, and a repetition of their first steps.
"""
import functools
import glob
import json
import os
import random
import re
import subprocess
import sys
from types import SimpleNamespace

HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.append(os.path.join(HOME, "labs", "tools"))

import verify  # pylint: disable=wrong-import-position
from lab06_trace import check_overlap, check_trace  # pylint: disable=wrong-import-position
from run_folders import (ABLATION, DAMAGES, HOURS, SCALING, Missing,  # pylint: disable=wrong-import-position
                         ablation_rows,
                         complete as all_complete, differences, find_folders, hours_rows, make_rows, other_loss,
                         read_csv, read_run, repeat_options, scaling_rows, step_losses)
from study import read_rungs  # pylint: disable=wrong-import-position

WORK = os.getcwd()
REPEATS = 5
MOST = 5  # findings of a kind that are printed
# Settings that are not seen in a result
UNSEEN = {"out", "quiet", "save-model", "test-batch-size"}
PLACES = {"cpu": "machine.cpu", "device": "machine.device", "compiler": "build.compiler", "flags": "build.flags",
          "commit": "build.commit"}


class Wrong(Exception):
    """What is wrong, and the command that mends it."""

    def __init__(self, what, command):
        super().__init__(f"{what}\nrun: {command}")


# ---- For all labs


@functools.lru_cache(maxsize=None)
def open_run(name, command):
    """The run in runs/NAME, which COMMAND has made."""
    folder = f"runs/{name}"
    if not os.path.isdir(folder):
        raise Wrong(f"{folder}: there is no such folder in {FROM}", command)
    for file in ("run.json", "epochs.csv", "steps.csv"):
        if not os.path.isfile(f"{folder}/{file}"):
            raise Wrong(f"{folder}/{file}: missing", command)
    try:
        run = read_run(folder)
    except SystemExit as why:
        raise Wrong(str(why).partition(": error: ")[2], command) from None
    run.remedy = command
    return run


def value(run, key):
    """Of a key such as settings.epochs in run.json."""
    part, _, name = key.rpartition(".")
    return getattr(run, part).get(name) if part else getattr(run, name)


def need(run, key, expected, why):
    found = value(run, key)
    if found != expected or isinstance(found, bool) != isinstance(expected, bool):
        raise Wrong(f"{run.folder}/run.json: {key} should be {as_json(expected)}, found {as_json(found)}: {why}",
                    run.remedy)


def as_json(found):
    return found if isinstance(found, str) else json.dumps(found)[:60]


def refuse(findings, command):
    """Fails if there are findings of verify.py."""
    lines = list(findings)
    if lines:
        raise Wrong("\n".join(lines[:MOST]), command)


def obey(run, *checks):
    """The run passes these checks of verify.py."""
    refuse((line for check in checks for line in verify.each(check)(".", [run])), run.remedy)


def finished(run):
    """The run is the student's own, and has come to its end."""
    refuse(verify.check_complete(run.folder)[1], run.remedy)
    need(run, "provenance", "measured", "only your own measurements count")
    need(run, "settings.max-steps", 0, "the run ended before the epoch did")
    need(run, "settings.resume", False, "a resumed run has only the times since its checkpoint")
    obey(run, verify.check_command)


def complete(run):
    """It has also trained as its settings say, and was measured."""
    need(run, "emulated", False, "the emulator's times mean nothing")
    need(run, "settings.dry-run", False, "a dry run trains one batch only")
    need(run, "settings.eval", False, "an evaluation trains nothing")
    finished(run)
    obey(run, verify.check_nature)


def agree(run):
    """Its numbers do: epochs, steps and images; throughput x time; the loss of an epoch and of its steps."""
    images = value(run, "settings.limit-train")
    for e in run.epochs:
        if e["images"] != images:
            raise Wrong(f"{run.folder}/epochs.csv: images in epoch {e['epoch']} should be {images}, the setting "
                        f"limit-train, found {e['images']}", run.remedy)
    obey(run, verify.check_epochs, verify.check_steps)


def machine_card(run):
    obey(run, verify.check_entries)


def measured(run):
    complete(run)
    agree(run)
    machine_card(run)


def own_times(runs):
    """No run is a copy of another one."""
    refuse(verify.check_copies(".", runs), runs[0].remedy)


def on_device(run):
    if run.machine["device"] == "cpu":
        raise Wrong(f"{run.folder} was computed by the CPU; expected a GPU, or the emulator's", run.remedy)


def differing(a, b, free=()):
    """Where their run.json files differ but in the settings `free`: [(place, value in a, value in b)]."""
    return [(PLACES.get(name, name.replace("--", "settings.", 1)), as_json(old), as_json(new))
            for name, old, new in differences(a, b, UNSEEN | set(free))]


def alike(run, other, free=()):
    found = differing(other, run, free)
    if found:
        raise Wrong(f"{run.folder} differs from {other.folder} also in "
                    + ", ".join(f"{place} ({new}, there {old})" for place, old, new in found)
                    + ", so a difference in speed has more than one possible cause", run.remedy)


def repeat(run, model, steps=3, more=()):
    """The first steps of the run, trained by the checker on the CPU; all of them if steps is None. Its kernels are the
    best ones, which students do not write."""
    need(run, "settings.dataset", "synthetic", "the lab uses the images that cnn generates")
    need(run, "settings.model", model, f"the lab trains the network {model}")
    options, why = repeat_options(dict(run.settings, kernels=""), run.world)
    if why:
        raise Wrong(f"{run.folder}/run.json: {why}", run.remedy)
    folder = os.path.join(WORK, "own-" + os.path.basename(run.folder))
    options += ["--max-steps", str(steps)] if steps else []
    done = subprocess.run([os.path.join(WORK, "cnn"), *options, *more, "--limit-test", "1", "--quiet", "--out", folder],
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, errors="replace")
    if done.returncode:
        raise Wrong(f"{run.folder}: the checker could not repeat it: {done.stderr.strip()[-300:]}", run.remedy)
    return read_run(folder)


def same_losses(run, other, what, steps=3):
    """The first losses of the run are those of another one, up to rounding."""
    found, expected = ([loss for *_, loss in step_losses(r)[:steps]] for r in (run, other))
    wrong = other_loss(found, expected)
    if wrong:
        raise Wrong(f"{run.folder}/steps.csv: the loss of step {wrong[0]} should be {wrong[2]:.6g}, as {what}; found "
                    f"{wrong[1]:.6g}; the same images and initial weights give the same losses on every machine",
                    run.remedy)


def near_losses(run, other, what, part):
    """The losses of all steps differ from those of another run by at most this part."""
    for mine, theirs in zip(step_losses(run), step_losses(other)):
        if mine[:3] != theirs[:3] or not abs(mine[3] - theirs[3]) <= part * theirs[3]:
            raise Wrong(f"{run.folder}/steps.csv: the loss of step {theirs[1]:g} in epoch {theirs[0]:g} should be "
                        f"{theirs[3]:.6g}, as {what}, up to {100 * part:g} %; found {mine[3]:.6g}; the same images and "
                        "initial weights give nearly the same losses", run.remedy)


def all_of(check, *rows):
    """The check passes with each row of arguments; else everything is printed that is wrong."""
    wrong = []
    for row in rows:
        try:
            check(*row)
        except Wrong as why:
            wrong.append(str(why))
    if wrong:
        sys.exit("\n".join(wrong))


# ---- Lab 0


def lab0_run():
    return open_run("lab00", "./cnn --dataset synthetic --limit-train 12800 --limit-test 1000 --epochs 1 "
                    "--out runs/lab00")


def lab0_losses():
    run = lab0_run()
    same_losses(run, repeat(run, "mnist"), "in the checker's run with your images and seed")


LAB0 = {3: lambda: complete(lab0_run()), 4: lambda: agree(lab0_run()), 5: lab0_losses,
        6: lambda: machine_card(lab0_run())}

# ---- Lab 2

SMALL = "--limit-train 128 --kernels naive --profile --layers"
LAB2_OPTIONS = {"o3": "--limit-train 1600", "o0": "--limit-train 128", "textbook": SMALL, "naive": SMALL,
                "threads2": "--limit-train 1600 --threads 2", "profile": "--limit-train 1600 --profile",
                "layers": "--limit-train 1600 --layers"}


def lab2_run(name):
    """A run of lab 2, which has come to its end and is no copy of another one."""
    run = open_run(f"lab02-{name}", f"make{' OPT=-O0' * (name == 'o0')}; ./cnn --no-cuda --threads 1 --dataset "
                   f"synthetic --limit-test 100 --epochs 2 {LAB2_OPTIONS[name]} --out runs/lab02-{name}")
    refuse(verify.check_complete(run.folder)[1], run.remedy)
    others = [SimpleNamespace(folder=folder) for folder in sorted(glob.glob("runs/lab02-*")) if folder != run.folder]
    copies = verify.check_copies(".", [*others, run])
    refuse((line for line in copies if line.startswith(run.folder + "/")), run.remedy)
    return run


def lab2_each(check):
    all_of(lambda name: check(lab2_run(name)), *((name,) for name in LAB2_OPTIONS))


def lab2_varies(name, other, key, expected, free=()):
    """Between two runs one thing differs, besides what is free."""
    run = lab2_run(name)
    alike(run, lab2_run(other), {key.partition(".")[2], *free})
    need(run, key, expected, "this is the one setting that the run varies")


def lab2_differ():
    base = lab2_run("o3")
    need(base, "settings.kernels", "fast", "the other runs are compared with it")
    need(base, "settings.threads", 1, "the other runs are compared with it")
    flags = base.build["flags"]
    if "-O3" not in flags:
        raise Wrong(f"{base.folder}/run.json: build.flags should contain -O3, found {flags}", base.remedy)
    all_of(lab2_varies,
           ("o0", "o3", "build.flags", flags.replace("-O3", "-O0"), ["limit-train"]),
           ("threads2", "o3", "settings.threads", 2),
           ("profile", "o3", "settings.profile", True),
           ("layers", "o3", "settings.layers", True),
           ("textbook", "o3", "settings.kernels", "naive", ["profile", "layers", "limit-train"]),
           ("naive", "textbook", "settings.kernels", "naive"))


def lab2_profile():
    """The run with a line profile, and the rows: line, hits, time_us, per_hit_us, percent, source."""
    run = lab2_run("profile")
    if not os.path.isfile(f"{run.folder}/profile.csv"):
        raise Wrong(f"{run.folder}/profile.csv: missing", run.remedy)
    return run, read_csv(run, "profile.csv", ["line", "hits", "time_us", "per_hit_us", "percent", "source"])


def lab2_hits():
    """A line in the loop over the batches runs once a step, a line outside of it once an epoch."""
    run, rows = lab2_profile()
    where, epochs, iterations = f"{run.folder}/profile.csv", len(run.epochs), run.parallel["iterations"]
    steps = epochs * iterations
    other = ", ".join(f"{hits:g} in line {line:g}" for line, hits, *_ in rows if hits not in (steps, epochs))
    if other:
        raise Wrong(f"{where}: hits should be {steps} ({epochs} epochs x {iterations} steps) in the loop and {epochs} "
                    f"outside of it, found {other}", run.remedy)
    for line, hits, time, per_hit, *_ in rows:
        if abs(hits * per_hit - time) > 0.01 * time + 0.1 * hits:  # per_hit_us is rounded to tenths
            raise Wrong(f"{where}: time_us in line {line:g} should be hits x per_hit_us, found {time}", run.remedy)
    for call in ("next_batch(", "forward(net", "backward(net", "update_weights("):
        if not any(call in source and hits == steps for _, hits, _, _, _, source in rows):
            raise Wrong(f"{where}: the hits of the line with {call} should be {steps}, found no such line", run.remedy)


def lab2_cover():
    """The lines' times add up to the epochs' times."""
    run, rows = lab2_profile()
    where, trained = f"{run.folder}/profile.csv", run.seconds
    lines, percent = sum(row[2] for row in rows) / 1e6, sum(row[4] for row in rows)
    if not 0.95 * trained <= lines <= 1.02 * trained:
        raise Wrong(f"{where}: the lines' time should be at least 95 % of the epochs' {trained:.3f} s, and at most "
                    f"all, found {lines:.3f} s", run.remedy)
    if not 99 <= percent <= 101:
        raise Wrong(f"{where}: the sum of the percentages should be 100, found {percent:.1f}", run.remedy)


def lab2_losses():
    """The checker trains twice, since a run with fewer images has others in its batches."""
    for first, others in (("o3", ("threads2", "profile", "layers")), ("textbook", ("o0", "naive"))):
        base = lab2_run(first)
        same_losses(base, repeat(base, "mnist"), "in the checker's run with your images and seed")
        all_of(lambda name, base: same_losses(lab2_run(name), base, f"in {base.folder}"),
               *((name, base) for name in others))


def lab2_layers():
    run = lab2_run("layers")
    columns = ["layer", "kind", "out_shape", "params", "mflop"]
    if not os.path.isfile(f"{run.folder}/layers.csv"):
        raise Wrong(f"{run.folder}/layers.csv: missing", run.remedy)
    own = repeat(run, "mnist", more=["--layers"])
    rows = [read_csv(r, "layers.csv", columns) + [None] for r in (run, own)]
    for mine, wanted in zip(*rows):
        if mine != wanted:
            raise Wrong(f"{run.folder}/layers.csv: rows differ from those of the network: expected {wanted}, found "
                        f"{mine}", run.remedy)
    obey(run, verify.check_layer_times)


LAB2 = {1: lambda: lab2_each(complete), 2: lambda: lab2_each(agree), 3: lab2_hits, 4: lab2_cover,
        5: lab2_differ, 6: lab2_losses, 7: lab2_layers}

# ---- Lab 3


def lab3_sweep():
    options = ("--no-cuda --threads 1 --model cifar --dataset synthetic --limit-train 12800 --limit-test 500 "
               "--epochs 2 --batch-size 64 --resident off --augment elastic")
    sweep, rows, missing = "runs/lab03-workers", [], []
    names = {}
    for path in sorted(glob.glob(f"{sweep}/*/run.json"), reverse=True):
        folder = os.path.dirname(path)
        run = read_run(folder)
        names[value(run, "settings.workers")] = os.path.basename(folder)
    for workers in (1, 2, 4, 8):
        if workers not in names:
            missing.append(str(workers))
            continue
        name = names[workers]
        run = open_run(f"lab03-workers/{name}", f"./cnn {options} --workers {workers} --quiet --out {sweep}/{name}")
        rows.append(run)
        own_times(rows)
        measured(run)
        need(run, "settings.resident", False, "loading has to cost something")
        need(run, "settings.augment", "elastic", "loading has to cost something")
        lab3_fits(run, rows[0])
    if missing:
        sys.exit(f"no run folder in {sweep} for --workers {' '.join(missing)}; step 6 of the handout has the commands")


def lab3_fits(run, first):
    """A row of the sweep differs from the first one in nothing but --workers."""
    found = [f"{place} {old} and {new}" for place, old, new in differing(first, run, {"workers"})]
    found += [f"{name} of epoch {a['epoch']} {a[name]} and {b[name]}" for a, b in zip(first.epochs, run.epochs)
              for name in ("train_loss", "weight_hash") if a[name] != b[name]]
    if found:
        raise Wrong(f"{first.folder} and {run.folder} differ in more than --workers; run both on the same machine with "
                    f"the same options: {', '.join(found[:4])}", run.remedy)


LAB3 = {10: lab3_sweep}

# ---- Lab 6


def lab6_trace():
    run = open_run("lab06", "./cnn-emu --model lenet --dataset synthetic --kernels naive --resident off "
                   "--augment elastic --limit-train 64 --limit-test 8 --epochs 2 --batch-size 8 --lr 0.1 --quiet "
                   "--trace runs/lab06/trace.json --trace-steps 0:16 --out runs/lab06")
    need(run, "settings.model", "lenet", "the lab traces the network lenet")
    need(run, "settings.kernels", "naive", "these are the kernels that you write")
    need(run, "settings.resident", False, "only then a loader makes and uploads batches")
    need(run, "parallel.world", 1, "the lab traces one device")
    finished(run)
    on_device(run)
    agree(run)
    if len(run.epochs) < 2:
        raise Wrong(f"{run.folder}: expected 2 epochs or more, found {len(run.epochs)}", run.remedy)
    same_losses(run, repeat(run, "lenet", 4), "in a training by the checker", 4)
    run.times = [seconds for seconds, in read_csv(run, "steps.csv", ["seconds"])]
    try:
        check_overlap(run, check_trace(run))
    except ValueError as why:
        raise Wrong(str(why), run.remedy) from None


LAB6 = {8: lab6_trace}

# ---- Lab 7


def lab7_run(name, command):
    run = open_run(name, command)
    finished(run)
    on_device(run)
    agree(run)
    return run


def lab7_precisions():
    command = ("for p in fp32 bf16 fp16; do ./cnn-emu --model lenet --dataset synthetic --limit-train 64 "
               "--limit-test 16 --epochs 1 --batch-size 8 --lr 0.1 --precision $p --quiet --out runs/lab07-$p; done")
    for precision in ("fp32", "bf16", "fp16"):
        run = lab7_run(f"lab07-{precision}", command)
        need(run, "settings.precision", precision, "this is what the run is to show")
        if precision == "fp32":
            base = run
            near_losses(run, repeat(run, "lenet", None), "on the CPU", 1e-3)
            continue
        alike(run, base, {"precision", "kernels"})
        near_losses(run, base, "in fp32", 0.005)
        if step_losses(run) == step_losses(base):
            raise Wrong(f"{run.folder} has the losses of {base.folder} to the last digit: were they computed in "
                        f"{precision}?", command)
        if [e["weight_hash"] for e in run.epochs] == [e["weight_hash"] for e in base.epochs]:
            raise Wrong(f"{run.folder} has the weights of {base.folder}, to the last bit: were they computed in "
                        f"{precision}?", command)


def lab7_ladder():
    """All rungs, with as many repeats each; each has the options of the rungs before it, too."""
    command = "make ablation EMULATE=1 MODEL=lenet RUNS=runs/lab07 OPTIONS='--dataset synthetic'"
    rungs = read_rungs(os.path.join(HOME, "slurm/configs/ablation.txt"), "gpu")
    groups, free = [], {option[2:] for rung in rungs for option in rung.options} | {"seed"}
    for rung in rungs:
        names = sorted(glob.glob(f"runs/lab07/*-rung{rung.number}-{rung.name}-r*/run.json"))
        runs = [lab7_run(f"lab07/{path.split('/')[2]}", command) for path in names]
        groups.append((rung, runs))
        if not runs:
            raise Wrong(f"runs/lab07: there is no run of the rung {rung.name}", command)
        if len(runs) != len(groups[0][1]):
            raise Wrong(f"runs/lab07: the rung {rung.name} has {len(runs)} runs, the first one {len(groups[0][1])}",
                        command)
        for run in runs:
            for option, wanted in rung.options.items():
                if option != "--zero-grad":  # it is no setting of a result
                    need(run, f"settings.{option[2:]}", {"on": True, "off": False}.get(wanted, wanted),
                         f"rung {rung.name}")
            named_by_seed(run)
            alike(run, groups[0][1][0], free)
    own_times([run for _, runs in groups for run in runs])
    ladder_table("runs/lab07", groups, command)


LAB7 = {9: lab7_precisions, 10: lab7_ladder}


def worth_timing(run):
    """The first epoch has the start-up, and a few steps say nothing about times."""
    images, steps = run.epochs[-1]["images"], run.parallel["iterations"]
    if len(run.epochs) < 2 or images < 1000 or steps < 5:
        raise Wrong(f"{run.folder}: expected 2 epochs or more of at least 1000 images and 5 steps, found "
                    f"{len(run.epochs)} of {images} images and {steps} steps: too few to compare times", run.remedy)


# ---- Lab 8


def lab8_command(name):
    own = {"one": "--threads 1", "ddp": "--threads 2 --replicas 2", "dp": "--threads 2 --replicas 2 --parallel dp"}
    return ("./cnn --no-cuda --dataset synthetic --limit-train 3200 --limit-test 500 --epochs 2 --lr 0.1 "
            f"--global-batch 64 {own[name]} --out runs/lab08-{name}")


def lab8_runs():
    """The three runs can be compared; how their steps agree is checked by lab08.sh, as in its other tests."""
    one, ddp, dp = (open_run(f"lab08-{name}", lab8_command(name)) for name in ("one", "ddp", "dp"))
    for run, mode in ((one, "single"), (ddp, "ddp"), (dp, "dp")):
        measured(run)
        need(run, "parallel.mode", mode, "this is what the run is to show")
        alike(run, one, {"replicas", "gpus", "parallel", "batch-size", "threads"})
        worth_timing(run)
        need(run, "settings.threads", one.settings["threads"], "a replica has as many threads as the one device")
    need(dp, "parallel.world", ddp.world, "ddp and dp are compared on as many devices")
    same_losses(one, repeat(one, "mnist"), "in a training by the checker")
    own_times([one, ddp, dp])
    print(ddp.world, int(one.parallel["iterations"]))


LAB8 = {10: lab8_runs}

# ---- Lab 9

STUDY = "make study-scaling RUNS=runs/lab09 BATCH=64 EPOCHS=2 LIMIT=3200 REPEATS=5 OPTIONS='--dataset synthetic'"
CORE = ("make build/cnn-O0; make ablation RUNGS=slurm/configs/one-core.txt RUNS=runs/lab09/core MODEL=cifar BATCH=64 "
        "EPOCHS=2 LIMIT=256 REPEATS=5 OPTIONS='--no-cuda --dataset synthetic'")
LARGE = ("make ablation RUNGS=slurm/configs/large-batch.txt RUNS=runs/lab09/batches MODEL=cifar EPOCHS=6 LIMIT=3200 "
         "REPEATS=5 OPTIONS='--no-cuda --dataset synthetic'")


def study_runs(study, command):
    """The runs directly in runs/STUDY."""
    names = [path.split("/")[-2] for path in sorted(glob.glob(f"runs/{study}/*/run.json"))]
    if not names:
        raise Wrong(f"runs/{study}: no run folders there", command)
    return [open_run(f"{study}/{name}", command) for name in names]


def named_by_seed(run):
    need(run, "settings.seed", int((re.findall(r"-r(\d{1,9})$", run.folder) or [0])[0]), "repeat r has the seed r")


def scaling_complete():
    """One device and more, strong and weak, five seeds each."""
    runs = study_runs("lab09", STUDY)
    for run in runs:
        measured(run)
        worth_timing(run)
    rows, wrong = scaling_rows(make_rows(runs)), []
    ones = {row["global_batch"] for row in rows if row["devices"] == 1}
    if len(ones) != 1:
        wrong.append(f"found {len(ones)} different batches on one device; expected one")
    counts = {kind: {row["devices"] for row in rows if row["scaling"] == kind} - {1} for kind in ("strong", "weak")}
    if not counts["strong"] or len(counts["strong"]) != len(counts["weak"]):
        wrong.append(f"found {len(counts['strong'])} numbers of devices with strong scaling and {len(counts['weak'])} "
                     "with weak scaling; expected as many of both, at least one")
    for row in rows:
        seeds = len({run.seed for run in row["runs"]})
        if seeds < REPEATS:
            which = f"{row['devices']} devices, {row['scaling']} scaling" if row["devices"] > 1 else "one device"
            wrong.append(f"{which}: found {seeds} seeds, expected {REPEATS}; a mean of fewer says nothing about the "
                         "spread")
    if wrong:
        raise Wrong("\n".join(f"runs/lab09: {line}" for line in dict.fromkeys(wrong)), STUDY)


def scaling_comparable():
    """The runs differ in nothing but devices, batch and seed, and have times of their own."""
    runs = study_runs("lab09", STUDY)
    for run in runs:
        alike(run, runs[0], {"replicas", "gpus", "threads", "batch-size", "global-batch", "seed"})
    own_times(runs)


def same_table(path, columns, rows, command, compared=None):
    """A table that a study has written has the rows that its run folders give, in the columns `compared`."""
    study = SimpleNamespace(table=os.path.basename(path), target=command, columns=columns, rows=lambda _: rows)
    refuse(verify.check_table(study, compared)(os.path.dirname(path), []), command)


def scaling_table():
    same_table("runs/lab09/scaling.csv", SCALING, scaling_rows(make_rows(study_runs("lab09", STUDY))), STUDY)


def repeated(run):
    """Its first steps, repeated by the checker with as many replicas, have the same losses, images and rates."""
    own = repeat(run, "cifar")
    same_losses(run, own, "repeated by the checker")
    rows = [[row[:3] for row in read_csv(r, "steps.csv", ["step", "images", "lr", "rank"]) if row[3] == 0]
            for r in (run, own)]
    for (step, images, rate), (_, other_images, other_rate) in zip(*rows):
        if images != other_images or not abs(rate - other_rate) <= 0.01 * other_rate:
            raise Wrong(f"{run.folder}/steps.csv: step {step:g} has {images:g} images and the learning rate {rate:g}; "
                        f"repeated by the checker: {other_images:g} and {other_rate:g}", run.remedy)


def repeat_two(runs, others):
    """Repeats one of the runs and one of the others, drawn at random."""
    for run in {run.folder: run for run in (random.choice(runs), random.choice(others))}.values():
        repeated(run)


def scaling_repeated():
    """Of the two runs, one has more than one device, if there is one."""
    runs = study_runs("lab09", STUDY)
    repeat_two([run for run in runs if run.world > 1] or runs, runs)


def ladder(study, command, changes, rungs):
    """[(rung, its runs)]: five seeds each; rung k + 1 differs from rung k in the k-th of `changes` alone, which names
    one place or several."""
    runs, groups = study_runs(study, command), []
    for run in runs:
        measured(run)
        named_by_seed(run)
    own_times(runs)
    for rung in rungs:
        some = [run for run in runs if f"-rung{rung.number}-" in run.folder]
        if len({run.seed for run in some}) < REPEATS:
            raise Wrong(f"runs/{study}, rung {rung.number}: found {len({run.seed for run in some})} seeds, expected "
                        f"{REPEATS}", command)
        groups.append((rung, some))
    for (_, before), (rung, after), change in zip(groups, groups[1:], changes):
        found = [place for place, _, _ in differing(before[0], after[0], {"seed", "batch-size"})]
        if sorted(found) != sorted(change.split()):
            raise Wrong(f"{after[0].folder} differs from rung {rung.number - 1} in {', '.join(found) or 'nothing'}; "
                        f"expected: in {' and '.join(change.split())} alone", command)
    return groups


def ladder_table(folder, groups, command):
    """ablation.csv has what the run folders say; of emulated runs neither speed nor accuracy."""
    compared = ["rung", "emulated", "repeats", "img_per_s", "accuracy", "times_first"]
    same_table(f"{folder}/ablation.csv", ABLATION, ablation_rows(groups), command, compared)


def one_core():
    rungs = read_rungs(os.path.join(HOME, "slurm/configs/one-core.txt"), "cpu")
    groups = ladder("lab09/core", CORE, ["build.flags", "settings.kernels", "settings.threads"], rungs)
    first = groups[0][1]
    if "-O0" not in first[0].build["flags"]:
        raise Wrong(f"{first[0].folder}/run.json: build.flags should have -O0, found {first[0].build['flags']}", CORE)
    need(first[0], "settings.threads", 1, "the first rungs use one core")
    need(first[0], "settings.kernels", "naive", "the first rungs compute by the definition")
    with_seed = {run.seed: run for run in first}
    for run in (run for _, runs in groups[1:] for run in runs):
        if run.seed in with_seed:
            same_losses(run, with_seed[run.seed], "on the first rung, with this seed")
    ladder_table("runs/lab09/core", groups, CORE)


def batches():
    rungs = read_rungs(os.path.join(HOME, "slurm/configs/large-batch.txt"), "cpu")
    changes = ["settings.global-batch", "settings.lr", "settings.warmup-epochs", "settings.global-batch settings.lr"]
    groups = ladder("lab09/batches", LARGE, changes, rungs)
    for run in (run for _, runs in groups for run in runs):
        worth_timing(run)
    repeat_two(groups[3][1], [run for _, runs in groups for run in runs])
    ladder_table("runs/lab09/batches", groups, LARGE)


def hours_table():
    command = "labs/tools/study.py hours runs/lab09"
    for study, target in (("lab09", STUDY), ("lab09/core", CORE), ("lab09/batches", LARGE)):
        study_runs(study, target)
    runs = all_complete([folder for folders in find_folders("runs/lab09").values() for folder in folders])
    same_table("runs/lab09/hours.csv", HOURS, hours_rows(runs, "runs/lab09"), command)


LAB9 = {3: scaling_complete, 4: scaling_comparable, 5: scaling_table, 6: scaling_repeated, 7: one_core, 8: batches,
        9: hours_table}

LABS = {0: LAB0, 2: LAB2, 3: LAB3, 6: LAB6, 7: LAB7, 8: LAB8, 9: LAB9}


def main(lab, test):
    os.chdir(FROM)
    try:
        LABS[int(lab)][int(test)]()
    except (Wrong, Missing) as why:
        sys.exit(str(why))
    except DAMAGES as error:
        sys.exit(f"expected run folders as ./cnn writes them, found {type(error).__name__}: {error}; was one edited?")


if __name__ == "__main__":
    FROM = sys.argv[3]
    main(*sys.argv[1:3])
