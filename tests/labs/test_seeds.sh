#!/usr/bin/env bash
# The handouts of five courses, step by step: each of their commands and questions is a line below, which runs what this
# project has for it, or names why it is not run here: it needs a device, a cluster or a network. Prints
# `pass seeds/COURSE/STEP`, `fail ...` or `skip ...: why`. EMU=PATH: another cnn-emu.
suite=seeds
# shellcheck source=tests/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1
emulator=${EMU:-$repo/cnn-emu}
cp -r "$repo/labs" "$repo/slurm" . && ln -s "$cnn" cnn && ln -s "$emulator" cnn-emu && mkdir runs || exit 1
tiny="--no-cuda --dataset synthetic --limit-train 64 --limit-test 16"
virtual="--dataset synthetic --limit-train 4 --limit-test 2 --batch-size 2 --epochs 1"

# row STEP REGEX COMMAND: the command succeeds and prints such a line
row() {
    if [[ $3 = *cnn-emu* && ! -x $emulator ]]; then
        skip "$course/$1" "no ./cnn-emu; make emulate"
        return
    fi
    if [[ $3 =~ \.py|tools/monitor|report\.md ]] && ! command -v python3 >/dev/null; then
        skip "$course/$1" "python3 is not installed" # for the command, or for the one that wrote the report
        return
    fi
    bash -o pipefail -c "$3" >"$out" 2>"$err" </dev/null
    status=$?
    [ $status = 0 ] || fail "$course/$1" "success of $3" "$status and $(tail -n 2 "$err")"
    [ $status != 0 ] || holds "$course/$1" "a line $2 of $3" "$(tail -n 4 "$out")" grep -qP -- "$2" <(cat "$out" "$err")
}

# elsewhere STEP WHY: why it is not run here, and which test does what can be done without
elsewhere() { skip "$course/$1" "$2"; }

# ---- A week on one GPU: MNIST, a line profiler, workers

course=usc
elsewhere environment "conda and modules: not needed, since make is all"
elsewhere clone "a network"
row read-the-network '^  1199882 parameters, ' "./cnn $tiny --dry-run"
row arguments-of-a-convolution '^ +1  conv1 +conv2d 3x3 stride 1 padding 0 +26 x 26 x 32 ' "./cnn $tiny --dry-run"
row profiled-training '^Function: train at line \d+' "./cnn $tiny --epochs=3 --profile --out runs/profiled"
row without-accelerator '^Settings: .* --no-cuda on$' "./cnn ${tiny#--no-cuda} --no-accel --dry-run"
elsewhere job-script "a cluster; tests/cluster/test_slurm.sh submits slurm/single.sb"
elsewhere environment-of-the-job "a cluster: the job scripts print host name and SLURM_ variables"
row efficiency-of-a-job '^CPU Efficiency: [\d.]+% of \d\d:\d\d:\d\d core-walltime$' "./cnn $tiny --epochs 1"
row memory-of-a-job '^Memory Efficiency: [\d.]+% of [\d.]+ GB$' "./cnn $tiny --epochs 1"
row table-of-lines '^Line # +Hits +Time +Per Hit +% Time +Line Contents$' "cat runs/profiled/profile.txt"
loading="--model cifar --augment elastic --resident off --batch-size 16 --epochs 1"
row slowest-line '% |next_batch\(comm\)' "./cnn $tiny $loading --workers 1 --profile"
elsewhere watch-the-gpu "a device; tests/labs/test_tools.sh gives the monitor a stand-in for nvidia-smi"
row watch-a-run 'cpu_percent' "labs/tools/monitor --interval 0.1 --csv runs/monitor.csv ./cnn $tiny --epochs 1 --quiet"
row tuning-guide '^- Load in worker processes' "cat labs/tuning.md"
row pinned-memory 'from pinned memory$' "./cnn-emu --model lenet $virtual --resident off --pin-memory on"
row pageable-memory 'from pageable memory$' "./cnn-emu --model lenet $virtual --resident off --pin-memory off"
row one-worker ' --workers 1 ' "./cnn $tiny $loading --workers 1"
losses() { grep '^Train Epoch' "$out"; }
few=$(losses)
row eight-workers ' --workers 8 ' "./cnn $tiny $loading --workers 8"
same $course/workers-change-nothing-else "$few" "$(losses)"

