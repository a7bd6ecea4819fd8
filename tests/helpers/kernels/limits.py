"""Wrong only beyond a limit, where a NaN is put in, or where sizes are alike.

Integers have 8, 15 or 16 bits, loops have a last block, and few tests are long enough to meet the
end of either. Each kernel is the reference with something done to its arguments or its results.
"""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from reference import ops
from reference.model import decode_step as compose
from reference.types import Array, KVCache, Loss
from tests.helpers.kernels.rewrite import kernel_of
from tests.helpers.kernels.wrong import Written

LIMITS: list[Written] = []


def given(title: str, op: str, wrong: str, spoil: Callable[[SimpleNamespace], None]) -> None:
    """Register a change of a forward's arguments, in place, by name."""
    name = f"{op}_forward" if hasattr(ops, f"{op}_forward") else op
    real = getattr(ops, name)
    signature = inspect.signature(real)

    def forward(*args: Any, **options: Any) -> Any:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        a = SimpleNamespace(**bound.arguments)
        spoil(a)
        bound.arguments.update(vars(a))
        return real(*bound.args, **bound.kwargs)

    forward.__signature__ = signature  # type: ignore[attr-defined]
    LIMITS.append(Written(title, op, wrong, kernel_of(op, ops, op, **{name: forward})))


def result(title: str, op: str, wrong: str, spoil: Callable[[Any, SimpleNamespace], Any]) -> None:
    """Register a change of what a forward gives: spoil(out, arguments) -> out."""
    name = f"{op}_forward" if hasattr(ops, f"{op}_forward") else op
    real = getattr(ops, name)
    signature = inspect.signature(real)

    def forward(*args: Any, **options: Any) -> Any:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        got = real(*args, **options)
        out, *rest = got if name.endswith("_forward") else (got,)
        out = spoil(np.array(out) if isinstance(out, np.ndarray) else out, _named(bound))
        return (out, *rest) if rest else out

    forward.__signature__ = signature  # type: ignore[attr-defined]
    LIMITS.append(Written(title, op, wrong, kernel_of(op, ops, op, **{name: forward})))


def gradients(title: str, op: str, wrong: str, spoil: Callable[[list[Any], Any], None]) -> None:
    """Register a change of what a backward gives, in place: spoil(gradients, dout)."""
    name = f"{op}_backward"
    real = getattr(ops, name)

    def backward(dout: Any, cache: Any) -> Any:
        got = real(dout, cache)
        found = [got] if isinstance(got, np.ndarray) else list(got)
        found = [None if g is None else g.copy() for g in found]
        spoil(found, dout)
        return found[0] if len(found) == 1 else tuple(found)

    LIMITS.append(Written(title, op, wrong, kernel_of(op, ops, op, **{name: backward})))


def whole(title: str, op: str, wrong: str, **functions: Callable[..., Any]) -> None:
    LIMITS.append(Written(title, op, wrong, kernel_of(op, ops, op, **functions)))


def _named(bound: inspect.BoundArguments) -> SimpleNamespace:
    return SimpleNamespace(**bound.arguments)


def cut_rows(x: Array, last: int) -> Array:
    """Lose what lies beyond so many rows."""
    x.reshape(-1, x.shape[-1])[last:] = 0
    return x


def cut_columns(x: Array, last: int) -> Array:
    x[..., last:] = 0
    return x


def cut_elements(x: Array, last: int) -> Array:
    x.reshape(-1)[last:] = 0
    return x


# ---- sizes beyond a limit ------------------------------------------------------------------------


def _keys(a: SimpleNamespace, last: int) -> None:
    a.key_mask = np.ones(a.k.shape[:2], bool) if a.key_mask is None else a.key_mask.copy()
    a.key_mask[:, last:] = False


def _masked_to(a: SimpleNamespace, last: int) -> None:
    if a.key_mask is not None:
        a.key_mask = a.key_mask | (np.arange(a.key_mask.shape[1]) >= last)


def _window(a: SimpleNamespace) -> None:
    a.window = a.window if a.window <= 256 else 0


def _documents(a: SimpleNamespace) -> None:
    a.documents = None if a.documents is None else (a.documents & 0xFFFF)


def _alibi_clipped(a: SimpleNamespace) -> None:
    if a.alibi is not None and a.k.shape[1] > 1024:
        a.alibi = a.alibi * np.asarray(0.5, a.alibi.dtype)


given("keys beyond 256 unseen", "attention", "out", lambda a: _keys(a, 256))
given("keys beyond 1,024 unseen", "attention", "out", lambda a: _keys(a, 1024))
given("keys beyond 4,096 unseen", "attention", "out", lambda a: _keys(a, 4096))
given("keys in 15 bits", "attention", "out", lambda a: _keys(a, 32_768))
given("keys in 16 bits", "attention", "out", lambda a: _keys(a, 65_536))
given("the mask of the first 512 keys", "attention", "out", lambda a: _masked_to(a, 512))
given("windows beyond 256 ignored", "attention", "out", _window)
given("documents in 16 bits", "attention", "out", _documents)
given("ALiBi halved beyond 1,024 keys", "attention", "out", _alibi_clipped)


