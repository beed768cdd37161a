/* lab10.c - lab 10's tests of matrix products, in the emulator, or on a GPU. C is initialized to a
   NaN that no sum gives, all matrices lie between guard zones, and numbers are small integers, so
   that a sum is the same in every order. The kernels run in a process of their own (device.h).

     lab10 right K    change K is right: a single tile and step, several of each, random sizes
     lab10 counts K   ... and executes, reads and waits no more than it should
     lab10 speed      on a GPU: change 4 is right, and faster than change 0

   WORKER=PROGRAM: the one with the kernels */
#include "device.h"
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

enum Count {
    MMA,
    LDMATRIX,
    COPIES,
    CONFLICTS,
    SHARED_BYTES,
    BARRIERS,
    READS,
    BYTES_READ,
    WRITES,
    SHARED_READS,
    LINES,
    COUNTS
};

// At the end of the assembled matmul.cu: lab10_device.cu
#define OF_THE_KERNELS __attribute__((weak))
OF_THE_KERNELS void lab_multiply(int change, const int *s, const uint16_t *a, const uint16_t *b,
                                 float *c);
OF_THE_KERNELS double lab_microseconds(int change, const int *s, const uint16_t *a,
                                       const uint16_t *b, float *c);
OF_THE_KERNELS void lab_subtract(bool subtract); // the emulator's mma
OF_THE_KERNELS double lab_counts(long *counts);  // of the last product

enum { MULTIPLY = OWN_CALLS, MEASURE, SUBTRACT, COUNT };

typedef struct Shared {
    Calls calls;
    int change, sizes[3];
    uint16_t *a, *b;
    float *c;
    double us, ahead;
    bool subtract;
    long counts[COUNTS];
} Shared;

static Shared *const shared = SHARED_MEMORY;

// In the worker
static void own_call(int call) {
    Shared *s = shared;
    switch (call) {
    case MULTIPLY:
        lab_multiply(s->change, s->sizes, s->a, s->b, s->c);
        break;
    case MEASURE:
        s->us = lab_microseconds(s->change, s->sizes, s->a, s->b, s->c);
        break;
    case SUBTRACT:
        lab_subtract(s->subtract);
        break;
    case COUNT:
        s->ahead = lab_counts(s->counts);
    }
}

static void serve_lab(void) {
    serve_call(own_call);
}

enum { TILE = 64 };

static uint64_t seed;

static int draw(int least, int most) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return least + (int)((seed >> 33) % (uint64_t)(most - least + 1));
}

/* ---- Matrices between guard zones ------------------------------------------------------------ */

enum { GUARD = 1 << 16 };                                              // bytes
static const uint32_t unwritten = 0x7FC0ABCD, guard_bits = 0x7FC0C5C5; // NaNs
static const uint32_t shared_bits = 0xFFFFFFFF; // a cp.async that has not been waited for

typedef struct Matrix {
    const char *name;
    char *host, *device; // device: after the guard
    size_t bytes;
    bool is_output;
} Matrix;

static void fill(char *to, size_t bytes, uint32_t word) {
    for (size_t i = 0; i < bytes; i += sizeof word)
        memcpy(to + i, &word, sizeof word);
}

static char *must_alloc(size_t bytes) {
    char *memory = malloc(bytes);
    if (!memory)
        wrong("no memory for a test");
    return memory;
}

static Matrix new_matrix(const char *name, size_t bytes, bool is_output) {
    return (Matrix){name, must_alloc(bytes), (char *)device_alloc(bytes + 2 * GUARD) + GUARD, bytes,
                    is_output};
}

static void send(const Matrix *m) {
    char *all = must_alloc(m->bytes + 2 * GUARD);
    fill(all, m->bytes + 2 * GUARD, guard_bits);
    if (m->is_output)
        fill(all + GUARD, m->bytes, unwritten);
    else
        memcpy(all + GUARD, m->host, m->bytes);
    copy_to_device(m->device - GUARD, all, m->bytes + 2 * GUARD);
    free(all);
}

