/* test_cnn.c - tests of the parts of cnn.c, compiled once with real = float and once = double.

   Prints a line for each test: `pass NAME`, `fail NAME: what` or `skip NAME: why`. QUICK=1 in the
   environment runs fewer shapes. Every number is drawn from a fixed seed: a failure repeats. */

#define CNN_NO_MAIN
#include "../cnn.c"
#include <dlfcn.h>
#include <float.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED
#endif
#endif

static const bool is_double = sizeof(real) == sizeof(double);
static const double epsilon = sizeof(real) == sizeof(double) ? DBL_EPSILON : FLT_EPSILON;
static bool quick;

/* ---- Verdicts ------------------------------------------------------------------------------- */

static char failure[512]; // the first thing that went wrong in the test that runs; "" if nothing

static void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

static void fail(const char *format, ...) {
    if (*failure)
        return;
    va_list args;
    va_start(args, format);
    vsnprintf(failure, sizeof failure, format, args);
    va_end(args);
}

static void verdict(const char *name) {
    const char *build = is_double ? "double" : "float";
    if (*failure)
        printf("fail %s/%s: %s\n", build, name, failure);
    else
        printf("pass %s/%s\n", build, name);
    fflush(stdout);
    *failure = 0;
}

static void skip(const char *name, const char *why) {
    printf("skip %s/%s: %s\n", is_double ? "double" : "float", name, why);
}

// The only comparison of tensors. It asks what is right, so that a NaN on any side fails.
static bool check_tensor(const char *name, const real *got, const real *want, const real *bound,
                         size_t count) {
    for (size_t i = 0; i < count; i++) {
        double a = (double)got[i], b = (double)want[i], most = (double)bound[i];
        if (isfinite(a) && isfinite(b) && fabs(a - b) <= most)
            continue;
        fail("%s[%zu of %zu] is %.9g, expected %.9g within %.3g", name, i, count, a, b, most);
        return false;
    }
    return true;
}

// A comparison that never fails would make every test below pass: so it is tested first.
static void test_comparison(void) {
    static const real want[4] = {1, 2, 3, 4}, bound[4] = {.5, .5, .5, .5};
    static const real wrong[4] = {(real)NAN, (real)INFINITY, (real)-INFINITY, 4};
    bool good = check_tensor("equal", want, want, bound, 4);
    for (size_t at = 0; at < 4; at++) {
        for (size_t kind = 0; kind < 4; kind++) {
            real got[4] = {1, 2, 3, 4};
            got[at] = kind < 3 ? wrong[kind] : got[at] + 1;
            good = !check_tensor("wrong", got, want, bound, 4) && good;
        }
    }
    real nowhere[4] = {0, 0, (real)NAN, 0};
    good = !check_tensor("bound", want, want, nowhere, 4) && good;
    *failure = 0;
    if (!good)
        fail("the comparison missed a difference");
    verdict("comparison");
}

/* ---- Numbers and arrays --------------------------------------------------------------------- */

static uint32_t drawn; // how many random numbers the tests have drawn

static uint32_t draw_bits(void) {
    uint32_t r[4];
    philox4x32(r, drawn++, 0, 0, 0xFFFF, 99);
    return r[0];
}

static size_t draw_size(size_t least, size_t most) {
    return least + draw_bits() % (most - least + 1);
}

static real draw_real(void) // in [-1, 1)
{
    return 2 * uniform(draw_bits()) - 1;
}

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

/* ---- Fast layers against the definitions ---------------------------------------------------- */

typedef struct Inputs {
    Array in, weight, bias, dout;
} Inputs;
typedef struct Results {
    Array out, din, dweight, dbias;
} Results;

static void free_arrays(Array *arrays) // the four of an Inputs or a Results
{
    for (size_t i = 0; i < 4; i++)
        free(arrays[i].base);
}

