/* cnn.c - train a convolutional neural network, with nothing hidden.

   One C file, read from top to bottom. It loads images, runs them through a network, computes every
   gradient by hand, updates the weights and tells where the time went. No library does any of it.

     make run                         builds ./cnn and trains the MNIST network for one epoch
     ./cnn --epochs 3 --workers 2     the flags are those of the PyTorch MNIST example, and more
     ./cnn --help                     all of them

   You should see the network layer by layer, then lines like
     Train Epoch: 1 [640/60000 (1%)]	Loss: 1.233434
   and after the epoch the accuracy on the test set: about 89 % on Fashion-MNIST, 98 % on MNIST.

   The rooms, in reading order:
      1 Declarations    what a layer, a network and a backend are; random numbers
      2 Helpers         clock, errors, memory, files
      3 Datasets        reading images from files that cannot be trusted; made-up images
      4 Loader          worker threads that prepare the next batches
      5 CPU layers      each layer forward and backward: first as its definition, then fast
      6 Network         the layer table and its builders, memory plan, summary
      7 Models          the networks themselves, ten lines each
      8 Forward and backward   the walk over the layer table
      9 Optimizers and schedules
     11 Checkpoints     weights as PyTorch reads them
     12 Options         one table: parser, --help and settings
     13 Instruments     line profile, machine card, run folder
     14 train(), test(), main()
   Rooms 10 (data parallelism) and the GPU's backend are not built yet. */

/* ==== 1. Declarations ===========================================================================

   What every backend has to know, and no more. Images are stored NHWC: image, row, column, channel,
   channels innermost. Weights are stored [row of the filter][column][channel in][channel out]. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE // sched_getaffinity
#endif
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

#ifndef REAL
#define REAL float
#endif
typedef REAL real; // the tests build with -DREAL=double to check gradients

typedef enum { INPUT, CONV2D, RELU, MAXPOOL2D, DROPOUT, LINEAR, LOG_SOFTMAX } LayerKind;

typedef struct Shape {
    size_t h, w, c;
} Shape; // of one image

// One row of the layer table. Offsets count elements from the start of the network's arenas.
typedef struct Layer {
    LayerKind kind;
    char name[32];                  // PyTorch's name of its parameters, "conv1"; else empty
    size_t input;                   // the row whose output this one reads
    Shape in, out;                  // a linear layer reads 1 x 1 x (h * w * c)
    size_t kernel, stride, padding; // conv2d, maxpool2d
    real p;                         // dropout: probability of a zero
    bool in_place;                  // the output overwrites the input, the gradient likewise
    bool fused_relu;                // conv2d, linear: the ReLU behind it is applied while storing
    size_t weights, biases;         // how many parameters
    size_t weight, bias;            // offsets into params and grads
    size_t output;                  // offset into activations and their gradients
    size_t saved;                   // offset into saved: argmax of a max-pool, mask of a dropout
    int32_t *gather, *scatter;      // CPU, fast: which pixels a filter meets (room 5)
} Layer;

// Which images a batch holds, so that random numbers follow the image and not the batch.
typedef struct Draw {
    uint64_t seed;
    size_t epoch, first; // position of the batch's first image in the epoch's permutation
} Draw;

/* The operations that a network needs of a device. Outputs come first, gradients are prefixed d.
   n is the number of images in this batch. Each backward writes its outputs with =, never +=.
   scratch has as many elements as the backend's scratch_size() asked for. */
typedef struct Backend {
    const char *name, *kernels;
    bool fuses_relu;
    size_t (*scratch_size)(const Layer *l, size_t n);
    void (*prepare)(Layer *l);    // conv2d, linear; may be NULL
    void *(*alloc)(size_t bytes); // zeroed; NULL when there is not enough
    void (*release)(void *memory);
    void (*copy)(void *to, const void *from, size_t bytes);
    void (*synchronize)(void);
    void (*conv2d_forward)(real *out, const real *in, const real *weight, const real *bias,
                           const Layer *l, size_t n, real *scratch);
    void (*conv2d_backward)(real *din, real *dweight, real *dbias, const real *dout, const real *in,
                            const real *weight, const Layer *l, size_t n, real *scratch);
    void (*linear_forward)(real *out, const real *in, const real *weight, const real *bias,
                           const Layer *l, size_t n, real *scratch);
    void (*linear_backward)(real *din, real *dweight, real *dbias, const real *dout, const real *in,
                            const real *weight, const Layer *l, size_t n, real *scratch);
    void (*relu_forward)(real *out, const real *in, size_t count);
    void (*relu_backward)(real *din, const real *dout, const real *out, size_t count);
    void (*maxpool2d_forward)(real *out, uint8_t *argmax, const real *in, const Layer *l, size_t n);
    void (*maxpool2d_backward)(real *din, const real *dout, const uint8_t *argmax, const Layer *l,
                               size_t n);
    void (*dropout_forward)(real *out, uint8_t *mask, const real *in, const Layer *l, size_t n,
                            uint32_t stream, const Draw *draw);
    void (*dropout_backward)(real *din, const real *dout, const uint8_t *mask, const Layer *l,
                             size_t n);
    void (*log_softmax_forward)(real *out, const real *in, size_t n, size_t classes);
    void (*log_softmax_backward)(real *din, const real *dout, const real *out, size_t n,
                                 size_t classes);
    void (*nll_loss)(real *losses, real *dlogp, const real *logp, const uint8_t *labels, size_t n,
                     size_t classes);
    void (*adadelta)(real *param, const real *grad, real *square_avg, real *acc_delta, size_t count,
                     double lr, double rho, double eps);
    void (*sgd)(real *param, const real *grad, size_t count, double lr);
} Backend;

/* Philox4x32-10, a counter-based random number generator: out = a keyed scramble of the counter.
   (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.) It has no state, so any
   thread, device or replica can draw any number at any time and all agree on it. */
static inline HOST_DEVICE void philox4x32(uint32_t out[4], uint32_t c0, uint32_t c1, uint32_t c2,
                                          uint32_t c3, uint64_t seed) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u; // Weyl sequences: the golden ratio and sqrt(3) - 1
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

// What a random number is for. Dropout adds the row of its layer, so that layers differ.
enum { DRAW_INIT, DRAW_SHUFFLE, DRAW_SYNTHETIC, DRAW_DROPOUT = 256 };

// uniform in [0, 1) from 32 random bits; 24 of them, so that float and double agree
static inline HOST_DEVICE real uniform(uint32_t bits) {
    return (real)(bits >> 8) * (real)(1.0 / 16777216.0);
}

#ifndef CNN_DECLARATIONS_ONLY // cnn_kernels.cu reads no further

/* ==== 2. Helpers ================================================================================

   Clock, errors, memory and files. die() is how every error ends: one line that says what, where,
   what was expected, what was found and what to do. */

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define DO_PRAGMA(text) _Pragma(#text)
#ifdef _OPENMP
#include <omp.h>
#define PARALLEL_FOR DO_PRAGMA(omp parallel for schedule(static))
#define PARALLEL_FOR_2 DO_PRAGMA(omp parallel for schedule(static) collapse(2))
#else
#define omp_set_num_threads(n) ((void)(n))
#define PARALLEL_FOR
#define PARALLEL_FOR_2
#endif

enum { PATH_SIZE = 4096, EXIT_USAGE = 2 };

static double now(void) // seconds, from an arbitrary start
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static _Noreturn void die(int status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static void (*before_dying)(void); // lets the run folder say "failed"

static _Noreturn void die(int status, const char *format, ...) {
    char line[2 * PATH_SIZE];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    fflush(stdout);
    fprintf(stderr, "cnn: error: %s\n", line);
    void (*last_words)(void) = before_dying;
    before_dying = NULL;
    if (last_words)
        last_words();
    exit(status);
}

static size_t min_size(size_t a, size_t b) {
    return a < b ? a : b;
}

static size_t max_size(size_t a, size_t b) {
    return a > b ? a : b;
}

static size_t ceil_div(size_t a, size_t b) {
    return (a + b - 1) / b;
}

// Zeroed memory on a cache line's border, with room for one vector read past the end.
static void *host_alloc(size_t bytes) {
    void *memory = NULL;
    if (bytes > SIZE_MAX / 2 || posix_memalign(&memory, 64, bytes + 128) != 0)
        return NULL;
    return memset(memory, 0, bytes + 128);
}

static void *must_alloc(size_t bytes, const char *what) {
    void *memory = host_alloc(bytes);
    if (!memory)
        die(1,
            "no memory for %s: %.1f MB asked for; a smaller --batch-size or --limit-train "
            "needs less",
            what, (double)bytes / 1e6);
    return memory;
}

static void join_path(char path[PATH_SIZE], const char *dir, const char *file) {
    if (snprintf(path, PATH_SIZE, "%s/%s", dir, file) >= PATH_SIZE)
        die(1, "path too long: %s/%s", dir, file);
}

// A file that appears under its name whole or not at all: written beside it, synced, renamed.
typedef struct AtomicFile {
    FILE *stream;
    char path[PATH_SIZE], temporary[PATH_SIZE];
} AtomicFile;

static void file_fail(const char *doing, const char *path) {
    die(1, "%s %s: %s", doing, path, strerror(errno));
}

static void atomic_open(AtomicFile *f, const char *path) {
    snprintf(f->path, sizeof f->path, "%s", path);
    if (snprintf(f->temporary, PATH_SIZE, "%s.tmp", path) >= PATH_SIZE)
        die(1, "path too long: %s.tmp", path);
    f->stream = fopen(f->temporary, "wb");
    if (!f->stream)
        file_fail("cannot create", f->temporary);
}

static void atomic_commit(AtomicFile *f) {
    bool good = !ferror(f->stream) && fflush(f->stream) == 0 && fsync(fileno(f->stream)) == 0;
    good = fclose(f->stream) == 0 && good;
    if (!good || rename(f->temporary, f->path) != 0) {
        int why = errno;
        unlink(f->temporary);
        errno = why;
        file_fail("cannot write", f->path);
    }
    char copy[PATH_SIZE];
    snprintf(copy, sizeof copy, "%s", f->path);
    int dir = open(dirname(copy), O_RDONLY); // the rename itself has to reach the disk as well
    if (dir >= 0) {
        fsync(dir);
        close(dir);
    }
}

// FNV-1a over memory: two runs have equal weights if they print equal hashes.
static uint64_t hash_bytes(const void *memory, size_t bytes) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const uint8_t *)memory)[i]) * 0x100000001b3u;
    return hash;
}

/* ==== 3. Datasets ===============================================================================

   Images stay bytes in memory, as they are on disk; the loader turns them into numbers. Files come
   from strangers: every count is checked against the file's real size before it is believed. */

typedef struct DatasetInfo {
    const char *name;
    Shape shape;
    size_t classes, train, test;
    double mean[3], std[3]; // of the pixels scaled to [0, 1], one a channel
} DatasetInfo;

static const DatasetInfo dataset_infos[] = {
    // the constants of MNIST serve all three, as in the handouts' script
    {"mnist", {28, 28, 1}, 10, 60000, 10000, {.1307}, {.3081}},
    {"fashion-mnist", {28, 28, 1}, 10, 60000, 10000, {.1307}, {.3081}},
    {"synthetic", {28, 28, 1}, 10, 60000, 10000, {.1307}, {.3081}},
};
enum { DATASETS = sizeof dataset_infos / sizeof *dataset_infos };

typedef struct Dataset {
    const DatasetInfo *info;
    size_t count;
    uint8_t *images; // [count][h][w][c]
    uint8_t *labels; // [count]
} Dataset;

static const DatasetInfo *find_dataset_info(const char *name) {
    for (size_t i = 0; i < DATASETS; i++)
        if (strcmp(dataset_infos[i].name, name) == 0)
            return &dataset_infos[i];
    return NULL;
}

static size_t image_size(const DatasetInfo *info) {
    return info->shape.h * info->shape.w * info->shape.c;
}

// A data file, plain or read through `gzip -dc`.
typedef struct DataFile {
    char path[PATH_SIZE], remedy[128];
    FILE *stream;
    pid_t gzip; // 0 for a plain file
} DataFile;

static void bad_file(const DataFile *f, const char *format, ...)
    __attribute__((format(printf, 2, 3), noreturn));

static void bad_file(const DataFile *f, const char *format, ...) {
    char what[512];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    die(1, "%s: %s; %s", f->path, what, f->remedy);
}

