"""``python -m tests.gpu`` in parts: what it keeps, where it goes on, and what it leaves out."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from accel.bench import cuda as bench
from reference.ops import OPS
from tests.gpu import __main__ as gpu
from tests.gpu import journal
from tests.gpu.__main__ import MORE, PARTS, Part, main
from tests.helpers import ROOT

SECOND = 1 / 60  # of its minutes; the last five seconds are for the end
TESTS = """
import pathlib, time
import pytest

def ran(what):
    with open(pathlib.Path(__file__).with_name("ran"), "a") as file:
        file.write(what + " ")

@pytest.mark.parametrize("n", range(4))
def test_slow(n):
    ran(str(n))
    time.sleep(PAUSE)

def test_skipped():
    pytest.skip("no reason")
"""


def part(folder: Path, text: str, name: str = "some") -> Part:
    """Return a part whose tests are a text."""
    file = folder / f"test_{name}.py"
    file.write_text(text, encoding="utf-8")
    own = "-c", "pyproject.toml", "-p", "no:cacheprovider"  # by the settings of ours
    return Part(name, 0, gpu.tests(str(file), *own), ("pytest",))


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


@pytest.mark.slow
def test_tests_stop_when_the_time_is_up_and_go_on_after_the_last_that_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, slow = tmp_path / "out", part(tmp_path, TESTS.replace("PAUSE", "7"))
    given = [str(folder), "--minutes", str(10 * SECOND)]
    assert main(given, [slow]) == MORE
    assert "the same command goes on here" in capsys.readouterr().out
    before = (tmp_path / "ran").read_text().split()
    assert 1 <= len(before) < 4 and not (folder / "some.status").exists()
    slow = part(tmp_path, TESTS.replace("PAUSE", "0"))
    assert main([str(folder)], [slow]) == 0
    assert (tmp_path / "ran").read_text().split() == ["0", "1", "2", "3"]
    assert (folder / "some.status").read_text() == "passed: 4 tests, 1 skipped\n"
    assert main([str(folder)], [slow]) == 0  # nothing is run again
    assert len((tmp_path / "ran").read_text().split()) == 4
    assert {path.name for path in folder.iterdir()} == {"some.log", "some.tests", "some.status"}


def test_a_failure_is_kept_through_the_next_call_and_what_follows_still_runs(
    tmp_path: Path,
) -> None:
    text = "import warnings\nwarnings.warn('of a library')\ndef test_wrong():\n    assert 0"
    wrong = part(tmp_path, text, "wrong")
    script = Part("script", 0, ("-c", "print('hello')"), ())
    broken = Part("broken", 0, ("-c", "raise SystemExit(7)"), ())
    out = tmp_path / "out"
    for _ in range(2):
        assert main([str(out)], [wrong, script, broken]) == 1
    said = {path.stem: path.read_text().strip() for path in out.glob("*.status")}
    assert said["wrong"].startswith("failed: 1 of 1 tests")
    assert (said["script"], said["broken"]) == ("passed", "failed: exit status 7")
    assert (out / "script.log").read_text() == "hello\n"  # once


@pytest.mark.slow
def test_a_test_that_hangs_is_ended_passed_over_and_counted_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "HANGS", 8)
    text = "import time\ndef test_a(): time.sleep(600)\ndef test_b(): pass"
    hangs, out = part(tmp_path, text), tmp_path / "out"
    assert main([str(out), "--minutes", str(6 * SECOND)], [hangs]) == MORE
    assert list(journal.read(out / "some.tests").values()) == ["began"]
    assert main([str(out)], [hangs]) == 1
    assert list(journal.read(out / "some.tests").values()) == ["began", "passed"]
    assert (out / "some.status").read_text().startswith("failed: 1 of 2 tests")


def test_what_is_missing_is_said_and_what_has_no_time_is_left_for_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = Part("lacking", 0, ("-c", ""), ("sys", "no_such_module"))
    sanitized = Part("sanitized", 0, ("-c", ""), (), "--tool=memcheck")
    long = Part("long", 4, ("-c", ""), ())
    assert main([str(tmp_path), "--minutes", "3"], [lacking, sanitized, long]) == MORE
    said = capsys.readouterr().out
    assert "lacking: skipped: needs no_such_module" in said and "long: the time is up" in said
    if gpu.shutil.which("compute-sanitizer") is None:
        assert "sanitized: skipped: needs compute-sanitizer" in said
    assert main([str(tmp_path)], [lacking, sanitized, long]) in (0, 1)
    assert (tmp_path / "long.status").read_text() == "passed\n"


def test_the_parts_come_in_order_each_within_ten_minutes_and_name_what_there_is() -> None:
    assert [part.name for part in PARTS] == [
        "correctness", "repeatability", "trainer", "times", "step-beside-torch", "racecheck",
        "memcheck", "ops",
    ]  # fmt: skip
    assert all(part.minutes <= 9 for part in PARTS)
    text = (ROOT / gpu.CUDA).read_text(encoding="utf-8")
    for part in PARTS:
        if part.tests:
            chosen = part.command[-1]  # a file, or names of tests and of ops' cases
            names = set(re.findall(r"\w+", chosen)) - {"not", "and", "or"}
            assert (ROOT / chosen).exists() or all(n in text or n in "".join(OPS) for n in names)
        else:
            with pytest.raises((ImportError, SystemExit)) as ended:  # without a GPU
                bench.main(list(part.command[part.command.index("cuda") + 1 :]))
            assert ended.type is not SystemExit, part


@pytest.mark.parametrize(
    "part", {part.needs: part for part in PARTS}.values(), ids=lambda p: p.name
)
def test_a_part_needs_no_package_but_those_it_names(part: Part, tmp_path: Path) -> None:
    """Without our other packages it comes as far as the GPU that is missing here."""
    if part.name != "trainer":
        assert set(part.needs) <= {"cupy", "numba", "mpi4py", "pytest", "hypothesis", "torch"}
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    required = tomllib.loads(text)["project"]["dependencies"]
    modules = {re.findall(r"[\w-]+", name)[0].replace("-", "_") for name in required}
    hidden = modules - {"numpy", *part.needs}
    assert hidden
    _, module, *words = part.command
    code = "import runpy, sys\n"
    code += f"sys.modules.update(dict.fromkeys({sorted(hidden)}))\nsys.argv[1:] = {words}\n"
    code += f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "GPU_JOURNAL": str(tmp_path / "tests"), "GPU_UNTIL": "0"},
        check=False,
    )
    assert "the backend 'cuda' needs " in done.stdout + done.stderr, done.stdout + done.stderr
