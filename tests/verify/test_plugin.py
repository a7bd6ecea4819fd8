"""Kernels as tests of pytest: what ``pytest --verify FILE.py`` collects, and how each test ends."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.helpers import ROOT

KERNELS = """
from reference import ops

DTYPES = "float32"


def relu_forward(x):
    return ops.relu_forward(x)


def relu_backward(dout, cache):
    return dout


def softmax(x):
    return ops.softmax(x)


def gelu_forward(x):
    return ops.gelu_forward(x)
"""


def run(folder: Path, *arguments: str) -> tuple[int, dict[str, str], str]:
    """Return the status, the outcome of each test, and what pytest printed."""
    words = [sys.executable, "-m", "pytest", "-p", "accel.verify.plugin", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*words, "-v", "-rs", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.findall(r"^kernels\.py::(.*?) (PASSED|FAILED|SKIPPED)", done.stdout, re.MULTILINE)
    return done.returncode, dict(found), done.stdout + done.stderr


def test_each_op_precision_and_direction_is_a_test(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(KERNELS, encoding="utf-8")
    few = ["--verify", "kernels.py", "--verify-examples", "8"]
    status, found, said = run(tmp_path, *few)
    assert status == 1
    assert found == {
        "relu[float32-forward]": "PASSED",
        "relu[float32-backward]": "FAILED",
        "softmax[float32-forward]": "PASSED",
        "gelu[float32-forward]": "PASSED",
        "gelu[float32-backward]": "SKIPPED",
        "all is tried": "FAILED",
    }
    assert "FAIL relu: gradient dx (float32)" in said and "smallest case" in said
    assert "not tried: gelu_forward has no gelu_backward" in said
    again = re.findall(r"again: myllm verify --module \S+ --case (\S+)", said)
    assert again and (tmp_path / again[0]).is_file()


def test_tests_are_chosen_by_name_and_files_by_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(KERNELS, encoding="utf-8")
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n", encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nverify = kernels.py\n", encoding="utf-8")
    status, found, said = run(
        tmp_path, "-k", "softmax or own or tried", "--verify-partial", "--verify-seed", "3"
    )
    assert status == 0, said
    assert found == {"softmax[float32-forward]": "PASSED", "all is tried": "SKIPPED"}
    assert "test_own.py::test_own PASSED" in said


def test_a_file_that_cannot_be_checked_is_an_error_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text("def norm(x):\n    return x\n", encoding="utf-8")
    status, found, said = run(tmp_path, "--verify", "kernels.py")
    assert status == 2 and not found
    assert "has no function named like an op of the contract" in said and "Traceback" not in said
