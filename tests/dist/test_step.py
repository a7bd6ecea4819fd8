"""The exact step: the tree, the optimizer on slices, checkpoints, and guards, on one rank."""

import math
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import accel
from dist import checkpoint, saving
from dist.comm import AllRanksError, Solo, together
from dist.config import Optim, RunFile
from dist.data import TrainingData, make_batch
from dist.model import load_model
from dist.monitor import SILENT, Guards, Memory, Metrics, read_metrics
from dist.reduction import Reduction, add_in_tree_order
from dist.slices import Cutting, bounds_of_slices
from dist.step import Gradient, Stepper, TreeSum, initial_weights, sum_of
from dist.weights import load_master
from reference import model, ops
from reference.global_norm import SUM_BLOCK, clip_scale, global_norm
from reference.model import loss_backward, loss_forward
from reference.params import decoder_layout
from reference.presets import MYLLM_1B
from reference.types import Array
from tests.helpers.models import MODELS
from tests.helpers.runs import prepare, random_walk


def by_halves(leaves: list[Array]) -> Array:
    """Return the sum that the tree is defined to be."""
    if len(leaves) == 1:
        return leaves[0]
    half = len(leaves) // 2
    return by_halves(leaves[:half]) + by_halves(leaves[half:])


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 2**32))
def test_any_split_of_the_tree_adds_the_same_pairs(
    log_leaves: int, log_ranks: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    leaves = [
        (rng.standard_normal(9) * 10.0 ** rng.integers(-3, 4, 9)).astype(np.float32)
        for _ in range(2**log_leaves)
    ]
    ranks = 2 ** min(log_ranks, log_leaves)
    share = len(leaves) // ranks
    roots = []
    for rank in range(ranks):
        tree = TreeSum(ops, np.zeros(9, np.float32))
        for value in leaves[rank * share : (rank + 1) * share]:
            leaf = tree.leaf()
            leaf[:] = value
            tree.push(leaf)
        roots.append(tree.root())
    np.testing.assert_array_equal(add_in_tree_order(ops.accumulate, roots), by_halves(leaves))


def test_the_tree_needs_one_buffer_a_level() -> None:
    tree = TreeSum(ops, np.zeros(1, np.float32))
    buffers = set()
    for _ in range(64):
        leaf = tree.leaf()
        buffers.add(id(leaf))
        leaf[:] = 1
        tree.push(leaf)
    assert len(buffers) == 7 and tree.root()[0] == 64


def test_leaves_that_are_no_power_of_two_are_refused() -> None:
    tree = TreeSum(ops, np.zeros(1, np.float32))
    for _ in range(3):
        tree.push(tree.leaf())
    with pytest.raises(ValueError, match="power of two"):
        tree.root()


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_weights_drawn_one_by_one_are_those_of_the_layout(name: str) -> None:
    layout = decoder_layout(MODELS["gpt2"])
    drawn = initial_weights(accel.load(name), layout, 3)
    np.testing.assert_array_equal(drawn.view(np.uint32), layout.init(3).view(np.uint32))


@given(st.integers(1, 10 * SUM_BLOCK), st.sampled_from([1, 2, 4, 8]))
def test_slices_are_whole_blocks_and_cover_everything(n: int, size: int) -> None:
    [bounds] = bounds_of_slices([0, n], SUM_BLOCK, size)
    assert bounds[0] == 0 and bounds[-1] == n and bounds == sorted(bounds)
    assert all(b % SUM_BLOCK == 0 or b == n for b in bounds)
    slices = np.diff(bounds)
    assert slices.max() - slices.min() <= 2 * SUM_BLOCK


def stepper_of(config: RunFile, **optim: Any) -> Stepper:
    layout = decoder_layout(config.model)
    flat = layout.init(config.train.seed)
    settings = Optim(**optim) if optim else config.optim
    return Stepper(ops, config.model, settings, layout, Solo(), flat, config.train.seed)


def test_a_step_is_the_mean_over_all_valid_targets_clipped_and_adamw(tmp_path: Path) -> None:
    """Unequal masks, and micro-batches with none: one batch of everything is the measure."""
    config = prepare(tmp_path)
    data = TrainingData(config)
    batches = [data.batch(i, 1) for i in range(8)]
    counts = [int(batch.mask.sum()) for batch in batches]
    assert 0 in counts and len(set(counts)) > 3

    stepper = stepper_of(config, clip=0.05, weight_decay=0.3)
    layout, before = stepper.layout, stepper.master.copy()
    gradient = stepper.gradient(batches, step=1, first_sample=0)

    whole = data.batch(0, 8)
    params = layout.views(before)
    loss, cache = loss_forward(ops, params, config.model, whole.ids, whole.targets, whole.mask)
    expected = np.empty_like(before)
    loss_backward(1.0, cache, layout.views(expected))
    assert gradient.n_valid == loss.n_valid == sum(counts)
    assert gradient.loss == pytest.approx(loss.total / loss.n_valid, rel=1e-6)
    [mine] = gradient.mine
    np.testing.assert_allclose(mine, expected, atol=1e-6 * np.abs(expected).max())
    assert gradient.norm == global_norm(mine) / loss.n_valid

    mine = mine.copy()
    stepper.update(gradient, lr=0.01)
    m, v, after = np.zeros_like(before), np.zeros_like(before), before.copy()
    scale = clip_scale(gradient.norm, 0.05)
    assert scale < 1
    ops.adamw(
        after, m, v, mine, step=1, lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.3,
        n_decayed=layout.n_decayed, grad_scale=scale / loss.n_valid,
    )  # fmt: skip
    np.testing.assert_array_equal(stepper.master, after)
    np.testing.assert_array_equal(stepper.params["embedding.weight"].ravel()[:5], after[:5])


def test_decay_all_decays_gains_too(tmp_path: Path) -> None:
    config = prepare(tmp_path)
    batches = [TrainingData(config).batch(i, 1) for i in range(8)]
    gains = []
    for decay_all in (False, True):
        stepper = stepper_of(config, decay_all=decay_all, weight_decay=0.5)
        stepper.update(stepper.gradient(batches, 1, 0), lr=0.01)
        gains.append(stepper.params["final_norm.gain"].copy())
    np.testing.assert_allclose(gains[0] - gains[1], 0.01 * 0.5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_embedding_has_a_rate_of_its_own(tmp_path: Path, kind: str) -> None:
    config = prepare(tmp_path)
    batches = [TrainingData(config).batch(i, 1) for i in range(8)]

    def stepped(lr: float, embedding_rate: float = 1.0) -> dict[str, Array]:
        stepper = stepper_of(config, kind=kind, weight_decay=0.5, embedding_rate=embedding_rate)
        stepper.update(stepper.gradient(batches, 1, 0), lr=lr)
        return {name: np.array(weight) for name, weight in stepper.params.items()}

    found, slow, fast = stepped(0.01, 0.25), stepped(0.0025), stepped(0.01)
    for name, weight in found.items():
        expected = slow if name == "embedding.weight" else fast
        np.testing.assert_array_equal(weight, expected[name], err_msg=name)
        assert (slow[name] != fast[name]).any()


def test_dropout_depends_on_the_sample_and_not_on_the_micro_batch() -> None:
    model = MODELS["dropout"]
    layout = decoder_layout(model)
    ids = (random_walk(4 * 12) % model.vocab_size).reshape(4, 12).astype(np.int32)
    windows = [(row, np.ones(12, np.bool_)) for row in ids]
    losses = []
    for size in (1, 2, 4):
        stepper = Stepper(ops, model, Optim(), layout, Solo(), layout.init(0), seed=9)
        batches = [make_batch(windows[i : i + size]) for i in range(0, 4, size)]
        losses.append(stepper.gradient(batches, step=3, first_sample=0).loss)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    other = stepper.gradient([make_batch(windows)], step=4, first_sample=0).loss
    assert other != pytest.approx(losses[0], rel=1e-4)


def test_what_the_backward_needed_is_gone_before_the_step_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There an arena is laid out anew, and both must not have to fit."""

    class Kept:
        """Something that the cache holds."""

    kept: list[weakref.ref[Kept]] = []
    ended = []

    def forward(*args: Any, **options: Any) -> Any:
        loss, cache = loss_forward(*args, **options)
        held = Kept()
        kept.append(weakref.ref(held))
        return loss, (cache, held)

    @contextmanager
    def one_step() -> Iterator[None]:
        yield
        ended.append(kept[-1]() is None)

    monkeypatch.setattr(model, "loss_forward", forward)
    monkeypatch.setattr(model, "loss_backward", lambda s, c, g, f: loss_backward(s, c[0], g, f))
    monkeypatch.setattr(ops, "step", one_step)
    config = prepare(tmp_path)
    batches = [TrainingData(config).batch(i, 1) for i in range(8)]
    stepper_of(config).gradient(batches, step=1, first_sample=0)
    assert ended == [True] * 8


@pytest.mark.parametrize("beside", [True, False])
def test_the_exchange_is_told_of_the_last_micro_batch_s_layers_where_it_runs_beside(
    beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = prepare(tmp_path, model__n_layers=3)
    layout = decoder_layout(MYLLM_1B)  # of more buckets than one
    ranks: Any = SimpleNamespace(size=2, levels=[SimpleNamespace(size=2, rank=0)])
    cutting = Cutting.of(layout, "adamw")
    reduction = Reduction(ops, ranks, layout, MYLLM_1B.n_layers, cutting, beside=beside)
    assert (reduction.listener is not None) == beside
    told: list[int] = []
    stepper, data = stepper_of(config), TrainingData(config)
    if beside:
        monkeypatch.setattr(Reduction, "listener", told.append)
    stepper.gradient([data.batch(i, 1) for i in range(4)], step=1, first_sample=0)
    assert told == ([2, 1, 0] if beside else [])  # once, not for each of four


def test_the_gradient_of_a_step_with_nothing_to_predict_is_not_finite(tmp_path: Path) -> None:
    config = prepare(tmp_path)
    batch = TrainingData(config).batch(0, 8)
    empty = batch._replace(mask=np.zeros_like(batch.mask))
    stepper = stepper_of(config)
    found = stepper.gradient([empty], 5, 0)
    assert found.n_valid == 0 and not found.finite
    assert stepper.gradient([batch], 6, 0).finite  # the buffers are there for the next one


# ---- checkpoints ---------------------------------------------------------------------------------


def state_of(config: RunFile, step: int = 3) -> checkpoint.State:
    return checkpoint.State(
        step=step,
        updates=step,
        position=8 * step,
        seed=0,
        tokenizer_sha256=None,
        config=config.to_dict(),
        monitor=Memory(),
    )


def saved(folder: Path, stepper: Stepper, state: checkpoint.State) -> Path:
    return saving.Saving(folder, stepper, state, Solo(), None).finish()


def test_a_checkpoint_gives_back_every_bit(tmp_path: Path) -> None:
    config = prepare(tmp_path)
    data = TrainingData(config)
    stepper = stepper_of(config)
    stepper.update(stepper.gradient([data.batch(0, 8)], 1, 0), 0.01)
    path = saved(tmp_path / "c", stepper, state_of(config))
    assert path == checkpoint.find(tmp_path / "c") == checkpoint.find(path)
    assert not list((tmp_path / "c").glob("*.tmp"))
    other = stepper_of(config)
    state = checkpoint.load(path, other, Solo())
    for name in ("step", "updates", "position", "seed", "config", "monitor"):
        assert getattr(state, name) == getattr(state_of(config), name)
    for name in ("master", "m", "v"):
        np.testing.assert_array_equal(getattr(stepper, name), getattr(other, name))
    assert other.updates == 3
    np.testing.assert_array_equal(other.params["embedding.weight"].ravel(), other.master[:640])
    np.testing.assert_array_equal(load_master(path), stepper.master)


@pytest.mark.parametrize("name", ["master", "m", "v"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    config = prepare(tmp_path)
    stepper = stepper_of(config)
    path = saved(tmp_path / "c", stepper, state_of(config))
    raw = bytearray((path / f"{name}.bin").read_bytes())
    raw[101] ^= 4
    (path / f"{name}.bin").write_bytes(raw)
    with pytest.raises(AllRanksError, match=f"{name}.bin is damaged: elements 0 to"):
        checkpoint.load(path, stepper, Solo())
    (path / f"{name}.bin").write_bytes(raw[:-4])
    with pytest.raises(AllRanksError, match="bytes but has"):
        checkpoint.load(path, stepper, Solo())
    (path / f"{name}.bin").unlink()
    with pytest.raises(AllRanksError, match=rf"has no {name}\.bin: .*; take an older one"):
        checkpoint.load(path, stepper, Solo())
    (path / "manifest.json").write_text("{")
    with pytest.raises(AllRanksError, match="is damaged"):
        checkpoint.load(path, stepper, Solo())
    (path / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no manifest.json; take an older one: .*latest"):
        load_model(tmp_path / "c", "reference")


def test_a_failed_save_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = prepare(tmp_path)
    stepper = stepper_of(config)
    first = saved(tmp_path / "c", stepper, state_of(config, 1))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(AllRanksError, match=r"could not be written \(No space left"):
        saved(tmp_path / "c", stepper, state_of(config, 2))
    monkeypatch.undo()
    assert checkpoint.pointed(tmp_path / "c") == first
    assert [p.name for p in (tmp_path / "c").glob("step-*")] == [first.name]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    config = prepare(tmp_path)
    stepper = stepper_of(config)
    folder = tmp_path / "c"
    for step in range(1, 6):
        saved(folder, stepper, state_of(config, step))
        if step == 2:
            saving.point(folder, "best", checkpoint.folder_name(2))
        for path in saving.prune(folder, keep=2):
            assert checkpoint.step_of(path) is None
            shutil.rmtree(path)
    (folder / "step-00000009.tmp").mkdir()  # what crashes leave
    (folder / "step-00000001.old").mkdir()
    left = saving.prune(folder, keep=2)
    assert sorted(path.name for path in left) == ["step-00000001.old", "step-00000009.tmp"]
    assert checkpoint.steps(folder) == [2, 4, 5]
    assert checkpoint.find(folder).name == checkpoint.folder_name(2)
    with pytest.raises(FileNotFoundError, match="no folder of a run"):
        checkpoint.find(tmp_path / "elsewhere")


# ---- guards and metrics --------------------------------------------------------------------------


def test_guards_count_bad_steps_in_a_row_and_score_spikes() -> None:
    guards = Guards(3)
    rng = np.random.default_rng(0)
    scores = [guards.look(4 + 0.1 * float(rng.standard_normal()), True) for _ in range(200)]
    assert scores[:10] == [None] * 10
    late = [z for z in scores[100:] if z is not None]
    assert len(late) == 100 and 0.5 < float(np.std(late)) < 1.5
    copy = Guards(3, guards.remember(None))
    spike = guards.look(5.0, True)
    assert spike is not None and spike > 6 and copy.look(5.0, True) == spike
    for expected in (False, False, True):
        assert guards.look(math.nan, False) is None
        assert guards.exhausted(8) is expected
    guards.look(4.0, True)
    assert not guards.exhausted(8)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no such device")
def test_what_could_not_be_written_is_told_once(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0)
    metrics._file = open("/dev/full", "w", buffering=1)
    with pytest.raises(OSError, match="No space left on device"):
        metrics.write({"step": 1})
    metrics.close()
    other = Metrics(tmp_path, 0)
    other._file = open("/dev/full", "w")
    other._file.write("what waits")
    with pytest.raises(OSError, match="No space left on device"):
        other.close()


def test_texts_that_leave_a_step_nothing_to_predict_try_the_patience_less() -> None:
    learned, silent = Guards(3), Guards(3)
    learned.look(4.0, True)
    for step in range(1, 3 * SILENT + 1):
        for guards, most in ((learned, 3 * SILENT), (silent, 3)):
            guards.look(math.nan, False)
            assert guards.exhausted(0) == (step >= most)
            assert guards.exhausted(1) == (step >= 3)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.inf), (math.inf, math.nan)])
def test_a_gradient_that_is_not_finite_is_known(loss: float, norm: float) -> None:
    assert not Gradient(loss, 1, norm, [np.zeros(1)]).finite
    assert Gradient(1.0, 1, 2.0, [np.zeros(1)]).finite


def test_sum_of_is_exact_and_keeps_what_is_not_finite() -> None:
    assert sum_of([1e16, 1.0, -1e16]) == 1.0
    assert math.isnan(sum_of([1.0, math.nan])) and sum_of([math.inf, 1.0]) == math.inf


def test_metrics_are_cut_at_the_resumed_step(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0)
    for step in range(1, 6):
        metrics.write({"step": step, "loss": math.nan if step == 2 else 1.0})
    metrics.close()
    with metrics.path.open("a") as file:
        file.write('{"step": 6, "lo')  # a crash in the middle of a line
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    metrics = Metrics(tmp_path, 3)
    metrics.write({"step": 4, "loss": 2.0})
    metrics.close()
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path)][2:] == [(3, 1.0), (4, 2.0)]
    assert read_metrics(tmp_path)[1]["loss"] is None
    metrics.path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2 of"):
        read_metrics(tmp_path)


def test_together_says_a_failure_on_every_rank() -> None:
    def fail() -> None:
        raise FileNotFoundError(2, "No such file or directory", "a.bin")

    with pytest.raises(AllRanksError, match=r"a\.bin: No such file"):
        together(Solo(), fail)
    assert together(Solo(), lambda: 5) == [5]


def test_a_rank_that_aborts_is_gone_even_when_abort_returns() -> None:
    code = (
        "import types; from dist.comm import Mpi; m = Mpi.__new__(Mpi); "
        "m._comm = types.SimpleNamespace(Abort=lambda status: None); m.abort(7); print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "")
