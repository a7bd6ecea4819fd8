"""From the text of PTX to instructions: PTX ISA 8.7, chapter 4 (syntax) and 5 (declarations).

As much of the language as NVRTC writes for kernels without function calls. What is not understood
is an error, never passed over.
"""

import re
from typing import NamedTuple

BITS = {"pred": 1} | {f"{kind}{n}": n for kind in "bsuf" for n in (8, 16, 32, 64)}
NOTHING = re.compile(
    r"\.(pragma|maxntid|minnctapersm|reqntid|maxnreg)\b"
)  # says nothing of meaning


class PtxError(Exception):
    """What a kernel, its launch or this interpreter did wrong."""


class Parameter(NamedTuple):
    name: str
    type: str
    offset: int  # bytes from the start of the parameters, as the driver lays them out

    @property
    def size(self) -> int:
        return BITS[self.type] // 8


class Instruction(NamedTuple):
    text: str
    opcode: str
    guard: str | None
    negated: bool
    operands: tuple[str, ...]  # vectors taken apart; addresses keep their brackets
    source: str  # file:line that it was compiled from, if that is known


class Kernel(NamedTuple):
    name: str
    parameters: tuple[Parameter, ...]
    registers: dict[str, int]  # name -> bits
    shared: dict[str, int]  # name -> address; what the launch asks for is behind `static` bytes
    static: int
    code: tuple[Instruction, ...]
    labels: dict[str, int]


def parse(text: str) -> dict[str, Kernel]:
    """Return the kernels of a module by name."""
    if re.search(r"^\s*(\.visible |\.weak )?\.func\b", text, re.M):
        raise PtxError("functions are not understood, only kernels that call nothing")
    files = dict(re.findall(r'^\s*\.file\s+(\d+) "([^"]*)"', text, re.M))
    text = re.sub(r"//.*", "", text)
    entries = r"\.visible \.entry (\w+)\(([^)]*)\)([^{}]*)^\{\n(.*?)^\}\n"
    found = re.findall(entries, text, re.M | re.S)
    if len(found) != text.count(".entry"):
        raise PtxError(f"{text.count('.entry')} kernels are declared, {len(found)} understood")
    head = text.split(".visible .entry")[0]
    dynamic = re.findall(r"^\.extern \.shared \.align \d+ \.b8 (\w+)\[\];", head, re.M)
    kernels = {}
    for name, parameters, limits, body in found:
        for line in filter(None, map(str.strip, limits.splitlines())):
            if not NOTHING.match(line):
                raise PtxError(f"{name}: {line!r} is not understood")
        kernels[name] = _kernel(name, parameters, dynamic, body, files)
    return kernels


def _parameters(declared: str) -> tuple[Parameter, ...]:
    """Lay parameters out, each at a multiple of its size."""
    parameters, end = [], 0
    for piece in filter(None, map(str.strip, declared.split(","))):
        match = re.fullmatch(r"\.param \.(\w+) (\w+)", piece)
        if match is None or match[1] not in BITS:
            raise PtxError(f"the parameter {piece!r} is not understood")
        size = BITS[match[1]] // 8
        start = -(-end // size) * size
        parameters.append(Parameter(match[2], match[1], start))
        end = start + size
    return tuple(parameters)


def _kernel(
    name: str, parameters: str, dynamic: list[str], body: str, files: dict[str, str]
) -> Kernel:
    registers: dict[str, int] = {}
    shared: dict[str, int] = {}
    labels: dict[str, int] = {}
    code: list[Instruction] = []
    static, source = 0, ""
    for line in filter(None, map(str.strip, _scopes_opened(body).splitlines())):
        if match := re.fullmatch(r"([$%\w]+):", line):
            labels[match[1]] = len(code)
        elif match := re.match(r"\.loc\s+(\d+) (\d+)", line):
            source = f"{files.get(match[1], '?')}:{match[2]}"
        elif match := re.fullmatch(r"\.reg \.(\w+)\s+(%?\w+)(?:<(\d+)>)?;", line):
            names = [f"{match[2]}{i}" for i in range(int(match[3]))] if match[3] else [match[2]]
            registers |= dict.fromkeys(names, BITS[match[1]])
        elif match := re.fullmatch(r"\.shared \.align (\d+) \.(\w+) (\w+)(?:\[(\d+)\])?;", line):
            align, size = int(match[1]), BITS[match[2]] // 8 * int(match[4] or 1)
            shared[match[3]] = -(-static // align) * align
            static = shared[match[3]] + size
        elif NOTHING.match(line):
            pass
        elif line.startswith(".") or not line.endswith(";") or line.count(";") > 1:
            raise PtxError(f"{name}: {line!r} is not understood")
        else:
            code.append(_instruction(line[:-1], source))
    for symbol in dynamic:
        shared[symbol] = -(-static // 1024) * 1024
    return Kernel(name, _parameters(parameters), registers, shared, static, tuple(code), labels)


def _scopes_opened(body: str) -> str:
    """Put the statements of inline assembly's scopes, {.reg ...; ...}, on lines of their own.

    Their registers get names that no other scope has.
    """

    def opened(match: re.Match[str]) -> str:
        inside = match[1]
        for name in re.findall(r"\.reg \.\w+ (%?\w+);", inside):
            own = f"%scope{match.start()}_{name.strip('%')}"
            inside = re.sub(rf"(?<![\w%]){name}\b", own, inside)
        return inside.replace(";", ";\n")

    return re.sub(r"^\s*\{\s*(\.reg (?:[^{}]|\{[^{}]*\})*)\}", opened, body, flags=re.M)


def _instruction(line: str, source: str) -> Instruction:
    match = re.fullmatch(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", line)
    if match is None:
        raise PtxError(f"{line!r} is not understood")
    negated, guard, opcode, rest = match.groups()
    operands = re.findall(r"\[[^\]]*\]|[^\s,{}|]+", rest)
    if re.sub(r"[\s,{}|]", "", rest) != re.sub(r"\s", "", "".join(operands)):
        raise PtxError(f"{line!r} is not understood")
    text = re.sub(r"\s+", " ", line)
    return Instruction(text, opcode, guard, bool(negated), tuple(operands), source)
