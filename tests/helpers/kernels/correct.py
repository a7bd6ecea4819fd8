"""Correct kernels written in other ways than the reference: none of them may raise an alarm.

``kernels(store)`` gives them all; ``store`` is what happens to a number that is kept: nothing, or
rounding to bf16, as a kernel does whose arrays are bf16 and whose sums are float32.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from reference.config import Config
from reference.model import decode_step as compose
from reference.philox import keep_mask
from reference.types import Array, KVCache, Loss

Store = Callable[[Array], Array]


def in_order(terms: Array, axis: int) -> Array:
    """Add terms one after the other, as a loop does; NumPy's own sum pairs them."""
    return np.take(np.add.accumulate(terms, axis=axis), -1, axis=axis)


def kernels(store: Store) -> SimpleNamespace:
    """Return a module of correct kernels."""
    made = [_simple(store), _norms(store), _attention(store), _activations(store), _loss(store)]
    found = {n: f for part in made for n, f in vars(part).items()}
    return SimpleNamespace(__name__="correct kernels", **found, **vars(_decoding(store, found)))


def _decoding(store: Store, others: dict[str, Any]) -> SimpleNamespace:
    """Decode with the kernels above, row by row of the batch."""

    def kv_cache(params: Any, config: Config, batch: int, length: int) -> KVCache:
        dtype, cache = params["embedding.weight"].dtype, KVCache([], [])
        for layer in range(config.n_layers):
            window = 0 if config.position == "alibi" else config.window_of(layer)
            shape = (batch, min(length, window or length), config.n_kv_heads, config.d_head)
            cache.k.append(np.zeros(shape, dtype))
            cache.v.append(np.zeros(shape, dtype))
        return cache

    def write_kv(cache: KVCache, k: Array, v: Array, *, layer: int, position: Any) -> None:
        for b, at in enumerate(np.broadcast_to(position, len(k))):
            cache.k[layer][b, at : at + k.shape[1]] = k[b]
            cache.v[layer][b, at : at + k.shape[1]] = v[b]

    own = SimpleNamespace(
        **others, write_kv=write_kv, from_numpy=lambda x, **how: x, keep=lambda x: x
    )

    def decode_step(
        params: Any, config: Config, token: Array, cache: KVCache, position: Any
    ) -> Array:
        found = []
        for b, at in enumerate(np.broadcast_to(position, len(token))):
            row = KVCache(*([a[b : b + 1] for a in arrays] for arrays in cache))
            found.append(compose(own, params, config, token[b : b + 1], row, int(at)))
        return store(np.concatenate(found))

    return SimpleNamespace(kv_cache=kv_cache, write_kv=write_kv, decode_step=decode_step)


def _like(x: Array, of: Array) -> Array:
    return np.asarray(x, of.dtype)


