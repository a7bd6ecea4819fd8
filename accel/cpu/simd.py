"""SIMD from Numba: typed pointers, exponentials that vectorise, and a matrix product for tiles.

Numba leaves three things on the table for kernels like attention: slices of strided arrays do not
vectorise, ``np.exp`` is a scalar call, and its loops keep no block of a matrix in registers. This
file adds what is missing as LLVM intermediate code and a few lines of arithmetic; no C compiler is
involved, and the result is cached like any other kernel.

**Pointers.** ``pointer(address, like)`` is a Numba ``CPointer`` to elements of ``like``'s type:
``p[i]`` loads and stores, ``at(p, n)`` moves by ``n`` elements. Kernels that take addresses and
strides instead of arrays compile once per element type, whatever the layout of the arrays.

**Exponentials.** ``exp`` and ``exp2`` are the usual functions, in float32 by reduction to a small
interval and a polynomial (Cody & Waite 1980; coefficients from Cephes' ``expf`` and ``exp2f``,
Moshier 1992): 0.2 ns an element instead of 2.4 on a core with AVX-512.

**Tiles.** ``tile_gemm`` is C (+)= A B for operands that lie in the nearest caches. The register
block is 6 × 4 vectors where there are 32 vector registers (AVX-512, of 64 bytes each, and ARM, of
16: 24 accumulators, 4 columns of B, 1 element of A), 6 × 2 with the 16 registers of AVX2. Each step
of k loads 4 vectors and 6 scalars for 24 fused multiply-adds, so the two multiply-add ports and not
the two load ports are the limit. With 6 × 2 hardly more than that may be done: 12 multiply-adds
take 6 cycles, 20 instructions are needed, and a core of Zen 3 takes 6 a cycle, of two threads
together, one of which a virtual machine may be. Walking from row to row, as LLVM would, makes them
27; here they are 23 (``tests/cpu/test_targets.py``). All sizes work: rows left over take a smaller
block; columns left over 8 × 2 or 6 × 2 vectors, where a row of the block has four and they fill
two, and one vector with a mask.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.core.codegen import get_host_cpu_features
from numba.core.ir_utils import alias_func_extensions
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload

from accel.jit import jit

# Numba's signatures and LLVM values carry no static types.
Context = Any
Builder = Any
Value = Any

_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)

# Rows of tiles are padded to 64 bytes: a whole number of vectors on every processor, so that the
# split of the work is the same on all of them.
PAD_BYTES = 64

STEPS = 4  # of k, which a block of six or eight rows takes for one test whether there are more


def declare(builder: Builder, name: str, arguments: list[Any], result: Any = None) -> Any:
    """Return a function of LLVM's to call, by its name and types."""
    signature = ir.FunctionType(ir.VoidType() if result is None else result, arguments)
    return cgutils.get_or_insert_function(builder.module, signature, name)


def splat(builder: Builder, x: Value, lanes: int) -> Value:
    """Return a vector of so many lanes that all hold the scalar x."""
    undefined = ir.Constant(ir.VectorType(x.type, lanes), ir.Undefined)
    one = builder.insert_element(undefined, x, ir.Constant(_INT32, 0))
    zeros = ir.Constant(ir.VectorType(_INT32, lanes), [0] * lanes)
    return builder.shuffle_vector(one, undefined, zeros)


# --- pointers ------------------------------------------------------------------------------------


@intrinsic
def pointer(typingctx: Context, address: Any, like: Any) -> Any:
    """Return a pointer to elements of the type of the scalar ``like`` at an integer address."""

    def codegen(context: Context, builder: Builder, signature: Any, args: Any) -> Value:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(types.int64, like), codegen


@intrinsic
def at(typingctx: Context, p: Any, n: Any) -> Any:
    """Return the pointer ``n`` elements past ``p``."""

    def codegen(context: Context, builder: Builder, signature: Any, args: Any) -> Value:
        return builder.gep(args[0], [args[1]])

    return p(p, types.int64), codegen


@intrinsic
def start(typingctx: Context, array: Any) -> Any:
    """Return the pointer to the first element of a Numba array."""

    def codegen(context: Context, builder: Builder, signature: Any, args: Any) -> Value:
        return context.make_array(signature.args[0])(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), codegen


def _reaches_memory(made: str, args: Any, aliases: Any, of_arguments: Any) -> None:
    """Tell Numba that what is written through a pointer is seen outside of the kernel.

    Its parallel mode takes a store into what is no argument, nor a part of one, for dead: a prange
    whose body is one such store would be left out.
    """
    if isinstance(of_arguments, set):  # while it looks for what is dead; later it gives a dict
        of_arguments.add(made)