# The homework: 32 and 64 filters of 5 x 5 with padding 2, 1024 outputs
homework() {
    awk '/^typedef struct Model/ {
            print "static size_t model_five(Net *net, size_t x) {"
            print "    x = maxpool2d(net, relu(net, conv2d(net, x, 32, 5, 1, 2)), 2, 2, 0);"
            print "    x = maxpool2d(net, relu(net, conv2d(net, x, 64, 5, 1, 2)), 2, 2, 0);"
            print "    x = linear(net, relu(net, linear(net, x, 1024)), net->classes);"
            print "    return log_softmax(net, x);"
            print "}"
        }
        { print }
        /^static const Model models\[\]/ {
            print "    {.name = \"five\", .build = model_five, .datasets = \"mnist fashion-mnist synthetic\","
            print "     .synthetic_like = \"mnist\", .defaults = \"\"},"
        }' "$repo/cnn.c" >cnn.c
    ln -s "$repo/cnn_kernels.c" . && gcc -std=gnu17 -O1 -march=native -fopenmp cnn.c -o five -lm -lpthread
}
if homework; then
    row homework-network '^  3274634 parameters, ' "./five --model five $tiny --epochs 1 --dry-run"
    row homework-shapes '^ +7 .*linear 3136 -> 1024 ' "./five --model five $tiny --epochs 1 --dry-run"
    for workers in 1 8; do
        row homework-workers-$workers 'next_batch' \
            "./five --model five $tiny --limit-train 16 --epochs 5 --augment elastic --resident off \
            --workers $workers --profile"
    done
else
    fail $course/homework "a program with another network" "none"
fi
row homework-report '^#' "labs/tools/report.py runs && cat runs/report.md"
rm -f runs/report.* runs/report_full.md runs/tables.md

# ---- A workshop: the same network as a script

course=c-dac
elsewhere login "a cluster"
elsewhere environment "conda and modules: not needed, since make is all"
elsewhere download "a network; tests/program/test_get_data.sh has a server of its own"
row defaults '^  --gamma M .*default: 0.7' "./cnn --help"
same $course/all-options "batch-size test-batch-size epochs lr gamma no-cuda dry-run seed log-interval save-model" \
    "$(for option in batch-size test-batch-size epochs lr gamma no-cuda dry-run seed log-interval save-model; do
        grep -qE "^  --$option " "$out" && echo $option
    done | xargs)"
row options '^Train set size: 64$' \
    "./cnn $tiny --batch-size 64 --test-batch-size 1000 --epochs 1 --lr 1.0 --gamma 0.7 --seed 1 \
    --log-interval 10 --save-model"
line $course/sizes '^Test set size: 16$'
line $course/training-line '^Train Epoch: 1 \[0/64 \(0%\)\]\tLoss: \d+\.\d{6}$'
line $course/test-line '^Test set: Average loss: \d+\.\d{4}, Accuracy: \d+/16 \(\d+%\)$'
row saved-model '^mnist_cnn.safetensors$' "ls *.safetensors"
row dry-run '^Test set: ' "./cnn $tiny --dry-run"
row workers-of-slurm ' --workers 4 ' "SLURM_CPUS_PER_TASK=4 ./cnn $tiny --dry-run"
row profile '^Total time: [\d.]+ s$' "./cnn $tiny --epochs 1 --profile"
elsewhere submit "a cluster; tests/cluster/test_slurm.sh submits slurm/single.sb"
elsewhere more-cores "a cluster; tests/cluster/test_slurm.sh submits slurm/workers_array.sb"

# ---- A summer school: ResNets on CIFAR-100, one GPU, ddp and dp on two

