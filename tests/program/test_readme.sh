#!/usr/bin/env bash
# Follows README.md and every page under labs/ that it links, in the order of the links, in a copy of the sources,
# as a new user would (the handouts of the labs have tests/labs/test_labs.sh). Each indented line is a command
# and is run, unless not_run() gives a reason. Each C block and each row for a table is inserted where the text
# says. Output quoted between ``` lines must appear in the output of the command before; ```text is an
# example that differs from run to run.
# Prints `pass readme/NAME`, `fail readme/NAME: why` or `skip readme/NAME: why`.
# QUICK=1: what takes long is skipped; ./cnn is that of the project, if it is up to date, and from the first change
# of the sources on it is built without optimization and without CUDA, and gets fewer images; the emulator is not built.
set -u
export LC_ALL=C
unset SLURM_CPUS_PER_TASK MAKEFLAGS MAKELEVEL
# One architecture, for which make test-all has compiled the kernels before: make repeats that when they change.
export MAKEFLAGS=CUDA_ARCH=sm_80
[ -z "${QUICK:-}" ] || MAKEFLAGS='NO_CUDA=1 OPT=-O0'
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd) || exit 1
# shellcheck source=tests/open_mpi.sh
source "$repo/tests/open_mpi.sh" || exit 1
built=$(realpath -m "${CNN:-$repo/cnn}")
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
mkdir "$tmp/project"
cp -rp "$repo"/{.gitattributes,.gitignore,LICENSE,README.md,Makefile,cnn.c,cnn_kernels.c,cnn_kernels.cu,data,labs,slurm,tests} \
    "$tmp/project" && cd "$tmp/project" || exit 1
mkdir build
[ -n "${QUICK:-}" ] || cp -p "$repo"/build/{declarations,kernel_settings,cnn_kernels_sm_80.o} build 2>/dev/null
out=$tmp/out err=$tmp/err
mapfile -t pages < <(echo README.md; grep -oP '\]\(\Klabs/[^)#]+\.md' README.md | grep -v '^labs/lab[0-9]' | awk '!seen[$0]++')

one_line() { tr '\n\t' '| ' | cut -c 1-300; }

# verdict NAME EXPECTED FOUND COMMAND...: passes if the command succeeds
verdict() {
    local name=$1 expected=$2 found=$3
    shift 3
    if "$@" >/dev/null; then
        echo "pass readme/$name"
    else
        echo "fail readme/$name: expected $(one_line <<<"$expected"), found $(one_line <<<"$found")"
    fi
}

# says NAME REGEX [FILE]: the last command printed such a line
says() { verdict "$1" "a line $2" "$(tail -n 5 "${3:-$out}")" grep -qP -- "$2" "${3:-$out}"; }

# ---- Commands

# not_run COMMAND: prints why it is not run here; fails if it is
not_run() {
    case $1 in
        'make test') echo "it runs this test" ;;
        sbatch\ * | squeue\ *) echo "it needs Slurm; tests/cluster/test_slurm.sh runs it" ;;
        make\ check* | make\ gradescope*) echo "tests/labs/test_labs.sh runs it" ;;
        *.venv*) echo "it needs a network; tests/labs/test_tools.sh uses what it installs" ;;
        wsl\ * | sudo\ * | docker\ * | apptainer\ * | scp\ * | data/get_data.sh\ * | *' pip download '*)
            echo "it is for another machine, or needs a network" ;;
        make\ plots*)
            ! tests/python_with.sh matplotlib >/dev/null && echo "no python3 with matplotlib"
            ;;
        *cnn-emu* | *cnn-count* | 'make emulate' | 'make count' | 'make see '* | *'--model gelu '*) # gelu is built with the emulator
            ! command -v g++ >/dev/null && echo "g++ is not installed, which the emulator needs"
            ;;
        *) false ;;
    esac && return
    if [ -n "${QUICK:-}" ] && takes_long "$1"; then
        echo "QUICK=1"
    elif [[ $1 = mpirun\ * ]] && ! ldd ./cnn | grep -q libmpi; then
        echo "./cnn was built without MPI"
    else
        return 1
    fi
}

