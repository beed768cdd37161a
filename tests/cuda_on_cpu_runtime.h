/* cuda_on_cpu_runtime.h: the second half of cuda_on_cpu.h, what the host sees of a GPU.

     1 Memory              devices; allocations; faults
     2 Streams             queues, events, graphs
     3 Checked requests    launches and copies
     4 CUDA's functions
     5 Tensor cores, ldmatrix, cp.async
     6 Counting accesses

   The runtime does one thing at a time: who calls it, or waits, holds its lock. The blocks of a grid
   are still spread over the cores. */

namespace emu {

/* ==== 1. Memory =============================================================================== */

#define EMU_ERRORS(X)                                               \
    X(cudaSuccess, 0, "no error")                                   \
    X(cudaErrorInvalidValue, 1, "invalid argument")                 \
    X(cudaErrorMemoryAllocation, 2, "out of memory")                \
    X(cudaErrorNoDevice, 100, "no CUDA-capable device is detected") \
    X(cudaErrorInvalidDevice, 101, "invalid device ordinal")        \
    X(cudaErrorNotReady, 600, "device not ready")                   \
    X(cudaErrorPeerAccessAlreadyEnabled, 704, "peer access is already enabled")
#define EMU_ENUM(NAME, VALUE, TEXT) NAME = VALUE,
#define EMU_NAME_AND_TEXT(NAME, VALUE, TEXT) {NAME, {#NAME, TEXT}},
namespace api {
enum cudaError_t { EMU_ERRORS(EMU_ENUM) };
}
using namespace api;

static std::recursive_mutex runtime;
struct Lock : std::lock_guard<std::recursive_mutex> {
    Lock() : lock_guard(runtime) {}
};

static thread_local cudaError_t last_error;
inline cudaError_t failed(cudaError_t error) {
    return last_error = error;
}

// The numbers of the devices that CUDA_VISIBLE_DEVICES leaves; it ends at the first that is none.
inline const std::vector<int> &devices() {
    static const std::vector<int> visible = [] {
        std::vector<int> all, list;
        for (int i = 0; i < setting("CUEMU_DEVICES", 1); i++) {
            all.push_back(i);
        }
        const char *text = getenv("CUDA_VISIBLE_DEVICES");
        while (text && *text) {
            char *end;
            long number = strtol(text, &end, 10);
            if (end == text || number < 0 || number >= (long)all.size()) {
                break;
            }
            list.push_back((int)number);
            text = end + (*end == ',');
        }
        return text ? list : all;
    }();
    return visible;
}
inline bool is_device(int device) {
    return device >= 0 && device < (int)devices().size();
}

struct Allocation {
    size_t bytes;
    int device;            // -1: of the host, page-locked
    char *pages;           // null: from malloc()
    size_t bytes_of_pages; // which fault while nothing runs on a GPU; one more page always does
};
static std::map<const char *, Allocation> allocations;
static std::map<int, size_t> used_memory; // by device

inline size_t device_memory() {
    return (size_t)setting("CUEMU_MEMORY", 4l << 30);
}

typedef std::pair<const char *const, Allocation> Allocated; // begins there
inline const Allocated *find_allocation(const void *address) {
    auto next = allocations.upper_bound((const char *)address);
    if (next == allocations.begin()) {
        return nullptr;
    }
    const Allocated &last = *std::prev(next);
    return (const char *)address < last.first + last.second.bytes ? &last : nullptr;
}

inline bool is_protected() { // the sanitizers watch malloc's memory
    static const bool wanted = setting("CUEMU_PROTECT", 0);
    return wanted && !sanitized;
}

// While one of these lives, memory of the GPUs can be touched.
struct UseMemory {
    UseMemory() {
        protect(PROT_READ | PROT_WRITE);
    }
    ~UseMemory() {
        protect(PROT_NONE);
    }
    static void protect(int protection) {
        for (auto &[begin, allocation] : allocations) {
            if (allocation.pages) {
                mprotect(allocation.pages, allocation.bytes_of_pages, protection);
            }
        }
    }
};

// New memory holds 0xff, NaNs, as if it were somebody's who used it before.
inline cudaError_t allocate(void **memory, size_t bytes, int device) {
    Lock lock;
    Allocation allocation = {bytes, device, nullptr, 0};
    *memory = nullptr;
    if (bytes == 0) {
        return cudaSuccess;
    }
    if (device >= 0 && bytes > device_memory() - used_memory[device]) {
        return failed(cudaErrorMemoryAllocation);
    }
    bool failure;
    if (device >= 0 && is_protected()) { // ends where a page begins that faults
        size_t size = allocation.bytes_of_pages = (bytes + PAGE - 1) / PAGE * PAGE;
        char *pages = allocation.pages = (char *)mmap(nullptr, size + PAGE, PROT_READ | PROT_WRITE,
                                                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        failure = pages == MAP_FAILED || mprotect(pages + size, PAGE, PROT_NONE) != 0;
        *memory = pages + size - (bytes + 15) / 16 * 16;
    } else {
        failure = posix_memalign(memory, 256, bytes);
    }
    if (failure) {
        die("no memory for cudaMalloc of %zu bytes", bytes);
    }
    memset(*memory, 0xff, bytes);
    used_memory[device] += bytes;
    allocations[(const char *)*memory] = allocation;
    if (allocation.pages) {
        mprotect(allocation.pages, allocation.bytes_of_pages, PROT_NONE);
    }
    return cudaSuccess;
}

void finish_device(int device, bool only_blocking = false);

inline cudaError_t release(const char *function, void *memory, bool of_gpu) {
    Lock lock;
    auto found = allocations.find((const char *)memory);
    if (!memory) {
        return cudaSuccess;
    }
    if (found == allocations.end() || (found->second.device >= 0) != of_gpu) {
        die("%s: %p is not such memory, or was freed before", function, memory);
    }
    Allocation allocation = found->second;
    finish_device(of_gpu ? allocation.device : current_device); // who uses it has ended
    allocations.erase((const char *)memory);
    used_memory[allocation.device] -= allocation.bytes;
    if (allocation.pages) {
        munmap(allocation.pages, allocation.bytes_of_pages + PAGE);
    } else {
        free(memory);
    }
    return cudaSuccess;
}

// What the page tables caught.
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
    die("memory fault at %p: %s", (const void *)address,
        self ? "out of range, freed, the host's, or this thread's stack is full"
        : find_allocation(address) ? "the host touches memory of a GPU"
                                   : "in the host's code");
}

static const bool prepared_for_faults = [] {
    struct sigaction action = {};
    action.sa_sigaction = handle_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int fault : {SIGSEGV, SIGBUS}) {
        if (!sanitized) {
            sigaction(fault, &action, nullptr);
        }
    }
    IF_ASAN(__sanitizer_set_death_callback([] { // its own report knows nothing of kernels
        say_where();
        fputs("as above\n", stderr);
    }));
    return true;
}();

