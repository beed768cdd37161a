/* cuda_on_cpu.h: runs CUDA kernels on the CPU, to test them without a GPU, and to see how it works.

   A .cu file goes through cuda_on_cpu.sed, which rewrites launches and __shared__, and is then C++:

     { echo '#line 1 "kernels.cu"'; sed -f tests/emulator/cuda_on_cpu.sed kernels.cu; } |
         g++ -std=c++17 -O2 -march=native \
             -include tests/emulator/cuda_on_cpu.h -x c++ -c - -o kernels.o

   Only one object file of a program may be made this way. Results are real, times mean nothing.
   With g++'s -fsanitize=alignment -fsanitize-undefined-trap-on-error, a float4 at an address that
   is no multiple of 16 is reported, which a GPU refuses and a CPU does not.

   What a GPU does in parallel is done here sequentially. The threads of a block are coroutines: one
   runs until it has to wait for others, at a barrier or in a warp operation. Blocks are spread over
   the CPU's cores, as over the multiprocessors of a GPU. In reading order: 1 the language,
   2 threads and blocks, 3 fibers, 4 shared memory, 5 synchronization (barriers, warp operations),
   6 grids and launches; then, in cuda_on_cpu_runtime.h, what the host sees of a GPU.

   Errors that a GPU hides are reported: file, line, kernel, block and thread go to stderr, then
   abort(). Some builds find more:
     -O1 -g -fsanitize=address   finds accesses out of range
     -O1 -g -fsanitize=thread    finds races: every CUDA thread is a thread to the race detector;
                                 nothing but barriers, __syncwarp and fences orders two of them
     -O1 -fsanitize=thread -DCUEMU_COUNT   g++ only, and linked without -fsanitize: counts accesses,
                                 and prints a table to stderr at the end
     the same with -g -fno-omit-frame-pointer -fsanitize-coverage=trace-pc (g++ 12 or newer): can
                                 also record what a block does, for labs/tools/see.py

   Environment:
     CUEMU_DEVICES=N   the number of GPUs (1). CUDA_VISIBLE_DEVICES=1,0 selects some, as usual
     CUEMU_MEMORY=N    bytes of memory that each has (4 GiB)
     CUEMU_SM=NN       their compute capability, as in sm_NN: 75, 80, 86, 89, 90 (this one), 100 or
                       120, and with it their multiprocessors and their shared memory
     CUEMU_CLOCK=1     events count the CUDA threads that have run, 1 us each, instead of seconds:
                       the same in all runs
     CUEMU_CORES=N     blocks run on N cores (all, 16 at most)
     CUEMU_ORDER=N     threads and blocks run forwards (0), backwards (1) or shuffled (other seeds)
     CUEMU_LEAKS=1     at the end, tells what has not been freed
     CUEMU_FAIL=NAME   this function fails with cudaErrorUnknown: cudaMalloc, cudaMallocHost or
                       cudaFuncSetAttribute
     CUEMU_GRID=N      a grid has at most N blocks in y and in z (65535)
     CUEMU_LAZY=1      work queued in a stream starts only when something waits for it
     CUEMU_PROTECT=1   a GPU's memory faults beyond its end, and wherever the host touches it
     CUEMU_RANGES=1    prints the ranges for Nsight, as threads begin (push) and end them (pop)
     CUEMU_SEE=KERNEL  records a block of it: see cuda_on_cpu_record.h
     CUEMU_STRICT=1    reports also what a GPU does correctly, but slowly (see section 3)

   Restrictions on kernels: one __shared__ array per declaration; template arguments written out at
   a launch, and no >>>( elsewhere; every _sync operation executed by all lanes of its mask; no
   waiting for another block; integer atomics only; half and bfloat16 only converted; inline PTX
   only where CUDA_ON_CPU is not defined. Of CUDA's functions there are those that the kernels use,
   and some that students may use. */

#pragma once
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

// IF_ASAN(...) and IF_TSAN(...) are compiled for one sanitizer only. gcc and clang name them
// differently.
#ifndef __has_feature
#define __has_feature(feature) 0
#endif
#define IF_ASAN(...)
#define IF_TSAN(...)
#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#include <sanitizer/common_interface_defs.h>
#undef IF_ASAN
#define IF_ASAN(...) __VA_ARGS__
#elif (defined(__SANITIZE_THREAD__) || __has_feature(thread_sanitizer)) && !defined(CUEMU_COUNT)
#include <sanitizer/tsan_interface.h>
#undef IF_TSAN
#define IF_TSAN(...) __VA_ARGS__
extern "C" void AnnotateIgnoreReadsBegin(const char *, int),
    AnnotateIgnoreReadsEnd(const char *, int);
