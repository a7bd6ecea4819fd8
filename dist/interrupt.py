"""Ctrl-C, and what else asks a command to end, become an exception where one comes through.

Python's own KeyboardInterrupt can come in the middle of anything. One that is raised while an
object is given up (``__del__``, a weak reference's callback), or in what the search for garbage
calls (``gc.callbacks``), is printed and forgotten, and one in what LLVM calls while a kernel is
loaded leaves it without an answer, which it does not survive; and one that comes while a process is
started leaves that without what it is to do, of which it complains. So the signal is put off there,
and comes again a moment later.
"""

import _thread
import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from accel import launcher
from accel.system import ENDING

AGAIN = 0.01  # seconds later
UNHEARD = 0.5  # seconds after which one that nobody has looked at comes once more
# what must not be left half done: LLVM's work, and what it calls back; the start of a process
WHOLE = ("llvmlite.binding.executionengine", "multiprocessing.popen_spawn_posix")
MAIN = threading.main_thread().ident or 0  # where Python looks at signals
_looked = 0  # how often a signal was looked at


class Ended(BaseException):  # no KeyboardInterrupt: a chat goes on after one
    """Something else than Ctrl-C asked this process to end.

    Attributes
    ----------
    signal : signal.Signals
    """

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(f"stopped by {self.signal.name}")


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise what a signal means, or see to it that the signal comes again."""
    global _looked
    _looked += 1
    told = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    files = (weakref.__file__, *map(_file, WHOLE))
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code.co_filename in files or code in told:
            # a bare thread: what was interrupted may hold any lock
            _thread.start_new_thread(_again, (number,))
            return
        frame = frame.f_back
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Ended(number)


def _file(module: str) -> str | None:
    return getattr(sys.modules.get(module), "__file__", None)


def _again(number: int) -> None:
    time.sleep(AGAIN)
    before = _looked
    _send(number)
    time.sleep(UNHEARD)
    # one that came just before a wait for the system began has not ended that wait
    while _looked == before and signal.getsignal(number) is interrupt:
        _send(number)
        time.sleep(UNHEARD)


def _send(number: int) -> None:
    if sys.platform == "win32":
        _thread.interrupt_main(signal.Signals(number))
    else:  # also out of a wait for the system
        signal.pthread_kill(MAIN, number)


@contextmanager
def raising() -> Iterator[None]:
    """Have signals that ask for an end raise, but those that the caller ignores (nohup).

    One of several ranks is killed by them: the others, which wait for it where MPI begins, are
    ended by the launcher then, and would not be for one that ends by itself.
    """
    usual = (signal.SIG_DFL, signal.default_int_handler)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.getsignal(n) for n in ENDING if signal.getsignal(n) in usual}
    try:
        for number in before:
            signal.signal(number, interrupt if launcher.size() == 1 else signal.SIG_DFL)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave() -> None:
    """Give the signals back to what they do without us: kill."""
    for number in ENDING:
        if signal.getsignal(number) in (interrupt, signal.default_int_handler):
            signal.signal(number, signal.SIG_DFL)
