// Products of a warpgroup (wgmma, sm_90a): section 9.7.15, with what they ask of fences and waits.
//
// A warp holds its own 16 of the 64 rows, so each warp's part is computed by itself, for all four of a
// warpgroup must give the same descriptors. A product reads its operands at once (early) or at the wait
// that covers it (late), and between the two a GPU is free to choose. Its accumulators are NaN from
// issue to wait.
#pragma once
#include <algorithm>
#include <map>

#include "meetings.h"

constexpr u64 FLYING = 0x7fffffff;  // a NaN, of accumulators that have not been waited for

// 9.7.15.5.1.2.2, the table of the descriptor's fields, each but the last in units of 16 bytes.
struct Descriptor {
    u64 start, leading, stride;
    explicit Descriptor(u64 bits)
        : start((bits & 0x3fff) << 4), leading((bits >> 16 & 0x3fff) << 4),
          stride((bits >> 32 & 0x3fff) << 4) {
        if (bits >> 62 != 1) fault("a matrix descriptor with swizzling mode %d, not 128 bytes", (int)(bits >> 62));
        if (bits >> 49 & 7) fault("a matrix descriptor with a base offset");
    }
    // 9.7.15.5.1.2.1.3, canonical layouts of 128-byte swizzling, T = 8 elements: K-major
    // ((8,m),(T,2k)):((8T,SBO),(1,T)), MN-major ((T,8,m),(8,k)):((1,T,LBO),(8T,SBO)); Swizzle<3,4,3>
    // puts bits 7-9 of the address over bits 4-6.
    u64 address(int mn, int k, bool mn_major) const {
        const u64 at = start + (mn_major ? mn % 64 * 2 + mn / 64 * leading + k % 8 * 128 + k / 8 * stride
                                         : mn % 8 * 128 + mn / 8 * stride + k * 2);
        return at ^ (at >> 7 & 7) << 4;
    }
};

// What the asynchronous proxy reads: bytes that a thread has written and not yet shown it by
// fence.proxy.async are a fault (9.7.13.4, and 8.7 on proxies).
inline f32 read_bf16(Warp& warp, u64 address) {
    u16 bits;
    memcpy(&bits, place(warp, SHARED, address, 2), 2);
    if (const u32 thread = warp.block->unfenced[address / 16])
        fault("a product reads shared address %lld, which thread %u has written without a "
              "fence.proxy.async", (long long)address, thread - 1);
    return bf16(bits, 0);
}

// D (16 × N of this warp) = A (16 × 16) B (16 × N) or that + D, in the fragments of 9.7.15.5.1.1.1, which
// are mma's.
inline void multiply(Warp& warp, const Product& product) {
    const int N = product.accumulators.size() * 2;
    f64 a[16][16];
    if (product.registers.empty()) {
        const Descriptor left(product.left);
        for (int row = 0; row < 16; ++row)
            for (int k = 0; k < 16; ++k)
                a[row][k] = read_bf16(warp, left.address(warp.index % 4 * 16 + row, k, false));
    } else {
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 8; ++i) {
                const int row = lane / 4 + (i / 2 % 2 ? 8 : 0), k = lane % 4 * 2 + i % 2 + (i >= 4 ? 8 : 0);
                a[row][k] = bf16(warp.file[product.registers[i / 2] * 32 + lane], i % 2);
            }
    }
    const Descriptor right(product.right);
    for (int column = 0; column < N; ++column) {
        f64 b[16];
        for (int k = 0; k < 16; ++k) b[k] = read_bf16(warp, right.address(column, k, product.transposed));
        for (int row = 0; row < 16; ++row) {
            u64& d = warp.flying[product.accumulators[column / 8 * 4 + row / 8 * 2 + column % 2]]
                                [row % 8 * 4 + column % 8 / 2];
            f64 sum = product.add ? get<f32>(d) : 0.0;
            for (int k = 0; k < 16; ++k) sum += product.factor * a[row][k] * b[k];
            d = put((f32)sum);
        }
    }
}

