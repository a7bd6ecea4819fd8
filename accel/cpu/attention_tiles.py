"""Read reference/study/tiled_attention.py first: here is what happens to one tile of scores.

``keys_of`` and ``queries_of`` are those of ``reference/visibility.py``, and ``tile_kind`` and
``mask_tile`` its ``allowed``, tile by tile; what is done to scores is ``reference/attention.py``'s
softmax and its backward. Both compute modes use them, on the same records and tasks.

A tile holds the scores of ``nk`` keys (rows) and ``n`` queries (columns), Sᵀ = K Qᵀ, its rows
padded with queries that do not exist to ``width``, a multiple of 64 bytes. Queries run along the
vector lanes, so the running maximum and sum of each query are vectors as well, a key that is masked
is one row, and no reduction crosses lanes.

Scores are in units of log 2: log₂e is folded into the scale, and 2ˣ takes the place of eˣ.
"""

from typing import Any

import numpy as np

from accel.cpu.attention_layout import Attention, Mask, Sizes, Tile
from accel.cpu.philox import philox
from accel.cpu.simd import at, block_columns, exp2, pointer, tile_gemm
from accel.jit import jit

# Reassociation and contraction, but NaN and infinities mean what they mean.
FAST = {"reassoc", "contract", "nsz", "arcp"}

LOG2_E = 1.4426950408889634

# What tile_kind says about a tile: CUT are those that positions mask, and arrays perhaps as well.
SKIP, PLAIN, MASKED, CUT = 0, 1, 2, 3

STRIP = 16  # queries, or keys, of a CUT tile, at least, multiplied by what they meet and no more

# The score of a masked pair, and the running maximum of a query that has seen no key yet. The first
# is so far below the second that a query with nothing but masked keys gets 2^(LOW - START) = 0 from
# each; and no real score comes near either. Minus infinity would turn inf - inf into NaN.
LOW = -3e38
START = -1e38

# lse2 of a query that sees no key: 2^(s - UNSEEN) is 0 for every score, LOW among them.
UNSEEN = 1e38


# --- who may see whom ----------------------------------------------------------------------------


@jit
def keys_of(sizes: Sizes, mask: Mask, first: int, end: int) -> tuple[int, int]:
    """Return the range of keys that queries ``first`` .. ``end - 1`` can see, by position."""
    shift = sizes.keys - sizes.queries
    low = first + shift - mask.window + 1 if mask.window else 0
    high = sizes.keys
    if mask.causal:
        high = end + shift
    elif mask.window:
        high = end + shift + mask.window - 1
    low = min(max(low, 0), sizes.keys)
    return low, max(low, min(high, sizes.keys))


@jit
def queries_of(sizes: Sizes, mask: Mask, first: int, end: int) -> tuple[int, int]:
    """Return the range of queries that can see keys ``first`` .. ``end - 1``, by position."""
    shift = sizes.keys - sizes.queries
    low = 0
    if mask.causal:
        low = first - shift
    elif mask.window:
        low = first - shift - mask.window + 1
    high = end - shift + mask.window - 1 if mask.window else sizes.queries
    low = min(max(low, 0), sizes.queries)
    return low, max(low, min(high, sizes.queries))


@jit
def tile_kind(call: Attention, tile: Tile) -> int:
    """Say whether queries and keys of the tile see each other: none (SKIP), all (PLAIN) or some."""
    sizes, mask = call.sizes, call.mask
    b, t0, n, u0, nk = tile.b, tile.t0, tile.n, tile.u0, tile.nk
    # All queries see the keys from where the last one's range begins to where the first one's ends.
    low = keys_of(sizes, mask, t0 + n - 1, t0 + n)[0]
    high = keys_of(sizes, mask, t0, t0 + 1)[1]
    kind = PLAIN if low <= u0 and u0 + nk <= high else CUT
    if mask.key_mask != 0:
        allowed = pointer(mask.key_mask + b * sizes.keys + u0, np.uint8(0))
        count = 0
        for r in range(nk):
            count += int(allowed[r])
        if count == 0:
            return SKIP
        if count < nk:
            kind = max(kind, MASKED)
    if mask.documents != 0:
        document = pointer(mask.documents + 4 * b * sizes.keys, np.int32(0))
        queries = at(document, sizes.keys - sizes.queries)
        first = last = document[u0]
        for u in range(u0, u0 + nk):
            first, last = min(first, document[u]), max(last, document[u])
        earliest = latest = queries[t0]
        for t in range(t0, t0 + n):
            earliest, latest = min(earliest, queries[t]), max(latest, queries[t])
        if last < earliest or latest < first:
            return SKIP
        if first != last or earliest != latest:
            kind = max(kind, MASKED)
    return kind


