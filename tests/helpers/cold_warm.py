"""Print hashes of what the cpu backend makes of models: python -m tests.helpers.cold_warm MODE.

Widths are longer than any unrolled loop and divided by no vector, so that either compiled otherwise
would show. The mode tokenizer prints what the tokenizer's kernels make of texts.
"""

import hashlib
import sys
import sysconfig
from pathlib import Path

import numpy as np

import accel
from reference.generate import generate
from reference.params import decoder_layout
from tests.helpers.models import MODELS, gradient, toy, weights
from tokenizer import train_from_iterator

PATTERNS = ("gpt2", "gpt4")
WIDE = {"d_model": 150, "d_ff": 333, "d_head": 38, "vocab_size": 331}


def main(mode: str) -> None:
    """Go through loss, gradients, steps of AdamW and Muon, norms and generation."""
    dtype = np.float64 if mode == "float64" else np.float32
    ops = accel.load("cpu", compute="bf16" if mode == "bf16" else "float32")
    for name, config in MODELS.items():
        wide = toy(config, n_kv_heads=config.n_kv_heads, **WIDE)
        flat = weights(wide, dtype)
        loss, grads = gradient(ops, wide, flat)
        norm = ops.global_norm(grads)
        m, v = np.zeros_like(flat), np.zeros_like(flat)
        n_decayed = decoder_layout(wide).n_decayed
        ops.adamw(
            *(flat, m, v, grads),
            **dict(step=1, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1),
            n_decayed=n_decayed,
            grad_scale=1 / max(norm, 1.0),
        )
        matrices = [a[: 29 * 67].reshape(29, 67).copy() for a in (flat, m, grads)]
        ops.muon(*matrices, lr=0.1, momentum=0.95, weight_decay=0.1, parts=(30, 37))
        ops.accumulate(v, grads)
        params = ops.parameters(decoder_layout(wide).views(flat))
        written = generate(
            ops, params, wide, [[3, 1, 4]], max_new_tokens=6, temperature=1.0, seed=1
        )
        arrays = (grads, flat, m, v, *matrices, ops.softmax(matrices[0]))
        digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays))
        print(name, float(loss).hex(), float(norm).hex(), digest.hexdigest(), written)


def tokenize() -> None:
    """Learn a vocabulary with each pattern, encode by it and decode."""
    folder = Path(sysconfig.get_paths()["stdlib"]) / "email"
    texts = [path.read_text("utf-8") for path in sorted(folder.glob("*.py"))]
    texts += ["naïve Größe, 中文字符", "a word of many " + 99 * "letters"]
    for pattern in PATTERNS:
        tokenizer = train_from_iterator(texts, 900, pattern=pattern)
        ids = [*tokenizer.encode_batch(texts), tokenizer.encode_bytes(bytes(range(256)))]
        assert [tokenizer.decode(part) for part in ids[:-1]] == texts
        print(pattern, tokenizer.sha256, hashlib.sha256(repr(ids).encode()).hexdigest())


if __name__ == "__main__":
    tokenize() if sys.argv[1] == "tokenizer" else main(sys.argv[1])
