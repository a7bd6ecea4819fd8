"""Attention through a sliding window: right kernels pass, each way to get it wrong is named."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from accel.tolerance import round_bf16
from accel.verify import check_module, check_op
from reference import ops
from reference.types import Array
from tests.helpers.kernels.caught import tried, wrong_results

Seen = Callable[[int, int, bool, int], Array]  # (T, S, causal, window) -> (T, S) bool
TILE = 64


def positions(T: int, S: int) -> tuple[Array, Array]:
    return np.arange(S - T, S)[:, None], np.arange(S)[None]


def right(T: int, S: int, causal: bool, window: int) -> Array:
    t, u = positions(T, S)
    seen = np.ones((T, S), bool)
    if window:
        seen &= (t - u < window) & (u - t < window)
    return seen & (u <= t) if causal else seen


def from_the_first_key(T: int, S: int, causal: bool, window: int) -> Array:
    return right(T, S, causal, 0) & (np.arange(S) < (window or S))


def from_the_first_query(T: int, S: int, causal: bool, window: int) -> Array:
    t, u = positions(T, S)
    return right(T, S, causal, 0) & (abs(t - (S - T) - u) < (window or T + S))


def to_the_past_alone(T: int, S: int, causal: bool, window: int) -> Array:
    t, u = positions(T, S)
    return right(T, S, causal, 0) & (t - u < (window or T + S))


def only_with_causal(T: int, S: int, causal: bool, window: int) -> Array:
    return right(T, S, causal, window if causal else 0)


def one_taken_for_none(T: int, S: int, causal: bool, window: int) -> Array:
    return right(T, S, causal, window if window > 1 else 0)


def whole_tiles(T: int, S: int, causal: bool, window: int) -> Array:
    """The tile in which the window begins is seen from its first key on."""
    t, u = positions(T, S)
    first = np.maximum(t - window + 1, 0) // TILE * TILE if window else 0
    past = right(T, S, causal, 0) & (u >= first) & (u <= t)
    return past | right(T, S, causal, window)


def begins_with_the_last_query(T: int, S: int, causal: bool, window: int) -> Array:
    """A tile of queries skips the tiles of keys that its last query does not see."""
    _, u = positions(T, S)
    last = np.minimum((np.arange(T) // TILE + 1) * TILE, T)[:, None] - 1 + S - T
    first = np.maximum(last - window + 1, 0) // TILE * TILE if window else 0
    return right(T, S, causal, window) & (u >= first)


def ends_with_the_first_query(T: int, S: int, causal: bool, window: int) -> Array:
    """A tile of queries stops at the tile of keys that is the last its first query sees."""
    _, u = positions(T, S)
    first = (np.arange(T) // TILE * TILE)[:, None] + S - T
    end = (first + window - 1) // TILE * TILE + TILE if window and not causal else S
    return right(T, S, causal, window) & (u < end)


def looking(seen: Seen, rounded: Callable[[Array], Array] = lambda x: x) -> Any:
    """Return an attention of plain NumPy in which queries see the keys of ``seen``."""

    def attention_forward(
        q: Array,
        k: Array,
        v: Array,
        *,
        causal: bool = True,
        window: int = 0,
        scale: float | None = None,
    ) -> Array:
        G = q.shape[2] // k.shape[2]
        k, v = np.repeat(k, G, axis=2), np.repeat(v, G, axis=2)
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        s = scale * np.einsum("bthd,bshd->bhts", q, k)
        s = np.where(seen(q.shape[1], k.shape[1], causal, window), s, -np.inf)
        top = s.max(axis=-1, keepdims=True)
        e = np.exp(s - np.where(np.isfinite(top), top, 0))
        total = e.sum(axis=-1, keepdims=True)
        p = rounded(e / np.where(total == 0, 1, total))
        return rounded(np.einsum("bhts,bshd->bthd", p, v))

    return SimpleNamespace(__name__="looking", attention_forward=attention_forward)


class Wrong(NamedTuple):
    """A kernel with one mistake, and what its report says of it."""

    title: str
    kernel: Any
    hint: str = ""
    result: str = "out"
    dtype: str = "float32"


def _with_window(change: Callable[[int], int]) -> Any:
    return looking(lambda T, S, causal, window: right(T, S, causal, change(window)))


def _without_in_the_backward() -> Any:
    def attention_forward(*args: Any, window: int = 0, **options: Any) -> Any:
        out, _ = ops.attention_forward(*args, window=window, **options)
        return out, ops.attention_forward(*args, **options)[1]

    backward = ops.attention_backward
    return SimpleNamespace(attention_forward=attention_forward, attention_backward=backward)


WRONG = [
    Wrong("ignored", _with_window(lambda window: 0), "is window ignored?"),
    Wrong("one too many", _with_window(lambda w: w and w + 1), "one position too many"),
    Wrong("one too few", _with_window(lambda w: w and max(1, w - 1)), "one position too few"),
    Wrong("from the first key", looking(from_the_first_key), "not from the first key"),
    Wrong("from t for t'", looking(from_the_first_query), "t' = t + (S - T), not from t."),
    Wrong("one-sided", looking(to_the_past_alone), "does window limit one side only?"),
    Wrong("only with causal", looking(only_with_causal), "is window ignored?"),
    Wrong("one taken for none", looking(one_taken_for_none), "is window ignored?"),
    Wrong("the first tile whole", looking(whole_tiles)),
    Wrong("tiles of keys of the last query", looking(begins_with_the_last_query)),
    Wrong("tiles of keys of the first query", looking(ends_with_the_first_query)),
    Wrong("none in the backward", _without_in_the_backward(), "is window ignored?", "dq"),
    Wrong("bf16: tiles", looking(begins_with_the_last_query, round_bf16), dtype="bf16"),
    Wrong("bf16: one-sided", looking(to_the_past_alone, round_bf16), dtype="bf16"),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.title)
def test_a_wrong_window_is_caught_and_named(wrong: Wrong) -> None:
    assert wrong.result in wrong_results("attention", wrong.kernel, wrong.result, wrong.dtype)
    for examples in (40, None) if wrong.hint else ():  # few are often enough
        options: dict[str, Any] = {"dtypes": [wrong.dtype], "examples": examples}
        report = check_module(wrong.kernel, **options, shrink=False, raises=False)
        hints = [hint for f in report.failures if f.name == wrong.result for hint in f.hints]
        if any(wrong.hint in hint for hint in hints):
            return
    assert not wrong.hint, report.text()


def test_a_right_window_raises_no_alarm() -> None:
    check_module(looking(right), dtypes=["float32", "float64"], examples=120, partial=True)
    check_module(looking(right, round_bf16), dtypes=["bf16"], examples=120, partial=True)


def test_a_wrong_window_shrinks_to_a_case_that_a_person_can_read() -> None:
    report = check_module(_with_window(lambda w: 0), dtypes=["float32"], raises=False)
    case = report.failures[0].case
    assert case.options["window"] < 9 and case.size[0] <= 20, report.text()


def test_a_backward_alone_is_given_the_lse_of_the_window() -> None:
    seen = []

    def attention_backward(dout: Array, inputs: Any) -> Any:
        q, k, window = inputs.q, inputs.k, inputs.window
        if inputs.alibi is None and inputs.key_mask is None and inputs.documents is None:
            seen.append(window)
            scale = 1 / math.sqrt(q.shape[-1]) if inputs.scale is None else inputs.scale
            s = scale * np.einsum("bthd,bshd->bhts", q, np.repeat(k, q.shape[2] // k.shape[2], 2))
            may = right(q.shape[1], k.shape[1], inputs.causal, window)
            s = np.where(may, s, -np.inf)
            top = np.where(s.max(axis=-1) == -np.inf, 0, s.max(axis=-1))
            total = np.sum(np.exp(s - top[..., None]), axis=-1)
            expected = np.where(total == 0, np.inf, np.log(np.where(total == 0, 1, total)) + top)
            np.testing.assert_allclose(inputs.lse, expected, rtol=1e-3, atol=1e-3)
        arrays = (inputs.alibi, inputs.key_mask, inputs.documents)
        rest = ("causal", "window", "scale", "dropout_p", "dropout_key")
        options = {name: getattr(inputs, name) for name in rest}
        return ops.attention_backward(
            dout, ops.attention_forward(q, k, inputs.v, *arrays, **options)[1]
        )

    check_op("attention", backward=attention_backward, dtypes=["float64"], examples=60)
    assert len(set(seen)) > 3 and min(seen) == 0 < max(seen)


def test_windows_are_tried_beyond_tiles_and_lengths_and_without_causality() -> None:
    drawn = {
        (case.options.get("window", 0), case.options["causal"], case.arrays["k"].shape[1])
        for case in tried("attention", 300)
    }
    for causal in (False, True):
        assert any(w and w + 2 * TILE < S for w, c, S in drawn if c == causal)
        assert any(w > S for w, c, S in drawn if c == causal)
        assert {1, 2, 7, 64} <= {w for w, c, _ in drawn if c == causal}
