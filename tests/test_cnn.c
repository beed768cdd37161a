/* test_cnn.c - tests of the parts of cnn.c, compiled once with real = float and once = double.

   Prints a line for each test: `pass NAME`, `fail NAME: what` or `skip NAME: why`. QUICK=1 in the
   environment runs fewer shapes. Every number is drawn from a fixed seed: a failure repeats.
   Runs in the repository's root, where it reads tests/golden. */

#define CNN_NO_MAIN
#include "../cnn.c"
#include "check.h"
#include <dlfcn.h>
#include <setjmp.h>
#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED
#endif
#endif

static const bool is_double = sizeof(real) == sizeof(double);
static bool quick;

/* ---- Numbers and arrays --------------------------------------------------------------------- */

enum { BATCH = 7, CLASSES = 4 };     // of the networks that the tests make up
enum { GUARD = 128 / sizeof(real) }; // what host_alloc() leaves behind an array
static const real guard_value = -12345;

// Guard values stand before and behind the numbers, both inside of what host_alloc() gave.
typedef struct Array {
    real *base, *at;
    size_t count;
} Array;

static Array array(size_t count, real guard) {
    Array a = {.count = count};
    a.base = must_alloc((count + ALIGN) * sizeof(real), "a test");
    a.at = a.base + ALIGN; // keeps the alignment of the arenas
    for (size_t i = 0; i < count + ALIGN + GUARD; i++)
        a.base[i] = i - ALIGN < count ? (real)NAN : guard;
    return a;
}

// What lies around an input is NaN: whoever uses it spoils the result.
static Array random_array(size_t count) {
    Array a = array(count, (real)NAN);
    for (size_t i = 0; i < count; i++)
        a.at[i] = draw_real();
    return a;
}

static Array absolute(const Array *from) {
    Array a = array(from->count, (real)NAN);
    for (size_t i = 0; i < a.count; i++)
        a.at[i] = (real)fabs((double)from->at[i]);
    return a;
}

static void check_guards(const char *name, const Array *a) {
    for (size_t i = 0; i < a->count + ALIGN + GUARD; i++)
        if (i - ALIGN >= a->count && a->base[i] != guard_value)
            fail("%s: wrote at index %td of %zu", name, (ptrdiff_t)i - ALIGN, a->count);
}

// Where loaders put batches.
static const Placement on_cpu = {.backend = &backends[1]};

// Settings of networks that are built without a command line.
static const Settings plain = {.stem = "3", .width = 6, .optimizer_launch = "flat"};

/* ---- Fast layers against the definitions ---------------------------------------------------- */

typedef struct Inputs {
    Array in, weight, bias, dout, din; // din: what another reader of the row wrote before
} Inputs;
typedef struct Results {
    Array out, din, dweight, dbias;
} Results;

static void free_arrays(void *arrays, size_t size) // an Inputs, a Results or the like
{
    for (size_t i = 0; i < size / sizeof(Array); i++)
        free(((Array *)arrays)[i].base);
}

static Results run_layer(const Backend *b, const Layer *l, size_t n, const Inputs *x,
                         bool accumulate) {
    Results r = {array(n * shape_size(l->out), guard_value),
                 array(n * shape_size(l->in), guard_value), array(l->weights, guard_value),
                 array(l->biases, guard_value)};
    Array scratch = array(b->scratch_size(l, n), guard_value);
    const real *bias = l->biases ? x->bias.at : NULL;
    bool conv = l->kind == CONV2D;
    if (accumulate)
        memcpy(r.din.at, x->din.at, x->din.count * sizeof(real));
    (conv ? b->conv2d_forward : b->linear_forward)(r.out.at, x->in.at, x->weight.at, bias, l, n,
                                                   scratch.at);
    (conv ? b->conv2d_backward : b->linear_backward)(r.din.at, r.dweight.at, r.dbias.at, x->dout.at,
                                                     x->in.at, x->weight.at, l, n, accumulate,
                                                     scratch.at);
    check_guards("scratch", &scratch);
    free(scratch.base);
    return r;
}

// The sum of |a * b| of each output becomes its bound: terms roundings each, in either version.
static void to_bound(Array *sums, size_t terms) {
    for (size_t i = 0; i < sums->count; i++)
        sums->at[i] = (real)(2 * (double)terms * epsilon * (double)sums->at[i] + 1e-30);
}

static void compare_results(const Results *got, const Results *want, Results *bound, const Layer *l,
                            size_t n) {
    size_t taps = l->kernel * l->kernel, pixels = n * l->out.h * l->out.w;
    const char *names[4] = {"out", "din", "dweight", "dbias"};
    size_t terms[4] = {taps * l->in.c + 1, taps * l->out.c + 1, pixels, pixels};
    const Array *g = (const Array *)got, *w = (const Array *)want;
    Array *b = (Array *)bound;
    for (size_t i = 0; i < 4; i++) {
        to_bound(&b[i], terms[i]);
        check_tensor(names[i], g[i].at, w[i].at, b[i].at, g[i].count);
        check_guards(names[i], &g[i]);
    }
}

static void describe_failure(const Layer *l, size_t n, bool accumulate) {
    char what[sizeof failure], kind[64];
    describe_layer(l, kind, sizeof kind);
    snprintf(what, sizeof what, "%.200s (%s, %zu images, %zu x %zu x %zu to %zu channels%s%s%s%s)",
             failure, kind, n, l->in.h, l->in.w, l->in.c, l->out.c, l->biases ? "" : ", no bias",
             l->fused_relu ? ", fused ReLU" : "",
             l->fused_relu_backward ? ", fused ReLU backward" : "",
             accumulate ? ", accumulate" : "");
    snprintf(failure, sizeof failure, "%s", what);
}

// Two runs, of which one was by one thread, must have the same bits.
static void compare_bits(const Results *got, const Results *alone) {
    const Array *g = (const Array *)got, *a = (const Array *)alone;
    for (size_t i = 0; i < sizeof *got / sizeof *g; i++)
        if (g[i].count > 0 && memcmp(g[i].at, a[i].at, g[i].count * sizeof(real)) != 0)
            fail("one thread gives other bits of result %zu than %d", i, omp_get_max_threads());
}

static void compare_layer(Layer l, size_t n, bool accumulate) {
    const Backend *naive = &backends[0], *fast = &backends[1];
    Inputs x = {random_array(n * shape_size(l.in)), random_array(l.weights), random_array(l.biases),
                random_array(n * shape_size(l.out)), random_array(n * shape_size(l.in))};
    Inputs a = {absolute(&x.in), absolute(&x.weight), absolute(&x.bias), absolute(&x.dout),
                absolute(&x.din)};
    fast->prepare(&l);
    Results got = run_layer(fast, &l, n, &x, accumulate);
    omp_set_num_threads(1);
    Results alone = run_layer(fast, &l, n, &x, accumulate);
    omp_set_num_threads(2);
    Results want = run_layer(naive, &l, n, &x, accumulate);
    Results bound = run_layer(naive, &l, n, &a, accumulate);
    if (l.fused_relu)
        relu_forward(want.out.at, want.out.at, want.out.count);
    bool before = *failure;
    compare_bits(&got, &alone);
    compare_results(&got, &want, &bound, &l, n);
    if (*failure && !before)
        describe_failure(&l, n, accumulate);
    free_arrays(&x, sizeof x);
    free_arrays(&a, sizeof a);
    free_arrays(&got, sizeof got);
    free_arrays(&alone, sizeof alone);
    free_arrays(&want, sizeof want);
    free_arrays(&bound, sizeof bound);
    free(l.gather);
    free(l.scatter);
}

// A network that has only its images yet.
static void start_net(Net *net, Shape in) {
    *net = (Net){.model = "test", .settings = &plain, .backend = &backends[1]};
    net->classes = CLASSES;
    add_layer(net, (Layer){.kind = INPUT, .in = in, .out = in});
}

// Mostly small, at times large: odd sizes meet every edge of the tiles.
static Layer draw_conv(Net *net, size_t *n) {
    bool large = draw_bits() % 8 == 0;
    size_t kernel = draw_bits() % 12 == 0 ? 7 : draw_size(1, 5);
    size_t stride = draw_bits() % 8 == 0 ? 3 : draw_size(1, 2), padding = draw_size(0, kernel - 1);
    size_t least = kernel > 2 * padding ? kernel - 2 * padding : 1;
    Shape in = {draw_size(least, max_size(least, 13)), draw_size(least, max_size(least, 13)),
                large             ? draw_size(71, 150)
                : draw_bits() % 3 ? draw_size(1, 70)
                                  : draw_size(1, 8)};
    start_net(net, in);
    add_conv2d(net, 0, draw_bits() % 3 ? draw_size(1, 70) : draw_size(1, 140), kernel, stride,
               padding, draw_bits() % 3 > 0);
    net->layers[1].fused_relu = draw_bits() % 2;
    *n = draw_size(1, 9);
    return net->layers[1];
}

static void test_fast_conv(void) {
    static Net net;
    for (int shape = 0; shape < (quick ? 60 : 300);) {
        size_t n;
        Layer l = draw_conv(&net, &n);
        // the definitions are slow: a shape that would take them long is drawn again
        if (layer_flops(&l) * (double)n > 2 * 6e6)
            continue;
        compare_layer(l, n, draw_bits() % 2);
        shape++;
    }
    verdict("fast conv2d against its definition");
}

