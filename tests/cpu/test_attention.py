"""Tiled attention on the CPU, held to the reference's whole tables."""

import inspect
import subprocess
import sys

import numba
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from accel import load
from accel.cpu import (
    attention,
    attention_kernels,
    attention_layout,
    attention_tiles,
    bf16_attention,
    memory,
)
from accel.cpu import ops as fast
from accel.cpu.attention_layout import (
    BLOCK,
    Sizes,
    backward_passes,
    cut_keys,
    cut_runs,
    run_tile,
)
from reference import ops as plain
from reference.visibility import Visibility
from tests.helpers.attention_cases import (
    KEY,
    WINDOWS,
    Case,
    assert_only_the_window_is_walked_over,
    cases,
    cast,
    on_absolute_values,
    run,
)


def assert_float32_close(got, plain32, exact, absolute):
    """Norm-wise: twice the plain error in float32 (gradients: three times), and a floor.

    The floor is c · u · s with s the norm on absolute values and c = 4: the roundings beyond the
    plain code's are those of the exponential, of log₂e in the scale, of the running correction and
    of lse2 in the backward.
    """
    for i, (x, p, e, s) in enumerate(zip(got, plain32, exact, absolute, strict=True)):
        factor = 2 if i == 0 else 3
        bound = factor * np.linalg.norm(p - e) + 4 * 2.0**-24 * np.linalg.norm(s)
        assert np.linalg.norm(x - e) <= bound, f"array {i} of (out, dq, dk, dv)"


