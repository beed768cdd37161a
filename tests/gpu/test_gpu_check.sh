#!/usr/bin/env bash
# Tests gpu_check.sh and bench_gpu.sh as on a GPU, with stand-ins for the programs that they call: everything
# passes; then each check is made to fail once, which the line, the exit status and the JSON must say; tools that
# a machine refuses are skipped by name; and the table beside PyTorch is worked out by hand.
# Prints `pass gpu_check_itself/NAME`, `fail ...` or `skip ...`.
suite=gpu_check_itself
export CNN=/bin/true # lib.sh wants one
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
if ! command -v python3 >/dev/null; then
    skip all "python3 is not installed"
    exit 0
fi
unset CNN CUEMU_DEVICES OUT MODES NETS VARIANTS
export CUDA=/nowhere COMMIT=abc123

# A copy of the two scripts in a project of stand-ins. PLANT names what goes wrong.
mkdir -p "$tmp/project"/{bin,build,labs/tools,slurm/configs,tests/gpu} && cd "$tmp/project" || exit 1
cp "$repo"/tests/gpu/{gpu_check,bench_gpu}.sh tests/gpu/
cp "$repo/tests/python_with.sh" tests/
cp "$repo/slurm/configs/ablation.txt" slurm/configs/
export PATH=$PWD/bin:$PATH PYTHON=$PWD/bin/python_with_torch

# stand_in FILE...: from stdin
# shellcheck disable=SC2016 # not expanded on purpose
stand_in() {
    { printf '#!/usr/bin/env bash\nplanted() { [ "${PLANT:-}" = "$1" ]; }\n' && cat; } >"$1"
    chmod +x "$1"
    [ $# -lt 2 ] || ln -s "$(basename "$1")" "$2"
}

# ./cnn: each step takes 2 ms, with bf16 1 ms; the graph makes it 0.5
stand_in cnn cnn-emu <<'END'
if planted "${STEP:-none}"; then
    case ${HOW:-exit} in
    exit) echo "cnn: error: planted" >&2 && exit 1 ;;
    says) echo "fail cuda/planted: found a stand-in" && exit 0 ;;
    hangs) exec sleep 60 ;;
    esac
fi
words=" $* " out='' device='GPU X, sm_90, 132 multiprocessors' ms=2
case $words in *' --out '*) out=${words#* --out } out=${out%% *} ;; esac
case ${PLANT:-}$words in cut*' bf16 '*) touch hanging && exec sleep 60 ;; esac
case $words in *' bf16 '*) ms=1 ;; esac
case $words in *' --graph on '*) ms=0.5 ;; esac
case $words in *' fp16 '*) [ "${PLANT:-}" != variants ] || { echo "cnn: error: no fp16 here" >&2 && exit 2; } ;; esac
planted on_gpu && device=cpu
echo "Device: $device, --kernels tiled"
accuracy=97 hash=0123456789abcdef shift_of_loss=0
planted mnist_learns && accuracy=12
case ${PLANT:-}:${STEP:-} in same_again:again | graph_same:graph) hash=9999999999999999 ;; esac
case $words in *' --graph on '*) graph=true ;; *) graph=false ;; esac
planted graph_replayed && graph=false
case ${PLANT:-}:${STEP:-} in same_as_cpu:on_cpu | ddp_same:ddp | dp_same:dp) shift_of_loss=0.1 ;; esac
echo "epoch=1 images=640 seconds=1 img_per_s=640 accuracy=$accuracy lr=1"
[ -z "$out" ] && exit 0
mkdir -p "$out"
echo "{\"device\":\"$device\",\"uuid\":\"GPU-1\",\"driver\":\"CUDA 13.1\",\"parallel\":{\"graph\":$graph}}" >"$out/run.json"
printf 'epoch,weight_hash\n1,%s\n' $hash >"$out/epochs.csv"
awk -v shift="$shift_of_loss" -v ms=$ms 'BEGIN {
    print "epoch,step,rank,images,loss,lr,seconds,other_s,warmup"
    for (step = 1; step <= 7; step++) # 100 times as long while it warms up, and the last one 9 times
        printf "1,%d,0,64,%g,1,%g,0,%d\n", step, 1 / step + shift,
            (step < 4 ? 100 : step == 7 ? 9 : 1) * ms / 1000, step < 4
}' >"$out/steps.csv"
END
stand_in build/test_cuda build/emu_test_cuda <<'END'
planted "${STEP:-none}" && [ "${HOW:-exit}" = says ] && echo "fail cuda/planted: found a stand-in" && exit 0
planted "${STEP:-none}" && [ "${HOW:-exit}" = hangs ] && exec sleep 60
planted "${STEP:-none}" && echo "a bug" && exit 1
echo "pass cuda/comparison"
if planted no_tensor_cores; then
    echo "skip cuda/bf16: this GPU has no tensor cores that cnn uses"
    seq -f 'pass cuda/conv2d_%g' 20 && exit 0
