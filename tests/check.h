/* check.h - what test programs share: verdicts, the comparison of tensors, random numbers.

   Include it after cnn.c, whose types it uses. Prints a line for each test: `pass SUITE/NAME`,
   `fail SUITE/NAME: what` or `skip SUITE/NAME: why`. Every number is drawn from a fixed seed: a
   failure repeats. */

#include <float.h>

static const char *suite;
static const double epsilon = sizeof(real) == sizeof(double) ? DBL_EPSILON : FLT_EPSILON;

// The words of --kernels and --precision for these kernels
#define NAME_OF(kernels) choice_word("--kernels", (int)(kernels)->choice)
#define PRECISION_OF(kernels) choice_word("--precision", (int)(kernels)->precision)

static char context[256]; // what the test is looking at; ends up in the failure
static char failure[768]; // the first thing that went wrong in the test that runs; "" if nothing

static void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void verdict(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void skip(const char *name, const char *why) __attribute__((unused));

static void fail(const char *format, ...) {
    if (*failure)
        return;
    va_list args;
    va_start(args, format);
    int length = vsnprintf(failure, sizeof failure - sizeof context, format, args);
    va_end(args);
    length = (int)min_size((size_t)length, sizeof failure - sizeof context - 1);
    if (*context)
        snprintf(failure + length, sizeof failure - (size_t)length, " (%.250s)", context);
    for (char *at = failure; (at = strchr(at, '\n'));)
        *at = ' '; // a verdict is one line
}

static void verdict(const char *format, ...) {
    char name[128];
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    if (*failure)
        printf("fail %s/%s: %s\n", suite, name, failure);
    else
        printf("pass %s/%s\n", suite, name);
    fflush(stdout);
    *failure = *context = 0;
}

static void skip(const char *name, const char *why) {
    printf("skip %s/%s: %s\n", suite, name, why);
}

/* The only comparison of tensors. It asks what is right, so that a NaN on any side fails.
   bound NULL: they must be equal. */
static bool check_tensor(const char *name, const real *got, const real *want, const real *bound,
                         size_t count) {
    for (size_t i = 0; i < count; i++) {
        double a = (double)got[i], b = (double)want[i], most = bound ? (double)bound[i] : 0;
        if (isfinite(a) && isfinite(b) && fabs(a - b) <= most)
            continue;
        fail("%s[%zu of %zu] is %.9g, expected %.9g within %.3g", name, i, count, a, b, most);
        return false;
    }
    return true;
}

// A comparison that never fails would make every other test pass: so it is tested first.
static void test_comparison(void) {
    static const real want[4] = {1, 2, 3, 4}, bound[4] = {.5, .5, .5, .5};
    static const real wrong[4] = {(real)NAN, (real)INFINITY, (real)-INFINITY, 4};
    bool good =
        check_tensor("near", want, want, bound, 4) && check_tensor("equal", want, want, NULL, 4);
    for (size_t at = 0; at < 4; at++) {
        for (size_t kind = 0; kind < 4; kind++) {
            real got[4] = {1, 2, 3, 4};
            got[at] = kind < 3 ? wrong[kind] : got[at] + 1;
            good = !check_tensor("wrong", got, want, bound, 4) && good;
            good = !check_tensor("unequal", got, want, NULL, 4) && good;
        }
    }
    real nowhere[4] = {0, 0, (real)NAN, 0};
    good = !check_tensor("bound", want, want, nowhere, 4) && good;
    *failure = 0;
    if (!good)
        fail("the comparison missed a difference");
    verdict("comparison");
}

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
