// A machine that executes PTX: 32 lanes and masks, blocks one after the other.
//
// The lanes of a warp are in groups, each at one place of the program. The group that is furthest behind
// runs (the smallest program counter first), and groups that meet are one again: so lanes come together
// behind a branch wherever that is. Independent thread scheduling (3.2) allows any such order. A group
// that comes to an instruction which other lanes must take part in waits for them; when all groups
// wait, that is a fault.
//
// Warps run to a barrier one after the other, forward or backward, or, shuffled, a few instructions
// each in an order drawn at random.
#include <climits>
#include <random>

#include "floats.h"
#include "integer.h"
#include "machine.h"
#include "meetings.h"
#include "memory.h"
#include "warpgroups.h"

namespace {

enum Order { FORWARD, REVERSE, SHUFFLED };
enum End { OUT_OF_BUDGET, AT_BARRIER, ENDED };
// Rows that every program has: tid.xyz, ntid.xyz, ctaid.xyz, nctaid.xyz, laneid (10). program.py
// numbers them in the same order.
constexpr int SPECIAL = 13;

struct Program {
    std::vector<Inst> code;
    std::vector<u64> constants;  // of the rows behind the registers
    s64 registers;               // rows of registers, the special ones included
    std::vector<u64> ran;        // how often each instruction did
};

const std::unordered_map<std::string, Opcode>& opcodes() {
    static const auto table = [] {
        std::unordered_map<std::string, Opcode> all;
        for (const Family& family : {integers(), floats(), memory(), meetings(), warpgroups()})
            for (const Opcode& opcode : family)
                if (!all.emplace(opcode.name, opcode).second)
                    fault("two opcodes are called %s", opcode.name);
        return all;
    }();
    return table;
}

void check_widths(const Inst& inst, s64 pc) {
    const Opcode& op = *inst.op;
    if (!op.bits.empty() && op.bits.size() != inst.at.size())
        fault("instruction %lld, %s, has %zu operands, not %zu", (long long)pc, op.name,
              inst.at.size(), op.bits.size());
    for (size_t i = 0; i < op.bits.size(); ++i) {
        const s64 has = inst.at[i].bits, wants = op.bits[i];
        if (has && wants && (wants > 0 || has == 1 ? has != wants : has < -wants))
            fault("instruction %lld, %s: operand %zu has %lld bits, not %lld", (long long)pc, op.name,
                  i, (long long)has, (long long)std::abs(wants));
    }
}

// ---- a warp ------------------------------------------------------------------------------------

u32 guarded(Warp& warp, const Inst& inst, u32 lanes) {
    if (inst.guard < 0) return lanes;
    const u64* p = &warp.file[inst.guard * 32];
    u32 set = 0;
    for (int lane = 0; lane < 32; ++lane) set |= (u32)(p[lane] & 1) << lane;
    return lanes & (inst.negated ? ~set : set);
}

void end_lanes(Warp& warp, u32 lanes) {
    each(lanes, [&](int lane) {
        if (!warp.copies[lane].empty())  // our own rule: whatever was begun has been waited for
            fault("lane %d ends with asynchronous copies that it has not waited for", lane);
    });
    if (!warp.products.empty()) fault("a warp ends with products that it has not waited for");
    warp.live &= ~lanes;
    for (Group& group : warp.groups) group.parked = false;  // nobody waits for who has ended
}

[[noreturn]] void nobody_runs(const Program& program, const Warp& warp) {
    std::string text = "lanes of a warp wait for each other for ever:";
    for (const Group& group : warp.groups) {
        char part[120];
        snprintf(part, sizeof part, " %08x at instruction %lld (%s)", group.lanes, (long long)group.pc,
                 program.code[group.pc].op->name);
        text += part;
    }
    fault("%s", text.c_str());
}

// The group that runs next, with all lanes at its place; null when all have ended.
Group* furthest_behind(const Program& program, Warp& warp) {
    auto& groups = warp.groups;
    size_t first = groups.size();
    for (size_t i = 0; i < groups.size(); ++i)
        if (!groups[i].parked && (first == groups.size() || groups[i].pc < groups[first].pc)) first = i;
    if (groups.empty()) return nullptr;
    if (first == groups.size()) nobody_runs(program, warp);
    const s64 pc = groups[first].pc;
    Group joined{pc, 0, false};
    for (size_t i = groups.size(); i-- > 0;)
        if (groups[i].pc == pc) joined.lanes |= groups[i].lanes, groups.erase(groups.begin() + i);
    groups.push_back(joined);
    return &groups.back();
}

// Lanes `some` of the last group go to `pc`.
void part(Warp& warp, u32 some, s64 pc) {
    warp.groups.back().lanes &= ~some;
    if (!warp.groups.back().lanes) warp.groups.pop_back();
    if (some) warp.groups.push_back({pc, some, false});
}

// `budget`: of instructions; what is left of it when the warp stops.
End run_warp(Program& program, Warp& warp, s64& budget) {
    while (Group* group = furthest_behind(program, warp)) {
        s64 others = LLONG_MAX;
        for (size_t i = 0; i + 1 < warp.groups.size(); ++i)
            others = std::min(others, warp.groups[i].pc);
        const bool alone = others == LLONG_MAX;
        for (bool together = true; together;) {
            s64& pc = group->pc;
            if (pc >= (s64)program.code.size()) fault("a lane runs beyond the end of the kernel");
            const Inst& inst = program.code[pc];
            warp.pc = pc;
            const u32 lanes = guarded(warp, inst, group->lanes);
            program.ran[pc] += lanes != 0;
            switch (inst.op->kind) {
                case PLAIN:
                    if (lanes) inst.op->run(warp, inst, lanes);
                    ++pc;
                    break;
                case BRANCH:
                    if (lanes == group->lanes) {
                        pc = inst.target;
                        together = alone;  // with others about, see who is behind
                    } else if (lanes) {
                        if (!strcmp(inst.op->name, "bra.uni")) fault("bra.uni parts a warp");
                        ++pc;
                        part(warp, lanes, inst.target);
                        together = false;
                    } else {
                        ++pc;
                    }
                    break;
                case EXIT:
                    end_lanes(warp, lanes);
                    ++pc;
                    if (lanes) {
                        group->lanes &= ~lanes;
                        if (!group->lanes) warp.groups.pop_back();
                        together = false;
                    }
                    break;
                case MEETING:
                case BARRIER: {
                    const u32 members = lanes ? inst.op->members(warp, inst, lanes) : 0;
                    if (members & ~lanes) {  // wait for them; who is not concerned goes on
                        const s64 here = pc;
                        const u32 rest = group->lanes & ~lanes;
                        group->lanes = lanes;
                        group->parked = true;
                        if (rest) warp.groups.push_back({here + 1, rest, false});
                        together = false;
                        break;
                    }
                    if (lanes) inst.op->run(warp, inst, lanes);
                    ++pc;
                    if (inst.op->kind == BARRIER && lanes) return AT_BARRIER;
                }
            }
            if (together && pc == others) together = false;
            if (--budget <= 0) return OUT_OF_BUDGET;
        }
    }
    return ENDED;
}

// ---- blocks and launches -------------------------------------------------------------------------

void start(Warp& warp, const Program& program, Block& block, u32 index) {
    Launch& launch = *block.launch;
    warp.block = &block;
    warp.index = index;
    warp.groups = {{0, ALL, false}};
    warp.live = ALL;
    warp.barrier = -1;
    warp.products.clear();
    warp.flying.clear();
    warp.fenced.clear();
    warp.product_groups = warp.asked = 0;
    const size_t registers = program.registers * 32;
    warp.file.resize(registers + program.constants.size() * 32);
    std::fill(warp.file.begin(), warp.file.begin() + registers, ~0ull);  // NaN, whatever the type
    for (size_t i = 0; i < program.constants.size(); ++i)
        std::fill_n(&warp.file[registers + i * 32], 32, program.constants[i]);
    for (int lane = 0; lane < 32; ++lane) {
        const u64 values[SPECIAL] = {index * 32ull + lane, 0, 0, launch.threads, 1, 1,
                                     block.index[0], block.index[1], block.index[2],
                                     launch.grid[0], launch.grid[1], launch.grid[2], (u64)lane};
        for (int i = 0; i < SPECIAL; ++i) warp.file[i * 32 + lane] = values[i];
        warp.copies[lane].clear();
        warp.committed[lane] = 0;
    }
}

// Lets go on who waits at barriers to which all have come.
void release(Block& block, std::vector<Warp>& warps) {
    for (int id = 0; id < 16; ++id) {
        Meeting& meeting = block.meetings[id];
        if (!meeting.threads || 32 * meeting.come.count() < meeting.threads) continue;
        meeting = Meeting();
        for (Warp& warp : warps)
            if (warp.barrier == id) warp.barrier = -1;
    }
}

void run_block(Program& program, Block& block, std::vector<Warp>& warps, int order,
               std::mt19937& random, s64& left, Warp*& running) {
    const u32 n = warps.size();
    for (u32 i = 0; i < n; ++i) start(warps[i], program, block, i);
    std::fill(block.shared.begin(), block.shared.end(), 0xff);
    block.unfenced.assign(block.shared.size() / 16 + 1, 0);
    block.asked.assign(n / 4 + 1, {});
    std::fill_n(block.meetings, 16, Meeting());
    u32 ended = 0;
    std::vector<bool> over(n);
    while (ended < n) {
        bool progress = false;
        const u32 shift = order == SHUFFLED ? random() % n : 0;
        for (u32 i = 0; i < n; ++i) {
            const u32 at = order == REVERSE ? n - 1 - i : (i + shift) % n;
            if (over[at] || warps[at].barrier >= 0) continue;
            const s64 given = order == SHUFFLED ? 1 + random() % 200 : 1 << 20;
            s64 budget = given;
            running = &warps[at];
            if (run_warp(program, warps[at], budget) == ENDED) over[at] = true, ++ended;
            progress = true;
            release(block, warps);
            if ((left -= given - budget) < 0) fault("the kernel does not end");
        }
        if (!progress) fault("warps wait at a barrier that others never reach");
    }
    for (int id = 0; id < 16; ++id)  // our own rule: whoever comes is waited for
        if (block.meetings[id].threads) fault("warps have come to barrier %d, where nobody waits", id);
}

}  // namespace