// The gzip program, its output as a stream: no library needed to read Debian's packages.
static void open_gzip(DataFile *f) {
    int ends[2];
    if (pipe(ends) != 0)
        file_fail("cannot open a pipe for", f->path);
    f->gzip = fork();
    if (f->gzip == 0) {
        dup2(ends[1], STDOUT_FILENO);
        close(ends[0]);
        close(ends[1]);
        execlp("gzip", "gzip", "-dc", "--", f->path, (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    f->stream = f->gzip > 0 ? fdopen(ends[0], "rb") : NULL;
    if (!f->stream)
        file_fail("cannot start gzip for", f->path);
}

// Finds DIR/FILE or DIR/FILE.gz; false if there is neither.
static bool data_path(char path[PATH_SIZE], const char *dir, const char *file) {
    char compressed[PATH_SIZE];
    join_path(path, dir, file);
    if (access(path, F_OK) == 0)
        return true;
    if (snprintf(compressed, PATH_SIZE, "%s.gz", path) >= PATH_SIZE)
        return false;
    memcpy(path, compressed, PATH_SIZE);
    return access(path, F_OK) == 0;
}

static void data_open(DataFile *f, const char *dir, const char *file, const char *dataset) {
    *f = (DataFile){0};
    snprintf(f->remedy, sizeof f->remedy, "remove it and run: data/get_data.sh %s", dataset);
    if (!data_path(f->path, dir, file))
        die(1, "%s: expected %s or %s.gz there, found neither; run: data/get_data.sh %s", dir, file,
            file, dataset);
    f->stream = fopen(f->path, "rb");
    if (!f->stream)
        file_fail("cannot read", f->path);
    size_t length = strlen(f->path);
    if (length > 3 && strcmp(f->path + length - 3, ".gz") == 0) {
        fclose(f->stream);
        open_gzip(f);
    }
}

static void data_close(DataFile *f) {
    fclose(f->stream);
    int status = 0;
    if (f->gzip && waitpid(f->gzip, &status, 0) == f->gzip && status != 0) {
        if (WIFEXITED(status) && WEXITSTATUS(status) == 127)
            die(1, "%s: the gzip program is not installed; install it or run: gunzip -k %s",
                f->path, f->path);
        bad_file(f, "gzip cannot read it");
    }
}

static void read_exactly(DataFile *f, void *to, size_t bytes, size_t offset, size_t expected) {
    size_t got = fread(to, 1, bytes, f->stream);
    if (got == bytes)
        return;
    if (f->gzip)
        data_close(f); // if gzip itself failed, its reason is the better one
    bad_file(f, "truncated: expected %zu bytes, found %zu", expected, offset + got);
}

static uint32_t big_endian(const uint8_t b[4]) {
    return (uint32_t)b[0] << 24 | (uint32_t)b[1] << 16 | (uint32_t)b[2] << 8 | b[3];
}

/* An IDX file: magic number 0x0801 (labels) or 0x0803 (images), the sizes of its 1 or 3 dimensions,
   all big-endian, then bytes. item is the size that the one after the first dimension must have.
   Reads the first `limit` items, checks the length of all; returns the whole file's count. */
static size_t read_idx(DataFile *f, uint8_t **items, size_t *kept, size_t limit, Shape item) {
    bool images = item.h > 0;
    uint32_t magic = images ? 0x0803 : 0x0801;
    size_t header_bytes = images ? 16 : 8, item_bytes = images ? item.h * item.w : 1;
    uint8_t header[16];
    read_exactly(f, header, header_bytes, 0, header_bytes);
    if (big_endian(header) != magic)
        bad_file(f, "wrong magic number: expected 0x%08x (%s), found 0x%08x%s", magic,
                 images ? "images" : "labels", big_endian(header),
                 big_endian(header) >> 16 == 0x1f8b ? " (still gzipped: name it .gz)" : "");
    if (images && (big_endian(header + 8) != item.h || big_endian(header + 12) != item.w))
        bad_file(f, "expected images of %zu x %zu pixels, found %u x %u", item.h, item.w,
                 big_endian(header + 8), big_endian(header + 12));
    size_t count = big_endian(header + 4);
    size_t expected = header_bytes + count * item_bytes; // below 2^32 * 2^10: cannot overflow
    if (count == 0)
        bad_file(f, "expected at least one item, found 0");
    if (count > 10000000)
        bad_file(f, "expected at most 10000000 items, found %zu", count);
    struct stat info;
    if (!f->gzip && fstat(fileno(f->stream), &info) == 0 && (size_t)info.st_size != expected)
        bad_file(f, "expected %zu bytes for %zu items, found %lld", expected, count,
                 (long long)info.st_size);
    *kept = min_size(count, limit);
    *items = must_alloc(*kept * item_bytes, "images");
    read_exactly(f, *items, *kept * item_bytes, header_bytes, expected);
    for (size_t i = *kept; i < count; i++) {
        uint8_t skipped[4096];
        read_exactly(f, skipped, item_bytes, header_bytes + i * item_bytes, expected);
    }
    if (fgetc(f->stream) != EOF)
        bad_file(f, "too long: expected %zu bytes, found more", expected);
    data_close(f);
    return count;
}

static const char *const idx_files[2][2] = {
    {"train-images-idx3-ubyte", "train-labels-idx1-ubyte"},
    {"t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"},
};

static void load_idx(Dataset *data, const char *dir, bool train, size_t limit) {
    const DatasetInfo *info = data->info;
    const char *const *files = idx_files[train ? 0 : 1];
    DataFile images, labels;
    data_open(&images, dir, files[0], info->name);
    data_open(&labels, dir, files[1], info->name);
    size_t kept;
    size_t n_images = read_idx(&images, &data->images, &data->count, limit, info->shape);
    size_t n_labels = read_idx(&labels, &data->labels, &kept, limit, (Shape){0});
    if (n_images != n_labels)
        bad_file(&labels, "expected a label for each of the %zu images, found %zu", n_images,
                 n_labels);
    for (size_t i = 0; i < data->count; i++)
        if (data->labels[i] >= info->classes)
            bad_file(&labels, "expected labels from 0 to %zu, found %u at image %zu",
                     info->classes - 1, data->labels[i], i);
}

/* Made-up images, for machines without data. Each class has a glyph, a patch of waves drawn from
   Philox; an image shows the glyph of its class, dark or bright, near its middle, under noise and over a
   fainter glyph of another class. Since a glyph and its negative mean the same class, no linear
   model can tell classes apart; convolutions and ReLUs can. The images never depend on --seed. */
enum { GLYPH = 14, WAVES = 3, SHIFT = 2 };
static const uint64_t synthetic_seed = 2022;

static void draw_glyph(float glyph[], size_t class, size_t channels) {
    memset(glyph, 0, GLYPH * GLYPH * channels * sizeof *glyph);
    for (uint32_t wave = 0; wave < WAVES * channels; wave++) {
        uint32_t r[4];
        philox4x32(r, wave, (uint32_t) class, 0, DRAW_SYNTHETIC, synthetic_seed);
        double angle = 2 * M_PI * (double)uniform(r[0]), phase = 2 * M_PI * (double)uniform(r[1]);
        double frequency = 2 * M_PI * (1 + 1.5 * (double)uniform(r[2])) / GLYPH;
        for (int y = 0; y < GLYPH; y++)
            for (int x = 0; x < GLYPH; x++) {
                double cx = x - (GLYPH - 1) / 2., cy = y - (GLYPH - 1) / 2.;
                double window = exp(-(cx * cx + cy * cy) / (GLYPH * GLYPH / 8.));
                double value = cos(frequency * (cos(angle) * cx + sin(angle) * cy) + phase);
                glyph[(size_t)(y * GLYPH + x) * channels + wave % channels] +=
                    (float)(window * value);
            }
    }
}

static void add_glyph(float *image, const float *glyph, Shape s, size_t top, size_t left,
                      float strength) {
    for (size_t y = 0; y < GLYPH; y++)
        for (size_t i = 0; i < GLYPH * s.c; i++)
            image[((top + y) * s.w + left) * s.c + i] += strength * glyph[y * GLYPH * s.c + i];
}

static void draw_synthetic(uint8_t *out, uint8_t *label, const float *glyphs,
                           const DatasetInfo *info, uint32_t index) {
    Shape s = info->shape;
    size_t size = image_size(info), glyph_size = GLYPH * GLYPH * s.c;
    float image[size];
    memset(image, 0, sizeof image);
    for (uint32_t layer = 0; layer < 2; layer++) { // a distractor, then the glyph that counts
        uint32_t r[4];
        philox4x32(r, layer, index, 1, DRAW_SYNTHETIC, synthetic_seed);
        size_t class = r[0] % info->classes;
        size_t top = (s.h - GLYPH) / 2 - SHIFT + r[1] % (2 * SHIFT + 1);
        size_t left = (s.w - GLYPH) / 2 - SHIFT + r[2] % (2 * SHIFT + 1);
        float strength = (layer ? 80 : 25) * (r[3] & 1 ? 1.f : -1.f);
        add_glyph(image, glyphs + class * glyph_size, s, top, left, strength);
        *label = (uint8_t) class;
    }
    for (size_t i = 0; i < size; i += 16) {
        uint32_t r[4];
        philox4x32(r, (uint32_t)i, index, 2, DRAW_SYNTHETIC, synthetic_seed);
        for (size_t j = 0; j < min_size(16, size - i); j++) {
            float noise = (float)(r[j / 4] >> (8 * (j % 4)) & 255) - 127.5f;
            float value = 100 + image[i + j] + .3f * noise;
            out[i + j] = (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
        }
    }
}

static void make_synthetic(Dataset *data, bool train, size_t limit) {
    const DatasetInfo *info = data->info;
    size_t glyph_size = GLYPH * GLYPH * info->shape.c;
    data->count = min_size(train ? info->train : info->test, limit);
    data->images = must_alloc(data->count * image_size(info), "images");
    data->labels = must_alloc(data->count, "labels");
    float *glyphs = must_alloc(info->classes * glyph_size * sizeof *glyphs, "synthetic images");
    for (size_t class = 0; class < info->classes; class ++)
        draw_glyph(glyphs + class * glyph_size, class, info->shape.c);
    PARALLEL_FOR
    for (size_t i = 0; i < data->count; i++) // the test set is numbered behind the training set
        draw_synthetic(data->images + i * image_size(info), data->labels + i, glyphs, info,
                       (uint32_t)(i + (train ? 0 : info->train)));
    free(glyphs);
}

static bool has_dataset(const char *dir) {
    char path[PATH_SIZE];
    return data_path(path, dir, idx_files[0][0]);
}

// Where a dataset's files are: DIR and DIR/NAME with --data DIR, else the usual folders.
static bool find_data_dir(char dir[PATH_SIZE], const char *name, const char *data_option) {
    char beside[PATH_SIZE] = "."; // the executable's folder
    ssize_t length = readlink("/proc/self/exe", beside, sizeof beside - 8);
    beside[length > 0 ? length : 1] = 0;
    strcat(dirname(beside), "/data");
    const char *roots[] = {"data", beside, "/usr/share/datasets"};
    for (size_t i = 0; !*data_option && i < sizeof roots / sizeof *roots; i++) {
        join_path(dir, roots[i], name);
        if (has_dataset(dir))
            return true;
    }
    if (!*data_option)
        return false;
    join_path(dir, data_option, name);
    if (has_dataset(dir))
        return true;
    snprintf(dir, PATH_SIZE, "%s", data_option);
    return has_dataset(dir);
}

static void free_dataset(Dataset *data) {
    free(data->images);
    free(data->labels);
}

/* ==== 4. Loader =================================================================================

   W worker threads fill a ring of batches ahead of the training loop. Which images a batch holds,
   and in which order batches are handed out, is settled by the permutation alone: W changes
   nothing but the waiting. Threads and memory are made once, before the first step. */

typedef struct Batch {
    real *images;    // [n][h][w][c], normalised
    uint8_t *labels; // [n]
    size_t n, first; // how many images; position of the first one in the epoch
    size_t number;   // of the batch, from 0
} Batch;

typedef struct Loader {
    const Dataset *data;
    uint32_t *order; // the epoch's permutation: order[position] = image
    size_t batch_size, batches, workers, slots;
    Batch *ring;            // batch b lies in slot b % slots
    size_t *filled;         // 1 + the number of the batch that a slot holds; 0: none
    size_t started, handed; // batches that workers have begun; batches that next() has returned
    size_t busy;            // workers that are filling a slot
    bool quit;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t *threads;
    real normalised[3][256]; // (byte / 255 - mean) / std, by channel
} Loader;

static void fill_batch(const Loader *l, Batch *batch, size_t number) {
    size_t pixels = image_size(l->data->info), channels = l->data->info->shape.c;
    batch->number = number;
    batch->first = number * l->batch_size;
    batch->n = min_size(l->batch_size, l->data->count - batch->first);
    for (size_t i = 0; i < batch->n; i++) {
        size_t image = l->order[batch->first + i];
        const uint8_t *bytes = l->data->images + image * pixels;
        real *out = batch->images + i * pixels;
        for (size_t p = 0; p < pixels; p += channels)
            for (size_t c = 0; c < channels; c++)
                out[p + c] = l->normalised[c][bytes[p + c]];
        batch->labels[i] = l->data->labels[image];
    }
}

static void *loader_worker(void *argument) {
    Loader *l = argument;
    pthread_mutex_lock(&l->lock);
    while (!l->quit) {
        // the batch handed out last is still in use: its slot is not free yet
        if (l->started == l->batches || l->started >= l->handed + l->slots - 1) {
            pthread_cond_wait(&l->changed, &l->lock);
            continue;
        }
        size_t number = l->started++;
        l->busy++;
        pthread_mutex_unlock(&l->lock);
        fill_batch(l, &l->ring[number % l->slots], number);
        pthread_mutex_lock(&l->lock);
        l->busy--;
        l->filled[number % l->slots] = number + 1;
        pthread_cond_broadcast(&l->changed);
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

static void loader_init(Loader *l, const Dataset *data, size_t batch_size, size_t workers) {
    const DatasetInfo *info = data->info;
    *l = (Loader){.data = data, .batch_size = batch_size, .workers = workers};
    l->slots = 2 * workers + 1; // PyTorch's prefetch_factor of 2, and the batch in use
    l->order = must_alloc(data->count * sizeof *l->order, "the permutation");
    l->ring = must_alloc(l->slots * sizeof *l->ring, "the loader");
    l->filled = must_alloc(l->slots * sizeof *l->filled, "the loader");
    l->threads = must_alloc(workers * sizeof *l->threads, "the loader");
    for (size_t s = 0; s < l->slots; s++) {
        l->ring[s].images = must_alloc(batch_size * image_size(info) * sizeof(real), "a batch");
        l->ring[s].labels = must_alloc(batch_size, "a batch");
    }
    for (size_t c = 0; c < info->shape.c; c++)
        for (int byte = 0; byte < 256; byte++)
            l->normalised[c][byte] = ((real)byte / 255 - (real)info->mean[c]) / (real)info->std[c];
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->changed, NULL);
    for (size_t w = 0; w < workers; w++)
        if (pthread_create(&l->threads[w], NULL, loader_worker, l) != 0)
            die(1, "cannot start loader worker %zu of %zu; use fewer --workers", w + 1, workers);
}

// Fisher-Yates: every permutation is equally likely. Draw i depends on seed, epoch and i only.
static void shuffle(uint32_t *order, size_t count, uint64_t seed, size_t epoch) {
    for (size_t i = count - 1; i > 0; i--) {
        uint32_t r[4];
        philox4x32(r, (uint32_t)i, 0, (uint32_t)epoch, DRAW_SHUFFLE, seed);
        uint64_t bits = (uint64_t)r[0] << 32 | r[1];
        size_t j = (size_t)(bits % (i + 1));
        uint32_t swapped = order[i];
        order[i] = order[j];
        order[j] = swapped;
    }
}

// Starts an epoch: shuffled for training; epoch 0 means in the order of the file, for testing.
static void loader_start(Loader *l, uint64_t seed, size_t epoch) {
    pthread_mutex_lock(&l->lock);
    l->started = l->batches = 0; // stops the workers, if an epoch was left early
    while (l->busy > 0)
        pthread_cond_wait(&l->changed, &l->lock);
    for (size_t i = 0; i < l->data->count; i++)
        l->order[i] = (uint32_t)i;
    if (epoch > 0)
        shuffle(l->order, l->data->count, seed, epoch);
    memset(l->filled, 0, l->slots * sizeof *l->filled);
    l->handed = 0;
    l->batches = ceil_div(l->data->count, l->batch_size);
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
}

// The next batch, valid until the call after; NULL when the epoch is over.
static const Batch *loader_next(Loader *l) {
    pthread_mutex_lock(&l->lock);
    const Batch *batch = NULL;
    if (l->handed < l->batches) {
        size_t number = l->handed++;
        pthread_cond_broadcast(&l->changed); // the slot before this one is free now
        while (l->filled[number % l->slots] != number + 1)
            pthread_cond_wait(&l->changed, &l->lock);
        batch = &l->ring[number % l->slots];
    }
    pthread_mutex_unlock(&l->lock);
    return batch;
}

static void loader_free(Loader *l) {
    pthread_mutex_lock(&l->lock);
    l->quit = true;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
    for (size_t w = 0; w < l->workers; w++)
        pthread_join(l->threads[w], NULL);
    for (size_t s = 0; s < l->slots; s++) {
        free(l->ring[s].images);
        free(l->ring[s].labels);
    }
    pthread_mutex_destroy(&l->lock);
    pthread_cond_destroy(&l->changed);
    free(l->order);
    free(l->ring);
    free(l->filled);
    free(l->threads);
}

/* ==== 5. Layers on the CPU ======================================================================

   Every layer stands here first as its definition, a few loops that say what it computes (_naive);
   the tests take these for the truth. Where time is spent a fast version follows (_fast).

   Gradients: dX is the derivative of the loss by X. A backward receives dout and writes din,
   dweight and dbias with =. Work is split by shapes, never by the number of threads, and every sum
   is taken in one fixed order: the result has the same bits for any --threads. */

/* out[n][y][x][k] = bias[k] + sum over i, j, c of
                          in[n][y * s + i - padding][x * s + j - padding][c] * weight[i][j][c][k]
   where s is the stride and pixels outside of the image count as 0.
   Shapes: in [n][h][w][c], out [n][oh][ow][k]. */
static void conv2d_forward_naive(real *out, const real *in, const real *weight, const real *bias,
                                 const Layer *l, size_t n, real *scratch) {
    (void)scratch;
    Shape I = l->in, O = l->out;
    PARALLEL_FOR_2
    for (size_t image = 0; image < n; image++)
        for (size_t y = 0; y < O.h; y++)
            for (size_t x = 0; x < O.w; x++)
                for (size_t k = 0; k < O.c; k++) {
                    real sum = bias[k];
                    for (size_t i = 0; i < l->kernel; i++)
                        for (size_t j = 0; j < l->kernel; j++) {
                            size_t iy = y * l->stride + i - l->padding; // wraps around when
                            size_t ix = x * l->stride + j - l->padding; // outside: then >= h, w
                            if (iy >= I.h || ix >= I.w)
                                continue;
                            const real *pixel = in + ((image * I.h + iy) * I.w + ix) * I.c;
                            const real *tap = weight + (i * l->kernel + j) * I.c * O.c;
                            for (size_t c = 0; c < I.c; c++)
                                sum += pixel[c] * tap[c * O.c + k];
                        }
                    out[((image * O.h + y) * O.w + x) * O.c + k] = sum;
                }
}

/* dbias[k]            = sum over n, y, x of dout[n][y][x][k]
   dweight[i][j][c][k] = sum over n, y, x of
                         dout[n][y][x][k] * in[n][y * s + i - padding][x * s + j - padding][c]
   din[n][iy][ix][c]   = sum over i, j, k of dout[n][y][x][k] * weight[i][j][c][k]
                         where iy = y * s + i - padding, ix likewise.   din may be NULL. */
static void conv2d_backward_naive(real *din, real *dweight, real *dbias, const real *dout,
                                  const real *in, const real *weight, const Layer *l, size_t n,
                                  real *scratch) {
    (void)scratch;
    Shape I = l->in, O = l->out;
    memset(dbias, 0, O.c * sizeof *dbias);
    for (size_t pixel = 0; pixel < n * O.h * O.w; pixel++)
        for (size_t k = 0; k < O.c; k++)
            dbias[k] += dout[pixel * O.c + k];
    PARALLEL_FOR_2
    for (size_t tap = 0; tap < l->kernel * l->kernel; tap++)
        for (size_t c = 0; c < I.c; c++) {
            real *row = dweight + (tap * I.c + c) * O.c;
            memset(row, 0, O.c * sizeof *row);
            for (size_t image = 0; image < n; image++)
                for (size_t y = 0; y < O.h; y++)
                    for (size_t x = 0; x < O.w; x++) {
                        size_t iy = y * l->stride + tap / l->kernel - l->padding;
                        size_t ix = x * l->stride + tap % l->kernel - l->padding;
                        if (iy >= I.h || ix >= I.w)
                            continue;
                        real value = in[((image * I.h + iy) * I.w + ix) * I.c + c];
                        const real *d = dout + ((image * O.h + y) * O.w + x) * O.c;
                        for (size_t k = 0; k < O.c; k++)
                            row[k] += value * d[k];
                    }
        }
    if (!din)
        return;
    PARALLEL_FOR
    for (size_t image = 0; image < n; image++) {
        real *d = din + image * I.h * I.w * I.c;
        memset(d, 0, I.h * I.w * I.c * sizeof *d);
        for (size_t y = 0; y < O.h; y++)
            for (size_t x = 0; x < O.w; x++)
                for (size_t tap = 0; tap < l->kernel * l->kernel; tap++) {
                    size_t iy = y * l->stride + tap / l->kernel - l->padding;
                    size_t ix = x * l->stride + tap % l->kernel - l->padding;
                    if (iy >= I.h || ix >= I.w)
                        continue;
                    const real *from = dout + ((image * O.h + y) * O.w + x) * O.c;
                    for (size_t c = 0; c < I.c; c++)
                        for (size_t k = 0; k < O.c; k++)
                            d[(iy * I.w + ix) * I.c + c] +=
                                from[k] * weight[(tap * I.c + c) * O.c + k];
                }
    }
}

// out[n][k] = bias[k] + sum over c of in[n][c] * weight[c][k]
static void linear_forward_naive(real *out, const real *in, const real *weight, const real *bias,
                                 const Layer *l, size_t n, real *scratch) {
    (void)scratch;
    size_t inputs = l->in.c, outputs = l->out.c;
    PARALLEL_FOR_2
    for (size_t image = 0; image < n; image++)
        for (size_t k = 0; k < outputs; k++) {
            real sum = bias[k];
            for (size_t c = 0; c < inputs; c++)
                sum += in[image * inputs + c] * weight[c * outputs + k];
            out[image * outputs + k] = sum;
        }
}

/* dbias[k] = sum over n of dout[n][k]     dweight[c][k] = sum over n of in[n][c] * dout[n][k]
   din[n][c] = sum over k of dout[n][k] * weight[c][k]                      din may be NULL. */
static void linear_backward_naive(real *din, real *dweight, real *dbias, const real *dout,
                                  const real *in, const real *weight, const Layer *l, size_t n,
                                  real *scratch) {
    (void)scratch;
    size_t inputs = l->in.c, outputs = l->out.c;
    for (size_t k = 0; k < outputs; k++) {
        dbias[k] = 0;
        for (size_t image = 0; image < n; image++)
            dbias[k] += dout[image * outputs + k];
    }
    PARALLEL_FOR
    for (size_t c = 0; c < inputs; c++)
        for (size_t k = 0; k < outputs; k++) {
            real sum = 0;
            for (size_t image = 0; image < n; image++)
                sum += in[image * inputs + c] * dout[image * outputs + k];
            dweight[c * outputs + k] = sum;
        }
    for (size_t i = 0; din && i < n * inputs; i++) {
        din[i] = 0;
        for (size_t k = 0; k < outputs; k++)
            din[i] += dout[i / inputs * outputs + k] * weight[i % inputs * outputs + k];
    }
}

// out = max(in, 0); a NaN stays a NaN. In place, if out is in
static void relu_forward(real *out, const real *in, size_t count) {
    PARALLEL_FOR
    for (size_t i = 0; i < count; i++)
        out[i] = in[i] < 0 ? 0 : in[i];
}

// din = dout where out > 0, else 0; in place, if din is dout
static void relu_backward(real *din, const real *dout, const real *out, size_t count) {
    PARALLEL_FOR
    for (size_t i = 0; i < count; i++)
        din[i] = out[i] > 0 ? dout[i] : 0;
}

/* out[n][y][x][c] = max over i, j < kernel of in[n][y * stride + i - padding][...][c], and argmax
   = i * kernel + j of the first such maximum. Pixels outside of the image are never the maximum. */
static void maxpool2d_forward_naive(real *out, uint8_t *argmax, const real *in, const Layer *l,
                                    size_t n) {
    Shape I = l->in, O = l->out;
    PARALLEL_FOR_2
    for (size_t image = 0; image < n; image++)
        for (size_t y = 0; y < O.h; y++)
            for (size_t x = 0; x < O.w; x++) {
                size_t at = ((image * O.h + y) * O.w + x) * O.c;
                real *restrict best = out + at;
                uint8_t *restrict arg = argmax + at;
                for (size_t c = 0; c < O.c; c++) {
                    best[c] = -INFINITY;
                    arg[c] = 0;
                }
                for (size_t tap = 0; tap < l->kernel * l->kernel; tap++) {
                    size_t iy = y * l->stride + tap / l->kernel - l->padding;
                    size_t ix = x * l->stride + tap % l->kernel - l->padding;
                    if (iy >= I.h || ix >= I.w)
                        continue;
                    const real *pixel = in + ((image * I.h + iy) * I.w + ix) * I.c;
                    for (size_t c = 0; c < O.c; c++) {
                        bool larger = !(pixel[c] <= best[c]); // so that a NaN is not overlooked
                        best[c] = larger ? pixel[c] : best[c];
                        arg[c] = larger ? (uint8_t)tap : arg[c];
                    }
                }
            }
}

// din = 0, then din[the pixel that was the maximum] += dout
static void maxpool2d_backward(real *din, const real *dout, const uint8_t *argmax, const Layer *l,
                               size_t n) {
    Shape I = l->in, O = l->out;
    PARALLEL_FOR
    for (size_t image = 0; image < n; image++) {
        real *d = din + image * I.h * I.w * I.c;
        memset(d, 0, I.h * I.w * I.c * sizeof *d);
        for (size_t y = 0; y < O.h; y++)
            for (size_t x = 0; x < O.w; x++) {
                size_t at = ((image * O.h + y) * O.w + x) * O.c;
                for (size_t tap = 0; tap < l->kernel * l->kernel; tap++) {
                    size_t iy = y * l->stride + tap / l->kernel - l->padding;
                    size_t ix = x * l->stride + tap % l->kernel - l->padding;
                    if (iy >= I.h || ix >= I.w)
                        continue;
                    real *restrict pixel = d + (iy * I.w + ix) * I.c;
                    for (size_t c = 0; c < O.c; c++)
                        pixel[c] += argmax[at + c] == tap ? dout[at + c] : 0;
                }
            }
    }
}

/* out = in / (1 - p), or 0 with probability p; mask tells which. One Philox block serves 8 elements
   with 16 bits each, so p is rounded to 1/65536. Element e of the image at position q draws from
   (seed, layer, epoch, q, e). (Srivastava et al., "Dropout", JMLR 2014; inverted as in PyTorch.) */
static void dropout_forward(real *out, uint8_t *mask, const real *in, const Layer *l, size_t n,
                            uint32_t stream, const Draw *draw) {
    enum { BLOCK = 8, BLOCKS = 16 }; // 16 blocks at a time, for the compiler to vectorise
    size_t size = l->out.h * l->out.w * l->out.c;
    real scale = 1 / (1 - l->p);
    uint32_t threshold = (uint32_t)lround((double)l->p * 65536);
    PARALLEL_FOR
    for (size_t image = 0; image < n; image++)
        for (size_t start = 0; start < size; start += BLOCK * BLOCKS) {
            uint32_t bits[BLOCKS][4];
            for (size_t b = 0; b < BLOCKS; b++)
                philox4x32(bits[b], (uint32_t)(start / BLOCK + b), (uint32_t)(draw->first + image),
                           (uint32_t)draw->epoch, stream, draw->seed);
            uint16_t draws[BLOCK * BLOCKS];
            memcpy(draws, bits, sizeof draws);
            size_t at = image * size + start, count = min_size(size - start, BLOCK * BLOCKS);
            for (size_t i = 0; i < count; i++) {
                mask[at + i] = draws[i] >= threshold;
                out[at + i] = draws[i] >= threshold ? in[at + i] * scale : 0;
            }
        }
}

// din = dout / (1 - p) where the mask is set, else 0
static void dropout_backward(real *din, const real *dout, const uint8_t *mask, const Layer *l,
                             size_t n) {
    real scale = 1 / (1 - l->p);
    size_t count = n * l->out.h * l->out.w * l->out.c;
    PARALLEL_FOR
    for (size_t i = 0; i < count; i++)
        din[i] = mask[i] ? dout[i] * scale : 0;
}

// out[k] = in[k] - log(sum over j of exp(in[j])), shifted by the maximum: exp cannot overflow
static void log_softmax_forward(real *out, const real *in, size_t n, size_t classes) {
    for (size_t image = 0; image < n; image++, in += classes, out += classes) {
        real largest = -INFINITY, sum = 0;
        for (size_t k = 0; k < classes; k++)
            largest = in[k] > largest ? in[k] : largest;
        for (size_t k = 0; k < classes; k++)
            sum += (real)exp((double)(in[k] - largest));
        real log_sum = largest + (real)log((double)sum);
        for (size_t k = 0; k < classes; k++)
            out[k] = in[k] - log_sum;
    }
}

// din[k] = dout[k] - softmax[k] * sum over j of dout[j], where softmax = exp(out)
static void log_softmax_backward(real *din, const real *dout, const real *out, size_t n,
                                 size_t classes) {
    for (size_t image = 0; image < n; image++, din += classes, dout += classes, out += classes) {
        real sum = 0;
        for (size_t k = 0; k < classes; k++)
            sum += dout[k];
        for (size_t k = 0; k < classes; k++)
            din[k] = dout[k] - (real)exp((double)out[k]) * sum;
    }
}

/* Negative log-likelihood: losses[i] = -logp[i][label], one an image; the loss is their mean.
   dlogp = -1/n at the label, else 0; dlogp may be NULL. */
static void nll_loss(real *losses, real *dlogp, const real *logp, const uint8_t *labels, size_t n,
                     size_t classes) {
    for (size_t i = 0; i < n; i++)
        losses[i] = -logp[i * classes + labels[i]];
    for (size_t i = 0; dlogp && i < n * classes; i++)
        dlogp[i] = i % classes == labels[i / classes] ? -1 / (real)n : 0;
}

/* ---- The fast convolution: one register tile ---------------------------------------------------

   A CPU core of today does its arithmetic in vector registers: 16 floats at a time with AVX-512, 8
   with AVX2, 4 with NEON. It multiplies and adds faster than it loads, so numbers that were loaded
   must be used several times. The tile is how: hold a block of outputs, ROWS x up to VECTORS
   vectors, in registers, and for each step of the sum load ROWS numbers a and VECTORS vectors b,
   then do ROWS * VECTORS multiply-adds
                                   acc[i][j] += a[i] * b[j].
   With 6 x 4 vectors that is 24 multiply-adds for 10 loads, and 24 independent sums, enough to hide
   the 4 cycles that each takes. What a and b are makes it one pass or the other:

     forward         rows: 6 output pixels    b: 4 vectors of weights     sum: taps, channels in
     data gradient   rows: 6 input pixels     b: 4 vectors of weights^T   sum: taps, channels out
     weight gradient rows: 6 channels in      b: 4 vectors of dout        sum: all pixels

   A filter's taps are its kernel * kernel positions. gather[pixel][tap] tells which input pixel an
   output pixel meets at a tap, or -1 outside of the image; scatter is the same, seen from the input
   pixel. So stride, padding and borders are settled in two tables, made once; the tiles know only
   lists of addresses. A linear layer is a convolution of 1 x 1 pixel: it takes the same road. */

#if defined(__AVX512F__)
enum { VECTOR_BYTES = 64, VECTORS = 4 };
#elif defined(__AVX__)
enum { VECTOR_BYTES = 32, VECTORS = 2 }; // 16 registers: 12 sums, 2 of b
#elif defined(__aarch64__)
enum { VECTOR_BYTES = 16, VECTORS = 4 };
#else
enum { VECTOR_BYTES = 16, VECTORS = 2 };
#endif
enum {
    LANES = VECTOR_BYTES / sizeof(real),
    ROWS = 6,
    COLUMNS = VECTORS * LANES,        // the widest tile
    MAX_TAPS = 11 * 11,               // the largest kernel: 11 x 11
    MAX_DEPTH = 1024,                 // channels that a tile sums over at a time
    WEIGHT_BYTES = 256 * 1024,        // weights that a pass goes through at a time: they fit L2
    PATCH = 160,                      // the most numbers under a filter that are copied together
    PAIRS = 128,                      // pixels that a weight gradient takes at a time
    SLICES = 32,                      // pieces that a weight gradient is cut into
    SLICE_ELEMENTS = 2 * 1024 * 1024, // ... as long as their sums take no more than this
};
typedef real vec __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(real)), may_alias));
// an integer as wide as a real; a comparison of vectors sets all bits of a lane, or none
typedef __typeof__(__builtin_choose_expr(sizeof(real) == 8, (int64_t)0, (int32_t)0)) lane;
typedef lane mask __attribute__((vector_size(VECTOR_BYTES)));

#define SQRT(x) (sizeof(real) == sizeof(float) ? (real)sqrtf((float)(x)) : (real)sqrt((double)(x)))
#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

// Loads and stores the first `count` numbers of a vector; all of them, where there are enough.
INLINE vec load(const real *from, size_t count) {
    if (count >= LANES)
        return *(const vec *)from;
    vec v = {0};
    memcpy(&v, from, count * sizeof *from);
    return v;
}

INLINE void store(real *to, vec v, size_t count) {
    if (count >= LANES)
        *(vec *)to = v;
    else
        memcpy(to, &v, count * sizeof *to);
}

INLINE size_t left(size_t columns, size_t j) // columns from vector j on
{
    return columns > j * LANES ? columns - j * LANES : 0;
}

// What dot_tile() needs: 6 output pixels, and for each tap in use 6 input pixels and its weights.
typedef struct DotTile {
    real *out[ROWS];
    const real *in[MAX_TAPS][ROWS];
    const real *weight[MAX_TAPS]; // [depth][width of the tile]
    size_t taps, depth;           // the sum runs over taps * depth terms
    const real *bias;             // NULL: the sum starts from what out holds if add, else from 0
    bool add, relu;
} DotTile;

/* out[i][0 .. columns) = start + sum over taps t, d < depth of in[t][i][d] * weight[t][d][...] */
INLINE void dot_tile(const size_t vectors, const DotTile *t, size_t columns) {
    vec acc[ROWS][4];
    UNROLL
    for (size_t i = 0; i < ROWS; i++) {
        UNROLL
        for (size_t j = 0; j < vectors; j++)
            acc[i][j] = t->add    ? load(t->out[i] + j * LANES, left(columns, j))
                        : t->bias ? load(t->bias + j * LANES, left(columns, j))
                                  : (vec){0};
    }
    for (size_t tap = 0; tap < t->taps; tap++) {
        const real *const *a = t->in[tap];
        const real *a0 = a[0], *a1 = a[1], *a2 = a[2], *a3 = a[3], *a4 = a[4], *a5 = a[5];
        const real *w = t->weight[tap];
        for (size_t d = 0; d < t->depth; d++, w += vectors * LANES) {
            const real factor[ROWS] = {a0[d], a1[d], a2[d], a3[d], a4[d], a5[d]};
            vec b[4];
            UNROLL
            for (size_t j = 0; j < vectors; j++)
                b[j] = *(const vec *)(w + j * LANES);
            UNROLL
            for (size_t i = 0; i < ROWS; i++) {
                UNROLL
                for (size_t j = 0; j < vectors; j++)
                    acc[i][j] += factor[i] * b[j];
            }
        }
    }
    UNROLL
    for (size_t i = 0; i < ROWS; i++) {
        UNROLL
        for (size_t j = 0; j < vectors; j++) {
            vec v = acc[i][j];
            if (t->relu)
                v = (vec)((mask)v & ~(v < 0));
            store(t->out[i] + j * LANES, v, left(columns, j));
        }
    }
}

// One term of a weight gradient: an input pixel and the gradient of the output pixel that it met.
typedef struct Pair {
    const real *in, *dout;
} Pair;

/* dweight[i][0 .. columns) += sum over pairs of in[i] * dout[0 .. columns), for i < rows.
   Reads whole vectors of dout; what lies behind the columns is dropped. */
INLINE void outer_tile(const size_t rows, const size_t vectors, real *dweight, size_t stride,
                       size_t columns, const Pair *pairs, size_t count, size_t row, size_t column) {
    vec acc[ROWS][4];
    UNROLL
    for (size_t i = 0; i < rows; i++) {
        UNROLL
        for (size_t j = 0; j < vectors; j++)
            acc[i][j] = load(dweight + i * stride + j * LANES, left(columns, j));
    }
    for (size_t p = 0; p < count; p++) {
        const real *a = pairs[p].in + row, *d = pairs[p].dout + column;
        vec b[4];
        UNROLL
        for (size_t j = 0; j < vectors; j++)
            b[j] = *(const vec *)(d + j * LANES);
        UNROLL
        for (size_t i = 0; i < rows; i++) {
            UNROLL
            for (size_t j = 0; j < vectors; j++)
                acc[i][j] += a[i] * b[j];
        }
    }
    UNROLL
    for (size_t i = 0; i < rows; i++) {
        UNROLL
        for (size_t j = 0; j < vectors; j++)
            store(dweight + i * stride + j * LANES, acc[i][j], left(columns, j));
    }
}

/* The compiler keeps acc in registers only if rows and vectors are constants, so each size is a
   function of its own. Not inlined: several tiles in one function make gcc spill registers. */
#define DOT_TILE(vectors)                                                \
    NOINLINE void dot_tile_##vectors(const DotTile *t, size_t columns) { \
        dot_tile(vectors, t, columns);                                   \
    }
#define OUTER_TILE(rows, vectors)                                                             \
    NOINLINE void outer_tile_##rows##_##vectors(real *dweight, size_t stride, size_t columns, \
                                                const Pair *pairs, size_t count, size_t row,  \
                                                size_t column) {                              \
        outer_tile(rows, vectors, dweight, stride, columns, pairs, count, row, column);       \
    }
