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
      5 CPU layers      each layer forward and backward, as its definition
     5b Fast convolutions on the CPU; to be skipped at first reading
      6 Network         the layer table and its builders, memory plan, summary
      7 Models          the networks themselves, ten lines each
      8 Forward and backward   the walk over the layer table
      9 Optimizers and schedules
     10 Data parallelism   replicas that learn together: ring all-reduce, ddp, dp, MPI
     11 Checkpoints     weights as PyTorch reads them
     12 Options         one table: parser, --help and settings
     13 Instruments     line profile, machine card, run folder
     14 train(), test(), main()
   The GPU's kernels are in cnn_kernels.cu. */

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

typedef enum {
    INPUT,
    CONV2D,
    BATCHNORM2D,
    RELU,
    MAXPOOL2D,
    AVGPOOL2D,
    ADD,
    DROPOUT,
    LINEAR,
    LOG_SOFTMAX
} LayerKind;

typedef struct Shape {
    size_t h, w, c;
} Shape; // of one image

// What the user chose; the table of options in room 12 fills it.
typedef struct Settings {
    const char *model, *stem, *dataset, *data, *augment, *optimizer, *schedule, *milestones;
    const char *lr_scaling, *kernels, *optimizer_launch, *out, *checkpoint, *save_every, *load;
    size_t width, limit_train, limit_test, batch_size, test_batch_size, epochs, max_steps, seed;
    size_t step_size, warmup_epochs, log_interval, workers, threads;
    double lr, momentum, weight_decay, gamma, label_smoothing;
    bool nesterov, dry_run, save_model, resume, eval, per_class, profile, no_cuda;
    bool pin_memory, resident;
    const char *trace, *trace_steps;
    bool quiet, layers;
    // several devices (room 10)
    const char *parallel;
    size_t gpus, replicas, global_batch;
    double bucket_mb, timeout; // MB; seconds
    bool oversubscribe, overlap;
} Settings;

// One row of the layer table. Offsets count elements from the start of the network's arenas.
typedef struct Layer {
    LayerKind kind;
    char name[48];                  // PyTorch's name of its parameters, "conv1"; else empty
    size_t input, other;            // the row whose output this one reads; add: the second one
    Shape in, out;                  // a linear layer reads 1 x 1 x (h * w * c)
    size_t kernel, stride, padding; // conv2d, maxpool2d
    real p;                         // dropout: probability of a zero
    bool in_place;                  // the output overwrites the input, the gradient likewise
    bool fused_relu;                // the ReLU behind this row is applied while it is stored
    bool fused_relu_backward;       // conv2d: its backward does that of the ReLU before it;
                                    // relu: the convolution behind it has done its backward
    const struct Layer *pool;       // conv2d: the max-pool behind it whose work it does, or NULL
    const struct Layer *add;        // batchnorm2d: the add behind it whose work it does, or NULL
    bool skipped;                   // that max-pool, and the ReLU before it: nothing left to do
    size_t weights, biases;         // how many parameters; batchnorm2d: weights are its scales
    size_t weight, bias;            // offsets into params and grads
    size_t output, gradient;        // offsets into activations and dactivations
    size_t stats;                   // batchnorm2d: offset into stats, see batchnorm2d_forward()
    size_t saved;                   // offset into saved: argmax of a max-pool, mask of a dropout
    int32_t *gather, *scatter;      // CPU, fast: which pixels a filter meets (room 5)
} Layer;

// Which images a batch holds, so that random numbers follow the image and not the batch.
typedef struct Draw {
    uint64_t seed;
    size_t epoch, first; // position of the batch's first image in the epoch's permutation
    size_t skip;         // positions between two of its images: those of other ranks
} Draw;

// Of the batch's image number `image`, the position in the epoch's permutation.
static inline HOST_DEVICE size_t position_of(Draw draw, size_t image) {
    return draw.first + image * (1 + draw.skip);
}

// --augment: another view of each image in each epoch. The functions are in room 4.
typedef enum { AUGMENT_NONE, AUGMENT_CROP_FLIP, AUGMENT_ELASTIC } Augmentation;
enum { CROP_PADDING = 4, ELASTIC_ALPHA = 34, ELASTIC_SIGMA = 4, ELASTIC_REACH = 3 * ELASTIC_SIGMA };

/* Moments in a replica's work, see Backend: for the clock of train(), one for each bucket of
   gradients, for --layers and --trace one behind each row, forward and backward, and a start.
   Replicas are the networks of one process that learn together, in a thread each. */
enum {
    MAX_REPLICAS = 64,
    MAX_THREADS = 1024, // of one of them
    MAX_LAYERS = 1024,
    CLOCK_MARKS = 64,
    MAX_BUCKETS = 64,
    FORWARD_MARKS = CLOCK_MARKS + MAX_BUCKETS,
    BACKWARD_MARKS = FORWARD_MARKS + MAX_LAYERS,
    START_MARK = BACKWARD_MARKS + MAX_LAYERS + 1,
    MARKS
};

// A data set in a device's memory, and what its loader needs to know.
typedef struct Resident {
    const uint8_t *images, *labels; // [count][h][w][c], [count]
    uint32_t *order;                // the epoch's permutation: order[position] = image
    const real *normalised;         // [c][256]: what a byte of a channel becomes
    Shape shape;
    Augmentation augment;
    float blur[ELASTIC_REACH + 1]; // AUGMENT_ELASTIC: the weights of its blur
} Resident;

/* The operations that a network needs of a device. Outputs come first, gradients are prefixed d.
   n is the number of images in this batch. Each backward writes its outputs with =; din with += if
   accumulate says that another reader of the same row has written there before.
   scratch has as many elements as the backend's scratch_size() asked for. */
typedef struct Backend {
    const char *name, *kernels;
    bool fuses; // a ReLU, and an add behind a BatchNorm, are done while the row before is stored
    size_t (*scratch_size)(const Layer *l, size_t n);
    void (*prepare)(Layer *l);    // conv2d, linear; may be NULL
    void *(*alloc)(size_t bytes); // zeroed; NULL when there is not enough
    void (*release)(void *memory);
    // memory of the host for the loader; pinned: the device can reach it by itself
    void *(*host_alloc)(size_t bytes, bool pinned);
    void (*host_release)(void *memory, bool pinned);
    // between host and device, either way, and within the device; in order with the operations
    void (*copy)(void *to, const void *from, size_t bytes);
    // from host or device to either, by any thread, beside the work on that device; NULL: all
    // memory is the host's
    void (*transfer)(size_t device, void *to, const void *from, size_t bytes);
    /* to = from, or to += from, which lies on this device, another one or the host; by any thread,
       beside the work on this device, over when it returns. room: as large as to, on this device */
    void (*receive)(size_t device, real *to, const real *from, size_t count, bool add, real *room);
    void (*synchronize)(void);
    // a moment among the operations, numbered from 0 to MARKS - 1; the seconds between two of them
    void (*mark)(size_t i);
    double (*elapsed)(size_t from, size_t to); // waits until both are past
    void (*wait)(size_t replica, size_t mark); // until a mark of that replica's work is past
    double (*peak_gflops)(void);               // multiply-adds that this device reaches, measured
    // for Nsight; NULL: not in this backend. A range of this thread's work ends, and one of this
    // name begins (NULL: none); what is recorded begins or ends
    void (*range)(const char *name);
    void (*record)(bool on);
    // a batch of a data set that lies on the device; NULL: the loader's threads do it
    void (*gather)(real *out, uint8_t *labels, const Resident *r, const Draw *draw, size_t n);
    void (*conv2d_forward)(real *out, const real *in, const real *weight, const real *bias,
                           const Layer *l, size_t n, real *scratch);
    void (*conv2d_backward)(real *din, real *dweight, real *dbias, const real *dout, const real *in,
                            const real *weight, const Layer *l, size_t n, bool accumulate,
                            real *scratch);
    // conv2d, ReLU and max-pool in one: what the pool gives; and back, from the pool's dout and
    // output; NULL: not in this backend
    void (*conv2d_forward_pooled)(real *pooled, uint8_t *argmax, const real *in, const real *weight,
                                  const real *bias, const Layer *l, size_t n, real *scratch);
    void (*conv2d_backward_pooled)(real *din, real *dweight, real *dbias, const real *dout,
                                   const real *pooled, const uint8_t *argmax, const real *in,
                                   const real *weight, const Layer *l, size_t n, bool accumulate,
                                   real *scratch);
    void (*linear_forward)(real *out, const real *in, const real *weight, const real *bias,
                           const Layer *l, size_t n, real *scratch);
    void (*linear_backward)(real *din, real *dweight, real *dbias, const real *dout, const real *in,
                            const real *weight, const Layer *l, size_t n, bool accumulate,
                            real *scratch);
    // residual: the other input of l->add, or NULL
    void (*batchnorm2d_forward)(real *out, real *stats, const real *in, const real *weight,
                                const real *bias, const real *residual, const Layer *l, size_t n,
                                bool training, real *scratch);
    void (*batchnorm2d_backward)(real *din, real *dweight, real *dbias, const real *dout,
                                 const real *in, const real *stats, const real *weight,
                                 const Layer *l, size_t n, bool accumulate, real *scratch);
    void (*relu_forward)(real *out, const real *in, size_t count);
    void (*relu_backward)(real *din, const real *dout, const real *out, size_t count,
                          bool accumulate);
    void (*maxpool2d_forward)(real *out, uint8_t *argmax, const real *in, const Layer *l, size_t n);
    void (*maxpool2d_backward)(real *din, const real *dout, const uint8_t *argmax, const Layer *l,
                               size_t n, bool accumulate);
    void (*avgpool2d_forward)(real *out, const real *in, const Layer *l, size_t n);
    void (*avgpool2d_backward)(real *din, const real *dout, const Layer *l, size_t n,
                               bool accumulate);
    void (*add)(real *out, const real *in, size_t count, bool relu);
    void (*dropout_forward)(real *out, uint8_t *mask, const real *in, const Layer *l, size_t n,
                            uint32_t stream, const Draw *draw);
    void (*dropout_backward)(real *din, const real *dout, const uint8_t *mask, const Layer *l,
                             size_t n, bool accumulate);
    void (*log_softmax_forward)(real *out, const real *in, size_t n, size_t classes);
    void (*log_softmax_backward)(real *din, const real *dout, const real *out, size_t n,
                                 size_t classes);
    void (*nll_loss)(real *losses, real *dlogp, const real *logp, const uint8_t *labels, size_t n,
                     size_t batch, size_t classes, double smoothing);
    void (*adadelta)(real *param, const real *grad, real *square_avg, real *acc_delta, size_t count,
                     double lr, double rho, double eps, double weight_decay);
    void (*sgd)(real *param, const real *grad, real *momentum_buffer, size_t count, double lr,
                double momentum, double weight_decay, bool nesterov);
} Backend;

// What a run computes on.
typedef struct Device {
    char name[256], uuid[48], driver[32]; // uuid and driver: empty on a CPU
    double memory;                        // bytes that a run may take
    bool emulated;                        // GPU code that runs on the CPU: its times mean nothing
} Device;

/* What cnn_kernels.cu offers, where nvcc or the emulator has compiled it:
   cuda_device_count()  how many GPUs there are; 0 and the reason, if none can be used
   cuda_use_device()    the calling thread computes for this replica, there; on_error is die()
   cuda_describe()      fills *d for that device
   cuda_backend()       its backends, the best one last; NULL behind it
   With NCCL, for GPUs of several processes:
   cuda_nccl_id()       a name for a group, which rank 0 makes and all of it get
   cuda_nccl_join()     this thread's device becomes one of the group
   cuda_all_reduce()    data = its sum over the group; false: not done within `timeout` seconds */
#ifdef __cplusplus
extern "C" {
#endif
size_t cuda_device_count(const char **reason);
void cuda_use_device(size_t replica, size_t which,
                     void (*on_error)(int status, const char *format, ...));
void cuda_describe(Device *d);
const Backend *cuda_backend(size_t i);
enum { NCCL_ID_BYTES = 128 };
void cuda_nccl_id(char id[NCCL_ID_BYTES]);
void cuda_nccl_join(const char id[NCCL_ID_BYTES], size_t rank, size_t world);
bool cuda_all_reduce(size_t device, real *data, size_t count, double timeout);
#ifdef __cplusplus
}
#endif

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
enum { DRAW_INIT, DRAW_SHUFFLE, DRAW_SYNTHETIC, DRAW_AUGMENT, DRAW_DROPOUT = 256 };

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
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

// PARALLEL_FOR before a loop: each thread gets its part of it. PARALLEL_TURNS(), in the helpers, is
// for loops whose turns take long.
#define DO_PRAGMA(text) _Pragma(#text)
#ifdef _OPENMP
#include <omp.h>
#define PARALLEL DO_PRAGMA(omp parallel)
#define PARALLEL_FOR DO_PRAGMA(omp parallel for schedule(static))
#else
#define omp_set_num_threads(n) ((void)(n))
#define omp_get_max_threads() 1
#define omp_get_num_threads() 1
#define omp_get_thread_num() 0
#define PARALLEL
#define PARALLEL_FOR
#endif

#ifndef CNN_CUDA // no cnn_kernels.cu in this program
size_t cuda_device_count(const char **reason) {
    *reason = "built without CUDA";
    return 0;
}
void cuda_use_device(size_t replica, size_t which, void (*on_error)(int, const char *, ...)) {
    (void)replica, (void)which, (void)on_error;
}
void cuda_describe(Device *d) {
    (void)d;
}
const Backend *cuda_backend(size_t i) {
    (void)i;
    return NULL;
}
#endif

#ifdef CNN_MPI
#include <mpi.h>
#endif

#define SQRT(x) (sizeof(real) == sizeof(float) ? (real)sqrtf((float)(x)) : (real)sqrt((double)(x)))

enum { PATH_SIZE = 4096, EXIT_USAGE = 2 };

static double now(void) // seconds, from an arbitrary start
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static _Noreturn void die(int status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static void (*before_dying)(void);       // lets the run folder say "failed"
static void (*leave)(int status) = exit; // MPI: ends the other ranks as well

static _Noreturn void die(int status, const char *format, ...) {
    static bool dying;
    static __thread bool first;
    if (__atomic_exchange_n(&dying, true, __ATOMIC_SEQ_CST) && !first)
        for (;;) // another thread has the word, and ends the program
            pause();
    first = true;
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
    leave(status);
    abort(); // leave() does not return
}

static size_t min_size(size_t a, size_t b) {
    return a < b ? a : b;
}

static size_t max_size(size_t a, size_t b) {
    return a > b ? a : b;
}

static size_t shape_size(Shape s) {
    return s.h * s.w * s.c;
}

static size_t ceil_div(size_t a, size_t b) {
    return (a + b - 1) / b;
}

/* PARALLEL_TURNS(i, count) stands for a loop, i from 0 to count - 1, whose turns take long. Each
   thread begins with a part of it, the same share in every loop: what it wrote in one it finds in
   its cache in the next, and turns that write side by side are one thread's. Who is done goes on
   with what others have left, lest all wait for one that was held up. `continue` ends a turn; a
   `break` would lose some. */
typedef struct Turns {
    size_t count;
    uint32_t taken[MAX_THREADS]; // of each thread's part, and how often somebody found it empty
} Turns;

// *i = the calling thread's next turn; false: none is left
static bool take_turn(Turns *t, size_t *i) {
    const size_t threads = min_size((size_t)omp_get_num_threads(), MAX_THREADS);
    for (size_t k = 0; k < threads; k++) {
        size_t owner = ((size_t)omp_get_thread_num() + k) % threads;
        *i = t->count * owner / threads;
        *i += __atomic_fetch_add(&t->taken[owner], 1, __ATOMIC_RELAXED);
        if (*i < t->count * (owner + 1) / threads)
            return true;
    }
    return false;
}

// The outer loop runs once: it makes the counts that all threads share.
#define PARALLEL_TURNS(i, count)                                  \
    for (Turns *deal = &(Turns){(count), {0}}; deal; deal = NULL) \
    PARALLEL for (size_t i; take_turn(deal, &i);)

// Zeroed memory on a cache line's border, with room for one vector read past the end.
static void *zeroed_alloc(size_t bytes) {
    void *memory = NULL;
    if (bytes > SIZE_MAX / 2 || posix_memalign(&memory, 64, bytes + 128) != 0)
        return NULL;
    return memset(memory, 0, bytes + 128);
}

static void *must_alloc(size_t bytes, const char *what) {
    void *memory = zeroed_alloc(bytes);
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

// Whether `path` can be written: better to know it before hours of work than after them.
static void check_writable(const char *path) {
    AtomicFile f;
    struct stat info;
    if (stat(path, &info) == 0 && S_ISDIR(info.st_mode))
        die(1, "cannot write %s: it is a folder", path);
    atomic_open(&f, path);
    fclose(f.stream);
    unlink(f.temporary);
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

// FNV-1a, from the hash of what came before: equal weights have equal hashes.
static uint64_t hash_bytes(uint64_t hash, const void *memory, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const uint8_t *)memory)[i]) * 0x100000001b3u;
    return hash;
}

// The index of the first number that is NaN or infinite; count, if all are finite.
static size_t first_not_finite(const real *numbers, size_t count) {
    size_t i = 0;
    while (i < count && isfinite(numbers[i]))
        i++;
    return i;
}

/* What happened when, for --trace: a list that all threads add to, with room planned beforehand. A
   track is a thread, a device or a worker of a rank. */
enum { TRACK_STEP, TRACK_HOST, TRACK_DEVICE, TRACK_COMM, TRACK_LOADER };

typedef struct TraceEvent {
    char name[48];
    size_t rank, track;
    double begin, end; // of now()
} TraceEvent;

static struct {
    size_t on;          // how many ranks are in a step that is traced
    size_t count, room; // count goes on where there is no room left
    TraceEvent *events;
} trace;

// Notes what happened between two times of now(), if any rank is being traced. Any thread may.
static void trace_event(size_t rank, size_t track, const char *name, double begin, double end) {
    if (!__atomic_load_n(&trace.on, __ATOMIC_RELAXED))
        return;
    size_t i = __atomic_fetch_add(&trace.count, 1, __ATOMIC_RELAXED);
    if (i >= trace.room)
        return;
    trace.events[i] = (TraceEvent){.rank = rank, .track = track, .begin = begin, .end = end};
    snprintf(trace.events[i].name, sizeof trace.events[i].name, "%s", name);
}

/* ==== 3. Datasets ===============================================================================

   Images stay bytes in memory, as they are on disk; the loader turns them into numbers. Files come
   from strangers: every count is checked against the file's real size before it is believed. */

typedef struct Dataset Dataset;

typedef struct DatasetInfo {
    const char *name;
    Shape shape;
    size_t classes, train, test; // classes; images in the two sets
    double mean[3], std[3];      // of the pixels scaled to [0, 1], one a channel
    void (*read)(Dataset *data, const char *dir, const char *const *files, size_t limit);
    const char *files[2][6]; // of the training set, of the test set
    const char *class_names; // separated by spaces; NULL: numbers
} DatasetInfo;

struct Dataset {
    const DatasetInfo *info;
    size_t count;
    uint8_t *images; // [count][h][w][c]
    uint8_t *labels; // [count]
};

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

static void check_label(const DataFile *f, size_t label, size_t classes, size_t image) {
    if (label >= classes)
        bad_file(f, "expected labels from 0 to %zu, found %zu at image %zu", classes - 1, label,
                 image);
}

/* An IDX file: magic number 0x0801 (labels) or 0x0803 (images), the sizes of its 1 or 3 dimensions,
   all big-endian, then bytes. item: the size that each image must have; all zero: labels. Reads the
   first `limit` items, checks the length of all; returns the whole file's count. */
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

// files: the images, then the labels
static void read_idx_set(Dataset *data, const char *dir, const char *const *files, size_t limit) {
    const DatasetInfo *info = data->info;
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
        check_label(&labels, data->labels[i], info->classes, i);
}

/* One file of CIFAR: records of a label (CIFAR-100: a coarse one of 20, then the fine one that we
   take), and 3 x 32 x 32 bytes, channel by channel. Keeps at most `limit` images in all. */
static void read_cifar(Dataset *data, const char *dir, const char *file, size_t records,
                       size_t limit) {
    enum { PIXELS = 32 * 32 };
    DataFile f;
    uint8_t record[2 + 3 * PIXELS];
    size_t label_bytes = data->info->classes == 100 ? 2 : 1, bytes = label_bytes + 3 * PIXELS;
    data_open(&f, dir, file, data->info->name);
    for (size_t i = 0; i < records; i++) {
        read_exactly(&f, record, bytes, i * bytes, records * bytes);
        if (label_bytes == 2)
            check_label(&f, record[0], 20, i);
        check_label(&f, record[label_bytes - 1], data->info->classes, i);
        if (data->count == limit)
            continue;
        uint8_t *image = data->images + data->count * 3 * PIXELS;
        for (size_t pixel = 0; pixel < 3 * PIXELS; pixel++)
            image[pixel] = record[label_bytes + pixel % 3 * PIXELS + pixel / 3];
        data->labels[data->count++] = record[label_bytes - 1];
    }
    if (fgetc(f.stream) != EOF)
        bad_file(&f, "too long: expected %zu bytes for %zu images, found more", records * bytes,
                 records);
    data_close(&f);
}

static void read_cifar_set(Dataset *data, const char *dir, const char *const *files, size_t limit) {
    bool train = files == data->info->files[0];
    size_t parts = 0, count = train ? data->info->train : data->info->test;
    while (files[parts])
        parts++;
    data->images = must_alloc(min_size(count, limit) * shape_size(data->info->shape), "images");
    data->labels = must_alloc(min_size(count, limit), "labels");
    for (size_t i = 0; i < parts; i++)
        read_cifar(data, dir, files[i], count / parts, limit);
}

#define IDX_FILES                                                 \
    read_idx_set, {                                               \
        {"train-images-idx3-ubyte", "train-labels-idx1-ubyte"}, { \
            "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"    \
        }                                                         \
    }
// clang-format off
static const DatasetInfo dataset_infos[] = {
    // the constants of MNIST serve both, as in the handouts' script
    {"mnist", {28, 28, 1}, 10, 60000, 10000, {.1307}, {.3081}, IDX_FILES, NULL},
    {"fashion-mnist", {28, 28, 1}, 10, 60000, 10000, {.1307}, {.3081}, IDX_FILES,
     "t-shirt trouser pullover dress coat sandal shirt sneaker bag boot"},
    {"cifar10", {32, 32, 3}, 10, 50000, 10000, {.4914, .4822, .4465}, {.2470, .2435, .2616},
     read_cifar_set, {{"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin",
                       "data_batch_4.bin", "data_batch_5.bin"}, {"test_batch.bin"}},
     "plane car bird cat deer dog frog horse ship truck"},
    {"cifar100", {32, 32, 3}, 100, 50000, 10000, {.5071, .4865, .4409}, {.2673, .2564, .2762},
     read_cifar_set, {{"train.bin"}, {"test.bin"}},
     "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus "
     "butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch "
     "crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo "
     "keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain "
     "mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain "
     "plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk "
     "skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone "
     "television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman "
     "worm"},
};
// clang-format on
enum { DATASETS = sizeof dataset_infos / sizeof *dataset_infos };

static const DatasetInfo *find_dataset_info(const char *name) {
    for (size_t i = 0; i < DATASETS; i++)
        if (strcmp(dataset_infos[i].name, name) == 0)
            return &dataset_infos[i];
    return NULL;
}

/* Made-up images, for machines without data. Each class has a glyph, a patch of waves drawn from
   Philox; an image shows the glyph of its class, dark or bright, near its middle, under noise and
   over a fainter glyph of another class. Since a glyph and its negative mean the same class, no
   linear model can tell classes apart; convolutions and ReLUs can. The images never depend on
   --seed. */
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
    size_t size = shape_size(info->shape), glyph_size = GLYPH * GLYPH * s.c;
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
    data->images = must_alloc(data->count * shape_size(info->shape), "images");
    data->labels = must_alloc(data->count, "labels");
    float *glyphs = must_alloc(info->classes * glyph_size * sizeof *glyphs, "synthetic images");
    for (size_t class = 0; class < info->classes; class ++)
        draw_glyph(glyphs + class * glyph_size, class, info->shape.c);
    PARALLEL_FOR
    for (size_t i = 0; i < data->count; i++) // the test set is numbered behind the training set
        draw_synthetic(data->images + i * shape_size(info->shape), data->labels + i, glyphs, info,
                       (uint32_t)(i + (train ? 0 : info->train)));
    free(glyphs);
}

static bool has_dataset(const char *dir, const char *name) {
    char path[PATH_SIZE];
    return data_path(path, dir, find_dataset_info(name)->files[0][0]);
}

// Where a dataset's files are: DIR and DIR/NAME with --data DIR, else the usual folders.
static bool find_data_dir(char dir[PATH_SIZE], const char *name, const char *data_option) {
    char beside[PATH_SIZE] = "./cnn"; // the executable's folder
    ssize_t length = readlink("/proc/self/exe", beside, sizeof beside - 8);
    if (length > 0)
        beside[length] = 0;
    strcat(dirname(beside), "/data");
    const char *roots[] = {"data", beside, "/usr/share/datasets"};
    for (size_t i = 0; !*data_option && i < sizeof roots / sizeof *roots; i++) {
        join_path(dir, roots[i], name);
        if (has_dataset(dir, name))
            return true;
    }
    if (!*data_option)
        return false;
    join_path(dir, data_option, name);
    if (has_dataset(dir, name))
        return true;
    snprintf(dir, PATH_SIZE, "%s", data_option);
    return has_dataset(dir, name);
}

static void free_dataset(Dataset *data) {
    free(data->images);
    free(data->labels);
}

/* ==== 4. Loader =================================================================================

   W worker threads fill a ring of batches ahead of the training loop. Which images a batch holds,
   and in which order batches are handed out, is settled by the permutation alone: W changes
   nothing but the waiting. Threads and memory are made once, before the first step. */

/* Augmentation: another view of each image in each epoch. The function gets one image as bytes and
   draws from Philox by (seed, epoch, position in the epoch), so workers change nothing. */
typedef void Augment(uint8_t *out, const uint8_t *in, Shape s, const Draw *draw);

// A byte of an image; black outside of it, where row or column have wrapped around below 0.
static uint8_t pixel_at(const uint8_t *image, Shape s, size_t y, size_t x, size_t c) {
    return y < s.h && x < s.w ? image[(y * s.w + x) * s.c + c] : 0;
}

// RandomCrop(size, padding = 4), then RandomHorizontalFlip(0.5)
static void augment_crop_flip(uint8_t *out, const uint8_t *in, Shape s, const Draw *draw) {
    uint32_t r[4];
    philox4x32(r, 0, (uint32_t)draw->first, (uint32_t)draw->epoch, DRAW_AUGMENT, draw->seed);
    size_t top = (size_t)(r[0] % (2 * CROP_PADDING + 1)) - CROP_PADDING; // may wrap around below 0
    size_t left = (size_t)(r[1] % (2 * CROP_PADDING + 1)) - CROP_PADDING;
    for (size_t y = 0; y < s.h; y++)
        for (size_t x = 0; x < s.w; x++)
            for (size_t c = 0; c < s.c; c++)
                *out++ = pixel_at(in, s, y + top, (r[2] & 1 ? s.w - 1 - x : x) + left, c);
}

// weights[d] = exp(-d^2 / (2 sigma^2)) / (sigma sqrt(2 pi)), up to 3 sigma
static void blur_weights(float weights[ELASTIC_REACH + 1]) {
    for (int d = 0; d <= ELASTIC_REACH; d++)
        weights[d] = (float)(exp(-d * d / (2. * ELASTIC_SIGMA * ELASTIC_SIGMA)) /
                             (ELASTIC_SIGMA * sqrt(2 * M_PI)));
}

// to[i] = sum over d from -3 sigma to 3 sigma of weights[|d|] * from[i + d], along rows or columns
static void blur(float *to, const float *from, Shape s, bool rows) {
    float weights[ELASTIC_REACH + 1];
    blur_weights(weights);
    for (size_t y = 0; y < s.h; y++)
        for (size_t x = 0; x < s.w; x++) {
            float sum = 0;
            for (int d = -ELASTIC_REACH; d <= ELASTIC_REACH; d++) {
                size_t yy = rows ? y : y + (size_t)d, xx = rows ? x + (size_t)d : x;
                if (yy < s.h && xx < s.w)
                    sum = fmaf(weights[abs(d)], from[yy * s.w + xx], sum);
            }
            to[y * s.w + x] = sum;
        }
}

/* Elastic distortion (Simard, Steinkraus, Platt, "Best practices for convolutional neural
   networks", ICDAR 2003): every pixel is fetched from a place nearby, which a random field, blurred
   with sigma = 4 and scaled by alpha = 34 pixels, tells; bilinear between four pixels. fmaf()
   rounds once, wherever it runs: so a GPU makes the same images. */
static void augment_elastic(uint8_t *out, const uint8_t *in, Shape s, const Draw *draw) {
    size_t pixels = s.h * s.w;
    float field[2][pixels], blurred[pixels]; // how far down, how far to the right
    for (size_t f = 0; f < 2; f++) {
        for (size_t i = 0; i < pixels; i += 4) {
            uint32_t r[4];
            philox4x32(r, (uint32_t)(1 + f * pixels + i), (uint32_t)draw->first,
                       (uint32_t)draw->epoch, DRAW_AUGMENT, draw->seed);
            for (size_t j = 0; j < min_size(4, pixels - i); j++)
                field[f][i + j] = ELASTIC_ALPHA * (float)(2 * uniform(r[j]) - 1);
        }
        blur(blurred, field[f], s, true);
        blur(field[f], blurred, s, false);
    }
    for (size_t i = 0; i < pixels; i++) {
        float y = (float)(i / s.w) + field[0][i], x = (float)(i % s.w) + field[1][i];
        float down = y - floorf(y), right = x - floorf(x);
        size_t top = (size_t)(ptrdiff_t)floorf(y), left = (size_t)(ptrdiff_t)floorf(x);
        for (size_t c = 0; c < s.c; c++) {
            float above = fmaf(right, (float)pixel_at(in, s, top, left + 1, c),
                               (1 - right) * (float)pixel_at(in, s, top, left, c));
            float below = fmaf(right, (float)pixel_at(in, s, top + 1, left + 1, c),
                               (1 - right) * (float)pixel_at(in, s, top + 1, left, c));
            *out++ = (uint8_t)fmaf(down, below, fmaf(1 - down, above, .5f));
        }
    }
}

static const struct {
    const char *name;
    Augment *augment;
} augmentations[] = {[AUGMENT_NONE] = {"none", NULL},
                     [AUGMENT_CROP_FLIP] = {"crop-flip", augment_crop_flip},
                     [AUGMENT_ELASTIC] = {"elastic", augment_elastic}};
enum { AUGMENTATIONS = sizeof augmentations / sizeof *augmentations };

typedef struct Batch {
    real *images;        // [n][h][w][c], normalised
    uint8_t *labels;     // [n]
    real *device_images; // where the backend reads them: the same on a CPU, copies on a GPU
    uint8_t *device_labels;
    const Resident
        *resident;    // instead of images: the data set lies on the device; NULL: it does not
    Draw draw;        // seed, epoch, and the first image's position in it
    size_t n, number; // how many images; number of the batch, from 0
} Batch;

// Where a loader's batches go, and how.
typedef struct Placement {
    const Backend *backend;
    size_t device;
    bool pinned, resident;
    size_t rank, others; // of the ranks that share each batch, this one; how many more there are
} Placement;

typedef struct Loader {
    const Dataset *data;
    uint32_t *order; // the epoch's permutation: order[position] = image
    size_t share;    // how many positions of it are this rank's
    size_t batch_size, batches, workers, slots;
    Batch *ring;            // batch b lies in slot b % slots
    size_t *filled;         // 1 + the number of the batch that a slot holds; 0: none
    size_t started, handed; // batches that workers have begun; batches that next() has returned
    size_t busy;            // workers that are filling a slot
    size_t entered;         // workers that have started
    bool quit;
    Augment *augment; // NULL: images as they are
    Draw draw;        // the epoch's seed and number, for the augmentation
    Placement place;
    Resident resident;          // the data set on the device, if place.resident
    size_t uploaded, upload_ns; // bytes copied to the device, and how long that took
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t *threads;
    real normalised[3][256]; // (byte / 255 - mean) / std, by channel
} Loader;

// The images and labels of a batch; where the data set is resident, only which ones they are.
static void fill_batch(const Loader *l, Batch *batch, size_t number) {
    Shape s = l->data->info->shape;
    size_t pixels = shape_size(l->data->info->shape), first = number * l->batch_size;
    uint8_t augmented[pixels];
    batch->number = number;
    batch->draw = l->draw;
    batch->draw.first = position_of(l->draw, first);
    batch->n = min_size(l->batch_size, l->share - first);
    for (size_t i = 0; i < batch->n; i++) {
        size_t position = position_of(batch->draw, i), image = l->order[position];
        const uint8_t *bytes = l->data->images + image * pixels;
        real *out = batch->images + i * pixels;
        batch->labels[i] = l->data->labels[image];
        if (batch->resident)
            continue;
        if (l->augment) {
            Draw draw = {l->draw.seed, l->draw.epoch, position, 0};
            l->augment(augmented, bytes, s, &draw);
            bytes = augmented;
        }
        for (size_t p = 0; p < pixels; p += s.c)
            for (size_t c = 0; c < s.c; c++)
                out[p + c] = l->normalised[c][bytes[p + c]];
    }
}

// Copies a batch to the device, beside what runs there; returns the bytes.
static size_t upload_batch(const Loader *l, const Batch *batch) {
    size_t bytes = batch->n * shape_size(l->data->info->shape) * sizeof(real);
    if (!l->place.backend->transfer || batch->resident)
        return 0;
    l->place.backend->transfer(l->place.device, batch->device_images, batch->images, bytes);
    l->place.backend->transfer(l->place.device, batch->device_labels, batch->labels, batch->n);
    return bytes + batch->n;
}

// Fills the slot of batch `number` and brings it to the device. Workers do this side by side:
// without the lock.
static void make_batch(Loader *l, size_t number, size_t worker) {
    Batch *slot = &l->ring[number % l->slots];
    double start = now();
    fill_batch(l, slot, number);
    double filled = now();
    trace_event(l->place.rank, TRACK_LOADER + worker, "make a batch", start, filled);
    size_t uploaded = upload_batch(l, slot);
    double end = now();
    if (uploaded)
        trace_event(l->place.rank, TRACK_LOADER + worker, "upload", filled, end);
    __atomic_fetch_add(&l->uploaded, uploaded, __ATOMIC_RELAXED);
    __atomic_fetch_add(&l->upload_ns, (size_t)(1e9 * (end - filled)), __ATOMIC_RELAXED);
}

static void *loader_worker(void *argument) {
    Loader *l = argument;
    size_t worker = __atomic_fetch_add(&l->entered, 1, __ATOMIC_RELAXED);
    /* LAB 3.1 BEGIN loader_worker */
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
        make_batch(l, number, worker);
        pthread_mutex_lock(&l->lock);
        l->busy--;
        l->filled[number % l->slots] = number + 1;
        pthread_cond_broadcast(&l->changed);
    }
    pthread_mutex_unlock(&l->lock);
    /* LAB 3.1 END */
    return NULL;
}

// Memory of the device, or die(); place_copy() fills it from the host's.
static void *place_alloc(const Placement *p, size_t bytes, const char *what) {
    void *memory = p->backend->alloc(bytes);
    if (!memory)
        die(1,
            "no memory on the device for %s: %.1f MB asked for; a smaller --batch-size needs less",
            what, (double)bytes / 1e6);
    return memory;
}

static void *place_copy(const Placement *p, const void *from, size_t bytes, const char *what) {
    void *memory = place_alloc(p, bytes, what);
    p->backend->copy(memory, from, bytes);
    return memory;
}

// Puts the data set into the device's memory.
static void make_resident(Loader *l) {
    const Dataset *data = l->data;
    const Placement *p = &l->place;
    Resident *r = &l->resident;
    r->shape = data->info->shape;
    r->images = place_copy(p, data->images, data->count * shape_size(r->shape), "the data set");
    r->labels = place_copy(p, data->labels, data->count, "the data set");
    r->normalised = place_copy(p, l->normalised, sizeof l->normalised, "the data set");
    r->order = place_alloc(p, (data->count + p->others) * sizeof *r->order, "the permutation");
    while (augmentations[r->augment].augment != l->augment)
        r->augment++;
    blur_weights(r->blur);
}

// A slot of the ring: on the host, and on the device where that has memory of its own.
static void make_slot(Loader *l, Batch *slot) {
    const Placement *p = &l->place;
    size_t bytes = l->batch_size * shape_size(l->data->info->shape) * sizeof(real);
    bool copied = p->backend->transfer != NULL;
    slot->resident = p->resident ? &l->resident : NULL;
    slot->images = p->backend->host_alloc(p->resident ? 0 : bytes, p->pinned);
    slot->labels = p->backend->host_alloc(l->batch_size, p->pinned);
    if (!slot->images || !slot->labels)
        die(1, "no %smemory for a batch: %.1f MB asked for; a smaller --batch-size needs less%s",
            p->pinned ? "pinned " : "", (double)bytes / 1e6,
            p->pinned ? ", or --pin-memory off" : "");
    slot->device_images = slot->images;
    slot->device_labels = slot->labels;
    if (copied && !p->resident) {
        slot->device_images = place_alloc(p, bytes, "a batch");
        slot->device_labels = place_alloc(p, l->batch_size, "a batch");
    }
}

