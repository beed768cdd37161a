/* fuzz.c - what cnn.c reads from users and strangers, fed with arbitrary bytes: one program, whose
   environment says FUZZ=idx, cifar, resume (safetensors and the metadata of a checkpoint) or
   options (the command line and @FILE). test_fuzz.sh runs it.

   Compiled with -fsanitize=fuzzer it is a libFuzzer target; with -DREPLAY it reads the inputs that
   its arguments name, for compilers without libFuzzer. SEEDS=DIR: it writes good inputs into DIR,
   where the search starts, and ends.

   An input is refused by die(), whose hook jumps back here; what the input had opened or allocated
   is then released. Anything else than a result or a refusal in one line is a finding: abort(). */

#define _GNU_SOURCE 1 // as cnn.c does
#include <setjmp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { KEPT = 64, FILES = 2, MOST_WORDS = 64, MOST_MEMORY = 16 << 20 };

static void *kept_memory[KEPT];
static FILE *kept_files[KEPT];
static jmp_buf refused;

static void finding(const char *what) {
    dprintf(STDERR_FILENO, "finding: %s\n", what);
    abort();
}

// Puts `new` in the place of `old`: NULL is a free place.
static void replace(void **list, const void *old, void *new) {
    for (size_t i = 0; i < KEPT; i++)
        if (list[i] == old) {
            list[i] = new;
            return;
        }
    if (new)
        finding("more is open than this program can note");
}

static int fuzz_memalign(void **to, size_t alignment, size_t bytes) {
    if (bytes > MOST_MEMORY)
        finding("memory that no small input can need");
    if (posix_memalign(to, alignment, bytes) != 0)
        return 12; // ENOMEM
    replace(kept_memory, NULL, *to);
    return 0;
}

static void fuzz_free(void *memory) {
    if (memory)
        replace(kept_memory, memory, NULL);
    free(memory);
}

static FILE *keep(FILE *f) { // to be closed after a refusal
    if (f)
        replace((void **)kept_files, NULL, f);
    return f;
}

static int fuzz_fclose(FILE *f) {
    replace((void **)kept_files, f, NULL);
    return fclose(f);
}

static void fuzz_exit(int status) {
    longjmp(refused, 2 + status);
}

// cnn.c with these instead of libc's. Compressed data come from the file itself: its size is not
// known before its end, which is what matters, and gzip is not what is tested.
#define posix_memalign fuzz_memalign
#define free fuzz_free
#define fopen(path, mode) keep(fopen(path, mode))
#define fdopen(fd, mode) keep(fdopen(fd, mode))
#define fclose fuzz_fclose
#define popen(command, mode) fopen(getenv("CNN_FILE"), "rb")
#define pclose fuzz_fclose
#define exit(status) fuzz_exit(status)
#define CNN_NO_MAIN
#define CNN_NO_KERNELS
#include "../../cnn.c"
#undef exit

static char message[16384]; // what die() has written to stderr
static char folder[PATH_SIZE];
static const char *const file_names[FILES] = {"0", "1"}, *const gzip_names[FILES] = {"2", "3"};
static int file_numbers[FILES];

static void jump_back(void) {
    longjmp(refused, 1);
}

// One line that begins as all errors of cnn do.
static void check_message(void) {
    const size_t length = strlen(message);
    if (strncmp(message, "cnn: error: ", 12) != 0 || strchr(message, '\n') != message + length - 1)
        finding("expected one line that begins with cnn: error:");
    for (size_t i = 0; i + 1 < length; i++)
        if ((unsigned char)message[i] < ' ' || message[i] == 127)
            finding("a control character in a message");
}

static void set_file(size_t i, const uint8_t *data, size_t size) {
    if (ftruncate(file_numbers[i], 0) != 0 ||
        pwrite(file_numbers[i], data, size, 0) != (ssize_t)size)
        finding("cannot write a file in memory");
}

static size_t file_path(char path[PATH_SIZE], size_t i) {
    return (size_t)snprintf(path, PATH_SIZE, "%s/%s", folder, file_names[i]);
}

