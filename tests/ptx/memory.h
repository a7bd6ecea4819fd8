// Memory: moves, loads, stores and asynchronous copies of section 9.7.9, with bounds and alignment.
//
// Parameters lie in memory as the driver puts them there; each is a cell that no load may leave.
// Global memory is that of the arrays that the launch was given, and nothing between them. Shared
// memory starts at address 0 of its own space. An address must be a multiple of the bytes that are
// moved (6.4.1), or the behaviour is undefined.
#pragma once
#include "machine.h"

enum Space { PARAM, GLOBAL, SHARED };

inline const char* space_name(Space space) {
    return space == PARAM ? "parameter" : space == GLOBAL ? "global" : "shared";
}

inline u64 address_of(Warp& warp, const Operand& operand, int lane) {
    const u64 sum = warp.row(operand)[lane] + operand.offset;
    return operand.bits == 32 ? (u32)sum : sum;
}

inline const Range* range_of(const std::vector<Range>& ranges, u64 address, u64 bytes) {
    for (const Range& range : ranges)
        if (address >= range.begin && address + bytes <= range.end) return &range;
    return nullptr;
}

// Where `bytes` bytes of a space are in this process.
inline u8* place(Warp& warp, Space space, u64 address, u64 bytes) {
    Launch& launch = *warp.block->launch;
    if (address % bytes)
        fault("%s address %#llx is no multiple of %llu", space_name(space),
              (unsigned long long)address, (unsigned long long)bytes);
    if (space == SHARED) {
        if (address + bytes > launch.shared_bytes || address + bytes < address)
            fault("shared address %lld: %lld bytes there are beyond the block's %u",
                  (long long)address, (long long)bytes, launch.shared_bytes);
        return warp.block->shared.data() + address;
    }
    if (space == PARAM) {
        if (!range_of(launch.cells, address, bytes))
            fault("%lld bytes at parameter offset %lld are not of one parameter", (long long)bytes,
                  (long long)address);
        return const_cast<u8*>(launch.parameters) + address;
    }
    if (launch.last < launch.memory.size()) {
        const Range& range = launch.memory[launch.last];
        if (address >= range.begin && address + bytes <= range.end) return (u8*)address;
    }
    const Range* range = range_of(launch.memory, address, bytes);
    if (!range)
        fault("global address %#llx: %lld bytes there are of no array that the kernel was given",
              (unsigned long long)address, (long long)bytes);
    launch.last = range - launch.memory.data();
    return (u8*)address;
}

// 9.7.9.8: ld. Tables of 9.4.1: a signed type is extended with its sign to the register's width, others
// with zeros. N > 1 is .vN, which must be aligned as a whole.
template <Space SPACE, class T, int N> void load(Warp& warp, const Inst& inst, u32 lanes) {
    each(lanes, [&](int lane) {
        const u8* from =
            place(warp, SPACE, address_of(warp, inst.at[N], lane), sizeof(T) * N);
        for (int i = 0; i < N; ++i) {
            T value;
            memcpy(&value, from + i * sizeof(T), sizeof value);
            const Operand& to = inst.at[i];
            u64 bits = put(value);
            if constexpr (std::is_integral_v<T> && std::is_signed_v<T>)
                if (to.bits > BITS<T>) {
                    bits = (u64)(s64)value;
                    if (to.bits < 64) bits &= (1ull << to.bits) - 1;
                }
            warp.row(to)[lane] = bits;
        }
    });
}

// 9.7.9.11: st, of the low bits of a wider register.
template <Space SPACE, class T, int N> void store(Warp& warp, const Inst& inst, u32 lanes) {
    each(lanes, [&](int lane) {
        const u64 address = address_of(warp, inst.at[0], lane);
        u8* to = place(warp, SPACE, address, sizeof(T) * N);
        if (SPACE == SHARED) written(warp, address, sizeof(T) * N, lane);
        for (int i = 0; i < N; ++i)
            memcpy(to + i * sizeof(T), &warp.row(inst.at[1 + i])[lane], sizeof(T));
    });
}

