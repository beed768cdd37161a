/* lab06.c - lab 6's tests of the backward kernels, on a GPU or in the emulator, and of overlap():
   `lab06 TEST`. trials.h explains how kernels are run. Numbers are small integers, so that a sum is
   the same in every order; what is right comes from the CPU's definitions, those of lab 1. */
#define CNN_NO_MAIN
#include "../../cnn.c"
#include "trials.h"

/* ---- Convolutions ---------------------------------------------------------------------------- */

// At the end of the assembled cnn_kernels.cu
void lab_data_gradient(Work w);
void lab_weight_gradient(Work w);

static Net net; // to build layers in
static const Settings plain = {.width = 6};

static void begin_layer(Shape in) {
    net = (Net){.model = "test", .settings = &plain, .kernels = &naive_kernels};
    net.device = &cpu_device;
    add_layer(&net, (Layer){.kind = INPUT, .in = in, .out = in});
}

static Layer conv(Shape in, size_t channels, size_t kernel, size_t stride, size_t padding) {
    begin_layer(in);
    conv2d_bias(&net, 0, channels, kernel, stride, padding, false);
    return net.layers[1];
}

static Layer fully_connected(Shape in, size_t outputs) {
    begin_layer(in);
    linear(&net, 0, outputs);
    return net.layers[1];
}

static struct {
    Layer layer;
    size_t n;
    bool accumulate, data;
    Array *in, *weight, *dout, *result;
} trial;

static const char *shape_text(void) {
    static char text[240];
    const Layer *l = &trial.layer;
    snprintf(
        text, sizeof text,
        "%zu images of %zu x %zu x %zu, filter %zu x %zu, stride %zu, padding %zu, %zu channels "
        "out%s",
        trial.n, l->in.h, l->in.w, l->in.c, l->kernel_size, l->kernel_size, l->stride, l->padding,
        l->out.c, trial.accumulate ? ", accumulate" : "");
    return text;
}

// A number of the result, in words.
static const char *place(size_t i) {
    static char texts[4][160];
    static size_t next;
    char *text = texts[next++ % 4];
    const Layer *l = &trial.layer;
    if (trial.data) {
        const size_t pixel = i / l->in.c, row = pixel / l->in.w;
        snprintf(text, sizeof texts[0], "din[%zu]: image %zu, row %zu, column %zu, channel %zu", i,
                 row / l->in.h, row % l->in.h, pixel % l->in.w, i % l->in.c);
    } else {
        const size_t tap = i / l->out.c / l->in.c;
        snprintf(text, sizeof texts[0],
                 "dweight[%zu]: filter row %zu, filter column %zu, channel in %zu, channel out %zu",
                 i, tap / l->kernel_size, tap % l->kernel_size, i / l->out.c % l->in.c,
                 i % l->out.c);
    }
    return text;
}

static void trial_job(void) {
    shared->launches = shared->threads = 0;
    const Work w = {.l = &trial.layer,
                    .n = trial.n,
                    .in = trial.in->device,
                    .weight = trial.weight->device,
                    .dout = trial.dout->device,
                    .din = trial.data ? trial.result->device : NULL,
                    .dweight = trial.data ? NULL : trial.result->device,
                    .accumulate = trial.accumulate};
    (trial.data ? lab_data_gradient : lab_weight_gradient)(w);
}

typedef enum { ONES, ONE, ANY } Content;

static void fill(Array *a, Content content) {
    real *to = a->before;
    const size_t count = a->bytes / sizeof *to;
    for (size_t i = 0; i < count; i++)
        to[i] = content == ONES ? 1 : content == ONE ? 0 : (real)draw(0, 8) - 4;
    if (content == ONE)
        to[draw(0, count - 1)] = 1;
}

// What is right, computed by the CPU after the kernel has run in the other process.
static real *right_result(void) {
    const Layer *l = &trial.layer;
    const size_t in_size = trial.n * shape_size(l->in);
    real *din = must_alloc(in_size * sizeof *din, "a test");
    real *dweight = must_alloc(l->weight_count * sizeof *dweight, "a test");
    real *scratch = must_alloc(l->weight_count * sizeof *scratch, "a test");
    real *dbias = must_alloc((l->bias_count + 1) * sizeof *dbias, "a test");
    if (trial.data && trial.accumulate)
        memcpy(din, trial.result->before, in_size * sizeof *din);
    naive_kernels.layers[l->kind].backward((Work){.l = l,
                                                  .n = trial.n,
                                                  .in = trial.in->before,
                                                  .weight = trial.weight->before,
                                                  .dout = trial.dout->before,
                                                  .din = din,
                                                  .dweight = dweight,
                                                  .dbias = l->bias_count ? dbias : NULL,
                                                  .scratch = scratch,
                                                  .accumulate = trial.accumulate});
    free(scratch);
    free(dbias);
    free(trial.data ? dweight : din);
    return trial.data ? din : dweight;
}

