"""Every kernel and launcher of the cuda backend, run on the shim, equals the reference.

Strict float32: each result within 1e-5 of the float64 reference, ‖error‖/‖reference‖.
"""

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from accel.cuda import decode, loss, norm, ops, ops_bf16, products, sources
from accel.cuda import device as devices
from accel.cuda.arrays import copy
from accel.cuda.linear import matmul
from reference import model
from reference import ops as reference
from reference.config import Config
from reference.presets import GPT2_SMALL, MYLLM_1B, TINY
from tests.cuda_shim import require
from tests.cuda_shim.device import ORDERS, ShimDevice, from_bf16, to_bf16
from tests.helpers import contract
from tests.helpers.cuda_cases import (
    attention_cases,
    cases,
    cases_of_no_rows,
    check_nothing,
    cotangent,
    error_of_muon_on_views,
    relative_error,
    run_backend,
    run_reference,
)

require.shim()

STRICT = 1e-5
CASES = [*cases(), *attention_cases(((5, 7), (16, 16)))]
IDS = [f"{op}: {what}" for op, what, _, _ in CASES]
EMPTY = [*cases_of_no_rows()]


@pytest.fixture(scope="module")
def shims() -> dict[str, ShimDevice]:
    """One device for each order: compiled kernels are kept."""
    return {order: ShimDevice(order, early=order == "reverse") for order in ORDERS}


@pytest.fixture(autouse=True)
def device(shims: dict[str, ShimDevice]) -> Iterator[ShimDevice]:
    """Use the shim for one test, and leave no device behind."""
    before = devices.use(shims["forward"])
    yield shims["forward"]
    devices.use(before)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_float32_equals_the_reference(case: Any, shims: dict[str, ShimDevice]) -> None:
    op, _, arrays, options = case
    exact = run_reference(op, arrays, options, np.float64)
    results = []
    for order in ORDERS:
        devices.use(shims[order])
        results.append(run_backend(ops, op, arrays, options))
    for got, expected in zip(results[0], exact, strict=True):
        assert relative_error(got, expected) <= STRICT
    for other in results[1:]:  # the order in which threads run shows nowhere
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_every_differentiable_op_has_a_case() -> None:
    assert {op for op, *_ in CASES} == set(contract.DIFFERENTIABLE)
    assert {op for op, *_ in EMPTY} == set(contract.DIFFERENTIABLE)


@pytest.mark.parametrize("module", [ops, ops_bf16])
@pytest.mark.parametrize("case", EMPTY, ids=[f"{op}: {what}" for op, what, _, _ in EMPTY])
def test_of_no_rows_there_is_nothing_and_its_sums_are_zero(case: Any, module: Any) -> None:
    check_nothing(module, case)


@pytest.mark.parametrize("module", [ops, ops_bf16])
@pytest.mark.parametrize("name", reference.NAMES)
def test_the_backend_offers_every_op_with_the_contract_s_signature(module: Any, name: str) -> None:
    composed = partial(model.gradient, module) if name == "gradient" else None
    expected = contract.parameters_of(composed or getattr(reference, name))
    assert contract.parameters_of(getattr(module, name)) == expected
    assert name in module.__all__


# ---- parameter gradients -------------------------------------------------------------------------


