/* lab10_counts.h - what kernels do in the emulator, for lab 10. Included after cuda_on_cpu.h, with
   -DCUEMU_COUNT, and before matmul.cu, whose instructions it counts:

     conflicts   of the accesses to shared memory: a warp's request is served 128 bytes at a time,
                 8 lanes of 16 bytes, 32 lanes of 4. Each bank, of 32, delivers one word of 4 bytes
                 at a time, so a request whose words collide in a bank takes longer: what it takes
                 more than once is counted. Requests of a warp are its threads' n-th accesses.
     ahead       bytes that cp.async is copying while a warp multiplies
     lines       of 128 bytes of global memory that a warp's reads of 16 bytes a lane need, cp.async
                 included: 4 for 32 chunks next to each other

   Reported, as the emulator's errors: accesses to shared memory by two threads, one of which
   writes, with no barrier between; and reads of what cp.async has not been waited for. */
#include <array>
#include <map>
#include <set>
#include <unordered_map>

struct Counts {
    long mma, ldmatrix, copies; // of a warp; copies: cp.async of a thread
    long conflicts;
    double ahead;      // bytes on their way, summed over all mma
    long shared_bytes; // of a block, the largest
    long barriers;     // of block (0, 0)
    long accesses[4], bytes[4];
    long lines;
};

