/* ptx.h - PTX on the CPU: what nvcc made of cnn_kernels.cu is executed, instruction by instruction.

   nvcc puts the kernels' PTX as text into its object (make: --no-compress). A program is linked
   with that object and, in place of CUDA's runtime, with these files; no GPU is needed:

      runtime.cpp        the functions of CUDA that cnn calls: devices, memory, streams, graphs
      parser.cpp         the text becomes arrays of instructions
      instructions.cpp   what each instruction does; mma and ldmatrix by the PTX ISA's tables
      memory.cpp         loads, stores, copies, and their checks
      warps.cpp          lanes that diverge, barriers, blocks, grids
      statistics.cpp     what was executed, for tests/ptx/profile.sh

   What is an error, reported with the line of cnn_kernels.cu, the instruction, block and thread,
   and sticky as on a device: an access outside of one live allocation, misaligned, or to shared
   memory that was never written; a race in shared memory since the last barrier, or in global
   memory in a launch; a read of what a cp.async has not brought, or an end without its wait; a
   barrier, shuffle or mma without all its lanes; a launch with too many threads or too much shared
   memory. Device addresses are not mapped on the host, are never used twice, and memory holds NaN
   at first.

   What it cannot see: ptxas, that is, registers, schedules and the machine code; the order and
   rounding of the sums inside an mma (products are exact here, and their sum is rounded once); weak
   memory. It does not know generic addresses, __device__ variables, functions that are not inlined,
   barriers but 0, textures and cooperative groups: the kernels have none, and it says so if it
   meets one.

   PTX_SM=80: the device. PTX_ORDER=1: blocks and warps in reverse order. PTX_LAZY=1: calls of the
   host take effect as late as a wait allows. PTX_LEAKS=1: says what is not freed at the end.
   PTX_STATS=NAME: prints what was executed by kernels with this name. */

#pragma once
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

typedef uint16_t u16;
typedef uint32_t u32;
typedef int32_t s32;
typedef uint64_t u64;
typedef int64_t s64;
typedef float f32;
typedef double f64;
typedef unsigned long long ull; // for printf
enum { WARP = 32 };
enum : u32 { EVERY_LANE = ~0u };

inline long env(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value && *value ? strtol(value, nullptr, 0) : otherwise;
}
std::string format(const char *form, ...) __attribute__((format(printf, 1, 2)));

/* ---- Errors of kernels. The numbers are those of cudaError_t. */

enum { BAD_ADDRESS = 700, BAD_INSTRUCTION = 715, MISALIGNED = 716, FAILURE = 719 };
struct Fault : std::runtime_error {
    int code;
    Fault(int code, const std::string &what) : std::runtime_error(what), code(code) {}
};

/* ---- Device memory. The bytes of a device's address are at address + delta on the host. */

struct Allocation {
    u64 begin, end; // 0, 0: there is none
};
extern s64 delta;
extern u64 arena; // all device addresses are in [arena, arena + ARENA)
enum : u64 { ARENA = 1ull << 37 };
void *reserve(size_t bytes, int protection); // addresses; exits
Allocation allocation_of(u64 address);       // that is live and contains the address

/* ---- Programs. A register is an array of 32 lanes, so that an instruction's loop over them
   becomes vector instructions of the CPU. Registers of 16 bits are kept in 32, zero-extended;
   predicates are 0 or ~0. */

struct Warp;
struct Inst;
typedef void (*Run)(Warp &, const Inst &);
// How an instruction ends: PLAIN ones go on; the last three need other lanes, too.
enum Kind : uint8_t { PLAIN, BRANCH, RETURN, BARRIER, COLLECTIVE, SHUFFLE };
enum Space : uint8_t { NO_SPACE, GLOBAL, SHARED, LOCAL, PARAM };
// What instructions are counted as
enum Class : uint8_t {
    FMA,
    FLOAT,
    MMA,
    LDMATRIX,
    LD_SHARED,
    ST_SHARED,
    CP_ASYNC,
    LD_GLOBAL,
    ST_GLOBAL,
    PARAM_LOCAL,
    INTEGER,
    CONVERT,
    MOVE,
    CONTROL,
    CLASSES
};

struct Inst {
    Run run;
    u32 o[14];          // operands: where their registers begin in a warp's registers, in bytes
    s64 offset;         // of an address
    s32 guard, target;  // a predicate's register or -1; the instruction that a branch goes to
    u32 count;          // of a vector's elements
    uint8_t bytes;      // of an element in memory
    uint8_t wide;       // bytes of an element's register
    uint8_t address;    // bytes of the address's register; 0: there is none
    bool negated, sign; // the guard; a load extends the sign, or ldmatrix transposes
    bool read;
    Kind kind;
    Space space;
    Class of;
    int line, number; // of cnn_kernels.cu; in the kernel
    std::string text;
};