fi
planted tensor_tests || echo "pass cuda/linear, tensor kernels"
planted some_tests || seq -f 'pass cuda/conv2d_%g' 20
END
stand_in build/test_tensor build/emu_test_tensor <<'END'
planted "${STEP:-none}" && echo "a bug" && exit 1
planted no_tensor_cores && echo "skip cuda/layouts: GPU X, sm_75 has no tensor cores that cnn uses" && exit 0
seq -f 'pass cuda/layouts/%g' "$(planted all_layouts && echo 9 || echo 10)"
END
# Its limits: half a millisecond for mnist and cifar, a quarter for the ResNets
stand_in build/bench_gpu build/emu_bench_gpu <<'END'
planted "${STEP:-none}" && echo "cnn: error: planted" >&2 && exit 1
echo "Commit abc123"
echo "emulated=false peak=registers peak_gflops=60000 copy_gb_per_s=3000"
nets='' json=''
while [ $# -gt 0 ]; do
    case $1 in --nets) nets=$2 ;; --json) json=$2 ;; esac
    shift
done
for net in $nets; do
    model=${net%,*} width=6 limit=0.25
    case $model in cifar*) width=${model#cifar} model=cifar ;; esac
    case $model in mnist | cifar) limit=0.5 ;; esac
    echo "net=$model width=$width batch=${net#*,} mflop=1000 roofline_ms=$limit"
done
planted json && printf '{' >"$json" && exit 0
[ -z "$json" ] || printf '{"device": "GPU X",\n "networks": []}\n' >"$json"
END
stand_in labs/tools/study.py <<'END'
planted "${STEP:-none}" && echo "study: error: planted" >&2 && exit 1
mkdir -p "$2"
{
    echo rung,options,img_per_s,seconds,accuracy,accuracy_sd,emulated,device
    awk '$1 == "gpu" { print $2 }' slurm/configs/ablation.txt | while read -r rung; do
        accuracy=91.5
        [ "$rung" = graph ] && planted rungs && continue
        [ "$rung" = bf16 ] && planted same_accuracy && accuracy=70
        echo "$rung,--graph on,100,2,$accuracy,,0,\"GPU X, sm_90\""
    done
} >"$2/ablation.csv"
END
cat >tests/gpu/bench_pytorch_gpu.py <<'END'
import sys
print("torch version=2 device=GPU_X product=8192 precision=fp32 gflops=50000")
nets = sys.argv[sys.argv.index("--nets") + 1] if "--nets" in sys.argv else "mnist,64"
for net in nets.split():
    name, batch = net.split(",")
    for run, layout, precision, ms in (("eager", "nchw", "fp32", 5), ("eager", "nhwc", "fp32", 4),
                                       ("graph", "nhwc", "fp32", 3), ("eager", "nhwc", "bf16", 2)):
        print(f"torch version=2 device=GPU_X net={name} batch={batch} run={run} layout={layout} "
              f"precision={precision} step_ms={ms} img_per_s=1")
