"""Several modules and backends checked side by side, in processes that they share."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel.verify import apart
from accel.verify.apart import Source, check_all, check_apart
from accel.verify.check import Options
from accel.verify.report import Report
from accel.verify.subject import SubjectError
from dist.cli import main
from tests.helpers import ROOT
from tests.helpers.processes import wait_for

FEW = Options(ops=("softmax",), dtypes=("float32",), examples=3)
GOOD = "from reference.ops import softmax\n"


def modules(folder: Path, *texts: str) -> list[str]:
    """Write files a.py, b.py, … and return their paths."""
    paths = [folder / f"{'abcdef'[i]}.py" for i in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    return [str(path) for path in paths]


def asked(paths: list[str]) -> list[tuple[Source, Options]]:
    return [(Source(module=path), FEW) for path in paths]


def test_a_broken_module_keeps_its_place_among_right_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = "import time\ntime.sleep(1)\n"
    paths = modules(
        tmp_path, slow + GOOD, "import nothing_of_that_name", GOOD, "import os; os.abort()"
    )
    first, second, third, fourth = check_all(asked(paths), jobs=2)
    assert isinstance(first, Report) and first.subject == "a.py" and first.ok and first.cases == 3
    assert isinstance(second, SubjectError) and "b.py does not import" in str(second)
    assert isinstance(third, Report) and third.subject == "c.py" and third.cases == 3
    assert isinstance(fourth, SubjectError) and "ended the process by SIGABRT" in str(fourth)
    words = [word for path in paths for word in ("--module", path)]
    few = ["--op", "softmax", "--dtype", "float32", "--examples", "3", "--json", "--jobs", "2"]
    assert main(["verify", *words, *few]) == 1
    said = capsys.readouterr()
    reports = json.loads(said.out)
    assert [report["subject"] for report in reports] == ["a.py", "b.py", "c.py", "d.py"]
    assert [report["ok"] for report in reports] == [True, False, True, False]
    assert said.err.index("b.py does not import") < said.err.index("d.py: importing it ended")
    assert {"a.py: softmax float32", "c.py: softmax float32"} == {
        line.partition(" ")[2] for line in said.err.splitlines() if "/2 " in line
    }


# in a case, it waits for a module of the other name to be in one as well
MEETING = """
import time
from pathlib import Path
from reference import ops
HERE = Path(__file__)
def softmax(x):
    HERE.with_suffix(".in").touch()
    end = time.monotonic() + 60
    while len(list(HERE.parent.glob("*.in"))) < 2:
        assert time.monotonic() < end, "nobody came"
        time.sleep(0.01)
    return ops.softmax(x)
"""


def test_modules_are_checked_at_the_same_time(tmp_path: Path) -> None:
    for report in check_all(asked(modules(tmp_path, MEETING, MEETING)), jobs=2):
        assert isinstance(report, Report) and report.ok


# it does not import where another module's process still runs
ALONE = """
import os
from pathlib import Path
from reference.ops import softmax
HERE = Path(__file__)
for other in HERE.parent.glob("*.pid"):
    try:
        os.kill(int(other.read_text()), 0)
    except ProcessLookupError:
        continue
    assert other.stem == HERE.stem, f"{other.stem} is still there"
HERE.with_suffix(".pid").write_text(str(os.getpid()))
"""


def test_there_are_never_more_processes_than_asked_for(tmp_path: Path) -> None:
    for report in check_all(asked(modules(tmp_path, ALONE, ALONE, ALONE)), jobs=1):
        assert isinstance(report, Report) and report.ok


def test_backends_share_a_process_and_give_what_each_gives_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = []

    class Counted(apart.Worker):
        def __init__(self, source: Source, timeout: float) -> None:
            started.append(source)
            super().__init__(source, timeout)

    monkeypatch.setattr(apart, "Worker", Counted)
    sources = [Source(backend="reference"), Source(backend="nowhere"), Source(backend="cpu")]
    found = check_all([(source, FEW) for source in sources], jobs=1)
    assert len(started) == 1
    assert isinstance(found[1], ValueError) and "no backend 'nowhere'" in str(found[1])
    for source, together in zip(sources[::2], found[::2], strict=True):
        alone = check_apart(source, FEW)
        assert isinstance(together, Report) and together.subject == alone.subject
        assert together.ops[0].results == alone.ops[0].results


RAISING = """
def __getattr__(name):
    raise RuntimeError(f"{name} is nothing that I know")
