/* lab09.c - tests of the warm-up for `make check LAB=9`: `lab09 TEST`.

   The student's part runs in a process of its own (apart.h), which computes the learning rates of
   all steps. They have to have certain properties. */

#define _GNU_SOURCE 1
#define CNN_NO_MAIN
#define CNN_NO_KERNELS // no layer is computed
#include "../../cnn.c"
#include "apart.h"
#include "report.h"

enum { MOST_RATES = 4096 };

static const char *const schedules[] = {"step", "cosine"};

typedef struct Shared {
    Apart apart;
    Settings settings;
    size_t steps; // of an epoch
    double rates[MOST_RATES];
} Shared;

static Shared *const shared = SHARED_MEMORY;

// In the worker
static void compute_rates(void) {
    const Settings s = shared->settings;
    const size_t steps = shared->steps;
    for (size_t i = 0; i < s.epochs * steps; i++)
        shared->rates[i] = learning_rate(&s, i / steps, i % steps, steps);
}

// The rates of all steps of all epochs
static void rates(const Settings *s, size_t steps, double *out) {
    shared->settings = *s;
    shared->steps = steps;
    const char *end = run_apart();
    if (end)
        wrong("learning_rate() %s", end);
    memcpy(out, shared->rates, s->epochs * steps * sizeof *out);
}

static size_t any(size_t low, size_t high) {
    return low + (size_t)rand() % (high - low + 1);
}

static bool near(double a, double b, double size) {
    return fabs(a - b) <= 1e-6 * size; // float will do
}

// A random run with a warm-up of `warmup` epochs before `left` others.
static Settings some_run(size_t schedule, size_t warmup, size_t left) {
    Settings s = {.schedule = (Schedule)schedule, .gamma = .3 + .1 * (double)any(0, 4)};
    s.lr = .01 * (double)any(1, 300);
    s.step_size = any(1, 3);
    s.warmup_epochs = warmup;
    s.epochs = warmup + left;
    return s;
}

/* In the warm-up each step adds as much as the first one has, and the last one has lr. */
static void test_warmup(void) {
    static double rate[MOST_RATES];
    for (size_t round = 0; round < 60; round++) {
        const size_t steps = any(1, 40), warmup = round % 5 + 1, count = warmup * steps;
        Settings s = some_run(round % 2, warmup, any(1, 5));
        rates(&s, steps, rate);
        const double first = rate[0], last = rate[count - 1];
        if (!(first > 0))
            wrong(
                "the first step has the rate %g, so it changes nothing; "
                "%zu steps of warm-up, lr %g; does the count begin with 0, or is a size_t divided "
                "by a size_t, which drops the fraction?",
                first, count, s.lr);
        if (steps > 1 && near(first, rate[steps - 1], s.lr))
            wrong("all %zu steps of epoch 0 have the rate %g: "
                  "it grows with each step, not with each epoch",
                  steps, first);
        for (size_t i = 0; i + 1 < count; i++)
            if (!near(rate[i + 1] - rate[i], first, s.lr))
                wrong("with %zu epochs of %zu steps as warm-up, the rate of epoch %zu, step %zu "
                      "is %.9g and the next step has %.9g; "
                      "each step adds as much as the first one has, %.9g",
                      warmup, steps, i / steps, i % steps, rate[i], rate[i + 1], first);
        if (!near(last, s.lr, s.lr))
            wrong("the last step of the warm-up, epoch %zu, step %zu, has the rate %.9g, "
                  "expected --lr %.9g",
                  warmup - 1, steps - 1, last, s.lr);
    }
}

/* After the warm-up a run has the rates that a run without it has from its beginning. */
static void test_after(void) {
    static double rate[MOST_RATES], alone[MOST_RATES];
    for (size_t round = 0; round < 60; round++) {
        const size_t steps = any(1, 40), warmup = round % 4, left = any(2, 8);
        Settings s = some_run(round % 2, warmup, left), without = s;
        without.warmup_epochs = 0;
        without.epochs = left;
        rates(&s, steps, rate);
        rates(&without, steps, alone);
        if (!near(alone[0], s.lr, s.lr))
            wrong("without a warm-up the first step has the rate %.9g, expected --lr %.9g%s",
                  alone[0], s.lr,
                  isfinite(alone[0]) ? "" : ": warmup_epochs is 0: was it divided by?");
        for (size_t i = 0; i < left * steps; i++)
            if (!near(rate[warmup * steps + i], alone[i], s.lr))
                wrong("--schedule %s: in epoch %zu, %zu epochs after the warm-up, the rate is "
                      "%.9g; a run without warm-up has %.9g in epoch %zu. "
                      "`e` counts the epochs since the warm-up",
                      schedules[s.schedule], warmup + i / steps, i / steps,
                      rate[warmup * steps + i], alone[i], i / steps);
    }
}

int main(int argc, char **argv) {
    if (is_worker(argc, argv))
        serve(compute_rates);
    start_worker("./rates", sizeof(Shared));
    srand((unsigned)(time(NULL) ^ getpid()));
    static const NamedTest tests[] = {{"warmup", test_warmup}, {"after", test_after}};
    run_named(tests, sizeof tests / sizeof *tests, argc, argv);
    send_token();
    return 0;
}