// Where the first number is that is not 0
static const char *one_of(const real *x, size_t count) {
    static char texts[2][200];
    static size_t next;
    char *text = texts[next++ % 2];
    size_t at = 0;
    while (at < count && x[at] == 0)
        at++;
    if (at == count)
        return "no 1";
    snprintf(text, sizeof texts[0], "its 1 at %s", place(at));
    return text;
}

/* ---- Wrong results that have a known cause --------------------------------------------------- */

static size_t pairs_of_channels(void) {
    return trial.layer.in.c * trial.layer.out.c;
}

// What a tap of the filter has in the array of the result or, of a data gradient, of the weights
static real *tap_of(real *x, size_t tap) {
    return x + tap * pairs_of_channels();
}

static void flip_taps(real *x) {
    const size_t taps = trial.layer.kernel_size * trial.layer.kernel_size;
    for (size_t t = 0; t < taps / 2; t++)
        for (size_t i = 0; i < pairs_of_channels(); i++) {
            const real kept = tap_of(x, t)[i];
            tap_of(x, t)[i] = tap_of(x, taps - 1 - t)[i];
            tap_of(x, taps - 1 - t)[i] = kept;
        }
}

static void clear_last_tap(real *x) {
    const size_t taps = trial.layer.kernel_size * trial.layer.kernel_size;
    memset(tap_of(x, taps - 1), 0, pairs_of_channels() * sizeof *x);
}

static bool result_equals(const real *x) {
    const real *got = trial.result->after;
    const size_t count = trial.result->bytes / sizeof *x;
    size_t at = 0;
    while (at < count && got[at] == x[at])
        at++;
    return at == count;
}

// Whether the result would be right with changed taps: of the filter, or of its gradient.
static bool right_with_taps(void (*change)(real *)) {
    Array *weight = trial.weight;
    real *kept = must_alloc(weight->bytes, "a test");
    memcpy(kept, weight->before, weight->bytes);
    if (trial.data)
        change(weight->before);
    real *want = right_result();
    if (!trial.data)
        change(want);
    const bool right = result_equals(want);
    memcpy(weight->before, kept, weight->bytes);
    free(kept);
    free(want);
    return right;
}

static bool right_for_first_image(void) {
    const size_t all = trial.n;
    trial.n = 1;
    real *want = right_result();
    trial.n = all;
    const bool right = result_equals(want);
    free(want);
    return right;
}

static bool is_mean(const real *want) {
    const real *got = trial.result->after;
    const size_t count = trial.result->bytes / sizeof *want;
    size_t at = 0;
    while (at < count && fabsf(got[at] * (real)trial.n - want[at]) < 1e-3f)
        at++;
    return at == count;
}

// The cause, if all of the wrong result shows it
static const char *known_cause(const real *want) {
    const size_t taps = trial.layer.kernel_size * trial.layer.kernel_size;
    const bool has_taps = taps > 1 && trial.layer.weight_count == taps * pairs_of_channels();
    if (!trial.data && trial.n > 1 && is_mean(want))
        return "; all are this sum divided by the number of images: is one image counted only, or "
               "their mean taken?";
    if (!trial.data && trial.n > 1 && right_for_first_image())
        return "; this is the gradient of image 0 alone: pixels are counted over all images";
    if (has_taps && right_with_taps(clear_last_tap))
        return "; the last tap of the filter is missing";
    if (has_taps && right_with_taps(flip_taps))
        return "; the taps are in reverse order: the filter is flipped";
    return "";
}

/* A sum that begins with an output's initial NaN keeps its bits, so the output looks as if it was
   not written. With zeros there instead, it is right. */
static void explain_unwritten(const real *want) {
    const size_t count = trial.result->bytes / sizeof *want;
    memset(trial.result->before, 0, trial.result->bytes);
    run_trial(trial_job);
    if (memcmp(trial.result->after, want, count * sizeof *want) == 0)
        wrong(
            "%s: the result is NaN, but right if it held 0 before: the sum must begin with 0, not "
            "with what was there",
            shape_text());
}

