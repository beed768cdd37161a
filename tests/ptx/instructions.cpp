/* instructions.cpp - what each instruction of PTX does, for 32 lanes at a time. See ptx.h. */

#include "ptx.h"
#include <algorithm>
#include <cfenv>
#include <climits>
#include <cmath>
#include <cstring>
#include <immintrin.h>
#include <sstream>
#include <unordered_map>

/* ---- An instruction that computes each lane by itself is a lambda. Its arguments' types give the
   sizes of the registers; a result of type bool is a predicate. */

enum Pred : u32 { NO = 0, YES = ~0u };

// All lanes compute, so that these are vector instructions; no instruction traps.
template <class D, class F, class... S>
static inline void each_lane(u32 mask, D *d, F f, const S *...s) {
    if (mask == EVERY_LANE) {
#pragma GCC ivdep
        for (int i = 0; i < WARP; i++)
            d[i] = f(s[i]...);
        return;
    }
#pragma GCC ivdep
    for (int i = 0; i < WARP; i++) {
        const D r = f(s[i]...);
        d[i] = mask >> i & 1 ? r : d[i];
    }
}

template <class T> constexpr char letter(void) {
    return std::is_same<T, Pred>::value ? 'p' : sizeof(T) == 8 ? '8' : '4';
}

template <class F, class R, class... A, size_t... I>
static Operation of_lambda(Class of, R (F::*)(A...) const, std::index_sequence<I...>) {
    typedef std::conditional_t<std::is_same<R, bool>::value, Pred, R> D;
    const Run run = [](Warp &w, const Inst &in) {
        const auto value = [](A... a) {
            if constexpr (std::is_same<R, bool>::value)
                return F()(a...) ? YES : NO;
            else
                return F()(a...);
        };
        each_lane(w.mask, w.reg<D>(in.o[0]), value, w.reg<A>(in.o[1 + I])...);
    };
    return {run, {letter<D>(), letter<A>()...}, of, PLAIN};
}

template <class F, class R, class... A>
static Operation of_lambda(Class of, R (F::*f)(A...) const) {
    return of_lambda(of, f, std::index_sequence_for<A...>());
}

typedef std::unordered_map<std::string, Operation> Table;

// Adds an instruction for all of these types.
template <class F>
static void add(Table &t, Class of, const std::string &name, const std::string &types, F) {
    std::istringstream words(types);
    for (std::string type; words >> type;)
        t[name + "." + type] = of_lambda(of, &F::operator());
}

/* ---- Helpers */

// Of 32 bits exact in double, and faster than the CPU's division; by 0 all bits are set.
template <class T> static inline T quotient(T a, T b) {
    if constexpr (sizeof(T) == 4)
        return b == 0 ? (T)-1 : (T)(s64)((f64)a / (f64)b);
    else
        return b == 0 ? (T)-1 : b == (T)-1 && (T)-1 < 0 ? 0 - a : a / b;
}

static f32 fma_down(f32 a, f32 b, f32 c) {
    volatile f32 x = a, y = b, z = c;
    fesetround(FE_DOWNWARD);
    volatile f32 r = fmaf(x, y, z);
    fesetround(FE_TONEAREST);
    return r;
}

static s32 truncated(f32 a) { // cvt.rzi.s32.f32
    return a != a ? 0 : a >= 0x1p31f ? INT_MAX : a < -0x1p31f ? INT_MIN : (s32)a;
}

static f32 exp2_approx(f32 a) { // within its error bound; .ftz
    const f32 r = (f32)exp2((f64)(fabsf(a) < 0x1p-126f ? 0 : a));
    return r < 0x1p-126f ? 0 : r;
}

// b, whose n bits from `at` on are the lowest of a
static u32 inserted(u32 a, u32 b, u32 at, u32 n) {
    at &= 255;
    const u64 bits = at < 32 ? ((1ull << std::min(n & 255, 32u)) - 1) << at : 0;
    return (u32)((b & ~bits) | (((u64)a << (at & 31)) & bits));
}

