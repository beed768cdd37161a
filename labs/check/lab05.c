/* lab05.c - lab 5's tests of convolutions, in the emulator, or on a GPU. Outputs are initialized to
   a NaN that no sum gives, all arrays lie between guard zones, and numbers are small integers, so
   that a sum is the same in every order. The kernels run in a process of their own (device.h).

     lab05 right K    change K is right, for one tile, several, and ragged shapes
     lab05 counts K   ... and reads and writes no more than it should
     lab05 steps      change 4 has one barrier a step, and loads before it computes
     lab05 speed      on a GPU: change 4 is faster than change 0

   WORKER=PROGRAM: the one with the kernels */
#include "device.h"
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

// At the end of the assembled conv.cu: lab05_device.cu
#define OF_THE_KERNELS __attribute__((weak))
OF_THE_KERNELS void lab_convolve(int change, const int *s, const float *in, const float *weight,
                                 float *out);
OF_THE_KERNELS double lab_microseconds(int change, const int *s, const float *in,
                                       const float *weight, float *out);
OF_THE_KERNELS void lab_begin_count(void);
OF_THE_KERNELS void lab_end_count(long accesses[4], long bytes[4], long *barriers,
                                  long *overlapped);

enum { GLOBAL_READ, GLOBAL_WRITE, SHARED_READ, SHARED_WRITE };
typedef struct Counts {
    long accesses[4], bytes[4], barriers, overlapped;
} Counts;

enum { CONVOLVE = OWN_CALLS, MEASURE, BEGIN_COUNT, END_COUNT };

typedef struct Shared {
    Calls calls;
    int change, sizes[8];
    float *in, *weight, *out;
    double us;
    Counts counts;
} Shared;

static Shared *const shared = SHARED_MEMORY;

// In the worker
static void own_call(int call) {
    Shared *s = shared;
    Counts *c = &s->counts;
    switch (call) {
    case CONVOLVE:
        lab_convolve(s->change, s->sizes, s->in, s->weight, s->out);
        break;
    case MEASURE:
        s->us = lab_microseconds(s->change, s->sizes, s->in, s->weight, s->out);
        break;
    case BEGIN_COUNT:
        lab_begin_count();
        break;
    case END_COUNT:
        lab_end_count(c->accesses, c->bytes, &c->barriers, &c->overlapped);
    }
}

static void serve_lab(void) {
    serve_call(own_call);
}

/* ---- Random numbers, fresh in each run ------------------------------------------------------- */

static uint64_t seed;

static int draw(int least, int most) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return least + (int)((seed >> 33) % (uint64_t)(most - least + 1));
}

/* ---- Shapes ---------------------------------------------------------------------------------- */

typedef struct Shape {
    int n, h, w, c, oc, kernel, stride, padding; // in this order in Shared.sizes
} Shape;

static int out_h(Shape s) {
    return (s.h + 2 * s.padding - s.kernel) / s.stride + 1;
}

static int out_w(Shape s) {
    return (s.w + 2 * s.padding - s.kernel) / s.stride + 1;
}

static int rows_of(Shape s) {
    return s.n * out_h(s) * out_w(s);
}

static int depth_of(Shape s) {
    return s.kernel * s.kernel * s.c;
}

static const char *shape_text(Shape s) {
    static char text[200];
    snprintf(text, sizeof text,
             "%d images of %d x %d x %d, filter %d x %d, stride %d, padding %d, %d channels out: "
             "%d rows, %d columns, depth %d",
             s.n, s.h, s.w, s.c, s.kernel, s.kernel, s.stride, s.padding, s.oc, rows_of(s), s.oc,
             depth_of(s));
    return text;
}

/* ---- Memory of the device between guard zones ------------------------------------------------ */

enum { GUARD = 4096 }; // numbers; a multiple of 4, since 16 bytes are read at once
static const uint32_t unwritten = 0x7FC0ABCD, guard_bits = 0x7FC0C5C5; // NaNs, which stay so in
static const uint32_t shared_bits = 0xFFFFFFFF; // sums; the emulator's uninitialized shared memory

