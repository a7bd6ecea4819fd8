"""Attention passes over tiles that share no document: the same bits, with less done."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from accel.cuda import attention, ops_bf16
from accel.cuda import device as devices
from reference.types import Array
from tests.cuda_shim import require
from tests.cuda_shim.device import ShimDevice
from tests.helpers.cuda_cases import packed_documents

require.shim()


@pytest.fixture(scope="module")
def shim() -> ShimDevice:
    return ShimDevice("shuffled")


@pytest.fixture(autouse=True)
def device(shim: ShimDevice) -> Iterator[None]:
    before = devices.use(shim)
    yield
    devices.use(before)


def arrays(T: int, S: int, B: int = 1) -> list[Array]:
    rng = np.random.default_rng(0)
    shapes = ((B, T, 2, 64), (B, S, 1, 64), (B, S, 1, 64), (B, T, 2, 64))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def run(given: list[Array], documents: Array, **options: Any) -> list[Array]:
    """Return out, dq, dk, dv."""
    q, k, v, dout = (ops_bf16.from_numpy(x, activation=True) for x in given)
    out, cache = ops_bf16.attention_forward(
        q, k, v, None, None, ops_bf16.from_numpy(documents), **options
    )
    return [ops_bf16.to_numpy(x) for x in (out, *ops_bf16.attention_backward(dout, cache))]


SHUFFLED = np.random.default_rng(1).permutation(packed_documents(300)[0])[None]
ALTERNATING = (np.arange(300, dtype=np.int32) // 32 % 2 * 7 - 3)[None]


DOCUMENTS = {
    "packed": (packed_documents(300), 300),
    "short": (packed_documents(300, 16), 300),
    "fewer queries": (packed_documents(300), 41),
    "shuffled": (SHUFFLED, 300),
    "alternating": (ALTERNATING, 300),
    "one": (np.full((1, 300), -5, np.int32), 300),
    "falling": (-packed_documents(300), 300),
    "two rows": (np.concatenate([packed_documents(300), SHUFFLED]), 200),
}
WHOLE = ("packed", "two rows")  # that are tried without causality, too; the rest with -m slow


@pytest.mark.parametrize(
    ("documents", "T", "causal"),
    [
        pytest.param(
            *(*case, causal),
            id=f"{name}, {'causal' if causal else 'full'}",
            marks=[] if causal or name in WHOLE else [pytest.mark.slow],
        )
        for name, case in DOCUMENTS.items()
        for causal in (True, False)
    ],
)
def test_the_bits_are_those_of_walking_over_all_tiles(
    documents: Array, T: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arrays(T, documents.shape[1], len(documents))
    skipping = run(given, documents, causal=causal)
    assert all(np.isfinite(x).all() for x in skipping)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "_ranges", lambda documents: None)
        everything = run(given, documents, causal=causal)
    for a, b in zip(skipping, everything, strict=True):
        np.testing.assert_array_equal(a, b)


def test_tiles_without_a_common_document_are_not_read() -> None:
    """NaN times a probability of zero is NaN: what is read shows."""
    documents = (np.arange(512, dtype=np.int32) // 128)[None]
    for chosen in range(4):
        given = arrays(512, 512)
        own = slice(128 * chosen, 128 * (chosen + 1))
        for x in given:
            kept = x[:, own].copy()
            x[...] = np.nan
            x[:, own] = kept
        for x in run(given, documents):
            assert np.isfinite(x[:, own]).all()


def test_the_table_of_ranges_is_right() -> None:
    documents = np.random.default_rng(0).integers(-9, 9, (3, 70)).astype(np.int32)
    ranges = attention._ranges(ops_bf16.from_numpy(documents))
    for b in range(3):
        for i, first in enumerate((0, 32, 64)):
            part = documents[b, first : first + 32]
            assert list(ranges[b, i]) == [part.min(), part.max()]
