"""Right kernels that compute in ways of their own; ``EDITED`` are ``kernels.py`` in other orders.

``upcast`` and ``stored_as_bf16`` make more of any: computed in float64, and kept as bf16. And the
reference is right in bf16 step by step (``board/eager.py``).
"""

import math
from types import SimpleNamespace

import numba
import numpy as np

from accel.tolerance import round_bf16, round_tf32
from accel.verify.board.corpus import kernels as k
from accel.verify.board.corpus.build import SECTIONS, edited
from accel.verify.board.corpus.build import functions as built
from accel.verify.board.corpus.wrong import Wrong
from accel.verify.board.eager import stepwise
from accel.verify.contract import applies
from reference import ops
from reference.ops import OPS
from reference.types import Loss

# (op, name, edits): the same mathematics, in another order
EDITED = [
    ("attention", "tiles_of_5", (("range(0, T, TILE)", "range(0, T, 5)"), ("min(t0 + TILE, T)", "min(t0 + 5, T)"), ("range(low, high, TILE)", "range(low, high, 3)"), ("min(u0 + TILE, high)", "min(u0 + 3, high)"))),
    ("attention", "one_tile", (("range(0, T, TILE)", "range(0, T, 10**6)"), ("min(t0 + TILE, T)", "min(t0 + 10**6, T)"), ("range(low, high, TILE)", "range(low, high, 10**6)"), ("min(u0 + TILE, high)", "min(u0 + 10**6, high)"))),
    ("attention", "last_keys_first", (("for u0 in range(low, high, TILE):", "for u0 in reversed(range(low, high, TILE)):"),)),
    ("attention", "last_queries_first", (("for t0 in range(0, T, TILE):", "for t0 in reversed(range(0, T, TILE)):"),)),
    ("attention", "all_tiles_masked", (("return low, max(low, min(high, S))", "return 0, S"),)),
    ("attention", "scale_on_queries", (("who.scale * (q @ k.swapaxes(-1, -2))", "(q * q.dtype.type(who.scale)) @ k.swapaxes(-1, -2)"),)),
    ("attention", "einsum_scores", (("who.scale * (q @ k.swapaxes(-1, -2))", "who.scale * np.einsum('bhgtd,bhxsd->bhgts', q, k)"),)),
    ("attention", "base_two", (("np.exp(m - safe)", "np.exp2((m - safe) * q.dtype.type(math.log2(math.e)))"), ("np.exp(s - safe[..., None])", "np.exp2((s - safe[..., None]) * q.dtype.type(math.log2(math.e)))"))),
    ("linear", "inner_tiles_reversed", (("for k in range(0, I, ROWS):", "for k in reversed(range(0, I, ROWS)):"), ("for n in range(0, len(rows), ROWS):", "for n in reversed(range(0, len(rows), ROWS)):"))),
    ("linear", "tiles_of_3", (("range(0, I, ROWS)", "range(0, I, 3)"), ("k : k + ROWS", "k : k + 3"))),
    ("linear", "bias_first", (("    if bias is not None:\n        y += bias\n", ""), ("y = np.zeros((len(rows), O), x.dtype)\n", "y = np.zeros((len(rows), O), x.dtype)\n    if bias is not None:\n        y += bias\n"))),
    ("layernorm", "rows_reversed", (("for i in range(0, len(dy), ROWS):", "for i in reversed(range(0, len(dy), ROWS)):"),)),
    ("layernorm", "mean_corrected", (("    centred = x - mean\n", "    mean = mean + np.mean(x - mean, axis=-1, keepdims=True)\n    centred = x - mean\n"),)),
    ("rmsnorm", "einsum_squares", (("np.sum(x * x, axis=-1, keepdims=True)", "np.einsum('...d,...d->...', x, x)[..., None]"),)),
    ("rmsnorm", "gain_in_root", (("return x * rstd * gain, (x", "return x * (rstd * gain), (x"),)),
    ("linear_cross_entropy", "tiles_reversed", (("    for v0 in range(0, len(head), VOCABULARY):\n        z = x", "    for v0 in reversed(range(0, len(head), VOCABULARY)):\n        z = x"),)),
    ("linear_cross_entropy", "tiles_of_5", (("range(0, len(head), VOCABULARY)", "range(0, len(head), 5)"), ("v0 : v0 + VOCABULARY", "v0 : v0 + 5"))),
    ("linear_cross_entropy", "rows_of_2", (("range(0, len(rows), ROWS)", "range(0, len(rows), 2)"), ("i : i + ROWS", "i : i + 2"))),
    ("rope", "product_with_signs", (("a * cos - b * sin", "a * cos + b * -sin"), ("a * sin + b * cos", "b * cos + a * sin"))),
    ("softmax", "reciprocal", (("return e / np.sum(e, axis=-1, keepdims=True)", "return e * (1 / np.sum(e, axis=-1, keepdims=True))"),)),
    ("softmax", "log_sum_exp", (("return e / np.sum(e, axis=-1, keepdims=True)", "return np.exp((x - m) - np.log(np.sum(e, axis=-1, keepdims=True)))"),)),
    ("swiglu", "tanh_sigmoid", (("return np.where(x >= 0, 1 / (1 + z), z / (1 + z))", "return np.where(x >= -1, 0.5 * (1 + np.tanh(x / 2)), z / (1 + z)).astype(x.dtype)"),)),
    ("gelu_tanh", "as_products", (("x**3", "x * (x * x)"), ("x**2", "x * x"))),
    ("adamw", "one_block", (("range(0, len(master), 1024)", "range(0, len(master), 10**9)"), ("min(i + 1024, len(master))", "len(master)"))),
    ("adamw", "lerp", (("m[at] = beta1 * m[at] + (1 - beta1) * g", "m[at] += (1 - beta1) * (g - m[at])"),)),
    ("muon", "last_columns_first", (("for j in range(0, x.shape[1], ROWS):", "for j in reversed(range(0, x.shape[1], ROWS)):"),)),
    ("muon", "no_square_of_gram", (("x = 3.4445 * x + (2.0315 * (gram @ gram) - 4.7750 * gram) @ x", "y = gram @ x\n            x = 3.4445 * x - 4.7750 * y + 2.0315 * (gram @ y)"),)),
    ("muon", "averaged_and_scaled", (("m[:, at] = momentum * m[:, at] + g", "m[:, at] += g - (1 - momentum) * m[:, at]"),)),
    ("global_norm", "by_fsum", (("total += float(np.dot(part, part))", "total = math.fsum([total, *(part * part).tolist()])"),)),
    ("square_sums", "reversed", (("np.dot(part, part)", "np.sum((part * part)[::-1])"),)),
    ("embedding", "rows_one_by_one", (("y[i : i + ROWS] = table[flat[i : i + ROWS]]", "for j in range(i, min(i + ROWS, flat.size)):\n            y[j] = table[flat[j]]"),)),
    ("dropout", "product_of_mask", (("np.where(kept, x / (1 - p), x.dtype.type(0))", "np.where(kept, x * x.dtype.type(1 / (1 - p)), x.dtype.type(0))"),)),
    ("logits", "tiles_of_3", (("VOCABULARY", "3"),)),
]  # fmt: skip


