"""Runs on a GPU write down by which algorithms of cublasLt their products go, and keep to them.

No GPU and no driver: the stand-in of ``tests/cuda/test_products.py``.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel import DEFAULT
from accel.cuda import products
from dist import checkpoint
from dist.config import RunFile
from dist.config import load as load_run_file
from dist.model import load_model
from tests.cuda_shim import require

require.shim()
require.cuda_files("c*/include/cublasLt.h")

from tests.cuda_shim.cublaslt import (  # noqa: E402
    HALVES,
    VERSION,
    Recordable,
    WithCublasLt,
    algorithm,
)
from tests.cuda_shim.myllm import clocked, install  # noqa: E402
from tests.helpers.gpu_ranks import train_on_ranks  # noqa: E402
from tests.helpers.runs import digest, losses, prepare, train, with_run  # noqa: E402


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., WithCublasLt]:
    """Put a GPU in place whose products take so long by algorithms 1, 2 and so on."""
    monkeypatch.setenv("MYLLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("accel.cuda.device._device", None)  # to be set, and forgotten

    def put(version: int = VERSION, **numbered: float) -> WithCublasLt:
        monkeypatch.setattr("accel.cuda.device._device", None)
        device: Any = clocked(
            {"mma": 1.0} | {n[1:]: s for n, s in numbered.items()}, monkeypatch.setattr
        )
        device.library.standin_version(version)
        device._lt = Recordable(device.library, device)
        install("none", monkeypatch.setattr, device)
        return device

    return put


def run(folder: Path, **overrides: Any) -> RunFile:
    often = {
        "run__checkpoint_every": 1,
        "run__keep": 9,
        "train__steps": 2,
        "train__global_batch": 2,
    }
    return prepare(folder, run__backend="cuda", run__compute="bf16", **often, **overrides)


def test_a_run_writes_its_algorithms_down_and_keeps_them(
    tmp_path: Path, gpu: Callable[..., WithCublasLt], capsys: pytest.CaptureFixture[str]
) -> None:
    config = run(tmp_path)
    gpu(s1=0.5, s2=0.25)
    own = with_run(config, products=DEFAULT, out=str(tmp_path / "own"))
    assert train(own) == 0
    assert "products" not in capsys.readouterr().out  # nothing was open
    device = gpu(s1=0.5, s2=0.25)
    assert train(config) == 0
    said = capsys.readouterr().out
    assert said.count("products: ") == 1 and " by algorithms of cublasLt's (" in said
    chosen = load_run_file(Path(config.run.out) / "config.toml").run.products
    assert all(line.endswith(algorithm(HALVES).hex()) for line in chosen[1:])
    saved = [checkpoint.read_manifest(p) for p in sorted(Path(config.run.out).glob("*/step-*"))]
    assert [state.products for state in saved] == [chosen, chosen]
    whole = digest(config)
    assert digest(own) != whole

    latest = Path(config.run.out) / "checkpoints" / "latest"
    latest.write_text("step-00000001\n")
    device = gpu(s1=0.25, s2=0.5)  # would choose the other one
    assert train(config) == 0
    said = capsys.readouterr().out
    assert "products: by algorithms of cublasLt's, as before" in said and "last bits" not in said
    assert digest(config) == whole

    device = gpu(s1=0.25, s2=0.5)
    assert load_model(config.run.out, "cuda", "bf16").ops and device.products
    device = gpu(130200, s1=0.25, s2=0.5)
    assert load_model(config.run.out, "cuda", "bf16").ops and not device.products
    latest.write_text("step-00000001\n")
    assert train(config) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        "myllm train: the run's products go by algorithms of cuBLAS 13.1.0, which"
    )
    assert said.count("\n") == 1 and "run.products may be 'default'" in said
    assert train(config, "--set", "run.products=default") == 0
    said = capsys.readouterr().out
    before = r"by the backend cuda \(bf16, attention by mma, products by cublasLt [0-9a-f]{8}\): "
    now = r"from here on the last bits are those of cuda \(bf16, attention by mma\)"
    assert re.search(before + now, said)


def test_a_run_that_goes_on_with_other_shapes_chooses_for_them(
    tmp_path: Path, gpu: Callable[..., WithCublasLt], capsys: pytest.CaptureFixture[str]
) -> None:
    """What was chosen for a micro-batch of another size would multiply nothing."""
    config = run(tmp_path)
    gpu(s1=0.5)
    assert train(config) == 0
    device = gpu(s1=0.5)
    wider = ("--set", "train.micro_batch=2", "--set", "train.steps=3", "--changed")
    assert train(config, *wider) == 0
    assert " by algorithms of cublasLt's (" in capsys.readouterr().out.split("as before")[-1]
    assert set(device.products) == set(products.of_step(config.model, 2))


def test_algorithms_that_are_given_for_other_shapes_are_not_passed_over_in_silence(
    tmp_path: Path, gpu: Callable[..., WithCublasLt], capsys: pytest.CaptureFixture[str]
) -> None:
    """A resolved file, say, that is used again with another micro-batch."""
    config = run(tmp_path)
    gpu(s1=0.5)
    assert train(config) == 0
    chosen = load_run_file(Path(config.run.out) / "config.toml")
    capsys.readouterr()
    for micro_batch, says in ((1, ""), (2, "products: run.products names none of this run's")):
        gpu(s1=0.5)
        again = with_run(chosen, out=str(tmp_path / f"again-{micro_batch}"))
        assert train(again, "--set", f"train.micro_batch={micro_batch}") == 0
        said = capsys.readouterr().out
        assert says in said and ("products: " in said) == bool(says)


def test_a_run_without_the_library_keeps_cublas_s_choice(
    tmp_path: Path, gpu: Callable[..., WithCublasLt], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    config = run(tmp_path)
    install("none", monkeypatch.setattr)
    assert train(config) == 0
    assert "products: by cuBLAS's own choice (the shim has no cublasLt)" in capsys.readouterr().out
    whole = digest(config)
    (Path(config.run.out) / "checkpoints" / "latest").write_text("step-00000001\n")
    gpu(s1=0.5)
    assert train(config) == 0 and digest(config) == whole
    assert "products: by cuBLAS's own choice, as before" in capsys.readouterr().out


def test_a_run_of_before_there_was_a_choice_goes_on_by_cublas_s(tmp_path: Path) -> None:
    class Old:
        config: dict[str, Any] = {"run": {"backend": "cuda"}}  # noqa: RUF012

    kept = checkpoint.State.products.fget  # type: ignore[attr-defined]
    assert kept(Old) == DEFAULT
    Old.config["run"]["backend"] = "cpu"
    assert kept(Old) == "auto"


def test_products_that_a_run_cannot_take_are_one_sentence(
    tmp_path: Path, gpu: Callable[..., WithCublasLt], capsys: pytest.CaptureFixture[str]
) -> None:
    config = run(tmp_path)
    gpu(s1=0.5)
    for words, says in (
        (
            ["run.products=fast"],
            "run.products must be 'auto', 'default', or what a run has written",
        ),
        (["run.products=default", "run.backend=cpu"], "names algorithms of GPUs, and run.backend"),
        (["run.products=[1]"], "run.products must be a string or a list of strings"),
    ):
        assert train(config, *(word for one in words for word in ("--set", one))) == 1
        said = capsys.readouterr().err
        assert says in said and said.count("\n") == 1


def test_in_float32_nothing_is_chosen(
    tmp_path: Path, gpu: Callable[..., WithCublasLt], capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_run(run(tmp_path), compute="float32")
    device = gpu(s1=0.5)
    assert train(config) == 0
    assert "products" not in capsys.readouterr().out and not device.products
    assert load_run_file(Path(config.run.out) / "config.toml").run.products == "auto"


@pytest.mark.mpi
def test_rank_0_chooses_and_all_take_it(tmp_path: Path) -> None:
    """The other's GPU would choose the other algorithms; and one of another version stops all."""
    config = run(tmp_path, model__n_layers=1)
    one, two = {"mma": 1.0, "1": 0.5, "2": 0.25}, {"mma": 1.0, "1": 0.25, "2": 0.5}
    found = {}
    for name, by_rank in (("halves", [one, two]), ("backward", [two, one])):
        both = with_run(config, out=str(tmp_path / f"two-{name}"))
        status, out, err = train_on_ranks(both, 2, "fake", seconds=json.dumps(by_rank))
        assert status == 0, err
        assert out.count("products: ") == 1
        alone = with_run(config, out=str(tmp_path / f"one-{name}"))
        assert train_on_ranks(alone, 1, "none", seconds=json.dumps(by_rank[:1]))[0] == 0
        found[name] = digest(both), losses(both)
        assert found[name] == (digest(alone), losses(alone))
    assert found["halves"] != found["backward"]
