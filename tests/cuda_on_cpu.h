/* cuda_on_cpu.h: runs CUDA kernels on the CPU, to test them without a GPU, and to see how it works.

   A .cu file goes through cuda_on_cpu.sed, which rewrites launches and __shared__, and is then C++:

     { echo '#line 1 "kernels.cu"'; sed -f tests/cuda_on_cpu.sed kernels.cu; } |
         g++ -std=c++17 -O2 -march=native -fopenmp -Wno-unknown-pragmas \
             -include tests/cuda_on_cpu.h -x c++ -c - -o kernels.o

   One object of a program may be made so. Results are real, times mean nothing.

   What a GPU does at once is done here one after the other. The threads of a block take turns: one
   runs until it has to wait for others, at a barrier or in a warp operation. Blocks are spread over
   the CPU's cores, as they are over the multiprocessors of a GPU. What a GPU hides is reported:
   file, line, kernel, block and thread go to stderr, then abort(). Some other builds:

     -O1 -g -fsanitize=address   finds accesses out of range
     -O1 -g -fsanitize=thread    finds races: every CUDA thread is a thread to the race detector;
                                 nothing but barriers, __syncwarp and fences orders two of them
     -O1 -fsanitize=thread -DCUEMU_COUNT   g++ only, and linked without -fsanitize: counts accesses,
                                 and prints a table to stderr at the end

   Environment:

     CUEMU_DEVICES=N   as many GPUs (1). CUDA_VISIBLE_DEVICES=1,0 takes some of them, as ever
     CUEMU_MEMORY=N    bytes of memory that each has (4 GiB)
     CUEMU_ORDER=N     threads and blocks run forwards (0), backwards (1) or shuffled (other seeds)
     CUEMU_LAZY=1      work queued in a stream starts only when something waits for it
     CUEMU_PROTECT=1   a GPU's memory faults beyond its end, and wherever the host touches it

   What kernels must keep to: one __shared__ array in a declaration; template arguments written out
   at a launch, and no >>>( elsewhere; every _sync operation by all lanes of its mask; no waiting
   for another block; atomics in whole numbers; half and bfloat16 only converted; inline PTX only
   where CUDA_ON_CPU is not defined. */

#pragma once
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif

#ifndef __has_feature
#define __has_feature(feature) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#define EMULATOR_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#elif (defined(__SANITIZE_THREAD__) || __has_feature(thread_sanitizer)) && !defined(CUEMU_COUNT)
#define EMULATOR_TSAN
#include <sanitizer/tsan_interface.h>
#endif

/* ==== 1. The language ===========================================================================

   A function for the GPU is a function. cuda_on_cpu.sed makes EMU_SHARED and EMU_DYNAMIC
   of __shared__; what is left of it does not compile. */

#define CUDA_ON_CPU 1
#define __CUDACC__ 1 // after the system's headers, some of which look for it
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define __shared__ write_one_shared_array_per_declaration
#define EMU_SHARED(NAME, ...) auto &NAME = emulator::shared_array<__VA_ARGS__>([] {})
#define EMU_DYNAMIC(NAME, ...) auto *NAME = emulator::dynamic_shared<__VA_ARGS__>()

extern "C" const char *cuda_emulated(void) {
    return "emulated CUDA on the CPU: results are real, times mean nothing";
}

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#define EMULATOR_VECTORS(T, T2, T4)           \
    struct alignas(2 * sizeof(T)) T2 {        \
        T x, y;                               \
    };                                        \
    struct alignas(16) T4 {                   \
        T x, y, z, w;                         \
    };                                        \
    inline T2 make_##T2(T x, T y) {           \
        return {x, y};                        \
    }                                         \
    inline T4 make_##T4(T x, T y, T z, T w) { \
        return {x, y, z, w};                  \
    }
EMULATOR_VECTORS(float, float2, float4)
EMULATOR_VECTORS(int, int2, int4)
EMULATOR_VECTORS(unsigned, uint2, uint4)

/* ---- half and bfloat16: conversions only. Arithmetic in float would round differently from a
   GPU's, so there is none. */

inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float __uint_as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline int __float_as_int(float x) {
    return (int)__float_as_uint(x);
}
inline float __int_as_float(int bits) {
    return __uint_as_float((uint32_t)bits);
}

namespace emulator {
// Drops the lowest bits of a number, to the nearest; a tie goes to the even neighbour.
inline uint32_t round_off(uint32_t number, int bits) {
    return (number + (1u << (bits - 1)) - 1 + (number >> bits & 1)) >> bits;
}

inline uint16_t bfloat16_bits(float x) {
    return x != x ? 0x7fff : (uint16_t)round_off(__float_as_uint(x), 16);
}

inline uint16_t half_bits(float x) {
    uint32_t sign = __float_as_uint(x) >> 16 & 0x8000, size = __float_as_uint(x) & 0x7fffffff;
    if (x != x) {
        return 0x7fff;
    }
    if (fabsf(x) >= 65520) { // rounds to 65536 or more
        return (uint16_t)(sign | 0x7c00);
    }
    if (fabsf(x) < 0x1p-14f) { // a multiple of 2^-24
        return (uint16_t)(sign | (uint32_t)lrintf(fabsf(x) * 0x1p24f));
    }
    return (uint16_t)(sign | round_off(size - ((127 - 15) << 23), 13)); // another exponent bias
}

inline float half_value(uint16_t bits) {
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float size =
        exponent == 0 ? (float)mantissa * 0x1p-24f
        : exponent < 31
            ? __uint_as_float((uint32_t)(exponent + 127 - 15) << 23 | (uint32_t)mantissa << 13)
            : __uint_as_float(0x7f800000 | (uint32_t)mantissa << 13);
    return bits & 0x8000 ? -size : size;
}
inline float bfloat16_value(uint16_t bits) {
    return __uint_as_float((uint32_t)bits << 16);
}
} // namespace emulator

struct __half {
    uint16_t bits;
    __half() = default;
    explicit __half(float x) : bits(emulator::half_bits(x)) {}
    explicit operator float() const {
        return emulator::half_value(bits);
    }
};
struct __nv_bfloat16 {
    uint16_t bits;
    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float x) : bits(emulator::bfloat16_bits(x)) {}
    explicit operator float() const {
        return emulator::bfloat16_value(bits);
    }
};
struct alignas(4) __half2 {
    __half x, y;
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
typedef __half half;
typedef __half2 half2;
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

#define __float2half(x) __half(x)
#define __float2half_rn(x) __half(x)
#define __half2float(x) ((float)(x))
#define __float2bfloat16(x) __nv_bfloat16(x)
#define __float2bfloat16_rn(x) __nv_bfloat16(x)
#define __bfloat162float(x) ((float)(x))
inline __half2 __floats2half2_rn(float x, float y) {
    return {__half(x), __half(y)};
}
inline float2 __half22float2(__half2 pair) {
    return {(float)pair.x, (float)pair.y};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__nv_bfloat16(x), __nv_bfloat16(y)};
}
inline float2 __bfloat1622float2(__nv_bfloat162 pair) {
    return {(float)pair.x, (float)pair.y};
}

/* ---- Arithmetic. Some are macros because the C library has functions of these names. */

#define __expf(x) expf(x)
#define __logf(x) logf(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __fdividef(x, y) ((float)(x) / (float)(y))
#define __fmaf_rn(x, y, z) fmaf(x, y, z)
#define __umulhi(x, y) ((unsigned)((uint64_t)(unsigned)(x) * (unsigned)(y) >> 32))
#define __popc(x) __builtin_popcount(x)
#define __ffs(x) __builtin_ffs(x)
#define __ldg(pointer) (*(pointer))
inline float rsqrtf(float x) {
    return 1 / sqrtf(x);
}
inline int __clz(int x) {
    return x ? __builtin_clz((unsigned)x) : 32;
}
// As CUDA's: of a number and a NaN, the number.
template <class A, class B> inline std::common_type_t<A, B> min(A a, B b) {
    typedef std::common_type_t<A, B> T;
    if constexpr (std::is_floating_point_v<T>) {
        return std::fmin((T)a, (T)b);
    }
    return (T)b < (T)a ? (T)b : (T)a;
}
template <class A, class B> inline std::common_type_t<A, B> max(A a, B b) {
    typedef std::common_type_t<A, B> T;
    if constexpr (std::is_floating_point_v<T>) {
        return std::fmax((T)a, (T)b);
    }
    return (T)a < (T)b ? (T)b : (T)a;
}

/* ==== 2. Threads, warps and blocks ==============================================================

   A fiber is a stack and the place where its function stopped. A block belongs to one thread of the
   CPU, the worker, which switches between the fibers of the block. A fiber that comes to the end of
   a CUDA thread starts the next one, so that a kernel without barriers needs only one fiber. */

