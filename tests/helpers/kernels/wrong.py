"""Wrong kernels: the reference with one mistake in it.

``patches.py`` lists mistakes that people make, as changes of the reference; ``WRITTEN`` are those
that need more than a line, ``subtle.py`` has those that hide; ``mutants.py`` makes many more by
rule. Each comes with the op and the result that has to be named as wrong.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from reference import ops
from reference.types import Array
from tests.helpers.kernels.rewrite import kernel_of


class Written(NamedTuple):
    title: str
    op: str
    wrong: str
    kernel: Any
    dtype: str = "float32"


def _of(op: str, **functions: Any) -> Any:
    """Return the reference's op with some functions replaced."""
    return kernel_of(op, ops, op, **functions)


def arrays_in(value: Any) -> list[Array]:
    """Return the arrays in a cache, however it is nested."""
    if isinstance(value, np.ndarray):
        return [value]
    return [a for item in value for a in arrays_in(item)] if isinstance(value, tuple) else []


def _stale_cache() -> Any:
    """The statistics of the last forward, whichever that was."""
    kept: dict[str, Any] = {}

    def rmsnorm_forward(x: Array, gain: Array, *, eps: float) -> Any:
        out, kept["cache"] = ops.rmsnorm_forward(x, gain, eps=eps)
        return out, None

    def rmsnorm_backward(dout: Array, cache: Any, *, out: Any = None) -> Any:
        return ops.rmsnorm_backward(dout, kept["cache"], out=out)

    return _of("rmsnorm", rmsnorm_forward=rmsnorm_forward, rmsnorm_backward=rmsnorm_backward)


def _table_by_shape() -> Any:
    """A table of angles kept by shape, whatever start and base."""
    tables: dict[Any, Any] = {}

    def rope_forward(x: Array, *, base: float, start: Any = 0, rotate_heads: Any = None) -> Any:
        base, start = tables.setdefault((x.shape, x.dtype, rotate_heads), (base, start))
        return ops.rope_forward(x, base=base, start=start, rotate_heads=rotate_heads)

    return _of("rope", rope_forward=rope_forward)


def _one_buffer() -> Any:
    """Every result in one and the same buffer."""
    buffers: dict[Any, Array] = {}

    def gelu_forward(x: Array) -> Any:
        out, cache = ops.gelu_forward(x)
        buffer = buffers.setdefault((x.shape, x.dtype), np.empty_like(out))
        buffer[...] = out
        return buffer, cache

    return _of("gelu", gelu_forward=gelu_forward)


def _strides_ignored() -> Any:
    """Reads memory as if it were contiguous."""

    def raw(x: Array) -> Array:
        if x.flags.c_contiguous or x.base is None:
            return x
        flat = x.base.reshape(-1)[: x.size]
        return flat.reshape(x.shape) if flat.size == x.size else np.ascontiguousarray(x)

    def relu_forward(x: Array) -> Any:
        return ops.relu_forward(raw(x))

    return _of("relu", relu_forward=relu_forward)


def _writes_its_argument() -> Any:
    def swiglu_backward(dout: Array, cache: Any) -> Array:
        result = ops.swiglu_backward(dout, cache)
        dout *= 2
        return result

    return _of("swiglu", swiglu_backward=swiglu_backward)


def _spends_its_cache() -> Any:
    def attention_backward(dout: Array, cache: Any) -> Any:
        result = ops.attention_backward(dout, cache)
        for array in arrays_in(cache):
            if array.base is None and array.flags.writeable and array.dtype.kind == "f":
                array *= 0.5  # what is its own: the probabilities
        return result

    return _of("attention", attention_backward=attention_backward)


def _tile(size: int, what: str) -> Any:
    """The keys of the last, partial tile are lost."""

    def attention_forward(q: Array, k: Array, v: Array, *rest: Any, **options: Any) -> Any:
        out, cache = ops.attention_forward(q, k, v, *rest, **options)
        S = k.shape[1]
        if what == "forward" and S > size and S % size:
            out = out.copy()
            out[:, -(S % size) :] = 0
        return out, cache

    def attention_backward(dout: Array, cache: Any) -> Any:
        dq, dk, dv = ops.attention_backward(dout, cache)
        S = dk.shape[1]
        if what == "backward" and S > size and S % size:
            dk = dk.copy()
            dk[:, -(S % size) :] *= 0.5
        return dq, dk, dv

    return _of(
        "attention", attention_forward=attention_forward, attention_backward=attention_backward
    )