static u32 bf16_of(f32 a) { // to nearest even; a NaN is 7fff
    u32 bits;
    memcpy(&bits, &a, 4);
    return a != a ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static u32 half_of(f32 a) {
    const u32 half = _cvtss_sh(a, _MM_FROUND_TO_NEAREST_INT);
    return a != a ? 0x7fff : half;
}

// The larger number, or the other one of a NaN; 0 is larger than -0.
static f32 larger(f32 a, f32 b) {
    return a != a ? b : b != b ? a : a > b || (a == b && !std::signbit(a)) ? a : b;
}

/* ---- The table. R: what registers hold; T: as which type an instruction takes it. */

template <class R, class T> static void add_comparisons(Table &t, const std::string &types) {
    add(t, INTEGER, "setp.eq", types, [](R a, R b) { return (T)a == (T)b; });
    add(t, INTEGER, "setp.ne", types, [](R a, R b) { return (T)a < (T)b || (T)a > (T)b; });
    add(t, INTEGER, "setp.lt", types, [](R a, R b) { return (T)a < (T)b; });
    add(t, INTEGER, "setp.le", types, [](R a, R b) { return (T)a <= (T)b; });
    add(t, INTEGER, "setp.gt", types, [](R a, R b) { return (T)a > (T)b; });
    add(t, INTEGER, "setp.ge", types, [](R a, R b) { return (T)a >= (T)b; });
}

template <class R> static void add_moves(Table &t, const std::string &types) {
    add(t, MOVE, "mov", types, [](R a) { return a; });
    add(t, INTEGER, "selp", types, [](R a, R b, Pred c) { return c ? a : b; });
}

template <class T> static void add_signed_or_not(Table &t, const std::string &type) {
    add(t, INTEGER, "min", type, [](T a, T b) { return a < b ? a : b; });
    add(t, INTEGER, "max", type, [](T a, T b) { return a > b ? a : b; });
    add(t, INTEGER, "div", type, [](T a, T b) { return quotient(a, b); });
    add(t, INTEGER, "rem", type, [](T a, T b) { return b == 0 ? a : a - quotient(a, b) * b; });
    add(t, INTEGER, "shr", type, [](T a, u32 b) -> T {
        return b < 8 * sizeof a ? a >> b : a < 0 ? -1 : 0;
    });
}

template <class S, class U> static void add_integers(Table &t, const std::string &bits) {
    const std::string s = "s" + bits, u = "u" + bits, b = "b" + bits, both = s + " " + u;
    add_comparisons<S, S>(t, s);
    add_comparisons<U, U>(t, u + " " + b);
    add_moves<U>(t, both + " " + b + " f" + bits);
    add_signed_or_not<S>(t, s);
    add_signed_or_not<U>(t, u);
    add(t, INTEGER, "add", both, [](U a, U b) { return a + b; });
    add(t, INTEGER, "sub", both, [](U a, U b) { return a - b; });
    add(t, INTEGER, "mul.lo", both, [](U a, U b) { return a * b; });
    add(t, INTEGER, "mad.lo", both, [](U a, U b, U c) { return a * b + c; });
    add(t, INTEGER, "neg", s, [](U a) { return 0 - a; });
    add(t, INTEGER, "and", b, [](U a, U b) { return a & b; });
    add(t, INTEGER, "or", b, [](U a, U b) { return a | b; });
    add(t, INTEGER, "xor", b, [](U a, U b) { return a ^ b; });
    add(t, INTEGER, "not", b, [](U a) { return ~a; });
    add(t, INTEGER, "shl", b, [](U a, u32 b) -> U { return b < 8 * sizeof a ? a << b : 0; });
}

// Registers of 16 bits are zero-extended.
static void add_16_bits(Table &t) {
    add_comparisons<u32, u32>(t, "u16 b16");
    add_comparisons<u32, int16_t>(t, "s16");
    add_moves<u32>(t, "u16 b16 s16");
    add(t, INTEGER, "add", "s16", [](u32 a, u32 b) { return (a + b) & 0xffff; });
    add(t, INTEGER, "and", "b16", [](u32 a, u32 b) { return a & b; });
    add(t, INTEGER, "or", "b16", [](u32 a, u32 b) { return a | b; });
    add(t, INTEGER, "shl", "b16", [](u32 a, u32 b) -> u32 { return b < 16 ? a << b & 0xffff : 0; });
    add(t, INTEGER, "shr", "u16", [](u32 a, u32 b) -> u32 { return b < 16 ? a >> b : 0; });
}

static void add_predicates(Table &t) {
    add(t, INTEGER, "and", "pred", [](Pred a, Pred b) { return (a & b) != 0; });
    add(t, INTEGER, "or", "pred", [](Pred a, Pred b) { return (a | b) != 0; });
    add(t, INTEGER, "xor", "pred", [](Pred a, Pred b) { return a != b; });
    add(t, INTEGER, "not", "pred", [](Pred a) { return !a; });
    add(t, MOVE, "mov", "pred", [](Pred a) { return a != 0; });
}

static void add_other_integers(Table &t) {
    add(t, INTEGER, "mul.wide", "s32", [](s32 a, s32 b) { return (s64)a * b; });
    add(t, INTEGER, "mul.wide", "u32", [](u32 a, u32 b) { return (u64)a * b; });
    add(t, INTEGER, "mad.wide", "s32", [](s32 a, s32 b, s64 c) { return (s64)a * b + c; });
    add(t, INTEGER, "mad.wide", "u32", [](u32 a, u32 b, u64 c) { return (u64)a * b + c; });
    add(t, INTEGER, "bfi", "b32", [](u32 a, u32 b, u32 c, u32 d) { return inserted(a, b, c, d); });
}

// The unordered ones are true of a NaN.
template <class F> static void add_float_comparisons(Table &t, const std::string &type) {
    add_comparisons<F, F>(t, type);
    add(t, INTEGER, "setp.equ", type, [](F a, F b) { return !(a < b || a > b); });
    add(t, INTEGER, "setp.neu", type, [](F a, F b) { return a != b; });
    add(t, INTEGER, "setp.ltu", type, [](F a, F b) { return !(a >= b); });
    add(t, INTEGER, "setp.leu", type, [](F a, F b) { return !(a > b); });
    add(t, INTEGER, "setp.gtu", type, [](F a, F b) { return !(a <= b); });
    add(t, INTEGER, "setp.geu", type, [](F a, F b) { return !(a < b); });
    add(t, INTEGER, "setp.nan", type, [](F a, F b) { return a != a || b != b; });
}

static void add_floats(Table &t) {
    add(t, FMA, "fma.rn", "f32", [](f32 a, f32 b, f32 c) { return std::fma(a, b, c); });
    add(t, FMA, "fma.rm", "f32", [](f32 a, f32 b, f32 c) { return fma_down(a, b, c); });
    add(t, FLOAT, "add", "f32", [](f32 a, f32 b) { return a + b; });
    add(t, FLOAT, "sub", "f32", [](f32 a, f32 b) { return a - b; });
    add(t, FLOAT, "mul", "f32", [](f32 a, f32 b) { return a * b; });
    add(t, FLOAT, "div.rn", "f32", [](f32 a, f32 b) { return a / b; });
    add(t, FLOAT, "rcp.rn", "f32", [](f32 a) { return 1 / a; });
    add(t, FLOAT, "sqrt.rn", "f32", [](f32 a) { return std::sqrt(a); });
    add(t, FLOAT, "neg", "f32", [](f32 a) { return -a; });
    add(t, FLOAT, "abs", "f32", [](f32 a) { return std::fabs(a); });
    add(t, FLOAT, "max", "f32", [](f32 a, f32 b) { return larger(a, b); });
    add(t, FLOAT, "ex2.approx.ftz", "f32", [](f32 a) { return exp2_approx(a); });
}

static void add_conversions(Table &t) {
    add(t, CONVERT, "cvt", "s64.s32", [](s32 a) { return (s64)a; });
    add(t, CONVERT, "cvt", "u64.u32 u64.u16", [](u32 a) { return (u64)a; });
    add(t, CONVERT, "cvt", "u32.u64 s32.s64", [](u64 a) { return (u32)a; });
    add(t, CONVERT, "cvt", "u32.u16", [](u32 a) { return a; });
    add(t, CONVERT, "cvt", "u16.u32", [](u32 a) { return a & 0xffff; });
    add(t, CONVERT, "cvt.rn", "f32.u32 f32.u16", [](u32 a) { return (f32)a; });
    add(t, CONVERT, "cvt.rn", "f32.s32", [](s32 a) { return (f32)a; });
    add(t, CONVERT, "cvt.rn", "f32.f64", [](f64 a) { return (f32)a; });
    add(t, CONVERT, "cvt.rzi", "s32.f32", [](f32 a) { return truncated(a); });
    add(t, CONVERT, "cvt.sat", "f32.f32", [](f32 a) { return a > 0 ? a < 1 ? a : 1 : 0; });
    add(t, CONVERT, "cvt.rmi", "f32.f32", [](f32 a) { return floorf(a); });
    add(t, CONVERT, "cvt.rn", "bf16.f32", [](f32 a) { return bf16_of(a); });
    add(t, CONVERT, "cvt.rn", "bf16x2.f32",
        [](f32 a, f32 b) { return bf16_of(a) << 16 | bf16_of(b); });
    add(t, CONVERT, "cvt.rn", "f16x2.f32",
        [](f32 a, f32 b) { return half_of(a) << 16 | half_of(b); });
    add(t, CONVERT, "cvt", "f32.bf16", [](u32 a) { return a << 16; });
    add(t, CONVERT, "cvt.rn", "f16.f32", [](f32 a) { return half_of(a); });
    add(t, CONVERT, "cvt", "f32.f16", [](u32 a) { return _cvtsh_ss((u16)a); });
}

template <class T> static void unpack(Warp &w, const Inst &in) {
    const int half = sizeof(T) * 4;
    for (int i = 0; i < WARP; i++)
        if (w.active(i)) {
            const T whole = w.reg<T>(in.o[2])[i];
            w.reg<u32>(in.o[0])[i] = (u32)(whole & (((T)1 << half) - 1));
            w.reg<u32>(in.o[1])[i] = (u32)(whole >> half);
        }
}

void unknown(Warp &w, const Inst &in) {
    fault(w, in, first(w.mask), BAD_INSTRUCTION, "tests/ptx does not know this instruction");
}

/* ---- Instructions of a whole warp */

/* PTX ISA, ldmatrix: lanes 8 m to 8 m + 7 give the addresses of the rows, 16 bytes each, of matrix
   m. Lane l receives, of each matrix, elements 2 (l % 4) and the next one of row l / 4; .trans: of
   column l / 4. */
template <bool TRANS> static void ldmatrix(Warp &w, const Inst &in) {
    u64 rows[WARP];
    matrix_rows(w, in, rows);
    for (u32 m = 0; m < 4; m++) {
        u16 matrix[8][8];
        u32 *r = w.reg<u32>(in.o[m]);
        for (u32 i = 0; i < 8; i++)
            memcpy(matrix[i], w.block->shared.data() + rows[8 * m + i], 16);
        for (int l = 0; l < WARP; l++)
            read_matrix_word(w, in, l, rows[8 * m + (u32)l / 4] + (u32)l % 4 * 4, TRANS);
        for (int l = 0; l < WARP; l++) {
            const int row = l / 4, pair = l % 4 * 2;
            r[l] = TRANS ? matrix[pair][row] | (u32)matrix[pair + 1][row] << 16
                         : matrix[row][pair] | (u32)matrix[row][pair + 1] << 16;
        }
    }
}

enum Element { HALF, BFLOAT, TF32 };

// The elements of a register of all lanes: to[8 rows][of 4 lanes]
template <Element T> static void widen(const u32 *r, f32 *to) {
    const u16 *halves = (const u16 *)r;
    for (int i = 0; i < 64 && T == HALF; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + i))));
    for (int i = 0; i < 64 && T == BFLOAT; i++)
        ((u32 *)to)[i] = (u32)halves[i] << 16;
    for (int i = 0; i < WARP && T == TF32; i++)
        ((u32 *)to)[i] = r[i] & 0xffffe000; // the lower 13 bits are ignored
}