def _narrowed(a: SimpleNamespace, last: int) -> None:
    a.x = a.x.copy()
    a.x[..., last:] = 0


def _queries(out: Array, a: SimpleNamespace) -> Array:
    out[:, 512:] = 0
    return out


def _set(a: SimpleNamespace, name: str, otherwise: float) -> None:
    """Take a number that is zero for one that was left out."""
    setattr(a, name, getattr(a, name) or otherwise)


result("queries beyond 512 lost", "attention", "out", _queries)
result("heads wider than 64", "attention", "out",
       lambda out, a: out if a.q.shape[-1] <= 65 else 0 * out)  # fmt: skip
result("heads wider than 128", "attention", "out",
       lambda out, a: out if a.q.shape[-1] <= 129 else 0 * out)  # fmt: skip
result("outputs beyond 1,024", "linear", "out", lambda out, a: cut_columns(out, 1024))
result("columns beyond 128", "embedding", "out", lambda out, a: cut_columns(out, 129))
result("heads wider than 128", "rope", "out",
       lambda out, a: out if a.x.shape[-1] <= 128 else 0 * out)  # fmt: skip
given("inputs beyond 256 ignored", "linear_cross_entropy", "total",
      lambda a: _narrowed(a, 256))  # fmt: skip
for _op in ("rmsnorm", "layernorm"):
    given("ε of zero is the default", _op, "out", lambda a: _set(a, "eps", 1e-6))
given("a rate of zero is the default", "adamw", "master", lambda a: _set(a, "lr", 1e-3))
given("β₁ of zero is the default", "adamw", "master", lambda a: _set(a, "beta1", 0.9))
gradients("dk of the first 8 tiles", "attention", "dk", lambda g, d: cut_keys(g[1], 256))
gradients("dq of the first 1,024 queries", "attention", "dq", lambda g, d: cut_keys(g[0], 1024))


def _lost(x: Array) -> None:
    x[65_536:] = 0


def cut_keys(x: Array, last: int) -> None:
    x[:, last:] = 0


for _op in ("scale", "gelu", "gelu_tanh", "relu", "swiglu"):
    result("rows in 16 bits", _op, "out", lambda out, a: cut_rows(out, 65_536))
    result("columns in 15 bits", _op, "out", lambda out, a: cut_columns(out, 32_768))
    gradients("elements in 16 bits", _op, "dx", lambda g, d: _lost(g[0].reshape(-1)))
result("columns in 16 bits", "softmax", "out", lambda out, a: cut_columns(out, 65_536))
result("rows in 16 bits", "softmax", "out", lambda out, a: cut_rows(out, 65_536))
result("elements in 16 bits", "dropout", "out", lambda out, a: cut_elements(out, 65_536))
result("rows in 16 bits", "rmsnorm", "out", lambda out, a: cut_rows(out, 65_536))
result("columns beyond 4,096", "rmsnorm", "out", lambda out, a: cut_columns(out, 4096))
result("rows beyond 4,096", "layernorm", "out", lambda out, a: cut_rows(out, 4096))
result("rows in 16 bits", "add", "out", lambda out, a: cut_rows(out, 65_536))
result("rows beyond 4,096", "linear", "out", lambda out, a: cut_rows(out, 4096))
result("rows in 16 bits", "linear", "out", lambda out, a: cut_rows(out, 65_536))
result("entries in 16 bits", "logits", "out", lambda out, a: cut_columns(out, 65_536))
result("positions in 16 bits", "merge_heads", "out", lambda out, a: cut_rows(out, 65_536))
result("positions beyond 512", "rope", "out", lambda out, a: out * _before(out, 512))


def _before(x: Array, last: int) -> Array:
    return np.asarray((np.arange(x.shape[1]) < last)[:, None, None], x.dtype)


def _fewer_rows(at: int, last: int) -> Callable[[list[Any], Any], None]:
    """A gradient is what the first rows alone give, where there are more."""

    def spoil(found: list[Any], dout: Array) -> None:
        rows = dout.reshape(-1, dout.shape[-1])
        if len(rows) > last and found[at] is not None:
            found[at] *= np.asarray(last / len(rows), found[at].dtype)

    return spoil