// 9.7.9.15: prefetch, which changes nothing; of what no array holds it would be of no use.
inline void prefetch(Warp& warp, const Inst& inst, u32 lanes) {
    each(lanes, [&](int lane) { place(warp, GLOBAL, address_of(warp, inst.at[0], lane), 1); });
}

// ---- asynchronous copies: 9.7.9.25.3 -----------------------------------------------------------

inline void land(Warp& warp, int lane, const Copy& copy) {
    u8* const to = warp.block->shared.data() + copy.to;
    memcpy(to, copy.from, copy.given);
    memset(to + copy.given, 0, copy.size - copy.given);  // the rest is filled with zeros
    written(warp, copy.to, copy.size, lane);
}

// cp.async [dst], [src], cp-size, src-size. Lands at once or at the wait that covers it: between the two
// a GPU is free to choose. More than cp-size is undefined; .cg has 16 bytes alone.
template <int LARGEST> void copy_async(Warp& warp, const Inst& inst, u32 lanes) {
    each(lanes, [&](int lane) {
        const u64 size = warp.row(inst.at[2])[lane];
        const u64 given = inst.at.size() > 3 ? (u32)warp.row(inst.at[3])[lane] : size;
        if (size != 16 && (LARGEST == 16 || (size != 4 && size != 8)))
            fault("cp.async of %llu bytes", (unsigned long long)size);
        if (given > size) fault("cp.async of %llu bytes has %llu in its source",
                                (unsigned long long)size, (unsigned long long)given);
        const u64 to = address_of(warp, inst.at[0], lane), from = address_of(warp, inst.at[1], lane);
        place(warp, SHARED, to, size);
        if (from % size) fault("global address %#llx is no multiple of %llu",
                               (unsigned long long)from, (unsigned long long)size);
        if (given && !range_of(warp.block->launch->memory, from, given))
            fault("global address %#llx: %llu bytes there are of no array that the kernel was given",
                  (unsigned long long)from, (unsigned long long)given);
        const Copy copy{warp.committed[lane], (u32)to, (u32)size, (u32)given, (const u8*)from};
        if (warp.block->launch->early) land(warp, lane, copy);
        else warp.copies[lane].push_back(copy);
    });
}

inline void copy_commit(Warp& warp, const Inst&, u32 lanes) {
    each(lanes, [&](int lane) { ++warp.committed[lane]; });
}

// All of a thread's groups land but the last `pending` that it has committed.
inline void land_groups(Warp& warp, int lane, u64 pending) {
    auto& copies = warp.copies[lane];
    size_t n = 0;
    for (; n < copies.size() && copies[n].group + pending < warp.committed[lane]; ++n)
        land(warp, lane, copies[n]);
    copies.erase(copies.begin(), copies.begin() + n);
}

inline void copy_wait(Warp& warp, const Inst& inst, u32 lanes) {
    each(lanes, [&](int lane) { land_groups(warp, lane, warp.row(inst.at[0])[lane]); });
}

inline void copy_wait_all(Warp& warp, const Inst& inst, u32 lanes) {
    copy_commit(warp, inst, lanes);
    each(lanes, [&](int lane) { land_groups(warp, lane, 0); });
}

template <Space SPACE, class T> void accesses(Family& all, const char* const (&names)[6]) {
    constexpr int B = -BITS<T>;
    all.push_back({names[0], load<SPACE, T, 1>, {B, 0}});
    all.push_back({names[1], load<SPACE, T, 2>, {B, B, 0}});
    all.push_back({names[2], load<SPACE, T, 4>, {B, B, B, B, 0}});
    if (SPACE == PARAM) return;
    all.push_back({names[3], store<SPACE, T, 1>, {0, B}});
    all.push_back({names[4], store<SPACE, T, 2>, {0, B, B}});
    all.push_back({names[5], store<SPACE, T, 4>, {0, B, B, B, B}});
}

