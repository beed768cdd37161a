/* matmul.cu - lab 10: a matrix product on a GPU's tensor cores, one change at a time.

     C[m][n] = A[m][k] * B[k][n]     A and B are bfloat16, C is float; rows lie one after the other

   A linear layer is such a product: m images, k numbers of each, n numbers out. Here 64 divides all
   three sizes.

     build/matmul FILE.csv [SIZE]     the time, and in the emulator the counts, of each change;
                                      m = n = SIZE, k = 2 SIZE

   All matrices are on the GPU. */
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "tensor cores multiply bfloat16 from sm_80 on; run this with EMULATE=1"
#endif

struct Sizes {
    int m, n, k;
};
typedef uint16_t bf16; // a bfloat16: the upper 16 bits of a float
typedef float4 Chunk;  // 16 bytes: 8 numbers
enum {
    TILE = 64,          // a block computes TILE x TILE elements of C, in steps of TILE along k
    LINE = TILE / 8,    // chunks in a line of a tile: a row of A, or a k of B
    TILE_THREADS = 128, // of a block: 4 warps, each of which computes 32 x 32 elements
    STAGES = 3
};

#define CHECK(call) check(call, #call, __LINE__)
#define CHECK_LAUNCH() check(cudaGetLastError(), "the kernel launched here", __LINE__)
static void check(cudaError_t error, const char *call, int line) {
    if (error == cudaSuccess)
        return;
    fprintf(stderr, "matmul.cu:%d: %s: %s\n", line, call, cudaGetErrorString(error));
    exit(1);
}

/* ---- The instructions. All 32 lanes of a warp execute each of the first three together. ------ */

// d[16][8] += a[16][16] * b[16][8], where the lanes hold the elements: the handout shows which.
static __device__ void mma(float *d, const uint32_t *a, const uint32_t *b) {
#ifdef CUDA_ON_CPU
    emu_mma_m16n8k16_bf16(d, a, b, d);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Four matrices of 8 lines of a chunk, from shared memory: lane i gives the address of line i % 8
// of matrix i / 8. Lane 4 g + q gets in r[j] the numbers 2 q and 2 q + 1 of line g of matrix j.
static __device__ void ldmatrix(uint32_t *r, const Chunk *line) {
#ifdef CUDA_ON_CPU
    emu_ldmatrix_x4(r, line, false);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(line))
                 : "memory");
#endif
}

// The same, but of the transposed matrices: it gets number g of lines 2 q and 2 q + 1.
static __device__ void ldmatrix_transposed(uint32_t *r, const Chunk *line) {
#ifdef CUDA_ON_CPU
    emu_ldmatrix_x4(r, line, true);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(line))
                 : "memory");
#endif
}

// Starts to copy a chunk from global to shared memory, and does not wait until it is there.
static __device__ void cp_async(Chunk *to, const Chunk *from) {
#ifdef CUDA_ON_CPU
    emu_cp_async16(to, from, 16);
#else
    asm volatile(
        "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(to)),
        "l"(from)
        : "memory");
#endif
}

