// What launches kernels, and what the compiler's hooks do: the same for all of them, so that it is
// compiled once and linked to each library of kernels (device.py).
#include "shim.h"

namespace shim {

namespace {

void entry() {
    watching = true;
    body(body_arguments);
    watching = false;
    if (barriers[0].arrived)
        fail("a thread ends while others wait at the barrier of line %d", barrier_line);
    if (!current->open.empty() || !current->groups.empty())
        fail("a thread ends with asynchronous copies that nobody waited for");
    if (products_flying[current->index / 32])
        fail("a thread ends with products that its warp has not waited for");
    current->done = true;
    ++n_done;
    for (;;) to_scheduler();
}

std::vector<unsigned> arrange(unsigned n, int order, uint64_t& random) {
    std::vector<unsigned> indices(n);
    for (unsigned i = 0; i < n; ++i) indices[i] = order == REVERSE ? n - 1 - i : i;
    for (unsigned i = n; order == SHUFFLED && i > 1; --i) {  // Fisher-Yates, xorshift64
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        std::swap(indices[i - 1], indices[(unsigned)(random % i)]);
    }
    return indices;
}

void start(Fiber& fiber, unsigned index) {
    fiber.index = index;
    fiber.done = false;
    fiber.generation = nullptr;
    fiber.open.clear();
    fiber.groups.clear();
#if defined(__x86_64__)
    void** sp = (void**)(fiber.stack + STACK);
    *--sp = nullptr;  // keeps the stack aligned as after a call
    *--sp = (void*)entry;
    for (int i = 0; i < 6; ++i) *--sp = nullptr;
    fiber.sp = sp;
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
#endif
}

void run_block(int order, uint64_t& random) {
    memset(shared, 0xff, shared_bytes);  // every float and bf16 of it is NaN
    for (unsigned i = 0; i < CANARY; i += 4) memcpy(shared + shared_bytes + i, &CANARY_WORD, 4);
    warps.assign(block_size / 32, Warp());
    for (Barrier& barrier : barriers) barrier = Barrier();
    n_done = 0;
    products_flying.assign(block_size / 32, 0);
    ++blocks_run;
    unfenced.assign(shared_bytes / 16 + 1, 0);
    watch_block();
    for (unsigned i = 0; i < block_size; ++i) start(fibers[i], i);
    std::vector<unsigned> warp_turn = arrange(block_size / 32, order, random);
    const std::vector<unsigned> lane_turn = arrange(32, order, random);
    while (n_done < block_size) {
        bool progress = false;
        if (order == SHUFFLED) warp_turn = arrange(block_size / 32, order, random);
        for (unsigned warp : warp_turn) {
            // Shuffled, not all warps get a turn in a round, so that one may fall far behind another.
            if (order == SHUFFLED && progress) {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                if ((random >> 32) % 4 == 0) break;
            }
            // Forward and backward, a warp runs as far as it can before the next one does: to a
            // barrier of the block. Shuffled, it takes a step, to its next collective.
            bool moved = true;
            for (int step = 0; moved && (order != SHUFFLED || step < 1); ++step) {
                moved = false;
                for (unsigned lane : lane_turn) {
                    Fiber& fiber = fibers[warp * 32 + lane];
                    if (fiber.done || (fiber.generation && *fiber.generation == fiber.seen))
                        continue;
                    fiber.generation = nullptr;
                    current = &fiber;
                    to_fiber(fiber);
                    moved = true;
                    if (!failure.empty()) return;
                }
                progress |= moved;
            }
        }
        if (!progress) {
            failure = "threads wait for each other for ever: " +
                      std::to_string(block_size - n_done) + " of " + std::to_string(block_size) +
                      " are at a barrier or collective that the others never reach";
            return;
        }
    }
    for (unsigned id = 0; id < BARRIERS; ++id)
        if (barriers[id].arrived) {
            failure = std::to_string(barriers[id].arrived) + " threads have arrived at barrier " +
                      std::to_string(id) + ", where nobody waits for them";
            return;
        }
    for (unsigned i = 0; i < CANARY; i += 4)
        if (memcmp(shared + shared_bytes + i, &CANARY_WORD, 4)) {
            failure = "a thread wrote behind the " + std::to_string(shared_bytes) +
                      " bytes of shared memory";
            return;
        }
}

}  // namespace

const char* launch(Dim grid, unsigned threads, size_t bytes, int order, unsigned seed, bool early,
                   void (*kernel)(void**), void** arguments) {
    failure.clear();
    if (threads == 0 || threads % 32 || threads > 1024) return "threads must be 32, 64, … 1024";
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535)
        return "a grid must have 1 to 65,535 blocks along y and z, and one at least along x";
    if (n_stacks < threads) {
        if (stacks) munmap(stacks, n_stacks * STACK);
        stacks = (char*)mmap(nullptr, threads * STACK, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        n_stacks = threads;
    }
    if (fibers.size() < threads) fibers.resize(threads);
    for (unsigned i = 0; i < threads; ++i) fibers[i].stack = stacks + i * STACK;
    std::vector<unsigned char> memory(bytes + CANARY + 1024);
    shared = (unsigned char*)(((uintptr_t)memory.data() + 1023) & ~(uintptr_t)1023);
    shared_bytes = bytes;
    body = kernel;
    body_arguments = arguments;
    block_size = threads;
    grid_size = grid;
    early_copies = early;
    watch_launch();
    uint64_t random = 0x9E3779B97F4A7C15ull * (seed + 1);
    for (unsigned i : arrange(grid.x * grid.y * grid.z, order, random)) {
        block_index = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
        run_block(order, random);
        if (!failure.empty()) return failure.c_str();
    }
    return nullptr;
}

}  // namespace shim

#ifdef SHIM_RACES
// The kernel's accesses are looked at by what is no kernel itself.
SHIM_UNSEEN inline void shim_seen(const void* p, size_t bytes, bool write) {
    if (!shim::watching) return;
    shim::watching = false;
    shim::watch_access(p, bytes, write);
    shim::watching = true;
}

#define SHIM_HOOK SHIM_UNSEEN __attribute__((visibility("hidden"))) void
#define SHIM_HOOKS(of, bytes)                                                 \
    SHIM_HOOK __tsan_##of##read##bytes(void* p) { shim_seen(p, bytes, false); } \
    SHIM_HOOK __tsan_##of##write##bytes(void* p) { shim_seen(p, bytes, true); }
extern "C" {
SHIM_HOOKS(, 1)
SHIM_HOOKS(, 2)
SHIM_HOOKS(, 4)
SHIM_HOOKS(, 8)
SHIM_HOOKS(, 16)
SHIM_HOOKS(unaligned_, 2)
SHIM_HOOKS(unaligned_, 4)
SHIM_HOOKS(unaligned_, 8)
SHIM_HOOKS(unaligned_, 16)
SHIM_HOOK __tsan_read_range(void* p, unsigned long bytes) { shim_seen(p, bytes, false); }
SHIM_HOOK __tsan_write_range(void* p, unsigned long bytes) { shim_seen(p, bytes, true); }
SHIM_HOOK __tsan_init() {}

// The arrays of the next launch: forget those of the last one, then name each.
void shim_forget_arrays() { shim::forget_arrays(); }
void shim_name_array(size_t first, size_t bytes, int argument) {
    if (shim::n_areas < shim::MOST_AREAS)
        shim::areas[shim::n_areas++] = {first, bytes, argument, nullptr};
}
}
#endif
