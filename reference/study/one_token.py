"""One token, followed from its bytes to its row, through a block to the loss, and all the way back.

Everything is small enough to be printed: the text is "banana", of which five tokens are learned
(V = 5), the width is D = 4, and there is one block of MyLLM's kind, with one head of width d = 4
and a feed-forward of F = 3. The page ``one_token.md`` and its picture of shapes are written from a
run:

    python -m reference.study.one_token            # prints the page
    python -m reference.study.one_token --write    # puts it, and the picture, beside this file
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from reference import ops
from reference.config import Config
from reference.params import decoder_layout
from reference.study import shown
from reference.types import Array

TEXT = "banana"
CONFIG = Config(vocab_size=5, d_model=4, n_layers=1, n_heads=1, n_kv_heads=1, d_head=4, d_ff=3,
                context_length=2, rope_base=100.0)  # fmt: skip


class Step(NamedTuple):
    """One line of the run: what is computed, how, of which shape, and the numbers."""

    name: str
    how: str
    shape: str
    value: Array


def merges(text: str, n: int) -> tuple[list[str], list[str], list[str]]:
    """Return a line for each of n merges, the vocabulary, and the text in tokens."""
    parts, vocabulary, lines = list(text), sorted(set(text)), []
    for _ in range(n):
        pairs = Counter(pairwise(parts))
        most = max(pairs.values())
        left, right = min((pair for pair in pairs if pairs[pair] == most),
                          key=lambda pair: [vocabulary.index(part) for part in pair])  # fmt: skip
        lines.append(f"{left} + {right} occurs {most} time{'s' * (most > 1)}")
        vocabulary.append(left + right)
        merged: list[str] = []
        while parts:
            found = tuple(parts[:2]) == (left, right)
            merged.append(left + right if found else parts[0])
            parts = parts[2 if found else 1 :]
        parts = merged
        lines[-1] += f":  {' '.join(parts)}"
    return lines, vocabulary, parts


def parameters() -> dict[str, Array]:
    """Return parameters of one decimal, to be copied by hand; adding 0 makes no zero a -0."""
    layout = decoder_layout(CONFIG)
    flat = np.round(0.5 * np.random.default_rng(7).standard_normal(layout.size), 1) + 0.0
    flat[layout.n_decayed :] = 1.0  # gains
    return layout.views(flat)


def run(p: dict[str, Array], ids: Array, targets: Array) -> tuple[list[Step], list[Step]]:
    """Return the steps of the forward and of the backward; the loss is the mean over targets."""
    E, name = p["embedding.weight"], "layers.0."
    T, D, eps, base = len(ids), CONFIG.d_model, CONFIG.norm_eps, CONFIG.rope_base
    x, embedding = ops.embedding_forward(ids, E)
    n, norm1 = ops.rmsnorm_forward(x, p[name + "attention_norm.gain"], eps=eps)
    qkv, linear1 = ops.linear_forward(n, p[name + "attention.wqkv"])
    heads, rope = ops.rope_forward(qkv.reshape(1, T, 3, D), base=base, rotate_heads=2)
    q, k, v = (heads[:, :, i : i + 1] for i in range(3))
    o, attention = ops.attention_forward(q, k, v)
    a, linear2 = ops.linear_forward(o.reshape(T, D), p[name + "attention.wo"])
    r = x + a
    m, norm2 = ops.rmsnorm_forward(r, p[name + "ffn_norm.gain"], eps=eps)
    gu, linear3 = ops.linear_forward(m, p[name + "ffn.w_gate_up"])
    h, swiglu = ops.swiglu_forward(gu)
    f, linear4 = ops.linear_forward(h, p[name + "ffn.w_down"])
    w = r + f
    y, norm3 = ops.rmsnorm_forward(w, p["final_norm.gain"], eps=eps)
    z = ops.logits(y, E)
    P = ops.softmax(z)
    loss = np.mean(-np.log(P[np.arange(T), targets]))

    dz = (P - np.eye(len(E))[targets]) / T
    dy, dE = dz @ E, dz.T @ y
    dw = ops.rmsnorm_backward(dy, norm3)[0]
    dh = ops.linear_backward(dw, linear4)[0]
    dgu = ops.swiglu_backward(dh, swiglu)
    dm = ops.linear_backward(dgu, linear3)[0]
    dr = dw + ops.rmsnorm_backward(dm, norm2)[0]
    do = ops.linear_backward(dr, linear2)[0]
    dqkv = np.concatenate(ops.attention_backward(do.reshape(1, T, 1, D), attention), axis=2)
    dturned = ops.rope_backward(dqkv, rope).reshape(T, 3 * D)
    dn = ops.linear_backward(dturned, linear1)[0]
    dx = dr + ops.rmsnorm_backward(dn, norm1)[0]
    dE_all = dE + ops.embedding_backward(dx, embedding)

    forward = [
        Step("x", "E[id], a row of the table for each token", "T D", x),
        Step("n", "RMSNorm(x): x divided by its root mean square", "T D", n),
        Step("qkv", "n W_qkv: query, key and value side by side", "T 3D", qkv),
        Step("q k v", "q and k turned by their place (RoPE); place 0 is not", "T 3D",
             heads.reshape(T, 3 * D)),
        Step("A", "softmax(q kᵀ/√d) where u ≤ t: whom each token looks at", "T T",
             attention.cache.P.reshape(T, T)),
        Step("o", "A v, what it takes home", "T D", o.reshape(T, D)),
        Step("r", "x + o W_o: the residual stream after attention", "T D", r),
        Step("m", "RMSNorm(r)", "T D", m),
        Step("g u", "m W_gate_up: the gate, and what it lets pass", "T 2F", gu),
        Step("h", "silu(g) · u (SwiGLU), with silu(g) = g/(1 + e^-g)", "T F", h),
        Step("w", "r + h W_down: the stream after the feed-forward", "T D", w),
        Step("y", "RMSNorm(w)", "T D", y),
        Step("z", "y Eᵀ, a score for each of the five tokens", "T V", z),
        Step("P", "softmax(z), a probability for each", "T V", P),
        Step("ℓ", "the mean of -log P[target]", "", np.asarray(loss)),
    ]  # fmt: skip
    backward = [
        Step("dz", "(P - onehot(target)) / T", "T V", dz),
        Step("dy", "dz E", "T D", dy),
        Step("dE as head", "dzᵀ y", "V D", dE),
        Step("dw", "RMSNorm backward of dy", "T D", dw),
        Step("dh", "dw W_downᵀ", "T F", dh),
        Step("dg du", "SwiGLU backward of dh", "T 2F", dgu),
        Step("dm", "[dg, du] W_gate_upᵀ", "T D", dm),
        Step("dr", "dw + RMSNorm backward of dm: past the feed-forward, and through it", "T D", dr),
        Step("do", "dr W_oᵀ", "T D", do),
        Step("dq dk dv", "attention backward of do", "T 3D", dqkv.reshape(T, 3 * D)),
        Step("dqkv", "q and k turned back", "T 3D", dturned),
        Step("dn", "dqkv W_qkvᵀ", "T D", dn),
        Step("dx", "dr + RMSNorm backward of dn: past attention, and through it", "T D", dx),
        Step("dE", "dE as head, and dx added to the rows that were looked up", "V D", dE_all),
    ]
    return forward, backward


def table(step: Step, tokens: Sequence[str], vocabulary: Sequence[str]) -> str:
    """Return a step as lines of text: name, how, shape, and its numbers row by row."""
    letters = f"({', '.join(step.shape.split())})" if step.shape else "a number"
    head = f"{step.name} = {step.how}   {letters}"
    if not step.shape:
        return f"{head}\n    {float(step.value):.4f}"
    names = vocabulary if step.shape.startswith("V") else tokens
    rows = (f"    {name:<5}" + "".join(f"{x:8.3f}" for x in np.round(row, 3) + 0.0)
            for name, row in zip(names, step.value, strict=True))  # fmt: skip
    return "\n".join([head, *rows])


def main(arguments: Sequence[str] = ()) -> None:
    """Print the page, or write it and its picture beside this file."""
    from reference.study.one_token_page import page, shapes

    parser = argparse.ArgumentParser(prog="python -m reference.study.one_token")
    parser.add_argument(
        "--write", action="store_true", help="put page and picture beside this file"
    )
    if parser.parse_args(arguments).write:
        folder = Path(__file__).parent
        (folder / "one_token.md").write_text(page(), encoding="utf-8")
        (folder / "pictures" / "one_token.svg").write_text(shapes(), encoding="utf-8")
    else:
        print(page())


if __name__ == "__main__":
    shown(main, sys.argv[1:])
