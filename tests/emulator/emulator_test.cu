/* Tests of cuda_on_cpu.h: correct kernels, and kernels with a planted bug that the emulator must
   report.

     emulator_test               all correct kernels: prints lines `pass emulator/NAME`
     emulator_test bug_NAME      one planted bug, which the emulator reports
     emulator_test mended_NAME   the same without the bug, which must pass
     emulator_test bugs          the names of the bugs
     emulator_test devices       how many GPUs there are
     emulator_test properties    the first one's: compute capability, multiprocessors, shared memory
                                 of a block; shared memory, threads, blocks of a multiprocessor */

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <thread>

#define CHECK(CALL)                                                                         \
    do {                                                                                    \
        cudaError_t error_ = (CALL);                                                        \
        if (error_ != cudaSuccess) {                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error_)); \
            exit(3);                                                                        \
        }                                                                                   \
    } while (0)

static int failures;
static const char *suite = "emulator";

static void passes(const char *name, bool right) {
    printf(right ? "pass %s/%s\n" : "fail %s/%s: expected other numbers\n", suite, name);
    failures += !right;
}

// An array on the GPU and one of page-locked memory of the host.
template <class T> struct Both {
    int n;
    T *gpu, *host;
    explicit Both(int n) : n(n) {
        CHECK(cudaMalloc(&gpu, (size_t)n * sizeof(T)));
        CHECK(cudaMallocHost(&host, (size_t)n * sizeof(T)));
        for (int i = 0; i < n; i++) {
            host[i] = T();
        }
    }
    Both(const Both &) = delete;
    ~Both() {
        CHECK(cudaFree(gpu));
        CHECK(cudaFreeHost(host));
    }
    size_t bytes() const {
        return (size_t)n * sizeof(T);
    }
    void up(cudaStream_t stream = nullptr) {
        CHECK(cudaMemcpyAsync(gpu, host, bytes(), cudaMemcpyHostToDevice, stream));
    }
    void down(cudaStream_t stream = nullptr) {
        CHECK(cudaGetLastError());
        CHECK(cudaMemcpyAsync(host, gpu, bytes(), cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
    }
};

/* ==== Correct kernels ========================================================================= */

__global__ void fill(float *a, float value, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        a[i] = value;
    }
}

__global__ void scale(float *a, float factor, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        a[i] *= factor;
    }
}

// Every thread takes over its neighbor's number, `rounds` times, between barriers.
__global__ void rounds_of_barriers(float *a, int rounds) {
    extern __shared__ float4 numbers[];
    float *mine = (float *)numbers;
    mine[threadIdx.x] = (float)threadIdx.x;
    for (int r = 0; r < rounds; r++) {
        __syncthreads();
        float next = mine[(threadIdx.x + 1) % blockDim.x];
        __syncthreads();
        mine[threadIdx.x] = next;
    }
    a[blockIdx.x * blockDim.x + threadIdx.x] = mine[threadIdx.x];
}

__global__ void warp_operations(int *a) {
    int lane = threadIdx.x % 32;
    a[threadIdx.x * 8] = __shfl_sync(0xffffffff, lane, 5);
    a[threadIdx.x * 8 + 1] =
        __shfl_xor_sync(0xffffffff, lane, 3) + 100 * __shfl_xor_sync(0xffffffff, lane, 9, 8);
    a[threadIdx.x * 8 + 2] = __shfl_down_sync(0xffffffff, lane, 2, 8);
    a[threadIdx.x * 8 + 3] = (int)__ballot_sync(0xffffffff, lane % 3 == 0);
    a[threadIdx.x * 8 + 4] =
        __any_sync(0xffffffff, lane == 9) + 2 * __all_sync(0xffffffff, lane < 31);
    a[threadIdx.x * 8 + 5] = 0;
    if (lane < 16) { // half a warp by itself
        a[threadIdx.x * 8 + 5] = __shfl_sync(0x0000ffff, lane, 15 - lane);
    }
    __syncwarp();
    a[threadIdx.x * 8 + 6] = (int)__reduce_add_sync(0xffffffff, (unsigned)lane);
    a[threadIdx.x * 8 + 7] = __shfl_up_sync(0xffffffff, lane, 1);
}

// The last block to arrive sums what the others wrote: a fence, then a ticket.
__global__ void sum_in_last_block(float *result, float *parts, unsigned *tickets) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = (float)(blockIdx.x + 1);
        __threadfence();
        last = atomicAdd(tickets, 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        float sum = 0;
        for (unsigned i = 0; i < gridDim.x; i++) {
            sum += ((volatile float *)parts)[i];
        }
        *result = sum;
    }
}

__global__ void count_and_max(int *count, int *largest, unsigned *bits) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(count, i % 2);
    atomicMax(largest, (i * 37) % 1000);
    atomicOr(bits, 1u << i % 32);
}

__global__ void convert(uint16_t *halves, uint16_t *bfloats, float *back, const float *a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        __half half_number = __float2half(a[i]);
        __nv_bfloat16 bfloat = __float2bfloat16(a[i]);
        memcpy(halves + i, &half_number, 2);
        memcpy(bfloats + i, &bfloat, 2);
        back[2 * i] = __half2float(half_number);
        back[2 * i + 1] = __bfloat162float(bfloat);
    }
}

