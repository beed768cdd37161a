/* cnn_kernels.cu - everything that cnn runs on a GPU, by hand: no cuDNN, no cuBLAS, no Thrust.

   A GPU runs a kernel on thousands of threads. They come in blocks of THREADS; the threads of a
   block share a little fast memory (__shared__) and can wait for each other (__syncthreads()). 32
   of them, a warp, are run together. Neighbouring threads should read neighbouring numbers: then
   one transfer of memory serves all of a warp.

   In reading order:
      1 Errors and devices       every CUDA call is checked; streams; memory; copies
      2 Element by element       ReLU, add, dropout, pooling, optimizers, the loader's work
      3 Sums over pixels         BatchNorm, gradients of biases
      4 Softmax and loss         one warp an image
      5 Convolution, naive       one thread an output: the CPU's loops
      6 Convolution, tiled       a matrix product through shared memory
      7 The table of the backend

   Each kernel is preceded by what it computes, its grid, and its memory traffic: the bytes that it
   must move at least, N standing for the numbers of its output. Kernels without a word on their
   grid have one thread an element.
   Rules: results never depend on the order in which threads run (no floating-point atomics), so
   the same seed gives the same bits; no thread leaves before a barrier; and for the emulator, one
   __shared__ array a line, template arguments written out at a launch. Only the declarations of
   cnn.c are read here, which are C and C++ alike. */

#define CNN_DECLARATIONS_ONLY
#include "cnn.c"

#include <cuda_runtime.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static_assert(sizeof(real) == sizeof(float), "the kernels are written for 32-bit floats");

/* ==== 1. Errors and devices =====================================================================

   One host thread computes for one replica, on one device. Its work is queued on the replica's
   stream and done in order; copies by other threads, the loader's and those that communicate, have
   streams of their own, so that they overlap with it. */

enum { THREADS = 256, WARP = 32 };

static void (*fail)(int status, const char *format, ...); // die() of cnn.c
static cudaStream_t streams[MAX_REPLICAS];
static cudaEvent_t events[MAX_REPLICAS][MARKS];
static thread_local size_t replica; // that this host thread computes for
static thread_local int device;     // that it uses

static void check(cudaError_t error, const char *call, int line) {
    if (error != cudaSuccess)
        fail(1,
             "cnn_kernels.cu:%d: device %d: %s: %s (%s); if a kernel is to blame, it may be an "
             "earlier one: run again with CUDA_LAUNCH_BLOCKING=1 to see which",
             line, device, call, cudaGetErrorString(error), cudaGetErrorName(error));
}
#define CHECK(call) check(call, #call, __LINE__)
#define CHECK_LAUNCH() check(cudaGetLastError(), "the kernel launched here", __LINE__)
// Queues a kernel with `threads` threads, in as many blocks as that takes.
#define LAUNCH(kernel, threads, ...)                            \
    do {                                                        \
        unsigned blocks = (unsigned)ceil_div(threads, THREADS); \
        kernel<<<blocks, THREADS, 0, stream()>>>(__VA_ARGS__);  \
        CHECK_LAUNCH();                                         \
    } while (0)

static cudaStream_t stream(void) {
    return streams[replica];
}

// a / b, rounded up
static size_t ceil_div(size_t a, size_t b) {
    return (a + b - 1) / b;
}

// How many GPUs there are; 0 and the reason, if none can be used.
extern "C" size_t cuda_device_count(const char **reason) {
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    *reason = error == cudaSuccess ? "no device" : cudaGetErrorString(error);
    return error == cudaSuccess && count > 0 ? (size_t)count : 0;
}

static __global__ void add_kernel(real *out, const real *in, unsigned count, bool relu);

// This host thread computes for replica r on device `which`. on_error ends the program.
extern "C" void cuda_use_device(size_t r, size_t which, void (*on_error)(int, const char *, ...)) {
    fail = on_error;
    replica = r;
    device = (int)which;
    CHECK(cudaSetDevice(device));
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, (const void *)add_kernel) != cudaSuccess)
        fail(1,
             "device %d: this program was built for other GPUs; run: make clean && make "
             "CUDA_ARCH=native, on this machine, or use --no-cuda",
             device);
    if (streams[replica])
        return;
    CHECK(cudaStreamCreateWithFlags(&streams[replica], cudaStreamNonBlocking));
    for (size_t i = 0; i < MARKS; i++)
        CHECK(cudaEventCreate(&events[replica][i]));
}

// Name, memory and the like of this thread's device.
extern "C" void cuda_describe(Device *d) {
    cudaDeviceProp p;
    int driver = 0;
    size_t bytes = 0, total = 0;
    CHECK(cudaGetDeviceProperties(&p, device));
    CHECK(cudaDriverGetVersion(&driver));
    CHECK(cudaMemGetInfo(&bytes, &total));
    snprintf(d->name, sizeof d->name, "%.200s, sm_%d%d, %d multiprocessors, %.1f GB", p.name,
             p.major, p.minor, p.multiProcessorCount, (double)total / 1e9);
    snprintf(d->driver, sizeof d->driver, "CUDA %d.%d", driver / 1000, driver % 1000 / 10);
    char *to = d->uuid + snprintf(d->uuid, sizeof d->uuid, "GPU");
    for (int i = 0; i < 16; i++) // as nvidia-smi writes it
        to += snprintf(to, 4, i == 0 || (i >= 4 && i <= 10 && i % 2 == 0) ? "-%02x" : "%02x",
                       (unsigned char)p.uuid.bytes[i]);
    d->memory = .95 * (double)bytes; // CUDA itself takes some later, for kernels and streams
#ifdef CUDA_ON_CPU
    d->emulated = true;
#endif
}

// Zeroed memory of the device; NULL when there is not enough.
static void *device_alloc(size_t bytes) {
    void *memory = NULL;
    if (cudaMalloc(&memory, bytes + 16) != cudaSuccess) {
        cudaGetLastError(); // forgets the error: the caller names what did not fit
        return NULL;
    }
    CHECK(cudaMemsetAsync(memory, 0, bytes + 16, stream()));
    CHECK(cudaStreamSynchronize(stream()));
    return memory;
}

static void device_free(void *memory) {
    CHECK(cudaFree(memory));
}

// Memory of the host. Pinned, the device reads it without the driver's help, and at full speed.
static void *host_alloc(size_t bytes, bool pinned) {
    void *memory = NULL;
    bytes += 16; // none is a size as well
    if (!pinned)
        return calloc(1, bytes);
    if (cudaMallocHost(&memory, bytes) != cudaSuccess) {
        cudaGetLastError(); // as in device_alloc()
        return NULL;
    }
    return memset(memory, 0, bytes);
}

static void host_free(void *memory, bool pinned) {
    if (pinned)
        CHECK(cudaFreeHost(memory));
    else
        free(memory);
}

// In order with the kernels; when it returns, memory of the host may be read and written again.
static void copy(void *to, const void *from, size_t bytes) {
    if (bytes == 0)
        return;
    CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream()));
    cudaPointerAttributes a, b;
    CHECK(cudaPointerGetAttributes(&a, to));
    CHECK(cudaPointerGetAttributes(&b, from));
    if (a.type != cudaMemoryTypeDevice || b.type != cudaMemoryTypeDevice)
        CHECK(cudaStreamSynchronize(stream()));
}

// A stream of this host thread's own on device `which`, for copies beside the kernels there.
static cudaStream_t own_stream(size_t which) {
    static thread_local cudaStream_t own;
    device = (int)which;
    CHECK(cudaSetDevice(device));
    if (!own)
        CHECK(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking));
    return own;
}

// For other threads than the one that computes: over when it returns, beside the kernels.
static void transfer(size_t which, void *to, const void *from, size_t bytes) {
    cudaStream_t own = own_stream(which);
    CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, own));
    CHECK(cudaStreamSynchronize(own));
}