// Ends a group of this thread's copies; the group may be empty.
static __device__ void cp_async_commit(void) {
#ifdef CUDA_ON_CPU
    emu_cp_async_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most PENDING of this thread's groups, the last ones, are incomplete.
template <int PENDING> static __device__ void cp_async_wait(void) {
#ifdef CUDA_ON_CPU
    emu_cp_async_wait(PENDING);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

/* ---- Elements -------------------------------------------------------------------------------- */

// The numbers at[0] and at[1] in a register: at[0] in its lower half. `at` is a multiple of 4.
static __device__ uint32_t two(const bf16 *at) {
    return *(const uint32_t *)at;
}

static __device__ uint32_t pack(bf16 low, bf16 high) {
    return (uint32_t)high << 16 | low;
}

// The chunk that begins at this number, whose address is a multiple of 16.
static __device__ const Chunk *chunk_at(const bf16 *number) {
    return (const Chunk *)number;
}

// C[row][column] and on = a warp's 16 x 8 sums: lane 4 g + q has rows g (sums[0], sums[1]) and
// g + 8 (sums[2], sums[3]), columns 2 q and 2 q + 1.
static __device__ void store_sums(Sizes s, float *c, int row, int column, const float *sums) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    float *to = c + (row + g) * s.n + column + 2 * q;
    *(float2 *)to = {sums[0], sums[1]};
    *(float2 *)(to + 8 * s.n) = {sums[2], sums[3]};
}

/* ---- Change 0: without tensor cores, one thread per element of C ----------------------------- */

static __global__ void naive_kernel(Sizes s, const bf16 *a, const bf16 *b, float *c) {
    const int row = blockIdx.y, column = blockIdx.x * TILE + threadIdx.x;
    float sum = 0;
    for (int k = 0; k < s.k; k++)
        sum += __uint_as_float((uint32_t)a[row * s.k + k] << 16) *
               __uint_as_float((uint32_t)b[k * s.n + column] << 16);
    c[row * s.n + column] = sum;
}

static void matmul_naive(Sizes s, const bf16 *a, const bf16 *b, float *c) {
    naive_kernel<<<dim3(s.n / TILE, s.m), TILE>>>(s, a, b, c);
    CHECK_LAUNCH();
}

/* ---- Change 1: mma, its operands loaded from global memory ----------------------------------- */

/* LAB 10.1 BEGIN matmul_mma */
// A block is one warp, which computes 16 x 8 elements of C.
static __global__ void mma_kernel(Sizes s, const bf16 *a, const bf16 *b, float *c) {
    const int g = threadIdx.x / 4, q = threadIdx.x % 4;
    const int top = blockIdx.y * 16, left = blockIdx.x * 8;
    const bf16 *upper = a + (top + g) * s.k, *lower = upper + 8 * s.k;
    const bf16 *column = b + left + g;
    float sums[4] = {};
    for (int k = 2 * q; k < s.k; k += 16) { // this lane's first number of the 16
        const uint32_t of_a[4] = {two(upper + k), two(lower + k), two(upper + k + 8),
                                  two(lower + k + 8)};
        const uint32_t of_b[2] = {pack(column[k * s.n], column[(k + 1) * s.n]),
                                  pack(column[(k + 8) * s.n], column[(k + 9) * s.n])};
        mma(sums, of_a, of_b);
    }
    store_sums(s, c, top, left, sums);
}

static void matmul_mma(Sizes s, const bf16 *a, const bf16 *b, float *c) {
    mma_kernel<<<dim3(s.n / 8, s.m / 16), 32>>>(s, a, b, c);
    CHECK_LAUNCH();
}
/* LAB 10.1 END */

/* ---- Change 2: tiles in shared memory, fragments by ldmatrix --------------------------------- */

/* LAB 10.2 BEGIN matmul_tiles */
// Of the block's tile of C, a warp computes 32 x 32 elements: 2 x 4 products of 16 x 8.
static __global__ void tiles_kernel(Sizes s, const bf16 *a, const bf16 *b, float *c) {
    __shared__ Chunk tile_a[TILE * LINE]; // a line is a row, its chunks lie along k
    __shared__ Chunk tile_b[TILE * LINE]; // a line is a k, its chunks lie along the columns
    const int top = blockIdx.y * TILE, left = blockIdx.x * TILE;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = warp / 2 * 32, column = warp % 2 * 32; // of the warp, in the tile
    float sums[2][4][4] = {};
    for (int k = 0; k < s.k; k += TILE) {
        for (int i = threadIdx.x; i < TILE * LINE; i += TILE_THREADS) {
            const int line = i / LINE, chunk = i % LINE;
            tile_a[i] = *chunk_at(&a[(top + line) * s.k + k + chunk * 8]);
            tile_b[i] = *chunk_at(&b[(k + line) * s.n + left + chunk * 8]);
        }
        __syncthreads(); // the tiles are complete
        for (int d = 0; d < TILE; d += 16) {
            uint32_t of_a[2][4], of_b[2][4];
            for (int i = 0; i < 2; i++) {
                const int line = row + i * 16 + lane % 16, chunk = d / 8 + lane / 16;
                ldmatrix(of_a[i], &tile_a[line * LINE + chunk]);
            }
            for (int j = 0; j < 2; j++) {
                const int line = d + lane % 16, chunk = column / 8 + j * 2 + lane / 16;
                ldmatrix_transposed(of_b[j], &tile_b[line * LINE + chunk]);
            }
            for (int i = 0; i < 2; i++)
                for (int j = 0; j < 4; j++)
                    mma(sums[i][j], of_a[i], &of_b[j / 2][j % 2 * 2]);
        }
        __syncthreads(); // nobody reads them any more
    }
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 4; j++)
            store_sums(s, c, top + row + i * 16, left + column + j * 8, sums[i][j]);
}