/* ---- Kernels */

static void test_barriers() {
    const int THREADS = 96, ROUNDS = 5;
    Both<float> a(3 * THREADS);
    rounds_of_barriers<<<3, THREADS, THREADS * sizeof(float)>>>(a.gpu, ROUNDS);
    a.down();
    bool right = true;
    for (int i = 0; i < a.n; i++) {
        right &= a.host[i] == (float)((i % THREADS + ROUNDS) % THREADS);
    }
    passes("barriers", right);
}

static void test_much_shared_memory() {
    const int BYTES = 64 << 10;
    Both<float> a(64);
    CHECK(cudaFuncSetAttribute(rounds_of_barriers, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               BYTES));
    rounds_of_barriers<<<1, 64, BYTES>>>(a.gpu, 1);
    a.down();
    passes("much_shared_memory", a.host[0] == 1 && a.host[63] == 0);
}

static void test_warp_operations() {
    Both<int> a(64 * 8);
    warp_operations<<<1, 64>>>(a.gpu);
    a.down();
    bool right = true;
    for (int i = 0; i < 64; i++) {
        int lane = i % 32, *of = a.host + i * 8;
        right &= of[0] == 5 && of[1] == (lane ^ 3) + 100 * (lane / 8 % 2 ? lane ^ 9 : lane) &&
                 of[2] == (lane % 8 < 6 ? lane + 2 : lane) && (unsigned)of[3] == 0x49249249 &&
                 of[4] == 1 && of[5] == (lane < 16 ? 15 - lane : 0) && of[6] == 496 &&
                 of[7] == (lane ? lane - 1 : 0);
    }
    passes("warp_operations", right);
}

static void test_atomics() {
    Both<int> a(3);
    a.up();
    count_and_max<<<4, 128>>>(a.gpu, a.gpu + 1, (unsigned *)a.gpu + 2);
    a.down();
    int largest = 0;
    for (int i = 0; i < 512; i++) {
        largest = largest > i * 37 % 1000 ? largest : i * 37 % 1000;
    }
    passes("atomics", a.host[0] == 256 && a.host[1] == largest && a.host[2] == -1);
    Both<float> result(1), parts(20);
    Both<unsigned> tickets(1);
    tickets.up();
    sum_in_last_block<<<20, 32>>>(result.gpu, parts.gpu, tickets.gpu);
    result.down();
    passes("fence_and_ticket", result.host[0] == 210);
}

// Known conversions of floats, ties, subnormal numbers and infinities among them.
static void test_conversions() {
    const struct {
        float number;
        uint16_t half_bits, bfloat_bits;
    } known[] = {
        {0, 0, 0},
        {-0.f, 0x8000, 0x8000},
        {1, 0x3c00, 0x3f80},
        {-2.5f, 0xc100, 0xc020},
        {65504, 0x7bff, 0x4780},
        {65519.996f, 0x7bff, 0x4780},
        {65520, 0x7c00, 0x4780},
        {1e30f, 0x7c00, 0x714a},
        {INFINITY, 0x7c00, 0x7f80},
        {-INFINITY, 0xfc00, 0xff80},
        {3.4028235e38f, 0x7c00, 0x7f80},
        {1.00048828125f, 0x3c00, 0x3f80}, // ties between two halves
        {1.00146484375f, 0x3c02, 0x3f80},
        {1.00390625f, 0x3c04, 0x3f80}, // ties between two bfloat16s
        {1.01171875f, 0x3c0c, 0x3f82},
        {6.103515625e-5f, 0x0400, 0x3880}, // the smallest normal half
        {6.1e-5f, 0x03ff, 0x3880},
        {5.9604645e-8f, 0x0001, 0x3380}, // the smallest of all
        {2.9802322e-8f, 0x0000, 0x3300}, // half of it: a tie
        {8.940697e-8f, 0x0002, 0x33c0},
        {2.9802326e-8f, 0x0001, 0x3300},
    };
    const int n = sizeof known / sizeof known[0];
    Both<float> a(n), back(2 * n);
    Both<uint16_t> halves(n), bfloats(n);
    for (int i = 0; i < n; i++) {
        a.host[i] = known[i].number;
    }
    a.up();
    convert<<<1, 32>>>(halves.gpu, bfloats.gpu, back.gpu, a.gpu, n);
    halves.down(), bfloats.down(), back.down();
    bool right = true;
    for (int i = 0; i < n; i++) {
        float size = fabsf(known[i].number), as_half = back.host[2 * i],
              as_bfloat = back.host[2 * i + 1];
        right &= halves.host[i] == known[i].half_bits && bfloats.host[i] == known[i].bfloat_bits;
        right &= size >= 65520 ? isinf(as_half)
                               : fabsf(as_half - known[i].number) <= size * 0x1p-11f + 0x1p-25f;
        right &= size > 3.39e38f ? isinf(as_bfloat)
                                 : fabsf(as_bfloat - known[i].number) <= size * 0x1p-8f;
    }
    passes("conversions", right);
}

