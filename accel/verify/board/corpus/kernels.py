"""Every op of the contract once more, the way kernels do it: tile by tile, with running sums.

Right in float32 and float64; ``wrong.py`` says where one line of it goes wrong. A section begins
with its op's name between four dashes and may be read on its own.
"""

import math
from types import SimpleNamespace

import numpy as np

from reference.types import KVCache, Loss

TILE = 32  # positions of one tile of attention
ROWS = 64  # rows that one block of a reduction takes
VOCABULARY = 256  # entries of one tile of the head


def receive(gradients, out):
    """Copy parameter gradients into the arrays that ``out`` gives."""
    out = out if isinstance(out, tuple | list) else (out,) * len(gradients)
    for gradient, receiver in zip(gradients, out, strict=True):
        if receiver is not None and gradient is not None:
            receiver[...] = gradient


# ---- add ----


def sum_to(dout, shape):
    while dout.ndim > len(shape):
        dout = dout.sum(axis=0)
    for axis, n in enumerate(shape):
        if n == 1 and dout.shape[axis] != 1:
            dout = dout.sum(axis=axis, keepdims=True)
    return dout


def add_forward(a, b):
    return np.add(a, b), (a.shape, b.shape)


def add_backward(dout, cache):
    a_shape, b_shape = cache
    return sum_to(dout, a_shape).copy(), sum_to(dout, b_shape).copy()


# ---- scale ----


def scale_forward(x, *, factor, out=None):
    y = np.multiply(x, x.dtype.type(factor))
    if out is not None:
        out[...] = y
        y = out
    return y, factor


def scale_backward(dout, factor):
    return dout * dout.dtype.type(factor)


# ---- embedding ----


def embedding_forward(ids, table):
    flat = ids.reshape(-1)
    y = np.empty((flat.size, table.shape[1]), table.dtype)
    for i in range(0, flat.size, ROWS):
        y[i : i + ROWS] = table[flat[i : i + ROWS]]
    return y.reshape(*ids.shape, table.shape[1]), (ids, table.shape)


def embedding_backward(dout, cache, *, out=None, accumulate=False):
    ids, shape = cache
    flat, rows = ids.reshape(-1), dout.reshape(-1, shape[1])
    order = np.argsort(flat, kind="stable")
    dtable = np.zeros(shape, dout.dtype)
    sorted_ids = flat[order]
    ends = np.flatnonzero(np.diff(sorted_ids, append=-1)) + 1
    begin = 0
    for end in ends:
        dtable[sorted_ids[begin]] = rows[order[begin:end]].sum(axis=0)
        begin = end
    if out is not None:
        if isinstance(out, tuple):
            out = out[0]
        if accumulate:
            dtable = out + dtable
        out[...] = dtable
    return dtable


# ---- linear ----


def linear_forward(x, weight, bias=None, *, keep_x=True):
    I, O = weight.shape
    rows = x.reshape(-1, I)
    y = np.zeros((len(rows), O), x.dtype)
    for k in range(0, I, ROWS):
        y += rows[:, k : k + ROWS] @ weight[k : k + ROWS]
    if bias is not None:
        y += bias
    return y.reshape(*x.shape[:-1], O), (x if keep_x else None, weight, bias is not None)


def linear_backward(dout, cache, *, x=None, out=(None, None)):
    kept, weight, has_bias = cache
    x = kept if x is None else x
    I, O = weight.shape
    rows, dy = x.reshape(-1, I), dout.reshape(-1, O)
    dweight = np.zeros((I, O), dout.dtype)
    dbias = np.zeros(O, dout.dtype)
    for n in range(0, len(rows), ROWS):
        dweight += rows[n : n + ROWS].T @ dy[n : n + ROWS]
        dbias += dy[n : n + ROWS].sum(axis=0)
    dx = (dy @ weight.T).reshape(x.shape)
    dbias = dbias if has_bias else None
    receive((dweight, dbias), out)
    return dx, dweight, dbias


# ---- split_heads ----


def split_heads_forward(x, *, heads):
    parts, begin = [], 0
    for n in heads:
        parts.append(np.ascontiguousarray(x[:, :, begin : begin + n]))
        begin += n
    return tuple(parts), x.shape


