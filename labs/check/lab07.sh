# Lab 7: the loss scaler, the layouts and the fused update, on a GPU or in the emulator; then run folders of
# precisions and of the ladder. check.sh reads this.
# shellcheck shell=bash disable=SC2015,SC2119,SC2154 # check.sh exports home, from and work
# shellcheck source=labs/check/kernels.sh
. "$home/labs/check/kernels.sh"
# shellcheck source=labs/check/run_folders.sh
. "$home/labs/check/run_folders.sh"

tests() {
    cat <<'END'
2|7.1|gradients that are not finite are counted: Inf, -Inf and NaN, anywhere
2|7.1|the scale is halved after a skipped step, and doubled after SCALE_STEPS good ones
2|7.1|an infinite gradient skips exactly one step; all others are as if it had not been there
3|7.2|NHWC and NCHW: where each element lies, and which pixel and channel an index is
1|7.2|images of the loader, and a max-pool, in both layouts
3|7.3|the fused update computes what its definition says: sgd, adadelta, fp32, fp16
1|7.3|a step that is skipped changes nothing
2|7.3|an update is one kernel, which reads and writes each number once
2|-|precisions: the losses in bf16 and fp16 are near the fp32 losses, which are also the CPU's
2|-|the ladder: all rungs, one change each; ablation.csv has the numbers of the run folders
END
}

# shellcheck disable=SC2034 # check.sh reads it
harmless='read write' # cnn_kernels.cu has functions of these names

# What the parts may call of cnn_kernels.cu, and of CUDA besides launches.
# shellcheck disable=SC2034 # kernels.sh reads it
may_call='element first_of_pack load store read write ceil_div check stream layout_of at channel pixel update'
may_call+=' cudaGetLastError cudaError_t cudaSuccess cudaGetErrorString cudaDeviceSynchronize cudaStream_t'

# Appended to the kernels: what Layout says, for a test; and tables with what is tested
# shellcheck disable=SC2089,SC2090
appended='
static __global__ void lab_layout_kernel(unsigned *at, unsigned *channel, unsigned *pixel, Layout l, unsigned count) {
    unsigned i = element();
    if (i < count) {
        at[i] = l.at(i / l.channels, i % l.channels);
        channel[i] = l.channel(i);
        pixel[i] = l.pixel(i);
    }
}
extern "C" void lab_layout(unsigned *at, unsigned *channel, unsigned *pixel, Shape s, bool nchw, unsigned count) {
    LAUNCH(lab_layout_kernel, count, at, channel, pixel, layout_of(s, nchw), count);
}
template <class T> static Kernels tested_kernels(Precision precision) {
    Kernels k = {};
    k.device = &gpu_device;
    k.name = TILED;
    k.precision = precision;
    k.element_bytes = sizeof(T);
    k.layers[MAXPOOL2D].forward = each<maxpool2d_forward_kernel<T>, outputs>;
    k.load_images = load_images<T>;
    k.adadelta = update<T, Adadelta>;
    k.sgd = update<T, Sgd>;
    k.count_not_finite = count_not_finite;
    k.adjust_scale = adjust_scale;
    return k;
}
extern "C" const Kernels *cuda_kernels(size_t i) {
    static const Kernels kernels[] = {tested_kernels<real>(FP32), tested_kernels<__half>(FP16)};
    return i < 2 ? &kernels[i] : NULL;
}'

build() {
    wanted 1 2 3 4 5 6 7 8 || return 0
    { cut_kernels 7 3 'static double peak_gflops(void) { return 0; }' own && echo "$appended"; } >lab07.cu
    "${CC:-gcc}" -std=gnu17 -g -march=native -w -c labs/check/lab07.c -o lab07.o || return
    if wanted 8; then emulated lab07_counted lab07 "${CXX:-g++}" -O1 -fsanitize=thread -DCUEMU_COUNT || return; fi
    if wanted 1; then build_races || return; fi
    emulated lab07_emulated lab07 "${CXX:-g++}" -O0 -g && if on_gpu; then for_gpu lab07_gpu lab07; fi
}