static void loader_init(Loader *l, const Dataset *data, size_t batch_size, size_t workers,
                        Augment *augment, Placement place) {
    const DatasetInfo *info = data->info;
    *l = (Loader){.data = data, .batch_size = batch_size, .workers = workers, .augment = augment};
    l->place = place;
    l->started = l->batches = ceil_div(ceil_div(data->count, 1 + place.others), batch_size);
    l->slots = 2 * workers + 1; // PyTorch's prefetch_factor of 2, and the batch in use
    l->order = must_alloc((data->count + place.others) * sizeof *l->order, "the permutation");
    l->ring = must_alloc(l->slots * sizeof *l->ring, "the loader");
    l->filled = must_alloc(l->slots * sizeof *l->filled, "the loader");
    l->threads = must_alloc(workers * sizeof *l->threads, "the loader");
    for (size_t c = 0; c < info->shape.c; c++)
        for (int byte = 0; byte < 256; byte++)
            l->normalised[c][byte] = ((real)byte / 255 - (real)info->mean[c]) / (real)info->std[c];
    if (place.resident)
        make_resident(l);
    for (size_t s = 0; s < l->slots; s++)
        make_slot(l, &l->ring[s]);
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

/* Starts an epoch with its batch number `first`: shuffled for training; epoch 0 means in the order
   of the file, for testing. Rank r of N takes the positions r, r + N, ...; for training, the first
   images come again at the end, so that all ranks have equally many (as DistributedSampler). */
static void loader_start(Loader *l, uint64_t seed, size_t epoch, size_t first) {
    const size_t count = l->data->count, rank = l->place.rank, ranks = 1 + l->place.others;
    pthread_mutex_lock(&l->lock);
    l->started = l->batches = 0; // stops the workers, if an epoch was left early
    while (l->busy > 0)
        pthread_cond_wait(&l->changed, &l->lock);
    for (size_t i = 0; i < count; i++)
        l->order[i] = (uint32_t)i;
    if (epoch > 0)
        shuffle(l->order, count, seed, epoch);
    for (size_t i = 0; i < l->place.others; i++)
        l->order[count + i] = l->order[i % count];
    if (l->place.resident)
        l->place.backend->copy(l->resident.order, l->order,
                               (count + l->place.others) * sizeof *l->order);
    memset(l->filled, 0, l->slots * sizeof *l->filled);
    l->draw = (Draw){seed, epoch, rank, l->place.others};
    l->share = epoch > 0 ? ceil_div(count, ranks) : (count + ranks - 1 - rank) / ranks;
    l->started = l->handed = first;
    l->batches = ceil_div(l->share, l->batch_size);
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
}

// The next batch, valid until the call after; NULL when the epoch is over.
static const Batch *loader_next(Loader *l) {
    const Batch *batch = NULL;
    /* LAB 3.2 BEGIN loader_next */
    pthread_mutex_lock(&l->lock);
    if (l->handed < l->batches) {
        size_t number = l->handed++;
        pthread_cond_broadcast(&l->changed); // the slot before this one is free now
        while (l->filled[number % l->slots] != number + 1)
            pthread_cond_wait(&l->changed, &l->lock);
        batch = &l->ring[number % l->slots];
    }
    pthread_mutex_unlock(&l->lock);
    /* LAB 3.2 END */
    return batch;
}

// The bytes that the workers have copied to the device, and how long they were at it in all.
static double loader_traffic(const Loader *l, double *seconds) {
    *seconds = 1e-9 * (double)__atomic_load_n(&l->upload_ns, __ATOMIC_RELAXED);
    return (double)__atomic_load_n(&l->uploaded, __ATOMIC_RELAXED);
}

static void loader_free(Loader *l) {
    pthread_mutex_lock(&l->lock);
    l->quit = true;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
    for (size_t w = 0; w < l->workers; w++)
        pthread_join(l->threads[w], NULL);
    const Placement *p = &l->place;
    for (size_t s = 0; s < l->slots; s++) {
        const Batch *slot = &l->ring[s];
        if (slot->device_images != slot->images) {
            p->backend->release(slot->device_images);
            p->backend->release(slot->device_labels);
        }
        p->backend->host_release(slot->images, p->pinned);
        p->backend->host_release(slot->labels, p->pinned);
    }
    if (p->resident) {
        p->backend->release((void *)l->resident.images);
        p->backend->release((void *)l->resident.labels);
        p->backend->release((void *)l->resident.normalised);
        p->backend->release(l->resident.order);
    }
    pthread_mutex_destroy(&l->lock);
    pthread_cond_destroy(&l->changed);
    free(l->order);
    free(l->ring);
    free(l->filled);
    free(l->threads);
}

/* ==== 5. Layers on the CPU ======================================================================

   Every layer stands here as its definition, a few loops that say what it computes; the tests take
   these for the truth. Those called _naive have a fast version in the next room (_fast).

   Gradients: dX is the derivative of the loss by X. A backward receives dout and writes dweight
   and dbias with =, and din with = or, if accumulate, with +=. Every sum is split by shapes, never
   by the number of threads, and taken in one fixed order: the result has the same bits for any
   --threads. */

enum { OUTSIDE = -1 };

// Which input pixel (row * w + column) output pixel (y, x) meets at a tap, or OUTSIDE.
static ptrdiff_t met_pixel(const Layer *l, size_t y, size_t x, size_t tap) {
    size_t iy = y * l->stride + tap / l->kernel - l->padding; // wraps around above the first row
    size_t ix = x * l->stride + tap % l->kernel - l->padding;
    return iy < l->in.h && ix < l->in.w ? (ptrdiff_t)(iy * l->in.w + ix) : OUTSIDE;
}

/* out[n][y][x][k] = bias[k] + sum over i, j, c of
                          in[n][y * s + i - padding][x * s + j - padding][c] * weight[i][j][c][k]
   where s is the stride and pixels outside of the image count as 0.
   Shapes: in [n][h][w][c], out [n][oh][ow][k]. bias may be NULL: there is none.
   A linear layer is the same on 1 pixel: out[n][k] = bias[k] + sum of in[n][c] * weight[c][k]. */
static void conv2d_forward_naive(real *out, const real *in, const real *weight, const real *bias,
                                 const Layer *l, size_t n, real *scratch) {
    (void)scratch;
    Shape I = l->in, O = l->out;
    /* LAB 1.1 BEGIN conv2d_forward_naive */
    PARALLEL_FOR
    for (size_t pixel = 0; pixel < n * O.h * O.w; pixel++) {
        size_t image = pixel / (O.h * O.w), y = pixel / O.w % O.h, x = pixel % O.w;
        for (size_t k = 0; k < O.c; k++) {
            real sum = bias ? bias[k] : 0;
            for (size_t tap = 0; tap < l->kernel * l->kernel; tap++) {
                ptrdiff_t met = met_pixel(l, y, x, tap);
                for (size_t c = 0; met != OUTSIDE && c < I.c; c++)
                    sum += in[(image * I.h * I.w + (size_t)met) * I.c + c] *
                           weight[(tap * I.c + c) * O.c + k];
            }
            out[pixel * O.c + k] = sum;
        }
    }
    /* LAB 1.1 END */
}

/* dbias[k]            = sum over n, y, x of dout[n][y][x][k]
   dweight[i][j][c][k] = sum over n, y, x of
                         dout[n][y][x][k] * in[n][y * s + i - padding][x * s + j - padding][c]
   din[n][iy][ix][c]   = sum over i, j, k of dout[n][y][x][k] * weight[i][j][c][k]
                         where iy = y * s + i - padding, ix likewise.   din may be NULL.
   din += instead, if accumulate. Without a bias there is no dbias. */
static void conv2d_backward_naive(real *din, real *dweight, real *dbias, const real *dout,
                                  const real *in, const real *weight, const Layer *l, size_t n,
                                  bool accumulate, real *scratch) {
    (void)scratch;
    Shape I = l->in, O = l->out;
    /* LAB 1.2 BEGIN conv2d_backward_naive */
    memset(dbias, 0, l->biases * sizeof *dbias);
    for (size_t i = 0; l->biases && i < n * shape_size(O); i++)
        dbias[i % O.c] += dout[i];
    PARALLEL_FOR
    for (size_t row = 0; row < l->kernel * l->kernel * I.c; row++) {
        size_t tap = row / I.c, c = row % I.c;
        real *sums = dweight + row * O.c;
        memset(sums, 0, O.c * sizeof *sums);
        for (size_t pixel = 0; pixel < n * O.h * O.w; pixel++) {
            ptrdiff_t met = met_pixel(l, pixel / O.w % O.h, pixel % O.w, tap);
            size_t image = pixel / (O.h * O.w);
            for (size_t k = 0; met != OUTSIDE && k < O.c; k++)
                sums[k] += in[(image * I.h * I.w + (size_t)met) * I.c + c] * dout[pixel * O.c + k];
        }
    }
    /* LAB 1.2 END */
    if (!din)
        return;
    /* LAB 1.3 BEGIN conv2d_backward_naive */
    PARALLEL_FOR
    for (size_t image = 0; image < n; image++) {
        real *d = din + image * shape_size(I);
        memset(d, 0, accumulate ? 0 : shape_size(I) * sizeof *d);
        for (size_t y = 0; y < O.h; y++)
            for (size_t x = 0; x < O.w; x++)
                for (size_t tap = 0; tap < l->kernel * l->kernel; tap++) {
                    ptrdiff_t met = met_pixel(l, y, x, tap);
                    const real *from = dout + ((image * O.h + y) * O.w + x) * O.c;
                    for (size_t c = 0; met != OUTSIDE && c < I.c; c++)
                        for (size_t k = 0; k < O.c; k++)
                            d[(size_t)met * I.c + c] += from[k] * weight[(tap * I.c + c) * O.c + k];
                }
    }
    /* LAB 1.3 END */
}

// out = max(in, 0); a NaN stays a NaN. In place, if out is in
static void relu_forward(real *out, const real *in, size_t count) {
    PARALLEL_FOR
    for (size_t i = 0; i < count; i++)
        out[i] = in[i] < 0 ? 0 : in[i];
}

// din = dout where out > 0, else 0 (+= if accumulate); in place, if din is dout
static void relu_backward(real *din, const real *dout, const real *out, size_t count,
                          bool accumulate) {
    PARALLEL_FOR
    for (size_t i = 0; i < count; i++)
        din[i] = (out[i] > 0 ? dout[i] : 0) + (accumulate ? din[i] : 0);
}

/* out[n][y][x][c] = max over i, j < kernel of in[n][y * stride + i - padding][...][c], and argmax
   = i * kernel + j of the first such maximum. Pixels outside of the image are never the maximum. */
static void maxpool2d_forward_naive(real *out, uint8_t *argmax, const real *in, const Layer *l,
                                    size_t n) {
    Shape I = l->in, O = l->out;
    /* LAB 1.4 BEGIN maxpool2d_forward_naive */
    PARALLEL_FOR
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
                    ptrdiff_t met = met_pixel(l, y, x, tap);
                    if (met == OUTSIDE)
                        continue;
                    const real *pixel = in + (image * I.h * I.w + (size_t)met) * I.c;
                    for (size_t c = 0; c < O.c; c++) {
                        bool larger = pixel[c] > best[c] || pixel[c] != pixel[c]; // a NaN wins
                        best[c] = larger ? pixel[c] : best[c];
                        arg[c] = larger ? (uint8_t)tap : arg[c];
                    }
                }
            }
    /* LAB 1.4 END */
}

// din = 0 unless accumulate, then din[the pixel that was the maximum] += dout
static void maxpool2d_backward(real *din, const real *dout, const uint8_t *argmax, const Layer *l,
                               size_t n, bool accumulate) {
    Shape I = l->in, O = l->out;
    /* LAB 1.5 BEGIN maxpool2d_backward */
    PARALLEL_FOR
    for (size_t image = 0; image < n; image++) {
        real *d = din + image * shape_size(I);
        memset(d, 0, accumulate ? 0 : shape_size(I) * sizeof *d);
        for (size_t y = 0; y < O.h; y++)
            for (size_t x = 0; x < O.w; x++) {
                size_t at = ((image * O.h + y) * O.w + x) * O.c;
                for (size_t tap = 0; tap < l->kernel * l->kernel; tap++) {
                    ptrdiff_t met = met_pixel(l, y, x, tap);
                    if (met == OUTSIDE)
                        continue;
                    real *restrict pixel = d + (size_t)met * I.c;
                    for (size_t c = 0; c < O.c; c++)
                        pixel[c] += argmax[at + c] == tap ? dout[at + c] : 0;
                }
            }
    }
    /* LAB 1.5 END */
}

// out[n][c] = mean over y, x of in[n][y][x][c]
static void avgpool2d_forward(real *out, const real *in, const Layer *l, size_t n) {
    size_t channels = l->in.c, pixels = l->in.h * l->in.w;
    PARALLEL_FOR
    for (size_t image = 0; image < n; image++) {
        real *restrict to = out + image * channels;
        memset(to, 0, channels * sizeof *to);
        for (size_t i = 0; i < pixels; i++)
            for (size_t c = 0; c < channels; c++)
                to[c] += in[(image * pixels + i) * channels + c];
        for (size_t c = 0; c < channels; c++)
            to[c] /= (real)pixels;
    }
}

// din[n][y][x][c] = dout[n][c] / (h * w), or += if accumulate
static void avgpool2d_backward(real *din, const real *dout, const Layer *l, size_t n,
                               bool accumulate) {
    size_t channels = l->in.c, pixels = l->in.h * l->in.w;
    PARALLEL_FOR
    for (size_t i = 0; i < n * pixels; i++)
        for (size_t c = 0; c < channels; c++)
            din[i * channels + c] = dout[i / pixels * channels + c] / (real)pixels +
                                    (accumulate ? din[i * channels + c] : 0);
}

// out += in, then ReLU if asked: a residual join, and a sum of gradients
static void add_arrays(real *out, const real *in, size_t count, bool relu) {
    const real least = relu ? 0 : -(real)INFINITY;
    PARALLEL_FOR
    for (size_t i = 0; i < count; i++) {
        real sum = out[i] + in[i];
        out[i] = sum < least ? least : sum;
    }
}

/* ---- BatchNorm ---------------------------------------------------------------------------------

   (Ioffe, Szegedy, "Batch normalization", ICML 2015, as PyTorch computes it.) Per channel c, over
   the m = n * h * w pixels of the batch:
     mean = sum of in / m                     variance = sum of (in - mean)^2 / m
     out = (in - mean) * scale + bias         scale = weight / sqrt(variance + eps)
     running = (1 - momentum) * running + momentum * (mean, or variance * m / (m - 1))
   An add behind it is done in one: out += residual, its other input; a ReLU behind these likewise.
   Evaluation takes the running statistics instead of the batch's. stats holds four rows of c
   numbers: running mean, running variance, and mean and 1 / sqrt(variance + eps) for the backward.
   Sums are taken over slices of the pixels, which do not depend on the number of threads. */

enum { BN_SLICES = 32 };
static const double bn_eps = 1e-5, bn_momentum = 0.1;

typedef struct Slice {
    size_t first, last; // pixels [first, last)
} Slice;

static Slice bn_slice(size_t slice, size_t pixels) {
    return (Slice){pixels * slice / BN_SLICES, pixels * (slice + 1) / BN_SLICES};
}

/* sums[0][c] = mean over a slice, sums[1][c] = sum of the squared distances from it (Chan, Golub,
   LeVeque, "Updating formulae", 1979), joined from short pieces, read twice while in the cache. */
static void bn_slice_statistics(real *restrict sums, const real *restrict in, Slice s,
                                size_t channels) {
    enum { PIECE = 16 };
    real *restrict squares = sums + channels, mean[channels], more[channels];
    memset(sums, 0, 2 * channels * sizeof *sums);
    for (size_t first = s.first; first < s.last; first += PIECE) {
        size_t last = min_size(first + PIECE, s.last);
        real before = (real)(first - s.first), n = (real)(last - first);
        memset(mean, 0, sizeof mean);
        memset(more, 0, sizeof more);
        for (size_t i = first; i < last; i++)
            for (size_t c = 0; c < channels; c++)
                mean[c] += in[i * channels + c];
        for (size_t c = 0; c < channels; c++)
            mean[c] /= n;
        for (size_t i = first; i < last; i++)
            for (size_t c = 0; c < channels; c++) {
                real d = in[i * channels + c] - mean[c];
                more[c] += d * d;
            }
        for (size_t c = 0; c < channels; c++) {
            real d = mean[c] - sums[c];
            squares[c] += more[c] + d * d * (before * n / (before + n));
            sums[c] += d * (n / (before + n));
        }
    }
}

// Joins the slices of channel c in the same way.
static void bn_join_statistics(real *stats, const real *sums, size_t pixels, size_t channels,
                               size_t c) {
    double mean = 0, squares = 0, count = 0;
    for (size_t slice = 0; slice < BN_SLICES; slice++, sums += 2 * channels) {
        Slice s = bn_slice(slice, pixels);
        double more = (double)(s.last - s.first), d = (double)sums[c] - mean;
        if (more == 0)
            continue;
        squares += (double)sums[channels + c] + d * d * count * more / (count + more);
        mean += d * more / (count + more);
        count += more;
    }
    double unbiased = squares / (count > 1 ? count - 1 : 1);
    stats[c] = (real)((1 - bn_momentum) * (double)stats[c] + bn_momentum * mean);
    stats += channels;
    stats[c] = (real)((1 - bn_momentum) * (double)stats[c] + bn_momentum * unbiased);
    stats[channels + c] = (real)mean;
    stats[2 * channels + c] = (real)(1 / sqrt(squares / count + bn_eps));
}

static void batchnorm2d_forward(real *out, real *stats, const real *in, const real *weight,
                                const real *bias, const real *residual, const Layer *l, size_t n,
                                bool training, real *scratch) {
    size_t channels = l->in.c, pixels = n * l->in.h * l->in.w;
    PARALLEL_TURNS(slice, training ? BN_SLICES : 0)
        bn_slice_statistics(scratch + slice * 2 * channels, in, bn_slice(slice, pixels), channels);
    real *restrict scale = scratch + BN_SLICES * 2 * channels, *restrict shift = scale + channels;
    PARALLEL_FOR
    for (size_t c = 0; c < channels; c++) {
        if (training)
            bn_join_statistics(stats, scratch, pixels, channels, c);
        real mean = stats[training ? 2 * channels + c : c];
        scale[c] = weight[c] * (training ? stats[3 * channels + c]
                                         : 1 / SQRT(stats[channels + c] + (real)bn_eps));
        shift[c] = bias[c] - mean * scale[c];
    }
    real least = (l->add ? l->add : l)->fused_relu ? 0 : -(real)INFINITY;
    PARALLEL_FOR
    for (size_t i = 0; i < pixels; i++) {
        const real *restrict from = in + i * channels;
        real *restrict to = out + i * channels;
        for (size_t c = 0; c < channels; c++) {
            real value = from[c] * scale[c] + shift[c];
            if (residual)
                value += residual[i * channels + c];
            to[c] = value < least ? least : value;
        }
    }
}

/* dbias = sum of dout      dweight = sum of dout * x, where x = (in - mean) / sqrt(variance + eps)
   din = weight / sqrt(variance + eps) * (dout - dbias / m - x * dweight / m), or += if accumulate;
   din may be NULL */
static void batchnorm2d_backward(real *din, real *dweight, real *dbias, const real *dout,
                                 const real *in, const real *stats, const real *weight,
                                 const Layer *l, size_t n, bool accumulate, real *scratch) {
    size_t channels = l->in.c, pixels = n * l->in.h * l->in.w;
    const real *restrict mean = stats + 2 * channels, *restrict inverse = mean + channels;
    PARALLEL_TURNS(slice, BN_SLICES) {
        Slice s = bn_slice(slice, pixels);
        real *restrict sums = scratch + slice * 2 * channels, *restrict products = sums + channels;
        memset(sums, 0, 2 * channels * sizeof *sums);
        for (size_t i = s.first; i < s.last; i++)
            for (size_t c = 0; c < channels; c++) {
                real d = dout[i * channels + c];
                sums[c] += d;
                products[c] += d * (in[i * channels + c] - mean[c]);
            }
    }
    real *restrict a = scratch + BN_SLICES * 2 * channels; // din = a * dout + b * (in - mean) + e
    real *restrict b = a + channels, *restrict e = b + channels;
    PARALLEL_FOR
    for (size_t c = 0; c < channels; c++) {
        double sum = 0, product = 0;
        for (size_t slice = 0; slice < BN_SLICES; slice++) {
            sum += (double)scratch[slice * 2 * channels + c];
            product += (double)scratch[(slice * 2 + 1) * channels + c];
        }
        dbias[c] = (real)sum;
        dweight[c] = (real)product * inverse[c];
        a[c] = weight[c] * inverse[c];
        b[c] = -a[c] * inverse[c] * dweight[c] / (real)pixels;
        e[c] = -a[c] * dbias[c] / (real)pixels;
    }
    PARALLEL_FOR
    for (size_t i = 0; i < (din ? pixels : 0); i++) {
        const real *restrict x = in + i * channels, *restrict d = dout + i * channels;
        real *restrict to = din + i * channels;
        for (size_t c = 0; c < channels; c++)
            to[c] = a[c] * d[c] + b[c] * (x[c] - mean[c]) + e[c] + (accumulate ? to[c] : 0);
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
    PARALLEL_TURNS(image, n)
        for (size_t start = 0; start < size; start += BLOCK * BLOCKS) {
            uint32_t bits[BLOCKS][4];
            for (size_t b = 0; b < BLOCKS; b++)
                philox4x32(bits[b], (uint32_t)(start / BLOCK + b),
                           (uint32_t)position_of(*draw, image), (uint32_t)draw->epoch, stream,
                           draw->seed);
            uint16_t draws[BLOCK * BLOCKS];
            memcpy(draws, bits, sizeof draws);
            size_t at = image * size + start, count = min_size(size - start, BLOCK * BLOCKS);
            for (size_t i = 0; i < count; i++) {
                mask[at + i] = draws[i] >= threshold;
                out[at + i] = draws[i] >= threshold ? in[at + i] * scale : 0;
            }
        }
}

// din = dout / (1 - p) where the mask is set, else 0; += if accumulate
static void dropout_backward(real *din, const real *dout, const uint8_t *mask, const Layer *l,
                             size_t n, bool accumulate) {
    real scale = 1 / (1 - l->p);
    size_t count = n * l->out.h * l->out.w * l->out.c;
    PARALLEL_FOR
    for (size_t i = 0; i < count; i++)
        din[i] = dout[i] * (mask[i] ? scale : 0) + (accumulate ? din[i] : 0);
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
    /* LAB 1.6 BEGIN log_softmax_backward */
    for (size_t image = 0; image < n; image++, din += classes, dout += classes, out += classes) {
        real sum = 0;
        for (size_t k = 0; k < classes; k++)
            sum += dout[k];
        for (size_t k = 0; k < classes; k++)
            din[k] = dout[k] - (real)exp((double)out[k]) * sum;
    }
    /* LAB 1.6 END */
}

/* Negative log-likelihood with label smoothing e (Szegedy et al., arXiv:1512.00567, section 7; 0:
   none). One loss an image, of which the batch's loss is the mean:
     losses[i] = sum over k of target[k] * -logp[i][k],  target[k] = e / classes (+ 1 - e at label)
   dlogp[i][k] = -target[k] / batch, the images of the whole batch; dlogp may be NULL. */
static void nll_loss(real *losses, real *dlogp, const real *logp, const uint8_t *labels, size_t n,
                     size_t batch, size_t classes, double smoothing) {
    const real elsewhere = (real)(smoothing / (double)classes);
    const real at_label = (real)(1 - smoothing) + elsewhere;
    for (size_t i = 0; i < n; i++, logp += classes) {
        losses[i] = -at_label * logp[labels[i]];
        for (size_t k = 0; k < classes && smoothing > 0; k++)
            losses[i] -= k == labels[i] ? 0 : elsewhere * logp[k];
        for (size_t k = 0; k < classes && dlogp; k++)
            *dlogp++ = -(k == labels[i] ? at_label : elsewhere) / (real)batch;
    }
}

/* ==== 5b. Fast convolutions on the CPU ==========================================================

   The same results as the definitions, to rounding, near the limit of the machine. */

/* ---- One register tile -------------------------------------------------------------------------

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
   output pixel meets at a tap, or OUTSIDE; scatter is the same, seen from the input pixel. So
   stride, padding and borders are settled in two tables, made once; the tiles know only lists of
   addresses. A linear layer is a convolution of 1 x 1 pixel: it takes the same road. */

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
    COLUMNS = VECTORS * LANES, // the widest tile
    MAX_TAPS = 11 * 11,        // the largest kernel: 11 x 11
    MAX_DEPTH = 1024,          // channels that a tile sums over at a time
    WEIGHT_BYTES = 256 * 1024, // weights that a pass goes through at a time: they fit L2
    GROUP_PIXELS = 512,        // pixels that are computed while a panel is in L2
    FEW = 8,                   // fewer channels: a row of taps is read as one
    RUN = 11 * FEW,            // the most numbers in such a row
    SIDE = 6,                  // of a Winograd tile: inputs
    PLACES = SIDE * SIDE,      // of such a tile
    BLOCK_TILES = 18,          // Winograd tiles between transforms: 256 channels fit L2
    GRADIENT_TILES = 36,       // ... and in a weight gradient, which reads its sums each time
    PAIRS = 128,               // pixels that a weight gradient takes at a time
    SLICES = 32,               // pieces that a weight gradient is cut into
    SLICE_ELEMENTS = 2 * 1024 * 1024, // ... as long as their sums take no more than this
    SLICE_PIXELS = 256,               // ... and each has so many pixels
    WINOGRAD_SLICE_PIXELS = 1024,     // ... or for each block of columns, by Winograd's transforms
};
typedef real vec __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(real)), may_alias));
// an integer as wide as a real; a comparison of vectors sets all bits of a lane, or none
typedef __typeof__(__builtin_choose_expr(sizeof(real) == 8, (int64_t)0, (int32_t)0)) lane;
typedef lane mask __attribute__((vector_size(VECTOR_BYTES)));

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 36")
#endif
// A loop written out by the compiler, so that an array indexed by it can live in registers.
#define UNROLLED(i, count) \
    UNROLL                 \
    for (size_t i = 0; i < (count); i++)

// memcpy() of a part of a vector: a half, a quarter, ..., one number, as the bits of its size tell
INLINE void copy_part(void *to, const void *from, size_t bytes) {
    UNROLL
    for (size_t part = VECTOR_BYTES / 2; part >= sizeof(real); part /= 2)
        if (bytes & part) {
            memcpy(to, from, part);
            to = (char *)to + part;
            from = (const char *)from + part;
        }
}

// Loads and stores the first `count` numbers of a vector; all of them, where there are enough.
INLINE vec load(const real *from, size_t count) {
    if (count >= LANES)
        return *(const vec *)from;
    vec v = {0};
    copy_part(&v, from, count * sizeof *from);
    return v;
}

INLINE void store(real *to, vec v, size_t count) {
    if (count >= LANES)
        *(vec *)to = v;
    else
        copy_part(to, &v, count * sizeof *to);
}

INLINE vec relu_vec(vec v) {
    return (vec)((mask)v & ~(v < 0));
}

INLINE size_t whole_vectors(size_t count) // numbers of as many vectors as that takes
{
    return ceil_div(count, LANES) * LANES;
}

INLINE size_t left(size_t columns, size_t j) // columns from vector j on
{
    return columns > j * LANES ? columns - j * LANES : 0;
}

// What dot_tile() needs: 6 output pixels, the taps in use, and for each of these 6 input pixels.
typedef struct DotTile {
    real *out[ROWS];
    const real *in[MAX_TAPS][ROWS];
    size_t tap[MAX_TAPS];
    size_t taps, depth; // the sum runs over taps * depth terms
    const real *weight; // [tap][depth][width of the tile]
    const real *bias;   // NULL: the sum starts from 0
    size_t column;      // of out and bias
    size_t pitch;       // from an input pixel to the next
    bool add, relu;     // add: the sum starts from what out holds
} DotTile;

// acc[i][j] += a[i][d] * w[j]: one step of the sum
INLINE void dot_step(const size_t vectors, vec acc[ROWS][4], const real *const a[ROWS], size_t d,
                     const real *w) {
    real factor[ROWS];
    vec b[4];
    UNROLLED(i, ROWS)
        factor[i] = a[i][d];
    UNROLLED(j, vectors)
        b[j] = *(const vec *)(w + j * LANES);
    UNROLLED(i, ROWS)
        UNROLLED(j, vectors)
            acc[i][j] += factor[i] * b[j];
}

/* out[i][column + 0 .. columns) =
       start + sum over taps t, d < depth of in[t][i][d] * weight[tap[t]][d][0 .. columns)
   A tile of one vector has too few sums to hide the 4 cycles of a multiply-add: it keeps two for
   each output, of the even d and of the odd. Meanwhile what the next tile reads, most likely, is
   fetched: the pixels behind these. */
INLINE void dot_tile(const size_t vectors, const DotTile *t, size_t columns) {
    const size_t parts = vectors == 1 ? 2 : 1, whole = t->depth / parts * parts;
    const size_t width = vectors * LANES;
    vec acc[2][ROWS][4];
    UNROLLED(j, vectors) {
        const size_t at = t->column + j * LANES, count = left(columns, j);
        const vec start = t->bias ? load(t->bias + at, count) : (vec){0};
        UNROLLED(i, ROWS) {
            acc[0][i][j] = t->add ? load(t->out[i] + at, count) : start;
            acc[1][i][j] = (vec){0};
        }
    }
    for (size_t tap = 0; tap < t->taps; tap++) {
        const real *a[ROWS], *w = t->weight + t->tap[tap] * t->depth * width;
        UNROLLED(i, ROWS)
            a[i] = t->in[tap][i];
        for (size_t d = 0; d < whole; d += parts, w += parts * width) {
            __builtin_prefetch(a[ROWS - 1] + t->pitch + ROWS * d);
            UNROLLED(s, parts)
                dot_step(vectors, acc[s], a, d + s, w + s * width);
        }
        if (whole < t->depth)
            dot_step(vectors, acc[0], a, whole, w);
    }
    UNROLLED(i, ROWS)
        UNROLLED(j, vectors) {
            vec v = acc[0][i][j];
            if (parts == 2)
                v += acc[1][i][j];
            store(t->out[i] + t->column + j * LANES, t->relu ? relu_vec(v) : v, left(columns, j));
        }
}

// One term of a weight gradient: an input pixel and the gradient of the output pixel that it met.
typedef struct Pair {
    const real *in, *dout;
} Pair;

/* dweight[i][0 .. columns) += sum over pairs of in[i] * dout[0 .. columns), for i < rows.
   Reads whole vectors of dout; what lies behind the columns is dropped. Meanwhile what lies `ahead`
   of in is fetched. */
INLINE void outer_tile(const size_t rows, const size_t vectors, real *dweight, size_t stride,
                       size_t columns, const Pair *pairs, size_t count, size_t row, size_t column,
                       size_t ahead) {
    vec acc[ROWS][4];
    UNROLLED(i, rows)
        UNROLLED(j, vectors)
            acc[i][j] = load(dweight + i * stride + j * LANES, left(columns, j));
    for (size_t p = 0; p < count; p++) {
        const real *a = pairs[p].in + row, *d = pairs[p].dout + column;
        vec b[4];
        __builtin_prefetch(a + ahead);
        UNROLLED(j, vectors)
            b[j] = *(const vec *)(d + j * LANES);
        UNROLLED(i, rows)
            UNROLLED(j, vectors)
                acc[i][j] += a[i] * b[j];
    }
    UNROLLED(i, rows)
        UNROLLED(j, vectors)
            store(dweight + i * stride + j * LANES, acc[i][j], left(columns, j));
}

/* The compiler keeps acc in registers only if rows and vectors are constants, so each size is a
   function of its own. Not inlined: several tiles in one function make gcc spill registers. */
#define DOT_TILE(vectors)                                                \
    NOINLINE void dot_tile_##vectors(const DotTile *t, size_t columns) { \
        dot_tile(vectors, t, columns);                                   \
    }
#define OUTER_TILE(rows, vectors)                                                              \
    NOINLINE void outer_tile_##rows##_##vectors(real *dweight, size_t stride, size_t columns,  \
                                                const Pair *pairs, size_t count, size_t row,   \
                                                size_t column, size_t ahead) {                 \
        outer_tile(rows, vectors, dweight, stride, columns, pairs, count, row, column, ahead); \
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
                               size_t count, size_t row, size_t column, size_t ahead);
static DotTileFunction *const dot_tiles[4] = {dot_tile_1, dot_tile_2, dot_tile_3, dot_tile_4};
static OuterTileFunction *const outer_tiles[ROWS][4] = {
    OUTER_TILES(1), OUTER_TILES(2), OUTER_TILES(3), OUTER_TILES(4), OUTER_TILES(5), OUTER_TILES(6)};

/* One pass of a convolution: which way it goes through the pixels, and the sizes as it sees them.
   Taps that follow each other in a row of the filter meet pixels that follow each other in memory.
   Where channels are few, such a row is read as one tap, kernel * channels deep. */
typedef struct Pass {
    const int32_t *map; // [out_pixels][1 + taps * run]: an output pixel, then what its taps meet
    Shape in, out;      // in.c channels are summed over, out.c columns are computed
    size_t taps, run, depth; // run: how many taps of the filter make one of this pass
    size_t in_pixels, out_pixels;
    size_t padding;  // of the input, as this pass sees it
    size_t tile;     // outputs across a Winograd tile: 4 for 3 x 3, 2 for 5 x 5; 0: by convolve()
    bool inside;     // no tap is ever outside of the image
    bool transposed; // the weights are stored [tap][column][depth]
    bool relu;       // store max(sum, 0)
    bool accumulate; // out +=
} Pass;

// See "Winograd's convolution" below.
static bool suits_winograd(const Layer *l, Shape in, Shape out) {
    return (l->kernel == 3 || l->kernel == 5) && l->stride == 1 && in.c % LANES == 0 &&
           in.c >= FEW && in.c <= MAX_DEPTH && out.c >= LANES &&
           out.h * out.w >= 64; // on small maps the transforms cost too much
}

static Pass make_pass(const Layer *l, const int32_t *map, Shape in, Shape out, size_t run) {
    return (Pass){.map = map,
                  .in = in,
                  .out = out,
                  .taps = l->kernel * l->kernel / run,
                  .run = run,
                  .depth = run * in.c,
                  .in_pixels = in.h * in.w,
                  .out_pixels = out.h * out.w,
                  .tile = run == 1 && suits_winograd(l, in, out) ? SIDE + 1 - l->kernel : 0};
}

static Pass forward_pass(const Layer *l) {
    Pass p = make_pass(l, l->gather, l->in, l->out, l->in.c < FEW ? l->kernel : 1);
    p.padding = l->padding;
    p.inside = l->padding == 0;
    p.relu = l->fused_relu;
    return p;
}

static Pass backward_pass(const Layer *l, bool accumulate) {
    Pass p = make_pass(l, l->scatter, l->out, l->in, 1);
    p.padding = l->kernel - 1 - l->padding; // not below 0, see slide()
    p.inside = p.padding == 0 && l->stride == 1;
    p.transposed = true;
    p.accumulate = accumulate;
    return p;
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
            for (size_t tap = 0; tap < taps; tap++)
                *at++ = (int32_t)met_pixel(l, y, x, tap);
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
                    *at++ = met ? (int32_t)(sy / s * O.w + sx / s) : OUTSIDE;
                }
            }
}

// The width of the tiles at a block of columns: whole vectors.
static size_t block_width(const Pass *p, size_t first) {
    return whole_vectors(min_size(COLUMNS, p->out.c - first));
}

/* Which weights the tiles of a pixel sum over at a time: so many columns, from `column` on, and so
   much of the depth that they stay in L2 while one pixel after the other meets them. Packed, a
   tile's columns lie in the order of reading: [tap][depth][block_width()]. */
typedef struct Panel {
    size_t column, columns;
    size_t start, depth; // [start, start + depth) of the whole depth
} Panel;

static size_t panel_depth(const Pass *p) {
    return min_size(MAX_DEPTH, WEIGHT_BYTES / (p->taps * COLUMNS * sizeof(real)));
}

static size_t panel_columns(const Pass *p) {
    size_t rows = p->taps * min_size(p->depth, panel_depth(p));
    return WEIGHT_BYTES / (rows * COLUMNS * sizeof(real)) * COLUMNS;
}

static Panel panel_at(const Pass *p, size_t column, size_t columns, size_t start) {
    return (Panel){.column = column,
                   .columns = min_size(columns, p->out.c - column),
                   .start = start,
                   .depth = min_size(panel_depth(p), p->depth - start)};
}

// Where a panel's columns from `column` on lie among the packed weights.
static size_t panel_offset(const Pass *p, Panel panel, size_t column) {
    return p->taps * (column * p->depth + panel.start * block_width(p, column));
}

/* to[depth][width] = from[columns][depth], whose rows are pitch long, and zeros behind the columns.
   A line of the cache at a time, since rows whose pitch is a power of 2 would soon evict it; the
   next one of a row is fetched meanwhile. */
static void transpose(real *to, size_t width, const real *from, size_t pitch, size_t columns,
                      size_t depth) {
    enum { LINE = 64 / sizeof(real) };
    for (size_t line = 0; line < depth; line += LINE)
        for (size_t j = 0; j < width; j++) {
            __builtin_prefetch(from + j * pitch + line + LINE);
            for (size_t d = line; d < min_size(line + LINE, depth); d++)
                to[d * width + j] = j < columns ? from[j * pitch + d] : 0;
        }
}

// One tile's columns, from weight[tap][depth][column]; transposed: from [tap][column][depth]
static void pack_panel(real *packed, const real *weight, const Pass *p, Panel panel) {
    enum { AHEAD = 8 }; // rows
    const size_t width = block_width(p, panel.column);
    for (size_t tap = 0; tap < p->taps; tap++, packed += panel.depth * width) {
        const real *from = weight + tap * p->depth * p->out.c;
        if (p->transposed) {
            from += panel.column * p->depth + panel.start;
            transpose(packed, width, from, p->depth, panel.columns, panel.depth);
            continue;
        }
        from += panel.start * p->out.c + panel.column;
        for (size_t d = 0; d < panel.depth; d++)
            for (size_t j = 0; j < width; j += LANES) {
                *(vec *)(packed + d * width + j) = load(from + d * p->out.c + j, panel.columns - j);
                __builtin_prefetch(from + (d + AHEAD) * p->out.c + j);
            }
    }
}

