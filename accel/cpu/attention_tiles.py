"""The element-wise half of tiled attention: what happens to one tile of scores.

A tile holds the scores of ``nk`` keys (rows) and ``n`` queries (columns), Sᵀ = K Qᵀ, its rows
padded with queries that do not exist to ``width``, a multiple of 64 bytes. Queries run along the
vector lanes, so the running maximum and sum of each query are vectors as well, a key that is masked
is one row, and no reduction crosses lanes.

Scores are in units of log 2: log₂e is folded into the scale, and 2ˣ takes the place of eˣ.
"""

from typing import Any, NamedTuple

import numpy as np

from accel.cpu.philox import philox
from accel.cpu.simd import at, exp2, pad_columns, pointer
from accel.jit import jit

# Reassociation and contraction, but NaN and infinities mean what they mean.
FAST = {"reassoc", "contract", "nsz", "arcp"}

BLOCK = 64  # queries, and keys, of a tile

# What tile_kind says about a tile.
SKIP, PLAIN, MASKED = 0, 1, 2

# The score of a masked pair, and the running maximum of a query that has seen no key yet. The first
# is so far below the second that a query with nothing but masked keys gets 2^(LOW - START) = 0 from
# each; and no real score comes near either. Minus infinity would turn inf - inf into NaN.
LOW = -3e38
START = -1e38


class View(NamedTuple):
    """Where the rows of an array (batch, position, head, width) lie; strides in elements."""

    address: int
    batch: int
    position: int
    head: int


class Sizes(NamedTuple):
    """The extents of one attention."""

    batch: int  # B
    queries: int  # T
    keys: int  # S
    heads: int  # Hq
    kv_heads: int  # Hkv
    width: int  # d, of queries and keys
    value_width: int  # dv


class Mask(NamedTuple):
    """Who may see whom, and by how much less; an address of 0 says that there is none."""

    causal: bool
    alibi: int  # address of (Hq,) slopes, of the element type
    key_mask: int  # address of (B, S) uint8
    documents: int  # address of (B, S) int32


class Dropout(NamedTuple):
    """The dropout of probabilities; see ``reference/philox.py`` for the counters."""

    active: bool
    threshold: int  # floor(p · 2³²): a word below it drops
    keep_scale: float  # 1 / (1 - p)
    seed_low: int
    seed_high: int
    step: int
    sample: int  # of batch row 0
    site: int


@jit
def row(view: View, b: int, t: int, h: int, like: Any) -> Any:
    """Return the pointer to element 0 of row (b, t, h)."""
    return at(pointer(view.address, like), b * view.batch + t * view.position + h * view.head)


@jit
def padded(n: int, like: Any) -> int:
    """Return ``n`` rounded up to whole vectors of elements like ``like``."""
    lanes: int = pad_columns(like)
    return (n + lanes - 1) // lanes * lanes


@jit
def keys_end(mask: Mask, sizes: Sizes, t_end: int) -> int:
    """Return one past the last key that the queries before ``t_end`` can see."""
    if mask.causal:
        return max(0, min(sizes.keys, t_end + sizes.keys - sizes.queries))
    return sizes.keys


@jit
def tile_kind(mask: Mask, sizes: Sizes, b: int, t0: int, n: int, u0: int, nk: int) -> int:
    """Say whether queries t0.. and keys u0.. see each other: none (SKIP), all (PLAIN), some."""
    kind = PLAIN
    offset = sizes.keys - sizes.queries
    if mask.causal:
        if u0 > t0 + n - 1 + offset:
            return SKIP
        if u0 + nk - 1 > t0 + offset:
            kind = MASKED
    if mask.key_mask != 0:
        allowed = pointer(mask.key_mask + b * sizes.keys + u0, np.uint8(0))
        count = 0
        for r in range(nk):
            count += int(allowed[r])
        if count == 0:
            return SKIP
        if count < nk:
            kind = MASKED
    if mask.documents != 0:
        document = pointer(mask.documents + 4 * b * sizes.keys, np.int32(0))
        first = last = document[u0]
        for u in range(u0, u0 + nk):
            first, last = min(first, document[u]), max(last, document[u])
        low = high = document[t0 + offset]
        for t in range(t0 + offset, t0 + offset + n):
            low, high = min(low, document[t]), max(high, document[t])
        if last < low or high < first:
            return SKIP
        if first != last or low != high:
            kind = MASKED
    return kind