/* ---- Data sets ------------------------------------------------------------------------------- */

static void check_dataset(Dataset *data, size_t limit) {
    static volatile uint8_t sum;
    if (data->count == 0 || data->count > limit)
        finding("the number of images");
    for (size_t i = 0; i < data->count * shape_size(data->info->shape); i++)
        sum = (uint8_t)(sum + data->images[i]);
    for (size_t i = 0; i < data->count; i++)
        if (data->labels[i] >= data->info->classes)
            finding("a label of no class");
    free_dataset(data);
}

// Byte 0: bit 0: compressed, bits 1 and up: the limit; bytes 1 and 2: the length of the first file.
static void read_dataset(const uint8_t *input, size_t size, DatasetInfo info) {
    const size_t limit = size && input[0] >> 1 ? input[0] >> 1 : UINT32_MAX;
    const char *const *names = size && input[0] & 1 ? gzip_names : file_names;
    Dataset data = {.info = &info};
    if (size < 3)
        return;
    memcpy(info.files[0], names, FILES * sizeof *names);
    const size_t first = min_size(input[1] | (size_t)input[2] << 8, size - 3);
    set_file(0, input + 3, first);
    set_file(1, input + 3 + first, size - 3 - first);
    info.read(&data, folder, TRAINING_SET, limit);
    check_dataset(&data, limit);
}

static void fuzz_idx(const uint8_t *input, size_t size) {
    read_dataset(
        input, size,
        (DatasetInfo){.name = "mnist", .shape = {2, 3, 1}, .classes = 10, .read = read_idx_set});
}

// Byte 0: bit 7: CIFAR-100
static void fuzz_cifar(const uint8_t *input, size_t size) {
    const bool fine = size && input[0] & 128;
    read_dataset(input, size,
                 (DatasetInfo){.name = fine ? "cifar100" : "cifar10",
                               .shape = {32, 32, 3},
                               .classes = fine ? 100 : 10,
                               .counts = {FILES},
                               .read = read_cifar_set});
}

/* ---- Checkpoints ----------------------------------------------------------------------------- */

static Run run;
static char checkpoint[PATH_SIZE];

static size_t build_small(Net *net, size_t x) {
    x = batchnorm2d(net, conv2d_bias(net, x, 2, 1, 1, 0, false));
    return log_softmax(net, linear(net, x, net->classes));
}
static const Model small_model = {.name = "small", .build = build_small};

static void start_run(void) {
    static const DatasetInfo info = {.name = "small", .shape = {2, 2, 1}, .classes = 2};
    char *argv[] = {"cnn",
                    "--model=lenet",
                    "--optimizer=sgd",
                    "--momentum=.9",
                    "--kernels=naive",
                    "--precision=fp32",
                    "--global-batch=1",
                    "--limit-train=9",
                    "--limit-test=9"};
    parse_options(&run.settings, sizeof argv / sizeof *argv, argv);
    run.settings.lr = 1;
    run.settings.optimizer = SGD;
    run.device = &cpu_device;
    run.kernels = &naive_kernels;
    run.comm.world = 1;
    run.epoch_steps = 10;
    run.epoch = 1;
    net_build(&run.net, &small_model, &info, &run.settings, run.kernels);
    plan_net(&run.net, 1, 0);
    net_alloc(&run.net);
    init_weights(&run.net, 1);
    run.optimizer_state = must_alloc(2 * run.net.param_size * sizeof(real), "the optimizer");
    run.recorder.steps = must_alloc(sizeof *run.recorder.steps, "a step");
    file_path(checkpoint, 0);
    run.settings.checkpoint = checkpoint;
}

static void fuzz_resume(const uint8_t *input, size_t size) {
    set_file(0, input, size);
    run.epoch = 1;
    run.batch_index = 0;
    resume_checkpoint(&run);
    if (run.epoch == 0 || run.batch_index >= run.epoch_steps)
        finding("a position that is none");
}

/* ---- Options --------------------------------------------------------------------------------- */

