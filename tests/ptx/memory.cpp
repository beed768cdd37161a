/* memory.cpp - loads, stores and copies of PTX, with their checks. See ptx.h. */

#include "ptx.h"
#include <algorithm>
#include <cstring>
#include <sys/mman.h>

/* ---- Addresses */

// Those of all lanes; lanes that do not take part get that of one that does.
static void addresses(const Warp &w, const Inst &in, u32 operand, u64 *a) {
    for (int i = 0; i < WARP; i++)
        a[i] = in.address == 8   ? w.reg<u64>(operand)[i] + (u64)in.offset
               : in.address == 4 ? (u32)(w.reg<u32>(operand)[i] + (u32)in.offset)
                                 : (u64)in.offset;
    for (int i = 0; i < WARP && w.mask != EVERY_LANE; i++)
        a[i] = w.active(i) ? a[i] : a[first(w.mask)];
}

static void check_alignment(const Warp &w, const Inst &in, const u64 *a, u32 size) {
    for (int i = 0; i < WARP; i++)
        if (a[i] & (size - 1))
            fault(w, in, w.taking_part(i), MISALIGNED, "misaligned address %#llx of %u bytes",
                  (ull)a[i], size);
}

// Whether `size` bytes at the addresses are in live allocations
static void check_global(const Warp &w, const Inst &in, const u64 *a, u32 size) {
    Allocation &seen = w.block->seen[in.number & 255];
    check_alignment(w, in, a, size);
    for (int i = 0; i < WARP; i++) {
        if (a[i] >= seen.begin && a[i] + size <= seen.end)
            continue;
        seen = allocation_of(a[i]);
        if (a[i] + size > seen.end)
            fault(w, in, w.taking_part(i), BAD_ADDRESS,
                  "%u bytes at %#llx are not in one live allocation%s", size, (ull)a[i],
                  a[i] - arena < ARENA ? "" : " of the device; the address may be the host's");
    }
}

static void check_shared(const Warp &w, const Inst &in, const u64 *a, u32 size) {
    check_alignment(w, in, a, size);
    for (int i = 0; i < WARP; i++)
        if (a[i] + size > w.block->shared_bytes)
            fault(w, in, w.taking_part(i), BAD_ADDRESS,
                  "%u bytes at %llu of %u bytes of shared memory", size, (ull)a[i],
                  w.block->shared_bytes);
}

/* ---- Races. For each 4 bytes of memory: who wrote them last, and who read them last. Two accesses
   of a launch are ordered only if one thread makes both, or if a barrier of their block lies
   between them. Of reads by several threads, the record says so; of different bytes, only the last
   access is recorded. Atomic additions race with nothing here. */

Record *records;

void new_launch(void) {
    static const size_t bytes = ARENA / 4 * sizeof *records;
    if (!records)
        records = (Record *)reserve(bytes, PROT_READ | PROT_WRITE);
    if (launch_number++ < LAST_LAUNCH)
        return;
    launch_number = 1; // the numbers are used again
    madvise(records, bytes, MADV_DONTNEED);
}

static Access get(const Access &at) { // while other threads of the host use it
    Access a;
    __atomic_load(&at, &a, __ATOMIC_RELAXED);
    return a;
}

// Bits that differ
static u64 differing(Access a, Access b) {
    return __builtin_bit_cast(u64, a) ^ __builtin_bit_cast(u64, b);
}

static bool same_block(Access a, Access b) {
    return differing(a, b) >> 32 == 0;
}

// By other blocks of a launch, or by other threads of a block since the last barrier
static bool race(Access a, Access b) {
    const u64 d = differing(a, b);
    const bool unordered = d >> 32 ? d >> 52 == 0 : d >> 15 == 0 && d >> 4 != 0;
    return unordered && (a.bytes & b.bytes);
}

static Access joined(Access a, Access b) { // of two reads
    if (a.launch != b.launch || a.bytes != b.bytes)
        return b;
    if (a.block != b.block)
        b.block = MANY_BLOCKS;
    else if (a.epoch == b.epoch && a.thread != b.thread)
        b.thread = SEVERAL;
    return b;
}

