/* warps.cpp - runs warps, blocks and grids. See ptx.h. */

#include "ptx.h"
#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <immintrin.h>
#include <omp.h>

u32 launch_number;
static const bool reversed = env("PTX_ORDER", 0);

/* ---- What is reported */

static std::string format_list(const char *form, va_list args) {
    char text[2048];
    vsnprintf(text, sizeof text, form, args);
    return text;
}

std::string format(const char *form, ...) {
    va_list args;
    va_start(args, form);
    const std::string text = format_list(form, args);
    va_end(args);
    return text;
}

void fault(const Warp &w, const Inst &in, int lane, int code, const char *form, ...) {
    va_list args;
    va_start(args, form);
    const std::string what = format_list(form, args);
    va_end(args);
    const Block &b = *w.block;
    throw Fault(code, format("%s\n    cnn_kernels.cu:%d: %.200s\n    %s, block (%u, %u, %u), "
                             "thread %d",
                             what.c_str(), in.line, in.text.c_str(), b.kernel->name.c_str(),
                             b.id[0], b.id[1], b.id[2], w.index * WARP + lane));
}

/* ---- Warps. Lanes that have gone different ways are groups; the one with the lowest program
   counter runs, so that groups meet again where their ways do. */

static u32 bits_of(const u32 *predicate) {
    u32 bits = 0;
    for (int i = 0; i < WARP; i += 8)
        bits |= (u32)_mm256_movemask_ps(_mm256_loadu_ps((const float *)predicate + i)) << i;
    return bits;
}

// Groups at the same instruction become one.
static void join(Warp &w) {
    for (int i = 0; i < w.group_count; i++)
        for (int j = w.group_count - 1; j > i; j--)
            if (w.groups[j].pc == w.groups[i].pc) {
                w.groups[i].lanes |= w.groups[j].lanes;
                w.groups[i].parked = false;
                w.groups[j] = w.groups[--w.group_count];
            }
}

static Group *lowest(Warp &w) {
    Group *found = nullptr;
    for (int i = 0; i < w.group_count; i++)
        if (!w.groups[i].parked && (!found || w.groups[i].pc < found->pc))
            found = &w.groups[i];
    const Group &g = w.groups[0];
    if (!found)
        fault(w, w.block->kernel->code[g.pc], first(g.lanes), FAILURE,
              "lanes of a warp wait at different instructions that all lanes must execute");
    return found;
}

// The first instruction from here on at which another group is
static int meeting(const Warp &w, const Group &g) {
    int pc = INT_MAX;
    for (int i = 0; i < w.group_count; i++)
        if (&w.groups[i] != &g && w.groups[i].pc >= g.pc)
            pc = std::min(pc, w.groups[i].pc);
    return pc;
}

// Whether the group goes on as it is
static bool branch(Warp &w, Group &g, const Inst &in) {
    const u32 stay = g.lanes & ~w.mask;
    if (w.mask == 0) {
        g.pc++;
        return true;
    }
    if (stay)
        w.groups[w.group_count++] = {g.pc + 1, stay, false};
    g.lanes = w.mask;
    g.pc = in.target;
    return w.group_count == 1;
}

static void end_lanes(Warp &w, Group &g) {
    w.live &= ~w.mask;
    g.lanes &= ~w.mask;
    g.pc++;
    if (g.lanes == 0)
        g = w.groups[--w.group_count];
    for (int i = 0; i < w.group_count; i++)
        w.groups[i].parked = false; // fewer lanes are waited for
}

// Whether all lanes are here that a barrier, or an instruction of the whole warp, needs
static bool complete(const Warp &w, const Inst &in) {
    u32 needed = in.kind == COLLECTIVE ? (u32)EVERY_LANE : w.live;
    if (in.kind == SHUFFLE && w.mask)
        needed &= w.reg<u32>(in.o[5])[first(w.mask)];
    if ((w.mask & needed) == needed)
        return true;
    if (in.guard >= 0)
        fault(w, in, first(needed & ~w.mask), FAILURE, "not executed by all lanes");
    return false;
}

// Until the group meets another, or splits, or ends, or waits. Whether it is at a barrier
static bool run_group(Warp &w, Group &g) {
    const Inst *code = w.block->kernel->code.data();
    Counts *counts = w.block->counts.data();
    for (const int end = meeting(w, g); g.pc != end;) {
        const Inst &in = code[g.pc];
        w.mask = g.lanes;
        if (in.guard >= 0)
            w.mask &= bits_of(w.reg<u32>(in.guard)) ^ (in.negated ? (u32)EVERY_LANE : 0);
        counts[g.pc].warps++;
        counts[g.pc].lanes += (u64)__builtin_popcount(w.mask);
        if (in.kind == PLAIN) {
            if (w.mask)
                in.run(w, in);
            g.pc++;
        } else if (in.kind == BRANCH) {
            if (!branch(w, g, in))
                return false;
        } else if (in.kind == RETURN) {
            end_lanes(w, g);
            return false;
        } else if (!complete(w, in)) {
            g.parked = true;
            return false;
        } else {
            g.pc++;
            if (in.kind == BARRIER)
                return true;
            in.run(w, in);
        }
    }
    return false;
}

// Until a barrier; or the end: false
static bool run_warp(Warp &w) {
    while (w.group_count > 0) {
        join(w);
        Group &g = *lowest(w);
        if (run_group(w, g)) {
            const Inst &in = w.block->kernel->code[g.pc - 1];
            if (w.live != w.all)
                fault(w, in, first(w.all & ~w.live), FAILURE,
                      "a barrier, but this thread has ended");
            return true;
        }
    }
    return false;
}

/* ---- Blocks */