@pytest.mark.parametrize("op", contract.WITH_PARAMETERS)
def test_out_receives_the_parameter_gradients(op: str) -> None:
    arrays, options = contract.cases(np.float32)[op]
    given = [None if a is None else ops.from_numpy(a) for a in arrays]
    backward = getattr(ops, f"{op}_backward")
    result, cache = getattr(ops, f"{op}_forward")(*given, **options)
    dout = cotangent(result)
    dout = ops.from_numpy(dout) if isinstance(dout, np.ndarray) else dout
    returned = backward(dout, cache)
    single = op in ("embedding", "rmsnorm")
    expected = [returned] if op == "embedding" else list(returned[1:])
    flat = devices.empty((sum(g.size for g in expected) + 1,), np.float32)
    out, start = [], 1  # views at odd places of a flat buffer
    for gradient in expected:
        out.append(flat[start : start + gradient.size].reshape(gradient.shape))
        start += gradient.size
    again = backward(dout, cache, out=out[0] if single else tuple(out))
    for written, gradient in zip(out, expected, strict=True):
        np.testing.assert_array_equal(written, gradient)
    assert np.shares_memory(again if op == "embedding" else again[1], out[0])
    with pytest.raises(ValueError, match=r"out must have shape \(.*\) to match the gradient"):
        wrong = devices.empty((1, 1, 1), np.float32)
        backward(dout, cache, out=wrong if single else (wrong, wrong))
    with pytest.raises(
        ValueError, match="out must be float32, the dtype of the gradient, got bf16"
    ):
        bits = tuple(devices.empty(gradient.shape, np.uint16) for gradient in expected)
        backward(dout, cache, out=bits[0] if single else bits)


def test_the_embedding_gradient_adds_onto_another() -> None:
    ids = np.array([[1, 3, 1]], np.int32)
    _, cache = ops.embedding_forward(ops.from_numpy(ids), devices.zeros((70, 3), np.float32))
    dout = np.arange(9, dtype=np.float32).reshape(1, 3, 3)
    before = np.random.default_rng(0).standard_normal((70, 3)).astype(np.float32)
    out = ops.from_numpy(before)
    ops.embedding_backward(ops.from_numpy(dout), cache, out=out, accumulate=True)
    expected = before.copy()
    np.add.at(expected, ids, dout)
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    with pytest.raises(ValueError, match="out must be given"):
        ops.embedding_backward(ops.from_numpy(dout), cache, accumulate=True)


