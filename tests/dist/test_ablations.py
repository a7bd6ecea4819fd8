"""``myllm study ablations``: what the experiments measure, and the page that says it."""

import html
import json
from pathlib import Path

import numpy as np
import pytest

from dist.cli import main
from dist.step import Stepper
from dist.study.ablations import cli, heads, norm_placement, positions
from dist.study.ablations.lab import Claim, Finding, Lab, byte_model
from reference import model, ops
from reference.cross_entropy import nll
from reference.params import decoder_layout
from reference.types import Array


def a_lab(said: list[str] | None = None) -> Lab:
    """A lab whose text is easy: it counts up."""
    text: Array = (np.arange(4000) % 256).astype(np.int32)
    return Lab(ops, text, text[::-1].copy(), (said if said is not None else []).append)


def test_training_learns_and_the_loss_by_position_is_that_of_held_out_text() -> None:
    said: list[str] = []
    lab = a_lab(said)
    config = byte_model(d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_head=8, d_ff=24)
    stepper, losses = lab.train("x", config, length=16, count=8, steps=40, lr=1e-2)
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.5
    assert len(losses) == 40 and said[-1].startswith("x: step 40/40, loss ")
    found = lab.loss_by_position(stepper, 32, 8)
    w = lab.windows(lab.heldout, 32, 8, 1)
    z = model.logits(ops, stepper.params, config, np.ascontiguousarray(w[:, :-1]))
    np.testing.assert_allclose(found, nll(z, w[:, 1:]).mean(axis=0), rtol=1e-6)
    # it counts down there, which the model has never seen
    assert found.mean() > np.mean(losses[-5:])


def test_models_that_are_compared_have_as_many_parameters() -> None:
    sizes = [decoder_layout(config).size for config in heads.configs().values()]
    assert max(sizes) < 1.01 * min(sizes)
    kinds = {(c.n_kv_heads, c.ffn) for c in heads.configs().values()}
    assert kinds == {(8, "swiglu"), (2, "swiglu"), (1, "swiglu"), (8, "relu")}


def test_gradients_by_layer_are_those_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_placement, "LENGTH", 8)
    monkeypatch.setattr(norm_placement, "COUNT", 2)
    lab, config = a_lab(), norm_placement.config("post", 3)
    norms = norm_placement.gradient_by_layer(lab, config)
    assert len(norms) == 3 and all(norm > 0 for norm in norms)
    stepper = lab.stepper(config)
    batch = lab.batch(norm_placement.LENGTH, norm_placement.COUNT, 0)
    gradient = stepper.gradient([batch], 1, 0)
    (whole,) = gradient.mine  # one rank has all of it
    others = stepper.layout.views(whole / gradient.n_valid)
    rest = [g for name, g in others.items() if not name.startswith("layers.")]
    norm = np.sqrt(sum(n**2 for n in norms) + sum(float(np.sum(g * g)) for g in rest))
    np.testing.assert_allclose(norm, gradient.norm, rtol=1e-5)


@pytest.mark.parametrize("experiment", ["positions", "norm_placement", "heads"])
def test_an_experiment_gives_plots_a_table_and_claims(
    experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm_placement, "DEPTHS", (2, 3))
    monkeypatch.setattr(norm_placement, "LENGTH", 8)
    monkeypatch.setattr(norm_placement, "COUNT", 2)
    monkeypatch.setattr(heads, "TRAINED", 16)
    monkeypatch.setattr(positions, "TRAINED", 32)
    monkeypatch.setattr(positions, "TRIED", 64)
    small = {"d_model": 16, "n_layers": 1}

    def tiny(**choices: object) -> object:
        return byte_model(**{**choices, **({} if experiment == "norm_placement" else small)})

    module = cli.EXPERIMENTS[experiment]
    monkeypatch.setattr(module, "byte_model", tiny)
    found = module.run(a_lab(), 0.004)
    assert len(found.table) >= 3 and len({len(row) for row in found.table}) == 1
    assert len(found.claims) >= 3 and all(c.source and c.says and c.seen for c in found.claims)
    for plot in found.plots:
        assert len(plot.curves) >= 4
        assert all(len(c.x) == len(c.y) and np.isfinite(c.y).all() for c in plot.curves)
    page = cli.page({experiment: found}, "1 s")
    assert page.count("<svg") == 1 and "http://" not in page.split("<svg")[0]
    for claim in found.claims:
        assert html.escape(claim.source) in page


def test_the_page_says_of_each_claim_whether_it_was_seen() -> None:
    claims = [Claim("A & B 2020", "x < y", "1 < 2", True), Claim("C 2021", "y", "no", False)]
    page = cli.page({"heads": Finding([], [["a"], ["b"]], claims)}, "2 s")
    assert "A &amp; B 2020" in page and "x &lt; y" in page
    assert page.count('class="yes">seen') == page.count('class="no">not seen') == 1


def test_a_share_above_1_decodes_no_more_than_the_cache_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("STEPS", 1), ("TRAINED", 4), ("TOKENS", 8)):
        monkeypatch.setattr(heads, name, value)
    narrow = {"d_model": 16, "n_layers": 1}
    monkeypatch.setattr(heads, "byte_model", lambda **choices: byte_model(**choices, **narrow))
    decoded: list[int] = []
    decode = heads.decode

    def counted(lab: Lab, stepper: Stepper, tokens: int) -> tuple[int, float]:
        decoded.append(tokens)
        return decode(lab, stepper, tokens)

    monkeypatch.setattr(heads, "decode", counted)
    heads.run(a_lab(), 2.0)
    assert decoded == [8] * 4


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_was_done_is_kept_when_a_later_experiment_ends_early(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(lab: Lab, share: float) -> Finding:
        raise error

    claim = Claim("A 2020", "x < y", "1 < 2", True)
    finding = Finding([], [["a"], ["b"]], [claim])
    monkeypatch.setattr(Lab, "of_the_library", lambda say: a_lab())
    monkeypatch.setattr(cli.positions, "run", lambda lab, share: finding)
    monkeypatch.setattr(cli.norm_placement, "run", fails)
    with pytest.raises(error):
        cli.run(["-o", str(tmp_path)])
    assert "x &lt; y" in (tmp_path / "ablations.html").read_text(encoding="utf-8")
    assert set(json.loads((tmp_path / "ablations.json").read_text())) == {"positions"}


@pytest.mark.slow
def test_the_command_writes_the_page_and_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", "ablations", "-o", str(tmp_path), "--share", "0.004"]) == 0
    said = capsys.readouterr().out
    assert said.count("een here: ") == 10 and "ablations.html" in said
    data = json.loads((tmp_path / "ablations.json").read_text(encoding="utf-8"))
    assert set(data) == {"positions", "norm_placement", "heads"}
    assert (tmp_path / "ablations.html").stat().st_size < 1_000_000


@pytest.mark.parametrize("words", [["--share", "0"], ["--only", "nothing"]])
def test_wrong_usage_is_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["study", "ablations", *words])
    assert end.value.code == 2
