/* cuda_on_cpu_runtime.h: the second half of cuda_on_cpu.h, what the host sees of a GPU. In reading
   order: 1 memory, 2 streams, 3 checked requests (launches, copies), 4 CUDA's functions, 5 tensor
   cores and asynchronous copies, 6 counting accesses.

   The runtime is serialized by a lock, which a caller holds while it calls or waits. The blocks of
   a grid are still distributed to the cores. */

namespace emu {
/* ==== 1. Memory =============================================================================== */

#define EMU_ERRORS(X)                                            \
    X(cudaSuccess, "no error")                                   \
    X(cudaErrorInvalidValue, "invalid argument")                 \
    X(cudaErrorMemoryAllocation, "out of memory")                \
    X(cudaErrorNoDevice, "no CUDA-capable device is detected")   \
    X(cudaErrorInvalidDevice, "invalid device ordinal")          \
    X(cudaErrorNotReady, "device not ready")                     \
    X(cudaErrorInvalidResourceHandle, "invalid resource handle") \
    X(cudaErrorUnknown, "unknown error")                         \
    X(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled")
#define EMU_ERROR(NAME, TEXT) NAME,
#define EMU_ERROR_NAME(NAME, TEXT) #NAME,
#define EMU_ERROR_TEXT(NAME, TEXT) TEXT,
namespace api {
enum cudaError_t { EMU_ERRORS(EMU_ERROR) };
}
using namespace api;

static thread_local cudaError_t last_error;
inline cudaError_t failed(cudaError_t error) {
    return last_error = error;
}

// Whether CUEMU_FAIL names this function.
inline bool fails(const char *function) {
    const char *name = getenv("CUEMU_FAIL");
    return name && strcmp(name, function) == 0;
}

// The indices of the devices in CUDA_VISIBLE_DEVICES; the list ends at the first invalid one.
inline const std::vector<int> &devices() {
    static const std::vector<int> visible = [] {
        std::vector<int> list;
        const char *text = getenv("CUDA_VISIBLE_DEVICES");
        int all = (int)setting("CUEMU_DEVICES", 1), number, length;
        for (int i = 0; !text && i < all; i++)
            list.push_back(i);
        while (text && sscanf(text, "%d%n", &number, &length) == 1 && number >= 0 && number < all) {
            list.push_back(number);
            text += length + (text[length] == ',');
        }
        return list;
    }();
    return visible;
}
inline bool is_device(int device) {
    return device >= 0 && device < (int)devices().size();
}

struct Allocation {
    const char *begin;
    size_t bytes;
    int device;            // -1: page-locked memory of the host
    char *pages;           // null: from malloc()
    size_t bytes_of_pages; // protected while no kernel runs; the page after them always is
};
static std::map<const char *, Allocation> allocations; // by `begin`
static std::map<int, size_t> used_memory;              // by device
static const size_t device_memory = (size_t)setting("CUEMU_MEMORY", 4l << 30);

inline const Allocation *last_before(const void *address) {
    auto next = allocations.upper_bound((const char *)address);
    return next == allocations.begin() ? nullptr : &std::prev(next)->second;
}
inline const Allocation *find_allocation(const void *address) {
    const Allocation *last = last_before(address);
    return last && address < last->begin + last->bytes ? last : nullptr;
}
inline void protect(int protection) {
    for (auto &[begin, allocation] : allocations)
        if (allocation.pages)
            mprotect(allocation.pages, allocation.bytes_of_pages, protection);
}

// New memory is filled with 0xff, NaNs, as if it had been used before.
inline void *allocate(size_t bytes, int device) {
    static const bool protects = setting("CUEMU_PROTECT", 0) && !sanitized;
    Allocation allocation = {nullptr, bytes, device, nullptr, 0};
    void *memory;
    if (bytes == 0)
        return nullptr;
    if (device >= 0 && protects) { // ends at the guard page
        size_t size = allocation.bytes_of_pages = (bytes + PAGE - 1) / PAGE * PAGE;
        allocation.pages = (char *)mmap(nullptr, size + PAGE, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        mprotect(allocation.pages + size, PAGE, PROT_NONE);
        memory = allocation.pages + size - (bytes + 15) / 16 * 16;
    } else if (posix_memalign(&memory, 256, bytes)) { // a sanitizer checks its bounds
        die("no memory for %zu bytes", bytes);
    }
    memset(memory, 0xff, bytes);
    used_memory[device] += bytes;
    allocation.begin = (const char *)memory;
    allocations[allocation.begin] = allocation;
    protect(PROT_NONE);
    return memory;
}

void finish_device(int device, bool only_blocking = false);
void check_no_capture(const char *function);
inline void release(const char *function, void *memory, bool of_gpu) {
    check_no_capture(function);
    if (!memory)
        return;
    auto found = allocations.find((const char *)memory);
    if (found == allocations.end() || (found->second.device >= 0) != of_gpu)
        die("%s: %p is not such memory, or was freed before", function, memory);
    Allocation allocation = found->second;
    finish_device(of_gpu ? allocation.device : current_device); // after all work that uses it
    allocations.erase(found);
    used_memory[allocation.device] -= allocation.bytes;
    if (allocation.pages)
        munmap(allocation.pages, allocation.bytes_of_pages + PAGE);
    else
        free(memory);
}

// The handler of page faults, and of traps: see cuda_on_cpu.h on accesses that are not aligned.
inline void handle_fault(int number, siginfo_t *info, void *) {
    if (number == SIGILL || number == SIGTRAP)
        die("misaligned access: an address is no multiple of its type's size");
    const char *address = (const char *)info->si_addr;
    const Allocation *last = last_before(address);
    if (self && last && address < last->begin + last->bytes + (64 << 10))
        die("memory fault: out of range, at byte %td of an allocation of %zu",
            address - last->begin, last->bytes);
    die("memory fault at %p: %s", (const void *)address,
        self ? "out of range, freed, the host's, or this thread's stack is full"
        : find_allocation(address) ? "the host touches memory of a GPU"
                                   : "in the host's code");
}

static const bool prepared_for_faults = [] {
    struct sigaction action = {};
    action.sa_sigaction = handle_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    if (!sanitized)
        for (int number : {SIGSEGV, SIGBUS, SIGILL, SIGTRAP})
            sigaction(number, &action, nullptr);
    IF_ASAN(__sanitizer_set_death_callback(say_where)); // its own report does not name the kernel
    return true;
}();

/* ==== 2. Streams ================================================================================

   A stream is a queue of operations, executed in order: with CUEMU_LAZY by the caller that waits
   for them, otherwise at once. */

typedef std::function<void()> Operation;
typedef std::vector<Operation> Graph;

struct Stream {
    int device;
    bool blocking;    // the null stream waits for it, and it for the null stream
    int priority = 0; // lower numbers come first
    std::deque<Operation> queue = {};
    long finished = 0;             // operations so far
    Graph *captured = nullptr;     // while operations are captured there,
    std::thread::id capturer = {}; // begun by this thread
    bool global = false;           // no thread may call what is unsafe then, not only the capturer
    long end() const {
        return finished + (long)queue.size();
    }
};

struct Event { // complete when `position` operations of the stream have finished
    int device;
    bool sleeps = false;      // cudaEventBlockingSync
    Stream *stream = nullptr; // null: never recorded
    long position = 0;
    Graph *captured = nullptr;
    double seconds = 0;
};

static std::map<int, Stream *> null_streams; // by device
static std::set<const Graph *> graphs;       // that have not been destroyed
static std::deque<Stream> streams;           // queued operations may refer to destroyed streams
static std::deque<Event> events;             // and events: neither is ever deleted

// With CUEMU_LEAKS=1, tells at the end of the process what it has not freed. Defined after what it
// counts: objects are destroyed in the reverse order.
static struct Leaks {
    ~Leaks() {
        if (setting("CUEMU_LEAKS", 0) && allocations.size() + graphs.size() > 0)
            fprintf(stderr, "cuda_on_cpu: not freed: %zu areas of memory, %zu graphs\n",
                    allocations.size(), graphs.size());
    }
} leaks;

// For functions that could wait for what is only being recorded: a GPU's return an error, and the
// capture is lost.
inline void check_no_capture(const char *function) {
    for (const Stream &stream : streams)
        if (stream.captured && (stream.global || stream.capturer == std::this_thread::get_id()))
            die("%s: not allowed while a stream is being captured", function);
}

inline Stream *null_stream(int device) {
    Stream *&stream = null_streams[device];
    return stream ? stream : stream = &streams.emplace_back(Stream{device, false});
}
inline Stream *stream_of(Stream *stream) {
    return stream ? stream : null_stream(current_device);
}

// Executes operations of the stream until `position` of them have finished.
inline void run_until(Stream *stream, long position) {
    while (stream && stream->finished < position) {
        protect(PROT_READ | PROT_WRITE);
        stream->queue.front()();
        protect(PROT_NONE);
        stream->queue.pop_front();
        stream->finished++;
    }
}
inline void finish_stream(Stream *stream) {
    run_until(stream, stream->end());
}
inline void finish_device(int device, bool only_blocking) {
    for (Stream &stream : streams)
        if (stream.device == device && (stream.blocking || !only_blocking))
            finish_stream(&stream);
}

// The null stream and all streams that are not cudaStreamNonBlocking wait for each other.
inline void wait_for_others(Stream *stream) {
    if (stream == null_stream(stream->device))
        finish_device(stream->device, true);
    else if (stream->blocking)
        finish_stream(null_stream(stream->device));
}
inline void enqueue(Stream *stream, Operation operation) {
    static const bool lazy = setting("CUEMU_LAZY", 0);
    stream = stream_of(stream);
    if (stream->captured) {
        stream->captured->push_back(std::move(operation));
        return;
    }
    wait_for_others(stream);
    stream->queue.push_back(std::move(operation));
    if (!lazy)
        finish_stream(stream);
}

/* ==== 3. Checked requests =======================================================================

   A launch or a copy is checked when it is queued and again when it runs: its memory may have been
   freed in between.

   CUEMU_STRICT=1 also reports what a GPU does correctly, but slowly. The main thread computes, and
   each thread that has created a stream of normal priority; of the other threads, each
     calls cudaSetDevice first; otherwise it would create a context on device 0;
     sleeps while it waits, on events with cudaEventBlockingSync; otherwise it would spin;
     launches kernels in streams of higher priority only; otherwise they would queue.
   Copies between two GPUs need peer access; otherwise they would go through the host. */

static const bool strict = setting("CUEMU_STRICT", 0);
static const std::thread::id main_thread = std::this_thread::get_id();
static thread_local bool computes = std::this_thread::get_id() == main_thread;
static thread_local bool has_device = computes;

inline void check_device_is_set(const char *function) {
    if (strict && !has_device)
        die("%s: this thread has not called cudaSetDevice; it would create a context on device 0",
            function);
}
inline void check_waiting(const char *function, bool sleeps) {
    if (strict && !computes && !sleeps)
        die("%s: this thread would spin while it waits, beside one that computes; expected "
            "cudaEventSynchronize of an event with cudaEventBlockingSync",
            function);
}

static std::map<std::pair<int, const void *>, size_t> dynamic_limits; // by device and kernel
static std::set<std::pair<int, int>> peers; // the first may access memory of the second
const size_t STATIC_LIMIT = 48 << 10;

// A GPU of each compute capability: how many multiprocessors it has, how many KB of shared memory a
// block can have, and how many KB, threads and blocks a multiprocessor (CUDA programming guide,
// "Compute Capabilities"). T4, A100, RTX 3090, RTX 4060, H100, B200, RTX 5090.
struct Gpu {
    long sm;
    int multiprocessors;
    size_t block_kb, shared_kb;
    int threads, blocks;
};
static const Gpu gpus[] = {{75, 40, 64, 64, 1024, 16},    {80, 108, 163, 164, 2048, 32},
                           {86, 82, 99, 100, 1536, 16},   {89, 24, 99, 100, 1536, 24},
                           {90, 132, 227, 228, 2048, 32}, {100, 148, 227, 228, 2048, 32},
                           {120, 170, 99, 100, 1536, 24}};
static const Gpu gpu = [] {
    const long sm = setting("CUEMU_SM", 90);
    for (const Gpu &known : gpus)
        if (known.sm == sm)
            return known;
    die("CUEMU_SM=%ld: expected 75, 80, 86, 89, 90, 100 or 120", sm);
}();
static const size_t DYNAMIC_LIMIT = gpu.block_kb << 10;

inline void check_launch(Launch *launch) {
    dim3 grid = launch->grid, size = launch->block;
    long threads = (long)size.x * size.y * size.z;
    if ((long)grid.x * grid.y * grid.z == 0 || threads == 0)
        die("an empty grid or block: (%u,%u,%u) blocks of (%u,%u,%u) threads", grid.x, grid.y,
            grid.z, size.x, size.y, size.z);
    if (threads > 1024 || size.z > 64)
        die("%ld threads in a block; at most 1024, 64 of them in z", threads);
    const long most = setting("CUEMU_GRID", 65535);
    if (grid.y > most || grid.z > most)
        die("a grid of (%u,%u,%u); y and z are at most %ld", grid.x, grid.y, grid.z, most);
    size_t limit = std::max(STATIC_LIMIT, dynamic_limits[{launch->device, launch->kernel}]);
    launch->shared_limit = limit > STATIC_LIMIT ? DYNAMIC_LIMIT : STATIC_LIMIT;
    if (launch->dynamic_bytes > limit)
        die("%zu bytes of dynamic shared memory; cudaFuncSetAttribute allows %zu here",
            launch->dynamic_bytes, limit);
    if (launch->stream->device != launch->device)
        die("in a stream of device %d, while device %d is the current one", launch->stream->device,
            launch->device);
    if (strict && !computes && launch->stream->priority == 0)
        die("would queue behind the kernels of the thread that computes; expected a stream of "
            "higher priority");
}

inline void check_pointer(int number, const void *argument) {
    const Allocation *found = find_allocation(argument);
    if (!found && argument)
        found = find_allocation((const char *)argument - 1); // a pointer to an array's end is valid
    if (!found && argument)
        die("argument %d is no pointer to memory of a GPU: the host's, or freed", number);
    int owner = found ? found->device : -1, device = launched->device;
    if (owner >= 0 && owner != device && !peers.count({device, owner}))
        die("argument %d is memory of device %d, launched on device %d", number, owner, device);
}

// The pointers to memory of a GPU in an argument, which may be a structure, if they are wanted
inline void add_pointers(std::vector<PointerArgument> *to, int number, const void *argument,
                         size_t bytes) {
    static const bool wanted = getenv("CUEMU_SEE");
    for (size_t at = 0; wanted && at + sizeof(void *) <= bytes; at += sizeof(void *)) {
        const void *address;
        memcpy(&address, (const char *)argument + at, sizeof address);
        if (find_allocation(address))
            to->push_back({number, at, address});
    }
}

static std::recursive_mutex runtime;
typedef std::lock_guard<std::recursive_mutex> Lock;
Traffic *traffic_of(const char *kernel); // see section 6
bool wants_record(const Launch *launch);

inline void queue_launch(std::shared_ptr<Launch> launch) {
    Lock lock(runtime);
    launch->stream = stream_of(launch->stream);
    launched = launch.get(); // named by reports
    check_launch(launch.get());
    launch->check(0);
    launched = nullptr;
    enqueue(launch->stream, [launch] {
        launched = launch.get();
        launch->check(0);
        launch->traffic = traffic_of(launch->name);
        launch->recorded = wants_record(launch.get());
        run_grid(launch.get());
        launched = nullptr;
    });
}

// Checks that memory is on the side that the kind of copy names; cudaMemcpyDefault takes any.
enum Side { ON_HOST, ON_GPU, ANYWHERE };
inline void check_range(const char *what, const void *begin, size_t bytes, Side side,
                        int device = -1) {
    const Allocation *found = bytes ? find_allocation(begin) : nullptr;
    int owner = found ? found->device : -1;
    if (bytes && side != ANYWHERE && (owner >= 0) != (side == ON_GPU))
        die("%s: %p is %s", what, begin,
            owner >= 0 ? "memory of a GPU" : "not memory of a GPU, or was freed");
    if (found && (const char *)begin + bytes > found->begin + found->bytes)
        die("%s: %zu bytes, of which only %zu are there", what, bytes,
            (size_t)(found->begin + found->bytes - (const char *)begin));
    if (owner >= 0 && device >= 0 && owner != device)
        die("%s: %p is memory of device %d, not %d", what, begin, owner, device);
}

inline void copy(void *to, const void *from, size_t bytes, Side to_side, Side from_side,
                 Stream *stream, int to_device = -1, int from_device = -1) {
    const Allocation *a = find_allocation(to), *b = find_allocation(from);
    auto check = [=] {
        check_range("copy to", to, bytes, to_side, to_device);
        check_range("copy from", from, bytes, from_side, from_device);
        if ((a && !find_allocation(to)) || (b && !find_allocation(from)))
            die("copy: %p was freed after the copy was queued",
                a && !find_allocation(to) ? to : from);
    };
    check();
    check_device_is_set("cudaMemcpyAsync");
    if (stream_of(stream)->captured && (!a || !b))
        die("cudaMemcpyAsync: %p is pageable memory of the host, which a graph cannot copy; "
            "expected memory of cudaMallocHost",
            a ? from : to);
    int one = a ? a->device : -1, other = b ? b->device : -1;
    if (strict && one >= 0 && other >= 0 && one != other && !peers.count({one, other}) &&
        !peers.count({other, one}))
        die("copy between devices %d and %d without peer access: it would go through the host", one,
            other);
    enqueue(stream, [=] { check(), memcpy(to, from, bytes); });
    // Pageable memory is staged in a buffer of the driver, which the host waits for.
    stream = stream_of(stream);
    if (!stream->captured && !(find_allocation(to) && find_allocation(from)))
        finish_stream(stream);
}

/* ==== 4. CUDA's functions ===================================================================== */

namespace api {
typedef Stream *cudaStream_t;
typedef Event *cudaEvent_t;
typedef Graph *cudaGraph_t, *cudaGraphExec_t;
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
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice };
struct cudaPointerAttributes {
    cudaMemoryType type;
    int device;
};
struct cudaUUID_t {
    char bytes[16];
};
struct cudaFuncAttributes {
    int maxThreadsPerBlock, numRegs; // registers are unknown here
    size_t sharedSizeBytes, localSizeBytes;
    int ptxVersion, binaryVersion;
};
struct cudaDeviceProp {
    char name[256];
    cudaUUID_t uuid;
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin;
    int major, minor, warpSize, multiProcessorCount;
    size_t sharedMemPerMultiprocessor;
    int maxThreadsPerMultiProcessor, maxBlocksPerMultiProcessor;
};
inline const char *cudaGetErrorName(cudaError_t error) {
    const char *const names[] = {EMU_ERRORS(EMU_ERROR_NAME)};
    return names[error];
}
inline const char *cudaGetErrorString(cudaError_t error) {
    const char *const texts[] = {EMU_ERRORS(EMU_ERROR_TEXT)};
    return texts[error];
}
inline cudaError_t cudaGetLastError() {
    return std::exchange(last_error, cudaSuccess);
}

// Defines a function that holds the lock, executes the statements given, and succeeds.
#define EMU_CUDA(FUNCTION, ...)   \
    inline cudaError_t FUNCTION { \
        Lock lock(runtime);       \
        __VA_ARGS__;              \
        return cudaSuccess;       \
    }

/* ---- Devices */

inline cudaError_t cudaGetDeviceCount(int *count) {
    *count = (int)devices().size();
    return *count ? cudaSuccess : failed(cudaErrorNoDevice);
}
inline cudaError_t cudaSetDevice(int device) {
    if (!is_device(device))
        return failed(devices().empty() ? cudaErrorNoDevice : cudaErrorInvalidDevice);
    current_device = device;
    has_device = true;
    return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
    if (!is_device(device))
        return failed(cudaErrorInvalidDevice);
    *properties = {"emulated GPU",      {},
                   device_memory,       STATIC_LIMIT,
                   DYNAMIC_LIMIT,       (int)gpu.sm / 10,
                   (int)gpu.sm % 10,    32,
                   gpu.multiprocessors, gpu.shared_kb << 10,
                   gpu.threads,         gpu.blocks};
    // The physical index, independent of CUDA_VISIBLE_DEVICES.
    snprintf(properties->uuid.bytes, 16, "cuda_on_cpu %03d", devices()[(size_t)device]);
    return cudaSuccess;
}
EMU_CUDA(cudaGetDevice(int *device), *device = current_device)
EMU_CUDA(cudaDriverGetVersion(int *version), *version = 12000)
EMU_CUDA(cudaDeviceSynchronize(), check_no_capture("cudaDeviceSynchronize"),
         finish_device(current_device))
EMU_CUDA(cudaDeviceCanAccessPeer(int *can, int device, int peer), *can = device != peer)
inline cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
    Lock lock(runtime);
    if (!is_device(peer) || peer == current_device)
        return failed(cudaErrorInvalidDevice);
    bool is_new = peers.insert({current_device, peer}).second;
    return is_new ? cudaSuccess : failed(cudaErrorPeerAccessAlreadyEnabled);
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel *kernel, cudaFuncAttribute, int dynamic_bytes) {
    Lock lock(runtime);
    if (fails("cudaFuncSetAttribute"))
        return failed(cudaErrorUnknown);
    if (dynamic_bytes < 0 || dynamic_bytes > (int)DYNAMIC_LIMIT)
        return failed(cudaErrorInvalidValue);
    dynamic_limits[{current_device, (const void *)kernel}] = (size_t)dynamic_bytes;
    return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, Kernel *) {
    *attributes = {1024, 0, 0, 0, (int)gpu.sm, (int)gpu.sm};
    return cudaSuccess;
}

/* ---- Memory */

template <class T> cudaError_t cudaMalloc(T **memory, size_t bytes) {
    Lock lock(runtime);
    check_no_capture("cudaMalloc");
    if (fails("cudaMalloc"))
        return failed(cudaErrorUnknown);
    if (!is_device(current_device))
        return failed(cudaErrorNoDevice);
    if (bytes > device_memory - used_memory[current_device])
        return failed(cudaErrorMemoryAllocation);
    *memory = (T *)allocate(bytes, current_device);
    return cudaSuccess;
}
template <class T> cudaError_t cudaMallocHost(T **memory, size_t bytes) {
    Lock lock(runtime);
    check_no_capture("cudaMallocHost");
    if (fails("cudaMallocHost"))
        return failed(cudaErrorUnknown);
    *memory = (T *)allocate(bytes, -1);
    return cudaSuccess;
}
EMU_CUDA(cudaFree(void *memory), release("cudaFree", memory, true))
EMU_CUDA(cudaFreeHost(void *memory), release("cudaFreeHost", memory, false))
EMU_CUDA(cudaMemGetInfo(size_t *left, size_t *total), *total = device_memory,
         *left = *total - used_memory[current_device])
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *memory) {
    Lock lock(runtime);
    const Allocation *found = find_allocation(memory);
    bool on_gpu = found && found->device >= 0;
    *attributes = {cudaMemoryType((found != nullptr) + on_gpu), on_gpu ? found->device : 0};
    return cudaSuccess;
}

EMU_CUDA(cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                         cudaStream_t stream = nullptr),
         bool any = kind == cudaMemcpyDefault; // else bits 0 and 1 tell which side is a GPU's
         copy(to, from, bytes, any ? ANYWHERE : Side(kind & 1), any ? ANYWHERE : Side(kind >> 1),
              stream))