def split_heads_backward(dout, shape):
    dx = np.empty(shape, dout[0].dtype)
    begin = 0
    for part in dout:
        n = part.shape[2]
        dx[:, :, begin : begin + n] = part
        begin += n
    return dx


# ---- merge_heads ----


def merge_heads_forward(x):
    B, T, H, d = x.shape
    y = np.empty((B, T, H * d), x.dtype)
    for h in range(H):
        y[:, :, h * d : (h + 1) * d] = x[:, :, h]
    return y, x.shape


def merge_heads_backward(dout, shape):
    B, T, H, d = shape
    dx = np.empty(shape, dout.dtype)
    for h in range(H):
        dx[:, :, h] = dout[:, :, h * d : (h + 1) * d]
    return dx


# ---- rmsnorm ----


def rmsnorm_forward(x, gain, *, eps):
    D = x.shape[-1]
    square = np.sum(x * x, axis=-1, keepdims=True) / D
    rstd = 1 / np.sqrt(square + x.dtype.type(eps))
    return x * rstd * gain, (x, gain, rstd)


def rmsnorm_backward(dout, cache, *, out=None):
    x, gain, rstd = cache
    D = x.shape[-1]
    n = x * rstd
    dn = dout * gain
    dot = np.sum(dn * n, axis=-1, keepdims=True) / D
    dx = rstd * (dn - n * dot)
    flat = (dout * n).reshape(-1, D)
    dgain = np.zeros(D, dout.dtype)
    for i in range(0, len(flat), ROWS):
        dgain += flat[i : i + ROWS].sum(axis=0)
    receive((dgain,), out)
    return dx, dgain


# ---- layernorm ----


def layernorm_forward(x, gain, bias, *, eps):
    D = x.shape[-1]
    mean = np.sum(x, axis=-1, keepdims=True) / D
    centred = x - mean
    var = np.sum(centred * centred, axis=-1, keepdims=True) / D
    rstd = 1 / np.sqrt(var + x.dtype.type(eps))
    y = centred * rstd * gain + bias
    return y, (x, gain, mean, rstd)


def layernorm_backward(dout, cache, *, out=(None, None)):
    x, gain, mean, rstd = cache
    D = x.shape[-1]
    n = (x - mean) * rstd
    dn = dout * gain
    mean_dn = np.sum(dn, axis=-1, keepdims=True) / D
    mean_dn_n = np.sum(dn * n, axis=-1, keepdims=True) / D
    dx = rstd * (dn - mean_dn - n * mean_dn_n)
    dy, normed = dout.reshape(-1, D), n.reshape(-1, D)
    dgain, dbias = np.zeros(D, dout.dtype), np.zeros(D, dout.dtype)
    for i in range(0, len(dy), ROWS):
        dgain += (dy[i : i + ROWS] * normed[i : i + ROWS]).sum(axis=0)
        dbias += dy[i : i + ROWS].sum(axis=0)
    receive((dgain, dbias), out)
    return dx, dgain, dbias


# ---- rope ----


def turned(x, cos, sin, heads):
    y = x.copy()
    a, b = x[:, :, :heads, 0::2], x[:, :, :heads, 1::2]
    y[:, :, :heads, 0::2] = a * cos - b * sin
    y[:, :, :heads, 1::2] = a * sin + b * cos
    return y


def rope_forward(x, *, base, start=0, rotate_heads=None, scaling=None):
    B, T, H, d = x.shape
    rotate_heads = H if rotate_heads is None else rotate_heads
    exponents = np.arange(0, d, 2) / d
    frequencies = np.power(float(base), -exponents)
    if scaling is not None:
        wavelengths = 2 * np.pi / frequencies
        turns = scaling.original_context / wavelengths
        band = scaling.high_freq_factor - scaling.low_freq_factor
        blend = np.minimum(np.maximum((turns - scaling.low_freq_factor) / band, 0), 1)
        frequencies = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    first = np.broadcast_to(np.asarray(start, np.int64), (B,))
    positions = first[:, None] + np.arange(T)[None, :]
    angles = positions[:, :, None, None] * frequencies
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    return turned(x, cos, sin, rotate_heads), (cos, sin, rotate_heads)


def rope_backward(dout, cache):
    cos, sin, rotate_heads = cache
    return turned(dout, cos, -sin, rotate_heads)