/* PTX ISA, mma: with g = lane / 4 and q = lane % 4, and `per` elements in 32 bits (2 of 16 bits, 1
   of tf32), registers hold
     a0, a1   A[g or g + 8][per q + e]   a2, a3: the same of the second half of K
     b0       B[per q + e][g]            b1: likewise
     c0, c1   C[g][2 q], C[g][2 q + 1]   c2, c3: of row g + 8
   With half the K there are a0, a1 and b0 only. Products are exact; their sum with C is rounded
   once, which devices need not do. */
template <Element T, int K> static void mma(Warp &w, const Inst &in) { // o: d, a, b, c
    constexpr int HALF_K = T == TF32 ? 4 : 8, HALVES = K / HALF_K;
    constexpr int A = 4, B = A + 2 * HALVES, C = B + HALVES;
    f64 a[16][K], b[K][8];
    f32 part[8][HALF_K];
    for (int half = 0; half < HALVES; half++) {
        for (int eight = 0; eight < 2; eight++) {
            widen<T>(w.reg<u32>(in.o[A + 2 * half + eight]), part[0]);
            for (int g = 0; g < 8; g++)
                for (int k = 0; k < HALF_K; k++)
                    a[8 * eight + g][half * HALF_K + k] = (f64)part[g][k];
        }
        widen<T>(w.reg<u32>(in.o[B + half]), part[0]);
        for (int g = 0; g < 8; g++)
            for (int k = 0; k < HALF_K; k++)
                b[half * HALF_K + k][g] = (f64)part[g][k];
    }
    f64 sums[16][8] = {};
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < K; k++)
            for (int j = 0; j < 8; j++)
                sums[i][j] = std::fma(a[i][k], b[k][j], sums[i][j]);
    for (int r = 0; r < 4; r++)
        for (int l = 0; l < WARP; l++)
            w.reg<f32>(in.o[r])[l] =
                (f32)(sums[l / 4 + r / 2 * 8][l % 4 * 2 + r % 2] + (f64)w.reg<f32>(in.o[C + r])[l]);
}

