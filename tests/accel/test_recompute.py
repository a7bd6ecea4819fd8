"""What the backward makes again: the same gradients, bit for bit, on every backend."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import accel
from accel.cuda import device as devices
from accel.cuda import ops as cuda
from accel.cuda import ops_bf16 as cuda_bf16
from dist.plan import activation_bytes
from reference import ops as reference
from reference.config import Config
from reference.model import (
    ModelCache,
    hidden_forward,
    loss_backward,
    loss_forward,
    start_pass,
)
from reference.params import decoder_layout
from reference.types import Array, DropoutKey
from tests.cuda_shim import device as shim
from tests.cuda_shim import require
from tests.helpers.models import MODELS

BACKENDS = ["reference", "cpu", "cpu bf16", "cuda", "cuda bf16"]
KEY = DropoutKey(seed=3, step=4, sample=5, site=0)
B, T = 2, 9


@pytest.fixture(scope="module")
def gpu() -> shim.ShimDevice:
    return shim.ShimDevice("shuffled")


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest, gpu: shim.ShimDevice) -> Iterator[Any]:
    name, _, compute = request.param.partition(" ")
    if name != "cuda":
        yield accel.load(name, compute=compute or "float32")
        return
    require.shim()
    before = devices.use(gpu)
    yield cuda_bf16 if compute else cuda
    devices.use(before)


class Counting:
    """A backend that counts which forwards are called."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops
        self.calls: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.ops, name)

        def counted(*arrays: Any, **options: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            return function(*arrays, **options)

        return counted


def gradient(ops: Any, config: Config, recompute: Any) -> tuple[float, Array, dict[str, int]]:
    """Return the loss, its gradient, and how often each forward ran in the backward."""
    layout = decoder_layout(config)
    rng = np.random.default_rng(0)
    flat = layout.init(0) + 0.05 * rng.standard_normal(layout.size).astype(np.float32)
    ids = rng.integers(0, config.vocab_size, (B, T)).astype(np.int32)
    targets = rng.integers(0, config.vocab_size, (B, T)).astype(np.int32)
    documents = np.array([[0, 0, 0, 0, 1, 1, 1, 1, 1]] * B, np.int32)
    params = ops.parameters(layout.views(ops.from_numpy(flat)))
    grad = ops.from_numpy(np.full(layout.size, np.nan, np.float32))
    counting: Any = Counting(ops)
    with ops.step():
        loss, cache = loss_forward(
            counting,
            params,
            config,
            ops.from_numpy(ids),
            ops.from_numpy(targets),
            documents=ops.from_numpy(documents),
            dropout_key=KEY,
            recompute=recompute,
        )
        counting.calls.clear()
        loss_backward(1.0, cache, layout.views(grad))
    again = {n: calls for n, calls in counting.calls.items() if n.endswith("_forward")}
    if config.norm_placement == "post":
        again.pop("add_forward")  # is how gradients meet; a pre-norm's backward adds them itself
    return float(loss.total), np.array(ops.to_numpy(grad)), again


@pytest.mark.parametrize("name", MODELS)
def test_every_level_gives_the_same_bits(ops: Any, name: str) -> None:
    config = MODELS[name]
    loss, expected, again = gradient(ops, config, "none")
    assert np.isfinite(expected).all() and not again
    for level in ("norms", "block"):
        other, got, again = gradient(ops, config, level)
        assert other == loss
        np.testing.assert_array_equal(got, expected)
        assert again  # something was made again


def test_what_each_level_makes_again() -> None:
    config = MODELS["myllm"]  # two blocks
    assert gradient(reference, config, "norms")[2] == {"rmsnorm_forward": 4, "swiglu_forward": 2}
    again = gradient(reference, config, "block")[2]
    assert again["rmsnorm_forward"] == 4 and again["attention_forward"] == 2
    post = gradient(reference, MODELS["original"], "norms")[2]
    assert post == {"relu_forward": 2}  # a post-norm's output is the residual stream


def held(cache: ModelCache) -> int:
    """Return the bytes that the blocks of a cache keep, each array once."""
    found: dict[int, int] = {}

    def look(value: Any) -> None:
        if isinstance(value, np.ndarray):
            while isinstance(value.base, np.ndarray):
                value = value.base
            found[id(value)] = value.nbytes
        elif isinstance(value, tuple | list):
            for part in value:
                look(part)

    for block in cache.blocks:
        look(tuple(block))
    return sum(found.values())


def test_less_is_kept_at_each_level() -> None:
    config = MODELS["myllm"]
    layout = decoder_layout(config)
    params = layout.views(layout.init(0))
    ids = np.zeros((B, T), np.int32)
    kept = {}
    for level in ("none", "norms", "block"):
        kept[level] = held(
            loss_forward(reference, params, config, ids, ids, recompute=level)[1]  # type: ignore[arg-type]
        )
    dropped = 4 * B * T * config.n_layers * (2 * config.d_model + config.d_ff)
    assert kept["none"] - kept["norms"] == dropped
    assert kept["block"] == 4 * B * T * config.n_layers * config.d_model
    nothing = loss_forward(reference, params, config, ids, ids, need_backward=False)[1]
    assert nothing.blocks == []


def test_a_level_that_is_none_is_refused() -> None:
    config = MODELS["myllm"]
    layout = decoder_layout(config)
    ids = np.zeros((B, T), np.int32)
    with pytest.raises(ValueError, match=r"recompute must be one of .*'block'.*, got 'all'"):
        loss_forward(reference, layout.views(layout.init(0)), config, ids, ids, recompute="all")  # type: ignore[arg-type]


def test_a_linear_layer_takes_its_x_later(ops: Any) -> None:
    rng = np.random.default_rng(0)
    x, dout = (rng.standard_normal((2, 5, n)).astype(np.float32) for n in (6, 7))
    arrays = [ops.from_numpy(a, activation=True) for a in (x, dout)]
    params = ops.parameters({"w": ops.from_numpy(rng.standard_normal((6, 7)).astype(np.float32))})
    bias = ops.from_numpy(rng.standard_normal(7).astype(np.float32))
    out, cache = ops.linear_forward(arrays[0], params["w"], bias)
    again, lean = ops.linear_forward(arrays[0], params["w"], bias, keep_x=False)
    np.testing.assert_array_equal(ops.to_numpy(out), ops.to_numpy(again))
    expected = ops.linear_backward(arrays[1], cache)
    got = ops.linear_backward(arrays[1], lean, x=arrays[0])
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(ops.to_numpy(a), ops.to_numpy(b))
    with pytest.raises(ValueError, match="told not to keep x, which must be given"):
        ops.linear_backward(arrays[1], lean)
    with pytest.raises(ValueError, match="told to keep x: do not give it"):
        ops.linear_backward(arrays[1], cache, x=arrays[0])
    with pytest.raises(ValueError, match=r"x must have shape \(2, 5, 6\) to match the forward's x"):
        ops.linear_backward(arrays[1], lean, x=arrays[1])


@pytest.mark.parametrize("compute", ["float32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_the_plan_knows_what_a_gpu_keeps(gpu: shim.ShimDevice, name: str, compute: str) -> None:
    """By the bytes that are alive when the last block is done, and again one block later."""
    require.shim()
    config, item = MODELS[name], 2 if compute == "bf16" else 4
    module: Any = cuda_bf16 if compute == "bf16" else cuda
    layout = decoder_layout(config)
    before = devices.use(gpu)
    params = module.parameters(layout.views(module.from_numpy(layout.init(0))))
    ids = module.from_numpy(np.zeros((B, T), np.int32))
    found = {}
    for level in ("none", "norms", "block"):
        run = start_pass(module, params, config, layout, KEY, level)  # type: ignore[arg-type]
        for _ in range(2):  # the second time, tables are made that are kept for good
            start = gpu.memory()
            x, cache = hidden_forward(run, ids)
            found[level] = gpu.memory() - start
            del cache, x
    devices.use(before)
    plan = activation_bytes(config, B * T, item)
    rows = B * T
    stats = 4 if config.norm == "rmsnorm" else 8
    ends = rows * config.d_model * item  # what the last block gives
    if config.norm_placement == "pre":
        ends = 2 * ends + rows * stats
    if config.position in ("learned", "sinusoidal"):
        ends += 4 * T  # numbers of positions
    one_block = plan["none"] // config.n_layers
    plan["block"] -= one_block  # none is being made again yet
    assert found == {level: kept + ends for level, kept in plan.items()}
