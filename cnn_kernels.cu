/* cnn_kernels.cu - everything that cnn runs on a GPU, by hand: no cuDNN, no cuBLAS, no Thrust.

   A GPU runs a kernel on thousands of threads. They come in blocks of THREADS; the threads of a
   block share a small, fast memory (__shared__) and can wait for each other (__syncthreads()). 32
   of them form a warp, which shares its instructions. Neighboring threads should read neighboring
   numbers (coalesced access): one memory transaction then serves the whole warp.

   In reading order:
      1 Errors and devices       every CUDA call is checked; streams; memory; copies
      2 Element by element       ReLU, add, dropout, pooling, optimizers, the loader's work
      3 Sums over pixels         BatchNorm, gradients of biases
      4 Softmax and loss         one warp per image
      5 Convolution, naive       one thread per output: the CPU's loops
      6 Convolution, tiled       a matrix product through shared memory
      7 Convolution, tensor cores   the same product, of 16-bit numbers or tf32
      8 The tables               Device and Kernels, which cnn.c calls

   The comment before each kernel gives what it computes, its grid, and its memory traffic: the
   least number of bytes it must move, where N is the number of elements of its output. Where no
   grid is given, there is one thread per element, or per pack of 4 or 8 (section 2).
   Rules: results never depend on the order in which threads run (no floating-point atomics), so
   the same seed gives the same bits; no thread returns before a barrier; and for the emulator, one
   __shared__ array per line, template arguments written out at a launch. Of cnn.c only the
   declarations are included (its sections 1 and 3), which are valid C and C++. */

#define CNN_DECLARATIONS_ONLY
#include "cnn.c"

#ifndef __HIP__ // tests/emulator/cuda_on_hip.h provides these for AMD
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_profiler_api.h>
#include <cuda_runtime.h>
#if defined(CUDA_ON_CPU) || __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#else // some CUDA installations lack it
#define nvtxRangePushA(name) (void)(name)
#define nvtxRangePop()
#endif
#define MEMORY_TYPE type
#define SM_OF(properties) (10 * (properties).major + (properties).minor)
#define PLATFORM "CUDA"
#define REBUILD "make CUDA_ARCH=native, on this machine"
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <type_traits>
#include <unistd.h>

static_assert(sizeof(real) == sizeof(float), "the kernels are written for 32-bit floats");

/* ==== 1. Errors and devices =====================================================================

   One host thread computes for one replica, on one device. Its work is queued on the replica's
   stream and executed in order; copies by other threads, for loading and communication,
   use streams of their own, so that they overlap with it. */

enum { THREADS = 256, WARP = 32 };
enum { HALF_SM = 75, TENSOR_SM = 80 }; // the first with mma for half; for tf32 and bf16
static void (*fail)(int status, const char *format, ...); // die() of cnn.c
static cudaStream_t streams[MAX_REPLICAS];
enum { TUNING_MARKS = MARKS, ALL_MARKS = MARKS + 2 };
static cudaEvent_t events[MAX_REPLICAS][ALL_MARKS];
static int devices_of[MAX_REPLICAS];     // by replica
static thread_local size_t replica;      // that this host thread computes for
static thread_local int device;          // that it uses
static thread_local int multiprocessors; // that this device has
static thread_local int architecture;    // sm_NN of the device, or of the code if it is older

static void check(cudaError_t error, const char *call, int line) {
    if (error != cudaSuccess)
        fail(1,
             "cnn_kernels.cu:%d: device %d: %s: %s (%s); if a kernel is to blame, it may be an "
             "earlier one: run again with " PLATFORM "_LAUNCH_BLOCKING=1 to see which",
             line, device, call, cudaGetErrorString(error), cudaGetErrorName(error));
}
#define CHECK(call) check(call, #call, __LINE__)
#define CHECK_LAUNCH() check(cudaGetLastError(), "the kernel launched here", __LINE__)
// LAUNCH_GRID queues a kernel on a grid of blocks, each with `bytes` of dynamic shared memory; it
// does nothing if the grid is empty (dp: a rank without images). LAUNCH queues at least `threads`
// threads, in blocks of THREADS.
#define LAUNCH_GRID(kernel, grid, block, bytes, ...)                 \
    do {                                                             \
        if (const dim3 blocks(grid); blocks.x > 0 && blocks.y > 0)   \
            kernel<<<blocks, block, bytes, stream()>>>(__VA_ARGS__); \
        CHECK_LAUNCH();                                              \
    } while (0)
#define LAUNCH(kernel, threads, ...) \
    LAUNCH_GRID(kernel, (unsigned)ceil_div(threads, THREADS), THREADS, 0, __VA_ARGS__)

static cudaStream_t stream(void) {
    return streams[replica];
}

// The elements of a layer's input and output, all images of the batch together.
static size_t inputs(Work w) {
    return w.n * shape_size(w.l->in);
}

static size_t outputs(Work w) {
    return w.n * shape_size(w.l->out);
}

// Returns how many GPUs there are; 0 and the reason, if none can be used.
static size_t device_count(const char **why_not) {
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    *why_not = error == cudaSuccess ? "no device" : cudaGetErrorString(error);
    return error == cudaSuccess ? min((size_t)count, (size_t)MAX_REPLICAS) : 0;
}

// to += from, at any alignment.   Traffic: 12 N bytes
static __global__ void accumulate_kernel(real *to, const real *from, size_t count) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        to[i] += from[i];
}

// This host thread computes for replica r on device `which`. on_error ends the program.
static void use(size_t r, size_t which, void (*on_error)(int, const char *, ...)) {
    fail = on_error;
    replica = r;
    device = devices_of[r] = (int)which;
    CHECK(cudaSetDevice(device));
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, (const void *)accumulate_kernel) != cudaSuccess)
        fail(1,
             "device %d: this program was built for other GPUs; run: make clean && " REBUILD
             ", or use --no-cuda",
             device);
    cudaDeviceProp p;
    CHECK(cudaGetDeviceProperties(&p, device));
    multiprocessors = p.multiProcessorCount;
    architecture = min(SM_OF(p), attributes.ptxVersion);
    if (streams[replica])
        return;
    CHECK(cudaStreamCreateWithFlags(&streams[replica], cudaStreamNonBlocking));
    // Each event on which a thread can sleep interrupts the host. So only a few in each step can:
    // the buckets' marks, and the clock's, at which this thread waits when it is steps ahead.
    for (size_t i = 0; i < ALL_MARKS; i++)
        CHECK(cudaEventCreateWithFlags(&events[replica][i],
                                       i < ROW_MARKS ? cudaEventBlockingSync : cudaEventDefault));
}

// Name, driver and free memory of this thread's device.
static void describe(DeviceInfo *d) {
    cudaDeviceProp p;
    int driver = 0;
    size_t bytes = 0, total = 0;
    CHECK(cudaGetDeviceProperties(&p, device));
    CHECK(cudaDriverGetVersion(&driver));
    CHECK(cudaMemGetInfo(&bytes, &total));
#ifdef __HIP__
    describe_amd(d, p, driver, total);
#else
    char older[32] = ""; // code for an older architecture cannot use newer tensor cores
    if (architecture < min(SM_OF(p), (int)TENSOR_SM))
        snprintf(older, sizeof older, " with code for sm_%d", architecture);
    snprintf(d->name, sizeof d->name, "%.200s, sm_%d%s, %d multiprocessors, %.1f GB", p.name,
             SM_OF(p), older, p.multiProcessorCount, (double)total / 1e9);
    snprintf(d->driver, sizeof d->driver, "CUDA %d.%d", driver / 1000, driver % 1000 / 10);
    char *to = d->uuid + snprintf(d->uuid, sizeof d->uuid, "GPU");
    for (int i = 0; i < 16; i++) // in the format of nvidia-smi
        to += snprintf(to, 4, i == 0 || (i >= 4 && i <= 10 && i % 2 == 0) ? "-%02x" : "%02x",
                       (unsigned char)p.uuid.bytes[i]);
#endif
    d->tensor_cores[TF32] = architecture >= TENSOR_SM;
    d->tensor_cores[BF16] = architecture >= TENSOR_SM;
    d->tensor_cores[FP16] = architecture >= HALF_SM;
    d->memory = .95 * (double)bytes; // the runtime allocates some later, for kernels and streams
#ifdef CUDA_ON_CPU
    d->emulated = true;
#endif
}

static void clear(void *memory, size_t bytes) {
    CHECK(cudaMemsetAsync(memory, 0, bytes, stream()));
}

static void synchronize(void) {
    CHECK(cudaStreamSynchronize(stream()));
}

// Zeroed memory of the device; NULL when there is not enough.
static void *device_alloc(size_t bytes) {
    void *memory = NULL;
    const cudaError_t error = cudaMalloc(&memory, bytes + 16);
    if (error == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError(); // clears the error: the caller names what did not fit
        return NULL;
    }
    check(error, "cudaMalloc", __LINE__);
    clear(memory, bytes + 16);
    synchronize();
    return memory;
}

static void device_free(void *memory) {
    CHECK(cudaFree(memory));
}

// Zeroed host memory that cannot be paged out: the device copies it at the full speed of the bus.
static void *pinned_alloc(size_t bytes) {
    void *memory = NULL;
    const cudaError_t error = cudaMallocHost(&memory, bytes + 16); // 0 bytes have an address, too
    if (error == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError(); // as in device_alloc()
        return NULL;
    }
    check(error, "cudaMallocHost", __LINE__);
    return memset(memory, 0, bytes + 16);
}

static void pinned_free(void *memory) {
    CHECK(cudaFreeHost(memory));
}

static thread_local bool capturing; // see begin_capture()

// Returns the number of the GPU whose memory this is, or -1 for the host's.
static int gpu_of(const void *memory) {
    cudaPointerAttributes a = {};
    if (cudaPointerGetAttributes(&a, memory) != cudaSuccess)
        (void)cudaGetLastError(); // clears the error: HIP's for memory that malloc() has allocated
    return a.MEMORY_TYPE == cudaMemoryTypeDevice ? a.device : -1;
}

// Queued in order with the kernels. When it returns, the host's memory may be read and written
// again.
static void copy(void *to, const void *from, size_t bytes) {
    if (bytes == 0)
        return;
    CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream()));
    if (!capturing && (gpu_of(to) < 0 || gpu_of(from) < 0))
        synchronize();
}

// Returns a stream of this host thread on device `which`, for copies that overlap with the kernels
// there, and for the additions of the all-reduce, which start before waiting blocks of backward.
static cudaStream_t own_stream(size_t which) {
    static thread_local cudaStream_t own[MAX_REPLICAS];
    device = (int)which;
    CHECK(cudaSetDevice(device));
    if (!own[which]) {
        int least = 0, greatest = 0;
        CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
        CHECK(cudaStreamCreateWithPriority(&own[which], cudaStreamNonBlocking, greatest));
    }
    return own[which];
}

// Waits until the stream is done, asleep as in wait().
static void sleep_until_done(cudaStream_t own) {
    static thread_local cudaEvent_t done[MAX_REPLICAS];
    if (!done[device])
        CHECK(cudaEventCreateWithFlags(&done[device],
                                       cudaEventBlockingSync | cudaEventDisableTiming));
    CHECK(cudaEventRecord(done[device], own));
    CHECK(cudaEventSynchronize(done[device]));
}

// For threads other than the one that computes: concurrent with the kernels, complete on return.
static void transfer(size_t which, void *to, const void *from, size_t bytes) {
    cudaStream_t own = own_stream(which);
    CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, own));
    sleep_until_done(own);
}

/* Copies from another device's memory go directly over NVLink or PCIe, where the two are connected
   and this has been enabled; otherwise they go through the host. */
static void enable_peer(const void *from) {
    static thread_local bool tried[MAX_REPLICAS][MAX_REPLICAS];
    const int peer = gpu_of(from);
    int possible = 0;
    if (peer < 0 || peer == device || tried[device][peer])
        return;
    tried[device][peer] = true;
    CHECK(cudaDeviceCanAccessPeer(&possible, device, peer));
    if (possible && cudaDeviceEnablePeerAccess(peer, 0) != cudaSuccess)
        (void)cudaGetLastError(); // clears the error: it has been enabled, or there are too many
}

// to = from, or to += from by way of buffer; like transfer().
static void receive(size_t which, real *to, const real *from, size_t n, bool add, real *buffer) {
    cudaStream_t own = own_stream(which);
    unsigned blocks = (unsigned)ceil_div(n, THREADS);
    if (n == 0)
        return;
    enable_peer(from);
    CHECK(cudaMemcpyAsync(add ? buffer : to, from, n * sizeof *to, cudaMemcpyDefault, own));
    if (add)
        accumulate_kernel<<<blocks, THREADS, 0, own>>>(to, buffer, n);
    CHECK_LAUNCH();
    sleep_until_done(own);
}

// An event: the device records the time when it gets there, to about half a microsecond.
static void mark(size_t i) {
    CHECK(cudaEventRecord(events[replica][i], stream()));
}

// Waits until replica r's device has reached mark i. Any thread may call it; it sleeps and occupies
// no core, except at a row's mark.
static void wait(size_t r, size_t i) {
    CHECK(cudaSetDevice(devices_of[r])); // a thread without a device would use the first one
    CHECK(cudaEventSynchronize(events[r][i]));
}

// In seconds. Waits for the later mark if the device has not passed it yet, which is rare.
static double elapsed(size_t from, size_t to) {
    float milliseconds = 0;
    const cudaEvent_t begin = events[replica][from], end = events[replica][to];
    cudaError_t state = cudaEventElapsedTime(&milliseconds, begin, end);
    if (state == cudaErrorNotReady) {
        (void)cudaGetLastError(); // clears it
        wait(replica, to);
        state = cudaEventElapsedTime(&milliseconds, begin, end);
    }
    check(state, "cudaEventElapsedTime", __LINE__);
    return 1e-3 * (double)milliseconds;
}

/* A CUDA graph: the operations of a stream, recorded once and then queued by one call, which costs
   the host as much as a single kernel. Arguments are recorded by value, pointers included, so what
   changes from step to step is read from memory: struct StepInputs. Other threads' streams are not
   affected. */
static void begin_capture(void) {
    capturing = true;
    CHECK(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal));
}

static void *end_capture(void) {
    cudaGraph_t recorded;
    cudaGraphExec_t graph;
    capturing = false;
    CHECK(cudaStreamEndCapture(stream(), &recorded));
    CHECK(cudaGraphInstantiateWithFlags(&graph, recorded, 0));
    CHECK(cudaGraphDestroy(recorded));
    return graph;
}

static void replay(void *graph) {
    CHECK(cudaGraphLaunch((cudaGraphExec_t)graph, stream()));
}

static void free_graph(void *graph) {
    if (graph)
        CHECK(cudaGraphExecDestroy((cudaGraphExec_t)graph));
}

// # PROF  Named ranges of this host thread's time, which Nsight Systems shows above the kernels.
static void range(NsightLevel level, const char *name) {
    static thread_local unsigned open; // bit i: there is a range of level i
    for (unsigned within = open >> level; within; within &= within - 1)
        nvtxRangePop();
    open &= (1u << level) - 1;
    if (name) {
        nvtxRangePushA(name);
        open |= 1u << level;
    }
}

// # PROF  What nsys --capture-range=cudaProfilerApi and ncu --profile-from-start off record.
static void record(bool on) {
    CHECK(on ? cudaProfilerStart() : cudaProfilerStop());
}

#ifdef CNN_NCCL
#include <nccl.h>

static ncclComm_t group; // of this process, which has one device

static void check_nccl(ncclResult_t result, const char *call, int line) {
    if (result != ncclSuccess)
        fail(1, "cnn_kernels.cu:%d: device %d: %s: %s; NCCL_DEBUG=INFO prints details", line,
             device, call, ncclGetErrorString(result));
}
#define CHECK_NCCL(call) check_nccl(call, #call, __LINE__)

extern "C" void cuda_nccl_id(char id[NCCL_ID_BYTES]) {
    ncclUniqueId unique;
    static_assert(sizeof unique == NCCL_ID_BYTES, "NCCL's identifiers have another size");
    CHECK_NCCL(ncclGetUniqueId(&unique));
    memcpy(id, &unique, sizeof unique);
}

extern "C" void cuda_nccl_join(const char id[NCCL_ID_BYTES], size_t rank, size_t world) {
    ncclUniqueId unique;
    memcpy(&unique, id, sizeof unique);
    CHECK_NCCL(ncclCommInitRank(&group, (int)world, unique, (int)rank));
}

extern "C" void cuda_nccl_leave(void) {
    CHECK_NCCL(ncclCommDestroy(group));
}

