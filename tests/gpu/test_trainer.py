"""``myllm train`` on a real GPU: the cpu backend's losses, the same bits twice, resuming, ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import accel
from accel.cuda import attention
from accel.cuda import device as devices
from dist.comm import Solo
from dist.config import RunFile
from dist.config import load as load_run_file
from dist.stopping import StopRequest
from dist.train import Trainer
from tests.helpers import ROOT
from tests.helpers.runs import digest, losses, prepare, save_run_file, train, with_run

try:
    accel.load("cuda")
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)
devices.use(None)

# more than one block of 65,536 parameters, so that two ranks have something to own
WIDE = {"model__d_model": 96, "model__d_ff": 256, "model__dropout_residual": 0.2}


def on_ranks(config: RunFile, ranks: int) -> tuple[int, str]:
    path = save_run_file(config, Path(config.run.out).with_suffix(".toml"))
    done = subprocess.run(
        [sys.executable, "-m", "dist", "train", str(path), "--ranks", str(ranks)],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def gpus() -> int:
    from cupy_backends.cuda.api import runtime

    return int(runtime.getDeviceCount())


def test_a_run_gives_the_losses_of_the_cpu_s(tmp_path: Path) -> None:
    config = prepare(tmp_path, **WIDE)
    cpu = with_run(config, backend="cpu", out=str(tmp_path / "cpu"))
    gpu = with_run(config, backend="cuda", out=str(tmp_path / "gpu"))
    assert train(cpu) == train(gpu) == 0
    assert losses(gpu) == pytest.approx(losses(cpu), rel=1e-5)


@pytest.mark.parametrize("compute", ["float32", "bf16"])
def test_twice_and_in_parts_gives_the_same_bits(tmp_path: Path, compute: str) -> None:
    config = prepare(tmp_path, run__backend="cuda", run__compute=compute, **WIDE)
    runs = [with_run(config, out=str(tmp_path / name)) for name in ("one", "two", "parts")]
    assert train(runs[0]) == train(runs[1]) == 0
    for _ in range(config.steps):
        stop = StopRequest()
        stop.signal = 15
        Trainer(runs[2], Solo()).run(stop)
    assert len({digest(run) for run in runs}) == 1


def test_attention_s_path_is_chosen_and_written_down_and_each_may_be_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepare(tmp_path, run__backend="cuda", run__compute="bf16", **WIDE)
    assert train(config) == 0
    said = capsys.readouterr().out
    chosen = load_run_file(Path(config.run.out) / "config.toml").run.attention
    assert f"attention: {chosen} (" in said and "left out" not in said
    for path in attention.offered():
        named = with_run(config, attention=path, out=str(tmp_path / path))
        assert train(named) == 0
        assert losses(named) == pytest.approx(losses(config), rel=1e-2)
        assert path != chosen or digest(named) == digest(config)


def test_products_algorithms_are_chosen_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    often = {"run__checkpoint_every": 1, "run__keep": 9}
    config = prepare(tmp_path, run__backend="cuda", run__compute="bf16", **often, **WIDE)
    assert train(config) == 0
    said = capsys.readouterr().out
    chosen = load_run_file(Path(config.run.out) / "config.toml").run.products
    assert said.count("products: ") == 1 and "left out" not in said and chosen != "auto"
    whole = digest(config)
    (Path(config.run.out) / "checkpoints" / "latest").write_text("step-00000003\n")
    assert train(config) == 0
    assert "as before" in capsys.readouterr().out and digest(config) == whole
    own = with_run(config, products="default", out=str(tmp_path / "own"))
    assert train(own) == 0
    assert losses(own) == pytest.approx(losses(config), rel=1e-2)


def test_two_ranks_may_share_a_gpu_by_way_of_host_memory(tmp_path: Path) -> None:
    config = prepare(tmp_path, run__backend="cuda", run__comm="mpi", **WIDE)
    alone = with_run(config, out=str(tmp_path / "alone"))
    assert train(alone) == 0
    status, said = on_ranks(config, 2)
    assert status == 0, said
    assert "by MPI through host memory" in said
    assert losses(config) == pytest.approx(losses(alone), rel=1e-6)


@pytest.mark.skipif(gpus() < 2, reason="NCCL wants two GPUs for two ranks")
@pytest.mark.parametrize("compute", ["float32", "bf16"])
def test_nccl_and_mpi_give_the_same_bits(tmp_path: Path, compute: str) -> None:
    config = prepare(tmp_path, run__backend="cuda", run__compute=compute, **WIDE)
    found = {}
    for how in ("nccl", "mpi"):
        run = with_run(config, comm=how, out=str(tmp_path / how))
        status, said = on_ranks(run, 2)
        assert status == 0, said
        found[how] = digest(run)
    assert found["nccl"] == found["mpi"]


@pytest.mark.skipif(gpus() > 1, reason="there are two GPUs")
def test_nccl_on_one_gpu_is_refused_in_a_sentence(tmp_path: Path) -> None:
    config = prepare(tmp_path, run__backend="cuda", run__comm="nccl")
    status, said = on_ranks(config, 2)
    assert status == 1 and "NCCL" in said and "Traceback" not in said