typedef struct Array {
    const char *name;
    float *host, *device; // device: the first number after the guard
    size_t count;
    bool is_output;
} Array;

static void put_bits(float *to, uint32_t bits) {
    memcpy(to, &bits, sizeof bits);
}

static uint32_t bits_of(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

static float *must_alloc(size_t count) {
    float *numbers = malloc((count ? count : 1) * sizeof *numbers);
    if (!numbers)
        wrong("no memory for a test");
    return numbers;
}

static Array new_array(const char *name, size_t count, bool is_output) {
    Array a = {name, must_alloc(count), NULL, count, is_output};
    a.device = (float *)device_alloc((count + 2 * GUARD) * sizeof(float)) + GUARD;
    for (size_t i = 0; i < count; i++)
        a.host[i] = (float)draw(-4, 4);
    return a;
}

static void send(const Array *a) {
    const size_t count = a->count + 2 * GUARD;
    float *all = must_alloc(count);
    for (size_t i = 0; i < count; i++)
        put_bits(&all[i], a->is_output ? unwritten : guard_bits);
    for (size_t i = 0; i < GUARD; i++)
        put_bits(&all[i], guard_bits), put_bits(&all[count - 1 - i], guard_bits);
    if (!a->is_output)
        memcpy(all + GUARD, a->host, a->count * sizeof *all);
    copy_to_device((char *)(a->device - GUARD), all, count * sizeof *all);
    free(all);
}

// Copies an array back; its guards, and an input, must be unchanged.
static void fetch(const Array *a) {
    const size_t count = a->count + 2 * GUARD;
    float *all = must_alloc(count);
    copy_from_device(all, (char *)(a->device - GUARD), count * sizeof *all);
    for (size_t i = 0; i < GUARD; i++) {
        if (bits_of(all[GUARD + a->count + i]) != guard_bits)
            wrong(
                "%s has %zu numbers, and number %zu, beyond its end, was written: rows and columns "
                "that do not exist must not be stored",
                a->name, a->count, a->count + i);
        if (bits_of(all[i]) != guard_bits)
            wrong("a number before the beginning of %s was written", a->name);
    }
    if (!a->is_output && memcmp(all + GUARD, a->host, a->count * sizeof *all) != 0)
        wrong("%s is an input, but it was changed", a->name);
    memcpy(a->host, all + GUARD, a->count * sizeof *all);
    free(all);
}

static void drop(Array *a) {
    device_free(a->device - GUARD);
    free(a->host);
}

/* ---- One convolution ------------------------------------------------------------------------- */

typedef struct Trial {
    Shape s;
    const char *stage; // what a failure here has to do with
    Array in, weight, out;
} Trial;

static Trial new_trial(Shape s, const char *stage) {
    const size_t inputs = (size_t)(s.n * s.h * s.w * s.c);
    return (Trial){s, stage, new_array("in", inputs, false),
                   new_array("weight", (size_t)(depth_of(s) * s.oc), false),
                   new_array("out", (size_t)(rows_of(s) * s.oc), true)};
}

static void drop_trial(Trial *t) {
    drop(&t->in);
    drop(&t->weight);
    drop(&t->out);
}

static const char *place(Shape s, size_t i) {
    static char text[160];
    const int column = (int)i % s.oc, row = (int)i / s.oc;
    snprintf(text, sizeof text, "row %d (image %d, y %d, x %d), column %d", row,
             row / (out_h(s) * out_w(s)), row / out_w(s) % out_h(s), row % out_w(s), column);
    return text;
}

// What out[i] is: the sum over the numbers under the filter.
static float expected(const Trial *t, size_t i) {
    const Shape s = t->s;
    const int k = (int)i % s.oc, x = (int)i / s.oc % out_w(s),
              y = (int)i / s.oc / out_w(s) % out_h(s);
    const int image = (int)i / s.oc / (out_h(s) * out_w(s));
    float sum = 0;
    for (int tap = 0; tap < s.kernel * s.kernel; tap++) {
        const int iy = y * s.stride + tap / s.kernel - s.padding;
        const int ix = x * s.stride + tap % s.kernel - s.padding;
        for (int c = 0; c < s.c && iy >= 0 && iy < s.h && ix >= 0 && ix < s.w; c++)
            sum += t->in.host[((image * s.h + iy) * s.w + ix) * s.c + c] *
                   t->weight.host[(tap * s.c + c) * s.oc + k];
    }
    return sum;
}

static void check_written(const Trial *t) {
    size_t missing = 0, first = 0;
    for (size_t i = 0; i < t->out.count; i++)
        if (bits_of(t->out.host[i]) == unwritten)
            first = missing++ ? first : i;
    if (missing == t->out.count)
        wrong("%s: out was never written, none of its %zu numbers: was a kernel "
              "launched, or do its sums begin with what was in out?",
              shape_text(t->s), t->out.count);
    if (missing)
        wrong(
            "%s: %zu of the %zu numbers of out were never written, the first in %s: is the number "
            "of blocks rounded down, are x and y exchanged, or grid and block in "
            "<<<grid, block>>>, or does a sum begin with what was in out?",
            shape_text(t->s), missing, t->out.count, place(t->s, first));
}

static void call_change(const Trial *t, int change, int call) {
    shared->change = change;
    memcpy(shared->sizes, &t->s, sizeof t->s);
    shared->in = t->in.device;
    shared->weight = t->weight.device;
    shared->out = t->out.device;
    call_worker(call);
}

static double microseconds(const Trial *t, int change) {
    call_change(t, change, MEASURE);
    return shared->us;
}

static void run_trial(const Trial *t, int change) {
    send(&t->in);
    send(&t->weight);
    send(&t->out);
    call_change(t, change, CONVOLVE);
    fetch(&t->in);
    fetch(&t->weight);
    fetch(&t->out);
}

static void check_numbers(const Trial *t) {
    size_t bad = 0, first = 0;
    for (size_t i = 0; i < t->out.count; i++)
        if (!(t->out.host[i] == expected(t, i)))
            first = bad++ ? first : i;
    if (!bad)
        return;
    if (isnan(t->out.host[first]))
        wrong("%s: out is NaN in %s, and %zu numbers are wrong: %s; %s", shape_text(t->s),
              place(t->s, first), bad,
              bits_of(t->out.host[first]) == shared_bits
                  ? "shared memory was read before it was written. Is a barrier missing, or a part "
                    "of a tile not loaded?"
                  : "a number was read that is beyond an array, or was not initialized",
              t->stage);
    wrong("%s: %zu of the %zu numbers of out are wrong, the first in %s: it is %g, expected %g; %s",
          shape_text(t->s), bad, t->out.count, place(t->s, first), (double)t->out.host[first],
          (double)expected(t, first), t->stage);
}

// A single number of the input and a single weight are 1: out has a single 1, or none.
static void run_one_hot(Trial *t, int change) {
    const size_t pixel = (size_t)draw(0, (int)t->in.count - 1);
    const size_t weight = (size_t)draw(0, (int)t->weight.count - 1);
    memset(t->in.host, 0, t->in.count * sizeof(float));
    memset(t->weight.host, 0, t->weight.count * sizeof(float));
    t->in
        .host[pixel / (size_t)t->s.c * (size_t)t->s.c + weight / (size_t)t->s.oc % (size_t)t->s.c] =
        t->weight.host[weight] = 1;
    run_trial(t, change);
    check_written(t);
    check_numbers(t);
}

static void try_shape(Shape s, const char *stage, int change) {
    Trial t = new_trial(s, stage);
    run_trial(&t, change);
    check_written(&t);
    check_numbers(&t);
    for (int i = 0; i < 2; i++)
        run_one_hot(&t, change);
    drop_trial(&t);
}

/* ---- What a change reads, and in which order ------------------------------------------------- */

static long rounded(long a, long b) {
    return (a + b - 1) / b * b;
}

static long multiply_adds(Shape s, int tile) {
    return rounded(rows_of(s), tile) * rounded(s.oc, tile) * rounded(depth_of(s), 16);
}

// The numbers that tiles of that size load, those beyond the matrix included.
static long loads(Shape s, int tile) {
    return 2 * multiply_adds(s, tile) / tile;
}

// Ragged, but tiles of 64 x 64 are nearly full: smaller ones read more.
static Shape counted_shape(int change) {
    const int four = change >= 3 ? 4 : 1, h = draw(6, 7);
    return (Shape){
        2, h, 63 / h, four * draw(5 / four, 8 / four), four * draw(116 / four, 127 / four),
        3, 1, 1};
}

// Of a launch whose result is right. Arrays that are not counted would hide accesses.
static Counts counts_of(Shape s, int change) {
    Trial t = new_trial(s, "this is the shape whose reads are counted");
    send(&t.in), send(&t.weight), send(&t.out);
    call_worker(BEGIN_COUNT);
    call_change(&t, change, CONVOLVE);
    call_worker(END_COUNT);
    const Counts c = shared->counts;
    fetch(&t.in), fetch(&t.weight), fetch(&t.out);
    check_written(&t);
    check_numbers(&t);
    if (c.bytes[GLOBAL_READ] < (long)(t.weight.count * sizeof(float)))
        wrong("%s: %ld bytes were read in the device's memory, fewer than the %zu of the weights",
              shape_text(s), c.bytes[GLOBAL_READ], t.weight.count * sizeof(float));
    for (int kind = 0; kind < 4; kind++)
        if (c.bytes[kind] > 16 * c.accesses[kind])
            wrong("an access of more than 16 bytes; a GPU has none");
    drop_trial(&t);
    return c;
}

static void at_most(Shape s, const char *what, long found, long most, const char *why) {
    if (found > most)
        wrong("%s: %ld %s, expected at most %ld: %s", shape_text(s), found, what, most, why);
}

// Rather the kernel of this change than an earlier one; the counts themselves are another test.
static void check_is_change(int change) {
    const Shape s = counted_shape(change);
    const Counts c = counts_of(s, change);
    const long reads = c.accesses[GLOBAL_READ], steps = rounded(depth_of(s), 16) / 16;
    const char *why = "right, but this is not yet the change";
    if (change == 1)
        at_most(s, "reads of the device's memory", reads, multiply_adds(s, 1), why);
    if (change == 2)
        at_most(s, "reads of the device's memory", reads, loads(s, 16) * 6 / 10, why);
    if (change == 3)
        at_most(s, "reads of the device's memory", reads, c.bytes[GLOBAL_READ] / 8, why);
    if (change == 4)
        at_most(s, "barriers", c.barriers, steps * 16 / 10, why);
}

/* ---- The tests ------------------------------------------------------------------------------- */

static void test_right(int change) {
    const int tile = change == 1 ? 16 : 64, four = change >= 3 ? 4 : 1;
    const char *one = "this is a single tile and a single step: do the sums begin at 0, is each "
                      "tile __shared__, and is what a thread reads what was stored at that place?";
    const char *steps =
        change == 4 ? "a single step is right, several are not: does the sum continue, are the "
                      "next numbers at k + 16, and does each step use the other buffer?"
                    : "a single step is right, several are not: does the sum continue, is the next "
                      "tile taken from k, and is there a barrier after the last use of a tile?";
    const char *tiles = "a single tile is right, several are not: do row and column include the "
                        "block, and are x and y not swapped?";
    const char *ragged =
        "sizes that tiles divide are right: what do threads do beyond the last row, "
        "column and k?";
    try_shape((Shape){1, tile / 4, 4, 16, tile, 1, 1, 0}, one, change);
    try_shape((Shape){1, tile / 4, 4, 48, tile, 1, 1, 0}, steps, change);
    try_shape((Shape){3, tile / 4, 4, 16, tile * 2, 1, 1, 0}, tiles, change);
    for (int i = 0; i < 5; i++) {
        const int kernel = draw(1, 4);
        const Shape s = {draw(1, 3),
                         kernel + draw(0, 5),
                         kernel + draw(0, 6),
                         four * draw(1, 10 / four),
                         four * draw(1, 76 / four),
                         kernel,
                         draw(1, 3),
                         draw(0, kernel - 1)};
        try_shape(s, ragged, change);
    }
    check_is_change(change);
}

static void test_counts(int change) {
    const int tile = change == 1 ? 16 : 64, width = change < 3 ? 1 : 4;
    const Shape s = counted_shape(change);
    const Counts c = counts_of(s, change);
    at_most(s, "reads of the device's memory", c.accesses[GLOBAL_READ], loads(s, tile) / width,
            change < 3 ? "each number of a tile is to be read once per block, and each tile has "
                         "one block"
                       : "each is to read 16 bytes");
    at_most(s, "bytes read there", c.bytes[GLOBAL_READ], loads(s, tile) * 4,
            "4 for each number of a tile");
    at_most(s, "writes there", c.accesses[GLOBAL_WRITE], (long)rows_of(s) * s.oc / width,
            width == 1 ? "keep the sum in a register" : "each is to store 16 bytes");
    if (change == 1)
        at_most(s, "reads of shared memory", c.accesses[SHARED_READ], 2 * multiply_adds(s, 16),
                "two for each multiply-add");
    if (change == 2)
        at_most(s, "reads of shared memory", c.accesses[SHARED_READ], multiply_adds(s, 64) / 2,
                "8 for each 16 multiply-adds: read them into variables first");
    if (change == 3)
        at_most(s, "reads of shared memory", c.accesses[SHARED_READ], multiply_adds(s, 64) / 8,
                "2 of 16 bytes for each 16 multiply-adds");
}

static void test_steps(void) {
    const Shape s = counted_shape(4);
    const Counts c = counts_of(s, 4);
    const long steps = rounded(depth_of(s), 16) / 16;
    at_most(s, "reads of the device's memory", c.accesses[GLOBAL_READ], loads(s, 64) / 4,
            "no more than change 3");
    at_most(s, "barriers", c.barriers, steps + 1, "one for each 16 of k");
    if (c.overlapped < steps - 1)
        wrong("%s: in only %ld of %ld steps numbers were requested from the device's memory before "
              "the tiles were read: request the numbers of the next step after the barrier, before "
              "the "
              "arithmetic",
              shape_text(s), c.overlapped, steps);
}

static void test_speed(void) {
    const Shape s = {256, 16, 16, 64, 64, 3, 1, 1};
    Trial t = new_trial(s, "this is the shape that is timed");
    run_trial(&t, 4);
    check_written(&t);
    check_numbers(&t);
    const double naive = microseconds(&t, 0);
    const double us = microseconds(&t, 4);
    fetch(&t.out);
    check_numbers(&t);
    if (us > naive)
        wrong("%s: %.1f us, change 0 in the same job %.1f us", shape_text(s), us, naive);
    drop_trial(&t);
}

int main(int argc, char **argv) {
    if (is_worker(argc, argv))
        serve(serve_lab);
    const char *test = argc > 1 ? argv[1] : "";
    const int change = argc > 2 ? atoi(argv[2]) : 0;
    FILE *random = fopen("/dev/urandom", "r");
    if (!random || fread(&seed, sizeof seed, 1, random) != 1)
        wrong("/dev/urandom cannot be read");
    fclose(random);
    start_worker(getenv("WORKER") ? getenv("WORKER") : "./lab05", sizeof(Shared));
    if (strcmp(test, "right") == 0)
        test_right(change);
    else if (strcmp(test, "counts") == 0)
        test_counts(change);
    else if (strcmp(test, "steps") == 0)
        test_steps();
    else if (strcmp(test, "speed") == 0)
        test_speed();
    else
        wrong("lab05: there is no such test");
    send_token();
    return 0;
}