namespace emulator {

struct Place { // in the CUDA file; as a default argument, {}, that of the call
    const char *file;
    int line;
    Place(const char *file = __builtin_FILE(), int line = __builtin_LINE())
        : file(file), line(line) {}
};

struct Fiber {
    void *stack = nullptr; // its lowest byte
    size_t stack_bytes = 0;
    void *stack_pointer = nullptr;                      // while it does not run
    void *asan_stack = nullptr, *tsan_thread = nullptr; // what the sanitizers know of it
#if !defined(__x86_64__) && !defined(__aarch64__)
    ucontext_t context;
#endif
};

struct AsyncCopy { // a cp.async that was not waited for
    void *to;
    const void *from;
    int bytes, group;
};

enum ThreadState { READY, AT_BARRIER, IN_WARP_OPERATION, ENDED };

struct Thread {
    uint3 index;
    int warp, lane;
    ThreadState state;
    Place place; // of the barrier or warp operation that it waits in
    unsigned mask;
    Fiber *fiber; // null: not started
    int copy_groups;
    std::vector<AsyncCopy> copies;
};

// Where lanes of a warp meet: each puts in a value, and goes on when all of `mask` have. A lane may
// come to the next meeting before another has read the values of this one, hence two sets in turns.
struct Meeting {
    unsigned mask, arrived = 0;
    int number = 0; // counts meetings
    alignas(16) unsigned char values[2][32][32];
};

struct Traffic {
    long accesses = 0, bytes = 0;
};
enum { GLOBAL_READ, GLOBAL_WRITE, SHARED_READ, SHARED_WRITE, TRAFFIC_KINDS };

struct Range {
    const char *begin, *end;
};

struct Launch {
    const char *kernel;
    Place place;
    dim3 grid, block;
    size_t dynamic_bytes;
    int device;
    std::function<void()> call; // the kernel with its arguments
    std::vector<Range> memory;  // of GPUs, for counting
};

struct Block {
    const Launch *launch;
    uint3 index;
    dim3 size{0, 0, 0}; // for which the threads have their numbers
    long number;        // no other block of this worker has it
    std::vector<Thread> threads;
    std::vector<Thread *> order;
    Thread *ready[1024]; // a ring: at most every thread is in it
    unsigned first_ready, ready_count;
    int waiting, ended, barriers;           // at the barrier, at the end; barriers passed
    std::vector<std::deque<Meeting>> warps; // a deque: what lies in it stays in its place
    Range shared[64];                       // arrays in shared memory, so many:
    int shared_count;
    void *dynamic;
    std::vector<Fiber *> idle;        // fibers without a thread
    Fiber worker;                     // the worker's own stack
    char barrier_token[2], end_token; // addresses that stand for events: see below
    Traffic traffic[TRAFFIC_KINDS];
};

// What runs on this thread of the CPU; self is null while no kernel does.
static thread_local Block *block;
static thread_local Thread *self;

/* ---- Reports */

[[noreturn]] inline void report(const Launch *launch, const char *format, va_list arguments) {
    static std::mutex only_one;
    only_one.lock(); // for ever
    fflush(stdout);
    fprintf(stderr, "cuda_on_cpu: ");
    if (launch) {
        fprintf(stderr, "kernel %s launched at %s:%d", launch->kernel, launch->place.file,
                launch->place.line);
    }
    if (launch && self) {
        fprintf(stderr, ", block (%u,%u,%u), thread (%u,%u,%u)", block->index.x, block->index.y,
                block->index.z, self->index.x, self->index.y, self->index.z);
    }
    fprintf(stderr, launch ? ": " : "");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    abort();
}

[[noreturn]] __attribute__((format(printf, 1, 2))) inline void die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    report(self ? block->launch : nullptr, format, arguments);
}

/* ---- What the sanitizers are told. To the race detector what comes before happens_before(token)
   is ordered before what comes after happens_after(token). It ignores the emulator's own accesses,
   those made while an Unwatched lives. */

#ifdef EMULATOR_TSAN
extern "C" void AnnotateIgnoreReadsBegin(const char *file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char *file, int line);
extern "C" void AnnotateIgnoreWritesBegin(const char *file, int line);
extern "C" void AnnotateIgnoreWritesEnd(const char *file, int line);
const bool race_detector = true;
struct Unwatched {
    Unwatched() {
        AnnotateIgnoreReadsBegin("", 0);
        AnnotateIgnoreWritesBegin("", 0);
    }
    ~Unwatched() {
        AnnotateIgnoreReadsEnd("", 0);
        AnnotateIgnoreWritesEnd("", 0);
    }
};
inline void happens_before(void *token) {
    __tsan_release(token);
}
inline void happens_after(void *token) {
    __tsan_acquire(token);
}
#else
const bool race_detector = false;
struct Unwatched {
    Unwatched() {}
};
inline void happens_before(void *) {}
inline void happens_after(void *) {}
#endif

#ifdef EMULATOR_ASAN
// Whose stack we leave. The sanitizer tells us where it lies when we have arrived on another.
static thread_local Fiber *left_fiber;
inline void leave_stack(Fiber *from, Fiber *to) {
    left_fiber = from;
    __sanitizer_start_switch_fiber(&from->asan_stack, to->stack, to->stack_bytes);
}
inline void arrive_on_stack(Fiber *fiber) {
    const void *stack;
    __sanitizer_finish_switch_fiber(fiber->asan_stack, &stack, &left_fiber->stack_bytes);
    left_fiber->stack = (void *)stack;
}
#else
inline void leave_stack(Fiber *, Fiber *) {}
inline void arrive_on_stack(Fiber *) {}
#endif

/* ---- Fibers. A switch saves the registers that a function must keep, and the stack pointer; then
   it takes the other stack pointer, and returns to where that fiber came from. */

void fiber_main();
// The race detector notes what happened to every byte of new memory, which takes its time.
const size_t STACK_BYTES = (race_detector ? 64 : 256) << 10;

#if defined(__x86_64__)
asm(R"(
.text
emulator_switch:
    push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
    ret
)");
const int SAVED_WORDS = 6 + 2, RETURN_WORD = 6; // the last word: fiber_main returns nowhere
#elif defined(__aarch64__)
asm(R"(
.text
emulator_switch:
    sub sp, sp, #160
    stp x19, x20, [sp]; stp x21, x22, [sp, #16]; stp x23, x24, [sp, #32]; stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]; stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]; stp d10, d11, [sp, #112]; stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp]; ldp x21, x22, [sp, #16]; ldp x23, x24, [sp, #32]; ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]; ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]; ldp d10, d11, [sp, #112]; ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
const int SAVED_WORDS = 20, RETURN_WORD = 11; // x30
#endif

#if defined(__x86_64__) || defined(__aarch64__)
extern "C" void emulator_switch(void **save_stack_pointer, void *stack_pointer);
inline void prepare(Fiber *fiber) {
    // Stacks begin at different places of a page, or they would compete for few lines of the cache.
    static thread_local size_t fibers;
    size_t shift = fibers++ % 32 * 128;
    void **top = (void **)((char *)fiber->stack + STACK_BYTES - shift) - SAVED_WORDS;
    top[RETURN_WORD] = (void *)fiber_main;
    fiber->stack_pointer = top;
}
inline void swap_stacks(Fiber *from, Fiber *to) {
    emulator_switch(&from->stack_pointer, to->stack_pointer);
}
#else // correct everywhere, and several times slower: it also saves the signal mask
inline void prepare(Fiber *fiber) {
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack;
    fiber->context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fiber->context, fiber_main, 0);
}
inline void swap_stacks(Fiber *from, Fiber *to) {
    swapcontext(&from->context, &to->context);
}
#endif

// The race detector must not watch this function: it begins as one thread and ends as another.
__attribute__((noinline, no_sanitize("thread"))) inline void switch_fiber(Fiber *from, Fiber *to) {
    leave_stack(from, to);
#ifdef EMULATOR_TSAN
    __tsan_switch_to_fiber(to->tsan_thread, __tsan_switch_to_fiber_no_sync);
#endif
    swap_stacks(from, to);
    arrive_on_stack(from);
}

inline Fiber *new_fiber() {
    Fiber *fiber = new Fiber;
    fiber->stack_bytes = STACK_BYTES;
    fiber->stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fiber->stack == MAP_FAILED) {
        die("no memory for the stack of a thread");
    }
    mprotect(fiber->stack, 4096, PROT_NONE); // a stack that overflows faults
    prepare(fiber);
#ifdef EMULATOR_TSAN
    fiber->tsan_thread = __tsan_create_fiber(0);
#endif
    return fiber;
}

inline void delete_fiber(Fiber *fiber) {
#ifdef EMULATOR_TSAN
    __tsan_destroy_fiber(fiber->tsan_thread);
#endif
    munmap(fiber->stack, STACK_BYTES);
    delete fiber;
}

/* ---- Taking turns */

inline void make_ready(Thread *thread) {
    thread->state = READY;
    block->ready[(block->first_ready + block->ready_count++) % 1024] = thread;
}

inline Thread *next_ready() {
    if (block->ready_count == 0) {
        return nullptr;
    }
    block->ready_count--;
    return block->ready[block->first_ready++ % 1024];
}

inline Fiber *idle_fiber() {
    if (block->idle.empty()) {
        return new_fiber();
    }
    Fiber *fiber = block->idle.back();
    block->idle.pop_back();
    return fiber;
}

// `next` becomes the running thread; to be switched to.
inline Fiber *fiber_of(Thread *next) {
    if (!next->fiber) {
        next->fiber = idle_fiber();
    }
#ifdef EMULATOR_TSAN
    char name[64];
    snprintf(name, sizeof name, "block (%u,%u,%u) thread (%u,%u,%u) of %s", block->index.x,
             block->index.y, block->index.z, next->index.x, next->index.y, next->index.z,
             block->launch->kernel);
    __tsan_set_fiber_name(next->fiber->tsan_thread, name);
#endif
    self = next;
    return next->fiber;
}

// Nobody is ready, yet some have not ended: who waits for whom?
[[noreturn]] inline void report_stuck() {
    const Thread *ended = nullptr, *waits = nullptr;
    for (Thread &thread : block->threads) {
        if (thread.state == IN_WARP_OPERATION) {
            self = &thread;
            die("%s:%d: waits for ever: of the lanes in mask %#x some never come to this warp "
                "operation; they have ended or wait elsewhere",
                thread.place.file, thread.place.line, thread.mask);
        }
        (thread.state == ENDED ? ended : waits) = &thread;
    }
    self = const_cast<Thread *>(ended);
    die("has ended while %d threads wait for it in __syncthreads() at %s:%d", block->waiting,
        waits->place.file, waits->place.line);
}

// The running thread waits until another makes it ready.
inline void give_way() {
    Fiber *mine = self->fiber;
    Thread *next = next_ready();
    if (!next) {
        report_stuck();
    }
    if (fiber_of(next) != mine) { // if it is, it was the last to come
        switch_fiber(mine, next->fiber);
    }
}

inline void open_barrier() {
    for (Thread &thread : block->threads) {
        if (thread.place.line != block->threads[0].place.line) {
            self = &thread;
            die("divergent barrier: waits in __syncthreads() at %s:%d, thread 0 in one at line %d",
                thread.place.file, thread.place.line, block->threads[0].place.line);
        }
    }
    block->waiting = 0;
    block->barriers++;
    for (Thread *thread : block->order) {
        make_ready(thread);
    }
}

