"""What a multiprocessor makes of a loop, cycle by cycle.

The assembler writes into each instruction how long its warp waits before the next one, which of six
counters it raises until its result is there or its operands are read, and for which counters it
waits. So the machine code says itself what waits for what. Here the warps of all blocks that share
a multiprocessor go through rounds of a loop by these rules (Huerta et al. 2025, "Analyzing Modern
NVIDIA GPU Cores", arXiv 2503.20481): in each quarter a scheduler issues one instruction a cycle, to
the warp that it has just served, else to the one that has waited longest; an instruction occupies
its unit; one of which the assembler cannot know when it ends takes the latency below.

Products of a warpgroup wait in a queue of their quarter's tensor core, however many there are, as
PTX's manual has them asynchronous.

Left out: fetching of instructions, conflicts between banks of registers or of shared memory, what
fences take, and memory behind the second-level cache.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from accel.bench.gpus import Gpu
from accel.cuda.machine_code import FMA, LIGHT, WARP, Code, Instruction

QUARTERS = 4  # of a multiprocessor, each with a scheduler and a tensor core
ISSUED = QUARTERS  # instructions a cycle
# Threads' instructions or bytes a cycle: CUDA C++ Programming Guide, "Arithmetic Instructions"; 32
# LD/ST units (NVIDIA's A100 and H100 white papers); 32 banks of 4 bytes
LIGHT_RATE, MUFU_RATE, SHUFFLES, ADDRESSES, SHARED = 64, 16, 32, 32, 128
# Cycles. ldmatrix of one matrix, and so a shuffle, takes 23, of four 29 (Sun et al. 2022, arXiv
# 2206.02874); the first-level cache 41, the second-level one 263 (Luo et al. 2024, arXiv
# 2402.13499); MUFU 23 (Accel-Sim's configuration of the A100, SM80_A100/trace.config)
SHARED_LATENCY, A_WAVEFRONT, NEAR_LATENCY, FAR_LATENCY, MUFU_LATENCY = 21, 2, 41, 263, 23
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
            return Step("queue", QUARTERS * max(i.flops / gpu.tensor, waves), 0, i)
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


class _Warp:
    """One warp, on its way through the rounds."""

    def __init__(self, block: int, number: int):
        self.block, self.group, self.quarter = block, (block, number // 4), number % QUARTERS
        self.at = 0  # instructions that were issued
        self.ready = 0.0  # when the last one lets the next go
        self.counters: list[list[float]] = [[] for _ in range(6)]  # when each raise ends
        self.copies = 0.0  # when all asynchronous copies so far have landed
        self.product = 0.0  # when all products of the warpgroup so far are done
        self.groups: list[float] = []  # when each group of them is
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
                t = max(t, self.groups[-1 - most])
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
    plan = steps(taken, gpu)
    n, end = len(plan), rounds * len(plan)
    all_warps = [_Warp(b, w) for b in range(blocks) for w in range(warps)]
    of_quarter = [[w for w in all_warps if w.quarter == q] for q in range(QUARTERS)]
    free: list[dict[str, float]] = [{} for _ in range(QUARTERS)]  # when a unit is, by quarter
    whole = {"shared": 0.0}  # units that the quarters share
    now = last = 0.0
    while any(w.at < end for w in all_warps):
        later = math.inf
        for quarter, units in zip(of_quarter, free, strict=True):
            for w in (*quarter[:1], *quarter[:0:-1]):
                if w.at >= end or w.met is not None:
                    continue
                step = plan[w.at % n]
                t = max(w.earliest(step.code), units.get("issue", 0.0))
                if step.unit in ("tensor", "FMA", "light", "address"):
                    t = max(t, units.get(step.unit, 0.0))
                if t > now:
                    later = min(later, t)
                    continue
                _issue(w, step, now, units, whole, all_warps)
                units["issue"] = now + 1
                later = min(later, now + 1)
                w.at += 1
                last = max(last, now + step.code.stall)
                quarter.remove(w)
                quarter.insert(0, w)
                break
        now = later
        if now == math.inf and any(w.at < end for w in all_warps):
            raise ValueError("all warps of the loop wait for a barrier at which not all arrive")
    return last


def _issue(
    w: _Warp,
    step: Step,
    now: float,
    units: dict[str, float],
    whole: dict[str, float],
    all_warps: Sequence[_Warp],
) -> None:
    """Let a warp's next instruction go now."""
    i = step.code
    taken_at = now
    if step.unit:
        at = whole if step.unit == "shared" else units
        taken_at = max(now, at.get(step.unit, 0.0))
        at[step.unit] = taken_at + step.cycles
    done = taken_at + step.latency
    w.ready = now + i.stall
    for counters in w.counters:
        if counters and counters[0] <= now:
            counters[:] = [t for t in counters if t > now]
    if i.stem == "LDGSTS":
        w.copies = max(w.copies, done)
    elif i.stem == "LDGDEPBAR":
        w.counters[0].append(w.copies)
        return
    elif i.stem == "HGMMA":
        w.product = at[step.unit]
        if "gsb0" in i.operands:
            w.groups.append(w.product)
    if i.sets != NONE:
        w.counters[i.sets].append(done)
    if i.frees != NONE:
        w.counters[i.frees].append(taken_at + step.cycles)
    meets: tuple[object, ...] | None = ("block", w.block) if i.stem == "BAR" else None
    if i.name == "WARPGROUP.ARRIVE":
        meets = ("warpgroup", *w.group)
    if meets:
        w.met = meets
        those = [
            v for v in all_warps if (v.block == w.block if i.stem == "BAR" else v.group == w.group)
        ]
        if all(v.met == meets for v in those):
            for v in those:
                v.met, v.ready = None, max(v.ready, now + i.stall)
