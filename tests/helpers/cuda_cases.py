"""Arguments for every op of the cuda backend, in sizes that hurt: one, primes, one past a tile.

Used on the shim and, where there is one, on a GPU.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from accel.tolerance import Closeness, Magnitude, compare, round_bf16
from accel.verify.contract import Case as VerifyCase
from accel.verify.contract import expected, plus_of
from reference import ops as reference
from reference.ops import OPS
from reference.types import Array, DropoutKey, RopeScaling

KEY = DropoutKey(seed=2**63 + 5, step=3, sample=11, site=17)
Case = tuple[str, str, tuple[Any, ...], dict[str, Any]]  # op, what is special, arrays, options


def _normal(seed: int) -> Callable[..., Array]:
    rng = np.random.default_rng(seed)
    return lambda *shape: rng.standard_normal(shape).astype(np.float32)


def _ids(seed: int, high: int, *shape: int) -> Array:
    return np.random.default_rng(seed).integers(0, high, shape).astype(np.int32)


def cases() -> Iterator[Case]:
    """Yield cases of all differentiable ops but attention."""
    normal = _normal(0)
    for shapes in (
        ((3, 17), (3, 17)),
        ((2, 5, 3), (5, 3)),
        ((2, 1, 3), (4, 1)),
        ((1, 3), (7, 3)),
        ((1,), (5, 3)),
    ):
        yield "add", f"{shapes}", tuple(normal(*s) for s in shapes), {}
    yield "add", "five axes", (normal(2, 1, 3, 1, 2), normal(2, 4, 1, 3, 1)[:, :1]), {}
    yield "scale", "ragged", (normal(3, 77),), {"factor": -2.7}
    for op in ("relu", "gelu", "gelu_tanh"):
        yield op, "ragged", (3 * normal(3, 77),), {}
        yield op, "two blocks", (3 * normal(16, 130),), {}
    yield "swiglu", "odd width", (2 * normal(3, 2, 2 * 13),), {}
    yield "swiglu", "packs", (2 * normal(5, 2 * 32),), {}
    for shape in ((2, 5, 13), (3, 64), (2, 1)):
        yield "dropout", f"{shape}", (normal(*shape),), {"p": 0.3, "key": KEY}
    yield "dropout", "p = 0", (normal(2, 3),), {"p": 0.0}
    yield "embedding", "odd width", (_ids(1, 70, 3, 201), normal(70, 5)), {}  # three rounds of ids
    yield "embedding", "tiles", (_ids(2, 130, 3, 101), normal(130, 264)), {}
    few = np.where(np.arange(1100) % 2, 3, 5).astype(np.int32)  # two warps, three rounds, and
    yield "embedding", "few tokens", (few, normal(130, 40)), {}  # rows that no round finds
    yield "embedding", "one token", (np.full((70,), 3, np.int32), normal(4, 8)), {}
    for rows, D in (((2, 3), 5), ((4,), 264), ((1,), 1), ((7,), 2056)):
        x, gain, bias = normal(*rows, D) + 0.5, normal(D), normal(D)
        eps = 1e-5 if D > 1 else 0.3  # one coordinate: without ε the gradient cancels to nothing
        yield "rmsnorm", f"D = {D}", (x, gain), {"eps": eps}
        yield "layernorm", f"D = {D}", (x + 3, gain, bias), {"eps": eps}
    x, gain, bias = normal(1030, 5), normal(5), normal(5)  # more blocks than one
    yield "rmsnorm", "many rows", (x, gain), {"eps": 0.1}
    yield "layernorm", "many rows", (x, gain, bias), {"eps": 0.1}
    x, gain, bias = normal(19, 530), normal(530), normal(530)  # warps, at row after row
    yield "rmsnorm", "rows of warps", (x, gain), {"eps": 0.1}
    yield "layernorm", "rows of warps", (x, gain, bias), {"eps": 0.1}
    starts = np.array([8_000, 3])
    yield "rope", "starts", (normal(2, 5, 3, 6),), {"base": 5e5, "start": starts}
    yield "rope", "two of four", (normal(2, 3, 4, 16),), {"base": 1e4, "rotate_heads": 2}
    yield "rope", "wide", (normal(1, 2, 5, 128),), {"base": 1e4, "start": 7, "rotate_heads": 4}
    scaling = RopeScaling(8.0, 1.0, 4.0, 64.0)
    yield "rope", "scaled", (normal(2, 5, 3, 16),), {"base": 1e4, "start": 9, "scaling": scaling}
    yield "linear", "odd", (normal(2, 3, 7), normal(7, 5), normal(5)), {}
    yield "linear", "no bias", (normal(67, 16), normal(16, 24)), {}
    yield "linear", "many rows", (normal(70, 8), normal(8, 9), normal(9)), {}
    yield "split_heads", "", (normal(2, 3, 5, 4),), {"heads": (3, 1, 1)}
    yield "merge_heads", "", (normal(2, 3, 5, 4),), {}
    for V in (7, 519, 2056):
        targets = _ids(V, V, 2, 5)
        mask = np.array([[True, False, True, True, False], [True] * 5])
        arrays = (normal(2, 5, 6), 2 * normal(V, 6), targets, mask, normal(V))
        yield "linear_cross_entropy", f"V = {V}", arrays, {}
    arrays = (normal(6, 8), normal(16, 8), _ids(4, 16, 6))
    yield "linear_cross_entropy", "no mask", arrays, {}
    # what stands for logits behind a row's own must not be taken for one: exp(0 + 100) is infinite
    arrays = (normal(6, 8), normal(13, 8), _ids(4, 13, 6), None, normal(13) - 100)
    yield "linear_cross_entropy", "far below 0", arrays, {}


def cases_of_no_rows() -> Iterator[Case]:
    """Yield cases of all differentiable ops whose results are empty, or sums of nothing."""
    normal = _normal(1)
    for shape in ((0, 10), (3, 0, 10)):
        x, gain, bias = normal(*shape), normal(10), normal(10)
        yield "add", f"{shape}", (x, x), {}
        yield "add", f"{shape}, broadcast", (x, normal(10)), {}
        yield "scale", f"{shape}", (x,), {"factor": 2.0}
        for op in ("relu", "gelu", "gelu_tanh", "swiglu"):
            yield op, f"{shape}", (x,), {}
        yield "dropout", f"{shape}", (x,), {"p": 0.3, "key": KEY}
        yield "embedding", f"{shape}", (_ids(1, 7, *shape[:-1]), normal(7, 10)), {}
        yield "rmsnorm", f"{shape}", (x, gain), {"eps": 1e-5}
        yield "layernorm", f"{shape}", (x, gain, bias), {"eps": 1e-5}
        yield "linear", f"{shape}", (x, normal(10, 9), normal(9)), {}
        ids = _ids(2, 7, *shape[:-1])
        yield "linear_cross_entropy", f"{shape}", (x, normal(7, 10), ids, None, normal(7)), {}
    for B, T in ((0, 5), (2, 0)):
        heads = normal(B, T, 4, 8)
        yield "rope", f"B = {B}, T = {T}", (heads,), {"base": 1e4, "start": np.full(B, 3)}
        yield "split_heads", f"B = {B}, T = {T}", (heads,), {"heads": (2, 1, 1)}
        yield "merge_heads", f"B = {B}, T = {T}", (heads,), {}
        more = normal(4), np.ones((B, 9), np.bool_), np.zeros((B, 9), np.int32)
        q, k, v = heads, normal(B, 9, 2, 8), normal(B, 9, 2, 8)
        yield "attention", f"B = {B}, T = {T}", (q, k, v, *more), {}


def attention_cases(widths: tuple[tuple[int, int], ...]) -> Iterator[Case]:
    """Yield cases of attention for pairs (d, dv), each with options that meet in some case."""
    for i, (d, dv) in enumerate(widths):
        normal = _normal(100 + i)

        def arrays(
            B: int,
            T: int,
            S: int,
            Hq: int,
            Hkv: int,
            d: int = d,
            dv: int = dv,
            normal: Any = normal,
        ) -> tuple[Array, ...]:
            return normal(B, T, Hq, d), normal(B, S, Hkv, d), normal(B, S, Hkv, dv)

        rng = np.random.default_rng(i)
        what = f"d = {d}, dv = {dv}"
        yield "attention", f"{what}, causal", arrays(1, 70, 70, 2, 1), {}
        yield "attention", f"{what}, full, more keys", arrays(1, 5, 67, 2, 2), {"causal": False}
        yield "attention", f"{what}, more keys", arrays(1, 19, 83, 3, 1), {"scale": 0.3}
        yield (
            "attention",
            f"{what}, fewer keys",
            arrays(1, 37, 9, 2, 1),
            {},
        )  # rows that see nothing
        slopes = np.array([0.25, 0.7, 0.01, 0.5], np.float32)
        mask = rng.random((2, 33)) < 0.6
        mask[1] = False  # nobody sees anything
        documents = np.sort(rng.integers(0, 3, (2, 33)), axis=1).astype(np.int32)
        options = {"dropout_p": 0.3, "dropout_key": KEY, "window": 17}
        everything = (*arrays(2, 29, 33, 4, 2), slopes, mask, documents)
        yield "attention", f"{what}, everything", everything, options
        yield "attention", f"{what}, alibi", (*arrays(1, 35, 35, 4, 2), slopes), {}
        yield "attention", f"{what}, one", arrays(1, 1, 1, 1, 1), {}
        # the first tile of keys is seen by nobody
        yield "attention", f"{what}, window, more keys", arrays(1, 5, 67, 2, 1), {"window": 9}
        yield (
            "attention",
            f"{what}, dropout",
            arrays(1, 18, 21, 2, 1),
            {"causal": False, "dropout_p": 0.5, "dropout_key": KEY},
        )


def long_attention_cases(widths: tuple[tuple[int, int], ...]) -> Iterator[Case]:
    """Yield attention over several tiles of every kernel, for the pipelines between them."""
    for i, (d, dv) in enumerate(widths):
        normal = _normal(200 + i)
        q, k, v = normal(1, 301, 3, d), normal(1, 301, 1, d), normal(1, 301, 1, dv)
        yield "attention", f"d = {d}, dv = {dv}, long causal", (q, k, v), {}
        yield "attention", f"d = {d}, dv = {dv}, long full", (q[:, :140], k, v), {"causal": False}
        # windows that begin and end at the edges of tiles, and one place from them
        near = (q[:, :140], k[:, :140], v[:, :140])
        yield "attention", f"d = {d}, dv = {dv}, window full", near, {"causal": False, "window": 2}
        yield "attention", f"d = {d}, dv = {dv}, window causal", near, {"window": 66}
        # the first 16 of 32 queries see all of a tile of keys, the others do not
        yield "attention", f"d = {d}, dv = {dv}, window between strips", near, {"window": 82}
        few = (q[:, :140], k[:, :9], v[:, :9])  # the first tile of queries sees nothing
        yield "attention", f"d = {d}, dv = {dv}, few keys", few, {}
        packed = (q, k, v, None, None, packed_documents(301))
        yield "attention", f"d = {d}, dv = {dv}, long documents", packed, {}
        later = (q[:, :40], *packed[1:])  # the first tiles of keys are seen by nobody
        yield "attention", f"d = {d}, dv = {dv}, documents, more keys", later, {}


def packed_documents(S: int, each: int = 70) -> Array:
    """Return documents of as many tokens, one after the other: (1, S) int32."""
    return (np.arange(S, dtype=np.int32) // each)[None]


def cotangent(out: Any, seed: int = 5) -> Any:
    """Return a random gradient for what a forward returned."""
    if hasattr(out, "total"):
        return -0.7
    if isinstance(out, tuple):
        return tuple(cotangent(part, seed + i) for i, part in enumerate(out))
    return np.random.default_rng(seed).standard_normal(out.shape).astype(np.float32)


def with_plus(
    ops: Any, op: str, given: Any, options: dict[str, Any], dout: Any, cache: Any, put: Any
) -> Any:
    """Return what the function that can add something gives with that, in numbers of bf16."""
    adds = OPS[op].adds
    if adds == "forward":
        plus = put(plus_of("bf16", dout.shape))
        return getattr(ops, f"{op}_forward")(*given, **options, plus=plus)[0]
    if adds == "backward":
        plus = put(plus_of("bf16", given[0].shape))
        return getattr(ops, f"{op}_backward")(dout, cache, plus=plus)
    return ()


def run_reference(
    op: str, arrays: tuple[Any, ...], options: dict[str, Any], dtype: Any
) -> list[Array]:
    """Return all results of the reference's forward and backward, computed in ``dtype``."""
    wide = tuple(_cast(array, dtype) for array in arrays)
    out, cache = getattr(reference, f"{op}_forward")(*wide, **options)
    dout, backward = _cast(cotangent(out), dtype), getattr(reference, f"{op}_backward")
    more = with_plus(reference, op, wide, options, dout, cache, lambda plus: _cast(plus, dtype))
    return flat((out, backward(dout, cache), more))