// Returns the fiber to go on with: this one if the next thread has not started yet.
inline Fiber *end_thread() {
    Unwatched unwatched;
    if (!self->copies.empty()) {
        die("has ended without waiting for its last %d cp.async", (int)self->copies.size());
    }
    happens_before(&block->end_token);
    block->idle.push_back(self->fiber);
    self->state = ENDED;
    block->ended++;
    Thread *next = next_ready();
    if (!next && block->ended < (int)block->threads.size()) {
        report_stuck();
    }
    if (next) {
        return fiber_of(next);
    }
    self = nullptr;
    return &block->worker;
}

inline void fiber_main() {
    Fiber *mine = self->fiber;
    arrive_on_stack(mine);
    for (;;) {
        block->launch->call();
        Fiber *next = end_thread();
        if (next != mine) {
            switch_fiber(mine, next);
        }
    }
}

// 0 to n - 1 in the order that CUEMU_ORDER asks for.
inline long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}
inline std::vector<unsigned> ordering(size_t n, long salt) {
    static const long seed = setting("CUEMU_ORDER", 0);
    std::vector<unsigned> order(n);
    for (size_t i = 0; i < n; i++) {
        order[i] = (unsigned)(seed == 1 ? n - 1 - i : i);
    }
    if (seed > 1) {
        std::shuffle(order.begin(), order.end(), std::minstd_rand((unsigned)(seed * 7919 + salt)));
    }
    return order;
}

inline uint3 position(long i, dim3 size) {
    return {(unsigned)(i % size.x), (unsigned)(i / size.x % size.y),
            (unsigned)(i / size.x / size.y)};
}

inline void number_threads(dim3 size) {
    block->size = size;
    block->threads.resize(size.x * size.y * size.z);
    block->warps.resize((block->threads.size() + 31) / 32);
    int i = 0;
    for (Thread &thread : block->threads) {
        thread.index = position(i, size);
        thread.warp = i / 32;
        thread.lane = i % 32;
        i++;
    }
}

inline void set_up_block(const Launch *launch, long i) {
    dim3 size = launch->block, old = block->size;
    if (size.x != old.x || size.y != old.y || size.z != old.z) {
        number_threads(size);
    }
    block->launch = launch;
    block->index = position(i, launch->grid);
    block->number++;
    block->first_ready = block->ready_count = 0;
    block->waiting = block->ended = block->barriers = 0;
    for (Thread &thread : block->threads) {
        // To the race detector whoever makes a thread comes before it, and an old stack is memory
        // of another thread: each gets a new one, made by none of them.
        thread.fiber = race_detector ? new_fiber() : nullptr;
        thread.copy_groups = 0;
    }
    block->order.clear();
    for (unsigned t : ordering(block->threads.size(), i)) {
        block->order.push_back(&block->threads[t]);
        make_ready(&block->threads[t]);
    }
}

/* ---- Shared memory. A block begins with none that is known: every byte is 0xff, a NaN. */

inline void *new_shared(size_t bytes) {
    void *memory = nullptr;
    if (posix_memalign(&memory, 128, bytes ? bytes : 1)) {
        die("no memory for an array in shared memory");
    }
    memset(memory, 0xff, bytes);
    if (block->shared_count == 64) {
        die("more than 64 arrays in shared memory");
    }
    block->shared[block->shared_count++] = {(char *)memory, (char *)memory + bytes};
    return memory;
}

// `Declaration` is a type of its own for every __shared__. A block's first thread makes the array.
template <class Array, class Declaration> Array &shared_array(Declaration) {
    Unwatched unwatched;
    static thread_local void *array;
    static thread_local long made_for_block;
    static_assert(sizeof(Array) <= 48 << 10, "static shared memory ends at 48 KB");
    if (made_for_block != block->number) {
        made_for_block = block->number;
        array = new_shared(sizeof(Array));
    }
    return *(Array *)array;
}

template <class T> T *dynamic_shared() {
    return (T *)block->dynamic;
}

inline bool is_shared(const void *begin, size_t bytes) {
    for (int i = 0; i < block->shared_count; i++) {
        const Range &array = block->shared[i];
        if ((const char *)begin >= array.begin && (const char *)begin + bytes <= array.end) {
            return true;
        }
    }
    return false;
}

/* ---- A block, a grid */

void note_memory(Launch *launch); // see section 8
void add_traffic(const Launch *launch);

inline void run_threads(const Launch *launch, long i) {
    Unwatched unwatched;
    set_up_block(launch, i);
    block->dynamic = new_shared(launch->dynamic_bytes);
    switch_fiber(&block->worker, fiber_of(next_ready()));
    happens_after(&block->end_token);
    while (block->shared_count > 0) {
        free((void *)block->shared[--block->shared_count].begin);
    }
    while (race_detector && !block->idle.empty()) {
        delete_fiber(block->idle.back());
        block->idle.pop_back();
    }
}

// Faults are handled on a stack of their own: the fiber's may be what has overflown.
inline void use_signal_stack() {
#if !defined(EMULATOR_ASAN) && !defined(EMULATOR_TSAN) // which see to it themselves
    static thread_local char memory[64 << 10];
    stack_t stack = {};
    stack.ss_sp = memory;
    stack.ss_size = sizeof memory;
    sigaltstack(&stack, nullptr);
#endif
}

struct DeleteBlock {
    void operator()(Block *old) {
        for (Fiber *fiber : old->idle) {
            delete_fiber(fiber);
        }
        delete old;
    }
};

// To the race detector a thread of its own starts a block, so that nothing orders two blocks.
__attribute__((no_sanitize("thread"))) inline void run_block(const Launch *launch, long i) {
    static thread_local std::unique_ptr<Block, DeleteBlock> owner;
    if (!block) {
        owner.reset(new Block());
        block = owner.get();
        use_signal_stack();
    }
#ifdef EMULATOR_TSAN
    void *host = __tsan_get_current_fiber();
    block->worker.tsan_thread = __tsan_create_fiber(0);
    __tsan_switch_to_fiber(block->worker.tsan_thread, __tsan_switch_to_fiber_no_sync);
#endif
    run_threads(launch, i);
#ifdef EMULATOR_TSAN
    __tsan_release((void *)launch);
    __tsan_switch_to_fiber(host, __tsan_switch_to_fiber_no_sync);
    __tsan_destroy_fiber(block->worker.tsan_thread);
#endif
    add_traffic(launch);
}

// The blocks of a launch, spread over the cores; at the same time other threads of the host may
// launch kernels on other GPUs.
inline void run_grid(const Launch *launch) {
    static long launches;
    long salt = __atomic_add_fetch(&launches, 1, __ATOMIC_RELAXED);
    long blocks = (long)launch->grid.x * launch->grid.y * launch->grid.z;
    std::vector<unsigned> order = ordering((size_t)blocks, salt);
#if defined(_OPENMP) && !defined(EMULATOR_TSAN)
    static int running;
    int workers = omp_get_max_threads() / __atomic_add_fetch(&running, 1, __ATOMIC_RELAXED);
    // A block may need 1024 stacks of two memory maps each, of which Linux gives a process 65530.
    workers = std::max(1, std::min(16, workers));
    // Waking up the other cores takes longer than a small grid.
    bool is_large = blocks * launch->block.x * launch->block.y * launch->block.z > 2048;
#pragma omp parallel for schedule(dynamic) num_threads(workers) if (is_large)
    for (long i = 0; i < blocks; i++) {
        run_block(launch, order[(size_t)i]);
    }
    __atomic_add_fetch(&running, -1, __ATOMIC_RELAXED);
#else
    for (long i = 0; i < blocks; i++) {
        run_block(launch, order[(size_t)i]);
    }
#endif
    happens_after((void *)launch);
}
} // namespace emulator

/* ==== 3. Barriers, warp operations, atomics =================================================== */

namespace emulator {

// Every lane of `mask` hands in a value; all get everyone's when the last has come. Of the warp's
// operations only __syncwarp puts accesses to memory in order.
typedef unsigned char LaneValues[32][32];
inline LaneValues &meet(unsigned mask, const void *value, size_t bytes, Place place,
                        bool orders_memory = false) {
    Unwatched unwatched;
    if (!(mask >> self->lane & 1)) {
        die("%s:%d: lane %d is not in the mask %#x that it gives", place.file, place.line,
            self->lane, mask);
    }
    std::deque<Meeting> &meetings = block->warps[(size_t)self->warp];
    auto same_mask = [=](const Meeting &meeting) { return meeting.mask == mask; };
    auto found = std::find_if(meetings.begin(), meetings.end(), same_mask);
    if (found == meetings.end()) {
        meetings.emplace_back();
        found = std::prev(meetings.end());
        found->mask = mask;
    }
    Meeting &meeting = *found;
    LaneValues &values = meeting.values[meeting.number % 2];
    memcpy(values[self->lane], value, bytes);
    meeting.arrived |= 1u << self->lane;
    self->place = place;
    self->mask = mask;
    if (orders_memory) {
        happens_before(values);
    }
    if (meeting.arrived != mask) {
        self->state = IN_WARP_OPERATION;
        give_way();
    } else {
        meeting.arrived = 0;
        meeting.number++;
        for (int lane = 0; lane < 32; lane++) {
            Thread *other = &block->threads[(size_t)self->warp * 32] + lane;
            if (mask >> lane & 1 && other->place.line != place.line) {
                die("%s:%d: lane %d meets this one in another warp operation, at line %d",
                    place.file, place.line, lane, other->place.line);
            }
            if (mask >> lane & 1 && other != self) {
                make_ready(other);
            }
        }
    }
    if (orders_memory) {
        happens_after(values);
    }
    return values;
}

template <class T> T shuffle(unsigned mask, T value, int source, Place place) {
    static_assert(sizeof(T) <= 32, "a value of at most 32 bytes");
    LaneValues &values = meet(mask, &value, sizeof value, place);
    if (!(mask >> source & 1)) {
        die("%s:%d: reads lane %d, which is not in the mask %#x", place.file, place.line, source,
            mask);
    }
    memcpy(&value, values[source], sizeof value);
    return value;
}

template <class T, class Combine>
T combine_lanes(unsigned mask, T value, Place place, Combine combine) {
    LaneValues &values = meet(mask, &value, sizeof value, place);
    T result = 0, other;
    bool first = true;
    for (int lane = 0; lane < 32; lane++) {
        if (mask >> lane & 1) {
            memcpy(&other, values[lane], sizeof other);
            result = first ? other : combine(result, other);
            first = false;
        }
    }
    return result;
}
} // namespace emulator