static double seconds(void) {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

extern "C" bool cuda_all_reduce(size_t which, real *data, size_t count, double timeout) {
    cudaStream_t own = own_stream(which);
    double waited = 0, last = seconds();
    cudaError_t state;
    ncclResult_t state_of_group; // NCCL would wait forever for a rank that has ended: poll
    CHECK_NCCL(ncclAllReduce(data, data, count, ncclFloat, ncclSum, group, own));
    while ((state = cudaStreamQuery(own)) == cudaErrorNotReady && waited < timeout) {
        const double time = seconds();
        waited += fmin(time - last, .1); // however long this process was stopped, as by Ctrl-Z
        last = time;
        CHECK_NCCL(ncclCommGetAsyncError(group, &state_of_group));
        check_nccl(state_of_group, "an all-reduce, in another rank or on the way", __LINE__);
        usleep(20); // sleeps, as wait() does
    }
    if (state != cudaErrorNotReady)
        CHECK(state);
    return state == cudaSuccess;
}
#endif

/* ==== 2. Element by element =====================================================================

   These kernels are memory-bound: a few operations for each number that is read. */

// Returns the index of this thread's element. 32 bits suffice (see scratch_size()) and divide
// faster.
static __device__ unsigned element(void) {
    return blockIdx.x * blockDim.x + threadIdx.x;
}

// T is the type of activations and their gradients in memory; kernels compute with 32-bit numbers.
template <class T> static __device__ real load(const void *from, unsigned i) {
    return (real)((const T *)from)[i];
}

template <class T> static __device__ void store(void *to, unsigned i, real value) {
    ((T *)to)[i] = (T)value;
}

// N neighboring elements in memory, aligned to their size: one instruction loads or stores up to
// 16 bytes of them.
template <class T, int N = 16 / sizeof(T)> struct alignas(N * sizeof(T)) Chunk {
    enum { COUNT = N };
    T v[N];
};

// x = the chunk that begins at element i; and the inverse.
template <class T, int N> static __device__ void load_chunk(real *x, const void *from, unsigned i) {
    const Chunk<T, N> chunk = *(const Chunk<T, N> *)((const T *)from + i);
    for (int j = 0; j < N; j++)
        x[j] = (real)chunk.v[j];
}

template <class T, int N> static __device__ void store_chunk(void *to, unsigned i, const real *x) {
    Chunk<T, N> chunk;
    for (int j = 0; j < N; j++)
        chunk.v[j] = (T)x[j];
    *(Chunk<T, N> *)((T *)to + i) = chunk;
}

// The same at the end of a tensor of `count` elements; beyond it, the elements are loaded as 0.
template <class T, int N>
static __device__ void load_chunk(real *x, const void *from, unsigned i, unsigned count) {
    if (i + N <= count)
        return load_chunk<T, N>(x, from, i);
    for (int j = 0; j < N; j++)
        x[j] = i + j < count ? load<T>(from, i + j) : 0;
}

template <class T, int N>
static __device__ void store_chunk(void *to, unsigned i, unsigned count, const real *x) {
    if (i + N <= count)
        return store_chunk<T, N>(to, i, x);
    for (int j = 0; j < N; j++)
        if (i + j < count)
            store<T>(to, i + j, x[j]);
}

/* A pack is a chunk of 16 bytes in registers: a kernel that uses packs needs a fraction of the
   instructions, and has more accesses in flight. Kernels that call first_of_pack() have one thread
   per pack. Tensors begin at multiples of 16 bytes; their last pack may have fewer elements.
   Compilers unroll loops over a pack, so it stays in registers. */
template <class T> struct Pack {
    enum { N = 16 / sizeof(T) };
    real v[N];
};

template <class T> static size_t packs(Work w) {
    return ceil_div(outputs(w), Pack<T>::N);
}

// Returns whether each pack of a row's output has neighboring channels of one pixel.
template <class T> static bool by_packs(Work w) {
    return !w.transposed && w.l->out.c % Pack<T>::N == 0;
}

template <class T> static __device__ unsigned first_of_pack(void) {
    return Pack<T>::N * element();
}

template <class T>
static __device__ Pack<T> load_pack(const void *from, unsigned i, unsigned count) {
    Pack<T> p;
    load_chunk<T, Pack<T>::N>(p.v, from, i, count);
    return p;
}

template <class T>
static __device__ void store_pack(void *to, unsigned i, unsigned count, const Pack<T> &p) {
    store_chunk<T, Pack<T>::N>(to, i, count, p.v);
}

// x = COUNT floats in groups of 4, which begin APART elements from each other.
template <int COUNT, int APART> static __device__ void load_fours(real *x, const real *from) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
        const float4 four = *(const float4 *)(from + i / 4 * APART);
        x[i] = four.x;
        x[i + 1] = four.y;
        x[i + 2] = four.z;
        x[i + 3] = four.w;
    }
}

/* Where a tensor's elements lie: [image][y][x][c] or, with --layout nchw, [image][c][y][x]. `inner`
   is how many neighbors have the same channel: 1, or the pixels of an image. */
/* LAB 7.2 BEGIN Layout */
struct Layout {
    unsigned channels, inner;
    // of channel c of a pixel, counted over all images
    __device__ unsigned at(unsigned pixel, unsigned c) const {
        return inner == 1 ? pixel * channels + c
                          : (pixel / inner * channels + c) * inner + pixel % inner;
    }
    __device__ unsigned channel(unsigned i) const {
        return inner == 1 ? i % channels : i / inner % channels;
    }
    __device__ unsigned pixel(unsigned i) const {
        return inner == 1 ? i / channels : i / inner / channels * inner + i % inner;
    }
};

static Layout layout_of(Shape s, bool nchw) {
    return {(unsigned)s.c, nchw ? (unsigned)(s.h * s.w) : 1};
}
/* LAB 7.2 END */

// The sizes of a layer as kernels see them: 32-bit numbers, which a GPU divides faster.
struct Window {
    int h, w, c, oh, ow, oc, kernel, stride, padding;
};

static Window window_of(const Layer *l) {
    return {(int)l->in.h,  (int)l->in.w,        (int)l->in.c,   (int)l->out.h,  (int)l->out.w,
            (int)l->out.c, (int)l->kernel_size, (int)l->stride, (int)l->padding};
}

// A row of the layer table as kernels get it: its Work, and what they need of l, the host's Layer.
struct Row : Work {
    Window s;
    unsigned inputs, outputs; // elements, all images together
    bool relu, relu_backward; // the forward ends with a ReLU; the backward begins with its own
    real p;                   // of a dropout
};

static Row row_of(Work w) {
    const Layer *l = w.l;
    const bool relu = w.fused.relu || l->kind == RELU;
    const bool relu_backward = w.fused.relu_backward && !w.residual; // else another kernel did it
    return {w, window_of(l), (unsigned)inputs(w), (unsigned)outputs(w), relu, relu_backward, l->p};
}

// Queues a row's kernel with COUNT(w) threads. The layouts are separate arguments, since nvcc does
// not hoist tests of a structure's members out of loops.
template <void (*KERNEL)(Row, Layout, Layout), size_t (*COUNT)(Work)> static void each(Work w) {
    LAUNCH(KERNEL, COUNT(w), row_of(w), layout_of(w.l->in, w.transposed),
           layout_of(w.l->out, w.transposed));
}

/* LAB 4.1 BEGIN relu_forward */
// out = max(in, 0); a NaN stays a NaN.   Traffic: 8 N bytes
static __global__ void relu_forward_kernel(real *out, const real *in, unsigned count) {
    unsigned i = element();
    if (i < count)
        out[i] = in[i] < 0 ? 0 : in[i];
}

static void relu_forward(Work w) {
    LAUNCH(relu_forward_kernel, outputs(w), w.out, w.in, outputs(w));
}
/* LAB 4.1 END */

// din = dout, or 0 where MASKED and out <= 0; += if accumulate.   Traffic: 3 N elements
template <class T, bool MASKED> static __global__ void add_backward_kernel(Row r, Layout, Layout) {
    unsigned i = first_of_pack<T>();
    if (i >= r.outputs)
        return;
    Pack<T> sum = r.accumulate ? load_pack<T>(r.din, i, r.outputs) : Pack<T>();
    Pack<T> d = load_pack<T>(r.dout, i, r.outputs),
            o = MASKED ? load_pack<T>(r.out, i, r.outputs) : Pack<T>();
    for (int j = 0; j < Pack<T>::N; j++)
        sum.v[j] += !MASKED || o.v[j] > 0 ? d.v[j] : 0;
    store_pack(r.din, i, r.outputs, sum);
}

/* The backward of a row, after the backward of what is fused into its forward, in reverse order:
   the ReLU, in place in dout, then the sum. A BatchNorm without a sum includes its ReLU itself. */
template <class T, void (*BACKWARD)(Work)> static void backward_of_fused(Work w) {
    Work relu = w, sum = w;
    relu.din = w.dout;
    relu.accumulate = false;
    sum.din = w.dresidual;
    sum.accumulate = w.accumulate_residual;
    if (w.fused.relu_backward && (w.residual || w.l->kind != BATCHNORM2D))
        each<add_backward_kernel<T, true>, packs<T>>(relu);
    if (w.dresidual)
        each<add_backward_kernel<T, false>, packs<T>>(sum);
    BACKWARD(w);
}

// out = in + residual, unless that is NULL, then ReLU if asked.   Traffic: 3 N elements
template <class T> static __global__ void add_forward_kernel(Row r, Layout, Layout) {
    unsigned i = first_of_pack<T>();
    if (i >= r.outputs)
        return;
    Pack<T> sum = load_pack<T>(r.in, i, r.outputs);
    Pack<T> other = r.residual ? load_pack<T>(r.residual, i, r.outputs) : Pack<T>();
    for (int j = 0; j < Pack<T>::N; j++) {
        sum.v[j] = r.residual ? sum.v[j] + other.v[j] : sum.v[j]; // -0 + 0 would be 0
        sum.v[j] = r.relu && sum.v[j] < 0 ? 0 : sum.v[j];
    }
    store_pack(r.out, i, r.outputs, sum);
}

/* out = in / (1 - p), or 0 where the image's Philox numbers say so: with NHWC, the same masks as on
   the CPU.
   One thread computes the 8 elements that share a Philox block.   Traffic: 2 N elements, N bytes */
template <class T>
static __global__ void dropout_forward_kernel(Row r, unsigned size, unsigned blocks_of_image,
                                              uint32_t threshold) {
    unsigned image = element() / blocks_of_image, block = element() % blocks_of_image;
    if (image >= r.n)
        return;
    uint32_t bits[4];
    philox4x32(bits, (uint32_t)block, (uint32_t)position_of(*r.key, image), (uint32_t)r.key->epoch,
               DRAW_DROPOUT + (uint32_t)r.row, r.key->seed);
    for (unsigned j = 0; j < 8; j++) {
        unsigned i = image * size + block * 8 + j;
        bool kept = (bits[j / 2] >> (16 * (j % 2)) & 0xffff) >= threshold;
        if (block * 8 + j < size) {
            r.saved[i] = kept;
            store<T>(r.out, i, kept ? load<T>(r.in, i) * (1 / (1 - r.p)) : 0);
        }
    }
}

// Evaluation (no key): out = in
template <class T> static void dropout_forward(Work w) {
    size_t size = outputs(w) / w.n, blocks_of_image = (size + 7) / 8;
    if (w.key)
        LAUNCH(dropout_forward_kernel<T>, w.n * blocks_of_image, row_of(w), size, blocks_of_image,
               (uint32_t)lround((double)w.l->p * 65536));
    else if (w.out != w.in)
        copy(w.out, w.in, outputs(w) * sizeof(T));
}

// din = dout / (1 - p) where saved, else 0; += if accumulate.   Traffic: 2 N elements, N bytes
template <class T> static __global__ void dropout_backward_kernel(Row r, Layout, Layout) {
    unsigned i = first_of_pack<T>();
    if (i >= r.outputs)
        return;
    Pack<T> sum = r.accumulate ? load_pack<T>(r.din, i, r.outputs) : Pack<T>();
    Pack<T> d = load_pack<T>(r.dout, i, r.outputs);
    for (int j = 0; j < Pack<T>::N; j++)
        sum.v[j] += i + j < r.outputs && r.saved[i + j] ? d.v[j] * (1 / (1 - r.p)) : 0;
    store_pack(r.din, i, r.outputs, sum);
}

struct Index { // of an element [image][y][x][c]
    int image, y, x, c;
};

static __device__ Index index_of(unsigned i, unsigned height, unsigned width, Layout layout) {
    unsigned pixel = layout.pixel(i), row = pixel / width;
    return {(int)(row / height), (int)(row % height), (int)(pixel % width), (int)layout.channel(i)};
}

// The inverse of i = ((image * height + y) * width + x) * channels + c
static __device__ Index unravel(unsigned i, unsigned height, unsigned width, unsigned channels) {
    return index_of(i, height, width, {channels, 1});
}

// Returns the input pixel, counted over all images, that a tap of output pixel o's window reads, or
// -1 if it is outside of the image.
static __device__ int input_pixel(const Window &s, const Index &o, int tap) {
    int y = o.y * s.stride + tap / s.kernel - s.padding;
    int x = o.x * s.stride + tap % s.kernel - s.padding;
    bool inside = y >= 0 && y < s.h && x >= 0 && x < s.w;
    return inside ? (o.image * s.h + y) * s.w + x : -1;
}

// The inverse: returns the output pixel whose window reads input pixel p at a tap, or -1.
static __device__ int output_pixel(const Window &s, const Index &p, int tap) {
    int y = p.y + s.padding - tap / s.kernel, x = p.x + s.padding - tap % s.kernel;
    bool valid = y >= 0 && x >= 0 && y % s.stride == 0 && x % s.stride == 0 &&
                 y / s.stride < s.oh && x / s.stride < s.ow;
    return valid ? (p.image * s.oh + y / s.stride) * s.ow + x / s.stride : -1;
}

/* out = the maximum under the window, saved = its tap i * kernel_size + j, the first if there are
   several. A NaN wins.   Traffic: (stride^2 + 1) N elements, N bytes */
template <class T>
static __global__ void maxpool2d_forward_kernel(Row r, Layout of_in, Layout of_out) {
    unsigned i = element();
    if (i >= r.outputs)
        return;
    Index o = index_of(i, r.s.oh, r.s.ow, of_out);
    real best = -INFINITY;
    int argmax = 0;
    for (int tap = 0; tap < r.s.kernel * r.s.kernel; tap++) {
        int pixel = input_pixel(r.s, o, tap);
        real value = pixel >= 0 ? load<T>(r.in, of_in.at(pixel, o.c)) : -INFINITY;
        if (value > best || value != value) {
            best = value;
            argmax = tap;
        }
    }
    store<T>(r.out, i, best);
    r.saved[i] = (uint8_t)argmax;
}

/* din = sum of dout over the windows whose maximum this pixel was; += if accumulate. One thread per
   N channels of an input pixel, which visits the windows that cover it, from the last to the first,
   so that no two threads add to the same number.
   Traffic: N + N / stride^2 elements, N / stride^2 bytes */
template <class T, int N>
static __global__ void maxpool2d_backward_kernel(Row r, Layout of_in, Layout of_out) {
    const unsigned i = N * element();
    if (i >= r.inputs)
        return;
    const Window &s = r.s;
    const Index p = index_of(i, s.h, s.w, of_in);
    const int y = p.y + s.padding, x = p.x + s.padding; // in the padded image
    real sums[N] = {}, d[N];
    if (r.accumulate)
        load_chunk<T, N>(sums, r.din, i);
    for (int oy = min(y / s.stride, s.oh - 1); oy >= 0 && y - oy * s.stride < s.kernel; oy--)
        for (int ox = min(x / s.stride, s.ow - 1); ox >= 0 && x - ox * s.stride < s.kernel; ox--) {
            const int tap = (y - oy * s.stride) * s.kernel + x - ox * s.stride;
            const unsigned at = of_out.at((p.image * s.oh + oy) * s.ow + ox, p.c);
            const Chunk<uint8_t, N> taps = *(const Chunk<uint8_t, N> *)(r.saved + at);
            load_chunk<T, N>(d, r.dout, at);
            for (int j = 0; j < N; j++)
                sums[j] += taps.v[j] == tap ? d[j] : 0;
        }
    store_chunk<T, N>(r.din, i, sums);
}

/* The same where windows neither overlap nor reach beyond the image. A thread has N channels of an
   output pixel, and writes the input pixels from its window to the next one, or to the edge of the
   image.   Traffic: the same */
template <class T, int N>
static __global__ void maxpool2d_backward_apart_kernel(Row r, Layout of_in, Layout of_out) {
    const unsigned i = N * element();
    if (i >= r.outputs)
        return;
    const Window &s = r.s;
    const Index o = index_of(i, s.oh, s.ow, of_out);
    const int top = o.y * s.stride, rows = o.y == s.oh - 1 ? s.h - top : s.stride;
    const int left = o.x * s.stride, columns = o.x == s.ow - 1 ? s.w - left : s.stride;
    const unsigned corner = of_in.at((o.image * s.h + top) * s.w + left, o.c);
    const unsigned apart = of_in.inner == 1 ? of_in.channels : 1; // neighbors in a row
    const Chunk<uint8_t, N> taps = *(const Chunk<uint8_t, N> *)(r.saved + i);
    real d[N];
    load_chunk<T, N>(d, r.dout, i);
    for (int y = 0; y < rows; y++)
#pragma unroll 1
        for (int x = 0; x < columns; x++) {
            const unsigned at = corner + (y * s.w + x) * apart;
            const int tap = x < s.kernel ? y * s.kernel + x : -1;
            real sums[N] = {};
            if (r.accumulate)
                load_chunk<T, N>(sums, r.din, at);
            for (int j = 0; j < N; j++)
                sums[j] += taps.v[j] == tap ? d[j] : 0;
            store_chunk<T, N>(r.din, at, sums);
        }
}

template <size_t (*COUNT)(Work), int N> static size_t chunks_of(Work w) {
    return ceil_div(COUNT(w), N);
}

