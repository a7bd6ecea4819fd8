// A CUDA grid on the processor: the second body of the primitives in accel/cuda/device.cuh.
//
// Each CUDA thread of a block is a fiber with a stack of its own. A fiber runs until it meets a
// barrier or a warp collective, so everything a kernel does between two of those happens in one
// order, and three orders are tried: blocks, warps and lanes forward, backward and shuffled. What makes
// a kernel's mistakes visible here:
//
//   - a warp runs as far ahead of the others as barriers let it, or, shuffled, a step at a time;
//   - shared memory starts as NaN, and the bytes behind it must stay as they were;
//   - an asynchronous copy lands at the wait that covers it (`late`) or at once (`early`): the first
//     shows a missing wait, the second an overwrite of what is still being read;
//   - lanes of a warp that meet at different collectives, threads that meet at different barriers, a
//     thread that leaves while others wait, and a wait that never ends are errors; so is, at a barrier
//     of some warps, who comes twice before it is over, and an arrival that nobody waits for;
//   - addresses of ldmatrix, cp.async and 16-byte accesses must be aligned, and in shared memory
//     within what the launch asked for;
//   - built with SHIM_RACES, races and accesses outside of arrays (races.h).
//
// An error ends the launch: the fibers are abandoned and the message goes back to the caller.
#pragma once
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#include <bitset>
#include <string>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict

namespace shim {

struct Dim {
    unsigned x = 1, y = 1, z = 1;
};

enum Order { FORWARD, REVERSE, SHUFFLED };

struct Copy {
    uint32_t to, bytes;
    const void* from;
    bool valid;
};

struct Fiber {
#if defined(__x86_64__)
    void* sp;
#else
    ucontext_t context;
#endif
    char* stack;
    unsigned index;
    bool done;
    const uint64_t* generation;  // what the fiber waits for to change; null when it can run
    uint64_t seen;
    std::vector<Copy> open;  // asynchronous copies not yet committed
    std::vector<std::vector<Copy>> groups;
};

struct Warp {
    int arrived = 0;
    uint64_t generation = 0;
    uint32_t syncs = 0;  // sync_warp() that it has passed
    int op = 0;
    const void* in[32];
    void* out[32];
};

struct Barrier {
    unsigned arrived = 0, threads = 0;  // of those that have come, and of all that it is for
    uint64_t generation = 0;            // how often it has been over
    std::bitset<1024> come;
    std::bitset<32> waiting;  // warps
};

constexpr unsigned BARRIERS = 16;  // of a block; 0 is sync_block()'s
constexpr size_t STACK = 128 * 1024;
constexpr unsigned CANARY = 256;  // bytes behind shared memory
constexpr uint32_t CANARY_WORD = 0x7fa5a5a5;  // a signalling NaN: even adding 0 to it shows

inline Fiber* current;
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline void (*body)(void**);  // calls the kernel with the arguments
inline void** body_arguments;
inline Dim block_index, grid_size;
inline unsigned block_size;
inline unsigned n_done;
inline Barrier barriers[BARRIERS];
inline int barrier_line;  // of the sync_block() at which threads stand
inline unsigned char* shared;
inline size_t shared_bytes;
inline char* stacks;  // of all threads of a block
inline size_t n_stacks;
inline bool early_copies;
inline uint64_t blocks_run;
// of each warp: groups of wgmma products that it has not waited for (warpgroup.h)
inline std::vector<int> products_flying;
// of each 16 bytes of shared memory: 1 + the thread whose cp.async has filled them, until it has passed
// a fence for what products read
inline std::vector<uint32_t> unfenced;
inline bool watching;  // whether what happens is the kernel's doing, for races.h
inline std::string failure;

// ---- switching ------------------------------------------------------------------------------

#if defined(__x86_64__)
inline void* scheduler;
extern "C" void shim_switch(void** save, void* to);
// Saves the registers that a call must preserve (System V ABI), swaps stacks, restores.
asm(R"(
.text
.weak shim_switch
.type shim_switch,@function
shim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size shim_switch, .-shim_switch
)");
inline void to_scheduler() { shim_switch(&current->sp, scheduler); }
inline void to_fiber(Fiber& fiber) { shim_switch(&scheduler, fiber.sp); }
#else
inline ucontext_t scheduler;
inline void to_scheduler() { swapcontext(&current->context, &scheduler); }
inline void to_fiber(Fiber& fiber) { swapcontext(&scheduler, &fiber.context); }
#endif

__attribute__((noinline)) inline void fail(const char* format, ...) {
    char text[400], where[500];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    snprintf(where, sizeof where, "%s (block %u,%u,%u, thread %u)", text, block_index.x,
             block_index.y, block_index.z, current->index);
    watching = false;
    if (failure.empty()) failure = where;
    for (;;) to_scheduler();  // never resumed
}

}  // namespace shim

