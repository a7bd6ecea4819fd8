"""What the documentation shows runs, and what it links to exists."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist.cli import main
from reference import ops
from reference.contract import table
from reference.ops import OPS
from reference.params import decoder_layout
from reference.presets import TINY
from tests.helpers import ROOT

PAGES = sorted(path for path in ROOT.rglob("*.md") if not {".venv", "venv"} & set(path.parts))
# The example that verify's page takes a reader through is run by tests/verify/test_cli.py.
BLOCK = re.compile(r"(?<!-->\n)```python\n(.*?)```", re.DOTALL)
# need what is not always installed
ELSEWHERE = ('load("cuda"', "import jax", "import tiktoken", "import OpenAI")


def anchors(page: Path) -> set[str]:
    """Return what a link may name in a page: its headings, as GitHub spells them, and its ids."""
    text = page.read_text(encoding="utf-8")
    told = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        told.add(re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-"))
    return told


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path, place in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
        target = page.parent / path if path else page
        assert target.exists(), f"{page}: {path}"
        assert not place or place in anchors(target), f"{page}: {path}#{place}"


def a_model() -> dict[str, Any]:
    layout = decoder_layout(TINY)
    master = layout.init(0)
    ids, targets = np.random.default_rng(0).integers(0, TINY.vocab_size, (2, 2, 9), np.int32)
    given = {"master": layout.views(master), "grads": layout.views(np.full_like(master, np.nan))}
    return {**given, "config": TINY, "ids": ids, "targets": targets}


def kernels() -> dict[str, Any]:
    Path("mykernels.py").write_text("from reference.ops import relu_forward, relu_backward\n")
    return {"my_forward": ops.rmsnorm_forward, "my_backward": ops.rmsnorm_backward}


def texts() -> dict[str, Any]:
    return {"texts": ["Hello, hello", "some text, and Hello again"]}


# What a page takes for given, and what holds when its examples have run.
RUN: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any], str], bool]]] = {
    "accel": (a_model, lambda names, said: bool(np.isfinite(names["loss"].total))),
    "accel/verify": (kernels, lambda names, said: names["test_my_kernels"]() is None),
    "dist/convert": (dict, lambda _, said: Path("tasks.jsonl").read_text().count("yes") == 78),
    "reference": (dict, lambda names, said: "1.0" in said and said.count("\n") >= 6),
    "tokenizer": (texts, lambda names, said: said == "<|user|>hi\n"),
}


def examples(page: Path) -> list[str]:
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [block for block in blocks if not any(word in block for word in ELSEWHERE)]


def test_every_page_with_an_example_is_run() -> None:
    pages = [page for page in PAGES if page.name == "README.md" and examples(page)]
    found = {str(page.parent.relative_to(ROOT)) for page in pages}
    assert found - {"."} == set(RUN)  # what the first page shows is held below


@pytest.mark.parametrize("page", RUN)
def test_python_examples_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given, holds = RUN[page]
    names = given()
    for block in examples(ROOT / page / "README.md"):
        exec(compile(block, page, "exec"), names)
    assert holds(names, capsys.readouterr().out)


def test_the_table_of_ops_is_the_declarations() -> None:
    page = (ROOT / "reference" / "README.md").read_text(encoding="utf-8")
    assert table(OPS.values()) in page, "put what `python -m reference.ops` prints there"


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