/* ---- Streams, events, devices, graphs */

// Two streams alternate in updating one array; only events order them.
static void test_streams() {
    const int n = 500;
    Both<float> a(n);
    cudaStream_t streams[2];
    cudaEvent_t done;
    CHECK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
    for (int i = 0; i < 2; i++) {
        CHECK(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
    }
    fill<<<4, 128, 0, streams[0]>>>(a.gpu, 1, n);
    for (int i = 0; i < 6; i++) {
        CHECK(cudaEventRecord(done, streams[i % 2]));
        CHECK(cudaStreamWaitEvent(streams[(i + 1) % 2], done, 0));
        scale<<<4, 128, 0, streams[(i + 1) % 2]>>>(a.gpu, i % 2 ? 3 : 0.5f, n);
    }
    a.down(streams[0]);
    passes("streams", a.host[0] == 3.375f && a.host[n - 1] == 3.375f);
    for (int i = 0; i < 2; i++) {
        CHECK(cudaStreamDestroy(streams[i]));
    }
    CHECK(cudaEventDestroy(done));
}

static void count_call(void *counter) {
    ++*(int *)counter;
}

static void test_events() {
    Both<float> a(64);
    cudaStream_t stream;
    cudaEvent_t begin, end;
    int calls = 0;
    float milliseconds = -1;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    CHECK(cudaEventRecord(begin, stream));
    fill<<<1, 64, 0, stream>>>(a.gpu, 1, 64);
    CHECK(cudaLaunchHostFunc(stream, count_call, &calls));
    CHECK(cudaEventRecord(end, stream));
    while (cudaEventQuery(end) == cudaErrorNotReady) {
    }
    CHECK(cudaEventSynchronize(end));
    CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
    passes("events", calls == 1 && milliseconds >= 0 && cudaStreamQuery(stream) == cudaSuccess);
    // A stream that is not non-blocking and the null stream wait for each other.
    fill<<<1, 64, 0, stream>>>(a.gpu, 2, 64);
    scale<<<1, 64>>>(a.gpu, 2, 64);
    scale<<<1, 64, 0, stream>>>(a.gpu, 2, 64);
    a.down();
    passes("null_stream", a.host[63] == 8);
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    CHECK(cudaStreamDestroy(stream));
}

static void test_graph() {
    const int n = 100;
    Both<float> a(n);
    cudaStream_t stream, side;
    cudaEvent_t fork, join;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamCreate(&side));
    CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    CHECK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    fill<<<1, 128, 0, stream>>>(a.gpu, 1, n);
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    scale<<<1, 128, 0, stream>>>(a.gpu, 2, n);
    CHECK(cudaEventRecord(fork, stream));
    CHECK(cudaStreamWaitEvent(side, fork, 0));
    scale<<<1, 128, 0, side>>>(a.gpu, 5, n);
    CHECK(cudaEventRecord(join, side));
    CHECK(cudaStreamWaitEvent(stream, join, 0));
    CHECK(cudaMemcpyAsync(a.host, a.gpu, a.bytes(), cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiateWithFlags(&executable, graph, 0));
    passes("capture_runs_nothing", a.host[0] == 0);
    for (int i = 0; i < 3; i++) {
        CHECK(cudaGraphLaunch(executable, stream));
    }
    CHECK(cudaStreamSynchronize(stream));
    passes("graph", a.host[0] == 1000 && a.host[n - 1] == 1000);
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaEventDestroy(fork));
    CHECK(cudaEventDestroy(join));
    CHECK(cudaStreamDestroy(side));
    CHECK(cudaStreamDestroy(stream));
}

// One host thread per device; then every device reads its neighbor's array, in a ring.
static void test_devices(int devices) {
    const int n = 300, MOST = 8;
    float *own[MOST], *got[MOST], *host[MOST];
    cudaStream_t streams[MOST];
    cudaEvent_t filled[MOST];
    std::thread threads[MOST];
    for (int d = 0; d < devices; d++) {
        threads[d] = std::thread([&, d] {
            CHECK(cudaSetDevice(d));
            CHECK(cudaMalloc(&own[d], n * sizeof(float)));
            CHECK(cudaMalloc(&got[d], n * sizeof(float)));
            CHECK(cudaMallocHost(&host[d], n * sizeof(float)));
            CHECK(cudaStreamCreateWithFlags(&streams[d], cudaStreamNonBlocking));
            CHECK(cudaEventCreateWithFlags(&filled[d], cudaEventDisableTiming));
            fill<<<3, 128, 0, streams[d]>>>(own[d], (float)d, n);
            scale<<<3, 128, 0, streams[d]>>>(own[d], 10, n);
            CHECK(cudaGetLastError());
            CHECK(cudaEventRecord(filled[d], streams[d]));
        });
    }
    for (int d = 0; d < devices; d++) {
        threads[d].join();
    }
    for (int d = 0; d < devices; d++) {
        threads[d] = std::thread([&, d] {
            int next = (d + 1) % devices;
            CHECK(cudaSetDevice(d));
            CHECK(cudaStreamWaitEvent(streams[d], filled[next], 0));
            CHECK(cudaMemcpyPeerAsync(got[d], d, own[next], next, n * sizeof(float), streams[d]));
            CHECK(
                cudaMemcpyAsync(host[d], got[d], n * sizeof(float), cudaMemcpyDefault, streams[d]));
            CHECK(cudaStreamSynchronize(streams[d]));
        });
    }
    bool right = true;
    for (int d = 0; d < devices; d++) {
        threads[d].join();
        right &= host[d][0] == 10.f * (float)((d + 1) % devices) && host[d][n - 1] == host[d][0];
    }
    for (int d = 0; d < devices; d++) {
        CHECK(cudaSetDevice(d));
        CHECK(cudaFree(own[d]));
        CHECK(cudaFree(got[d]));
        CHECK(cudaFreeHost(host[d]));
        CHECK(cudaEventDestroy(filled[d]));
        CHECK(cudaStreamDestroy(streams[d]));
    }
    CHECK(cudaSetDevice(0));
    passes("devices", right);
}

