#!/usr/bin/env bash
# The files of the project are those that the list below names, a folder and the kinds of files in it a line, and
# whatever the list names is there. What somebody committed by mistake, such as a run folder, is found by this.
# Prints `pass tree/NAME`, `fail tree/NAME: expected ..., found ...` or `skip tree/NAME: why`.
suite=tree
: "${CNN:=$(type -P true)}" # not run here
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

# A folder, and the names of the files that belong directly into it. Whoever adds a kind of file adds it here.
list='
.                 .clang-format .gitattributes .gitignore LICENSE Makefile README.md cnn.c cnn_kernels.c cnn_kernels.cu
.ci               run
data              *.sh
labs              *.md *.mk grade requirements.txt
labs/answers      *.md
labs/check        *.awk *.c *.cu *.h *.py *.sh
labs/check/lab*   *.h
labs/classroom    *.sh
labs/containers   Dockerfile *.def
labs/figures      *.csv *.png *.py *.sh
labs/grader       *.py
labs/gradescope   *.sh run_autograder
labs/lab[01]?     *.c *.cu *.md
labs/notebooks    *.ipynb *.py
labs/stubs        [1-9].[0-9] 10.[0-9]
labs/tools        *.html *.md *.py *.sh monitor
slurm             *.env *.sb *.sh
slurm/configs     *.args *.txt
tests             *.h *.md *.mk *.sh
tests/bench       *.c *.py *.sh
tests/cluster     *.h *.sh
tests/emulator    *.cu *.h *.sed *.sh
tests/gpu         *.c *.cu *.py *.sh
tests/gpu/results *.json *.md
tests/labs        *.c *.cu *.py *.sh
tests/labs/wrong  *.awk *.txt
tests/program     *.sh
tests/ptx         *.cpp *.h *.sh
tests/pytorch     *.c *.py
tests/pytorch/golden *.txt
tests/robust      *.c *.sh
tests/source      *.py *.sh *.txt
tests/unit        *.c *.h *.sh
'

# The same as git's patterns of paths, in which a * stands for no /
mapfile -t patterns < <(awk '{ for (i = 2; i <= NF; i++) print ($1 == "." ? "" : $1 "/") $i }' <<<"$list")

# unlisted: the files of the project in this folder that the list does not name
unlisted() { git ls-files -- "${patterns[@]/#/:(exclude,glob)}" | head -n 5 | tr '\n' ' '; }

# absent: the patterns of the list that no file of the project in this folder has
absent() {
    local pattern
    for pattern in "${patterns[@]}"; do
        [ "$(git ls-files -- ":(glob)$pattern")" ] || printf '%s ' "$pattern"
    done
}

cd "$repo" || exit 1
if ! git ls-files --error-unmatch cnn.c >/dev/null 2>"$err"; then
    skip all "it needs the project as git has it: $(tail -n 1 "$err")"
    exit 0
fi
same unlisted "" "$(unlisted)"
same absent "" "$(absent)"
exit 0