extern "C" void AnnotateIgnoreWritesBegin(const char *, int),
    AnnotateIgnoreWritesEnd(const char *, int);
#endif

/* ==== 1. The language ===========================================================================

   A function for the GPU is a function. cuda_on_cpu.sed replaces __shared__ by EMU_SHARED and
   EMU_DYNAMIC, and <<<>>> by EMU_LAUNCH; a __shared__ that remains does not compile. */

#define CUDA_ON_CPU 1
#define PTX(emulated, ...) emulated
#define __CUDACC__ 1 // after the system's headers, some of which test it
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define __shared__ write_one_shared_array_per_declaration
#define EMU_SHARED(NAME, ...) \
    auto &NAME = emu::shared_array<__VA_ARGS__>([] {}, #NAME " " #__VA_ARGS__)
#define EMU_DYNAMIC(NAME, ...) auto *NAME = (__VA_ARGS__ *)emu::block->dynamic
#define EMU_LAUNCH(kernel, ...) \
    emu::launch(emu::kernel_name(EMU_NAME kernel, __PRETTY_FUNCTION__), kernel, __VA_ARGS__)
#define EMU_NAME(...) #__VA_ARGS__ // not expanded, so that a macro keeps the kernel's name

#define threadIdx (emu::self->index)
#define blockIdx (emu::block->index)
#define blockDim (emu::launched->block)
#define gridDim (emu::launched->grid)

struct uint3 {
    unsigned x, y, z;
};
struct dim3 : uint3 {
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : uint3{x, y, z} {}
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}

extern "C" const char *cuda_emulated(void) {
    return "emulated CUDA on the CPU: results are real, times mean nothing";
}

namespace emu {
template <class To, class From> To same_bits(From from) {
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
#define __float_as_uint(x) emu::same_bits<uint32_t>((float)(x))
#define __uint_as_float(x) emu::same_bits<float>((uint32_t)(x))

// 16-bit floats: conversions only, to nearest, ties to even. Arithmetic in float would round
// differently from a GPU's, so there is none.
inline uint16_t half_bits(float x) { // sign, 5 bits of exponent, 10 of mantissa
    unsigned sign = std::signbit(x) ? 0x8000 : 0;
    x = fabsf(x);
    if (!(x < 65520)) // larger ones round to infinity
        return (uint16_t)(x != x ? 0x7fff : sign | 0x7c00);
    int exponent = std::max(ilogbf(x), -14); // smaller numbers are subnormal
    unsigned mantissa = (unsigned)lrintf(ldexpf(x, 10 - exponent));
    return (uint16_t)(sign | (((unsigned)(exponent + 14) << 10) + mantissa));
}
inline float half_value(uint32_t bits) {
    uint32_t size = bits & 0x7fff, bias = size < 0x7c00 ? 127 - 15 : 2 * (127 - 15); // or infinite
    float normal = __uint_as_float((size << 13) + (bias << 23)), subnormal = (float)size * 0x1p-24f;
    return copysignf(size < 0x400 ? subnormal : normal, bits & 0x8000 ? -1.f : 1.f);
}
inline uint16_t bfloat16_bits(float x) { // the upper half of a float
    uint32_t bits = __float_as_uint(x);
    return x != x ? 0x7fff : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float bfloat16_value(uint32_t bits) {
    return __uint_as_float(bits << 16);
}
template <uint16_t (*encode)(float), float (*decode)(uint32_t)> struct Float16 {
    uint16_t bits;
    Float16() = default;
    explicit Float16(float x) : bits(encode(x)) {}
    explicit operator float() const {
        return decode(bits);
    }
};

namespace api { // CUDA's own names
typedef Float16<half_bits, half_value> __half;
typedef Float16<bfloat16_bits, bfloat16_value> __nv_bfloat16;
#define __float2half(x) __half(x)
#define __half2float(x) ((float)(x))
#define __float2bfloat16(x) __nv_bfloat16(x)
#define __bfloat162float(x) ((float)(x))
struct __half2 {
    __half x, y;
};
struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
inline __half2 __floats2half2_rn(float low, float high) {
    return {__half(low), __half(high)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
    return {__nv_bfloat16(low), __nv_bfloat16(high)};
}
template <class PAIR> float __low2float(PAIR p) {
    return (float)p.x;
}
template <class PAIR> float __high2float(PAIR p) {
    return (float)p.y;
}

// As in CUDA: of a number and a NaN, the number.
template <class A, class B> std::common_type_t<A, B> min(A a, B b) {
    typedef std::common_type_t<A, B> T;
    return (T)b < (T)a || (T)a != (T)a ? (T)b : (T)a;
}
template <class A, class B> std::common_type_t<A, B> max(A a, B b) {
    typedef std::common_type_t<A, B> T;
    return (T)a < (T)b || (T)a != (T)a ? (T)b : (T)a;
}
} // namespace api

/* ==== 2. Threads and blocks =================================================================== */

const bool race_detector = IF_TSAN(true ||) false;
const bool sanitized = IF_ASAN(true ||) race_detector;

struct SourceLocation { // as a default argument, {}: where the call stands
    const char *file;
    int line;
    SourceLocation(const char *file = __builtin_FILE(), int line = __builtin_LINE())
        : file(file), line(line) {}
};
struct Fiber {                   // see section 3
    const void *stack = nullptr; // its lowest byte
    size_t stack_bytes = 0;
    void *stack_pointer = nullptr;         // while it does not run
    void *asan = nullptr, *tsan = nullptr; // its handles in the sanitizers
};
struct AsyncCopy { // a cp.async that has not been waited for
    void *to;
    const void *from;
    int bytes, group;
};
struct Thread {
    uint3 index;
    unsigned number; // in the block
    bool ended;
    SourceLocation location; // of the barrier or warp operation in which it waits
    unsigned mask;           // of the lanes that it waits for; 0: at a barrier
    Fiber *fiber;            // null: not started
    bool in_kernel;          // and not in the emulator's own code, which waits and switches
    int copy_groups;
    std::deque<AsyncCopy> copies;
};

// A synchronization point of all threads of a block (barrier) or the lanes of a mask: each passes a
// value and continues when the last has arrived. A thread may arrive at the next point before
// another has read the values of this one, hence two sets that alternate.
typedef unsigned char LaneValues[32][32];
struct SyncPoint {
    std::vector<Thread *> arrived;
    int number = 0; // how often it was completed
    alignas(16) LaneValues values[2];
};
struct SharedArray {
    char *begin;
    size_t bytes;
    const char *name; // and type
};
struct PointerArgument { // of a launch: in argument `number`, at byte `offset`
    int number;
    size_t offset;
    const void *address;
};
struct Stream;
struct Traffic;
struct Launch {
    const char *name;
    const void *kernel;
    SourceLocation location;
    dim3 grid, block;
    size_t dynamic_bytes;
    Stream *stream;
    int device;
    Traffic *traffic; // its accesses, if they are counted
    bool recorded;    // one of its blocks is: see cuda_on_cpu_record.h
    std::vector<PointerArgument> pointers;
    std::function<void(int)> check; // the kernel's arguments
    std::function<void()> call;     // the kernel with its arguments
    size_t shared_limit = 0;        // of a block, static and dynamic together
};

struct Block {
    uint3 index;
    long number = 0; // unique among the blocks of this worker
    std::vector<Thread> threads;
    std::deque<Thread *> ready; // they run in this order
    size_t ended;
    std::unique_ptr<SyncPoint> barrier;
    std::vector<std::map<unsigned, SyncPoint>> warps; // by mask
    std::vector<SharedArray> shared;
    void *dynamic;
    std::vector<Fiber *> idle;   // without a CUDA thread
    Fiber worker;                // the stack of the CPU's thread
    char signal_stack[64 << 10]; // for the fault handler: the fiber's stack may be full
    Block() {
        shared.reserve(64); // must not be reallocated while accesses are counted
        stack_t stack = {signal_stack, 0, sizeof signal_stack};
        if (!sanitized)
            sigaltstack(&stack, nullptr);
    }
    ~Block();
};

// In cuda_on_cpu_record.h; they do nothing where accesses are not counted
void begin_recording(unsigned block);
void end_recording(unsigned block);
void record_here(char kind, const void *address, long bytes);
void record_barrier(char kind);
void record_landing(const void *address);
void record_flop(long count);

// What this thread of the CPU runs; self is null while it runs no kernel.
static thread_local Block *block;
static thread_local Thread *self;
static thread_local const Launch *launched;
inline int lane() {
    return (int)(self->number % 32);
}
inline std::string who() {
    uint3 b = block->index, t = self->index;
    char text[100];
    snprintf(text, sizeof text, "block (%u,%u,%u), thread (%u,%u,%u)", b.x, b.y, b.z, t.x, t.y,
             t.z);
    return text;
}
inline void say_where() {
    SourceLocation location = launched ? launched->location : SourceLocation();
    fprintf(stderr, "cuda_on_cpu: ");
    if (launched)
        fprintf(stderr, "kernel %s launched at %s:%d", launched->name, location.file,
                location.line);
    if (self)
        fprintf(stderr, ", %s", who().c_str());
    fprintf(stderr, launched ? ": " : "");
}
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void die(const char *format, ...) {
    static std::mutex only_one;
    only_one.lock(); // forever: only the first error is reported
    fflush(stdout);
    say_where();
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    abort();
}
inline long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}

// For the race detector, accesses before happens_before(token) precede those after
// happens_after(token). It ignores the emulator's own accesses in the scope of an Unwatched.
inline void happens_before([[maybe_unused]] void *token) {
    IF_TSAN(__tsan_release(token));
}
inline void happens_after([[maybe_unused]] void *token) {
    IF_TSAN(__tsan_acquire(token));
}
struct Unwatched {
    Unwatched() {
        IF_TSAN(AnnotateIgnoreReadsBegin("", 0), AnnotateIgnoreWritesBegin("", 0));
    }
    ~Unwatched() {
        IF_TSAN(AnnotateIgnoreReadsEnd("", 0), AnnotateIgnoreWritesEnd("", 0));
    }
};

/* ==== 3. Fibers =================================================================================

   A fiber is a stack and the point at which its function was suspended. A block belongs to one
   thread of the CPU, the worker, which switches between the fibers of the block. A fiber that has
   finished a CUDA thread starts the next one, so that a kernel without barriers needs one fiber. */

// A context switch saves the callee-saved registers and the stack pointer, then loads the other
// fiber's stack pointer and registers, and returns to where that fiber was suspended.
extern "C" void emulator_switch(void **save_stack_pointer, void *stack_pointer);
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
const int SAVED_WORDS = 6 + 2, RETURN_WORD = 6; // the last word: fiber_main has no return address
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
#else
#error "cuda_on_cpu.h switches stacks on x86-64 and 64-bit ARM only"
#endif

// The address sanitizer reports the bounds of the previous stack only after the switch.
IF_ASAN(static thread_local Fiber *left;)
inline void arrive_on_stack([[maybe_unused]] Fiber *fiber) {
    IF_ASAN(__sanitizer_finish_switch_fiber(fiber->asan, &left->stack, &left->stack_bytes));
}

// The race detector must not instrument functions that begin in one thread and end in another.
#define EMU_SWITCHES __attribute__((noinline, no_sanitize("thread")))
EMU_SWITCHES inline void switch_fiber(Fiber *from, Fiber *to) {
    IF_ASAN(left = from; __sanitizer_start_switch_fiber(&from->asan, to->stack, to->stack_bytes));
    IF_TSAN(__tsan_switch_to_fiber(to->tsan, __tsan_switch_to_fiber_no_sync));
    emulator_switch(&from->stack_pointer, to->stack_pointer);
    arrive_on_stack(from);
}
void fiber_main();
const size_t PAGE = (size_t)sysconf(_SC_PAGESIZE);

inline Fiber *new_fiber() {
    Fiber *fiber = new Fiber;
    // The race detector keeps shadow memory for every byte of a new stack, which takes time.
    fiber->stack_bytes = (race_detector ? 64 : 256) << 10;
    fiber->stack = mmap(nullptr, fiber->stack_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    // A guard page: a stack overflow faults.
    if (fiber->stack == MAP_FAILED || mprotect((void *)fiber->stack, PAGE, PROT_NONE) != 0)
        die("no memory for the stack of a thread");
    // Stacks start at different page offsets; otherwise they would compete for a few cache sets.
    static thread_local size_t fibers;
    size_t end = fiber->stack_bytes - fibers++ % 32 * 128;
    void **top = (void **)((char *)fiber->stack + end) - SAVED_WORDS;
    top[RETURN_WORD] = (void *)fiber_main;
    fiber->stack_pointer = top;
    IF_TSAN(fiber->tsan = __tsan_create_fiber(0));
    return fiber;
}

inline void delete_idle_fibers() {
    for (Fiber *fiber : block->idle) {
        IF_TSAN(__tsan_destroy_fiber(fiber->tsan));
        munmap((void *)fiber->stack, fiber->stack_bytes);
        delete fiber;
    }
    block->idle.clear();
}
inline Block::~Block() {
    delete_idle_fibers();
}

// A deadlock: no thread is ready, yet some have not ended. Reports which one waits for what.
[[noreturn]] inline void report_stuck() {
    for (Thread &thread : block->threads) {
        self = &thread;
        if (!thread.ended && thread.mask)
            die("%s:%d: waits forever: some lanes of mask %#x never arrive at this warp "
                "operation; they have ended or wait elsewhere",
                thread.location.file, thread.location.line, thread.mask);
    }
    while (!self->ended)
        self--;
    SourceLocation location = block->barrier->arrived[0]->location;
    die("has ended while %zu threads wait for it in __syncthreads() at %s:%d",
        block->barrier->arrived.size(), location.file, location.line);
}

// Schedules the first ready thread; if all have ended, returns to the worker.
inline Fiber *next_fiber() {
    Unwatched unwatched;
    if (block->ready.empty() && block->ended < block->threads.size())
        report_stuck();
    if (block->ready.empty()) {
        self = nullptr;
        return &block->worker;
    }
    self = block->ready.front();
    block->ready.pop_front();
    if (!self->fiber && block->idle.empty())
        block->idle.push_back(new_fiber());
    if (!self->fiber) {
        self->fiber = block->idle.back();
        block->idle.pop_back();
    }
    IF_TSAN(__tsan_set_fiber_name(self->fiber->tsan, (who() + " of " + launched->name).c_str()));
    return self->fiber;
}

// Suspends the running thread until another makes it ready.
EMU_SWITCHES inline void yield() {
    Fiber *mine = self->fiber, *next = next_fiber();
    if (next != mine)
        switch_fiber(mine, next);
}
inline void end_thread() {
    Unwatched unwatched;
    if (!self->copies.empty())
        die("has ended without waiting for its last %zu cp.async", self->copies.size());
    happens_before(&block->ended);
    self->ended = true;
    block->ended++;
    block->idle.push_back(self->fiber);
}

EMU_SWITCHES inline void fiber_main() {
    arrive_on_stack(self->fiber);
    for (;;) {
        self->in_kernel = true;
        launched->call();
        self->in_kernel = false;
        end_thread();
        yield(); // and continues here as a thread that has not started yet
    }
}

/* ==== 4. Shared memory ==========================================================================

   Uninitialized when a block starts: every byte is 0xff, a NaN. */

inline void *new_shared(size_t bytes, const char *name) {
    void *memory;
    size_t all = bytes;
    for (const SharedArray &array : block->shared)
        all += array.bytes;
    if (all > launched->shared_limit)
        die("%zu bytes of shared memory, static and dynamic; a block can have %zu here", all,
            launched->shared_limit);
    if (posix_memalign(&memory, 128, bytes ? bytes : 1) || block->shared.size() == 64)
        die("no memory for an array in shared memory, or more than 64 of them");
    memset(memory, 0xff, bytes);
    block->shared.push_back({(char *)memory, bytes, name});
    return memory;
}

// `Declaration` is a distinct type for every __shared__. A block's first thread allocates it.
template <class Array, class Declaration>
Array &shared_array(Declaration, [[maybe_unused]] const char *name) {
    Unwatched unwatched;
    static thread_local void *array;
    static thread_local long made_for_block;
    static_assert(sizeof(Array) <= 48 << 10, "static shared memory ends at 48 KB");
    if (made_for_block != block->number) {
        made_for_block = block->number;
        array = new_shared(sizeof(Array), name);
    }
    return *(Array *)array;
}

// Functions whose own accesses are not counted, which makes them several times as fast
#if defined(CUEMU_COUNT) && __GNUC__ >= 12
#define EMU_UNCOUNTED __attribute__((no_sanitize("thread"), no_sanitize_coverage))
#elif defined(CUEMU_COUNT)
#define EMU_UNCOUNTED __attribute__((no_sanitize("thread")))
#else
#define EMU_UNCOUNTED
#endif

inline EMU_UNCOUNTED bool is_shared(const void *address, size_t bytes) {
    const char *begin = (const char *)address;
    const SharedArray *arrays = block->shared.data();
    const size_t count = block->shared.size();
    for (size_t i = 0; i < count; i++)
        if (begin >= arrays[i].begin && begin + bytes <= arrays[i].begin + arrays[i].bytes)
            return true;
    return false;
}

/* ==== 5. Synchronization ====================================================================== */

// The running thread passes a value, and waits until `expected` threads have arrived.
inline LaneValues &arrive_and_wait(SyncPoint &point, size_t expected, const void *value,
                                   size_t bytes, SourceLocation location, unsigned mask,
                                   bool orders_memory) {
    Unwatched unwatched;
    self->in_kernel = false;
    LaneValues &values = point.values[point.number % 2];
    memcpy(values[lane()], value, bytes);
    self->location = location;
    self->mask = mask;
    if (orders_memory)
        happens_before(values);
    point.arrived.push_back(self);
    if (point.arrived.size() == expected) {
        for (Thread *thread : point.arrived) {
            if (thread->location.line != location.line)
                die(mask ? "%s:%d: lane %u waits for this one in another warp operation, at line %d"
                         : "divergent barrier: waits in __syncthreads() at %s:%d, thread %u in one "
                           "at line %d",
                    location.file, location.line, thread->number % (mask ? 32 : 1024),
                    thread->location.line);
            block->ready.push_back(thread);
        }
        point.arrived.clear();
        point.number++;
    }
    yield();
    self->in_kernel = true;
    if (orders_memory)
        happens_after(values);
    return values;
}

// Of the warp operations only __syncwarp orders memory accesses.
inline LaneValues &wait_for_lanes(unsigned mask, const void *value, size_t bytes,
                                  SourceLocation location, bool orders_memory = false) {
    if (!(mask >> lane() & 1))
        die("%s:%d: lane %d is not in the mask %#x that it gives", location.file, location.line,
            lane(), mask);
    Unwatched unwatched;
    SyncPoint &point = block->warps[self->number / 32][mask];
    size_t lanes = (size_t)__builtin_popcount(mask);
    return arrive_and_wait(point, lanes, value, bytes, location, mask, orders_memory);
}

template <class T> T shuffle(unsigned mask, T value, int source, SourceLocation location) {
    static_assert(sizeof(T) <= 32, "a value of at most 32 bytes");
    LaneValues &values = wait_for_lanes(mask, &value, sizeof value, location);
    if (!(mask >> source & 1))
        die("%s:%d: reads lane %d, which is not in the mask %#x", location.file, location.line,
            source, mask);
    memcpy(&value, values[source], sizeof value);
    return value;
}

namespace api {

inline void __syncthreads(SourceLocation location = {}) {
    arrive_and_wait(*block->barrier, block->threads.size(), "", 0, location, 0, true);
    record_barrier('|');
}
inline void __syncwarp(unsigned mask = 0xffffffff, SourceLocation location = {}) {
    wait_for_lanes(mask, "", 0, location, true);
    record_barrier('/');
}

// Groups of `width` adjacent lanes are independent; a lane that would read beyond its group reads
// its own value.
#define EMU_SHUFFLE(NAME, NUMBER, SOURCE, INSIDE)                                              \
    template <class T>                                                                         \
    T NAME(unsigned mask, T value, int NUMBER, int width = 32, SourceLocation location = {}) { \
        int source = SOURCE;                                                                   \
        return shuffle(mask, value, INSIDE ? source : lane(), location);                       \
    }
EMU_SHUFFLE(__shfl_sync, from, (lane() & ~(width - 1)) | (from & (width - 1)), true)
EMU_SHUFFLE(__shfl_xor_sync, flip, lane() ^ flip, source / width <= lane() / width)
EMU_SHUFFLE(__shfl_down_sync, distance, lane() + distance, lane() % width + distance < width)
EMU_SHUFFLE(__shfl_up_sync, distance, lane() - distance, lane() % width >= distance)

template <class T> T __reduce_add_sync(unsigned mask, T value, SourceLocation location = {}) {
    static_assert(std::is_integral_v<T>, "for int and unsigned");
    LaneValues &values = wait_for_lanes(mask, &value, sizeof value, location);
    T sum = 0;
    for (int i = 0; i < 32; i++) {
        memcpy(&value, values[i], sizeof value);
        sum += mask >> i & 1 ? value : 0;
    }
    return sum;
}
inline unsigned __ballot_sync(unsigned mask, int vote, SourceLocation location = {}) {
    return __reduce_add_sync(mask, vote ? 1u << lane() : 0, location);
}
inline int __any_sync(unsigned mask, int vote, SourceLocation location = {}) {
    return __ballot_sync(mask, vote, location) != 0;
}
inline int __all_sync(unsigned mask, int vote, SourceLocation location = {}) {
    return __ballot_sync(mask, vote, location) == mask;
}

// Integer atomics only: their sum is the same in every order. They are relaxed; a fence orders the
// accesses before it before those of another thread after its own, later fence.
#define EMU_ATOMIC(NAME, BUILTIN)                                                             \
    template <class T> T NAME(T *address, std::common_type_t<T> value) {                      \
        static_assert(std::is_integral_v<T>,                                                  \
                      #NAME " of floats: the sum would depend on the order of the threads; "  \
                            "let one thread compute each sum, in an order that is the same"); \
        return BUILTIN(address, value, __ATOMIC_RELAXED);                                     \
    }
EMU_ATOMIC(atomicAdd, __atomic_fetch_add)
EMU_ATOMIC(atomicOr, __atomic_fetch_or)
template <class T> T atomicMax(T *address, std::common_type_t<T> value) {
    T old = atomicAdd(address, 0);
    while (old < value && !__atomic_compare_exchange_n(address, &old, value, false,
                                                       __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return old;
}
inline void __threadfence() {
    static int fences;
    __atomic_fetch_add(&fences, 1, __ATOMIC_ACQ_REL);
}
} // namespace api

/* ==== 6. Grids and launches =================================================================== */

// 0 to n - 1 in the order of CUEMU_ORDER.
inline std::vector<unsigned> ordering(size_t n, long salt) {
    static const long seed = setting("CUEMU_ORDER", 0);
    std::vector<unsigned> order(n);
    for (size_t i = 0; i < n; i++)
        order[i] = (unsigned)(seed == 1 ? n - 1 - i : i);
    if (seed > 1)
        std::shuffle(order.begin(), order.end(), std::minstd_rand((unsigned)(seed * 7919 + salt)));
    return order;
}
inline uint3 position(unsigned i, dim3 size) {
    return {i % size.x, i / size.x % size.y, i / size.x / size.y};
}
inline void run_threads(unsigned i) {
    Unwatched unwatched;
    unsigned threads = launched->block.x * launched->block.y * launched->block.z;
    block->index = position(i, launched->grid);
    block->number++;
    block->ended = 0;
    block->threads.resize(threads);
    block->barrier = std::make_unique<SyncPoint>(); // not the last block's: for the race detector,
    block->warps.clear();                           // its address would order the two blocks
    block->warps.resize((threads + 31) / 32);
    for (unsigned t : ordering(threads, i)) {
        Thread *thread = &block->threads[t];
        thread->index = position(t, launched->block);
        thread->number = t;
        thread->copy_groups = 0;
        // For the race detector, a thread's creator happens before it, and a reused stack is memory
        // of another thread: each gets a new stack, created by the worker.
        thread->fiber = race_detector ? new_fiber() : nullptr;
        thread->ended = thread->in_kernel = false;
        block->ready.push_back(thread);
    }
    block->dynamic = new_shared(launched->dynamic_bytes, "dynamic char[]");
    begin_recording(i);
    switch_fiber(&block->worker, next_fiber());
    happens_after(&block->ended);
    end_recording(i);
    for (const SharedArray &array : block->shared)
        free(array.begin);
    block->shared.clear();
    if (race_detector)
        delete_idle_fibers();
}

// For the race detector, each block is started by a thread of its own: blocks are unordered.
EMU_SWITCHES inline void run_block(const Launch *launch, unsigned i) {
    static thread_local Block own;
    block = &own;
    launched = launch;
    IF_TSAN(void *host = __tsan_get_current_fiber(); block->worker.tsan = __tsan_create_fiber(0);
            __tsan_switch_to_fiber(block->worker.tsan, __tsan_switch_to_fiber_no_sync));
    run_threads(i);
    IF_TSAN(__tsan_release((void *)launch);
            __tsan_switch_to_fiber(host, __tsan_switch_to_fiber_no_sync);
            __tsan_destroy_fiber(block->worker.tsan));
    launched = nullptr;
}

static std::atomic<size_t> threads_run; // of CUDA, in all launches: CUEMU_CLOCK's time

/* The threads that run blocks on the other cores. A loop ends when its iterations are done; a
   helper that comes late, because another program has its core, finds none and sleeps on. While a
   loop of one device uses the helpers, loops of other devices do without. */
class Helpers {
    std::mutex used, lock;
    std::condition_variable changed, over;
    std::function<void(size_t)> body;
    size_t next = 0, count = 0, done = 0; // of the loop's iterations

    bool take(size_t *i) { // with the lock
        *i = next;
        return next < count && ++next;
    }
    void work() {
        size_t i;
        std::unique_lock<std::mutex> hold(lock);
        while (take(&i)) {
            hold.unlock();
            body(i);
            hold.lock();
            if (++done == count)
                over.notify_one();
        }
    }
    void help() {
        for (;;) {
            std::unique_lock<std::mutex> hold(lock);
            changed.wait(hold, [this] { return next < count; });
            hold.unlock();
            work();
        }
    }

  public:
    // A block may need 1024 stacks of two memory maps each; Linux allows 65,530 maps per process.
    Helpers() {
        const long cores = setting("CUEMU_CORES", std::thread::hardware_concurrency());
        for (long i = 1; i < std::min(16l, cores); i++)
            std::thread(&Helpers::help, this).detach();
    }
    void run(size_t iterations, const std::function<void(size_t)> &iteration) {
        std::unique_lock<std::mutex> alone(used, std::try_to_lock);
        for (size_t i = 0; i < iterations && !alone; i++)
            iteration(i);
        if (!alone)
            return;
        std::unique_lock<std::mutex> hold(lock);
        body = iteration;
        next = done = 0;
        count = iterations;
        changed.notify_all();
        hold.unlock();
        work();
        hold.lock();
        over.wait(hold, [this] { return done == count; });
    }
};

inline Helpers &helpers() {
    static Helpers *all = new Helpers; // which live as long as the program
    return *all;
}

// The blocks of a launch, distributed to the cores.
inline void run_grid(const Launch *launch) {
    static long launches;
    size_t blocks = (size_t)launch->grid.x * launch->grid.y * launch->grid.z;
    threads_run += blocks * launch->block.x * launch->block.y * launch->block.z;
    std::vector<unsigned> order = ordering(blocks, ++launches);
    // For a small grid, waking up the other cores would take longer than running it.
    bool spread = blocks * launch->block.x * launch->block.y * launch->block.z > 2048;
    if (spread && !race_detector) {
        helpers().run(blocks, [&](size_t i) { run_block(launch, order[i]); });
    } else {
        for (size_t i = 0; i < blocks; i++)
            run_block(launch, order[i]);
    }
    happens_after((void *)launch);
}

// In cuda_on_cpu_runtime.h: the checks, and the queue.
static thread_local int current_device;
void check_pointer(int number, const void *argument);
void queue_launch(std::shared_ptr<Launch> launch);
void add_pointers(std::vector<PointerArgument> *to, int number, const void *argument, size_t bytes);
template <class T> void check_argument(int number, T argument) {
    if constexpr (std::is_pointer_v<T>)
        check_pointer(number, (const void *)argument);
}

// The name of a launched kernel. Where it is a parameter of the template that launches it, the name
// of that function, as the compiler spells it, says which: "each(Work) [with ... KERNEL = x; ...]",
// or "(* KERNEL)(Row, Layout) = x; ...".
inline const char *kernel_name(const char *name, const std::string &launched_by) {
    static std::set<std::string> names; // which live as long as the program
    static std::mutex mutex;
    const size_t at = std::min(launched_by.find(std::string(name) + " = "),
                               launched_by.find(std::string(name) + ")("));
    const size_t equals = launched_by.find(" = ", at);
    if (at == std::string::npos || equals == std::string::npos)
        return name;
    const size_t begin = launched_by.find_first_not_of(" =&", equals);
    std::lock_guard<std::mutex> lock(mutex);
    return names.insert(launched_by.substr(begin, launched_by.find_first_of(";]", begin) - begin))
        .first->c_str();
}

// kernel<<<grid, block>>>(x) has become EMU_LAUNCH((kernel), grid, block)(x).
template <class... Parameters>
auto launch(const char *name, void (*kernel)(Parameters...), dim3 grid, dim3 block,
            size_t dynamic_bytes = 0, Stream *stream = nullptr, SourceLocation location = {}) {
    return [=](Parameters... arguments) {
        auto check = [=]([[maybe_unused]] int number) {
            (check_argument(++number, arguments), ...);
        };
        auto call = [=] { kernel(arguments...); };
        std::vector<PointerArgument> pointers;
        [[maybe_unused]] int number = 0;
        (add_pointers(&pointers, ++number, &arguments, sizeof arguments), ...);
        queue_launch(std::make_shared<Launch>(Launch{name, (const void *)kernel, location, grid,
                                                     block, dynamic_bytes, stream, current_device,
                                                     nullptr, false, pointers, check, call}));
    };
}
} // namespace emu
using namespace emu::api;

#include "cuda_on_cpu_runtime.h"
