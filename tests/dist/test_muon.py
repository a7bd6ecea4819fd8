"""Runs with Muon: which numbers it steps, what a rank owns, what is saved, and what is refused."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from dist import checkpoint, cli, config
from dist.comm import Solo
from dist.config import Optim
from dist.data import TrainingData
from dist.monitor import read_metrics
from dist.plan import make_plan
from dist.slices import Cutting
from dist.step import Stepper
from dist.weights import Weights
from reference import ops
from reference.global_norm import SUM_BLOCK, clip_scale
from reference.params import decoder_layout
from reference.presets import MYLLM_1B
from tests.helpers.models import MODELS
from tests.helpers.runs import digest, prepare, train, with_run

MUON = {"optim__kind": "muon"}
# a w_gate_up of two blocks, an embedding of two
WIDE = {"model__d_model": 96, "model__d_ff": 700, "model__vocab_size": 700, "train__steps": 2}


def test_a_step_is_muon_on_each_matrix_of_the_blocks_and_adamw_on_all_else(tmp_path: Path) -> None:
    run = prepare(tmp_path, model__n_layers=2)
    batches = [TrainingData(run).batch(i, 1) for i in range(8)]
    layout = decoder_layout(run.model)
    optim = Optim(kind="muon", momentum=0.8, clip=0.05, weight_decay=0.3)
    stepper = Stepper(ops, run.model, optim, layout, Solo(), layout.init(0), 0)
    expected, m, v = stepper.master.copy(), np.zeros(layout.size, "f4"), np.zeros(layout.size, "f4")
    for step in (1, 2):
        gradient = stepper.gradient(batches, step, 0)
        whole = np.concatenate(gradient.mine)
        norm = float(np.linalg.norm(whole)) / gradient.n_valid
        assert gradient.norm == pytest.approx(norm, rel=1e-6)
        assert clip_scale(gradient.norm, 0.05) < 1
        scale = clip_scale(gradient.norm, 0.05) / gradient.n_valid
        stepper.update(gradient, lr=0.01)
        qkv, hidden = run.model.n_heads * run.model.d_head, run.model.d_ff
        kv = run.model.n_kv_heads * run.model.d_head
        parts = {"wqkv": (qkv, kv, kv), "w_gate_up": (hidden, hidden)}
        for name, (low, spec) in layout.offsets.items():
            here = slice(low, low + spec.size)
            if name.startswith("layers.") and len(spec.shape) == 2:
                of = parts.get(name.rpartition(".")[2])
                arrays = (a[here].reshape(spec.shape) for a in (expected, m, whole))
                options = {"momentum": 0.8, "weight_decay": 0.3, "grad_scale": scale}
                ops.muon(*arrays, lr=0.01, parts=of, **options)
            else:
                n = spec.size if spec.decays else 0
                ops.adamw(
                    *(a[here] for a in (expected, m, v, whole)), step=step, lr=0.01, beta1=0.9,
                    beta2=0.95, eps=1e-8, weight_decay=0.3, n_decayed=n, grad_scale=scale,
                )  # fmt: skip
        np.testing.assert_array_equal(stepper.master, expected)
    tables = run.model.vocab_size * run.model.d_model
    assert len(stepper.v) == tables + layout.size - layout.n_decayed


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_resumed_is_uninterrupted_bit_for_bit(tmp_path: Path, backend: str) -> None:
    run = prepare(tmp_path, **MUON, run__backend=backend, run__checkpoint_every=2, run__keep=9)
    assert train(run) == 0
    whole = digest(run)
    latest = Path(run.run.out) / "checkpoints" / "latest"
    latest.write_text("step-00000002\n")
    assert train(run) == 0
    assert digest(run) == whole
    adamw = with_run(prepare(tmp_path, run__backend=backend), out=str(tmp_path / "adamw"))
    assert train(adamw) == 0
    assert digest(adamw) != whole
    folder = Path(run.run.out) / "checkpoints" / "step-00000006"
    layout = decoder_layout(run.model)
    sizes = [(folder / f"{name}.bin").stat().st_size for name in ("master", "m", "v")]
    stepped = sum(spec.size for _, spec in layout.offsets.values() if spec.parts)
    assert sizes == [4 * layout.size, 4 * layout.size, 4 * (layout.size - stepped)]


def test_it_learns(tmp_path: Path) -> None:
    run = prepare(tmp_path, **MUON, train__steps=40)
    assert train(run) == 0
    found = [record["loss"] for record in read_metrics(Path(run.run.out)) if "loss" in record]
    assert np.mean(found[-5:]) < np.mean(found[:5]) - 0.5


def test_a_checkpoint_of_the_other_kind_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = prepare(tmp_path, **MUON)
    assert train(run) == 0
    before = digest(run)
    other = dataclasses.replace(run, optim=dataclasses.replace(run.optim, kind="adamw"))
    longer = dataclasses.replace(other, train=dataclasses.replace(other.train, steps=8))
    capsys.readouterr()
    assert train(other) == 1
    assert "optim.kind: 'muon' -> 'adamw'" in capsys.readouterr().err
    assert train(longer, "--changed") == 1
    said = capsys.readouterr().err
    assert "has the moments of optim.kind 'muon'" in said and "train.init" in said
    assert digest(run) == before
    init = dataclasses.replace(longer.train, init=run.run.out)
    fresh = dataclasses.replace(with_run(longer, out=str(tmp_path / "fresh")), train=init)
    assert train(fresh) == 0


def test_weights_are_read_back_with_the_blocks_that_they_were_written_in(tmp_path: Path) -> None:
    run = prepare(tmp_path, **MUON, **WIDE)
    assert train(run) == 0
    path = checkpoint.find(run.run.out)
    flat, weights = np.fromfile(path / "master.bin", "<f4"), Weights(path)
    for name, (low, spec) in weights.layout.offsets.items():
        np.testing.assert_array_equal(weights.read(name).ravel(), flat[low : low + spec.size])
    flat[weights.layout.offsets["layers.0.attention.wo"][0]] += 1
    flat.tofile(path / "master.bin")
    weights.read("layers.0.attention.wqkv")
    with pytest.raises(ValueError, match=r"master\.bin is damaged"):
        weights.read("layers.0.attention.wo")


@pytest.mark.parametrize("name", ["myllm", "gpt2", "untied_post_rmsnorm"])
@pytest.mark.parametrize("beside", [True, False])
def test_slices_end_where_matrices_do(name: str, beside: bool) -> None:
    model = MODELS[name]
    layout = decoder_layout(model)
    cutting = Cutting.of(layout, "muon")
    matrices = {name for name, (_, spec) in layout.offsets.items() if spec.parts}
    assert matrices == {
        name
        for name, (_, spec) in layout.offsets.items()
        if name.startswith("layers.") and len(spec.shape) == 2
    }
    for ranks in (1, 2, 4, 8):
        bounds = cutting.bounds(layout, model.n_layers, ranks, beside=beside)
        assert [b[0] for b in bounds[1:]] == [b[-1] for b in bounds[:-1]]
        assert (bounds[0][0], bounds[-1][-1]) == (0, layout.size)
        for low, spec in cutting.matrices.items():
            owners = [
                (bucket, rank)
                for bucket, b in enumerate(bounds)
                for rank in range(ranks)
                if max(low, b[rank]) < min(low + spec.size, b[rank + 1])
            ]
            assert len(owners) == 1
        for b in bounds:
            assert len(b) == ranks + 1 and b == sorted(b)


def test_ranks_have_about_as_much_to_multiply() -> None:
    layout = decoder_layout(MYLLM_1B)
    cutting = Cutting.of(layout, "muon")
    bounds = cutting.bounds(layout, 28, 8, beside=True)
    for b in bounds[2:-1]:  # eight layers, of which each rank has one
        assert len(set(np.diff(b))) == 1
    assert len(bounds) == 6
    found = make_plan(config.load("myllm-1b", ["optim.kind=muon"]), 8)
    assert found.muon[1] * 8 < 1.1 * found.muon[0]


def test_blocks_begin_anew_with_every_matrix() -> None:
    run = dataclasses.replace(MODELS["myllm"], d_model=128, d_ff=700, vocab_size=700)
    layout = decoder_layout(run)
    cutting = Cutting.of(layout, "muon")
    blocks = list(cutting.blocks(0, layout.size))
    assert [a for a, _ in blocks[1:]] == [b for _, b in blocks[:-1]]
    assert all(high - low <= SUM_BLOCK for low, high in blocks)
    starts = {low for low, _ in blocks}
    assert set(cutting.matrices) <= starts
    for low, spec in layout.offsets.values():
        first, last = cutting.around(low, low + spec.size)
        assert first <= low and low + spec.size <= last
        assert first in starts and (last in starts or last == layout.size)
        assert low - first < SUM_BLOCK and last - low - spec.size < SUM_BLOCK
    numbers = {array: cutting.numbers(array) for array in ("m", "v")}
    assert list(numbers["m"].values()) == list(range(len(blocks)))
    assert all(not cutting.muon[0] <= low < cutting.muon[1] for low in numbers["v"])
    assert Cutting(layout.size).numbers("v") == {
        low: number for number, low in enumerate(range(0, layout.size, SUM_BLOCK))
    }


def test_a_plan_counts_muon_s_memory_and_work(capsys: pytest.CaptureFixture[str]) -> None:
    found = make_plan(config.load("gpt2-small", ["optim.kind=muon"]), 1)
    shapes = [(768, 768)] * 4 + [(768, 3072), (3072, 768)]  # q, k, v, out; up, down
    work = 0
    for rows, columns in shapes:
        r, s = sorted((rows, columns))
        work += 5 * (2 * (2 * r * r * s) + 2 * r * r * r)
    assert found.muon == (12 * work, 12 * work)
    stepped = 12 * sum(rows * columns for rows, columns in shapes)
    assert found.moments == 4 * (2 * found.parameters - stepped)
    assert found.checkpoint == 4 * (3 * found.parameters - stepped)
    assert cli.main(["plan", "gpt2-small", "--set", "optim.kind=muon"]) == 0
    assert "Muon, a step" in capsys.readouterr().out
    assert cli.main(["plan", "gpt2-small", "--set", "optim.kind=sgd"]) == 1
    assert "optim.kind must be one of adamw, muon" in capsys.readouterr().err
    assert cli.main(["plan", "gpt2-small", "--set", "optim.momentum=1"]) == 1
    assert "optim.momentum must be a number in [0, 1)" in capsys.readouterr().err


def test_every_element_is_stepped_once_whatever_the_ranks() -> None:
    model = MODELS["myllm"]
    layout = decoder_layout(model)
    cutting = Cutting.of(layout, "muon")
    for ranks in (1, 2, 8):
        bounds = cutting.bounds(layout, model.n_layers, ranks, beside=True)
        pieces = [
            piece
            for b in bounds
            for low, high in itertools.pairwise(b)
            for piece in cutting.pieces(low, high)
        ]
        assert sum(high - low for low, high in pieces) == layout.size
        assert {low for low, _ in pieces} >= set(cutting.matrices)