#define TILES(v)     \
    DOT_TILE(v)      \
    OUTER_TILE(1, v) \
    OUTER_TILE(2, v) OUTER_TILE(3, v) OUTER_TILE(4, v) OUTER_TILE(5, v) OUTER_TILE(6, v)
#define OUTER_TILES(rows) \
    { outer_tile_##rows##_1, outer_tile_##rows##_2, outer_tile_##rows##_3, outer_tile_##rows##_4 }
TILES(1)
TILES(2)
TILES(3)
TILES(4)
typedef void DotTileFunction(const DotTile *t, size_t columns);
typedef void OuterTileFunction(real *dweight, size_t stride, size_t columns, const Pair *pairs,
                               size_t count, size_t row, size_t column);
static DotTileFunction *const dot_tiles[4] = {dot_tile_1, dot_tile_2, dot_tile_3, dot_tile_4};
static OuterTileFunction *const outer_tiles[ROWS][4] = {
    OUTER_TILES(1), OUTER_TILES(2), OUTER_TILES(3), OUTER_TILES(4), OUTER_TILES(5), OUTER_TILES(6)};

// One pass of a convolution: which way it goes through the pixels, and the sizes as it sees them.
typedef struct Pass {
    const int32_t *map; // [out_pixels][1 + taps]: an output pixel, then what it meets at each tap
    size_t taps, in_pixels, depth, out_pixels, columns; // depth: channels summed; columns: made
    bool patches; // few channels: all numbers under the filter are copied together, to sum at once
} Pass;

static Pass forward_pass(const Layer *l) {
    size_t taps = l->kernel * l->kernel;
    return (Pass){l->gather,
                  taps,
                  l->in.h * l->in.w,
                  l->in.c,
                  l->out.h * l->out.w,
                  l->out.c,
                  l->in.c < 8 && taps > 1 && taps * l->in.c <= PATCH};
}

static Pass backward_pass(const Layer *l) {
    return (Pass){l->scatter, l->kernel * l->kernel, l->out.h * l->out.w,
                  l->out.c,   l->in.h * l->in.w,     l->in.c,
                  false};
}

// The two maps of a layer. Made once, before the first step.
static void cpu_prepare(Layer *l) {
    Shape I = l->in, O = l->out;
    size_t taps = l->kernel * l->kernel, s = l->stride;
    l->gather = must_alloc(O.h * O.w * (1 + taps) * sizeof *l->gather, "pixel maps");
    l->scatter = must_alloc(I.h * I.w * (1 + taps) * sizeof *l->scatter, "pixel maps");
    int32_t *at = l->gather;
    for (size_t y = 0; y < O.h; y++)
        for (size_t x = 0; x < O.w; x++) {
            *at++ = (int32_t)(y * O.w + x);
            for (size_t tap = 0; tap < taps; tap++) {
                size_t iy = y * s + tap / l->kernel - l->padding; // outside: wraps around, >= h
                size_t ix = x * s + tap % l->kernel - l->padding;
                *at++ = iy < I.h && ix < I.w ? (int32_t)(iy * I.w + ix) : -1;
            }
        }
    // With a stride, neighbours meet different taps; pixels that meet the same ones stand together.
    at = l->scatter;
    for (size_t phase = 0; phase < s * s; phase++)
        for (size_t iy = phase / s; iy < I.h; iy += s)
            for (size_t ix = phase % s; ix < I.w; ix += s) {
                *at++ = (int32_t)(iy * I.w + ix);
                for (size_t tap = 0; tap < taps; tap++) {
                    size_t sy = iy + l->padding - tap / l->kernel;
                    size_t sx = ix + l->padding - tap % l->kernel;
                    bool met = sy % s == 0 && sx % s == 0 && sy / s < O.h && sx / s < O.w;
                    *at++ = met ? (int32_t)(sy / s * O.w + sx / s) : -1;
                }
            }
}

/* Weights in the order in which tiles read them: [block of COLUMNS][tap][depth][column], the last
   vector filled up with zeros. transposed: from [tap][column][depth]. */
static void pack_weights(real *packed, const real *weight, const Pass *p, bool transposed) {
    size_t rows = p->taps * p->depth;
    PARALLEL_FOR_2
    for (size_t first = 0; first < p->columns; first += COLUMNS)
        for (size_t row = 0; row < rows; row++) {
            size_t columns = min_size(COLUMNS, p->columns - first);
            size_t width = ceil_div(columns, LANES) * LANES, tap = row / p->depth;
            real *to = packed + first * rows + row * width;
            const real *from = transposed
                                   ? weight + (tap * p->columns + first) * p->depth + row % p->depth
                                   : weight + row * p->columns + first;
            size_t step = transposed ? p->depth : 1;
            for (size_t j = 0; j < columns; j++)
                to[j] = from[j * step];
            for (size_t j = columns; j < width; j++)
                to[j] = 0;
        }
}

static size_t packed_size(const Pass *p) {
    return p->taps * p->depth * ceil_div(p->columns, LANES) * LANES;
}

// Copies what lies under the filter at one output pixel: patch[tap][channel], 0 outside.
static void copy_patch(real *patch, const real *image, const int32_t *met, const Pass *p) {
    for (size_t tap = 0; tap < p->taps; tap++)
        for (size_t c = 0; c < p->depth; c++)
            *patch++ = met[tap] < 0 ? 0 : image[(size_t)met[tap] * p->depth + c];
}

static const real zeros[MAX_DEPTH]; // what lies outside of an image

// Lists the taps that any of the tile's pixels meets; taps that all miss cost nothing.
static void list_taps(DotTile *t, const Pass *p, const int32_t *const met[ROWS],
                      const real *const image[ROWS], const real *weight, size_t weight_step) {
    t->taps = 0;
    for (size_t tap = 0; tap < p->taps; tap++) {
        bool any = false;
        for (size_t i = 0; i < ROWS; i++) {
            bool inside = met[i][tap] >= 0;
            any |= inside;
            t->in[t->taps][i] = inside ? image[i] + (size_t)met[i][tap] * p->depth : zeros;
        }
        if (any)
            t->weight[t->taps++] = weight + tap * weight_step;
    }
}

// Output pixels of `images` images from `first` on, columns from `column` on.
static void convolve_block(real *out, const real *in, const real *packed, const real *bias,
                           bool relu, const Pass *p, size_t first, size_t images, size_t column) {
    DotTile t = {.bias = bias ? bias + column : NULL};
    real patch[ROWS][PATCH];
    size_t columns = min_size(COLUMNS, p->columns - column), vectors = ceil_div(columns, LANES);
    size_t width = vectors * LANES, pixels = images * p->out_pixels;
    size_t deepest = min_size(MAX_DEPTH, WEIGHT_BYTES / (p->taps * width * sizeof(real)));
    const real *block = packed + column * p->taps * p->depth;
    for (size_t d = 0; d < p->depth; d += deepest) {
        t.depth = min_size(deepest, p->depth - d);
        t.add = d > 0;
        t.relu = relu && d + t.depth == p->depth;
        for (size_t pixel = 0; pixel < pixels; pixel += ROWS) {
            const int32_t *met[ROWS];
            const real *image[ROWS];
            for (size_t i = 0; i < ROWS; i++) { // a short last tile repeats its last pixel
                size_t q = min_size(pixel + i, pixels - 1), n = first + q / p->out_pixels;
                met[i] = p->map + q % p->out_pixels * (1 + p->taps);
                t.out[i] = out + (n * p->out_pixels + (size_t)*met[i]++) * p->columns + column;
                image[i] = in + n * p->in_pixels * p->depth + d;
            }
            if (p->patches) {
                for (size_t i = 0; i < ROWS; i++) {
                    copy_patch(patch[i], image[i], met[i], p);
                    t.in[0][i] = patch[i];
                }
                t.weight[0] = block;
                t.taps = 1;
                t.depth = p->taps * p->depth;
            } else
                list_taps(&t, p, met, image, block + d * width, p->depth * width);
            dot_tiles[vectors - 1](&t, columns);
        }
    }
}

// out[pixel][column] = bias[column] + sum over taps and depth, then ReLU if asked; bias may be NULL
static void convolve(real *out, const real *in, const real *packed, const real *bias, bool relu,
                     const Pass *p, size_t n) {
    size_t blocks = ceil_div(p->columns, COLUMNS);
    size_t images = min_size(n, ceil_div(512, p->out_pixels)); // weights are read once for these
    while (images > 1 && images * p->out_pixels > 24 && ceil_div(n, images) * blocks < SLICES)
        images = ceil_div(images, 2);
    PARALLEL_FOR_2
    for (size_t first = 0; first < n; first += images)
        for (size_t block = 0; block < blocks; block++)
            convolve_block(out, in, packed, bias, relu, p, first, min_size(images, n - first),
                           block * COLUMNS);
}

static void conv2d_forward_fast(real *out, const real *in, const real *weight, const real *bias,
                                const Layer *l, size_t n, real *scratch) {
    Pass p = forward_pass(l);
    pack_weights(scratch, weight, &p, false);
    convolve(out, in, scratch, bias, l->fused_relu, &p, n);
}

/* A weight gradient as its pieces see it: slices of the images times parts of the rows. Rows are
   dealt in units: (tap, up to ROWS channels), and one last unit for the bias, which is the weight
   of an input that is always 1. */
typedef struct WeightGradient {
    Pass pass;
    const real *in, *dout;
    size_t taps, depth, groups, units; // with patches: one tap, as deep as the patch
    size_t n, slices, parts;
} WeightGradient;

static WeightGradient weight_gradient_plan(const Layer *l, size_t n) {
    WeightGradient g = {.pass = forward_pass(l), .n = n};
    g.taps = g.pass.patches ? 1 : g.pass.taps;
    g.depth = g.pass.patches ? g.pass.taps * g.pass.depth : g.pass.depth;
    g.groups = ceil_div(g.depth, ROWS);
    g.units = g.taps * g.groups + 1;
    size_t sums = l->weights + l->biases;
    g.slices = min_size(n, min_size(SLICES, max_size(1, SLICE_ELEMENTS / sums)));
    g.parts = min_size(g.units, ceil_div(SLICES, g.slices));
    return g;
}

// Pairs of (what the filter meets at this tap, gradient of the output) of pixels [first, last).
static size_t list_pairs(Pair pairs[PAIRS], real *patches, const WeightGradient *g, size_t tap,
                         size_t first, size_t last) {
    static const real one = 1;
    const Pass *p = &g->pass;
    size_t count = 0, image = first / p->out_pixels, pixel = first % p->out_pixels;
    for (size_t q = first; q < last; q++) {
        const int32_t *met = p->map + pixel * (1 + p->taps) + 1;
        const real *in = g->in + image * p->in_pixels * p->depth;
        pairs[count].dout = g->dout + (image * p->out_pixels + pixel) * p->columns;
        if (tap == g->taps)
            pairs[count++].in = &one;
        else if (p->patches) {
            copy_patch(patches + count * PATCH, in, met, p);
            pairs[count].in = patches + count * PATCH;
            count++;
        } else if (met[tap] >= 0)
            pairs[count++].in = in + (size_t)met[tap] * p->depth;
        if (++pixel == p->out_pixels) {
            pixel = 0;
            image++;
        }
    }
    return count;
}

// dweight and dbias (=) of one part of the rows over one slice of the images
static void weight_gradient_piece(real *dweight, real *dbias, const WeightGradient *g, size_t slice,
                                  size_t part) {
    Pair pairs[PAIRS];
    real patches[PAIRS * PATCH];
    const size_t columns = g->pass.columns, pixels = g->pass.out_pixels;
    size_t begin = g->n * slice / g->slices * pixels, end = g->n * (slice + 1) / g->slices * pixels;
    size_t first = g->units * part / g->parts, last = g->units * (part + 1) / g->parts, count = 0;
    for (size_t q = begin; q < end; q += PAIRS)
        for (size_t unit = first; unit < last; unit++) {
            size_t tap = unit / g->groups, group = unit % g->groups;
            if (unit == first || group == 0)
                count = list_pairs(pairs, patches, g, tap, q, min_size(q + PAIRS, end));
            bool bias = tap == g->taps;
            size_t row = bias ? 0 : g->depth * group / g->groups;
            size_t rows = bias ? 1 : g->depth * (group + 1) / g->groups - row;
            real *to = bias ? dbias : dweight + (tap * g->depth + row) * columns;
            if (q == begin)
                memset(to, 0, rows * columns * sizeof *to);
            for (size_t c = 0; c < columns; c += COLUMNS) {
                size_t width = min_size(COLUMNS, columns - c);
                outer_tiles[rows - 1][ceil_div(width, LANES) - 1](to + c, columns, width, pairs,
                                                                  count, row, c);
            }
        }
}

static void weight_gradient(real *dweight, real *dbias, const real *dout, const real *in,
                            const Layer *l, size_t n, real *scratch) {
    WeightGradient g = weight_gradient_plan(l, n);
    g.in = in;
    g.dout = dout;
    size_t sums = l->weights + l->biases;
    PARALLEL_FOR_2
    for (size_t slice = 0; slice < g.slices; slice++)
        for (size_t part = 0; part < g.parts; part++) {
            real *to = g.slices > 1 ? scratch + slice * sums : dweight;
            weight_gradient_piece(to, g.slices > 1 ? to + l->weights : dbias, &g, slice, part);
        }
    if (g.slices == 1)
        return;
    PARALLEL_FOR
    for (size_t i = 0; i < sums; i++) {
        real sum = 0;
        for (size_t slice = 0; slice < g.slices; slice++)
            sum += scratch[slice * sums + i];
        *(i < l->weights ? dweight + i : dbias + i - l->weights) = sum;
    }
}

static void conv2d_backward_fast(real *din, real *dweight, real *dbias, const real *dout,
                                 const real *in, const real *weight, const Layer *l, size_t n,
                                 real *scratch) {
    weight_gradient(dweight, dbias, dout, in, l, n, scratch);
    if (!din)
        return;
    Pass p = backward_pass(l);
    pack_weights(scratch, weight, &p, true);
    convolve(din, dout, scratch, NULL, false, &p, n);
}

/* The same, a vector of channels at a time: the largest so far and where it was stay in registers.
   Spelled out, because compilers do not mix numbers and bytes in one vector loop by themselves. */
static void maxpool2d_forward_fast(real *out, uint8_t *argmax, const real *in, const Layer *l,
                                   size_t n) {
    typedef uint8_t bytes __attribute__((vector_size(LANES)));
    Shape I = l->in, O = l->out;
    PARALLEL_FOR_2
    for (size_t image = 0; image < n; image++)
        for (size_t y = 0; y < O.h; y++)
            for (size_t x = 0; x < O.w; x++)
                for (size_t c = 0; c < O.c; c += LANES) {
                    size_t at = ((image * O.h + y) * O.w + x) * O.c + c, count = O.c - c;
                    vec best = (vec){0} - (real)INFINITY;
                    mask arg = {0};
                    for (size_t tap = 0; tap < l->kernel * l->kernel; tap++) {
                        size_t iy = y * l->stride + tap / l->kernel - l->padding;
                        size_t ix = x * l->stride + tap % l->kernel - l->padding;
                        if (iy >= I.h || ix >= I.w)
                            continue;
                        vec v = load(in + ((image * I.h + iy) * I.w + ix) * I.c + c, count);
                        mask larger = ~(v <= best);
                        best = (vec)((larger & (mask)v) | (~larger & (mask)best));
                        arg = (larger & ((mask){0} + (lane)tap)) | (~larger & arg);
                    }
                    store(out + at, best, count);
                    bytes positions = __builtin_convertvector(arg, bytes);
                    memcpy(argmax + at, &positions, min_size(count, LANES));
                }
}

static size_t scratch_size_naive(const Layer *l, size_t n) {
    (void)l;
    (void)n;
    return 0;
}

static size_t scratch_size_fast(const Layer *l, size_t n) {
    if (l->kind != CONV2D && l->kind != LINEAR)
        return 0;
    Pass forward = forward_pass(l), backward = backward_pass(l);
    size_t slices = weight_gradient_plan(l, n).slices;
    return max_size(max_size(packed_size(&forward), packed_size(&backward)),
                    slices * (l->weights + l->biases));
}

/* ---- Optimizer steps ---------------------------------------------------------------------------

   One pass over a flat range of parameters each. */

/* Adadelta (Zeiler, arXiv:1212.5701), as PyTorch computes it:
   square_avg = rho * square_avg + (1 - rho) * grad^2
   delta = sqrt(acc_delta + eps) / sqrt(square_avg + eps) * grad
   acc_delta = rho * acc_delta + (1 - rho) * delta^2;   param -= lr * delta */
static void adadelta(real *param, const real *grad, real *square_avg, real *acc_delta, size_t count,
                     double lr, double rho, double eps) {
    const real keep = (real)rho, mix = (real)(1 - rho), e = (real)eps, rate = (real)lr;
    PARALLEL_FOR
    for (size_t i = 0; i < count; i++) {
        real g = grad[i];
        real square = square_avg[i] = keep * square_avg[i] + mix * g * g;
        real delta = SQRT(acc_delta[i] + e) / SQRT(square + e) * g;
        acc_delta[i] = keep * acc_delta[i] + mix * delta * delta;
        param[i] -= rate * delta;
    }
}

// param -= lr * grad
static void sgd(real *param, const real *grad, size_t count, double lr) {
    const real rate = (real)lr;
    PARALLEL_FOR
    for (size_t i = 0; i < count; i++)
        param[i] -= rate * grad[i];
}

static void cpu_copy(void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
}

static void cpu_synchronize(void) // a CPU has done what it was told when the call returns
{}

#define CPU_COMMON                                                                                \
    .name = "cpu", .alloc = host_alloc, .release = free, .copy = cpu_copy,                        \
    .synchronize = cpu_synchronize, .relu_forward = relu_forward, .relu_backward = relu_backward, \
    .maxpool2d_backward = maxpool2d_backward, .dropout_forward = dropout_forward,                 \
    .dropout_backward = dropout_backward, .log_softmax_forward = log_softmax_forward,             \
    .log_softmax_backward = log_softmax_backward, .nll_loss = nll_loss, .adadelta = adadelta,     \
    .sgd = sgd

static const Backend backends[] = {
    {CPU_COMMON, .kernels = "naive", .scratch_size = scratch_size_naive,
     .maxpool2d_forward = maxpool2d_forward_naive, .conv2d_forward = conv2d_forward_naive,
     .conv2d_backward = conv2d_backward_naive, .linear_forward = linear_forward_naive,
     .linear_backward = linear_backward_naive},
    {CPU_COMMON, .kernels = "fast", .fuses_relu = true, .scratch_size = scratch_size_fast,
     .prepare = cpu_prepare, .maxpool2d_forward = maxpool2d_forward_fast,
     .conv2d_forward = conv2d_forward_fast, .conv2d_backward = conv2d_backward_fast,
     .linear_forward = conv2d_forward_fast, .linear_backward = conv2d_backward_fast},
};

/* ==== 6. Network ================================================================================

   A network is a table of layers, each of which reads the output of an earlier row. Builders add
   rows and look like the PyTorch modules that they mirror. Everything else (sizes, memory, summary,
   forward, backward, checkpoints) walks over the table. The network owns five arenas, planned from
   the table and allocated once:
      params, grads                 [parameters], each tensor on a cache line's border
      activations, dactivations     [batch][...] of every row; in-place rows share their input's
      saved                         bytes that a forward leaves for its backward */

enum { MAX_LAYERS = 512, ALIGN = 64 / sizeof(real) };

typedef struct Net {
    const char *model;
    const Backend *backend;
    Layer layers[MAX_LAYERS]; // row 0 is the input
    size_t count;
    size_t parameters; // how many there are
    size_t param_size; // ... with the gaps between tensors: the size of the arenas
    size_t batch;      // the most images of one step
    size_t activation_size, saved_size, scratch_size;
    real *params, *grads, *activations, *dactivations, *scratch, *losses;
    uint8_t *saved, *labels;
} Net;

static size_t shape_size(Shape s) {
    return s.h * s.w * s.c;
}

static size_t aligned(size_t count) {
    return ceil_div(count, ALIGN) * ALIGN;
}

static size_t add_layer(Net *net, Layer l) {
    if (net->count == MAX_LAYERS)
        die(1, "model %s: more than %d layers; raise MAX_LAYERS in cnn.c", net->model, MAX_LAYERS);
    net->layers[net->count] = l;
    return net->count++;
}

// PyTorch's habit of naming: conv1, conv2, ..., fc1, fc2, ...
static void name_layer(const Net *net, Layer *l, const char *prefix) {
    size_t number = 1;
    for (size_t i = 0; i < net->count; i++)
        number += net->layers[i].kind == l->kind;
    snprintf(l->name, sizeof l->name, "%s%zu", prefix, number);
}

static size_t add_params(Net *net, size_t count) {
    size_t offset = net->param_size;
    net->param_size += aligned(count);
    net->parameters += count;
    return offset;
}

// nn.Conv2d(in_channels = those of x, out_channels, kernel_size, stride, padding)
static size_t conv2d(Net *net, size_t x, size_t out_channels, size_t kernel, size_t stride,
                     size_t padding) {
    Shape in = net->layers[x].out;
    if (in.h + 2 * padding < kernel || in.w + 2 * padding < kernel)
        die(1,
            "model %s: conv2d at row %zu: a %zu x %zu filter does not fit on %zu x %zu pixels "
            "with padding %zu",
            net->model, net->count, kernel, kernel, in.h, in.w, padding);
    if (kernel * kernel > MAX_TAPS || kernel * stride * out_channels == 0)
        die(1,
            "model %s: conv2d at row %zu: expected a filter of 1 x 1 to 11 x 11, a stride and "
            "channels of at least 1",
            net->model, net->count);
    Layer l = {.kind = CONV2D, .input = x, .kernel = kernel, .stride = stride, .padding = padding};
    l.in = in;
    l.out = (Shape){(in.h + 2 * padding - kernel) / stride + 1,
                    (in.w + 2 * padding - kernel) / stride + 1, out_channels};
    l.weights = kernel * kernel * in.c * out_channels;
    l.biases = out_channels;
    l.weight = add_params(net, l.weights);
    l.bias = add_params(net, l.biases);
    name_layer(net, &l, "conv");
    return add_layer(net, l);
}

// nn.Linear(in_features = all numbers of x, out_features); flattens x by itself
static size_t linear(Net *net, size_t x, size_t out_features) {
    size_t in_features = shape_size(net->layers[x].out);
    if (out_features == 0)
        die(1, "model %s: linear at row %zu: expected at least 1 output", net->model, net->count);
    Layer l = {.kind = LINEAR, .input = x, .kernel = 1, .stride = 1};
    l.in = (Shape){1, 1, in_features};
    l.out = (Shape){1, 1, out_features};
    l.weights = in_features * out_features;
    l.biases = out_features;
    l.weight = add_params(net, l.weights);
    l.bias = add_params(net, l.biases);
    name_layer(net, &l, "fc");
    return add_layer(net, l);
}

static size_t same_shape(Net *net, size_t x, LayerKind kind, real p) {
    Shape s = net->layers[x].out;
    return add_layer(net, (Layer){.kind = kind, .input = x, .in = s, .out = s, .p = p});
}

static size_t relu(Net *net, size_t x) {
    return same_shape(net, x, RELU, 0);
}

// nn.Dropout(p)
static size_t dropout(Net *net, size_t x, real p) {
    if (!(p >= 0 && p < 1))
        die(1, "model %s: dropout at row %zu: expected a probability from 0 to below 1, found %g",
            net->model, net->count, (double)p);
    return same_shape(net, x, DROPOUT, p);
}

static size_t log_softmax(Net *net, size_t x) {
    return same_shape(net, x, LOG_SOFTMAX, 0);
}

// nn.MaxPool2d(kernel_size, stride = kernel_size)
static size_t maxpool2d(Net *net, size_t x, size_t kernel) {
    Shape in = net->layers[x].out;
    if (kernel == 0 || kernel > 15 || in.h < kernel || in.w < kernel)
        die(1,
            "model %s: maxpool2d at row %zu: a %zu x %zu window does not fit on %zu x %zu pixels",
            net->model, net->count, kernel, kernel, in.h, in.w);
    Layer l = {.kind = MAXPOOL2D, .input = x, .in = in, .kernel = kernel, .stride = kernel};
    l.out = (Shape){in.h / kernel, in.w / kernel, in.c};
    return add_layer(net, l);
}

/* Which rows overwrite their input: ReLU and dropout, where nobody else reads it. Nothing is lost:
   a ReLU's backward asks only where its output is positive, a dropout's only for its mask. */
static void plan_in_place(Net *net) {
    size_t readers[MAX_LAYERS] = {0};
    for (size_t i = 1; i < net->count; i++)
        readers[net->layers[i].input]++;
    for (size_t i = 1; i < net->count; i++) {
        Layer *l = &net->layers[i], *before = &net->layers[l->input];
        l->in_place =
            (l->kind == RELU || l->kind == DROPOUT) && l->input > 0 && readers[l->input] == 1;
        if (l->kind == RELU && l->in_place && (before->kind == CONV2D || before->kind == LINEAR))
            before->fused_relu = net->backend->fuses_relu;
    }
}

// Offsets and sizes of all arenas, for batches of at most `batch` images.
static void plan_memory(Net *net, size_t batch) {
    plan_in_place(net);
    net->batch = batch;
    for (size_t i = 0; i < net->count; i++) {
        Layer *l = &net->layers[i];
        size_t size = aligned(batch * shape_size(l->out));
        l->output = l->in_place ? net->layers[l->input].output : net->activation_size;
        net->activation_size += l->in_place ? 0 : size;
        l->saved = net->saved_size;
        net->saved_size += l->kind == MAXPOOL2D || l->kind == DROPOUT ? size : 0;
        net->scratch_size = max_size(net->scratch_size, net->backend->scratch_size(l, batch));
    }
}

static void *device_alloc(const Net *net, size_t bytes, const char *what) {
    void *memory = net->backend->alloc(bytes);
    if (!memory)
        die(1, "no memory for %s: %.1f MB asked for; a --batch-size below %zu needs less", what,
            (double)bytes / 1e6, net->batch);
    return memory;
}

static void net_alloc(Net *net) {
    net->params = device_alloc(net, net->param_size * sizeof(real), "parameters");
    net->grads = device_alloc(net, net->param_size * sizeof(real), "gradients");
    net->activations = device_alloc(net, net->activation_size * sizeof(real), "activations");
    net->dactivations =
        device_alloc(net, net->activation_size * sizeof(real), "activation gradients");
    net->saved = device_alloc(net, net->saved_size, "masks");
    net->scratch = device_alloc(net, net->scratch_size * sizeof(real), "scratch space");
    net->losses = device_alloc(net, net->batch * sizeof(real), "losses");
    net->labels = device_alloc(net, net->batch, "labels");
    for (size_t i = 0; net->backend->prepare && i < net->count; i++)
        if (net->layers[i].weights)
            net->backend->prepare(&net->layers[i]);
}

static void net_free(Net *net) {
    void *arenas[] = {net->params,  net->grads,  net->activations, net->dactivations,
                      net->scratch, net->losses, net->saved,       net->labels};
    for (size_t i = 0; i < sizeof arenas / sizeof *arenas; i++)
        net->backend->release(arenas[i]);
    for (size_t i = 0; i < net->count; i++) {
        free(net->layers[i].gather);
        free(net->layers[i].scatter);
    }
}

static void init_uniform(real *values, size_t count, real bound, uint32_t tensor, uint64_t seed) {
    for (size_t i = 0; i < count; i += 4) {
        uint32_t r[4];
        philox4x32(r, (uint32_t)(i / 4), tensor, 0, DRAW_INIT, seed);
        for (size_t j = 0; j < min_size(4, count - i); j++)
            values[i + j] = bound * (2 * uniform(r[j]) - 1);
    }
}

// PyTorch's default: weights and biases uniform within +-1 / sqrt(fan_in)
static void net_init(Net *net, uint64_t seed) {
    real *params = must_alloc(net->param_size * sizeof(real), "parameters");
    for (size_t i = 0; i < net->count; i++) {
        const Layer *l = &net->layers[i];
        if (!l->weights)
            continue;
        real bound = (real)(1 / sqrt((double)(l->weights / l->out.c)));
        init_uniform(params + l->weight, l->weights, bound, (uint32_t)(2 * i), seed);
        init_uniform(params + l->bias, l->biases, bound, (uint32_t)(2 * i + 1), seed);
    }
    net->backend->copy(net->params, params, net->param_size * sizeof(real));
    free(params);
}

// Floating-point operations of one image, forward: 2 for each multiply-add.
static double layer_flops(const Layer *l) {
    return 2. * (double)l->weights * (double)(l->out.h * l->out.w);
}

// Training: forward, weight gradient and, but for the layers on the input, data gradient.
static double training_flops(const Net *net) {
    double flops = 0;
    for (size_t i = 1; i < net->count; i++)
        flops += layer_flops(&net->layers[i]) * (net->layers[i].input == 0 ? 2 : 3);
    return flops;
}

static void describe_layer(const Layer *l, char *text, size_t size) {
    switch (l->kind) {
    case INPUT:
        snprintf(text, size, "input");
        break;
    case CONV2D:
        snprintf(text, size, "conv2d %zux%zu stride %zu padding %zu", l->kernel, l->kernel,
                 l->stride, l->padding);
        break;
    case RELU:
        snprintf(text, size, "relu");
        break;
    case MAXPOOL2D:
        snprintf(text, size, "maxpool2d %zux%zu", l->kernel, l->kernel);
        break;
    case DROPOUT:
        snprintf(text, size, "dropout %g", (double)l->p);
        break;
    case LINEAR:
        snprintf(text, size, "linear %zu -> %zu", l->in.c, l->out.c);
        break;
    case LOG_SOFTMAX:
        snprintf(text, size, "log_softmax");
        break;
    }
}

static void print_summary(const Net *net) {
    printf("Model %s:\n  row  name    layer                         output (h x w x c)"
           "  parameters  MFLOP forward\n",
           net->model);
    for (size_t i = 0; i < net->count; i++) {
        const Layer *l = &net->layers[i];
        char kind[64], shape[64];
        describe_layer(l, kind, sizeof kind);
        snprintf(shape, sizeof shape, "%zu x %zu x %zu", l->out.h, l->out.w, l->out.c);
        printf("  %3zu  %-7s %-28s %19s  %10zu  %13.3f\n", i, l->name, kind, shape,
               l->weights + l->biases, layer_flops(l) / 1e6);
    }
    printf("  %zu parameters, %.1f MFLOP to train on one image\n", net->parameters,
           training_flops(net) / 1e6);
}

/* ==== 7. Models =================================================================================

   Yours takes ten lines: write a builder like model_mnist(), in which x is the row that holds the
   images, and add it to the table with the datasets that it can use by itself. */

// The network of the PyTorch MNIST example.
static size_t model_mnist(Net *net, size_t x) {
    x = relu(net, conv2d(net, x, 32, 3, 1, 0));
    x = relu(net, conv2d(net, x, 64, 3, 1, 0));
    x = dropout(net, maxpool2d(net, x, 2), (real)0.25);
    x = relu(net, linear(net, x, 128));
    x = linear(net, dropout(net, x, (real)0.5), 10);
    return log_softmax(net, x);
}

typedef struct Model {
    const char *name;
    size_t (*build)(Net *net, size_t x);
    const char *datasets; // what --dataset auto takes: the first of these that is there
} Model;

static const Model models[] = {
    {"mnist", model_mnist, "mnist fashion-mnist synthetic"},
};
enum { MODELS = sizeof models / sizeof *models };

static void net_build(Net *net, const Model *model, const DatasetInfo *data,
                      const Backend *backend) {
    *net = (Net){.model = model->name, .backend = backend};
    size_t x = add_layer(net, (Layer){.kind = INPUT, .in = data->shape, .out = data->shape});
    x = model->build(net, x);
    const Layer *last = &net->layers[x];
    if (x != net->count - 1 || last->kind != LOG_SOFTMAX || shape_size(last->out) != data->classes)
        die(1,
            "model %s: expected log_softmax over the %zu classes of %s as its last row, found "
            "%zu outputs",
            model->name, data->classes, data->name, shape_size(last->out));
}

/* ==== 8. Forward and backward ===================================================================

   The walk over the layer table: down for the outputs, up for the gradients. The rule for what is
   = and what is +=: every backward writes its gradients with =, so nothing has to be set to zero
   before a step (PyTorch's optimizer.zero_grad()). Each row may be read by one other row. */

static real *output(const Net *net, const Layer *l) {
    return net->activations + l->output;
}

static real *output_gradient(const Net *net, const Layer *l) {
    return net->dactivations + l->output;
}

static const Layer *last_layer(const Net *net) {
    return &net->layers[net->count - 1];
}

// data.to(device)
static void net_load(Net *net, const Batch *batch) {
    size_t bytes = batch->n * shape_size(net->layers[0].out) * sizeof(real);
    net->backend->copy(output(net, &net->layers[0]), batch->images, bytes);
    net->backend->copy(net->labels, batch->labels, batch->n);
}

// model(data): log-probabilities of n images. draw NULL: evaluation, dropout does nothing.
static void forward(Net *net, size_t n, const Draw *draw) {
    const Backend *b = net->backend;
    for (size_t i = 1; i < net->count; i++) {
        const Layer *l = &net->layers[i];
        real *out = output(net, l);
        const real *in = output(net, &net->layers[l->input]);
        const real *weight = net->params + l->weight, *bias = net->params + l->bias;
        uint8_t *saved = net->saved + l->saved;
        size_t count = n * shape_size(l->out);
        switch (l->kind) {
        case INPUT:
            break;
        case CONV2D:
            b->conv2d_forward(out, in, weight, bias, l, n, net->scratch);
            break;
        case LINEAR:
            b->linear_forward(out, in, weight, bias, l, n, net->scratch);
            break;
        case RELU:
            if (!net->layers[l->input].fused_relu)
                b->relu_forward(out, in, count);
            break;
        case MAXPOOL2D:
            b->maxpool2d_forward(out, saved, in, l, n);
            break;
        case DROPOUT:
            if (draw)
                b->dropout_forward(out, saved, in, l, n, DRAW_DROPOUT + (uint32_t)i, draw);
            else if (!l->in_place)
                b->copy(out, in, count * sizeof *out);
            break;
        case LOG_SOFTMAX:
            b->log_softmax_forward(out, in, n, l->out.c);
            break;
        }
    }
}

// loss.backward(): from the gradient of the last row to those of all parameters
static void backward(Net *net, size_t n) {
    const Backend *b = net->backend;
    for (size_t i = net->count - 1; i > 0; i--) {
        const Layer *l = &net->layers[i], *before = &net->layers[l->input];
        if (l->input == 0 && !l->weights)
            continue; // nobody asks for the gradient of the images
        real *din = l->input == 0 ? NULL : output_gradient(net, before);
        const real *dout = output_gradient(net, l), *out = output(net, l);
        const real *in = output(net, before), *weight = net->params + l->weight;
        real *dweight = net->grads + l->weight, *dbias = net->grads + l->bias;
        const uint8_t *saved = net->saved + l->saved;
        switch (l->kind) {
        case INPUT:
            break;
        case CONV2D:
            b->conv2d_backward(din, dweight, dbias, dout, in, weight, l, n, net->scratch);
            break;
        case LINEAR:
            b->linear_backward(din, dweight, dbias, dout, in, weight, l, n, net->scratch);
            break;
        case RELU:
            b->relu_backward(din, dout, out, n * shape_size(l->out));
            break;
        case MAXPOOL2D:
            b->maxpool2d_backward(din, dout, saved, l, n);
            break;
        case DROPOUT:
            b->dropout_backward(din, dout, saved, l, n);
            break;
        case LOG_SOFTMAX:
            b->log_softmax_backward(din, dout, out, n, l->out.c);
            break;
        }
    }
}

// F.nll_loss(output, target): the mean; leaves the gradient of the last row for backward()
static double loss_and_gradient(Net *net, size_t n, bool gradient) {
    const Layer *last = last_layer(net);
    net->backend->nll_loss(net->losses, gradient ? output_gradient(net, last) : NULL,
                           output(net, last), net->labels, n, last->out.c);
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)net->losses[i];
    return sum / (double)n;
}

