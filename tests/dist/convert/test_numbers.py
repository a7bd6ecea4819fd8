"""Numbers as files hold them."""

import math
import re

import numpy as np
import pytest

from accel.q8_0 import to_blocks
from dist.convert.numbers import KINDS, Kind, from_bf16, from_q8_0, to_bf16, to_q8_0

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
    once, twice = np.empty_like(x), np.empty_like(x)
    assert kind.decode(raw, once)
    kind.decode(np.ascontiguousarray(kind.encode(once)).view(np.uint8).reshape(-1), twice)
    np.testing.assert_allclose(twice, once, rtol=2e-3 if name == "Q8_0" else 0)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_is_seen(name: str, wrong: float) -> None:
    kind = KINDS[name]
    raw = np.ascontiguousarray(kind.encode(np.ones(96, np.float32))).view(np.uint8).reshape(-1)
    out = np.empty(96, np.float32)
    assert kind.decode(raw, out)
    if name == "Q8_0":
        raw[34:36] = np.float16([wrong]).view(np.uint8)
    else:
        one = np.ascontiguousarray(kind.encode(np.full(1, wrong, np.float32))).view(np.uint8)
        raw[41 * kind.n_bytes : 42 * kind.n_bytes] = one
    assert not kind.decode(raw, out)
    assert not kind.decode(raw, out.reshape(3, 32).T.copy().T)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 67])
@pytest.mark.parametrize("rows", [32, 96])
def test_columns_are_stored_as_rows_of_the_transpose(kind: Kind, columns: int, rows: int) -> None:
    wide = np.random.default_rng(5).standard_normal((rows, columns + 5), np.float32)
    wide[:, 2:4] *= np.array([1e-38, 1e3], np.float32)
    wide[32:64, 2] = 0
    wide[0, 2:], wide[1, 2:], wide[2, 2:] = 127, 0.5, -0.5  # a scale of 1, where nothing is larger
    x = wide[:, 2 : 2 + columns].T
    raw = np.ascontiguousarray(kind.encode(x)).tobytes()
    assert raw == np.ascontiguousarray(kind.encode(np.ascontiguousarray(x))).tobytes()
    expected, around = np.empty(x.shape, np.float32), np.full_like(wide, 7)
    kind.decode(np.frombuffer(raw, np.uint8), expected)
    kind.decode(np.frombuffer(raw, np.uint8), around[:, 2 : 2 + columns].T)
    np.testing.assert_array_equal(around[:, 2 : 2 + columns].T, expected)
    assert (around[:, :2] == 7).all() and (around[:, 2 + columns :] == 7).all()
    assert np.abs(expected - x).max() <= 0.51 * np.abs(wide).max() / 127


def test_a_block_of_zeros_is_zeros_and_halves_go_away_from_zero() -> None:
    assert not to_q8_0(np.zeros(32, np.float32)).any()
    block = np.zeros(32, np.float32)
    block[:4] = 127, 0.5, -0.5, 1.5
    assert to_q8_0(block)[0, 2:6].view(np.int8).tolist() == [127, 1, -1, 2]


def test_bf16_is_integer_arithmetic_on_each_number() -> None:
    special = [
        0x7F800000,
        0xFF800000,
        0x7F7FFFFF,
        0x7F800001,
        0xFFFFFFFF,
        0x8000,
        0x18000,
        0,
        1 << 31,
    ]
    bits = np.random.default_rng(3).integers(0, 2**32, 3_001, np.uint32)
    bits[: len(special)] = special
    expected = [
        b >> 16 | 0x40 if b & 0x7FFFFFFF > 0x7F800000 else b + 0x7FFF + (b >> 16 & 1) >> 16
        for b in bits.tolist()
    ]
    assert to_bf16(bits.view(np.float32)).tolist() == expected


def one_block(x: list[float]) -> tuple[np.float32, list[int]]:
    """``quantize_row_q8_0_ref``, number by number: float32 throughout, halves away from zero."""
    d = np.float32(max(map(abs, x))) / np.float32(127)
    with np.errstate(over="ignore"):
        inverse = np.float32(1) / d if d else np.float32(0)
    scaled = [float(np.float32(each) * inverse) for each in x]
    return d, [int(math.copysign(math.floor(abs(s) + 0.5), s)) for s in scaled]  # in float64: exact


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 1, 33)])
@pytest.mark.parametrize("power", [-36, -20, 0, 6])
def test_q8_0_is_that_of_ggml_number_by_number(shape: tuple[int, ...], power: int) -> None:
    x = np.random.default_rng(4).standard_normal((*shape, 32)).astype(np.float32)
    x *= np.float32(10.0**power)
    d, q = to_blocks(x)
    assert d.shape == shape and q.shape == x.shape
    for block, scale, rounded in zip(x.reshape(-1, 32), d.ravel(), q.reshape(-1, 32), strict=True):
        exact, expected = one_block(block.tolist())
        assert scale == np.float16(exact) and rounded.tolist() == expected


@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_q8_0_rounds_halves_away_from_zero_and_nothing_beside_them(beside: int) -> None:
    halves = np.arange(0.5, 127, dtype=np.float32)
    for _ in range(abs(beside)):
        halves = np.nextafter(halves, np.float32(beside * np.inf))
    x = np.zeros((127, 32), np.float32)
    x[:, 0], x[:, 1], x[:, 2] = 127, halves, -halves  # 127 makes the scale 1
    q = to_blocks(x)[1]
    up = np.arange(127) + (beside >= 0)
    np.testing.assert_array_equal(q[:, 1], up)
    np.testing.assert_array_equal(q[:, 2], -up)


@pytest.mark.filterwarnings("error")
def test_a_block_too_small_for_a_scale_is_zeros() -> None:
    x = np.zeros((2, 32), np.float32)
    x[0, :3] = 1e-40, -1e-38, 0
    x[1, :2] = 1e-44, -0.0
    for blocks in (to_q8_0(x.reshape(-1)), to_q8_0(np.hstack([x.T, x.T]).T)):
        back = np.empty(len(blocks) * 32, np.float32)
        from_q8_0(blocks.reshape(-1), back)
        assert not back.any()
    assert not to_blocks(x)[1].any()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e7])
@pytest.mark.parametrize("at", [0, 15, 16, 31])
def test_q8_0_refuses_what_it_cannot_hold(wrong: float, at: int) -> None:
    x = np.ones((3, 32), np.float32)
    x[1, at] = wrong
    message = re.escape(f"holds {abs(wrong):.3g}, and Q8_0 goes to")
    for numbers in (x, np.hstack([np.ones_like(x), x]).T.copy().T):
        with pytest.raises(ValueError, match=message):
            to_q8_0(numbers)
