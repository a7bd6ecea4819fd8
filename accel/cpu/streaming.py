"""Results that are larger than the caches, written past them.

To store into a line that is in no cache, a processor first reads it, and a kernel that is bound by
memory so moves half as much again. Stores that go past the caches ("non-temporal"; Intel's
Optimization Reference Manual, section on software prefetch and streaming stores) spare that, if
whole lines are written. LLVM makes no vectors of loops with such stores: so a kernel writes to a
``landing``, in the nearest cache, which ``leave`` sends on. Reads gain from being asked for ahead
then: a row's passes over itself leave the memory idle in between.
"""

from typing import Any, Literal

import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from accel.cpu.memory import ALIGNMENT
from accel.cpu.packing import emit_room, prefetch
from accel.cpu.simd import at, vector_bytes, vector_columns
from accel.jit import jit

LANDING = 256  # elements of a row that most kernels send on at once
FLAT = 64  # of a flat array
AHEAD = 4 * FLAT  # how far flat arrays are asked for ahead
FAR = 32 << 20  # bytes: the last cache that two cores of today's processors have, and more


def is_far(out: npt.NDArray[Any]) -> Literal[True] | None:
    """Return True where no cache holds ``out``, which then is written past them.

    Else None, for which kernels are compiled apart: they write to where the results belong.
    """
    return True if out.nbytes > FAR and out.flags.aligned else None


@intrinsic
def landing(typingctx: Any, z: Any, far: Any) -> Any:
    """Return where to write up to ``ROOM`` elements that are to go to ``z``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        near = far == types.none
        return args[0] if near else emit_room(context, builder, signature.args[0].dtype)

    return z(z, far), codegen


@intrinsic
def _send_line(typingctx: Any, z: Any, room: Any) -> Any:
    """Write a line past the caches to ``z``, where one begins."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = context.get_value_type(signature.args[0].dtype)
        n_bytes = signature.args[0].dtype.bitwidth // 8
        lanes = vector_bytes() // n_bytes
        vector = ir.PointerType(ir.VectorType(element, lanes))
        past = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        for i in range(0, ALIGNMENT // n_bytes, lanes):
            index = [ir.Constant(ir.IntType(64), i)]
            source, target = (builder.bitcast(builder.gep(p, index), vector) for p in args[::-1])
            value = builder.load(source, align=n_bytes)
            stored = builder.store(value, target, align=vector_bytes())
            stored.set_metadata("nontemporal", past)
        return context.get_dummy_value()

    return types.none(z, room), codegen


@intrinsic
def _line_of(typingctx: Any, z: Any) -> Any:
    """Return the elements from ``z`` to where the next line begins, and those of a line."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        n_bytes = signature.args[0].dtype.bitwidth // 8
        line, each = (ir.Constant(ir.IntType(64), n) for n in (ALIGNMENT, n_bytes))
        behind = builder.urem(builder.ptrtoint(args[0], line.type), line)
        before = builder.urem(builder.sub(line, behind), line)
        pair = builder.udiv(before, each), builder.udiv(line, each)
        return context.make_tuple(builder, signature.return_type, pair)

    return types.UniTuple(types.int64, 2)(z), codegen


@intrinsic
def _fence(typingctx: Any) -> Any:
    """Let stores go out in their order, those past the caches among them."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), codegen


@jit(nogil=True)
def part(n: int, far: Any, most: int = LANDING) -> int:
    """Return how many of ``n`` elements to make before they leave, and others are asked for.

    A row's sum, too, is one of such parts, so its bits depend on whether the array is far.
    """
    return n if far is None else min(n, most)


@jit(nogil=True)
def ask(p: Any, n: int, far: Any) -> None:
    """Ask for ``n`` elements at ``p`` ahead."""
    if far is not None:
        prefetch(p, 0, n, vector_columns(p))


@jit(nogil=True)
def leave(w: Any, z: Any, n: int, far: Any) -> None:
    """Send ``n`` elements on to ``z`` from its landing."""
    if far is not None:
        first, line = _line_of(z)
        i = min(first, n)
        for j in range(i):
            z[j] = w[j]
        while i + line <= n:
            _send_line(at(z, i), at(w, i))
            i += line
        for j in range(i, n):
            z[j] = w[j]


@jit(nogil=True)
def settle(far: Any) -> None:
    """Have what has left be seen by other threads, at the end of a task."""
    if far is not None:
        _fence()