/* ==== 2. Streams ================================================================================

   A stream is a queue. What it holds runs in order, when somebody waits for it, or at once without
   CUEMU_LAZY. Who waits does the work. */

typedef std::function<void()> Operation;
typedef std::vector<Operation> Graph;

struct Stream {
    int device;
    bool blocking; // the null stream waits for it, and it for the null stream
    std::deque<Operation> queue = {};
    long finished = 0; // operations so far
    bool destroyed = false;
    Graph *captured = nullptr; // while what is queued goes there
    long end() const {
        return finished + (long)queue.size();
    }
};

struct Event { // it happens when `position` operations of the stream have finished
    int device;
    Stream *stream = nullptr; // null: never recorded
    long position = 0;
    Graph *captured = nullptr;
    double seconds = 0;
};

static std::deque<Stream> streams; // for ever: an event may point to a stream, an operation to an
static std::deque<Event> events;   // event
static std::map<int, Stream *> null_streams; // by device

inline Stream *null_stream(int device) {
    if (!null_streams[device]) {
        streams.push_back({device, false});
        null_streams[device] = &streams.back();
    }
    return null_streams[device];
}

inline Stream *stream_of(Stream *stream) {
    Lock lock;
    if (stream && stream->destroyed) {
        die("a stream is used that was destroyed");
    }
    return stream ? stream : null_stream(current_device);
}

// Does what the stream holds, until `position` operations have finished.
inline void run_until(Stream *stream, long position) {
    Lock lock;
    while (stream->finished < position) {
        stream->queue.front()();
        stream->queue.pop_front();
        stream->finished++;
    }
}
inline void finish_stream(Stream *stream) {
    Lock lock;
    run_until(stream, stream->end());
}
inline void finish_device(int device, bool only_blocking) {
    Lock lock;
    for (Stream &stream : streams) {
        if (stream.device == device && (stream.blocking || !only_blocking)) {
            finish_stream(&stream);
        }
    }
}