struct Counts { // of an instruction
    u64 warps, lanes;
    u64 parts, requests; // sectors of 32 bytes of requests, or passes over the banks and the least
};

struct Kernel {
    std::string name;              // as in the source
    std::string head, body;        // its text
    const std::vector<int> *files; // those numbers of .loc that are cnn_kernels.cu
    std::vector<Inst> code;
    std::vector<std::pair<u32, u32>> params;      // offset and bytes of each
    u32 param_bytes, shared, local, dynamic_at;   // bytes; where dynamic shared memory begins
    u32 max_threads;                              // of .maxntid, or 0
    u32 register_bytes;                           // of a warp
    std::map<std::pair<u64, u32>, u32> constants; // bits, bytes of a register: where it is
    std::map<std::string, u32> specials;          // %tid.x and the like: where they are
    std::vector<Counts> counts;
    u64 launches, blocks;
};
void load_module(const std::string &text);
void parse_kernel(Kernel *);
[[noreturn]] void refuse(const Kernel &, const std::string &what); // ends the program
extern std::map<std::string, Kernel> kernels;                      // by their mangled names

struct Launch {
    u32 grid[3], block[3], dynamic_shared;
    std::vector<char> params;
};
void run_kernel(Kernel *, const Launch &); // throws Fault
void print_statistics(void);

/* ---- Warps and blocks */

struct Pending { // a cp.async that has not been waited for
    u64 from;
    u32 to, bytes, size, lane, group;
};
struct Group { // lanes with the same program counter
    int pc;
    u32 lanes;
    bool parked; // at an instruction that needs the other lanes, too
};
struct Block;
struct Warp {
    char *registers;
    u32 mask;      // the lanes that execute this instruction
    u32 live, all; // lanes that have not ended; at the beginning
    int index;
    Block *block;
    Group groups[WARP + 1];
    int group_count;
    u32 committed[WARP]; // groups of cp.async
    std::vector<Pending> pending;
    template <class T> T *reg(u32 at) const {
        return (T *)(registers + at);
    }
    bool active(int lane) const {
        return mask >> lane & 1;
    }
    int taking_part(int lane) const { // or another lane, with whose address this one computes
        return active(lane) ? lane : __builtin_ctz(mask);
    }
};

struct Access { // as bits of one number; barriers separate epochs
    u64 bytes : 4, thread : 11, epoch : 17, block : 20, launch : 12;
};
enum { LAST_LAUNCH = (1 << 12) - 1, MANY_BLOCKS = (1 << 20) - 1 };
enum { IN_FLIGHT = (1 << 11) - 1, SEVERAL = IN_FLIGHT - 1 }; // in place of a thread
struct Record {                                              // of 4 bytes
    Access written, read;                                    // the last ones
};
extern Record *records; // of all device addresses
extern u32 launch_number;

struct Block {
    Kernel *kernel = nullptr;
    const Launch *launch = nullptr;
    u32 id[3], threads = 0, shared_bytes = 0;
    std::vector<char> shared, local, registers;
    std::vector<Record> records; // of shared memory
    Access now;                  // what all accesses have in common
    std::vector<Warp> warps;
    std::vector<Counts> counts;
    Allocation seen[256]; // by instruction, since looking for one takes time
};

inline int first(u32 mask) {
    return __builtin_ctz(mask);
}
[[noreturn]] void fault(const Warp &, const Inst &, int lane, int code, const char *form, ...)
    __attribute__((format(printf, 5, 6)));
extern const bool counting; // of memory's parts: slower

/* ---- Instructions. The letters of `operands`: registers of 4 or 8 bytes or, p, a predicate; @ an
   address; * a register of 8 bytes in brackets; b the bytes of a copy, n a number, l a label. */
struct Operation {
    Run run;
    std::string operands;
    Class of;
    Kind kind = PLAIN;
};
const Operation *find_operation(const std::string &name); // NULL: it is not known
typedef void Instruction(Warp &, const Inst &);
Instruction unknown, load, store, atomic_add, cp_async, cp_async_commit, cp_async_wait;
// For ldmatrix: the addresses, after all checks
void matrix_rows(Warp &, const Inst &, u64 *rows);
void read_matrix_word(Warp &, const Inst &, int lane, u64 at, bool by_two);
void new_launch(void); // of whose accesses to global memory races are looked for