#include "races.h"

namespace shim {

inline void wait_for(const uint64_t& generation, uint64_t seen) {
    current->generation = &generation;
    current->seen = seen;
    to_scheduler();
}

// ---- barriers and collectives ---------------------------------------------------------------

// Come to a barrier of so many threads, and wait until all have come, or go on.
__attribute__((noinline)) inline void come_to(unsigned id, unsigned threads, bool waits) {
    Own own;
    Barrier& barrier = barriers[id];
    if (!barrier.arrived) barrier.threads = threads;
    if (barrier.threads != threads || threads % 32)
        fail("barrier %u is said to be of %u and of %u threads", id, barrier.threads, threads);
    if (barrier.come[current->index]) fail("a thread comes twice to barrier %u before it is over", id);
    barrier.come[current->index] = true;
    if (waits) barrier.waiting[current->index / 32] = true;
    watch_arrival(id);
    const uint64_t seen = barrier.generation;
    if (++barrier.arrived < threads) {
        if (waits) wait_for(barrier.generation, seen);
        return;
    }
    for (unsigned i = 0; i < block_size; ++i)
        if (barrier.come[i] != barrier.come[i / 32 * 32])
            fail("barrier %u is over before all lanes of a warp have come", id);
    watch_barrier_over(id, barrier.waiting);
    barrier.arrived = 0;
    barrier.come.reset();
    barrier.waiting.reset();
    ++barrier.generation;
}

inline void come_to_all(int line) {
    Own own;
    if (n_done) fail("barrier of line %d after %u threads have left", line, n_done);
    if (barriers[0].arrived == 0) barrier_line = line;
    else if (barrier_line != line)
        fail("threads meet at the barriers of lines %d and %d", barrier_line, line);
    come_to(0, block_size, true);
}

inline void come_to_some(unsigned id, unsigned threads, bool waits) {
    Own own;
    if (id == 0 || id >= BARRIERS) fail("barriers of some warps are 1 to 15, not %u", id);
    come_to(id, threads, waits);
}

// All 32 lanes deposit an input and an output; the last to arrive computes for all.
template <class F>
__attribute__((noinline)) void collective(int op, const void* in, void* out, F compute) {
    Own own;
    Warp& warp = warps[current->index / 32];
    const int lane = current->index % 32;
    if (warp.arrived == 0) warp.op = op;
    else if (warp.op != op)
        fail("lanes of a warp meet at different collectives (%d and %d)", warp.op, op);
    warp.in[lane] = in;
    warp.out[lane] = out;
    const uint64_t seen = warp.generation;
    if (++warp.arrived == 32) {
        compute(warp);
        warp.arrived = 0;
        ++warp.generation;
    } else {
        wait_for(warp.generation, seen);
    }
}

inline void in_shared(uint32_t address, uint32_t bytes, const char* what) {
    if (address % bytes)
        fail("%s: shared address %u is not a multiple of %u", what, address, bytes);
    if (address + bytes > shared_bytes)
        fail("%s: shared address %u lies outside the %zu bytes of the launch", what, address,
             shared_bytes);
}

inline void land(const Copy& copy) {
    if (copy.valid) memcpy(shared + copy.to, copy.from, copy.bytes);
    else memset(shared + copy.to, 0, copy.bytes);
    unfenced[copy.to / 16] = current->index + 1;
    watch_copy_landed(copy);
}

inline void fence_own_copies() {
    Own own;
    watch_fence();
    for (uint32_t& thread : unfenced)
        if (thread == current->index + 1) thread = 0;
}

inline void land_groups(size_t still_flying) {
    Own own;
    while (current->groups.size() > still_flying) {
        for (const Copy& copy : current->groups.front()) land(copy);
        current->groups.erase(current->groups.begin());
    }
}

// ---- launching: runtime.cpp -----------------------------------------------------------------

const char* launch(Dim grid, unsigned threads, size_t bytes, int order, unsigned seed, bool early,
                   void (*kernel)(void**), void** arguments);

// The types of a kernel's parameters as letters, so that the caller can hold arguments to them.
template <class T> struct Letter;
#define SHIM_LETTER(type, letter)                                                             \
    template <> struct Letter<type> { static constexpr const char* value = letter; };         \
    template <> struct Letter<type*> { static constexpr const char* value = letter "*"; };    \
    template <> struct Letter<const type*> { static constexpr const char* value = letter "*"; };
SHIM_LETTER(float, "f")
SHIM_LETTER(double, "d")
SHIM_LETTER(int, "i")
SHIM_LETTER(unsigned, "I")
SHIM_LETTER(long long, "q")
SHIM_LETTER(unsigned long long, "Q")
SHIM_LETTER(unsigned short, "H")
SHIM_LETTER(bool, "?")

template <class T> struct Bare { typedef T type; };
template <class T> struct Bare<T* __restrict> { typedef T* type; };

template <class... A> std::string letters(void (*)(A...)) {
    std::string all;
    ((all += std::string(Letter<typename Bare<A>::type>::value) + " "), ...);
    return all;
}

template <class... A, size_t... I>
SHIM_UNSEEN void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*(typename Bare<A>::type*)arguments[I]...);
}

