"""The bf16 copies of weights, and how AdamW keeps them up to date as it goes.

``parameters`` gives the ops bf16 copies of the matrices of the float32 master. Made in a pass of
its own that copy costs 6 bytes a parameter, after an AdamW that has just had the new weight in a
register. So the copies of matrices that lie side by side in one buffer, as a layout puts them, are
one flat array that stays tied to that memory for as long as somebody holds what ``parameters``
returned. ``adamw`` on a slice of it writes the copy of that slice as well, 2 bytes a parameter, and
the next ``parameters`` converts the rest only: what other ranks updated and sent.

What this asks for: between ``adamw`` and the ``parameters`` after it nothing but ``adamw`` may
write into the slice that it was given. ``accumulate`` and ``scale_forward`` are seen when they do;
bytes copied there by other means are not. And as in float32, where the ops read the master itself,
the former result of ``parameters`` changes with the master.
"""

import weakref
from collections.abc import Mapping

from accel.cuda.arrays import fours, to_dtype
from accel.cuda.device import BF16, F32, current, empty, is_contiguous, launch
from reference.types import Array


class Tie:
    """Neighbouring matrices of a master and their bf16 copy.

    Attributes
    ----------
    copy : (n,) bf16
    fresh : (int, int)
        The elements from the first to before the second are those of the master, by ``adamw``.
    """

    def __init__(self, first: Array, size: int) -> None:
        self._master = first  # keeps the memory from being given to another array
        self.address = current().address(first)
        self.size = size
        self.copy = empty((size,), BF16)
        self.fresh = (0, 0)

    def offset(self, array: Array) -> int:
        """Return at which element of the tied memory an array begins: any number, if outside."""
        return (current().address(array) - self.address) // F32.itemsize


class Weights(dict[str, Array]):
    """What ``parameters`` returns; while it is held, so is the tie."""

    tie: Tie


_ties: weakref.WeakValueDictionary[tuple[int, int], Tie] = weakref.WeakValueDictionary()


def parameters(master: Mapping[str, Array]) -> dict[str, Array]:
    """Return bf16 copies of matrices and tables, and the master's own gains and biases."""
    with current().arena.lasting():  # also when called within a step
        return _parameters(master)


def _parameters(master: Mapping[str, Array]) -> dict[str, Array]:
    matrices = {name: x for name, x in master.items() if x.ndim >= 2}
    if not _side_by_side(list(matrices.values())):
        return {name: to_dtype(x, BF16) if x.ndim >= 2 else x for name, x in master.items()}
    first = next(iter(matrices.values()))
    key = (current().address(first), sum(x.size for x in matrices.values()))
    weights = Weights(master)
    tie = _ties.get(key)
    if tie is None:
        tie = _ties[key] = Tie(first, key[1])
    weights.tie = tie
    low = 0
    for name, x in matrices.items():
        high = low + x.size
        for a, b in ((low, min(high, tie.fresh[0])), (max(low, tie.fresh[1]), high)):
            if a < b:
                part = x.reshape(-1)[a - low : b - low]
                launch(
                    "elementwise", "to_bf16_array", fours(part), x=part, y=tie.copy[a:b], n=b - a
                )
        weights[name] = tie.copy[low:high].reshape(x.shape)
        low = high
    tie.fresh = (0, 0)
    return weights


def _side_by_side(matrices: list[Array]) -> bool:
    """Return whether float32 matrices follow one another in memory without a gap."""
    if not matrices:
        return False
    address = current().address(matrices[0])
    for x in matrices:
        if x.dtype != F32 or not is_contiguous(x) or current().address(x) != address:
            return False
        address += x.nbytes
    return address > current().address(matrices[0])


def copy_of(array: Array) -> Array | None:
    """Return the part of a bf16 copy that ``adamw`` is to write for a slice of a master.

    It may be shorter than the slice, whose end holds gains and biases then; None where there is
    none. What is returned counts as written.
    """
    for tie in list(_ties.values()):
        first = tie.offset(array)
        if 0 <= first < tie.size:
            tie.fresh = (first, first + array.size)
            return tie.copy[slice(*tie.fresh)]
        _forget(tie, first, array)
    return None


def written(array: Array) -> None:
    """Take note that an array was written into: a copy of it is no longer what it was."""
    for tie in list(_ties.values()):
        _forget(tie, tie.offset(array), array)


def _forget(tie: Tie, first: int, array: Array) -> None:
    outside = first >= tie.size or first + array.size <= 0
    if not (outside and is_contiguous(array)):  # where scattered elements lie is not looked into
        tie.fresh = (0, 0)