EMU_CUDA(cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind),
         check_no_capture("cudaMemcpy"), cudaMemcpyAsync(to, from, bytes, kind),
         finish_stream(stream_of(nullptr)))
EMU_CUDA(cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                             size_t bytes, cudaStream_t stream = nullptr),
         copy(to, from, bytes, ON_GPU, ON_GPU, stream, to_device, from_device))
inline cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes,
                                   cudaStream_t stream = nullptr) {
    Lock lock(runtime);
    auto check = [=] { check_range("cudaMemset", to, bytes, ON_GPU); };
    check();
    enqueue(stream, [=] { check(), memset(to, value, bytes); });
    return cudaSuccess;
}
#define cudaMemset cudaMemsetAsync // asynchronous as well

/* ---- Streams */

#define cudaStreamCreate cudaStreamCreateWithFlags
EMU_CUDA(cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags = cudaStreamDefault),
         *stream = &streams.emplace_back(Stream{current_device, flags != cudaStreamNonBlocking});
         computes = true)
EMU_CUDA(cudaDeviceGetStreamPriorityRange(int *least, int *greatest), *least = 0, *greatest = -5)
EMU_CUDA(cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority),
         check_device_is_set("cudaStreamCreateWithPriority"),
         *stream = &streams.emplace_back(Stream{current_device, flags != cudaStreamNonBlocking,
                                                priority}))
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    Lock lock(runtime);
    stream = stream_of(stream);
    if (stream->captured)
        die("cudaStreamSynchronize: the stream is being captured");
    check_no_capture("cudaStreamSynchronize");
    check_waiting("cudaStreamSynchronize", false);
    wait_for_others(stream);
    finish_stream(stream);
    return cudaSuccess;
}
EMU_CUDA(cudaStreamDestroy(cudaStream_t), )
// Each query executes one more operation, so that polling terminates.
inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
    Lock lock(runtime);
    stream = stream_of(stream);
    check_no_capture("cudaStreamQuery");
    bool ended = stream->queue.empty();
    run_until(stream, ended ? 0 : stream->finished + 1);
    return ended ? cudaSuccess : cudaErrorNotReady;
}
EMU_CUDA(cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data),
         enqueue(stream, [=] { function(data); }))

