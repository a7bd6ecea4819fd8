"""Time to loss: what the contenders train, and what is made of their curves."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from dist import cli
from dist.bench import loss, nanogpt
from dist.bench.loss import Bench, Contender, Curve
from dist.bench.loss_data import prepare
from dist.data import Windows, held_out
from dist.sizing import Size
from dist.stopping import StopRequest
from tests.helpers.runs import save_run_file

TINY = Size(0.0, 16, 1, 2, 1, 8, 24, 8, 4, 1e-2, 0, qkv_bias=True)
EAGER = Contender("PyTorch", "eager", "float32")
MUON = Contender("ours", "muon", "float32")
ADAMW = Contender("ours", "adamw", "float32")


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Return the path of a text, of which a setting of tiny size is to be learned."""
    tiny = loss.SETTINGS["shakespeare"]._replace(size=TINY)
    monkeypatch.setitem(loss.SETTINGS, "shakespeare", tiny)
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox, über alles " * 40, encoding="utf-8")
    return str(path)


def plan_of(tmp_path: Path, text: str, steps: int = 40) -> loss.Plan:
    return loss.planned(tmp_path / "out", "shakespeare", [text], steps, None)


def test_ours_alone_is_measured_once(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    command = ["bench", "loss", "shakespeare", "--text", text, "--steps", "40", "-o", str(out)]
    words = [*command, "--only", "ours-muon-float32", "ours-adamw-float32"]
    assert cli.main(words) == 0
    table = capsys.readouterr().out
    assert "ours, muon, float32" in table and "40 steps of 32 tokens" in table
    found = json.loads((out / "results.json").read_text())["contenders"]
    assert list(found) == ["ours-muon-float32", "ours-adamw-float32"]
    for curve in found.values():
        assert curve["steps"] == 40 and len(curve["bits"]) == 20
        assert curve["bits"][-1] < curve["bits"][0] - 0.1
        assert np.all(np.diff(curve["seconds"]) > 0)
    assert (out / "loss.png").stat().st_size > 5000

    def never(*args: object) -> None:
        raise AssertionError("a contender that has finished was run again")

    monkeypatch.setattr(loss, "train_all", never)
    assert cli.main(words) == 0
    assert json.loads((out / "results.json").read_text())["contenders"] == found
    assert cli.main([*command[:-4], "--steps", "41", "-o", str(out)]) == 1
    assert "asked for otherwise" in capsys.readouterr().err
    with Path(text).open("a", encoding="utf-8") as file:
        file.write("more")
    assert cli.main(words) == 1  # never on curves of another text
    assert "a text that has changed" in capsys.readouterr().err


def test_bits_are_of_the_bytes_of_the_text(text: str, tmp_path: Path) -> None:
    """A character of two bytes is one token: what it costs is shared by both."""
    plan = plan_of(tmp_path, text)
    heldout = Windows(str(plan.text.heldout), MUON.run(plan))
    batch = heldout.batch(0, 3)
    targets = batch.targets[batch.mask]
    characters = (plan.text.folder / "characters.txt").read_text(encoding="utf-8")
    size = len("".join(characters[i] for i in targets).encode())
    assert size > len(targets) == 3 * 7
    assert plan.text.bits_per_nat(heldout, 3) == pytest.approx(21 / math.log(2) / size)


def test_the_end_of_a_text_is_held_out(text: str, tmp_path: Path) -> None:
    packed = prepare(tmp_path / "bpe", [text], 300)
    whole = Path(text).read_text(encoding="utf-8")
    run = MUON.run(plan_of(tmp_path, text)._replace(vocab_size=300))
    parts = [
        int(packed.lengths()[nanogpt.all_tokens(Windows(str(folder), run))].sum())
        for folder in (packed.train, packed.heldout)
    ]
    assert parts[0] + parts[1] == pytest.approx(len(whole.encode()), abs=100)
    assert parts[1] / sum(parts) == pytest.approx(0.1, abs=0.06)


def test_pytorch_trains_what_nanogpt_publishes_on_as_many_tokens(text: str, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, text, 2000)
    theirs, ours = (c.timed(c.run(plan), 2000) for c in (EAGER, ADAMW))
    model = theirs.model
    assert (model.norm, model.ffn, model.position) == ("layernorm", "gelu", "learned")
    assert (model.n_kv_heads, model.d_ff, model.tied) == (2, 64, True)
    assert ours.model.qkv_bias and not model.qkv_bias
    assert (theirs.train.lr, theirs.train.warmup_steps, theirs.train.final_fraction) == (
        1e-3,
        100,
        0.1,
    )
    assert (theirs.optim.kind, theirs.optim.beta2, theirs.optim.clip) == ("adamw", 0.99, 1.0)
    assert theirs.tokens_per_step == ours.tokens_per_step and theirs.steps == ours.steps
    assert (ours.model.norm, ours.model.ffn, ours.optim.kind) == ("rmsnorm", "swiglu", "adamw")
    muon = MUON.run(plan)
    times = loss.MUON_RATE
    assert muon.optim.kind == "muon" and muon.train.lr == pytest.approx(times * 1e-2)
    assert {run.optim.embedding_rate for run in (ours, muon, theirs)} == {1.0}
    swept = plan._replace(size=plan.size._replace(embedding_rate=8.0))
    rates = {c: c.run(swept).optim.embedding_rate for c in (ADAMW, MUON, EAGER)}
    assert rates == {ADAMW: 8.0, MUON: 8.0 / times, EAGER: 1.0}  # of Muon's rate
    for_muon = swept._replace(size=swept.size._replace(kind="muon"))  # a size with Muon's rates
    runs = {c: c.run(for_muon) for c in (ADAMW, MUON)}
    assert {c: run.optim.kind for c, run in runs.items()} == {ADAMW: "adamw", MUON: "muon"}
    assert runs[ADAMW].train.lr == pytest.approx(1e-2 / times) and runs[MUON].train.lr == 1e-2
    embedding = {c: run.optim.embedding_rate for c, run in runs.items()}
    assert embedding == {ADAMW: pytest.approx(8.0 * times), MUON: 8.0}


def test_both_optimizers_are_planned_for_the_promised_parts_of_the_time_in_each_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for computes in (["float32"], ["float32", "bf16"]):
        monkeypatch.setattr(loss, "offered", lambda backend, computes=computes: computes)
        names = [contender.folder for contender in loss.contenders() if contender.who == "ours"]
        pairs = [(kind, compute) for kind in ("adamw", "muon") for compute in computes]
        assert names == [
            *(f"ours-{kind}-{compute}" for kind, compute in pairs),
            *(f"ours-{kind}-{compute}-{share}" for kind, compute in pairs for share in (0.4, 0.25)),
        ]


def test_minutes_become_steps_by_the_time_of_a_few(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """90 or 110 ms a step, the first ones slower: 1.2 minutes are 720 steps, 0.4 of them 288."""
    plan = loss.planned(tmp_path / "out", "shakespeare", [text], None, 1.2)
    slow, steps = loss.PROBE_SKIPPED, loss.PROBE_STEPS
    records = [
        {"step": i, "ms": 9e3 if i <= slow else 90.0 + 20 * (i % 2)} for i in range(1, steps + 1)
    ]
    monkeypatch.setattr(loss, "read_metrics", lambda folder: records)
    monkeypatch.setattr(loss, "finished", lambda run: run.steps == steps)
    bench = Bench(plan, [], StopRequest())
    assert bench._steps(MUON, MUON.run(plan)) == 720
    part = MUON._replace(share=0.4)
    assert bench._steps(part, part.run(plan)) == 288

    # a whole run of it tells more than a few steps in a slow minute
    there = Path(part.run(plan).run.out)
    there.mkdir(parents=True)
    save_run_file(part.timed(part.run(plan), steps), there / "run.toml")
    fast = [{**record, "ms": record["ms"] / 2} for record in records]
    monkeypatch.setattr(loss, "read_metrics", lambda at: fast if at == there else records)
    quarter = MUON._replace(share=0.25)
    assert bench._steps(quarter, quarter.run(plan)) == 360


def test_windows_of_nanogpt_are_followed_by_their_targets(text: str, tmp_path: Path) -> None:
    run = EAGER.run(plan_of(tmp_path, text))
    tokens = np.arange(100)
    ids, targets = nanogpt.draw(tokens, run, np.random.default_rng(0))
    assert ids.shape == targets.shape == (4, 8)
    assert np.array_equal(targets, ids + 1) and len(set(ids[:, 0])) > 1
    batches = nanogpt.heldout_batches(held_out(run)[0], run)
    for ids, targets in batches:
        assert np.all(targets[:, -1] == nanogpt.IGNORED)
        assert np.array_equal(targets[:, :-1], ids[:, 1:])


def test_a_level_is_reached_between_two_evaluations_or_never() -> None:
    curve = Curve([10.0, 20.0, 40.0], [4.0, 3.0, 2.0], 3, 1)
    assert curve.reaches(2.5) == 30.0 and curve.reaches(3.0) == 20.0
    assert curve.reaches(4.5) == 10.0 and curve.reaches(1.9) == math.inf
    assert Curve([1.0, 2.0], [math.inf, 3.0], 2, 1).reaches(3.0) == 2.0


def test_the_promise_is_held_by_the_first_of_ours_to_reach_pytorch(
    text: str, tmp_path: Path
) -> None:
    bench = Bench(plan_of(tmp_path, text), [], StopRequest())
    assert list(bench.compare()) == []
    compiled = EAGER._replace(how="compiled")
    bench.curves = {
        EAGER: Curve([50.0, 100.0], [3.0, 2.0], 2, 1),
        compiled: Curve([40.0, 80.0], [3.0, 1.9], 2, 1),
        # better by a little, in far more time: of that ours needs less
        EAGER._replace(compute="bf16"): Curve([200.0, 400.0], [3.0, 1.89], 2, 1),
        MUON: Curve([10.0, 20.0, 60.0], [3.0, 2.1, 1.7], 3, 1),
        ADAMW: Curve([10.0, 60.0], [3.0, 2.0], 2, 1),
    }
    first, second = bench.compare()
    assert first.ours == pytest.approx(40.0) and first.theirs == 80.0 and first.bar == 0.4
    assert not first.met
    assert second.ours == math.inf and second.bar is None and "never" in str(second)
    bench.curves[MUON] = Curve([10.0, 20.0], [3.0, 1.89], 2, 1)
    assert next(bench.compare()).met


@pytest.mark.parametrize("words", [["--steps", "0"], ["--minutes", "nan"], ["--only", "x"]])
def test_wrong_usage_is_refused(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "loss", "demo", "-o", str(tmp_path / "out"), *words])
    assert not (tmp_path / "out").exists()


def test_characters_need_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "loss", "shakespeare", "-o", str(tmp_path / "out")]) == 1
    assert "give one by --text" in capsys.readouterr().err