build_races() { # clang's race detector is faster; either will do
    local cxx=${CXX:-g++} tsan=(-g -O1 -fsanitize=thread)
    if clang++ "${tsan[@]}" -x c++ - -o /dev/null 2>/dev/null <<<'int main() {}'; then
        cxx=clang++
    fi
    emulated_kernels lab07_races.o lab07 "$cxx" "${tsan[@]}" &&
        "$cxx" "${tsan[@]}" lab07.o lab07_races.o -o lab07_races -lm -lpthread
}

# races: a counter to which threads add one after the other, as in the emulator, is right without atomicAdd, too
races() {
    TSAN_OPTIONS='halt_on_error=1 exitcode=66' ./lab07_races race >said 2>&1 <<<"" 9>/dev/null && return
    if ! grep -q 'data race' said; then
        tail -n 5 said
        return 1
    fi
    echo "a race: two threads access the same number, and one writes it without an atomic operation:" \
        "not_finite needs atomicAdd"
    grep -E -m 2 '(Write|Read|Previous (write|read)) of size' said
    return 1
}

tested() { if on_gpu; then ./lab07_gpu "$@"; else ./lab07_emulated "$@"; fi; }

run() {
    export CUEMU_PROTECT=1
    case $1 in
    1) races && tested count ;;
    2) tested adjust ;;
    3) tested sequence ;;
    4) tested layout ;;
    5) tested images ;;
    6) tested update ;;
    7) tested skipped ;;
    8) ./lab07_emulated launches <<<none 9>/dev/null && traffic && return_token ;;
    9) precisions && return_token ;;
    10) ladder && return_token ;;
    esac
}
return_token() { cat >&9; }

# traffic: what the update of 4096 parameters reads and writes, with momentum and a copy in 16 bits
traffic() {
    ./lab07_counted traffic <<<none 9>/dev/null 2>table || { tail -n 3 table; return 1; }
    # (bytes) are columns 4 and 6; a thread also reads up to 24 bytes of scale, counter and learning rate
    awk -v count=4096 '
        NF == 10 && $2 ~ /^[0-9]+$/ && $1 != "set_step_kernel" {
            gsub(/[()]/, "")
            if ($4 < 0 || $6 < 0) bad = 1
            reads += $4; writes += $6
        }
        END {
            if (bad || writes != 10 * count) {
                printf "the update of %d parameters has written %d bytes, expected %d: param and momentum 4 each, param16 2\n",
                    count, writes, 10 * count
                exit 1
            }
            if (reads < 12 * count || reads > 36 * count) {
                printf "the update of %d parameters has read %d bytes; expected %d for param, gradient and momentum, " \
                    "and at most %d more for scale, counter and learning rate\n", count, reads, 12 * count, 24 * count
                exit 1
            }
        }' table
}

# ---- Test 9: precisions

training="for p in fp32 bf16 fp16; do ./cnn-emu --model lenet --dataset synthetic --limit-train 64 --limit-test 16 --epochs 1 --batch-size 8 --lr 0.1 --precision \$p --quiet --out runs/lab07-\$p; done"

# finished NAME COMMAND: opens a run folder that is complete, of the emulator or of a GPU
finished() {
    open_run "$1" "$2" && is status complete "the run was stopped or has failed" &&
        is provenance measured "only your own measurements count" &&
        is settings.max-steps 0 "the run ended before the epoch did" && same_command && counts || return 1
    [[ $(value machine.device) != cpu ]] || complain "$run was computed by the CPU; expected a GPU, or the emulator's"
}

# What must be equal in all runs that are compared, but for the settings given
facts() {
    awk -F '\t' '$1 ~ /^(settings|build)\./ || $1 ~ /^machine\.(cpu|device)$/' "$1" |
        grep -vE "^settings\.(out|quiet|test-batch-size|$2)	" | sort
}

# alike FLAT KEYS WHAT: the open run has the facts of another one
alike() {
    local other
    other=$(diff <(facts "$1" "$2") <(facts "$flat" "$2") | sed -n 's/^[<>] //p' | cut -f 1 | sort -u | paste -sd ' ')
    [ -z "$other" ] || complain "$run differs from $3 also in $other, so a difference has more than one possible cause"
}