static void pack_weights(real *packed, const real *weight, const Pass *p) {
    const size_t parts = ceil_div(p->depth, panel_depth(p));
    PARALLEL_TURNS(i, ceil_div(p->out.c, COLUMNS) * parts) {
        Panel panel = panel_at(p, i / parts * COLUMNS, COLUMNS, i % parts * panel_depth(p));
        pack_panel(packed + panel_offset(p, panel, panel.column), weight, p, panel);
    }
}

static size_t packed_size(const Pass *p) {
    return (p->tile ? PLACES : p->taps) * p->depth * whole_vectors(p->out.c);
}

static const real zeros[MAX_DEPTH]; // what lies outside of an image

// Puts a row of taps together that is partly outside of the image; NULL if all of it is.
NOINLINE const real *copy_run(const Pass *p, const real *image, const int32_t *met, real *copy) {
    bool any = false;
    for (size_t j = 0; j < p->run; j++) {
        bool inside = met[j] != OUTSIDE;
        any |= inside;
        memcpy(copy + j * p->in.c, inside ? image + (size_t)met[j] * p->in.c : zeros,
               p->in.c * sizeof *copy);
    }
    return any ? copy : NULL;
}

// Where the numbers are that an output pixel meets at a tap; NULL: outside of the image.
INLINE const real *met_numbers(const Pass *p, const real *image, const int32_t *met, size_t tap,
                               real *copy) {
    met += tap * p->run;
    if (p->run > 1 && (met[0] == OUTSIDE || met[p->run - 1] == OUTSIDE))
        return copy_run(p, image, met, copy);
    return met[0] == OUTSIDE ? NULL : image + (size_t)met[0] * p->in.c;
}

// Lists the taps that any of the tile's pixels meets; taps that all miss cost nothing.
static void list_met_taps(DotTile *t, const Pass *p, const int32_t *const met[ROWS],
                          const real *const image[ROWS], real copies[ROWS][11 * RUN]) {
    t->taps = 0;
    for (size_t tap = 0; tap < p->taps; tap++) {
        bool any = false;
        for (size_t i = 0; i < ROWS; i++) {
            const real *from =
                met_numbers(p, image[i], met[i], tap, copies[i] + (p->run > 1 ? tap * RUN : 0));
            any |= from != NULL;
            t->in[t->taps][i] = from ? from : zeros;
        }
        if (any)
            t->tap[t->taps++] = tap;
    }
}

// The same where no tap is ever missed: each lies as far from the first one for all pixels.
static void list_all_taps(DotTile *t, const Pass *p, const int32_t *const met[ROWS],
                          const real *const image[ROWS]) {
    for (size_t tap = 0; tap < p->taps; tap++) {
        ptrdiff_t further = (met[0][tap * p->run] - *met[0]) * (ptrdiff_t)p->in.c;
        for (size_t i = 0; i < ROWS; i++)
            t->in[tap][i] = image[i] + (size_t)*met[i] * p->in.c + further;
        t->tap[tap] = tap;
    }
    t->taps = p->taps;
}

/* A panel's part of the sums, for the output pixels of `images` images from `first` on. packed
   points to the weights of panel.column. */
static void convolve_panel(real *out, const real *in, const real *packed, const real *bias,
                           const Pass *p, Panel panel, size_t first, size_t images) {
    DotTile t = {.depth = panel.depth, .bias = bias, .pitch = p->in.c};
    t.add = p->accumulate;
    t.relu = p->relu;
    real copies[ROWS][11 * RUN];
    const size_t pixels = images * p->out_pixels, offset = panel_offset(p, panel, panel.column);
    size_t n = first, pixel = 0; // of the next row of a tile
    for (size_t q = 0; q < pixels; q += ROWS) {
        const int32_t *met[ROWS];
        const real *image[ROWS];
        for (size_t i = 0; i < ROWS; i++) {
            met[i] = p->map + pixel * (1 + p->taps * p->run);
            t.out[i] = out + (n * p->out_pixels + (size_t)*met[i]++) * p->out.c;
            image[i] = in + n * p->in_pixels * p->in.c + panel.start;
            pixel += q + i + 1 < pixels; // a short last tile repeats its last pixel
            if (pixel == p->out_pixels) {
                pixel = 0;
                n++;
            }
        }
        if (p->inside)
            list_all_taps(&t, p, met, image);
        else
            list_met_taps(&t, p, met, image, copies);
        for (size_t c = 0; c < panel.columns; c += COLUMNS) {
            const size_t columns = min_size(COLUMNS, panel.columns - c);
            t.column = panel.column + c;
            t.weight = packed + (panel_offset(p, panel, t.column) - offset);
            dot_tiles[ceil_div(columns, LANES) - 1](&t, columns);
        }
    }
}

// Output pixels of `images` images from `first` on, `columns` columns from `column` on.
static void convolve_block(real *out, const real *in, const real *packed, const real *bias,
                           const Pass *p, size_t first, size_t images, size_t column,
                           size_t columns) {
    for (size_t start = 0; start < p->depth; start += panel_depth(p)) {
        Panel panel = panel_at(p, column, columns, start);
        Pass part = *p;
        part.accumulate = start > 0 || p->accumulate;
        part.relu = p->relu && start + panel.depth == p->depth;
        convolve_panel(out, in, packed + panel_offset(p, panel, column), bias, &part, panel, first,
                       images);
    }
}

// out[pixel][column] = bias[column] + sum over taps and depth; bias may be NULL
static void convolve(real *out, const real *in, const real *packed, const real *bias, const Pass *p,
                     size_t n) {
    size_t columns = panel_columns(p), images = min_size(n, ceil_div(GROUP_PIXELS, p->out_pixels));
    while (images > 1 && images * p->out_pixels > 24 &&
           ceil_div(n, images) * ceil_div(p->out.c, columns) < SLICES)
        images = ceil_div(images, 2);
    if (ceil_div(n, images) * ceil_div(p->out.c, columns) < SLICES)
        columns = COLUMNS; // turns for more threads
    const size_t blocks = ceil_div(p->out.c, columns);
    PARALLEL_TURNS(i, ceil_div(n, images) * blocks) {
        size_t first = i / blocks * images;
        convolve_block(out, in, packed, bias, p, first, min_size(images, n - first),
                       i % blocks * columns, columns);
    }
}

/* A large linear layer (or 1 x 1 convolution) on few pixels: what takes time is to read weights. So
   each panel is read once, by the thread that packs it, and the parts of the sums that panels of
   the same columns give are added up when all are there. The order of a sum depends on this choice,
   hence on the number of images, but never on that of threads. */
static bool suits_panels(const Pass *p, size_t n) {
    size_t panels = ceil_div(p->out.c, COLUMNS) * ceil_div(p->depth, panel_depth(p));
    return p->taps == 1 && n * p->out_pixels <= GROUP_PIXELS && panels >= 16; // enough for threads
}

// out = bias + sum of the parts, or out += that of the parts; then the pass's ReLU
static void add_parts(real *out, const real *parts, const real *bias, const Pass *p, size_t count,
                      size_t pixels) {
    const size_t columns = p->out.c, size = pixels * columns;
    PARALLEL_FOR
    for (size_t pixel = 0; pixel < pixels; pixel++)
        for (size_t j = 0; j < columns; j++) {
            size_t at = pixel * columns + j;
            real sum = p->accumulate ? out[at] : bias ? bias[j] : 0;
            for (size_t part = 0; part < count; part++)
                sum += parts[part * size + at];
            out[at] = p->relu && sum < 0 ? 0 : sum;
        }
}

/* As convolve(), but from weights that are not packed. parts holds those of a deep sum, each
   [n][pixel][column]: with one tap a panel has MAX_DEPTH rows, so they are no more numbers than the
   weights. */
static void convolve_by_panels(real *out, const real *in, const real *weight, const real *bias,
                               const Pass *p, size_t n, real *parts) {
    _Static_assert(sizeof(real) * MAX_DEPTH * COLUMNS <= WEIGHT_BYTES, "a panel is MAX_DEPTH deep");
    _Static_assert(2 * GROUP_PIXELS <= MAX_DEPTH, "parts have no more numbers than the weights");
    size_t count = ceil_div(p->depth, MAX_DEPTH), blocks = ceil_div(p->out.c, COLUMNS);
    size_t size = n * p->out_pixels * p->out.c;
    bool whole = count == 1;
    Pass pass = *p;
    pass.relu = p->relu && whole;
    pass.accumulate = p->accumulate && whole;
    PARALLEL_TURNS(i, count * blocks) { // a thread reads rows of weights that lie together
        size_t part = i / blocks;
        Panel panel = panel_at(p, i % blocks * COLUMNS, COLUMNS, part * MAX_DEPTH);
        real packed[MAX_DEPTH * COLUMNS] __attribute__((aligned(VECTOR_BYTES)));
        pack_panel(packed, weight, p, panel);
        convolve_panel(whole ? out : parts + part * size, in, packed, whole ? bias : NULL, &pass,
                       panel, 0, n);
    }
    if (!whole)
        add_parts(out, parts, bias, p, count, n * p->out_pixels);
}

/* ---- Winograd's convolution ---------------------------------------------------------------------

   Where a 3 x 3 filter g, stride 1, meets the 6 x 6 inputs d of 4 x 4 neighbouring outputs, the
   definition takes 144 products a channel. 36 are enough (Lavin, Gray, "Fast algorithms for
   convolutional neural networks", CVPR 2016, F(4 x 4, 3 x 3)):
     u = G g G^T, v = B^T d B       6 x 6 places each
     out = A^T (sum over channels of u * v, place by place) A
   The same 36 serve the 2 x 2 outputs of a 5 x 5 filter, instead of 100.
   The sum is a matrix product at each place, done by dot_tile() with 6 tiles of pixels as its rows;
   the weight gradient is one too, by outer_tile().
   Why it works, in one dimension: let g and dout be the coefficients of two polynomials. Their
   product, whose coefficients are the data gradient, is known from 6 of its values; here those at
   0, +-near, +-far and infinity. G g and A dout are the values of the two there, B makes
   coefficients of values (Lagrange), and the other two passes are that one transposed. At x and -x
   the even terms are the same and the odd ones differ in sign: a pair takes little more than one.
   Which numbers near and far are decides how much rounding grows: with 1 and 2, as in the paper, to
   5 times that of the definition, with 5/8 and 3/2 to 1.2 to 2.8 times (root mean square, 32 to 512
   channels, random numbers). */

static const real near = 5 / (real)8, near2 = near * near, near4 = near2 * near2;
static const real far = 3 / (real)2, far2 = far * far, far4 = far2 * far2;
// What the even and the odd terms behind the first are multiplied by.
static const real near_powers[2] = {near2, near4}, far_powers[2] = {far2, far4};
// The derivatives of x (x^2 - near^2) (x^2 - far^2) at 0, near and far: Lagrange divides by them.
static const real slope0 = near2 * far2, near_slope = 2 * near2 * (near2 - far2),
                  far_slope = 2 * far2 * (far2 - near2);

// One row (step 1) or column (step SIDE) of a tile, in place, as in all that follow: B^T d
INLINE void transform_input(vec *d, size_t step) {
    vec d0 = d[0], d1 = d[step], d2 = d[2 * step], d3 = d[3 * step], d4 = d[4 * step];
    vec near_even = d4 - far2 * d2, near_odd = near * (d3 - far2 * d1);
    vec far_even = d4 - near2 * d2, far_odd = far * (d3 - near2 * d1);
    d[0] = slope0 * d0 - (near2 + far2) * d2 + d4;
    d[step] = near_even + near_odd;
    d[2 * step] = near_even - near_odd;
    d[3 * step] = far_even + far_odd;
    d[4 * step] = far_even - far_odd;
    d[5 * step] += slope0 * d1 - (near2 + far2) * d3;
}

// The values of the polynomial whose `count` coefficients d holds: A dout
INLINE void polynomial_values(const size_t count, vec *d, size_t step) {
    vec near_parts[2] = {d[0], d[step]}, far_parts[2] = {d[0], d[step]}; // even and odd terms
    vec last = d[(count - 1) * step];
    UNROLLED(i, count - 2) {
        near_parts[i % 2] += near_powers[i / 2] * d[(i + 2) * step];
        far_parts[i % 2] += far_powers[i / 2] * d[(i + 2) * step];
    }
    d[step] = near_parts[0] + near * near_parts[1];
    d[2 * step] = near_parts[0] - near * near_parts[1];
    d[3 * step] = far_parts[0] + far * far_parts[1];
    d[4 * step] = far_parts[0] - far * far_parts[1];
    d[5 * step] = last;
}

// `count` numbers from 6 values, polynomial_values() transposed: A^T m
INLINE void values_transposed(const size_t count, vec *m, size_t step) {
    vec near_parts[2] = {m[step] + m[2 * step], near * (m[step] - m[2 * step])};
    vec far_parts[2] = {m[3 * step] + m[4 * step], far * (m[3 * step] - m[4 * step])};
    vec last = m[5 * step];
    m[0] += near_parts[0] + far_parts[0];
    m[step] = near_parts[1] + far_parts[1];
    UNROLLED(i, count - 2)
        m[(i + 2) * step] =
            near_powers[i / 2] * near_parts[i % 2] + far_powers[i / 2] * far_parts[i % 2];
    m[(count - 1) * step] += last;
}

// Of what belongs to a filter, the values at finite places are divided by the slopes there.
INLINE void divide_by_slopes(vec *u, size_t step) {
    u[0] *= 1 / slope0;
    u[step] *= 1 / near_slope;
    u[2 * step] *= 1 / near_slope;
    u[3 * step] *= 1 / far_slope;
    u[4 * step] *= 1 / far_slope;
}

// G g
INLINE void transform_weight(const size_t kernel, vec *g, size_t step) {
    polynomial_values(kernel, g, step);
    divide_by_slopes(g, step);
}

// G^T du
INLINE void transform_dweight(vec *u, size_t step) {
    divide_by_slopes(u, step);
    values_transposed(3, u, step);
}

// LANES columns of as many channels of packed[block of COLUMNS][place][depth][column] = u; the data
// gradient meets the taps in reverse.
INLINE void pack_filters(const size_t kernel, real *packed, const real *weight, const Pass *p,
                         size_t column, size_t start) {
    const size_t step = p->transposed ? p->depth : 1, row = p->transposed ? 1 : p->out.c;
    const size_t taps = kernel * kernel, count = min_size(LANES, p->out.c - column);
    const size_t first = column / COLUMNS * COLUMNS, width = block_width(p, first);
    real *to = packed + first * PLACES * p->depth + column - first + start * width;
    for (size_t d = start; d < start + LANES; d++, to += width) {
        vec g[PLACES] = {{0}};
        UNROLLED(tap, taps) {
            const real *from = weight + d * row + column * step;
            from += (p->transposed ? taps - 1 - tap : tap) * p->depth * p->out.c;
            for (size_t j = 0; j < count; j++)
                g[tap / kernel * SIDE + tap % kernel][j] = from[j * step];
        }
        UNROLLED(i, kernel)
            transform_weight(kernel, g + SIDE * i, 1);
        UNROLLED(j, SIDE)
            transform_weight(kernel, g + j, SIDE);
        UNROLLED(place, PLACES)
            *(vec *)(to + place * p->depth * width) = g[place];
    }
}

static void pack_winograd(real *packed, const real *weight, const Pass *p) {
    const size_t parts = p->depth / LANES;
    PARALLEL_TURNS(i, ceil_div(p->out.c, LANES) * parts) {
        if (p->tile == 4)
            pack_filters(3, packed, weight, p, i / parts * LANES, i % parts * LANES);
        else
            pack_filters(5, packed, weight, p, i / parts * LANES, i % parts * LANES);
    }
}

/* A block of tiles on its way through the transforms: `tiles` tiles from `first` on, and columns
   from `column` on, at most COLUMNS. v is [place][tile][depth], m is [place][tile][width]; between
   places lies a vector more than needed, lest all fall on the same lines of the cache. It is
   handed on by value: then the compiler knows that no store changes it. */
typedef struct TileBlock {
    const Pass *pass;
    size_t first, tiles, column, columns, width, v_step, m_step;
    real *v, *m, *sums; // sums: a weight gradient's, [place][depth][width]
} TileBlock;

static size_t tile_area(const Pass *p) // sums, v and m of one thread: numbers
{
    _Static_assert(BLOCK_TILES <= GRADIENT_TILES, "one area serves all passes");
    return PLACES * (p->depth * COLUMNS + GRADIENT_TILES * (p->depth + COLUMNS) + 2 * LANES);
}

// The block of tiles [first, last), at most GRADIENT_TILES; areas: tile_area() for each thread.
static TileBlock tile_block(const Pass *p, size_t first, size_t last, size_t column, real *areas) {
    TileBlock b = {.pass = p, .first = first, .tiles = last - first};
    b.column = column;
    b.width = block_width(p, column);
    b.columns = min_size(b.width, p->out.c - column);
    b.v_step = b.tiles * p->depth + LANES;
    b.m_step = b.tiles * COLUMNS + LANES;
    b.sums = areas + (size_t)omp_get_thread_num() * tile_area(p);
    b.v = b.sums + PLACES * p->depth * COLUMNS;
    b.m = b.v + PLACES * b.v_step;
    return b;
}

static size_t count_tiles(const Pass *p, size_t n) {
    return n * ceil_div(p->out.h, p->tile) * ceil_div(p->out.w, p->tile);
}

// A block's tile t: its image, the first of its output pixels, and where these lie in out or dout;
// OUTSIDE: beyond the image's edge.
typedef struct TileSpot {
    size_t image, y, x;
    ptrdiff_t at[4 * 4]; // of the larger tile
} TileSpot;

INLINE TileSpot tile_spot(TileBlock b, size_t t) {
    const Pass *p = b.pass;
    const size_t side = p->tile, tile = b.first + t;
    size_t across = ceil_div(p->out.w, side), down = ceil_div(p->out.h, side);
    TileSpot s = {tile / across / down, tile / across % down * side, tile % across * side, {0}};
    for (size_t i = 0; i < side * side; i++) {
        size_t y = s.y + i / side, x = s.x + i % side;
        size_t at = (s.image * p->out_pixels + y * p->out.w + x) * p->out.c + b.column;
        s.at[i] = y < p->out.h && x < p->out.w ? (ptrdiff_t)at : OUTSIDE;
    }
    return s;
}

// v = B^T d B; meanwhile the columns of the tile to the right are fetched.
static void winograd_input(TileBlock b, const real *in) {
    const Pass *p = b.pass;
    for (size_t t = 0; t < b.tiles; t++) {
        const TileSpot s = tile_spot(b, t);
        const real *from[PLACES];
        for (size_t i = 0; i < PLACES; i++) {
            size_t y = s.y + i / SIDE - p->padding, x = s.x + i % SIDE - p->padding;
            bool inside = y < p->in.h && x < p->in.w;
            from[i] = inside ? in + (s.image * p->in_pixels + y * p->in.w + x) * p->depth : zeros;
        }
        for (size_t c = 0; c < p->depth; c += LANES) {
            vec d[PLACES];
            UNROLLED(i, PLACES) {
                d[i] = *(const vec *)(from[i] + c);
                if (i % SIDE >= 2) // a tile of 4 shares the others with the next
                    __builtin_prefetch(from[i] + p->tile * p->depth + c);
            }
            UNROLLED(j, SIDE)
                transform_input(d + j, SIDE);
            UNROLLED(i, SIDE)
                transform_input(d + SIDE * i, 1);
            UNROLLED(i, PLACES)
                *(vec *)(b.v + i * b.v_step + t * p->depth + c) = d[i];
        }
    }
}

// out = A^T m A + bias, and what the pass wants besides
INLINE void winograd_output(const size_t tile, TileBlock b, real *out, const real *bias) {
    const Pass *p = b.pass;
    for (size_t t = 0; t < b.tiles; t++) {
        const TileSpot s = tile_spot(b, t);
        for (size_t j = 0, count = b.columns; j < b.columns; j += LANES, count -= LANES) {
            vec sums[PLACES], start = bias ? load(bias + b.column + j, count) : (vec){0};
            UNROLLED(i, PLACES)
                sums[i] = *(const vec *)(b.m + i * b.m_step + t * b.width + j);
            UNROLLED(i, SIDE)
                values_transposed(tile, sums + i, SIDE);
            UNROLLED(i, tile)
                values_transposed(tile, sums + SIDE * i, 1);
            UNROLLED(i, tile * tile) {
                if (s.at[i] != OUTSIDE) {
                    real *to = out + s.at[i] + j;
                    vec sum = sums[i / tile * SIDE + i % tile] + start;
                    sum += p->accumulate ? load(to, count) : (vec){0};
                    store(to, p->relu ? relu_vec(sum) : sum, count);
                }
            }
        }
    }
}

// m = A dout A^T; dbias[column of the block] += dout's sum
static void winograd_dout(TileBlock b, real *dbias, const real *dout) {
    enum { TILE = SIDE + 1 - 3 };
    for (size_t t = 0; t < b.tiles; t++) {
        const TileSpot s = tile_spot(b, t);
        for (size_t j = 0, count = b.columns; j < b.columns; j += LANES, count -= LANES) {
            vec d[PLACES];
            UNROLLED(i, TILE * TILE) {
                vec v = s.at[i] == OUTSIDE ? (vec){0} : load(dout + s.at[i] + j, count);
                d[i / TILE * SIDE + i % TILE] = v;
                *(vec *)(dbias + j) += v;
            }
            UNROLLED(i, TILE)
                polynomial_values(TILE, d + SIDE * i, 1);
            UNROLLED(i, SIDE)
                polynomial_values(TILE, d + i, SIDE);
            UNROLLED(i, PLACES)
                *(vec *)(b.m + i * b.m_step + t * b.width + j) = d[i];
        }
    }
}

// m = v * u, place by place
static void winograd_product(TileBlock b, const real *packed) {
    const Pass *p = b.pass;
    DotTile dot = {.taps = 1, .depth = p->depth, .pitch = p->depth};
    for (size_t place = 0; place < PLACES; place++)
        for (size_t t = 0; t < b.tiles; t += ROWS) {
            dot.weight = packed + (b.column * PLACES + place * b.width) * p->depth;
            for (size_t i = 0; i < ROWS; i++) { // a short last group repeats its last row
                size_t row = min_size(t + i, b.tiles - 1);
                dot.in[0][i] = b.v + place * b.v_step + row * p->depth;
                dot.out[i] = b.m + place * b.m_step + row * b.width;
            }
            dot_tiles[b.width / LANES - 1](&dot, b.width);
        }
}

/* out (= or +=, as the pass wants) of tiles [first, last) and columns [begin, end), from in
   [image][y][x][depth], which is transformed once for all of them */
static void winograd_tiles(real *out, const real *in, const real *packed, const real *bias,
                           const Pass *p, size_t first, size_t last, size_t begin, size_t end,
                           real *areas) {
    winograd_input(tile_block(p, first, last, begin, areas), in);
    for (size_t column = begin; column < end; column += COLUMNS) {
        TileBlock b = tile_block(p, first, last, column, areas);
        winograd_product(b, packed);
        if (p->tile == 4)
            winograd_output(4, b, out, bias);
        else
            winograd_output(2, b, out, bias);
    }
}

// The pass on n images. A turn is a block of tiles, or where threads get too few to share them out
// evenly, a block of its columns; no sum depends on that.
static void winograd(real *out, const real *in, const real *packed, const real *bias, const Pass *p,
                     size_t n, real *areas) {
    _Static_assert(BLOCK_TILES % ROWS == 0, "a block is whole groups of what dot_tile() takes");
    const size_t groups = ceil_div(count_tiles(p, n), ROWS);
    const size_t parts = ceil_div(groups * ROWS, BLOCK_TILES);
    const bool enough = parts >= 4 * (size_t)omp_get_max_threads();
    const size_t columns = enough ? p->out.c : COLUMNS, blocks = ceil_div(p->out.c, columns);
    PARALLEL_TURNS(i, parts * blocks) {
        size_t part = i / blocks, column = i % blocks * columns;
        winograd_tiles(out, in, packed, bias, p, groups * part / parts * ROWS,
                       min_size(groups * (part + 1) / parts * ROWS, count_tiles(p, n)), column,
                       min_size(column + columns, p->out.c), areas);
    }
}

// packed = the weights in the order in which the pass reads them; packed_size() numbers
static void pack(real *packed, const real *weight, const Pass *p) {
    if (p->tile)
        pack_winograd(packed, weight, p);
    else
        pack_weights(packed, weight, p);
}

// The pass, by the way that suits it.
static void run_pass(real *out, const real *in, const real *weight, const real *bias, const Pass *p,
                     size_t n, real *scratch) {
    if (suits_panels(p, n)) {
        convolve_by_panels(out, in, weight, bias, p, n, scratch);
        return;
    }
    pack(scratch, weight, p);
    if (p->tile)
        winograd(out, in, scratch, bias, p, n, scratch + packed_size(p));
    else
        convolve(out, in, scratch, bias, p, n);
}

// The pass on one image, by one thread.
static void run_pass_on_image(real *out, const real *in, const real *packed, const real *bias,
                              const Pass *p, real *areas) {
    const size_t tiles = p->tile ? count_tiles(p, 1) : 0;
    const size_t columns = panel_columns(p);
    for (size_t c = 0; !p->tile && c < p->out.c; c += columns)
        convolve_block(out, in, packed, bias, p, 0, 1, c, columns);
    for (size_t first = 0; first < tiles; first += BLOCK_TILES)
        winograd_tiles(out, in, packed, bias, p, first, min_size(first + BLOCK_TILES, tiles), 0,
                       p->out.c, areas);
}

// Counts on no more threads at run time than when this is asked.
static size_t pass_scratch(const Pass *p) {
    return packed_size(p) + (p->tile ? (size_t)omp_get_max_threads() * tile_area(p) : 0);
}

static void conv2d_forward_fast(real *out, const real *in, const real *weight, const real *bias,
                                const Layer *l, size_t n, real *scratch) {
    Pass p = forward_pass(l);
    run_pass(out, in, weight, bias, &p, n, scratch);
}

/* A weight gradient as its pieces see it: slices of the images times parts of the rows. Rows are
   dealt in units: (tap, up to ROWS channels), and where there is a bias, one last unit for it: it
   is the weight of an input that is always 1. By Winograd's transforms: slices of the tiles times
   blocks of columns. */
typedef struct WeightGradient {
    Pass pass;
    const real *in, *dout;
    size_t groups, units; // groups of channels in a tap
    size_t n, slices, parts;
    size_t sums; // of a slice, in whole vectors
} WeightGradient;

static WeightGradient weight_gradient_plan(const Layer *l, size_t n) {
    WeightGradient g = {.pass = forward_pass(l), .n = n};
    if (l->kernel != 3)
        g.pass.tile = 0; // by Winograd, the rounding of a 5 x 5 filter's would be 3.3 times as much
    g.groups = ceil_div(g.pass.depth, ROWS);
    g.units = g.pass.taps * g.groups + (l->biases > 0);
    size_t blocks = ceil_div(g.pass.out.c, COLUMNS);
    size_t pixels = g.pass.tile ? WINOGRAD_SLICE_PIXELS * blocks : SLICE_PIXELS;
    g.sums = whole_vectors(l->weights + l->biases);
    size_t worth = min_size(SLICE_ELEMENTS / g.sums, n * g.pass.out_pixels / pixels);
    g.slices = min_size(n, min_size(SLICES, max_size(1, worth)));
    g.parts = g.pass.tile ? blocks : min_size(g.units, ceil_div(SLICES, g.slices));
    return g;
}

// Pairs of (what the filter meets at this tap, gradient of the output) of pixels [first, last).
static size_t list_pairs(Pair pairs[PAIRS], real copies[PAIRS][RUN], const WeightGradient *g,
                         size_t tap, size_t first, size_t last) {
    static const real one = 1;
    const Pass *p = &g->pass;
    size_t count = 0, image = first / p->out_pixels, pixel = first % p->out_pixels;
    for (size_t q = first; q < last; q++) {
        const int32_t *met = p->map + pixel * (1 + p->taps * p->run) + 1;
        const real *in = g->in + image * p->in_pixels * p->in.c;
        pairs[count].dout = g->dout + (image * p->out_pixels + pixel) * p->out.c;
        bool bias = tap == p->taps;
        pairs[count].in = bias ? &one : met_numbers(p, in, met, tap, copies[count]);
        count += pairs[count].in != NULL;
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
    real copies[PAIRS][RUN];
    const size_t columns = g->pass.out.c, pixels = g->pass.out_pixels;
    size_t begin = g->n * slice / g->slices * pixels, end = g->n * (slice + 1) / g->slices * pixels;
    size_t first = g->units * part / g->parts, last = g->units * (part + 1) / g->parts, count = 0;
    for (size_t q = begin; q < end; q += PAIRS)
        for (size_t unit = first; unit < last; unit++) {
            size_t tap = unit / g->groups, group = unit % g->groups;
            if (unit == first || group == 0)
                count = list_pairs(pairs, copies, g, tap, q, min_size(q + PAIRS, end));
            bool bias = tap == g->pass.taps;
            size_t depth = g->pass.depth, row = bias ? 0 : depth * group / g->groups;
            size_t rows = bias ? 1 : depth * (group + 1) / g->groups - row;
            real *to = bias ? dbias : dweight + (tap * depth + row) * columns;
            if (q == begin)
                memset(to, 0, rows * columns * sizeof *to);
            for (size_t c = 0; c < columns; c += COLUMNS) {
                size_t width = min_size(COLUMNS, columns - c);
                size_t ahead = c == 0 ? PAIRS * g->pass.in.c : 0; // the next pairs' pixels, once
                outer_tiles[rows - 1][ceil_div(width, LANES) - 1](to + c, columns, width, pairs,
                                                                  count, row, c, ahead);
            }
        }
}

/* to[i] = sum over slices of from[slice][i], for i < count; to may be from. Block by block, so that
   the sums stay in L1 while one slice after the other is read: slices lie so far apart, often by a
   power of 2, that a number of each would not. */
static void sum_slices(real *to, const real *from, size_t slices, size_t pitch, size_t count) {
    enum { BLOCK = 1024 };
    PARALLEL_FOR
    for (size_t first = 0; first < count; first += BLOCK) {
        size_t end = min_size(first + BLOCK, count);
        for (size_t i = first; i < end; i++)
            to[i] = from[i];
        for (size_t slice = 1; slice < slices; slice++)
            for (size_t i = first; i < end; i++)
                to[i] += from[slice * pitch + i];
    }
}

/* A 3 x 3 filter's weight gradient by Winograd's transforms, since the output is linear in u:
     du = sum over tiles of v * (A dout A^T), place by place;   dweight = G^T du G
   b.sums[place][depth][width] += du of a block's tiles. */
static void winograd_gradient_block(TileBlock b) {
    const size_t depth = b.pass->depth, width = b.width;
    Pair pairs[GRADIENT_TILES];
    for (size_t place = 0; place < PLACES; place++) {
        for (size_t t = 0; t < b.tiles; t++)
            pairs[t] =
                (Pair){b.v + place * b.v_step + t * depth, b.m + place * b.m_step + t * width};
        for (size_t row = 0; row < depth; row += ROWS)
            outer_tiles[min_size(ROWS, depth - row) - 1][width / LANES - 1](
                b.sums + (place * depth + row) * width, width, width, pairs, b.tiles, row, 0, 0);
    }
}

// dweight = G^T du G, for the columns of a block
static void winograd_dweight(real *dweight, TileBlock b) {
    const size_t depth = b.pass->depth, columns = b.pass->out.c;
    for (size_t d = 0; d < depth; d++)
        for (size_t j = 0; j < b.width; j += LANES) {
            vec u[PLACES];
            UNROLLED(place, PLACES)
                u[place] = *(vec *)(b.sums + (place * depth + d) * b.width + j);
            UNROLLED(i, SIDE)
                transform_dweight(u + i, SIDE);
            UNROLLED(i, 3)
                transform_dweight(u + SIDE * i, 1);
            UNROLLED(tap, 9)
                store(dweight + (tap * depth + d) * columns + b.column + j,
                      u[tap / 3 * SIDE + tap % 3], b.columns - j);
        }
}

// As weight_gradient_piece(): a slice is one of tiles, a part a block of columns. dbias: or NULL.
static void winograd_gradient_piece(real *dweight, real *dbias, const WeightGradient *g,
                                    size_t slice, size_t part, real *areas) {
    const Pass *p = &g->pass;
    const size_t tiles = count_tiles(p, g->n), column = part * COLUMNS;
    size_t first = tiles * slice / g->slices, last = tiles * (slice + 1) / g->slices;
    real bias[COLUMNS] __attribute__((aligned(VECTOR_BYTES))) = {0};
    TileBlock b = tile_block(p, first, first, column, areas);
    memset(b.sums, 0, PLACES * p->depth * b.width * sizeof *b.sums);
    for (; first < last; first += GRADIENT_TILES) {
        b = tile_block(p, first, min_size(first + GRADIENT_TILES, last), column, areas);
        winograd_input(b, g->in);
        winograd_dout(b, bias, g->dout);
        winograd_gradient_block(b);
    }
    winograd_dweight(dweight, b);
    if (dbias)
        memcpy(dbias + column, bias, b.columns * sizeof *bias);
}

static void weight_gradient(real *dweight, real *dbias, const real *dout, const real *in,
                            const Layer *l, size_t n, real *scratch) {
    WeightGradient g = weight_gradient_plan(l, n);
    g.in = in;
    g.dout = dout;
    PARALLEL_TURNS(i, g.slices * g.parts) {
        size_t slice = i / g.parts, part = i % g.parts;
        real *to = g.slices > 1 ? scratch + slice * g.sums : dweight;
        real *to_bias = !l->biases ? NULL : g.slices > 1 ? to + l->weights : dbias;
        if (g.pass.tile)
            winograd_gradient_piece(to, to_bias, &g, slice, part, scratch + g.slices * g.sums);
        else
            weight_gradient_piece(to, to_bias, &g, slice, part);
    }
    if (g.slices == 1)
        return;
    sum_slices(dweight, scratch, g.slices, g.sums, l->weights);
    sum_slices(dbias, scratch + l->weights, g.slices, g.sums, l->biases);
}

static void conv2d_backward_fast(real *din, real *dweight, real *dbias, const real *dout,
                                 const real *in, const real *weight, const Layer *l, size_t n,
                                 bool accumulate, real *scratch) {
    weight_gradient(dweight, dbias, dout, in, l, n, scratch);
    if (!din)
        return;
    Pass p = backward_pass(l, accumulate);
    run_pass(din, dout, weight, NULL, &p, n, scratch);
}

/* ---- Backward through a max-pool ----------------------------------------------------------------

   A 2 x 2 max-pool hands its gradient to one of four pixels; behind a ReLU and a dropout half of
   those are zero as well. So a convolution before a pool skips what is zero: masks tell, by a bit
   for each number, what is not. A term of the sums is what a pixel's gradient of channel k gives:
     weight gradient   dweight[k]              += dout[pixel][k] * the numbers under the filter
     data gradient     din under the filter    += dout[pixel][k] * weight[k]
   One takes the terms of a channel and many windows, with the filter's sums in registers; the other
   those of a window and all channels, with the sums that its pixels' filters cover in registers. */

enum { MASK_BITS = 64, WINDOW_PIXELS = 4 };

// Some windows of the pool's image: so many that they, and what they meet, stay in L1.
typedef struct Windows {
    size_t count, channels, words; // words of MASK_BITS channels
    size_t met[MASK_BITS];         // the input pixel under the filter's corner at its first pixel
    size_t further[WINDOW_PIXELS]; // how many input pixels further that is at each of its pixels
    size_t depth;                  // from an input pixel's numbers to those of the next
    real *gradient;                // [count][channels]: behind the pool's ReLU
    uint8_t *place;    // [count][channels]: the pixel it goes to; WINDOW_PIXELS: it is 0
    uint64_t *nonzero; // [channels]: windows whose gradient is not 0
    uint64_t *chosen[WINDOW_PIXELS]; // [count][words]: channels whose gradient goes to the pixel
} Windows;

// acc[i][j] += gradient * (from + what it meets)[i][j], j by vectors, for one window and channel
INLINE void add_term(const size_t rows, const size_t vectors, vec acc[5][6], const Windows *w,
                     size_t window, size_t k, const real *from, size_t pitch) {
    const size_t at = window * w->channels + k;
    const real gradient = w->gradient[at];
    from += (w->met[window] + w->further[w->place[at]]) * w->depth;
    UNROLLED(i, rows) {
        UNROLLED(j, vectors)
            acc[i][j] += gradient * *(const vec *)(from + j * LANES);
        from += pitch;
    }
}

/* sums[i][0 .. vectors * LANES) += channel k's terms, for i < rows. Fewer than 8 sums (2
   multiply-adds begin in a cycle, and take 4) are kept twice, as in dot_tile(). */
INLINE void term_tile(const size_t rows, const size_t vectors, real *sums, size_t sums_pitch,
                      const Windows *w, size_t k, const real *from, size_t pitch) {
    const size_t parts = rows * vectors < 8 ? 2 : 1;
    vec acc[2][5][6];
    UNROLLED(i, rows)
        UNROLLED(j, vectors) {
            acc[0][i][j] = *(const vec *)(sums + i * sums_pitch + j * LANES);
            acc[1][i][j] = (vec){0};
        }
    for (uint64_t mask = w->nonzero[k]; mask;)
        UNROLLED(s, parts) {
            if (mask)
                add_term(rows, vectors, acc[s], w, (size_t)__builtin_ctzll(mask), k, from, pitch);
            mask &= mask - 1;
        }
    UNROLLED(i, rows)
        UNROLLED(j, vectors) {
            vec *to = (vec *)(sums + i * sums_pitch + j * LANES);
            *to = acc[0][i][j];
            if (parts == 2)
                *to += acc[1][i][j];
        }
}

typedef void TermTileFunction(real *sums, size_t sums_pitch, const Windows *w, size_t k,
                              const real *from, size_t pitch);
#define TERM_TILE(rows, vectors)                                                                \
    NOINLINE void term_tile_##rows##_##vectors(real *sums, size_t sums_pitch, const Windows *w, \
                                               size_t k, const real *from, size_t pitch) {      \
        term_tile(rows, vectors, sums, sums_pitch, w, k, from, pitch);                          \
    }