template <class T, int N> static void maxpool2d_backward_of(Work w) {
    if (w.l->stride >= w.l->kernel_size && w.l->padding == 0)
        each<maxpool2d_backward_apart_kernel<T, N>, chunks_of<outputs, N>>(w);
    else
        each<maxpool2d_backward_kernel<T, N>, chunks_of<inputs, N>>(w);
}

template <class T> static void maxpool2d_backward(Work w) {
    if (by_packs<T>(w))
        maxpool2d_backward_of<T, Pack<T>::N>(w);
    else
        maxpool2d_backward_of<T, 1>(w);
}

// out[n][c] = mean over the pixels.   Traffic: (pixels + 1) N elements
template <class T>
static __global__ void global_avgpool2d_forward_kernel(Row r, Layout of_in, Layout) {
    unsigned i = element(), pixels = r.s.h * r.s.w;
    if (i >= r.outputs)
        return;
    real sum = 0;
    for (unsigned p = 0; p < pixels; p++)
        sum += load<T>(r.in, of_in.at(i / r.s.c * pixels + p, i % r.s.c));
    store<T>(r.out, i, sum / pixels);
}

// din[n][pixel][c] = dout[n][c] / pixels; += if accumulate.   Traffic: N elements
template <class T>
static __global__ void global_avgpool2d_backward_kernel(Row r, Layout of_in, Layout) {
    unsigned i = element(), pixels = r.s.h * r.s.w;
    if (i >= r.inputs)
        return;
    unsigned from = i / r.s.c / pixels * r.s.c + of_in.channel(i);
    store<T>(r.din, i, load<T>(r.dout, from) / pixels + (r.accumulate ? load<T>(r.din, i) : 0));
}

// to = step, which is copied when the kernel is queued: the host does not wait.
static __global__ void set_step_kernel(StepInputs *to, StepInputs step) {
    *to = step;
}

static void set_step(StepInputs *to, StepInputs step) {
    LAUNCH_GRID(set_step_kernel, 1, 1, 0, to, step);
}

/* ---- Optimizers: the formulas are in cnn.c, section 7. One launch updates all parameters, or one
   tensor (--optimizer-launch), and also writes a 16-bit copy if T is 16-bit. # AMP # EXTRA */

// updated() returns a parameter's new value and changes its state; g includes the weight decay.
struct Adadelta {
    static __device__ int states(const Update &) {
        return 2;
    }
    static __device__ real updated(const Update &u, real p, real g, real &square, real &acc) {
        const real rho = .9f, one_minus_rho = (real)(1 - .9), eps = 1e-6f, lr = (real)u.step->lr;
        square = rho * square + one_minus_rho * g * g;
        real delta = sqrtf(acc + eps) / sqrtf(square + eps) * g;
        acc = rho * acc + one_minus_rho * delta * delta;
        return p - lr * delta;
    }
};
struct Sgd {
    static __device__ int states(const Update &u) {
        return u.momentum > 0;
    }
    static __device__ real updated(const Update &u, real p, real g, real &buffer, real &) {
        const real lr = (real)u.step->lr, momentum = (real)u.momentum;
        buffer = momentum * buffer + g;
        return p - lr * (momentum == 0 ? g : u.nesterov ? g + momentum * buffer : buffer);
    }
};

/* LAB 7.3 BEGIN update */
/* param = updated, and its copy; gradients are divided by the loss scale. Nothing happens in a step
   that is skipped.   Traffic: 12 N bytes, 8 N more for each state, 2 N more with a copy */
template <class T, class RULE> static __global__ void update_kernel(Update u) {
    const real unscale = u.scale ? 1 / u.scale->scale : 1, decay = (real)u.weight_decay;
    unsigned i = first_of_pack<real>();
    if (i >= u.count || (u.scale && u.scale->not_finite))
        return;
    Pack<real> p = load_pack<real>(u.param, i, u.count), g = load_pack<real>(u.grad, i, u.count),
               state[2];
    for (int k = 0; k < 2; k++)
        state[k] = k < RULE::states(u) ? load_pack<real>(u.state[k], i, u.count) : Pack<real>();
    for (int j = 0; j < Pack<real>::N; j++)
        p.v[j] = RULE::updated(u, p.v[j], fmaf(decay, p.v[j], g.v[j] * unscale), state[0].v[j],
                               state[1].v[j]);
    for (int k = 0; k < 2; k++)
        if (k < RULE::states(u))
            store_pack(u.state[k], i, u.count, state[k]);
    store_pack(u.param, i, u.count, p);
    if (sizeof(T) < sizeof(real))
        store_chunk<T, Pack<real>::N>(u.param16, i, u.count, p.v);
}

template <class T, class RULE> static void update(Update u) {
    auto *update_all = update_kernel<T, RULE>;
    LAUNCH(update_all, ceil_div(u.count, Pack<real>::N), u);
}
/* LAB 7.3 END */

/* LAB 7.1 BEGIN loss_scaler */
// scale->not_finite += the number of gradients that are not finite.   Traffic: 4 N bytes
static __global__ void count_not_finite_kernel(LossScale *scale, const real *grad, unsigned count) {
    unsigned i = first_of_pack<real>(), bad = 0;
    Pack<real> g = load_pack<real>(grad, min(i, count), count);
    for (int j = 0; j < Pack<real>::N; j++)
        bad += !(fabsf(g.v[j]) < INFINITY);
    if (bad > 0)
        atomicAdd(&scale->not_finite, bad);
}

static void count_not_finite(LossScale *scale, const real *grad, size_t count) {
    LAUNCH(count_not_finite_kernel, ceil_div(count, Pack<real>::N), scale, grad, count);
}

// The rule that struct LossScale explains.   One thread
static __global__ void adjust_scale_kernel(LossScale *s) {
    const bool skipped = s->not_finite > 0, grows = !skipped && s->steps + 1 == GROWTH_INTERVAL;
    s->scale *= skipped ? .5f : grows ? 2 : 1;
    s->steps = skipped || grows ? 0 : s->steps + 1;
    s->skipped += skipped;
    s->not_finite = 0;
}

static void adjust_scale(LossScale *scale) {
    LAUNCH_GRID(adjust_scale_kernel, 1, 1, 0, scale);
}
/* LAB 7.1 END */

/* ---- The loader's work, where the data set is resident on the device: look the batch's images up
   in the epoch's permutation, augment and normalize them. */

// fields = the displacements of all pixels, down and right, as draw_field() of cnn.c draws them,
// but not yet blurred. One thread draws the four numbers of a Philox block.
static __device__ void draw_fields(real *fields, int pixels, size_t position,
                                   const RandomKey &key) {
    const int blocks = (pixels + 3) / 4;
    for (int i = threadIdx.x; i < 2 * blocks; i += THREADS) {
        const int field = i / blocks, first = i % blocks * 4;
        uint32_t bits[4];
        philox4x32(bits, (uint32_t)(1 + field * pixels + first), (uint32_t)position,
                   (uint32_t)key.epoch, DRAW_AUGMENT, key.seed);
        for (int j = 0; j < 4; j++)
            if (first + j < pixels)
                fields[field * pixels + first + j] = ELASTIC_ALPHA * (2 * uniform(bits[j]) - 1);
    }
    __syncthreads();
}

// to = from blurred along rows or columns: the sum of by[|d|] * from[i + d]
static __device__ void blur(real *to, const real *from, const float *by, int h, int w, bool rows) {
    for (int i = threadIdx.x; i < h * w; i += THREADS) {
        real sum = 0;
        for (int d = -ELASTIC_REACH; d <= ELASTIC_REACH; d++) {
            int y = i / w + (rows ? 0 : d), x = i % w + (rows ? d : 0);
            if (y >= 0 && x >= 0 && y < h && x < w)
                sum = fmaf(by[d < 0 ? -d : d], from[y * w + x], sum);
        }
        to[i] = sum;
    }
    __syncthreads();
}

/* out[n][h][w][c] = the augmented images, enlarged as enlarge() of cnn.c does, and the labels. The
   bytes are interpolated at the positions that augment_crop_flip() or augment_elastic() of cnn.c
   give; the displacement fields of the latter stay in shared memory.   Grid: images x blocks of
   an image.   Traffic: N elements, N bytes */
template <class T>
static __global__ void gather_kernel(T *out, uint8_t *labels, DeviceDataset r, Layout layout,
                                     const RandomKey *key) {
    extern __shared__ real fields[]; // down, right, and a buffer to blur them
    const int h = (int)r.shape.h, w = (int)r.shape.w, pixels = h * w, factor = (int)r.factor;
    const unsigned bytes = pixels * r.shape.c, size = bytes * factor * factor;
    const size_t position = position_of(*key, blockIdx.x), image = r.order[position];
    const bool crop_flip = r.augment == AUGMENT_CROP_FLIP, elastic = r.augment == AUGMENT_ELASTIC;
    if (elastic)
        draw_fields(fields, pixels, position, *key);
    for (int field = 0; elastic && field < 2; field++) {
        blur(fields + 2 * pixels, fields + field * pixels, r.blur, h, w, true);
        blur(fields + field * pixels, fields + 2 * pixels, r.blur, h, w, false);
    }
    uint32_t bits[4];
    philox4x32(bits, 0, (uint32_t)position, (uint32_t)key->epoch, DRAW_AUGMENT, key->seed);
    const bool flipped = crop_flip && bits[2] & 1;
    const int moved_down = crop_flip ? (int)(bits[0] % (2 * CROP_PADDING + 1)) - CROP_PADDING : 0;
    const int moved_right = crop_flip ? (int)(bits[1] % (2 * CROP_PADDING + 1)) - CROP_PADDING : 0;
    for (unsigned i = blockIdx.y * THREADS + threadIdx.x; i < size; i += gridDim.y * THREADS) {
        const Index o = index_of(i, h * factor, w * factor, layout);
        const Neighbors rows = neighbors_of(o.y, factor, h);
        const Neighbors columns = neighbors_of(o.x, factor, w);
        real sum = 0;
        for (int k = 0; k < 4; k++) {
            const real weight = neighbor_share(rows, k / 2) * neighbor_share(columns, k % 2);
            const int row = (int)rows.first + k / 2, column = (int)columns.first + k % 2;
            if (weight == 0) // without --resize, one of the four weights is 1, the others are 0
                continue;
            real y = row + moved_down, x = (flipped ? w - 1 - column : column) + moved_right;
            y += elastic ? fields[row * w + column] : 0;
            x += elastic ? fields[pixels + row * w + column] : 0;
            const int byte = interpolated_byte(r.images + image * bytes, r.shape, y, x, o.c);
            sum = fmaf(weight, r.normalized[o.c * 256 + byte], sum);
        }
        out[blockIdx.x * size + i] = (T)sum;
    }
    if (blockIdx.y == 0 && threadIdx.x == 0)
        labels[blockIdx.x] = r.labels[image];
}

template <class T>
static void gather(real *out, uint8_t *labels, const DeviceDataset *r, const RandomKey *key,
                   size_t n, bool nchw) {
    const Shape s = {r->shape.h * r->factor, r->shape.w * r->factor, r->shape.c};
    const size_t pixels = r->shape.h * r->shape.w;
    const size_t fields = r->augment == AUGMENT_ELASTIC ? 3 * pixels * sizeof(real) : 0;
    const dim3 grid(n, fields ? 1 : ceil_div(shape_size(s), THREADS));
    // A kernel must request more than 48 KB of shared memory.
    const cudaError_t error = cudaFuncSetAttribute(
        gather_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)fields);
    if (error == cudaErrorInvalidValue)
        fail(1,
             "--augment elastic: the fields of %zu x %zu pixels need %zu bytes of shared memory, "
             "more than device %d has; expected smaller images, or another --augment",
             r->shape.h, r->shape.w, fields, device);
    check(error, "cudaFuncSetAttribute", __LINE__);
    LAUNCH_GRID(gather_kernel<T>, grid, THREADS, fields, (T *)out, labels, *r, layout_of(s, nchw),
                key);
}

// out = in, which is NHWC, in another type and layout.   Traffic: 4 N bytes, N elements
template <class T>
static __global__ void convert_kernel(void *out, const real *in, Layout layout, unsigned count) {
    unsigned i = element();
    if (i < count)
        store<T>(out, i, in[layout.pixel(i) * layout.channels + layout.channel(i)]);
}

// out = the images that a loader has prepared
template <class T>
static void load_images(real *out, const real *images, size_t n, Shape s, bool nchw) {
    size_t count = n * shape_size(s);
    LAUNCH(convert_kernel<T>, count, out, images, layout_of(s, nchw), count);
}

template <class T> static void to_16_bit(void *param16, const real *param, size_t count) {
    LAUNCH(convert_kernel<T>, count, param16, param, layout_of({1, 1, 1}, false), count);
}

/* ==== 3. Sums over pixels =======================================================================

   BatchNorm and a bias's gradient need, for each channel, sums over all pixels of the batch. They
   are computed on three levels, each in a fixed order: a thread sums some pixels of a slice, of one
   channel or of a pack of channels; the sums of a channel's threads are joined in shared memory; a
   second kernel joins the slices. */

enum { SUM_SLICES = 512, LEAST_SLICE = 64, CONV_SLICE = 64 };
static const real bn_eps = 1e-5f, bn_momentum = 0.1f;

// BatchNorm of one number of a channel. Forward and backward call the same function, so that they
// agree in which numbers the ReLU has let through.
static __device__ real normalized(real x, real mean, real inverse, real weight, real bias) {
    return fmaf(x - mean, weight * inverse, bias);
}

// The sums over some pixels of a channel; a and b depend on their kind.
struct Sum {
    real count, a, b;
};

// A kind of sums (Gradients, Moments) says what a pixel, with d from dout and x from in, adds to a
// channel's a and b, how a slice is completed, how two slices are joined, and what is stored.
// fmaf() rounds a pixel's sums the same way, however the compiler arranges a pack of channels.

/* Gradients: a = sum of d, which is dout (after the backward of the ReLU that follows a BatchNorm,
   if there is one); NORM, of a BatchNorm: b = sum of d * (in - mean).
   dbias = a, dweight = b / sqrt(variance + eps) */
template <bool NORM> struct Gradients {
    enum { READS_DOUT = true, READS_IN = NORM };
    // of the channel; without a ReLU, weight 0 and bias 1 let all through
    real mean, inverse, weight, bias;
    real a = 0, b = 0;
    __device__ void begin(const Row &r, unsigned c, real) {
        mean = NORM ? r.stats[BATCH_MEAN * r.s.oc + c] : 0;
        inverse = NORM ? r.stats[BATCH_INVERSE_STD * r.s.oc + c] : 0;
        weight = NORM && r.relu_backward ? r.weight[c] : 0;
        bias = NORM && r.relu_backward ? r.bias[c] : 1;
    }
    __device__ void add(real d, real x) {
        const real passed = NORM && normalized(x, mean, inverse, weight, bias) <= 0 ? 0 : d;
        a += passed;
        b = NORM ? fmaf(passed, x - mean, b) : 0;
    }
    static __device__ Sum of_slice(real count, real, real a, real b) {
        return {count, a, b};
    }
    static __device__ Sum join(Sum s, Sum t) {
        return {s.count + t.count, s.a + t.a, s.b + t.b};
    }
    static __device__ void finish(const Row &r, unsigned c, Sum s) {
        r.dbias[c] = s.a;
        if (NORM)
            r.dweight[c] = s.b * r.stats[BATCH_INVERSE_STD * r.s.oc + c];
    }
};

/* Moments of in. Of a slice, a = sum of x - shift, b = sum of (x - shift)^2, where shift is its
   first number, so that little is canceled where the mean is large compared with the deviation.
   Then a = mean, b = sum of (x - mean)^2. Slices are joined without cancellation (Chan, Golub,
   LeVeque, "Updating formulae and a pairwise algorithm for computing variances", 1979). */
struct Moments {
    enum { READS_DOUT = false, READS_IN = true };
    real shift, a = 0, b = 0;
    __device__ void begin(const Row &, unsigned, real first) {
        shift = first;
    }
    __device__ void add(real, real x) {
        const real distance = x - shift;
        a += distance;
        b = fmaf(distance, distance, b);
    }
    static __device__ Sum of_slice(real count, real shift, real a, real b) {
        const real mean = a / count, squares = fmaf(-a, mean, b);
        return {count, shift + mean, squares < 0 ? 0 : squares};
    }
    static __device__ Sum join(Sum s, Sum t) {
        const real count = s.count + t.count, d = t.a - s.a, share = t.count / count;
        if (t.count == 0)
            return s;
        return {count, s.a + d * share, s.b + t.b + d * d * s.count * share};
    }
    static __device__ void finish(const Row &r, unsigned c, Sum s) {
        real *stats = r.stats + c, unbiased = s.b / (s.count > 1 ? s.count - 1 : 1);
        real *mean = stats + RUNNING_MEAN * r.s.c, *variance = stats + RUNNING_VARIANCE * r.s.c;
        *mean = (1 - bn_momentum) * *mean + bn_momentum * s.a;
        *variance = (1 - bn_momentum) * *variance + bn_momentum * unbiased;
        stats[BATCH_MEAN * r.s.c] = s.a;
        stats[BATCH_INVERSE_STD * r.s.c] = 1 / sqrtf(s.b / s.count + bn_eps);
    }
};

/* scratch[slice][0][c] = a, scratch[slice][1][c] = b of the slice's pixels. A thread has N channels
   and every blockDim.y-th pixel. Threads beyond the last channels compute the last ones again.
   Grid: channels / (blockDim.x * N) x slices, of THREADS.   Traffic: 1 or 2 elements for each
   number of dout or in. With nchw, a warp's numbers are far apart; the other warps find theirs in
   the L1 cache */