@given(case=cases)
@example(case=Case())
@example(case=Case(queries=1, keys=1, kv_heads=1, group=1, width=1, value_width=1))
@example(case=Case(queries=131, keys=67, causal=True))
@example(case=Case(queries=67, keys=131, causal=False, alibi=True))
@example(case=Case(queries=129, keys=130, group=7, kv_heads=1, dropout_p=0.5))
@example(case=Case(queries=65, keys=131, documents=True, key_mask=True, dropout_p=0.1))
@example(case=Case(queries=200, keys=200, window=1))
@example(case=Case(queries=131, keys=67, window=2, causal=False))
@example(case=Case(queries=97, keys=330, window=65, kv_heads=1, group=3, alibi=True))
@example(case=Case(queries=192, keys=192, window=127))  # a tile that misses one pair, at its begin
@example(case=Case(queries=64, keys=126))  # and at its end
@example(case=Case(queries=300, keys=300, window=64, causal=False, dropout_p=0.3, batch=1))
@example(case=Case(queries=300, keys=300, window=63, documents=True, key_mask=True, batch=1))
def test_attention_in_float64_equals_the_reference(case):
    arrays, dout = case.arrays()
    with memory.poisoned():
        got = run(fast, arrays, dout, case.options(), np.float64)
    want = run(plain, arrays, dout, case.options(), np.float64)
    # The floor is for gradients that cancel to nothing, as with a single key.
    for x, y, s in zip(got, want, on_absolute_values(case, arrays, dout), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        bound = 1e-12 * np.linalg.norm(y) + 16 * 2.0**-53 * np.linalg.norm(s)
        assert np.linalg.norm(x - y) <= bound


@given(case=cases)
@example(case=Case(queries=131, keys=131, width=64, value_width=64))
def test_attention_in_float32_is_as_exact_as_plain_float32(case):
    arrays, dout = case.arrays()
    # Both start from the same float32 numbers.
    arrays = [x if x is None or x.dtype.kind != "f" else x.astype(np.float32) for x in arrays]
    dout = dout.astype(np.float32)
    exact = run(plain, cast(arrays, np.float64), dout, case.options(), np.float64)
    with memory.poisoned():
        got = run(fast, arrays, dout, case.options(), np.float32)
    plain32 = run(plain, arrays, dout, case.options(), np.float32)
    absolute = on_absolute_values(case, cast(arrays, np.float64), dout.astype(np.float64))
    assert all(x.dtype == np.float32 for x in got)
    assert_float32_close(got, plain32, exact, absolute)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_query_that_sees_nothing_gets_zeros_and_passes_no_gradient(dtype):
    case = Case(queries=150, keys=150, documents=True)
    (q, k, v, _, _, documents), dout = case.arrays()
    key_mask = np.ones((case.batch, case.keys), np.bool_)
    key_mask[:, :BLOCK] = False  # a whole tile of keys
    documents[1, 100] = 77  # a document of one key ...
    key_mask[1, 100] = False  # ... that nobody may see
    arrays = (q, k, v, None, key_mask, documents)
    with memory.poisoned():
        out, dq, dk, dv = run(fast, arrays, dout, {}, dtype)
    # queries whose keys up to themselves are all masked, or of other documents
    same = documents[:, :, None] == documents[:, None, :]
    blind = ~np.any(same & np.tril(np.ones((150, 150), bool)) & key_mask[:, None, :], axis=2)
    assert blind[0, : BLOCK - 1].all() and blind[1, 100]
    assert not out[blind].any() and not dq[blind].any()
    assert out[~blind].all() and not np.isnan(dk).any()
    assert not dk[~key_mask].any() and not dv[~key_mask].any()


def test_more_queries_than_keys_leaves_the_first_queries_blind():
    arrays, dout = Case(queries=140, keys=10).arrays()
    out, dq, dk, _ = run(fast, arrays, dout, {}, np.float32)
    assert not out[:, :130].any() and not dq[:, :130].any()
    assert out[:, 130:].all() and dk.any()


def test_nothing_to_attend_to_at_all():
    case = Case(queries=70, keys=70)
    (q, k, v, *_), dout = case.arrays()
    nobody = np.zeros((case.batch, case.keys), np.bool_)
    with memory.poisoned():
        for x in run(fast, (q, k, v, None, nobody, None), dout, {}, np.float32):
            assert not x.any()


def test_an_empty_batch_gives_an_empty_result():
    case = Case(batch=0)
    arrays, dout = case.arrays()
    out, dq, dk, dv = run(fast, arrays, dout, {}, np.float32)
    assert [x.shape for x in (out, dq, dk, dv)] == [dout.shape, *(x.shape for x in arrays[:3])]


@pytest.mark.parametrize("magnitude", [1e3, 1e6, 1e15])
def test_extreme_scores_pick_the_largest_and_overflow_nothing(magnitude):
    case = Case(queries=200, keys=200)
    arrays, dout = case.arrays(magnitude)
    arrays = [x if x is None else x.astype(np.float32).astype(np.float64) for x in arrays]
    got = run(fast, arrays, dout, {}, np.float32)
    want = run(plain, arrays, dout, {}, np.float64)
    # Where two scores of 10⁶ differ by less than their rounding, float32 cannot tell; elsewhere
    # the softmax is a choice, and the choice must be right.
    cache = plain.attention_forward(*arrays)[1].cache
    clear = np.sort(cache.P, axis=-1)[..., -1] == 1
    clear = clear.reshape(case.batch, -1, case.queries).swapaxes(1, 2)
    assert clear.mean() > 0.5
    assert all(np.isfinite(x).all() for x in got)
    np.testing.assert_allclose(got[0][clear], want[0][clear], rtol=1e-6)


def test_a_score_that_falls_from_tile_to_tile_keeps_the_running_maximum():
    """The first keys win by far: later tiles must neither vanish wrongly nor rescale."""
    T = 5 * BLOCK
    q = np.ones((1, T, 1, 1))
    k = np.linspace(0, -300, T).reshape(1, T, 1, 1)
    v = np.arange(T, dtype=np.float64).reshape(1, T, 1, 1)
    for keys in (k, k[:, ::-1]):
        got = run(fast, (q, keys, v), np.ones_like(v), {"causal": False}, np.float64)
        want = run(plain, (q, keys, v), np.ones_like(v), {"causal": False}, np.float64)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("where", [(0, 3), (0, 69), (1, 0)])
def test_nan_travels_to_every_query_that_sees_it(where):
    (q, k, v, *_), _ = Case(batch=2, queries=70, keys=70).arrays()
    k[*where, 0, 5] = np.nan
    out, _ = fast.attention_forward(*cast((q, k, v), np.float32))
    b, u = where
    assert np.isnan(out[b, u:, :2]).all()  # the two query heads of key/value head 0
    assert not np.isnan(out[b, :u]).any() and not np.isnan(out[1 - b]).any()
    assert not np.isnan(out[:, :, 2:]).any()


def test_strided_inputs_are_read_where_they_lie():
    case = Case(queries=66, keys=66, width=16)
    (q, k, v, *_), dout = case.arrays()
    joined = np.concatenate([q, k, v], axis=2).astype(np.float32)
    views = np.split(joined, [4, 6], axis=2)
    want = run(fast, [x.copy() for x in views], dout, {}, np.float32)
    cut = [np.repeat(x, 2, axis=3)[..., ::2] for x in views]  # a last axis that is not contiguous
    turned = [x[:, ::-1].copy()[:, ::-1] for x in views]  # a negative stride
    heads = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in views]
    frozen = [x.copy() for x in views]
    for x in frozen:
        x.flags.writeable = False
    crooked = []
    for x in views:
        raw = np.empty(x.nbytes + 1, np.uint8)
        crooked.append(raw[1:].view(np.float32).reshape(x.shape))
        crooked[-1][...] = x
    for arrays in (views, cut, turned, heads, frozen, crooked):
        got = run(fast, [np.asarray(x) for x in arrays], dout, {}, np.float32)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("queries", [8, 200])  # below and above what an arena takes