@jit
def rows_met(call: Attention, tile: Tile, kind: int, first: int, end: int) -> tuple[int, int]:
    """Return the range of rows, keys, that meet columns ``first`` .. ``end - 1``, by position."""
    if kind != CUT:
        return 0, tile.nk
    low, high = keys_of(call.sizes, call.mask, tile.t0 + first, tile.t0 + end)
    low = min(max(low - tile.u0, 0), tile.nk)
    return low, max(low, min(high - tile.u0, tile.nk))


@jit
def columns_met(call: Attention, tile: Tile, kind: int, first: int, end: int) -> tuple[int, int]:
    """Return the range of columns, queries, that meet rows ``first`` .. ``end - 1``."""
    if kind != CUT:
        return 0, tile.n
    low, high = queries_of(call.sizes, call.mask, tile.u0 + first, tile.u0 + end)
    low = min(max(low - tile.t0, 0), tile.n)
    return low, max(low, min(high - tile.t0, tile.n))


@jit(fastmath=FAST)
def _add_alibi(s: Any, call: Attention, tile: Tile) -> None:
    """Subtract m_h log₂e · (t' - u) from every score; t' = t + (S - T)."""
    slope = pointer(call.mask.alibi, call.scale)[tile.h] * type(call.scale)(LOG2_E)
    for r in range(tile.nk):
        line = at(s, r * tile.width)
        distance = tile.t0 + call.sizes.keys - call.sizes.queries - (tile.u0 + r)  # of column 0
        for c in range(tile.width):
            line[c] = line[c] - slope * type(slope)(distance + c)


@jit(apart=True)
def mask_tile(s: Any, call: Attention, tile: Tile, kind: int) -> None:
    """Apply ALiBi, and set the scores of pairs that may not meet to LOW; of padding, any may be."""
    sizes, mask = call.sizes, call.mask
    if mask.alibi != 0:
        _add_alibi(s, call, tile)
    if kind == PLAIN:
        return
    low = type(s[0])(LOW)
    for r in range(tile.nk):
        u = tile.u0 + r
        line = at(s, r * tile.width)
        if mask.key_mask != 0 and pointer(mask.key_mask + tile.b * sizes.keys, np.uint8(0))[u] == 0:
            for c in range(tile.width):
                line[c] = low
            continue
        if kind == CUT:
            first, end = columns_met(call, tile, kind, r, r + 1)
            for c in range(tile.width):
                line[c] = line[c] if c >= first and c < end else low
        if mask.documents != 0:
            document = pointer(mask.documents + 4 * tile.b * sizes.keys, np.int32(0))
            queries = at(document, tile.t0 + sizes.keys - sizes.queries)
            own = document[u]
            for c in range(tile.n):
                line[c] = line[c] if queries[c] == own else low