template <class T, class KIND, int N>
static __global__ void sum_slices_kernel(Row r, Layout layout, unsigned slice) {
    __shared__ real sums[2][THREADS * N];
    const unsigned channels = r.s.oc, pixels = r.outputs / channels;
    const unsigned begin = blockIdx.y * slice, end = min(begin + slice, pixels);
    const unsigned width = blockDim.x * N, first = blockIdx.x * width; // channels of this block
    const unsigned c = min(first + threadIdx.x * N, channels - N);
    real d[N] = {}, x[N] = {};
    KIND kinds[N];
    if (KIND::READS_IN)
        load_chunk<T, N>(x, r.in, layout.at(begin, c));
    for (int j = 0; j < N; j++)
        kinds[j].begin(r, c + j, x[j]);
#pragma unroll 4
    for (unsigned p = begin + threadIdx.y; p < end; p += blockDim.y) {
        const unsigned i = layout.at(p, c);
        if (KIND::READS_DOUT)
            load_chunk<T, N>(d, r.dout, i);
        if (KIND::READS_IN)
            load_chunk<T, N>(x, r.in, i);
        for (int j = 0; j < N; j++)
            kinds[j].add(d[j], x[j]);
    }
    for (int j = 0; j < N; j++) {
        sums[0][threadIdx.y * width + threadIdx.x * N + j] = kinds[j].a;
        sums[1][threadIdx.y * width + threadIdx.x * N + j] = kinds[j].b;
    }
    __syncthreads();
    const unsigned own = threadIdx.y * blockDim.x + threadIdx.x; // the channel that is joined
    if (own >= width || first + own >= channels)
        return;
    real a = 0, b = 0;
    for (unsigned y = 0; y < blockDim.y; y++) {
        a += sums[0][y * width + own];
        b += sums[1][y * width + own];
    }
    const real shift = KIND::READS_IN ? load<T>(r.in, layout.at(begin, first + own)) : 0;
    const Sum sum = KIND::of_slice((real)(end - begin), shift, a, b);
    r.scratch[(2 * blockIdx.y) * channels + first + own] = sum.a;
    r.scratch[(2 * blockIdx.y + 1) * channels + first + own] = sum.b;
}

// Joins the slices of each channel, and finishes it. A block has neighboring channels across, and
// lines of threads that share their slices; then the lines are joined in pairs.
// Grid: channels / blockDim.x, of JOINERS.   Traffic: 8 bytes for each slice of a channel
enum { JOINERS = 1024 };
template <class KIND>
static __global__ void __launch_bounds__(JOINERS, 1) join_slices_kernel(Row r, unsigned slice) {
    __shared__ Sum sums[JOINERS];
    const unsigned channels = r.s.oc, c = element(), line = threadIdx.y;
    const unsigned pixels = c < channels ? r.outputs / channels : 0;
    Sum *own = &sums[line * blockDim.x + threadIdx.x], sum = {0, 0, 0};
#pragma unroll 4
    for (unsigned i = line; i * slice < pixels; i += blockDim.y)
        sum =
            KIND::join(sum, {(real)min(slice, pixels - i * slice), r.scratch[2 * i * channels + c],
                             r.scratch[(2 * i + 1) * channels + c]});
    *own = sum;
    for (unsigned other = blockDim.y / 2; other > 0; other /= 2) {
        __syncthreads();
        if (line < other)
            *own = KIND::join(*own, own[other * blockDim.x]);
    }
    if (line == 0 && c < channels)
        KIND::finish(r, c, *own);
}

// With about 4 slices a line: joining is slow where a few multiprocessors have all slices.
template <class KIND> static void join_slices(Work w, size_t slice) {
    const size_t channels = w.l->out.c, slices = ceil_div(outputs(w) / channels, slice);
    size_t lines = WARP;
    while (lines < JOINERS / 2 && 4 * lines < slices)
        lines *= 2;
    LAUNCH_GRID(join_slices_kernel<KIND>, (unsigned)ceil_div(channels, JOINERS / lines),
                dim3(JOINERS / lines, lines), 0, row_of(w), slice);
}

// The fewer channels there are, the more of a block's threads have other pixels. How many depends
// on the channels alone, so that the order of the sums is the same in both layouts.
template <class T, class KIND> static void sum_pixels(Work w) {
    const size_t channels = w.l->out.c, pixels = outputs(w) / channels;
    const size_t slice = max(ceil_div(pixels, SUM_SLICES), (size_t)LEAST_SLICE);
    const size_t group = by_packs<T>(w) ? (size_t)Pack<T>::N : 1; // a thread's channels
    auto *sum_slices =
        group > 1 ? sum_slices_kernel<T, KIND, Pack<T>::N> : sum_slices_kernel<T, KIND, 1>;
    unsigned across = WARP;
    while (across / 2 * Pack<T>::N >= channels)
        across /= 2;
    LAUNCH_GRID(sum_slices, dim3(ceil_div(channels, across * group), ceil_div(pixels, slice)),
                dim3(across, THREADS / across), 0, row_of(w), layout_of(w.l->out, w.transposed),
                slice);
    join_slices<KIND>(w, slice);
}

// Returns whether a convolution's forward stores the moments of its output, by slices of CONV_SLICE
// pixels, for the BatchNorm that follows it. NULL: there is no convolution.
static bool stores_moments(const Layer *conv, size_t n);

// For each element of the pack that begins at element i, the value of its channel
template <class T>
static __device__ Pack<T> of_channels(const real *values, unsigned i, Layout layout) {
    Pack<T> p;
    if (layout.inner == 1 && layout.channels % Pack<T>::N == 0) {
        load_fours<Pack<T>::N, 4>(p.v, values + layout.channel(i));
        return p;
    }
    for (int j = 0; j < Pack<T>::N; j++)
        p.v[j] = values[layout.channel(i + j)];
    return p;
}

/* A thread of BatchNorm's kernels has EACH packs, `stride` elements apart, a multiple of the
   channels, so that it loads what belongs to its channels once. With nchw, or where packs do not
   divide the channels, it has one pack. */
enum { NORM_PACKS = 2 };
template <class T>
static void launch_norm(Work w, void (*several)(Row, Layout), void (*single)(Row, Layout)) {
    const size_t each = by_packs<T>(w) ? (size_t)NORM_PACKS : 1;
    size_t grid = ceil_div(packs<T>(w), each * THREADS);
    while (each > 1 && grid * THREADS * Pack<T>::N % w.l->out.c > 0)
        grid++;
    auto *batchnorm_kernel = each > 1 ? several : single;
    LAUNCH_GRID(batchnorm_kernel, (unsigned)grid, THREADS, 0, row_of(w),
                layout_of(w.l->in, w.transposed));
}

/* out = (in - mean) * weight / sqrt(variance + eps) + bias, + residual unless that is NULL, then
   ReLU if asked. Evaluation (no key): by the running mean and variance.
   Grid: launch_norm().   Traffic: 2 N elements, 3 N with a residual */
template <class T, int EACH> static __global__ void batchnorm_forward_kernel(Row r, Layout of_in) {
    const unsigned first = first_of_pack<T>(), stride = gridDim.x * THREADS * Pack<T>::N;
    const real *means = r.stats + (r.key ? BATCH_MEAN : RUNNING_MEAN) * r.s.c;
    const real *spreads = r.stats + (r.key ? BATCH_INVERSE_STD : RUNNING_VARIANCE) * r.s.c;
    Pack<T> x[EACH], other[EACH] = {};
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        x[e] = load_pack<T>(r.in, first + e * stride, r.outputs);
        if (r.residual)
            other[e] = load_pack<T>(r.residual, first + e * stride, r.outputs);
    }
    const Pack<T> mean = of_channels<T>(means, first, of_in);
    const Pack<T> spread = of_channels<T>(spreads, first, of_in);
    const Pack<T> scale = of_channels<T>(r.weight, first, of_in);
    const Pack<T> shift = of_channels<T>(r.bias, first, of_in);
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        for (int j = 0; j < Pack<T>::N; j++) {
            const real inverse = r.key ? spread.v[j] : 1 / sqrtf(spread.v[j] + bn_eps);
            const real value =
                normalized(x[e].v[j], mean.v[j], inverse, scale.v[j], shift.v[j]) + other[e].v[j];
            x[e].v[j] = r.relu && value < 0 ? 0 : value;
        }
        store_pack(r.out, first + e * stride, r.outputs, x[e]);
    }
}

template <class T> static void batchnorm2d_forward(Work w) {
    Work stored = w;
    stored.scratch = w.moments; // the sums that a convolution has stored
    if (w.key && stores_moments(w.fused.moments_partner, w.n))
        join_slices<Moments>(stored, CONV_SLICE);
    else if (w.key)
        sum_pixels<T, Moments>(w);
    launch_norm<T>(w, batchnorm_forward_kernel<T, NORM_PACKS>, batchnorm_forward_kernel<T, 1>);
}

/* din = weight * inverse * (d - dbias / m - x * dweight / m), over m pixels, where
   x = (in - mean) * inverse, d = dout, dbias = sum of d, dweight = sum of d * x; += if accumulate.
   If d begins with the ReLU's backward, its mask follows from in.
   Grid: launch_norm().   Traffic: 3 N elements */
template <class T, int EACH> static __global__ void batchnorm_backward_kernel(Row r, Layout of_in) {
    const unsigned first = first_of_pack<T>(), stride = gridDim.x * THREADS * Pack<T>::N;
    const real share = 1 / (real)(r.outputs / r.s.c);
    Pack<T> sum[EACH] = {}, x[EACH], d[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        x[e] = load_pack<T>(r.in, first + e * stride, r.outputs);
        d[e] = load_pack<T>(r.dout, first + e * stride, r.outputs);
        if (r.accumulate)
            sum[e] = load_pack<T>(r.din, first + e * stride, r.outputs);
    }
    const Pack<T> scale = of_channels<T>(r.weight, first, of_in);
    const Pack<T> shift = r.relu_backward ? of_channels<T>(r.bias, first, of_in) : Pack<T>();
    const Pack<T> mean = of_channels<T>(r.stats + BATCH_MEAN * r.s.c, first, of_in);
    const Pack<T> inverse = of_channels<T>(r.stats + BATCH_INVERSE_STD * r.s.c, first, of_in);
    const Pack<T> sums = of_channels<T>(r.dbias, first, of_in);
    const Pack<T> products = of_channels<T>(r.dweight, first, of_in);
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        for (int j = 0; j < Pack<T>::N; j++) {
            const real distance = (x[e].v[j] - mean.v[j]) * inverse.v[j];
            const real value =
                normalized(x[e].v[j], mean.v[j], inverse.v[j], scale.v[j], shift.v[j]);
            const real change = r.relu_backward && value <= 0 ? 0 : d[e].v[j];
            sum[e].v[j] += scale.v[j] * inverse.v[j] *
                           (change - sums.v[j] * share - distance * (products.v[j] * share));
        }
        store_pack(r.din, first + e * stride, r.outputs, sum[e]);
    }
}

template <class T> static void batchnorm2d_backward(Work w) {
    sum_pixels<T, Gradients<true>>(w);
    if (w.din)
        launch_norm<T>(w, batchnorm_backward_kernel<T, NORM_PACKS>,
                       batchnorm_backward_kernel<T, 1>);
}

/* ==== 4. Softmax and loss =======================================================================

   One warp per image: each lane reads every 32nd class; shuffles join the lanes. The loss has a
   kernel of its own, since it is no layer: with --parallel dp, one rank computes it for all. */

static __device__ real warp_sum(real value) {
    for (int lane = WARP / 2; lane > 0; lane /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, lane);
    return value;
}

static __device__ real warp_max(real value) {
    for (int lane = WARP / 2; lane > 0; lane /= 2)
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, lane));
    return value;
}

/* out[k] = in[k] - max(in) - log(sum of exp(in[j] - max(in))), in float.   Grid: THREADS / 32
   images per block.   Traffic: N elements, 4 N bytes */
template <class T> static __global__ void log_softmax_forward_kernel(Row r, Layout, Layout) {
    unsigned image = element() / WARP, lane = threadIdx.x % WARP;
    unsigned begin = image * r.s.oc, end = begin + r.s.oc;
    real largest = -INFINITY, sum = 0;
    if (image >= r.n) // true of whole warps only
        return;
    for (unsigned i = begin + lane; i < end; i += WARP)
        largest = fmaxf(largest, load<T>(r.in, i));
    largest = warp_max(largest);
    for (unsigned i = begin + lane; i < end; i += WARP)
        sum += expf(load<T>(r.in, i) - largest);
    real log_sum = largest + logf(warp_sum(sum));
    for (unsigned i = begin + lane; i < end; i += WARP)
        r.out[i] = load<T>(r.in, i) - log_sum;
}

// din[k] = dout[k] - exp(out[k]) * sum of dout.   Grid as above.   Traffic: N elements, 8 N bytes
template <class T> static __global__ void log_softmax_backward_kernel(Row r, Layout, Layout) {
    unsigned image = element() / WARP, lane = threadIdx.x % WARP;
    unsigned begin = image * r.s.oc, end = begin + r.s.oc;
    real sum = 0;
    if (image >= r.n)
        return;
    for (unsigned i = begin + lane; i < end; i += WARP)
        sum += r.dout[i];
    sum = warp_sum(sum);
    for (unsigned i = begin + lane; i < end; i += WARP)
        store<T>(r.din, i, r.dout[i] - expf(r.out[i]) * sum);
}

static size_t lanes(Work w) {
    return w.n * WARP;
}

// Returns in lane 0 the most likely class of an image, the first of several; other lanes' values
// mean nothing.
static __device__ int most_likely(const real *logp, int classes) {
    int best = threadIdx.x % WARP;
    real largest = best < classes ? logp[best] : -INFINITY;
    for (int k = best + WARP; k < classes; k += WARP)
        if (logp[k] > largest) {
            largest = logp[k];
            best = k;
        }
    for (int lane = WARP / 2; lane > 0; lane /= 2) {
        const real other = __shfl_down_sync(0xffffffffu, largest, lane);
        const int k = __shfl_down_sync(0xffffffffu, best, lane);
        if (other > largest || (other == largest && k < best)) {
            largest = other;
            best = k;
        }
    }
    return best;
}

// The formulas are in nll_loss() of cnn.c. Grid as above.   Traffic: 8 N bytes
static __global__ void nll_loss_kernel(real *losses, real *correct, real *dlogp, const real *logp,
                                       const uint8_t *labels, unsigned n, unsigned all_images,
                                       int classes, real at_label, real elsewhere,
                                       LossScale *scale) {
    const unsigned image = element() / WARP, begin = image * classes;
    const int lane = threadIdx.x % WARP;
    if (image >= n) // true of whole warps only
        return;
    const int label = labels[image], best = most_likely(logp + begin, classes);
    const real factor = scale ? scale->scale : 1;
    real loss = 0;
    for (int k = lane; k < classes; k += WARP) {
        const real target = k == label ? at_label : elsewhere;
        loss -= target > 0 ? target * logp[begin + k] : 0; // 0 * -Inf is not 0
        if (dlogp)
            dlogp[begin + k] = -target / (real)all_images * factor;
    }
    loss = warp_sum(loss);
    if (lane > 0)
        return;
    losses[image] = loss;
    correct[image] = best == label;
    if (scale && !(fabsf(loss) < INFINITY))
        atomicAdd(&scale->not_finite, 1);
}

static void nll_loss(real *losses, real *correct, real *dlogp, const real *logp,
                     const uint8_t *labels, size_t n, size_t all_images, size_t classes,
                     double smoothing, LossScale *scale) {
    real elsewhere = (real)(smoothing / (double)classes);
    LAUNCH(nll_loss_kernel, n * WARP, losses, correct, dlogp, logp, labels, n, all_images,
           (int)classes, (real)(1 - smoothing) + elsewhere, elsewhere, scale);
}

/* ==== 5. Convolution, naive =====================================================================

   --kernels naive: one kernel per operation, in which one thread per output runs the CPU's loops.
   It reads every number from memory each time it is needed; only the caches soften that. The
   formulas are in cnn.c, section 2; a linear layer is a convolution on 1 x 1 pixel. */

/* LAB 4.2 BEGIN add_bias */
// out[n][y][x][k] += bias[k]; count: the elements of out.   Traffic: 8 N bytes
static __global__ void bias_kernel(real *out, const real *bias, unsigned count, unsigned channels) {
    unsigned i = element();
    if (i < count)
        out[i] += bias[i % channels];
}

static void add_bias(Work w) {
    LAUNCH(bias_kernel, outputs(w), w.out, w.bias, outputs(w), w.l->out.c);
}
/* LAB 4.2 END */

/* LAB 4.3 BEGIN conv2d_sums */
// out[n][y][x][k], without the bias.   Traffic: up to 8 bytes for each multiply-add
static __global__ void conv2d_forward_naive_kernel(real *out, const real *in, const real *weight,
                                                   Window s, unsigned count) {
    unsigned i = element();
    if (i >= count)
        return;
    Index o = unravel(i, s.oh, s.ow, s.oc);
    real sum = 0;
    for (int tap = 0; tap < s.kernel * s.kernel; tap++) {
        int pixel = input_pixel(s, o, tap);
        for (int c = 0; pixel >= 0 && c < s.c; c++)
            sum += in[pixel * s.c + c] * weight[(tap * s.c + c) * s.oc + o.c];
    }
    out[i] = sum;
}

