// What every kernel is written in: types, 16-byte accesses, reductions, random bits, tensor cores.
//
// The primitives below have two bodies. Here is the GPU's, inline PTX. With MYLLM_SHIM defined the
// header shim.h brings the other, which runs on a processor. Kernels use these names and never
// CUDA's own, so the same source runs in both places. NVRTC compiles this text ahead of each kernel
// file; neither includes a header.
//
// BF16 says what an activation is: 1 makes `elem` a bfloat16 (its bits in an unsigned short), 0 a
// float. All arithmetic is in float.
#ifndef BF16
#define BF16 0
#endif

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void

#ifdef MYLLM_SHIM
#include "shim.h"
#else
#define INFINITY __int_as_float(0x7f800000)

// The dynamic shared memory of the block: kernels carve it themselves.
#define SHARED(name)                                           \
    extern __shared__ __align__(1024) unsigned char dynamic[]; \
    unsigned char* const name = dynamic

struct alignas(16) Pack16 {
    u32 w[4];
};

DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE u32 ballot(bool x) { return __ballot_sync(0xffffffffu, x); }
DEVICE int popcount(u32 x) { return __popc(x); }
DEVICE float bits_to_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 float_to_bits(float x) { return __float_as_uint(x); }
DEVICE Pack16 load16(const void* p) { return *(const Pack16*)p; }
DEVICE void store16(void* p, Pack16 pack) { *(Pack16*)p = pack; }
DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
DEVICE void store8(float* p, const float* v) { *(float2*)p = make_float2(v[0], v[1]); }
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE u16 to_bf16(float x) {
    u16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}

DEVICE u32 pack_bf16(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

DEVICE float exp2_fast(float x) {  // to 2 units in the last place; -inf gives 0
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

DEVICE float divide_fast(float a, float b) {  // to 2 units in the last place, for b up to 2¹²⁶
    return __fdividef(a, b);
}

// D (16×8) += A (16×16) B (16×8), of the whole warp. Lane 4g + t holds of A rows g, g + 8 and
// columns 2t, 2t + 1, 2t + 8, 2t + 9; of B column g; of D rows g, g + 8 and columns 2t, 2t + 1.
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8×8 matrices of 16-bit elements; lane 8i + r gives the address of row r of matrix i.
template <bool TRANSPOSED> DEVICE void ldmatrix(u32 (&r)[4], u32 address) {
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
}

// Copy 16 bytes into shared memory without waiting; zeros when not `valid`.
DEVICE void copy_async(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

// The same of 4 bytes, which need no wider alignment.
DEVICE void copy_async4(u32 to, const float* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
                 "r"(valid ? 4 : 0)
                 : "memory");
}

DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait for all committed groups of this thread but the last STILL_FLYING.
template <int STILL_FLYING> DEVICE void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(STILL_FLYING) : "memory");
}

// The value of the first lane, which the compiler then knows to be one for the warp.
DEVICE u32 uniform(u32 x) { return __shfl_sync(0xffffffffu, x, 0); }
#endif

// ---- one body from here on ------------------------------------------------------------------

DEVICE float from_bf16(u16 x) { return bits_to_float((u32)x << 16); }

DEVICE float widen(float x) { return x; }
DEVICE float widen(u16 x) { return from_bf16(x); }
DEVICE void put(float* p, float x) { *p = x; }
DEVICE void put(u16* p, float x) { *p = to_bf16(x); }

#if BF16
typedef u16 elem;
#else
typedef float elem;
#endif

// Elements of 16 bytes: activations are moved that many at a time.
constexpr int PACK = 16 / sizeof(elem);

DEVICE bool aligned(const void* p) { return ((u64)p & 15) == 0; }

