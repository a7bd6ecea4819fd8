"""The ops that are timed one by one, and those that the cpu's benchmark times on NumPy's arrays."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from reference.ops import Ops
from reference.types import Array, DropoutKey


class OpCase(NamedTuple):
    """One op on arrays of one size."""

    what: str
    op: str  # its name in the contract, without _forward
    arrays: tuple[Array, ...]
    dout: Array | None = None  # None: the forward alone is timed
    options: Mapping[str, Any] = {}
    bar: float | None = None
    limit: float = 1e-4  # on the relative difference from a peer
    moved: tuple[float, float] = (0, 0)  # bytes, of forward and backward, at least
    operations: tuple[float, float] = (0, 0)  # floating-point, of what is bound by arithmetic

    def forward(self, ops: Ops) -> Callable[[], Any]:
        """Return the call of a forward, which gives (out, cache), or of what has no backward."""
        op = getattr(ops, f"{self.op}_forward", None) or getattr(ops, self.op)
        return partial(op, *self.arrays, **self.options)

    def run(self, ops: Ops) -> list[Array]:
        """Return the output and the gradients."""
        given = self.forward(ops)()
        out, cache = given if isinstance(given, tuple) else (given, None)
        if self.dout is None:
            return [out]
        gradients = getattr(ops, f"{self.op}_backward")(self.dout, cache)
        if not isinstance(gradients, tuple):
            return [out, gradients]
        return [out, *(gradient for gradient in gradients if gradient is not None)]


# Those of a small model; some that no tile divides; 64 MB, which is more than a cache has
SIZES = ((4096, 384), (1021, 1409), (8192, 2048))

# judged by the bytes that they move (bandwidth.py), not by their time beside PyTorch's
BY_BYTES = ("add", "scale", "relu", "embedding", "softmax", "rmsnorm", "layernorm")


def small_ops(sizes: Iterable[tuple[int, int]] = SIZES) -> Iterator[OpCase]:
    """Yield the ops bound by memory, on arrays that many caches hold and on some that none does."""
    rng = np.random.default_rng(0)
    eps, key = {"eps": 1e-5}, DropoutKey(1, 2, 3, 4)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, dtype=np.float32)

    def case(at: str, op: str, *arrays: Array, limit: float = 1e-4, **more: Any) -> OpCase:
        alone = " forward" if op in ("add", "relu") and "dout" not in more else ""
        bar = None if op in BY_BYTES else 0.35
        return OpCase(f"{op}{alone} {at}", op, arrays, bar=bar, limit=limit, **more)

    for n, width in sizes:
        at = f"({n}, {width})"
        x, dout, gain, bias = normal(n, width), normal(n, width), normal(width), normal(width)
        yield case(at, "rmsnorm", x, gain, dout=dout, options=eps)
        yield case(at, "layernorm", x, gain, bias, dout=dout, options=eps)
        yield case(at, "swiglu", normal(n, 2 * width), dout=dout)
        yield case(at, "gelu", x, dout=dout)
        yield case(at, "gelu_tanh", x, dout=dout)
        heads = normal(8, n // 8, 6, 64)
        turned: dict[str, Any] = {"dout": normal(*heads.shape), "options": {"base": 1e4}}
        yield case(str(heads.shape), "rope", heads, **turned)
        ids = rng.integers(0, 8192, n).astype(np.int32)
        yield case(f"{at}, V = 8192", "embedding", ids, normal(8192, width), dout=dout)
        yield case(at, "softmax", x)
        yield case(at, "scale", x, dout=dout, options={"factor": 0.3})
        yield case(at, "add", x, dout)
        yield case(at, "relu", x)
        yield case(at, "relu", x, dout=dout)
        if n == 4096:  # the bits are each library's own
            dropped: dict[str, Any] = {
                "dout": dout,
                "options": {"p": 0.1, "key": key},
                "limit": math.inf,
            }
            yield case(at, "dropout", x, **dropped)
    # PyTorch adds up 12.6 M squares in float32
    yield case("12.6 M", "global_norm", normal(12_600_000), limit=1e-2)


def products() -> Iterator[OpCase]:
    """Yield linear layers of small models and of GPT-2's width; of few rows the forward alone."""
    rng = np.random.default_rng(0)
    shapes = [(512, 96, 96), (512, 96, 512), (1024, 128, 128), (1024, 128, 704), (1024, 352, 128)]
    shapes += [(1024, 192, 1024), (2048, 384, 2048), (1024, 768, 3072)]
    few = [(8, 768, 3072), (24, 768, 768), (48, 512, 512), (256, 128, 128)]
    for rows, inner, width in shapes + few:
        x = rng.standard_normal((rows, inner), dtype=np.float32)
        weight = rng.standard_normal((inner, width), dtype=np.float32)
        what, dout = f"({rows}, {inner}) ({inner}, {width})", None
        if (rows, inner, width) in few:
            what = f"forward {what}"
        else:
            dout = rng.standard_normal((rows, width), dtype=np.float32)
        yield OpCase(f"linear {what}", "linear", (x, weight), dout, {"bias": None})


def attention(length: int, batch: int, mode: str) -> OpCase:
    """Return causal attention with 8 query and 2 key/value heads of 64."""
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((batch, length, 12, 64), dtype=np.float32)
    dout = rng.standard_normal((batch, length, 8, 64), dtype=np.float32)
    bars = {512: 0.50, 1021: None, 2048: 0.60, 8192: 0.80}
    return OpCase(
        f"attention forward + backward, {mode}, T = {length}",
        "attention",
        (qkv[:, :, :8], qkv[:, :, 8:10], qkv[:, :, 10:]),
        dout,
        bar=bars[length] if mode == "float32" else 0.45,
        limit=1e-4 if mode == "float32" else 3e-2,
    )