@jit(fastmath=FAST)
def add_alibi(s: Any, slope: Any, sizes: Sizes, t0: int, width: int, u0: int, nk: int) -> None:
    """Subtract slope · (t' - u) from every score; t' = t + (S - T)."""
    for r in range(nk):
        line = at(s, r * width)
        distance = t0 + sizes.keys - sizes.queries - (u0 + r)  # of column 0
        for c in range(width):
            line[c] = line[c] - slope * type(slope)(distance + c)


@jit
def mask_tile(
    s: Any, mask: Mask, sizes: Sizes, b: int, t0: int, n: int, width: int, u0: int, nk: int
) -> None:
    """Set the scores of pairs that may not see each other to LOW."""
    offset = sizes.keys - sizes.queries
    low = type(s[0])(LOW)
    for r in range(nk):
        u = u0 + r
        line = at(s, r * width)
        if mask.key_mask != 0 and pointer(mask.key_mask + b * sizes.keys, np.uint8(0))[u] == 0:
            for c in range(width):
                line[c] = low
            continue
        if mask.causal:
            for c in range(min(width, max(0, u - offset - t0))):
                line[c] = low
        if mask.documents != 0:
            document = pointer(mask.documents + 4 * b * sizes.keys, np.int32(0))
            queries = at(document, t0 + offset)
            own = document[u]
            for c in range(n):
                line[c] = line[c] if queries[c] == own else low