def _only_with_groups() -> Any:
    def attention_backward(dout: Array, cache: Any) -> Any:
        dq, dk, dv = ops.attention_backward(dout, cache)
        G = dq.shape[2] // dk.shape[2]
        return dq, dk, dv if G < 5 else dv * (4 / G)

    return _of("attention", attention_backward=attention_backward)


def _only_with_mask_and_groups() -> Any:
    def attention_forward(
        q: Array,
        k: Array,
        v: Array,
        alibi: Any = None,
        key_mask: Any = None,
        documents: Any = None,
        **options: Any,
    ) -> Any:
        if key_mask is not None and q.shape[2] > k.shape[2] > 1:
            key_mask = np.ones_like(key_mask)
        return ops.attention_forward(q, k, v, alibi, key_mask, documents, **options)

    return _of("attention", attention_forward=attention_forward)


def _half_precision() -> Any:
    def linear_forward(x: Array, weight: Array, bias: Any = None) -> Any:
        out, cache = ops.linear_forward(x, weight, bias)
        out = (x.astype(np.float16) @ weight.astype(np.float16)).astype(x.dtype)
        return (out if bias is None else out + bias), cache

    return _of("linear", linear_forward=linear_forward)


def _single_precision() -> Any:
    def softmax(x: Array) -> Array:
        return ops.softmax(x.astype(np.float32)).astype(x.dtype)

    return SimpleNamespace(softmax=softmax)


def _promotes() -> Any:
    def scale_forward(x: Array, *, factor: float) -> Any:
        return x * np.float64(factor), ops.scale_forward(x, factor=factor)[1]

    return _of("scale", scale_forward=scale_forward)


def _behind_the_end() -> Any:
    def layernorm_backward(dout: Array, cache: Any, *, out: Any = None) -> Any:
        result = ops.layernorm_backward(dout, cache, out=out)
        if out is not None and out[0] is not None and out[0].base is not None:
            flat = out[0].base
            flat[len(flat) - 4] = 0  # one past the last element
        return result

    return _of("layernorm", layernorm_backward=layernorm_backward)


def _targets_read_where_masked() -> Any:
    def linear_cross_entropy_forward(
        x: Array, head: Array, targets: Array, mask: Any = None, bias: Any = None, **options: Any
    ) -> Any:
        if (targets < 0).any():
            raise IndexError("target out of bounds")
        return ops.linear_cross_entropy_forward(x, head, targets, mask, bias, **options)

    return _of("linear_cross_entropy", linear_cross_entropy_forward=linear_cross_entropy_forward)