// to = from, or to += from by way of room, like transfer().   Traffic of the kernel: 12 N bytes
static void receive(size_t which, real *to, const real *from, size_t count, bool add, real *room) {
    cudaStream_t own = own_stream(which);
    if (count == 0)
        return;
    // between two devices this is cudaMemcpyPeerAsync()
    CHECK(cudaMemcpyAsync(add ? room : to, from, count * sizeof *to, cudaMemcpyDefault, own));
    if (add)
        add_kernel<<<(unsigned)ceil_div(count, THREADS), THREADS, 0, own>>>(to, room, count, false);
    CHECK_LAUNCH();
    CHECK(cudaStreamSynchronize(own));
}

static void synchronize(void) {
    CHECK(cudaStreamSynchronize(stream()));
}

// The device notes the time when it gets there, to about half a microsecond.
static void mark(size_t i) {
    CHECK(cudaEventRecord(events[replica][i], stream()));
}

// Until replica r's device has come to mark i; any thread may wait.
static void wait(size_t r, size_t i) {
    CHECK(cudaEventSynchronize(events[r][i]));
}

// Seconds; waits for the later mark.
static double elapsed(size_t from, size_t to) {
    float milliseconds = 0;
    wait(replica, to);
    CHECK(cudaEventElapsedTime(&milliseconds, events[replica][from], events[replica][to]));
    return 1e-3 * (double)milliseconds;
}

#ifdef CUDA_ON_CPU // no Nsight there
#define cudaProfilerStart() cudaSuccess
#define cudaProfilerStop() cudaSuccess
#else
#include <cuda_profiler_api.h>
#if __has_include(<nvtx3/nvToolsExt.h>) // some installations have CUDA without it
#define HAVE_NVTX
#include <nvtx3/nvToolsExt.h>
#endif
#endif

// Named ranges of this host thread's time, which Nsight Systems shows above the kernels.
static void range(const char *name) {
#ifdef HAVE_NVTX
    static thread_local bool open;
    if (open)
        nvtxRangePop();
    if (name)
        nvtxRangePushA(name);
    open = name != NULL;
#else
    (void)name;
#endif
}

// nsys --capture-range=cudaProfilerApi and ncu --profile-from-start off record only while it is on.
static void record(bool on) {
    CHECK(on ? cudaProfilerStart() : cudaProfilerStop());
}

#ifdef CNN_NCCL
#include <nccl.h>

static ncclComm_t group; // of this process, which has one device

static void check_nccl(ncclResult_t result, const char *call, int line) {
    if (result != ncclSuccess)
        fail(1, "cnn_kernels.cu:%d: device %d: %s: %s; NCCL_DEBUG=INFO tells more", line, device,
             call, ncclGetErrorString(result));
}
#define CHECK_NCCL(call) check_nccl(call, #call, __LINE__)

extern "C" void cuda_nccl_id(char id[NCCL_ID_BYTES]) {
    ncclUniqueId unique;
    static_assert(sizeof unique == NCCL_ID_BYTES, "NCCL has other names for groups");
    CHECK_NCCL(ncclGetUniqueId(&unique));
    memcpy(id, &unique, sizeof unique);
}

extern "C" void cuda_nccl_join(const char id[NCCL_ID_BYTES], size_t rank, size_t world) {
    ncclUniqueId unique;
    memcpy(&unique, id, sizeof unique);
    CHECK_NCCL(ncclCommInitRank(&group, (int)world, unique, (int)rank));
}

