/* test_cuda.c - every operation of the GPU's kernels against its definition on the CPU.

   Linked with the kernels as nvcc compiles them for a GPU, or as the emulator does: see
   tests/emulator/cuda_on_cpu.h. The reference is naive_kernels, the CPU's definitions.

     test_cuda all [TEST [KERNELS]]   all tests or one of them; QUICK=1 in the environment: fewer
     test_cuda tiny                   small shapes and no training, for race detectors
     test_cuda weights                trains, and prints the hashes of the weights */

#define CNN_NO_MAIN
#include "../../cnn.c"

#include <setjmp.h>
#include "../check.h"

static bool quick, tiny;

/* ---- An operation, done on a device with guarded arrays -------------------------------------- */

typedef struct Array {
    const char *name;
    void *at;           // on the host
    void *on_device;    // while an operation runs; NULL: no elements
    size_t count, size; // elements, and bytes of one
    bool output;
    size_t terms; // output: the number of terms of each sum; 0: no rounding, must be equal
    bool typed;   // on a device of the kernels' precision: 16 bits, or floats rounded to tf32
} Array;

// An operation and its parameters.
typedef struct Task {
    void (*run)(const Kernels *k, const struct Task *t);
    // the tolerance, where sums of absolute values do not give it
    void (*bound)(const struct Task *t, const Array *before, const Array *got, const Array *want,
                  Array *bound);
    const Layer *l;
    Fusion fused;
    size_t n, count; // images; elements, or classes
    bool accumulate, accumulate_residual, in_place, apart, training, no_din;
    size_t row;
    RandomKey key;                           // if training
    double rate, momentum, decay, smoothing; // of optimizers and the loss
    bool nesterov;
    const Batch *on_cpu, *on_gpu;
    // set by perform(), on the device
    const Array *arrays;
    size_t array_count;
    real *scratch;
    const StepInputs *step; // draw and rate
} Task;

enum { GUARD = 256, MOST_ARRAYS = 9 };

static Array new_array(const char *name, size_t count, size_t size) {
    Array a = {.name = name, .count = count, .size = size};
    a.at = must_alloc(count * size, "a test");
    memset(a.at, 0xFF, count * size); // NaN, read as real
    return a;
}

static Array output_array(const char *name, size_t count, size_t terms) {
    Array a = new_array(name, count, sizeof(real));
    a.output = true;
    a.terms = terms;
    return a;
}

static Array output_bytes(const char *name, size_t count) {
    Array a = new_array(name, count, 1);
    a.output = true;
    return a;
}

static bool integers; // small ones are drawn, of which all sums are exact

static Array input_array(const char *name, size_t count) {
    Array a = new_array(name, count, sizeof(real));
    for (size_t i = 0; i < count; i++)
        ((real *)a.at)[i] = integers ? (real)draw_size(0, 6) - 3 : draw_real();
    return a;
}

static Array typed(Array a) {
    a.typed = true;
    return a;
}

static Array input_bytes(const char *name, size_t count, size_t below) {
    Array a = new_array(name, count, 1);
    for (size_t i = 0; i < count; i++)
        ((uint8_t *)a.at)[i] = (uint8_t)draw_size(0, below - 1);
    return a;
}

// An output that, if `given`, holds numbers that the operation reads.
static Array changed_array(const char *name, size_t count, size_t terms, bool given) {
    Array a = given ? input_array(name, count) : output_array(name, count, terms);
    a.output = true;
    a.terms = terms;
    return a;
}

static Array twin(const Array *a) {
    Array b = *a;
    b.at = must_alloc(a->count * a->size, "a test");
    memcpy(b.at, a->at, a->count * a->size);
    return b;
}

// With AddressSanitizer, reads of a guard are reported as well; writes are detected anyway.
__attribute__((weak)) void __asan_poison_memory_region(const volatile void *at, size_t bytes);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void *at, size_t bytes);

static void watch_guards(char *base, size_t bytes, bool on) {
    void (*mark)(const volatile void *, size_t) =
        on ? __asan_poison_memory_region : __asan_unpoison_memory_region;
    if (!mark)
        return;
    mark(base, GUARD);
    mark(base + GUARD + bytes, GUARD);
}

// The guards of an output are not NaN: otherwise a NaN written there would go unnoticed.
static int guard_byte(const Array *a) {
    return a->output ? 0xC5 : 0xFF;
}

/* ---- Precisions */

// The largest relative error of rounding to the kernels' precision.
static double unit_roundoff(const Kernels *k) {
    return k->precision == BF16 ? 1. / 256 : k->precision == FP16 ? 1. / 2048 : 0;
}

/* To the nearest number of the kernels' precision, ties to even: 8 significant bits, or 11 of
   numbers of at least 2^-14. tf32: 11 bits, ties away from zero. */
static real rounded(const Kernels *k, real x) {
    int exponent, bits = k->precision == BF16 ? 8 : 11;
    if (k->precision == FP32 || !isfinite(x))
        return x;
    frexp((double)x, &exponent);
    exponent = k->precision == FP16 && exponent < -13 ? -13 : exponent;
    double scaled = ldexp((double)x, bits - exponent);
    double whole = k->precision == TF32 ? round(scaled) : nearbyint(scaled);
    double y = ldexp(whole, exponent - bits);
    return (real)(k->precision == FP16 && fabs(y) > 65504 ? copysign(INFINITY, y) : y);
}

// The bits of a rounded number.
static uint16_t encode(const Kernels *k, real x) {
    float wide = (float)x;
    uint32_t bits;
    memcpy(&bits, &wide, sizeof bits);
    if (k->precision == BF16)
        return (uint16_t)(bits >> 16);
    if (!isfinite(x))
        return (uint16_t)((bits >> 16 & 0x8000) | (isnan(x) ? 0x7fff : 0x7c00));
    int exponent = (int)(bits >> 23 & 255) - 127;
    double size = ldexp(fabs((double)x), exponent < -14 ? 24 : 10 - exponent);
    return (uint16_t)((bits >> 16 & 0x8000) +
                      (exponent < -14 ? 0 : (unsigned)(exponent + 14) << 10) + (unsigned)size);
}

static real decode(const Kernels *k, uint16_t half) {
    if (k->precision == BF16) {
        uint32_t bits = (uint32_t)half << 16;
        float wide;
        memcpy(&wide, &bits, sizeof wide);
        return (real)wide;
    }
    int exponent = half >> 10 & 31, mantissa = half & 1023;
    double size = exponent == 31 ? mantissa ? (double)NAN : (double)INFINITY
                  : exponent     ? ldexp(1024 + mantissa, exponent - 25)
                                 : ldexp(mantissa, -24);
    return (real)(half & 0x8000 ? -size : size);
}

// How an array is stored on the device: a copy, and its size in bytes.
static void *stored(const Kernels *k, const Array *a, size_t *bytes) {
    const bool half = a->typed && k->element_bytes == 2;
    *bytes = a->count * (half ? 2 : a->size);
    void *copy = must_alloc(*bytes, "a test");
    for (size_t i = 0; half && i < a->count; i++)
        ((uint16_t *)copy)[i] = encode(k, ((const real *)a->at)[i]);
    if (!half)
        memcpy(copy, a->at, *bytes);
    return copy;
}

static char *to_device(const Kernels *k, const Array *a) {
    size_t bytes;
    void *copy = stored(k, a, &bytes);
    char *base = k->device->alloc(bytes + 2 * GUARD),
         *host = must_alloc(bytes + 2 * GUARD, "a test");
    memset(host, guard_byte(a), bytes + 2 * GUARD);
    memcpy(host + GUARD, copy, bytes);
    free(copy);
    k->device->copy(base, host, bytes + 2 * GUARD);
    watch_guards(base, bytes, true);
    free(host);
    return base;
}

static void from_device(const Kernels *k, char *base, Array *a) {
    size_t bytes;
    void *before = stored(k, a, &bytes);
    uint8_t *host = must_alloc(bytes + 2 * GUARD, "a test");
    watch_guards(base, bytes, false);
    k->device->copy(host, base, bytes + 2 * GUARD);
    for (size_t i = 0; i < bytes + 2 * GUARD; i++)
        if (i - GUARD >= bytes && host[i] != guard_byte(a))
            fail("%s: wrote at byte %td of %zu", a->name, (ptrdiff_t)i - GUARD, bytes);
    if (!a->output && memcmp(host + GUARD, before, bytes) != 0)
        fail("%s: an input was changed", a->name);
    if (a->output && bytes == a->count * a->size)
        memcpy(a->at, host + GUARD, bytes);
    for (size_t i = 0; a->output && bytes < a->count * a->size && i < a->count; i++)
        ((real *)a->at)[i] = decode(k, ((uint16_t *)(host + GUARD))[i]);
    k->device->release(base);
    free(before);
    free(host);
}

/* Runs an operation on arrays on the device, between guards; scratch has the size that the
   kernels asked for. Returns whether scratch was used. */
static bool perform(const Kernels *k, const Task *t, Array *a, size_t count) {
    Array scratch = output_array("scratch", t->l ? k->scratch_size(t->l, &t->fused, t->n) : 0, 1);
    char *base[MOST_ARRAYS], *scratch_base = to_device(k, &scratch);
    StepInputs *step = k->device->alloc(sizeof *step);
    Task on_device = *t;
    on_device.arrays = a;
    on_device.array_count = count;
    on_device.scratch = (real *)(scratch_base + GUARD);
    on_device.step = step;
    k->device->set_step(step, (StepInputs){t->key, t->rate});
    bool used = false;
    for (size_t i = 0; i < count; i++) {
        base[i] = to_device(k, &a[i]);
        a[i].on_device = a[i].count ? base[i] + GUARD : NULL;
    }
    t->run(k, &on_device);
    k->device->synchronize();
    k->device->release(step);
    for (size_t i = 0; i < count; i++)
        from_device(k, base[i], &a[i]);
    from_device(k, scratch_base, &scratch);
    for (size_t i = 0; i < scratch.count * sizeof(real); i++)
        used = used || ((uint8_t *)scratch.at)[i] != 0xFF;
    free(scratch.at);
    return used;
}

// Equal bits, or both NaN.
static void check_equal(const Array *got, const Array *want) {
    const uint8_t *a = got->at, *b = want->at;
    for (size_t i = 0; i < got->count; i++) {
        bool same = memcmp(a + i * got->size, b + i * got->size, got->size) == 0;
        bool real_number = got->size == sizeof(real);
        double x = real_number ? (double)((const real *)got->at)[i] : a[i];
        double y = real_number ? (double)((const real *)want->at)[i] : b[i];
        if (!same && !(isnan(x) && isnan(y)))
            fail("%s[%zu of %zu] is %.9g, expected exactly %.9g", got->name, i, got->count, x, y);
    }
}