static void conv2d_sums(Work w) {
    LAUNCH(conv2d_forward_naive_kernel, outputs(w), w.out, w.in, w.weight, window_of(w.l),
           outputs(w));
}
/* LAB 4.3 END */

static void conv2d_forward_naive(Work w) {
    conv2d_sums(w);
    if (w.bias)
        add_bias(w);
}

/* LAB 6.1 BEGIN data_gradient */
// din[n][y][x][c]; += if accumulate.   Traffic: up to 8 bytes for each multiply-add
static __global__ void conv2d_data_gradient_naive_kernel(real *din, const real *dout,
                                                         const real *weight, Window s,
                                                         unsigned count, bool accumulate) {
    unsigned i = element();
    if (i >= count)
        return;
    Index p = unravel(i, s.h, s.w, s.c);
    real sum = accumulate ? din[i] : 0;
    for (int tap = 0; tap < s.kernel * s.kernel; tap++) {
        int pixel = output_pixel(s, p, tap);
        for (int k = 0; pixel >= 0 && k < s.oc; k++)
            sum += dout[pixel * s.oc + k] * weight[(tap * s.c + p.c) * s.oc + k];
    }
    din[i] = sum;
}

static void data_gradient(Work w) {
    LAUNCH(conv2d_data_gradient_naive_kernel, inputs(w), w.din, w.dout, w.weight, window_of(w.l),
           inputs(w), w.accumulate);
}
/* LAB 6.1 END */

/* LAB 6.2 BEGIN weight_gradient */
// dweight[tap][c][k]: each thread sums over all pixels.   Traffic: up to 8 bytes per multiply-add
static __global__ void conv2d_weight_gradient_naive_kernel(real *dweight, const real *dout,
                                                           const real *in, Window s, unsigned n,
                                                           unsigned count) {
    unsigned i = element();
    if (i >= count)
        return;
    int k = (int)(i % s.oc), c = (int)(i / s.oc % s.c), tap = (int)(i / s.oc / s.c);
    real sum = 0;
    for (unsigned o = 0; o < n * s.oh * s.ow; o++) {
        int pixel = input_pixel(s, unravel(o, s.oh, s.ow, 1), tap);
        if (pixel >= 0)
            sum += in[pixel * s.c + c] * dout[o * s.oc + k];
    }
    dweight[i] = sum;
}

static void weight_gradient(Work w) {
    LAUNCH(conv2d_weight_gradient_naive_kernel, w.l->weight_count, w.dweight, w.dout, w.in,
           window_of(w.l), w.n, w.l->weight_count);
}
/* LAB 6.2 END */

static void conv2d_backward_naive(Work w) {
    if (w.l->bias_count)
        sum_pixels<real, Gradients<false>>(w);
    weight_gradient(w);
    if (w.din)
        data_gradient(w);
}

/* ==== 6. Convolution, tiled =====================================================================

   --kernels tiled: every pass is a matrix product C[M][N] = sum over K of A[M][K] * B[K][N], whose
   A is never stored ("implicit GEMM"): its elements are looked up in the image.

     pass              M: rows of C       N: columns     K: summed over      A: along   B: along
     forward           n * oh * ow        channels out   taps * channels in  in: K      weight: N
     data gradient     n * h * w          channels in    taps * chan. out    dout: K    weight: K
     weight gradient   taps * chan. in    channels out   n * oh * ow         in: M      dout: N

   "Along" is the index whose neighbors are neighbors in memory: a channel. Where 4 divides both
   numbers of channels, 4 of them are loaded at once, 16 bytes (WIDTH).

   A block computes a tile of C: 128 x 128 elements, 128 x 64 or 64 x 32, see quickest(). In every
   step it loads TILE_K numbers of each of its rows of A and columns of B into shared memory, from
   which a thread reads 8 + 8 numbers for 64 multiply-adds (4 + 4 for 16 in the smallest tile),
   while the numbers of the next step are loaded into registers.

   With a stride s, only each s-th tap meets an input pixel in the data gradient, and which ones
   depends on y % s and x % s. So the pixels are computed in s * s phases, each a product of its own
   with the taps that it meets, and no multiply-add is wasted on the others. */

enum { TILE_K = 16 };

// ROWS x COLUMNS elements of a tile are computed by one thread. BLOCKS fit on a multiprocessor; on
// a T4's, with 64 KB of shared memory, 1 of the large tile and 2 of the narrow one.
template <int M_, int N_, int ROWS_, int COLUMNS_, int BLOCKS_> struct Tile {
    enum { M = M_, N = N_, ROWS = ROWS_, COLUMNS = COLUMNS_, BLOCKS = BLOCKS_ };
    enum { TILE_THREADS = M / ROWS * (N / COLUMNS), DYNAMIC_BYTES = 0 };
};
typedef Tile<128, 128, 8, 8, 2> LargeTile; // 256 threads
typedef Tile<128, 64, 8, 8, 3> NarrowTile; // 128 threads
typedef Tile<64, 32, 4, 4, 4> SmallTile;   // 128 threads

/* An index of an operand is a number of three digits, (a * size_b + b) * size_c + c: of a position,
   image, row and column; of an element of the filter, row, column and channel; otherwise a alone.
   Each digit adds its part to the address, and some to the pixel's y and x. An example: a filter of
   3 x 3 on 64 channels has size_b = 3 and size_c = 64, so k = 500 = (2 * 3 + 1) * 64 + 52 is row 2,
   column 1, channel 52. The next step, 16 further on, adds the digits 0, 0, 16 with carry: row 2,
   column 2, channel 4. So the main loop divides nothing, which takes a GPU some 20 instructions. */
struct Digits {
    int a, b, c;
};
struct Place { // what an index adds to the address, in elements, and to the pixel's position
    int offset, y, x;
};
struct Axis { // offset_a: what a digit a of 1 adds to the address; the others likewise
    int size_b = 1, size_c = 1;
    int offset_a, offset_b = 0, offset_c = 0, y_a = 0, y_b = 0, x_b = 0, x_c = 0;
    __device__ Digits digits(int i) const {
        return {i / size_c / size_b, i / size_c % size_b, i % size_c};
    }
    __device__ void add(Digits &d, Digits step) const {
        d.c += step.c;
        int carry = d.c >= size_c;
        d.c -= carry ? size_c : 0;
        d.b += step.b + carry;
        carry = d.b >= size_b;
        d.b -= carry ? size_b : 0;
        d.a += step.a + carry;
    }
    __device__ Place place(Digits d) const {
        return {d.a * offset_a + d.b * offset_b + d.c * offset_c, d.a * y_a + d.b * y_b,
                d.b * x_b + d.c * x_c};
    }
};

/* A or B. A line is a row of A or a column of B; its element k is data[the sum of the offsets of
   both and of the origin], or 0 if the pixel is outside of the image of h x w. A is an image, B a
   matrix, whose pixel is (0, 0). */
template <class T> struct Operand {
    const T *data;
    Axis line, k;
    Place origin = {0, 0, 0};
    int h = 1, w = 1;
    __device__ bool inside(Place p) const {
        return (unsigned)p.y < (unsigned)h && (unsigned)p.x < (unsigned)w;
    }
};
static __device__ Place operator+(Place a, Place b) {
    return {a.offset + b.offset, a.y + b.y, a.x + b.x};
}

// The same address, in global memory. Once a kernel has changed an operand, compilers for sm_100
// and newer no longer know that, and would use generic loads, which are slower.
template <class T> static __device__ T *in_global(T *address) {
#ifdef __CUDA_ARCH__
    __builtin_assume(__isGlobal(address));
#endif
    return address;
}

/* ---- A walk: the elements of an operand that a thread loads, tile after tile along K. A tile has
   LINES (rows of A or columns of B) by DEPTH of K. Each of LOADERS threads has COUNT chunks of it.
   A chunk is CHUNK elements that are neighbors in memory; pieces of WIDTH elements are loaded at
   once. Neighboring threads have neighboring chunks. Neighbors lie

     along K (ALONG_K)   in one line         A of forward; A and B of the data gradient
     across K            at one k            B of forward; A and B of the weight gradient

   `inner` is a thread's first element in the direction of neighbors, in which INNER threads lie
   side by side; `outer` is its first chunk in the other direction, and its chunks are APART there.
   So a thread's pieces are at STEPS places of K, STEP apart, on each of OWN_LINES lines, NEXT_LINE
   apart.
   The constructor gets the first line of the tile, the number of lines of the operand, and k of the
   first tile. Lines beyond the operand have the addresses of its last ones; what is computed with
   them is not stored. each(o, k, end, load) calls load(chunk, piece, address, valid) for all pieces
   of the tile at k, which must follow the last call's. A piece that is not valid counts as 0: it is
   outside of the image, or not below `end`. */
template <class T, int LINES, int DEPTH, int LOADERS, bool IMAGE, bool ALONG_K, int CHUNK,
          int WIDTH>
struct Walk {
    enum { INNER = (ALONG_K ? DEPTH : LINES) / CHUNK, APART = LOADERS / INNER };
    enum { COUNT = (ALONG_K ? LINES : DEPTH) / APART, PIECES = CHUNK / WIDTH };
    enum { STEPS = ALONG_K ? PIECES : COUNT, STEP = ALONG_K ? WIDTH : (int)APART };
    enum { OWN_LINES = ALONG_K ? COUNT : PIECES, NEXT_LINE = ALONG_K ? (int)APART : WIDTH };
    enum { BY_ROWS = !IMAGE && !ALONG_K }; // k is a matrix's row: one multiplication finds it
    int inner = threadIdx.x % INNER * CHUNK, outer = threadIdx.x / INNER;
    int own_k = ALONG_K ? inner : outer, own_line = ALONG_K ? outer : inner; // the first ones
    Place lines[OWN_LINES];
    Digits k_digits, next_step, next_tile;
    __device__ Walk(const Operand<T> &o, int first, int count, int begin) {
        k_digits = o.k.digits(begin + own_k);
        next_step = o.k.digits(STEP);
        next_tile = o.k.digits(DEPTH - (STEPS - 1) * STEP);
#pragma unroll
        for (int i = 0; i < OWN_LINES; i++) {
            const int line = min(first + own_line + i * NEXT_LINE, count - (ALONG_K ? 1 : WIDTH));
            lines[i] = BY_ROWS ? Place{line, 0, 0} : o.origin + o.line.place(o.line.digits(line));
        }
    }
    template <class Load>
    __device__ void each(const Operand<T> &o, int k, int end, const Load &load) {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int k_here = k + own_k + step * STEP;
            const Place place = BY_ROWS ? Place{k_here * o.k.offset_a, 0, 0} : o.k.place(k_digits);
#pragma unroll
            for (int i = 0; i < OWN_LINES; i++) {
                const Place p = lines[i] + place;
                const bool valid = (!IMAGE || o.inside(p)) && k_here < end;
                load(ALONG_K ? i : step, ALONG_K ? step : i, o.data + p.offset, valid);
            }
            o.k.add(k_digits, step < STEPS - 1 ? next_step : next_tile); // not used BY_ROWS
        }
    }
};

// Where C is stored, and what is done to its elements first (the epilogue).
template <class O> struct Result {
    O *out;
    Axis line; // of a row; with phases not all rows are there
    Place origin = {0, 0, 0};
    int h = 1, w = 1;
    const real *bias = NULL; // one per column
    bool relu = false, accumulate = false;
    __device__ int at(Digits row) const { // of the row's first element; below 0: outside
        Place p = origin + line.place(row);
        return p.y < h && p.x < w ? p.offset : -1;
    }
    // The chunk that is added to, of a row that begins at `at`; zeros if nothing accumulates.
    template <int WIDTH, int N>
    __device__ Chunk<O, N> load_old(int at, int column, int columns) const {
        Chunk<O, N> old = {};
        const bool wanted = accumulate && at >= 0;
        if (WIDTH > 1 && wanted && column < columns)
            old = *(const Chunk<O, N> *)in_global(out + at + column);
        for (int j = 0; j < N; j++)
            if (WIDTH == 1 && wanted && column + j < columns)
                old.v[j] = *in_global(out + at + column + j);
        return old;
    }
    // Stores a chunk of neighboring elements of a row that begins at `at`, those that exist.
    template <int WIDTH, int N>
    __device__ void store(int at, int column, int columns, const real *sums,
                          const Chunk<O, N> &old) const {
        Chunk<O, N> chunk;
        if (at < 0 || column >= columns)
            return;
        O *to = in_global(out + at + column);
        for (int j = 0; j < N; j++) {
            const bool biased = bias && (WIDTH > 1 || column + j < columns);
            const real value =
                sums[j] + ((biased ? *in_global(bias + column + j) : 0) + (real)old.v[j]);
            chunk.v[j] = (O)(relu && value < 0 ? 0 : value);
        }
        if (WIDTH > 1)
            *(Chunk<O, N> *)to = chunk;
        for (int j = 0; j < N; j++)
            if (WIDTH == 1 && column + j < columns)
                to[j] = chunk.v[j];
    }
};

/* The phases of the data gradient. Phase (py, px) has the input pixels (i * stride + py, j * stride
   + px). Tap r meets their rows if (py + padding - r) % stride = 0: r = ry, ry + stride, ... with
   ry = (py + padding) % stride. The t-th of these taps reads row i + (py + padding) / stride - t of
   dout. Columns likewise. An example: stride 2, padding 1, a filter of 3 x 3. Only tap 1 meets even
   rows (py = 0); in the odd ones tap 0 reads row i + 1 of dout and tap 2 row i. */
struct Phases {
    int stride = 1, kernel = 0, padding = 0, channels_in = 0, channels_out = 0;
    // Sets what depends on the phase; the depth of its product.
    template <class T, class O>
    __device__ int enter(int phase, Operand<T> &dout, Operand<T> &weight, Result<O> &din) const {
        int py = phase / stride, px = phase % stride;
        int ry = (py + padding) % stride, top = (py + padding) / stride;
        int rx = (px + padding) % stride, left = (px + padding) / stride;
        int taps_down = max(kernel - ry + stride - 1, 0) / stride;
        int taps_across = max(kernel - rx + stride - 1, 0) / stride;
        dout.origin = {(top * dout.w + left) * channels_out, top, left};
        dout.k.size_b = weight.k.size_b = max(taps_across, 1);
        weight.k.size_c = dout.k.size_c; // the same number: its digits are kept once
        weight.origin.offset = (ry * kernel + rx) * channels_in * channels_out;
        din.origin = {(py * din.w + px) * channels_in, py, px};
        return taps_down * taps_across * channels_out;
    }
};

enum Pass { FORWARD, DATA_GRADIENT, WEIGHT_GRADIENT, PASSES };
// Whether neighbors in memory are neighbors along K
template <Pass PASS> static constexpr bool A_ALONG_K = PASS != WEIGHT_GRADIENT;
template <Pass PASS> static constexpr bool B_ALONG_K = PASS == DATA_GRADIENT;

// C = A * B, as the table at the head of this section has it for each pass.
template <class T, class O> struct Product {
    Operand<T> a, b;
    Result<O> c;
    int rows, columns, depth; // of each phase; the depth of the deepest
    unsigned elements;        // of C, of all phases together
    Phases phases = {};
    int splits = 1;
    real *parts = NULL;   // with several splits their sums, `elements` for each
    real *moments = NULL; // where the tensor cores' forward stores them for a BatchNorm, or NULL
};

// What a block computes: the tile of C at (row, column), the sums over begin <= k < end.
struct Job {
    int row, column, begin, end, split;
};

/* This block's job, and the operands of its phase. x of the grid counts the tiles; tiles of the
   same rows are next to each other, so that they read A at the same time. z counts the splits,
   whose depths are multiples of `step`, and the phases. */
template <class Tile, Pass PASS, class T, class O>
static __device__ Job job_of_block(Product<T, O> &p, int step) {
    int split = blockIdx.z;
    if (PASS == DATA_GRADIENT) {
        const int count = p.phases.stride * p.phases.stride;
        p.depth = p.phases.enter(split % count, p.a, p.b, p.c);
        split /= count;
    }
    const int tiles_across = (p.columns + Tile::N - 1) / Tile::N;
    const int depth = (p.depth + p.splits * step - 1) / (p.splits * step) * step;
    return {(int)blockIdx.x / tiles_across * Tile::M, (int)blockIdx.x % tiles_across * Tile::N,
            split * depth, min((split + 1) * depth, p.depth), split};
}

// Where a block stores the sums of its split; the epilogue follows when they are joined.
template <class T, class O>
static __device__ Result<real> part_of(const Product<T, O> &p, int split) {
    return {p.parts + split * p.elements, p.c.line, p.c.origin, p.c.h, p.c.w};
}

/* LAB 5.0 BEGIN gemm_kernel */
/* load() loads a tile into registers, store() stores it in shared memory, [k][line]; arithmetic can
   be done in between. A line is padded by 4 numbers: otherwise the threads that store the numbers
   of one line would use the same one of the 32 banks, and be serialized (with the padding, pairs of
   them still are). */
