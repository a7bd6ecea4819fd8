"""What NVRTC makes of the CUDA kernels, executed instruction by instruction, equals the reference.

``python -m pytest tests/cuda/test_ptx.py -s -k executed`` prints how much of each kernel has run.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from accel.cuda import attention, ops, ops_bf16, sources
from accel.cuda import device as devices
from reference import ops as reference
from reference.presets import TINY
from tests.cuda_shim import require
from tests.cuda_shim.device import ORDERS
from tests.helpers.cuda_cases import (
    attention_by_the_rule,
    attention_cases,
    by_the_rule,
    cases,
    error_of_muon_on_views,
    long_attention_cases,
    relative_error,
    rounded,
    run_backend,
    run_reference,
)
from tests.helpers.cuda_decoding import Text, exact, ids_of
from tests.helpers.cuda_models import bf16_weights, parameters
from tests.helpers.models import MODELS
from tests.ptx.device import PtxDevice

require.shim()
require.nvrtc()

STRICT = 1e-5
CASES = [*cases(), *attention_cases(((5, 7),))]
IDS = [f"{op}: {what}" for op, what, _, _ in CASES]
MMA_CASES = [*attention_cases(((64, 64),)), *long_attention_cases(((64, 64),))]
# widths that are padded, and the wide tiles; NVRTC takes seconds for each way to compile those
MMA_WIDE = [*attention_cases(((16, 40), (128, 72))), *long_attention_cases(((128, 128),))]
QUICK = ("16, dv = 40, causal", "128, dv = 72, causal", "128, dv = 72, more keys")
MMA_CASES += [case for case in MMA_WIDE if any(what in case[1] for what in QUICK)]
SLOW_CASES = [case for case in MMA_WIDE if not any(what in case[1] for what in QUICK)]


def order_of(i: int) -> str:
    return list(ORDERS)[i % 3]


@pytest.fixture(scope="module")
def machines() -> dict[str, PtxDevice]:
    """One device for each order: parsed kernels are kept."""
    return {order: PtxDevice(order, early=order == "reverse") for order in ORDERS}


@pytest.fixture(scope="module")
def hoppers() -> dict[str, PtxDevice]:
    """The same for sm_90a."""
    return {order: PtxDevice(order, early=order == "reverse", warpgroups=True) for order in ORDERS}


@pytest.fixture(autouse=True)
def device(machines: dict[str, PtxDevice]) -> Iterator[PtxDevice]:
    """Use the interpreter for one test, and leave no device behind."""
    before = devices.use(machines["forward"])
    yield machines["forward"]
    devices.use(before)


@pytest.mark.parametrize("i", range(len(CASES)), ids=IDS)
def test_float32_equals_the_reference(i: int, machines: dict[str, PtxDevice]) -> None:
    op, _, arrays, options = CASES[i]
    devices.use(machines[order_of(i)])
    exact = run_reference(op, arrays, options, np.float64)
    got = run_backend(ops, op, arrays, options)
    for mine, expected in zip(got, exact, strict=True):
        assert relative_error(mine, expected) <= STRICT


@pytest.mark.parametrize("i", range(len(CASES)), ids=IDS)
def test_bf16_keeps_to_the_rule(i: int, machines: dict[str, PtxDevice]) -> None:
    devices.use(machines[order_of(i + 1)])
    for name, closeness in by_the_rule(ops_bf16, CASES[i], "bf16").items():
        assert closeness.ok, (name, closeness)


@pytest.mark.parametrize("i", range(len(MMA_CASES)), ids=[what for _, what, _, _ in MMA_CASES])
def test_attention_on_tensor_cores_keeps_to_the_rule(
    i: int, machines: dict[str, PtxDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    if i % 2:  # a group of heads a block, as where blocks are many
        monkeypatch.setattr(attention, "ENOUGH", 0)
        monkeypatch.setattr(attention, "ENOUGH_EQUAL", 0)
    run_attention(MMA_CASES[i], [machines[order_of(i)]])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("what", ["64, causal", "64, long causal"])
def test_so_it_does_by_warpgroups(what: str, order: str, hoppers: dict[str, PtxDevice]) -> None:
    (case,) = (case for case in MMA_CASES if case[1].endswith(what))
    run_attention(case, [hoppers[order]])


@pytest.mark.slow
@pytest.mark.parametrize("case", MMA_CASES + SLOW_CASES, ids=lambda case: case[1])
@pytest.mark.parametrize("warpgroups", [False, True])
def test_so_it_does_in_any_order_of_warps(
    case: Any,
    warpgroups: bool,
    machines: dict[str, PtxDevice],
    hoppers: dict[str, PtxDevice],
) -> None:
    run_attention(case, [(hoppers if warpgroups else machines)[order] for order in ORDERS])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES[-7:], ids=lambda case: case[1])
def test_so_it_does_where_a_block_has_99_kib(case: Any) -> None:
    run_attention(case, [PtxDevice("shuffled", shared_limit=99 * 1024)])


def run_attention(case: Any, on: list[PtxDevice]) -> None:
    op, _, arrays, options = case
    results = []
    for machine in on:
        devices.use(machine)
        results.append(run_backend(ops_bf16, op, rounded(arrays), options))
    for name, closeness in attention_by_the_rule(case, results[0]).items():
        assert closeness.ok, (name, closeness)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_order_of_warps_shows_nowhere(case: Any, machines: dict[str, PtxDevice]) -> None:
    op, _, arrays, options = case
    for module in (ops, ops_bf16):
        results = []
        for machine in machines.values():
            devices.use(machine)
            results.append(run_backend(module, op, arrays, options))
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                np.testing.assert_array_equal(a, b)


# ---- ops without a backward ----------------------------------------------------------------------


def softmax_and_logits(n: int = 300) -> None:
    rng = np.random.default_rng(n)
    x = (10 * rng.standard_normal((3, n))).astype(np.float32)
    head, bias = rng.standard_normal((7, n)).astype(np.float32), rng.random(7).astype(np.float32)
    got = ops.softmax(ops.from_numpy(x))
    assert relative_error(got, reference.softmax(x.astype(np.float64))) <= STRICT
    got = ops.logits(*(ops.from_numpy(a) for a in (x, head, bias)))
    exact = reference.logits(*(a.astype(np.float64) for a in (x, head, bias)))
    assert relative_error(got, exact) <= STRICT


def norms_of_flat_buffers(n: int = 65_536 + 3) -> None:
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    np.testing.assert_allclose(
        ops.square_sums(ops.from_numpy(x)), reference.square_sums(x), rtol=1e-12
    )
    assert ops.global_norm(ops.from_numpy(x)) == pytest.approx(reference.global_norm(x), rel=1e-12)


def adamw(n: int = 1027) -> None:
    rng = np.random.default_rng(n)
    start = [rng.standard_normal(n).astype(np.float32) for _ in range(4)]
    start[2] = start[2] ** 2
    numbers = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    exact = [a.astype(np.float64) for a in start]
    mine = [ops.from_numpy(np.concatenate([np.ones(1, np.float32), a]))[1:] for a in start]
    for step in (1, 2):
        for arrays, module in ((exact, reference), (mine, ops)):
            module.adamw(*arrays, step=step, n_decayed=n // 3, grad_scale=0.37, **numbers)  # type: ignore[attr-defined]
    ops.accumulate(mine[0], mine[1])
    exact[0] += exact[1]
    assert all(relative_error(a, b) <= STRICT for a, b in zip(mine, exact, strict=True))


def muon() -> None:
    assert error_of_muon_on_views(ops) <= STRICT


def views_of_ids_and_masks() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 5, 2, 4)).astype(np.float32) for _ in range(3))
    masks, documents = rng.random((2, 9, 2)) < 0.5, rng.integers(0, 2, (2, 9, 2)).astype(np.int32)
    given = [ops.from_numpy(masks)[:, ::2, 1], ops.from_numpy(documents)[:, ::-2, 0]]
    got = ops.attention_forward(*(ops.from_numpy(x) for x in (q, k, v)), None, *given)[0]
    wide = (x.astype(np.float64) for x in (q, k, v))
    exact = reference.attention_forward(*wide, None, masks[:, ::2, 1], documents[:, ::-2, 0])[0]
    assert relative_error(got, exact) <= STRICT


def kv_cache() -> None:
    for module in (ops, ops_bf16):
        cache = module.kv_cache({}, TINY, 2, 5)
        shape = cache.k[0].shape
        k = np.ones((2, 2, *shape[2:]), np.float32)
        given = module.from_numpy(k, activation=True)
        for position in (1, np.array([0, 3])):
            module.write_kv(cache, given, given, layer=1, position=position)
        written = module.to_numpy(cache.v[1])
        assert (written[0, :3] == 1).all() and (written[1, 1:] == 1).all()


def conversions() -> None:
    w = np.random.default_rng(0).standard_normal(77).astype(np.float32)
    for module, error in ((ops, 0.0), (ops_bf16, 2**-8)):
        there = module.from_numpy(w, activation=True)
        np.testing.assert_allclose(module.to_numpy(there), w, rtol=error)
        back = module.to_numpy(module.scale_forward(there, factor=1.0)[0])
        np.testing.assert_array_equal(back, module.to_numpy(there))


def tokens_after_a_prompt() -> None:
    config = MODELS["qk_norm_windows"]
    flat, ids = bf16_weights(config, parameters(config)), ids_of(config)
    wanted = exact(config, flat, ids, 3)
    for module, most in ((ops, STRICT), (ops_bf16, 0.03)):
        for got, want in zip(Text(module, config, flat, ids).steps(3), wanted, strict=True):
            assert relative_error(got, want) <= most


OTHERS = [softmax_and_logits, norms_of_flat_buffers, adamw, muon, views_of_ids_and_masks]
OTHERS += [kv_cache, conversions, tokens_after_a_prompt]


@pytest.mark.parametrize("check", OTHERS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("order", ORDERS)
def test_ops_without_a_backward(check: Any, order: str, machines: dict[str, PtxDevice]) -> None:
    devices.use(machines[order])
    check()


def test_every_kernel_is_executed() -> None:
    machine, hopper = PtxDevice(), PtxDevice(warpgroups=True)
    devices.use(machine)
    runs = [((ops, ops_bf16)[i % 2], case) for i, case in enumerate(CASES)]
    runs += [(ops_bf16, case) for case in MMA_CASES if "causal" in case[1] or "doc" in case[1]]
    for module, (op, _, arrays, options) in runs:
        run_backend(module, op, rounded(arrays), options)
    for check in OTHERS:
        check()
    devices.use(hopper)
    run_backend(ops_bf16, "attention", rounded(MMA_CASES[0][2]), {})
    programs = machine.programs | hopper.programs
    declared = {
        (source, kernel)
        for source in sources.SOURCES
        for kernel in sources.kernels(sources.text_of(f"{source}.cu"))
    }
    shares: dict[tuple[str, str], list[Any]] = {}
    for (source, _, kernel), program in programs.items():
        shares.setdefault((source, kernel), []).append(program.ran() > 0)
    for (source, kernel), ran in sorted(shares.items()):
        ratio = max(float(r.mean()) for r in ran)
        print(f"{source:16} {kernel:24} {len(ran)} compiled, {100 * ratio:5.1f} % executed")
    assert set(shares) == declared