// 9.7.15.5.2: wgmma.mma_async d, a-desc or {a}, b-desc, scale-d, imm-scale-a, imm-scale-b{, imm-trans-a},
// imm-trans-b.
template <int N> void mma_async(Warp& warp, const Inst& inst, u32) {
    const bool in_registers = inst.at.size() == N / 2 + 9;
    if (!in_registers && inst.at.size() != N / 2 + 7)
        fault("%s has %zu operands", inst.op->name, inst.at.size());
    const Operand* rest = &inst.at[N / 2];
    Product product{{}, {}, 0, 0, false, false, 1, warp.product_groups};
    for (int i = 0; i < N / 2; ++i) product.accumulators.push_back(inst.at[i].row);
    if (in_registers)
        for (int i = 0; i < 4; ++i) product.registers.push_back(rest[i].row);
    else
        product.left = warp.row(rest[0])[0];
    rest += in_registers ? 4 : 1;
    product.right = warp.row(rest[0])[0];
    product.add = warp.row(rest[1])[0] & 1;
    for (int i : {2, 3}) {
        const s32 factor = (s32)warp.row(rest[i])[0];
        if (factor != 1 && factor != -1) fault("a factor of wgmma is 1 or -1, not %d", factor);
        product.factor *= factor;
    }
    if (!in_registers && warp.row(rest[4])[0]) fault("a transposed A is not understood");
    product.transposed = warp.row(inst.at.back())[0];

    // one warp's are another's: "the same across all the warps in the warpgroup"
    auto& asked = warp.block->asked[warp.index / 4];
    const std::array<u64, 3> here{(u64)warp.pc, product.left, product.right};
    if (warp.asked < asked.size() && asked[warp.asked] != here)
        fault("warps of a warpgroup ask for different products");
    if (warp.asked++ == asked.size()) asked.push_back(here);

    // 9.7.15.7.1: registers may not have been written since the last wgmma.fence, but for accumulators
    // of products of the same shape that fly already
    auto fenced = [&](s64 row) {
        if (warp.fenced.empty() || memcmp(&warp.fenced[row * 32], &warp.file[row * 32], 256))
            fault("a register of %s has been written after the last wgmma.fence", inst.op->name);
    };
    for (s64 row : product.registers) fenced(row);
    for (s64 row : product.accumulators) {
        if (warp.flying.count(row)) continue;
        if (product.add) fenced(row);
        memcpy(warp.flying[row].data(), &warp.file[row * 32], 256);
        std::fill_n(&warp.file[row * 32], 32, FLYING);
    }
    if (warp.block->launch->early) multiply(warp, product);
    warp.products.push_back(std::move(product));
}

inline void products_fence(Warp& warp, const Inst&, u32) { warp.fenced = warp.file; }
inline void products_commit(Warp& warp, const Inst&, u32) { ++warp.product_groups; }

// 9.7.15.7.3: wgmma.wait_group N: all but the last N groups are complete, and their registers may be used.
inline void products_wait(Warp& warp, const Inst& inst, u32) {
    const u64 pending = warp.row(inst.at[0])[0];
    auto& products = warp.products;
    size_t n = 0;
    for (; n < products.size() && products[n].group + pending < warp.product_groups; ++n)
        if (!warp.block->launch->early) multiply(warp, products[n]);
    products.erase(products.begin(), products.begin() + n);
    for (auto at = warp.flying.begin(); at != warp.flying.end();) {
        const auto uses = [&](const Product& p) {
            return std::count(p.accumulators.begin(), p.accumulators.end(), at->first) > 0;
        };
        if (std::any_of(products.begin(), products.end(), uses)) {
            ++at;
            continue;
        }
        u64* row = &warp.file[at->first * 32];
        if (std::count(row, row + 32, FLYING) != 32)
            fault("an accumulator has been written before its product was waited for");
        memcpy(row, at->second.data(), 256);
        at = warp.flying.erase(at);
    }
}

// 9.7.13.4: fence.proxy.async: what these threads have written can be read by products.
inline void proxy_fence(Warp& warp, const Inst&, u32 lanes) {
    for (u32& thread : warp.block->unfenced)
        if (thread && (thread - 1) / 32 == warp.index && lanes >> (thread - 1) % 32 & 1) thread = 0;
}

inline Family warpgroups() {
    return {
        {"wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16", mma_async<32>, {}, MEETING, whole_warp},
        {"wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", mma_async<64>, {}, MEETING, whole_warp},
        {"wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", mma_async<128>, {}, MEETING, whole_warp},
        {"wgmma.fence.sync.aligned", products_fence, {}, MEETING, whole_warp},
        {"wgmma.commit_group.sync.aligned", products_commit, {}, MEETING, whole_warp},
        {"wgmma.wait_group.sync.aligned", products_wait, {0}, MEETING, whole_warp},
        {"fence.proxy.async.shared::cta", proxy_fence, {}},
    };
}