static Access access_of(const Warp &w, u32 lane, u64 at, u32 size) {
    Access a = w.block->now;
    a.thread = (u32)w.index * WARP + lane;
    a.bytes = size >= 4 ? 15 : ((1 << size) - 1) << (at & 3);
    return a;
}

[[noreturn, gnu::cold]] static void report_race(const Warp &w, const Inst &in, int lane,
                                                Access written, Access read, Access mine,
                                                bool reads, const char *memory) {
    const bool after_write = race(written, mine);
    const Access other = after_write ? written : read;
    if (same_block(written, mine) && written.thread == IN_FLIGHT)
        fault(w, in, lane, FAILURE, "%s memory is %s while a cp.async copies to it: no wait_group",
              memory, reads ? "read" : "written");
    fault(w, in, lane, FAILURE,
          "race in %s memory: thread %u of block %u has %s it since the last barrier", memory,
          (u32)other.thread, (u32)other.block, after_write ? "written" : "read");
}

static inline void touch(const Warp &w, const Inst &in, int lane, Record &r, Access mine,
                         bool reads, const char *memory) {
    const Access written = get(r.written), read = get(r.read);
    if (race(written, mine) || (!reads && race(read, mine)) ||
        (written.thread == IN_FLIGHT && same_block(written, mine)))
        report_race(w, in, lane, written, read, mine, reads, memory);
    Access now = reads ? joined(read, mine) : mine;
    __atomic_store(reads ? &r.read : &r.written, &now, __ATOMIC_RELAXED);
}

static void touch_global(const Warp &w, const Inst &in, const u64 *a, u32 size, bool reads) {
    for (u32 i = 0; i < WARP; i++)
        for (u32 j = 0; j < size && w.active((int)i); j += 4)
            touch(w, in, (int)i, records[(a[i] + j - arena) / 4], access_of(w, i, a[i], size),
                  reads, "global");
}

static void touch_shared(const Warp &w, const Inst &in, int lane, u64 at, u32 size, Access mine,
                         bool reads) {
    for (u64 word = at / 4; word <= (at + size - 1) / 4; word++) {
        Record &r = w.block->records[word];
        if (!same_block(r.written, mine)) // of another block, which had this memory before
            r.written = {};
        if (!same_block(r.read, mine))
            r.read = {};
        touch(w, in, lane, r, mine, reads, "shared");
        if (reads && !same_block(r.written, mine))
            fault(w, in, lane, FAILURE, "shared byte %llu is read, but was never written", (ull)at);
    }
}

/* ---- What statistics count */

static void count_sectors(const Warp &w, const Inst &in, const u64 *a) {
    u64 sectors[WARP];
    std::transform(a, a + WARP, sectors, [](u64 address) { return address / 32; });
    std::sort(sectors, sectors + WARP);
    Counts &c = w.block->counts[in.number];
    c.parts += (u64)(std::unique(sectors, sectors + WARP) - sectors);
    c.requests++;
}

// Passes over the 32 banks of 4 bytes by `together` neighboring lanes, whose words differ
static u32 passes_of(const u64 *a, u32 words, int begin, int together, u32 mask) {
    u64 of_bank[32][WARP];
    u32 n[32] = {}, most = 0;
    for (int i = begin; i < begin + together; i++)
        for (u32 j = 0; j < words && mask >> i & 1; j++) {
            const u64 word = a[i] / 4 + j, bank = word % 32;
            u64 *end = of_bank[bank] + n[bank];
            if (std::find(of_bank[bank], end, word) == end)
                of_bank[bank][n[bank]++] = word;
            most = std::max(most, n[bank]);
        }
    return most;
}

// 128 bytes at a time, as many as the banks have: without conflicts one pass each.
static void count_passes(const Warp &w, const Inst &in, const u64 *a, u32 size, u32 mask) {
    Counts &c = w.block->counts[in.number];
    const int together = size == 16 ? 8 : size == 8 ? 16 : 32;
    for (int begin = 0; begin < WARP; begin += together) {
        const u32 passes = passes_of(a, std::max(size / 4, 1u), begin, together, mask);
        c.parts += passes;
        c.requests += passes > 0;
    }
}

