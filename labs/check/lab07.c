/* lab07.c - lab 7's tests of the loss scaler, the layouts and the update, on a GPU or in the
   emulator: `lab07 TEST`. trials.h explains how kernels are run. */
#define CNN_NO_MAIN
#include "../../cnn.c"
#include "trials.h"

/* ---- The loss scaler ------------------------------------------------------------------------- */

static LossScale *scale_of(const Array *a) {
    return a->after;
}

static Array *new_scale(LossScale before) {
    Array *a = new_output("scale", sizeof before);
    memcpy(a->before, &before, sizeof before);
    return a;
}

static struct {
    Array *scale, *grad;
    size_t count;
} counted;

static void count_job(void) {
    gpu->count_not_finite(counted.scale->device, counted.grad->device, counted.count);
}

static const char *name_of_number(real x) {
    return isnan(x) ? "NaN" : x > 0 ? "Inf" : "-Inf";
}

/* `count` finite gradients, among them the largest and the smallest ones, and `bad` others.
   Counters begin above 0, since a step may have counted losses already. */
static void count_of(size_t count, size_t bad) {
    static const real others[] = {(real)INFINITY, (real)-INFINITY, (real)NAN};
    const LossScale before = {1024, 7, 3, (uint32_t)draw(0, 5)};
    size_t at = 0, found = 0;
    real last = 0;
    begin_trial();
    counted.count = count;
    counted.scale = new_scale(before);
    counted.grad = new_input("grad", count * sizeof(real));
    real *grad = counted.grad->before;
    for (size_t i = 0; i < count; i++) {
        static const real extreme[] = {3.4e38f, -3.4e38f, 1e-42f, 0, 65504, 1e10f};
        grad[i] = i % 3 == 0 ? extreme[draw(0, 5)] : (real)draw(0, 100) - 50;
    }
    for (size_t i = 0; i < bad; i++)
        grad[i == 0 ? count - 1 : draw(0, count - 1)] = others[draw(0, 2)];
    for (size_t i = 0; i < count; i++)
        if (!isfinite(grad[i])) {
            last = grad[i];
            at = i;
            found++;
        }
    run_trial(count_job);
    const LossScale *s = scale_of(counted.scale);
    if (found == 0 && s->not_finite != before.not_finite)
        wrong("%zu gradients, all finite: not_finite was %u and became %u; 3.4e38 and 1e-42 are "
              "finite, too, and what lies beyond the last gradient does not count",
              count, before.not_finite, s->not_finite);
    if (found > 0 && s->not_finite == before.not_finite)
        wrong(
            "%zu gradients, number %zu is %s: not_finite is still %u; is every gradient examined, "
            "and is a NaN, which is neither < nor > anything, found?",
            count, at, name_of_number(last), before.not_finite);
    if (s->not_finite != before.not_finite + found)
        wrong(
            "%zu gradients, %zu of them not finite: not_finite was %u and became %u, expected %zu: "
            "it is +=, by many threads at once (atomicAdd), and nothing beyond the last gradient "
            "counts",
            count, found, before.not_finite, s->not_finite, before.not_finite + found);
    if (s->scale != before.scale || s->steps != before.steps || s->skipped != before.skipped)
        wrong("count_not_finite() has changed scale, steps or skipped; expected: only not_finite");
}

static void test_count(void) {
    static const size_t counts[] = {1, 3, 4, 255, 256, 257, 1023, 4099};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        count_of(counts[i], 0);
        count_of(counts[i], 1);
        count_of(counts[i], draw(1, 20));
    }
}

// For the race detector: two threads that find something
static void test_race(void) {
    count_of(600, 0);
    count_of(600, 600);
}

static Array *adjusted;

static void adjust_job(void) {
    gpu->adjust_scale(adjusted->device);
}

