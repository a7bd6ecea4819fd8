"""A whole GPT on one page: forward, backward, AdamW and sampling, trained until it writes.

Radford et al. 2019, "Language models are unsupervised multitask learners" (GPT-2), section 2.3,
without biases in its matrices. It reads characters and learns to tell the next one; its text is the
Zen of Python, which ships with Python. Of ours nothing is imported: copy the file, and it runs.

    B windows of T characters side by side; V different characters in all; D numbers for each place
    L blocks; H heads of width d = D/H; F = 4 D numbers in the middle of a feed-forward
    E (V, D) a row for each character, at the end read as columns: the score of each as the next one
    places (T, D), a row for each place; p holds all parameters by name, and dp their gradients
    ``dx`` is how the loss moves when x does, an array of x's shape

Every line of ``backward`` undoes one line of ``forward``, from the last to the first. Two rules do
most of it: Y = A B gives dA = dY Bᵀ and dB = Aᵀ dY, and what was used twice gets the sum of both.
Three derivations are elsewhere: ``attention.py`` here, and of the reference ``layernorm.py`` and
``gelu_tanh.py``. Its loss and gradients are those of ``reference.model``, to 1e-12: same numbers,
without its choices, checks and backends.

    python -m reference.study.gpt
"""

import codecs
import contextlib
import importlib
import io
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Params = dict[str, Array]
C, A = math.sqrt(2 / math.pi), 0.044715  # of GELU's tanh form


def init(V: int, T: int, D: int, L: int, rng: np.random.Generator) -> Params:
    """Return parameters to start from: small random matrices, norms that change nothing."""
    shapes = {"E": (V, D), "places": (T, D)}
    for i in range(L):
        shapes |= {f"{i}.qkv": (D, 3 * D), f"{i}.out": (D, D)}
        shapes |= {f"{i}.up": (D, 4 * D), f"{i}.down": (4 * D, D)}
    p = {name: 0.02 * rng.standard_normal(shape) for name, shape in shapes.items()}
    for name in [*(f"{i}.{half}" for i in range(L) for half in "12"), "last"]:
        p |= {f"{name}.gain": np.ones(D), f"{name}.bias": np.zeros(D)}
    return p


# ---- three parts, forward beside backward --------------------------------------------------------


def norm(x: Array, gain: Array, bias: Array) -> tuple[Array, Any]:
    c = x - x.mean(-1, keepdims=True)
    r = 1 / np.sqrt((c * c).mean(-1, keepdims=True) + 1e-5)
    return c * r * gain + bias, (c * r, r, gain)


def norm_backward(dy: Array, cache: Any) -> tuple[Array, Array, Array]:
    n, r, gain = cache
    dn = dy * gain
    dx = r * (dn - dn.mean(-1, keepdims=True) - n * (dn * n).mean(-1, keepdims=True))
    return dx, (dy * n).sum((0, 1)), dy.sum((0, 1))