def around(module, op, before=lambda value: value, after=lambda out, dtype: out, **more):
    """The same kernels, ``before`` done to all that goes in, and ``after`` to what comes out."""

    def forward(*arrays, **options):
        dtype = next(a.dtype for a in arrays if isinstance(a, np.ndarray) and a.dtype.kind == "f")
        given = {name: before(value) for name, value in options.items()}
        out = getattr(module, OPS[op].forward_name)(*map(before, arrays), **given)
        if not OPS[op].backward:
            return after(out, dtype)
        return after(out[0], dtype), (out[1], dtype)

    def backward(dout, cache):
        return after(getattr(module, f"{op}_backward")(before(dout), cache[0]), cache[1])

    return SimpleNamespace(**dict(zip(OPS[op].names, (forward, backward), strict=False)), **more)


def each(convert, value):
    """Convert an array, or those of a tuple."""
    if type(value) is tuple:  # not a loss, or a key
        return tuple(each(convert, v) for v in value)
    return convert(value) if isinstance(value, np.ndarray) and value.dtype.kind == "f" else value


def upcast(module, op):
    """The same kernels, computing in float64 and rounding what they give."""

    def wide(value):
        return each(lambda a: a.astype(np.float64), value)

    def narrow(out, dtype):
        return each(lambda a: a.astype(dtype), out)

    return around(module, op, wide, narrow)


def stored_as_bf16(module, op):
    """The same kernels, computing in float32 and giving bf16."""
    return around(module, op, after=lambda out, dtype: each(round_bf16, out), DTYPES="bf16")