static void adjust_of(LossScale before) {
    begin_trial();
    adjusted = new_scale(before);
    run_trial(adjust_job);
    const LossScale *s = scale_of(adjusted);
    const bool skips = before.not_finite > 0, grows = !skips && before.steps == GROWTH_INTERVAL - 1;
    char was[160];
    snprintf(was, sizeof was, "scale %g, steps %u, skipped %u, not_finite %u: after adjust_scale()",
             (double)before.scale, before.steps, before.skipped, before.not_finite);
    if (skips && s->scale != before.scale / 2)
        wrong("%s the scale is %g, expected %g: a step that was skipped halves it", was,
              (double)s->scale, (double)before.scale / 2);
    if (grows && s->scale != before.scale * 2)
        wrong("%s the scale is %g, expected %g: this was good step %d since the scale was changed, "
              "GROWTH_INTERVAL",
              was, (double)s->scale, (double)before.scale * 2, GROWTH_INTERVAL);
    if (!skips && !grows && s->scale != before.scale)
        wrong("%s the scale is %g, expected %g: only the GROWTH_INTERVAL-th good step, or a step "
              "that is skipped, changes it",
              was, (double)s->scale, (double)before.scale);
    if (s->steps != (skips || grows ? 0 : before.steps + 1))
        wrong("%s steps is %u, expected %u: it counts good steps since the scale was changed", was,
              s->steps, skips || grows ? 0 : before.steps + 1);
    if (s->skipped != before.skipped + skips)
        wrong("%s skipped is %u, expected %u: it counts steps, not gradients", was, s->skipped,
              before.skipped + skips);
    if (s->not_finite != 0)
        wrong("%s not_finite is %u, expected 0: the next step would be skipped, too", was,
              s->not_finite);
}

static void test_adjust(void) {
    adjust_of((LossScale){INIT_SCALE, 0, 0, 0});
    adjust_of((LossScale){INIT_SCALE, 0, 0, 1});
    adjust_of((LossScale){1024, GROWTH_INTERVAL - 2, 4, 0});
    adjust_of((LossScale){1024, GROWTH_INTERVAL - 1, 4, 0});
    adjust_of((LossScale){1024, GROWTH_INTERVAL - 1, 4, 9});
    adjust_of((LossScale){1, 5, 0, 1}); // below 1 is allowed
    for (size_t i = 0; i < 6; i++)
        adjust_of((LossScale){ldexpf(1, (int)draw(0, 20)), (uint32_t)draw(0, GROWTH_INTERVAL - 1),
                              (uint32_t)draw(0, 9), (uint32_t)(draw(0, 1) * draw(1, 999))});
}

// Steps of an fp16 training, one of which has an infinite gradient.
enum { STEPS = 7, PARAMS = 1001 };
static struct {
    Array *scale, *param, *grad, *state, *param16;
    real *params; // [STEPS][PARAMS], after each step; shared
    LossScale *scales;
    size_t bad, at;
} sequence;

static void sequence_job(void) {
    StepInputs *step = gpu->device->alloc(sizeof *step);
    real *grad = sequence.grad->before;
    gpu->device->set_step(step, (StepInputs){.lr = .5});
    for (size_t i = 0; i < STEPS; i++) {
        LossScale now;
        gpu->device->copy(&now, sequence.scale->device, sizeof now);
        for (size_t j = 0; j < PARAMS; j++) // of a loss whose gradient is j % 7 - 3
            grad[j] = now.scale * (real)((int)(j % 7) - 3);
        if (i == sequence.bad)
            grad[sequence.at] = (real)INFINITY;
        gpu->device->copy(sequence.grad->device, grad, PARAMS * sizeof *grad);
        gpu->count_not_finite(sequence.scale->device, sequence.grad->device, PARAMS);
        gpu->update[SGD]((Update){.param = sequence.param->device,
                                  .grad = sequence.grad->device,
                                  .state = {sequence.state->device},
                                  .param16 = sequence.param16->device,
                                  .scale = sequence.scale->device,
                                  .count = PARAMS,
                                  .step = step});
        gpu->adjust_scale(sequence.scale->device);
        gpu->device->copy(sequence.params + i * PARAMS, sequence.param->device,
                          PARAMS * sizeof(real));
        gpu->device->copy(&sequence.scales[i], sequence.scale->device, sizeof now);
    }
}

