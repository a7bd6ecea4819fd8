"""Dependencies arrow one way, and importing does nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def modules_of(path: Path) -> set[str]:
    """Return the modules that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def imports_of(path: Path) -> set[str]:
    """Return the top-level names that a file imports."""
    return {name.split(".")[0] for name in modules_of(path)}


@pytest.mark.parametrize("path", sorted((ROOT / "reference").rglob("*.py")), ids=str)
def test_the_reference_imports_numpy_and_the_standard_library_only(path: Path) -> None:
    allowed = set(sys.stdlib_module_names) | {"numpy", "reference"}
    assert imports_of(path) <= allowed


def test_dependencies_arrow_one_way() -> None:
    for path in (ROOT / "accel").rglob("*.py"):
        assert not imports_of(path) & {"dist", "tokenizer", "tests"}, path
    for path in (ROOT / "dist").rglob("*.py"):
        assert "tests" not in imports_of(path), path


def test_the_tokenizer_leans_on_nothing_of_ours_but_the_kernel_cache() -> None:
    for path in (ROOT / "tokenizer").rglob("*.py"):
        ours = {m for m in modules_of(path) if m.split(".")[0] in ("accel", "reference", "dist")}
        assert ours <= {"accel.jit"}, path


def test_importing_the_reference_prints_nothing() -> None:
    code = "import reference.ops, reference.model, reference.encoder_decoder, reference.generate"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