#define TERM_TILES(rows)                                                  \
    TERM_TILE(rows, 1)                                                    \
    TERM_TILE(rows, 2)                                                    \
    TERM_TILE(rows, 3)                                                    \
    TERM_TILE(rows, 4)                                                    \
    TERM_TILE(rows, 5)                                                    \
    TERM_TILE(rows, 6)                                                    \
    static TermTileFunction *const term_tiles_##rows[6] = {               \
        term_tile_##rows##_1, term_tile_##rows##_2, term_tile_##rows##_3, \
        term_tile_##rows##_4, term_tile_##rows##_5, term_tile_##rows##_6};
TERM_TILES(3)
TERM_TILES(5)

/* din += a window's terms, for LANES channels and `rows` rows of the filter. weight:
   [k][tap][LANES] from the first of the rows on. */
INLINE void patch_tile(const size_t rows, const size_t kernel, real *din, size_t row, size_t pixel,
                       const Windows *w, size_t window, const real *weight) {
    const size_t across = kernel + 1;
    vec acc[18];
    UNROLLED(i, (rows + 1) * across)
        acc[i] = *(const vec *)(din + i / across * row + i % across * pixel);
    for (size_t word = 0; word < w->words; word++)
        UNROLLED(p, WINDOW_PIXELS)
            for (uint64_t mask = w->chosen[p][window * w->words + word]; mask; mask &= mask - 1) {
                const size_t k = word * MASK_BITS + (size_t)__builtin_ctzll(mask);
                const real gradient = w->gradient[window * w->channels + k];
                const vec *from = (const vec *)(weight + k * kernel * kernel * LANES);
                UNROLLED(i, rows * kernel)
                    acc[(p / 2 + i / kernel) * across + p % 2 + i % kernel] += gradient * from[i];
            }
    UNROLLED(i, (rows + 1) * across)
        *(vec *)(din + i / across * row + i % across * pixel) = acc[i];
}

#define PATCH_TILE(rows, kernel)                                                    \
    NOINLINE void patch_tile_##rows##_##kernel(real *din, size_t row, size_t pixel, \
                                               const Windows *w, size_t window,     \
                                               const real *weight) {                \
        patch_tile(rows, kernel, din, row, pixel, w, window, weight);               \
    }
PATCH_TILE(3, 3)
PATCH_TILE(2, 5) // 18 sums; all 36 of a 5 x 5 filter do not fit 32 registers
PATCH_TILE(1, 5)

// The sizes of such a backward.
typedef struct PooledPass {
    const Layer *l;
    size_t pitch, filter;           // of a filter's row, in whole vectors; of all its rows
    size_t depth;                   // from an input pixel's numbers to those of the next
    size_t channels_in;             // of din on the way, in whole vectors
    TermTileFunction *const *tiles; // by vectors - 1
    size_t widest;                  // the most vectors of a tile
    const real *dout, *relu;        // the pool's gradient and its output
    const uint8_t *argmax;
} PooledPass;

// Where vectors of the image would not be aligned, each pixel gets a copy of its row of the filter.
static size_t pooled_depth(const Layer *l) {
    return l->in.c % LANES ? whole_vectors(l->kernel * l->in.c) : l->in.c;
}

// Forward keeps an image of out on a thread's stack, backward two of in: 1 MB at the most.
static bool suits_pooled(const Layer *conv, const Layer *pool) {
    return (conv->kernel == 3 || conv->kernel == 5) && conv->stride == 1 && pool->kernel == 2 &&
           conv->out.c <= 1024 && shape_size(conv->out) * sizeof(real) <= 1 << 20 &&
           conv->in.h * conv->in.w * pooled_depth(conv) * sizeof(real) <= 1 << 19;
}

static PooledPass pooled_pass(const Layer *l) {
    PooledPass p = {.l = l, .depth = pooled_depth(l)};
    p.pitch = whole_vectors(l->kernel * l->in.c);
    p.filter = l->kernel * p.pitch;
    p.channels_in = whole_vectors(l->in.c);
    p.tiles = l->kernel == 3 ? term_tiles_3 : term_tiles_5;
    p.widest = min_size(6, (ROWS * VECTORS + 1) / l->kernel); // 5 x 5 fit where 6 x 4 do
    return p;
}

/* A bit for each of up to MASK_BITS bytes that is x; all are below 128. Reads 8 at a time: what
   lies behind the bytes may be anything, since a borrow goes only to bytes still further behind. */
static uint64_t mask_equal(const uint8_t *from, size_t count, uint64_t x) {
    const uint64_t ones = 0x0101010101010101;
    uint64_t mask = 0;
    for (size_t i = 0; i < MASK_BITS && i < count; i += 8) {
        uint64_t eight;
        memcpy(&eight, from + i, 8);
        uint64_t equal = (0x80 * ones - (eight ^ x * ones)) >> 7 & ones; // only 0x80 - 0 has bit 7
        mask |= equal * 0x0102040810204080 >> 56 << i; // bit 0 of eight bytes, side by side
    }
    return count < MASK_BITS ? mask & (((uint64_t)1 << count) - 1) : mask;
}

// gradient and place of windows from `first` on
static void route_gradient(const Windows *w, const PooledPass *p, size_t image, size_t first) {
    typedef uint8_t bytes __attribute__((vector_size(LANES)));
    const size_t from = image * shape_size(p->l->pool->out) + first * w->channels;
    const size_t numbers = w->count * w->channels;
    for (size_t i = 0; i < numbers; i += LANES) {
        const size_t count = numbers - i;
        bytes place = {0};
        if (count >= LANES)
            memcpy(&place, p->argmax + from + i, LANES);
        else
            memcpy(&place, p->argmax + from + i, count);
        mask passes = load(p->relu + from + i, count) > 0;
        vec gradient = (vec)((mask)load(p->dout + from + i, count) & passes);
        *(vec *)(w->gradient + i) = gradient;
        place |= __builtin_convertvector(gradient == 0, bytes) & WINDOW_PIXELS;
        memcpy(w->place + i, &place, LANES);
    }
}

// The terms of w->count windows from `first` on; dbias += their gradient
static void find_terms(Windows *w, real *restrict dbias, const PooledPass *p, size_t image,
                       size_t first) {
    const size_t channels = w->channels, across = p->l->pool->out.w;
    uint64_t *restrict nonzero = w->nonzero;
    route_gradient(w, p, image, first);
    memset(nonzero, 0, channels * sizeof *nonzero);
    for (size_t window = 0; window < w->count; window++) {
        const real *gradient = w->gradient + window * channels;
        size_t y = (first + window) / across, x = (first + window) % across;
        w->met[window] = (y * p->l->in.w + x) * p->l->pool->stride;
        for (size_t k = 0; k < channels; k++) {
            nonzero[k] |= (uint64_t)(gradient[k] != 0) << window;
            dbias[k] += gradient[k];
        }
    }
}

// What the data gradient needs besides.
static void find_chosen(const Windows *w) {
    for (size_t window = 0; window < w->count; window++)
        for (size_t word = 0; word < w->words; word++) {
            const size_t k = word * MASK_BITS;
            for (size_t i = 0; i < WINDOW_PIXELS; i++)
                w->chosen[i][window * w->words + word] =
                    mask_equal(w->place + window * w->channels + k, w->channels - k, i);
        }
}

// rows[pixel][depth] = what a row of the filter meets that begins at the pixel
static void copy_rows(real *rows, const real *in, const PooledPass *p) {
    const size_t c = p->l->in.c, w = p->l->in.w, depth = p->depth, across = w - p->l->kernel + 1;
    for (size_t y = 0; y < p->l->in.h; y++, rows += w * depth, in += w * c)
        for (size_t j = 0; j < depth; j += LANES) // innermost, gcc calls memcpy() for each pixel
            for (size_t x = 0; x < across; x++)
                *(vec *)(rows + x * depth + j) = *(const vec *)(in + x * c + j);
}

// din[pixel][channels_in] += a window's terms. packed: as pack_blocks() leaves it.
static void add_window(real *din, const Windows *w, const PooledPass *p, size_t window, size_t c,
                       const real *packed) {
    const size_t kernel = p->l->kernel, pixel = p->channels_in, row = p->l->in.w * pixel;
    const real *weight = packed + c * w->channels * kernel * kernel;
    din += w->met[window] * pixel + c;
    if (kernel == 3)
        patch_tile_3_3(din, row, pixel, w, window, weight);
    else {
        patch_tile_2_5(din, row, pixel, w, window, weight);
        patch_tile_2_5(din + 2 * row, row, pixel, w, window, weight + 10 * LANES);
        patch_tile_1_5(din + 4 * row, row, pixel, w, window, weight + 20 * LANES);
    }
}

/* One image: sums[k][...] += its weight gradient, the biases' behind it, and din = its data
   gradient, [pixel][channels_in], unless din is NULL. */
static void pooled_image(real *sums, real *din, const real *in, const real *packed,
                         const PooledPass *p, size_t image) {
    enum { NUMBERS = 3072 }; // of the gradient at a time: they and what they meet stay in L1
    const Shape I = p->l->in;
    const size_t channels = p->l->out.c, windows = p->l->pool->out.h * p->l->pool->out.w;
    const size_t most = min_size(MASK_BITS, max_size(1, NUMBERS / channels));
    const size_t words = ceil_div(channels, MASK_BITS);
    real gradient[most * channels + LANES];
    uint8_t place[most * channels + LANES + 8];
    uint64_t nonzero[channels], chosen[WINDOW_PIXELS][most * words];
    real rows[p->depth == I.c ? 1 : I.h * I.w * p->depth] __attribute__((aligned(VECTOR_BYTES)));
    Windows w = {.channels = channels, .words = words, .depth = p->depth};
    w.gradient = gradient;
    w.place = place;
    w.nonzero = nonzero;
    for (size_t i = 0; i < WINDOW_PIXELS; i++) {
        w.chosen[i] = chosen[i];
        w.further[i] = i / 2 * I.w + i % 2;
    }
    if (p->depth != I.c) {
        copy_rows(rows, in, p);
        in = rows;
    }
    if (din)
        memset(din, 0, I.h * I.w * p->channels_in * sizeof *din);
    for (size_t first = 0; first < windows; first += most) {
        w.count = min_size(most, windows - first);
        find_terms(&w, sums + channels * p->filter, p, image, first);
        for (size_t j = 0; j < p->pitch; j += p->widest * LANES) {
            TermTileFunction *tile = p->tiles[min_size(p->widest, (p->pitch - j) / LANES) - 1];
            for (size_t k = 0; k < channels; k++)
                tile(sums + k * p->filter + j, p->pitch, &w, k, in + j, I.w * p->depth);
        }
        if (din)
            find_chosen(&w);
        for (size_t c = 0; din && c < p->channels_in; c += LANES) // LANES channels' weights fit L1
            for (size_t window = 0; window < w.count; window++)
                add_window(din, &w, p, window, c, packed);
    }
}

// packed[c / LANES][k][tap][c % LANES] = weight[tap][c][k], filled up with zeros
static void pack_blocks(real *packed, const real *weight, const PooledPass *p) {
    const size_t depth = p->l->in.c, channels = p->l->out.c, taps = p->l->kernel * p->l->kernel;
    PARALLEL_FOR
    for (size_t k = 0; k < channels; k++)
        for (size_t c = 0; c < p->channels_in; c++)
            for (size_t tap = 0; tap < taps; tap++)
                packed[((c / LANES * channels + k) * taps + tap) * LANES + c % LANES] =
                    c < depth ? weight[(tap * depth + c) * channels + k] : 0;
}

static size_t packed_blocks(const PooledPass *p) {
    return p->channels_in * p->l->out.c * p->l->kernel * p->l->kernel;
}

// The sums of a slice of the images: the filters, then the biases.
static size_t pooled_sums(const PooledPass *p) {
    return p->l->out.c * p->filter + whole_vectors(p->l->out.c);
}

static size_t pooled_slices(const PooledPass *p, size_t n) {
    return min_size(n, min_size(SLICES, max_size(1, SLICE_ELEMENTS / pooled_sums(p))));
}

static void conv2d_backward_pooled(real *din, real *dweight, real *dbias, const real *dout,
                                   const real *pooled, const uint8_t *argmax, const real *in,
                                   const real *weight, const Layer *l, size_t n, bool accumulate,
                                   real *scratch) {
    PooledPass p = pooled_pass(l);
    p.dout = dout;
    p.relu = pooled;
    p.argmax = argmax;
    size_t channels = l->out.c, slices = pooled_slices(&p, n), size = pooled_sums(&p);
    size_t padded = l->in.h * l->in.w * p.channels_in;
    real *packed = scratch + slices * size;
    pack_blocks(packed, weight, &p);
    PARALLEL_TURNS(slice, slices) {
        real *sums = scratch + slice * size;
        real dimage[padded] __attribute__((aligned(VECTOR_BYTES)));
        memset(sums, 0, size * sizeof *sums);
        for (size_t image = n * slice / slices; image < n * (slice + 1) / slices; image++) {
            size_t at = image * shape_size(l->in);
            pooled_image(sums, din ? dimage : NULL, in + at, packed, &p, image);
            for (size_t i = 0; din && i < padded; i += p.channels_in)
                for (size_t c = 0; c < l->in.c; c++, at++) {
                    real sum = dimage[i + c] + (accumulate ? din[at] : 0);
                    // in is the output of the ReLU before
                    din[at] = l->fused_relu_backward && !(in[at] > 0) ? 0 : sum;
                }
        }
    }
    sum_slices(scratch, scratch, slices, size, size);
    for (size_t k = 0; k < l->biases; k++)
        dbias[k] = scratch[channels * p.filter + k];
    size_t run = l->kernel * l->in.c;
    PARALLEL_FOR
    for (size_t i = 0; i < l->kernel * run; i++)
        for (size_t k = 0; k < channels; k++)
            dweight[i * channels + k] = scratch[k * p.filter + i / run * p.pitch + i % run];
}

/* One row of a max-pool's image, a vector of channels at a time: the largest and where it was stay
   in registers. Spelled out, because compilers do not mix numbers and bytes in one vector loop.
   Reads whole vectors of in; what lies behind the channels is dropped. */
static void maxpool2d_row(real *out, uint8_t *argmax, const real *in, const Layer *l, size_t y) {
    typedef uint8_t bytes __attribute__((vector_size(LANES)));
    for (size_t x = 0; x < l->out.w; x++)
        for (size_t c = 0; c < l->out.c; c += LANES) {
            size_t at = (y * l->out.w + x) * l->out.c + c, count = l->out.c - c;
            vec best = (vec){0} - (real)INFINITY;
            mask arg = {0}, tap = {0};
            for (size_t i = 0; i < l->kernel; i++)
                for (size_t j = 0; j < l->kernel; j++, tap += 1) {
                    size_t iy = y * l->stride + i - l->padding, ix = x * l->stride + j - l->padding;
                    if (iy >= l->in.h || ix >= l->in.w)
                        continue;
                    vec v = *(const vec *)(in + (iy * l->in.w + ix) * l->in.c + c);
                    mask larger = (v > best) | (v != v); // a NaN wins
                    best = (vec)((larger & (mask)v) | (~larger & (mask)best));
                    arg = (larger & tap) | (~larger & arg);
                }
            store(out + at, best, count);
            bytes positions = __builtin_convertvector(arg, bytes);
            if (count >= LANES)
                memcpy(argmax + at, &positions, LANES);
            else
                memcpy(argmax + at, &positions, count);
        }
}

static void maxpool2d_forward_fast(real *out, uint8_t *argmax, const real *in, const Layer *l,
                                   size_t n) {
    size_t size = shape_size(l->out);
    PARALLEL_TURNS(image, n)
        for (size_t y = 0; y < l->out.h; y++)
            maxpool2d_row(out + image * size, argmax + image * size, in + image * shape_size(l->in),
                          l, y);
}

/* pooled = max_pool2d(relu(conv2d(in, weight) + bias)); argmax = the place of each maximum in its
   window. n images: in [h][w][c_in], pooled and argmax [h][w][c_out] of l->pool. Image by image, so
   that what lies between stays in the thread's own cache. */
static void conv2d_forward_pooled(real *pooled, uint8_t *argmax, const real *in, const real *weight,
                                  const real *bias, const Layer *l, size_t n, real *scratch) {
    Pass p = forward_pass(l);
    const size_t size = shape_size(l->pool->out);
    p.relu = true;
    pack(scratch, weight, &p);
    PARALLEL_TURNS(image, n) {
        real out[shape_size(l->out) + LANES] __attribute__((aligned(VECTOR_BYTES)));
        run_pass_on_image(out, in + image * shape_size(l->in), scratch, bias, &p,
                          scratch + packed_size(&p));
        for (size_t y = 0; y < l->pool->out.h; y++)
            maxpool2d_row(pooled + image * size, argmax + image * size, out, l->pool, y);
    }
}

static size_t scratch_size_naive(const Layer *l, size_t n) {
    (void)n;
    return l->kind == BATCHNORM2D ? (2 * BN_SLICES + 3) * l->in.c : 0;
}

static size_t scratch_size_fast(const Layer *l, size_t n) {
    if (l->kind != CONV2D && l->kind != LINEAR)
        return scratch_size_naive(l, n);
    Pass forward = forward_pass(l), backward = backward_pass(l, false);
    WeightGradient g = weight_gradient_plan(l, n);
    size_t pooled = 0;
    size_t threads = (size_t)omp_get_max_threads();
    size_t gradient = g.slices * g.sums + (g.pass.tile ? threads * tile_area(&forward) : 0);
    if (l->pool) {
        PooledPass p = pooled_pass(l);
        pooled = pooled_slices(&p, n) * pooled_sums(&p) + packed_blocks(&p);
    }
    return max_size(max_size(pass_scratch(&forward), pass_scratch(&backward)),
                    max_size(pooled, gradient));
}

/* ==== 6. Network ================================================================================

   A network is a table of layers, each of which reads the output of an earlier row, or two (add).
   Builders add rows and look like the PyTorch modules that they mirror. Everything else (sizes,
   memory, summary, forward, backward, checkpoints) walks over the table. The network owns these
   arenas, planned from the table and allocated once:
      params, grads     [parameters], each tensor on a cache line's border
      activations       [batch][...] of every row; in-place rows share their input's, and a CPU
                        reads the images, row 0, where the loader put them
      dactivations      their gradients; those that are not needed at the same time share memory
      stats             BatchNorm's running statistics, and those of the last batch
      saved             bytes that a forward leaves for its backward */

enum { ALIGN = 64 / sizeof(real) };

typedef struct Net {
    const char *model;
    const Settings *settings;
    const Backend *backend;
    Layer layers[MAX_LAYERS]; // row 0 is the input
    size_t count, classes;
    size_t parameters; // how many there are
    size_t param_size; // ... with the gaps between tensors: the size of the arenas
    size_t batch;      // the most images of one step
    real *images;      // the batch's: output of row 0
    size_t activation_size, gradient_size, stats_size, saved_size, scratch_size;
    size_t host_size;       // as large as the largest tensor of the parameters, or the output
    size_t batches_tracked; // how many batches BatchNorm's running statistics have seen
    real *params, *grads, *activations, *dactivations, *stats, *scratch, *losses;
    real *host[2]; // two tensors on the host, on their way from the device or to it
    uint8_t *saved, *labels;
    size_t others;     // ranks that share a batch: the loss is the mean over all of it
    struct Comm *comm; // told by backward() which gradients are finished; NULL: nobody waits
    bool marks_rows;   // a mark behind each row
} Net;

static size_t aligned(size_t count) {
    return ceil_div(count, ALIGN) * ALIGN;
}

static size_t add_layer(Net *net, Layer l) {
    if (net->count == MAX_LAYERS)
        die(1, "model %s: more than %d layers; raise MAX_LAYERS in cnn.c", net->model, MAX_LAYERS);
    net->layers[net->count] = l;
    return net->count++;
}

static size_t add_params(Net *net, size_t count) {
    size_t offset = net->param_size;
    net->param_size += aligned(count);
    net->parameters += count;
    net->host_size = max_size(net->host_size, count);
    return offset;
}

// Adds a layer with parameters, named by PyTorch's habit: conv1, conv2, ..., fc1, fc2, ...
static size_t add_weights(Net *net, Layer l, size_t weights, size_t biases, const char *prefix) {
    size_t number = 1;
    for (size_t i = 0; i < net->count; i++)
        number += net->layers[i].kind == l.kind;
    snprintf(l.name, sizeof l.name, "%s%zu", prefix, number);
    l.weights = weights;
    l.biases = biases;
    l.weight = add_params(net, weights);
    l.bias = add_params(net, biases);
    return add_layer(net, l);
}

// Gives row x a name of its own: x = named(net, conv2d(...), "layer%d.conv1", 3)
static size_t named(Net *net, size_t x, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static size_t named(Net *net, size_t x, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(net->layers[x].name, sizeof net->layers[x].name, format, args);
    va_end(args);
    return x;
}

// The output's shape where a window of kernel x kernel slides over x, or why it cannot.
static Shape slide(const Net *net, size_t x, const char *what, size_t kernel, size_t stride,
                   size_t padding, size_t channels) {
    Shape in = net->layers[x].out;
    if (kernel == 0 || kernel > 11 || stride == 0 || padding >= kernel || channels == 0)
        die(1,
            "model %s: %s at row %zu: expected a window of 1 x 1 to 11 x 11, a stride and channels "
            "of at least 1 and a padding below the window's size, found %zu, %zu, %zu, %zu",
            net->model, what, net->count, kernel, stride, channels, padding);
    if (in.h + 2 * padding < kernel || in.w + 2 * padding < kernel)
        die(1,
            "model %s: %s at row %zu: a window of %zu x %zu does not fit on %zu x %zu pixels with "
            "padding %zu; this network needs larger images",
            net->model, what, net->count, kernel, kernel, in.h, in.w, padding);
    return (Shape){(in.h + 2 * padding - kernel) / stride + 1,
                   (in.w + 2 * padding - kernel) / stride + 1, channels};
}

static size_t add_conv2d(Net *net, size_t x, size_t out_channels, size_t kernel, size_t stride,
                         size_t padding, bool bias) {
    Layer l = {.kind = CONV2D, .input = x, .kernel = kernel, .stride = stride, .padding = padding};
    l.in = net->layers[x].out;
    l.out = slide(net, x, "conv2d", kernel, stride, padding, out_channels);
    return add_weights(net, l, kernel * kernel * l.in.c * out_channels, bias ? out_channels : 0,
                       "conv");
}

// nn.Conv2d(in_channels = those of x, out_channels, kernel_size, stride, padding)
static size_t conv2d(Net *net, size_t x, size_t out_channels, size_t kernel, size_t stride,
                     size_t padding) {
    return add_conv2d(net, x, out_channels, kernel, stride, padding, true);
}

// The same with bias = False, as it stands before a BatchNorm, which has a bias itself.
static size_t conv2d_no_bias(Net *net, size_t x, size_t out_channels, size_t kernel, size_t stride,
                             size_t padding) {
    return add_conv2d(net, x, out_channels, kernel, stride, padding, false);
}

// nn.Linear(in_features = all numbers of x, out_features); flattens x by itself
static size_t linear(Net *net, size_t x, size_t out_features) {
    Layer l = {.kind = LINEAR, .input = x, .kernel = 1, .stride = 1};
    l.in = (Shape){1, 1, shape_size(net->layers[x].out)};
    l.out = (Shape){1, 1, out_features};
    if (out_features == 0)
        die(1, "model %s: linear at row %zu: expected at least 1 output", net->model, net->count);
    return add_weights(net, l, l.in.c * out_features, out_features, "fc");
}

// nn.BatchNorm2d(num_features = channels of x)
static size_t batchnorm2d(Net *net, size_t x) {
    Shape s = net->layers[x].out;
    Layer l = {.kind = BATCHNORM2D, .input = x, .in = s, .out = s};
    net->host_size = max_size(net->host_size, 2 * s.c); // both running statistics at once
    return add_weights(net, l, s.c, s.c, "bn");
}

static size_t same_shape(Net *net, size_t x, LayerKind kind, real p) {
    Shape s = net->layers[x].out;
    return add_layer(net, (Layer){.kind = kind, .input = x, .in = s, .out = s, .p = p});
}

static size_t relu(Net *net, size_t x) {
    return same_shape(net, x, RELU, 0);
}

// a + b: where a residual block's shortcut joins. The newer row is the one that may be overwritten.
static size_t add(Net *net, size_t a, size_t b) {
    Shape s = net->layers[a].out, t = net->layers[b].out;
    if (s.h != t.h || s.w != t.w || s.c != t.c)
        die(1, "model %s: add at row %zu: expected equal shapes, found %zux%zux%zu and %zux%zux%zu",
            net->model, net->count, s.h, s.w, s.c, t.h, t.w, t.c);
    size_t x = same_shape(net, max_size(a, b), ADD, 0);
    net->layers[x].other = min_size(a, b);
    return x;
}

// nn.Dropout(p)
static size_t dropout(Net *net, size_t x, real p) {
    if (!(p >= 0 && p < 1))
        die(1, "model %s: dropout at row %zu: expected a probability from 0 to below 1, found %g",
            net->model, net->count, (double)p);
    return same_shape(net, x, DROPOUT, p);
}

// nn.LogSoftmax(dim = 1): over the classes, so it wants 1 x 1 pixel
static size_t log_softmax(Net *net, size_t x) {
    if (net->layers[x].out.h * net->layers[x].out.w != 1)
        die(1, "model %s: log_softmax at row %zu: expected 1 x 1 pixel, found %zu x %zu",
            net->model, net->count, net->layers[x].out.h, net->layers[x].out.w);
    return same_shape(net, x, LOG_SOFTMAX, 0);
}

// nn.MaxPool2d(kernel_size, stride, padding)
static size_t maxpool2d(Net *net, size_t x, size_t kernel, size_t stride, size_t padding) {
    Layer l = {.kind = MAXPOOL2D, .input = x, .kernel = kernel, .stride = stride};
    l.padding = padding;
    l.in = net->layers[x].out;
    l.out = slide(net, x, "maxpool2d", kernel, stride, padding, l.in.c);
    return add_layer(net, l);
}

// nn.AdaptiveAvgPool2d(1): the mean over all pixels
static size_t global_avgpool2d(Net *net, size_t x) {
    Shape s = net->layers[x].out;
    return add_layer(net, (Layer){.kind = AVGPOOL2D, .input = x, .in = s, .out = {1, 1, s.c}});
}

// ---- Memory

static bool reads(const Layer *l, size_t row) {
    return l->kind != INPUT && (l->input == row || (l->kind == ADD && l->other == row));
}

static size_t count_readers(const Net *net, size_t row) {
    size_t readers = 0;
    for (size_t i = row + 1; i < net->count; i++)
        readers += reads(&net->layers[i], row);
    return readers;
}

/* Which rows overwrite their input: ReLU, dropout and add, where nobody else reads it. Nothing is
   lost: a dropout's backward asks only for its mask, a ReLU's only where its output is positive,
   which a dropout behind it does not change; an add behind it would, and behind its max-pool. */
static void plan_in_place(Net *net) {
    for (size_t i = 1; i < net->count; i++) {
        Layer *l = &net->layers[i], *before = &net->layers[l->input];
        bool reuse = l->input > 0 && count_readers(net, l->input) == 1;
        l->in_place = reuse && (l->kind == RELU || l->kind == DROPOUT ||
                                (l->kind == ADD && l->other != l->input && before->kind != RELU &&
                                 before->kind != MAXPOOL2D && !before->in_place));
        l->in_place = l->in_place && before->kind != LOG_SOFTMAX;
        if (l->kind == ADD && l->in_place && before->kind == BATCHNORM2D && net->backend->fuses)
            before->add = l;
        bool fusible = before->kind == CONV2D || before->kind == LINEAR ||
                       before->kind == BATCHNORM2D || before->kind == ADD;
        if (l->kind == RELU && l->in_place && fusible)
            before->fused_relu = net->backend->fuses;
    }
}

/* Which convolutions do the work of the ReLU and the max-pool behind them as well, because what
   lies between need not be stored, and most of its gradient is zero: where no padding has to be
   met. Backward they do the work of the ReLU before them as well, if nobody else reads it. */
static void plan_pooled(Net *net) {
    for (size_t i = 1; i < net->count && net->backend->conv2d_forward_pooled; i++) {
        Layer *pool = &net->layers[i], *relu = &net->layers[pool->input];
        Layer *conv = &net->layers[relu->input], *before = &net->layers[conv->input];
        bool padded = conv->padding || pool->padding;
        if (pool->kind != MAXPOOL2D || relu->kind != RELU || !relu->in_place ||
            conv->kind != CONV2D || padded || !suits_pooled(conv, pool) ||
            count_readers(net, pool->input) > 1)
            continue;
        conv->pool = pool;
        pool->skipped = relu->skipped = true;
        if (before->kind == RELU && before->in_place && count_readers(net, conv->input) == 1)
            conv->fused_relu_backward = before->fused_relu_backward = true;
    }
}

/* An add's gradient is that of both its inputs: they share its memory, so nothing is copied. Into
   the second one (a block's input x, say) other readers of x add theirs; it is shared only if they
   come before the first input's row: then backward has used up the first one's gradient. */
static bool shares_gradient(const Net *net, const Layer *add, size_t add_row) {
    if (!add->in_place || add->other == 0)
        return false;
    for (size_t i = add->other + 1; i < net->count; i++)
        if (i != add_row && i >= add->input && reads(&net->layers[i], add->other))
            return false;
    return true;
}

// A gradient is needed from its last reader, which writes it first, down to its own row.
typedef struct Lifetime {
    size_t low, high, size, offset; // rows; elements
} Lifetime;

// The lowest offset at which `l` meets none of the gradients placed before that live with it.
static size_t place_gradient(const Lifetime *l, const Lifetime *placed, size_t count) {
    size_t offset = 0;
    for (size_t i = 0; i < count; i++) {
        const Lifetime *p = &placed[i];
        bool together = p->low <= l->high && l->low <= p->high;
        if (together && offset < p->offset + p->size && p->offset < offset + l->size) {
            offset = p->offset + p->size;
            i = (size_t)-1; // it may have moved onto one that it had passed
        }
    }
    return offset;
}

static void plan_gradients(Net *net) {
    size_t owner[MAX_LAYERS], count = 0; // the row whose gradient's memory a row shares
    Lifetime lives[MAX_LAYERS];
    for (size_t i = 0; i < net->count; i++)
        owner[i] = i;
    for (size_t i = net->count - 1; i > 0; i--) {
        const Layer *l = &net->layers[i];
        if (l->in_place || l->skipped)
            owner[l->input] = owner[i];
        if (l->kind == ADD && shares_gradient(net, l, i))
            owner[l->other] = owner[i];
    }
    for (size_t i = net->count - 1; i > 0; i--) {
        if (owner[i] != i)
            continue;
        Lifetime *life = &lives[count];
        *life = (Lifetime){i, i, aligned(net->batch * shape_size(net->layers[i].out)), 0};
        for (size_t r = 1; r < net->count; r++) {
            life->low = owner[r] == i ? min_size(life->low, r) : life->low;
            life->high = reads(&net->layers[r], i) ? max_size(life->high, r) : life->high;
        }
        life->offset = place_gradient(life, lives, count++);
        net->gradient_size = max_size(net->gradient_size, life->offset + life->size);
        for (size_t r = 1; r <= i; r++)
            if (owner[r] == i)
                net->layers[r].gradient = life->offset;
    }
}

// Offsets and sizes of all arenas, for batches of at most `batch` images.
static void plan_memory(Net *net, size_t batch) {
    plan_in_place(net);
    plan_pooled(net);
    net->batch = batch;
    net->host_size = max_size(net->host_size, batch * net->classes);
    for (size_t i = 0; i < net->count; i++) {
        Layer *l = &net->layers[i];
        size_t size = l->pool ? 0 : aligned(batch * shape_size(l->out));
        l->output = l->in_place ? net->layers[l->input].output : net->activation_size;
        net->activation_size += l->in_place ? 0 : size;
        l->stats = net->stats_size;
        net->stats_size += l->kind == BATCHNORM2D ? 4 * aligned(l->out.c) : 0;
        l->saved = net->saved_size;
        net->saved_size += l->kind == MAXPOOL2D || l->kind == DROPOUT ? size : 0;
        net->scratch_size = max_size(net->scratch_size, net->backend->scratch_size(l, batch));
    }
    plan_gradients(net);
}

static void *device_alloc(const Net *net, size_t bytes, const char *what) {
    void *memory = net->backend->alloc(bytes);
    if (!memory)
        die(1, "no memory for %s: %.1f MB asked for; a --batch-size below %zu needs less", what,
            (double)bytes / 1e6, net->batch);
    return memory;
}

static real *real_alloc(const Net *net, size_t count, const char *what) {
    return device_alloc(net, count * sizeof(real), what);
}

// Where a batch lies that was copied: the output of row 0.
static real *own_images(const Net *net) {
    return net->activations + net->layers[0].output;
}

static void net_alloc(Net *net) {
    net->params = real_alloc(net, net->param_size, "parameters");
    net->grads = real_alloc(net, net->param_size, "gradients");
    net->activations = real_alloc(net, net->activation_size, "activations");
    net->images = own_images(net);
    net->dactivations = real_alloc(net, net->gradient_size, "activation gradients");
    net->stats = real_alloc(net, net->stats_size, "BatchNorm's statistics");
    net->scratch = real_alloc(net, net->scratch_size, "scratch space");
    net->losses = real_alloc(net, net->batch, "losses");
    net->saved = device_alloc(net, net->saved_size, "masks");
    net->labels = device_alloc(net, net->batch, "labels");
    for (size_t i = 0; i < 2; i++)
        net->host[i] = must_alloc(net->host_size * sizeof(real), "a tensor");
    for (size_t i = 0; net->backend->prepare && i < net->count; i++)
        if (net->layers[i].kind == CONV2D || net->layers[i].kind == LINEAR)
            net->backend->prepare(&net->layers[i]);
}

static void net_free(Net *net) {
    void *arenas[] = {net->params,  net->grads,  net->activations, net->dactivations, net->stats,
                      net->scratch, net->losses, net->saved,       net->labels};
    for (size_t i = 0; i < sizeof arenas / sizeof *arenas; i++)
        net->backend->release(arenas[i]);
    for (size_t i = 0; i < net->count; i++) {
        free(net->layers[i].gather);
        free(net->layers[i].scatter);
    }
    free(net->host[0]);
    free(net->host[1]);
}

// ---- Initial values, as PyTorch's modules and torchvision's ResNets have them

// Fills net->host[0] with numbers in [-1, 1), or with as many from the normal distribution.
static void draw_tensor(Net *net, size_t count, bool normal, size_t tensor, uint64_t seed) {
    PARALLEL_FOR
    for (size_t i = 0; i < count; i += 4) {
        uint32_t r[4];
        philox4x32(r, (uint32_t)(i / 4), (uint32_t)tensor, 0, DRAW_INIT, seed);
        for (size_t j = 0; j < min_size(4, count - i); j++) {
            size_t pair = j / 2 * 2; // two uniform numbers make two normal ones (Box, Muller 1958)
            double radius = sqrt(-2 * log(1 - (double)uniform(r[pair])));
            double angle = 2 * M_PI * (double)uniform(r[pair + 1]);
            net->host[0][i + j] =
                normal ? (real)(radius * (j % 2 ? sin(angle) : cos(angle))) : 2 * uniform(r[j]) - 1;
        }
    }
}

static void set_tensor(Net *net, real *param, size_t count, real scale, real shift) {
    for (size_t i = 0; i < count; i++)
        net->host[0][i] = net->host[0][i] * scale + shift;
    net->backend->copy(param, net->host[0], count * sizeof(real));
}

/* Weights and biases uniform within +-1 / sqrt(fan_in); a convolution before a BatchNorm (no bias):
   normal with variance 2 / fan_out (He et al., arXiv:1502.01852); BatchNorm: weight 1, bias 0. */
static void net_init(Net *net, uint64_t seed) {
    for (size_t i = 0; i < net->count; i++) {
        const Layer *l = &net->layers[i];
        real *weight = net->params + l->weight, *bias = net->params + l->bias;
        real fan_in = (real)(l->weights / l->out.c),
             fan_out = (real)(l->kernel * l->kernel * l->out.c);
        bool normal = l->biases == 0, norm = l->kind == BATCHNORM2D;
        if (!l->weights)
            continue;
        draw_tensor(net, l->weights, normal, 2 * i, seed);
        set_tensor(net, weight, l->weights,
                   norm     ? 0
                   : normal ? SQRT(2 / fan_out)
                            : 1 / SQRT(fan_in),
                   norm);
        draw_tensor(net, l->biases, false, 2 * i + 1, seed);
        set_tensor(net, bias, l->biases, norm ? 0 : 1 / SQRT(fan_in), 0);
        for (size_t c = 0; norm && c < l->out.c; c++)
            net->host[1][c] = 1;
        if (norm) // the running variance starts at 1, the running mean at 0
            net->backend->copy(net->stats + l->stats + l->out.c, net->host[1],
                               l->out.c * sizeof(real));
    }
}

// ---- Summary

// Floating-point operations of one image, forward: 2 for each multiply-add of the weights.
static double layer_flops(const Layer *l) {
    bool multiplies = l->kind == CONV2D || l->kind == LINEAR;
    return multiplies ? 2. * (double)l->weights * (double)(l->out.h * l->out.w) : 0;
}

// Training: forward, weight gradient and, but for the layers on the input, data gradient.
static double training_flops(const Net *net) {
    double flops = 0;
    for (size_t i = 1; i < net->count; i++)
        flops += layer_flops(&net->layers[i]) * (net->layers[i].input == 0 ? 2 : 3);
    return flops;
}

static void describe_layer(const Layer *l, char *text, size_t size) {
    static const char *const names[] = {
        [INPUT] = "input",     [CONV2D] = "conv2d",       [BATCHNORM2D] = "batchnorm2d",
        [RELU] = "relu",       [MAXPOOL2D] = "maxpool2d", [AVGPOOL2D] = "global average pool",
        [DROPOUT] = "dropout", [LINEAR] = "linear",       [LOG_SOFTMAX] = "log_softmax"};
    if (l->kind == CONV2D || l->kind == MAXPOOL2D)
        snprintf(text, size, "%s %zux%zu stride %zu padding %zu", names[l->kind], l->kernel,
                 l->kernel, l->stride, l->padding);
    else if (l->kind == ADD)
        snprintf(text, size, "add row %zu + row %zu", l->input, l->other);
    else if (l->kind == DROPOUT)
        snprintf(text, size, "dropout %g", (double)l->p);
    else if (l->kind == LINEAR)
        snprintf(text, size, "linear %zu -> %zu", l->in.c, l->out.c);
    else
        snprintf(text, size, "%s", names[l->kind]);
}

static void print_summary(const Net *net) {
    int width = 7;
    for (size_t i = 0; i < net->count; i++)
        width = (int)max_size((size_t)width, strlen(net->layers[i].name));
    printf("Model %s:\n  row  %-*s layer                               output (h x w x c)"
           "  parameters  MFLOP forward\n",
           net->model, width, "name");
    for (size_t i = 0; i < net->count; i++) {
        const Layer *l = &net->layers[i];
        char kind[64], shape[64];
        describe_layer(l, kind, sizeof kind);
        snprintf(shape, sizeof shape, "%zu x %zu x %zu", l->out.h, l->out.w, l->out.c);
        printf("  %3zu  %-*s %-34s %19s  %10zu  %13.3f\n", i, width, l->name, kind, shape,
               l->weights + l->biases, layer_flops(l) / 1e6);
    }
    printf("  %zu parameters, %.1f MFLOP to train on one image\n", net->parameters,
           training_flops(net) / 1e6);
}

/* ==== 7. Models =================================================================================

   Yours takes ten lines: write a builder like model_mnist(), in which x is the row that holds the
   images, and add it to the table with the options and datasets that it takes by itself. */

// The network of the PyTorch MNIST example.
static size_t model_mnist(Net *net, size_t x) {
    x = relu(net, conv2d(net, x, 32, 3, 1, 0));
    x = relu(net, conv2d(net, x, 64, 3, 1, 0));
    x = dropout(net, maxpool2d(net, x, 2, 2, 0), (real)0.25);
    x = relu(net, linear(net, x, 128));
    x = linear(net, dropout(net, x, (real)0.5), net->classes);
    return log_softmax(net, x);
}

// LeNet-5 (LeCun et al., "Gradient-based learning applied to document recognition", 1998) as it is
// built today, with ReLU and max-pooling.
static size_t model_lenet(Net *net, size_t x) {
    /* LAB 1.7 BEGIN model_lenet */
    x = maxpool2d(net, relu(net, conv2d(net, x, 6, 5, 1, 2)), 2, 2, 0);
    x = maxpool2d(net, relu(net, conv2d(net, x, 16, 5, 1, 0)), 2, 2, 0);
    x = relu(net, linear(net, x, 120));
    x = relu(net, linear(net, x, 84));
    x = linear(net, x, net->classes);
    return log_softmax(net, x);
    /* LAB 1.7 END */
}

// The network of PyTorch's CIFAR-10 tutorial; --width 64: the wider one of the timing study.
static size_t model_cifar(Net *net, size_t x) {
    x = maxpool2d(net, relu(net, conv2d(net, x, net->settings->width, 5, 1, 0)), 2, 2, 0);
    x = maxpool2d(net, relu(net, conv2d(net, x, 16, 5, 1, 0)), 2, 2, 0);
    x = relu(net, linear(net, x, 120));
    x = relu(net, linear(net, x, 84));
    x = linear(net, x, net->classes);
    return log_softmax(net, x);
}

/* ResNets (He et al., arXiv:1512.03385) with torchvision's names: a stem, four stages of blocks, of
   which each but the first halves the image, and a linear layer on the mean of all pixels. */
static size_t conv_bn(Net *net, size_t x, const char *block, int number, size_t channels,
                      size_t kernel, size_t stride) {
    x = conv2d_no_bias(net, x, channels, kernel, stride, kernel / 2);
    x = batchnorm2d(net, named(net, x, "%sconv%d", block, number));
    return named(net, x, "%sbn%d", block, number);
}

// The block's input itself, or, where the block changes its shape, a 1 x 1 convolution of it.
static size_t shortcut(Net *net, size_t x, const char *block, size_t channels, size_t stride) {
    if (stride == 1 && net->layers[x].out.c == channels)
        return x;
    x = conv2d_no_bias(net, x, channels, 1, stride, 0);
    x = batchnorm2d(net, named(net, x, "%sdownsample.0", block));
    return named(net, x, "%sdownsample.1", block);
}

typedef size_t Block(Net *net, size_t x, const char *block, size_t channels, size_t stride);

static size_t basic_block(Net *net, size_t x, const char *block, size_t channels, size_t stride) {
    size_t y = relu(net, conv_bn(net, x, block, 1, channels, 3, stride));
    y = conv_bn(net, y, block, 2, channels, 3, 1);
    return relu(net, add(net, y, shortcut(net, x, block, channels, stride)));
}

// The stride is that of the 3 x 3 convolution, as in torchvision ("ResNet V1.5").
static size_t bottleneck(Net *net, size_t x, const char *block, size_t channels, size_t stride) {
    size_t y = relu(net, conv_bn(net, x, block, 1, channels, 1, 1));
    y = relu(net, conv_bn(net, y, block, 2, channels, 3, stride));
    y = conv_bn(net, y, block, 3, 4 * channels, 1, 1);
    return relu(net, add(net, y, shortcut(net, x, block, 4 * channels, stride)));
}

// blocks: how many in each stage, up to a 0; channels: of the first stage
static size_t resnet(Net *net, size_t x, Block *block, const size_t *blocks, size_t channels) {
    bool imagenet = strcmp(net->settings->stem, "imagenet") == 0;
    size_t kernel = strcmp(net->settings->stem, "3") == 0 ? 3 : 7;
    x = relu(net, conv_bn(net, x, "", 1, channels, kernel, imagenet ? 2 : 1));
    x = imagenet ? maxpool2d(net, x, 3, 2, 1) : x;
    for (int stage = 0; blocks[stage]; stage++, channels *= 2)
        for (size_t i = 0; i < blocks[stage]; i++) {
            char name[64];
            snprintf(name, sizeof name, "layer%d.%zu.", stage + 1, i);
            x = block(net, x, name, channels, stage > 0 && i == 0 ? 2 : 1);
        }
    x = named(net, linear(net, global_avgpool2d(net, x), net->classes), "fc");
    return log_softmax(net, x);
}

#define RESNET(depth, block, channels, ...)                                       \
    static size_t model_resnet##depth(Net *net, size_t x) {                       \
        return resnet(net, x, block, (const size_t[]){__VA_ARGS__, 0}, channels); \
    }
