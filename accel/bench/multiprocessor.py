"""What a multiprocessor makes of a loop, cycle by cycle.

The assembler writes into each instruction how long its warp waits before the next one, which of six
counters it raises until its result is there or its operands are read, and for which counters it
waits. So the machine code says itself what waits for what. Here the warps of all blocks that share
a multiprocessor go through rounds of a loop by these rules (Huerta et al. 2025, "Analyzing Modern
NVIDIA GPU Cores", arXiv 2503.20481): in each quarter a scheduler issues one instruction a cycle, to
the warp that it has just served, else to the one that has waited longest; an instruction occupies
its unit; one of which the assembler cannot know when it ends takes the latency below.

A product of a warpgroup goes into a queue of its quarter's tensor core. Where the queue is full the
warp waits, and so does all that its code has behind the product; warpgroups that wait take turns.
What runs beside a product delays it: results of other instructions, and accesses of shared memory
for which its own operands leave no time.

Left out: fetching of instructions, conflicts between banks of registers or of shared memory, memory
behind the second-level cache, and that what delays a product is delayed by it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from accel.bench.gpus import Gpu
from accel.cuda.machine_code import FMA, LIGHT, WARP, Code, Instruction

QUARTERS = 4  # of a multiprocessor, each with a scheduler and a tensor core
ISSUED = QUARTERS  # instructions a cycle
GROUP = 4  # warps of a warpgroup
# Threads' instructions or bytes a cycle: CUDA C++ Programming Guide, "Arithmetic Instructions"; 32
# LD/ST units (NVIDIA's A100 and H100 white papers); 32 banks of 4 bytes
LIGHT_RATE, MUFU_RATE, SHUFFLES, ADDRESSES, SHARED = 64, 16, 32, 32, 128
# Cycles. ldmatrix of one matrix, and so a shuffle, takes 23, of four 29 (Sun et al. 2022, arXiv
# 2206.02874); the first-level cache 41, the second-level one 263 (Luo et al. 2024, arXiv
# 2402.13499); MUFU 23 (Accel-Sim's configuration of the A100, SM80_A100/trace.config)
SHARED_LATENCY, A_WAVEFRONT, NEAR_LATENCY, FAR_LATENCY, MUFU_LATENCY = 21, 2, 41, 263, 23
# Products of a warpgroup that a tensor core's queue holds, and the cycles from when one has been
# multiplied until its registers may be read: measured on an H800 by "SASS documentation",
# github.com/cicuvc/nvidia-sass-document, notes on wgmma, rounds 3 to 5 (one product of 8 to 256
# columns takes 49 and half a cycle a column from its issue to its wait; a burst is taken in 4
# cycles each until about seven are under way, then as fast as they end)
QUEUED, PRODUCT_LATENCY = 7, 49
# Of a cycle by which each result of another instruction delays the product under way, as both are
# written to the registers by one port: the same, notes on the bandwidth of registers, round 3 (a
# stream of writes delays a product by 0.49 cycles for each register, and is delayed by 0.51). Of
# shared memory a product takes what its operands are, 128 bytes a cycle (notes on QGMMA)
STOLEN = 0.49
# Cycles that a barrier takes from the last arrival, and more for each warp that comes to it; a
# fence with nothing under way: measured on a GH200, github.com/hibouwu/CUDA_optimazation, EXP-11
# (21.3 with 4 warps, 29.3 with 8; 10.9)
BARRIER_LATENCY, A_WARP, FENCE_LATENCY = 13, 2, 11
# Bytes a cycle that a multiprocessor gets of the second-level cache: a GH200 gave 57 to 64 to each
# at once (the same repository, access_rules/RULES.md, section 10); how much all get in the long
# run is a bound of its own
FILLED = 64
NONE = 7  # no counter


class Step(NamedTuple):
    """An instruction, as the schedulers see it."""

    unit: str  # what it occupies
    cycles: float  # of that unit
    latency: float  # from when the unit takes it to its result; 0: the assembler knows it
    code: Instruction


def steps(taken: Code, gpu: Gpu) -> list[Step]:
    """Return what each instruction asks of which unit of a GPU."""

    def step(i: Instruction) -> Step:
        stem = i.stem
        waves = i.shared / SHARED
        if stem == "HMMA":
            return Step("tensor", QUARTERS * i.flops / (gpu.tensor * gpu.by_mma), 0, i)
        if stem == "HGMMA":
            multiplied = QUARTERS * max(i.flops / gpu.tensor, waves)
            return Step("queue", multiplied, PRODUCT_LATENCY, i)
        if stem in ("LDSM", "LDS", "STS", "LDGSTS"):
            far = FAR_LATENCY if stem == "LDGSTS" else SHARED_LATENCY + A_WAVEFRONT * waves
            return Step("shared", waves, far, i)
        if stem == "SHFL":
            return Step("shared", WARP / SHUFFLES, SHARED_LATENCY + A_WAVEFRONT, i)
        if stem in ("LDL", "STL"):
            return Step("shared", WARP * i.width / SHARED, NEAR_LATENCY, i)
        if stem in ("LDG", "STG", "RED", "ATOMG", "ATOM"):
            return Step("address", WARP * QUARTERS / ADDRESSES, FAR_LATENCY, i)
        if stem == "MUFU" or stem in ("I2F", "F2I"):
            return Step("MUFU", WARP * QUARTERS / MUFU_RATE, MUFU_LATENCY, i)
        if stem in FMA:
            return Step("FMA", WARP * QUARTERS / gpu.fma, 0, i)
        if stem in LIGHT:
            return Step("light", WARP * QUARTERS / LIGHT_RATE, MUFU_LATENCY, i)
        return Step("", 0, MUFU_LATENCY, i)

    return [step(i) for i in taken]


class _Product:
    """One of a warpgroup, on its way through the queue of a tensor core."""

    def __init__(self, end: float, spare: float):
        self.end = end
        self.spare = spare  # cycles in which it reads no shared memory


class _Warp:
    """One warp, on its way through the rounds."""

    def __init__(self, block: int, number: int):
        self.block, self.number, self.quarter = block, number, number % QUARTERS
        self.group = block, number // GROUP
        self.at = 0  # instructions that were issued
        self.ready = 0.0  # when the last one lets the next go
        self.counters: list[list[float]] = [[] for _ in range(6)]  # when each raise ends
        self.copies = 0.0  # when all asynchronous copies so far have landed
        self.groups: list[_Product] = []  # the last of each group
        self.met: tuple[object, ...] | None = None  # the barrier at which it stands

    def earliest(self, i: Instruction) -> float:
        """Return when its counters and its stall let the next instruction go."""
        t = self.ready
        for n in range(6):
            if i.waits >> n & 1 and self.counters[n]:
                t = max(t, *self.counters[n])
        if i.name.startswith("DEPBAR"):
            n, most = _depbar(i.operands)
            ends = sorted(self.counters[n])
            if len(ends) > most:
                t = max(t, ends[len(ends) - most - 1])
        elif i.name.startswith("WARPGROUP.DEPBAR"):
            most = int(i.operands.split(",")[1], 16)
            if len(self.groups) > most:
                t = max(t, self.groups[-1 - most].end + PRODUCT_LATENCY)
        return t


def _depbar(operands: str) -> tuple[int, int]:
    counter, _, most = operands.partition(",")
    return int(counter.strip().removeprefix("SB")), int(most.split(",")[0].strip() or "0", 16)


def played(taken: Code, gpu: Gpu, warps: int, blocks: int = 1, rounds: int = 6) -> float:
    """Return the cycles of a round of a loop, with so many blocks of so many warps at it.

    The first rounds, in which the warps still find their places, do not count.
    """
    spent = [spent_on(taken, gpu, warps, blocks, n) for n in (rounds, 2 * rounds)]
    return (spent[1] - spent[0]) / rounds


def spent_on(taken: Code, gpu: Gpu, warps: int, blocks: int = 1, rounds: int = 1) -> float:
    """Return the cycles until all warps have gone so often through some code."""
    return _Play(steps(taken, gpu), warps, blocks, rounds).cycles()


class _Play:
    """The warps of some blocks, on their way through rounds of a loop."""

    def __init__(self, plan: Sequence[Step], warps: int, blocks: int, rounds: int):
        self.plan, self.end = plan, rounds * len(plan)
        self.warps = [_Warp(b, w) for b in range(blocks) for w in range(warps)]
        self.of_block = warps
        self.quarters = [[w for w in self.warps if w.quarter == q] for q in range(QUARTERS)]
        self.free: list[dict[str, float]] = [{} for _ in range(QUARTERS)]  # when a unit is
        self.queues: list[list[_Product]] = [[] for _ in range(QUARTERS)]  # the last ones
        self.whole = {"shared": 0.0, "fill": 0.0}  # units that the quarters share
        # arrivals at a warpgroup's turn; the first has its own from the start
        self.turns = {(b, 0): GROUP for b in range(blocks)}

    def cycles(self) -> float:
        """Return when the last warp is through."""
        n, now, last = len(self.plan), 0.0, 0.0
        while any(w.at < self.end for w in self.warps):
            later = math.inf
            for q, (quarter, units) in enumerate(zip(self.quarters, self.free, strict=True)):
                for w in self._order(quarter):
                    if w.at >= self.end or w.met is not None:
                        continue
                    step = self.plan[w.at % n]
                    t = max(w.earliest(step.code), units.get("issue", 0.0))
                    if step.unit in ("tensor", "FMA", "light", "address"):
                        t = max(t, units.get(step.unit, 0.0))
                    elif step.unit == "queue" and len(self.queues[q]) >= QUEUED:
                        t = max(t, self.queues[q][-QUEUED].end)
                    if t > now:
                        later = min(later, t)
                        continue
                    self._issue(w, step, now, units)
                    units["issue"] = now + 1
                    later = min(later, now + 1)
                    w.at += 1
                    last = max(last, now + step.code.stall)
                    quarter.remove(w)
                    quarter.insert(0, w)
                    break
            now = later
            if now == math.inf and any(w.at < self.end for w in self.warps):
                raise ValueError("all warps of the loop wait for a barrier at which not all arrive")
        return last

    def _order(self, quarter: list[_Warp]) -> Sequence[_Warp]:
        """Return the warps of a quarter in the order in which they are served."""
        if quarter and self.plan[quarter[0].at % len(self.plan)].unit == "queue":
            return quarter[::-1]
        return *quarter[:1], *quarter[:0:-1]

    def _issue(self, w: _Warp, step: Step, now: float, units: dict[str, float]) -> None:
        """Let a warp's next instruction go now."""
        i = step.code
        taken_at = now
        if step.unit:
            at = self.whole if step.unit in self.whole else units
            taken_at = max(now, at.get(step.unit, 0.0))
            at[step.unit] = taken_at + step.cycles
        if i.stem in ("LDG", "LDGSTS"):
            self.whole["fill"] = max(now, self.whole["fill"]) + WARP * i.width / FILLED
            taken_at = max(taken_at, self.whole["fill"])
        done = taken_at + step.latency
        w.ready = now + (max(i.stall, FENCE_LATENCY) if i.stem == "MEMBAR" else i.stall)
        for counters in w.counters:
            if counters and counters[0] <= now:
                counters[:] = [t for t in counters if t > now]
        if i.stem == "LDGSTS":
            w.copies = max(w.copies, done)
        elif i.stem == "LDGDEPBAR":
            w.counters[0].append(w.copies)
            return
        elif i.stem == "HGMMA":
            reading = QUARTERS * i.shared / SHARED
            product = _Product(units[step.unit], step.cycles - reading)
            self.queues[w.quarter] = [*self.queues[w.quarter][1 - QUEUED :], product]
            if "gsb0" in i.operands:
                w.groups.append(product)
        elif step.unit in ("FMA", "light", "MUFU"):
            self._delay(w.quarter, STOLEN, now)
        if step.unit == "shared":
            for q, products in enumerate(self.queues):
                under_way = next((p for p in products if p.end > now), None)
                if under_way:
                    self._delay(q, step.cycles - under_way.spare, now)
                    under_way.spare = max(0.0, under_way.spare - step.cycles)
        if i.sets != NONE:
            w.counters[i.sets].append(done)
        if i.frees != NONE:
            w.counters[i.frees].append(taken_at + step.cycles)
        if i.stem == "BAR" or i.name == "WARPGROUP.ARRIVE":
            self._meet(w, i, now)

    def _delay(self, q: int, cycles: float, now: float) -> None:
        """Let the products under way in a quarter end so much later."""
        if cycles > 0 and self.free[q].get("queue", 0.0) > now:
            self.free[q]["queue"] += cycles
            for product in self.queues[q]:
                product.end += cycles * (product.end > now)

    def _meet(self, w: _Warp, i: Instruction, now: float) -> None:
        """Let a warp come to a barrier: of its block, its warpgroup, or for its turn."""
        which, _, threads = i.operands.partition(",")
        group = i.name == "WARPGROUP.ARRIVE" or threads.strip() == hex(GROUP * WARP)
        # a register says whose, or a predicate who passes it on
        turn = not group and (which.strip().startswith("R") or i.guarded)
        if i.name.startswith("BAR.ARV") and not turn:
            return  # for warps that are not of the loop
        if i.name.startswith("BAR.ARV"):
            others = {v.group for v in self.warps if v.block == w.block} - {w.group}
            for other in others:
                self.turns[other] = self.turns.get(other, 0) + 1
                self._let_go(other, now)
            return
        w.met = ("turn" if turn else "group" if group else "block",)
        if turn:
            self._let_go(w.group, now)
            return
        those = [v for v in self.warps if (v.group == w.group if group else v.block == w.block)]
        if all(v.met == w.met for v in those):
            late = 0 if group else BARRIER_LATENCY + A_WARP * len(those)
            for v in those:
                v.met, v.ready = None, max(v.ready, now + max(i.stall, late))

    def _let_go(self, group: tuple[int, int], now: float) -> None:
        """Let a warpgroup go whose turn it is, once all of it stand there."""
        those = [v for v in self.warps if v.group == group]
        if self.turns.get(group, 0) >= GROUP and all(v.met == ("turn",) for v in those):
            self.turns[group] -= GROUP
            late = BARRIER_LATENCY + A_WARP * self.of_block
            for v in those:
                v.met, v.ready = None, max(v.ready, now + late)