static void test_properties() {
    cudaDeviceProp properties;
    cudaPointerAttributes attributes;
    size_t left, then_left, total;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    CHECK(cudaMemGetInfo(&left, &total));
    bool right = properties.warpSize == 32 && properties.multiProcessorCount > 0 &&
                 total <= properties.totalGlobalMem;
    {
        Both<float> a(8 << 20);
        CHECK(cudaMemGetInfo(&then_left, &total));
        CHECK(cudaPointerGetAttributes(&attributes, a.gpu + 1));
        right &=
            then_left < left && attributes.type == cudaMemoryTypeDevice && attributes.device == 0;
        CHECK(cudaPointerGetAttributes(&attributes, a.host));
        right &= attributes.type == cudaMemoryTypeHost;
    }
    passes("properties", right);
    void *memory;
    right = cudaMalloc(&memory, total + 1) == cudaErrorMemoryAllocation;
    right &= cudaGetLastError() == cudaErrorMemoryAllocation && cudaGetLastError() == cudaSuccess;
    right &= cudaSetDevice(1000) == cudaErrorInvalidDevice;
    cudaGetLastError();
    passes("errors", right);
}

/* ==== Planted bugs =============================================================================

   Each is a function of `mended`: false, and the bug is there. Those that nothing stops print
   whether the numbers are right. */

__global__ void beyond_end(float *a, unsigned n) {
    if (threadIdx.x < n) {
        a[threadIdx.x] = 1;
    }
}
static void out_of_range(bool mended) {
    Both<float> a(64);
    beyond_end<<<1, 96>>>(a.gpu, mended ? 64 : 65);
    a.down();
    passes("out_of_range", a.host[63] == 1);
}

__global__ void beyond_shared(float *a, int shift) {
    __shared__ float s[32];
    s[threadIdx.x + shift] = 1;
    __syncthreads();
    a[threadIdx.x] = s[threadIdx.x];
}
static void out_of_shared(bool mended) {
    Both<float> a(32);
    beyond_shared<<<1, 32>>>(a.gpu, !mended);
    a.down();
    passes("out_of_shared", a.host[31] == 1);
}

static void out_of_dynamic(bool mended) {
    Both<float> a(32);
    rounds_of_barriers<<<1, 32, mended ? 128 : 124>>>(a.gpu, 1);
    a.down();
    passes("out_of_dynamic", a.host[0] == 1);
}

__global__ void reverse(float *a, bool synchronize) {
    __shared__ float s[64];
    s[threadIdx.x] = (float)threadIdx.x;
    if (synchronize) {
        __syncthreads();
    }
    a[threadIdx.x] = s[63 - threadIdx.x];
}
static void missing_barrier(bool mended) {
    Both<float> a(64);
    reverse<<<1, 64>>>(a.gpu, mended);
    a.down();
    passes("missing_barrier", a.host[0] == 63 && a.host[63] == 0);
}

// A second barrier is missing: the next iteration overwrites what another warp still reads.
__global__ void overwrites(float *a, bool synchronize) {
    __shared__ float s[64];
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        s[threadIdx.x] = (float)i;
        __syncthreads();
        sum += s[threadIdx.x ^ 32];
        if (synchronize) {
            __syncthreads();
        }
    }
    a[threadIdx.x] = sum;
}
static void missing_second_barrier(bool mended) {
    Both<float> a(64);
    overwrites<<<1, 64>>>(a.gpu, mended);
    a.down();
    passes("missing_second_barrier", a.host[0] == 6);
}

// Lanes of a warp do not run in lockstep, and a shuffle does not order their accesses.
__global__ void within_warp(float *a, bool synchronize) {
    __shared__ float s[32];
    s[threadIdx.x] = (float)threadIdx.x;
    int zero = __shfl_sync(0xffffffff, 0, 0);
    if (synchronize) {
        __syncwarp();
    }
    a[threadIdx.x] = s[31 - threadIdx.x + zero];
}
static void missing_syncwarp(bool mended) {
    Both<float> a(32);
    within_warp<<<1, 32>>>(a.gpu, mended);
    a.down();
    passes("missing_syncwarp", a.host[0] == 31);
}

