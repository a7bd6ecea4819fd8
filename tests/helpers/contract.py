"""Arguments of every op, good and bad, for whatever backend is to keep to the contract."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from reference import ops as reference
from reference.ops import OPS
from reference.presets import TINY
from reference.types import Array, DropoutKey, KVCache

KEY = DropoutKey(seed=1, step=2, sample=3, site=4)


def other_than(dtype: Any) -> Any:
    return np.float32 if dtype == np.float64 else np.float64


def parameters_of(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def cases(dtype: Any) -> dict[str, tuple[tuple[Array | None, ...], dict[str, Any]]]:
    """Return arguments for each differentiable op."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(dtype)

    def ids(*shape: int) -> Array:
        return rng.integers(0, 5, shape).astype(np.int32)

    x = normal(2, 3, 6)
    mask = np.array([[True, False, True], [True, True, True]])
    return {
        "add": ((x, normal(3, 6)), {}),
        "scale": ((x,), {"factor": np.float64(0.3)}),  # a NumPy scalar must not promote
        "embedding": ((ids(2, 3), normal(5, 6)), {}),
        "linear": ((x, normal(6, 4), normal(4)), {}),
        "split_heads": ((normal(2, 3, 4, 2),), {"heads": (2, 1, 1)}),
        "merge_heads": ((normal(2, 3, 4, 2),), {}),
        "rmsnorm": ((x, normal(6)), {"eps": np.float64(1e-5)}),
        "layernorm": ((x, normal(6), normal(6)), {"eps": np.float64(1e-5)}),
        "rope": (
            (normal(2, 3, 4, 2),),
            {"base": np.float64(1e4), "start": np.array([1, 5]), "scaling": (8, 0.1, 4, 6)},
        ),
        "attention": (
            (normal(2, 3, 4, 2), normal(2, 3, 2, 2), normal(2, 3, 2, 2), normal(4) ** 2, mask),
            {"scale": np.float64(0.4), "dropout_p": np.float64(0.2), "dropout_key": KEY},
        ),
        "swiglu": ((x,), {}),
        "gelu": ((x,), {}),
        "gelu_tanh": ((x,), {}),
        "relu": ((x,), {}),
        "dropout": ((x,), {"p": np.float64(0.3), "key": KEY}),
        "linear_cross_entropy": ((x, normal(5, 6), ids(2, 3), mask, normal(5)), {}),
    }


DIFFERENTIABLE = [op.name for op in OPS.values() if op.backward]
WITH_PARAMETERS = [op.name for op in OPS.values() if op.parameters]


def cotangent(out: Any) -> Any:
    if hasattr(out, "total"):
        return 0.7
    if isinstance(out, tuple):
        return tuple(cotangent(part) for part in out)
    return np.random.default_rng(1).standard_normal(out.shape).astype(out.dtype)


def check_scale_in_place(module: Any) -> None:
    x = module.from_numpy(np.random.default_rng(0).standard_normal(70_001, np.float32))
    expected = np.float32(0.3) * np.array(module.to_numpy(x))[8:]
    part = x[8:]
    out, _ = module.scale_forward(part, factor=0.3, out=part)
    assert out is part
    np.testing.assert_array_equal(module.to_numpy(x)[8:], expected)
    columns = module.from_numpy(np.ones((len(x), 2), np.float32))
    for wrong in (x[:3], module.from_numpy(np.ones(x.shape, np.int32)), columns[:, 0]):
        with pytest.raises(ValueError, match="scale: out must"):
            module.scale_forward(x, factor=0.3, out=wrong)