// The shapes of residual networks, all with and without a bias and accumulate.
static void test_fast_resnet_conv(void) {
    static Net net;
    static const struct {
        Shape in;
        size_t channels, kernel, stride, padding;
    } shapes[] = {
        {{8, 8, 16}, 32, 1, 2, 0},  // a shortcut
        {{7, 9, 70}, 17, 1, 2, 0},  // ... that drops the last row and column, or does not
        {{8, 9, 3}, 40, 1, 3, 0},   // ... and meets no two of three pixels
        {{12, 10, 3}, 16, 7, 1, 3}, // stems
        {{13, 12, 3}, 24, 7, 2, 3}, {{9, 8, 4}, 10, 7, 2, 3}, // 196 numbers under the filter
        {{6, 6, 24}, 24, 3, 1, 1},  {{7, 6, 12}, 20, 3, 2, 1}, {{14, 13, 2}, 9, 11, 4, 2},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (size_t variant = 0; variant < 4; variant++) {
            start_net(&net, shapes[i].in);
            add_conv2d(&net, 0, shapes[i].channels, shapes[i].kernel, shapes[i].stride,
                       shapes[i].padding, variant & 1);
            compare_layer(net.layers[1], 5, variant & 2);
        }
    verdict("fast conv2d of residual networks against its definition");
}

// 3 x 3 and 5 x 5, stride 1 and channels in whole vectors: what winograd() takes, and shapes just
// beside.
static void test_winograd(size_t kernel) {
    static Net net;
    size_t taken[2] = {0, 0}, sliced[2] = {0, 0}; // weight gradients without a bias and with one
    for (int shape = 0; shape < (quick ? 20 : 80); shape++) {
        // pixels enough for slices of a weight gradient, columns for two blocks
        const bool many = kernel == 3 && shape % 10 > 7;
        const size_t least = many ? 18 : 7, most = many ? 20 : 13;
        const size_t n = draw_size(many ? 16 : 1, many ? 20 : 9);
        Shape in = {draw_size(least, most), draw_size(least, most),
                    many ? max_size(LANES, FEW) : LANES * draw_size(1, shape % 8 ? 3 : 8)};
        start_net(&net, in);
        size_t columns = shape % 2 ? LANES * draw_size(1, 3) : draw_size(LANES, 140);
        if (many)
            columns = COLUMNS + draw_size(1, 2 * LANES);
        add_conv2d(&net, 0, columns, kernel, 1, draw_size(0, kernel - 1), shape % 3 > 0);
        net.layers[1].fused_relu = draw_bits() % 2;
        taken[0] += forward_pass(&net.layers[1]).tile > 0;
        taken[1] += backward_pass(&net.layers[1], false).tile > 0;
        WeightGradient g = weight_gradient_plan(&net.layers[1], n);
        sliced[net.layers[1].biases > 0] += g.pass.tile > 0 && g.slices > 1 && g.parts > 1;
        compare_layer(net.layers[1], n, draw_bits() % 2);
    }
    if (!taken[0] || !taken[1])
        fail("no shape was taken: %zu forward, %zu backward", taken[0], taken[1]);
    if (kernel == 3 && (!sliced[0] || !sliced[1]))
        fail("no weight gradient had slices and blocks: %zu without a bias, %zu with one",
             sliced[0], sliced[1]);
    for (size_t over = 0; over < 2; over++) { // what lies outside of an image is MAX_DEPTH zeros
        start_net(&net, (Shape){8, 9, MAX_DEPTH + over * LANES});
        add_conv2d(&net, 0, LANES, kernel, 1, 1, false);
        if ((forward_pass(&net.layers[1]).tile > 0) != (over == 0 && kernel == 3))
            fail("%zu channels: wrongly taken, or not", MAX_DEPTH + over * LANES);
    }
    verdict(kernel == 3 ? "Winograd's convolution, 3 x 3, against its definition"
                        : "Winograd's convolution, 5 x 5, against its definition");
}

// Root mean square of got - want.
static double rms_error(const Array *got, const double *want) {
    double sum = 0;
    for (size_t i = 0; i < got->count; i++)
        sum += pow((double)got->at[i] - want[i], 2);
    return sqrt(sum / (double)got->count);
}

// out, din and dweight of a convolution without bias, in double; all three begin as zeros.
static void convolve_in_double(const Layer *l, size_t n, const Inputs *x, double *out, double *din,
                               double *dweight) {
    const size_t pixels = l->out.h * l->out.w, taps = l->kernel * l->kernel;
    for (size_t i = 0; i < n * pixels * taps; i++) {
        size_t tap = i % taps, pixel = i / taps % pixels, image = i / taps / pixels;
        ptrdiff_t met = met_pixel(l, pixel / l->out.w, pixel % l->out.w, tap);
        for (size_t c = 0; c < (met == OUTSIDE ? 0 : l->in.c); c++)
            for (size_t k = 0; k < l->out.c; k++) {
                size_t at = image * shape_size(l->in) + (size_t)met * l->in.c + c;
                size_t to = (image * pixels + pixel) * l->out.c + k;
                size_t w = (tap * l->in.c + c) * l->out.c + k;
                out[to] += (double)x->in.at[at] * (double)x->weight.at[w];
                din[at] += (double)x->dout.at[to] * (double)x->weight.at[w];
                dweight[w] += (double)x->in.at[at] * (double)x->dout.at[to];
            }
    }
}

// What room 5b says of Winograd's rounding: that it is at most 2.8 times that of the definition.
static void test_winograd_rounding(void) {
    static Net net;
    for (size_t i = 0; i < (quick ? 4 : 8); i++) {
        const size_t n = 2, channels = (size_t)32 << i / 2, kernel = 3 + i % 2 * 2;
        start_net(&net, (Shape){12, 12, channels});
        add_conv2d(&net, 0, 64, kernel, 1, 1, false);
        Layer *l = &net.layers[1];
        Inputs x = {random_array(n * shape_size(l->in)),
                    random_array(l->weights),
                    {0},
                    random_array(n * shape_size(l->out)),
                    {0}};
        cpu_prepare(l);
        Results fast = run_layer(&backends[1], l, n, &x, false);
        Results naive = run_layer(&backends[0], l, n, &x, false);
        double *want[3], ratio[3];
        for (size_t i = 0; i < 3; i++)
            want[i] = must_alloc(((Array *)&fast)[i].count * sizeof(double), "a test");
        convolve_in_double(l, n, &x, want[0], want[1], want[2]);
        for (size_t i = 0; i < 3; i++) {
            ratio[i] =
                rms_error((Array *)&fast + i, want[i]) / rms_error((Array *)&naive + i, want[i]);
            free(want[i]);
        }
        if (!is_double && !(fmax(fmax(ratio[0], ratio[1]), ratio[2]) < 2.8))
            fail("%zu channels, filters of %zu: rounding of out, din, dweight is %.2f, %.2f, %.2f "
                 "times that of "
                 "the definition, expected at most 2.8",
                 channels, kernel, ratio[0], ratio[1], ratio[2]);
        free_arrays(&x, sizeof x);
        free_arrays(&fast, sizeof fast);
        free_arrays(&naive, sizeof naive);
        free(l->gather);
        free(l->scatter);
    }
    verdict("Winograd's rounding against that of the definition");
}

static void test_fast_linear(void) {
    static Net net;
    for (int shape = 0; shape < (quick ? 10 : 40); shape++) {
        size_t inputs = shape % 4 ? draw_size(1, 300) : draw_size(1000, 2600); // MAX_DEPTH: 1024
        start_net(&net, (Shape){1, 1, inputs});
        linear(&net, 0, draw_size(1, 140));
        net.layers[1].fused_relu = draw_bits() % 2;
        compare_layer(net.layers[1], draw_size(1, 40), draw_bits() % 2);
    }
    verdict("fast linear against its definition");
}

// Large layers of few pixels: what convolve_by_panels() takes, in one part and in several.
static void test_few_pixels(void) {
    static Net net;
    static const struct {
        size_t side, channels, columns, kernel;
    } shapes[] = {{1, 300, 17 * COLUMNS + 3, 1},
                  {1, 5 * MAX_DEPTH + 7, 3 * COLUMNS + 5, 1},
                  {1, 9 * COLUMNS, 2 * MAX_DEPTH + 9, 1},
                  {2, MAX_DEPTH + 2, 8 * COLUMNS + 1, 1}};
    size_t taken[2][2] = {{0}}; // forward, backward; one part, some
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (size_t variant = 0; variant < 4; variant++) {
            size_t n = draw_size(1, 8);
            start_net(&net, (Shape){shapes[i].side, shapes[i].side, shapes[i].channels});
            add_conv2d(&net, 0, shapes[i].columns, shapes[i].kernel, 1, 0, variant != 1);
            net.layers[1].fused_relu = variant == 1 || variant == 2;
            Pass p[2] = {forward_pass(&net.layers[1]), backward_pass(&net.layers[1], false)};
            for (size_t way = 0; way < 2; way++)
                taken[way][panel_depth(&p[way]) < p[way].depth] += suits_panels(&p[way], n);
            compare_layer(net.layers[1], n, variant % 2);
        }
    for (size_t i = 0; i < 4; i++)
        if (!taken[i / 2][i % 2])
            fail("no shape was taken %s, %s", i / 2 ? "backward" : "forward",
                 i % 2 ? "in parts" : "whole");
    verdict("layers of few pixels against their definition");
}

// Where the tap of a window lies in the image, or NULL.
static real *window_pixel(const real *image, const Layer *l, size_t y, size_t x, size_t tap) {
    ptrdiff_t iy = (ptrdiff_t)(y * l->stride + tap / l->kernel) - (ptrdiff_t)l->padding;
    ptrdiff_t ix = (ptrdiff_t)(x * l->stride + tap % l->kernel) - (ptrdiff_t)l->padding;
    bool inside = iy >= 0 && ix >= 0 && iy < (ptrdiff_t)l->in.h && ix < (ptrdiff_t)l->in.w;
    return inside ? (real *)image + ((size_t)iy * l->in.w + (size_t)ix) * l->in.c : NULL;
}

// The first maximum of one window and channel; its gradient goes to that pixel, its size to sizes.
static void pool_window(const Layer *l, const real *in, size_t at, real *out, uint8_t *arg,
                        const real *dout, real *din, real *sizes) {
    size_t c = at % l->out.c, x = at / l->out.c % l->out.w, y = at / l->out.c / l->out.w % l->out.h;
    size_t image = at / shape_size(l->out) * shape_size(l->in);
    out[at] = -INFINITY;
    for (size_t tap = 0; tap < l->kernel * l->kernel; tap++) {
        const real *pixel = window_pixel(in + image, l, y, x, tap);
        if (pixel && pixel[c] > out[at]) {
            out[at] = pixel[c];
            arg[at] = (uint8_t)tap;
        }
    }
    window_pixel(din + image, l, y, x, arg[at])[c] += dout[at];
    window_pixel(sizes + image, l, y, x, arg[at])[c] += (real)fabs((double)dout[at]);
}

typedef struct Pool {
    Array in, dout, out, din, bound;
    uint8_t *arg;
} Pool;

// What a max-pool must give; with many equal numbers, all of them negative where all_negative says.
static Pool pool_reference(const Layer *l, size_t n, bool all_negative, const Array *before) {
    size_t count = n * shape_size(l->out);
    Pool p = {random_array(n * shape_size(l->in)),
              random_array(count),
              array(count, 0),
              array(before->count, 0),
              absolute(before),
              must_alloc(count, "a test")};
    memcpy(p.din.at, before->at, before->count * sizeof(real));
    for (size_t i = 0; i < p.in.count; i++)
        p.in.at[i] = (real)(floor(3 * (double)p.in.at[i]) - (all_negative ? 3 : 0));
    for (size_t at = 0; at < count; at++)
        pool_window(l, p.in.at, at, p.out.at, p.arg, p.dout.at, p.din.at, p.bound.at);
    to_bound(&p.bound, l->kernel * l->kernel + 1);
    return p;
}

static void compare_pool(const Backend *b, const Layer *l, size_t n, bool accumulate) {
    Array before = random_array(n * shape_size(l->in));
    if (!accumulate)
        memset(before.at, 0, before.count * sizeof(real));
    Pool p = pool_reference(l, n, accumulate, &before);
    Array out = array(p.out.count, guard_value), din = array(before.count, guard_value);
    uint8_t *arg = must_alloc(p.out.count, "a test");
    if (accumulate) // else NaN stays there: all of it must be written
        memcpy(din.at, before.at, before.count * sizeof(real));
    b->maxpool2d_forward(out.at, arg, p.in.at, l, n);
    b->maxpool2d_backward(din.at, p.dout.at, arg, l, n, accumulate);
    check_tensor("out", out.at, p.out.at, NULL, out.count);
    check_tensor("din", din.at, p.din.at, p.bound.at, din.count);
    check_guards("out", &out);
    check_guards("din", &din);
    if (memcmp(arg, p.arg, out.count) != 0)
        fail("argmax differs");
    free_arrays(&p, 5 * sizeof(Array));
    free_arrays((Array[]){before, out, din}, 3 * sizeof(Array));
    free(p.arg);
    free(arg);
}

static void test_maxpool(const Backend *b) {
    static Net net;
    static const size_t windows[][3] = {{1, 1, 0}, {2, 2, 0}, {3, 3, 0}, {3, 2, 1}, // ResNet's
                                        {3, 1, 1}, {2, 1, 1}, {5, 3, 2}, {3, 2, 2}};
    for (size_t c = 1; c < 70; c++) {
        const size_t *w = windows[c % 8];
        start_net(&net, (Shape){9, 7, c});
        maxpool2d(&net, 0, w[0], w[1], w[2]);
        bool before = *failure;
        for (size_t accumulate = 0; accumulate < 2; accumulate++) {
            compare_pool(b, &net.layers[1], 3, accumulate);
            if (*failure && !before)
                describe_failure(&net.layers[1], 3, accumulate);
        }
    }
    char name[64];
    snprintf(name, sizeof name, "maxpool2d, %s kernels", b->kernels);
    verdict("%s", name);
}

// A NaN is the largest of its window, so that it reaches the loss and is found.
static void test_maxpool_nan(const Backend *b) {
    static Net net;
    start_net(&net, (Shape){6, 7, 19});
    maxpool2d(&net, 0, 3, 2, 1);
    const Layer *l = &net.layers[1];
    size_t count = shape_size(l->out), found = 0;
    Array in = random_array(shape_size(l->in)), out = array(count, guard_value);
    uint8_t *arg = must_alloc(count, "a test");
    for (size_t i = 0; i < in.count; i++)
        in.at[i] = draw_bits() % 9 ? in.at[i] : (real)NAN;
    b->maxpool2d_forward(out.at, arg, in.at, l, 1);
    for (size_t at = 0; at < count; at++) {
        size_t c = at % l->out.c, x = at / l->out.c % l->out.w, y = at / l->out.c / l->out.w;
        bool any = false;
        for (size_t tap = 0; tap < 9; tap++) {
            const real *pixel = window_pixel(in.at, l, y, x, tap);
            any |= pixel && isnan(pixel[c]);
        }
        found += any;
        if (any != (bool)isnan(out.at[at]) ||
            (any && !isnan(window_pixel(in.at, l, y, x, arg[at])[c])))
            fail("output %zu is %g, its window has %s NaN", at, (double)out.at[at],
                 any ? "a" : "no");
    }
    if (found == 0 || found == count)
        fail("%zu of %zu windows have a NaN", found, count);
    free_arrays((Array[]){in, out}, 2 * sizeof(Array));
    free(arg);
    char name[64];
    snprintf(name, sizeof name, "maxpool2d of NaN, %s kernels", b->kernels);
    verdict("%s", name);
}

/* ---- Networks of every shape ---------------------------------------------------------------- */

static const Draw gradient_draw = {.seed = 5, .epoch = 2, .first = 30};

// One convolution after another, with the odd borders that kernel, stride and padding make.
static void build_plain_net(Net *net, const Backend *b, size_t kernel, size_t stride,
                            size_t padding) {
    start_net(net, (Shape){5, 9, 3});
    net->backend = b;
    size_t x = relu(net, conv2d(net, 0, 5, kernel, 1, kernel / 2)); // 5 x 9 stays, or grows by one
    x = conv2d(net, x, 9, kernel, stride, padding);
    Shape s = net->layers[x].out;
    bool pool_first = (stride + padding) % 2; // a ReLU behind a convolution, or behind a max-pool
    x = pool_first ? x : relu(net, x);
    size_t window = s.h >= 3 && s.w >= 3 && padding != 1 ? 3 : 2;
    size_t step = stride == 2 && kernel % 2 ? window - 1 : window; // windows that overlap, or not
    if (s.h >= window && s.w >= window)
        x = maxpool2d(net, x, window, step, 0);
    x = pool_first ? relu(net, x) : x;
    x = relu(net, linear(net, dropout(net, x, (real).3), 11));
    x = linear(net, dropout(net, x, (real).5), CLASSES);
    log_softmax(net, x);
    plan_memory(net, BATCH);
    net_alloc(net);
    net_init(net, 3);
}

static size_t classify(Net *net, size_t x) {
    return log_softmax(net, linear(net, global_avgpool2d(net, x), net->classes));
}

// BatchNorm with and without a ReLU behind it, before a strided max-pool and before a linear layer.
static size_t build_batchnorm(Net *net, size_t x) {
    x = relu(net, batchnorm2d(net, conv2d_no_bias(net, x, 4, 3, 1, 1)));
    x = maxpool2d(net, batchnorm2d(net, conv2d(net, x, 5, 3, 1, 1)), 3, 2, 1);
    x = batchnorm2d(net, batchnorm2d(net, conv2d_no_bias(net, x, 4, 2, 1, 1)));
    x = relu(net, batchnorm2d(net, linear(net, x, 6)));
    return log_softmax(net, linear(net, x, net->classes));
}

static size_t build_basic(Net *net, size_t x) {
    x = relu(net, conv_bn(net, x, "", 1, 4, 3, 1));
    x = basic_block(net, x, "same.", 4, 1);
    x = basic_block(net, x, "wider.", 5, 1);
    x = basic_block(net, x, "smaller.", 6, 2);
    return classify(net, basic_block(net, x, "again.", 6, 1));
}

static size_t build_bottleneck(Net *net, size_t x) {
    x = relu(net, conv_bn(net, x, "", 1, 4, 3, 1));
    x = bottleneck(net, x, "wider.", 2, 1);
    x = bottleneck(net, x, "same.", 2, 1);
    return classify(net, bottleneck(net, x, "smaller.", 3, 2));
}

// BatchNorm and ReLU before the convolutions (He et al., arXiv:1603.05027): nothing after the add.
static size_t preactivation_block(Net *net, size_t x, size_t channels, size_t stride) {
    size_t y = relu(net, batchnorm2d(net, x));
    bool same = stride == 1 && net->layers[x].out.c == channels;
    size_t side = same ? x : conv2d_no_bias(net, y, channels, 1, stride, 0);
    y = relu(net, batchnorm2d(net, conv2d_no_bias(net, y, channels, 3, stride, 1)));
    return add(net, conv2d_no_bias(net, y, channels, 3, 1, 1), side);
}

static size_t build_preactivation(Net *net, size_t x) {
    x = preactivation_block(net, conv2d_no_bias(net, x, 4, 3, 1, 1), 4, 1);
    x = preactivation_block(net, preactivation_block(net, x, 4, 1), 6, 2);
    x = preactivation_block(net, x, 6, 1);
    return classify(net, relu(net, batchnorm2d(net, x)));
}

/* One row is read by rows of every kind. Backward meets the last one first; all others have to add
   what they find to its gradient. */
static size_t build_shared(Net *net, size_t x) {
    x = conv2d(net, x, 4, 3, 1, 1);
    size_t sum = conv2d(net, x, 4, 3, 1, 1);
    sum = add(net, batchnorm2d(net, x), sum);
    sum = add(net, relu(net, x), sum);
    sum = add(net, dropout(net, x, (real).3), sum);
    sum = add(net, maxpool2d(net, x, 3, 1, 1), sum);
    sum = add(net, x, sum);
    size_t y = add(net, linear(net, global_avgpool2d(net, x), 5), linear(net, x, 5));
    y = add(net, y, linear(net, global_avgpool2d(net, sum), 5));
    x = linear(net, conv2d_no_bias(net, x, 3, 1, 2, 0), 5);
    return log_softmax(net, linear(net, add(net, x, y), net->classes));
}

// add(x, x); a sum whose sides are read again, before it and behind it; one with the images.
static size_t build_adds(Net *net, size_t x) {
    size_t a = conv2d(net, x, 3, 3, 1, 1), b = conv2d(net, a, 3, 3, 1, 1);
    size_t twice = add(net, b, b);
    size_t c = add(net, twice, a);
    size_t d = add(net, conv2d(net, c, 3, 1, 1, 0), x);
    size_t e = relu(net, add(net, a, d));
    size_t f = add(net, conv2d(net, e, 3, 3, 1, 1), c);
    size_t g = add(net, add(net, x, f), batchnorm2d(net, c));
    return classify(net, add(net, relu(net, g), e));
}

static const Model odd_models[] = {
    {.name = "batchnorm", .build = build_batchnorm},
    {.name = "basic blocks", .build = build_basic},
    {.name = "bottleneck blocks", .build = build_bottleneck},
    {.name = "pre-activation blocks", .build = build_preactivation},
    {.name = "one row, many readers", .build = build_shared},
    {.name = "adds", .build = build_adds},
};
enum { ODD_MODELS = sizeof odd_models / sizeof *odd_models };

// Numbers other than 1 and 0, which would hide a BatchNorm that forgets its parameters.
static void draw_norms(Net *net) {
    for (size_t i = 0; i < net->count; i++) {
        const Layer *l = &net->layers[i];
        for (size_t c = 0; l->kind == BATCHNORM2D && c < l->out.c; c++) {
            net->params[l->weight + c] = 1 + draw_real() / 2;
            net->params[l->bias + c] = draw_real() / 2;
        }
    }
}

static void load_random(Net *net) {
    for (size_t i = 0; i < BATCH * shape_size(net->layers[0].out); i++)
        output(net, &net->layers[0])[i] = draw_real();
    for (size_t i = 0; i < BATCH; i++)
        net->labels[i] = (uint8_t)draw_size(0, CLASSES - 1);
}

static double loss_of(Net *net) {
    forward(net, BATCH, &gradient_draw);
    return loss_and_gradient(net, BATCH, true);
}

// All gradients of a batch; where NaN was must be written before it is read.
static void find_gradients(Net *net) {
    memset(net->grads, 0xFF, net->param_size * sizeof(real));
    memset(net->dactivations, 0xFF, net->gradient_size * sizeof(real));
    memset(net->scratch, 0xFF, net->scratch_size * sizeof(real));
    loss_of(net);
    backward(net, BATCH);
}

/* ---- A convolution and its max-pool in one: the backward skips the pool's zeros -------------- */

typedef struct Pooled { // what forward left
    Array out, pooled;  // of the ReLU, of the max-pool
    uint8_t *argmax;
} Pooled;

static Pooled pooled_forward(const Layer *l, size_t n, const Inputs *x) {
    size_t count = n * shape_size(l->pool->out);
    Pooled p = {array(n * shape_size(l->out), 0), array(count, 0), must_alloc(count, "a test")};
    const real *bias = l->biases ? x->bias.at : NULL;
    backends[0].conv2d_forward(p.out.at, x->in.at, x->weight.at, bias, l, n, NULL);
    relu_forward(p.out.at, p.out.at, p.out.count);
    backends[0].maxpool2d_forward(p.pooled.at, p.argmax, p.out.at, l->pool, n);
    return p;
}

// Room for the gradients, in din what another reader wrote, if that is to be added to.
static Results pooled_results(const Layer *l, const Inputs *x, bool accumulate) {
    Results r = {array(0, guard_value), array(x->in.count, guard_value),
                 array(l->weights, guard_value), array(l->biases, guard_value)};
    if (accumulate)
        memcpy(r.din.at, x->din.at, x->din.count * sizeof(real));
    return r;
}

// From the pool's dout to the convolution's gradients, by the definitions.
static Results pooled_naive(const Layer *l, size_t n, const Inputs *x, const Pooled *p,
                            bool accumulate) {
    const Backend *naive = &backends[0];
    Array dconv = array(n * shape_size(l->out), 0);
    Results r = pooled_results(l, x, accumulate);
    naive->maxpool2d_backward(dconv.at, x->dout.at, p->argmax, l->pool, n, false);
    naive->relu_backward(dconv.at, dconv.at, p->out.at, dconv.count, false);
    naive->conv2d_backward(r.din.at, r.dweight.at, r.dbias.at, dconv.at, x->in.at, x->weight.at, l,
                           n, accumulate, NULL);
    if (l->fused_relu_backward)
        relu_backward(r.din.at, r.din.at, x->in.at, r.din.count, false);
    free(dconv.base);
    return r;
}

static Results pooled_fast(const Net *net, size_t n, const Inputs *x, const Pooled *p,
                           bool accumulate, bool wants_din) {
    const Layer *l = &net->layers[1];
    Array scratch = array(net->scratch_size, guard_value);
    Results r = pooled_results(l, x, accumulate);
    backends[1].conv2d_backward_pooled(wants_din ? r.din.at : NULL, r.dweight.at, r.dbias.at,
                                       x->dout.at, p->pooled.at, p->argmax, x->in.at, x->weight.at,
                                       l, n, accumulate, scratch.at);
    check_guards("scratch", &scratch);
    free(scratch.base);
    return r;
}

// Some of the gradient is zero, as a dropout behind the pool makes it.
static void drop_some(Array *dout) {
    for (size_t i = 0; i < dout->count; i++)
        dout->at[i] = draw_bits() % 3 ? dout->at[i] : 0;
}

// conv2d, ReLU and max-pool in one have the bits of the three.
static void check_pooled_forward(Net *net, size_t n, const Inputs *x) {
    Layer *l = &net->layers[1];
    size_t count = n * shape_size(l->pool->out);
    Array scratch = array(net->scratch_size, guard_value), out = array(n * shape_size(l->out), 0);
    Array want = array(count, guard_value), got = array(count, guard_value);
    uint8_t *argmax[2] = {must_alloc(count, "a test"), must_alloc(count, "a test")};
    backends[1].prepare(l);
    const real *bias = l->biases ? x->bias.at : NULL;
    memset(argmax[0], 0xFF, count);
    backends[1].conv2d_forward_pooled(got.at, argmax[0], x->in.at, x->weight.at, bias, l, n,
                                      scratch.at);
    check_guards("scratch", &scratch);
    check_guards("the max-pool's output", &got);
    backends[1].conv2d_forward(out.at, x->in.at, x->weight.at, bias, l, n, scratch.at);
    relu_forward(out.at, out.at, out.count);
    backends[1].maxpool2d_forward(want.at, argmax[1], out.at, l->pool, n);
    if (memcmp(got.at, want.at, count * sizeof(real)) != 0 ||
        memcmp(argmax[0], argmax[1], count) != 0) {
        fail("conv2d, ReLU and max-pool in one give other bits than one after the other");
        describe_failure(l, n, false);
    }
    free(scratch.base);
    free(out.base);
    free(want.base);
    free(got.base);
    free(argmax[0]);
    free(argmax[1]);
    free(l->gather);
    free(l->scatter);
}

static void compare_pooled(Net *net, size_t n, bool accumulate, bool wants_din) {
    const Layer *l = &net->layers[1];
    size_t inputs = n * shape_size(l->in);
    Inputs x = {random_array(inputs), random_array(l->weights), random_array(l->biases),
                random_array(n * shape_size(l->pool->out)), random_array(inputs)};
    drop_some(&x.dout);
    Inputs a = {absolute(&x.in), absolute(&x.weight), absolute(&x.bias), absolute(&x.dout),
                absolute(&x.din)};
    check_pooled_forward(net, n, &x);
    Pooled p = pooled_forward(l, n, &x);
    Results got = pooled_fast(net, n, &x, &p, accumulate, wants_din);
    omp_set_num_threads(1);
    Results alone = pooled_fast(net, n, &x, &p, accumulate, wants_din);
    omp_set_num_threads(2);
    Results want = pooled_naive(l, n, &x, &p, accumulate);
    Results bound = pooled_naive(l, n, &a, &p, accumulate);
    bool before = *failure;
    compare_bits(&got, &alone);
    if (!wants_din)
        memcpy(got.din.at, want.din.at, want.din.count * sizeof(real));
    compare_results(&got, &want, &bound, l, n);
    if (*failure && !before)
        describe_failure(l, n, accumulate);
    free_arrays(&x, sizeof x);
    free_arrays(&a, sizeof a);
    free_arrays(&want, sizeof want);
    free_arrays(&bound, sizeof bound);
    free_arrays(&got, sizeof got);
    free_arrays(&alone, sizeof alone);
    free_arrays(&p, 2 * sizeof(Array));
    free(p.argmax);
}

static void test_pooled(void) {
    static Net net;
    for (int shape = 0; shape < (quick ? 40 : 200); shape++) {
        const bool winograd = shape % 8 == 0, many = shape % 10 == 7; // slices of several images
        size_t kernel = 3 + draw_bits() % 2 * 2, n = many ? draw_size(33, 70) : draw_size(1, 9);
        size_t least = winograd ? kernel + 7 : kernel + 1;
        Shape in = {least + draw_size(0, 9), least + draw_size(0, 9),
                    winograd ? max_size(LANES, FEW) : draw_size(1, many ? 5 : 40)};
        start_net(&net, in);
        size_t channels = draw_size(1, shape % 10 == 3 ? 200 : many ? 8 : 70);
        size_t x = add_conv2d(&net, 0, channels, kernel, 1, 0, draw_bits() % 2);
        maxpool2d(&net, relu(&net, x), 2, draw_size(1, 3), 0);
        plan_memory(&net, n);
        net.layers[1].fused_relu_backward = draw_bits() % 2;
        if (!net.layers[1].pool)
            fail("a convolution without padding before a max-pool is not joined with it");
        else
            compare_pooled(&net, n, shape % 2, shape % 5);
    }
    verdict("a convolution and its max-pool in one, forward, and backward without its zeros");
}

// Only shapes that the tiles are made for, and that fit a thread's stack.
static void test_pooled_limit(void) {
    static const struct {
        size_t size, channels_in, channels, kernel, stride, window;
        bool joined;
    } table[] = {{12, 2, 1024, 3, 1, 2, true},
                 {12, 2, 1025, 3, 1, 2, false},
                 {12, 2, 8, 4, 1, 2, false},
                 {12, 2, 8, 3, 2, 2, false},
                 {12, 2, 8, 5, 1, 3, false},
                 {32, 512 / sizeof(real), 8, 5, 1, 2, true},
                 {33, 512 / sizeof(real), 8, 5, 1, 2, false},
                 {92, 1, 8, 3, 1, 2, VECTOR_BYTES < 64},
                 {90, 1, 8, 3, 1, 2, true},
                 {30, 2, 1336 / sizeof(real), 3, 1, 2, true},
                 {30, 2, 1336 / sizeof(real) + 1, 3, 1, 2, false}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        static Net net;
        start_net(&net, (Shape){table[i].size, table[i].size, table[i].channels_in});
        size_t x = conv2d(&net, 0, table[i].channels, table[i].kernel, table[i].stride, 0);
        maxpool2d(&net, relu(&net, x), table[i].window, 2, 0);
        plan_memory(&net, 1);
        if ((net.layers[1].pool != NULL) != table[i].joined)
            fail("row %zu: %s", i, net.layers[1].pool ? "joined" : "not joined");
    }
    verdict("a convolution and its max-pool in one: which ones");
}

/* ---- Gradients against central differences -------------------------------------------------- */

typedef struct Checked {
    size_t entries, kinks;
} Checked;

static double central_difference(Net *net, size_t at, double h) {
    real kept = net->params[at];
    net->params[at] = kept + (real)h;
    double above = loss_of(net);
    net->params[at] = kept - (real)h;
    double below = loss_of(net);
    net->params[at] = kept;
    return (above - below) / (2 * h);
}

/* Where the loss has a kink (a ReLU at 0, a tie of a max-pool) halving h changes the difference; a
   smaller h may keep clear of it. False if none does. */
static bool find_difference(Net *net, size_t at, real got, real bound, real *d) {
    for (double h = 1e-5; h > 5e-7; h /= 10) {
        *d = (real)central_difference(net, at, h);
        if (fabs((double)(got - *d)) <= (double)bound)
            return true;
        if (fabs((double)*d - central_difference(net, at, h / 2)) <= (double)bound)
            return true;
    }
    return false;
}

static void check_gradient(Net *net, const char *name, size_t offset, size_t count, size_t samples,
                           Checked *checked) {
    double scale = 0;
    for (size_t i = 0; i < count; i++)
        scale = fmax(scale, fabs((double)net->grads[offset + i]));
    samples = min_size(count, samples);
    for (size_t s = 0; s < samples; s++) {
        size_t i = count == samples ? s : draw_size(0, count - 1);
        real got = net->grads[offset + i], want, bound = (real)(1e-6 * scale + 1e-10);
        checked->entries++;
        if (find_difference(net, offset + i, got, bound, &want))
            check_tensor(name, &got, &want, &bound, 1);
        else
            checked->kinks++;
    }
}

// All parameters of a network, `samples` entries of each tensor.
static void check_gradients(Net *net, const char *what, size_t samples, Checked *checked) {
    load_random(net);
    find_gradients(net);
    for (size_t i = 1; i < net->count; i++) {
        const Layer *l = &net->layers[i];
        char name[128];
        snprintf(name, sizeof name, "%s: grad of %s.weight", what, l->name);
        check_gradient(net, name, l->weight, l->weights, samples, checked);
        snprintf(name, sizeof name, "%s: grad of %s.bias", what, l->name);
        check_gradient(net, name, l->bias, l->biases, samples, checked);
    }
}

static void check_kinks(const Checked *checked) {
    if (checked->kinks * 20 > checked->entries)
        fail("%zu of %zu entries skipped as kinks", checked->kinks, checked->entries);
}

static void test_plain_gradients(const Backend *b, size_t kernel) {
    static Net net;
    Checked checked = {0};
    for (size_t stride = 1; stride <= 2; stride++)
        for (size_t padding = 0; padding <= min_size(2, kernel - 1); padding++) {
            char name[96];
            snprintf(name, sizeof name, "stride %zu padding %zu", stride, padding);
            build_plain_net(&net, b, kernel, stride, padding);
            check_gradients(&net, name, quick ? 12 : 40, &checked);
            net_free(&net);
        }
    check_kinks(&checked);
    char name[96];
    snprintf(name, sizeof name, "gradients, %s kernels, %zu x %zu filters", b->kernels, kernel,
             kernel);
    verdict("%s", name);
}

static void build_small(Net *net, const Model *model, Shape images, const Settings *settings,
                        const Backend *b) {
    DatasetInfo info = {.name = "test", .shape = images, .classes = CLASSES};
    net_build(net, model, &info, settings, b);
    plan_memory(net, BATCH);
    net_alloc(net);
    net_init(net, 3);
    draw_norms(net);
}

static void test_odd_gradients(const Backend *b, const Model *model) {
    static Net net;
    Checked checked = {0};
    Settings smooth = plain;
    smooth.label_smoothing = .15;
    build_small(&net, model, (Shape){6, 5, 3}, &smooth, b);
    check_gradients(&net, model->name, quick ? 6 : 30, &checked);
    net_free(&net);
    check_kinks(&checked);
    char name[96];
    snprintf(name, sizeof name, "gradients, %s kernels, %s", b->kernels, model->name);
    verdict("%s", name);
}

static void test_gradients(void) {
    static const size_t kernels[] = {1, 2, 3, 5};
    omp_set_num_threads(1); // layers this small only wait for the second thread
    for (size_t b = 0; is_double && b < 2; b++) { // float is too coarse for differences
        for (size_t k = 0; k < 4; k++)
            test_plain_gradients(&backends[b], kernels[k]);
        for (size_t m = 0; m < ODD_MODELS; m++)
            test_odd_gradients(&backends[b], &odd_models[m]);
    }
    omp_set_num_threads(2);
}

/* ---- The memory plan ------------------------------------------------------------------------ */

static size_t row_of_equal_shape(const Net *net, size_t x) {
    Shape s = net->layers[x].out;
    for (;;) {
        size_t y = draw_size(0, net->count - 1);
        Shape t = net->layers[y].out;
        if (s.h == t.h && s.w == t.w && s.c == t.c)
            return y; // x itself, if no other is found before
    }
}

// A max-pool whose zeros the fast convolution's backward may skip, or not.
static void add_random_pool(Net *net, size_t x) {
    x = draw_bits() % 4 ? relu(net, conv2d(net, x, draw_size(1, 4), 1, 1, 0)) : x;
    Shape s = net->layers[x].out;
    size_t kernel = draw_size(1, min_size(min_size(s.h, s.w), 3));
    maxpool2d(net, x, kernel, draw_size(1, 3), draw_bits() % 2 ? kernel / 2 : 0);
}

static void add_random_row(Net *net) {
    size_t x = draw_bits() % 2 ? net->count - 1 : draw_size(0, net->count - 1);
    size_t channels = net->layers[x].out.c;
    switch (draw_size(0, 10)) {
    case 0:
        conv2d(net, x, draw_size(1, 4), 3, draw_size(1, 2), 1);
        break;
    case 1:
        conv2d_no_bias(net, x, channels, 3, 1, 1);
        break;
    case 2:
        batchnorm2d(net, x);
        break;
    case 3:
        maxpool2d(net, x, 3, 1, 1);
        break;
    case 4:
        dropout(net, x, (real).5); // a scale of 2: nothing is rounded
        break;
    case 5:
    case 6:
        relu(net, x);
        break;
    case 7:
        add_random_pool(net, x);
        break;
    default:
        add(net, x, row_of_equal_shape(net, x));
        break;
    }
}

// Each row reads rows drawn from all before it; in the end all that nobody reads come together.
static size_t build_random(Net *net, size_t x) {
    size_t sum = 0;
    for (size_t rows = draw_size(3, 24); rows > 0; rows--)
        add_random_row(net);
    size_t last = net->count;
    for (x = 0; x < last; x++)
        if (count_readers(net, x) == 0) {
            size_t y = linear(net, draw_bits() % 2 ? x : global_avgpool2d(net, x), net->classes);
            sum = sum ? add(net, sum, y) : y;
        }
    return log_softmax(net, sum);
}
static const Model random_model = {.name = "random", .build = build_random};

/* The same network without a plan: every row's output and gradient has memory of its own. But a
   convolution goes on from its max-pool's gradient, as another order of sums gives other bits. */
static void plan_apart(Net *net) {
    net->activation_size = net->gradient_size = 0;
    for (size_t i = 0; i < net->count; i++) {
        Layer *l = &net->layers[i];
        size_t size = aligned(net->batch * shape_size(l->out));
        l->in_place = l->fused_relu = l->fused_relu_backward = false;
        l->add = NULL;
        l->output = net->activation_size;
        l->gradient = net->gradient_size;
        net->activation_size += size;
        net->gradient_size += size;
    }
    for (size_t i = 0; i < net->count; i++)
        if (net->layers[i].pool)
            net->layers[i].gradient = net->layers[i].pool->gradient;
}

static void build_unplanned(Net *net, const Backend *b) {
    DatasetInfo info = {.name = "test", .shape = {4, 5, 2}, .classes = CLASSES};
    net_build(net, &random_model, &info, &plain, b);
    plan_memory(net, BATCH);
    plan_apart(net);
    net_alloc(net);
    net_init(net, 3);
    draw_norms(net);
}

// A gradient of every parameter, without what lies between the tensors.
static void compare_gradients(const Net *got, const Net *want) {
    for (size_t i = 0; i < want->count; i++) {
        const Layer *l = &want->layers[i];
        char name[96];
        snprintf(name, sizeof name, "grad of row %zu of %zu, %s", i, want->count, l->name);
        check_tensor(name, got->grads + l->weight, want->grads + l->weight, NULL, l->weights);
        check_tensor(name, got->grads + l->bias, want->grads + l->bias, NULL, l->biases);
    }
}

static void test_plan_against_none(void) {
    static Net planned, apart;
    omp_set_num_threads(1);
    for (size_t round = 0; round < (quick ? 300 : 5000); round++) {
        const Backend *b = &backends[round % 2];
        uint32_t start = drawn;
        build_small(&planned, &random_model, (Shape){4, 5, 2}, &plain, b);
        load_random(&planned);
        drawn = start; // the same network again, with the same numbers
        build_unplanned(&apart, b);
        load_random(&apart);
        find_gradients(&planned);
        find_gradients(&apart);
        size_t outputs = BATCH * CLASSES;
        check_tensor("logp", output(&planned, last_layer(&planned)),
                     output(&apart, last_layer(&apart)), NULL, outputs);
        compare_gradients(&planned, &apart);
        net_free(&planned);
        net_free(&apart);
    }
    omp_set_num_threads(2);
    verdict("random networks: sharing memory changes no bit of any gradient");
}

/* A backward pass in which every number is a word that tells whose gradient it is and which readers
   have added to it so far. Whoever overwrites a gradient that is still needed shows. */
typedef struct Story {
    const Net *net;
    uint64_t *cells;            // one for each cache line of dactivations
    uint64_t whole[MAX_LAYERS]; // what a row's gradient is when all its readers have added theirs
    bool written[MAX_LAYERS];
} Story;

static size_t row_cells(const Net *net, size_t row) {
    return aligned(net->batch * shape_size(net->layers[row].out)) / ALIGN;
}

static uint64_t *row_story(const Story *s, size_t row) {
    return s->cells + s->net->layers[row].gradient / ALIGN;
}

// A word of its own for each pair of rows; an add hands on the gradient that it received.
static uint64_t contribution(const Story *s, size_t reader, size_t row) {
    size_t pair[2] = {reader, row};
    bool adds = s->net->layers[reader].kind == ADD;
    return adds ? s->whole[reader] : hash_bytes(0xcbf29ce484222325u, pair, sizeof pair) | 1;
}

static void tell_whole(Story *s) {
    const Net *net = s->net;
    s->whole[net->count - 1] = 1; // the loss
    for (size_t row = net->count - 1; row-- > 1;)
        for (size_t i = row + 1; i < net->count; i++) {
            const Layer *l = &net->layers[i];
            bool other = l->kind == ADD && l->other == row;
            size_t times = (l->input == row) + other;
            s->whole[row] += times * contribution(s, i, row);
        }
}

static void expect_story(const Story *s, size_t row, uint64_t word, const char *when) {
    for (size_t cell = 0; cell < row_cells(s->net, row); cell++)
        if (row_story(s, row)[cell] != word)
            fail("%s: row %zu of %zu: its gradient is not whole %s", s->net->model, row,
                 s->net->count, when);
}

static void write_story(Story *s, size_t reader, size_t row) {
    uint64_t *to = row_story(s, row), word = contribution(s, reader, row);
    bool shared = s->net->layers[reader].kind == ADD && to == row_story(s, reader);
    for (size_t cell = 0; !shared && cell < row_cells(s->net, row); cell++)
        to[cell] = word + (s->written[row] ? to[cell] : 0);
    s->written[row] = true;
}

// Has a gradient of its own: not so a convolution and its ReLU that go on from their max-pool's.
static bool has_gradient(const Layer *l) {
    return !l->pool && !(l->skipped && l->kind == RELU);
}

// What backward() does to memory, row by row.
static void tell_backward(Story *s) {
    const Net *net = s->net;
    tell_whole(s);
    for (size_t cell = 0; cell < row_cells(net, net->count - 1); cell++)
        row_story(s, net->count - 1)[cell] = 1;
    for (size_t i = net->count - 1; i > 0; i--) {
        const Layer *l = &net->layers[i];
        size_t from = l->pool ? (size_t)(l->pool - net->layers) : i;
        if (has_gradient(l) || l->pool)
            expect_story(s, from, s->whole[from], "when its own turn comes");
        if (l->skipped)
            continue;
        if (l->input > 0)
            write_story(s, i, l->input);
        if (l->kind == ADD && l->other > 0)
            write_story(s, i, l->other);
        if (l->kind == ADD || !l->in_place)
            expect_story(s, from, s->whole[from], "when its own turn ends");
    }
}

static void check_plan(const Net *net) {
    static Story story;
    story = (Story){.net = net};
    for (size_t i = 1; i < net->count; i++)
        if (has_gradient(&net->layers[i]) &&
            (net->layers[i].gradient % ALIGN ||
             net->layers[i].gradient / ALIGN + row_cells(net, i) > net->gradient_size / ALIGN))
            fail("%s: row %zu lies outside of the arena", net->model, i);
    if (*failure)
        return;
    story.cells = must_alloc(net->gradient_size / ALIGN * sizeof(uint64_t), "a test");
    tell_backward(&story);
    free(story.cells);
}

// As much as if no two gradients shared memory.
static size_t unshared_size(const Net *net) {
    size_t sum = 0;
    for (size_t i = 1; i < net->count; i++)
        sum += aligned(net->batch * shape_size(net->layers[i].out));
    return sum;
}

/* A ResNet of whatever depth needs three gradients of the largest row, and little more: what a
   block receives and hands on share their memory. */
static void check_resnet_size(const Net *net) {
    size_t largest = 0;
    for (size_t i = 1; i < net->count; i++)
        largest = max_size(largest, row_cells(net, i) * ALIGN);
    bool resnet = strncmp(net->model, "resnet", 6) == 0;
    if (resnet && (double)net->gradient_size > 3.1 * (double)largest)
        fail("%s: %zu numbers, the largest gradient has %zu", net->model, net->gradient_size,
             largest);
    if (strcmp(net->model, "resnet18") == 0 && net->gradient_size * 4 > unshared_size(net))
        fail("resnet18: %zu of %zu numbers", net->gradient_size, unshared_size(net));
}

// Every add of a ResNet is done while the output of a BatchNorm is stored.
static void check_resnet_adds(const Net *net) {
    bool resnet = strncmp(net->model, "resnet", 6) == 0;
    for (size_t i = 1; i < net->count; i++)
        if (resnet && net->layers[i].kind == ADD && !is_fused(net, &net->layers[i]))
            fail("%s: row %zu is an add of its own", net->model, i);
}

static void test_plan_of_models(void) {
    static Net net;
    static const char *const stems[] = {"3", "7", "imagenet"};
    for (size_t m = 0; m < MODELS + ODD_MODELS; m++)
        for (size_t stem = 0; stem < 3; stem++) {
            const Model *model = m < MODELS ? &models[m] : &odd_models[m - MODELS];
            Settings settings = plain;
            settings.stem = stems[stem];
            DatasetInfo info = {.name = "test", .shape = {32, 32, 3}, .classes = 10};
            net_build(&net, model, &info, &settings, &backends[1]);
            plan_memory(&net, 2);
            check_plan(&net);
            check_resnet_size(&net);
            check_resnet_adds(&net);
        }
    verdict("gradients of all models: none is overwritten while it is needed");
}

static void test_plan_of_random(void) {
    static Net net;
    for (size_t round = 0; round < (quick ? 2000 : 40000); round++) {
        DatasetInfo info = {.name = "test", .shape = {4, 5, 2}, .classes = CLASSES};
        net_build(&net, &random_model, &info, &plain, &backends[round % 2]);
        plan_memory(&net, draw_size(1, 3));
        check_plan(&net);
    }
    verdict("gradients of random networks: none is overwritten while it is needed");
}

/* ---- Loops ----------------------------------------------------------------------------------- */

static void test_turns(void) {
    enum { MOST = 100 };
    static const size_t counts[] = {0, 1, 2, 7, MOST};
    for (size_t which = 0; which < 5; which++)
        for (int threads = 1; threads <= 5; threads++) {
            size_t count = counts[which], taken[MOST] = {0};
            omp_set_num_threads(threads);
            snprintf(context, sizeof context, "%zu turns, %d threads", count, threads);
            PARALLEL_TURNS(i, count)
                __atomic_add_fetch(&taken[i], 1, __ATOMIC_RELAXED);
            for (size_t i = 0; i < count; i++)
                if (taken[i] != 1)
                    fail("turn %zu was taken %zu times", i, taken[i]);
        }
    omp_set_num_threads(2);
    verdict("turns: each is taken once");
}

// The second of two threads takes its four of eight turns and one more, the first what is left.
static void test_left_turns(void) {
    enum { COUNT = 8, SECOND = 5 };
    Turns turns = {COUNT, {0}};
    size_t got[COUNT + 1], done = 0, threads = 1;
    bool more = true;
    PARALLEL {
        bool alone = omp_get_num_threads() == 1, second = omp_get_thread_num() == 1;
        while (!alone && !second && __atomic_load_n(&done, __ATOMIC_ACQUIRE) < SECOND)
            usleep(100);
        for (size_t k = alone || second ? 0 : SECOND; k < (second ? SECOND : COUNT); k++) {
            take_turn(&turns, &got[k]);
            __atomic_add_fetch(&done, 1, __ATOMIC_RELEASE);
        }
        if (second)
            threads = 2;
        else
            more = take_turn(&turns, &got[COUNT]);
    }
    for (size_t k = 0; k < COUNT; k++)
        if (got[k] != (threads == 1 ? k : (k + COUNT / 2) % COUNT))
            fail("%zu threads: turn %zu was taken as number %zu", threads, got[k], k);
    if (more)
        fail("a turn was left at the end");
    verdict("turns: one's own first, then what others have left");
}

/* ---- Random numbers and dropout ------------------------------------------------------------- */

// Known answers from the Random123 library.
static void test_philox(void) {
    static const uint32_t want[2][4] = {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
                                        {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}};
    uint32_t got[2][4], f = UINT32_MAX;
    philox4x32(got[0], 0, 0, 0, 0, 0);
    philox4x32(got[1], f, f, f, f, UINT64_MAX);
    if (memcmp(got, want, sizeof want) != 0)
        fail("found %08x... and %08x...", got[0][0], got[1][0]);
    verdict("philox known answers");
}

enum { DROP_N = 9, DROP_SIZE = 7 * 13 * 37, DROP_COUNT = DROP_N * DROP_SIZE };
static const uint32_t drop_stream = DRAW_DROPOUT + 3;

static void drop(real *out, uint8_t *kept, const real *in, real p, size_t n, uint32_t stream,
                 const Draw *draw) {
    Layer l = {.kind = DROPOUT, .p = p, .in = {7, 13, 37}, .out = {7, 13, 37}};
    dropout_forward(out, kept, in, &l, n, stream, draw);
}

static void check_dropout_values(const real *in, const real *out, const uint8_t *kept, real p) {
    Layer l = {.kind = DROPOUT, .p = p, .in = {7, 13, 37}, .out = {7, 13, 37}};
    Array din = array(DROP_COUNT, guard_value), bound = array(DROP_COUNT, 0);
    Array want = array(DROP_COUNT, 0);
    size_t zeros_found = 0;
    for (size_t i = 0; i < DROP_COUNT; i++) {
        want.at[i] = kept[i] ? in[i] / (1 - p) : 0;
        bound.at[i] = (real)(4 * epsilon * fabs((double)want.at[i]));
        zeros_found += !kept[i];
    }
    check_tensor("out", out, want.at, bound.at, DROP_COUNT);
    dropout_backward(din.at, in, kept, &l, DROP_N, false); // the same rule, for dout = in
    check_tensor("din", din.at, want.at, bound.at, DROP_COUNT);
    check_guards("din", &din);
    double rate = (double)zeros_found / DROP_COUNT,
           sigma = sqrt((double)(p * (1 - p)) / DROP_COUNT);
    if (!(fabs(rate - (double)p) <= 5 * sigma))
        fail("p is %g but the rate of zeros is %g", (double)p, rate);
    free(din.base);
    free(bound.base);
    free(want.base);
}

static void test_dropout_values(void) {
    static const real rates[] = {0, (real).1, (real).25, (real).5, (real).9};
    static uint8_t kept[DROP_COUNT];
    Draw draw = {.seed = 1, .epoch = 1};
    Array in = random_array(DROP_COUNT);
    for (size_t i = 0; i < sizeof rates / sizeof *rates; i++) {
        Array out = array(DROP_COUNT, guard_value);
        memset(kept, 7, sizeof kept);
        drop(out.at, kept, in.at, rates[i], DROP_N, drop_stream, &draw);
        check_guards("out", &out);
        check_dropout_values(in.at, out.at, kept, rates[i]);
        if (rates[i] == 0 && memcmp(out.at, in.at, DROP_COUNT * sizeof(real)) != 0)
            fail("p = 0 changes the numbers");
        free(out.base);
    }
    free(in.base);
    verdict("dropout: rate, mask, output and gradient agree");
}

// How many mask bytes differ: about half if two masks with p = 0.5 are independent.
static double differing(const uint8_t *a, const uint8_t *b, size_t count) {
    size_t differ = 0;
    for (size_t i = 0; i < count; i++)
        differ += a[i] != b[i];
    return (double)differ / (double)count;
}

static void expect_independent(const char *what, const uint8_t *a, const uint8_t *b, size_t count) {
    if (!(fabs(differing(a, b, count) - .5) < .05))
        fail("another %s: %.1f %% of the mask differ, expected 50", what,
             100 * differing(a, b, count));
}

static void test_dropout_draws(void) {
    static uint8_t one[DROP_COUNT], other[DROP_COUNT];
    Draw base = {.seed = 1, .epoch = 1, .first = 100}, draws[3] = {base, base, base};
    const char *names[3] = {"seed", "epoch", "position"};
    Array in = random_array(DROP_COUNT), out = array(DROP_COUNT, guard_value);
    real p = (real).5;
    drop(out.at, one, in.at, p, DROP_N, drop_stream, &base);
    for (size_t cut = 1; cut < DROP_N; cut++) { // the batch's borders change nothing
        Draw second = {.seed = 1, .epoch = 1, .first = base.first + cut};
        size_t at = cut * DROP_SIZE;
        drop(out.at, other, in.at, p, cut, drop_stream, &base);
        drop(out.at + at, other + at, in.at + at, p, DROP_N - cut, drop_stream, &second);
        if (memcmp(one, other, sizeof one) != 0)
            fail("a batch cut at image %zu draws another mask", cut);
    }
    draws[0].seed++;
    draws[1].epoch++;
    draws[2].first += DROP_N;
    for (size_t i = 0; i < 3; i++) {
        drop(out.at, other, in.at, p, DROP_N, drop_stream, &draws[i]);
        expect_independent(names[i], one, other, sizeof one);
    }
    drop(out.at, other, in.at, p, DROP_N, drop_stream + 1, &base);
    expect_independent("layer", one, other, sizeof one);
    expect_independent("image", one, one + DROP_SIZE, DROP_SIZE);
    free(in.base);
    free(out.base);
    verdict("dropout: drawn by seed, epoch, layer and image alone");
}

/* ---- BatchNorm ------------------------------------------------------------------------------ */

enum { BN_CHANNELS = 6, BN_MOST = 9 };
static const Shape bn_shape = {5, 7, BN_CHANNELS};
static const Layer bn_layer = {.kind = BATCHNORM2D,
                               .in = {5, 7, BN_CHANNELS},
                               .out = {5, 7, BN_CHANNELS},
                               .weights = BN_CHANNELS,
                               .biases = BN_CHANNELS};

// A BatchNorm on its own; the numbers of channel c lie around means[c], as far as spreads[c].
typedef struct Norm {
    Array in, out, stats, weight, bias, scratch;
} Norm;

static Norm make_norm(void) {
    size_t count = BN_MOST * shape_size(bn_shape);
    Norm x = {random_array(count),
              array(count, guard_value),
              array(4 * BN_CHANNELS, guard_value),
              random_array(BN_CHANNELS),
              random_array(BN_CHANNELS),
              array(scratch_size_naive(&bn_layer, BN_MOST), guard_value)};
    for (size_t c = 0; c < BN_CHANNELS; c++) { // as net_init() leaves them
        x.stats.at[c] = 0;
        x.stats.at[BN_CHANNELS + c] = 1;
    }
    return x;
}

static void draw_norm_input(Norm *x, const double *means, const double *spreads) {
    for (size_t i = 0; i < x->in.count; i++)
        x->in.at[i] =
            (real)(means[i % BN_CHANNELS] + spreads[i % BN_CHANNELS] * (double)draw_real());
}

static void run_norm(Norm *x, size_t n, bool training) {
    batchnorm2d_forward(x->out.at, x->stats.at, x->in.at, x->weight.at, x->bias.at, NULL, &bn_layer,
                        n, training, x->scratch.at);
    check_guards("out", &x->out);
    check_guards("stats", &x->stats);
    check_guards("scratch", &x->scratch);
}

// In two passes and more digits than those of a real.
typedef struct Moments {
    long double mean, variance, farthest; // farthest: the largest distance from the mean
} Moments;

static Moments moments_of(const Norm *x, size_t n, size_t c) {
    Moments m = {0};
    size_t pixels = n * bn_shape.h * bn_shape.w;
    for (size_t i = 0; i < pixels; i++)
        m.mean += x->in.at[i * BN_CHANNELS + c] / (long double)pixels;
    for (size_t i = 0; i < pixels; i++) {
        long double d = x->in.at[i * BN_CHANNELS + c] - m.mean;
        m.variance += d * d / (long double)pixels;
        m.farthest = fmaxl(m.farthest, fabsl(d));
    }
    return m;
}

/* How far off a variance may be, as a part of it: a sum of squares over a slice, and means that are
   each rounded, which moves the squared distances from them. */
static double variance_error(const Moments *m, size_t n) {
    double terms = (double)(n * bn_shape.h * bn_shape.w) / BN_SLICES + 4;
    double shift = fabs((double)m->mean) / sqrt((double)m->variance);
    return 4 * epsilon * (terms + shift) + 16 * epsilon * epsilon * shift * shift;
}

static void check_norm_outputs(const Norm *x, size_t n, const Moments *m, const double *errors) {
    size_t count = n * shape_size(bn_shape);
    Array want = array(count, 0), bound = array(count, 0);
    for (size_t i = 0; i < count; i++) {
        size_t c = i % BN_CHANNELS;
        double weight = (double)x->weight.at[c], bias = (double)x->bias.at[c];
        double scale = fabs(weight) / sqrt((double)m[c].variance + bn_eps);
        double value = (double)((x->in.at[i] - m[c].mean) * weight /
                                sqrtl(m[c].variance + (long double)bn_eps));
        want.at[i] = (real)(value + bias);
        // in * scale and mean * scale are each rounded before their difference is taken
        bound.at[i] = (real)(4 * epsilon * scale * fabs((double)m[c].mean) +
                             (errors[c] + 8 * epsilon) * fabs(value) + 4 * epsilon * fabs(bias));
    }
    check_tensor("out", x->out.at, want.at, bound.at, count);
    free(want.base);
    free(bound.base);
}

// The statistics that backward will use, of a batch of n images.
static void check_norm_statistics(const Norm *x, size_t n, const Moments *m) {
    real want[2 * BN_CHANNELS], bound[2 * BN_CHANNELS];
    double errors[BN_CHANNELS];
    for (size_t c = 0; c < BN_CHANNELS; c++) {
        errors[c] = variance_error(&m[c], n);
        want[c] = (real)m[c].mean;
        bound[c] = (real)(epsilon * fabs((double)m[c].mean) + errors[c] * (double)m[c].farthest);
        want[BN_CHANNELS + c] = (real)(1 / sqrtl(m[c].variance + (long double)bn_eps));
        bound[BN_CHANNELS + c] = (real)(errors[c] + 2 * epsilon) * want[BN_CHANNELS + c];
    }
    check_tensor("mean and 1 / deviation", x->stats.at + 2 * BN_CHANNELS, want, bound,
                 2 * BN_CHANNELS);
    check_norm_outputs(x, n, m, errors);
}

// The mean of the squares minus the square of the mean would lose all digits here.
static void test_norm_cancellation(void) {
    static const double means[BN_CHANNELS] = {1e4, -1e4, 1e4, -1e4, 0, 1};
    static const double spreads[BN_CHANNELS] = {1, .1, .03, 30, 1e-3, 2};
    Norm x = make_norm();
    for (size_t n = 1; n <= BN_MOST; n++) {
        Moments m[BN_CHANNELS];
        draw_norm_input(&x, means, spreads);
        run_norm(&x, n, true);
        for (size_t c = 0; c < BN_CHANNELS; c++)
            m[c] = moments_of(&x, n, c);
        check_norm_statistics(&x, n, m);
    }
    free_arrays(&x, sizeof x);
    verdict("batchnorm2d: statistics of numbers far from 0");
}

/* Each slice begins with a number far from all others. A sum of squared distances from that one, of
   which most is taken away again, would be off by 200 roundings. */
static void test_norm_outliers(void) {
    enum { SIDE = 64, N = 16, PIXELS = N * SIDE * SIDE };
    Layer l = {.kind = BATCHNORM2D, .in = {SIDE, SIDE, 1}, .out = {SIDE, SIDE, 1}};
    Array in = random_array(PIXELS), out = array(PIXELS, guard_value);
    Array scratch = array(scratch_size_naive(&l, N), guard_value);
    real stats[4] = {0, 1}, weight = 1, bias = 0;
    long double mean = 0, variance = 0;
    for (size_t i = 0; i < PIXELS; i += PIXELS / BN_SLICES)
        in.at[i] = 300;
    batchnorm2d_forward(out.at, stats, in.at, &weight, &bias, NULL, &l, N, true, scratch.at);
    for (size_t i = 0; i < PIXELS; i++)
        mean += in.at[i] / (long double)PIXELS;
    for (size_t i = 0; i < PIXELS; i++)
        variance += (in.at[i] - mean) * (in.at[i] - mean) / (long double)PIXELS;
    real want = (real)(1 / sqrtl(variance + (long double)bn_eps));
    real bound = (real)(32 * epsilon) * want;
    check_tensor("1 / deviation", &stats[3], &want, &bound, 1);
    free_arrays((Array[]){in, out, scratch}, 3 * sizeof(Array));
    verdict("batchnorm2d: statistics with outliers");
}

// Takes one more batch into running statistics, and into the error that they may have.
static void update_running(Moments *running, double *error, const Norm *x, size_t n, size_t c) {
    long double pixels = (long double)(n * bn_shape.h * bn_shape.w);
    Moments batch = moments_of(x, n, c);
    running->mean = .9L * running->mean + .1L * batch.mean;
    running->variance = .9L * running->variance + .1L * batch.variance * pixels / (pixels - 1);
    *error += variance_error(&batch, n);
}

static void check_running(const Norm *x, const Moments *m, const double *errors) {
    real want[2 * BN_CHANNELS], bound[2 * BN_CHANNELS];
    for (size_t c = 0; c < BN_CHANNELS; c++) {
        double mean = (double)m[c].mean, variance = (double)m[c].variance;
        want[c] = (real)mean;
        bound[c] = (real)(errors[c] * (fabs(mean) + sqrt(variance)));
        want[BN_CHANNELS + c] = (real)variance;
        bound[BN_CHANNELS + c] = (real)(errors[c] * variance);
    }
    check_tensor("running mean and variance", x->stats.at, want, bound, 2 * BN_CHANNELS);
}

// Evaluates on other numbers than those of training; that must leave the statistics as they are.
static void check_norm_evaluation(Norm *x) {
    static const double means[BN_CHANNELS] = {3, 2, 1, 0, -1, -2};
    static const double spreads[BN_CHANNELS] = {1, 2, 3, 4, 5, 6};
    real before[4 * BN_CHANNELS];
    Moments m[BN_CHANNELS];
    double errors[BN_CHANNELS] = {0};
    draw_norm_input(x, means, spreads);
    memcpy(before, x->stats.at, sizeof before);
    run_norm(x, 3, false);
    check_tensor("statistics after evaluation", x->stats.at, before, NULL, 4 * BN_CHANNELS);
    for (size_t c = 0; c < BN_CHANNELS; c++)
        m[c] = (Moments){.mean = before[c], .variance = before[BN_CHANNELS + c]};
    check_norm_outputs(x, 3, m, errors);
}

static void test_norm_running(void) {
    static const double means[BN_CHANNELS] = {0, 1, -2, 3, 0, 5};
    static const double spreads[BN_CHANNELS] = {1, 2, .5, 1, 3, .1};
    Norm x = make_norm();
    Moments m[BN_CHANNELS];
    double errors[BN_CHANNELS] = {0};
    for (size_t c = 0; c < BN_CHANNELS; c++)
        m[c] = (Moments){.variance = 1};
    for (size_t n = 1; n <= BN_MOST; n++) { // batches of every size
        draw_norm_input(&x, means, spreads);
        run_norm(&x, n, true);
        for (size_t c = 0; c < BN_CHANNELS; c++)
            update_running(&m[c], &errors[c], &x, n, c);
        check_running(&x, m, errors);
    }
    check_norm_evaluation(&x);
    free_arrays(&x, sizeof x);
    verdict("batchnorm2d: running statistics, and evaluation by them");
}

// Forward and backward, all results one after another.
static Array norm_results(Norm *x, const Array *dout, int threads) {
    size_t count = x->in.count;
    Array all = array(2 * count + 6 * BN_CHANNELS, guard_value);
    real *din = all.at + count, *stats = din + count, *dweight = stats + 4 * BN_CHANNELS;
    omp_set_num_threads(threads);
    memset(stats, 0, 4 * BN_CHANNELS * sizeof *stats);
    batchnorm2d_forward(all.at, stats, x->in.at, x->weight.at, x->bias.at, NULL, &bn_layer, BN_MOST,
                        true, x->scratch.at);
    batchnorm2d_backward(din, dweight, dweight + BN_CHANNELS, dout->at, x->in.at, stats,
                         x->weight.at, &bn_layer, BN_MOST, false, x->scratch.at);
    omp_set_num_threads(2);
    return all;
}

static void test_norm_threads(void) {
    Norm x = make_norm();
    Array dout = random_array(x.in.count);
    Array one = norm_results(&x, &dout, 1);
    for (int threads = 2; threads < 6; threads++) {
        Array more = norm_results(&x, &dout, threads);
        check_tensor("1 thread against more", more.at, one.at, NULL, one.count);
        free(more.base);
    }
    free_arrays(&x, sizeof x);
    free(dout.base);
    free(one.base);
    verdict("batchnorm2d: the same bits for any number of threads");
}

// What BatchNorm adds while it stores has the bits of an add behind it, with and without ReLU.
static void test_norm_residual(void) {
    Norm x = make_norm();
    Array residual = random_array(x.in.count), got = array(x.in.count, guard_value);
    for (int variant = 0; variant < 4; variant++) {
        Layer sum = {.kind = ADD, .fused_relu = variant % 2}, joined = bn_layer;
        joined.add = &sum;
        run_norm(&x, BN_MOST, variant / 2);
        add_arrays(x.out.at, residual.at, x.out.count, sum.fused_relu);
        batchnorm2d_forward(got.at, x.stats.at, x.in.at, x.weight.at, x.bias.at, residual.at,
                            &joined, BN_MOST, variant / 2, x.scratch.at);
        check_tensor("out", got.at, x.out.at, NULL, got.count);
    }
    check_guards("out", &got);
    free_arrays(&x, sizeof x);
    free(residual.base);
    free(got.base);
    verdict("batchnorm2d: an add in one with it");
}

/* ---- Optimizers ----------------------------------------------------------------------------- */

enum { OPT_COUNT = 1003, OPT_STEPS = 10 };
typedef struct Rule {
    const char *name;
    bool adadelta, nesterov;
    double momentum, decay;
} Rule;

typedef struct Reference {
    double param, square, delta, buffer, moved; // moved: the sum of |steps|, for the bound
} Reference;

static double adadelta_delta(Reference *r, double g) {
    r->square = .9 * r->square + .1 * g * g;
    double delta = sqrt(r->delta + 1e-6) / sqrt(r->square + 1e-6) * g;
    r->delta = .9 * r->delta + .1 * delta * delta;
    return .7 * delta;
}

static double sgd_delta(Reference *r, double g, const Rule *rule) {
    r->buffer = rule->momentum * r->buffer + g;
    return .01 * (rule->nesterov ? g + rule->momentum * r->buffer : r->buffer);
}

static void reference_step(Reference *r, double g, const Rule *rule) {
    g += rule->decay * r->param;
    double step = rule->adadelta ? adadelta_delta(r, g) : sgd_delta(r, g, rule);
    r->param -= step;
    r->moved += fabs(step);
}

static void test_optimizer(const Rule *rule) {
    static Reference r[OPT_COUNT];
    Array param = array(OPT_COUNT, guard_value);
    Array want = array(OPT_COUNT, 0), bound = array(OPT_COUNT, 0);
    Array state = array(OPT_COUNT, guard_value), delta = array(OPT_COUNT, guard_value);
    for (size_t i = 0; i < OPT_COUNT; i++) {
        param.at[i] = draw_real();
        r[i] = (Reference){.param = (double)param.at[i]};
        state.at[i] = delta.at[i] = 0;
    }
    for (int step = 0; step < OPT_STEPS; step++) {
        Array grad = random_array(OPT_COUNT);
        for (size_t i = 0; i < OPT_COUNT; i++)
            reference_step(&r[i], (double)grad.at[i], rule);
        if (rule->adadelta)
            adadelta(param.at, grad.at, state.at, delta.at, OPT_COUNT, .7, .9, 1e-6, rule->decay);
        else // without momentum there is no buffer
            sgd(param.at, grad.at, rule->momentum > 0 ? state.at : NULL, OPT_COUNT, .01,
                rule->momentum, rule->decay, rule->nesterov);
        free(grad.base);
    }
    for (size_t i = 0; i < OPT_COUNT; i++) { // each step rounds a few times
        want.at[i] = (real)r[i].param;
        bound.at[i] = (real)(2 * OPT_STEPS * epsilon * (fabs(r[i].param) + 4 * r[i].moved));
    }
    check_tensor("param", param.at, want.at, bound.at, OPT_COUNT);
    check_guards("param", &param);
    check_guards("square_avg or momentum_buffer", &state);
    check_guards("acc_delta", &delta);
    free_arrays((Array[]){param, want, bound, state, delta}, 5 * sizeof(Array));
    verdict("%s", rule->name);
}

enum { FLAT_COUNT = 1003, FLAT_KINDS = 4 };
static const char *const flat_names[FLAT_KINDS] = {"adadelta", "sgd", "dropout's gradient",
                                                   "dropout's gradient, accumulate"};

// An operation that goes over a flat range of numbers, by so many threads. Returns what it made.
static Array run_flat(size_t kind, int threads) {
    Layer l = {.kind = DROPOUT, .p = (real).4, .in = {1, 1, FLAT_COUNT}, .out = {1, 1, FLAT_COUNT}};
    uint8_t mask[FLAT_COUNT];
    drawn = 0; // the same numbers each time
    Array made = random_array(FLAT_COUNT), in = random_array(FLAT_COUNT);
    Array square = absolute(&in), other = absolute(&in);
    for (size_t i = 0; i < FLAT_COUNT; i++)
        mask[i] = draw_bits() % 2;
    omp_set_num_threads(threads);
    if (kind == 0)
        adadelta(made.at, in.at, square.at, other.at, FLAT_COUNT, .7, .9, 1e-6, .1);
    else if (kind == 1)
        sgd(made.at, in.at, square.at, FLAT_COUNT, .1, .9, .1, true);
    else
        dropout_backward(made.at, in.at, mask, &l, 1, kind == 3);
    omp_set_num_threads(2);
    free_arrays((Array[]){in, square, other}, 3 * sizeof(Array));
    return made;
}

static void test_flat_ranges(size_t kind) {
    char name[96];
    Array one = run_flat(kind, 1);
    for (int threads = 2; threads < 9; threads++) {
        Array more = run_flat(kind, threads);
        check_tensor("1 thread against more", more.at, one.at, NULL, FLAT_COUNT);
        free(more.base);
    }
    free(one.base);
    snprintf(name, sizeof name, "%s: the same bits for any number of threads", flat_names[kind]);
    verdict("%s", name);
}

static void test_optimizers(void) {
    static const Rule rules[] = {
        {"adadelta against a plain loop", true, false, 0, 0},
        {"adadelta with weight decay against a plain loop", true, false, 0, .1},
        {"sgd against a plain loop", false, false, 0, 0},
        {"sgd with momentum against a plain loop", false, false, .9, 0},
        {"sgd with momentum and weight decay against a plain loop", false, false, .8, .1},
        {"sgd with Nesterov's momentum against a plain loop", false, true, .9, .1},
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        test_optimizer(&rules[i]);
    for (size_t kind = 0; kind < FLAT_KINDS; kind++)
        test_flat_ranges(kind);
}

/* ---- CIFAR's files -------------------------------------------------------------------------- */

enum { CIFAR_PIXELS = 32 * 32, CIFAR_RECORDS = 3 };

// Byte `channel, pixel` of record `number`.
static uint8_t cifar_byte(size_t number, size_t channel, size_t pixel) {
    return (uint8_t)(number * 91 + channel * 57 + pixel * 7 + pixel / 256);
}

static void write_cifar(const char *path, size_t label_bytes, size_t first) {
    FILE *f = fopen(path, "wb");
    for (size_t i = first; f && i < first + CIFAR_RECORDS; i++) {
        if (label_bytes == 2)
            fputc(19 - (int)i, f); // the coarse label, which is not the one to take
        fputc((int)i + 1, f);
        for (size_t channel = 0; channel < 3; channel++)
            for (size_t pixel = 0; pixel < CIFAR_PIXELS; pixel++)
                fputc(cifar_byte(i, channel, pixel), f);
    }
    if (!f || fclose(f) != 0)
        fail("cannot write %s", path);
}

// Two files of three records each, of which `limit` are kept.
static void check_cifar(const char *dir, size_t classes, size_t limit) {
    const DatasetInfo info = {.name = "cifar",
                              .shape = {32, 32, 3},
                              .classes = classes,
                              .train = 2 * CIFAR_RECORDS,
                              .files = {{"one", "two"}}};
    Dataset data = {.info = &info};
    read_cifar_set(&data, dir, info.files[0], limit);
    if (data.count != min_size(limit, 2 * CIFAR_RECORDS))
        fail("%zu classes: %zu images of at most %zu", classes, data.count, limit);
    for (size_t i = 0; i < data.count; i++) {
        if (data.labels[i] != i + 1)
            fail("%zu classes: image %zu has label %u", classes, i, data.labels[i]);
        for (size_t p = 0; p < 3 * CIFAR_PIXELS; p++)
            if (data.images[i * 3 * CIFAR_PIXELS + p] != cifar_byte(i, p % 3, p / 3))
                fail("%zu classes: byte %zu of image %zu is wrong", classes, p, i);
    }
    free_dataset(&data);
}

static void test_cifar_files(void) {
    char dir[] = "/tmp/test_cnn.XXXXXX", one[64], two[64];
    if (!mkdtemp(dir))
        fail("cannot create %s", dir);
    snprintf(one, sizeof one, "%s/one", dir);
    snprintf(two, sizeof two, "%s/two", dir);
    for (size_t label_bytes = 1; label_bytes <= 2; label_bytes++) {
        write_cifar(one, label_bytes, 0);
        write_cifar(two, label_bytes, CIFAR_RECORDS);
        for (size_t limit = 1; limit < 8 && !*failure; limit++)
            check_cifar(dir, label_bytes == 2 ? 100 : 10, limit);
    }
    unlink(one);
    unlink(two);
    rmdir(dir);
    verdict("CIFAR's files: labels, order of the bytes, limit");
}

/* ---- Loader --------------------------------------------------------------------------------- */

enum { IMAGES = 103, LOAD_BATCH = 8, LOAD_BATCHES = 13 };
static const DatasetInfo tiny_info = {.name = "tiny",
                                      .shape = {1, 2, 3},
                                      .classes = 10,
                                      .train = IMAGES,
                                      .mean = {.1, .2, .3},
                                      .std = {.5, .25, .125}};

// Each image holds its own number: times 1, 2, ... 6, modulo 251, in its six bytes.
static Dataset tiny_dataset(void) {
    static uint8_t images[IMAGES * 6], labels[IMAGES];
    for (size_t i = 0; i < IMAGES; i++) {
        labels[i] = (uint8_t)(i % 10);
        for (size_t p = 0; p < 6; p++)
            images[i * 6 + p] = (uint8_t)((i + 1) * (p + 1) % 251);
    }
    return (Dataset){&tiny_info, IMAGES, images, labels};
}

static size_t image_number(const Batch *batch, size_t i) {
    const real *pixels = batch->images + i * 6;
    size_t number = (size_t)lround(((double)pixels[0] * .5 + .1) * 255) - 1;
    for (size_t p = 0; p < 6; p++) {
        double mean = tiny_info.mean[p % 3], std = tiny_info.std[p % 3];
        double want = ((double)((number + 1) * (p + 1) % 251) / 255 - mean) / std;
        if (!(fabs((double)pixels[p] - want) < 64 * epsilon))
            fail("pixel %zu of image %zu is %g, expected %g", p, number, (double)pixels[p], want);
    }
    if (batch->labels[i] != number % 10)
        fail("image %zu has label %u", number, batch->labels[i]);
    return number;
}

// Runs through the batches of an epoch that was started; the images in the order they came.
static void read_epoch(Loader *l, size_t order[IMAGES]) {
    size_t seen[IMAGES] = {0}, count = 0, batches = 0;
    for (const Batch *b; (b = loader_next(l)); batches++) {
        if (b->draw.first != count || b->n != min_size(LOAD_BATCH, IMAGES - count)) {
            fail("batch %zu: %zu images from position %zu on", batches, b->n, b->draw.first);
            return;
        }
        for (size_t i = 0; i < b->n; i++) {
            size_t number = image_number(b, i);
            if (number >= IMAGES || seen[number]++)
                fail("image %zu came twice or does not exist", number);
            order[count++] = number;
        }
    }
    if (batches != LOAD_BATCHES || count != IMAGES)
        fail("%zu batches with %zu images", batches, count);
}

static void test_loader_order(void) {
    static size_t orders[2][4][IMAGES];
    Dataset data = tiny_dataset();
    for (size_t run = 0; run < 2; run++) {
        Loader l;
        loader_init(&l, &data, LOAD_BATCH, run ? 4 : 1, NULL, on_cpu);
        for (size_t epoch = 0; epoch < 4; epoch++) {
            loader_start(&l, 11, epoch, 0);
            read_epoch(&l, orders[run][epoch]);
        }
        loader_free(&l);
    }
    for (size_t i = 0; i < IMAGES; i++)
        if (orders[0][0][i] != i)
            fail("epoch 0 is not in the order of the file");
    for (size_t epoch = 0; epoch + 1 < 4; epoch++)
        if (memcmp(orders[0][epoch], orders[0][epoch + 1], sizeof orders[0][0]) == 0)
            fail("epochs %zu and %zu have the same order", epoch, epoch + 1);
    if (memcmp(orders[0], orders[1], sizeof orders[0]) != 0)
        fail("4 workers give another order than 1");
    verdict("loader: each image once, the same order for 1 and 4 workers");
}

// Ranks 0 to N - 1 take an epoch's positions in turn; in training the first images come again at
// the end, in a test none does.
static void test_loader_shares(void) {
    static size_t whole[IMAGES];
    Dataset data = tiny_dataset();
    Loader l;
    loader_init(&l, &data, LOAD_BATCH, 1, NULL, on_cpu);
    loader_start(&l, 11, 3, 0);
    read_epoch(&l, whole);
    loader_free(&l);
    for (size_t world = 2; world <= IMAGES + 3; world++)
        for (size_t rank = 0; rank < world; rank++)
            for (size_t epoch = 0; epoch <= 3; epoch += 3) {
                Placement place = on_cpu;
                place.rank = rank;
                place.others = world - 1;
                loader_init(&l, &data, LOAD_BATCH, 2, NULL, place);
                loader_start(&l, 11, epoch, 0);
                size_t position = rank, n = 0;
                for (const Batch *batch; (batch = loader_next(&l)); n += batch->n)
                    for (size_t i = 0; i < batch->n; i++, position += world) {
                        size_t want = epoch ? whole[position % IMAGES] : position;
                        if (batch->labels[i] != data.labels[want] ||
                            position_of(batch->draw, i) != position)
                            fail("rank %zu of %zu, epoch %zu, position %zu: another image", rank,
                                 world, epoch, position);
                    }
                size_t share = epoch           ? ceil_div(IMAGES, world)
                               : rank < IMAGES ? ceil_div(IMAGES - rank, world)
                                               : 0;
                if (n != share)
                    fail("rank %zu of %zu, epoch %zu: %zu images, expected %zu", rank, world, epoch,
                         n, share);
                loader_free(&l);
            }
    verdict("loader: the shares of several ranks");
}

static void test_loader_left_early(void) {
    static size_t want[IMAGES], got[IMAGES];
    Dataset data = tiny_dataset();
    Loader l;
    loader_init(&l, &data, LOAD_BATCH, 3, NULL, on_cpu);
    loader_start(&l, 11, 5, 0);
    read_epoch(&l, want);
    for (size_t round = 0; round < 200; round++) {
        loader_start(&l, 11, 6, 0);
        for (size_t taken = 0; taken < round % LOAD_BATCHES; taken++)
            loader_next(&l);
        loader_start(&l, 11, 5, 0);
        read_epoch(&l, got);
        if (memcmp(want, got, sizeof want) != 0)
            fail("an epoch left after %zu batches shows in the next", round % LOAD_BATCHES);
    }
    loader_free(&l);
    verdict("loader: an epoch left early, then a fresh one");
}

/* ---- Augmentation --------------------------------------------------------------------------- */

enum { CROP_H = 6, CROP_W = 5, CROP_SIZE = CROP_H * CROP_W * 3, CROP_REACH = 4, CROP_VIEWS = 162 };
static const Shape crop_shape = {CROP_H, CROP_W, 3};

// View number v of 9 x 9 x 2: the image in a black frame, another part cut out, maybe mirrored.
static void cut_view(uint8_t *out, const uint8_t *in, size_t v) {
    static uint8_t frame[CROP_H + 2 * CROP_REACH][CROP_W + 2 * CROP_REACH][3];
    memset(frame, 0, sizeof frame);
    for (size_t y = 0; y < CROP_H; y++)
        memcpy(frame[y + CROP_REACH][CROP_REACH], in + y * CROP_W * 3, sizeof(uint8_t[CROP_W][3]));
    for (size_t y = 0; y < CROP_H; y++)
        for (size_t x = 0; x < CROP_W; x++) {
            size_t from = v % 2 ? CROP_W - 1 - x : x;
            memcpy(out + (y * CROP_W + x) * 3, frame[y + v / 2 / 9][from + v / 2 % 9], 3);
        }
}

// Which of the views an image is; CROP_VIEWS: none
static size_t find_view(const uint8_t *image, const uint8_t *original) {
    uint8_t view[CROP_SIZE];
    size_t v = 0;
    for (; v < CROP_VIEWS; v++) {
        cut_view(view, original, v);
        if (memcmp(view, image, CROP_SIZE) == 0)
            break;
    }
    return v;
}

static void test_crop_flip(void) {
    enum { DRAWS = 6000 };
    size_t found[CROP_VIEWS + 1] = {0};
    uint8_t in[CROP_SIZE], out[CROP_SIZE];
    for (size_t i = 0; i < CROP_SIZE; i++)
        in[i] = (uint8_t)(i + 1);
    for (size_t i = 0; i < DRAWS; i++) {
        Draw draw = {.seed = 4 + i / 2000, .epoch = 1 + i / 500, .first = i};
        augment_crop_flip(out, in, crop_shape, &draw);
        found[find_view(out, in)]++;
    }
    if (found[CROP_VIEWS])
        fail("%zu images are none of the views", found[CROP_VIEWS]);
    for (size_t v = 0; v < CROP_VIEWS; v++) // 37 are expected, give or take 6
        if (found[v] < 7 || found[v] > 67)
            fail("view %zu came %zu times in %d", v, found[v], DRAWS);
    verdict("crop-flip: every image one of 162 views, all of them as often");
}

enum { ELASTIC_SIDE = 28, ELASTIC_STEP = 9, ELASTIC_DRAWS = 1000 };

// Channels: ELASTIC_STEP * row, ELASTIC_STEP * column, white. So a pixel tells where it came from.
static void draw_map(uint8_t *image) {
    for (size_t y = 0; y < ELASTIC_SIDE; y++)
        for (size_t x = 0; x < ELASTIC_SIDE; x++) {
            *image++ = (uint8_t)(ELASTIC_STEP * y);
            *image++ = (uint8_t)(ELASTIC_STEP * x);
            *image++ = 255;
        }
}

typedef struct Field { // sums over pixels in the middle
    double count, sum[2], squares[2], product, steps[2], largest;
    size_t outside, grey; // pixels that came from outside, or from the border
} Field;

// How far pixel (y, x) came from, down and right.
static void displacement(double d[2], const uint8_t *image, size_t y, size_t x) {
    const uint8_t *pixel = image + (y * ELASTIC_SIDE + x) * 3;
    d[0] = pixel[0] / (double)ELASTIC_STEP - (double)y;
    d[1] = pixel[1] / (double)ELASTIC_STEP - (double)x;
}

// Within the blur's reach of the border, 12 pixels, the field is smaller: only the middle counts.
static void measure_field(Field *f, const uint8_t *image) {
    for (size_t y = 12; y < ELASTIC_SIDE - 12; y++)
        for (size_t x = 12; x < ELASTIC_SIDE - 12; x++) {
            double d[2], next[2];
            displacement(d, image, y, x);
            displacement(next, image, y, x + 1);
            f->count++;
            f->product += d[0] * d[1];
            for (size_t i = 0; i < 2; i++) {
                f->sum[i] += d[i];
                f->squares[i] += d[i] * d[i];
                f->steps[i] += (next[i] - d[i]) * (next[i] - d[i]);
                f->largest = fmax(f->largest, fabs(d[i]));
            }
        }
    for (size_t i = 0; i < ELASTIC_SIDE * ELASTIC_SIDE; i++) {
        f->outside += image[3 * i + 2] == 0;
        f->grey += image[3 * i + 2] > 0 && image[3 * i + 2] < 255;
    }
}

/* A uniform field in [-34, 34) has a deviation of 34 / sqrt(3). Blurred with sigma 4 in two
   directions, a sum with weights whose squares add up to 1 / (4 pi sigma^2), it keeps 1.38 pixels
   of them; neighbours then differ by 0.244, and by 0.25 in bytes. */
static void test_elastic_field(void) {
    static uint8_t in[ELASTIC_SIDE * ELASTIC_SIDE * 3], out[sizeof in];
    Shape s = {ELASTIC_SIDE, ELASTIC_SIDE, 3};
    Field f = {0};
    size_t changed = 0;
    draw_map(in);
    for (size_t i = 0; i < ELASTIC_DRAWS; i++) {
        Draw draw = {.seed = 3, .epoch = 1 + i % 7, .first = i};
        augment_elastic(out, in, s, &draw);
        measure_field(&f, out);
        changed += memcmp(in, out, sizeof in) != 0;
    }
    for (size_t i = 0; i < 2; i++) {
        double mean = f.sum[i] / f.count, deviation = sqrt(f.squares[i] / f.count);
        double step = sqrt(f.steps[i] / f.count);
        if (!(fabs(mean) < .25 && deviation > 1.25 && deviation < 1.52 && step > .22 && step < .28))
            fail("direction %zu: mean %.3f, deviation %.3f, neighbours differ by %.3f", i, mean,
                 deviation, step);
    }
    double together = f.product / sqrt(f.squares[0] * f.squares[1]);
    if (!(fabs(together) < .2))
        fail("down and right move together: correlation %.2f", together);
    if (!(f.largest < 7) || changed != ELASTIC_DRAWS)
        fail("largest %.1f pixels, %zu of %d images changed", f.largest, changed, ELASTIC_DRAWS);
    if (f.outside == 0 || f.grey == 0 || f.outside > ELASTIC_DRAWS * 40)
        fail("%zu pixels black, %zu grey at the border", f.outside, f.grey);
    verdict("elastic: how far pixels move, black outside");
}

enum { VIEW_IMAGES = 45, VIEW_SIZE = 9 * 8 * 3 };
static const DatasetInfo view_info = {.name = "views",
                                      .shape = {9, 8, 3},
                                      .classes = VIEW_IMAGES,
                                      .train = VIEW_IMAGES,
                                      .mean = {.1, .2, .3},
                                      .std = {.5, .25, .125}};

// Random images, each with its own number as label.
static Dataset view_dataset(void) {
    static uint8_t images[VIEW_IMAGES * VIEW_SIZE], labels[VIEW_IMAGES];
    for (size_t i = 0; i < sizeof images; i++)
        images[i] = (uint8_t)draw_size(1, 255);
    for (size_t i = 0; i < VIEW_IMAGES; i++)
        labels[i] = (uint8_t)i;
    return (Dataset){&view_info, VIEW_IMAGES, images, labels};
}

// All images of epoch 3 from batch `first` on, where they belong; returns at which position.
static size_t load_views(Array *views, uint8_t *labels, const Dataset *data, Augment *augment,
                         size_t batch, size_t workers, size_t first) {
    Loader l;
    loader_init(&l, data, batch, workers, augment, on_cpu);
    loader_start(&l, 21, 2, 0); // an epoch left early
    loader_next(&l);
    loader_start(&l, 21, 3, first);
    size_t position = first * batch;
    for (const Batch *b; (b = loader_next(&l)); position += b->n) {
        if (b->draw.first != position)
            fail("a batch is at position %zu, expected %zu", b->draw.first, position);
        memcpy(views->at + position * VIEW_SIZE, b->images, b->n * VIEW_SIZE * sizeof(real));
        memcpy(labels + position, b->labels, b->n);
    }
    if (position != VIEW_IMAGES)
        fail("the epoch ended at position %zu", position);
    loader_free(&l);
    return first * batch;
}

// The same from the function itself, image by image.
static Array expected_views(const Dataset *data, Augment *augment, const uint8_t *labels) {
    Array views = array(VIEW_IMAGES * VIEW_SIZE, 0);
    for (size_t i = 0; i < VIEW_IMAGES; i++) {
        Draw draw = {.seed = 21, .epoch = 3, .first = i};
        uint8_t bytes[VIEW_SIZE];
        memcpy(bytes, data->images + labels[i] * VIEW_SIZE, VIEW_SIZE);
        if (augment)
            augment(bytes, data->images + labels[i] * VIEW_SIZE, data->info->shape, &draw);
        for (size_t p = 0; p < VIEW_SIZE; p++)
            views.at[i * VIEW_SIZE + p] =
                ((real)bytes[p] / 255 - (real)view_info.mean[p % 3]) / (real)view_info.std[p % 3];
    }
    return views;
}

static void test_augmented_loader(size_t augmentation) {
    static const size_t runs[][3] = {{8, 1, 0}, {8, 4, 0}, {13, 4, 0}, {1, 2, 0}, {8, 3, 2}};
    Augment *augment = augmentations[augmentation].augment;
    Dataset data = view_dataset();
    uint8_t labels[VIEW_IMAGES];
    for (size_t run = 0; run < sizeof runs / sizeof *runs; run++) {
        Array views = array(VIEW_IMAGES * VIEW_SIZE, guard_value);
        size_t first =
            load_views(&views, labels, &data, augment, runs[run][0], runs[run][1], runs[run][2]);
        Array want = expected_views(&data, augment, labels);
        size_t at = first * VIEW_SIZE;
        check_tensor("images", views.at + at, want.at + at, NULL, want.count - at);
        free_arrays((Array[]){views, want}, 2 * sizeof(Array));
    }
    char name[96];
    snprintf(name, sizeof name, "loader: augmentation %s, whatever the batches and workers",
             augmentations[augmentation].name);
    verdict("%s", name);
}

// Another seed, epoch or position: another view of the same image, in nearly all cases.
static void test_augmentation_draws(size_t augmentation) {
    Augment *augment = augmentations[augmentation].augment;
    Dataset data = view_dataset();
    for (size_t what = 0; what < 3; what++) {
        size_t same = 0;
        for (size_t i = 0; i < 200; i++) {
            uint8_t one[VIEW_SIZE], other[VIEW_SIZE];
            Draw draw = {.seed = 4, .epoch = 5, .first = i};
            augment(one, data.images, view_info.shape, &draw);
            draw.seed += what == 0;
            draw.epoch += what == 1;
            draw.first += what == 2;
            augment(other, data.images, view_info.shape, &draw);
            same += memcmp(one, other, VIEW_SIZE) == 0;
        }
        if (same > 10)
            fail("%zu of 200 views are the same by another %s", same,
                 (const char *[]){"seed", "epoch", "position"}[what]);
    }
    char name[96];
    snprintf(name, sizeof name, "augmentation %s: drawn by seed, epoch and position",
             augmentations[augmentation].name);
    verdict("%s", name);
}

static void test_augmentation(void) {
    test_crop_flip();
    test_elastic_field();
    for (size_t i = 0; i < AUGMENTATIONS; i++)
        test_augmented_loader(i);
    for (size_t i = 1; i < AUGMENTATIONS; i++)
        test_augmentation_draws(i);
}

/* ---- No allocation and no new thread inside of a training step ------------------------------ */

#if defined(__GLIBC__) && !defined(SANITIZED)
#define COUNTS_ALLOCATIONS
static volatile bool counting; // compilers think that malloc reads no variable of ours
static volatile size_t allocations;
void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);

extern char __executable_start[],
    etext[]; // the linker's: where this program's code begins and ends

/* clang's libomp takes memory for every parallel region. That is not ours to change, so with clang
   only calls from this program count; with gcc those that libgomp makes count as well. */
static bool is_ours(const void *caller) {
#ifdef __clang__
    return (uintptr_t)caller >= (uintptr_t)__executable_start &&
           (uintptr_t)caller < (uintptr_t)etext;
#else
    return caller != NULL;
#endif
}

static void count_one(const void *caller) {
    if (is_ours(caller) && __atomic_load_n(&counting, __ATOMIC_RELAXED))
        __atomic_add_fetch(&allocations, 1, __ATOMIC_RELAXED);
}

// The program's own definitions come before the C library's, also for what libgomp calls.
__attribute__((noinline)) void *malloc(size_t size) {
    count_one(__builtin_return_address(0));
    return __libc_malloc(size);
}

__attribute__((noinline)) void *calloc(size_t count, size_t size) {
    count_one(__builtin_return_address(0));
    return __libc_calloc(count, size);
}

__attribute__((noinline)) void *realloc(void *memory, size_t size) {
    count_one(__builtin_return_address(0));
    return __libc_realloc(memory, size);
}

__attribute__((noinline)) void *aligned_alloc(size_t alignment, size_t size) {
    count_one(__builtin_return_address(0));
    return __libc_memalign(alignment, size);
}

__attribute__((noinline)) int posix_memalign(void **memory, size_t alignment, size_t size) {
    count_one(__builtin_return_address(0));
    *memory = __libc_memalign(alignment, size);
    return *memory ? 0 : ENOMEM;
}

__attribute__((noinline)) int pthread_create(pthread_t *thread, const pthread_attr_t *attr,
                                             void *(*start)(void *), void *argument) {
    typedef int Create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    count_one(__builtin_return_address(0));
    Create *create;
    *(void **)&create = dlsym(RTLD_NEXT, "pthread_create");
    return create(thread, attr, start, argument);
}

static void train_steps(Net *net, Loader *l, const Optimizer *o, real *state, size_t steps) {
    for (size_t step = 0; step < steps; step++) {
        const Batch *batch = loader_next(l);
        Draw draw = {.seed = 1, .epoch = 1, .first = batch->draw.first};
        net_load(net, batch);
        if (output(net, &net->layers[0]) != batch->device_images)
            fail("a CPU has copied the loader's images");
        forward(net, batch->n, &draw);
        double loss = loss_and_gradient(net, batch->n, true);
        if (!isfinite(loss))
            fail("the loss is %g", loss);
        backward(net, batch->n);
        optimizer_step(o, net, state, .1);
    }
}

static void *no_work(void *argument) {
    return argument;
}

// The counter has to see what it is there for.
static void check_counter(void) {
    allocations = 0;
    counting = true;
    void *volatile memory = malloc(10);
    free(memory);
    free(must_alloc(10, "a control"));
    pthread_t thread;
    if (pthread_create(&thread, NULL, no_work, NULL) == 0)
        pthread_join(thread, NULL);
    counting = false;
    if (allocations < 3)
        fail("control: %zu of 3 allocations and threads counted", allocations);
}

static void test_steady_steps(const Model *model, const Optimizer *o, Augment *augment) {
    static Net net;
    Settings settings = plain;
    settings.momentum = .9;
    DatasetInfo info = dataset_for(model, "synthetic");
    Dataset data = {.info = &info};
    Loader l;
    make_synthetic(&data, true, 160);
    net_build(&net, model, &info, &settings, &backends[1]);
    plan_memory(&net, 16);
    net_alloc(&net);
    net_init(&net, 1);
    real *state = must_alloc(2 * net.param_size * sizeof(real), "a test");
    loader_init(&l, &data, 16, 2, augment, on_cpu);
    loader_start(&l, 1, 1, 0);
    train_steps(&net, &l, o, state, 3);
    allocations = 0;
    counting = true;
    train_steps(&net, &l, o, state, 5);
    counting = false;
    if (allocations)
        fail("%s: %zu allocations or new threads in 5 steps", model->name, allocations);
    loader_free(&l);
    net_free(&net);
    free(state);
    free_dataset(&data);
}
#endif

static void test_steps(void) {
#ifdef COUNTS_ALLOCATIONS
    check_counter();
    test_steady_steps(find_model("mnist"), &optimizers[0], augment_elastic);
    test_steady_steps(find_model("resnet8"), &optimizers[1], augment_crop_flip);
    verdict("no allocation and no new thread in a training step");
#else
    skip("no allocation and no new thread in a training step",
         "the allocator cannot be replaced here (sanitizer, or not glibc)");
#endif
}

/* ---- Weights as PyTorch has them ------------------------------------------------------------ */

// Weights that hold their own index, so that each one's way can be told.
static void check_permutation(Shape s, size_t outputs) {
    size_t count = shape_size(s) * outputs;
    Array from = array(count, 0), got = array(count, guard_value), want = array(count, 0);
    for (size_t i = 0; i < count; i++)
        from.at[i] = (real)i;
    for (size_t y = 0; y < s.h; y++)
        for (size_t x = 0; x < s.w; x++)
            for (size_t c = 0; c < s.c; c++)
                for (size_t k = 0; k < outputs; k++)
                    want.at[((k * s.c + c) * s.h + y) * s.w + x] =
                        (real)(((y * s.w + x) * s.c + c) * outputs + k);
    reorder_weight(got.at, from.at, s, outputs, true);
    check_tensor("weight", got.at, want.at, NULL, count);
    reorder_weight(got.at, want.at, s, outputs, false);
    check_tensor("weight and back", got.at, from.at, NULL, count);
    check_guards("weight", &got);
    free_arrays((Array[]){from, got, want}, 3 * sizeof(Array));
}

static void test_to_pytorch(void) {
    check_permutation((Shape){3, 3, 2}, 5);
    check_permutation((Shape){4, 3, 5}, 6);
    check_permutation((Shape){1, 1, 7}, 3);
    verdict("weights in PyTorch's order, and back");
}

/* ---- What PyTorch computes: tests/golden, made by tests/make_golden.py ---------------------- */

typedef struct Line {
    char keyword[16], name[64], kind[16];
    double *numbers;
    size_t count;
} Line;

typedef struct Golden {
    Line lines[256];
    size_t count;
} Golden;

// The words of a line up to its first number, and its numbers.
static Line parse_golden_line(char *text) {
    Line line = {.numbers = must_alloc(strlen(text) * sizeof(double), "a test")};
    char *rest = NULL, *words[3] = {line.keyword, line.name, line.kind};
    size_t sizes[3] = {sizeof line.keyword, sizeof line.name, sizeof line.kind}, count = 0;
    for (char *word = strtok_r(text, " \n", &rest); word; word = strtok_r(NULL, " \n", &rest)) {
        char *end;
        double number = strtod(word, &end);
        if (count < 2 || *end)
            snprintf(words[count], sizes[count], "%s", word);
        else
            line.numbers[line.count++] = number;
        count += count < 2;
    }
    return line;
}

static bool read_golden(Golden *g, const char *name) {
    char path[128], *text = NULL;
    size_t size = 0;
    snprintf(path, sizeof path, "tests/golden/%s.txt", name);
    FILE *f = fopen(path, "r");
    g->count = 0;
    if (!f)
        fail("cannot read %s: run in the repository's root", path);
    while (f && getline(&text, &size, f) > 0 && g->count < 256)
        if (*text != '#')
            g->lines[g->count++] = parse_golden_line(text);
    free(text);
    if (f)
        fclose(f);
    return f != NULL;
}

static void free_golden(Golden *g) {
    for (size_t i = 0; i < g->count; i++)
        free(g->lines[i].numbers);
}

static const Line *golden_line(const Golden *g, const char *keyword, size_t number) {
    for (size_t i = 0; i < g->count; i++)
        if (strcmp(g->lines[i].keyword, keyword) == 0 && number-- == 0)
            return &g->lines[i];
    return NULL;
}

// Streams of numbers as make_golden.py has them.
enum { IMAGE_STREAM = 50, LABEL_STREAM, START_STREAM = 60, GRADIENT_STREAM, LOGIT_STREAM = 80 };
enum { WEIGHT_STREAM = 100, GOLDEN_CLASSES = 10, GOLDEN_LISTED = 64 };

static void fill_stream(real *to, size_t count, uint32_t stream) {
    for (size_t i = 0; i < count; i++) {
        uint32_t r[4];
        philox4x32(r, (uint32_t)(i / 4), stream, 0, 0xFFFE, 309);
        to[i] = 2 * uniform(r[i % 4]) - 1;
    }
}

static void fill_labels(uint8_t *labels, size_t count) {
    real values[count];
    fill_stream(values, count, LABEL_STREAM);
    for (size_t i = 0; i < count; i++)
        labels[i] = (uint8_t)floor(((double)values[i] + 1) / 2 * GOLDEN_CLASSES);
}

static size_t golden_bottleneck(Net *net, size_t x) {
    x = relu(net, conv_bn(net, x, "", 1, 8, 3, 1));
    x = bottleneck(net, x, "layer1.0.", 8, 1);
    x = bottleneck(net, x, "layer2.0.", 16, 2);
    x = bottleneck(net, x, "layer2.1.", 16, 1);
    x = named(net, linear(net, global_avgpool2d(net, x), net->classes), "fc");
    return log_softmax(net, x);
}

typedef struct GoldenNet {
    const char *name;
    size_t (*build)(Net *net, size_t x);
    size_t batch;
    Shape images;
} GoldenNet;
static const GoldenNet golden_nets[] = {{"mnist", model_mnist, 4, {28, 28, 1}},
                                        {"cifar", model_cifar, 4, {32, 32, 3}},
                                        {"bottleneck", golden_bottleneck, 6, {12, 12, 3}},
                                        {"resnet8", model_resnet8, 6, {16, 16, 3}}};

static void build_golden_net(Net *net, const GoldenNet *g, const Backend *b) {
    Model model = {.name = g->name, .build = g->build};
    DatasetInfo info = {.name = "golden", .shape = g->images, .classes = GOLDEN_CLASSES};
    net_build(net, &model, &info, &plain, b);
    for (size_t i = 0; i < net->count; i++)
        if (net->layers[i].kind == DROPOUT)
            net->layers[i].p = 0;
    plan_memory(net, g->batch);
    net_alloc(net);
    net_init(net, 1);
}

// The tensor of this name in our list of those that a checkpoint holds.
static const Tensor *find_tensor(const Tensor *list, size_t count, const char *name) {
    for (size_t i = 0; i < count; i++)
        if (strcmp(list[i].name, name) == 0)
            return &list[i];
    fail("there is no tensor %s", name);
    return NULL;
}

// What make_golden.py gives to the parameter that is number t in PyTorch's order.
static void set_golden_parameter(Net *net, const Tensor *t, uint32_t number) {
    bool norm = strstr(t->name, "bn") || strstr(t->name, "downsample.1");
    bool bias = strstr(t->name, ".bias");
    real *values = net->host[0];
    fill_stream(values, t->count, WEIGHT_STREAM + number);
    double fan_in = t->filter.h ? (double)(t->count / t->outputs) : 1;
    for (size_t i = 0; i < t->count; i++) {
        double v = (double)values[i];
        values[i] = (real)(t->filter.h ? 1 / sqrt(fan_in) * v
                           : !norm     ? .1 * v
                           : bias      ? .3 * v
                                       : 1 + .5 * v);
    }
    if (t->filter.h)
        reorder_weight(t->values, values, t->filter, t->outputs, false);
    else
        memcpy(t->values, values, t->count * sizeof(real));
}

// Parameters in the order of the file's gradients, which is that of named_parameters().
static void set_golden_parameters(Net *net, const Golden *g, const Tensor *list, size_t count) {
    const Line *line;
    for (uint32_t t = 0; (line = golden_line(g, "grad", t)); t++) {
        const Tensor *tensor = find_tensor(list, count, line->name);
        if (tensor)
            set_golden_parameter(net, tensor, t);
    }
}

/* How far off a result may be, as a part of the largest number of its tensor. In double: 1e-6, as
   if by another order of sums. In float: a sum of t terms is off by about sqrt(t) * epsilon of its
   size; a gradient has been through the sums forward and backward of all rows: their errors add up.
   That holds as long as no rounding moves a ReLU's input over 0 or changes who is a max-pool's
   largest. Those inputs are at least 8e-6 from 0 (mnist; the residual networks 2e-5, whose rounding
   is up to 5e-6), and the two largest 5e-6 apart. */
static double golden_tolerance(const Net *net, size_t n) {
    double roundings = 0;
    for (size_t i = 1; i < net->count; i++) {
        const Layer *l = &net->layers[i];
        double taps = (double)(l->kernel * l->kernel), pixels = (double)(n * l->out.h * l->out.w);
        if (l->kind == CONV2D || l->kind == LINEAR)
            roundings += sqrt(taps * (double)l->in.c) + sqrt(taps * (double)l->out.c);
        if (l->weights)
            roundings += sqrt(pixels);
    }
    return is_double ? 1e-6 : epsilon * roundings;
}

// A line without a name: the numbers themselves.
static void compare_numbers(const Golden *g, const char *keyword, const real *got,
                            double tolerance) {
    const Line *line = golden_line(g, keyword, 0);
    size_t count = line ? line->count : 0;
    Array want = array(count, 0), bound = array(count, 0);
    double largest = 0;
    for (size_t i = 0; i < count; i++)
        largest = fmax(largest, fabs(line->numbers[i]));
    for (size_t i = 0; i < count; i++) {
        want.at[i] = (real)line->numbers[i];
        bound.at[i] = (real)(tolerance * largest);
    }
    if (!line)
        fail("the file has no line %s", keyword);
    check_tensor(keyword, got, want.at, bound.at, count);
    free_arrays((Array[]){want, bound}, 2 * sizeof(Array));
}

// Norm, sum and entries of a tensor, as tensor_line() in make_golden.py lists them.
static Array summarise(const real *values, size_t count) {
    size_t listed = min_size(GOLDEN_LISTED, count);
    Array all = array(2 + listed, guard_value);
    double squares = 0, sum = 0;
    for (size_t i = 0; i < count; i++) {
        squares += (double)values[i] * (double)values[i];
        sum += (double)values[i];
    }
    all.at[0] = (real)sqrt(squares);
    all.at[1] = (real)sum;
    for (size_t k = 0; k < listed; k++)
        all.at[2 + k] = values[k * count / listed];
    return all;
}

// values: in PyTorch's layout
static void compare_tensor(const Line *line, const real *values, size_t count, double tolerance) {
    if (line->numbers[0] != (double)count || line->count != 3 + min_size(GOLDEN_LISTED, count)) {
        fail("%s: %zu numbers, expected %g", line->name, count, line->numbers[0]);
        return;
    }
    Array got = summarise(values, count), want = array(got.count, 0), bound = array(got.count, 0);
    double norm = line->numbers[1], largest = norm / sqrt((double)count); // no less than this
    for (size_t i = 0; i < got.count; i++) {
        want.at[i] = (real)line->numbers[1 + i];
        largest = fmax(largest, i < 2 ? 0 : fabs(line->numbers[1 + i]));
    }
    for (size_t i = 0; i < got.count; i++) // as many errors as numbers may add up in the sum
        bound.at[i] = (real)(tolerance * (i == 0   ? norm
                                          : i == 1 ? norm * sqrt((double)count)
                                                   : largest));
    check_tensor(line->name, got.at, want.at, bound.at, got.count);
    free_arrays((Array[]){got, want, bound}, 3 * sizeof(Array));
}

static void compare_tensors(Net *net, const Golden *g, const char *keyword, const Tensor *list,
                            size_t count, double tolerance) {
    const Line *line;
    for (size_t i = 0; (line = golden_line(g, keyword, i)); i++) {
        const Tensor *t = find_tensor(list, count, line->name);
        if (!t)
            return;
        const real *values = t->values;
        if (t->filter.h) {
            reorder_weight(net->host[1], t->values, t->filter, t->outputs, true);
            values = net->host[1];
        }
        compare_tensor(line, values, t->count, tolerance);
    }
}

static void run_golden_net(Net *net, const GoldenNet *which, const Golden *g) {
    size_t n = which->batch, parameters, gradients;
    Tensor *list = list_tensors(net, NULL, NULL, &parameters);
    Tensor *grads = must_alloc(parameters * sizeof *grads, "a test");
    gradients = (size_t)(list_layers(net, grads, "", net->grads, false) - grads);
    double tolerance = golden_tolerance(net, n);
    Draw draw = {.seed = 1, .epoch = 1};
    set_golden_parameters(net, g, list, parameters);
    fill_stream(output(net, &net->layers[0]), n * shape_size(which->images), IMAGE_STREAM);
    fill_labels(net->labels, n);
    forward(net, n, &draw);
    real loss = (real)loss_and_gradient(net, n, true);
    compare_numbers(g, "logp", output(net, last_layer(net)), tolerance);
    compare_numbers(g, "loss", &loss, tolerance);
    backward(net, n);
    compare_tensors(net, g, "grad", grads, gradients, tolerance);
    compare_tensors(net, g, "stat", list, parameters, tolerance);
    forward(net, n, NULL);
    compare_numbers(g, "eval", output(net, last_layer(net)), tolerance);
    free(list);
    free(grads);
}

static void test_golden_net(const GoldenNet *which, const Backend *b) {
    static Net net;
    static Golden golden;
    if (read_golden(&golden, which->name)) {
        build_golden_net(&net, which, b);
        run_golden_net(&net, which, &golden);
        net_free(&net);
    }
    free_golden(&golden);
    char name[96];
    snprintf(name, sizeof name, "PyTorch's %s, %s kernels", which->name, b->kernels);
    verdict("%s", name);
}

// Ten steps by the line's settings; the network is nothing but its parameters.
static void check_golden_optimizer(const Line *line) {
    enum { COUNT = 16, STEPS = 10 };
    const double *x = line->numbers;
    const Optimizer *o = &optimizers[x[4] == 0];
    real params[COUNT], grads[COUNT], state[2 * COUNT] = {0}, want[COUNT], bound[COUNT];
    Settings settings = plain;
    settings.momentum = x[1];
    settings.weight_decay = x[2];
    settings.nesterov = x[3] != 0;
    Net net = {.settings = &settings, .backend = &backends[1], .params = params, .grads = grads};
    net.param_size = COUNT;
    fill_stream(params, COUNT, START_STREAM);
    for (uint32_t step = 0; step < STEPS && line->count == 5 + COUNT * STEPS; step++) {
        fill_stream(grads, COUNT, GRADIENT_STREAM + step);
        optimizer_step(o, &net, state, x[0]);
        for (size_t i = 0; i < COUNT; i++) { // a momentum of .9 keeps ten steps' roundings
            want[i] = (real)x[5 + step * COUNT + i];
            bound[i] = (real)(is_double ? 1e-12 : 40 * (step + 1) * epsilon);
        }
        check_tensor(line->name, params, want, bound, COUNT);
    }
    if (line->count != 5 + COUNT * STEPS)
        fail("%s: %zu numbers", line->name, line->count);
}

static void check_golden_schedule(const Line *line) {
    enum { STEPS = 3 };
    const double *x = line->numbers;
    Settings s = {.lr = .1, .schedule = line->kind, .milestones = "4,7", .gamma = x[0]};
    s.step_size = (size_t)x[1];
    s.warmup_epochs = (size_t)x[2];
    s.epochs = (size_t)x[3];
    if (line->count != 4 + s.epochs * STEPS || s.epochs == 0)
        fail("%s: %zu numbers", line->name, line->count);
    for (size_t i = 0; i + 4 < line->count; i++) {
        real got = (real)learning_rate(&s, i / STEPS, i % STEPS, STEPS), want = (real)x[4 + i];
        real bound = (real)(8 * epsilon * fabs(x[4 + i]) + 1e-17);
        check_tensor(line->name, &got, &want, &bound, 1);
    }
}

static void check_golden_smoothing(const Line *line) {
    enum { N = 4, COUNT = N * GOLDEN_CLASSES };
    real logits[COUNT], logp[COUNT], losses[N], got[1 + COUNT], want[1 + COUNT], bound[1 + COUNT];
    uint8_t labels[N];
    fill_stream(logits, COUNT, LOGIT_STREAM);
    fill_labels(labels, N);
    log_softmax_forward(logp, logits, N, GOLDEN_CLASSES);
    nll_loss(losses, got + 1, logp, labels, N, N, GOLDEN_CLASSES, .1);
    got[0] = (losses[0] + losses[1] + losses[2] + losses[3]) / N;
    for (size_t i = 0; i < 1 + COUNT && line->count == 1 + COUNT; i++) {
        want[i] = (real)line->numbers[i];
        bound[i] = (real)(32 * epsilon * fabs(line->numbers[i]));
    }
    if (line->count == 1 + COUNT)
        check_tensor("loss and gradient", got, want, bound, 1 + COUNT);
    else
        fail("%zu numbers", line->count);
}

// All lines of one keyword, of which there must be as many as expected.
static void test_golden_lines(const char *keyword, size_t expected, void (*check)(const Line *)) {
    static Golden golden;
    size_t count = 0;
    char name[64];
    read_golden(&golden, "optimizers");
    for (const Line *line; (line = golden_line(&golden, keyword, count)); count++)
        check(line);
    if (count != expected)
        fail("%zu lines, expected %zu", count, expected);
    free_golden(&golden);
    snprintf(name, sizeof name, "PyTorch's %s", keyword);
    verdict("%s", name);
}

static void test_golden(void) {
    for (size_t i = 0; i < sizeof golden_nets / sizeof *golden_nets; i++)
        for (size_t b = 0; b < 2; b++)
            test_golden_net(&golden_nets[i], &backends[b]);
    test_golden_lines("optimizer", 6, check_golden_optimizer);
    test_golden_lines("schedule", 7, check_golden_schedule);
    test_golden_lines("smoothing", 1, check_golden_smoothing);
}

/* ---- Models --------------------------------------------------------------------------------- */

static void test_parameter_counts(void) {
    static Net net;
    static const struct {
        const char *model;
        Shape images;
        size_t classes, parameters;
    } counts[] = {
        {"mnist", {28, 28, 1}, 10, 1199882},       {"cifar", {32, 32, 3}, 10, 62006},
        {"resnet8", {32, 32, 3}, 10, 78042},       {"resnet18", {32, 32, 3}, 100, 11220132},
        {"resnet34", {32, 32, 3}, 100, 21328292},  {"resnet50", {32, 32, 3}, 100, 23705252},
        {"resnet101", {32, 32, 3}, 100, 42697380}, {"resnet152", {32, 32, 3}, 100, 58341028},
    };
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        DatasetInfo info = {"test", counts[i].images, .classes = counts[i].classes};
        net_build(&net, find_model(counts[i].model), &info, &plain, &backends[0]);
        if (net.parameters != counts[i].parameters)
            fail("%s: expected %zu as in PyTorch, found %zu", counts[i].model, counts[i].parameters,
                 net.parameters);
    }
    verdict("parameter counts of the models");
}