static double seconds(void) {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

extern "C" bool cuda_all_reduce(size_t which, real *data, size_t count, double timeout) {
    cudaStream_t own = own_stream(which);
    double begin = seconds();
    cudaError_t state;
    CHECK_NCCL(ncclAllReduce(data, data, count, ncclFloat, ncclSum, group, own));
    while ((state = cudaStreamQuery(own)) == cudaErrorNotReady && seconds() < begin + timeout)
        sched_yield();
    if (state != cudaErrorNotReady)
        CHECK(state);
    return state == cudaSuccess;
}
#endif

/* ==== 2. Element by element =====================================================================

   Memory is the limit here: a few operations for each number that is read. */

// Which element is this thread's. 32 bits do (see scratch_size()), and divide faster than 64.
static __device__ unsigned element(void) {
    return blockIdx.x * blockDim.x + threadIdx.x;
}

/* LAB 4.1 BEGIN relu_forward */
// out = max(in, 0); a NaN stays a NaN.   Traffic: 8 N bytes
static __global__ void relu_forward_kernel(real *out, const real *in, unsigned count) {
    unsigned i = element();
    if (i < count)
        out[i] = in[i] < 0 ? 0 : in[i];
}

static void relu_forward(real *out, const real *in, size_t count) {
    LAUNCH(relu_forward_kernel, count, out, in, count);
}
/* LAB 4.1 END */

// din = dout where out > 0, else 0; += if accumulate.   Traffic: 12 N bytes
static __global__ void relu_backward_kernel(real *din, const real *dout, const real *out,
                                            unsigned count, bool accumulate) {
    unsigned i = element();
    if (i < count)
        din[i] = (out[i] > 0 ? dout[i] : 0) + (accumulate ? din[i] : 0);
}

static void relu_backward(real *din, const real *dout, const real *out, size_t count,
                          bool accumulate) {
    LAUNCH(relu_backward_kernel, count, din, dout, out, count, accumulate);
}

// out += in, then ReLU if asked.   Traffic: 12 N bytes
static __global__ void add_kernel(real *out, const real *in, unsigned count, bool relu) {
    unsigned i = element();
    if (i < count) {
        real sum = out[i] + in[i];
        out[i] = relu && sum < 0 ? 0 : sum;
    }
}

static void add(real *out, const real *in, size_t count, bool relu) {
    LAUNCH(add_kernel, count, out, in, count, relu);
}

/* out = in / (1 - p), or 0 where the image's Philox numbers say so: the same masks as on the CPU.
   One thread does the 8 elements that share a Philox block.   Traffic: 9 N bytes */
static __global__ void dropout_forward_kernel(real *out, uint8_t *mask, const real *in,
                                              unsigned size, unsigned blocks_of_image, unsigned n,
                                              real scale, uint32_t threshold, uint32_t purpose,
                                              Draw draw) {
    unsigned image = element() / blocks_of_image, block = element() % blocks_of_image;
    if (image >= n)
        return;
    uint32_t bits[4];
    philox4x32(bits, (uint32_t)block, (uint32_t)position_of(draw, image), (uint32_t)draw.epoch,
               purpose, draw.seed);
#pragma unroll // so that bits[] stays in registers
    for (unsigned j = 0; j < 8; j++) {
        unsigned i = image * size + block * 8 + j;
        bool kept = (bits[j / 2] >> (16 * (j % 2)) & 0xffff) >= threshold;
        if (block * 8 + j < size) {
            mask[i] = kept;
            out[i] = kept ? in[i] * scale : 0;
        }
    }
}

static void dropout_forward(real *out, uint8_t *mask, const real *in, const Layer *l, size_t n,
                            uint32_t purpose, const Draw *draw) {
    size_t size = l->out.h * l->out.w * l->out.c, blocks_of_image = (size + 7) / 8;
    LAUNCH(dropout_forward_kernel, n * blocks_of_image, out, mask, in, size, blocks_of_image, n,
           1 / (1 - l->p), (uint32_t)lround((double)l->p * 65536), purpose, *draw);
}

// din = dout / (1 - p) where the mask is set, else 0; += if accumulate.   Traffic: 9 N bytes
static __global__ void dropout_backward_kernel(real *din, const real *dout, const uint8_t *mask,
                                               unsigned count, real scale, bool accumulate) {
    unsigned i = element();
    if (i < count)
        din[i] = dout[i] * (mask[i] ? scale : 0) + (accumulate ? din[i] : 0);
}

static void dropout_backward(real *din, const real *dout, const uint8_t *mask, const Layer *l,
                             size_t n, bool accumulate) {
    size_t count = n * l->out.h * l->out.w * l->out.c;
    LAUNCH(dropout_backward_kernel, count, din, dout, mask, count, 1 / (1 - l->p), accumulate);
}

// The sizes of a layer as kernels see them: 32-bit numbers, which a GPU divides faster.
struct Window {
    int h, w, c, oh, ow, oc, kernel, stride, padding;
};

static Window window_of(const Layer *l) {
    return {(int)l->in.h,  (int)l->in.w,   (int)l->in.c,   (int)l->out.h,  (int)l->out.w,
            (int)l->out.c, (int)l->kernel, (int)l->stride, (int)l->padding};
}

// An output element's parts: element = ((image * height + y) * width + x) * channels + c
struct Spot {
    int image, y, x, c;
};

static __device__ Spot spot_of(unsigned i, unsigned height, unsigned width, unsigned channels) {
    unsigned pixel = i / channels, row = pixel / width;
    return {(int)(row / height), (int)(row % height), (int)(pixel % width), (int)(i % channels)};
}

// The input pixel that output pixel o meets at a tap of its window; below 0: it is outside.
static __device__ int met_pixel(const Window &s, const Spot &o, int tap) {
    int y = o.y * s.stride + tap / s.kernel - s.padding;
    int x = o.x * s.stride + tap % s.kernel - s.padding;
    bool inside = y >= 0 && y < s.h && x >= 0 && x < s.w;
    return inside ? (o.image * s.h + y) * s.w + x : -1;
}

// The reverse: the output pixel that meets input pixel p at a tap; below 0: none does.
static __device__ int meeting_pixel(const Window &s, const Spot &p, int tap) {
    int y = p.y + s.padding - tap / s.kernel, x = p.x + s.padding - tap % s.kernel;
    bool meets = y >= 0 && x >= 0 && y % s.stride == 0 && x % s.stride == 0 &&
                 y / s.stride < s.oh && x / s.stride < s.ow;
    return meets ? (p.image * s.oh + y / s.stride) * s.ow + x / s.stride : -1;
}

/* out = the largest number under the window, argmax = where it is: i * kernel + j, the first one.
   A NaN wins.   Traffic: 4 (stride^2 + 1) N + N bytes */
static __global__ void maxpool2d_forward_kernel(real *out, uint8_t *argmax, const real *in,
                                                Window s, unsigned count) {
    unsigned i = element();
    if (i >= count)
        return;
    Spot o = spot_of(i, s.oh, s.ow, s.oc);
    real best = -INFINITY;
    int arg = 0;
    for (int tap = 0; tap < s.kernel * s.kernel; tap++) {
        int pixel = met_pixel(s, o, tap);
        real value = pixel >= 0 ? in[pixel * s.c + o.c] : -INFINITY;
        if (value > best || value != value) {
            best = value;
            arg = tap;
        }
    }
    out[i] = best;
    argmax[i] = (uint8_t)arg;
}

static void maxpool2d_forward(real *out, uint8_t *argmax, const real *in, const Layer *l,
                              size_t n) {
    size_t count = n * l->out.h * l->out.w * l->out.c;
    LAUNCH(maxpool2d_forward_kernel, count, out, argmax, in, window_of(l), count);
}

/* din = sum of dout over the windows whose maximum this pixel was; += if accumulate. One thread an
   input, which looks at the windows that cover it: no two threads add to one number.
   Traffic: 4 N + 5 N / stride^2 bytes */
static __global__ void maxpool2d_backward_kernel(real *din, const real *dout, const uint8_t *argmax,
                                                 Window s, unsigned count, bool accumulate) {
    unsigned i = element();
    if (i >= count)
        return;
    Spot p = spot_of(i, s.h, s.w, s.c);
    real sum = accumulate ? din[i] : 0;
    for (int tap = 0; tap < s.kernel * s.kernel; tap++) {
        int pixel = meeting_pixel(s, p, tap), at = pixel * s.oc + p.c;
        sum += pixel >= 0 && argmax[at] == tap ? dout[at] : 0;
    }
    din[i] = sum;
}

static void maxpool2d_backward(real *din, const real *dout, const uint8_t *argmax, const Layer *l,
                               size_t n, bool accumulate) {
    size_t count = n * l->in.h * l->in.w * l->in.c;
    LAUNCH(maxpool2d_backward_kernel, count, din, dout, argmax, window_of(l), count, accumulate);
}

// out[n][c] = mean over the pixels.   Traffic: 4 (pixels + 1) N bytes
static __global__ void avgpool2d_forward_kernel(real *out, const real *in, int pixels, int channels,
                                                unsigned count) {
    unsigned i = element();
    if (i >= count)
        return;
    const real *from = in + i / channels * pixels * channels + i % channels;
    real sum = 0;
    for (int p = 0; p < pixels; p++)
        sum += from[p * channels];
    out[i] = sum / pixels;
}

static void avgpool2d_forward(real *out, const real *in, const Layer *l, size_t n) {
    size_t count = n * l->in.c;
    LAUNCH(avgpool2d_forward_kernel, count, out, in, (int)(l->in.h * l->in.w), (int)l->in.c, count);
}

// din[n][pixel][c] = dout[n][c] / pixels; += if accumulate.   Traffic: 4 N bytes
static __global__ void avgpool2d_backward_kernel(real *din, const real *dout, int pixels,
                                                 int channels, unsigned count, bool accumulate) {
    unsigned i = element();
    if (i < count)
        din[i] = dout[i / channels / pixels * channels + i % channels] / pixels +
                 (accumulate ? din[i] : 0);
}

static void avgpool2d_backward(real *din, const real *dout, const Layer *l, size_t n,
                               bool accumulate) {
    size_t pixels = l->in.h * l->in.w, count = n * pixels * l->in.c;
    LAUNCH(avgpool2d_backward_kernel, count, din, dout, (int)pixels, (int)l->in.c, count,
           accumulate);
}

/* ---- Optimizers: the formulas stand in cnn.c, room 9. One launch goes over as many parameters as
   it is given: all of them, or those of a tensor (--optimizer-launch).   Traffic: 28 N bytes */
static __global__ void adadelta_kernel(real *param, const real *grad, real *square_avg,
                                       real *acc_delta, unsigned count, real lr, real rho, real eps,
                                       real weight_decay) {
    unsigned i = element();
    if (i >= count)
        return;
    real g = grad[i] + weight_decay * param[i];
    real square = square_avg[i] = rho * square_avg[i] + (1 - rho) * g * g;
    real delta = sqrtf(acc_delta[i] + eps) / sqrtf(square + eps) * g;
    acc_delta[i] = rho * acc_delta[i] + (1 - rho) * delta * delta;
    param[i] -= lr * delta;
}

static void adadelta(real *param, const real *grad, real *square_avg, real *acc_delta, size_t count,
                     double lr, double rho, double eps, double weight_decay) {
    LAUNCH(adadelta_kernel, count, param, grad, square_avg, acc_delta, count, (real)lr, (real)rho,
           (real)eps, (real)weight_decay);
}

// Traffic: 20 N bytes with momentum, 12 N without
static __global__ void sgd_kernel(real *param, const real *grad, real *momentum_buffer,
                                  unsigned count, real lr, real momentum, real weight_decay,
                                  bool nesterov) {
    unsigned i = element();
    if (i >= count)
        return;
    real g = grad[i] + weight_decay * param[i], step = g;
    if (momentum > 0) {
        step = momentum_buffer[i] = momentum * momentum_buffer[i] + g;
        step = nesterov ? g + momentum * step : step;
    }
    param[i] -= lr * step;
}

static void sgd(real *param, const real *grad, real *momentum_buffer, size_t count, double lr,
                double momentum, double weight_decay, bool nesterov) {
    LAUNCH(sgd_kernel, count, param, grad, momentum_buffer, count, (real)lr, (real)momentum,
           (real)weight_decay, nesterov);
}

/* ---- The loader's work, where the data set lies on the device: pick the batch's images by the
   epoch's permutation, augment and normalise them. */

// A byte of an image; black outside of it.
static __device__ real pixel_at(const uint8_t *image, Shape s, int y, int x, int c) {
    bool inside = y >= 0 && x >= 0 && y < (int)s.h && x < (int)s.w;
    return inside ? image[(y * s.w + x) * s.c + c] : 0;
}

/* out[n][h][w][c] = normalised[c][byte]; with crop_flip from where augment_crop_flip() of cnn.c
   takes it; and the labels.   Traffic: 5 N bytes */
static __global__ void gather_kernel(real *out, uint8_t *labels, Resident r, Draw draw, int n) {
    unsigned size = r.shape.h * r.shape.w * r.shape.c, i = element();
    if (i >= n * size)
        return;
    Spot o = spot_of(i, r.shape.h, r.shape.w, r.shape.c);
    size_t position = position_of(draw, o.image), image = r.order[position];
    int y = o.y, x = o.x;
    if (r.augment == AUGMENT_CROP_FLIP) {
        uint32_t bits[4];
        philox4x32(bits, 0, (uint32_t)position, (uint32_t)draw.epoch, DRAW_AUGMENT, draw.seed);
        y += (int)(bits[0] % (2 * CROP_PADDING + 1)) - CROP_PADDING;
        x = (bits[2] & 1 ? (int)r.shape.w - 1 - x : x) + (int)(bits[1] % (2 * CROP_PADDING + 1)) -
            CROP_PADDING;
    }
    out[i] = r.normalised[o.c * 256 + (int)pixel_at(r.images + image * size, r.shape, y, x, o.c)];
    if (i % size == 0)
        labels[o.image] = r.labels[image];
}

// to = from blurred along rows or columns: the sum of weights[|d|] * from[i + d]
static __device__ void blur(real *to, const real *from, const float *weights, Shape s, bool rows) {
    int h = (int)s.h, w = (int)s.w;
    for (int i = threadIdx.x; i < h * w; i += THREADS) {
        real sum = 0;
        for (int d = -ELASTIC_REACH; d <= ELASTIC_REACH; d++) {
            int y = i / w + (rows ? 0 : d), x = i % w + (rows ? d : 0);
            if (y >= 0 && x >= 0 && y < h && x < w)
                sum = fmaf(weights[d < 0 ? -d : d], from[y * w + x], sum);
        }
        to[i] = sum;
    }
    __syncthreads();
}

/* The elastic distortion: augment_elastic() of cnn.c. One block an image; the field and its blurred
   copies stay in shared memory.   Grid: n blocks.   Traffic: 5 N bytes */
static __global__ void gather_elastic_kernel(real *out, uint8_t *labels, Resident r, Draw draw) {
    extern __shared__ real fields[]; // down, right, and room to blur them
    int pixels = (int)(r.shape.h * r.shape.w), w = (int)r.shape.w, channels = (int)r.shape.c;
    size_t position = position_of(draw, blockIdx.x), image = r.order[position];
    real *room = fields + 2 * pixels;
    for (int i = threadIdx.x; i < 2 * pixels; i += THREADS) {
        uint32_t bits[4];
        int field = i / pixels, at = i % pixels;
        philox4x32(bits, (uint32_t)(1 + field * pixels + at / 4 * 4), (uint32_t)position,
                   (uint32_t)draw.epoch, DRAW_AUGMENT, draw.seed);
        fields[i] = ELASTIC_ALPHA * (2 * uniform(bits[at % 4]) - 1);
    }
    __syncthreads();
    for (int field = 0; field < 2; field++) {
        blur(room, fields + field * pixels, r.blur, r.shape, true);
        blur(fields + field * pixels, room, r.blur, r.shape, false);
    }
    const uint8_t *bytes = r.images + image * pixels * channels;
    for (int i = threadIdx.x; i < pixels * channels; i += THREADS) {
        int pixel = i / channels, c = i % channels;
        real y = pixel / w + fields[pixel], x = pixel % w + fields[pixels + pixel];
        real down = y - floorf(y), right = x - floorf(x);
        int top = (int)floorf(y), left = (int)floorf(x);
        real above = fmaf(right, pixel_at(bytes, r.shape, top, left + 1, c),
                          (1 - right) * pixel_at(bytes, r.shape, top, left, c));
        real below = fmaf(right, pixel_at(bytes, r.shape, top + 1, left + 1, c),
                          (1 - right) * pixel_at(bytes, r.shape, top + 1, left, c));
        int byte = (int)fmaf(down, below, fmaf(1 - down, above, .5f));
        out[blockIdx.x * pixels * channels + i] = r.normalised[c * 256 + byte];
    }
    if (threadIdx.x == 0)
        labels[blockIdx.x] = r.labels[image];
}

static void gather(real *out, uint8_t *labels, const Resident *r, const Draw *draw, size_t n) {
    size_t pixels = r->shape.h * r->shape.w;
    if (r->augment != AUGMENT_ELASTIC)
        LAUNCH(gather_kernel, n * pixels * r->shape.c, out, labels, *r, *draw, n);
    else
        gather_elastic_kernel<<<(unsigned)n, THREADS, 3 * pixels * sizeof(real), stream()>>>(
            out, labels, *r, *draw);
    CHECK_LAUNCH();
}

/* ==== 3. Sums over pixels =======================================================================

   BatchNorm and a bias's gradient need, for each channel, sums over all pixels of the batch. They
   are taken in three levels, each in one fixed order: a thread goes through every 8th pixel of a
   slice; the 8 threads of a channel join theirs in shared memory; a second kernel joins slices, a
   warp a channel. Blocks of the first have 32 x 8 threads: x is the channel, so a warp reads 32
   neighbouring numbers. */

enum { LANES_Y = 8, SUM_SLICES = 512 };

// The lanes of a warp join by shuffles, which hand a register to another lane: after 5 exchanges
// all lanes hold the sum, or the largest.
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

// x: 32 channels a block; y: as many slices as 64 pixels each allow, at most SUM_SLICES.
static dim3 sum_grid(size_t pixels, size_t channels) {
    return dim3(ceil_div(channels, WARP), min(ceil_div(pixels, 64), (size_t)SUM_SLICES));
}

// The first pixel of a slice.
static __device__ unsigned slice_start(unsigned pixels, unsigned slice, unsigned slices) {
    return (unsigned)((size_t)pixels * slice / slices);
}

/* partial[slice][0][c] = sum of d, partial[slice][1][c] = sum of d * (x - mean), over the slice's
   pixels; the mean is in stats. x NULL: the first sum only.   Grid: channels / 32 x slices.
   Traffic: 4 or 8 bytes for each number of d */
static __global__ void column_sums_kernel(real *partial, const real *d, const real *x,
                                          const real *stats, unsigned pixels, int channels) {
    __shared__ real sums[LANES_Y][WARP];
    __shared__ real products[LANES_Y][WARP];
    int c = blockIdx.x * WARP + threadIdx.x;
    unsigned first = slice_start(pixels, blockIdx.y, gridDim.y) + threadIdx.y;
    unsigned end = slice_start(pixels, blockIdx.y + 1, gridDim.y);
    real sum = 0, product = 0, mean = x && c < channels ? stats[2 * channels + c] : 0;
    for (unsigned p = first; p < end && c < channels; p += LANES_Y) {
        real value = d[p * channels + c];
        sum += value;
        product += x ? value * (x[p * channels + c] - mean) : 0;
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    products[threadIdx.y][threadIdx.x] = product;
    __syncthreads();
    if (threadIdx.y > 0 || c >= channels)
        return;
    for (int i = 1; i < LANES_Y; i++) {
        sum += sums[i][threadIdx.x];
        product += products[i][threadIdx.x];
    }
    partial[(2 * blockIdx.y) * channels + c] = sum;
    partial[(2 * blockIdx.y + 1) * channels + c] = product;
}

/* dbias[c] = sum over slices of the first sums; dweight[c] = of the second ones, times stats' 1 /
   sqrt(variance + eps); no dweight where it is NULL.   One warp a channel */
static __global__ void join_sums_kernel(real *dbias, real *dweight, const real *partial,
                                        const real *stats, int slices, int channels) {
    int c = element() / WARP, lane = threadIdx.x % WARP;
    if (c >= channels) // a whole warp, so nobody waits for it
        return;
    real sum = 0, product = 0;
    for (int slice = lane; slice < slices; slice += WARP) {
        sum += partial[2 * slice * channels + c];
        product += partial[(2 * slice + 1) * channels + c];
    }
    sum = warp_sum(sum);
    product = warp_sum(product);
    if (lane == 0)
        dbias[c] = sum;
    if (lane == 0 && dweight)
        dweight[c] = product * stats[3 * channels + c];
}

// Both kernels; without x and stats, which BatchNorm has, dbias only.
static void column_sums(real *dbias, real *dweight, const real *d, const real *x, const real *stats,
                        size_t pixels, int channels, real *scratch) {
    dim3 grid = sum_grid(pixels, channels), block(WARP, LANES_Y);
    column_sums_kernel<<<grid, block, 0, stream()>>>(scratch, d, x, stats, pixels, channels);
    CHECK_LAUNCH();
    LAUNCH(join_sums_kernel, channels * WARP, dbias, dweight, scratch, stats, grid.y, channels);
}

static void bias_gradient(real *dbias, const real *dout, const Layer *l, size_t n, real *scratch) {
    size_t pixels = n * l->out.h * l->out.w;
    if (l->biases)
        column_sums(dbias, NULL, dout, NULL, NULL, pixels, (int)l->out.c, scratch);
}

// A count, its mean and the sum of squared distances from it; joined without cancellation (Chan,
// Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing variances", 1979).
struct Moments {
    real count, mean, squares;
};

static __device__ Moments join(Moments a, Moments b) {
    real count = a.count + b.count, d = b.mean - a.mean;
    if (b.count == 0)
        return a;
    return {count, a.mean + d * (b.count / count),
            a.squares + b.squares + d * d * (a.count * b.count / count)};
}

/* partial[slice][0][c] = mean, partial[slice][1][c] = squares of the slice's pixels.
   Grid: channels / 32 x slices.   Traffic: 4 bytes for each number of in */
static __global__ void moments_kernel(real *partial, const real *in, int pixels, int channels) {
    __shared__ Moments moments[LANES_Y][WARP];
    int c = blockIdx.x * WARP + threadIdx.x;
    unsigned first = slice_start(pixels, blockIdx.y, gridDim.y) + threadIdx.y;
    unsigned end = slice_start(pixels, blockIdx.y + 1, gridDim.y);
    Moments m = {0, 0, 0};
    for (unsigned p = first; p < end && c < channels; p += LANES_Y)
        m = join(m, {1, in[p * channels + c], 0});
    moments[threadIdx.y][threadIdx.x] = m;
    __syncthreads();
    if (threadIdx.y > 0 || c >= channels)
        return;
    for (int i = 1; i < LANES_Y; i++)
        m = join(m, moments[i][threadIdx.x]);
    partial[(2 * blockIdx.y) * channels + c] = m.mean;
    partial[(2 * blockIdx.y + 1) * channels + c] = m.squares;
}

static const real bn_eps = 1e-5f, bn_momentum = 0.1f;

/* Joins the slices of a channel; stats as in batchnorm2d_forward() of cnn.c: running mean and
   variance, then the batch's mean and 1 / sqrt(variance + eps).   One warp a channel */
static __global__ void batchnorm_statistics_kernel(real *stats, const real *partial,
                                                   unsigned pixels, int slices, int channels) {
    int c = element() / WARP, lane = threadIdx.x % WARP;
    if (c >= channels)
        return;
    Moments m = {0, 0, 0};
    for (int slice = lane; slice < slices; slice += WARP) {
        unsigned pixels_of_slice =
            slice_start(pixels, slice + 1, slices) - slice_start(pixels, slice, slices);
        m = join(m, {(real)pixels_of_slice, partial[2 * slice * channels + c],
                     partial[(2 * slice + 1) * channels + c]});
    }
    for (int other = WARP / 2; other > 0; other /= 2) // at last lane 0 has joined all
        m = join(m, {__shfl_down_sync(0xffffffffu, m.count, other),
                     __shfl_down_sync(0xffffffffu, m.mean, other),
                     __shfl_down_sync(0xffffffffu, m.squares, other)});
    if (lane > 0)
        return;
    real unbiased = m.squares / (m.count > 1 ? m.count - 1 : 1);
    real *running_mean = stats, *running_variance = stats + channels;
    running_mean[c] = (1 - bn_momentum) * running_mean[c] + bn_momentum * m.mean;
    running_variance[c] = (1 - bn_momentum) * running_variance[c] + bn_momentum * unbiased;
    stats[2 * channels + c] = m.mean;
    stats[3 * channels + c] = 1 / sqrtf(m.squares / m.count + bn_eps);
}

/* out = (in - mean) * weight / sqrt(variance + eps) + bias, + residual unless that is NULL, ReLU if
   asked.   Traffic: 8 N bytes, 12 N with a residual */
static __global__ void batchnorm_apply_kernel(real *out, const real *in, const real *stats,
                                              const real *weight, const real *bias,
                                              const real *residual, unsigned count, int channels,
                                              bool training, bool relu) {
    unsigned i = element(), c = i % channels;
    if (i >= count)
        return;
    real mean = training ? stats[2 * channels + c] : stats[c];
    real inverse = training ? stats[3 * channels + c] : 1 / sqrtf(stats[channels + c] + bn_eps);
    real value = (in[i] - mean) * (weight[c] * inverse) + bias[c] + (residual ? residual[i] : 0);
    out[i] = relu && value < 0 ? 0 : value;
}

static void batchnorm2d_forward(real *out, real *stats, const real *in, const real *weight,
                                const real *bias, const real *residual, const Layer *l, size_t n,
                                bool training, real *scratch) {
    size_t pixels = n * l->in.h * l->in.w, count = pixels * l->in.c;
    int channels = (int)l->in.c;
    if (training) {
        dim3 grid = sum_grid(pixels, channels), block(WARP, LANES_Y);
        moments_kernel<<<grid, block, 0, stream()>>>(scratch, in, pixels, channels);
        CHECK_LAUNCH();
        LAUNCH(batchnorm_statistics_kernel, l->in.c * WARP, stats, scratch, pixels, grid.y,
               channels);
    }
    LAUNCH(batchnorm_apply_kernel, count, out, in, stats, weight, bias, residual, count, channels,
           training, (l->add ? l->add : l)->fused_relu);
}

/* din = weight * inverse * (dout - dbias / m - x * dweight / m), over m pixels, where
   x = (in - mean) * inverse, dbias = sum of dout, dweight = sum of dout * x; += if accumulate.
   Traffic: 12 N bytes */
static __global__ void batchnorm_backward_kernel(real *din, const real *dout, const real *in,
                                                 const real *stats, const real *weight,
                                                 const real *dweight, const real *dbias,
                                                 unsigned count, int channels, bool accumulate) {
    unsigned i = element(), c = i % channels;
    if (i >= count)
        return;
    real m = (real)(count / channels), inverse = stats[3 * channels + c];
    real x = (in[i] - stats[2 * channels + c]) * inverse;
    real d = weight[c] * inverse * (dout[i] - dbias[c] / m - x * (dweight[c] / m));
    din[i] = d + (accumulate ? din[i] : 0);
}

static void batchnorm2d_backward(real *din, real *dweight, real *dbias, const real *dout,
                                 const real *in, const real *stats, const real *weight,
                                 const Layer *l, size_t n, bool accumulate, real *scratch) {
    size_t pixels = n * l->in.h * l->in.w, count = pixels * l->in.c;
    int channels = (int)l->in.c;
    column_sums(dbias, dweight, dout, in, stats, pixels, channels, scratch);
    if (din)
        LAUNCH(batchnorm_backward_kernel, count, din, dout, in, stats, weight, dweight, dbias,
               count, channels, accumulate);
}

/* ==== 4. Softmax and loss =======================================================================

   One warp an image: its lanes take every 32nd class, and join their results as in room 3. */

/* out[k] = in[k] - largest - log(sum of exp(in[j] - largest)).   Grid: THREADS / 32 images a block.
   Traffic: 8 N bytes */
static __global__ void log_softmax_forward_kernel(real *out, const real *in, int n, int classes) {
    int image = element() / WARP, lane = threadIdx.x % WARP;
    if (image >= n) // a whole warp, so nobody waits for it
        return;
    real largest = -INFINITY, sum = 0;
    for (int k = lane; k < classes; k += WARP)
        largest = fmaxf(largest, in[image * classes + k]);
    largest = warp_max(largest);
    for (int k = lane; k < classes; k += WARP)
        sum += expf(in[image * classes + k] - largest);
    real log_sum = largest + logf(warp_sum(sum));
    for (int k = lane; k < classes; k += WARP)
        out[image * classes + k] = in[image * classes + k] - log_sum;
}

static void log_softmax_forward(real *out, const real *in, size_t n, size_t classes) {
    LAUNCH(log_softmax_forward_kernel, n * WARP, out, in, n, (int)classes);
}

// din[k] = dout[k] - exp(out[k]) * sum of dout.   Grid as above.   Traffic: 12 N bytes
static __global__ void log_softmax_backward_kernel(real *din, const real *dout, const real *out,
                                                   int n, int classes) {
    int image = element() / WARP, lane = threadIdx.x % WARP;
    if (image >= n)
        return;
    real sum = 0;
    for (int k = lane; k < classes; k += WARP)
        sum += dout[image * classes + k];
    sum = warp_sum(sum);
    for (int i = image * classes + lane; i < (image + 1) * classes; i += WARP)
        din[i] = dout[i] - expf(out[i]) * sum;
}

static void log_softmax_backward(real *din, const real *dout, const real *out, size_t n,
                                 size_t classes) {
    LAUNCH(log_softmax_backward_kernel, n * WARP, din, dout, out, n, (int)classes);
}

// The formulas stand at nll_loss() of cnn.c. One thread an image.   Traffic: 8 N bytes
static __global__ void nll_loss_kernel(real *losses, real *dlogp, const real *logp,
                                       const uint8_t *labels, unsigned n, unsigned batch,
                                       int classes, real at_label, real elsewhere) {
    unsigned i = element();
    if (i >= n)
        return;
    int label = labels[i];
    real loss = -at_label * logp[i * classes + label];
    for (int k = 0; k < classes && elsewhere > 0; k++)
        loss -= k == label ? 0 : elsewhere * logp[i * classes + k];
    losses[i] = loss;
    for (int k = 0; k < classes && dlogp; k++)
        dlogp[i * classes + k] = -(k == label ? at_label : elsewhere) / (real)batch;
}

static void nll_loss(real *losses, real *dlogp, const real *logp, const uint8_t *labels, size_t n,
                     size_t batch, size_t classes, double smoothing) {
    real elsewhere = (real)(smoothing / (double)classes);
    LAUNCH(nll_loss_kernel, n, losses, dlogp, logp, labels, n, batch, (int)classes,
           (real)(1 - smoothing) + elsewhere, elsewhere);
}

/* ==== 5. Convolution, naive =====================================================================

   --kernels naive: one kernel an operation, in which one thread an output runs the CPU's loops. It
   reads every number from memory each time it needs it, which the caches soften and nothing hides.
   The formulas stand in cnn.c, room 5; a linear layer is a convolution of 1 x 1 pixel. */

/* LAB 4.2 BEGIN add_bias */
// out[n][y][x][k] += bias[k]; count: the numbers of out.   Traffic: 8 N bytes
static __global__ void bias_kernel(real *out, const real *bias, unsigned count, unsigned channels) {
    unsigned i = element();
    if (i < count)
        out[i] += bias[i % channels];
}

static void add_bias(real *out, const real *bias, size_t count, size_t channels) {
    LAUNCH(bias_kernel, count, out, bias, count, channels);
}
/* LAB 4.2 END */

/* LAB 4.3 BEGIN conv2d_sums */
// out[n][y][x][k], without the bias.   Traffic: up to 8 bytes for each multiply-add
static __global__ void conv2d_forward_naive_kernel(real *out, const real *in, const real *weight,
                                                   Window s, unsigned count) {
    unsigned i = element();
    if (i >= count)
        return;
    Spot o = spot_of(i, s.oh, s.ow, s.oc);
    real sum = 0;
    for (int tap = 0; tap < s.kernel * s.kernel; tap++) {
        int pixel = met_pixel(s, o, tap);
        for (int c = 0; pixel >= 0 && c < s.c; c++)
            sum += in[pixel * s.c + c] * weight[(tap * s.c + c) * s.oc + o.c];
    }
    out[i] = sum;
}

static void conv2d_sums(real *out, const real *in, const real *weight, const Layer *l, size_t n) {
    size_t count = n * l->out.h * l->out.w * l->out.c;
    LAUNCH(conv2d_forward_naive_kernel, count, out, in, weight, window_of(l), count);
}
/* LAB 4.3 END */

static void conv2d_forward_naive(real *out, const real *in, const real *weight, const real *bias,
                                 const Layer *l, size_t n, real *) {
    conv2d_sums(out, in, weight, l, n);
    if (bias)
        add_bias(out, bias, n * l->out.h * l->out.w * l->out.c, l->out.c);
}

/* LAB 6.1 BEGIN data_gradient */
// din[n][y][x][c]; += if accumulate.   Traffic: up to 8 bytes for each multiply-add
static __global__ void conv2d_data_gradient_naive_kernel(real *din, const real *dout,
                                                         const real *weight, Window s,
                                                         unsigned count, bool accumulate) {
    unsigned i = element();
    if (i >= count)
        return;
    Spot p = spot_of(i, s.h, s.w, s.c);
    real sum = accumulate ? din[i] : 0;
    for (int tap = 0; tap < s.kernel * s.kernel; tap++) {
        int pixel = meeting_pixel(s, p, tap);
        for (int k = 0; pixel >= 0 && k < s.oc; k++)
            sum += dout[pixel * s.oc + k] * weight[(tap * s.c + p.c) * s.oc + k];
    }
    din[i] = sum;
}

static void data_gradient(real *din, const real *dout, const real *weight, const Layer *l, size_t n,
                          bool accumulate) {
    size_t count = n * l->in.h * l->in.w * l->in.c;
    LAUNCH(conv2d_data_gradient_naive_kernel, count, din, dout, weight, window_of(l), count,
           accumulate);
}
/* LAB 6.1 END */

/* LAB 6.2 BEGIN weight_gradient */
// dweight[tap][c][k]: each thread goes through all pixels.   Traffic: up to 8 bytes a multiply-add
static __global__ void conv2d_weight_gradient_naive_kernel(real *dweight, const real *dout,
                                                           const real *in, Window s, unsigned n,
                                                           unsigned count) {
    unsigned i = element();
    if (i >= count)
        return;
    int k = (int)(i % s.oc), c = (int)(i / s.oc % s.c), tap = (int)(i / s.oc / s.c);
    real sum = 0;
    for (unsigned o = 0; o < n * s.oh * s.ow; o++) {
        int pixel = met_pixel(s, spot_of(o, s.oh, s.ow, 1), tap);
        if (pixel >= 0)
            sum += in[pixel * s.c + c] * dout[o * s.oc + k];
    }
    dweight[i] = sum;
}

static void weight_gradient(real *dweight, const real *dout, const real *in, const Layer *l,
                            size_t n) {
    LAUNCH(conv2d_weight_gradient_naive_kernel, l->weights, dweight, dout, in, window_of(l), n,
           l->weights);
}
/* LAB 6.2 END */

static void conv2d_backward_naive(real *din, real *dweight, real *dbias, const real *dout,
                                  const real *in, const real *weight, const Layer *l, size_t n,
                                  bool accumulate, real *scratch) {
    bias_gradient(dbias, dout, l, n, scratch);
    weight_gradient(dweight, dout, in, l, n);
    if (din)
        data_gradient(din, dout, weight, l, n, accumulate);
}

/* ==== 6. Convolution, tiled =====================================================================

   --kernels tiled: every pass is a matrix product C[M][N] = sum over K of A[M][K] * B[K][N], whose
   A is never built ("implicit GEMM"): its elements are looked up in the image.

     pass              M: rows of C       N: columns     K: summed over      A             B
     forward           n * oh * ow        channels out   taps * channels in  in            weight
     data gradient     n * h * w          channels in    taps * chan. out    dout          weight
     weight gradient   taps * chan. in    channels out   n * oh * ow         in            dout

   A block computes a tile of 128 x 64 numbers of C with 256 threads, 8 x 4 each, in registers. For
   every 16 of K it brings 128 x 16 of A and 16 x 64 of B into shared memory, from where each number
   is used 64 or 128 times: memory is asked 1 / 85 as often as by the naive kernels. While the
   threads multiply, the numbers of the next step are on their way into registers.

   Where C has too few tiles to keep a GPU busy, K is split among blocks; their sums are added
   afterwards, always in the same order. */

enum { TILE_M = 128, TILE_N = 64, TILE_K = 16, ROWS_M = 8, COLUMNS_N = 4 };

/* Where an element of A or B is: the parts that its outer index (M or N) and its inner one (K) give
   are worked out apart, since a thread keeps one of them, and are then added. A line beyond the
   matrix has a y far below 0. */
struct Place {
    int offset, y, x;
};
enum { OUTSIDE = -(1 << 20) };

/* The operands. ALONG_K: a line's numbers lie side by side in memory; otherwise the lines do.

   Matrix<false>: [K][lines], depth unused. Matrix<true>: [K / depth][lines][depth], as the data
   gradient reads the weights: its lines are the channels in, depth the channels out. */
template <bool DEEP> struct Matrix {
    enum { ALONG_K = DEEP };
    const real *data;
    int lines, depth;
    __device__ Place outer(int i) const {
        return {ALONG_K ? i * depth : i, 0, 0};
    }
    __device__ Place inner(int k) const {
        return {ALONG_K ? k / depth * lines * depth + k % depth : k * lines, 0, 0};
    }
    __device__ real at(Place a, Place b) const {
        return a.y < 0 ? 0 : data[a.offset + b.offset];
    }
};

/* An image under a filter. Position (n, y, x) of the other image and tap (i, j) meet the pixel
     (y * step + origin + direction * i) / divisor, x likewise,
   if that is a whole number inside the image. Forward: step = stride, origin = -padding, direction
   = 1, divisor = 1. Data gradient: 1, padding, -1, stride.
   Lines are positions (PIXELS) and K goes over taps and channels, or the other way round (TAPS). */
enum PictureLines { PIXELS, TAPS };

template <PictureLines LINES> struct Picture {
    enum { ALONG_K = LINES == PIXELS };
    const real *data;
    int h, w, channels;    // of this image
    int across, per_image; // positions in a row and in all of the other image
    int kernel, step, origin, direction, divisor;
    __device__ Place position(int i) const {
        int p = i % per_image;
        return {i / per_image * h * w * channels, p / across * step + origin,
                p % across * step + origin};
    }
    __device__ Place tap(int k) const {
        int t = k / channels;
        return {k % channels, direction * (t / kernel), direction * (t % kernel)};
    }
    __device__ real at(Place a, Place b) const {
        int y = a.y + b.y, x = a.x + b.x;
        bool met = y >= 0 && x >= 0;
        if (divisor > 1) {
            met = met && y % divisor == 0 && x % divisor == 0;
            y /= divisor;
            x /= divisor;
        }
        return met && y < h && x < w ? data[a.offset + b.offset + (y * w + x) * channels] : 0;
    }
    __device__ Place outer(int i) const {
        return LINES == PIXELS ? position(i) : tap(i);
    }
    __device__ Place inner(int k) const {
        return LINES == PIXELS ? tap(k) : position(k);
    }
};

/* One thread's share of bringing a tile of LINES x TILE_K numbers into shared memory [k][line].
   Neighbouring threads take what lies side by side in memory: neighbouring k if ALONG_K, and then a
   thread has one k; else neighbouring lines, and a thread has one line. fetch() and put() lie apart
   so that arithmetic can stand between. A line of shared memory is 4 numbers longer than it must
   be: else the threads that store one line's numbers would fall on the same of its 32 banks, and
   wait for each other. */
template <class Operand, int LINES> struct TileLoader {
    enum { ALONG_K = Operand::ALONG_K, COUNT = LINES * TILE_K / THREADS, PITCH = LINES + 4 };
    Place outer[COUNT];
    real numbers[COUNT];
    __device__ TileLoader(const Operand &operand, int first_line, int lines) {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            outer[i] = first_line + line(i) < lines ? operand.outer(first_line + line(i))
                                                    : Place{0, OUTSIDE, 0};
    }
    __device__ static int line(int i) {
        return ALONG_K ? threadIdx.x / TILE_K + i * (THREADS / TILE_K) : threadIdx.x % LINES;
    }
    __device__ static int depth(int i) {
        return ALONG_K ? threadIdx.x % TILE_K : threadIdx.x / LINES + i * (THREADS / LINES);
    }
    __device__ void fetch(const Operand &operand, int k, int end) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            Place inner = operand.inner(k + depth(i));
            numbers[i] = k + depth(i) < end ? operand.at(outer[ALONG_K ? i : 0], inner) : 0;
        }
    }
    __device__ void put(real *tile) const {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            tile[depth(i) * PITCH + line(i)] = numbers[i];
    }
};

