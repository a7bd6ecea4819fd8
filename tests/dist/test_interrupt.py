"""Signals that ask a command to end, wherever they come."""

import ctypes
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from dist import cli, interrupt, pack
from dist.documents import Document, Part
from tokenizer import train_from_iterator


def wait() -> None:
    time.sleep(60)


def in_del() -> None:
    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)
            self.kept = 1

    Dying()
    wait()


def in_a_callback() -> None:
    class Dying:
        pass

    dying = Dying()
    weakref.finalize(dying, signal.raise_signal, signal.SIGINT)
    del dying
    gc.collect()
    wait()


def in_the_collector() -> None:
    """Search for garbage, of which others are told: Hypothesis, say."""

    def told(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            signal.raise_signal(signal.SIGINT)

    gc.callbacks.append(told)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(told)
    wait()


class Interrupting:
    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        signal.raise_signal(signal.SIGINT)
        return int, (0,)


def while_a_process_starts() -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=time.sleep, args=(Interrupting(),)
    )
    try:
        process.start()
        wait()
    finally:
        process.join()
    assert process.exitcode == 0


def in_llvm() -> None:
    """Load code by way of an object cache, as Numba does; what it calls has no way to fail."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly("define i32 @seven() { ret i32 7 }")
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(module, machine)
    asked = []

    def notify(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        asked.append("compiled")

    def get(*_: object) -> None:
        asked.append("asked for")

    engine.set_object_cache(notify, get)
    engine.finalize_object()
    seven = ctypes.CFUNCTYPE(ctypes.c_int)(engine.get_function_address("seven"))
    assert seven() == 7 and asked == ["asked for", "compiled"]
    wait()


@pytest.mark.parametrize(
    "where", [wait, in_del, in_a_callback, in_the_collector, while_a_process_starts, in_llvm]
)
def test_ctrl_c_is_heard_where_it_would_be_lost(where: Callable[[], None]) -> None:
    started = time.monotonic()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interrupt.raising():
        if where is wait:
            signal.raise_signal(signal.SIGINT)
        where()
    assert time.monotonic() - started < 30 and signal.getsignal(signal.SIGINT) is before


def test_one_that_comes_just_before_a_wait_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, kill = [], signal.pthread_kill

    def lost_at_first(thread: int, number: int) -> None:
        sent.append(number)
        if len(sent) > 1:
            kill(thread, number)

    monkeypatch.setattr(signal, "pthread_kill", lost_at_first)
    with pytest.raises(KeyboardInterrupt), interrupt.raising():
        in_del()
    assert sent == [signal.SIGINT] * 2


def test_one_that_was_heard_comes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "UNHEARD", 0.05)
    with pytest.raises(KeyboardInterrupt), interrupt.raising():
        in_del()
    with interrupt.raising():
        time.sleep(0.3)  # in which it would come


def test_other_signals_end_a_command_and_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(argv: list[str]) -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
            wait()
        except KeyboardInterrupt:  # as a chat takes it
            return 0
        return 1

    monkeypatch.setattr(cli, "loaded", lambda name: command)
    assert cli.main(["plan"]) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "myllm plan: stopped by SIGTERM\n"


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows kills in other ways")
def test_one_of_several_ranks_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it in MPI, and their launcher ends them when it is killed alone."""
    monkeypatch.setenv("PMI_SIZE", "2")
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    before = [signal.getsignal(number) for number in signals]
    with interrupt.raising():
        assert [signal.getsignal(number) for number in signals] == [signal.SIG_DFL] * 3
    assert [signal.getsignal(number) for number in signals] == before


def test_what_the_caller_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with interrupt.raising():
            signal.raise_signal(signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="has no groups of processes")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_packing_that_is_asked_to_end_says_so_in_a_line(
    number: signal.Signals, tmp_path: Path
) -> None:
    train_from_iterator(["the cat sat on the mat"], 276).save(tmp_path / "t.tok")
    words = ["pack", "-", "--tokenizer", tmp_path / "t.tok", "-o", tmp_path / "out"]
    packing = subprocess.Popen(
        [sys.executable, "-m", "dist", *map(str, words), "--processes", "2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # the signal goes to all of its processes, as from a terminal
    )
    assert packing.stdin is not None
    text = b"".join(b"word%d in a line\n" % i for i in range(100_000))
    packing.stdin.write(text)  # more than a pipe holds: it reads
    packing.stdin.flush()
    os.killpg(packing.pid, number)
    said = packing.communicate(timeout=60)[1].decode()
    last = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
    assert said == f"myllm pack: {last}\n"  # a pipe is packed from its begin, or not at all
    assert packing.returncode == 128 + number


@pytest.mark.skipif(sys.platform == "win32", reason="blocks no signals")
def test_processes_that_encode_are_started_deaf(tmp_path: Path) -> None:
    train_from_iterator(["the cat sat on the mat"], 276).save(tmp_path / "t.tok")
    with pack._Workers(pack.Settings(str(tmp_path / "t.tok")), 1) as workers:
        blocked = workers.submit(signal.pthread_sigmask, signal.SIG_BLOCK, []).result()
    assert blocked >= {signal.SIGINT, signal.SIGHUP}
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_worker_that_is_killed_ends_a_packing_with_a_sentence(tmp_path: Path) -> None:
    train_from_iterator(["the cat sat on the mat"], 276).save(tmp_path / "t.tok")

    def documents() -> Iterator[Document]:
        for n in range(100_000):
            if n == pack.BATCH_DOCUMENTS * 2:
                for worker in multiprocessing.active_children():
                    worker.kill()
            yield Document((Part("the cat"),))

    with pytest.raises(ChildProcessError, match=r"was killed.*with fewer --processes"):
        list(pack.encode_all(documents(), pack.Settings(str(tmp_path / "t.tok")), 2))