// --layers: the times of fused rows are in the table, with the rows that they are fused with.
static void test_layer_times(const char *model, const char *dataset, size_t shown) {
    static Net net;
    static LayerTimes times[MAX_LAYERS], want[MAX_LAYERS];
    const DatasetInfo info = dataset_for(find_model(model), dataset);
    size_t rows = 0;
    net_build(&net, find_model(model), &info, &plain, &backends[1]);
    plan_memory(&net, 2);
    memset(times, 0, sizeof times);
    memset(want, 0, sizeof want);
    for (size_t i = 1; i < net.count; i++)
        for (size_t r = 0; r < LAYER_ROUNDS && !net.layers[i].skipped; r++) {
            size_t root = i;
            while (is_fused(&net, &net.layers[root]))
                root = net.layers[root].input;
            times[i].forward[r] = (double)(i + r);
            times[i].backward[r] = (double)(i * r + 1);
            want[root].forward[r] += times[i].forward[r];
            want[root].backward[r] += times[i].backward[r];
        }
    join_fused(&net, times, 2);
    for (size_t i = 1; i < net.count; i++) {
        if (net.layers[i].skipped || is_fused(&net, &net.layers[i]))
            continue;
        rows++;
        for (size_t r = 0; r < LAYER_ROUNDS; r++)
            if (times[i].forward[r] != want[i].forward[r] ||
                times[i].backward[r] != want[i].backward[r])
                fail("%s row %zu, round %zu: expected %g and %g, found %g and %g", model, i, r,
                     want[i].forward[r], want[i].backward[r], times[i].forward[r],
                     times[i].backward[r]);
    }
    if (rows != shown)
        fail("%s: %zu rows, expected %zu", model, rows, shown);
    verdict("layer times: fused rows count, %s", model);
}