static void check_result(Content content) {
    const real *got = trial.result->after;
    real *want = right_result();
    const size_t count = trial.result->bytes / sizeof *want;
    size_t wrongs = 0, missing = 0, at = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &got[i], sizeof bits);
        missing += bits == unwritten;
        at = got[i] == want[i] || wrongs++ ? at : i;
    }
    if (missing > 0 && !trial.accumulate)
        explain_unwritten(want);
    if (missing == count)
        wrong("%s: none of the %zu results was written: was a kernel launched?", shape_text(),
              count);
    if (missing > 0)
        wrong("%s: %zu of the %zu results were never written: are there too few threads?",
              shape_text(), missing, count);
    if (wrongs > 0 && isnan(got[at]))
        wrong("%s: %s is NaN: a number outside of an array was read, or the sum does not begin "
              "with 0",
              shape_text(), place(at));
    if (wrongs > 0 && content == ONE)
        wrong("%s: one number of each operand is 1, the others are 0: the result has %s, "
              "expected %s: are indices mixed up?%s",
              shape_text(), one_of(got, count), one_of(want, count), known_cause(want));
    if (wrongs > 0)
        wrong("%s%s: %s is %g, expected %g (%zu of %zu results are wrong)%s", shape_text(),
              content == ONES ? ", all operands 1" : "", place(at), (double)got[at],
              (double)want[at], wrongs, count, known_cause(want));
    free(want);
}

static void gradient_of(bool data, Layer l, size_t n, bool accumulate, Content content) {
    begin_trial();
    trial.layer = l, trial.n = n, trial.data = data, trial.accumulate = accumulate;
    trial.in = new_input("in", n * shape_size(l.in) * sizeof(real));
    trial.weight = new_input("weight", l.weight_count * sizeof(real));
    trial.dout = new_input("dout", n * shape_size(l.out) * sizeof(real));
    trial.result = new_output(data ? "din" : "dweight",
                              (data ? n * shape_size(l.in) : l.weight_count) * sizeof(real));
    fill(trial.in, content);
    fill(trial.weight, content);
    fill(trial.dout, content);
    if (accumulate)
        fill(trial.result, ANY);
    run_trial(trial_job);
    check_result(content);
}

static void gradients_of(bool data, Layer l, size_t n) {
    gradient_of(data, l, n, false, ONES);
    for (size_t i = 0; i < 4; i++)
        gradient_of(data, l, n, false, ONE);
    gradient_of(data, l, n, false, ANY);
}

static void simple(bool data) {
    gradients_of(data, conv((Shape){5, 8, 3}, 4, 3, 1, 0), 1);
    gradients_of(data, conv((Shape){1, 1, 1}, 1, 1, 1, 0), 1);
    for (size_t i = 0; i < 4; i++) {
        const size_t kernel = draw(1, 5);
        gradients_of(data,
                     conv((Shape){kernel + draw(0, 6), kernel + draw(0, 6), draw(1, 5)}, draw(1, 7),
                          kernel, 1, 0),
                     1);
    }
}

static void general(bool data) {
    gradients_of(data, conv((Shape){7, 10, 2}, 4, 3, 2, 1), 3);
    for (size_t i = 0; i < 4; i++) {
        const size_t kernel = draw(1, 5), padding = draw(0, kernel - 1);
        gradients_of(data,
                     conv((Shape){kernel + draw(0, 6), kernel + draw(0, 6), draw(1, 4)}, draw(1, 7),
                          kernel, draw(1, 3), padding),
                     draw(1, 4));
    }
    gradients_of(data, fully_connected((Shape){draw(1, 3), draw(1, 4), draw(1, 9)}, draw(1, 20)),
                 draw(1, 9));
}

static void test_data(void) {
    simple(true);
}

static void test_data_general(void) {
    general(true);
    for (size_t i = 0; i < 3; i++)
        gradient_of(true, conv((Shape){draw(4, 8), draw(4, 8), 2}, 3, 3, draw(1, 2), 1), 2, true,
                    ANY);
}

static void test_weight(void) {
    simple(false);
}

static void test_weight_general(void) {
    general(false);
}

