"""Tokens after a prompt on any backend, for the tests of the cuda backend."""

from typing import Any

import numpy as np

from reference import model
from reference import ops as reference
from reference.config import Config
from reference.params import decoder_layout
from reference.types import Array

LENGTHS = np.array([3, 1, 4])  # of prompts: rows stand at different places


class Text:
    """Rows of a batch that are read token by token.

    Parameters
    ----------
    module : a backend
    config : Config
    flat : (n,)
        Its parameters, of float64 for the reference.
    ids : (3, ...) int
        What is read.
    """

    def __init__(self, module: Any, config: Config, flat: Array, ids: Array) -> None:
        self.module, self.config, self.ids = module, config, ids
        self.flat = module.from_numpy(flat)
        self.params = module.parameters(decoder_layout(config).views(self.flat))
        self.start()

    def start(self) -> None:
        """Read the prompts into a cache of their own."""
        config, module = self.config, self.module
        B, longest = len(LENGTHS), LENGTHS.max()
        self.cache = module.kv_cache(self.params, config, B, config.context_length)
        prompts = module.from_numpy(self.ids[:, :longest])
        model.prefill(module, self.params, config, prompts, LENGTHS, self.cache)
        self.at = LENGTHS.copy()

    def step(self) -> Array:
        """Read a token of each row; return the logits (B, V) after them."""
        module, rows = self.module, np.arange(len(self.at))
        token = module.from_numpy(self.ids[rows, self.at])
        found = module.decode_step(self.params, self.config, token, self.cache, self.at)
        self.at = self.at + 1
        return np.array(module.to_numpy(found))

    def steps(self, n: int) -> list[Array]:
        """Return the logits of several tokens."""
        return [self.step() for _ in range(n)]


def ids_of(config: Config, seed: int = 0) -> Array:
    """Return rows of random ids as long as the context."""
    rng = np.random.default_rng(seed)
    shape = (len(LENGTHS), config.context_length)
    return rng.integers(0, config.vocab_size, shape).astype(np.int32)


def exact(config: Config, flat: Array, ids: Array, n: int) -> list[Array]:
    """Return the reference's logits of n tokens, in float64."""
    return Text(reference, config, flat.astype(np.float64), ids).steps(n)


def attended(
    q: Array, k: Array, v: Array, positions: Array, alibi: Array | None, window: int
) -> Array:
    """Return attention (B, 1, Hq, d) in float64 to a cache k, v (B, S, Hkv, d), key by key."""
    B, S, Hkv, d = k.shape
    Hq = q.shape[2]
    out = np.zeros((B, 1, Hq, v.shape[3]))
    for b, h in np.ndindex(B, Hq):
        t = int(positions[b])
        slots = {p % S: p for p in range(t + 1)}  # the last that fell on each
        seen = {u: p for u, p in slots.items() if not window or t - p < window}
        at = sorted(seen)
        scores = k[b, at, h // (Hq // Hkv)].astype(np.float64) @ q[b, 0, h] / np.sqrt(d)
        if alibi is not None:
            scores -= alibi[h] * np.array([t - seen[u] for u in at])
        p = np.exp(scores - scores.max())
        out[b, 0, h] = (p / p.sum()) @ v[b, at, h // (Hq // Hkv)].astype(np.float64)
    return out