@pytest.mark.parametrize("chunk_rows", [1, 2, 3])
def test_the_loss_is_the_same_in_any_chunks(
    chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays, options = contract.cases(np.float32)["linear_cross_entropy"]
    exact = run_reference("linear_cross_entropy", arrays, options, np.float64)
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", loss.EVEN * chunk_rows)
    got = run_backend(ops, "linear_cross_entropy", arrays, options)
    for a, b in zip(got, exact, strict=True):
        assert relative_error(a, b) <= STRICT


def test_chunks_of_the_loss_are_about_as_long() -> None:
    cases = [(0, 5), (1, 5), (5, 5), (6, 5), (4096, 4096), (8192, 5341), (32_768, 5341)]
    assert [loss.chunk_of(*case) for case in cases] == [1, 1, 5, 5, 4096, 4096, 4736]
    assert loss.chunk_of(32_768, 1766) == 1664  # whole tiles, of 128 rows
    assert loss.chunk_shape(9000, 50_257) == (4608, 50_304)


@pytest.mark.parametrize("need_backward", [False, True])
def test_the_loss_of_no_rows(need_backward: bool) -> None:
    x, head, targets = (
        ops.from_numpy(np.zeros(*given)) for given in (((0, 8), "f4"), ((13, 8), "f4"), (0, "i4"))
    )
    value, cache = ops.linear_cross_entropy_forward(x, head, targets, need_backward=need_backward)
    assert value == (0.0, 0)
    if need_backward:
        dx, dhead, _ = ops.linear_cross_entropy_backward(1.0, cache)
        assert dx.shape == (0, 8) and not dhead.any()


@pytest.mark.parametrize("config", [MYLLM_1B, GPT2_SMALL])
def test_the_products_of_a_step_are_fed_16_bytes_at_a_time(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = products.of_step(config, 2)
    assert all(n % 8 == 0 for p in made for n in (p.lda, p.ldb, p.m))
    if config is GPT2_SMALL:  # 50,257 logits
        monkeypatch.setattr(loss, "EVEN", 1)
        assert any(p.m % 8 for p in products.of_step(config, 2))


def test_evaluation_makes_no_gradients(device: ShimDevice) -> None:
    arrays, _ = contract.cases(np.float32)["linear_cross_entropy"]
    given = [None if a is None else ops.from_numpy(a) for a in arrays]
    device.launches.clear()
    value, cache = ops.linear_cross_entropy_forward(*given, need_backward=False)
    assert device.launches.count("gemm") == 1
    assert value == ops.linear_cross_entropy_forward(*given)[0]
    with pytest.raises(ValueError, match="need_backward=False"):
        ops.linear_cross_entropy_backward(1.0, cache)


def test_a_norm_s_backward_has_as_many_blocks_as_its_width_asks_for() -> None:
    def blocks(rows: int, D: int) -> int:
        return norm._blocks(devices.empty((rows, D), np.uint16), rows)

    assert [blocks(32_768, D) for D in (128, 768, 1792, 8192)] == [4096, 1024, 512, 512]
    assert [blocks(rows, 768) for rows in (1, 8, 9, 8192)] == [1, 1, 2, 1024]


# ---- ops without a backward ----------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 5, 300, 2056])
def test_softmax_and_logits(n: int) -> None:
    rng = np.random.default_rng(n)
    x = (10 * rng.standard_normal((3, n))).astype(np.float32)
    head, bias = rng.standard_normal((7, n)).astype(np.float32), rng.random(7).astype(np.float32)
    x[0, 0] = 60.0
    for got, expected in (
        (ops.softmax(ops.from_numpy(x)), reference.softmax(x.astype(np.float64))),
        (
            ops.logits(*(ops.from_numpy(a) for a in (x, head, bias))),
            reference.logits(*(a.astype(np.float64) for a in (x, head, bias))),
        ),
    ):
        assert relative_error(got, expected) <= STRICT


@pytest.mark.parametrize("n", [1, 7, 1025, 2 * 65_536 + 3])
def test_the_norm_of_a_flat_buffer(n: int) -> None:
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    sums = ops.square_sums(ops.from_numpy(x))
    np.testing.assert_allclose(sums, reference.square_sums(x), rtol=1e-12)
    assert ops.global_norm(ops.from_numpy(x)) == pytest.approx(reference.global_norm(x), rel=1e-12)


@pytest.mark.parametrize(("n", "shift"), [(1, 0), (1027, 0), (1027, 1)])
def test_adamw_and_accumulate(n: int, shift: int, shims: dict[str, ShimDevice]) -> None:
    rng = np.random.default_rng(n)
    start = [rng.standard_normal(n).astype(np.float32) for _ in range(4)]
    start[2] = start[2] ** 2
    numbers = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    exact = [a.astype(np.float64) for a in start]
    # views at any place of the flat buffers: slices of ranks need not be aligned
    on_device = [ops.from_numpy(np.concatenate([np.ones(shift, np.float32), a])) for a in start]
    mine = [a[shift:] for a in on_device]
    for step in (1, 2, 7):
        for arrays, module in ((exact, reference), (mine, ops)):
            module.adamw(*arrays, step=step, n_decayed=n // 3, grad_scale=0.37, **numbers)  # type: ignore[attr-defined]
    for got, expected in zip(mine, exact, strict=True):
        assert relative_error(got, expected) <= STRICT
    assert all((a[:shift] == 1).all() for a in on_device)
    ops.accumulate(mine[0], mine[1])
    assert relative_error(mine[0], exact[0] + exact[1]) <= STRICT


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 37), (37, 5), (20, 20)])
def test_muon(shape: tuple[int, int], order: str, shims: dict[str, ShimDevice]) -> None:
    devices.use(shims[order])
    rng = np.random.default_rng(shape[1])
    start = [rng.standard_normal(shape).astype(np.float32) for _ in range(3)]
    exact = [a.astype(np.float64) for a in start]
    # views of flat buffers at any place, as the matrices of a slice are
    flat = [ops.from_numpy(np.concatenate([np.ones(3, np.float32), a.ravel()])) for a in start]
    mine = [a[3:].reshape(shape) for a in flat]
    parts = (2, shape[1] - 2) if shape[1] > 2 else None
    for _ in range(2):
        for arrays, module in ((exact, reference), (mine, ops)):
            options = {"momentum": 0.9, "weight_decay": 0.1, "grad_scale": 0.3}
            module.muon(*arrays, lr=0.1, parts=parts, **options)  # type: ignore[attr-defined]
    for got, expected in zip(mine, exact, strict=True):
        assert relative_error(got, expected) <= STRICT
    assert all((a[:3] == 1).all() for a in flat)
    zeros = [ops.from_numpy(np.zeros(shape, np.float32)) for _ in range(3)]
    ops.muon(*zeros, lr=0.1, momentum=0.9, weight_decay=0.1)
    assert not ops.to_numpy(zeros[0]).any()