@jit(fastmath=FAST, apart=True)
def dropout_tile(factors: Any, drawn: Any, call: Attention, tile: Tile) -> None:
    """Write the factor of every pair of the tile, 1/(1 - p) or 0, into ``factors``.

    Four keys that follow one another for a query share a counter. A row of the tile may start
    within such a four, at another place for each query; so whole fours are drawn, vectorised over
    the queries, and then shifted into place. ``drawn`` has room for ``nk + 7`` rows.
    """
    sizes, dropout = call.sizes, call.dropout
    n, width, nk = tile.n, tile.width, tile.nk
    keep = type(factors[0])(dropout.keep_scale)
    drop = type(factors[0])(0)
    # the flat index of query t0, key u0
    start = (tile.h * sizes.queries + tile.t0) * sizes.keys + tile.u0
    for four in range((nk + 6) // 4):
        w0, w1 = at(drawn, 4 * four * width), at(drawn, (4 * four + 1) * width)
        w2, w3 = at(drawn, (4 * four + 2) * width), at(drawn, (4 * four + 3) * width)
        for c in range(n):
            x0, x1, x2, x3 = philox(
                np.uint64((start + c * sizes.keys) // 4 + four),
                np.uint64(dropout.sample + tile.b),
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


# --- products of a tile ---------------------------------------------------------------------------


@jit(fastmath=FAST)
def scores(
    call: Attention, tile: Tile, kind: int, keys: Any, d: int, queries_t: Any, s: Any
) -> None:
    """S (nk, width) = K Qᵀ, K (nk, d), Qᵀ (d, width); zeros where strips of a CUT tile never meet.

    Its strips are no narrower than what ``tile_gemm`` multiplies without a mask.
    """
    width = tile.width
    step = max(STRIP, block_columns(s) // 2) if kind == CUT else width
    for c in range(0, width, step):
        columns = min(step, width - c)
        low, end = rows_met(call, tile, kind, min(c, tile.n), min(c + columns, tile.n))
        for r in range(low):
            fill(at(s, r * width + c), call.scale * 0, columns)
        for r in range(end, tile.nk):
            fill(at(s, r * width + c), call.scale * 0, columns)
        if low < end:
            first, x, target = at(keys, low * d), at(queries_t, c), at(s, low * width + c)
            tile_gemm(end - low, columns, d, first, d, 1, x, width, target, width, False)


@jit(fastmath=FAST)
def add_product(
    call: Attention, tile: Tile, kind: int, s: Any, over_keys: bool, x: Any, d: int, target: Any
) -> None:
    """Add to ``target`` the sum of x over keys, O = P V and dQ = dS K, or over queries, dV and dK.

    S lies as keys × queries (nk, width). Over keys x is (nk, d) and the target (n, d), over queries
    it is the other way round.
    """
    rows, row, column = (tile.n, 1, tile.width) if over_keys else (tile.nk, tile.width, 1)
    step = STRIP if kind == CUT else rows
    for i in range(0, rows, step):
        n = min(step, rows - i)
        if over_keys:
            low, end = rows_met(call, tile, kind, i, i + n)
        else:
            low, end = columns_met(call, tile, kind, i, i + n)
        if low < end:
            a, b, sums = at(s, i * row + low * column), at(x, low * d), at(target, i * d)
            tile_gemm(n, d, end - low, a, row, column, b, d, sums, d, True)


# --- loops over a tile ---------------------------------------------------------------------------


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
def running_maximum(s: Any, m: Any, width: int, nk: int) -> None:
    """m[c] = max(m[c], the scores of column c). NaN scores do not win here; exp2 keeps them."""
    r = 0
    while r + 4 <= nk:
        a, b = at(s, r * width), at(s, (r + 1) * width)
        c, d = at(s, (r + 2) * width), at(s, (r + 3) * width)
        for i in range(width):
            ab = a[i] if a[i] > b[i] else b[i]
            cd = c[i] if c[i] > d[i] else d[i]
            x = ab if ab > cd else cd
            m[i] = x if x > m[i] else m[i]
        r += 4
    while r < nk:
        a = at(s, r * width)
        for i in range(width):
            m[i] = a[i] if a[i] > m[i] else m[i]
        r += 1


@jit(fastmath=FAST)
def exponentials(s: Any, m: Any, l: Any, width: int, nk: int) -> None:
    """S = 2^(S - m), and each column's sum is added to l."""
    r = 0
    while r + 2 <= nk:
        a, b = at(s, r * width), at(s, (r + 1) * width)
        for c in range(width):
            x = exp2(a[c] - m[c])
            y = exp2(b[c] - m[c])
            a[c] = x
            b[c] = y
            l[c] += x + y
        r += 2
    if r < nk:
        a = at(s, r * width)
        for c in range(width):
            x = exp2(a[c] - m[c])
            a[c] = x
            l[c] += x


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
def score_gradients(
    s: Any, dp: Any, lse2: Any, delta: Any, scale: Any, width: int, nk: int
) -> None:
    """S becomes the probabilities P = 2^(S - lse2), dP becomes scale · P (dP - delta)."""
    for r in range(nk):
        a, g = at(s, r * width), at(dp, r * width)
        for c in range(width):
            p = exp2(a[c] - lse2[c])
            a[c] = p
            g[c] = p * (g[c] - delta[c]) * scale