// Sums of absolute values become bounds: in either version, one rounding for each term.
static void bound_by_sums(const Task *t, Array *a, size_t count) {
    for (size_t i = 0; i < count; i++)
        for (size_t j = 0; a[i].size == sizeof(real) && j < a[i].count; j++)
            ((real *)a[i].at)[j] = (real)fabs((double)((real *)a[i].at)[j]);
    perform(&naive_kernels, t, a, count);
    for (size_t i = 0; i < count; i++)
        for (size_t j = 0; a[i].terms && j < a[i].count; j++) {
            real *sum = (real *)a[i].at + j;
            *sum = (real)(2 * (double)a[i].terms * epsilon * fabs((double)*sum) + 1e-30);
        }
}

static void round_array(const Kernels *k, const Array *a) {
    for (size_t i = 0; a->typed && i < a->count; i++)
        ((real *)a->at)[i] = rounded(k, ((real *)a->at)[i]);
}

// The exact result is rounded; the bound of another one includes the rounding, or the overflow that
// both have in fp16.
static void round_output(const Kernels *k, const Array *got, const Array *want,
                         const Array *bound) {
    for (size_t i = 0; want->typed && i < want->count; i++) {
        real *x = (real *)got->at + i, y = rounded(k, ((real *)want->at)[i]);
        if (isinf(y) && *x == y)
            *x = ((real *)want->at)[i] = 0;
    }
    if (want->terms == 0)
        round_array(k, want);
    for (size_t i = 0; want->typed && want->terms && i < want->count; i++)
        ((real *)bound->at)[i] +=
            (real)(unit_roundoff(k) * fabs((double)((real *)want->at)[i]) + ldexp(1, -25));
}

// Runs a task on `b` and on the CPU and compares all outputs. Frees a; returns what perform() does.
static bool compare(const Kernels *k, Task t, Array *a, size_t count) {
    Array got[MOST_ARRAYS], want[MOST_ARRAYS], bound[MOST_ARRAYS];
    bool rounds = false;
    for (size_t i = 0; i < count; i++) {
        round_array(k, &a[i]);
        got[i] = twin(&a[i]);
        want[i] = twin(&a[i]);
        bound[i] = twin(&a[i]);
        rounds = rounds || a[i].terms;
    }
    bool used = perform(k, &t, got, count);
    perform(&naive_kernels, &t, want, count);
    if (t.bound)
        t.bound(&t, a, got, want, bound);
    else if (rounds)
        bound_by_sums(&t, bound, count);
    for (size_t i = 0; i < count; i++) {
        if (unit_roundoff(k) > 0 && a[i].output)
            round_output(k, &got[i], &want[i], &bound[i]);
        if (a[i].output && a[i].terms)
            check_tensor(a[i].name, got[i].at, want[i].at, bound[i].at, a[i].count);
        else if (a[i].output)
            check_equal(&got[i], &want[i]);
        free(a[i].at);
        free(got[i].at);
        free(want[i].at);
        free(bound[i].at);
    }
    return used;
}
#define COMPARE(b, ...) compare(b, __VA_ARGS__, arrays, sizeof arrays / sizeof *arrays)

static void describe(const Layer *l, size_t n, const char *more) {
    char kind[64];
    describe_layer(l, kind, sizeof kind);
    snprintf(context, sizeof context, "%s, %zu images, %zu x %zu x %zu to %zu channels%s%s", kind,
             n, l->in.h, l->in.w, l->in.c, l->out.c, l->bias_count ? "" : ", no bias", more);
}

/* ---- Convolutions and linear layers ---------------------------------------------------------- */

// The part of Work that is the same for all operations; the arrays differ.
static uint8_t tiles[3]; // of a product's passes, as --autotune chooses them; 0: the default

static Work work_of_task(const Task *t) {
    return (Work){.l = t->l,
                  .fused = t->fused,
                  .prepared = tiles,
                  .autotune = *tiles,
                  .row = t->row,
                  .n = t->n,
                  .scratch = t->scratch,
                  .key = t->training ? &t->step->key : NULL,
                  .accumulate = t->accumulate,
                  .accumulate_residual = t->accumulate_residual};
}

static bool fuses(const Kernels *k, const Layer *to, LayerKind kind) {
    const Layer l = {.kind = kind};
    const Fusion none = {0};
    return k->fuse && k->fuse(to, &none, &l) == FUSED_INTO_EARLIER;
}

// A row with a sum and a ReLU, which run after it, in place, if its kernels do not compute them.
static void forward_fused(const Kernels *k, Work w) {
    const Layer relu = {.kind = RELU, .in = w.l->out, .out = w.l->out};
    const bool adds = w.fused.add && !fuses(k, w.l, ADD);
    const bool masks = w.fused.relu && !fuses(k, w.l, RELU);
    Work after = {.l = &relu, .n = w.n, .in = w.out, .residual = w.residual, .out = w.out};
    if (adds)
        w.residual = NULL;
    if (masks)
        w.fused.relu = false;
    k->layers[w.l->kind].forward(w);
    if (adds)
        k->layers[ADD].forward(after);
    after.residual = NULL;
    if (masks)
        k->layers[RELU].forward(after);
}

// Where Work has an array of this name
static const struct {
    const char *name;
    size_t field;
} fields[] = {
    {"in", offsetof(Work, in)},
    {"residual", offsetof(Work, residual)},
    {"weight", offsetof(Work, weight)},
    {"bias", offsetof(Work, bias)},
    {"out", offsetof(Work, out)},
    {"logp", offsetof(Work, out)},
    {"dout", offsetof(Work, dout)},
    {"din", offsetof(Work, din)},
    {"dresidual", offsetof(Work, dresidual)},
    {"dweight", offsetof(Work, dweight)},
    {"dbias", offsetof(Work, dbias)},
    {"stats", offsetof(Work, stats)},
    {"argmax", offsetof(Work, saved)},
    {"mask", offsetof(Work, saved)},
};

static Work work_of_arrays(const Task *t) {
    Work w = work_of_task(t);
    for (const Array *a = t->arrays; a < t->arrays + t->array_count; a++) {
        size_t i = 0;
        while (i < LENGTH(fields) && strcmp(fields[i].name, a->name) != 0)
            i++;
        if (i == LENGTH(fields))
            die(1, "test_cuda: Work has no array %s", a->name);
        memcpy((char *)&w + fields[i].field, &a->on_device, sizeof a->on_device);
    }
    return w;
}

static void run_forward(const Kernels *k, const Task *t) {
    Work w = work_of_arrays(t);
    if (t->in_place)
        w.in = w.out;
    forward_fused(k, w);
}

static void run_backward(const Kernels *k, const Task *t) {
    Work w = work_of_arrays(t);
    if (t->in_place)
        w.dout = w.din;
    k->layers[t->l->kind].backward(w);
}

typedef struct Splits {
    size_t forward[2], backward[2]; // passes without, and with, split sums
} Splits;

static void compare_layer(const Kernels *k, Layer l, bool relu, size_t n, bool accumulate,
                          bool no_din, Splits *splits) {
    const Fusion fused = {.relu = relu};
    size_t taps = l.kernel_size * l.kernel_size, pixels = n * l.out.h * l.out.w;
    size_t inputs = n * shape_size(l.in), outputs = n * shape_size(l.out);
    Task t = {.run = run_forward, .l = &l, .fused = fused, .n = n};
    memset(tiles, draw_bits() % 4, sizeof tiles);
    describe(&l, n, relu ? ", fused ReLU" : "");
    for (size_t fewer = 1; fewer < n; fewer++) // the last batch may be smaller
        if (k->scratch_size(&l, &fused, fewer) > k->scratch_size(&l, &fused, n))
            fail("%zu images need more scratch than %zu", fewer, n);
    {
        Array arrays[] = {typed(output_array("out", outputs, integers ? 0 : taps * l.in.c + 1)),
                          typed(input_array("in", inputs)),
                          typed(input_array("weight", l.weight_count)),
                          input_array("bias", l.bias_count)};
        splits->forward[COMPARE(k, t)]++;
    }
    t = (Task){.run = run_backward, .l = &l, .n = n, .accumulate = accumulate, .no_din = no_din};
    describe(&l, n, no_din ? ", no din" : accumulate ? ", accumulate" : "");
    Array arrays[] = {typed(changed_array("din", no_din ? 0 : inputs,
                                          integers ? 0 : taps * l.out.c + 1, accumulate)),
                      output_array("dweight", l.weight_count, integers ? 0 : pixels),
                      output_array("dbias", l.bias_count, integers ? 0 : pixels),
                      typed(input_array("dout", outputs)),
                      typed(input_array("in", inputs)),
                      typed(input_array("weight", l.weight_count))};
    bool used = COMPARE(k, t);
    if (!l.bias_count) // whose gradient uses scratch, too
        splits->backward[used]++;
    integers = false;
    memset(tiles, 0, sizeof tiles);
}

static const Settings plain = {.width = 6};
static Net net; // to build layers in

static const Layer *first_layer(Shape in) {
    net = (Net){
        .model = "test", .settings = &plain, .kernels = &naive_kernels, .device = &cpu_device};
    add_layer(&net, (Layer){.kind = INPUT, .in = in, .out = in});
    return &net.layers[1];
}

// A number of channels; every other one is a multiple of 4, which are loaded 4 at a time.
static size_t draw_channels(size_t most) {
    const size_t channels = draw_size(1, most);
    return draw_bits() % 2 ? channels : (channels + 3) / 4 * 4;
}

// The same results of numbers as they were drawn and of rounded ones. Frees the arrays.
static void expect_rounding(const Kernels *k, const Task *t, Array *rounded, size_t count) {
    Array a[MOST_ARRAYS];
    for (size_t i = 0; i < count; i++) {
        a[i] = twin(&rounded[i]);
        round_array(k, &rounded[i]);
    }
    perform(k, t, a, count);
    perform(k, t, rounded, count);
    for (size_t i = 0; i < count; i++) {
        if (a[i].output)
            check_equal(&a[i], &rounded[i]);
        free(a[i].at);
        free(rounded[i].at);
    }
}

