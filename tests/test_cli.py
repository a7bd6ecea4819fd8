"""The command's dispatcher."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from dist import cli
from tests.helpers import ROOT


def test_help_lists_the_commands_and_no_command_is_wrong_usage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "greet", cli.Command("nowhere:run", "says hello"))
    assert cli.main(["--help"]) == 0
    assert "greet  " in capsys.readouterr().out.replace("greet", "greet  ")
    assert cli.main([]) == 2


@pytest.mark.parametrize("name", ["", *cli.COMMANDS])
def test_help_fits_a_terminal(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    try:
        cli.main([*name.split(), "--help"])
    except SystemExit as stop:
        assert not stop.code
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


def test_an_unknown_command_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "sing loud", cli.Command("nowhere:run", ""))
    assert cli.main(["fly"]) == 2
    assert "no command 'fly'" in capsys.readouterr().err
    assert cli.main(["sing"]) == 2
    assert "say which: sing loud" in capsys.readouterr().err
    assert cli.main(["sing", "--help"]) == 0
    said = capsys.readouterr().out
    assert "usage: myllm sing COMMAND" in said and "sing loud" in said and "train" not in said


def test_two_words_name_a_command_and_the_rest_are_its_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[list[str]] = []

    def run(argv: list[str]) -> int:
        seen.append(argv)
        return 7

    monkeypatch.setitem(sys.modules, "fake_commands", SimpleNamespace(run=run))  # type: ignore[arg-type]
    monkeypatch.setitem(cli.COMMANDS, "bench cpu", cli.Command("fake_commands:run", ""))
    monkeypatch.setitem(cli.COMMANDS, "bench", cli.Command("nowhere:run", ""))
    assert cli.main(["bench", "cpu", "--fast", "x"]) == 7
    assert seen == [["--fast", "x"]]


@pytest.mark.parametrize("before", ["enable", "disable"])
def test_what_a_command_imports_is_left_out_of_the_search_for_garbage(before: str) -> None:
    code = f"""
import gc
from dist import cli
gc.{before}()
cli.loaded("pack")
frozen = gc.get_freeze_count()
cli.loaded("pack")
print(frozen > 10_000, gc.get_freeze_count() - frozen, gc.isenabled())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == (f"True 0 {before == 'enable'}\n", "")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("the folder is empty"), 1),
        (FileNotFoundError(2, "No such file", "x.toml"), 1),
        (MemoryError(), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_failures_end_in_one_sentence_and_a_status(
    error: BaseException,
    status: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(argv: list[str]) -> int:
        raise error

    monkeypatch.setitem(sys.modules, "fake_commands", SimpleNamespace(run=run))  # type: ignore[arg-type]
    monkeypatch.setitem(cli.COMMANDS, "fail", cli.Command("fake_commands:run", ""))
    assert cli.main(["fail"]) == status
    said = capsys.readouterr().err
    assert said.startswith("myllm fail: ") and said.count("\n") == 1
    monkeypatch.setenv("MYLLM_TRACEBACK", "1")
    cli.main(["fail"])
    assert ("Traceback" in capsys.readouterr().err) == (status == 1)


def test_ctrl_c_while_a_command_is_imported_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "dist.interrupt":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "dist.interrupt", raising=False)
    monkeypatch.delattr("dist.interrupt", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert cli.main(["plan", "laptop"]) == 130
    assert capsys.readouterr().err == "myllm plan: interrupted\n"


def test_the_module_runs_and_imports_nothing_heavy() -> None:
    code = "import sys, dist.cli; print(sorted({'numpy', 'numba', 'mpi4py'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    done = subprocess.run([sys.executable, "-m", "dist", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "usage: myllm" in done.stdout


def writing_to(
    stdout: int | IO[str], words: list[str], buffered: bool
) -> subprocess.CompletedProcess[str]:
    """Run a command that writes there, in pieces or at once."""
    return subprocess.run(
        [sys.executable, "-m", "dist", *words],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"},
        check=False,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="a pipe that nobody reads")
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("words", [["--help"], ["bench", "--help"], ["plan", "demo"]])
def test_a_reader_that_has_left_is_no_error_to_report(words: list[str], buffered: bool) -> None:
    read, write = os.pipe()
    os.close(read)
    done = writing_to(write, words, buffered)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("words", [["--help"], ["plan", "demo"]])
def test_output_that_finds_no_room_is_one_sentence(words: list[str], buffered: bool) -> None:
    with Path("/dev/full").open("w") as full:
        done = writing_to(full, words, buffered)
    assert done.returncode == 1 and "make room" in done.stderr
    assert done.stderr.startswith("myllm") and done.stderr.count("\n") == 1