# ---- attention ----


def key_range(t0, t1, T, S, causal, window):
    shift = S - T
    low, high = 0, S
    if window:
        low = t0 + shift - window + 1
    if causal:
        high = t1 + shift
    elif window:
        high = t1 + shift + window - 1
    low = min(max(low, 0), S)
    return low, max(low, min(high, S))


def visible(t, u, who):
    """Whether queries at positions t (T,) see keys u (S,): (1 or B, T, S)."""
    distance = t[:, None] - u[None, :]
    may = np.ones((1, len(t), len(u)), bool)
    if who.causal:
        may = may & (distance >= 0)
    if who.window:
        may = may & (np.abs(distance) < who.window)
    if who.key_mask is not None:
        may = may & who.key_mask[:, None, u]
    if who.documents is not None:
        may = may & (who.documents[:, t, None] == who.documents[:, None, u])
    return may


def scores(q, k, t, u, who):
    """Scores of one tile, (B, Hkv, G, T, S), -inf where unseen."""
    s = who.scale * (q @ k.swapaxes(-1, -2))
    if who.alibi is not None:
        slopes = who.alibi.reshape(q.shape[1], q.shape[2], 1, 1)
        s = s - slopes * (t[:, None] - u[None, :]).astype(s.dtype)
    return np.where(visible(t, u, who)[:, None, None], s, -np.inf)


def attention_forward(
    q,
    k,
    v,
    *,
    alibi=None,
    key_mask=None,
    documents=None,
    causal=True,
    window=0,
    scale=None,
    dropout_p=0.0,
    dropout_key=None,
):
    B, T, Hq, d = q.shape
    S, Hkv, dv = v.shape[1:]
    G = Hq // Hkv
    scale = 1 / math.sqrt(d) if scale is None else float(scale)
    who = SimpleNamespace(
        causal=causal, window=window, alibi=alibi, key_mask=key_mask, documents=documents
    )
    who.scale = scale
    qh = q.reshape(B, T, Hkv, G, d).transpose(0, 2, 3, 1, 4)
    kh = k.transpose(0, 2, 1, 3)[:, :, None]
    vh = v.transpose(0, 2, 1, 3)[:, :, None]
    kappa = None
    if dropout_p > 0:
        kept = keep_mask(B, Hq * T * S, dropout_p, dropout_key)
        kappa = kept.reshape(B, Hkv, G, T, S).astype(q.dtype) / (1 - dropout_p)
    o = np.zeros((B, Hkv, G, T, dv), q.dtype)
    lse = np.full((B, Hkv, G, T), np.inf, q.dtype)
    shift = S - T
    for t0 in range(0, T, TILE):
        t1 = min(t0 + TILE, T)
        m = np.full((B, Hkv, G, t1 - t0), -np.inf, q.dtype)
        l = np.zeros_like(m)
        total = np.zeros((B, Hkv, G, t1 - t0, dv), q.dtype)
        low, high = key_range(t0, t1, T, S, causal, window)
        for u0 in range(low, high, TILE):
            u1 = min(u0 + TILE, high)
            t, u = np.arange(t0, t1) + shift, np.arange(u0, u1)
            s = scores(qh[..., t0:t1, :], kh[..., u0:u1, :], t, u, who)
            new = np.maximum(m, s.max(axis=-1))
            safe = np.where(new == -np.inf, 0, new)
            shrink = np.exp(m - safe)
            p = np.exp(s - safe[..., None])
            l = l * shrink + p.sum(axis=-1)
            if kappa is not None:
                p = p * kappa[..., t0:t1, u0:u1]
            total = total * shrink[..., None] + p @ vh[..., u0:u1, :]
            m = new
        seen = l != 0
        o[..., t0:t1, :] = total / np.where(seen, l, 1)[..., None]
        lse[..., t0:t1] = np.where(seen, m + np.log(np.where(seen, l, 1)), np.inf)
    out = np.ascontiguousarray(o.transpose(0, 3, 1, 2, 4).reshape(B, T, Hq, dv))
    return out, (qh, kh, vh, o, lse, kappa, who)