template <int LINES, int LOADERS, bool IMAGE, bool ALONG_K, int WIDTH> struct TileLoader {
    typedef Walk<real, LINES, TILE_K, LOADERS, IMAGE, ALONG_K, WIDTH, WIDTH> Chunks;
    enum { PITCH = LINES + 4 };
    Chunks walk;
    Chunk<real, WIDTH> chunks[Chunks::COUNT];
    __device__ TileLoader(const Operand<real> &o, int first, int count, int begin)
        : walk(o, first, count, begin) {}
    __device__ void load(const Operand<real> &o, int k, int end) {
        walk.each(o, k, end, [&](int i, int, const real *from, bool valid) {
            chunks[i] = valid ? *(const Chunk<real, WIDTH> *)in_global(from) : Chunk<real, WIDTH>{};
        });
    }
    __device__ void store(real *tile) const {
#pragma unroll
        for (int i = 0; i < Chunks::COUNT; i++) {
            const int outer = walk.outer + i * Chunks::APART;
            Chunk<real, WIDTH> *line = (Chunk<real, WIDTH> *)(tile + outer * PITCH + walk.inner);
#pragma unroll
            for (int j = 0; j < WIDTH; j++)
                (ALONG_K ? tile[(walk.inner + j) * PITCH + outer] : line->v[j]) = chunks[i].v[j];
        }
    }
};

/* C = A * B over the K of this split; the table above lists A and B.
   A warp's threads lie as 4 x 8 in the tile, each with groups of 4 x 4 elements that are half a
   tile apart, or one such group: so the warp reads 16 and 32 neighboring numbers at a time.
   Registers: 128 in the large tile, so that 2 blocks of 256 threads fit on a multiprocessor, 168 in
   the narrow one (3 of 128 threads), 128 in the small one (4 of 128); none is spilled.
   Main loop: 67 to 87 % of its instructions are multiply-adds, the larger the tile the more (45 to
   61 % where WIDTH is 1).
   Grid: tiles x 1 x splits * phases.   Shared memory: 8 (T::M + T::N + 8) TILE_K bytes.
   Traffic: 4 K (M N / T::N + M N / T::M) + 4 M N bytes, most of it served by the L2 cache */
template <class T, Pass PASS, int WIDTH>
static __global__ void __launch_bounds__(T::TILE_THREADS, T::BLOCKS)
    gemm_kernel(Product<real, real> p) {
    using LoaderA = TileLoader<T::M, T::TILE_THREADS, true, A_ALONG_K<PASS>, WIDTH>;
    using LoaderB = TileLoader<T::N, T::TILE_THREADS, false, B_ALONG_K<PASS>, WIDTH>;
    enum { SIZE_A = TILE_K * LoaderA::PITCH, SIZE_B = TILE_K * LoaderB::PITCH };
    __shared__ __align__(16) real tiles[2][SIZE_A + SIZE_B]; // read as float4
    const Job job = job_of_block<T, PASS>(p, TILE_K);
    LoaderA of_a(p.a, job.row, p.rows, job.begin);
    LoaderB of_b(p.b, job.column, p.columns, job.begin);
    enum { APART_M = T::M * 4 / T::ROWS, APART_N = T::N * 4 / T::COLUMNS }; // of a thread's groups
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, WARPS_N = APART_N / 32;
    const int row = (warp / WARPS_N * 4 + lane / 8) * 4;
    const int column = (warp % WARPS_N * 8 + lane % 8) * 4;
    real sums[T::ROWS][T::COLUMNS] = {};
    of_a.load(p.a, job.begin, job.end);
    of_b.load(p.b, job.begin, job.end);
    for (int k = job.begin, buffer = 0; k < job.end; k += TILE_K, buffer ^= 1) {
        real *tile_a = tiles[buffer], *tile_b = tile_a + SIZE_A;
        of_a.store(tile_a);
        of_b.store(tile_b);
        of_a.load(p.a, k + TILE_K, job.end); // before the barrier: compilers would move loads
        of_b.load(p.b, k + TILE_K, job.end); // that come after it past the arithmetic
        __syncthreads(); // the tiles are complete; nobody reads those before the last any more
#pragma unroll
        for (int d = 0; d < TILE_K; d++) {
            real x[T::ROWS], y[T::COLUMNS];
            load_fours<T::ROWS, APART_M>(x, tile_a + d * LoaderA::PITCH + row);
            load_fours<T::COLUMNS, APART_N>(y, tile_b + d * LoaderB::PITCH + column);
#pragma unroll
            for (int i = 0; i < T::ROWS; i++)
#pragma unroll
                for (int j = 0; j < T::COLUMNS; j++)
                    sums[i][j] += x[i] * y[j];
        }
    }
    if (p.splits > 1)
        p.c = part_of(p, job.split);
#pragma unroll
    for (int i = 0; i < T::ROWS; i++) {
        const int m = job.row + row + i / 4 * APART_M + i % 4;
        const int at = m < p.rows ? p.c.at(p.c.line.digits(m)) : -1;
        if (at < 0)
            continue;
#pragma unroll
        for (int j = 0; j < T::COLUMNS; j += 4) {
            const int first = job.column + column + j / 4 * APART_N;
            const Chunk<real> old = p.c.template load_old<WIDTH, 4>(at, first, p.columns);
            p.c.template store<WIDTH, 4>(at, first, p.columns, sums[i] + j, old);
        }
    }
}
/* LAB 5.0 END */

/* out = the sum of all splits, then the epilogue. A thread sums WIDTH neighbors over every
   blockDim.y-th split; the sums of these threads are added in shared memory.
   Grid: elements / (WIDTH * blockDim.x), of THREADS.   Traffic: 4 splits N bytes, N elements */
template <int WIDTH, class T, class O> static __global__ void join_splits_kernel(Product<T, O> p) {
    __shared__ real partial[WIDTH][THREADS];
    const unsigned i = WIDTH * element();
    real sums[WIDTH] = {}, part[WIDTH];
#pragma unroll 4
    for (int split = threadIdx.y; split < p.splits && i < p.elements; split += blockDim.y) {
        load_chunk<real, WIDTH>(part, p.parts, split * p.elements + i);
        for (int j = 0; j < WIDTH; j++)
            sums[j] += part[j];
    }
    for (int j = 0; j < WIDTH; j++)
        partial[j][threadIdx.y * blockDim.x + threadIdx.x] = sums[j];
    __syncthreads();
    if (threadIdx.y > 0 || i >= p.elements)
        return;
    for (unsigned y = 1; y < blockDim.y; y++)
        for (int j = 0; j < WIDTH; j++)
            sums[j] += partial[j][y * blockDim.x + threadIdx.x];
    const int column = (int)(i % p.columns), at = (int)i - column;
    const Chunk<O, WIDTH> old = p.c.template load_old<WIDTH, WIDTH>(at, column, p.columns);
    p.c.template store<WIDTH, WIDTH>(at, column, p.columns, sums, old);
}

/* ---- Launches. Where C has too few tiles to occupy a GPU, K is split among blocks (split-K): into
   as many parts as have together at most MOST_TILES tiles of 64 x 64, and at most one for each
   LEAST_DEPTH of K. The partial sums are added in a fixed order. This depends on the shapes alone,
   so all tiles of a kernel compute the same bits. */
enum { MOST_TILES = 512, LEAST_DEPTH = 256, VARIANTS = 4 };

static size_t splits_of(size_t rows, size_t columns, size_t phases, size_t depth) {
    const size_t tiles = ceil_div(rows, 64) * ceil_div(columns, 64) * phases;
    return min(max(MOST_TILES / tiles, (size_t)1), ceil_div(depth, LEAST_DEPTH));
}

static bool stores_moments(const Layer *conv, size_t n) {
    if (!conv || conv->bias_count > 0)
        return false;
    const size_t pixels = n * conv->out.h * conv->out.w, depth = conv->weight_count / conv->out.c;
    return pixels % CONV_SLICE == 0 && splits_of(pixels, conv->out.c, 1, depth) == 1;
}

static size_t moments_size(const Layer *conv, size_t n) {
    return 2 * ceil_div(n * conv->out.h * conv->out.w, CONV_SLICE) * conv->out.c;
}

// An upper bound on the size of all splits' sums, for up to these rows and this depth
static size_t parts_size(size_t rows, size_t columns, size_t depth) {
    return min(ceil_div(depth, LEAST_DEPTH) * rows * columns, (size_t)MOST_TILES * 64 * 64);
}

// A kernel for a product, and its tile. All variants sum in the same order.
template <class T, class O> struct Variant {
    void (*kernel)(Product<T, O> p);
    size_t m, n, threads, bytes; // of a block; bytes: of its dynamic shared memory
};

template <class Tile, class T, class O>
static Variant<T, O> variant_of(void (*kernel)(Product<T, O> p)) {
    return {kernel, Tile::M, Tile::N, Tile::TILE_THREADS, Tile::DYNAMIC_BYTES};
}

template <class T, class O>
static void launch_gemm(const Variant<T, O> &v, const Product<T, O> &p) {
    const size_t tiles = ceil_div(p.rows, v.m) * ceil_div(p.columns, v.n);
    const dim3 grid(tiles, 1, p.splits * p.phases.stride * p.phases.stride);
    auto *gemm_kernel = v.kernel;
    LAUNCH_GRID(gemm_kernel, grid, v.threads, v.bytes, p);
    if (p.splits == 1)
        return;
    const size_t width = p.columns % 4 == 0 ? 4 : 1;
    auto *join_splits = width == 4 ? join_splits_kernel<4, T, O> : join_splits_kernel<1, T, O>;
    size_t lines = 1; // of threads, for the splits: each has at least 4, if there are as many
    while (lines < WARP && 8 * lines <= (size_t)p.splits)
        lines *= 2;
    const size_t across = THREADS / lines;
    LAUNCH_GRID(join_splits, (unsigned)ceil_div(p.elements / width, across), dim3(across, lines), 0,
                p);
}

// # EXTRA  --autotune on: the variant with the least mean time of 3 launches, after one to load it.
template <Pass PASS, class T, class O>
static size_t fastest(const Variant<T, O> (&variants)[VARIANTS], size_t usual,
                      const Product<T, O> &p, const char *layer) {
    static const char *const passes[] = {"forward", "data gradient", "weight gradient"};
    double seconds[VARIANTS] = {};
    size_t best = usual;
    for (size_t i = 1; i < VARIANTS; i++) {
        launch_gemm(variants[i], p);
        mark(TUNING_MARKS);
        for (int launch = 0; launch < 3; launch++)
            launch_gemm(variants[i], p);
        mark(TUNING_MARKS + 1);
        seconds[i] = elapsed(TUNING_MARKS, TUNING_MARKS + 1) / 3;
    }
    for (size_t i = 1; i < VARIANTS; i++)
        best = seconds[i] < seconds[best] ? i : best;
    if (variants[best].kernel != variants[usual].kernel && replica == 0)
        printf("Autotune: %s, %s: tiles of %zu x %zu, %.1f us; of %zu x %zu, %.1f us\n", layer,
               passes[PASS], variants[best].m, variants[best].n, 1e6 * seconds[best],
               variants[usual].m, variants[usual].n, 1e6 * seconds[usual]);
    return best;
}

template <class T, class O>
static size_t blocks_of(const Variant<T, O> &v, const Product<T, O> &p) {
    const size_t phases = p.phases.stride * p.phases.stride;
    return ceil_div(p.rows, v.m) * ceil_div(p.columns, v.n) * phases * p.splits;
}

/* The variant that finishes first, if the blocks are spread evenly over the multiprocessors. For
   each k, a tile costs its multiply-adds and, for each number of A and B, about LOADING
   instructions more (7 to 10 in the main loops of gemm_kernel). An example: 128 tiles of 128 x 128
   are done sooner than 256 of 128 x 64 on 132 multiprocessors, but later on 108. */
template <class T, class O>
static size_t quickest(const Variant<T, O> (&variants)[VARIANTS], const Product<T, O> &p,
                       size_t processors) {
    enum { LOADING = 9 };
    size_t chosen = 1, least = SIZE_MAX;
    for (size_t i = 1; i < VARIANTS; i++) {
        const Variant<T, O> &v = variants[i];
        const size_t cost = v.m * v.n + LOADING * (v.m + v.n);
        const size_t time = ceil_div(blocks_of(v, p), processors) * cost;
        chosen = time <= least ? i : chosen;
        least = min(time, least);
    }
    return chosen;
}

/* Queues the product with one of the variants: the first is for operands that cannot be read by
   chunks; of the others, the one expected, or measured, to be the fastest. A result that is
   accumulated cannot be computed repeatedly, to measure. */
template <Pass PASS, class T, class O>
static void gemm(const Variant<T, O> (&variants)[VARIANTS], Product<T, O> p, Work w) {
    const bool by_chunks = (w.l->in.c | w.l->out.c) % Chunk<T>::COUNT == 0;
    p.splits = splits_of(p.rows, p.columns, p.phases.stride * p.phases.stride, p.depth);
    p.parts = w.scratch;
    size_t chosen = by_chunks ? quickest(variants, p, multiprocessors) : 0;
    if (w.autotune && chosen) {
        uint8_t *best = (uint8_t *)w.prepared + PASS; // 0: not measured
        if (*best == 0 && !p.c.accumulate)
            *best = (uint8_t)fastest<PASS>(variants, chosen, p, w.l->name);
        chosen = *best ? *best : chosen;
    }
    launch_gemm(variants[chosen], p);
}

// ---- The operands of the three passes. A number of one digit: the lines or columns of a matrix.
static Axis plain(int apart) {
    return {1, 1, apart};
}

// A filter's positions in an image of h x w x c: image, row, column.
static Axis positions(int rows, int columns, int step, int h, int w, int c) {
    return {rows, columns, h * w * c, step * w * c, step * c, 0, step, 0, step};
}

// The elements of a filter on an image of width w, walked in one direction: row, column, channel.
static Axis taps(int kernel, int c, int direction, int w) {
    return {kernel, c, direction * w * c, direction * c, 1, direction, 0, direction, 0};
}

// The patches of a layer's input under its filter, or their transpose, times a matrix; both results
// have the channels out as columns.
template <class T, class O>
static Product<T, O> patches_times(const void *matrix, void *out, bool forward, Work w) {
    const Window s = window_of(w.l);
    const Axis pixel = positions(s.oh, s.ow, s.stride, s.h, s.w, s.c);
    const Axis tap = taps(s.kernel, s.c, 1, s.w);
    const Axis line = forward ? pixel : tap, k = forward ? tap : pixel;
    const Place corner = {-s.padding * (s.w + 1) * s.c, -s.padding, -s.padding};
    const int pixels = (int)outputs(w) / s.oc, patch_size = (int)w.l->weight_count / s.oc;
    const int rows = forward ? pixels : patch_size, depth = forward ? patch_size : pixels;
    const Operand<T> a = {(const T *)w.in, line, k, corner, s.h, s.w};
    const Operand<T> b = {(const T *)matrix, plain(1), plain(s.oc)};
    const Result<O> c = {(O *)out, plain(s.oc)};
    return {a, b, c, rows, s.oc, depth, (unsigned)(rows * s.oc)};
}

template <class T> static Product<T, T> forward_product(Work w) {
    Product<T, T> p = patches_times<T, T>(w.weight, w.out, true, w);
    p.c.bias = w.bias;
    p.c.relu = w.fused.relu;
    p.moments = w.fused.moments_partner && w.key && stores_moments(w.l, w.n) ? w.moments : NULL;
    return p;
}

template <class T> static Product<T, real> weight_gradient_product(Work w) {
    return patches_times<T, real>(w.dout, w.dweight, false, w);
}

template <class T> static Product<T, T> data_gradient_product(Work w) {
    const Window s = window_of(w.l);
    const int down = (s.h + s.stride - 1) / s.stride, across = (s.w + s.stride - 1) / s.stride;
    const int tap = s.c * s.oc, taps_met = (s.kernel + s.stride - 1) / s.stride;
    Product<T, T> p = {};
    const Axis pixel = positions(down, across, 1, s.oh, s.ow, s.oc);
    p.a = {(const T *)w.dout, pixel, taps(0, s.oc, -1, s.ow), {}, s.oh, s.ow};
    const Axis taps_of_phase = {0, s.oc, s.stride * s.kernel * tap, s.stride * tap, 1};
    p.b = {(const T *)w.weight, plain(s.oc), taps_of_phase};
    p.c = {(T *)w.din, positions(down, across, s.stride, s.h, s.w, s.c), {}, s.h, s.w};
    p.c.accumulate = w.accumulate;
    p.rows = (int)w.n * down * across;
    p.columns = s.c;
    p.depth = taps_met * taps_met * s.oc;
    p.elements = (unsigned)inputs(w);
    p.phases = {s.stride, s.kernel, s.padding, s.c, s.oc};
    return p;
}

struct Tiled {
    template <Pass PASS> static void run(const Product<real, real> &p, Work w) {
        static const Variant<real, real> variants[VARIANTS] = {
            variant_of<SmallTile>(gemm_kernel<SmallTile, PASS, 1>),
            variant_of<SmallTile>(gemm_kernel<SmallTile, PASS, 4>),
            variant_of<NarrowTile>(gemm_kernel<NarrowTile, PASS, 4>),
            variant_of<LargeTile>(gemm_kernel<LargeTile, PASS, 4>)};
        gemm<PASS>(variants, p, w);
    }
};

template <class T, class KERNELS> static void conv2d_forward(Work w) {
    KERNELS::template run<FORWARD>(forward_product<T>(w), w);
}

template <class T, class KERNELS> static void conv2d_backward(Work w) {
    if (w.l->bias_count)
        sum_pixels<T, Gradients<false>>(w);
    KERNELS::template run<WEIGHT_GRADIENT>(weight_gradient_product<T>(w), w);
    if (w.din)
        KERNELS::template run<DATA_GRADIENT>(data_gradient_product<T>(w), w);
}