static void matmul_tiles(Sizes s, const bf16 *a, const bf16 *b, float *c) {
    tiles_kernel<<<dim3(s.n / TILE, s.m / TILE), TILE_THREADS>>>(s, a, b, c);
    CHECK_LAUNCH();
}
/* LAB 10.2 END */

/* ---- Change 3: the chunks of a line are permuted, so that no two of a matrix share a bank ---- */

/* LAB 10.3 BEGIN matmul_swizzled */
// A chunk's place in a tile. The banks of a chunk are given by its place modulo 8, which is chunk
// XOR line % 8: it differs in the 8 chunks of a line, and in the same chunk of 8 lines.
static __device__ int place(int line, int chunk) {
    return line * LINE + (chunk ^ line % 8);
}

static __global__ void swizzled_kernel(Sizes s, const bf16 *a, const bf16 *b, float *c) {
    __shared__ Chunk tile_a[TILE * LINE];
    __shared__ Chunk tile_b[TILE * LINE];
    const int top = blockIdx.y * TILE, left = blockIdx.x * TILE;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = warp / 2 * 32, column = warp % 2 * 32;
    float sums[2][4][4] = {};
    for (int k = 0; k < s.k; k += TILE) {
        for (int i = threadIdx.x; i < TILE * LINE; i += TILE_THREADS) {
            const int line = i / LINE, chunk = i % LINE, to = place(line, chunk);
            tile_a[to] = *chunk_at(&a[(top + line) * s.k + k + chunk * 8]);
            tile_b[to] = *chunk_at(&b[(k + line) * s.n + left + chunk * 8]);
        }
        __syncthreads();
        for (int d = 0; d < TILE; d += 16) {
            uint32_t of_a[2][4], of_b[2][4];
            for (int i = 0; i < 2; i++) {
                const int line = row + i * 16 + lane % 16, chunk = d / 8 + lane / 16;
                ldmatrix(of_a[i], &tile_a[place(line, chunk)]);
            }
            for (int j = 0; j < 2; j++) {
                const int line = d + lane % 16, chunk = column / 8 + j * 2 + lane / 16;
                ldmatrix_transposed(of_b[j], &tile_b[place(line, chunk)]);
            }
            for (int i = 0; i < 2; i++)
                for (int j = 0; j < 4; j++)
                    mma(sums[i][j], of_a[i], &of_b[j / 2][j % 2 * 2]);
        }
        __syncthreads();
    }
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 4; j++)
            store_sums(s, c, top + row + i * 16, left + column + j * 8, sums[i][j]);
}

static void matmul_swizzled(Sizes s, const bf16 *a, const bf16 *b, float *c) {
    swizzled_kernel<<<dim3(s.n / TILE, s.m / TILE), TILE_THREADS>>>(s, a, b, c);
    CHECK_LAUNCH();
}
/* LAB 10.3 END */

/* ---- Change 4: two tiles of each operand are on their way while a third one is multiplied ---- */

/* LAB 10.4 BEGIN matmul_stages */
static __device__ int place_in_stage(int line, int chunk) {
    return line * LINE + (chunk ^ line % 8);
}

// Starts to copy this thread's part of the tiles at k. There may be none; the group is then empty.
static __device__ void copy_tiles(Sizes s, const bf16 *a, const bf16 *b, int k, Chunk *tile_a,
                                  Chunk *tile_b) {
    const int top = blockIdx.y * TILE, left = blockIdx.x * TILE;
    for (int i = threadIdx.x; k < s.k && i < TILE * LINE; i += TILE_THREADS) {
        const int line = i / LINE, chunk = i % LINE, to = place_in_stage(line, chunk);
        cp_async(&tile_a[to], chunk_at(&a[(top + line) * s.k + k + chunk * 8]));
        cp_async(&tile_b[to], chunk_at(&b[(k + line) * s.n + left + chunk * 8]));
    }
    cp_async_commit();
}

