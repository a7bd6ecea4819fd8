"""Checks that declarations cannot say: one sentence with what must hold and what arrived."""

from collections.abc import Mapping

import numpy as np

from reference.params import Layout, check_names
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


def check_shape(op: str, name: str, array: Array, shape: tuple[int, ...], why: str) -> None:
    """Raise unless ``array`` has exactly this shape; ``why`` says where the shape comes from."""
    check_array(op, name, array)
    if array.shape != shape:
        raise ValueError(f"{op}: {name} must have shape {shape} to match {why}, got {array.shape}")


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


def check_position(op: str, name: str, position: int | Array, batch: int) -> None:
    """Raise unless ``position`` is an int or one int for each row of the batch."""
    integer = np.issubdtype(np.asarray(position).dtype, np.integer)
    if not integer or np.shape(position) not in ((), (batch,)):
        raise ValueError(
            f"{op}: {name} must be an int or ({batch},) ints, one for each row, "
            f"got {position if np.ndim(position) == 0 else np.asarray(position)!r}"
        )


def check_writable(op: str, **arrays: Array) -> None:
    """Raise unless the arrays, of NumPy, may be written to."""
    for name, array in arrays.items():
        if not array.flags.writeable:
            raise ValueError(f"{op}: {name} is read-only, and is to be written to; pass a copy")


def check_params(
    op: str, params: Mapping[str, Array], layout: Layout, what: str = "the parameters"
) -> None:
    """Raise a ``ValueError`` unless these are the arrays of a layout, by name and shape."""
    check_names(params, layout, what)
    for name, (_, spec) in layout.offsets.items():
        if getattr(params[name], "shape", None) != spec.shape:
            check_shape(op, name, params[name], spec.shape, "the config")