RESNET(8, basic_block, 16, 1, 1, 1) // for laptops and tests
RESNET(18, basic_block, 64, 2, 2, 2, 2)
RESNET(34, basic_block, 64, 3, 4, 6, 3)
RESNET(50, bottleneck, 64, 3, 4, 6, 3)
RESNET(101, bottleneck, 64, 3, 4, 23, 3)
RESNET(152, bottleneck, 64, 3, 8, 36, 3)

typedef struct Model {
    const char *name;
    size_t (*build)(Net *net, size_t x);
    const char *datasets; // what --dataset auto takes: the first of these that is there
    const char *native;   // the dataset whose shape, classes and counts synthetic images take
    const char *defaults; // options that differ from those of the table in room 12
    bool half;            // three channels are normalised by .5/.5, as in the CIFAR-10 tutorial
    bool sc20_log;        // logs as the ResNets of the SC20 tutorial do, not as the MNIST example
} Model;

#define RESNET_DEFAULTS                                                             \
    "--optimizer sgd --lr 0.1 --momentum 0.9 --weight-decay 5e-4 --batch-size 128 " \
    "--epochs 100 --schedule cosine --log-interval 20"
#define RESNET_MODEL(depth, native)                                                 \
    {                                                                               \
        "resnet" #depth, model_resnet##depth, "cifar100 cifar10 synthetic", native, \
            RESNET_DEFAULTS, false, true                                            \
    }
static const Model models[] = {
    {"mnist", model_mnist, "mnist fashion-mnist synthetic", "mnist", "", false, false},
    {"lenet", model_lenet, "mnist fashion-mnist synthetic", "mnist", "", false, false},
    {"cifar", model_cifar, "cifar10 synthetic", "cifar10",
     "--optimizer sgd --lr 0.001 --momentum 0.9 --batch-size 4 --epochs 2 --gamma 1", true, false},
    RESNET_MODEL(8, "cifar10"),
    RESNET_MODEL(18, "cifar100"),
    RESNET_MODEL(34, "cifar100"),
    RESNET_MODEL(50, "cifar100"),
    RESNET_MODEL(101, "cifar100"),
    RESNET_MODEL(152, "cifar100"),
};
enum { MODELS = sizeof models / sizeof *models };

static const Model *find_model(const char *name) {
    const Model *m = models;
    while (strcmp(m->name, name) != 0)
        m++;
    return m;
}

/* What the images of a dataset are for a model: synthetic ones look like its native dataset's, and
   the normalisation is that of the model's handout where it has its own. */
static DatasetInfo dataset_for(const Model *model, const char *name) {
    bool synthetic = strcmp(name, "synthetic") == 0;
    DatasetInfo info = *find_dataset_info(synthetic ? model->native : name);
    for (size_t c = 0; c < 3 && info.shape.c == 3 && (model->half || synthetic); c++)
        info.mean[c] = info.std[c] = .5;
    if (synthetic) {
        info.name = "synthetic";
        info.class_names = NULL;
    }
    return info;
}

static void net_build(Net *net, const Model *model, const DatasetInfo *data,
                      const Settings *settings, const Backend *backend) {
    *net = (Net){.model = model->name, .settings = settings, .backend = backend};
    net->classes = data->classes;
    size_t x = add_layer(net, (Layer){.kind = INPUT, .in = data->shape, .out = data->shape});
    x = model->build(net, x);
    const Layer *last = &net->layers[x];
    if (x != net->count - 1 || last->kind != LOG_SOFTMAX || shape_size(last->out) != data->classes)
        die(1,
            "model %s: expected the number of its last row, which is log_softmax over the %zu "
            "classes of %s; it returned row %zu of %zu, with %zu outputs",
            model->name, data->classes, data->name, x, net->count, shape_size(last->out));
}

/* ==== 8. Forward and backward ===================================================================

   The walk over the layer table: down for the outputs, up for the gradients. The rule for what is =
   and what is +=: gradients of parameters are always =, so nothing has to be set to zero before a
   step (PyTorch's optimizer.zero_grad()). The gradient of a row is written (=) by its last reader,
   which backward meets first; each reader that it meets later adds (+=). */

static real *output(const Net *net, const Layer *l) {
    return l->kind == INPUT ? net->images : net->activations + l->output;
}

static real *output_gradient(const Net *net, const Layer *l) {
    return net->dactivations + l->gradient;
}

static const Layer *last_layer(const Net *net) {
    return &net->layers[net->count - 1];
}

/* data.to(device). On a CPU there is nothing to do for the images: they are read where the loader
   put them, until backward is over. On a GPU the copies are queued; the loss of the batch, which is
   waited for, comes behind them. Both end before the loader's slot is filled anew. */
static void net_load(Net *net, const Batch *batch) {
    const Backend *b = net->backend;
    if (batch->resident) {
        b->gather(net->images, net->labels, batch->resident, &batch->draw, batch->n);
        return;
    }
    if (b->transfer)
        b->copy(net->images, batch->device_images,
                batch->n * shape_size(net->layers[0].out) * sizeof(real));
    else
        net->images = batch->device_images;
    b->copy(net->labels, batch->device_labels, batch->n);
}

// Where a row's time ends, for whoever measures it.
static void mark_row(const Net *net, size_t mark) {
    if (net->marks_rows)
        net->backend->mark(mark);
}

// Whether the row before has done this row's forward while it was stored.
static bool is_fused(const Net *net, const Layer *l) {
    const Layer *before = &net->layers[l->input];
    return l->kind == RELU ? before->fused_relu : before->add == l;
}

// One row's output (=). Nothing where a rank has no image (dp), or where the row is `skipped`: the
// convolution below has written what it would give.
static void forward_row(Net *net, size_t i, size_t n, const Draw *draw) {
    const Backend *b = net->backend;
    const Layer *l = &net->layers[i];
    real *out = output(net, l), *stats = net->stats + l->stats;
    const real *in = output(net, &net->layers[l->input]);
    const real *weight = net->params + l->weight;
    const real *bias = l->biases ? net->params + l->bias : NULL;
    uint8_t *saved = net->saved + l->saved;
    size_t count = n * shape_size(l->out);
    if (n == 0 || l->skipped)
        return;
    switch (l->kind) {
    case INPUT:
        break;
    case CONV2D:
        if (l->pool) {
            b->conv2d_forward_pooled(output(net, l->pool), net->saved + l->pool->saved, in, weight,
                                     bias, l, n, net->scratch);
            break;
        }
        b->conv2d_forward(out, in, weight, bias, l, n, net->scratch);
        break;
    case LINEAR:
        b->linear_forward(out, in, weight, bias, l, n, net->scratch);
        break;
    case BATCHNORM2D:
        b->batchnorm2d_forward(out, stats, in, weight, bias,
                               l->add ? output(net, &net->layers[l->add->other]) : NULL, l, n,
                               draw != NULL, net->scratch);
        break;
    case RELU:
        if (!is_fused(net, l))
            b->relu_forward(out, in, count);
        break;
    case MAXPOOL2D:
        b->maxpool2d_forward(out, saved, in, l, n);
        break;
    case AVGPOOL2D:
        b->avgpool2d_forward(out, in, l, n);
        break;
    case ADD:
        if (is_fused(net, l))
            break;
        if (!l->in_place)
            b->copy(out, in, count * sizeof *out);
        b->add(out, output(net, &net->layers[l->other]), count, l->fused_relu);
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

// model(data): log-probabilities of n images. draw NULL: evaluation, dropout does nothing.
static void forward(Net *net, size_t n, const Draw *draw) {
    net->batches_tracked += draw != NULL;
    mark_row(net, FORWARD_MARKS);
    for (size_t i = 1; i < net->count; i++) {
        forward_row(net, i, n, draw);
        mark_row(net, FORWARD_MARKS + i);
    }
}

// An add's gradient goes to both rows that it reads, unless they have it already by sharing.
static void backward_add(const Net *net, const Layer *l, size_t n, bool *written) {
    const size_t inputs[2] = {l->input, l->other}, count = n * shape_size(l->out);
    const real *dout = output_gradient(net, l);
    for (size_t i = 0; i < 2; i++) {
        real *din = output_gradient(net, &net->layers[inputs[i]]);
        if (inputs[i] > 0 && din != dout && written[inputs[i]])
            net->backend->add(din, dout, count, false);
        else if (inputs[i] > 0 && din != dout)
            net->backend->copy(din, dout, count * sizeof *din);
        written[inputs[i]] = true;
    }
}

// One row's gradients: of its parameters (=) and of its inputs, = or += as written[] says, which
// knows the rows whose gradients hold something already. Nothing for rows that are skipped.
static void backward_row(Net *net, size_t i, size_t n, bool *written) {
    const Backend *b = net->backend;
    const Layer *l = &net->layers[i], *before = &net->layers[l->input];
    if (n == 0 || l->skipped || (l->input == 0 && !l->weights && l->kind != ADD))
        return; // nobody asks for the gradient of the images
    real *din = l->input == 0 ? NULL : output_gradient(net, before);
    const real *dout = output_gradient(net, l), *out = output(net, l);
    const real *in = output(net, before), *weight = net->params + l->weight;
    const real *stats = net->stats + l->stats;
    real *dweight = net->grads + l->weight, *dbias = net->grads + l->bias;
    const uint8_t *saved = net->saved + l->saved;
    bool accumulate = written[l->input];
    switch (l->kind) {
    case INPUT:
        break;
    case CONV2D:
        if (l->pool) {
            b->conv2d_backward_pooled(din, dweight, dbias, dout, output(net, l->pool),
                                      net->saved + l->pool->saved, in, weight, l, n, accumulate,
                                      net->scratch);
            break;
        }
        b->conv2d_backward(din, dweight, dbias, dout, in, weight, l, n, accumulate, net->scratch);
        break;
    case LINEAR:
        b->linear_backward(din, dweight, dbias, dout, in, weight, l, n, accumulate, net->scratch);
        break;
    case BATCHNORM2D:
        b->batchnorm2d_backward(din, dweight, dbias, dout, in, stats, weight, l, n, accumulate,
                                net->scratch);
        break;
    case RELU:
        if (!l->fused_relu_backward)
            b->relu_backward(din, dout, out, n * shape_size(l->out), accumulate);
        break;
    case MAXPOOL2D:
        b->maxpool2d_backward(din, dout, saved, l, n, accumulate);
        break;
    case AVGPOOL2D:
        b->avgpool2d_backward(din, dout, l, n, accumulate);
        break;
    case ADD:
        backward_add(net, l, n, written);
        break;
    case DROPOUT:
        b->dropout_backward(din, dout, saved, l, n, accumulate);
        break;
    case LOG_SOFTMAX:
        b->log_softmax_backward(din, dout, out, n, l->out.c);
        break;
    }
    written[l->input] = true;
}

static void gradients_ready(struct Comm *c, size_t first); // room 10

// loss.backward(): from the gradient of the last row to those of all parameters
static void backward(Net *net, size_t n) {
    bool written[MAX_LAYERS] = {false};
    mark_row(net, BACKWARD_MARKS + net->count);
    for (size_t i = net->count - 1; i > 0; i--) {
        backward_row(net, i, n, written);
        mark_row(net, BACKWARD_MARKS + i);
        if (net->comm && net->layers[i].weights)
            gradients_ready(net->comm, net->layers[i].weight);
    }
}

static double mean(const real *numbers, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)numbers[i];
    return sum / (double)n;
}

/* F.cross_entropy(): the mean over the batch. Training smooths the labels and leaves the gradient
   of the last row for backward(); evaluation does neither. */
static double loss_and_gradient(Net *net, size_t n, bool training) {
    const Layer *last = last_layer(net);
    net->backend->nll_loss(net->losses, training ? output_gradient(net, last) : NULL,
                           output(net, last), net->labels, n, n * (1 + net->others), net->classes,
                           training ? net->settings->label_smoothing : 0);
    net->backend->copy(net->host[0], net->losses, n * sizeof(real));
    return mean(net->host[0], n);
}

// confusion[label][predicted class] += 1 for each image; returns how many are right
static size_t count_predictions(const Net *net, const Batch *batch, size_t *confusion) {
    const real *logp = net->host[0];
    size_t correct = 0, classes = net->classes;
    net->backend->copy(net->host[0], output(net, last_layer(net)),
                       batch->n * classes * sizeof(real));
    for (size_t i = 0; i < batch->n; i++, logp += classes) {
        size_t best = 0;
        for (size_t k = 1; k < classes; k++)
            best = logp[k] > logp[best] ? k : best;
        confusion[batch->labels[i] * classes + best]++;
        correct += best == batch->labels[i];
    }
    return correct;
}

// A loss that is no number any more ends the run, and names the layer where it began.
static void check_loss(const Net *net, const Batch *batch, double loss) {
    if (isfinite(loss))
        return;
    for (size_t i = 0; i < net->count; i++) {
        const Layer *l = &net->layers[i];
        const Layer *stored = l->pool ? l->pool : l; // the row whose output is in memory
        if (l->skipped)
            continue;
        size_t count = batch->n * shape_size(stored->out);
        real *values = must_alloc(count * sizeof *values, "a look at the outputs");
        char what[64];
        net->backend->copy(values, output(net, stored), count * sizeof *values);
        describe_layer(l, what, sizeof what);
        if (first_not_finite(values, count) < count)
            die(1,
                "epoch %zu, step %zu: the loss is %g; the first output that is not finite "
                "is in row %zu (%s%s%s); try a smaller --lr",
                batch->draw.epoch, batch->number + 1, loss, i, l->name, *l->name ? ": " : "", what);
        free(values);
    }
    die(1, "epoch %zu, step %zu: the loss is %g; try a smaller --lr", batch->draw.epoch,
        batch->number + 1, loss);
}

/* ==== 9. Optimizers and schedules ===============================================================

   An optimizer makes one pass over the flat arena of all parameters, whatever layer they are of. */

/* Adadelta (Zeiler, arXiv:1212.5701), as PyTorch computes it:
   square_avg = rho * square_avg + (1 - rho) * grad^2
   delta = sqrt(acc_delta + eps) / sqrt(square_avg + eps) * grad
   acc_delta = rho * acc_delta + (1 - rho) * delta^2;   param -= lr * delta
   where grad includes weight_decay * param */
static void adadelta(real *param, const real *grad, real *square_avg, real *acc_delta, size_t count,
                     double lr, double rho, double eps, double weight_decay) {
    const real keep = (real)rho, mix = (real)(1 - rho), e = (real)eps, rate = (real)lr;
    const real decay = (real)weight_decay;
    PARALLEL_FOR
    for (size_t i = 0; i < count; i++) {
        real g = grad[i] + decay * param[i];
        real square = square_avg[i] = keep * square_avg[i] + mix * g * g;
        real delta = SQRT(acc_delta[i] + e) / SQRT(square + e) * g;
        acc_delta[i] = keep * acc_delta[i] + mix * delta * delta;
        param[i] -= rate * delta;
    }
}

/* grad includes weight_decay * param;   buffer = momentum * buffer + grad
   param -= lr * (nesterov ? grad + momentum * buffer : buffer).   No momentum: no buffer.
   (Sutskever et al., "On the importance of initialization and momentum", ICML 2013, as PyTorch.) */
static void sgd(real *param, const real *grad, real *momentum_buffer, size_t count, double lr,
                double momentum, double weight_decay, bool nesterov) {
    const real rate = (real)lr, keep = (real)momentum, decay = (real)weight_decay;
    PARALLEL_FOR
    for (size_t i = 0; i < count; i++) {
        real g = grad[i] + decay * param[i], step = g;
        if (momentum > 0) {
            step = momentum_buffer[i] = keep * momentum_buffer[i] + g;
            step = nesterov ? g + keep * step : step;
        }
        param[i] -= rate * step;
    }
}

static void cpu_copy(void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
}

static void *cpu_host_alloc(size_t bytes, bool pinned) {
    (void)pinned;
    return zeroed_alloc(bytes);
}

static void cpu_host_release(void *memory, bool pinned) {
    (void)pinned;
    free(memory);
}

static void cpu_synchronize(void) // a CPU has done what it was told when the call returns
{}

/* The most multiply-adds a second that this program's vectors reach on this machine: each thread
   keeps 24 independent sums in registers. GFLOP/s; takes about 30 ms. */
static double cpu_peak_gflops(void) {
    enum { SUMS = ROWS * VECTORS, STEPS = 400000, REPEATS = 10 };
    double best = 0;
    for (int repeat = 0; repeat < REPEATS; repeat++) {
        double begin = now(), threads = 0;
        real kept = 0;
#pragma omp parallel reduction(+ : kept, threads)
        {
            vec sums[SUMS], factor = (vec){0} + (real)0.999, term = (vec){0} + (real)0.001;
            UNROLLED(i, SUMS)
                sums[i] = (vec){0} + (real)i;
            for (int step = 0; step < STEPS; step++)
                UNROLLED(i, SUMS)
                    sums[i] = sums[i] * factor + term;
            UNROLLED(i, SUMS)
                kept += sums[i][0];
            threads += 1;
        }
        double flops = threads * STEPS * SUMS * LANES * 2. / (now() - begin);
        if (kept > 0 && flops > best) // uses the sums, so that they are computed
            best = flops;
    }
    return best / 1e9;
}

static _Thread_local double cpu_marks[MARKS]; // by the clock, since nothing is queued

static void cpu_mark(size_t i) {
    cpu_marks[i] = now();
}

static double cpu_elapsed(size_t from, size_t to) {
    return cpu_marks[to] - cpu_marks[from];
}

static void cpu_receive(size_t device, real *to, const real *from, size_t count, bool add,
                        real *room) {
    (void)device, (void)room;
    for (size_t i = 0; i < count && add; i++)
        to[i] += from[i];
    if (!add)
        memcpy(to, from, count * sizeof *to);
}

static void cpu_wait(size_t replica, size_t mark) // what a CPU has marked is past
{
    (void)replica, (void)mark;
}

#define CPU_COMMON                                                                               \
    .name = "cpu", .alloc = zeroed_alloc, .release = free, .copy = cpu_copy,                     \
    .host_alloc = cpu_host_alloc, .host_release = cpu_host_release,                              \
    .synchronize = cpu_synchronize, .mark = cpu_mark, .elapsed = cpu_elapsed, .wait = cpu_wait,  \
    .peak_gflops = cpu_peak_gflops, .receive = cpu_receive, .relu_forward = relu_forward,        \
    .relu_backward = relu_backward, .maxpool2d_backward = maxpool2d_backward,                    \
    .avgpool2d_forward = avgpool2d_forward, .avgpool2d_backward = avgpool2d_backward,            \
    .batchnorm2d_forward = batchnorm2d_forward, .batchnorm2d_backward = batchnorm2d_backward,    \
    .add = add_arrays, .dropout_forward = dropout_forward, .dropout_backward = dropout_backward, \
    .log_softmax_forward = log_softmax_forward, .log_softmax_backward = log_softmax_backward,    \
    .nll_loss = nll_loss, .adadelta = adadelta, .sgd = sgd

// What the CPU can do, with the definitions of the layers or with the fast versions.
static const Backend backends[] = {
    {CPU_COMMON, .kernels = "naive", .scratch_size = scratch_size_naive,
     .maxpool2d_forward = maxpool2d_forward_naive, .conv2d_forward = conv2d_forward_naive,
     .conv2d_backward = conv2d_backward_naive, .linear_forward = conv2d_forward_naive,
     .linear_backward = conv2d_backward_naive},
    {CPU_COMMON, .kernels = "fast", .fuses = true, .scratch_size = scratch_size_fast,
     .prepare = cpu_prepare, .maxpool2d_forward = maxpool2d_forward_fast,
     .conv2d_forward = conv2d_forward_fast, .conv2d_backward = conv2d_backward_fast,
     .conv2d_forward_pooled = conv2d_forward_pooled,
     .conv2d_backward_pooled = conv2d_backward_pooled, .linear_forward = conv2d_forward_fast,
     .linear_backward = conv2d_backward_fast},
};
enum { CPU_BACKENDS = sizeof backends / sizeof *backends };

typedef struct Optimizer {
    const char *name;
    double lr;             // the default
    const char *states[2]; // what it keeps for each parameter, by PyTorch's names
    // updates `count` parameters from number `first` on
    void (*step)(const Net *net, real *state, size_t first, size_t count, double lr);
} Optimizer;

static void adadelta_step(const Net *net, real *state, size_t first, size_t count, double lr) {
    net->backend->adadelta(net->params + first, net->grads + first, state + first,
                           state + net->param_size + first, count, lr, .9, 1e-6,
                           net->settings->weight_decay);
}

static void sgd_step(const Net *net, real *state, size_t first, size_t count, double lr) {
    const Settings *s = net->settings;
    net->backend->sgd(net->params + first, net->grads + first, state + first, count, lr,
                      s->momentum, s->weight_decay, s->nesterov);
}

static const Optimizer optimizers[] = {
    {"adadelta", 1.0, {"square_avg", "acc_delta"}, adadelta_step},
    {"sgd", 0.01, {"momentum_buffer", NULL}, sgd_step},
};
enum { OPTIMIZERS = sizeof optimizers / sizeof *optimizers };

/* optimizer.step(): all parameters in one go, since they lie in one arena; with --optimizer-launch
   per-tensor one tensor at a time, as frameworks once did, to see what that costs on a GPU. */
static void optimizer_step(const Optimizer *o, const Net *net, real *state, double lr) {
    if (strcmp(net->settings->optimizer_launch, "per-tensor") != 0) {
        o->step(net, state, 0, net->param_size, lr);
        return;
    }
    for (const Layer *l = net->layers; l < net->layers + net->count; l++) {
        if (l->weights)
            o->step(net, state, l->weight, l->weights, lr);
        if (l->biases)
            o->step(net, state, l->bias, l->biases, lr);
    }
}

static size_t count_states(const Optimizer *o, const Settings *s) {
    bool none = strcmp(o->name, "sgd") == 0 && s->momentum == 0;
    return none ? 0 : o->states[1] ? 2 : 1;
}

// How many of the epochs "60,120,160" are over
static int milestones_passed(const char *milestones, size_t epochs) {
    int passed = 0;
    for (const char *at = milestones; *at; at += strcspn(at, ","), at += *at == ',')
        passed += strtoul(at, NULL, 10) <= epochs;
    return passed;
}

/* The learning rate of a step; epochs and steps count from 0. After e epochs (not counting those of
   the warm-up, in which the rate grows with each step up to lr):
     step        lr * gamma^(e / step_size)                          StepLR
     multistep   lr * gamma^(milestones that are over)               MultiStepLR
     cosine      lr * (1 + cos(pi * e / epochs)) / 2                 CosineAnnealingLR */
static double learning_rate(const Settings *s, size_t epoch, size_t step, size_t steps_per_epoch) {
    if (epoch < s->warmup_epochs)
        return s->lr * (double)(epoch * steps_per_epoch + step + 1) /
               (double)(s->warmup_epochs * steps_per_epoch);
    size_t e = epoch - s->warmup_epochs;
    if (strcmp(s->schedule, "step") == 0)
        return s->lr * pow(s->gamma, (double)(e / s->step_size));
    if (strcmp(s->schedule, "multistep") == 0)
        return s->lr * pow(s->gamma, milestones_passed(s->milestones, e));
    return s->lr * (1 + cos(M_PI * (double)e / (double)(s->epochs - s->warmup_epochs))) / 2;
}

/* ==== 10. Data parallelism ======================================================================

   N replicas of the network learn together. Each has a rank, 0 to N - 1, and computes on a device
   of its own, driven by a thread of this process (--gpus, --replicas) or by a process (MPI).

     ddp   each rank loads its share of the batch and computes a gradient from it. A ring all-reduce
           adds the gradients, bucket by bucket, while backward is busy with earlier layers. All
           ranks make the same update.
     dp    rank 0, the master, loads the batch, hands out images and parameters, gathers the
           outputs, computes the loss, adds up the gradients and makes the update. All wait for it.

   Both give the update of one device that has the whole batch: the shares make up that batch,
   random numbers follow an image's position, and gradients are those of the mean over the whole
   batch. (If N does not divide the data, ddp's last batch has some images twice, as PyTorch's.)
   BatchNorm alone sees only its rank's share; rank 0's running statistics are kept. Sums are made
   in the order of the ring, so that the same N gives the same bits. */

typedef struct Range {
    size_t first, count; // of numbers
} Range;

// The ranks that are threads of this process.
typedef struct Team {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct Comm *ranks[MAX_REPLICAS];
    size_t meetings[MAX_REPLICAS]; // how many each rank has come to
    // dp: the master's batch, the outputs of all ranks and their gradients
    const Batch *batch;
    real *logp, *dlogp, *losses, *host_losses;
    uint8_t *labels;
    double loss;
} Team;

// What a rank needs to work with the others.
typedef struct Comm {
    size_t rank, world, replica, device; // replica: which of this process
    const Settings *settings;
    Team *team; // NULL: the ranks are processes
    bool dp;
    Net *net;
    Loader *loader;
    const void *shown; // what the other ranks may read after a meeting
    void *room;        // as large as what comes from the left neighbour at a time
    void *host[2];     // MPI: what goes out and what comes in
    Batch batch;       // dp: this rank's part of the master's
    // the thread that adds up gradients while backward goes on
    Range buckets[MAX_BUCKETS]; // of the gradients, in the order in which they are finished
    size_t bucket_count, ready, done;
    bool quit;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    double seconds, bytes_sent; // of communication since the last step
} Comm;

// ---- Who is there

#ifdef CNN_MPI
// What die() does in the end, for other ranks would wait for this one.
static void end_all_ranks(int status) {
    MPI_Abort(MPI_COMM_WORLD, status);
}

// Fills rank, world and device; the latter is still to be taken modulo the devices that there are.
static void start_mpi(Comm *c) {
    int provided, rank, world, device;
    MPI_Comm host;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided);
    leave = end_all_ranks;
    if (provided < MPI_THREAD_SERIALIZED)
        die(1, "this MPI library does not let several threads of a program call it in turn");
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
    MPI_Comm_rank(host, &device); // the ranks of a host take its devices in turn
    MPI_Comm_free(&host);
    c->rank = (size_t)rank;
    c->world = (size_t)world;
    c->device = (size_t)device;
}

// Waits until all ranks have come to their end.
static void leave_launcher(void) {
    int started = 0;
    MPI_Initialized(&started);
    if (started)
        MPI_Finalize();
}
#else
static void start_mpi(Comm *c) {
    (void)c;
    die(1, "started as one of several ranks, but built without MPI; install it and run: make clean "
           "&& make, which says whether it was found");
}

static void leave_launcher(void) {}
#endif

static size_t number_in_environment(const char *name) // 0: not there
{
    const char *text = getenv(name);
    return text && atoi(text) > 0 ? (size_t)atoi(text) : 0;
}

// Whether mpirun or srun has started this process as one of several; if so, fills rank and world.
static bool join_launcher(Comm *c) {
    bool launched = getenv("OMPI_COMM_WORLD_RANK") || getenv("PMI_RANK") || getenv("PMIX_RANK");
    static const char *const sizes[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"};
    size_t world = 0;
    for (size_t i = 0; i < 3 && world == 0; i++)
        world = number_in_environment(sizes[i]);
    if (!launched || world < 2)
        return false;
    start_mpi(c);
    if (c->world != world)
        die(1,
            "started as one of %zu ranks, but MPI knows of %zu; start them with the mpirun of the "
            "MPI that cnn was built with, or with srun --mpi=pmix",
            world, c->world);
    return true;
}

// ---- Meetings and messages

static void team_init(Team *t) {
    pthread_condattr_t monotonic; // a clock that nobody sets
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&t->changed, &monotonic);
    pthread_mutex_init(&t->lock, NULL);
}

static _Noreturn void die_waiting(const Comm *c, size_t late) {
    die(1,
        "rank %zu: rank %zu has not answered for %g s; is it alive? Its own log may tell. A longer "
        "--timeout waits longer",
        c->rank, late, c->settings->timeout);
}

// Waits until all ranks of the process have come; die() names one that has not within --timeout.
static void meet(Comm *c) {
    Team *t = c->team;
    double end = now() + c->settings->timeout;
    struct timespec deadline = {(time_t)end, (long)(1e9 * (end - floor(end)))};
    pthread_mutex_lock(&t->lock);
    size_t number = ++t->meetings[c->rank];
    pthread_cond_broadcast(&t->changed);
    for (size_t r = 0; r < c->world; r++)
        while (t->meetings[r] < number)
            if (pthread_cond_timedwait(&t->changed, &t->lock, &deadline) == ETIMEDOUT)
                die_waiting(c, r);
    pthread_mutex_unlock(&t->lock);
}

#ifdef CNN_MPI
// Waits for a message to or from a neighbour, or dies as meet() does.
static void mpi_wait(const Comm *c, MPI_Request *request, size_t neighbour) {
    double deadline = now() + c->settings->timeout;
    for (int done = 0; !done;) {
        MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (!done && now() > deadline)
            die_waiting(c, neighbour);
        if (!done)
            nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL); // the core is another's
    }
}

// Sends bytes to the right neighbour and returns those that came from the left one.
static const void *mpi_exchange(Comm *c, const void *send, size_t bytes, size_t expected) {
    size_t right = (c->rank + 1) % c->world, left = (c->rank + c->world - 1) % c->world;
    MPI_Request requests[2];
    if (c->net->backend->transfer) {
        c->net->backend->transfer(c->device, c->host[0], send, bytes);
        send = c->host[0];
    }
    MPI_Irecv(c->host[1], (int)expected, MPI_BYTE, (int)left, 0, MPI_COMM_WORLD, &requests[0]);
    MPI_Isend(send, (int)bytes, MPI_BYTE, (int)right, 0, MPI_COMM_WORLD, &requests[1]);
    mpi_wait(c, &requests[0], left);
    mpi_wait(c, &requests[1], right);
    return c->host[1];
}
#else
static const void *mpi_exchange(Comm *c, const void *send, size_t bytes, size_t expected) {
    (void)c, (void)send, (void)bytes, (void)expected;
    die(1, "built without MPI");
}
#endif

// Ranks that are processes with a GPU each leave the sums to NCCL, if it was found.
static bool uses_nccl(const Comm *c) {
#ifdef CNN_NCCL
    return !c->team && c->net->backend->transfer;
#else
    (void)c;
    return false;
#endif
}

/* One step around the ring: `send` of data goes to the right neighbour; `receive` of it comes from
   the left one, and replaces what is there (=) or is added to it (+=). */
static void ring_step(Comm *c, real *data, Range send, Range receive, bool add) {
    const real *from;
    if (c->team) {
        meet(c);
        const Comm *left = c->team->ranks[(c->rank + c->world - 1) % c->world];
        from = (const real *)left->shown + receive.first;
    } else {
        from = mpi_exchange(c, data + send.first, send.count * sizeof *data,
                            receive.count * sizeof *data);
    }
    c->bytes_sent += (double)(send.count * sizeof *data);
    c->net->backend->receive(c->device, data + receive.first, from, receive.count, add, c->room);
}