print("torch version=2 device=GPU_X net=mnist batch=64 run=graph precision=bf16 does not work here: Error")
END
stand_in bin/python_with_torch <<'END'
[ "$1 $2" = "-c import torch" ] && exit 0
planted "${STEP:-none}" && echo planted >&2 && exit 1
exec python3 "$@"
END
stand_in bin/make <<'END'
planted "${STEP:-none}" && echo "cnn.c:1:1: error: planted" && exit 2
exit 0
END
stand_in bin/compute-sanitizer <<'END'
echo "========= COMPUTE-SANITIZER"
planted refused_sanitizer && echo "========= Error: this container does not permit it" && exit 1
planted "${STEP:-none}" && [ "${HOW:-exit}" = finds ] && echo "========= Error: Race reported" && exec sleep 60
planted "${STEP:-none}" && [ "${HOW:-exit}" = hangs ] && exec sleep 60
planted "${STEP:-none}" && echo "========= ERROR SUMMARY: 1 error" && exit 9
# memcheck reports the errors that test_cuda provokes, unless it is told not to; the option is only its own
case " $* " in
*' memcheck '*' --report-api-errors no '*) ;;
*' memcheck '*) echo "========= Program hit cudaErrorMemoryAllocation on CUDA API call to cudaMalloc" && exit 9 ;;
*' --report-api-errors '*) echo "========= Error: no such option" && exit 1 ;;
esac
echo "========= ERROR SUMMARY: 0 errors"
END
stand_in bin/ncu <<'END'
planted refused_ncu && echo "==ERROR== ERR_NVGPUCTRPERM - no permission for the counters" && exit 1
planted "${STEP:-none}" && exit 1
echo "==PROF== Profiling gemm_kernel: 0%....100%"
END
stand_in bin/nvidia-smi <<<'echo 580.1'

# check [OPTIONS] PARTS...: the script; json: what it wrote
check() {
    rm -rf tests/gpu/results
    ./tests/gpu/gpu_check.sh "$@" >"$out" 2>"$err"
    status=$?
    json=$(sed -n 's/^[0-9]* failed; results: //p' "$out")
}

# result NAME: in the JSON. Other arguments: keys of the whole
result() {
    python3 -c 'import json, sys
print(*(s["result"] for s in json.load(open(sys.argv[1]))["steps"] if s["step"] == sys.argv[2]))' "$json" "$1"
}
entry() {
    python3 -c 'import json, sys
value = json.load(open(sys.argv[1]))
for key in sys.argv[2:]:
    value = value[int(key)] if isinstance(value, list) else value[key]
print(value)' "$json" "$@"
}

# steps_of KIND: the names in the JSON
steps_of() {
    python3 -c 'import json, sys
print(*(s["step"] for s in json.load(open(sys.argv[1]))["steps"] if s["kind"] == sys.argv[2]))' "$json" "$1"
}

test_good() {
    check
    same good/status "0 " "$status $(cat "$err")"
    same good/no_failure "" "$(grep -v '^pass' "$out" | head -n -1)"
    holds good/name "DEVICE-DATE.json" "$json" grep -qP '^tests/gpu/results/gpu-x-[\d-]+T\d+\.json$' <<<"$json"
    same good/machine "GPU X, sm_90, 132 multiprocessors|CUDA 13.1|580.1|abc123|False" \
        "$(for key in device driver driver_version commit emulated; do entry $key; done | paste -sd '|')"
    same good/first "build first on_gpu tensor" "$(grep -oP '^pass gpu_check/\K\w+' "$out" | head -n 4 | xargs)"
    same good/figures "naive 91.5 GPU X mnist fp32 2 50000 5" "$({
        entry ablation 0 rung && entry ablation 0 accuracy && entry operations 0 device
        for key in net variant step_ms; do entry training_steps 0 $key; done
        entry pytorch 0 gflops && entry pytorch 1 step_ms
    } | xargs)"
    checks=$(steps_of check) figures=$(steps_of figure)
    same good/measured "bench ncu ncu_tensor pytorch compiled compiled_rest ablation" "$figures"
}

