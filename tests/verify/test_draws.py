"""What is drawn: mistakes that show at the sizes of models alone, and in long sums."""

from typing import Any

import numpy as np
import pytest

from accel.tolerance import round_bf16
from accel.verify import check_op
from reference import ops
from reference.types import Array


@pytest.mark.parametrize("size", [128, 256, 512, 768, 1024, 2048, 4096])
def test_what_goes_wrong_at_whole_tiles_is_found(size: int) -> None:
    """Sizes that models have: where tiles come out even, kernels take another way."""

    def rmsnorm_forward(x: Array, gain: Array, *, eps: float) -> Any:
        out, cache = ops.rmsnorm_forward(x, gain, eps=eps)
        return out * (1 if x.shape[-1] % size else 2), cache

    assert not check_op("rmsnorm", forward=rmsnorm_forward, partial=True, raises=False).ok


@pytest.mark.parametrize("rows", [64, 128, 256])
def test_what_goes_wrong_at_whole_tiles_of_rows_is_found(rows: int) -> None:
    def linear_forward(x: Array, weight: Array, bias: Any = None) -> Any:
        out, cache = ops.linear_forward(x, weight, bias)
        return out * (1 if x[..., 0].size % rows else 2), cache

    assert not check_op("linear", forward=linear_forward, partial=True, raises=False).ok


@pytest.mark.parametrize(
    "seldom",
    [
        lambda q, k, documents: q.shape[1] == k.shape[1] == 128,
        lambda q, k, documents: q.shape[2] == 16 * k.shape[2],
        lambda q, k, documents: len(q) > 4,
        lambda q, k, documents: documents is not None and documents.max() >= 2**24,
    ],
    ids=["whole tiles", "16 heads of a group", "5 texts", "documents beyond float32"],
)
def test_what_goes_wrong_in_attention_now_and_then_is_found(seldom: Any) -> None:
    def attention_forward(
        q: Array, k: Array, v: Array, documents: Any = None, **options: Any
    ) -> Array:
        out, _ = ops.attention_forward(q, k, v, documents=documents, **options)
        return out * (2 if seldom(q, k, documents) else 1)

    how: dict[str, Any] = {"dtypes": ["float32"], "partial": True, "raises": False}
    assert not check_op("attention", forward=attention_forward, shrink=False, **how).ok


def test_a_cotangent_with_strides_of_zero_is_given() -> None:
    """It is what comes of a sum; read as if it lay without gaps it is something else."""

    def rmsnorm_backward(dout: Array, cache: Any) -> Any:
        step = 0 in dout.strides
        return ops.rmsnorm_backward(dout * np.float32(1 + step), cache)

    how: dict[str, Any] = {"forward": ops.rmsnorm_forward, "dtypes": ["float32"], "raises": False}
    report = check_op("rmsnorm", **how, backward=rmsnorm_backward)
    assert "dout one number" in report.text() and "it passes when dout is contig" in report.text()
    assert check_op("rmsnorm", **how, backward=ops.rmsnorm_backward).ok


def test_a_long_sum_of_one_sign_that_is_kept_in_bf16_is_found() -> None:
    def forward(x: Array, gain: Array, *, eps: float) -> Any:
        out, cache = ops.rmsnorm_forward(x, gain, eps=eps)
        return out, (cache, x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps))

    def backward(dout: Array, cache: Any) -> Any:
        dx, _ = ops.rmsnorm_backward(dout, cache[0])
        dgain = np.zeros(dout.shape[-1], np.float32)
        for row in (dout * cache[1]).reshape(-1, dout.shape[-1]):
            dgain = round_bf16(dgain + row)
        return dx, dgain

    wrong = {"forward": forward, "backward": backward}
    report = check_op("rmsnorm", **wrong, dtypes=["bf16"], partial=True, raises=False)
    assert {f.name for f in report.failures} == {"dgain"}, report.text()