# on_cpu: the open run's training by the checker, on the CPU, in the folder own
on_cpu() {
    local key number arguments=()
    is settings.dataset synthetic "the lab uses the images that cnn generates" &&
        is settings.model lenet "the lab trains the network lenet" || return 1
    for key in limit-train batch-size epochs lr seed; do
        number=$(value "settings.$key")
        [[ $number =~ ^[0-9.]{1,6}$ ]] || { complain "$run/run.json: settings.$key should be a number, found ${number:-nothing}"; return 1; }
        arguments+=("--$key" "$number")
    done
    "${CC:-gcc}" -std=gnu17 -O1 -w cnn.c -o cnn -lm -lpthread &&
        timeout 200 ./cnn --no-cuda --model lenet --dataset synthetic --limit-test 1 --threads 1 "${arguments[@]}" --out own \
            >own.log 2>&1 </dev/null 9>&- || { tail -n 2 own.log; return 1; }
}

# near_losses FOLDER WHAT PART: the losses of all steps of the open run differ from those of FOLDER by at most PART
near_losses() {
    paste -d ' ' <(step_losses "$1") <(step_losses "$folder") | awk -v run="$run" -v what="$2" -v part="$3" '
        $1 != $4 || $2 != $5 || !($6 - $3 <= part * $3 && $3 - $6 <= part * $3) {
            printf "%s/steps.csv: the loss of step %s (epoch,step) should be %s, as %s, up to %g %%; found %s\n",
                run, $1, $3, what, 100 * part, $6
            exit 1
        }
        END { if (NR == 0) { print run ": no steps"; exit 1 } }' ||
        complain "the same images and initial weights give nearly the same losses in each precision"
}

# hashes FOLDER: of the weights after each epoch
hashes() { grep -oE '[0-9a-f]{16}$' "$1/epochs.csv"; }

precisions() {
    local p
    mkdir -p "$work/lab07"
    for p in fp32 bf16 fp16; do
        finished "lab07-$p" "$training" && is settings.precision "$p" "this is what the run is to show" || return
        if [ "$p" = fp32 ]; then
            on_cpu && near_losses own "on the CPU" 1e-3 || return
            continue
        fi
        alike "$work/lab07-fp32.flat" 'precision|kernels' runs/lab07-fp32 &&
            near_losses "$from/runs/lab07-fp32" "in fp32" .005 || return
        ! diff -q <(step_losses "$from/runs/lab07-fp32") <(step_losses "$folder") >/dev/null ||
            complain "$run has the losses of runs/lab07-fp32 to the last digit: were they computed in $p?" || return
        [ "$(hashes "$from/runs/lab07-fp32")" != "$(hashes "$folder")" ] ||
            complain "$run has the weights of runs/lab07-fp32, to the last bit: were they computed in $p?" || return
    done
}

# ---- Test 10: the ladder

ablation="make ablation EMULATE=1 MODEL=lenet RUNS=runs/lab07 OPTIONS='--dataset synthetic'"

# rungs: lines `NUMBER NAME OPTIONS...`, with the options of all rungs so far, the later ones last
rungs() {
    awk '$1 == "gpu" { options = options substr($0, index($0, $3)); print ++n, $2, options; options = options " " }' \
        "$home/slurm/configs/ablation.txt" | awk '{ $1 = $1; print }'
}

# has_options OPTIONS...: the open run has them, those that come later replacing earlier ones
has_options() {
    local -A wanted=()
    local key
    while [ $# -gt 1 ]; do wanted[${1#--}]=$2 && shift 2; done
    for key in "${!wanted[@]}"; do
        case $key in
        graph | autotune) is "settings.$key" "$([ "${wanted[$key]}" = on ] && echo true || echo false)" "rung $name" || return ;;
        zero-grad) ;; # it is no setting of a result
        *) is "settings.$key" "${wanted[$key]}" "rung $name" || return ;;
        esac
    done
}