# More than a few seconds, or what tests/program/ tests elsewhere
takes_long() {
    case $1 in
        make\ ablation* | make\ plots* | 'make build/cnn-O0' | for\ lr\ *) ;;
        'make cnn cnn-emu' | *'--model gelu '* | ./cnn-emu*) ;;
        make) [ cnn -nt cnn.c ] ;; # built above
        'make run' | 'make emulate' | 'make count' | 'make see '* | CUEMU_DEVICES=* | ./cnn-count*) ;;
        gcc\ * | *'--model lenet'* | *'--model resnet8'* | *--checkpoint* | *' --out two' | *' --out n'[12]) ;;
        mpirun\ * | *' --out run --profile '* | make\ study* | make\ cpu* | make\ report* | make\ verify* | labs/tools/*) ;;
        *) return 1 ;;
    esac
}

# smaller COMMAND: options to add. A study of few images makes the same files as one of all; under QUICK, five steps.
smaller() {
    case $1 in
        make\ study\ EPOCHS=*) echo " LIMIT=640 RUNS=runs/cifar-2-epochs" ;;
        make\ study-scaling*) echo " LIMIT=640 RUNS=runs/scaling-cifar-2-epochs" ;;
        make\ study-workers*) echo " LIMIT=640 RUNS=runs/workers-cifar-1-epochs-20000-images" ;;
        'make ablation') echo " LIMIT=100 REPEATS=2" ;;
        'make cnn cnn-emu') echo " EMU_OPT=-O0" ;;
        make\ ablation\ RUNGS=*) echo " LIMIT=16 REPEATS=2" ;;
    esac
    [ -z "${QUICK:-}" ] || case $1 in
        *'--model strided '*) echo " --limit-train 40 --limit-test 8 --batch-size 8" ;;
    esac
}

# In this shell, since a `cd` holds for the commands after it.
run_command() { # COMMAND
    local why expected
    if why=$(not_run "$1"); then
        echo "skip readme/$1: $why"
        ran=no
        return
    fi
    eval "$1$(smaller "$1")" >"$out" 2>"$err" </dev/null
    status=$? ran=yes
    case $1 in # as the page says: something is left to do
        make\ verify*) expected=2 ;;
        *'study.py collect'*) expected=1 ;;
        *) expected=0 ;;
    esac
    verdict "$1" "exit status $expected" "$status and $(tail -n 3 "$err")" [ $status = $expected ]
    check_output "$1"
}

losses() { grep -oP '^Train Epoch.*Loss: \K.*' "$out"; }

# shellcheck disable=SC2317 # verdict calls it
same_losses() { # FILE FILE: five or more, equal to 4 digits
    paste "$1" "$2" | awk 'function abs(x) { return x < 0 ? -x : x }
        !($1 > 0) || !($2 > 0) || abs($1 - $2) > 1e-4 * $1 { bad = 1 } END { exit bad || NR < 5 }'
}

# What the text promises of a command
check_output() { # COMMAND
    case $1 in
        *--resume*) says resume '^Resuming from run.ckpt: epoch 3, step 6$' ;;
        *--load*--eval*) says eval '^Loaded the weights in mnist_cnn.safetensors$' ;;
        './cnn --model lenet'*) says alone '^Device: .*, --kernels naive,' ;;
        *'--model strided'*) says own_parameters '^  56394 parameters, 16\.5 MFLOP to train on one image$' ;;
        'make cnn cnn-emu') verdict gelu_warnings "no warning" "$(cat "$err")" [ ! -s "$err" ] ;;
        './cnn --model gelu'*) losses >"$tmp/cpu_losses" && says gelu_rows '^ +2 +gelu ' ;;
        './cnn-emu --model gelu'*)
            losses >"$tmp/gpu_losses"
            verdict gelu_losses "$(cat "$tmp/cpu_losses")" "$(cat "$tmp/gpu_losses")" \
                same_losses "$tmp/cpu_losses" "$tmp/gpu_losses"
            ;;
        ./cnn-emu*) says emulated '^Emulated: CUDA code on the CPU' ;;
        ./cnn-count*) says count '^conv2d_forward_naive_kernel *10 ' "$err" ;;
        'make see '*) says see '^runs/see/conv2d_forward_naive_kernel.html: open it in a browser' ;;
        'make plots'*) says plots '^drawn: run/plots/run.png and .svg$' ;;
        *'--layers'*) says layers '^  conv2 .* (compute|memory)$' ;;
        'make study EPOCHS'*) says study '^Written: runs/cifar-2-epochs/study.csv$' ;;
        'make study EMULATE'*) says virtual '^ *multi +ddp +2 +cifar +25 +50 +2 .* 1$' ;;
        make\ study-scaling*) says study_scaling '^Written: runs/scaling-cifar-2-epochs/scaling.csv$' ;;
        make\ study-workers*) says study_workers '^Written: runs/workers-cifar-1-epochs-20000-images/workers.csv$' ;;
        'make ablation') says ablation '^(fast|graph) +\d[\d.]+ ' ;;
        'make ablation EMULATE'*) says virtual_ablation '^graph +n/a +n/a +n/a +n/a +n/a +--graph on$' ;;
        'make report RUNS='*) says report "^Written: ${1#*RUNS=}/report_full.md, " ;;
        'make doctor') says doctor '^This machine: ' ;;
    esac
}

# Lines as they are compared: what differs between machines is removed.
comparable() {
    sed -E 's/^(Machine|Device|Findings):.*/\1/; s/(Loss|loss|Accuracy):? .*/\1/' | tr -s ' '
}