def softmax(x):
    return x
"""


def test_what_nobody_foresaw_is_the_error_of_that_module_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = modules(tmp_path, GOOD, RAISING, GOOD)
    for jobs in (1, 2):
        first, second, third = check_all(asked(paths), jobs=jobs)
        assert isinstance(first, Report) and first.ok and isinstance(third, Report) and third.ok
        assert isinstance(second, SubjectError)
        assert re.match(
            r"b\.py: the check itself failed\nTraceback[^$]* nothing that I", str(second)
        )
    words = [word for path in paths for word in ("--module", path)]
    assert main(["verify", *words, "--op", "softmax", "--examples", "3"]) == 1
    said = capsys.readouterr()
    assert said.out.count("all as the reference") == 2 and "b.py: the check itself" in said.err


def test_the_same_module_twice_fails_twice(tmp_path: Path) -> None:
    (path,) = modules(tmp_path, "import nothing_of_that_name")
    for error in check_all(asked([path, path]), jobs=1):
        assert isinstance(error, SubjectError) and "does not import" in str(error)


INTERRUPTED = """
def softmax(x):
    raise KeyboardInterrupt
"""


def test_an_interrupt_that_a_kernel_raises_is_told_as_any_other_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (path,) = modules(tmp_path, INTERRUPTED)
    ((report,)) = check_all(asked([path]), jobs=1)
    assert isinstance(report, Report)
    assert "softmax raised KeyboardInterrupt" in report.text()
    assert "Traceback" not in capfd.readouterr().err


ASKING = """
import pdb
from reference import ops
def softmax(x):
    return x if input() else ops.softmax(x)
def relu_forward(x):
    breakpoint()
    return x
def gelu_forward(x):
    pdb.set_trace()
    return x
"""


def test_a_kernel_that_asks_is_told_that_nobody_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    asking, importing = modules(tmp_path, ASKING, "name = input()\n" + GOOD)
    options = Options(dtypes=("float32",), examples=2)
    report, error = check_all(
        [(Source(module=asking), options), (Source(module=importing), options)], timeout=60
    )
    assert isinstance(report, Report)
    said = report.text()
    assert "softmax raised EOFError: EOF when reading a line (a.py:5)" in said
    assert "relu_forward raised EOFError: breakpoint() has no terminal here" in said
    assert "gelu_forward raised BdbQuit" in said
    assert isinstance(error, SubjectError)
    assert "b.py does not import: EOFError: EOF when reading a line (line 1)" in str(error)


def test_an_import_that_never_ends_is_given_up(tmp_path: Path) -> None:
    (path,) = modules(tmp_path, "while True: pass\n" + GOOD)
    (error,) = check_all(asked([path]), timeout=1)
    assert isinstance(error, SubjectError)
    assert "a.py: importing it gave no answer within 1 s and was stopped" in str(error)


SLOW = """
import time
from reference import ops
def softmax(x):
    time.sleep(0.05)
    return ops.softmax(x)
"""


def test_a_budget_is_one_for_all_modules(tmp_path: Path) -> None:
    paths = modules(tmp_path, SLOW, SLOW, SLOW)
    options = Options(ops=("softmax",), dtypes=("float32",), budget=1.5)
    found = check_all([(Source(module=path), options) for path in paths], jobs=1)
    reports = [report for report in found if isinstance(report, Report)]
    assert len(reports) == 3 and all(0 < r.cases < r.ops[0].planned for r in reports)
    assert sum(report.ops[0].seconds for report in reports) < 3  # each for itself: 4.5


STUCK = """
import os, time
from pathlib import Path
Path(__file__).with_suffix(f".{os.getpid()}").touch()
def softmax(x):
    Path(__file__).with_suffix(".in").touch()
    time.sleep(600)
"""


def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    paths = modules(tmp_path, STUCK, STUCK)
    words = [word for path in paths for word in ("--module", path)]
    run = subprocess.Popen(
        [sys.executable, "-m", "dist", "verify", *words, "--dtype", "float32", "--jobs", "2"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: len(list(tmp_path.glob("*.in"))) == 2)
        begun = time.monotonic()
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode in (130, -signal.SIGINT) and "Traceback" not in said
    assert time.monotonic() - begun < 30
    workers = [int(path.suffix[1:]) for path in tmp_path.glob("*.*") if path.suffix[1:].isdigit()]
    assert len(workers) >= 2
    for worker in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)