template <class... A> SHIM_UNSEEN void call(void (*kernel)(A...), void** arguments) {
    call(kernel, arguments, std::index_sequence_for<A...>());
}

}  // namespace shim

#define SHIM_EXPORT(name)                                                                     \
    extern "C" const char* shim_types_##name() {                                              \
        static const std::string text = shim::letters(name);                                  \
        return text.c_str();                                                                  \
    }                                                                                         \
    extern "C" const char* shim_launch_##name(unsigned x, unsigned y, unsigned z,             \
                                              unsigned threads, size_t bytes, int order,      \
                                              unsigned seed, int early, void** arguments) {   \
        return shim::launch({x, y, z}, threads, bytes, order, seed, early,                    \
                            [](void** values) { shim::call(name, values); }, arguments);      \
    }

// ---- what CUDA C++ has built in -------------------------------------------------------------

struct ShimThread {
    unsigned x;
};
SHIM_UNSEEN inline ShimThread shim_thread() { return {shim::current->index}; }
#define threadIdx shim_thread()
#define blockIdx (shim::block_index)
#define blockDim (ShimThread{shim::block_size})
#define gridDim (shim::grid_size)
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

// ---- the second body of the primitives of device.cuh ----------------------------------------

#define sync_block() shim::come_to_all(__LINE__)
#define SHARED(name) unsigned char* const name = shim::shared

inline uint32_t shared_address(const void* p) {
    return (uint32_t)((const unsigned char*)p - shim::shared);
}

inline int popcount(uint32_t x) { return __builtin_popcount(x); }

inline float bits_to_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

inline uint32_t float_to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

