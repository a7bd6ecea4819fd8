"""By which algorithms a run's dense products go: each is checked, then timed, at a run's shapes.

cuBLAS picks an algorithm for a product by rules of its own. Here those that cublasLt lists for each
product of a training step are tried, and one that is faster than cuBLAS's own choice is taken:

    right   A, B and C hold whole numbers so small that float32 adds them up exactly, in any
            order. So a right algorithm gives the very bits of those sums, rounded once, or
            cuBLAS's; one that adds up in bf16, reads beside a matrix or leaves a part out does
            not. (cuBLAS's differ where C is bf16: a product is rounded before C is added. So did
            cuBLAS 13.1 on an H100, and cublasLt where C was D, but not where it lay apart.)
    same    with numbers that are rounded, a second call gives the bits of the first
    fast    with the same numbers, by ``paths.in_turn``

What is chosen depends on the clock, so it is for who calls this to write it down: as a line for the
version of cuBLAS, and one for each product that leaves cuBLAS's choice, with the 64 bytes that are
its algorithm. All other products, those of float32 and those of shapes that a step has not, go to
cuBLAS as they always do.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from accel import AUTO, DEFAULT, Products
from accel.cuda import ops_bf16, paths
from accel.cuda.arrays import copy, to_dtype, upload
from accel.cuda.cublas import CublasError
from accel.cuda.cublaslt import ByAlgorithm, CublasLt
from accel.cuda.device import BF16, F32, Multiply, Product, current, empty
from accel.cuda.elementwise import add_forward, scale_forward
from accel.cuda.optimizer import global_norm
from reference.blocks import Recompute
from reference.config import Config
from reference.model import loss_backward, loss_forward
from reference.params import decoder_layout
from reference.types import Array, DropoutKey

TRIED = 8  # algorithms of a product, at most
MARGIN = 0.02  # of cuBLAS's time: what an algorithm must save to be taken
SECONDS, SAMPLE = 4.0, 0.01  # of timing all products, about; of a sample of one
DRAWN = 99_991  # numbers of a matrix before they repeat: a prime, so that no two rows are alike
EXACT = 1 << 22  # what a sum of whole numbers may come to: float32 has all of them up to 2^24
KEY = DropoutKey(0, 0, 0, 0)  # a step drops what its model drops: other products add the stream
VERSION = re.compile(r"cuBLAS (\d+\.\d+\.\d+)")
LINE = re.compile(r"([NT])([NT]) (\d+)x(\d+)x(\d+) (bf16|float32)( onto| plus)?: ([0-9a-f]{128})")


class Timed(NamedTuple):
    """A product of a step, and what it takes."""

    product: Product
    times: int  # that a step makes it
    seconds: dict[str, float]  # by the name of the way; DEFAULT is cuBLAS's own
    best: str


class Choice(NamedTuple):
    """What ``take`` is given, a sentence on why, and the times."""

    products: Products
    said: str
    timed: tuple[Timed, ...] = ()


def name(product: Product) -> str:
    """Return how a product is written down; it is onto D, or plus a C that lies apart."""
    p = product
    ab, out = f"{'NT'[p.transpose_a]}{'NT'[p.transpose_b]}", "bf16" if p.narrow else "float32"
    return f"{ab} {p.m}x{p.n}x{p.k} {out}{' plus' if p.apart else ' onto' if p.beta else ''}"


def take(products: Products) -> None:
    """Let the products of the device in use go by what was chosen.

    Raises
    ------
    ValueError
        When it is nothing that ``choose`` returns.
    ImportError
        When this version of cuBLAS, or this GPU, is not the one that it was chosen with.
    """
    device = current()
    device.recordings.clear()  # which go as products went
    if products in (AUTO, DEFAULT):
        device.products = {}
        return
    lines = (products,) if isinstance(products, str) else products
    found = [(LINE if i else VERSION).fullmatch(text) for i, text in enumerate(lines)]
    if not lines or None in found:
        wrong = lines[found.index(None)] if lines else lines
        raise ValueError(
            "run.products must be 'auto', 'default', or what a run has written there, got "
            f"{wrong!r}"
        )
    version, *chosen = filter(None, found)
    instead = "run.products may be 'default', which gives other last bits"
    library, ways = device.cublaslt(), dict[Product, Multiply]()
    if library.version != version[1]:
        raise ImportError(
            f"the run's products go by algorithms of cuBLAS {version[1]}, which cuBLAS "
            f"{library.version}, installed here, may number otherwise: install that version again, "
            f"or {instead}"
        )
    for one in chosen:
        a, b, m, n, k, out, c, algorithm = one.groups()
        sizes, beta = (int(m), int(n), int(k)), float(c is not None)
        product = Product(a == "T", b == "T", *sizes, beta, out == "bf16", c == " plus")
        try:
            ways[product] = ByAlgorithm(library, product, bytes.fromhex(algorithm))
        except CublasError as error:
            raise ImportError(
                f"this GPU does not take the algorithm of the run's product {name(product)} "
                f"({error}): {instead}"
            ) from error
    device.products = ways


def of_step(config: Config, batch: int, recompute: Recompute = "none") -> Counter[Product]:
    """Return how often a training step makes each product, by launchers that compute nothing."""
    from accel.bench.predict import recording

    layout = decoder_layout(config)
    with recording(current()) as device:
        params = ops_bf16.parameters(layout.views(empty((layout.size,), F32)))
        ids, gradient = empty((batch, config.context_length), np.int32), empty((layout.size,), F32)
        with ops_bf16.step():
            _, cache = loss_forward(
                ops_bf16, params, config, ids, ids, dropout_key=KEY, recompute=recompute
            )
            loss_backward(1.0, cache, layout.views(gradient))
            del cache
    return Counter(asked for asked in device.asked if isinstance(asked, Product))


def choose(
    config: Config, batch: int, recompute: Recompute = "none", *, remember: bool = True
) -> Choice:
    """Return what is right and fast for a step's products, on the device in use.

    Parameters
    ----------
    config, batch, recompute
        The model, the sequences of a micro-batch, and what the backward recomputes.
    remember : bool
        Whether times taken earlier on a GPU of this kind will do; see ``paths.remembered``.
    """
    device = current()
    try:
        library = device.cublaslt()
    except ImportError as error:
        return Choice(DEFAULT, f"products: by cuBLAS's own choice ({error})")
    asked = of_step(config, batch, recompute)
    found: list[Timed] = []
    wrong, where = 0, ""
    untried: list[str] = []
    try:
        for product, times in asked.items():
            try:
                ways, left_out = check(library, product)
                seconds, where = paths.remembered(
                    "product",
                    [library.version, name(product)],
                    list(ways),
                    partial(_measure, product, ways, SECONDS / len(asked)),
                    remember,
                )
            except CublasError as error:
                untried.append(str(error))
                continue
            except OSError:
                untried.append("no memory to try them")
                continue
            wrong += left_out
            best = min(ways, key=lambda way: seconds[way])
            if seconds[best] > (1 - MARGIN) * seconds[DEFAULT]:
                best = DEFAULT
            found.append(Timed(product, times, seconds, best))
    finally:
        device.trim()
    if not found:
        return Choice(DEFAULT, f"products: by cuBLAS's own choice ({untried[0]})")
    chosen = [f"{name(one.product)}: {one.best}" for one in found if one.best != DEFAULT]
    own, took = (
        1e3 * sum(one.times * one.seconds[one.best if by_choice else DEFAULT] for one in found)
        for by_choice in (False, True)
    )
    said = f"products: {len(chosen)} of {len(asked)} by algorithms of cublasLt's "
    said += f"({took:.2f} ms of a micro-batch, {own:.2f} by cuBLAS's own choice{where}"
    said += f"; {wrong} algorithms are left out, whose results differ" if wrong else ""
    said += f"; {len(untried)} go by cuBLAS's own choice untried: {untried[0]})" if untried else ")"
    lines = (f"cuBLAS {library.version}", *chosen)
    return Choice(lines if chosen else DEFAULT, said, tuple(found))


# ---- right ---------------------------------------------------------------------------------------


def check(library: CublasLt, product: Product) -> tuple[dict[str, Multiply], int]:
    """Return the right ways to multiply by name, cuBLAS's own first, and how many were wrong.

    Raises
    ------
    CublasError
        When the library refuses all that it listed.
    OSError
        When the device has no memory for it.
    """
    device = current()
    wholes, rounded = (_drawn(product, whole=whole) for whole in (True, False))
    wanted = _exact(product, wholes), _result(product, device.gemm_ex, wholes)
    ways: dict[str, Multiply] = {DEFAULT: device.gemm_ex}
    wrong, refused = 0, ("", 0)
    for algorithm in library.algorithms(product, TRIED):
        try:
            way = ByAlgorithm(library, product, algorithm)
            got = _result(product, way, wholes)
            right = any(_alike(got, one) for one in wanted)
            again = [_result(product, way, rounded) for _ in range(2)]
        except CublasError as error:  # listed, and then refused
            refused = str(error), error.status  # the error itself would keep all arrays here
            continue
        if right and _alike(*again):
            ways[algorithm.hex()] = way
        else:
            wrong += 1
    if refused[1] and not wrong and len(ways) == 1:
        raise CublasError(*refused)
    return ways, wrong


def _drawn(product: Product, *, whole: bool) -> tuple[Array, Array, Array]:
    """Return A, B and, float32 or bf16, C: whole numbers, or such as a model has."""
    p, rng = product, np.random.default_rng(0)
    largest = max(1, min(255, math.isqrt(EXACT // p.k)))
    arrays = []
    for size, dtype in (
        (p.m * p.k, BF16),
        (p.k * p.n, BF16),
        (p.m * p.n, BF16 if p.narrow else F32),
    ):
        n = min(size, DRAWN)
        some = rng.integers(-largest, largest + 1, n) if whole else rng.standard_normal(n)
        array = empty((size,), dtype)
        copy(array[:n], upload(some.astype(np.float32), as_bf16=dtype == BF16))
        while n < size:  # twice as many each time
            more = min(n, size - n)
            copy(array[n : n + more], array[:more])
            n += more
        arrays.append(array)
    return arrays[0], arrays[1], arrays[2]


def _result(product: Product, way: Multiply, given: tuple[Array, Array, Array]) -> Array:
    """Return what a way makes of A, B and C, which stay as they are."""
    a, b, c = given
    out = empty(c.shape, c.dtype)
    if not product.apart:
        copy(out, c)
        c = out
    way(product, a, b, c, out)
    return out


def _exact(product: Product, given: tuple[Array, Array, Array]) -> Array:
    """Return the result of whole numbers: their sums in float32, rounded once to C's type."""
    a, b, c = given
    wide = product._replace(narrow=False, apart=False)
    return to_dtype(_result(wide, current().gemm_ex, (a, b, to_dtype(c, F32))), c.dtype)


def _alike(a: Array, b: Array) -> bool:
    """Return whether two arrays hold the same numbers, without a NaN; on the device, in passing."""
    difference, _ = add_forward(a, scale_forward(b, factor=-1.0)[0])
    return global_norm(to_dtype(difference, F32)) == 0


# ---- fast ----------------------------------------------------------------------------------------


def _measure(product: Product, ways: Mapping[str, Multiply], seconds: float) -> dict[str, float]:
    a, b, c = _drawn(product, whole=False)
    d = empty(c.shape, c.dtype) if product.apart else c
    calls: dict[str, Callable[[], object]] = {
        name: partial(way, product, a, b, c, d) for name, way in ways.items()
    }
    return paths.in_turn(calls, seconds, SAMPLE)
