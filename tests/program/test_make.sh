#!/usr/bin/env bash
# The Makefile, with a cnn.c that only says that it runs, and with an nvcc, a CUDA library and an nvidia-smi that only
# pretend to be there: what `make` and `make run` build on a login node and on a node with a GPU, what the job scripts
# say of the ./cnn that they find, and paths with blanks.
# Prints `pass makefile/NAME` or `fail makefile/NAME: expected ..., found ...`.
suite=makefile
: "${CNN:=$(type -P true)}" # not run here
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
export CC=${CC:-gcc}
unset CNN MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES QUICK NO_CUDA NO_MPI "${!SLURM@}"

# pretend PROGRAM <SCRIPT: lies in the folder $fakes, which comes first
fakes=$tmp/cuda/bin
mkdir -p "$fakes" "$tmp"/cuda/{include,lib64}
PATH=$fakes:$PATH
pretend() {
    { echo '#!/bin/sh' && cat; } >"$fakes/$1"
    chmod +x "$fakes/$1"
}

# The kernels' object has a function's name, as the real one, and the architecture. nvcc.log lists what was compiled.
pretend nvcc <<'END'
case " $* " in
*' --help '*) cat "$(dirname "$0")/architectures" ;;
*' -E '*) [ ! -e "$(dirname "$0")/refuses" ] ;; # the C++ compiler
*' --dryrun '*) printf '#$ ptxas -arch=sm_%s "x"\n' 90 80 100 80 >&2 ;;
*)
    arch=$(echo "$@" | grep -o 'arch=[^ ]*')
    echo "$arch" >>nvcc.log
    while [ "$1" != -o ]; do shift; done
    echo "const char arch[] = \"$arch\"; int cudaGetDeviceCount(int *n) { return *n; }" | "$CC" -x c -c - -o "$2"
    ;;
esac
END
echo 'static inline int cudaGetDeviceCount(int *n) { return *n = 0; }' >"$tmp/cuda/include/cuda_runtime_api.h"
ar rc "$tmp/cuda/lib64/libcudart_static.a"
ar rc "$tmp/cuda/lib64/libstdc++.a" # g++ may be missing
# gpu NAME [COMPUTE_CAPABILITY]: this machine has one, or none if its name is empty
gpu() {
    pretend nvidia-smi <<END
case "\$*" in
*compute_cap*) echo '${2:-}' ;;
*) [ -z '$1' ] || echo 'GPU 0: $1 (UUID: GPU-1)' ;;
esac
END
}
# knows ARCHITECTURE...: to nvcc
knows() { printf "'%s'," "$@" >"$fakes/architectures"; }
knows all-major native sm_80 sm_86

# project: with a program that is built at once
project() {
    rm -rf "$tmp/project" && mkdir -p "$tmp/project/labs" && cd "$tmp/project" || exit 1
    cp -r "$repo/Makefile" "$repo/slurm" . && cp -r "$repo/labs/tools" "$repo/labs/programs.mk" labs
    cat >cnn.c <<'END'
#include <stdio.h>
int main(void) { return puts("Train Epoch: 1") < 0; }
END
    touch cnn_kernels.cu nvcc.log
}
# made WORDS...: make, without what it would find on this machine
made() {
    make CUDA="$tmp/cuda" NO_MPI=1 "$@" >"$out" 2>"$err" </dev/null
    status=$?
}
compiled() { sed 's/^arch=//' nvcc.log | xargs; }
has_cuda() { grep -aqE 'cudaGetDeviceCount' "$1"; }

# ---- make run, make, and the job scripts

