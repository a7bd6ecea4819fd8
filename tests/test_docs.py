"""What the documentation shows runs, and what it links to exists."""

import re
from pathlib import Path

import pytest

from reference.contract import table
from reference.ops import OPS
from tests.helpers import ROOT

PAGES = sorted(path for path in ROOT.rglob("README.md") if ".venv" not in path.parts)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
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