def _rope_halves() -> Any:
    def turn(f: Any, x: Array, *args: Any, **options: Any) -> Any:
        d = x.shape[-1]
        order = np.arange(d).reshape(2, d // 2).T.reshape(-1)
        result = f(x[..., order], *args, **options)
        back = np.argsort(order)
        if isinstance(result, tuple):
            return result[0][..., back], result[1]
        return result[..., back]

    def rope_forward(x: Array, **options: Any) -> Any:
        return turn(ops.rope_forward, x, **options)

    def rope_backward(dout: Array, cache: Any) -> Any:
        return turn(ops.rope_backward, dout, cache)

    return _of("rope", rope_forward=rope_forward, rope_backward=rope_backward)


def _out_forgotten() -> Any:
    def rmsnorm_backward(dout: Array, cache: Any, *, out: Any = None) -> Any:
        return ops.rmsnorm_backward(dout, cache)

    return _of("rmsnorm", rmsnorm_backward=rmsnorm_backward)


def _plus_forgotten() -> Any:
    def rmsnorm_backward(dout: Array, cache: Any, *, plus: Any = None) -> Any:
        return ops.rmsnorm_backward(dout, cache)

    return _of("rmsnorm", rmsnorm_backward=rmsnorm_backward)


def _plus_written_into() -> Any:
    def layernorm_backward(dout: Array, cache: Any, *, plus: Any = None) -> Any:
        dx, *others = ops.layernorm_backward(dout, cache)
        if plus is None:
            return dx, *others
        plus += dx
        return plus.copy(), *others

    return _of("layernorm", layernorm_backward=layernorm_backward)


def _stream_forgotten() -> Any:
    def linear_forward(x: Array, weight: Array, bias: Any = None, *, plus: Any = None) -> Any:
        return ops.linear_forward(x, weight, bias)

    return _of("linear", linear_forward=linear_forward)


def _stream_written_into() -> Any:
    def linear_forward(x: Array, weight: Array, bias: Any = None, *, plus: Any = None) -> Any:
        out, cache = ops.linear_forward(x, weight, bias)
        if plus is not None:
            plus += out
            out = plus.copy()
        return out, cache

    return _of("linear", linear_forward=linear_forward)


def _stream_in_the_gradient() -> Any:
    def linear_forward(x: Array, weight: Array, bias: Any = None, *, plus: Any = None) -> Any:
        out, cache = ops.linear_forward(x, weight, bias, plus=plus)
        return out, (cache, plus is not None)

    def linear_backward(dout: Array, cache: Any) -> Any:
        dx, *others = ops.linear_backward(dout, cache[0])
        return dx + cache[1], *others

    return _of("linear", linear_forward=linear_forward, linear_backward=linear_backward)


def _tied_gradient_forgotten() -> Any:
    def embedding_backward(dout: Any, cache: Any, *, out: Any = None, accumulate: Any = 0) -> Any:
        return ops.embedding_backward(dout, cache, out=out)

    return _of("embedding", embedding_backward=embedding_backward)


def _approximate_constant() -> Any:
    def gelu_tanh_forward(x: Array) -> Any:
        inner = np.asarray(np.sqrt(2 / np.pi), x.dtype) * (x + np.asarray(0.04471, x.dtype) * x**3)
        return x * (1 + np.tanh(inner)) / 2, ops.gelu_tanh_forward(x)[1]

    return _of("gelu_tanh", gelu_tanh_forward=gelu_tanh_forward)


WRITTEN = [
    Written("out= forgotten", "rmsnorm", "dgain", _out_forgotten()),
    Written("plus forgotten", "rmsnorm", "dx", _plus_forgotten()),
    Written("plus written into", "layernorm", "plus", _plus_written_into()),
    Written("residual stream forgotten", "linear", "out", _stream_forgotten()),
    Written("residual stream written into", "linear", "plus", _stream_written_into()),
    Written("residual stream in dx", "linear", "dx", _stream_in_the_gradient()),
    Written("tied gradient forgotten", "embedding", "dtable", _tied_gradient_forgotten()),
    Written("tanh form's constant", "gelu_tanh", "out", _approximate_constant()),
    Written("stale cache", "rmsnorm", "dx", _stale_cache()),
    Written("table of angles kept by shape", "rope", "out", _table_by_shape()),
    Written("one buffer for every result", "gelu", "out", _one_buffer()),
    Written("strides ignored", "relu", "out", _strides_ignored()),
    Written("dout written into", "swiglu", "dout", _writes_its_argument()),
    Written("cache written into", "attention", "dq", _spends_its_cache()),
    Written("last tile of 16 lost", "attention", "out", _tile(16, "forward")),
    Written("last tile of 64 lost", "attention", "out", _tile(64, "forward")),
    Written("last tile of 128 lost in dk", "attention", "dk", _tile(128, "backward")),
    Written("dv wrong for groups of five", "attention", "dv", _only_with_groups()),
    Written("mask lost with groups", "attention", "out", _only_with_mask_and_groups()),
    Written("float16 inside", "linear", "out", _half_precision()),
    Written("float32 inside", "softmax", "out", _single_precision(), "float64"),
    Written("promotes to float64", "scale", "out", _promotes()),
    Written("written behind the end", "layernorm", "dgain", _behind_the_end()),
    Written("masked targets read", "linear_cross_entropy", "", _targets_read_where_masked()),
    Written("pairs j with j + d/2", "rope", "out", _rope_halves()),
]