// shfl.sync.MODE.b32 o0|o1, o2, o3, o4, o5: o4 = the segment's mask << 8 | the last lane
template <bool DOWN> static void shuffle(Warp &w, const Inst &in) {
    u32 got[WARP];
    for (int i = 0; i < WARP; i++) {
        const int b = (int)(w.reg<u32>(in.o[3])[i] & 31);
        const u32 c = w.reg<u32>(in.o[4])[i], segment = c >> 8 & 31;
        const int last = (int)(((u32)i & segment) | (c & 31 & ~segment));
        const bool valid = (DOWN ? i + b : i ^ b) <= last;
        const int from = !valid ? i : DOWN ? i + b : i ^ b;
        if (w.active(i) && !w.active(from))
            fault(w, in, i, FAILURE, "shfl reads lane %d, which does not take part", from);
        if (w.active(i) && !(w.reg<u32>(in.o[5])[i] >> i & w.reg<u32>(in.o[5])[i] >> from & 1))
            fault(w, in, i, FAILURE, "shfl by lane %d, from lane %d: its mask is %#x", i, from,
                  w.reg<u32>(in.o[5])[i]);
        got[i] = w.reg<u32>(in.o[2])[from];
        if (w.active(i))
            w.reg<u32>(in.o[1])[i] = valid ? YES : NO;
    }
    for (int i = 0; i < WARP; i++)
        if (w.active(i))
            w.reg<u32>(in.o[0])[i] = got[i];
}