def test_gradients_of_a_fused_projection_are_joined_without_a_copy(queries):
    arrays, dout = Case(queries=queries, keys=queries).arrays()
    with memory.step():
        _, dq, dk, dv = run(fast, arrays, dout, {}, np.float32)
        _, cache = fast.split_heads_forward(np.concatenate([dq, dk, dv], axis=2), heads=(4, 2, 2))
        joined = fast.split_heads_backward((dq, dk, dv), cache)
        np.testing.assert_array_equal(joined, np.concatenate([dq, dk, dv], axis=2))
        assert all(np.shares_memory(joined, x) for x in (dq, dk, dv))


def test_inputs_are_left_alone():
    arrays, dout = Case(key_mask=True, alibi=True, documents=True).arrays()
    arrays = cast(arrays, np.float32)
    before = [None if x is None else x.copy() for x in arrays]
    run(fast, arrays, dout, {}, np.float32)
    for x, y in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one core: nothing to compare")
@pytest.mark.parametrize("window", [0, 70])
def test_results_do_not_depend_on_the_number_of_threads(window):
    case = Case(queries=300, keys=300, group=3, dropout_p=0.2, key_mask=True, window=window)
    arrays, dout = case.arrays()
    threads = numba.get_num_threads()
    results = []
    try:
        for n in (1, 2):
            numba.set_num_threads(n)
            results.append(run(fast, arrays, dout, case.options(), np.float32))
    finally:
        numba.set_num_threads(threads)
    for x, y in zip(*results, strict=True):
        np.testing.assert_array_equal(x, y)


FINER = [
    Case(queries=300, keys=300, group=3),
    Case(queries=300, keys=300, group=3, dropout_p=0.2, key_mask=True, window=70),
    Case(batch=1, queries=600, keys=331, kv_heads=1, group=3, width=24, value_width=40),
    Case(batch=1, queries=600, keys=700, kv_heads=1, group=3, alibi=True, documents=True),
    Case(batch=1, queries=600, keys=200, kv_heads=1, group=3, window=65),
    Case(queries=200, keys=257, causal=False, dropout_p=0.5),
]


@pytest.mark.parametrize("mode", ["float32", "bf16"])
@pytest.mark.parametrize("case", FINER)
def test_a_backward_for_many_threads_has_the_bits_of_one_for_few(case, mode, monkeypatch):
    ops = load("cpu", compute=mode)
    arrays, dout = case.arrays()
    calls, results = [], []
    for threads in (2, 64, 300):

        def passes(sizes, by_position, _, threads=threads):
            runs, found = backward_passes(sizes, by_position, threads)
            calls.append(found)
            return runs, found

        monkeypatch.setattr(attention, "backward_passes", passes)
        results.append(run(ops, arrays, dout, case.options(), np.float32))
        for x, y in zip(results[-1], results[0], strict=True):
            np.testing.assert_array_equal(x, y)
    assert [len(found) for found in calls] == [1, 2, 2]


@pytest.mark.parametrize("who", WINDOWS)
def test_tiles_outside_the_window_are_never_walked_over(who):
    assert_only_the_window_is_walked_over(fast, who)