# Quoted output: its lines, without blank ones and those that are `...`, appear in this order.
check_quoted() { # LINES
    local line missing='' at=0 found
    [ "$ran" = yes ] || return 0
    comparable <"$out" >"$tmp/comparable"
    while IFS= read -r line; do
        [[ $line =~ ^\ *(\.\.\.)?$ ]] && continue
        found=$(tail -n "+$((at + 1))" "$tmp/comparable" | grep -nxF -m 1 -- "$line" | cut -d : -f 1)
        [ -n "$found" ] || missing+="$line|"
        at=$((at + ${found:-0}))
    done < <(comparable <<<"$1")
    verdict quoted_output "in this order: $missing" "$(cat "$out")" [ -z "$missing" ]
}

# ---- Code to insert

# insert NAME FILE SECTION below|above|end START <TEXT: at the first line of the section, or of the file if SECTION
# is empty, that begins with START, after any blanks; or at the section's end
insert() {
    awk -v section="$3" -v where="$4" -v start="$5" -v text="$tmp/text" '
        BEGIN { inside = section == "" }
        function paste_text(line) { while ((getline line < text) > 0) print line; done = 1 }
        /^\/\* ==== / { inside = $3 == section "."; past = $3 == section + 1 "." }
        past && where == "end" && !done { paste_text(); print "" }
        { trimmed = $0; sub(/^ */, "", trimmed); here = inside && !done && start != "" && index(trimmed, start) == 1 }
        here && where == "above" { paste_text(); print "" }
        { print }
        here && where == "below" { paste_text() }
        END { exit !done }' "$2" 9<&- >"$tmp/inserted" && mv "$tmp/inserted" "$2"
    verdict "insert $1" "a place $4 $5 in section ${3:-*} of $2" "none" [ $? = 0 ]
}

# The paragraph before a block of C says where it belongs.
insert_block() { # PARAGRAPH <BLOCK
    # shellcheck disable=SC2016 # backquotes of the page
    local place='section ([0-9]+) of `([a-z_.]+)`(, (above|below) `([^`]+)`)?:$'
    cat >"$tmp/text"
    if [[ $1 =~ $place ]]; then
        insert "$(grep -v '^//' "$tmp/text" | grep -oP '\w+(?=\()|"\w+"' | head -n 1)" "${BASH_REMATCH[2]}" \
            "${BASH_REMATCH[1]}" "${BASH_REMATCH[4]:-end}" "${BASH_REMATCH[5]}"
    else
        echo "fail readme/place: expected \"section N of FILE, above, below or at the end\", found $1"
    fi
}

# | TABLE | `FILE`, section N | `ROW` |, or with `at its end` instead of a section: below the row of RELU
insert_row() { # LINE OF README
    # shellcheck disable=SC2016 # backquotes of the page
    local cells='^\| `([A-Za-z_]+).*\| `([a-z_.]+)`, (section ([0-9]+)|at its end) \| `([^`]+)` \|$' start
    if [[ $1 =~ $cells ]]; then
        start=${BASH_REMATCH[5]%%[,=]*}
        echo "${BASH_REMATCH[5]}" >"$tmp/text"
        insert "row of ${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}" "${BASH_REMATCH[4]}" below "${start/GELU/RELU}"
    else
        echo "fail readme/row: expected a table, a section of a file and a row, found $1"
    fi
}

