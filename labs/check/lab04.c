/* lab04.c - lab 4's tests of kernels, on a GPU or in the emulator. Outputs are initialized to a NaN
   that no sum gives, inputs and outputs lie between guard zones, and numbers are small integers, so
   that a sum is the same in every order. The reference is the CPU's definitions, those of lab 1.
   The kernels run in a process of their own (device.h).

     lab04 K   a test; then it sends back the token that it reads (see check.sh); 0: no test
     lab04 6   every kernel once, for the race detector
   WORKER=PROGRAM: the one with the kernels */
#define CNN_NO_MAIN
#include "../../cnn.c"
#include "device.h"
#include "draw.h"

// At the end of the assembled cnn_kernels.cu
__attribute__((weak)) void lab_add_bias(Work w);

enum { START = OWN_CALLS, RUN_LAYER, ADD_BIAS };

typedef struct Shared {
    Calls calls;
    char no_gpu[256]; // why there is none
    LayerKind kind;
    Layer layer;
    Work work;
    size_t launches, threads; // counted by the emulator (lab04_launches.h)
} Shared;

static Shared *const shared = SHARED_MEMORY;

/* ---- The worker ------------------------------------------------------------------------------ */

static const Kernels *gpu;

void *lab_alloc(size_t bytes) {
    return gpu->device->alloc(bytes);
}

void lab_free(void *memory) {
    gpu->device->release(memory);
}

void lab_copy(void *to, const void *from, size_t bytes, bool to_device) {
    (void)to_device;
    gpu->device->synchronize();
    gpu->device->copy(to, from, bytes);
}

void lab_launched(const char *kernel, size_t threads);
void lab_launched(const char *kernel, size_t threads) {
    (void)kernel;
    shared->launches++;
    shared->threads += threads;
}

static void start_device(void) {
    const char *reason = "";
    gpu = cuda_kernels(0);
    if (gpu->device->count(&reason) == 0)
        snprintf(shared->no_gpu, sizeof shared->no_gpu, "%s", reason);
    else
        gpu->device->use(0, 0, die);
}

static void own_call(int call) {
    const Layer layer = shared->layer;
    Work w = shared->work;
    w.l = &layer;
    if (call == START)
        start_device();
    if (call == RUN_LAYER)
        gpu->layers[shared->kind].forward(w);
    if (call == ADD_BIAS)
        lab_add_bias(w);
    if (!*shared->no_gpu)
        gpu->device->synchronize();
}

static void serve_lab(void) {
    serve_call(own_call);
}

/* ---- The checker ----------------------------------------------------------------------------- */

static void run_on_device(int call, LayerKind kind, Work w) {
    shared->kind = kind;
    shared->layer = *w.l;
    shared->work = w;
    call_worker(call);
}

static void fill(real *numbers, size_t count) {
    for (size_t i = 0; i < count; i++)
        numbers[i] = (real)draw(0, 8) - 4;
}

/* ---- Memory of the device between guard zones ------------------------------------------------ */

enum { GUARD = 2048 }; // numbers; a block has no more than 1024 threads
static const uint32_t unwritten = 0xFFFFFFFF, guard_of_outputs = 0xC5C5C5C5;
static const uint32_t guard_of_inputs = 0x7FC00000; // a NaN: a sum that reads it is NaN

