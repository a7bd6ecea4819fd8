"""The op contract: what a backend must offer, and what every op keeps to, on NumPy's arrays."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import accel
from reference import ops as reference
from reference.ops import NAMES, OPS
from reference.presets import TINY
from reference.types import Array, KVCache
from tests.helpers.contract import (
    DIFFERENTIABLE,
    DTYPED,
    MESSAGES,
    WITH_PARAMETERS,
    bad,
    cases,
    check_scale_in_place,
    cotangent,
    other_than,
    parameters_of,
    wrong_shape,
)

BACKENDS = ("reference", "cpu", "cpu bf16")


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Any:
    return load(request.param)


def load(backend: str) -> Any:
    name, _, compute = backend.partition(" ")
    return reference if name == "reference" else accel.load(name, compute=compute or "float32")


def dtypes_of(backend: str) -> tuple[Any, ...]:
    return (np.float32,) if backend.endswith("bf16") else (np.float32, np.float64)


EACH = pytest.mark.parametrize(
    ("backend", "dtype"), [(backend, dtype) for backend in BACKENDS for dtype in dtypes_of(backend)]
)


@pytest.mark.parametrize("name", NAMES)
def test_every_op_is_offered_with_the_contract_s_signature(ops: Any, name: str) -> None:
    assert parameters_of(getattr(ops, name)) == parameters_of(getattr(reference, name))
    assert name in ops.__all__


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


def compiled_for_it(op: str, backend: str, dtype: Any) -> bool:
    """Say whether kernels of arrays that are read only take seconds to compile, but in float32."""
    return op == "attention" and "cpu" in backend and (backend, dtype) != ("cpu", np.float32)


@pytest.mark.parametrize(
    ("op", "backend", "dtype"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if compiled_for_it(*case) else [])
        for op in DIFFERENTIABLE
        for backend in BACKENDS
        for case in ((op, backend, dtype) for dtype in dtypes_of(backend))
    ],
)
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
        with pytest.raises(ValueError, match=r"out must (have shape|be).*the gradient"):
            backward(dout, cache, out=wrong[0] if single else tuple(wrong))
    for gradient in out:
        gradient.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        backward(dout, cache, out=out[0] if single else out)


@EACH
@pytest.mark.parametrize("op", [op.name for op in OPS.values() if op.adds])
def test_plus_is_added_to_the_output_or_the_first_gradient(
    op: str, backend: str, dtype: Any
) -> None:
    """With the bits of ``add``: on a processor each sum is rounded as if it were made alone."""
    ops = load(backend)
    forward, backward = (getattr(ops, f"{op}_{way}") for way in ("forward", "backward"))
    arrays, options = cases(dtype)[op]
    out, cache = forward(*arrays, **options)
    dout, plus = cotangent(out), cotangent(out)[..., ::-1]
    plus.flags.writeable = False
    alone, added = backward(dout, cache), {"plus": plus}
    if OPS[op].adds == "forward":
        both, cache = forward(*arrays, **options, plus=plus)
        alone, added = (out, *alone), {}
    with_it = backward(dout, cache, **added)
    with_it = with_it if added else (both, *with_it)
    np.testing.assert_array_equal(with_it[0], ops.add_forward(alone[0], plus)[0], strict=True)
    for a, b in zip(alone[1:], with_it[1:], strict=True):
        np.testing.assert_array_equal(a, b)


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
    kept = np.uint16 if backend == "cpu bf16" else dtype
    assert cache.k[0].dtype == kept and np.shape(cache.v) == (2, 2, 4, 2, 6)


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


def test_accumulate_adds_in_place(ops: Any) -> None:
    dst, src = np.arange(4.0), np.ones(4)
    ops.accumulate(dst, src)
    np.testing.assert_array_equal(dst, [1, 2, 3, 4])
    with pytest.raises(
        ValueError, match=r"src must have shape \(4,\) to match dst \(4,\), got \(3,\)"
    ):
        ops.accumulate(dst, src[:3])


def test_write_kv_writes_each_row_where_it_stands(ops: Any) -> None:
    cache = KVCache(*(list(np.zeros((2, 2, 5, 1, 3), np.float32)) for _ in range(2)))
    k, v = np.ones((2, 2, 1, 3), np.float32), np.full((2, 2, 1, 3), 2, np.float32)
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


# ---- sizes of 0 ----------------------------------------------------------------------------------

# what must not be 0: ids name one of V, parts are heads, and the others are what a mean is over
SOME = {"attention": "S Hkv d", "rmsnorm": "D", "layernorm": "D", "split_heads": "H"}


def sizes() -> Iterator[tuple[str, str]]:
    for name in DIFFERENTIABLE:
        letters = {letter for operand in OPS[name].operands for letter in operand.shape.split()}
        some = {"V", *SOME.get(name, "").split()}
        yield from ((name, letter.removeprefix("2")) for letter in sorted(letters - some))


def emptied(name: str, letter: str) -> tuple[list[Array | None], dict[str, Any]]:
    """Return the arguments of an op's case, a letter's axis or the first free one of size 0."""
    arrays, options = cases(np.float32)[name]
    given: list[Array | None] = []
    for operand, array in zip(OPS[name].operands, arrays, strict=False):
        letters = [token.removeprefix("2") for token in operand.shape.split()]
        if array is not None and letter in letters:
            at = letters.index(letter)
            axis = at - len(letters) if "..." in letters[:at] else at
            array = np.delete(array, slice(None), axis)
        given.append(array)
    if letter == "B" and "start" in options:
        options = {**options, "start": options["start"][:0]}
    return given, options


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(("name", "letter"), [*sizes()])
def test_a_size_may_be_0(name: str, letter: str, backend: str) -> None:
    ops = load(backend)
    arrays, options = emptied(name, letter)
    out, cache = getattr(ops, f"{name}_forward")(*arrays, **options)
    found = getattr(ops, f"{name}_backward")(cotangent(out), cache)
    gradients = dict(zip(OPS[name].gradients, arrays_in((found,)), strict=True))
    given = {o.name: a for o, a in zip(OPS[name].operands, arrays, strict=False) if a is not None}
    for operand, gradient in gradients.items():
        assert gradient.shape == given[operand].shape and np.isfinite(gradient).all()
    assert all(np.isfinite(array).all() for array in arrays_in((out,)))


@pytest.mark.parametrize(
    ("backend", "compute"), [("reference", "float32"), ("cpu", "float32"), ("cpu", "bf16")]
)
def test_no_rows_of_no_vocabulary_have_no_loss(backend: str, compute: str) -> None:
    ops = accel.load(backend, compute=compute)
    x, head = (ops.from_numpy(np.zeros((0, 3), np.float32), activation=True) for _ in range(2))
    loss, cache = ops.linear_cross_entropy_forward(x, head, np.zeros(0, np.int32))
    assert (float(loss.total), int(loss.n_valid)) == (0.0, 0)
    found = ops.linear_cross_entropy_backward(1.0, cache)
    assert [gradient.shape for gradient in found[:2]] == [(0, 3), (0, 3)]


# ---- bad input: what must hold, what arrived -----------------------------------------------------


@EACH
@pytest.mark.parametrize("i", range(len(MESSAGES)), ids=MESSAGES)
def test_bad_input_is_refused_in_words(i: int, backend: str, dtype: Any) -> None:
    call, message = bad(load(backend), dtype)[i]
    with pytest.raises(ValueError, match=message):
        call()


def test_a_large_limit_is_said_to_its_last_digit(ops: Any) -> None:
    flat = [np.zeros(1_234_567, np.float32) for _ in range(4)]
    usual = {"step": 1, "lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1}
    with pytest.raises(
        ValueError, match=r"n_decayed must be an integer in 0\.\.1234567, got 1234568"
    ):
        ops.adamw(*flat, **usual, n_decayed=1_234_568)


# ---- bad cotangents ------------------------------------------------------------------------------


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


@EACH
@pytest.mark.parametrize("op", [*DTYPED, "relu"])
def test_a_cotangent_of_another_dtype_is_refused(op: str, backend: str, dtype: Any) -> None:
    refuses(op, backend, dtype, in_other_dtype, "the dtype of the output")


@EACH
@pytest.mark.parametrize(
    "op", [op for op in DIFFERENTIABLE if op not in ("split_heads", "linear_cross_entropy")]
)
def test_a_cotangent_of_integers_is_refused(op: str, backend: str, dtype: Any) -> None:
    refuses(op, backend, dtype, lambda dout: dout.astype(np.int32), "the dtype of the output")