def run_backend(
    ops: Any, op: str, arrays: tuple[Any, ...], options: dict[str, Any], *, activation: bool = True
) -> list[Array]:
    """Return the same results of a backend, as NumPy arrays.

    What can add something to its result is called once more, with that.
    """

    def put(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(put(part) for part in value)
        return (
            ops.from_numpy(value, activation=activation) if isinstance(value, np.ndarray) else value
        )

    given = [put(array) for array in arrays]
    if op == "attention" and len(arrays) > 3 and arrays[3] is not None:
        given[3] = ops.from_numpy(arrays[3])  # slopes stay float32
    out, cache = getattr(ops, f"{op}_forward")(*given, **options)
    dout = put(cotangent(out))
    gradients = getattr(ops, f"{op}_backward")(dout, cache)
    more = with_plus(ops, op, given, options, dout, cache, put)
    return flat((out, gradients, more), ops.to_numpy)


def check_nothing(ops: Any, case: Case) -> None:
    """Hold a case of no rows to what is of none: empty results, sums of zero, in their shapes."""
    op, _, arrays, options = case
    exact = run_reference(op, arrays, options, np.float64)
    for got, due in zip(run_backend(ops, op, arrays, options), exact, strict=True):
        assert got.shape == due.shape and not got.any() and not due.any()


def flat(value: Any, convert: Callable[[Array], Array] = np.asarray) -> list[Array]:
    """Return the arrays and numbers in nested tuples, in order."""
    if value is None:
        return []
    if isinstance(value, tuple):
        return [array for part in value for array in flat(part, convert)]
    return [np.asarray(value) if np.isscalar(value) else convert(value)]


def _cast(value: Any, dtype: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_cast(part, dtype) for part in value)
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return value.astype(dtype)
    return value


def rounded(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments whose arrays of two axes and more hold bf16 numbers, as float32."""
    return tuple(
        round_bf16(a) if isinstance(a, np.ndarray) and a.dtype == np.float32 and a.ndim > 1 else a
        for a in arrays
    )


def by_the_rule(
    ops: Any, case: Case, dtype: str, *, activation: bool = True, got: list[Array] | None = None
) -> dict[str, Closeness]:
    """Return how close each result of a case is, by the rule of ``accel.tolerance``.

    ``got`` are the results, where the case has been run already.
    """
    op, _, arrays, options = case
    if dtype == "bf16":
        arrays = rounded(arrays)
    names = inspect.signature(getattr(reference, f"{op}_forward")).parameters
    out, _ = getattr(reference, f"{op}_forward")(*arrays, **options)
    given = dict(zip(names, arrays, strict=False))
    dout = cotangent(out)
    if dtype == "bf16" and not hasattr(out, "total"):
        dout = rounded(dout) if isinstance(dout, tuple) else round_bf16(dout)
    want = expected(VerifyCase(op, dtype, given, options, dout, {}))
    got = got or run_backend(ops, op, arrays, options, activation=activation)
    due = [(name, want, name) for name in want.exact]
    if OPS[op].adds:
        backward = OPS[op].adds == "backward"
        first, *_ = adding = [name for name in want.exact if name.startswith("d") == backward]
        more = want.shifted(first, plus_of("bf16", want.exact[first].shape))
        due += [(f"{name} with plus", more, name) for name in adding]
    return {
        what: compare(
            value,
            of.exact[name],
            of.plain[name],
            of.magnitudes[name],
            dtype,
            gradient=name.startswith("d"),
        )
        for (what, of, name), value in zip(due, got, strict=True)
    }


def attention_by_the_rule(case: Case, got: list[Array]) -> dict[str, Closeness]:
    """Return how close what bf16 attention gave is to plain bf16 code with scores in float32.

    Plain code rounds what enters and leaves a product: q, k, v, dout, the probabilities, the
    gradients of scores, and the results. Rounding scores too, as code that writes them to memory
    does, would allow errors as large as a whole tile mistaken for another; these kernels never do.
    """
    _, _, arrays, options = case
    arrays = rounded(arrays)
    q, k, v = arrays[:3]
    out, saved = reference.attention_forward(
        *(a.astype(np.float64) if a is not None and a.dtype == np.float32 else a for a in arrays),
        **options,
    )
    dout = round_bf16(cotangent(out))
    exact = (out, *reference.attention_backward(dout.astype(np.float64), saved))
    cache = saved.cache

    B, T, Hq, _ = q.shape
    S, Hkv, dv = v.shape[1:]
    G = Hq // Hkv

    def grouped(x: Array) -> Array:
        return x.astype(np.float64).reshape(B, T, Hkv, G, -1).transpose(0, 2, 3, 1, 4)

    qh, do = grouped(q), grouped(dout)
    kh, vh = (x.astype(np.float64).transpose(0, 2, 1, 3)[:, :, None] for x in (k, v))
    kept = 1.0 if cache.kappa is None else cache.kappa
    p, dp = cache.P, do @ vh.swapaxes(-1, -2)
    delta = np.sum(do * grouped(round_bf16(out)), -1, keepdims=True)
    ds = p * (kept * dp - delta)
    # ds is rounded once to bf16, and what it is the difference of a few times to float32; delta has
    # the independent roundings of the stored output's elements in it
    parts = p * (kept * (np.abs(do) @ np.abs(vh).swapaxes(-1, -2)) + np.abs(delta))
    from_out = p * 2 * np.sqrt(np.sum((do * grouped(out)) ** 2, -1, keepdims=True))
    ds_size = np.abs(ds) + from_out + 8 * 2**-16 * parts

    def results(pk: Array, ds: Array, q: Array, k: Array, v: Array, do: Array) -> list[Array]:
        back = (
            (pk @ v).transpose(0, 3, 1, 2, 4).reshape(B, T, Hq, dv),
            (cache.scale * (ds @ k)).transpose(0, 3, 1, 2, 4).reshape(B, T, Hq, -1),
            (cache.scale * np.sum(ds.swapaxes(-1, -2) @ q, 2)).transpose(0, 2, 1, 3),
            np.sum(pk.swapaxes(-1, -2) @ do, 2).transpose(0, 2, 1, 3),
        )
        return list(back)

    plain = results(round_bf16(p * kept), round_bf16(ds), qh, kh, vh, do)
    sizes = results(p * kept, ds_size, *(np.abs(x) for x in (qh, kh, vh, do)))
    return {
        name: compare(g, e, round_bf16(r), Magnitude(s, 1, S), "bf16", gradient=name != "out")
        for name, g, e, r, s in zip(
            ("out", "dq", "dk", "dv"), got, exact, plain, sizes, strict=True
        )
    }


def relative_error(got: Array, exact: Array) -> float:
    """Return ‖got - exact‖ / ‖exact‖, or ‖got‖ where exact is zero; NaN anywhere is infinite."""
    assert got.shape == exact.shape, (got.shape, exact.shape)
    error = float(np.linalg.norm(np.asarray(got, np.float64) - exact))
    size = float(np.linalg.norm(exact))
    return np.inf if np.isnan(error) else error / size if size else error


def error_of_muon_on_views(ops: Any) -> float:
    """Return how far a step on matrices that are not contiguous is from the reference's."""
    rng = np.random.default_rng(0)
    start = [rng.standard_normal((6, 8)).astype(np.float32) for _ in range(3)]
    exact = [a[:, ::2].astype(np.float64) for a in start]
    mine = [ops.from_numpy(a)[:, ::2] for a in start]
    for arrays, module in ((exact, reference), (mine, ops)):
        module.muon(*arrays, lr=0.1, momentum=0.9, weight_decay=0.1)
    pairs = zip(mine, exact, strict=True)
    return max(relative_error(np.ascontiguousarray(got), expected) for got, expected in pairs)
