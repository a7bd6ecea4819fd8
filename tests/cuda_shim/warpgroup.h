// wgmma on the processor: the second body of the primitives in accel/cuda/warpgroup.cuh.
//
// A product is asked for by a whole warp and read from shared memory at once (`early`) or at the wait
// that covers it (`late`). What makes mistakes visible:
//
//   - accumulators are NaN from issue to wait, and what a kernel writes to them then is lost;
//   - a left operand in registers must be as it was until the wait;
//   - a product without wgmma_fence() since the last wait is an error, as is the end of a thread with
//     products that nobody waited for;
//   - shared memory that cp.async has filled may be read only once the thread that asked for the copy
//     has passed fence_async() (barriers between the two are seen as everywhere: as NaN);
//   - descriptors are decoded, bit by bit, and must be the same in all lanes.
//
// Each warp's 16 rows are computed on their own: on a GPU too, one warp may be done before another.
#pragma once
#include <map>

namespace shim {

struct Product {
    int n;                    // columns of D
    bool by_rows;             // of B: it is 16 rows of n columns; else n rows of 16 columns
    bool add;                 // to what D holds
    uint64_t a, b;            // descriptors; a is 0 where A is in registers
    uint32_t left[32][4];     // A's registers, as they were at the issue
    const uint32_t* left_at[32];
    float* d[32];
};

struct Sums {
    int flying = 0;  // products that are not waited for
    std::vector<float> lanes[32];
};

struct Products {
    bool fenced = false;
    std::vector<Product> open;
    std::vector<std::vector<Product>> groups;
    std::map<float*, Sums> sums;  // by lane 0's accumulators
};

// of each warp of the block that runs
inline Products& products() {
    static uint64_t block = 0;
    static std::vector<Products> all;
    if (block != blocks_run) all.assign(block_size / 32, Products()), block = blocks_run;
    return all[current->index / 32];
}

inline int& flying() { return products_flying[current->index / 32]; }

inline uint32_t swizzled(uint64_t descriptor, uint32_t offset) {
    if (descriptor >> 62 != 1) fail("wgmma: the descriptor names another swizzle than 128 bytes");
    if (descriptor >> 49 & 7) fail("wgmma: the descriptor has a base offset");
    const uint32_t plain = ((uint32_t)(descriptor & 0x3fff) << 4) + offset;
    const uint32_t address = plain ^ ((plain >> 7 & 7) << 4);
    in_shared(address, 2, "wgmma");
    return address;
}

inline uint16_t read_swizzled(uint64_t descriptor, uint32_t offset) {
    const uint32_t address = swizzled(descriptor, offset);
    if (const uint32_t thread = unfenced[address / 16])
        fail("wgmma reads shared address %u, which thread %u has filled without fence_async()", address,
             thread - 1);
    uint16_t x;
    memcpy(&x, shared + address, 2);
    return x;
}

// Where element (row, k) of an operand of rows of 16 columns is, or (column, k) of one of 16 rows.
inline uint32_t offset_of(uint64_t descriptor, bool by_rows, int row, int k) {
    const uint32_t panels = (uint32_t)(descriptor >> 16 & 0x3fff) << 4;
    const uint32_t eights = (uint32_t)(descriptor >> 32 & 0x3fff) << 4;
    return by_rows ? row / 64 * panels + k / 8 * eights + k % 8 * 128 + row % 64 * 2
                   : row / 8 * eights + row % 8 * 128 + k * 2;
}

inline float element(uint64_t descriptor, bool by_rows, int row, int k) {
    const uint32_t offset = offset_of(descriptor, by_rows, row, k);
    return bits_to_float((uint32_t)read_swizzled(descriptor, offset) << 16);
}

// Call f with the shared address of each 16 bytes that a product reads for this warp.
template <class F> void each_chunk(const Product& product, F f) {
    const int first = (int)(current->index / 32 % 4) * 16;
    for (int row = 0; product.a && row < 16; ++row)
        for (int k = 0; k < 16; k += 8)
            f(swizzled(product.a, offset_of(product.a, false, first + row, k)));
    const int columns = product.by_rows ? 8 : 1, rows = product.by_rows ? 1 : 8;
    for (int n = 0; n < product.n; n += columns)
        for (int k = 0; k < 16; k += rows)
            f(swizzled(product.b, offset_of(product.b, product.by_rows, n, k)));
}

// From issue to wait a product's operands and accumulators are its own (races.h).
inline void watch_product(const Product& product) {
    each_chunk(product, watch_product_reads);
    for (unsigned lane = 0; lane < 32; ++lane) {
        const unsigned thread = current->index / 32 * 32 + lane;
        watch_registers(thread, product.d[lane], product.n / 2 * 4, true);
        if (!product.a) watch_registers(thread, product.left_at[lane], 16, false);
    }
}

inline void watch_product_done(const Product& product) {
    each_chunk(product, watch_product_has_read);
    for (unsigned lane = 0; lane < 32; ++lane) {
        const unsigned thread = current->index / 32 * 32 + lane;
        watch_registers_free(thread, product.d[lane]);
        if (!product.a) watch_registers_free(thread, product.left_at[lane]);
    }
}

inline void multiply(const Product& product, Sums& sums) {
    float A[16][16], B[16];
    const int first = (int)(current->index / 32 % 4) * 16;
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i % 2 * 8, column = lane % 4 * 2 + i / 2 * 8;
            for (int e = 0; e < 2; ++e)
                A[row][column + e] =
                    product.a ? element(product.a, false, first + row, column + e)
                              : bits_to_float((product.left[lane][i] >> 16 * e) << 16);
        }
    for (int n = 0; n < product.n; ++n) {
        for (int k = 0; k < 16; ++k) B[k] = element(product.b, product.by_rows, n, k);
        for (int row = 0; row < 16; ++row) {
            float& sum = sums.lanes[row % 8 * 4 + n % 8 / 2][n / 8 * 4 + row / 8 * 2 + n % 2];
            float total = 0.0f;
            for (int k = 0; k < 16; ++k) total += A[row][k] * B[k];
            sum = product.add ? sum + total : total;
        }
    }
}

