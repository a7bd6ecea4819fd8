"""NaN travels: what an op makes of NaN and infinity is declared, and held to on every backend."""

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import accel
from accel.cuda import device as devices
from reference import ops as reference
from reference.contract import Op
from reference.ops import OPS
from reference.types import Array
from tests.cuda_shim import require
from tests.cuda_shim.device import ShimDevice
from tests.helpers.contract import cases, cotangent

pytestmark = pytest.mark.filterwarnings("ignore:(invalid|divide|overflow):RuntimeWarning")
BACKENDS = ("reference", "cpu", "cpu bf16", "cuda", "cuda bf16")
WITHOUT_LETTERS = ("add", "split_heads")  # whose outputs no string of letters describes
FLOATS = [
    (op.name, operand.name)
    for op in OPS.values()
    for operand in op.operands
    if op.backward and operand.is_float
]


shim = functools.cache(ShimDevice)  # which keeps the kernels that it has compiled


@pytest.fixture
def ops(backend: str) -> Iterator[Any]:
    name, _, compute = backend.partition(" ")
    if name == "reference":
        yield reference
    elif name == "cpu":
        yield accel.load(name, compute=compute or "float32")
    else:
        require.shim()
        before = devices.use(shim())
        yield importlib.import_module(f"accel.cuda.ops_{compute}" if compute else "accel.cuda.ops")
        devices.use(before)


def put(ops: Any, value: Any, *, activation: bool = True) -> Any:
    """Return an array, or a tuple of them, where the backend's arrays lie."""
    if isinstance(value, tuple):
        return tuple(put(ops, part) for part in value)
    if isinstance(value, np.ndarray):
        return ops.from_numpy(value.copy(), activation=activation)
    return value


def got(ops: Any, value: Any) -> list[Array]:
    """Return what an op gave, one or several, as arrays of NumPy's."""
    if hasattr(value, "total"):
        return [np.asarray(value.total)]
    parts = value if isinstance(value, tuple) else (value,)
    return [np.array(ops.to_numpy(part)) for part in parts]


def forward(
    ops: Any, op: Op, arrays: dict[str, Any], options: dict[str, Any]
) -> tuple[list[Array], Any]:
    kinds = {o.name: o.kind for o in op.operands}  # ALiBi's slopes are float32 in every mode
    arrays = {n: put(ops, a, activation=kinds[n] != "constant") for n, a in arrays.items()}
    out, cache = getattr(ops, op.forward_name)(**arrays, **options)
    return got(ops, out), cache


def given(name: str) -> tuple[Op, dict[str, Any], dict[str, Any]]:
    op = OPS[name]
    values, options = cases(np.float32)[name]
    arrays = dict(zip((o.name for o in op.operands), values, strict=False))
    return op, {key: a for key, a in arrays.items() if a is not None}, options


def changed(arrays: dict[str, Any], name: str, at: tuple[int, ...], value: float) -> dict[str, Any]:
    array = arrays[name].copy()
    array[at] = value
    return {**arrays, name: array}


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
    name: str, operand: str, ops: Any, value: float
) -> None:
    op, arrays, options = given(name)
    rng = np.random.default_rng(3)
    plain, _ = forward(ops, op, arrays, options)
    for _ in range(5):
        at = tuple(int(rng.integers(0, n)) for n in arrays[operand].shape)
        results = forward(ops, op, changed(arrays, operand, at, value), options)[0]
        moved = forward(reference, op, changed(arrays, operand, at, 1.5), options)[0]
        still = forward(reference, op, changed(arrays, operand, at, 2.5), options)[0]
        exact = forward(reference, op, changed(arrays, operand, at, value), options)[0]
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
def test_nan_in_a_cotangent_reaches_every_gradient_that_depends_on_it(name: str, ops: Any) -> None:
    op, arrays, options = given(name)

    def gradients(module: Any, value: float) -> list[Array]:
        _, cache = forward(module, op, arrays, options)
        dout = cotangent(getattr(reference, op.forward_name)(**arrays, **options)[0])
        first = dout[0] if isinstance(dout, tuple) else dout
        if isinstance(first, float):
            dout = value
        else:
            first.reshape(-1)[first.size // 2] = value
        return got(module, getattr(module, op.backward_name)(put(module, dout), cache))

    compared = zip(
        gradients(ops, np.nan), gradients(reference, 1.5), gradients(reference, 2.5), strict=True
    )
    for gradient, a, b in compared:
        assert np.isnan(gradient[a != b]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_a_gradient_reaches_its_own_parameter_and_no_other(ops: Any) -> None:
    grad = np.full(300, 0.5, np.float32)
    grad[70] = np.nan
    state = [ops.from_numpy(np.full(300, n, np.float32)) for n in (1, 0, 0)]
    gradient = ops.from_numpy(grad)
    usual = {"step": 1, "lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    ops.adamw(*state, gradient, n_decayed=100, weight_decay=0.1, **usual)
    for array in state:
        np.testing.assert_array_equal(np.flatnonzero(np.isnan(ops.to_numpy(array))), [70])
    assert np.isnan(ops.global_norm(gradient))
    assert np.isnan(ops.to_numpy(ops.square_sums(gradient))).sum() == 1
