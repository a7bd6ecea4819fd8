"""The op contract: what a backend must offer, and what every op keeps to, on NumPy's arrays."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import accel
from reference import ops as reference
from reference.ops import Ops
from reference.presets import TINY
from reference.types import Array, DropoutKey, KVCache
from tests import needs

NAMES = [name for name in vars(Ops) if not name.startswith("_")]
BACKENDS = ("reference", "cpu", "cpu bf16")
KEY = DropoutKey(seed=1, step=2, sample=3, site=4)


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Any:
    return load(request.param)


def load(backend: str) -> Any:
    name, _, compute = backend.partition(" ")
    if compute:
        needs.bf16()
    return reference if name == "reference" else accel.load(name, compute=compute or "float32")


def dtypes_of(backend: str) -> tuple[Any, ...]:
    return (np.float32,) if backend.endswith("bf16") else (np.float32, np.float64)


def other_than(dtype: Any) -> Any:
    return np.float32 if dtype == np.float64 else np.float64


EACH = pytest.mark.parametrize(
    ("backend", "dtype"), [(backend, dtype) for backend in BACKENDS for dtype in dtypes_of(backend)]
)


def parameters_of(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [
        (p.name, p.kind, p.default)
        for p in inspect.signature(function).parameters.values()
        if p.name != "self"
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_op_is_offered_with_the_contract_s_signature(ops: Any, name: str) -> None:
    assert parameters_of(getattr(ops, name)) == parameters_of(getattr(Ops, name))
    assert name in ops.__all__


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
        "rope": ((normal(2, 3, 4, 2),), {"base": np.float64(1e4), "start": np.array([1, 5])}),
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


DIFFERENTIABLE = [name.removesuffix("_forward") for name in NAMES if name.endswith("_forward")]
WITH_PARAMETERS = [
    op
    for op in DIFFERENTIABLE
    if "out" in inspect.signature(getattr(Ops, f"{op}_backward")).parameters
]


def arrays_in(value: Any) -> list[Array]:
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, tuple):
        return [array for item in value for array in arrays_in(item)]
    return []


@EACH
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_dtype_in_is_dtype_out(op: str, backend: str, dtype: Any) -> None:
    ops = load(backend)
    arrays, options = cases(dtype)[op]
    out, cache = getattr(ops, f"{op}_forward")(*arrays, **options)
    dout = cotangent(out)
    gradients = getattr(ops, f"{op}_backward")(dout, cache)
    floats = [a for a in arrays_in((out, cache, gradients)) if a.dtype.kind == "f"]
    assert floats and all(array.dtype == dtype for array in floats)


@EACH
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_a_differentiable_op_mutates_nothing(op: str, backend: str, dtype: Any) -> None:
    ops = load(backend)
    arrays, options = cases(dtype)[op]
    out, cache = getattr(ops, f"{op}_forward")(*arrays, **options)
    dout = cotangent(out)
    held = [*arrays_in(tuple(arrays)), *arrays_in(dout), *arrays_in(cache), *arrays_in(out)]
    for array in held:
        array.flags.writeable = False
    again, _ = getattr(ops, f"{op}_forward")(*arrays, **options)
    getattr(ops, f"{op}_backward")(dout, cache)
    for a, b in zip(arrays_in(out), arrays_in(again), strict=True):
        np.testing.assert_array_equal(a, b)


def cotangent(out: Any) -> Any:
    if hasattr(out, "total"):
        return 0.7
    if isinstance(out, tuple):
        return tuple(cotangent(part) for part in out)
    return np.random.default_rng(1).standard_normal(out.shape).astype(out.dtype)


@EACH
@pytest.mark.parametrize("op", WITH_PARAMETERS)
def test_out_receives_the_parameter_gradients(op: str, backend: str, dtype: Any) -> None:
    ops = load(backend)
    backward = getattr(ops, f"{op}_backward")
    arrays, options = cases(dtype)[op]
    result, cache = getattr(ops, f"{op}_forward")(*arrays, **options)
    dout = cotangent(result)
    returned = backward(dout, cache)
    single = op in ("embedding", "rmsnorm")
    expected = [returned] if op == "embedding" else list(returned[1:])
    out = tuple(np.full_like(gradient, np.nan) for gradient in expected)
    backward(dout, cache, out=out[0] if single else out)
    for written, gradient in zip(out, expected, strict=True):
        np.testing.assert_array_equal(written, gradient)
    shapes = [np.zeros((1, 1, 1), dtype) for _ in expected]
    types = [gradient.astype(other_than(dtype)) for gradient in expected]
    for wrong in (shapes, types):
        with pytest.raises(ValueError, match="out must have the gradient's shape"):
            backward(dout, cache, out=wrong[0] if single else tuple(wrong))
    for gradient in out:
        gradient.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        backward(dout, cache, out=out[0] if single else out)


def test_every_differentiable_op_has_a_case_here() -> None:
    assert sorted(cases(np.float32)) == sorted(DIFFERENTIABLE)


@EACH
def test_ops_without_a_backward_keep_the_dtype(backend: str, dtype: Any) -> None:
    ops = load(backend)
    rng = np.random.default_rng(0)
    x, head = rng.standard_normal((2, 6)).astype(dtype), rng.standard_normal((5, 6)).astype(dtype)
    assert ops.softmax(x).dtype == dtype
    assert ops.logits(x, head, head[:, 0]).dtype == dtype
    flat = [rng.random(7).astype(dtype) for _ in range(4)]
    scalars = {"lr": np.float64(0.1), "beta1": np.float64(0.9), "beta2": np.float64(0.95)}
    scalars |= {"eps": np.float64(1e-8), "weight_decay": np.float64(0.1)}
    ops.adamw(*flat, step=1, n_decayed=3, grad_scale=np.float64(0.5), **scalars)
    assert all(array.dtype == dtype for array in flat)
    cache = ops.kv_cache({"embedding.weight": head}, TINY, 2, 4)
    assert cache.k[0].dtype == dtype and np.shape(cache.v) == (2, 2, 4, 2, 6)


def test_the_embedding_gradient_can_be_added_onto_another(ops: Any) -> None:
    (ids, table), _ = cases(np.float64)["embedding"]
    assert ids is not None and table is not None
    _, cache = ops.embedding_forward(ids, table)
    dout = cotangent(table[ids])
    alone = ops.embedding_backward(dout, cache)
    out = table.copy()
    ops.embedding_backward(dout, cache, out=out, accumulate=True)
    np.testing.assert_allclose(out, table + alone, rtol=1e-15)
    with pytest.raises(ValueError, match="out must be given"):
        ops.embedding_backward(dout, cache, accumulate=True)


def test_scale_may_write_where_it_reads(ops: Any) -> None:
    check_scale_in_place(ops)


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


def test_accumulate_adds_in_place(ops: Any) -> None:
    dst, src = np.arange(4.0), np.ones(4)
    ops.accumulate(dst, src)
    np.testing.assert_array_equal(dst, [1, 2, 3, 4])
    with pytest.raises(ValueError, match=r"src must have dst's shape \(4,\), got \(3,\)"):
        ops.accumulate(dst, src[:3])


def test_write_kv_writes_each_row_where_it_stands(ops: Any) -> None:
    cache = KVCache(list(np.zeros((2, 2, 5, 1, 3))), list(np.zeros((2, 2, 5, 1, 3))))
    k, v = np.ones((2, 2, 1, 3)), np.full((2, 2, 1, 3), 2.0)
    ops.write_kv(cache, k, v, layer=1, position=np.array([0, 3]))
    written = np.asarray(cache.k)[..., 0, 0] == 1
    np.testing.assert_array_equal(
        np.argwhere(written), [[1, 0, 0], [1, 0, 1], [1, 1, 3], [1, 1, 4]]
    )
    np.testing.assert_array_equal(cache.v, 2 * np.asarray(cache.k))
    with pytest.raises(ValueError, match=r"positions 4\.\.5 lie outside the cache"):
        ops.write_kv(cache, k, v, layer=0, position=4)
    with pytest.raises(ValueError, match=r"positions -1\.\.0 lie outside the cache"):
        ops.write_kv(cache, k, v, layer=0, position=-1)


# ---- bad input: what must hold, what arrived -----------------------------------------------------


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

    F, Q = zeros(2, 3, 6), zeros(2, 3, 4, 2)
    I = np.zeros((2, 3), np.int32)  # noqa: E741
    K = zeros(1, 2, 3, 4, 2)  # keys of one layer
    SLOTS, KEYS = KVCache([zeros(2, 5, 1, 3)] * 2, [zeros(2, 5, 1, 3)] * 2), ones(2, 2, 1, 3)
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
        (lambda: ops.logits(F, zeros(6, 4)), r"head must be \(V, 6\)"),
        (lambda: ops.logits(F, zeros(4, 6), zeros(6)), r"bias must have shape \(4,\)"),
        (lambda: ops.split_heads_forward(Q, heads=(2, 1)), r"heads \(2, 1\) must add up"),
        (
            lambda: ops.split_heads_backward((Q, Q), ops.split_heads_forward(Q, heads=(3, 1))[1]),
            r"dout must have shape \(2, 3, 3, 2\)",
        ),
        (lambda: ops.merge_heads_forward(F), r"x must be \(B, T, H, d\)"),
        (lambda: ops.rmsnorm_forward(F, zeros(5), eps=1e-5), r"gain must have shape \(6,\)"),
        (lambda: ops.layernorm_forward(F, zeros(6), zeros(5), eps=1e-5), r"bias must have shape"),
        (lambda: ops.layernorm_forward(F, zeros(5), zeros(6), eps=1e-5), r"gain must have shape"),
        (lambda: ops.rope_forward(Q[..., :1], base=1e4), "d even"),
        (
            lambda: ops.rope_forward(Q, base=1e4, start=np.zeros(3, int)),
            r"start must be an int or \(2,\)",
        ),
        (lambda: ops.rope_forward(Q, base=1e4, rotate_heads=5), r"rotate_heads must lie in 0\.\.4"),
        (lambda: ops.attention_forward(Q, Q, Q[0]), "tokens before heads"),
        (lambda: ops.attention_forward(Q, Q[:, :2], Q), "must agree"),
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
        (lambda: ops.swiglu_forward(F[..., :5]), "gate and up"),
        (lambda: ops.dropout_forward(F, p=1.0, key=KEY), r"p must lie in \[0, 1\)"),
        (
            lambda: ops.dropout_forward(F, p=0.5, key=KEY._replace(seed=2**64)),
            r"seed must lie in 0\.\.2\^64",
        ),
        (lambda: ops.dropout_forward(F, p=0.5, key=KEY._replace(sample=2**32 - 1)), "overflows"),
        (lambda: ops.dropout_forward(F, p=0.5, key=KEY._replace(step=-1)), "step must lie in"),
        (lambda: ops.linear_cross_entropy_forward(F, zeros(6, 5), I), r"head must be \(V, 6\)"),
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
        (lambda: ops.rope_forward(Q, base=0.0), "base must be a finite number > 0"),
        (lambda: ops.rope_forward(Q, base=1e4, start=1.5), "start must be an int"),  # type: ignore[arg-type]
        (lambda: ops.attention_forward(Q, Q, Q, scale=np.nan), "scale must be a finite number"),
        (lambda: ops.attention_forward(Q, Q, Q, None, None, F[..., 0]), "documents must be int32"),
        (
            lambda: ops.write_kv(SLOTS, KEYS, KEYS, layer=2, position=0),
            r"layer must lie in 0\.\.1, got 2",
        ),
        (lambda: ops.write_kv(SLOTS, KEYS, KEYS, layer=-1, position=0), "layer must lie in"),
        (lambda: ops.write_kv(SLOTS, KEYS, KEYS, layer=0, position=1.5), "position must be an int"),  # type: ignore[arg-type]
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
        (lambda: ops.split_heads_forward(Q, heads=(1, 3, 0)), "must add up"),
        (lambda: ops.rmsnorm_forward(F, F[0, 0], eps=np.nan), "eps must be a finite number"),
        (lambda: ops.rope_forward(Q, base=-3.0), "base must be a finite number > 0"),
        (lambda: ops.rope_forward(Q, base=1e4, rotate_heads=0.5), "rotate_heads must lie in"),
        (
            lambda: ops.rope_forward(Q, base=1e4, start=np.array([0.5, 1])),
            "start must be an int",
        ),
        *((lambda step=step: adamw(step=step), "step counts from 1") for step in (0, 1.5)),
        *((lambda n=n: adamw(n_decayed=n), r"n_decayed must lie in 0\.\.3") for n in (-1, 4, 2.5)),
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
            "the parts must share one dtype",
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


@EACH
@pytest.mark.parametrize("i", range(len(MESSAGES)), ids=MESSAGES)
def test_bad_input_is_refused_in_words(i: int, backend: str, dtype: Any) -> None:
    call, message = bad(load(backend), dtype)[i]
    with pytest.raises(ValueError, match=message):
        call()


# ---- bad cotangents ------------------------------------------------------------------------------


def wrong_shape(dout: Any) -> Any:
    if isinstance(dout, tuple):
        return tuple(wrong_shape(part) for part in dout)
    return np.swapaxes(dout, 0, 1)


def in_other_dtype(dout: Any) -> Any:
    if isinstance(dout, tuple):
        return tuple(in_other_dtype(part) for part in dout)
    return dout.astype(other_than(dout.dtype))


def refuses(op: str, backend: str, dtype: Any, spoiled: Callable[[Any], Any], words: str) -> None:
    ops = load(backend)
    arrays, options = cases(dtype)[op]
    out, cache = getattr(ops, f"{op}_forward")(*arrays, **options)
    with pytest.raises(ValueError, match=words):
        getattr(ops, f"{op}_backward")(spoiled(cotangent(out)), cache)


@EACH
@pytest.mark.parametrize("op", [op for op in DIFFERENTIABLE if op != "linear_cross_entropy"])
def test_a_cotangent_of_another_shape_is_refused(op: str, backend: str, dtype: Any) -> None:
    refuses(op, backend, dtype, wrong_shape, "dout must have shape")


DTYPED = ["linear", "rmsnorm", "layernorm", "rope", "attention", "swiglu", "gelu", "gelu_tanh"]


@EACH
@pytest.mark.parametrize("op", [*DTYPED, "relu"])
def test_a_cotangent_of_another_dtype_is_refused(op: str, backend: str, dtype: Any) -> None:
    refuses(op, backend, dtype, in_other_dtype, "must share one dtype")


@EACH
@pytest.mark.parametrize(
    "op", [op for op in DIFFERENTIABLE if op not in ("split_heads", "linear_cross_entropy")]
)
def test_a_cotangent_of_integers_is_refused(op: str, backend: str, dtype: Any) -> None:
    refuses(op, backend, dtype, lambda dout: dout.astype(np.int32), "must share one dtype")
