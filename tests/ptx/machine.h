// What all families of opcodes are written in: rows of 32 lanes, instructions, warps, blocks.
//
// Sections and tables are those of NVIDIA's "Parallel Thread Execution ISA", version 8.7. What the
// manual leaves undefined is a fault here, unless a comment says otherwise.
#pragma once
#include <array>
#include <bitset>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef double f64;

constexpr u32 ALL = 0xffffffffu;

[[noreturn]] inline void fault(const char* format, ...) {
    char text[400];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    throw std::runtime_error(text);
}

// An operand is a row of 32 values: a register, a special register or a constant.
struct Operand {
    s64 row, bits, offset;  // bits of the register, 1 for a predicate, 0 for a constant; of an address
};

struct Warp;
struct Inst;

enum Kind { PLAIN, BRANCH, EXIT, MEETING, BARRIER };

struct Opcode {
    const char* name;
    void (*run)(Warp&, const Inst&, u32 lanes);
    // of each operand, 0 for any; negative: a register may be wider than the type (tables of 9.4.1).
    // Empty: run looks at the operands itself.
    std::vector<int> bits;
    Kind kind = PLAIN;
    u32 (*members)(Warp&, const Inst&, u32 lanes) = nullptr;  // who must meet here
};

struct Inst {
    const Opcode* op;
    s64 guard;  // row, or -1
    bool negated;
    s64 target;
    std::vector<Operand> at;
};

struct Copy {  // a cp.async that has not landed
    u64 group;
    u32 to, size, given;
    const u8* from;
};

struct Product {  // a wgmma that has not been waited for (warpgroups.h)
    std::vector<s64> accumulators, registers;  // rows; of the left operand, where it is in registers
    u64 left, right;                           // descriptors
    bool add, transposed;
    f64 factor;  // 1 or -1
    u64 group;
};

struct Range {
    u64 begin, end;
};

struct Launch {
    u32 grid[3], threads, shared_bytes;
    const u8* parameters;
    std::vector<Range> cells;   // of parameters, one each
    std::vector<Range> memory;  // that the kernel was given, one for each array
    size_t last = 0;            // the range that the last access was in
    bool early;                 // cp.async lands at once
};

struct Meeting {  // of warps at a barrier, until all have come
    u64 threads = 0;  // that are to come
    std::bitset<32> come;  // warps
};

struct Block {
    Launch* launch;
    u32 index[3];
    std::vector<u8> shared;
    // Of each 16 bytes of shared memory: 1 + the thread that has written there, until it has passed a
    // fence for what products read.
    std::vector<u32> unfenced;
    std::vector<std::vector<std::array<u64, 3>>> asked;  // of each warpgroup: products in their order
    Meeting meetings[16];                                // at each barrier
};

struct Group {  // lanes that are at the same place
    s64 pc;
    u32 lanes;
    bool parked;  // they wait for other lanes
};

struct Warp {
    Block* block;
    u32 index;
    std::vector<u64> file;
    std::vector<Group> groups;
    u32 live;
    s64 pc;       // of the instruction that runs
    int barrier;  // that the warp waits at, or -1
    std::vector<Copy> copies[32];
    u64 committed[32];
    std::vector<Product> products;
    u64 product_groups, asked;
    std::map<s64, std::array<u64, 32>> flying;  // accumulators of products, by row
    std::vector<u64> fenced;                    // the registers at the last wgmma.fence

    u64* row(const Operand& operand) { return &file[operand.row * 32]; }
};

inline void written(Warp& warp, u64 address, u64 bytes, int lane) {
    for (u64 i = address / 16; i <= (address + bytes - 1) / 16; ++i)
        warp.block->unfenced[i] = warp.index * 32 + lane + 1;
}

// ---- values in rows --------------------------------------------------------------------------

template <class T> inline T get(u64 bits) {
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
template <> inline bool get<bool>(u64 bits) { return bits & 1; }

template <class T> inline u64 put(T value) {
    u64 bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}
template <> inline u64 put<bool>(bool value) { return value; }

template <class T> constexpr int BITS = sizeof(T) * 8;
template <> constexpr int BITS<bool> = 1;

template <class F> inline void each(u32 lanes, F f) {
    if (lanes == ALL)
        for (int lane = 0; lane < 32; ++lane) f(lane);
    else
        for (int lane = 0; lane < 32; ++lane)
            if (lanes >> lane & 1) f(lane);
}

// An opcode whose lanes do not see each other: d = f(a, b, ...), with the types that f declares.
template <auto F, class D, class... A, size_t... I>
void run_lanes(Warp& warp, const Inst& inst, u32 lanes, D (*)(A...), std::index_sequence<I...>) {
    u64* const d = warp.row(inst.at[0]);
    u64* const from[] = {warp.row(inst.at[I + 1])...};
    each(lanes, [&](int lane) { d[lane] = put<D>(F(get<A>(from[I][lane])...)); });
}

template <auto F, class D, class... A> Opcode make(const char* name, D (*)(A...)) {
    auto run = [](Warp& warp, const Inst& inst, u32 lanes) {
        run_lanes<F>(warp, inst, lanes, (D(*)(A...)) nullptr, std::index_sequence_for<A...>());
    };
    return {name, run, {BITS<D>, BITS<A>...}};
}

template <auto F> Opcode op(const char* name) { return make<F>(name, +F); }

typedef std::vector<Opcode> Family;
