"""Dependencies arrow one way, and importing does nothing."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Return the dotted names that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", sorted((ROOT / "reference").rglob("*.py")), ids=str)
def test_the_reference_imports_numpy_and_the_standard_library_only(path: Path) -> None:
    allowed = set(sys.stdlib_module_names) | {"numpy", "reference"}
    assert {name.split(".")[0] for name in imports_of(path)} <= allowed


def test_dependencies_arrow_one_way() -> None:
    may_see = {
        "accel": {"reference"},
        "tokenizer": {"accel"},
        "dist": {"accel", "reference", "tokenizer"},
    }
    for package, others in may_see.items():
        for path in (ROOT / package).rglob("*.py"):
            seen = {name.split(".")[0] for name in imports_of(path)}
            assert not seen & {"tests", *may_see, "reference"} - others - {package}, path


def test_the_tokenizer_leans_on_nothing_of_ours_but_kernels_cached_and_threads() -> None:
    for path in (ROOT / "tokenizer").rglob("*.py"):
        modules = {n.rpartition(".")[0] for n in imports_of(path) if n.startswith("accel.")}
        known = {f"accel.{name}" for name in ("ahead", "help", "jit", "system", "threads")}
        assert modules <= known, path


def test_importing_the_reference_prints_nothing() -> None:
    code = "import reference.ops, reference.model, reference.encoder_decoder, reference.generate"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_training_imports_numba_for_the_cpu_backend_alone() -> None:
    """It takes as long to import as all else, on every rank."""
    code = "import sys, dist.commands, dist.train; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_no_test_imports_another() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        assert not [n for n in imports_of(path) if n.startswith("tests.") and ".test_" in n], path