course=lumi
small="--no-cuda --oversubscribe --model resnet8 --dataset synthetic --limit-train 64 --limit-test 8 --epochs 2 --quiet"
elsewhere watch-rocm-smi "a device on a cluster; tests/labs/test_tools.sh gives the monitor a stand-in for rocm-smi"
elsewhere look-at-a-job "a cluster; tests/cluster/test_slurm.sh follows a job as slurm.md says"
elsewhere resnet152-three-jobs "a device and a cluster; tests/cluster/test_slurm.sh submits the scripts"
row task-1-one-device '^epoch=2 ' "./cnn $small --batch-size 16 --out runs/one"
row task-2-ddp '^ranks=2 compute_s=' \
    "./cnn ${small/--quiet/} --replicas 2 --parallel ddp --batch-size 16 --out runs/ddp"
row task-3-dp '^ranks=2 compute_s=' "./cnn ${small/--quiet/} --replicas 2 --parallel dp --global-batch 16 --out runs/dp"
row question-1-memory '^Memory in MB: parameters .*, together ' "./cnn ${small/--quiet/} --dry-run"
row question-2-first-epoch '^epoch,step,.*,seconds,.*,warmup$' "head -n 1 runs/one/steps.csv"
row question-3-iterations '^4 2 4$' "grep -ohP '\"iterations\":\\s*\\K\\d+' runs/{one,ddp,dp}/run.json | xargs"
row question-4-overhead '^ranks=2 .* exposed_comm_s=' "./cnn ${small/--quiet/} --replicas 2 --batch-size 16"
# of three ranks, the master copies more than each of the others
row question-5-bytes-of-dp '^more$' \
    "./cnn $small --replicas 3 --parallel dp --global-batch 15 --out runs/dp3 >/dev/null &&
    awk -F, 'NR == 2 { master = \$16 } NR == 3 && master > \$16 { print \"more\" }' runs/dp3/steps.csv"
for model in "resnet50 23705252" "resnet152 58341028"; do
    row "question-6-${model% *}" "${model#* } parameters" \
        "./cnn --no-cuda --model ${model% *} --dataset synthetic --limit-train 1 --limit-test 1 \
        --batch-size 1 --dry-run"
done
row images-of-imagenet-size '^ +1 +conv1 +conv2d 7x7 stride 2 padding 3 +112 x 112 x 16 ' \
    "./cnn $tiny --model resnet8 --stem imagenet --resize 224 --batch-size 1 --limit-test 1 --dry-run"
row question-7-batch '^Memory in MB.* activations 44\.' "./cnn ${small/--quiet/} --batch-size 64 --dry-run"
elsewhere tensorboard "a browser and a package; tests/labs/test_tools.sh reads the event files"
row trace-of-steps '^epoch=1 ' "./cnn $small --batch-size 16 --trace runs/trace.json --trace-steps 1:3"
trace_is_good $course/trace runs/trace.json '0:steps:step 1,0:steps:step 2'

course=csc
row predict-memory '^Memory in MB of each device: ' "./cnn ${small/--quiet/} --replicas 2 --parallel dp --dry-run"
row samples-every-tenth '^time_s,' \
    "labs/tools/monitor --interval 0.1 --csv runs/w1.csv ./cnn $tiny $loading --workers 1 --quiet &&
    head -n 1 runs/w1.csv"
row loss-of-each-rank '^0 1$' "awk -F, 'NR == 2 || NR == 3 { print \$3 }' runs/ddp/steps.csv | xargs"
row batch-by-world '^4$' \
    "./cnn $small --replicas 2 --batch-size 8 --out runs/divided >/dev/null &&
    grep -ohP '\"iterations\":\\s*\\K\\d+' runs/divided/run.json"

# ---- A tutorial: profile a ResNet, mixed precision, layout, fusion, many GPUs

course=sc20
for name in bs128 bs128-opt bs512-opt bs1024-opt bs2048-opt bs1024-warmup-opt bs2048-warmup-opt \
    bs256{,-amp,-amp-nhwc,-amp-nhwc-extra-opts}{,-prof}; do
    row "configuration-$name" '^--model resnet50 --stem 7' "cat slurm/configs/$name.args"