inline void complete(Products& all, const Product& product) {
    Sums& sums = all.sums[product.d[0]];
    if (!early_copies) multiply(product, sums);
    if (RACES) watch_product_done(product);
    for (int lane = 0; lane < 32 && !product.a; ++lane)
        if (memcmp(product.left_at[lane], product.left[lane], 16))
            fail("wgmma: a left operand's registers changed before the product was waited for");
    if (--sums.flying == 0) {
        for (int lane = 0; lane < 32; ++lane)
            memcpy(product.d[lane], sums.lanes[lane].data(), product.n / 2 * 4);
        all.sums.erase(product.d[0]);
    }
}

struct Issue {
    uint64_t a, b;
    const uint32_t* left;
    bool add;
};

template <int N> void issue(float (&d)[N][4], const Issue& given, bool by_rows) {
    collective(300 + 2 * N + by_rows, &given, d, [by_rows](Warp& warp) {
        Products& all = products();
        if (!all.fenced) fail("wgmma without wgmma_fence() since the last wait");
        const Issue& first = *(const Issue*)warp.in[0];
        Product product{8 * N, by_rows, first.add, first.a, first.b, {}, {}, {}};
        for (int lane = 0; lane < 32; ++lane) {
            const Issue& own = *(const Issue*)warp.in[lane];
            if (own.a != first.a || own.b != first.b || own.add != first.add)
                fail("wgmma: lanes of a warp give different descriptors");
            product.d[lane] = (float*)warp.out[lane];
            product.left_at[lane] = own.left;
            if (own.left) memcpy(product.left[lane], own.left, 16);
        }
        Sums& sums = all.sums[product.d[0]];
        for (int lane = 0; lane < 32; ++lane) {
            if (!sums.flying) sums.lanes[lane].assign(product.d[lane], product.d[lane] + 4 * N);
            memset((void*)product.d[lane], 0xff, 16 * N);
        }
        ++sums.flying;
        if (early_copies) multiply(product, sums);
        if (RACES) watch_product(product);
        all.open.push_back(product);
    });
}

// Each lane calls; the last one does it for the warp.
template <class F> void of_the_warp(int op, F act) {
    collective(op, nullptr, nullptr, [&](Warp&) { act(products()); });
}

}  // namespace shim

template <int THREADS> inline void barrier_wait(u32 barrier) {
    shim::come_to_some(barrier, THREADS, true);
}

template <int THREADS> inline void barrier_arrive(u32 barrier) {
    shim::come_to_some(barrier, THREADS, false);
}

inline void fence_async() { shim::fence_own_copies(); }

inline void wgmma_fence() {
    shim::of_the_warp(290, [](shim::Products& all) { all.fenced = true; });
}

inline void wgmma_commit() {
    shim::of_the_warp(291, [](shim::Products& all) {
        all.groups.push_back(std::move(all.open));
        all.open.clear();
        ++shim::flying();
    });
}

template <int STILL_FLYING> inline void wgmma_wait() {
    shim::of_the_warp(292 + STILL_FLYING, [](shim::Products& all) {
        if (!all.open.empty()) shim::fail("wgmma: products that are not committed are waited for");
        while (all.groups.size() > STILL_FLYING) {
            for (const shim::Product& product : all.groups.front()) shim::complete(all, product);
            all.groups.erase(all.groups.begin());
            --shim::flying();
        }
        all.fenced = false;
    });
}

template <int N> inline void wgmma_rows(float (&d)[N][4], u64 a, u64 b, bool add) {
    shim::issue(d, shim::Issue{a, b, nullptr, add}, false);
}

template <int N> inline void wgmma_columns(float (&d)[N][4], const u32 (&a)[4], u64 b) {
    shim::issue(d, shim::Issue{0, b, a, true}, true);
}
