"""The launchers on CuPy's own arrays: op cases by the rule, and steps with the shim's bits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.cuda import device as devices
from accel.cuda import ops, ops_bf16, paths
from dist.comm import Solo
from dist.stopping import StopRequest
from dist.train import Trainer
from tests.cuda_shim import require
from tests.cuda_shim.device import ShimDevice, ShimError
from tests.cuda_shim.myllm import install
from tests.helpers.cuda_cases import (
    attention_by_the_rule,
    attention_cases,
    by_the_rule,
    cases,
    cases_of_no_rows,
    check_nothing,
    rounded,
    run_backend,
)
from tests.helpers.cuda_models import batch, bf16_weights, parameters, train
from tests.helpers.models import MODELS
from tests.helpers.runs import digest, losses, prepare, with_run
from tests.helpers.runs import train as train_run

require.shim()
require.nvrtc()

from tests.cuda_shim.cupy_arrays import CuPyArrays, host  # noqa: E402

TILED = [*attention_cases(((64, 64),))]
EMPTY = [*cases_of_no_rows()]


@pytest.fixture(autouse=True)
def device() -> Iterator[CuPyArrays]:
    found = CuPyArrays()
    before = devices.use(found)
    yield found
    devices.use(before)


@pytest.mark.parametrize("case", [*cases()], ids=[f"{c[0]}: {c[1]}" for c in cases()])
def test_an_op_keeps_to_the_rule_in_both_modes(case: Any) -> None:
    for module, mode in ((ops, "float32"), (ops_bf16, "bf16")):
        for name, closeness in by_the_rule(module, case, mode).items():
            assert closeness.ok, (mode, name, closeness)


@pytest.mark.parametrize("case", TILED, ids=[what for _, what, _, _ in TILED])
def test_attention_keeps_to_the_rule(case: Any) -> None:
    op, _, arrays, options = case
    got = run_backend(ops_bf16, op, rounded(arrays), options)
    for name, closeness in attention_by_the_rule(case, got).items():
        assert closeness.ok, (name, closeness)


@pytest.mark.parametrize("module", [ops, ops_bf16], ids=["float32", "bf16"])
@pytest.mark.parametrize("case", EMPTY, ids=[f"{op}: {what}" for op, what, _, _ in EMPTY])
def test_of_no_rows_there_is_nothing_and_its_sums_are_zero(case: Any, module: Any) -> None:
    check_nothing(module, case)


@pytest.mark.parametrize("name", ["myllm", "gpt2", "dropout"])
@pytest.mark.parametrize("module", [ops, ops_bf16], ids=["float32", "bf16"])
def test_steps_have_the_bits_of_those_on_numpy_s_arrays(
    device: CuPyArrays, name: str, module: Any
) -> None:
    config = MODELS[name]
    flat, data = bf16_weights(config, parameters(config)), batch(config)
    mine = train(module, config, flat, data, 3)
    assert device.arena.capacity  # the third step's arrays are pieces of one block
    devices.use(ShimDevice())
    theirs = train(module, config, flat, data, 3)
    assert mine[0] == theirs[0]
    for a, b in zip(mine[1:], theirs[1:], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("compute", ["float32", "bf16"])
def test_a_trainer_s_run_and_its_resumption_have_the_bits_of_one_on_numpy_s_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compute: str
) -> None:
    few = {"train__steps": 3, "run__eval_every": 2, "model__dropout_residual": 0.2}
    config = with_run(prepare(tmp_path, **few), backend="cuda", compute=compute)
    runs = {}
    for name, arrays in (("cupy", CuPyArrays()), ("numpy", ShimDevice())):
        monkeypatch.setattr("accel.cuda.device._device", None)  # to be set by the run
        install("none", monkeypatch.setattr, arrays)
        runs[name] = with_run(config, out=str(tmp_path / name))
        stop = StopRequest()
        stop.signal = 15
        Trainer(runs[name], Solo()).run(stop)  # a step
        assert train_run(runs[name]) == 0 and arrays.launches
    assert digest(runs["cupy"]) == digest(runs["numpy"])
    assert losses(runs["cupy"]) == losses(runs["numpy"])


def test_attention_s_path_is_checked_and_timed() -> None:
    devices.use(CuPyArrays(warpgroups=True))
    for options in ({}, {"documents": True}, {"alibi": True, "dropout": 0.1, "window": 5}):
        path, said = paths.choose(paths.Shapes(2, 9, 2, 1, 8, **options), remember=False)
        assert path in ("wgmma", "mma") and "left out" not in said


def test_views_are_of_the_same_memory_and_other_arrays_are_refused(device: CuPyArrays) -> None:
    array = device.upload(np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    view = array[:, 1:, ::2]
    np.testing.assert_array_equal(host(view), np.arange(24).reshape(2, 3, 4)[:, 1:, ::2])
    host(view)[...] = -1
    assert (host(array) == -1).sum() == view.size
    with pytest.raises(ShimError, match="CuPy's arrays is wanted, got ndarray"):
        devices.launch("elementwise", "add", 1, a=np.ones(4), b=array, y=array, n=4)
    with pytest.raises(AssertionError):
        device.download(array[:, 0])
