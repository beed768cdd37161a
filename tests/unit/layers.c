/* layers.c - section 2 of cnn.c: max-pool, dropout, log_softmax and BatchNorm against their
   formulas. gradients.c compares the gradients of all layers with central differences. */

/* ---- Max-pool -------------------------------------------------------------------------------- */

// Where the tap of a window lies in the image, or NULL.
static real *window_pixel(const real *image, const Layer *l, size_t y, size_t x, size_t tap) {
    ptrdiff_t iy = (ptrdiff_t)(y * l->stride + tap / l->kernel_size) - (ptrdiff_t)l->padding;
    ptrdiff_t ix = (ptrdiff_t)(x * l->stride + tap % l->kernel_size) - (ptrdiff_t)l->padding;
    bool inside = iy >= 0 && ix >= 0 && iy < (ptrdiff_t)l->in.h && ix < (ptrdiff_t)l->in.w;
    return inside ? (real *)image + ((size_t)iy * l->in.w + (size_t)ix) * l->in.c : NULL;
}

// The first maximum of one window and channel; its gradient goes to that pixel, its size to sizes.
static void pool_window(const Layer *l, const real *in, size_t at, real *out, uint8_t *arg,
                        const real *dout, real *din, real *sizes) {
    size_t c = at % l->out.c, x = at / l->out.c % l->out.w, y = at / l->out.c / l->out.w % l->out.h;
    size_t image = at / shape_size(l->out) * shape_size(l->in);
    out[at] = -INFINITY;
    for (size_t tap = 0; tap < l->kernel_size * l->kernel_size; tap++) {
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
    to_bound(&p.bound, l->kernel_size * l->kernel_size + 1);
    return p;
}

static void compare_pool(const Kernels *k, const Layer *l, size_t n, bool accumulate) {
    Array before = random_array(n * shape_size(l->in));
    if (!accumulate)
        memset(before.at, 0, before.count * sizeof(real));
    Pool p = pool_reference(l, n, accumulate, &before);
    Array out = array(p.out.count, guard_value), din = array(before.count, guard_value);
    uint8_t *arg = must_alloc(p.out.count, "a test");
    if (accumulate) // else NaN stays there: all of it must be written
        memcpy(din.at, before.at, before.count * sizeof(real));
    const Work w = {.l = l,
                    .n = n,
                    .in = p.in.at,
                    .out = out.at,
                    .saved = arg,
                    .dout = p.dout.at,
                    .din = din.at,
                    .accumulate = accumulate};
    k->layers[MAXPOOL2D].forward(w);
    k->layers[MAXPOOL2D].backward(w);
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

static void test_maxpool(const Kernels *k) {
    static Net net;
    const Fusion none = {0};
    static const size_t windows[][3] = {{1, 1, 0}, {2, 2, 0}, {3, 3, 0}, {3, 2, 1}, // ResNet's
                                        {3, 1, 1}, {2, 1, 1}, {5, 3, 2}, {3, 2, 2}};
    for (size_t c = 1; c < 70; c++) {
        const size_t *w = windows[c % 8];
        start_net(&net, (Shape){9, 7, c});
        maxpool2d(&net, 0, w[0], w[1], w[2]);
        bool before = *failure;
        for (size_t accumulate = 0; accumulate < 2; accumulate++) {
            compare_pool(k, &net.layers[1], 3, accumulate);
            if (*failure && !before)
                describe_failure(&net.layers[1], &none, 3, accumulate);
        }
    }
    char name[64];
    snprintf(name, sizeof name, "maxpool2d, %s kernels", NAME_OF(k));
    verdict("%s", name);
}

// A NaN is the largest of its window, so that it reaches the loss and is found.
static void test_maxpool_nan(const Kernels *k) {
    static Net net;
    start_net(&net, (Shape){6, 7, 19});
    maxpool2d(&net, 0, 3, 2, 1);
    const Layer *l = &net.layers[1];
    size_t count = shape_size(l->out), found = 0;
    Array in = random_array(shape_size(l->in)), out = array(count, guard_value);
    uint8_t *arg = must_alloc(count, "a test");
    for (size_t i = 0; i < in.count; i++)
        in.at[i] = draw_bits() % 9 ? in.at[i] : (real)NAN;
    k->layers[MAXPOOL2D].forward((Work){.l = l, .n = 1, .in = in.at, .out = out.at, .saved = arg});
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
    snprintf(name, sizeof name, "maxpool2d of NaN, %s kernels", NAME_OF(k));
    verdict("%s", name);
}

/* ---- Dropout and log_softmax ----------------------------------------------------------------- */

enum { DROP_N = 9, DROP_SIZE = 7 * 13 * 37, DROP_COUNT = DROP_N * DROP_SIZE };
static const uint32_t drop_stream = DRAW_DROPOUT + 3;

static void drop(const Kernels *k, real *out, uint8_t *kept, const real *in, real p, size_t n,
                 uint32_t stream, const RandomKey *key) {
    Layer l = {.kind = DROPOUT, .p = p, .in = {7, 13, 37}, .out = {7, 13, 37}};
    k->layers[DROPOUT].forward((Work){.l = &l,
                                      .row = stream - DRAW_DROPOUT,
                                      .n = n,
                                      .in = in,
                                      .out = out,
                                      .saved = kept,
                                      .key = key});
}

static Work with_mask(Work w, const uint8_t *kept) {
    w.saved = (uint8_t *)kept;
    return w;
}

static void check_dropout_values(const Kernels *k, const real *in, const real *out,
                                 const uint8_t *kept, real p) {
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
    const Work w = {.l = &l, .n = DROP_N, .dout = (real *)in, .din = din.at};
    k->layers[DROPOUT].backward(with_mask(w, kept)); // the same rule, for dout = in
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

static void test_dropout_values(const Kernels *k) {
    static const real rates[] = {0, (real).1, (real).25, (real).5, (real).9};
    static uint8_t kept[DROP_COUNT];
    RandomKey key = {.seed = 1, .epoch = 1, .stride = 1};
    Array in = random_array(DROP_COUNT);
    for (size_t i = 0; i < sizeof rates / sizeof *rates; i++) {
        Array out = array(DROP_COUNT, guard_value);
        memset(kept, 7, sizeof kept);
        drop(k, out.at, kept, in.at, rates[i], DROP_N, drop_stream, &key);
        check_guards("out", &out);
        check_dropout_values(k, in.at, out.at, kept, rates[i]);
        if (rates[i] == 0 && memcmp(out.at, in.at, DROP_COUNT * sizeof(real)) != 0)
            fail("p = 0 changes the numbers");
        free(out.base);
    }
    free(in.base);
    verdict("dropout of %s kernels: rate, mask, output and gradient agree", NAME_OF(k));
}

// Logits whose exp() is infinite or 0, with the largest in each place: the others are 1000 below.
static void test_large_logits(void) {
    enum { PLACES = 4 };
    const Layer l = {.kind = LOG_SOFTMAX, .in = {1, 1, PLACES}, .out = {1, 1, PLACES}};
    Array in = array(PLACES * PLACES, 0), out = array(PLACES * PLACES, guard_value);
    Array want = array(PLACES * PLACES, 0);
    for (real level = -5000; level <= 5000; level += 5000) {
        for (size_t i = 0; i < in.count; i++) {
            want.at[i] = i / PLACES == i % PLACES ? 0 : -1000;
            in.at[i] = level + want.at[i];
        }
        log_softmax_forward((Work){.l = &l, .n = PLACES, .in = in.at, .out = out.at});
        check_tensor("logp", out.at, want.at, NULL, out.count);
    }
    check_guards("logp", &out);
    free(in.base);
    free(out.base);
    free(want.base);
    verdict("log_softmax of large numbers");
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

static void test_dropout_draws(const Kernels *k) {
    static uint8_t one[DROP_COUNT], other[DROP_COUNT];
    RandomKey base = {.seed = 1, .epoch = 1, .first = 100, .stride = 1},
              draws[3] = {base, base, base};
    const char *names[3] = {"seed", "epoch", "position"};
    Array in = random_array(DROP_COUNT), out = array(DROP_COUNT, guard_value);
    real p = (real).5;
    drop(k, out.at, one, in.at, p, DROP_N, drop_stream, &base);
    drop(&naive_kernels, out.at, other, in.at, p, DROP_N, drop_stream, &base);
    if (memcmp(one, other, sizeof one) != 0)
        fail("another mask than the definition's");
    for (size_t cut = 1; cut < DROP_N; cut++) { // the batch's borders change nothing
        RandomKey second = {.seed = 1, .epoch = 1, .first = base.first + cut, .stride = 1};
        size_t at = cut * DROP_SIZE;
        drop(k, out.at, other, in.at, p, cut, drop_stream, &base);
        drop(k, out.at + at, other + at, in.at + at, p, DROP_N - cut, drop_stream, &second);
        if (memcmp(one, other, sizeof one) != 0)
            fail("a batch cut at image %zu draws another mask", cut);
    }
    draws[0].seed++;
    draws[1].epoch++;
    draws[2].first += DROP_N;
    for (size_t i = 0; i < 3; i++) {
        drop(k, out.at, other, in.at, p, DROP_N, drop_stream, &draws[i]);
        expect_independent(names[i], one, other, sizeof one);
    }
    drop(k, out.at, other, in.at, p, DROP_N, drop_stream + 1, &base);
    expect_independent("layer", one, other, sizeof one);
    expect_independent("image", one, one + DROP_SIZE, DROP_SIZE);
    free(in.base);
    free(out.base);
    verdict("dropout of %s kernels: drawn by seed, epoch, layer and image alone", NAME_OF(k));
}

/* ---- BatchNorm ------------------------------------------------------------------------------- */

enum { BN_CHANNELS = 6, BN_MOST = 9 };
static const Shape bn_shape = {5, 7, BN_CHANNELS};
static const Layer bn_layer = {.kind = BATCHNORM2D,
                               .in = {5, 7, BN_CHANNELS},
                               .out = {5, 7, BN_CHANNELS},
                               .weight_count = BN_CHANNELS,
                               .bias_count = BN_CHANNELS};

// A BatchNorm on its own; the numbers of channel c lie around means[c], as far as spreads[c].
typedef struct Norm {
    const Kernels *k; // whose BatchNorm is tested
    Array in, out, stats, weight, bias, scratch;
} Norm;

static Norm make_norm(const Kernels *k) {
    size_t count = BN_MOST * shape_size(bn_shape);
    Norm x = {k,
              random_array(count),
              array(count, guard_value),
              array(4 * BN_CHANNELS, guard_value),
              random_array(BN_CHANNELS),
              random_array(BN_CHANNELS),
              array(k->scratch_size(&bn_layer, &(Fusion){0}, BN_MOST), guard_value)};
    for (size_t c = 0; c < BN_CHANNELS; c++) { // as init_weights() leaves them
        x.stats.at[c] = 0;
        x.stats.at[BN_CHANNELS + c] = 1;
    }
    return x;
}

static void free_norm(Norm *x) {
    free_arrays(&x->in, sizeof *x - offsetof(Norm, in));
}

static void draw_norm_input(Norm *x, const double *means, const double *spreads) {
    for (size_t i = 0; i < x->in.count; i++)
        x->in.at[i] =
            (real)(means[i % BN_CHANNELS] + spreads[i % BN_CHANNELS] * (double)draw_real());
}

static Work norm_work(const Norm *x, size_t n, bool training) {
    return (Work){.l = &bn_layer,
                  .n = n,
                  .in = x->in.at,
                  .weight = x->weight.at,
                  .bias = x->bias.at,
                  .out = x->out.at,
                  .stats = x->stats.at,
                  .scratch = x->scratch.at,
                  .key = training ? &any_key : NULL};
}

static void run_norm(Norm *x, size_t n, bool training) {
    x->k->layers[BATCHNORM2D].forward(norm_work(x, n, training));
    check_guards("out", &x->out);
    check_guards("stats", &x->stats);
    check_guards("scratch", &x->scratch);
}

// In two passes, with more digits than a real has.
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

/* How far off a variance may be, as a part of it, with the fast kernels: a sum of squares over a
   slice, and means that are each rounded, which moves the squared distances from them. */
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
static void test_norm_cancellation(const Kernels *k) {
    static const double means[BN_CHANNELS] = {1e4, -1e4, 1e4, -1e4, 0, 1};
    static const double spreads[BN_CHANNELS] = {1, .1, .03, 30, 1e-3, 2};
    Norm x = make_norm(k);
    for (size_t n = 1; n <= BN_MOST; n++) {
        Moments m[BN_CHANNELS];
        draw_norm_input(&x, means, spreads);
        run_norm(&x, n, true);
        for (size_t c = 0; c < BN_CHANNELS; c++)
            m[c] = moments_of(&x, n, c);
        check_norm_statistics(&x, n, m);
    }
    free_norm(&x);
    verdict("batchnorm2d of %s kernels: statistics of numbers far from 0", NAME_OF(k));
}

/* Each slice begins with a number far from all others. A sum of squared distances from that one, of
   which most is taken away again, would be off by 200 roundings. */
static void test_norm_outliers(const Kernels *k) {
    enum { SIDE = 64, N = 16, PIXELS = N * SIDE * SIDE };
    Layer l = {.kind = BATCHNORM2D, .in = {SIDE, SIDE, 1}, .out = {SIDE, SIDE, 1}};
    Array in = random_array(PIXELS), out = array(PIXELS, guard_value);
    Array scratch = array(k->scratch_size(&l, &(Fusion){0}, N), guard_value);
    real stats[4] = {0, 1}, weight = 1, bias = 0;
    long double mean = 0, variance = 0;
    for (size_t i = 0; i < PIXELS; i += PIXELS / BN_SLICES)
        in.at[i] = 300;
    k->layers[BATCHNORM2D].forward((Work){.l = &l,
                                          .n = N,
                                          .in = in.at,
                                          .weight = &weight,
                                          .bias = &bias,
                                          .out = out.at,
                                          .stats = stats,
                                          .scratch = scratch.at,
                                          .key = &any_key});
    for (size_t i = 0; i < PIXELS; i++)
        mean += in.at[i] / (long double)PIXELS;
    for (size_t i = 0; i < PIXELS; i++)
        variance += (in.at[i] - mean) * (in.at[i] - mean) / (long double)PIXELS;
    real want = (real)(1 / sqrtl(variance + (long double)bn_eps));
    real bound = (real)(32 * epsilon) * want;
    check_tensor("1 / deviation", &stats[3], &want, &bound, 1);
    free_arrays((Array[]){in, out, scratch}, 3 * sizeof(Array));
    verdict("batchnorm2d of %s kernels: statistics with outliers", NAME_OF(k));
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

static void test_norm_running(const Kernels *k) {
    static const double means[BN_CHANNELS] = {0, 1, -2, 3, 0, 5};
    static const double spreads[BN_CHANNELS] = {1, 2, .5, 1, 3, .1};
    Norm x = make_norm(k);
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
    free_norm(&x);
    verdict("batchnorm2d of %s kernels: running statistics, and evaluation by them", NAME_OF(k));
}

// Forward and backward, all results one after another.
static Array norm_results(Norm *x, const Array *dout, int threads) {
    size_t count = x->in.count;
    Array all = array(2 * count + 6 * BN_CHANNELS, guard_value);
    real *din = all.at + count, *stats = din + count, *dweight = stats + 4 * BN_CHANNELS;
    set_num_threads(threads);
    memset(stats, 0, 4 * BN_CHANNELS * sizeof *stats);
    Work w = norm_work(x, BN_MOST, true);
    w.out = all.at;
    w.stats = stats;
    w.dout = dout->at;
    w.din = din;
    w.dweight = dweight;
    w.dbias = dweight + BN_CHANNELS;
    x->k->layers[BATCHNORM2D].forward(w);
    x->k->layers[BATCHNORM2D].backward(w);
    set_num_threads(2);
    return all;
}

static void test_norm_threads(const Kernels *k) {
    Norm x = make_norm(k);
    Array dout = random_array(x.in.count);
    Array one = norm_results(&x, &dout, 1);
    for (int threads = 2; threads < 6; threads++) {
        Array more = norm_results(&x, &dout, threads);
        check_tensor("1 thread against more", more.at, one.at, NULL, one.count);
        free(more.base);
    }
    free_norm(&x);
    free(dout.base);
    free(one.base);
    verdict("batchnorm2d of %s kernels: the same bits for any number of threads", NAME_OF(k));
}

// What BatchNorm adds while it stores has the bits of an add after it, with and without ReLU.
static void test_norm_residual(void) {
    Norm x = make_norm(&fast_kernels);
    Array residual = random_array(x.in.count), got = array(x.in.count, guard_value);
    for (int variant = 0; variant < 4; variant++) {
        const bool relu = variant % 2;
        Work fused = norm_work(&x, BN_MOST, variant / 2);
        fused.fused = (Fusion){.add = true, .relu = relu};
        fused.residual = residual.at;
        fused.out = got.at;
        batchnorm2d_forward_fast(fused);
        run_norm(&x, BN_MOST, variant / 2);
        Work separate = {.l = &bn_layer, .n = BN_MOST, .in = x.out.at, .out = x.out.at};
        separate.residual = residual.at;
        add_forward(separate);
        if (relu)
            relu_forward(separate);
        check_tensor("out", got.at, x.out.at, NULL, got.count);
    }
    check_guards("out", &got);
    free_norm(&x);
    free(residual.base);
    free(got.base);
    verdict("batchnorm2d: an add in one with it");
}

static void test_layers(void) {
    for (size_t b = 0; b < 2; b++) {
        test_maxpool(both_kernels[b]);
        test_maxpool_nan(both_kernels[b]);
        test_dropout_values(both_kernels[b]);
        test_dropout_draws(both_kernels[b]);
    }
    test_large_logits();
    for (size_t b = 0; b < 2; b++) {
        test_norm_cancellation(both_kernels[b]);
        test_norm_outliers(both_kernels[b]);
        test_norm_running(both_kernels[b]);
        test_norm_threads(both_kernels[b]);
    }
    test_norm_residual();
}
