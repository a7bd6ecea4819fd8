"""What ``accel/verify/PUBLIC.md`` says of public kernels is so, in the versions that it names."""

import importlib.metadata
import os
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from accel.verify import check_module
from accel.verify.load import load_file
from tests.helpers import ROOT, forked

EXAMPLES = ROOT / "accel" / "verify" / "examples"
TEXT = (ROOT / "accel" / "verify" / "PUBLIC.md").read_text(encoding="utf-8")
VERSIONS = dict(re.findall(r"^\| ([\w-]+) \| (\d[\w.]*) \|", TEXT, re.MULTILINE))
SHOWN = re.findall(r"```python\n(.*?)```\n```text\n(.*?)```", TEXT, re.DOTALL)
TORCH = "import contextlib\nwith contextlib.suppress(ImportError):\n    import torch"
PACKAGES = {"liger_kernel": "liger-kernel", "rotary_embedding_torch": "rotary-embedding-torch"}


def needs(*packages: str) -> None:
    """Skip unless the text speaks of what is installed; with MYLLM_REQUIRE_PEERS=1 fail."""
    for package in packages:
        try:
            installed = importlib.metadata.version(package).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            installed = "not installed"
        if installed != VERSIONS[package]:
            why = f"{package} is {installed}; the text speaks of {VERSIONS[package]}"
            if os.environ.get("MYLLM_REQUIRE_PEERS"):
                pytest.fail(f"{why} (MYLLM_REQUIRE_PEERS is set)")
            pytest.skip(why)


def test_the_extras_install_the_versions_that_the_text_speaks_of() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*extras["optional-dependencies"]["peers"], *extras["optional-dependencies"]["public"]]
    pinned = dict(w.partition(";")[0].split("==") for w in wanted if "==" in w.partition(";")[0])
    assert pinned == VERSIONS


def test_every_example_of_the_text_has_its_output() -> None:
    assert len(SHOWN) == TEXT.count("```python") == 11
    assert set(PACKAGES.values()) < set(VERSIONS)


def _imported(code: str) -> list[str]:
    names = re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE)
    names = [PACKAGES.get(name, name) for name in names if name != "accel"]
    return [name for name in dict.fromkeys(names) if name in VERSIONS]


def _shown() -> Iterator[Any]:
    """Yield each finding; of a package that has several all but the first are slow."""
    seen = set()
    for code, printed in SHOWN:
        package = _imported(code)[-1]
        marks = [pytest.mark.slow] if package in seen else []
        yield pytest.param(code, printed, id=package, marks=marks)
        seen.add(package)


@pytest.mark.parametrize(("code", "printed"), [*_shown()])
def test_the_lines_that_show_a_finding_print_what_is_said(code: str, printed: str) -> None:
    needs(*_imported(code))
    done = forked.run(TORCH, code, cwd=ROOT)
    assert done.stdout == printed, done.stderr


def test_torch_s_kernels_are_as_the_reference_but_for_what_is_said() -> None:
    needs("torch")
    module = load_file(EXAMPLES / "public_torch.py").module
    report = check_module(module, dtypes=["float32"], examples=12, partial=True, raises=False)
    assert {failure.op for failure in report.failures} == {"adamw"}, report.text()


@pytest.mark.slow
def test_llama_s_layers_are_as_the_reference_but_for_what_is_said() -> None:
    needs("torch", "transformers")
    module = load_file(EXAMPLES / "public_transformers.py").module
    report = check_module(module, dtypes=["float32"], examples=12, partial=True, raises=False)
    assert {failure.op for failure in report.failures} == {"rope"}, report.text()


@pytest.mark.slow
def test_onnxruntime_s_ops_are_as_the_reference() -> None:
    needs("onnxruntime")
    module = load_file(EXAMPLES / "public_onnxruntime.py").module
    report = check_module(module, examples=40, partial=True, raises=False)
    assert not report.failures, report.text()