static void finish_ring(Comm *c) // the right neighbour may still be reading
{
    if (c->team)
        meet(c);
}

// Part i of `parts`; they are as equal as can be.
static Range part_of(Range whole, size_t i, size_t parts) {
    size_t first = whole.count * i / parts, last = whole.count * (i + 1) / parts;
    return (Range){whole.first + first, last - first};
}

/* data[range] = its sum over all ranks, with the same bits on each. World - 1 steps in which a part
   goes around and grows, then world - 1 in which the sums go around; so each rank sends
   2 (world - 1) / world of the range, whatever the number of ranks. (Patarasuk, Yuan, "Bandwidth
   optimal all-reduce algorithms for clusters of workstations", JPDC 2009.) */
static void all_reduce(Comm *c, real *data, Range range) {
    const size_t n = c->world, rank = c->rank + 2 * n;
#ifdef CNN_NCCL
    if (uses_nccl(c)) {
        c->bytes_sent += 2. * (double)((n - 1) * range.count * sizeof *data) / (double)n;
        if (!cuda_all_reduce(c->device, data + range.first, range.count, c->settings->timeout))
            die_waiting(c, (c->rank + n - 1) % n);
        return;
    }
#endif
    c->shown = data;
    for (size_t step = 0; step < 2 * (n - 1); step++)
        ring_step(c, data, part_of(range, (rank - step) % n, n),
                  part_of(range, (rank - step - 1) % n, n), step < n - 1);
    finish_ring(c);
}

// data = rank 0's, handed on from neighbour to neighbour
static void broadcast(Comm *c, real *data, size_t count) {
    const Range all = {0, count}, none = {0, 0};
    c->shown = data;
    for (size_t step = 0; step + 1 < c->world; step++)
        ring_step(c, data, c->rank == step ? all : none, c->rank == step + 1 ? all : none, false);
    finish_ring(c);
}

// all[r] = the bytes that rank r has in its all[r]; memory of the host
static void all_gather(Comm *c, void *all, size_t bytes) {
    char *to = all;
    const size_t n = c->world, rank = c->rank + n;
    if (c->team) {
        c->shown = all;
        meet(c);
        for (size_t r = 0; r < n; r++)
            if (r != c->rank)
                memcpy(to + r * bytes, (const char *)c->team->ranks[r]->shown + r * bytes, bytes);
        meet(c);
        return;
    }
    for (size_t step = 0; step + 1 < n; step++) {
        const char *send = to + (rank - step) % n * bytes;
        for (size_t at = 0; at < bytes; at += 4096) {
            size_t size = min_size(4096, bytes - at);
            memcpy(to + (rank - step - 1) % n * bytes + at, mpi_exchange(c, send + at, size, size),
                   size);
        }
    }
}

// ---- ddp

// Adds up the buckets that are ready, one after the other, while backward fills the next.
static void *comm_thread(void *argument) {
    Comm *c = argument;
    pthread_mutex_lock(&c->lock);
    while (!c->quit) {
        if (c->done == c->ready) {
            pthread_cond_wait(&c->changed, &c->lock);
            continue;
        }
        size_t bucket = c->done;
        pthread_mutex_unlock(&c->lock);
        c->net->backend->wait(c->replica, CLOCK_MARKS + bucket);
        double begin = now();
        all_reduce(c, c->net->grads, c->buckets[bucket]);
        c->seconds += now() - begin;
        trace_event(c->rank, TRACK_COMM, "all-reduce", begin, now());
        pthread_mutex_lock(&c->lock);
        c->done++;
        pthread_cond_broadcast(&c->changed);
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

// backward() says: the gradients from number `first` on are finished.
static void gradients_ready(Comm *c, size_t first) {
    pthread_mutex_lock(&c->lock);
    while (c->ready < c->bucket_count && c->buckets[c->ready].first >= first)
        c->net->backend->mark(CLOCK_MARKS + c->ready++);
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

// Cuts the gradients into buckets, from the last layer on. As in PyTorch the first one is small, so
// that communication begins early.
static void plan_buckets(Comm *c) {
    const Net *net = c->net;
    double limit = fmin(1, c->settings->bucket_mb);
    size_t end = net->param_size;
    for (size_t i = net->count; i-- > 0 && c->bucket_count + 1 < MAX_BUCKETS;) {
        const Layer *l = &net->layers[i];
        if (!l->weights || 1e-6 * (double)((end - l->weight) * sizeof(real)) < limit)
            continue;
        c->buckets[c->bucket_count++] = (Range){l->weight, end - l->weight};
        end = l->weight;
        limit = c->settings->bucket_mb;
    }
    if (end > 0)
        c->buckets[c->bucket_count++] = (Range){0, end};
}

// ---- dp

// to = from of another rank, or to += from
static void dp_fetch(Comm *c, real *to, const real *from, size_t count, bool add) {
    double begin = now();
    c->net->backend->receive(c->device, to, from, count, add, c->room);
    c->seconds += now() - begin;
    trace_event(c->rank, TRACK_COMM, add ? "add" : "fetch", begin, now());
    c->bytes_sent += (double)(count * sizeof *to);
}

// A rank's images of the batch; if they do not go round, the last ranks have none.
static Range dp_part(const Comm *c, size_t rank) {
    size_t n = c->team->batch->n, share = ceil_div(n, c->world), first = min_size(rank * share, n);
    return (Range){first, min_size(share, n - first)};
}

// This rank's part of the master's next batch.
static const Batch *dp_next(Comm *c) {
    Team *t = c->team;
    if (c->rank == 0)
        t->batch = loader_next(c->loader);
    c->net->backend->synchronize(); // the update may still be on its way
    meet(c);
    if (!t->batch)
        return NULL;
    Range part = dp_part(c, c->rank);
    c->batch = *t->batch;
    c->batch.n = part.count;
    c->batch.draw.first += part.first;
    c->batch.labels += part.first;
    c->batch.device_labels += part.first;
    c->batch.device_images += part.first * shape_size(c->net->layers[0].out);
    return &c->batch;
}

// This rank's images of the master's batch, and the master's parameters
static void dp_load(Comm *c) {
    Net *net = c->net;
    net->images = own_images(net); // the last test has left its loader's
    dp_fetch(c, net->images, c->batch.device_images, c->batch.n * shape_size(net->layers[0].out),
             false);
    if (c->rank > 0)
        dp_fetch(c, net->params, c->team->ranks[0]->net->params, net->param_size, false);
}

// Gathers the outputs; the master computes the loss of the whole batch and its gradient.
static double dp_loss(Comm *c) {
    Team *t = c->team;
    Net *net = c->net;
    const Backend *b = net->backend;
    const size_t classes = net->classes, n = t->batch->n, first = dp_part(c, c->rank).first;
    b->synchronize();
    dp_fetch(c, t->logp + first * classes, output(net, last_layer(net)), c->batch.n * classes,
             false);
    meet(c);
    if (c->rank == 0) {
        b->copy(t->labels, t->batch->device_labels, n);
        b->nll_loss(t->losses, t->dlogp, t->logp, t->labels, n, n, classes,
                    c->settings->label_smoothing);
        b->copy(t->host_losses, t->losses, n * sizeof(real));
        t->loss = mean(t->host_losses, n);
    }
    meet(c);
    dp_fetch(c, output_gradient(net, last_layer(net)), t->dlogp + first * classes,
             c->batch.n * classes, false);
    return t->loss;
}

// The master adds up the gradients of the ranks that had an image.
static void dp_reduce(Comm *c) {
    c->net->backend->synchronize();
    meet(c);
    for (size_t r = 1; r < c->world && c->rank == 0; r++)
        if (dp_part(c, r).count > 0)
            dp_fetch(c, c->net->grads, c->team->ranks[r]->net->grads, c->net->param_size, true);
    meet(c);
}

// ---- What train() and test() call: ddp's way, which is also that of one device, or dp's

static const Batch *next_batch(Comm *c) {
    return c->dp ? dp_next(c) : loader_next(c->loader);
}

static void load_batch(Comm *c, const Batch *batch) {
    if (c->dp)
        dp_load(c);
    else
        net_load(c->net, batch);
}

static double batch_loss(Comm *c, const Batch *batch) {
    return c->dp ? dp_loss(c) : loss_and_gradient(c->net, batch->n, true);
}

// Returns when the gradients are those of the whole batch: on all ranks, or on dp's master.
static void reduce_gradients(Comm *c) {
    if (c->world == 1)
        return;
    if (c->dp) {
        dp_reduce(c);
        return;
    }
    gradients_ready(c, 0);
    pthread_mutex_lock(&c->lock);
    while (c->done < c->bucket_count)
        pthread_cond_wait(&c->changed, &c->lock);
    c->ready = c->done = 0;
    pthread_mutex_unlock(&c->lock);
}

// Before a test: rank 0's running statistics; under dp its parameters as well
static void share_weights(Comm *c) {
    Net *net = c->net;
    if (c->world == 1)
        return;
    net->backend->synchronize();
    broadcast(c, net->stats, net->stats_size);
    if (c->dp)
        broadcast(c, net->params, net->param_size);
    c->seconds = c->bytes_sent = 0; // it belongs to no step
}

// sums[i] = their sum over all ranks, added in the order of ranks; all: room for those of all ranks
static void sum_over_ranks(Comm *c, double *sums, size_t count, double *all) {
    memcpy(all + c->rank * count, sums, count * sizeof *sums);
    all_gather(c, all, count * sizeof *sums);
    for (size_t i = 0; i < count; i++) {
        sums[i] = 0;
        for (size_t r = 0; r < c->world; r++)
            sums[i] += all[r * count + i];
    }
}

// Ends the program if a rank has something else than rank 0, by its hash.
static void compare_ranks(Comm *c, const char *what, uint64_t hash) {
    uint64_t hashes[c->world];
    hashes[c->rank] = hash;
    all_gather(c, hashes, sizeof hash);
    for (size_t r = 1; r < c->world; r++)
        if (hashes[r] != hashes[0])
            die(1,
                "rank %zu has other %s than rank 0 (hashes %016llx and %016llx); start all of them "
                "with the same options and files",
                r, what, (unsigned long long)hashes[r], (unsigned long long)hashes[0]);
}

// The master's memory for the outputs of a whole batch, which all ranks reach.
static void dp_alloc(const Comm *c) {
    Team *t = c->team;
    const Net *net = c->net;
    size_t images = c->loader->batch_size, outputs = images * net->classes;
    t->logp = real_alloc(net, outputs, "the outputs of all ranks");
    t->dlogp = real_alloc(net, outputs, "the outputs of all ranks");
    t->losses = real_alloc(net, images, "the losses of all ranks");
    t->labels = device_alloc(net, images, "the labels of all ranks");
    t->host_losses = must_alloc(images * sizeof(real), "the losses of all ranks");
}

/* Memory and thread for working with the others; rank, world, device, settings and team are set. */
static void comm_init(Comm *c, Net *net, Loader *loader) {
    const Backend *b = net->backend;
    c->net = net;
    c->loader = loader;
    if (c->world == 1)
        return;
    size_t bytes = max_size(net->param_size, net->stats_size) * sizeof(real) + 4096;
    if (b->transfer)
        c->room = device_alloc(net, bytes, "what comes from other ranks");
    for (size_t i = 0; i < 2 && !c->team; i++)
        c->host[i] = b->host_alloc(bytes, b->transfer != NULL);
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->changed, NULL);
    if (c->dp) {
        if (c->rank == 0)
            dp_alloc(c);
        return;
    }
#ifdef CNN_NCCL
    if (uses_nccl(c)) {
        char *ids = must_alloc(c->world * NCCL_ID_BYTES, "NCCL's name for the ranks");
        if (c->rank == 0)
            cuda_nccl_id(ids);
        all_gather(c, ids, NCCL_ID_BYTES);
        cuda_nccl_join(ids, c->rank, c->world);
        free(ids);
    }
#endif
    plan_buckets(c);
    if (c->settings->overlap)
        net->comm = c;
    net->others = c->world - 1;
    if (pthread_create(&c->thread, NULL, comm_thread, c) != 0)
        die(1, "cannot start the thread that adds up gradients");
}

static void comm_free(Comm *c) {
    const Backend *b = c->net->backend;
    if (c->world == 1)
        return;
    if (c->bucket_count > 0) {
        pthread_mutex_lock(&c->lock);
        c->quit = true;
        pthread_cond_broadcast(&c->changed);
        pthread_mutex_unlock(&c->lock);
        pthread_join(c->thread, NULL);
    }
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->changed);
    if (c->room)
        b->release(c->room);
    for (size_t i = 0; i < 2 && c->host[i]; i++)
        b->host_release(c->host[i], b->transfer != NULL);
    if (c->dp && c->rank == 0) {
        void *memory[] = {c->team->logp, c->team->dlogp, c->team->losses, c->team->labels};
        for (size_t i = 0; i < 4; i++)
            b->release(memory[i]);
        free(c->team->host_losses);
    }
}

/* ==== 11. Checkpoints ===========================================================================

   A safetensors file: the length of the header (8 bytes, little-endian), the header as JSON, then
   the numbers of all tensors. Names, shapes and layouts are those of PyTorch's state_dict():
   a convolution's weight is [out][in][row][column], a linear layer's [out][in], where `in` counts
   channel, row, column, the order in which PyTorch flattens an image. A checkpoint holds the
   optimizer's numbers too, and as metadata where the run was and the settings that shape it. */

enum { MAX_HEADER = 1 << 20, METADATA_SIZE = 4096 };

// A tensor of the file. Its numbers are on the device, or it is the counter of BatchNorm's batches.
typedef struct Tensor {
    char name[96];
    const char *dtype;
    size_t rank, dims[4], count, bytes; // bytes of one number
    real *values;                       // NULL: the counter
    Shape filter;   // a weight: the part of the image that each output sees; h = 0: a plain list
    size_t outputs; // a weight: how many filters
    size_t begin;   // offset in the file, behind the header
    bool found;     // reading: the file has it
} Tensor;

// to[k][c][i][j] = from[i][j][c][k], or back
static void reorder_weight(real *to, const real *from, Shape filter, size_t outputs,
                           bool to_pytorch) {
    size_t pixels = filter.h * filter.w, at = 0;
    for (size_t k = 0; k < outputs; k++)
        for (size_t c = 0; c < filter.c; c++)
            for (size_t pixel = 0; pixel < pixels; pixel++, at++) {
                size_t ours = (pixel * filter.c + c) * outputs + k;
                to[to_pytorch ? at : ours] = from[to_pytorch ? ours : at];
            }
}

static Tensor *add_tensor(Tensor *t, const char *prefix, const Layer *l, const char *what,
                          real *values, size_t count) {
    *t = (Tensor){.dtype = sizeof(real) == 4 ? "F32" : "F64", .rank = 1, .dims = {count}};
    snprintf(t->name, sizeof t->name, "%s%s.%s", prefix, l->name, what);
    t->count = count;
    t->bytes = sizeof(real);
    t->values = values;
    return t + 1;
}

// Tensors of all layers, the parameters at `params` or the like; with_stats: and BatchNorm's.
static Tensor *list_layers(const Net *net, Tensor *t, const char *prefix, real *params,
                           bool with_stats) {
    for (size_t i = 0; i < net->count; i++) {
        const Layer *l = &net->layers[i];
        size_t k = l->kernel;
        if (!l->weights)
            continue;
        Tensor *weight = t;
        t = add_tensor(t, prefix, l, "weight", params + l->weight, l->weights);
        if (l->kind != BATCHNORM2D) { // a linear layer looks at all of the image before it
            weight->filter = l->kind == LINEAR ? net->layers[l->input].out : (Shape){k, k, l->in.c};
            weight->outputs = l->out.c;
            weight->rank = l->kind == LINEAR ? 2 : 4;
            memcpy(weight->dims, (size_t[]){l->out.c, l->in.c, k, k}, sizeof weight->dims);
        }
        if (l->biases)
            t = add_tensor(t, prefix, l, "bias", params + l->bias, l->biases);
        if (l->kind != BATCHNORM2D || !with_stats)
            continue;
        t = add_tensor(t, prefix, l, "running_mean", net->stats + l->stats, l->out.c);
        t = add_tensor(t, prefix, l, "running_var", net->stats + l->stats + l->out.c, l->out.c);
        t = add_tensor(t, prefix, l, "num_batches_tracked", NULL, 1);
        t[-1].dtype = "I64";
        t[-1].bytes = sizeof(int64_t);
        t[-1].rank = 0;
    }
    return t;
}

/* All tensors: the network's, and the optimizer's under "optimizer.", if state is given. The list
   is the caller's to free. Wide numbers come first in the file: so all lie on their borders. */
static Tensor *list_tensors(const Net *net, const Optimizer *optimizer, real *state,
                            size_t *count) {
    Tensor *list = must_alloc(10 * net->count * sizeof *list, "the list of tensors");
    Tensor *end = list_layers(net, list, "", net->params, true);
    for (size_t i = 0; state && i < count_states(optimizer, net->settings); i++) {
        char prefix[64];
        snprintf(prefix, sizeof prefix, "optimizer.%s.", optimizer->states[i]);
        end = list_layers(net, end, prefix, state + i * net->param_size, false);
    }
    *count = (size_t)(end - list);
    size_t offset = 0;
    for (size_t counters = 2; counters-- > 0;)
        for (Tensor *t = list; t < end; t++)
            if ((t->values == NULL) == counters) {
                t->begin = offset;
                offset += t->count * t->bytes;
            }
    return list;
}

// "3,64": the dimensions; returns the length
static size_t print_dims(char *to, size_t size, const Tensor *t) {
    size_t at = 0;
    *to = 0;
    for (size_t d = 0; d < t->rank; d++)
        at += (size_t)snprintf(to + at, size - at, d ? ",%zu" : "%zu", t->dims[d]);
    return at;
}

static int compare_begin(const void *a, const void *b) {
    size_t x = ((const Tensor *)a)->begin, y = ((const Tensor *)b)->begin;
    return x < y ? -1 : x > y;
}

// The header as JSON, padded to 8 bytes; metadata are lines "key=value".
static size_t write_header(char *to, size_t size, const Tensor *list, size_t count,
                           const char *metadata) {
    size_t at = (size_t)snprintf(to, size, "{\"__metadata__\":{\"format\":\"pt\"");
    for (const char *m = metadata; *m; m += strcspn(m, "\n") + 1) {
        int key = (int)strcspn(m, "="), value = (int)strcspn(m + key + 1, "\n");
        at +=
            (size_t)snprintf(to + at, size - at, ",\"%.*s\":\"%.*s\"", key, m, value, m + key + 1);
    }
    to[at++] = '}';
    for (const Tensor *t = list; t < list + count; t++) {
        at += (size_t)snprintf(to + at, size - at, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->name,
                               t->dtype);
        at += print_dims(to + at, size - at, t);
        at += (size_t)snprintf(to + at, size - at, "],\"data_offsets\":[%zu,%zu]}", t->begin,
                               t->begin + t->count * t->bytes);
    }
    to[at++] = '}';
    while (at % 8)
        to[at++] = ' ';
    return at;
}

// The network's tensors, and the optimizer's if state is given, with metadata, lines "key=value".
static void save_tensors(Net *net, const Optimizer *optimizer, real *state, const char *metadata,
                         const char *path) {
    enum { ENTRY = 256 };
    AtomicFile f;
    size_t count;
    Tensor *list = list_tensors(net, optimizer, state, &count);
    char *header = must_alloc(METADATA_SIZE * 2 + count * ENTRY, "the header");
    qsort(list, count, sizeof *list, compare_begin);
    size_t length = write_header(header, METADATA_SIZE * 2 + count * ENTRY, list, count, metadata);
    atomic_open(&f, path);
    for (int byte = 0; byte < 8; byte++)
        fputc((int)((uint64_t)length >> (8 * byte) & 255), f.stream);
    fwrite(header, 1, length, f.stream);
    for (const Tensor *t = list; t < list + count; t++) {
        int64_t tracked = (int64_t)net->batches_tracked;
        if (t->values)
            net->backend->copy(net->host[0], t->values, t->count * sizeof(real));
        if (t->values && first_not_finite(net->host[0], t->count) < t->count) {
            unlink(f.temporary);
            die(1, "%s: not written, because %s is not finite any more; try a smaller --lr", path,
                t->name);
        }
        if (t->filter.h)
            reorder_weight(net->host[1], net->host[0], t->filter, t->outputs, true);
        const void *numbers = !t->values ? (void *)&tracked : net->host[t->filter.h ? 1 : 0];
        fwrite(numbers, t->bytes, t->count, f.stream);
    }
    atomic_commit(&f);
    free(header);
    free(list);
}

// ---- Reading: such a file may come from a stranger, so everything is checked before it is used.

typedef struct Header {
    const char *path;
    char *text, *at; // zero-terminated, so that `at` cannot run past the end
} Header;

static _Noreturn void header_fail(const Header *h, const char *expected) {
    char found[21];
    snprintf(found, sizeof found, "%s", h->at);
    for (char *c = found; *c; c++)
        *c = *c < ' ' || *c > '~' ? '?' : *c; // a stranger's bytes do not reach the terminal
    die(1, "%s: byte %td of the header: expected %s, found \"%s\"; is it a safetensors file?",
        h->path, h->at - h->text, expected, found);
}

static bool accept(Header *h, char c) {
    h->at += strspn(h->at, " \t\r\n");
    if (*h->at != c)
        return false;
    h->at++;
    return true;
}

static void expect(Header *h, char c) {
    if (!accept(h, c))
        header_fail(h, (char[]){'\'', c, '\'', 0});
}

// A string without escapes and control characters; ends it with 0 in place.
static char *parse_string(Header *h) {
    expect(h, '"');
    char *begin = h->at, *end = begin;
    while ((unsigned char)*end >= ' ' && *end != '"' && *end != '\\')
        end++;
    h->at = end;
    if (*end != '"')
        header_fail(h, "a string without backslashes and control characters");
    *end = 0;
    h->at = end + 1;
    return begin;
}

static size_t parse_size(Header *h) {
    h->at += strspn(h->at, " \t\r\n");
    size_t digits = strspn(h->at, "0123456789"), number = 0;
    if (digits == 0 || digits > 18)
        header_fail(h, "a whole number of at most 18 digits");
    for (; digits > 0; digits--)
        number = number * 10 + (size_t)(*h->at++ - '0');
    return number;
}

// "[1,2,3]": at most `most` numbers; returns how many
static size_t parse_sizes(Header *h, size_t *sizes, size_t most) {
    size_t count = 0;
    expect(h, '[');
    if (accept(h, ']'))
        return 0;
    do {
        if (count == most)
            header_fail(h, "fewer numbers");
        sizes[count++] = parse_size(h);
    } while (accept(h, ','));
    expect(h, ']');
    return count;
}

// What the header says of a tensor; its dtype and shape must fill its data_offsets.
static Tensor parse_tensor(Header *h, char *name) {
    static const struct {
        const char *name;
        size_t bytes;
    } dtypes[] = {{"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I64", 8},
                  {"I32", 4}, {"I16", 2}, {"I8", 1},  {"U8", 1},   {"BOOL", 1}};
    Tensor t = {.count = 1};
    size_t offsets[2] = {0}, seen = 0;
    snprintf(t.name, sizeof t.name, "%s", name);
    expect(h, '{');
    do {
        char *key = parse_string(h);
        expect(h, ':');
        if (strcmp(key, "dtype") == 0 && (seen |= 1))
            t.dtype = parse_string(h);
        else if (strcmp(key, "shape") == 0 && (seen |= 2))
            t.rank = parse_sizes(h, t.dims, 4);
        else if (strcmp(key, "data_offsets") == 0 && parse_sizes(h, offsets, 2) == 2)
            seen |= 4;
        else
            header_fail(h, "dtype, shape and two data_offsets before this");
    } while (accept(h, ','));
    expect(h, '}');
    for (size_t i = 0; t.dtype && i < sizeof dtypes / sizeof *dtypes; i++)
        t.bytes = strcmp(t.dtype, dtypes[i].name) == 0 ? dtypes[i].bytes : t.bytes;
    for (size_t d = 0; d < t.rank; d++)
        if (__builtin_mul_overflow(t.count, t.dims[d], &t.count))
            header_fail(h, "a smaller shape before this");
    size_t bytes;
    if (seen != 7 || t.bytes == 0 || __builtin_mul_overflow(t.count, t.bytes, &bytes) ||
        offsets[1] < offsets[0] || offsets[1] - offsets[0] != bytes ||
        strlen(name) >= sizeof t.name)
        header_fail(h, "a known dtype, a shape, and data_offsets that fit them, before this");
    t.begin = offsets[0];
    return t;
}

// {"key":"value", ...} into lines "key=value"
static void parse_metadata(Header *h, char metadata[METADATA_SIZE]) {
    size_t at = 0;
    expect(h, '{');
    if (accept(h, '}'))
        return;
    do {
        char *key = parse_string(h);
        expect(h, ':');
        char *value = parse_string(h);
        at += (size_t)snprintf(metadata + at, METADATA_SIZE - at, "%s=%s\n", key, value);
        if (at >= METADATA_SIZE)
            header_fail(h, "less metadata before this");
    } while (accept(h, ','));
    expect(h, '}');
}

// The file's own list of tensors, sorted by offset, without a hole or an overlap up to data_bytes.
static Tensor *parse_header(Header *h, size_t data_bytes, char metadata[METADATA_SIZE],
                            size_t *count) {
    size_t room = strlen(h->text) / 40 + 1, end = 0; // no entry is shorter
    Tensor *list = must_alloc(room * sizeof *list, "the list of tensors");
    *count = 0;
    *metadata = 0;
    expect(h, '{');
    do {
        char *name = parse_string(h);
        expect(h, ':');
        if (strcmp(name, "__metadata__") == 0)
            parse_metadata(h, metadata);
        else
            list[(*count)++] = parse_tensor(h, name);
    } while (accept(h, ','));
    expect(h, '}');
    if (h->at[strspn(h->at, " \t\r\n")])
        header_fail(h, "nothing more");
    qsort(list, *count, sizeof *list, compare_begin);
    for (size_t i = 0; i < *count; i++) {
        if (list[i].begin != end)
            die(1, "%s: %s: expected its numbers at byte %zu, where those before it end, found %zu",
                h->path, list[i].name, end, list[i].begin);
        end += list[i].count * list[i].bytes;
    }
    if (end != data_bytes)
        die(1, "%s: expected %zu bytes of numbers, as its header says, found %zu", h->path, end,
            data_bytes);
    return list;
}

// Finds where each of our tensors lies in the file; what the file has beyond them is an error.
static void match_tensors(const char *path, Tensor *ours, size_t n_ours, const Tensor *theirs,
                          size_t n_theirs, bool ignore_optimizer) {
    for (size_t i = 0; i < n_theirs; i++) {
        char found[128], expected[128];
        const Tensor *their = &theirs[i];
        size_t at = 0;
        while (at < n_ours && strcmp(ours[at].name, their->name) != 0)
            at++;
        if (at == n_ours && ignore_optimizer && strncmp(their->name, "optimizer.", 10) == 0)
            continue;
        if (at == n_ours || ours[at].found)
            die(1, "%s: %s: expected a tensor of this model, once; is --model the right one?", path,
                their->name);
        print_dims(expected, sizeof expected, &ours[at]);
        print_dims(found, sizeof found, their);
        if (strcmp(expected, found) != 0 || strcmp(ours[at].dtype, their->dtype) != 0)
            die(1,
                "%s: %s: expected %s [%s], found %s [%s]; is --model the right one, with its "
                "--width, "
                "--stem and --dataset?",
                path, their->name, ours[at].dtype, expected, their->dtype, found);
        ours[at].found = true;
        ours[at].begin = their->begin;
    }
    for (size_t i = 0; i < n_ours; i++)
        if (!ours[i].found)
            die(1, "%s: expected the tensor %s, found none; is --model the right one?", path,
                ours[i].name);
}

// A safetensors file whose header has been read and found good.
typedef struct TensorFile {
    FILE *stream;
    Header header;
    Tensor *list;
    size_t count, data;           // tensors; where their numbers begin
    char metadata[METADATA_SIZE]; // lines "key=value"
} TensorFile;

static void open_tensors(TensorFile *f, const char *path) {
    uint8_t prefix[8];
    struct stat info;
    uint64_t length = 0;
    f->stream = fopen(path, "rb");
    if (!f->stream || fstat(fileno(f->stream), &info) != 0)
        file_fail("cannot read", path);
    if (fread(prefix, 1, 8, f->stream) != 8)
        die(1, "%s: expected a safetensors file, found fewer than 8 bytes", path);
    for (int byte = 7; byte >= 0; byte--)
        length = length << 8 | prefix[byte];
    if (length > MAX_HEADER || length + 8 > (uint64_t)info.st_size)
        die(1, "%s: expected a header of at most %d bytes and not beyond the file, found %llu",
            path, MAX_HEADER, (unsigned long long)length);
    f->header = (Header){.path = path, .text = must_alloc(length + 1, "the header")};
    f->header.at = f->header.text;
    if (fread(f->header.text, 1, length, f->stream) != length || *f->header.text != '{')
        die(1, "%s: expected a header that starts with {, found 0x%02x", path,
            (unsigned char)*f->header.text);
    f->data = 8 + length;
    f->list = parse_header(&f->header, (size_t)info.st_size - f->data, f->metadata, &f->count);
}

/* Reads the network's tensors, and the optimizer's if state is given, and closes the file. Without
   a state, the file may hold an optimizer's numbers or not. */
static void read_tensors(TensorFile *f, Net *net, const Optimizer *optimizer, real *state) {
    size_t count;
    Tensor *list = list_tensors(net, optimizer, state, &count);
    match_tensors(f->header.path, list, count, f->list, f->count, state == NULL);
    for (const Tensor *t = list; t < list + count; t++) {
        int64_t tracked = 0;
        void *to = t->values ? (void *)net->host[0] : (void *)&tracked;
        if (fseek(f->stream, (long)(f->data + t->begin), SEEK_SET) != 0 ||
            fread(to, t->bytes, t->count, f->stream) != t->count)
            file_fail("cannot read", f->header.path);
        size_t bad = t->values ? first_not_finite(net->host[0], t->count) : t->count;
        if (bad < t->count)
            die(1, "%s: %s: expected finite numbers, found %g", f->header.path, t->name,
                (double)net->host[0][bad]);
        if (t->filter.h)
            reorder_weight(net->host[1], net->host[0], t->filter, t->outputs, false);
        if (t->values)
            net->backend->copy(t->values, net->host[t->filter.h ? 1 : 0], t->count * sizeof(real));
        else
            net->batches_tracked = (size_t)tracked;
    }
    fclose(f->stream);
    free(f->header.text);
    free(f->list);
    free(list);
}

// net.load_state_dict(load_file(path))
static void load_weights(Net *net, const char *path) {
    TensorFile f;
    open_tensors(&f, path);
    read_tensors(&f, net, NULL, NULL);
}

// One hash of all parameters and running statistics, tensor by tensor.
static uint64_t hash_weights(Net *net) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < net->count; i++) {
        const Layer *l = &net->layers[i];
        const size_t running = l->kind == BATCHNORM2D ? 2 * l->out.c : 0; // means and variances
        const real *parts[] = {net->params + l->weight, net->params + l->bias,
                               net->stats + l->stats};
        const size_t counts[] = {l->weights, l->biases, running};
        for (size_t k = 0; k < 3; k++) {
            net->backend->copy(net->host[0], parts[k], counts[k] * sizeof(real));
            hash = hash_bytes(hash, net->host[0], counts[k] * sizeof(real));
        }
    }
    return hash;
}

/* ==== 12. Options ===============================================================================

   One table: the parser, --help and the settings in run.json are made from it. */

typedef enum { SWITCH, COUNT, NUMBER, CHOICE, TEXT } OptionKind;

typedef struct Option {
    const char *name;
    OptionKind kind;
    size_t offset;        // of the field in Settings
    const char *fallback; // NULL: worked out after parsing, as the help text says
    double min, max;
    bool result;        // it changes the result: a checkpoint keeps it, and --resume insists on it
    const char *values; // the choices, or a word for the value in --help
    const char *help;
} Option;

static char model_names[1024]; // the choices of --model, listed from models[]

#define FIELD(name) offsetof(Settings, name)
// clang-format off
static const Option options[] = {
    {"--model", CHOICE, FIELD(model), "mnist", 0, 0, 1, model_names,
     "the network to train; it has defaults of its own, listed below"},
    {"--width", COUNT, FIELD(width), "6", 1, 1024, 1, "N",
     "cifar: channels of the first convolution; 64 is the wide one"},
    {"--stem", CHOICE, FIELD(stem), "3", 0, 0, 1, "3|7|imagenet",
     "ResNets: first convolution 3x3, 7x7, or 7x7 stride 2 and max-pool"},
    {"--dataset", CHOICE, FIELD(dataset), "auto", 0, 0, 1,
     "auto|mnist|fashion-mnist|cifar10|cifar100|synthetic",
     "the images; auto: the first that is found, else synthetic ones"},
    {"--data", TEXT, FIELD(data), "", 0, 0, 0, "DIR",
     "look for the data files in DIR and DIR/DATASET, nowhere else"},
    {"--limit-train", COUNT, FIELD(limit_train), NULL, 1, UINT32_MAX, 1, "N",
     "train on the first N images only (default: all)"},
    {"--limit-test", COUNT, FIELD(limit_test), NULL, 1, UINT32_MAX, 0, "N",
     "test on the first N images only (default: all)"},
    {"--augment", CHOICE, FIELD(augment), "none", 0, 0, 1, "none|crop-flip|elastic",
     "another view of each training image in each epoch"},
    {"--batch-size", COUNT, FIELD(batch_size), "64", 1, 65536, 0, "N",
     "images of a training step"},
    {"--test-batch-size", COUNT, FIELD(test_batch_size), "1000", 1, 65536, 0, "N",
     "images tested at a time, at most --batch-size"},
    {"--epochs", COUNT, FIELD(epochs), "14", 1, 100000, 0, "N",
     "how often to go through the training set"},
    {"--max-steps", COUNT, FIELD(max_steps), "0", 0, UINT32_MAX, 0, "N",
     "end training after N steps in all; 0: after --epochs"},
    {"--optimizer", CHOICE, FIELD(optimizer), "adadelta", 0, 0, 1, "adadelta|sgd",
     "how gradients change the weights"},
    {"--lr", NUMBER, FIELD(lr), NULL, 1e-12, 1e6, 1, "LR",
     "learning rate (default: 1.0 for adadelta, 0.01 for sgd)"},
    {"--momentum", NUMBER, FIELD(momentum), "0", 0, 0.999999, 1, "M",
     "sgd: share of the last step that is taken again"},
    {"--nesterov", SWITCH, FIELD(nesterov), "off", 0, 0, 1, "on|off",
     "sgd: Nesterov's momentum"},
    {"--weight-decay", NUMBER, FIELD(weight_decay), "0", 0, 1e3, 1, "W",
     "adds W times the weight to each gradient"},
    {"--label-smoothing", NUMBER, FIELD(label_smoothing), "0", 0, 0.999999, 1, "E",
     "share of the target that is spread over all classes"},
    {"--schedule", CHOICE, FIELD(schedule), "step", 0, 0, 1, "step|multistep|cosine",
     "how the learning rate falls from epoch to epoch"},
    {"--gamma", NUMBER, FIELD(gamma), "0.7", 0, 1e6, 1, "M",
     "step, multistep: the learning rate is multiplied by M"},
    {"--step-size", COUNT, FIELD(step_size), "1", 1, 100000, 1, "N",
     "step: ... after every N epochs"},
    {"--milestones", TEXT, FIELD(milestones), "", 0, 0, 1, "E,E,...",
     "multistep: ... after these epochs"},
    {"--warmup-epochs", COUNT, FIELD(warmup_epochs), "0", 0, 100000, 1, "N",
     "epochs before the schedule, in which the learning rate grows up to --lr"},
    {"--lr-scaling", CHOICE, FIELD(lr_scaling), "none", 0, 0, 1, "none|linear|sqrt",
     "scales --lr by batch size / the model's default one, or its root"},
    {"--seed", COUNT, FIELD(seed), "1", 0, 9007199254740992., 1, "S",
     "decides all random numbers: the same seed gives the same run"},
    {"--log-interval", COUNT, FIELD(log_interval), "10", 1, UINT32_MAX, 0, "N",
     "steps between two log lines"},
    {"--workers", COUNT, FIELD(workers), NULL, 1, 256, 0, "N",
     "threads that load batches for each device (default: SLURM_CPUS_PER_TASK in all, else 1)"},
    {"--threads", COUNT, FIELD(threads), NULL, 1, MAX_THREADS, 0, "N",
     "threads that compute (default: the usable cores)"},
    {"--kernels", CHOICE, FIELD(kernels), "fast", 0, 0, 1, "naive|tiled|fast",
     "naive: the definitions; GPU: tiled: in shared memory; fast: the best there are"},
    {"--optimizer-launch", CHOICE, FIELD(optimizer_launch), "flat", 0, 0, 0, "flat|per-tensor",
     "flat: one pass over all parameters; per-tensor: one for each, to compare"},
    {"--resident", SWITCH, FIELD(resident), "on", 0, 0, 0, "on|off",
     "GPU: keep the data set in its memory, if it fits; off: copy each batch"},
    {"--pin-memory", SWITCH, FIELD(pin_memory), "on", 0, 0, 0, "on|off",
     "GPU: copy batches from memory that it can reach by itself"},
    {"--gpus", COUNT, FIELD(gpus), NULL, 1, MAX_REPLICAS, 0, "N",
     "train on N GPUs of this machine at once (default: 1 if there is one, else the CPU)"},
    {"--replicas", COUNT, FIELD(replicas), "1", 1, MAX_REPLICAS, 0, "N",
     "the same on the CPU: N networks, which share the --threads"},
    {"--oversubscribe", SWITCH, FIELD(oversubscribe), "off", 0, 0, 0, "on|off",
     "let several of them share a GPU or a core, to try things out"},
    {"--parallel", CHOICE, FIELD(parallel), "ddp", 0, 0, 1, "ddp|dp",
     "ddp: --batch-size images each, gradients added up; dp: a master shares its batch out"},
    {"--global-batch", COUNT, FIELD(global_batch), NULL, 1, 65536, 1, "B",
     "images of a step on all devices together, instead of --batch-size"},
    {"--bucket-mb", NUMBER, FIELD(bucket_mb), "25", 0.001, 10000, 1, "MB",
     "ddp: gradients are added up in pieces of this size"},
    {"--overlap", SWITCH, FIELD(overlap), "on", 0, 0, 0, "on|off",
     "ddp: ... as soon as backward has finished them; off: after it"},
    {"--timeout", NUMBER, FIELD(timeout), "300", 1, 1e6, 0, "S",
     "seconds that a device waits for another before the run ends"},
    {"--out", TEXT, FIELD(out), "", 0, 0, 0, "DIR",
     "write run.json, steps.csv and epochs.csv into DIR"},
    {"--quiet", SWITCH, FIELD(quiet), "off", 0, 0, 0, "on|off",
     "on stdout nothing but one line for each epoch; no progress either"},
    {"--per-class", SWITCH, FIELD(per_class), "off", 0, 0, 0, "on|off",
     "print the accuracy of each class at the end"},
    {"--profile", SWITCH, FIELD(profile), "off", 0, 0, 0, "on|off",
     "print the time that each line of train() took"},
    {"--layers", SWITCH, FIELD(layers), "off", 0, 0, 0, "on|off",
     "at the end measure each layer, next to the limits of this machine"},
    {"--trace", TEXT, FIELD(trace), "", 0, 0, 0, "FILE",
     "write what happened when as JSON, for chrome://tracing and Perfetto"},
    {"--trace-steps", TEXT, FIELD(trace_steps), "0:50", 0, 0, 0, "A:B",
     "... from training step A on, and before step B; counted from 0. Nsight records them, too"},
    {"--save-model", SWITCH, FIELD(save_model), "off", 0, 0, 0, "on|off",
     "write the weights as MODEL_cnn.safetensors, or model.safetensors in --out"},
    {"--checkpoint", TEXT, FIELD(checkpoint), "", 0, 0, 0, "FILE",
     "write weights, optimizer and position to FILE, as --save-every says"},
    {"--save-every", TEXT, FIELD(save_every), "1", 0, 0, 0, "N|Nsteps",
     "write the checkpoint after every N epochs or steps, and at the end"},
    {"--resume", SWITCH, FIELD(resume), "off", 0, 0, 0, "on|off",
     "go on from --checkpoint, if it is there"},
    {"--load", TEXT, FIELD(load), "", 0, 0, 0, "FILE",
     "start from the weights in FILE, ours or PyTorch's safetensors"},
    {"--eval", SWITCH, FIELD(eval), "off", 0, 0, 0, "on|off",
     "only test, no training"},
    {"--dry-run", SWITCH, FIELD(dry_run), "off", 0, 0, 0, "on|off",
     "one epoch of one training batch and one test batch"},
    {"--no-cuda", SWITCH, FIELD(no_cuda), "off", 0, 0, 0, "on|off",
     "stay on the CPU, even where there is a GPU"},
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
    printf("  %-28soptions from a file, where # begins a comment\n", "@FILE");
    printf("  %-28sthis text\n\ndefaults of the models:\n", "--help");
    for (size_t i = 0; i < MODELS; i++)
        if (*models[i].defaults)
            printf("  --model %-9s %s\n", models[i].name, models[i].defaults);
}

