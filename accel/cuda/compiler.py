"""NVRTC: from the text of a kernel file to machine code for one architecture.

NVRTC needs neither a GPU nor a driver, and the kernels need no headers, so that every kernel can be
compiled wherever CuPy and NVRTC's library are installed. CuPy's own ``RawModule`` would want CUDA's
headers; it is given the finished machine code instead. That is kept in the folder of the kernel
cache (``accel.jit``), under a name that hashes the text, the options and NVRTC's version.
"""

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from accel.cache_files import default_root
from accel.cuda import sources
from accel.system import move

OPTIONS = ("-std=c++17", "--ptxas-options=-v", "-lineinfo")  # of every kernel file


class Usage(NamedTuple):
    """What one kernel takes of a multiprocessor."""

    kernel: str
    registers: int  # of a thread
    stack: int  # bytes of local memory of a thread
    spills: int  # bytes stored to local memory for want of registers
    shared: int  # bytes of shared memory that the text declares; launchers ask for more
    serial: bool  # the assembler makes each wgmma wait for the one before, for want of what it says


class CompileError(Exception):
    """NVRTC refused a kernel: a fault of this project."""


def _nvrtc() -> Any:
    try:
        from cupy_backends.cuda.libs import nvrtc
    except ImportError as error:
        raise ImportError(
            "the backend 'cuda' needs CuPy, which is not installed or does not fit this Python: "
            "pip install 'myllm[cuda13]', or 'myllm[cuda12]' for older drivers "
            f"({first_line(error)})"
        ) from error
    return nvrtc


def nvrtc_version() -> tuple[int, int]:
    """Return NVRTC's version.

    Raises
    ------
    ImportError
        When CuPy or NVRTC's library is missing; the message says which.
    """
    nvrtc = _nvrtc()
    try:
        major, minor = nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        raise ImportError(
            "the backend 'cuda' compiles its kernels with NVRTC, whose library was not found: "
            "pip install nvidia-cuda-nvrtc (nvidia-cuda-nvrtc-cu12 beside cupy-cuda12x), or "
            f"install the CUDA toolkit ({first_line(error)})"
        ) from error
    return int(major), int(minor)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text: some list whole folders."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def compile_kernels(
    text: str, name: str, architecture: str, defines: Mapping[str, int]
) -> tuple[bytes, list[Usage]]:
    """Compile the text of a kernel file.

    Parameters
    ----------
    text, name : str
        What to compile, and what to call it in messages.
    architecture : str
        ``"sm_90a"``, say.
    defines : mapping
        Macros.

    Returns
    -------
    cubin : bytes
        Machine code.
    usage : list of Usage
        One for each kernel, in the order of the assembler's report.
    """
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(text, f"{name}.cu", [], [])
    try:
        nvrtc.compileProgram(program, options_of(architecture, defines))
        log = nvrtc.getProgramLog(program)
        # CuPy's binding cuts the last byte off as if it ended a text; it is one of the zeros of the
        # last program header's alignment
        return bytes(nvrtc.getCUBIN(program)) + b"\0", read_usage(log)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise CompileError(f"NVRTC refuses {name}.cu for {architecture}:\n{log}") from error
    finally:
        nvrtc.destroyProgram(program)


def options_of(architecture: str, defines: Mapping[str, int]) -> tuple[str, ...]:
    """Return all that NVRTC is told beside the text."""
    macros = (f"-D{macro}={value}" for macro, value in sorted(defines.items()))
    return (f"-arch={architecture}", *OPTIONS, *macros)


def read_usage(log: str) -> list[Usage]:
    """Read what the assembler (ptxas -v) says about each kernel."""
    found = []
    serial = set(re.findall(r"wgmma\S* instructions are serialized .*function '(\w+)'", log))
    for part in re.split(r"Compiling entry function '", log)[1:]:
        numbers = {}
        for key, pattern in (
            ("registers", r"Used (\d+) registers"),
            ("stack", r"(\d+) bytes stack frame"),
            ("spills", r"(\d+) bytes spill stores"),
        ):
            match = re.search(pattern, part)
            if match is None:
                raise CompileError(f"the assembler's report is not as expected:\n{log[:2000]}")
            numbers[key] = int(match.group(1))
        declared = re.search(r"(\d+) bytes smem", part)  # left out where there is none
        numbers["shared"] = int(declared.group(1)) if declared else 0
        kernel = part.split("'")[0]
        found.append(Usage(kernel, serial=kernel in serial, **numbers))
    return found


def cubin_file(source: str, architecture: str, defines: Mapping[str, int]) -> Path:
    """Return a file with the machine code of a kernel file, compiled now or earlier."""
    text = sources.join(sources.parts(source))
    parts = [text, *options_of(architecture, defines), repr(nvrtc_version()), "whole"]
    name = f"{source}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:20]}.cubin"
    path = (default_root() or Path(tempfile.mkdtemp(prefix="myllm-"))) / "cuda" / name
    if not path.exists():
        keep(path, compile_kernels(text, source, architecture, defines)[0])
    return path


def keep(path: Path, content: bytes) -> None:
    """Write a file aside and rename it: ranks that start together never read half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    move(Path(partial), path)
