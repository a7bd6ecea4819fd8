"""What the assembler made of a kernel: its instructions, counted along the way that is run most.

``nvdisasm`` (pip install nvidia-cuda-nvdisasm) prints a cubin's instructions with no GPU and no
driver. NVIDIA lists their names ("CUDA Binary Utilities", Instruction Set Reference). A kernel's
branches for edges, masks and misaligned arrays are in the listing too. So what is counted is one
way through the kernel, or through one round of a loop: of all ways the one with most operations of
tensor cores, then most 16-byte accesses and asynchronous copies, then fewest instructions. That is
the way of a tile that lies inside all rules, and of arrays that are aligned.
"""

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

WARP = 32  # threads

# Instructions by the unit that takes them. FMA: CUDA's cores proper; LIGHT: integers, comparisons,
# selections and conversions, of which a multiprocessor takes half as many on most GPUs.
FMA = ("FFMA", "FMUL", "FADD")
LIGHT = (
    "F2FP FMNMX FSEL FSET FSETP FCHK I2F F2I IABS IADD3 IMAD IMNMX ISETP LEA LOP3 MOV PLOP3 "
    "POPC PRMT SEL SHF VIADD VIMNMX VOTE"
).split()


class Instruction(NamedTuple):
    """One line of the listing."""

    name: str  # with its suffixes: LDG.E.128
    operands: str
    guarded: bool  # by a predicate, or a branch on one
    target: int | None  # of a branch within the kernel: the index of an instruction
    stall: int  # cycles until the warp's next one may be issued, whatever it waits for besides
    sets: int  # the counter that it raises until its result is there; 7: none
    frees: int  # the one that it raises until it has read its operands
    waits: int  # a bit for each counter that must be 0 before it is issued

    @property
    def stem(self) -> str:
        """The name without suffixes."""
        return self.name.partition(".")[0]

    @property
    def width(self) -> int:
        """The bytes that a thread loads or stores."""
        bits = re.search(r"\.[US]?(8|16|64|128)\b", self.name)
        return int(bits.group(1)) // 8 if bits else 4

    @property
    def flops(self) -> int:
        """Operations of the tensor cores: of a warp, or a quarter of a warpgroup's."""
        shape = re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)\.|HMMA\.(16)(8)(16)\.", self.name)
        if shape is None:
            return 0
        m, n, k = (int(x) for x in shape.groups() if x)
        return 2 * m * n * k // (4 if self.stem == "HGMMA" else 1)

    @property
    def shared(self) -> int:
        """Bytes that it reads or writes of shared memory: a warp's, or a quarter of a warpgroup's.

        A product of a warpgroup reads its right operand once, k × n of two bytes, and a left one
        that is no register, m × k.
        """
        match self.stem:
            case "LDSM":
                return 128 * int(self.name.rpartition(".")[2])
            case "LDS" | "STS" | "LDGSTS":
                return WARP * self.width
            case "HGMMA":
                m, n, k = (int(x) for x in re.findall(r"\d+", self.name.partition(".F32")[0])[:3])
                left = self.operands.split(",")[1].strip().startswith("gdesc")
                return (2 * k * n + (2 * m * k if left else 0)) // 4
        return 0

    @property
    def is_global(self) -> bool:
        """Whether it goes to global memory."""
        return self.stem in ("LDG", "STG", "LDGSTS")


Code = Sequence[Instruction]


class Counts(NamedTuple):
    """What a warp is given to do, in instructions unless said otherwise."""

    issued: int
    flops: int  # operations of the tensor cores
    tensor: int
    ldsm: int
    mufu: int  # exponentials, reciprocals, roots
    fma: int
    light: int
    shared: int  # bytes
    accesses: dict[tuple[str, int], int]  # to global memory: (LDG, STG or LDGSTS, bytes a thread)
    local: int  # loads and stores of a thread's own memory: spills


def tool(name: str = "nvdisasm") -> Path:
    """Return one of NVIDIA's tools for machine code: the disassembler.

    Raises
    ------
    ImportError
        Where it is not installed.
    """
    packages = importlib.util.find_spec("nvidia")
    for folder in (packages and packages.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob(f"c*/bin/{name}*")):
            return path
    found = shutil.which(name)
    if found is None:
        raise ImportError(f"machine code is read by {name}: pip install nvidia-cuda-{name}")
    return Path(found)


