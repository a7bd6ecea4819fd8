// What the lanes of a warp do together: barriers, shuffles, votes and matrices.
//
// Lanes that come first wait until the others have come to the same instruction. Where the manual wants
// the same qualifiers alone (shfl.sync), the same instruction is asked for here, which is stricter.
#pragma once
#include "floats.h"
#include "machine.h"
#include "memory.h"

// .aligned (9.7.14.5.14-15, 9.7.13.1): all threads of the warp, none of which may have ended.
inline u32 whole_warp(Warp& warp, const Inst& inst, u32) {
    if (warp.live != ALL) fault("%s after lanes of the warp have ended", inst.op->name);
    return ALL;
}

// 9.7.9.6, 9.7.13.2, 9.7.13.9: those that the member mask names and that have not ended. A thread that
// the mask does not name must not come.
inline u32 named(Warp& warp, const Inst& inst, u32 lanes) {
    if (!lanes) return 0;
    const u64* masks = warp.row(inst.at.back());
    const u32 mask = (u32)masks[__builtin_ctz(lanes)];
    each(lanes, [&](int lane) {
        if ((u32)masks[lane] != mask)
            fault("lanes meet at %s with the masks %08x and %08x", inst.op->name, mask,
                  (u32)masks[lane]);
    });
    if (lanes & ~mask)
        fault("lanes %08x are at %s, whose mask is %08x", lanes, inst.op->name, mask);
    return mask & warp.live;
}

// 9.7.9.6, semantics: shfl.sync d|p, a, b, c, membermask. A lane that does not take part gives nothing
// that is defined: reading from it is a fault.
enum Mode { UP, DOWN, BFLY, IDX };
template <Mode MODE> void shuffle(Warp& warp, const Inst& inst, u32 lanes) {
    const bool told = inst.at.size() == 6;
    const Operand* in = &inst.at[told ? 2 : 1];
    u64 source[32];
    memcpy(source, warp.row(in[0]), sizeof source);
    u64 result[32], in_range[32];
    each(lanes, [&](int lane) {
        const int b = warp.row(in[1])[lane] & 31, c = (int)(warp.row(in[2])[lane] & 0x1fff);
        const int clamp = c & 31, segment = c >> 8 & 31;
        const int most = (lane & segment) | (clamp & ~segment), least = lane & segment;
        int j = 0;
        bool inside = false;
        if (MODE == UP) j = lane - b, inside = j >= most;
        if (MODE == DOWN) j = lane + b, inside = j <= most;
        if (MODE == BFLY) j = lane ^ b, inside = j <= most;
        if (MODE == IDX) j = least | (b & ~segment), inside = j <= most;
        if (!inside) j = lane;
        if (!(lanes >> j & 1)) fault("shfl.sync: lane %d reads from lane %d, which is not there", lane, j);
        result[lane] = source[j];
        in_range[lane] = inside;
    });
    each(lanes, [&](int lane) {
        warp.row(inst.at[0])[lane] = result[lane];
        if (told) warp.row(inst.at[1])[lane] = in_range[lane];
    });
}

// 9.7.13.9: vote.sync.ballot.b32 d, p, membermask: bit i is lane i's predicate, 0 of who is not there.
inline void ballot(Warp& warp, const Inst& inst, u32 lanes) {
    u32 bits = 0;
    each(lanes, [&](int lane) { bits |= (u32)(warp.row(inst.at[1])[lane] & 1) << lane; });
    each(lanes, [&](int lane) { warp.row(inst.at[0])[lane] = bits; });
}

inline void nothing(Warp&, const Inst&, u32) {}

// 9.7.13.1: bar.sync a{, b}, bar.arrive a, b: come to barrier a of b threads, or of the whole block, and
// wait there until all have come (machine.cpp sees to it), or go on. All give one b, a multiple of the
// warp's size; arrive's is not left out. Our own rule: no warp comes twice before the barrier is over.
template <bool WAITS> void come_to_barrier(Warp& warp, const Inst& inst, u32) {
    const u64 id = (u32)warp.row(inst.at[0])[0];
    if (!WAITS && inst.at.size() < 2) fault("bar.arrive does not say of how many threads");
    const u64 threads =
        inst.at.size() > 1 ? (u32)warp.row(inst.at[1])[0] : warp.block->launch->threads;
    if (id > 15) fault("there are barriers 0 to 15, not %llu", (unsigned long long)id);
    if (!threads || threads % 32) fault("a barrier of %llu threads", (unsigned long long)threads);
    Meeting& meeting = warp.block->meetings[id];
    if (meeting.threads && meeting.threads != threads)
        fault("barrier %llu has %llu threads and %llu", (unsigned long long)id,
              (unsigned long long)meeting.threads, (unsigned long long)threads);
    if (meeting.come[warp.index])
        fault("a warp comes twice to barrier %llu before it is over", (unsigned long long)id);
    meeting.threads = threads;
    meeting.come[warp.index] = true;
    if (WAITS) warp.barrier = (int)id;
}