// tf32: the tensor cores get rounded numbers; those that are rounded before give the same bits.
static void test_rounding(const Kernels *k) {
    if (k->precision != TF32 || tiny)
        return;
    for (uint8_t tile = 1; tile < 4; tile++) {
        const size_t n = 2;
        first_layer((Shape){8, 8, 32});
        conv2d_bias(&net, 0, 128, 3, 1, 1, false);
        const Layer *l = &net.layers[1];
        snprintf(context, sizeof context, "tile %d", tile);
        memset(tiles, tile, sizeof tiles);
        Task t = {.run = run_forward, .l = l, .n = n};
        Array in = input_array("in", n * shape_size(l->in));
        Array weight = input_array("weight", l->weight_count);
        Array forward[] = {output_array("out", n * shape_size(l->out), 1), typed(twin(&in)),
                           typed(twin(&weight))};
        expect_rounding(k, &t, forward, LENGTH(forward));
        t.run = run_backward;
        Array backward[] = {
            output_array("din", in.count, 1), output_array("dweight", l->weight_count, 1),
            typed(input_array("dout", n * shape_size(l->out))), typed(in), typed(weight)};
        expect_rounding(k, &t, backward, LENGTH(backward));
    }
    memset(tiles, 0, sizeof tiles);
    *context = 0;
    verdict("rounding to tf32, %s kernels", NAME_OF(k));
}

// Mostly small, sometimes deep: odd sizes cover every edge of the tiles.
static Layer draw_conv(size_t *n) {
    size_t kernel = draw_size(1, tiny ? 3 : 7), stride = draw_size(1, 3);
    size_t padding = draw_size(0, kernel - 1), least = kernel - min_size(kernel - 1, 2 * padding);
    size_t side = tiny ? 5 : 12, depth = tiny ? 8 : draw_bits() % 4 ? 40 : 150;
    size_t channels = tiny ? 8 : draw_bits() % 3 ? 70 : 140;
    Shape in = {draw_size(least, least + side), draw_size(least, least + side),
                draw_channels(depth)};
    const Layer *l = first_layer(in);
    conv2d_bias(&net, 0, draw_channels(channels), kernel, stride, padding, draw_bits() % 2);
    *n = draw_size(1, tiny ? 2 : 9);
    return *l;
}

static void test_conv(const Kernels *k) {
    Splits splits = {{0}, {0}};
    for (int shape = 0; shape < (tiny ? 1 : quick ? 25 : 100);) {
        size_t n;
        Layer l = draw_conv(&n);
        // the definitions are slow: shapes that would take too long are drawn again
        if (forward_flops(&l) * (double)n > 2 * 4e6)
            continue;
        integers = shape % 3 == 0;
        compare_layer(k, l, draw_bits() % 2, n, shape % 2, shape % 5 == 0, &splits);
        shape++;
    }
    // the shapes of residual networks, and one with more terms than outputs
    static const struct {
        Shape in;
        size_t channels, kernel, stride, padding, n;
    } shapes[] = {
        {{3, 3, 29}, 3, 3, 1, 1, 2},                                    // the sums are split
        {{8, 8, 16}, 32, 1, 2, 0, 5},                                   // a shortcut
        {{7, 9, 70}, 17, 1, 2, 0, 5},                                   // ... that drops a row
        {{13, 12, 3}, 24, 7, 2, 3, 5},                                  // a stem
        {{17, 16, 128}, 64, 1, 1, 0, 8}, {{6, 6, 64}, 128, 3, 1, 1, 4}, // whole tiles, except in M
        {{9, 8, 132}, 196, 3, 2, 1, 5},  {{8, 7, 20}, 72, 4, 3, 2, 9}, // phases in all of the tiles
    };
    for (size_t i = 0; i < (tiny ? 1 : sizeof shapes / sizeof *shapes); i++)
        for (size_t variant = 0; variant < (tiny ? 1 : quick ? 2 : 4); variant++) {
            const Layer *l = first_layer(shapes[i].in);
            conv2d_bias(&net, 0, shapes[i].channels, shapes[i].kernel, shapes[i].stride,
                        shapes[i].padding, variant & 1);
            integers = variant & 1;
            compare_layer(k, *l, false, shapes[i].n, variant & 2, false, &splits);
        }
    *context = 0;
    bool naive = k->choice == NAIVE;
    for (size_t split = 0; split < 2 && !tiny; split++)
        if (!splits.forward[split] != (split && naive) ||
            !splits.backward[split] != (split && naive))
            fail("%zu and %zu passes with sums that are%s split", splits.forward[split],
                 splits.backward[split], split ? "" : " not");
    verdict("conv2d, %s kernels, %s", NAME_OF(k), PRECISION_OF(k));
}

// a[0] is [image][y][x][channel] for the CPU, a[1] the same as [image][channel][y][x] for the GPU.
static void run_nchw(const Kernels *k, const Task *t) {
    Work w = work_of_arrays(t);
    w.in = t->arrays[k->device->is_gpu].on_device;
    w.unflattened = t->l->in;
    if (k->device->is_gpu)
        w.transposed = k->device->alloc(k->transposed_size(t->l, t->n) * k->element_bytes);
    k->layers[CONV2D].forward(w);
    k->device->synchronize();
    if (w.transposed)
        k->device->release(w.transposed);
}

// --layout nchw: the window covers the image, so that the output is the same in both layouts.
static void compare_nchw(const Kernels *k, size_t side, size_t channels, size_t n) {
    const Layer *l = first_layer((Shape){side, side, channels});
    conv2d_bias(&net, 0, 6, side, 1, 0, true);
    Array in = typed(input_array("in", n * shape_size(l->in))), nchw = twin(&in);
    for (size_t i = 0; i < in.count; i++) {
        size_t c = i % channels, pixel = i / channels, at = pixel % (side * side);
        ((real *)nchw.at)[(pixel / (side * side) * channels + c) * side * side + at] =
            ((real *)in.at)[i];
    }
    Array arrays[] = {in, nchw, typed(output_array("out", n * 6, side * side * channels + 1)),
                      typed(input_array("weight", l->weight_count)), input_array("bias", 6)};
    describe(l, n, ", nchw");
    COMPARE(k, (Task){.run = run_nchw, .l = l, .n = n});
}

// More images than a grid has blocks in y or z, of which an emulated GPU has few.
static void compare_many_images(const Kernels *k) {
    DeviceInfo info = {0};
    k->device->describe(&info);
    if (info.emulated)
        setenv("CUEMU_GRID", "100", 1);
    compare_nchw(k, 2, 3, info.emulated ? 101 : 65536);
    unsetenv("CUEMU_GRID");
}

static void test_nchw(const Kernels *k) {
    for (size_t side = 2; side <= (tiny ? 3 : 7); side++)
        compare_nchw(k, side, draw_size(1, tiny ? 5 : 70), draw_size(1, 3));
    if (!tiny)
        compare_many_images(k);
    verdict("nchw, %s kernels, %s", NAME_OF(k), PRECISION_OF(k));
}

static void test_linear(const Kernels *k) {
    Splits splits = {{0}, {0}};
    for (size_t i = 0; i < (tiny ? 1 : quick ? 8 : 30); i++) {
        Shape in = {draw_size(1, 3), draw_size(1, 3), draw_size(1, tiny ? 9 : i % 4 ? 100 : 1000)};
        const Layer *l = first_layer(in);
        linear(&net, 0, draw_size(1, tiny ? 9 : 140));
        const size_t n = draw_size(1, tiny ? 3 : 70);
        compare_layer(k, *l, draw_bits() % 2, n, i % 2, i % 5 == 3, &splits);
    }
    verdict("linear, %s kernels, %s", NAME_OF(k), PRECISION_OF(k));
}

/* ---- Element by element ---------------------------------------------------------------------- */

static const size_t counts[] = {1, 31, 256, 257, 511, 1000, 4099};
enum { COUNTS = sizeof counts / sizeof *counts };

// Some special numbers among others.
static Array special_array(const char *name, size_t count) {
    static const real special[] = {0, (real)-0., (real)NAN, (real)INFINITY, (real)-INFINITY};
    Array a = input_array(name, count);
    for (size_t i = 0; i < count; i += draw_size(1, 9))
        ((real *)a.at)[i] = special[draw_bits() % 5];
    return a;
}

// A layer without weights, of `count` elements.
static Layer flat_layer(LayerKind kind, size_t count) {
    return (Layer){.kind = kind, .in = {1, 1, count}, .out = {1, 1, count}};
}

static void test_relu_and_add(const Kernels *k) {
    for (size_t i = tiny ? 3 * 4 : 0; i < (tiny ? 3 * 4 + 1 : COUNTS * 4); i++) {
        size_t count = counts[i / 4];
        bool first = i & 1, second = i & 2;
        Layer l = flat_layer(RELU, count), sum = flat_layer(ADD, count);
        snprintf(context, sizeof context, "%zu numbers, variant %zu", count, i % 4);
        {
            Array arrays[] = {first ? typed(special_array("out", count))
                                    : typed(output_array("out", count, 0)),
                              typed(special_array("in", count))};
            arrays[0].output = true;
            COMPARE(k, (Task){.run = run_forward, .l = &l, .n = 1, .in_place = first});
        }
        {
            Array arrays[] = {typed(changed_array("din", count, 0, first || second)),
                              typed(input_array("dout", count)),
                              typed(special_array("out", count))};
            COMPARE(k, (Task){.run = run_backward,
                              .l = &l,
                              .n = 1,
                              .in_place = first && !second,
                              .accumulate = second});
        }
        {
            Array arrays[] = {
                first ? typed(special_array("out", count)) : typed(output_array("out", count, 0)),
                typed(special_array("in", count)), typed(special_array("residual", count))};
            arrays[0].output = true;
            COMPARE(k, (Task){.run = run_forward, .l = &sum, .n = 1, .in_place = first});
        }
        Array arrays[] = {typed(changed_array("din", count, 0, first)),
                          typed(input_array("dout", count)),
                          typed(changed_array("dresidual", i % 3 ? count : 0, 0, second))};
        COMPARE(k, (Task){.run = run_backward,
                          .l = &sum,
                          .n = 1,
                          .accumulate = first,
                          .accumulate_residual = second});
    }
    verdict("relu and add, %s kernels, %s", NAME_OF(k), PRECISION_OF(k));
}

static void test_dropout(const Kernels *k) {
    static const real rates[] = {0, (real).1, (real).25, (real).5, (real).9};
    static const Shape shapes[] = {{1, 1, 1}, {1, 1, 7},   {1, 1, 8},
                                   {3, 5, 3}, {1, 1, 129}, {5, 7, 9}};
    for (size_t i = 0; i < (tiny ? 2 : 60); i++) {
        Shape s = shapes[i % 6];
        Layer l = {.kind = DROPOUT, .in = s, .out = s, .p = rates[i % 5]};
        size_t n = draw_size(1, 9), count = n * shape_size(s);
        Task t = {.run = run_forward, .l = &l, .n = n, .in_place = i % 3 == 0};
        t.row = draw_bits() % 20;
        t.training = i % 7 != 6;
        t.key = (RandomKey){(uint64_t)draw_bits() << 32 | draw_bits(), draw_bits() % 100,
                            i % 2 ? draw_bits() % 60000 : UINT32_MAX - 3,
                            draw_bits() % 4}; // may wrap around
        describe(&l, n, t.training ? "" : ", evaluation");
        {
            Array arrays[] = {typed(changed_array("out", count, 0, t.in_place)),
                              output_bytes("mask", count), typed(input_array("in", count))};
            COMPARE(k, t);
        }
        t.run = run_backward;
        t.accumulate = i % 3 == 1;
        Array arrays[] = {typed(changed_array("din", count, 2, t.accumulate || t.in_place)),
                          typed(input_array("dout", count)), input_bytes("mask", count, 2)};
        COMPARE(k, t);
    }
    verdict("dropout, %s kernels, %s", NAME_OF(k), PRECISION_OF(k));
}

