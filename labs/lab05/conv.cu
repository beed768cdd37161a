/* conv.cu - lab 5: a convolution on a GPU, made faster one change at a time.

   It is a matrix product, C[rows][columns] = sum over k of A[rows][k] * B[k][columns]:

     a row      one pixel of the output of one image            n * oh * ow rows
     a column   one channel of the output                       oc columns
     k          one number under the filter: tap and channel    depth = kernel * kernel * c
     A          the input: A[row][k] is the number under the filter; 0 outside of the image
     B          the filter, weight[tap][c][oc], in this order in memory

   A is never stored ("implicit GEMM"): patch_at() looks its elements up in the images.

     build/convolution FILE.csv [IMAGES]     the time, and on the CPU the reads, of each change

   In a kernel, `s` is the shape of the convolution. All arrays are on the GPU. */
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

struct Conv { // in[n][h][w][c], weight[kernel][kernel][c][oc], out[n][oh][ow][oc]
    int n, h, w, c, oc, kernel, stride, padding;
    int oh = 0, ow = 0, rows = 0, columns = 0, depth = 0; // computed by complete()
};

#define CHECK(call) check(call, #call, __LINE__)
#define CHECK_LAUNCH() check(cudaGetLastError(), "the kernel launched here", __LINE__)
static void check(cudaError_t error, const char *call, int line) {
    if (error == cudaSuccess)
        return;
    fprintf(stderr, "conv.cu:%d: %s: %s\n", line, call, cudaGetErrorString(error));
    exit(1);
}

// a / b, rounded up
static int ceil_div(int a, int b) {
    return (a + b - 1) / b;
}

static Conv complete(Conv s) {
    s.oh = (s.h + 2 * s.padding - s.kernel) / s.stride + 1;
    s.ow = (s.w + 2 * s.padding - s.kernel) / s.stride + 1;
    s.rows = s.n * s.oh * s.ow;
    s.columns = s.oc;
    s.depth = s.kernel * s.kernel * s.c;
    return s;
}

/* ---- The operands ---------------------------------------------------------------------------- */

// The address of A[row][k] in `in`; NULL where A has a 0: beyond its last row or k, or outside of
// the image. If 4 divides s.c and k, then A[row][k + 1], [k + 2] and [k + 3] follow in memory.
static __device__ const float *patch_at(const Conv &s, const float *in, int row, int k) {
    const int tap = k / s.c, c = k % s.c;
    const int y = row / s.ow % s.oh * s.stride + tap / s.kernel - s.padding;
    const int x = row % s.ow * s.stride + tap % s.kernel - s.padding;
    if (row >= s.rows || k >= s.depth || y < 0 || y >= s.h || x < 0 || x >= s.w)
        return NULL;
    return in + ((row / (s.oh * s.ow) * s.h + y) * s.w + x) * s.c + c;
}

// The address of B[k][column] in `weight`; NULL beyond its last k or column. If 4 divides
// s.columns and column, the next three columns follow in memory.
static __device__ const float *weight_at(const Conv &s, const float *weight, int k, int column) {
    return k < s.depth && column < s.columns ? weight + k * s.columns + column : NULL;
}

// *from, or 0 if it is NULL; four() reads 16 bytes, from a multiple of 16.
static __device__ float one(const float *from) {
    return from ? *from : 0;
}

static __device__ float4 four(const float *from) {
    float4 zeros = {0, 0, 0, 0};
    return from ? *(const float4 *)from : zeros;
}

/* ---- Change 0: one thread per output, which reads all its operands from memory ---------------- */

static __global__ void naive_kernel(Conv s, const float *in, const float *weight, float *out) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= s.rows || column >= s.columns)
        return;
    float sum = 0;
    for (int k = 0; k < s.depth; k++)
        sum += one(patch_at(s, in, row, k)) * one(weight_at(s, weight, k, column));
    out[row * s.columns + column] = sum;
}

static void conv_naive(Conv s, const float *in, const float *weight, float *out) {
    const dim3 grid(ceil_div(s.columns, 16), ceil_div(s.rows, 16)), block(16, 16);
    naive_kernel<<<grid, block>>>(s, in, weight, out);
    CHECK_LAUNCH();
}

/* ---- Change 1: tiles of A and B in shared memory ---------------------------------------------- */

