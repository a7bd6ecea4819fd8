"""What this process has held of the memory that a backend's arrays lie in; here the machine's."""

import re
import resource
import sys
from pathlib import Path


def memory() -> int:
    """Return the most bytes of memory that this process has had resident.

    Linux's ``ru_maxrss`` of a child begins at what its parent held when it started it, so a small
    process started by a large one looks large; ``VmHWM`` is the process's own.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except FileNotFoundError:  # not Linux
        scale = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    if found is None:
        raise RuntimeError("/proc/self/status has no VmHWM: this kernel does not count memory")
    return 1024 * int(found.group(1))