#define threadIdx (emulator::self->index)
#define blockIdx (emulator::block->index)
#define blockDim (emulator::block->launch->block)
#define gridDim (emulator::block->launch->grid)
static const int warpSize = 32;

inline void __syncthreads(emulator::Place place = {}) {
    using namespace emulator;
    Unwatched unwatched;
    char *token = &block->barrier_token[block->barriers % 2]; // some may come to the next one soon
    happens_before(token);
    self->state = AT_BARRIER;
    self->place = place;
    if (++block->waiting == (int)block->threads.size()) {
        open_barrier();
    }
    give_way();
    happens_after(token);
}

inline void __syncwarp(unsigned mask = 0xffffffff, emulator::Place place = {}) {
    emulator::meet(mask, "", 0, place, true);
}

// `width` lanes side by side are a group of their own; who would read beyond it reads itself.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, emulator::Place place = {}) {
    int group = emulator::self->lane & ~(width - 1);
    return emulator::shuffle(mask, value, group | (source & (width - 1)), place);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32, emulator::Place place = {}) {
    int lane = emulator::self->lane, source = lane ^ flip;
    return emulator::shuffle(mask, value, source / width > lane / width ? lane : source, place);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int distance, int width = 32,
                   emulator::Place place = {}) {
    int lane = emulator::self->lane;
    bool inside = lane % width + distance < width;
    return emulator::shuffle(mask, value, inside ? lane + distance : lane, place);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int distance, int width = 32, emulator::Place place = {}) {
    int lane = emulator::self->lane;
    bool inside = lane % width >= distance;
    return emulator::shuffle(mask, value, inside ? lane - distance : lane, place);
}

