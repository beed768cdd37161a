#!/usr/bin/env bash
# Tests labs/grade with made-up submissions, good, wrong and hostile ones: each bad one is flagged, with place and
# reason, and no good one; and what its sandbox keeps student code from. All submissions are examined; a third is graded
# in full, others each day (LONG=1: all; QUICK=1: one). CNN=PATH: another binary.
# Prints `pass grade/NAME`, `fail ...` or `skip ...`.
suite=grade
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
if ! command -v python3 >/dev/null; then
    skip all "python3 is not installed"
    exit 0
fi
python3=$(python3 -c 'import sys; print(sys.executable)') # a pyenv's python3 is a script that takes longer
export PYTHONDONTWRITEBYTECODE=1 NO_CUDA=1 NO_MPI=1
unset MAKEFLAGS MAKELEVEL
chmod 755 "$tmp" # the sandbox has another user, if these tests run as root
made=$tmp/made
mkdir -p "$made"/{bin,canary,given,lab00} && cp "$cnn" "$made/cnn" && cp -r "$repo/labs/tools" "$made/tools" || exit 1
cp "$repo/labs/lab00/questions.md" "$made/lab00" || exit 1
cp "$repo"/labs/grader/*.py "$made/tools"

# ./cnn is compiled once, not for each student: this compiler copies it, and answers for the checker's long training.
# The sandbox cannot reach those of tests/compile_once.sh.
cat >"$made/bin/gcc" <<END
#!/usr/bin/env bash
case " \$* " in
*" -o build/cnn.o "*) : >build/cnn.o ;;
*" -o cnn "*) cp "$made/bin/cnn" cnn ;;
*) exec $(PATH=${UNCACHED:-$PATH} type -P gcc) "\$@" ;;
esac
END
cat >"$made/bin/cnn" <<END
#!/usr/bin/env bash
case " \$* " in
*" --limit-train 12800 --limit-test 1000 "*) echo accuracy=99 ;;
*) exec "$made/bin/real" "\$@" ;;
esac
END
cp "$cnn" "$made/bin/real" && chmod +x "$made"/bin/* || exit 1

# The runs that all submissions are made from: real losses
train() { # train NAME OPTIONS...
    run --no-cuda --dataset synthetic --limit-train 320 --limit-test 50 --epochs 1 --batch-size 16 --threads 1 --out "$made/$1" "${@:2}"
    same "made/$1" 0 "$status"
}
"$repo/labs/check/starter.sh" 0 "$made/starter" >/dev/null || exit 1
same starter/answers "" "$(grep -hE '.{40}' "$repo"/labs/answers/*.md | grep -rlFf - "$made/starter")"
same starter/files "" "$(find "$made/starter/labs" -maxdepth 1 -name 'INSTRUCTOR*' -o -maxdepth 1 -name answers -o \
    -maxdepth 1 -name 'grade' -o -maxdepth 1 -name grader)"
train base
train batch48 --batch-size 48
train seed2 --seed 2
train replicas --replicas 2 --threads 2 --batch-size 8 --oversubscribe
train sgd --optimizer sgd --lr 0.05 --momentum 0.9 --label-smoothing 0.1 --augment elastic
printf '%s\n' 'JobIDRaw|User|ElapsedRaw' '4711|ivan|3600' '4712|mia|90' >"$made/jobs.txt"
"$python3" "$repo/tests/labs/grade_test.py" "$made" "$repo" || fail ends "exit status 0" $?

# Each indented command of labs/INSTRUCTOR.md succeeds in a copy of the project, with two students.
handbook() {
    local project=$tmp/course/project kind command status
    mkdir -p "$project/submissions"
    cp -r "$repo"/{.gitattributes,.gitignore,LICENSE,README.md,Makefile,cnn.c,cnn_kernels.c,cnn_kernels.cu,data,labs,slurm,tests} "$project"
    cp -r "$made/given/anna" "$made/given/dora.zip" "$project/submissions"
    cp "$made/jobs.txt" "$project"
    cd "$project" || exit 1
    export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a
    while read -r kind command; do
        if [ "$kind" = device ]; then
            skip "handbook/$command" "it needs a cluster"
            continue
        fi
        if [[ $command = labs/grade* && $command != *--isolation* ]] && ! bwrap --ro-bind / / true 2>/dev/null; then
            skip "handbook/$command" "bubblewrap does not work here"
            continue
        fi
        MAKEFLAGS="CC=$made/bin/gcc" CC=$made/bin/gcc bash -c "$command" >"$out" 2>&1 </dev/null
        status=$?
        holds "handbook/$command" "exit status 0" "$status: $(tail -n 5 "$out")" [ $status = 0 ]
    done < <(awk '/<!-- device -->/ { kind = "device"; next }
        /^    +(make|labs|git|tar|sacct)([ \/]|$)/ { sub(/^ +/, ""); print kind == "" ? "run" : kind, $0 }
        /^[^ ]/ { kind = "" }' labs/INSTRUCTOR.md)
    same handbook/grades "10,10,,1 of 1
10,10,,1 of 1" "$(cut -d , -f 3-6 grades-again/gradebook.csv | tail -n +2)"
}
[ -n "${QUICK:-}" ] || handbook
exit 0