// The null stream and the others (but those that are cudaStreamNonBlocking) wait for one another.
inline void wait_for_others(Stream *stream) {
    if (stream == null_stream(stream->device)) {
        finish_device(stream->device, true);
    } else if (stream->blocking) {
        finish_stream(null_stream(stream->device));
    }
}

inline cudaError_t enqueue(Stream *stream, Operation operation) {
    static const bool lazy = setting("CUEMU_LAZY", 0);
    Lock lock;
    stream = stream_of(stream);
    if (stream->captured) {
        stream->captured->push_back(std::move(operation));
        return cudaSuccess;
    }
    wait_for_others(stream);
    stream->queue.push_back(std::move(operation));
    if (!lazy) {
        finish_stream(stream);
    }
    return cudaSuccess;
}

/* ==== 3. Checked requests =======================================================================

   A launch or a copy is checked when it is queued, and when it runs: what it uses may have been
   freed since. */

static std::map<std::pair<int, const void *>, size_t> dynamic_limits; // by device and kernel
static std::set<std::pair<int, int>> peers; // the first may use memory of the second
const size_t STATIC_LIMIT = 48 << 10, DYNAMIC_LIMIT = 227 << 10;

inline void check_sizes(const Launch *launch, const void *kernel) {
    dim3 grid = launch->grid, size = launch->block;
    long threads = (long)size.x * size.y * size.z;
    if ((long)grid.x * grid.y * grid.z == 0 || threads == 0) {
        die("an empty grid or block: (%u,%u,%u) blocks of (%u,%u,%u) threads", grid.x, grid.y,
            grid.z, size.x, size.y, size.z);
    }
    if (threads > 1024 || size.z > 64) {
        die("%ld threads in a block; at most 1024, 64 of them in z", threads);
    }
    if (grid.x > INT_MAX || grid.y > 65535 || grid.z > 65535) {
        die("a grid of (%u,%u,%u); at most (2147483647,65535,65535)", grid.x, grid.y, grid.z);
    }
    auto found = dynamic_limits.find({launch->device, kernel});
    size_t limit = found == dynamic_limits.end() ? STATIC_LIMIT : found->second;
    if (launch->dynamic_bytes > limit) {
        die("%zu bytes of dynamic shared memory; cudaFuncSetAttribute allows %zu here",
            launch->dynamic_bytes, limit);
    }
}

inline void check_pointer(int number, const void *argument) {
    const Allocated *found = find_allocation(argument);
    if (!found && argument) {
        found = find_allocation((const char *)argument - 1); // an array's end is no mistake
    }
    if (!found && argument) {
        die("argument %d is no pointer to memory of a GPU: the host's, or freed", number);
    }
    int owner = found ? found->second.device : -1, device = launched->device;
    if (owner >= 0 && owner != device && !peers.count({device, owner})) {
        die("argument %d is memory of device %d, launched on device %d", number, owner, device);
    }
}

Traffic *traffic_of(const char *kernel); // see section 6

inline void queue_launch(std::shared_ptr<Launch> launch, const void *kernel) {
    Lock lock;
    launch->stream = stream_of(launch->stream);
    launched = launch.get(); // to name it in reports
    check_sizes(launched, kernel);
    if (launch->stream->device != launch->device) {
        die("in a stream of device %d, while device %d is the current one", launch->stream->device,
            launch->device);
    }
    launch->check();
    launched = nullptr;
    enqueue(launch->stream, [launch] {
        launched = launch.get();
        launch->check();
        launch->traffic = traffic_of(launch->kernel);
        UseMemory use;
        run_grid(launch.get());
    });
}

// Is there such memory on that side? cudaMemcpyDefault takes any.
enum Side { ON_HOST, ON_GPU, ANYWHERE };
inline void check_range(const char *what, const void *begin, size_t bytes, Side side,
                        int device = -1) {
    const Allocated *found = bytes ? find_allocation(begin) : nullptr;
    int owner = found ? found->second.device : -1;
    if (bytes && side != ANYWHERE && (owner >= 0) != (side == ON_GPU)) {
        die("%s: %p is %s", what, begin,
            owner >= 0 ? "memory of a GPU" : "not memory of a GPU, or was freed");
    }
    size_t left =
        found ? (size_t)(found->first + found->second.bytes - (const char *)begin) : bytes;
    if (bytes > left) {
        die("%s: %zu bytes, of which only %zu are there", what, bytes, left);
    }
    if (owner >= 0 && device >= 0 && owner != device) {
        die("%s: %p is memory of device %d, not %d", what, begin, owner, device);
    }
}

