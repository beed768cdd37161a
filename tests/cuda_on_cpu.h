/* cuda_on_cpu.h: runs CUDA kernels on the CPU, to test them without a GPU, and to see how one works.

   A .cu file goes through cuda_on_cpu.sed, which rewrites launches and __shared__, and is then C++17:
     { echo '#line 1 "kernels.cu"'; sed -f tests/cuda_on_cpu.sed kernels.cu; } |
         g++ -std=c++17 -O2 -march=native -fopenmp -include tests/cuda_on_cpu.h -x c++ -c - -o kernels.o
   One object of a program may be made so. Results are real, times mean nothing.

   What a GPU does at once is done here one after the other. The threads of a block take turns: one runs
   until it has to wait for others, at a barrier or in a warp operation. Blocks are spread over the CPU's
   cores, as over the multiprocessors of a GPU. What a GPU hides is reported: file, line, kernel, block
   and thread on stderr, then abort(). With -fsanitize=thread every CUDA thread is a thread of its own to
   the race detector, and only barriers and warp operations order two of them. With -fsanitize=thread
   -DCUEMU_COUNT (g++, -O1; linked without -fsanitize) no races are looked for: accesses are counted.

   Environment:
     CUEMU_DEVICES=N  as many GPUs (1). CUDA_VISIBLE_DEVICES=1,0 takes some of them, as ever.
     CUEMU_MEMORY=N   bytes of memory of each (4 GiB)
     CUEMU_ORDER=N    threads and blocks run forwards (0, the default), backwards (1), shuffled (seed N)
     CUEMU_LAZY=1     work queued in a stream starts only when something waits for it
     CUEMU_PROTECT=1  memory of a GPU faults beyond its end, and wherever the host touches it */

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

   A function for the GPU is a function. What stays of __shared__ is what cuda_on_cpu.sed could not
   read, and does not compile. */

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

extern "C" const char *cuda_emulated(void) {
    return "emulated CUDA on the CPU: results are real, times mean nothing";
}

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {
    }
};

#define EMULATOR_VECTORS(T, T2, T4)                                                                \
    struct alignas(2 * sizeof(T)) T2 {                                                             \
        T x, y;                                                                                    \
    };                                                                                             \
    struct alignas(16) T4 {                                                                        \
        T x, y, z, w;                                                                              \
    };                                                                                             \
    inline T2 make_##T2(T x, T y) {                                                                \
        return {x, y};                                                                             \
    }                                                                                              \
    inline T4 make_##T4(T x, T y, T z, T w) {                                                      \
        return {x, y, z, w};                                                                       \
    }
EMULATOR_VECTORS(float, float2, float4)
EMULATOR_VECTORS(int, int2, int4)
EMULATOR_VECTORS(unsigned, uint2, uint4)

/* ---- half and bfloat16: conversions only. Arithmetic would run in float here and round differently
   from a GPU's, so it does not compile. */

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
    float size = exponent == 0 ? (float)mantissa * 0x1p-24f
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
    explicit __half(float x) : bits(emulator::half_bits(x)) {
    }
    explicit operator float() const {
        return emulator::half_value(bits);
    }
};
struct __nv_bfloat16 {
    uint16_t bits;
    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float x) : bits(emulator::bfloat16_bits(x)) {
    }
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
   CPU, the worker, which switches between the fibers of the block. A fiber that comes to the end of a
   CUDA thread starts the next one, so that a kernel without barriers needs only one fiber. */