part_of() {
    case $1 in
    mnist | cifar | mnist_learns | bench | ncu* | variants | json) echo speed ;;
    *check) echo sanitizers ;;
    pytorch) echo pytorch ;;
    compiled*) echo compiled ;;
    ablation | same_accuracy | rungs) echo ablation ;;
    *) echo correctness ;;
    esac
}

# Every check fails when its stand-in does; only it, unless what comes after needs it
test_each_check() {
    local name
    # The steps that run a program all fail in the same way; tensor stands for them
    [ -z "${QUICK:-}" ] || checks=$(tr ' ' '\n' <<<"$checks" |
        grep -vxE 'first|layouts|test_cuda|once|again|on_cpu|graph|ddp|dp|dp_same|mnist|cifar|[a-z]*check')
    for name in $checks; do
        PLANT=$name check "$(part_of "$name")"
        if [ "$name" = json ]; then # there is nothing to read
            same planted/json "1 fail" "$status $(grep -oP '^\w+(?= gpu_check/json)' "$out")"
            continue
        fi
        same "planted/$name" "1 fail fail" \
            "$status $(grep -oP "^\w+(?= gpu_check/$name(:|\$))" "$out") $(result "$name")"
    done
    for name in $figures; do # measurements are no checks on a GPU
        PLANT=$name check "$(part_of "$name")"
        same "planted/$name" "0 fail fail" \
            "$status $(grep -oP "^\w+(?= gpu_check/$name(:|\$))" "$out") $(result "$name")"
    done
    for name in bench variants ablation rungs; do # but in the emulator
        PLANT=$name check --emulated "$(part_of "$name")"
        same "planted_emulated/$name" "1 fail fail" \
            "$status $(grep -oP "^\w+(?= gpu_check/$name(:|\$))" "$out") $(result "$name")"
    done
}

test_other_failures() {
    PLANT=test_cuda HOW=says check correctness
    same says/fail "1 fail" "$status $(result test_cuda)"
    line says/why '^fail gpu_check/test_cuda: fail cuda/planted: found a stand-in$'
    sed -i.kept 's/^total=440/total=2/' tests/gpu/gpu_check.sh
    PLANT=tensor HOW=hangs check correctness
    mv tests/gpu/gpu_check.sh.kept tests/gpu/gpu_check.sh
    same hangs/fail "1 fail fail" "$status $(result tensor) $(result test_cuda)"
    line hangs/why '^fail gpu_check/tensor: stopped after [12] s$'
    line hangs/rest '^fail gpu_check/test_cuda: no time left of 2 s$'
}

# total_of SECONDS: what a part may take
total_of() { sed -i "s/^total=[0-9]*/total=$1/" tests/gpu/gpu_check.sh; }

# A tool that is slow, and has found nothing, is skipped, if it may be slow; one that has found something is not
test_slow_tools() {
    total_of 5
    PLANT=memcheck HOW=hangs check sanitizers
    same slow/memcheck "1 fail skip" "$status $(result memcheck) $(result racecheck)" # no time is left for the other
    PLANT=racecheck HOW=hangs check sanitizers
    same slow/racecheck "0 skip" "$status $(result racecheck)"
    PLANT=racecheck HOW=finds check sanitizers
    same slow/finds "1 fail" "$status $(result racecheck)"
    line slow/finds_why '^fail gpu_check/racecheck: stopped after [1-5] s: =* Error: Race reported$'
    total_of 440
}

# What was measured until a step's time was over, or until this script was stopped, is in the JSON
test_cut() {
    total_of 5
    PLANT='cut' check speed
    same cut/lines "fail pass: mnist fp32" \
        "$(result bench) $(result json): $(entry training_steps 0 net) $(entry training_steps 0 variant)"
    total_of 440
    rm -rf hanging tests/gpu/results
    mkdir "$tmp/kept"
    PLANT='cut' OUT=$tmp/kept ./tests/gpu/gpu_check.sh speed >"$out" 2>"$err" &
    local script=$!
    until [ -e hanging ]; do sleep .1; done
    kill "$script"
    wait "$script"
    status=$? json=$(find "$tmp/kept" -name '*.json')
    same stopped/lines "1 pass fail mnist fp32" \
        "$status $(result cifar) $(result bench) $(entry training_steps 0 net) $(entry training_steps 0 variant)"
    line stopped/why '^fail gpu_check/bench: gpu_check.sh was stopped$'
}