// Copies a matrix back; its guards, and an input, must be unchanged.
static void fetch(const Matrix *m) {
    char *all = must_alloc(m->bytes + 2 * GUARD), guard[GUARD];
    copy_from_device(all, m->device - GUARD, m->bytes + 2 * GUARD);
    fill(guard, GUARD, guard_bits);
    if (memcmp(all + GUARD + m->bytes, guard, GUARD) != 0)
        wrong("%s was written beyond its end: row and column are of C, which has m rows and n "
              "columns",
              m->name);
    if (memcmp(all, guard, GUARD) != 0)
        wrong("%s was written before its beginning", m->name);
    if (!m->is_output && memcmp(all + GUARD, m->host, m->bytes) != 0)
        wrong("%s is an input, but it was changed", m->name);
    memcpy(m->host, all + GUARD, m->bytes);
    free(all);
}

static void drop(Matrix *m) {
    device_free(m->device - GUARD);
    free(m->host);
}

/* ---- One product ----------------------------------------------------------------------------- */

typedef struct Sizes {
    int m, n, k; // in this order in Shared.sizes
} Sizes;

typedef struct Trial {
    Sizes s;
    const char *stage; // what a failure here has to do with
    Matrix a, b, c;
} Trial;

static uint16_t bf16(int integer) { // up to 256, exact
    const float number = (float)integer;
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static float value(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static void set_random(const Matrix *matrix) {
    uint16_t *x = (uint16_t *)matrix->host;
    for (size_t i = 0; i < matrix->bytes / sizeof *x; i++)
        x[i] = bf16(draw(-16, 16));
}

static Trial new_trial(Sizes s, const char *stage) {
    const size_t m = (size_t)s.m, n = (size_t)s.n, k = (size_t)s.k;
    Trial t = {s, stage, new_matrix("A", m * k * 2, false), new_matrix("B", k * n * 2, false),
               new_matrix("C", m * n * 4, true)};
    set_random(&t.a);
    set_random(&t.b);
    return t;
}

static void drop_trial(Trial *t) {
    drop(&t->a);
    drop(&t->b);
    drop(&t->c);
}

static uint16_t a_of(const Trial *t, int row, int k) {
    return ((const uint16_t *)t->a.host)[row * t->s.k + k];
}

static uint16_t b_of(const Trial *t, int k, int column) {
    return ((const uint16_t *)t->b.host)[k * t->s.n + column];
}

static float c_of(const Trial *t, int row, int column) {
    return ((const float *)t->c.host)[row * t->s.n + column];
}

static uint32_t bits_of(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

static float expected(const Trial *t, int row, int column) {
    float sum = 0;
    for (int k = 0; k < t->s.k; k++)
        sum += value(a_of(t, row, k)) * value(b_of(t, k, column));
    return sum;
}

static const char *sizes_text(Sizes s) {
    static char text[80];
    snprintf(text, sizeof text, "m = %d, n = %d, k = %d", s.m, s.n, s.k);
    return text;
}

static void call_change(const Trial *t, int change, int call) {
    shared->change = change;
    memcpy(shared->sizes, &t->s, sizeof t->s);
    shared->a = (uint16_t *)t->a.device;
    shared->b = (uint16_t *)t->b.device;
    shared->c = (float *)t->c.device;
    call_worker(call);
}

static double microseconds(const Trial *t, int change) {
    call_change(t, change, MEASURE);
    return shared->us;
}

static void subtract(bool on) {
    shared->subtract = on;
    call_worker(SUBTRACT);
}

static void run_trial(Trial *t, int change) {
    send(&t->a), send(&t->b), send(&t->c);
    call_change(t, change, MULTIPLY);
    fetch(&t->a), fetch(&t->b), fetch(&t->c);
}

static void check_written(const Trial *t) {
    const int elements = t->s.m * t->s.n;
    int missing = 0, first = 0;
    for (int i = elements - 1; i >= 0; i--)
        if (bits_of(((const float *)t->c.host)[i]) == unwritten) {
            missing++;
            first = i;
        }
    if (missing == elements)
        wrong("%s: C was never written: is the kernel launched?", sizes_text(t->s));
    if (missing > 0)
        wrong("%s: %d of %d elements of C were never written, the first is C[%d][%d]: how many "
              "blocks are launched, and which of them has rows, which columns?",
              sizes_text(t->s), missing, elements, first / t->s.n, first % t->s.n);
}

// sign: of the expected result
static void check_numbers(const Trial *t, int sign) {
    for (int row = 0; row < t->s.m; row++)
        for (int column = 0; column < t->s.n; column++) {
            const float found = c_of(t, row, column),
                        right = (float)sign * expected(t, row, column);
            if (found == right)
                continue;
            if (isnan(found) && (bits_of(found) & 0xFF800000) == (shared_bits & 0xFF800000))
                wrong("%s: C[%d][%d] is NaN: shared memory was read before it was written. %s",
                      sizes_text(t->s), row, column, t->stage);
            wrong("%s: C[%d][%d] should be %g, found %g%s. %s", sizes_text(t->s), row, column,
                  right, found, isnan(found) ? ", from memory outside of A and B" : "", t->stage);
        }
}

/* ---- A single 1 in A, and one in B: where does it go? ---------------------------------------- */

static void set_one(const Matrix *m, size_t i) {
    memset(m->host, 0, m->bytes);
    ((uint16_t *)m->host)[i] = bf16(1);
}

static void check_one(const Trial *t, int row, int k, int column) {
    char where[64] = "C is 0 everywhere";
    for (int i = t->s.m * t->s.n - 1; i >= 0; i--)
        if (((const float *)t->c.host)[i] == 1)
            snprintf(where, sizeof where, "the 1 is at C[%d][%d]", i / t->s.n, i % t->s.n);
    if (c_of(t, row, column) != 1)
        wrong("only A[%d][%d] and B[%d][%d] are 1, so C[%d][%d] should be 1, but %s: which lane "
              "has which elements, and in which register?",
              row, k, k, column, row, column, where);
}

// The same at the last 16 values of k: is it only the first ones that are lost?
static void check_not_lost(Trial *t, int change, int row, int k, int column) {
    if (c_of(t, row, column) == 1)
        return;
    const int last = k + t->s.k - 16;
    set_one(&t->a, (size_t)(row * t->s.k + last));
    set_one(&t->b, (size_t)(last * t->s.n + column));
    run_trial(t, change);
    if (c_of(t, row, column) == 1)
        wrong("a 1 in A and B among the last 16 values of k gets into C, among the first 16 it is "
              "lost: do the sums begin at 0 once?");
    set_one(&t->a, (size_t)(row * t->s.k + k));
    set_one(&t->b, (size_t)(k * t->s.n + column));
    run_trial(t, change);
}

// In each quarter of the first 16 x 16 of A; if a warp has more than one mma, in 16 columns of B
static void one_hot(Trial *t, int change) {
    for (int i = 0; i < 8; i++) {
        const int row = i % 2 * 8 + draw(0, 7), k = i / 2 % 2 * 8 + draw(0, 7);
        const int column = (change > 1 ? i / 4 * 8 : 0) + draw(0, 7);
        set_one(&t->a, (size_t)(row * t->s.k + k));
        set_one(&t->b, (size_t)(k * t->s.n + column));
        run_trial(t, change);
        check_written(t);
        check_not_lost(t, change, row, k, column);
        check_one(t, row, k, column);
        check_numbers(t, 1);
    }
}

static void try_sizes(Sizes s, const char *stage, int change) {
    Trial t = new_trial(s, stage);
    run_trial(&t, change);
    check_written(&t);
    check_numbers(&t, 1);
    drop_trial(&t);
}

// A result that does not change with mma is computed elsewhere.
static void try_subtracting(Sizes s, int change) {
    Trial t = new_trial(s, "This mma subtracts the product: C must come from mma alone");
    subtract(true);
    run_trial(&t, change);
    subtract(false);
    check_written(&t);
    check_numbers(&t, -1);
    drop_trial(&t);
}

static Sizes random_sizes(int most_steps) {
    return (Sizes){TILE * draw(1, 2), TILE * draw(1, 3), TILE * draw(most_steps / 2, most_steps)};
}

/* ---- What a change executes, reads and waits for --------------------------------------------- */

typedef struct Counted {
    Sizes s;
    long n[COUNTS];
    double ahead;
} Counted;

// Of a launch whose result is right
static Counted count(Sizes s, int change) {
    Counted c = {.s = s};
    Trial t = new_trial(s, "These are the sizes whose accesses are counted");
    run_trial(&t, change);
    call_worker(COUNT);
    c.ahead = shared->ahead;
    memcpy(c.n, shared->counts, sizeof c.n);
    check_written(&t);
    check_numbers(&t, 1);
    if (c.n[BYTES_READ] < (long)(t.a.bytes + t.b.bytes))
        wrong("%s: %ld bytes were read in global memory, fewer than the %zu of A and B",
              sizes_text(s), c.n[BYTES_READ], t.a.bytes + t.b.bytes);
    drop_trial(&t);
    return c;
}

static void at_most(const Counted *c, enum Count what, const char *name, long most,
                    const char *why) {
    if (c->n[what] > most)
        wrong("%s: %ld %s, expected at most %ld: %s", sizes_text(c->s), c->n[what], name, most,
              why);
}

static long products(Sizes s) {
    return (long)(s.m / 16) * (s.n / 8) * (s.k / 16);
}

static long steps(Sizes s) {
    return s.k / TILE;
}

static long chunks_of_tiles(Sizes s) { // of A's and B's, in all blocks and steps
    return (long)(s.m / TILE) * (s.n / TILE) * steps(s) * 2 * TILE * TILE / 8;
}

static void check_products(const Counted *c) {
    if (c->n[MMA] != products(c->s))
        wrong("%s: %ld mma, expected m / 16 x n / 8 x k / 16 = %ld", sizes_text(c->s), c->n[MMA],
              products(c->s));
}

// Rather the kernel of this change than an earlier one
static void check_is_change(int change) {
    const Counted c = count((Sizes){TILE, 2 * TILE, 2 * TILE}, change);
    check_products(&c);
    if (change >= 2 && c.n[LDMATRIX] == 0)
        wrong("right, but this is not yet the change: there is no ldmatrix");
    if (change >= 2)
        at_most(&c, READS, "reads of global memory", 2 * chunks_of_tiles(c.s),
                "right, but this is not yet the change: a tile is loaded once, and used by all "
                "warps of the block");
    if (change == 3)
        at_most(&c, CONFLICTS, "bank conflicts", c.n[LDMATRIX] * 28 / 2,
                "right, but this is not yet the change: as many as in change 2");
    if (change == 4 && c.n[COPIES] == 0)
        wrong("right, but this is not yet the change: there is no cp.async");
}

static void check_tiles(const Counted *c) {
    at_most(c, READS, "reads of global memory", chunks_of_tiles(c->s),
            "each chunk of a tile is to be read once per block, and a read is to have 16 bytes");
    at_most(c, BYTES_READ, "bytes read there", chunks_of_tiles(c->s) * 16,
            "16 for each chunk of a tile");
    at_most(c, LINES, "lines of 128 bytes in the reads of warps there", chunks_of_tiles(c->s) / 4,
            "neighboring threads copy neighbors: 8 chunks of a line are 128 bytes");
    at_most(c, LDMATRIX, "ldmatrix", products(c->s) / 2,
            "a warp needs 2 for A and 2 for B for its 8 mma of 16 values of k");
    at_most(c, SHARED_READS, "reads of shared memory", c->n[LDMATRIX] * 32,
            "only ldmatrix is to read there, each lane one line");
    at_most(c, WRITES, "writes of global memory", (long)c->s.m * c->s.n / 2,
            "the sums stay in registers until the end, and store_sums() stores them");
}

static void check_no_conflicts(const Counted *c, int stages) {
    at_most(c, CONFLICTS, "bank conflicts", 0,
            "the 8 lines of a matrix, and the 8 chunks that 8 neighboring threads store, are to "
            "lie at 8 places that differ modulo 8");
    at_most(c, SHARED_BYTES, "bytes of shared memory in a block", stages * 2 * TILE * TILE * 2,
            "the chunks are to be permuted, and the tiles not to grow");
}

static void check_copies(const Counted *c) {
    if (c->n[COPIES] != chunks_of_tiles(c->s))
        wrong("%s: %ld cp.async, expected %ld, one for each chunk of a tile, and none beyond the "
              "last step",
              sizes_text(c->s), c->n[COPIES], chunks_of_tiles(c->s));
}

static void check_stages(const Counted *c) {
    const long k = steps(c->s);
    const double ahead = (double)(2 * k - 3) / (double)k; // 2 in all steps but the last two
    check_copies(c);
    if (c->ahead < .98 * ahead)
        wrong("%s: during the arithmetic of a step the tiles of %.2f later steps are on their way "
              "on average, expected %.2f: start to copy the tiles of two steps later before the "
              "arithmetic, and leave one group of copies incomplete when you wait",
              sizes_text(c->s), c->ahead, ahead);
    at_most(c, BARRIERS, "barriers", k + 1, "one for each step");
}

/* ---- The tests ------------------------------------------------------------------------------- */

static void test_right(int change) {
    const char *one = change == 1 ? "A block with a single 1 is right, random numbers are not: "
                                    "does each mma add to the same sums, and do the 4 steps of 16 "
                                    "cover all k?"
                                  : "This is a single tile and a single step: does each warp have "
                                    "its own rows and columns, and does d reach all of the 64?";
    const char *several = "A single step is right, several are not: do the sums begin at 0 once, "
                          "and are the next numbers taken at k?";
    const char *tiles = "A single tile is right, several are not: do row and column include the "
                        "block, and does a row of A have k numbers, one of B n?";
    const Sizes single = {TILE, TILE, TILE};
    Trial first = new_trial(single, "A single 1 in A and in B");
    one_hot(&first, change);
    drop_trial(&first);
    try_sizes(single, one, change);
    try_sizes((Sizes){2 * TILE, 3 * TILE, TILE}, tiles, change);
    try_sizes((Sizes){TILE, TILE, 5 * TILE}, several, change);
    for (int i = 0; i < 3; i++)
        try_sizes(random_sizes(4), "Several tiles and several steps", change);
    try_subtracting(random_sizes(2), change);
    check_is_change(change);
}

static void test_counts(int change) {
    const Counted c = count(random_sizes(6), change);
    check_products(&c);
    if (change == 1) {
        at_most(&c, READS, "reads of global memory", c.n[MMA] * 32 * 8,
                "a lane needs 4 of A, two neighbors each, and 4 of B");
        at_most(&c, BYTES_READ, "bytes read there", c.n[MMA] * 32 * 24, "8 numbers of A, 4 of B");
        at_most(&c, WRITES, "writes of global memory", (long)c.s.m * c.s.n / 2,
                "the sums stay in registers until the end, and store_sums() stores two at a time");
    }
    if (change >= 2)
        check_tiles(&c);
    if (change >= 3)
        check_no_conflicts(&c, change == 3 ? 1 : 3);
    if (change == 4) {
        const Counted single = count((Sizes){TILE, 2 * TILE, TILE}, change);
        check_copies(&single); // there is no second step whose tiles could be copied
        check_stages(&c);
    }
}

static void test_speed(void) {
    const Sizes s = {1024, 1024, 1024};
    Trial t = new_trial(s, "These are the sizes that are timed");
    run_trial(&t, 4);
    check_written(&t);
    check_numbers(&t, 1);
    const double naive = microseconds(&t, 0);
    const double us = microseconds(&t, 4);
    fetch(&t.c);
    check_numbers(&t, 1);
    if (us > naive)
        wrong("%s: %.1f us, change 0 in the same job %.1f us", sizes_text(s), us, naive);
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
    start_worker(getenv("WORKER") ? getenv("WORKER") : "./lab10", sizeof(Shared));
    if (strcmp(test, "right") == 0)
        test_right(change);
    else if (strcmp(test, "counts") == 0)
        test_counts(change);
    else if (strcmp(test, "speed") == 0)
        test_speed();
    else
        wrong("lab10: there is no such test");
    send_token();
    return 0;
}
