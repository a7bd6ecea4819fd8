"""A device whose launches run the PTX that NVRTC makes of the kernels, for sm_80 or sm_90a.

Memory, copies and dense products are the shim's. The kernels' text is compiled as ``compiler.py``
compiles it, so that the other body of each primitive is what runs: inline PTX. Arguments reach a
kernel as bytes in the order and at the places that the driver gives them.
"""

import functools
import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from accel.cuda import compiler, sources
from accel.cuda.device import Argument
from tests.cuda_shim.device import ORDERS, ShimDevice, cache
from tests.ptx.parse import Kernel, Parameter, PtxError, parse
from tests.ptx.program import Program

# the PTX of sm_80 and sm_90a, without what their assembler makes of it
PLAIN, HOPPER = "compute_80", "compute_90a"


class PtxDevice(ShimDevice):
    """The shim's device with another machine for its kernels.

    Parameters
    ----------
    order, how
        As the shim's.
    edited : str or None
        The kernel file that ``edits`` are made for, where others are to stay as they are.

    Attributes
    ----------
    programs : mapping
        (source, macros, kernel) -> what ran.
    """

    def __init__(self, order: str = "forward", *, edited: str | None = None, **how: Any) -> None:
        super().__init__(order, **how)
        self.edited = edited
        self.programs: dict[tuple[str, tuple[tuple[str, int], ...], str], Program] = {}

    def launch(
        self,
        source: str,
        kernel: str,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Sequence[Argument],
        *,
        shared: int,
        defines: Mapping[str, int],
    ) -> None:
        how = {"shared": shared, "defines": defines}
        if self.later(PtxDevice.launch, source, kernel, grid, threads, list(arguments), **how):
            return
        if shared > self.shared_limit:
            raise PtxError(f"{kernel}: a block can have {self.shared_limit} bytes, not {shared}")
        key = source, tuple(sorted(defines.items())), kernel
        if key not in self.programs:
            self.programs[key] = program_of(self.ptx(source, defines), kernel)
        program = self.programs[key]
        self.launches.append(kernel)
        program.launch(
            grid,
            threads,
            shared,
            laid_out(program.kernel, arguments),
            [_bytes_of(a) for a in arguments if isinstance(a, np.ndarray) and a.size],
            order=ORDERS[self.order],
            seed=len(self.launches),
            early=self.early,
        )

    def ptx(self, source: str, defines: Mapping[str, int]) -> str:
        """Return the PTX of a file, edits and all."""
        if self.edited in (None, source):
            text = self._text(source).split("\nSHIM_EXPORT(")[0]  # the other compiler's exports
        else:
            text = sources.join(sources.parts(source))
        return compiled(text, source, defines, HOPPER if self.warpgroups else PLAIN)


module_of = functools.cache(parse)  # of the text of a file, for all devices


@functools.cache
def program_of(text: str, kernel: str) -> Program:
    """Return a kernel of a file, for all devices: they differ in how they launch it."""
    return Program(module_of(text)[kernel])


def compiled(text: str, name: str, defines: Mapping[str, int], architecture: str) -> str:
    """Return what NVRTC makes of the text of kernels, now or earlier."""
    options = [o for o in compiler.options_of(architecture, defines) if "ptxas" not in o]
    parts = [text, *options, repr(compiler.nvrtc_version())]
    path = cache() / f"{name}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:20]}.ptx"
    if not path.exists():
        nvrtc = compiler._nvrtc()
        program = nvrtc.createProgram(text, f"{name}.cu", [], [])
        try:
            nvrtc.compileProgram(program, options)
            made = nvrtc.getPTX(program)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise PtxError(f"NVRTC refuses {name}.cu:\n{log}") from error
        finally:
            nvrtc.destroyProgram(program)
        handle, partial = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(made.rstrip(b"\0"))
        os.replace(partial, path)
    return path.read_text(encoding="utf-8")


def laid_out(kernel: Kernel, arguments: Sequence[Argument]) -> bytes:
    """Return a kernel's parameters in memory; an argument of another width or kind is an error."""
    declared = kernel.parameters
    if len(declared) != len(arguments):
        raise PtxError(f"{kernel.name} has {len(declared)} parameters, got {len(arguments)}")
    # what lies between parameters is not zero
    memory = bytearray(b"\xa5" * (declared[-1].offset + declared[-1].size if declared else 0))
    for i, (parameter, argument) in enumerate(zip(declared, arguments, strict=True)):
        value = _value_of(argument)
        _check(f"{kernel.name}, argument {i}", parameter, argument, value)
        memory[parameter.offset : parameter.offset + parameter.size] = value
    return bytes(memory)


def _value_of(argument: Argument) -> bytes:
    if argument is None:
        return bytes(8)
    if isinstance(argument, np.ndarray):
        return int(argument.ctypes.data).to_bytes(8, "little")
    return argument.tobytes()


def _check(what: str, parameter: Parameter, argument: Argument, value: bytes) -> None:
    if len(value) != parameter.size:
        raise PtxError(
            f"{what} has {len(value)} bytes, and the kernel reads {parameter.size} "
            f"(.{parameter.type})"
        )
    is_float = isinstance(argument, np.floating)
    if is_float != parameter.type.startswith("f"):
        kind = "a float" if is_float else "none"
        raise PtxError(f"{what} is {kind}, and the kernel reads .{parameter.type}")


def _bytes_of(array: Any) -> tuple[int, int]:
    first, end = np.lib.array_utils.byte_bounds(array)
    return int(first), int(end)