// Every ResNet on the images of every dataset; the last stage has at least one pixel.
static void test_stems(void) {
    static Net net;
    static const struct {
        const char *stem;
        size_t kernel, side; // of the first convolution, of the last stage
    } stems[] = {{"3", 3, 4}, {"7", 7, 4}, {"imagenet", 7, 1}};
    for (size_t m = (size_t)(find_model("resnet18") - models); m < MODELS; m++) // of four stages
        for (size_t i = 0; i < 6; i++) {
            Settings settings = plain;
            settings.stem = stems[i / 2].stem;
            Shape images = i % 2 ? (Shape){28, 28, 1} : (Shape){32, 32, 3};
            DatasetInfo info = {"test", images, .classes = 10};
            net_build(&net, &models[m], &info, &settings, &backends[0]);
            size_t want = stems[i / 2].side;
            Shape last = net.layers[net.count - 3].in; // average pool, linear, log_softmax
            size_t first = images.h / (i < 4 ? 1 : 2); // pixels a row behind the convolution
            if (last.h != want || last.w != want || net.layers[1].kernel != stems[i / 2].kernel ||
                net.layers[1].out.h != first || net.layers[1].out.w != first)
                fail("%s with stem %s: %zu x %zu pixels in the end, expected %zu", models[m].name,
                     settings.stem, last.h, last.w, want);
        }
    verdict("all stems on images of 32 x 32 and 28 x 28 pixels");
}