/* ---- Pooling --------------------------------------------------------------------------------- */

static void compare_maxpool(const Kernels *k, const Layer *l, size_t n, bool accumulate) {
    size_t inputs = n * shape_size(l->in), outputs = n * shape_size(l->out);
    Array in = typed(input_array("in", inputs)), argmax = input_bytes("argmax", outputs, 2);
    real *numbers = in.at;
    for (size_t i = 0; i < inputs; i++) // a few numbers, so that there are ties; and some NaN
        numbers[i] = draw_bits() % 40 ? SQRT((real)draw_size(0, 4)) - 1 : (real)NAN;
    Array ignored = typed(output_array("out", outputs, 0));
    naive_kernels.layers[MAXPOOL2D].forward(
        (Work){.l = l, .n = n, .out = ignored.at, .in = in.at, .saved = argmax.at});
    free(ignored.at);
    describe(l, n, accumulate ? ", accumulate" : "");
    {
        Array arrays[] = {typed(output_array("out", outputs, 0)), in,
                          output_bytes("argmax", outputs)};
        COMPARE(k, (Task){.run = run_forward, .l = l, .n = n});
    }
    Array arrays[] = {
        typed(changed_array("din", inputs, l->kernel_size * l->kernel_size + 1, accumulate)),
        typed(input_array("dout", outputs)), argmax};
    COMPARE(k, (Task){.run = run_backward, .l = l, .n = n, .accumulate = accumulate});
}

static void test_maxpool(const Kernels *k) {
    for (size_t i = 0; i < (tiny ? 1 : quick ? 20 : 60); i++) {
        size_t kernel = i ? draw_size(1, 4) : tiny ? 3 : 11, padding = draw_size(0, kernel - 1);
        size_t least = kernel - min_size(kernel - 1, 2 * padding);
        const Layer *l = first_layer(
            (Shape){draw_size(least, least + 8), draw_size(least, least + 8), draw_size(1, 9)});
        maxpool2d(&net, 0, kernel, draw_size(1, 3), padding);
        compare_maxpool(k, l, draw_size(1, 5), i % 2);
    }
    verdict("maxpool2d, %s kernels, %s", NAME_OF(k), PRECISION_OF(k));
}

static void test_avgpool(const Kernels *k) {
    for (size_t i = 0; i < (tiny ? 1 : 12); i++) {
        Shape s = {draw_size(1, 9), draw_size(1, 9), draw_size(1, 70)};
        Layer l = {.kind = GLOBAL_AVGPOOL2D, .in = s, .out = {1, 1, s.c}};
        size_t n = draw_size(1, 9);
        describe(&l, n, "");
        {
            Array arrays[] = {typed(output_array("out", n * s.c, s.h * s.w + 1)),
                              typed(input_array("in", n * shape_size(s)))};
            COMPARE(k, (Task){.run = run_forward, .l = &l, .n = n});
        }
        Array arrays[] = {typed(changed_array("din", n * shape_size(s), 2, i % 2)),
                          typed(input_array("dout", n * s.c))};
        COMPARE(k, (Task){.run = run_backward, .l = &l, .n = n, .accumulate = i % 2});
    }
    verdict("avgpool2d, %s kernels, %s", NAME_OF(k), PRECISION_OF(k));
}

/* ---- BatchNorm ------------------------------------------------------------------------------- */

/* Bounds on the errors of statistics. A sum goes over the pixels of a thread, the 8 threads of a
   block, then the slices, of at least 64 pixels each; each of these steps rounds the mean. An error
   e of the mean causes one of 2 e times the distance, plus e^2, in a squared distance. */
typedef struct Errors {
    double mean, variance, inverse; // inverse: of 1 / sqrt(variance + eps)
} Errors;

static Errors norm_errors(double mean, double inverse, double farthest, size_t pixels) {
    double slices = fmin(64, ceil((double)pixels / 64));
    double steps = (double)pixels / slices / 8 + 8 + slices, e = epsilon * steps;
    double full = 1 / (inverse * inverse), variance = fmax(0, full - bn_eps);
    Errors errors = {.mean = e * (fabs(mean) + farthest)};
    errors.variance = 4 * e * variance + 4 * errors.mean * sqrt(variance) +
                      4 * errors.mean * errors.mean + 4 * epsilon * full;
    errors.inverse = inverse * (errors.variance / full + 2 * epsilon);
    return errors;
}

static double farthest_from(double mean, const real *in, size_t c, size_t channels, size_t pixels) {
    double farthest = 0;
    for (size_t i = c; i < pixels * channels; i += channels)
        farthest = fmax(farthest, fabs((double)in[i] - mean));
    return farthest;
}

// Of the running and the batch's statistics of channel c.
static void stats_bound(real *bound, const real *running, Errors e, double mean, double inverse,
                        size_t c, size_t channels) {
    double variance = 2 / (inverse * inverse); // unbiased: at most twice as large
    bound[c] = (real)(.1 * e.mean + 4 * epsilon * (fabs((double)running[c]) + fabs(mean)));
    bound[channels + c] =
        (real)(.2 * e.variance + 4 * epsilon * ((double)running[channels + c] + variance));
    bound[2 * channels + c] = (real)e.mean;
    bound[3 * channels + c] = (real)e.inverse;
}

static void norm_forward_bound(const Task *t, const Array *before, const Array *got,
                               const Array *want, Array *bound) {
    (void)got;
    size_t channels = t->l->in.c, pixels = t->n * t->l->in.h * t->l->in.w;
    const real *in = before[2].at, *weight = before[3].at, *bias = before[4].at;
    const real *residual = before[5].at, *stats = want[1].at, *running = before[1].at;
    real *out = bound[0].at;
    for (size_t c = 0; c < channels; c++) {
        double mean = (double)stats[(t->training ? 2 : 0) * channels + c];
        double inverse = t->training ? (double)stats[3 * channels + c]
                                     : 1 / sqrt((double)stats[channels + c] + bn_eps);
        double farthest = farthest_from(mean, in, c, channels, pixels);
        Errors e = {.inverse = 4 * epsilon * inverse}; // evaluation: a square root and a division
        if (t->training) {
            e = norm_errors(mean, inverse, farthest, pixels);
            stats_bound(bound[1].at, running, e, mean, inverse, c, channels);
        }
        for (size_t i = c; i < pixels * channels; i += channels) {
            double x = fabs((double)in[i]), d = fabs((double)in[i] - mean);
            double far = e.mean + 4 * epsilon * (x + fabs(mean));
            out[i] = (real)(fabs((double)weight[c]) *
                                (inverse * far + d * (e.inverse + 4 * epsilon * inverse)) +
                            4 * epsilon *
                                (fabs((double)bias[c]) +
                                 (before[5].count ? fabs((double)residual[i]) : 0)));
        }
    }
}

static void norm_backward_bound(const Task *t, const Array *before, const Array *got,
                                const Array *want, Array *bound) {
    (void)got;
    size_t channels = t->l->in.c, pixels = t->n * t->l->in.h * t->l->in.w;
    const real *dout = before[3].at, *in = before[4].at, *stats = before[5].at;
    const real *weight = before[6].at, *dweight = want[1].at, *dbias = want[2].at;
    real *din_bound = bound[0].at, *dweight_bound = bound[1].at, *dbias_bound = bound[2].at;
    const double m = (double)pixels;
    for (size_t c = 0; c < channels; c++) {
        double mean = (double)stats[2 * channels + c], inverse = (double)stats[3 * channels + c];
        double sum = 0, products = 0;
        for (size_t i = c; i < pixels * channels; i += channels) {
            sum += fabs((double)dout[i]);
            products += fabs((double)dout[i] * ((double)in[i] - mean) * inverse);
        }
        dbias_bound[c] = (real)(2 * m * epsilon * sum);
        dweight_bound[c] = (real)(2 * (m + 3) * epsilon * products);
        for (size_t i = c; i < (t->no_din ? 0 : pixels * channels); i += channels) {
            double x = fabs(((double)in[i] - mean) * inverse);
            double parts = fabs((double)dout[i]) + fabs((double)dbias[c]) / m +
                           x * fabs((double)dweight[c]) / m;
            double off = ((double)dbias_bound[c] + x * (double)dweight_bound[c]) / m;
            double old = t->accumulate ? fabs((double)((real *)before[0].at)[i]) : 0;
            din_bound[i] = (real)(fabs((double)weight[c]) * inverse * (8 * epsilon * parts + off) +
                                  2 * epsilon * old);
        }
    }
}

static const struct {
    Shape s;
    size_t n;
} norms[] = {{{5, 7, 33}, 2}, {{1, 1, 5}, 1},   {{1, 1, 64}, 7}, {{5, 7, 6}, 9},   {{96, 97, 4}, 1},
             {{8, 8, 70}, 1}, {{13, 5, 32}, 1}, {{9, 9, 3}, 55}, {{17, 17, 7}, 16}};

static Layer norm_layer(size_t i) {
    size_t c = norms[i].s.c;
    return (Layer){.kind = BATCHNORM2D,
                   .in = norms[i].s,
                   .out = norms[i].s,
                   .weight_count = c,
                   .bias_count = c};
}

/* Channels whose mean is large compared with their spread, where the mean of the squares minus the
   square of the mean would lose all digits, and channels with outliers. */
static void draw_norm_input(Array *in, size_t channels) {
    static const double means[] = {0, 1000, -300, 5, -1e4}, spreads[] = {1, 1, .1, 1e-3, 30};
    real *x = in->at;
    for (size_t i = 0; i < in->count; i++) {
        size_t kind = i % channels % 5;
        x[i] = (real)(means[kind] + spreads[kind] * (double)x[i]);
        if (i % channels % 7 == 6 && i / channels % 64 == 0)
            x[i] = 1000;
    }
}

