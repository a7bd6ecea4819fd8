"""What this process has held of the memory that a backend's arrays lie in; here the machine's."""

import ctypes
import re
import sys
from pathlib import Path


def memory() -> int:
    """Return the most bytes of memory that this process has had resident.

    Linux's ``ru_maxrss`` of a child begins at what its parent held when it started it, so a small
    process started by a large one looks large; ``VmHWM`` is the process's own.
    """
    if sys.platform == "win32":
        return _of_windows()
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except FileNotFoundError:  # not Linux
        import resource

        scale = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    if found is None:
        raise RuntimeError("/proc/self/status has no VmHWM: this kernel does not count memory")
    return 1024 * int(found.group(1))


class _Counters(ctypes.Structure):
    """What Windows calls PROCESS_MEMORY_COUNTERS."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("page_faults", ctypes.c_uint32),
        ("most_resident", ctypes.c_size_t),
        ("others", ctypes.c_size_t * 7),
    ]


def _of_windows() -> int:
    if sys.platform != "win32":
        raise AssertionError("for Windows alone")
    kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
    kernel32.GetCurrentProcess.restype = ctypes.c_void_p
    ask = kernel32.K32GetProcessMemoryInfo
    ask.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Counters), ctypes.c_uint32]
    counters = _Counters(size=ctypes.sizeof(_Counters))
    if not ask(kernel32.GetCurrentProcess(), ctypes.byref(counters), counters.size):
        raise ctypes.WinError(ctypes.get_last_error())
    return int(counters.most_resident)
