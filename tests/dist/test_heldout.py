"""Held-out sets of several sources: each is evaluated, reported and drawn."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from dist import cli, monitor
from dist.config import RunFile, from_tables
from dist.data import short_names
from dist.evaluate import Evaluation, pooled
from tests.helpers.runs import tables, text, train
from tokenizer import train_from_iterator

SOURCES = {"web": range(300), "books": range(300, 700)}


def pack(folder: Path, name: str, texts: list[str], tokenizer: Path) -> Path:
    (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    out = folder / "data" / name
    words = [str(folder / f"{name}.jsonl"), "--tokenizer", str(tokenizer), "-o", str(out)]
    assert cli.main(["pack", *words, "--heldout", "0.1", "--processes", "1"]) == 0
    return out


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    folder = tmp_path_factory.mktemp("sources")
    tokenizer = folder / "t.tok"
    train_from_iterator([text(i) for i in range(100)], 320).save(tokenizer)
    packed = {
        name: pack(folder, name, [text(i).replace("fox", name) for i in numbers], tokenizer)
        for name, numbers in SOURCES.items()
    }
    sources = [{"path": str(path / "train")} for path in packed.values()]
    changes: dict[str, Any] = {
        "data__train": "",
        "data__phases": [{"tokens": 6 * 8 * 48, "sources": sources}],
        "data__heldout": [str(path / "heldout") for path in packed.values()],
        "train__steps": 0,
        "model__vocab_size": 330,
        "model__context_length": 48,
        "run__eval_every": 3,
    }
    config = from_tables(tables(folder, **changes))
    assert train(config) == 0
    return config


def evals_of(config: RunFile) -> list[dict[str, Any]]:
    return [r for r in monitor.read_metrics(Path(config.run.out)) if "heldout_loss" in r]


def test_a_run_reports_every_held_out_set_and_all_of_them_together(
    trained: RunFile, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["eval", trained.run.out, "--backend", "reference", "--windows", "7"]
    capsys.readouterr()
    assert cli.main(arguments) == 0
    *lines, together = capsys.readouterr().out.splitlines()
    assert [r["step"] for r in evals_of(trained)] == [3, 6]
    last = evals_of(trained)[-1]
    total = tokens = 0.0
    for (name, path), line in zip(
        zip(SOURCES, trained.data.heldout_sets, strict=True), lines, strict=True
    ):
        assert f" on {path}: loss {last[f'heldout_loss/{name}']:.4f}, " in line
        assert f" {last[f'bits_per_byte/{name}']:.3f} bits per byte" in line
        found = re.search(r"\(([\d,]+) tokens in", line)
        assert found
        count = int(found[1].replace(",", ""))
        total, tokens = total + count * last[f"heldout_loss/{name}"], tokens + count
        assert cli.main([*arguments[:2], path, *arguments[2:]]) == 0
        assert line.split(" (")[0] in (said := capsys.readouterr().out)
        assert said.count("\n") == 1
    assert last["heldout_loss/web"] != last["heldout_loss/books"]
    assert last["heldout_loss"] == pytest.approx(total / tokens)
    assert f" on all 2: loss {last['heldout_loss']:.4f}, " in together
    assert f" {last['bits_per_byte']:.3f} bits per byte" in together


def test_the_log_has_a_line_for_each_set(
    trained: RunFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = trained.to_dict()
    raw["run"]["out"] = str(tmp_path / "again")
    assert train(from_tables(raw)) == 0
    said = capsys.readouterr().out
    for r in evals_of(trained):
        bits = {name: f"{r[f'bits_per_byte/{name}']:.3f}" for name in SOURCES}
        assert re.search(
            rf"^step {r['step']}: held-out loss {r['heldout_loss']:.4f}, .*\n"
            rf"  web: loss .* {bits['web']} bits per byte\n"
            rf"  books: loss .* {bits['books']} bits per byte$",
            said,
            re.MULTILINE,
        )
    # one set: as ever, and nothing by name
    raw["data"]["heldout"] = trained.data.heldout_sets[:1]
    raw["run"]["out"] = str(tmp_path / "one")
    one = from_tables(raw)
    assert train(one) == 0
    assert "  web: " not in capsys.readouterr().out
    assert not any("/" in key for r in evals_of(one) for key in r)
    assert evals_of(one)[-1]["heldout_loss"] == evals_of(trained)[-1]["heldout_loss/web"]


def test_plot_draws_bits_per_byte_of_each_set(
    trained: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: drawn.append(self))
    out = trained.run.out
    assert cli.main(["plot", out, "-o", str(tmp_path / "x.png")]) == 0
    _, middle, _ = drawn[0].axes
    assert [line.get_label() for line in middle.lines] == list(SOURCES)
    for line, name in zip(middle.lines, SOURCES, strict=True):
        assert line.get_xdata().tolist() == [3, 6]
        assert line.get_ydata().tolist() == [r[f"bits_per_byte/{name}"] for r in evals_of(trained)]
    assert cli.main(["plot", out, out, "-o", str(tmp_path / "x.png")]) == 0
    labels = [line.get_label() for line in drawn[1].axes[1].lines]
    assert labels == 2 * ["run: web", "run: books"]


def test_a_held_out_set_of_another_tokenizer_is_refused(
    trained: RunFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_from_iterator([text(i) for i in range(100)], 310).save(tmp_path / "other.tok")
    other = pack(tmp_path, "other", [text(i) for i in range(300)], tmp_path / "other.tok")
    raw = trained.to_dict()
    raw["run"]["out"] = str(tmp_path / "run")
    raw["data"]["heldout"].append(str(other / "heldout"))
    capsys.readouterr()
    assert train(from_tables(raw)) == 1
    said = capsys.readouterr().err
    assert said.endswith("other/heldout was not packed with the tokenizer of the training data\n")
    assert said.count("\n") == 1
    words = [str(other / "heldout"), trained.data.heldout_sets[0], "--backend", "reference"]
    assert cli.main(["eval", trained.run.out, *words]) == 1
    assert "other/heldout was packed with another tokenizer" in capsys.readouterr().err


def test_sets_are_pooled_by_their_tokens() -> None:
    parts = [Evaluation(2.0, 30, 100), Evaluation(4.0, 10, 50)]
    assert pooled(parts) == Evaluation(2.5, 40, 150)
    assert pooled(parts[1:]) == parts[1]
    assert pooled([*parts, Evaluation(1.0, 40, None)]) == Evaluation(1.75, 80, None)
    assert math.isnan(pooled([*parts, Evaluation(math.nan, 1, 1)]).loss)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["data/web/heldout", "data/code/heldout"], ["web", "code"]),
        (["/a/x/web/heldout", "/b/x/web/heldout"], ["a", "b"]),
        (["data/heldout", "data/code/heldout"], ["data", "data/code"]),
        (["a.bin", "b.bin"], ["a.bin", "b.bin"]),
        (["web", "data/web"], ["web", "data/web"]),
        (["/d/a/h", "/d/b/c/h", "/d/b/e"], ["a/h", "b/c/h", "b/e"]),
        (["data/web/heldout"], ["data"]),
    ],
)
def test_sets_are_named_by_what_tells_their_paths_apart(paths: list[str], names: list[str]) -> None:
    assert short_names(paths) == names