def _simple(store: Store) -> SimpleNamespace:
    def add_forward(a: Array, b: Array) -> Any:
        return store(b + a), (a.shape, b.shape)

    def reduced(d: Array, shape: tuple[int, ...]) -> Array:
        while d.ndim > len(shape):
            d = in_order(d, 0)
        for axis, n in enumerate(shape):
            if n == 1 and d.shape[axis] != 1:
                d = in_order(d, axis)[(slice(None),) * axis + (None,)]
        return store(d)

    def add_backward(dout: Array, cache: Any) -> Any:
        return [reduced(dout, shape) for shape in cache]

    def scale_forward(x: Array, *, factor: float) -> Any:
        c = np.asarray(factor, x.dtype)
        return store(c * x), c

    def scale_backward(dout: Array, c: Array) -> Array:
        return store(c * dout)

    def embedding_forward(ids: Array, table: Array) -> Any:
        return np.stack([table[i] for i in ids.reshape(-1)]).reshape(*ids.shape, -1), (ids, table)

    def embedding_backward(
        dout: Array, cache: Any, *, out: Array | None = None, accumulate: bool = False
    ) -> Array:
        ids, table = cache
        onehot = (ids.reshape(-1)[:, None] == np.arange(len(table))).astype(dout.dtype)
        grad = onehot.T @ dout.reshape(-1, table.shape[1])
        if out is None:
            return store(grad)
        if accumulate:
            out += grad
        else:
            np.copyto(out, grad)
        return out

    def linear_forward(
        x: Array,
        weight: Array,
        bias: Array | None = None,
        *,
        keep_x: bool = True,
        plus: Array | None = None,
    ) -> Any:
        terms = x[..., :, None] * weight
        y = in_order(terms, -2)
        y = store(y if bias is None else y + bias)
        return y if plus is None else store(plus + y), (x if keep_x else None, weight, bias)

    def linear_backward(dout: Array, cache: Any, *, x: Array | None = None, out: Any = None) -> Any:
        kept, weight, bias = cache
        x = kept if x is None else x
        dx = store(np.einsum("...o,io->...i", dout, weight))
        rows = dout.reshape(-1, dout.shape[-1])
        dweight = np.einsum("ni,no->io", x.reshape(-1, x.shape[-1]), rows)
        dbias = None if bias is None else in_order(rows, 0)
        for to, grad in zip(out or (), (dweight, dbias), strict=False):
            if to is not None and grad is not None:
                to[...] = grad
        return dx, dweight, dbias

    def split_heads_forward(x: Array, *, heads: tuple[int, ...]) -> Any:
        ends = [sum(heads[: i + 1]) for i in range(len(heads))]
        return tuple(x[:, :, e - n : e].copy() for n, e in zip(heads, ends, strict=True)), None

    def split_heads_backward(dout: Any, cache: Any) -> Array:
        return np.concatenate(dout, axis=2)

    def merge_heads_forward(x: Array) -> Any:
        return np.stack([x[:, t].reshape(len(x), -1) for t in range(x.shape[1])], axis=1), x.shape

    def merge_heads_backward(dout: Array, shape: Any) -> Array:
        return dout.reshape(shape)

    def rope_forward(
        x: Array,
        *,
        base: float,
        start: Any = 0,
        rotate_heads: int | None = None,
        scaling: Any = None,
    ) -> Any:
        # complex numbers, and the frequencies by way of exp and log
        d = x.shape[3]
        turning = x.shape[2] if rotate_heads is None else rotate_heads
        omega = np.exp(-math.log(base) * np.arange(0, d, 2) / d)
        if scaling is not None:  # a pair at a time, as published code has it
            for j, wavelength in enumerate((2 * np.pi / omega).tolist()):
                factor, low, high, original = scaling
                blend = (original / wavelength - low) / (high - low)
                if wavelength > original / low:
                    omega[j] /= factor
                elif wavelength >= original / high:
                    omega[j] = (1 - blend) * omega[j] / factor + blend * omega[j]
        angle = (np.reshape(start, (-1, 1)) + np.arange(x.shape[1]))[:, :, None, None] * omega
        turn = np.exp(1j * angle).astype(np.complex64 if x.dtype == np.float32 else np.complex128)
        return turned(x, turn, turning), (turn, turning)

    def turned(x: Array, turn: Array, turning: int) -> Array:
        z = (x[..., 0::2] + 1j * x[..., 1::2]).astype(turn.dtype)
        y = z * turn
        out = np.stack([y.real, y.imag], axis=-1).reshape(x.shape).astype(x.dtype)
        out[:, :, turning:] = x[:, :, turning:]
        return store(out)

    def rope_backward(dout: Array, cache: Any) -> Array:
        turn, turning = cache
        return turned(dout, turn.conj(), turning)

    def dropout_forward(x: Array, *, p: float, key: Any = None) -> Any:
        if p == 0:
            return x.copy(), np.ones((), x.dtype)
        factor = keep_mask(x.shape, p, key).astype(x.dtype) * np.asarray(1 / (1 - p), x.dtype)
        return store(x * factor), factor

    def dropout_backward(dout: Array, factor: Array) -> Array:
        return store(dout * factor)

    def softmax(x: Array) -> Array:
        top = x.max(-1, keepdims=True)
        lse = top + np.log(in_order(np.exp(x - top), -1)[..., None])
        return store(np.exp(x - lse))

    def logits(x: Array, head: Array, bias: Array | None = None) -> Array:
        y = in_order(x[..., None, :] * head, -1)
        return store(y if bias is None else y + bias)

    def square_sums(x: Array) -> Array:
        starts = range(0, len(x), 65_536)
        parts = [x[i : i + 65_536].astype(np.float64) for i in starts]
        return np.array([np.dot(p, p) for p in parts])

    def global_norm(x: Array) -> float:
        return float(np.linalg.norm(x.astype(np.float64)))

    def accumulate(dst: Array, src: Array) -> None:
        np.add(src, dst, out=dst)

    def adamw(
        master: Array,
        m: Array,
        v: Array,
        grad: Array,
        *,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        n_decayed: int,
        grad_scale: float = 1.0,
    ) -> None:
        # everything in the arrays' own type, as a C kernel with float arguments
        real = master.dtype.type
        b1, b2, one = real(beta1), real(beta2), real(1)
        g = grad * real(grad_scale)
        m += (one - b1) * (g - m)
        v *= b2
        v += (one - b2) * (g * g)
        c1, c2 = one - b1 ** real(step), one - b2 ** real(step)
        decay = np.where(np.arange(len(master)) < n_decayed, real(lr * weight_decay), real(0))
        master *= one - decay
        master -= real(lr) * (m / c1) / (np.sqrt(v / c2) + real(eps))

    found = dict(locals())
    return SimpleNamespace(**{n: f for n, f in found.items() if n not in ("store", "reduced")})


