/* cnn_kernels.c - the fast kernels of the CPU.

   cnn.c is a whole program without this file. Where the file exists, section 7 of cnn.c includes it
   as text (-DCNN_NO_KERNELS leaves it out) and --kernels fast chooses the table at its end,
   fast_kernels. The kernels compute what the definitions in section 2 compute, equal up to
   rounding, close to the peak rate of the machine. The parts, in reading order:

     Threads             loops that a busy machine does not hold up
     The register tile   every convolution and linear layer, forward and backward
     Winograd            3 x 3 and 5 x 5 filters, in fewer multiplications
     Before a max-pool   a convolution that is pooled: its backward, without the zeros, and its
                         forward, where it has few channels
     The definitions     the other rows, on these threads
     BatchNorm           its sums, by slices
     The table           which layer runs which of these

   Each gain given below is the speed of a whole training (images/s) with that part over the speed
   without it, measured on 2 cores of an AMD Zen 5 with AVX-512, two threads. */

/* ---- Threads ------------------------------------------------------------------------------------

   parallel(count, body, context) does  for (i = 0; i < count; i++) body(context, i);  with
   num_threads threads. Each begins with its own contiguous share of the iterations, the same in
   every loop of this length, so that it finds in its cache what it wrote before. A thread that has
   finished its share takes iterations of the others.

   Reason: a loop of OpenMP ends when all threads have arrived at a barrier. Beside other busy
   programs one of them often has to wait for a core, and each of the roughly 40 loops of a training
   step may cost a time slice of the scheduler, 1 to 4 ms. Here a loop ends when its iterations are
   done. A thread that comes late finds none: one word holds both the number of the loop and the
   count of the iterations taken from a share. Whoever waits spins for SPIN seconds, as long as a
   wake-up by the kernel takes, and then sleeps, which leaves the core to others. */

#include <limits.h>
#include <sys/syscall.h>

// As in linux/futex.h, which not every C library comes with
enum { FUTEX_WAIT_PRIVATE = 128, FUTEX_WAKE_PRIVATE = 129 };

static const double SPIN = 100e-6;

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

typedef void Body(const void *context, size_t i);

typedef struct Share {
    _Alignas(64) uint64_t taken; // number of the loop << 32 | iterations taken; a cache line each
} Share;

// The threads that compute for one replica: the caller of parallel(), number 0, and its helpers.
typedef struct Threads {
    size_t count;
    struct Helper {
        struct Threads *threads;
        size_t number;
        pthread_t id;
    } helpers[MAX_THREADS]; // [0] is not used
    Share shares[MAX_THREADS];
    // the loop; written while no iteration is left to take, by the caller
    Body *body;
    const void *context;
    size_t iterations;
    // words that threads wait for, and how many of these sleep
    _Alignas(64) uint32_t loop; // number of the loop
    uint32_t loop_sleepers;
    _Alignas(64) uint32_t done; // iterations of the loop that are finished
    uint32_t done_sleepers;
    bool quit;
} Threads;

static _Thread_local size_t thread_number; // of the calling thread within its Threads

// How much of its core a thread has had lately; for give_way()
static const double TURN = 1e-3;

typedef struct Turn {
    double since, cpu; // time and CPU time when it looked last, in seconds
    double asleep;     // how many of the seconds since then it has slept
    size_t sleeps;     // how many naps are left to take
} Turn;

static _Thread_local Turn turn;

static double thread_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Waits until *word differs from `value`; may return earlier.
static void wait_for_change(uint32_t *word, uint32_t value, uint32_t *sleepers) {
    const double end = now() + SPIN;
    while (now() < end) {
        if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != value)
            return;
        PAUSE();
    }
    const double asleep = now();
    __atomic_fetch_add(sleepers, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0); // while *word == value
    __atomic_fetch_sub(sleepers, 1, __ATOMIC_SEQ_CST);
    turn.asleep += now() - asleep;
}

// Wakes the threads that wait for *word. Called after each change.
static void wake(uint32_t *word, uint32_t *sleepers) {
    if (__atomic_load_n(sleepers, __ATOMIC_SEQ_CST) > 0)
        syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

// *i = the next of the share's `length` iterations; false: none is left, or the loop is over.
static bool take_iteration(Share *share, uint32_t loop, size_t length, size_t *i) {
    uint64_t taken = __atomic_load_n(&share->taken, __ATOMIC_RELAXED);
    while (taken >> 32 == loop && (uint32_t)taken < length) {
        *i = (uint32_t)taken;
        if (__atomic_compare_exchange_n(&share->taken, &taken, taken + 1, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_RELAXED))
            return true;
    }
    return false;
}

/* On a shared core the scheduler suspends a thread every few milliseconds, nearly always within an
   iteration, which all others then wait for. So a helper that has lost a millisecond in this way
   sleeps between two iterations, once in TURN seconds, until its core is its own again. The caller
   never does: all others would wait for its next loop. */
static void give_way(void) {
    enum { SLEEPS = 50 };
    const double nap = 50e-6, time = now();
    if (time - turn.since < TURN)
        return;
    const double cpu = thread_seconds(), lost = time - turn.since - (cpu - turn.cpu) - turn.asleep;
    turn.sleeps = lost > TURN ? SLEEPS : turn.sleeps;
    turn.since = time;
    turn.cpu = cpu;
    turn.asleep = 0;
    if (turn.sleeps > 0) {
        turn.sleeps--;
        turn.asleep = 2 * nap; // if it takes longer, others had the core
        nanosleep(&(struct timespec){.tv_nsec = (long)(1e9 * nap)}, NULL);
    }
}

// Executes iterations of loop number `loop` until none is left. A late helper may read the body of
// the next loop. It takes no iteration then: the shares got that loop's number before its body was
// written.
static void run_iterations(Threads *t, uint32_t loop) {
    Body *body = __atomic_load_n(&t->body, __ATOMIC_ACQUIRE);
    const void *context = __atomic_load_n(&t->context, __ATOMIC_ACQUIRE);
    const size_t iterations = __atomic_load_n(&t->iterations, __ATOMIC_ACQUIRE);
    for (size_t k = 0; k < t->count; k++) {
        const size_t owner = (thread_number + k) % t->count;
        const Range share = part_of((Range){0, iterations}, owner, t->count);
        size_t i;
        while (take_iteration(&t->shares[owner], loop, share.count, &i)) {
            body(context, share.first + i);
            if (__atomic_add_fetch(&t->done, 1, __ATOMIC_SEQ_CST) == iterations)
                wake(&t->done, &t->done_sleepers);
            if (thread_number > 0)
                give_way();
        }
    }
}

static void *helper_main(void *argument) {
    const struct Helper *h = argument;
    Threads *t = h->threads;
    uint32_t loop = 0;
    thread_number = h->number;
    set_num_threads(1);
    turn = (Turn){.since = now(), .cpu = thread_seconds()};
    while (!__atomic_load_n(&t->quit, __ATOMIC_RELAXED)) {
        wait_for_change(&t->loop, loop, &t->loop_sleepers);
        loop = __atomic_load_n(&t->loop, __ATOMIC_ACQUIRE);
        run_iterations(t, loop);
    }
    return NULL;
}

static void stop_threads(void *argument) {
    Threads *t = argument;
    __atomic_store_n(&t->quit, true, __ATOMIC_RELAXED);
    __atomic_add_fetch(&t->loop, 1, __ATOMIC_SEQ_CST);
    wake(&t->loop, &t->loop_sleepers);
    for (size_t i = 1; i < t->count; i++)
        pthread_join(t->helpers[i].id, NULL);
    free(t);
}

static Threads *start_threads(size_t count) {
    Threads *t = must_alloc(sizeof *t, "threads");
    t->count = count;
    for (size_t i = 1; i < count; i++) {
        t->helpers[i].threads = t;
        t->helpers[i].number = i;
        start_thread(&t->helpers[i].id, helper_main, &t->helpers[i], "one of the --threads");
    }
    return t;
}

// Returns the threads of the calling replica, which end when it does.
static pthread_key_t threads_key;

static void make_threads_key(void) {
    if (pthread_key_create(&threads_key, stop_threads) != 0)
        die(1, "no pthread_key_t is left for the threads");
}

static Threads *own_threads(size_t count) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_threads_key);
    Threads *t = pthread_getspecific(threads_key);
    if (t && t->count == count)
        return t;
    if (t)
        stop_threads(t);
    t = start_threads(count);
    pthread_setspecific(threads_key, t);
    return t;
}

// Gives a loop to the helpers and returns its number. The order matters, see run_iterations().
static uint32_t publish_loop(Threads *t, size_t count, Body *body, const void *context) {
    const uint32_t loop = t->loop + 1;
    for (size_t i = 0; i < t->count; i++)
        __atomic_store_n(&t->shares[i].taken, (uint64_t)loop << 32, __ATOMIC_RELAXED);
    __atomic_store_n(&t->body, body, __ATOMIC_RELEASE);
    __atomic_store_n(&t->context, context, __ATOMIC_RELEASE);
    __atomic_store_n(&t->iterations, count, __ATOMIC_RELEASE);
    __atomic_store_n(&t->done, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&t->loop, loop, __ATOMIC_SEQ_CST);
    wake(&t->loop, &t->loop_sleepers);
    return loop;
}

static void share_loop(Threads *t, size_t count, Body *body, const void *context) {
    run_iterations(t, publish_loop(t, count, body, context));
    uint32_t done = __atomic_load_n(&t->done, __ATOMIC_SEQ_CST);
    while (done < count) {
        wait_for_change(&t->done, done, &t->done_sleepers);
        done = __atomic_load_n(&t->done, __ATOMIC_SEQ_CST);
    }
}

static void parallel(size_t count, Body *body, const void *context) {
    const size_t threads = num_threads;
    set_num_threads(1); // for the loops within a body
    if (threads > 1 && count > 1)
        share_loop(own_threads(threads), count, body, context);
    else
        for (size_t i = 0; i < count; i++)
            body(context, i);
    set_num_threads(threads);
}

/* ---- The register tile --------------------------------------------------------------------------

   A core computes in vector registers of LANES floats: 16 with AVX-512, 8 with AVX2, 4 with NEON.
   Each cycle it can issue 2 fused multiply-adds (FMA) acc += a * b, and each takes 4 cycles to
   complete. A plain loop falls short of that rate for two reasons:

     Loads     Two vectors can be loaded in a cycle. With a and b from memory an FMA needs two
               loads, so the FMA units are busy half of the time at best, and less if the data come
               from L2 or L3.
     Latency   An FMA must wait for the one before it on the same acc. One accumulator gets one FMA
               in 4 cycles; 2 units * 4 cycles need at least 8 independent accumulators.

   Register tiling (register blocking) solves both: the accumulators of a block of outputs, ROWS x
   VECTORS vectors, stay in registers during a whole sum, and each step of the sum loads ROWS
   scalars a and VECTORS vectors b and uses every one of them several times:

     acc[i][j] += a[i] * b[j]     for all i < ROWS, j < VECTORS

   6 x 4 vectors: 24 FMAs for 10 loads and 24 independent accumulators, which with 4 registers of b
   and one of a fit the 32 registers of AVX-512. AVX2 has 16 registers: 6 x 2 vectors.

   One tile with numbers. A 3 x 3 convolution, stride 1, padding 1, of a 6 x 6 image with 8
   channels, to 64 channels; AVX-512. The first tile computes 6 output pixels, 0 to 5, the upper row
   of the image, with all their 64 = 4 * 16 channels. The filter has 9 taps; each tap selects one
   input pixel for each output pixel (-: outside of the image):

     tap             0   1   2    3   4   5    6   7   8
     output pixel 0  -   -   -    -   0   1    -   6   7
     output pixel 1  -   -   -    0   1   2    6   7   8
          ...
     output pixel 5  -   -   -    4   5   -   10  11   -

   Taps 0 to 2 lie above the image for all six pixels, so they are left out of the list of taps.
   Where a tap is outside for some of the pixels only, these read zeros. The sum has 6 taps * 8
   channels = 48 steps. The step of tap 4, channel 3 loads
     a[i] = in[pixel i][3]                    6 scalars, i = 0 .. 5, each broadcast to a register
     b[j] = weight[4][3][16 j .. 16 j + 15]   4 vectors, j = 0 .. 3
   and does 24 FMAs. The whole tile: 48 * 24 = 1152 FMAs, 576 cycles at 2 a cycle, and 48 * 10 = 480
   loads, 240 cycles, so the FMA units are the limit, as intended. The accumulators start from the
   bias; at the end they pass the ReLU and are stored. The second tile, pixels 6 to 11, lists all 9
   taps and has 72 steps.

   The weights are packed before a pass, in the order in which tiles read them. Here that is
     packed[tap][channel in][64 channels out]      9 * 8 * 64 floats, 18 KB
   and the step above reads the 64 floats from (4 * 8 + 3) * 64 on, the next step the next 64. With
   128 channels out, the same for channels 64 to 127 follows: [block][tap][channel in][64].

   All three passes of a convolution are such sums, with different rows and columns:

                        rows i (a)            columns j (b)         sum over
     forward            6 output pixels       channels out          taps, channels in
     data gradient      6 input pixels        channels in           taps, channels out
     weight gradient    6 channels in         channels out          pixels, for each tap

   dot_tile() does the first two; the data gradient is a forward from dout to din with transposed
   weights. product_tile() does the third, whose sum runs over pixels: for each of them it
   multiplies ROWS channels of in by the columns of dout. The operands of some pixels are copied
   first, so that what a tile reads lies together.

   Stride, padding and borders are in two pixel maps, computed once for each layer by make_maps():
   for each output pixel and tap, the input pixel that the tap selects, or OUTSIDE; and for each
   input pixel and tap, the output pixel that reads it through the tap. The tiles know only
   addresses. A linear layer is the convolution of a 1 x 1 image and takes the same path. */

// The vector width of the instruction set that this program is compiled for, and the number of sums
// that fit into a core's vector registers, with space for operands.
#if defined(__AVX512F__)
enum { VECTOR_BYTES = 64, VECTOR_SUMS = 24 };
#elif defined(__AVX__)
enum { VECTOR_BYTES = 32, VECTOR_SUMS = 12 };
#elif defined(__aarch64__)
enum { VECTOR_BYTES = 16, VECTOR_SUMS = 24 };
#else
enum { VECTOR_BYTES = 16, VECTOR_SUMS = 12 };
#endif
enum { LANES = VECTOR_BYTES / sizeof(real) };
typedef real vec __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(real)), may_alias));

#ifdef UNROLL // -DUNROLL=: not at all, for the sanitizers, with which clang takes six times as long
#elif defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 36")
#endif
// A loop unrolled by the compiler, so that an array indexed by i is kept in registers.
#define UNROLLED(i, count) \
    UNROLL                 \
    for (size_t i = 0; i < (count); i++)

enum {
    ROWS = 6, // of a tile
    VECTORS = VECTOR_SUMS / ROWS,
    MAX_VECTORS = 4,
    LINE_ELEMENTS = 64 / sizeof(real), // elements of a cache line
    COLUMNS = VECTORS * LANES,         // of the widest tile
    MAX_TAPS = 11 * 11,                // the largest kernel: 11 x 11
    FEW = 8,        // with fewer channels than this a row of taps is read as one tap
    RUN = 11 * FEW, // the most elements of such a row, with 11 that whole vectors read after it
    // L2 blocking
    MAX_DEPTH = 1024,          // channels that a tile sums over at a time
    WEIGHT_BYTES = 256 * 1024, // of the weights used at a time: they stay in L2
    GROUP_PIXELS = 512,        // output pixels computed with these weights
    // Winograd
    FINITE = 5,           // Winograd's interpolation points, without infinity
    SIDE = FINITE + 1,    // points across a transformed filter
    POINTS = SIDE * SIDE, // of a transformed filter
    STRIDED_SIDE = 9,     // points across a tile with stride 2, see "Winograd"
    MAX_POINTS = STRIDED_SIDE * STRIDED_SIDE,
    BLOCK_TILES = 18,  // which a thread transforms at a time: with 128 channels or, with stride 2,
                       // 64, they fit an L2 of 1 MB; see l2_factor()
    CHUNK_TILES = 128, // which all threads transform at a time
    // weight gradients
    PAIRS = 128,     // pixels that a tile sums over at a time
    ROW_BLOCK = 192, // rows of a product whose operands stay in L2, and its columns:
    COLUMN_BLOCK = 256,
    SLICES = 32,                      // independent parts of the batch at most, for load balance
    SLICE_ELEMENTS = 2 * 1024 * 1024, // of the sums of all slices at most
    SLICE_PIXELS = 256,               // of a slice at least
};
// an integer as wide as a real; a comparison of vectors sets all bits of a lane, or none
typedef __typeof__(__builtin_choose_expr(sizeof(real) == 8, (int64_t)0, (int32_t)0)) lane;
typedef lane mask __attribute__((vector_size(VECTOR_BYTES)));

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))

// memcpy() of less than a vector: a half, a quarter, ..., one element, by the bits of its size
INLINE void copy_part(void *to, const void *from, size_t bytes) {
    UNROLL
    for (size_t part = VECTOR_BYTES / 2; part >= sizeof(real); part /= 2)
        if (bytes & part) {
            memcpy(to, from, part);
            to = (char *)to + part;
            from = (const char *)from + part;
        }
}

// Loads and stores min(count, LANES) elements; the other lanes are 0 or not stored.
INLINE vec load(const real *from, size_t count) {
    if (count >= LANES)
        return *(const vec *)from;
    vec v = {0};
    copy_part(&v, from, count * sizeof *from);
    return v;
}