// Multiply-adds in registers: 8 independent sums per thread, 16 FLOP in each of `steps` iterations.
// Unrolled, 2 % of all instructions are the loop's own, instead of 11 %.
static __global__ void peak_kernel(real *out, int steps) {
    real sums[8], total = 0;
    // They differ between threads, or the compiler would use the warp's scalar unit; 1 would stay 1
    for (int i = 0; i < 8; i++)
        sums[i] = (real)(threadIdx.x + i + 2);
#pragma unroll 32
    for (int step = 0; step < steps; step++)
        for (int i = 0; i < 8; i++)
            sums[i] = sums[i] * (real).999 + (real).001;
    for (int i = 0; i < 8; i++)
        total += sums[i];
    out[element()] = total;
}

// GFLOP/s of this device: the best of longer and longer runs, while it raises its clocks.
static double peak_gflops(void) {
    const size_t threads = (size_t)multiprocessors * 8 * THREADS;
    real *out = (real *)device_alloc(threads * sizeof *out);
    double best = 0;
    int steps = 8;
    for (double spent = 0, s; spent < .1 && out; spent += s, steps *= 2) {
        mark(0);
        LAUNCH(peak_kernel, threads, out, steps);
        mark(1);
        s = elapsed(0, 1);
        best = max(best, 16. * steps * (double)threads / s);
    }
    device_free(out);
    return best / 1e9;
}

/* ==== 7. Convolution, tensor cores ==============================================================

   --kernels tensor: the products of section 6 in tiles of 128 x 128, 128 x 64 or 64 x 64. An
   instruction of a warp, mma, adds the product of 16 x 16 and 16 x 8 16-bit elements (bfloat16 or
   half) to 16 x 8 sums, which are floats; or of 16 x 8 and 8 x 8 floats, of whose mantissas it
   reads 10 bits (tf32). To keep it busy, operands take the shortest way into registers:

     cp.async    copies 16 bytes from global to shared memory, past the registers, and does not
                 wait: the next STAGES - 1 tiles are under way while one is multiplied
     ldmatrix    loads four 8 x 8 matrices of 16-bit elements into the registers of a warp, in the
                 layout that mma expects

   The functions that wrap these instructions are all that differs between GPU and emulator. sm_75
   has no cp.async, and mma for half only: so there the smallest tile alone is compiled, for half,
   and its chunks go through registers. */

#ifndef __HIP__

#ifdef __CUDA_ARCH__
#define COMPILED_SM (__CUDA_ARCH__ / 10)
#else
#define COMPILED_SM 90 // the emulator has all of it
#endif
#if COMPILED_SM < 75 // a GPU without these instructions
#define PTX(emulated, ...)
#elif !defined(CUDA_ON_CPU) // the emulator's own PTX() calls `emulated`
#define PTX(emulated, ...) asm volatile(__VA_ARGS__)
#endif
#if COMPILED_SM < 80
#define PTX_SM_80(emulated, ...)
#else
#define PTX_SM_80 PTX
#endif