static void sequence_of(size_t good_before, size_t bad) {
    begin_trial();
    sequence.bad = bad;
    sequence.at = draw(0, PARAMS - 1);
    sequence.scale = new_scale((LossScale){1024, (uint32_t)good_before, 0, 0});
    sequence.param = new_output("param", PARAMS * sizeof(real));
    sequence.grad = new_output("grad", PARAMS * sizeof(real));
    sequence.state = new_output("momentum", PARAMS * sizeof(real));
    sequence.param16 = new_output("param16", PARAMS * gpu->element_bytes);
    memset(sequence.param->before, 0, PARAMS * sizeof(real));
    memset(sequence.state->before, 0, PARAMS * sizeof(real));
    run_trial(sequence_job);
    double scale = 1024, moved = 0; // moved: by the steps so far, in units of the gradient
    size_t good = good_before;
    for (size_t i = 0; i < STEPS; i++) {
        const bool skips = i == bad, grows = !skips && good + 1 == GROWTH_INTERVAL;
        scale *= skips ? .5 : grows ? 2 : 1;
        good = skips || grows ? 0 : good + 1;
        moved += skips ? 0 : .5;
        for (size_t j = 0; j < PARAMS; j++) {
            const double want = -moved * ((int)(j % 7) - 3), got = sequence.params[i * PARAMS + j];
            if (!(fabs(got - want) < 1e-3))
                wrong(
                    "step %zu of %d, step %zu has an infinite gradient: param[%zu] is %g, expected "
                    "%g: %s",
                    i, STEPS, bad, j, got, want,
                    i < bad ? "this step and those before are good ones"
                    : i == bad
                        ? "this step must change nothing"
                        : "exactly one step is skipped, and gradients are divided by the scale");
        }
        if (sequence.scales[i].scale != (real)scale || sequence.scales[i].skipped != (i >= bad))
            wrong("after step %zu of %d, step %zu has an infinite gradient, %zu good steps before: "
                  "scale %g, expected %g; skipped %u, expected %d",
                  i, STEPS, bad, good_before, (double)sequence.scales[i].scale, scale,
                  sequence.scales[i].skipped, i >= bad);
    }
}

static void test_sequence(void) {
    sequence.params = shared_memory(STEPS * PARAMS * sizeof(real));
    sequence.scales = shared_memory(STEPS * sizeof(LossScale));
    sequence_of(0, draw(1, STEPS - 2));
    sequence_of(GROWTH_INTERVAL - 2, 4);
    sequence_of(GROWTH_INTERVAL - draw(2, 4), STEPS - 1);
}

/* ---- Layouts --------------------------------------------------------------------------------- */

// At the end of the assembled cnn_kernels.cu: at(i / c, i % c), channel(i) and pixel(i)
void lab_layout(unsigned *at, unsigned *channel, unsigned *pixel, Shape s, bool nchw,
                unsigned count);

static struct {
    Array *at, *channel, *pixel, *in, *out, *pooled;
    Shape s;
    size_t n;
    bool nchw;
} laid;

static void layout_job(void) {
    lab_layout(laid.at->device, laid.channel->device, laid.pixel->device, laid.s, laid.nchw,
               (unsigned)(laid.n * shape_size(laid.s)));
}

static size_t place_of(Shape s, bool nchw, size_t pixel, size_t c) {
    const size_t inner = s.h * s.w, image = pixel / inner;
    return nchw ? (image * s.c + c) * inner + pixel % inner : pixel * s.c + c;
}

static void check_layout(void) {
    const unsigned *at = laid.at->after, *channel = laid.channel->after, *pixel = laid.pixel->after;
    const char *name = laid.nchw ? "NCHW" : "NHWC";
    const Shape s = laid.s;
    for (size_t p = 0; p < laid.n * s.h * s.w; p++)
        for (size_t c = 0; c < s.c; c++) {
            const size_t i = place_of(s, laid.nchw, p, c), inner = s.h * s.w;
            char where[160];
            snprintf(where, sizeof where,
                     "%s, images of %zu x %zu x %zu (h, w, c): image %zu, y %zu, "
                     "x %zu, channel %zu, which is pixel %zu,",
                     name, s.h, s.w, s.c, p / inner, p % inner / s.w, p % s.w, c, p);
            if (at[p * s.c + c] != i)
                wrong("%s lies at %zu; at() says %u", where, i, at[p * s.c + c]);
            if (channel[i] != c)
                wrong("%s lies at %zu; channel(%zu) says %u", where, i, i, channel[i]);
            if (pixel[i] != p)
                wrong("%s lies at %zu; pixel(%zu) says %u", where, i, i, pixel[i]);
        }
}

static void layout_of_shape(Shape s, size_t n, bool nchw) {
    const size_t count = n * shape_size(s);
    begin_trial();
    laid.s = s, laid.n = n, laid.nchw = nchw;
    laid.at = new_output("at", count * sizeof(unsigned));
    laid.channel = new_output("channel", count * sizeof(unsigned));
    laid.pixel = new_output("pixel", count * sizeof(unsigned));
    run_trial(layout_job);
    check_layout();
}