__global__ void all_add(int *a, bool atomic) {
    if (threadIdx.x == 0 && atomic) {
        atomicAdd(a, 1);
    } else if (threadIdx.x == 0) {
        *a += 1;
    }
    __syncthreads(); // orders the threads of a block only
    __syncwarp();
}
static void race_between_blocks(bool mended) {
    Both<int> a(1);
    a.up();
    all_add<<<4, 32>>>(a.gpu, mended);
    a.down();
    passes("race_between_blocks", a.host[0] == 4);
}

__global__ void publishes(int *a, bool fence) {
    if (threadIdx.x == 0) {
        a[1 + blockIdx.x] = 1;
        if (fence) {
            __threadfence();
        }
        if (atomicAdd(a, 1) == 1) {
            a[3] = a[1] + a[2];
        }
    }
}
static void missing_fence(bool mended) {
    Both<int> a(4);
    a.up();
    publishes<<<2, 32>>>(a.gpu, mended);
    a.down();
    passes("missing_fence", a.host[3] == 2);
}

__global__ void two_barriers(float *a, unsigned first) {
    if (threadIdx.x < first) {
        a[threadIdx.x] = 1;
        __syncthreads();
    } else {
        a[threadIdx.x] = 1;
        __syncthreads();
    }
}
static void divergent_barrier(bool mended) {
    Both<float> a(64);
    two_barriers<<<1, 64>>>(a.gpu, mended ? 64 : 32);
    a.down();
    passes("divergent_barrier", a.host[63] == 1);
}

__global__ void returns_early(float *a, unsigned n) {
    if (threadIdx.x >= n) {
        return;
    }
    __syncthreads();
    a[threadIdx.x] = 1;
}
static void early_exit(bool mended) {
    Both<float> a(64);
    returns_early<<<1, 64>>>(a.gpu, mended ? 64 : 40);
    a.down();
    passes("early_exit", a.host[39] == 1);
}

__global__ void part_of_shared(float *a, unsigned n) {
    __shared__ float s[64];
    if (threadIdx.x < n) {
        s[threadIdx.x] = 0;
    }
    __syncthreads();
    a[threadIdx.x] = s[threadIdx.x];
}
static void uninitialized_shared(bool mended) {
    Both<float> a(64);
    part_of_shared<<<1, 64>>>(a.gpu, mended ? 64 : 60);
    a.down();
    passes("uninitialized_shared", a.host[63] == 0);
}

static void uninitialized_global(bool mended) {
    Both<float> a(64);
    if (mended) {
        CHECK(cudaMemset(a.gpu, 0, a.bytes()));
    }
    scale<<<1, 64>>>(a.gpu, 0, 64);
    a.down();
    passes("uninitialized_global", a.host[63] == 0);
}

__global__ void shuffles(float *a, unsigned lanes, unsigned mask, int source) {
    if (threadIdx.x < lanes) {
        a[threadIdx.x] = __shfl_sync(mask, (float)threadIdx.x, source);
    }
}
static void exited_lanes(bool mended) {
    Both<float> a(32);
    shuffles<<<1, 32>>>(a.gpu, 16, mended ? 0xffff : 0xffffffff, 3);
    a.down();
    passes("exited_lanes", a.host[0] == 3);
}
static void outside_mask(bool mended) {
    Both<float> a(32);
    shuffles<<<1, 32>>>(a.gpu, 16, mended ? 0xffff : 0xff, 3);
    a.down();
    passes("outside_mask", a.host[0] == 3);
}
static void source_outside_mask(bool mended) {
    Both<float> a(32);
    shuffles<<<1, 32>>>(a.gpu, 16, 0xffff, mended ? 3 : 20);
    a.down();
    passes("source_outside_mask", a.host[0] == 3);
}

__global__ void two_shuffles(float *a, unsigned first) {
    if (threadIdx.x < first) {
        a[threadIdx.x] = __shfl_sync(0xffffffff, (float)threadIdx.x, 1);
    } else {
        a[threadIdx.x] = __shfl_sync(0xffffffff, (float)threadIdx.x, 2);
    }
}
static void divergent_shuffle(bool mended) {
    Both<float> a(32);
    two_shuffles<<<1, 32>>>(a.gpu, mended ? 32 : 16);
    a.down();
    passes("divergent_shuffle", a.host[0] == 1);
}

