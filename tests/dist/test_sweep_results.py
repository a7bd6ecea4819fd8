"""What is shown of a sweep's runs: settings and their means, the table, the plot."""

import re
from pathlib import Path
from typing import Any

import pytest

from dist.sweep import results
from dist.sweep.trials import varied


@pytest.mark.parametrize("key", ["loss", "norm", "heldout_loss"])
def test_what_has_no_number_at_its_end_has_diverged(key: str) -> None:
    step = {"step": 1, "loss": 2.0, "norm": 1.0, "lr": 0.1}
    records = [
        step,
        step | {"step": 2},
        {"step": 2, "heldout_loss": 2.0},
        {"step": 2, "save_ms": 1},
    ]
    assert not results.diverged(records) and not results.diverged(records[:1])
    assert results.diverged([r | {key: None} if key in r else r for r in records])
    assert not results.diverged([step | {"loss": None, "norm": None}, *records[1:]])


def test_a_setting_of_which_a_seed_has_diverged_has_no_mean() -> None:
    nothing = {"bits_per_byte": None, "heldout_loss": None, "loss": None}
    runs = [
        {"settings": {"a.b": number}, "status": status, **nothing, "loss": loss}
        for number, status, loss in (
            (1, "finished", 2.0),
            (1, "diverged", None),
            (2, "finished", 3.0),
            (2, "finished", 4.0),
            (3, "begun", 1.0),
        )
    ]
    score, (good, bad) = results.cells(runs)
    assert score == "loss" and good.mean == 3.5 and good.settings == {"a.b": 2}
    assert bad.mean is None and bad.spread is None and len(bad.runs) == 2
    held_out = [run | {"bits_per_byte": 1.0} for run in runs if run["status"] != "begun"]
    assert results.score_of(held_out) == "bits_per_byte"
    assert results.score_of([run for run in held_out if run["status"] == "diverged"]) == "loss"


@pytest.mark.parametrize("terminal", [0, 80, 120])
def test_the_table_leaves_columns_out_before_it_breaks_a_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: int
) -> None:
    told = {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": f"{terminal}"} if terminal else {}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    settings = {"train.lr": 0.001, "model.n_layers": 12, "optim.kind": "adamw"}
    found = []
    for n in (1, 2):
        run = {"parameters": 10**9 + n, "steps": 20, "tokens": 10**12 + n, "seconds": 4e3 * n}
        found.append(results.Cell(settings, [run, run], 2.5, n / 100))
    results.print_table("loss", found, list(settings))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= (terminal or 80)
    wide = terminal == 120
    names = ["lr", "n_layers", "kind", "score", "± std", "parameters", *["tokens", "time"] * wide]
    assert re.findall(r"[^┃ ]+(?: [^┃ ]+)*", lines[2]) == names
    assert sum("│ 0.001 │       12 │ adamw │ 2.5000 │" in line for line in lines) == 2
    said = ["in all rows: seeds 2, steps 20", *["no room for: time, tokens"] * (not wide)]
    assert lines[-len(said) :] == said and lines[-len(said) - 1].startswith("└")


PAIRS = [
    {"model.d_model": d_model, "model.position": position, "model.d_ff": 64, "train.lr": lr}
    for d_model, position in ((64, "rope"), (96, "alibi"))
    for lr in (0.001, 0.003)
]


def cells_of(settings: list[dict[str, Any]]) -> list[results.Cell]:
    found = []
    for n, chosen in enumerate(settings, 1):
        run = {"parameters": 10**9 + n, "steps": 20, "tokens": 10**12 + n, "seconds": 4e3 * n}
        run |= {"loss": n / 2, "heldout_loss": n / 2}
        found.append(results.Cell(chosen, [run, run], n / 2, n / 100))
    return found


@pytest.mark.parametrize("terminal", [30, 80, 120])
def test_the_table_shows_every_key_that_varies_or_says_which_it_has_no_room_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: int
) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": f"{terminal}"}.items():
        monkeypatch.setenv(name, value)
    results.print_table("loss", cells_of(PAIRS), varied(PAIRS))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    said = " ".join(lines)
    assert max(map(len, lines[:9])) <= terminal and "in all rows: d_ff 64, seeds 2, step" in said
    names = re.findall(r"[^┃ ]+(?: [^┃ ]+)*", next(line for line in lines if "┃" in line))
    if terminal == 30:  # d_model tells the settings apart, with lr
        assert names == ["d_model", "lr", "score"]
        assert "no room for: time, tokens, parameters, ± std, position" in said
    else:
        assert names[:4] == ["d_model", "position", "lr", "score"]
        assert (
            sum(row in said for row in ("│      64 │     rope │ 0.003 │", "96 │    alibi │")) == 2
        )
        assert "position" not in said.partition("no room")[2]


def test_the_plot_says_what_goes_with_its_first_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(results, "save_figure", lambda figure, out: drawn.append(figure.axes[0]))
    results.draw("loss", cells_of(PAIRS), varied(PAIRS), tmp_path / "sweep.png")
    (axes,) = drawn
    assert axes.get_xlabel() == "model.d_model, model.position"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["64, rope", "96, alibi"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["lr 0.001", "lr 0.003"]
