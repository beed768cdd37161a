/* lab05_device.cu - make check LAB=5 appends this to conv.cu: what lab05.c needs of the device, and
   in the emulator what the accesses were that it has counted. */

extern "C" {
void *lab_alloc(size_t bytes) {
    void *memory;
    CHECK(cudaMalloc(&memory, bytes));
    return memory;
}

void lab_free(void *memory) {
    CHECK(cudaFree(memory));
}

void lab_copy(void *to, const void *from, size_t bytes, bool to_device) {
    CHECK(cudaMemcpy(to, from, bytes, to_device ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost));
}

// s: n, h, w, c, oc, kernel, stride, padding
void lab_convolve(int change, const int *s, const float *in, const float *weight, float *out) {
    const Conv conv = complete({s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]});
    changes[change].run(conv, in, weight, out);
    CHECK(cudaDeviceSynchronize());
}

double lab_microseconds(int change, const int *s, const float *in, const float *weight,
                        float *out) {
    const Conv conv = complete({s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]});
    return microseconds({conv, 0, in, weight, out, NULL, NULL}, change);
}
}

#ifdef CUEMU_COUNT
/* What block (0, 0, 0) does between two barriers, an epoch: does a thread read global memory before
   the tiles, so that the next numbers are on their way while it computes? */
static struct {
    long first, last;               // epoch
    long epoch[1024];               // of a thread's last access
    bool reads_tiles[1024];         // has read shared memory in it
    std::set<long> early, computes; // epochs: with reads of global memory before; with any of tiles
} lab_seen;

static EMU_UNCOUNTED void lab_observe(int kind, const void *, long) {
    const uint3 at = emu::block->index;
    if (at.x || at.y || at.z)
        return;
    const unsigned thread = emu::self->number;
    const long epoch = emu::block->barrier->number;
    lab_seen.first = lab_seen.first < 0 ? epoch : lab_seen.first;
    lab_seen.last = std::max(lab_seen.last, epoch);
    if (lab_seen.epoch[thread] != epoch)
        lab_seen.reads_tiles[thread] = false;
    lab_seen.epoch[thread] = epoch;
    if (kind == emu::SHARED_READ) {
        lab_seen.reads_tiles[thread] = true;
        lab_seen.computes.insert(epoch);
    }
    if (kind == emu::GLOBAL_READ && !lab_seen.reads_tiles[thread])
        lab_seen.early.insert(epoch);
}

extern "C" {
void lab_begin_count(void) {
    for (auto &[name, traffic] : emu::traffic_table.kernels)
        traffic = {};
    lab_seen.first = lab_seen.last = -1;
    std::fill(lab_seen.epoch, lab_seen.epoch + 1024, -1);
    lab_seen.early.clear();
    lab_seen.computes.clear();
    emu::observer = lab_observe;
}

// accesses and bytes of each kind: global reads, global writes, shared reads, shared writes
void lab_end_count(long accesses[4], long bytes[4], long *barriers, long *overlapped) {
    emu::observer = NULL;
    for (int kind = 0; kind < emu::TRAFFIC_KINDS; kind++) {
        accesses[kind] = bytes[kind] = 0;
        for (auto &[name, traffic] : emu::traffic_table.kernels) {
            accesses[kind] += traffic.accesses[kind];
            bytes[kind] += traffic.bytes[kind];
        }
    }
    *barriers = lab_seen.last - lab_seen.first;
    *overlapped = 0;
    for (long epoch : lab_seen.computes)
        *overlapped += (long)lab_seen.early.count(epoch);
}
}
#else
extern "C" {
void lab_begin_count(void) {}
void lab_end_count(long *, long *, long *, long *) {}
}
#endif
