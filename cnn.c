/* cnn.c - trains a convolutional neural network, without a deep-learning framework.

   One C file. It loads images, runs them through a network, computes every gradient, updates the
   weights and reports where the time went.

     make run                         trains the MNIST network for one epoch on this machine
     make                             builds ./cnn, with GPU support if nvcc is installed
     ./cnn --epochs 3 --workers 2     the options of the PyTorch MNIST example, and more
     ./cnn --help                     lists all of them
     gcc -O2 -fopenmp cnn.c -o cnn -lm -lpthread     builds it without make; cnn.c includes
                                                     cnn_kernels.c if it is in the same folder

   You should see the network layer by layer, then lines like
     Train Epoch: 1 [640/60000 (1%)]	Loss: 1.233434
   and after the epoch the accuracy on the test set: about 89 % on Fashion-MNIST, 98 % on MNIST.

   The sections, in reading order:
      1 Layers and operands        what a layer is, what it works on; random numbers
      2 Layers on the CPU          the definition of each, forward and backward
      3 Devices and helpers        settings, data, devices and kernels; errors, memory, files
      4 Network                    the layer table and its builders, memory plan, summary
      5 Models                     the networks themselves
      6 Forward and backward       the walk over the layer table; the loss
      7 Optimizers and schedules   and the CPU as a device, with its tables of kernels
      8 Datasets                   reading images from untrusted files; synthetic images
      9 Loader                     worker threads that prepare the next batches
     10 Data parallelism           replicas that train together: ring all-reduce, ddp, dp, MPI
     11 Checkpoints                weights in PyTorch's names and layouts
     12 Options and the run        one table: parser, --help and settings; the state of a run
     13 Instruments                line profile, machine, run folder, trace, layer times
     14 Setting up                 saving and resuming, ranks, devices, data, memory, weights
     15 train(), test(), main()

   A section builds on the sections before it. Apart from types to which there are only pointers,
   three names are declared before they are defined:
     die()                used by students' stubs in section 2, defined in section 3
     naive_kernels        used in section 4, defined in section 7
     cpu_peak_gflops()    used in section 7, defined in cnn_kernels.c
   Sections 1 to 7 plan a training step and compute it; 8 to 11 provide the images, run the step on
   several devices and store the weights; 12 to 14 are options, measurements and setup. For an
   overview, read train() in section 15 first. The fast kernels, for CPUs in cnn_kernels.c and for
   GPUs in cnn_kernels.cu, are not needed to understand this file.

   What the program leaves out: there are no general tensors and there is no automatic
   differentiation. It only classifies images, from one of four data sets or generated. Several
   devices divide the data among themselves, never the network. It runs on Linux. It trusts the user
   who runs it, but not the files it reads.

   Pairs of comments that begin with LAB and a number enclose code that students write themselves
   in an exercise: 1.2 is exercise 2 of lab 1. On a first reading, ignore them.

   Tags mark the places that tutorials refer to; grep finds them, here and in cnn_kernels.cu:
     # AMP     mixed precision      # NHWC    memory layouts
     # PROF    ranges for Nsight    # EXTRA   what frameworks add to a plain step */

/* ==== 1. Layers and operands =====================================================================

   This section says what a layer is, what it works on, and how random numbers are drawn. A network
   is a table of layers (section 4): each row is a layer, which reads the output of one earlier row,
   or of two. Images are stored NHWC: image, row, column, channel, with the channels innermost.
   Weights are stored [filter row][filter column][input channel][output channel]. cnn_kernels.cu,
   which is compiled separately, defines CNN_DECLARATIONS_ONLY and includes this file: it then sees
   only this section and the first half of section 3. */

#define _GNU_SOURCE 1 // for sched_getaffinity(); g++ predefines it
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined __CUDACC__ || defined __HIP__
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
    GLOBAL_AVGPOOL2D,
    ADD,
    DROPOUT,
    LINEAR,
    LOG_SOFTMAX,
    KINDS // the number of kinds
} LayerKind;

// The height, width and channels of one image
typedef struct Shape {
    size_t h, w, c;
} Shape;

static inline size_t shape_size(Shape s) {
    return s.h * s.w * s.c;
}

// Returns a / b, rounded up.
static inline size_t ceil_div(size_t a, size_t b) {
    return (a + b - 1) / b;
}

/* A layer is one row of the layer table. It holds what the layer's formula needs, and where its
   parameters are. The row's RowPlan (section 4) says where the layer's other arrays are and which
   kernels compute the layer. */
typedef struct Layer {
    LayerKind kind;
    char name[48]; // PyTorch's name of the layer, such as "conv1"; empty without parameters
    size_t input;  // the row that it reads
    size_t other;  // add: the second row that it reads
    Shape in, out; // a linear layer reads 1 x 1 x (h * w * c)
    size_t kernel_size, stride, padding; // conv2d, maxpool2d: the window; linear: 1, 1, 0
    real p;                              // dropout: the probability that an element becomes 0
    size_t weight_count, bias_count;     // batchnorm2d: gamma and beta
    size_t weight_offset, bias_offset;   // into params and grads, in elements
} Layer;

// Returns whether a layer multiplies its input by a matrix of weights.
static inline HOST_DEVICE bool has_weight_matrix(const Layer *l) {
    return l->kind == CONV2D || l->kind == LINEAR;
}

// ---- Operands

typedef struct RandomKey RandomKey; // below
typedef struct LossScale LossScale; // for GPUs; defined in section 3

// The rows of a batchnorm2d's statistics; a row has one number for each channel. A forward pass in
// training computes the last two rows, and the backward pass reads them.
enum { RUNNING_MEAN, RUNNING_VARIANCE, BATCH_MEAN, BATCH_INVERSE_STD, STATS_ROWS };

/* For the fast kernels; skip it on a first reading. The kernels of a row may compute later rows in
   the same pass, if nothing else reads the results in between (operator fusion):
     out = pool(relu(op(in) + residual))
   A Fusion says which later rows they compute. The definitions in section 2 fuse nothing. */
typedef struct Fusion {
    bool add;                 // the sum with a residual
    bool relu;                // the ReLU
    const Layer *pool;        // the max-pool, or NULL
    bool relu_backward;       // the backward pass begins with the fused ReLU's
    bool input_relu_backward; // the backward pass ends with the preceding ReLU's
    // conv2d: the batchnorm2d that follows, for which this row stores sums; batchnorm2d: the conv2d
    // that has stored them; NULL if no sums are stored
    const Layer *moments_partner;
} Fusion;

/* The arrays and flags with which a row is computed in one step. The prefix d denotes the gradient
   of the loss. The forward pass reads in, residual, weight and bias; it sets out, stats and saved.
   The backward pass reads dout and all of these arrays. It sets dweight and dbias. It sets din, or
   adds to din if accumulate is true; accumulate_residual says the same about dresidual.

   With --precision bf16 or fp16, the arrays in, residual, out, dout and din, and the weight of a
   convolution or linear layer, hold 16-bit numbers despite their declared type. The out and dout of
   log_softmax stay 32-bit. */
typedef struct Work {
    const Layer *l;
    size_t row;                // the layer's number in the table
    size_t n;                  // images of this batch
    const real *in, *residual; // residual is NULL if nothing is added
    const real *weight, *bias; // bias is NULL if there is none
    real *out, *dout, *din;    // din is NULL if it is not needed
    real *dresidual;           // NULL if it is not needed or shares the memory of dout
    real *dweight, *dbias;
    real *stats;              // batchnorm2d: [STATS_ROWS][channels]
    uint8_t *saved;           // argmax of a max-pool, mask of a dropout
    real *scratch;            // as many numbers as the kernels' scratch_size() returns
    const RandomKey *key;     // in the device's memory; NULL in evaluation and in backward passes
    bool accumulate;          // another reader of the input has already written din
    bool accumulate_residual; // another reader of the residual has already written dresidual
    // for the fast kernels; skip it on a first reading
    Fusion fused;
    real *moments;     // sums that a conv2d stores for the batchnorm2d that follows it
    void *transposed;  // --layout nchw: transposed_size() elements; otherwise NULL
    Shape unflattened; // the shape of in, before a linear layer flattens it
    void *prepared;    // what the kernels keep for this row; zeroed, then set up by prepare()
    bool autotune;     // choose the fastest kernels now, if that has not been done
} Work;

// ---- Random numbers

/* The random numbers of an image depend only on the seed, the epoch, and the image's position in
   the epoch's permutation. They are therefore the same for any batch size and on any rank. */
struct RandomKey {
    uint64_t seed;
    size_t epoch;
    size_t first;  // the position of the batch's first image
    size_t stride; // the distance between the positions of consecutive images
};

// Returns the position of image number `image` of the batch in the epoch's permutation.
static inline HOST_DEVICE size_t position_of(RandomKey key, size_t image) {
    return key.first + image * key.stride;
}

/* Philox4x32-10, a counter-based random number generator: out = a keyed bijection of the counter.
   (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.) It has no state, so any
   thread, device or replica can compute any of its numbers at any time, and all agree. The counter
   has these parts, where `position` is an image's position in the epoch's permutation:
     c3               c0                                c1          c2
     DRAW_INIT        element / 4                       tensor      0
     DRAW_SHUFFLE     position                          0           epoch
     DRAW_SYNTHETIC   wave of a class's glyph           class       0
                      0: distractor, 1: glyph           image       1
                      first of 16 elements, for noise   image       2
     DRAW_AUGMENT     0, or 1 + element of both fields  position    epoch
     DRAW_DROPOUT+row element / 8                       position    epoch */
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

// What a random number is used for. A dropout adds its row number, so that each dropout layer draws
// its own numbers.
enum { DRAW_INIT, DRAW_SHUFFLE, DRAW_SYNTHETIC, DRAW_AUGMENT, DRAW_DROPOUT = 256 };

// Returns a number in [0, 1), uniformly distributed. It comes from the upper 24 of 32 random bits,
// so it is exact in float and in double.
static inline HOST_DEVICE real uniform(uint32_t bits) {
    return (real)(bits >> 8) * (real)(1.0 / 16777216.0);
}

/* ==== 2. Layers on the CPU =======================================================================

   Each layer is defined here by a few loops that compute its formula; the tests compare all faster
   kernels with these definitions. Where a name ends in _naive, cnn_kernels.c has a fast version,
   whose name ends in _fast.

   Gradients: dX is the derivative of the loss with respect to X. In comments, "x (=)" says that a
   function sets x, and "x (+=)" that it adds to x. The backward function of a layer without
   parameters is called only if din is needed; the other backward functions must test din for NULL.
   The shapes alone determine how a sum is split and in which order its parts are added, so results
   are bit-identical for any number of threads.

   Convolutions keep the output channels in the innermost loop, where weights and outputs are
   contiguous, so that the compiler vectorizes this loop. Each output is still the same sum, in the
   same order, as in textbook loops. */

#ifndef CNN_DECLARATIONS_ONLY // cnn_kernels.cu continues in section 3

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

// PARALLEL_FOR stands for #pragma omp parallel for schedule(static), which gives each thread an
// equal part of the loop after it. Without OpenMP it expands to nothing.
#ifdef _OPENMP
#include <omp.h>
#define OPENMP_STATUS "OpenMP"
#define PARALLEL_FOR _Pragma("omp parallel for schedule(static)")
#else
#define OPENMP_STATUS "no OpenMP: --kernels naive uses one thread"
#define omp_set_num_threads(n) ((void)(n))
#define PARALLEL_FOR
#endif

// The square root in the precision of `real`
#define SQRT(x) (sizeof(real) == sizeof(float) ? (real)sqrtf((float)(x)) : (real)sqrt((double)(x)))

// Defined in section 3. In a student's copy, the stubs that replace LAB blocks call it before that.
static _Noreturn void die(int status, const char *format, ...);

static size_t min_size(size_t a, size_t b) {
    return a < b ? a : b;
}

static size_t max_size(size_t a, size_t b) {
    return a > b ? a : b;
}

enum { OUTSIDE = -1 };

// Returns the input pixel that the filter's element `tap` = i * kernel_size + j reads for output
// pixel (y, x): the pixel's index, row * w + column, or OUTSIDE.
static ptrdiff_t input_pixel(const Layer *l, size_t y, size_t x, size_t tap) {
    const ptrdiff_t h = (ptrdiff_t)l->in.h, w = (ptrdiff_t)l->in.w, padding = (ptrdiff_t)l->padding;
    const ptrdiff_t iy = (ptrdiff_t)(y * l->stride + tap / l->kernel_size) - padding;
    const ptrdiff_t ix = (ptrdiff_t)(x * l->stride + tap % l->kernel_size) - padding;
    const bool row_inside = iy >= 0 && iy < h, column_inside = ix >= 0 && ix < w;
    return row_inside && column_inside ? iy * w + ix : OUTSIDE;
}

// out[k] += sum over i < terms of in[i] * weight[i][k], for k < count. out[k] is loaded and stored
// once for every four terms, which are added in the order of i.
static void add_products(real *restrict out, const real *restrict in, const real *restrict weight,
                         size_t terms, size_t count) {
    const size_t terms_in_fours = terms / 4 * 4;
    for (size_t i = 0; i < terms_in_fours; i += 4) {
        const real *w0 = weight + i * count, *w1 = w0 + count, *w2 = w1 + count, *w3 = w2 + count;
        for (size_t k = 0; k < count; k++)
            out[k] =
                out[k] + in[i] * w0[k] + in[i + 1] * w1[k] + in[i + 2] * w2[k] + in[i + 3] * w3[k];
    }
    for (size_t i = terms_in_fours; i < terms; i++)
        for (size_t k = 0; k < count; k++)
            out[k] += in[i] * weight[i * count + k];
}

/* out[n][y][x][k] = bias[k] + sum over i, j, c of
                          in[n][y * s + i - padding][x * s + j - padding][c] * weight[i][j][c][k]
   where s is the stride and pixels outside the image count as 0.
   Shapes: in [n][h][w][c], out [n][oh][ow][k]. If bias is NULL, there is none.
   A linear layer is the same on 1 pixel: out[n][k] = bias[k] + sum of in[n][c] * weight[c][k]. */
static void conv2d_forward_naive(Work w) {
    const Layer *l = w.l;
    const Shape I = l->in, O = l->out;
    /* LAB 1.1 2.1 BEGIN conv2d_forward_naive */
    PARALLEL_FOR
    for (size_t pixel = 0; pixel < w.n * O.h * O.w; pixel++) {
        const size_t image = pixel / (O.h * O.w), y = pixel / O.w % O.h, x = pixel % O.w;
        real *restrict out = w.out + pixel * O.c;
        for (size_t k = 0; k < O.c; k++)
            out[k] = w.bias ? w.bias[k] : 0;
        for (size_t tap = 0; tap < l->kernel_size * l->kernel_size; tap++) {
            const ptrdiff_t source = input_pixel(l, y, x, tap);
            if (source == OUTSIDE)
                continue;
            const real *in = w.in + (image * I.h * I.w + (size_t)source) * I.c;
            add_products(out, in, w.weight + tap * I.c * O.c, I.c, O.c);
        }
    }
    /* LAB 1.1 2.1 END */
}

/* dbias[k]            = sum over n, y, x of dout[n][y][x][k], only if there is a bias
   dweight[i][j][c][k] = sum over n, y, x of
                         dout[n][y][x][k] * in[n][y * s + i - padding][x * s + j - padding][c]
   The weights are divided among the threads by taps and blocks of input channels: a block's sums
   stay in the cache, and each element of dout is used for all channels of the block. */
static void conv2d_parameter_gradients(Work w) {
    enum { BLOCK = 16 };
    const Layer *l = w.l;
    const Shape I = l->in, O = l->out;
    const size_t taps = l->kernel_size * l->kernel_size, pixels = w.n * O.h * O.w;
    /* LAB 1.2 BEGIN conv2d_parameter_gradients */
    memset(w.dbias, 0, l->bias_count * sizeof *w.dbias);
    for (size_t pixel = 0; pixel < pixels; pixel++)
        for (size_t k = 0; k < l->bias_count; k++)
            w.dbias[k] += w.dout[pixel * O.c + k];
    PARALLEL_FOR
    for (size_t block = 0; block < taps * ceil_div(I.c, BLOCK); block++) {
        const size_t tap = block % taps, first = block / taps * BLOCK;
        const size_t count = min_size(BLOCK, I.c - first);
        real *restrict sums = w.dweight + (tap * I.c + first) * O.c;
        memset(sums, 0, count * O.c * sizeof *sums);
        for (size_t pixel = 0; pixel < pixels; pixel++) {
            const ptrdiff_t source = input_pixel(l, pixel / O.w % O.h, pixel % O.w, tap);
            if (source == OUTSIDE)
                continue;
            const size_t image = pixel / (O.h * O.w);
            const real *in = w.in + (image * I.h * I.w + (size_t)source) * I.c + first;
            for (size_t c = 0; c < count; c++)
                for (size_t k = 0; k < O.c; k++)
                    sums[c * O.c + k] += in[c] * w.dout[pixel * O.c + k];
        }
    }
    /* LAB 1.2 END */
}

/* din[n][iy][ix][c] = sum over y, x, i, j, k of dout[n][y][x][k] * weight[i][j][c][k]
                       with y * s + i - padding = iy and x * s + j - padding = ix;
                       += if accumulate

   gcc may not reorder the terms of a floating-point sum, so it does not vectorize a loop that
   computes a single sum. The weights are therefore transposed: the innermost loop then runs over
   the input channels, each with its own sum. */
static void conv2d_input_gradient(Work w) {
    const Layer *l = w.l;
    const Shape I = l->in, O = l->out;
    const size_t taps = l->kernel_size * l->kernel_size;
    /* LAB 1.3 BEGIN conv2d_input_gradient */
    real *restrict weight_transposed = w.scratch; // [tap][k][c]
    for (size_t tap = 0; tap < taps; tap++)
        for (size_t c = 0; c < I.c; c++)
            for (size_t k = 0; k < O.c; k++)
                weight_transposed[(tap * O.c + k) * I.c + c] = w.weight[(tap * I.c + c) * O.c + k];
    PARALLEL_FOR
    for (size_t image = 0; image < w.n; image++) {
        real *din = w.din + image * shape_size(I);
        if (!w.accumulate)
            memset(din, 0, shape_size(I) * sizeof *din);
        for (size_t pixel = 0; pixel < O.h * O.w; pixel++)
            for (size_t tap = 0; tap < taps; tap++) {
                const ptrdiff_t source = input_pixel(l, pixel / O.w, pixel % O.w, tap);
                if (source == OUTSIDE)
                    continue;
                const real *dout = w.dout + (image * O.h * O.w + pixel) * O.c;
                real *restrict sums = din + (size_t)source * I.c;
                add_products(sums, dout, weight_transposed + tap * O.c * I.c, O.c, I.c);
            }
    }
    /* LAB 1.3 END */
}

// din is NULL if the row reads the images, whose gradient is not needed.
static void conv2d_backward_naive(Work w) {
    conv2d_parameter_gradients(w);
    if (w.din)
        conv2d_input_gradient(w);
}

static size_t output_size(Work w) {
    return w.n * shape_size(w.l->out);
}

// Returns whether a forward pass belongs to training. An evaluation has no key, since it draws no
// random numbers.
static bool is_training(Work w) {
    return w.key != NULL;
}

// out = max(in, 0); NaN propagates. in and out may be the same array.
static void relu_forward(Work w) {
    PARALLEL_FOR
    for (size_t i = 0; i < output_size(w); i++)
        w.out[i] = w.in[i] < 0 ? 0 : w.in[i];
}

// din = dout where out > 0, else 0; += if accumulate. din and dout may be the same array.
static void relu_backward(Work w) {
    PARALLEL_FOR
    for (size_t i = 0; i < output_size(w); i++) {
        const real gradient = w.out[i] > 0 ? w.dout[i] : 0;
        const real previous = w.accumulate ? w.din[i] : 0;
        w.din[i] = previous + gradient;
    }
}

/* out[n][y][x][c] = max over i, j < kernel_size of
                         in[n][y * s + i - padding][x * s + j - padding][c]
   where s is the stride
   saved = i * kernel_size + j of the first such maximum, or of the last NaN
   Pixels outside the image do not count. */
static void maxpool2d_forward_naive(Work w) {
    const Layer *l = w.l;
    Shape I = l->in, O = l->out;
    /* LAB 1.4 BEGIN maxpool2d_forward_naive */
    PARALLEL_FOR
    for (size_t image = 0; image < w.n; image++)
        for (size_t y = 0; y < O.h; y++)
            for (size_t x = 0; x < O.w; x++) {
                size_t at = ((image * O.h + y) * O.w + x) * O.c;
                real *restrict best = w.out + at;
                uint8_t *restrict arg = w.saved + at;
                for (size_t c = 0; c < O.c; c++) {
                    best[c] = -INFINITY;
                    arg[c] = 0;
                }
                for (size_t tap = 0; tap < l->kernel_size * l->kernel_size; tap++) {
                    ptrdiff_t source = input_pixel(l, y, x, tap);
                    if (source == OUTSIDE)
                        continue;
                    const real *pixel = w.in + (image * I.h * I.w + (size_t)source) * I.c;
                    for (size_t c = 0; c < O.c; c++) {
                        bool larger = pixel[c] > best[c] || pixel[c] != pixel[c]; // NaN propagates
                        best[c] = larger ? pixel[c] : best[c];
                        arg[c] = larger ? (uint8_t)tap : arg[c];
                    }
                }
            }
    /* LAB 1.4 END */
}

// din = sum of dout over the windows whose maximum this pixel was; += if accumulate
static void maxpool2d_backward(Work w) {
    const Layer *l = w.l;
    Shape I = l->in, O = l->out;
    /* LAB 1.5 BEGIN maxpool2d_backward */
    PARALLEL_FOR
    for (size_t image = 0; image < w.n; image++) {
        real *d = w.din + image * shape_size(I);
        if (!w.accumulate)
            memset(d, 0, shape_size(I) * sizeof *d);
        for (size_t y = 0; y < O.h; y++)
            for (size_t x = 0; x < O.w; x++) {
                size_t at = ((image * O.h + y) * O.w + x) * O.c;
                for (size_t tap = 0; tap < l->kernel_size * l->kernel_size; tap++) {
                    ptrdiff_t source = input_pixel(l, y, x, tap);
                    if (source == OUTSIDE)
                        continue;
                    real *restrict pixel = d + (size_t)source * I.c;
                    for (size_t c = 0; c < O.c; c++)
                        pixel[c] += w.saved[at + c] == tap ? w.dout[at + c] : 0;
                }
            }
    }
    /* LAB 1.5 END */
}

// out[n][c] = mean over y, x of in[n][y][x][c]
static void global_avgpool2d_forward(Work w) {
    size_t channels = w.l->in.c, pixels = w.l->in.h * w.l->in.w;
    PARALLEL_FOR
    for (size_t image = 0; image < w.n; image++) {
        real *restrict to = w.out + image * channels;
        memset(to, 0, channels * sizeof *to);
        for (size_t i = 0; i < pixels; i++)
            for (size_t c = 0; c < channels; c++)
                to[c] += w.in[(image * pixels + i) * channels + c];
        for (size_t c = 0; c < channels; c++)
            to[c] /= (real)pixels;
    }
}

// din[n][y][x][c] = dout[n][c] / (h * w); += if accumulate
static void global_avgpool2d_backward(Work w) {
    size_t channels = w.l->in.c, pixels = w.l->in.h * w.l->in.w;
    PARALLEL_FOR
    for (size_t i = 0; i < w.n * pixels; i++) {
        const size_t image = i / pixels;
        const real *dout = w.dout + image * channels;
        real *din = w.din + i * channels;
        for (size_t c = 0; c < channels; c++) {
            const real previous = w.accumulate ? din[c] : 0;
            din[c] = previous + dout[c] / (real)pixels;
        }
    }
}

// out = in + residual
static void add_forward(Work w) {
    PARALLEL_FOR
    for (size_t i = 0; i < output_size(w); i++)
        w.out[i] = w.in[i] + w.residual[i];
}

// gradient = dout, or += dout if accumulate
static void pass_gradient(Work w, real *gradient, bool accumulate) {
    PARALLEL_FOR
    for (size_t i = 0; i < output_size(w); i++) {
        const real previous = accumulate ? gradient[i] : 0;
        gradient[i] = w.dout[i] + previous;
    }
}

// dresidual = dout, += if accumulate_residual; din = dout, += if accumulate
static void add_backward(Work w) {
    if (w.dresidual)
        pass_gradient(w, w.dresidual, w.accumulate_residual);
    pass_gradient(w, w.din, w.accumulate);
}

/* ---- BatchNorm ---------------------------------------------------------------------------------

   (Ioffe, Szegedy, "Batch normalization", ICML 2015, as PyTorch computes it.) Per channel c, over
   the m = n * h * w pixels of the batch:
     mean = sum of in / m                     variance = sum of (in - mean)^2 / m
     out = (in - mean) * scale + bias         scale = weight / sqrt(variance + eps)
     running_mean = (1 - momentum) * running_mean + momentum * mean
     running_variance = (1 - momentum) * running_variance + momentum * variance * m / (m - 1)
   For m = 1, where PyTorch refuses to train, m - 1 is taken as 1. Evaluation uses the running
   statistics instead of the batch's. Sums are computed in double precision. A thread sums a block
   of adjacent channels, pixel by pixel. The backward pass takes mean and 1 / sqrt(variance + eps)
   from stats, where the forward pass of the same batch has stored them. */

enum { BN_BLOCK = 16 };
static const double bn_eps = 1e-5, bn_momentum = 0.1;

static size_t bn_pixels(Work w) {
    return w.n * w.l->in.h * w.l->in.w;
}

// Updates channel c in all four rows of stats. `squares` is the sum of (in - mean)^2 over m pixels.
static void bn_update_stats(real *stats, size_t channels, size_t c, double mean, double squares,
                            size_t m) {
    const double unbiased_variance = squares / (double)(m > 1 ? m - 1 : 1);
    real *running_mean = stats + RUNNING_MEAN * channels + c;
    real *running_variance = stats + RUNNING_VARIANCE * channels + c;
    *running_mean = (real)((1 - bn_momentum) * (double)*running_mean + bn_momentum * mean);
    *running_variance =
        (real)((1 - bn_momentum) * (double)*running_variance + bn_momentum * unbiased_variance);
    stats[BATCH_MEAN * channels + c] = (real)mean;
    stats[BATCH_INVERSE_STD * channels + c] = (real)(1 / sqrt(squares / (double)m + bn_eps));
}

// stats (=) of the channels [first, first + count) of a training batch
static void bn_block_stats(Work w, size_t first, size_t count) {
    const size_t channels = w.l->in.c, m = bn_pixels(w);
    double mean[BN_BLOCK] = {0}, squares[BN_BLOCK] = {0};
    for (size_t i = 0; i < m; i++)
        for (size_t c = 0; c < count; c++)
            mean[c] += (double)w.in[i * channels + first + c];
    for (size_t c = 0; c < count; c++)
        mean[c] /= (double)m;
    for (size_t i = 0; i < m; i++)
        for (size_t c = 0; c < count; c++) {
            double deviation = (double)w.in[i * channels + first + c] - mean[c];
            squares[c] += deviation * deviation;
        }
    for (size_t c = 0; c < count; c++)
        bn_update_stats(w.stats, channels, first + c, mean[c], squares[c], m);
}

// Returns weight / sqrt(variance + eps) of channel c. In training, the variance is the batch's; in
// evaluation, it is the running variance.
static real bn_scale(Work w, size_t c) {
    const size_t channels = w.l->in.c;
    if (is_training(w))
        return w.weight[c] * w.stats[BATCH_INVERSE_STD * channels + c];
    return w.weight[c] * (1 / SQRT(w.stats[RUNNING_VARIANCE * channels + c] + (real)bn_eps));
}

// out = (in - mean) * scale + bias
static void batchnorm2d_forward_naive(Work w) {
    const size_t channels = w.l->in.c, m = bn_pixels(w);
    const size_t mean_row = is_training(w) ? BATCH_MEAN : RUNNING_MEAN;
    const real *mean = w.stats + mean_row * channels;
    real *restrict scale = w.scratch;
    if (is_training(w)) {
        PARALLEL_FOR
        for (size_t first = 0; first < channels; first += BN_BLOCK)
            bn_block_stats(w, first, min_size(BN_BLOCK, channels - first));
    }
    for (size_t c = 0; c < channels; c++)
        scale[c] = bn_scale(w, c);
    PARALLEL_FOR
    for (size_t i = 0; i < m; i++)
        for (size_t c = 0; c < channels; c++)
            w.out[i * channels + c] = (w.in[i * channels + c] - mean[c]) * scale[c] + w.bias[c];
}

// dbias, dweight (=) of the channels [first, first + count)
static void bn_block_gradients(Work w, size_t first, size_t count) {
    const size_t channels = w.l->in.c, m = bn_pixels(w);
    const real *mean = w.stats + BATCH_MEAN * channels;
    const real *inverse_std = w.stats + BATCH_INVERSE_STD * channels;
    double dout_sum[BN_BLOCK] = {0}, product_sum[BN_BLOCK] = {0};
    for (size_t i = 0; i < m; i++)
        for (size_t c = 0; c < count; c++) {
            size_t at = i * channels + first + c;
            dout_sum[c] += (double)w.dout[at];
            product_sum[c] += (double)w.dout[at] * (double)(w.in[at] - mean[first + c]);
        }
    for (size_t c = 0; c < count; c++) {
        w.dbias[first + c] = (real)dout_sum[c];
        w.dweight[first + c] = (real)product_sum[c] * inverse_std[first + c];
    }
}

/* dbias = sum of dout      dweight = sum of dout * x, where x = (in - mean) / sqrt(variance + eps)
   din = weight / sqrt(variance + eps) * (dout - dbias / m - x * dweight / m); += if accumulate */
static void batchnorm2d_backward_naive(Work w) {
    const size_t channels = w.l->in.c, m = bn_pixels(w);
    const real *mean = w.stats + BATCH_MEAN * channels;
    const real *inverse_std = w.stats + BATCH_INVERSE_STD * channels;
    PARALLEL_FOR
    for (size_t first = 0; first < channels; first += BN_BLOCK)
        bn_block_gradients(w, first, min_size(BN_BLOCK, channels - first));
    if (!w.din)
        return;
    PARALLEL_FOR
    for (size_t i = 0; i < m; i++)
        for (size_t c = 0; c < channels; c++) {
            size_t at = i * channels + c;
            real x = (w.in[at] - mean[c]) * inverse_std[c];
            real d = w.dout[at] - (w.dbias[c] + x * w.dweight[c]) / (real)m;
            const real previous = w.accumulate ? w.din[at] : 0;
            w.din[at] = w.weight[c] * inverse_std[c] * d + previous;
        }
}

/* ---- Dropout -----------------------------------------------------------------------------------

   (Srivastava et al., "Dropout", JMLR 2014; inverted as in PyTorch.)
     out = in / (1 - p), or 0 with probability p
   The mask records which elements were kept. The random bits of element e of the image at position
   q depend only on (seed, layer, epoch, q, e). One Philox block serves 8 elements with 16 bits
   each, so p is rounded to a multiple of 1/65536. */

// Returns a threshold: an element becomes 0 if its 16 random bits are below it.
static uint32_t dropout_threshold(const Layer *l) {
    return (uint32_t)lround((double)l->p * 65536);
}

// bits = the random bits of elements [8 * block, 8 * block + 8) of an image
static inline void dropout_draw(uint32_t bits[4], Work w, size_t image, size_t block) {
    philox4x32(bits, (uint32_t)block, (uint32_t)position_of(*w.key, image), (uint32_t)w.key->epoch,
               DRAW_DROPOUT + (uint32_t)w.row, w.key->seed);
}

static void dropout_image(Work w, size_t image) {
    enum { BLOCK = 8 };
    const size_t size = shape_size(w.l->out);
    const real scale = 1 / (1 - w.l->p);
    const uint32_t threshold = dropout_threshold(w.l);
    for (size_t start = 0; start < size; start += BLOCK) {
        uint32_t bits[BLOCK / 2];
        dropout_draw(bits, w, image, start / BLOCK);
        for (size_t i = 0; i < min_size(BLOCK, size - start); i++) {
            const size_t at = image * size + start + i;
            const uint32_t draw = (bits[i / 2] >> (16 * (i % 2))) & 0xffff;
            w.saved[at] = draw >= threshold;
            w.out[at] = w.saved[at] ? w.in[at] * scale : 0;
        }
    }
}

// In evaluation, out = in.
static void dropout_forward_naive(Work w) {
    if (!is_training(w)) {
        memmove(w.out, w.in, output_size(w) * sizeof *w.out);
        return;
    }
    PARALLEL_FOR
    for (size_t image = 0; image < w.n; image++)
        dropout_image(w, image);
}

// din = dout / (1 - p) where the mask is set, else 0; += if accumulate
static void dropout_backward(Work w) {
    const real scale = 1 / (1 - w.l->p);
    PARALLEL_FOR
    for (size_t i = 0; i < output_size(w); i++) {
        const real factor = w.saved[i] ? scale : 0;
        const real previous = w.accumulate ? w.din[i] : 0;
        w.din[i] = w.dout[i] * factor + previous;
    }
}

// ---- Log-softmax and the loss

// out[k] = in[k] - log(sum over j of exp(in[j])); subtracts the maximum, to avoid overflow
static void log_softmax_forward(Work w) {
    const size_t classes = w.l->out.c;
    for (size_t image = 0; image < w.n; image++) {
        const real *in = w.in + image * classes;
        real largest = -INFINITY, sum = 0;
        for (size_t k = 0; k < classes; k++)
            if (in[k] > largest)
                largest = in[k];
        for (size_t k = 0; k < classes; k++)
            sum += (real)exp((double)(in[k] - largest));
        const real log_sum = largest + (real)log((double)sum);
        for (size_t k = 0; k < classes; k++)
            w.out[image * classes + k] = in[k] - log_sum;
    }
}

// din[k] = dout[k] - softmax[k] * sum over j of dout[j], where softmax = exp(out). There is no +=
// here, since this is the last row, where backward begins.
static void log_softmax_backward(Work w) {
    const size_t classes = w.l->out.c;
    /* LAB 1.6 BEGIN log_softmax_backward */
    for (size_t image = 0; image < w.n; image++) {
        const real *dout = w.dout + image * classes, *out = w.out + image * classes;
        real sum = 0;
        for (size_t k = 0; k < classes; k++)
            sum += dout[k];
        for (size_t k = 0; k < classes; k++)
            w.din[image * classes + k] = dout[k] - (real)exp((double)out[k]) * sum;
    }
    /* LAB 1.6 END */
}

// Returns the most likely class of an image; if several are equally likely, the first of them.
static size_t most_likely(const real *logp, size_t classes) {
    size_t best = 0;
    for (size_t k = 1; k < classes; k++)
        if (logp[k] > logp[best])
            best = k;
    return best;
}

// Returns the loss of an image: the sum over k of target[k] * -logp[k]. The target of the label is
// at_label; the target of all other classes is elsewhere.
static real smoothed_loss(const real *logp, size_t classes, uint8_t label, real at_label,
                          real elsewhere) {
    real loss = -at_label * logp[label];
    if (elsewhere == 0)
        return loss; // 0 * -infinity would be NaN
    for (size_t k = 0; k < classes; k++)
        if (k != label)
            loss -= elsewhere * logp[k];
    return loss;
}

/* Computes the negative log-likelihood with label smoothing e, which may be 0 (Szegedy et al.,
   arXiv:1512.00567, section 7). There is one loss per image; the loss of the batch is their mean.
     losses[i] = sum over k of target[k] * -logp[i][k],  target[k] = e / classes (+ 1 - e at label)
     correct[i] = 1 if the label is the most likely class, else 0
     dlogp[i][k] = -target[k] / all_images, which counts the images of all ranks
   If dlogp is NULL, it is not computed. */
static void nll_loss(real *losses, real *correct, real *dlogp, const real *logp,
                     const uint8_t *labels, size_t n, size_t all_images, size_t classes,
                     double smoothing, LossScale *scale) {
    (void)scale; // NULL on a CPU
    const real elsewhere = (real)(smoothing / (double)classes);
    const real at_label = (real)(1 - smoothing) + elsewhere;
    for (size_t i = 0; i < n; i++) {
        const real *image_logp = logp + i * classes;
        const bool is_correct = most_likely(image_logp, classes) == labels[i];
        correct[i] = is_correct ? 1 : 0;
        losses[i] = smoothed_loss(image_logp, classes, labels[i], at_label, elsewhere);
    }
    if (!dlogp)
        return;
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < classes; k++) {
            const real target = k == labels[i] ? at_label : elsewhere;
            dlogp[i * classes + k] = -target / (real)all_images;
        }
}

/* ==== 3. Devices and helpers =====================================================================

   This section has the types that later sections share, and helper functions. The first half is
   shared with cnn_kernels.cu: settings, data, and what a kind of device and its kernels provide.
   The second half has the clock, errors, threads, memory, files, the limits of the machine, hashes
   and the events of a trace. An error ends in die(), with one line that says what failed and where
   and, if possible, what was expected, what was found and what to do. (The one exception is main(),
   which checks the CPU before anything else.) */

#endif // CNN_DECLARATIONS_ONLY

// ---- Settings

enum { NOT_CHOSEN = -1 }; // section 14 chooses a value

// An enum for each option whose values are words, in the order of its words in the table of options
// (section 12)
typedef enum { STEM_3, STEM_7, STEM_IMAGENET } Stem;
typedef enum { AUGMENT_NONE, AUGMENT_CROP_FLIP, AUGMENT_ELASTIC } Augmentation;
typedef enum { ADADELTA, SGD, OPTIMIZERS } OptimizerChoice;
typedef enum { SCHEDULE_STEP, SCHEDULE_COSINE } Schedule;
typedef enum { SCALE_LR_NONE, SCALE_LR_LINEAR, SCALE_LR_SQRT } LrScaling;
typedef enum { KERNELS_BEST = NOT_CHOSEN, NAIVE, FAST, TILED, TENSOR } KernelsChoice;
typedef enum { PRECISION_BEST = NOT_CHOSEN, FP32, TF32, BF16, FP16, PRECISIONS } Precision;
typedef enum { NHWC, NCHW } LayoutChoice;
typedef enum { LAUNCH_FUSED, LAUNCH_PER_TENSOR } OptimizerLaunch;
typedef enum { ZERO_GRAD_NONE, ZERO_GRAD_MEMSET } ZeroGrad;
typedef enum { DDP, DP } Parallel;

// The settings of a run. The table of options in section 12 fills in what the user chose. Section
// 14 fills in what the user left open, and replaces some values: for example, lr becomes the scaled
// learning rate. After that, the settings do not change.
typedef struct Settings {
    const char *model, *dataset, *data, *out, *checkpoint, *save_every, *load, *trace;
    const char *trace_steps;
    Stem stem;
    Augmentation augment;
    OptimizerChoice optimizer;
    Schedule schedule;
    LrScaling lr_scaling;
    KernelsChoice kernels;
    Precision precision;
    LayoutChoice layout;
    OptimizerLaunch optimizer_launch;
    ZeroGrad zero_grad;
    Parallel parallel;
    size_t width, limit_train, limit_test, batch_size, test_batch_size, epochs, max_steps, seed;
    size_t step_size, warmup_epochs, log_interval, workers, threads, gpus, replicas, global_batch;
    size_t resize; // the height to which images are enlarged; 0: they are not
    double lr, momentum, weight_decay, gamma, label_smoothing;
    double bucket_mb; // in megabytes
    double timeout;   // in seconds
    bool nesterov, dry_run, save_model, resume, eval, per_class, profile, no_cuda, graph;
    bool pin_memory, resident, autotune, quiet, layers, oversubscribe, overlap;
} Settings;

// ---- Data

// --augment: each epoch sees a different variant of each image. The functions are in section 9.
enum { CROP_PADDING = 4, ELASTIC_ALPHA = 34, ELASTIC_SIGMA = 4, ELASTIC_REACH = 3 * ELASTIC_SIGMA };

/* --resize enlarges an image by a whole factor: row i of the result is a weighted mean of the row
   `first` of the image and the one after it. The row's position in the image is
     first + share = (i + 1/2) / factor - 1/2, limited to [0, rows - 1]
   where `first` is a whole number and 0 <= share < 1. The same holds for columns. For example, with
   factor 2 row 3 is at 7/4 - 1/2 = 1 + 1/4: three quarters of row 1 and a quarter of row 2.
   (PyTorch's F.interpolate() with mode="bilinear" and align_corners=False.) */
typedef struct Neighbors {
    uint32_t first;
    float share; // the weight of the row after `first`; 0 if there is none
} Neighbors;

static inline HOST_DEVICE Neighbors neighbors_of(size_t i, size_t factor, size_t count) {
    // in units of 1 / (2 factor), in which the positions are whole numbers
    const uint32_t half = (uint32_t)factor;
    const uint32_t one = 2 * half;
    const uint32_t last = one * ((uint32_t)count - 1);
    const uint32_t center = 2 * (uint32_t)i + 1;
    uint32_t position = center > half ? center - half : 0;
    if (position > last)
        position = last;
    Neighbors n = {position / one, (float)(position % one) / (float)one};
    return n;
}

// Returns the weight of the row `first` if `which` is 0, or of the row after it if `which` is 1.
static inline HOST_DEVICE float neighbor_share(Neighbors n, size_t which) {
    return which == 0 ? 1 - n.share : n.share;
}

// s: the shape of the image; y, x: a pixel, which may lie outside
static inline HOST_DEVICE bool is_in_image(Shape s, int y, int x) {
    return y >= 0 && x >= 0 && y < (int)s.h && x < (int)s.w;
}

// Returns a byte of an image. Pixels outside the image are black.
static inline HOST_DEVICE int byte_at(const uint8_t *image, Shape s, int y, int x, size_t c) {
    return is_in_image(s, y, x) ? image[((size_t)y * s.w + (size_t)x) * s.c + c] : 0;
}

// Returns channel c between four pixels, bilinear, rounded to a byte. y, x: a place, in pixels.
// fmaf() leaves no compiler the choice of whether to fuse a multiply-add, so CPU and GPU return the
// same byte.
static inline HOST_DEVICE int interpolated_byte(const uint8_t *image, Shape s, float y, float x,
                                                size_t c) {
    const float down = y - floorf(y), right = x - floorf(x);
    const int top = (int)floorf(y), left = (int)floorf(x);
    const float top_left = (float)byte_at(image, s, top, left, c);
    const float top_right = (float)byte_at(image, s, top, left + 1, c);
    const float bottom_left = (float)byte_at(image, s, top + 1, left, c);
    const float bottom_right = (float)byte_at(image, s, top + 1, left + 1, c);
    const float above = fmaf(right, top_right, (1 - right) * top_left);
    const float below = fmaf(right, bottom_right, (1 - right) * bottom_left);
    return (int)fmaf(down, below, fmaf(1 - down, above, .5f)); // the cast truncates
}

typedef struct Dataset Dataset;
typedef enum { TRAINING_SET, TEST_SET } Split;

// The properties of a data set
typedef struct DatasetInfo {
    const char *name;
    Shape shape;
    size_t classes;         // the number of classes
    size_t counts[2];       // the number of images, by Split
    double mean[3], std[3]; // of each channel, for pixels scaled to [0, 1]
    void (*read)(Dataset *data, const char *dir, Split split, size_t limit);
    const char *files[2][6]; // by Split; NULL ends each list
    const char *class_names; // separated by spaces, or NULL if the classes are only numbered
} DatasetInfo;

// The images of a training set or a test set
struct Dataset {
    const DatasetInfo *info;
    size_t count;
    uint8_t *images; // [count][h][w][c]
    uint8_t *labels; // [count]
};

// A data set in a device's memory, with what is needed to build batches there.
typedef struct DeviceDataset {
    const uint8_t *images;  // [count][h][w][c]
    const uint8_t *labels;  // [count]
    uint32_t *order;        // the epoch's permutation: order[position] = image
    const real *normalized; // [c][256]: the value of each byte of a channel
    Shape shape;
    size_t factor; // --resize: the factor by which images are enlarged
    Augmentation augment;
    float blur[ELASTIC_REACH + 1]; // AUGMENT_ELASTIC: the weights of the blur
} DeviceDataset;

// The images of one step, in the memory of a loader.
typedef struct Batch {
    real *images;    // [n][h][w][c], normalized
    uint8_t *labels; // [n]
    // where the kernels read images and labels: these arrays on a CPU, copies on a GPU
    real *device_images;
    uint8_t *device_labels;
    const DeviceDataset *resident; // the data set on the device, which replaces images; or NULL
    RandomKey key;                 // selects the random numbers of these images
    size_t n;                      // how many images
    size_t number;                 // which batch of the epoch this is, from 0
} Batch;

// ---- Devices and their kernels

enum {
    MAX_REPLICAS = 64,  // networks that train together in one process, each in its own thread
    MAX_THREADS = 1024, // for each replica
    MAX_WORKERS = 256,  // for each replica
    MAX_LAYERS = 1024,  // rows of a network
    MAX_ARENAS = 24     // arenas of a memory plan
};

// A mark is a numbered point in a replica's queue of operations, like an event in a CUDA stream.
// The clock of train() uses the first CLOCK_MARKS numbers.
enum { CLOCK_MARKS = 64, MAX_BUCKETS = 64 };
enum {
    // one for each bucket of gradients (section 10)
    BUCKET_MARKS = CLOCK_MARKS,
    // with --layers and --trace, for each row: where its forward pass begins and ends, and where
    // its backward pass does. zero_grad_row() counts as a row.
    MARKS_PER_PASS = 2,
    MARKS_PER_ROW = 2 * MARKS_PER_PASS,
    ROW_MARKS = BUCKET_MARKS + MAX_BUCKETS,
    // the start of a trace
    START_MARK = ROW_MARKS + MARKS_PER_ROW * (MAX_LAYERS + 1),
    MARKS // the number of marks
};

typedef enum { FORWARD_PASS, BACKWARD_PASS } RowPass;

// Returns the mark where a pass of a row begins. end_mark() returns the mark where it ends.
static inline size_t begin_mark(size_t row, RowPass pass) {
    return ROW_MARKS + MARKS_PER_ROW * row + MARKS_PER_PASS * pass;
}

static inline size_t end_mark(size_t row, RowPass pass) {
    return begin_mark(row, pass) + 1;
}

// How a row is computed
typedef enum {
    SEPARATE,          // by its own kernels, into its own memory
    IN_PLACE,          // by its own kernels, which overwrite its input
    FUSED_INTO_EARLIER // by the kernels of an earlier row
} RowMode;

// The inputs that change from step to step. They are in device memory; kernels get a pointer to
// them.
typedef struct StepInputs {
    RandomKey key;
    double lr;
} StepInputs;

/* How a GPU treats losses and gradients that are not finite:
   - In fp32, tf32 and bf16, the GPU skips all further updates, until the host reads not_finite at
     the log interval and ends the run.
   - In fp16, gradients below 3e-8 would become 0. So the loss is multiplied by `scale`, and the
     update divides the gradients by it. If a gradient is not finite, one update is skipped and the
     scale is halved; after GROWTH_INTERVAL steps without any, it is doubled. A loss that is not
     finite ends the run, as in all precisions.
     (Micikevicius et al., "Mixed precision training", arXiv:1710.03740; numbers as in PyTorch's
     GradScaler.) # AMP */
struct LossScale {
    float scale;         // 1 unless the precision is fp16
    uint32_t steps;      // steps since the scale was last changed
    uint32_t skipped;    // updates skipped in the whole run
    uint32_t not_finite; // non-finite losses and gradients: in fp16 of this step, else of all steps
};
enum { INIT_SCALE = 65536, GROWTH_INTERVAL = 2000 };

// What an optimizer updates: `count` parameters, and the state that it keeps for each of them.
typedef struct Update {
    real *param, *state[2];
    const real *grad;
    void *param16;          // for GPUs: a 16-bit copy of param, or NULL
    const LossScale *scale; // for GPUs: the scale of the gradients; NULL on a CPU
    size_t count;
    const StepInputs *step; // holds the learning rate; in device memory
    double momentum, weight_decay;
    bool nesterov;
} Update;

// The levels of the nested time ranges that Nsight shows for a thread, the outermost first
typedef enum { NSIGHT_STEP, NSIGHT_LINE, NSIGHT_ROW } NsightLevel;

// What a device reports about itself
typedef struct DeviceInfo {
    char name[256];
    char uuid[48], driver[32];     // empty on a CPU
    double memory;                 // bytes that this process may use
    bool emulated;                 // GPU code that runs on the CPU: its times mean nothing
    bool tensor_cores[PRECISIONS]; // by precision: whether --kernels tensor can use them
} DeviceInfo;

/* A kind of device: its memory, and a stream of operations that are queued and run in order. A CPU
   runs them at once, in the host's memory; entries marked GPU are not called on a CPU. Devices are
   numbered from 0. */
typedef struct Device {
    bool is_gpu;
    // GPU: the number of GPUs; if there is none, sets *why_not
    size_t (*count)(const char **why_not);
    // makes the calling thread compute for this replica, on device `number`; errors go to on_error
    void (*use)(size_t replica, size_t number, void (*on_error)(int status, const char *, ...));
    void (*describe)(DeviceInfo *info); // the device of the calling thread
    void *(*alloc)(size_t bytes);       // zeroed device memory, or NULL if there is not enough
    void (*release)(void *memory);
    // GPU: zeroed host memory that the device reads directly
    void *(*pinned_alloc)(size_t bytes);
    void (*pinned_release)(void *memory);
    // Queues a copy within the device. A copy between host and device, in either direction, is
    // complete on return, except while a graph is captured.
    void (*copy)(void *to, const void *from, size_t bytes);
    void (*clear)(void *memory, size_t bytes);         // queues: memory of the device = 0
    void (*set_step)(StepInputs *to, StepInputs step); // queues: *to = step, on the device
    // GPU: copies between host and device `number`, in either direction; complete on return. Any
    // thread may call it, concurrently with the device's operations.
    void (*transfer)(size_t number, void *to, const void *from, size_t bytes);
    /* to = from, or += from if add; complete on return. Without add, either array may be on another
       device or the host; with add, only `from` may. buffer is device memory of the size of `to`.
       Any thread may call it, concurrently with the device's operations. */
    void (*receive)(size_t number, real *to, const real *from, size_t n, bool add, real *buffer);
    void (*synchronize)(void);
    void (*mark)(size_t i);                    // marks the end of what is queued so far
    double (*elapsed)(size_t from, size_t to); // seconds between two marks; waits for both
    void (*wait)(size_t replica, size_t mark); // waits until the replica's device passes mark
    /* GPU, CUDA graphs: after begin_capture(), operations are recorded instead of executed,
       including copies to and from pinned memory. end_capture() returns them as a graph, which
       replay() queues. */
    void (*begin_capture)(void);
    void *(*end_capture)(void);
    void (*replay)(void *graph);
    void (*free_graph)(void *graph);
    // in GFLOP/s, measured; a multiply-add is 2 operations; NAN if unknown
    double (*peak_gflops)(void);
    // # PROF  for Nsight: ends this thread's range at this level and the ranges inside it; then
    // begins a range called `name`, unless that is NULL
    void (*nsight_range)(NsightLevel level, const char *name);
    void (*record)(bool on); // starts or stops Nsight's recording
} Device;

/* The functions that compute a network on one kind of device. --kernels and --precision select such
   a table. Entries marked GPU are not called on a CPU. */
typedef struct Kernels {
    const Device *device;
    KernelsChoice choice;
    Precision precision;
    size_t element_bytes; // bytes of an element of activations and of their gradients
    struct {
        void (*forward)(Work w), (*backward)(Work w);
    } layers[KINDS];
    // elements of scratch memory that a row needs for at most n images
    size_t (*scratch_size)(const Layer *l, const Fusion *fused, size_t n);
    double (*flops)(Work w); // operations that the row's forward and backward execute
    // A GPU multiplies dlogp by the scale and adds the number of losses that are not finite to
    // scale->not_finite. On a CPU, scale is NULL.
    void (*nll_loss)(real *losses, real *correct, real *dlogp, const real *logp,
                     const uint8_t *labels, size_t n, size_t all_images, size_t classes,
                     double smoothing, LossScale *scale);
    void (*update[OPTIMIZERS])(Update u);
    /* The rest is for the fast kernels; skip it on a first reading. fuse() is called only if row l
       is the sole reader of what the kernels of row `target` write. It decides whether these
       kernels also compute l; `fused` lists what they already compute besides `target`. */
    RowMode (*fuse)(const Layer *target, const Fusion *fused, const Layer *l);
    // how many elements a conv2d's forward stores as sums for the batchnorm2d that follows it, or 0
    size_t (*moments_size)(const Layer *conv, size_t n);
    size_t (*transposed_size)(const Layer *l, size_t n); // --layout nchw, in elements
    // The kernels of a row may keep data in the host's memory: prepared_bytes() returns its size,
    // and prepare() sets it up.
    size_t (*prepared_bytes)(const Layer *l);
    void (*prepare)(void *prepared, const Layer *l);
    // GPU, 16-bit precisions: param16 = param
    void (*to_16_bit)(void *param16, const real *param, size_t count);
    // GPU: adds the number of gradients that are not finite to scale->not_finite
    void (*count_not_finite)(LossScale *scale, const real *grad, size_t count);
    void (*adjust_scale)(LossScale *scale); // GPU, fp16: changes the scale, after the update
    // GPU: out = the images of a loader, in the layout of row 0
    void (*load_images)(real *out, const real *images, size_t n, Shape s, bool nchw);
    // GPU: out, labels = a batch of a resident data set; out has the layout of row 0, and key is in
    // the device's memory
    void (*gather)(real *out, uint8_t *labels, const DeviceDataset *r, const RandomKey *key,
                   size_t n, bool nchw);
} Kernels;

// For kernels that need no such memory, and no preparation
static inline size_t no_size(const Layer *l, size_t n) {
    (void)l, (void)n;
    return 0;
}

static inline void prepare_nothing(void *prepared, const Layer *l) {
    (void)prepared, (void)l;
}

/* What cnn_kernels.cu provides if nvcc or the emulator has compiled it. In C, the functions are
   declared weak: if no file of the program defines them, they are NULL.
   cuda_kernels()       returns table i of its kernels, the best ones last, and then NULL
   With NCCL, for GPUs of several processes:
   cuda_nccl_id()       creates the id of a group; rank 0 calls it and sends it to the others
   cuda_nccl_join()     makes this thread's device join the group
   cuda_nccl_leave()    frees the group's memory
   cuda_all_reduce()    data = the sum of the group's data; false after `timeout` seconds */
#ifdef __cplusplus
#define OPTIONAL extern "C"
#else
#define OPTIONAL __attribute__((weak))
#endif
enum { NCCL_ID_BYTES = 128 };
OPTIONAL const Kernels *cuda_kernels(size_t i);
OPTIONAL void cuda_nccl_id(char id[NCCL_ID_BYTES]);
OPTIONAL void cuda_nccl_join(const char id[NCCL_ID_BYTES], size_t rank, size_t world);
OPTIONAL void cuda_nccl_leave(void);
OPTIONAL bool cuda_all_reduce(size_t device, real *data, size_t count, double timeout);

#ifndef CNN_DECLARATIONS_ONLY // cnn_kernels.cu reads no further

// ---- Clock and errors

#define LENGTH(array) (sizeof(array) / sizeof *(array))
// Parameter i of a function is a format like that of printf(), and its arguments follow.
#define FORMAT(i) __attribute__((format(printf, i, (i) + 1)))

enum { PATH_SIZE = 4096, EXIT_USAGE = 2 };

// Returns the time in seconds, counted from an arbitrary start.
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* How the program exits on an error: the first thread that calls die() ends the program, and
   threads that fail meanwhile wait for the end. */
static void (*before_dying)(void);               // marks the run folder as failed
static void (*exit_process)(int status) = _exit; // with MPI, ends the other ranks as well
static bool dying;                               // whether a thread is ending the program
static _Thread_local bool dying_here;            // whether it is this thread
static _Thread_local const char *unfinished;     // a temporary file of this thread, or NULL
static char lock_file[PATH_SIZE + 8]; // beside the checkpoint; "" if this run holds no lock

// Replaces control characters by '?'. A name in a file may contain escape sequences, which must not
// reach the terminal.
static void replace_control_characters(char *text) {
    for (char *c = text; *c; c++)
        if ((unsigned char)*c < ' ' || *c == 127)
            *c = '?';
}

// Removes the temporary file that this thread was writing, if any.
static void remove_unfinished(void) {
    if (unfinished)
        unlink(unfinished);
}

// Prints a message as printf() does, and ends the program.
static _Noreturn FORMAT(2) void die(int status, const char *format, ...) {
    char line[2 * PATH_SIZE];
    va_list args;
    const bool was_dying = __atomic_exchange_n(&dying, true, __ATOMIC_SEQ_CST);
    if (dying_here) { // before_dying() has failed
        remove_unfinished();
        exit_process(status);
    }
    if (was_dying) // another thread ends the program
        for (;;)
            pause();
    dying_here = true;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    replace_control_characters(line);
    if (ftrylockfile(stdout) == 0) // if it is locked, another thread is blocked on a full pipe
        fflush(stdout);
    fprintf(stderr, "cnn: error: %s\n", line);
    remove_unfinished();
    unlink(lock_file);
    if (before_dying)
        before_dying();
    exit_process(status);
    abort(); // exit_process() does not return
}

// ---- Threads

typedef struct Range {
    size_t first, count; // numbers, pixels or iterations [first, first + count)
} Range;

// Returns part i of a range that is divided into `parts` parts, whose sizes differ by at most 1.
static Range part_of(Range whole, size_t i, size_t parts) {
    size_t first = whole.count * i / parts, last = whole.count * (i + 1) / parts;
    return (Range){whole.first + first, last - first};
}

// How many threads this thread may use; cnn_kernels.c reads it.
static _Thread_local size_t num_threads = 1;

static void set_num_threads(size_t count) {
    num_threads = count;
    omp_set_num_threads((int)count);
}

// Starts a thread that calls function(data). `what` names the thread in the error message. The size
// of its stack is set, since the fast kernels keep images there and some systems' default is small.
static void start_thread(pthread_t *thread, void *(*function)(void *), void *data,
                         const char *what) {
    enum { STACK = 8 << 20 }; // in bytes
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK);
    const int error = pthread_create(thread, &attributes, function, data);
    pthread_attr_destroy(&attributes);
    if (error)
        die(1, "cannot start %s: %s; ulimit -u limits threads, and ulimit -v their memory", what,
            strerror(error));
}

// ---- Memory

enum { CACHE_LINE = 64 }; // in bytes

// Returns zeroed memory, or NULL if there is not enough. The memory is aligned to a cache line and
// padded, so that vector loads may read past its end.
static void *zeroed_alloc(size_t bytes) {
    void *memory;
    if (bytes > SIZE_MAX / 2)
        return NULL;
    const size_t padded = bytes + 2 * CACHE_LINE;
    const int error = posix_memalign(&memory, CACHE_LINE, padded);
    if (error != 0)
        return NULL;
    return memset(memory, 0, padded);
}

static _Noreturn void die_no_memory(size_t bytes, const char *what) {
    die(1, "no memory for %s: %.1f MB requested; try a smaller --batch-size or --limit-train", what,
        (double)bytes / 1e6);
}

// Closes a stream of open_memstream() and returns its text. Dies, naming `what` and its likely size
// in bytes, if there was too little memory: fclose() may then still return 0.
static char *close_text(FILE *stream, char *const *text, size_t bytes, const char *what) {
    const bool written = !ferror(stream);
    const int error = fclose(stream);
    if (!written || error || !*text)
        die_no_memory(bytes, what);
    return *text;
}

static void *must_alloc(size_t bytes, const char *what) {
    void *memory = zeroed_alloc(bytes);
    if (!memory)
        die_no_memory(bytes, what);
    return memory;
}

typedef enum { HOST_MEMORY, PINNED_MEMORY, DEVICE_MEMORY } MemoryKind;

// What memory is used for. The printed plan has a total for each use.
typedef enum {
    FOR_PARAMETERS,
    FOR_GRADIENTS,
    FOR_OPTIMIZER,
    FOR_ACTIVATIONS,
    FOR_DACTIVATIONS,
    FOR_STATISTICS,
    FOR_SCRATCH,
    FOR_BUFFERS,
    FOR_COMMUNICATION,
    FOR_LOADER,
    FOR_DATA,
    MEMORY_USES,               // the number of uses
    FOR_ANYTHING = MEMORY_USES // all of these together
} MemoryUse;

static const char *const memory_uses[MEMORY_USES] = {
    [FOR_PARAMETERS] = "parameters",
    [FOR_GRADIENTS] = "gradients",
    [FOR_OPTIMIZER] = "optimizer state",
    [FOR_ACTIVATIONS] = "activations",
    [FOR_DACTIVATIONS] = "activation gradients",
    [FOR_STATISTICS] = "statistics and masks",
    [FOR_SCRATCH] = "scratch",
    [FOR_BUFFERS] = "buffers",
    [FOR_COMMUNICATION] = "communication",
    [FOR_LOADER] = "loader",
    [FOR_DATA] = "data set",
};

/* The memory of a network or a loader: a list of arenas. The list is printed before anything is
   allocated; the arenas are then allocated, and later freed, together. */
typedef struct MemoryPlan {
    const Device *device;
    size_t count;
    struct Arena {
        void *destination; // address of the pointer to set; it has any type, hence memcpy()
        size_t bytes;
        MemoryKind where;
        MemoryUse use;
    } arenas[MAX_ARENAS];
} MemoryPlan;

static void memory_plan_add(MemoryPlan *p, void *destination, size_t bytes, MemoryKind where,
                            MemoryUse use) {
    if (p->count == MAX_ARENAS)
        die(1, "memory for %s: more than %d arenas; raise MAX_ARENAS in cnn.c", memory_uses[use],
            MAX_ARENAS);
    if (where == PINNED_MEMORY && !p->device->is_gpu)
        where = HOST_MEMORY; // there is no device that reads it
    p->arenas[p->count] = (struct Arena){destination, bytes, where, use};
    p->count++;
}

static void *alloc_memory(const Device *d, MemoryKind where, size_t bytes) {
    if (where == DEVICE_MEMORY)
        return d->alloc(bytes);
    if (where == PINNED_MEMORY)
        return d->pinned_alloc(bytes);
    return zeroed_alloc(bytes);
}

static void release_memory(const Device *d, MemoryKind where, void *memory) {
    if (where == DEVICE_MEMORY)
        d->release(memory);
    else if (where == PINNED_MEMORY)
        d->pinned_release(memory);
    else
        free(memory);
}

static void memory_plan_alloc(const MemoryPlan *p) {
    for (size_t i = 0; i < p->count; i++) {
        const struct Arena *arena = &p->arenas[i];
        void *memory = alloc_memory(p->device, arena->where, arena->bytes);
        if (!memory)
            die_no_memory(arena->bytes, memory_uses[arena->use]);
        memcpy(arena->destination, &memory, sizeof memory);
    }
}

static void memory_plan_free(const MemoryPlan *p) {
    for (size_t i = 0; i < p->count; i++) {
        const struct Arena *arena = &p->arenas[i];
        void *memory;
        memcpy(&memory, arena->destination, sizeof memory);
        release_memory(p->device, arena->where, memory);
    }
}

// ---- Files

static void join_path(char path[PATH_SIZE], const char *dir, const char *file) {
    if (snprintf(path, PATH_SIZE, "%s/%s", dir, file) >= PATH_SIZE)
        die(1, "path too long: %s/%s", dir, file);
}

// path = the path of a file or folder in the program's folder
static void path_beside_program(char path[PATH_SIZE], const char *file) {
    char program[PATH_SIZE] = "";
    const ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    if (length < 0)
        strcpy(program, "./cnn");
    join_path(path, dirname(program), file);
}

static _Noreturn void die_file(const char *doing, const char *path) {
    die(1, "%s %s: %s", doing, path, strerror(errno));
}

static void flush(FILE *f, const char *name) {
    if (fflush(f) != 0 || ferror(f))
        die_file("cannot write to", name);
}

// Opens a file for reading, or returns NULL if it does not exist. A named pipe would block; it is
// read as an empty file instead.
static FILE *open_existing(const char *path) {
    FILE *f = NULL;
    const int fd = open(path, O_RDONLY | O_NONBLOCK);
    if (fd >= 0)
        f = fdopen(fd, "rb");
    if (!f && errno != ENOENT)
        die_file("cannot read", path);
    return f;
}

// Locks an open file or folder until the program ends. A run that was just killed may still be
// saving, so this waits for up to 5 seconds. Returns false if another run keeps the lock.
static bool lock_for_this_run(int fd) {
    for (int tries = 0; tries < 50; tries++) {
        const bool locked = flock(fd, LOCK_EX | LOCK_NB) == 0;
        const bool has_locks = locked || errno == EWOULDBLOCK; // some file systems have none
        if (locked || !has_locks)
            return true;
        nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    }
    return false;
}

/* A file that is replaced atomically: the new contents are written to a temporary file in the same
   folder, which is then synced and renamed. The new file has the mode of the old one. If the name
   is a symbolic link, the file that it points to is replaced. */
typedef struct AtomicFile {
    FILE *stream;
    char path[PATH_SIZE], temporary[PATH_SIZE + 4]; // both empty if what is written is discarded
} AtomicFile;

// resolved = the absolute path without symbolic links. The file need not exist; if its folder does
// not exist either, resolved = path.
static void resolve_path(char resolved[PATH_SIZE], const char *path) {
    if (realpath(path, resolved))
        return;
    char folder[PATH_SIZE], absolute[PATH_SIZE];
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    snprintf(folder, sizeof folder, "%.*s.", (int)(name - path), path); // ends in "/.", or is "."
    if (realpath(folder, absolute))
        join_path(resolved, absolute, name);
    else
        snprintf(resolved, PATH_SIZE, "%s", path);
}

// Opens a file that discards what is written.
static void atomic_open_discarded(AtomicFile *f) {
    *f = (AtomicFile){.stream = fopen("/dev/null", "wb")};
    if (!f->stream)
        die_file("cannot open", "/dev/null");
}

static void atomic_open(AtomicFile *f, const char *path) {
    struct stat old;
    const bool exists = stat(path, &old) == 0;
    *f = (AtomicFile){.stream = NULL};
    if (exists && !S_ISREG(old.st_mode))
        die(1, "cannot write %s: it exists and is not a regular file; choose another name", path);
    resolve_path(f->path, path);
    snprintf(f->temporary, sizeof f->temporary, "%s.tmp", f->path);
    unlink(f->temporary); // which a killed run may have left
    f->stream = fopen(f->temporary, "wb");
    unfinished = f->temporary;
    if (!f->stream)
        die_file("cannot create", f->temporary);
    if (exists && fchmod(fileno(f->stream), old.st_mode & 07777) != 0)
        die_file("cannot create", f->temporary);
}

// Syncs the folder that contains a file, so that the file's new name survives a crash. Some file
// systems cannot do that (EINVAL).
static void sync_folder(const char *file) {
    char path[PATH_SIZE];
    snprintf(path, sizeof path, "%s", file);
    const int folder = open(dirname(path), O_RDONLY);
    if (folder < 0)
        return; // a folder that may be written but not read
    if (fsync(folder) != 0 && errno != EINVAL)
        die_file("cannot sync the folder of", file);
    close(folder);
}

// Writes the temporary file to the disk and gives it its final name.
static void sync_and_rename(const AtomicFile *f) {
    if (fflush(f->stream) != 0 || ferror(f->stream) || fsync(fileno(f->stream)) != 0)
        die_file("cannot write", f->temporary);
    if (fclose(f->stream) != 0)
        die_file("cannot write", f->temporary);
    if (rename(f->temporary, f->path) != 0)
        die_file("cannot write", f->path);
    sync_folder(f->path);
}

static void atomic_commit(const AtomicFile *f) {
    if (*f->path)
        sync_and_rename(f);
    else
        fclose(f->stream); // what was written is discarded
    unfinished = NULL;
}

// ---- Limits of the machine

static double machine_memory(void) {
    return (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
}

// Returns a positive number from the environment, or 0.
static size_t environment_number(const char *name) {
    const char *text = getenv(name);
    if (!text || atoi(text) <= 0)
        return 0;
    return (size_t)atoi(text);
}

// line = the first line of a file that begins with `prefix`, or "" if no line does
static void find_line(char line[PATH_SIZE], const char *path, const char *prefix) {
    char next[PATH_SIZE];
    FILE *f = fopen(path, "r");
    *line = 0;
    if (!f)
        return;
    const char *found = fgets(next, sizeof next, f);
    while (found && strncmp(found, prefix, strlen(prefix)) != 0)
        found = fgets(next, sizeof next, f);
    if (found)
        strcpy(line, found);
    fclose(f);
    line[strcspn(line, "\n")] = 0;
}

// Returns the limit that a file of a cgroup states, or INFINITY: memory.max states bytes; cpu.max
// states a CPU time and the period in which the group may use it, whose quotient is in cores.
static double read_limit(const char *path) {
    char line[PATH_SIZE];
    double limit = INFINITY; // sscanf() leaves it so if the line is "max", or missing
    double period = 1;       // and this one if there is no second number
    find_line(line, path, "");
    sscanf(line, "%lf %lf", &limit, &period);
    return limit / period;
}

// Returns the smallest limit of this process's cgroup (version 2) and the groups above it.
// `cgroup_file` has the format of /proc/self/cgroup: a line "0::GROUP", and the group's limit is in
// ROOT/GROUP/name.
static double cgroup_limit(const char *cgroup_file, const char *root, const char *name) {
    char line[PATH_SIZE], path[3 * PATH_SIZE];
    double limit = INFINITY;
    find_line(line, cgroup_file, "0::");
    if (!*line)
        return INFINITY;
    char *const group = line + strlen("0::");
    char *end = group + strlen(group);
    while (end) {
        *end = 0;
        snprintf(path, sizeof path, "%s%s/%s", root, group, name);
        limit = fmin(limit, read_limit(path));
        end = strrchr(group, '/'); // the group above it
    }
    return limit;
}

// Returns the memory, in bytes, that this process's Slurm job may use on this machine. Slurm states
// it in MB, for the machine or for each core.
static double slurm_limit(void) {
    const size_t mb_of_machine = environment_number("SLURM_MEM_PER_NODE");
    const size_t mb_per_core = environment_number("SLURM_MEM_PER_CPU");
    const size_t mb =
        max_size(mb_of_machine, mb_per_core * environment_number("SLURM_CPUS_ON_NODE"));
    return mb > 0 ? 0x1p20 * (double)mb : INFINITY;
}

// Returns the memory that this process may use, in bytes: the smallest of the machine's, the Slurm
// job's and the cgroup's limits.
static double memory_limit(void) {
    const double cgroup = cgroup_limit("/proc/self/cgroup", "/sys/fs/cgroup", "memory.max");
    return fmin(fmin(machine_memory(), slurm_limit()), cgroup);
}

// Returns the cores that this process may use. A container may have a part of the time of all cores
// instead of cores of its own; more threads would only use it up sooner, and wait.
static size_t usable_cores(void) {
    cpu_set_t set;
    const int error = sched_getaffinity(0, sizeof set, &set);
    const double cores = error ? 1 : CPU_COUNT(&set);
    const double quota = cgroup_limit("/proc/self/cgroup", "/sys/fs/cgroup", "cpu.max");
    return (size_t)fmax(1, fmin(cores, ceil(quota)));
}

// ---- Hashes, and numbers that are finite

// FNV-1a. `hash` is the hash of the preceding bytes, or HASH_START at the beginning.
#define HASH_START 0xcbf29ce484222325u
static uint64_t hash_bytes(uint64_t hash, const void *memory, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const uint8_t *)memory)[i]) * 0x100000001b3u;
    return hash;
}

// Returns whether a 16-bit number is finite, that is, whether a bit of its exponent is 0.
static bool is_finite_16(uint16_t bits, Precision precision) {
    const uint16_t exponent = precision == FP16 ? 0x7c00 : 0x7f80;
    return (bits & exponent) != exponent;
}

static bool all_finite(const void *numbers, size_t count, Precision precision) {
    const bool is_16_bit = precision == FP16 || precision == BF16;
    for (size_t i = 0; i < count; i++) {
        bool finite;
        if (is_16_bit)
            finite = is_finite_16(((const uint16_t *)numbers)[i], precision);
        else
            finite = isfinite(((const real *)numbers)[i]);
        if (!finite)
            return false;
    }
    return true;
}

// ---- Events of a trace

// The events of --trace. A track is a thread, a device or a worker of a rank.
enum { TRACE_EVENTS = 1 << 18 };
enum { TRACK_STEP, TRACK_HOST, TRACK_DEVICE, TRACK_COMM, TRACK_LOADER };

typedef struct TraceEvent {
    char name[48];
    size_t rank, track;
    double begin, end; // as now() returns them
} TraceEvent;

static struct {
    size_t traced_ranks; // how many ranks are in a traced step
    size_t count;        // how many events there were; those after TRACE_EVENTS were dropped
    TraceEvent *events;
} trace;

// Appends an event, if any rank is being traced. Thread-safe.
static void trace_event(size_t rank, size_t track, const char *name, double begin, double end) {
    if (!__atomic_load_n(&trace.traced_ranks, __ATOMIC_RELAXED))
        return;
    size_t i = __atomic_fetch_add(&trace.count, 1, __ATOMIC_RELAXED);
    if (i >= TRACE_EVENTS)
        return;
    trace.events[i] = (TraceEvent){.rank = rank, .track = track, .begin = begin, .end = end};
    snprintf(trace.events[i].name, sizeof trace.events[i].name, "%s", name);
}

/* ==== 4. Network =================================================================================

   A network is a table of layers. Builders add rows and mirror PyTorch's modules. Everything else
   (sizes, memory, summary, forward, backward, checkpoints) walks over the table. The network owns
   these arenas, which are planned from the table and allocated once:
      params, grads     [param_size], each tensor aligned to a cache line
      params16          --precision bf16, fp16: a 16-bit copy of the parameters
      activations       [batch][...] of every row; in-place rows share their input's, and a CPU
                        reads the images, row 0, from the loader's buffer
      dactivations      their gradients; those with disjoint lifetimes share memory
      stats             BatchNorm's running statistics, and the last batch's statistics
      saved             bytes that a forward pass saves for the backward pass
      moments, scratch  working memory of the kernels
      losses            of each image of the current batch; after them, 1 for each image that is
                        classified correctly, and 0 for the others
      labels            of the current batch
   Others are small or only for GPUs: transposed, prepared, staging, step and loss_scale (see
   Net). */

enum { ALIGN = CACHE_LINE / sizeof(real) }; // in elements

/* Which kernels compute a row, and where its arrays are. For example, conv -> batchnorm -> relu,
   where the kernels of the batchnorm also compute the ReLU:
     rows          computed by   output      gradient    in bytes
     0 input       0             at 0        none
     1 conv        1             at 1024     at 0
     2 batchnorm   2             at 5120     at 4096
     3 relu        2             at 5120     at 4096     fused: has the output of row 2 */
typedef struct RowPlan {
    size_t computed_by; // the row whose kernels compute this one
    RowMode mode;
    Fusion fused;    // what the kernels of this row compute as well
    size_t residual; // the second operand of an add, fused or not. 0 means that there is none, or
                     // that it is the images: neither needs a gradient.
    bool shares_gradient;   // the residual's gradient is kept in the memory of the sum's gradient
    size_t output, doutput; // offsets into activations and dactivations, in bytes
    size_t stats;           // batchnorm2d: offset into stats, see the block on BatchNorm
    size_t saved;           // offset into saved: argmax of a max-pool, mask of a dropout
    size_t prepared;        // offset into prepared: what the kernels keep
} RowPlan;

typedef struct Net {
    // the table
    const char *model;
    const Settings *settings;
    const Kernels *kernels;
    const Device *device;          // the device on which these kernels run
    Layer layers[MAX_LAYERS];      // row 0 is the input
    RowPlan row_plans[MAX_LAYERS]; // for the same rows
    size_t layer_count;            // the number of rows in both
    size_t classes;
    size_t parameter_count;
    size_t max_batch;      // the largest number of images in a training step
    size_t max_test_batch; // the largest number of images in a step of an evaluation
    // sizes of the arenas in elements
    size_t param_size; // elements of all parameters, with the gaps between tensors
    size_t stats_size, moments_size, scratch_size, transposed_size;
    size_t staging_size; // of the largest copy: a tensor, or the outputs of a batch
    // sizes of the arenas in bytes
    size_t activation_bytes, dactivation_bytes, saved_bytes, prepared_bytes;
    // the arenas
    real *params, *grads, *stats, *moments, *scratch, *losses;
    char *params16, *activations, *dactivations;
    void *transposed;      // --layout nchw, else NULL
    LossScale *loss_scale; // on a GPU, else NULL
    // On the host: staging buffers for copies from and to the device. The results of a step come
    // back in staging[0]: the losses and what was classified correctly, or the outputs.
    real *staging[2];
    uint8_t *saved, *labels;
    char *prepared;  // what the kernels keep in the host's memory
    MemoryPlan plan; // lists these arenas
    // the current step
    StepInputs *step;       // for the batch that net_load() has loaded
    real *images;           // if not NULL, the loader's buffer, which replaces output(net, 0)
    size_t world;           // how many ranks divide a batch; the loss is the mean over all of it
    size_t batches_tracked; // number of batches in BatchNorm's running statistics
    // If not NULL, backward() calls it when the gradients at offset `first` and above are complete.
    void (*on_gradients)(void *context, size_t first);
    void *context;
    bool marks_rows; // sets a mark at the start and at the end of each row
    bool names_rows; // opens a range for Nsight around each row
    double *flops;   // if not NULL, backward stores here how many operations a row executes
} Net;

/* The properties of each kind of layer. needs_out: no later row may overwrite the output, because
   the kind's backward reads it. A ReLU can do without that, although its backward reads which
   outputs are positive: a dropout that works in place may set a positive output to zero, but then
   the output's gradient is zero, too. */
static const struct {
    const char *name;
    double flops; // forward, for each weight and output pixel
    bool saves;   // a byte for each output: an argmax or a mask
    bool needs_out;
    size_t stats; // rows of statistics, with one number for each channel
} kinds[KINDS] = {
    [INPUT] = {.name = "input"},
    [CONV2D] = {.name = "conv2d", .flops = 2},
    [BATCHNORM2D] = {.name = "batchnorm2d", .stats = STATS_ROWS},
    [RELU] = {.name = "relu"},
    [MAXPOOL2D] = {.name = "maxpool2d", .saves = true},
    [GLOBAL_AVGPOOL2D] = {.name = "global average pool"},
    [ADD] = {.name = "add"},
    [DROPOUT] = {.name = "dropout", .saves = true},
    [LINEAR] = {.name = "linear", .flops = 2},
    [LOG_SOFTMAX] = {.name = "log_softmax", .needs_out = true},
};

static size_t last_row(const Net *net) {
    return net->layer_count - 1;
}

static size_t align_up(size_t count) {
    return ceil_div(count, ALIGN) * ALIGN;
}

static size_t add_layer(Net *net, Layer l) {
    if (net->layer_count == MAX_LAYERS)
        die(1, "model %s: more than %d layers; raise MAX_LAYERS in cnn.c", net->model, MAX_LAYERS);
    net->layers[net->layer_count] = l;
    net->layer_count++;
    return last_row(net);
}

// Reserves `size` at the end of an arena and returns the offset.
static size_t reserve(size_t *arena_size, size_t size) {
    const size_t offset = *arena_size;
    *arena_size += size;
    return offset;
}

// Reserves room for `count` parameters and returns the offset.
static size_t add_params(Net *net, size_t count) {
    net->parameter_count += count;
    net->staging_size = max_size(net->staging_size, count);
    return reserve(&net->param_size, align_up(count));
}

// Adds a layer with parameters, named as in PyTorch's examples: conv1, conv2, ..., fc1, fc2, ...
static size_t add_with_weights(Net *net, Layer l, const char *prefix) {
    size_t number = 1;
    for (size_t i = 0; i < net->layer_count; i++)
        if (net->layers[i].kind == l.kind)
            number++;
    snprintf(l.name, sizeof l.name, "%s%zu", prefix, number);
    l.weight_offset = add_params(net, l.weight_count);
    l.bias_offset = add_params(net, l.bias_count);
    return add_layer(net, l);
}

// Names row x: x = set_row_name(net, conv2d(...), "layer3.0.", "conv1")
static size_t set_row_name(Net *net, size_t x, const char *block, const char *name) {
    snprintf(net->layers[x].name, sizeof net->layers[x].name, "%.30s%s", block, name);
    return x;
}

enum { MAX_WINDOW = 11 };

static bool window_fits(const Layer *l, size_t channels) {
    const bool size_fits = l->kernel_size >= 1 && l->kernel_size <= MAX_WINDOW;
    const bool stride_fits = l->stride >= 1 && l->stride <= MAX_WINDOW;
    const bool padding_fits = l->padding < l->kernel_size;
    const bool high_enough = l->in.h + 2 * l->padding >= l->kernel_size;
    const bool wide_enough = l->in.w + 2 * l->padding >= l->kernel_size;
    return size_fits && stride_fits && padding_fits && high_enough && wide_enough && channels > 0;
}

// Returns a layer whose window slides over the output of row x. Dies if the window does not fit.
static Layer window_layer(const Net *net, size_t x, LayerKind kind, size_t channels,
                          size_t kernel_size, size_t stride, size_t padding) {
    Layer l = {
        .kind = kind, .input = x, .kernel_size = kernel_size, .stride = stride, .padding = padding};
    const Shape in = net->layers[x].out;
    l.in = in;
    if (!window_fits(&l, channels))
        die(1,
            "model %s: %s at row %zu: a window of %zu x %zu, stride %zu, padding %zu, to %zu "
            "channels cannot slide over %zu x %zu pixels; expected 1 x 1 to %d x %d, not larger "
            "than the image, a stride of 1 to %d, a padding below the window's size",
            net->model, kinds[kind].name, net->layer_count, kernel_size, kernel_size, stride,
            padding, channels, in.h, in.w, MAX_WINDOW, MAX_WINDOW, MAX_WINDOW);
    l.out.h = (in.h + 2 * padding - kernel_size) / stride + 1;
    l.out.w = (in.w + 2 * padding - kernel_size) / stride + 1;
    l.out.c = channels;
    return l;
}

// nn.Conv2d(in_channels = channels of x, out_channels, kernel_size, stride, padding, bias = bias)
static size_t conv2d_bias(Net *net, size_t x, size_t out_channels, size_t kernel_size,
                          size_t stride, size_t padding, bool bias) {
    Layer l = window_layer(net, x, CONV2D, out_channels, kernel_size, stride, padding);
    l.weight_count = kernel_size * kernel_size * l.in.c * out_channels;
    l.bias_count = bias ? out_channels : 0;
    return add_with_weights(net, l, "conv");
}

// nn.Conv2d() with bias = True, PyTorch's default
static size_t conv2d(Net *net, size_t x, size_t out_channels, size_t kernel_size, size_t stride,
                     size_t padding) {
    return conv2d_bias(net, x, out_channels, kernel_size, stride, padding, true);
}

// nn.Linear(in_features = size of x, out_features), with x flattened
static size_t linear(Net *net, size_t x, size_t out_features) {
    Layer l = {
        .kind = LINEAR, .input = x, .kernel_size = 1, .stride = 1, .bias_count = out_features};
    l.in = (Shape){1, 1, shape_size(net->layers[x].out)};
    l.out = (Shape){1, 1, out_features};
    l.weight_count = l.in.c * out_features;
    if (out_features == 0)
        die(1, "model %s: linear at row %zu: expected at least 1 output", net->model,
            net->layer_count);
    return add_with_weights(net, l, "fc");
}

// nn.BatchNorm2d(num_features = channels of x)
static size_t batchnorm2d(Net *net, size_t x) {
    Shape s = net->layers[x].out;
    Layer l = {
        .kind = BATCHNORM2D, .input = x, .in = s, .out = s, .weight_count = s.c, .bias_count = s.c};
    net->staging_size = max_size(net->staging_size, 2 * s.c); // both running statistics at once
    return add_with_weights(net, l, "bn");
}

static size_t add_same_shape(Net *net, size_t x, LayerKind kind, real p) {
    Shape s = net->layers[x].out;
    return add_layer(net, (Layer){.kind = kind, .input = x, .in = s, .out = s, .p = p});
}

static size_t relu(Net *net, size_t x) {
    return add_same_shape(net, x, RELU, 0);
}

// a + b, the sum in a residual block. The result may overwrite the later of the two rows.
static size_t add(Net *net, size_t a, size_t b) {
    Shape s = net->layers[a].out, t = net->layers[b].out;
    if (s.h != t.h || s.w != t.w || s.c != t.c)
        die(1, "model %s: add at row %zu: expected equal shapes, found %zux%zux%zu and %zux%zux%zu",
            net->model, net->layer_count, s.h, s.w, s.c, t.h, t.w, t.c);
    size_t x = add_same_shape(net, max_size(a, b), ADD, 0);
    net->layers[x].other = min_size(a, b);
    return x;
}

// nn.Dropout(p)
static size_t dropout(Net *net, size_t x, real p) {
    if (!(p >= 0 && p < 1))
        die(1, "model %s: dropout at row %zu: expected a probability from 0 to below 1, found %g",
            net->model, net->layer_count, (double)p);
    return add_same_shape(net, x, DROPOUT, p);
}

// nn.LogSoftmax(dim = 1): over the classes; the image must have 1 x 1 pixel
static size_t log_softmax(Net *net, size_t x) {
    if (net->layers[x].out.h * net->layers[x].out.w != 1)
        die(1, "model %s: log_softmax at row %zu: expected 1 x 1 pixel, found %zu x %zu",
            net->model, net->layer_count, net->layers[x].out.h, net->layers[x].out.w);
    return add_same_shape(net, x, LOG_SOFTMAX, 0);
}

// nn.MaxPool2d(kernel_size, stride, padding)
static size_t maxpool2d(Net *net, size_t x, size_t kernel_size, size_t stride, size_t padding) {
    const size_t channels = net->layers[x].out.c;
    return add_layer(net, window_layer(net, x, MAXPOOL2D, channels, kernel_size, stride, padding));
}

// nn.AdaptiveAvgPool2d(1): the mean over all pixels
static size_t global_avgpool2d(Net *net, size_t x) {
    Shape s = net->layers[x].out;
    return add_layer(net,
                     (Layer){.kind = GLOBAL_AVGPOOL2D, .input = x, .in = s, .out = {1, 1, s.c}});
}

// ---- Fusion

// Returns how often a layer reads a row: x + x reads x twice.
static size_t count_reads_by(const Layer *l, size_t row) {
    size_t reads = 0;
    if (l->input == row)
        reads++;
    if (l->kind == ADD && l->other == row)
        reads++;
    return reads;
}

// Returns how often the layers after a row read it, in total.
static size_t count_reads(const Net *net, size_t row) {
    size_t count = 0;
    for (size_t i = row + 1; i < net->layer_count; i++)
        count += count_reads_by(&net->layers[i], row);
    return count;
}

// Returns whether the reader of a row may write its result over the row's output. There must be no
// other reader, the output must not be the images, and two rows must not need it in their backward
// passes: this row, and the row whose kernels wrote the output. The kernels' fuse() decides whether
// the reader's backward pass allows the overwriting.
static bool is_output_disposable(const Net *net, size_t row) {
    const size_t writer = net->row_plans[row].computed_by;
    if (row == 0)
        return false; // the images
    if (count_reads(net, row) != 1)
        return false;
    return !kinds[net->layers[row].kind].needs_out && !kinds[net->layers[writer].kind].needs_out;
}

/* Makes a convolution's kernels compute the max-pool that follows. The convolution's backward pass
   then also computes the backward pass of the ReLU between the two, and of the ReLU before the
   convolution, unless another row reads this ReLU. For example, in conv1 -> relu -> conv2 -> relu
   -> pool, where both ReLUs have been fused:
                                  conv1           conv2           conv2
                                  relu_backward   relu_backward   input_relu_backward
     before                       true            true            false
     after                        false           false           true
     after, if another row also
     reads the first ReLU         true            false           false     */
static void fuse_pool(Net *net, size_t conv_row, const Layer *pool) {
    RowPlan *conv = &net->row_plans[conv_row];
    const size_t input = net->layers[conv_row].input;
    const size_t input_writer = net->row_plans[input].computed_by;
    RowPlan *before = &net->row_plans[input_writer];
    const bool includes_relu = before->fused.relu && count_reads(net, input) == 1;
    conv->fused.pool = pool;
    conv->fused.relu_backward = false;
    conv->fused.input_relu_backward = includes_relu;
    if (includes_relu)
        before->fused.relu_backward = false;
}

// Returns whether a row is computed by kernels of its own, not by those of an earlier row.
static bool has_kernels(const RowPlan *plan) {
    return plan->mode != FUSED_INTO_EARLIER;
}

// Makes the kernels of row `target`, which compute the input of row i, compute row i as well.
static void fuse_row(Net *net, size_t i, size_t target) {
    const Layer *l = &net->layers[i];
    RowPlan *plan = &net->row_plans[target];
    if (l->kind == ADD) {
        plan->fused.add = true;
        plan->residual = l->other;
    }
    if (l->kind == RELU) {
        plan->fused.relu = true;
        plan->fused.relu_backward = true;
    }
    if (l->kind == MAXPOOL2D)
        fuse_pool(net, target, l);
    net->row_plans[i].computed_by = target;
}

// Links a convolution with the batchnorm2d in the next row, if the convolution's forward stores
// sums for the batchnorm2d.
static void link_moments(Net *net, size_t i) {
    const Layer *l = &net->layers[i], *before = &net->layers[l->input];
    if (l->kind != BATCHNORM2D || l->input + 1 != i || before->kind != CONV2D)
        return;
    const size_t size = net->kernels->moments_size(before, net->max_batch);
    if (size == 0)
        return;
    net->row_plans[i].fused.moments_partner = before;
    net->row_plans[l->input].fused.moments_partner = l;
    net->moments_size = max_size(net->moments_size, size);
}

// Asks the kernels how each row is computed.
static void plan_fusion(Net *net) {
    const Kernels *k = net->kernels;
    for (size_t i = 1; i < net->layer_count; i++) {
        const Layer *l = &net->layers[i];
        RowPlan *plan = &net->row_plans[i];
        const size_t target = net->row_plans[l->input].computed_by;
        plan->computed_by = i;
        if (is_output_disposable(net, l->input))
            plan->mode = k->fuse(&net->layers[target], &net->row_plans[target].fused, l);
        if (plan->mode == FUSED_INTO_EARLIER)
            fuse_row(net, i, target);
        else if (l->kind == ADD)
            plan->residual = l->other;
        link_moments(net, i);
    }
}

// ---- Memory of the gradients

// Returns whether the kernels of a row read what the kernels of the row `writer` have written.
static bool kernels_read_output_of(const Net *net, size_t row, size_t writer) {
    const RowPlan *plans = net->row_plans;
    const size_t input_writer = plans[net->layers[row].input].computed_by;
    const size_t residual_writer = plans[plans[row].residual].computed_by;
    if (!has_kernels(&plans[row]))
        return false;
    return input_writer == writer || residual_writer == writer;
}

/* Returns whether the residual of `row` may keep its gradient in the memory of the sum's gradient.
   The two gradients are equal at first, so sharing saves the copy that a separate add makes.
   Sharing fails if another reader of the residual writes to this memory before the backward pass of
   `row` has read it. Backward runs from the last row to the first, so neither `row` itself nor a
   later row may read the residual in another way. An earlier row may, since its backward pass comes
   later and adds to the gradient. For example, with row = 3:
     row            reads
     1 relu         0
     2 conv         1          reads row 1, too: sharing is allowed
     3 batchnorm    2          its kernels also compute row 4; its residual is row 1
     4 add          3 and 1    its gradient is also that of row 1, to which row 2 adds later */
static bool may_share_gradient(const Net *net, size_t row) {
    const RowPlan *plans = net->row_plans;
    const size_t writer = plans[plans[row].residual].computed_by;
    if (!plans[row].fused.add)
        return false;
    if (writer == 0)
        return false; // the residual is the images, which have no gradient
    if (plans[net->layers[row].input].computed_by == writer)
        return false; // also its input, whose gradient would overwrite the sum's
    for (size_t i = row + 1; i < net->layer_count; i++)
        if (kernels_read_output_of(net, i, writer))
            return false;
    return true;
}

/* The memory of a gradient. Backward runs from the last row to the first: the memory is in use from
   row `first_written`, the last row that reads the output, down to row `last_used`, the first of
   the rows whose gradients share the memory. */
typedef struct GradientBlock {
    size_t first_written, last_used;
    size_t size, offset; // in bytes
} GradientBlock;

static bool overlap_in_time(const GradientBlock *a, const GradientBlock *b) {
    return a->last_used <= b->first_written && b->last_used <= a->first_written;
}

static bool overlap_in_memory(const GradientBlock *a, const GradientBlock *b) {
    return a->offset < b->offset + b->size && b->offset < a->offset + a->size;
}

// Returns a placed block that `block` overlaps in time and memory, or NULL.
static const GradientBlock *find_conflict(const GradientBlock *block, const GradientBlock *placed,
                                          size_t count) {
    for (size_t i = 0; i < count; i++)
        if (overlap_in_time(block, &placed[i]) && overlap_in_memory(block, &placed[i]))
            return &placed[i];
    return NULL;
}

// Sets block->offset to the lowest offset at which the block overlaps no placed gradient that is in
// use at the same time (first fit).
static void place_gradient(GradientBlock *block, const GradientBlock *placed, size_t count) {
    block->offset = 0;
    const GradientBlock *conflict = find_conflict(block, placed, count);
    while (conflict) {
        block->offset = conflict->offset + conflict->size;
        conflict = find_conflict(block, placed, count);
    }
}

// Returns the bytes per element of a row's output. That of log_softmax, which feeds the loss, stays
// 32-bit.
static size_t element_bytes_of(const Net *net, const Layer *l) {
    return l->kind == LOG_SOFTMAX ? sizeof(real) : net->kernels->element_bytes;
}

// same_memory_as[row] = the row whose memory the row's gradient shares, or the row itself. A row
// that is computed in place or fused shares this memory with its input's gradient; a sum may share
// it with its residual's gradient. Rows are visited from the last one down, so same_memory_as[i] is
// final when it is copied.
static void find_shared_gradients(Net *net, size_t *same_memory_as) {
    for (size_t i = 0; i < net->layer_count; i++)
        same_memory_as[i] = i;
    for (size_t i = last_row(net); i > 0; i--) {
        RowPlan *plan = &net->row_plans[i];
        plan->shares_gradient = may_share_gradient(net, i);
        if (plan->mode != SEPARATE)
            same_memory_as[net->layers[i].input] = same_memory_as[i];
        if (plan->shares_gradient)
            same_memory_as[plan->residual] = same_memory_as[i];
    }
}

static GradientBlock gradient_block_of(const Net *net, size_t row, const size_t *same_memory_as) {
    const Layer *l = &net->layers[row];
    GradientBlock block = {.first_written = row, .last_used = row};
    block.size = align_up(net->max_batch * shape_size(l->out)) * element_bytes_of(net, l);
    for (size_t i = 1; i < net->layer_count; i++) {
        if (same_memory_as[i] == row)
            block.last_used = min_size(block.last_used, i);
        if (count_reads_by(&net->layers[i], row) > 0)
            block.first_written = max_size(block.first_written, i);
    }
    return block;
}

// Sets the offsets of all gradients, from the last row to the first.
static void plan_gradients(Net *net) {
    size_t same_memory_as[MAX_LAYERS], count = 0;
    GradientBlock placed[MAX_LAYERS];
    find_shared_gradients(net, same_memory_as);
    for (size_t row = last_row(net); row > 0; row--) {
        if (same_memory_as[row] != row)
            continue;
        GradientBlock block = gradient_block_of(net, row, same_memory_as);
        place_gradient(&block, placed, count);
        placed[count] = block;
        count++;
        net->dactivation_bytes = max_size(net->dactivation_bytes, block.offset + block.size);
        for (size_t i = 1; i <= row; i++)
            if (same_memory_as[i] == row)
                net->row_plans[i].doutput = block.offset;
    }
}

// ---- Arenas

// Returns whether there is a 16-bit copy of the parameters, which the kernels read.
static bool has_params16(const Net *net) {
    return net->kernels->element_bytes < sizeof(real);
}

static void plan_net_arenas(Net *net) {
    const size_t size = sizeof(real);
    const size_t max_images = max_size(net->max_batch, net->max_test_batch);
    MemoryPlan *p = &net->plan;
    p->device = net->device;
    memory_plan_add(p, &net->params, size * net->param_size, DEVICE_MEMORY, FOR_PARAMETERS);
    memory_plan_add(p, &net->grads, size * net->param_size, DEVICE_MEMORY, FOR_GRADIENTS);
    if (has_params16(net))
        memory_plan_add(p, &net->params16, 2 * net->param_size, DEVICE_MEMORY, FOR_PARAMETERS);
    memory_plan_add(p, &net->activations, net->activation_bytes, DEVICE_MEMORY, FOR_ACTIVATIONS);
    memory_plan_add(p, &net->dactivations, net->dactivation_bytes, DEVICE_MEMORY, FOR_DACTIVATIONS);
    memory_plan_add(p, &net->stats, size * net->stats_size, DEVICE_MEMORY, FOR_STATISTICS);
    memory_plan_add(p, &net->saved, net->saved_bytes, DEVICE_MEMORY, FOR_STATISTICS);
    memory_plan_add(p, &net->losses, 2 * size * max_images, DEVICE_MEMORY, FOR_STATISTICS);
    memory_plan_add(p, &net->labels, max_images, DEVICE_MEMORY, FOR_STATISTICS);
    if (net->device->is_gpu)
        memory_plan_add(p, &net->loss_scale, sizeof *net->loss_scale, DEVICE_MEMORY,
                        FOR_STATISTICS);
    memory_plan_add(p, &net->step, sizeof *net->step, DEVICE_MEMORY, FOR_STATISTICS);
    memory_plan_add(p, &net->moments, size * net->moments_size, DEVICE_MEMORY, FOR_SCRATCH);
    memory_plan_add(p, &net->scratch, size * net->scratch_size, DEVICE_MEMORY, FOR_SCRATCH);
    if (net->settings->layout == NCHW)
        memory_plan_add(p, &net->transposed, net->transposed_size * net->kernels->element_bytes,
                        DEVICE_MEMORY, FOR_SCRATCH);
    memory_plan_add(p, &net->staging[0], size * net->staging_size, PINNED_MEMORY, FOR_BUFFERS);
    memory_plan_add(p, &net->staging[1], size * net->staging_size, HOST_MEMORY, FOR_BUFFERS);
    memory_plan_add(p, &net->prepared, net->prepared_bytes, HOST_MEMORY, FOR_BUFFERS);
}

// Returns the shape of what a row's kernels write: the max-pool's, if one is fused.
static Shape stored_shape(const Net *net, size_t row) {
    const Layer *pool = net->row_plans[row].fused.pool;
    return pool ? pool->out : net->layers[row].out;
}

static const Kernels naive_kernels; // see section 7

// Dies unless the table has a row for the kind, with a forward and a backward function.
static void require_kernels(const Net *net, const Kernels *k, const char *table, size_t i) {
    const LayerKind kind = net->layers[i].kind;
    const char *missing = NULL;
    if (!k->layers[kind].forward)
        missing = "forward";
    else if (!k->layers[kind].backward)
        missing = "backward";
    if (missing)
        die(1, "model %s, row %zu: layer kind %d (%s) has no %s in %s; add it", net->model, i, kind,
            kinds[kind].name, missing, table);
}

// Dies if the kernels cannot compute the kind of row i. On a CPU, naive_kernels must always have
// the kind, since the fast kernels call the definitions. Also dies if the row reads a log_softmax,
// whose output stays 32-bit and whose backward pass does not add to another row's gradient; and if
// no later row reads this one, since nothing would write its gradient.
static void check_row(const Net *net, size_t i) {
    const Layer *l = &net->layers[i];
    const Kernels *k = net->kernels;
    if (!kinds[l->kind].name)
        die(1, "model %s, row %zu: layer kind %d (?) has no row in kinds[]; add it", net->model, i,
            l->kind);
    if (i == 0)
        return;
    if (net->device->is_gpu)
        require_kernels(net, k, "make_kernels() of cnn_kernels.cu", i);
    else
        require_kernels(net, &naive_kernels, "naive_kernels", i);
    if (k->choice == FAST)
        require_kernels(net, k, "fast_kernels", i);
    if (net->layers[l->input].kind == LOG_SOFTMAX || net->layers[l->other].kind == LOG_SOFTMAX)
        die(1, "model %s, row %zu: reads a log_softmax; expected log_softmax only as the last row",
            net->model, i);
    if (i < last_row(net) && count_reads(net, i) == 0)
        die(1,
            "model %s, row %zu, a %s: expected a later row that reads it, found none; keep the "
            "number that its function returns, as in x = relu(net, x)",
            net->model, i, kinds[l->kind].name);
}

// Sets the offsets of a row's arrays, for at most max_images.
static void plan_row(Net *net, size_t i, size_t max_images) {
    const Layer *l = &net->layers[i];
    const Kernels *k = net->kernels;
    RowPlan *plan = &net->row_plans[i];
    const size_t count = align_up(max_images * shape_size(stored_shape(net, i)));
    const bool saves = plan->fused.pool || (has_kernels(plan) && kinds[l->kind].saves);
    if (plan->mode == SEPARATE)
        plan->output = reserve(&net->activation_bytes, count * element_bytes_of(net, l));
    else
        plan->output = net->row_plans[l->input].output;
    plan->stats = reserve(&net->stats_size, kinds[l->kind].stats * align_up(l->out.c));
    plan->saved = reserve(&net->saved_bytes, saves ? count : 0);
    net->scratch_size = max_size(net->scratch_size, k->scratch_size(l, &plan->fused, max_images));
    net->transposed_size = max_size(net->transposed_size, k->transposed_size(l, max_images));
    plan->prepared =
        reserve(&net->prepared_bytes, CACHE_LINE * ceil_div(k->prepared_bytes(l), CACHE_LINE));
}

// Plans all arenas, for at most `max_batch` images in a training step and `max_test_batch` in a
// step of an evaluation.
static void plan_net(Net *net, size_t max_batch, size_t max_test_batch) {
    const size_t max_images = max_size(max_batch, max_test_batch);
    for (size_t i = 0; i < net->layer_count; i++)
        check_row(net, i);
    net->max_batch = max_batch;
    net->max_test_batch = max_test_batch;
    plan_fusion(net);
    net->staging_size = max_size(net->staging_size, max_images * max_size(net->classes, 2));
    for (size_t i = 0; i < net->layer_count; i++)
        plan_row(net, i, max_images);
    plan_gradients(net);
    plan_net_arenas(net);
}

// Allocates the arenas and prepares the kernels of each row.
static void net_alloc(Net *net) {
    memory_plan_alloc(&net->plan);
    for (size_t i = 0; i < net->layer_count; i++)
        net->kernels->prepare(net->prepared + net->row_plans[i].prepared, &net->layers[i]);
}

// Refreshes the 16-bit copy of the parameters, after anything but the optimizer has changed them.
static void refresh_params16(const Net *net) {
    if (has_params16(net))
        net->kernels->to_16_bit(net->params16, net->params, net->param_size);
}

// ---- Initial values, as in PyTorch's modules and torchvision's ResNets

// Turns two uniform numbers into two standard normal numbers (Box, Muller 1958). 1 - pair[0] is
// never 0, so log() is finite.
static void make_normal(double pair[2]) {
    const double radius = sqrt(-2 * log(1 - pair[0])), angle = 2 * M_PI * pair[1];
    pair[0] = radius * cos(angle);
    pair[1] = radius * sin(angle);
}

// param = factor * x, where x is standard normal if `normal`, else uniform in [-1, 1). `tensor` is
// the tensor's number; it gives each tensor different values.
static void init_random(Net *net, real *param, size_t count, bool normal, real factor,
                        size_t tensor, uint64_t seed) {
    PARALLEL_FOR
    for (size_t i = 0; i < count; i += 4) {
        uint32_t bits[4];
        double x[4];
        philox4x32(bits, (uint32_t)(i / 4), (uint32_t)tensor, 0, DRAW_INIT, seed);
        for (size_t j = 0; j < 4; j++) {
            const double u = (double)uniform(bits[j]);
            x[j] = normal ? u : 2 * u - 1;
        }
        if (normal) {
            make_normal(x);
            make_normal(x + 2);
        }
        for (size_t j = 0; j < min_size(4, count - i); j++)
            net->staging[0][i + j] = (real)x[j] * factor;
    }
    net->device->copy(param, net->staging[0], count * sizeof(real));
}

// param = 1
static void init_ones(Net *net, real *param, size_t count) {
    for (size_t i = 0; i < count; i++)
        net->staging[0][i] = 1;
    net->device->copy(param, net->staging[0], count * sizeof(real));
}

/* Initializes a layer with weights. Weights and biases are uniform in +-1 / sqrt(fan_in).
   A convolution without a bias has normal weights with variance 2 / fan_out, as in torchvision's
   ResNets, where a BatchNorm follows it (He et al., arXiv:1502.01852). */
static void init_layer(Net *net, size_t row, uint64_t seed) {
    const Layer *l = &net->layers[row];
    real *weight = net->params + l->weight_offset, *bias = net->params + l->bias_offset;
    const real fan_in = (real)(l->weight_count / l->out.c), bound = 1 / SQRT(fan_in);
    const real fan_out = (real)(l->kernel_size * l->kernel_size * l->out.c);
    const bool normal = l->kind == CONV2D && l->bias_count == 0;
    const real factor = normal ? SQRT(2 / fan_out) : bound;
    init_random(net, weight, l->weight_count, normal, factor, 2 * row, seed);
    init_random(net, bias, l->bias_count, false, bound, 2 * row + 1, seed);
}

// Sets weights and running variances to 1. Biases and running means stay 0, as allocated.
static void init_batchnorm2d(Net *net, size_t row) {
    const Layer *l = &net->layers[row];
    init_ones(net, net->params + l->weight_offset, l->weight_count);
    real *stats = net->stats + net->row_plans[row].stats;
    init_ones(net, stats + RUNNING_VARIANCE * l->out.c, l->out.c);
}

static void init_weights(Net *net, uint64_t seed) {
    const LossScale scale = {.scale = net->kernels->precision == FP16 ? INIT_SCALE : 1};
    for (size_t row = 0; row < net->layer_count; row++) {
        if (net->layers[row].kind == BATCHNORM2D)
            init_batchnorm2d(net, row);
        else if (net->layers[row].weight_count > 0)
            init_layer(net, row, seed);
    }
    refresh_params16(net);
    if (net->device->is_gpu)
        net->device->copy(net->loss_scale, &scale, sizeof scale);
}

// ---- Summary

// Returns the floating-point operations of a forward pass for one image: 2 for each multiply-add
// with a weight.
static double forward_flops(const Layer *l) {
    return kinds[l->kind].flops * (double)l->weight_count * (double)(l->out.h * l->out.w);
}

// Returns the same for training: the forward pass, the gradient of the weights and, unless the row
// reads the images, the gradient of the input.
static double layer_training_flops(const Layer *l) {
    const double passes = l->input == 0 ? 2 : 3;
    return passes * forward_flops(l);
}

static double training_flops(const Net *net) {
    double flops = 0;
    for (size_t i = 1; i < net->layer_count; i++)
        flops += layer_training_flops(&net->layers[i]);
    return flops;
}

// text = the layer's kind and parameters, for example "conv2d 3x3 stride 1 padding 0"
static void describe_layer(const Layer *l, char *text, size_t size) {
    const char *name = kinds[l->kind].name;
    if (l->kind == CONV2D || l->kind == MAXPOOL2D)
        snprintf(text, size, "%s %zux%zu stride %zu padding %zu", name, l->kernel_size,
                 l->kernel_size, l->stride, l->padding);
    else if (l->kind == ADD)
        snprintf(text, size, "%s row %zu + row %zu", name, l->input, l->other);
    else if (l->kind == LINEAR)
        snprintf(text, size, "%s %zu -> %zu", name, l->in.c, l->out.c);
    else if (l->kind == DROPOUT)
        snprintf(text, size, "%s %g", name, (double)l->p);
    else
        snprintf(text, size, "%s", name);
}

// Prints the table of layers; the program does so at its start.
static void print_summary(const Net *net) {
    int width = 7; // the width of the column of names
    for (size_t i = 0; i < net->layer_count; i++)
        width = (int)max_size((size_t)width, strlen(net->layers[i].name));
    printf("Model %s:\n  row  %-*s layer                               output (h x w x c)"
           "  parameters  MFLOP forward\n",
           net->model, width, "name");
    for (size_t i = 0; i < net->layer_count; i++) {
        const Layer *l = &net->layers[i];
        char kind[64], shape[64];
        describe_layer(l, kind, sizeof kind);
        snprintf(shape, sizeof shape, "%zu x %zu x %zu", l->out.h, l->out.w, l->out.c);
        printf("  %3zu  %-*s %-34s %19s  %10zu  %13.3f\n", i, width, l->name, kind, shape,
               l->weight_count + l->bias_count, forward_flops(l) / 1e6);
    }
    printf("  %zu parameters, %.1f MFLOP to train on one image\n", net->parameter_count,
           training_flops(net) / 1e6);
}

/* ==== 5. Models ==================================================================================

   A model of your own takes about ten lines: write a builder like model_mnist(), where x is the row
   of the images, and add it to the table models[] with its default options and data sets. */

// The network of the PyTorch MNIST example.
static size_t model_mnist(Net *net, size_t x) {
    x = relu(net, conv2d(net, x, 32, 3, 1, 0));
    x = relu(net, conv2d(net, x, 64, 3, 1, 0));
    x = dropout(net, maxpool2d(net, x, 2, 2, 0), (real)0.25);
    x = relu(net, linear(net, x, 128));
    x = linear(net, dropout(net, x, (real)0.5), net->classes);
    return log_softmax(net, x);
}

// LeNet-5 (LeCun et al., "Gradient-based learning applied to document recognition", 1998), with
// ReLU and max-pooling as it is usually built today.
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

// The network of PyTorch's CIFAR-10 tutorial. --width, by default 6, sets the number of channels of
// the first convolution.
static size_t model_cifar(Net *net, size_t x) {
    x = maxpool2d(net, relu(net, conv2d(net, x, net->settings->width, 5, 1, 0)), 2, 2, 0);
    x = maxpool2d(net, relu(net, conv2d(net, x, 16, 5, 1, 0)), 2, 2, 0);
    x = relu(net, linear(net, x, 120));
    x = relu(net, linear(net, x, 84));
    x = linear(net, x, net->classes);
    return log_softmax(net, x);
}

/* ---- ResNets -----------------------------------------------------------------------------------

   He et al., arXiv:1512.03385, with torchvision's names. A ResNet is a stem, then stages of blocks,
   then a linear layer on the mean of all pixels. Every stage but the first halves the image's
   height and width. */

// Adds a convolution and the BatchNorm that follows it. The convolution has no bias, since the
// BatchNorm has one.
static size_t conv_bn(Net *net, size_t x, const char *prefix, const char *conv, const char *bn,
                      size_t channels, size_t kernel_size, size_t stride) {
    x = conv2d_bias(net, x, channels, kernel_size, stride, kernel_size / 2, false);
    x = batchnorm2d(net, set_row_name(net, x, prefix, conv));
    return set_row_name(net, x, prefix, bn);
}

// Returns the block's input or, if the block changes the shape, a 1 x 1 convolution of it.
static size_t shortcut(Net *net, size_t x, const char *prefix, size_t channels, size_t stride) {
    if (stride == 1 && net->layers[x].out.c == channels)
        return x;
    return conv_bn(net, x, prefix, "downsample.0", "downsample.1", channels, 1, stride);
}

// Adds a residual block whose layers' names begin with `prefix`.
typedef size_t Block(Net *net, size_t x, const char *prefix, size_t channels, size_t stride);

// Adds a block of two 3 x 3 convolutions.
static size_t basic_block(Net *net, size_t x, const char *prefix, size_t channels, size_t stride) {
    size_t y = relu(net, conv_bn(net, x, prefix, "conv1", "bn1", channels, 3, stride));
    y = conv_bn(net, y, prefix, "conv2", "bn2", channels, 3, 1);
    const size_t residual = shortcut(net, x, prefix, channels, stride);
    return relu(net, add(net, y, residual));
}

// Adds a block of three convolutions: 1 x 1, 3 x 3 and 1 x 1. The second has the stride, as in
// torchvision ("ResNet V1.5").
static size_t bottleneck(Net *net, size_t x, const char *prefix, size_t channels, size_t stride) {
    size_t y = relu(net, conv_bn(net, x, prefix, "conv1", "bn1", channels, 1, 1));
    y = relu(net, conv_bn(net, y, prefix, "conv2", "bn2", channels, 3, stride));
    y = conv_bn(net, y, prefix, "conv3", "bn3", 4 * channels, 1, 1);
    const size_t residual = shortcut(net, x, prefix, 4 * channels, stride);
    return relu(net, add(net, y, residual));
}

// Adds a ResNet. `blocks` holds the number of blocks in each stage, terminated by 0. The first
// stage has `channels` channels; each later stage has twice as many as the stage before it.
static size_t resnet(Net *net, size_t x, Block *add_block, const size_t *blocks, size_t channels) {
    const bool imagenet = net->settings->stem == STEM_IMAGENET;
    const size_t kernel_size = net->settings->stem == STEM_3 ? 3 : 7;
    const size_t stem_stride = imagenet ? 2 : 1;
    x = relu(net, conv_bn(net, x, "", "conv1", "bn1", channels, kernel_size, stem_stride));
    if (imagenet)
        x = maxpool2d(net, x, 3, 2, 1);
    for (int stage = 0; blocks[stage]; stage++)
        for (size_t i = 0; i < blocks[stage]; i++) {
            const bool halves = stage > 0 && i == 0; // height and width
            const size_t stride = halves ? 2 : 1;
            char name[64];
            snprintf(name, sizeof name, "layer%d.%zu.", stage + 1, i);
            x = add_block(net, x, name, channels << stage, stride);
        }
    x = global_avgpool2d(net, x);
    x = set_row_name(net, linear(net, x, net->classes), "", "fc");
    return log_softmax(net, x);
}

// For laptops and tests; the others are as in torchvision.
static size_t model_resnet8(Net *net, size_t x) {
    return resnet(net, x, basic_block, (const size_t[]){1, 1, 1, 0}, 16);
}

static size_t model_resnet18(Net *net, size_t x) {
    return resnet(net, x, basic_block, (const size_t[]){2, 2, 2, 2, 0}, 64);
}

static size_t model_resnet34(Net *net, size_t x) {
    return resnet(net, x, basic_block, (const size_t[]){3, 4, 6, 3, 0}, 64);
}

static size_t model_resnet50(Net *net, size_t x) {
    return resnet(net, x, bottleneck, (const size_t[]){3, 4, 6, 3, 0}, 64);
}

static size_t model_resnet101(Net *net, size_t x) {
    return resnet(net, x, bottleneck, (const size_t[]){3, 4, 23, 3, 0}, 64);
}

static size_t model_resnet152(Net *net, size_t x) {
    return resnet(net, x, bottleneck, (const size_t[]){3, 8, 36, 3, 0}, 64);
}

typedef struct Model {
    const char *name;
    size_t (*build)(Net *net, size_t x);
    const char *datasets; // --dataset auto: the first of these that is found
    // the data set that synthetic images imitate in shape, classes and counts
    const char *synthetic_like;
    const char *defaults; // options that differ from the table in section 12, or NULL
    // whether images are normalized with mean and standard deviation .5 in all channels, as in
    // PyTorch's CIFAR-10 tutorial
    bool normalize_to_plus_minus_one;
    // whether log lines show images per second, as in the tutorial "Deep Learning at Scale" of
    // SC20; otherwise, they are those of PyTorch's MNIST example
    bool logs_throughput;
} Model;

#define RESNET_MODEL(depth, dataset)                                                     \
    {                                                                                    \
        .name = "resnet" #depth, .build = model_resnet##depth,                           \
        .datasets = "cifar100 cifar10 synthetic", .synthetic_like = dataset,             \
        .defaults = "--optimizer sgd --lr 0.1 --momentum 0.9 --weight-decay 5e-4 "       \
                    "--batch-size 128 --epochs 100 --schedule cosine --log-interval 20", \
        .logs_throughput = true                                                          \
    }
static const Model models[] = {
    {.name = "mnist",
     .build = model_mnist,
     .datasets = "mnist fashion-mnist synthetic",
     .synthetic_like = "mnist",
     .defaults = "--test-batch-size 1000"},
    {.name = "lenet",
     .build = model_lenet,
     .datasets = "mnist fashion-mnist synthetic",
     .synthetic_like = "mnist",
     .defaults = "--test-batch-size 1000"},
    {.name = "cifar",
     .build = model_cifar,
     .datasets = "cifar10 synthetic",
     .synthetic_like = "cifar10",
     .defaults = "--optimizer sgd --lr 0.001 --momentum 0.9 --batch-size 4 --epochs 2 --gamma 1",
     .normalize_to_plus_minus_one = true},
    RESNET_MODEL(8, "cifar10"),
    RESNET_MODEL(18, "cifar100"),
    RESNET_MODEL(34, "cifar100"),
    RESNET_MODEL(50, "cifar100"),
    RESNET_MODEL(101, "cifar100"),
    RESNET_MODEL(152, "cifar100"),
};

static const Model *find_model(const char *name) {
    for (size_t i = 0; i < LENGTH(models); i++)
        if (strcmp(models[i].name, name) == 0)
            return &models[i];
    die(EXIT_USAGE, "no model %s", name); // not reached: the parser has checked the name
}

// Returns the shape of an image of shape s after --resize. `resize` is the new height, a multiple
// of s.h, or 0, which leaves the image as it is.
static Shape resized(Shape s, size_t resize) {
    const size_t factor = resize ? resize / s.h : 1;
    return (Shape){s.h * factor, s.w * factor, s.c};
}

// Fills the layer table with the rows of a model.
static void net_build(Net *net, const Model *model, const DatasetInfo *data,
                      const Settings *settings, const Kernels *kernels) {
    *net = (Net){.model = model->name, .settings = settings, .kernels = kernels};
    net->device = kernels->device;
    net->classes = data->classes;
    net->world = 1;
    const Shape images = resized(data->shape, settings->resize);
    size_t x = add_layer(net, (Layer){.kind = INPUT, .in = images, .out = images});
    x = model->build(net, x);
    const Layer *last = &net->layers[x];
    if (x != last_row(net) || last->kind != LOG_SOFTMAX || shape_size(last->out) != data->classes)
        die(1,
            "model %s: expected its function to return its last row, a log_softmax over the %zu "
            "classes of %s; found row %zu of %zu, with %zu outputs",
            model->name, data->classes, data->name, x, net->layer_count, shape_size(last->out));
}

/* ==== 6. Forward and backward ====================================================================

   forward() goes through the layer table from the first row to the last and computes outputs;
   backward() goes from the last row to the first and computes gradients. It overwrites the
   gradients of parameters (=), so nothing has to be set to zero before a step (PyTorch's
   optimizer.zero_grad()). The gradient of a row is written (=) by its last reader, which runs first
   in backward; each reader after that adds (+=). */

static real *output(const Net *net, size_t row) {
    if (row == 0 && net->images)
        return net->images;
    return (real *)(net->activations + net->row_plans[row].output);
}

// Returns NULL for row 0: the gradient of the images is not needed.
static real *doutput(const Net *net, size_t row) {
    if (row == 0)
        return NULL;
    return (real *)(net->dactivations + net->row_plans[row].doutput);
}

// Returns the weights of a row. A convolution or linear layer reads them from the 16-bit copy, if
// there is one.
static real *weight_of(const Net *net, const Layer *l) {
    if (has_params16(net) && has_weight_matrix(l))
        return (real *)(net->params16 + 2 * l->weight_offset);
    return net->params + l->weight_offset;
}

/* data.to(device). A CPU reads the images from the loader's buffer; on a GPU the copies are queued,
   and reading the loss waits for them. So the CPU's reads and the GPU's copies end before the
   loader refills the buffer. */
static void net_load(Net *net, const Batch *batch, double lr) {
    const Kernels *k = net->kernels;
    const bool nchw = net->settings->layout == NCHW;
    net->device->set_step(net->step, (StepInputs){batch->key, lr});
    if (batch->resident) {
        k->gather(output(net, 0), net->labels, batch->resident, &net->step->key, batch->n, nchw);
        return;
    }
    if (net->device->is_gpu)
        k->load_images(output(net, 0), batch->device_images, batch->n, net->layers[0].out, nchw);
    else
        net->images = batch->device_images;
    net->device->copy(net->labels, batch->device_labels, batch->n);
}

// ---- Marks and names of rows, for the instruments

// Returns the number of an extra row: with --zero-grad memset, backward begins by zeroing the
// gradients, which counts as a row.
static size_t zero_grad_row(const Net *net) {
    return net->layer_count;
}

enum { ROW_LABEL_SIZE = 48 };

// name = the layer's name and the pass, for example "conv1 forward"
static void row_label(const Net *net, size_t row, RowPass pass, char name[ROW_LABEL_SIZE]) {
    if (row == zero_grad_row(net)) {
        snprintf(name, ROW_LABEL_SIZE, "zero_grad");
        return;
    }
    const Layer *l = &net->layers[row];
    const char *layer = *l->name ? l->name : kinds[l->kind].name;
    const char *pass_name = pass == BACKWARD_PASS ? "backward" : "forward";
    snprintf(name, ROW_LABEL_SIZE, "%.30s %s", layer, pass_name);
}

// # PROF  Marks where a pass of a row begins, and names it for Nsight.
static void begin_row(const Net *net, size_t row, RowPass pass) {
    char name[ROW_LABEL_SIZE];
    if (net->marks_rows)
        net->device->mark(begin_mark(row, pass));
    if (net->names_rows) {
        row_label(net, row, pass, name);
        net->device->nsight_range(NSIGHT_ROW, name);
    }
}

static void end_row(const Net *net, size_t row, RowPass pass) {
    if (net->marks_rows)
        net->device->mark(end_mark(row, pass));
    if (net->names_rows)
        net->device->nsight_range(NSIGHT_ROW, NULL);
}

// ---- The passes

// Returns the operands of row i for n images.
static Work work_of(const Net *net, size_t i, size_t n, const RandomKey *key) {
    const Layer *l = &net->layers[i];
    const RowPlan *plan = &net->row_plans[i];
    const bool adds = l->kind == ADD || plan->fused.add;
    return (Work){.l = l,
                  .fused = plan->fused,
                  .row = i,
                  .n = n,
                  .in = output(net, l->input),
                  .residual = adds ? output(net, plan->residual) : NULL,
                  .weight = weight_of(net, l),
                  .bias = l->bias_count ? net->params + l->bias_offset : NULL,
                  .out = output(net, i),
                  .dout = doutput(net, i),
                  .din = doutput(net, l->input),
                  .dweight = net->grads + l->weight_offset,
                  .dbias = net->grads + l->bias_offset,
                  .stats = net->stats + plan->stats,
                  .moments = net->moments,
                  .saved = net->saved + plan->saved,
                  .scratch = net->scratch,
                  .transposed = net->transposed,
                  .unflattened = net->layers[l->input].out,
                  .prepared = net->prepared + plan->prepared,
                  .key = key,
                  .autotune = net->settings->autotune};
}

// Computes the output (=) of a row and of the rows that are fused into it. Under dp, a rank may
// have no images: n == 0.
static void forward_row(const Net *net, size_t i, size_t n, const RandomKey *key) {
    const Kernels *k = net->kernels;
    const Layer *l = &net->layers[i];
    if (n == 0 || !has_kernels(&net->row_plans[i]))
        return;
    k->layers[l->kind].forward(work_of(net, i, n, key));
}

// model(data): log-probabilities of n images. In evaluation, key is NULL: dropout does nothing, and
// BatchNorm uses its running statistics.
static void forward(Net *net, size_t n, const RandomKey *key) {
    if (key)
        net->batches_tracked++;
    for (size_t i = 1; i < net->layer_count; i++) {
        begin_row(net, i, FORWARD_PASS);
        forward_row(net, i, n, key);
        end_row(net, i, FORWARD_PASS);
    }
}

// Computes the gradients of one row's parameters (=) and of its inputs (=, or += if written[] says
// that they already hold a gradient). Records in written[] that the inputs' gradients are written.
static void backward_row(const Net *net, size_t i, size_t n, bool *written) {
    const Kernels *k = net->kernels;
    const Layer *l = &net->layers[i];
    const RowPlan *plan = &net->row_plans[i];
    if (n == 0 || !has_kernels(plan))
        return;
    Work w = work_of(net, i, n, NULL);
    // The residual comes first, since kernels write dresidual before din. In x + x, both are the
    // same array.
    if (plan->residual) {
        if (!plan->shares_gradient)
            w.dresidual = doutput(net, plan->residual);
        w.accumulate_residual = written[plan->residual];
        written[plan->residual] = true;
    }
    w.accumulate = written[l->input];
    written[l->input] = true;
    if (!w.din && l->weight_count == 0)
        return; // the row reads the images and has no parameters
    if (net->flops)
        net->flops[i] = k->flops(w);
    k->layers[l->kind].backward(w);
}

// loss.backward(): from the gradient of the last row to the gradients of all parameters
static void backward(Net *net, size_t n) {
    bool written[MAX_LAYERS] = {false};
    if (net->settings->zero_grad == ZERO_GRAD_MEMSET) { // # EXTRA  to see what it costs
        begin_row(net, zero_grad_row(net), BACKWARD_PASS);
        net->device->clear(net->grads, net->param_size * sizeof(real));
        end_row(net, zero_grad_row(net), BACKWARD_PASS);
    }
    for (size_t i = last_row(net); i > 0; i--) {
        begin_row(net, i, BACKWARD_PASS);
        backward_row(net, i, n, written);
        end_row(net, i, BACKWARD_PASS);
        if (net->on_gradients && net->layers[i].weight_count)
            net->on_gradients(net->context, net->layers[i].weight_offset);
    }
}

typedef struct BatchLoss {
    double mean;           // the mean loss of the images
    double correct_images; // how many are classified correctly
} BatchLoss;

static double sum_of(const real *numbers, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)numbers[i];
    return sum;
}

// Averages the losses of n images. After them, `losses` has 1 for each image that is classified
// correctly, and 0 for the others.
static BatchLoss average_losses(const real *losses, size_t n) {
    return (BatchLoss){sum_of(losses, n) / (double)n, sum_of(losses + n, n)};
}

// F.nll_loss(): returns the loss of the batch and, unless dlogp is NULL, sets dlogp to its
// gradient.
static BatchLoss compute_loss(Net *net, size_t n, real *dlogp, double smoothing) {
    net->kernels->nll_loss(net->losses, net->losses + n, dlogp, output(net, last_row(net)),
                           net->labels, n, n * net->world, net->classes, smoothing,
                           net->loss_scale);
    net->device->copy(net->staging[0], net->losses, 2 * n * sizeof(real));
    return average_losses(net->staging[0], n);
}

// Returns the loss of a training batch; sets the gradient of the last row.
static BatchLoss loss_and_gradient(Net *net, size_t n) {
    return compute_loss(net, n, doutput(net, last_row(net)), net->settings->label_smoothing);
}

// Computes a training step on a single device, up to the gradients.
static void compute_gradients(Net *net, size_t n) {
    forward(net, n, &net->step->key);
    loss_and_gradient(net, n);
    backward(net, n);
}

static BatchLoss test_loss(Net *net, size_t n) {
    return compute_loss(net, n, NULL, 0);
}

// predicted[position of an image] = its most likely class, for the images of the batch. Each image
// is tested by one rank, and the others leave a 0 there. The sum over the ranks therefore has all
// predictions.
static void store_predictions(const Net *net, const Batch *batch, double *predicted) {
    real *all = net->staging[0];
    const size_t classes = net->classes;
    net->device->copy(all, output(net, last_row(net)), batch->n * classes * sizeof *all);
    for (size_t i = 0; i < batch->n; i++)
        predicted[position_of(batch->key, i)] = (double)most_likely(all + i * classes, classes);
}

// Returns whether the outputs of row i for n images are all finite. Returns true for a fused row,
// which does not keep its outputs.
static bool is_output_finite(const Net *net, size_t i, size_t n) {
    if (!has_kernels(&net->row_plans[i]))
        return true;
    const size_t bytes = element_bytes_of(net, &net->layers[i]);
    const size_t count = n * shape_size(stored_shape(net, i));
    const Precision precision = bytes == sizeof(real) ? FP32 : net->kernels->precision;
    void *values = must_alloc(count * bytes, "a copy of the outputs");
    net->device->copy(values, output(net, i), count * bytes);
    const bool finite = all_finite(values, count, precision);
    free(values);
    return finite;
}

// Returns the first row whose output is not finite, or the last row.
static size_t first_nonfinite_row(const Net *net, size_t n) {
    for (size_t row = 0; row < last_row(net); row++)
        if (!is_output_finite(net, row, n))
            return row;
    return last_row(net);
}

// Dies if the loss is not finite. The message names the first row whose output is not finite.
static void check_loss(const Net *net, const Batch *batch, BatchLoss loss) {
    char kind[64];
    if (isfinite(loss.mean))
        return;
    const size_t row = first_nonfinite_row(net, batch->n);
    const char *name = net->layers[row].name;
    const char *separator = *name ? ": " : "";
    describe_layer(&net->layers[row], kind, sizeof kind);
    die(1,
        "epoch %zu, step %zu: the loss is %g; the first output that is not finite is in row %zu "
        "(%s%s%s); try a smaller --lr",
        batch->key.epoch, batch->number + 1, loss.mean, row, name, separator, kind);
}

/* ==== 7. Optimizers and schedules ================================================================

   An optimizer makes one pass over the flat arena of all parameters, regardless of layers. The
   CPU's tables of kernels follow, since they need the optimizers. */

/* Adadelta (Zeiler, arXiv:1212.5701), as PyTorch computes it:
   square_avg = rho * square_avg + (1 - rho) * grad^2
   delta = sqrt(acc_delta + eps) / sqrt(square_avg + eps) * grad
   acc_delta = rho * acc_delta + (1 - rho) * delta^2;   param -= lr * delta
   where grad includes weight_decay * param */
static void adadelta_naive(Update u) {
    const real rho = (real).9, one_minus_rho = (real)(1 - .9), eps = (real)1e-6;
    const real lr = (real)u.step->lr, decay = (real)u.weight_decay;
    real *square_avg = u.state[0], *acc_delta = u.state[1];
    PARALLEL_FOR
    for (size_t i = 0; i < u.count; i++) {
        const real g = u.grad[i] + decay * u.param[i];
        const real square = rho * square_avg[i] + one_minus_rho * g * g;
        square_avg[i] = square;
        const real delta = SQRT(acc_delta[i] + eps) / SQRT(square + eps) * g;
        acc_delta[i] = rho * acc_delta[i] + one_minus_rho * delta * delta;
        u.param[i] -= lr * delta;
    }
}

/* SGD with momentum (Sutskever et al., "On the importance of initialization and momentum", ICML
   2013), as PyTorch computes it:
   buffer = momentum * buffer + grad
   direction = grad without momentum, buffer with it, grad + momentum * buffer with nesterov
   param -= lr * direction
   where grad includes weight_decay * param. Without momentum, there is no buffer. */
static void sgd_naive(Update u) {
    const real lr = (real)u.step->lr, momentum = (real)u.momentum, decay = (real)u.weight_decay;
    PARALLEL_FOR
    for (size_t i = 0; i < u.count; i++) {
        const real g = u.grad[i] + decay * u.param[i];
        real direction = g;
        if (momentum > 0) {
            const real buffer = momentum * u.state[0][i] + g;
            u.state[0][i] = buffer;
            direction = u.nesterov ? g + momentum * buffer : buffer;
        }
        u.param[i] -= lr * direction;
    }
}

// ---- The update of all parameters

// The properties of an optimizer. The function that performs its update is in Kernels.
typedef struct Optimizer {
    double lr; // the default
    size_t state_count;
    const char *states[2];    // what it keeps for each parameter, by PyTorch's names
    bool states_not_negative; // the states are means of squares
    bool needs_momentum;      // without --momentum, it keeps no state
} Optimizer;

static const Optimizer optimizers[OPTIMIZERS] = {
    [ADADELTA] = {.lr = 1.0,
                  .state_count = 2,
                  .states = {"square_avg", "acc_delta"},
                  .states_not_negative = true},
    [SGD] = {.lr = 0.01, .state_count = 1, .states = {"momentum_buffer"}, .needs_momentum = true},
};

// Returns how many numbers the optimizer keeps for each parameter.
static size_t count_states(const Optimizer *o, const Settings *s) {
    if (o->needs_momentum && s->momentum == 0)
        return 0;
    return o->state_count;
}

// Updates `count` parameters, starting at offset `first` of the arenas.
static void update_params(const Net *net, real *state, size_t first, size_t count) {
    const Settings *s = net->settings;
    const Update u = {.param = net->params + first,
                      .grad = net->grads + first,
                      .state = {state + first, state + net->param_size + first},
                      .param16 = has_params16(net) ? net->params16 + 2 * first : NULL,
                      .scale = net->loss_scale,
                      .count = count,
                      .step = net->step,
                      .momentum = s->momentum,
                      .weight_decay = s->weight_decay,
                      .nesterov = s->nesterov};
    if (count > 0)
        net->kernels->update[s->optimizer](u);
}

// # EXTRA  --optimizer-launch per-tensor makes one call for each tensor, as frameworks once did, to
// measure what that costs on a GPU.
static void update_each_tensor(const Net *net, real *state) {
    for (const Layer *l = net->layers; l < net->layers + net->layer_count; l++) {
        update_params(net, state, l->weight_offset, l->weight_count);
        update_params(net, state, l->bias_offset, l->bias_count);
    }
}

// optimizer.step(): one call for all parameters, which are one arena
static void optimizer_step(const Net *net, real *state) {
    const Kernels *k = net->kernels;
    if (net->device->is_gpu)
        k->count_not_finite(net->loss_scale, net->grads, net->param_size);
    if (net->settings->optimizer_launch == LAUNCH_PER_TENSOR)
        update_each_tensor(net, state);
    else
        update_params(net, state, 0, net->param_size);
    if (k->precision == FP16)
        k->adjust_scale(net->loss_scale);
}

/* Returns the learning rate of a step. Epochs and steps are counted from 0, and an epoch has
   `steps` steps. In the warm-up, the rate grows with each step, up to lr in the warm-up's last
   step. Then, after e more epochs, the rate is:
     step        lr * gamma^floor(e / step_size)                           StepLR
     cosine      lr * (1 + cos(pi * e / (epochs - warmup_epochs))) / 2     CosineAnnealingLR */
static double learning_rate(const Settings *s, size_t epoch, size_t step, size_t steps) {
    /* LAB 9.1 BEGIN learning_rate */
    if (epoch < s->warmup_epochs)
        return s->lr * (double)(epoch * steps + step + 1) / (double)(s->warmup_epochs * steps);
    size_t e = epoch - s->warmup_epochs;
    /* LAB 9.1 END */
    if (s->schedule == SCHEDULE_STEP)
        return s->lr * pow(s->gamma, (double)(e / s->step_size));
    return s->lr * (1 + cos(M_PI * (double)e / (double)(s->epochs - s->warmup_epochs))) / 2;
}

// ---- The CPU

// Does nothing, since each thread that calls the kernels has threads of its own.
static void cpu_use(size_t replica, size_t number, void (*on_error)(int, const char *, ...)) {
    (void)replica, (void)number, (void)on_error;
}

static void cpu_describe(DeviceInfo *info) {
    snprintf(info->name, sizeof info->name, "cpu");
    info->memory = memory_limit();
}

static void cpu_copy(void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
}

static void cpu_set_step(StepInputs *to, StepInputs step) {
    *to = step;
}

// to = from, or += from if add
static void cpu_receive(size_t number, real *to, const real *from, size_t count, bool add,
                        real *buffer) {
    (void)number, (void)buffer;
    if (!add) {
        memmove(to, from, count * sizeof *to);
        return;
    }
    for (size_t i = 0; i < count; i++)
        to[i] += from[i];
}

// Nothing is queued on a CPU, so there is nothing to wait for, and marks are times.
static void cpu_synchronize(void) {}

static void cpu_wait(size_t replica, size_t mark) {
    (void)replica, (void)mark;
}

static _Thread_local double cpu_marks[MARKS];

static void cpu_mark(size_t i) {
    cpu_marks[i] = now();
}

static double cpu_elapsed(size_t from, size_t to) {
    return cpu_marks[to] - cpu_marks[from];
}

static void cpu_free_graph(void *graph) {
    (void)graph;
}

static void cpu_nsight_range(NsightLevel level, const char *name) {
    (void)level, (void)name;
}

static void cpu_record(bool on) {
    (void)on;
}

static double cpu_peak_gflops(void); // cnn_kernels.c measures it

static void cpu_clear(void *memory, size_t bytes) {
    memset(memory, 0, bytes);
}

static const Device cpu_device = {
    .use = cpu_use,
    .describe = cpu_describe,
    .alloc = zeroed_alloc,
    .release = free,
    .copy = cpu_copy,
    .clear = cpu_clear,
    .set_step = cpu_set_step,
    .receive = cpu_receive,
    .synchronize = cpu_synchronize,
    .wait = cpu_wait,
    .mark = cpu_mark,
    .elapsed = cpu_elapsed,
    .free_graph = cpu_free_graph,
    .peak_gflops = cpu_peak_gflops,
    .nsight_range = cpu_nsight_range,
    .record = cpu_record,
};

// ---- The definitions as kernels

static RowMode fuse_nothing(const Layer *target, const Fusion *fused, const Layer *l) {
    (void)target, (void)fused, (void)l;
    return SEPARATE;
}

// Returns room for the scales of a BatchNorm, or for the transposed weights of a convolution.
static size_t scratch_size_naive(const Layer *l, const Fusion *fused, size_t n) {
    (void)fused, (void)n;
    if (l->kind == BATCHNORM2D)
        return l->in.c;
    return has_weight_matrix(l) ? l->weight_count : 0;
}

static size_t no_prepared_size(const Layer *l) {
    (void)l;
    return 0;
}

static double flops_of_definition(Work w) {
    return (double)w.n * layer_training_flops(w.l);
}

static const Kernels naive_kernels = {
    .device = &cpu_device,
    .choice = NAIVE,
    .precision = FP32,
    .element_bytes = sizeof(real),
    .layers = {[CONV2D] = {conv2d_forward_naive, conv2d_backward_naive},
               [LINEAR] = {conv2d_forward_naive, conv2d_backward_naive},
               [BATCHNORM2D] = {batchnorm2d_forward_naive, batchnorm2d_backward_naive},
               [RELU] = {relu_forward, relu_backward},
               [MAXPOOL2D] = {maxpool2d_forward_naive, maxpool2d_backward},
               [GLOBAL_AVGPOOL2D] = {global_avgpool2d_forward, global_avgpool2d_backward},
               [ADD] = {add_forward, add_backward},
               [DROPOUT] = {dropout_forward_naive, dropout_backward},
               [LOG_SOFTMAX] = {log_softmax_forward, log_softmax_backward}},
    .nll_loss = nll_loss,
    .update = {[ADADELTA] = adadelta_naive, [SGD] = sgd_naive},
    .fuse = fuse_nothing,
    .scratch_size = scratch_size_naive,
    .moments_size = no_size,
    .transposed_size = no_size,
    .prepared_bytes = no_prepared_size,
    .prepare = prepare_nothing,
    .flops = flops_of_definition,
};

#if !defined(CNN_NO_KERNELS) && __has_include("cnn_kernels.c")
#include "cnn_kernels.c" // fills fast_kernels
#define CNN_FAST
#else
static double cpu_peak_gflops(void) {
    return NAN;
}
#endif

// The CPU's kernels, the best ones last.
static const Kernels *const cpu_kernels[] = {
    &naive_kernels,
#ifdef CNN_FAST
    &fast_kernels,
#endif
};
enum { CPU_KERNELS = LENGTH(cpu_kernels) };

/* ==== 8. Datasets ================================================================================

   Images stay bytes in memory, as they are on disk; the loader normalizes them. Files are not
   trusted: every count is checked against the file's real size before it is used. */

// A data file. A compressed one is read through `gzip -dc`, which needs no library.
typedef struct DataFile {
    char path[PATH_SIZE];
    const char *dataset; // the name of the data set that it belongs to
    FILE *stream;
    bool gzip;
} DataFile;

// Dies with a message that says what is wrong with a data file, in printf() format, and which
// command downloads the data set.
#define DIE_BAD_FILE(f, format, ...)                                                           \
    die(1, "%s: " format "; if it should be %s, remove the file and run: data/get_data.sh %s", \
        (f)->path, ##__VA_ARGS__, (f)->dataset, (f)->dataset)

// Sets path to DIR/FILE or, if that does not exist, DIR/FILE.gz. Returns false if neither exists.
static bool data_path(char path[PATH_SIZE], const char *dir, const char *file) {
    join_path(path, dir, file);
    if (access(path, F_OK) != 0 && strlen(path) + 4 <= PATH_SIZE)
        strcat(path, ".gz");
    return access(path, F_OK) == 0;
}

// Opens DIR/FILE or DIR/FILE.gz, a file of this data set.
static void data_open(DataFile *f, const char *dir, const char *file, const char *dataset) {
    *f = (DataFile){.dataset = dataset};
    if (!data_path(f->path, dir, file))
        die(1, "%s: expected %s or %s.gz there, found neither; run: data/get_data.sh %s", dir, file,
            file, dataset);
    size_t length = strlen(f->path);
    f->gzip = length > 3 && strcmp(f->path + length - 3, ".gz") == 0;
    f->stream = open_existing(f->path);
    if (f->stream && f->gzip) {
        fclose(f->stream);
        setenv("CNN_FILE", f->path, 1); // so that the shell does not interpret it
        f->stream = popen("exec gzip -dc -- \"$CNN_FILE\"", "r");
    }
    if (!f->stream)
        die_file("cannot read", f->path);
}

static void data_close(DataFile *f) {
    if (!f->gzip) {
        fclose(f->stream);
        return;
    }
    const int status = pclose(f->stream);
    if (WIFSIGNALED(status)) // for example by Ctrl-C, which the terminal sends to both programs
        die(1, "%s: gzip was killed by signal %d", f->path, WTERMSIG(status));
    if (WIFEXITED(status) && WEXITSTATUS(status) == 127)
        die(1, "%s: gzip is not installed; install it or run: gunzip -k %s", f->path, f->path);
    if (status != 0)
        DIE_BAD_FILE(f, "gzip cannot read it");
}

// Reads the next bytes of a file, which begin at `offset`. `expected` is the whole file's length.
static void read_exactly(DataFile *f, void *to, size_t bytes, size_t offset, size_t expected) {
    size_t got = fread(to, 1, bytes, f->stream);
    if (got == bytes)
        return;
    if (ferror(f->stream))
        die_file("cannot read", f->path);
    if (f->gzip)
        data_close(f); // reports a failure of gzip instead
    DIE_BAD_FILE(f, "truncated: expected %zu bytes, found %zu", expected, offset + got);
}

// Dies unless the file can hold the `expected` bytes of `count` items.
static void check_file_size(const DataFile *f, size_t expected, size_t count) {
    enum { GZIP_RATIO = 1032 }; // gzip expands a byte to at most 1,032
    struct stat info;
    if (stat(f->path, &info) != 0)
        die_file("cannot read", f->path);
    const size_t found = (size_t)info.st_size;
    if (f->gzip && expected > GZIP_RATIO * found)
        DIE_BAD_FILE(
            f, "expected %zu bytes for %zu items, but its %zu compressed bytes cannot hold them",
            expected, count, found);
    if (!f->gzip && expected != found)
        DIE_BAD_FILE(f, "expected %zu bytes for %zu items, found %zu", expected, count, found);
}

/* Returns the first `kept` of a file's `count` records and closes the file. It also reads the other
   records, to check the length of the whole file. */
static uint8_t *read_records(DataFile *f, size_t header, size_t bytes, size_t count, size_t kept) {
    const size_t expected = header + count * bytes; // at most 10^7 records: cannot overflow
    check_file_size(f, expected, count); // before memory is allocated for what the header claims
    uint8_t *records = must_alloc(kept * bytes, "images");
    uint8_t skipped[bytes]; // one record
    for (size_t i = 0; i < kept; i++)
        read_exactly(f, records + i * bytes, bytes, header + i * bytes, expected);
    for (size_t i = kept; i < count; i++)
        read_exactly(f, skipped, bytes, header + i * bytes, expected);
    if (fgetc(f->stream) != EOF)
        DIE_BAD_FILE(f, "too long: expected %zu bytes for %zu items, found more", expected, count);
    data_close(f);
    return records;
}

static uint32_t big_endian(const uint8_t b[4]) {
    return (uint32_t)b[0] << 24 | (uint32_t)b[1] << 16 | (uint32_t)b[2] << 8 | b[3];
}

// Dies unless the label of image i is one of the classes.
static void check_label(const DataFile *f, size_t label, size_t classes, size_t i) {
    if (label >= classes)
        die(1,
            "%s: expected labels from 0 to %zu, found %zu at image %zu; a data set with other "
            "classes needs a row in dataset_infos of cnn.c, and its name among the values of "
            "--dataset there; if it should be %s, remove the file and run: data/get_data.sh %s",
            f->path, classes - 1, label, i, f->dataset, f->dataset);
}

static void check_magic(const DataFile *f, uint32_t expected, const char *what, uint32_t found) {
    const bool still_gzipped = found >> 16 == 0x1f8b;
    const char *hint = still_gzipped ? " (still gzipped: name it .gz)" : "";
    if (found != expected)
        DIE_BAD_FILE(f, "wrong magic number: expected 0x%08x (%s), found 0x%08x%s", expected, what,
                     found, hint);
}

/* ---- IDX files

   An IDX file begins with big-endian 32-bit numbers:
     labels   0x0801, count
     images   0x0803, count, height, width
   Then come the items, a byte for each label or pixel. */

// Returns the number of items, from the file's header. Dies unless it is 1 to 10,000,000.
static size_t idx_count(const DataFile *f, const uint8_t *header) {
    const size_t count = big_endian(header + 4);
    if (count == 0 || count > 10000000)
        DIE_BAD_FILE(f, "expected 1 to 10000000 items, found %zu", count);
    return count;
}

// Reads images and keeps at most `limit` of them. Returns the number of images in the file.
static size_t read_idx_images(Dataset *data, DataFile *f, size_t limit) {
    const Shape expected = data->info->shape;
    uint8_t header[16];
    read_exactly(f, header, sizeof header, 0, sizeof header);
    const uint32_t height = big_endian(header + 8), width = big_endian(header + 12);
    check_magic(f, 0x0803, "images", big_endian(header));
    if (height != expected.h || width != expected.w)
        DIE_BAD_FILE(f, "expected images of %zu x %zu pixels, found %u x %u", expected.h,
                     expected.w, height, width);
    const size_t count = idx_count(f, header);
    data->count = min_size(count, limit);
    data->images = read_records(f, sizeof header, shape_size(expected), count, data->count);
    return count;
}

// Reads labels and keeps at most `limit` of them. Returns the number of labels in the file.
static size_t read_idx_labels(Dataset *data, DataFile *f, size_t limit) {
    uint8_t header[8];
    read_exactly(f, header, sizeof header, 0, sizeof header);
    check_magic(f, 0x0801, "labels", big_endian(header));
    const size_t count = idx_count(f, header);
    data->labels = read_records(f, sizeof header, 1, count, min_size(count, limit));
    return count;
}

// Reads a data set from two IDX files: one with the images, one with the labels.
static void read_idx_set(Dataset *data, const char *dir, Split split, size_t limit) {
    const DatasetInfo *info = data->info;
    const char *const *files = info->files[split];
    DataFile images, labels;
    data_open(&images, dir, files[0], info->name);
    data_open(&labels, dir, files[1], info->name);
    const size_t n_images = read_idx_images(data, &images, limit);
    const size_t n_labels = read_idx_labels(data, &labels, limit);
    if (n_images != n_labels)
        DIE_BAD_FILE(&labels, "expected labels for %zu images, found %zu", n_images, n_labels);
    for (size_t i = 0; i < data->count; i++)
        check_label(&labels, data->labels[i], info->classes, i);
}

/* CIFAR's files consist of records: a label, then 3 x 32 x 32 bytes, channel by channel. In
   CIFAR-100, a record has two labels: first a coarse one of 20 classes, then the fine one, which is
   used. */
enum { CIFAR_AREA = 32 * 32, CIFAR_COARSE = 20 };

// Appends the image of a record to the data set: image[pixel][channel] = bytes[channel][pixel].
static void append_cifar(Dataset *data, uint8_t label, const uint8_t *bytes) {
    uint8_t *image = data->images + data->count * 3 * CIFAR_AREA;
    for (size_t pixel = 0; pixel < CIFAR_AREA; pixel++)
        for (size_t channel = 0; channel < 3; channel++)
            image[pixel * 3 + channel] = bytes[channel * CIFAR_AREA + pixel];
    data->labels[data->count] = label;
    data->count++;
}

// Appends the `count` records of a file to the data set, until the set has `limit` images.
static void read_cifar_file(Dataset *data, const char *dir, const char *file, size_t count,
                            size_t limit) {
    const DatasetInfo *info = data->info;
    const bool has_coarse_label = info->classes == 100; // CIFAR-100: before the fine label
    const size_t labels = has_coarse_label ? 2 : 1;
    const size_t record_size = labels + 3 * CIFAR_AREA;
    DataFile f;
    data_open(&f, dir, file, info->name);
    uint8_t *records = read_records(&f, 0, record_size, count, count);
    for (size_t i = 0; i < count; i++) {
        const uint8_t *record = records + i * record_size;
        const uint8_t label = record[labels - 1];
        if (has_coarse_label)
            check_label(&f, record[0], CIFAR_COARSE, i);
        check_label(&f, label, info->classes, i);
        if (data->count < limit)
            append_cifar(data, label, record + labels);
    }
    free(records);
}

// Reads a data set from CIFAR's files, which all hold the same number of records.
static void read_cifar_set(Dataset *data, const char *dir, Split split, size_t limit) {
    const DatasetInfo *info = data->info;
    const char *const *files = info->files[split];
    const size_t count = info->counts[split];
    size_t file_count = 1; // a data set has at least one file
    while (files[file_count])
        file_count++;
    data->images = must_alloc(min_size(count, limit) * 3 * CIFAR_AREA, "images");
    data->labels = must_alloc(min_size(count, limit), "labels");
    for (size_t i = 0; i < file_count; i++)
        read_cifar_file(data, dir, files[i], count / file_count, limit);
}

// clang-format off
#define IDX_FILES {{"train-images-idx3-ubyte", "train-labels-idx1-ubyte"}, \
                   {"t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"}}
static const DatasetInfo dataset_infos[] = {
    {.name = "mnist",
     .shape = {28, 28, 1}, .classes = 10, .counts = {60000, 10000},
     .mean = {.1307}, .std = {.3081},
     .read = read_idx_set, .files = IDX_FILES},
    // normalized with the constants of MNIST, as in PyTorch's example
    {.name = "fashion-mnist",
     .shape = {28, 28, 1}, .classes = 10, .counts = {60000, 10000},
     .mean = {.1307}, .std = {.3081},
     .read = read_idx_set, .files = IDX_FILES,
     .class_names = "t-shirt trouser pullover dress coat sandal shirt sneaker bag boot"},
    {.name = "cifar10",
     .shape = {32, 32, 3}, .classes = 10, .counts = {50000, 10000},
     .mean = {.4914, .4822, .4465}, .std = {.2470, .2435, .2616},
     .read = read_cifar_set,
     .files = {{"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin",
                "data_batch_4.bin", "data_batch_5.bin"}, {"test_batch.bin"}},
     .class_names = "plane car bird cat deer dog frog horse ship truck"},
    {.name = "cifar100",
     .shape = {32, 32, 3}, .classes = 100, .counts = {50000, 10000},
     .mean = {.5071, .4865, .4409}, .std = {.2673, .2564, .2762},
     .read = read_cifar_set, .files = {{"train.bin"}, {"test.bin"}},
     .class_names =
      "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus "
      "butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach "
      "couch crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster "
      "house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree "
      "motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear "
      "pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road "
      "rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar "
      "sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip "
      "turtle wardrobe whale willow_tree wolf woman worm"},
};
// clang-format on

static const DatasetInfo *find_dataset_info(const char *name) {
    for (size_t i = 0; i < LENGTH(dataset_infos); i++)
        if (strcmp(dataset_infos[i].name, name) == 0)
            return &dataset_infos[i];
    return NULL;
}

// Returns a data set as a model sees it. Synthetic images look like the images of the data set that
// the model's synthetic_like names. Images with three channels have mean and std .5 if they are
// synthetic or the model asks for it.
static DatasetInfo dataset_for(const Model *model, const char *name) {
    const bool synthetic = strcmp(name, "synthetic") == 0;
    const char *source = synthetic ? model->synthetic_like : name;
    DatasetInfo info = *find_dataset_info(source);
    if (info.shape.c == 3 && (model->normalize_to_plus_minus_one || synthetic))
        for (size_t c = 0; c < 3; c++) {
            info.mean[c] = .5;
            info.std[c] = .5;
        }
    if (synthetic) {
        info.name = "synthetic";
        info.class_names = NULL;
    }
    return info;
}

/* Synthetic images, for machines without data. Each class has a glyph, a patch of waves drawn from
   Philox. An image shows the glyph of its class, dark or bright, near the middle, with noise and a
   fainter glyph of a random class. Since a glyph and its negative mean the same class, no linear
   model can separate the classes; convolutions and ReLUs can. --seed does not change the images. */
enum { GLYPH_SIZE = 14, WAVES = 3, SHIFT = 2 };
static const uint64_t synthetic_seed = 2022;

// Returns the value as a byte, limited to the range from 0 to 255. gcc vectorizes selects, but not
// fminf().
static uint8_t to_byte(float value) {
    const float not_negative = value < 0 ? 0 : value;
    const float limited = not_negative > 255 ? 255 : not_negative;
    return (uint8_t)limited;
}

/* Draws the glyph of a class, [GLYPH_SIZE][GLYPH_SIZE][channels]. A channel is the sum of WAVES
   plane waves of random direction, phase and frequency, which fade towards the edges:
   exp(-(x^2 + y^2) / (GLYPH_SIZE^2 / 8)) cos(frequency (cos(angle) x + sin(angle) y) + phase),
   where x and y are measured from the middle of the glyph. */
static void draw_glyph(float glyph[], size_t label, size_t channels) {
    memset(glyph, 0, GLYPH_SIZE * GLYPH_SIZE * channels * sizeof *glyph);
    for (uint32_t wave = 0; wave < WAVES * channels; wave++) {
        uint32_t r[4];
        philox4x32(r, wave, (uint32_t)label, 0, DRAW_SYNTHETIC, synthetic_seed);
        double angle = 2 * M_PI * (double)uniform(r[0]);
        double phase = 2 * M_PI * (double)uniform(r[1]);
        double frequency = 2 * M_PI * (1 + 1.5 * (double)uniform(r[2])) / GLYPH_SIZE;
        for (size_t row = 0; row < GLYPH_SIZE; row++)
            for (size_t column = 0; column < GLYPH_SIZE; column++) {
                double x = (double)column - (GLYPH_SIZE - 1) / 2.;
                double y = (double)row - (GLYPH_SIZE - 1) / 2.;
                double window = exp(-(x * x + y * y) / (GLYPH_SIZE * GLYPH_SIZE / 8.));
                double value = cos(frequency * (cos(angle) * x + sin(angle) * y) + phase);
                const size_t pixel = row * GLYPH_SIZE + column, channel = wave % channels;
                glyph[pixel * channels + channel] += (float)(window * value);
            }
    }
}

/* pixels += strength * the glyph of a random class, shifted from the middle by at most SHIFT. The
   strength is contrast or, with equal probability, -contrast. Returns the class. `index` is the
   image's number; `which` is 0 for the distractor and 1 for the glyph of the image's class. */
static size_t add_glyph(float *pixels, const float *glyphs, const DatasetInfo *info, uint32_t index,
                        uint32_t which, float contrast) {
    const Shape s = info->shape;
    uint32_t r[4];
    philox4x32(r, which, index, 1, DRAW_SYNTHETIC, synthetic_seed);
    const size_t label = r[0] % info->classes;
    const size_t top = (s.h - GLYPH_SIZE) / 2 - SHIFT + r[1] % (2 * SHIFT + 1);
    const size_t left = (s.w - GLYPH_SIZE) / 2 - SHIFT + r[2] % (2 * SHIFT + 1);
    const float strength = r[3] & 1 ? contrast : -contrast;
    const size_t width = GLYPH_SIZE * s.c; // numbers in a row of the glyph
    const float *glyph = glyphs + label * GLYPH_SIZE * width;
    for (size_t row = 0; row < GLYPH_SIZE; row++)
        for (size_t i = 0; i < width; i++)
            pixels[((top + row) * s.w + left) * s.c + i] += strength * glyph[row * width + i];
    return label;
}

// Draws image number `index`: two glyphs and noise on gray.
static void draw_synthetic(uint8_t *out, uint8_t *label, const float *glyphs,
                           const DatasetInfo *info, uint32_t index) {
    const size_t size = shape_size(info->shape);
    float pixels[size];
    memset(pixels, 0, sizeof pixels);
    add_glyph(pixels, glyphs, info, index, 0, 25); // a distractor
    *label = (uint8_t)add_glyph(pixels, glyphs, info, index, 1, 80);
    for (size_t i = 0; i < size; i += 16) {
        uint32_t r[4];
        philox4x32(r, (uint32_t)i, index, 2, DRAW_SYNTHETIC, synthetic_seed);
        for (size_t j = 0; j < min_size(16, size - i); j++) {
            const uint32_t byte = (r[j / 4] >> (8 * (j % 4))) & 255;
            float noise = (float)byte - 127.5f;
            float value = 100 + pixels[i + j] + .3f * noise;
            out[i + j] = to_byte(value);
        }
    }
}

// Draws the training or the test set. The test images are numbered after the training images.
static void make_synthetic(Dataset *data, Split split, size_t limit) {
    const DatasetInfo *info = data->info;
    const size_t glyph_size = GLYPH_SIZE * GLYPH_SIZE * info->shape.c;
    const size_t first = split == TRAINING_SET ? 0 : info->counts[TRAINING_SET];
    data->count = min_size(info->counts[split], limit);
    data->images = must_alloc(data->count * shape_size(info->shape), "images");
    data->labels = must_alloc(data->count, "labels");
    float *glyphs = must_alloc(info->classes * glyph_size * sizeof *glyphs, "synthetic images");
    for (size_t label = 0; label < info->classes; label++)
        draw_glyph(glyphs + label * glyph_size, label, info->shape.c);
    PARALLEL_FOR
    for (size_t i = 0; i < data->count; i++)
        draw_synthetic(data->images + i * shape_size(info->shape), data->labels + i, glyphs, info,
                       (uint32_t)(first + i));
    free(glyphs);
}

// Returns whether a folder has the first training file of a data set.
static bool has_dataset(const char *dir, const char *name) {
    char path[PATH_SIZE];
    return data_path(path, dir, find_dataset_info(name)->files[0][0]);
}

// With --data DIR: sets dir to DIR/NAME or, if the files are not there and --dataset names the set,
// to DIR. (The files of MNIST and Fashion-MNIST have the same names.) Returns whether dir has them.
static bool find_in_data_option(char dir[PATH_SIZE], const char *name, const Settings *s) {
    const bool is_named = strcmp(s->dataset, name) == 0;
    join_path(dir, s->data, name);
    if (is_named && !has_dataset(dir, name))
        snprintf(dir, PATH_SIZE, "%s", s->data);
    return has_dataset(dir, name);
}

/* Sets dir to the folder of a data set's files: with --data DIR, DIR/NAME or DIR; otherwise NAME in
   ./data, in the folder data beside the executable, or in /usr/share/datasets. Returns false if
   none of them has the files. */
static bool find_data_dir(char dir[PATH_SIZE], const char *name, const Settings *s) {
    char beside[PATH_SIZE];
    if (*s->data)
        return find_in_data_option(dir, name, s);
    path_beside_program(beside, "data");
    const char *const roots[] = {"data", beside, "/usr/share/datasets"};
    for (size_t i = 0; i < LENGTH(roots); i++) {
        join_path(dir, roots[i], name);
        if (has_dataset(dir, name))
            return true;
    }
    return false;
}

static void free_dataset(Dataset *data) {
    free(data->images);
    free(data->labels);
}

/* ==== 9. Loader ==================================================================================

   W worker threads fill a ring of batches ahead of the training loop. The content and the order of
   the batches depend on the permutation alone: W changes only how long the loop waits. Threads and
   memory are created once, before the first step. */

/* Makes a different variant of an image in each epoch. The random numbers depend only on (seed,
   epoch, position in the epoch), so any worker makes the same variant. */
typedef void Augment(uint8_t *out, const uint8_t *in, Shape s, const RandomKey *key);

// RandomCrop(size, padding = 4), then RandomHorizontalFlip(0.5)
static void augment_crop_flip(uint8_t *out, const uint8_t *in, Shape s, const RandomKey *key) {
    uint32_t r[4];
    philox4x32(r, 0, (uint32_t)key->first, (uint32_t)key->epoch, DRAW_AUGMENT, key->seed);
    const int top = (int)(r[0] % (2 * CROP_PADDING + 1)) - CROP_PADDING;
    const int left = (int)(r[1] % (2 * CROP_PADDING + 1)) - CROP_PADDING;
    const bool flip = r[2] & 1;
    for (size_t y = 0; y < s.h; y++)
        for (size_t x = 0; x < s.w; x++) {
            const size_t mirrored = flip ? s.w - 1 - x : x;
            const int row = top + (int)y, column = left + (int)mirrored;
            for (size_t c = 0; c < s.c; c++)
                out[(y * s.w + x) * s.c + c] = (uint8_t)byte_at(in, s, row, column, c);
        }
}

// weights[d] = exp(-d^2 / (2 sigma^2)) / (sigma sqrt(2 pi)), up to 3 sigma
static void blur_weights(float weights[ELASTIC_REACH + 1]) {
    for (int d = 0; d <= ELASTIC_REACH; d++)
        weights[d] = (float)(exp(-(d * d) / (2. * ELASTIC_SIGMA * ELASTIC_SIGMA)) /
                             (ELASTIC_SIGMA * sqrt(2 * M_PI)));
}

// to[y][x] = sum over d from -3 sigma to 3 sigma of weights[|d|] * from[y + d * dy][x + d * dx],
// where pixels outside the image count as 0
static void blur(float *to, const float *from, Shape s, ptrdiff_t dy, ptrdiff_t dx) {
    float weights[ELASTIC_REACH + 1];
    blur_weights(weights);
    for (size_t y = 0; y < s.h; y++)
        for (size_t x = 0; x < s.w; x++) {
            float sum = 0;
            for (int d = -ELASTIC_REACH; d <= ELASTIC_REACH; d++) {
                const ptrdiff_t row = (ptrdiff_t)y + d * dy, column = (ptrdiff_t)x + d * dx;
                if (is_in_image(s, (int)row, (int)column))
                    sum = fmaf(weights[abs(d)], from[row * (ptrdiff_t)s.w + column], sum);
            }
            to[y * s.w + x] = sum;
        }
}

// field[i] = a displacement of pixel i, uniform in [-alpha, alpha), then blurred along rows and
// columns. `first_counter` is c0 of the first Philox block.
static void draw_field(float *field, Shape s, uint32_t first_counter, const RandomKey *key) {
    const size_t pixels = s.h * s.w;
    float blurred[pixels];
    for (size_t i = 0; i < pixels; i += 4) {
        uint32_t r[4];
        philox4x32(r, first_counter + (uint32_t)i, (uint32_t)key->first, (uint32_t)key->epoch,
                   DRAW_AUGMENT, key->seed);
        for (size_t j = 0; j < min_size(4, pixels - i); j++)
            field[i + j] = ELASTIC_ALPHA * (float)(2 * uniform(r[j]) - 1);
    }
    blur(blurred, field, s, 0, 1);
    blur(field, blurred, s, 1, 0);
}

/* Elastic distortion (Simard, Steinkraus, Platt, "Best practices for convolutional neural
   networks", ICDAR 2003): moves each pixel by a random field, blurred with sigma = 4 and scaled by
   alpha = 34 pixels, with bilinear interpolation. */
static void augment_elastic(uint8_t *out, const uint8_t *in, Shape s, const RandomKey *key) {
    size_t pixels = s.h * s.w;
    float field[2][pixels]; // displacements in y and in x
    draw_field(field[0], s, 1, key);
    draw_field(field[1], s, (uint32_t)(1 + pixels), key);
    for (size_t i = 0; i < pixels; i++) {
        const float y = (float)(i / s.w) + field[0][i], x = (float)(i % s.w) + field[1][i];
        for (size_t c = 0; c < s.c; c++)
            out[i * s.c + c] = (uint8_t)interpolated_byte(in, s, y, x, c);
    }
}

static const struct {
    const char *name;
    Augment *augment;
} augmentations[] = {[AUGMENT_NONE] = {"none", NULL},
                     [AUGMENT_CROP_FLIP] = {"crop-flip", augment_crop_flip},
                     [AUGMENT_ELASTIC] = {"elastic", augment_elastic}};

// The rank that uses a loader's batches, on its device
typedef struct Consumer {
    const Device *device;
    size_t device_number;
    bool pinned;   // batches are in pinned memory
    bool resident; // the data set is on the device, which builds the batches
    size_t rank;   // this rank
    size_t ranks;  // how many ranks divide an epoch's positions; 1 if one rank loads for all
    size_t resize; // the height of --resize, or 0
} Consumer;

// The loader of a data set: its ring of batches and the workers that fill them.
typedef struct Loader {
    const Dataset *data;
    Consumer consumer;
    Shape shape;      // of the images in a batch
    Augment *augment; // NULL leaves images as they are
    size_t batch_size;
    real normalized[3][256]; // (byte / 255 - mean) / std, by channel
    // the epoch
    uint32_t *order;    // its permutation: order[position] = image
    size_t rank_images; // how many of its images are this rank's
    RandomKey key;      // the seed, the epoch's number and this rank's positions
    // the ring
    size_t slots;
    size_t slot_size; // elements of a slot's images, with padding for vector loads past their end
    Batch *ring;      // batch b is in slot b % slots
    real *images, *device_images; // the memory of all slots
    uint8_t *labels, *device_labels;
    DeviceDataset resident; // the data set on the device, if consumer.resident
    MemoryPlan plan;
    // what the workers and loader_next() share, guarded by the lock
    pthread_mutex_t lock;
    pthread_cond_t changed;
    size_t batches; // the number of batches in this epoch
    size_t started; // batches that workers have begun
    size_t handed;  // batches that loader_next() has handed out
    size_t busy;    // workers that are filling a slot
    size_t *filled; // 1 + the number of the batch that a slot holds, or 0 if it holds none
    bool quit;      // asks the workers to end
    // the workers, which count by atomic additions
    size_t workers;
    pthread_t *threads;
    size_t workers_started; // gives each worker its number
    size_t uploaded;        // bytes copied to the device
    size_t upload_ns;       // how long these copies took, in ns
} Loader;

// Returns channel c of a pixel that lies between four pixels of an image.
static real interpolate(const real *image, Shape s, Neighbors rows, Neighbors columns, size_t c) {
    float sum = 0;
    for (size_t i = 0; i < 4; i++) {
        const size_t down = i / 2, right = i % 2;
        const size_t y = rows.first + down, x = columns.first + right;
        const float weight = neighbor_share(rows, down) * neighbor_share(columns, right);
        if (weight > 0) // otherwise, the pixel may be outside the image
            sum = fmaf(weight, (float)image[(y * s.w + x) * s.c + c], sum);
    }
    return sum;
}

// out = an image of shape s, enlarged by a whole factor; see Neighbors
static void enlarge(real *out, const real *image, Shape s, size_t factor) {
    const size_t width = s.w * factor;
    for (size_t y = 0; y < s.h * factor; y++) {
        const Neighbors rows = neighbors_of(y, factor, s.h);
        for (size_t x = 0; x < width; x++) {
            const Neighbors columns = neighbors_of(x, factor, s.w);
            for (size_t c = 0; c < s.c; c++)
                out[(y * width + x) * s.c + c] = interpolate(image, s, rows, columns, c);
        }
    }
}

// out = the normalized values of an image
static void normalize(const Loader *loader, real *out, const uint8_t *image) {
    const Shape s = loader->data->info->shape;
    for (size_t p = 0; p < shape_size(s); p += s.c)
        for (size_t c = 0; c < s.c; c++)
            out[p + c] = loader->normalized[c][image[p + c]];
}

// out = the image at a position of the epoch, augmented, normalized and enlarged
static void load_image(const Loader *loader, real *out, size_t position) {
    const Shape s = loader->data->info->shape;
    const size_t size = shape_size(s), factor = loader->shape.h / s.h;
    const uint8_t *bytes = loader->data->images + loader->order[position] * size;
    uint8_t augmented[size];
    real normalized[size];
    if (loader->augment) {
        const RandomKey key = {loader->key.seed, loader->key.epoch, position, 1};
        loader->augment(augmented, bytes, s, &key);
        bytes = augmented;
    }
    if (factor == 1) {
        normalize(loader, out, bytes);
        return;
    }
    normalize(loader, normalized, bytes);
    enlarge(out, normalized, s, factor);
}

// Fills a batch. If the data set is resident, the device adds the images.
static void fill_batch(const Loader *loader, Batch *batch, size_t number) {
    const size_t size = shape_size(loader->shape), first = number * loader->batch_size;
    batch->number = number;
    batch->key = loader->key;
    batch->key.first = position_of(loader->key, first);
    batch->n = min_size(loader->batch_size, loader->rank_images - first);
    for (size_t i = 0; i < batch->n; i++) {
        const size_t position = position_of(batch->key, i);
        batch->labels[i] = loader->data->labels[loader->order[position]];
        if (!batch->resident)
            load_image(loader, batch->images + i * size, position);
    }
}

// Fills the slot of batch `number` and copies it to the device, which keeps computing meanwhile.
// The caller does not hold the lock, so several workers can make batches at once.
static void make_batch(Loader *loader, size_t number, size_t worker) {
    Batch *slot = &loader->ring[number % loader->slots];
    const Consumer *consumer = &loader->consumer;
    double start = now();
    fill_batch(loader, slot, number);
    double filled_at = now();
    trace_event(consumer->rank, TRACK_LOADER + worker, "make a batch", start, filled_at);
    if (!consumer->device->is_gpu || consumer->resident)
        return;
    size_t bytes = slot->n * shape_size(loader->shape) * sizeof(real);
    consumer->device->transfer(consumer->device_number, slot->device_images, slot->images, bytes);
    consumer->device->transfer(consumer->device_number, slot->device_labels, slot->labels, slot->n);
    double end = now();
    trace_event(consumer->rank, TRACK_LOADER + worker, "upload", filled_at, end);
    __atomic_fetch_add(&loader->uploaded, bytes + slot->n, __ATOMIC_RELAXED);
    __atomic_fetch_add(&loader->upload_ns, (size_t)(1e9 * (end - filled_at)), __ATOMIC_RELAXED);
}

static void *loader_worker(void *argument) {
    Loader *loader = argument;
    size_t worker = __atomic_fetch_add(&loader->workers_started, 1, __ATOMIC_RELAXED);
    /* LAB 3.1 BEGIN loader_worker */
    pthread_mutex_lock(&loader->lock);
    while (!loader->quit) {
        const bool none_left = loader->started == loader->batches;
        // One slot is in use: it holds the batch that loader_next() returned last.
        const bool ring_full = loader->started >= loader->handed + loader->slots - 1;
        if (none_left || ring_full) {
            pthread_cond_wait(&loader->changed, &loader->lock);
            continue;
        }
        const size_t number = loader->started;
        loader->started++;
        loader->busy++;
        pthread_mutex_unlock(&loader->lock);
        make_batch(loader, number, worker);
        pthread_mutex_lock(&loader->lock);
        loader->busy--;
        loader->filled[number % loader->slots] = number + 1;
        pthread_cond_broadcast(&loader->changed);
    }
    pthread_mutex_unlock(&loader->lock);
    /* LAB 3.1 END */
    return NULL;
}

// Returns the size in bytes of an epoch's order, which lists all images and then those that
// order_epoch() repeats.
static size_t order_bytes(const Loader *loader) {
    return (loader->data->count + loader->consumer.ranks - 1) * sizeof *loader->order;
}

// Plans the memory of a loader with batches of batch_size images. loader_init() allocates it.
static void loader_plan(Loader *loader, const Dataset *data, size_t batch_size, size_t workers,
                        Augmentation augment, Consumer consumer) {
    const Shape shape = data->info->shape;
    MemoryPlan *p = &loader->plan;
    DeviceDataset *r = &loader->resident;
    *loader =
        (Loader){.data = data, .batch_size = batch_size, .workers = workers, .consumer = consumer};
    loader->lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    loader->changed = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    loader->shape = resized(shape, consumer.resize);
    loader->augment = augmentations[augment].augment;
    loader->slots = 2 * workers + 1; // PyTorch's prefetch_factor of 2, and the batch in use
    if (!consumer.resident)
        loader->slot_size = align_up(batch_size * shape_size(loader->shape)) + ALIGN;
    *r = (DeviceDataset){.shape = shape, .factor = loader->shape.h / shape.h, .augment = augment};
    const size_t image_bytes = loader->slots * loader->slot_size * sizeof(real);
    const size_t label_bytes = loader->slots * batch_size;
    const MemoryKind where = consumer.pinned ? PINNED_MEMORY : HOST_MEMORY;
    p->device = consumer.device;
    memory_plan_add(p, &loader->images, image_bytes, where, FOR_LOADER);
    memory_plan_add(p, &loader->labels, label_bytes, where, FOR_LOADER);
    memory_plan_add(p, &loader->order, order_bytes(loader), HOST_MEMORY, FOR_LOADER);
    if (consumer.resident) {
        memory_plan_add(p, &r->images, data->count * shape_size(shape), DEVICE_MEMORY, FOR_DATA);
        memory_plan_add(p, &r->labels, data->count, DEVICE_MEMORY, FOR_DATA);
        memory_plan_add(p, &r->normalized, sizeof loader->normalized, DEVICE_MEMORY, FOR_DATA);
        memory_plan_add(p, &r->order, order_bytes(loader), DEVICE_MEMORY, FOR_DATA);
    } else if (consumer.device->is_gpu) {
        memory_plan_add(p, &loader->device_images, image_bytes, DEVICE_MEMORY, FOR_LOADER);
        memory_plan_add(p, &loader->device_labels, label_bytes, DEVICE_MEMORY, FOR_LOADER);
    }
}

// Copies the data set to the device. The pointers in DeviceDataset are to const, since kernels only
// read the data; the casts remove the const.
static void make_resident(Loader *loader) {
    const Dataset *data = loader->data;
    const Device *d = loader->consumer.device;
    DeviceDataset *r = &loader->resident;
    d->copy((void *)r->images, data->images, data->count * shape_size(r->shape));
    d->copy((void *)r->labels, data->labels, data->count);
    d->copy((void *)r->normalized, loader->normalized, sizeof loader->normalized);
    blur_weights(r->blur);
}

// Gives each slot its memory. Without a copy on the device, kernels read the slot itself.
static void init_slots(Loader *loader) {
    for (size_t s = 0; s < loader->slots; s++) {
        Batch *slot = &loader->ring[s];
        const size_t first_image = s * loader->slot_size, first_label = s * loader->batch_size;
        slot->images = loader->images + first_image;
        slot->labels = loader->labels + first_label;
        slot->device_images = slot->images;
        slot->device_labels = slot->labels;
        if (loader->device_images) {
            slot->device_images = loader->device_images + first_image;
            slot->device_labels = loader->device_labels + first_label;
        }
        if (loader->consumer.resident)
            slot->resident = &loader->resident;
    }
}

// Allocates the memory and starts the workers, which wait for loader_start().
static void loader_init(Loader *loader) {
    const DatasetInfo *info = loader->data->info;
    memory_plan_alloc(&loader->plan);
    loader->ring = must_alloc(loader->slots * sizeof *loader->ring, "the loader");
    loader->filled = must_alloc(loader->slots * sizeof *loader->filled, "the loader");
    loader->threads = must_alloc(loader->workers * sizeof *loader->threads, "the loader");
    for (size_t c = 0; c < info->shape.c; c++)
        for (int byte = 0; byte < 256; byte++)
            loader->normalized[c][byte] =
                ((real)byte / 255 - (real)info->mean[c]) / (real)info->std[c];
    if (loader->consumer.resident)
        make_resident(loader);
    init_slots(loader);
    for (size_t w = 0; w < loader->workers; w++)
        start_thread(&loader->threads[w], loader_worker, loader, "a loader worker");
}

// Shuffles an order (Fisher-Yates). The remainder of 64 random bits is practically uniform. Draw i
// depends only on seed, epoch and i.
static void shuffle(uint32_t *order, size_t count, uint64_t seed, size_t epoch) {
    for (size_t remaining = count; remaining > 1; remaining--) {
        uint32_t r[4];
        const size_t i = remaining - 1;
        philox4x32(r, (uint32_t)i, 0, (uint32_t)epoch, DRAW_SHUFFLE, seed);
        uint64_t bits = (uint64_t)r[0] << 32 | r[1];
        size_t j = (size_t)(bits % remaining);
        uint32_t swapped = order[i];
        order[i] = order[j];
        order[j] = swapped;
    }
}

enum { TEST_EPOCH = 0 }; // training counts its epochs from 1

/* Orders the images of an epoch and sets this rank's share of them. In training, the images are
   shuffled; in a test, they keep their order in the file. Rank r of N has the positions r, r + N,
   ... In training, the first images are repeated at the end, so that all ranks have the same number
   of images (as in PyTorch's DistributedSampler). */
static void order_epoch(Loader *loader, uint64_t seed, size_t epoch) {
    const size_t count = loader->data->count, rank = loader->consumer.rank,
                 ranks = loader->consumer.ranks;
    /* LAB 8.2 BEGIN order_epoch */
    for (size_t i = 0; i < count; i++)
        loader->order[i] = (uint32_t)i;
    if (epoch != TEST_EPOCH)
        shuffle(loader->order, count, seed, epoch);
    for (size_t i = 0; i + 1 < ranks; i++)
        loader->order[count + i] = loader->order[i];
    loader->key = (RandomKey){seed, epoch, rank, ranks};
    // (count - first) / ranks, rounded up; first may be larger than count. In training, all ranks
    // have as many images as rank 0.
    const size_t first = epoch == TEST_EPOCH ? rank : 0;
    loader->rank_images = (count + ranks - 1 - first) / ranks;
    /* LAB 8.2 END */
}

// Stops the workers from starting new batches and waits for those in progress. The caller holds the
// lock.
static void pause_workers(Loader *loader) {
    loader->batches = loader->started; // if the epoch ends early, no worker begins another
    while (loader->busy > 0)
        pthread_cond_wait(&loader->changed, &loader->lock);
}

// Starts an epoch with its batch number `first`.
static void loader_start(Loader *loader, uint64_t seed, size_t epoch, size_t first) {
    pthread_mutex_lock(&loader->lock);
    pause_workers(loader);
    order_epoch(loader, seed, epoch);
    if (loader->consumer.resident)
        loader->consumer.device->copy(loader->resident.order, loader->order, order_bytes(loader));
    memset(loader->filled, 0, loader->slots * sizeof *loader->filled);
    loader->started = first;
    loader->handed = first;
    loader->batches = ceil_div(loader->rank_images, loader->batch_size);
    pthread_cond_broadcast(&loader->changed);
    pthread_mutex_unlock(&loader->lock);
}

// Returns the next batch, which is valid until the next call, or NULL when the epoch is over.
static const Batch *loader_next(Loader *loader) {
    const Batch *batch = NULL;
    /* LAB 3.2 BEGIN loader_next */
    pthread_mutex_lock(&loader->lock);
    if (loader->handed < loader->batches) {
        const size_t number = loader->handed;
        loader->handed++;
        pthread_cond_broadcast(&loader->changed); // the slot of the previous batch is free now
        while (loader->filled[number % loader->slots] != number + 1)
            pthread_cond_wait(&loader->changed, &loader->lock);
        batch = &loader->ring[number % loader->slots];
    }
    pthread_mutex_unlock(&loader->lock);
    /* LAB 3.2 END */
    return batch;
}

static void loader_free(Loader *loader) {
    pthread_mutex_lock(&loader->lock);
    loader->quit = true;
    pthread_cond_broadcast(&loader->changed);
    pthread_mutex_unlock(&loader->lock);
    for (size_t w = 0; w < loader->workers; w++)
        pthread_join(loader->threads[w], NULL);
    memory_plan_free(&loader->plan);
    free(loader->ring);
    free(loader->filled);
    free(loader->threads);
}

/* ==== 10. Data parallelism =======================================================================

   N replicas of the network train together. Each has a rank, 0 to N - 1, and computes on its own
   device, driven by a thread of this process (--gpus, --replicas) or by a process of its own (MPI).

     ddp   each rank loads its share of the batch and computes a gradient from it. A ring all-reduce
           adds the gradients, bucket by bucket, while backward goes on to earlier layers.
           All ranks make the same update.
     dp    rank 0, the master, loads the batch, scatters its images and broadcasts the parameters.
           All ranks compute outputs and gradients. The master gathers the outputs, computes the
           loss, reduces the gradients and makes the update; meanwhile the other ranks wait.

   Apart from rounding, N devices make the same update as one device with the whole batch: the
   shares add up to that batch, the random numbers for an image depend only on its position in the
   epoch, and the loss is the mean over the whole batch. (If N does not divide the number of images,
   ddp's last batch repeats some of them, as PyTorch's does.) Only BatchNorm differs: it normalizes
   each rank's share by itself, and rank 0's running statistics are kept. Each sum adds its terms in
   a fixed order, around the ring or, under dp, by rank, so the same N gives the same bits. */

// The ranks that are threads of this process.
typedef struct Team {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct Communicator *comms[MAX_REPLICAS]; // by rank
    size_t arrivals[MAX_REPLICAS];            // how many barriers each rank has reached
    size_t host_bytes; // how much of the host's memory the ranks have planned so far
    // For dp: the master's batch, and for all of its images the outputs, gradients and losses, laid
    // out as in a network
    const Batch *batch;
    real *logp, *dlogp;
    real *losses, *host_losses;
} Team;

// What a rank needs to communicate with the others
typedef struct Communicator {
    size_t rank;  // 0 to world - 1
    size_t world; // the number of ranks
    size_t device_number;
    size_t replica;  // the number of this rank within its process
    size_t replicas; // how many ranks this process has
    const Settings *settings;
    Team *team; // NULL if the ranks are processes
    bool dp;
    Net *net;
    Loader *loader;
    const void *published;              // what other ranks may read after a barrier
    real *buffer;                       // on a GPU: receives other ranks' numbers
    void *send_buffer, *receive_buffer; // MPI: in host memory
    Batch batch; // dp: this rank's images of the master's batch, and the labels of the whole batch
    // For ddp: the thread that adds up gradients during backward
    Range buckets[MAX_BUCKETS]; // ranges of gradients, in the order in which backward finishes them
    size_t bucket_count;
    size_t buckets_ready; // how many buckets backward has finished in this step
    size_t buckets_done;  // how many buckets have been summed over the ranks
    bool quit;            // asks the thread to end
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    double seconds;    // the time spent on communication since the last step
    double bytes_sent; // since the last step; under dp, the bytes that this rank has copied
    MemoryPlan plan;
} Communicator;

// Ranks wait in intervals of this many seconds. If this process is stopped, for example by Ctrl-Z,
// the stop counts as one interval toward --timeout, however long it lasts.
static const double wait_interval = .1;

static _Noreturn void die_timeout(const Communicator *c, size_t awaited) {
    die(1, "rank %zu: rank %zu has not answered for %g s; see its log, or raise --timeout", c->rank,
        awaited, c->settings->timeout);
}

// ---- Ranks

#ifdef CNN_MPI
#include <mpi.h>

// Ends all ranks; die() calls it under MPI. Otherwise, the other ranks would wait for this one.
static void end_all_ranks(int status) {
    MPI_Abort(MPI_COMM_WORLD, status);
}

static void finalize_mpi(void) {
    MPI_Finalize();
}

// Initializes MPI; sets rank, world and device_number. The ranks on a machine get devices 0, 1, ...
static void start_mpi(Communicator *c) {
    int provided, rank, world, device;
    MPI_Comm machine;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided);
    exit_process = end_all_ranks;
    atexit(finalize_mpi);
    if (provided < MPI_THREAD_SERIALIZED)
        die(1, "MPI: expected MPI_THREAD_SERIALIZED, found less; use an MPI library with thread "
               "support");
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
    MPI_Comm_rank(machine, &device);
    MPI_Comm_free(&machine);
    c->rank = (size_t)rank;
    c->world = (size_t)world;
    c->device_number = (size_t)device;
}

// Waits until a message to or from a neighbor is complete. Dies after --timeout.
static void mpi_wait(const Communicator *c, MPI_Request *request, size_t neighbor) {
    double waited = 0, last = now();
    int done;
    MPI_Test(request, &done, MPI_STATUS_IGNORE);
    while (!done) {
        waited += fmin(now() - last, wait_interval);
        last = now();
        if (waited > c->settings->timeout)
            die_timeout(c, neighbor);
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL); // leaves the core to others
        MPI_Test(request, &done, MPI_STATUS_IGNORE);
    }
}

// Sends bytes to the right neighbor and returns the bytes received from the left neighbor.
static const void *mpi_exchange(Communicator *c, const void *send, size_t bytes, size_t expected) {
    size_t right = (c->rank + 1) % c->world, left = (c->rank + c->world - 1) % c->world;
    MPI_Request requests[2];
    if (c->net->device->is_gpu) {
        c->net->device->transfer(c->device_number, c->send_buffer, send, bytes);
        send = c->send_buffer;
    }
    MPI_Irecv(c->receive_buffer, (int)expected, MPI_BYTE, (int)left, 0, MPI_COMM_WORLD,
              &requests[0]);
    MPI_Isend(send, (int)bytes, MPI_BYTE, (int)right, 0, MPI_COMM_WORLD, &requests[1]);
    mpi_wait(c, &requests[0], left);
    mpi_wait(c, &requests[1], right);
    return c->receive_buffer;
}
#else
static _Noreturn void start_mpi(const Communicator *c) {
    (void)c;
    die(1, "started as one of several ranks, but built without MPI; install MPI, then run: make "
           "clean && make");
}

// Is never called, since start_mpi() dies.
static const void *mpi_exchange(Communicator *c, const void *send, size_t bytes, size_t expected) {
    (void)c, (void)bytes, (void)expected;
    return send;
}
#endif

// Returns how many processes mpirun or srun has started, or 0. mpirun comes first: within a job it
// is itself a step of Slurm, of a different size.
static size_t launched_processes(void) {
    static const char *const sizes[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"};
    size_t count = 0;
    for (size_t i = 0; i < LENGTH(sizes) && count == 0; i++)
        count = environment_number(sizes[i]);
    return count;
}

// Returns whether mpirun or srun has started this process as one of several. If so, initializes MPI
// and sets rank, world and device_number.
static bool join_mpi(Communicator *c) {
    const bool launched =
        getenv("OMPI_COMM_WORLD_RANK") || getenv("PMI_RANK") || getenv("PMIX_RANK");
    const size_t world = launched_processes();
    if (!launched && world > 1 && environment_number("SLURM_PROCID") == 0)
        fprintf(stderr,
                "cnn: warning: srun has started %zu processes without MPI: each trains by itself; "
                "to train together, use srun --mpi=pmix, or mpirun\n",
                world);
    if (!launched || world < 2)
        return false;
    start_mpi(c);
    if (c->world != world)
        die(1,
            "started as one of %zu ranks, but MPI found %zu; use MPI's own mpirun, or srun "
            "--mpi=pmix",
            world, c->world);
    return true;
}

// ---- Barriers and messages

static void team_init(Team *t) {
    pthread_condattr_t monotonic; // immune to changes of the wall clock
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&t->changed, &monotonic);
    pthread_mutex_init(&t->lock, NULL);
}

// Waits for a change of the team, at most wait_interval seconds. Returns whether the time ran out.
static bool team_wait_timed_out(Team *t) {
    const double end = now() + wait_interval;
    const struct timespec until = {(time_t)end, (long)(1e9 * (end - floor(end)))};
    return pthread_cond_timedwait(&t->changed, &t->lock, &until) == ETIMEDOUT;
}

// Waits until all ranks of the team have arrived; after --timeout dies, naming one that has not.
// Does nothing without a team: processes wait for each other's messages instead.
static void team_barrier(Communicator *c) {
    Team *t = c->team;
    if (!t)
        return;
    double waited = 0;
    pthread_mutex_lock(&t->lock);
    t->arrivals[c->rank]++;
    const size_t number = t->arrivals[c->rank];
    pthread_cond_broadcast(&t->changed);
    for (size_t r = 0; r < c->world; r++)
        while (t->arrivals[r] < number) {
            const bool timed_out = team_wait_timed_out(t);
            if (timed_out)
                waited += wait_interval;
            if (waited > c->settings->timeout)
                die_timeout(c, r);
        }
    pthread_mutex_unlock(&t->lock);
}

// Returns whether NCCL adds the gradients: this build has it, and each rank is a process with its
// own GPU.
static bool uses_nccl(const Communicator *c) {
    const bool is_built_in = cuda_all_reduce != NULL; // a weak function: see section 3
    const bool is_process = c->team == NULL;
    const bool has_own_gpu = c->net->device->is_gpu && !c->settings->oversubscribe;
    return is_built_in && is_process && has_own_gpu;
}

/* Makes one step around the ring: sends data[send] to the right neighbor and receives data[receive]
   from the left neighbor. What is received replaces the rank's own numbers or, if `add`, is added
   to them. Threads send nothing: each reads from the memory of its left neighbor. */
static void ring_step(Communicator *c, real *data, Range send, Range receive, bool add) {
    const real *from;
    if (c->team) {
        team_barrier(c);
        const Communicator *left = c->team->comms[(c->rank + c->world - 1) % c->world];
        from = (const real *)left->published + receive.first;
    } else {
        from = mpi_exchange(c, data + send.first, send.count * sizeof *data,
                            receive.count * sizeof *data);
    }
    c->bytes_sent += (double)(send.count * sizeof *data);
    c->net->device->receive(c->device_number, data + receive.first, from, receive.count, add,
                            c->buffer);
}

/* data[range] = its sum over all ranks, with the same bits on each: world - 1 steps of a
   reduce-scatter, then world - 1 steps of an all-gather. Each rank sends 2 (world - 1) / world
   times the size of the range: less than twice its size, however many ranks there are. (Patarasuk,
   Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.) */
static void all_reduce(Communicator *c, real *data, Range range) {
    const size_t n = c->world;
    const size_t rank_plus_2n = c->rank + 2 * n; // so that subtracting a step never wraps around
    c->published = data;
    /* LAB 8.1 BEGIN all_reduce */
    /* The part that a rank sends and the part that it receives, with n = 3:
                          rank 0            rank 1            rank 2
         step 0     +=    sends 0, gets 2   sends 1, gets 0   sends 2, gets 1
         step 1     +=    sends 2, gets 1   sends 0, gets 2   sends 1, gets 0
         step 2     =     sends 1, gets 0   sends 2, gets 1   sends 0, gets 2
         step 3     =     sends 0, gets 2   sends 1, gets 0   sends 2, gets 1
       After the n - 1 steps of the reduce-scatter, part (rank + 1) % n is complete on a rank. */
    for (size_t step = 0; step < 2 * (n - 1); step++) {
        const Range sent = part_of(range, (rank_plus_2n - step) % n, n);
        const Range received = part_of(range, (rank_plus_2n - step - 1) % n, n);
        ring_step(c, data, sent, received, step < n - 1);
    }
    /* LAB 8.1 END */
    team_barrier(c); // the right neighbor may still be reading
}

// Computes the same sum with NCCL, which sends as many bytes as the ring.
static void nccl_all_reduce(Communicator *c, real *data, Range range) {
    const size_t n = c->world, left = (c->rank + n - 1) % n;
    c->bytes_sent += 2. * (double)((n - 1) * range.count * sizeof *data) / (double)n;
    const bool in_time =
        cuda_all_reduce(c->device_number, data + range.first, range.count, c->settings->timeout);
    if (!in_time)
        die_timeout(c, left);
}

// Copies rank 0's data to all ranks, around the ring: in step s, rank s sends it on to rank s + 1.
static void broadcast(Communicator *c, real *data, size_t count) {
    const Range all = {0, count};
    c->published = data;
    for (size_t step = 0; step + 1 < c->world; step++) {
        Range sent = {0, 0}, received = {0, 0};
        if (c->rank == step)
            sent = all;
        if (c->rank == step + 1)
            received = all;
        ring_step(c, data, sent, received, false);
    }
    team_barrier(c);
}

// The most bytes that gather_around_ring() sends in one message. comm_plan() adds them to each
// buffer, so that a message fits even if the network is tiny.
enum { GATHER_CHUNK = 4096 };

// Copies the other ranks' bytes directly: the ranks are threads of one process.
static void gather_from_team(Communicator *c, char *all, size_t bytes) {
    for (size_t r = 0; r < c->world; r++)
        if (r != c->rank)
            memcpy(all + r * bytes, (const char *)c->team->comms[r]->published + r * bytes, bytes);
}

// Passes the bytes around the ring of processes, in chunks.
static void gather_around_ring(Communicator *c, char *all, size_t bytes) {
    const size_t n = c->world;
    for (size_t step = 1; step < n; step++) {
        // the rank whose bytes arrive in this step, and the one whose bytes arrived before
        const size_t received = (c->rank + n - step) % n, sent = (received + 1) % n;
        for (size_t offset = 0; offset < bytes; offset += GATHER_CHUNK) {
            const size_t size = min_size(GATHER_CHUNK, bytes - offset);
            const void *chunk = mpi_exchange(c, all + sent * bytes + offset, size, size);
            memcpy(all + received * bytes + offset, chunk, size);
        }
    }
}

// all[r] = the bytes that rank r has in its all[r], in host memory
static void all_gather(Communicator *c, void *all, size_t bytes) {
    c->published = all;
    team_barrier(c);
    if (c->team)
        gather_from_team(c, all, bytes);
    else
        gather_around_ring(c, all, bytes);
    team_barrier(c);
}

// ---- ddp

// Sums each bucket over the ranks when it is ready, while backward fills the next one.
static void *comm_thread(void *argument) {
    Communicator *c = argument;
    pthread_mutex_lock(&c->lock);
    while (!c->quit) {
        if (c->buckets_done == c->buckets_ready) {
            pthread_cond_wait(&c->changed, &c->lock);
            continue;
        }
        size_t bucket = c->buckets_done;
        pthread_mutex_unlock(&c->lock);
        c->net->device->wait(c->replica, BUCKET_MARKS + bucket);
        double begin = now();
        c->net->device->nsight_range(NSIGHT_STEP, "all-reduce");
        if (uses_nccl(c))
            nccl_all_reduce(c, c->net->grads, c->buckets[bucket]);
        else
            all_reduce(c, c->net->grads, c->buckets[bucket]);
        c->net->device->nsight_range(NSIGHT_STEP, NULL);
        const double end = now();
        c->seconds += end - begin;
        trace_event(c->rank, TRACK_COMM, "all-reduce", begin, end);
        pthread_mutex_lock(&c->lock);
        c->buckets_done++;
        pthread_cond_broadcast(&c->changed);
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

// Marks buckets as ready. backward() calls it when the gradients at offset `first` and above are
// complete. `context` is the rank's Communicator.
static void gradients_ready(void *context, size_t first) {
    Communicator *c = context;
    pthread_mutex_lock(&c->lock);
    while (c->buckets_ready < c->bucket_count && c->buckets[c->buckets_ready].first >= first) {
        c->net->device->mark(BUCKET_MARKS + c->buckets_ready);
        c->buckets_ready++;
    }
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

static void add_bucket(Communicator *c, size_t first, size_t end) {
    if (end <= first)
        return;
    c->buckets[c->bucket_count] = (Range){first, end - first};
    c->bucket_count++;
}

// Divides the gradients into buckets, starting with the last layer. The first bucket is
// small, so that communication begins early (as in PyTorch).
static void plan_buckets(Communicator *c) {
    const Net *net = c->net;
    double limit = fmin(1, c->settings->bucket_mb);
    size_t end = net->param_size;
    for (size_t i = last_row(net); i > 0; i--) {
        const Layer *l = &net->layers[i];
        if (l->weight_count == 0)
            continue;
        const double megabytes = 1e-6 * (double)((end - l->weight_offset) * sizeof(real));
        if (megabytes >= limit && c->bucket_count + 1 < MAX_BUCKETS) {
            add_bucket(c, l->weight_offset, end);
            end = l->weight_offset;
            limit = c->settings->bucket_mb;
        }
    }
    add_bucket(c, 0, end);
}

// ---- dp

// to = from or, if add, to += from. Counts every copy as communication, including those that the
// master makes of its own images and outputs.
static void dp_receive(Communicator *c, real *to, const real *from, size_t count, bool add) {
    double begin = now();
    c->net->device->receive(c->device_number, to, from, count, add, c->buffer);
    c->seconds += now() - begin;
    const char *what = add ? "add" : "fetch";
    trace_event(c->rank, TRACK_COMM, what, begin, now());
    c->bytes_sent += (double)(count * sizeof *to);
}

static void dp_copy(Communicator *c, real *to, const real *from, size_t count) {
    dp_receive(c, to, from, count, false);
}

// Returns a rank's share of the master's batch. If the batch is small, the last ranks have no
// images.
static Range dp_share(const Communicator *c, size_t rank) {
    const size_t n = c->team->batch->n;
    const size_t images_per_rank = ceil_div(n, c->world);
    const size_t first = min_size(rank * images_per_rank, n);
    return (Range){first, min_size(images_per_rank, n - first)};
}

// Returns this rank's share of the master's next batch. The epoch must have a batch left.
static const Batch *dp_next(Communicator *c) {
    Team *t = c->team;
    if (c->rank == 0)
        t->batch = loader_next(c->loader);
    c->net->device->synchronize(); // the update may still be queued
    team_barrier(c);
    const Range share = dp_share(c, c->rank);
    c->batch = *t->batch;
    c->batch.n = share.count;
    c->batch.key.first = position_of(t->batch->key, share.first);
    c->batch.device_images += share.first * shape_size(c->net->layers[0].out);
    return &c->batch;
}

// Copies this rank's images from the master's batch, and the master's parameters.
static void dp_load(Communicator *c, double lr) {
    Net *net = c->net;
    const Shape image_shape = net->layers[0].out;
    net->device->set_step(net->step, (StepInputs){c->batch.key, lr});
    const size_t count = c->batch.n * shape_size(image_shape);
    if (net->device->is_gpu) {
        dp_copy(c, c->buffer, c->batch.device_images, count);
        net->kernels->load_images(output(net, 0), c->buffer, c->batch.n, image_shape,
                                  net->settings->layout == NCHW);
    } else {
        dp_copy(c, output(net, 0), c->batch.device_images, count);
    }
    if (c->rank > 0) {
        dp_copy(c, net->params, c->team->comms[0]->net->params, net->param_size);
        refresh_params16(net);
    }
}

// Computes on the master the loss of the whole batch, and the gradient of that loss.
static void master_loss(Communicator *c) {
    Team *t = c->team;
    Net *net = c->net;
    const size_t n = t->batch->n;
    net->kernels->nll_loss(t->losses, t->losses + n, t->dlogp, t->logp, t->batch->device_labels, n,
                           n, net->classes, c->settings->label_smoothing, net->loss_scale);
    net->device->copy(t->host_losses, t->losses, 2 * n * sizeof(real));
}

// Copies this rank's outputs to the master, which computes the loss from the outputs of all ranks;
// then fetches this rank's share of the gradient of the loss. Returns the mean loss of the whole
// batch, and how many images of this rank's share are classified correctly.
static BatchLoss dp_loss(Communicator *c) {
    Team *t = c->team;
    Net *net = c->net;
    const Range images = dp_share(c, c->rank);
    const size_t first_output = images.first * net->classes;
    const size_t output_count = images.count * net->classes;
    const real *correct = t->host_losses + t->batch->n + images.first;
    net->device->synchronize();
    dp_copy(c, t->logp + first_output, output(net, last_row(net)), output_count);
    team_barrier(c);
    if (c->rank == 0)
        master_loss(c);
    team_barrier(c);
    dp_copy(c, doutput(net, last_row(net)), t->dlogp + first_output, output_count);
    return (BatchLoss){average_losses(t->host_losses, t->batch->n).mean,
                       sum_of(correct, images.count)};
}

// Adds up, on the master, the gradients of the ranks that had an image.
static void add_gradients(Communicator *c) {
    for (size_t r = 1; r < c->world; r++)
        if (dp_share(c, r).count > 0)
            dp_receive(c, c->net->grads, c->team->comms[r]->net->grads, c->net->param_size, true);
}

static void dp_reduce(Communicator *c) {
    c->net->device->synchronize();
    team_barrier(c);
    if (c->rank == 0)
        add_gradients(c);
    team_barrier(c);
}

// ---- What train() and test() call. A single device counts as ddp.

// Returns whether this rank loads images for training. With dp, only the master does.
static bool loads_training_data(const Communicator *c) {
    return !c->dp || c->rank == 0;
}

static const Batch *next_batch(Communicator *c) {
    if (c->dp)
        return dp_next(c);
    return loader_next(c->loader);
}

// data.to(device)
static void load_batch(Communicator *c, const Batch *batch, double lr) {
    if (c->dp)
        dp_load(c, lr);
    else
        net_load(c->net, batch, lr);
}

// loss = F.nll_loss(...). Also sets the gradient of the last row, with which backward() starts.
static BatchLoss batch_loss(Communicator *c, const Batch *batch) {
    if (c->dp)
        return dp_loss(c);
    return loss_and_gradient(c->net, batch->n);
}

// Completes the sums of the gradients of the whole batch: on all ranks or, under dp, on the master.
static void reduce_gradients(Communicator *c) {
    if (c->dp) {
        dp_reduce(c);
        return;
    }
    if (c->bucket_count == 0) // a single device
        return;
    gradients_ready(c, 0); // the buckets not yet reported; with --overlap off, all of them
    pthread_mutex_lock(&c->lock);
    while (c->buckets_done < c->bucket_count)
        pthread_cond_wait(&c->changed, &c->lock);
    c->buckets_ready = 0;
    c->buckets_done = 0;
    pthread_mutex_unlock(&c->lock);
}

// Gives all ranks, before a test, rank 0's running statistics and, under dp, its parameters.
static void broadcast_for_test(Communicator *c) {
    Net *net = c->net;
    net->device->synchronize();
    broadcast(c, net->stats, net->stats_size);
    if (c->dp)
        broadcast(c, net->params, net->param_size);
    refresh_params16(net);
    c->bytes_sent = 0; // the broadcasts do not belong to a step
}

// sums[i] = the sum of the ranks' sums[i], added in the order of the ranks. `all` has room for the
// sums of all ranks.
static void sum_over_ranks(Communicator *c, double *sums, size_t count, double *all) {
    memcpy(all + c->rank * count, sums, count * sizeof *sums);
    all_gather(c, all, count * sizeof *sums);
    for (size_t i = 0; i < count; i++) {
        sums[i] = 0;
        for (size_t r = 0; r < c->world; r++)
            sums[i] += all[r * count + i];
    }
}

// Ends the program if a rank's hash differs from rank 0's.
static void require_equal_on_ranks(Communicator *c, const char *what, uint64_t hash) {
    uint64_t hashes[c->world];
    hashes[c->rank] = hash;
    all_gather(c, hashes, sizeof hash);
    for (size_t r = 1; r < c->world; r++)
        if (hashes[r] != hashes[0])
            die(1,
                "rank %zu differs from rank 0 in its %s; start all ranks with the same options and "
                "files",
                r, what);
}

// Plans the memory in which dp's master computes the loss of the whole batch, which has `images`
// images.
static void plan_master(Communicator *c, size_t images) {
    const size_t output_bytes = images * c->net->classes * sizeof(real);
    Team *t = c->team;
    memory_plan_add(&c->plan, &t->logp, output_bytes, DEVICE_MEMORY, FOR_COMMUNICATION);
    memory_plan_add(&c->plan, &t->dlogp, output_bytes, DEVICE_MEMORY, FOR_COMMUNICATION);
    memory_plan_add(&c->plan, &t->losses, 2 * images * sizeof(real), DEVICE_MEMORY,
                    FOR_COMMUNICATION);
    memory_plan_add(&c->plan, &t->host_losses, 2 * images * sizeof(real), HOST_MEMORY,
                    FOR_COMMUNICATION);
}

// Plans the memory of communication; rank, world, settings, team and dp must be set.
static void comm_plan(Communicator *c, Net *net, Loader *loader) {
    const bool gpu = net->device->is_gpu;
    size_t numbers = max_size(net->param_size, net->stats_size);
    if (c->dp)
        numbers = max_size(numbers, net->max_batch * shape_size(net->layers[0].out));
    const size_t bytes = numbers * sizeof(real) + GATHER_CHUNK;
    c->net = net;
    c->loader = loader;
    c->plan = (MemoryPlan){.device = net->device};
    c->lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    c->changed = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    if (c->world > 1 && gpu)
        memory_plan_add(&c->plan, &c->buffer, bytes, DEVICE_MEMORY, FOR_COMMUNICATION);
    if (c->world > 1 && !c->team) {
        memory_plan_add(&c->plan, &c->send_buffer, bytes, PINNED_MEMORY, FOR_COMMUNICATION);
        memory_plan_add(&c->plan, &c->receive_buffer, bytes, PINNED_MEMORY, FOR_COMMUNICATION);
    }
    if (c->dp && c->rank == 0)
        plan_master(c, loader->batch_size);
}

// Prepares to sum gradients, with ddp on several ranks: joins NCCL's group, plans the buckets and
// starts the thread.
static void comm_start(Communicator *c) {
    if (c->world == 1 || c->dp)
        return;
    if (uses_nccl(c)) {
        char *ids = must_alloc(c->world * NCCL_ID_BYTES, "the id of the NCCL group");
        if (c->rank == 0)
            cuda_nccl_id(ids);
        all_gather(c, ids, NCCL_ID_BYTES); // the first id, rank 0's, is used
        cuda_nccl_join(ids, c->rank, c->world);
        free(ids);
    }
    plan_buckets(c);
    if (c->settings->overlap) {
        c->net->on_gradients = gradients_ready;
        c->net->context = c;
    }
    c->net->world = c->world;
    start_thread(&c->thread, comm_thread, c, "the communication thread");
}

static void comm_free(Communicator *c) {
    if (c->bucket_count > 0) { // comm_start() has started the thread
        pthread_mutex_lock(&c->lock);
        c->quit = true;
        pthread_cond_broadcast(&c->changed);
        pthread_mutex_unlock(&c->lock);
        pthread_join(c->thread, NULL);
        if (uses_nccl(c))
            cuda_nccl_leave();
    }
    memory_plan_free(&c->plan);
}

/* ==== 11. Checkpoints ============================================================================

   A safetensors file holds the length of the header (8 bytes, little-endian), the header as JSON,
   then the values of all tensors. Names, shapes and layouts follow PyTorch's state_dict():
   a convolution's weight is [out][in][row][column], a linear layer's is [out][in], where `in` runs
   over channels, then rows, then columns, the order in which PyTorch flattens an image.
   A checkpoint also holds the optimizer's state and, as metadata, the position of the run and the
   settings that determine its result. In a file that cnn writes, the metadata ends with a checksum
   of the preceding metadata and of all values; a file that PyTorch writes has no checksum. */

enum { MAX_HEADER = 1 << 20, METADATA_SIZE = 4096, SHAPE_TEXT_SIZE = 96, ENTRY_SIZE = 384 };
#define CHECKSUM_FORMAT "cnn.version=3\ncnn.checksum=fnv1a64:%016llx\n"

// A tensor of the file.
typedef struct Tensor {
    char name[96], shape[SHAPE_TEXT_SIZE]; // as in the file's header
    const char *dtype;
    size_t count;         // how many numbers it has
    size_t bytes, offset; // in the file; the offset is counted from the end of the header
    real *values;         // on the device; NULL if it is a counter, or not needed
    size_t *counter;      // BatchNorm's number of batches, a 64-bit integer, or NULL
    bool not_negative;    // its values are means of squares
    // If it is a weight: the part of the image that each of its outputs sees; otherwise h = 0
    Shape filter;
} Tensor;

typedef struct TensorList {
    size_t count;
    Tensor *tensors;
} TensorList;

typedef enum { TO_FILE, FROM_FILE } Direction;

// Reorders a weight from our layout, [row][column][channel][output], to PyTorch's,
// [output][channel][row][column], or back.
static void reorder_weight(real *to, const real *from, Shape filter, size_t outputs,
                           Direction direction) {
    const size_t taps = filter.h * filter.w;
    for (size_t k = 0; k < outputs; k++)
        for (size_t c = 0; c < filter.c; c++)
            for (size_t tap = 0; tap < taps; tap++) {
                const size_t our_index = (tap * filter.c + c) * outputs + k;
                const size_t pytorch_index = (k * filter.c + c) * taps + tap;
                if (direction == TO_FILE)
                    to[pytorch_index] = from[our_index];
                else
                    to[our_index] = from[pytorch_index];
            }
}

static Tensor *append_tensor(TensorList *list, Tensor t) {
    list->tensors[list->count] = t;
    list->count++;
    return &list->tensors[list->count - 1];
}

// Appends a tensor of layer l. Its values are at `values` + offset; if `values` is NULL, they are
// not needed.
static Tensor *append_layer_tensor(TensorList *list, const char *prefix, const Layer *l,
                                   const char *what, real *values, size_t offset, size_t count) {
    Tensor *t = append_tensor(list, (Tensor){.count = count, .bytes = count * sizeof(real)});
    t->dtype = sizeof(real) == 4 ? "F32" : "F64";
    t->values = values ? values + offset : NULL;
    snprintf(t->name, sizeof t->name, "%s%s.%s", prefix, l->name, what);
    snprintf(t->shape, SHAPE_TEXT_SIZE, "%zu", count);
    return t;
}

// Sets the shape that the weight of a convolution or linear layer has in the file, and its filter.
static void describe_filters(const Net *net, const Layer *l, Tensor *t) {
    if (l->kind == LINEAR) {
        t->filter = net->layers[l->input].out; // the whole image
        snprintf(t->shape, SHAPE_TEXT_SIZE, "%zu,%zu", l->out.c, l->in.c);
    }
    if (l->kind == CONV2D) {
        t->filter = (Shape){l->kernel_size, l->kernel_size, l->in.c};
        snprintf(t->shape, SHAPE_TEXT_SIZE, "%zu,%zu,%zu,%zu", l->out.c, l->in.c, l->kernel_size,
                 l->kernel_size);
    }
}

// Appends the weights and biases of all layers, or the numbers that an optimizer keeps for them.
// The values are at `params`.
static void append_parameters(TensorList *list, const Net *net, const char *prefix, real *params) {
    for (const Layer *l = net->layers; l < net->layers + net->layer_count; l++) {
        if (l->weight_count) {
            Tensor *weight = append_layer_tensor(list, prefix, l, "weight", params,
                                                 l->weight_offset, l->weight_count);
            describe_filters(net, l, weight);
        }
        if (l->bias_count)
            append_layer_tensor(list, prefix, l, "bias", params, l->bias_offset, l->bias_count);
    }
}

// Appends BatchNorm's statistics. PyTorch counts the batches in each BatchNorm, while cnn has a
// single counter.
static void append_statistics(TensorList *list, Net *net) {
    for (size_t i = 0; i < net->layer_count; i++) {
        const Layer *l = &net->layers[i];
        if (l->kind != BATCHNORM2D)
            continue;
        real *stats = net->stats + net->row_plans[i].stats;
        append_layer_tensor(list, "", l, "running_mean", stats, RUNNING_MEAN * l->out.c, l->out.c);
        Tensor *variance = append_layer_tensor(list, "", l, "running_var", stats,
                                               RUNNING_VARIANCE * l->out.c, l->out.c);
        variance->not_negative = true;
        Tensor batches = {.dtype = "I64", .bytes = 8, .counter = &net->batches_tracked};
        snprintf(batches.name, sizeof batches.name, "%s.num_batches_tracked", l->name);
        append_tensor(list, batches);
    }
}

// Appends array i of an optimizer's state. If `values` is NULL, the file may contain the array, but
// its values are not needed.
static void append_state(TensorList *list, const Net *net, const Optimizer *o, size_t i,
                         real *values) {
    const size_t first = list->count;
    char prefix[64];
    snprintf(prefix, sizeof prefix, "optimizer.%s.", o->states[i]);
    append_parameters(list, net, prefix, values);
    for (size_t k = first; k < list->count; k++)
        list->tensors[k].not_negative = o->states_not_negative;
}

// Lists the tensors of the network, with room for the state of all optimizers. The caller frees the
// list.
static TensorList list_tensors(Net *net) {
    size_t per_row = 2 + 3; // parameters and statistics
    for (size_t i = 0; i < OPTIMIZERS; i++)
        per_row += 2 * optimizers[i].state_count; // for the weight and for the bias
    const size_t bytes = per_row * net->layer_count * sizeof(Tensor);
    TensorList list = {.tensors = must_alloc(bytes, "the list of tensors")};
    append_parameters(&list, net, "", net->params);
    append_statistics(&list, net);
    return list;
}

// Appends the arrays that an optimizer has with these settings, each of param_size numbers. The
// first one is at `state`.
static void append_optimizer(TensorList *list, const Net *net, const Optimizer *o, real *state) {
    for (size_t i = 0; i < count_states(o, net->settings); i++)
        append_state(list, net, o, i, state + i * net->param_size);
}

// Appends the state of every optimizer, without its values: a checkpoint that is read only for its
// weights may hold the state of any optimizer.
static void append_ignored_state(TensorList *list, const Net *net) {
    for (const Optimizer *o = optimizers; o < optimizers + LENGTH(optimizers); o++)
        for (size_t i = 0; i < o->state_count; i++)
            append_state(list, net, o, i, NULL);
}

// Compares tensors for qsort(). The order is the safetensors library's: the integers first, then by
// name.
static int compare_names(const void *a, const void *b) {
    const Tensor *x = a, *y = b;
    if (x->counter && !y->counter)
        return -1;
    if (y->counter && !x->counter)
        return 1;
    return strcmp(x->name, y->name);
}

// Compares tensors for qsort(), which sorts them by their offsets in the file.
static int compare_offsets(const void *a, const void *b) {
    const Tensor *x = a, *y = b;
    if (x->offset == y->offset)
        return 0;
    return x->offset < y->offset ? -1 : 1;
}

// Writes a tensor's entry in the header to `text`; returns its length.
static size_t tensor_entry(char text[ENTRY_SIZE], const Tensor *t) {
    static const char format[] =
        "\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}";
    return (size_t)snprintf(text, ENTRY_SIZE, format, t->name, t->dtype, t->shape, t->offset,
                            t->offset + t->bytes);
}

// Returns the header as JSON, which the caller frees. `metadata` has lines "key=value".
static char *make_header(const TensorList *list, const char *metadata) {
    char *header, entry[ENTRY_SIZE];
    size_t length;
    FILE *h = open_memstream(&header, &length);
    if (!h)
        die_no_memory(MAX_HEADER, "a header");
    const char *separator = "";
    fprintf(h, "{\"__metadata__\":{");
    const char *line = metadata;
    while (*line) {
        const size_t key_length = strcspn(line, "=");
        const char *value = line + key_length + 1;
        const size_t value_length = strcspn(value, "\n");
        fprintf(h, "%s\"%.*s\":\"%.*s\"", separator, (int)key_length, line, (int)value_length,
                value);
        separator = ",";
        line = value + value_length + 1;
    }
    fprintf(h, "}");
    for (size_t i = 0; i < list->count; i++) {
        tensor_entry(entry, &list->tensors[i]);
        fprintf(h, ",%s", entry);
    }
    fprintf(h, "}");
    return close_text(h, &header, MAX_HEADER, "a header");
}

// Returns the values of a tensor as the file has them. They are valid until the next call.
static const void *file_values(Net *net, const Tensor *t) {
    if (t->counter)
        return t->counter;
    net->device->copy(net->staging[0], t->values, t->bytes);
    if (!t->filter.h)
        return net->staging[0];
    reorder_weight(net->staging[1], net->staging[0], t->filter, t->count / shape_size(t->filter),
                   TO_FILE);
    return net->staging[1];
}

// Places the tensors one after the other in the file.
static void place_tensors(TensorList *list) {
    size_t end = 0;
    for (Tensor *t = list->tensors; t < list->tensors + list->count; t++)
        t->offset = reserve(&end, t->bytes);
}

// Returns the checksum of the metadata and of the tensors' values. Dies if a value is not finite.
static uint64_t checksum_of(Net *net, const TensorList *list, const char *metadata,
                            const char *path) {
    uint64_t checksum = hash_bytes(HASH_START, metadata, strlen(metadata));
    for (const Tensor *t = list->tensors; t < list->tensors + list->count; t++) {
        const void *values = file_values(net, t);
        if (t->values && !all_finite(values, t->count, FP32))
            die(1, "%s: not written, since %s is not finite; try a smaller --lr", path, t->name);
        checksum = hash_bytes(checksum, values, t->bytes);
    }
    return checksum;
}

// Writes to a file the network's tensors, the optimizer's state (unless `optimizer` is NULL) and
// the metadata, which consists of lines "key=value".
static void save_tensors(Net *net, const Optimizer *optimizer, real *state, const char *metadata,
                         const char *path) {
    AtomicFile f;
    char with_checksum[METADATA_SIZE + 64];
    TensorList list = list_tensors(net);
    if (optimizer)
        append_optimizer(&list, net, optimizer, state);
    qsort(list.tensors, list.count, sizeof *list.tensors, compare_names);
    place_tensors(&list);
    const uint64_t checksum = checksum_of(net, &list, metadata, path);
    snprintf(with_checksum, sizeof with_checksum, "%s" CHECKSUM_FORMAT, metadata,
             (unsigned long long)checksum);
    char *header = make_header(&list, with_checksum);
    atomic_open(&f, path);
    const uint64_t length = 8 * ceil_div(strlen(header), 8); // padded with blanks
    fwrite(&length, sizeof length, 1, f.stream);
    fprintf(f.stream, "%-*s", (int)length, header);
    for (size_t i = 0; i < list.count; i++)
        fwrite(file_values(net, &list.tensors[i]), 1, list.tensors[i].bytes, f.stream);
    atomic_commit(&f);
    free(header);
    free(list.tensors);
}

/* ---- Reading

   Nothing in the file is trusted. Each entry of the header must be exactly what cnn would write for
   one of the model's tensors at that offset. Each tensor of the model must occur once, in any
   order, and the values must fill the file. A header is refused unless it is formatted as the
   safetensors library does it. */

#define NOT_FOUND SIZE_MAX // the offset of a missing tensor, after all others

typedef struct TensorFile {
    const char *path;
    FILE *stream;
    char *header;                 // its text
    const char *entries;          // in `header`: the entries of the tensors, after the metadata
    size_t data_bytes;            // the size of all values
    size_t bytes_read;            // how many of data_bytes have been read
    uint64_t checksum;            // of the metadata and of the values read so far
    char metadata[METADATA_SIZE]; // lines "key=value"
} TensorFile;

static _Noreturn void die_header(const TensorFile *f, const char *at, const char *expected) {
    die(1,
        "%s: in its header: expected %s, found \"%.60s\"; was it saved with this --model "
        "and --dataset, and by the safetensors library?",
        f->path, expected, at);
}

// Appends "key=value" and a line break to the metadata for the text "key":"value" at `at`; returns
// where that text ends.
static const char *read_metadata_entry(TensorFile *f, const char *at) {
    static const char expected[] = "metadata as \"key\":\"value\", without backslashes";
    if (*at != '"')
        die_header(f, at, expected);
    const char *key = at + 1;
    const size_t key_length = strcspn(key, "\"\\\n=");
    if (key_length == 0 || strncmp(key + key_length, "\":\"", 3) != 0)
        die_header(f, at, expected);
    const char *value = key + key_length + 3;
    const size_t value_length = strcspn(value, "\"\\\n");
    if (value[value_length] != '"')
        die_header(f, at, expected);
    const size_t used = strlen(f->metadata);
    if (used + key_length + value_length + sizeof "=\n" > METADATA_SIZE)
        die(1,
            "%s: expected at most %d bytes of metadata, found more; save it again without metadata",
            f->path, METADATA_SIZE);
    snprintf(f->metadata + used, METADATA_SIZE - used, "%.*s=%.*s\n", (int)key_length, key,
             (int)value_length, value);
    return value + value_length + 1;
}

// Converts "__metadata__":{"key":"value",...} to lines, if the header begins with such metadata.
static void read_metadata(TensorFile *f) {
    static const char begin[] = "\"__metadata__\":{";
    if (strncmp(f->entries, begin, strlen(begin)) != 0)
        return;
    const char *at = f->entries + strlen(begin);
    if (*at != '}')
        at = read_metadata_entry(f, at);
    while (*at == ',')
        at = read_metadata_entry(f, at + 1);
    if (at[0] != '}' || (at[1] != ',' && at[1] != '}'))
        die_header(f, at, "the end of the metadata");
    f->entries = at + 1;
    if (*f->entries == ',')
        f->entries++;
}

// Reads the length of the header, the first 8 bytes of the file, and sets data_bytes.
static size_t read_header_length(TensorFile *f) {
    struct stat info;
    uint64_t length; // little-endian, as on the processors that cnn runs on
    if (fstat(fileno(f->stream), &info) != 0)
        die_file("cannot read", f->path);
    const size_t items = fread(&length, sizeof length, 1, f->stream);
    if (ferror(f->stream))
        die_file("cannot read", f->path);
    if (items != 1)
        die(1, "%s: expected a safetensors file, found fewer than 8 bytes", f->path);
    if (memcmp(&length, "PK\3\4", 4) == 0 || memcmp(&length, "\x80\2\x8a\n", 4) == 0)
        die(1,
            "%s: expected a safetensors file, found one of torch.save(); in Python: from "
            "safetensors.torch import save_file; save_file(torch.load(\"%s\"), "
            "\"model.safetensors\")",
            f->path, f->path);
    if (length > MAX_HEADER)
        die(1, "%s: expected a header of at most %d bytes, found a length of %llu", f->path,
            MAX_HEADER, (unsigned long long)length);
    if (length + 8 > (uint64_t)info.st_size)
        die(1, "%s: truncated: expected %llu bytes for the header alone, found %lld in the file",
            f->path, (unsigned long long)length + 8, (long long)info.st_size);
    f->data_bytes = (size_t)info.st_size - 8 - length;
    return length;
}

// Reads the text of the header, without the blanks that pad it.
static void read_header(TensorFile *f, size_t length) {
    f->header = must_alloc(length + 1, "the header");
    const size_t got = fread(f->header, 1, length, f->stream);
    if (got != length || *f->header != '{')
        die(1, "%s: expected a header that starts with {, found 0x%02x", f->path,
            (unsigned char)*f->header);
    while (f->header[length - 1] == ' ') {
        length--;
        f->header[length] = 0;
    }
    if (strlen(f->header) != length)
        die_header(f, f->header + strlen(f->header), "no zero byte");
}

// Opens the file and reads its header. Returns false if there is no such file.
static bool open_tensors(TensorFile *f, const char *path) {
    *f = (TensorFile){.path = path, .stream = open_existing(path)};
    if (!f->stream)
        return false;
    const size_t length = read_header_length(f);
    read_header(f, length);
    f->entries = f->header + 1;
    read_metadata(f);
    return true;
}

// The wrappers of PyTorch networks, and the prefix that each gives to the names of the network's
// tensors
static const struct {
    const char *prefix, *by;
} wrappers[] = {{"module.", "DataParallel"}, {"_orig_mod.", "torch.compile"}};

// Returns the tensor of the list whose name, in quotation marks, is at `at`; dies if there is none.
static Tensor *tensor_named(const TensorFile *f, Tensor *list, size_t count, const char *at) {
    if (*at != '"')
        die_header(f, at, "a tensor of this model");
    const char *name = at + 1;
    for (Tensor *t = list; t < list + count; t++) {
        const size_t length = strlen(t->name);
        if (strncmp(name, t->name, length) == 0 && name[length] == '"')
            return t;
    }
    for (size_t i = 0; i < LENGTH(wrappers); i++)
        if (strncmp(name, wrappers[i].prefix, strlen(wrappers[i].prefix)) == 0)
            die(1, "%s: its names begin with \"%s\", from %s; save net.%sstate_dict() instead",
                f->path, wrappers[i].prefix, wrappers[i].by, wrappers[i].prefix);
    die_header(f, at, "a tensor of this model");
}

// Reads the entry at `at` and sets the offset of its tensor; returns where the entry ends.
static const char *read_entry(const TensorFile *f, Tensor *list, size_t count, const char *at) {
    static const char key[] = "\"data_offsets\":[";
    char entry[ENTRY_SIZE];
    Tensor *t = tensor_named(f, list, count, at);
    const char *offsets = strstr(at, key);
    if (t->offset != NOT_FOUND)
        die_header(f, at, "each tensor once");
    if (!offsets)
        die_header(f, at, key);
    const int numbers = sscanf(offsets + strlen(key), "%18zu", &t->offset);
    if (numbers != 1)
        die_header(f, at, key);
    const size_t length = tensor_entry(entry, t);
    if (strncmp(at, entry, length) != 0)
        die_header(f, at, entry);
    return at + length;
}

// Finds the tensors of the list in the file and sorts them by their offsets, missing ones last.
static void locate_tensors(const TensorFile *f, Tensor *list, size_t count) {
    const char *at = f->entries;
    for (Tensor *t = list; t < list + count; t++)
        t->offset = NOT_FOUND;
    if (*at != '}')
        at = read_entry(f, list, count, at);
    while (*at == ',')
        at = read_entry(f, list, count, at + 1);
    if (strcmp(at, "}") != 0)
        die_header(f, at, "a comma and a tensor, or the end");
    qsort(list, count, sizeof *list, compare_offsets);
}

// Copies the values of a tensor, which are in staging[0], to the device. Dies unless they are
// finite and, if they are means of squares, not negative.
static void store_values(const TensorFile *f, const Tensor *t, Net *net) {
    const real *values = net->staging[0];
    const char *range = t->not_negative ? ", non-negative" : "";
    for (size_t i = 0; i < t->count; i++)
        if (!isfinite(values[i]) || (t->not_negative && values[i] < 0))
            die(1, "%s: %s: expected finite%s numbers, found %g", f->path, t->name, range,
                (double)values[i]);
    if (t->filter.h) {
        reorder_weight(net->staging[1], values, t->filter, t->count / shape_size(t->filter),
                       FROM_FILE);
        values = net->staging[1];
    }
    net->device->copy(t->values, values, t->bytes);
}

// Reads a tensor's values, which must begin where the previous ones end.
static void read_values(TensorFile *f, const Tensor *t, Net *net) {
    if (t->offset != f->bytes_read)
        die(1, "%s: %s: expected its values at byte %zu, where the preceding values end, found %zu",
            f->path, t->name, f->bytes_read, t->offset);
    f->bytes_read += t->bytes;
    const size_t got = fread(net->staging[0], 1, t->bytes, f->stream);
    if (ferror(f->stream))
        die_file("cannot read", f->path);
    if (got != t->bytes)
        die(1, "%s: the file ends within the values of %s", f->path, t->name);
    f->checksum = hash_bytes(f->checksum, net->staging[0], t->bytes);
    if (t->counter)
        memcpy(t->counter, net->staging[0], t->bytes);
    if (t->values)
        store_values(f, t, net);
}

// Returns how many bytes of the metadata the checksum covers: all those before the two lines of
// CHECKSUM_FORMAT.
static size_t covered_metadata(const TensorFile *f) {
    const size_t size = strlen(f->metadata);
    const size_t last_lines = (size_t)snprintf(NULL, 0, CHECKSUM_FORMAT, 0ull);
    return size > last_lines ? size - last_lines : 0;
}

// Dies if cnn wrote the file and its checksum does not match what was read.
static void check_checksum(const TensorFile *f) {
    const bool ours = strncmp(f->metadata, "cnn.", 4) == 0 || strstr(f->metadata, "\ncnn.");
    char expected[64];
    snprintf(expected, sizeof expected, CHECKSUM_FORMAT, (unsigned long long)f->checksum);
    if (ours && strcmp(f->metadata + covered_metadata(f), expected) != 0)
        die(1,
            "%s: damaged, or written by another version of cnn: its checksum does not match; "
            "use an older copy",
            f->path);
}

/* Reads the network's tensors and, unless optimizer is NULL, the optimizer's state; closes the
   file. If optimizer is NULL, an optimizer's tensors in the file are ignored. BatchNorm's counters
   may be missing, since older versions of PyTorch had none. */
static void read_tensors(TensorFile *f, Net *net, const Optimizer *optimizer, real *state) {
    TensorList list = list_tensors(net);
    if (optimizer)
        append_optimizer(&list, net, optimizer, state);
    else
        append_ignored_state(&list, net);
    f->checksum = hash_bytes(HASH_START, f->metadata, covered_metadata(f));
    net->batches_tracked = 0;
    locate_tensors(f, list.tensors, list.count);
    for (const Tensor *t = list.tensors; t < list.tensors + list.count; t++) {
        if (t->offset != NOT_FOUND)
            read_values(f, t, net);
        else if (t->values)
            die(1, "%s: expected a tensor %s, found none; was it saved with this --model?", f->path,
                t->name);
    }
    if (f->bytes_read != f->data_bytes)
        die(1, "%s: expected %zu bytes of values, found %zu", f->path, f->bytes_read,
            f->data_bytes);
    check_checksum(f);
    refresh_params16(net);
    fclose(f->stream);
    free(f->header);
    free(list.tensors);
}

// Returns hash_bytes() of numbers in the device's memory.
static uint64_t hash_numbers(Net *net, uint64_t hash, const real *numbers, size_t count) {
    net->device->copy(net->staging[0], numbers, count * sizeof(real));
    return hash_bytes(hash, net->staging[0], count * sizeof(real));
}

// Returns one hash of all parameters and running statistics, layer by layer.
static uint64_t hash_weights(Net *net) {
    uint64_t hash = HASH_START;
    for (size_t i = 0; i < net->layer_count; i++) {
        const Layer *l = &net->layers[i];
        hash = hash_numbers(net, hash, net->params + l->weight_offset, l->weight_count);
        hash = hash_numbers(net, hash, net->params + l->bias_offset, l->bias_count);
        if (l->kind == BATCHNORM2D) // the running means and variances
            hash = hash_numbers(net, hash, net->stats + net->row_plans[i].stats, 2 * l->out.c);
    }
    return hash;
}

/* ==== 12. Options and the run ====================================================================

   One table of options, which the parser, --help and the settings in run.json use; then the state
   of a run. */

// A NAME and a CHOICE each take one of several words. A NAME is kept as text, a CHOICE as the
// number of its word.
typedef enum { SWITCH, COUNT, NUMBER, CHOICE, NAME, TEXT } OptionKind;

// Whether a resumed run may have a different value for an option. A value that changes the result
// must match: checkpoints hold it, and --resume compares it. (--batch-size, --gpus and --replicas
// may change, since --global-batch and the number of ranks, devices=N, are compared.)
typedef enum { MAY_CHANGE, MUST_MATCH } ResumeRule;

typedef struct Option {
    const char *name;
    OptionKind kind;
    size_t offset;             // where the field is in Settings
    const char *const *values; // the words, or what --help shows for the value; NULL ends them
    double min, max;           // the limits of a COUNT or a NUMBER
    const char *default_value; // the default, or NULL
    ResumeRule on_resume;
    const char *help;
} Option;

static const char *model_names[LENGTH(models) + 1]; // the names in models[], then NULL

// clang-format off
#define WORDS(...) (const char *const[]){__VA_ARGS__, NULL}
// Each stands for five fields of Option: its kind, the offset in Settings, the values, min and max.
#define AS_SWITCH(field) SWITCH, offsetof(Settings, field), WORDS("on", "off"), 0, 0
#define AS_COUNT(field, value, min, max) COUNT, offsetof(Settings, field), WORDS(value), min, max
#define AS_NUMBER(field, value, min, max) NUMBER, offsetof(Settings, field), WORDS(value), min, max
#define AS_CHOICE(field, ...) CHOICE, offsetof(Settings, field), WORDS(__VA_ARGS__), 0, 0
#define AS_NAME(field, values) NAME, offsetof(Settings, field), values, 0, 0
#define AS_TEXT(field, value) TEXT, offsetof(Settings, field), WORDS(value), 0, 0

// An option without a default stays 0, or NOT_CHOSEN, unless the user or the model gives a value
// (the limits exclude 0). Section 14 then sets it as the help text says.
static const Option options[] = {
    {"--model", AS_NAME(model, model_names), "mnist", MUST_MATCH,
     "the network; each has its own defaults, listed below"},
    {"--width", AS_COUNT(width, "N", 1, 1024), "6", MUST_MATCH,
     "cifar: channels of conv1; 64 makes the wide variant"},
    {"--stem", AS_CHOICE(stem, "3", "7", "imagenet"), "3", MUST_MATCH,
     "ResNets: first convolution 3x3, 7x7, or 7x7 stride 2 and max-pool"},
    {"--dataset",
     AS_NAME(dataset, WORDS("auto", "mnist", "fashion-mnist", "cifar10", "cifar100", "synthetic")),
     "auto", MUST_MATCH,
     "the images; auto: the first data set that is found, else synthetic images"},
    {"--data", AS_TEXT(data, "DIR"), "", MAY_CHANGE,
     "look for the data files in DIR/DATASET only and, if --dataset names the set, in DIR"},
    {"--limit-train", AS_COUNT(limit_train, "N", 1, UINT32_MAX), NULL, MUST_MATCH,
     "train on the first N images only (default: all)"},
    {"--limit-test", AS_COUNT(limit_test, "N", 1, UINT32_MAX), NULL, MAY_CHANGE,
     "test on the first N images only (default: all)"},
    {"--augment", AS_CHOICE(augment, "none", "crop-flip", "elastic"), "none", MUST_MATCH,
     "how the training images vary from epoch to epoch"},
    {"--resize", AS_COUNT(resize, "N", 0, 1024), "0", MUST_MATCH,
     "enlarge images to N x N pixels, a multiple of their size; 0: leave them as they are"},
    {"--batch-size", AS_COUNT(batch_size, "N", 1, 65536), "64", MAY_CHANGE,
     "images per training step and device; with dp, of all devices"},
    {"--test-batch-size", AS_COUNT(test_batch_size, "N", 1, 65536), NULL, MAY_CHANGE,
     "images tested at a time (default: 1000 for mnist and lenet, else the training batch)"},
    {"--epochs", AS_COUNT(epochs, "N", 1, 100000), "14", MAY_CHANGE,
     "passes over the training set"},
    {"--max-steps", AS_COUNT(max_steps, "N", 0, UINT32_MAX), "0", MAY_CHANGE,
     "end training after N steps in total; 0: after --epochs"},
    {"--optimizer", AS_CHOICE(optimizer, "adadelta", "sgd"), "adadelta", MUST_MATCH,
     "how the weights are updated"},
    {"--lr", AS_NUMBER(lr, "LR", 1e-12, 1e6), NULL, MUST_MATCH,
     "learning rate (default: adadelta 1; sgd .01)"},
    {"--momentum", AS_NUMBER(momentum, "M", 0, 0.999999), "0", MUST_MATCH, "sgd: momentum"},
    {"--nesterov", AS_SWITCH(nesterov), "off", MUST_MATCH, "sgd: Nesterov's momentum"},
    {"--weight-decay", AS_NUMBER(weight_decay, "W", 0, 1e3), "0", MUST_MATCH,
     "add W * weight to each gradient"},
    {"--label-smoothing", AS_NUMBER(label_smoothing, "E", 0, 0.999999), "0", MUST_MATCH,
     "fraction of the target probability that is spread evenly over all classes"},
    {"--schedule", AS_CHOICE(schedule, "step", "cosine"), "step", MUST_MATCH,
     "how the learning rate changes from epoch to epoch"},
    {"--gamma", AS_NUMBER(gamma, "M", 0, 1e6), "0.7", MUST_MATCH,
     "step: the factor by which the rate is multiplied every --step-size epochs"},
    {"--step-size", AS_COUNT(step_size, "N", 1, 100000), "1", MUST_MATCH,
     "step: the number of epochs between multiplications by --gamma"},
    {"--warmup-epochs", AS_COUNT(warmup_epochs, "N", 0, 100000), "0", MUST_MATCH,
     "the number of epochs at the start during which the rate grows linearly to --lr"},
    {"--lr-scaling", AS_CHOICE(lr_scaling, "none", "linear", "sqrt"), "none", MUST_MATCH,
     "multiply --lr by batch size / the model's default batch size, or by the square root of that"},
    {"--seed", AS_COUNT(seed, "S", 0, 9007199254740991.), "1", MUST_MATCH,
     "determines weights, order, augmentation and dropout; the same seed gives the same run"},
    {"--log-interval", AS_COUNT(log_interval, "N", 1, UINT32_MAX), "10", MAY_CHANGE,
     "steps between log lines"},
    {"--workers", AS_COUNT(workers, "N", 1, MAX_WORKERS), NULL, MAY_CHANGE,
     "loader threads of each device (default: SLURM_CPUS_PER_TASK divided among them, else 1)"},
    {"--threads", AS_COUNT(threads, "N", 1, MAX_THREADS), NULL, MAY_CHANGE,
     "threads that compute (default: OMP_NUM_THREADS, else the usable cores)"},
    {"--kernels", AS_CHOICE(kernels, "naive", "fast", "tiled", "tensor"), NULL, MUST_MATCH,
     "naive: the definitions; fast: CPU; tiled, tensor: GPU (default: the best here)"},
    {"--precision", AS_CHOICE(precision, "fp32", "tf32", "bf16", "fp16"), NULL, MUST_MATCH,
     "GPU: all but fp32 use tensor cores (default: fp32; with --kernels tensor: tf32)"},
    {"--layout", AS_CHOICE(layout, "nhwc", "nchw"), "nhwc", MUST_MATCH,
     "GPU: nchw transposes around each convolution, to see what it costs"},
    {"--optimizer-launch", AS_CHOICE(optimizer_launch, "fused", "per-tensor"), "fused", MAY_CHANGE,
     "fused: one update of all parameters; per-tensor: one for each tensor, for comparison"},
    {"--zero-grad", AS_CHOICE(zero_grad, "none", "memset"), "none", MAY_CHANGE,
     "memset: clear the gradients before backward, as frameworks once did, for comparison"},
    {"--graph", AS_SWITCH(graph), "off", MAY_CHANGE, "GPU: launch each step as one CUDA graph"},
    {"--autotune", AS_SWITCH(autotune), "off", MAY_CHANGE,
     "GPU: time tile sizes in the first step and keep the fastest; the results are the same"},
    {"--resident", AS_SWITCH(resident), "on", MAY_CHANGE,
     "GPU: keep the data set in its memory, if it fits"},
    {"--pin-memory", AS_SWITCH(pin_memory), "on", MAY_CHANGE,
     "GPU, --resident off: copy from pinned memory"},
    {"--gpus", AS_COUNT(gpus, "N", 1, MAX_REPLICAS), NULL, MAY_CHANGE,
     "train on N GPUs of this machine (default: 1 if there is one, else the CPU)"},
    {"--replicas", AS_COUNT(replicas, "N", 1, MAX_REPLICAS), "1", MAY_CHANGE,
     "train N copies of the network on the CPU, which share the --threads"},
    {"--oversubscribe", AS_SWITCH(oversubscribe), "off", MAY_CHANGE,
     "allow several ranks on one GPU or core, for experiments"},
    {"--parallel", AS_CHOICE(parallel, "ddp", "dp"), "ddp", MUST_MATCH,
     "ddp: each device loads a batch of its own, gradients are all-reduced; dp: one loads for all"},
    {"--global-batch", AS_COUNT(global_batch, "B", 1, 65536), NULL, MUST_MATCH,
     "images of a step on all devices together, instead of --batch-size"},
    {"--bucket-mb", AS_NUMBER(bucket_mb, "MB", 0.001, 10000), "25", MUST_MATCH,
     "ddp: size of the pieces in which gradients are all-reduced"},
    {"--overlap", AS_SWITCH(overlap), "on", MAY_CHANGE,
     "ddp: all-reduce during backward; off: after it"},
    {"--timeout", AS_NUMBER(timeout, "S", 1, 1e6), "300", MAY_CHANGE,
     "seconds to wait for another device"},
    {"--out", AS_TEXT(out, "DIR"), "", MAY_CHANGE,
     "write run.json and tables of steps, epochs and images to DIR"},
    {"--quiet", AS_SWITCH(quiet), "off", MAY_CHANGE,
     "print only one line per epoch and what other options ask for"},
    {"--per-class", AS_SWITCH(per_class), "off", MAY_CHANGE,
     "print the accuracy of each class at the end"},
    {"--profile", AS_SWITCH(profile), "off", MAY_CHANGE,
     "print the time that each line of train() took"},
    {"--layers", AS_SWITCH(layers), "off", MAY_CHANGE,
     "measure each layer and compare it with this machine's limits"},
    {"--trace", AS_TEXT(trace, "FILE"), "", MAY_CHANGE,
     "write a timeline for chrome://tracing and Perfetto"},
    {"--trace-steps", AS_TEXT(trace_steps, "A:B"), "0:50", MAY_CHANGE,
     "which steps --trace and Nsight record: A to B - 1, counted from 0"},
    {"--save-model", AS_SWITCH(save_model), "off", MAY_CHANGE,
     "write the weights as MODEL_cnn.safetensors, or model.safetensors in --out"},
    {"--checkpoint", AS_TEXT(checkpoint, "FILE"), "", MAY_CHANGE,
     "write weights, optimizer and position to FILE"},
    {"--save-every", AS_TEXT(save_every, "N|Nsteps"), "1", MAY_CHANGE,
     "how often --checkpoint is written: every N epochs or steps"},
    {"--resume", AS_SWITCH(resume), "off", MAY_CHANGE, "continue from --checkpoint, if it exists"},
    {"--load", AS_TEXT(load, "FILE"), "", MAY_CHANGE,
     "start from the weights in a safetensors file"},
    {"--eval", AS_SWITCH(eval), "off", MAY_CHANGE, "test only"},
    {"--dry-run", AS_SWITCH(dry_run), "off", MAY_CHANGE,
     "one epoch of one training batch, then the test"},
    {"--no-cuda", AS_SWITCH(no_cuda), "off", MAY_CHANGE,
     "use the CPU even if there is a GPU; also called --no-accel"},
};
// clang-format on
enum { OPTIONS = LENGTH(options) };

// text = "a|b|c"
static const char *join_words(char text[PATH_SIZE], const char *const *words) {
    size_t length = (size_t)snprintf(text, PATH_SIZE, "%s", words[0]);
    for (size_t i = 1; words[i]; i++)
        length += (size_t)snprintf(text + length, PATH_SIZE - length, "|%s", words[i]);
    return text;
}

// Returns the index of `text` among the words, or NOT_CHOSEN.
static int find_word(const char *const *words, const char *text) {
    for (int i = 0; words[i]; i++)
        if (strcmp(words[i], text) == 0)
            return i;
    return NOT_CHOSEN;
}

static void set_word(void *field, const Option *o, const char *text) {
    const int number = find_word(o->values, text);
    char words[PATH_SIZE];
    if (number == NOT_CHOSEN)
        die(EXIT_USAGE, "%s: expected one of %s, found \"%s\"; see ./cnn --help", o->name,
            join_words(words, o->values), text);
    if (o->kind == SWITCH)
        *(bool *)field = strcmp(text, "on") == 0;
    else if (o->kind == CHOICE)
        *(int *)field = number; // gcc and clang store it as (unsigned) int
    else
        *(const char **)field = text;
}

static void set_number(void *field, const Option *o, const char *text) {
    char *end;
    const double number = strtod(text, &end);
    const bool is_number = end > text && !*end;
    const bool is_whole = strspn(text, "0123456789") == strlen(text);
    const bool in_range = number >= o->min && number <= o->max;
    const char *expected = o->kind == NUMBER ? "number" : "whole number";
    if (!is_number || !in_range || (o->kind == COUNT && !is_whole))
        die(EXIT_USAGE, "%s: expected a %s from %.16g to %.16g, found \"%s\"; see ./cnn --help",
            o->name, expected, o->min, o->max, text);
    if (o->kind == COUNT)
        *(size_t *)field = (size_t)number;
    else
        *(double *)field = number;
}

static void set_option(Settings *s, const Option *o, const char *text) {
    void *field = (char *)s + o->offset;
    if (o->kind == COUNT || o->kind == NUMBER)
        set_number(field, o, text);
    else if (o->kind == TEXT)
        *(const char **)field = text;
    else
        set_word(field, o, text);
}

static void print_help(void) {
    printf("usage: ./cnn [options]\n\nTrains and tests a convolutional network.\n\noptions:\n");
    for (const Option *o = options; o < options + OPTIONS; o++) {
        char words[PATH_SIZE], usage[2 * PATH_SIZE];
        snprintf(usage, sizeof usage, "%s %s", o->name, join_words(words, o->values));
        if (strlen(usage) <= 26)
            printf("  %-28s%s", usage, o->help);
        else
            printf("  %s\n%30s%s", usage, "", o->help);
        if (o->default_value && *o->default_value)
            printf(" (default: %s)", o->default_value);
        printf("\n");
    }
    printf("  %-28soptions from a file, where # begins a comment\n", "@FILE");
    printf("  %-28sthis text\n\ndefaults of the models:\n", "--help");
    for (size_t i = 0; i < LENGTH(models); i++)
        if (models[i].defaults)
            printf("  --model %-9s %s\n", models[i].name, models[i].defaults);
}

// Returns whether `word`, without the = and what follows, equals `name`.
static bool is_option(const char *word, const char *name) {
    const size_t length = strcspn(word, "=");
    return strlen(name) == length && strncmp(word, name, length) == 0;
}

// Returns the option that a word names.
static const Option *find_option(const char *word) {
    if (is_option(word, "--no-accel"))
        return find_option("--no-cuda"); // both are names in PyTorch's MNIST example
    for (const Option *o = options; o < options + OPTIONS; o++)
        if (is_option(word, o->name))
            return o;
    die(EXIT_USAGE, "unknown option %s; ./cnn --help lists all options", word);
}

// Parses an option and its value, "--name=value" or "--name value", where the value is the next
// word (NULL after the last word). Returns how many words it used. A switch may omit its value; any
// other option without one, with an empty one, or followed by the next option is an error.
static size_t parse_option(Settings *s, const char *word, const char *next) {
    const Option *o = find_option(word);
    const char *equals = strchr(word, '=');
    const char *value = equals ? equals + 1 : next;
    const bool is_choice = value && find_word(o->values, value) != NOT_CHOSEN;
    char words[PATH_SIZE];
    if (o->kind == SWITCH && !equals && !is_choice) {
        set_option(s, o, "on");
        return 1;
    }
    const bool is_empty = !value || !*value;
    const bool is_next_option = !equals && next && strncmp(next, "--", 2) == 0;
    if (is_empty || is_next_option)
        die(EXIT_USAGE, "%s: expected a value (%s) after it, found %s; see ./cnn --help", o->name,
            join_words(words, o->values), is_empty ? "nothing" : value);
    set_option(s, o, value);
    return equals ? 1 : 2;
}

enum { TEXT_SIZE = 65536 };
static char argument_text[TEXT_SIZE]; // the model's defaults, then the text of argument files
static size_t argument_text_used;
static const char white_space[] = " \t\r\n";

// Blanks comments, from a # that begins a word to the end of the line.
static void remove_comments(char *text) {
    char *mark = strchr(text, '#');
    while (mark) {
        const bool begins_word = mark == text || strchr(white_space, mark[-1]);
        if (begins_word)
            memset(mark, ' ', strcspn(mark, "\n"));
        mark = strchr(mark + 1, '#');
    }
}

// Parses options that are separated by white space. Settings point to the words, which therefore
// stay in argument_text[].
static void parse_text(Settings *s, char *text) {
    char *rest;
    remove_comments(text);
    char *word = strtok_r(text, white_space, &rest);
    while (word) {
        char *next = strtok_r(NULL, white_space, &rest);
        const size_t words_used = parse_option(s, word, next);
        word = next;
        if (words_used == 2)
            word = strtok_r(NULL, white_space, &rest);
    }
}

// Parses the options in a file, which take the place of the argument @FILE.
static void parse_file(Settings *s, const char *path) {
    const size_t space = TEXT_SIZE - argument_text_used;
    struct stat info;
    FILE *f = fopen(path, "r");
    if (!f || fstat(fileno(f), &info) != 0)
        die(EXIT_USAGE, "@%s: cannot read it: %s", path, strerror(errno));
    if (!S_ISREG(info.st_mode)) // a pipe would be empty when the command line is parsed again
        die(EXIT_USAGE,
            "@%s: expected a regular file, found a pipe, device or folder; write the options to a "
            "file",
            path);
    char *text = argument_text + argument_text_used;
    const size_t length = fread(text, 1, space, f);
    const bool readable = !ferror(f);
    const bool too_long = length == space; // its terminating zero would not fit
    const bool has_zero_byte = memchr(text, 0, length) != NULL;
    fclose(f);
    if (!readable || too_long || has_zero_byte)
        die(EXIT_USAGE,
            "@%s: expected a text file of options; all such files may have at most %d bytes", path,
            TEXT_SIZE);
    text[length] = 0;
    argument_text_used += length + 1;
    parse_text(s, text);
}

// Sets the table's defaults, then the model's, unless model_defaults is NULL.
static void parse_defaults(Settings *s, const char *model_defaults) {
    *s = (Settings){.kernels = KERNELS_BEST, .precision = PRECISION_BEST};
    for (const Option *o = options; o < options + OPTIONS; o++)
        if (o->default_value)
            set_option(s, o, o->default_value);
    snprintf(argument_text, sizeof argument_text, "%s", model_defaults ? model_defaults : "");
    argument_text_used = strlen(argument_text) + 1;
    parse_text(s, argument_text);
}

static void parse_command_line(Settings *s, int argc, char **argv) {
    const size_t count = (size_t)argc;
    size_t used = 1; // argv[0] is the program
    while (used < count) {
        const char *next = used + 1 < count ? argv[used + 1] : NULL;
        if (argv[used][0] == '@') {
            parse_file(s, argv[used] + 1);
            used++;
        } else {
            used += parse_option(s, argv[used], next);
        }
    }
}

// Parses the command line twice: first to find the model, then again on top of its defaults. With
// --help, prints the help and exits. Returns the model's default batch size.
static size_t parse_options(Settings *s, int argc, char **argv) {
    for (size_t i = 0; i < LENGTH(models); i++)
        model_names[i] = models[i].name;
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            print_help();
            flush(stdout, "standard output");
            exit(0);
        }
    parse_defaults(s, NULL);
    parse_command_line(s, argc, argv); // finds the model
    parse_defaults(s, find_model(s->model)->defaults);
    const size_t default_batch_size = s->batch_size;
    parse_command_line(s, argc, argv);
    return default_batch_size;
}

// text = the number, with the fewest significant digits, from 6 to 17, from which strtod() gets
// exactly the same number
static void format_number(char *text, size_t size, double number) {
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(text, size, "%.*g", digits, number);
        if (strtod(text, NULL) == number)
            return;
    }
}

// Returns the word of an option that has this number, which must not be NOT_CHOSEN.
static const char *choice_word(const char *option, int number) {
    return find_option(option)->values[number];
}

enum { OPTION_TEXT_SIZE = 64 };

// Returns the value of an option as text. A number is written to `text`; any other value is a
// constant or a string of the settings.
static const char *option_text(char text[OPTION_TEXT_SIZE], const Settings *s, const Option *o) {
    const void *field = (const char *)s + o->offset;
    if (o->kind == NAME || o->kind == TEXT)
        return *(const char *const *)field;
    if (o->kind == SWITCH)
        return *(const bool *)field ? "on" : "off";
    if (o->kind == CHOICE) {
        const int number = *(const int *)field;
        return number == NOT_CHOSEN ? "" : o->values[number];
    }
    if (o->kind == COUNT)
        snprintf(text, OPTION_TEXT_SIZE, "%zu", *(const size_t *)field);
    else
        format_number(text, OPTION_TEXT_SIZE, *(const double *)field);
    return text;
}

static const char *option_text_by_name(char text[OPTION_TEXT_SIZE], const Settings *s,
                                       const char *name) {
    return option_text(text, s, find_option(name));
}

static void print_settings(const Settings *s) {
    char text[OPTION_TEXT_SIZE];
    printf("Settings:");
    for (const Option *o = options; o < options + OPTIONS; o++) {
        const char *value = option_text(text, s, o);
        if (*value)
            printf(" %s %s", o->name, value);
    }
    printf("\n");
}

/* ---- Signals

   SIGUSR1 asks for a checkpoint. SIGINT, SIGTERM and SIGHUP ask for a checkpoint and for the end of
   the run, with exit status 128 + the signal's number; the same signal again ends the program at
   once. Each process stores the request in the StepResult of the current step. Several ranks
   exchange these results at the log interval, so all of them learn of the request after the same
   step. A single rank acts on it after the current step. A request that arrives during a test waits
   for the next step; after the last step there is nothing left to stop. */
enum { SAVE_REQUEST = 1, END_REQUEST = 128 };
static volatile sig_atomic_t requested; // SAVE_REQUEST, END_REQUEST + the signal's number, or 0

static void on_signal(int number) {
    int none = 0;
    if (number == SIGUSR1) {
        // Keeps a request to end, even if another thread is storing it at this moment: that request
        // includes a checkpoint.
        __atomic_compare_exchange_n(&requested, &none, SAVE_REQUEST, false, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED);
        return;
    }
    signal(number, SIG_DFL); // the same signal again ends the program
    requested = END_REQUEST + number;
}

static void catch_signals(void) {
    static const int numbers[] = {SIGUSR1, SIGINT, SIGTERM, SIGHUP};
    for (size_t i = 0; i < LENGTH(numbers); i++) {
        void (*previous)(int) = signal(numbers[i], on_signal);
        if (previous == SIG_IGN) // a signal that nohup ignores stays ignored
            signal(numbers[i], SIG_IGN);
    }
}

// Returns the request that has arrived since the last call, or 0 if there is none.
static int take_request(void) {
    return __atomic_exchange_n(&requested, 0, __ATOMIC_RELAXED);
}

// ---- The state of a run

// The phases of a step, in the order of steps.csv. PHASE_COMM is all communication, most of which
// overlaps the backward pass. PHASE_EXPOSED_COMM is the part that does not overlap, during which
// the rank waits. So the time of a step is the sum of all phases except PHASE_COMM.
enum {
    PHASE_LOAD,
    PHASE_COPY,
    PHASE_FORWARD,
    PHASE_BACKWARD,
    PHASE_OPTIMIZER,
    PHASE_COMM,
    PHASE_EXPOSED_COMM,
    PHASE_OTHER,
    PHASES
};

typedef struct StepResult {
    size_t epoch, step, images;
    int request; // of a signal that came before the end of this step, or 0; see Signals
    bool warmup; // one of the first steps of this process, which load code and fill caches
    double loss, lr;
    double phases[PHASES]; // in seconds
    double correct;        // how many of the images were classified correctly
    double bytes_sent;     // what this rank has sent; under dp, what it has copied
} StepResult;

// The results of an epoch. Times are in seconds; the accuracy of the test is in percent.
typedef struct EpochResult {
    size_t epoch, images;
    size_t images_resumed; // how many of them an earlier run has trained on
    size_t images_logged;  // how many there were at the last log line
    size_t step_images;    // how many images the last step had, on all ranks
    double step_loss;      // the mean loss of the last step, over all ranks
    double seconds, loader_wait_s, test_seconds, test_loss, accuracy, lr;
    double train_loss_sum; // the sum of the losses of all images
    double train_correct;  // how many images were classified correctly
    double phases[PHASES]; // in seconds: sums over all steps and ranks
    double bytes_sent;     // the sum over all steps and ranks
    uint64_t weight_hash;
} EpochResult;

// The clock of train(); see section 13, and AT() in section 15
enum { PROFILED_LINES = 128 };

typedef struct LineTime {
    size_t hits;
    double seconds;
} LineTime;

typedef struct LineClock {
    bool synchronize; // --profile: wait for the device after each line
    const Device *device;
    size_t rank;           // for --trace
    const char *line_text; // the text of the running line, for --trace; NULL if none runs
    double line_start;     // when the running line began
    size_t marks_set;      // how many marks were set
    size_t times_read;     // how many lines' times have been read
    struct {
        int line;      // the line that begins at this mark, counted from the head of train(), or 0
        double *phase; // the phase of a step to which the line's time is added, or NULL
    } at_mark[CLOCK_MARKS];
    LineTime lines[PROFILED_LINES]; // indexed by at_mark[].line
} LineClock;

// When checkpoints are saved, and what a signal has asked for; see Signals above
typedef struct Checkpointing {
    size_t every; // epochs or, with by_steps, steps
    bool by_steps;
    bool saved;  // whether the last step saved a checkpoint
    int request; // the largest request of all ranks that is not yet handled, or 0
} Checkpointing;

// --graph: the last step of an epoch may be a SHORT_STEP, which has fewer images and needs a graph
// of its own. The first step of each kind runs without a graph, since it loads kernels.
enum { FULL_STEP, SHORT_STEP, STEP_KINDS };

typedef struct StepGraphs {
    bool kernels_loaded[STEP_KINDS];
    void *graph[STEP_KINDS];
} StepGraphs;

// --trace and Nsight: the steps [first, end)
typedef struct Tracer {
    size_t first, end;
    bool traced;       // --trace records this step
    bool recording;    // Nsight records this step
    double start;      // when START_MARK was set
    double step_start; // when this step began
} Tracer;

typedef enum { RUNNING, COMPLETE, STOPPED, FAILED } RunStatus;

// What a run prints, and writes to its run folder
typedef struct Recorder {
    RunStatus status;
    int argc;
    char **argv;
    double run_start, epoch_start, log_start; // as now() returns them
    double peak_gflops;
    StepResult *all_steps; // [rank][steps_capacity]: steps that are not yet in steps.csv
    StepResult *steps;     // this rank's row of all_steps
    size_t buffered_steps, steps_capacity; // the same for each rank
    size_t first_step;                     // how many steps were done when this process began
    FILE *steps_csv, *epochs_csv;
    FILE *results; // for what is printed even with --quiet: epochs, and what was asked for
} Recorder;

// The indices of a test's totals, which are sums over all images and ranks: three numbers, then,
// from PREDICTIONS on, the class predicted for each image. Each image is tested by one rank; the
// others add 0 to its prediction.
enum { LOSS_SUM, IMAGES_TESTED, IMAGES_CORRECT, PREDICTIONS };

// The state of one rank. Each rank has a Run of its own.
typedef struct Run {
    Settings settings;
    const Model *model;
    // the device and the other ranks
    const Kernels *kernels;
    const Device *device; // the device of these kernels
    DeviceInfo device_info;
    size_t devices; // how many devices the ranks of this process can use
    Communicator comm;
    // the network and its optimizer
    Net net;
    real *optimizer_state;
    double lr;
    LossScale loss_scale; // fp16: as it was when it was last read from the device
    StepGraphs graphs;
    // the data
    DatasetInfo dataset_info;
    Dataset train_set, test_set;
    Loader train_loader, test_loader;
    size_t epoch_images;     // how many images this rank's loader loads in an epoch
    size_t batch_per_device; // the largest number of images in a step on this device
    size_t epoch_steps;
    // The position, and the sums of the current epoch. Error messages and steps.csv count the steps
    // of an epoch from 1. Log lines count them from 0, as PyTorch's examples do. --trace-steps and
    // the trace count the steps of the whole run, from 0.
    size_t epoch;       // from 1
    size_t batch_index; // the next batch of the epoch, from 0
    EpochResult epoch_result;
    Checkpointing checkpointing;
    // what is measured
    LineClock clock;
    Tracer tracer;
    Recorder recorder;
    double *totals;            // the totals of the last test, then room for those of every rank
    real *bandwidth_arrays[2]; // --layers: numbers that are added to measure bandwidth
    MemoryPlan plan;           // for memory of neither the network, a loader nor communication
} Run;

// Returns how many steps of the whole run are done, as --max-steps and --trace-steps count them.
static size_t steps_done(const Run *run) {
    return (run->epoch - 1) * run->epoch_steps + run->batch_index;
}

/* ==== 13. Instruments ============================================================================

   What a run measures: the time of each line of train() and of each layer, a trace, and the
   resources used; and the run folder, from which plots, labs and graders read the measurements. One
   function does more than measure: exchange_steps() also gathers the requests from signals and, on
   a GPU, ends the run if a gradient was not finite. */

// ---- Records

typedef enum { KEY_VALUE, CSV, JSON } Form;

// Writes text as a JSON string, or null if it is NULL. JSON is UTF-8, so the text must be as well.
static void print_json_string(FILE *f, const char *text) {
    if (!text) {
        fprintf(f, "null");
        return;
    }
    fputc('"', f);
    for (const char *c = text; *c; c++) {
        if ((unsigned char)*c < ' ')
            fprintf(f, "\\u%04x", (unsigned)*c);
        else if (*c == '"' || *c == '\\')
            fprintf(f, "\\%c", *c);
        else
            fputc(*c, f);
    }
    fputc('"', f);
}

static void print_key(FILE *f, Form form, const char *key, int length) {
    if (form == JSON)
        fprintf(f, "\"%.*s\":", length, key);
    else if (form == KEY_VALUE)
        fprintf(f, "%.*s=", length, key);
}

static void print_number(FILE *f, Form form, const char *format, double number) {
    static const char *const not_finite[] = {[KEY_VALUE] = "nan", [CSV] = "", [JSON] = "null"};
    if (isfinite(number))
        fprintf(f, format, number);
    else
        fputs(not_finite[form], f);
}

// Prints the next argument with the conversion `format`.
static void print_value(FILE *f, Form form, const char *format, va_list *args) {
    const char kind = format[strlen(format) - 1];
    if (kind == 's' && form == JSON)
        print_json_string(f, va_arg(*args, const char *));
    else if (kind == 's')
        fputs(va_arg(*args, const char *), f);
    else if (kind == 'u')
        fprintf(f, format, va_arg(*args, size_t));
    else
        print_number(f, form, format, va_arg(*args, double));
}

/* Prints a record, described as "epoch=%zu train_loss=%.4f ...", in one of three forms: a line of
   key=value pairs, a row of CSV, or the members of a JSON object. A number that is not finite is
   nan in a pair, empty in CSV and null in JSON. The conversions are %s, %zu, and any that takes a
   double. */
static FORMAT(3) void print_record(FILE *f, Form form, const char *record, ...) {
    static const char separators[] = {[KEY_VALUE] = ' ', [CSV] = ',', [JSON] = ','};
    const char *field = record;
    va_list args;
    va_start(args, record);
    while (*field) {
        const int field_length = (int)strcspn(field, " "), key_length = (int)strcspn(field, "=");
        const char *conversion = field + key_length + 1; // after the =
        char format[16];
        snprintf(format, sizeof format, "%.*s", field_length - key_length - 1, conversion);
        print_key(f, form, field, key_length);
        print_value(f, form, format, &args);
        field += field_length;
        if (*field == ' ') {
            fputc(separators[form], f);
            field++;
        }
    }
    va_end(args);
    if (form != JSON)
        fputc('\n', f);
}

// Prints the header of a CSV table: the keys of its records.
static void print_csv_header(FILE *csv, const char *record) {
    const char *field = record, *separator = "";
    while (*field) {
        fprintf(csv, "%s%.*s", separator, (int)strcspn(field, "="), field);
        separator = ",";
        field += strcspn(field, " ");
        field += strspn(field, " ");
    }
    fputc('\n', csv);
}

/* ---- The clock of train(). Each line there begins with AT(...), except for while, if and else.
   AT() sets a mark, which ends the previous line and begins this one. The time of a line is also
   added to a phase of the step. Since a GPU runs queued work asynchronously, times are read only
   when they are needed or a mark is reused. The device has CLOCK_MARKS events, which are used in a
   cycle: mark m uses the same event as mark m - CLOCK_MARKS, which must have been read before. So
   when a mark is set, at most CLOCK_MARKS - 1 marks may be unread: the start of the running line,
   and CLOCK_MARKS - 2 earlier ones.

     mark           0        1        2        3        4
                    | first  | second | third  | fourth | the running line
                    |   times read    |   not yet read  |
                              times_read = 2        marks_set = 5              */

// Reads the times of the lines that have ended, oldest first, except for the last `unread` lines.
static void clock_read_times(LineClock *c, size_t unread) {
    const size_t ended = c->marks_set > 0 ? c->marks_set - 1 : 0;
    while (c->times_read + unread < ended) {
        const size_t from = c->times_read % CLOCK_MARKS, to = (c->times_read + 1) % CLOCK_MARKS;
        const double seconds = c->device->elapsed(from, to);
        const int line = c->at_mark[from].line;
        double *phase = c->at_mark[from].phase;
        if (line)
            c->lines[line].seconds += seconds;
        if (phase)
            *phase += seconds;
        c->times_read++;
    }
}

// Charges the running line, if there is one, to another phase.
static void clock_charge(LineClock *c, double *phase) {
    const size_t running = (c->marks_set - 1) % CLOCK_MARKS;
    if (c->line_text)
        c->at_mark[running].phase = phase;
}

// Sets the next mark, at which `line` begins. Line 0, the head of train(), is never timed, so the
// number 0 stands for the time outside of train().
static void clock_mark(LineClock *c, int line, double *phase) {
    clock_read_times(c, CLOCK_MARKS - 2);
    const size_t mark = c->marks_set % CLOCK_MARKS;
    c->at_mark[mark].line = line;
    c->at_mark[mark].phase = phase;
    c->device->mark(mark);
    c->marks_set++;
}

// Ends the timing of the running line, if there is one.
static void clock_end_line(LineClock *c) {
    if (c->synchronize)
        c->device->synchronize();
    if (c->line_text)
        trace_event(c->rank, TRACK_HOST, c->line_text, c->line_start, now());
}

// Ends the running line and begins `line`, whose time is added to `phase`.
static void clock_line(LineClock *c, int line, double *phase, const char *text) {
    clock_end_line(c);
    c->line_text = text;
    c->line_start = now();
    c->device->nsight_range(NSIGHT_LINE, text);
    clock_mark(c, line, phase);
    c->lines[line].hits++;
}

// Ends the running line without beginning another.
static void clock_stop(LineClock *c) {
    clock_end_line(c);
    c->line_text = NULL;
    c->device->nsight_range(NSIGHT_STEP, NULL);
    clock_mark(c, 0, NULL);
}

// Prints text as a quoted field of CSV, in which quotes are doubled.
static void print_quoted(FILE *csv, const char *text) {
    fputc('"', csv);
    for (const char *c = text; *c; c++) {
        if (*c == '"')
            fputc('"', csv);
        fputc(*c, csv);
    }
    fputc('"', csv);
}

static void print_profile_line(FILE *out, FILE *csv, const LineTime *line, int number,
                               const char *text, double total) {
    if (line->hits == 0) {
        fprintf(out, "%6d %9s %12s %8s %8s  %s\n", number, "", "", "", "", text);
        return;
    }
    const double us = line->seconds * 1e6, per_hit = us / (double)line->hits;
    const double percent = 100 * line->seconds / total;
    fprintf(out, "%6d %9zu %12.1f %8.1f %8.1f  %s\n", number, line->hits, us, per_hit, percent,
            text);
    fprintf(csv, "%d,%zu,%.1f,%.1f,%.1f,", number, line->hits, us, per_hit, percent);
    print_quoted(csv, text + strspn(text, " "));
    fprintf(csv, "\n");
}

// Opens cnn.c where it was compiled or, if it is not there, beside the program. Returns NULL if it
// is in neither place.
static FILE *open_source(void) {
    char path[PATH_SIZE];
    FILE *source = fopen(__FILE__, "r");
    if (!source) {
        path_beside_program(path, "cnn.c");
        source = fopen(path, "r");
    }
    return source;
}

static void read_source_line(char *text, int size, FILE *source) {
    const char *line = fgets(text, size, source);
    if (line)
        text[strcspn(text, "\n")] = 0;
}

// Prints lines `begin` to `end`, which are train(), and the time of each: to `out` in kernprof's
// format, and to `csv`.
static void print_profile(const LineClock *c, int begin, int end, FILE *out, FILE *csv) {
    char text[256] = "(cnn.c was not found)";
    double total = 0;
    if (c->marks_set == 0) {
        fprintf(out, "No training step to profile\n");
        return;
    }
    FILE *source = open_source();
    for (size_t i = 0; i < PROFILED_LINES; i++)
        total += c->lines[i].seconds;
    fprintf(out, "Timer unit: 1e-06 s\n\nTotal time: %.6g s\nFile: cnn.c\n", total);
    fprintf(out, "Function: train at line %d\n", begin);
    fprintf(out, "Times include waiting until the device is done with the line\n\n");
    fprintf(out, "Line #      Hits         Time  Per Hit   %% Time  Line Contents\n");
    fprintf(out, "==============================================================\n");
    fprintf(csv, "line,hits,time_us,per_hit_us,percent,source\n");
    for (int number = 1; number <= end; number++) {
        if (source)
            read_source_line(text, sizeof text, source);
        if (number >= begin)
            print_profile_line(out, csv, &c->lines[number - begin], number, text, total);
    }
    fprintf(out, "\n %.2f seconds - cnn.c:%d - train\n", total, begin);
    if (source)
        fclose(source);
}

// ---- Machine and build

static const char *cpu_name(void) {
    static char name[256];
    char line[PATH_SIZE];
    struct utsname system;
    uname(&system);
    snprintf(name, sizeof name, "%s", system.machine);
    find_line(line, "/proc/cpuinfo", "model name");
    sscanf(line, "model name : %255[^\n]", name);
    return name;
}

static const char *host_name(void) {
    static _Thread_local char name[256]; // replicas call this function, too
    gethostname(name, sizeof name - 1);
    return name;
}

#ifndef CNN_COMMIT // the Makefile defines both macros
#define CNN_COMMIT "unknown"
#define CNN_FLAGS "unknown"
#endif
#ifdef __clang__
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif

static void print_machine(void) {
    printf("Machine: %s, %s, %zu usable cores, %.1f GB memory\n", host_name(), cpu_name(),
           usable_cores(), machine_memory() / 1e9);
    printf("Build: %s, %s, commit %s\n", COMPILER, OPENMP_STATUS, CNN_COMMIT);
}

// ---- Resources

typedef struct Resources {
    double wall_s, cpu_s; // seconds
    double rss;           // peak memory in use, in bytes
} Resources;

static Resources resources_since(double start) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (Resources){.wall_s = now() - start,
                       .cpu_s = (double)clock() / CLOCKS_PER_SEC, // of all threads
                       .rss = 1024. * (double)u.ru_maxrss};
}

// text = hours:minutes:seconds
static const char *format_duration(double seconds, char text[32]) {
    long s = lround(seconds);
    snprintf(text, 32, "%02ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60);
    return text;
}

// Prints the lines of Slurm's seff, for this process. As in seff, 1 GB is 2^30 bytes.
static void print_resources(const Run *run, int status) {
    const Resources r = resources_since(run->recorder.run_start);
    const bool of_all = run->comm.replicas == run->comm.world; // no other process has ranks
    const size_t slurm = environment_number("SLURM_CPUS_PER_TASK");
    const size_t cores = slurm ? slurm : usable_cores();
    const double limit = memory_limit(), core_s = r.wall_s * (double)cores;
    const char *state = status ? "STOPPED" : "COMPLETED";
    char text[32];
    printf("RESOURCES%s\n", of_all ? "" : " of the process of rank 0");
    printf("State: %s (exit code %d)\nCores: %zu\n", state, status, cores);
    printf("CPU Utilized: %s\n", format_duration(r.cpu_s, text));
    printf("CPU Efficiency: %.2f%% of %s core-walltime\n", 100 * r.cpu_s / core_s,
           format_duration(core_s, text));
    printf("Job Wall-clock time: %s\n", format_duration(r.wall_s, text));
    printf("Memory Utilized: %.2f GB\n", r.rss / 0x1p30);
    printf("Memory Efficiency: %.2f%% of %.2f GB\n", 100 * r.rss / limit, limit / 0x1p30);
}

// ---- Run folder (--out DIR)

// The records of an epoch: its line on stdout, and its row of epochs.csv
#define EPOCH_LINE                                                         \
    "epoch=%zu images=%zu seconds=%.3f img_per_s=%.0f loader_wait_s=%.3f " \
    "train_loss=%.4f train_accuracy=%.2f test_seconds=%.3f test_loss=%.4f accuracy=%.2f lr=%g"
#define EPOCH_ROW EPOCH_LINE " weight_hash=%s"

// Prints an epoch. Without training, as with --eval, it has no training loss and accuracy: 0 / 0.
static void print_epoch(FILE *f, const EpochResult *e, Form form) {
    const char *const record = form == KEY_VALUE ? EPOCH_LINE : EPOCH_ROW;
    const double trained = (double)(e->images - e->images_resumed);
    const double images = (double)e->images;
    const double loss = e->train_loss_sum / images, accuracy = 100. * e->train_correct / images;
    char hash[32];
    snprintf(hash, sizeof hash, "%016llx", (unsigned long long)e->weight_hash);
    // EPOCH_LINE has no field for the hash, so the last argument is then ignored.
    print_record(f, form, record, e->epoch, e->images, e->seconds, trained / fmax(e->seconds, 1e-9),
                 e->loader_wait_s, loss, accuracy, e->test_seconds, e->test_loss, e->accuracy,
                 e->lr, hash);
}

#define STEP_ROW                                                                         \
    "epoch=%zu step=%zu rank=%zu images=%zu loss=%.9g lr=%.9g seconds=%.6f load_s=%.6f " \
    "copy_s=%.6f forward_s=%.6f backward_s=%.6f optimizer_s=%.6f comm_s=%.6f "           \
    "exposed_comm_s=%.6f other_s=%.6f bytes_sent=%.0f warmup=%zu"

// Prints a row of steps.csv: a step of one rank.
static void print_step(FILE *csv, const StepResult *s, size_t rank) {
    const double *p = s->phases;
    const double seconds = p[PHASE_LOAD] + p[PHASE_COPY] + p[PHASE_FORWARD] + p[PHASE_BACKWARD] +
                           p[PHASE_OPTIMIZER] + p[PHASE_EXPOSED_COMM] + p[PHASE_OTHER];
    print_record(csv, CSV, STEP_ROW, s->epoch, s->step, rank, s->images, s->loss, s->lr, seconds,
                 p[PHASE_LOAD], p[PHASE_COPY], p[PHASE_FORWARD], p[PHASE_BACKWARD],
                 p[PHASE_OPTIMIZER], p[PHASE_COMM], p[PHASE_EXPOSED_COMM], p[PHASE_OTHER],
                 s->bytes_sent, (size_t)s->warmup);
}

// Opens a new file in the run folder. Without --out, what is written to the file is discarded.
static void open_in_folder(AtomicFile *f, const Run *run, const char *file) {
    char path[PATH_SIZE];
    if (!*run->settings.out) {
        atomic_open_discarded(f);
        return;
    }
    join_path(path, run->settings.out, file);
    atomic_open(f, path);
}

// Returns the name of a class, or its number if the data set has no names. The text is in `buffer`.
static const char *class_name(const Run *run, size_t label, char buffer[32]) {
    const char *at = run->dataset_info.class_names;
    if (!at) {
        snprintf(buffer, 32, "%zu", label);
        return buffer;
    }
    for (size_t i = 0; i < label; i++) {
        at += strcspn(at, " ");
        at += strspn(at, " ");
    }
    snprintf(buffer, 32, "%.*s", (int)strcspn(at, " "), at);
    return buffer;
}

static const char *json_bool(bool value) {
    return value ? "true" : "false";
}

static void print_settings_json(FILE *f, const Settings *s) {
    char buffer[OPTION_TEXT_SIZE];
    fprintf(f, "{");
    for (size_t i = 0; i < OPTIONS; i++) {
        const Option *o = &options[i];
        const char *text = option_text(buffer, s, o);
        if (i > 0)
            fprintf(f, ",");
        fprintf(f, "\n    \"%s\": ", o->name + strlen("--"));
        if (o->kind == SWITCH)
            fputs(json_bool(strcmp(text, "on") == 0), f);
        else if (o->kind == COUNT || o->kind == NUMBER)
            fputs(text, f);
        else
            print_json_string(f, text);
    }
    fprintf(f, "\n  }");
}

static void print_command_json(FILE *f, const Recorder *r) {
    fprintf(f, "[");
    for (int i = 0; i < r->argc; i++) {
        if (i > 0)
            fprintf(f, ", ");
        print_json_string(f, r->argv[i]);
    }
    fprintf(f, "]");
}

static void print_machine_json(FILE *f, const Run *run) {
    const DeviceInfo *d = &run->device_info;
    const char *uuid = *d->uuid ? d->uuid : NULL;
    const char *driver = *d->driver ? d->driver : NULL;
    fprintf(f, "{");
    print_record(f, JSON,
                 "host=%s cpu=%s cores=%zu memory_bytes=%.0f peak_gflops=%.1f device=%s uuid=%s "
                 "driver=%s slurm=%s",
                 host_name(), cpu_name(), usable_cores(), machine_memory(),
                 run->recorder.peak_gflops, d->name, uuid, driver, getenv("SLURM_JOB_ID"));
    fprintf(f, "}");
}

static void print_parallel_json(FILE *f, const Run *run) {
    const Settings *s = &run->settings;
    const Communicator *c = &run->comm;
    const char *mode = c->world > 1 ? choice_word("--parallel", (int)s->parallel) : "single";
    const bool replayed = run->graphs.graph[FULL_STEP] || run->graphs.graph[SHORT_STEP];
    fprintf(f, "{");
    print_record(f, JSON,
                 "mode=%s world=%zu batch_per_device=%zu global_batch=%zu iterations=%zu "
                 "buckets=%zu workers=%zu",
                 mode, c->world, run->batch_per_device, s->global_batch, run->epoch_steps,
                 c->bucket_count, s->workers);
    fprintf(f, ",\"graph\":%s}", json_bool(replayed));
}

static void print_classes_json(FILE *f, const Run *run) {
    char name[32];
    fprintf(f, "[");
    for (size_t i = 0; i < run->dataset_info.classes; i++) {
        if (i > 0)
            fprintf(f, ", ");
        print_json_string(f, class_name(run, i, name));
    }
    fprintf(f, "]");
}

static void print_run_json(FILE *f, const Run *run) {
    static const char *const words[] = {
        [RUNNING] = "running", [COMPLETE] = "complete", [STOPPED] = "stopped", [FAILED] = "failed"};
    const Resources r = resources_since(run->recorder.run_start);
    fprintf(f, "{\n  \"status\": \"%s\", \"provenance\": \"measured\", \"emulated\": %s",
            words[run->recorder.status], json_bool(run->device_info.emulated));
    fprintf(f, ",\n  \"command\": ");
    print_command_json(f, &run->recorder);
    fprintf(f, ",\n  \"machine\": ");
    print_machine_json(f, run);
    fprintf(f, ",\n  \"build\": {");
    print_record(f, JSON, "compiler=%s flags=%s commit=%s", COMPILER, CNN_FLAGS, CNN_COMMIT);
    fprintf(f, "},\n  \"settings\": ");
    print_settings_json(f, &run->settings);
    fprintf(f, ",\n  \"parallel\": ");
    print_parallel_json(f, run);
    fprintf(f, ",\n  \"classes\": ");
    print_classes_json(f, run);
    fprintf(f, ",\n  \"resources\": {");
    print_record(f, JSON, "wall_s=%.3f cpu_s=%.3f max_rss_bytes=%.0f", r.wall_s, r.cpu_s, r.rss);
    fprintf(f, "}\n}\n");
}

static void write_run_json(const Run *run) {
    AtomicFile file;
    open_in_folder(&file, run, "run.json");
    print_run_json(file.stream, run);
    atomic_commit(&file);
}

static Run *marked_run; // the run that mark_as_failed() marks

// Writes run.json with the status "failed". die() calls it and does not wait for other ranks.
static void mark_as_failed(void) {
    marked_run->recorder.status = FAILED;
    write_run_json(marked_run);
}

// Writes run.json with the status "running". From then on, an error changes it to "failed", if it
// can still be written.
static void begin_run_json(Run *run) {
    write_run_json(run);
    marked_run = run;
    before_dying = mark_as_failed;
}

// Creates the folder and locks it until the program ends.
static void lock_folder(const char *dir) {
    if (mkdir(dir, 0777) != 0 && errno != EEXIST)
        die_file("cannot create the folder", dir);
    const int folder = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC); // stays open
    if (folder < 0)
        die_file("cannot open the folder", dir);
    if (!lock_for_this_run(folder))
        die(1, "--out %s: another run is writing into this folder; choose another one", dir);
}

// Creates the run folder and locks it until this run ends. A resumed run leaves run.json unchanged
// until it has read its checkpoint.
static void open_run_folder(Run *run) {
    if (!*run->settings.out)
        return;
    lock_folder(run->settings.out);
    run->recorder.peak_gflops = run->device->peak_gflops();
    if (!run->settings.resume)
        begin_run_json(run);
}

/* ---- Logs: epochs.csv and steps.csv, to which a resumed run appends */

enum { ROW_SIZE = 1024 };

// Reads a row of a log. Returns false at the end of the log, or at an incomplete row, which a run
// leaves if it is killed while writing the row.
static bool read_row(char row[ROW_SIZE], FILE *csv, const char *path) {
    const char *line = fgets(row, ROW_SIZE, csv);
    if (ferror(csv))
        die_file("cannot read", path);
    return line && strchr(line, '\n');
}

// Returns whether a resumed run keeps a row: it must belong to an earlier epoch, or to one of the
// first steps_kept steps of the current epoch.
static bool keeps_row(const Run *run, const char *row, size_t steps_kept) {
    size_t epoch = 0, step = 0;
    sscanf(row, "%zu,%zu", &epoch, &step);
    if (epoch == run->epoch)
        return step > 0 && step <= steps_kept;
    return epoch > 0 && epoch < run->epoch;
}

// Returns how many bytes of a log a resumed run keeps: the header, and the rows before the position
// from which it continues.
static long length_kept(const Run *run, FILE *csv, const char *path, size_t steps_kept) {
    char row[ROW_SIZE];
    long kept = 0;
    bool keeps = read_row(row, csv, path); // the header
    while (keeps) {
        kept = ftell(csv);
        keeps = read_row(row, csv, path) && keeps_row(run, row, steps_kept);
    }
    return kept;
}

// Opens a log in the run folder. A resumed run keeps the rows before its position.
static FILE *open_log(const Run *run, const char *file, const char *record, size_t steps_kept) {
    char path[PATH_SIZE];
    long kept = 0;
    join_path(path, run->settings.out, file);
    FILE *csv = fopen(path, "a+");
    if (!csv)
        die_file("cannot write", path);
    if (run->settings.resume && steps_done(run) > 0)
        kept = length_kept(run, csv, path, steps_kept);
    if (ftruncate(fileno(csv), kept) != 0 || fseek(csv, 0, SEEK_END) != 0)
        die_file("cannot write", path);
    if (kept == 0)
        print_csv_header(csv, record);
    flush(csv, path);
    return csv;
}

static void remove_result(const Run *run, const char *file) {
    char path[PATH_SIZE];
    join_path(path, run->settings.out, file);
    unlink(path);
}

// Removes the results that another run left in the folder. A resumed run removes only
// predictions.csv. With --load or --eval, model.safetensors is kept: it may be what is tested.
static void remove_results(const Run *run) {
    static const char *const reports[] = {"profile.txt", "profile.csv", "layers.csv"};
    remove_result(run, "predictions.csv");
    if (steps_done(run) > 0)
        return;
    for (size_t i = 0; i < LENGTH(reports); i++)
        remove_result(run, reports[i]);
    if (!*run->settings.load && !run->settings.eval)
        remove_result(run, "model.safetensors");
}

// Opens steps.csv and epochs.csv. `trains` says whether the run continues the current epoch; it
// then writes that epoch's row of epochs.csv again.
static void open_logs(Run *run, bool trains) {
    remove_results(run);
    // keeps_row() compares the second column with steps_kept. In epochs.csv that column is the
    // number of images, so 0 drops a row of the current epoch.
    run->recorder.epochs_csv = open_log(run, "epochs.csv", EPOCH_ROW, trains ? 0 : SIZE_MAX);
    run->recorder.steps_csv = open_log(run, "steps.csv", STEP_ROW, run->batch_index);
    begin_run_json(run);
}

// ---- Gradients that are not finite

// Ends the run unless a tensor's gradient is finite. Steps are counted from 1.
static void require_finite(const real *gradient, size_t count, const Layer *l, const char *tensor,
                           size_t epoch, size_t step) {
    if (!all_finite(gradient, count, FP32))
        die(1, "epoch %zu, step %zu: the gradient of %s.%s is not finite; try a smaller --lr",
            epoch, step, l->name, tensor);
}

static void check_gradients_finite(const Net *net, size_t epoch, size_t step) {
    for (const Layer *l = net->layers; l < net->layers + net->layer_count; l++) {
        require_finite(net->grads + l->weight_offset, l->weight_count, l, "weight", epoch, step);
        require_finite(net->grads + l->bias_offset, l->bias_count, l, "bias", epoch, step);
    }
}

// Ends the run, on a GPU, if a gradient was not finite in the steps since the last call. With fp16
// such a gradient only skips an update; then rank 0 prints how many updates have been skipped.
static void check_gpu_gradients(Run *run) {
    const Net *net = &run->net;
    const LossScale before = run->loss_scale;
    LossScale *s = &run->loss_scale;
    if (!run->device->is_gpu || run->recorder.buffered_steps == 0)
        return;
    run->device->copy(s, net->loss_scale, sizeof *s);
    if (s->not_finite > 0 && run->kernels->precision != FP16)
        die(1, "epoch %zu, at most %zu steps ago: a gradient was not finite; try a smaller --lr",
            run->epoch, run->recorder.buffered_steps);
    if (s->skipped > before.skipped && run->comm.rank == 0)
        printf("fp16: skipped %u updates because gradients were not finite; the loss scale is now "
               "%g\n",
               s->skipped - before.skipped, (double)s->scale);
}

// ---- Steps and epochs

// Returns the current step, to which the lines of train() are charged until buffer_step() ends it.
static StepResult *current_step(const Run *run) {
    return &run->recorder.steps[run->recorder.buffered_steps];
}

// Adds step i of the buffer, from all ranks, to the epoch's sums and to steps.csv. Keeps the
// largest request of the ranks: a request to end the run is larger than one to save.
static void add_step(Run *run, EpochResult *e, size_t i) {
    Recorder *r = &run->recorder;
    double loss = 0, longest_wait = 0;
    e->step_images = 0;
    for (size_t rank = 0; rank < run->comm.world; rank++) {
        const StepResult *s = &r->all_steps[rank * r->steps_capacity + i];
        e->step_images += s->images;
        loss += s->loss * (double)s->images;
        e->train_correct += s->correct;
        longest_wait = fmax(longest_wait, s->phases[PHASE_LOAD]);
        if (s->request > run->checkpointing.request)
            run->checkpointing.request = s->request;
        for (size_t k = 0; k < PHASES; k++)
            e->phases[k] += s->phases[k];
        e->bytes_sent += s->bytes_sent;
        if (r->steps_csv)
            print_step(r->steps_csv, s, rank);
    }
    e->images += e->step_images;
    e->step_loss = loss / (double)e->step_images;
    e->train_loss_sum += loss;
    e->loader_wait_s += longest_wait;
}

/* Adds the buffered steps of all ranks to the epoch's sums and to steps.csv, and gathers the ranks'
   requests. All ranks must call it after the same step. On a GPU, ends the run if a gradient was
   not finite. AT() has charged the running line of train() to a step of the buffer, which is now
   emptied; clock_charge() charges that line to the first step of the next interval instead. */
static void exchange_steps(Run *run, EpochResult *e) {
    Recorder *r = &run->recorder;
    clock_read_times(&run->clock, 0);
    check_gpu_gradients(run);
    all_gather(&run->comm, r->all_steps, r->steps_capacity * sizeof *r->steps);
    for (size_t i = 0; i < r->buffered_steps; i++)
        add_step(run, e, i);
    memset(r->steps, 0, r->buffered_steps * sizeof *r->steps);
    r->buffered_steps = 0;
    clock_charge(&run->clock, &current_step(run)->phases[PHASE_OTHER]);
    if (r->steps_csv)
        flush(r->steps_csv, "steps.csv");
}

// Clears the line that show_progress() wrote, on a terminal.
static void clear_progress(void) {
    if (isatty(STDERR_FILENO))
        fprintf(stderr, "\r\033[K");
}

// Shows in one line, on a terminal, the progress of the epoch, its speed and the time left.
static void show_progress(const Run *run, const EpochResult *e, double seconds) {
    struct winsize terminal = {.ws_col = 80};
    if (!isatty(STDERR_FILENO))
        return;
    ioctl(STDERR_FILENO, TIOCGWINSZ, &terminal);
    if (terminal.ws_col < 2)
        terminal.ws_col = 80; // the terminal does not know its width
    const double all = (double)run->train_set.count, seen = (double)e->images;
    const double rate = (double)(e->images - e->images_resumed) / seconds;
    char text[256];
    snprintf(text, sizeof text, "epoch %zu: %3.0f %%, %zu of %.0f images, %.0f img/s, %.0f s left",
             e->epoch, fmin(100, 100 * seen / all), e->images, all, rate,
             fmax(0, all - seen) / rate);
    fprintf(stderr, "\r\033[K%.*s\r", terminal.ws_col - 1, text);
}

// Prints the log line of a step. As in PyTorch's example, the number of images shown is the step's
// number times the number of images in this step, even if this is the last step and has fewer.
static void print_log_line(const Run *run, const EpochResult *e) {
    const size_t step = run->batch_index;
    if (run->model->logs_throughput)
        printf("INFO - Epoch: %zu, Iteration: %zu, Avg img/sec: %.3f\n", e->epoch, step,
               (double)(e->images - e->images_logged) / (now() - run->recorder.log_start));
    else
        printf("Train Epoch: %zu [%zu/%zu (%.0f%%)]\tLoss: %.6f\n", e->epoch, step * e->step_images,
               run->train_set.count, 100. * (double)step / (double)run->epoch_steps, e->step_loss);
}

static bool at_log_interval(const Run *run) {
    return run->batch_index % run->settings.log_interval == 0;
}

enum { WARMUP_STEPS = 3 };

// Appends the result of a step to the buffer for steps.csv.
static void buffer_step(Run *run, const EpochResult *e, const Batch *batch, BatchLoss loss,
                        int request) {
    StepResult *s = current_step(run);
    run->recorder.buffered_steps++;
    s->epoch = e->epoch;
    s->step = batch->number + 1;
    s->images = batch->n;
    s->correct = loss.correct_images;
    s->loss = loss.mean;
    s->lr = run->lr;
    s->phases[PHASE_COMM] = run->comm.seconds;
    s->bytes_sent = run->comm.bytes_sent;
    s->request = request;
    s->warmup = steps_done(run) < run->recorder.first_step + WARMUP_STEPS;
    run->comm.seconds = 0;
    run->comm.bytes_sent = 0;
}

static void report_progress(Run *run, EpochResult *e) {
    Recorder *r = &run->recorder;
    clear_progress();
    print_log_line(run, e);
    e->images_logged = e->images;
    r->log_start = now();
    show_progress(run, e, now() - r->epoch_start);
}

// Keeps the result of a step, and prints the log line at the log interval. A single rank handles a
// signal at once; several ranks handle it at the log interval.
static void log_step(Run *run, EpochResult *e, const Batch *batch, BatchLoss loss) {
    const int request = take_request();
    const bool due = at_log_interval(run), alone = run->comm.world == 1;
    const bool must_exchange = due || (request && alone);
    buffer_step(run, e, batch, loss, request);
    if (must_exchange)
        exchange_steps(run, e);
    if (due && run->comm.rank == 0 && !run->settings.quiet)
        report_progress(run, e);
}

// Prints the seconds that the phases of an epoch took and the MB sent, as averages over the ranks.
static void print_phases(const EpochResult *e, size_t world) {
    const double n = (double)world;
    const double *p = e->phases;
    const double compute =
        p[PHASE_COPY] + p[PHASE_FORWARD] + p[PHASE_BACKWARD] + p[PHASE_OPTIMIZER];
    printf("ranks=%zu compute_s=%.3f load_s=%.3f comm_s=%.3f exposed_comm_s=%.3f other_s=%.3f "
           "mb_sent=%.1f (averages over the ranks)\n",
           world, compute / n, p[PHASE_LOAD] / n, p[PHASE_COMM] / n, p[PHASE_EXPOSED_COMM] / n,
           p[PHASE_OTHER] / n, 1e-6 * e->bytes_sent / n);
}

// Adds the remaining steps of an epoch to its sums and to steps.csv, and prints the averages over
// the ranks.
static void finish_epoch(Run *run, EpochResult *e) {
    exchange_steps(run, e);
    e->lr = run->lr;
    if (run->comm.rank > 0)
        return;
    if (!run->settings.quiet)
        clear_progress();
    if (run->model->logs_throughput)
        printf("INFO - Time taken for epoch %zu is %.3f sec\n", e->epoch,
               now() - run->recorder.epoch_start);
    if (run->comm.world > 1)
        print_phases(e, run->comm.world);
}

// Prints how much the workers have copied to a GPU, and how fast.
static void print_uploads(const Loader *loader) {
    const double bytes = (double)__atomic_load_n(&loader->uploaded, __ATOMIC_RELAXED);
    const double nanoseconds = (double)__atomic_load_n(&loader->upload_ns, __ATOMIC_RELAXED);
    const char *memory = loader->consumer.pinned ? "pinned" : "pageable";
    if (bytes > 0)
        printf("Copied to the device so far: %.1f MB, %.2f GB/s per worker from %s memory\n",
               bytes / 1e6, bytes / nanoseconds, memory);
}

// Ends the run unless all ranks have the same weights. All ranks must call it. Rank 0 prints the
// epoch's line and adds it to the run folder.
static void report_epoch(Run *run, EpochResult *e) {
    Recorder *r = &run->recorder;
    const bool trained = e->epoch != TEST_EPOCH;
    e->weight_hash = hash_weights(&run->net);
    require_equal_on_ranks(&run->comm, "weights", e->weight_hash);
    if (run->comm.rank > 0)
        return;
    print_epoch(r->results, e, KEY_VALUE);
    flush(r->results, "standard output");
    print_uploads(&run->train_loader);
    flush(stdout, "standard output");
    if (!r->epochs_csv)
        return; // no run folder
    if (!trained && !run->settings.eval)
        return; // training was already complete, and epochs.csv has the row of the last epoch
    print_epoch(r->epochs_csv, e, CSV);
    flush(r->epochs_csv, "epochs.csv");
}

// ---- Trace (--trace)

// Turns the tracing of this rank on or off.
static void set_tracing(Run *run, bool traced) {
    if (traced && !run->tracer.traced)
        __atomic_fetch_add(&trace.traced_ranks, 1, __ATOMIC_RELAXED);
    if (!traced && run->tracer.traced)
        __atomic_fetch_sub(&trace.traced_ranks, 1, __ATOMIC_RELAXED);
    run->tracer.traced = traced;
    run->net.marks_rows = traced;
}

// # PROF  Turns Nsight's recording on or off. Nsight records the steps of --trace-steps.
static void record_for_nsight(Run *run, bool recorded) {
    if (run->comm.replica == 0 && recorded != run->tracer.recording)
        run->device->record(recorded);
    run->tracer.recording = recorded;
    run->net.names_rows = recorded && !run->settings.graph;
}

// Sets the origin of the device's times in the trace.
static void set_trace_origin(Run *run) {
    run->device->synchronize();
    run->device->mark(START_MARK);
    run->tracer.start = now();
}

// Returns whether the next step is one of --trace-steps.
static bool in_trace_steps(const Run *run) {
    const size_t step = steps_done(run);
    return step >= run->tracer.first && step < run->tracer.end;
}

// Begins or ends the trace before the next step.
static void trace_next_step(Run *run) {
    const bool traced = in_trace_steps(run) && *run->settings.trace;
    if (traced && !run->tracer.traced)
        set_trace_origin(run);
    set_tracing(run, traced);
}

// Begins the range of a step for Nsight, and its trace if it is one of --trace-steps.
static void begin_step(Run *run) {
    char name[32];
    record_for_nsight(run, in_trace_steps(run));
    snprintf(name, sizeof name, "step %zu", steps_done(run));
    run->device->nsight_range(NSIGHT_STEP, name);
    trace_next_step(run);
    run->tracer.step_start = now();
}

// Adds an event to the trace for a pass of a row. Waits for the device.
static void trace_row(const Run *run, size_t row, RowPass pass) {
    const Device *d = run->device;
    const double begin = d->elapsed(START_MARK, begin_mark(row, pass));
    const double end = d->elapsed(START_MARK, end_mark(row, pass));
    char name[ROW_LABEL_SIZE];
    row_label(&run->net, row, pass, name);
    trace_event(run->comm.rank, TRACK_DEVICE, name, run->tracer.start + begin,
                run->tracer.start + end);
}

// Adds the events of a traced step and its rows to the trace; called after the step. The clearing
// of the gradients counts as one more row, after the last one.
static void trace_step(const Run *run) {
    const Net *net = &run->net;
    char name[ROW_LABEL_SIZE];
    if (!run->tracer.traced)
        return;
    for (size_t row = 1; row < net->layer_count; row++)
        trace_row(run, row, FORWARD_PASS);
    if (run->settings.zero_grad == ZERO_GRAD_MEMSET)
        trace_row(run, zero_grad_row(net), BACKWARD_PASS);
    for (size_t row = last_row(net); row > 0; row--)
        trace_row(run, row, BACKWARD_PASS);
    snprintf(name, sizeof name, "step %zu", steps_done(run)); // as --trace-steps counts
    trace_event(run->comm.rank, TRACK_STEP, name, run->tracer.step_start, now());
}

// Parses --trace-steps: "10:20" stands for the steps 10 to 19.
static void parse_trace_steps(Run *run) {
    const char *text = run->settings.trace_steps;
    Tracer *t = &run->tracer;
    int size = 0;
    const int numbers = sscanf(text, "%18zu:%18zu%n", &t->first, &t->end, &size);
    const bool all_used = text[size] == 0;
    const bool has_minus = strchr(text, '-') != NULL; // which %zu would accept
    const bool is_range = numbers == 2 && all_used && !has_minus;
    if (!is_range || t->first >= t->end)
        die(EXIT_USAGE, "--trace-steps: expected A:B with A below B, such as 10:20, found \"%s\"",
            text);
}

// Names a rank, which is a process of the trace, and its tracks, which are threads.
static void write_trace_names(FILE *f, size_t rank, size_t workers) {
    static const char *const tracks[] = {"steps", "train()", "device", "communication"};
    static const char format[] =
        "{\"ph\":\"M\",\"name\":\"%s_name\",\"pid\":%zu,\"tid\":%zu,\"args\":{\"name\":\"%s\"}}";
    char name[64];
    snprintf(name, sizeof name, "rank %zu", rank);
    fprintf(f, format, "process", rank, (size_t)0, name);
    for (size_t track = 0; track < TRACK_LOADER + workers; track++) {
        if (track < TRACK_LOADER)
            snprintf(name, sizeof name, "%s", tracks[track]);
        else
            snprintf(name, sizeof name, "loader worker %zu", track - TRACK_LOADER);
        fprintf(f, ",\n");
        fprintf(f, format, "thread", rank, track, name);
    }
}

static void write_trace_event(FILE *f, const TraceEvent *e, double started) {
    fprintf(f, "{");
    print_record(f, JSON, "ph=%s pid=%zu tid=%zu ts=%.3f dur=%.3f name=%s", "X", e->rank, e->track,
                 1e6 * (e->begin - started), 1e6 * (e->end - e->begin), e->name);
    fprintf(f, "}");
}

// Writes Chrome's trace event format: names (M) of processes and threads, and complete events (X),
// with times in microseconds. Also names the --kernels in use.
static void write_trace(const Run *run) {
    const size_t events = min_size(trace.count, TRACE_EVENTS);
    const char *hint = "";
    AtomicFile file;
    char path[PATH_SIZE];
    if (!trace.events)
        return;
    if (run->comm.rank == 0)
        snprintf(path, sizeof path, "%s", run->settings.trace);
    else
        snprintf(path, sizeof path, "%s.rank%zu", run->settings.trace, run->comm.rank);
    atomic_open(&file, path);
    FILE *f = file.stream;
    fprintf(f, "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"kernels\":\"%s\"},",
            choice_word("--kernels", (int)run->kernels->choice));
    fprintf(f, "\"traceEvents\":[\n");
    for (size_t rank = 0; rank < run->comm.world; rank++) {
        if (rank > 0)
            fprintf(f, ",\n");
        write_trace_names(f, rank, run->settings.workers);
    }
    for (size_t i = 0; i < events; i++) {
        fprintf(f, ",\n");
        write_trace_event(f, &trace.events[i], run->recorder.run_start);
    }
    fprintf(f, "\n]}\n");
    atomic_commit(&file);
    if (trace.count > TRACE_EVENTS)
        hint = "; more did not fit: use fewer --trace-steps";
    printf("Wrote %zu events to %s%s\n", events, path, hint);
}

// ---- Layers (--layers)

enum {
    LAYER_ROUNDS = 7,           // how often each row is timed
    BANDWIDTH_NUMBERS = 1 << 24 // how many numbers are summed to measure bandwidth
};

// How many seconds the passes of a row took in each round
typedef struct LayerTimes {
    double forward[LAYER_ROUNDS], backward[LAYER_ROUNDS];
} LayerTimes;

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    if (x == y)
        return 0;
    return x < y ? -1 : 1;
}

static double median(double *values, size_t count) {
    qsort(values, count, sizeof *values, compare_doubles);
    return values[count / 2];
}

/* For each kind of layer, how many accesses a row needs at least. An access reads or writes every
   element of an array, or of its gradient, once. The comments name the arrays that forward
   accesses, then those that backward accesses. */
static const struct {
    double in;  // to the input and the weights, which count together as one array
    double out; // to the output, and to the input where it has the same shape
} accesses[KINDS] = {
    [CONV2D] = {.in = 3, .out = 3},    // in, weight, out; in, dweight, dout, din, weight, dout
    [BATCHNORM2D] = {.out = 8},        // in twice, out; in twice, dout twice, din
    [RELU] = {.out = 5},               // in, out; out, dout, din
    [MAXPOOL2D] = {.in = 2, .out = 2}, // in, out; dout, din
    [GLOBAL_AVGPOOL2D] = {.in = 2, .out = 2}, // in, out; dout, din
    [ADD] = {.out = 3},                       // in, residual, out; nothing: gradients share memory
    [DROPOUT] = {.out = 4},                   // in, out; dout, din
    [LINEAR] = {.in = 3, .out = 3},           // as a convolution
    [LOG_SOFTMAX] = {.out = 5},               // in, out; out, dout, din
};

/* Returns how many bytes a row must move at least, forward and backward, for n images:

     bytes of an element * (share * (accesses.in * in + accesses.out * out) + extra_accesses * out)
     + saved bytes, which forward writes and backward reads; a fused max-pool's are not counted

   `in` and `out` count elements, and `in` includes the weights. A convolution or linear layer that
   reads the images makes only 2 of the 3 accesses, since it computes no gradient for the images. A
   fused residual is read once. The backward pass of a fused ReLU or max-pool accesses the output
   three more times. */
static double row_bytes(const Net *net, size_t row, size_t n) {
    const Layer *l = &net->layers[row];
    const Fusion *fused = &net->row_plans[row].fused;
    const double in = (double)(n * shape_size(l->in) + l->weight_count);
    const double out = (double)(n * shape_size(stored_shape(net, row)));
    const double saved = kinds[l->kind].saves ? 2 * out : 0;
    double share = 1, extra_accesses = 0;
    if (has_weight_matrix(l) && l->input == 0)
        share = 2. / 3;
    if (fused->add)
        extra_accesses += 1;
    if (fused->relu_backward || fused->pool)
        extra_accesses += 3;
    const double row_accesses = accesses[l->kind].in * in + accesses[l->kind].out * out;
    const double elements = share * row_accesses + extra_accesses * out;
    return (double)net->kernels->element_bytes * elements + saved;
}

// Returns the memory bandwidth in bytes per second, measured with out = in + residual.
static double measure_bandwidth(const Run *run) {
    const Kernels *k = run->kernels;
    const Shape image = {1, 1, 1 << 12}; // small: there are many of them
    const Layer row = {.kind = ADD, .in = image, .out = image};
    const Work w = {.l = &row,
                    .n = BANDWIDTH_NUMBERS / row.out.c,
                    .in = run->bandwidth_arrays[0],
                    .residual = run->bandwidth_arrays[1],
                    .out = run->bandwidth_arrays[0]};
    double seconds[LAYER_ROUNDS];
    for (size_t i = 0; i < LAYER_ROUNDS; i++) {
        run->device->mark(0);
        k->layers[ADD].forward(w);
        run->device->mark(1);
        seconds[i] = run->device->elapsed(0, 1);
    }
    const size_t bytes = 3 * w.n * row.out.c * k->element_bytes; // two reads and a write
    return (double)bytes / median(seconds, LAYER_ROUNDS);
}

// Times the rows in training steps that make no update; counts the operations in the first step.
static void time_rows(Run *run, const Batch *batch, LayerTimes *times, double *flops) {
    Net *net = &run->net;
    const Device *d = net->device;
    net->on_gradients = NULL; // training is over
    net->marks_rows = true;
    net_load(net, batch, 0);
    for (size_t round = 0; round < LAYER_ROUNDS; round++) {
        const bool counts = round == 0;
        net->flops = counts ? flops : NULL;
        compute_gradients(net, batch->n);
        for (size_t i = 1; i < net->layer_count; i++) {
            times[i].forward[round] =
                d->elapsed(begin_mark(i, FORWARD_PASS), end_mark(i, FORWARD_PASS));
            times[i].backward[round] =
                d->elapsed(begin_mark(i, BACKWARD_PASS), end_mark(i, BACKWARD_PASS));
        }
    }
    net->marks_rows = false;
}

// What --layers shows for a row
typedef struct LayerFigures {
    double forward_ms, backward_ms, gflops, gb_per_s;
    double percent_of_peak; // of the limit that bounds the row; NAN if it is unknown
    // the column "saved": operations of the definition / operations that were executed
    double operation_ratio;
    const char *bound; // "compute" or "memory", or "" if the peak is unknown
} LayerFigures;

/* Returns the figures of a row. A row is bound by compute or by memory, whichever would take longer
   at the limits of this device: `peak` operations per second and `bandwidth` bytes per second.
   `flops` is how many operations the row executes for n images. */
static LayerFigures layer_figures(const Net *net, size_t row, size_t n, LayerTimes *times,
                                  double flops, double peak, double bandwidth) {
    const double bytes = row_bytes(net, row, n);
    LayerFigures f = {.percent_of_peak = NAN, .bound = "", .operation_ratio = 1};
    f.forward_ms = 1e3 * median(times->forward, LAYER_ROUNDS);
    f.backward_ms = 1e3 * median(times->backward, LAYER_ROUNDS);
    const double seconds = 1e-3 * (f.forward_ms + f.backward_ms);
    const double compute_s = flops / peak, memory_s = bytes / bandwidth; // minima
    f.gflops = 1e-9 * flops / seconds;
    f.gb_per_s = 1e-9 * bytes / seconds;
    if (flops > 0)
        f.operation_ratio = (double)n * layer_training_flops(&net->layers[row]) / flops;
    if (isfinite(peak)) {
        f.percent_of_peak = 100 * fmax(compute_s, memory_s) / seconds;
        f.bound = compute_s > memory_s ? "compute" : "memory";
    }
    return f;
}

#define LAYER_ROW                                                                           \
    "layer=%s kind=%s out_shape=%s params=%zu mflop=%.3f forward_ms=%.4f backward_ms=%.4f " \
    "gflops=%.2f gb_per_s=%.2f percent_of_peak=%.1f saved=%.3f bound=%s"

// Prints a line of the table, and a row of layers.csv.
static void print_layer(FILE *out, FILE *csv, const Net *net, size_t row, const LayerFigures *f) {
    const Layer *l = &net->layers[row];
    const char *bound = *f->bound ? f->bound : "-";
    char kind[64], name[64], shape[64], percent[16] = "-";
    if (isfinite(f->percent_of_peak))
        snprintf(percent, sizeof percent, "%.1f", f->percent_of_peak);
    if (*l->name)
        snprintf(name, sizeof name, "%s", l->name);
    else
        snprintf(name, sizeof name, "row %zu", row);
    snprintf(shape, sizeof shape, "%zux%zux%zu", l->out.h, l->out.w, l->out.c);
    describe_layer(l, kind, sizeof kind);
    fprintf(out, "  %-24s %-34s %9.3f %9.3f %8.1f %7.1f %6s %6.2f  %s\n", name, kind, f->forward_ms,
            f->backward_ms, f->gflops, f->gb_per_s, percent, f->operation_ratio, bound);
    print_record(csv, CSV, LAYER_ROW, name, kind, shape, l->weight_count + l->bias_count,
                 forward_flops(l) / 1e6, f->forward_ms, f->backward_ms, f->gflops, f->gb_per_s,
                 f->percent_of_peak, f->operation_ratio, f->bound);
}

static void print_layers_head(const Run *run, size_t n, double peak, double bandwidth) {
    FILE *out = run->recorder.results;
    const char *caution = run->device_info.emulated ? "; emulated, so the times mean nothing" : "";
    char rate[64] = "GFLOP/s unknown without cnn_kernels.c";
    if (isfinite(peak))
        snprintf(rate, sizeof rate, "%.1f GFLOP/s", peak / 1e9);
    fprintf(out, "Layers, %zu images; this device: %s, %.1f GB/s measured%s\n", n, rate,
            bandwidth / 1e9, caution);
    fprintf(out, "  %-24s %-34s %9s %9s %8s %7s %6s %6s  %s\n", "layer", "kind", "forward",
            "backward", "GFLOP/s", "GB/s", "%", "saved", "limited by");
}

/* Prints the median time of each row for a training batch, next to the limits of this machine. A
   fused row has no line of its own: its time is part of the row into which it is fused. */
static void measure_layers(Run *run) {
    Net *net = &run->net;
    LayerTimes *times = must_alloc(net->layer_count * sizeof *times, "the layers' times");
    AtomicFile csv;
    double flops[MAX_LAYERS];
    loader_start(&run->train_loader, run->settings.seed, run->epoch, run->batch_index);
    Batch batch = *loader_next(&run->train_loader);
    // Under dp, the arrays hold only a share of the master's batch.
    batch.n = min_size(batch.n, net->max_batch);
    for (size_t i = 0; i < net->layer_count; i++) // for rows without a backward pass
        flops[i] = (double)batch.n * layer_training_flops(&net->layers[i]);
    time_rows(run, &batch, times, flops);
    // Other programs can only lower what is measured: the higher of two, also in run.json.
    run->recorder.peak_gflops = fmax(run->recorder.peak_gflops, net->device->peak_gflops());
    const double peak = 1e9 * run->recorder.peak_gflops, bandwidth = measure_bandwidth(run);
    open_in_folder(&csv, run, "layers.csv");
    print_layers_head(run, batch.n, peak, bandwidth);
    print_csv_header(csv.stream, LAYER_ROW);
    for (size_t i = 1; i < net->layer_count; i++) {
        if (!has_kernels(&net->row_plans[i]))
            continue;
        const LayerFigures f = layer_figures(net, i, batch.n, &times[i], flops[i], peak, bandwidth);
        print_layer(run->recorder.results, csv.stream, net, i, &f);
    }
    atomic_commit(&csv);
    free(times);
}

// ---- Predictions

// Prints the accuracy of each class in the last test, as PyTorch's CIFAR-10 tutorial does.
static void print_per_class(const Run *run) {
    FILE *out = run->recorder.results;
    char name[32];
    for (size_t k = 0; k < run->net.classes; k++) {
        size_t images = 0, correct = 0;
        for (size_t i = 0; i < run->test_set.count; i++) {
            if (run->test_set.labels[i] != k)
                continue;
            images++;
            if (run->totals[PREDICTIONS + i] == (double)k)
                correct++;
        }
        fprintf(out, "Accuracy for class: %-5s is ", class_name(run, k, name));
        if (images > 0)
            fprintf(out, "%.1f %%\n", 100. * (double)correct / (double)images);
        else
            fprintf(out, "unknown: no test image has it\n");
    }
}

// Prints a row of predictions.csv. If `bytes` is NULL, the last column is empty.
static void print_prediction(FILE *csv, const Run *run, size_t image, size_t epoch,
                             const uint8_t *bytes) {
    const Shape shape = run->dataset_info.shape;
    fprintf(csv, "%zu,%u,%.0f,%zu,%zux%zux%zu,", image, run->test_set.labels[image],
            run->totals[PREDICTIONS + image], epoch, shape.h, shape.w, shape.c);
    if (bytes)
        for (size_t i = 0; i < shape_size(shape); i++)
            fprintf(csv, "%02x", bytes[i]);
    fprintf(csv, "\n");
}

// Prints what --augment makes of a test image in the epochs 1 to VARIANTS.
static void print_variants(FILE *csv, const Run *run, size_t image) {
    enum { VARIANTS = 7 };
    const Shape shape = run->dataset_info.shape;
    const size_t size = shape_size(shape);
    uint8_t variant[size];
    for (size_t epoch = 1; epoch <= VARIANTS; epoch++) {
        const RandomKey key = {run->settings.seed, epoch, image, 1};
        run->train_loader.augment(variant, run->test_set.images + image * size, shape, &key);
        print_prediction(csv, run, image, epoch, variant);
    }
}

/* Writes predictions.csv: the label of each test image and the class predicted for it in the last
   test. The first SAMPLES correctly classified images, and as many misclassified ones, have their
   pixels, in hexadecimal; the first AUGMENTED images of both kinds also have their variants. */
static void write_predictions(const Run *run) {
    enum { SAMPLES = 32, AUGMENTED = 2 };
    const size_t size = shape_size(run->dataset_info.shape);
    size_t correct = 0, wrong = 0;
    AtomicFile csv;
    open_in_folder(&csv, run, "predictions.csv");
    fprintf(csv.stream, "image,label,predicted,epoch,shape,pixels\n");
    for (size_t i = 0; i < run->test_set.count; i++) {
        const bool is_correct = run->totals[PREDICTIONS + i] == run->test_set.labels[i];
        const size_t before = is_correct ? correct : wrong;
        const uint8_t *pixels = NULL;
        if (before < SAMPLES)
            pixels = run->test_set.images + i * size;
        print_prediction(csv.stream, run, i, 0, pixels);
        if (before < AUGMENTED && run->train_loader.augment)
            print_variants(csv.stream, run, i);
        if (is_correct)
            correct++;
        else
            wrong++;
    }
    atomic_commit(&csv);
}

// --profile: prints the profile and writes it to the run folder.
static void write_profile(Run *run, int begin, int end) {
    AtomicFile csv, text;
    char *profile;
    size_t length;
    FILE *out = open_memstream(&profile, &length);
    if (!out)
        die_no_memory(PATH_SIZE, "the profile");
    clock_read_times(&run->clock, 0);
    open_in_folder(&csv, run, "profile.csv");
    print_profile(&run->clock, begin, end, out, csv.stream);
    atomic_commit(&csv);
    close_text(out, &profile, PATH_SIZE, "the profile");
    fputs(profile, run->recorder.results);
    open_in_folder(&text, run, "profile.txt");
    fputs(profile, text.stream);
    atomic_commit(&text);
    free(profile);
}

/* ==== 14. Setting up =============================================================================

   From the command line to a network that is ready to train: settings, ranks, devices, data, memory
   and weights. The memory of networks, loaders and communication is planned and printed before any
   of it is allocated. The section begins with the functions that save and resume a run; training
   saves checkpoints with them, too. */

// ---- Checkpoints of a run

// metadata = lines "key=value": the position, the settings that determine the result, and the sums
// of the epoch so far
static void run_metadata(const Run *run, char metadata[METADATA_SIZE]) {
    const EpochResult *e = &run->epoch_result;
    const bool within_epoch = run->batch_index > 0 && e->images > 0;
    FILE *m = fmemopen(metadata, METADATA_SIZE - 1, "w");
    metadata[METADATA_SIZE - 1] = 0;
    if (!m)
        die_no_memory(METADATA_SIZE, "the metadata");
    fprintf(m, "format=pt\nepoch=%zu\nbatch=%zu\ndevices=%zu\n", run->epoch, run->batch_index,
            run->comm.world);
    char text[OPTION_TEXT_SIZE];
    for (const Option *o = options; o < options + OPTIONS; o++)
        if (o->on_resume == MUST_MATCH)
            fprintf(m, "%s=%s\n", o->name + strlen("--"), option_text(text, &run->settings, o));
    if (run->kernels->precision == FP16)
        fprintf(m, "loss_scale=%.9g,%u\n", (double)run->loss_scale.scale, run->loss_scale.steps);
    if (within_epoch)
        fprintf(m, "images=%zu\ntrain_loss=%.17g\ntrain_correct=%.17g\n", e->images,
                e->train_loss_sum, e->train_correct);
    if (run->settings.schedule == SCHEDULE_COSINE)
        fprintf(m, "epochs=%zu\n", run->settings.epochs);
    if (fclose(m) != 0)
        die(1, "more than %d bytes of metadata; raise METADATA_SIZE in cnn.c", METADATA_SIZE);
}

static void sync_log(FILE *csv, const char *name) {
    if (csv && fsync(fileno(csv)) != 0)
        die_file("cannot write to", name);
}

// Saves a checkpoint if --checkpoint is given; first syncs the logs, which a resumed run continues.
// All ranks must call it.
static void save_checkpoint(Run *run) {
    char metadata[METADATA_SIZE];
    exchange_steps(run, &run->epoch_result);
    if (run->checkpointing.request == SAVE_REQUEST)
        run->checkpointing.request = 0;
    if (run->comm.rank > 0 || !*run->settings.checkpoint || run->settings.dry_run)
        return;
    sync_log(run->recorder.steps_csv, "steps.csv");
    sync_log(run->recorder.epochs_csv, "epochs.csv");
    run_metadata(run, metadata);
    save_tensors(&run->net, &optimizers[run->settings.optimizer], run->optimizer_state, metadata,
                 run->settings.checkpoint);
}

// Dies unless a line "key=value" of the checkpoint is the same as this run's line.
static void compare_lines(const char *path, const char *theirs, const char *ours) {
    const int found = (int)strcspn(theirs, "\n"), length = (int)strcspn(ours, "\n");
    const size_t key_length = strcspn(ours, "=");
    if (strncmp(theirs, ours, key_length + 1) != 0)
        die(EXIT_USAGE,
            "%s: expected %.*s in its metadata, found \"%.*s\"; another version of cnn wrote it: "
            "start afresh from its weights with --load",
            path, (int)key_length, ours, found, theirs);
    if (found != length || strncmp(ours, theirs, (size_t)length) != 0)
        die(EXIT_USAGE,
            "%s was saved with %.*s, but this run has %.*s; use the checkpoint's value (--gpus, "
            "--replicas or mpirun set devices), or start afresh from its weights with --load",
            path, found, theirs, length, ours);
}

static const char *line_after(const char *line) {
    line += strcspn(line, "\n");
    return *line ? line + 1 : line;
}

// Dies unless the checkpoint's metadata is what this run would write at the same position.
static void compare_with_checkpoint(const Run *run, const TensorFile *f) {
    const char *theirs = f->metadata;
    char metadata[METADATA_SIZE];
    run_metadata(run, metadata);
    const char *ours = metadata;
    while (*ours) {
        compare_lines(f->path, theirs, ours);
        theirs = line_after(theirs);
        ours = line_after(ours);
    }
}

// Reads the sums of the epoch so far, if the metadata has them.
static void read_epoch_sums(EpochResult *e, const char *metadata) {
    const char *line = strstr(metadata, "\nimages=");
    if (line)
        sscanf(line, " images=%18zu train_loss=%lf train_correct=%lf", &e->images,
               &e->train_loss_sum, &e->train_correct);
}

// Reads fp16's loss scale, if the metadata has it, and copies it to the device.
static void read_loss_scale(Run *run, const char *metadata) {
    LossScale *scale = &run->loss_scale;
    const char *line = strstr(metadata, "\nloss_scale=");
    if (!line || run->kernels->precision != FP16)
        return;
    sscanf(line, " loss_scale=%f,%u", &scale->scale, &scale->steps);
    run->device->copy(run->net.loss_scale, scale, sizeof *scale);
}

static _Noreturn void die_no_position(const TensorFile *f) {
    die(1, "%s: expected the position of a run in its metadata, found \"%.*s\"", f->path,
        (int)strcspn(f->metadata, "\n"), f->metadata);
}

// Reads the position, and what else changes during a run, from a checkpoint's metadata. Then
// compares that metadata with what this run would write: since the run now has the
// checkpoint's position, only settings can differ.
static void read_position(Run *run, const TensorFile *f) {
    static const char format[] = "format=pt epoch=%9zu batch=%9zu";
    const int numbers = sscanf(f->metadata, format, &run->epoch, &run->batch_index);
    if (numbers != 2 || run->epoch == 0)
        die_no_position(f);
    read_epoch_sums(&run->epoch_result, f->metadata);
    read_loss_scale(run, f->metadata);
    compare_with_checkpoint(run, f);
    if (run->batch_index >= run->epoch_steps) // epoch_steps depends on the settings
        die_no_position(f);
}

// Continues from the checkpoint, if it exists. The settings that determine the result must agree.
static void resume_checkpoint(Run *run) {
    const char *path = run->settings.checkpoint;
    const bool prints = run->comm.rank == 0;
    TensorFile f;
    const bool exists = open_tensors(&f, path);
    if (!exists) {
        if (run->settings.eval)
            die_file("cannot resume from", path);
        if (prints)
            printf("No checkpoint %s yet: starting at epoch 1\n", path);
        return;
    }
    read_position(run, &f);
    read_tensors(&f, &run->net, &optimizers[run->settings.optimizer], run->optimizer_state);
    if (prints)
        printf("Resuming from %s: epoch %zu, step %zu\n", path, run->epoch, run->batch_index + 1);
}

// ---- Settings that depend on each other

// Parses --save-every: "2" stands for every 2 epochs, "100steps" for every 100 steps.
static void parse_save_every(Run *run) {
    const char *text = run->settings.save_every;
    const size_t digits = strspn(text, "0123456789");
    const char *unit = text + digits;
    const bool by_steps = strcmp(unit, "steps") == 0;
    const size_t number = strtoul(text, NULL, 10);
    const bool is_number = digits >= 1 && digits <= 9 && number > 0;
    const bool is_unit = !*unit || by_steps;
    if (!is_number || !is_unit)
        die(EXIT_USAGE, "--save-every: expected epochs, such as 2, or 100steps, found \"%s\"",
            text);
    run->checkpointing.every = number;
    run->checkpointing.by_steps = by_steps;
}

// Refuses options that contradict each other.
static void check_contradictions(const Settings *s) {
    const bool sgd = s->optimizer == SGD;
    const bool has_checkpoint = *s->checkpoint != 0, reads_weights = s->resume || *s->load;
    const struct {
        bool broken;
        const char *expected, *option; // the message, and the option whose value it shows
    } rules[] = {
        {s->warmup_epochs >= s->epochs && s->warmup_epochs > 0,
         "--warmup-epochs: expected fewer than --epochs", "--warmup-epochs"},
        {s->nesterov && !sgd, "--nesterov: expected --optimizer sgd", "--optimizer"},
        {s->nesterov && s->momentum == 0, "--nesterov: expected --momentum above 0", "--momentum"},
        {s->momentum > 0 && !sgd,
         "--momentum: expected --optimizer sgd, or --momentum 0 if the model's default sets it",
         "--optimizer"},
        {s->resume && !has_checkpoint, "--resume: expected --checkpoint FILE too", "--checkpoint"},
        {strcmp(s->save_every, "1") != 0 && !has_checkpoint,
         "--save-every: expected --checkpoint FILE too", "--checkpoint"},
        {s->eval && has_checkpoint && !reads_weights,
         "--eval: expected --resume or --load too, to read weights", "--load"},
        {s->gpus > 0 && s->replicas > 1, "--gpus: expected no --replicas, which are for the CPU",
         "--replicas"}};
    char text[OPTION_TEXT_SIZE];
    for (size_t i = 0; i < LENGTH(rules); i++)
        if (rules[i].broken)
            die(EXIT_USAGE, "%s, found %s \"%s\"; see ./cnn --help", rules[i].expected,
                rules[i].option, option_text_by_name(text, s, rules[i].option));
}

// Turns off the outputs of a rank other than 0: only rank 0 writes to the run folder and reports.
static void silence_rank(Settings *s) {
    s->out = "";
    s->save_model = false;
    s->per_class = false;
    s->profile = false;
    s->layers = false;
}

// Returns a second stream to the standard output, for what is printed even with --quiet.
static FILE *second_stdout(void) {
    const int fd = dup(STDOUT_FILENO);
    if (fd < 0)
        die_file("cannot write to", "standard output");
    // Fails if stdout is closed or broken; fdopen() would report only EINVAL.
    const ssize_t written = write(fd, "", 0);
    if (written < 0)
        die_file("cannot write to", "standard output");
    FILE *f = fdopen(fd, "w");
    if (!f)
        die_file("cannot write to", "standard output");
    return f;
}

// ---- Ranks

// Sets the number of ranks and how they communicate. They are processes if a launcher started
// several, and threads otherwise.
static void join_ranks(Communicator *c, Settings *s) {
    c->settings = s;
    c->world = max_size(max_size(s->gpus, s->replicas), 1);
    if (s->replicas > 1)
        s->no_cuda = true; // replicas compute on the CPU; this shows in the settings
    const bool launched = join_mpi(c);
    c->dp = c->world > 1 && s->parallel == DP;
    if (launched && (s->gpus > 1 || s->replicas > 1 || c->dp))
        die(EXIT_USAGE, "%zu MPI ranks: expected --parallel ddp, without --gpus or --replicas",
            c->world);
    if (c->world > 1 && !launched) {
        c->team = must_alloc(sizeof *c->team, "the ranks");
        team_init(c->team);
        c->team->comms[0] = c;
    }
    c->replicas = launched ? 1 : c->world;
}

// Discards what is printed to stdout, except by rank 0 without --quiet. With --quiet, rank 0 still
// prints what was asked for, to `results`.
static void redirect_output(Recorder *r, size_t rank, bool quiet) {
    r->results = stdout;
    if (quiet)
        r->results = second_stdout();
    if (rank == 0 && !quiet)
        return;
    if (!freopen("/dev/null", "w", stdout))
        die_file("cannot open", "/dev/null");
}

// Returns how many ranks load images for training: all of them or, under dp, only the master.
static size_t count_loaders(const Communicator *c) {
    return c->dp ? 1 : c->world;
}

// Sets the number of images in a step: on all devices together (--global-batch) and for each loader
// (--batch-size).
static void setup_batch(Run *run) {
    Settings *s = &run->settings;
    const size_t world = run->comm.world, loaders = count_loaders(&run->comm);
    if (s->global_batch == 0)
        s->global_batch = s->batch_size * loaders;
    if (s->global_batch % loaders != 0)
        die(EXIT_USAGE,
            "--global-batch: expected a multiple of the %zu devices, such as %zu, found %zu", world,
            ceil_div(s->global_batch, world) * world, s->global_batch);
    s->batch_size = s->global_batch / loaders;
    run->batch_per_device = ceil_div(s->global_batch, world);
    if (s->test_batch_size == 0)
        s->test_batch_size = run->batch_per_device;
}

// Sets --lr. --lr-scaling multiplies it by the size of the whole batch / the model's default batch
// size, or by the square root of that ratio.
static void setup_learning_rate(Settings *s, size_t default_batch_size) {
    const double factor = (double)s->global_batch / (double)default_batch_size;
    if (s->lr == 0)
        s->lr = optimizers[s->optimizer].lr;
    if (s->lr_scaling == SCALE_LR_LINEAR)
        s->lr *= factor;
    if (s->lr_scaling == SCALE_LR_SQRT)
        s->lr *= sqrt(factor);
}

// Sets --threads and --workers of a rank; the ranks of this process divide the cores.
static void setup_threads(Settings *s, size_t local_ranks) {
    const size_t cores = usable_cores(), slurm = environment_number("SLURM_CPUS_PER_TASK");
    const size_t openmp = environment_number("OMP_NUM_THREADS");
    const size_t default_threads = openmp ? openmp : cores;
    const size_t default_workers = max_size(1, slurm / local_ranks);
    if (s->threads == 0)
        s->threads = min_size(default_threads, MAX_THREADS);
    s->threads = max_size(1, s->threads / local_ranks);
    if (s->workers == 0)
        s->workers = min_size(default_workers, MAX_WORKERS);
    if (s->workers > cores)
        fprintf(stderr, "cnn: warning: --workers %zu will compete for the %zu usable cores\n",
                s->workers, cores);
    set_num_threads(s->threads);
}

// Parses the options and determines those that have no default in the table.
static void setup_settings(Run *run, int argc, char **argv) {
    Settings *s = &run->settings;
    const size_t default_batch_size = parse_options(s, argc, argv);
    check_contradictions(s);
    join_ranks(&run->comm, s);
    if (run->comm.rank > 0)
        silence_rank(s);
    redirect_output(&run->recorder, run->comm.rank, s->quiet);
    parse_save_every(run);
    parse_trace_steps(run);
    run->recorder.argc = argc;
    run->recorder.argv = argv;
    run->model = find_model(s->model);
    setup_batch(run);
    setup_learning_rate(s, default_batch_size);
    setup_threads(s, run->comm.replicas);
}

// ---- Devices and kernels

// Makes the calling thread compute on this rank's device. If several ranks of this process share
// a GPU, each may use an equal part of its memory.
static void use_device(Run *run) {
    const Communicator *c = &run->comm;
    const size_t ranks_per_device = run->device->is_gpu ? ceil_div(c->replicas, run->devices) : 1;
    run->device->use(c->replica, c->device_number, die);
    run->device->describe(&run->device_info);
    run->device_info.memory /= (double)ranks_per_device;
}

// Returns the i-th table of kernels of a GPU or of the CPU, or NULL after the last one. The tables
// are in ascending order of preference: choose_kernels() takes the last one that fits.
static const Kernels *kernels_of(bool gpu, size_t i) {
    if (gpu)
        return cuda_kernels(i);
    return i < CPU_KERNELS ? cpu_kernels[i] : NULL;
}

// Writes the kernels of a device to `list`, such as "naive in fp32, fast in fp32".
static void list_kernels(char *list, size_t size, bool gpu) {
    size_t length = 0;
    for (size_t i = 0; kernels_of(gpu, i); i++) {
        const Kernels *k = kernels_of(gpu, i);
        const char *separator = i > 0 ? ", " : "";
        length += (size_t)snprintf(list + length, size - length, "%s%s in %s", separator,
                                   choice_word("--kernels", (int)k->choice),
                                   choice_word("--precision", (int)k->precision));
    }
}

// Returns the word that the user chose for an option, or "(any)".
static const char *chosen_word(const char *option, int number) {
    return number == NOT_CHOSEN ? "(any)" : choice_word(option, number);
}

// Dies, since this device has no kernels that match --kernels and --precision.
static _Noreturn void refuse_kernels(const Settings *s, bool gpu) {
    const char *device = gpu ? "a GPU" : "a CPU";
    char list[256];
    if (!gpu && s->kernels == FAST && CPU_KERNELS == 1)
        die(EXIT_USAGE, "--kernels fast: cnn_kernels.c was not beside cnn.c when it was compiled; "
                        "expected --kernels naive");
    list_kernels(list, sizeof list, gpu);
    die(EXIT_USAGE, "--kernels %s --precision %s: expected one of these on %s: %s",
        chosen_word("--kernels", (int)s->kernels), chosen_word("--precision", (int)s->precision),
        device, list);
}

// Returns the best kernels of this device that --kernels and --precision allow: with neither
// option, the best ones in fp32; with --kernels tensor alone, those in tf32.
static const Kernels *choose_kernels(const Settings *s, bool gpu) {
    const bool any = s->kernels == KERNELS_BEST && s->precision == PRECISION_BEST;
    const Precision precision = any ? FP32 : s->precision;
    const Kernels *found = NULL;
    for (size_t i = 0; kernels_of(gpu, i); i++) {
        const Kernels *k = kernels_of(gpu, i);
        const bool named = s->kernels == KERNELS_BEST || s->kernels == k->choice;
        if (named && (precision == PRECISION_BEST || precision == k->precision))
            found = k;
    }
    if (!found)
        refuse_kernels(s, gpu);
    return found;
}

// Dies if this device lacks what an option asks for.
static void check_device(const Run *run, const char *why_not) {
    const Settings *s = &run->settings;
    const struct {
        bool asked;
        const char *option;
    } gpu_only[] = {{s->graph, "--graph on"},
                    {s->autotune, "--autotune on"},
                    {s->layout == NCHW, "--layout nchw"}};
    for (size_t i = 0; i < LENGTH(gpu_only); i++)
        if (gpu_only[i].asked && !run->device->is_gpu)
            die(EXIT_USAGE, "%s: expected a GPU, found the CPU (%s)", gpu_only[i].option, why_not);
    const char *precision = choice_word("--precision", (int)run->kernels->precision);
    if (run->kernels->choice == TENSOR && !run->device_info.tensor_cores[run->kernels->precision])
        die(EXIT_USAGE,
            "--kernels tensor: expected a GPU with tensor cores that cnn uses in %s (sm_80 or "
            "newer; fp16: sm_75), found %s; use --kernels tiled --precision fp32",
            precision, run->device_info.name);
}

// Turns --graph off with several devices, and with --profile, --trace or --layers, since a step
// that is launched as one CUDA graph cannot be observed from inside.
static void setup_graph(Run *run) {
    Settings *s = &run->settings;
    const bool observed = s->profile || *s->trace || s->layers;
    if (s->graph && (observed || run->comm.world > 1)) {
        printf("CUDA graph: off, because it cannot be combined with several devices, --profile, "
               "--trace or --layers\n");
        s->graph = false;
    }
}

static void print_device(const Run *run, const char *why_not) {
    const Settings *s = &run->settings;
    printf("Device: %s", run->device_info.name);
    if (!run->device->is_gpu)
        printf(" (%s)", why_not);
    printf(", --kernels %s, --precision %s, --threads %zu, --workers %zu\n",
           choice_word("--kernels", (int)s->kernels), choice_word("--precision", (int)s->precision),
           s->threads, s->workers);
    if (run->device_info.emulated)
        printf("Emulated: CUDA code on the CPU. Results are valid; times mean nothing.\n");
}

// Returns the number of GPUs that a run may use. If there is none, returns 0 and stores the reason.
static size_t count_gpus(const Settings *s, const char **why_not) {
    const bool is_built_in = cuda_kernels != NULL; // a weak function: see section 3
    if (s->replicas > 1)
        *why_not = "--replicas";
    else if (s->no_cuda)
        *why_not = "--no-cuda";
    else if (!is_built_in)
        *why_not = "built without CUDA";
    else
        return cuda_kernels(0)->device->count(why_not);
    return 0;
}

// Chooses devices and kernels: GPUs if there are any and --no-cuda is not given, otherwise the CPU.
// Stores the reason if there is no GPU.
static void choose_device(Run *run, const char **why_not) {
    Settings *s = &run->settings;
    Communicator *c = &run->comm;
    const size_t gpus = count_gpus(s, why_not);
    if (s->gpus > 0 && !gpus)
        die(EXIT_USAGE, "--gpus %zu: found no GPU (%s); --replicas %zu does the same on the CPU",
            s->gpus, *why_not, s->gpus);
    run->kernels = choose_kernels(s, gpus > 0);
    run->device = run->kernels->device;
    run->devices = gpus ? gpus : usable_cores();
    const char *option = s->gpus > 0 ? "--gpus" : "--replicas";
    if (c->replicas > run->devices && !s->oversubscribe)
        die(EXIT_USAGE, "%s %zu: expected at most the %zu found here; --oversubscribe shares them",
            option, c->world, run->devices);
    if (gpus > 0)
        s->gpus = max_size(s->gpus, 1);
    s->kernels = run->kernels->choice; // --resume compares both options
    s->precision = run->kernels->precision;
    c->device_number %= run->devices;
}

// Sets up this rank's device and kernels.
static void setup_device(Run *run) {
    const char *why_not;
    choose_device(run, &why_not);
    use_device(run);
    check_device(run, why_not);
    print_device(run, why_not);
    setup_graph(run);
}

// ---- Data

// Loads the training set or the test set from a folder, or generates its images if `dir` is NULL.
// The set has at most `limit` images; 0 means no limit.
static void load_set(Dataset *set, const DatasetInfo *info, const char *dir, Split split,
                     size_t limit) {
    const size_t most = limit ? limit : UINT32_MAX;
    set->info = info;
    if (dir)
        info->read(set, dir, split, most);
    else
        make_synthetic(set, split, most);
}

// Dies unless --resize is a multiple of the height of the data set's images.
static void check_resize(const DatasetInfo *info, size_t resize) {
    if (resize % info->shape.h != 0)
        die(EXIT_USAGE,
            "--resize: expected a multiple of the %zu x %zu pixels of the images of %s, such as "
            "224, found %zu",
            info->shape.h, info->shape.w, info->name, resize);
}

// Loads a data set from a folder, or generates its images if `dir` is NULL.
static void load_dataset(Run *run, const char *name, const char *dir) {
    Settings *s = &run->settings;
    if (dir)
        printf("Data: %s from %s\n", name, dir);
    else
        printf("Data: %s (generated images)\n", name);
    run->dataset_info = dataset_for(run->model, name);
    check_resize(&run->dataset_info, s->resize);
    load_set(&run->train_set, &run->dataset_info, dir, TRAINING_SET, s->limit_train);
    load_set(&run->test_set, &run->dataset_info, dir, TEST_SET, s->limit_test);
    s->limit_train = run->train_set.count; // checkpoints and run.json hold what was loaded
    s->limit_test = run->test_set.count;
    s->dataset = run->dataset_info.name;
    printf("Train set size: %zu\nTest set size: %zu\n", run->train_set.count, run->test_set.count);
}

// Loads a data set if its files are found; returns whether they are. "synthetic" needs no files,
// but does not stand in for those of --data DIR.
static bool try_dataset(Run *run, const char *name) {
    const Settings *s = &run->settings;
    const bool generated = strcmp(name, "synthetic") == 0;
    const bool may_generate = !*s->data || strcmp(s->dataset, name) == 0;
    char dir[PATH_SIZE] = "";
    const bool found = generated ? may_generate : find_data_dir(dir, name, s);
    if (found)
        load_dataset(run, name, generated ? NULL : dir);
    return found;
}

// Loads the data set. With --dataset auto, tries the model's data sets in order and loads the first
// one that is found. The last one in this list is "synthetic".
static void setup_data(Run *run) {
    const Settings *s = &run->settings;
    const bool automatic = strcmp(s->dataset, "auto") == 0;
    char where[PATH_SIZE] = "./data, the folder data beside ./cnn, or /usr/share/datasets";
    char names[128], *rest;
    snprintf(names, sizeof names, "%s", automatic ? run->model->datasets : s->dataset);
    const char *name = strtok_r(names, " ", &rest); // `names` now ends after the first one
    while (name) {
        const bool loaded = try_dataset(run, name);
        if (loaded)
            return;
        name = strtok_r(NULL, " ", &rest);
    }
    if (*s->data)
        snprintf(where, sizeof where, "%s/%s or, with --dataset %s, in %s", s->data, names, names,
                 s->data);
    die(1,
        "%s: expected %s (or .gz), found none in %s; run: data/get_data.sh %s, or use "
        "--dataset synthetic",
        names, find_dataset_info(names)->files[0][0], where, names);
}

// ---- Memory: planned, printed, and only then allocated

// Returns this rank's share of the bytes of the images and labels, which are already in memory and
// shared by the replicas of a process.
static double data_bytes(const Run *run) {
    const double images = (double)(run->train_set.count + run->test_set.count);
    const double bytes = images * (double)(shape_size(run->dataset_info.shape) + 1);
    return bytes / (double)run->comm.replicas;
}

// Returns how many bytes of memory this rank has planned for a use; if on_device, only those on the
// device.
static double run_bytes(const Run *run, MemoryUse use, bool on_device) {
    const MemoryPlan *plans[] = {&run->net.plan, &run->plan, &run->comm.plan,
                                 &run->train_loader.plan, &run->test_loader.plan};
    const bool with_data = !on_device && (use == FOR_DATA || use == FOR_ANYTHING);
    double bytes = with_data ? data_bytes(run) : 0;
    for (size_t p = 0; p < LENGTH(plans); p++)
        for (size_t i = 0; i < plans[p]->count; i++) {
            const bool wanted = use == FOR_ANYTHING || use == plans[p]->arenas[i].use;
            if (wanted && (!on_device || plans[p]->arenas[i].where == DEVICE_MEMORY))
                bytes += (double)plans[p]->arenas[i].bytes;
        }
    return bytes;
}

static void plan_loaders(Run *run, bool resident) {
    const Settings *s = &run->settings;
    const Communicator *c = &run->comm;
    const size_t train_batch = min_size(s->batch_size, run->epoch_images);
    Consumer consumer = {.device = run->device,
                         .device_number = c->device_number,
                         .pinned = s->pin_memory && run->device->is_gpu,
                         .resident = resident,
                         .rank = c->rank,
                         .ranks = c->world,
                         .resize = s->resize};
    loader_plan(&run->test_loader, &run->test_set, run->net.max_test_batch, s->workers,
                AUGMENT_NONE, consumer);
    if (c->dp)
        consumer.ranks = 1; // the master loads for all
    if (loads_training_data(c))
        loader_plan(&run->train_loader, &run->train_set, train_batch, s->workers, s->augment,
                    consumer);
}

// Returns how many numbers a test sums over all ranks.
static size_t count_totals(const Run *run) {
    return PREDICTIONS + run->test_set.count;
}

// Plans the memory of the run itself, for the optimizer's state, results and measurements.
static void plan_buffers(Run *run) {
    const Settings *s = &run->settings;
    MemoryPlan *p = &run->plan;
    const size_t steps = run->comm.world * run->recorder.steps_capacity;
    const size_t states = count_states(&optimizers[s->optimizer], s) * run->net.param_size;
    *p = (MemoryPlan){.device = run->device};
    memory_plan_add(p, &run->totals, (1 + run->comm.world) * count_totals(run) * sizeof(double),
                    HOST_MEMORY, FOR_BUFFERS);
    memory_plan_add(p, &run->recorder.all_steps, steps * sizeof *run->recorder.steps, HOST_MEMORY,
                    FOR_BUFFERS);
    memory_plan_add(p, &run->optimizer_state, states * sizeof(real), DEVICE_MEMORY, FOR_OPTIMIZER);
    if (s->layers) {
        memory_plan_add(p, &run->bandwidth_arrays[0],
                        BANDWIDTH_NUMBERS * run->kernels->element_bytes, DEVICE_MEMORY,
                        FOR_BUFFERS);
        memory_plan_add(p, &run->bandwidth_arrays[1],
                        BANDWIDTH_NUMBERS * run->kernels->element_bytes, DEVICE_MEMORY,
                        FOR_BUFFERS);
    }
    if (*s->trace && run->comm.replica == 0)
        memory_plan_add(p, &trace.events, TRACE_EVENTS * sizeof *trace.events, HOST_MEMORY,
                        FOR_BUFFERS);
}

// Sets how many images and steps an epoch has for this rank.
static void setup_epoch(Run *run) {
    const Settings *s = &run->settings;
    run->epoch_images = ceil_div(run->train_set.count, count_loaders(&run->comm));
    run->epoch_steps = ceil_div(run->epoch_images, s->batch_size);
    // One more: after log_step() has written the others, the rest of a step is charged to it
    run->recorder.steps_capacity = min_size(s->log_interval, run->epoch_steps) + 1;
}

// Plans what this rank will allocate, with the data set on the device if `resident`. Returns how
// many bytes will be on the device; on a CPU, how many there will be in all. May be called several
// times: each call makes the plans anew.
static double plan_run(Run *run, bool resident) {
    const Settings *s = &run->settings;
    Net *net = &run->net;
    net_build(net, run->model, &run->dataset_info, s, run->kernels);
    plan_net(net, min_size(run->batch_per_device, run->train_set.count),
             min_size(s->test_batch_size, run->test_set.count));
    plan_loaders(run, resident);
    comm_plan(&run->comm, net, &run->train_loader);
    plan_buffers(run);
    return run_bytes(run, FOR_ANYTHING, run->device->is_gpu);
}

// Plans the run. The data set stays on the device if more than 10 % of the memory then remains
// free, or if copying the data set batch by batch would not save memory. Returns the bytes on the
// device, as plan_run() does.
static double plan_residency(Run *run) {
    enum { COPY_BATCHES = false, RESIDENT = true };
    if (!run->settings.resident || !run->device->is_gpu || run->comm.dp)
        return plan_run(run, COPY_BATCHES);
    const double resident = plan_run(run, RESIDENT);
    if (resident < .9 * run->device_info.memory)
        return resident;
    const double copied = plan_run(run, COPY_BATCHES);
    if (copied < resident)
        return copied;
    return plan_run(run, RESIDENT);
}

static void print_memory(const Run *run) {
    const char *of_what = run->comm.world > 1 ? " of each device" : "";
    printf("Memory in MB%s:", of_what);
    for (MemoryUse use = 0; use < MEMORY_USES; use++)
        printf(" %s %.1f,", memory_uses[use], run_bytes(run, use, false) / 1e6);
    printf(" together %.1f\n", run_bytes(run, FOR_ANYTHING, false) / 1e6);
}

// Dies if more bytes are needed than a device, or the machine, has.
static void check_memory(const Run *run, double needed, double available, const char *where,
                         const char *name) {
    if (needed > available)
        die(1,
            "not enough memory: %.1f MB needed, %.1f MB available on %s (%s); try a --batch-size "
            "below %zu, a smaller --test-batch-size, fewer --workers or a smaller --model",
            needed / 1e6, available / 1e6, where, name, run->settings.batch_size);
}

// Returns how many bytes of the host's memory the ranks of this process have planned so far,
// including `bytes` of this rank.
static double add_host_bytes(const Communicator *c, double bytes) {
    if (!c->team)
        return bytes;
    return (double)__atomic_add_fetch(&c->team->host_bytes, (size_t)bytes, __ATOMIC_RELAXED);
}

// Plans the memory and refuses what cannot fit. Rank 0 prints the plan.
static void plan_and_check_memory(Run *run) {
    const bool gpu = run->device->is_gpu;
    const double on_device = plan_residency(run);
    const double all = run_bytes(run, FOR_ANYTHING, false);
    const double on_host = gpu ? all - on_device : all;
    const double on_host_so_far = add_host_bytes(&run->comm, on_host);
    const bool prints = run->comm.rank == 0;
    if (prints) {
        print_summary(&run->net);
        print_memory(run);
    }
    check_memory(run, on_device, run->device_info.memory, "this device", run->device_info.name);
    check_memory(run, on_host_so_far, memory_limit(), "this machine", host_name());
    const bool resident = run->train_loader.consumer.resident;
    const char *place = resident ? "resident there" : "copied there batch by batch";
    if (gpu && prints)
        printf("On the device: %.1f MB; the data set is %s\n", on_device / 1e6, place);
}

// Plans, prints and allocates the memory of this rank, and starts its loaders.
static void setup_memory(Run *run) {
    Recorder *r = &run->recorder;
    plan_and_check_memory(run);
    net_alloc(&run->net);
    memory_plan_alloc(&run->plan);
    r->steps = r->all_steps + run->comm.rank * r->steps_capacity;
    if (loads_training_data(&run->comm))
        loader_init(&run->train_loader);
    loader_init(&run->test_loader);
    memory_plan_alloc(&run->comm.plan);
}

static void setup_clock(Run *run) {
    run->clock = (LineClock){
        .device = run->device, .rank = run->comm.rank, .synchronize = run->settings.profile};
}

static void free_run(Run *run) {
    if (loads_training_data(&run->comm))
        loader_free(&run->train_loader);
    loader_free(&run->test_loader);
    comm_free(&run->comm);
    for (size_t i = 0; i < STEP_KINDS; i++)
        run->device->free_graph(run->graphs.graph[i]);
    memory_plan_free(&run->plan);
    memory_plan_free(&run->net.plan);
}

// ---- Outputs

// path = the file that --save-model writes
static void model_path(const Run *run, char path[PATH_SIZE]) {
    if (*run->settings.out)
        join_path(path, run->settings.out, "model.safetensors");
    else
        snprintf(path, PATH_SIZE, "%s_cnn.safetensors", run->model->name);
}

static void save_model(Run *run) {
    char path[PATH_SIZE];
    model_path(run, path);
    save_tensors(&run->net, NULL, NULL, "format=pt\n", path);
    printf("Saved the weights to %s\n", path);
}

// Dies now, not after hours of training, if this file cannot be written.
static void check_writable(const char *path) {
    AtomicFile f;
    atomic_open(&f, path);
    fclose(f.stream);
    unlink(f.temporary);
    unfinished = NULL;
}

// Opens and locks the file `path`, which is beside the checkpoint.
static int open_lock(const char *path, const char *checkpoint) {
    const int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0)
        die_file("cannot create", path);
    if (!lock_for_this_run(fd))
        die(1, "--checkpoint %s: another run is writing to it; choose another file", checkpoint);
    return fd;
}

// Returns whether an open file still has a name, so that another process that opens this name gets
// the same file. If this cannot be determined, returns true.
static bool has_name(int fd) {
    struct stat file;
    const int error = fstat(fd, &file);
    return error || file.st_nlink > 0;
}

// Locks the checkpoint until this run ends. The lock is on a file beside the checkpoint, since each
// save replaces the checkpoint itself.
static void lock_checkpoint(const char *checkpoint) {
    char target[PATH_SIZE], path[sizeof lock_file];
    resolve_path(target, checkpoint);
    snprintf(path, sizeof path, "%s.lock", target);
    int fd = open_lock(path, checkpoint); // stays open
    while (!has_name(fd)) {               // the run that held the lock removed the file as it ended
        close(fd);
        fd = open_lock(path, checkpoint);
    }
    strcpy(lock_file, path);
}

// Dies if another output of the run, which is written at its end, would replace the checkpoint.
static void require_not_checkpoint(const char *option, const char *path, const char *checkpoint) {
    char output[PATH_SIZE], saved[PATH_SIZE];
    resolve_path(output, path);
    resolve_path(saved, checkpoint);
    if (*checkpoint && strcmp(output, saved) == 0)
        die(EXIT_USAGE, "%s: expected a different file from --checkpoint, found \"%s\"", option,
            path);
}

// Dies if an output of the run cannot be written.
static void check_outputs(const Run *run) {
    const Settings *s = &run->settings;
    char path[PATH_SIZE];
    model_path(run, path);
    if (s->save_model) {
        check_writable(path);
        require_not_checkpoint("--save-model", path, s->checkpoint);
    }
    if (*s->trace) {
        check_writable(s->trace);
        require_not_checkpoint("--trace", s->trace, s->checkpoint);
    }
    if (*s->checkpoint && !s->eval) {
        lock_checkpoint(s->checkpoint);
        check_writable(s->checkpoint);
    }
}

// ---- Initial weights

// net.load_state_dict(load_file(path))
static void load_weights(Run *run, const char *path) {
    TensorFile f;
    const bool exists = open_tensors(&f, path);
    if (!exists)
        die_file("cannot read", path);
    read_tensors(&f, &run->net, NULL, NULL);
    if (run->comm.rank == 0)
        printf("Loaded the weights in %s\n", path);
}

// Sets the position of the run, and its weights. The weights are random or from --load; a run that
// resumes has both position and weights from the checkpoint.
static void setup_weights(Run *run) {
    const Settings *s = &run->settings;
    run->epoch = 1;
    init_weights(&run->net, s->seed);
    if (*s->load)
        load_weights(run, s->load);
    if (s->resume)
        resume_checkpoint(run);
}

// ---- Do the ranks agree?

// Where a rank runs
typedef struct Location {
    char host[256];
    DeviceInfo device;
} Location;

// Dies if two processes share a GPU, which is most likely a mistake.
static void check_shared_gpus(const Location *locations, size_t count) {
    for (size_t r = 0; r < count; r++)
        for (size_t k = 0; k < r; k++)
            if (strcmp(locations[r].device.uuid, locations[k].device.uuid) == 0 &&
                strcmp(locations[r].host, locations[k].host) == 0)
                die(EXIT_USAGE, "ranks %zu and %zu share a GPU on %s; add GPUs or --oversubscribe",
                    k, r, locations[r].host);
}

static const char *who_adds_gradients(const Communicator *c) {
    if (c->dp)
        return "the master";
    if (uses_nccl(c))
        return "NCCL";
    if (c->team)
        return "a ring of threads";
    return "a ring of MPI processes";
}

static void print_locations(const Run *run, const Location *locations) {
    const Communicator *c = &run->comm;
    for (size_t r = 0; r < c->world; r++) {
        const DeviceInfo *d = &locations[r].device;
        const char *separator = *d->uuid ? ", " : "";
        printf("Rank %zu: %s, %s%s%s\n", r, locations[r].host, d->name, separator, d->uuid);
    }
    printf("Gradients: %s, added up by %s\n",
           choice_word("--parallel", (int)run->settings.parallel), who_adds_gradients(c));
}

// Prints, on rank 0, the device of each rank, and ends the run if two processes share a GPU. All
// ranks must call it.
static void check_and_print_ranks(Run *run) {
    Communicator *c = &run->comm;
    const char *node = getenv("SLURMD_NODENAME"); // the name that Slurm's users know
    if (c->world == 1)
        return;
    Location *locations = must_alloc(c->world * sizeof *locations, "the list of ranks");
    Location *own = &locations[c->rank];
    own->device = run->device_info;
    snprintf(own->host, sizeof own->host, "%s", node ? node : host_name());
    all_gather(c, locations, sizeof *locations);
    if (!c->team && !c->settings->oversubscribe && *run->device_info.uuid)
        check_shared_gpus(locations, c->world);
    if (c->rank == 0)
        print_locations(run, locations);
    free(locations);
}

// Dies unless settings, positions and weights are the same on all ranks, since ranks that are
// processes have their own command lines and files. All ranks must call it.
static void check_ranks_agree(Run *run) {
    const Settings *s = &run->settings;
    char metadata[METADATA_SIZE];
    run_metadata(run, metadata);
    uint64_t hash = hash_bytes(HASH_START, metadata, strlen(metadata));
    // Settings that are not in checkpoints, but that must be the same on all ranks
    const size_t other_settings[] = {s->epochs, s->max_steps,  s->log_interval, s->test_batch_size,
                                     s->eval,   s->limit_test, s->dry_run,      s->oversubscribe};
    hash = hash_bytes(hash, s->save_every, strlen(s->save_every));
    require_equal_on_ranks(&run->comm, "settings or its position in the run",
                           hash_bytes(hash, other_settings, sizeof other_settings));
    require_equal_on_ranks(&run->comm, "weights", hash_weights(&run->net));
}

/* ==== 15. train(), test(), main() ================================================================

   The program itself: each function here makes a few calls to functions of the sections above. */

// optimizer.step(). On a CPU the gradients are checked first, but only at the log interval, since
// the check reads all of them. Under dp only the master makes the update; dp_load() copies its
// parameters to the other ranks.
static void update_weights(Run *run) {
    if (at_log_interval(run) && !run->device->is_gpu)
        check_gradients_finite(&run->net, run->epoch, run->batch_index + 1);
    if (!run->comm.dp || run->comm.rank == 0)
        optimizer_step(&run->net, run->optimizer_state);
}

// Returns whether the step has all images of a batch (FULL_STEP) or fewer (SHORT_STEP).
static size_t step_kind(const Run *run, const Batch *batch) {
    return batch->n < run->net.max_batch ? SHORT_STEP : FULL_STEP;
}

// Returns whether this step is launched as a CUDA graph. The first such step captures the graph.
static bool uses_graph(const Run *run, const Batch *batch) {
    return run->settings.graph && run->graphs.kernels_loaded[step_kind(run, batch)];
}

// Runs a step as one CUDA graph, which is captured once.
static BatchLoss replay_step(Run *run, const Batch *batch) {
    Net *net = &run->net;
    void **graph = &run->graphs.graph[step_kind(run, batch)];
    if (*graph) {
        net->batches_tracked++; // as forward() does
    } else {
        run->device->begin_capture();
        compute_gradients(net, batch->n);
        update_weights(run);
        *graph = run->device->end_capture();
    }
    run->device->replay(*graph);
    run->device->synchronize();
    const BatchLoss loss = average_losses(net->staging[0], batch->n); // copied by the graph
    check_loss(net, batch, loss);
    return loss;
}

static void start_epoch(Run *run) {
    clock_read_times(&run->clock, 0); // the time since the previous epoch belongs to no step
    memset(run->recorder.steps, 0, run->recorder.steps_capacity * sizeof *run->recorder.steps);
    trace_next_step(run); // the workers begin before the step does
    if (loads_training_data(&run->comm))
        loader_start(&run->train_loader, run->settings.seed, run->epoch, run->batch_index);
}

// Returns whether a signal has asked this run to end.
static bool end_requested(const Run *run) {
    return run->checkpointing.request >= END_REQUEST;
}

// Returns whether a signal has ended the training within an epoch; then no test follows.
static bool stopped_within_epoch(const Run *run) {
    return end_requested(run) && run->batch_index > 0;
}

static bool training_is_over(const Run *run) {
    const Settings *s = &run->settings;
    const bool max_steps_done = s->max_steps && steps_done(run) >= s->max_steps;
    return run->epoch > s->epochs || max_steps_done || end_requested(run);
}

// Returns whether to save a checkpoint at this position: at the interval, or because of a signal.
static bool is_checkpoint_due(const Run *run) {
    const Checkpointing *c = &run->checkpointing;
    const size_t unit = c->by_steps ? 1 : run->epoch_steps; // in steps
    if (c->request)
        return true; // a signal asks for it
    return steps_done(run) % (unit * c->every) == 0;
}

// Advances the position by a step.
static void advance_position(Run *run) {
    run->batch_index++;
    if (run->batch_index < run->epoch_steps)
        return;
    run->epoch++;
    run->batch_index = 0;
}

// Returns whether train() ends after this step, since the epoch or the training is over.
static bool is_last_step(const Run *run) {
    return run->batch_index == 0 || run->settings.dry_run || training_is_over(run);
}

// Ends a step's trace and, after the last of --trace-steps, Nsight's recording; advances the
// position, and saves a checkpoint if one is due. At the end of an epoch, the checkpoint is saved
// later, after the test.
static void finish_step(Run *run, const Batch *batch) {
    trace_step(run);
    run->graphs.kernels_loaded[step_kind(run, batch)] = true;
    advance_position(run);
    const bool records_on = run->tracer.recording && steps_done(run) < run->tracer.end;
    record_for_nsight(run, records_on);
    run->checkpointing.saved = run->batch_index > 0 && is_checkpoint_due(run);
    if (run->checkpointing.saved)
        save_checkpoint(run);
}

/* AT(LOAD, statement) executes the statement. The time it takes is added to this line of the
   profile and to PHASE_LOAD of the step, which is a column of steps.csv; the time of lines after
   log_step() counts toward the next step. The statement may be an assignment. AT uses the variable
   `run` of the function in which it stands. */
#define AT(name, ...)                                                          \
    do {                                                                       \
        double *const phase = &current_step(run)->phases[PHASE_##name];        \
        clock_line(&run->clock, __LINE__ - TRAIN_BEGINS, phase, #__VA_ARGS__); \
        __VA_ARGS__;                                                           \
    } while (0)

enum { TRAIN_BEGINS = __LINE__ + 3 }; // the line with "static void train"

// Trains for one epoch, or for what is left of it.
static void train(Run *run, EpochResult *result) {
    const Settings *s = &run->settings;
    Net *net = &run->net;
    Communicator *comm = &run->comm;
    const Batch *batch;
    BatchLoss loss;
    bool over = false;
    AT(OTHER, start_epoch(run));
    while (!over) {
        AT(OTHER, begin_step(run));
        AT(OTHER, run->lr = learning_rate(s, run->epoch - 1, run->batch_index, run->epoch_steps));
        AT(LOAD, batch = next_batch(comm));
        AT(COPY, load_batch(comm, batch, run->lr));
        if (uses_graph(run, batch)) {
            AT(FORWARD, loss = replay_step(run, batch)); // all of the step, in one launch
        } else {
            AT(FORWARD, forward(net, batch->n, &net->step->key));
            AT(FORWARD, loss = batch_loss(comm, batch));
            AT(OTHER, check_loss(net, batch, loss));
            AT(BACKWARD, backward(net, batch->n));
            AT(EXPOSED_COMM, reduce_gradients(comm));
            AT(OPTIMIZER, update_weights(run));
        }
        AT(OTHER, log_step(run, result, batch, loss));
        AT(OTHER, finish_step(run, batch));
        AT(OTHER, over = is_last_step(run));
    }
    AT(OTHER, finish_epoch(run, result));
    clock_stop(&run->clock);
    set_tracing(run, false);
}
enum { TRAIN_ENDS = __LINE__ - 1 };
_Static_assert(TRAIN_ENDS - TRAIN_BEGINS < PROFILED_LINES,
               "train() is too long; raise PROFILED_LINES");

// Adds up the losses of this rank's share of the test set, and stores its predictions.
static void test_batches(Run *run) {
    Net *net = &run->net;
    double *totals = run->totals;
    loader_start(&run->test_loader, run->settings.seed, TEST_EPOCH, 0);
    const Batch *batch = loader_next(&run->test_loader);
    while (batch) {
        const double images = (double)batch->n;
        net_load(net, batch, 0);
        forward(net, batch->n, NULL);
        const BatchLoss loss = test_loss(net, batch->n);
        store_predictions(net, batch, totals + PREDICTIONS);
        totals[LOSS_SUM] += loss.mean * images;
        totals[IMAGES_TESTED] += images;
        totals[IMAGES_CORRECT] += loss.correct_images;
        batch = loader_next(&run->test_loader);
    }
    net->images = NULL; // was in the loader's memory; from here on, row 0 uses its own again
}

// Tests this rank's share of the test set; the result covers all ranks.
static void test(Run *run, EpochResult *result) {
    double *totals = run->totals;
    const size_t count = count_totals(run);
    const double begin = now();
    memset(totals, 0, count * sizeof *totals);
    broadcast_for_test(&run->comm);
    test_batches(run);
    sum_over_ranks(&run->comm, totals, count, totals + count);
    result->test_loss = totals[LOSS_SUM] / totals[IMAGES_TESTED];
    if (!isfinite(result->test_loss))
        die(1,
            "after step %zu the test loss is %g; the weights may have become too large: try a "
            "smaller --lr. After only a few steps, BatchNorm's running statistics may also still "
            "be far from a batch's: train for more steps",
            steps_done(run), result->test_loss);
    result->accuracy = 100. * totals[IMAGES_CORRECT] / totals[IMAGES_TESTED];
    result->test_seconds = now() - begin;
    if (!run->model->logs_throughput && run->comm.rank == 0)
        printf("\nTest set: Average loss: %.4f, Accuracy: %.0f/%.0f (%.0f%%)\n\n",
               result->test_loss, totals[IMAGES_CORRECT], totals[IMAGES_TESTED], result->accuracy);
}

// Only tests, for --eval or if no training is left to do; reports the test as epoch TEST_EPOCH.
static void evaluate(Run *run) {
    EpochResult result = {.epoch = TEST_EPOCH};
    test(run, &result);
    report_epoch(run, &result);
}

// Trains from the run's position to the end of the epoch.
static void train_epoch(Run *run, EpochResult *result) {
    if (run->batch_index == 0)
        *result = (EpochResult){0};
    result->epoch = run->epoch;
    result->images_resumed = result->images;
    result->images_logged = result->images;
    run->recorder.epoch_start = now();
    run->recorder.log_start = run->recorder.epoch_start;
    train(run, result);
    result->seconds = now() - run->recorder.epoch_start;
}

// Trains from the run's position to its end, and tests after each epoch.
static void train_epochs(Run *run) {
    EpochResult *result = &run->epoch_result;
    run->recorder.first_step = steps_done(run);
    if (run->model->logs_throughput && run->comm.rank == 0)
        printf("INFO - Starting Training Loop...\n");
    while (!training_is_over(run)) {
        train_epoch(run, result);
        if (stopped_within_epoch(run)) {
            // finish_step() has saved this position, unless the request came later.
            if (!run->checkpointing.saved)
                save_checkpoint(run);
            return;
        }
        test(run, result);
        report_epoch(run, result);
        if (is_checkpoint_due(run) || training_is_over(run))
            save_checkpoint(run);
        if (run->settings.dry_run)
            return;
    }
}

// Returns COMPLETE or, if --max-steps or a signal has ended the run early, STOPPED.
static RunStatus final_status(const Run *run) {
    const Settings *s = &run->settings;
    if (stopped_within_epoch(run))
        return STOPPED; // even a --dry-run, since it has not tested
    if (s->eval || s->dry_run || run->epoch > s->epochs)
        return COMPLETE;
    return STOPPED;
}

// Runs a rank, after settings, device and data have been set up.
static void run_rank(Run *run) {
    team_barrier(&run->comm); // ranks that share a GPU have looked how much of its memory is free
    setup_epoch(run);
    setup_memory(run);
    setup_clock(run);
    check_and_print_ranks(run);
    comm_start(&run->comm);
    if (run->comm.rank == 0)
        check_outputs(run);
    // no rank reads the checkpoint before rank 0 has locked it
    require_equal_on_ranks(&run->comm, "outputs", 0);
    setup_weights(run);
    check_ranks_agree(run);
    const bool trains = !run->settings.eval && !training_is_over(run);
    if (*run->settings.out)
        open_logs(run, trains);
    if (run->comm.rank == 0)
        print_settings(&run->settings);
    if (trains)
        train_epochs(run);
    else
        evaluate(run);
    run->recorder.status = final_status(run);
}

static void *replica_main(void *argument) {
    Run *run = argument;
    set_num_threads(run->settings.threads);
    use_device(run);
    run_rank(run);
    free_run(run);
    return NULL;
}

/* Makes `replica`, the run of another rank of this process, a copy of rank 0's run. At this point,
   rank 0's run has allocated only the images and the team. The ranks share these, and run_main()
   frees them. What a replica allocates from then on is its own, and replica_main() frees it. */
static void init_replica(Run *replica, const Run *run, size_t rank) {
    *replica = *run;
    silence_rank(&replica->settings);
    replica->comm.settings = &replica->settings;
    replica->comm.rank = rank;
    replica->comm.replica = rank;
    replica->comm.device_number = rank % run->devices;
    replica->comm.team->comms[rank] = &replica->comm;
}

// Runs all ranks of this process: rank 0 in this thread, every other rank in a thread of its own.
static void run_ranks(Run *run) {
    const size_t others = run->comm.team ? run->comm.world - 1 : 0;
    Run *replicas = must_alloc(others * sizeof *replicas, "the replicas");
    pthread_t threads[MAX_REPLICAS];
    for (size_t i = 0; i < others; i++)
        init_replica(&replicas[i], run, i + 1);
    for (size_t i = 0; i < others; i++)
        start_thread(&threads[i], replica_main, &replicas[i], "a replica");
    run_rank(run);
    for (size_t i = 0; i < others; i++)
        pthread_join(threads[i], NULL);
    free(replicas);
}

// Returns 128 + the number of the signal that has stopped the run, or 0.
static int exit_status(const Run *run) {
    const bool stopped_by_signal = end_requested(run) && run->recorder.status == STOPPED;
    return stopped_by_signal ? run->checkpointing.request : 0;
}

// Prints and writes what the options ask for at the end of a run. If a signal has stopped the run,
// omits the results that need a complete one.
static void write_results(Run *run, int status) {
    const Settings *s = &run->settings;
    const bool finished = status == 0;
    if (s->per_class && finished)
        print_per_class(run);
    if (s->profile)
        write_profile(run, TRAIN_BEGINS, TRAIN_ENDS);
    if (s->save_model)
        save_model(run);
    if (*s->out && finished)
        write_predictions(run);
    write_trace(run);
    if (s->layers && finished)
        measure_layers(run);
    print_resources(run, status);
    flush(run->recorder.results, "standard output");
    write_run_json(run);
}

// Opens /dev/null in place of each closed standard stream, so that no other file gets its number.
static void fill_standard_streams(void) {
    for (int number = STDIN_FILENO; number <= STDERR_FILENO; number++)
        if (fcntl(number, F_GETFD) < 0)
            open("/dev/null", O_RDONLY | O_CLOEXEC); // gets the lowest free number, this one
}

static int run_main(int argc, char **argv) {
    static Run run; // zeroed; too large for the stack
    fill_standard_streams();
    signal(SIGCHLD, SIG_DFL); // if the parent ignored it, pclose() could not tell how gzip ended
    run.recorder.run_start = now();
    setup_settings(&run, argc, argv);
    if (!run.settings.eval)
        catch_signals();
    print_machine();
    setup_device(&run);
    open_run_folder(&run);
    setup_data(&run);
    run_ranks(&run);
    const int status = exit_status(&run);
    write_results(&run, status);
    unlink(lock_file);
    before_dying = NULL; // the run folder is complete
    free_run(&run);
    free(run.comm.team); // shared by the ranks of this process
    free_dataset(&run.train_set);
    free_dataset(&run.test_set);
    return status;
}

#ifndef CNN_NO_MAIN // the tests include this file and bring their own

/* Login and compute nodes may have different CPUs. main() is compiled for any CPU of the family, so
   that it can report a feature that the program was built for and this CPU lacks; otherwise SIGILL
   would kill the program. */
#if defined(__x86_64__)
__attribute__((target("no-avx")))
#endif
int main(int argc, char **argv) {
    const char *missing = NULL;
#ifdef __AVX2__
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        missing = "avx2 and fma";
#endif
#ifdef __AVX512DQ__ // comes with the other extensions of Skylake's AVX-512
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512dq"))
        missing = "avx512f and avx512dq";
#endif
#ifdef __AVX512VBMI__ // since Ice Lake and Zen 4; compilers shuffle bytes with it
    if (!__builtin_cpu_supports("avx512vbmi"))
        missing = "avx512vbmi";
#endif
    if (missing) {
        fprintf(stderr,
                "cnn: error: built for a CPU with %s, which this one lacks; run make clean && make "
                "here or, for both CPUs, make ARCH=x86-64-v3\n",
                missing);
        return 1;
    }
    return run_main(argc, argv);
}
#endif // CNN_NO_MAIN
#endif // CNN_DECLARATIONS_ONLY
