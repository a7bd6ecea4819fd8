"""What differs between Linux, macOS and Windows, for all packages but ``reference/``.

All of it is run on Linux. What the others lack is left out here, and each function says what stands
in its place; ``tests/test_machines.py`` takes away what is Linux's own, and runs the commands.
"""

import contextlib
import ctypes
import faulthandler
import mmap
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
PATIENCE = 2.0  # seconds that Windows is given to close what somebody else reads

# What asks a process to end: Ctrl-C, a scheduler, a terminal that goes away; Windows' Ctrl-Break.
ENDING = tuple(
    signal.Signals[name]
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
    if name in signal.Signals.__members__
)
# What our launcher hands to ranks in place of those; none where there is no launcher of ours.
HANDED_ON: signal.Signals | None = signal.Signals.__members__.get("SIGUSR1")
# What it means on Windows alone that another process has a file open.
IN_USE: tuple[type[OSError], ...] = (PermissionError,) if sys.platform == "win32" else ()


# ---- processor and memory ------------------------------------------------------------------------


def cores() -> int:
    """Return how many processor cores this process may use; macOS and Windows tell of all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def starved() -> float | None:
    """Return for how many seconds threads of this process were ready to run, and had no core.

    All threads together, those that have ended left out (proc(5), schedstat). None where the system
    does not count that: macOS, Windows, a Linux without that file.
    """
    if sys.platform != "linux" or not os.path.exists("/proc/self/schedstat"):
        return None
    waited = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            waited += int(Path(f"/proc/self/task/{task}/schedstat").read_bytes().split()[1])
    return waited / 1e9


def fresh_memory(length: int) -> mmap.mmap:
    """Return so many bytes of the system's own, in huge pages where it has them."""
    if sys.platform == "win32":
        return mmap.mmap(-1, length)
    # private: a forked child gets a copy, and Linux gives huge pages to no other kind
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel without huge pages is only slower
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def give_back(memory: mmap.mmap, start: int, length: int) -> None:
    """Let Linux take these pages of fresh memory until they are written again."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # pages that are locked stay
            memory.madvise(mmap.MADV_DONTNEED, start, length)


def keep_memory() -> None:
    """Have the C library of Linux keep what is freed, up to 32 MiB at once, for what comes next.

    Else it gives large arrays back to the system at once, and every page of the next is found and
    cleared anew: that takes longer than most of what is done with an array. (mallopt(3); musl has
    no such function.)
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, 32 << 20)
            mallopt(M_TRIM_THRESHOLD, 1 << 30)


@contextlib.contextmanager
def bounded_memory(more: int) -> Iterator[None]:
    """Let what asks for so many bytes more than there are now raise MemoryError; on Linux alone."""
    if sys.platform != "linux":
        yield
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + more
    if soft != resource.RLIM_INFINITY:
        most = min(most, soft)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# ---- files ---------------------------------------------------------------------------------------


def open_lock(path: Path, mode: int) -> int:
    """Return the descriptor of a lock file, which is made; never through a link, where one may lie.

    What is held ends with the descriptor, so with the process, however that ends.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), mode)


def lock(descriptor: int, *, wait: bool) -> bool:
    """Take the lock of an open file, or tell that another has it."""
    from filelock import lock_descriptor  # here: what takes no lock, as a GPU's tests, does without

    return lock_descriptor(descriptor, blocking=wait)


def move(source: Path, target: Path) -> None:
    """Give a file or a folder another name, in one step; a file takes the place of another.

    Windows moves nothing that somebody has open, a scanner of viruses say: it is waited for.
    """
    end = time.monotonic() + PATIENCE
    while True:
        try:
            source.replace(target)
            return
        except IN_USE:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk before returning; Windows has no such order."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def forget(file: int) -> None:
    """Have Linux give back the memory that holds what a file has on the disk."""
    if sys.platform == "linux":
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def past_memory(file: int, *, on: bool) -> bool:
    """Have Linux write an open file past its own memory, or no longer, and tell whether it does.

    Only whole pages can be written so, out of memory that begins where a page does.
    """
    if sys.platform != "linux":
        return False
    import fcntl

    flags = fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT
    with contextlib.suppress(OSError):  # not every file system can
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags)
        return on
    return False


def private(info: os.stat_result) -> bool:
    """Whether nobody but this user and root can write what has this status.

    On Windows it does not tell, and True is returned: who may write is in lists of their own.
    """
    if sys.platform == "win32":
        return True
    return info.st_uid in (os.getuid(), 0) and not stat.S_IMODE(info.st_mode) & 0o022


def user_name() -> str:
    """Return what tells this user's files from others' where all may write: Windows has no such."""
    if sys.platform == "win32":
        return "user"
    return str(os.getuid())


def cache_home() -> Path | None:
    """Return the folder of what this user's programs can make again; None without a home."""
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        return None
    if sys.platform == "darwin":
        return Path(home, "Library", "Caches")
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path(home, "AppData", "Local"))
    return Path(os.environ.get("XDG_CACHE_HOME") or Path(home, ".cache"))


def write_utf8() -> None:
    """Have Windows write to files and pipes, too, what we print: its own codes lack letters."""
    if sys.platform == "win32":
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(encoding="utf-8")


# ---- processes -----------------------------------------------------------------------------------


def out_of_reach() -> dict[str, Any]:
    """Return what ``subprocess.Popen`` is told, so that the terminal's Ctrl-C is ours alone."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Have processes that start within not hear of Ctrl-C, nor of a terminal that goes away.

    They inherit what is blocked here; what comes meanwhile is heard here behind it.
    """
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ends_with_us() -> dict[str, Any]:
    """Return the same for a process that is to be asked to end should this one be killed."""
    # in the child, between fork and exec
    return {"preexec_fn": end_with_parent} if sys.platform == "linux" else {}


def end_with_parent(*, kill: bool = False) -> None:
    """Have Linux ask this process to end, or kill it, when the one that started it goes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL if kill else signal.SIGTERM)


def adopt() -> None:
    """Have Linux make what children leave behind children of this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def ask_to_end(process: "subprocess.Popen[Any]") -> None:
    """Send a process what it can catch: it was started ``out_of_reach``."""
    if sys.platform == "win32":  # where SIGTERM would kill
        process.send_signal(signal.CTRL_BREAK_EVENT)
    else:
        process.terminate()


_ending = False


def end_within(seconds: int) -> bool:
    """Have this process ended after some seconds whatever it does; tell if it was to be already."""
    global _ending
    before, _ending = _ending, True
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)
    else:
        faulthandler.dump_traceback_later(seconds, exit=True)
    return before