gradients("dgain of 1,024 rows", "rmsnorm", "dgain", _fewer_rows(1, 1024))
gradients("dgain of 4,096 rows", "rmsnorm", "dgain", _fewer_rows(1, 4096))
gradients("dbias of 1,024 rows", "layernorm", "dbias", _fewer_rows(2, 1024))
gradients("dweight of 4,096 rows", "linear", "dweight", _fewer_rows(1, 4096))
gradients("dbias of 1,024 rows", "linear", "dbias", _fewer_rows(2, 1024))
gradients("dtable of 1,024 ids", "embedding", "dtable", _fewer_rows(0, 1024))


def _ids(bits: int) -> Callable[[SimpleNamespace], None]:
    def spoil(a: SimpleNamespace) -> None:
        a.ids = a.ids % np.int32(2**bits)

    return spoil


given("ids in 15 bits", "embedding", "out", _ids(15))
given("ids in 16 bits", "embedding", "out", _ids(16))


def _targets(a: SimpleNamespace) -> None:
    a.targets = np.where(a.targets >= 0, a.targets % 2**16, a.targets).astype(np.int32)


given("targets in 16 bits", "linear_cross_entropy", "total", _targets)
gradients(
    "dhead of the first 65,536 entries",
    "linear_cross_entropy",
    "dhead",
    lambda g, d: _lost(g[1]),
)
whole(
    "4 blocks at most", "global_norm", "out", global_norm=lambda x: ops.global_norm(x[: 4 * 65536])
)
whole(
    "65,536 elements at most",
    "accumulate",
    "dst",
    accumulate=lambda dst, src: (
        ops.accumulate(*(a.reshape(-1)[:65_536] for a in (dst, src)))
        if dst.flags.c_contiguous
        else ops.accumulate(dst, src)
    ),
)


def _decayed(a: SimpleNamespace) -> None:
    a.n_decayed = a.n_decayed % 65_536


def _step(a: SimpleNamespace) -> None:
    a.step = max(1, a.step % 65_536)


given("n_decayed in 16 bits", "adamw", "master", _decayed)
given("the step in 16 bits", "adamw", "master", _step)


def _start(change: Callable[[Array], Array]) -> Callable[[SimpleNamespace], None]:
    def spoil(a: SimpleNamespace) -> None:
        a.start = change(np.asarray(a.start, np.int64))

    return spoil


given("starts in 15 bits", "rope", "out", _start(lambda at: np.where(at > 0, at % 2**15, at)))
given("starts in 16 bits", "rope", "out", _start(lambda at: np.where(at > 0, at % 2**16, at)))
given("starts in float32", "rope", "out", _start(lambda at: at.astype(np.float32).astype(np.int64)))


def _key(**changes: Callable[[int], int]) -> Callable[[SimpleNamespace], None]:
    def spoil(a: SimpleNamespace) -> None:
        if a.key is not None:
            a.key = a.key._replace(**{n: f(getattr(a.key, n)) for n, f in changes.items()})

    return spoil


given("the seed in 63 bits", "dropout", "out", _key(seed=lambda n: n % 2**63))
given("the step in 16 bits", "dropout", "out", _key(step=lambda n: n % 2**16))
given("the step in 31 bits", "dropout", "out", _key(step=lambda n: n % 2**31))
given("the sample in 15 bits", "dropout", "out", _key(sample=lambda n: n % 2**15))
given("the site in 8 bits", "dropout", "out", _key(site=lambda n: n % 2**8))
given("the site in 16 bits", "dropout", "out", _key(site=lambda n: n % 2**16))


def _places(bits: int) -> Callable[[SimpleNamespace], None]:
    def spoil(a: SimpleNamespace) -> None:
        a.position = np.asarray(a.position) % 2**bits
        a.position = int(a.position) if a.position.ndim == 0 else a.position

    return spoil


given("places in 8 bits", "write_kv", "cache.k", _places(8))
given("places in 16 bits", "write_kv", "cache.v", _places(16))
given("tokens in 16 bits", "decode_step", "out", lambda a: setattr(a, "token", a.token % 2**16))


def _decoding(title: str, wrong: str, **functions: Callable[..., Any]) -> None:
    own = SimpleNamespace(**{**vars(ops), **functions})

    def decode_step(params: Any, config: Any, token: Array, cache: KVCache, position: Any) -> Array:
        return compose(own, params, config, token, cache, position)

    LIMITS.append(Written(title, "decode_step", wrong, SimpleNamespace(decode_step=decode_step)))


def _rope_in_a_byte(x: Array, *, start: Any = 0, **options: Any) -> Any:
    return ops.rope_forward(x, start=np.asarray(start) % 256, **options)


def _last_keys(*arrays: Any, key_mask: Array | None = None, **options: Any) -> Any:
    S = arrays[1].shape[1]
    late = np.ones((1, S), bool) if key_mask is None else key_mask
    return ops.attention_forward(*arrays, key_mask=late & (np.arange(S) >= S - 1024), **options)


_decoding("positions in 8 bits", "out", rope_forward=_rope_in_a_byte)
_decoding("the last 1,024 places alone", "out", attention_forward=_last_keys)