def test_a_window_as_wide_as_the_keys_hides_none():
    arrays, dout = Case(queries=200, keys=330).arrays()
    for causal in (True, False):
        seen = run(fast, arrays, dout, {"causal": causal}, np.float64)
        wide = run(fast, arrays, dout, {"causal": causal, "window": 330}, np.float64)
        for x, y in zip(wide[:2], seen[:2], strict=True):
            np.testing.assert_array_equal(x, y)
        for x, y in zip(wide[2:], seen[2:], strict=True):  # added in another order
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


def test_the_kernels_rules_are_those_of_the_reference():
    """By name: the fields of the record, and the ranges that follow from them."""
    assert Visibility._fields == ("queries", "keys", *attention_layout.Mask._fields)
    for kernels in (attention_kernels, bf16_attention):
        for driver in (kernels.forward, kernels.backward):
            names = list(inspect.signature(driver.py_func).parameters)
            fields = attention_layout.Attention._fields
            assert tuple(names[: len(fields)]) == fields, driver
    for who in WINDOWS:
        sizes = Sizes(1, who.queries, who.keys, 1, 1, 1, 1)
        mask = attention_layout.Mask(who.causal, who.window, 0, 0, 0)
        for first in range(0, max(who.queries, who.keys), 31):
            for end in (first + 1, first + 64):
                keys = attention_tiles.keys_of.py_func(sizes, mask, first, end)
                queries = attention_tiles.queries_of.py_func(sizes, mask, first, end)
                assert keys == who.keys_of(first, end), (who, first, end)
                assert queries == who.queries_of(first, end), (who, first, end)


