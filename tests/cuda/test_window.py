"""The sliding window of the cuda backend: kernels see what ``reference/visibility.py`` says."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from accel.cuda import device as devices
from accel.cuda import ops, ops_bf16, sources
from accel.cuda.attention import _visible
from reference.types import Array
from reference.visibility import Visibility
from tests.cuda_shim import require
from tests.cuda_shim.device import ORDERS, ShimDevice
from tests.helpers.cuda_cases import relative_error, run_backend, run_reference

require.shim()

SHAPES = [(70, 70), (19, 83), (41, 9), (1, 67)]  # T, S
WINDOWS = (1, 2, 31, 32, 33, 64, 90, 2**40)


@pytest.fixture(scope="module")
def shims() -> dict[str, ShimDevice]:
    return {order: ShimDevice(order, early=order == "reverse") for order in ORDERS}


@pytest.fixture(autouse=True)
def device(shims: dict[str, ShimDevice]) -> Iterator[None]:
    before = devices.use(shims["shuffled"])
    yield
    devices.use(before)


def normal(*shapes: tuple[int, ...]) -> list[Array]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("T", "S"), SHAPES)
def test_any_window_equals_the_reference(
    T: int, S: int, causal: bool, shims: dict[str, ShimDevice]
) -> None:
    arrays = tuple(normal((1, T, 4, 3), (1, S, 2, 3), (1, S, 2, 2)))
    for i, window in enumerate(WINDOWS):
        options = {"causal": causal, "window": window}
        devices.use(shims[list(ORDERS)[i % 3]])
        got = run_backend(ops, "attention", arrays, options)
        exact = run_reference("attention", arrays, options, np.float64)
        for a, b in zip(got, exact, strict=True):
            assert relative_error(a, b) <= 1e-5, window


@pytest.mark.parametrize("module", [ops, ops_bf16])
def test_a_window_over_all_positions_is_none(module: Any) -> None:
    arrays = tuple(normal((1, 21, 2, 8), (1, 33, 1, 8), (1, 33, 1, 8)))
    for causal in (True, False):
        without = run_backend(module, "attention", arrays, {"causal": causal})
        for window in (33, 2**40):
            options = {"causal": causal, "window": window}
            for a, b in zip(
                run_backend(module, "attention", arrays, options), without, strict=True
            ):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("window", [-1, 2.5])
def test_a_window_that_is_no_number_of_positions_is_refused(window: Any) -> None:
    x = ops.from_numpy(np.zeros((1, 2, 1, 4), np.float32))
    with pytest.raises(ValueError, match="attention: window must be an integer >= 0, got"):
        ops.attention_forward(x, x, x, window=window)


# ---- tiles outside the window are not walked over ------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("module", "d", "T", "queries", "keys", "steps", "window"),
    [
        (ops, 5, 160, (64, 80), (64, 96), (16, 32), 33),
        (ops_bf16, 64, 384, (128, 256), (128, 192), (32, 64), 65),
        ("hopper", 64, 640, (256, 384), (256, 384), (64, 128), 65),
    ],
    ids=["float32", "bf16", "bf16 by warpgroups"],
)
def test_what_lies_outside_the_window_is_not_read(
    module: Any,
    d: int,
    T: int,
    queries: tuple[int, int],
    keys: tuple[int, int],
    steps: tuple[int, int],
    window: int,
    causal: bool,
) -> None:
    """NaN times a probability of zero is NaN: what is read shows.

    ``queries`` and ``keys`` are one block of the kernels that own them, ``steps`` the queries and
    keys of a tile that they walk over.
    """
    if module == "hopper":
        module = ops_bf16
        devices.use(ShimDevice(warpgroups=True))
    q, k, v, dout = normal(*[(1, T, 1, d)] * 4)
    options = {"causal": causal, "window": window}
    clean = run(module, q, k, v, dout, **options)
    who = Visibility(T, T, **options)

    def only(x: Array, seen: tuple[int, int], step: int) -> Array:
        low, high = seen[0] // step * step, -(-seen[1] // step) * step
        assert low > 0 or high < T  # there is something to pass over
        x = x.copy()
        x[:, :low], x[:, high:] = np.nan, np.nan
        return x

    seen = who.keys_of(*queries)
    dirty = run(module, q, only(k, seen, steps[1]), only(v, seen, steps[1]), dout, **options)
    own = slice(*queries)
    for name in ("out", "dq"):
        np.testing.assert_array_equal(dirty[name][:, own], clean[name][:, own])
    seen = who.queries_of(*keys)
    dirty = run(module, only(q, seen, steps[0]), k, v, only(dout, seen, steps[0]), **options)
    own = slice(*keys)
    for name in ("dk", "dv"):
        np.testing.assert_array_equal(dirty[name][:, own], clean[name][:, own])


def run(module: Any, *given: Array, **options: Any) -> dict[str, Array]:
    q, k, v, dout = (module.from_numpy(x, activation=True) for x in given)
    out, cache = module.attention_forward(q, k, v, **options)
    arrays = (out, *module.attention_backward(dout, cache))
    return dict(zip(("out", "dq", "dk", "dv"), map(module.to_numpy, arrays), strict=True))


# ---- the rules of the kernels and the record -----------------------------------------------------

RULES = """
// ranges: key_begin, key_end of queries i and i … i + 4, query_begin, query_end of keys the same;
// pairs: whether query t sees key u, and all of queries t, t + 1 see all of keys u … u + 2
KERNEL rules(int* ranges, bool* pairs, int T, int S, int behind, int ahead) {
    const Rules r{nullptr, nullptr, nullptr, 0.0f, T, S, behind, ahead, 0,
                  1.0f, 0, 0, 0, 0, 0, 0, 0};
    const int n = blockDim.x, i = threadIdx.x;
    for (int e = 0; e < 2; ++e) {
        int* to = ranges + (i * 2 + e) * 4;
        const int end = i + 1 + 4 * e;
        to[0] = r.key_begin(i), to[1] = r.key_end(end < T ? end : T);
        to[2] = r.query_begin(i), to[3] = r.query_end(end < S ? end : S);
    }
    for (int u = 0; u < n; ++u) {
        pairs[(i * n + u) * 2] = r.allows(i, u);
        pairs[(i * n + u) * 2 + 1] = r.inside(i, 2, u, 3);
    }
}
"""


def check_rules(edit: tuple[str, str] | None = None) -> None:
    """Raise unless the kernels' rules of position are those of the record."""
    text = sources.text_of("attention.cuh")
    if edit is not None:
        assert text.count(edit[0]) == 1
        text = text.replace(*edit)
    shim, n = ShimDevice(extra={"rules": text + RULES}), 32
    ranges, pairs = shim.empty((n, 2, 4), np.int32), shim.empty((n, n, 2), np.bool_)
    for (T, S), causal, window, masked in product(
        [(7, 7), (3, 11), (11, 3), (1, 9), (9, 1), (12, 13)],
        [True, False],
        [0, 1, 2, 5, 12, 40],
        [0, 1],  # by position alone, and with masks, of which there are none here
    ):
        who = Visibility(T, S, causal, window)
        told = _visible(who, False)
        given = (ranges, pairs, *(np.int32(told[name]) for name in ("T", "S", "behind", "ahead")))
        shim.launch("rules", "rules", (1, 1, 1), n, given, shared=0, defines={"MASKED": masked})
        allowed = np.zeros((n + 2, n + 2), np.bool_)
        allowed[:T, :S] = who.allowed()[0]
        np.testing.assert_array_equal(pairs[..., 0], allowed[:n, :n])
        for t, u in product(range(T), range(S)):
            assert pairs[t, u, 1] == allowed[t : t + 2, u : u + 3].all()
        for far in range(2):
            for t in range(T):
                low, high = (int(x) for x in ranges[t, far, :2])
                assert (low, max(low, high)) == who.keys_of(t, min(t + 1 + 4 * far, T))
            for u in range(S):
                low, high = (int(x) for x in ranges[u, far, 2:])
                assert (low, max(low, high)) == who.queries_of(u, min(u + 1 + 4 * far, S))


def test_the_kernels_rules_of_position_are_the_record_s() -> None:
    check_rules()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("-distance > ahead", "-distance > ahead + 1"),
        ("- u + ahead)", "- u + ahead + 1)"),
        ("(u32)(behind + ahead)", "(u32)(behind + ahead + 1)"),
        ("t + n <= T &&", ""),
        ("u + m - 1 - (t + S - T) <= ahead", "u + m - 2 - (t + S - T) <= ahead"),
        ("end + S - T + ahead", "end + S - T + ahead - 1"),
        ("first - (S - T) - ahead", "first - (S - T) - ahead + 1"),
        ("end - (S - T) + behind", "end - (S - T) + behind + 1"),
    ],
)
def test_a_bug_planted_in_the_rules_of_position_is_caught(old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check_rules((old, new))