# ---- sizes that are alike ------------------------------------------------------------------------


def _heads_first(a: SimpleNamespace) -> None:
    if a.q.shape[1] == a.q.shape[2]:
        a.q = a.q.swapaxes(1, 2)


def _keys_for_queries(a: SimpleNamespace) -> None:
    if a.q.shape == a.k.shape:
        a.q, a.k = a.k, a.q


def _keys_for_values(a: SimpleNamespace) -> None:
    if a.k.shape == a.v.shape == a.q.shape:
        a.v = a.k


def _transposed(name: str) -> Callable[[SimpleNamespace], None]:
    def spoil(a: SimpleNamespace) -> None:
        x = getattr(a, name)
        if x.shape[0] == x.shape[1]:
            setattr(a, name, x.T)

    return spoil


def _square(x: Array) -> bool:
    return x.ndim == 2 and x.shape[0] == x.shape[1]


given("q read as (B, H, T, d) where T = H", "attention", "out", _heads_first)
given("q and k exchanged where alike", "attention", "out", _keys_for_queries)
given("k for v where all are alike", "attention", "out", _keys_for_values)
given("a square head transposed", "logits", "out", _transposed("head"))
given("a square head transposed", "linear_cross_entropy", "total", _transposed("head"))
given("a square weight transposed", "linear", "out", _transposed("weight"))
given("a square table transposed", "embedding", "out", _transposed("table"))
result(
    "columns of a square",
    "softmax",
    "out",
    lambda out, a: ops.softmax(a.x.T).T if _square(a.x) else out,
)


def _along_rows(out: Array, a: SimpleNamespace) -> Array:
    if a.a.ndim == 1 and _square(a.b):
        return np.asarray(a.a[:, None] + a.b)
    return out


result("a vector down a square", "add", "out", _along_rows)


def _merged(out: Array, a: SimpleNamespace) -> Array:
    B, T, H, d = a.x.shape
    return a.x.swapaxes(1, 2).reshape(B, T, H * d) if T == H else out


result("heads before tokens where T = H", "merge_heads", "out", _merged)


# ---- NaN and infinity ----------------------------------------------------------------------------

_flushed = np.nan_to_num


def _spread(axes: Callable[[Array], Any]) -> Callable[[Any, SimpleNamespace], Any]:
    def spoil(out: Array, a: SimpleNamespace) -> Array:
        if np.isnan(out).any():
            out[np.broadcast_to(np.isnan(out).any(axis=axes(out), keepdims=True), out.shape)] = (
                np.nan
            )
        return out

    return spoil


_everywhere = _spread(lambda out: tuple(range(out.ndim)))
for _op in (
    "add",
    "scale",
    "relu",
    "gelu",
    "gelu_tanh",
    "swiglu",
    "rmsnorm",
    "layernorm",
    "linear",
):
    result(
        "NaN becomes zero", _op, "out", lambda out, a: _flushed(out, posinf=np.inf, neginf=-np.inf)
    )
for _op in ("attention", "embedding", "rope", "softmax", "logits", "dropout", "merge_heads"):
    result(
        "NaN becomes zero", _op, "out", lambda out, a: _flushed(out, posinf=np.inf, neginf=-np.inf)
    )
for _op in ("rmsnorm", "layernorm", "linear", "attention", "softmax", "gelu", "logits", "rope"):
    result("NaN spreads to all rows", _op, "out", _everywhere)
result("infinity cut off", "gelu", "out", lambda out, a: np.clip(out, -3e38, 3e38))
result("infinity cut off", "scale", "out", lambda out, a: np.clip(out, -3e38, 3e38))
gradients("NaN lost", "rmsnorm", "dx", lambda g, d: g.__setitem__(0, _flushed(g[0])))
gradients("NaN lost", "linear", "dweight", lambda g, d: g.__setitem__(1, _flushed(g[1])))
gradients("NaN lost", "attention", "dq", lambda g, d: g.__setitem__(0, _flushed(g[0])))
gradients("NaN lost", "gelu", "dx", lambda g, d: g.__setitem__(0, _flushed(g[0])))
given("NaN skipped", "adamw", "master", lambda a: setattr(a, "grad", _flushed(a.grad)))
whole("NaN skipped", "accumulate", "dst", accumulate=lambda d, s: ops.accumulate(d, _flushed(s)))
whole("NaN skipped", "global_norm", "out", global_norm=lambda x: ops.global_norm(_flushed(x)))
given("NaN skipped", "write_kv", "cache.k", lambda a: setattr(a, "k", _flushed(a.k)))
result(
    "a loss of NaN is no loss",
    "linear_cross_entropy",
    "total",
    lambda out, a: Loss(float(_flushed(out.total)), out.n_valid),
)