alias_func_extensions.update(
    {(made.__name__, __name__): _reaches_memory for made in (pointer, at, start)}
)


@intrinsic
def pad_columns(typingctx: Context, like: Any) -> Any:
    """Return how many elements of the type of the scalar ``like`` fill ``PAD_BYTES``."""

    def codegen(context: Context, builder: Builder, signature: Any, args: Any) -> Value:
        return ir.Constant(_INT64, PAD_BYTES * 8 // signature.args[0].bitwidth)

    return types.int64(like), codegen


def emit_prefetch(builder: Builder, line: Value, level: int, *, write: bool) -> None:
    """Ask for the cache line at a pointer, to lie in that level's cache soon."""
    f = declare(builder, "llvm.prefetch.p0", [line.type, _INT32, _INT32, _INT32])
    data = 1
    builder.call(f, [line, *(ir.Constant(_INT32, int(n)) for n in (write, 4 - level, data))])


@intrinsic
def prefetch_row(typingctx: Context, p: Any) -> Any:
    """Ask for the cache lines of one row of the register block at ``p``, which is to be written."""

    def codegen(context: Context, builder: Builder, signature: Any, args: Any) -> Value:
        lanes = lanes_of(context, signature.args[0])
        step = max(1, 64 // vector_bytes()) * lanes  # elements of a cache line
        for i in range(0, block_vectors() * lanes, step):
            line = builder.gep(args[0], [ir.Constant(_INT64, i)])
            emit_prefetch(builder, line, 1, write=True)
        return context.get_dummy_value()

    return types.none(p), codegen


# --- exponentials --------------------------------------------------------------------------------

_F = np.float32
# Adding 1.5 · 2²³ leaves a float32 no bits below the point: it rounds to the nearest integer, which
# then stands in the low bits of the sum, here with the 127 that an exponent has there. Contraction
# to fused multiply-adds is the one liberty the compiler gets here; reassociation would cancel the
# constant.
_ROUND = _F(12582912.0 + 127)
_LOG2_E = _F(1.44269504)
_LN2_HIGH = _F(0.693359375)  # nine bits, so that its product with an integer below 2¹⁴ is exact
_LN2_LOW = _F(-2.12194440e-4)
_LN2 = float(np.log(2.0))
# LLVM takes each ``held`` for an instruction and would call so many of them, a number at a time.
INLINE: dict[str, Any] = {"fastmath": {"contract"}, "forceinline": True}


@intrinsic
def held(typingctx: Context, constant: Any) -> Any:
    """Return a float32 constant so that a loop finds it in a register or on the stack.

    An instruction of AVX2 takes eight numbers from the stack for nothing, but not one for all lanes
    as later ones do; LLVM, which knows the constant, would load and spread it in every turn. An
    empty instruction hides that it is one.
    """

    def codegen(context: Context, builder: Builder, signature: Any, args: Any) -> Value:
        if vector_bytes() != 32:
            return args[0]
        kind = args[0].type
        hidden = builder.asm(ir.FunctionType(kind, [kind]), "", "=x,0", [args[0]], False)
        hidden.attributes.add("readnone")
        hidden.attributes.add("nounwind")
        return hidden

    return constant(constant), codegen


def exp2(t: Any) -> Any:
    """2ᵗ, in kernels a polynomial that vectorises; see ``exp`` for the ends of the range."""
    return np.exp2(t)


def exp(x: Any) -> Any:
    """eˣ, in kernels a polynomial that vectorises.

    In float32 the relative error is below 2⁻²³. Results below 2⁻¹²⁶ are 0 rather than denormal,
    apart from a sliver of half a binade: denormals would slow every product they meet. Above
    127.5 · ln 2 = 88.37 the result is infinite. NaN gives NaN. float64 takes the library's.
    """
    return np.exp(x)


def exp_below(x: Any) -> Any:
    """eˣ, with the bits of ``exp``, of what is at most 128 ln 2, or NaN: it takes a tenth less."""
    return np.exp(x)


def _exp2_float64(t: Any) -> Any:
    return np.exp2(t)


def _exp_float64(x: Any) -> Any:
    return np.exp(x)


@overload(exp2, jit_options=INLINE)
def _exp2_overload(t: Any) -> Callable[..., Any] | None:
    if t == types.float64:
        return _exp2_float64
    if t != types.float32:
        return None

    def exp2_float32(t: Any) -> Any:
        # Comparisons are written so that NaN falls through. The exponent field of 2⁻¹²⁷ is zero.
        low, high, integer = held(_F(-127.0)), held(_F(128.0)), held(_ROUND)
        t = low if t < low else t
        t = high if t > high else t
        shifted = t + integer
        f = t - (shifted - integer)  # in [-1/2, 1/2]
        p = held(_F(1.535336188e-4)) * f + held(_F(1.339887440e-3))
        p = p * f + held(_F(9.618437358e-3))
        p = p * f + held(_F(5.550332471e-2))
        p = p * f + held(_F(2.402264791e-1))
        p = p * f + held(_F(6.931472029e-1))
        p = p * f + held(_F(1.0))
        return p * np.int32(np.float32(shifted).view(np.int32) << np.int32(23)).view(np.float32)

    return exp2_float32


@overload(exp_below, jit_options=INLINE)
def _exp_below_overload(x: Any) -> Callable[..., Any] | None:
    if x == types.float64:
        return _exp_float64
    if x != types.float32:
        return None

    def exp_below_float32(x: Any) -> Any:
        low, integer = held(_F(-127.0 * _LN2)), held(_ROUND)
        x = low if x < low else x
        shifted = x * held(_LOG2_E) + integer
        n = shifted - integer
        r = x - n * held(_LN2_HIGH)
        r = r - n * held(_LN2_LOW)
        # In pairs (Estrin 1960), which wait less for each other than one after the other.
        square = r * r
        p = held(_F(1.9875691500e-4)) * r + held(_F(1.3981999507e-3))
        p = p * square + (held(_F(8.3334519073e-3)) * r + held(_F(4.1665795894e-2)))
        p = p * square + (held(_F(1.6666665459e-1)) * r + held(_F(5.0000001201e-1)))
        p = p * square + r + held(_F(1.0))
        return p * np.int32(np.float32(shifted).view(np.int32) << np.int32(23)).view(np.float32)

    return exp_below_float32


@overload(exp, jit_options=INLINE)
def _exp_overload(x: Any) -> Callable[..., Any] | None:
    if x == types.float64:
        return _exp_float64
    if x != types.float32:
        return None

    def exp_float32(x: Any) -> Any:
        high = held(_F(128.0 * _LN2))
        return exp_below(high if x > high else x)

    return exp_float32


# --- products of tiles ---------------------------------------------------------------------------


@functools.cache
def vector_bytes() -> int:
    """Return the bytes of a vector register of the processor that kernels are compiled for."""
    features = config.CPU_FEATURES
    if features is None:
        features = get_host_cpu_features()
    if "+avx512f" in features:
        return 64
    return 32 if "+avx2" in features else 16


@functools.cache
def block_vectors() -> int:
    """Return the vectors in a row of the register block: what the register file has room for."""
    many = vector_bytes() == 64 or target().startswith(("aarch64", "arm64"))
    return 4 if many else 2


def target() -> str:
    """Return the triple of what kernels are compiled for, which begins with its architecture."""
    return str(cpu_target.target_context.codegen().magic_tuple()[0])


@intrinsic
def block_columns(typingctx: Context, p: Any) -> Any:
    """Return the columns of the register block for elements of ``p``, a compile-time constant."""

    def codegen(context: Context, builder: Builder, signature: Any, args: Any) -> Value:
        return ir.Constant(_INT64, block_vectors() * lanes_of(context, signature.args[0]))

    return types.int64(p), codegen


@intrinsic
def vector_columns(typingctx: Context, p: Any) -> Any:
    """Return the elements of one vector register, for elements of ``p``."""

    def codegen(context: Context, builder: Builder, signature: Any, args: Any) -> Value:
        return ir.Constant(_INT64, lanes_of(context, signature.args[0]))

    return types.int64(p), codegen


def lanes_of(context: Context, p: Any) -> int:
    return int(vector_bytes() // (p.dtype.bitwidth // 8))


def _register_block(rows: int, parts: int) -> Any:
    """Make the intrinsic for one register block.

    Parameters
    ----------
    rows : int
        Rows of the block.
    parts : int
        Its rows are ``block_vectors()`` whole vectors (1), half of them (2), or one vector of which
        ``n`` lanes count (0).
    """

    @intrinsic
    def block(
        typingctx: Context,
        a: Any,
        a_row: Any,
        a_col: Any,
        b: Any,
        b_row: Any,
        c: Any,
        c_row: Any,
        k: Any,
        n: Any,
        accumulate: Any,
        ahead: Any,
        ahead_step: Any,
    ) -> Any:
        def codegen(context: Context, builder: Builder, signature: Any, args: Any) -> Value:
            element = context.get_value_type(signature.args[0].dtype)
            lanes = lanes_of(context, signature.args[0])
            vectors = block_vectors() // parts if parts else 1
            *others, ahead, ahead_step = args
            asked = None if signature.args[-2] == types.none else (ahead, ahead_step)
            _emit_block(builder, element, lanes, rows, vectors, not parts, asked, *others)
            return context.get_dummy_value()

        i = types.int64
        return types.none(a, i, i, b, i, c, i, i, i, types.boolean, ahead, i), codegen

    return block


def _emit_block(
    builder: Builder,
    element: Any,
    lanes: int,
    rows: int,
    vectors: int,
    masked: bool,
    ahead: tuple[Value, Value] | None,
    a: Value,
    a_row: Value,
    a_col: Value,
    b: Value,
    b_row: Value,
    c: Value,
    c_row: Value,
    k: Value,
    n: Value,
    accumulate: Value,
) -> None:
    """Write the loop over k with all of the block's accumulators in registers."""
    vector = ir.VectorType(element, lanes)
    bits = 64 if isinstance(element, ir.DoubleType) else 32
    suffix = f"v{lanes}f{bits}"
    fma = declare(builder, f"llvm.fmuladd.{suffix}", [vector] * 3, vector)
    zero = ir.Constant(vector, [0.0] * lanes)
    mask_type = ir.VectorType(ir.IntType(1), lanes)
    align = ir.Constant(_INT32, bits // 8)
    vector_pointer = ir.PointerType(vector)
    mask = _first_lanes(builder, lanes, n) if masked else None

    def load(p: Value) -> Value:
        p = builder.bitcast(p, vector_pointer)
        if mask is None:
            return builder.load(p, align=bits // 8)
        name, kinds = f"llvm.masked.load.{suffix}.p0", [vector_pointer, _INT32, mask_type, vector]
        return builder.call(declare(builder, name, kinds, vector), [p, align, mask, zero])

    def store(value: Value, p: Value) -> None:
        p = builder.bitcast(p, vector_pointer)
        if mask is None:
            builder.store(value, p, align=bits // 8)
            return
        name, kinds = f"llvm.masked.store.{suffix}.p0", [vector, vector_pointer, _INT32, mask_type]
        builder.call(declare(builder, name, kinds), [value, p, align, mask])

    def index(x: int) -> Value:
        return ir.Constant(_INT64, x)

    starts = [a]
    for _ in range(1, rows):
        starts.append(builder.gep(starts[-1], [a_row]))
    sums = [cgutils.alloca_once_value(builder, zero) for _ in range(rows * vectors)]
    a_k = cgutils.alloca_once_value(builder, index(0))
    b_k = cgutils.alloca_once_value(builder, b)

    def step() -> None:
        column, row = builder.load(a_k), builder.load(b_k)
        columns = [load(builder.gep(row, [index(lanes * j)])) for j in range(vectors)]
        for i in range(rows):
            scalar = builder.load(builder.gep(starts[i], [column]), align=bits // 8)
            broadcast = splat(builder, scalar, lanes)
            for j in range(vectors):
                s = sums[i * vectors + j]
                builder.store(builder.call(fma, [broadcast, columns[j], builder.load(s)]), s)
        # An empty instruction hides what this is from LLVM, which would walk from row to row in
        # every step, with an addition for each of the loads.
        opaque = ir.FunctionType(_INT64, [_INT64])
        column = builder.asm(opaque, "", "=r,0", [builder.add(column, a_col)], False)
        builder.store(column, a_k)
        builder.store(builder.gep(row, [b_row]), b_k)

    together = STEPS if rows >= 6 and not masked else 1
    if together > 1:
        with cgutils.for_range(builder, builder.urem(k, index(together))):
            step()
    ahead_k = ahead and cgutils.alloca_once_value(builder, ahead[0])
    with cgutils.for_range(builder, builder.udiv(k, index(together))):
        if ahead and together > 1:
            line = builder.load(ahead_k)
            emit_prefetch(builder, line, 2, write=False)
            builder.store(builder.gep(line, [ahead[1]]), ahead_k)
        for _ in range(together):
            step()

    # C is added after the loop, not before: its rounding then happens once, at the end.
    with builder.if_else(accumulate) as (then, otherwise):
        for branch, add in ((then, True), (otherwise, False)):
            with branch:
                row = c
                for i in range(rows):
                    for j in range(vectors):
                        p = builder.gep(row, [index(lanes * j)])
                        value = builder.load(sums[i * vectors + j])
                        store(builder.fadd(value, load(p)) if add else value, p)
                    row = builder.gep(row, [c_row])


def _first_lanes(builder: Builder, lanes: int, n: Value) -> Value:
    """Return the mask whose first ``n`` lanes are set."""
    numbers = ir.Constant(ir.VectorType(_INT64, lanes), list(range(lanes)))
    return builder.icmp_signed("<", numbers, splat(builder, n, lanes))


_wide_6 = _register_block(6, 1)
_wide_5 = _register_block(5, 1)
_wide_4 = _register_block(4, 1)
_wide_3 = _register_block(3, 1)
_wide_2 = _register_block(2, 1)
_wide_1 = _register_block(1, 1)
_half_8 = _register_block(8, 2)
_half_6 = _register_block(6, 2)
_half_1 = _register_block(1, 2)
_edge_6 = _register_block(6, 0)
_edge_1 = _register_block(1, 0)


@jit(nogil=True)
def tile_gemm(
    rows: int,
    columns: int,
    k: int,
    a: Any,
    a_row: int,
    a_col: int,
    b: Any,
    b_row: int,
    c: Any,
    c_row: int,
    accumulate: bool,
    ahead: Any = None,
    ahead_step: int = 0,
) -> None:
    """C (+)= A B on tiles: c[i, j] (+)= Σ_k a[i, k] b[k, j].

    Parameters
    ----------
    rows, columns, k : int
        A is (rows, k), B is (k, columns), C is (rows, columns); k at least 1.
    a, b, c : pointer
        First elements, all of one type.
    a_row, a_col, b_row, c_row : int
        Steps in elements from row to row and, for A, from column to column; B and C have adjacent
        columns.
    accumulate : bool
        Add to C; else overwrite it.
    ahead : pointer, optional
        What is needed soon: blocks of six or eight rows ask for a cache line there every ``STEPS``
        steps of k, each ``ahead_step`` elements past the one before, for the second-level cache.
        (Asked for all at once they would hold up the operands that come from there.)
    """
    width = block_columns(a)
    j = 0
    while j + width <= columns:
        bj = at(b, j)
        i = 0
        while i + 6 <= rows:
            ai, ci = at(a, i * a_row), at(c, i * c_row + j)
            for row in range(6):
                prefetch_row(at(ci, row * c_row))
            _wide_6(ai, a_row, a_col, bj, b_row, ci, c_row, k, width, accumulate, ahead, ahead_step)
            i += 6
        ai, ci = at(a, i * a_row), at(c, i * c_row + j)
        left = rows - i
        if left == 1:
            _wide_1(ai, a_row, a_col, bj, b_row, ci, c_row, k, width, accumulate, ahead, ahead_step)
        elif left == 2:
            _wide_2(ai, a_row, a_col, bj, b_row, ci, c_row, k, width, accumulate, ahead, ahead_step)
        elif left == 3:
            _wide_3(ai, a_row, a_col, bj, b_row, ci, c_row, k, width, accumulate, ahead, ahead_step)
        elif left == 4:
            _wide_4(ai, a_row, a_col, bj, b_row, ci, c_row, k, width, accumulate, ahead, ahead_step)
        elif left == 5:
            _wide_5(ai, a_row, a_col, bj, b_row, ci, c_row, k, width, accumulate, ahead, ahead_step)
        j += width
    width = width // 2
    if width > vector_columns(a) and j + width <= columns:
        bj = at(b, j)
        i = 0
        while i < rows:
            ai, ci, left = at(a, i * a_row), at(c, i * c_row + j), rows - i
            if left >= 8 and left % 6 != 0:  # eights and sixes come to any even number from 12 on
                _half_8(
                    ai, a_row, a_col, bj, b_row, ci, c_row, k, width, accumulate, ahead, ahead_step
                )
                i += 8
            elif left >= 6:
                _half_6(
                    ai, a_row, a_col, bj, b_row, ci, c_row, k, width, accumulate, ahead, ahead_step
                )
                i += 6
            else:
                _half_1(
                    ai, a_row, a_col, bj, b_row, ci, c_row, k, width, accumulate, ahead, ahead_step
                )
                i += 1
        j += width
    width = vector_columns(a)
    while j < columns:
        n = min(width, columns - j)
        bj = at(b, j)
        i = 0
        while i + 6 <= rows:
            ai, ci = at(a, i * a_row), at(c, i * c_row + j)
            _edge_6(ai, a_row, a_col, bj, b_row, ci, c_row, k, n, accumulate, ahead, ahead_step)
            i += 6
        while i < rows:
            ai, ci = at(a, i * a_row), at(c, i * c_row + j)
            _edge_1(ai, a_row, a_col, bj, b_row, ci, c_row, k, n, accumulate, ahead, ahead_step)
            i += 1
        j += width