// Each result has a thread of its own; only the emulator counts launches.
static void test_launches(void) {
    for (size_t data = 0; data < 2; data++) {
        gradient_of(data, conv((Shape){9, 7, 3}, 8, 3, 1, 1), 2, false, ANY);
        const size_t count = trial.result->bytes / sizeof(real);
        if (shared->launches != 1)
            wrong("%s launched %zu kernels, expected 1",
                  data ? "data_gradient()" : "weight_gradient()", shared->launches);
        if (shared->threads < count || shared->threads > count + 1024)
            wrong("%s: %zu results and %zu threads; expected one for each result, in blocks of at "
                  "most "
                  "1024",
                  data ? "data_gradient()" : "weight_gradient()", count, shared->threads);
    }
}

/* ---- overlap() ------------------------------------------------------------------------------- */

typedef struct Span {
    double begin, end;
} Span;
double overlap(const Span *a, size_t a_count, const Span *b, size_t b_count); // overlap.c

enum { MOST_SPANS = 40, LINE = 120, UNITS = 4 };
static struct {
    Span spans[2][MOST_SPANS];
    size_t counts[2];
    double *result; // shared
} times;

static void overlap_job(void) {
    *times.result = overlap(times.spans[0], times.counts[0], times.spans[1], times.counts[1]);
}

static const char *spans_text(size_t k) {
    static char texts[2][400];
    size_t at = 0;
    texts[k][0] = 0;
    for (size_t i = 0; i < times.counts[k] && at < sizeof texts[0] - 40; i++)
        at += (size_t)snprintf(texts[k] + at, sizeof texts[0] - at, " %g..%g",
                               times.spans[k][i].begin, times.spans[k][i].end);
    return texts[k];
}

static Span span(size_t begin, size_t end) {
    return (Span){(double)begin / UNITS, (double)end / UNITS};
}

static size_t units(double time) {
    return (size_t)(time * UNITS);
}

// Spans end at multiples of 1 / UNITS, so that time can be counted on a line of LINE units.
static void check_overlap(void) {
    char running[2][LINE] = {{0}};
    double want = 0;
    if (!times.result)
        times.result = shared_memory(sizeof *times.result);
    *times.result = NAN;
    begin_trial();
    why_ended = ": was memory beyond an array or a malloc() written?";
    run_trial(overlap_job);
    for (size_t k = 0; k < 2; k++)
        for (size_t i = 0; i < times.counts[k]; i++)
            for (size_t t = units(times.spans[k][i].begin); t < units(times.spans[k][i].end); t++)
                running[k][t] = 1;
    for (size_t t = 0; t < LINE; t++)
        want += running[0][t] && running[1][t] ? 1.0 / UNITS : 0;
    if (!(fabs(*times.result - want) < 1e-6))
        wrong("a:%s; b:%s: overlap() is %g, expected %g", spans_text(0), spans_text(1),
              *times.result, want);
}

static void set_spans(size_t k, size_t count, size_t longest, bool apart) {
    size_t at = draw(0, 3);
    times.counts[k] = count;
    for (size_t i = 0; i < count; i++) {
        const size_t begin = apart ? at : draw(0, LINE - longest - 1), length = draw(1, longest);
        times.spans[k][i] = span(begin, begin + length);
        at = begin + length + draw(0, 4);
    }
}

static void test_overlap(void) {
    times.spans[0][0] = span(2, 5);
    times.spans[1][0] = span(3, 9);
    times.counts[0] = times.counts[1] = 1;
    check_overlap();
    for (size_t i = 0; i < 12; i++) { // in order, none overlaps another of its list
        set_spans(0, draw(1, 6), 9, true);
        set_spans(1, draw(1, 6), 9, true);
        check_overlap();
    }
}

static void test_overlap_general(void) {
    for (size_t i = 0; i < 24; i++) { // in any order, nested, equal, none
        set_spans(0, draw(0, 12), 30, false);
        set_spans(1, draw(0, 12), i % 2 ? 30 : 4, false);
        for (size_t j = 0; i % 3 == 0 && j < times.counts[0]; j++)
            times.spans[1][j] = times.spans[0][j];
        times.counts[1] = i % 3 == 0 ? times.counts[0] : times.counts[1];
        check_overlap();
    }
}

int main(int argc, char **argv) {
    static const NamedTest tests[] = {
        {"data", test_data},
        {"data-general", test_data_general},
        {"weight", test_weight},
        {"weight-general", test_weight_general},
        {"launches", test_launches},
        {"overlap", test_overlap},
        {"overlap-general", test_overlap_general},
    };
    draw_seed();
    gpu = kernels_in(NAIVE, FP32);
    run_named(tests, sizeof tests / sizeof *tests, argc, argv);
    send_token();
    return 0;
}