/* ---- Events */

#define cudaEventCreate cudaEventCreateWithFlags
EMU_CUDA(cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags = cudaEventDefault),
         *event = &events.emplace_back(Event{current_device, (flags & cudaEventBlockingSync) != 0}))
EMU_CUDA(cudaEventDestroy(cudaEvent_t), )
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr) {
    Lock lock(runtime);
    stream = stream_of(stream);
    if (stream->device != event->device)
        die("an event of device %d is recorded on device %d", event->device, stream->device);
    event->captured = stream->captured;
    event->stream = stream->captured ? nullptr : stream;
    event->position = stream->end() + 1;
    enqueue(stream, [event] {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        event->seconds = setting("CUEMU_CLOCK", 0)
                             ? 1e-6 * (double)threads_run
                             : (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    });
    return cudaSuccess;
}
EMU_CUDA(cudaEventSynchronize(cudaEvent_t event), check_device_is_set("cudaEventSynchronize"),
         check_waiting("cudaEventSynchronize", event->sleeps),
         check_no_capture("cudaEventSynchronize"), run_until(event->stream, event->position))
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
    Lock lock(runtime);
    check_no_capture("cudaEventQuery");
    bool happened = !event->stream || event->stream->finished >= event->position;
    return happened ? cudaSuccess : (cudaStreamQuery(event->stream), cudaErrorNotReady);
}
inline cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    Lock lock(runtime);
    if (!begin->stream || !end->stream) // never recorded, or in a capture
        return failed(cudaErrorInvalidResourceHandle);
    if (cudaEventQuery(begin) || cudaEventQuery(end))
        return failed(cudaErrorNotReady);
    *milliseconds = (float)((end->seconds - begin->seconds) * 1e3);
    return cudaSuccess;
}
// If the event's stream is being captured, the waiting stream joins the capture.
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = 0) {
    Lock lock(runtime);
    if (event->captured)
        stream_of(stream)->captured = event->captured;
    else
        enqueue(stream, [from = event->stream, at = event->position] { run_until(from, at); });
    return cudaSuccess;
}

