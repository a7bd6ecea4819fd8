"""Checks at the public boundary: one sentence that says what must hold and what arrived."""

import math
from typing import Any

import numpy as np

from reference.types import Array


def check_array(op: str, name: str, array: Array) -> None:
    """Raise unless ``array`` is one: a list has neither shape nor dtype to check."""
    if not hasattr(array, "dtype"):
        raise ValueError(
            f"{op}: {name} must be an array, got {type(array).__name__}; convert with np.asarray"
        )


def check_float(op: str, **arrays: Array | None) -> None:
    """Raise unless the given arrays share one dtype, float32 or float64."""
    for name, array in arrays.items():
        if array is not None:
            check_array(op, name, array)
    given = {name: array.dtype for name, array in arrays.items() if array is not None}
    if len(set(given.values())) > 1 or next(iter(given.values())) not in (np.float32, np.float64):
        found = ", ".join(f"{name} is {dtype}" for name, dtype in given.items())
        raise ValueError(
            f"{op}: arrays must share one dtype, float32 or float64, but {found}; "
            "convert with .astype"
        )


def check_rows(op: str, x: Array) -> None:
    """Raise unless ``x`` has a last axis for the op to work along."""
    if x.ndim == 0:
        raise ValueError(f"{op}: x must have at least one axis, got a single number")


def check_shape(op: str, name: str, array: Array, shape: tuple[int, ...], why: str) -> None:
    """Raise unless ``array`` has exactly this shape; ``why`` says where the shape comes from."""
    check_array(op, name, array)
    if array.shape != shape:
        raise ValueError(f"{op}: {name} must have shape {shape} to match {why}, got {array.shape}")


def check_dout(op: str, dout: Array, shape: tuple[int, ...], like: Array) -> None:
    """Raise unless ``dout`` has the shape of the forward's output and the dtype of ``like``."""
    check_shape(f"{op}_backward", "dout", dout, shape, "the output")
    check_float(f"{op}_backward", dout=dout, forward=like)


def check_ids(op: str, name: str, ids: Array, limit: int, what: str = "vocabulary") -> None:
    """Raise unless ``ids`` are integers in 0 .. limit - 1; the first offender is named."""
    check_array(op, name, ids)
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{op}: {name} must be integers (int32), got {ids.dtype}")
    outside = (ids < 0) | (ids >= limit)
    if outside.any():
        where = np.unravel_index(int(np.argmax(outside)), ids.shape)
        raise ValueError(
            f"{op}: {name} must lie in 0..{limit - 1} (the {what} has {limit} entries), "
            f"but {name}[{', '.join(str(int(i)) for i in where)}] is {int(ids[where])}"
        )


def check_mask(op: str, name: str, mask: Array, shape: tuple[int, ...], why: str) -> None:
    """Raise unless ``mask`` is a bool array of this shape."""
    check_array(op, name, mask)
    if mask.dtype != np.bool_:
        raise ValueError(f"{op}: {name} must be bool, True = take part, got {mask.dtype}")
    check_shape(op, name, mask, shape, why)


def check_number(
    op: str, name: str, value: float, *, at_least: float = -math.inf, above: float = -math.inf
) -> None:
    """Raise unless ``value`` is a finite number within the bounds."""
    if not (np.ndim(value) == 0 and math.isfinite(value) and value >= at_least and value > above):
        bound = f" >= {at_least:g}" if at_least > -math.inf else ""
        bound += f" > {above:g}" if above > -math.inf else ""
        raise ValueError(f"{op}: {name} must be a finite number{bound}, got {value!r}")


def check_scalar(op: str, name: str, value: float) -> None:
    """Raise unless ``value`` is one number, whatever its value: NaN has to travel."""
    if np.ndim(value) != 0:
        raise ValueError(f"{op}: {name} must be a number, got {value!r}")


def check_position(op: str, name: str, position: int | Array, batch: int) -> None:
    """Raise unless ``position`` is an int or one int for each row of the batch."""
    integer = np.issubdtype(np.asarray(position).dtype, np.integer)
    if not integer or np.shape(position) not in ((), (batch,)):
        raise ValueError(
            f"{op}: {name} must be an int or ({batch},) ints, one for each row, "
            f"got {position if np.ndim(position) == 0 else np.asarray(position)!r}"
        )


def given_again(op: str, kept: Array | None, given: Array | None, shape: tuple[int, ...]) -> Array:
    """Return a forward's x, from its cache or given to the backward again: one of the two."""
    if (kept is None) == (given is None):
        told = "not to keep x, which must be given" if kept is None else "to keep x: do not give it"
        raise ValueError(f"{op}_backward: the forward was told {told}")
    if given is not None:
        check_shape(f"{op}_backward", "x", given, shape, "the forward's x")
        return given
    assert kept is not None
    return kept


def check_writable(op: str, **arrays: Array) -> None:
    """Raise unless the arrays, of NumPy, may be written to."""
    for name, array in arrays.items():
        if not array.flags.writeable:
            raise ValueError(f"{op}: {name} is read-only, and is to be written to; pass a copy")


def check_receiver(op: str, out: Array | None, x: Array) -> None:
    """Raise unless ``out``, when given, can receive an array of x's shape and dtype as it lies."""
    if out is None:
        return
    check_shape(op, "out", out, x.shape, "x")
    if out.dtype != x.dtype or not out.flags.c_contiguous:
        raise ValueError(
            f"{op}: out must be contiguous and of x's dtype {x.dtype}, got dtype {out.dtype} and "
            f"strides {out.strides}"
        )


def write_out(out: Array | None, gradient: Array) -> None:
    """Write a parameter gradient where the caller wants it, if anywhere."""
    if out is not None:
        check_out(out, gradient.shape, gradient.dtype)
        out[...] = gradient


def check_out(out: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise unless ``out`` can receive a parameter gradient."""
    check_array("the gradient", "out", out)
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(
            f"out must have the gradient's shape {shape} and dtype {dtype}, "
            f"got {out.shape} and {out.dtype}"
        )
    check_writable("the gradient", out=out)