inline cudaError_t copy(void *to, const void *from, size_t bytes, Side to_side, Side from_side,
                        Stream *stream, int to_device = -1, int from_device = -1) {
    Lock lock;
    auto check = [=] {
        check_range("copy to", to, bytes, to_side, to_device);
        check_range("copy from", from, bytes, from_side, from_device);
    };
    check();
    enqueue(stream, [=] {
        check();
        UseMemory use;
        memcpy(to, from, bytes);
    });
    // Memory that is not page-locked goes through a buffer of the driver, which the host waits for.
    stream = stream_of(stream);
    if (!stream->captured && !(find_allocation(to) && find_allocation(from))) {
        finish_stream(stream);
    }
    return cudaSuccess;
}

/* ==== 4. CUDA's functions ======================================================================= */

namespace api {

typedef Stream *cudaStream_t;
typedef Event *cudaEvent_t;
typedef Graph *cudaGraph_t, *cudaGraphExec_t;
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum { cudaStreamDefault, cudaStreamNonBlocking };
enum { cudaEventDefault, cudaEventDisableTiming = 2 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice };
struct cudaPointerAttributes {
    cudaMemoryType type;
    int device;
};
struct cudaDeviceProp {
    char name[256];
    struct {
        char bytes[16];
    } uuid;
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin;
    int major, minor, warpSize, multiProcessorCount;
};

/* ---- Errors */

inline const std::pair<const char *, const char *> &name_and_text(cudaError_t error) {
    static const std::map<cudaError_t, std::pair<const char *, const char *>> all = {
        EMU_ERRORS(EMU_NAME_AND_TEXT)};
    return all.at(error);
}
inline const char *cudaGetErrorName(cudaError_t error) {
    return name_and_text(error).first;
}
inline const char *cudaGetErrorString(cudaError_t error) {
    return name_and_text(error).second;
}
inline cudaError_t cudaGetLastError() {
    return std::exchange(last_error, cudaSuccess);
}

/* ---- Devices */

inline cudaError_t cudaGetDeviceCount(int *count) {
    *count = (int)devices().size();
    return *count ? cudaSuccess : failed(cudaErrorNoDevice);
}
inline cudaError_t cudaSetDevice(int device) {
    if (!is_device(device)) {
        return failed(devices().empty() ? cudaErrorNoDevice : cudaErrorInvalidDevice);
    }
    current_device = device;
    return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
    if (!is_device(device)) {
        return failed(cudaErrorInvalidDevice);
    }
    *properties = {"emulated GPU", {}, device_memory(), STATIC_LIMIT, DYNAMIC_LIMIT, 9, 0, 32, 4};
    // The device's own number, whatever CUDA_VISIBLE_DEVICES calls it.
    snprintf(properties->uuid.bytes, 16, "cuda_on_cpu %03d", devices()[(size_t)device]);
    return cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int *version) {
    *version = 12000;
    return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() {
    finish_device(current_device);
    return cudaSuccess;
}
inline cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer;
    return cudaSuccess;
}
inline cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
    Lock lock;
    if (!is_device(peer) || peer == current_device) {
        return failed(cudaErrorInvalidDevice);
    }
    bool is_new = peers.insert({current_device, peer}).second;
    return is_new ? cudaSuccess : failed(cudaErrorPeerAccessAlreadyEnabled);
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel *kernel, cudaFuncAttribute, int dynamic_bytes) {
    Lock lock;
    if (dynamic_bytes < 0 || dynamic_bytes > (int)DYNAMIC_LIMIT) {
        return failed(cudaErrorInvalidValue);
    }
    dynamic_limits[{current_device, (const void *)kernel}] = (size_t)dynamic_bytes;
    return cudaSuccess;
}

/* ---- Memory */

inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *memory) {
    Lock lock;
    const Allocated *found = find_allocation(memory);
    int device = found ? found->second.device : -2;
    *attributes = {device >= 0 ? cudaMemoryTypeDevice
                   : found     ? cudaMemoryTypeHost
                               : cudaMemoryTypeUnregistered,
                   device == -1 ? 0 : device};
    return cudaSuccess;
}
template <class T> cudaError_t cudaMalloc(T **memory, size_t bytes) {
    return is_device(current_device) ? allocate((void **)memory, bytes, current_device)
                                     : failed(cudaErrorNoDevice);
}
inline cudaError_t cudaFree(void *memory) {
    return release("cudaFree", memory, true);
}
template <class T> cudaError_t cudaMallocHost(T **memory, size_t bytes) {
    return allocate((void **)memory, bytes, -1);
}
inline cudaError_t cudaFreeHost(void *memory) {
    return release("cudaFreeHost", memory, false);
}
inline cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
    Lock lock;
    *total = device_memory();
    *left = *total - used_memory[current_device];
    return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream = nullptr) {
    const Side from_sides[] = {ON_HOST, ON_HOST, ON_GPU, ON_GPU, ANYWHERE};
    const Side to_sides[] = {ON_HOST, ON_GPU, ON_HOST, ON_GPU, ANYWHERE};
    return copy(to, from, bytes, to_sides[kind], from_sides[kind], stream);
}
inline cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    cudaMemcpyAsync(to, from, bytes, kind);
    finish_stream(stream_of(nullptr));
    return cudaSuccess;
}
inline cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                                       size_t bytes, cudaStream_t stream = nullptr) {
    return copy(to, from, bytes, ON_GPU, ON_GPU, stream, to_device, from_device);
}
inline cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes,
                                   cudaStream_t stream = nullptr) {
    Lock lock;
    check_range("cudaMemset", to, bytes, ON_GPU);
    return enqueue(stream, [=] {
        check_range("cudaMemset", to, bytes, ON_GPU);
        UseMemory use;
        memset(to, value, bytes);
    });
}
inline cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    return cudaMemsetAsync(to, value, bytes);
}

/* ---- Streams */

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    Lock lock;
    streams.push_back({current_device, flags != cudaStreamNonBlocking});
    *stream = &streams.back();
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    Lock lock;
    stream = stream_of(stream);
    if (stream->captured) {
        die("cudaStreamSynchronize: the stream is being captured");
    }
    wait_for_others(stream);
    finish_stream(stream);
    return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    cudaStreamSynchronize(stream);
    stream->destroyed = true;
    return cudaSuccess;
}
// Whoever asks again and again shall see it end: every question does one more operation.
inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
    Lock lock;
    stream = stream_of(stream);
    if (stream->queue.empty()) {
        return cudaSuccess;
    }
    run_until(stream, stream->finished + 1);
    return cudaErrorNotReady;
}
inline cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void *), void *data) {
    return enqueue(stream, [=] { function(data); });
}

/* ---- Events */

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    Lock lock;
    events.push_back({current_device});
    *event = &events.back();
    return cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}
inline cudaError_t cudaEventDestroy(cudaEvent_t) {
    return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr) {
    Lock lock;
    stream = stream_of(stream);
    if (stream->device != event->device) {
        die("an event of device %d is recorded on device %d", event->device, stream->device);
    }
    event->captured = stream->captured;
    if (stream->captured) {
        return cudaSuccess;
    }
    event->stream = stream;
    event->position = stream->end() + 1;
    return enqueue(stream, [event] {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        event->seconds = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    });
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (event->stream) {
        run_until(event->stream, event->position);
    }
    return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
    Lock lock;
    bool happened = !event->stream || event->stream->finished >= event->position;
    return happened ? cudaSuccess : (cudaStreamQuery(event->stream), cudaErrorNotReady);
}
inline cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    if (cudaEventQuery(begin) || cudaEventQuery(end)) {
        return cudaErrorNotReady;
    }
    *milliseconds = (float)((end->seconds - begin->seconds) * 1e3);
    return cudaSuccess;
}
// Of an event in a stream that is being captured, the waiting stream joins the capture.
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = 0) {
    Lock lock;
    if (event->captured) {
        stream_of(stream)->captured = event->captured;
        return cudaSuccess;
    }
    return enqueue(stream, [from = event->stream, position = event->position] {
        if (from) {
            run_until(from, position);
        }
    });
}

/* ---- Graphs: the operations of a capture in the order in which they were queued */

inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    stream->captured = new Graph;
    return cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    Lock lock;
    *graph = stream->captured;
    for (Stream &other : streams) {
        other.captured = other.captured == *graph ? nullptr : other.captured;
    }
    return cudaSuccess;
}
inline cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph,
                                        unsigned long long = 0) {
    *executable = new Graph(*graph);
    return cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    return enqueue(stream, [operations = *executable] {
        for (const Operation &operation : operations) {
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
} // namespace api

/* ==== 5. Tensor cores, ldmatrix, cp.async =======================================================

   What the wrappers of inline PTX call instead. The layouts are those of the PTX manual's chapters
   "Matrix fragments for mma.m16n8k16" and "m16n8k8", "ldmatrix" and "cp.async". */

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
void multiply(float *d, const uint32_t *a, const uint32_t *b, const float *c, Place place = {}) {
    const int HALF_K = 4 * PER_REGISTER;
    uint32_t mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    LaneValues &values = meet(0xffffffff, mine, sizeof mine, place);
    auto element_of = [&](int lane, int i_register, int i) {
        uint32_t bits;
        memcpy(&bits, values[lane] + 4 * i_register, 4);
        return element(bits, i);
    };
    int g = lane() / 4, q = lane() % 4;
    for (int i = 0; i < 4; i++) {
        float sum = c[i];
        int row = i / 2, column = 2 * q + i % 2;
        for (int k = 0; k < 2 * HALF_K; k++) {
            int half = k / HALF_K, holder = k % HALF_K / PER_REGISTER, j = k % PER_REGISTER;
            sum += element_of(g * 4 + holder, 2 * half + row, j) *
                   element_of(column * 4 + holder, 4 + half, j);
        }
        d[i] = sum;
    }
}

#ifdef CUEMU_COUNT
#define EMU_UNCOUNTED __attribute__((no_sanitize("thread")))
#else
#define EMU_UNCOUNTED
#endif
enum { GLOBAL_READ, GLOBAL_WRITE, SHARED_READ, SHARED_WRITE, TRAFFIC_KINDS };
void count(int kind, long bytes);

inline void check_shared(const char *what, const void *address, Place place) {
    const char *wrong = (uintptr_t)address % 16   ? "aligned to 16 bytes"
                        : !is_shared(address, 16) ? "in shared memory"
                                                  : nullptr;
    if (wrong) {
        die("%s:%d: %s: %p is not %s", place.file, place.line, what, address, wrong);
    }
}

namespace api {
#define emu_mma_m16n8k16_bf16 emu::multiply<2, emu::bf16_element>
#define emu_mma_m16n8k16_f16 emu::multiply<2, emu::f16_element>
#define emu_mma_m16n8k8_tf32 emu::multiply<1, emu::tf32_element>

// Four matrices of 8 rows of 16 bytes: lane i says where row i % 8 of matrix i / 8 lies. Lane 4*g +
// q gets elements 2*q and 2*q + 1 of row g of each matrix; transposed, of column g.
inline EMU_UNCOUNTED void emu_ldmatrix_x4(uint32_t *registers, const void *row, bool transposed,
                                          Place place = {}) {
    check_shared("ldmatrix", row, place);
    count(SHARED_READ, 16);
    LaneValues &values = meet(0xffffffff, &row, sizeof row, place);
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

// Starts to copy `bytes` (0 to 16) from global to shared memory, and zeros after them up to 16.
// Until the copy is waited for nobody knows what lies there: a NaN.
inline EMU_UNCOUNTED void emu_cp_async16(void *to, const void *from, int bytes, Place place = {}) {
    check_shared("cp.async", to, place);
    if ((uintptr_t)from % 16) {
        die("%s:%d: cp.async: source %p is not aligned to 16 bytes", place.file, place.line, from);
    }
    memset(to, 0xff, 16);
    Unwatched unwatched;
    self->copies.push_back({to, from, bytes, self->copy_groups});
}
inline void emu_cp_async_commit() {
    self->copy_groups++;
}

// Waits until at most `pending` of this thread's groups are still on their way.
inline EMU_UNCOUNTED void emu_cp_async_wait(int pending) {
    std::deque<AsyncCopy> &copies = self->copies;
    while (!copies.empty() && copies[0].group < self->copy_groups - pending) {
        AsyncCopy copy = copies[0];
        copies.pop_front();
        memcpy(copy.to, copy.from, (size_t)copy.bytes);
        memset((char *)copy.to + copy.bytes, 0, (size_t)(16 - copy.bytes));
        count(GLOBAL_READ, copy.bytes);
        count(SHARED_WRITE, 16);
    }
}
} // namespace api

/* ==== 6. Counting accesses ======================================================================

   With -fsanitize=thread the compiler calls a function at every access to memory that may be
   shared. Here these are ours. What is neither in an array in shared memory nor in an allocation of
   a GPU, on a stack for instance, is not counted: a GPU would have most of it in registers. */

#ifndef CUEMU_COUNT
inline Traffic *traffic_of(const char *) {
    return nullptr;
}
inline void count(int, long) {}
#else
struct Traffic {
    long launches, accesses[TRAFFIC_KINDS], bytes[TRAFFIC_KINDS];
};

static struct TrafficTable {
    std::map<std::string, Traffic> kernels;
    ~TrafficTable() { // at the program's end
        const char *kinds[TRAFFIC_KINDS] = {"global reads", "writes", "shared reads", "writes"};
        fprintf(stderr, "%-24s %8s", "kernel", "launches");
        for (const char *kind : kinds) {
            fprintf(stderr, " %12s %14s", kind, "(bytes)");
        }
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

inline EMU_UNCOUNTED void count_access(const void *address, long bytes, bool write) {
    static thread_local bool counting; // for what we do here is watched as well
    if (!self || counting) {
        return;
    }
    counting = true;
    if (is_shared(address, 1)) {
        count(write ? SHARED_WRITE : SHARED_READ, bytes);
    } else if (find_allocation(address)) {
        count(write ? GLOBAL_WRITE : GLOBAL_READ, bytes);
    }
    counting = false;
}

#define EMU_HOOK extern "C" EMU_UNCOUNTED __attribute__((used))
#define EMU_ACCESS_HOOK(NAME, BYTES, WRITE)             \
    EMU_HOOK void __tsan_##NAME##BYTES(void *address) { \
        count_access(address, BYTES, WRITE);            \
    }
#define EMU_ACCESS_HOOKS(BYTES)                   \
    EMU_ACCESS_HOOK(read, BYTES, false)           \
    EMU_ACCESS_HOOK(write, BYTES, true)           \
    EMU_ACCESS_HOOK(unaligned_read, BYTES, false) \
    EMU_ACCESS_HOOK(unaligned_write, BYTES, true)
EMU_ACCESS_HOOKS(1)
EMU_ACCESS_HOOKS(2)
EMU_ACCESS_HOOKS(4)
EMU_ACCESS_HOOKS(8)
EMU_ACCESS_HOOKS(16)
EMU_HOOK void __tsan_read_range(void *address, size_t bytes) {
    count_access(address, (long)bytes, false);
}
EMU_HOOK void __tsan_write_range(void *address, size_t bytes) {
    count_access(address, (long)bytes, true);
}
#define EMU_ATOMIC_HOOK(BITS, RESULT, NAME, WRITE, OPERATION, ...)                       \
    EMU_HOOK RESULT __tsan_atomic##BITS##_##NAME(uint##BITS##_t *address, __VA_ARGS__) { \
        count_access(address, BITS / 8, WRITE);                                          \
        return OPERATION;                                                                \
    }
#define EMU_ATOMIC_HOOKS(BITS, T)                                                                  \
    EMU_ATOMIC_HOOK(BITS, T, load, false, __atomic_load_n(address, __ATOMIC_SEQ_CST), int)         \
    EMU_ATOMIC_HOOK(BITS, T, fetch_add, true,                                                      \
                    __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST), T value, int)            \
    EMU_ATOMIC_HOOK(BITS, T, fetch_or, true, __atomic_fetch_or(address, value, __ATOMIC_SEQ_CST),  \
                    T value, int)                                                                  \
    EMU_ATOMIC_HOOK(BITS, int, compare_exchange_strong, true,                                      \
                    __atomic_compare_exchange_n(address, expected, value, false, __ATOMIC_SEQ_CST, \
                                                __ATOMIC_SEQ_CST),                                 \
                    T *expected, T value, int, int)
EMU_ATOMIC_HOOKS(8, uint8_t)
EMU_ATOMIC_HOOKS(32, uint32_t)
EMU_ATOMIC_HOOKS(64, uint64_t)
EMU_HOOK void __tsan_init() {}
EMU_HOOK void __tsan_func_entry(void *) {}
EMU_HOOK void __tsan_func_exit() {}
EMU_HOOK void __tsan_vptr_update(void **, void *) {}
#endif
} // namespace emu