// ---- what Python calls -------------------------------------------------------------------------

static std::string message;

// `names`: of opcodes, one for each instruction. `code`: of each instruction guard, negated, target, n and n times row, bits, offset.
extern "C" Program* ptx_program(const char* const* names, const s64* code, s64 n, s64 registers,
                                const u64* constants, s64 n_constants, const char** error) {
    try {
        auto program = new Program{{}, {constants, constants + n_constants}, registers, {}};
        program->ran.resize(n);
        for (s64 pc = 0; pc < n; ++pc) {
            const auto found = opcodes().find(names[pc]);
            if (found == opcodes().end()) fault("instruction %lld: no opcode is called %s",
                                                (long long)pc, names[pc]);
            Inst inst{&found->second, code[0], code[1] != 0, code[2], {}};
            for (s64 i = 0; i < code[3]; ++i)
                inst.at.push_back({code[4 + 3 * i], code[5 + 3 * i], code[6 + 3 * i]});
            check_widths(inst, pc);
            code += 4 + 3 * code[3];
            program->code.push_back(std::move(inst));
        }
        return program;
    } catch (const std::runtime_error& failure) {
        message = failure.what();
        *error = message.c_str();
        return nullptr;
    }
}

extern "C" void ptx_ran(const Program* program, u64* ran) {
    std::copy(program->ran.begin(), program->ran.end(), ran);
}