// What becomes of a number of C.
struct Epilogue {
    real *out;               // [M][N]; with splits > 1: [split][M][N], and nothing of the following
    const real *bias = NULL; // of a column
    bool relu = false, accumulate = false;
    __device__ void store(unsigned at, int column, real sum) const {
        sum += (bias ? bias[column] : 0) + (accumulate ? out[at] : 0);
        out[at] = relu && sum < 0 ? 0 : sum;
    }
};

/* C = A * B over K from this split's first to its last; the table above says what A and B are.
   Two blocks fit on a multiprocessor: a thread has at most 128 registers.
   Grid: M / 128 x N / 64 x splits.   Shared memory: 2 x (132 + 68) x 16 floats = 25.6 KB.
   Traffic: 4 K (M N / 64 + M N / 128) + 4 M N bytes, most of it served by the L2 cache */
template <class A, class B>
static __global__ void __launch_bounds__(THREADS, 2)
    gemm_kernel(A a, B b, Epilogue e, int rows, int columns, int depth, int depth_of_split) {
    using LoadA = TileLoader<A, TILE_M>;
    using LoadB = TileLoader<B, TILE_N>;
    __shared__ __align__(16) real tile_a[2][TILE_K * LoadA::PITCH]; // read 4 numbers at a time
    __shared__ __align__(16) real tile_b[2][TILE_K * LoadB::PITCH];
    static_assert(LoadA::PITCH % 4 == 0 && LoadB::PITCH % 4 == 0, "lines begin on 16 bytes");
    const int first_row = blockIdx.x * TILE_M, first_column = blockIdx.y * TILE_N;
    const int begin = blockIdx.z * depth_of_split, end = min(begin + depth_of_split, depth);
    LoadA load_a(a, first_row, rows);
    LoadB load_b(b, first_column, columns);
    const int row = threadIdx.x / (TILE_N / COLUMNS_N) * (ROWS_M / 2); // and 64 further down
    const int column = threadIdx.x % (TILE_N / COLUMNS_N) * COLUMNS_N;
    real sums[ROWS_M][COLUMNS_N] = {};
    load_a.fetch(a, begin, end);
    load_b.fetch(b, begin, end);
    for (int k = begin, buffer = 0; k < end; k += TILE_K, buffer ^= 1) {
        load_a.put(tile_a[buffer]);
        load_b.put(tile_b[buffer]);
        __syncthreads(); // the tiles are whole; nobody reads those of the step before last
        load_a.fetch(a, k + TILE_K, end);
        load_b.fetch(b, k + TILE_K, end);
#pragma unroll
        for (int d = 0; d < TILE_K; d++) {
            const real *from_a = tile_a[buffer] + d * LoadA::PITCH + row;
            const float4 low = *(const float4 *)from_a;
            const float4 high = *(const float4 *)(from_a + TILE_M / 2);
            const float4 four = *(const float4 *)(tile_b[buffer] + d * LoadB::PITCH + column);
            const real x[ROWS_M] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            const real y[COLUMNS_N] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < ROWS_M; i++)
#pragma unroll
                for (int j = 0; j < COLUMNS_N; j++)
                    sums[i][j] += x[i] * y[j];
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS_M; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS_N; j++) {
            int m = first_row + row + i % (ROWS_M / 2) + i / (ROWS_M / 2) * (TILE_M / 2),
                n = first_column + column + j;
            if (m < rows && n < columns)
                e.store((blockIdx.z * rows + m) * columns + n, n, sums[i][j]);
        }
}