static size_t count_correct(const Net *net, size_t n) {
    const Layer *last = last_layer(net);
    const real *logp = output(net, last);
    size_t correct = 0, classes = last->out.c;
    for (size_t i = 0; i < n; i++) {
        size_t best = 0;
        for (size_t k = 1; k < classes; k++)
            if (logp[i * classes + k] > logp[i * classes + best])
                best = k;
        correct += best == net->labels[i];
    }
    return correct;
}

// A loss that is no number any more ends the run, and names the layer where it began.
static void check_loss(const Net *net, size_t n, double loss, size_t epoch, size_t number) {
    if (isfinite(loss))
        return;
    for (size_t i = 0; i < net->count; i++) {
        const Layer *l = &net->layers[i];
        for (size_t j = 0; j < n * shape_size(l->out); j++)
            if (!isfinite(output(net, l)[j]))
                die(1,
                    "epoch %zu, step %zu: the loss is %g; the first output that is not finite "
                    "is in row %zu (%s); try a smaller --lr",
                    epoch, number + 1, loss, i, l->name);
    }
    die(1, "epoch %zu, step %zu: the loss is %g; try a smaller --lr", epoch, number + 1, loss);
}

/* ==== 9. Optimizers and schedules ===============================================================

   An optimizer makes one pass over the flat arena of all parameters, whatever layer they are of. */

