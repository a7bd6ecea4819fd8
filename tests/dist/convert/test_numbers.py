"""Numbers as files hold them."""

import numpy as np
import pytest

from dist.convert.numbers import KINDS, from_bf16, to_bf16, to_q8_0

# halfway between two bfloat16, once with the even one below and once above, and what lies beside
TIES = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20, 3e38, 1e-40], np.float32)


def test_bf16_rounds_ties_to_even() -> None:
    expected = [1, 1 + 2**-6, -1, 1 + 2**-7]
    np.testing.assert_array_equal(from_bf16(to_bf16(TIES))[:4], np.array(expected, np.float32))
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32)
    x = bits.view(np.float32)
    back = from_bf16(to_bf16(x))
    assert (np.isnan(back) == np.isnan(x)).all()
    finite = np.isfinite(x) & (np.abs(x) < 3.3e38)
    with np.errstate(invalid="ignore"):
        off = np.abs(back - x)
    spacing = np.spacing(np.abs(x[finite])).astype(np.float64) * 2**15
    assert (off[finite] <= spacing).all()
    exact = (bits & 0xFFFF0000).view(np.float32)
    np.testing.assert_array_equal(
        from_bf16(to_bf16(exact)).view(np.uint32)[~np.isnan(exact)],
        exact.view(np.uint32)[~np.isnan(exact)],
    )


@pytest.mark.parametrize("name", KINDS)
def test_what_came_back_goes_out_the_same(name: str) -> None:
    kind = KINDS[name]
    x = np.random.default_rng(1).standard_normal(640).astype(np.float32)
    raw = np.ascontiguousarray(kind.encode(x)).view(np.uint8).reshape(-1)
    assert raw.size == x.size // kind.numbers * kind.n_bytes
    once = kind.decode(raw)
    again = np.ascontiguousarray(kind.encode(once)).view(np.uint8).reshape(-1)
    np.testing.assert_allclose(kind.decode(again), once, rtol=2e-3 if name == "Q8_0" else 0)


def test_a_block_of_zeros_is_zeros_and_halves_go_away_from_zero() -> None:
    assert not to_q8_0(np.zeros(32, np.float32)).any()
    block = np.zeros(32, np.float32)
    block[:4] = 127, 0.5, -0.5, 1.5
    assert to_q8_0(block)[0, 2:6].view(np.int8).tolist() == [127, 1, -1, 2]