/* LAB 5.1 BEGIN conv_tiled */
// A block computes a tile of C of 16 x 16, in steps of 16 along k; a thread one element of it.
static __global__ void tiled_kernel(Conv s, const float *in, const float *weight, float *out) {
    __shared__ float a[16][16];
    __shared__ float b[16][16];
    const int x = threadIdx.x, y = threadIdx.y;
    const int row = blockIdx.y * 16 + y, column = blockIdx.x * 16 + x;
    float sum = 0;
    for (int k = 0; k < s.depth; k += 16) {
        a[y][x] = one(patch_at(s, in, row, k + x));
        b[y][x] = one(weight_at(s, weight, k + y, column));
        __syncthreads(); // the tiles are complete
        for (int d = 0; d < 16; d++)
            sum += a[y][d] * b[d][x];
        __syncthreads(); // nobody reads them any more
    }
    if (row < s.rows && column < s.columns)
        out[row * s.columns + column] = sum;
}

static void conv_tiled(Conv s, const float *in, const float *weight, float *out) {
    const dim3 grid(ceil_div(s.columns, 16), ceil_div(s.rows, 16)), block(16, 16);
    tiled_kernel<<<grid, block>>>(s, in, weight, out);
    CHECK_LAUNCH();
}
/* LAB 5.1 END */

/* ---- Change 2: a thread computes 4 x 4 elements, its sums in registers ------------------------ */