def bad(ops: Any, dtype: Any) -> list[tuple[Callable[[], Any], str]]:
    """Return calls that must be refused, and what must be said."""
    other = other_than(dtype)

    def zeros(*shape: int) -> Array:
        return np.zeros(shape, dtype)

    def ones(*shape: int) -> Array:
        return np.ones(shape, dtype)

    def read_only(x: Array) -> Array:
        view = x.view()
        view.flags.writeable = False
        return view

    def adamw(rows: int = 0, read_only: str = "", **options: Any) -> None:
        state = [ones(rows, 3) if rows else ones(3) for _ in range(4)]
        for array, name in zip(state, ("master", "m", "v"), strict=False):
            array.flags.writeable = name != read_only
        usual = {"step": 1, "lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "n_decayed": 2}
        ops.adamw(*state, **(usual | {"weight_decay": 0.1} | options))

    def muon(*shape: int, **options: Any) -> None:
        usual = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
        ops.muon(*(ones(*shape) for _ in range(3)), **(usual | options))

    F, Q = zeros(2, 3, 6), zeros(2, 3, 4, 2)
    I = np.zeros((2, 3), np.int32)  # noqa: E741
    K = zeros(1, 2, 3, 4, 2)  # keys of one layer
    SLOTS, KEYS = KVCache([zeros(2, 5, 1, 3)] * 2, [zeros(2, 5, 1, 3)] * 2), ones(2, 2, 1, 3)
    LONG = ones(2, 90, 1, 3)
    return [
        (
            lambda: ops.add_forward(F, zeros(5)),
            r"add: shapes \(2, 3, 6\) and \(5,\) do not broadcast",
        ),
        (
            lambda: ops.add_forward(F, F.astype(other)),
            f"a is {np.dtype(dtype)}, b is {np.dtype(other)}",
        ),
        (lambda: ops.scale_forward(I, factor=2), "x is int32"),
        (lambda: ops.embedding_forward(I + 9, F[0]), r"ids\[0, 0\] is 9"),
        (lambda: ops.embedding_forward(I - 1, F[0]), r"must lie in 0\.\.2"),
        (lambda: ops.embedding_forward(F, F[0]), "ids must be integers"),
        (lambda: ops.embedding_forward(I, F), r"table must be \(V, D\)"),
        (lambda: ops.linear_forward(F, zeros(4, 6)), "is it transposed"),
        (lambda: ops.linear_forward(F, zeros(6, 4), zeros(5)), r"bias must have shape \(4,\)"),
        (
            lambda: ops.linear_forward(F, zeros(6, 4), plus=F),
            r"linear_forward: plus must have shape \(2, 3, 4\) to match the output",
        ),
        (
            lambda: ops.linear_forward(F, zeros(6, 6), plus=F.astype(other)),
            r"plus must be .*, the dtype of the output",
        ),
        (
            lambda: ops.logits(F, zeros(6, 4)),
            r"head must be \(V, D\) with D = 6 to match x \(2, 3, 6\)",
        ),
        (lambda: ops.logits(F, zeros(4, 6), zeros(6)), r"bias must have shape \(4,\)"),
        (lambda: ops.split_heads_forward(Q, heads=(2, 1)), r"heads \(2, 1\) must add up"),
        (
            lambda: ops.split_heads_backward((Q, Q), ops.split_heads_forward(Q, heads=(3, 1))[1]),
            r"dout must have shape \(2, 3, 3, 2\)",
        ),
        (lambda: ops.merge_heads_forward(F), r"x must be \(B, T, H, d\)"),
        (lambda: ops.rmsnorm_forward(F, zeros(5), eps=1e-5), r"gain must have shape \(6,\)"),
        (
            lambda: ops.rmsnorm_backward(
                F, ops.rmsnorm_forward(F, zeros(6), eps=1e-5)[1], plus=zeros(2, 6)
            ),
            r"rmsnorm_backward: plus must have shape \(2, 3, 6\) to match the gradient of x",
        ),
        (
            lambda: ops.rmsnorm_backward(
                F, ops.rmsnorm_forward(F, zeros(6), eps=1e-5)[1], plus=F.astype(other)
            ),
            r"plus must be .*, the dtype of the gradient of x",
        ),
        (lambda: ops.layernorm_forward(F, zeros(6), zeros(5), eps=1e-5), r"bias must have shape"),
        (lambda: ops.layernorm_forward(F, zeros(5), zeros(6), eps=1e-5), r"gain must have shape"),
        (
            lambda: ops.rope_forward(Q[..., :1], base=1e4),
            r"x must be \(B, T, H, 2j\), the last axis even",
        ),
        (
            lambda: ops.rope_forward(Q, base=1e4, start=np.zeros(3, int)),
            r"start must be an int or \(2,\)",
        ),
        (
            lambda: ops.rope_forward(Q, base=1e4, rotate_heads=5),
            r"rotate_heads must be an integer in 0\.\.4",
        ),
        (lambda: ops.attention_forward(Q, Q, Q[0]), r"v must be \(B, S, Hkv, dv\) with B = 2"),
        (
            lambda: ops.attention_forward(Q, Q[:, :2], Q),
            r"v must be \(B, S, Hkv, dv\) with B = 2, S = 2, Hkv = 4",
        ),
        (
            lambda: ops.attention_forward(Q, Q[:, :, :3], Q[:, :, :3]),
            r"query heads \(4\) must be a mult",
        ),
        (lambda: ops.attention_forward(Q, Q[:, :0], Q[:, :0]), "there must be a key"),
        (lambda: ops.attention_forward(Q, Q, Q, zeros(3)), r"alibi must have shape \(4,\)"),
        (lambda: ops.attention_forward(Q, Q, Q, None, I), "key_mask must be bool"),
        (
            lambda: ops.attention_forward(Q, Q, Q, None, I[:1] == 0),
            r"key_mask must have shape \(2, 3\)",
        ),
        (lambda: ops.attention_forward(Q, Q, Q, None, None, I[:1]), r"documents must have shape"),
        (
            lambda: ops.attention_forward(Q, Q[:, :2], Q[:, :2], None, None, I[:, :2]),
            r"T = 3 > S = 2",
        ),
        (lambda: ops.attention_forward(Q, Q, Q, dropout_p=0.1), "needs a key"),
        (lambda: ops.swiglu_forward(F[..., :5]), "the last axis even"),
        (lambda: ops.dropout_forward(F, p=1.0, key=KEY), r"p must lie in \[0, 1\)"),
        (
            lambda: ops.dropout_forward(F, p=0.5, key=KEY._replace(seed=2**64)),
            r"seed must lie in 0\.\.2\^64",
        ),
        (lambda: ops.dropout_forward(F, p=0.5, key=KEY._replace(sample=2**32 - 1)), "overflows"),
        (
            # with a step of its own, as a call with an equal key is remembered
            lambda: ops.dropout_forward(
                F, p=0.5, key=KEY._replace(step=9, sample=np.uint32(2**32 - 1))
            ),
            "a batch of 2 from sample 4294967295 .* overflows",
        ),
        (lambda: ops.dropout_forward(F, p=0.5, key=KEY._replace(step=-1)), "step must lie in"),
        (
            lambda: ops.linear_cross_entropy_forward(F, zeros(6, 5), I),
            r"head must be \(V, D\) with D = 6 to match x \(2, 3, 6\)",
        ),
        (lambda: ops.linear_cross_entropy_forward(F, zeros(5, 6), I + 5), r"targets\[0, 0\] is 5"),
        (
            lambda: ops.linear_cross_entropy_forward(F, zeros(5, 6), I[:1]),
            "targets must have shape",
        ),
        (lambda: ops.linear_cross_entropy_forward(F, zeros(5, 6), I, I), "mask must be bool"),
        (
            lambda: ops.linear_cross_entropy_forward(F, zeros(5, 6), I, None, zeros(6)),
            "bias must have shape",
        ),
        (lambda: ops.square_sums(F), "x must be flat"),
        (lambda: ops.scale_forward(F, factor=np.nan), "factor must be a finite number"),
        (lambda: ops.linear_forward(dtype(1), F[0]), "at least one axis"),
        (lambda: ops.swiglu_forward(zeros()), "at least one axis"),
        (lambda: ops.split_heads_forward(Q, heads=(5, -1)), "must add up"),
        (
            lambda: ops.split_heads_backward((Q,), ops.split_heads_forward(Q, heads=(3, 1))[1]),
            "2 parts, got 1",
        ),
        (lambda: ops.rmsnorm_forward(F, ones(6), eps=-1.0), "eps must be a finite number >= 0"),
        (lambda: ops.layernorm_forward(F, F[0, 0], F[0, 0], eps=np.inf), "eps must be a finite"),
        (
            lambda: ops.rope_forward(Q, base=1e4, scaling=(8.0, 4.0, 1.0, 64)),
            r"rope: scaling must be \(factor >= 1, .* got \(8\.0, 4\.0, 1\.0, 64\)",
        ),
        (lambda: ops.rope_forward(Q, base=1e4, scaling=8.0), "scaling must be .* got 8.0"),  # type: ignore[arg-type]
        (lambda: ops.rope_forward(Q, base=0.0), "base must be a finite number > 0"),
        (lambda: ops.rope_forward(Q, base=1e4, start=1.5), "start must be an int"),  # type: ignore[arg-type]
        (lambda: ops.attention_forward(Q, Q, Q, scale=np.nan), "scale must be a finite number"),
        (
            lambda: ops.attention_forward(Q, Q, Q, None, None, F[..., 0]),
            r"documents must be integers \(int32\)",
        ),
        (
            lambda: ops.write_kv(SLOTS, KEYS, KEYS, layer=2, position=0),
            r"layer must lie in 0\.\.1, got 2",
        ),
        (lambda: ops.write_kv(SLOTS, KEYS, KEYS, layer=-1, position=0), "layer must lie in"),
        (lambda: ops.write_kv(SLOTS, KEYS, KEYS, layer=0, position=1.5), "position must be an int"),  # type: ignore[arg-type]
        (
            lambda: ops.write_kv(SLOTS, LONG, LONG, layer=0, position=np.int8([120, 3])),
            r"positions 3\.\.209 lie outside the cache",
        ),
        (
            lambda: ops.write_kv(SLOTS, KEYS, KEYS, layer=0, position=I[0]),
            r"\(2,\) ints, one for each row",
        ),
        (lambda: ops.linear_forward([[1.0]], zeros(1, 2)), "x must be an array, got list"),
        (lambda: ops.embedding_forward([1], F[0]), "ids must be an array, got list"),
        (
            lambda: ops.linear_cross_entropy_forward(F, zeros(5, 6), I.tolist()),
            "targets must be an array, got list",
        ),
        (
            lambda: ops.attention_forward(Q, Q, Q, None, [[True] * 3] * 2),
            "key_mask must be an array, got list",
        ),
        (
            lambda: ops.write_kv(KVCache([*K], [*K]), K[0, :1], K[0, :1], layer=0, position=0),
            r"k must have shape \(2, 3, 4, 2\)",
        ),
        (
            lambda: ops.write_kv(KVCache([*K], [*K]), K[0], K[0, :, :, :1], layer=0, position=0),
            r"v must have shape \(2, 3, 4, 2\)",
        ),
        (lambda: ops.scale_forward(F, factor=np.ones(2)), "factor must be a finite number"),
        (lambda: ops.logits(dtype(1), F[0]), "at least one axis"),
        (lambda: ops.dropout_forward(np.asarray(dtype(1)), p=0.5, key=KEY), "at least one axis"),
        (lambda: ops.softmax(np.asarray(dtype(1))), "at least one axis"),
        (lambda: ops.softmax(F[..., :0]), r"along the last axis, got x \(2, 3, 0\)"),
        (
            lambda: ops.rmsnorm_forward(F[..., :0], zeros(0), eps=0),
            r"rmsnorm: there must be .* along the last axis, got x \(2, 3, 0\)",
        ),
        (
            lambda: ops.layernorm_forward(F[..., :0], zeros(0), zeros(0), eps=0),
            "layernorm: there must be something along the last axis",
        ),
        (lambda: ops.split_heads_forward(Q, heads=(1, 3, 0)), "must add up"),
        (lambda: ops.rmsnorm_forward(F, F[0, 0], eps=np.nan), "eps must be a finite number"),
        (lambda: ops.rope_forward(Q, base=-3.0), "base must be a finite number > 0"),
        (
            lambda: ops.rope_forward(Q, base=1e4, rotate_heads=0.5),
            "rotate_heads must be an integer",
        ),
        (
            lambda: ops.rope_forward(Q, base=1e4, start=np.array([0.5, 1])),
            "start must be an int",
        ),
        *(
            (lambda step=step: adamw(step=step), "step must be an integer >= 1")
            for step in (0, 1.5)
        ),
        *(
            (lambda n=n: adamw(n_decayed=n), r"n_decayed must be an integer in 0\.\.3")
            for n in (-1, 4, 2.5)
        ),
        (lambda: adamw(beta1=1.0), r"beta1 must lie in \[0, 1\)"),
        (lambda: adamw(beta2=1.0), r"beta2 must lie in \[0, 1\)"),
        (lambda: adamw(lr=np.nan), "lr must be a finite number"),
        (lambda: adamw(eps=-1.0), "eps must be a finite number"),
        (lambda: adamw(grad_scale=np.inf), "grad_scale must be a finite number"),
        (lambda: adamw(rows=2), "master must be flat"),
        *(
            (lambda name=name: adamw(read_only=name), f"adamw: {name} is read-only")
            for name in ("master", "m", "v")
        ),
        (lambda: adamw(beta1=np.array([0.9])), "beta1 must lie in"),
        (lambda: muon(6), r"master must be \(I, O\)"),
        (lambda: muon(2, 3, parts=(1, 1)), r"parts \(1, 1\) must add up to the columns"),
        (lambda: muon(2, 3, momentum=1), r"momentum must lie in \[0, 1\)"),
        (lambda: ops.dropout_forward(F, p=np.array([0.5]), key=KEY), "p must lie in"),
        (
            lambda: ops.dropout_forward(F, p=0.5, key=KEY._replace(step=np.array([2]))),
            "step must lie in",
        ),
        (
            lambda: ops.linear_cross_entropy_backward(
                np.array([0.5]), ops.linear_cross_entropy_forward(F, zeros(5, 6), I)[1]
            ),
            "dloss must be a number",
        ),
        (lambda: ops.split_heads_forward(Q, heads=(1.5, 2.5)), "must add up"),
        (
            lambda: ops.split_heads_backward(
                (Q[:, :, :2].astype(other), Q[:, :, 2:]),
                ops.split_heads_forward(Q, heads=(2, 2))[1],
            ),
            "the dtype of its part of the output",
        ),
        (
            lambda: ops.write_kv(SLOTS, KEYS.astype(other), KEYS, layer=0, position=0),
            "must share one dtype",
        ),
        (lambda: ops.accumulate(read_only(F), F), "accumulate: dst is read-only"),
        (lambda: ops.scale_forward(F, factor=2.0, out=read_only(F)), "scale: out is read-only"),
        (
            lambda: ops.kv_cache({"embedding.weight": F[0]}, TINY, 1, 25),
            r"1\.\.24, the model's context",
        ),
    ]


MESSAGES = [message for _, message in bad(reference, np.float64)]


def wrong_shape(dout: Any) -> Any:
    if isinstance(dout, tuple):
        return tuple(wrong_shape(part) for part in dout)
    return np.swapaxes(dout, 0, 1)


DTYPED = ["linear", "rmsnorm", "layernorm", "rope", "attention", "swiglu", "gelu", "gelu_tanh"]
