"""NaN travels: what an op makes of NaN and infinity is declared, and held to on every backend."""

from typing import Any

import numpy as np
import pytest

import accel
from reference import ops as reference
from reference.contract import Op
from reference.ops import OPS
from reference.types import Array
from tests.helpers.contract import cases, cotangent

pytestmark = pytest.mark.filterwarnings("ignore:(invalid|divide|overflow):RuntimeWarning")
BACKENDS = ("reference", "cpu", "cpu bf16")
WITHOUT_LETTERS = ("add", "split_heads")  # whose outputs no string of letters describes
FLOATS = [
    (op.name, operand.name)
    for op in OPS.values()
    for operand in op.operands
    if op.backward and operand.is_float
]


def load(backend: str) -> Any:
    name, _, compute = backend.partition(" ")
    return reference if name == "reference" else accel.load(name, compute=compute or "float32")


def output(ops: Any, op: Op, arrays: dict[str, Any], options: dict[str, Any]) -> list[Array]:
    out, _ = getattr(ops, op.forward_name)(**arrays, **options)
    if hasattr(out, "total"):
        return [np.asarray(out.total)]
    return [np.array(part) for part in (out if isinstance(out, tuple) else (out,))]


def given(name: str) -> tuple[Op, dict[str, Any], dict[str, Any]]:
    op = OPS[name]
    values, options = cases(np.float32)[name]
    arrays = dict(zip((o.name for o in op.operands), values, strict=False))
    return op, {key: a for key, a in arrays.items() if a is not None}, options


def put(arrays: dict[str, Any], name: str, at: tuple[int, ...], value: float) -> dict[str, Any]:
    changed = arrays[name].copy()
    changed[at] = value
    return {**arrays, name: changed}


def outside(op: Op, name: str, at: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """Return where an output differs from the element in a letter that the op keeps apart."""
    operand = next(o for o in op.operands if o.name == name)
    apart = np.zeros(shape, np.bool_)
    letters, axes = operand.shape.split(), op.out.split()
    if op.out == "Loss":
        return apart
    inner = len([letter for letter in letters if letter != "..."])
    for letter in op.reach(name):
        if letter == "...":
            free = at[: len(at) - inner] if letters[0] == "..." else at[inner:]
            first = 0 if axes[0] == "..." else len(axes) - 1
            pairs = [(first + i, index) for i, index in enumerate(free)]
        else:
            axis, own = axes.index(letter) - len(axes), letters.index(letter) - len(letters)
            if axes[-1] == "...":  # counted from the front: free axes stand behind
                axis, own = axes.index(letter), letters.index(letter)
            pairs = [(axis, at[own])]
        for axis, index in pairs:
            line = np.arange(shape[axis]) != index
            apart |= np.moveaxis(
                np.broadcast_to(line, np.moveaxis(apart, axis, -1).shape), -1, axis
            )
    return apart


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "operand"), FLOATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_reaches_what_depends_on_it_and_stays_within_its_letters(
    name: str, operand: str, backend: str, value: float
) -> None:
    ops = load(backend)
    op, arrays, options = given(name)
    rng = np.random.default_rng(3)
    plain = output(ops, op, arrays, options)
    for _ in range(5):
        at = tuple(int(rng.integers(0, n)) for n in arrays[operand].shape)
        results = output(ops, op, put(arrays, operand, at, value), options)
        moved = output(reference, op, put(arrays, operand, at, 1.5), options)
        still = output(reference, op, put(arrays, operand, at, 2.5), options)
        exact = output(reference, op, put(arrays, operand, at, value), options)
        for result, a, b, own, before in zip(results, moved, still, exact, plain, strict=True):
            if np.isnan(value):
                assert np.isnan(result[a != b]).all(), "a NaN was lost on the way"
            else:  # an infinity may have a finite limit, but only the one that it has
                same = np.isfinite(own) & np.isfinite(result)
                np.testing.assert_allclose(result[same], own[same], rtol=0.02, atol=0.02)
                assert not np.isfinite(result[~np.isfinite(own)]).any()
            if name not in WITHOUT_LETTERS:
                apart = outside(op, operand, at, result.shape)
                np.testing.assert_array_equal(result[apart], before[apart])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [op.name for op in OPS.values() if op.backward])
def test_nan_in_a_cotangent_reaches_every_gradient_that_depends_on_it(
    name: str, backend: str
) -> None:
    ops = load(backend)
    op, arrays, options = given(name)

    def gradients(module: Any, value: float) -> list[Array]:
        out, cache = getattr(module, op.forward_name)(**arrays, **options)
        dout = cotangent(out)
        first = dout[0] if isinstance(dout, tuple) else dout
        if isinstance(first, float):
            dout = value
        else:
            first.reshape(-1)[first.size // 2] = value
        found = getattr(module, op.backward_name)(dout, cache)
        return [np.array(g) for g in (found if isinstance(found, tuple) else (found,))]

    compared = zip(
        gradients(ops, np.nan), gradients(reference, 1.5), gradients(reference, 2.5), strict=True
    )
    for gradient, a, b in compared:
        assert np.isnan(gradient[a != b]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_a_gradient_reaches_its_own_parameter_and_no_other(backend: str) -> None:
    ops = load(backend)
    master, m, v, grad = (np.full(300, n, np.float32) for n in (1, 0, 0, 0.5))
    grad[70] = np.nan
    usual = {"step": 1, "lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    ops.adamw(master, m, v, grad, n_decayed=100, weight_decay=0.1, **usual)
    for array in (master, m, v):
        np.testing.assert_array_equal(np.flatnonzero(np.isnan(array)), [70])
    assert np.isnan(ops.global_norm(grad)) and np.isnan(ops.square_sums(grad)).sum() == 1