typedef struct Spread {
    double largest, variance;
    double fourth, neighbours; // the fourth moment, by variance^2; correlation of neighbours
} Spread;

static Spread measure_spread(const real *values, size_t count) {
    Spread s = {0};
    for (size_t i = 0; i < count; i++) {
        double square = (double)values[i] * (double)values[i];
        s.largest = fmax(s.largest, fabs((double)values[i]));
        s.variance += square / (double)count;
        s.fourth += square * square / (double)count;
        s.neighbours += i ? (double)values[i] * (double)values[i - 1] / (double)count : 0;
    }
    s.fourth /= s.variance * s.variance;
    s.neighbours /= s.variance;
    return s;
}

// A fourth moment of 3: normal; 1.8: uniform.
static void expect_spread(const char *name, const real *values, size_t count, double variance,
                          double fourth) {
    Spread s = measure_spread(values, count);
    if (!(fabs(s.variance / variance - 1) < .05 && fabs(s.fourth / fourth - 1) < .1))
        fail("%s: variance %g, fourth moment %.2f, expected %g, %.2f", name, s.variance, s.fourth,
             variance, fourth);
    if (!(fabs(s.neighbours) < .05))
        fail("%s: neighbours have a correlation of %.2f", name, s.neighbours);
    if (fourth < 2 && !(s.largest <= sqrt(3 * variance)))
        fail("%s: largest %g, expected %g", name, s.largest, sqrt(3 * variance));
}