def products_in_tf32(module, op):
    """The same kernels, the matrices of their products rounded to TF32, as tensor cores do."""

    def rounded(value):
        return each(lambda a: round_tf32(a) if a.ndim > 1 else a, value)

    return around(module, op, rounded, DTYPES="tf32")


# ---- ways of their own; a class is the op's functions --------------------------------------------


class AttentionRowByRow:
    op = "attention"

    def attention_forward(
        q, k, v, *, alibi=None, key_mask=None, documents=None, causal=True, window=0, scale=None
    ):
        B, T, H, d = q.shape
        S, Hkv, dv = v.shape[1:]
        scale = d**-0.5 if scale is None else scale
        out = np.zeros((B, T, H, dv), q.dtype)
        kept = {}
        for b in range(B):
            for h in range(H):
                keys, values = k[b, :, h * Hkv // H], v[b, :, h * Hkv // H]
                for t in range(T):
                    at, u = t + S - T, np.arange(S)
                    seen = np.ones(S, bool)
                    if causal:
                        seen &= u <= at
                    if window:
                        seen &= abs(at - u) < window
                    if key_mask is not None:
                        seen &= key_mask[b]
                    if documents is not None:
                        seen &= documents[b] == documents[b, at]
                    u = np.flatnonzero(seen)
                    if len(u) == 0:
                        continue
                    s = (keys[u] @ q[b, t, h]) * q.dtype.type(scale)
                    if alibi is not None:
                        s = s - alibi[h] * (at - u).astype(q.dtype)
                    p = np.exp(s - s.max())
                    p = p / p.sum()
                    out[b, t, h] = p @ values[u]
                    kept[b, t, h] = u, p
        return out, (q, k, v, scale, kept)

    def attention_backward(dout, cache):
        q, k, v, scale, kept = cache
        G = q.shape[2] // k.shape[2]
        dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        for (b, t, h), (u, p) in kept.items():
            do = dout[b, t, h]
            dp = v[b, u, h // G] @ do
            ds = p * (dp - p @ dp) * q.dtype.type(scale)
            dq[b, t, h] = ds @ k[b, u, h // G]
            dk[b, u, h // G] += ds[:, None] * q[b, t, h]
            dv[b, u, h // G] += p[:, None] * do
        return dq, dk, dv


class AttentionRepeated:
    """Key and value heads repeated, the whole table, lse kept instead of probabilities."""

    op = "attention"

    def attention_forward(q, k, v, *, key_mask=None, causal=True, window=0, scale=None):
        T, S, G = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
        scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
        kk, vv = np.repeat(k, G, axis=2), np.repeat(v, G, axis=2)
        s = scale * np.einsum("bthd,bshd->bhts", q, kk)
        distance = np.arange(S - T, S)[:, None] - np.arange(S)
        seen = np.ones((1, 1, T, S), bool)
        if causal:
            seen = seen & (distance >= 0)
        if window:
            seen = seen & (abs(distance) < window)
        if key_mask is not None:
            seen = seen & key_mask[:, None, None, :]
        m = np.where(seen, s, -np.inf).max(axis=-1, keepdims=True)
        m = np.where(np.isneginf(m), 0, m)
        l = np.where(seen, np.exp(np.minimum(s - m, 0)), 0).sum(axis=-1, keepdims=True)
        p = np.where(seen, np.exp(np.minimum(s - m, 0)), 0) / np.where(l > 0, l, 1)
        out = np.einsum("bhts,bshd->bthd", p, vv)
        return out, (q, kk, vv, p, scale, G)

    def attention_backward(dout, cache):
        q, kk, vv, p, scale, G = cache
        dp = np.einsum("bthd,bshd->bhts", dout, vv)
        ds = p * (dp - np.einsum("bhts,bhts->bht", dp, p)[..., None])

        def grouped(x):
            B, S, H, d = x.shape
            return x.reshape(B, S, H // G, G, d).sum(axis=3)

        dq = scale * np.einsum("bhts,bshd->bthd", ds, kk)
        dk = scale * np.einsum("bhts,bthd->bshd", ds, q)
        return dq, grouped(dk), grouped(np.einsum("bhts,bthd->bshd", p, dout))


class RopeComplex:
    op = "rope"

    def rope_forward(x, *, base, start=0, rotate_heads=None):
        B, T, H, d = x.shape
        t = (np.broadcast_to(start, (B,))[:, None] + np.arange(T)).astype(float)
        turn = np.exp(1j * t[:, :, None, None] * base ** (-2.0 * np.arange(d // 2) / d))
        heads = H if rotate_heads is None else rotate_heads
        return RopeComplex.turned(x, turn, heads), (turn, heads)

    def rope_backward(dout, cache):
        return RopeComplex.turned(dout, cache[0].conj(), cache[1])

    @staticmethod
    def turned(x, turn, heads):
        z = (x[..., 0::2].astype(np.float64) + 1j * x[..., 1::2])[:, :, :heads] * turn
        y = np.array(x)
        y[:, :, :heads, 0::2], y[:, :, :heads, 1::2] = z.real, z.imag
        return y


class RopeMatrix:
    op = "rope"

    def rope_forward(x, *, base, start=0, rotate_heads=None):
        B, T, H, d = x.shape
        t = np.broadcast_to(start, (B,))[:, None] + np.arange(T)
        a = t[..., None] * float(base) ** (-np.arange(0, d, 2) / d)
        R = np.array([[np.cos(a), -np.sin(a)], [np.sin(a), np.cos(a)]]).astype(x.dtype)
        heads = H if rotate_heads is None else rotate_heads
        pairs = x[:, :, :heads].reshape(B, T, heads, d // 2, 2)
        y = np.einsum("xybtj,bthjy->bthjx", R, pairs).reshape(B, T, heads, d)
        return np.concatenate([y, x[:, :, heads:]], axis=2), (R, heads)

    def rope_backward(dout, cache):
        R, heads = cache
        B, T, H, d = dout.shape
        pairs = dout[:, :, :heads].reshape(B, T, heads, d // 2, 2)
        dx = np.einsum("xybtj,bthjx->bthjy", R, pairs).reshape(B, T, heads, d)
        return np.concatenate([dx, dout[:, :, heads:]], axis=2)


class LayerNormWelford:
    op = "layernorm"

    def layernorm_forward(x, gain, bias, *, eps):
        D = x.shape[-1]
        mean, m2 = np.zeros(x.shape[:-1], x.dtype), np.zeros(x.shape[:-1], x.dtype)
        for i in range(D):
            delta = x[..., i] - mean
            mean = mean + delta / (i + 1)
            m2 = m2 + delta * (x[..., i] - mean)
        rstd = (1 / np.sqrt(m2 / D + eps))[..., None]
        n = (x - mean[..., None]) * rstd
        return n * gain + bias, (n, gain, rstd)

    def layernorm_backward(dout, cache):
        n, gain, rstd = cache
        D = n.shape[-1]
        dn = dout * gain
        dx = rstd / D * (D * dn - dn.sum(-1, keepdims=True) - n * (dn * n).sum(-1, keepdims=True))
        flat, rows = (dout * n).reshape(-1, D), dout.reshape(-1, D)
        return dx, flat.sum(axis=0), rows.sum(axis=0)


class RmsNormKahan:
    op = "rmsnorm"

    def kahan(terms):
        total, lost = (
            np.zeros(terms.shape[:-1], terms.dtype),
            np.zeros(terms.shape[:-1], terms.dtype),
        )
        for i in range(terms.shape[-1]):
            y = terms[..., i] - lost
            new = total + y
            lost = (new - total) - y
            total = new
        return total[..., None]

    def rmsnorm_forward(x, gain, *, eps):
        r = 1 / np.sqrt(RmsNormKahan.kahan(x * x) / x.shape[-1] + eps)
        return x * r * gain, (x, gain, r)

    def rmsnorm_backward(dout, cache):
        x, gain, r = cache
        D = x.shape[-1]
        dn = dout * gain
        dx = r * dn - r**3 * x * (RmsNormKahan.kahan(dn * x) / D)
        return dx, np.ascontiguousarray(
            np.einsum("nd,nd->d", dout.reshape(-1, D), (x * r).reshape(-1, D))
        )


class RmsNormByNorm:
    op = "rmsnorm"

    def rmsnorm_forward(x, gain, *, eps):
        D = x.shape[-1]
        r = 1 / np.hypot(np.linalg.norm(x, axis=-1, keepdims=True) / math.sqrt(D), math.sqrt(eps))
        return gain * (r * x), (x, gain, r)

    def rmsnorm_backward(dout, cache):
        return k.rmsnorm_backward(dout, cache)


class LinearEinsum:
    op = "linear"

    def linear_forward(x, weight, *, bias=None):
        y = np.einsum("...i,io->...o", x, weight)
        return (y if bias is None else y + bias), (x, weight, bias)

    def linear_backward(dout, cache):
        x, weight, bias = cache
        axes = tuple(range(x.ndim - 1))
        dweight = np.tensordot(x, dout, axes=(axes, axes))
        dbias = None if bias is None else np.einsum("no->o", dout.reshape(-1, weight.shape[1]))
        return np.einsum("...o,io->...i", dout, weight), dweight, dbias


class LossOfWholeLogits:
    op = "linear_cross_entropy"

    def linear_cross_entropy_forward(x, head, targets, *, mask=None, bias=None):
        z = x @ head.T if bias is None else x @ head.T + bias
        ok = np.ones(targets.shape, bool) if mask is None else mask
        y = np.where(ok, targets, 0)
        m = z.max(axis=-1, keepdims=True)
        logp = (z - m) - np.log(np.exp(z - m).sum(axis=-1, keepdims=True))
        losses = -np.take_along_axis(logp, y[..., None], axis=-1)[..., 0]
        return Loss(float(losses[ok].sum(dtype=np.float64)), int(ok.sum())), (
            x,
            head,
            y,
            ok,
            bias,
            logp,
        )

    def linear_cross_entropy_backward(dloss, cache):
        x, head, y, ok, bias, logp = cache
        dz = (np.exp(logp) - (y[..., None] == np.arange(len(head)))) * ok[..., None]
        dz = dz.astype(x.dtype) * x.dtype.type(dloss)
        rows = dz.reshape(-1, len(head))
        dbias = None if bias is None else rows.sum(axis=0)
        return dz @ head, rows.T @ x.reshape(-1, head.shape[1]), dbias


class EmbeddingOneHot:
    op = "embedding"

    def embedding_forward(ids, table):
        return np.take(table, ids, axis=0), (ids, table.shape)

    def embedding_backward(dout, cache):
        ids, shape = cache
        dtable = np.zeros(shape, dout.dtype)
        for i, row in zip(ids.reshape(-1), dout.reshape(-1, shape[1]), strict=True):
            dtable[i] += row
        return dtable


class SoftmaxOnline:
    op = "softmax"

    def softmax(x):
        m = np.full(x.shape[:-1], -np.inf, x.dtype)
        l = np.zeros(x.shape[:-1], x.dtype)
        with np.errstate(invalid="ignore"):
            for i in range(0, x.shape[-1], 7):
                new = np.maximum(m, x[..., i : i + 7].max(axis=-1))
                l = l * np.exp(m - new) + np.exp(x[..., i : i + 7] - new[..., None]).sum(axis=-1)
                m = new
            return np.exp(x - m[..., None]) / l[..., None]


class AdamWFolded:
    op = "adamw"

    def adamw(
        master, m, v, grad, *, step, lr, beta1, beta2, eps, weight_decay, n_decayed, grad_scale=1.0
    ):
        g = grad.astype(np.float64) * grad_scale
        first, second = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        lr_t = lr / (1 - beta1**step)
        root = math.sqrt(1 - beta2**step)
        decay = np.where(np.arange(len(master)) < n_decayed, lr * weight_decay, 0)
        new = master * (1 - decay) - lr_t * first / (np.sqrt(second) / root + eps)
        master[...], m[...], v[...] = new, first, second


class MuonOfWideMatrices:
    op = "muon"

    def muon(master, m, grad, *, lr, momentum, weight_decay, parts=None, grad_scale=1.0):
        m[...] = grad * grad_scale + momentum * m
        ahead = grad * grad_scale + momentum * m
        ends = np.cumsum(parts or m.shape[1:])
        for at, x in zip(ends, np.split(ahead, ends[:-1], 1), strict=True):
            where = np.s_[:, at - x.shape[1] : at]
            tall, longest = x.shape[0] > x.shape[1], max(x.shape)
            x = x.T if tall else x
            x = x / max(math.sqrt(np.sum(np.square(x, dtype=np.float64))), 1e-30)
            for _ in range(5):
                s = x @ x.T
                x = 3.4445 * x + (s @ s * 2.0315 - s * 4.7750) @ x
            step = 0.2 * math.sqrt(longest) * (x.T if tall else x)
            master[where] = master[where] * (1 - lr * weight_decay) - lr * step


class GeluTanhAsSigmoid:
    op = "gelu_tanh"

    def gelu_tanh_forward(x):
        u = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return x * k.sigmoid(u), x

    def gelu_tanh_backward(dout, x):
        c = 2 * math.sqrt(2 / math.pi)
        s = k.sigmoid(c * (x + 0.044715 * x * x * x))
        return dout * (s + x * s * (1 - s) * c * (1 + 3 * 0.044715 * x * x))


@numba.njit
def _rms(x, gain, eps, y, r):
    for n in range(x.shape[0]):
        total = x.dtype.type(0)
        for i in range(x.shape[1]):
            total += x[n, i] * x[n, i]
        r[n] = 1 / np.sqrt(total / x.shape[1] + eps)
        for i in range(x.shape[1]):
            y[n, i] = x[n, i] * r[n] * gain[i]


class RmsNormNumba:
    op = "rmsnorm"

    def rmsnorm_forward(x, gain, *, eps):
        rows = np.ascontiguousarray(x.reshape(-1, x.shape[-1]))
        y, r = np.empty_like(rows), np.empty(len(rows), x.dtype)
        _rms(rows, np.ascontiguousarray(gain), x.dtype.type(eps), y, r)
        return y.reshape(x.shape), (x, gain, r.reshape(*x.shape[:-1], 1))

    def rmsnorm_backward(dout, cache):
        return k.rmsnorm_backward(dout, cache)


@numba.njit
def _softmax(x, y):
    for n in range(x.shape[0]):
        m = x[n, 0]
        for i in range(x.shape[1]):
            if x[n, i] > m or np.isnan(x[n, i]):
                m = x[n, i]
        total = x.dtype.type(0)
        for i in range(x.shape[1]):
            y[n, i] = np.exp(x[n, i] - m)
            total += y[n, i]
        for i in range(x.shape[1]):
            y[n, i] /= total


class SoftmaxNumba:
    op = "softmax"

    def softmax(x):
        rows = np.ascontiguousarray(x.reshape(-1, x.shape[-1]))
        y = np.empty_like(rows)
        _softmax(rows, y)
        return y.reshape(x.shape)


@numba.njit
def _matmul(a, b, c):
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            total = a.dtype.type(0)
            for n in range(a.shape[1]):
                total += a[i, n] * b[n, j]
            c[i, j] = total


def _times(a, b):
    c = np.empty((a.shape[0], b.shape[1]), a.dtype)
    _matmul(np.ascontiguousarray(a), np.ascontiguousarray(b), c)
    return c


class LinearNumba:
    op = "linear"

    def linear_forward(x, weight, *, bias=None):
        y = _times(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], weight.shape[1])
        return (y if bias is None else y + bias), (x, weight, bias)

    def linear_backward(dout, cache):
        x, weight, bias = cache
        rows, dy = x.reshape(-1, x.shape[-1]), dout.reshape(-1, weight.shape[1])
        dbias = None if bias is None else dy.sum(axis=0)
        return _times(dy, weight.T).reshape(x.shape), _times(rows.T, dy), dbias


OWN = [v for v in list(globals().values()) if isinstance(getattr(v, "op", None), str)]


def all_right(op):
    """(name, kind, module) of every right kernel of an op of NumPy and Numba."""
    if op in SECTIONS:
        yield "tiled", "NumPy", built(edited(Wrong(op, "", "", "", (), "")), op)
    for of, name, edits in EDITED:
        if of == op:
            yield name, "NumPy", built(edited(Wrong(op, name, "", "", edits, "")), op)
    for cls in OWN:
        if cls.op == op:
            kind = "Numba" if cls.__name__.endswith("Numba") else "NumPy"
            functions = {name: vars(cls)[name] for name in OPS[op].names}
            yield cls.__name__, kind, SimpleNamespace(**functions)
    if op in ("attention", "layernorm", "rmsnorm", "linear", "swiglu", "linear_cross_entropy"):
        yield "upcast", "float64 inside", upcast(k, op)
        yield "stored_as_bf16", "bf16", stored_as_bf16(k, op)
    if op == "rope":
        yield "stored_as_bf16", "bf16", stored_as_bf16(k, op)
    if op == "softmax":
        yield "upcast", "float64 inside", upcast(k, op)
        yield "stored_as_bf16", "bf16", stored_as_bf16(k, op)
    if applies(OPS[op], "bf16") and not OPS[op].written:
        yield "rounded_step_by_step", "bf16", stepwise(ops, op)
    if op in ("attention", "linear", "linear_cross_entropy", "logits"):
        yield "products_in_tf32", "tf32", products_in_tf32(k, op)
