"""Key/value heads and the feed-forward, at equal parameters: loss, cache, speed of decoding.

Fewer key/value heads make a smaller cache; the parameters that they save go into the feed-forward,
so that all models have as many. SwiGLU has three matrices where ReLU has two, so its hidden width
is two thirds (Shazeer 2020).
"""

import time

import numpy as np

from dist.step import Stepper
from dist.study.ablations.lab import Claim, Curve, Finding, Lab, Plot, byte_model, smooth
from reference.config import Config
from reference.params import decoder_layout

STEPS = 250
HEADS = 8
TRAINED = 128
ROWS, TOKENS = 8, 256  # of the cache that is decoded with


def configs() -> dict[str, Config]:
    """Return the models by name, with the parameters of the first, or as near as a width allows."""
    found: dict[str, Config] = {}
    choices = {
        "MHA, SwiGLU": (HEADS, "swiglu"),
        "GQA, SwiGLU": (2, "swiglu"),
        "MQA, SwiGLU": (1, "swiglu"),
        "MHA, ReLU": (HEADS, "relu"),
    }
    wanted = 0
    for name, (kv_heads, ffn) in choices.items():
        shape = {"n_heads": HEADS, "n_kv_heads": kv_heads, "d_head": 16, "context_length": TOKENS}
        widths = [344] if not found else range(256, 768, 8)
        made = [byte_model(**shape, ffn=ffn, d_ff=width) for width in widths]
        if not found:
            wanted = decoder_layout(made[0]).size
        found[name] = min(made, key=lambda c: abs(decoder_layout(c).size - wanted))
    return found


def decode(lab: Lab, stepper: Stepper, tokens: int) -> tuple[int, float]:
    """Return the bytes of the cache of ROWS texts, and how many tokens a second are decoded."""
    cache = lab.ops.kv_cache(stepper.params, stepper.model, ROWS, TOKENS)
    size = sum(array.nbytes for array in (*cache.k, *cache.v))
    token = np.full(ROWS, 101, np.int32)
    seconds = 0.0
    for _ in range(2):  # kernels are compiled in the first pass, if need be
        started = time.perf_counter()
        for position in range(tokens):
            lab.ops.decode_step(stepper.params, stepper.model, token, cache, position)
        seconds = time.perf_counter() - started
    return size, ROWS * tokens / seconds


def run(lab: Lab, share: float = 1.0) -> Finding:
    """Train the four and decode with each."""
    curves, loss, size, speed, table = [], {}, {}, {}, []
    steps, tokens = max(2, int(share * STEPS)), min(max(2, int(share * TOKENS)), TOKENS)
    for name, config in configs().items():
        stepper, losses = lab.train(name, config, length=TRAINED, count=16, steps=steps, lr=3e-3)
        curves.append(Curve(name, [float(i + 1) for i in range(steps)], smooth(losses)))
        loss[name] = float(lab.loss_by_position(stepper, TRAINED, max(8, int(share * 256))).mean())
        size[name], speed[name] = decode(lab, stepper, tokens)
        table.append(
            [
                *(name, f"{decoder_layout(config).size:,}", f"{loss[name]:.3f}"),
                *(f"{size[name] / 1024:.0f}", f"{speed[name]:,.0f}"),
            ]
        )
    mha, gqa, mqa, relu = loss
    claims = [
        Claim(
            "Ainslie et al. 2023, figure 3",
            "Grouped queries are nearly as good as multi-head, with a cache a fraction of it.",
            f"{loss[gqa]:.3f} nats against {loss[mha]:.3f}, cache {size[mha] / size[gqa]:.0f} "
            "times smaller",
            loss[gqa] <= loss[mha] + 0.03 and size[gqa] * 3 < size[mha],
        ),
        Claim(
            "Shazeer 2019, tables 1 and 3",
            "Multi-query costs a little quality, and decodes faster.",
            f"{loss[mqa]:.3f} nats against {loss[mha]:.3f}, {speed[mqa] / speed[mha]:.2f} times "
            "the tokens a second",
            loss[mqa] > loss[mha] - 0.01 and speed[mqa] > speed[mha],
        ),
        Claim(
            "Shazeer 2020, table 1",
            "SwiGLU is better than ReLU at equal parameters.",
            f"{loss[mha]:.3f} nats against {loss[relu]:.3f}",
            loss[mha] < loss[relu],
        ),
    ]
    head = ["model", "parameters", "nats a byte, held out", f"cache of {ROWS} × {TOKENS}, KiB"]
    plot = Plot("Heads and feed-forward at equal parameters", "step", "nats a byte", curves)
    return Finding([plot], [[*head, "decoded tokens/s"], *table], claims)