/* One word of the command line and, if it is an option that takes one, the word after it (NULL:
   none). Returns how many words that were. */
static int parse_word(Settings *s, const char *word, const char *next) {
    size_t which = 0, length = strcspn(word, "=");
    while (which < OPTIONS &&
           (strncmp(word, options[which].name, length) != 0 || options[which].name[length] != 0))
        which++;
    if (which == OPTIONS)
        unknown_option(word);
    const Option *o = &options[which];
    bool lone_switch = o->kind == SWITCH && !(next && is_choice(o->values, next));
    if (word[length] != '=' && !lone_switch && !next)
        die(EXIT_USAGE, "%s: expected a value (%s) after it, found nothing; see ./cnn --help",
            o->name, o->values);
    set_option(s, o, word[length] == '=' ? word + length + 1 : lone_switch ? "on" : next);
    return word[length] == '=' || lone_switch ? 1 : 2;
}

enum { WORDS_SIZE = 65536 };
static char words[WORDS_SIZE]; // the options of models and argument files, cut into words
static size_t words_used;

// Options in one text, between blanks; from # to the end of a line is a comment.
static void parse_text(Settings *s, const char *text, size_t length) {
    char *list[WORDS_SIZE / 2], *at = words + words_used;
    size_t count = 0;
    memcpy(at, text, length);
    at[length] = 0;
    words_used += length + 1;
    while (*(at += strspn(at, " \t\r\n"))) {
        if (*at == '#') {
            at += strcspn(at, "\n");
            continue;
        }
        list[count++] = at;
        at += strcspn(at, " \t\r\n");
        if (*at)
            *at++ = 0;
    }
    for (size_t i = 0; i < count;)
        i += (size_t)parse_word(s, list[i], i + 1 < count ? list[i + 1] : NULL);
}

// @FILE: the options in it stand where @FILE stands.
static void parse_file(Settings *s, const char *path) {
    char text[WORDS_SIZE];
    FILE *f = fopen(path, "r");
    if (!f)
        die(EXIT_USAGE, "@%s: cannot read it: %s", path, strerror(errno));
    size_t length = fread(text, 1, sizeof text, f);
    bool readable = !ferror(f);
    fclose(f);
    if (!readable || memchr(text, 0, length) || words_used + length + 1 > WORDS_SIZE)
        die(EXIT_USAGE, "@%s: expected a text file of options, %d bytes at most in all such files",
            path, WORDS_SIZE);
    parse_text(s, text, length);
}

// The table's defaults, then those of a model (NULL: none), then what the user says.
static void parse_all(Settings *s, const Model *model, int argc, char **argv) {
    *s = (Settings){0};
    words_used = 0;
    for (size_t i = 0; i < OPTIONS; i++)
        if (options[i].fallback)
            set_option(s, &options[i], options[i].fallback);
    if (model)
        parse_text(s, model->defaults, strlen(model->defaults));
    for (int i = 1; i < argc;) {
        if (argv[i][0] == '@')
            parse_file(s, argv[i++] + 1);
        else
            i += parse_word(s, argv[i], i + 1 < argc ? argv[i + 1] : NULL);
    }
}

static void parse_options(Settings *s, int argc, char **argv) {
    size_t length = 0;
    for (size_t i = 0; i < MODELS; i++)
        length += (size_t)snprintf(model_names + length, sizeof model_names - length, "%s%s",
                                   i ? "|" : "", models[i].name);
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            print_help();
            if (fflush(stdout) != 0)
                file_fail("cannot write to", "standard output");
            exit(0);
        }
    parse_all(s, NULL, argc, argv); // tells the model
    parse_all(s, find_model(s->model), argc, argv);
}

// The value of an option as text, in `room` if it is no text by itself.
static const char *option_text(Settings *s, const Option *o, char room[64]) {
    Value value = option_value(s, o);
    if (o->kind == CHOICE || o->kind == TEXT)
        return *value.text;
    if (o->kind == SWITCH)
        return *value.flag ? "on" : "off";
    double number = o->kind == COUNT ? (double)*value.count : *value.number;
    for (int digits = 6; digits <= 17; digits++) { // as few as tell it from all other numbers
        snprintf(room, 64, "%.*g", digits, number);
        if (strtod(room, NULL) == number)
            break;
    }
    return room;
}

static void print_settings(Settings *s) {
    char room[64];
    printf("Settings:");
    for (size_t i = 0; i < OPTIONS; i++)
        if (*option_text(s, &options[i], room))
            printf(" %s %s", options[i].name, option_text(s, &options[i], room));
    printf("\n");
}

static void json_string(FILE *f, const char *text) // NULL: null
{
    if (!text) {
        fprintf(f, "null");
        return;
    }
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
    char room[64];
    for (size_t i = 0; i < OPTIONS; i++) {
        const Option *o = &options[i];
        const char *text = option_text(s, o, room);
        fprintf(f, "%s\n    \"%s\": ", i ? "," : "", o->name + 2);
        if (o->kind == SWITCH)
            fprintf(f, strcmp(text, "on") == 0 ? "true" : "false");
        else if (o->kind == COUNT || o->kind == NUMBER)
            fprintf(f, "%s", text);
        else
            json_string(f, text);
    }
}

/* ==== 13. Instruments ===========================================================================

   What a run tells about itself: how long each line of train() took, what machine it ran on, and
   the run folder that plots, labs and graders read. */

/* The clock of train(). Every line there begins with AT(...), which sets a mark in the device's
   work: there the line before ends and this one begins. A part of the step may collect the line's
   time as well. A GPU lags behind the program, so times are asked for when they are needed, or when
   their marks are. */
enum { PROFILED_LINES = 128 };

typedef struct LineClock {
    bool synchronize; // --profile: wait for the device at each line, so that its time is its own
    const Backend *backend;
    int first;   // the first profiled line of cnn.c
    size_t rank; // for --trace, with the line that runs and when it began
    const char *text;
    double since;
    size_t marks, settled; // how many marks were set; how many lines' times are known
    struct {
        int line;       // that began here; 0: none
        double *column; // or NULL
    } begun[CLOCK_MARKS];
    struct {
        size_t hits;
        double seconds;
    } lines[PROFILED_LINES];
} LineClock;

// Asks for the time of the oldest line that has ended.
static void clock_settle(LineClock *c) {
    size_t from = c->settled++ % CLOCK_MARKS, to = c->settled % CLOCK_MARKS;
    double seconds = c->backend->elapsed(from, to);
    if (c->begun[from].line)
        c->lines[c->begun[from].line - c->first].seconds += seconds;
    if (c->begun[from].column)
        *c->begun[from].column += seconds;
}

static void clock_settle_all(LineClock *c) {
    while (c->settled + 1 < c->marks)
        clock_settle(c);
}

static void clock_line(LineClock *c, int line, double *column, const char *text) {
    if (c->synchronize)
        c->backend->synchronize();
    if (c->text)
        trace_event(c->rank, TRACK_HOST, c->text, c->since, now());
    c->text = text;
    c->since = now();
    if (c->backend->range)
        c->backend->range(text);
    if (!c->first)
        c->first = line;
    if (c->marks - c->settled == CLOCK_MARKS)
        clock_settle(c);
    c->begun[c->marks % CLOCK_MARKS].line = line;
    c->begun[c->marks % CLOCK_MARKS].column = column;
    c->backend->mark(c->marks++ % CLOCK_MARKS);
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
    if (!c->first) {
        fprintf(out, "No training step to profile\n");
        return;
    }
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

// ---- What the run took

// The memory that Slurm or the cgroup allows this run, in bytes; else that of the machine.
static double memory_limit(void) {
    double limit = memory_bytes(), found = 0;
    double slurm = 1048576. * (double)number_in_environment("SLURM_MEM_PER_NODE");
    char line[PATH_SIZE] = "", path[PATH_SIZE];
    FILE *f = fopen("/proc/self/cgroup", "r"); // "0::/path", version 2 of cgroups
    bool known = f && fgets(line, sizeof line, f) && strncmp(line, "0::", 3) == 0;
    if (f)
        fclose(f);
    line[strcspn(line, "\n")] = 0;
    snprintf(path, sizeof path, "/sys/fs/cgroup%.4000s/memory.max", line + 3 * known);
    f = known ? fopen(path, "r") : NULL;
    if (f && fscanf(f, "%lf", &found) == 1) // "max": no limit
        limit = fmin(limit, found);
    if (f)
        fclose(f);
    return slurm > 0 ? fmin(limit, slurm) : limit;
}

static void print_duration(const char *what, double seconds, const char *end) {
    long s = lround(seconds);
    printf("%s%02ld:%02ld:%02ld%s\n", what, s / 3600, s / 60 % 60, s % 60, end);
}

// The lines of Slurm's seff, for this process. 1 GB is 2^30 bytes, as there.
static void print_resources(double wall_s) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    size_t cores = number_in_environment("SLURM_CPUS_PER_TASK");
    cores = cores ? cores : usable_cores();
    double cpu = cpu_seconds(&usage), memory = 1024. * (double)usage.ru_maxrss;
    double limit = memory_limit();
    printf("RESOURCES\nState: COMPLETED (exit code 0)\nCores: %zu\n", cores);
    print_duration("CPU Utilized: ", cpu, "");
    printf("CPU Efficiency: %.2f%% of ", 100 * cpu / (wall_s * (double)cores));
    print_duration("", wall_s * (double)cores, " core-walltime");
    print_duration("Job Wall-clock time: ", wall_s, "");
    printf("Memory Utilized: %.2f GB\n", memory / 0x1p30);
    printf("Memory Efficiency: %.2f%% of %.2f GB\n", 100 * memory / limit, limit / 0x1p30);
}

// ---- Run folder (--out DIR)

// What a step is made of, in the order of steps.csv: seconds, but for the last one. Communication
// goes on beside the rest; what a rank waits for it is EXPOSED_COMM. The others add up to the step.
typedef enum {
    LOAD,
    COPY,
    FORWARD,
    BACKWARD,
    OPTIMIZER,
    COMM,
    EXPOSED_COMM,
    IDLE,
    BYTES_SENT,
    PARTS
} StepPart;

// One step: a row of steps.csv.
typedef struct StepResult {
    size_t epoch, step, images;
    double loss, lr, parts[PARTS];
} StepResult;

// What an epoch's line says. Times in seconds; accuracy in per cent.
typedef struct EpochResult {
    size_t epoch, images, images_logged, step_images;
    double seconds, loader_wait_s, train_loss, test_seconds, test_loss, accuracy, lr, step_loss;
    double parts[PARTS]; // sums over all steps and ranks
    uint64_t weight_hash;
} EpochResult;

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
    Device device;
    const Backend *backend;
    bool resident;            // the data set lies on the device
    Comm comm;                // with the other ranks, each of which has a Run of its own
    size_t devices;           // that ranks of this process can use
    size_t batch, iterations; // images of a step on this device, at most; steps of an epoch
    Net net;
    real *state; // the optimizer's
    double lr;
    DatasetInfo info;
    Dataset train_set, test_set;
    Loader train_loader, test_loader;
    size_t epoch, next_batch;       // the position: epoch from 1, batch from 0
    size_t save_epochs, save_steps; // --save-every, one of them 0
    size_t *confusion;              // [label][predicted class] of the last test
    LineClock clock;
    size_t trace_first, trace_end;  // --trace-steps
    bool recording;                 // Nsight records this step
    double trace_start, step_start; // when START_MARK was set; when this step began
    // the run folder
    const char *status;
    int argc;
    char **argv;
    double started, epoch_started, log_started, peak_gflops;
    // steps not yet written to steps.csv: this rank's, and behind each other those of all ranks
    StepResult *steps, *all_steps;
    size_t steps_kept, steps_room;
    double *totals; // of a test: this rank's, and behind them those of all ranks
    EpochResult *epochs;
    size_t epochs_done;
    FILE *steps_csv, *epochs_csv;
    FILE *lines; // of the epochs: stdout, also where --quiet silences that
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

// In per cent; NAN where the test set has no image of the class.
static double class_accuracy(const Run *run, size_t class) {
    size_t all = 0, classes = run->net.classes;
    for (size_t k = 0; k < classes; k++)
        all += run->confusion[class * classes + k];
    return 100. * (double)run->confusion[class * classes + class] / (double)all;
}

// The class's name, or its number where the dataset has no names; in `room`.
static const char *class_name(const DatasetInfo *info, size_t class, char room[32]) {
    const char *at = info->class_names;
    snprintf(room, 32, "%zu", class);
    for (size_t i = 0; at && i < class; i++)
        at = strchr(at, ' ') + 1;
    if (at)
        snprintf(room, 32, "%.*s", (int)strcspn(at, " "), at);
    return room;
}

static void print_confusion_json(FILE *f, const Run *run) {
    size_t classes = run->net.classes;
    char room[32];
    fprintf(f, "  \"per_class\": {");
    for (size_t i = 0; i < classes; i++) {
        double accuracy = class_accuracy(run, i);
        fprintf(f, isfinite(accuracy) ? "%s\"%s\": %.2f" : "%s\"%s\": null", i ? ", " : "",
                class_name(&run->info, i, room), accuracy);
    }
    fprintf(f, "},\n  \"confusion\": [");
    for (size_t i = 0; i < classes * classes; i++)
        fprintf(f, "%s%s%zu%s",
                i % classes ? ","
                : i         ? ",\n    "
                            : "\n    ",
                i % classes ? "" : "[", run->confusion[i], i % classes == classes - 1 ? "]" : "");
    fprintf(f, "],\n");
}

static void write_run_json(Run *run) {
    // A rank that dies writes it too; recursive, since the one that writes it may die of that.
    static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
    Settings *s = &run->settings;
    if (!*s->out)
        return;
    pthread_mutex_lock(&lock);
    char path[PATH_SIZE], cpu[256], host[256] = "";
    AtomicFile file;
    join_path(path, s->out, "run.json");
    atomic_open(&file, path);
    FILE *f = file.stream;
    cpu_name(cpu, sizeof cpu);
    gethostname(host, sizeof host - 1);
    fprintf(f, "{\n  \"status\": \"%s\", \"provenance\": \"measured\", \"emulated\": %s,\n",
            run->status, run->device.emulated ? "true" : "false");
    fprintf(f, "  \"command\": [");
    for (int i = 0; i < run->argc; i++) {
        fprintf(f, i ? ", " : "");
        json_string(f, run->argv[i]);
    }
    fprintf(f, "],\n  \"machine\": {\"host\": ");
    json_string(f, host);
    fprintf(f, ", \"cpu\": ");
    json_string(f, cpu);
    fprintf(f, ", \"cores\": %zu, \"memory_bytes\": %.0f, \"peak_gflops\": %.1f, \"device\": ",
            usable_cores(), memory_bytes(), run->peak_gflops);
    json_string(f, run->device.name);
    fprintf(f, ", \"uuid\": ");
    json_string(f, *run->device.uuid ? run->device.uuid : NULL);
    fprintf(f, ", \"driver\": ");
    json_string(f, *run->device.driver ? run->device.driver : NULL);
    fprintf(f, ", \"slurm\": ");
    json_string(f, getenv("SLURM_JOB_ID"));
    fprintf(f, "},\n  \"build\": {\"compiler\": ");
    json_string(f, COMPILER);
    fprintf(f, ", \"flags\": ");
    json_string(f, CNN_FLAGS);
    fprintf(f, ", \"commit\": \"" CNN_COMMIT "\"},\n  \"settings\": {");
    print_settings_json(f, s);
    const Comm *c = &run->comm;
    fprintf(f,
            "\n  },\n  \"parallel\": {\"mode\": \"%s\", \"world\": %zu, \"batch_per_device\": %zu, "
            "\"global_batch\": %zu, \"iterations\": %zu, \"buckets\": %zu, \"workers\": %zu, "
            "\"graph\": false},\n  \"epochs\": [",
            c->world == 1 ? "single" : s->parallel, c->world, run->batch, s->global_batch,
            run->iterations, c->bucket_count, s->workers);
    for (size_t i = 0; i < run->epochs_done; i++) {
        fprintf(f, "%s\n    {", i ? "," : "");
        print_epoch(f, &run->epochs[i], JSON);
        fprintf(f, ",\"weight_hash\":\"%016llx\"}", (unsigned long long)run->epochs[i].weight_hash);
    }
    fprintf(f, "],\n");
    if (run->confusion)
        print_confusion_json(f, run);
    else
        fprintf(f, "  \"per_class\": null, \"confusion\": null,\n");
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    fprintf(f,
            "  \"resources\": {\"wall_s\": "
            "%.3f, \"cpu_s\": %.3f, \"max_rss_bytes\": %.0f}\n}\n",
            now() - run->started, cpu_seconds(&usage), 1024. * (double)usage.ru_maxrss);
    atomic_commit(&file);
    pthread_mutex_unlock(&lock);
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
    run->peak_gflops = run->backend->peak_gflops();
    write_run_json(run);
    dying_run = run;
    before_dying = write_failed;
}

/* Opens a log of the run folder. A run that goes on from a checkpoint keeps the rows up to there:
   those whose epoch and, where by_step, step are before its position. */
static FILE *open_log(const Run *run, const char *file, const char *header, bool by_step) {
    char path[PATH_SIZE], row[1024];
    join_path(path, run->settings.out, file);
    bool goes_on = run->epoch > 1 || run->next_batch > 0;
    FILE *before = goes_on ? fopen(path, "r") : NULL;
    AtomicFile kept;
    atomic_open(&kept, path);
    fprintf(kept.stream, "%s\n", header);
    while (before && fgets(row, sizeof row, before)) {
        size_t epoch = 0, step = 0;
        if (sscanf(row, "%zu,%zu", &epoch, &step) == 2 && epoch > 0 &&
            (epoch < run->epoch || (by_step && epoch == run->epoch && step <= run->next_batch)))
            fputs(row, kept.stream);
    }
    if (before)
        fclose(before);
    atomic_commit(&kept);
    FILE *log = fopen(path, "a");
    if (!log)
        file_fail("cannot write", path);
    return log;
}

static void open_logs(Run *run) {
    char *header = NULL;
    size_t size;
    if (!*run->settings.out)
        return;
    FILE *f = open_memstream(&header, &size);
    print_epoch(f, &(EpochResult){0}, CSV_HEADER);
    fclose(f);
    run->epochs_csv = open_log(run, "epochs.csv", header, false);
    free(header);
    run->steps_csv = open_log(run, "steps.csv",
                              "epoch,step,rank,images,loss,lr,seconds,load_s,copy_s,forward_s,"
                              "backward_s,optimizer_s,comm_s,exposed_comm_s,idle_s,bytes_sent,"
                              "warmup",
                              true);
}

static void flush_csv(FILE *f, const char *dir, const char *file) {
    if (fflush(f) != 0 || ferror(f))
        die(1, "cannot write %s/%s: %s", dir, file, strerror(errno));
}

static void write_step(const Run *run, const StepResult *s, size_t rank) {
    double seconds = -s->parts[COMM];
    for (size_t k = 0; k < BYTES_SENT; k++)
        seconds += s->parts[k];
    fprintf(run->steps_csv, "%zu,%zu,%zu,%zu,%.9g,%.9g,%.6f", s->epoch, s->step, rank, s->images,
            s->loss, s->lr, seconds);
    for (size_t k = 0; k < BYTES_SENT; k++)
        fprintf(run->steps_csv, ",%.6f", s->parts[k]);
    fprintf(run->steps_csv, ",%.0f,%d\n", s->parts[BYTES_SENT], s->epoch == 1 && s->step <= 3);
}

// Adds the steps of all ranks to the epoch's sums and to steps.csv.
static void flush_steps(Run *run, EpochResult *e) {
    clock_settle_all(&run->clock);
    all_gather(&run->comm, run->all_steps, run->steps_room * sizeof *run->steps);
    for (size_t i = 0; i < run->steps_kept; i++) {
        double loss = 0, wait = 0;
        e->step_images = 0;
        for (size_t rank = 0; rank < run->comm.world; rank++) {
            const StepResult *s = &run->all_steps[rank * run->steps_room + i];
            e->step_images += s->images;
            loss += s->loss * (double)s->images;
            wait = fmax(wait, s->parts[LOAD]);
            for (size_t k = 0; k < PARTS; k++)
                e->parts[k] += s->parts[k];
            if (run->steps_csv)
                write_step(run, s, rank);
        }
        e->images += e->step_images;
        e->step_loss = loss / (double)e->step_images;
        e->train_loss += loss;
        e->loader_wait_s += wait;
    }
    memset(run->steps, 0, run->steps_kept * sizeof *run->steps);
    run->steps_kept = 0;
    if (run->steps_csv)
        flush_csv(run->steps_csv, run->settings.out, "steps.csv");
}

// On a terminal: how far the epoch is, how fast it goes and how long it will take; in its width.
static void show_progress(const Run *run, const EpochResult *e, double seconds) {
    struct winsize terminal = {.ws_col = 80};
    if (!isatty(STDERR_FILENO))
        return;
    ioctl(STDERR_FILENO, TIOCGWINSZ, &terminal);
    double rate = (double)e->images / seconds, all = (double)run->train_set.count;
    char text[256];
    snprintf(text, sizeof text, "epoch %zu: %3.0f %%, %zu of %.0f images, %.0f img/s, %.0f s left",
             e->epoch, fmin(100, 100 * (double)e->images / all), e->images, all, rate,
             fmax(0, all - (double)e->images) / rate);
    fprintf(stderr, "\r\033[K%.*s\r", terminal.ws_col > 1 ? terminal.ws_col - 1 : 79, text);
}

// What a step leaves: its row for steps.csv, the log line at the log interval, the epoch's sums.
static void log_step(Run *run, EpochResult *e, const Batch *batch, double loss) {
    StepResult *s = &run->steps[run->steps_kept++];
    s->epoch = e->epoch;
    s->step = batch->number + 1;
    s->images = batch->n;
    s->loss = loss;
    s->lr = run->lr;
    s->parts[COMM] = run->comm.seconds;
    s->parts[BYTES_SENT] = run->comm.bytes_sent;
    run->comm.seconds = run->comm.bytes_sent = 0;
    if (batch->number % run->settings.log_interval != 0)
        return;
    flush_steps(run, e);
    if (run->comm.rank > 0 || run->settings.quiet)
        return;
    if (isatty(STDERR_FILENO))
        fprintf(stderr, "\r\033[K");
    if (run->model->sc20_log)
        printf("INFO - Epoch: %zu, Iteration: %zu, Avg img/sec: %.3f\n", e->epoch, batch->number,
               (double)(e->images - e->images_logged) / (now() - run->log_started));
    else
        printf("Train Epoch: %zu [%zu/%zu (%.0f%%)]\tLoss: %.6f\n", e->epoch,
               batch->number * e->step_images, run->train_set.count,
               100. * (double)batch->number / (double)run->iterations, e->step_loss);
    e->images_logged = e->images;
    run->log_started = now();
    show_progress(run, e, now() - run->epoch_started);
}

// Ends an epoch of training: its averages, and the rows that are left.
static void finish_epoch(Run *run, EpochResult *e) {
    const double ranks = (double)run->comm.world, *p = e->parts;
    flush_steps(run, e);
    e->lr = run->lr;
    e->train_loss /= (double)max_size(e->images, 1);
    if (run->model->sc20_log && run->comm.rank == 0)
        printf("INFO - Time taken for epoch %zu is %.3f sec\n", e->epoch,
               now() - run->epoch_started);
    if (run->comm.world > 1 && run->comm.rank == 0)
        printf("ranks=%.0f compute_s=%.3f load_s=%.3f comm_s=%.3f exposed_comm_s=%.3f idle_s=%.3f "
               "mb_sent=%.1f (each, on average)\n",
               ranks, (p[COPY] + p[FORWARD] + p[BACKWARD] + p[OPTIMIZER]) / ranks, p[LOAD] / ranks,
               p[COMM] / ranks, p[EXPOSED_COMM] / ranks, p[IDLE] / ranks,
               1e-6 * p[BYTES_SENT] / ranks);
}

// Writes the epoch's line and adds it to the run folder.
static void report_epoch(Run *run, EpochResult *e) {
    e->weight_hash = hash_weights(&run->net);
    compare_ranks(&run->comm, "weights", e->weight_hash);
    if (run->comm.rank > 0)
        return;
    print_epoch(run->lines, e, KEY_VALUE);
    fprintf(run->lines, "\n");
    fflush(run->lines);
    double seconds, bytes = loader_traffic(&run->train_loader, &seconds);
    if (bytes > 0)
        printf("Copied to the device so far: %.1f MB, %.2f GB/s a worker from %s memory\n",
               bytes / 1e6, bytes / seconds / 1e9,
               run->train_loader.place.pinned ? "pinned" : "pageable");
    flush_stdout();
    run->epochs[run->epochs_done++] = *e;
    if (!run->epochs_csv)
        return;
    print_epoch(run->epochs_csv, e, CSV_ROW);
    fprintf(run->epochs_csv, "\n");
    flush_csv(run->epochs_csv, run->settings.out, "epochs.csv");
    write_run_json(run);
}

// ---- Trace (--trace)

static size_t steps_done(const Run *run) {
    return (run->epoch - 1) * run->iterations + run->next_batch;
}

// Whether this rank's next step is traced; events are noted while any rank's is.
static void trace_rank(Run *run, bool traced) {
    if (traced != run->net.marks_rows)
        __atomic_fetch_add(&trace.on, traced ? 1 : (size_t)-1, __ATOMIC_RELAXED);
    run->net.marks_rows = traced;
}

// Before a step: whether it is traced. The first one sets the mark from which device times count.
static void begin_traced_step(Run *run) {
    const Backend *b = run->backend;
    size_t step = steps_done(run);
    bool recording = step >= run->trace_first && step < run->trace_end;
    bool traced = recording && *run->settings.trace;
    if (b->record && run->comm.replica == 0 && recording != run->recording)
        b->record(recording);
    run->recording = recording;
    if (traced && !run->net.marks_rows) {
        b->synchronize();
        b->mark(START_MARK);
        run->trace_start = now();
    }
    trace_rank(run, traced);
    run->step_start = now();
}

// Behind a traced step: the step itself, and its rows by the device's clock, which it waits for.
static void trace_step(const Run *run) {
    const Net *net = &run->net;
    const Backend *b = net->backend;
    const size_t rank = run->comm.rank;
    char name[48], kind[40];
    if (!net->marks_rows)
        return;
    for (size_t k = 0; k < 2 * net->count; k++) { // forward, then backward
        bool back = k >= net->count;
        size_t i = back ? 2 * net->count - k : k;
        const Layer *l = &net->layers[i];
        if (i == 0 || i == net->count)
            continue;
        size_t end = (back ? BACKWARD_MARKS : FORWARD_MARKS) + i, begin = back ? end + 1 : end - 1;
        describe_layer(l, kind, sizeof kind);
        snprintf(name, sizeof name, "%.30s %s", *l->name ? l->name : kind,
                 back ? "backward" : "forward");
        trace_event(rank, TRACK_DEVICE, name, run->trace_start + b->elapsed(START_MARK, begin),
                    run->trace_start + b->elapsed(START_MARK, end));
    }
    snprintf(name, sizeof name, "step %zu", steps_done(run)); // counted as by --trace-steps
    trace_event(rank, TRACK_STEP, name, run->step_start, now());
}

// "10:20": from step 10 on, before step 20
static void parse_trace_steps(Run *run) {
    const char *text = run->settings.trace_steps;
    char *end = NULL;
    run->trace_first = strtoul(text, &end, 10);
    bool good = end > text && *end == ':' && strspn(end + 1, "0123456789") > 0 && *text != '-';
    run->trace_end = good ? strtoul(end + 1, &end, 10) : 0;
    if (!good || *end || run->trace_first >= run->trace_end)
        die(EXIT_USAGE, "--trace-steps: expected A:B with A below B, as 10:20, found \"%s\"", text);
}

// Room for all events of the traced steps.
static void plan_trace(Run *run) {
    size_t steps =
        min_size(run->trace_end - run->trace_first, run->settings.epochs * run->iterations);
    if (!*run->settings.trace || run->comm.replica > 0)
        return;
    trace.room = steps * run->comm.world * (2 * run->net.count + MAX_BUCKETS + 32);
    trace.events = must_alloc(trace.room * sizeof *trace.events, "the trace");
}

// What the numbers of processes and threads in the file mean: ranks and their tracks.
static void write_track_names(FILE *f, const Run *run) {
    static const char *const names[] = {"steps", "train()", "device", "communication"};
    for (size_t rank = 0; rank < run->comm.world; rank++) {
        fprintf(f,
                ",\n{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%zu,\"args\":{\"name\":\"rank "
                "%zu\"}}",
                rank, rank);
        for (size_t track = 0; track < TRACK_LOADER + run->settings.workers; track++) {
            char worker[64];
            snprintf(worker, sizeof worker, "loader worker %zu", track - TRACK_LOADER);
            fprintf(f,
                    ",\n{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%zu,\"tid\":%zu,\"args\":"
                    "{\"name\":\"%s\"}}",
                    rank, track, track < TRACK_LOADER ? names[track] : worker);
        }
    }
}

// Chrome's trace event format: complete events (X), times in microseconds, and names (M).
static void write_trace(const Run *run) {
    AtomicFile file;
    char path[PATH_SIZE];
    if (!trace.events)
        return;
    snprintf(path, sizeof path, run->comm.rank == 0 ? "%s" : "%s.rank%zu", run->settings.trace,
             run->comm.rank);
    atomic_open(&file, path);
    fprintf(file.stream,
            "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n"
            "{\"ph\":\"M\",\"name\":\"process_labels\",\"pid\":0,\"args\":{\"labels\":\"cnn\"}}");
    write_track_names(file.stream, run);
    for (size_t i = 0; i < min_size(trace.count, trace.room); i++) {
        const TraceEvent *e = &trace.events[i];
        fprintf(file.stream,
                ",\n{\"ph\":\"X\",\"pid\":%zu,\"tid\":%zu,\"ts\":%.3f,\"dur\":%.3f,\"name\":",
                e->rank, e->track, 1e6 * (e->begin - run->started), 1e6 * (e->end - e->begin));
        json_string(file.stream, e->name);
        fprintf(file.stream, "}");
    }
    fprintf(file.stream, "\n]}\n");
    atomic_commit(&file);
    printf("Wrote %zu events to %s%s\n", min_size(trace.count, trace.room), path,
           trace.count > trace.room ? ", and had no room for more; fewer --trace-steps fit" : "");
    free(trace.events);
}

// ---- Layers (--layers)

enum { LAYER_ROUNDS = 7 };

// What a row does with a batch, and how long it took.
typedef struct LayerTimes {
    double forward[LAYER_ROUNDS], backward[LAYER_ROUNDS], flops, bytes;
} LayerTimes;

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, size_t count) {
    qsort(values, count, sizeof *values, compare_doubles);
    return values[count / 2];
}

/* Floating-point operations of a row on n images, forward and backward, by the definition; and the
   bytes (+=) that it moves at least: each tensor that it reads or writes, once. A fused row moves
   only what its backward does. */
static void count_work(const Layer *l, bool fused, size_t n, LayerTimes *t) {
    const Shape stored = l->pool ? l->pool->out : l->out;
    const double in = (double)(n * shape_size(l->in)), out = (double)(n * shape_size(stored));
    const double weights = (double)l->weights;
    const bool first = l->input == 0; // no gradient of the images
    double numbers = 0;
    switch (l->kind) {
    case CONV2D: // forward, weight gradient, data gradient
    case LINEAR:
        numbers = (2 + !first) * (in + out + weights);
        break;
    case BATCHNORM2D: // statistics, result; sums, gradient
        numbers = (l->add ? 4 : 3) * out + 5 * out;
        break;
    case RELU:
        numbers = (fused ? 0 : 2 * out) + (l->fused_relu_backward ? 0 : 3 * out);
        break;
    case LOG_SOFTMAX:
        numbers = 2 * out + 3 * out;
        break;
    case ADD:
        numbers = fused ? 0 : 3 * out;
        break;
    case MAXPOOL2D: // and a byte for each output
    case AVGPOOL2D:
        numbers = 2 * in + 2.5 * out;
        break;
    case DROPOUT:
        numbers = 4.5 * out;
        break;
    case INPUT:
        break;
    }
    t->flops = (double)n * layer_flops(l) * (2 + !first);
    t->bytes += numbers * sizeof(real);
}

// Bytes a second that this device reads and writes: out += in, larger than its caches
static double measure_bandwidth(const Net *net) {
    const Backend *b = net->backend;
    const size_t count = 1 << 24;
    real *out = real_alloc(net, count, "a measurement"),
         *in = real_alloc(net, count, "a measurement");
    double seconds[LAYER_ROUNDS];
    for (size_t i = 0; i < LAYER_ROUNDS; i++) {
        b->mark(0);
        b->add(out, in, count, false);
        b->mark(1);
        seconds[i] = b->elapsed(0, 1);
    }
    b->release(out);
    b->release(in);
    return 3. * (double)(count * sizeof(real)) / median(seconds, LAYER_ROUNDS);
}

// Steps of training without an update, which note the time behind each row.
static void time_rows(Run *run, const Batch *batch, LayerTimes *times) {
    Net *net = &run->net;
    const Backend *b = net->backend;
    net->comm = NULL;
    net->marks_rows = true;
    net_load(net, batch);
    for (size_t round = 0; round < LAYER_ROUNDS; round++) {
        forward(net, batch->n, &batch->draw);
        loss_and_gradient(net, batch->n, true);
        backward(net, batch->n);
        for (size_t i = 1; i < net->count; i++) {
            times[i].forward[round] = b->elapsed(FORWARD_MARKS + i - 1, FORWARD_MARKS + i);
            times[i].backward[round] = b->elapsed(BACKWARD_MARKS + i + 1, BACKWARD_MARKS + i);
        }
    }
    net->marks_rows = false;
}