inline uint16_t to_bf16(float x) {
    const uint32_t bits = float_to_bits(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

inline uint32_t pack_bf16(float low, float high) {
    return to_bf16(low) | ((uint32_t)to_bf16(high) << 16);
}

inline float exp2_fast(float x) { return exp2f(x); }
inline float divide_fast(float a, float b) { return a / b; }

inline float shuffle_xor(float x, int mask) {
    float out;
    shim::collective(100 + mask, &x, &out, [mask](shim::Warp& warp) {
        float all[32];
        for (int i = 0; i < 32; ++i) all[i] = *(const float*)warp.in[i ^ mask];
        for (int i = 0; i < 32; ++i) *(float*)warp.out[i] = all[i];
    });
    return out;
}

inline uint32_t uniform(uint32_t x) {
    uint32_t out;
    shim::collective(200, &x, &out, [](shim::Warp& warp) {
        for (int i = 0; i < 32; ++i) *(uint32_t*)warp.out[i] = *(const uint32_t*)warp.in[0];
    });
    return out;
}

inline uint32_t ballot(bool x) {
    uint32_t out;
    shim::collective(1, &x, &out, [](shim::Warp& warp) {
        uint32_t votes = 0;
        for (int i = 0; i < 32; ++i) votes |= (uint32_t) * (const bool*)warp.in[i] << i;
        for (int i = 0; i < 32; ++i) *(uint32_t*)warp.out[i] = votes;
    });
    return out;
}

inline void sync_warp() {
    shim::collective(2, nullptr, nullptr, [](shim::Warp& warp) { ++warp.syncs; });
}

struct Pack16 {
    uint32_t w[4];
};

inline Pack16 load16(const void* p) {
    shim::Own own;
    if ((uintptr_t)p & 15) shim::fail("a 16-byte load from an address that is no multiple of 16");
    shim::watch_access(p, 16, false);
    Pack16 pack;
    memcpy(&pack, p, 16);
    return pack;
}

inline void store16(void* p, Pack16 pack) {
    shim::Own own;
    if ((uintptr_t)p & 15) shim::fail("a 16-byte store to an address that is no multiple of 16");
    shim::watch_access(p, 16, true);
    memcpy(p, &pack, 16);
}
// No access, but of an address that is there.
inline void prefetch(const void* p) { (void)*(const volatile char*)p; }
inline void store8(float* p, const float* v) {
    shim::Own own;
    if ((uintptr_t)p & 7) shim::fail("an 8-byte store to an address that is no multiple of 8");
    shim::watch_access(v, 8, false);
    shim::watch_access(p, 8, true);
    memcpy(p, v, 8);
}

struct MmaOperands {
    uint32_t a[4], b[2];
};

// D (16×8) += A (16×16) B (16×8); fragments as PTX ISA, "Matrix fragments for mma.m16n8k16".
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    MmaOperands operands;
    memcpy(operands.a, a, 16);
    memcpy(operands.b, b, 8);
    shim::collective(3, &operands, d, [](shim::Warp& warp) {
        float A[16][16], B[16][8], C[16][8] = {};
        for (int lane = 0; lane < 32; ++lane) {
            const MmaOperands& o = *(const MmaOperands*)warp.in[lane];
            const int group = lane >> 2, t = lane & 3;
            for (int i = 0; i < 4; ++i) {
                const int row = group + (i & 1) * 8, column = t * 2 + (i >> 1) * 8;
                A[row][column] = bits_to_float(o.a[i] << 16);
                A[row][column + 1] = bits_to_float(o.a[i] & 0xffff0000u);
            }
            for (int i = 0; i < 2; ++i) {
                const int k = t * 2 + i * 8;
                B[k][group] = bits_to_float(o.b[i] << 16);
                B[k + 1][group] = bits_to_float(o.b[i] & 0xffff0000u);
            }
        }
        for (int k = 0; k < 16; ++k)
            for (int m = 0; m < 16; ++m)
                for (int n = 0; n < 8; ++n) C[m][n] += A[m][k] * B[k][n];
        for (int lane = 0; lane < 32; ++lane) {
            float* d = (float*)warp.out[lane];
            const int group = lane >> 2, t = lane & 3;
            d[0] += C[group][t * 2];
            d[1] += C[group][t * 2 + 1];
            d[2] += C[group + 8][t * 2];
            d[3] += C[group + 8][t * 2 + 1];
        }
    });
}

// Four 8×8 matrices of 16-bit elements; lane 8i + r gives the address of row r of matrix i.
template <bool TRANSPOSED> inline void ldmatrix(uint32_t (&r)[4], uint32_t address) {
    shim::in_shared(address, 16, "ldmatrix");
    shim::collective(4 + TRANSPOSED, &address, r, [](shim::Warp& warp) {
        for (int i = 0; i < 4; ++i) {
            uint16_t rows[8][8];
            for (int row = 0; row < 8; ++row) {
                const uint32_t at = *(const uint32_t*)warp.in[i * 8 + row];
                shim::watch_matrix_row(at);
                memcpy(rows[row], shim::shared + at, 16);
            }
            for (int lane = 0; lane < 32; ++lane) {
                const int group = lane >> 2, t = lane & 3;
                const uint32_t low = TRANSPOSED ? rows[t * 2][group] : rows[group][t * 2];
                const uint32_t high = TRANSPOSED ? rows[t * 2 + 1][group] : rows[group][t * 2 + 1];
                ((uint32_t*)warp.out[lane])[i] = low | high << 16;
            }
        }
    });
}

namespace shim {
inline void copy_async(uint32_t to, uint32_t bytes, const void* from, bool valid) {
    Own own;
    in_shared(to, bytes, "cp.async");
    if ((uintptr_t)from % bytes) fail("cp.async: the source is not a multiple of %u", bytes);
    current->open.push_back({to, bytes, from, valid});
    watch_copy_issued(current->open.back());
    if (early_copies) land(current->open.back());
}
}  // namespace shim

inline void copy_async(uint32_t to, const void* from, bool valid) {
    shim::copy_async(to, 16, from, valid);
}

inline void copy_async4(uint32_t to, const float* from, bool valid) {
    shim::copy_async(to, 4, from, valid);
}

inline void copy_commit() {
    shim::Own own;
    shim::Fiber& fiber = *shim::current;
    if (shim::early_copies) fiber.open.clear();
    fiber.groups.push_back(std::move(fiber.open));
    fiber.open.clear();
}

template <int STILL_FLYING> inline void copy_wait() { shim::land_groups(STILL_FLYING); }
