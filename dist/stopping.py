"""Signals that ask for an end, which comes when what is under way is saved."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from accel import launcher
from accel.system import ENDING, HANDED_ON
from dist.comm import warn

NOHUP = "MYLLM_NOHUP"  # in the environment: our launcher was told to ignore SIGHUP


def same_command(*, set_back: bool) -> str:
    """Return what goes on from the newest checkpoint: ``--from`` would go back once more."""
    return "the same command without --from" if set_back else "the same command"


class StopRequest:
    """A signal that asks the run to end after the step under way, leaving a checkpoint.

    SIGINT is Ctrl-C, SIGTERM what schedulers send, SIGHUP a terminal that goes away
    (on Windows SIGBREAK is Ctrl-Break, and what a sweep sends), SIGUSR1 what
    our own launcher hands on in place of them, because mpirun kills its ranks a moment after
    passing SIGTERM to them.

    Before the first step is finished there is nothing to save, and the process ends at once. Python
    itself looks at signals between two lines of its main thread only, which may be waiting in MPI
    or in the compiler for minutes. So a thread hears of them too, and ends the process as a kill
    would: every file that we write survives that.
    """

    SIGNALS = ENDING if HANDED_ON is None else (*ENDING, HANDED_ON)

    def __init__(self) -> None:
        self.signal: int | None = None
        self.learned = False  # a step was finished: there is something to save

    @classmethod
    def heard(cls) -> list[signal.Signals]:
        """Return the signals to listen to: what the caller ignores stays ignored (SIGHUP by nohup),
        all but SIGUSR1, which an earlier run of this process may have left so.
        """
        return [
            number
            for number in cls.SIGNALS
            if number == HANDED_ON or signal.getsignal(number) != signal.SIG_IGN
        ]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice by hand: at once, then
        self.signal = number

    def _hear(self, numbers: socket.socket) -> None:
        while number := numbers.recv(1):
            if self.learned or number[0] not in self.SIGNALS:
                continue
            # of several ranks each is handed SIGUSR1: the launcher says what it was sent
            if number[0] != HANDED_ON or launcher.size() == 1:
                name = signal.Signals(number[0]).name
                warn(f"stopped by {name} before the first step was finished: nothing to save")
            os._exit(128 + number[0])

    @contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        """Catch the signals inside this block.

        MPI must have been started: it catches signals of its own, in place of ours.
        """
        for number in ENDING:
            if number.name == "SIGHUP" and NOHUP in os.environ:
                signal.signal(number, signal.SIG_IGN)
        numbers, written = socket.socketpair()
        written.setblocking(False)
        thread = threading.Thread(target=self._hear, args=(numbers,), daemon=True)
        thread.start()
        fd_before = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        before = {number: signal.signal(number, self._note) for number in self.heard()}
        try:
            yield self
        finally:
            for number, handler in before.items():
                # the launcher may hand a signal on until this process is gone, and left to itself
                # SIGUSR1 kills
                signal.signal(number, signal.SIG_IGN if number == HANDED_ON else handler)
            signal.set_wakeup_fd(fd_before)
            written.close()
            thread.join()
            numbers.close()