static void test_layout(void) {
    for (size_t nchw = 0; nchw < 2; nchw++) {
        layout_of_shape((Shape){2, 3, 4}, 2, nchw);
        layout_of_shape((Shape){1, 1, 7}, 3, nchw);
        layout_of_shape((Shape){5, 4, 1}, 3, nchw);
        for (size_t i = 0; i < 4; i++)
            layout_of_shape((Shape){draw(1, 9), draw(1, 9), draw(1, 9)}, draw(1, 5), nchw);
    }
}

// Images from the loader, then a max-pool of 2 x 2.
static Layer pool;

static void images_job(void) {
    gpu->load_images(laid.out->device, laid.in->device, laid.n, laid.s, laid.nchw);
    gpu->layers[MAXPOOL2D].forward(
        (Work){.l = &pool,
               .n = laid.n,
               .in = laid.out->device,
               .out = laid.pooled->device,
               .saved = gpu->device->alloc(laid.n * shape_size(pool.out)),
               .transposed = laid.nchw ? gpu->device->alloc(64) : NULL});
}

static void images_of(bool nchw) {
    const Shape s = {2 * draw(1, 5), 2 * draw(1, 5), draw(1, 7)}, half = {s.h / 2, s.w / 2, s.c};
    const size_t n = draw(1, 4), count = n * shape_size(s);
    begin_trial();
    laid.s = s, laid.n = n, laid.nchw = nchw;
    laid.in = new_input("images", count * sizeof(real));
    laid.out = new_output("the network's input", count * sizeof(real));
    laid.pooled = new_output("the max-pool's output", n * shape_size(half) * sizeof(real));
    pool = (Layer){.kind = MAXPOOL2D, .in = s, .out = half, .kernel_size = 2, .stride = 2};
    real *in = laid.in->before;
    for (size_t i = 0; i < count; i++)
        in[i] = (real)i;
    run_trial(images_job);
    const real *out = laid.out->after, *pooled = laid.pooled->after;
    for (size_t p = 0; p < n * s.h * s.w; p++)
        for (size_t c = 0; c < s.c; c++)
            if (out[place_of(s, nchw, p, c)] != in[p * s.c + c])
                wrong("load_images(), %s: channel %zu of pixel %zu is %g, expected %g",
                      nchw ? "NCHW" : "NHWC", c, p, (double)out[place_of(s, nchw, p, c)],
                      (double)in[p * s.c + c]);
    for (size_t p = 0; p < n * half.h * half.w; p++)
        for (size_t c = 0; c < s.c; c++) { // the last pixel of each window has the largest number
            const size_t row = p / half.w * 2 + 1, column = p % half.w * 2 + 1;
            const real want = in[(row * s.w + column) * s.c + c];
            if (pooled[place_of(half, nchw, p, c)] != want)
                wrong("a max-pool of %s images: channel %zu of pixel %zu is %g, expected %g",
                      nchw ? "NCHW" : "NHWC", c, p, (double)pooled[place_of(half, nchw, p, c)],
                      (double)want);
        }
}

static void test_images(void) {
    for (size_t i = 0; i < 6; i++)
        images_of(i % 2);
}

/* ---- The update ------------------------------------------------------------------------------ */

static struct {
    Array *scale, *param, *grad, *state[2], *param16;
    Update u;
    bool sgd, only_kept; // only_kept: a state that the rule does not keep is NULL, as in a training
    double lr;
} updated;

// How many states the rule keeps
static size_t kept_states(void) {
    return !updated.sgd ? 2 : updated.u.momentum != 0;
}

static void update_job(void) {
    StepInputs *step = gpu->device->alloc(sizeof *step);
    gpu->device->set_step(step, (StepInputs){.lr = updated.lr});
    gpu->device->synchronize();
    shared->launches = 0;
    Update u = updated.u;
    u.step = step;
    u.scale = updated.scale->device;
    u.param = updated.param->device;
    u.grad = updated.grad->device;
    u.param16 = gpu->element_bytes < sizeof(real) ? updated.param16->device : NULL;
    for (size_t k = 0; k < 2; k++)
        u.state[k] = updated.only_kept && k >= kept_states() ? NULL : updated.state[k]->device;
    gpu->update[updated.sgd ? SGD : ADADELTA](u);
}

