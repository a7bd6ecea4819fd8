"""Linux without what is Linux's own: ``python elsewhere.py SYSTEM -m MODULE …`` runs a module so.

Under ``win32`` and ``darwin`` the modules, functions and signals that the other system lacks are
gone, ``sys.platform`` says its name, and what it refuses is refused: on Windows, to move or remove
what this process has open, to open a folder, to flush a file that was opened for reading, to start
a process with what is POSIX's. Processes that are started are of the same kind. What is loaded
before, Python's library and other packages, is Linux's; only our own code sees the other system.
"""

import contextlib
import ctypes
import importlib
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parent.parent.parent)
LOADED_BEFORE = (
    "asyncio concurrent.futures.process multiprocessing.synchronize multiprocessing.queues "
    "tempfile multiprocessing.resource_tracker multiprocessing.resource_sharer "
    "multiprocessing.popen_spawn_posix numpy.random numba numba.np.ufunc.parallel llvmlite msgspec "
    "psutil regex rich.console "
    "rich.progress safetensors.numpy threadpoolctl filelock urllib.request sysconfig tokenize zlib "
    "http.server unittest.mock numba.np.ufunc.omppool numba.np.ufunc.workqueue"
)
# what draws and serves, a second's work, where EXTRAS is in the environment
EXTRAS = (
    "matplotlib.figure matplotlib.backends.backend_agg uvicorn starlette.applications "
    "starlette.responses"
)
# None stands for a module that an import then does not find: one that the other system lacks, or,
# as torch, whose Linux package loads itself as Windows' would be
MODULES = {
    "win32": "fcntl resource pwd grp termios tty pty readline syslog crypt spwd torch",
    "darwin": "",
}
MISSING = {
    "win32": {
        "os": "fork forkpty register_at_fork sched_getaffinity getuid geteuid getgid getegid "
        "posix_fadvise POSIX_FADV_DONTNEED getpgid getpgrp killpg setsid setpgid nice uname "
        "statvfs sysconf fchmod fchown chown lchown mkfifo getloadavg wait3 wait4 posix_spawn "
        "posix_fallocate memfd_create sendfile "
        "O_CLOEXEC O_NOFOLLOW O_DIRECTORY O_NONBLOCK O_SYNC",
        "signal": "SIGHUP SIGUSR1 SIGUSR2 SIGKILL SIGSTOP SIGCONT SIGQUIT SIGPIPE SIGALRM SIGCHLD "
        "SIGBUS alarm setitimer getitimer pause pthread_kill sigwait",
        "mmap": "MAP_PRIVATE MAP_ANONYMOUS MAP_SHARED MADV_HUGEPAGE",
    },
    "darwin": {
        "os": "sched_getaffinity posix_fadvise memfd_create",
        "mmap": "MADV_HUGEPAGE MAP_POPULATE",
    },
}
OURS = r"(reference|accel|dist|tokenizer)\b"
CAUGHT = ("SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIGBREAK")  # on Windows


def become(system: str) -> None:
    """Take away from this process what the system has not."""
    warnings.simplefilter("ignore", EncodingWarning)  # of others
    for name in f"{LOADED_BEFORE} {EXTRAS if 'EXTRAS' in os.environ else ''}".split():
        with contextlib.suppress(ImportError):  # an extra
            importlib.import_module(name)
    start = subprocess.Popen.__init__
    for name in MODULES[system].split():
        sys.modules[name] = None  # type: ignore[assignment]
    for name, attributes in MISSING[system].items():
        module = importlib.import_module(name)
        for attribute in attributes.split():
            if hasattr(module, attribute):
                delattr(module, attribute)
    _hide_proc()
    warnings.filterwarnings("error", category=EncodingWarning, module=OURS)
    if system == "win32":
        _refuse_as_windows()
    subprocess.Popen.__init__ = _popen(system, start)  # type: ignore[method-assign]
    real = _Real()
    for name, module in [*sys.modules.items()]:
        of_others = module is not None and vars(module) is not globals()
        if of_others and vars(module).get("sys") is sys and "importlib" not in name:
            module.sys = real  # type: ignore[attr-defined]
    sys.platform = system


