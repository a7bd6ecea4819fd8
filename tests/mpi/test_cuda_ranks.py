"""Ranks with a GPU each, which the shim plays: the same bits, however many, however they talk."""

import json
import os
from pathlib import Path

import pytest

from tests.cuda_shim import require
from tests.helpers.gpu_ranks import train_on_ranks
from tests.helpers.runs import digest, losses, prepare, with_run

require.shim()

# more than one block of 65,536 parameters, so that two ranks have something to own
WIDE = {"model__d_model": 96, "model__d_ff": 256, "model__dropout_residual": 0.2}


@pytest.mark.parametrize("compute", ["bf16", pytest.param("float32", marks=pytest.mark.slow)])
def test_any_number_of_ranks_and_either_carrier_learn_the_same_bits(
    tmp_path: Path, compute: str
) -> None:
    overrides = {"run__compute": compute, "run__eval_every": 2, "train__steps": 3, **WIDE}
    config = prepare(tmp_path, run__backend="cuda", **overrides)
    found = {}
    for ranks, nccl, says in (
        (1, "none", "1 rank (no MPI)"),
        (2, "none", "go by MPI through host memory: NCCL's library was not found"),
        (2, "fake", "go by NCCL 2.32.3"),
        (4, "fake", "go by NCCL 2.32.3"),
    ):
        run = with_run(config, out=str(tmp_path / f"w{ranks}{nccl}"))
        status, out, err = train_on_ranks(run, ranks, nccl)
        assert status == 0, err
        assert says in out
        found[ranks, nccl] = digest(run), losses(run)
    assert all(result == found[1, "none"] for result in found.values())


def test_a_run_goes_on_with_other_ranks_and_on_another_backend(tmp_path: Path) -> None:
    config = prepare(
        tmp_path, run__backend="cuda", run__checkpoint_every=2, run__keep=9, train__steps=4, **WIDE
    )
    assert train_on_ranks(config, 2, "fake")[0] == 0
    whole, lost = digest(config), losses(config)
    latest = Path(config.run.out) / "checkpoints" / "latest"
    latest.write_text("step-00000002\n")
    assert train_on_ranks(config, 1, "none")[0] == 0
    assert digest(config) == whole
    latest.write_text("step-00000002\n")
    assert train_on_ranks(with_run(config, backend="cpu"), 2, "none")[0] == 0
    assert losses(config) == pytest.approx(lost, rel=1e-6)


def test_asking_for_nccl_where_it_is_not_is_said_once(tmp_path: Path) -> None:
    config = prepare(tmp_path, run__backend="cuda", run__comm="nccl")
    status, _, err = train_on_ranks(config, 2, "none")
    assert status == 1
    assert err.count("run.comm is 'nccl', but NCCL's library was not found: pip install") == 1
    assert "Traceback" not in err
    assert not os.path.exists(config.run.out)


def test_rank_0_chooses_attention_s_path_and_all_take_it(tmp_path: Path) -> None:
    """The others' GPUs would choose the other; and one that lacks it stops all, in a sentence."""
    long = {
        "model__context_length": 130,
        "model__n_layers": 1,
        "train__global_batch": 2,
        "train__steps": 1,
    }
    config = prepare(tmp_path, run__backend="cuda", run__compute="bf16", **long)
    slow, fast = {"wgmma": 2.0, "mma": 1.0}, {"wgmma": 1.0, "mma": 2.0}
    found = {}
    for path, by_rank in (("mma", [slow, fast]), ("wgmma", [fast, slow])):
        run = with_run(config, out=str(tmp_path / f"two-{path}"))
        status, out, err = train_on_ranks(run, 2, "fake", seconds=json.dumps(by_rank))
        assert status == 0, err
        assert out.count(f"attention: {path} (") == 1
        alone = with_run(config, out=str(tmp_path / f"one-{path}"), attention=path)
        assert train_on_ranks(alone, 1, "none", seconds=json.dumps([slow]))[0] == 0
        found[path] = digest(run)
        assert digest(alone) == found[path]
    assert found["mma"] != found["wgmma"]

    run = with_run(config, out=str(tmp_path / "mixed"))
    status, _, err = train_on_ranks(run, 2, "fake", seconds=json.dumps([fast, {"mma": 1.0}]))
    assert status == 1
    assert err.count("attention by 'wgmma' needs a GPU of compute capability 9.0") == 1
    assert "Traceback" not in err