/* ---- Loads and stores */

// The bytes of each lane's access on the host, after all checks.
static void locate_global(const Warp &w, const Inst &in, const u64 *a, u32 size, char **p) {
    check_global(w, in, a, size);
    touch_global(w, in, a, size, in.read);
    if (counting)
        count_sectors(w, in, a);
    for (int i = 0; i < WARP; i++)
        p[i] = (char *)(a[i] + (u64)delta);
}

static void locate_shared(const Warp &w, const Inst &in, const u64 *a, u32 size, char **p) {
    check_shared(w, in, a, size);
    if (counting)
        count_passes(w, in, a, size, w.mask);
    for (int i = 0; i < WARP; i++) {
        p[i] = w.block->shared.data() + a[i];
        if (w.active(i))
            touch_shared(w, in, i, a[i], size, access_of(w, (u32)i, a[i], size), in.read);
    }
}

static void locate_local(const Warp &w, const Inst &in, const u64 *a, u32 size, char **p) {
    Block &b = *w.block;
    check_alignment(w, in, a, size);
    const u64 room = in.space == PARAM ? b.launch->params.size() : b.kernel->local;
    for (int i = 0; i < WARP; i++) {
        const int lane = w.taking_part(i);
        if (a[i] + size > room)
            fault(w, in, lane, BAD_ADDRESS, "%u bytes at %llu of %llu of %s", size, (ull)a[i],
                  (ull)room, in.space == PARAM ? "the parameters" : "local memory");
        p[i] = in.space == PARAM ? (char *)b.launch->params.data() + a[i]
                                 : b.local.data() + (u64)(w.index * WARP + lane) * room + a[i];
    }
}

static void locate(const Warp &w, const Inst &in, char **p) {
    u64 a[WARP];
    const u32 size = in.bytes * in.count;
    addresses(w, in, in.o[4], a);
    if (in.space == GLOBAL)
        locate_global(w, in, a, size, p);
    else if (in.space == SHARED)
        locate_shared(w, in, a, size, p);
    else
        locate_local(w, in, a, size, p);
}

template <class REG, class T> static void load_as(const Warp &w, const Inst &in, char **p) {
    const REG keep = in.wide == 2 ? 0xffff : ~(REG)0;
    const u32 mask = w.mask; // an inactive lane has the address of an active one
    for (u32 v = 0; v < in.count; v++) {
        REG *r = w.reg<REG>(in.o[v]);
        for (int i = 0; i < WARP; i++) {
            T value;
            memcpy(&value, p[i] + v * sizeof(T), sizeof value);
            r[i] = mask >> i & 1 ? (REG)value & keep : r[i];
        }
    }
}

typedef void Move(const Warp &, const Inst &, char **); // of elements of 1, 2, 4 or 8 bytes

template <class REG> static void load_into(const Warp &w, const Inst &in, char **p) {
    Move *const by_size[] = {in.sign ? load_as<REG, int8_t> : load_as<REG, uint8_t>,
                             load_as<REG, u16>, load_as<REG, u32>, load_as<REG, u64>};
    by_size[__builtin_ctz(in.bytes)](w, in, p);
}

void load(Warp &w, const Inst &in) {
    char *p[WARP];
    locate(w, in, p);
    in.wide == 8 ? load_into<u64>(w, in, p) : load_into<u32>(w, in, p);
}

template <class T> static void store_as(const Warp &w, const Inst &in, char **p) {
    const u32 apart = in.wide == 8 ? 8 : 4;
    for (u32 v = 0; v < in.count; v++)
        for (u32 i = 0; i < WARP; i++)
            if (w.active((int)i))
                memcpy(p[i] + v * sizeof(T), w.registers + in.o[v] + i * apart, sizeof(T));
}

void store(Warp &w, const Inst &in) {
    static Move *const by_size[] = {store_as<uint8_t>, store_as<u16>, store_as<u32>, store_as<u64>};
    char *p[WARP];
    locate(w, in, p);
    by_size[__builtin_ctz(in.bytes)](w, in, p);
}