namespace emulator {

struct Place { // in the CUDA file; as a default argument, that of the call
    const char *file;
    int line;
};
#define EMULATOR_HERE                                                                              \
    emulator::Place {                                                                              \
        __builtin_FILE(), __builtin_LINE()                                                         \
    }

struct Fiber {
    void *stack = nullptr; // its lowest byte
    size_t stack_bytes = 0;
    void *stack_pointer = nullptr; // while it does not run
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
    long number;                              // no other block of this worker has it
    std::vector<Thread> threads;
    std::vector<Thread *> order, ready;       // `ready` is a ring: at most every thread is in it
    size_t first_ready, ready_count;
    int waiting, ended, barriers;             // at the barrier, at the end; barriers passed
    std::vector<std::deque<Meeting>> warps; // a deque: what lies in it stays in its place
    std::vector<Range> shared;                // arrays in shared memory
    void *dynamic;
    std::vector<Fiber *> idle;                // fibers without a thread
    Fiber worker;                             // the worker's own stack
    char barrier_token[2], end_token;         // addresses that stand for events, see section 3
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

__attribute__((format(printf, 1, 2))) [[noreturn]] inline void die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    report(self ? block->launch : nullptr, format, arguments);
}

/* ---- What the sanitizers are told. The race detector sees every CUDA thread as a thread. It orders
   what comes before happens_before(token) before what comes after happens_after(token), and the
   emulator's own accesses, while an Unwatched lives, are none of its business. */

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
    Unwatched() {
    }
};
inline void happens_before(void *) {
}
inline void happens_after(void *) {
}
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
inline void leave_stack(Fiber *, Fiber *) {
}
inline void arrive_on_stack(Fiber *) {
}
#endif

/* ---- Fibers. A switch saves the registers that a function must keep, and the stack pointer; then it
   takes the other stack pointer, and returns to where that fiber came from. */

