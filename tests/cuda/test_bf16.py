"""bf16 on the shim is as close as plain bf16 code, by the rule of ``accel.tolerance``."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from accel.cuda import attention, ops, ops_bf16
from accel.cuda import device as devices
from accel.verify import check_module
from tests.cuda_shim import require
from tests.cuda_shim.device import ORDERS, ShimDevice
from tests.helpers.cuda_cases import (
    KEY,
    attention_by_the_rule,
    attention_cases,
    by_the_rule,
    cases,
    long_attention_cases,
    rounded,
    run_backend,
)

require.shim()

MMA_WIDTHS = ((64, 64), (128, 128), (16, 40), (128, 72))
MMA_CASES = [*attention_cases(MMA_WIDTHS), *long_attention_cases(((64, 64), (128, 128)))]
WHOLE_CASES = [*attention_cases(((128, 72),)), *long_attention_cases(((64, 64),))]
SMALL_CASES = [*long_attention_cases(((128, 128),))]


def quick(cases: list[Any], *named: str) -> list[Any]:
    """Return cases as parameters: those that have a word of these in their names, and slow ones."""
    slow = [pytest.mark.slow]
    return [
        pytest.param(case, id=case[1], marks=[] if any(n in case[1] for n in named) else slow)
        for case in cases
    ]


# Hopper's kernels: one case of each way to compile them, and pipelines; the rest with -m slow
HOPPER = ("72, everything", "128, long", "128, dv = 128, window", "64, long causal", "few")
# widths that are padded, and the full ones over several tiles
PADDED = ("16, dv = 40", "128, dv = 72", "long", "few keys", "window full", "window causal")
CASES = [*cases(), *attention_cases(((5, 7),))]


@pytest.fixture(scope="module")
def shims() -> dict[str, ShimDevice]:
    """One device for each order: compiled kernels are kept."""
    return {order: ShimDevice(order, early=order == "reverse") for order in ORDERS}


@pytest.fixture(scope="module")
def hoppers() -> dict[str, ShimDevice]:
    """The same, with wgmma."""
    return {order: ShimDevice(order, early=order == "reverse", warpgroups=True) for order in ORDERS}


@pytest.fixture(autouse=True)
def device(shims: dict[str, ShimDevice]) -> Iterator[ShimDevice]:
    """Use the shim for one test, and leave no device behind."""
    before = devices.use(shims["shuffled"])
    yield shims["shuffled"]
    devices.use(before)


@pytest.mark.parametrize("case", CASES, ids=[f"{op}: {what}" for op, what, _, _ in CASES])
def test_bf16_keeps_to_the_rule(case: Any) -> None:
    for name, closeness in by_the_rule(ops_bf16, case, "bf16").items():
        assert closeness.ok, (name, closeness)


def whole_groups(patch: pytest.MonkeyPatch) -> None:
    """Let each block of dk and dv walk over a group of query heads, as where blocks are many."""
    patch.setattr(attention, "ENOUGH", 0)
    patch.setattr(attention, "ENOUGH_EQUAL", 0)


@pytest.mark.parametrize("case", [case for case in WHOLE_CASES if "long" in case[1]])
@pytest.mark.parametrize("warpgroups", [False, True])
def test_the_order_of_blocks_changes_no_bit(
    case: Any,
    warpgroups: bool,
    shims: dict[str, ShimDevice],
    hoppers: dict[str, ShimDevice],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices.use((hoppers if warpgroups else shims)["forward"])
    op, _, arrays, options = case
    expected = run_backend(ops_bf16, op, rounded(arrays), options)
    asked: list[int] = []

    def first(lengths: tuple[int, ...], alike: int, places: int) -> int:
        asked.append(len(lengths))
        return asked[-1]

    monkeypatch.setattr(attention, "rising", first)
    for a, b in zip(run_backend(ops_bf16, op, rounded(arrays), options), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(asked) == (3 if warpgroups else 2) and min(asked) > 1


@pytest.mark.parametrize("case", quick(WHOLE_CASES, "72, causal", "everything", "long", "few"))
def test_so_do_blocks_that_walk_over_a_group_of_heads(
    case: Any, shims: dict[str, ShimDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_groups(monkeypatch)
    shims["forward"].launches.clear()
    test_attention_on_tensor_cores_keeps_to_the_rule_in_any_order_of_threads(case, shims)
    assert "sum_heads" not in shims["forward"].launches


@pytest.mark.parametrize("case", quick(MMA_CASES, *PADDED, "documents, more keys"))
def test_attention_on_tensor_cores_keeps_to_the_rule_in_any_order_of_threads(
    case: Any, shims: dict[str, ShimDevice]
) -> None:
    op, _, arrays, options = case
    results = []
    for order in ORDERS:
        devices.use(shims[order])
        results.append(run_backend(ops_bf16, op, rounded(arrays), options))
    for name, closeness in attention_by_the_rule(case, results[0]).items():
        assert closeness.ok, (name, closeness)
        assert closeness.bound < 0.1, name  # the rule is no empty one
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_so_does_a_scale_that_is_not_positive(
    scale: float, shims: dict[str, ShimDevice], hoppers: dict[str, ShimDevice]
) -> None:
    op, what, arrays, _ = next(attention_cases(((64, 64),)))
    for device in (shims["forward"], hoppers["forward"]):
        devices.use(device)
        got = run_backend(ops_bf16, op, rounded(arrays), {"scale": scale})
        rule = attention_by_the_rule((op, what, arrays, {"scale": scale}), got)
        assert all(closeness.ok for closeness in rule.values()), rule


@pytest.mark.parametrize("case", quick(MMA_CASES, *HOPPER))
def test_so_does_attention_by_warpgroups(case: Any, hoppers: dict[str, ShimDevice]) -> None:
    test_attention_on_tensor_cores_keeps_to_the_rule_in_any_order_of_threads(case, hoppers)


@pytest.mark.parametrize("case", WHOLE_CASES[4:5] + WHOLE_CASES[-7:-6], ids=lambda case: case[1])
def test_so_do_warpgroups_that_walk_over_a_group_of_heads(
    case: Any, hoppers: dict[str, ShimDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    test_so_do_blocks_that_walk_over_a_group_of_heads(case, hoppers, monkeypatch)


@pytest.mark.parametrize("case", quick(SMALL_CASES, "long causal", "long documents", "few"))
def test_attention_keeps_to_the_rule_where_a_block_has_99_kib(case: Any) -> None:
    small = ShimDevice("shuffled", shared_limit=99 * 1024)
    devices.use(small)
    op, _, arrays, options = case
    got = run_backend(ops_bf16, op, rounded(arrays), options)
    for name, closeness in attention_by_the_rule(case, got).items():
        assert closeness.ok, (name, closeness)
    assert {"attention_forward", "attention_dq", "attention_dkv"} <= set(small.launches)


def test_tiles_are_as_large_as_the_device_s_shared_memory_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched = {}

    def record(source: str, kernel: str, grid: Any, threads: int, shared: int, **more: Any) -> None:
        launched[kernel.removeprefix("attention_")] = threads // 32, more.get("KEYS"), shared

    def sizes(d: int = 128, **options: Any) -> dict[str, Any]:
        x = ops_bf16.from_numpy(np.zeros((1, 2, 1, d), np.float32), activation=True)
        with monkeypatch.context() as patch:
            patch.setattr(attention, "launch", lambda *a, **k: record(*a, *[0] * (5 - len(a)), **k))
            out, cache = ops_bf16.attention_forward(x, x, x, **options)
            ops_bf16.attention_backward(out, cache)
        del launched["delta"]
        return launched

    dropout = {"dropout_p": 0.5, "dropout_key": KEY}
    slopes = {"alibi": np.zeros(1, np.float32)}
    for kib in (163, 227):  # two blocks a multiprocessor, a KiB of CUDA's own for each
        devices.use(ShimDevice(shared_limit=kib * 1024))
        small = 64 * 1024 + 512
        assert sizes() == {
            "forward": (4, 64, 64 * 1024), "dq": (4, 64, 81 * 1024), "dkv": (4, 64, small)
        }  # fmt: skip
        # no registers: with dropout for two strips of rows, else for 64 keys, with ALiBi in dq
        assert sizes(**dropout) == {
            "forward": (8, 64, 64 * 1024), "dq": (4, 64, 81 * 1024), "dkv": (4, 64, small)
        }  # fmt: skip
        assert sizes(**slopes) == {
            "forward": (4, 32, 48 * 1024), "dq": (8, 32, 97 * 1024), "dkv": (4, 32, small)
        }  # fmt: skip
    devices.use(ShimDevice(shared_limit=99 * 1024))
    assert sizes() == {
        "forward": (4, 32, 48 * 1024),
        "dq": (8, 32, 97 * 1024),
        "dkv": (8, 32, 96 * 1024 + 512),
    }
    assert sizes(d=64) == {
        "forward": (4, 64, 32 * 1024),
        "dq": (4, 64, 41 * 1024),
        "dkv": (4, 64, 32 * 1024 + 512),
    }
    # CUDA takes a KiB of each block for itself: dq's two just fit the A100's 164
    dq = attention.MMA["attention_dq"][0]
    assert dq.fit(128, 163 * 1024)
    assert not dq._replace(floats=dq.floats + 1).fit(128, 163 * 1024)
    devices.use(ShimDevice(warpgroups=True))
    assert sizes() == {
        "forward": (8, 128, 224 * 1024),
        "dq": (8, 128, 192 * 1024),
        "dkv": (8, 128, 160 * 1024 + 1536),
    }
    assert sizes(**dropout) == {  # registers for half as many rows
        "forward": (8, 64, 128 * 1024),
        "dq": (8, 64, 192 * 1024),
        "dkv": (8, 64, 112 * 1024 + 768),
    }


def test_heads_too_wide_for_the_device_are_refused_in_a_sentence() -> None:
    devices.use(ShimDevice(shared_limit=99 * 1024))
    x = ops.from_numpy(np.zeros((1, 2, 1, 512), np.float32))
    with pytest.raises(ValueError, match=r"attention_forward needs 198,848 bytes of shared mem"):
        ops.attention_forward(x, x, x)


def test_widths_decide_which_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []

    def record(source: str, kernel: str, *arguments: Any, **more: Any) -> None:
        launched.append((source, more.get("HEAD")))

    monkeypatch.setattr(attention, "launch", record)
    for d, dv, expected in (
        (64, 64, ("attention_mma", 64)),
        (8, 64, ("attention_mma", 64)),
        (72, 64, ("attention_mma", 128)),
        (128, 128, ("attention_mma", 128)),
        (136, 64, ("attention", None)),
        (12, 16, ("attention", None)),
    ):
        q, v = (
            ops_bf16.from_numpy(np.zeros((1, 2, 1, n), np.float32), activation=True)
            for n in (d, dv)
        )
        ops_bf16.attention_forward(q, q, v)
        assert launched.pop() == expected
    strict = ops.from_numpy(np.zeros((1, 2, 1, 64), np.float32))
    ops.attention_forward(strict, strict, strict)
    assert launched.pop()[0] == "attention"


@pytest.mark.parametrize(
    ("module", "dtype"),
    [(ops_bf16, "bf16"), pytest.param(ops, "float32", marks=pytest.mark.slow)],
)
def test_any_case_that_is_drawn_keeps_to_the_rule(module: Any, dtype: str) -> None:
    check_module(module, dtypes=(dtype,), examples=5)