test_refused() {
    local name
    PLANT=refused_sanitizer check sanitizers
    same refused/sanitizer "0 skip skip skip skip" \
        "$status $(for name in memcheck racecheck initcheck synccheck; do result $name; done | xargs)"
    line refused/sanitizer_why '^skip gpu_check/racecheck: compute-sanitizer does not work here: .* not permit it$'
    PLANT=no_tensor_cores check correctness
    same refused/tensor_cores "0 skip skip pass" \
        "$status $(result tensor_tests) $(result all_layouts) $(result some_tests)"
    line refused/tensor_cores_why '^skip gpu_check/all_layouts: GPU X, sm_75 has no tensor cores that cnn uses$'
    PLANT=refused_ncu check speed
    same refused/ncu "0 skip skip" "$status $(result ncu) $(result ncu_tensor)"
    line refused/ncu_why '^skip gpu_check/ncu: ncu does not work here: ==ERROR== ERR_NVGPUCTRPERM'
    mv bin/ncu bin/compute-sanitizer .
    check sanitizers speed
    same absent/tools "0 skip skip" "$status $(result memcheck) $(result ncu)"
    line absent/ncu '^skip gpu_check/ncu: ncu is not installed$'
    mv ncu compute-sanitizer bin/
    check no_such_part
    same refused/part 2 "$status"
}

# make bench-gpu: the median of 1, 1, 1 and 9 times the step's time, without the warm-up
test_bench() {
    NETS="mnist,64 resnet18,128" tests/gpu/bench_gpu.sh >"$out" 2>"$err"
    same bench/status "0 " "$? $(cat "$err")"
    line bench/step "^net=mnist batch=64 variant=fp32 options=--kernels,tiled steps=4 step_ms=2 $(
    )img_per_s=32000.0 gflops=500 roofline_ms=0.5 percent_of_roofline=25.0\$"
    line bench/table '^mnist +64 fp32 +2\.000 +32000\.0 +500 +25\.0 +4\.000 +2\.00 +3\.000 +1\.50$'
    line bench/bf16 '^resnet18 +128 bf16 +1\.000 +128000\.0 +1000 +25\.0 +2\.000 +2\.00 +- +-$'
    line bench/graph '^resnet18 +128 bf16\+graph +0\.500 +256000\.0 +2000 +50\.0 +2\.000 +4\.00 +- +-$'
    PLANT=variants NETS=mnist,64 VARIANTS="fp32 fp16" MODES=none tests/gpu/bench_gpu.sh >"$out" 2>"$err"
    same bench/refused_status "0 " "$? $(cat "$err")"
    line bench/refused '^net=mnist batch=64 variant=fp16 options=.* refused: no fp16 here$'
    same bench/only_fp32 "fp32" "$(awk '/^mnist/ { print $3 }' "$out" | xargs)"
    LIMITS=none NETS=mnist,64 VARIANTS=tf32 tests/gpu/bench_gpu.sh >"$out" 2>"$err"
    line bench/no_limits '^net=mnist batch=64 variant=tf32 .* step_ms=2 img_per_s=32000.0$'
    line bench/no_limits_in_table '^mnist +64 tf32 +2\.000 +32000\.0 +- +- +- +- +- +-$'
    STEP=x PLANT=x NETS=mnist,64 tests/gpu/bench_gpu.sh >"$out" 2>"$err"
    same bench/failed 1 "$?"
    line bench/failed_why '^net=mnist batch=64 variant=fp32 .* failed: planted$'
}

test_good
export NETS=mnist,64 # one is enough from here on
test_each_check
test_other_failures
test_slow_tools
test_cut
test_refused
test_bench
exit 0