static void check_numbers(Settings *s) {
    for (const Option *o = options; o < options + OPTIONS; o++) {
        const void *field = (const char *)s + o->offset;
        const double number = o->kind == COUNT    ? (double)*(const size_t *)field
                              : o->kind == NUMBER ? *(const double *)field
                                                  : 0;
        if (o->default_value && number != 0 && !(number >= o->min && number <= o->max))
            finding("a number outside of its range");
    }
}

// What is before the first zero byte is the file that each word @... stands for; what follows are
// the words, one a line.
static void fuzz_options(const uint8_t *input, size_t size) {
    static char text[1 << 16], name[PATH_SIZE + 1] = "@";
    static Run other;
    char *argv[MOST_WORDS + 1] = {"cnn"}, metadata[2 * METADATA_SIZE];
    const size_t length = strnlen((const char *)input, size), rest = length + (length < size);
    int argc = 1;
    size = min_size(size - rest, sizeof text - 1);
    set_file(0, input, length);
    file_path(name + 1, 0);
    memcpy(text, input + rest, size);
    text[size] = 0;
    for (char *word = strtok(text, "\n"); word && argc < MOST_WORDS; word = strtok(NULL, "\n"))
        argv[argc++] = *word == '@' ? name : word;
    other = (Run){.kernels = &naive_kernels, .device = &cpu_device, .comm = {.world = 1}};
    parse_options(&other.settings, argc, argv);
    check_contradictions(&other.settings);
    parse_save_every(&other);
    parse_trace_steps(&other);
    check_numbers(&other.settings);
    other.settings.kernels = NAIVE; // setup_device() sets them
    other.settings.precision = FP32;
    print_settings(&other.settings);
    print_settings_json(stdout, &other.settings);
    for (size_t epoch = 0; epoch < min_size(other.settings.epochs, 3); epoch++)
        if (!(learning_rate(&other.settings, epoch, 1, 2) >= 0))
            finding("a learning rate that is negative or no number");
    run_metadata(&other, metadata);
}

/* ---- Good inputs, to start from -------------------------------------------------------------- */

static void write_seed(size_t number, const char *bytes, size_t size) {
    char path[PATH_SIZE], name[32];
    snprintf(name, sizeof name, "seed%zu", number);
    join_path(path, getenv("SEEDS"), name);
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(bytes, 1, size, f) != size || fclose(f) != 0)
        finding("cannot write the seeds");
}

static void seed_idx(void) {
    char good[] = "\0\x1c\0"
                  "\0\0\x08\x03\0\0\0\x02\0\0\0\x02\0\0\0\x03"
                  "abcdefghijkl"
                  "\0\0\x08\x01\0\0\0\x02\x01\x09";
    write_seed(0, good, sizeof good - 1);
    good[0] = 1; // compressed
    write_seed(1, good, sizeof good - 1);
    good[0] = 2; // one image of the two
    write_seed(2, good, sizeof good - 1);
    // 10,000,000 images, says the header of a compressed file that ends with it
    write_seed(3, "\1\x10\0\0\0\x08\x03\0\x98\x96\x80\0\0\0\x02\0\0\0\x03", 19);
}

static void seed_cifar(void) {
    static char good[3 + 2 * 3074];
    for (size_t labels = 1; labels <= 2; labels++) {
        const size_t record = labels + 3072;
        good[0] = (char)(labels == 2 ? 128 : 0);
        good[1] = (char)(record & 255);
        good[2] = (char)(record >> 8);
        good[3] = good[3 + record] = 7;
        write_seed(2 * labels, good, 3 + 2 * record);
        good[0] |= 1;
        write_seed(2 * labels + 1, good, 3 + 2 * record);
    }
}

// What cnn itself writes, as a checkpoint and as weights alone.
static void seed_resume(void) {
    char paths[2][PATH_SIZE];
    for (size_t i = 0; i < 2; i++)
        snprintf(paths[i], sizeof paths[i], "%.4000s/seed%zu", getenv("SEEDS"), i);
    run.settings.checkpoint = paths[0];
    save_checkpoint(&run);
    save_tensors(&run.net, NULL, NULL, "format=pt\n", paths[1]);
}