INLINE void store(real *to, vec v, size_t count) {
    if (count >= LANES)
        *(vec *)to = v;
    else
        copy_part(to, &v, count * sizeof *to);
}

typedef int16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(LANES)));

// Returns the lowest byte of each lane. In two steps, because with AVX2 gcc 12 converts 32-bit
// integers to bytes one at a time. Gain: cifar with 64 channels 1.03, mnist 1.01.
INLINE bytes narrow(mask m) {
    return __builtin_convertvector(__builtin_convertvector(m, halves), bytes);
}

INLINE vec relu_vec(vec v) {
    return (vec)((mask)v & ~(v < 0));
}

INLINE size_t whole_vectors(size_t count) // rounds up to a multiple of LANES
{
    return ceil_div(count, LANES) * LANES;
}

INLINE size_t remaining(size_t columns, size_t j) // columns from vector j on
{
    return columns > j * LANES ? columns - j * LANES : 0;
}

// Rounds up to an odd number of cache lines. Rows that are an even number of lines apart, above all
// a power of 2, share few sets of the cache and evict each other.
INLINE size_t odd_lines(size_t elements) {
    return (ceil_div(elements, LINE_ELEMENTS) | 1) * LINE_ELEMENTS;
}

// The arguments of dot_tile(): 6 output pixels, and 6 input pixels for each tap of the list.
typedef struct DotTile {
    real *out[ROWS];
    const real *in[MAX_TAPS][ROWS];
    size_t tap[MAX_TAPS];   // the list: which taps of the filter
    size_t taps, depth;     // length of the list; steps of the sum for each tap
    const real *weight;     // packed: [tap][depth][width of the tile]
    const real *bias;       // NULL: the sum starts from 0
    size_t column, columns; // of out and bias: [column, column + columns)
    size_t pitch;           // elements from an input pixel to the next
    bool accumulate, relu;  // accumulate: the sum starts from out
} DotTile;

// acc[i][j] += a[i][d] * w[j]: one step of the sum
INLINE void dot_step(const size_t rows, const size_t vectors, vec acc[ROWS][MAX_VECTORS],
                     const real *const a[ROWS], size_t d, const real *w) {
    real factor[ROWS];
    vec b[MAX_VECTORS];
    UNROLLED(i, rows)
        factor[i] = a[i][d];
    UNROLLED(j, vectors)
        b[j] = *(const vec *)(w + j * LANES);
    UNROLLED(i, rows)
        UNROLLED(j, vectors)
            acc[i][j] += factor[i] * b[j];
}

/* out[i][column + c] = start + sum over taps t and d < depth of
                                in[t][i][d] * weight[tap[t]][d][c]      for i < rows, c < columns
   A tile of one vector has 6 accumulators, too few to hide the latency, so it keeps two for each
   output, for even and for odd d. The prefetch is for the next tile, which most likely reads the
   pixels after these. */
INLINE void dot_tile(const size_t rows, const size_t vectors, const DotTile *t) {
    const size_t parts = vectors == 1 ? 2 : 1, whole = t->depth / parts * parts;
    const size_t width = vectors * LANES, columns = t->columns;
    vec acc[2][ROWS][MAX_VECTORS];
    UNROLLED(j, vectors) {
        const size_t at = t->column + j * LANES, count = remaining(columns, j);
        const vec start = t->bias ? load(t->bias + at, count) : (vec){0};
        UNROLLED(i, rows) {
            acc[0][i][j] = t->accumulate ? load(t->out[i] + at, count) : start;
            acc[1][i][j] = (vec){0};
        }
    }
    for (size_t tap = 0; tap < t->taps; tap++) {
        const real *a[ROWS], *w = t->weight + t->tap[tap] * t->depth * width;
        UNROLLED(i, rows)
            a[i] = t->in[tap][i];
        for (size_t d = 0; d < whole; d += parts, w += parts * width) {
            __builtin_prefetch(a[rows - 1] + t->pitch + rows * d);
            UNROLLED(s, parts)
                dot_step(rows, vectors, acc[s], a, d + s, w + s * width);
        }
        if (whole < t->depth)
            dot_step(rows, vectors, acc[0], a, whole, w);
    }
    UNROLLED(i, rows)
        UNROLLED(j, vectors) {
            vec v = acc[0][i][j];
            if (parts == 2)
                v += acc[1][i][j];
            v = t->relu ? relu_vec(v) : v;
            store(t->out[i] + t->column + j * LANES, v, remaining(columns, j));
        }
}

/* A product of matrices, c = a * b or c += a * b: c[i][j] is the sum over d < depth of
   a[i * a_row + d * a_step] * b[d * b_row + j], for i < rows and j < columns. */
typedef struct Product {
    const real *a, *b;
    real *c;
    size_t rows, columns, depth;
    size_t a_row, a_step, b_row, c_row;
    size_t next_a, next_b; // from a and b to the operands of the next product; 0: unknown
    bool accumulate;       // +=
} Product;

/* The tile of a product from `row` on, with rows and columns as above. Reads whole vectors of b and
   drops what is past the columns. Meanwhile it prefetches into L2 what the same tile of the next
   product reads of a, and one cache line of each row of b: the tiles of a strip take turns. Gain:
   resnet18 1.05 (Intel, AVX-512). */
INLINE void product_tile(const size_t rows, const size_t vectors, const Product *p, size_t row) {
    const size_t columns = p->columns, a_step = p->a_step, b_row = p->b_row, c_row = p->c_row;
    const size_t lines = max_size(1, vectors * LANES / LINE_ELEMENTS); // of a row
    const size_t next_a = p->next_a, next_b = p->next_b + row / rows % lines * LINE_ELEMENTS;
    const real *a[ROWS], *b = p->b;
    real *c = p->c + row * c_row;
    vec acc[ROWS][MAX_VECTORS];
    UNROLLED(i, rows) {
        a[i] = p->a + (row + i) * p->a_row;
        UNROLLED(j, vectors) {
            const size_t count = remaining(columns, j);
            acc[i][j] = p->accumulate ? load(c + i * c_row + j * LANES, count) : (vec){0};
        }
    }
    for (size_t d = 0, at = 0; d < p->depth; d++, at += a_step, b += b_row) {
        if (vectors > 1) { // with one, loads are the limit
            __builtin_prefetch(a[0] + at + next_a, 0, 2);
            __builtin_prefetch(b + next_b, 0, 2);
        }
        dot_step(rows, vectors, acc, a, at, b);
    }
    UNROLLED(i, rows)
        UNROLLED(j, vectors)
            store(c + i * c_row + j * LANES, acc[i][j], remaining(columns, j));
}

// Computes a product of at most `vectors` vectors of columns, whose rows are a multiple of `rows`,
// tile after tile, while the rows of b stay in L1.
INLINE void product_strip(const size_t rows, const size_t vectors, const Product *p) {
    for (size_t row = 0; row < p->rows; row += rows)
        product_tile(rows, vectors, p, row);
}

/* The compiler keeps acc in registers only where the size of a tile is constant, so each size is a
   function of its own, and tables select among them. Not inlined: with several tiles in one
   function gcc spills registers. */
#define TILE(tile, rows, columns, Arguments)                      \
    NOINLINE void tile##_##rows##_##columns(const Arguments *t) { \
        tile(rows, columns, t);                                   \
    }
#define TILES(tile, rows, Arguments) \
    TILE(tile, rows, 1, Arguments)   \
    TILE(tile, rows, 2, Arguments)   \
    TILE(tile, rows, 3, Arguments)   \
    TILE(tile, rows, 4, Arguments)