static Results run_layer(const Backend *b, const Layer *l, size_t n, const Inputs *x) {
    Results r = {array(n * shape_size(l->out), guard_value),
                 array(n * shape_size(l->in), guard_value), array(l->weights, guard_value),
                 array(l->biases, guard_value)};
    Array scratch = array(b->scratch_size(l, n), guard_value);
    bool conv = l->kind == CONV2D;
    (conv ? b->conv2d_forward : b->linear_forward)(r.out.at, x->in.at, x->weight.at, x->bias.at, l,
                                                   n, scratch.at);
    (conv ? b->conv2d_backward : b->linear_backward)(r.din.at, r.dweight.at, r.dbias.at, x->dout.at,
                                                     x->in.at, x->weight.at, l, n, scratch.at);
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
    size_t terms[4] = {taps * l->in.c + 1, taps * l->out.c, pixels, pixels};
    const Array *g = (const Array *)got, *w = (const Array *)want;
    Array *b = (Array *)bound;
    for (size_t i = 0; i < 4; i++) {
        to_bound(&b[i], terms[i]);
        check_tensor(names[i], g[i].at, w[i].at, b[i].at, g[i].count);
        check_guards(names[i], &g[i]);
    }
}

static void describe_failure(const Layer *l, size_t n) {
    char what[sizeof failure], kind[64];
    describe_layer(l, kind, sizeof kind);
    snprintf(what, sizeof what, "%.200s (%s, %zu images, %zu x %zu x %zu to %zu channels%s)",
             failure, kind, n, l->in.h, l->in.w, l->in.c, l->out.c,
             l->fused_relu ? ", fused ReLU" : "");
    snprintf(failure, sizeof failure, "%s", what);
}

static void compare_layer(Layer l, size_t n) {
    const Backend *naive = &backends[0], *fast = &backends[1];
    Inputs x = {random_array(n * shape_size(l.in)), random_array(l.weights), random_array(l.biases),
                random_array(n * shape_size(l.out))};
    Inputs a = {absolute(&x.in), absolute(&x.weight), absolute(&x.bias), absolute(&x.dout)};
    fast->prepare(&l);
    Results got = run_layer(fast, &l, n, &x), want = run_layer(naive, &l, n, &x);
    Results bound = run_layer(naive, &l, n, &a);
    if (l.fused_relu)
        relu_forward(want.out.at, want.out.at, want.out.count);
    bool before = *failure;
    compare_results(&got, &want, &bound, &l, n);
    if (*failure && !before)
        describe_failure(&l, n);
    free_arrays((Array *)&x);
    free_arrays((Array *)&a);
    free_arrays((Array *)&got);
    free_arrays((Array *)&want);
    free_arrays((Array *)&bound);
    free(l.gather);
    free(l.scatter);
}

// Both choose the same of equal maxima, so results must be equal to the bit.
static void test_maxpool(void) {
    bool same = true;
    for (size_t c = 1; c < 70; c++) {
        Layer l = {.kind = MAXPOOL2D, .in = {9, 7, c}, .kernel = 1 + c % 3};
        l.stride = l.kernel;
        l.out = (Shape){l.in.h / l.kernel, l.in.w / l.kernel, c};
        size_t count = 3 * shape_size(l.out);
        Array in = random_array(3 * shape_size(l.in));
        for (size_t i = 0; i < in.count; i++)
            in.at[i] = (real)floor(3 * (double)in.at[i]); // many ties
        Array outs[2] = {array(count, guard_value), array(count, guard_value)};
        uint8_t *args[2] = {must_alloc(count, "test"), must_alloc(count, "test")};
        for (size_t b = 0; b < 2; b++) {
            backends[b].maxpool2d_forward(outs[b].at, args[b], in.at, &l, 3);
            check_guards("maxpool2d", &outs[b]);
        }
        same = same && memcmp(outs[0].at, outs[1].at, count * sizeof(real)) == 0 &&
               memcmp(args[0], args[1], count) == 0;
        for (size_t b = 0; b < 2; b++) {
            free(outs[b].base);
            free(args[b]);
        }
        free(in.base);
    }
    if (!same)
        fail("fast and naive differ");
    verdict("maxpool2d, fast against naive");
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
    *net = (Net){.model = "test", .backend = &backends[1]};
    add_layer(net, (Layer){.kind = INPUT, .in = in, .out = in});
    conv2d(net, 0, draw_bits() % 3 ? draw_size(1, 70) : draw_size(1, 140), kernel, stride, padding);
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
        compare_layer(l, n);
        shape++;
    }
    verdict("fast conv2d against its definition");
}