def test_muon_takes_views_that_are_not_contiguous() -> None:
    assert error_of_muon_on_views(ops) <= STRICT


@pytest.mark.parametrize("module", [ops, ops_bf16])
def test_the_kv_cache_keeps_each_row_where_it_stands(module: Any) -> None:
    cache = module.kv_cache({}, TINY, 2, 5)
    expected = np.zeros((len(cache.k), *cache.k[0].shape), np.float32)
    k = np.random.default_rng(0).standard_normal((2, 2, *expected.shape[3:])).astype(np.float32)
    k = from_bf16(to_bf16(k))
    given = module.from_numpy(k, activation=True)
    for position in (1, np.array([0, 3])):
        module.write_kv(cache, given, given, layer=1, position=position)
        for b, at in enumerate(np.broadcast_to(position, (2,))):
            expected[1, b, at : at + 2] = k[b]
    np.testing.assert_array_equal([module.to_numpy(k) for k in cache.k], expected)
    np.testing.assert_array_equal([module.to_numpy(v) for v in cache.v], expected)
    with pytest.raises(ValueError, match=r"positions 4\.\.5 lie outside the cache"):
        module.write_kv(cache, given, given, layer=0, position=4)
    with pytest.raises(ValueError, match=r"1\.\.24, the model's context"):
        module.kv_cache({}, TINY, 1, 25)


# ---- arrays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_row_major_products_map_to_cublas(transpose_a: bool, transpose_b: bool) -> None:
    M, N, K = 5, 3, 7
    rng = np.random.default_rng(0)
    a = rng.standard_normal((K, M) if transpose_a else (M, K)).astype(np.float32)
    b = rng.standard_normal((N, K) if transpose_b else (K, N)).astype(np.float32)
    c = rng.standard_normal((M, N)).astype(np.float32)
    expected = (a.T if transpose_a else a) @ (b.T if transpose_b else b)
    x, y, z = ops.from_numpy(a), ops.from_numpy(b), ops.from_numpy(c)
    for plus, onto in ((None, False), (z, False), (None, True)):
        out = ops.from_numpy(c) if onto else devices.empty((M, N), np.float32)
        how = {"transpose_a": transpose_a, "transpose_b": transpose_b}
        matmul(x, y, out, plus=out if onto else plus, **how)
        added = 0 if plus is None and not onto else c
        np.testing.assert_allclose(out, expected + added, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(z, c)
    for rows, inner, plus in ((0, K, None), (M, 0, None), (M, 0, z)):
        nothing = devices.empty((rows, inner), np.float32), devices.empty((inner, N), np.float32)
        got = matmul(*nothing, devices.empty((rows, N), np.float32), plus=plus)
        np.testing.assert_array_equal(got, np.zeros((rows, N)) if plus is None else c)


def test_scale_may_write_where_it_reads() -> None:
    contract.check_scale_in_place(ops)


def test_ops_take_views() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 4, 5, 6)).astype(np.float32)
    whole = ops.from_numpy(x)
    for cut in (np.s_[1:, ::2, 1:4], np.s_[:, :, :, ::2], np.s_[:, :, :, 1:4], np.s_[0, 1]):
        np.testing.assert_allclose(ops.scale_forward(whole[cut], factor=2.0)[0], 2 * x[cut])
        np.testing.assert_array_equal(
            ops.add_forward(whole[cut], whole[cut][..., :1])[0], x[cut] + x[cut][..., :1]
        )