static void check_norm_start(const Net *net, const Layer *l) {
    for (size_t c = 0; c < l->out.c; c++) {
        const real *stats = net->stats + l->stats + c;
        if (net->params[l->weight + c] != 1 || net->params[l->bias + c] != 0 || stats[0] != 0 ||
            stats[l->out.c] != 1)
            fail("%s: channel %zu does not start as 1, 0 and mean 0, variance 1", l->name, c);
    }
}

static void test_initial_values(void) {
    static Net net;
    start_net(&net, (Shape){6, 6, 64});
    size_t x = batchnorm2d(&net, conv2d_no_bias(&net, 0, 96, 3, 1, 1));
    x = conv2d(&net, x, 128, 3, 1, 0);
    log_softmax(&net, linear(&net, x, CLASSES));
    plan_memory(&net, 1);
    net_alloc(&net);
    net_init(&net, 1);
    const Layer *l = net.layers;
    expect_spread("conv1.weight", net.params + l[1].weight, l[1].weights, 2. / (9 * 96), 3);
    check_norm_start(&net, &l[2]);
    expect_spread("conv2.weight", net.params + l[3].weight, l[3].weights, 1. / (9 * 96 * 3), 1.8);
    expect_spread("fc1.weight", net.params + l[4].weight, l[4].weights, 1. / (128 * 16 * 3), 1.8);
    Spread bias = measure_spread(net.params + l[3].bias, l[3].biases);
    if (!(bias.largest <= 1 / sqrt(9. * 96) && bias.largest > .9 / sqrt(9. * 96)))
        fail("conv2.bias: largest %g", bias.largest);
    net_free(&net);
    verdict("initial values: normal, uniform, BatchNorm's");
}