// out = the sum of all splits, then the epilogue.   Traffic: 4 (splits + 1) N bytes
static __global__ void join_splits_kernel(Epilogue e, const real *parts, int splits, unsigned count,
                                          int columns) {
    unsigned i = element();
    if (i >= count)
        return;
    real sum = 0;
    for (int split = 0; split < splits; split++)
        sum += parts[split * count + i];
    e.store(i, (int)(i % columns), sum);
}

/* How many ways K is split: as long as there are no more than MOST_TILES tiles, about two for each
   multiprocessor of a large GPU, and each has at least 256 of K. By shapes alone, not by the GPU at
   hand, so that all GPUs compute the same bits. */
enum { MOST_TILES = 256, LEAST_DEPTH = 256 };

static size_t gemm_splits(size_t rows, size_t columns, size_t depth) {
    size_t room = MOST_TILES / (ceil_div(rows, TILE_M) * ceil_div(columns, TILE_N));
    return min(max(room, (size_t)1), ceil_div(depth, LEAST_DEPTH));
}

// At least what the sums of all splits take, for these rows or fewer and this depth or less.
static size_t parts_size(size_t rows, size_t columns, size_t depth) {
    return min(ceil_div(depth, LEAST_DEPTH) * rows * columns, (size_t)MOST_TILES * TILE_M * TILE_N);
}