/* ---- All of them, but loads and stores */

static Table make_table(void) {
    Table t;
    add_integers<s32, u32>(t, "32");
    add_integers<s64, u64>(t, "64");
    add_16_bits(t);
    add_predicates(t);
    add_other_integers(t);
    add_float_comparisons<f32>(t, "f32");
    add_float_comparisons<f64>(t, "f64");
    add_floats(t);
    add_conversions(t);
    add(t, MOVE, "cvta", "to.global.u64", [](u64 a) { return a; });
    add(t, MOVE, "pack", "b32", [](u32 a, u32 b) { return a | b << 16; });
    add(t, MOVE, "pack", "b64", [](u32 a, u32 b) { return a | (u64)b << 32; });
    const std::string mma_ = "mma.sync.aligned.m16n8", of_mma(14, '4'),
                      m = "ldmatrix.sync.aligned.m8n8.x4";
    t[mma_ + "k16.row.col.f32.f16.f16.f32"] = {mma<HALF, 16>, of_mma, MMA, COLLECTIVE};
    t[mma_ + "k8.row.col.f32.f16.f16.f32"] = {mma<HALF, 8>, std::string(11, '4'), MMA, COLLECTIVE};
    t[mma_ + "k16.row.col.f32.bf16.bf16.f32"] = {mma<BFLOAT, 16>, of_mma, MMA, COLLECTIVE};
    t[mma_ + "k8.row.col.f32.tf32.tf32.f32"] = {mma<TF32, 8>, of_mma, MMA, COLLECTIVE};
    t[m + ".shared.b16"] = {ldmatrix<false>, "4444@", LDMATRIX, COLLECTIVE};
    t[m + ".trans.shared.b16"] = {ldmatrix<true>, "4444@", LDMATRIX, COLLECTIVE};
    t["shfl.sync.down.b32"] = {shuffle<true>, "4p4444", MOVE, SHUFFLE};
    t["shfl.sync.bfly.b32"] = {shuffle<false>, "4p4444", MOVE, SHUFFLE};
    t["cp.async.cg.shared.global"] = {cp_async, "@*b4", CP_ASYNC};
    t["cp.async.commit_group"] = {cp_async_commit, "", CP_ASYNC};
    t["cp.async.wait_group"] = {cp_async_wait, "n", CP_ASYNC};
    t["atom.global.add.u32"] = {atomic_add, "4@4", ST_GLOBAL};
    t["unpack.b32"] = {unpack<u32>, "444", MOVE};
    t["unpack.b64"] = {unpack<u64>, "448", MOVE};
    t["bar.sync"] = {nullptr, "n", CONTROL, BARRIER};
    t["bra"] = t["bra.uni"] = {nullptr, "l", CONTROL, BRANCH};
    t["ret"] = {nullptr, "", CONTROL, RETURN};
    return t;
}

const Operation *find_operation(const std::string &name) {
    static const Table table = make_table();
    const auto found = table.find(name);
    return found == table.end() ? nullptr : &found->second;
}
