/* statistics.cpp - prints what kernels executed, for tests/ptx/profile.sh. It counts PTX, not
   machine code: ptxas makes 20 and more instructions of a division, and merges or moves others. */

#include "ptx.h"
#include <algorithm>
#include <cstdio>

static const char *const wanted = getenv("PTX_STATS");
const bool counting = wanted;

static const char *const class_names[CLASSES] = {
    "fma",       "float",    "mma",       "ldmatrix",  "ld.shared",
    "st.shared", "cp.async", "ld.global", "st.global", "param and local",
    "integer",   "convert",  "mov",       "control"};

struct Sums { // of the instructions of a class
    u64 warps, lanes, bytes, parts, requests;
};

static f64 percent(u64 part, u64 of) {
    return of ? 100. * (f64)part / (f64)of : 0;
}

static void print_mix(const char *title, const Sums *sums, bool with_moves) {
    u64 all = 0;
    for (int c = 0; c < CLASSES; c++)
        all += c == MOVE && !with_moves ? 0 : sums[c].warps;
    fprintf(stderr, "  %s:", title);
    for (int c = 0; c < CLASSES; c++)
        if (sums[c].warps && (c != MOVE || with_moves))
            fprintf(stderr, " %s %.1f %%", class_names[c], percent(sums[c].warps, all));
    fprintf(stderr, "\n");
}

static void add(Sums &to, const Inst &in, const Counts &c) {
    const bool moves = in.of == LD_GLOBAL || in.of == ST_GLOBAL || in.of == CP_ASYNC;
    const u64 bytes = moves ? in.bytes * std::max(in.count, 1u) : 0;
    to.warps += c.warps;
    to.lanes += bytes ? c.lanes : 0;
    to.bytes += c.lanes * bytes;
    to.parts += c.parts;
    to.requests += c.requests;
}

// The loop, up to a branch backwards, with the most mma, or else fma, or else instructions
static void main_loop(const Kernel &k, size_t &begin, size_t &end) {
    u64 most = 0;
    begin = end = 0;
    for (size_t i = 0; i < k.code.size(); i++) {
        const Inst &in = k.code[i];
        u64 score = 0;
        if (in.kind != BRANCH || in.target > (int)i || k.counts[i].warps == 0)
            continue;
        for (size_t j = (size_t)in.target; j <= i; j++) {
            const Class of = k.code[j].of;
            score += k.counts[j].warps << (of == MMA ? 32 : of == FMA ? 8 : 0);
        }
        if (score > most || (score == most && i - (size_t)in.target < end - begin)) {
            most = score;
            begin = (size_t)in.target;
            end = i + 1;
        }
    }
}

// used: of the bytes in the sectors; above 100 % where lanes ask for the same, or copy zeros
static void print_global(const char *title, const Sums &s) {
    if (s.requests)
        fprintf(stderr, "  %s: %.1f bytes a lane, %.1f sectors a request, %.0f %% of them used\n",
                title, (f64)s.bytes / (f64)s.lanes, (f64)s.parts / (f64)s.requests,
                percent(s.bytes, 32 * s.parts));
}

static void print_kernel(const Kernel &k) {
    Sums of[CLASSES] = {}, in_loop[CLASSES] = {};
    u64 all = 0, lanes = 0, looped = 0;
    size_t begin, end;
    main_loop(k, begin, end);
    for (size_t i = 0; i < k.code.size(); i++) {
        const Inst &in = k.code[i];
        all += k.counts[i].warps;
        lanes += k.counts[i].lanes;
        add(of[in.of], in, k.counts[i]);
        if (i >= begin && i < end) {
            add(in_loop[in.of], in, k.counts[i]);
            looped += k.counts[i].warps;
        }
    }
    fprintf(stderr,
            "%s\n  %llu launches, %llu blocks, %llu instructions of warps, %.1f %% of lanes "
            "active\n",
            k.name.c_str(), (ull)k.launches, (ull)k.blocks, (ull)all, percent(lanes, all * WARP));
    print_mix("all", of, true);
    if (looped)
        print_mix(format("main loop, %.1f %% of all, without mov", percent(looped, all)).c_str(),
                  in_loop, false);
    print_global("ld.global", of[LD_GLOBAL]);
    print_global("cp.async", of[CP_ASYNC]);
    print_global("st.global", of[ST_GLOBAL]);
    for (Class c : {LD_SHARED, ST_SHARED, LDMATRIX})
        if (of[c].requests)
            fprintf(stderr, "  %s: %.2f passes for each that it needs without conflicts of banks\n",
                    class_names[c], (f64)of[c].parts / (f64)of[c].requests);
}

void print_statistics(void) {
    for (const auto &k : kernels)
        if (wanted && k.second.launches && k.second.name.find(wanted) != std::string::npos)
            print_kernel(k.second);
}