typedef struct Optimizer {
    const char *name;
    size_t states; // numbers kept for each parameter
    double lr;     // the default
    void (*step)(Net *net, real *state, double lr);
} Optimizer;

static void adadelta_step(Net *net, real *state, double lr) {
    net->backend->adadelta(net->params, net->grads, state, state + net->param_size, net->param_size,
                           lr, .9, 1e-6);
}

static void sgd_step(Net *net, real *state, double lr) {
    (void)state;
    net->backend->sgd(net->params, net->grads, net->param_size, lr);
}

static const Optimizer optimizers[] = {
    {"adadelta", 2, 1.0, adadelta_step},
    {"sgd", 0, 0.01, sgd_step},
};
enum { OPTIMIZERS = sizeof optimizers / sizeof *optimizers };

/* ==== 11. Checkpoints ===========================================================================

   A safetensors file: the length of the header (8 bytes, little-endian), the header as JSON, then
   the numbers of all tensors. Names, shapes and layouts are those of PyTorch's state_dict():
   a convolution's weight is [out][in][row][column], a linear layer's [out][in], where `in` counts
   channel, row, column, the order in which PyTorch flattens an image. */

// The filter that a weight is on the image before it: a linear layer looks at all of the image.
static Shape filter_shape(const Net *net, const Layer *l) {
    Shape whole = net->layers[l->input].out;
    return l->kind == LINEAR ? whole : (Shape){l->kernel, l->kernel, l->in.c};
}