done
row configuration-runs '^epoch=1 ' "./cnn-emu @slurm/configs/bs128.args --model resnet8 $virtual --quiet"
row configuration-opt-runs '^epoch=1 ' \
    "./cnn-emu @slurm/configs/bs1024-warmup-opt.args --model resnet8 $virtual --global-batch 2 \
    --warmup-epochs 0 --autotune off --quiet"
row images-per-second '^INFO - Epoch: 1, Iteration: 0, Avg img/sec: [\d.]+$' "./cnn ${small/--quiet/--log-interval 1}"
line $course/start '^INFO - Starting Training Loop\.\.\.$'
line $course/accuracies '^epoch=2 .* train_accuracy=[0-9.]+ .* accuracy=[0-9.]+ '
line $course/time-of-an-epoch '^INFO - Time taken for epoch 2 is [\d.]+ sec$'
for label in PROF AMP NHWC EXTRA; do
    row "label-$label" "# $label" "grep -h '# $label' '$repo/cnn.c' '$repo/cnn_kernels.cu'"
done
elsewhere timelines "a device; lab 7 draws the emulator's timelines, and has the commands for nsys"
row checkpoint '^epoch=2 ' "./cnn $small --batch-size 16 --checkpoint runs/saved --save-every 1"
row restored '^Resuming from ' "./cnn ${small/--quiet/} --batch-size 16 --checkpoint runs/saved --resume --epochs 2"
row tricks-warm-up '^epoch=2 ' "./cnn $small --batch-size 16 --warmup-epochs 1 --lr-scaling sqrt"
elsewhere many-nodes "a cluster; tests/cluster/test_slurm.sh submits slurm/multinode.sb and slurm/scaling.sb"
row weak-scaling '^weak,cpu,2,ddp,' \
    "labs/tools/study.py scaling runs/scaling --counts 1 2 --batches 16 --repeats 1 --epochs 1 \
    --limit 64 --model lenet --program ./cnn -- --dataset synthetic --oversubscribe && cat runs/scaling/scaling.csv"

# ---- A project: a timing study of CIFAR-10's network, and a report

course=msu
study="--program ./cnn --model cifar --epochs 1 --limit 32 -- --dataset synthetic"
row one-source-for-all-devices '^Device: cpu' "./cnn --no-cuda --model cifar $tiny --epochs 1"
for device in cpu single multi; do
    row "make-$device" "study.py train $device runs --batches 250 --model cifar --epochs 20" \
        "make -n -C '$repo' NO_CUDA=1 $device"
done
row cpu 's of training, accuracy' "labs/tools/study.py train cpu runs --batches 16 $study"
row single 'Emulated' "labs/tools/study.py train single runs --batches 16 --emulate ${study/.\/cnn/.\/cnn-emu}"
row multi "^multi: --parallel ddp, as DistributedDataParallel" \
    "labs/tools/study.py train multi runs --batches 16 --emulate ${study/.\/cnn/.\/cnn-emu}"
row clean 'rm ' "make -n -C '$repo' NO_CUDA=1 clean"
elsewhere three-jobs "a cluster; tests/cluster/test_slurm.sh submits slurm/timing_array.sb"
row widened ' conv2d 5x5 .* 28 x 28 x 64 ' "./cnn --model cifar --width 64 $tiny --dry-run"
row usual-width '^  62006 parameters' "./cnn --model cifar $tiny --dry-run"
row class-by-class '^Accuracy for class: \S+ +is ' "./cnn --model cifar $tiny --epochs 1 --per-class --out runs/classes"
row truth-and-prediction '^image,label,predicted' "head -n 1 runs/classes/predictions.csv"
row batches '^cpu,single,.*,50,|^cpu,.*,32,' \
    "labs/tools/study.py run runs/study --batches 16 32 --repeats 2 --gpus 1 $study; cat runs/study/study.csv"
row report '^# Timing Results$' "labs/tools/report.py runs/study && cat runs/study/report.md"
row report-sections '^# Concluding Discussion and Future Work$' "cat runs/study/report.md"
elsewhere one-core-before-and-after "minutes; tests/labs/test_ablation.sh climbs slurm/configs/one-core.txt"
elsewhere other-gpus "a device: run.json records which one it was"