/* ---- Graphs: the operations of a capture, in the order of queuing */

inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    Lock lock(runtime);
    if (!stream || stream->captured)
        die("cudaStreamBeginCapture: %s", stream ? "twice" : "the null stream cannot be captured");
    graphs.insert(stream->captured = new Graph);
    stream->capturer = std::this_thread::get_id();
    stream->global = mode == cudaStreamCaptureModeGlobal;
    return cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    Lock lock(runtime);
    *graph = stream->captured;
    for (Stream &other : streams)
        other.captured = other.captured == *graph ? nullptr : other.captured;
    return cudaSuccess;
}
EMU_CUDA(cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph,
                                       unsigned long long = 0),
         graphs.insert(*executable = new Graph(*graph)))
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    Lock lock(runtime);
    if (!graphs.count(executable))
        die("cudaGraphLaunch: %p is no graph, or was destroyed", (void *)executable);
    for (const Operation &operation : *executable)
        enqueue(stream, operation);
    return cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    Lock lock(runtime);
    if (!graphs.erase(graph))
        die("cudaGraphDestroy: %p is no graph, or was destroyed before", (void *)graph);
    delete graph;
    return cudaSuccess;
}
#define cudaGraphExecDestroy cudaGraphDestroy

/* ---- For Nsight: what it would record */