inline unsigned __ballot_sync(unsigned mask, int vote, emulator::Place place = {}) {
    unsigned mine = vote ? 1u << emulator::self->lane : 0;
    return emulator::combine_lanes(mask, mine, place, [](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned mask, int vote, emulator::Place place = {}) {
    return __ballot_sync(mask, vote, place) != 0;
}
inline int __all_sync(unsigned mask, int vote, emulator::Place place = {}) {
    return __ballot_sync(mask, vote, place) == mask;
}
template <class T> T __reduce_add_sync(unsigned mask, T value, emulator::Place place = {}) {
    static_assert(std::is_integral_v<T>, "for int and unsigned");
    return emulator::combine_lanes(mask, value, place, [](T a, T b) { return (T)(a + b); });
}
template <class T> T __reduce_max_sync(unsigned mask, T value, emulator::Place place = {}) {
    static_assert(std::is_integral_v<T>, "for int and unsigned");
    return emulator::combine_lanes(mask, value, place, [](T a, T b) { return a < b ? b : a; });
}

/* Atomics in whole numbers only: those give the same sum in every order. They order nothing else;
   a fence does. */

#define EMULATOR_ATOMIC(NAME, BUILTIN)                                                           \
    template <class T> T NAME(T *address, std::common_type_t<T> value) {                         \
        static_assert(std::is_integral_v<T>, "float atomics make a result depend on the order"); \
        return BUILTIN(address, value, __ATOMIC_RELAXED);                                        \
    }
EMULATOR_ATOMIC(atomicAdd, __atomic_fetch_add)
EMULATOR_ATOMIC(atomicSub, __atomic_fetch_sub)
EMULATOR_ATOMIC(atomicOr, __atomic_fetch_or)
EMULATOR_ATOMIC(atomicAnd, __atomic_fetch_and)
EMULATOR_ATOMIC(atomicXor, __atomic_fetch_xor)
EMULATOR_ATOMIC(atomicExch, __atomic_exchange_n)

template <class T> T atomicCAS(T *address, std::common_type_t<T> expected, T value) {
    static_assert(std::is_integral_v<T>, "float atomics make a result depend on the order");
    __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
    return expected;
}
template <class T> T atomicMax(T *address, std::common_type_t<T> value) {
    T old = __atomic_load_n(address, __ATOMIC_RELAXED);
    while (old < value && atomicCAS(address, old, value) != old) {
        old = __atomic_load_n(address, __ATOMIC_RELAXED);
    }
    return old;
}
template <class T> T atomicMin(T *address, std::common_type_t<T> value) {
    T old = __atomic_load_n(address, __ATOMIC_RELAXED);
    while (value < old && atomicCAS(address, old, value) != old) {
        old = __atomic_load_n(address, __ATOMIC_RELAXED);
    }
    return old;
}

// What a thread wrote before its fence comes before whatever another does after a later fence.
inline void __threadfence() {
    static int fences;
    __atomic_fetch_add(&fences, 1, __ATOMIC_ACQ_REL);
}

/* ==== 4. Tensor cores, ldmatrix, cp.async =======================================================

   What the wrappers of inline PTX call instead. The layouts are those of the PTX manual's chapters
   "Matrix fragments for mma.m16n8k16" and "m16n8k8", "ldmatrix" and "cp.async". */

namespace emulator {

// Element `i` of a register: 16 bits, or one tf32, a float without its low 13 bits.
inline float bf16_element(uint32_t bits, int i) {
    return bfloat16_value((uint16_t)(bits >> 16 * i));
}
inline float f16_element(uint32_t bits, int i) {
    return half_value((uint16_t)(bits >> 16 * i));
}
inline float tf32_element(uint32_t bits, int) {
    return __uint_as_float(bits & 0xffffe000);
}

/* d[16][8] = a[16][k] b[k][8] + c. Lane 4*g + q holds rows g and g + 8 of a, and column g of b: of
   the first and of the second half of k, the q-th register's worth of elements. Of c and d it holds
   rows g and g + 8, columns 2*q and 2*q + 1. */
template <int PER_REGISTER, float (*element)(uint32_t, int)>
void multiply(float *d, const uint32_t *a, const uint32_t *b, const float *c, Place place) {
    const int HALF_K = 4 * PER_REGISTER;
    uint32_t mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    LaneValues &values = meet(0xffffffff, mine, sizeof mine, place);
    auto element_of = [&](int lane, int i_register, int i) {
        uint32_t bits;
        memcpy(&bits, values[lane] + 4 * i_register, 4);
        return element(bits, i);
    };
    int g = self->lane / 4, q = self->lane % 4;
    float sums[4] = {c[0], c[1], c[2], c[3]};
    for (int k = 0; k < 2 * HALF_K; k++) {
        int half = k / HALF_K, holder = k % HALF_K / PER_REGISTER, i = k % PER_REGISTER;
        for (int row = 0; row < 2; row++) {
            float from_a = element_of(g * 4 + holder, 2 * half + row, i);
            for (int column = 0; column < 2; column++) {
                float from_b = element_of((2 * q + column) * 4 + holder, 4 + half, i);
                sums[2 * row + column] += from_a * from_b;
            }
        }
    }
    memcpy(d, sums, sizeof sums);
}

#ifdef CUEMU_COUNT
#define EMULATOR_UNCOUNTED __attribute__((no_sanitize("thread")))
#else
#define EMULATOR_UNCOUNTED
#endif
void count(int kind, long bytes);

inline void check_shared(const char *what, const void *address, Place place) {
    if ((uintptr_t)address % 16) {
        die("%s:%d: %s: %p is not aligned to 16 bytes", place.file, place.line, what, address);
    }
    if (!is_shared(address, 16)) {
        die("%s:%d: %s: %p is not in shared memory", place.file, place.line, what, address);
    }
}
} // namespace emulator

inline void emu_mma_m16n8k16_bf16(float *d, const uint32_t *a, const uint32_t *b, const float *c,
                                  emulator::Place place = {}) {
    emulator::multiply<2, emulator::bf16_element>(d, a, b, c, place);
}
inline void emu_mma_m16n8k16_f16(float *d, const uint32_t *a, const uint32_t *b, const float *c,
                                 emulator::Place place = {}) {
    emulator::multiply<2, emulator::f16_element>(d, a, b, c, place);
}
inline void emu_mma_m16n8k8_tf32(float *d, const uint32_t *a, const uint32_t *b, const float *c,
                                 emulator::Place place = {}) {
    emulator::multiply<1, emulator::tf32_element>(d, a, b, c, place);
}

// Four matrices of 8 rows of 16 bytes: lane i says where row i % 8 of matrix i / 8 lies. Lane 4*g +
// q gets elements 2*q and 2*q + 1 of row g of each matrix; transposed, of column g.
inline EMULATOR_UNCOUNTED void emu_ldmatrix_x4(uint32_t *registers, const void *row,
                                               bool transposed, emulator::Place place = {}) {
    using namespace emulator;
    check_shared("ldmatrix", row, place);
    count(SHARED_READ, 16);
    LaneValues &values = meet(0xffffffff, &row, sizeof row, place);
    int g = self->lane / 4, q = self->lane % 4;
    for (int matrix = 0; matrix < 4; matrix++) {
        registers[matrix] = 0;
        for (int i = 0; i < 2; i++) {
            const uint16_t *from;
            memcpy(&from, values[matrix * 8 + (transposed ? 2 * q + i : g)], sizeof from);
            registers[matrix] |= (uint32_t)from[transposed ? g : 2 * q + i] << 16 * i;
        }
    }
}

// Starts to copy `bytes` (0 to 16) from global to shared memory, and zeros after them up to 16.
// Until the copy is waited for nobody knows what lies there: a NaN.
inline EMULATOR_UNCOUNTED void emu_cp_async16(void *to, const void *from, int bytes,
                                              emulator::Place place = {}) {
    using namespace emulator;
    check_shared("cp.async", to, place);
    if ((uintptr_t)from % 16) {
        die("%s:%d: cp.async: source %p is not aligned to 16 bytes", place.file, place.line, from);
    }
    memset(to, 0xff, 16);
    Unwatched unwatched;
    self->copies.push_back({to, from, bytes, self->copy_groups});
}
inline void emu_cp_async_commit() {
    emulator::self->copy_groups++;
}

// Waits until at most `pending` of this thread's groups are still on their way.
inline EMULATOR_UNCOUNTED void emu_cp_async_wait(int pending) {
    using namespace emulator;
    std::vector<AsyncCopy> done;
    {
        Unwatched unwatched;
        std::vector<AsyncCopy> &copies = self->copies;
        auto later = std::find_if(copies.begin(), copies.end(), [=](const AsyncCopy &copy) {
            return copy.group >= self->copy_groups - pending;
        });
        done.assign(copies.begin(), later);
        copies.erase(copies.begin(), later);
    }
    for (const AsyncCopy &copy : done) {
        memcpy(copy.to, copy.from, (size_t)copy.bytes);
        memset((char *)copy.to + copy.bytes, 0, (size_t)(16 - copy.bytes));
        count(GLOBAL_READ, copy.bytes);
        count(SHARED_WRITE, 16);
    }
}

/* ==== 5. Devices and their memory ============================================================= */

#define EMULATOR_ERRORS(X)                                                                        \
    X(cudaSuccess, 0, "no error")                                                                 \
    X(cudaErrorInvalidValue, 1, "invalid argument")                                               \
    X(cudaErrorMemoryAllocation, 2, "out of memory")                                              \
    X(cudaErrorInvalidConfiguration, 9, "invalid configuration argument")                         \
    X(cudaErrorNoDevice, 100, "no CUDA-capable device is detected")                               \
    X(cudaErrorInvalidDevice, 101, "invalid device ordinal")                                      \
    X(cudaErrorInvalidResourceHandle, 400, "invalid resource handle")                             \
    X(cudaErrorNotReady, 600, "device not ready")                                                 \
    X(cudaErrorPeerAccessAlreadyEnabled, 704, "peer access is already enabled")                   \
    X(cudaErrorPeerAccessNotEnabled, 705, "peer access has not been enabled")                     \
    X(cudaErrorStreamCaptureUnsupported, 900, "operation not permitted when stream is capturing") \
    X(cudaErrorIllegalState, 401, "the operation cannot be performed in the present state")
#define EMULATOR_ENUM(NAME, VALUE, TEXT) NAME = VALUE,
enum cudaError_t { EMULATOR_ERRORS(EMULATOR_ENUM) };
typedef cudaError_t cudaError;

namespace emulator {
static std::mutex runtime_lock; // of all that follows; never held while a kernel or a copy runs
static std::condition_variable runtime_changed;
static thread_local int current_device;
static thread_local cudaError_t last_error;

inline cudaError_t failed(cudaError_t error) {
    if (error != cudaSuccess) {
        last_error = error;
    }
    return error;
}

// The numbers of the devices that CUDA_VISIBLE_DEVICES leaves; it ends at the first that is none.
inline const std::vector<int> &devices() {
    static const std::vector<int> visible = [] {
        int count = (int)setting("CUEMU_DEVICES", 1);
        const char *text = getenv("CUDA_VISIBLE_DEVICES");
        std::vector<int> list;
        for (int i = 0; !text && i < count; i++) {
            list.push_back(i);
        }
        while (text && *text) {
            char *end;
            long number = strtol(text, &end, 10);
            if (end == text || number < 0 || number >= count) {
                break;
            }
            list.push_back((int)number);
            text = *end == ',' ? end + 1 : "";
        }
        return list;
    }();
    return visible;
}
inline int device_count() {
    return (int)devices().size();
}

struct Allocation {
    size_t bytes;
    int device;            // -1: of the host, page-locked
    char *pages;           // null: from malloc()
    size_t bytes_of_pages; // which fault while nothing runs on a GPU; one more always does
};
static std::map<const char *, Allocation> allocations;
static std::map<int, size_t> used_memory; // by device
static std::map<std::pair<int, int>, bool> peers;

inline size_t device_memory() {
    return (size_t)setting("CUEMU_MEMORY", 4l << 30);
}

// The allocation that holds an address, or ends there.
inline const Allocation *find_allocation(const void *address, const char **begin = nullptr) {
    auto next = allocations.upper_bound((const char *)address);
    if (next == allocations.begin()) {
        return nullptr;
    }
    auto found = std::prev(next);
    if (begin) {
        *begin = found->first;
    }
    bool inside = (const char *)address <= found->first + found->second.bytes;
    return inside ? &found->second : nullptr;
}

#if defined(EMULATOR_ASAN) || defined(EMULATOR_TSAN) // which watch malloc's memory
inline bool protects() {
    return false;
}
#else
inline bool protects() {
    static const bool answer = setting("CUEMU_PROTECT", 0);
    return answer;
}
#endif

// While one of these lives, memory of the GPUs can be touched.
static int memory_users;
struct UseMemory {
    UseMemory() {
        use(1, PROT_READ | PROT_WRITE);
    }
    ~UseMemory() {
        use(-1, PROT_NONE);
    }
    static void use(int change, int protection) {
        if (!protects()) {
            return;
        }
        std::lock_guard<std::mutex> guard(runtime_lock);
        bool unused = memory_users == 0;
        memory_users += change;
        for (auto &[begin, allocation] : allocations) {
            if ((unused || memory_users == 0) && allocation.pages) {
                mprotect(allocation.pages, allocation.bytes_of_pages, protection);
            }
        }
    }
};

// New memory holds 0xff, NaNs, as if it were somebody's who used it before.
inline cudaError_t allocate(void **memory, size_t bytes, int device) {
    const size_t PAGE = (size_t)sysconf(_SC_PAGESIZE);
    Allocation allocation = {bytes, device, nullptr, 0};
    *memory = nullptr;
    if (bytes == 0) {
        return cudaSuccess;
    }
    if (device >= 0) {
        std::lock_guard<std::mutex> guard(runtime_lock);
        if (bytes > device_memory() - used_memory[device]) {
            return failed(cudaErrorMemoryAllocation);
        }
        used_memory[device] += bytes;
    }
    if (protects() && device >= 0) { // ends where a page begins that faults
        size_t size = (bytes + PAGE - 1) / PAGE * PAGE;
        allocation.pages = (char *)mmap(nullptr, size + PAGE, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (allocation.pages == MAP_FAILED) {
            die("no memory for cudaMalloc of %zu bytes", bytes);
        }
        allocation.bytes_of_pages = size;
        mprotect(allocation.pages + size, PAGE, PROT_NONE);
        *memory = allocation.pages + size - (bytes + 15) / 16 * 16;
    } else if (posix_memalign(memory, 256, bytes)) {
        die("no memory for cudaMalloc of %zu bytes", bytes);
    }
    memset(*memory, 0xff, bytes);
    std::lock_guard<std::mutex> guard(runtime_lock);
    allocations[(const char *)*memory] = allocation;
    if (allocation.pages && memory_users == 0) {
        mprotect(allocation.pages, allocation.bytes_of_pages, PROT_NONE);
    }
    return cudaSuccess;
}

inline cudaError_t release(const void *memory, bool of_host) {
    if (!memory) {
        return cudaSuccess;
    }
    std::lock_guard<std::mutex> guard(runtime_lock);
    auto found = allocations.find((const char *)memory);
    if (found == allocations.end() || (found->second.device < 0) != of_host) {
        die("%s: %p is not such memory, or was freed before", of_host ? "cudaFreeHost" : "cudaFree",
            memory);
    }
    Allocation allocation = found->second;
    allocations.erase(found);
    used_memory[allocation.device] -= allocation.bytes;
    if (allocation.pages) {
        munmap(allocation.pages, allocation.bytes_of_pages + (size_t)sysconf(_SC_PAGESIZE));
    } else {
        free(const_cast<void *>(memory));
    }
    return cudaSuccess;
}

/* ---- Faults: what the page tables caught */

inline void handle_fault(int, siginfo_t *info, void *) {
    const char *address = (const char *)info->si_addr;
    auto next = allocations.upper_bound(address);
    if (self && next != allocations.begin()) {
        auto [begin, allocation] = *std::prev(next);
        if (address < begin + allocation.bytes + (64 << 10)) {
            die("memory fault: out of range, at byte %td of an allocation of %zu", address - begin,
                allocation.bytes);
        }
    }
    if (self) {
        die("memory fault at %p: out of range, freed, the host's, or this thread's stack is full",
            (const void *)address);
    }
    die("memory fault at %p: %s", (const void *)address,
        find_allocation(address) ? "the host touches memory of a GPU" : "in the host's code");
}

inline void catch_faults() {
    struct sigaction action = {};
    action.sa_sigaction = handle_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
}

// A sanitizer's report of its own does not know about kernels.
inline void say_where() {
    if (self) {
        fprintf(stderr,
                "cuda_on_cpu: kernel %s launched at %s:%d, block (%u,%u,%u), thread (%u,%u,%u)\n",
                block->launch->kernel, block->launch->place.file, block->launch->place.line,
                block->index.x, block->index.y, block->index.z, self->index.x, self->index.y,
                self->index.z);
    }
}

static const bool prepared_for_faults = [] {
#if defined(EMULATOR_ASAN)
    __sanitizer_set_death_callback(say_where);
#elif !defined(EMULATOR_TSAN)
    catch_faults();
#endif
    return true;
}();

/* ==== 6. Streams, events, graphs ================================================================

   A stream is a queue. What it holds runs in order, when somebody waits for it, or at once without
   CUEMU_LAZY. Who waits does the work, unless another thread of the host is at it. */

typedef std::function<void()> Operation;
typedef std::vector<Operation> Graph;

struct Stream {
    int device;
    bool waits_for_null_stream;
    std::deque<Operation> queue;
    long queued, finished; // operations so far
    bool busy, destroyed;
    std::thread::id worker; // who is at it
    Graph *captured;        // while what is queued goes there
};

struct Event {
    int device;
    Stream
        *stream; // recorded in: it happens when `position` operations of the stream have finished
    long position;
    Graph *captured;
    std::shared_ptr<double> seconds;
};

static std::vector<std::unique_ptr<Stream>> streams; // for ever: an event may point to a stream
static std::map<int, Stream *> null_streams;         // by device

inline Stream *new_stream(bool waits_for_null_stream) {
    streams.emplace_back(
        new Stream{current_device, waits_for_null_stream, {}, 0, 0, false, false, {}, nullptr});
    return streams.back().get();
}

inline Stream *stream_of(Stream *stream) {
    std::lock_guard<std::mutex> guard(runtime_lock);
    if (!stream && !null_streams[current_device]) {
        null_streams[current_device] = new_stream(false);
    }
    if (stream && stream->destroyed) {
        die("a stream is used that was destroyed");
    }
    return stream ? stream : null_streams[current_device];
}

// Does what the stream holds, until `position` operations have finished.
inline void run_until(Stream *stream, long position) {
    std::unique_lock<std::mutex> lock(runtime_lock);
    while (stream->finished < position) {
        if (stream->busy && stream->worker == std::this_thread::get_id()) {
            die("deadlock: an operation in a stream waits for itself");
        }
        if (stream->busy) {
            runtime_changed.wait(lock);
            continue;
        }
        Operation operation = std::move(stream->queue.front());
        stream->queue.pop_front();
        stream->busy = true;
        stream->worker = std::this_thread::get_id();
        lock.unlock();
        operation();
        lock.lock();
        stream->busy = false;
        stream->finished++;
        runtime_changed.notify_all();
    }
}

inline long operations(long Stream::*which, Stream *stream) {
    std::lock_guard<std::mutex> guard(runtime_lock);
    return stream->*which;
}
inline void finish_stream(Stream *stream) {
    run_until(stream, operations(&Stream::queued, stream));
}

// All streams of a device, or those that wait for its null stream.
inline void finish_device(int device, bool only_waiting = false) {
    std::vector<Stream *> waited_for;
    {
        std::lock_guard<std::mutex> guard(runtime_lock);
        for (auto &stream : streams) {
            if (stream->device == device && (stream->waits_for_null_stream || !only_waiting)) {
                waited_for.push_back(stream.get());
            }
        }
    }
    for (Stream *stream : waited_for) {
        finish_stream(stream);
    }
}

// The null stream and the others (but those that are cudaStreamNonBlocking) wait for one another.
inline void wait_for_others(Stream *stream) {
    Stream *null_stream = stream_of(nullptr);
    if (stream == null_stream) {
        finish_device(stream->device, true);
    } else if (stream->waits_for_null_stream && null_stream->device == stream->device) {
        finish_stream(null_stream);
    }
}

inline cudaError_t enqueue(Stream *stream, Operation operation) {
    static const bool lazy = setting("CUEMU_LAZY", 0);
    stream = stream_of(stream);
    if (stream->captured) {
        stream->captured->push_back(std::move(operation));
        return cudaSuccess;
    }
    wait_for_others(stream);
    {
        std::lock_guard<std::mutex> guard(runtime_lock);
        stream->queue.push_back(std::move(operation));
        stream->queued++;
    }
    if (!lazy) {
        finish_stream(stream);
    }
    return cudaSuccess;
}

/* ---- Copies */

// Is there such memory on that side? cudaMemcpyDefault takes any.
enum Side { ON_HOST, ON_GPU, ANYWHERE };
inline void check_range(const char *what, const void *begin, size_t bytes, Side side,
                        int device = -1) {
    std::lock_guard<std::mutex> guard(runtime_lock);
    const char *start;
    const Allocation *found = bytes ? find_allocation(begin, &start) : nullptr;
    if (found && (const char *)begin == start + found->bytes) {
        found = nullptr; // ends there, begins elsewhere
    }
    bool gpu = found && found->device >= 0;
    if (bytes && side != ANYWHERE && gpu != (side == ON_GPU)) {
        die("%s: %p is %s", what, begin,
            gpu ? "memory of a GPU" : "not memory of a GPU, or was freed");
    }
    if (found && (const char *)begin + bytes > start + found->bytes) {
        die("%s: %zu bytes, of which only %zu are there", what, bytes,
            (size_t)(start + found->bytes - (const char *)begin));
    }
    if (gpu && device >= 0 && found->device != device) {
        die("%s: %p is memory of device %d, not %d", what, begin, found->device, device);
    }
}

inline bool is_pageable(const void *memory) {
    std::lock_guard<std::mutex> guard(runtime_lock);
    return !find_allocation(memory);
}

inline cudaError_t copy(void *to, const void *from, size_t bytes, Side to_side, Side from_side,
                        Stream *stream, int to_device = -1, int from_device = -1) {
    auto check = [=] {
        check_range("copy to", to, bytes, to_side, to_device);
        check_range("copy from", from, bytes, from_side, from_device);
    };
    check();
    enqueue(stream, [=] {
        check(); // it may have been freed since
        UseMemory use;
        memcpy(to, from, bytes);
    });
    // Memory that is not page-locked goes through a buffer of the driver, which the host waits for.
    stream = stream_of(stream);
    if (!stream->captured && (is_pageable(to) || is_pageable(from))) {
        finish_stream(stream);
    }
    return cudaSuccess;
}

/* ---- Launches */

static std::map<std::pair<int, const void *>, size_t> dynamic_limits; // by device and kernel
const size_t STATIC_LIMIT = 48 << 10, DYNAMIC_LIMIT = 227 << 10;

[[noreturn]] __attribute__((format(printf, 2, 3))) inline void refuse(const Launch *launch,
                                                                      const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    report(launch, format, arguments);
}

inline void check_launch(const Launch *launch, const void *kernel, const Stream *stream) {
    dim3 grid = launch->grid, size = launch->block;
    long threads = (long)size.x * size.y * size.z;
    if ((long)grid.x * grid.y * grid.z == 0 || threads == 0) {
        refuse(launch, "an empty grid or block: (%u,%u,%u) blocks of (%u,%u,%u) threads", grid.x,
               grid.y, grid.z, size.x, size.y, size.z);
    }
    if (threads > 1024 || size.z > 64) {
        refuse(launch, "%ld threads in a block; at most 1024, 64 of them in z", threads);
    }
    if (grid.x > INT_MAX || grid.y > 65535 || grid.z > 65535) {
        refuse(launch, "a grid of (%u,%u,%u); at most (2147483647,65535,65535)", grid.x, grid.y,
               grid.z);
    }
    std::lock_guard<std::mutex> guard(runtime_lock);
    auto found = dynamic_limits.find({launch->device, kernel});
    size_t limit = found == dynamic_limits.end() ? STATIC_LIMIT : found->second;
    if (launch->dynamic_bytes > limit) {
        refuse(launch, "%zu bytes of dynamic shared memory; cudaFuncSetAttribute allows %zu here",
               launch->dynamic_bytes, limit);
    }
    if (stream->device != launch->device) {
        refuse(launch, "in a stream of device %d, while device %d is the current one",
               stream->device, launch->device);
    }
}

template <class T> void check_argument(const Launch *launch, int number, T argument) {
    if constexpr (std::is_pointer_v<T>) {
        std::lock_guard<std::mutex> guard(runtime_lock);
        const Allocation *found = find_allocation((const void *)argument);
        if (!found && argument) {
            refuse(launch, "argument %d is no pointer to memory of a GPU: the host's, or freed",
                   number);
        }
        if (found && found->device >= 0 && found->device != launch->device &&
            !peers[{launch->device, found->device}]) {
            refuse(launch, "argument %d is memory of device %d, launched on device %d", number,
                   found->device, launch->device);
        }
    }
}

template <class... Parameters> struct Launcher {
    Launch launch;
    void (*kernel)(Parameters...);
    Stream *stream;

    static void check(const Launch *launch, Parameters... arguments) {
        int number = 0;
        (void)launch;
        (void)number;
        (check_argument(launch, ++number, arguments), ...);
    }

    void operator()(Parameters... arguments) {
        check_launch(&launch, (const void *)kernel, stream_of(stream));
        check(&launch, arguments...);
        enqueue(stream, [queued = launch, kernel = kernel, arguments...] {
            Launch launch = queued;
            check(&launch, arguments...); // some may have been freed since
            launch.call = [=] { kernel(arguments...); };
            note_memory(&launch);
            UseMemory use;
            run_grid(&launch);
        });
    }
};

// What kernel<<<grid, block, dynamic_bytes, stream>>> has become; the arguments follow.
template <class... Parameters>
Launcher<Parameters...> launch(const char *name, void (*kernel)(Parameters...), dim3 grid,
                               dim3 block, size_t dynamic_bytes = 0, Stream *stream = nullptr,
                               Place place = {}) {
    return {{name, place, grid, block, dynamic_bytes, current_device, {}, {}}, kernel, stream};
}
} // namespace emulator

// kernel<<<grid, block>>>(x) has become EMU_LAUNCH((kernel), grid, block)(x). In a macro, too, the
// name is the kernel's own.
#define EMU_NAME(...) #__VA_ARGS__
#define EMU_LAUNCH(kernel, ...) emulator::launch(EMU_NAME kernel, kernel, __VA_ARGS__)

/* ==== 7. The runtime's functions ============================================================== */

typedef emulator::Stream *cudaStream_t;
typedef emulator::Event *cudaEvent_t;
typedef emulator::Graph *cudaGraph_t, *cudaGraphExec_t;
typedef void (*cudaHostFn_t)(void *data);
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum { cudaStreamDefault, cudaStreamNonBlocking };
enum { cudaEventDefault, cudaEventBlockingSync, cudaEventDisableTiming };
enum { cudaHostAllocDefault, cudaHostAllocPortable, cudaHostAllocMapped };
enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal,
    cudaStreamCaptureModeThreadLocal,
    cudaStreamCaptureModeRelaxed
};
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
enum cudaMemoryType {
    cudaMemoryTypeUnregistered,
    cudaMemoryTypeHost,
    cudaMemoryTypeDevice,
    cudaMemoryTypeManaged
};
struct cudaPointerAttributes {
    cudaMemoryType type;
    int device;
    void *devicePointer, *hostPointer;
};
struct cudaFuncAttributes {
    size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
    int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, maxDynamicSharedSizeBytes;
};
struct cudaUUID_t {
    char bytes[16];
};
struct cudaDeviceProp {
    char name[256];
    cudaUUID_t uuid;
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
    int major, minor, warpSize, multiProcessorCount, maxThreadsPerBlock,
        maxThreadsPerMultiProcessor;
    int maxThreadsDim[3], maxGridSize[3], regsPerBlock, regsPerMultiprocessor, l2CacheSize;
    int memoryBusWidth, concurrentKernels, asyncEngineCount, unifiedAddressing, ECCEnabled,
        integrated;
    int pciBusID, pciDeviceID, pciDomainID;
};
enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrWarpSize = 10,
    cudaDevAttrClockRate = 13,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrMemoryClockRate = 36,
    cudaDevAttrGlobalMemoryBusWidth = 37,
    cudaDevAttrL2CacheSize = 38,
    cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};

/* ---- Errors */

#define EMULATOR_NAME(NAME, VALUE, TEXT) \
    if (error == NAME) {                 \
        return #NAME;                    \
    }
#define EMULATOR_TEXT(NAME, VALUE, TEXT) \
    if (error == NAME) {                 \
        return TEXT;                     \
    }
inline const char *cudaGetErrorName(cudaError_t error) {
    EMULATOR_ERRORS(EMULATOR_NAME)
    return "unrecognized error code";
}
inline const char *cudaGetErrorString(cudaError_t error) {
    EMULATOR_ERRORS(EMULATOR_TEXT)
    return "unrecognized error code";
}
inline cudaError_t cudaPeekAtLastError() {
    return emulator::last_error;
}
inline cudaError_t cudaGetLastError() {
    cudaError_t error = emulator::last_error;
    emulator::last_error = cudaSuccess;
    return error;
}

/* ---- Devices */

inline cudaError_t cudaGetDeviceCount(int *count) {
    *count = emulator::device_count();
    return *count ? cudaSuccess : emulator::failed(cudaErrorNoDevice);
}
inline cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= emulator::device_count()) {
        return emulator::failed(emulator::device_count() ? cudaErrorInvalidDevice
                                                         : cudaErrorNoDevice);
    }
    emulator::current_device = device;
    return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int *device) {
    *device = emulator::current_device;
    return emulator::device_count() ? cudaSuccess : emulator::failed(cudaErrorNoDevice);
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
    if (device < 0 || device >= emulator::device_count()) {
        return emulator::failed(cudaErrorInvalidDevice);
    }
    *properties = {};
    int number = emulator::devices()[(size_t)device]; // whatever CUDA_VISIBLE_DEVICES calls it
    strcpy(properties->name, "emulated GPU");
    snprintf(properties->uuid.bytes, 16, "cuda_on_cpu %03d", number);
    properties->pciBusID = number + 1;
    properties->totalGlobalMem = emulator::device_memory();
    properties->sharedMemPerBlock = emulator::STATIC_LIMIT;
    properties->sharedMemPerBlockOptin = emulator::DYNAMIC_LIMIT;
    properties->sharedMemPerMultiprocessor = 228 << 10;
    properties->major = 9;
    properties->warpSize = 32;
    properties->multiProcessorCount = 4;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    for (int i = 0; i < 3; i++) {
        properties->maxThreadsDim[i] = i < 2 ? 1024 : 64;
        properties->maxGridSize[i] = i ? 65535 : INT_MAX;
    }
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->l2CacheSize = 1 << 20;
    properties->memoryBusWidth = 64;
    properties->concurrentKernels = properties->asyncEngineCount = properties->unifiedAddressing =
        1;
    return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp properties;
    cudaError_t error = cudaGetDeviceProperties(&properties, device);
    const std::map<int, int> values = {
        {cudaDevAttrMaxThreadsPerBlock, properties.maxThreadsPerBlock},
        {cudaDevAttrMaxSharedMemoryPerBlock, (int)properties.sharedMemPerBlock},
        {cudaDevAttrWarpSize, properties.warpSize},
        {cudaDevAttrClockRate, 1000000},
        {cudaDevAttrMultiProcessorCount, properties.multiProcessorCount},
        {cudaDevAttrMemoryClockRate, 1000000},
        {cudaDevAttrGlobalMemoryBusWidth, properties.memoryBusWidth},
        {cudaDevAttrL2CacheSize, properties.l2CacheSize},
        {cudaDevAttrMaxThreadsPerMultiProcessor, properties.maxThreadsPerMultiProcessor},
        {cudaDevAttrComputeCapabilityMajor, properties.major},
        {cudaDevAttrComputeCapabilityMinor, properties.minor},
        {cudaDevAttrMaxSharedMemoryPerMultiprocessor, (int)properties.sharedMemPerMultiprocessor},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, (int)properties.sharedMemPerBlockOptin},
    };
    if (error == cudaSuccess && !values.count(attribute)) {
        error = emulator::failed(cudaErrorInvalidValue);
    }
    *value = error ? 0 : values.at(attribute);
    return error;
}
inline cudaError_t cudaDriverGetVersion(int *version) {
    *version = 12000;
    return cudaSuccess;
}
inline cudaError_t cudaRuntimeGetVersion(int *version) {
    return cudaDriverGetVersion(version);
}
inline cudaError_t cudaDeviceSynchronize() {
    emulator::finish_device(emulator::current_device);
    return cudaSuccess;
}
inline cudaError_t cudaDeviceReset() {
    return cudaDeviceSynchronize();
}
inline cudaError_t cudaProfilerStart() {
    return cudaSuccess;
}
inline cudaError_t cudaProfilerStop() {
    return cudaSuccess;
}
inline cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer;
    return cudaSuccess;
}
inline cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
    if (peer < 0 || peer >= emulator::device_count() || peer == emulator::current_device) {
        return emulator::failed(cudaErrorInvalidDevice);
    }
    std::lock_guard<std::mutex> guard(emulator::runtime_lock);
    bool &enabled = emulator::peers[{emulator::current_device, peer}];
    cudaError_t error = enabled ? cudaErrorPeerAccessAlreadyEnabled : cudaSuccess;
    enabled = true;
    return emulator::failed(error);
}
inline cudaError_t cudaDeviceDisablePeerAccess(int peer) {
    std::lock_guard<std::mutex> guard(emulator::runtime_lock);
    bool &enabled = emulator::peers[{emulator::current_device, peer}];
    cudaError_t error = enabled ? cudaSuccess : cudaErrorPeerAccessNotEnabled;
    enabled = false;
    return emulator::failed(error);
}

