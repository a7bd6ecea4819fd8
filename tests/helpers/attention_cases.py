"""Attention at shapes that hurt, and the norms by which its errors are judged."""

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from reference import ops as plain
from reference.types import DropoutKey
from reference.visibility import Visibility

KEY = DropoutKey(seed=2**40 + 3, step=5, sample=7, site=9)


class Case(NamedTuple):
    """Shapes and options of one attention."""

    batch: int = 2
    queries: int = 70
    keys: int = 70
    kv_heads: int = 2
    group: int = 2
    width: int = 16
    value_width: int = 16
    causal: bool = True
    window: int = 0
    scale: float | None = None
    alibi: bool = False
    key_mask: bool = False
    documents: bool = False
    dropout_p: float = 0.0
    seed: int = 0

    def options(self):
        return {
            "causal": self.causal,
            "window": self.window,
            "scale": self.scale,
            "dropout_p": self.dropout_p,
            "dropout_key": KEY,
        }

    def arrays(self, magnitude=1.0):
        """Return (q, k, v, alibi, key_mask, documents) and the gradient of the result, float64."""
        rng = np.random.default_rng(self.seed)
        heads = self.kv_heads * self.group
        q = magnitude * rng.standard_normal((self.batch, self.queries, heads, self.width))
        k = rng.standard_normal((self.batch, self.keys, self.kv_heads, self.width))
        v = rng.standard_normal((self.batch, self.keys, self.kv_heads, self.value_width))
        dout = rng.standard_normal((self.batch, self.queries, heads, self.value_width))
        alibi = 2.0 ** -np.arange(1, heads + 1) if self.alibi else None
        key_mask = rng.random((self.batch, self.keys)) < 0.6 if self.key_mask else None
        documents = None
        if self.documents:
            documents = np.sort(rng.integers(0, 5, (self.batch, self.keys)), axis=1)
            documents = documents.astype(np.int32)
        return (q, k, v, alibi, key_mask, documents), dout


def cast(arrays, dtype):
    return [x.astype(dtype) if x is not None and x.dtype.kind == "f" else x for x in arrays]


def run(ops, arrays, dout, options, dtype):
    """Return out, dq, dk, dv, computed in ``dtype``."""
    out, cache = ops.attention_forward(*cast(arrays, dtype), **options)
    return out, *ops.attention_backward(dout.astype(dtype), cache)


def walked(ops, who):
    """Return which tiles of 64 keys meet which of 64 queries, (query tiles, key tiles) bool.

    A key or value that is NaN comes out of every product that reads it, also where P and dS are 0:
    so what a query tile's result and dQ show is which tiles were walked over, masked or not.
    """
    T, S = who.queries, who.keys
    tiles = -(-T // 64), -(-S // 64)
    q, k = (np.ones((1, n, 1, 4), np.float32) for n in (T, S))
    options = {"causal": who.causal, "window": who.window}
    clean, cache = ops.attention_forward(q, k, k, **options)
    met = [np.zeros(tiles, np.bool_) for _ in range(2)]
    for j in range(tiles[1]):
        bad = k.copy()
        bad[:, 64 * j : 64 * (j + 1)] = np.nan
        out, _ = ops.attention_forward(q, k, bad, **options)
        spoilt = cache._replace(cache=cache.cache._replace(k=ops.keep(bad)))
        dq, *_ = ops.attention_backward(np.ones_like(clean), spoilt)
        for i in range(tiles[0]):
            for seen, x in zip(met, (out, dq), strict=True):
                seen[i, j] = np.isnan(x[:, 64 * i : 64 * (i + 1)]).any()
    np.testing.assert_array_equal(*met)
    return met[0]


def assert_only_the_window_is_walked_over(ops, who):
    """Forward and backward meet the tiles in the range of each query tile, and no others."""
    want = np.zeros((-(-who.queries // 64), -(-who.keys // 64)), np.bool_)
    for i, tiles in enumerate(want):
        low, end = who.keys_of(64 * i, min(64 * (i + 1), who.queries))
        tiles[low // 64 : -(-end // 64)] = True
    np.testing.assert_array_equal(walked(ops, who), want)
    if who.window:
        sides = 1 if who.causal else 2
        assert want.sum() <= len(want) * (2 + sides * (1 + who.window // 64))


WINDOWS = [
    Visibility(queries, keys, causal, window)
    for queries, keys in [(300, 300), (200, 330), (330, 200)]
    for causal in (True, False)
    for window in (1, 64, 66, 130, 0)
]


def on_absolute_values(case, arrays, dout, *, scores=True):
    """Return what the products are on absolute values: |P| |V|, and so on for the gradients.

    An error in a score is one in its probability, as large as the score is on absolute values: it
    counts in dq and dk, and in out and dv where ``scores`` says so.
    """
    v = arrays[2]
    cache = plain.attention_forward(*arrays, **case.options())[1].cache
    p = np.abs(cache.P if cache.kappa is None else cache.P * cache.kappa)
    do = np.abs(dout).reshape(case.batch, case.queries, case.kv_heads, case.group, case.value_width)
    do = do.transpose(0, 2, 3, 1, 4)
    vv = np.abs(v).transpose(0, 2, 1, 3)[:, :, None]
    qq, kk = np.abs(cache.q), np.abs(cache.k)
    dp = do @ vv.swapaxes(-1, -2)
    if cache.kappa is not None:
        dp = dp * cache.kappa
    ds = cache.P * (dp + np.sum(dp * cache.P, axis=-1, keepdims=True))
    with_scores = 1 + abs(cache.scale) * (qq @ kk.swapaxes(-1, -2))
    ds = ds * with_scores
    p = p * with_scores if scores else p
    return (
        p @ vv,
        abs(cache.scale) * (ds @ kk),
        abs(cache.scale) * np.sum(ds.swapaxes(-1, -2) @ qq, axis=2),
        np.sum(p.swapaxes(-1, -2) @ do, axis=2),
    )


cases = st.builds(
    Case,
    batch=st.integers(1, 3),
    queries=st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 97, 128, 131])),
    keys=st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 97, 128, 131, 200])),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 7),
    width=st.sampled_from([1, 2, 7, 16, 20, 33, 64, 80]),
    value_width=st.sampled_from([1, 3, 16, 24, 64, 65]),
    causal=st.booleans(),
    window=st.sampled_from([0, 0, 1, 2, 63, 64, 65, 1000]),
    scale=st.sampled_from([None, 0.3, 1.0]),
    alibi=st.booleans(),
    key_mask=st.booleans(),
    documents=st.booleans(),
    dropout_p=st.sampled_from([0.0, 0.0, 0.3]),
    seed=st.integers(0, 2**32 - 1),
).map(lambda case: case._replace(documents=case.documents and case.keys >= case.queries))