// The formulas of sgd() and adadelta() in cnn.c, section 7, in double; g: with the weight decay
static double rule(const Update *u, double p, double g, double *a, double *b) {
    if (updated.sgd && u->momentum == 0)
        return p - updated.lr * g;
    if (updated.sgd) {
        *a = u->momentum * *a + g;
        return p - updated.lr * (u->nesterov ? g + u->momentum * *a : *a);
    }
    *a = .9 * *a + .1 * g * g;
    const double delta = sqrt(*b + 1e-6) / sqrt(*a + 1e-6) * g;
    *b = .9 * *b + .1 * delta * delta;
    return p - updated.lr * delta;
}

// What is right: grad / scale + weight_decay param, then the rule
static double right_update(const Update *u, double p, double g, double *a, double *b) {
    const double scale = ((const LossScale *)updated.scale->before)->scale;
    return rule(u, p, g / scale + u->weight_decay * p, a, b);
}

static bool is_near(double got, double want) {
    return fabs(got - want) <= 2e-5 * fabs(want) + 1e-6;
}

// What a wrong parameter would be right for
static const char *why_wrong(const Update *u, double p, double g, const double *state, double got) {
    const double scale = ((const LossScale *)updated.scale->before)->scale;
    const struct {
        double gradient;
        const char *why;
    } wrongs[] = {
        {g + u->weight_decay * p, ": this gradient was not divided by the scale"},
        {(g + u->weight_decay * p) / scale, ": the weight decay was divided by the scale, too"},
        {g / scale, ": there is no weight decay in it"},
    };
    for (size_t i = 0; i < sizeof wrongs / sizeof *wrongs; i++) {
        double a = state[0], b = state[1];
        if (is_near(got, rule(u, p, wrongs[i].gradient, &a, &b)))
            return wrongs[i].why;
    }
    return is_near(got, p) ? ": it is as it was before" : "";
}

static real fp16_value(uint16_t bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const real size =
        exponent ? ldexpf((real)(mantissa + 1024), exponent - 25) : ldexpf((real)mantissa, -24);
    return bits & 0x8000 ? -size : size;
}

static const char *what_update(void) {
    static char text[200];
    snprintf(text, sizeof text,
             "%s, %s, %zu parameters, momentum %g%s, weight decay %g, loss scale %g",
             gpu->precision == FP16 ? "fp16" : "fp32", updated.sgd ? "sgd" : "adadelta",
             updated.u.count, updated.u.momentum, updated.u.nesterov ? " (nesterov)" : "",
             updated.u.weight_decay, (double)((const LossScale *)updated.scale->before)->scale);
    return text;
}

static void check_unchanged(const Array *a) {
    if (memcmp(a->before, a->after, a->bytes) != 0)
        wrong("%s: %s was changed in a step that is skipped, since scale->not_finite is above 0",
              what_update(), a->name);
}

static void check_update(void) {
    const Update *u = &updated.u;
    const real *p0 = updated.param->before, *p1 = updated.param->after;
    const real *g = updated.grad->before;
    for (size_t i = 0; i < u->count; i++) {
        double old[2], state[2];
        for (size_t k = 0; k < 2; k++)
            old[k] = state[k] = ((const real *)updated.state[k]->before)[i];
        const double want = right_update(u, p0[i], g[i], &state[0], &state[1]);
        if (!is_near(p1[i], want))
            wrong("%s: param[%zu] was %g, its gradient times the scale %g; it became %g, expected "
                  "%g%s",
                  what_update(), i, (double)p0[i], (double)g[i], (double)p1[i], want,
                  why_wrong(u, p0[i], g[i], old, p1[i]));
        for (size_t k = 0; k < 2; k++)
            if (!is_near(((const real *)updated.state[k]->after)[i], state[k]))
                wrong("%s: state[%zu][%zu] became %g, expected %g%s", what_update(), k, i,
                      (double)((const real *)updated.state[k]->after)[i], state[k],
                      k >= kept_states() ? ": it is not kept, and must not be written" : "");
        const real copy = gpu->element_bytes < sizeof(real)
                              ? fp16_value(((uint16_t *)updated.param16->after)[i])
                              : p1[i];
        if (fabsf(copy - p1[i]) > 1e-3f * fabsf(p1[i]) + 1e-7f)
            wrong("%s: param16[%zu], the 16-bit copy of param[%zu] = %g, is %g%s", what_update(), i,
                  i, (double)p1[i], (double)copy,
                  fabsf(copy - p0[i]) <= 1e-3f * fabsf(p0[i]) ? ": the parameter before this update"
                                                              : "");
    }
}