#define cudaProfilerStart() cudaSuccess
#define cudaProfilerStop() cudaSuccess
static thread_local int open_ranges;
inline void print_range(const char *what, const char *name) {
    static const bool prints = setting("CUEMU_RANGES", 0);
    static int threads;
    static thread_local const int thread = __atomic_fetch_add(&threads, 1, __ATOMIC_RELAXED);
    if (prints)
        fprintf(stderr, "cuda_on_cpu: thread %d: %s%s\n", thread, what, name);
}
inline int nvtxRangePushA(const char *name) {
    print_range("push ", name);
    return open_ranges++;
}
inline int nvtxRangePop() {
    if (open_ranges == 0)
        die("nvtxRangePop: this thread has no open range");
    print_range("pop", "");
    return --open_ranges;
}
} // namespace api

/* ==== 5. Tensor cores, ldmatrix, cp.async =======================================================

   What wrappers of inline PTX call here. The layouts are described in the PTX manual's chapters
   "Matrix fragments for mma.m16n8k16" and "m16n8k8", "ldmatrix" and "cp.async". */

/* d[16][8] = a[16][k] b[k][8] + c. Lane 4*g + q holds rows g and g + 8 of a, and column g of b: of
   the first and of the second half of k, the q-th register's worth of elements. Of c and d it holds
   rows g and g + 8, columns 2*q and 2*q + 1. */