// to[k][c][i][j] = from[i][j][c][k]
static void weight_to_pytorch(real *to, const real *from, Shape filter, size_t outputs) {
    for (size_t k = 0; k < outputs; k++)
        for (size_t c = 0; c < filter.c; c++)
            for (size_t pixel = 0; pixel < filter.h * filter.w; pixel++)
                *to++ = from[(pixel * filter.c + c) * outputs + k];
}

static size_t header_entry(char *at, size_t size, const char *separator, const Layer *l,
                           const char *what, const char *shape, size_t offset, size_t count) {
    return (size_t)snprintf(
        at, size, "%s\"%s.%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
        separator, l->name, what, sizeof(real) == 4 ? "F32" : "F64", shape, offset,
        offset + count * sizeof(real));
}

static void save_model(const Net *net, const char *path) {
    enum { ENTRY = 256 };
    size_t size = 64 + 2 * net->count * ENTRY, length = 0, offset = 0;
    char *header = must_alloc(size, "the header");
    real *params = must_alloc(net->param_size * sizeof(real), "parameters");
    real *tensor = must_alloc(net->param_size * sizeof(real), "a tensor");
    net->backend->copy(params, net->params, net->param_size * sizeof(real));
    for (size_t i = 0; i < net->count; i++) {
        const Layer *l = &net->layers[i];
        if (!l->weights)
            continue;
        char shape[96];
        if (l->kind == CONV2D)
            snprintf(shape, sizeof shape, "%zu,%zu,%zu,%zu", l->out.c, l->in.c, l->kernel,
                     l->kernel);
        else
            snprintf(shape, sizeof shape, "%zu,%zu", l->out.c, l->in.c);
        length += header_entry(header + length, size - length, length ? "," : "{", l, "weight",
                               shape, offset, l->weights);
        offset += l->weights * sizeof(real);
        snprintf(shape, sizeof shape, "%zu", l->biases);
        length +=
            header_entry(header + length, size - length, ",", l, "bias", shape, offset, l->biases);
        offset += l->biases * sizeof(real);
    }
    header[length++] = '}';
    while (length % 8)
        header[length++] = ' '; // so that the numbers are aligned

    AtomicFile f;
    atomic_open(&f, path);
    for (int byte = 0; byte < 8; byte++)
        fputc((int)((uint64_t)length >> (8 * byte) & 255), f.stream);
    fwrite(header, 1, length, f.stream);
    for (size_t i = 0; i < net->count; i++) {
        const Layer *l = &net->layers[i];
        if (!l->weights)
            continue;
        weight_to_pytorch(tensor, params + l->weight, filter_shape(net, l), l->out.c);
        fwrite(tensor, sizeof(real), l->weights, f.stream);
        fwrite(params + l->bias, sizeof(real), l->biases, f.stream);
    }
    atomic_commit(&f);
    free(header);
    free(params);
    free(tensor);
}

/* ==== 12. Options ===============================================================================

   One table: the parser, --help and the settings in run.json are made from it. */

typedef struct Settings {
    const char *model, *dataset, *data, *kernels, *optimizer, *out;
    size_t limit_train, limit_test, batch_size, test_batch_size, epochs, seed, log_interval;
    size_t workers, threads;
    double lr, gamma;
    bool dry_run, save_model, profile, no_cuda;
} Settings;

typedef enum { SWITCH, COUNT, NUMBER, CHOICE, TEXT } OptionKind;

typedef struct Option {
    const char *name;
    OptionKind kind;
    size_t offset;        // of the field in Settings
    const char *fallback; // NULL: worked out after parsing, as the help text says
    double min, max;
    const char *values; // the choices, or a word for the value in --help
    const char *help;
} Option;

static char model_names[1024]; // the choices of --model, listed from models[]

#define FIELD(name) offsetof(Settings, name)
// clang-format off
static const Option options[] = {
    {"--model", CHOICE, FIELD(model), "mnist", 0, 0, model_names,
     "the network to train"},
    {"--dataset", CHOICE, FIELD(dataset), "auto", 0, 0, "auto|mnist|fashion-mnist|synthetic",
     "the images; auto: the first that is found, else synthetic ones"},
    {"--data", TEXT, FIELD(data), "", 0, 0, "DIR",
     "look for the data files in DIR and DIR/DATASET, nowhere else"},
    {"--limit-train", COUNT, FIELD(limit_train), NULL, 1, UINT32_MAX, "N",
     "train on the first N images only (default: all)"},
    {"--limit-test", COUNT, FIELD(limit_test), NULL, 1, UINT32_MAX, "N",
     "test on the first N images only (default: all)"},
    {"--batch-size", COUNT, FIELD(batch_size), "64", 1, 65536, "N",
     "images of a training step"},
    {"--test-batch-size", COUNT, FIELD(test_batch_size), "1000", 1, 65536, "N",
     "images tested at a time, at most --batch-size"},
    {"--epochs", COUNT, FIELD(epochs), "14", 1, 100000, "N",
     "how often to go through the training set"},
    {"--lr", NUMBER, FIELD(lr), NULL, 1e-12, 1e6, "LR",
     "learning rate (default: 1.0 for adadelta, 0.01 for sgd)"},
    {"--gamma", NUMBER, FIELD(gamma), "0.7", 0, 1e6, "M",
     "the learning rate is multiplied by M after each epoch"},
    {"--optimizer", CHOICE, FIELD(optimizer), "adadelta", 0, 0, "adadelta|sgd",
     "how gradients change the weights"},
    {"--seed", COUNT, FIELD(seed), "1", 0, 9007199254740992., "S",
     "decides all random numbers: the same seed gives the same run"},
    {"--log-interval", COUNT, FIELD(log_interval), "10", 1, UINT32_MAX, "N",
     "steps between two log lines"},
    {"--workers", COUNT, FIELD(workers), NULL, 1, 256, "N",
     "threads that load batches (default: SLURM_CPUS_PER_TASK, else 1)"},
    {"--threads", COUNT, FIELD(threads), NULL, 1, 1024, "N",
     "threads that compute (default: the usable cores)"},
    {"--kernels", CHOICE, FIELD(kernels), "fast", 0, 0, "naive|fast",
     "naive: the definitions, to read and compare with; fast: the ones to use"},
    {"--out", TEXT, FIELD(out), "", 0, 0, "DIR",
     "write run.json, steps.csv and epochs.csv into DIR"},
    {"--profile", SWITCH, FIELD(profile), "off", 0, 0, "on|off",
     "print the time that each line of train() took"},
    {"--save-model", SWITCH, FIELD(save_model), "off", 0, 0, "on|off",
     "write the weights as MODEL_cnn.safetensors, or model.safetensors in --out"},
    {"--dry-run", SWITCH, FIELD(dry_run), "off", 0, 0, "on|off",
     "one epoch of one training batch and one test batch"},
    {"--no-cuda", SWITCH, FIELD(no_cuda), "off", 0, 0, "on|off",
     "stay on the CPU, even where there is a GPU (so far cnn always does)"},
};
// clang-format on
enum { OPTIONS = sizeof options / sizeof *options };

// Where an option's value lies in the settings; which member is valid, its kind says.
typedef union Value {
    bool *flag;
    size_t *count;
    double *number;
    const char **text;
    char *at;
} Value;

static Value option_value(Settings *s, const Option *o) {
    return (Value){.at = (char *)s + o->offset};
}

static bool is_choice(const char *choices, const char *word) {
    size_t length = strlen(word);
    for (const char *c = choices; length > 0 && !strchr(word, '|') && c; c = strchr(c, '|')) {
        c += *c == '|';
        if (strncmp(c, word, length) == 0 && (c[length] == '|' || c[length] == 0))
            return true;
    }
    return false;
}

static void set_option(Settings *s, const Option *o, const char *text) {
    Value value = option_value(s, o);
    char *end = NULL;
    switch (o->kind) {
    case SWITCH:
    case CHOICE:
        if (!is_choice(o->values, text))
            die(EXIT_USAGE, "%s: expected one of %s, found \"%s\"; see ./cnn --help", o->name,
                o->values, text);
        if (o->kind == SWITCH)
            *value.flag = strcmp(text, "on") == 0;
        else
            *value.text = text;
        break;
    case COUNT:
    case NUMBER: {
        double number = strtod(text, &end);
        bool whole = o->kind == NUMBER || (strspn(text, "0123456789") == strlen(text));
        if (end == text || *end || !whole || !(number >= o->min && number <= o->max))
            die(EXIT_USAGE, "%s: expected a %s from %.16g to %.16g, found \"%s\"; see ./cnn --help",
                o->name, o->kind == NUMBER ? "number" : "whole number", o->min, o->max, text);
        if (o->kind == NUMBER)
            *value.number = number;
        else
            *value.count = (size_t)number;
        break;
    }
    case TEXT:
        *value.text = text;
        break;
    }
}