test_login_node() {
    gpu ''
    project
    touch "$fakes/refuses"
    made run
    same refuses/run "0 Train Epoch: 1 " "$status $(tail -n 1 "$out") $(compiled)"
    line refuses/run/says '^CUDA: +not usable, see make doctor: CPU only$'
    rm "$fakes/refuses"
    project
    made run
    same login/run "0 Train Epoch: 1" "$status $(tail -n 1 "$out")"
    same login/run/compiled "" "$(compiled)"
    same login/run/no_full_program absent "$([ -e cnn ] && echo there || echo absent)"
    line login/run/says '^CUDA: +found, but there is no GPU here: left out; make alone adds it$'
    made
    same login/make "0 all-major" "$status $(compiled)"
    line login/make/says '^nvcc compiles .*: sm_80 sm_90 sm_100$'
    same login/make/says_first "nvcc compiles,nvcc" "$(grep -oE '^(nvcc compiles|[^ ]*nvcc)' "$out" | sed 's|.*/||' |
        paste -sd ,)"
    line login/make/how_long '^The six of .* took .* on 2 cores of .*CUDA_ARCH=sm_90.*NO_CUDA=1'
    holds login/make/full "CUDA in ./cnn" "none" has_cuda cnn
    cp cnn before
    made run
    holds login/run/again "the same ./cnn as before" "another" cmp cnn before
    same login/run/nothing_compiled all-major "$(compiled)"
    made
    same login/make/nothing_to_do "" "$(grep -E 'cnn|nvcc' "$out")"
    # shellcheck disable=SC2016 # make's own variable
    made --eval='tested: ; @echo $(TESTED)' tested QUICK=1 # what make test builds
    made "$(cat "$out")" QUICK=1
    same login/test "all-major sm_80" "$(compiled)"
    holds login/test/full "the same ./cnn as before" "another" cmp cnn before
}

test_gpu_node() {
    gpu 'Tesla T4'
    project
    made run
    same gpu/run "0 Train Epoch: 1 native" "$status $(tail -n 1 "$out") $(compiled)"
    holds gpu/run/cuda "CUDA in build/cnn-here" "none" has_cuda build/cnn-here
    made run
    same gpu/run/again native "$(compiled)"
    gpu 'NVIDIA A100-SXM4-40GB' # the same folder on another node
    made run
    same gpu/run/other_node "native native" "$(compiled)"
    gpu ''
    made run
    holds gpu/run/login_node "no CUDA in build/cnn-here" "CUDA" eval '! has_cuda build/cnn-here'
}

# nvcc 11.4 knows neither all-major nor native, 11.5 only the former.
test_old_nvcc() {
    gpu ''
    project
    knows sm_80 sm_86
    made
    same "nvcc 11.4/make" "0 sm_80" "$status $(compiled)"
    gpu 'NVIDIA A10' 8.6
    made run
    same "nvcc 11.4/run" "0 sm_80 sm_86" "$status $(compiled)"
    gpu 'NVIDIA L4' 8.9 # newer than this nvcc
    made run
    same "nvcc 11.4/newer_gpu" "0 sm_80 sm_86 sm_80" "$status $(compiled)"
    project
    knows all-major sm_80 sm_86
    made
    made run
    same "nvcc 11.5" "0 all-major sm_80" "$status $(compiled)"
    knows all-major native sm_80 sm_86
}