// Runs a grid. Returns null, or what went wrong; *where is then the instruction.
extern "C" const char* ptx_launch(Program* program, const u32* grid, u32 threads, u32 shared_bytes,
                                  const u8* parameters, const Range* cells, s64 n_cells,
                                  const Range* memory, s64 n_memory, int order, u32 seed, int early,
                                  s64* where) {
    Launch launch{{grid[0], grid[1], grid[2]}, threads, shared_bytes, parameters,
                  {cells, cells + n_cells}, {memory, memory + n_memory}, 0, early != 0};
    std::vector<Warp> warps(threads / 32);
    Warp* running = nullptr;
    Block block{&launch, {}, std::vector<u8>(shared_bytes), {}, {}, {}};
    std::mt19937 random(seed);
    s64 left = 50'000'000;  // instructions of warps
    try {
        if (!threads || threads % 32 || threads > 1024) fault("blocks have 32, 64, ... 1024 threads");
        const u64 blocks = (u64)grid[0] * grid[1] * grid[2];
        for (u64 i = 0; i < blocks; ++i) {
            const u64 at = order == REVERSE ? blocks - 1 - i : i;
            block.index[0] = at % grid[0];
            block.index[1] = at / grid[0] % grid[1];
            block.index[2] = at / grid[0] / grid[1];
            run_block(*program, block, warps, order, random, left, running);
        }
        return nullptr;
    } catch (const std::runtime_error& failure) {
        char text[600];
        snprintf(text, sizeof text, "%s (block %u,%u,%u, warp %u)", failure.what(), block.index[0],
                 block.index[1], block.index[2], running ? running->index : 0);
        message = text;
        *where = running ? running->pc : -1;
        return message.c_str();
    }
}