/* ---- Kernels */

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel *kernel, cudaFuncAttribute attribute, int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) {
        return cudaSuccess;
    }
    if (value < 0 || value > (int)emulator::DYNAMIC_LIMIT) {
        return emulator::failed(cudaErrorInvalidValue);
    }
    std::lock_guard<std::mutex> guard(emulator::runtime_lock);
    emulator::dynamic_limits[{emulator::current_device, (const void *)kernel}] = (size_t)value;
    return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, Kernel *) {
    *attributes = {};
    attributes->maxThreadsPerBlock = 1024;
    attributes->ptxVersion = attributes->binaryVersion = 90;
    return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, Kernel *, int threads,
                                                          size_t) {
    *blocks = 2048 / threads;
    return cudaSuccess;
}
inline cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    return emulator::enqueue(stream, [=] { function(data); });
}

/* ---- Memory */

inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *memory) {
    std::lock_guard<std::mutex> guard(emulator::runtime_lock);
    const emulator::Allocation *found = emulator::find_allocation(memory);
    bool gpu = found && found->device >= 0;
    attributes->type = gpu     ? cudaMemoryTypeDevice
                       : found ? cudaMemoryTypeHost
                               : cudaMemoryTypeUnregistered;
    attributes->device = gpu ? found->device : found ? 0 : -2;
    attributes->devicePointer = found ? const_cast<void *>(memory) : nullptr;
    attributes->hostPointer = gpu ? nullptr : const_cast<void *>(memory);
    return cudaSuccess;
}
template <class T> cudaError_t cudaMalloc(T **memory, size_t bytes) {
    if (!emulator::device_count()) {
        return emulator::failed(cudaErrorNoDevice);
    }
    return emulator::allocate((void **)memory, bytes, emulator::current_device);
}
inline cudaError_t cudaFree(void *memory) {
    cudaPointerAttributes attributes;
    cudaPointerGetAttributes(&attributes, memory);
    emulator::finish_device(attributes.device); // who uses it has ended
    return emulator::release(memory, false);
}
template <class T> cudaError_t cudaHostAlloc(T **memory, size_t bytes, unsigned) {
    return emulator::allocate((void **)memory, bytes, -1);
}
template <class T> cudaError_t cudaMallocHost(T **memory, size_t bytes, unsigned flags = 0) {
    return cudaHostAlloc(memory, bytes, flags);
}
inline cudaError_t cudaFreeHost(void *memory) {
    cudaDeviceSynchronize();
    return emulator::release(memory, true);
}
inline cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
    std::lock_guard<std::mutex> guard(emulator::runtime_lock);
    *total = emulator::device_memory();
    *left = *total - emulator::used_memory[emulator::current_device];
    return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream = nullptr) {
    using namespace emulator;
    bool to_gpu = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_gpu = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    bool any = kind == cudaMemcpyDefault;
    return copy(to, from, bytes,
                any      ? ANYWHERE
                : to_gpu ? ON_GPU
                         : ON_HOST,
                any        ? ANYWHERE
                : from_gpu ? ON_GPU
                           : ON_HOST,
                stream);
}
inline cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind);
    emulator::finish_stream(emulator::stream_of(nullptr));
    return error;
}
inline cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                                       size_t bytes, cudaStream_t stream = nullptr) {
    using namespace emulator;
    return copy(to, from, bytes, ON_GPU, ON_GPU, stream, to_device, from_device);
}
inline cudaError_t cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device,
                                  size_t bytes) {
    cudaError_t error = cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes);
    emulator::finish_stream(emulator::stream_of(nullptr));
    return error;
}
inline cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes,
                                   cudaStream_t stream = nullptr) {
    emulator::check_range("cudaMemset", to, bytes, emulator::ON_GPU);
    return emulator::enqueue(stream, [=] {
        emulator::check_range("cudaMemset", to, bytes, emulator::ON_GPU);
        emulator::UseMemory use;
        memset(to, value, bytes);
    });
}
inline cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    return cudaMemsetAsync(to, value, bytes);
}