template <int PER_REGISTER, float (*decode)(uint32_t)>
void multiply(float *d, const uint32_t *a, const uint32_t *b, const float *c,
              SourceLocation location = {}) {
    const int HALF_K = 4 * PER_REGISTER;
    record_flop(4 * 2 * 2 * HALF_K); // of this lane's four numbers
    uint32_t mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    LaneValues &values = wait_for_lanes(0xffffffff, mine, sizeof mine, location);
    auto element = [&](int lane, int i_register, int i) {
        uint32_t bits;
        memcpy(&bits, values[lane] + 4 * i_register, 4);
        return decode(PER_REGISTER == 2 ? bits >> 16 * i & 0xffff : bits & 0xffffe000);
    };
    int g = lane() / 4, q = lane() % 4;
    float rows[2][2 * HALF_K], columns[2][2 * HALF_K];
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 2 * HALF_K; k++) {
            int half = k / HALF_K, holder = k % HALF_K / PER_REGISTER, j = k % PER_REGISTER;
            rows[i][k] = element(g * 4 + holder, 2 * half + i, j);
            columns[i][k] = element((2 * q + i) * 4 + holder, 4 + half, j);
        }
    for (int i = 0; i < 4; i++) {
        float sum = c[i];
        for (int k = 0; k < 2 * HALF_K; k++)
            sum += rows[i / 2][k] * columns[i % 2][k];
        d[i] = sum;
    }
}

