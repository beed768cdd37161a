# Lab 2: a convolution whose loops the compiler can vectorize, and seven runs: a line profile, a table of layers, and
# five that differ in one thing each. check.sh reads this.
# shellcheck shell=bash disable=SC2154 # check.sh exports home and from
# shellcheck source=labs/check/lab01.sh
. "$home/labs/check/lab01.sh"

tests() {
    cat <<'END'
2|-|the seven run folders exist, are valid and complete
2|-|their counts agree: epochs x ceil(N / B) steps, images, throughput x time
2|-|the line profile counts every step: hits = epochs x ceil(N / B)
2|-|the profile's lines cover at least 95 % of the training time
3|-|each run differs from another one in only one thing
2|-|all runs have the same losses: faster code computes the same
2|-|layers.csv has all rows, and its numbers agree
3|2.1|the convolution computes what it did before
2|2.1|its innermost loop goes from one number to the next: it runs over the output channels
END
}

build() {
    if wanted 6 7; then make cnn CC="${CC:-gcc}" NO_CUDA=1 NO_MPI=1 COMMIT=checker || return; fi
    if wanted 8; then build_layers || return; fi
    if wanted 9; then build_order; fi
}

# Without OpenMP, and with a function call at each load and store; lab02.c counts them. The object without these calls
# shows what the part calls itself.
build_order() {
    bare_sources lab02.c && compile_part part.o && (cd bare && compile_part part.o) &&
        only_harmless_calls bare/part.o part.o && compile_part counted.o -fsanitize=thread -finline &&
        "${CC:-gcc}" -std=gnu17 -O1 -g1 -Wno-unknown-pragmas labs/check/lab02.c counted.o -o lab02 -lm &&
        "${CC:-gcc}" -std=gnu17 -O1 -g1 -w labs/check/{lab02,apart}.c bare/part.o -o order -lm -lpthread
}
compile_part() { # compile_part OBJECT OPTIONS...
    { sections 1. 2. && echo 'void part(Work w) { conv2d_forward_naive(w); }'; } >part.c &&
        "${CC:-gcc}" -std=gnu17 -O1 -g1 -w "${by_function[@]}" "${@:2}" -c part.c -o "$1"
}

run() {
    local token
    case $1 in
    8) LAB_AND_TEST='LAB=2 TEST=8' ./checker 1 ;;
    9) ./order ;;
    *) read -r token && bash "$home/labs/check/runs.sh" 2 "$1" "$from" && echo "$token" >&9 ;;
    esac
}
