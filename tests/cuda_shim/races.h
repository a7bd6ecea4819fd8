// A race detector under the shim: who has touched each byte of shared and global memory, and when.
//
// Built with -fsanitize=thread the compiler calls __tsan_readN and __tsan_writeN before every access
// of a kernel; these are ours, in runtime.cpp, and there is no libtsan. Two accesses of one
// byte, one of them a write, are a race unless they are ordered:
//
//   - by program order, in one thread;
//   - by a sync_block() between them, in one block;
//   - by a sync_warp() between them, in one warp: shuffles, votes and products order nothing;
//   - by nothing, in two blocks of a launch: no kernel here has atomics.
//
// A cp.async writes from its issue to its own thread's wait, and reads its source as long: an access
// by anybody in between is a race, its own thread's included. A wgmma reads its tiles from issue to
// wait, and only what each writer has shown by fence_async() before a barrier; until the wait its
// accumulators are nobody's to touch and its left operand's registers nobody's to write.
//
// Since order is told by barriers and not by who ran first, a race is found in whichever order the
// fibers run. It is exact as long as all barriers are of a whole block or a whole warp: then an access
// is told by its thread and two numbers, the barriers that its block and its warp have passed. Of the
// reads since the last write a byte keeps the latest of a warp, or that there were several warps: no
// more is needed to tell whether a write is ordered after them all.
//
// An access that lies in none of the launch's arrays, nor in shared memory or the thread's own
// variables, is out of bounds, reads too.
#pragma once
#ifdef SHIM_RACES
#include <execinfo.h>
#endif

