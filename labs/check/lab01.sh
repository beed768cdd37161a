# shellcheck shell=bash disable=SC2154 # check.sh sets by_function
# Lab 1, a CNN by hand; see check.sh.

tests() {
    cat <<'END'
4|1.1|convolution, forward
3|1.2|convolution, gradients of the weights and of the bias
3|1.3|convolution, gradient of its input
2|1.4|max-pool, forward
2|1.5|max-pool, gradient of its input
2|1.6|gradient of log-softmax
2|1.7|the network lenet
2|1.1 1.2 1.3 1.4 1.5 1.6 1.7|all parts together: lenet learns
END
}

# sections NUMBER...: these sections of cnn.c. Lines of a part are counted from its beginning, and the
# stub of 1.2 is left out, since it would end a test of 1.3.
sections() {
    awk -v wanted=" $* " '
        /^\/\* ==== [0-9]+\. / { on = index(wanted, " " $3 " ") }
        /^#(ifndef|endif \/\/) CNN_DECLARATIONS_ONLY/ { next }
        /^ *die\(1,$/ { held = $0; next }
        held != "" { if (!/TODO 2 is not done/) out(held "\n" $0); held = ""; next }
        { out($0) }
        /^ *\/\* LAB [0-9]+\.[0-9] BEGIN/ { out("#line 1 \"TODO " $3 "\"") }
        /^ *\/\* LAB [0-9]+\.[0-9] END/ { out("#line " NR + 1 " \"cnn.c\"") }
        function out(text) { if (on) print text }' cnn.c
}

build() { build_layers; }

# The tests of the layers. Without cnn_kernels.c: a part that calls a fast kernel does not compile. Also of lab 2.
build_layers() {
    sections 1. 2. 3. >layers.c && sections 4. 5. >models.c && bare_sources lab01.c &&
        (cd bare && sections 1. 2. 3. >layers.c && sections 4. 5. >models.c) || return
    make -s -f - CC="${CC:-gcc}" BY_FUNCTION="${by_function[*]}" NO_CUDA=1 NO_MPI=1 OPT=-O1 \
        lab01 checker <<'END' || return
include Makefile
lab01.o bare/lab01.o: labs/check/lab01.c layers.c models.c
	cd $(@D) && $(BUILD) -DREAL=double -I. $(BY_FUNCTION) -Wno-unused-function -Werror=implicit-function-declaration \
		-Werror=return-type -c $< -o lab01.o
lab01: lab01.o
	$(BUILD) $< -o $@ $(LIBS)
checker: bare/lab01.o labs/check/apart.c
	$(BUILD) $^ -o $@ $(LIBS)
END
    only_harmless_calls bare/lab01.o lab01.o
}

# The accuracy is read from the run folder, not from the output, to which the student's parts can print.
learns() {
    local accuracy least=50
    make -s cnn CC="${CC:-gcc}" NO_CUDA=1 NO_MPI=1 || return
    if ! ./cnn --kernels naive --model lenet --dataset synthetic --limit-train 3200 \
        --limit-test 500 --epochs 1 --batch-size 8 --seed 1 --threads 1 --out lenet \
        </dev/null 9>&- >train.txt 2>&1; then
        echo "./cnn --kernels naive --model lenet ended with an error:"
        tail -n 3 train.txt
        return 1
    fi
    accuracy=$(awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) at = $i == "accuracy" ? i : at }
        END { if (NR > 1) print $at }' lenet/epochs.csv)
    awk -v a="$accuracy" -v least="$least" 'BEGIN { exit !(a != "" && a + 0 >= least) }' && return
    echo "After 3200 images lenet classifies ${accuracy:-?} % of 500 synthetic test images correctly;"
    echo "expected at least $least %. Guessing gives 10 %. Do the tests before this one pass?"
    return 1
}

run() {
    if [ "$1" = 8 ]; then
        learns && cat >&9
    else
        ./checker "$1"
    fi
}