class _Real:
    """The module ``sys`` as those see it who were loaded before."""

    def __getattr__(self, name: str) -> Any:
        return "linux" if name == "platform" else getattr(sys, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(sys, name, value)


def _ours(depth: int) -> bool:
    """Whether it is our code that called, through Python's library or at once."""
    frame: types.FrameType | None = sys._getframe(depth)
    library = os.path.dirname(os.__file__)
    while frame is not None:
        file = frame.f_code.co_filename
        if "-packages" in file:
            return False
        if file != __file__ and not file.startswith((library, "<frozen")):
            return file.startswith(ROOT)
        frame = frame.f_back
    return False


def _hide_proc() -> None:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not str(arguments[0]).startswith("/proc/"):
            return
        if sys._getframe(1).f_code.co_filename != __file__ and _ours(2):
            raise FileNotFoundError(2, "there is no such folder here", arguments[0])

    sys.addaudithook(hook)


# ---- Windows -------------------------------------------------------------------------------------


def _opened(path: str) -> bool:
    """Whether this process has a file open, or one in the folder of this name."""
    path = os.path.realpath(path)
    for number in _listdir("/proc/self/fd"):
        try:
            file = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if file == path or file.startswith(path + "/"):
            return True
    return False


_listdir = os.listdir


def _refuse_as_windows() -> None:
    members = {n: s for n, s in signal.Signals.__members__.items() if n in CAUGHT}
    breaking = int.__new__(signal.Signals, 21)
    breaking._name_, breaking._value_ = "SIGBREAK", 21
    members["SIGBREAK"] = breaking
    signal.Signals._member_map_ = members  # type: ignore[misc]
    signal.Signals._value2member_map_[21] = breaking
    signal.SIGBREAK = breaking  # type: ignore[attr-defined]
    signal.CTRL_BREAK_EVENT = breaking  # type: ignore[attr-defined]
    subprocess.CREATE_NEW_PROCESS_GROUP = 0x200  # type: ignore[attr-defined]
    listen = signal.signal

    def only_those(number: int, handler: Any) -> Any:
        if number not in members.values():
            raise ValueError(f"signal {number} cannot be caught on Windows")
        return listen(number, handler)

    def kill(self: Any) -> None:
        self.send_signal(9)

    subprocess.Popen.kill = kill  # type: ignore[method-assign]
    signal.signal = only_those  # type: ignore[assignment]
    os.replace = _moving(os.replace, takes_place=True)  # type: ignore[assignment]
    os.rename = _moving(os.rename, takes_place=False)  # type: ignore[assignment]
    for name in ("unlink", "remove", "rmdir"):
        setattr(os, name, _removing(getattr(os, name)))
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    shutil.rmtree.avoids_symlink_attacks = False  # type: ignore[attr-defined]
    tempfile.TemporaryFile = tempfile.NamedTemporaryFile  # as it is on Windows
    os.open = _opening(os.open)  # type: ignore[assignment]
    os.fsync = _flushing(os.fsync)  # type: ignore[assignment]
    ctypes.WinDLL = _kernel32  # type: ignore[attr-defined]


def _moving(move: Callable[..., Any], *, takes_place: bool) -> Callable[..., Any]:
    def moved(source: Any, target: Any, **options: Any) -> Any:
        if _ours(2):
            if _opened(source) or _opened(target):
                raise PermissionError(13, "a file is open", str(source))
            if os.path.lexists(target):
                if not takes_place:
                    raise FileExistsError(17, "there is one already", str(target))
                if os.path.isdir(target) or os.path.isdir(source):
                    raise PermissionError(13, "a folder takes no place", str(target))
        return move(source, target, **options)

    return moved


def _removing(remove: Callable[..., Any]) -> Callable[..., Any]:
    def removed(path: Any, **options: Any) -> Any:
        if _ours(2) and _opened(path):
            raise PermissionError(13, "the file is open", str(path))
        return remove(path, **options)

    return removed


def _opening(opened: Callable[..., int]) -> Callable[..., int]:
    def open_(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if os.path.isdir(path) and _ours(2):
            raise PermissionError(13, "a folder cannot be opened", str(path))
        return opened(path, flags, *rest, **options)

    return open_


def _flushing(fsync: Callable[[Any], None]) -> Callable[[Any], None]:
    def flush(file: Any) -> None:
        number = file if isinstance(file, int) else file.fileno()
        with open(f"/proc/self/fdinfo/{number}") as info:
            flags = next(int(line.split()[1], 8) for line in info if line.startswith("flags"))
        if flags & 3 == 0:
            raise OSError(9, "it was opened for reading")
        fsync(file)

    return flush


def _kernel32(name: str, **options: Any) -> Any:
    """Stand in for the library that tells how much memory a process has had."""

    def ask(process: Any, counters: Any, size: int) -> int:
        words = ctypes.cast(counters, ctypes.POINTER(ctypes.c_size_t))
        assert size == 72 and words[0] == 72  # its size, and no page faults so far
        words[1] = 123 << 20  # bytes: the most that were resident
        return 1

    def current() -> int:
        return -1

    return types.SimpleNamespace(GetCurrentProcess=current, K32GetProcessMemoryInfo=ask)


def _popen(system: str, start: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        if not _ours(2):
            start(self, args, *rest, **options)
            return
        if system == "win32":
            for name in ("preexec_fn", "pass_fds", "start_new_session", "process_group"):
                if options.get(name):
                    raise ValueError(f"{name} is not supported on Windows platforms")
            options.pop("creationflags", None)
        elif options.get("creationflags"):
            raise ValueError("creationflags is only supported on Windows platforms")
        if args[0] == sys.executable:
            args = [sys.executable, __file__, system, *args[1:]]
        start(self, args, *rest, **options)

    return init


def main() -> None:
    """Run ``-m MODULE ARGUMENTS`` or ``-c CODE`` as Python would."""
    system, *rest = sys.argv[1:]
    sys.path[0:1] = [ROOT]
    rest = rest[1:] if rest[0] == "-P" else rest
    how, what, *arguments = rest
    become(system)
    if how == "-c":
        sys.argv = ["-c", *arguments]
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [what, *arguments]
        runpy.run_module(what, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