static void test_norm_forward(const Kernels *k, bool training) {
    for (size_t i = 0; i < (tiny ? 1 : sizeof norms / sizeof *norms); i++) {
        Layer l = norm_layer(i);
        size_t c = l.in.c, n = norms[i].n, count = n * shape_size(l.in);
        Array arrays[] = {typed(output_array("out", count, 1)),
                          changed_array("stats", 4 * c, training, !training),
                          typed(input_array("in", count)),
                          input_array("weight", c),
                          input_array("bias", c),
                          typed(input_array("residual", i % 3 ? count : 0))};
        real *stats = arrays[1].at;
        draw_norm_input(&arrays[2], c);
        for (size_t k = 0; k < c; k++) { // the running statistics
            stats[k] = draw_real() * 100;
            stats[c + k] = draw_real() + 1;
        }
        describe(&l, n, training ? ", training" : ", evaluation");
        COMPARE(k, (Task){.run = run_forward,
                          .bound = norm_forward_bound,
                          .l = &l,
                          .fused = {.add = i % 3 > 0, .relu = i % 2},
                          .n = n,
                          .training = training});
    }
}

static void test_norm_backward(const Kernels *k) {
    for (size_t i = 0; i < (tiny ? 1 : 2 * sizeof norms / sizeof *norms); i++) {
        Layer l = norm_layer(i / 2);
        size_t c = l.in.c, n = norms[i / 2].n, count = n * shape_size(l.in);
        bool no_din = i == 5, accumulate = i % 2;
        Array arrays[] = {typed(changed_array("din", no_din ? 0 : count, 1, accumulate)),
                          output_array("dweight", c, 1),
                          output_array("dbias", c, 1),
                          typed(input_array("dout", count)),
                          typed(input_array("in", count)),
                          input_array("stats", 4 * c),
                          input_array("weight", c)};
        for (size_t k = 0; k < c; k++) // 1 / deviation is positive
            ((real *)arrays[5].at)[3 * c + k] += 2;
        describe(&l, n, no_din ? ", no din" : accumulate ? ", accumulate" : "");
        COMPARE(k, (Task){.run = run_backward,
                          .bound = norm_backward_bound,
                          .l = &l,
                          .n = n,
                          .accumulate = accumulate,
                          .no_din = no_din});
    }
}

static void test_norm(const Kernels *k) {
    test_norm_forward(k, true);
    test_norm_forward(k, false);
    test_norm_backward(k);
    verdict("batchnorm2d, %s kernels, %s", NAME_OF(k), PRECISION_OF(k));
}

// A forward, then the backward of a ReLU, of a sum and of the row before them, by the kernels of
// that row, or one after another.
static void run_fused_backward(const Kernels *k, const Task *t) {
    const Layer flat = {.kind = RELU, .in = t->l->out, .out = t->l->out};
    Work w = work_of_arrays(t);
    w.bias = t->l->kind == BATCHNORM2D ? w.weight : NULL;
    w.residual = t->fused.add ? w.in : NULL;
    k->layers[t->l->kind].forward(w);
    Work before = w;
    before.l = &flat;
    before.din = w.dout; // in place
    before.accumulate = false;
    if (t->apart) {
        k->layers[RELU].backward(before);
        k->layers[ADD].backward(before);
        w.fused = (Fusion){0};
        w.residual = w.dresidual = NULL;
    }
    k->layers[t->l->kind].backward(w);
}

// Fused kernels give the bits of separate ones, except of dout, which they may overwrite.
static void compare_fused(const Kernels *k, const Layer *l, size_t n, bool adds, bool accumulate) {
    enum { ARRAYS = 9, DOUT = 4, WEIGHT = 7 };
    const size_t inputs = n * shape_size(l->in), outputs = n * shape_size(l->out);
    const size_t stats = l->kind == BATCHNORM2D ? 4 * l->in.c : 0;
    Array fused[ARRAYS] = {typed(changed_array("din", inputs, 1, accumulate)),
                           output_array("dweight", l->weight_count, 1),
                           output_array("dbias", l->bias_count, 1),
                           typed(changed_array("dresidual", adds ? outputs : 0, 1, accumulate)),
                           typed(changed_array("dout", outputs, 1, true)),
                           typed(input_array("in", inputs)),
                           changed_array("stats", stats, 1, true),
                           input_array("weight", l->weight_count),
                           typed(output_array("out", outputs, 1))};
    Array apart[ARRAYS];
    Task t = {.run = run_fused_backward,
              .l = l,
              .fused = {.add = adds, .relu = true, .relu_backward = true},
              .n = n,
              .training = true,
              .accumulate = accumulate,
              .accumulate_residual = accumulate};
    fused[WEIGHT].typed = l->kind == CONV2D;
    for (size_t i = 0; i < ARRAYS; i++)
        apart[i] = twin(&fused[i]);
    perform(k, &t, fused, ARRAYS);
    t.apart = true;
    perform(k, &t, apart, ARRAYS);
    for (size_t i = 0; i < ARRAYS; i++) {
        if (fused[i].output && i != DOUT)
            check_equal(&fused[i], &apart[i]);
        free(fused[i].at);
        free(apart[i].at);
    }
}

static void test_fused_backward(const Kernels *k) {
    for (size_t i = 0; i < (tiny ? 1 : 8); i++) {
        const bool accumulate = i % 2, adds = i / 2 % 2;
        const Layer norm = norm_layer(i % 3 ? 0 : 3);
        describe(&norm, 2, adds ? ", fused sum and ReLU" : ", fused ReLU");
        compare_fused(k, &norm, 2, adds, accumulate);
        const Layer *conv = first_layer((Shape){5, 6, 9});
        conv2d_bias(&net, 0, draw_size(1, 20), 3, 1, 1, i % 2);
        describe(conv, 2, ", fused ReLU");
        compare_fused(k, conv, 2, false, accumulate);
    }
    verdict("backward of what is fused, %s kernels, %s", NAME_OF(k), PRECISION_OF(k));
}

// A convolution and the BatchNorm after it, whose statistics the former may have begun.
static void run_conv_and_norm(const Kernels *k, const Task *t) {
    const Layer *conv = t->l, norm = {.kind = BATCHNORM2D, .in = conv->out, .out = conv->out};
    Work w = work_of_task(t);
    const size_t words = k->moments_size(conv, t->n);
    w.fused.moments_partner = words > 0 ? &norm : NULL;
    w.moments = k->device->alloc(words * sizeof *w.moments);
    w.out = t->arrays[0].on_device;
    w.in = t->arrays[3].on_device;
    w.weight = t->arrays[4].on_device;
    k->layers[CONV2D].forward(w);
    w.l = &norm;
    w.fused.moments_partner = words > 0 ? conv : NULL;
    w.in = t->arrays[0].on_device;
    w.out = t->arrays[2].on_device;
    w.stats = t->arrays[1].on_device;
    w.weight = t->arrays[5].on_device;
    w.bias = t->arrays[5].on_device;
    if (k == &naive_kernels) // which use the convolution's scratch memory
        w.scratch =
            must_alloc(k->scratch_size(&norm, &w.fused, t->n) * sizeof *w.scratch, "a test");
    k->layers[BATCHNORM2D].forward(w);
    k->device->synchronize();
    k->device->release(w.moments);
    if (k == &naive_kernels)
        free(w.scratch);
}

// The outputs are sums of small integers, exact; each sum of the moments goes over 64 of them.
static void conv_and_norm_bound(const Task *t, const Array *before, const Array *got,
                                const Array *want, Array *bound) {
    (void)got;
    size_t channels = t->l->out.c, pixels = t->n * t->l->out.h * t->l->out.w;
    const real *out = want[0].at, *stats = want[1].at;
    for (size_t c = 0; c < channels; c++) {
        double mean = (double)stats[2 * channels + c], inverse = (double)stats[3 * channels + c];
        double farthest = farthest_from(mean, out, c, channels, pixels);
        Errors e = norm_errors(mean, inverse, farthest, pixels * 8);
        stats_bound(bound[1].at, before[1].at, e, mean, inverse, c, channels);
    }
    for (size_t i = 0; i < pixels * channels; i++)
        ((real *)bound[2].at)[i] = (real)1e-4;
}

static void test_moments(const Kernels *k) {
    static const struct {
        Shape in;
        size_t channels, kernel, n;
    } shapes[] = {{{8, 8, 8}, 40, 1, 3}, {{8, 16, 16}, 136, 1, 2}, {{8, 8, 3}, 5, 3, 4},
                  {{4, 4, 8}, 72, 1, 8}, {{7, 7, 8}, 16, 1, 3},    {{8, 8, 24}, 64, 1, 5}};
    for (size_t i = 0; i < (tiny ? 1 : 3 * sizeof shapes / sizeof *shapes); i++) {
        const Layer *l = first_layer(shapes[i / 3].in);
        size_t n = shapes[i / 3].n, c = shapes[i / 3].channels, kernel = shapes[i / 3].kernel;
        conv2d_bias(&net, 0, c, kernel, 1, kernel / 2, false);
        size_t count = n * shape_size(l->out);
        memset(tiles, (int)(1 + i % 3), sizeof tiles);
        integers = true;
        Array arrays[] = {typed(output_array("conv", count, 0)),
                          changed_array("stats", 4 * c, 1, true),
                          typed(output_array("out", count, 1)),
                          typed(input_array("in", n * shape_size(l->in))),
                          typed(input_array("weight", l->weight_count)),
                          input_array("ones", c)};
        for (size_t k = 0; k < c; k++) {
            ((real *)arrays[1].at)[c + k] += 3;
            ((real *)arrays[5].at)[k] = 1;
        }
        describe(l, n, " with moments");
        COMPARE(k, (Task){.run = run_conv_and_norm,
                          .bound = conv_and_norm_bound,
                          .l = l,
                          .n = n,
                          .training = true});
    }
    integers = false;
    memset(tiles, 0, sizeof tiles);
    verdict("batchnorm2d after conv2d, %s kernels, %s", NAME_OF(k), PRECISION_OF(k));
}