__global__ void copies(float *a, const float *from, int shift, int waits) {
    __shared__ __align__(16) float s[64];
    emu_cp_async16(&s[threadIdx.x * 4 % 32 + shift], from, 16);
    emu_cp_async_commit();
    if (waits == 2) {
        emu_cp_async_wait(0);
    }
    __syncthreads();
    a[threadIdx.x] = s[threadIdx.x * 4 % 32];
    if (waits == 1) { // too late
        emu_cp_async_wait(0);
    }
}
static void run_copies(const char *name, int shift, int waits) {
    Both<float> a(8), from(4);
    from.up();
    copies<<<1, 8>>>(a.gpu, from.gpu, shift, waits);
    a.down();
    passes(name, a.host[7] == 0);
}
static void missing_wait(bool mended) {
    run_copies("missing_wait", 0, mended ? 2 : 1);
}
static void never_waited(bool mended) {
    run_copies("never_waited", 0, mended ? 2 : 0);
}
static void misaligned_copy(bool mended) {
    run_copies("misaligned_copy", mended ? 0 : 1, 2);
}

__global__ void loads_matrix(uint32_t *a, int shift) {
    __shared__ __align__(16) uint16_t tile[33 * 8];
    for (int i = threadIdx.x; i < 33 * 8; i += 32) {
        tile[i] = 1;
    }
    __syncthreads();
    uint32_t registers[4];
    emu_ldmatrix_x4(registers, tile + threadIdx.x * 8 + shift, false);
    for (int m = 0; m < 4; m++) {
        a[threadIdx.x * 4 + m] = registers[m];
    }
}
static void misaligned_ldmatrix(bool mended) {
    Both<uint32_t> a(128);
    loads_matrix<<<1, 32>>>(a.gpu, mended ? 0 : 4);
    a.down();
    passes("misaligned_ldmatrix", a.host[0] == 0x10001);
}

static void host_pointer(bool mended) {
    Both<float> a(64);
    float *host = (float *)malloc(a.bytes());
    fill<<<1, 64>>>(mended ? a.gpu : host, 1, 64);
    a.down();
    free(host);
    passes("host_pointer", a.host[0] == 1);
}

static void freed_pointer(bool mended) {
    float *a;
    Both<float> b(64);
    CHECK(cudaMalloc(&a, 256));
    CHECK(cudaFree(a));
    fill<<<1, 64>>>(mended ? b.gpu : a, 1, 64);
    b.down();
    passes("freed_pointer", b.host[0] == 1);
}

static void other_device(bool mended) {
    Both<float> a(64);
    CHECK(cudaSetDevice(mended ? 0 : 1));
    fill<<<1, 64>>>(a.gpu, 1, 64);
    a.down();
    passes("other_device", a.host[0] == 1);
}

static void other_devices_stream(bool mended) {
    Both<float> a(64);
    cudaStream_t stream;
    CHECK(cudaSetDevice(mended ? 0 : 1));
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaSetDevice(0));
    fill<<<1, 64, 0, stream>>>(a.gpu, 1, 64);
    a.down(stream);
    passes("other_devices_stream", a.host[0] == 1);
}

static void freed_twice(bool mended) {
    float *a;
    CHECK(cudaMalloc(&a, 256));
    CHECK(cudaFree(a));
    CHECK(cudaFree(mended ? nullptr : a));
    passes("freed_twice", true);
}

static void host_access(bool mended) {
    Both<float> a(64);
    (mended ? a.host : a.gpu)[3] = 1;
    passes("host_access", a.host[3] == 1);
}

static void missing_synchronize(bool mended) {
    Both<float> a(64);
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    fill<<<1, 64, 0, stream>>>(a.gpu, 1, 64);
    CHECK(cudaMemcpyAsync(a.host, a.gpu, a.bytes(), cudaMemcpyDeviceToHost, stream));
    if (mended) {
        CHECK(cudaStreamSynchronize(stream));
    }
    passes("missing_synchronize", a.host[0] == 1);
    CHECK(cudaStreamDestroy(stream));
}

static void missing_event(bool mended) {
    Both<float> a(64);
    cudaStream_t first, second;
    cudaEvent_t done;
    CHECK(cudaStreamCreate(&first));
    CHECK(cudaStreamCreate(&second));
    CHECK(cudaEventCreate(&done));
    fill<<<1, 64, 0, first>>>(a.gpu, 1, 64);
    CHECK(cudaEventRecord(done, first));
    if (mended) {
        CHECK(cudaStreamWaitEvent(second, done, 0));
    }
    a.down(second);
    passes("missing_event", a.host[0] == 1);
}

static void much_shared(bool mended) {
    Both<float> a(64);
    rounds_of_barriers<<<1, 64, mended ? 48 << 10 : 64 << 10>>>(a.gpu, 1);
    a.down();
    passes("much_shared", a.host[0] == 1);
}

static void many_threads(bool mended) {
    Both<float> a(64);
    fill<<<1, mended ? 1024 : 1025>>>(a.gpu, 1, 64);
    a.down();
    passes("many_threads", a.host[0] == 1);
}

static void empty_grid(bool mended) {
    Both<float> a(64);
    fill<<<mended ? 1 : 0, 64>>>(a.gpu, 1, 64);
    a.down();
    passes("empty_grid", a.host[0] == 1);
}

static void tall_grid(bool mended) { // in y
    Both<float> a(64);
    fill<<<dim3(1, mended ? 1 : 2), 64>>>(a.gpu, 1, 64);
    a.down();
    passes("tall_grid", a.host[0] == 1);
}