# ---- From top to bottom

if [ -n "${QUICK:-}" ]; then # instead of `make`
    if [ "$built" -nt "$repo/cnn.c" ] && [ "$built" -nt "$repo/cnn_kernels.c" ]; then
        cp "$built" cnn
    else
        make cnn >"$out" 2>"$err"
        verdict build "./cnn" "$(tail -n 3 "$err")" [ -x cnn ]
    fi
fi
paragraph='' # the last one before a block
block=''     # of code or output, inside of ```
fence=''     # what the block is: c, python, text, output
ended=yes    # the paragraph
for page in "${pages[@]}"; do
    while IFS= read -r line <&9; do
        case $fence/$line in
            /'```'*) fence=${line#'```'} fence=${fence:-output} block='' ;;
            c/'```') insert_block "$paragraph" <<<"${block%$'\n'}" && fence='' ;;
            output/'```') check_quoted "$block" && fence='' ;;
            text/'```') fence='' ;;
            python/'```') fence='' ;; # needs PyTorch; tests/pytorch/pytorch_weights.py does the same
            [a-z]*/*) block+=$line$'\n' ;;
            /\ \ \ \ *) run_command "$(sed 's/^ *//; s/ *#.*//' <<<"$line")" ;;
            /'| '*'`, section '* | /'| '*'`, at its end |'*) insert_row "$line" ;;
            /) ended=yes ;;
            *) [ $ended = yes ] && paragraph='' && ended=no
               paragraph+="${paragraph:+ }$line" ;;
        esac
    done 9<"$repo/$page"
    verdict "fences $page" "an end of every block" "a block of $fence without one" [ -z "$fence" ]
done

# ---- The examples of tests/README.md: a wrong answer, a shell test, and one in C, which is compiled with the next test

case=$(sed -n 's/^    //; /^case /,/^$/p' tests/README.md | tr '\n' '|')
verdict example_case "a case of tests/labs/wrong/lab03.txt" "${case:-none}" \
    grep -qF "${case:-none}" <(tr '\n' '|' <tests/labs/wrong/lab03.txt)
# example bash|c
example() { sed -n "/^\`\`\`$1\$/,/^\`\`\`\$/p" tests/README.md | sed '1d; $d'; }
{ sed '/^# ---- A good run/q' tests/program/test_cli.sh && example bash && echo test_smaller_batch; } >tests/program/example.sh
CNN=./cnn bash tests/program/example.sh >"$out" 2>"$err"
verdict example "3 tests that pass" "$(cat "$out" "$err")" [ "$(grep -c '^pass cli/smaller_batch/' "$out")" = 3 ]

# ---- The new layer: values of torch.nn.GELU(), and gradients as the text says

# shellcheck disable=SC2016 # these are the page's backquotes
row=$(tr '\n' ' ' <labs/extending.md | grep -oP 'add `\K[^`]*(?=` to `odd_models\[\]`)')
verdict odd_models "a row for odd_models[] in the text" "none" [ -n "$row" ]
sed -i "/^static const Model odd_models\[\] = {/a ${row:-,}" tests/unit/networks.h
example c >example.c
cat >gelu_test.c <<'END'
#define main all_tests
#include "tests/unit/unit.c"
#undef main
#include "example.c"

int main(void) {
    static const real in[] = {-3, -1, 0, .5, 1, 2};
    static const real want[] = {-.0040496940949, -.158655253931, 0, .345731230631, .841344746069, 1.954499736104};
    const Layer l = {.kind = GELU, .in = {1, 1, 6}, .out = {1, 1, 6}};
    real got[6], bound[6];
    quick = true;
    suite = "readme";
    gelu_forward((Work){.l = &l, .n = 1, .in = in, .out = got});
    for (size_t i = 0; i < 6; i++)
        bound[i] = 1e-10;
    check_tensor("gelu", got, want, bound, 6);
    verdict("gelu_values");
    test_sgd_by_hand();
    omp_set_num_threads(1);
    for (size_t m = 0; m < ODD_MODELS; m++)
        for (size_t b = 0; b < 2 && strcmp(odd_models[m].name, "gelu") == 0; b++)
            test_odd_gradients(both_kernels[b], &odd_models[m]);
    return 0;
}
END
gcc -std=gnu17 -O1 -fopenmp -DREAL=double -Wno-unused-function gelu_test.c -o gelu_test -lm -lpthread -ldl 2>"$err" &&
    ./gelu_test >"$out" 2>"$err"
