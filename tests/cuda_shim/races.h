// A race detector under the shim: who has touched each byte of shared and global memory, and when.
//
// Built with -fsanitize=thread the compiler calls __tsan_readN and __tsan_writeN before every access
// of a kernel; these are ours, in runtime.cpp, and there is no libtsan. Two accesses of one
// byte, one of them a write, are a race unless they are ordered:
//
//   - by program order, in one thread;
//   - by barriers between them, in one block: of the block, or of some warps, from each thread that
//     comes to one to those that wait there; also by way of a third thread;
//   - by a sync_warp() between them, in one warp: shuffles, votes and products order nothing;
//   - by nothing, in two blocks of a launch: no kernel here has atomics.
//
// A cp.async writes from its issue to its own thread's wait, and reads its source as long: an access
// by anybody in between is a race, its own thread's included. A wgmma reads its tiles from issue to
// wait, and only what each writer has shown by fence_async() before a barrier; until the wait its
// accumulators are nobody's to touch and its left operand's registers nobody's to write.
//
// Since order is told by barriers and not by who ran first, a race is found in whichever order the
// fibers run, if who meets at which barrier does not depend on that order. All lanes of a warp come to
// a barrier, so what is ordered before a warp is told by a number for each other one: how many
// barriers that one's threads had come to ("epochs") when it was over for this one, a vector clock
// (Mattern 1989). Of the reads since the last write a byte keeps the latest, or, where that is not
// ordered after those of other warps, the latest of each warp.
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
inline void watch_arrival(unsigned) {}
inline void watch_barrier_over(unsigned, const std::bitset<32>&) {}
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

constexpr int NOBODY = -1, LANES = -2;  // readers: none; LANES - w: several lanes of warp w

struct Moment {
    uint32_t epoch, sync;  // barriers that the thread has come to; how often its warp's lanes have met
};

struct Read {
    Moment at;
    int32_t reader;  // a thread, or several: see above
};

struct Cell {
    uint32_t write_block;  // 0: nobody in this launch
    Moment written;
    int32_t writer;
    uint32_t write_fence;  // fences that the writer had passed
    uint32_t read_block;
    Read read;          // the latest, or, if there are
    bool many;          // of several warps,
    uint32_t reads;     // those of each, kept from here on
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

constexpr int MOST_AREAS = 64;
inline Area areas[MOST_AREAS];  // shared memory, then the arrays that the launch is given
inline int n_areas = 1;
inline Area* last_area;
inline Warp* watched_warps;
inline std::vector<Read> kept_reads;       // of a cell one for each warp
inline uint32_t epochs[1024];              // of each thread: barriers that it has come to
inline uint32_t clocks[32][32];            // of each warp: epochs of each that are over for it
inline uint32_t clocks_met[BARRIERS][32];  // the greatest of those that have come to a barrier
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
    kept_reads.resize(1);
}

inline void watch_block() {
    watched_warps = warps.data();
    for (unsigned i = 0; i < block_size; ++i) {
        flying_registers[i].clear(), fences_passed[i].clear();
        n_flying[i] = n_fences[i] = epochs[i] = 0;
    }
    memset(clocks, 0, sizeof clocks);
    memset(clocks_met, 0, sizeof clocks_met);
}

// The current thread comes to a barrier, with all that is over for its warp.
inline void watch_arrival(unsigned barrier) {
    const unsigned warp = current->index / 32;
    const uint32_t epoch = ++epochs[current->index];
    for (unsigned w = 0; w < 32; ++w) {
        const uint32_t over = w == warp ? epoch : clocks[warp][w];
        if (clocks_met[barrier][w] < over) clocks_met[barrier][w] = over;
    }
}

// All have come: what they did before is over for the warps that wait.
inline void watch_barrier_over(unsigned barrier, const std::bitset<32>& waiting) {
    for (unsigned warp = 0; warp < 32; ++warp) {
        if (!waiting[warp]) continue;
        ++watched_warps[warp].syncs;
        for (unsigned w = 0; w < 32; ++w)
            if (clocks[warp][w] < clocks_met[barrier][w]) clocks[warp][w] = clocks_met[barrier][w];
    }
    memset(clocks_met[barrier], 0, sizeof clocks_met[barrier]);
}

SHIM_UNSEEN inline Moment now() {
    return {epochs[current->index], watched_warps[current->index / 32].syncs};
}

// Whether what `thread` of this block did at a moment is done before what the current thread does
// now, or, `together`, before what all lanes of its warp do now.
SHIM_UNSEEN inline bool ordered(Moment then, int thread, bool together) {
    const int warp = (int)current->index / 32;
    if (thread / 32 != warp) return clocks[warp][thread / 32] > then.epoch;
    return then.sync != now().sync || (thread == (int)current->index && !together);
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
    } else if (!ordered(cell.written, cell.writer, together)) {
        race(touch, "which thread %d has written, with no barrier in between", cell.writer);
    }
}

inline int warp_of(int reader) { return reader >= 0 ? reader / 32 : LANES - reader; }

// `done`: it was over before what this warp does now.
SHIM_UNSEEN inline void read_kept(Cell& cell, bool global, bool together, bool done) {
    const uint32_t block = (uint32_t)blocks_run;
    const int thread = (int)current->index, warp = thread / 32;
    const Moment at = now();
    const Read fresh{{at.epoch, at.sync - done}, together ? LANES - warp : thread};
    if (global && cell.read_block && cell.read_block != block) return;  // no write is ordered now
    if (cell.read_block != block) {
        cell.read_block = block, cell.read = fresh, cell.many = false;
        return;
    }
    const int before = warp_of(cell.read.reader);
    if (!cell.many && before != warp) {
        cell.many = clocks[warp][before] <= cell.read.at.epoch;
        if (cell.many) {
            const unsigned n = block_size / 32;
            if (!cell.reads) cell.reads = kept_reads.size(), kept_reads.resize(cell.reads + n);
            for (unsigned w = 0; w < n; ++w) kept_reads[cell.reads + w].reader = NOBODY;
            kept_reads[cell.reads + before] = cell.read;
        } else {
            cell.read = fresh;
        }
    }
    Read& read = cell.many ? kept_reads[cell.reads + warp] : cell.read;
    if (read.reader == NOBODY || (read.at.sync != at.sync && !done)) read = fresh;
    else if (read.reader != fresh.reader && !done) read.reader = LANES - warp;
    read.at.epoch = at.epoch;
}

SHIM_UNSEEN inline void read_before_write(const Touch& touch, const Read& read) {
    if (read.reader == NOBODY) return;
    const int own = (int)current->index / 32, warp = warp_of(read.reader);
    if (warp != own && clocks[own][warp] <= read.at.epoch)
        race(touch, "which another warp has read, with no barrier in between");
    if (warp == own && read.at.sync == now().sync && read.reader != (int)current->index)
        race(touch, "which another lane has read, with no sync_warp() in between");
}

SHIM_UNSEEN inline void write_checked(const Touch& touch, const Cell& cell) {
    read_checked(touch, cell, false);
    if (cell.reading) race(touch, "while a copy or product reads it that nobody has waited for");
    if (!cell.read_block) return;
    if (cell.read_block != (uint32_t)blocks_run) {
        if (touch.area.argument >= 0) race(touch, "which another block has read");
    } else if (cell.many) {
        for (unsigned w = 0; w < block_size / 32; ++w)
            read_before_write(touch, kept_reads[cell.reads + w]);
    } else {
        read_before_write(touch, cell.read);
    }
}

SHIM_UNSEEN inline void write_kept(Cell& cell) {
    cell.write_block = (uint32_t)blocks_run;
    cell.written = now();
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