// A row of the table and of layers.csv. The limit that binds is the one that would take longer.
static void print_layer(FILE *csv, const Layer *l, size_t number, LayerTimes *t, double peak,
                        double bandwidth) {
    const double forward_s = median(t->forward, LAYER_ROUNDS);
    const double backward_s = median(t->backward, LAYER_ROUNDS), seconds = forward_s + backward_s;
    const double compute = t->flops / peak, memory = t->bytes / bandwidth;
    char kind[64], name[64], shape[64];
    describe_layer(l, kind, sizeof kind);
    snprintf(name, sizeof name, "row %zu", number);
    if (*l->name)
        snprintf(name, sizeof name, "%s", l->name);
    snprintf(shape, sizeof shape, "%zux%zux%zu", l->out.h, l->out.w, l->out.c);
    printf("  %-24s %-34s %9.3f %9.3f %8.1f %7.1f %6.1f  %s\n", name, kind, 1e3 * forward_s,
           1e3 * backward_s, 1e-9 * t->flops / seconds, 1e-9 * t->bytes / seconds,
           100 * fmax(compute, memory) / seconds, compute > memory ? "compute" : "memory");
    if (csv)
        fprintf(csv, "%s,%s,%s,%zu,%.3f,%.4f,%.4f,%.2f,%.2f,%.1f,%s\n", name, kind, shape,
                l->weights + l->biases, layer_flops(l) / 1e6, 1e3 * forward_s, 1e3 * backward_s,
                1e-9 * t->flops / seconds, 1e-9 * t->bytes / seconds,
                100 * fmax(compute, memory) / seconds, compute > memory ? "compute" : "memory");
}

// Counts each row's work, and adds a fused row's, and its time, to the row that it is fused with.
static void join_fused(const Net *net, LayerTimes *times, size_t n) {
    for (size_t i = net->count - 1; i > 0; i--) { // an add that is fused may have a ReLU's already
        const Layer *l = &net->layers[i];
        LayerTimes *to = &times[l->input];
        count_work(l, is_fused(net, l), n, &times[i]);
        if (l->skipped || !is_fused(net, l))
            continue;
        to->bytes += times[i].bytes;
        for (size_t round = 0; round < LAYER_ROUNDS; round++) {
            to->forward[round] += times[i].forward[round];
            to->backward[round] += times[i].backward[round];
        }
    }
}

/* Each layer's time on a batch of training, medians over rounds, and how far it is from the limits
   of this machine. Rows that are fused with another one (a ReLU or an add) count with that one. */
static void measure_layers(Run *run) {
    Net *net = &run->net;
    LayerTimes *times = must_alloc(net->count * sizeof *times, "the layers' times");
    loader_start(&run->train_loader, run->settings.seed, run->epoch, run->next_batch);
    Batch batch = *loader_next(&run->train_loader);
    batch.n = min_size(batch.n, net->batch);
    time_rows(run, &batch, times);
    join_fused(net, times, batch.n);
    const double peak = 1e9 * net->backend->peak_gflops(), bandwidth = measure_bandwidth(net);
    FILE *csv = *run->settings.out ? create_csv(run->settings.out, "layers.csv") : NULL;
    printf("Layers, %zu images; this device: %.1f GFLOP/s, %.1f GB/s measured%s\n", batch.n,
           peak / 1e9, bandwidth / 1e9,
           run->device.emulated ? "; emulated, they mean nothing" : "");
    printf("  %-24s %-34s %9s %9s %8s %7s %6s  %s\n", "layer", "kind", "forward", "backward",
           "GFLOP/s", "GB/s", "%", "of which limit");
    if (csv)
        fprintf(csv, "layer,kind,out_shape,params,mflop,forward_ms,backward_ms,gflops,gb_per_s,"
                     "percent_of_peak,bound\n");
    for (size_t i = 1; i < net->count; i++) {
        const Layer *l = &net->layers[i];
        if (!l->skipped && !is_fused(net, l))
            print_layer(csv, l, i, &times[i], peak, bandwidth);
    }
    if (csv)
        flush_csv(csv, run->settings.out, "layers.csv");
    if (csv)
        fclose(csv);
    free(times);
}

// The lines of the CIFAR-10 tutorial.
static void print_per_class(const Run *run) {
    char room[32];
    for (size_t i = 0; i < run->net.classes; i++)
        if (isfinite(class_accuracy(run, i)))
            printf("Accuracy for class: %-5s is %.1f %%\n", class_name(&run->info, i, room),
                   class_accuracy(run, i));
        else
            printf("Accuracy for class: %-5s is unknown, no test image shows it\n",
                   class_name(&run->info, i, room));
}

/* ==== 14. train(), test(), main() ===============================================================

   The program itself. */

// ---- Where a run is, and its checkpoints

static bool training_is_over(const Run *run) {
    const Settings *s = &run->settings;
    return run->epoch > s->epochs || (s->max_steps && steps_done(run) >= s->max_steps);
}

// The position and the settings that shape the result, as lines "key=value".
static void describe_run(Run *run, char metadata[METADATA_SIZE]) {
    char room[64];
    size_t at = (size_t)snprintf(metadata, METADATA_SIZE, "epoch=%zu\nbatch=%zu\ndevices=%zu\n",
                                 run->epoch, run->next_batch, run->comm.world);
    for (size_t i = 0; i < OPTIONS; i++)
        if (options[i].result)
            at +=
                (size_t)snprintf(metadata + at, METADATA_SIZE - at, "%s=%s\n", options[i].name + 2,
                                 option_text(&run->settings, &options[i], room));
}

// The value of a line "key=value", in `room`; NULL if there is none.
static const char *metadata_value(const char *metadata, const char *key, char room[METADATA_SIZE]) {
    size_t length = strlen(key);
    for (const char *m = metadata; *m; m += strcspn(m, "\n") + 1)
        if (strncmp(m, key, length) == 0 && m[length] == '=') {
            snprintf(room, METADATA_SIZE, "%.*s", (int)strcspn(m + length + 1, "\n"),
                     m + length + 1);
            return room;
        }
    return NULL;
}

static void save_checkpoint(Run *run) {
    char metadata[METADATA_SIZE];
    if (run->comm.rank > 0)
        return;
    describe_run(run, metadata);
    save_tensors(&run->net, run->optimizer, run->state, metadata, run->settings.checkpoint);
}

// A whole number of the metadata; die() where there is none.
static size_t metadata_number(const TensorFile *f, const char *key) {
    char value[METADATA_SIZE];
    if (!metadata_value(f->metadata, key, value) || !*value || strlen(value) > 9 ||
        strspn(value, "0123456789") != strlen(value))
        die(1, "%s: expected the position of a run in its metadata, found no %s", f->header.path,
            key);
    return strtoul(value, NULL, 10);
}

static void compare_settings(Run *run, const TensorFile *f) {
    char room[64], value[METADATA_SIZE];
    if (metadata_number(f, "devices") != run->comm.world)
        die(EXIT_USAGE,
            "%s: expected %zu devices (--gpus, --replicas or MPI ranks), as it was made with, "
            "found "
            "%zu; or start from its weights with --load",
            f->header.path, metadata_number(f, "devices"), run->comm.world);
    for (size_t i = 0; i < OPTIONS; i++) {
        const char *ours = option_text(&run->settings, &options[i], room);
        const char *found = metadata_value(f->metadata, options[i].name + 2, value);
        if (options[i].result && (!found || strcmp(found, ours) != 0))
            die(EXIT_USAGE,
                "%s: its %s is \"%s\", this run's is \"%s\"; resume with the former, or "
                "start from its weights with --load",
                f->header.path, options[i].name, found ? found : "not there", ours);
    }
}

// Goes on from the checkpoint, if the settings that shape the result are the same.
static void resume_checkpoint(Run *run) {
    const char *path = run->settings.checkpoint;
    TensorFile f;
    const bool first = run->comm.rank == 0;
    if (access(path, F_OK) != 0) {
        if (first)
            printf("No checkpoint %s yet: starting afresh\n", path);
        return;
    }
    open_tensors(&f, path);
    run->epoch = metadata_number(&f, "epoch");
    run->next_batch = metadata_number(&f, "batch");
    compare_settings(run, &f);
    if (run->epoch == 0 || run->next_batch >= run->iterations)
        die(1, "%s: its metadata says epoch %zu, batch %zu: no such place", path, run->epoch,
            run->next_batch);
    read_tensors(&f, &run->net, run->optimizer, run->state);
    if (first)
        printf("Going on from %s: epoch %zu, step %zu\n", path, run->epoch, run->next_batch + 1);
}

static void update_weights(Run *run, size_t batch) {
    run->lr = learning_rate(&run->settings, run->epoch - 1, batch, run->iterations);
    if (!run->comm.dp || run->comm.rank == 0)
        optimizer_step(run->optimizer, &run->net, run->state, run->lr);
}

// Moves on by a step and saves the checkpoint when it is due; true: training ends here.
static bool finish_step(Run *run) {
    const Settings *s = &run->settings;
    trace_step(run);
    bool epoch_over = ++run->next_batch == run->iterations;
    if (epoch_over) {
        run->epoch++;
        run->next_batch = 0;
    }
    bool due = run->save_steps ? steps_done(run) % run->save_steps == 0
                               : epoch_over && (run->epoch - 1) % run->save_epochs == 0;
    if (*s->checkpoint && due && !s->dry_run)
        save_checkpoint(run);
    begin_traced_step(run);
    return s->dry_run || training_is_over(run);
}

static void start_epoch(Run *run) {
    begin_traced_step(run);
    if (run->train_loader.data) // dp: the master's
        loader_start(&run->train_loader, run->settings.seed, run->epoch, run->next_batch);
}

/* One epoch. AT(part, what) does `what` and charges its time to this line of the profile and to
   this part of the step, a column of steps.csv. */
#define AT(part, ...)                                                                           \
    (clock_line(&run->clock, __LINE__, &run->steps[run->steps_kept].parts[part], #__VA_ARGS__), \
     __VA_ARGS__)

static void train(Run *run, EpochResult *result) {
    Net *net = &run->net;
    Comm *comm = &run->comm;
    const Batch *batch;
    double loss;
    AT(IDLE, start_epoch(run));
    while (AT(LOAD, batch = next_batch(comm))) {
        AT(COPY, load_batch(comm, batch));
        AT(FORWARD, forward(net, batch->n, &batch->draw));
        AT(FORWARD, loss = batch_loss(comm, batch));
        AT(IDLE, check_loss(net, batch, loss));
        AT(BACKWARD, backward(net, batch->n));
        AT(EXPOSED_COMM, reduce_gradients(comm));
        AT(OPTIMIZER, update_weights(run, batch->number));
        AT(IDLE, log_step(run, result, batch, loss));
        if (AT(IDLE, finish_step(run)))
            break;
    }
    AT(IDLE, finish_epoch(run, result));
    clock_line(&run->clock, 0, NULL, NULL);
    trace_rank(run, false);
}

// Tests this rank's share of the test set; the result is that of all.
static void test(Run *run, EpochResult *result) {
    Net *net = &run->net;
    const Batch *batch;
    const size_t cells = net->classes * net->classes;
    double begin = now(), *totals = run->totals; // loss, images, right ones, confusion
    memset(run->confusion, 0, cells * sizeof *run->confusion);
    memset(totals, 0, 3 * sizeof *totals);
    share_weights(&run->comm);
    loader_start(&run->test_loader, run->settings.seed, 0, 0);
    while ((batch = loader_next(&run->test_loader))) {
        net_load(net, batch);
        forward(net, batch->n, NULL);
        totals[0] += loss_and_gradient(net, batch->n, false) * (double)batch->n;
        totals[1] += (double)batch->n;
        totals[2] += (double)count_predictions(net, batch, run->confusion);
        if (run->settings.dry_run)
            break;
    }
    for (size_t i = 0; i < cells; i++)
        totals[3 + i] = (double)run->confusion[i];
    sum_over_ranks(&run->comm, totals, 3 + cells, totals + 3 + cells);
    for (size_t i = 0; i < cells; i++)
        run->confusion[i] = (size_t)totals[3 + i];
    result->test_loss = totals[0] / totals[1];
    if (!isfinite(result->test_loss))
        die(1, "the test loss is %g: the weights have grown beyond all numbers; try a smaller --lr",
            result->test_loss);
    result->accuracy = 100. * totals[2] / totals[1];
    result->test_seconds = now() - begin;
    if (!run->model->sc20_log && run->comm.rank == 0)
        printf("\nTest set: Average loss: %.4f, Accuracy: %.0f/%.0f (%.0f%%)\n\n",
               result->test_loss, totals[2], totals[1], result->accuracy);
}

static void parse_save_every(Run *run) {
    const char *text = run->settings.save_every;
    size_t digits = strspn(text, "0123456789"), number = strtoul(text, NULL, 10);
    bool steps = strcmp(text + digits, "steps") == 0;
    if (digits == 0 || digits > 9 || number == 0 || (text[digits] && !steps))
        die(EXIT_USAGE, "--save-every: expected epochs, as 2, or steps, as 100steps, found \"%s\"",
            text);
    *(steps ? &run->save_steps : &run->save_epochs) = number;
}

// What the table of options cannot say by itself.
static void check_settings(const Settings *s) {
    const char *m = s->milestones;
    bool list = true;
    while (list && *m) {
        size_t digits = strspn(m, "0123456789");
        list = digits > 0 && digits < 10 && (m[digits] == 0 || (m[digits] == ',' && m[digits + 1]));
        m += digits + (m[digits] == ',');
    }
    if (!list || (strcmp(s->schedule, "multistep") == 0) != (*s->milestones != 0))
        die(EXIT_USAGE,
            "--milestones: expected epochs as 60,120,160, and --schedule multistep, "
            "found \"%s\" and %s",
            s->milestones, s->schedule);
    if (s->warmup_epochs >= s->epochs && s->warmup_epochs > 0)
        die(EXIT_USAGE, "--warmup-epochs: expected fewer than the %zu --epochs, found %zu",
            s->epochs, s->warmup_epochs);
    if (s->nesterov && (s->momentum == 0 || strcmp(s->optimizer, "sgd") != 0))
        die(EXIT_USAGE,
            "--nesterov: expected --optimizer sgd and a --momentum above 0, found %s "
            "and %g",
            s->optimizer, s->momentum);
    if (s->momentum > 0 && strcmp(s->optimizer, "sgd") != 0)
        die(EXIT_USAGE,
            "--momentum: expected --optimizer sgd, found %s; where the model's defaults "
            "bring it, add --momentum 0 and an --lr",
            s->optimizer);
    if ((s->resume || strcmp(s->save_every, "1") != 0) && !*s->checkpoint)
        die(EXIT_USAGE, "%s: expected --checkpoint FILE too, found none",
            s->resume ? "--resume" : "--save-every");
    if (s->eval && *s->checkpoint && !s->resume && !*s->load)
        die(EXIT_USAGE, "--eval: expected --resume or --load too, which read weights; --checkpoint "
                        "alone only writes them");
    if (s->gpus > 1 && s->replicas > 1)
        die(EXIT_USAGE, "--gpus and --replicas: expected one of them, found both: --replicas are "
                        "for the CPU");
    if (s->resume && *s->load)
        die(EXIT_USAGE,
            "--resume: expected no --load with it: both say where the weights come from");
}

// What the first rank alone does: files and reports.
static void be_silent(Settings *s) {
    s->out = "";
    s->save_model = s->per_class = s->profile = s->layers = false;
}

/* Who the ranks are: processes, if a launcher started this one as one of several, else threads. The
   first rank alone speaks and writes files. */
static void setup_ranks(Run *run) {
    Settings *s = &run->settings;
    Comm *c = &run->comm;
    c->settings = s;
    c->world = max_size(max_size(s->gpus, s->replicas), 1);
    s->no_cuda |= s->replicas > 1;
    bool launched = join_launcher(c);
    c->dp = c->world > 1 && strcmp(s->parallel, "dp") == 0;
    if (launched && (s->gpus > 1 || s->replicas > 1 || c->dp))
        die(EXIT_USAGE,
            "one rank of %zu, started by MPI: expected --parallel ddp and neither "
            "--gpus nor --replicas; each rank has one device",
            c->world);
    if (c->world > 1 && !launched) {
        c->team = must_alloc(sizeof *c->team, "the ranks");
        team_init(c->team);
    }
    if (c->rank > 0)
        be_silent(s);
    run->lines = s->quiet ? fdopen(dup(STDOUT_FILENO), "w") : stdout;
    if ((c->rank > 0 || s->quiet) && (!run->lines || !freopen("/dev/null", "w", stdout)))
        file_fail("cannot open", "/dev/null");
}

// What a step takes: on all devices (--global-batch) and on each (--batch-size, under dp its part).
static void setup_batch(Run *run) {
    Settings *s = &run->settings;
    const size_t world = run->comm.world;
    if (!s->global_batch)
        s->global_batch = run->comm.dp ? s->batch_size : s->batch_size * world;
    else if (!run->comm.dp && s->global_batch % world != 0)
        die(EXIT_USAGE, "--global-batch: expected a multiple of the %zu devices, as %zu, found %zu",
            world, ceil_div(s->global_batch, world) * world, s->global_batch);
    s->batch_size = run->comm.dp ? s->global_batch : s->global_batch / world;
    run->batch = ceil_div(s->global_batch, world);
}

// Resolves what the options left open.
static void setup_settings(Run *run, int argc, char **argv) {
    Settings *s = &run->settings;
    parse_options(s, argc, argv);
    check_settings(s);
    setup_ranks(run);
    parse_save_every(run);
    parse_trace_steps(run);
    run->argc = argc;
    run->argv = argv;
    run->model = find_model(s->model);
    for (size_t i = 0; i < OPTIMIZERS; i++)
        if (strcmp(optimizers[i].name, s->optimizer) == 0)
            run->optimizer = &optimizers[i];
    setup_batch(run);
    if (s->lr == 0)
        s->lr = run->optimizer->lr;
    if (strcmp(s->lr_scaling, "none") != 0) {
        Settings usual;
        parse_all(&usual, run->model, 0, NULL);
        double factor = (double)s->global_batch / (double)usual.batch_size;
        s->lr *= strcmp(s->lr_scaling, "sqrt") == 0 ? sqrt(factor) : factor;
    }
    if (s->limit_train == 0)
        s->limit_train = UINT32_MAX;
    if (s->limit_test == 0)
        s->limit_test = UINT32_MAX;
    if (s->threads == 0)
        s->threads = min_size(usable_cores(), MAX_THREADS);
    size_t slurm = number_in_environment("SLURM_CPUS_PER_TASK");
    if (s->workers == 0)
        s->workers = min_size(max_size(slurm / (run->comm.team ? run->comm.world : 1), 1), 256);
    if (s->workers > usable_cores())
        fprintf(stderr,
                "cnn: warning: --workers %zu, but only %zu cores are usable: they will "
                "wait for each other\n",
                s->workers, usable_cores());
    if (run->comm.team)
        s->threads = max_size(1, s->threads / run->comm.world);
    omp_set_num_threads((int)s->threads);
}

// Backend i of the device, the best one last; NULL behind it.
static const Backend *backend_of(bool cuda, size_t i) {
    return cuda ? cuda_backend(i) : i < CPU_BACKENDS ? &backends[i] : NULL;
}

static void use_gpu(Run *run) {
    const Comm *c = &run->comm;
    cuda_use_device(c->replica, c->device, die);
    cuda_describe(&run->device);
    run->device.memory /= (double)(c->team ? ceil_div(c->world, run->devices) : 1);
}

// This rank's device: a GPU, if there is one and --no-cuda is not given, else the CPU.
static void choose_device(Run *run, bool cuda, size_t devices) {
    Comm *c = &run->comm;
    const Settings *s = &run->settings;
    size_t here = c->team ? c->world : 1; // ranks of this process
    run->devices = devices;
    if (here > devices && !s->oversubscribe)
        die(EXIT_USAGE,
            "%s %zu: expected at most %zu, as many as there are here; --oversubscribe lets several "
            "share one, to try things out",
            s->gpus > 0 ? "--gpus" : "--replicas", c->world, devices);
    run->device.memory = memory_bytes() / (double)here;
    snprintf(run->device.name, sizeof run->device.name, "cpu");
    if (!cuda)
        return;
    c->device %= devices;
    use_gpu(run);
}

// The devices and their --kernels.
static void setup_device(Run *run) {
    Settings *s = &run->settings;
    const char *why_not = s->replicas > 1 ? "--replicas" : "--no-cuda";
    size_t devices = s->no_cuda ? 0 : cuda_device_count(&why_not);
    char known[64] = "";
    bool cuda = devices > 0;
    if (s->gpus > 0 && !cuda)
        die(EXIT_USAGE, "--gpus %zu: found no GPU (%s); --replicas %zu does the same on the CPU",
            s->gpus, why_not, s->gpus);
    s->gpus = cuda ? max_size(s->gpus, 1) : 0;
    choose_device(run, cuda, cuda ? devices : usable_cores());
    for (size_t i = 0; backend_of(cuda, i); i++) {
        const Backend *b = backend_of(cuda, i);
        size_t length = strlen(known);
        if (strcmp(s->kernels, "fast") == 0 || strcmp(s->kernels, b->kernels) == 0)
            run->backend = b;
        if (strcmp(b->kernels, "fast") != 0)
            snprintf(known + length, sizeof known - length, "%s, ", b->kernels);
    }
    if (!run->backend)
        die(EXIT_USAGE, "--kernels %s: expected %sfast on this device (%s)", s->kernels, known,
            run->device.name);
    s->kernels = run->backend->kernels; // what "fast" means here: checkpoints compare it
    printf("Device: %s%s%s%s, --kernels %s, --threads %zu, --workers %zu\n", run->device.name,
           cuda ? "" : " (", cuda ? "" : why_not, cuda ? "" : ")", run->backend->kernels,
           s->threads, s->workers);
    if (run->device.emulated)
        printf("Emulated: CUDA code on the CPU. Results are right, times mean nothing.\n");
}

static void print_machine(void) {
    char cpu[256], host[256] = "";
    cpu_name(cpu, sizeof cpu);
    gethostname(host, sizeof host - 1);
    printf("Machine: %s, %s, %zu usable cores, %.1f GB memory\n", host, cpu, usable_cores(),
           memory_bytes() / 1e9);
    printf("Build: %s, vectors of %d numbers, %s, commit %s\n", COMPILER, (int)LANES, OPENMP_WORD,
           CNN_COMMIT);
}

static void load_dataset(Run *run, const char *name, const char *dir) {
    Settings *s = &run->settings;
    Dataset *sets[2] = {&run->train_set, &run->test_set};
    size_t *limits[2] = {&s->limit_train, &s->limit_test};
    bool synthetic = strcmp(name, "synthetic") == 0;
    printf("Data: %s %s%s\n", name, synthetic ? "(images made by cnn itself)" : "from ",
           synthetic ? "" : dir);
    run->info = dataset_for(run->model, name);
    for (size_t i = 0; i < 2; i++) {
        sets[i]->info = &run->info;
        if (synthetic)
            make_synthetic(sets[i], i == 0, *limits[i]);
        else
            run->info.read(sets[i], dir, run->info.files[i], *limits[i]);
        *limits[i] = sets[i]->count;
    }
    s->dataset = run->info.name;
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
        name, find_dataset_info(name)->files[0][0],
        *s->data ? "the folder --data "
                 : "./data, beside ./cnn and in "
                   "/usr/share/datasets",
        s->data, name);
}

static double map_bytes(const Net *net) { // of the fast kernels' pixel maps
    double entries = 0;
    for (size_t i = 0; net->backend->prepare && i < net->count; i++) {
        const Layer *l = &net->layers[i];
        if (l->kind == CONV2D || l->kind == LINEAR)
            entries +=
                (double)((l->out.h * l->out.w + l->in.h * l->in.w) * (1 + l->kernel * l->kernel));
    }
    return entries * sizeof(int32_t);
}

enum { LEDGER_ROWS = 11 };

typedef struct LedgerRow {
    const char *what;
    double device, host; // bytes; on a CPU all count as the device's
} LedgerRow;

// What a run with this network takes, category by category; returns the sum on the device.
static double fill_ledger(const Run *run, const Net *net, LedgerRow rows[LEDGER_ROWS]) {
    const Settings *s = &run->settings;
    const bool gpu = run->backend->transfer != NULL, streamed = gpu && !run->resident;
    const double number = sizeof(real), params = number * (double)net->param_size;
    const double image = (double)shape_size(run->info.shape);
    const double data = (double)(run->train_set.count + run->test_set.count) * (image + 1);
    const double buffers = map_bytes(net) + 2 * number * (double)net->host_size;
    const double images = (2 * (double)s->workers + 1) * // of the rings of both loaders
                          (double)(min_size(net->batch, run->train_set.count) +
                                   min_size(net->batch, s->test_batch_size));
    const double rings = images * (run->resident ? 1 : number * image + 1);
    const LedgerRow ledger[LEDGER_ROWS] = {
        {"parameters", params, 0},
        {"gradients", params, 0},
        {"optimizer state", params * (double)count_states(run->optimizer, s), 0},
        {"activations", number * (double)net->activation_size, 0},
        {"activation gradients", number * (double)net->gradient_size, 0},
        {"statistics and masks", number * (double)net->stats_size + (double)net->saved_size, 0},
        {"scratch", number * (double)net->scratch_size, 0},
        {"maps and buffers", gpu ? 0 : buffers, gpu ? buffers : 0},
        {"communication", gpu && run->comm.world > 1 ? params : 0, 0},
        {"loader", gpu && !streamed ? 0 : rings, gpu ? rings : 0},
        {"data set", streamed ? 0 : data, gpu ? data : 0},
    };
    double device = 0;
    for (size_t i = 0; i < LEDGER_ROWS; i++) {
        rows[i] = ledger[i];
        device += ledger[i].device;
    }
    return device;
}

/* Whether the data set becomes resident on the device: if that leaves a tenth of its memory free,
   or takes less than the rings that it saves. Returns the bytes on the device. */
static double choose_resident(Run *run, const Net *net, LedgerRow rows[LEDGER_ROWS]) {
    run->resident = false;
    double streamed = fill_ledger(run, net, rows);
    run->resident = run->settings.resident && run->backend->gather && !run->comm.dp;
    double device = fill_ledger(run, net, rows);
    if (device < .9 * run->device.memory || device < streamed)
        return device;
    run->resident = false;
    return fill_ledger(run, net, rows);
}

// The largest batch whose run fits on the device; 0: none does
static size_t batch_that_fits(Run *run) {
    static Net trial; // too large for the stack
    LedgerRow rows[LEDGER_ROWS];
    size_t fits = 0, too_large = run->net.batch;
    while (too_large - fits > 1) {
        size_t middle = (fits + too_large) / 2;
        net_build(&trial, run->model, &run->info, &run->settings, run->backend);
        plan_memory(&trial, middle);
        *(choose_resident(run, &trial, rows) <= run->device.memory ? &fits : &too_large) = middle;
    }
    return fits;
}

// Prints the ledger before anything is allocated, and refuses what cannot fit.
static void plan_run_memory(Run *run) {
    LedgerRow rows[LEDGER_ROWS];
    double host = 0, device = choose_resident(run, &run->net, rows);
    if (run->comm.rank > 0)
        return;
    printf("Memory in MB%s:", run->comm.world > 1 ? " of each device" : "");
    for (size_t i = 0; i < LEDGER_ROWS; i++) {
        printf(" %s %.1f,", rows[i].what, (rows[i].device + rows[i].host) / 1e6);
        host += rows[i].host;
    }
    printf(" together %.1f\n", (device + host) / 1e6);
    if (host > memory_bytes())
        die(1,
            "not enough memory: %.1f MB needed, this machine has %.1f MB; use fewer --workers or "
            "a smaller --batch-size",
            host / 1e6, memory_bytes() / 1e6);
    if (device > run->device.memory) {
        size_t fits = batch_that_fits(run), parts = run->comm.dp ? run->comm.world : 1;
        char remedy[80] = "even one image at a time does not fit; try a smaller network";
        if (fits > 0)
            snprintf(remedy, sizeof remedy, "expected a --batch-size of at most %zu, found %zu",
                     fits * parts, run->net.batch * parts);
        die(1, "not enough memory: %.1f MB needed, %.1f MB there on this device (%s); %s",
            device / 1e6, run->device.memory / 1e6, run->device.name, remedy);
    }
    if (run->backend->transfer)
        printf("On the device: %.1f MB; the data set %s\n", device / 1e6,
               run->resident ? "lies there, too" : "is copied there batch by batch");
}

static void setup_network(Run *run) {
    Settings *s = &run->settings;
    Net *net = &run->net;
    size_t images = max_size(run->train_set.count, run->test_set.count);
    net_build(net, run->model, &run->info, s, run->backend);
    plan_memory(net, min_size(run->batch, images));
    if (run->comm.rank == 0)
        print_summary(net);
    plan_run_memory(run);
    net_alloc(net);
    run->state =
        real_alloc(net, count_states(run->optimizer, s) * net->param_size, "the optimizer");
    run->confusion =
        must_alloc(net->classes * net->classes * sizeof *run->confusion, "the confusion matrix");
    run->totals =
        must_alloc((1 + run->comm.world) * (3 + net->classes * net->classes) * sizeof *run->totals,
                   "the sums of a test");
}

static void setup_loaders(Run *run) {
    Settings *s = &run->settings;
    const Comm *c = &run->comm;
    Placement place = {run->backend,  c->device, s->pin_memory && run->backend->transfer,
                       run->resident, c->rank,   c->world - 1};
    Placement train_place = place;
    size_t augmentation = 0, share = ceil_div(run->train_set.count, c->world);
    while (strcmp(augmentations[augmentation].name, s->augment) != 0)
        augmentation++;
    if (c->dp) { // the master loads for all
        train_place.others = 0;
        share = run->train_set.count;
    }
    if (!c->dp || c->rank == 0)
        loader_init(&run->train_loader, &run->train_set, min_size(s->batch_size, share), s->workers,
                    augmentations[augmentation].augment, train_place);
    loader_init(&run->test_loader, &run->test_set, min_size(s->test_batch_size, run->net.batch),
                s->workers, NULL, place);
    run->iterations = ceil_div(share, s->batch_size);
    run->steps_room = min_size(s->log_interval, run->iterations) + 1;
    run->all_steps = must_alloc(c->world * run->steps_room * sizeof *run->steps, "the step log");
    run->steps = run->all_steps + c->rank * run->steps_room;
    run->epochs = must_alloc(s->epochs * sizeof *run->epochs, "the epoch log");
    run->clock.backend = run->net.backend;
    run->clock.synchronize = s->profile;
    run->clock.rank = c->rank;
    plan_trace(run);
}

// Where --save-model puts the weights.
static void model_path(const Run *run, char path[PATH_SIZE]) {
    if (*run->settings.out)
        join_path(path, run->settings.out, "model.safetensors");
    else
        snprintf(path, PATH_SIZE, "%s_cnn.safetensors", run->model->name);
}

// The weights to begin with, and where: fresh ones, those of --load, or a checkpoint's.
static void setup_weights(Run *run) {
    Settings *s = &run->settings;
    char path[PATH_SIZE];
    model_path(run, path);
    if (s->save_model)
        check_writable(path);
    if (*s->trace && run->comm.rank == 0)
        check_writable(s->trace);
    if (*s->checkpoint && !s->eval && run->comm.rank == 0)
        check_writable(s->checkpoint);
    run->epoch = 1;
    net_init(&run->net, s->seed);
    if (*s->load) {
        load_weights(&run->net, s->load);
        if (run->comm.rank == 0)
            printf("Loaded the weights in %s\n", s->load);
    }
    if (s->resume)
        resume_checkpoint(run);
}

static void write_profile(Run *run) {
    clock_settle_all(&run->clock);
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
    model_path(run, path);
    save_tensors(&run->net, NULL, NULL, "", path);
    printf("Saved the weights to %s\n", path);
}

static void free_rank(Run *run) {
    if (run->train_loader.data)
        loader_free(&run->train_loader);
    loader_free(&run->test_loader);
    comm_free(&run->comm);
    run->net.backend->release(run->state);
    net_free(&run->net);
    free(run->confusion);
    free(run->totals);
    free(run->all_steps);
    free(run->epochs);
}

static void close_run(Run *run) {
    write_trace(run);
    print_resources(now() - run->started);
    flush_stdout();
    write_run_json(run);
    before_dying = NULL;
    free_rank(run);
    free_dataset(&run->train_set);
    free_dataset(&run->test_set);
    free(run->comm.team);
    if (run->steps_csv)
        fclose(run->steps_csv);
    if (run->epochs_csv)
        fclose(run->epochs_csv);
    leave_launcher();
}

// The test alone, reported as epoch 0: --eval, or no training left to do
static void evaluate(Run *run) {
    EpochResult result = {.epoch = 0};
    test(run, &result);
    report_epoch(run, &result);
    run->status = "complete";
}

// Epochs of training, each with a test, from where the run is to where it shall end.
static void train_epochs(Run *run) {
    const Settings *s = &run->settings;
    if (training_is_over(run))
        evaluate(run);
    while (!training_is_over(run)) {
        EpochResult result = {.epoch = run->epoch};
        run->epoch_started = run->log_started = now();
        train(run, &result);
        result.seconds = now() - run->epoch_started;
        test(run, &result);
        report_epoch(run, &result);
        if (s->dry_run)
            break;
    }
    if (*s->checkpoint && !s->dry_run)
        save_checkpoint(run);
    run->status = run->epoch <= s->epochs && !s->dry_run ? "stopped" : "complete";
}

typedef struct RankPlace {
    char host[64], device[256], uuid[48];
} RankPlace;

// Two processes on one GPU: most likely a mistake in how they were started.
static void refuse_shared_gpus(const Comm *c, const RankPlace *places) {
    for (size_t r = 0; r < c->world && !c->team && !c->settings->oversubscribe; r++)
        for (size_t k = 0; k < r; k++)
            if (*places[r].uuid && strcmp(places[r].uuid, places[k].uuid) == 0 &&
                strcmp(places[r].host, places[k].host) == 0)
                die(EXIT_USAGE,
                    "ranks %zu and %zu share a GPU of %s: expected one for each rank; start fewer, "
                    "or add --oversubscribe to try things out",
                    k, r, places[r].host);
}

// Which device each rank has, as all see it.
static void print_ranks(Run *run) {
    Comm *c = &run->comm;
    if (c->world == 1)
        return;
    RankPlace *places = must_alloc(c->world * sizeof *places, "the list of ranks");
    RankPlace *mine = &places[c->rank];
    const char *node = getenv("SLURMD_NODENAME"); // by which its users know the machine
    gethostname(mine->host, sizeof mine->host - 1);
    if (node)
        snprintf(mine->host, sizeof mine->host, "%.60s", node);
    snprintf(mine->device, sizeof mine->device, "%.250s", run->device.name);
    snprintf(mine->uuid, sizeof mine->uuid, "%s", run->device.uuid);
    all_gather(c, places, sizeof *places);
    refuse_shared_gpus(c, places);
    for (size_t r = 0; r < c->world && c->rank == 0; r++)
        printf("Rank %zu: %s, %s%s%s\n", r, places[r].host, places[r].device,
               *places[r].uuid ? ", " : "", places[r].uuid);
    if (c->rank == 0)
        printf("Gradients: %s, added up by %s\n", run->settings.parallel,
               c->dp          ? "the master"
               : uses_nccl(c) ? "NCCL"
               : c->team      ? "a ring of threads"
                              : "a ring of MPI processes");
    free(places);
}

// Ranks that are processes have command lines and files of their own.
static void compare_settings_of_ranks(Run *run) {
    Settings *s = &run->settings;
    char metadata[METADATA_SIZE];
    describe_run(run, metadata);
    uint64_t hash = hash_bytes(0, metadata, strlen(metadata));
    const size_t others[] = {s->epochs, s->max_steps,  s->log_interval, s->test_batch_size,
                             s->eval,   s->limit_test, s->dry_run};
    compare_ranks(&run->comm, "settings, or another place in the run",
                  hash_bytes(hash, others, sizeof others));
    compare_ranks(&run->comm, "weights", hash_weights(&run->net));
}

// What every rank does, once the settings and the data are there.
static void run_rank(Run *run) {
    setup_network(run);
    setup_loaders(run);
    comm_init(&run->comm, &run->net, &run->train_loader);
    print_ranks(run);
    setup_weights(run);
    compare_settings_of_ranks(run);
    if (run->comm.rank == 0) {
        open_logs(run);
        print_settings(&run->settings);
    }
    if (run->settings.eval)
        evaluate(run);
    else
        train_epochs(run);
}

static void *replica_main(void *argument) {
    Run *run = argument;
    omp_set_num_threads((int)run->settings.threads);
    if (run->backend->transfer)
        use_gpu(run);
    run_rank(run);
    free_rank(run);
    return NULL;
}

// Runs all ranks of this process: rank 0 here, each other one in a thread of its own.
static void run_ranks(Run *run) {
    size_t threads = run->comm.team ? run->comm.world - 1 : 0;
    Run *replicas = must_alloc(threads * sizeof *replicas, "the replicas");
    pthread_t ids[MAX_REPLICAS];
    for (size_t i = 0; run->comm.team && i <= threads; i++) {
        Run *rank = i == 0 ? run : &replicas[i - 1];
        if (i > 0)
            *rank = *run;
        rank->comm.settings = &rank->settings;
        rank->comm.rank = rank->comm.replica = i;
        run->comm.team->ranks[i] = &rank->comm;
    }
    for (size_t i = 0; i < threads; i++) {
        be_silent(&replicas[i].settings);
        replicas[i].comm.device = (i + 1) % run->devices;
        if (pthread_create(&ids[i], NULL, replica_main, &replicas[i]) != 0)
            die(1, "cannot start a thread for rank %zu", i + 1);
    }
    run_rank(run);
    for (size_t i = 0; i < threads; i++)
        pthread_join(ids[i], NULL);
    free(replicas);
}

static int run_main(int argc, char **argv) {
    static Run run; // zeroed; too large for the stack
    run.started = now();
    setup_settings(&run, argc, argv);
    print_machine();
    setup_device(&run);
    open_run_folder(&run);
    setup_data(&run);
    run_ranks(&run);
    if (run.settings.per_class)
        print_per_class(&run);
    if (run.settings.profile)
        write_profile(&run);
    if (run.settings.save_model)
        write_model(&run);
    if (run.settings.layers)
        measure_layers(&run);
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
#ifdef __AVX512BW__
    NEED_CPU("avx512bw")
#endif
#ifdef __AVX512DQ__
    NEED_CPU("avx512dq")
#endif
#ifdef __AVX512VL__
    NEED_CPU("avx512vl")
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