#define SPACE_ACCESSES(SPACE, space, T, type)                                                     \
    accesses<SPACE, T>(all, {"ld." space "." type, "ld." space ".v2." type,                      \
                             "ld." space ".v4." type, "st." space "." type,                      \
                             "st." space ".v2." type, "st." space ".v4." type})
#define ALL_ACCESSES(T, type)                      \
    SPACE_ACCESSES(PARAM, "param", T, type);   \
    SPACE_ACCESSES(GLOBAL, "global", T, type); \
    SPACE_ACCESSES(SHARED, "shared", T, type)

inline Family memory() {
    Family all;
    ALL_ACCESSES(u8, "u8");
    ALL_ACCESSES(s8, "s8");
    ALL_ACCESSES(u16, "u16");
    ALL_ACCESSES(s16, "s16");
    ALL_ACCESSES(u16, "b16");
    ALL_ACCESSES(u32, "u32");
    ALL_ACCESSES(s32, "s32");
    ALL_ACCESSES(u32, "b32");
    ALL_ACCESSES(f32, "f32");
    ALL_ACCESSES(u64, "u64");
    ALL_ACCESSES(s64, "s64");
    ALL_ACCESSES(u64, "b64");
    ALL_ACCESSES(f64, "f64");
    all.push_back({"prefetch.global.L2", prefetch, {}});
    all.push_back({"cp.async.cg.shared.global", copy_async<16>, {}});
    all.push_back({"cp.async.ca.shared.global", copy_async<4>, {}});
    all.push_back({"cp.async.commit_group", copy_commit, {}});
    all.push_back({"cp.async.wait_group", copy_wait, {0}});
    all.push_back({"cp.async.wait_all", copy_wait_all, {}});

    // 9.7.9.3: mov, of a register, a constant or the address of a variable in its space
    all.push_back(op<[](bool a) { return a; }>("mov.pred"));
    for (const char* name : {"mov.b16", "mov.u16", "mov.s16"})
        all.push_back(op<[](u16 a) { return a; }>(name));
    for (const char* name : {"mov.b32", "mov.u32", "mov.s32", "mov.f32"})
        all.push_back(op<[](u32 a) { return a; }>(name));
    for (const char* name : {"mov.b64", "mov.u64", "mov.s64", "mov.f64"})
        all.push_back(op<[](u64 a) { return a; }>(name));
    // 9.7.9.20: a generic address of global memory is the address there
    all.push_back(op<[](u64 a) { return a; }>("cvta.to.global.u64"));
    all.push_back(op<[](u64 a) { return a; }>("cvta.global.u64"));
    // one of shared memory is an address in a window of its own
    constexpr u64 WINDOW = 0x7000000001000000;
    all.push_back(op<[](u64 a) { return a + WINDOW; }>("cvta.shared.u64"));
    all.push_back(op<[](u64 a) { return a - WINDOW; }>("cvta.to.shared.u64"));
    // 9.7.9.21: cvt between integers takes the low bits, or extends by the type of the source; of a
    // source register that is wider than its type the low bits count
    for (Opcode opcode : {op<[](u64 a) -> u32 { return (u32)a; }>("cvt.u32.u64"),
                          op<[](u32 a) -> u64 { return a; }>("cvt.u64.u32"),
                          op<[](s32 a) -> s64 { return a; }>("cvt.s64.s32"),
                          op<[](u32 a) -> u16 { return (u16)a; }>("cvt.u16.u32"),
                          op<[](u16 a) -> u32 { return a; }>("cvt.u32.u16"),
                          op<[](s16 a) -> s32 { return a; }>("cvt.s32.s16"),
                          op<[](u64 a) -> u16 { return (u16)a; }>("cvt.u16.u64"),
                          op<[](u16 a) -> u64 { return a; }>("cvt.u64.u16"),
                          op<[](s16 a) -> s64 { return a; }>("cvt.s64.s16")}) {
        opcode.bits[1] *= -1;
        all.push_back(opcode);
    }
    return all;
}