def _norms(store: Store) -> SimpleNamespace:
    def rmsnorm_forward(x: Array, gain: Array, *, eps: float) -> Any:
        total = in_order(x * x, -1)[..., None]  # one pass
        r = store(_like(1 / np.sqrt(total / x.dtype.type(x.shape[-1]) + x.dtype.type(eps)), x))
        n = store(x * r)
        return store(n * gain), (n, gain, r)

    def rmsnorm_backward(dout: Array, cache: Any, *, out: Array | None = None) -> Any:
        n, gain, r = cache
        dn = dout * gain
        c = in_order(dn * n, -1)[..., None] / n.dtype.type(n.shape[-1])
        dx = store((dn - n * c) * r)
        dgain = in_order((dout * n).reshape(-1, n.shape[-1]), 0)
        if out is not None:
            out[...] = dgain
        return dx, dgain

    def layernorm_forward(x: Array, gain: Array, bias: Array, *, eps: float) -> Any:
        # Welford's running mean and variance
        mean, m2 = np.zeros_like(x[..., 0]), np.zeros_like(x[..., 0])
        for i in range(x.shape[-1]):
            off = x[..., i] - mean
            mean = mean + off / x.dtype.type(i + 1)
            m2 = m2 + off * (x[..., i] - mean)
        r = (1 / np.sqrt(m2 / x.dtype.type(x.shape[-1]) + x.dtype.type(eps)))[..., None]
        n = store((x - mean[..., None]) * r)
        return store(gain * n + bias), (n, gain, r)

    def layernorm_backward(dout: Array, cache: Any, *, out: Any = None) -> Any:
        n, gain, r = cache
        width = n.dtype.type(n.shape[-1])
        dn = dout * gain
        a, b = in_order(dn, -1)[..., None], in_order(dn * n, -1)[..., None]
        dx = store(r / width * (width * dn - a - n * b))
        rows = dout.reshape(-1, n.shape[-1])
        dgain, dbias = in_order(rows * n.reshape(rows.shape), 0), in_order(rows, 0)
        for to, grad in zip(out or (), (dgain, dbias), strict=False):
            if to is not None:
                to[...] = grad
        return dx, dgain, dbias

    return SimpleNamespace(
        rmsnorm_forward=rmsnorm_forward,
        rmsnorm_backward=rmsnorm_backward,
        layernorm_forward=layernorm_forward,
        layernorm_backward=layernorm_backward,
    )