// One step of a network, by so many threads: all gradients and running statistics.
static Array train_by_threads(int threads) {
    static Net net;
    DatasetInfo info = {"test", {16, 16, 3}, .classes = CLASSES};
    omp_set_num_threads(threads);
    drawn = 0;
    net_build(&net, find_model("resnet8"), &info, &plain, &backends[1]);
    plan_memory(&net, BATCH);
    net_alloc(&net);
    net_init(&net, 1);
    load_random(&net);
    loss_of(&net);
    backward(&net, BATCH);
    Array all = array(net.param_size + net.stats_size, guard_value);
    memcpy(all.at, net.grads, net.param_size * sizeof(real));
    memcpy(all.at + net.param_size, net.stats, net.stats_size * sizeof(real));
    net_free(&net);
    omp_set_num_threads(2);
    return all;
}

static void test_threads(void) {
    Array one = train_by_threads(1);
    for (int threads = 2; threads < 5; threads++) {
        Array more = train_by_threads(threads);
        check_tensor("1 thread against more", more.at, one.at, NULL, one.count);
        free(more.base);
    }
    free(one.base);
    verdict("a step of resnet8 has the same bits for any number of threads");
}

static void test_confusion(void) {
    static Net net;
    static const real logp[5][CLASSES] = {
        {0, 3, 1, 2}, {5, 3, 1, 2}, {0, 3, 1, 4}, {0, 3, 3, 2}, {-4, -3, -2, -3}};
    static uint8_t labels[5] = {1, 1, 3, 1, 0};
    static real room[5 * CLASSES];
    const Batch batch = {.labels = labels, .n = 5};
    size_t got[CLASSES * CLASSES] = {0}, want[CLASSES * CLASSES] = {0};
    start_net(&net, (Shape){1, 1, CLASSES});
    net.images = (real *)logp;
    net.host[0] = room;
    size_t correct = count_predictions(&net, &batch, got);
    want[1 * CLASSES + 1] = 2; // the first of equal ones counts
    want[1 * CLASSES + 0] = want[3 * CLASSES + 3] = want[0 * CLASSES + 2] = 1;
    if (correct != 3 || memcmp(got, want, sizeof want) != 0)
        fail("%zu right", correct);
    verdict("confusion matrix");
}

// Training smooths the labels, evaluation does not.
static void test_smoothing_of_training(void) {
    static Net net;
    Settings smooth = plain;
    smooth.label_smoothing = .2;
    build_small(&net, &odd_models[0], (Shape){6, 5, 3}, &smooth, &backends[1]);
    load_random(&net);
    double trained = loss_of(&net), sum = 0, at = 0;
    forward(&net, BATCH, NULL);
    if (net.batches_tracked != 1)
        fail("%zu batches counted, expected the one of training", net.batches_tracked);
    loss_of(&net);
    double tested = loss_and_gradient(&net, BATCH, false);
    const real *logp = output(&net, last_layer(&net));
    for (size_t i = 0; i < BATCH * CLASSES; i++) {
        sum -= (double)logp[i] / (BATCH * CLASSES);
        at -= i % CLASSES == net.labels[i / CLASSES] ? (double)logp[i] / BATCH : 0;
    }
    real got[2] = {(real)trained, (real)tested}, want[2] = {(real)(.8 * at + .2 * sum), (real)at};
    real bound[2] = {(real)(64 * epsilon * at), (real)(64 * epsilon * at)};
    check_tensor("loss of training and of evaluation", got, want, bound, 2);
    net_free(&net);
    verdict("label smoothing and a count of batches in training alone");
}

/* ---- Checkpoints ---------------------------------------------------------------------------- */

static char checkpoint_path[64];

static void use_temporary_file(void) {
    snprintf(checkpoint_path, sizeof checkpoint_path, "/tmp/test_cnn.XXXXXX");
    int file = mkstemp(checkpoint_path);
    if (file < 0)
        fail("cannot create %s", checkpoint_path);
    else
        close(file);
}

// A file in memory, which children inherit: thousands of them would wear out a disk's patience.
static void use_memory_file(void) {
    int file = memfd_create("checkpoint", 0);
    snprintf(checkpoint_path, sizeof checkpoint_path, "/proc/self/fd/%d", file);
    if (file < 0)
        fail("cannot create a file in memory");
}

static void fill_random(real *to, size_t count) {
    for (size_t i = 0; i < count; i++)
        to[i] = draw_real();
}

static void build_for_checkpoint(Net *net, const char *model, const Settings *settings) {
    DatasetInfo info = dataset_for(find_model(model), "synthetic");
    net_build(net, find_model(model), &info, settings, &backends[0]);
    plan_memory(net, 1);
    net_alloc(net);
}

static void save_or_load(Net *net, const Optimizer *o, real *state, char *metadata, bool save) {
    if (save) {
        save_tensors(net, o, state, metadata, checkpoint_path);
    } else {
        TensorFile f;
        open_tensors(&f, checkpoint_path);
        snprintf(metadata, METADATA_SIZE, "%s", f.metadata);
        read_tensors(&f, net, o, state);
    }
}

// The parameters among the numbers of an arena; what lies between tensors is no part of a file.
static void compare_parameters(const char *name, const Net *net, const real *got,
                               const real *want) {
    for (size_t i = 0; i < net->count; i++) {
        const Layer *l = &net->layers[i];
        check_tensor(name, got + l->weight, want + l->weight, NULL, l->weights);
        check_tensor(name, got + l->bias, want + l->bias, NULL, l->biases);
    }
}

static void compare_loaded(const Net *got, const Net *want, const real *got_state,
                           const real *want_state, size_t states) {
    compare_parameters("parameters", want, got->params, want->params);
    for (size_t i = 0; i < states; i++)
        compare_parameters("optimizer", want, got_state + i * want->param_size,
                           want_state + i * want->param_size);
    for (size_t i = 0; i < want->count; i++) {
        const Layer *l = &want->layers[i];
        size_t count = l->kind == BATCHNORM2D ? 2 * l->out.c : 0;
        check_tensor("running statistics", got->stats + l->stats, want->stats + l->stats, NULL,
                     count);
    }
    if (got->batches_tracked != want->batches_tracked)
        fail("%zu batches tracked, expected %zu", got->batches_tracked, want->batches_tracked);
}

static void test_round_trip(const char *model, const Optimizer *o, double momentum) {
    static Net saved, loaded;
    Settings settings = plain;
    settings.momentum = momentum;
    size_t states = count_states(o, &settings);
    char metadata[METADATA_SIZE] = "epoch=3\nbatch=17\nmodel=x y\n";
    const char *want = "format=pt\nepoch=3\nbatch=17\nmodel=x y\n";
    build_for_checkpoint(&saved, model, &settings);
    build_for_checkpoint(&loaded, model, &settings);
    Array state = random_array(states * saved.param_size);
    Array other = array(states * saved.param_size, guard_value);
    fill_random(saved.params, saved.param_size);
    fill_random(saved.stats, saved.stats_size);
    saved.batches_tracked = saved.stats_size ? (size_t)1 << 40 : 0;
    save_or_load(&saved, o, state.at, metadata, true);
    save_or_load(&loaded, o, other.at, metadata, false);
    compare_loaded(&loaded, &saved, other.at, state.at, states);
    if (strcmp(metadata, want) != 0)
        fail("metadata \"%s\", expected \"%s\"", metadata, want);
    free_arrays((Array[]){state, other}, 2 * sizeof(Array));
    net_free(&saved);
    net_free(&loaded);
    char name[96];
    snprintf(name, sizeof name, "checkpoint of %s with %s and momentum %g, and back", model,
             o->name, momentum);
    verdict("%s", name);
}

// Files for this network are small enough to be spoiled in every way.
static size_t build_spoiled(Net *net, size_t x) {
    x = batchnorm2d(net, conv2d_no_bias(net, x, 2, 1, 1, 0));
    return log_softmax(net, linear(net, x, net->classes));
}
static const Model spoiled_model = {.name = "spoiled", .build = build_spoiled};
static Net spoiled_net;

// An entry of a header, as it will be written.
typedef struct Entry {
    char name[40], dtype[16], shape[96];
    size_t begin, end;
} Entry;

typedef struct File {
    Entry entries[16];
    size_t count, data_bytes;
    char header[8192];
    const char *metadata; // NULL: none
} File;

static File good_file(void) {
    File f = {.metadata = "{\"format\":\"pt\"}"};
    Tensor *list = list_tensors(&spoiled_net, NULL, NULL, &f.count);
    qsort(list, f.count, sizeof *list, compare_begin);
    for (size_t i = 0; i < f.count; i++) {
        Entry *e = &f.entries[i];
        snprintf(e->name, sizeof e->name, "%.39s", list[i].name);
        snprintf(e->dtype, sizeof e->dtype, "%s", list[i].dtype);
        size_t at = 0;
        for (size_t d = 0; d < list[i].rank; d++)
            at += (size_t)snprintf(e->shape + at, 24, d ? ",%zu" : "%zu", list[i].dims[d]);
        e->begin = list[i].begin;
        e->end = f.data_bytes = e->begin + list[i].count * list[i].bytes;
    }
    free(list);
    return f;
}

static void make_header(File *f) {
    size_t at = 1, size = sizeof f->header;
    strcpy(f->header, "{");
    if (f->metadata)
        at += (size_t)snprintf(f->header + at, size - at, "\"__metadata__\":%s", f->metadata);
    for (const Entry *e = f->entries; e < f->entries + f->count; e++)
        at += (size_t)snprintf(
            f->header + at, size - at,
            "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
            at > 1 ? "," : "", e->name, e->dtype, e->shape, e->begin, e->end);
    strcpy(f->header + at, "}");
}

// length: what the first 8 bytes say; header: as many bytes as are there
static void write_bytes(uint64_t length, const char *header, size_t bytes, size_t data_bytes) {
    static const uint8_t data[8192];
    FILE *f = fopen(checkpoint_path, "wb");
    if (!f) {
        fail("cannot write %s", checkpoint_path);
        return;
    }
    for (int byte = 0; byte < 8; byte++)
        fputc((int)(length >> (8 * byte) & 255), f);
    fwrite(header, 1, bytes, f);
    fwrite(data, 1, data_bytes, f);
    fclose(f);
}

static void write_good(const File *f) {
    write_bytes(strlen(f->header), f->header, strlen(f->header), f->data_bytes);
}

static void load_spoiled(void) {
    char metadata[METADATA_SIZE];
    // an optimizer that keeps nothing: the file may hold no optimizer's numbers
    save_or_load(&spoiled_net, &optimizers[1], spoiled_net.scratch, metadata, false);
}

static void save_spoiled(void) {
    char metadata[METADATA_SIZE] = "";
    save_or_load(&spoiled_net, NULL, NULL, metadata, true);
}

// How a child ended, and what it said.
typedef struct Ending {
    int status;
    char text[4096];
} Ending;

// Before the sanitizer's own end: it would search a forked child for leaks.
static void leave_at_once(int status, void *unused) {
    (void)unused;
    _exit(status);
}

static Ending call_in_child(void (*call)(void)) {
    Ending e = {0};
    int ends[2];
    size_t length = 0;
    fflush(stdout);
    pid_t child = pipe(ends) == 0 ? fork() : -1;
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        on_exit(leave_at_once, NULL);
        alarm(20); // a hang ends by a signal
        call();
        exit(0);
    }
    close(ends[1]);
    for (ssize_t got = 1; got > 0; length += (size_t)got)
        got = read(ends[0], e.text + length, sizeof e.text - 1 - length);
    close(ends[0]);
    if (child < 0 || waitpid(child, &e.status, 0) != child)
        fail("no child");
    return e;
}

// One line that begins as all errors of cnn do, and holds these words.
static bool is_refusal(const char *text, const char *words) {
    const char *end = strchr(text, '\n');
    return strncmp(text, "cnn: error: ", 12) == 0 && end && !end[1] && strstr(text, words);
}

static void expect_refusal(const char *what, const char *words) {
    Ending e = call_in_child(load_spoiled);
    if (!WIFEXITED(e.status) || WEXITSTATUS(e.status) != 1)
        fail("%s: expected exit status 1, found %x", what, (unsigned)e.status);
    else if (!is_refusal(e.text, words))
        fail("%s: expected one line with \"%s\", found \"%.200s\"", what, words, e.text);
}

static Entry *last_entry(File *f) {
    return &f->entries[f->count - 1];
}

static void spoil_hole(File *f) {
    last_entry(f)->begin += 8;
    last_entry(f)->end += 8;
    f->data_bytes += 8;
}

static void spoil_overlap(File *f) {
    last_entry(f)->begin -= 4;
    last_entry(f)->end -= 4;
    f->data_bytes -= 4;
}

static void spoil_same_place(File *f) { // fc1.weight of 16 numbers, then as many for the others
    Entry *e = last_entry(f);
    e->begin = f->entries[f->count - 2].begin;
    e->end = e->begin + 2 * sizeof(real);
}

static void spoil_dtype(File *f) {
    strcpy(last_entry(f)->dtype, is_double ? "I64" : "I32");
}

static void spoil_unknown_dtype(File *f) {
    strcpy(last_entry(f)->dtype, "F31");
}

static void spoil_shape(File *f) {
    strcpy(last_entry(f)->shape, "1,2");
}

static void spoil_size(File *f) {
    strcpy(last_entry(f)->shape, "5");
}

static void spoil_product(File *f) { // 2^64 numbers: 0, if the product wraps around
    strcpy(last_entry(f)->shape, "1073741824,1073741824,16");
    last_entry(f)->end = last_entry(f)->begin;
}

static void spoil_bytes(File *f) { // 2^62 numbers, 2^64 or 2^65 bytes
    strcpy(last_entry(f)->shape, "1073741824,1073741824,4");
    last_entry(f)->end = last_entry(f)->begin;
}

static void spoil_rank(File *f) {
    strcpy(last_entry(f)->shape, "1,1,1,1,4");
}

static void spoil_digits(File *f) {
    strcpy(last_entry(f)->shape, "18446744073709551620"); // 2^64 + 4
}

static void spoil_backwards(File *f) {
    size_t begin = last_entry(f)->begin;
    last_entry(f)->begin = last_entry(f)->end;
    last_entry(f)->end = begin;
}

static void spoil_twice(File *f) {
    Entry again = *last_entry(f);
    size_t bytes = again.end - again.begin;
    again.begin += bytes;
    again.end += bytes;
    f->entries[f->count++] = again;
    f->data_bytes += bytes;
}

static void spoil_renamed(File *f) {
    strcpy(last_entry(f)->name, "fc9.bias");
}

static void spoil_long_name(File *f) {
    strcpy(last_entry(f)->name, "fc1.bias.fc1.bias.fc1.bias.fc1.bias");
}

static void spoil_missing(File *f) {
    f->data_bytes = last_entry(f)->begin;
    f->count--;
}

static void spoil_optimizer(File *f) { // --resume must not take it for a part of the network
    spoil_twice(f);
    strcpy(last_entry(f)->name, "optimizer.x.fc1.bias");
}

static void spoil_more_data(File *f) {
    f->data_bytes++;
}

static void spoil_less_data(File *f) {
    f->data_bytes--;
}

static void spoil_nothing_there(File *f) {
    f->count = 0;
    f->data_bytes = 0;
}

static void spoil_metadata(File *f) {
    static char text[METADATA_SIZE + 100] = "{\"a\":\"";
    memset(text + 6, 'b', METADATA_SIZE);
    strcpy(text + 6 + METADATA_SIZE, "\"}");
    f->metadata = text;
}

static void spoil_metadata_kind(File *f) {
    f->metadata = "{\"a\":1}";
}

static void spoil_escape(File *f) {
    f->metadata = "{\"a\":\"\\u0041\"}";
}

static void test_spoiled_headers(void) {
    static const struct {
        const char *name;
        void (*spoil)(File *f);
        const char *words;
    } cases[] = {
        {"a hole", spoil_hole, "where those before it end"},
        {"an overlap", spoil_overlap, "where those before it end"},
        {"two tensors at one place", spoil_same_place, "where those before it end"},
        {"wrong dtype", spoil_dtype, "expected F"},
        {"unknown dtype", spoil_unknown_dtype, "a known dtype"},
        {"wrong shape", spoil_shape, "[1,2]"},
        {"wrong size", spoil_size, "offsets that fit"},
        {"a shape whose product overflows", spoil_product, "a smaller shape"},
        {"a shape whose bytes overflow", spoil_bytes, "offsets that fit"},
        {"five dimensions", spoil_rank, "fewer numbers"},
        {"a number of 20 digits", spoil_digits, "at most 18 digits"},
        {"offsets backwards", spoil_backwards, "offsets that fit"},
        {"the same tensor twice", spoil_twice, "fc1.bias: expected a tensor of this model, once"},
        {"an unknown tensor", spoil_renamed, "fc9.bias: expected a tensor of this model"},
        {"an unknown tensor with a long name", spoil_long_name, "expected a tensor of this model"},
        {"a missing tensor", spoil_missing, "expected the tensor fc1.bias"},
        {"an optimizer that was not asked for", spoil_optimizer, "optimizer.x.fc1.bias"},
        {"more numbers than it says", spoil_more_data, "bytes of numbers"},
        {"fewer numbers than it says", spoil_less_data, "bytes of numbers"},
        {"no tensors", spoil_nothing_there, "expected the tensor"},
        {"too much metadata", spoil_metadata, "less metadata"},
        {"metadata that are no text", spoil_metadata_kind, "expected '\"'"},
        {"an escape", spoil_escape, "without backslashes"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        File f = good_file();
        cases[i].spoil(&f);
        make_header(&f);
        write_good(&f);
        expect_refusal(cases[i].name, cases[i].words);
    }
    verdict("checkpoint: headers that lie are refused");
}

#define TEN "0123456789" // ten of these are a longer name than any tensor's
static void test_garbage_headers(void) {
    static const char *const headers[][2] = {
        {"", "starts with {"},
        {" {}", "starts with {"},
        {"[]", "starts with {"},
        {"{", "expected '\"'"},
        {"{}", "expected '\"'"},
        {"{{{{{{{{{{{{{{{{", "expected '\"'"},
        {"{\"a\"}", "expected ':'"},
        {"{\"a\":[[[[[[[[[[", "expected '{'"},
        {"{\"a\":{\"a\":{\"a\":{\"a\":{", "dtype, shape"},
        {"{\"a\":{\"dtype\":\"F32\"}}", "a known dtype, a shape"},
        {"{\"a\":{\"dtype\":\"I64\",\"data_offsets\":[0,8]}}", "a known dtype, a shape"},
        {"{\"" TEN TEN TEN TEN TEN TEN TEN TEN TEN TEN
         "\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]}}",
         "a known dtype, a shape"},
        {"{\"a\":{\"shape\":[", "a whole number"},
        {"{\"a\":{\"shape\":[1", "expected ']'"},
        {"{\"a\":{\"shape\":[-1]", "a whole number"},
        {"{\"a\":{\"data_offsets\":[0,1,2]", "fewer numbers"},
        {"{\"a\":{\"data_offsets\":[0]", "two data_offsets"},
        {"{\"__metadata__\":{\"__metadata__\":{", "expected '\"'"},
        {"{\"__metadata__\":{}} x", "nothing more"},
        {"{\"__metadata__\":{},", "expected '\"'"},
        {"{\"abc", "without backslashes"},
        {"{\"a\nb\":{}}", "without backslashes"},
        {"{x\n\nb\":{}}", "expected '\"'"},
        {"{\"\n\n\"", "without backslashes"},
    };
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) {
        size_t length = strlen(headers[i][0]);
        write_bytes(length, headers[i][0], length, 0);
        expect_refusal(headers[i][0], headers[i][1]);
    }
    verdict("checkpoint: headers that are no JSON are refused");
}

