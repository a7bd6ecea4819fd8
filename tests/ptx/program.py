"""From instructions to the table that ``machine.cpp`` executes, by way of g++ and ctypes."""

import ctypes
import functools
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from reference.types import Array
from tests.cuda_shim.device import cache
from tests.ptx.parse import Instruction, Kernel, PtxError

HERE = Path(__file__).parent
# -march=native: fma is one instruction, not a call; nothing else may join products and sums
FLAGS = ["-std=c++20", "-O1", "-march=native", "-fwrapv", "-ffp-contract=off", "-shared", "-fPIC"]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
# special registers (chapter 10), in the order that machine.cpp fills their rows in
SPECIAL = [f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"]
SPECIAL += ["%laneid"]
BRANCHES = ("bra", "bra.uni")


@functools.cache
def machine() -> ctypes.CDLL:
    """Return the machine, compiled now or earlier."""
    command = ["g++", *FLAGS, *WARNINGS]
    # not by where the files lie, so that one clone finds what another has compiled
    hashed = hashlib.sha256("\0".join(command).encode())
    for path in sorted((*HERE.glob("*.h"), *HERE.glob("*.cpp"))):
        hashed.update(path.read_bytes())
    library = cache() / f"ptx-{hashed.hexdigest()[:20]}.so"
    if not library.exists():
        handle, partial = tempfile.mkstemp(dir=library.parent, suffix=".so")
        os.close(handle)
        done = subprocess.run(
            [*command, HERE / "machine.cpp", "-o", partial],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            os.unlink(partial)
            raise PtxError(f"g++ refuses machine.cpp:\n{done.stderr[:4000]}")
        os.replace(partial, library)
    loaded = ctypes.CDLL(str(library))
    loaded.ptx_program.restype = ctypes.c_void_p
    loaded.ptx_launch.restype = ctypes.c_char_p
    return loaded


class Program:
    """A kernel that can be launched.

    Parameters
    ----------
    kernel : Kernel
        What was parsed.
    """

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self._rows = {name: i for i, name in enumerate(SPECIAL)}
        self._bits = {**dict.fromkeys(SPECIAL, 32), **kernel.registers}
        for name in kernel.registers:
            self._rows[name] = len(self._rows)
        self._registers = len(self._rows)
        self._constants: dict[int, int] = {}  # value -> number
        table: list[int] = []
        for instruction in kernel.code:
            table += self._encode(instruction)
        error = ctypes.c_char_p()
        names = (ctypes.c_char_p * len(kernel.code))(*(i.opcode.encode() for i in kernel.code))
        code = np.array(table, np.int64)
        constants = np.array(list(self._constants), np.uint64)
        self._program = machine().ptx_program(
            names,
            _pointer(code),
            ctypes.c_int64(len(kernel.code)),
            ctypes.c_int64(self._registers),
            _pointer(constants),
            ctypes.c_int64(len(constants)),
            ctypes.byref(error),
        )
        if not self._program:
            raise PtxError(f"{kernel.name}: {(error.value or b'').decode()}")

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        shared: int,
        parameters: bytes,
        memory: Sequence[tuple[int, int]],
        *,
        order: int,
        seed: int,
        early: bool,
    ) -> None:
        """Run a grid; ``memory`` are the first and the last but one byte of each array given."""
        where = ctypes.c_int64(-1)
        cells = [(p.offset, p.offset + p.size) for p in self.kernel.parameters]
        ranges = [np.array(pairs, np.uint64).reshape(-1, 2) for pairs in (cells, memory)]
        message = machine().ptx_launch(
            ctypes.c_void_p(self._program),
            (ctypes.c_uint32 * 3)(*grid),
            ctypes.c_uint32(threads),
            ctypes.c_uint32(max(self.kernel.shared.values(), default=self.kernel.static) + shared),
            parameters,
            _pointer(ranges[0]),
            ctypes.c_int64(len(ranges[0])),
            _pointer(ranges[1]),
            ctypes.c_int64(len(ranges[1])),
            ctypes.c_int(order),
            ctypes.c_uint32(seed),
            ctypes.c_int(early),
            ctypes.byref(where),
        )
        if message is not None:
            at = ""
            if where.value >= 0:
                instruction = self.kernel.code[where.value]
                at = f", at {instruction.text!r} of {instruction.source or 'the text'}"
            raise PtxError(f"{self.kernel.name}: {message.decode()}{at}")

    def ran(self) -> Array:
        """Return how often each instruction has run, of a warp's lanes one or more."""
        counts = np.zeros(len(self.kernel.code), np.uint64)
        machine().ptx_ran(ctypes.c_void_p(self._program), _pointer(counts))
        return counts

    # ---- the table -----------------------------------------------------------------------------

    def _encode(self, instruction: Instruction) -> list[int]:
        operands, target = instruction.operands, -1
        if instruction.opcode in BRANCHES:
            (label,) = operands
            if label not in self.kernel.labels:
                raise PtxError(f"{self.kernel.name}: there is no label {label}")
            operands, target = (), self.kernel.labels[label]
        guard = -1 if instruction.guard is None else self._row(instruction.guard)
        row = [guard, int(instruction.negated), target, len(operands)]
        for operand in operands:
            row += self._operand(operand)
        return row

    def _row(self, register: str) -> int:
        if register not in self._rows:
            raise PtxError(f"{self.kernel.name}: there is no register {register}")
        return self._rows[register]

    def _operand(self, text: str) -> tuple[int, int, int]:
        """Return row, bits and offset: a register, a constant, or an address with its offset."""
        offset = 0
        if text.startswith("["):
            text, sign, number = re.fullmatch(
                r"\[\s*([^+\s-]+)\s*(?:([+-]+)(\d+))?\s*\]", text
            ).groups()  # type: ignore[union-attr]
            offset = int(number or 0) * (-1 if "-" in (sign or "") else 1)
        if text in self._rows:
            return self._rows[text], self._bits[text], offset
        number = self._constants.setdefault(self._value(text) % 2**64, len(self._constants))
        return self._registers + number, 0, offset

    def _value(self, text: str) -> int:
        """Return the bits of a constant (4.5), or the address of a variable in its space."""
        if text in self.kernel.shared:
            return self.kernel.shared[text]
        for parameter in self.kernel.parameters:
            if parameter.name == text:
                return parameter.offset
        if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", text):
            return int(match[1] or match[2], 16)
        if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", text):
            return int(text, 0)
        raise PtxError(f"{self.kernel.name}: the operand {text!r} is not understood")


def _pointer(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