static u32 special(const Kernel &k, const std::string &name, const Launch &l, u32 thread) {
    const u32 axis = (u32)(name.back() - 'x');
    const u32 tid[] = {thread % l.block[0], thread / l.block[0] % l.block[1],
                       thread / l.block[0] / l.block[1]};
    if (name.compare(0, 5, "%tid.") == 0)
        return tid[axis];
    if (name.compare(0, 6, "%ntid.") == 0)
        return l.block[axis];
    if (name.compare(0, 8, "%nctaid.") == 0)
        return l.grid[axis];
    if (name.compare(0, 7, "%ctaid.") == 0)
        return 0; // see begin_block()
    refuse(k, "special register " + name);
}

static void set_constants(Warp &w, const Kernel &k, const Launch &l) {
    for (const auto &[constant, at] : k.constants)
        for (u32 lane = 0; lane < WARP; lane++)
            memcpy(w.registers + at + lane * constant.second, &constant.first, constant.second);
    for (const auto &s : k.specials)
        for (u32 lane = 0; lane < WARP; lane++)
            w.reg<u32>(s.second)[lane] = special(k, s.first, l, (u32)w.index * WARP + lane);
}

// Everything that is the same for all blocks of a launch
static void begin_launch(Block &b, Kernel *k, const Launch &l) {
    const u32 threads = l.block[0] * l.block[1] * l.block[2], count = (threads + WARP - 1) / WARP;
    b.launch = &l;
    b.kernel = k;
    b.threads = threads;
    b.shared_bytes = l.dynamic_shared ? k->dynamic_at + l.dynamic_shared : k->shared;
    memset(b.seen, 0, sizeof b.seen);
    b.shared.resize(std::max(b.shared.size(), (size_t)b.shared_bytes));
    b.records.assign(b.shared_bytes / 4 + 1, Record());
    b.local.resize(std::max(b.local.size(), (size_t)k->local * count * WARP));
    b.registers.resize(std::max(b.registers.size(), (size_t)count * k->register_bytes + 64));
    b.warps.resize(count);
    b.counts.assign(k->code.size(), Counts());
    char *base = (char *)(((u64)b.registers.data() + 63) / 64 * 64);
    for (u32 i = 0; i < count; i++) {
        Warp &w = b.warps[i];
        w.registers = base + (size_t)i * k->register_bytes;
        w.index = (int)i;
        w.block = &b;
        set_constants(w, *k, l);
    }
}

static void begin_block(Block &b, u64 number) {
    const Launch &l = *b.launch;
    const u64 id[] = {number % l.grid[0], number / l.grid[0] % l.grid[1],
                      number / l.grid[0] / l.grid[1]};
    std::copy(id, id + 3, b.id);
    b.now = {};
    b.now.launch = launch_number;
    b.now.block = number % MANY_BLOCKS;
    std::fill_n(b.shared.begin(), b.shared_bytes, (char)-1);
    for (Warp &w : b.warps) {
        const u32 left = b.threads - (u32)w.index * WARP;
        w.live = w.all = left >= WARP ? EVERY_LANE : (1u << left) - 1;
        w.group_count = 1;
        w.groups[0] = {0, w.live, false};
        w.pending.clear();
        memset(w.committed, 0, sizeof w.committed);
        for (const auto &s : b.kernel->specials)
            if (s.first.compare(0, 7, "%ctaid.") == 0)
                std::fill_n(w.reg<u32>(s.second), WARP, b.id[s.first.back() - 'x']);
    }
}

static void check_end(const Warp &w) {
    for (const Pending &p : w.pending)
        if (p.bytes > 0)
            fault(w, w.block->kernel->code.back(), (int)p.lane, FAILURE,
                  "ends while a cp.async copies to shared byte %u", p.to);
}

static void run_block(Block &b) {
    const size_t count = b.warps.size();
    for (size_t ended = 0; ended < count; b.now.epoch++) {
        Warp *waiting = nullptr;
        for (size_t at = 0; at < count; at++) {
            Warp &w = b.warps[reversed ? count - 1 - at : at];
            if (w.group_count == 0)
                continue;
            if (run_warp(w)) {
                waiting = &w;
                continue;
            }
            ended++;
            check_end(w);
        }
        if (waiting && ended)
            fault(*waiting, b.kernel->code[waiting->groups[0].pc - 1], 0, FAILURE,
                  "a barrier, but %zu of %zu warps of the block have ended", ended, count);
    }
}

/* ---- Grids: the host's threads share the blocks. */

static thread_local Block block; // kept, with its memory

static void add_counts(Kernel *k, const Block &b) {
    static std::mutex lock;
    const std::lock_guard<std::mutex> locked(lock);
    for (size_t i = 0; i < k->code.size(); i++) {
        Counts &to = k->counts[i];
        const Counts &from = b.counts[i];
        to = {to.warps + from.warps, to.lanes + from.lanes, to.parts + from.parts,
              to.requests + from.requests};
    }
}

void run_kernel(Kernel *k, const Launch &l) {
    const s64 blocks = (s64)l.grid[0] * l.grid[1] * l.grid[2];
    const int threads = (int)std::min<s64>(blocks, omp_get_max_threads());
    std::atomic<bool> failed{false};
    Fault found(0, "");
    new_launch();
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        begin_launch(block, k, l);
#pragma omp for schedule(dynamic, 1)
        for (s64 at = 0; at < blocks; at++) {
            if (failed)
                continue;
            try {
                begin_block(block, (u64)(reversed ? blocks - 1 - at : at));
                run_block(block);
            } catch (const Fault &f) {
                if (!failed.exchange(true))
                    found = f;
            }
        }
        add_counts(k, block);
    }
    k->launches++;
    k->blocks += (u64)blocks;
    if (failed)
        throw found;
}