@pytest.mark.parametrize("dtype", [np.bool_, np.uint16, np.int32, np.float32])
def test_views_are_copied(dtype: Any) -> None:
    x = np.random.default_rng(0).integers(0, 2, (5, 3, 7)).astype(dtype)
    whole, to = devices.current().upload(x), devices.empty((7, 5, 3), dtype)
    for cut in (np.s_[:, :, ::2], np.s_[::-1, 1:], np.s_[:, :, 1:6]):
        out = devices.empty(x[cut].shape, dtype)
        copy(out, whole[cut])
        np.testing.assert_array_equal(out, x[cut])
    copy(to.transpose(1, 2, 0), whole)
    np.testing.assert_array_equal(to, x.transpose(2, 0, 1))


@pytest.mark.parametrize("dtype", ["f8", "i8", "f2", "i2", "u4", "u1", "c8"])
def test_a_view_of_numbers_that_no_kernel_copies_is_refused(dtype: str, device: ShimDevice) -> None:
    array = devices.empty((4, 6), np.dtype(dtype))
    device.launches.clear()
    with pytest.raises(
        TypeError, match=rf"bool, bf16, int32 and float32.*got one of {array.dtype}"
    ):
        ops.to_numpy(array[:, ::2])
    assert not device.launches
    assert ops.to_numpy(array).dtype == array.dtype  # as it lies


@pytest.mark.parametrize("module", [ops, ops_bf16])
@pytest.mark.parametrize("op", ["rmsnorm", "layernorm"])
def test_what_a_norm_s_backward_adds_may_lie_anywhere(module: Any, op: str) -> None:
    rng = np.random.default_rng(0)
    x, dout, plus = (rng.standard_normal((3, 16)).astype(np.float32) for _ in range(3))
    gains = [module.from_numpy(np.ones(16, np.float32)) for _ in range(1 + (op == "layernorm"))]
    x, dout, plus = (module.from_numpy(a, activation=True) for a in (x, dout, plus))
    _, cache = getattr(module, f"{op}_forward")(x, *gains, eps=1e-5)
    beside = devices.empty((plus.size + 1,), plus.dtype)[1:].reshape(plus.shape)
    beside[...] = plus
    wide = devices.empty((3, 32), plus.dtype)
    wide[:, ::2] = plus
    backward = getattr(module, f"{op}_backward")
    first = backward(dout, cache, plus=plus)[0]
    for other in (backward(dout, cache, plus=p)[0] for p in (beside, wide[:, ::2])):
        np.testing.assert_array_equal(first, other)


def test_more_rows_than_a_grid_has_blocks_are_refused(device: ShimDevice) -> None:
    B = 65_536
    x = devices.empty((B, 1, 1, 1), np.float32)
    device.launches.clear()
    with pytest.raises(ValueError, match=r"attention_forward needs 1 x 65,536 x 1 blocks .* fewer"):
        ops.attention_forward(x, x, x)
    with pytest.raises(ValueError, match=r"attend_parts needs 1 x 65,536 x 1 blocks"):
        decode.attend(x, x, x, devices.empty((B,), np.int32), None, 0)
    x = x.reshape(1, B, 1, 1)
    long = np.lib.stride_tricks.as_strided(x, (1, 16 * B, 1, 1), (0, 0, 4, 4))
    with pytest.raises(ValueError, match=r"attention_forward needs 1 x 1 x 65,536 blocks"):
        ops.attention_forward(long, long, long)
    assert not device.launches