namespace lab10 {
static Counts counts;
static bool counting;
static float sign = 1; // mma multiplies by it: a result that does not change is not mma's

// What the block that runs has done. One worker runs the blocks: CUEMU_CORES=1.
struct Request {
    std::array<const void *, 32> lanes;
    int arrived;
};
struct Use {                      // of two bytes of shared memory
    long written = -1, read = -1; // the epoch, between two barriers
    int writer = -1, reader = -1; // reader -2: several
    int copier = -1;              // whose cp.async is on its way there
};
static long block_number, accesses_of[1024], reads_of[1024], bytes_ahead, arrived[32];
static std::map<std::array<long, 3>, Request> requests; // of warp, n, bytes
static std::map<std::array<long, 2>, Request> reads;    // of global memory: of warp, n
static std::unordered_map<uintptr_t, Use> uses;
static std::array<const void *, 32> lines[32]; // of each warp's ldmatrix

static EMU_UNCOUNTED long more_than_once(const std::array<const void *, 32> &lanes, long bytes) {
    const long at_once = bytes > 4 ? 128 / bytes : 32;
    long more = 0;
    for (long first = 0; first < 32; first += at_once) {
        std::map<uintptr_t, std::map<uintptr_t, bool>> words; // of each bank
        size_t most = 1;
        for (long lane = first; lane < first + at_once; lane++)
            for (long word = 0; lanes[lane] && word < (bytes + 3) / 4; word++)
                words[((uintptr_t)lanes[lane] / 4 + word) % 32][(uintptr_t)lanes[lane] / 4 + word];
        for (const auto &[bank, different] : words)
            most = std::max(most, different.size());
        more += (long)most - 1;
    }
    return more;
}

static EMU_UNCOUNTED void end_block(void) {
    for (const auto &[key, request] : requests)
        counts.conflicts += more_than_once(request.lanes, key[2]);
    requests.clear();
    reads.clear();
    uses.clear();
    std::fill(accesses_of, accesses_of + 1024, 0);
    std::fill(reads_of, reads_of + 1024, 0);
    bytes_ahead = 0;
}

static EMU_UNCOUNTED void begin_access(void) {
    long bytes = 0;
    if (block_number != emu::block->number)
        end_block();
    block_number = emu::block->number;
    for (const emu::SharedArray &array : emu::block->shared)
        bytes += (long)array.bytes;
    counts.shared_bytes = std::max(counts.shared_bytes, bytes);
    if (emu::block->index.x == 0 && emu::block->index.y == 0)
        counts.barriers = std::max(counts.barriers, (long)emu::block->barrier->number);
}

// One lane's part of a request.
static EMU_UNCOUNTED void add_request(const void *address, long bytes) {
    const int thread = (int)emu::self->number;
    const std::array<long, 3> key = {thread / 32, accesses_of[thread]++, bytes};
    Request &request = requests[key];
    request.lanes[(size_t)thread % 32] = address;
    if (++request.arrived < 32)
        return;
    counts.conflicts += more_than_once(request.lanes, bytes);
    requests.erase(key);
}

// One lane's part of a read of 16 bytes from global memory.
static EMU_UNCOUNTED void add_read(const void *address) {
    const int thread = (int)emu::self->number;
    const std::array<long, 2> key = {thread / 32, reads_of[thread]++};
    Request &request = reads[key];
    request.lanes[(size_t)thread % 32] = address;
    if (++request.arrived < 32)
        return;
    std::set<uintptr_t> different;
    for (const void *lane : request.lanes)
        different.insert((uintptr_t)lane / 128);
    counts.lines += (long)different.size();
    reads.erase(key);
}

static EMU_UNCOUNTED void use(const void *address, long bytes, bool writes, const char *what) {
    const int thread = (int)emu::self->number;
    const long epoch = emu::block->barrier->number;
    for (uintptr_t at = (uintptr_t)address / 2; at < ((uintptr_t)address + bytes + 1) / 2; at++) {
        Use &u = uses[at];
        if (u.copier >= 0)
            emu::die("%s%s what a cp.async of thread %d is still copying: it has not been waited "
                     "for (cp_async_commit, cp_async_wait)",
                     what, writes ? "writes" : "reads", u.copier);
        if (u.written == epoch && u.writer != thread)
            emu::die("%s%s shared memory that thread %d has written, with no __syncthreads() "
                     "between",
                     what, writes ? "writes" : "reads", u.writer);
        if (writes && u.read == epoch && u.reader != thread)
            emu::die("%swrites shared memory that another thread reads, with no __syncthreads() "
                     "between",
                     what);
        if (writes) {
            u.written = epoch;
            u.writer = thread;
        } else {
            u.reader = u.read == epoch && u.reader != thread ? -2 : thread;
            u.read = epoch;
        }
    }
}

static EMU_UNCOUNTED void observe(int kind, const void *address, long bytes) {
    begin_access();
    if (kind == emu::GLOBAL_READ && bytes == 16)
        add_read(address);
    if (kind != emu::SHARED_READ && kind != emu::SHARED_WRITE)
        return;
    add_request(address, bytes);
    use(address, bytes, kind == emu::SHARED_WRITE, "");
}

static EMU_UNCOUNTED void mma(float *d, const uint32_t *a, const uint32_t *b, const float *c,
                              emu::SourceLocation location = {}) {
    const float zeros[4] = {};
    float products[4];
    emu_mma_m16n8k16_bf16(products, a, b, zeros, location);
    for (int i = 0; i < 4; i++)
        d[i] = c[i] + sign * products[i];
    if (!counting || emu::lane() > 0)
        return;
    begin_access();
    counts.mma++;
    counts.ahead += (double)bytes_ahead;
}

static EMU_UNCOUNTED void ldmatrix(uint32_t *r, const void *line, bool transposed,
                                   emu::SourceLocation location = {}) {
    const unsigned thread = emu::self->number;
    emu::check_shared("ldmatrix", line, location);
    if (counting) {
        begin_access();
        use(line, 16, false, "ldmatrix ");
        lines[thread / 32][thread % 32] = line;
        if (++arrived[thread / 32] == 32) {
            counts.ldmatrix++;
            counts.conflicts += more_than_once(lines[thread / 32], 16);
            arrived[thread / 32] = 0;
        }
    }
    emu_ldmatrix_x4(r, line, transposed, location);
}

static EMU_UNCOUNTED void cp_async(void *to, const void *from, int bytes,
                                   emu::SourceLocation location = {}) {
    emu_cp_async16(to, from, bytes, location);
    if (!counting)
        return;
    begin_access();
    add_request(to, 16);
    add_read(from);
    use(to, 16, true, "cp.async ");
    for (uintptr_t at = (uintptr_t)to / 2; at < (uintptr_t)to / 2 + 8; at++)
        uses[at].copier = (int)emu::self->number;
    counts.copies++;
    bytes_ahead += bytes;
}

static EMU_UNCOUNTED void cp_async_wait(int pending) {
    const std::deque<emu::AsyncCopy> before = emu::self->copies;
    emu_cp_async_wait(pending);
    const size_t complete = before.size() - emu::self->copies.size();
    for (size_t i = 0; counting && i < complete; i++) {
        for (uintptr_t at = (uintptr_t)before[i].to / 2; at < (uintptr_t)before[i].to / 2 + 8; at++)
            uses[at] = {emu::block->barrier->number, -1, (int)emu::self->number, -1, -1};
        bytes_ahead -= before[i].bytes;
    }
}
// The emulator's own table would mix all launches: it is not printed.
static struct NoTable {
    ~NoTable() {
        emu::traffic_table.kernels.clear();
    }
} no_table;
} // namespace lab10
#define emu_mma_m16n8k16_bf16 lab10::mma
#define emu_ldmatrix_x4 lab10::ldmatrix
#define emu_cp_async16 lab10::cp_async
#define emu_cp_async_wait lab10::cp_async_wait

static void begin_counts(void) {
    for (auto &[name, traffic] : emu::traffic_table.kernels)
        traffic = {};
    lab10::counts = {};
    lab10::block_number = -1;
    lab10::counting = true;
    std::fill(lab10::arrived, lab10::arrived + 32, 0);
    emu::observer = lab10::observe;
}

static Counts end_counts(void) {
    lab10::end_block();
    lab10::counting = false;
    emu::observer = nullptr;
    for (int kind = 0; kind < emu::TRAFFIC_KINDS; kind++)
        for (const auto &[name, traffic] : emu::traffic_table.kernels) {
            lab10::counts.accesses[kind] += traffic.accesses[kind];
            lab10::counts.bytes[kind] += traffic.bytes[kind];
        }
    return lab10::counts;
}

// How many steps' tiles are on their way while a warp multiplies, on average
static double tiles_ahead(const Counts &n, size_t bytes_of_a_step) {
    return n.mma ? n.ahead / (double)n.mma / (double)bytes_of_a_step : 0;
}