verdict gelu_test "4 tests" "$(cat "$out" "$err")" [ "$(grep -c ': \|/gelu_values$\|/sgd by hand$\|, gelu$' "$out")" = 4 ]
grep '^[a-z]* readme/' "$out"

# ---- What the text mentions exists

# spans PAGE...: what stands between backquotes
# shellcheck disable=SC2016 # backquotes of the pages
spans() { grep -ohP '`[^`]+`' "$@" | tr -d '`' | sort -u; }

# Tools have options of their own; tests/labs/ tests those.
mapfile -t about_cnn < <(printf '%s\n' "${pages[@]}" | grep -v '/README.md$')
./cnn --help >"$out"
while IFS= read -r option; do
    grep -qE -- "(^  |also called )$option( |$)" "$out" || unknown+=" $option"
done < <(spans "${about_cnn[@]}" | grep -vE '^(sbatch|srun|squeue|labs|gcc|docker|podman|apptainer)' | grep -oP '(?<![\w-])--[a-z][a-z-]+' | sort -u)
verdict options "options of ./cnn" "${unknown:-}" [ -z "${unknown:-}" ]
# shellcheck disable=SC2046 # the words are targets and variables
make -n $(spans "${pages[@]}" | grep -P '^make [^.]*$' | sed 's/"--width 64"/x/; s/^make//') >"$out" 2>"$err" </dev/null
status=$?
verdict targets "targets of make" "$(cat "$err")" [ $status = 0 ]
for file in $(spans "${pages[@]}" | grep -xE '[a-z_]+(/[a-z_0-9]+)*\.(c|cu|sh|sb|py|env)'); do
    found=''
    for folder in . slurm labs labs/tools labs/gradescope; do
        [ ! -e "$folder/$file" ] || found=yes
    done
    [ -n "$found" ] || absent+=" $file"
done
verdict files "files of the project" "${absent:-}" [ -z "${absent:-}" ]

# anchors PAGE: the headings, as GitHub makes addresses of them
anchors() { sed -n 's/^##* //p' "$1" | tr '[:upper:]' '[:lower:]' | sed 's/[^a-z0-9 _-]//g; s/ /-/g'; }

# broken_links PAGE...: links to files or headings that do not exist
broken_links() {
    local page link file
    for page; do
        while IFS= read -r link; do
            file=$page
            [ -z "${link%%#*}" ] || file=$(dirname "$page")/${link%%#*}
            [ -e "$file" ] || echo "$page: $link"
            [[ $link != *#* ]] || anchors "$file" | grep -qxF -- "${link#*#}" || echo "$page: $link"
        done < <(grep -oP '\]\(\K[^)]+' "$page" | grep -v '^https\?:')
    done
}

# Also in the starter that README makes, which is a copy of a part of the project
for folder in "$tmp/project" "$tmp/lab1"; do
    cd "$folder" || continue
    found=$(broken_links README.md labs/*.md labs/*/README.md)
    verdict "links ${folder##*/}" "links to what exists" "$found" [ -z "$found" ]
done
cd "$tmp/project" || exit 1

# ---- Its form

length=$(wc -l <README.md)
verdict length "at most 200 lines" "$length" [ "$length" -le 200 ]
wide=$(awk 'length > 120 { print FILENAME ": " FNR }' "${about_cnn[@]}")
verdict width "at most 120 columns" "$wide" [ -z "$wide" ]
# The slowest and the fastest of the figure's networks, which the texts beside it name
range=$(awk -F , 'NR > 1 { r = $7 / $13; if (NR == 2 || r < low) low = r; if (r > high) high = r }
    END { printf "%.1f to %.1f times", low, high }' labs/figures/bench.csv)
for page in README.md labs/results.md; do
    verdict "range $page" "$range" "another" grep -qF "$range" <(tr '\n' ' ' <"$page")
done