static __global__ void stages_kernel(Sizes s, const bf16 *a, const bf16 *b, float *c) {
    __shared__ Chunk tiles_a[STAGES][TILE * LINE];
    __shared__ Chunk tiles_b[STAGES][TILE * LINE];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = warp / 2 * 32, column = warp % 2 * 32;
    float sums[2][4][4] = {};
    for (int stage = 0; stage < STAGES - 1; stage++)
        copy_tiles(s, a, b, stage * TILE, tiles_a[stage], tiles_b[stage]);
    for (int k = 0, stage = 0; k < s.k; k += TILE, stage = (stage + 1) % STAGES) {
        cp_async_wait<STAGES - 2>(); // this thread's part of the tiles at k is there;
        __syncthreads();             // the others' parts, too, and the tiles before were read,
        const int free = (stage + STAGES - 1) % STAGES; // whose memory is free
        copy_tiles(s, a, b, k + (STAGES - 1) * TILE, tiles_a[free], tiles_b[free]);
        for (int d = 0; d < TILE; d += 16) {
            uint32_t of_a[2][4], of_b[2][4];
            for (int i = 0; i < 2; i++) {
                const int line = row + i * 16 + lane % 16, chunk = d / 8 + lane / 16;
                ldmatrix(of_a[i], &tiles_a[stage][place_in_stage(line, chunk)]);
            }
            for (int j = 0; j < 2; j++) {
                const int line = d + lane % 16, chunk = column / 8 + j * 2 + lane / 16;
                ldmatrix_transposed(of_b[j], &tiles_b[stage][place_in_stage(line, chunk)]);
            }
            for (int i = 0; i < 2; i++)
                for (int j = 0; j < 4; j++)
                    mma(sums[i][j], of_a[i], &of_b[j / 2][j % 2 * 2]);
        }
    }
    const int top = blockIdx.y * TILE, left = blockIdx.x * TILE;
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 4; j++)
            store_sums(s, c, top + row + i * 16, left + column + j * 8, sums[i][j]);
}

static void matmul_stages(Sizes s, const bf16 *a, const bf16 *b, float *c) {
    stages_kernel<<<dim3(s.n / TILE, s.m / TILE), TILE_THREADS>>>(s, a, b, c);
    CHECK_LAUNCH();
}
/* LAB 10.4 END */

/* ---- Each change is run, compared with the naive kernel, and timed or counted ---------------- */

static const struct {
    const char *name;
    void (*run)(Sizes s, const bf16 *a, const bf16 *b, float *c);
} changes[] = {
    {"0 naive", matmul_naive},      {"1 mma", matmul_mma},       {"2 tiles", matmul_tiles},
    {"3 swizzle", matmul_swizzled}, {"4 stages", matmul_stages},
};
enum { CHANGES = sizeof changes / sizeof *changes, ROUNDS = 7, TIMES = 10 };

// A product of random numbers. `exact_a` and `exact_b` are the floats that were rounded to a and b.
struct Trial {
    Sizes s;
    size_t count_c;
    float *exact_a, *exact_b, *found, *expected; // on the host; expected: what change 0 computes
    bf16 *a, *b;                                 // on the GPU, as c
    float *c;
};

// Small integers, whose sums are exact and so the same in every order.
static float small_integer(void) {
    return (float)(rand() % 9 - 4);
}

static float between_minus_1_and_1(void) {
    return (float)(2. * rand() / RAND_MAX - 1);
}

static float *numbers(size_t count, float (*draw)(void)) {
    float *all = (float *)malloc(count * sizeof *all);
    for (size_t i = 0; all && i < count; i++)
        all[i] = draw();
    return all;
}