static void update_of(bool sgd, size_t count, double momentum, bool nesterov, bool skips) {
    begin_trial();
    const bool halves = gpu->element_bytes < sizeof(real);
    updated.sgd = sgd;
    updated.lr = .01 * (double)draw(1, 50);
    updated.u = (Update){.count = count,
                         .momentum = momentum,
                         .nesterov = nesterov,
                         .weight_decay = .01 * (double)draw(0, 3)};
    updated.scale = new_scale((LossScale){.scale = halves ? ldexpf(1, (int)draw(1, 12)) : 1,
                                          .not_finite = skips ? (uint32_t)draw(1, 9) : 0});
    updated.param = new_output("param", count * sizeof(real));
    updated.grad = new_output("grad", count * sizeof(real)); // may be used as memory
    updated.state[0] = new_output("state[0]", count * sizeof(real));
    updated.state[1] = new_output("state[1]", count * sizeof(real));
    updated.param16 = new_output("param16", count * gpu->element_bytes);
    for (size_t i = 0; i < count; i++) {
        ((real *)updated.param->before)[i] = (real)(.1 * ((double)draw(0, 200) - 100));
        ((real *)updated.grad->before)[i] = (real)(.3 * ((double)draw(0, 200) - 100));
        for (size_t k = 0; k < 2; k++)
            ((real *)updated.state[k]->before)[i] = (real)(.05 * (double)draw(0, 100));
    }
    why_ended = updated.only_kept
                    ? ", after an access to a state that the rule does not keep: that "
                      "memory may not be there (RULE::states(u) counts those it keeps)"
                    : "";
    run_trial(update_job);
    if (memcmp(updated.scale->before, updated.scale->after, sizeof(LossScale)) != 0)
        wrong("%s: the update has changed the loss scale; that is adjust_scale()'s task",
              what_update());
    if (!skips)
        check_update();
    for (size_t k = 0; skips && k < 2; k++)
        check_unchanged(updated.state[k]);
    if (skips) {
        check_unchanged(updated.param);
        check_unchanged(updated.param16);
    }
}

static void test_update(void) {
    static const Precision precisions[] = {FP32, FP16};
    for (size_t i = 0; i < 2; i++) {
        gpu = kernels_in(KERNELS_BEST, precisions[i]);
        update_of(true, 1000, 0, false, false);
        update_of(true, draw(1, 7), .9, false, false);
        update_of(true, draw(255, 1030), .9, true, false);
        update_of(false, draw(255, 1030), 0, false, false);
        updated.only_kept = true;
        update_of(true, draw(255, 1030), 0, false, false);
        update_of(true, draw(255, 1030), .9, false, false);
        updated.only_kept = false;
    }
}

static void test_skipped(void) {
    gpu = kernels_in(KERNELS_BEST, FP16);
    update_of(true, draw(255, 1030), .9, false, false); // an update that does nothing skips nothing
    update_of(true, draw(255, 1030), .9, false, true);
    update_of(false, draw(255, 1030), 0, false, true);
}

static void test_launches(void) {
    gpu = kernels_in(KERNELS_BEST, FP16);
    update_of(true, 4096, .9, false, false);
    if (shared->launches != 1)
        wrong("an update has launched %zu kernels, expected 1: the unscaled gradient, the decayed "
              "one "
              "and the new parameter stay in registers",
              shared->launches);
}

// In the program that counts what kernels read and write, and prints it at its end.
static void test_traffic(void) {
    gpu = kernels_in(KERNELS_BEST, FP16);
    update_of(true, 4096, .9, false, false);
}

int main(int argc, char **argv) {
    static const NamedTest tests[] = {
        {"count", test_count},       {"race", test_race},       {"adjust", test_adjust},
        {"sequence", test_sequence}, {"layout", test_layout},   {"images", test_images},
        {"update", test_update},     {"skipped", test_skipped}, {"launches", test_launches},
        {"traffic", test_traffic},
    };
    draw_seed();
    gpu = kernels_in(KERNELS_BEST, FP16);
    const bool nhwc =
        argc > 1 && (strcmp(argv[1], "layout") == 0 || strcmp(argv[1], "images") == 0);
    if (nhwc)
        gpu = kernels_in(KERNELS_BEST, FP32);
    run_named(tests, sizeof tests / sizeof *tests, argc, argv);
    send_token();
    return 0;
}