#define TILE_ROW(tile, rows) \
    { tile##_##rows##_1, tile##_##rows##_2, tile##_##rows##_3, tile##_##rows##_4 }
TILES(dot_tile, 6, DotTile)
TILES(product_strip, 2, Product)
TILES(product_strip, 3, Product)
TILES(product_strip, 4, Product)
TILES(product_strip, 5, Product)
TILES(product_strip, 6, Product)
typedef void DotTileFunction(const DotTile *t);
typedef void ProductFunction(const Product *t);
// by vectors - 1; product_strips by rows - 2, then by vectors - 1
static DotTileFunction *const dot_tiles[MAX_VECTORS] = TILE_ROW(dot_tile, 6);
static ProductFunction *const product_strips[ROWS - 1][MAX_VECTORS] = {
    TILE_ROW(product_strip, 2), TILE_ROW(product_strip, 3), TILE_ROW(product_strip, 4),
    TILE_ROW(product_strip, 5), TILE_ROW(product_strip, 6)};

/* Computes one strip of columns after another. Rows that do not fill a tile are a smaller tile. A
   single row is computed twice, into the same place: for AMD's Zen, gcc uses no FMA in a loop with
   only one sum, which would be rounded differently. It takes no longer: latency is the limit. */
static void multiply(const Product *p) {
    const size_t whole = p->rows / ROWS * ROWS, rest = p->rows - whole;
    for (size_t column = 0; column < p->columns; column += COLUMNS) {
        Product strip = *p;
        strip.columns = min_size(COLUMNS, p->columns - column);
        const size_t vectors = ceil_div(strip.columns, LANES);
        strip.rows = whole;
        strip.b += column;
        strip.c += column;
        product_strips[ROWS - 2][vectors - 1](&strip);
        if (rest == 0)
            continue;
        strip.rows = rest;
        strip.a += whole * p->a_row;
        strip.c += whole * p->c_row;
        if (rest == 1)
            strip.a_row = strip.c_row = 0;
        product_strips[max_size(rest, 2) - 2][vectors - 1](&strip);
    }
}

/* A forward pass or a data gradient: in both, `in` is read and `out` is computed. Adjacent taps in
   a row of the filter select adjacent input pixels. Where the channels are few, such a run of taps
   is read as one tap that is kernel * channels deep. */
typedef struct Pass {
    const int32_t *map;      // [out_pixels][1 + taps * run]: an output pixel, then its input pixels
    Shape in, out;           // in.c channels are summed over, out.c columns are computed
    size_t taps, run, depth; // taps of this pass; taps of the filter in each; elements in each
    size_t in_pixels, out_pixels;
    size_t padding;           // of the input, as this pass sees it
    size_t in_step, out_step; // in_step pixels of the input are as far as out_step of the output
    size_t tile;     // outputs across a Winograd tile, or 0: not by Winograd. 4; 2 for 5 x 5; 8 in
                     // the data gradient with stride 2
    size_t side;     // points across it: SIDE, or with stride 2 STRIDED_SIDE
    bool inside;     // no tap is ever outside of the image
    bool transposed; // the weights are stored [tap][column][depth]
    bool relu;       // output = max(sum, 0)
    bool accumulate; // output +=
    // the data, see bind_pass()
    size_t n;               // images
    const real *input;      // [n][in_pixels][in.c]
    real *output;           // [n][out_pixels][out.c]
    const real *weight;     // [taps][depth][out.c], or transposed
    const real *bias;       // [out.c], or NULL
    real *packed, *scratch; // the weights, packed; tile_area() for each thread
} Pass;

// See "Winograd" below.
static bool suits_winograd(const Layer *l, Shape in, Shape out) {
    const size_t kernel = l->kernel_size;
    if (in.c % LANES != 0 || in.c > MAX_DEPTH)
        return false;
    // Gain with stride 2: 1.2 to 1.4 with 64 to 512 channels (Zen 3); fewer were not measured.
    if (l->stride == 2)
        return kernel == 3 && l->padding == 1 && in.c >= 64 && out.c >= 64 &&
               l->out.h * l->out.w >= 16;
    return (kernel == 3 || kernel == 5) && l->stride == 1 && in.c >= FEW && out.c >= LANES &&
           out.h * out.w >= 16; // with 4 x 4, 512 channels and 32 images still 3 times as fast
}

// Returns the elements of one map: of the pixels of a layer's input or output.
static size_t map_size(const Layer *l, Shape s) {
    return s.h * s.w * (1 + l->kernel_size * l->kernel_size);
}

static Pass make_pass(const Layer *l, const int32_t *map, Shape in, Shape out, size_t run) {
    return (Pass){.map = map,
                  .in = in,
                  .out = out,
                  .taps = l->kernel_size * l->kernel_size / run,
                  .run = run,
                  .depth = run * in.c,
                  .in_pixels = in.h * in.w,
                  .out_pixels = out.h * out.w,
                  .in_step = 1,
                  .out_step = 1,
                  .tile = run == 1 && suits_winograd(l, in, out) ? SIDE + 1 - l->kernel_size : 0,
                  .side = l->stride == 1 ? SIDE : STRIDED_SIDE};
}

static Pass forward_pass(const Layer *l, bool relu, const int32_t *maps) {
    Pass p = make_pass(l, maps, l->in, l->out, l->in.c < FEW ? l->kernel_size : 1);
    p.in_step = l->stride;
    p.padding = l->padding;
    p.inside = l->padding == 0;
    p.relu = relu;
    return p;
}

static Pass backward_pass(const Layer *l, const int32_t *maps, bool accumulate) {
    Pass p = make_pass(l, maps ? maps + map_size(l, l->out) : NULL, l->out, l->in, 1);
    p.out_step = l->stride;
    p.tile *= l->stride;
    p.padding = (l->kernel_size - 1 - l->padding) / l->stride; // not below 0, see window_fits()
    p.inside = p.padding == 0 && l->stride == 1;
    p.transposed = true;
    p.accumulate = accumulate;
    return p;
}

// Returns the bytes of a layer's two maps: of its output pixels, then of its input pixels.
static size_t maps_size(const Layer *l) {
    const bool convolves = has_weight_matrix(l);
    return convolves ? (map_size(l, l->in) + map_size(l, l->out)) * sizeof(int32_t) : 0;
}

static void make_maps(void *maps, const Layer *l) {
    if (!has_weight_matrix(l))
        return;
    const Shape I = l->in, O = l->out;
    const size_t taps = l->kernel_size * l->kernel_size, s = l->stride;
    int32_t *at = maps;
    for (size_t y = 0; y < O.h; y++)
        for (size_t x = 0; x < O.w; x++) {
            *at++ = (int32_t)(y * O.w + x);
            for (size_t tap = 0; tap < taps; tap++)
                *at++ = (int32_t)input_pixel(l, y, x, tap);
        }
    // With a stride, adjacent input pixels are read through different taps. Those that are read
    // through the same ones follow each other, so that a tile's list of taps is short.
    for (size_t phase = 0; phase < s * s; phase++)
        for (size_t iy = phase / s; iy < I.h; iy += s)
            for (size_t ix = phase % s; ix < I.w; ix += s) {
                *at++ = (int32_t)(iy * I.w + ix);
                for (size_t tap = 0; tap < taps; tap++) {
                    size_t sy = iy + l->padding - tap / l->kernel_size;
                    size_t sx = ix + l->padding - tap % l->kernel_size;
                    bool read = sy % s == 0 && sx % s == 0 && sy / s < O.h && sx / s < O.w;
                    *at++ = read ? (int32_t)(sy / s * O.w + sx / s) : OUTSIDE;
                }
            }
}

// Returns the width, in whole vectors, of the tiles that compute the columns from `first` on.
static size_t block_width(const Pass *p, size_t first) {
    return whole_vectors(min_size(COLUMNS, p->out.c - first));
}

/* L2 blocking: a panel is the part of the weights that stays in L2 while tile after tile reads it,
   for some of the columns and some of the depth. Packed, the columns of each tile are stored in
   reading order: [tap][depth][block_width()]. */
typedef struct Panel {
    size_t column, columns;
    size_t start, depth; // [start, start + depth) of the whole depth
    real *packed;
} Panel;

static size_t panel_depth(const Pass *p) {
    return min_size(MAX_DEPTH, WEIGHT_BYTES / (p->taps * COLUMNS * sizeof(real)));
}

// Returns how many panels, one below the other, share columns.
static size_t depth_panels(const Pass *p) {
    return ceil_div(p->depth, panel_depth(p));
}

static size_t panel_columns(const Pass *p) {
    size_t rows = p->taps * min_size(p->depth, panel_depth(p));
    return WEIGHT_BYTES / (rows * COLUMNS * sizeof(real)) * COLUMNS;
}

// Where the weights of `column` begin in the packed weights, at depth `start`
static size_t packed_offset(const Pass *p, size_t column, size_t start) {
    return p->taps * (column * p->depth + start * block_width(p, column));
}

static Panel panel_at(const Pass *p, size_t column, size_t columns, size_t start) {
    return (Panel){.column = column,
                   .columns = min_size(columns, p->out.c - column),
                   .start = start,
                   .depth = min_size(panel_depth(p), p->depth - start),
                   .packed = p->packed + packed_offset(p, column, start)};
}

// A vector of four elements. The macros interleave the lower or the upper halves of two vectors.
typedef real quad __attribute__((vector_size(4 * sizeof(real)), aligned(sizeof(real)), may_alias));
#ifdef __clang__
#define INTERLEAVE_LOW(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define INTERLEAVE_HIGH(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#else
typedef lane quad_order __attribute__((vector_size(4 * sizeof(lane))));
#define INTERLEAVE_LOW(a, b) __builtin_shuffle(a, b, (quad_order){0, 4, 1, 5})
#define INTERLEAVE_HIGH(a, b) __builtin_shuffle(a, b, (quad_order){2, 6, 3, 7})
#endif

// to[4][4] = from[4][4] transposed; to and from are parts of matrices with these pitches.
INLINE void transpose_quads(real *to, size_t to_pitch, const real *from, size_t pitch) {
    quad row[4];
    UNROLLED(i, 4)
        row[i] = *(const quad *)(from + i * pitch);
    const quad even_low = INTERLEAVE_LOW(row[0], row[2]), odd_low = INTERLEAVE_LOW(row[1], row[3]);
    const quad even_high = INTERLEAVE_HIGH(row[0], row[2]);
    const quad odd_high = INTERLEAVE_HIGH(row[1], row[3]);
    *(quad *)to = INTERLEAVE_LOW(even_low, odd_low);
    *(quad *)(to + to_pitch) = INTERLEAVE_HIGH(even_low, odd_low);
    *(quad *)(to + 2 * to_pitch) = INTERLEAVE_LOW(even_high, odd_high);
    *(quad *)(to + 3 * to_pitch) = INTERLEAVE_HIGH(even_high, odd_high);
}

/* to[depth][width] = from[columns][depth] transposed, with zeros after the columns; pitch: from a
   row of from to the next. Blocks of 4 x 4 in registers take a fifth of the time of single elements
   (Zen 3). One cache line of each row is read at a time: see odd_lines(). */
static void transpose(real *to, size_t width, const real *from, size_t pitch, size_t columns,
                      size_t depth) {
    const size_t whole_columns = columns / 4 * 4, whole_depth = depth / 4 * 4;
    for (size_t line = 0; line < whole_depth; line += LINE_ELEMENTS)
        for (size_t j = 0; j < whole_columns; j += 4) {
            UNROLLED(i, 4)
                __builtin_prefetch(from + (j + i) * pitch + line + LINE_ELEMENTS);
            for (size_t d = line; d < min_size(line + LINE_ELEMENTS, whole_depth); d += 4)
                transpose_quads(to + d * width + j, width, from + j * pitch + d, pitch);
        }
    for (size_t j = 0; j < width; j++) // what does not fill a block
        for (size_t d = j < whole_columns ? whole_depth : 0; d < depth; d++)
            to[d * width + j] = j < columns ? from[j * pitch + d] : 0;
}

// Packs a panel of one tile's columns: from weight[tap][depth][column], or transposed.
static void pack_panel(const Pass *p, Panel panel) {
    enum { AHEAD = 8 }; // rows
    const size_t width = block_width(p, panel.column);
    for (size_t tap = 0; tap < p->taps; tap++, panel.packed += panel.depth * width) {
        const real *from = p->weight + tap * p->depth * p->out.c;
        if (p->transposed) {
            from += panel.column * p->depth + panel.start;
            transpose(panel.packed, width, from, p->depth, panel.columns, panel.depth);
            continue;
        }
        from += panel.start * p->out.c + panel.column;
        for (size_t d = 0; d < panel.depth; d++)
            for (size_t j = 0; j < width; j += LANES) {
                *(vec *)(panel.packed + d * width + j) =
                    load(from + d * p->out.c + j, panel.columns - j);
                __builtin_prefetch(from + (d + AHEAD) * p->out.c + j);
            }
    }
}

static void pack_ith_panel(const void *context, size_t i) {
    const Pass *p = context;
    const size_t panels = depth_panels(p);
    pack_panel(p, panel_at(p, i / panels * COLUMNS, COLUMNS, i % panels * panel_depth(p)));
}

static void pack_weights(const Pass *p) {
    parallel(ceil_div(p->out.c, COLUMNS) * depth_panels(p), pack_ith_panel, p);
}

static size_t packed_size(const Pass *p) {
    if (p->tile)
        return ceil_div(p->out.c, COLUMNS) * POINTS * odd_lines(p->depth * COLUMNS);
    return p->taps * p->depth * whole_vectors(p->out.c);
}

// Returns the pass on the data of a step, with its weights packed into the scratch memory.
static Pass bind_pass(Pass p, real *output, const real *input, const real *bias, Work w) {
    p.n = w.n;
    p.input = input;
    p.output = output;
    p.weight = w.weight;
    p.bias = bias;
    p.packed = w.scratch;
    p.scratch = w.scratch + packed_size(&p);
    return p;
}

static const real zeros[MAX_DEPTH]; // what taps outside of the image read

// Assembles a run of taps that is partly outside of the image; returns NULL if all of it is.
NOINLINE const real *copy_run(const Pass *p, const real *image, const int32_t *pixels, real *copy) {
    bool any = false;
    for (size_t j = 0; j < p->run; j++) {
        bool inside = pixels[j] != OUTSIDE;
        any |= inside;
        memcpy(copy + j * p->in.c, inside ? image + (size_t)pixels[j] * p->in.c : zeros,
               p->in.c * sizeof *copy);
    }
    return any ? copy : NULL;
}

// Returns the address of what a tap selects, or NULL if that is outside of the image. pixels: an
// output pixel's part of the map. A run of taps that crosses the border is assembled in copy.
INLINE const real *tap_input(const Pass *p, const real *image, const int32_t *pixels, size_t tap,
                             real *copy) {
    pixels += tap * p->run;
    if (p->run > 1 && (pixels[0] == OUTSIDE || pixels[p->run - 1] == OUTSIDE))
        return copy_run(p, image, pixels, copy);
    return pixels[0] == OUTSIDE ? NULL : image + (size_t)pixels[0] * p->in.c;
}

// Lists the taps that are inside for any pixel of the tile; the others cost nothing.
static void list_padded_taps(DotTile *t, const Pass *p, const int32_t *const pixels[ROWS],
                             const real *const image[ROWS], real copies[ROWS][11 * RUN]) {
    t->taps = 0;
    for (size_t tap = 0; tap < p->taps; tap++) {
        bool any = false;
        for (size_t i = 0; i < ROWS; i++) {
            real *copy = copies[i] + (p->run > 1 ? tap * RUN : 0);
            const real *from = tap_input(p, image[i], pixels[i], tap, copy);
            any |= from != NULL;
            t->in[t->taps][i] = from ? from : zeros;
        }
        if (any)
            t->tap[t->taps++] = tap;
    }
}

// The same where all taps are inside. Each is then at the same distance from the first one, for all
// pixels.
static void list_unpadded_taps(DotTile *t, const Pass *p, const int32_t *const pixels[ROWS],
                               const real *const image[ROWS]) {
    for (size_t tap = 0; tap < p->taps; tap++) {
        ptrdiff_t offset = (pixels[0][tap * p->run] - *pixels[0]) * (ptrdiff_t)p->in.c;
        for (size_t i = 0; i < ROWS; i++)
            t->in[tap][i] = image[i] + (size_t)*pixels[i] * p->in.c + offset;
        t->tap[tap] = tap;
    }
    t->taps = p->taps;
}

// Adds up a panel's part of the sums, for the output pixels of `images` images from `first` on.
static void convolve_panel(const Pass *p, const Panel panel, size_t first, size_t images) {
    DotTile t = {.depth = panel.depth, .bias = p->bias, .pitch = p->in.c};
    t.accumulate = p->accumulate;
    t.relu = p->relu;
    real copies[ROWS][11 * RUN];
    const size_t pixels = images * p->out_pixels;
    const size_t begin = packed_offset(p, panel.column, panel.start);
    size_t n = first, pixel = 0; // of the next row of a tile
    for (size_t q = 0; q < pixels; q += ROWS) {
        const int32_t *selected[ROWS];
        const real *image[ROWS];
        for (size_t i = 0; i < ROWS; i++) {
            const int32_t *row = p->map + pixel * (1 + p->taps * p->run);
            t.out[i] = p->output + (n * p->out_pixels + (size_t)row[0]) * p->out.c;
            selected[i] = row + 1;
            image[i] = p->input + n * p->in_pixels * p->in.c + panel.start;
            pixel += q + i + 1 < pixels; // a short last tile repeats its last pixel
            if (pixel == p->out_pixels) {
                pixel = 0;
                n++;
            }
        }
        if (p->inside)
            list_unpadded_taps(&t, p, selected, image);
        else
            list_padded_taps(&t, p, selected, image, copies);
        for (size_t c = 0; c < panel.columns; c += COLUMNS) {
            t.columns = min_size(COLUMNS, panel.columns - c);
            t.column = panel.column + c;
            t.weight = panel.packed + (packed_offset(p, t.column, panel.start) - begin);
            dot_tiles[ceil_div(t.columns, LANES) - 1](&t);
        }
    }
}

// Computes the output of `images` images from `first` on, `columns` columns from `column` on.
static void convolve_block(const Pass *p, size_t first, size_t images, size_t column,
                           size_t columns) {
    for (size_t start = 0; start < p->depth; start += panel_depth(p)) {
        const Panel panel = panel_at(p, column, columns, start);
        Pass part = *p;
        part.accumulate = start > 0 || p->accumulate;
        part.relu = p->relu && start + panel.depth == p->depth;
        convolve_panel(&part, panel, first, images);
    }
}

// A pass, divided into blocks of images and columns; a thread computes one block at a time.
typedef struct Blocks {
    const Pass *pass;
    size_t images, columns, across; // of a block; across: blocks that have the same images
} Blocks;

static void convolve_ith_block(const void *context, size_t i) {
    const Blocks *b = context;
    const size_t first = i / b->across * b->images;
    convolve_block(b->pass, first, min_size(b->images, b->pass->n - first),
                   i % b->across * b->columns, b->columns);
}

// output[pixel][column] = bias[column] + sum over taps and depth. In parallel: blocks of images and
// columns, made smaller until there are about SLICES of them, for balance among threads.
static void convolve(const Pass *p) {
    size_t columns = panel_columns(p);
    size_t images = min_size(p->n, ceil_div(GROUP_PIXELS, p->out_pixels));
    while (images > 1 && images * p->out_pixels > 24 &&
           ceil_div(p->n, images) * ceil_div(p->out.c, columns) < SLICES)
        images = ceil_div(images, 2);
    if (ceil_div(p->n, images) * ceil_div(p->out.c, columns) < SLICES)
        columns = COLUMNS;
    const Blocks b = {p, images, columns, ceil_div(p->out.c, columns)};
    pack_weights(p);
    parallel(ceil_div(p->n, images) * b.across, convolve_ith_block, &b);
}

/* A large linear layer (or 1 x 1 convolution) on few pixels spends its time on reading weights. So
   each panel is read once, by the thread that packs it and then uses it from its cache; the partial
   sums of panels that share columns are added at the end. Gain: 1.12 on mnist. The order of a sum
   depends on the number of images, never on the number of threads. */
static bool suits_panels(const Pass *p, size_t n) {
    size_t panels = ceil_div(p->out.c, COLUMNS) * depth_panels(p);
    return p->taps == 1 && n * p->out_pixels <= GROUP_PIXELS && panels >= 16; // enough for threads
}

static size_t part_size(const Pass *p) {
    return p->n * p->out_pixels * p->out.c;
}

// output[pixel] = bias + sum of the parts, or += that sum; then the ReLU
static void add_parts_of_pixel(const void *context, size_t pixel) {
    const Pass *p = context;
    const size_t columns = p->out.c, size = part_size(p), parts = depth_panels(p);
    for (size_t j = 0; j < columns; j++) {
        size_t at = pixel * columns + j;
        real sum = p->bias ? p->bias[j] : 0;
        if (p->accumulate)
            sum = p->output[at];
        for (size_t part = 0; part < parts; part++)
            sum += p->packed[part * size + at];
        p->output[at] = p->relu && sum < 0 ? 0 : sum;
    }
}

static void convolve_ith_panel(const void *context, size_t i) {
    const Pass *p = context;
    const size_t blocks = ceil_div(p->out.c, COLUMNS);
    const size_t part = i / blocks; // consecutive panels share rows of the weights
    real packed[MAX_DEPTH * COLUMNS] __attribute__((aligned(VECTOR_BYTES)));
    Panel panel = panel_at(p, i % blocks * COLUMNS, COLUMNS, part * MAX_DEPTH);
    Pass partial = *p;
    if (depth_panels(p) > 1) { // bias, accumulation and ReLU are add_parts_of_pixel()'s
        partial.output = p->packed + part * part_size(p);
        partial.bias = NULL;
        partial.accumulate = partial.relu = false;
    }
    panel.packed = packed;
    pack_panel(p, panel);
    convolve_panel(&partial, panel, 0, p->n);
}

/* As convolve(), but each panel is packed where it is used. Where the depth needs several panels,
   their partial sums [part][n][pixel][column] take the place of the packed weights: with one tap a
   panel is MAX_DEPTH deep, so they have no more elements than the weights. */
static void convolve_by_panels(const Pass *p) {
    _Static_assert(sizeof(real) * MAX_DEPTH * COLUMNS <= WEIGHT_BYTES, "a panel is MAX_DEPTH deep");
    _Static_assert(2 * GROUP_PIXELS <= MAX_DEPTH, "parts have no more elements than the weights");
    parallel(depth_panels(p) * ceil_div(p->out.c, COLUMNS), convolve_ith_panel, p);
    if (depth_panels(p) > 1)
        parallel(p->n * p->out_pixels, add_parts_of_pixel, p);
}

/* ---- Winograd -----------------------------------------------------------------------------------

   Reason: the register tile keeps the FMA units busy, so only an algorithm with fewer
   multiplications can be faster. 4 x 4 adjacent outputs of a 3 x 3 filter g, stride 1, read a tile
   d of 6 x 6 inputs. For each pair of channels the definition takes 16 * 9 = 144 multiplications;
   36 suffice (Lavin, Gray, "Fast algorithms for convolutional neural networks", CVPR 2016,
   F(4 x 4, 3 x 3)):
     u = G g G^T, v = B^T d B                     6 x 6 points each
     out = A^T (sum over channels in of u * v, point by point) A
   The same 36 points serve the 2 x 2 outputs of a 5 x 5 filter, instead of 100 multiplications.
   The transforms cost additions, but for each channel, not for each pair of channels. At each point
   the sum is a product of matrices, done by multiply(): its rows are the tiles, its columns the
   channels out; in a weight gradient its rows are the channels in, and the sum runs over the tiles.

   Gain: resnet18 1.9, mnist 1.4 (both on a Zen 4). Rates count the multiplications of the
   definition, so they can exceed the peak: both networks train at 1.5 times the peak rate there.

   Why it works, in one dimension: let g and dout be the coefficients of two polynomials. Those of
   their product are the data gradient, a polynomial of degree 5 that its values at 6 interpolation
   points determine; here 0, +-near, +-far and infinity (Toom, Cook). G g and A dout evaluate the
   two factors at these points, the values are multiplied, and B interpolates (Lagrange). The
   forward and the weight gradient are this bilinear map transposed. At x and -x the even terms are
   equal and the odd ones differ in sign, so a pair of points costs little more than one.

   Stride 2, padding 1: taps 0 and 2 read every other input, tap 1 those between. In one dimension,
   4 outputs are therefore the sum of two convolutions with stride 1: of taps 0 and 2 with 5 inputs,
   for which the five finite interpolation points suffice, and of tap 1 with the 4 inputs between,
   which are multiplied as they are. A tile then has 9 * 9 = 81 points, instead of the 144
   multiplications of the definition. Across it, 0 to 4 are the interpolated ones; 5 to 8 are all
   multiplied by tap 1, which is in the place of infinity in the transformed filter. In the data
   gradient the two convolutions compute different pixels of din, the odd ones and the even ones of
   8 x 8, from 5 x 5 of dout. The weight gradient would gain little and keeps the register tile.

   The choice of near and far determines how rounding errors grow: with 1 and 2, as in the paper,
   they are up to 5 times as large as in the definition; with 5/8 and 3/2, 1.2 to 2.8 times (root
   mean square, 32 to 512 channels, random data). */

static const real near = 5 / (real)8, near2 = near * near, near4 = near2 * near2;
static const real far = 3 / (real)2, far2 = far * far, far4 = far2 * far2;
// The factors of the even and the odd terms after the first, at +-near and at +-far.
static const real near_powers[2] = {near2, near4}, far_powers[2] = {far2, far4};
// Derivatives of x (x^2 - near^2) (x^2 - far^2) at 0, near and far: the denominators of Lagrange.
static const real slope0 = near2 * far2, near_slope = 2 * near2 * (near2 - far2),
                  far_slope = 2 * far2 * (far2 - near2);

// B^T d for one row (step 1) or one column (step `side`) of a tile, in place, as all that follow.
// Without infinity, for the first 5 points only.
INLINE void transform_input(const bool infinity, vec *d, size_t step) {
    vec d0 = d[0], d1 = d[step], d2 = d[2 * step], d3 = d[3 * step], d4 = d[4 * step];
    vec near_even = d4 - far2 * d2, near_odd = near * (d3 - far2 * d1);
    vec far_even = d4 - near2 * d2, far_odd = far * (d3 - near2 * d1);
    d[0] = slope0 * d0 - (near2 + far2) * d2 + d4;
    d[step] = near_even + near_odd;
    d[2 * step] = near_even - near_odd;
    d[3 * step] = far_even + far_odd;
    d[4 * step] = far_even - far_odd;
    if (infinity)
        d[5 * step] += slope0 * d1 - (near2 + far2) * d3;
}

// A dout: from the `count` coefficients of a polynomial to its values at the points
INLINE void evaluate_polynomial(const size_t count, const bool infinity, vec *d, size_t step) {
    vec near_parts[2] = {d[0], d[step]}, far_parts[2] = {d[0], d[step]}; // even and odd terms
    vec last = d[(count - 1) * step];
    UNROLLED(i, count - 2) {
        near_parts[i % 2] += near_powers[i / 2] * d[(i + 2) * step];
        far_parts[i % 2] += far_powers[i / 2] * d[(i + 2) * step];
    }
    d[step] = near_parts[0] + near * near_parts[1];
    d[2 * step] = near_parts[0] - near * near_parts[1];
    d[3 * step] = far_parts[0] + far * far_parts[1];
    d[4 * step] = far_parts[0] - far * far_parts[1];
    if (infinity)
        d[5 * step] = last;
}

// A^T m, evaluate_polynomial() transposed: from the values to `count` coefficients
INLINE void evaluate_transposed(const size_t count, const bool infinity, vec *m, size_t step) {
    vec near_parts[2] = {m[step] + m[2 * step], near * (m[step] - m[2 * step])};
    vec far_parts[2] = {m[3 * step] + m[4 * step], far * (m[3 * step] - m[4 * step])};
    m[0] += near_parts[0] + far_parts[0];
    m[step] = near_parts[1] + far_parts[1];
    UNROLLED(i, count - 2)
        m[(i + 2) * step] =
            near_powers[i / 2] * near_parts[i % 2] + far_powers[i / 2] * far_parts[i % 2];
    if (infinity)
        m[(count - 1) * step] += m[5 * step];
}

// Lagrange's denominators are part of the filter's transform, where they cost least.
INLINE void divide_by_slopes(vec *u, size_t step) {
    u[0] *= 1 / slope0;
    u[step] *= 1 / near_slope;
    u[2 * step] *= 1 / near_slope;
    u[3 * step] *= 1 / far_slope;
    u[4 * step] *= 1 / far_slope;
}

// G g, of `kernel` taps
INLINE void transform_weight(const size_t kernel, const size_t stride, vec *g, size_t step) {
    evaluate_polynomial(ceil_div(kernel, stride), stride == 1, g, step);
    divide_by_slopes(g, step);
}

// G^T du, of 3 taps
INLINE void transform_dweight(vec *u, size_t step) {
    divide_by_slopes(u, step);
    evaluate_transposed(3, true, u, step);
}

// Returns where a tap of a filter's row is before its transform, which with stride 2 leaves the
// middle tap, the last, as it is.
INLINE size_t tap_position(const size_t stride, size_t tap) {
    return tap % stride == 0 ? tap / stride : FINITE;
}

// Returns the point of the filter that point i across a tile is multiplied by.
INLINE size_t filter_point(size_t side, size_t i) {
    const size_t y = min_size(i / side, FINITE), x = min_size(i % side, FINITE);
    return y * SIDE + x;
}

// Returns the points of a tile, before and after its transform.
INLINE size_t tile_points(const Pass *p) {
    return p->side * p->side;
}

// Returns the offset from a point to the next in the transformed filters, which are [block of
// COLUMNS][point][depth][block_width()].
INLINE size_t point_step(const Pass *p, size_t width) {
    return odd_lines(p->depth * width);
}

// Where the filters of the block of columns that has `column` begin
static size_t filters_offset(const Pass *p, size_t column) {
    return column / COLUMNS * POINTS * point_step(p, COLUMNS);
}

// filters[tap][i][j] = the weight of a tap from channel start + i to column + j, for LANES of each,
// with zeros after the columns. The data gradient reads the filter rotated by 180 degrees.
static void read_filters(real filters[MAX_TAPS][LANES][LANES], size_t taps, const Pass *p,
                         size_t column, size_t start) {
    const size_t count = min_size(LANES, p->out.c - column), size = p->depth * p->out.c;
    for (size_t tap = 0; tap < taps; tap++) {
        if (p->transposed) {
            const real *from = p->weight + (taps - 1 - tap) * size + column * p->depth + start;
            transpose(filters[tap][0], LANES, from, p->depth, count, LANES);
            continue;
        }
        const real *from = p->weight + tap * size + start * p->out.c + column;
        for (size_t i = 0; i < LANES; i++)
            *(vec *)filters[tap][i] = load(from + i * p->out.c, count);
    }
}

// Transforms the filters of LANES columns from `column` on and LANES channels from `start` on; `to`
// is where the filters of their block of columns begin.
INLINE void pack_filters(const size_t kernel, const size_t stride, real *to, const Pass *p,
                         size_t column, size_t start) {
    const size_t taps = kernel * kernel, first = column / COLUMNS * COLUMNS;
    const size_t width = block_width(p, first), step = point_step(p, width);
    real filters[MAX_TAPS][LANES][LANES];
    read_filters(filters, taps, p, column, start);
    to += start * width + column - first;
    for (size_t d = 0; d < LANES; d++, to += width) {
        vec g[POINTS] = {{0}};
        UNROLLED(tap, taps)
            g[tap_position(stride, tap / kernel) * SIDE + tap_position(stride, tap % kernel)] =
                *(const vec *)filters[tap][d];
        UNROLLED(i, kernel)
            transform_weight(kernel, stride, g + SIDE * tap_position(stride, i), 1);
        UNROLLED(j, SIDE)
            transform_weight(kernel, stride, g + j, SIDE);
        UNROLLED(point, POINTS)
            *(vec *)(to + point * step) = g[point];
    }
}

// The same for all channels
static void pack_columns(real *to, const Pass *p, size_t column) {
    for (size_t start = 0; start < p->depth; start += LANES)
        if (p->side == STRIDED_SIDE)
            pack_filters(3, 2, to, p, column, start);
        else if (p->tile == 4)
            pack_filters(3, 1, to, p, column, start);
        else
            pack_filters(5, 1, to, p, column, start);
}

static void pack_ith_columns(const void *context, size_t i) {
    const Pass *p = context;
    const size_t column = i * LANES;
    pack_columns(p->packed + filters_offset(p, column), p, column);
}

static void pack_winograd(const Pass *p) {
    parallel(ceil_div(p->out.c, LANES), pack_ith_columns, p);
}

// How many MB of L2 a core has, 1 or 2; 0: the system has not been asked yet
static size_t l2_megabytes;

// Returns how many times as large as for 1 MB of L2 the blocks below are that stay in L2. No order
// of a sum depends on it. Gain with 2 MB: resnet18 1.03 (Intel, AVX-512); more was not measured.
// The system is asked only once. Before 2.33, glibc executes CPUID several times in each call,
// which takes long in a virtual machine; and two kinds of cores may give two answers, while scratch
// memory is planned for one.
static size_t l2_factor(void) {
    size_t factor = __atomic_load_n(&l2_megabytes, __ATOMIC_RELAXED);
    if (factor > 0)
        return factor;
    long bytes = 0;
#ifdef _SC_LEVEL2_CACHE_SIZE
    bytes = sysconf(_SC_LEVEL2_CACHE_SIZE); // 0 or -1: unknown
#endif
    factor = bytes > 0 ? min_size(max_size((size_t)bytes >> 20, 1), 2) : 1;
    __atomic_store_n(&l2_megabytes, factor, __ATOMIC_RELAXED);
    return factor;
}

// Returns how many tiles a thread transforms at a time.
static size_t block_tiles(void) {
    return BLOCK_TILES * l2_factor();
}

/* `tiles` tiles from `first` on, and `columns` columns from `column` on. v is the transformed
   input, [point][tile][depth]; m is the products, in a weight gradient the transformed dout,
   [point][tile][column]. Passed by value, so that the compiler knows that no store changes it. */
typedef struct TileBlock {
    const Pass *pass;
    size_t first, tiles, column, columns;
    size_t v_pitch, m_pitch; // from a tile to the next
    size_t v_step, m_step;   // from a point to the next
    real *v, *m;
    const real *filters; // transformed, from `column` on
} TileBlock;

// Returns the block of tiles [first, last) and columns [column, end); v and m are at `memory`.
static TileBlock tile_block(const Pass *p, size_t first, size_t last, size_t column, size_t end,
                            real *memory) {
    TileBlock b = {.pass = p, .first = first, .tiles = last - first};
    b.column = column;
    b.columns = min_size(end, p->out.c) - column;
    b.v_pitch = odd_lines(p->depth);
    b.m_pitch = odd_lines(b.columns);
    b.v_step = odd_lines(b.tiles * b.v_pitch);
    b.m_step = odd_lines(b.tiles * b.m_pitch);
    b.v = memory;
    b.m = memory + tile_points(p) * b.v_step;
    b.filters = p->packed ? p->packed + filters_offset(p, column) : NULL;
    return b;
}

// Group i of ROWS tiles of a block
static TileBlock group_of_tiles(TileBlock b, size_t i) {
    const size_t begin = i * ROWS;
    b.first += begin;
    b.tiles = min_size(ROWS, b.tiles - begin);
    b.v += begin * b.v_pitch;
    b.m += begin * b.m_pitch;
    return b;
}

// Returns the elements of v and m of at most `tiles` tiles and all columns.
static size_t tile_area(const Pass *p, size_t tiles) {
    return tile_points(p) *
           (odd_lines(tiles * odd_lines(p->depth)) + odd_lines(tiles * odd_lines(p->out.c)));
}

static size_t count_tiles(const Pass *p, size_t n) {
    return n * ceil_div(p->out.h, p->tile) * ceil_div(p->out.w, p->tile);
}

// Where a tile is: its image and its first output pixel (y, x).
typedef struct TilePosition {
    size_t image, y, x;
} TilePosition;

INLINE TilePosition tile_position(TileBlock b, size_t t) {
    const size_t side = b.pass->tile, tile = b.first + t;
    const size_t across = ceil_div(b.pass->out.w, side), down = ceil_div(b.pass->out.h, side);
    return (TilePosition){tile / across / down, tile / across % down * side, tile % across * side};
}

// Returns the offset of a tile's first output pixel in out or dout.
INLINE size_t tile_offset(TileBlock b, TilePosition s) {
    const Pass *p = b.pass;
    return (s.image * p->out_pixels + s.y * p->out.w + s.x) * p->out.c + b.column;
}

// Returns whether a tile needs no tests: it does not cross the edge of the image, and the columns
// of the pass are whole vectors.
INLINE bool is_whole(TileBlock b, TilePosition s) {
    const Pass *p = b.pass;
    return s.y + p->tile <= p->out.h && s.x + p->tile <= p->out.w && p->out.c % LANES == 0;
}

INLINE bool is_inside(TileBlock b, TilePosition s, size_t y, size_t x) {
    return s.y + y < b.pass->out.h && s.x + x < b.pass->out.w;
}

// v = B^T d B of a tile's inputs `from`; prefetches what the tile to the right reads.
INLINE void input_tile(const size_t side, TileBlock b, const real *const *from, size_t t) {
    const Pass *p = b.pass;
    const size_t points = side * side, next = p->tile * p->in_step / p->out_step * p->depth;
    for (size_t c = 0; c < p->depth; c += LANES) {
        vec d[MAX_POINTS];
        UNROLLED(i, points) {
            d[i] = *(const vec *)(from[i] + c);
            __builtin_prefetch(from[i] + next + c);
        }
        UNROLLED(j, side)
            transform_input(side == SIDE, d + j, side);
        UNROLLED(i, side)
            transform_input(side == SIDE, d + side * i, 1);
        UNROLLED(i, points)
            *(vec *)(b.v + i * b.v_step + t * b.v_pitch + c) = d[i];
    }
}

// Returns which input, counted from a tile's first, belongs to point i across it. With stride 2,
// the middle tap reads those between the others or, in the data gradient, the same.
static size_t input_offset(const Pass *p, size_t i) {
    const bool middle = p->side == STRIDED_SIDE && i >= FINITE;
    return middle ? (i - FINITE + 1) * p->in_step - 1 : i * p->in_step;
}

// This function, winograd_output(), winograd_dout() and store_block() are not inlined: a second
// copy might be rounded differently.
NOINLINE void winograd_input(TileBlock b) {
    const Pass *p = b.pass;
    for (size_t t = 0; t < b.tiles; t++) {
        const TilePosition s = tile_position(b, t);
        const real *from[MAX_POINTS];
        for (size_t i = 0; i < tile_points(p); i++) {
            size_t y = s.y * p->in_step / p->out_step + input_offset(p, i / p->side) - p->padding;
            size_t x = s.x * p->in_step / p->out_step + input_offset(p, i % p->side) - p->padding;
            size_t pixel = s.image * p->in_pixels + y * p->in.w + x;
            from[i] = y < p->in.h && x < p->in.w ? p->input + pixel * p->depth : zeros;
        }
        if (p->side == SIDE)
            input_tile(SIDE, b, from, t);
        else
            input_tile(STRIDED_SIDE, b, from, t);
    }
}

// A^T m for one row or column. With stride 2, a forward adds what the middle tap gives.
INLINE void transform_output(const size_t side, const size_t tile, vec *m, size_t step) {
    evaluate_transposed(min_size(tile, 4), side == SIDE, m, step);
    if (side == STRIDED_SIDE && tile == 4)
        UNROLLED(i, 4)
            m[i * step] += m[(FINITE + i) * step];
}

// Returns where output i of a row is after transform_output(): in the data gradient of stride 2
// the middle tap alone gives the even ones.
INLINE size_t output_position(const size_t tile, size_t i) {
    if (tile < 8)
        return i;
    return i % 2 == 0 ? FINITE + i / 2 : i / 2;
}

/* Computes tile t of a block, at position s: output = A^T m A + bias, or +=; then the ReLU. side
   and tile are p->side and p->tile. If `whole`, is_whole() holds, and nothing is added to the
   output. */
INLINE void output_tile(const size_t side, const size_t tile, const bool whole, TileBlock b,
                        TilePosition s, size_t t) {
    const Pass *p = b.pass;
    const size_t pixel = p->out.c, row = p->out.w * pixel;
    const bool relu = p->relu, accumulate = p->accumulate;
    const real *bias = p->bias, *m = b.m + t * b.m_pitch;
    real *output = p->output + tile_offset(b, s);
    for (size_t j = 0; j < b.columns; j += LANES) {
        const size_t count = whole ? LANES : b.columns - j;
        vec sums[MAX_POINTS], start = bias ? load(bias + b.column + j, count) : (vec){0};
        UNROLLED(i, side * side)
            sums[i] = *(const vec *)(m + i * b.m_step + j);
        UNROLLED(i, side)
            transform_output(side, tile, sums + i, side);
        UNROLLED(i, tile)
            transform_output(side, tile, sums + side * output_position(tile, i), 1);
        UNROLLED(i, tile * tile) {
            const size_t y = i / tile, x = i % tile;
            real *to = output + y * row + x * pixel + j;
            vec sum = sums[output_position(tile, y) * side + output_position(tile, x)] + start;
            if (!whole && !is_inside(b, s, y, x))
                continue;
            if (!whole && accumulate)
                sum += load(to, count);
            store(to, relu ? relu_vec(sum) : sum, count);
        }
    }
}

NOINLINE void winograd_output(TileBlock b) {
    for (size_t t = 0; t < b.tiles; t++) {
        const TilePosition s = tile_position(b, t);
        const bool whole = is_whole(b, s) && !b.pass->accumulate;
        if (b.pass->tile == 8)
            output_tile(STRIDED_SIDE, 8, false, b, s, t);
        else if (b.pass->side == STRIDED_SIDE)
            output_tile(STRIDED_SIDE, 4, false, b, s, t);
        else if (b.pass->tile == 4 && whole)
            output_tile(SIDE, 4, true, b, s, t);
        else if (b.pass->tile == 4)
            output_tile(SIDE, 4, false, b, s, t);
        else
            output_tile(SIDE, 2, false, b, s, t);
    }
}

// m = A dout A^T of tile t of a block, which is at s
INLINE void dout_tile(const bool whole, TileBlock b, TilePosition s, size_t t, const real *dout) {
    enum { TILE_SIDE = SIDE + 1 - 3 };
    const size_t pixel = b.pass->out.c, row = b.pass->out.w * pixel;
    const real *from = dout + tile_offset(b, s);
    real *m = b.m + t * b.m_pitch;
    for (size_t j = 0; j < b.columns; j += LANES) {
        const size_t count = whole ? LANES : b.columns - j;
        vec d[POINTS];
        UNROLLED(i, TILE_SIDE * TILE_SIDE) {
            const size_t y = i / TILE_SIDE, x = i % TILE_SIDE;
            d[y * SIDE + x] = (vec){0};
            if (whole || is_inside(b, s, y, x))
                d[y * SIDE + x] = load(from + y * row + x * pixel + j, count);
        }
        UNROLLED(i, TILE_SIDE)
            evaluate_polynomial(TILE_SIDE, true, d + SIDE * i, 1);
        UNROLLED(i, SIDE)
            evaluate_polynomial(TILE_SIDE, true, d + i, SIDE);
        UNROLLED(i, POINTS)
            *(vec *)(m + i * b.m_step + j) = d[i];
    }
}

NOINLINE void winograd_dout(TileBlock b, const real *dout) {
    for (size_t t = 0; t < b.tiles; t++) {
        const TilePosition s = tile_position(b, t);
        if (is_whole(b, s))
            dout_tile(true, b, s, t, dout);
        else
            dout_tile(false, b, s, t, dout);
    }
}

// m[point][tile][column] = sum over depth of v[point][tile][depth] * u[point][depth][column]
static void winograd_products(TileBlock b) {
    const Pass *p = b.pass;
    Product product = {.rows = b.tiles, .depth = p->depth, .a_row = b.v_pitch, .a_step = 1};
    product.c_row = b.m_pitch;
    for (size_t point = 0; point < tile_points(p); point++)
        for (size_t j = 0; j < b.columns; j += COLUMNS) {
            const size_t width = block_width(p, b.column + j);
            product.a = b.v + point * b.v_step;
            product.b = b.filters + filters_offset(p, j) +
                        filter_point(p->side, point) * point_step(p, width);
            product.c = b.m + point * b.m_step + j;
            product.columns = product.b_row = width;
            multiply(&product);
        }
}

// Computes the outputs of tiles [first, last) and columns [begin, end).
static void winograd_tiles(const Pass *p, size_t first, size_t last, size_t begin, size_t end) {
    real *memory = p->scratch + thread_number * tile_area(p, block_tiles());
    const TileBlock b = tile_block(p, first, last, begin, end, memory);
    winograd_input(b);
    winograd_products(b);
    winograd_output(b);
}

// A pass, divided into parts, which are whole groups of ROWS tiles, times blocks of columns
typedef struct TileParts {
    const Pass *pass;
    size_t tiles, parts, columns, across; // across: blocks of columns
} TileParts;

static void winograd_ith_part(const void *context, size_t i) {
    const TileParts *t = context;
    const Range groups = {0, ceil_div(t->tiles, ROWS)};
    const Range part = part_of(groups, i / t->across, t->parts);
    const size_t column = i % t->across * t->columns;
    winograd_tiles(t->pass, part.first * ROWS, min_size((part.first + part.count) * ROWS, t->tiles),
                   column, column + t->columns);
}

// In parallel: blocks of tiles, and where these are too few to balance the load of the threads,
// blocks of columns of each. No sum depends on this choice.
static void winograd_by_tiles(const Pass *p) {
    _Static_assert(BLOCK_TILES % ROWS == 0, "a block is a whole number of tiles of a product");
    TileParts t = {.pass = p, .tiles = count_tiles(p, p->n)};
    // smaller blocks where those for a larger L2 are too few for the threads
    const size_t fewest = min_size(ceil_div(t.tiles, BLOCK_TILES), 4 * num_threads);
    t.parts = max_size(ceil_div(t.tiles, block_tiles()), fewest);
    t.columns = t.parts >= 4 * num_threads ? p->out.c : COLUMNS;
    t.across = ceil_div(p->out.c, t.columns);
    pack_winograd(p);
    parallel(t.parts * t.across, winograd_ith_part, &t);
}

/* Where tiles are few and channels many, reading the filters takes most of the time. So v of all
   tiles is computed first; then each thread transforms the filters of a block of columns and uses
   them at once, from its cache. No sum depends on this choice. */
static bool suits_columns(const Pass *p) {
    return count_tiles(p, p->n) <= CHUNK_TILES && p->out.c >= 2 * num_threads * COLUMNS;
}

// Returns the elements of the transformed filters of a block of columns, and of its products.
static size_t column_area(const Pass *p, size_t tiles) {
    return filters_offset(p, COLUMNS) + tile_points(p) * odd_lines(tiles * odd_lines(COLUMNS));
}

static TileBlock all_tiles(const Pass *p, size_t column) {
    return tile_block(p, 0, count_tiles(p, p->n), column, column + COLUMNS, p->packed);
}

static void transform_ith_group(const void *context, size_t i) {
    const TileBlock b = all_tiles(context, 0);
    winograd_input(group_of_tiles(b, i));
}

static void winograd_ith_columns(const void *context, size_t i) {
    const Pass *p = context;
    TileBlock b = all_tiles(p, i * COLUMNS);
    real *filters = b.m + thread_number * column_area(p, b.tiles);
    for (size_t j = 0; j < b.columns; j += LANES)
        pack_columns(filters, p, b.column + j);
    b.filters = filters;
    b.m = filters + filters_offset(p, COLUMNS);
    winograd_products(b);
    winograd_output(b);
}

static void winograd_by_columns(const Pass *p) {
    parallel(ceil_div(count_tiles(p, p->n), ROWS), transform_ith_group, p);
    parallel(ceil_div(p->out.c, COLUMNS), winograd_ith_columns, p);
}

// Computes the pass by the method that suits it.
static void run_pass(const Pass *p) {
    if (p->tile && suits_columns(p))
        winograd_by_columns(p);
    else if (p->tile)
        winograd_by_tiles(p);
    else if (suits_panels(p, p->n))
        convolve_by_panels(p);
    else
        convolve(p);
}

// Computes the pass on one image, by one thread, from packed weights.
static void run_pass_on_image(const Pass *p) {
    if (p->tile) {
        const size_t tiles = count_tiles(p, 1), block = block_tiles();
        for (size_t first = 0; first < tiles; first += block)
            winograd_tiles(p, first, min_size(first + block, tiles), 0, p->out.c);
        return;
    }
    const size_t columns = panel_columns(p);
    for (size_t c = 0; c < p->out.c; c += columns)
        convolve_block(p, 0, 1, c, columns);
}

// Returns the elements of scratch memory for at most n images and num_threads threads.
static size_t pass_scratch(const Pass *p, size_t n) {
    if (!p->tile)
        return packed_size(p);
    const size_t tiles = min_size(count_tiles(p, n), CHUNK_TILES);
    const size_t by_tiles = packed_size(p) + num_threads * tile_area(p, block_tiles());
    const size_t by_columns = tile_points(p) * odd_lines(tiles * odd_lines(p->depth)) +
                              num_threads * column_area(p, tiles);
    return max_size(by_tiles, by_columns);
}

// ---- Weight gradients

/* By the register tile, a weight gradient is slices * parts independent pieces. A slice is a
   part of the batch, with sums of its own; a part is a range of units. A unit is a block of
   dweight: a tap, some of its channels, some of the columns. Where there is a bias, it follows
   as one more tap: it is the weight of an input that is always 1. */
typedef struct WeightGradient {
    Work w;
    Pass pass;
    size_t rows, row_blocks, column_blocks; // channels of a unit at most; blocks of a tap
    size_t units, slices, parts;
    size_t sums; // elements of a slice's sums, in whole vectors
} WeightGradient;

static WeightGradient weight_gradient_plan(const Layer *l, size_t n, const int32_t *maps) {
    WeightGradient g = {.pass = forward_pass(l, false, maps)};
    Pass *p = &g.pass;
    p->n = n;
    // By Winograd the rounding errors of a 5 x 5 filter's would be 3.3 times; with stride 2, the
    // gain would be 1.0 to 1.25 (Zen 3, one thread).
    if (l->kernel_size != 3 || l->stride != 1)
        p->tile = 0;
    g.sums = whole_vectors(l->weight_count + l->bias_count);
    const size_t worth = min_size(SLICE_ELEMENTS / g.sums, n * p->out_pixels / SLICE_PIXELS);
    g.slices = min_size(n, min_size(SLICES, max_size(1, worth)));
    g.column_blocks = ceil_div(p->out.c, COLUMN_BLOCK);
    const size_t wanted = ceil_div(SLICES, g.slices * p->taps * g.column_blocks);
    g.rows = ceil_div(min_size(ROW_BLOCK, ceil_div(p->depth, wanted)), ROWS) * ROWS;
    g.row_blocks = ceil_div(p->depth, g.rows);
    g.units = (p->taps * g.row_blocks + (l->bias_count > 0)) * g.column_blocks;
    g.parts = min_size(g.units, ceil_div(SLICES, g.slices));
    return g;
}

// A unit's operands for some pixels: what the tap selects, and the gradient of the output pixel;
// only of pixels where the tap is inside of the image.
typedef struct Operands {
    _Alignas(64) real in[PAIRS * (ROW_BLOCK + LINE_ELEMENTS)];
    _Alignas(64) real dout[PAIRS * (COLUMN_BLOCK + LINE_ELEMENTS)];
} Operands;

// Copies whole vectors, so up to LANES - 1 elements more than `count`.
INLINE void copy_vectors(real *to, const real *from, size_t count) {
    for (size_t i = 0; i < count; i += LANES)
        *(vec *)(to + i) = *(const vec *)(from + i);
}

// product->a = what a tap selects at output pixels [first, last) of the batch, from `channel` on;
// stores in inside[] at which of these pixels it selects something, and their number in depth.
static void copy_inputs(Product *product, Operands *o, size_t inside[PAIRS], const Pass *p,
                        size_t tap, size_t channel, size_t first, size_t last) {
    size_t image = first / p->out_pixels, pixel = first % p->out_pixels, count = 0;
    real run[RUN];
    product->a_step = odd_lines(product->rows);
    for (size_t q = first; q < last; q++) {
        const int32_t *pixels = p->map + pixel * (1 + p->taps * p->run) + 1;
        const real *in = tap_input(p, p->input + image * p->in_pixels * p->in.c, pixels, tap, run);
        if (in) {
            copy_vectors(o->in + count * product->a_step, in + channel, product->rows);
            inside[count] = q;
            count++;
        }
        pixel++;
        if (pixel == p->out_pixels) {
            pixel = 0;
            image++;
        }
    }
    product->a = o->in;
    product->depth = count;
}

// product->b = dout of the pixels inside[], from a column on; not copied where these are adjacent.
static void copy_gradients(Product *product, Operands *o, const size_t inside[PAIRS],
                           const real *dout, size_t pitch) {
    const size_t count = product->depth;
    product->b = dout + inside[0] * pitch;
    product->b_row = pitch;
    if (count == 0 || (inside[count - 1] - inside[0] == count - 1 && pitch <= COLUMN_BLOCK))
        return;
    product->b = o->dout;
    product->b_row = odd_lines(product->columns);
    for (size_t i = 0; i < count; i++)
        copy_vectors(o->dout + i * product->b_row, dout + inside[i] * pitch, product->columns);
}

// dweight (=) of a unit over the pixels of a slice
static void weight_gradient_unit(real *dweight, const WeightGradient *g, Range pixels, size_t tap,
                                 size_t channel, size_t column) {
    const Pass *p = &g->pass;
    Operands operands;
    size_t inside[PAIRS] = {0};
    Product product = {.c = dweight + (tap * p->depth + channel) * p->out.c + column};
    product.rows = min_size(g->rows, p->depth - channel);
    product.columns = min_size(COLUMN_BLOCK, p->out.c - column);
    product.c_row = p->out.c;
    product.a_row = 1;
    for (size_t q = 0; q < pixels.count; q += PAIRS) {
        const size_t first = pixels.first + q, last = first + min_size(PAIRS, pixels.count - q);
        copy_inputs(&product, &operands, inside, p, tap, channel, first, last);
        copy_gradients(&product, &operands, inside, g->w.dout + column, p->out.c);
        multiply(&product);
        product.accumulate = true;
    }
}

// dbias[column] (=) = sum over pixels of dout
static void bias_gradient(real *dbias, const WeightGradient *g, Range pixels, size_t column) {
    static const real one = 1;
    const size_t columns = g->pass.out.c;
    const Product product = {.a = &one,
                             .b = g->w.dout + pixels.first * columns + column,
                             .c = dbias + column,
                             .rows = 1,
                             .columns = min_size(COLUMN_BLOCK, columns - column),
                             .depth = pixels.count,
                             .b_row = columns};
    multiply(&product);
}

static void weight_gradient_ith_piece(const void *context, size_t i) {
    const WeightGradient *g = context;
    const Pass *p = &g->pass;
    const size_t slice = i / g->parts;
    const Range units = part_of((Range){0, g->units}, i % g->parts, g->parts);
    Range pixels = part_of((Range){0, p->n}, slice, g->slices); // of images
    pixels.first *= p->out_pixels;
    pixels.count *= p->out_pixels;
    real *dweight = g->w.dweight, *dbias = g->w.dbias;
    if (g->slices > 1) {
        dweight = g->w.scratch + slice * g->sums;
        dbias = dweight + g->w.l->weight_count;
    }
    for (size_t unit = units.first; unit < units.first + units.count; unit++) {
        const size_t column = unit % g->column_blocks * COLUMN_BLOCK;
        const size_t block = unit / g->column_blocks, tap = block / g->row_blocks;
        if (tap == p->taps)
            bias_gradient(dbias, g, pixels, column);
        else
            weight_gradient_unit(dweight, g, pixels, tap, block % g->row_blocks * g->rows, column);
    }
}

typedef struct SliceSum {
    real *to;
    const real *from;
    size_t slices, pitch, count;
} SliceSum;

enum { SUM_BLOCK = 1024 };

static void sum_ith_block(const void *context, size_t i) {
    const SliceSum *s = context;
    const size_t first = i * SUM_BLOCK, end = min_size(first + SUM_BLOCK, s->count);
    for (size_t j = first; j < end; j++)
        s->to[j] = s->from[j];
    for (size_t slice = 1; slice < s->slices; slice++)
        for (size_t j = first; j < end; j++)
            s->to[j] += s->from[slice * s->pitch + j];
}

/* to[i] = sum over slices of from[slice][i], for i < count; to may be from. In blocks whose sums
   stay in L1 while all slices are read: the same element of all slices would not, since slices are
   far apart, often by a power of 2. */
static void sum_slices(real *to, const real *from, size_t slices, size_t pitch, size_t count) {
    const SliceSum s = {to, from, slices, pitch, count};
    parallel(ceil_div(count, SUM_BLOCK), sum_ith_block, &s);
}

/* A 3 x 3 filter's weight gradient by Winograd, since the output is linear in u:
     du = sum over tiles of v * (A dout A^T), point by point;   dweight = G^T du G
   v and A dout A^T of a chunk of tiles are computed in parallel over tiles, then their products in
   parallel over blocks of du. A block is some channels times some columns, at all points. */
enum {
    DU_ROWS = 36, // times l2_factor(), for a block to stay in L2
    DU_COLUMNS = 64,
    DU_PITCH = DU_COLUMNS + LINE_ELEMENTS // from a row to the next; see odd_lines()
};

typedef struct WinogradGradient {
    const WeightGradient *g;
    TileBlock chunk;
    size_t across, blocks; // blocks of columns; blocks in all
    size_t chunks;         // of equally many tiles, at most CHUNK_TILES
    bool at_once;          // a thread finishes a block before it begins the next
    size_t rows, step;     // of a block; from a point of it to the next
    real *du;              // [kept][point][rows][DU_PITCH]
    size_t kept;           // all blocks or, at once, one for each thread
} WinogradGradient;

static WinogradGradient winograd_gradient_plan(const WeightGradient *g) {
    WinogradGradient w = {.g = g, .du = g->w.scratch};
    w.rows = min_size(DU_ROWS * l2_factor(), g->pass.depth);
    w.step = odd_lines(w.rows * DU_PITCH);
    w.across = ceil_div(g->pass.out.c, DU_COLUMNS);
    w.blocks = w.across * ceil_div(g->pass.depth, w.rows);
    w.chunks = ceil_div(count_tiles(&g->pass, g->pass.n), CHUNK_TILES);
    w.at_once = w.chunks == 1 && w.blocks >= 2 * num_threads;
    w.kept = w.at_once ? num_threads : w.blocks;
    return w;
}

static void transform_ith_tiles(const void *context, size_t i) {
    const WinogradGradient *w = context;
    const TileBlock b = group_of_tiles(w->chunk, i);
    winograd_input(b);
    winograd_dout(b, w->g->w.dout);
}

// du of a block at a point = the products of a chunk, or +=
static void multiply_block(const WinogradGradient *w, real *du, size_t block, size_t point) {
    const TileBlock c = w->chunk;
    const size_t row = block / w->across * w->rows, column = block % w->across * DU_COLUMNS;
    const Product product = {.a = c.v + point * c.v_step + row,
                             .b = c.m + point * c.m_step + column,
                             .c = du + point * w->step,
                             .rows = min_size(w->rows, c.pass->depth - row),
                             .columns = min_size(DU_COLUMNS, whole_vectors(c.columns - column)),
                             .depth = c.tiles,
                             .a_row = 1,
                             .a_step = c.v_pitch,
                             .b_row = c.m_pitch,
                             .c_row = DU_PITCH,
                             .next_a = c.v_step,
                             .next_b = c.m_step,
                             .accumulate = c.first > 0};
    multiply(&product);
}

// dweight = G^T du G, for a block
NOINLINE void store_block(const WinogradGradient *w, const real *du, size_t block) {
    const size_t depth = w->chunk.pass->depth, columns = w->chunk.pass->out.c;
    const size_t first = block / w->across * w->rows, column = block % w->across * DU_COLUMNS;
    const size_t count = min_size(DU_COLUMNS, columns - column);
    for (size_t row = 0; row < min_size(w->rows, depth - first); row++)
        for (size_t j = 0; j < count; j += LANES) {
            vec u[POINTS];
            UNROLLED(point, POINTS)
                u[point] = *(const vec *)(du + point * w->step + row * DU_PITCH + j);
            UNROLLED(i, SIDE)
                transform_dweight(u + i, SIDE);
            UNROLLED(i, 3)
                transform_dweight(u + SIDE * i, 1);
            real *to = w->g->w.dweight + (first + row) * columns + column + j;
            UNROLLED(tap, 9)
                store(to + tap * depth * columns, u[tap / 3 * SIDE + tap % 3], count - j);
        }
}

static void multiply_ith_point(const void *context, size_t i) {
    const WinogradGradient *w = context;
    const size_t block = i / POINTS;
    multiply_block(w, w->du + block * POINTS * w->step, block, i % POINTS);
}

static void store_ith_block(const void *context, size_t block) {
    const WinogradGradient *w = context;
    store_block(w, w->du + block * POINTS * w->step, block);
}

// A whole block by one thread, whose du stays in its cache
static void compute_ith_block(const void *context, size_t block) {
    const WinogradGradient *w = context;
    real *du = w->du + thread_number * POINTS * w->step;
    for (size_t point = 0; point < POINTS; point++)
        multiply_block(w, du, block, point);
    store_block(w, du, block);
}

static void bias_gradient_ith_block(const void *context, size_t i) {
    const WeightGradient *g = context;
    bias_gradient(g->w.dbias, g, (Range){0, g->pass.n * g->pass.out_pixels}, i * COLUMN_BLOCK);
}

static void winograd_gradient(const WeightGradient *g) {
    const Pass *p = &g->pass;
    WinogradGradient w = winograd_gradient_plan(g);
    real *memory = w.du + w.kept * POINTS * w.step;
    for (size_t i = 0; i < w.chunks; i++) {
        const Range part = part_of((Range){0, count_tiles(p, p->n)}, i, w.chunks);
        w.chunk = tile_block(p, part.first, part.first + part.count, 0, p->out.c, memory);
        parallel(ceil_div(part.count, ROWS), transform_ith_tiles, &w);
        if (w.at_once)
            parallel(w.blocks, compute_ith_block, &w);
        else
            parallel(w.blocks * POINTS, multiply_ith_point, &w);
    }
    if (!w.at_once)
        parallel(w.blocks, store_ith_block, &w);
    parallel(g->w.l->bias_count > 0 ? g->column_blocks : 0, bias_gradient_ith_block, g);
}

// Returns the elements of scratch memory for as many images as in the plan, or fewer.
static size_t weight_gradient_scratch(const WeightGradient *g) {
    const Pass *p = &g->pass;
    if (!p->tile)
        return g->slices > 1 ? g->slices * g->sums : 0;
    const size_t tiles = min_size(count_tiles(p, p->n), CHUNK_TILES);
    const WinogradGradient w = winograd_gradient_plan(g);
    return w.kept * POINTS * w.step + tile_area(p, tiles);
}

static void weight_gradient(Work w) {
    WeightGradient g = weight_gradient_plan(w.l, w.n, w.prepared);
    g.pass.input = w.in;
    g.w = w;
    if (g.pass.tile) {
        winograd_gradient(&g);
        return;
    }
    parallel(g.slices * g.parts, weight_gradient_ith_piece, &g);
    if (g.slices == 1)
        return;
    sum_slices(w.dweight, w.scratch, g.slices, g.sums, w.l->weight_count);
    sum_slices(w.dbias, w.scratch + w.l->weight_count, g.slices, g.sums, w.l->bias_count);
}

/* ---- Before a max-pool --------------------------------------------------------------------------

   Reason: a 2 x 2 max-pool routes the gradient of each of its windows to one of four pixels, so at
   least three quarters of the dout that the convolution before it reads are zeros; a ReLU and a
   dropout set half of the rest to zero. Multiplications by zero are skipped here. One term is what
   the gradient of one output pixel in channel k contributes:
     weight gradient   dweight[k]           += dout[pixel][k] * the input under the filter
     data gradient     din under the filter += dout[pixel][k] * weight[k]
   Bit masks, a bit for each gradient, say which terms are nonzero.
   term_tile() sums the weight gradient, for one channel over many windows, with the filter's sums
   as accumulators. patch_tile() or, with few channels, pair_tile() sums the data gradient, for one
   window over all channels, with the patch of pixels under the window's four filters as
   accumulators.
   The convolution's output is never stored as a whole: forward computes it one image at a time, on
   the stack of a thread, and keeps the maxima and their positions.

   Gain, without Winograd: cifar with 64 channels 2.2, mnist 2.0; cifar with 6 channels, which
   Winograd does not suit, 2.8. */

enum { MASK_BITS = 64, WINDOW_PIXELS = 4 };

typedef uint64_t Routes[2 * WINDOW_PIXELS]; // by position in a window, a mask of channels

// Consecutive windows of the pool, as many as stay in L1 together with the input that they read.
typedef struct Windows {
    size_t count, channels, words; // words of MASK_BITS channels
    size_t corner[MASK_BITS];      // input pixel under the filter's corner at the first pixel
    size_t offset[WINDOW_PIXELS];  // from there to the input pixel at each of the four, in pixels
    size_t depth;                  // elements from an input pixel to the next
    real *gradient;                // [count][channels]: of the pixel that the window chose
    uint8_t *position; // [count][channels]: that pixel, + WINDOW_PIXELS if the gradient is 0
    uint64_t *nonzero; // [channels]: mask of the windows whose gradient is not 0
    Routes *routed;    // [count][words]
} Windows;

typedef struct TermTile {
    const Windows *w;
    size_t k;         // the channel
    real *sums;       // dweight[k] transposed, sums_pitch from a row of the filter to the next
    const real *from; // the input, pitch from a row of the image to the next
    size_t sums_pitch, pitch;
} TermTile;

// acc[i][j] += gradient * the input under row i of the filter, for one window and channel
INLINE void add_term(const size_t rows, const size_t vectors, vec acc[5][6], const Windows *w,
                     size_t window, size_t k, const real *from, size_t pitch) {
    const size_t at = window * w->channels + k;
    const real gradient = w->gradient[at];
    from += (w->corner[window] + w->offset[w->position[at]]) * w->depth;
    UNROLLED(i, rows) {
        UNROLLED(j, vectors)
            acc[i][j] += gradient * *(const vec *)(from + j * LANES);
        from += pitch;
    }
}

/* sums[i][0 .. vectors * LANES) += channel k's terms, for i < rows. Fewer than 8 accumulators
   cannot hide the latency, so they are kept twice, as in dot_tile(). */
INLINE void term_tile(const size_t rows, const size_t vectors, const TermTile *t) {
    const size_t parts = rows * vectors < 8 ? 2 : 1;
    const TermTile a = *t;
    vec acc[2][5][6];
    UNROLLED(i, rows)
        UNROLLED(j, vectors) {
            acc[0][i][j] = *(const vec *)(a.sums + i * a.sums_pitch + j * LANES);
            acc[1][i][j] = (vec){0};
        }
    for (uint64_t mask = a.w->nonzero[a.k]; mask;)
        UNROLLED(s, parts) {
            if (mask)
                add_term(rows, vectors, acc[s], a.w, (size_t)__builtin_ctzll(mask), a.k, a.from,
                         a.pitch);
            mask &= mask - 1; // clears the lowest bit
        }
    UNROLLED(i, rows)
        UNROLLED(j, vectors) {
            vec *to = (vec *)(a.sums + i * a.sums_pitch + j * LANES);
            *to = acc[0][i][j];
            if (parts == 2)
                *to += acc[1][i][j];
        }
}

typedef struct PatchTile {
    const Windows *w;
    size_t window;
    real *din;          // under the corner of the window's first filter
    size_t row, pixel;  // elements from a row of din to the next, from a vector to the next
    const real *weight; // packed, of channel 0, from the tile's first row of the filter on
    size_t filter;      // elements from a channel's packed weights to the next
    size_t moved;       // elements from there to the same weights, one pixel further right
} PatchTile;

/* din += a window's terms, for `rows` rows of the filter. At the window's four pixels these cover
   rows + 1 rows of `across` vectors, and a row of the filter has `taps` vectors. At pixels 1 and 3
   the filter lies one pixel further right: one vector further right if a pixel is a vector; else
   pack_pairs() has moved the weights by a pixel. */
INLINE void add_patch(const size_t rows, const size_t taps, const size_t across,
                      const PatchTile *t) {
    const Windows *w = t->w;
    const size_t words = w->words, first = t->window * words;
    const real *gradients = w->gradient + t->window * w->channels;
    vec acc[18];
    UNROLLED(i, (rows + 1) * across)
        acc[i] = *(const vec *)(t->din + i / across * t->row + i % across * t->pixel);
    for (size_t word = 0; word < words; word++)
        UNROLLED(p, WINDOW_PIXELS) {
            const size_t corner = p / 2 * across + p % 2 * (across - taps);
            const real *weight = t->weight + p % 2 * t->moved;
            for (uint64_t mask = w->routed[first + word][p]; mask; mask &= mask - 1) {
                const size_t k = word * MASK_BITS + (size_t)__builtin_ctzll(mask);
                const real gradient = gradients[k];
                const vec *from = (const vec *)(weight + k * t->filter);
                UNROLLED(i, rows * taps)
                    acc[corner + i / taps * across + i % taps] += gradient * from[i];
            }
        }
    UNROLLED(i, (rows + 1) * across)
        *(vec *)(t->din + i / across * t->row + i % across * t->pixel) = acc[i];
}

// For one vector of channels of each pixel, with weights from pack_channel()
INLINE void patch_tile(const size_t rows, const size_t kernel, const PatchTile *t) {
    add_patch(rows, kernel, kernel + 1, t);
}

// With half a vector of channels or fewer, two pixels are a vector; weights as of pack_pairs(),
// taps = (kernel + 1) / 2. Gain: cifar with 6 channels 1.05 with AVX-512.
INLINE void pair_tile(const size_t rows, const size_t taps, const PatchTile *t) {
    add_patch(rows, taps, taps, t);
}

TILES(term_tile, 3, TermTile)
TILE(term_tile, 3, 5, TermTile)
TILE(term_tile, 3, 6, TermTile)
TILES(term_tile, 5, TermTile)
TILE(term_tile, 5, 5, TermTile)
TILE(patch_tile, 3, 3, PatchTile)
TILE(patch_tile, 2, 5, PatchTile) // all 36 accumulators of a 5 x 5 filter do not fit 32 registers
TILE(patch_tile, 1, 5, PatchTile)
TILE(pair_tile, 3, 2, PatchTile)
TILE(pair_tile, 5, 3, PatchTile)
typedef void PatchTileFunction(const PatchTile *t);
typedef void TermTileFunction(const TermTile *t);
static TermTileFunction *const term_tiles[2][6] = { // 3 x 3, 5 x 5; by vectors - 1
    {term_tile_3_1, term_tile_3_2, term_tile_3_3, term_tile_3_4, term_tile_3_5, term_tile_3_6},
    {term_tile_5_1, term_tile_5_2, term_tile_5_3, term_tile_5_4, term_tile_5_5}};

// What the backward of a convolution before a max-pool works on, and its sizes
typedef struct PooledPass {
    Work w;
    size_t pitch, filter; // elements of a row of a filter, in whole vectors; of all its rows
    size_t depth;         // elements from an input pixel to the next
    bool pairs;           // two pixels of din share a vector
    size_t channels_in;   // of din until it is stored, in whole vectors or half a vector
    size_t widest;        // the most vectors of a tile
    size_t sums, slices;  // of a slice of the images: elements, the filters' and then the biases'
    size_t packed;        // elements of the weights that are packed for the data gradient
    real *weights;        // the packed weights
} PooledPass;

/* Where the channels are not whole vectors, the rows of filters would be read from unaligned
   addresses, across cache lines, so each pixel gets an aligned copy of the row that begins there.
   Gain: cifar with 64 channels 1.12, mnist 1.04. */
static PooledPass pooled_pass(Work w) {
    const Layer *l = w.l;
    PooledPass p = {.w = w, .pitch = whole_vectors(l->kernel_size * l->in.c)};
    p.depth = l->in.c % LANES ? p.pitch : l->in.c;
    p.filter = l->kernel_size * p.pitch;
    p.pairs = l->in.c <= LANES / 2;
    p.channels_in = p.pairs ? LANES / 2 : whole_vectors(l->in.c);
    p.widest = min_size(6, (ROWS * VECTORS + 1) / l->kernel_size); // 5 x 5 fit where 6 x 4 do
    p.sums = l->out.c * p.filter + whole_vectors(l->out.c);
    p.slices = min_size(w.n, min_size(SLICES, max_size(1, SLICE_ELEMENTS / p.sums)));
    p.packed = p.channels_in * l->out.c * l->kernel_size *
               (p.pairs ? 2 * l->kernel_size + 2 : l->kernel_size);
    return p;
}

// A thread's stack holds one image of out (forward) or two of in (backward): at most 1 MB.
static bool suits_pooled(const Layer *conv, const Layer *pool) {
    const size_t depth = pooled_pass((Work){.l = conv}).depth;
    return (conv->kernel_size == 3 || conv->kernel_size == 5) && conv->stride == 1 &&
           !conv->padding && pool->kernel_size == 2 && !pool->padding && conv->out.c <= 1024 &&
           shape_size(conv->out) * sizeof(real) <= 1 << 20 &&
           conv->in.h * conv->in.w * depth * sizeof(real) <= 1 << 19;
}

// Sets gradient and position of w->count windows from `first` on. Reads and writes whole vectors.
static void route_gradient(const Windows *w, const PooledPass *p, size_t image, size_t first) {
    const size_t from = image * shape_size(p->w.fused.pool->out) + first * w->channels;
    const size_t elements = w->count * w->channels;
    const real *dout = p->w.dout + from, *out = p->w.out + from;
    const uint8_t *argmax = p->w.saved + from;
    for (size_t i = 0; i < elements; i += LANES) {
        bytes position;
        memcpy(&position, argmax + i, LANES);
        const vec value = *(const vec *)(out + i), d = *(const vec *)(dout + i);
        vec gradient = (vec)((mask)d & (value > 0)); // through the ReLU
        *(vec *)(w->gradient + i) = gradient;
        position |= narrow(gradient == 0) & WINDOW_PIXELS;
        memcpy(w->position + i, &position, LANES);
    }
}

// Finds the terms of w->count windows from `first` on; dbias += their gradient
static void find_terms(Windows *w, real *restrict dbias, const PooledPass *p, size_t image,
                       size_t first) {
    const Layer *l = p->w.l;
    const size_t channels = w->channels, across = p->w.fused.pool->out.w;
    uint64_t *restrict nonzero = w->nonzero;
    route_gradient(w, p, image, first);
    memset(nonzero, 0, channels * sizeof *nonzero);
    memset(w->routed, 0, w->count * w->words * sizeof *w->routed);
    for (size_t window = 0; window < w->count; window++) {
        const real *gradient = w->gradient + window * channels;
        size_t y = (first + window) / across, x = (first + window) % across;
        w->corner[window] = (y * l->in.w + x) * p->w.fused.pool->stride;
        for (size_t k = 0; k < channels; k++) {
            nonzero[k] |= (uint64_t)(gradient[k] != 0) << window;
            dbias[k] += gradient[k];
        }
        const uint8_t *position = w->position + window * channels;
        Routes *routed = w->routed + window * w->words;
        for (size_t k = 0; p->w.din && k < channels; k++)
            routed[k / MASK_BITS][position[k]] |= (uint64_t)1 << k % MASK_BITS;
    }
}

// rows[pixel][depth] = the row of the filter's input that begins at the pixel
static void copy_rows(real *rows, const real *in, const PooledPass *p) {
    const Layer *l = p->w.l;
    const size_t c = l->in.c, w = l->in.w, depth = p->depth, across = w - l->kernel_size + 1;
    for (size_t y = 0; y < l->in.h; y++, rows += w * depth, in += w * c)
        for (size_t j = 0; j < depth; j += LANES) // as inner loop, gcc would call memcpy()
            for (size_t x = 0; x < across; x++)
                *(vec *)(rows + x * depth + j) = *(const vec *)(in + x * c + j);
}

static void patch_tile_5_5(const PatchTile *all_rows) {
    PatchTile t = *all_rows;
    for (size_t row = 0; row < 5; row += 2) {
        (row < 4 ? patch_tile_2_5 : patch_tile_1_5)(&t);
        t.din += 2 * t.row;
        t.weight += 2 * 5 * LANES;
    }
}

// din[pixel][channels_in] += the terms of the windows for the channels of a vector, from c on
static void add_windows(real *din, const Windows *w, const PooledPass *p, size_t c,
                        const real *packed) {
    // by whether two pixels share a vector; by 3 x 3 or 5 x 5
    static PatchTileFunction *const tiles[2][2] = {{patch_tile_3_3, patch_tile_5_5},
                                                   {pair_tile_3_2, pair_tile_5_3}};
    const size_t kernel = p->w.l->kernel_size;
    PatchTile t = {.w = w, .row = p->w.l->in.w * p->channels_in};
    t.pixel = p->pairs ? LANES : p->channels_in;
    t.moved = p->pairs ? kernel * (kernel + 1) * p->channels_in : 0;
    t.filter = p->pairs ? 2 * t.moved : kernel * kernel * LANES;
    t.weight = packed + c / LANES * w->channels * t.filter;
    for (; t.window < w->count; t.window++) {
        t.din = din + w->corner[t.window] * p->channels_in + c;
        tiles[p->pairs][kernel == 5](&t);
    }
}

/* One image: sums[k][row of the filter][pitch] += its weight gradient, followed by dbias; and
   unless w.din is NULL, din[pixel][channels_in] = its data gradient. */
static void pooled_image(real *sums, real *din, const real *packed, const PooledPass *p,
                         size_t image) {
    enum { ELEMENTS = 3072 }; // of the gradient at a time: they and the input they read stay in L1
    const Layer *l = p->w.l;
    const Shape I = l->in;
    const size_t channels = l->out.c, windows = p->w.fused.pool->out.h * p->w.fused.pool->out.w;
    const size_t most = min_size(MASK_BITS, max_size(1, ELEMENTS / channels));
    const size_t words = ceil_div(channels, MASK_BITS);
    const real *in = p->w.in + image * shape_size(I);
    real gradient[most * channels + LANES];
    uint8_t position[most * channels + LANES];
    uint64_t nonzero[channels];
    Routes routed[most * words];
    real rows[p->depth == I.c ? 1 : I.h * I.w * p->depth] __attribute__((aligned(VECTOR_BYTES)));
    Windows w = {.channels = channels, .words = words, .depth = p->depth, .gradient = gradient};
    w.position = position;
    w.nonzero = nonzero;
    w.routed = routed;
    for (size_t i = 0; i < WINDOW_PIXELS; i++)
        w.offset[i] = i / 2 * I.w + i % 2;
    if (p->depth != I.c) {
        copy_rows(rows, in, p);
        in = rows;
    }
    memset(din, 0, p->w.din ? I.h * I.w * p->channels_in * sizeof *din : 0);
    for (size_t first = 0; first < windows; first += most) {
        w.count = min_size(most, windows - first);
        find_terms(&w, sums + channels * p->filter, p, image, first);
        for (size_t j = 0; j < p->pitch; j += p->widest * LANES) {
            TermTile t = {&w, 0, sums + j, in + j, p->pitch, I.w * p->depth};
            size_t vectors = min_size(p->widest, (p->pitch - j) / LANES);
            TermTileFunction *tile = term_tiles[l->kernel_size == 5][vectors - 1];
            for (; t.k < channels; t.k++, t.sums += p->filter)
                tile(&t);
        }
        for (size_t c = 0; p->w.din && c < p->channels_in; c += LANES) // its weights fit L1
            add_windows(din, &w, p, c, packed);
    }
}

// packed[c / LANES][k][tap][c % LANES] = weight[tap][c][k], or 0 where c is beyond the channels
static void pack_channel(const void *context, size_t k) {
    const PooledPass *p = context;
    const Layer *l = p->w.l;
    const size_t depth = l->in.c, channels = l->out.c, taps = l->kernel_size * l->kernel_size;
    for (size_t c = 0; c < p->channels_in; c++)
        for (size_t tap = 0; tap < taps; tap++)
            p->weights[((c / LANES * channels + k) * taps + tap) * LANES + c % LANES] =
                c < depth ? p->w.weight[(tap * depth + c) * channels + k] : 0;
}

/* packed[k][m][row][x + m][c] = weight[row][x][c][k], for m = 0 and 1, channels_in channels a pixel
   and kernel + 1 pixels a row; all else is 0, and such terms change no sum of finite
   gradients. */
static void pack_pairs(const void *context, size_t k) {
    const PooledPass *p = context;
    const Layer *l = p->w.l;
    const size_t depth = l->in.c, kernel = l->kernel_size, filter = p->packed / l->out.c;
    real *packed = p->weights + k * filter;
    memset(packed, 0, filter * sizeof *packed);
    for (size_t m = 0; m < 2; m++)
        for (size_t tap = 0; tap < kernel * kernel; tap++) {
            const size_t row = m * kernel + tap / kernel, x = tap % kernel + m;
            for (size_t c = 0; c < depth; c++)
                packed[(row * (kernel + 1) + x) * p->channels_in + c] =
                    p->w.weight[(tap * depth + c) * l->out.c + k];
        }
}

// din of an image, without the padding of its channels, and through the ReLU before the layer
static void store_din(const real *padded, const PooledPass *p, size_t image) {
    const size_t c = p->w.l->in.c, pixels = p->w.l->in.h * p->w.l->in.w;
    const bool accumulate = p->w.accumulate, masks = p->w.fused.input_relu_backward;
    const real *in = p->w.in + image * pixels * c; // the output of that ReLU
    real *restrict din = p->w.din + image * pixels * c;
    for (size_t i = 0; i < pixels; i++, padded += p->channels_in, in += c, din += c)
        for (size_t k = 0; k < c; k++) {
            real sum = padded[k] + (accumulate ? din[k] : 0);
            din[k] = masks && !(in[k] > 0) ? 0 : sum;
        }
}

static void pooled_ith_slice(const void *context, size_t slice) {
    const PooledPass *p = context;
    const Layer *l = p->w.l;
    const Range images = part_of((Range){0, p->w.n}, slice, p->slices);
    real *sums = p->w.scratch + slice * p->sums;
    real din[l->in.h * l->in.w * p->channels_in] __attribute__((aligned(VECTOR_BYTES)));
    memset(sums, 0, p->sums * sizeof *sums);
    for (size_t i = images.first; i < images.first + images.count; i++) {
        pooled_image(sums, din, p->weights, p, i);
        if (p->w.din)
            store_din(din, p, i);
    }
}

// dweight[row of the filter][element of the row] = the sums, in which channels are outermost
static void store_ith_row(const void *context, size_t i) {
    const PooledPass *p = context;
    const size_t channels = p->w.l->out.c, run = p->w.l->kernel_size * p->w.l->in.c;
    for (size_t k = 0; k < channels; k++)
        p->w.dweight[i * channels + k] = p->w.scratch[k * p->filter + i / run * p->pitch + i % run];
}

// As conv2d_backward_naive(), where dout is the gradient of w.fused.pool's output.
static void conv2d_backward_pooled(Work w) {
    const Layer *l = w.l;
    PooledPass p = pooled_pass(w);
    p.weights = w.scratch + p.slices * p.sums;
    parallel(l->out.c, p.pairs ? pack_pairs : pack_channel, &p);
    parallel(p.slices, pooled_ith_slice, &p);
    sum_slices(w.scratch, w.scratch, p.slices, p.sums, p.sums);
    for (size_t k = 0; k < l->bias_count; k++)
        w.dbias[k] = w.scratch[l->out.c * p.filter + k];
    parallel(l->kernel_size * l->kernel_size * l->in.c, store_ith_row, &p);
}

// Where v > best, or v is a NaN: best = v, arg = tap
INLINE void keep_larger(vec *best, mask *arg, vec v, mask tap) {
    const mask larger = (v > *best) | (v != v);
    *best = (vec)((larger & (mask)v) | (~larger & (mask)*best));
    *arg = (larger & tap) | (~larger & *arg);
}

/* out[c], argmax[c] = maximum of a window and its position in it, of output pixel (y, x), LANES
   channels at a time: compilers do not vectorize loops over floats and bytes together. Reads whole
   vectors of in and drops what is past the channels. */
INLINE void maxpool2d_pixel(real *out, uint8_t *argmax, const real *in, const Layer *l, size_t y,
                            size_t x) {
    for (size_t c = 0; c < l->out.c; c += LANES) {
        const size_t count = l->out.c - c;
        vec best = (vec){0} - (real)INFINITY;
        mask arg = {0}, tap = {0};
        for (size_t i = 0; i < l->kernel_size; i++)
            for (size_t j = 0; j < l->kernel_size; j++, tap += 1) {
                size_t iy = y * l->stride + i - l->padding, ix = x * l->stride + j - l->padding;
                if (iy >= l->in.h || ix >= l->in.w)
                    continue;
                keep_larger(&best, &arg, *(const vec *)(in + (iy * l->in.w + ix) * l->in.c + c),
                            tap);
            }
        store(out + c, best, count);
        bytes positions = narrow(arg);
        if (count >= LANES)
            memcpy(argmax + c, &positions, LANES);
        else
            memcpy(argmax + c, &positions, count);
    }
}

static void maxpool2d_image(real *out, uint8_t *argmax, const real *in, const Layer *l) {
    for (size_t y = 0; y < l->out.h; y++)
        for (size_t x = 0; x < l->out.w; x++, out += l->out.c, argmax += l->out.c)
            maxpool2d_pixel(out, argmax, in, l, y, x);
}

static void maxpool2d_ith_image(const void *context, size_t i) {
    const Work *w = context;
    const size_t size = shape_size(w->l->out), from = shape_size(w->l->in);
    maxpool2d_image(w->out + i * size, w->saved + i * size, w->in + i * from, w->l);
}

static void maxpool2d_forward_fast(Work w) {
    parallel(w.n, maxpool2d_ith_image, &w);
}

/* Forward with few channels. The lanes of the register tile are output channels; 6 channels would
   use 6 of 16 lanes. Here the lanes are adjacent windows of the pool, and a tile computes the four
   pixels of each window, p = 0 .. 3, for WINDOW_CHANNELS channels k:
     acc[k][p] += weight[tap][c][k] * in[the pixel under the tap at pixel p of the window][c]
   The maximum of a window is then taken between acc[k][0], ..., acc[k][3], lane by lane. Windows
   are two pixels apart, so the input is first split into planes, one for the even and one for the
   odd columns of each channel, in which adjacent windows read adjacent elements.
   Gain: cifar with 6 channels 1.3 on Zen 4 with AVX-512, where one thread alone gains 1.4, and 1.13
   with AVX2. */
enum { WINDOW_CHANNELS = VECTOR_SUMS / WINDOW_PIXELS };

typedef struct Planes {
    real *pixels; // [in.h][parity of the column][in.c][half]
    size_t half;  // half of the columns, or what whole vectors of windows read
    size_t plane; // elements from the even columns of all channels to the odd ones
    size_t row;   // elements from a row of the image to the next
} Planes;

static Planes planes_of(const Layer *conv, const Layer *pool) {
    Planes s = {.half = whole_vectors(pool->out.w) + conv->kernel_size / 2};
    s.plane = conv->in.c * s.half;
    s.row = 2 * s.plane;
    return s;
}

// The channels of whole tiles fit into a row of the packed weights, which is one vector, and the
// planes fit on a thread's stack.
static bool suits_planes(const Layer *conv, const Layer *pool) {
    return conv->out.c <= LANES / WINDOW_CHANNELS * WINDOW_CHANNELS && conv->in.c < FEW &&
           pool->stride == 2 && conv->in.h * planes_of(conv, pool).row * sizeof(real) <= 1 << 19;
}

// pixels[y][x % 2][c][x / 2] = in[y][x][c], and zeros to the end of a row. Since a filter has odd
// sides and a window even ones, none reads the last of an odd number of columns.
static void split_columns(const Planes *s, const real *in, Shape I) {
    memset(s->pixels, 0, I.h * s->row * sizeof *in);
    for (size_t y = 0; y < I.h; y++, in += I.w * I.c)
        for (size_t i = 0; i < 2 * I.c; i++) {
            const size_t odd = i / I.c, c = i % I.c;
            const real *from = in + odd * I.c + c;
            real *to = s->pixels + y * s->row + i * s->half;
            for (size_t x = 0; x < I.w / 2; x++)
                to[x] = from[2 * x * I.c];
        }
}

// best[k] (=) the maximum of each window after the ReLU, position[k] (=) its pixel, 0 .. 3: one
// vector of windows whose first input pixels are at `from`. packed, bias: the weights, [taps][in.c]
// [LANES], and the bias, from the tile's first channel on
NOINLINE void window_tile(vec best[WINDOW_CHANNELS], mask position[WINDOW_CHANNELS],
                          const Planes *s, const real *from, const real *packed, const Layer *l,
                          const real *bias) {
    vec acc[WINDOW_CHANNELS][WINDOW_PIXELS];
    UNROLLED(k, WINDOW_CHANNELS)
        UNROLLED(p, WINDOW_PIXELS)
            acc[k][p] = (vec){0} + bias[k];
    for (size_t tap = 0; tap < l->kernel_size * l->kernel_size; tap++) {
        const real *in[WINDOW_PIXELS];
        UNROLLED(p, WINDOW_PIXELS) {
            const size_t y = tap / l->kernel_size + p / 2, x = tap % l->kernel_size + p % 2;
            in[p] = from + y * s->row + x % 2 * s->plane + x / 2;
        }
        for (size_t c = 0; c < l->in.c; c++, packed += LANES) {
            vec v[WINDOW_PIXELS];
            UNROLLED(p, WINDOW_PIXELS)
                v[p] = *(const vec *)(in[p] + c * s->half);
            UNROLLED(k, WINDOW_CHANNELS)
                UNROLLED(p, WINDOW_PIXELS)
                    acc[k][p] += packed[k] * v[p];
        }
    }
    UNROLLED(k, WINDOW_CHANNELS) {
        best[k] = (vec){0} - (real)INFINITY;
        position[k] = (mask){0};
        UNROLLED(p, WINDOW_PIXELS)
            keep_larger(&best[k], &position[k], relu_vec(acc[k][p]), (mask){0} + (lane)p);
    }
}

// out[window][channel], argmax (=) one vector of windows and one tile's channels; pitch: from a
// window to the next
static void store_windows(real *out, uint8_t *argmax, const vec best[WINDOW_CHANNELS],
                          const mask position[WINDOW_CHANNELS], size_t windows, size_t channels,
                          size_t pitch) {
    for (size_t i = 0; i < windows; i++)
        for (size_t k = 0; k < channels; k++) {
            out[i * pitch + k] = best[k][i];
            argmax[i * pitch + k] = (uint8_t)position[k][i];
        }
}

typedef struct PooledForward {
    Work w;
    Pass pass;
} PooledForward;

// Computes one image by the register tile or by Winograd.
static void pooled_ith_image(const void *context, size_t i) {
    const PooledForward *f = context;
    const Work *w = &f->w;
    const size_t size = shape_size(w->fused.pool->out);
    real out[shape_size(w->l->out) + LANES] __attribute__((aligned(VECTOR_BYTES)));
    Pass one = f->pass;
    one.input += i * shape_size(w->l->in);
    one.output = out;
    run_pass_on_image(&one);
    maxpool2d_image(w->out + i * size, w->saved + i * size, out, w->fused.pool);
}

// Does the same by planes, for few channels.
static void windows_ith_image(const void *context, size_t i) {
    const PooledForward *f = context;
    const Layer *l = f->w.l, *pool = f->w.fused.pool;
    const Shape O = pool->out;
    Planes s = planes_of(l, pool);
    real pixels[l->in.h * s.row], bias[LANES] = {0};
    for (size_t k = 0; k < l->bias_count; k++)
        bias[k] = f->pass.bias[k];
    s.pixels = pixels;
    split_columns(&s, f->pass.input + i * shape_size(l->in), l->in);
    for (size_t y = 0; y < O.h; y++)
        for (size_t x = 0; x < O.w; x += LANES)
            for (size_t k = 0; k < O.c; k += WINDOW_CHANNELS) {
                const size_t at = ((i * O.h + y) * O.w + x) * O.c + k;
                vec best[WINDOW_CHANNELS];
                mask position[WINDOW_CHANNELS];
                window_tile(best, position, &s, pixels + 2 * y * s.row + x, f->pass.packed + k, l,
                            bias + k);
                store_windows(f->w.out + at, f->w.saved + at, best, position,
                              min_size(LANES, O.w - x), min_size(WINDOW_CHANNELS, O.c - k), O.c);
            }
}

/* out = max_pool2d(relu(conv2d(in, weight) + bias)); saved = the position of each maximum in its
   window: [h][w][c] of fused.pool. Image by image, so that the output of the convolution stays in
   the cache of its thread. */
static void conv2d_forward_pooled(Work w) {
    const PooledForward f = {
        w, bind_pass(forward_pass(w.l, w.fused.relu, w.prepared), NULL, w.in, w.bias, w)};
    if (f.pass.tile)
        pack_winograd(&f.pass);
    else
        pack_weights(&f.pass);
    parallel(w.n, suits_planes(w.l, w.fused.pool) ? windows_ith_image : pooled_ith_image, &f);
}

/* ---- Definitions on these threads ---------------------------------------------------------------

   The other rows are computed by their definitions in cnn.c, a part of the images at a time, on
   these threads: OpenMP's would spin beside them. */

typedef struct ImageParts {
    Work w;
    void (*definition)(Work w);
    size_t parts;
} ImageParts;

// Returns the same work on the images of a range only.
static Work work_on(Work w, Range images, RandomKey *key) {
    const size_t in = images.first * shape_size(w.l->in);
    const size_t out = images.first * shape_size(w.l->out);
    w.n = images.count;
    w.in = w.in ? w.in + in : NULL;
    w.din = w.din ? w.din + in : NULL;
    w.residual = w.residual ? w.residual + out : NULL;
    w.dresidual = w.dresidual ? w.dresidual + out : NULL;
    w.out = w.out ? w.out + out : NULL;
    w.dout = w.dout ? w.dout + out : NULL;
    w.saved = w.saved ? w.saved + out : NULL;
    if (w.key) {
        *key = *w.key;
        key->first = position_of(*w.key, images.first);
        w.key = key;
    }
    return w;
}

static void compute_ith_part(const void *context, size_t i) {
    const ImageParts *p = context;
    const Range images = part_of((Range){0, p->w.n}, i, p->parts);
    RandomKey key;
    p->definition(work_on(p->w, images, &key));
}

static void by_images(Work w, void (*definition)(Work w)) {
    const ImageParts p = {w, definition, min_size(w.n, 4 * num_threads)};
    parallel(p.parts, compute_ith_part, &p);
}

static void forward_by_images(Work w) {
    by_images(w, naive_kernels.layers[w.l->kind].forward);
}

static void backward_by_images(Work w) {
    by_images(w, naive_kernels.layers[w.l->kind].backward);
}

/* The backward of what is fused into a forward, in reverse order: of the ReLU, in place in dout,
   then of the sum: dresidual = dout, or +=. */
static void fused_backward(Work w) {
    Layer same_shape = *w.l; // a ReLU's and a sum's input has the shape of its output
    same_shape.in = same_shape.out;
    Work relu = w, add = w;
    relu.l = add.l = &same_shape;
    relu.din = w.dout;
    relu.accumulate = false;
    add.din = w.dresidual;
    add.accumulate = w.accumulate_residual;
    add.dresidual = NULL;
    if (w.fused.relu_backward)
        by_images(relu, relu_backward);
    if (w.dresidual)
        by_images(add, add_backward);
}

/* As dropout_forward_naive(), for one image: 16 blocks of Philox at a time, which gcc vectorizes.
   Each element is multiplied, whether it is kept or not: with AVX2, gcc does not vectorize a
   product that depends on a condition. Gain: mnist 1.04. */
static void dropout_ith_image(const void *context, size_t image) {
    enum { BLOCK = 8, BLOCKS = 16 };
    const Work *w = context;
    const size_t size = shape_size(w->l->out);
    const real scale = 1 / (1 - w->l->p);
    const uint32_t threshold = dropout_threshold(w->l);
    for (size_t start = 0; start < size; start += BLOCK * BLOCKS) {
        uint32_t bits[BLOCKS][4];
        uint16_t draws[BLOCK * BLOCKS];
        for (size_t b = 0; b < BLOCKS; b++)
            dropout_draw(bits[b], *w, image, start / BLOCK + b);
        memcpy(draws, bits, sizeof draws);
        const size_t at = image * size + start, count = min_size(size - start, BLOCK * BLOCKS);
        const real *in = w->in + at;
        real *out = w->out + at;
        uint8_t *restrict saved = w->saved + at;
        for (size_t i = 0; i < count; i++)
            saved[i] = draws[i] >= threshold;
        for (size_t i = 0; i < count; i++)
            out[i] = in[i] * scale;
        for (size_t i = 0; i < count; i++)
            out[i] = draws[i] >= threshold ? out[i] : 0;
    }
}

static void dropout_forward_fast(Work w) {
    if (w.key)
        parallel(w.n, dropout_ith_image, &w);
    else
        dropout_forward_naive(w); // copies, if not in place
}

/* ---- BatchNorm ---------------------------------------------------------------------------------

   The pixels are divided into BN_SLICES slices, whatever the number of threads, and each is summed
   by itself. The residual and the ReLU that follow are part of the pass that writes out. */

enum { BN_SLICES = 32 };

static Range bn_slice(size_t slice, size_t pixels) {
    return part_of((Range){0, pixels}, slice, BN_SLICES);
}

/* sums[0][c] = mean over a slice, sums[1][c] = sum of squared deviations from it: two passes over
   each piece that fits into the cache, where the definition reads everything twice. Pieces are
   joined by Chan's formula. (Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for
   computing sample variances", 1979.) */
static void bn_slice_stats(real *restrict sums, const real *restrict in, Range s, size_t channels) {
    enum { PIECE = 16 };
    real *restrict squares = sums + channels, mean[channels], more[channels];
    memset(sums, 0, 2 * channels * sizeof *sums);
    for (size_t first = s.first; first < s.first + s.count; first += PIECE) {
        size_t last = min_size(first + PIECE, s.first + s.count);
        real before = (real)(first - s.first), n = (real)(last - first);
        memset(mean, 0, sizeof mean);
        memset(more, 0, sizeof more);
        for (size_t i = first; i < last; i++)
            for (size_t c = 0; c < channels; c++)
                mean[c] += in[i * channels + c];
        for (size_t c = 0; c < channels; c++)
            mean[c] /= n;
        for (size_t i = first; i < last; i++)
            for (size_t c = 0; c < channels; c++) {
                real d = in[i * channels + c] - mean[c];
                more[c] += d * d;
            }
        for (size_t c = 0; c < channels; c++) {
            real d = mean[c] - sums[c];
            squares[c] += more[c] + d * d * (before * n / (before + n));
            sums[c] += d * (n / (before + n));
        }
    }
}

// Combines the slices of channel c in the same way.
static void bn_join_stats(real *stats, const real *sums, size_t pixels, size_t channels, size_t c) {
    double mean = 0, squares = 0, count = 0;
    for (size_t slice = 0; slice < BN_SLICES; slice++, sums += 2 * channels) {
        double more = (double)bn_slice(slice, pixels).count, d = (double)sums[c] - mean;
        if (more == 0)
            continue;
        squares += (double)sums[channels + c] + d * d * count * more / (count + more);
        mean += d * more / (count + more);
        count += more;
    }
    bn_update_stats(stats, channels, c, mean, squares, pixels);
}

// Returns the slice's part of the scratch memory: sums[2][channels]; the factors come after the
// slices.
static real *bn_sums(Work w, size_t slice) {
    return w.scratch + slice * 2 * w.l->in.c;
}

// Channel c of the factors in out = in * scale + shift. In training, joins its slices first.
static void bn_forward_channel(const void *context, size_t c) {
    const Work w = *(const Work *)context;
    const size_t channels = w.l->in.c;
    const size_t mean_row = is_training(w) ? BATCH_MEAN : RUNNING_MEAN;
    real *scale = bn_sums(w, BN_SLICES), *shift = scale + channels;
    if (is_training(w))
        bn_join_stats(w.stats, w.scratch, bn_pixels(w), channels, c);
    const real mean = w.stats[mean_row * channels + c];
    scale[c] = bn_scale(w, c);
    shift[c] = w.bias[c] - mean * scale[c];
}

// out = in * scale + shift, then the residual and the ReLU that are fused
static void bn_forward_slice(const void *context, size_t slice) {
    const Work w = *(const Work *)context;
    const Range s = bn_slice(slice, bn_pixels(w));
    const size_t channels = w.l->in.c;
    const real *restrict scale = bn_sums(w, BN_SLICES), *restrict shift = scale + channels;
    const real least = w.fused.relu ? 0 : -(real)INFINITY;
    for (size_t i = s.first; i < s.first + s.count; i++) {
        const real *restrict from = w.in + i * channels;
        real *restrict to = w.out + i * channels;
        for (size_t c = 0; c < channels; c++) {
            real value = from[c] * scale[c] + shift[c];
            if (w.residual)
                value += w.residual[i * channels + c];
            to[c] = value < least ? least : value;
        }
    }
}

// sums[0][c] = sum over a slice of dout, sums[1][c] = sum of dout * (in - mean)
static void bn_slice_products(Work w, real *restrict sums, Range s) {
    const size_t channels = w.l->in.c;
    const real *restrict mean = w.stats + BATCH_MEAN * channels;
    real *restrict products = sums + channels;
    memset(sums, 0, 2 * channels * sizeof *sums);
    for (size_t i = s.first; i < s.first + s.count; i++)
        for (size_t c = 0; c < channels; c++) {
            real d = w.dout[i * channels + c];
            sums[c] += d;
            products[c] += d * (w.in[i * channels + c] - mean[c]);
        }
}

// Channel c of dweight, of dbias and of the factors in din = a * dout + b * (in - mean) + e
static void bn_backward_channel(const void *context, size_t c) {
    const Work w = *(const Work *)context;
    const size_t channels = w.l->in.c, pixels = bn_pixels(w);
    const real inverse = w.stats[BATCH_INVERSE_STD * channels + c];
    real *a = bn_sums(w, BN_SLICES), *b = a + channels, *e = b + channels;
    double sum = 0, product = 0;
    for (size_t slice = 0; slice < BN_SLICES; slice++) {
        sum += (double)w.scratch[slice * 2 * channels + c];
        product += (double)w.scratch[(slice * 2 + 1) * channels + c];
    }
    w.dbias[c] = (real)sum;
    w.dweight[c] = (real)product * inverse;
    a[c] = w.weight[c] * inverse;
    b[c] = -a[c] * inverse * w.dweight[c] / (real)pixels;
    e[c] = -a[c] * w.dbias[c] / (real)pixels;
}

static void bn_backward_slice(const void *context, size_t slice) {
    const Work w = *(const Work *)context;
    const Range s = bn_slice(slice, bn_pixels(w));
    const size_t channels = w.l->in.c;
    const real *restrict mean = w.stats + BATCH_MEAN * channels;
    const real *restrict a = bn_sums(w, BN_SLICES);
    const real *restrict b = a + channels, *restrict e = b + channels;
    for (size_t i = s.first; i < s.first + s.count; i++) {
        const real *restrict x = w.in + i * channels, *restrict d = w.dout + i * channels;
        real *restrict to = w.din + i * channels;
        for (size_t c = 0; c < channels; c++)
            to[c] = a[c] * d[c] + b[c] * (x[c] - mean[c]) + e[c] + (w.accumulate ? to[c] : 0);
    }
}

static void bn_ith_stats(const void *context, size_t i) {
    const Work *w = context;
    bn_slice_stats(bn_sums(*w, i), w->in, bn_slice(i, bn_pixels(*w)), w->l->in.c);
}

static void batchnorm2d_forward_fast(Work w) {
    parallel(w.key ? BN_SLICES : 0, bn_ith_stats, &w);
    parallel(w.l->in.c, bn_forward_channel, &w);
    parallel(BN_SLICES, bn_forward_slice, &w);
}

static void bn_ith_products(const void *context, size_t i) {
    const Work *w = context;
    bn_slice_products(*w, bn_sums(*w, i), bn_slice(i, bn_pixels(*w)));
}

static void batchnorm2d_backward_fast(Work w) {
    fused_backward(w);
    parallel(BN_SLICES, bn_ith_products, &w);
    parallel(w.l->in.c, bn_backward_channel, &w);
    parallel(w.din ? BN_SLICES : 0, bn_backward_slice, &w);
}

// An optimizer, on UPDATE_BLOCK parameters at a time
enum { UPDATE_BLOCK = 4096 };

typedef struct UpdateParts {
    Update u;
    void (*definition)(Update u);
} UpdateParts;

static void update_ith_block(const void *context, size_t i) {
    const UpdateParts *p = context;
    const size_t first = i * UPDATE_BLOCK;
    Update u = p->u;
    u.count = min_size(UPDATE_BLOCK, u.count - first);
    u.param += first;
    u.grad += first;
    u.state[0] += first;
    u.state[1] += first;
    p->definition(u);
}

static void by_blocks(Update u, void (*definition)(Update u)) {
    const UpdateParts p = {u, definition};
    parallel(ceil_div(u.count, UPDATE_BLOCK), update_ith_block, &p);
}

static void adadelta_fast(Update u) {
    by_blocks(u, adadelta_naive);
}

static void sgd_fast(Update u) {
    by_blocks(u, sgd_naive);
}

/* ---- The peak of multiply-adds, in GFLOP/s: independent sums in registers, on all threads at
   once; the best of 10 runs of 1 ms. */

enum { PEAK_STEPS = 400000, PEAK_RUNS = 10 };

static void peak_ith_thread(const void *unused, size_t thread) {
    vec sums[VECTOR_SUMS], factor = (vec){0} + (real)0.999, term = (vec){0} + (real)0.001;
    volatile real kept = 0; // so that the compiler keeps the loop
    (void)unused, (void)thread;
    UNROLLED(j, VECTOR_SUMS)
        sums[j] = (vec){0} + (real)j;
    for (int step = 0; step < PEAK_STEPS; step++)
        UNROLLED(j, VECTOR_SUMS)
            sums[j] = sums[j] * factor + term;
    UNROLLED(j, VECTOR_SUMS)
        kept += sums[j][0];
    (void)kept;
}

static double cpu_peak_gflops(void) {
    const double flops = 2. * (double)num_threads * PEAK_STEPS * VECTOR_SUMS * LANES;
    double shortest = INFINITY; // in seconds
    for (int run = 0; run < PEAK_RUNS; run++) {
        const double begin = now();
        parallel(num_threads, peak_ith_thread, NULL);
        shortest = fmin(shortest, now() - begin);
    }
    return flops / shortest / 1e9;
}

/* ---- The table ----------------------------------------------------------------------------------

   Convolutions, linear layers, max-pools, BatchNorm and dropout have kernels of their own. All that
   a row keeps from step to step (prepared) is its pixel maps. Its scratch memory holds packed
   weights, sums of slices and Winograd's tiles. */

static void conv2d_forward_fast(Work w) {
    if (w.fused.pool) {
        conv2d_forward_pooled(w);
        return;
    }
    const Pass p = bind_pass(forward_pass(w.l, w.fused.relu, w.prepared), w.out, w.in, w.bias, w);
    run_pass(&p);
}

static void conv2d_backward_fast(Work w) {
    if (w.fused.pool) {
        conv2d_backward_pooled(w);
        return;
    }
    fused_backward(w);
    weight_gradient(w);
    if (!w.din)
        return;
    const Pass p = bind_pass(backward_pass(w.l, w.prepared, w.accumulate), w.din, w.dout, NULL, w);
    run_pass(&p);
}

// The passes use this memory one after the other, so it has the size of the largest.
static size_t scratch_size_fast(const Layer *l, const Fusion *fused, size_t n) {
    if (l->kind == BATCHNORM2D)
        return (2 * BN_SLICES + 3) * l->in.c;
    if (!has_weight_matrix(l))
        return 0;
    const Pass forward = forward_pass(l, false, NULL), backward = backward_pass(l, NULL, false);
    const WeightGradient g = weight_gradient_plan(l, n, NULL);
    size_t size = weight_gradient_scratch(&g);
    if (fused->pool) {
        const PooledPass p = pooled_pass((Work){.l = l, .n = n});
        size = max_size(size, p.slices * p.sums + p.packed);
    }
    return max_size(size, max_size(pass_scratch(&forward, n), pass_scratch(&backward, n)));
}

// Returns how often a pass reads an input pixel: a run of taps is read if it is inside the image
// for any of `group` adjacent output pixels.
static size_t pixels_read(const Pass *p, size_t group) {
    const size_t row = 1 + p->taps * p->run, pixels = p->n * p->out_pixels; // row: of the map
    size_t count = 0;
    for (size_t first = 0; first < pixels; first += group)
        for (size_t tap = 1; tap < row; tap += p->run) {
            const size_t taps = min_size(group, pixels - first) * p->run;
            bool inside = false;
            for (size_t i = 0; i < taps; i++) {
                const size_t pixel = (first + i / p->run) % p->out_pixels;
                inside |= p->map[pixel * row + tap + i % p->run] != OUTSIDE;
            }
            count += inside ? taps : 0;
        }
    return count;
}

// Multiply-adds of a pass: each input pixel that is read, or each point of a Winograd tile, is
// multiplied by a matrix [in.c][out.c].
static double pass_products(const Pass *p, size_t group) {
    const size_t points = p->tile ? count_tiles(p, p->n) * tile_points(p) : pixels_read(p, group);
    return (double)points * (double)(p->in.c * p->out.c);
}

// Before a max-pool, each gradient that is not 0 costs the products of a filter.
static double pooled_products(Work w) {
    const size_t count = w.n * shape_size(w.fused.pool->out);
    size_t terms = 0;
    for (size_t i = 0; i < count; i++)
        terms += w.out[i] > 0 && w.dout[i] != 0;
    return (double)terms * (double)(w.l->weight_count / w.l->out.c);
}

/* Operations that a row executes on w.n images, 2 for each multiply-add: forward, weight gradient
   and, if w.din is given, data gradient. Before a max-pool they depend on w.out and w.dout. */
static double flops_fast(Work w) {
    const Layer *l = w.l;
    if (maps_size(l) == 0)
        return 0;
    const WeightGradient gradient = weight_gradient_plan(l, w.n, w.prepared);
    Pass forward = forward_pass(l, w.fused.relu, w.prepared),
         backward = backward_pass(l, w.prepared, false);
    forward.n = backward.n = w.n;
    double products = pass_products(&forward, ROWS);
    if (w.fused.pool)
        products += pooled_products(w) * (w.din ? 2 : 1);
    else
        products += pass_products(&gradient.pass, 1) + (w.din ? pass_products(&backward, ROWS) : 0);
    return 2 * products;
}

static bool fuses_relu(const Layer *target, const Fusion *fused) {
    return !fused->relu && (has_weight_matrix(target) || target->kind == BATCHNORM2D);
}

static bool fuses_pool(const Layer *target, const Fusion *fused, const Layer *pool) {
    return target->kind == CONV2D && fused->relu && !fused->pool && suits_pooled(target, pool);
}

static RowMode fuse_fast(const Layer *target, const Fusion *fused, const Layer *l) {
    if (l->kind == DROPOUT)
        return IN_PLACE;
    if (l->kind == RELU && fuses_relu(target, fused))
        return FUSED_INTO_EARLIER;
    if (l->kind == RELU && !fused->pool)
        return IN_PLACE;
    if (l->kind == ADD && target->kind == BATCHNORM2D && !fused->relu && !fused->add)
        return FUSED_INTO_EARLIER;
    if (l->kind == MAXPOOL2D && fuses_pool(target, fused, l))
        return FUSED_INTO_EARLIER;
    return SEPARATE;
}

static const Kernels fast_kernels = {
    .device = &cpu_device,
    .choice = FAST,
    .precision = FP32,
    .element_bytes = sizeof(real),
    .layers = {[CONV2D] = {conv2d_forward_fast, conv2d_backward_fast},
               [LINEAR] = {conv2d_forward_fast, conv2d_backward_fast},
               [BATCHNORM2D] = {batchnorm2d_forward_fast, batchnorm2d_backward_fast},
               [RELU] = {forward_by_images, backward_by_images},
               [MAXPOOL2D] = {maxpool2d_forward_fast, backward_by_images},
               [GLOBAL_AVGPOOL2D] = {forward_by_images, backward_by_images},
               [ADD] = {forward_by_images, backward_by_images},
               [DROPOUT] = {dropout_forward_fast, backward_by_images},
               [LOG_SOFTMAX] = {forward_by_images, backward_by_images}},
    .fuse = fuse_fast,
    .update = {[ADADELTA] = adadelta_fast, [SGD] = sgd_fast},
    .nll_loss = nll_loss,
    .scratch_size = scratch_size_fast,
    .moments_size = no_size,
    .transposed_size = no_size,
    .prepared_bytes = maps_size,
    .prepare = make_maps,
    .flops = flops_fast,
};
