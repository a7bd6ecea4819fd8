"""What the documentation shows runs, and what it links to exists."""

import re
from pathlib import Path

import numpy as np
import pytest

from dist.cli import main
from reference.contract import table
from reference.ops import OPS
from tests.helpers import ROOT

PAGES = sorted(path for path in ROOT.rglob("README.md") if ".venv" not in path.parts)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    pictures = re.findall(r'<img src="([^"]+)"', text)
    for target in pictures + re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("page", [ROOT / "reference" / "README.md"], ids=["reference"])
def test_python_examples_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(page), "exec"), {})
        assert capsys.readouterr().out  # each example shows something


def test_the_table_of_ops_is_the_declarations() -> None:
    page = (ROOT / "reference" / "README.md").read_text(encoding="utf-8")
    assert table(OPS.values()) in page


# ---- the first page ------------------------------------------------------------------------------


def blocks(language: str) -> list[str]:
    """Return the first page's blocks of a language."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for name, block in found if name == language]


def test_the_gradient_on_the_first_page_is_the_reference_s() -> None:
    (quoted,) = [block for block in blocks("python") if block.startswith("def forward")]
    assert quoted in (ROOT / "reference" / "rmsnorm.py").read_text(encoding="utf-8")


def test_the_failure_on_the_first_page_is_what_verify_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (kernel,) = [block for block in blocks("python") if "rmsnorm_backward" in block]
    (shown,) = [block for block in blocks("") if block.startswith("FAIL")]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mykernels.py").write_text(kernel, encoding="utf-8")
    assert main(["verify", "--module", "mykernels.py", "--dtype", "float32"]) == 1
    said = capsys.readouterr().out
    said = said[said.index("FAIL rmsnorm") : said.index("100 cases in")]

    number = r"-?\d+\.\d+(?:e[+-]\d+)?"  # their last digits may be another processor's
    assert re.sub(number, "#", said) == re.sub(number, "#", shown)
    np.testing.assert_allclose(
        [float(n) for n in re.findall(number, said)],
        [float(n) for n in re.findall(number, shown)],
        rtol=0.01,
    )
