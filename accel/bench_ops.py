"""The ops that ``accel/bench.py`` times one by one, ours and PyTorch's way of writing each."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reference.ops import Ops

Array = npt.NDArray[Any]

ALLOCATING = 0.35  # the bar


class OpCase(NamedTuple):
    """One op on arrays of one size."""

    what: str
    arrays: list[Array]
    cotangent: Array | None  # None: no backward
    ours: Callable[[Ops, list[Array], Array | None], list[Any]]
    torch: Callable[..., Any]  # (torch, torch.nn.functional, *tensors) -> tensor
    bar: float = ALLOCATING
    into: Callable[..., Any] | None = None  # (torch, F, out, *tensors): the forward with out=
    limit: float = 1e-4  # on the relative difference between the two

    def results(self, ops: Ops) -> list[Array]:
        """Return the output and the gradients."""
        return [x for x in self.ours(ops, self.arrays, self.cotangent) if x is not None]


# Those of a small model; some that no tile divides; 64 MB, which is more than a cache has
SIZES = ((4096, 384), (1021, 1409), (8192, 2048))


def op_cases() -> Iterator[OpCase]:
    """Yield the ops on arrays that many caches hold, and on arrays that none does."""
    for n, width in SIZES:
        rng = np.random.default_rng(0)

        def normal(*shape: int, rng: np.random.Generator = rng) -> Array:
            return rng.standard_normal(shape, dtype=np.float32)

        at = f"({n}, {width})"
        x, dout, gain, bias = normal(n, width), normal(n, width), normal(width), normal(width)
        yield OpCase(f"rmsnorm {at}", [x, gain], dout, _norm("rmsnorm"), _torch_rmsnorm)
        yield OpCase(f"layernorm {at}", [x, gain, bias], dout, _norm("layernorm"), _torch_layernorm)
        yield OpCase(f"swiglu {at}", [normal(n, 2 * width)], dout, _plain("swiglu"), _torch_swiglu)
        yield OpCase(f"gelu {at}", [x], dout, _plain("gelu"), lambda t, F, x: F.gelu(x))
        yield OpCase(
            f"gelu_tanh {at}",
            [x],
            dout,
            _plain("gelu_tanh"),
            lambda t, F, x: F.gelu(x, approximate="tanh"),
        )
        heads = normal(8, n // 8, 6, 64)
        yield OpCase(f"rope {heads.shape}", [heads], normal(*heads.shape), _rope, _torch_rope)
        ids = rng.integers(0, 8192, n).astype(np.int32)
        table = normal(8192, width)
        yield OpCase(
            f"embedding {at}, V = 8192",
            [ids, table],
            dout,
            _plain("embedding"),
            lambda t, F, ids, table: F.embedding(ids.long(), table),
        )
        yield OpCase(f"softmax {at}", [x], None, _softmax, lambda t, F, x: t.softmax(x, -1))
        yield OpCase(f"scale {at}", [x], dout, _scale, lambda t, F, x: 0.3 * x)
        yield OpCase(
            f"add forward {at}",
            [x, dout],
            None,
            lambda ops, arrays, _: [ops.add_forward(*arrays)[0]],
            lambda t, F, a, b: a + b,
            into=lambda t, F, out, a, b: t.add(a, b, out=out),
        )
        yield OpCase(
            f"relu forward {at}",
            [x],
            None,
            lambda ops, arrays, _: [ops.relu_forward(*arrays)[0]],
            lambda t, F, x: t.relu(x),
            into=lambda t, F, out, x: t.clamp(x, min=0, out=out),
        )
        yield OpCase(f"relu {at}", [x], dout, _plain("relu"), lambda t, F, x: t.relu(x))
    flat = [normal(12_600_000) for _ in range(2)]
    yield OpCase(
        "global_norm, 12.6 M",
        flat[:1],
        None,
        lambda ops, arrays, _: [np.asarray(ops.global_norm(arrays[0]))],
        lambda t, F, x: t.linalg.vector_norm(x),
        limit=1e-2,  # PyTorch adds up 12.6 M squares in float32
    )


def _plain(name: str) -> Callable[[Ops, list[Array], Array | None], list[Any]]:
    def run(ops: Ops, arrays: list[Array], dout: Array | None) -> list[Any]:
        out, cache = getattr(ops, f"{name}_forward")(*arrays)
        return [out, getattr(ops, f"{name}_backward")(dout, cache)]

    return run


def _norm(name: str) -> Callable[[Ops, list[Array], Array | None], list[Any]]:
    def run(ops: Ops, arrays: list[Array], dout: Array | None) -> list[Any]:
        out, cache = getattr(ops, f"{name}_forward")(*arrays, eps=1e-5)
        return [out, *getattr(ops, f"{name}_backward")(dout, cache)]

    return run


def _rope(ops: Ops, arrays: list[Array], dout: Array | None) -> list[Any]:
    assert dout is not None
    out, cache = ops.rope_forward(arrays[0], base=1e4)
    return [out, ops.rope_backward(dout, cache)]


def _scale(ops: Ops, arrays: list[Array], dout: Array | None) -> list[Any]:
    assert dout is not None
    out, cache = ops.scale_forward(arrays[0], factor=0.3)
    return [out, ops.scale_backward(dout, cache)]


def _softmax(ops: Ops, arrays: list[Array], dout: Array | None) -> list[Any]:
    return [ops.softmax(arrays[0])]


def _torch_rmsnorm(t: Any, F: Any, x: Any, gain: Any) -> Any:
    return F.rms_norm(x, gain.shape, gain, 1e-5)


def _torch_layernorm(t: Any, F: Any, x: Any, gain: Any, bias: Any) -> Any:
    return F.layer_norm(x, gain.shape, gain, bias, 1e-5)


def _torch_swiglu(t: Any, F: Any, x: Any) -> Any:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _torch_rope(t: Any, F: Any, x: Any) -> Any:
    """Rotate as models in PyTorch do, with the tables at hand."""
    cos, sin = _tables(t, x.shape[1], x.shape[3])
    even, odd = x[..., 0::2], x[..., 1::2]
    return t.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


_kept: dict[tuple[int, int], Any] = {}


def _tables(t: Any, length: int, width: int) -> Any:
    if (length, width) not in _kept:
        omega = 1e4 ** (-np.arange(0, width, 2) / width)
        angle = np.arange(length)[:, None, None] * omega
        _kept[length, width] = tuple(t.from_numpy(f(angle)).float() for f in (np.cos, np.sin))
    return _kept[length, width]
