"""Every backward of the contract is the transpose of its forward's derivative, in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import cross_entropy, linear_cross_entropy, ops
from reference.gradcheck import GradientError, check_vjp
from reference.softmax import softmax, softmax_backward
from reference.types import Array, DropoutKey
from tests.helpers.contract import DIFFERENTIABLE

SIZES = st.sampled_from([1, 2, 3, 5, 7, 11, 17])
EVEN = st.sampled_from([2, 4, 6, 10])
SEEDS = st.integers(0, 2**32 - 1)
KEYS = st.builds(
    DropoutKey,
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 1000),
    sample=st.integers(0, 1000),
    site=st.integers(0, 50),
)


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


BROADCASTS = [((3, 2), (3, 2)), ((2, 5, 3), (5, 3)), ((2, 1, 3), (4, 1)), ((1,), (7, 2))]

Drawn = tuple[dict[str, Array], dict[str, Any]]  # the arrays to differentiate by, and the rest


def add(draw: st.DrawFn, seed: int) -> Drawn:
    a, b = draw(st.sampled_from(BROADCASTS))
    return {"a": normal(seed, *a), "b": normal(seed + 1, *b)}, {}


def scale(draw: st.DrawFn, seed: int) -> Drawn:
    factor = draw(st.sampled_from([-3.0, -0.5, 0.0, 1.0, 2.7]))
    return {"x": normal(seed, 2, draw(SIZES))}, {"factor": factor}


def embedding(draw: st.DrawFn, seed: int) -> Drawn:
    V, D, n = draw(SIZES), draw(SIZES), draw(SIZES)
    ids = np.random.default_rng(seed).integers(0, V, (2, n)).astype(np.int32)
    return {"table": normal(seed, V, D)}, {"ids": ids}


def linear(draw: st.DrawFn, seed: int) -> Drawn:
    n, width, to = draw(SIZES), draw(SIZES), draw(SIZES)
    arrays = {"x": normal(seed, 2, n, width), "weight": normal(seed + 1, width, to)}
    if draw(st.booleans()):
        arrays["bias"] = normal(seed + 2, to)
    return arrays, {}


def split_heads(draw: st.DrawFn, seed: int) -> Drawn:
    heads = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    return {"x": normal(seed, 2, draw(SIZES), sum(heads), draw(SIZES))}, {"heads": heads}


def merge_heads(draw: st.DrawFn, seed: int) -> Drawn:
    return {"x": normal(seed, 2, draw(SIZES), draw(st.integers(1, 16)), draw(SIZES))}, {}


def rmsnorm(draw: st.DrawFn, seed: int) -> Drawn:
    D, eps = draw(SIZES), draw(st.sampled_from([1e-5, 0.3]))
    return {"x": normal(seed, 2, draw(SIZES), D), "gain": normal(seed + 1, D)}, {"eps": eps}


def layernorm(draw: st.DrawFn, seed: int) -> Drawn:
    arrays, options = rmsnorm(draw, seed)
    return arrays | {"bias": normal(seed + 2, *arrays["gain"].shape)}, options


def rope(draw: st.DrawFn, seed: int) -> Drawn:
    H = draw(st.integers(1, 5))
    return {"x": normal(seed, 2, draw(SIZES), H, draw(EVEN))}, {
        "base": 500_000.0,
        "start": draw(st.sampled_from([0, 3, 8_191, np.array([2, 77])])),
        "rotate_heads": draw(st.one_of(st.none(), st.integers(0, H))),
        "scaling": draw(st.sampled_from([None, (8.0, 1.0, 4.0, 64)])),
    }


def attention(draw: st.DrawFn, seed: int) -> Drawn:
    B, Hkv = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    G, T, S = draw(st.integers(1, 7)), draw(SIZES), draw(SIZES)
    d, dv = draw(SIZES), draw(SIZES)
    rng = np.random.default_rng(seed)
    arrays = {
        "q": rng.standard_normal((B, T, Hkv * G, d)),
        "k": rng.standard_normal((B, S, Hkv, d)),
        "v": rng.standard_normal((B, S, Hkv, dv)),
    }
    bound: dict[str, Any] = {
        "causal": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, 0.3])),
    }
    if draw(st.booleans()):
        bound["alibi"] = rng.random(Hkv * G)
    if draw(st.booleans()):
        bound["key_mask"] = rng.random((B, S)) < 0.6
    if S >= T and draw(st.booleans()):
        bound["documents"] = np.sort(rng.integers(0, 3, (B, S)), axis=1).astype(np.int32)
    if draw(st.booleans()):
        bound["dropout_p"] = 0.3
        bound["dropout_key"] = draw(KEYS)
    return arrays, bound


def smooth(draw: st.DrawFn, seed: int) -> Drawn:
    return {"x": 2 * normal(seed, 3, draw(EVEN))}, {}


def relu(draw: st.DrawFn, seed: int) -> Drawn:
    x = normal(seed, 3, draw(SIZES))
    return {"x": x + np.copysign(1e-3, x)}, {}  # away from the kink, where the derivative jumps


def dropout(draw: st.DrawFn, seed: int) -> Drawn:
    p = draw(st.sampled_from([0.0, 0.1, 0.9]))
    return {"x": normal(seed, 3, draw(SIZES))}, {"p": p, "key": draw(KEYS)}


def loss(draw: st.DrawFn, seed: int) -> Drawn:
    T, D, V = draw(SIZES), draw(SIZES), draw(SIZES)
    rng = np.random.default_rng(seed)
    # moderate logits: where a probability reaches 1, the loss is the rounding of lse - z
    arrays = {"x": normal(seed, 2, T, D), "head": 0.3 * normal(seed + 1, V, D)}
    bound: dict[str, Any] = {"targets": rng.integers(0, V, (2, T)).astype(np.int32)}
    if draw(st.booleans()):
        bound["mask"] = rng.random((2, T)) < 0.7
    if draw(st.booleans()):
        arrays["bias"] = normal(seed + 2, V)
    return arrays, bound


DRAWS: dict[str, Callable[[st.DrawFn, int], Drawn]] = {
    **{f.__name__: f for f in (add, scale, embedding, linear, split_heads, merge_heads, rmsnorm)},
    **{f.__name__: f for f in (layernorm, rope, attention, relu, dropout)},
    **dict.fromkeys(("swiglu", "gelu", "gelu_tanh"), smooth),
    "linear_cross_entropy": loss,
}


@pytest.mark.parametrize("op", DIFFERENTIABLE)  # of the contract: an op without draws fails
@given(data=st.data(), seed=SEEDS)
def test_every_backward_is_the_transpose_of_its_forward_s_derivative(
    op: str, data: st.DataObject, seed: int
) -> None:
    arrays, bound = data.draw(st.composite(DRAWS[op])(seed))
    forward = partial(getattr(ops, f"{op}_forward"), **bound)
    check_vjp(forward, getattr(ops, f"{op}_backward"), arrays, seed=seed)


@pytest.mark.parametrize("draw_op", [rmsnorm, layernorm], ids=lambda draw: draw.__name__)
@given(data=st.data(), seed=SEEDS)
def test_plus_makes_the_gradient_of_a_residual_sum(
    draw_op: Callable[[st.DrawFn, int], Drawn], data: st.DataObject, seed: int
) -> None:
    """x + norm(x): x receives dout itself, and what comes back through the norm."""
    op = draw_op.__name__
    arrays, options = data.draw(st.composite(draw_op)(seed))

    def forward(**arrays: Array) -> tuple[Array, Any]:
        n, cache = getattr(ops, f"{op}_forward")(**arrays, **options)
        return ops.add_forward(arrays["x"], n)[0], cache

    def backward(dout: Array, cache: Any) -> Any:
        return getattr(ops, f"{op}_backward")(dout, cache, plus=dout)

    check_vjp(forward, backward, arrays, seed=seed)


@given(data=st.data(), seed=SEEDS)
def test_what_a_linear_layer_adds_has_dout_for_its_gradient(data: st.DataObject, seed: int) -> None:
    arrays, _ = data.draw(st.composite(linear)(seed))
    shape = *arrays["x"].shape[:-1], arrays["weight"].shape[1]
    arrays["plus"] = normal(seed + 3, *shape)

    def backward(dout: Array, cache: Any) -> Any:
        return *filter(lambda d: d is not None, ops.linear_backward(dout, cache)), dout

    check_vjp(ops.linear_forward, backward, arrays, seed=seed)


@given(SIZES, SIZES, SEEDS)
def test_cross_entropy_and_softmax(T: int, V: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, V, (2, T)).astype(np.int32)
    forward = partial(cross_entropy.forward, targets=targets, mask=rng.random((2, T)) < 0.7)
    z = {"z": normal(seed, 2, T, V)}
    check_vjp(forward, cross_entropy.backward, z, seed=seed)
    check_vjp(lambda x: (softmax(x), softmax(x)), softmax_backward, {"x": z["z"]}, seed=seed)


def test_chunked_loss_equals_the_loss_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x, head = rng.standard_normal((2, 19, 5)), rng.standard_normal((11, 5))
    targets, mask = rng.integers(0, 11, (2, 19)).astype(np.int32), rng.random((2, 19)) < 0.7
    results = []
    for rows in (7, 38, 1000):
        monkeypatch.setattr(linear_cross_entropy, "CHUNK_ROWS", rows)
        loss, cache = ops.linear_cross_entropy_forward(x, head, targets, mask)
        results.append((loss.total, *ops.linear_cross_entropy_backward(0.7, cache)[:2]))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-13)


# ---- negative controls: the check must be able to fail ------------------------------------------


def test_zeros_for_a_gradient_are_caught_where_the_output_is_zero_too() -> None:
    forward = partial(ops.scale_forward, factor=2.0)
    with pytest.raises(GradientError, match="gradient of x: the backward says 0 "):
        check_vjp(forward, lambda dout, cache: np.zeros_like(dout), {"x": np.zeros((2, 3))})


def test_a_missing_scale_in_attention_backward_is_caught() -> None:
    def backward(dout: Array, cache: Any) -> tuple[Array, Array, Array]:
        dq, dk, dv = ops.attention_backward(dout, cache)
        return dq / cache.cache.scale, dk, dv

    arrays = {"q": normal(0, 1, 5, 4, 3), "k": normal(1, 1, 5, 2, 3), "v": normal(2, 1, 5, 2, 3)}
    with pytest.raises(GradientError, match="gradient of q"):
        check_vjp(ops.attention_forward, backward, arrays)


def test_a_mask_off_by_one_is_caught() -> None:
    arrays = {"q": normal(0, 1, 5, 4, 3), "k": normal(1, 1, 5, 2, 3), "v": normal(2, 1, 5, 2, 3)}
    _, causal = ops.attention_forward(**arrays)
    shifted = np.triu(np.ones((5, 5), np.bool_), k=2)
    leak = causal._replace(
        cache=causal.cache._replace(P=np.where(shifted, 0, np.maximum(causal.cache.P, 0.1)))
    )

    def backward(dout: Array, cache: Any) -> tuple[Array, Array, Array]:
        return ops.attention_backward(dout, leak)

    with pytest.raises(GradientError, match="gradient of v"):
        check_vjp(ops.attention_forward, backward, arrays)


def test_a_dropped_term_in_the_rmsnorm_backward_is_caught() -> None:
    def backward(dout: Array, cache: Any) -> tuple[Array, Array]:
        dgain = ops.rmsnorm_backward(dout, cache)[1]
        return dout * cache.cache.g * cache.cache.r, dgain  # the projection along n is missing

    arrays = {"x": normal(0, 3, 7), "gain": normal(1, 7)}
    with pytest.raises(GradientError, match="gradient of x"):
        check_vjp(partial(ops.rmsnorm_forward, eps=1e-5), backward, arrays)


def test_a_gradient_that_all_ones_would_miss_is_caught() -> None:
    def backward(dout: Array, cache: Array) -> Array:
        return np.zeros_like(cache)  # right for a cotangent of ones: probabilities sum to one

    with pytest.raises(GradientError, match="gradient of x"):
        check_vjp(lambda x: (softmax(x), x), backward, {"x": normal(0, 3, 5)})


def test_missing_misshapen_and_infinite_gradients_are_named() -> None:
    x = {"x": normal(0, 2, 3)}
    forward = partial(ops.scale_forward, factor=2.0)
    with pytest.raises(GradientError, match=r"x .* no gradient"):
        check_vjp(forward, lambda dout, cache: (None,), x)
    with pytest.raises(GradientError, match=r"shape \(3,\)"):
        check_vjp(forward, lambda dout, cache: dout[0], x)
    with pytest.raises(GradientError, match="not finite"):
        check_vjp(forward, lambda dout, cache: dout * np.inf, x)
    with pytest.raises(GradientError, match="differences of the forward say nan"):
        check_vjp(lambda x: (x * np.nan, x), lambda dout, cache: dout, x)
    with pytest.raises(GradientError, match="1 inputs, but the backward returned 2"):
        check_vjp(forward, lambda dout, cache: (2 * dout, dout), x)
    with pytest.raises(ValueError, match="at least one element"):
        check_vjp(forward, ops.scale_backward, {})
    with pytest.raises(ValueError, match="float64"):
        check_vjp(forward, ops.scale_backward, {"x": x["x"].astype(np.float32)})


def test_steps_across_a_kink_are_left_out() -> None:
    x = np.array([5e-6, -5e-6, 1.0])  # the wider steps cross zero, the narrowest does not
    asked: list[tuple[Array, Array]] = []

    def smooth(name: str, behind: Array, ahead: Array) -> bool:
        asked.append((behind, ahead))
        return bool(((behind > 0) == (ahead > 0)).all())

    with pytest.raises(GradientError, match="gradient of x"):
        check_vjp(ops.relu_forward, ops.relu_backward, {"x": x}, steps=(1e-4, 1e-5))
    check_vjp(ops.relu_forward, ops.relu_backward, {"x": x}, smooth=smooth)
    widths = [ahead - behind for behind, ahead in asked]
    for (behind, ahead), h in zip(asked, (1e-4, 1e-5, 1e-6), strict=True):
        np.testing.assert_allclose(behind + ahead, 2 * x, atol=1e-15)
        np.testing.assert_allclose(ahead - behind, widths[0] * h / 1e-4, rtol=1e-6)
    with pytest.raises(GradientError, match="every step along the direction of x crosses a kink"):
        check_vjp(ops.relu_forward, ops.relu_backward, {"x": 0 * x}, smooth=smooth)


def test_rounding_alone_is_not_held_against_a_backward() -> None:
    # RMSNorm of one coordinate is its sign: the gradient is ε's doing, and far below the rounding
    arrays = {"x": np.array([[2.34]]), "gain": np.array([0.7])}
    check_vjp(partial(ops.rmsnorm_forward, eps=1e-5), ops.rmsnorm_backward, arrays, seed=3)
    with pytest.raises(GradientError, match="gradient of x"):
        check_vjp(
            partial(ops.rmsnorm_forward, eps=0.1),
            lambda dout, cache: (0 * dout, ops.rmsnorm_backward(dout, cache)[1]),
            arrays,
        )


def test_relu_passes_nothing_at_the_kink() -> None:
    _, cache = ops.relu_forward(np.array([-1.0, 0.0, 1.0]))
    np.testing.assert_array_equal(ops.relu_backward(np.ones(3), cache), [0, 0, 1])


def test_richardson_removes_the_error_in_h_squared() -> None:
    # sin at a step of 0.1: the plain central difference is off by h²/6 = 1.7e-3, this by h⁴/30
    checks = check_vjp(
        lambda x: (np.sin(x), x),
        lambda dout, x: dout * np.cos(x),
        {"x": np.array([0.3])},
        steps=(0.1,),
        tolerance=1e-3,
    )
    assert checks[0].error < 1e-4