@given(
    sizes=st.builds(
        Sizes,
        batch=st.integers(1, 20),
        queries=st.integers(1, 1000),
        keys=st.integers(1, 1000),
        heads=st.sampled_from([12, 24]),
        kv_heads=st.sampled_from([1, 3, 12]),
        width=st.just(8),
        value_width=st.just(8),
    ),
    causal=st.booleans(),
    window=st.sampled_from([0, 1, 64, 100, 1000]),
)
def test_runs_hold_every_query_tile_once_and_all_keys_that_it_sees(sizes, causal, window):
    who = Visibility(sizes.queries, sizes.keys, causal, window)
    runs = cut_runs(sizes, who)
    for pieces in (1, 3, 20):  # each has all keys of each run once, in order, in whole tiles
        cut = cut_keys(sizes, who, runs, pieces).reshape(len(runs), pieces, 5)
        assert (cut[:, 0, 2] == runs[:, 2]).all() and (cut[:, -1, 3] == runs[:, 3]).all()
        assert (cut[:, 1:, 2] == cut[:, :-1, 3]).all() and (cut[..., 3] >= cut[..., 2]).all()
        assert (cut[..., 2] % BLOCK * (cut[..., 3] - cut[..., 2]) == 0).all()
        assert (cut[..., [0, 1, 4]] == runs[:, None, [0, 1, 4]]).all()
    runs = runs[:, :4]
    tiles = -(-sizes.queries // BLOCK)
    assert runs[0, 0] == 0 and runs[-1, 1] == tiles * (sizes.heads // sizes.kv_heads)
    assert (runs[1:, 0] == runs[:-1, 1]).all() and (runs[:, 1] >= runs[:, 0]).all()
    assert len(runs) <= runs[-1, 1]
    met = set()
    for first, end, low, high in runs:
        assert 0 <= low <= high <= sizes.keys and low % BLOCK == 0
        for tile in range(first, end):
            mask = attention_layout.Mask(causal, window, 0, 0, 0)
            h, i = run_tile.py_func(sizes, mask, 0, tile)
            met.add((h, i))
            keys = who.keys_of(i * BLOCK, min((i + 1) * BLOCK, sizes.queries))
            assert low <= keys[0] <= keys[1] <= high
    assert met == {(h, i) for h in range(sizes.heads // sizes.kv_heads) for i in range(tiles)}
    assert (np.diff(runs[:, 2:], axis=0) >= 0).all(), "the runs that see a key are neighbours"


def test_runs_share_the_work_evenly():
    sizes = Sizes(1, 4096, 4096, 8, 2, 64, 64)
    runs = cut_runs(sizes, Visibility(4096, 4096))
    work = np.tile(np.arange(1, 65), 4)
    shares = np.add.reduceat(work, runs[:, 0])
    assert len(shares) == 8 and shares.max() <= 1.05 * work.sum() / 8


@pytest.mark.parametrize("T", [2048, 8192])
def test_the_keys_that_runs_read_grow_with_the_context_and_not_with_its_square(T):
    runs = cut_runs(Sizes(1, T, T, 7, 1, 64, 64), Visibility(T, T, True, 256))
    assert len(runs) == 16
    assert (runs[:, 3] - runs[:, 2]).sum() <= T + 16 * (256 + 2 * BLOCK)


REFUSALS = [
    (lambda a: a.update(k=a["k"].astype(np.float64)), "share one dtype"),
    (lambda a: a.update(q=a["q"].astype(np.int32)), "float32 or float64"),
    (lambda a: a.update(q=a["q"][:, :, :3]), "multiple of key/value heads"),
    (lambda a: a.update(q=a["q"][0]), r"must be \(B, T, Hq, d\)"),
    (lambda a: a.update(v=a["v"][:, :5]), "v must be .* to match"),
    (lambda a: a.update(alibi=np.ones(3, np.float32)), "alibi must have shape"),
    (lambda a: a.update(key_mask=np.ones((2, 9), bool)), "key_mask must have shape"),
    (lambda a: a.update(key_mask=np.ones((2, 70), np.int8)), "key_mask must be bool"),
    (lambda a: a.update(documents=np.ones((2, 9), np.int32)), "documents must have shape"),
    (lambda a: a.update(dropout_p=1.0), r"p must lie in \[0, 1\)"),
    (lambda a: a.update(dropout_p=0.5), "needs a key"),
    (lambda a: a.update(scale=float("nan")), "scale must be"),
    (lambda a: a.update(window=-1), "window must be an integer >= 0"),
    (lambda a: a.update(window=1.5), "window must be an integer >= 0"),
    (lambda a: a.update(dropout_p=0.5, dropout_key=KEY._replace(step=-1)), "step must lie in"),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSALS)
def test_bad_input_is_refused_in_a_sentence(change, sentence):
    (q, k, v, *_), _ = Case().arrays()
    arguments = dict(zip("qkv", cast((q, k, v), np.float32), strict=True))
    change(arguments)
    with pytest.raises(ValueError, match=sentence):
        fast.attention_forward(**arguments)


def test_a_gradient_of_the_wrong_shape_is_refused():
    arrays, dout = Case().arrays()
    _, cache = fast.attention_forward(*cast(arrays, np.float32))
    with pytest.raises(ValueError, match="dout must have shape"):
        fast.attention_backward(dout[:, 1:].astype(np.float32), cache)
    with pytest.raises(ValueError, match="dout must be float32"):
        fast.attention_backward(dout, cache)


def test_importing_compiles_and_starts_nothing():
    code = (
        "import accel.cpu.attention as a, numba\n"
        "from numba.np.ufunc import parallel\n"
        "assert not a.attention_kernels.forward.signatures and not parallel._is_initialized\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("magnitude", [1.0, 30.0])
def test_long_contexts_are_exact_to_rounding(magnitude):
    case = Case(batch=1, queries=8192, keys=8192, kv_heads=1, group=1, width=64, value_width=64)
    arrays, dout = case.arrays(magnitude)
    arrays = [x if x is None else x.astype(np.float32) for x in arrays]
    dout = dout.astype(np.float32)
    exact = run(plain, cast(arrays, np.float64), dout, {}, np.float64)
    plain32 = run(plain, arrays, dout, {}, np.float32)
    got = run(fast, arrays, dout, {}, np.float32)
    for i, (x, p, e) in enumerate(zip(got, plain32, exact, strict=True)):
        factor = 2 if i == 0 else 3
        assert np.linalg.norm(x - e) <= factor * np.linalg.norm(p - e)
    got64 = run(fast, cast(arrays, np.float64), dout, {}, np.float64)
    for x, e in zip(got64, exact, strict=True):
        assert np.linalg.norm(x - e) <= 1e-12 * np.linalg.norm(e)


def test_documents_are_told_apart_by_all_their_bits() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 6, 2, 8))
    documents = np.array([[5, 5, 5 + 2**32, 5 + 2**32, 5 - 2**32, 5]])
    got, _ = fast.attention_forward(q, k, k, None, None, documents)
    expected, _ = plain.attention_forward(q, k, k, None, None, documents)
    np.testing.assert_allclose(got, expected, rtol=1e-12)