ladder() {
    local k name options path first='' count found folders free
    mkdir -p "$work/lab07"
    command=$ablation
    free=$(rungs | tail -n 1 | grep -o -- '--[a-z-]*' | sed 's/--//' | sort -u | paste -sd '|')
    : >rows
    while read -r k name options; do
        count=0
        for path in "$from"/runs/lab07/*-rung"$k-$name"-r*/; do
            [ -f "$path/run.json" ] || continue
            finished "lab07/$(basename "$path")" "$ablation" || return
            # shellcheck disable=SC2086 # a word each
            has_options $options || return
            first=${first:-$flat}
            alike "$first" "$free|seed" "the ladder's first run" || return
            is settings.seed "${run##*-r}" "repeat r of a rung has the seed r" || return
            rung_row "$name" >>rows
            count=$((count + 1))
        done
        [ $count -gt 0 ] || complain "runs/lab07: there is no run of the rung $name" || return
        found=${folders:-$count}
        [ "$count" = "$found" ] || complain "runs/lab07: the rung $name has $count runs, the first one $found" || return
        folders=$count
    done < <(rungs)
    no_copies && ablation_table
}

# rung_row NAME: of the open run: lines `NAME emulated 0 or 1`, `NAME speed IMG_PER_S` of its epochs but the first,
# and `NAME accuracy PERCENT`
rung_row() {
    echo "$1 emulated $([ "$(value emulated)" = true ] && echo 1 || echo 0)"
    awk -F , -v rung="$1" 'NR == 1 { for (i = 1; i <= NF; i++) c[$i] = i; next }
        { accuracy = $c["accuracy"] }
        NR > 2 { print rung, "speed", $c["images"] / $c["seconds"] }
        END { print rung, "accuracy", accuracy }' "$folder/epochs.csv"
}

no_copies() {
    local double
    double=$(for path in "$from"/runs/lab07/*/steps.csv; do cut -d , -f 7 "$path" | cksum; done | sort | uniq -d)
    [ -z "$double" ] || complain "runs/lab07: two run folders have exactly the same times: one is a copy of the other"
}

# ablation.csv has what the run folders say; of emulated runs neither speed nor accuracy
ablation_table() {
    local file=runs/lab07/ablation.csv
    [ -f "$from/$file" ] || { complain "$file: missing"; return 1; }
    # columns that hold texts with commas come after those that are compared
    (cd "$from" && awk -v names="$(rungs | awk '{ print $2 }' | paste -sd ' ')" "$table_awk"'
        function empty(what, found) {
            if (found != "") { printf "%s: %s should be empty, since the run was emulated; found %s\n", FILENAME, what, found; bad = 1 }
        }
        NR == FNR {
            if ($2 == "speed") speed[$1, ++count[$1]] = $3
            else if ($2 == "emulated") emulated[$1] = $3
            else { sum[$1] += $3; n[$1]++ }
            next
        }
        FNR == 1 { FS = ","; $0 = $0; for (i = 1; i <= NF; i++) c[$i] = i; total = split(names, name, " "); next }
        {
            k++
            if ($1 != name[k]) { printf "%s: row %d should be the rung %s, found %s\n", FILENAME, k, name[k], $1; exit bad = 1 }
            if ($c["emulated"] != emulated[$1]) { printf "%s: rung %s: emulated should be %s\n", FILENAME, $1, emulated[$1]; bad = 1 }
            near("repeats of rung " $1, n[$1], $c["repeats"])
            if (emulated[$1] == 1) {
                empty("img_per_s of rung " $1, $c["img_per_s"])
                empty("accuracy of rung " $1, $c["accuracy"])
                empty("times_first of rung " $1, $c["times_first"])
            } else {
                near("img_per_s of rung " $1, median($1), $c["img_per_s"])
                near("times_first of rung " $1, median($1) / median(name[1]), $c["times_first"])
                near("accuracy of rung " $1, sum[$1] / n[$1], $c["accuracy"])
            }
        }
        END { if (!bad && k != total) { printf "%s: expected %d rows, found %d\n", FILENAME, total, k; bad = 1 }; exit bad }' "$work/rows" "$file") || { command=$ablation; complain "the table does not belong to these run folders: the same command writes it again"; }
}