// Levenshtein's distance: how many letters to change, add or drop to turn a into b
static size_t edit_distance(const char *a, const char *b) {
    size_t row[64], length = min_size(strlen(b), 63);
    for (size_t j = 0; j <= length; j++)
        row[j] = j;
    for (size_t i = 1; *a; a++, i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= length; j++) {
            size_t substituted = diagonal + (*a != b[j - 1]);
            diagonal = row[j];
            row[j] = min_size(substituted, 1 + min_size(row[j], row[j - 1]));
        }
    }
    return row[length];
}

static void unknown_option(const char *word) {
    const char *nearest = "--help";
    for (size_t i = 0; i < OPTIONS; i++)
        if (edit_distance(word, options[i].name) < edit_distance(word, nearest))
            nearest = options[i].name;
    die(EXIT_USAGE, "unknown option %s; did you mean %s? See ./cnn --help", word, nearest);
}

static void print_help(void) {
    printf(
        "usage: ./cnn [options]\n\nTrains a convolutional neural network and tests it after each "
        "epoch.\n\noptions:\n");
    for (size_t i = 0; i < OPTIONS; i++) {
        const Option *o = &options[i];
        char usage[96];
        snprintf(usage, sizeof usage, "%s %s", o->name, o->values);
        bool wide = strlen(usage) > 26;
        printf("  %s%s%*s%s", usage, wide ? "\n" : "", wide ? 30 : 28 - (int)strlen(usage), "",
               o->help);
        if (o->fallback && *o->fallback)
            printf(" (default: %s)", o->fallback);
        printf("\n");
    }
    printf("  %-28sthis text\n", "--help");
}

static void parse_options(Settings *s, int argc, char **argv) {
    *s = (Settings){0};
    size_t length = 0;
    for (size_t i = 0; i < MODELS; i++)
        length += (size_t)snprintf(model_names + length, sizeof model_names - length, "%s%s",
                                   i ? "|" : "", models[i].name);
    for (size_t i = 0; i < OPTIONS; i++)
        if (options[i].fallback)
            set_option(s, &options[i], options[i].fallback);
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            print_help();
            if (fflush(stdout) != 0)
                file_fail("cannot write to", "standard output");
            exit(0);
        }
        size_t which = 0;
        length = strcspn(argv[i], "=");
        while (which < OPTIONS && (strncmp(argv[i], options[which].name, length) != 0 ||
                                   options[which].name[length] != 0))
            which++;
        if (which == OPTIONS)
            unknown_option(argv[i]);
        const Option *o = &options[which];
        if (argv[i][length] == '=')
            set_option(s, o, argv[i] + length + 1);
        else if (o->kind == SWITCH && !(i + 1 < argc && is_choice(o->values, argv[i + 1])))
            set_option(s, o, "on");
        else if (i + 1 < argc)
            set_option(s, o, argv[++i]);
        else
            die(EXIT_USAGE, "%s: expected a value (%s) after it, found nothing; see ./cnn --help",
                o->name, o->values);
    }
}

static void json_string(FILE *f, const char *text) {
    fputc('"', f);
    for (; *text; text++)
        if (*text == '"' || *text == '\\')
            fprintf(f, "\\%c", *text);
        else if ((unsigned char)*text < ' ')
            fprintf(f, "\\u%04x", *text);
        else
            fputc(*text, f);
    fputc('"', f);
}

static void print_settings_json(FILE *f, Settings *s) {
    for (size_t i = 0; i < OPTIONS; i++) {
        Value value = option_value(s, &options[i]);
        fprintf(f, "%s\n    \"%s\": ", i ? "," : "", options[i].name + 2);
        switch (options[i].kind) {
        case SWITCH:
            fprintf(f, *value.flag ? "true" : "false");
            break;
        case COUNT:
            fprintf(f, "%zu", *value.count);
            break;
        case NUMBER:
            fprintf(f, "%.9g", *value.number);
            break;
        case CHOICE:
        case TEXT:
            json_string(f, *value.text);
            break;
        }
    }
}

/* ==== 13. Instruments ===========================================================================

   What a run tells about itself: how long each line of train() took, what machine it ran on, and
   the run folder that plots, labs and graders read. */

/* The clock of train(). Every line there begins with AT(...), which stops the clock of the line
   before and starts its own; a column of steps.csv may collect the line's time as well. */
enum { PROFILED_LINES = 128 };

typedef struct LineClock {
    bool synchronize; // --profile: wait for the device at each line, so that its time is its own
    const Backend *backend;
    int first, line; // the first profiled line of cnn.c; the line whose clock runs, 0: none
    double since;
    double *column, ignored;
    struct {
        size_t hits;
        double seconds;
    } lines[PROFILED_LINES];
} LineClock;

static void clock_line(LineClock *c, int line, double *column) {
    if (c->synchronize)
        c->backend->synchronize();
    double t = now();
    if (c->line) {
        c->lines[c->line - c->first].seconds += t - c->since;
        *c->column += t - c->since;
    }
    if (!c->first)
        c->first = line;
    c->line = line;
    c->column = column ? column : &c->ignored;
    c->since = t;
    if (line)
        c->lines[line - c->first].hits++;
}

static void print_profile_line(FILE *out, FILE *csv, const LineClock *c, int number,
                               const char *text, double total) {
    size_t at = (size_t)(number - c->first);
    if (number < c->first || at >= PROFILED_LINES || c->lines[at].hits == 0) {
        fprintf(out, "%6d %9s %12s %8s %8s  %s\n", number, "", "", "", "", text);
        return;
    }
    size_t hits = c->lines[at].hits;
    double us = c->lines[at].seconds * 1e6, percent = 100 * c->lines[at].seconds / total;
    fprintf(out, "%6d %9zu %12.1f %8.1f %8.1f  %s\n", number, hits, us, us / (double)hits, percent,
            text);
    if (!csv)
        return;
    fprintf(csv, "%d,%zu,%.1f,%.1f,%.1f,\"", number, hits, us, us / (double)hits, percent);
    for (text += strspn(text, " "); *text; text++)
        fprintf(csv, *text == '"' ? "\"\"" : "%c", *text);
    fprintf(csv, "\"\n");
}

// cnn.c itself, for its lines: where it was compiled, else beside the program; NULL without it
static FILE *open_source(void) {
    FILE *f = fopen(__FILE__, "r");
    char path[PATH_SIZE] = "";
    if (!f && readlink("/proc/self/exe", path, sizeof path - 8) > 0) {
        strcat(dirname(path), "/cnn.c");
        f = fopen(path, "r");
    }
    return f;
}

// The lines of train(): from the last one before `first` that begins with static to the next }.
static void find_function(FILE *source, int first, int *begin, int *end) {
    char text[256];
    *begin = *end = 0;
    for (int number = 1; *end == 0 && fgets(text, sizeof text, source); number++) {
        if (number < first && strncmp(text, "static", 6) == 0)
            *begin = number;
        if (number > first && text[0] == '}')
            *end = number;
    }
    rewind(source);
}

// line_profiler's table, as kernprof's users know it, and the same as CSV; csv may be NULL
static void print_profile(const LineClock *c, FILE *out, FILE *csv) {
    FILE *source = open_source();
    int begin = c->first, end = c->first + PROFILED_LINES - 1;
    if (source)
        find_function(source, c->first, &begin, &end);
    double total = 0;
    for (size_t i = 0; i < PROFILED_LINES; i++)
        total += c->lines[i].seconds;
    fprintf(out, "Timer unit: 1e-06 s\n\nTotal time: %.6g s\nFile: cnn.c\n", total);
    fprintf(out, "Function: train at line %d\n\n", begin);
    fprintf(out, "Line #      Hits         Time  Per Hit   %% Time  Line Contents\n");
    fprintf(out, "==============================================================\n");
    if (csv)
        fprintf(csv, "line,hits,time_us,per_hit_us,percent,source\n");
    char text[256];
    for (int number = 1; number <= end; number++) {
        strcpy(text, "(cnn.c is not here to be quoted)\n");
        if (source && !fgets(text, sizeof text, source))
            break;
        text[strcspn(text, "\n")] = 0;
        int at = number - c->first;
        bool timed = at >= 0 && at < PROFILED_LINES && c->lines[at].hits > 0;
        if (timed || (source && number >= begin))
            print_profile_line(out, csv, c, number, text, total);
    }
    fprintf(out, "\n %.2f seconds - cnn.c:%d - train\n", total, begin);
    if (source)
        fclose(source);
}

// ---- Machine card

static size_t usable_cores(void) {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? (size_t)CPU_COUNT(&set) : 1;
}

static void cpu_name(char *name, size_t size) {
    struct utsname system;
    uname(&system);
    snprintf(name, size, "%s", system.machine);
    FILE *f = fopen("/proc/cpuinfo", "r");
    char line[256];
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, "model name", 10) == 0 && strchr(line, ':')) {
            line[strcspn(line, "\n")] = 0;
            snprintf(name, size, "%s", strchr(line, ':') + 2);
            break;
        }
    if (f)
        fclose(f);
}

#ifndef CNN_COMMIT // the Makefile says these
#define CNN_COMMIT "unknown"
#endif
#ifndef CNN_FLAGS
#define CNN_FLAGS "unknown"
#endif
#ifdef __clang__
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif
#ifdef _OPENMP
#define OPENMP_WORD "OpenMP"
#else
#define OPENMP_WORD "no OpenMP: one thread"
#endif