// All tiles of a product give the same bits.
static void test_tiles(const Kernels *k) {
    static const struct {
        Shape in;
        size_t channels, kernel, stride, n;
    } shapes[] = {{{9, 9, 8}, 136, 3, 2, 4},
                  {{12, 11, 72}, 40, 1, 1, 3},
                  {{4, 4, 96}, 72, 3, 1, 2},
                  {{4, 4, 64}, 72, 3, 1, 9}};
    for (size_t i = 0; i < (quick ? 3 : 4) && k->choice != NAIVE; i++) {
        const Layer *l = first_layer(shapes[i].in);
        size_t n = shapes[i].n;
        conv2d_bias(&net, 0, shapes[i].channels, shapes[i].kernel, shapes[i].stride,
                    shapes[i].kernel / 2, false);
        size_t inputs = n * shape_size(l->in), outputs = n * shape_size(l->out);
        enum { BACKWARD = 5, ALL = 6 }; // arrays
        Array given[ALL] = {typed(output_array("din", inputs, 1)),
                            output_array("dweight", l->weight_count, 1),
                            typed(input_array("dout", outputs)),
                            typed(input_array("in", inputs)),
                            typed(input_array("weight", l->weight_count)),
                            typed(output_array("out", outputs, 1))};
        Array first[ALL];
        for (int tile = 1; tile <= 3; tile++) {
            Array a[ALL];
            Task t = {.run = run_backward, .l = l, .n = n};
            memset(tiles, tile, sizeof tiles);
            describe(l, n, "");
            for (size_t j = 0; j < ALL; j++) {
                round_array(k, &given[j]);
                a[j] = twin(&given[j]);
            }
            perform(k, &t, a, BACKWARD);
            t.run = run_forward;
            perform(k, &t, a + 3, ALL - 3); // in, weight, out
            for (size_t k = 0; k < ALL; k++)
                if (tile == 1)
                    first[k] = a[k];
                else
                    check_equal(&a[k], &first[k]);
            for (size_t k = 0; tile > 1 && k < ALL; k++)
                free(a[k].at);
        }
        for (size_t k = 0; k < ALL; k++) {
            free(first[k].at);
            free(given[k].at);
        }
    }
    memset(tiles, 0, sizeof tiles);
    verdict("equal bits in all tiles, %s kernels, %s", NAME_OF(k), PRECISION_OF(k));
}

static void run_timed(const Kernels *k, const Task *t) {
    k->device->mark(0);
    run_forward(k, t);
    k->device->mark(1);
}

// The operations that --layers counts: as many as in the definition, forward and of each gradient
static void test_flops(const Kernels *k) {
    const Layer *l = first_layer((Shape){9, 7, 3});
    conv2d_bias(&net, 0, 5, 3, 2, 1, true);
    const double forward = 3 * forward_flops(l);
    real din = 0;
    for (size_t gradients = 1; gradients <= 2; gradients++) {
        const double flops = k->flops((Work){.l = l, .n = 3, .din = gradients == 2 ? &din : NULL});
        if (flops != forward * (double)(1 + gradients))
            fail("%zu gradients: %g operations, expected %g", gradients, flops,
                 forward * (double)(1 + gradients));
    }
    verdict("operations, %s kernels, %s", NAME_OF(k), PRECISION_OF(k));
}

// The default is the tile with which the busiest of the emulated H100's 132 multiprocessors has the
// least to do. The emulator's clock shows which one ran: it counts the threads of all blocks.
static void test_choice_of_tiles(const Kernels *k) {
    static const struct {
        size_t depth, channels, height, width, threads[2]; // tiled, tensor
    } shapes[] = {{8, 32, 64, 32, {128, 128}},
                  {8, 64, 128, 64, {128, 128}},
                  {8, 128, 128, 128, {256, 256}},
                  {776, 128, 128, 128, {256, 128}}};
    DeviceInfo info = {0};
    k->device->describe(&info);
    const bool tensor = k->choice == TENSOR; // whose smallest tile is 64 x 64
    if (!info.emulated || k->choice == NAIVE || getenv("CUEMU_SM")) // CUEMU_SM: another GPU
        return;
    setenv("CUEMU_CLOCK", "1", 1);
    const size_t count = k->precision == BF16 && !quick ? 4 : 3; // the deep one takes seconds
    for (size_t i = tensor; i < count; i++) {
        const Layer *l = first_layer((Shape){128, 128, shapes[i].depth});
        const size_t rows = 128 * 128, tile = shapes[i].height * shapes[i].width;
        conv2d_bias(&net, 0, shapes[i].channels, 1, 1, 0, false);
        Array a[] = {typed(output_array("out", rows * l->out.c, 1)),
                     typed(input_array("in", rows * l->in.c)),
                     typed(input_array("weight", l->weight_count))};
        perform(k, &(Task){.run = run_timed, .l = l, .n = 1}, a, LENGTH(a));
        const size_t threads = (size_t)lround(1e6 * k->device->elapsed(0, 1));
        const size_t expected = rows * l->out.c / tile * shapes[i].threads[tensor];
        if (threads != expected)
            fail("%zu to %zu channels: %zu threads ran, expected %zu, for tiles of %zu x %zu",
                 shapes[i].depth, shapes[i].channels, threads, expected, shapes[i].height,
                 shapes[i].width);
        for (size_t k = 0; k < LENGTH(a); k++)
            free(a[k].at);
    }
    unsetenv("CUEMU_CLOCK");
    verdict("choice of the tile, %s kernels, %s", NAME_OF(k), PRECISION_OF(k));
}

/* ---- Softmax and loss ------------------------------------------------------------------------ */

// The error of the logarithm is the relative error of the sum; then two more roundings.
static void softmax_forward_bound(const Task *t, const Array *before, const Array *got,
                                  const Array *want, Array *bound) {
    (void)got;
    for (size_t i = 0; i < t->n * t->count; i++) {
        double in = (double)((real *)before[1].at)[i], out = (double)((real *)want[0].at)[i];
        ((real *)bound[0].at)[i] =
            (real)(2 * epsilon * ((double)t->count + 6 + fabs(in - out) + fabs(out)));
    }
}

static void softmax_backward_bound(const Task *t, const Array *before, const Array *got,
                                   const Array *want, Array *bound) {
    (void)got, (void)want;
    const real *dout = before[1].at, *out = before[2].at;
    for (size_t image = 0; image < t->n; image++) {
        double sum = 0;
        for (size_t k = 0; k < t->count; k++)
            sum += fabs((double)dout[image * t->count + k]);
        for (size_t k = 0; k < t->count; k++) {
            size_t i = image * t->count + k;
            double taken =
                exp((double)out[i]) * sum; // exp() has an error of 2 units in the last place
            ((real *)bound[0].at)[i] =
                (real)(2 * epsilon * (((double)t->count + 4) * taken + fabs((double)dout[i])));
        }
    }
}

static void run_nll(const Kernels *k, const Task *t) {
    const Array *a = t->arrays;
    k->nll_loss(a[0].on_device, a[1].on_device, a[2].on_device, a[3].on_device, a[4].on_device,
                t->n, t->n + 3, t->count, t->smoothing, NULL);
}

static void test_softmax_and_loss(const Kernels *k) {
    static const size_t classes[] = {1, 2, 10, 31, 32, 33, 100, 255};
    static const double scales[] = {1, 100, 1e4};
    for (size_t i = 0; i < (tiny ? 1 : 3 * sizeof classes / sizeof *classes); i++) {
        size_t width = tiny ? 33 : classes[i / 3], n = draw_size(1, tiny ? 2 : 19);
        const size_t count = n * width;
        const Layer l = flat_layer(LOG_SOFTMAX, width);
        snprintf(context, sizeof context, "%zu images, %zu classes, variant %zu", n, width, i % 3);
        Array logits = typed(input_array("in", count)), logp = input_array("logp", count);
        Array dout = input_array("dout", count);
        for (size_t j = 0; j < count; j++) {
            ((real *)logits.at)[j] *= (real)scales[i % 3];
            ((real *)logp.at)[j] = (real)log(fabs((double)draw_real()) + 1e-6);
        }
        {
            Array arrays[] = {output_array("out", count, 1), logits};
            COMPARE(k, (Task){.run = run_forward,
                              .bound = softmax_forward_bound,
                              .l = &l,
                              .n = n,
                              .count = width});
        }
        {
            Array arrays[] = {typed(output_array("din", count, 1)), dout, twin(&logp)};
            COMPARE(k, (Task){.run = run_backward,
                              .bound = softmax_backward_bound,
                              .l = &l,
                              .n = n,
                              .count = width});
        }
        for (size_t j = 0; j < count && i % 3 == 1; j++) // some classes are equally likely
            ((real *)logp.at)[j] = (real)floor((double)((real *)logp.at)[j]);
        Array arrays[] = {output_array("losses", n, width + 2), output_array("correct", n, 0),
                          output_array("dlogp", i % 3 == 2 ? 0 : count, 0), logp,
                          input_bytes("labels", n, width)};
        COMPARE(k, (Task){.run = run_nll, .n = n, .count = width, .smoothing = i % 2 ? .1 : 0});
    }
    verdict("log_softmax and nll_loss, %s kernels, %s", NAME_OF(k), PRECISION_OF(k));
}

/* ---- Optimizers ------------------------------------------------------------------------------ */

static Update update_of_task(const Task *t) {
    return (Update){.param = t->arrays[0].on_device,
                    .count = t->count,
                    .step = t->step,
                    .momentum = t->momentum,
                    .weight_decay = t->decay,
                    .nesterov = t->nesterov};
}

static void run_adadelta(const Kernels *k, const Task *t) {
    Update u = update_of_task(t);
    u.state[0] = t->arrays[1].on_device;
    u.state[1] = t->arrays[2].on_device;
    u.grad = t->arrays[3].on_device;
    u.param16 = t->arrays[4].on_device;
    k->update[ADADELTA](u);
    if (!k->device->is_gpu && u.param16) // the GPU's kernels write it
        memcpy(u.param16, u.param, u.count * sizeof(real));
}

static void run_sgd(const Kernels *k, const Task *t) {
    Update u = update_of_task(t);
    u.state[0] = t->arrays[1].on_device;
    u.grad = t->arrays[2].on_device;
    u.param16 = t->arrays[3].on_device;
    k->update[SGD](u);
    if (!k->device->is_gpu && u.param16) // the GPU's kernels write it
        memcpy(u.param16, u.param, u.count * sizeof(real));
}

/* All numbers of a parameter have one sign, so only the last subtraction cancels. The relative
   error of each state is therefore bounded: one unit for each of at most 16 roundings. */
static void optimizer_bound(const Task *t, const Array *before, const Array *got, const Array *want,
                            Array *bound) {
    (void)got;
    for (size_t state = 0; state < 3; state++)
        for (size_t i = 0; bound[state].terms && i < t->count; i++) {
            double old = (double)((real *)before[state].at)[i];
            double now = (double)((real *)want[state].at)[i];
            double size = state ? fabs(now) : fabs(old) / 8 + fabs(now - old);
            ((real *)bound[state].at)[i] = (real)(16 * epsilon * size);
        }
    const Array *param16 = &bound[strcmp(before[3].name, "param16") == 0 ? 3 : 4];
    memcpy(param16->at, bound[0].at, param16->count * param16->size); // the copy with 16 bits
}

// A sign for each parameter; squares of states have none.
static void give_signs(const Array *a, size_t arrays, bool squares) {
    for (size_t i = 0; i < a[0].count; i++)
        for (size_t k = 1; k < arrays; k++) {
            real *x = (real *)a[k].at + i, sign = ((real *)a[0].at)[i] < 0 ? -1 : 1;
            *x = (real)fabs((double)*x) * (squares && k < 3 ? 1 : sign);
        }
}