/* LAB 5.2 BEGIN conv_blocked */
// A block of 16 x 16 threads computes a tile of C of 64 x 64; a thread 4 x 4 elements of it. Of
// each k it reads 4 + 4 numbers from shared memory for 16 multiply-adds.
static __global__ void blocked_kernel(Conv s, const float *in, const float *weight, float *out) {
    __shared__ float a[64][16];
    __shared__ float b[16][64];
    const int thread = threadIdx.y * 16 + threadIdx.x;
    const int top = blockIdx.y * 64, left = blockIdx.x * 64;
    const int row = threadIdx.y * 4, column = threadIdx.x * 4; // of this thread, in the tile
    float sums[4][4] = {};
    for (int k = 0; k < s.depth; k += 16) {
        for (int i = thread; i < 64 * 16; i += 256) {
            a[i / 16][i % 16] = one(patch_at(s, in, top + i / 16, k + i % 16));
            b[i / 64][i % 64] = one(weight_at(s, weight, k + i / 64, left + i % 64));
        }
        __syncthreads();
        for (int d = 0; d < 16; d++) {
            float x[4], y[4];
            for (int i = 0; i < 4; i++) {
                x[i] = a[row + i][d];
                y[i] = b[d][column + i];
            }
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++)
                    sums[i][j] += x[i] * y[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++)
            if (top + row + i < s.rows && left + column + j < s.columns)
                out[(top + row + i) * s.columns + left + column + j] = sums[i][j];
}

static void conv_blocked(Conv s, const float *in, const float *weight, float *out) {
    const dim3 grid(ceil_div(s.columns, 64), ceil_div(s.rows, 64)), block(16, 16);
    blocked_kernel<<<grid, block>>>(s, in, weight, out);
    CHECK_LAUNCH();
}
/* LAB 5.2 END */

/* ---- Change 3: loads and stores of 16 bytes. Here 4 divides s.c and s.columns. ---------------- */

/* LAB 5.3 BEGIN conv_wide */
// As before, but each thread loads 4 numbers of A, along k, and 4 of B, along the columns, at once.
// The tile of A is stored by k, so that a thread's 4 rows are neighbors; its lines are padded by
// 4 numbers, which halves the conflicts of threads that store in the same bank.
static __global__ void wide_kernel(Conv s, const float *in, const float *weight, float *out) {
    __shared__ __align__(16) float a[16][64 + 4];
    __shared__ __align__(16) float b[16][64];
    const int thread = threadIdx.y * 16 + threadIdx.x;
    const int top = blockIdx.y * 64, left = blockIdx.x * 64;
    const int row = threadIdx.y * 4, column = threadIdx.x * 4;
    float sums[4][4] = {};
    for (int k = 0; k < s.depth; k += 16) {
        const int line = thread / 4, along = thread % 4 * 4; // of A; of B: threadIdx
        const float4 of_a = four(patch_at(s, in, top + line, k + along));
        a[along][line] = of_a.x;
        a[along + 1][line] = of_a.y;
        a[along + 2][line] = of_a.z;
        a[along + 3][line] = of_a.w;
        *(float4 *)&b[threadIdx.y][column] =
            four(weight_at(s, weight, k + threadIdx.y, left + column));
        __syncthreads();
        for (int d = 0; d < 16; d++) {
            const float4 x = *(const float4 *)&a[d][row], y = *(const float4 *)&b[d][column];
            const float xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++)
                    sums[i][j] += xs[i] * ys[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < 4; i++) {
        const float4 sum = {sums[i][0], sums[i][1], sums[i][2], sums[i][3]};
        if (top + row + i < s.rows && left + column < s.columns)
            *(float4 *)&out[(top + row + i) * s.columns + left + column] = sum;
    }
}

static void conv_wide(Conv s, const float *in, const float *weight, float *out) {
    const dim3 grid(ceil_div(s.columns, 64), ceil_div(s.rows, 64)), block(16, 16);
    wide_kernel<<<grid, block>>>(s, in, weight, out);
    CHECK_LAUNCH();
}
/* LAB 5.3 END */

/* ---- Change 4: two tiles of each; the next is loaded while this one is used. 4 divides both. -- */

/* LAB 5.4 BEGIN conv_buffered */
// As before, but with one barrier a step: while a tile is read, the next one is on its way into
// registers, and is stored into the other buffer in the next step.
static __global__ void buffered_kernel(Conv s, const float *in, const float *weight, float *out) {
    __shared__ __align__(16) float a[2][16][64 + 4];
    __shared__ __align__(16) float b[2][16][64];
    const int thread = threadIdx.y * 16 + threadIdx.x;
    const int top = blockIdx.y * 64, left = blockIdx.x * 64;
    const int row = threadIdx.y * 4, column = threadIdx.x * 4;
    const int line = thread / 4, along = thread % 4 * 4;
    float sums[4][4] = {};
    float4 of_a = four(patch_at(s, in, top + line, along));
    float4 of_b = four(weight_at(s, weight, threadIdx.y, left + column));
    for (int k = 0, buffer = 0; k < s.depth; k += 16, buffer = 1 - buffer) {
        a[buffer][along][line] = of_a.x;
        a[buffer][along + 1][line] = of_a.y;
        a[buffer][along + 2][line] = of_a.z;
        a[buffer][along + 3][line] = of_a.w;
        *(float4 *)&b[buffer][threadIdx.y][column] = of_b;
        __syncthreads(); // complete; and nobody reads the other buffer any more
        of_a = four(patch_at(s, in, top + line, k + 16 + along));
        of_b = four(weight_at(s, weight, k + 16 + threadIdx.y, left + column));
        for (int d = 0; d < 16; d++) {
            const float4 x = *(const float4 *)&a[buffer][d][row];
            const float4 y = *(const float4 *)&b[buffer][d][column];
            const float xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++)
                    sums[i][j] += xs[i] * ys[j];
        }
    }
    for (int i = 0; i < 4; i++) {
        const float4 sum = {sums[i][0], sums[i][1], sums[i][2], sums[i][3]};
        if (top + row + i < s.rows && left + column < s.columns)
            *(float4 *)&out[(top + row + i) * s.columns + left + column] = sum;
    }
}

static void conv_buffered(Conv s, const float *in, const float *weight, float *out) {
    const dim3 grid(ceil_div(s.columns, 64), ceil_div(s.rows, 64)), block(16, 16);
    buffered_kernel<<<grid, block>>>(s, in, weight, out);
    CHECK_LAUNCH();
}
/* LAB 5.4 END */

/* ---- Each change is run, compared with the naive kernel, and timed ---------------------------- */

static const struct {
    const char *name;
    void (*run)(Conv s, const float *in, const float *weight, float *out);
} changes[] = {
    {"0 naive", conv_naive},   {"1 tiles", conv_tiled},      {"2 blocking", conv_blocked},
    {"3 16 bytes", conv_wide}, {"4 buffers", conv_buffered},
};
enum { CHANGES = sizeof changes / sizeof *changes, ROUNDS = 7, TIMES = 10 };
#ifdef CUDA_ON_CPU
enum { EMULATED = 1 };
#else
enum { EMULATED = 0 };
#endif

// A copy of `count` numbers on the GPU
static float *on_gpu(const float *numbers, size_t count) {
    float *copy;
    CHECK(cudaMalloc(&copy, count * sizeof *copy));
    CHECK(cudaMemcpy(copy, numbers, count * sizeof *copy, cudaMemcpyHostToDevice));
    return copy;
}

// Small integers: their sums are exact, and so the same in every order.
static float *random_numbers(size_t count) {
    float *numbers = (float *)malloc(count * sizeof *numbers);
    uint32_t random = 1;
    for (size_t i = 0; numbers && i < count; i++) {
        random = random * 1664525 + 1013904223;
        numbers[i] = (float)(random >> 29) - 4;
    }
    return numbers;
}

// A convolution of random numbers; found and expected are on the host, expected is change 0's.
struct Trial {
    Conv s;
    size_t outputs;
    const float *in, *weight;
    float *out, *found, *expected;
};

static Trial new_trial(Conv s) {
    const size_t inputs = (size_t)s.n * s.h * s.w * s.c, weights = (size_t)s.depth * s.columns;
    const size_t outputs = (size_t)s.rows * s.columns;
    const float *in = random_numbers(inputs), *weight = random_numbers(weights);
    float *found = random_numbers(outputs), *expected = random_numbers(outputs);
    return {s,     outputs, on_gpu(in, inputs), on_gpu(weight, weights), on_gpu(found, outputs),
            found, expected};
}

// How many outputs a change writes, and how many of all are wrong.
static void run_once(const Trial &t, int change, size_t *written, size_t *wrong) {
    const size_t bytes = t.outputs * sizeof(float);
    CHECK(cudaMemset(t.out, 0xff, bytes)); // numbers that are none
    changes[change].run(t.s, t.in, t.weight, t.out);
    CHECK(cudaMemcpy(change == 0 ? t.expected : t.found, t.out, bytes, cudaMemcpyDeviceToHost));
    const float *found = change == 0 ? t.expected : t.found;
    *written = *wrong = 0;
    for (size_t i = 0; i < t.outputs; i++) {
        *written += !isnan(found[i]);
        *wrong += !(found[i] == t.expected[i]);
    }
}

static int compare(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

// Microseconds of one call: the median of ROUNDS times TIMES calls, after that of run_once().
static double microseconds(const Trial &t, int change) {
    float ms[ROUNDS];
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    for (int round = 0; round < ROUNDS; round++) {
        CHECK(cudaEventRecord(begin, 0));
        for (int i = 0; i < TIMES; i++)
            changes[change].run(t.s, t.in, t.weight, t.out);
        CHECK(cudaEventRecord(end, 0));
        CHECK(cudaEventSynchronize(end));
        CHECK(cudaEventElapsedTime(&ms[round], begin, end));
    }
    qsort(ms, ROUNDS, sizeof *ms, compare);
    return 1e3 * ms[ROUNDS / 2] / TIMES;
}

// A line of the table for each change that is done; no times where they would mean nothing.
static void print_changes(const Trial &t, FILE *csv) {
    const double mflop = 2e-6 * (double)t.outputs * t.s.depth;
    double naive = 0;
    size_t all_wrong = 0;
    int done = 0;
    printf("%-12s %10s %12s %10s %12s\n", "change", "wrong", "us", "GFLOP/s", "times naive");
    fprintf(csv, "change,images,mflop,wrong,us,gflops,times_naive,emulated\n");
    for (int change = 0; change < CHANGES; change++) {
        size_t written, wrong;
        run_once(t, change, &written, &wrong);
        if (written == 0) {
            printf("%-12s   not done: nothing was written\n", changes[change].name);
            continue;
        }
        const double us = EMULATED ? NAN : microseconds(t, change), gflops = 1e3 * mflop / us;
        naive = change == 0 ? us : naive;
        all_wrong += wrong;
        done++;
        printf("%-12s %10zu", changes[change].name, wrong);
        printf(EMULATED ? "\n" : " %12.1f %10.1f %12.2f\n", us, gflops, naive / us);
        fprintf(csv, "%s,%d,%.3f,%zu,", changes[change].name, t.s.n, mflop, wrong);
        fprintf(csv, EMULATED ? ",,,true\n" : "%.1f,%.1f,%.2f,false\n", us, gflops, naive / us);
    }
    printf("done=%d wrong=%zu\n", done, all_wrong);
}

int main(int argc, char **argv) {
    // A block of conv_naive() has 16 rows of C, and a grid at most 65535 blocks in y.
    enum { SIDE = 16, MOST_IMAGES = 65535 * 16 / (SIDE * SIDE) };
    const int images = argc == 3 ? atoi(argv[2]) : EMULATED ? 1 : 256;
    if (argc < 2 || argc > 3 || images < 1 || images > MOST_IMAGES) {
        fprintf(stderr, "usage: convolution FILE.csv [IMAGES], 1 to %d images\n", MOST_IMAGES);
        return 2;
    }
    FILE *csv = fopen(argv[1], "w");
    if (!csv) {
        fprintf(stderr, "convolution: cannot write %s: does its folder exist?\n", argv[1]);
        return 1;
    }
    const Conv s = complete({images, SIDE, SIDE, 16, 64, 3, 1, 1});
    printf("%d x %d x %d x %d (images, height, width, channels), %d filters of %d x %d:\n", s.n,
           s.h, s.w, s.c, s.oc, s.kernel, s.kernel);
    printf("%d rows, %d columns, depth %d\n", s.rows, s.columns, s.depth);
    print_changes(new_trial(s), csv);
    return fclose(csv) != 0;
}