# job SCRIPT VARIABLE=VALUE...: what the check of the job scripts says, in a job of that name
job() {
    # shellcheck disable=SC2016 # the job's own variables
    env SLURM_JOB_NAME="$1" "${@:2}" bash -c 'source slurm/program.sh $OPTIONS && echo "starts $program"' >"$out" 2>&1
    status=$?
}
test_job_scripts() {
    local script
    gpu ''
    project
    job single SLURM_GPUS_ON_NODE=1
    same job/missing 1 "$status"
    line job/missing/says "^single: there is no ./cnn in $PWD: run \`make\` "
    job cpu
    same job/missing/cpu 1 "$status"
    job single CNN=./cnn-emu
    same job/other_program "0 starts ./cnn-emu" "$status $(cat "$out")"
    made run NO_CUDA=1
    job single SLURM_GPUS_ON_NODE=1
    line job/run_is_not_enough "^single: there is no ./cnn in "
    made NO_CUDA=1
    job single SLURM_GPUS_ON_NODE=1
    same job/no_cuda 1 "$status"
    line job/no_cuda/says '^single: this job has a GPU, but ./cnn was built without CUDA: run .make. '
    job multinode SLURM_GPUS_ON_NODE=1 OPTIONS=--no-cuda
    same job/no_gpu_wanted "0 starts ./cnn" "$status $(cat "$out")"
    job timing SLURM_GPUS_ON_NODE=2 OPTIONS=--emulate
    same job/emulated "0 starts ./cnn" "$status $(cat "$out")"
    job cpu
    same job/no_gpu_asked_for "0 starts ./cnn" "$status $(cat "$out")"
    made
    made run
    job single SLURM_GPUS_ON_NODE=1
    same job/starts "0 starts ./cnn" "$status $(cat "$out")"
    # shellcheck disable=SC2016 # awk's own $
    for script in slurm/*.sb; do
        holds "job/${script##*/}" "source slurm/program.sh, and then its \$program" "$(grep -n cnn "$script")" \
            awk '/^source slurm\/program.sh/ { checked = 1 } !/^#/ && /"\$program"/ { used = checked }
                !/^#/ && /CNN/ { other = 1 } END { exit !used || other }' "$script"
    done
}

# make help names each target that a user calls, on a page.
test_help() {
    local target missing=
    project
    made help
    while read -r target; do
        grep -qE "(^|[ ,])$target([ ,;:]|\$)" "$out" || missing+=" $target"
    done < <(sed -n '/^\.PHONY:/,/[^\\]$/p' Makefile | sed 's/^\.PHONY://; s/\\$//' | xargs -n 1)
    same help/targets "0 all help FORCE" "$status$missing"
    holds help/page "at most 40 lines of 120 columns" "$(wc -lL <"$out")" \
        awk 'length > 120 { wide = 1 } END { exit wide || NR > 40 }' "$out"
}

# In a terminal of Jupyter, MPLBACKEND has a value that matplotlib refuses elsewhere.
test_jupyter() {
    project
    mkdir -p .venv/bin
    pretend ../../project/.venv/bin/python <<'END'
[ "$MPLBACKEND" = Agg ]
END
    MPLBACKEND=module://matplotlib_inline.backend_inline made -n plots
    line jupyter '^\.venv/bin/python labs/tools/plot\.py '
}

# ---- RUNS with a blank: each target that has it gives the tools one word

test_blanks() {
    local target tool
    project
    made # for the targets that need it
    for tool in study.py plot.py report.py verify.py; do
        cat >labs/tools/$tool <<'END'
#!/bin/sh
printf '<%s>' "${0##*/}" "$@" >>said
END
        chmod +x labs/tools/$tool
    done
    pretend python3 <<'END'
[ "$1" = -c ] || exec "$@"
END
    for target in study study-scaling study-workers ablation plots report verify; do
        rm -f said
        made "$target" RUNS='my runs'
        same "blanks/$target" "0 <my runs>" "$status $(grep -o '<my[^>]*>' said | sort -u)"
    done
    rm "$fakes/python3"
    mkdir -p 'my runs' labs/lab06
    cat >labs/lab06/overlap.c <<'END'
#include <stdio.h>
int main(int n, char **words) { return puts(words[n - 1]) < 0; }
END
    made overlap TRACE='my runs/trace.json'
    same blanks/overlap "0 my runs/trace.json" "$status $(cat 'my runs/overlap.txt')"
    mkdir tests && touch tests/run_tests.sh
    # shellcheck disable=SC2016 # make's
    made --eval='again: ; @echo "$(without_parts)"' again PARTS='unit/float unit/double' OPT='-O1 -g'
    same blanks/parts '0 OPT=-O1\ -g' "$status $(grep -o 'OPT=-O1\\ -g\|PARTS=\|unit/[a-z]*' "$out" | paste -sd ' ')"
}

test_login_node
test_gpu_node
test_old_nvcc
test_job_scripts
test_help
test_jupyter
test_blanks