@jit(fastmath=FAST)
def dropout_tile(
    factors: Any,
    drawn: Any,
    dropout: Dropout,
    sizes: Sizes,
    b: int,
    h: int,
    t0: int,
    n: int,
    width: int,
    u0: int,
    nk: int,
) -> None:
    """Write the factor of every pair of the tile, 1/(1 - p) or 0, into ``factors``.

    Four keys that follow one another for a query share a counter. A row of the tile may start
    within such a four, at another place for each query; so whole fours are drawn, vectorised over
    the queries, and then shifted into place. ``drawn`` has room for ``nk + 7`` rows.
    """
    keep = type(factors[0])(dropout.keep_scale)
    drop = type(factors[0])(0)
    start = (h * sizes.queries + t0) * sizes.keys + u0  # the flat index of query t0, key u0
    for four in range((nk + 6) // 4):
        w0, w1 = at(drawn, 4 * four * width), at(drawn, (4 * four + 1) * width)
        w2, w3 = at(drawn, (4 * four + 2) * width), at(drawn, (4 * four + 3) * width)
        for c in range(n):
            x0, x1, x2, x3 = philox(
                np.uint64((start + c * sizes.keys) // 4 + four),
                np.uint64(dropout.sample + b),
                np.uint64(dropout.step),
                np.uint64(dropout.site),
                np.uint64(dropout.seed_low),
                np.uint64(dropout.seed_high),
            )
            w0[c] = keep if np.int64(x0) >= dropout.threshold else drop
            w1[c] = keep if np.int64(x1) >= dropout.threshold else drop
            w2[c] = keep if np.int64(x2) >= dropout.threshold else drop
            w3[c] = keep if np.int64(x3) >= dropout.threshold else drop
    for r in range(nk):
        line = at(factors, r * width)
        for c in range(n):
            line[c] = drawn[(r + (start + c * sizes.keys) % 4) * width + c]
        for c in range(n, width):
            line[c] = drop


@jit(fastmath=FAST)
def transpose(
    source: Any, step: int, columns: int, n: int, target: Any, width: int, factor: Any
) -> None:
    """Write target[e, t] = factor · source[t, e] for n rows t; the rest of ``width`` gets zeros."""
    t = 0
    while t + 8 <= n:
        x = at(source, t * step)
        for e in range(columns):
            y = at(target, e * width + t)
            y[0] = x[e] * factor
            y[1] = x[step + e] * factor
            y[2] = x[2 * step + e] * factor
            y[3] = x[3 * step + e] * factor
            y[4] = x[4 * step + e] * factor
            y[5] = x[5 * step + e] * factor
            y[6] = x[6 * step + e] * factor
            y[7] = x[7 * step + e] * factor
        t += 8
    while t < n:
        for e in range(columns):
            target[e * width + t] = source[t * step + e] * factor
        t += 1
    zero = factor * 0
    for e in range(columns):
        for t in range(n, width):
            target[e * width + t] = zero


@jit(fastmath=FAST)
def running_maximum(s: Any, top: Any, width: int, nk: int) -> None:
    """top[c] = max(top[c], the scores of column c). NaN scores do not win here; exp2 keeps them."""
    r = 0
    while r + 4 <= nk:
        a, b = at(s, r * width), at(s, (r + 1) * width)
        c, d = at(s, (r + 2) * width), at(s, (r + 3) * width)
        for i in range(width):
            ab = a[i] if a[i] > b[i] else b[i]
            cd = c[i] if c[i] > d[i] else d[i]
            x = ab if ab > cd else cd
            top[i] = x if x > top[i] else top[i]
        r += 4
    while r < nk:
        a = at(s, r * width)
        for i in range(width):
            top[i] = a[i] if a[i] > top[i] else top[i]
        r += 1


@jit(fastmath=FAST)
def exponentials(s: Any, top: Any, total: Any, width: int, nk: int) -> None:
    """S = 2^(S - top), and each column's sum is added to total."""
    r = 0
    while r + 2 <= nk:
        a, b = at(s, r * width), at(s, (r + 1) * width)
        for c in range(width):
            x = exp2(a[c] - top[c])
            y = exp2(b[c] - top[c])
            a[c] = x
            b[c] = y
            total[c] += x + y
        r += 2
    if r < nk:
        a = at(s, r * width)
        for c in range(width):
            x = exp2(a[c] - top[c])
            a[c] = x
            total[c] += x


@jit(fastmath=FAST)
def multiply(s: Any, factors: Any, size: int) -> None:
    """S = S · factors, element by element."""
    for i in range(size):
        s[i] *= factors[i]


@jit(fastmath=FAST)
def scale_row(x: Any, factor: Any, n: int) -> None:
    """x = factor · x."""
    for i in range(n):
        x[i] *= factor


@jit(fastmath=FAST)
def fill(x: Any, value: Any, n: int) -> None:
    """x = value."""
    for i in range(n):
        x[i] = value


@jit(fastmath=FAST)
def copy_rows(source: Any, source_step: int, target: Any, step: int, rows: int, n: int) -> None:
    """Copy rows of n elements, ``source_step`` apart, to where they are ``step`` apart."""
    for t in range(rows):
        x, y = at(source, t * source_step), at(target, t * step)
        for e in range(n):
            y[e] = x[e]


@jit(fastmath=FAST)
def dot(x: Any, y: Any, n: int) -> Any:
    """Return Σ x y."""
    total = x[0] * 0
    for i in range(n):
        total += x[i] * y[i]
    return total


@jit(fastmath=FAST)
def score_gradients(s: Any, dp: Any, lse: Any, delta: Any, scale: Any, width: int, nk: int) -> None:
    """S becomes the probabilities P = 2^(S - lse), dP becomes scale · P (dP - delta)."""
    for r in range(nk):
        a, g = at(s, r * width), at(dp, r * width)
        for c in range(width):
            p = exp2(a[c] - lse[c])
            a[c] = p
            g[c] = p * (g[c] - delta[c]) * scale