def attention_backward(dout, cache):
    qh, kh, vh, o, lse, kappa, who = cache
    B, Hkv, G, T, d = qh.shape
    S, dv = vh.shape[-2:]
    do = dout.reshape(B, T, Hkv, G, dv).transpose(0, 2, 3, 1, 4)
    delta = np.sum(do * o, axis=-1)
    dq = np.zeros(qh.shape, dout.dtype)
    dk = np.zeros((B, Hkv, S, d), dout.dtype)
    dvalue = np.zeros((B, Hkv, S, dv), dout.dtype)
    shift = S - T
    for t0 in range(0, T, TILE):
        t1 = min(t0 + TILE, T)
        low, high = key_range(t0, t1, T, S, who.causal, who.window)
        for u0 in range(low, high, TILE):
            u1 = min(u0 + TILE, high)
            t, u = np.arange(t0, t1) + shift, np.arange(u0, u1)
            s = scores(qh[..., t0:t1, :], kh[..., u0:u1, :], t, u, who)
            p = np.exp(s - lse[..., t0:t1, None])
            dp = do[..., t0:t1, :] @ vh[..., u0:u1, :].swapaxes(-1, -2)
            kept = p
            if kappa is not None:
                kept = p * kappa[..., t0:t1, u0:u1]
                dp = dp * kappa[..., t0:t1, u0:u1]
            ds = p * (dp - delta[..., t0:t1, None])
            dvalue[:, :, u0:u1] += (kept.swapaxes(-1, -2) @ do[..., t0:t1, :]).sum(axis=2)
            dq[..., t0:t1, :] += who.scale * (ds @ kh[..., u0:u1, :])
            dk[:, :, u0:u1] += who.scale * (ds.swapaxes(-1, -2) @ qh[..., t0:t1, :]).sum(axis=2)
    return (
        dq.transpose(0, 3, 1, 2, 4).reshape(B, T, Hkv * G, d),
        dk.transpose(0, 2, 1, 3),
        dvalue.transpose(0, 2, 1, 3),
    )


# ---- swiglu ----


def sigmoid(x):
    z = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + z), z / (1 + z))


def swiglu_forward(x):
    F = x.shape[-1] // 2
    gate, up = x[..., :F], x[..., F:]
    return gate * sigmoid(gate) * up, x


def swiglu_backward(dout, x):
    F = x.shape[-1] // 2
    gate, up = x[..., :F], x[..., F:]
    s = sigmoid(gate)
    dx = np.empty(x.shape, dout.dtype)
    dx[..., :F] = dout * up * (s + gate * s * (1 - s))
    dx[..., F:] = dout * gate * s
    return dx


# ---- gelu ----


def cdf(x):
    values = [math.erfc(-float(value) / math.sqrt(2)) / 2 for value in x.reshape(-1)]
    return np.array(values, x.dtype).reshape(x.shape)


def gelu_forward(x):
    return x * cdf(x), x


def gelu_backward(dout, x):
    density = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return dout * (cdf(x) + x * density)


# ---- gelu_tanh ----


def gelu_tanh_forward(x):
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + np.tanh(inner)), x


def gelu_tanh_backward(dout, x):
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    h = np.tanh(inner)
    dinner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return dout * (0.5 * (1 + h) + 0.5 * x * (1 - h * h) * dinner)


# ---- relu ----


def relu_forward(x):
    return np.where(x <= 0, x.dtype.type(0), x), x


def relu_backward(dout, x):
    return np.where(x > 0, dout, dout.dtype.type(0))


# ---- dropout ----


