"""Time to loss beside PyTorch: both sides are held to the same text by the same measure."""

import json
from pathlib import Path

import numpy as np
import pytest

from accel import load
from dist import cli
from dist.bench import loss, nanogpt
from dist.bench.loss import Contender
from dist.comm import Solo
from dist.data import held_out
from dist.evaluate import evaluate
from dist.monitor import read_metrics
from dist.sizing import Size
from reference.params import decoder_layout

pytest.importorskip("torch")

TINY = Size(0.0, 16, 1, 2, 1, 8, 24, 8, 4, 1e-2, 0)


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    tiny = loss.SETTINGS["shakespeare"]._replace(size=TINY)
    monkeypatch.setitem(loss.SETTINGS, "shakespeare", tiny)
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps " * 40, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("how", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_the_table_says_when_ours_has_learned_as_much(
    how: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, theirs = tmp_path / "out", f"pytorch-{how}-float32"
    words = ["bench", "loss", "shakespeare", "--text", text, "--steps", "60", "-o", str(out)]
    assert cli.main([*words, "--only", theirs, "ours-muon-float32"]) == 0
    table = capsys.readouterr().out
    assert "bits: ours, muon, float32" in table and f"PyTorch, {how}, float32 at its end" in table
    found = json.loads((out / "results.json").read_text())
    assert found["hardest_of_pytorch"] == theirs
    bits = found["contenders"][theirs]["bits"]
    assert bits[-1] < bits[0] - 0.1


def test_pytorch_is_evaluated_as_ours_is(text: str, tmp_path: Path) -> None:
    """At the same weights both sides find the same loss in the same windows."""
    plan = loss.planned(tmp_path / "out", "shakespeare", [text], 1, None)
    contender = Contender("PyTorch", "eager", "float32")
    run = contender.timed(contender.run(plan), 1)
    still = tmp_path / "run.toml"
    still.write_text(run.to_toml().replace("lr = 0.001", "lr = 1e-12"), encoding="utf-8")
    Path(run.run.out).mkdir(parents=True)
    assert nanogpt.train(still, "eager") == 0
    theirs = [r["heldout_loss"] for r in read_metrics(Path(run.run.out)) if "heldout_loss" in r]
    ops, layout = load("reference"), decoder_layout(run.model)
    (heldout,) = held_out(run)
    ours = evaluate(
        ops,
        layout.views(layout.init(run.train.seed)),
        run.model,
        heldout,
        n_windows=run.run.eval_windows,
        micro_batch=4,
        comm=Solo(),
    )
    assert ours.n_targets > 50
    assert np.allclose(theirs, ours.loss, rtol=1e-5)