static void test_fast_linear(void) {
    static Net net;
    for (int shape = 0; shape < (quick ? 10 : 40); shape++) {
        size_t inputs = shape % 4 ? draw_size(1, 300) : draw_size(1000, 2600); // MAX_DEPTH: 1024
        net = (Net){.model = "test", .backend = &backends[1]};
        add_layer(&net, (Layer){.kind = INPUT, .out = {1, 1, inputs}});
        linear(&net, 0, draw_size(1, 140));
        net.layers[1].fused_relu = draw_bits() % 2;
        compare_layer(net.layers[1], draw_size(1, 40));
    }
    verdict("fast linear against its definition");
}

/* ---- Gradients against central differences -------------------------------------------------- */

enum { BATCH = 7, CLASSES = 4 };
static const Draw gradient_draw = {.seed = 5, .epoch = 2, .first = 30};

static void build_gradient_net(Net *net, const Backend *b, size_t kernel, size_t stride,
                               size_t padding) {
    Shape in = {5, 9, 3};
    *net = (Net){.model = "test", .backend = b};
    size_t x = add_layer(net, (Layer){.kind = INPUT, .in = in, .out = in});
    x = relu(net, conv2d(net, x, 5, kernel, 1, kernel / 2)); // 5 x 9 stays, or grows by one
    x = conv2d(net, x, 9, kernel, stride, padding);
    Shape s = net->layers[x].out;
    bool pool_first = (stride + padding) % 2; // a ReLU behind a convolution, or behind a max-pool
    x = pool_first ? x : relu(net, x);
    size_t window = s.h >= 3 && s.w >= 3 && padding != 1 ? 3 : 2;
    if (s.h >= window && s.w >= window)
        x = maxpool2d(net, x, window);
    x = pool_first ? relu(net, x) : x;
    x = relu(net, linear(net, dropout(net, x, (real).3), 11));
    x = linear(net, dropout(net, x, (real).5), CLASSES);
    log_softmax(net, x);
    plan_memory(net, BATCH);
    net_alloc(net);
    net_init(net, 3);
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

static double central_difference(Net *net, size_t at, double h) {
    real kept = net->params[at];
    net->params[at] = kept + (real)h;
    double above = loss_of(net);
    net->params[at] = kept - (real)h;
    double below = loss_of(net);
    net->params[at] = kept;
    return (above - below) / (2 * h);
}

// Where the loss has a kink (a ReLU at 0, a tie of a max-pool) halving h changes the difference.
static void check_gradient(Net *net, const char *name, size_t offset, size_t count, size_t *checked,
                           size_t *skipped) {
    double scale = 0;
    for (size_t i = 0; i < count; i++)
        scale = fmax(scale, fabs((double)net->grads[offset + i]));
    size_t samples = min_size(count, quick ? 12 : 40);
    for (size_t s = 0; s < samples; s++) {
        size_t i = count == samples ? s : draw_size(0, count - 1);
        double h = 1e-5, d = central_difference(net, offset + i, h);
        real got = net->grads[offset + i], want = (real)d, bound = (real)(1e-6 * scale + 1e-10);
        bool agree = fabs((double)got - d) <= (double)bound;
        double half = agree ? d : central_difference(net, offset + i, h / 2);
        ++*checked;
        if (fabs(d - half) > (double)bound)
            ++*skipped;
        else
            check_tensor(name, &got, &want, &bound, 1);
    }
}

static void test_gradients_of(const Backend *b, size_t kernel) {
    static Net net;
    size_t checked = 0, skipped = 0;
    for (size_t stride = 1; stride <= 2; stride++)
        for (size_t padding = 0; padding <= 2; padding++) {
            build_gradient_net(&net, b, kernel, stride, padding);
            load_random(&net);
            memset(net.grads, 0xFF, net.param_size * sizeof(real)); // NaN: all must be written
            loss_of(&net);
            backward(&net, BATCH);
            for (size_t i = 1; i < net.count; i++) {
                const Layer *l = &net.layers[i];
                if (!l->weights)
                    continue;
                char name[96];
                snprintf(name, sizeof name, "stride %zu padding %zu: grad of %s.weight", stride,
                         padding, l->name);
                check_gradient(&net, name, l->weight, l->weights, &checked, &skipped);
                memcpy(strrchr(name, '.'), ".bias", 6);
                check_gradient(&net, name, l->bias, l->biases, &checked, &skipped);
            }
            net_free(&net);
        }
    if (skipped * 20 > checked)
        fail("%zu of %zu entries skipped as kinks", skipped, checked);
    char name[96];
    snprintf(name, sizeof name, "gradients, %s kernels, %zu x %zu filters", b->kernels, kernel,
             kernel);
    verdict(name);
}

static void test_gradients(void) {
    static const size_t kernels[] = {1, 2, 3, 5};
    for (size_t b = 0; is_double && b < 2; b++) // float is too coarse for differences
        for (size_t k = 0; k < 4; k++)
            test_gradients_of(&backends[b], kernels[k]);
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
    dropout_backward(din.at, in, kept, &l, DROP_N); // the same rule, for dout = in
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

/* ---- Optimizers ----------------------------------------------------------------------------- */

enum { OPT_COUNT = 1003, OPT_STEPS = 10 };
typedef struct Reference {
    double param, square, delta, moved; // moved: the sum of |steps|, for the bound
} Reference;

static void reference_step(Reference *r, double g, bool adadelta_rule) {
    double step = .01 * g;
    if (adadelta_rule) {
        r->square = .9 * r->square + .1 * g * g;
        double delta = sqrt(r->delta + 1e-6) / sqrt(r->square + 1e-6) * g;
        r->delta = .9 * r->delta + .1 * delta * delta;
        step = .7 * delta;
    }
    r->param -= step;
    r->moved += fabs(step);
}

static void test_optimizer(bool adadelta_rule) {
    static Reference r[OPT_COUNT];
    Array param = random_array(OPT_COUNT), want = array(OPT_COUNT, 0), bound = array(OPT_COUNT, 0);
    Array square = array(OPT_COUNT, guard_value), delta = array(OPT_COUNT, guard_value);
    for (size_t i = 0; i < OPT_COUNT; i++) {
        r[i] = (Reference){.param = (double)param.at[i]};
        square.at[i] = delta.at[i] = 0;
    }
    for (int step = 0; step < OPT_STEPS; step++) {
        Array grad = random_array(OPT_COUNT);
        for (size_t i = 0; i < OPT_COUNT; i++)
            reference_step(&r[i], (double)grad.at[i], adadelta_rule);
        if (adadelta_rule)
            adadelta(param.at, grad.at, square.at, delta.at, OPT_COUNT, .7, .9, 1e-6);
        else
            sgd(param.at, grad.at, OPT_COUNT, .01);
        free(grad.base);
    }
    for (size_t i = 0; i < OPT_COUNT; i++) { // each step rounds a few times
        want.at[i] = (real)r[i].param;
        bound.at[i] = (real)(2 * OPT_STEPS * epsilon * (fabs(r[i].param) + 4 * r[i].moved));
    }
    check_tensor("param", param.at, want.at, bound.at, OPT_COUNT);
    check_guards("square_avg", &square);
    check_guards("acc_delta", &delta);
    Array arrays[] = {param, want, bound, square, delta};
    for (size_t i = 0; i < 5; i++)
        free(arrays[i].base);
    verdict(adadelta_rule ? "adadelta against a plain loop" : "sgd against a plain loop");
}

/* ---- Loader --------------------------------------------------------------------------------- */

enum { IMAGES = 103, LOAD_BATCH = 8, LOAD_BATCHES = 13 };
static const DatasetInfo tiny_info = {"tiny",       {1, 2, 3},      10, IMAGES, IMAGES,
                                      {.1, .2, .3}, {.5, .25, .125}};

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
        if (b->first != count || b->n != min_size(LOAD_BATCH, IMAGES - count)) {
            fail("batch %zu: %zu images from position %zu on", batches, b->n, b->first);
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
        loader_init(&l, &data, LOAD_BATCH, run ? 4 : 1);
        for (size_t epoch = 0; epoch < 4; epoch++) {
            loader_start(&l, 11, epoch);
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

static void test_loader_left_early(void) {
    static size_t want[IMAGES], got[IMAGES];
    Dataset data = tiny_dataset();
    Loader l;
    loader_init(&l, &data, LOAD_BATCH, 3);
    loader_start(&l, 11, 5);
    read_epoch(&l, want);
    for (size_t round = 0; round < 200; round++) {
        loader_start(&l, 11, 6);
        for (size_t taken = 0; taken < round % LOAD_BATCHES; taken++)
            loader_next(&l);
        loader_start(&l, 11, 5);
        read_epoch(&l, got);
        if (memcmp(want, got, sizeof want) != 0)
            fail("an epoch left after %zu batches shows in the next", round % LOAD_BATCHES);
    }
    loader_free(&l);
    verdict("loader: an epoch left early, then a fresh one");
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

static void train_steps(Net *net, Loader *l, real *state, size_t steps) {
    for (size_t step = 0; step < steps; step++) {
        const Batch *batch = loader_next(l);
        Draw draw = {.seed = 1, .epoch = 1, .first = batch->first};
        net_load(net, batch);
        forward(net, batch->n, &draw);
        double loss = loss_and_gradient(net, batch->n, true);
        if (!isfinite(loss))
            fail("the loss is %g", loss);
        backward(net, batch->n);
        optimizers[0].step(net, state, 1);
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

static void test_steady_steps(void) {
    static Net net;
    Dataset data = {.info = find_dataset_info("synthetic")};
    Loader l;
    check_counter();
    omp_set_num_threads(2);
    make_synthetic(&data, true, 640);
    net_build(&net, &models[0], data.info, &backends[1]);
    plan_memory(&net, 64);
    net_alloc(&net);
    net_init(&net, 1);
    real *state = must_alloc(2 * net.param_size * sizeof(real), "a test");
    loader_init(&l, &data, 64, 2);
    loader_start(&l, 1, 1);
    train_steps(&net, &l, state, 3);
    allocations = 0;
    counting = true;
    train_steps(&net, &l, state, 5);
    counting = false;
    if (allocations)
        fail("%zu allocations or new threads in 5 steps", allocations);
    loader_free(&l);
    net_free(&net);
    free(state);
    free_dataset(&data);
    verdict("no allocation and no new thread in a training step");
}
#endif

static void test_steps(void) {
#ifdef COUNTS_ALLOCATIONS
    if (!is_double)
        test_steady_steps();
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
    Array bound = array(count, 0);
    for (size_t i = 0; i < count; i++) {
        from.at[i] = (real)i;
        bound.at[i] = 0;
    }
    for (size_t y = 0; y < s.h; y++)
        for (size_t x = 0; x < s.w; x++)
            for (size_t c = 0; c < s.c; c++)
                for (size_t k = 0; k < outputs; k++)
                    want.at[((k * s.c + c) * s.h + y) * s.w + x] =
                        (real)(((y * s.w + x) * s.c + c) * outputs + k);
    weight_to_pytorch(got.at, from.at, s, outputs);
    check_tensor("weight", got.at, want.at, bound.at, count);
    check_guards("weight", &got);
    Array arrays[] = {from, got, want, bound};
    for (size_t i = 0; i < 4; i++)
        free(arrays[i].base);
}

static void test_to_pytorch(void) {
    static Net net;
    Shape in = {4, 3, 2};
    net = (Net){.model = "test", .backend = &backends[1]};
    size_t x = add_layer(&net, (Layer){.kind = INPUT, .in = in, .out = in});
    x = linear(&net, conv2d(&net, x, 5, 3, 1, 1), 6);
    Shape conv = filter_shape(&net, &net.layers[x - 1]), whole = filter_shape(&net, &net.layers[x]);
    if (conv.h != 3 || conv.w != 3 || conv.c != 2 || whole.h != 4 || whole.w != 3 || whole.c != 5)
        fail("filters: conv %zu x %zu x %zu, linear %zu x %zu x %zu", conv.h, conv.w, conv.c,
             whole.h, whole.w, whole.c);
    check_permutation(conv, 5);
    check_permutation(whole, 6);
    verdict("weights in PyTorch's order");
}

static void test_parameter_count(void) {
    static Net net;
    net_build(&net, &models[0], find_dataset_info("mnist"), &backends[0]);
    if (net.parameters != 1199882)
        fail("expected 1199882 as in PyTorch, found %zu", net.parameters);
    verdict("parameter count of model mnist");
}

int main(void) {
    const char *wish = getenv("QUICK");
    quick = wish && *wish && strcmp(wish, "0") != 0;
    test_comparison();
    test_philox();
    test_gradients();
    test_maxpool();
    test_fast_conv();
    test_fast_linear();
    test_dropout_values();
    test_dropout_draws();
    test_optimizer(true);
    test_optimizer(false);
    test_loader_order();
    test_loader_left_early();
    test_steps();
    test_to_pytorch();
    test_parameter_count();
    return 0;
}