static void test_optimizers(const Kernels *k) {
    static const double decays[] = {0, .01}, momenta[] = {0, .9, .9};
    for (size_t i = tiny ? 7 : 0; i < (tiny ? 8 : COUNTS * 6); i++) {
        const size_t count = counts[i / 6], copied = k->element_bytes < sizeof(real) ? count : 0;
        Task t = {.bound = optimizer_bound,
                  .count = count,
                  .rate = i % 2 ? 1 : .003,
                  .decay = decays[i % 2],
                  .momentum = momenta[i % 3],
                  .nesterov = i % 3 == 2};
        snprintf(context, sizeof context, "%zu numbers, variant %zu", count, i % 6);
        {
            Array arrays[] = {
                changed_array("param", count, 1, true), changed_array("square_avg", count, 1, true),
                changed_array("acc_delta", count, 1, true), input_array("grad", count),
                typed(output_array("param16", copied, 1))};
            give_signs(arrays, 4, true);
            t.run = run_adadelta;
            COMPARE(k, t);
        }
        Array arrays[] = {changed_array("param", count, 1, true),
                          changed_array("momentum_buffer", t.momentum > 0 ? count : 0, 1, true),
                          input_array("grad", count), typed(output_array("param16", copied, 1))};
        give_signs(arrays, t.momentum > 0 ? 3 : 1, false);
        if (t.momentum == 0)
            give_signs((Array[]){arrays[0], arrays[2]}, 2, false);
        t.run = run_sgd;
        arrays[1].terms = t.momentum > 0;
        COMPARE(k, t);
    }
    verdict("adadelta and sgd, %s kernels, %s", NAME_OF(k), PRECISION_OF(k));
}

/* ---- The loader's work, and copies ----------------------------------------------------------- */

static void run_gather(const Kernels *k, const Task *t) {
    void *images = t->arrays[0].on_device, *labels = t->arrays[1].on_device;
    if (k->gather) {
        k->gather(images, labels, t->on_gpu->resident, &t->step->key, t->on_gpu->n, false);
        return;
    }
    memcpy(images, t->on_cpu->images, t->count * sizeof(real));
    memcpy(labels, t->on_cpu->labels, t->n);
}

/* Interpolated numbers close to the middle between two gray levels may be rounded either way: one
   level, in one pixel of a hundred. With --resize, four pixels around each have a part in it. */
static void elastic_bound(const Task *t, const Array *before, const Array *got, const Array *want,
                          Array *bound) {
    (void)before;
    size_t differ = 0;
    const size_t around = t->on_gpu->resident->factor > 1 ? 4 : 1;
    for (size_t i = 0; i < t->count; i++)
        differ += ((real *)got[0].at)[i] != ((real *)want[0].at)[i];
    for (size_t i = 0; i < t->count; i++)
        ((real *)bound[0].at)[i] =
            differ <= 1 + around * t->count / 100 ? (real)(1.01 / 255 / .2) : 0;
}

enum { GATHERED = 5 }; // images of a batch

static void gather_epoch(const Kernels *k, const DatasetInfo *info, Augmentation kind,
                         size_t resize) {
    Dataset data = {info, tiny ? 2 : 2 * GATHERED + 3, NULL, NULL};
    Array images = input_bytes("images", data.count * shape_size(info->shape), 256);
    Array labels = input_bytes("labels", data.count, 200);
    size_t batch_size = min_size(GATHERED, data.count), ranks = draw_size(1, 3);
    size_t rank = draw_size(0, ranks - 1);
    Loader cpu, gpu;
    data.images = images.at;
    data.labels = labels.at;
    loader_plan(&cpu, &data, batch_size, 1, kind,
                (Consumer){&cpu_device, 0, 0, 0, rank, ranks, resize});
    loader_plan(&gpu, &data, batch_size, 1, kind,
                (Consumer){k->device, 0, true, true, rank, ranks, resize});
    loader_init(&cpu);
    loader_init(&gpu);
    const uint64_t seed = (uint64_t)draw_bits() << 32 | draw_bits();
    loader_start(&cpu, seed, 3, 0);
    loader_start(&gpu, seed, 3, 0);
    Task t = {.run = run_gather, .bound = kind == AUGMENT_ELASTIC ? elastic_bound : NULL};
    while ((t.on_cpu = loader_next(&cpu)) && (t.on_gpu = loader_next(&gpu))) {
        t.n = t.on_cpu->n;
        t.key = t.on_gpu->key;
        t.count = t.n * shape_size(cpu.shape);
        Array arrays[] = {typed(output_array("images", t.count, kind == AUGMENT_ELASTIC)),
                          output_bytes("labels", t.n)};
        COMPARE(k, t);
    }
    loader_free(&cpu);
    loader_free(&gpu);
    free(images.at);
    free(labels.at);
}

static void test_gather(const Kernels *k) {
    // the last one's fields need more shared memory than a kernel has by default
    static const Shape shapes[] = {{5, 9, 3}, {7, 6, 1}, {28, 28, 1}, {32, 32, 3}, {70, 66, 1}};
    for (size_t i = 0; i < (tiny ? 1 : 5); i++)
        for (size_t kind = 0; kind < LENGTH(augmentations); kind++) {
            DatasetInfo info = {.name = "test",
                                .shape = shapes[i],
                                .classes = 200,
                                .mean = {.5, .4, .3},
                                .std = {.2, .3, .25}};
            const size_t factor = i < 2 ? 3 : 1; // --resize
            snprintf(context, sizeof context, "%s, %zu x %zu x %zu, %zu times",
                     augmentations[kind].name, info.shape.h, info.shape.w, info.shape.c, factor);
            gather_epoch(k, &info, (Augmentation)kind, 0);
            gather_epoch(k, &info, (Augmentation)kind, factor * info.shape.h);
        }
    verdict("gather, %s kernels, %s", NAME_OF(k), PRECISION_OF(k));
}

static jmp_buf refused;
static char refusal[512];

// In place of die(): keeps the message.
static void refuse(int status, const char *format, ...) {
    va_list args;
    (void)status;
    va_start(args, format);
    vsnprintf(refusal, sizeof refusal, format, args);
    va_end(args);
    longjmp(refused, 1);
}

// Images whose displacement fields exceed the shared memory of any GPU are refused by name.
static void test_large_elastic(const Kernels *k) {
    const DeviceDataset resident = {.shape = {200, 200, 1}, .augment = AUGMENT_ELASTIC};
    const RandomKey key = {0};
    *refusal = 0;
    k->device->use(0, 0, refuse);
    if (setjmp(refused) == 0)
        k->gather(NULL, NULL, &resident, &key, 1, false);
    k->device->use(0, 0, die);
    if (!strstr(refusal, "--augment elastic: the fields of 200 x 200 pixels need 480000 bytes"))
        fail("expected a message on --augment elastic, found \"%s\"", refusal);
    verdict("gather: images too large for --augment elastic, %s kernels", NAME_OF(k));
}

static void call_that_fails(const Kernels *k, const char *function) {
    const DeviceDataset resident = {.shape = {5, 5, 1}, .augment = AUGMENT_ELASTIC};
    const RandomKey key = {0};
    if (strcmp(function, "cudaMalloc") == 0)
        k->device->alloc(1);
    else if (strcmp(function, "cudaMallocHost") == 0)
        k->device->pinned_alloc(1);
    else
        k->gather(NULL, NULL, &resident, &key, 1, false);
}

// An error that does not mean "too much" is not reported as that. The emulator injects one.
static void test_other_errors(const Kernels *k) {
    static const char *const functions[] = {"cudaMalloc", "cudaMallocHost", "cudaFuncSetAttribute"};
    DeviceInfo info = {0};
    k->device->describe(&info);
    for (size_t i = 0; i < LENGTH(functions) && info.emulated; i++) {
        *refusal = 0;
        k->device->use(0, 0, refuse);
        setenv("CUEMU_FAIL", functions[i], 1);
        if (setjmp(refused) == 0)
            call_that_fails(k, functions[i]);
        unsetenv("CUEMU_FAIL");
        k->device->use(0, 0, die);
        if (!strstr(refusal, functions[i]) || !strstr(refusal, "cudaErrorUnknown"))
            fail("expected %s and cudaErrorUnknown, found \"%s\"", functions[i], refusal);
    }
    k->device->alloc((size_t)1 << 60); // too much, which clears the last error
    if (info.emulated)
        verdict("errors by name, %s kernels", NAME_OF(k));
}

static void *transfer_thread(void *argument) {
    void **a = argument;
    const Kernels *k = a[0];
    k->device->transfer(0, a[1], a[2], 777);
    return NULL;
}

static void test_copies(const Kernels *k) {
    enum { BYTES = 1000 };
    Array from = input_bytes("from", BYTES, 256);
    char *first = k->device->alloc(BYTES), *second = k->device->alloc(BYTES);
    for (int pinned = 0; pinned < 2; pinned++) {
        uint8_t *host = pinned ? k->device->pinned_alloc(BYTES) : zeroed_alloc(BYTES);
        for (size_t i = 0; i < BYTES; i++)
            if (host[i])
                fail("pinned_alloc: byte %zu is not 0", i);
        k->device->copy(host, first, BYTES);
        for (size_t i = 0; i < BYTES && !pinned; i++)
            if (host[i])
                fail("alloc: byte %zu is not 0", i);
        memcpy(host, from.at, BYTES);
        k->device->copy(first, host, BYTES);
        memset(host, 1, BYTES); // the copy is complete: the host's memory is no longer read
        k->device->copy(second + 3, first + 1, 990);
        k->device->copy(second, first, 0);
        k->device->copy(host + 5, second + 3, 990);
        if (memcmp(host + 5, (char *)from.at + 1, 990) != 0 || host[4] != 1 || host[995] != 1)
            fail("copy: other bytes than expected");
        pthread_t thread; // like a worker of the loader
        memcpy(host, from.at, BYTES);
        k->device->copy(second, first, BYTES);
        k->device->synchronize(); // a transfer does not wait for what is queued
        if (pthread_create(&thread, NULL, transfer_thread, (void *[]){(void *)k, second + 8, host}))
            fail("no thread");
        else
            pthread_join(thread, NULL);
        k->device->copy(host, second, BYTES);
        if (memcmp(host, from.at, 8) != 0 || memcmp(host + 8, from.at, 777) != 0 ||
            memcmp(host + 785, (char *)from.at + 785, BYTES - 785) != 0)
            fail("transfer: other bytes than expected");
        (pinned ? k->device->pinned_release : free)(host);
    }
    if (k->device->alloc((size_t)1 << 60))
        fail("alloc: gave more memory than there is");
    k->device->release(first);
    k->device->release(second);
    free(from.at);
    verdict("alloc, copy and transfer, %s kernels", NAME_OF(k));
}

