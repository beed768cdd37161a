#!/usr/bin/env bash
# Tests the notebooks in labs/notebooks: they are stored without outputs, the report's questions are those of
# report_template.md, and both run from a fresh clone, on few images (CNN_SMALL=1), by their own first cells; without a
# compiler or a clone they say what to do. QUICK=1: one of the two a day.
# PYTHON=PATH: a python that has nbclient, ipykernel and matplotlib; otherwise .venv, then the system's.
# Prints `pass notebooks/NAME`, `fail notebooks/NAME: ...` or `skip notebooks/NAME: ...`.
suite=notebooks
: "${CNN:=$(type -P true)}" # not run here: the notebooks build their own
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
if ! command -v python3 >/dev/null; then
    skip all "python3 is not installed"
    exit 0
fi
notebooks=$repo/labs/notebooks
unset MAKELEVEL
export MAKEFLAGS=OPT=-O1 CNN_SMALL=1 # compiling takes longer than running
export PYTHONDONTWRITEBYTECODE=1 JUPYTER_RUNTIME_DIR=$tmp/jupyter JUPYTER_DATA_DIR=$tmp/data IPYTHONDIR=$tmp/ipython
export MPLCONFIGDIR=$tmp/matplotlib

# ---- As they are stored

cat >"$tmp/stored.py" <<'END'
"""stored.py NOTEBOOK: what Jupyter adds to a notebook when somebody runs or edits it."""
import json, re, sys
with open(sys.argv[1], encoding="utf-8") as file:
    text = file.read()
notebook = json.loads(text)
ids = [cell.get("id", "") for cell in notebook["cells"]]
for cell in notebook["cells"]:
    if cell["cell_type"] == "code" and (cell["outputs"] or cell["execution_count"] is not None):
        print(f"{cell['id']}: expected neither outputs nor a count, found some: clear all outputs, then save")
    if cell["metadata"]:
        print(f"{cell['id']}: expected no metadata, found {cell['metadata']}")
if len(set(ids)) < len(ids) or not all(re.fullmatch("[a-z][a-z0-9-]{1,63}", name) for name in ids):
    print("expected an id for each cell that says what it is, found", *ids)
if (notebook["nbformat"], notebook["nbformat_minor"]) != (4, 5):
    print("expected format 4.5, found", notebook["nbformat"], notebook["nbformat_minor"])
if notebook["metadata"] != {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
                            "language_info": {"name": "python"}}:
    print("expected no metadata but the kernel python3, found", notebook["metadata"])
if text != json.dumps(notebook, indent=1, ensure_ascii=False) + "\n":
    print("expected an indentation of 1 and a newline at the end")
for line in "\n".join("".join(cell["source"]) for cell in notebook["cells"]).splitlines():
    if len(line) > 120:
        print(f"expected at most 120 columns, found {len(line)}: {line}")
END
test_stored() {
    local file
    for file in "$notebooks"/*.ipynb; do
        same "stored/${file##*/}" "" "$(python3 "$tmp/stored.py" "$file" 2>&1)"
    done
    same links "" "$(cd "$notebooks" && grep -ohP '\]\(\K[^)#]+' ./*.ipynb | grep -vx file.png | sort -u |
        while read -r file; do [ -e "$file" ] || echo "$file"; done)"
}

cat >"$tmp/questions.py" <<'END'
"""questions.py TEMPLATE NOTEBOOK: where headings, questions and tables of the two reports differ."""
import json, re, sys
OTHER = {"several devices", "loading", "layers", "lines"}  # the notebook does not measure them


def sections(text):
    """Heading, question and names of the tables of each section."""
    found = []
    for section in re.split("(?m)^#+ ", text)[1:]:
        heading, _, body = section.partition("\n")
        question = " ".join(re.findall("(?m)^> (.*)", body))
        tables = re.findall(r"(?m)^(?:part\(\"|.*\(tables\.md#)(\w+)", body)
        found.append((heading.strip(), question, tables))
    return found


with open(sys.argv[1]) as file:
    template = [section for section in sections(file.read()) if section[0].lower() not in OTHER]
with open(sys.argv[2]) as file:
    notebook = "\n".join("".join(cell["source"]) for cell in json.load(file)["cells"])
report = sections(notebook[notebook.index("# Project Title"):])
for expected, found in zip(template, report):
    if expected != found:
        print("expected", expected, "found", found)
if len(template) != len(report):
    print(f"expected {len(template)} sections, found {len(report)}")
END
test_questions() {
    same questions "" "$(python3 "$tmp/questions.py" "$repo/labs/tools/report_template.md" \
        "$notebooks/timing_study.ipynb" 2>&1)"
}

# ---- As they run

# clone FOLDER: a repository with the sources as they are
clone() {
    mkdir -p "$1"
    cp -r "$repo"/{.gitattributes,.gitignore,LICENSE,Makefile,README.md,cnn.c,cnn_kernels.c,cnn_kernels.cu,data,labs,slurm,tests} "$1"
    git -C "$1" init -q && git -C "$1" add -A &&
        git -C "$1" -c user.name=a -c user.email=a commit -qm 'A clone' || exit 1
}

# today NUMBER: quickly, this notebook is executed on every second day
today() { [ -z "${QUICK:-}" ] || share "$1" 2; }

# execute NOTEBOOK [FOLDER]
execute() {
    "$with_nb" "$repo/tests/labs/run_notebook.py" "$@" >"$out" 2>"$err" </dev/null
    status=$?
}
succeeded() { holds "$1" "exit status 0" "$status, $(tail -n 5 "$out")" [ "$status" = 0 ]; }