template <class A, class B>
static void gemm(Epilogue e, const A &a, const B &b, size_t rows, size_t columns, size_t depth,
                 real *scratch) {
    size_t splits = gemm_splits(rows, columns, depth);
    size_t depth_of_split = ceil_div(depth, splits * TILE_K) * TILE_K;
    dim3 grid(ceil_div(rows, TILE_M), ceil_div(columns, TILE_N), splits); // y, z: at most 65,535
    gemm_kernel<A, B><<<grid, THREADS, 0, stream()>>>(a, b, splits > 1 ? Epilogue{scratch} : e,
                                                      rows, columns, depth, depth_of_split);
    CHECK_LAUNCH();
    if (splits > 1)
        LAUNCH(join_splits_kernel, rows * columns, e, scratch, splits, rows * columns, columns);
}

// A layer's input (forward) or dout under its filter, seen from each pixel of its other image.
template <PictureLines LINES>
static Picture<LINES> picture(const real *data, const Layer *l, bool forward) {
    Window s = window_of(l);
    if (forward)
        return {data, s.h, s.w, s.c, s.ow, s.oh * s.ow, s.kernel, s.stride, -s.padding, 1, 1};
    return {data, s.oh, s.ow, s.oc, s.w, s.h * s.w, s.kernel, 1, s.padding, -1, s.stride};
}