static void test_header_lengths(void) {
    File f = good_file();
    make_header(&f);
    size_t length = strlen(f.header);
    const uint64_t lengths[] = {length + f.data_bytes + 1, MAX_HEADER + 1, (uint64_t)1 << 32,
                                (uint64_t)1 << 63,         UINT64_MAX,     UINT64_MAX - 7};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        char what[64];
        snprintf(what, sizeof what, "a header of %llu bytes", (unsigned long long)lengths[i]);
        write_bytes(lengths[i], f.header, length, f.data_bytes);
        expect_refusal(what, "a header of at most");
    }
    for (off_t bytes = 0; bytes < 8; bytes++) {
        write_bytes(0, "", 0, 0);
        if (truncate(checkpoint_path, bytes) != 0)
            fail("cannot truncate %s", checkpoint_path);
        expect_refusal("a file of some bytes", "fewer than 8 bytes");
    }
    verdict("checkpoint: impossible lengths of the header are refused");
}

/* Thousands of files in one child: die() calls before_dying, which jumps back here. What the
   refused ones had open or allocated is lost with the child. */
typedef struct Report {
    size_t refused, accepted;
    char failure[256];
} Report;
static jmp_buf refused;

static void jump_back(void) {
    longjmp(refused, 1);
}

// Loads the file; its line on stderr has to be as it should, and only one.
static void try_file(Report *r, int messages, const char *what, size_t number) {
    char text[8192];
    volatile bool died = true;
    if (ftruncate(messages, 0) != 0)
        return;
    before_dying = jump_back;
    if (setjmp(refused) == 0) {
        load_spoiled();
        died = false;
    }
    ssize_t length = pread(messages, text, sizeof text - 1, 0);
    text[length > 0 ? length : 0] = 0;
    if (!*r->failure && (died ? !is_refusal(text, "") : length != 0))
        snprintf(r->failure, sizeof r->failure, "%s %zu: found \"%.150s\"", what, number, text);
    r->refused += died;
    r->accepted += !died;
}

typedef struct Series {
    const char *name;
    void (*write)(size_t number); // writes file number 0, 1, ...
} Series;

// In the child: stderr is an empty file, at whose end each message is written.
static void try_files(const Series *s, size_t first, size_t last, int to_parent) {
    Report r = {0};
    FILE *messages = tmpfile();
    if (!messages || dup2(fileno(messages), STDERR_FILENO) < 0 ||
        fcntl(STDERR_FILENO, F_SETFL, O_APPEND) < 0)
        snprintf(r.failure, sizeof r.failure, "cannot redirect stderr");
    alarm(60);
    for (size_t i = first; i < last && !*r.failure; i++) {
        s->write(i);
        try_file(&r, STDERR_FILENO, s->name, i);
    }
    _exit(write(to_parent, &r, sizeof r) != sizeof r);
}

static Report run_series(const Series *s, size_t first, size_t last) {
    Report r = {0};
    int ends[2], status = 0;
    fflush(stdout);
    pid_t child = pipe(ends) == 0 ? fork() : -1;
    if (child == 0)
        try_files(s, first, last, ends[1]);
    close(ends[1]);
    bool reported = read(ends[0], &r, sizeof r) == sizeof r;
    close(ends[0]);
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0 || !reported)
        fail("%s %zu to %zu: a child ended with status %x", s->name, first, last, (unsigned)status);
    else if (*r.failure)
        fail("%s", r.failure);
    return r;
}

static File fuzzed_file;

static void write_truncated(size_t bytes) { // the first 8 bytes tell the length that is there
    write_bytes(bytes, fuzzed_file.header, bytes, 0);
}

static void write_cut_off(size_t bytes) { // the first 8 bytes tell the length that was there
    write_bytes(strlen(fuzzed_file.header), fuzzed_file.header, bytes, 0);
}

// One to four bytes of the length and the header are others, some of them parts of JSON.
static void write_mutated(size_t number) {
    static const char likely[] = "{}[]\":,0123456789 \n\\\t";
    char bytes[sizeof fuzzed_file.header];
    uint64_t length = strlen(fuzzed_file.header);
    uint32_t r[4];
    memcpy(bytes, fuzzed_file.header, length);
    philox4x32(r, (uint32_t)number, 0, 1, 0xFFFF, 99);
    size_t changes = 1 + r[0] % 4, real_length = length;
    for (uint32_t change = 0; change < changes; change++) {
        philox4x32(r, (uint32_t)number, 1 + change, 1, 0xFFFF, 99);
        uint8_t byte = r[1] % 3 ? (uint8_t)likely[r[2] % (sizeof likely - 1)] : (uint8_t)r[2];
        if (r[0] % 50 == 0)
            length ^= (uint64_t)byte << (8 * (r[3] % 8));
        else
            bytes[r[0] % real_length] = (char)byte;
    }
    write_bytes(length, bytes, real_length, fuzzed_file.data_bytes);
}

static void test_truncated_headers(void) {
    static const Series series[] = {{"header of length", write_truncated},
                                    {"header cut off at", write_cut_off}};
    fuzzed_file = good_file();
    make_header(&fuzzed_file);
    size_t length = strlen(fuzzed_file.header);
    for (size_t s = 0; s < 2; s++)
        for (size_t first = 0; first <= length; first += 200) {
            size_t last = min_size(first + 200, length + 1);
            Report r = run_series(&series[s], first, last); // whole at last, but without numbers
            if (r.refused != last - first)
                fail("%zu truncated files accepted", r.accepted);
        }
    verdict("checkpoint: every truncation of the header is refused");
}

static void test_mutated_headers(void) {
    static const Series series = {"mutation", write_mutated};
    size_t count = quick ? 300 : 10000, refused_files = 0, accepted = 0;
    fuzzed_file = good_file();
    make_header(&fuzzed_file);
    for (size_t first = 0; first < count; first += 200) {
        Report r = run_series(&series, first, min_size(first + 200, count));
        refused_files += r.refused;
        accepted += r.accepted;
    }
    if (!*failure && (refused_files < count / 2 || accepted == 0))
        fail("%zu of %zu files refused, %zu accepted", refused_files, count, accepted);
    verdict("checkpoint: random changes of the header, never a crash");
}

static void test_unfinite_file(void) {
    static const real values[2] = {(real)NAN, (real)-INFINITY};
    File f = good_file();
    make_header(&f);
    for (size_t i = 0; i < 2; i++) {
        write_good(&f);
        FILE *file = fopen(checkpoint_path, "r+b");
        bool good =
            file && fseek(file, (long)(8 + strlen(f.header) + last_entry(&f)->begin), 0) == 0;
        if (!good || fwrite(&values[i], sizeof(real), 1, file) != 1 || fclose(file) != 0)
            fail("cannot change %s", checkpoint_path);
        expect_refusal("a number that is not finite", "fc1.bias: expected finite numbers");
    }
    verdict("checkpoint: numbers that are not finite are refused");
}

// The spoiled ones differ from files that are accepted by what is wrong with them alone.
static void test_good_file(void) {
    File f = good_file();
    for (size_t variant = 0; variant < 3; variant++) {
        f.metadata = (const char *[]){"{\"format\":\"pt\"}", "{}", NULL}[variant];
        make_header(&f);
        write_good(&f);
        Ending e = call_in_child(load_spoiled);
        if (e.status != 0 || *e.text)
            fail("status %x, \"%.200s\"", (unsigned)e.status, e.text);
    }
    verdict("checkpoint: a good file is accepted");
}

// What has overflowed is no checkpoint to go on from: the one before stays.
static void test_unfinite_checkpoint(void) {
    real *at = spoiled_net.params + spoiled_net.layers[1].weight, kept = *at;
    static const real values[3] = {(real)NAN, (real)INFINITY, (real)-INFINITY};
    save_spoiled();
    for (size_t i = 0; i < 3; i++) {
        *at = values[i];
        Ending e = call_in_child(save_spoiled);
        if (!WIFEXITED(e.status) || WEXITSTATUS(e.status) != 1 ||
            !is_refusal(e.text, "conv1.weight is not finite"))
            fail("%g: status %x, \"%.200s\"", (double)*at, (unsigned)e.status, e.text);
    }
    load_spoiled();
    char temporary[sizeof checkpoint_path + 8];
    snprintf(temporary, sizeof temporary, "%s.tmp", checkpoint_path);
    if (*at != kept || access(temporary, F_OK) == 0)
        fail("the file before is not there any more, or one beside it is");
    verdict("checkpoint: none is written of numbers that are not finite");
}

static void test_checkpoints(void) {
    DatasetInfo info = {"test", {2, 2, 1}, .classes = 2};
    use_temporary_file();
    test_round_trip("mnist", &optimizers[0], 0);
    test_round_trip("mnist", &optimizers[1], 0);
    test_round_trip("resnet8", &optimizers[0], 0);
    test_round_trip("resnet8", &optimizers[1], .9);
    net_build(&spoiled_net, &spoiled_model, &info, &plain, &backends[0]);
    plan_memory(&spoiled_net, 1);
    net_alloc(&spoiled_net);
    test_unfinite_checkpoint();
    unlink(checkpoint_path);
    use_memory_file();
    test_good_file();
    test_unfinite_file();
    test_spoiled_headers();
    test_garbage_headers();
    test_header_lengths();
    test_truncated_headers();
    test_mutated_headers();
    net_free(&spoiled_net);
}

/* ---- Data parallelism ------------------------------------------------------------------------ */

enum { MOST_RANKS = 6, RING_NUMBERS = 64 };

// One rank of a ring under test, and what it has.
typedef struct RingRank {
    Comm comm;
    real numbers[RING_NUMBERS];
    size_t gathered[MOST_RANKS];
    Range range;
} RingRank;

static const Settings ring_settings = {.timeout = 60};

static void *ring_thread(void *argument) {
    RingRank *r = argument;
    all_reduce(&r->comm, r->numbers, r->range);
    r->gathered[r->comm.rank] = 100 + r->comm.rank;
    all_gather(&r->comm, r->gathered, sizeof *r->gathered);
    return NULL;
}

static void *broadcast_thread(void *argument) {
    RingRank *r = argument;
    broadcast(&r->comm, r->numbers, r->range.count);
    return NULL;
}

// Runs `body` on all ranks of a new team, each in a thread.
static void run_ring(RingRank *ranks, size_t world, void *(*body)(void *)) {
    static Net net;
    Team team = {0};
    pthread_t threads[MOST_RANKS];
    team_init(&team);
    net.backend = &backends[1];
    for (size_t r = 0; r < world; r++) {
        ranks[r].comm = (Comm){.rank = r, .world = world, .team = &team, .net = &net};
        ranks[r].comm.settings = &ring_settings;
        team.ranks[r] = &ranks[r].comm;
    }
    for (size_t r = 0; r < world; r++)
        if (pthread_create(&threads[r], NULL, body, &ranks[r]) != 0)
            fail("no thread");
    for (size_t r = 0; r < world; r++)
        pthread_join(threads[r], NULL);
}

// Ranges of any size, also smaller than the ring: the sum inside, the same bits on all ranks,
// nothing changed outside.
static void test_all_reduce(void) {
    static RingRank ranks[MOST_RANKS];
    for (size_t round = 0; round < 60; round++) {
        size_t world = draw_size(2, MOST_RANKS), first = draw_size(0, 9);
        Range range = {first, draw_size(0, RING_NUMBERS - 10)};
        real want[RING_NUMBERS], before[MOST_RANKS][RING_NUMBERS], bound[RING_NUMBERS];
        for (size_t i = 0; i < RING_NUMBERS; i++) {
            double sum = 0, size = 0;
            for (size_t r = 0; r < world; r++) {
                before[r][i] = ranks[r].numbers[i] = draw_real();
                sum += (double)before[r][i];
                size += fabs((double)before[r][i]);
            }
            want[i] = (real)sum;
            bound[i] = (real)((double)world * epsilon * size);
        }
        for (size_t r = 0; r < world; r++)
            ranks[r].range = range;
        run_ring(ranks, world, ring_thread);
        double sent = 0;
        snprintf(context, sizeof context, "%zu ranks, %zu numbers from %zu on", world, range.count,
                 first);
        for (size_t r = 0; r < world; r++) {
            const real *got = ranks[r].numbers;
            sent += ranks[r].comm.bytes_sent;
            check_tensor("sum", got + first, want + first, bound + first, range.count);
            check_tensor("rank 0's", got + first, ranks[0].numbers + first, NULL, range.count);
            check_tensor("before", got, before[r], NULL, first);
            check_tensor("behind", got + first + range.count, before[r] + first + range.count, NULL,
                         RING_NUMBERS - first - range.count);
            for (size_t k = 0; k < world; k++)
                if (ranks[r].gathered[k] != 100 + k)
                    fail("rank %zu gathered %zu from rank %zu", r, ranks[r].gathered[k], k);
        }
        if (sent != 2. * (double)((world - 1) * range.count * sizeof(real)))
            fail("all ranks together sent %g bytes", sent);
    }
    verdict("ring: all-reduce and all-gather");
}

static void test_broadcast(void) {
    static RingRank ranks[MOST_RANKS];
    for (size_t world = 2; world <= MOST_RANKS; world++) {
        for (size_t r = 0; r < world; r++) {
            for (size_t i = 0; i < RING_NUMBERS; i++)
                ranks[r].numbers[i] = draw_real();
            ranks[r].range = (Range){0, RING_NUMBERS};
        }
        real want[RING_NUMBERS];
        memcpy(want, ranks[0].numbers, sizeof want);
        run_ring(ranks, world, broadcast_thread);
        for (size_t r = 0; r < world; r++)
            check_tensor("rank 0's", ranks[r].numbers, want, NULL, RING_NUMBERS);
    }
    verdict("ring: broadcast");
}

// A network that learns with others, and the messages of gradients that it received.
typedef struct Learner {
    Run run;
    Backend backend;
    size_t received, awaited; // awaited: backward goes no further until so many have come
    size_t beside;            // those that came beside backward, not behind it
    bool late;                // they did not come
    double exposed_s;         // how long the others let a step wait
    uint64_t hash;
} Learner;

static Learner learners[2];
static _Thread_local Learner *learner; // whose steps this thread takes
static const double message_s = .002;

// A link that takes its time for each message.
static void slow_receive(size_t device, real *to, const real *from, size_t count, bool add,
                         real *room) {
    backends[0].receive(device, to, from, count, add, room); // at once: are they complete?
    nanosleep(&(struct timespec){.tv_nsec = (long)(1e9 * message_s)}, NULL);
    __atomic_fetch_add(&learners[device].received, 1, __ATOMIC_SEQ_CST);
}

// Backward comes to its convolutions last: a bucket is complete by then, and has time to go around.
static void patient_conv2d_backward(real *din, real *dweight, real *dbias, const real *dout,
                                    const real *in, const real *weight, const Layer *l, size_t n,
                                    bool accumulate, real *scratch) {
    const double end = now() + 20;
    while (__atomic_load_n(&learner->received, __ATOMIC_SEQ_CST) < learner->awaited) {
        learner->late |= now() > end;
        if (learner->late)
            break;
        nanosleep(&(struct timespec){.tv_nsec = 500000}, NULL);
    }
    backends[0].conv2d_backward(din, dweight, dbias, dout, in, weight, l, n, accumulate, scratch);
}

enum { LEARN_STEPS = 3, LEARN_BATCH = 4, BUCKETS = 2, MESSAGES = 2 }; // MESSAGES: of a bucket

static void *learner_thread(void *argument) {
    learner = argument;
    Run *run = &learner->run;
    Net *net = &run->net;
    const DatasetInfo info = dataset_for(find_model("mnist"), "synthetic");
    Dataset data = {.info = &info};
    omp_set_num_threads(1);
    make_synthetic(&data, true, LEARN_STEPS * 2 * LEARN_BATCH);
    net_build(net, find_model("mnist"), &info, &run->settings, &learner->backend);
    plan_memory(net, LEARN_BATCH);
    net_alloc(net);
    net_init(net, 1);
    real *state = must_alloc(2 * net->param_size * sizeof(real), "a test");
    Placement place = {&learner->backend, 0, false, false, run->comm.rank, run->comm.world - 1};
    loader_init(&run->train_loader, &data, LEARN_BATCH, 1, NULL, place);
    comm_init(&run->comm, net, &run->train_loader);
    loader_start(&run->train_loader, 1, 1, 0);
    for (const Batch *batch; (batch = next_batch(&run->comm));) {
        load_batch(&run->comm, batch);
        forward(net, batch->n, &batch->draw);
        batch_loss(&run->comm, batch);
        const size_t before = learner->received;
        learner->awaited = before + (run->settings.overlap ? MESSAGES : 0);
        backward(net, batch->n);
        learner->beside += __atomic_load_n(&learner->received, __ATOMIC_SEQ_CST) - before;
        const double end = now();
        reduce_gradients(&run->comm);
        learner->exposed_s += now() - end;
        optimizer_step(&optimizers[0], net, state, 1);
    }
    learner->hash = hash_weights(net);
    comm_free(&run->comm);
    loader_free(&run->train_loader);
    net_free(net);
    free(state);
    free_dataset(&data);
    return NULL;
}

// Two learners; returns what rank 0 measured, with the messages of both.
static Learner learn(bool overlap) {
    Team team = {0};
    pthread_t threads[2];
    team_init(&team);
    memset(learners, 0, sizeof learners);
    for (size_t r = 0; r < 2; r++) {
        Learner *l = &learners[r];
        l->backend = backends[0];
        l->backend.receive = slow_receive;
        l->backend.conv2d_backward = patient_conv2d_backward;
        parse_options(&l->run.settings, 1, (char *[]){"cnn"});
        l->run.settings.overlap = overlap;
        l->run.settings.bucket_mb = 1;
        l->run.comm =
            (Comm){.rank = r, .world = 2, .device = r, .team = &team, .settings = &l->run.settings};
        team.ranks[r] = &l->run.comm;
    }
    for (size_t r = 0; r < 2; r++)
        if (pthread_create(&threads[r], NULL, learner_thread, &learners[r]) != 0)
            fail("no thread");
    for (size_t r = 0; r < 2; r++)
        pthread_join(threads[r], NULL);
    if (learners[0].hash != learners[1].hash)
        fail("the two ranks have other weights");
    for (size_t r = 0; r < 2; r++)
        if (learners[r].late)
            fail("rank %zu: backward waited 20 s for a bucket to go around beside it", r);
    Learner both = learners[0];
    both.received += learners[1].received;
    both.beside += learners[1].beside;
    return both;
}

// Messages that come beside backward are those that no step waits for. Backward waits for the first
// bucket's: so this does not depend on who is faster today.
static void test_overlap(void) {
    const size_t all = 2 * LEARN_STEPS * BUCKETS * MESSAGES;
    Learner off = learn(false), on = learn(true);
    if (off.hash != on.hash)
        fail("the weights depend on when gradients are added up");
    if (off.received != all || on.received != all)
        fail("%zu and %zu messages, expected %zu", off.received, on.received, all);
    if (off.beside > 0 || off.exposed_s < (double)all / 2 * message_s)
        fail("without overlap %zu messages came beside backward, and the steps waited %g s, "
             "expected 0 and at least %g s",
             off.beside, off.exposed_s, (double)all / 2 * message_s);
    if (on.beside < all / BUCKETS)
        fail("with overlap %zu messages came beside backward, expected at least %zu", on.beside,
             all / BUCKETS);
    verdict("ddp: overlap hides communication, and changes no bit");
}

int main(void) {
    const char *wish = getenv("QUICK");
    quick = wish && *wish && strcmp(wish, "0") != 0;
    suite = is_double ? "double" : "float";
    omp_set_num_threads(2);
    test_comparison();
    test_turns();
    test_left_turns();
    test_philox();
    test_gradients();
    test_plan_against_none();
    test_plan_of_models();
    test_plan_of_random();
    test_maxpool(&backends[0]);
    test_maxpool(&backends[1]);
    test_maxpool_nan(&backends[0]);
    test_maxpool_nan(&backends[1]);
    test_fast_conv();
    test_pooled();
    test_pooled_limit();
    test_fast_resnet_conv();
    test_winograd(3);
    test_winograd(5);
    test_winograd_rounding();
    test_fast_linear();
    test_few_pixels();
    test_dropout_values();
    test_dropout_draws();
    test_norm_cancellation();
    test_norm_outliers();
    test_norm_running();
    test_norm_threads();
    test_norm_residual();
    test_optimizers();
    test_cifar_files();
    test_loader_order();
    test_loader_left_early();
    test_loader_shares();
    test_augmentation();
    test_steps();
    test_to_pytorch();
    test_golden();
    test_parameter_counts();
    test_layer_times("cifar", "synthetic", 6);
    test_layer_times("resnet8", "synthetic", 21);
    test_stems();
    test_initial_values();
    test_threads();
    test_confusion();
    test_smoothing_of_training();
    test_checkpoints();
    test_all_reduce();
    test_broadcast();
    test_overlap();
    return 0;
}