static void test_marks(const Kernels *k) {
    k->device->mark(0);
    k->device->synchronize();
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    k->device->mark(MARKS - 1);
    k->device->mark(1);
    double seconds = k->device->elapsed(0, MARKS - 1), later = k->device->elapsed(MARKS - 1, 1);
    if (!(seconds >= .0199 && seconds < 30))
        fail("two marks are %g s apart, expected at least 0.02", seconds);
    if (!(later >= 0 && later < 30))
        fail("the next mark comes %g s later", later);
    verdict("mark and elapsed, %s kernels", NAME_OF(k));
}

/* ---- Training -------------------------------------------------------------------------------- */

enum { MOST_STEPS = 5 };

// Some steps on synthetic images from the initial weights, with dropout. Returns the weights' hash.
static uint64_t train_steps(const Kernels *k, const char *model, size_t batch_size, bool resident,
                            size_t steps, double losses[MOST_STEPS]) {
    static Net net;
    Settings s;
    Loader loader;
    parse_options(&s, 3, (char *[]){"cnn", "--model", (char *)model});
    const Model *m = find_model(model);
    const DatasetInfo info = dataset_for(m, "synthetic");
    Dataset data = {.info = &info};
    make_synthetic(&data, TRAINING_SET, steps * batch_size);
    net_build(&net, m, &info, &s, k);
    plan_net(&net, batch_size, 0);
    net_alloc(&net);
    init_weights(&net, 1);
    real *state = k->device->alloc(count_states(&optimizers[s.optimizer], &s) * net.param_size *
                                   sizeof *state);
    loader_plan(&loader, &data, batch_size, 1, AUGMENT_NONE,
                (Consumer){k->device, 0, k->device->is_gpu, resident, 0, 1, 0});
    loader_init(&loader);
    loader_start(&loader, 1, 1, 0);
    for (const Batch *batch; (batch = loader_next(&loader));) {
        net_load(&net, batch, s.lr ? s.lr : optimizers[s.optimizer].lr);
        forward(&net, batch->n, &net.step->key);
        losses[batch->number] = loss_and_gradient(&net, batch->n).mean;
        backward(&net, batch->n);
        optimizer_step(&net, state);
    }
    uint64_t hash = hash_weights(&net);
    loader_free(&loader);
    k->device->release(state);
    memory_plan_free(&net.plan);
    free_dataset(&data);
    return hash;
}

static const struct {
    const char *model;
    size_t batch_size, steps; // resnet18 amplifies rounding errors tenfold in every step
} trained[] = {{"mnist", 2, 5}, {"cifar", 4, 5}, {"resnet8", 8, 5}, {"resnet18", 2, 2}};
enum { TRAINED = sizeof trained / sizeof *trained };

static void compare_losses(const double *got, const double *want, size_t steps, double tolerance) {
    for (size_t step = 0; step < steps; step++)
        if (!(fabs(got[step] - want[step]) <= tolerance * fabs(want[step])))
            fail("step %zu: the loss is %.9g, on the CPU %.9g", step + 1, got[step], want[step]);
}

// The losses equal the CPU's; a second run gives the same weights, with copied batches as well.
static void test_training(const Kernels *k) {
    bool tiled = k->choice == TILED;
    double tolerance = k->precision == FP32 ? 1e-4 : k->precision == BF16 ? 3e-2 : 1e-2;
    // quick: only cifar; ./cnn-emu trains mnist, see test_cuda.sh
    for (size_t i = quick; i < (quick ? 2 : (size_t)TRAINED - !tiled); i++) {
        const char *model = trained[i].model;
        size_t n = trained[i].batch_size, steps = quick ? 2 : trained[i].steps;
        double want[MOST_STEPS], got[MOST_STEPS];
        snprintf(context, sizeof context, "%s", model);
        train_steps(cpu_kernels[CPU_KERNELS - 1], model, n, false, steps, want);
        uint64_t hash = train_steps(k, model, n, true, steps, got);
        compare_losses(got, want, steps, tolerance);
        if (tiled && i < 3 && train_steps(k, model, n, false, steps, got) != hash)
            fail("other weights in the second run");
    }
    verdict("training, %s kernels, %s", NAME_OF(k), PRECISION_OF(k));
}

/* A gradient that is infinite skips this update and all after it. fp16: it skips exactly one and
   halves the scale; the last of GROWTH_INTERVAL good steps doubles it. */
static void test_loss_scale(const Kernels *k) {
    enum { COUNT = 1000, STEPS = 5, BAD = 2 };
    const bool scaled = k->precision == FP16;
    Array param = input_array("param", COUNT), grad = input_array("grad", COUNT);
    real *on_device[3], read[2][COUNT];
    LossScale *scale = k->device->alloc(sizeof *scale),
              now = {.scale = 1024, .steps = GROWTH_INTERVAL - 2};
    void *low = k->device->alloc(COUNT * k->element_bytes);
    StepInputs *step = k->device->alloc(sizeof *step);
    for (size_t i = 0; i < 3; i++)
        on_device[i] = k->device->alloc(COUNT * sizeof(real));
    k->device->set_step(step, (StepInputs){.lr = .1});
    k->device->copy(on_device[0], param.at, COUNT * sizeof(real));
    k->device->copy(scale, &now, sizeof now);
    for (size_t i = 0; i < STEPS; i++) {
        ((real *)grad.at)[777] = i == BAD ? (real)-INFINITY : 1;
        k->device->copy(on_device[1], grad.at, COUNT * sizeof(real));
        k->device->copy(read[0], on_device[0], COUNT * sizeof(real));
        k->count_not_finite(scale, on_device[1], COUNT);
        k->update[SGD]((Update){.param = on_device[0],
                                .grad = on_device[1],
                                .state = {on_device[2]},
                                .param16 = low,
                                .scale = scale,
                                .count = COUNT,
                                .step = step,
                                .momentum = .9});
        if (scaled)
            k->adjust_scale(scale);
        k->device->copy(read[1], on_device[0], COUNT * sizeof(real));
        k->device->copy(&now, scale, sizeof now);
        const bool skips = scaled ? i == BAD : i >= BAD;
        if ((memcmp(read[0], read[1], sizeof *read) == 0) != skips)
            fail("step %zu: %s", i, skips ? "was not skipped" : "was skipped");
        if (!scaled && now.not_finite != (i >= BAD))
            fail("step %zu: %u not finite", i, now.not_finite);
        const float want[] = {1024, 2048, 1024, 1024, 1024};
        const uint32_t steps[] = {GROWTH_INTERVAL - 1, 0, 0, 1, 2};
        if (scaled && (now.scale != want[i] || now.steps != steps[i] || now.skipped != (i >= BAD) ||
                       now.not_finite))
            fail("step %zu: scale %g after %u steps, %u skipped, %u not finite", i,
                 (double)now.scale, now.steps, now.skipped, now.not_finite);
    }
    for (size_t i = 0; i < 3; i++)
        k->device->release(on_device[i]);
    k->device->release(scale);
    k->device->release(low);
    k->device->release(step);
    free(param.at);
    free(grad.at);
    verdict("loss scale, %s", PRECISION_OF(k));
}

static const char no_tensor_cores[] =
    "this GPU has no tensor cores that cnn uses in this precision";

static bool lacks_tensor_cores(const Kernels *k) {
    DeviceInfo device = {0};
    k->device->describe(&device);
    return k->choice == TENSOR && !device.tensor_cores[k->precision];
}

static void print_weights(void) {
    double losses[MOST_STEPS];
    for (size_t i = 0; i < 3; i++)
        printf("%s %016llx\n", trained[i].model,
               (unsigned long long)train_steps(cuda_kernels(1), trained[i].model, 2, i % 2, 2,
                                               losses));
    if (lacks_tensor_cores(cuda_kernels(3))) {
        skip("weights in bf16", no_tensor_cores);
        return;
    }
    printf("bf16 %016llx\n",
           (unsigned long long)train_steps(cuda_kernels(3), "resnet8", 2, true, 2, losses));
}

static const struct {
    const char *name;
    void (*test)(const Kernels *k);
    bool once; // the same code in all tables: once is enough for race detectors
} tests[] = {
    {"relu", test_relu_and_add, true},
    {"dropout", test_dropout, true},
    {"maxpool2d", test_maxpool, true},
    {"avgpool2d", test_avgpool, true},
    {"batchnorm2d", test_norm, true},
    {"softmax", test_softmax_and_loss, true},
    {"optimizers", test_optimizers, true},
    {"loss_scale", test_loss_scale, true},
    {"gather", test_gather, true},
    {"elastic", test_large_elastic, true},
    {"errors", test_other_errors, true},
    {"copies", test_copies, true},
    {"marks", test_marks, true},
    {"nchw", test_nchw, true},
    {"linear", test_linear, false},
    {"conv2d", test_conv, false},
    {"rounding", test_rounding, false},
    {"moments", test_moments, false},
    {"fused", test_fused_backward, false},
    {"tiles", test_tiles, false},
    {"choice", test_choice_of_tiles, false},
    {"flops", test_flops, false},
    {"training", test_training, true},
};
enum { TESTS = sizeof tests / sizeof *tests };

int main(int argc, char **argv) {
    const char *wish = getenv("QUICK"), *reason, *what = argc > 1 ? argv[1] : "all";
    const char *only = argc > 2 ? argv[2] : "", *kernels = argc > 3 ? argv[3] : "";
    tiny = strcmp(what, "tiny") == 0;
    quick = tiny || (wish && *wish && strcmp(wish, "0") != 0);
    suite = "cuda";
    if (cuda_kernels(0)->device->count(&reason) == 0) {
        skip("all", reason);
        return 0;
    }
    cuda_kernels(0)->device->use(0, 0, die);
    if (strcmp(what, "weights") == 0) {
        print_weights();
        return 0;
    }
    test_comparison();
    for (size_t which = 0; cuda_kernels(which); which++) {
        const Kernels *k = cuda_kernels(which);
        const bool named =
            strcmp(kernels, NAME_OF(k)) == 0 || strcmp(kernels, PRECISION_OF(k)) == 0;
        if ((*kernels && !named) || (tiny && k->precision == FP16)) // the code is that of bf16
            continue;
        if (lacks_tensor_cores(k)) {
            skip(PRECISION_OF(k), no_tensor_cores);
            continue;
        }
        for (size_t i = 0; i < (size_t)TESTS - tiny; i++)
            if ((!*only || strcmp(only, tests[i].name) == 0) &&
                !(tiny && tests[i].once && which == 0))
                tests[i].test(k);
    }
    return 0;
}