static void conv2d_forward_tiled(real *out, const real *in, const real *weight, const real *bias,
                                 const Layer *l, size_t n, real *scratch) {
    gemm({out, bias, l->fused_relu}, picture<PIXELS>(in, l, true),
         Matrix<false>{weight, (int)l->out.c, 1}, n * l->out.h * l->out.w, l->out.c,
         l->kernel * l->kernel * l->in.c, scratch);
}

static void conv2d_backward_tiled(real *din, real *dweight, real *dbias, const real *dout,
                                  const real *in, const real *weight, const Layer *l, size_t n,
                                  bool accumulate, real *scratch) {
    size_t taps = l->kernel * l->kernel;
    bias_gradient(dbias, dout, l, n, scratch);
    gemm({dweight}, picture<TAPS>(in, l, true), Matrix<false>{dout, (int)l->out.c, 1},
         taps * l->in.c, l->out.c, n * l->out.h * l->out.w, scratch);
    if (din)
        gemm({din, NULL, false, accumulate}, picture<PIXELS>(dout, l, false),
             Matrix<true>{weight, (int)l->in.c, (int)l->out.c}, n * l->in.h * l->in.w, l->in.c,
             taps * l->out.c, scratch);
}

// Multiply-adds in registers: 8 independent sums a thread, 16 FLOP in each of `steps` rounds.
static __global__ void peak_kernel(real *out, int steps) {
    real sums[8], total = 0;
    for (int i = 0; i < 8; i++)
        sums[i] = (real)i;
    for (int step = 0; step < steps; step++)
        for (int i = 0; i < 8; i++)
            sums[i] = sums[i] * (real).999 + (real).001;
    for (int i = 0; i < 8; i++)
        total += sums[i];
    out[element()] = total;
}