static void seed_options(void) {
    static const char *const seeds[] = {
        "--epochs 3 # a comment\n--quiet\0@\n--model=lenet\n--lr\n.5\n--schedule\ncosine",
        "\0--model\nresnet18\n--stem\n7\n--global-batch\n64\n--augment=crop-flip\n--nesterov\non",
        "--warmup-epochs "
        "2\0@x\n--schedule\nstep\n--step-size\n3\n--save-every\n7steps\n"
        "--checkpoint\nf\n--trace-steps\n3:9\n--bucket-mb\n1e2\n--eval\noff\n--seed\n12",
        "\0--help", "--lr \033[2J\0@"};
    for (size_t i = 0; i < sizeof seeds / sizeof *seeds; i++) {
        const size_t file = strlen(seeds[i]);
        write_seed(i, seeds[i], file + 1 + strlen(seeds[i] + file + 1));
    }
}

/* ---- The program ----------------------------------------------------------------------------- */

static const struct {
    const char *name;
    void (*run)(const uint8_t *input, size_t size);
    void (*seed)(void);
} targets[] = {{"idx", fuzz_idx, seed_idx},
               {"cifar", fuzz_cifar, seed_cifar},
               {"resume", fuzz_resume, seed_resume},
               {"options", fuzz_options, seed_options}};
enum { TARGETS = sizeof targets / sizeof *targets };
static size_t target;

static void link_file(const char *name, const char *ending, int number) {
    char path[PATH_SIZE + 16], to[64];
    snprintf(path, sizeof path, "%s/%s%s", folder, name, ending);
    snprintf(to, sizeof to, "/proc/self/fd/%d", number);
    if (symlink(to, path) != 0)
        finding("cannot make a link");
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    const char *wish = getenv("FUZZ"), *place = getenv("TMPDIR");
    while (target < TARGETS && (!wish || strcmp(targets[target].name, wish) != 0))
        target++;
    snprintf(folder, sizeof folder, "%.4000s/fuzz.XXXXXX", place ? place : "");
    if (target == TARGETS || !place || !mkdtemp(folder) || !freopen("/dev/null", "w", stdout))
        finding("expected FUZZ=idx, cifar, resume or options, and a TMPDIR to write to");
    for (size_t i = 0; i < FILES; i++) {
        file_numbers[i] = memfd_create("fuzz", 0);
        link_file(file_names[i], "", file_numbers[i]);
        link_file(gzip_names[i], ".gz", file_numbers[i]);
    }
    start_run();
    if (getenv("SEEDS")) {
        targets[target].seed();
        exit(0);
    }
    memset(kept_memory, 0, sizeof kept_memory); // what lasts
    stderr = fmemopen(message, sizeof message, "w");
    setbuf(stderr, NULL);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    memset(message, 0, strlen(message));
    rewind(stderr);
    before_dying = jump_back;
    dying = dying_here = false; // of the input before
    const int way = setjmp(refused);
    if (way == 0)
        targets[target].run(input, size);
    if (way == 1)
        check_message();
    for (size_t i = 0; i < KEPT; i++) {
        if (kept_files[i])
            fclose(kept_files[i]);
        free(kept_memory[i]);
    }
    return 0;
}

#ifdef REPLAY
int main(int argc, char **argv) {
    static uint8_t input[1 << 20];
    LLVMFuzzerInitialize(&argc, &argv);
    for (int i = 1; i < argc; i++) {
        FILE *f = fopen(argv[i], "rb");
        size_t size = f ? fread(input, 1, sizeof input, f) : 0;
        if (!f || fclose(f) != 0)
            finding("cannot read an input");
        uint8_t *exact = malloc(size + !size); // so that the sanitizer knows its end
        memcpy(exact, input, size);
        LLVMFuzzerTestOneInput(exact, size);
        free(exact);
    }
    return 0;
}
#endif