inline f32 bf16(u64 word, int half) { return get<f32>((word >> 16 * half & 0xffff) << 16); }

// 9.7.14.5.14, fragments of 9.7.14.5.8: D (16 × 8) = A (16 × 16) B (16 × 8) + C. Products and sums in
// double, rounded once: the order and the rounding of a GPU's sums are unspecified.
inline void mma_m16n8k16(Warp& warp, const Inst& inst, u32) {
    f64 a[16][16], b[16][8], d[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const int group = lane >> 2, thread = lane % 4;
        for (int i = 0; i < 8; ++i) {  // a0 ... a7, two to a register
            const int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
            const int column = thread * 2 + (i & 1) + (i >= 4 ? 8 : 0);
            a[row][column] = bf16(warp.row(inst.at[4 + i / 2])[lane], i % 2);
        }
        for (int i = 0; i < 4; ++i) {  // b0 ... b3
            const int row = thread * 2 + (i & 1) + (i >= 2 ? 8 : 0);
            b[row][group] = bf16(warp.row(inst.at[8 + i / 2])[lane], i % 2);
        }
        for (int i = 0; i < 4; ++i)  // c0 ... c3
            d[i < 2 ? group : group + 8][thread * 2 + (i & 1)] =
                get<f32>(warp.row(inst.at[10 + i])[lane]);
    }
    for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 16; ++k)
            for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i)
            warp.row(inst.at[i])[lane] =
                put((f32)d[i < 2 ? lane >> 2 : (lane >> 2) + 8][lane % 4 * 2 + (i & 1)]);
}

// 9.7.14.5.15: ldmatrix of N matrices of 8 × 8 elements of 16 bits. The table of addresses: lanes 8i ...
// 8i + 7 give the rows of matrix i. The figure of fragments: lane l has elements 2 (l % 4) and the next
// of row l / 4; with .trans the matrix is taken column-major, so they are rows of column l / 4.
template <int N, bool TRANSPOSED> void ldmatrix(Warp& warp, const Inst& inst, u32) {
    for (int m = 0; m < N; ++m) {
        u16 matrix[8][8];
        for (int row = 0; row < 8; ++row)
            memcpy(matrix[row], place(warp, SHARED, address_of(warp, inst.at[N], 8 * m + row), 16), 16);
        for (int lane = 0; lane < 32; ++lane) {
            const int i = lane / 4, j = lane % 4 * 2;
            const u32 low = TRANSPOSED ? matrix[j][i] : matrix[i][j];
            const u32 high = TRANSPOSED ? matrix[j + 1][i] : matrix[i][j + 1];
            warp.row(inst.at[m])[lane] = high << 16 | low;
        }
    }
}

inline Family meetings() {
    Family all = {
        {"shfl.sync.up.b32", shuffle<UP>, {}, MEETING, named},
        {"shfl.sync.down.b32", shuffle<DOWN>, {}, MEETING, named},
        {"shfl.sync.bfly.b32", shuffle<BFLY>, {}, MEETING, named},
        {"shfl.sync.idx.b32", shuffle<IDX>, {}, MEETING, named},
        {"vote.sync.ballot.b32", ballot, {32, 1, 32}, MEETING, named},
        {"bar.warp.sync", nothing, {32}, MEETING, named},
        // 9.7.13.1: bar.sync is barrier.sync.aligned, bar.arrive barrier.arrive.aligned
        {"bar.sync", come_to_barrier<true>, {}, BARRIER, whole_warp},
        {"bar.arrive", come_to_barrier<false>, {}, BARRIER, whole_warp},
        {"barrier.sync.aligned", come_to_barrier<true>, {}, BARRIER, whole_warp},
        {"barrier.arrive.aligned", come_to_barrier<false>, {}, BARRIER, whole_warp},
        {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", mma_m16n8k16,
         std::vector<int>(14, 32), MEETING, whole_warp},
        {"ldmatrix.sync.aligned.m8n8.x4.shared.b16", ldmatrix<4, false>, {32, 32, 32, 32, 0},
         MEETING, whole_warp},
        {"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", ldmatrix<4, true>, {32, 32, 32, 32, 0},
         MEETING, whole_warp},
        {"ldmatrix.sync.aligned.m8n8.x2.shared.b16", ldmatrix<2, false>, {32, 32, 0}, MEETING,
         whole_warp},
        {"ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16", ldmatrix<2, true>, {32, 32, 0},
         MEETING, whole_warp},
        // 9.7.12.3, 6, 7
        {"bra", nothing, {}, BRANCH},
        {"bra.uni", nothing, {}, BRANCH},
        {"ret", nothing, {}, EXIT},
        {"exit", nothing, {}, EXIT},
    };
    return all;
}