/* ---- Streams */

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    std::lock_guard<std::mutex> guard(emulator::runtime_lock);
    *stream = emulator::new_stream(flags != cudaStreamNonBlocking);
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int) {
    return cudaStreamCreateWithFlags(stream, flags);
}
inline cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    stream = emulator::stream_of(stream);
    if (stream->captured) {
        return emulator::failed(cudaErrorStreamCaptureUnsupported);
    }
    emulator::wait_for_others(stream);
    emulator::finish_stream(stream);
    return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    cudaError_t error = cudaStreamSynchronize(stream);
    stream->destroyed = true;
    return error;
}
// Whoever asks again and again shall see it end: every question does one more operation.
inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
    using namespace emulator;
    stream = stream_of(stream);
    long finished = operations(&Stream::finished, stream);
    if (finished == operations(&Stream::queued, stream)) {
        return cudaSuccess;
    }
    run_until(stream, finished + 1);
    return cudaErrorNotReady;
}

/* ---- Events */

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    *event = new emulator::Event{emulator::current_device, nullptr, 0, nullptr,
                                 std::make_shared<double>(0)};
    return cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t *event, unsigned flags = 0) {
    return cudaEventCreateWithFlags(event, flags);
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr) {
    stream = emulator::stream_of(stream);
    if (stream->device != event->device) {
        return emulator::failed(cudaErrorInvalidResourceHandle);
    }
    event->captured = stream->captured;
    if (stream->captured) {
        return cudaSuccess;
    }
    event->stream = stream;
    event->position = emulator::operations(&emulator::Stream::queued, stream) + 1;
    return emulator::enqueue(stream, [seconds = event->seconds] {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        *seconds = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    });
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (event->stream) {
        emulator::run_until(event->stream, event->position);
    }
    return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
    using namespace emulator;
    if (!event->stream || operations(&Stream::finished, event->stream) >= event->position) {
        return cudaSuccess;
    }
    cudaStreamQuery(event->stream);
    return cudaErrorNotReady;
}
inline cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    if (cudaEventQuery(begin) || cudaEventQuery(end)) {
        return cudaErrorNotReady;
    }
    *milliseconds = (float)((*end->seconds - *begin->seconds) * 1e3);
    return cudaSuccess;
}
// Of an event in a stream that is being captured, the waiting stream joins the capture.
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = 0) {
    stream = emulator::stream_of(stream);
    if (event->captured) {
        stream->captured = event->captured;
        return cudaSuccess;
    }
    if (!event->stream) {
        return cudaSuccess; // never recorded
    }
    return emulator::enqueue(stream, [from = event->stream, position = event->position] {
        emulator::run_until(from, position);
    });
}