enum { GLOBAL_READ, GLOBAL_WRITE, SHARED_READ, SHARED_WRITE, TRAFFIC_KINDS };
void count(int kind, long bytes);

inline void check_shared(const char *what, const void *address, SourceLocation location) {
    if ((uintptr_t)address % 16 || !is_shared(address, 16))
        die("%s:%d: %s: %p is not aligned to 16 bytes in shared memory", location.file,
            location.line, what, address);
}

namespace api {
#define EMU_MMA(NAME, ...)                                                           \
    inline void NAME(float *d, const uint32_t *a, const uint32_t *b, const float *c, \
                     SourceLocation location = {}) {                                 \
        multiply<__VA_ARGS__>(d, a, b, c, location);                                 \
    }
EMU_MMA(emu_mma_m16n8k16_bf16, 2, bfloat16_value)
EMU_MMA(emu_mma_m16n8k16_f16, 2, half_value)
EMU_MMA(emu_mma_m16n8k8_tf32, 1, same_bits<float, uint32_t>) // without a float's low 13 bits

// Four matrices of 8 rows of 16 bytes: lane i gives the address of row i % 8 of matrix i / 8. Lane
// 4*g + q gets elements 2*q and 2*q + 1 of row g of each matrix; transposed, of column g.
inline EMU_UNCOUNTED void emu_ldmatrix_x4(uint32_t *registers, const void *row, bool transposed,
                                          SourceLocation location = {}) {
    check_shared("ldmatrix", row, location);
    count(SHARED_READ, 16);
    record_here('r', row, 16);
    LaneValues &values = wait_for_lanes(0xffffffff, &row, sizeof row, location);
    int g = lane() / 4, q = lane() % 4;
    for (int matrix = 0; matrix < 4; matrix++) {
        registers[matrix] = 0;
        for (int i = 0; i < 2; i++) {
            const uint16_t *from;
            memcpy(&from, values[matrix * 8 + (transposed ? 2 * q + i : g)], sizeof from);
            registers[matrix] |= (uint32_t)from[transposed ? g : 2 * q + i] << 16 * i;
        }
    }
}

// Starts to copy `bytes` (0 to 16) from global to shared memory, padded with zeros to 16. Until the
// copy has been waited for, the destination holds NaN.
inline EMU_UNCOUNTED void emu_cp_async16(void *to, const void *from, int bytes,
                                         SourceLocation location = {}) {
    check_shared("cp.async", to, location);
    if ((uintptr_t)from % 16)
        die("%s:%d: cp.async: source %p is not aligned to 16 bytes", location.file, location.line,
            from);
    if (bytes > 0)
        record_here('R', from, bytes);
    record_here('w', to, 16);
    memset(to, 0xff, 16);
    Unwatched unwatched;
    self->copies.push_back({to, from, bytes, self->copy_groups});
}
inline void emu_cp_async_commit() {
    Unwatched unwatched;
    self->copy_groups++;
}

// Waits until at most `pending` of this thread's groups are incomplete.
inline EMU_UNCOUNTED void emu_cp_async_wait(int pending) {
    for (;;) {
        AsyncCopy copy;
        {
            Unwatched unwatched;
            if (self->copies.empty() || self->copies[0].group >= self->copy_groups - pending)
                return;
            copy = self->copies[0];
            self->copies.pop_front();
        }
        memcpy(copy.to, copy.from, (size_t)copy.bytes);
        memset((char *)copy.to + copy.bytes, 0, (size_t)(16 - copy.bytes));
        count(GLOBAL_READ, copy.bytes);
        count(SHARED_WRITE, 16);
        record_landing(copy.to);
    }
}
} // namespace api

/* ==== 6. Counting accesses ======================================================================

   With -fsanitize=thread the compiler calls a function at every access to memory that may be
   shared; here, those functions count. Memory outside of shared arrays and of a GPU's allocations,
   such as stacks, is not counted: a GPU would keep most of it in registers. */