// d[16][8] += a[16][16] * b[16][8] of 16-bit elements, a[16][8] * b[8][8] of floats. The layout in
// the lanes' registers is shown at struct Fragments.
static __device__ void mma(__nv_bfloat16, real *d, const uint32_t *a, const uint32_t *b) {
    PTX_SM_80(emu_mma_m16n8k16_bf16(d, a, b, d),
              "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
              "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
              : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
              : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

static __device__ void mma(real, real *d, const uint32_t *a, const uint32_t *b) {
    PTX_SM_80(emu_mma_m16n8k8_tf32(d, a, b, d),
              "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
              "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
              : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
              : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

static __device__ void mma(__half, real *d, const uint32_t *a, const uint32_t *b) {
#if COMPILED_SM < 80 // each half of K by an instruction of its own
#pragma unroll
    for (int half = 0; half < 2; half++)
        PTX(, "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
              "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
#else
    PTX(emu_mma_m16n8k16_f16(d, a, b, d), "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                                          "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Loads four 8 x 8 matrices of 16-bit elements from shared memory: lane i gives the address of row
// i % 8 of matrix i / 8.
static __device__ void ldmatrix(uint32_t *r, const void *row) {
    PTX(emu_ldmatrix_x4(r, row, false),
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
        : "r"((uint32_t)__cvta_generic_to_shared(row))
        : "memory");
}

// The same, and transposes each of them.
static __device__ void ldmatrix_transposed(uint32_t *r, const void *row) {
    PTX(emu_ldmatrix_x4(r, row, true),
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
        : "r"((uint32_t)__cvta_generic_to_shared(row))
        : "memory");
}

// Starts to copy 16 bytes to shared memory; zeros, if not valid.
static __device__ void cp_async(void *to, const void *from, bool valid) {
    PTX_SM_80(emu_cp_async16(to, from, valid ? 16 : 0),
              "cp.async.cg.shared.global [%0], [%1], 16, %2;"
              :
              : "r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from), "r"(valid ? 16 : 0)
              : "memory");
}

// Ends a group of this thread's copies, maybe of none.
static __device__ void cp_async_commit(void) {
    PTX_SM_80(emu_cp_async_commit(), "cp.async.commit_group;" ::: "memory");
}

// Waits until at most PENDING of this thread's groups are incomplete.
template <int PENDING> static __device__ void cp_async_wait(void) {
    PTX_SM_80(emu_cp_async_wait(PENDING), "cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Rounds to the upper 19 bits of a float, tf32, which mma would truncate; NaN and infinity stay.
static __device__ uint32_t round_tf32(uint32_t x) {
    return fabsf(__uint_as_float(x)) < INFINITY ? x + 0x1000 : x;
}

/* LAB 10.0 BEGIN tensor_kernel */
/* ---- Tiles in shared memory. A tile of A or B has lines of 16-byte chunks: ALONG_K, a line is a
   row of A or a column of B and has 8 chunks, the K of one step (64 elements, of floats 32);
   otherwise a line is one k and has as many chunks as the tile's rows or columns fill. */
enum { STAGES = 3, DEPTH_CHUNKS = 8 };

// Warps lie in two columns in a tile of C. BLOCKS fit on a multiprocessor with the 228 KB of shared
// memory of an H100; on one with less, fewer do, and --autotune finds the fastest tile.
template <int M_, int N_, int THREADS_, int BLOCKS_> struct TensorTile {
    enum { M = M_, N = N_, TILE_THREADS = THREADS_, BLOCKS = BLOCKS_ };
    enum { WARP_M = M / (THREADS_ / WARP / 2), WARP_N = N / 2, PITCH = N + 8 };
    enum { CHUNKS = (M + N) * DEPTH_CHUNKS, DYNAMIC_BYTES = STAGES * CHUNKS * 16 };
    static_assert(M * PITCH * sizeof(real) <= DYNAMIC_BYTES, "the sums fit where the tiles were");
};
typedef TensorTile<128, 128, 128, 2> LargeTensorTile;   // 96 KB of shared memory
typedef TensorTile<128, 128, 256, 2> ShallowTensorTile; // 96 KB
typedef TensorTile<128, 64, 128, 3> NarrowTensorTile;   // 72 KB
typedef TensorTile<64, 64, 128, 4> SmallTensorTile;     // 48 KB

/* The position of a chunk in a tile whose lines have PITCH chunks, a multiple of 8. Chunks whose
   positions are equal modulo 8 lie in the same banks. Eight threads that copy a line access 8
   chunks of it, a matrix of ldmatrix is the same chunk of 8 lines: so the chunks of a line are
   permuted, by a key that differs in 8 neighboring lines; in 4 of them even without its lowest
   bit, as floats that are loaded one by one come from 2 chunks of 4 lines. */
template <int PITCH> static __device__ int swizzle(int line, int chunk) {
    return line * PITCH + (chunk ^ (line % 4 * 2 + line / 4 % 2));
}

/* Loads an operand's tile into shared memory, in one of three ways:
   - ASYNC: load() starts to copy; store() has nothing left to do.
   - On sm_75, load() loads into registers, store() stores them.
   - AT_ONCE, where no 16 bytes are aligned (WIDTH 1): load() does both. */
template <class T, int LINES, int LOADERS, bool IMAGE, bool ALONG_K, int WIDTH>
struct TensorLoader {
    enum { CHUNK = Chunk<T>::COUNT, PITCH = ALONG_K ? DEPTH_CHUNKS : LINES / CHUNK };
    enum { AT_ONCE = WIDTH == 1, ASYNC = !AT_ONCE && COMPILED_SM >= TENSOR_SM };
    typedef Walk<T, LINES, DEPTH_CHUNKS * CHUNK, LOADERS, IMAGE, ALONG_K, CHUNK, WIDTH> Chunks;
    Chunks walk;
    Chunk<T> chunks[Chunks::COUNT];
    bool exists; // across K: this thread's lines; else many would load the last one
    __device__ TensorLoader(const Operand<T> &o, int first, int count, int begin)
        : walk(o, first, count, begin), exists(ALONG_K || first + walk.inner < count) {}
    __device__ float4 *at(float4 *tile, int i) const {
        return tile + swizzle<PITCH>(walk.outer + i * Chunks::APART, walk.inner / CHUNK);
    }
    __device__ void store_chunks(float4 *tile) const {
#pragma unroll
        for (int i = 0; i < Chunks::COUNT; i++)
            *(Chunk<T> *)at(tile, i) = chunks[i];
    }
    __device__ void load(const Operand<T> &o, int k, int end, float4 *tile) {
        walk.each(o, k, end, [&](int i, int piece, const T *from, bool inside) {
            const bool valid = inside && exists;
            if (ASYNC)
                cp_async(at(tile, i), valid ? from : o.data, valid);
            else if constexpr (WIDTH > 1)
                chunks[i] = valid ? *(const Chunk<T> *)in_global(from) : Chunk<T>{};
            else
                chunks[i].v[piece] = valid ? *in_global(from) : (T)0.f;
        });
        if (AT_ONCE)
            store_chunks(tile);
    }
    __device__ void store(float4 *tile) const {
        if (!AT_ONCE && !ASYNC)
            store_chunks(tile);
    }
};

/* Loads fragments: 16 rows of A, or 16 columns of B for two mma, by two chunks along K. A fragment
   is four matrices of 8 rows (or columns) by one chunk; lane 4 g + q has the q-th 32 bits, which
   are two neighboring k or one float, of row g of each:

              A   chunk 0   chunk 1              B   chunk 0   chunk 1
     rows 0 to 7    f[0]      f[2]    columns 0 to 7   f[0]      f[1]    first mma
         8 to 15    f[1]      f[3]           8 to 15   f[2]      f[3]    second mma

   Of the sums d of an mma it has rows g (d[0], d[1]) and g + 8 (d[2], d[3]), columns 2 q
   and 2 q + 1. Lanes 8 r to 8 r + 7 give ldmatrix the addresses of the lines of f[r]'s matrix: rows
   or columns; if the tile is not ALONG_K, they are k, and it transposes. An example: A along K, at
   row 64, lane 21 = 16 + 5 gives the address of chunk 1 of row 64 + 5: position 69 * 8 + (1 ^ 3).
   The fragment 16 rows on is 128 chunks on; the one of chunks 2 and 3 is at position ^ 2. */
template <class T, int LINES, bool ALONG_K, bool IS_A> struct Fragments {
    enum { CHUNK = Chunk<T>::COUNT, PITCH = ALONG_K ? DEPTH_CHUNKS : LINES / CHUNK };
    enum { BY_WORDS = !ALONG_K && sizeof(T) == 4 }; // ldmatrix transposes 16-bit elements only
    int place; // of this lane's chunk, or word, at row `first` and k = 0
    __device__ Fragments(int first) {
        const int lane = threadIdx.x % WARP;
        const bool lines_first = ALONG_K == IS_A;
        const int line = lines_first ? lane % 16 : lane / 16 * 8 + lane % 8;
        const int chunk = lines_first ? lane / 16 : lane / 8 % 2;
        if (BY_WORDS)
            place = swizzle<PITCH>(lane % 4, (first + lane / 4) / 4) * 4 + lane / 4 % 4;
        else
            place = ALONG_K ? swizzle<PITCH>(first + line, chunk)
                            : swizzle<PITCH>(line, first / CHUNK + chunk);
    }
    // f = the fragment 16 * i rows on, at the pair-th two chunks of K.
    __device__ void load(uint32_t *f, const float4 *tile, int i, int pair) const {
        if constexpr (ALONG_K) {
            ldmatrix(f, tile + (place ^ 2 * pair) + 16 * i * PITCH);
        } else if constexpr (!BY_WORDS) {
            ldmatrix_transposed(f, tile + (place ^ 2 * i) + 16 * pair * PITCH);
        } else {
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int eight = IS_A ? r % 2 : r / 2, four = IS_A ? r / 2 : r % 2;
                const uint32_t *words = (const uint32_t *)(tile + (8 * pair + 4 * four) * PITCH);
                f[r] = words[place ^ 4 * (4 * i + 2 * eight + four)];
            }
        }
        if constexpr (sizeof(T) == 4)
#pragma unroll
            for (int r = 0; r < 4; r++)
                f[r] = round_tf32(f[r]);
    }
};

// Puts a warp's sums into shared memory, where its part of the tile begins. A lane has two
// neighbors in rows lane / 4 and lane / 4 + 8 of each fragment.
template <class Tile, int M, int N>
static __device__ void store_sums(real *to, const real (&sums)[M][N][4]) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < 2 * M; i++)
#pragma unroll
        for (int j = 0; j < N; j++)
            *(float2 *)(to + (i * 8 + lane / 4) * Tile::PITCH + j * 8 +
                        lane % 4 * 2) = {sums[i / 2][j][i % 2 * 2], sums[i / 2][j][i % 2 * 2 + 1]};
    __syncthreads(); // for the threads that read them
}

// Stores the sums of a tile of C, which lie in shared memory, in chunks of 16 bytes. A thread
// requests AHEAD of the chunks that it adds to before it waits for the first.
template <class Tile, int WIDTH, class O>
static __device__ void store_tile(const Result<O> &c, const real *sums, const Job &job, int rows,
                                  int columns) {
    enum { CHUNK = Chunk<O>::COUNT, ACROSS = Tile::N / CHUNK, APART = Tile::TILE_THREADS / ACROSS };
    enum { AHEAD = 4 };
    static_assert(Tile::M % (AHEAD * APART) == 0, "threads have equally many rows");
    const int own = threadIdx.x % ACROSS * CHUNK, column = job.column + own;
    Digits row = c.line.digits(job.row + threadIdx.x / ACROSS), step = c.line.digits(APART);
    for (int i = threadIdx.x / ACROSS; i < Tile::M; i += AHEAD * APART) {
        int at[AHEAD];
        Chunk<O> old[AHEAD];
#pragma unroll
        for (int r = 0; r < AHEAD; r++) {
            at[r] = job.row + i + r * APART < rows ? c.at(row) : -1;
            old[r] = c.template load_old<WIDTH, CHUNK>(at[r], column, columns);
            c.line.add(row, step);
        }
#pragma unroll
        for (int r = 0; r < AHEAD; r++) {
            real chunk[CHUNK];
            load_fours<CHUNK, 4>(chunk, sums + (i + r * APART) * Tile::PITCH + own);
            c.template store<WIDTH, CHUNK>(at[r], column, columns, chunk, old[r]);
        }
    }
}

// Two floats, rounded to a type: a GPU converts two to 16 bits as fast as one.
static __device__ float2 rounded(real, float2 x) {
    return x;
}

static __device__ float2 rounded(__nv_bfloat16, float2 x) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x.x, x.y);
    return {__low2float(pair), __high2float(pair)};
}

static __device__ float2 rounded(__half, float2 x) {
    const __half2 pair = __floats2half2_rn(x.x, x.y);
    return {__low2float(pair), __high2float(pair)};
}

/* partial[slice][0][column] = mean, partial[slice][1][column] = sum of squared distances from it,
   of the elements as they are stored. Rows are whole slices, which no other tile shares. */
template <class Tile, class O>
static __device__ void store_moments(real *partial, const real *sums, const Job &job, int rows,
                                     int columns) {
    for (int i = threadIdx.x; i < Tile::M / CONV_SLICE * Tile::N; i += Tile::TILE_THREADS) {
        const int row = i / Tile::N * CONV_SLICE, column = job.column + i % Tile::N;
        const real *from = sums + row * Tile::PITCH + i % Tile::N;
        real *to = partial + (job.row + row) / CONV_SLICE * 2 * columns + column;
        if (job.row + row >= rows || column >= columns)
            continue;
        Moments moments = {rounded(O(), {from[0], 0}).x};
#pragma unroll 8
        for (int j = 0; j < CONV_SLICE; j += 2, from += 2 * Tile::PITCH) {
            const float2 pair = rounded(O(), {from[0], from[Tile::PITCH]});
            moments.add(0, pair.x);
            moments.add(0, pair.y);
        }
        const Sum sum = Moments::of_slice(CONV_SLICE, moments.shift, moments.a, moments.b);
        to[0] = sum.a;
        to[columns] = sum.b;
    }
}

/* C = A * B over the K of this split, as gemm_kernel computes it, for elements T; C of O. While one
   step's tile is multiplied, the tile of STAGES - 1 steps later is copied to the last one's place.
   A warp loads the fragments of its 64 x 64 elements of C, 8 of them for 32 mma (64 x 32, 32 x 32
   in the smaller tiles; 32 x 64 in the shallow one, 6 fragments for 16 mma). Finally the sums go
   through shared memory, so that neighboring threads store neighboring chunks; lines are padded
   by 8 numbers, so that a warp uses different banks.
   Registers: at most 255 in the large tile (for 2 blocks per multiprocessor), 168 in the narrow one
   and where WIDTH is 1 (3), 128 in the small one (4) and the shallow one (2). In the main loop of
   the large tile, 16 bits, 24 to 30 % of the instructions are mma.
   Grid: tiles x 1 x splits * phases, of TILE_THREADS.   Shared memory: 384 (Tile::M + Tile::N)
   bytes.   Traffic: K (M N / Tile::N + M N / Tile::M) + M N elements, mostly from the L2 cache */
template <class Tile, Pass PASS, int WIDTH, class T, class O>
static __global__ void __launch_bounds__(Tile::TILE_THREADS, WIDTH == 1 ? 3 : Tile::BLOCKS)
    tensor_kernel(Product<T, O> p) {
    constexpr bool on_sm_75 =
        std::is_same<T, __half>::value && std::is_same<Tile, SmallTensorTile>::value;
    if (COMPILED_SM < (on_sm_75 ? HALF_SM : TENSOR_SM))
        return; // never launched there: the code for such GPUs is empty
    extern __shared__ __align__(128) float4 tiles[];
    enum { DEPTH = DEPTH_CHUNKS * Chunk<T>::COUNT, TILE_A = Tile::M * DEPTH_CHUNKS };
    enum { FRAGMENTS_M = Tile::WARP_M / 16, FRAGMENTS_N = Tile::WARP_N / 16 };
    const Job job = job_of_block<Tile, PASS>(p, DEPTH);
    using LoaderA = TensorLoader<T, Tile::M, Tile::TILE_THREADS, true, A_ALONG_K<PASS>, WIDTH>;
    using LoaderB = TensorLoader<T, Tile::N, Tile::TILE_THREADS, false, B_ALONG_K<PASS>, WIDTH>;
    LoaderA of_a(p.a, job.row, p.rows, job.begin);
    LoaderB of_b(p.b, job.column, p.columns, job.begin);
    const int warp = threadIdx.x / WARP;
    const int row = warp / 2 * Tile::WARP_M, column = warp % 2 * Tile::WARP_N;
    Fragments<T, Tile::M, A_ALONG_K<PASS>, true> fragments_a(row);
    Fragments<T, Tile::N, B_ALONG_K<PASS>, false> fragments_b(column);
    real sums[FRAGMENTS_M][2 * FRAGMENTS_N][4] = {};
    int next = job.begin; // k of the next tile to be loaded
    const auto load_next = [&](int stage) {
        float4 *tile = tiles + stage * Tile::CHUNKS;
        if (next < job.end) {
            of_a.load(p.a, next, job.end, tile);
            of_b.load(p.b, next, job.end, tile + TILE_A);
        }
        cp_async_commit();
    };
    const auto store_next = [&](int stage) {
        float4 *tile = tiles + stage * Tile::CHUNKS;
        if (next < job.end) {
            of_a.store(tile);
            of_b.store(tile + TILE_A);
        }
        next += DEPTH;
    };
    for (int stage = 0; stage < STAGES - 1; stage++) {
        load_next(stage);
        store_next(stage);
    }
    for (int k = job.begin, stage = 0; k < job.end; k += DEPTH) {
        cp_async_wait<STAGES - 2>(); // this thread's part of the tile at k is there;
        __syncthreads();             // the other threads', too, and the tile before it was read,
        const int previous = stage > 0 ? stage - 1 : STAGES - 1; // whose memory is free
        load_next(previous);
        const float4 *tile = tiles + stage * Tile::CHUNKS;
        stage = stage < STAGES - 1 ? stage + 1 : 0;
#pragma unroll
        for (int pair = 0; pair < DEPTH_CHUNKS / 2; pair++) {
            uint32_t x[FRAGMENTS_M][4], y[FRAGMENTS_N][4];
#pragma unroll
            for (int i = 0; i < FRAGMENTS_M; i++)
                fragments_a.load(x[i], tile, i, pair);
#pragma unroll
            for (int j = 0; j < FRAGMENTS_N; j++)
                fragments_b.load(y[j], tile + TILE_A, j, pair);
#pragma unroll
            for (int i = 0; i < FRAGMENTS_M; i++)
#pragma unroll
                for (int j = 0; j < 2 * FRAGMENTS_N; j++)
                    mma(T(), sums[i][j], x[i], y[j / 2] + j % 2 * 2);
        }
        store_next(previous);
    }
    real *staged = (real *)tiles;
    __syncthreads(); // the last tile has been read
    store_sums<Tile>(staged + row * Tile::PITCH + column, sums);
    if (PASS == FORWARD && p.moments)
        store_moments<Tile, O>(p.moments, staged, job, p.rows, p.columns);
    if (p.splits > 1)
        store_tile<Tile, WIDTH>(part_of(p, job.split), staged, job, p.rows, p.columns);
    else
        store_tile<Tile, WIDTH>(p.c, staged, job, p.rows, p.columns);
}

// Twice as many warps hide twice as much waiting, for the first tiles and for what is added to, but
// load 1.5 times as many fragments. On an H100 that pays off up to this K, before it is split.
enum { SHALLOW = 768 };

struct Tensor {
    template <class Tile, Pass PASS, int WIDTH, class T, class O> static Variant<T, O> variant() {
        return variant_of<Tile>(tensor_kernel<Tile, PASS, WIDTH, T, O>);
    }
    template <Pass PASS, class T, class O> static void run(const Product<T, O> &p, Work w) {
        enum { WIDTH = Chunk<T>::COUNT };
        enum Table { DEEP_TABLE, SHALLOW_TABLE, SM_75_TABLE, TABLES };
        const auto single = variant<SmallTensorTile, PASS, 1, T, O>();
        const auto small = variant<SmallTensorTile, PASS, WIDTH, T, O>();
        const auto narrow = variant<NarrowTensorTile, PASS, WIDTH, T, O>();
        const auto large = variant<LargeTensorTile, PASS, WIDTH, T, O>();
        const auto shallow = variant<ShallowTensorTile, PASS, WIDTH, T, O>();
        const Variant<T, O> tables[TABLES][VARIANTS] = {{single, small, narrow, large},
                                                        {single, small, narrow, shallow},
                                                        {single, small, small, small}};
        static thread_local bool allowed[MAX_REPLICAS][TABLES]; // by device
        const Table by_depth = p.depth > SHALLOW ? DEEP_TABLE : SHALLOW_TABLE;
        const Table table = architecture >= TENSOR_SM ? by_depth : SM_75_TABLE;
        for (size_t i = 0; i < VARIANTS && !allowed[device][table]; i++)
            CHECK(cudaFuncSetAttribute(tables[table][i].kernel,
                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       (int)tables[table][i].bytes));
        allowed[device][table] = true;
        gemm<PASS>(tables[table], p, w);
    }
};
/* LAB 10.0 END */

// The template arguments of make_kernels() for a precision and its kernels
#define CONV2D_OF(T, KERNELS) T, conv2d_forward<T, KERNELS>, conv2d_backward<T, KERNELS>

#endif // __HIP__

/* ==== 8. The tables ============================================================================

   The tables of functions that cnn.c calls: Device, Kernels and Work in cnn.c explain them. */

// Memory for the sums of slices, and for a product's splits where there are any. Kernels count with
// 32-bit numbers, so a tensor must have fewer than 2^31 elements.
static size_t scratch_size(const Layer *l, const Fusion *, size_t n) {
    size_t sums = 2 * SUM_SLICES * l->out.c, taps = l->kernel_size * l->kernel_size;
    size_t in_pixels = n * l->in.h * l->in.w, out_pixels = n * l->out.h * l->out.w;
    if (max(in_pixels * l->in.c, out_pixels * l->out.c) >> 31)
        fail(1, "layer %s: %zu images have 2^31 or more numbers; use a smaller batch size", l->name,
             n);
    if (!has_weight_matrix(l))
        return l->kind == BATCHNORM2D ? sums : 0;
    size_t parts = max(parts_size(out_pixels, l->out.c, taps * l->in.c),
                       max(parts_size(taps * l->in.c, l->out.c, out_pixels),
                           parts_size(in_pixels, l->in.c, taps * l->out.c)));
    return max(parts, sums);
}

enum { LANES_Y = 8 };

/* to[image][column][row] = from[image][row][column], through a tile in shared memory, so that both
   sides are coalesced; += if accumulate. A line of the tile is padded by one number, so that the
   threads that read a column use different banks.   Grid: images * columns / 32 x rows / 32, of
   32 x LANES_Y threads; y and z are at most 65535.   Traffic: 2 N elements */
template <class T>
static __global__ void transpose_kernel(T *to, const T *from, unsigned rows, unsigned columns,
                                        bool accumulate) {
    __shared__ real tile[WARP][WARP + 1];
    const unsigned across = (columns + WARP - 1) / WARP; // blocks of an image
    const size_t image = (size_t)(blockIdx.x / across) * rows * columns;
    const unsigned first_row = blockIdx.y * WARP, first_column = blockIdx.x % across * WARP;
    for (unsigned y = threadIdx.y; y < WARP; y += LANES_Y)
        if (first_row + y < rows && first_column + threadIdx.x < columns)
            tile[y][threadIdx.x] =
                (real)from[image + (first_row + y) * columns + first_column + threadIdx.x];
    __syncthreads();
    for (unsigned y = threadIdx.y; y < WARP; y += LANES_Y)
        if (first_column + y < columns && first_row + threadIdx.x < rows) {
            T *out = to + image + (first_column + y) * rows + first_row + threadIdx.x;
            *out = (T)(tile[threadIdx.x][y] + (accumulate ? (real)*out : 0));
        }
}

// Between [n][pixels][channels] and [n][channels][pixels]: to_nchw, or back; = or, with add, +=.
template <class T>
static void transpose(void *to, const void *from, size_t n, Shape s, bool to_nchw, bool add) {
    const size_t rows = to_nchw ? s.h * s.w : s.c, columns = to_nchw ? s.c : s.h * s.w;
    dim3 grid(n * ceil_div(columns, WARP), ceil_div(rows, WARP)), block(WARP, LANES_Y);
    LAUNCH_GRID(transpose_kernel<T>, grid, block, 0, (T *)to, (const T *)from, rows, columns, add);
}

/* --layout nchw: the kernels of convolutions and linear layers expect NHWC, so their operands and
   results are transposed, as cuDNN does when its tensor-core kernels are given NCHW. # NHWC */
template <class T, void (*RUN)(Work), bool FORWARD> static void in_nhwc(Work w) {
    const size_t size = ceil_div(inputs(w), 64) * 64;
    T *memory = (T *)w.transposed;
    Work inner = w;
    if (!w.transposed)
        return RUN(w);
    inner.transposed = NULL;
    inner.accumulate = false;
    inner.in = (real *)memory;
    transpose<T>(memory, w.in, w.n, w.unflattened, false, false);
    if (FORWARD) {
        inner.out = (real *)(memory + size);
    } else {
        inner.din = w.din ? (real *)(memory + size) : NULL;
        inner.dout = (real *)(memory + 2 * size);
        transpose<T>(inner.dout, w.dout, w.n, w.l->out, false, false);
    }
    RUN(inner);
    if (FORWARD)
        transpose<T>(w.out, inner.out, w.n, w.l->out, true, false);
    else if (w.din)
        transpose<T>(w.din, inner.din, w.n, w.unflattened, true, w.accumulate);
}

// A row of the table keeps the numbers of the variants that --autotune has chosen, a byte per pass.
static size_t prepared_bytes(const Layer *l) {
    return has_weight_matrix(l) ? PASSES : 0;
}

// Returns the elements that in_nhwc() needs for a row: its input twice, and its output.
static size_t transposed_size(const Layer *l, size_t n) {
    const size_t input = ceil_div(n * shape_size(l->in), 64) * 64;
    return has_weight_matrix(l) ? 2 * input + n * shape_size(l->out) : 0;
}

// Returns the definition's operations: 2 for each multiply-add of forward and of each gradient.
static double flops(Work w) {
    const double forward = 2. * (double)(w.n * w.l->weight_count * w.l->out.h * w.l->out.w);
    return has_weight_matrix(w.l) ? forward * (w.din ? 3 : 2) : 0;
}

static Device make_device(void) {
    Device d = {};
    d.is_gpu = true;
    d.count = device_count;
    d.use = use;
    d.describe = describe;
    d.alloc = device_alloc;
    d.release = device_free;
    d.pinned_alloc = pinned_alloc;
    d.pinned_release = pinned_free;
    d.copy = copy;
    d.clear = clear;
    d.set_step = set_step;
    d.transfer = transfer;
    d.receive = receive;
    d.synchronize = synchronize;
    d.mark = mark;
    d.elapsed = elapsed;
    d.wait = wait;
    d.begin_capture = begin_capture;
    d.end_capture = end_capture;
    d.replay = replay;
    d.free_graph = free_graph;
    d.peak_gflops = peak_gflops;
    d.nsight_range = range;
    d.record = record;
    return d;
}

static const Device gpu_device = make_device();

// What the kernels of row `target` compute as well. EPILOGUE: a convolution's tile passes the ReLU
// before it is stored.
template <bool EPILOGUE>
static RowMode fuse(const Layer *target, const Fusion *fused, const Layer *l) {
    const bool applies_relu =
        target->kind == BATCHNORM2D || (EPILOGUE && has_weight_matrix(target));
    if (l->kind == DROPOUT)
        return IN_PLACE;
    if (l->kind == RELU)
        return applies_relu && !fused->relu ? FUSED_INTO_EARLIER : IN_PLACE;
    if (l->kind == ADD && target->kind == BATCHNORM2D && !fused->relu && !fused->add)
        return FUSED_INTO_EARLIER;
    return SEPARATE;
}

// T: the type of activations and their gradients; FORWARD, BACKWARD: of convolutions
template <class T, void (*FORWARD)(Work), void (*BACKWARD)(Work)>
static Kernels make_kernels(KernelsChoice choice, Precision precision) {
    Kernels k = {};
    k.device = &gpu_device;
    k.choice = choice;
    k.precision = precision;
    k.element_bytes = sizeof(T);
    // of each kind of layer: forward, backward
    k.layers[CONV2D] = {in_nhwc<T, FORWARD, true>,
                        backward_of_fused<T, in_nhwc<T, BACKWARD, false>>};
    k.layers[LINEAR] = k.layers[CONV2D]; // a linear layer is a convolution on 1 x 1 pixel
    k.layers[BATCHNORM2D] = {batchnorm2d_forward<T>, backward_of_fused<T, batchnorm2d_backward<T>>};
    k.layers[RELU].forward = sizeof(T) == 4 ? relu_forward : each<add_forward_kernel<T>, packs<T>>;
    k.layers[RELU].backward = each<add_backward_kernel<T, true>, packs<T>>;
    k.layers[MAXPOOL2D] = {each<maxpool2d_forward_kernel<T>, outputs>, maxpool2d_backward<T>};
    k.layers[GLOBAL_AVGPOOL2D].forward = each<global_avgpool2d_forward_kernel<T>, outputs>;
    k.layers[GLOBAL_AVGPOOL2D].backward = each<global_avgpool2d_backward_kernel<T>, inputs>;
    k.layers[ADD] = {each<add_forward_kernel<T>, packs<T>>,
                     backward_of_fused<T, each<add_backward_kernel<T, false>, packs<T>>>};
    k.layers[DROPOUT] = {dropout_forward<T>, each<dropout_backward_kernel<T>, packs<T>>};
    k.layers[LOG_SOFTMAX].forward = each<log_softmax_forward_kernel<T>, lanes>;
    k.layers[LOG_SOFTMAX].backward = each<log_softmax_backward_kernel<T>, lanes>;
    k.fuse = choice == NAIVE ? fuse<false> : fuse<true>;
    k.moments_size = choice == TENSOR ? moments_size : no_size;
    k.scratch_size = scratch_size;
    k.transposed_size = transposed_size;
    k.prepared_bytes = prepared_bytes;
    k.prepare = prepare_nothing;
    k.flops = flops;
    k.nll_loss = nll_loss;
    k.update[ADADELTA] = update<T, Adadelta>;
    k.update[SGD] = update<T, Sgd>;
    k.to_16_bit = to_16_bit<T>;
    k.count_not_finite = count_not_finite;
    k.adjust_scale = adjust_scale;
    k.load_images = load_images<T>;
    k.gather = gather<T>;
    return k;
}

// Returns the i-th kernels, then NULL. Of kernels with the same choice or precision, the preferred
// come last.
extern "C" const Kernels *cuda_kernels(size_t i) {
    static const Kernels kernels[] = {
        make_kernels<real, conv2d_forward_naive, conv2d_backward_naive>(NAIVE, FP32),
        make_kernels<CONV2D_OF(real, Tiled)>(TILED, FP32),
        make_kernels<CONV2D_OF(__half, Tensor)>(TENSOR, FP16),
        make_kernels<CONV2D_OF(__nv_bfloat16, Tensor)>(TENSOR, BF16),
        make_kernels<CONV2D_OF(real, Tensor)>(TENSOR, TF32),
    };
    return i < sizeof kernels / sizeof *kernels ? &kernels[i] : NULL;
}