def test_the_tables_of_rope_are_kept_with_their_device() -> None:
    shim = ShimDevice()
    devices.use(shim)
    x = ops.from_numpy(np.ones((2, 5, 3, 6), np.float32))
    tables = [ops.rope_forward(x, base=1e4, start=start)[1].cache.table for start in (0, 1, 0)]
    assert tables[0] is tables[2] is not tables[1]
    many = [ops.rope_forward(x, base=1e4, start=start)[1].cache.table for start in range(2, 12)]
    again = [ops.rope_forward(x, base=1e4, start=start)[1].cache.table for start in (11, 0)]
    assert again[0] is many[-1] and again[1] is not tables[0]  # asked for least recently: dropped
    np.testing.assert_array_equal(again[1], tables[0])
    devices.use(ShimDevice())
    assert ops.rope_forward(x, base=1e4, start=0)[1].cache.table is not again[1]
    dead = weakref.ref(shim)
    del shim
    gc.collect()
    assert dead() is None


def test_masks_and_ids_may_be_views() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 5, 2, 4)).astype(np.float32) for _ in range(3))
    masks, documents = rng.random((2, 9, 2)) < 0.5, rng.integers(0, 2, (2, 9, 2)).astype(np.int32)
    slopes = rng.random(4).astype(np.float32)
    views = [slopes[::2], masks[:, ::2, 1], documents[:, ::-2, 0]]
    whole = [ops.from_numpy(x) for x in (slopes, masks, documents)]
    given = [whole[0][::2], whole[1][:, ::2, 1], whole[2][:, ::-2, 0]]
    assert not any(x.flags.c_contiguous for x in given)
    got = ops.attention_forward(*(ops.from_numpy(x) for x in (q, k, v)), *given)[0]
    exact = reference.attention_forward(*(x.astype(np.float64) for x in (q, k, v)),
        views[0].astype(np.float64), *views[1:])[0]  # fmt: skip
    assert relative_error(got, exact) <= STRICT
    table = rng.standard_normal((2, 3)).astype(np.float32)
    looked_up = ops.embedding_forward(given[2], ops.from_numpy(table))[0]
    np.testing.assert_array_equal(looked_up, table[views[2]])


def test_split_heads_gives_views_and_takes_them_back_without_a_copy(device: ShimDevice) -> None:
    x = np.random.default_rng(0).standard_normal((2, 6, 4, 8)).astype(np.float32)
    (q, k, v), cache = ops.split_heads_forward(ops.from_numpy(x), heads=(2, 1, 1))
    out, attention_cache = ops.attention_forward(q, k, v)
    gradients = ops.attention_backward(out, attention_cache)
    device.launches.clear()
    dx = ops.split_heads_backward(gradients, cache)
    assert device.launches == [] and np.shares_memory(dx, gradients[0])
    np.testing.assert_array_equal(dx, np.concatenate(gradients, axis=2))
    scattered = tuple(ops.from_numpy(np.array(g)) for g in gradients)
    np.testing.assert_array_equal(ops.split_heads_backward(scattered, cache), dx)
    swapped = (gradients[0], gradients[2], gradients[1])  # the same array, another order
    np.testing.assert_array_equal(
        ops.split_heads_backward(swapped, cache), np.concatenate(swapped, axis=2)
    )


@pytest.mark.parametrize("module", [ops, ops_bf16])
def test_keys_that_no_query_reads_get_no_gradient(module: Any) -> None:
    q, k = np.zeros((1, 0, 2, 8), np.float32), np.ones((1, 5, 1, 8), np.float32)
    given = [module.from_numpy(x, activation=True) for x in (q, k, k)]
    out, cache = module.attention_forward(*given)
    gradients = [module.to_numpy(g) for g in module.attention_backward(out, cache)]
    assert [g.shape for g in gradients] == [q.shape, k.shape, k.shape]
    assert not any(g.any() for g in gradients)