static void wrong_direction(bool mended) {
    Both<float> a(64);
    CHECK(cudaMemcpy(a.gpu, a.host, a.bytes(),
                     mended ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost));
    passes("wrong_direction", true);
}

static void long_copy(bool mended) {
    Both<float> a(64);
    CHECK(cudaMemcpy(a.host, a.gpu, a.bytes() + (mended ? 0 : 4), cudaMemcpyDeviceToHost));
    passes("long_copy", true);
}

static void wrong_peer(bool mended) {
    Both<float> a(64), b(64);
    CHECK(cudaMemcpyPeerAsync(b.gpu, 0, a.gpu, mended ? 0 : 1, a.bytes(), nullptr));
    passes("wrong_peer", true);
}

__device__ float deep(float *a, int depth) {
    volatile float here[64] = {a[depth % 64]};
    return depth ? deep(a, depth - 1) + here[depth % 2] : here[0];
}
__global__ void recurses(float *a, int depth) {
    a[0] = deep(a, depth);
}
static void full_stack(bool mended) {
    Both<float> a(64);
    a.up();
    recurses<<<1, 1>>>(a.gpu, mended ? 10 : 1 << 20);
    a.down();
    passes("full_stack", a.host[0] == 0);
}

__global__ void copies_fours(float *to, const float *from, int shift) {
    int i = 4 * (int)threadIdx.x + shift;
    *(float4 *)(to + i) = *(const float4 *)(from + i);
}
static void misaligned_four(bool mended) {
    Both<float> a(68), b(68);
    a.up();
    copies_fours<<<1, 16>>>(b.gpu, a.gpu, mended ? 4 : 2);
    b.down();
    passes("misaligned_four", b.host[4] == a.host[4] && make_float4(0, 1, 2, 3).w == 3);
}

/* ---- Of CUEMU_STRICT: what a thread does beside the one that computes */

// Waits in a thread of its own for this event of the null stream.
static void wait_elsewhere(unsigned flags, bool set_device) {
    cudaEvent_t event;
    CHECK(cudaEventCreateWithFlags(&event, flags));
    CHECK(cudaEventRecord(event));
    std::thread([=] {
        if (set_device)
            CHECK(cudaSetDevice(0));
        CHECK(cudaEventSynchronize(event));
    }).join();
}
static void no_device(bool mended) {
    wait_elsewhere(cudaEventBlockingSync, mended);
    passes("no_device", true);
}
static void spinning_wait(bool mended) {
    wait_elsewhere(mended ? cudaEventBlockingSync : cudaEventDefault, true);
    passes("spinning_wait", true);
}
static void low_priority(bool mended) {
    Both<float> a(64);
    std::thread([&] {
        cudaStream_t stream;
        int least, greatest;
        CHECK(cudaSetDevice(0));
        CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
        CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                           mended ? greatest : least));
        fill<<<1, 64, 0, stream>>>(a.gpu, 1, 64);
    }).join();
    CHECK(cudaDeviceSynchronize());
    a.down();
    passes("low_priority", a.host[0] == 1);
}
static void copy_by_host(bool mended) {
    CHECK(cudaSetDevice(1));
    Both<float> a(64);
    CHECK(cudaSetDevice(0));
    Both<float> b(64);
    a.up();
    if (mended)
        CHECK(cudaDeviceEnablePeerAccess(1, 0));
    CHECK(cudaMemcpyAsync(b.gpu, a.gpu, 64 * sizeof(float), cudaMemcpyDefault));
    b.down();
    passes("copy_by_host", b.host[0] == a.host[0]);
}

/* ---- Of graphs: what a GPU refuses while it captures, and what it does not notice at all */

// Captures what `captured` does in a stream, calls `before`, and replays it once.
template <class Captured, class Before>
static void replay_once(cudaStreamCaptureMode mode, Captured captured, Before before) {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamBeginCapture(stream, mode));
    captured(stream);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiateWithFlags(&executable, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    before();
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaStreamDestroy(stream));
}

// A kernel is captured, and then `between` called.
template <class Between>
static void capture(const char *name, cudaStreamCaptureMode mode, Between between) {
    Both<float> a(64);
    auto captured = [&](cudaStream_t stream) {
        fill<<<1, 64, 0, stream>>>(a.gpu, 1, 64);
        between(stream);
    };
    replay_once(mode, captured, [] {});
    a.down();
    passes(name, a.host[63] == 1);
}
static void waits_in_capture(bool mended) {
    capture("waits_in_capture", cudaStreamCaptureModeThreadLocal, [=](cudaStream_t stream) {
        if (!mended)
            CHECK(cudaStreamSynchronize(stream));
    });
}
static void allocates_in_capture(bool mended) {
    capture("allocates_in_capture", cudaStreamCaptureModeThreadLocal, [=](cudaStream_t) {
        if (!mended)
            Both<float> b(64);
    });
}
// Other threads may go on if the capture forbids it only to the one that began it.
static void allocates_beside_capture(bool mended) {
    capture("allocates_beside_capture",
            mended ? cudaStreamCaptureModeThreadLocal : cudaStreamCaptureModeGlobal,
            [](cudaStream_t) { std::thread([] { Both<float> b(64); }).join(); });
}
static void pageable_in_capture(bool mended) {
    Both<float> b(64);
    float pageable[64];
    capture("pageable_in_capture", cudaStreamCaptureModeThreadLocal, [&](cudaStream_t stream) {
        CHECK(cudaMemcpyAsync(mended ? b.host : pageable, b.gpu, b.bytes(), cudaMemcpyDeviceToHost,
                              stream));
    });
}

