"""Print hashes of what the cpu backend makes of models: python -m tests.helpers.cold_warm MODE.

Widths are longer than any unrolled loop and divided by no vector, so that either compiled otherwise
would show.
"""

import hashlib
import sys

import numpy as np

import accel
from reference.generate import generate
from reference.params import decoder_layout
from tests.helpers.models import MODELS, gradient, toy, weights

WIDE = {"d_model": 150, "d_ff": 333, "d_head": 38, "vocab_size": 331}


def main(mode: str) -> None:
    """Go through loss, gradients, an AdamW step, norms and generation."""
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
        params = ops.parameters(decoder_layout(wide).views(flat))
        written = generate(
            ops, params, wide, [[3, 1, 4]], max_new_tokens=6, temperature=1.0, seed=1
        )
        digest = hashlib.sha256(grads.tobytes() + flat.tobytes() + m.tobytes() + v.tobytes())
        print(name, float(loss).hex(), float(norm).hex(), digest.hexdigest(), written)


if __name__ == "__main__":
    main(sys.argv[1])
