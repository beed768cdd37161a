"""Makes the submissions of tests/labs/grade_test.py: those of students with nothing to hide, and bad ones.

Each is made from a run of ./cnn (`base`): the losses are real, the times made up, so that no two students have the
same. A submission is a function below; BAD says which flags labs/grade has to raise: kind, a part of the place, a part
of the reason.
"""
import csv
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

PARTS = ["load_s", "copy_s", "forward_s", "backward_s", "optimizer_s", "exposed_comm_s", "other_s"]
GOOD, BAD = {}, {}      # name: function; name: (function, flags)


def good(name=None):
    return lambda make: GOOD.setdefault(name or make.__name__, make)


def bad(*flags, name=None):
    def add(make):
        BAD[name or make.__name__] = make, flags
        return make
    return add


def save(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8", errors="surrogateescape") as f:
        f.write(text)


def load(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def read_rows(path):
    with open(path, newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


def write_rows(path, rows):
    text = io.StringIO()
    to = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    to.writeheader()
    to.writerows(rows)
    save(path, text.getvalue())


class Run:
    """A run folder that is edited: run.json, steps.csv and epochs.csv; its predictions stay."""

    def __init__(self, folder):
        self.folder = folder
        self.about = json.loads(load(f"{folder}/run.json"))
        self.steps = read_rows(f"{folder}/steps.csv")
        self.epochs = read_rows(f"{folder}/epochs.csv")
        self.predictions = load(f"{folder}/predictions.csv")

    def save(self, folder=None):
        """Writes it; the times of epochs, and the wall time, are made to fit the times of the steps."""
        folder = folder or self.folder
        for epoch in self.epochs:
            rank0 = [float(s["seconds"]) for s in self.steps if s["epoch"] == epoch["epoch"] and s["rank"] == "0"]
            epoch["seconds"] = f"{sum(rank0) * 1.001 + 0.001:.3f}"
            epoch["img_per_s"] = f"{int(epoch['images']) / float(epoch['seconds']):.0f}"
        total = sum(float(e["seconds"]) + float(e["test_seconds"]) for e in self.epochs)
        self.about["resources"].update(wall_s=round(total + 0.5, 3), cpu_s=round(0.9 * total, 3))
        self.save_json(folder)
        write_rows(f"{folder}/steps.csv", self.steps)
        write_rows(f"{folder}/epochs.csv", self.epochs)
        save(f"{folder}/predictions.csv", self.predictions)

    def save_json(self, folder=None):
        save(f"{folder or self.folder}/run.json", json.dumps(self.about, indent=1))

    def vary(self, seed, factor=1.0):
        """Times of another training, with the same parts of a step."""
        draw = random.Random(seed)
        for step in self.steps:
            self.scale(step, factor * draw.uniform(0.8, 1.25))

    @staticmethod
    def scale(step, factor):
        for part in PARTS:
            step[part] = f"{float(step[part]) * factor:.6f}"
        step["seconds"] = f"{sum(float(step[part]) for part in PARTS):.6f}"


class Student:
    """The folder of one student, and what it is made from."""

    def __init__(self, made, folder, name):
        self.made, self.folder, self.name = made, folder, name
        self.seed = sum(map(ord, name))
        os.makedirs(f"{folder}/runs")
        for file in ("cnn.c", "Makefile"):
            shutil.copy(f"{made}/starter/{file}", folder)

    def run(self, name="lab00", base="base", factor=1.0):
        """A run like `base`, with times of its own."""
        run = Run(f"{self.made}/{base}")
        run.vary(f"{self.seed} {name}", factor)
        run.folder = f"{self.folder}/runs/{name}"
        run.save()
        return run

    def path(self, name):
        return f"{self.folder}/{name}"

    def report(self, folder="runs", answer="An answer."):
        """As make report writes it, with answers; report.html may be there or not, so it is not."""
        make = [sys.executable, f"{self.made}/tools/report.py", self.path(folder)]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        text = re.sub(r"^> TODO:.*\n(> .*\n)*", answer + "\n", load(self.path(f"{folder}/report.md")), flags=re.M)
        save(self.path(f"{folder}/report.md"), text)
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        if os.path.exists(self.path(f"{folder}/report.html")):
            os.remove(self.path(f"{folder}/report.html"))
        return text


# ---- Nothing to find


@good()
def anna(student):
    student.run()


@good("Fatma O'Neil & Söhne")
def quotes(student):
    student.run()


@good()
def bert_several_runs(student):
    for name, base in ("lab00", "base"), ("lab00-batch48", "batch48"), ("lab00-seed2", "seed2"):
        student.run(name, base)


def link_runs(student):
    """As make report LAB=0 does."""
    os.makedirs(student.path("reports/lab00"))
    os.symlink("../../runs/lab00", student.path("reports/lab00/lab00"))


@good()
def chen_report(student):
    student.run()
    student.run("lab00-again")
    student.report()
    link_runs(student)


@good()
def chloe_lab_report(student):
    """As make report LAB=0 writes it; handed in with git, which ignores the links."""
    student.run()
    student.run("lab00-again")
    lab_report(student)


def lab_report(student, answer="An answer."):
    link_runs(student)
    for name in os.listdir(student.path("runs")):
        if name != "lab00":
            os.symlink(f"../../runs/{name}", student.path(f"reports/lab00/{name}"))
    student.report("reports/lab00", answer)


def pack_zip(student, name_of):
    """In place of the folder; name_of(path in the folder): the name in the archive."""
    with zipfile.ZipFile(student.folder + ".zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for folder, _, names in os.walk(student.folder):
            for path in (os.path.join(folder, name) for name in names):
                archive.write(path, name_of(os.path.relpath(path, student.folder)))
    shutil.rmtree(student.folder)


@good("dora.zip")
def packed_folder(student):
    student.run()
    pack_zip(student, lambda path: "lab0/" + path)


@good("willy_windows.zip")
def packed_by_powershell(student):
    """With the separator of Windows, by version 5; a folder that was unpacked and packed again."""
    student.run()
    pack_zip(student, lambda path: "lab0\\lab0\\" + path.replace("/", "\\"))


@good()
def nora_exported(student):
    """A folder that contains an archive, as learning platforms export it; tar -r has added a newer file."""
    student.run()
    with tarfile.open(student.folder + "/../nora.tar", "w") as archive:
        old = tarfile.TarInfo("lab0/runs/lab00/run.json")
        old.size = 4
        archive.addfile(old, io.BytesIO(b"old\n"))
        archive.add(student.folder, "lab0")
    shutil.rmtree(student.folder)
    os.mkdir(student.folder)
    os.rename(student.folder + "/../nora.tar", student.path("lab0.tar"))
    save(student.path("comment.txt"), "Handed in late.")


@good("emil.tar.gz")
def packed_by_tar(student):
    student.run()
    link_runs(student)
    with tarfile.open(student.folder + ".tar.gz", "w:gz") as archive:
        archive.add(student.folder, ".")
    shutil.rmtree(student.folder)


@good("mac.zip")
def packed_on_a_mac(student):
    student.run()
    with zipfile.ZipFile(student.folder + ".zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in files_of_a_mac(student):
            archive.write(path, "lab0/" + name)
            archive.writestr("__MACOSX/lab0/" + fork_of(name), FORK)
        archive.writestr("__MACOSX/._lab0", FORK)
    shutil.rmtree(student.folder)


@good("mac_tar.tar.gz")
def packed_by_the_tar_of_a_mac(student):
    student.run()
    for name, _ in files_of_a_mac(student):
        save(student.path(fork_of(name)), FORK)
    save(student.folder + "/../._lab0", FORK)
    with tarfile.open(student.folder + ".tar.gz", "w:gz") as archive:
        archive.add(student.folder + "/../._lab0", "._lab0")
        archive.add(student.folder, "lab0")
    os.remove(student.folder + "/../._lab0")
    shutil.rmtree(student.folder)


FORK = "\0\5\26\7\0\2\0\0Mac OS X"  # how a file with a resource fork begins


def fork_of(name):
    return os.path.join(os.path.dirname(name), "._" + os.path.basename(name))


def files_of_a_mac(student):
    """[(name, path)] of a folder that Finder has shown"""
    for folder in ("", "runs", "runs/lab00"):
        save(student.path(os.path.join(folder, ".DS_Store")), "\0\0\0\1Bud1")
    return [(os.path.relpath(os.path.join(folder, name), student.folder), os.path.join(folder, name))
            for folder, _, names in os.walk(student.folder) for name in names]


@good()
def gus_speedup(student):
    for threads, factor in (1, 1), (2, 0.55):
        run = student.run(f"lab00-threads{threads}", factor=factor)
        set_threads(run, threads)
    student.run()


@good()
def hana_replicas(student):
    student.run()
    student.run("lab00-two", "replicas")


@good()
def ivan_job(student):
    run = student.run()
    run.about["machine"]["slurm"] = "4711"
    run.save_json()


@good()
def julia_other_options(student):
    student.run()
    student.run("lab00-sgd", "sgd")


@good()
def ivo_without_fast_kernels(student):
    run = student.run()
    run.about["settings"]["kernels"] = "naive"
    run.about["machine"]["peak_gflops"] = None
    run.save_json()


@good()
def kim_edits_outside_of_parts(student):
    student.run()
    save(student.path("cnn.c"), load(student.path("cnn.c")) + "\n// fork() and system() are only names here\n")


def set_threads(run, threads):
    run.about["settings"]["threads"] = threads
    run.about["command"] += ["--threads", str(threads)]
    run.save_json()


# ---- Times


@bad(("numbers", "lab00/epochs.csv", "times the measured peak"), name="all_times_divided")
def all_times_divided(student):
    run = student.run()
    for step in run.steps:
        run.scale(step, 0.002)
    run.save()


@bad(("numbers", "lab00/steps.csv", "seconds = sum of the phases in epoch 1, step 5"))
def part_of_a_step(student):
    run = student.run()
    run.steps[4]["forward_s"] = f"{float(run.steps[4]['forward_s']) / 2:.6f}"
    write_rows(student.path("runs/lab00/steps.csv"), run.steps)


@bad(("numbers", "lab00-threads2/run.json", "a speed-up of at most 2.2"))
def impossible_speedup(student):
    for threads, factor in (1, 1), (2, 0.2):
        set_threads(student.run(f"lab00-threads{threads}", factor=factor), threads)
    student.run()


@bad(("numbers", "lab00/run.json", "GFLOP/s for each"))
def impossible_peak(student):
    run = student.run()
    run.about["machine"]["peak_gflops"] = 1e6
    run.save_json()


@bad(("jobs", "lab00/run.json", "which sacct does not list"))
def job_of_nobody(student):
    run = student.run()
    run.about["machine"]["slurm"] = "99"
    run.save_json()


@bad(("jobs", "lab00/run.json", "as long as job 4712 of mia lasted"))
def longer_than_its_job(student):
    run = student.run()
    run.about["machine"]["slurm"] = "4712"
    run.about["resources"]["wall_s"] += 100
    run.save_json()


@bad(("numbers", "lab00/run.json", "expected JSON, found the number 1000"))
def peak_that_overflows(student):
    run = student.run()
    run.about["machine"]["peak_gflops"] = 10**400
    run.save_json()


@bad(("numbers", "lab00/epochs.csv", "img_per_s x seconds"))
def speed_that_overflows(student):
    run = student.run()
    run.epochs[0]["img_per_s"] = str(10**400)
    write_rows(student.path("runs/lab00/epochs.csv"), run.epochs)


# ---- Accuracies and losses


def fake_losses(student):
    """A run whose losses do not follow from its settings."""
    run = student.run()
    for rows, name, digits in (run.steps, "loss", 9), (run.epochs, "train_loss", 4):
        for row in rows:
            row[name] = f"{1.1 * float(row[name]):.{digits}f}"
    run.save()
    return run


@bad(("rerun", "lab00/steps.csv", "in step 1, as in a run of your own build"))
def losses_faked(student):
    fake_losses(student)


@bad(("rerun", "lab00/run.json", "could not be re-run: cnn: error: --model"))
def faked_and_not_repeatable(student):
    run = fake_losses(student)
    run.about["settings"]["model"] = "unknown"
    run.save_json()


@bad(("numbers", "lab00/steps.csv", "as in epochs.csv"), ("rerun", "lab00/steps.csv", "found inf"))
def losses_that_overflow(student):
    run = student.run()
    for step in run.steps:
        step["loss"] = "1e308"
    run.save()


@bad(("numbers", "lab00/run.json", "with the provenance measured"))
def faked_and_supplied(student):
    run = fake_losses(student)
    run.about["provenance"] = "supplied"
    run.save_json()


@bad(("numbers", "lab00/run.json", "in parallel a number as world"), ("rerun", "lab00/run.json", "1 to 16 devices"))
def faked_and_no_number(student):
    run = fake_losses(student)
    run.about["parallel"]["world"] = True
    run.save_json()


@bad(("numbers", "lab00/run.json", "no epoch with images, as the setting eval says"))
def faked_and_not_trained(student):
    run = fake_losses(student)
    run.about["settings"]["eval"] = True
    run.save_json()


# ---- Damaged, copied, from another seed


@bad(("copied", "lab00/steps.csv", "20 of 20 steps"), ("copied", "lab00/steps.csv", "of liam_the_victim"))
def copied_run(student):
    student.run()
    copy_of(student, "liam_the_victim").save(student.path("runs/lab00"))


@bad(("copied", "lab00/steps.csv", "of copied_run"))
def liam_the_victim(student):
    student.run()


@bad(("copied", "lab00/steps.csv", "8 of 20 steps"), ("copied", "lab00/steps.csv", "of noor_the_victim"))
def copied_in_part(student):
    run = student.run()
    run.steps[3:11] = copy_of(student, "noor_the_victim").steps[3:11]
    run.save()


@bad(("copied", "lab00/steps.csv", "of copied_in_part"))
def noor_the_victim(student):
    student.run()


@bad(("copied", "lab00/steps.csv", "times a factor, of runs/lab00 of omar_the_victim"))
def copied_and_scaled(student):
    student.run()
    run = copy_of(student, "omar_the_victim")
    for step in run.steps:
        run.scale(step, 1.07)
    run.save(student.path("runs/lab00"))


@bad(("copied", "lab00/steps.csv", "of copied_and_scaled"))
def omar_the_victim(student):
    student.run()


@bad(("copied", "lab00-again/steps.csv", "20 of 20 steps with times of their own, found those of runs/lab00"))
def repeat_that_was_copied(student):
    shutil.copytree(student.run().folder, student.path("runs/lab00-again"))


def copy_of(student, other):
    """Another student's run; all of them are made before it is called."""
    name = next(name for name in (other, other.split("_", maxsplit=1)[0]) if name in BAD or name in GOOD)
    run = Run(f"{student.made}/base")
    run.vary(f"{sum(map(ord, name))} lab00")
    return run


@bad(("rerun", "lab00/steps.csv", "in step 1, as in a run of your own build"))
def wrong_seed(student):
    run = student.run()
    run.about["settings"]["seed"] = 7
    run.about["command"] += ["--seed", "7"]
    run.save_json()


@bad(("numbers", "lab00/run.json", "--seed 7, as in its command"))
def seed_unlike_its_command(student):
    run = student.run()
    run.about["command"] += ["--seed", "7"]
    run.save_json()


@bad(("numbers", "lab00/run.json", "a command, as a list of words"))
def command_that_is_no_list(student):
    run = student.run()
    run.about["command"] = "./cnn"
    run.save_json()


@bad(("numbers", "lab00/run.json", "what ./cnn --out writes"), ("numbers", "lab00/steps.csv", "as in epochs.csv"))
def empty_command(student):
    """A rule that breaks off keeps no later rule from its findings."""
    run = student.run()
    run.about["command"] = []
    for step in run.steps:
        step["loss"] = "9"
    run.save()


@bad(("numbers", "runs", "RecursionError"))
def deep_json(student):
    student.run()
    save(student.path("runs/lab00/run.json"), '{"a":' * 5000)


# ---- Reports


@bad(("report", "runs/tables.md", "the generated line '| provenance | measured |', found '| provenance | faster |'"),
     ("report", "runs/report.md", "your answer"), ("report", "runs/report_full.md", "the generated line '> TODO: what"))
def report_edited(student):
    student.run()
    save(student.path("runs/report.md"), student.report() + "\n> TODO: what did you learn?\n")
    tables = load(student.path("runs/tables.md"))
    os.remove(student.path("runs/tables.md"))  # as make report writes it, it is not to be written to
    save(student.path("runs/tables.md"), tables.replace("provenance | measured", "provenance | faster"))


@bad(("report", "reports/lab00/report.md, line", "your answer"),
     ("report", "reports/lab00/report_full.md", "the generated line"))
def lab_report_unanswered(student):
    """A question has no answer, and a run of its tables is missing."""
    student.run()
    student.run("lab00-again")
    lab_report(student, "> TODO: an answer")
    os.remove(student.path("reports/lab00/tables.md"))  # nobody needs to hand it in
    shutil.rmtree(student.path("runs/lab00-again"))


@bad(("report", "reports/lab00/report_full.md, line", "your answer"),
     ("report", "reports/lab00/report_full.md", "the run folders of its tables, found no complete one"))
def lab_report_alone(student):
    student.run()
    lab_report(student, "> TODO: an answer")
    os.remove(student.path("reports/lab00/report.md"))
    shutil.rmtree(student.path("runs"))


@bad()
def starter_as_it_was(student):
    """A page that says so, but no flag."""
    os.rmdir(student.path("runs"))


# ---- Hostile ones


@bad(("files", "Makefile", "a changed one"), ("files", "labs/check/check.sh", "a changed one"))
def own_programs(student):
    student.run()
    attack = f"touch {student.made}/canary/{student.name}; exit 0\n"
    save(student.path("Makefile"), "$(shell " + attack.split(";", maxsplit=1)[0] + ")\nall check cnn:\n\t" + attack)
    for name in ("labs/check/check.sh", "labs/check/lab00.sh", "configure", "runs/run.sh", "gcc"):
        save(student.path(name), "#!/bin/sh\n" + attack)
        os.chmod(student.path(name), 0o755)


@bad(("files", "runs/passwd", "symbolic link to /etc/passwd"), ("files", "runs/lab00/epochs.csv", "symbolic link"),
     ("files", "runs/secret", "symbolic link"))
def links(student):
    run = student.run()
    os.symlink("/etc/passwd", student.path("runs/passwd"))
    os.symlink(f"{student.made}/canary", student.path("runs/secret"))
    os.remove(f"{run.folder}/epochs.csv")
    os.symlink("/etc/passwd", f"{run.folder}/epochs.csv")


@bad(("files", "runs/lab00/profile.csv", "named pipe"), ("files", "runs/lab00/layers.csv", "socket"))
def pipes(student):
    run = student.run()
    os.mkfifo(f"{run.folder}/profile.csv")
    os.mknod(f"{run.folder}/layers.csv", 0o140644)


@bad(("files", "runs/lab00/trace.json", "at most 64 MB, found 10240 MB"))
def huge_file(student):
    run = student.run()
    with open(f"{run.folder}/trace.json", "wb") as f:
        f.truncate(10 << 30)  # a hole: it takes no space


@bad(("files", "runs/lab00/steps.csv", "at most 64 MB, found"), name="bomb.zip")
def zip_bomb(student):
    student.run()
    with zipfile.ZipFile(student.folder + ".zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(student.path("runs/lab00/run.json"), "runs/lab00/run.json")
        with archive.open("runs/lab00/steps.csv", "w", force_zip64=True) as f:
            for _ in range(80):
                f.write(bytes(1 << 20))
    shutil.rmtree(student.folder)


@bad(("files", "/../", "leads out of it"), ("files", "escape", "found a link"), name="outside.tar.gz")
def archive_that_leads_out(student):
    student.run()
    with tarfile.open(student.folder + ".tar.gz", "w:gz") as archive:
        for name in (f"/../..{student.made}/canary/tar", f"../../../../../..{student.made}/canary/tar2"):
            file = tarfile.TarInfo(name)
            file.size = 4
            archive.addfile(file, io.BytesIO(b"out\n"))
        link = tarfile.TarInfo("escape")
        link.type, link.linkname = tarfile.SYMTYPE, f"{student.made}/canary"
        archive.addfile(link)
        archive.add(student.path("runs"), "runs")
    shutil.rmtree(student.folder)


@bad(("numbers", "lab00/run.json", "--batch-size 64, as in its command"), name="<script>alert(1)<!--.b")
def script_as_name(student):
    markup = "<script>alert(2)</script><img src=x onerror=alert(3)>"
    run = student.run()
    run.about["command"] += ["--batch-size", "64", markup]
    run.about["machine"]["host"] = run.about["settings"]["dataset"] = run.about["settings"]["batch-size"] = markup
    run.save_json()
    save(student.path("runs/report.md"), markup)


@bad(("files", "in_another_place", "expected cnn.c, cnn_kernels.cu, labs or runs"))
def in_another_place(student):
    student.run()
    os.rename(student.path("runs"), student.path("results"))
    os.remove(student.path("cnn.c"))
    save(student.path("docs/notes.txt"), "See results.")


@bad(("files", "runs/", "printable"), name="=cmd|' ;calc'!A0")
def formula_as_name(student):
    student.run()
    save(student.path("runs/a\nb\x1b[31m.csv"), "=1+1\n")


@bad(("rerun", "lab00/run.json", "--model ../../bin/sh"))
def settings_that_are_commands(student):
    run = student.run()
    run.about["settings"]["model"] = "../../bin/sh; touch canary"
    run.save_json()


def make_all(made, out, names):
    """All submissions of these names in `out`."""
    for name, make in [*GOOD.items(), *((name, make) for name, (make, _) in BAD.items())]:
        if name in names:
            folder = os.path.join(out, re.sub(r"\.(zip|tar\.gz)$", "", name))
            make(Student(made, folder, name))