void atomic_add(Warp &w, const Inst &in) { // o: the old value, address, addend
    u64 a[WARP];
    addresses(w, in, in.o[1], a);
    check_global(w, in, a, 4);
    for (int i = 0; i < WARP; i++)
        if (w.active(i))
            w.reg<u32>(in.o[0])[i] = __atomic_fetch_add((u32 *)(a[i] + (u64)delta),
                                                        w.reg<u32>(in.o[2])[i], __ATOMIC_RELAXED);
}

void matrix_rows(Warp &w, const Inst &in, u64 *rows) {
    addresses(w, in, in.o[4], rows);
    check_shared(w, in, rows, 16);
    if (counting)
        count_passes(w, in, rows, 16, EVERY_LANE);
}

void read_matrix_word(Warp &w, const Inst &in, int lane, u64 at, bool by_two) {
    Access mine = access_of(w, (u32)lane, at, 4);
    if (by_two)
        mine.thread = SEVERAL;
    touch_shared(w, in, lane, at, 4, mine, true);
}

/* ---- cp.async.cg.shared.global [o0], [o1], bytes, o3: the bytes are moved when they are waited
   for, by which time the source, too, may be read; nothing may read the destination until then. */

static void check_source(Warp &w, const Inst &in, const u64 *from) {
    const u32 all = w.mask, *sizes = w.reg<u32>(in.o[3]);
    u32 reading = 0;
    for (int i = 0; i < WARP; i++) {
        if (w.active(i) && sizes[i] > in.bytes)
            fault(w, in, i, BAD_INSTRUCTION, "copies %u of %u bytes", sizes[i], in.bytes);
        reading |= (u32)(w.active(i) && sizes[i] > 0) << i;
    }
    if (!reading)
        return;
    u64 a[WARP];
    for (int i = 0; i < WARP; i++)
        a[i] = from[reading >> i & 1 ? i : first(reading)];
    w.mask = reading;
    check_global(w, in, a, in.bytes);
    touch_global(w, in, a, in.bytes, true);
    if (counting)
        count_sectors(w, in, a);
    w.mask = all;
}

void cp_async(Warp &w, const Inst &in) {
    u64 to[WARP];
    const u64 *from = w.reg<u64>(in.o[1]);
    addresses(w, in, in.o[0], to);
    check_shared(w, in, to, in.bytes);
    check_source(w, in, from);
    for (int i = 0; i < WARP; i++) {
        if (!w.active(i))
            continue;
        Access mine = access_of(w, (u32)i, to[i], in.bytes);
        touch_shared(w, in, i, to[i], in.bytes, mine, false);
        mine.thread = IN_FLIGHT;
        for (u64 word = to[i] / 4; word < (to[i] + in.bytes) / 4; word++)
            w.block->records[word].written = mine;
        w.pending.push_back(
            {from[i], (u32)to[i], w.reg<u32>(in.o[3])[i], in.bytes, (u32)i, w.committed[i]});
    }
}

void cp_async_commit(Warp &w, const Inst &) {
    for (int i = 0; i < WARP; i++)
        w.committed[i] += w.active(i);
}

static void arrive(Warp &w, const Pending &p) {
    Block &b = *w.block;
    memcpy(b.shared.data() + p.to, (char *)(p.from + (u64)delta), p.bytes);
    memset(b.shared.data() + p.to + p.bytes, 0, p.size - p.bytes);
    for (u32 word = p.to / 4; word < (p.to + p.size) / 4; word++)
        b.records[word].written = access_of(w, p.lane, p.to, p.size);
}

void cp_async_wait(Warp &w, const Inst &in) { // offset: how many groups may be pending
    const auto done = [&](const Pending &p) {
        return w.active((int)p.lane) && (s64)p.group < (s64)w.committed[p.lane] - in.offset;
    };
    for (const Pending &p : w.pending)
        if (done(p))
            arrive(w, p);
    w.pending.erase(std::remove_if(w.pending.begin(), w.pending.end(), done), w.pending.end());
}