# cell ID: what this cell of the last notebook has shown
cell() { awk -v id="$1" '/^== / { shown = $2 == id; next } shown' "$out"; }

# shown NOTEBOOK/ID REGEX: a line of what the cell has shown
shown() { holds "$1" "a line $2" "$(cell "${1##*/}" | tail -n 5)" grep -qP -- "$2" <(cell "${1##*/}"); }

# pictures NOTEBOOK/ID COUNT: how many pictures the cell has shown
pictures() { same "$1/pictures" "$2" "$(cell "${1##*/}" | grep -c '^picture [0-9]')"; }

test_first_run() {
    local folder=$tmp/first/cnn
    clone "$folder"
    execute "$folder/labs/notebooks/first_run.ipynb"
    succeeded first_run/status
    shown first_run/build "^Built $folder/cnn\$"
    shown first_run/train '^Train Epoch: 1 \[0/640 \(0%\)\]\tLoss: 2\.'
    pictures first_run/loss 1
    shown first_run/profile '^ +\d+ +10 .* AT\(BACKWARD, '
    shown first_run/filters '^Saved the weights to runs/untrained/model.safetensors'
    pictures first_run/filters 1
    same first_run/both_filters "before training after training" \
        "$(grep -oE '(before|after) training' "$folder/runs/first_run/plots/filters.svg" | xargs)"
    pictures first_run/wrong 1
    same first_run/nothing_for_git "" "$(git -C "$folder" status --short)"
}

test_timing_study() {
    local folder=$tmp/study/cnn runs=runs/timing_study-2-epochs
    clone "$folder"
    execute "$folder/labs/notebooks/timing_study.ipynb"
    succeeded timing_study/status
    shown timing_study/build "^Built $folder/cnn\$"
    shown timing_study/study "^Written: $runs/study.csv\$"
    same timing_study/rows "50 100 250" "$(awk -F, '$1 == "cpu" { print $6 }' "$folder/$runs/study.csv" | xargs)"
    shown timing_study/one-core "^Written: $runs/one-core/ablation.csv\$"
    pictures timing_study/motivating-image-shown 1
    shown timing_study/methodology-shown '^./cnn --no-cuda --model cifar '
    shown timing_study/hardware-shown '^\| host \| '
    shown timing_study/times-shown '^\| cpu \| 50 \| 50 \| '
    pictures timing_study/times-shown 3
    shown timing_study/steps-shown '^\| cpu \| 50 \| 10 '
    shown timing_study/cost-shown '^\| sum \| '
    shown timing_study/before-and-after-shown '^\| O0 \| '
    pictures timing_study/before-and-after-shown 1
    shown timing_study/classes-shown '^\| class \| accuracy in % \|'
    pictures timing_study/classes-shown 2
}

# commit FOLDER: as make sees it
commit() { make -C "$1" -pn NO_CUDA=1 2>/dev/null | grep -oP '^COMMIT :?= \K.*'; }

# Jupyter saves a notebook with its outputs while a study is running: the commit remains the same.
test_commit() {
    local folder=$tmp/commit head
    clone "$folder"
    head=$(git -C "$folder" rev-parse --short HEAD)
    same commit/clean "$head" "$(commit "$folder")"
    echo >>"$folder/labs/notebooks/timing_study.ipynb"
    same commit/notebook "$head" "$(commit "$folder")"
    echo >>"$folder/cnn.c"
    same commit/source "$head-dirty" "$(commit "$folder")"
    rm -rf "$folder/.git"
    same commit/no_repository unknown "$(GIT_CEILING_DIRECTORIES=$tmp commit "$folder")"
}

# The first code cell stops with a message that says what to do.
test_missing() {
    mkdir "$tmp/nothing" "$tmp/no_compiler"
    clone "$tmp/around/cnn"
    execute "$notebooks/first_run.ipynb" "$tmp/nothing"
    same no_clone/status 1 "$status"
    shown no_clone/build "^FileNotFoundError: expected the project in or around $tmp/nothing, .*: !git clone ADDRESS\$"
    # from the folder around the clone, as in Colab
    PATH=$tmp/no_compiler execute "$notebooks/first_run.ipynb" "$tmp/around"
    same no_compiler/status 1 "$status"
    shown no_compiler/build '^This notebook needs make and a C compiler on the machine that it runs on, found none\.$'
    same no_compiler/advice 1 "$(cell build | grep -c 'module load gcc')"
    same no_compiler/traceback 0 "$(cell build | grep -c Traceback)"
    rm "$tmp/around/cnn/cnn.c"
    execute "$tmp/around/cnn/labs/notebooks/first_run.ipynb"
    same make_fails/status 1 "$status"
    # shellcheck disable=SC2016 # a backquote is one
    shown make_fails/build '^expected exit status 0 of `make .*`, found 2: the lines above say why$'
}

test_stored
test_questions
if ! with_nb=$("$repo/tests/python_with.sh" "nbclient, ipykernel, matplotlib"); then
    skip run "no python3 with nbclient, ipykernel and matplotlib: .venv/bin/pip install nbclient ipykernel matplotlib"
elif ! command -v git >/dev/null; then
    skip run "git is not installed"
else
    ! today 0 || test_first_run
    ! today 1 || test_timing_study
    test_commit
    test_missing
fi
exit 0