def _attention(store: Store) -> SimpleNamespace:
    """Tiled attention with an online softmax; the backward makes P again from lse."""
    tile = 16

    def scores(b: int, h: int, u: slice, a: Any) -> tuple[Array, Array]:
        """Return scores and who may be seen, for all queries of a head and one tile of keys."""
        q, k, T, S, scale = a.q, a.k, a.q.shape[1], a.k.shape[1], a.scale
        G = q.shape[2] // k.shape[2]
        s = (q[b, :, h] @ k[b, u, h // G].T) * scale
        t, at = np.arange(T)[:, None] + S - T, np.arange(S)[u][None, :]
        if a.alibi is not None:
            s = s + a.alibi[h] * (at - t).astype(s.dtype)
        seen = np.ones(s.shape, bool)
        if a.causal:
            seen &= at <= t
        if a.key_mask is not None:
            seen &= a.key_mask[b, u][None, :]
        if a.documents is not None:
            seen &= a.documents[b, S - T :, None] == a.documents[b, None, u]
        return s, seen

    def kept(b: int, h: int, u: slice, a: Any) -> Array | float:
        return 1.0 if a.keep is None else a.keep[b, h][:, u]

    def tiles(S: int) -> list[slice]:
        return [slice(i, min(i + tile, S)) for i in range(0, S, tile)]

    def attention_forward(
        q: Array,
        k: Array,
        v: Array,
        alibi: Array | None = None,
        key_mask: Array | None = None,
        documents: Array | None = None,
        *,
        causal: bool = True,
        scale: float | None = None,
        dropout_p: float = 0.0,
        dropout_key: Any = None,
    ) -> Any:
        B, T, Hq, d = q.shape
        S, Hkv, dv = v.shape[1:]
        keep = None
        if dropout_p:
            keep = keep_mask((B, Hq, T, S), dropout_p, dropout_key).astype(q.dtype)
            keep = keep / q.dtype.type(1 - dropout_p)
        a = SimpleNamespace(
            q=q,
            k=k,
            v=v,
            alibi=alibi,
            key_mask=key_mask,
            documents=documents,
            causal=causal,
            keep=keep,
            scale=q.dtype.type(1 / math.sqrt(d) if scale is None else scale),
        )
        out, lse = np.zeros((B, T, Hq, dv), q.dtype), np.full((B, Hq, T), np.inf, q.dtype)
        for b, h in np.ndindex(B, Hq):
            top = np.full(T, -np.inf, q.dtype)
            total, o = np.zeros(T, q.dtype), np.zeros((T, dv), q.dtype)
            for u in tiles(S):
                s, seen = scores(b, h, u, a)
                s = np.where(seen, s, -np.inf)
                new = np.maximum(top, s.max(-1))
                safe = np.where(np.isfinite(new), new, 0)
                p = np.exp(s - safe[:, None])
                shrink = np.where(np.isfinite(top), np.exp(top - safe), 0).astype(q.dtype)
                total = total * shrink + p.sum(-1)
                # P in bf16, where numbers are stored in bf16
                o = (
                    o * shrink[:, None]
                    + store(_like(p * kept(b, h, u, a), q)) @ v[b, u, h // (Hq // Hkv)]
                )
                top = new
            some = total != 0  # NaN is something
            out[b, some, h] = o[some] / total[some, None]
            lse[b, h, some] = top[some] + np.log(total[some])
        a.out, a.lse = store(out), lse
        return a.out, a

    def attention_backward(dout: Array, a: Any) -> Any:
        q, k, v = a.q, a.k, a.v
        dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        G = q.shape[2] // k.shape[2]
        for b, h in np.ndindex(q.shape[0], q.shape[2]):
            do = dout[b, :, h]
            D = np.sum(do * a.out[b, :, h], axis=-1)
            for u in tiles(k.shape[1]):
                s, seen = scores(b, h, u, a)
                p = np.exp(np.where(seen, s - a.lse[b, h][:, None], -np.inf))
                keep = kept(b, h, u, a)
                dv[b, u, h // G] += store(_like(p * keep, q)).T @ do
                ds = store(_like(p * ((do @ v[b, u, h // G].T) * keep - D[:, None]), q))
                dq[b, :, h] += (ds @ k[b, u, h // G]) * a.scale
                dk[b, u, h // G] += (ds.T @ q[b, :, h]) * a.scale
        return store(dq), store(dk), store(dv)

    return SimpleNamespace(
        attention_forward=attention_forward, attention_backward=attention_backward
    )


def _activations(store: Store) -> SimpleNamespace:
    erf = np.vectorize(math.erf, otypes=[np.float64])

    def sigmoid(x: Array) -> Array:
        with np.errstate(over="ignore"):
            return 1 / (1 + np.exp(-x))

    def swiglu_forward(x: Array) -> Any:
        gate, up = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return store(store(gate * sigmoid(gate)) * up), (gate, up)

    def swiglu_backward(dout: Array, cache: Any) -> Array:
        gate, up = cache
        s = store(sigmoid(gate))
        silu = gate * s
        return store(np.concatenate([dout * up * (s + silu * (1 - s)), dout * silu], axis=-1))

    def gelu_forward(x: Array) -> Any:
        phi = _like(0.5 * (1 + erf(x / math.sqrt(2))), x)
        return store(x * phi), (x, phi)

    def gelu_backward(dout: Array, cache: Any) -> Array:
        x, phi = cache
        return store(
            dout * (phi + x * np.exp(-0.5 * x * x) * x.dtype.type(1 / math.sqrt(2 * math.pi)))
        )

    def gelu_tanh_forward(x: Array) -> Any:
        # ½(1 + tanh z) is σ(2z)
        z = x.dtype.type(2 * math.sqrt(2 / math.pi)) * x * (1 + x.dtype.type(0.044715) * x * x)
        return store(x * sigmoid(z)), x

    def gelu_tanh_backward(dout: Array, x: Array) -> Array:
        c = x.dtype.type(2 * math.sqrt(2 / math.pi))
        s = sigmoid(c * (x + x.dtype.type(0.044715) * x**3))
        inner = c * (1 + x.dtype.type(3 * 0.044715) * x * x)
        return store(dout * (s + x * s * (1 - s) * inner))

    def relu_forward(x: Array) -> Any:
        return x * (x > 0), x > 0

    def relu_backward(dout: Array, positive: Array) -> Array:
        return dout * positive

    found = dict(locals())
    return SimpleNamespace(
        **{n: f for n, f in found.items() if n.endswith(("_forward", "_backward"))}
    )


def _loss(store: Store) -> SimpleNamespace:
    tile = 24

    def linear_cross_entropy_forward(
        x: Array,
        head: Array,
        targets: Array,
        mask: Array | None = None,
        bias: Array | None = None,
        *,
        need_backward: bool = True,
    ) -> Any:
        """Walk the vocabulary in tiles with an online log-sum-exp."""
        rows, y = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
        valid = np.ones(len(rows), bool) if mask is None else mask.reshape(-1)
        top, total = np.full(len(rows), -np.inf, x.dtype), np.zeros(len(rows), x.dtype)
        at_target = np.zeros(len(rows), x.dtype)
        for i in range(0, len(head), tile):
            z = store(rows @ head[i : i + tile].T + (0 if bias is None else bias[i : i + tile]))
            new = np.maximum(top, z.max(-1))
            total = total * np.exp(top - new) + np.exp(z - new[:, None]).sum(-1)
            top = new
            here = valid & (y >= i) & (y < i + tile)
            at_target[here] = z[here, y[here] - i]
        lse = top + np.log(total)
        loss = float(np.sum((lse - at_target)[valid]))
        return Loss(loss, int(valid.sum())), (x, head, np.where(valid, y, 0), valid, bias, lse)

    def linear_cross_entropy_backward(dloss: float, cache: Any, *, out: Any = None) -> Any:
        x, head, y, valid, bias, lse = cache
        rows = x.reshape(-1, x.shape[-1])
        p = np.exp(rows @ head.T + (0 if bias is None else bias) - lse[:, None])
        p[np.arange(len(rows)), y] -= 1
        dz = store(_like(p * valid[:, None] * x.dtype.type(dloss), x))
        dx, dhead = store(dz @ head).reshape(x.shape), dz.T @ rows
        dbias = None if bias is None else dz.sum(0)
        for to, grad in zip(out or (), (dhead, dbias), strict=False):
            if to is not None and grad is not None:
                to[...] = grad
        return dx, dhead, dbias

    return SimpleNamespace(
        linear_cross_entropy_forward=linear_cross_entropy_forward,
        linear_cross_entropy_backward=linear_cross_entropy_backward,
    )