static double peak_gflops(void) {
#ifdef CUDA_ON_CPU
    const int steps = 8; // it means nothing
#else
    const int steps = 20000;
#endif
    cudaDeviceProp p;
    CHECK(cudaGetDeviceProperties(&p, device));
    size_t threads = (size_t)p.multiProcessorCount * 8 * THREADS;
    real *out = (real *)device_alloc(threads * sizeof *out);
    double best = 0;
    for (int round = 0; round < 5 && out; round++) {
        mark(0);
        LAUNCH(peak_kernel, threads, out, steps);
        mark(1);
        best = max(best, 16. * steps * (double)threads / elapsed(0, 1));
    }
    device_free(out);
    return best / 1e9;
}

/* ==== 7. The table of the backend ============================================================= */

// Room for the sums of slices, and of a product's splits where there are any. Kernels count in 32
// bits, so a tensor must not have more numbers than that.
static size_t scratch_size(const Layer *l, size_t n) {
    size_t sums = 2 * SUM_SLICES * l->out.c, taps = l->kernel * l->kernel;
    size_t outputs = n * l->out.h * l->out.w, inputs = n * l->in.h * l->in.w;
    if (max(inputs * l->in.c, outputs * l->out.c) >> 31)
        fail(1, "layer %s: %zu images have more than 2^31 numbers; use a smaller --batch-size",
             l->name, n);
    if (l->kind != CONV2D && l->kind != LINEAR)
        return l->kind == BATCHNORM2D ? sums : 0;
    size_t parts = max(parts_size(outputs, l->out.c, taps * l->in.c),
                       max(parts_size(taps * l->in.c, l->out.c, outputs),
                           parts_size(inputs, l->in.c, taps * l->out.c)));
    return max(sums, parts);
}

// In the order of struct Backend in cnn.c; NULL: prepare() and conv2d_..._pooled().
static Backend make_backend(bool tiled) {
    auto conv2d_forward = tiled ? conv2d_forward_tiled : conv2d_forward_naive;
    auto conv2d_backward = tiled ? conv2d_backward_tiled : conv2d_backward_naive;
    return {"cuda", tiled ? "tiled" : "naive", tiled, scratch_size, NULL,
            // memory, copies, marks, the loader
            device_alloc, device_free, host_alloc, host_free, copy, transfer, receive, synchronize,
            mark, elapsed, wait, peak_gflops, range, record, gather,
            // conv2d and linear, which is the same; then layer by layer; optimizers
            conv2d_forward, conv2d_backward, NULL, NULL, conv2d_forward, conv2d_backward,
            batchnorm2d_forward, batchnorm2d_backward, relu_forward, relu_backward,
            maxpool2d_forward, maxpool2d_backward, avgpool2d_forward, avgpool2d_backward, add,
            dropout_forward, dropout_backward, log_softmax_forward, log_softmax_backward, nll_loss,
            adadelta, sgd};
}

// The backends, the best one last; NULL behind it.
extern "C" const Backend *cuda_backend(size_t i) {
    static const Backend backends[] = {make_backend(false), make_backend(true)};
    return i < sizeof backends / sizeof *backends ? &backends[i] : NULL;
}