// To the nearest bfloat16; of two that are equally near, the one with an even mantissa.
static bf16 rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float value(bf16 x) {
    const uint32_t bits = (uint32_t)x << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static bf16 *on_gpu(const float *numbers, size_t count) {
    bf16 *copy, *host = (bf16 *)malloc(count * sizeof *host);
    for (size_t i = 0; host && i < count; i++)
        host[i] = rounded(numbers[i]);
    CHECK(cudaMalloc(&copy, count * sizeof *copy));
    CHECK(cudaMemcpy(copy, host, count * sizeof *copy, cudaMemcpyHostToDevice));
    free(host);
    return copy;
}

static Trial new_trial(Sizes s, float (*draw)(void)) {
    const size_t m = s.m, n = s.n, k = s.k;
    float *a = numbers(m * k, draw), *b = numbers(k * n, draw), *c;
    CHECK(cudaMalloc(&c, m * n * sizeof *c));
    return {s,
            m * n,
            a,
            b,
            numbers(m * n, draw),
            numbers(m * n, draw),
            on_gpu(a, m * k),
            on_gpu(b, k * n),
            c};
}

static void free_trial(Trial *t) {
    CHECK(cudaFree(t->a));
    CHECK(cudaFree(t->b));
    CHECK(cudaFree(t->c));
    free(t->exact_a);
    free(t->exact_b);
    free(t->found);
    free(t->expected);
}

// `to` = what a change computes; where it writes nothing there are NaNs.
static void run_once(const Trial *t, int change, float *to) {
    CHECK(cudaMemset(t->c, 0xff, t->count_c * sizeof *t->c));
    changes[change].run(t->s, t->a, t->b, t->c);
    CHECK(cudaMemcpy(to, t->c, t->count_c * sizeof *to, cudaMemcpyDeviceToHost));
}

static bool is_done(const Trial *t) {
    size_t written = 0;
    for (size_t i = 0; i < t->count_c; i++)
        written += !isnan(t->found[i]);
    return written > 0;
}

static size_t count_wrong(const Trial *t) {
    size_t wrong = 0;
    for (size_t i = 0; i < t->count_c; i++)
        wrong += !(t->found[i] == t->expected[i]);
    return wrong;
}

#ifdef CUDA_ON_CPU // labs/check/lab10_counts.h counts; times would mean nothing
enum { EMULATED = 1 };

static void print_columns(FILE *csv) {
    printf("%-11s %7s %9s %11s %11s %9s %9s %6s\n", "change", "wrong", "mma", "global", "bytes",
           "ldmatrix", "conflicts", "ahead");
    fprintf(csv, "change,m,n,k,wrong,mma,global_reads,global_bytes,ldmatrix,conflicts,ahead\n");
}

static void print_measured(const Trial *t, int change, FILE *csv) {
    begin_counts();
    changes[change].run(t->s, t->a, t->b, t->c);
    CHECK(cudaDeviceSynchronize());
    const Counts n = end_counts();
    const double ahead = tiles_ahead(n, 2 * TILE * LINE * sizeof(Chunk));
    printf(" %9ld %11ld %11ld %9ld %9ld %6.2f\n", n.mma, n.accesses[emu::GLOBAL_READ],
           n.bytes[emu::GLOBAL_READ], n.ldmatrix, n.conflicts, ahead);
    fprintf(csv, ",%ld,%ld,%ld,%ld,%ld,%.2f\n", n.mma, n.accesses[emu::GLOBAL_READ],
            n.bytes[emu::GLOBAL_READ], n.ldmatrix, n.conflicts, ahead);
}
#else
enum { EMULATED = 0 };

static int compare(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

// Microseconds of one call: the median of ROUNDS times TIMES calls, after that of run_once().
static double microseconds(const Trial *t, int change) {
    float ms[ROUNDS];
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    for (int round = 0; round < ROUNDS; round++) {
        CHECK(cudaEventRecord(begin, 0));
        for (int i = 0; i < TIMES; i++)
            changes[change].run(t->s, t->a, t->b, t->c);
        CHECK(cudaEventRecord(end, 0));
        CHECK(cudaEventSynchronize(end));
        CHECK(cudaEventElapsedTime(&ms[round], begin, end));
    }
    qsort(ms, ROUNDS, sizeof *ms, compare);
    return 1e3 * ms[ROUNDS / 2] / TIMES;
}

static void print_columns(FILE *csv) {
    printf("%-11s %7s %12s %10s\n", "change", "wrong", "us", "TFLOP/s");
    fprintf(csv, "change,m,n,k,wrong,us,tflops\n");
}

static void print_measured(const Trial *t, int change, FILE *csv) {
    const double us = microseconds(t, change), flop = 2. * t->s.m * t->s.n * t->s.k;
    printf(" %12.1f %10.2f\n", us, flop / us / 1e6);
    fprintf(csv, ",%.1f,%.3f\n", us, flop / us / 1e6);
}
#endif

// A line of the table for each change that is done. Returns the last of them.
static int print_changes(Trial *t, FILE *csv) {
    size_t all_wrong = 0;
    int done = 0, last = 0;
    run_once(t, 0, t->expected);
    print_columns(csv);
    for (int change = 0; change < CHANGES; change++) {
        run_once(t, change, t->found);
        if (!is_done(t)) {
            printf("%-11s   not done: nothing was written\n", changes[change].name);
            continue;
        }
        const size_t wrong = count_wrong(t);
        printf("%-11s %7zu", changes[change].name, wrong);
        fprintf(csv, "%s,%d,%d,%d,%zu", changes[change].name, t->s.m, t->s.n, t->s.k, wrong);
        print_measured(t, change, csv);
        all_wrong += wrong;
        last = change;
        done++;
    }
    printf("done=%d wrong=%zu\n", done, all_wrong);
    return last;
}

/* ---- How exact are the sums? ----------------------------------------------------------------- */

// Sums of squares over all elements: of the exact results, and of the four errors.
struct Errors {
    double exact, fp32, inputs, sums, bf16_sums;
};

// Adds the errors of C[row][column]. found: what the GPU has computed of the rounded numbers.
static void add_errors(Errors *e, const Trial *t, int row, int column, float found) {
    double exact = 0, of_rounded = 0; // in double: their own errors do not count
    float fp32 = 0, bf16_sum = 0;
    for (int k = 0; k < t->s.k; k++) {
        const float a = t->exact_a[(size_t)row * t->s.k + k];
        const float b = t->exact_b[(size_t)k * t->s.n + column];
        const float product = value(rounded(a)) * value(rounded(b)); // exact: 8 + 8 bits
        exact += (double)a * b;
        of_rounded += product;
        fp32 += a * b;
        bf16_sum = value(rounded(bf16_sum + product));
    }
    e->exact += exact * exact;
    e->fp32 += (fp32 - exact) * (fp32 - exact);
    e->inputs += (of_rounded - exact) * (of_rounded - exact);
    e->sums += (found - of_rounded) * (found - of_rounded);
    e->bf16_sums += (bf16_sum - of_rounded) * (bf16_sum - of_rounded);
}

// Root mean squares, relative to the exact results' own
static void print_accuracy(int k, int change) {
    Trial t = new_trial({TILE, TILE, k}, between_minus_1_and_1);
    Errors e = {};
    run_once(&t, change, t.found);
    for (int row = 0; row < TILE; row++)
        for (int column = 0; column < TILE; column++)
            add_errors(&e, &t, row, column, t.found[row * TILE + column]);
    printf("k=%-9d %12.1e %14.1e %14.1e %14.1e\n", k, sqrt(e.fp32 / e.exact),
           sqrt(e.inputs / e.exact), sqrt(e.sums / e.exact), sqrt(e.bf16_sums / e.exact));
    free_trial(&t);
}

int main(int argc, char **argv) {
    const int size = argc == 3 ? atoi(argv[2]) : EMULATED ? 128 : 4096;
    if (argc < 2 || argc > 3 || size < TILE || size > 16384 || size % TILE != 0) {
        fprintf(stderr, "usage: matmul FILE.csv [SIZE], a multiple of %d up to 16384\n", TILE);
        return 2;
    }
    FILE *csv = fopen(argv[1], "w");
    if (!csv) {
        fprintf(stderr, "matmul: cannot write %s: does its folder exist?\n", argv[1]);
        return 1;
    }
    const Sizes s = {size, size, 2 * size};
    printf("C[%d][%d] = A[%d][%d] * B[%d][%d]:\n", s.m, s.n, s.m, s.k, s.k, s.n);
    Trial t = new_trial(s, small_integer);
    const int last = print_changes(&t, csv);
    free_trial(&t);
    printf("\nErrors, relative to the result (root mean square), of numbers between -1 and 1:\n"
           "%-11s %12s %14s %14s %14s\n",
           "", "all in fp32", "bf16 inputs", changes[last].name, "bf16 sums");
    for (int k = TILE; k <= (EMULATED ? 1024 : 16384); k *= 4)
        print_accuracy(k, last);
    return fclose(csv) != 0;
}
