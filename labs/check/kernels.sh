# Labs 4 to 7 and 10: a student's kernels, in the emulator or for a GPU. Sourced by their labNN.sh, which set may_call
# and, for parts of cnn_kernels.cu that have to define a kernel and to check its launch, launching: their IDs.
# shellcheck shell=bash disable=SC2154 # may_call

# DEVICE=gpu or DEVICE=emulator selects; by default a GPU, if there is one.
on_gpu() {
    local found=emulator
    if nvidia-smi -L >/dev/null 2>&1; then found=gpu; fi
    [ "${DEVICE:-$found}" = gpu ]
}

# In place of sections 6 and 7, the tiled matrix products, where nothing else is needed of them
# shellcheck disable=SC2034 # labs 4 and 6 read it
without_products='static size_t parts_size(size_t, size_t, size_t) { return 0; }
static double peak_gflops(void) { return 0; }
enum { PASSES };
static bool stores_moments(const Layer *, size_t) { return false; }
static size_t moments_size(const Layer *, size_t) { return 0; }
struct Tiled;
template <class T, class KERNELS> static void conv2d_forward(Work w) { (void)w; }
#define CONV2D_OF(T, KERNELS) T, conv2d_forward_naive, conv2d_backward_naive'

# cut_kernels LAB FIRST INSTEAD [own]: the kernels with INSTEAD for the sections FIRST to 7, since those take long to
# compile; own: without cuda_kernels() and what it needs. Within the parts, the names of functions outside of them are
# errors, but for those of $may_call; so are CUDA's functions.
cut_kernels() {
    INSTEAD=$3 awk -v lab="$1" -v first="$2" -v tables="${4:-}" -v may_call="$may_call" -v launching=" ${launching:-} " '
        function name_of(line) {
            if (line !~ /^(static|extern|template|    gemm)/ || !match(line, /[A-Za-z0-9_]+\(/)) return ""
            return substr(line, RSTART, RLENGTH - 1)
        }
        BEGIN {
            instead = ENVIRON["INSTEAD"]
            begins = "^ */[*] LAB " lab "[.][0-9] BEGIN"; ends = "^ */[*] LAB " lab "[.][0-9] END"
            count = split(may_call, list, " ")
            for (i = 1; i <= count; i++) allowed[list[i]] = 1
        }
        NR == FNR { # first pass: the names that are defined outside
            if ($0 ~ begins) inside = 1
            name = inside ? "" : name_of($0)
            if (name != "" && name !~ /^__|^sizeof$/ && !(name in allowed)) forbidden[name] = 1
            if ($0 ~ ends) inside = 0
            next
        }
        $0 ~ "^/[*] ==== " first "[.]" { cutting = 1; print instead }
        $0 ~ (tables == "own" ? "^static Device make_device" : "^/[*] ==== 8[.]") { cutting = 0; print "#line " FNR " \"cnn_kernels.cu\"" }
        tables == "own" && /^\/\/ T: the type of activations/ { cutting = 1 }
        cutting { next }
        $0 ~ ends {
            if (must_launch && !stub && !global)
                print "#error a kernel is marked __global__: static __global__ void name(...)"
            if (must_launch && !stub && !checked)
                print "#error a launch returns no error: put CHECK_LAUNCH() after it"
            for (name in forbidden) print "#undef " name
            print "#line " FNR " \"cnn_kernels.cu\""
            inside = 0
        }
        inside {
            line = $0
            gsub(/"([^"\\]|\\.)*"/, "\"\"", line)
            sub(/\/\/.*/, "", line)
            stub = stub || /is not done: /
            global = global || line ~ /__global__/
            checked = checked || line ~ /CHECK_LAUNCH *\(|LAUNCH *\(|CHECK *\(/
            while (match(line, /[A-Za-z_][A-Za-z0-9_]*/)) {
                word = substr(line, RSTART, RLENGTH)
                line = substr(line, RSTART + RLENGTH)
                if ((word ~ /^(cu[A-Z]|cuda[A-Z])/ && !(word in allowed)) ||
                    word ~ /^(extern|emu|EMU_.*|lab_.*|__tsan.*|nccl.*)$/)
                    print "#error " word " has no use in this task: kernels compute, and nothing is copied"
            }
        }
        { print }
        $0 ~ begins {
            for (name in forbidden) print "#define " name " " name "_is_no_part_of_this_task"
            print "#line " FNR + 1 " \"cnn_kernels.cu\""
            inside = 1
            must_launch = index(launching, " " $3 " ")
            stub = global = checked = 0
        }' cnn_kernels.cu cnn_kernels.cu
}

# emulated_kernels OBJECT NAME COMPILER OPTIONS...: OBJECT, of NAME.cu in the emulator
emulated_kernels() {
    { echo '#line 1 "cnn_kernels.cu"' && sed -f tests/emulator/cuda_on_cpu.sed "$2.cu"; } |
        "$3" -std=c++17 -march=native -Wno-unknown-pragmas -I. -include labs/check/lab04_launches.h \
            "${@:4}" -x c++ -c - -o "$1"
}

# emulated PROGRAM NAME COMPILER OPTIONS...: PROGRAM, of NAME.o and PROGRAM.o, those kernels
emulated() { emulated_kernels "$1.o" "${@:2}" && "$3" -g "$2.o" "$1.o" -o "$1" -lm -lpthread; }

# What the emulator and its runtime use is listed, since compiling them once more takes longer than any test.
# only_emulator_calls OBJECT [MORE]
only_emulator_calls() {
    local own='_?Z[A-Za-z0-9_]+|cxa_[a-z_]+|gxx_personality_v0|dso_handle|GLOBAL_OFFSET_TABLE_|Unwind_[A-Za-z]+|lab_[a-z_]+|'
    own+='libc_single_threaded|sscanf|errno_location|tls_get_addr|abort|atol|strtol[a-z]*|clock_gettime|getenv|'
    own+='m(map|protect|unmap)|posix_memalign|aligned_alloc|sig[a-z]+|sysconf|std(err|out)|realloc|[a-z]+jmp|'
    own+='pthread_(self|create|join|detach|once|(mutex|cond|key)_[a-z]+)|'
    own+='tsan_[a-z0-9_]+|l?l?(rint|round)[fl]?|(copysign|ilogb|ldexp|nearbyint|rint|trunc)[fl]?'
    "${CXX:-g++}" -x c++ -c /dev/null -o empty.o && only_harmless_calls empty.o "$1" "$own${2:+|$2}"
}

# for_gpu PROGRAM NAME: the same for the GPU of this machine
for_gpu() {
    local nvcc
    nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
    "$nvcc" -std=c++17 -O2 -arch="${CUDA_ARCH:-native}" -I. -c "$2.cu" -o "$1.o" && "$nvcc" "$2.o" "$1.o" -o "$1"
}

# ---- Labs 5 and 10, whose kernels are in a file of their own

# What their parts may call besides the file's functions. The words before ( in C count as calls.
# shellcheck disable=SC2034 # labs 5 and 10 read it
in_any_kernel='CHECK CHECK_LAUNCH __syncthreads min max fmaf printf dim3
    if for while switch return sizeof int unsigned float const static_assert __launch_bounds__ __align__ alignas
    bool char short long double void size_t uint8_t uint16_t uint32_t'

# What their main() calls, and the emulator when it counts
# shellcheck disable=SC2034
in_its_main='exit|fopen|fclose|readlink|executable_start|qsort|rand'

# vet_kernel ID NAMES CALLS: calls of what is not in may_call nor defined in the part; NAMES, a regular expression, and
# what only the host has a use for. CALLS, for the message. dim3 grid(...) declares variables.
vet_kernel() {
    local words="emu|EMU_.*|CUEMU.*|lab[0-9]*_.*|lab10|__tsan.*|__builtin.*|cu[A-Z].*|cuda.*|changes|$2"
    words+='|std|w?mem(cpy|move|set|ccpy)|w?mempcpy|bcopy|swab|st[pr]n?cpy' # copies that nobody would count
    awk -f "$home/labs/check/code.awk" "$parts/$1" |
        awk -v id="$1" -v may_call="${may_call//$'\n'/ }" -v words="^($words)$" -v calls="$3" '
        BEGIN { split(may_call, list, " "); for (i in list) may[list[i]] = 1 }
        { text[NR] = $0; sub(/__launch_bounds__ *\([^)]*\)/, "") }
        # auto NAME = a lambda, or auto *NAME = a kernel
        match($0, /auto +[*]?[A-Za-z_][A-Za-z0-9_]* *=/) {
            name = substr($0, RSTART + 5, RLENGTH - 6)
            gsub(/[* ]/, "", name)
            may[name] = 1
        }
        # a definition, whose name may also stand at the beginning of its second line
        /^(static|template|inline|__global__|__device__|void|float|int|[A-Za-z_0-9]+\(|    [a-z_0-9]+\((Conv|Sizes))/ &&
            !/;[ \t]*$/ && match($0, /[A-Za-z_][A-Za-z0-9_]*\(/) { may[substr($0, RSTART, RLENGTH - 1)] = 1 }
        END {
            for (n = 1; n <= NR; n++)
                for (line = text[n]; match(line, /[A-Za-z_][A-Za-z0-9_]*[ \t]*(\(|<<<)?/);) {
                    word = substr(line, RSTART, RLENGTH)
                    line = substr(line, RSTART + RLENGTH)
                    call = sub(/[ \t]*(\(|<<<)$/, "", word)
                    if (word ~ words || call && !(word in may) && text[n] !~ /^ *(const +)?dim3 /) {
                        print "TODO " id ", line " n ": " word ": a part may call " calls " and what it defines itself"
                        exit
                    }
                }
        }'
}

# no_arrays OBJECT: the parts have no arrays outside of a kernel: accesses to those would not be counted.
no_arrays() {
    local found
    found=$(nm -C "$1" | sed -nE 's/^[0-9a-f]+ [bBdDu] (guard variable for )?//p' |
        grep -vE '^(emu::|std::|lab10::|lab_|changes$|__tls_guard$)')
    [ -z "$found" ] || {
        echo "error: variable $(head -n 1 <<<"$found"): declare it in the kernel, and not static"
        return 1
    }
}