namespace shim {

#ifndef SHIM_RACES

#define SHIM_UNSEEN
struct Own {
    ~Own() {}  // or it would be a variable that nobody uses
};
inline void watch_launch() {}
inline void watch_block() {}
inline void watch_access(const void*, size_t, bool) {}
inline void watch_matrix_row(uint32_t) {}
inline void watch_copy_issued(const Copy&) {}
inline void watch_copy_landed(const Copy&) {}
inline void watch_fence() {}
inline void watch_product_reads(uint32_t) {}
inline void watch_product_has_read(uint32_t) {}
inline void watch_registers(unsigned, const void*, size_t, bool) {}
inline void watch_registers_free(unsigned, const void*) {}
constexpr bool RACES = false;

#else
constexpr bool RACES = true;

// Neither hooks nor what they call may be instrumented: that would never end.
#define SHIM_UNSEEN __attribute__((no_sanitize("thread")))

constexpr int WARPS = -1, LANES = -2;  // readers: several warps; LANES - w: several lanes of warp w

struct Cell {
    uint32_t write_block, write_barrier, write_sync;  // block 0: nobody in this launch
    int32_t writer;
    uint32_t write_fence;  // fences that the writer had passed
    uint32_t read_block, read_barrier, read_sync;
    int32_t reader;     // a thread, or several: see above
    uint16_t arriving;  // 1 + the thread whose cp.async is on its way here
    uint16_t reading;   // copies and products under way that read it
};

struct Area {
    uintptr_t first;
    size_t bytes;
    int argument;  // of the kernel; -1: shared memory
    Cell* cells;
};

struct Registers {
    uintptr_t first;
    size_t bytes;
    bool accumulators;  // or a left operand
};

struct Moment {
    uint32_t barrier, sync;
};

constexpr int MOST_AREAS = 64;
inline Area areas[MOST_AREAS];  // shared memory, then the arrays that the launch is given
inline int n_areas = 1;
inline Area* last_area;
inline const Warp* watched_warps;
inline std::vector<Registers> flying_registers[1024];  // of each thread
inline uint32_t n_flying[1024];                        // how many they are
inline std::vector<Moment> fences_passed[1024];        // of each thread, in this block
inline uint32_t n_fences[1024];
extern "C" char __ehdr_start[] __attribute__((visibility("hidden")));  // this library, its variables
extern "C" char _end[] __attribute__((visibility("hidden")));

// What happens while one of these lives is done by the shim, not by the kernel.
struct Own {
    bool before;
    SHIM_UNSEEN Own() : before(watching) { watching = false; }
    SHIM_UNSEEN ~Own() { watching = before; }
};

inline void forget_arrays() {
    for (int i = 0; i < n_areas; ++i) free(areas[i].cells), areas[i].cells = nullptr;
    n_areas = 1;
}

inline void watch_launch() {
    areas[0] = {(uintptr_t)shared, shared_bytes, -1, areas[0].cells};
    last_area = areas;
    for (int i = 0; i < n_areas; ++i) {
        free(areas[i].cells);
        areas[i].cells = (Cell*)calloc(areas[i].bytes + 1, sizeof(Cell));
    }
}

inline void watch_block() {
    watched_warps = warps.data();
    for (unsigned i = 0; i < block_size; ++i) {
        flying_registers[i].clear(), fences_passed[i].clear();
        n_flying[i] = n_fences[i] = 0;
    }
}

SHIM_UNSEEN inline Moment now() {
    return {(uint32_t)barrier_generation, watched_warps[current->index / 32].syncs};
}

// Whether what `thread` of this block did at a moment is done before what the current thread does
// now, or, `together`, before what all lanes of its warp do now.
SHIM_UNSEEN inline bool ordered(Moment then, int thread, bool together) {
    const Moment at = now();
    if (then.barrier != at.barrier) return true;
    if (thread / 32 != (int)current->index / 32) return false;
    return then.sync != at.sync || (thread == (int)current->index && !together);
}

struct Touch {
    const Area& area;
    size_t byte;
    const char* does;
};

// End the launch, and tell where the kernel was: device.py makes lines of the addresses.
__attribute__((noinline)) inline void accuse(const char* format, ...) {
    char text[300], where[200] = "";
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    void* frames[12];
    const int n = backtrace(frames, 12);
    size_t used = 0;
    for (int i = 1; i < n && used + 20 < sizeof where; ++i) {
        const uintptr_t at = (uintptr_t)frames[i] - 1;  // in the call, not behind it
        if (at >= (uintptr_t)__ehdr_start && at < (uintptr_t)_end)
            used += snprintf(where + used, sizeof where - used, " %zx", at - (uintptr_t)__ehdr_start);
    }
    fail("%s @%s", text, where);
}

inline const char* name_of(const Area& area) {
    static char text[40];
    if (area.argument < 0) return "shared memory";
    snprintf(text, sizeof text, "argument %d", area.argument);
    return text;
}

__attribute__((noinline)) inline void race(const Touch& touch, const char* format, ...) {
    char other[200];
    va_list list;
    va_start(list, format);
    vsnprintf(other, sizeof other, format, list);
    va_end(list);
    accuse("a race: it %s byte %zu of %s, %s", touch.does, touch.byte, name_of(touch.area), other);
}

// A read by the current thread, or by all lanes of its warp together.
SHIM_UNSEEN inline void read_checked(const Touch& touch, const Cell& cell, bool together) {
    const uint32_t block = (uint32_t)blocks_run;
    if (cell.arriving)
        race(touch, "which a cp.async of thread %d fills that it has not waited for", cell.arriving - 1);
    if (!cell.write_block) return;
    if (cell.write_block != block) {
        if (touch.area.argument >= 0) race(touch, "which another block has written");
    } else if (!ordered({cell.write_barrier, cell.write_sync}, cell.writer, together)) {
        race(touch, "which thread %d has written, with no barrier in between", cell.writer);
    }
}

// `done`: it was over before what this warp does now.
SHIM_UNSEEN inline void read_kept(Cell& cell, bool global, bool together, bool done) {
    const uint32_t block = (uint32_t)blocks_run;
    const int thread = (int)current->index, warp = thread / 32;
    const int reader = together ? LANES - warp : thread;
    const Moment at = now();
    const uint32_t sync = at.sync - done;
    if (global && cell.read_block && cell.read_block != block) return;  // no write is ordered now
    if (cell.read_block != block || cell.read_barrier != at.barrier) {
        cell.read_block = block, cell.read_barrier = at.barrier, cell.read_sync = sync;
        cell.reader = reader;
    } else if (cell.reader != WARPS) {
        const int before = cell.reader <= LANES ? LANES - cell.reader : cell.reader / 32;
        if (before != warp) cell.reader = WARPS;
        else if (cell.read_sync != at.sync && !done) cell.reader = reader, cell.read_sync = sync;
        else if (cell.reader != reader && !done) cell.reader = LANES - warp;
    }
}

SHIM_UNSEEN inline void write_checked(const Touch& touch, const Cell& cell) {
    const uint32_t block = (uint32_t)blocks_run;
    const bool global = touch.area.argument >= 0;
    const Moment at = now();
    const int thread = (int)current->index;
    read_checked(touch, cell, false);
    if (cell.reading) race(touch, "while a copy or product reads it that nobody has waited for");
    if (!cell.read_block) return;
    if (cell.read_block != block) {
        if (global) race(touch, "which another block has read");
    } else if (cell.read_barrier == at.barrier) {
        const bool one = cell.reader >= 0;
        if (cell.reader == WARPS || (one ? cell.reader / 32 : LANES - cell.reader) != thread / 32)
            race(touch, "which another warp has read, with no barrier in between");
        if (cell.read_sync == at.sync && cell.reader != thread)
            race(touch, "which another lane has read, with no sync_warp() in between");
    }
}

SHIM_UNSEEN inline void write_kept(Cell& cell) {
    const Moment at = now();
    cell.write_block = (uint32_t)blocks_run;
    cell.write_barrier = at.barrier, cell.write_sync = at.sync;
    cell.writer = (int32_t)current->index;
    cell.write_fence = n_fences[current->index];
    cell.read_block = 0;
}

inline void registers_checked(uintptr_t at, size_t bytes, bool write) {
    for (const Registers& r : flying_registers[current->index])
        if (at < r.first + r.bytes && at + bytes > r.first && (write || r.accumulators))
            accuse("a race: it %s of a product that it has not waited for",
                   !r.accumulators ? "changes a left operand"
                   : write         ? "writes an accumulator"
                                   : "reads an accumulator");
}

__attribute__((noinline)) inline void out_of_bounds(uintptr_t at, size_t bytes, const char* does) {
    const Area* near = nullptr;
    size_t least = 0;
    for (int i = 0; i < n_areas; ++i) {
        const uintptr_t first = areas[i].first, end = first + areas[i].bytes;
        const size_t off = at < first ? first - at : at + bytes - end;
        if (!near || off < least) near = areas + i, least = off;
    }
    accuse("it %s %zu bytes outside of every array, %s %zu bytes %s %s", does, bytes,
           at < near->first ? "from" : "up to", least, at < near->first ? "before" : "behind",
           name_of(*near));
}

// The area that holds the bytes; none where they are variables of the thread or of this library.
SHIM_UNSEEN inline Area* area_of(uintptr_t at, size_t bytes, const char* does) {
    if (at - last_area->first < last_area->bytes && bytes <= last_area->first + last_area->bytes - at)
        return last_area;
    if (at - (uintptr_t)stacks < n_stacks * STACK) {
        if (n_flying[current->index]) registers_checked(at, bytes, does[0] == 'w');
        return nullptr;
    }
    for (int i = 0; i < n_areas; ++i)
        if (at - areas[i].first < areas[i].bytes && bytes <= areas[i].first + areas[i].bytes - at)
            return last_area = areas + i;
    if (at < (uintptr_t)__ehdr_start || at >= (uintptr_t)_end) out_of_bounds(at, bytes, does);
    return nullptr;
}

// Bytes that the current thread reads or writes.
SHIM_UNSEEN inline void watch_access(const void* p, size_t bytes, bool write) {
    const char* const does = write ? "writes" : "reads";
    const Area* area = area_of((uintptr_t)p, bytes, does);
    if (!area) return;
    const size_t first = (uintptr_t)p - area->first;
    for (size_t i = first; i < first + bytes; ++i) {
        Cell& cell = area->cells[i];
        if (write) write_checked({*area, i, does}, cell), write_kept(cell);
        else read_checked({*area, i, does}, cell, false), read_kept(cell, area->argument >= 0, false, false);
    }
}

// A row of 16 bytes that ldmatrix hands out to the warp.
SHIM_UNSEEN inline void watch_matrix_row(uint32_t address) {
    const Area& area = areas[0];
    for (size_t i = address; i < address + 16; ++i) {
        read_checked({area, i, "reads"}, area.cells[i], true);
        read_kept(area.cells[i], false, true, false);
    }
}

SHIM_UNSEEN inline void watch_copy_issued(const Copy& copy) {
    const Area& area = areas[0];
    const char* const does = "copies to";
    for (size_t i = copy.to; i < copy.to + copy.bytes; ++i) {
        write_checked({area, i, does}, area.cells[i]);
        area.cells[i].arriving = (uint16_t)(current->index + 1);
    }
    if (!copy.valid) return;
    const Area* from = area_of((uintptr_t)copy.from, copy.bytes, "copies");
    if (!from) return;
    const size_t first = (uintptr_t)copy.from - from->first;
    for (size_t i = first; i < first + copy.bytes; ++i) {
        read_checked({*from, i, "copies"}, from->cells[i], false);
        ++from->cells[i].reading;
    }
}

SHIM_UNSEEN inline void watch_copy_landed(const Copy& copy) {
    const Area& area = areas[0];
    for (size_t i = copy.to; i < copy.to + copy.bytes; ++i) {
        area.cells[i].arriving = 0;
        write_kept(area.cells[i]);
    }
    const Area* from = copy.valid ? area_of((uintptr_t)copy.from, copy.bytes, "copies") : nullptr;
    for (size_t i = 0; from && i < copy.bytes; ++i) {
        Cell& cell = from->cells[(uintptr_t)copy.from - from->first + i];
        --cell.reading;
        read_kept(cell, from->argument >= 0, false, false);
    }
}

inline void watch_fence() {
    fences_passed[current->index].push_back(now());
    ++n_fences[current->index];
}

// The 16 bytes at a shared address are read by a product of the warp from now on …
SHIM_UNSEEN inline void watch_product_reads(uint32_t address) {
    const Area& area = areas[0];
    for (size_t i = address; i < address + 16; ++i) {
        Cell& cell = area.cells[i];
        const Touch touch{area, i, "multiplies"};
        read_checked(touch, cell, true);
        if (cell.write_block == (uint32_t)blocks_run) {
            if (cell.write_fence == n_fences[cell.writer] ||
                !ordered(fences_passed[cell.writer][cell.write_fence], cell.writer, true))
                race(touch, "which thread %d has written without fence_async() and a barrier since",
                     cell.writer);
        }
        ++cell.reading;
    }
}

// … until now.
SHIM_UNSEEN inline void watch_product_has_read(uint32_t address) {
    for (size_t i = address; i < address + 16; ++i) {
        Cell& cell = areas[0].cells[i];
        --cell.reading;
        read_kept(cell, false, true, true);
    }
}

inline void watch_registers(unsigned thread, const void* p, size_t bytes, bool accumulators) {
    flying_registers[thread].push_back({(uintptr_t)p, bytes, accumulators});
    ++n_flying[thread];
}

inline void watch_registers_free(unsigned thread, const void* p) {
    std::vector<Registers>& all = flying_registers[thread];
    for (size_t i = all.size(); i-- > 0;)
        if (all[i].first == (uintptr_t)p) {
            all.erase(all.begin() + i);
            --n_flying[thread];
            return;
        }
}
#endif

}  // namespace shim