/* ---- Graphs: the operations of a capture in the order in which they were queued */

inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (!stream || stream->captured) {
        return emulator::failed(cudaErrorIllegalState);
    }
    stream->captured = new emulator::Graph;
    return cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    *graph = stream->captured;
    std::lock_guard<std::mutex> guard(emulator::runtime_lock);
    for (auto &other : emulator::streams) {
        if (other->captured == *graph) {
            other->captured = nullptr;
        }
    }
    return *graph ? cudaSuccess : emulator::failed(cudaErrorIllegalState);
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph,
                                        unsigned long long = 0) {
    *executable = new emulator::Graph(*graph);
    return cudaSuccess;
}
inline cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph,
                                                 unsigned long long = 0) {
    return cudaGraphInstantiate(executable, graph);
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, void *,
                                        char *,
                                        size_t) { // as in CUDA 11
    return cudaGraphInstantiate(executable, graph);
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    return emulator::enqueue(stream, [operations = *executable] {
        for (const emulator::Operation &operation : operations) {
            operation();
        }
    });
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    delete executable;
    return cudaSuccess;
}

/* ==== 8. Counting accesses ======================================================================

   With -fsanitize=thread the compiler calls a function at every access to memory that may be
   shared. Here these are ours. What is neither in an array in shared memory nor in an allocation of
   a GPU, on a stack for instance, is not counted: a GPU would have most of it in registers. */

#ifdef CUEMU_COUNT
namespace emulator {
struct KernelTraffic {
    long launches = 0;
    Traffic traffic[TRAFFIC_KINDS];
};
struct TrafficTable {
    std::map<std::string, KernelTraffic> kernels;
    ~TrafficTable(); // at the program's end
};
static TrafficTable traffic_table;

inline TrafficTable::~TrafficTable() {
    const char *kinds[TRAFFIC_KINDS] = {"global reads", "writes", "shared reads", "writes"};
    fprintf(stderr, "%-24s %8s", "kernel", "launches");
    for (const char *kind : kinds) {
        fprintf(stderr, " %12s %14s", kind, "(bytes)");
    }
    fprintf(stderr, "\n");
    for (auto &[name, kernel] : kernels) {
        fprintf(stderr, "%-24s %8ld", name.c_str(), kernel.launches);
        for (const Traffic &traffic : kernel.traffic) {
            std::string bytes = "(" + std::to_string(traffic.bytes) + ")";
            fprintf(stderr, " %12ld %14s", traffic.accesses, bytes.c_str());
        }
        fprintf(stderr, "\n");
    }
}

inline void note_memory(Launch *launch) {
    std::lock_guard<std::mutex> guard(runtime_lock);
    traffic_table.kernels[launch->kernel].launches++;
    for (auto &[begin, allocation] : allocations) {
        launch->memory.push_back({begin, begin + allocation.bytes});
    }
}

inline void add_traffic(const Launch *launch) {
    std::lock_guard<std::mutex> guard(runtime_lock);
    KernelTraffic &kernel = traffic_table.kernels[launch->kernel];
    for (int kind = 0; kind < TRAFFIC_KINDS; kind++) {
        kernel.traffic[kind].accesses += block->traffic[kind].accesses;
        kernel.traffic[kind].bytes += block->traffic[kind].bytes;
        block->traffic[kind] = {};
    }
}

inline void count(int kind, long bytes) {
    block->traffic[kind].accesses++;
    block->traffic[kind].bytes += bytes;
}

inline bool is_global(const char *address) {
    const std::vector<Range> &memory = block->launch->memory; // sorted
    auto after = [](const char *a, const Range &range) { return a < range.begin; };
    auto next = std::upper_bound(memory.begin(), memory.end(), address, after);
    return next != memory.begin() && address < std::prev(next)->end;
}

__attribute__((no_sanitize("thread"))) inline void count_access(const void *address, long bytes,
                                                                bool write) {
    static thread_local bool counting; // for what we do here is watched as well
    if (!self || counting) {
        return;
    }
    counting = true;
    if (is_shared(address, 1)) {
        count(write ? SHARED_WRITE : SHARED_READ, bytes);
    } else if (is_global((const char *)address)) {
        count(write ? GLOBAL_WRITE : GLOBAL_READ, bytes);
    }
    counting = false;
}
} // namespace emulator

#define EMULATOR_HOOK extern "C" __attribute__((no_sanitize("thread"), used)) void
#define EMULATOR_HOOKS(BYTES)                                    \
    EMULATOR_HOOK __tsan_read##BYTES(void *address) {            \
        emulator::count_access(address, BYTES, false);           \
    }                                                            \
    EMULATOR_HOOK __tsan_write##BYTES(void *address) {           \
        emulator::count_access(address, BYTES, true);            \
    }                                                            \
    EMULATOR_HOOK __tsan_unaligned_read##BYTES(void *address) {  \
        emulator::count_access(address, BYTES, false);           \
    }                                                            \
    EMULATOR_HOOK __tsan_unaligned_write##BYTES(void *address) { \
        emulator::count_access(address, BYTES, true);            \
    }
EMULATOR_HOOKS(1)
EMULATOR_HOOKS(2)
EMULATOR_HOOKS(4)
EMULATOR_HOOKS(8)
EMULATOR_HOOKS(16)
EMULATOR_HOOK __tsan_read_range(void *address, size_t bytes) {
    emulator::count_access(address, (long)bytes, false);
}
EMULATOR_HOOK __tsan_write_range(void *address, size_t bytes) {
    emulator::count_access(address, (long)bytes, true);
}
#define EMULATOR_ATOMIC_HOOK(BITS, TYPE, NAME, ...)         \
    extern "C" __attribute__((no_sanitize("thread"), used)) \
    TYPE __tsan_atomic##BITS##_##NAME(uint##BITS##_t *address, __VA_ARGS__)
#define EMULATOR_ATOMIC_HOOKS(BITS, T)                                                         \
    EMULATOR_ATOMIC_HOOK(BITS, T, load, int) {                                                 \
        emulator::count_access(address, BITS / 8, false);                                      \
        return __atomic_load_n(address, __ATOMIC_SEQ_CST);                                     \
    }                                                                                          \
    EMULATOR_ATOMIC_HOOK(BITS, T, fetch_add, T value, int) {                                   \
        emulator::count_access(address, BITS / 8, true);                                       \
        return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);                           \
    }                                                                                          \
    EMULATOR_ATOMIC_HOOK(BITS, T, fetch_or, T value, int) {                                    \
        emulator::count_access(address, BITS / 8, true);                                       \
        return __atomic_fetch_or(address, value, __ATOMIC_SEQ_CST);                            \
    }                                                                                          \
    EMULATOR_ATOMIC_HOOK(BITS, int, compare_exchange_strong, T *expected, T value, int, int) { \
        emulator::count_access(address, BITS / 8, true);                                       \
        return __atomic_compare_exchange_n(address, expected, value, false, __ATOMIC_SEQ_CST,  \
                                           __ATOMIC_SEQ_CST);                                  \
    }
EMULATOR_ATOMIC_HOOKS(8, uint8_t)
EMULATOR_ATOMIC_HOOKS(32, uint32_t)
EMULATOR_ATOMIC_HOOKS(64, uint64_t)
EMULATOR_HOOK __tsan_init() {}
EMULATOR_HOOK __tsan_func_entry(void *) {}
EMULATOR_HOOK __tsan_func_exit() {}
EMULATOR_HOOK __tsan_vptr_update(void **, void *) {}
#else
namespace emulator {
inline void note_memory(Launch *) {}
inline void add_traffic(const Launch *) {}
inline void count(int, long) {}
} // namespace emulator
#endif