static uint32_t bits_of(real number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

static real number_of(uint32_t bits) {
    real number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

typedef struct Array {
    const char *name;
    real *host, *device; // device: the first number after the guard
    size_t count;
    uint32_t guard;
} Array;

static Array new_array(const char *name, size_t count, uint32_t guard) {
    Array a = {name, must_alloc(count * sizeof(real), "a test"), NULL, count, guard};
    a.device = (real *)device_alloc((count + 2 * GUARD) * sizeof(real)) + GUARD;
    return a;
}

static Array new_output(const char *name, size_t count) {
    Array a = new_array(name, count, guard_of_outputs);
    for (size_t i = 0; i < count; i++)
        a.host[i] = number_of(unwritten);
    return a;
}

static Array new_input(const char *name, size_t count) {
    Array a = new_array(name, count, guard_of_inputs);
    fill(a.host, count);
    return a;
}

static void send(const Array *a) {
    size_t count = a->count + 2 * GUARD;
    real *all = must_alloc(count * sizeof *all, "a test");
    for (size_t i = 0; i < count; i++)
        all[i] = number_of(a->guard);
    memcpy(all + GUARD, a->host, a->count * sizeof *all);
    copy_to_device((char *)(a->device - GUARD), all, count * sizeof *all);
    free(all);
}

static void check_guard(const Array *a, const real *guard, bool after) {
    size_t written = 0, at = 0;
    for (size_t i = 0; i < GUARD; i++)
        if (bits_of(guard[i]) != a->guard) {
            at = written++ ? at : i;
        }
    if (written && after)
        wrong("%s has %zu numbers, and %zu beyond its end were written, number %zu first (they "
              "count from 0): threads whose number is not below the count must do nothing",
              a->name, a->count, written, a->count + at);
    if (written)
        wrong("%s: %zu numbers before its beginning were written", a->name, written);
}

// Copies an array back; an input must be unchanged.
static void fetch(Array *a, bool is_input) {
    size_t count = a->count + 2 * GUARD;
    real *all = must_alloc(count * sizeof *all, "a test");
    copy_from_device(all, (char *)(a->device - GUARD), count * sizeof *all);
    check_guard(a, all, false);
    check_guard(a, all + GUARD + a->count, true);
    for (size_t i = 0; is_input && i < a->count; i++)
        if (bits_of(all[GUARD + i]) != bits_of(a->host[i]))
            wrong("%s is an input, but its number %zu was changed", a->name, i);
    memcpy(a->host, all + GUARD, a->count * sizeof *all);
    free(all);
}

static void drop(Array *a) {
    device_free(a->device - GUARD);
    free(a->host);
}

static void check_written(const Array *a) {
    size_t missing = 0, first = 0, last = 0;
    for (size_t i = 0; i < a->count; i++)
        if (bits_of(a->host[i]) == unwritten) {
            first = missing++ ? first : i;
            last = i;
        }
    if (missing == a->count)
        wrong("%s was never written, none of its %zu numbers: was a kernel launched?", a->name,
              a->count);
    if (missing && last == a->count - 1 && missing == a->count - first)
        wrong(
            "the last %zu of the %zu numbers of %s were never written: there are too few threads; "
            "is the number of blocks rounded down?",
            missing, a->count, a->name);
    if (missing)
        wrong("%zu of the %zu numbers of %s were never written, number %zu first", missing,
              a->count, a->name, first);
}

/* ---- ReLU ------------------------------------------------------------------------------------ */

static const size_t counts[] = {1000, 257, 4099, 256, 31, 1};

static void fill_relu(Array *in) {
    for (size_t i = 0; i < in->count; i++)
        in->host[i] += (real)0.25; // no 0 among them
}

static void check_relu(const Array *out, const real *in) {
    for (size_t i = 0; i < out->count; i++) {
        real got = out->host[i], want = in[i] > 0 ? in[i] : 0;
        if (isnan(in[i]) && !isnan(got))
            wrong("in[%zu] is NaN, out[%zu] is %g: a NaN must stay a NaN, or an error in training "
                  "is hidden. What is NaN > 0, what is NaN < 0?",
                  i, i, (double)got);
        if (!isnan(in[i]) && got != want)
            wrong("%zu numbers: in[%zu] is %g, and out[%zu] is %g, expected %g", out->count, i,
                  (double)in[i], i, (double)got, (double)want);
    }
}

static void relu_on_gpu(real *out, const real *in, size_t count) {
    const Layer l = {.kind = RELU, .in = {1, 1, count}, .out = {1, 1, count}};
    run_on_device(RUN_LAYER, RELU, (Work){.l = &l, .n = 1, .in = in, .out = out});
}

static void relu_of(size_t count) {
    Array out = new_output("out", count), in = new_input("in", count);
    fill_relu(&in);
    send(&out);
    send(&in);
    relu_on_gpu(out.device, in.device, count);
    fetch(&out, false);
    fetch(&in, true);
    check_written(&out);
    check_relu(&out, in.host);
    drop(&out);
    drop(&in);
}

static void test_relu(void) {
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        relu_of(counts[i]);
    for (size_t i = 0; i < 5; i++)
        relu_of(draw(1, 3000));
    relu_of(300000); // if blocks and threads of a launch are swapped, a block has 1172 threads
}

static void test_relu_in_place(void) {
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        Array both = new_array("out, which is in,", counts[i], guard_of_outputs);
        real *before = must_alloc(counts[i] * sizeof *before, "a test");
        fill(both.host, counts[i]);
        fill_relu(&both);
        for (size_t j = i; j < counts[i]; j += 7)
            both.host[j] = (real)NAN;
        memcpy(before, both.host, counts[i] * sizeof *before);
        send(&both);
        relu_on_gpu(both.device, both.device, counts[i]);
        fetch(&both, false);
        check_relu(&both, before);
        drop(&both);
        free(before);
    }
}

/* ---- Bias ------------------------------------------------------------------------------------ */

// out holds multiples of 1000 and the biases are 1, 2, 3 ...: the difference tells which was added.
static void bias_of(size_t pixels, size_t channels) {
    size_t count = pixels * channels;
    Array out = new_array("out", count, guard_of_outputs), bias = new_input("bias", channels);
    real *before = must_alloc(count * sizeof *before, "a test");
    for (size_t i = 0; i < count; i++)
        before[i] = out.host[i] = (real)draw(0, 8) * 1000;
    for (size_t c = 0; c < channels; c++)
        bias.host[c] = (real)(c + 1);
    send(&out);
    send(&bias);
    const Layer l = {.kind = CONV2D, .out = {1, pixels, channels}, .bias_count = channels};
    run_on_device(ADD_BIAS, CONV2D,
                  (Work){.l = &l, .n = 1, .out = out.device, .bias = bias.device});
    fetch(&out, false);
    fetch(&bias, true);
    size_t unchanged = 0;
    for (size_t i = 0; i < count; i++)
        unchanged += out.host[i] == before[i];
    if (unchanged == count)
        wrong("out is as before, nothing was added to its %zu numbers: was a kernel launched?",
              count);
    for (size_t i = 0; i < count; i++) {
        size_t c = i % channels, pixel = i / channels;
        double added = (double)out.host[i] - (double)before[i];
        if (isnan(added))
            wrong("%zu pixels of %zu channels: number %zu became NaN: a bias beyond the last one "
                  "was read. There is one for each channel, not for each pixel or number",
                  pixels, channels, i);
        if (added == 0 && unchanged)
            wrong(
                "%zu pixels of %zu channels: %zu numbers got no bias, number %zu first: are there "
                "too few threads?",
                pixels, channels, unchanged, i);
        if (added >= 1 && added <= (double)channels && added != (double)(c + 1))
            wrong("%zu pixels of %zu channels: number %zu is channel %zu of pixel %zu, but it got "
                  "the bias of channel %.0f",
                  pixels, channels, i, c, pixel, added - 1);
        if (added != (double)(c + 1))
            wrong("%zu pixels of %zu channels: number %zu was %g and became %g, expected %g",
                  pixels, channels, i, (double)before[i], (double)out.host[i],
                  (double)before[i] + (double)(c + 1));
    }
    drop(&out);
    drop(&bias);
    free(before);
}

static void test_bias(void) {
    bias_of(250, 4);
    bias_of(43, 6);
    bias_of(1, 10);
    bias_of(1, 1);
    for (size_t i = 0; i < 8; i++)
        bias_of(draw(1, 150), draw(2, 40));
}

/* ---- Convolution ----------------------------------------------------------------------------- */

static Net net; // to build layers in
static const Settings plain = {.width = 6};

static const Layer *new_layer(Shape in) {
    net = (Net){.model = "test", .settings = &plain, .kernels = &naive_kernels};
    net.device = &cpu_device;
    add_layer(&net, (Layer){.kind = INPUT, .in = in, .out = in});
    return &net.layers[1];
}

static const Layer *new_conv(Shape in, size_t channels, size_t kernel, size_t stride,
                             size_t padding) {
    const Layer *l = new_layer(in);
    conv2d_bias(&net, 0, channels, kernel, stride, padding, false);
    return l;
}

// A number of the output, in words.
static const char *place(const Layer *l, size_t i) {
    static char text[128];
    size_t k = i % l->out.c, pixel = i / l->out.c, row = pixel / l->out.w;
    snprintf(text, sizeof text, "image %zu, row %zu, column %zu, channel %zu", row / l->out.h,
             row % l->out.h, pixel % l->out.w, k);
    return text;
}

static const char *shape_of(const Layer *l, size_t n) {
    static char text[200];
    snprintf(text, sizeof text,
             "%zu images of %zu x %zu x %zu, filter %zu x %zu, stride %zu, padding %zu, "
             "%zu channels out",
             n, l->in.h, l->in.w, l->in.c, l->kernel_size, l->kernel_size, l->stride, l->padding,
             l->out.c);
    return text;
}

// A convolution of n images: the kernel's result (out), and the definition's (want).
typedef struct Trial {
    const Layer *l;
    size_t n;
    Array out, in, weight;
    real *want;
} Trial;

static Trial new_trial(const Layer *l, size_t n) {
    return (Trial){.l = l,
                   .n = n,
                   .out = new_output("out", n * shape_size(l->out)),
                   .in = new_input("in", n * shape_size(l->in)),
                   .weight = new_input("weight", l->weight_count),
                   .want = must_alloc(n * shape_size(l->out) * sizeof(real), "a test")};
}

static void drop_trial(Trial *t) {
    drop(&t->out);
    drop(&t->in);
    drop(&t->weight);
    free(t->want);
}

static void run_kernel(Trial *t) {
    send(&t->out);
    send(&t->in);
    send(&t->weight);
    run_on_device(RUN_LAYER, t->l->kind,
                  (Work){.l = t->l,
                         .n = t->n,
                         .in = t->in.device,
                         .weight = t->weight.device,
                         .out = t->out.device});
    fetch(&t->out, false);
    fetch(&t->in, true);
    fetch(&t->weight, true);
}

/* Finds the cause of a NaN. A sum that starts with an output's initial NaN keeps its bits, so the
   output looks as if it was not written. Here it is therefore initialized to zeros. */
static void explain_nan(const Trial *t, size_t at) {
    Trial again = *t;
    again.out = new_array("out", t->out.count, guard_of_outputs);
    bool nothing = true;
    run_kernel(&again);
    for (size_t i = 0; i < t->out.count; i++) {
        if (isnan(again.out.host[i]))
            wrong(
                "%s: the output at %s is NaN: a number beyond the images or the weights was read. "
                "Is each pixel inside of its image? Those beyond its border count as 0",
                shape_of(t->l, t->n), place(t->l, at));
        nothing = nothing && again.out.host[i] == 0;
    }
    if (!nothing)
        wrong("%s: the output at %s is NaN, but not if it held 0 before: the sum must begin with "
              "0, not with what was there",
              shape_of(t->l, t->n), place(t->l, at));
    drop(&again.out);
}

// Computes both results; checks that the kernel has written all numbers, and none is NaN.
static void run_trial(Trial *t) {
    run_kernel(t);
    if (isnan(t->out.host[0]))
        explain_nan(t, 0);
    check_written(&t->out);
    for (size_t i = 0; i < t->out.count; i++)
        if (isnan(t->out.host[i]))
            explain_nan(t, i);
    naive_kernels.layers[t->l->kind].forward(
        (Work){.l = t->l, .n = t->n, .in = t->in.host, .weight = t->weight.host, .out = t->want});
}

/* All pixels and weights are 1: each output counts the pixels under its filter. A border is named
   as the cause only if all outputs whose filter lies inside of the image are right. */
static void conv_of_ones(const Layer *l, size_t n, bool border_only) {
    Trial t = new_trial(l, n);
    size_t wrong_inside = 0, at = t.out.count;
    for (size_t i = 0; i < t.in.count; i++)
        t.in.host[i] = 1;
    for (size_t i = 0; i < t.weight.count; i++)
        t.weight.host[i] = 1;
    run_trial(&t);
    for (size_t i = 0; i < t.out.count; i++)
        if (t.out.host[i] != t.want[i]) {
            bool inside = t.want[i] == (real)(l->kernel_size * l->kernel_size * l->in.c);
            wrong_inside += inside || t.out.host[i] < t.want[i];
            at = at < t.out.count ? at : i;
        }
    if (at < t.out.count && (!border_only || wrong_inside == 0))
        wrong("%s: with all pixels and weights 1 the output at %s is %g, expected %g: %s",
              shape_of(l, n), place(l, at), (double)t.out.host[at], (double)t.want[at],
              wrong_inside ? "it counts the pixels under the filter, times channels"
                           : "pixels outside of the image were read: a border must count as 0");
    drop_trial(&t);
}

// The position of the first number that is not 0, in words.
static const char *first_one(char text[160], const real *numbers, const Layer *l, size_t count) {
    size_t at = 0;
    while (at < count && numbers[at] == 0)
        at++;
    snprintf(text, 160, at < count ? "at %s" : "nowhere", place(l, at));
    return text;
}

// A pixel and a weight of the same channel are 1: the output has a single 1, or none.
static void conv_of_one(const Layer *l, size_t n) {
    Trial t = new_trial(l, n);
    size_t w = draw(0, l->weight_count - 1), pixel = draw(0, t.in.count / l->in.c - 1);
    size_t channel = w / l->out.c % l->in.c, tap = w / l->out.c / l->in.c, row = pixel / l->in.w;
    memset(t.in.host, 0, t.in.count * sizeof(real));
    memset(t.weight.host, 0, t.weight.count * sizeof(real));
    t.in.host[pixel * l->in.c + channel] = t.weight.host[w] = 1;
    run_trial(&t);
    char found[160], wanted[160];
    if (memcmp(t.out.host, t.want, t.out.count * sizeof(real)) != 0)
        wrong("%s: a single pixel is 1, image %zu, row %zu, column %zu, channel %zu, and a single "
              "weight, filter row %zu, filter column %zu, channel in %zu, channel out %zu: the "
              "output has its 1 %s, expected %s. Are rows and columns, or the strides of weight[], "
              "mixed up?",
              shape_of(l, n), row / l->in.h, row % l->in.h, pixel % l->in.w, channel,
              tap / l->kernel_size, tap % l->kernel_size, channel, w % l->out.c,
              first_one(found, t.out.host, l, t.out.count),
              first_one(wanted, t.want, l, t.out.count));
    drop_trial(&t);
}

static void conv_of_any(const Layer *l, size_t n) {
    Trial t = new_trial(l, n);
    run_trial(&t);
    for (size_t i = 0; i < t.out.count; i++)
        if (t.out.host[i] != t.want[i])
            wrong("%s: the output at %s is %g, expected %g", shape_of(l, n), place(l, i),
                  (double)t.out.host[i], (double)t.want[i]);
    drop_trial(&t);
}

static void conv_of(const Layer *l, size_t n) {
    const Layer layer = *l;
    conv_of_ones(&layer, n, true);
    for (size_t i = 0; i < 12; i++)
        conv_of_one(&layer, n);
    conv_of_ones(&layer, n, false);
    conv_of_any(&layer, n);
}

static void test_conv(void) {
    conv_of(new_conv((Shape){6, 11, 3}, 5, 3, 1, 0), 1);
    conv_of(new_conv((Shape){1, 1, 1}, 1, 1, 1, 0), 1);
    for (size_t i = 0; i < 6; i++) {
        size_t kernel = draw(1, 5);
        conv_of(new_conv((Shape){kernel + draw(0, 8), kernel + draw(0, 8), draw(1, 6)}, draw(1, 9),
                         kernel, 1, 0),
                1);
    }
}

static void test_conv_strides(void) {
    conv_of(new_conv((Shape){6, 11, 3}, 5, 3, 1, 1), 1);
    conv_of(new_conv((Shape){7, 10, 2}, 4, 3, 2, 1), 3);
    for (size_t i = 0; i < 8; i++) {
        size_t kernel = draw(1, 5), padding = draw(0, kernel - 1);
        conv_of(new_conv((Shape){kernel + draw(0, 7), kernel + draw(0, 7), draw(1, 5)}, draw(1, 9),
                         kernel, draw(1, 3), padding),
                draw(1, 4));
    }
    for (size_t i = 0; i < 3; i++) {
        const Layer *l = new_layer((Shape){draw(1, 3), draw(1, 4), draw(1, 20)});
        linear(&net, 0, draw(1, 30));
        conv_of(l, draw(1, 20));
    }
}

/* ---- Launches and races ---------------------------------------------------------------------- */

static void check_launches(const char *what, size_t numbers) {
    const size_t threads = shared->threads;
    if (shared->launches == 0)
        wrong("%s: no kernel was launched", what);
    if (threads < numbers)
        wrong("%s: %zu numbers, but only %zu threads; here each number has a thread of its own",
              what, numbers, threads);
    if (threads > numbers + 1024)
        wrong("%s: %zu numbers, and %zu threads: more than one block too many", what, numbers,
              threads);
    shared->launches = shared->threads = 0;
}

static void ignore_launches(const char *what, size_t numbers) {
    (void)what, (void)numbers;
}

static void run_kernels(void (*check)(const char *what, size_t numbers)) {
    const Layer *l = new_conv((Shape){9, 7, 3}, 8, 3, 1, 1);
    Array out = new_output("out", 2 * shape_size(l->out)),
          in = new_input("in", 2 * shape_size(l->in));
    Array weight = new_input("weight", l->weight_count), bias = new_input("bias", l->out.c);
    send(&out);
    send(&in);
    send(&weight);
    send(&bias);
    Work w = {.l = l, .n = 2, .in = in.device, .weight = weight.device, .out = out.device};
    run_on_device(RUN_LAYER, CONV2D, w);
    check("convolution", out.count);
    w.bias = bias.device;
    run_on_device(ADD_BIAS, CONV2D, w);
    check("bias", out.count);
    w.in = w.out;
    run_on_device(RUN_LAYER, RELU, w);
    check("ReLU", out.count);
    fetch(&out, false);
    drop(&out);
    drop(&in);
    drop(&weight);
    drop(&bias);
}

static void test_races(void) {
    run_kernels(ignore_launches);
}

static void test_launches(void) {
    run_kernels(check_launches);
}

int main(int argc, char **argv) {
    static void (*const tests[])(void) = {NULL,       test_relu,    test_relu_in_place,
                                          test_bias,  test_conv,    test_conv_strides,
                                          test_races, test_launches};
    if (is_worker(argc, argv))
        serve(serve_lab);
    size_t test = argc == 2 ? strtoul(argv[1], NULL, 10) : 99;
    if (test >= sizeof tests / sizeof *tests)
        wrong("lab04: there is no such test");
    start_worker(getenv("WORKER") ? getenv("WORKER") : "./lab04_emulated", sizeof(Shared));
    call_worker(START);
    if (*shared->no_gpu)
        wrong("no GPU (%.255s); DEVICE=emulator tests without one", shared->no_gpu);
    draw_seed();
    if (tests[test])
        tests[test]();
    if (test != 6)
        send_token();
    return 0;
}