void fiber_main();
const size_t STACK_BYTES = 256 << 10;

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
    stp d8, d9, [sp, #96]; stp d10, d11, [sp, #112]; stp d12, d13, [sp, #128]; stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp]; ldp x21, x22, [sp, #16]; ldp x23, x24, [sp, #32]; ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]; ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]; ldp d10, d11, [sp, #112]; ldp d12, d13, [sp, #128]; ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
const int SAVED_WORDS = 20, RETURN_WORD = 11; // x30
#endif

#if defined(__x86_64__) || defined(__aarch64__)
extern "C" void emulator_switch(void **save_stack_pointer, void *stack_pointer);
inline void prepare(Fiber *fiber) {
    void **top = (void **)((char *)fiber->stack + STACK_BYTES) - SAVED_WORDS;
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
    block->ready[(block->first_ready + block->ready_count++) % block->ready.size()] = thread;
}

inline Thread *next_ready() {
    if (block->ready_count == 0) {
        return nullptr;
    }
    Thread *thread = block->ready[block->first_ready];
    block->first_ready = (block->first_ready + 1) % block->ready.size();
    block->ready_count--;
    return thread;
}

inline Fiber *idle_fiber() {
    if (block->idle.empty() || race_detector) { // to which old stacks are memory of other threads
        return new_fiber();
    }
    Fiber *fiber = block->idle.back();
    block->idle.pop_back();
    return fiber;
}

// Goes on as `next`, on its stack; comes back when another thread switches to this fiber.
inline void switch_to(Fiber *from, Thread *next) {
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
    switch_fiber(from, next->fiber);
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
    if (next->fiber == mine) {
        return; // it was the last to come
    }
    switch_to(mine, next);
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

inline void end_thread() {
    Unwatched unwatched;
    if (!self->copies.empty()) {
        die("has ended without waiting for its last %d cp.async", (int)self->copies.size());
    }
    happens_before(&block->end_token);
    Fiber *mine = self->fiber;
    self->state = ENDED;
    block->ended++;
    Thread *next = next_ready();
    if (!next && block->ended < (int)block->threads.size()) {
        report_stuck();
    }
    if (next && !next->fiber && !race_detector) { // goes on with the next thread, on the same stack
        next->fiber = mine;
        self = next;
        return;
    }
    block->idle.push_back(mine);
    if (next) {
        switch_to(mine, next);
    } else {
        self = nullptr;
        switch_fiber(mine, &block->worker);
    }
}

inline void fiber_main() {
    arrive_on_stack(self->fiber);
    for (;;) {
        block->launch->call();
        end_thread();
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
    return {(unsigned)(i % size.x), (unsigned)(i / size.x % size.y), (unsigned)(i / size.x / size.y)};
}

inline void set_up_block(const Launch *launch, long i) {
    size_t n = launch->block.x * launch->block.y * launch->block.z;
    block->launch = launch;
    block->index = position(i, launch->grid);
    block->number++;
    block->first_ready = block->ready_count = 0;
    block->waiting = block->ended = block->barriers = 0;
    block->threads.resize(n);
    block->ready.resize(n);
    block->order.clear();
    block->warps.resize((n + 31) / 32);
    for (size_t t = 0; t < n; t++) {
        Thread &thread = block->threads[t];
        thread.index = position((long)t, launch->block);
        thread.warp = (int)(t / 32);
        thread.lane = (int)(t % 32);
        thread.fiber = nullptr;
        thread.copy_groups = 0;
    }
    for (unsigned t : ordering(n, i)) {
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
    block->shared.push_back({(char *)memory, (char *)memory + bytes});
    return memory;
}

// `Declaration` is a type of its own for every __shared__. The first thread of a block makes the array.
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
    for (const Range &array : block->shared) {
        if ((const char *)begin >= array.begin && (const char *)begin + bytes <= array.end) {
            return true;
        }
    }
    return false;
}

/* ---- A block, a grid */

// For the race detector a block is started by a thread of its own, so that nothing orders two blocks.
struct BlockStarter {
#ifdef EMULATOR_TSAN
    void *host = __tsan_get_current_fiber();
    BlockStarter() {
        block->worker.tsan_thread = __tsan_create_fiber(0);
        __tsan_switch_to_fiber(block->worker.tsan_thread, __tsan_switch_to_fiber_no_sync);
    }
    ~BlockStarter() {
        __tsan_switch_to_fiber(host, __tsan_switch_to_fiber_no_sync);
        __tsan_destroy_fiber(block->worker.tsan_thread);
    }
#endif
};

void count_traffic(const Launch *launch);

inline void run_threads(const Launch *launch, long i) {
    Unwatched unwatched;
    set_up_block(launch, i);
    block->dynamic = new_shared(launch->dynamic_bytes);
    switch_to(&block->worker, next_ready());
    happens_after(&block->end_token);
    for (Range array : block->shared) {
        free((void *)array.begin);
    }
    block->shared.clear();
    while (race_detector && !block->idle.empty()) {
        delete_fiber(block->idle.back());
        block->idle.pop_back();
    }
}

// Faults are handled on a stack of their own: the fiber's may be what has overflown.
inline void use_signal_stack() {
    static thread_local char memory[64 << 10];
    stack_t stack = {};
    stack.ss_sp = memory;
    stack.ss_size = sizeof memory;
    sigaltstack(&stack, nullptr);
}

struct DeleteBlock {
    void operator()(Block *old) {
        for (Fiber *fiber : old->idle) {
            delete_fiber(fiber);
        }
        delete old;
    }
};

__attribute__((no_sanitize("thread"))) inline void run_block(const Launch *launch, long i) {
    static thread_local std::unique_ptr<Block, DeleteBlock> owner;
    if (!block) {
        owner.reset(new Block());
        block = owner.get();
        use_signal_stack();
    }
    {
        BlockStarter starter;
        run_threads(launch, i);
        happens_before((void *)launch);
    }
    count_traffic(launch);
}

// Workers that run blocks of one launch; of several GPUs each gets its part of the cores.
inline int worker_count() {
#if defined(_OPENMP) && !defined(EMULATOR_TSAN)
    // A block may need 1024 stacks of two memory maps each, of which Linux gives a process 65530.
    return std::max(1, std::min(16, omp_get_max_threads() / (int)setting("CUEMU_DEVICES", 1)));
#else
    return 1;
#endif
}

inline void run_grid(const Launch *launch) {
    static long launches;
    long blocks = (long)launch->grid.x * launch->grid.y * launch->grid.z;
    std::vector<unsigned> order = ordering((size_t)blocks, __atomic_add_fetch(&launches, 1, __ATOMIC_RELAXED));
#if defined(_OPENMP) && !defined(EMULATOR_TSAN)
#pragma omp parallel for schedule(dynamic) num_threads(worker_count())
#endif
    for (long i = 0; i < blocks; i++) {
        run_block(launch, order[(size_t)i]);
    }
    happens_after((void *)launch);
}

/* ==== 3. Barriers, warp operations, atomics ===================================================== */

// Every lane of `mask` hands in a value; all get everyone's when the last has come.
typedef unsigned char LaneValues[32][32];
inline LaneValues &meet(unsigned mask, const void *value, size_t bytes, Place place) {
    Unwatched unwatched;
    if (!(mask >> self->lane & 1)) {
        die("%s:%d: lane %d is not in the mask %#x that it gives", place.file, place.line, self->lane,
            mask);
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
    happens_before(values);
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
    happens_after(values);
    return values;
}

template <class T> T shuffle(unsigned mask, T value, int source, Place place) {
    static_assert(sizeof(T) <= 32, "a value of at most 32 bytes");
    LaneValues &values = meet(mask, &value, sizeof value, place);
    if (!(mask >> source & 1)) {
        die("%s:%d: reads lane %d, which is not in the mask %#x", place.file, place.line, source, mask);
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

inline void __syncthreads(emulator::Place place = EMULATOR_HERE) {
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

inline void __syncwarp(unsigned mask = 0xffffffff, emulator::Place place = EMULATOR_HERE) {
    emulator::meet(mask, "", 0, place);
}

// `width` lanes side by side are a group of their own; who would read beyond it reads itself.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              emulator::Place place = EMULATOR_HERE) {
    int group = emulator::self->lane & ~(width - 1);
    return emulator::shuffle(mask, value, group | (source & (width - 1)), place);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32,
                  emulator::Place place = EMULATOR_HERE) {
    int lane = emulator::self->lane, source = lane ^ flip;
    return emulator::shuffle(mask, value, source / width > lane / width ? lane : source, place);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int distance, int width = 32,
                   emulator::Place place = EMULATOR_HERE) {
    int lane = emulator::self->lane;
    bool inside = lane % width + distance < width;
    return emulator::shuffle(mask, value, inside ? lane + distance : lane, place);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int distance, int width = 32,
                 emulator::Place place = EMULATOR_HERE) {
    int lane = emulator::self->lane;
    bool inside = lane % width >= distance;
    return emulator::shuffle(mask, value, inside ? lane - distance : lane, place);
}

inline unsigned __ballot_sync(unsigned mask, int vote, emulator::Place place = EMULATOR_HERE) {
    unsigned mine = vote ? 1u << emulator::self->lane : 0;
    return emulator::combine_lanes(mask, mine, place, [](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned mask, int vote, emulator::Place place = EMULATOR_HERE) {
    return __ballot_sync(mask, vote, place) != 0;
}
inline int __all_sync(unsigned mask, int vote, emulator::Place place = EMULATOR_HERE) {
    return __ballot_sync(mask, vote, place) == mask;
}
template <class T>
T __reduce_add_sync(unsigned mask, T value, emulator::Place place = EMULATOR_HERE) {
    static_assert(std::is_integral_v<T>, "for int and unsigned");
    return emulator::combine_lanes(mask, value, place, [](T a, T b) { return (T)(a + b); });
}
template <class T>
T __reduce_max_sync(unsigned mask, T value, emulator::Place place = EMULATOR_HERE) {
    static_assert(std::is_integral_v<T>, "for int and unsigned");
    return emulator::combine_lanes(mask, value, place, [](T a, T b) { return a < b ? b : a; });
}

/* Atomics in whole numbers only: those give the same sum in every order. They order nothing else;
   a fence does. */

#define EMULATOR_ATOMIC(NAME, BUILTIN)                                                             \
    template <class T> T NAME(T *address, std::common_type_t<T> value) {                           \
        static_assert(std::is_integral_v<T>, "float atomics make a result depend on the order");   \
        return BUILTIN(address, value, __ATOMIC_RELAXED);                                          \
    }
EMULATOR_ATOMIC(atomicAdd, __atomic_fetch_add)
EMULATOR_ATOMIC(atomicSub, __atomic_fetch_sub)
EMULATOR_ATOMIC(atomicOr, __atomic_fetch_or)
EMULATOR_ATOMIC(atomicAnd, __atomic_fetch_and)
EMULATOR_ATOMIC(atomicXor, __atomic_fetch_xor)
EMULATOR_ATOMIC(atomicExch, __atomic_exchange_n)

template <class T> T atomicCAS(T *address, std::common_type_t<T> expected, T value) {
    static_assert(std::is_integral_v<T>, "float atomics make a result depend on the order");
    __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
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

// What any thread wrote before its fence comes before what another does after a later fence.
inline void __threadfence() {
    static char token;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    emulator::happens_after(&token);
    emulator::happens_before(&token);
}

/* ==== 4. Tensor cores, ldmatrix, cp.async =======================================================

   What the wrappers of inline PTX call instead. The layouts are those of the PTX manual's chapters
   "Matrix fragments for mma.m16n8k16" and "m16n8k8", "ldmatrix" and "cp.async". */

namespace emulator {

// Element `i` of a register, of the lower or the upper 16 bits; tf32 has one, without the low 13 bits.
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
    uint32_t mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]}, of_row[6], of_column[6];
    LaneValues &values = meet(0xffffffff, mine, sizeof mine, place);
    int g = self->lane / 4, q = self->lane % 4;
    float sums[4] = {c[0], c[1], c[2], c[3]};
    for (int k = 0; k < 2 * HALF_K; k++) {
        int half = k / HALF_K, holder = k % HALF_K / PER_REGISTER, i = k % PER_REGISTER;
        memcpy(of_row, values[g * 4 + holder], sizeof of_row);
        for (int column = 0; column < 2; column++) {
            memcpy(of_column, values[(2 * q + column) * 4 + holder], sizeof of_column);
            float from_b = element(of_column[4 + half], i);
            sums[column] += element(of_row[2 * half], i) * from_b;
            sums[2 + column] += element(of_row[2 * half + 1], i) * from_b;
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
                                  emulator::Place place = EMULATOR_HERE) {
    emulator::multiply<2, emulator::bf16_element>(d, a, b, c, place);
}
inline void emu_mma_m16n8k16_f16(float *d, const uint32_t *a, const uint32_t *b, const float *c,
                                 emulator::Place place = EMULATOR_HERE) {
    emulator::multiply<2, emulator::f16_element>(d, a, b, c, place);
}
inline void emu_mma_m16n8k8_tf32(float *d, const uint32_t *a, const uint32_t *b, const float *c,
                                 emulator::Place place = EMULATOR_HERE) {
    emulator::multiply<1, emulator::tf32_element>(d, a, b, c, place);
}

// Four matrices of 8 rows of 16 bytes: lane i says where row i % 8 of matrix i / 8 lies. Lane 4*g + q
// gets elements 2*q and 2*q + 1 of row g of each matrix; transposed, of column g.
inline EMULATOR_UNCOUNTED void emu_ldmatrix_x4(uint32_t *registers, const void *row, bool transposed,
                                               emulator::Place place = EMULATOR_HERE) {
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

// Starts to copy `bytes` (0 to 16) from global to shared memory, and zeros after them up to 16. Until
// the copy is waited for nobody knows what lies there: a NaN.
inline EMULATOR_UNCOUNTED void emu_cp_async16(void *to, const void *from, int bytes,
                                              emulator::Place place = EMULATOR_HERE) {
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