def test_bf16_arrays_come_back_as_float32() -> None:
    x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    assert ops_bf16.from_numpy(x).dtype == np.float32
    bf16 = ops_bf16.from_numpy(x, activation=True)
    assert bf16.dtype == np.uint16
    np.testing.assert_array_equal(ops_bf16.to_numpy(bf16), from_bf16(to_bf16(x)))
    master = {"w": ops.from_numpy(x), "gain": ops.from_numpy(x[0])}
    made = ops_bf16.parameters(master)
    assert made["w"].dtype == np.uint16 and made["gain"] is master["gain"]
    assert ops.parameters(master) == master


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "i", [i for i, said in enumerate(contract.MESSAGES) if "read-only" not in said]
)
def test_bad_input_is_refused_in_the_reference_s_words(i: int) -> None:
    call, message = contract.bad(ops, np.float32)[i]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "op", [op for op in contract.DIFFERENTIABLE if op != "linear_cross_entropy"]
)
def test_a_gradient_of_another_shape_or_type_is_refused(op: str) -> None:
    arrays, options = contract.cases(np.float32)[op]
    given = [None if a is None else ops.from_numpy(a) for a in arrays]
    out, cache = getattr(ops, f"{op}_forward")(*given, **options)
    backward = getattr(ops, f"{op}_backward")
    with pytest.raises(ValueError, match="dout must have shape"):
        backward(contract.wrong_shape(cotangent(out)), cache)
    if op in (*contract.DTYPED, "relu"):
        with pytest.raises(ValueError, match="dout must be float32, the dtype of the output"):
            backward(cotangent(out).astype(np.float64), cache)


def test_mixed_types_are_refused() -> None:
    x = ops.from_numpy(np.zeros((2, 4), np.float32))
    half = ops_bf16.from_numpy(np.zeros((2, 4), np.float32), activation=True)
    with pytest.raises(ValueError, match=r"add: arrays must share one dtype, .* a is bf16, b is"):
        ops.add_forward(half, x)
    with pytest.raises(ValueError, match="x is float32, weight is bf16"):
        ops.linear_forward(x, half.T)
    with pytest.raises(ValueError, match="v is float32, alibi is bf16"):
        ops.attention_forward(*[x.reshape(1, 2, 1, 4)] * 3, half[0, :1])
    with pytest.raises(ValueError, match="adamw: arrays must share one dtype, float32, but master"):
        numbers = {"lr": 1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0}
        ops.adamw(x[0], x[0], x[0], half[0], step=1, n_decayed=0, **numbers)


def test_slopes_may_be_bf16_beside_bf16() -> None:
    rng = np.random.default_rng(0)
    q, slopes = rng.standard_normal((1, 9, 2, 8)).astype(np.float32), np.array([0.5, 0.25])
    half = ops_bf16.from_numpy(q, activation=True)
    results = [
        ops_bf16.attention_forward(half, half, half, ops_bf16.from_numpy(x, activation=True))[0]
        for x in (slopes.astype(np.float32), to_bf16(slopes))
    ]
    np.testing.assert_array_equal(*results)


def test_float64_is_refused() -> None:
    with pytest.raises(ValueError, match="computes in float32 and bf16, got a float64 array"):
        ops.from_numpy(np.zeros(3))


def test_without_a_device_the_ops_say_how_to_get_one() -> None:
    devices.use(None)
    with pytest.raises(RuntimeError, match=r"accel\.load"):
        ops.from_numpy(np.zeros(3, np.float32))


# ---- where norms keep the sums of columns --------------------------------------------------------

BANKS = """
KERNEL places(int* to, i64 D) {
    SHARED(memory);
    float* sums = (float*)memory;
    columns(D, [&](i64 i) {
        for (int k = 0; k < PACK; ++k)
            to[k * blockDim.x + threadIdx.x] = (int)(&sum_of(sums, i, D, k) - sums);
    });
}
"""


@pytest.mark.parametrize("bf16", [0, 1])
def test_lanes_of_a_warp_add_up_columns_on_different_banks(bf16: int) -> None:
    pack = 8 if bf16 else 4
    threads = 224
    shim = ShimDevice(extra={"places": sources.text_of("norm.cu") + BANKS})
    to = shim.empty((pack, threads), np.int32)
    arguments = (to, np.int64(pack * threads))
    shim.launch("places", "places", (1, 1, 1), threads, arguments, shared=0, defines={"BF16": bf16})
    assert sorted(to.ravel()) == list(range(pack * threads))
    for warp in to.reshape(pack, -1, 32) % 32:
        for banks in warp:
            assert len(set(banks)) == 32