// A kernel's argument is freed before the graph is replayed, or a copy's source.
static void replay_freed(const char *name, bool mended, bool copies) {
    Both<float> a(64);
    float *other;
    CHECK(cudaMalloc(&other, a.bytes()));
    auto captured = [&](cudaStream_t stream) {
        if (copies) {
            CHECK(cudaMemcpyAsync(a.host, other, a.bytes(), cudaMemcpyDefault, stream));
        } else {
            fill<<<1, 64, 0, stream>>>(other, 1, 64);
        }
    };
    replay_once(cudaStreamCaptureModeThreadLocal, captured, [&] {
        if (!mended)
            CHECK(cudaFree(other));
    });
    if (mended)
        CHECK(cudaFree(other));
    passes(name, true);
}
static void freed_in_graph(bool mended) {
    replay_freed("freed_in_graph", mended, false);
}
static void copy_of_freed_in_graph(bool mended) {
    replay_freed("copy_of_freed_in_graph", mended, true);
}

#define BUG(NAME) \
    { #NAME, NAME }
static const struct {
    const char *name;
    void (*run)(bool mended);
} bugs[] = {
    BUG(out_of_range),
    BUG(out_of_shared),
    BUG(out_of_dynamic),
    BUG(missing_barrier),
    BUG(missing_second_barrier),
    BUG(missing_syncwarp),
    BUG(race_between_blocks),
    BUG(missing_fence),
    BUG(divergent_barrier),
    BUG(early_exit),
    BUG(uninitialized_shared),
    BUG(uninitialized_global),
    BUG(exited_lanes),
    BUG(outside_mask),
    BUG(source_outside_mask),
    BUG(divergent_shuffle),
    BUG(missing_wait),
    BUG(never_waited),
    BUG(misaligned_copy),
    BUG(misaligned_ldmatrix),
    BUG(host_pointer),
    BUG(freed_pointer),
    BUG(other_device),
    BUG(other_devices_stream),
    BUG(freed_twice),
    BUG(host_access),
    BUG(missing_synchronize),
    BUG(missing_event),
    BUG(much_shared),
    BUG(many_threads),
    BUG(empty_grid),
    BUG(tall_grid),
    BUG(wrong_direction),
    BUG(long_copy),
    BUG(wrong_peer),
    BUG(full_stack),
    BUG(misaligned_four),
    BUG(no_device),
    BUG(spinning_wait),
    BUG(low_priority),
    BUG(copy_by_host),
    BUG(waits_in_capture),
    BUG(allocates_in_capture),
    BUG(allocates_beside_capture),
    BUG(pageable_in_capture),
    BUG(freed_in_graph),
    BUG(copy_of_freed_in_graph),
};

/* ==== main() ================================================================================== */

static void test_all() {
    int devices;
    CHECK(cudaGetDeviceCount(&devices));
    test_barriers();
    test_much_shared_memory();
    test_warp_operations();
    test_atomics();
    test_conversions();
    test_streams();
    test_events();
    test_graph();
    test_devices(devices < 8 ? devices : 8);
    test_properties();
}

int main(int argc, char **argv) {
    fprintf(stderr, "%s\n", cuda_emulated());
    const char *what = argc > 1 ? argv[1] : "";
    bool known = !*what;
    if (!*what) {
        test_all();
    } else if (strcmp(what, "devices") == 0) {
        int count = -1;
        cudaError_t error = cudaGetDeviceCount(&count);
        printf("%d %s\n", count, cudaGetErrorName(error));
        known = true;
    } else if (strcmp(what, "properties") == 0) {
        cudaDeviceProp p;
        CHECK(cudaGetDeviceProperties(&p, 0));
        printf("sm_%d%d %d %zu %zu %d %d\n", p.major, p.minor, p.multiProcessorCount,
               p.sharedMemPerBlockOptin, p.sharedMemPerMultiprocessor,
               p.maxThreadsPerMultiProcessor, p.maxBlocksPerMultiProcessor);
        known = true;
    } else if (strcmp(what, "bugs") == 0) {
        for (auto &bug : bugs) {
            puts(bug.name);
        }
        known = true;
    }
    const char *name = strchr(what, '_');
    for (auto &bug : bugs) {
        if (name && strcmp(name + 1, bug.name) == 0) {
            suite = what[0] == 'b' ? "bug" : "mended";
            bug.run(what[0] != 'b');
            known = true;
        }
    }
    if (!known) {
        fprintf(stderr, "emulator_test: no test is called %s\n", what);
    }
    return failures || !known ? 1 : 0;
}