def philox_rounds(c0, c1, c2, c3, k0, k1):
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (b >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            b & low,
            (a >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            a & low,
        )
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return np.stack([c0, c1, c2, c3], axis=-1)


def keep_mask(batch, size, p, key):
    blocks = (size + 3) // 4
    c0 = np.broadcast_to(np.arange(blocks, dtype=np.uint64)[None, :], (batch, blocks))
    samples = np.uint64(key.sample) + np.arange(batch, dtype=np.uint64)
    c1 = np.broadcast_to(samples[:, None], (batch, blocks))
    c2 = np.full((batch, blocks), key.step, np.uint64)
    c3 = np.full((batch, blocks), key.site, np.uint64)
    words = philox_rounds(c0, c1, c2, c3, key.seed % 2**32, key.seed >> 32)
    threshold = math.floor(p * 2**32)
    return words.reshape(batch, 4 * blocks)[:, :size] >= threshold


def dropout_forward(x, *, p, key=None):
    if p == 0 or key is None:
        return x.copy(), None
    kept = keep_mask(x.shape[0], math.prod(x.shape[1:]), p, key).reshape(x.shape)
    return np.where(kept, x / (1 - p), x.dtype.type(0)), (kept, p)


def dropout_backward(dout, cache):
    if cache is None:
        return dout.copy()
    kept, p = cache
    return np.where(kept, dout / (1 - p), dout.dtype.type(0))


# ---- linear_cross_entropy ----


def row_lse(x, head, bias):
    """log Σ exp of each row of logits, a tile of the vocabulary at a time."""
    m = np.full(len(x), -np.inf, x.dtype)
    l = np.zeros(len(x), x.dtype)
    for v0 in range(0, len(head), VOCABULARY):
        z = x @ head[v0 : v0 + VOCABULARY].T
        if bias is not None:
            z = z + bias[v0 : v0 + VOCABULARY]
        new = np.maximum(m, z.max(axis=-1))
        l = l * np.exp(m - new) + np.exp(z - new[:, None]).sum(axis=-1)
        m = new
    return m + np.log(l)


def linear_cross_entropy_forward(x, head, targets, *, mask=None, bias=None, need_backward=True):
    D = x.shape[-1]
    rows, y = x.reshape(-1, D), targets.reshape(-1)
    valid = np.ones(len(y), bool) if mask is None else mask.reshape(-1)
    y = np.where(valid, y, 0)
    total = 0.0
    lse = np.zeros(len(rows), x.dtype)
    for i in range(0, len(rows), ROWS):
        block = rows[i : i + ROWS]
        lse[i : i + ROWS] = row_lse(block, head, bias)
        at = np.sum(block * head[y[i : i + ROWS]], axis=-1)
        if bias is not None:
            at = at + bias[y[i : i + ROWS]]
        losses = (lse[i : i + ROWS] - at).astype(np.float64)
        total += float(np.sum(losses, where=valid[i : i + ROWS]))
    loss = Loss(total, int(valid.sum()))
    return loss, (rows, head, y, valid, bias, lse, x.shape)


def linear_cross_entropy_backward(dloss, cache, *, out=(None, None)):
    rows, head, y, valid, bias, lse, shape = cache
    dx = np.zeros(rows.shape, rows.dtype)
    dhead = np.zeros(head.shape, head.dtype)
    dbias = None if bias is None else np.zeros(bias.shape, bias.dtype)
    for i in range(0, len(rows), ROWS):
        block, ys, ok = rows[i : i + ROWS], y[i : i + ROWS], valid[i : i + ROWS]
        for v0 in range(0, len(head), VOCABULARY):
            tile = head[v0 : v0 + VOCABULARY]
            z = block @ tile.T
            if bias is not None:
                z = z + bias[v0 : v0 + VOCABULARY]
            p = np.exp(z - lse[i : i + ROWS, None])
            hit = ys[:, None] == np.arange(v0, v0 + len(tile))[None, :]
            dz = np.where(ok[:, None], p - hit, 0).astype(rows.dtype) * float(dloss)
            dx[i : i + ROWS] += dz @ tile
            dhead[v0 : v0 + VOCABULARY] += dz.T @ block
            if dbias is not None:
                dbias[v0 : v0 + VOCABULARY] += dz.sum(axis=0)
    receive((dhead, dbias), out)
    return dx.reshape(shape), dhead, dbias


# ---- softmax ----


def softmax(x):
    m = np.max(x, axis=-1, keepdims=True)
    e = np.exp(x - m)
    return e / np.sum(e, axis=-1, keepdims=True)


# ---- logits ----


def logits(x, head, *, bias=None):
    V, D = head.shape
    rows = x.reshape(-1, D)
    z = np.empty((len(rows), V), x.dtype)
    for v0 in range(0, V, VOCABULARY):
        z[:, v0 : v0 + VOCABULARY] = rows @ head[v0 : v0 + VOCABULARY].T
    if bias is not None:
        z += bias
    return z.reshape(*x.shape[:-1], V)


# ---- square_sums ----


def square_sums(x):
    blocks = -(-len(x) // 65536)
    sums = np.zeros(blocks)
    for b in range(blocks):
        part = x[b * 65536 : (b + 1) * 65536].astype(np.float64)
        sums[b] = np.dot(part, part)
    return sums


# ---- global_norm ----


def global_norm(x):
    total = 0.0
    for i in range(0, len(x), 65536):
        part = x[i : i + 65536].astype(np.float64)
        total += float(np.dot(part, part))
    return math.sqrt(total)


# ---- accumulate ----


def accumulate(dst, src):
    np.add(dst, src, out=dst)


# ---- adamw ----


def adamw(
    master,
    m,
    v,
    grad,
    *,
    step,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    n_decayed,
    grad_scale=1.0,
):
    bias1 = 1 - beta1**step
    bias2 = 1 - beta2**step
    for i in range(0, len(master), 1024):
        at = slice(i, min(i + 1024, len(master)))
        g = grad[at] * grad_scale
        m[at] = beta1 * m[at] + (1 - beta1) * g
        v[at] = beta2 * v[at] + (1 - beta2) * g * g
        update = (m[at] / bias1) / (np.sqrt(v[at] / bias2) + eps)
        decayed = max(0, min(n_decayed - i, at.stop - i))
        update[:decayed] += weight_decay * master[at][:decayed]
        master[at] -= lr * update


# ---- muon ----


def muon(master, m, grad, *, lr, momentum, weight_decay, parts=None, grad_scale=1.0):
    rows, first = len(master), 0
    for width in parts or master.shape[1:]:
        at = slice(first, first + width)
        first += width
        g = grad[:, at] * grad_scale
        m[:, at] = momentum * m[:, at] + g
        x = momentum * m[:, at] + g
        tall = rows > width
        x = x.T if tall else x
        squares = 0.0
        for i in range(0, len(x), ROWS):
            squares += float(np.sum(x[i : i + ROWS].astype(np.float64) ** 2))
        x = x / max(math.sqrt(squares), 1e-30)
        for _ in range(5):
            gram = np.zeros((len(x), len(x)), x.dtype)
            for j in range(0, x.shape[1], ROWS):
                block = x[:, j : j + ROWS]
                gram += block @ block.T
            x = 3.4445 * x + (2.0315 * (gram @ gram) - 4.7750 * gram) @ x
        update = 0.2 * math.sqrt(max(rows, width)) * (x.T if tall else x)
        master[:, at] -= lr * (update + weight_decay * master[:, at])


# ---- kv_cache ----


def kept_slots(config, layer, length):
    window = config.window_of(layer)
    if window and config.position != "alibi":
        return min(length, window)
    return length


def kv_cache(params, config, batch, length):
    if not 1 <= length <= config.context_length:
        raise ValueError(f"length must lie in 1..{config.context_length}, got {length}")
    dtype = params["embedding.weight"].dtype
    keys, values = [], []
    for layer in range(config.n_layers):
        shape = (batch, kept_slots(config, layer, length), config.n_kv_heads, config.d_head)
        keys.append(np.zeros(shape, dtype))
        values.append(np.zeros(shape, dtype))
    return KVCache(keys, values)


# ---- write_kv ----


def write_kv(cache, k, v, *, layer, position):
    first = np.broadcast_to(np.asarray(position), (k.shape[0],))
    T = k.shape[1]
    for b in range(k.shape[0]):
        p = int(first[b])
        cache.k[layer][b, p : p + T] = k[b]
        cache.v[layer][b, p : p + T] = v[b]


# ---- decode_step ----


def normed(params, config, name, x):
    gain = params[f"{name}.gain"]
    if config.norm == "layernorm":
        return layernorm_forward(x, gain, params[f"{name}.bias"], eps=config.norm_eps)[0]
    return rmsnorm_forward(x, gain, eps=config.norm_eps)[0]


def projected(params, weight, bias, x):
    y = x @ params[weight]
    return y + params[bias] if bias in params else y


def rotated(config, x, positions):
    """x (B, H, d) turned by each row's position."""
    if config.position != "rope":
        return x
    scaling = config.rope_scaling
    turned = rope_forward(x[:, None], base=config.rope_base, start=positions, scaling=scaling)
    return turned[0][:, 0]


def slopes_of(n):
    def geometric(count):
        return [2.0 ** (-8.0 * (i + 1) / count) for i in range(count)]

    lower = 1
    while 2 * lower <= n:
        lower *= 2
    return np.array(geometric(lower) + geometric(2 * lower)[0::2][: n - lower])


def attended(config, q, k, v, positions, window, ring):
    """One query a row over the slots of its layer: q (B, Hq, d), k and v (B, S, Hkv, d)."""
    B, Hq, d = q.shape
    S, Hkv = k.shape[1:3]
    G = Hq // Hkv
    slot = np.arange(S)[None, :]
    where = positions[:, None] - (positions[:, None] - slot) % ring
    may = where >= 0
    if window:
        may = may & (positions[:, None] - where < window)
    s = np.einsum("bhgd,bshd->bhgs", q.reshape(B, Hkv, G, d), k) / math.sqrt(d)
    if config.position == "alibi":
        distance = (positions[:, None] - where).astype(q.dtype)
        m = slopes_of(Hq).astype(q.dtype).reshape(1, Hkv, G, 1)
        s = s - m * distance[:, None, None, :]
    s = np.where(may[:, None, None], s, -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    p = p / p.sum(axis=-1, keepdims=True)
    return np.einsum("bhgs,bshd->bhgd", p, v).reshape(B, Hq * d)


def ffn(params, config, name, x):
    if config.ffn == "swiglu":
        h = projected(params, f"{name}.w_gate_up", f"{name}.b_gate_up", x)
        h = swiglu_forward(h)[0]
    else:
        h = projected(params, f"{name}.w_up", f"{name}.b_up", x)
        h = {"gelu": gelu_forward, "gelu_tanh": gelu_tanh_forward, "relu": relu_forward}[
            config.ffn
        ](h)[0]
    return projected(params, f"{name}.w_down", f"{name}.b_down", h)


def decode_step(params, config, token, cache, position):
    B, D = len(token), config.d_model
    Hq, Hkv, d = config.n_heads, config.n_kv_heads, config.d_head
    positions = np.broadcast_to(np.asarray(position), (B,)).astype(np.int64)
    x = params["embedding.weight"][token]
    if config.position == "learned":
        x = x + params["position.weight"][positions]
    if config.position == "sinusoidal":
        angle = positions[:, None] * 10000.0 ** (-np.arange(0, D, 2) / D)
        waves = np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(B, D)
        x = x + waves.astype(x.dtype)
    pre = config.norm_placement == "pre"
    rows = np.arange(B)
    for layer in range(config.n_layers):
        name = f"layers.{layer}"
        h = normed(params, config, f"{name}.attention_norm", x) if pre else x
        qkv = projected(params, f"{name}.attention.wqkv", f"{name}.attention.bqkv", h)
        qkv = qkv.reshape(B, Hq + 2 * Hkv, d)
        q, k, v = qkv[:, :Hq], qkv[:, Hq : Hq + Hkv], qkv[:, Hq + Hkv :]
        if config.qk_norm:
            q = rmsnorm_forward(q, params[f"{name}.attention.q_norm.gain"], eps=config.norm_eps)[0]
            k = rmsnorm_forward(k, params[f"{name}.attention.k_norm.gain"], eps=config.norm_eps)[0]
        q, k = rotated(config, q, positions), rotated(config, k, positions)
        S = cache.k[layer].shape[1]
        slot = positions % S
        cache.k[layer][rows, slot] = k
        cache.v[layer][rows, slot] = v
        h = attended(
            config, q, cache.k[layer], cache.v[layer], positions, config.window_of(layer), S
        )
        x = x + projected(params, f"{name}.attention.wo", f"{name}.attention.bo", h)
        if not pre:
            x = normed(params, config, f"{name}.attention_norm", x)
        h = normed(params, config, f"{name}.ffn_norm", x) if pre else x
        x = x + ffn(params, config, f"{name}.ffn", h)
        if not pre:
            x = normed(params, config, f"{name}.ffn_norm", x)
    if pre:
        x = normed(params, config, "final_norm", x)
    head = params["embedding.weight" if config.tied else "head.weight"]
    z = x @ head.T
    return z + params["head.bias"] if "head.bias" in params else z