static double memory_bytes(void) // of this machine
{
    return (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
}

static double cpu_seconds(const struct rusage *u) {
    return (double)(u->ru_utime.tv_sec + u->ru_stime.tv_sec) +
           1e-6 * (double)(u->ru_utime.tv_usec + u->ru_stime.tv_usec);
}

/* The most multiply-adds a second that this program's vectors reach on this machine: each thread
   keeps 24 independent sums in registers. GFLOP/s; takes about 30 ms. */
static double measure_peak_gflops(void) {
    enum { SUMS = ROWS * VECTORS, STEPS = 400000, REPEATS = 10 };
    double best = 0;
    for (int repeat = 0; repeat < REPEATS; repeat++) {
        double begin = now(), threads = 0;
        real kept = 0;
#pragma omp parallel reduction(+ : kept, threads)
        {
            vec sums[SUMS], factor = (vec){0} + (real)0.999, term = (vec){0} + (real)0.001;
            UNROLL
            for (int i = 0; i < SUMS; i++)
                sums[i] = (vec){0} + (real)i;
            for (int step = 0; step < STEPS; step++) {
                UNROLL
                for (int i = 0; i < SUMS; i++)
                    sums[i] = sums[i] * factor + term;
            }
            UNROLL
            for (int i = 0; i < SUMS; i++)
                kept += sums[i][0];
            threads += 1;
        }
        double flops = threads * STEPS * SUMS * LANES * 2. / (now() - begin);
        if (kept > 0 && flops > best) // uses the sums, so that they are computed
            best = flops;
    }
    return best / 1e9;
}

// ---- Run folder (--out DIR)

// What an epoch's line says. Times in seconds; accuracy in per cent.
typedef struct EpochResult {
    size_t epoch, images;
    double seconds, loader_wait_s, train_loss, test_seconds, test_loss, accuracy, lr;
    uint64_t weight_hash;
} EpochResult;

// One step: a row of steps.csv. The parts add up to its seconds.
typedef struct StepResult {
    size_t epoch, step, images;
    double loss, lr, seconds, load_s, copy_s, forward_s, backward_s, optimizer_s, other_s;
} StepResult;

typedef enum { KEY_VALUE, CSV_HEADER, CSV_ROW, JSON } Form;

// One list of an epoch's figures for the line on stdout, for epochs.csv and for run.json.
static void print_epoch(FILE *f, const EpochResult *e, Form form) {
    const struct {
        const char *key, *format;
        double value;
    } fields[] = {
        {"epoch", "%.0f", (double)e->epoch},
        {"images", "%.0f", (double)e->images},
        {"seconds", "%.3f", e->seconds},
        {"img_per_s", "%.0f", e->seconds > 0 ? (double)e->images / e->seconds : 0},
        {"loader_wait_s", "%.3f", e->loader_wait_s},
        {"train_loss", "%.4f", e->train_loss},
        {"test_seconds", "%.3f", e->test_seconds},
        {"test_loss", "%.4f", e->test_loss},
        {"accuracy", "%.2f", e->accuracy},
        {"lr", "%g", e->lr},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        fprintf(f, i == 0 ? "" : form == KEY_VALUE ? " " : ",");
        if (form == KEY_VALUE)
            fprintf(f, "%s=", fields[i].key);
        if (form == JSON)
            fprintf(f, "\"%s\":", fields[i].key);
        if (form == CSV_HEADER)
            fprintf(f, "%s", fields[i].key);
        else
            fprintf(f, fields[i].format, fields[i].value);
    }
}

// Everything that a run has and knows.
typedef struct Run {
    Settings settings;
    const Model *model;
    const Optimizer *optimizer;
    Net net;
    real *state; // the optimizer's
    double lr;
    Dataset train_set, test_set;
    Loader train_loader, test_loader;
    LineClock clock;
    // the run folder
    const char *status;
    int argc;
    char **argv;
    double started, epoch_started, peak_gflops;
    StepResult step, *steps; // the step that runs; those not yet written to steps.csv
    size_t steps_kept;
    EpochResult *epochs;
    size_t epochs_done;
    real *host_params; // a copy of the weights, to hash
    FILE *steps_csv, *epochs_csv;
} Run;

static void flush_stdout(void) {
    if (fflush(stdout) != 0 || ferror(stdout))
        file_fail("cannot write to", "standard output");
}

static FILE *create_csv(const char *dir, const char *file) {
    char path[PATH_SIZE];
    join_path(path, dir, file);
    FILE *f = fopen(path, "w");
    if (!f)
        file_fail("cannot create", path);
    return f;
}

static void write_run_json(Run *run) {
    Settings *s = &run->settings;
    if (!*s->out)
        return;
    char path[PATH_SIZE], cpu[256], host[256] = "";
    AtomicFile file;
    join_path(path, s->out, "run.json");
    atomic_open(&file, path);
    FILE *f = file.stream;
    cpu_name(cpu, sizeof cpu);
    gethostname(host, sizeof host - 1);
    fprintf(f, "{\n  \"status\": \"%s\", \"provenance\": \"measured\", \"emulated\": false,\n",
            run->status);
    fprintf(f, "  \"command\": [");
    for (int i = 0; i < run->argc; i++) {
        fprintf(f, i ? ", " : "");
        json_string(f, run->argv[i]);
    }
    fprintf(f, "],\n  \"machine\": {\"host\": ");
    json_string(f, host);
    fprintf(f, ", \"cpu\": ");
    json_string(f, cpu);
    fprintf(f,
            ", \"cores\": %zu, \"memory_bytes\": %.0f, \"peak_gflops\": %.1f, \"device\": "
            "\"cpu\", \"uuid\": null, \"driver\": null, \"slurm\": ",
            usable_cores(), memory_bytes(), run->peak_gflops);
    const char *job = getenv("SLURM_JOB_ID");
    if (job)
        json_string(f, job);
    else
        fprintf(f, "null");
    fprintf(f, "},\n  \"build\": {\"compiler\": ");
    json_string(f, COMPILER);
    fprintf(f, ", \"flags\": ");
    json_string(f, CNN_FLAGS);
    fprintf(f, ", \"commit\": \"" CNN_COMMIT "\"},\n  \"settings\": {");
    print_settings_json(f, s);
    fprintf(f,
            "\n  },\n  \"parallel\": {\"mode\": \"single\", \"world\": 1, \"batch_per_device\": "
            "%zu, \"global_batch\": %zu, \"iterations\": %zu, \"workers\": %zu, \"graph\": "
            "false},\n  \"epochs\": [",
            s->batch_size, s->batch_size, run->train_loader.batches, s->workers);
    for (size_t i = 0; i < run->epochs_done; i++) {
        fprintf(f, "%s\n    {", i ? "," : "");
        print_epoch(f, &run->epochs[i], JSON);
        fprintf(f, ",\"weight_hash\":\"%016llx\"}", (unsigned long long)run->epochs[i].weight_hash);
    }
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    fprintf(f,
            "],\n  \"per_class\": null, \"confusion\": null,\n  \"resources\": {\"wall_s\": "
            "%.3f, \"cpu_s\": %.3f, \"max_rss_bytes\": %.0f}\n}\n",
            now() - run->started, cpu_seconds(&usage), 1024. * (double)usage.ru_maxrss);
    atomic_commit(&file);
}

static Run *dying_run;

static void write_failed(void) {
    dying_run->status = "failed";
    write_run_json(dying_run);
}

// Creates --out DIR and its files; from here on an error leaves "status": "failed" there.
static void open_run_folder(Run *run) {
    const char *dir = run->settings.out;
    run->status = "running";
    if (!*dir)
        return;
    if (mkdir(dir, 0777) != 0 && errno != EEXIST)
        file_fail("cannot create the folder", dir);
    run->steps_csv = create_csv(dir, "steps.csv");
    fprintf(run->steps_csv, "epoch,step,rank,images,loss,lr,seconds,load_s,copy_s,forward_s,"
                            "backward_s,optimizer_s,comm_s,exposed_comm_s,idle_s,bytes_sent,"
                            "warmup\n");
    run->epochs_csv = create_csv(dir, "epochs.csv");
    print_epoch(run->epochs_csv, &(EpochResult){0}, CSV_HEADER);
    fprintf(run->epochs_csv, "\n");
    run->peak_gflops = measure_peak_gflops();
    dying_run = run;
    before_dying = write_failed;
    write_run_json(run);
}

static void flush_csv(FILE *f, const char *dir, const char *file) {
    if (fflush(f) != 0 || ferror(f))
        die(1, "cannot write %s/%s: %s", dir, file, strerror(errno));
}

static void flush_steps(Run *run) {
    for (size_t i = 0; run->steps_csv && i < run->steps_kept; i++) {
        const StepResult *s = &run->steps[i];
        fprintf(run->steps_csv, "%zu,%zu,0,%zu,%.9g,%.9g,%.6f,%.6f,%.6f,%.6f,%.6f,%.6f,,,,,%d\n",
                s->epoch, s->step, s->images, s->loss, s->lr, s->seconds, s->load_s, s->copy_s,
                s->forward_s, s->backward_s, s->optimizer_s, s->epoch == 1 && s->step <= 3);
    }
    run->steps_kept = 0;
    if (run->steps_csv)
        flush_csv(run->steps_csv, run->settings.out, "steps.csv");
}

// On a terminal: how far the epoch is, how fast it goes and how long it will take.
static void show_progress(const Run *run, const EpochResult *e, double seconds) {
    if (!isatty(STDERR_FILENO))
        return;
    double rate = (double)e->images / seconds, rest = (double)(run->train_set.count - e->images);
    fprintf(stderr, "\r\033[Kepoch %zu: %zu/%zu images, %.0f img/s, %.0f s left\r", e->epoch,
            e->images, run->train_set.count, rate, rest / rate);
}

// What a step leaves: its row for steps.csv, the log line at the log interval, the epoch's sums.
static void log_step(Run *run, EpochResult *e, const Batch *batch, double loss) {
    StepResult *s = &run->step;
    s->epoch = e->epoch;
    s->step = batch->number + 1;
    s->images = batch->n;
    s->loss = loss;
    s->lr = run->lr;
    s->seconds = s->load_s + s->copy_s + s->forward_s + s->backward_s + s->optimizer_s + s->other_s;
    e->images += batch->n;
    e->loader_wait_s += s->load_s;
    e->train_loss += loss * (double)batch->n;
    run->steps[run->steps_kept++] = *s;
    *s = (StepResult){0};
    if (batch->number % run->settings.log_interval != 0)
        return;
    flush_steps(run);
    if (isatty(STDERR_FILENO))
        fprintf(stderr, "\r\033[K");
    printf("Train Epoch: %zu [%zu/%zu (%.0f%%)]\tLoss: %.6f\n", e->epoch, batch->number * batch->n,
           run->train_set.count, 100. * (double)batch->number / (double)run->train_loader.batches,
           loss);
    show_progress(run, e, now() - run->epoch_started);
}

// Ends an epoch of training: its averages, and the rows that are left.
static void finish_epoch(Run *run, EpochResult *e) {
    e->lr = run->lr;
    e->train_loss /= (double)e->images;
    flush_steps(run);
}

// Writes the epoch's line and adds it to the run folder.
static void report_epoch(Run *run, EpochResult *e) {
    real *params = run->host_params;
    run->net.backend->copy(params, run->net.params, run->net.param_size * sizeof *params);
    e->weight_hash = hash_bytes(params, run->net.param_size * sizeof *params);
    print_epoch(stdout, e, KEY_VALUE);
    printf("\n");
    flush_stdout();
    run->epochs[run->epochs_done++] = *e;
    if (!run->epochs_csv)
        return;
    print_epoch(run->epochs_csv, e, CSV_ROW);
    fprintf(run->epochs_csv, "\n");
    flush_csv(run->epochs_csv, run->settings.out, "epochs.csv");
    write_run_json(run);
}

/* ==== 14. train(), test(), main() ===============================================================

   The program itself. */

/* One epoch. AT(column, what) does `what` and charges its time to this line of the profile and to
   the column of steps.csv. */
#define AT(column, ...) (clock_line(&run->clock, __LINE__, &run->step.column), __VA_ARGS__)

static void train(Run *run, EpochResult *result) {
    Net *net = &run->net;
    const Batch *batch;
    Draw draw = {run->settings.seed, result->epoch, 0};
    double loss;
    AT(other_s, loader_start(&run->train_loader, run->settings.seed, result->epoch));
    while (AT(load_s, batch = loader_next(&run->train_loader))) {
        AT(copy_s, net_load(net, batch));
        AT(other_s, draw.first = batch->first);
        AT(forward_s, forward(net, batch->n, &draw));
        AT(forward_s, loss = loss_and_gradient(net, batch->n, true));
        AT(other_s, check_loss(net, batch->n, loss, result->epoch, batch->number));
        AT(backward_s, backward(net, batch->n));
        AT(optimizer_s, run->optimizer->step(net, run->state, run->lr));
        AT(other_s, log_step(run, result, batch, loss));
        if (AT(other_s, run->settings.dry_run))
            break;
    }
    AT(other_s, finish_epoch(run, result));
    clock_line(&run->clock, 0, NULL);
}

static void test(Run *run, EpochResult *result) {
    Net *net = &run->net;
    const Batch *batch;
    double begin = now(), loss = 0;
    size_t correct = 0, images = 0;
    loader_start(&run->test_loader, run->settings.seed, 0);
    while ((batch = loader_next(&run->test_loader))) {
        net_load(net, batch);
        forward(net, batch->n, NULL);
        loss += loss_and_gradient(net, batch->n, false) * (double)batch->n;
        correct += count_correct(net, batch->n);
        images += batch->n;
        if (run->settings.dry_run)
            break;
    }
    result->test_loss = loss / (double)images;
    result->accuracy = 100. * (double)correct / (double)images;
    result->test_seconds = now() - begin;
    printf("\nTest set: Average loss: %.4f, Accuracy: %zu/%zu (%.0f%%)\n\n", result->test_loss,
           correct, images, result->accuracy);
}

// Resolves what the options left open.
static void setup_settings(Run *run, int argc, char **argv) {
    Settings *s = &run->settings;
    parse_options(s, argc, argv);
    run->argc = argc;
    run->argv = argv;
    for (size_t i = 0; i < MODELS; i++)
        if (strcmp(models[i].name, s->model) == 0)
            run->model = &models[i];
    for (size_t i = 0; i < OPTIMIZERS; i++)
        if (strcmp(optimizers[i].name, s->optimizer) == 0)
            run->optimizer = &optimizers[i];
    if (s->lr == 0)
        s->lr = run->optimizer->lr;
    if (s->dry_run)
        s->epochs = 1;
    if (s->limit_train == 0)
        s->limit_train = UINT32_MAX;
    if (s->limit_test == 0)
        s->limit_test = UINT32_MAX;
    if (s->threads == 0)
        s->threads = usable_cores();
    const char *slurm = getenv("SLURM_CPUS_PER_TASK");
    if (s->workers == 0)
        s->workers = slurm && atoi(slurm) > 0 ? min_size((size_t)atoi(slurm), 256) : 1;
    if (s->workers > usable_cores())
        fprintf(stderr,
                "cnn: warning: --workers %zu, but only %zu cores are usable: they will "
                "wait for each other\n",
                s->workers, usable_cores());
    omp_set_num_threads((int)s->threads);
    run->lr = s->lr;
}

static void print_machine(const Run *run) {
    char cpu[256], host[256] = "";
    cpu_name(cpu, sizeof cpu);
    gethostname(host, sizeof host - 1);
    printf("Machine: %s, %s, %zu usable cores, %.1f GB memory\n", host, cpu, usable_cores(),
           memory_bytes() / 1e9);
    printf("Build: %s, vectors of %d numbers, %s, commit %s\n", COMPILER, (int)LANES, OPENMP_WORD,
           CNN_COMMIT);
    printf("Device: cpu, --kernels %s, --threads %zu, --workers %zu\n", run->settings.kernels,
           run->settings.threads, run->settings.workers);
}

static void load_dataset(Run *run, const char *name, const char *dir) {
    Settings *s = &run->settings;
    bool synthetic = strcmp(name, "synthetic") == 0;
    printf("Data: %s %s%s\n", name, synthetic ? "(images made by cnn itself)" : "from ",
           synthetic ? "" : dir);
    run->train_set.info = run->test_set.info = find_dataset_info(name);
    if (synthetic) {
        make_synthetic(&run->train_set, true, s->limit_train);
        make_synthetic(&run->test_set, false, s->limit_test);
    } else {
        load_idx(&run->train_set, dir, true, s->limit_train);
        load_idx(&run->test_set, dir, false, s->limit_test);
    }
    s->dataset = run->train_set.info->name;
    printf("Train set size: %zu\nTest set size: %zu\n", run->train_set.count, run->test_set.count);
}

// --dataset auto takes the first of the model's data sets that is there; synthetic always is.
static void setup_data(Run *run) {
    Settings *s = &run->settings;
    char dir[PATH_SIZE], name[32];
    bool automatic = strcmp(s->dataset, "auto") == 0;
    const char *list = automatic ? run->model->datasets : s->dataset;
    for (; *list; list += strcspn(list, " "), list += strspn(list, " ")) {
        snprintf(name, sizeof name, "%.*s", (int)strcspn(list, " "), list);
        if (strcmp(name, "synthetic") == 0 || find_data_dir(dir, name, s->data)) {
            load_dataset(run, name, dir);
            return;
        }
    }
    die(1,
        "%s: expected %s (or .gz), found none in %s%s; run: data/get_data.sh %s, or use "
        "--dataset synthetic",
        name, idx_files[0][0],
        *s->data ? "the folder --data "
                 : "./data, beside ./cnn and in "
                   "/usr/share/datasets",
        s->data, name);
}

// The memory that the run will take, category by category, before any of it is allocated.
static void print_memory(const Run *run) {
    const Net *net = &run->net;
    const double number = sizeof(real), params = number * (double)net->param_size;
    const double activations = number * (double)net->activation_size;
    const double data = (double)(run->train_set.count + run->test_set.count) *
                        (double)(image_size(run->train_set.info) + 1);
    const double batches = 2 * (2. * (double)run->settings.workers + 1) * (double)net->batch *
                           number * (double)image_size(run->train_set.info);
    const struct {
        const char *what;
        double bytes;
    } ledger[] = {
        {"parameters", params},
        {"gradients", params},
        {"optimizer state", params * (double)run->optimizer->states},
        {"activations", activations},
        {"activation gradients", activations},
        {"masks", (double)net->saved_size},
        {"scratch", number * (double)net->scratch_size},
        {"loader", batches},
        {"data set", data},
    };
    double total = 0;
    printf("Memory in MB:");
    for (size_t i = 0; i < sizeof ledger / sizeof *ledger; i++) {
        printf(" %s %.1f,", ledger[i].what, ledger[i].bytes / 1e6);
        total += ledger[i].bytes;
    }
    printf(" together %.1f\n", total / 1e6);
    if (total > memory_bytes())
        die(1,
            "not enough memory: %.1f MB needed, this machine has %.1f; use a smaller "
            "--batch-size than %zu",
            total / 1e6, memory_bytes() / 1e6, net->batch);
}

static void setup_network(Run *run) {
    Settings *s = &run->settings;
    const Backend *backend = backends;
    while (strcmp(backend->kernels, s->kernels) != 0)
        backend++;
    size_t images = max_size(run->train_set.count, run->test_set.count);
    net_build(&run->net, run->model, run->train_set.info, backend);
    plan_memory(&run->net, min_size(s->batch_size, images));
    print_summary(&run->net);
    print_memory(run);
    net_alloc(&run->net);
    net_init(&run->net, s->seed);
    size_t state_bytes = run->optimizer->states * run->net.param_size * sizeof(real);
    run->state = device_alloc(&run->net, state_bytes, "the optimizer");
    run->host_params = must_alloc(run->net.param_size * sizeof(real), "parameters");
}

static void setup_loaders(Run *run) {
    Settings *s = &run->settings;
    loader_init(&run->train_loader, &run->train_set, s->batch_size, s->workers);
    loader_init(&run->test_loader, &run->test_set, min_size(s->test_batch_size, run->net.batch),
                s->workers);
    run->train_loader.batches = ceil_div(run->train_set.count, s->batch_size);
    size_t room = min_size(s->log_interval, run->train_loader.batches) + 1;
    run->steps = must_alloc(room * sizeof *run->steps, "the step log");
    run->epochs = must_alloc(s->epochs * sizeof *run->epochs, "the epoch log");
    run->clock.backend = run->net.backend;
    run->clock.synchronize = s->profile;
}

static void write_profile(Run *run) {
    print_profile(&run->clock, stdout, NULL);
    if (!*run->settings.out)
        return;
    FILE *text = create_csv(run->settings.out, "profile.txt");
    FILE *csv = create_csv(run->settings.out, "profile.csv");
    print_profile(&run->clock, text, csv);
    flush_csv(text, run->settings.out, "profile.txt");
    flush_csv(csv, run->settings.out, "profile.csv");
    fclose(text);
    fclose(csv);
}

static void write_model(Run *run) {
    char path[PATH_SIZE];
    if (*run->settings.out)
        join_path(path, run->settings.out, "model.safetensors");
    else
        snprintf(path, sizeof path, "%s_cnn.safetensors", run->model->name);
    save_model(&run->net, path);
    printf("Saved the weights to %s\n", path);
}

static void close_run(Run *run) {
    flush_stdout();
    run->status = "complete";
    write_run_json(run);
    before_dying = NULL;
    loader_free(&run->train_loader);
    loader_free(&run->test_loader);
    run->net.backend->release(run->state);
    net_free(&run->net);
    free_dataset(&run->train_set);
    free_dataset(&run->test_set);
    free(run->host_params);
    free(run->steps);
    free(run->epochs);
    if (run->steps_csv)
        fclose(run->steps_csv);
    if (run->epochs_csv)
        fclose(run->epochs_csv);
}

static int run_main(int argc, char **argv) {
    static Run run; // zeroed; too large for the stack
    run.started = now();
    setup_settings(&run, argc, argv);
    open_run_folder(&run);
    print_machine(&run);
    setup_data(&run);
    setup_network(&run);
    setup_loaders(&run);
    for (size_t epoch = 1; epoch <= run.settings.epochs; epoch++) {
        EpochResult result = {.epoch = epoch};
        run.epoch_started = now();
        train(&run, &result);
        result.seconds = now() - run.epoch_started;
        test(&run, &result);
        report_epoch(&run, &result);
        run.lr *= run.settings.gamma; // StepLR(step_size = 1)
    }
    if (run.settings.profile)
        write_profile(&run);
    if (run.settings.save_model)
        write_model(&run);
    close_run(&run);
    return 0;
}

#ifndef CNN_NO_MAIN // the tests include this file and bring their own

/* Login and compute nodes differ. main() is compiled for any CPU of the family, so that it can
   compare the one that cnn was built for with the one that it runs on: no SIGILL without a word. */
#if defined(__x86_64__)
__attribute__((target("no-avx")))
#endif
int main(int argc, char **argv)
{
#define NEED_CPU(feature)                                                            \
    if (!__builtin_cpu_supports(feature)) {                                          \
        fprintf(stderr,                                                              \
                "cnn: error: built for a CPU with %s, which this one has not; run: " \
                "make clean && make ARCH=native, on this machine\n",                 \
                feature);                                                            \
        return 1;                                                                    \
    }
#ifdef __AVX512F__
    NEED_CPU("avx512f")
#endif
#ifdef __AVX2__
    NEED_CPU("avx2")
#endif
#ifdef __FMA__
    NEED_CPU("fma")
#endif
    return run_main(argc, argv);
}
#endif // CNN_NO_MAIN
#endif // CNN_DECLARATIONS_ONLY
