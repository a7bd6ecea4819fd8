// Hopper's products of a warpgroup (wgmma, sm_90a), four warps whose first is a multiple of four: the
// PTX ISA's "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
//
// They run on their own from issue to wait. Until then nobody may touch the accumulators, change the
// registers of the left operand, or overwrite what they read of shared memory. Shared memory that
// threads have written (cp.async counts as such) is seen only after each writer has passed
// fence_async() and then a barrier.
//
// A warp holds 16 of the 64 rows, in the fragments of mma_bf16: of D 8 columns each. Operands in shared
// memory are told by descriptors.
#ifdef MYLLM_SHIM
#include "warpgroup.h"
#else
// Barriers by number, 1 to 15, of some whole warps: PTX ISA, "bar". Each is over when THREADS have come
// to it, those that wait there and those that only arrive and go on, and then starts anew. What they did
// to memory before is done for those that have waited.
template <int THREADS> DEVICE void barrier_wait(u32 barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

template <int THREADS> DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

// Show the tensor cores what this thread has written to shared memory and has landed.
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// To be passed before the first product after accumulators or left operands were written.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait for all committed groups of products but the last STILL_FLYING.
template <int STILL_FLYING> DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(STILL_FLYING) : "memory");
}

#define WGMMA_1(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define WGMMA_4(d, i) WGMMA_1(d, i), WGMMA_1(d, i + 1), WGMMA_1(d, i + 2), WGMMA_1(d, i + 3)

// D (64 × N) = A Bᵀ, or added to D: A is 64 rows and B N rows of 16 columns, both in shared memory.
// `p` is scale-d; both factors are 1, neither operand is transposed.
DEVICE void wgmma_rows(float (&d)[4][4], u64 a, u64 b, bool add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %18, 0;"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
        "%16, %17, p, 1, 1, 0, 0;}"
        : WGMMA_4(d, 0)
        : "l"(a), "l"(b), "r"((int)add));
}

DEVICE void wgmma_rows(float (&d)[8][4], u64 a, u64 b, bool add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %34, 0;"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,"
        "%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
        "%32, %33, p, 1, 1, 0, 0;}"
        : WGMMA_4(d, 0), WGMMA_4(d, 4)
        : "l"(a), "l"(b), "r"((int)add));
}

DEVICE void wgmma_rows(float (&d)[16][4], u64 a, u64 b, bool add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %66, 0;"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,"
        "%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,"
        "%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,"
        "%59,%60,%61,%62,%63}, "
        "%64, %65, p, 1, 1, 0, 0;}"
        : WGMMA_4(d, 0), WGMMA_4(d, 4), WGMMA_4(d, 8), WGMMA_4(d, 12)
        : "l"(a), "l"(b), "r"((int)add));
}

// D (64 × N) += A B: A in registers, 16 of its rows a warp; B is 16 rows of N columns, transposed.
DEVICE void wgmma_columns(float (&d)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %37, 0;"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,"
        "%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
        "{%32,%33,%34,%35}, %36, p, 1, 1, 1;}"
        : WGMMA_4(d, 0), WGMMA_4(d, 4)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}

DEVICE void wgmma_columns(float (&d)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %69, 0;"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,"
        "%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,"
        "%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,"
        "%59,%60,%61,%62,%63}, "
        "{%64,%65,%66,%67}, %68, p, 1, 1, 1;}"
        : WGMMA_4(d, 0), WGMMA_4(d, 4), WGMMA_4(d, 8), WGMMA_4(d, 12)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}
#endif