def disassemble(cubin: bytes) -> dict[str, list[Instruction]]:
    """Return kernel -> instructions."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernels.cubin")
        file.write_bytes(cubin)
        done = subprocess.run(
            [tool(), "-c", "-hex", file], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise ValueError(f"nvdisasm refuses machine code: {done.stderr.strip()}")
    return read_listing(done.stdout)


def read_listing(listing: str) -> dict[str, list[Instruction]]:
    """Read what ``nvdisasm -c -hex`` prints.

    The assembler writes into each instruction of 128 bits how long to stall (bits 105 to 108), the
    counters that it raises until its result is there and until its operands are read (110
    to 115), and those that it waits for (116 to 121) (Jia et al. 2018, "Dissecting the NVIDIA Volta
    GPU Architecture via Microbenchmarking").
    """
    found = {}
    for part in re.split(r"^\s*\.section\s+\.text\.", listing, flags=re.MULTILINE)[1:]:
        lines: list[tuple[str | None, str, str]] = []
        labels: dict[str, int] = {}
        controls: list[int] = []
        for line in part.splitlines():
            if label := re.match(r"(\.L_x_\d+):", line):
                labels[label.group(1)] = len(lines)
            elif code := re.match(r"\s*/\*\w+\*/\s+(@!?U?P\w+\s+)?([\w.]+)\s*(.*?)\s*;", line):
                guard, name, operands = code.groups()
                lines.append((guard, name, operands))
                controls.append(0)
            elif upper := re.match(r"\s*/\* 0x(\w{16}) \*/$", line):
                controls[-1] = int(upper.group(1), 16) >> 105 - 64
        code_of = []
        for (guard, name, operands), c in zip(lines, controls, strict=True):
            # for sm_80 a loop is also left by a CALL to the kernel's own end
            jumps = name.startswith(("BRA", "CALL"))
            to = re.search(r"`\((\.L_x_\d+)\)", operands) if jumps else None
            guarded = bool(guard) or (to is not None and not operands.startswith("`"))
            target = None if to is None else labels.get(to.group(1))
            fields = max(1, c & 15), c >> 5 & 7, c >> 8 & 7, c >> 11 & 63
            code_of.append(Instruction(name, operands, guarded, target, *fields))
        found[part.partition(",")[0]] = code_of
    return found


def loops(code: Code) -> list[tuple[int, int]]:
    """Return the first and last instruction of each loop."""
    return [(i.target, n) for n, i in enumerate(code) if i.target is not None and i.target <= n]


def way(code: Code, first: int = 0, last: int | None = None) -> list[Instruction]:
    """Return the way that is run most: to the end, each loop once; or a round of a loop.

    Empty where there is none: what lies behind the kernel's end for rare cases jumps back, too, and
    looks like a loop.
    """
    end = len(code) - 1 if last is None else last
    best: dict[int, tuple[tuple[int, ...], int | None]] = {}  # value, and what comes next
    for n in range(end, first - 1, -1):
        i = code[n]
        own = (i.flops, int(i.is_global and i.width == 16), int(i.stem == "LDGSTS"), -1)
        if n == last or (last is None and i.stem == "EXIT" and not i.guarded):
            best[n] = own, None
            continue
        following = [] if i.stem in ("EXIT", "RET", "BRA") and not i.guarded else [n + 1]
        if i.target is not None and i.target > n:
            following.append(i.target)
        known: list[tuple[tuple[int, ...], int | None]] = []
        if i.target is not None and i.target <= n and not i.guarded and last is None:
            # a loop is left where it is tested
            inside = code[i.target : n]
            following += [t.target for t in inside if t.target is not None and t.target > n]
            known += [((0, 0, 0, 0), None)] * any(t.stem == "EXIT" for t in inside)
        known += [(best[to][0], to) for to in following if to in best]
        if known:
            value, to = max(known, key=lambda one: one[0])
            best[n] = tuple(a + b for a, b in zip(own, value, strict=True)), to
    taken: list[Instruction] = []
    at: int | None = first if first in best else None
    while at is not None:
        taken.append(code[at])
        at = best[at][1]
    return taken


def hot_loop(code: Code) -> list[Instruction]:
    """Return a round of the innermost loop that uses tensor cores most; empty without one.

    Of several the shortest: the others are of tiles at an edge.
    """
    found = {loop: way(code, *loop) for loop in loops(code)}
    found = {loop: taken for loop, taken in found.items() if any(i.flops for i in taken)}
    inner = [
        taken
        for (a, b), taken in found.items()
        if not any((a, b) != (c, d) and a <= c and d <= b for c, d in found)
    ]
    return max(inner, key=lambda taken: (sum(i.flops for i in taken), -len(taken)), default=[])


def count(code: Iterable[Instruction]) -> Counts:
    """Count what a warp is given to do."""
    of, flops, shared = Counter[str](), 0, 0
    accesses: dict[tuple[str, int], int] = Counter()
    for i in code:
        of[i.stem] += 1
        flops += i.flops
        shared += i.shared
        if i.is_global:
            accesses[i.stem, i.width] += 1

    def all_of(*stems: str) -> int:
        return sum(of[stem] for stem in stems)

    return Counts(
        issued=of.total(),
        flops=flops,
        tensor=all_of("HMMA", "HGMMA"),
        ldsm=of["LDSM"],
        mufu=of["MUFU"],
        fma=all_of(*FMA),
        light=all_of(*LIGHT),
        shared=shared,
        accesses=dict(accesses),
        local=all_of("LDL", "STL"),
    )