#ifndef CUEMU_COUNT
inline Traffic *traffic_of(const char *) {
    return nullptr;
}
inline void count(int, long) {}
inline bool wants_record(const Launch *) {
    static const bool wanted = getenv("CUEMU_SEE");
    if (wanted)
        die("CUEMU_SEE: this program cannot record; make count builds ./cnn-count, which can");
    return false;
}
inline void begin_recording(unsigned) {}
inline void end_recording(unsigned) {}
inline void record_here(char, const void *, long) {}
inline void record_barrier(char) {}
inline void record_landing(const void *) {}
inline void record_flop(long) {}
#else
} // namespace emu
#include "cuda_on_cpu_record.h"
namespace emu {
struct Traffic {
    long launches, accesses[TRAFFIC_KINDS], bytes[TRAFFIC_KINDS];
};
static struct TrafficTable {
    std::map<std::string, Traffic> kernels;
    ~TrafficTable() { // at exit
        if (kernels.empty())
            return;
        fprintf(stderr, "%-24s %8s %12s %14s %12s %14s %12s %14s %12s %14s", "kernel", "launches",
                "global reads", "(bytes)", "writes", "(bytes)", "shared reads", "(bytes)", "writes",
                "(bytes)");
        for (auto &[name, traffic] : kernels) {
            fprintf(stderr, "\n%-24s %8ld", name.c_str(), traffic.launches);
            for (int kind = 0; kind < TRAFFIC_KINDS; kind++) {
                std::string bytes = "(" + std::to_string(traffic.bytes[kind]) + ")";
                fprintf(stderr, " %12ld %14s", traffic.accesses[kind], bytes.c_str());
            }
        }
        fprintf(stderr, "\n");
    }
} traffic_table;

inline Traffic *traffic_of(const char *kernel) {
    Traffic *traffic = &traffic_table.kernels[kernel];
    traffic->launches++;
    return traffic;
}
inline EMU_UNCOUNTED void count(int kind, long bytes) {
    __atomic_fetch_add(&launched->traffic->accesses[kind], 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&launched->traffic->bytes[kind], bytes, __ATOMIC_RELAXED);
}
// Whether an allocation contains the address, usually the same one as at the previous access
inline EMU_UNCOUNTED bool is_allocated(const void *address) {
    static thread_local long of; // the block in which `last` was found
    static thread_local Allocation last;
    const Fiber *f = self->fiber;
    if (f && (size_t)((const char *)address - (const char *)f->stack) < f->stack_bytes)
        return false;
    if (of == block->number && (size_t)((const char *)address - last.begin) < last.bytes)
        return true;
    const Allocation *found = find_allocation(address);
    if (!found)
        return false;
    of = block->number;
    last = *found;
    return true;
}
// Called at each counted access, if it is set; so a test sees what a thread does in which order.
static void (*observer)(int kind, const void *address, long bytes);

inline EMU_UNCOUNTED void count_access(const void *address, long bytes, bool write, bool atomic,
                                       const void *frame) {
    if (!self || in_hook) // find_allocation() and the observer are instrumented as well
        return;
    in_hook = true;
    const bool shared = is_shared(address, 1);
    if (shared || is_allocated(address)) {
        const int kind = (shared ? SHARED_READ : GLOBAL_READ) + write;
        count(kind, bytes);
        if (recording)
            add_event(atomic ? "AB"[shared] : "RWrw"[kind], frame, address, bytes);
        if (observer)
            observer(kind, address, bytes);
    }
    in_hook = false;
}

#define EMU_HOOK extern "C" EMU_UNCOUNTED __attribute__((used))
#define EMU_ACCESS_HOOK(NAME, BYTES, WRITE, ...)                                \
    EMU_HOOK void __tsan_##NAME(void *address __VA_ARGS__) {                    \
        count_access(address, BYTES, WRITE, false, __builtin_frame_address(0)); \
    }
#define EMU_ACCESS_HOOKS(BYTES)                          \
    EMU_ACCESS_HOOK(read##BYTES, BYTES, false)           \
    EMU_ACCESS_HOOK(write##BYTES, BYTES, true)           \
    EMU_ACCESS_HOOK(unaligned_read##BYTES, BYTES, false) \
    EMU_ACCESS_HOOK(unaligned_write##BYTES, BYTES, true)
EMU_ACCESS_HOOKS(1)
EMU_ACCESS_HOOKS(2)
EMU_ACCESS_HOOKS(4)
EMU_ACCESS_HOOKS(8)
EMU_ACCESS_HOOKS(16)
EMU_ACCESS_HOOK(read_range, bytes, false, , long bytes)
EMU_ACCESS_HOOK(write_range, bytes, true, , long bytes)
#define EMU_ATOMIC_HOOK(BITS, RESULT, NAME, WRITE, OPERATION, ...)                       \
    EMU_HOOK RESULT __tsan_atomic##BITS##_##NAME(uint##BITS##_t *address, __VA_ARGS__) { \
        count_access(address, BITS / 8, WRITE, true, __builtin_frame_address(0));        \
        return OPERATION;                                                                \
    }
#define EMU_ATOMIC_HOOKS(BITS, T)                                                                \
    EMU_ATOMIC_HOOK(BITS, T, load, false, __atomic_load_n(address, __ATOMIC_SEQ_CST), int)       \
    EMU_ATOMIC_HOOK(BITS, T, fetch_add, true, __atomic_fetch_add(address, by, __ATOMIC_SEQ_CST), \
                    T by, int)                                                                   \
    EMU_ATOMIC_HOOK(BITS, T, fetch_or, true, __atomic_fetch_or(address, by, __ATOMIC_SEQ_CST),   \
                    T by, int)                                                                   \
    EMU_ATOMIC_HOOK(BITS, int, compare_exchange_strong, true,                                    \
                    __atomic_compare_exchange_n(address, old, value, false, __ATOMIC_SEQ_CST,    \
                                                __ATOMIC_SEQ_CST),                               \
                    T *old, T value, int, int)
EMU_ATOMIC_HOOKS(8, uint8_t)
EMU_ATOMIC_HOOKS(32, uint32_t)
EMU_ATOMIC_HOOKS(64, uint64_t)
EMU_HOOK void __tsan_init() {}
EMU_HOOK void __tsan_func_entry(void *) {}
EMU_HOOK void __tsan_func_exit() {}
EMU_HOOK void __tsan_vptr_update(void **, void *) {}
#endif
} // namespace emu