// Elements i .. i + PACK - 1 of p, of which those from n on are taken as 0. `wide`: p + i is
// 16-byte aligned. Where several arrays are read, all are before the first is unpacked, so that their
// loads are under way together.
DEVICE Pack16 load_bits(const elem* p, i64 i, i64 n, bool wide) {
    if (wide && i + PACK <= n) return load16(p + i);
    Pack16 pack = {};
    for (int k = 0; k < PACK; ++k) {
        if (i + k >= n) break;
#if BF16
        pack.w[k / 2] |= (u32)p[i + k] << 16 * (k % 2);
#else
        pack.w[k] = float_to_bits(p[i + k]);
#endif
    }
    return pack;
}

DEVICE void unpack(const Pack16& pack, float (&v)[PACK]) {
#if BF16
    for (int k = 0; k < 4; ++k) {
        v[2 * k] = bits_to_float(pack.w[k] << 16);
        v[2 * k + 1] = bits_to_float(pack.w[k] & 0xffff0000u);
    }
#else
    for (int k = 0; k < 4; ++k) v[k] = bits_to_float(pack.w[k]);
#endif
}

DEVICE void load_pack(const elem* p, i64 i, i64 n, bool wide, float (&v)[PACK]) {
    unpack(load_bits(p, i, n, wide), v);
}

DEVICE void store_pack(elem* p, i64 i, i64 n, bool wide, const float (&v)[PACK]) {
    if (wide && i + PACK <= n) {
        Pack16 pack;
#if BF16
        for (int k = 0; k < 4; ++k) pack.w[k] = pack_bf16(v[2 * k], v[2 * k + 1]);
#else
        for (int k = 0; k < 4; ++k) pack.w[k] = float_to_bits(v[k]);
#endif
        store16(p + i, pack);
    } else {
        for (int k = 0; k < PACK; ++k)
            if (i + k < n) put(p + i + k, v[k]);
    }
}

DEVICE float warp_sum(float x) {
    for (int mask = 16; mask; mask >>= 1) x += shuffle_xor(x, mask);
    return x;
}

DEVICE float warp_max(float x) {
    for (int mask = 16; mask; mask >>= 1) x = fmaxf(x, shuffle_xor(x, mask));
    return x;
}

// The sum over the block, in an order that depends on the block's size alone. `scratch` is 32
// floats of shared memory that all have read since a barrier. All threads must call it; all receive
// the sum.
DEVICE float block_sum_into(float x, float* scratch) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    sync_block();
    float total = 0.0f;
    for (int w = 0; w < (int)blockDim.x / 32; ++w) total += scratch[w];
    return total;
}

// The same where who called last may still be at its scratch.
DEVICE float block_sum(float x, float* scratch) {
    sync_block();
    return block_sum_into(x, scratch);
}

// block_sum_into of two numbers at once; `scratch` is 64 floats.
DEVICE void block_sums_into(float& x, float& y, float* scratch) {
    x = warp_sum(x), y = warp_sum(y);
    if (threadIdx.x % 32 == 0) {
        scratch[threadIdx.x / 32] = x;
        scratch[32 + threadIdx.x / 32] = y;
    }
    sync_block();
    x = y = 0.0f;
    for (int w = 0; w < (int)blockDim.x / 32; ++w) {
        x += scratch[w];
        y += scratch[32 + w];
    }
}

DEVICE float block_max(float x, float* scratch) {
    x = warp_max(x);
    sync_block();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    sync_block();
    float top = scratch[0];
    for (int w = 1; w < (int)blockDim.x / 32; ++w) top = fmaxf(top, scratch[w]);
    return top;
}

// Philox4x32-10 (Salmon et al. 2011), as reference/philox.py.
struct Words {
    u32 w[4];
};

DEVICE Words philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
    for (int round = 0; round < 10; ++round) {
        const u64 p0 = (u64)0xD2511F53u * c0, p1 = (u64)0xCD9E8D57u * c2;
        c0 = (u32)(p1 >> 32) ^ c1 ^ k0;
        c1 = (u32)p1;
        c2 = (u32)(p0 >> 32) ^ c3 ^ k1;
        c3 = (u32)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return Words{{c0, c1, c2, c3}};
}