def attend(qkv: Array, H: int) -> tuple[Array, Any]:
    B, T, D = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = qkv.reshape(B, T, 3, H, D // H).transpose(2, 0, 3, 1, 4)  # each (B, H, T, d)
    s = np.where(np.tri(T, dtype=bool), q @ k.swapaxes(2, 3) / math.sqrt(D // H), -np.inf)
    P = np.exp(s - s.max(-1, keepdims=True))
    P /= P.sum(-1, keepdims=True)
    return (P @ v).transpose(0, 2, 1, 3).reshape(B, T, D), (q, k, v, P)


def attend_backward(do: Array, cache: Any) -> Array:
    q, k, v, P = cache
    B, H, T, d = q.shape
    do = do.reshape(B, T, H, d).transpose(0, 2, 1, 3)
    dv, dP = P.swapaxes(2, 3) @ do, do @ v.swapaxes(2, 3)
    ds = P * (dP - (dP * P).sum(-1, keepdims=True)) / math.sqrt(d)
    dqkv = np.stack([ds @ k, ds.swapaxes(2, 3) @ q, dv])  # (3, B, H, T, d)
    return dqkv.transpose(1, 3, 0, 2, 4).reshape(B, T, 3 * H * d)


def times(x: Array, dy: Array) -> Array:
    """Return xᵀ dy, summed over all places: the gradient of the W of y = x W."""
    return x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])


# ---- the model -----------------------------------------------------------------------------------


def forward(p: Params, ids: Array, H: int) -> tuple[Array, Any]:
    """Return the scores z (B, T, V) of the character after each of ids (B, T)."""
    x = p["E"][ids] + p["places"][: ids.shape[1]]
    tape = []
    for i in range(len(p) // 8):  # a block has eight, all else four
        h, norm1 = norm(x, p[f"{i}.1.gain"], p[f"{i}.1.bias"])
        o, attention = attend(h @ p[f"{i}.qkv"], H)
        x = x + o @ p[f"{i}.out"]
        g, norm2 = norm(x, p[f"{i}.2.gain"], p[f"{i}.2.bias"])
        u = g @ p[f"{i}.up"]
        t = np.tanh(C * (u + A * u * u * u))
        a = 0.5 * u * (1 + t)
        x = x + a @ p[f"{i}.down"]
        tape.append((h, norm1, o, attention, g, norm2, u, t, a))
    y, last = norm(x, p["last.gain"], p["last.bias"])
    return y @ p["E"].T, (ids, tape, y, last)


def backward(dz: Array, p: Params, cache: Any) -> Params:
    """Return the gradient of every parameter."""
    ids, tape, y, last = cache
    dp = {"E": times(dz, y)}
    dx, dp["last.gain"], dp["last.bias"] = norm_backward(dz @ p["E"], last)
    for i, (h, norm1, o, attention, g, norm2, u, t, a) in reversed([*enumerate(tape)]):
        dp[f"{i}.down"] = times(a, dx)
        du = dx @ p[f"{i}.down"].T * 0.5 * (1 + t + u * (1 - t * t) * C * (1 + 3 * A * u * u))
        dp[f"{i}.up"] = times(g, du)
        dg, dp[f"{i}.2.gain"], dp[f"{i}.2.bias"] = norm_backward(du @ p[f"{i}.up"].T, norm2)
        dx = dx + dg  # x went past the feed-forward, and into it
        dp[f"{i}.out"] = times(o, dx)
        dqkv = attend_backward(dx @ p[f"{i}.out"].T, attention)
        dp[f"{i}.qkv"] = times(h, dqkv)
        dh, dp[f"{i}.1.gain"], dp[f"{i}.1.bias"] = norm_backward(dqkv @ p[f"{i}.qkv"].T, norm1)
        dx = dx + dh
    dp["places"] = np.zeros_like(p["places"])
    dp["places"][: ids.shape[1]] = dx.sum(0)
    np.add.at(dp["E"], ids, dx)  # E was used at both ends
    return dp


def loss_and_gradients(p: Params, ids: Array, targets: Array, H: int) -> tuple[float, Params]:
    """Return the mean of -log P(target), and the gradient of every parameter."""
    z, cache = forward(p, ids, H)
    P = np.exp(z - z.max(-1, keepdims=True))
    P /= P.sum(-1, keepdims=True)
    onehot = np.eye(z.shape[-1], dtype=z.dtype)[targets]
    loss = -np.log((P * onehot).sum(-1)).mean()
    return float(loss), backward((P - onehot) / targets.size, p, cache)


def adamw(p: Params, dp: Params, m: Params, v: Params, step: int, lr: float) -> None:
    """Step every parameter: as far as its gradient is steady; matrices shrink a little as well."""
    for name in p:
        m[name] = 0.9 * m[name] + 0.1 * dp[name]
        v[name] = 0.99 * v[name] + 0.01 * dp[name] ** 2
        update = m[name] / (1 - 0.9**step) / (np.sqrt(v[name] / (1 - 0.99**step)) + 1e-8)
        p[name] = p[name] - lr * (update + 0.01 * (p[name].ndim > 1) * p[name])


def write(p: Params, start: Array, n: int, H: int, rng: np.random.Generator | None = None) -> Array:
    """Return n characters after ``start``: the likeliest each time, or drawn when there is rng."""
    ids = list(start)
    for _ in range(n):
        z = forward(p, np.array([ids[-len(p["places"]) :]]), H)[0][0, -1]
        P = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        ids.append(int(P.argmax() if rng is None else rng.choice(len(P), p=P)))
    return np.array(ids[len(start) :])


# ---- what it shows -------------------------------------------------------------------------------


def zen() -> str:
    """Return the Zen of Python; its module keeps it in secret writing, and prints it on import."""
    with contextlib.redirect_stdout(io.StringIO()):
        return codecs.decode(importlib.import_module("this").s, "rot13")


def train(ids: Array, V: int, *, steps: int, H: int = 4) -> Iterator[tuple[int, float, Params]]:
    """Yield (step, loss, parameters) while learning the text ids (N,)."""
    rng = np.random.default_rng(0)
    p = {name: x.astype(np.float32) for name, x in init(V, T=32, D=48, L=2, rng=rng).items()}
    m, v = ({name: np.zeros_like(x) for name, x in p.items()} for _ in range(2))
    for step in range(1, steps + 1):
        at = rng.integers(0, len(ids) - 32, (16, 1)) + np.arange(33)  # 16 windows of 33
        loss, dp = loss_and_gradients(p, ids[at[:, :-1]], ids[at[:, 1:]], H)
        yield step, loss, p
        adamw(p, dp, m, v, step, lr=7e-3 * min(step / 20, 1 - step / (steps + 1)))


def main() -> None:
    """Train on the Zen of Python, and let it write after 'Beautiful' as it learns."""
    text = zen()
    characters = sorted(set(text))
    ids = np.array([characters.index(c) for c in text])
    start = ids[text.index("Beautiful") :][:9]
    print(f"A GPT learns a text of {len(text)} characters, {len(characters)} different ones.\n")
    for step, loss, p in train(ids, len(characters), steps=600):
        if step in (1, 50, 100, 200, 300, 600):
            said = "".join(characters[i] for i in write(p, start, 150 if step == 600 else 40, H=4))
            print(f"step {step}, loss {loss:.3f}: Beautiful⟦{said}⟧\n")
    drawn = write(p, start, 150, H=4, rng=np.random.default_rng(0))
    print(f"Drawn rather than the likeliest: Beautiful⟦{''.join(characters[i] for i in drawn)}⟧")


if __name__ == "__main__":
    main()
