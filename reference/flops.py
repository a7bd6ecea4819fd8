"""The floating-point operations of a model, by arithmetic; a multiply-add counts as two.

A forward pass multiplies each token by every matrix once: 2 operations for each element (a lookup
in a table multiplies nothing, the head does), and attention's two products, scores and the
weighting of values, are 2·d each for every head and key (Chowdhery et al. 2022, appendix B; Kaplan
et al. 2020, table 1, have half of it). Backward multiplies twice as much, once for the gradient of
each side of a product.
"""

from reference.config import Config
from reference.muon import ITERATIONS
from reference.params import ParamSpec


def keys_seen(T: int, *, causal: bool, window: int = 0) -> float:
    """Return how many keys a query sees in the mean of T positions.

    Without ``causal`` all T count, or the whole window (0: none). Both conventions are in use, the
    first for "model FLOPs utilisation" (Chowdhery et al. 2022, appendix B). A causal query at t
    sees min(t, w) keys: half of a square of T, or of w and then all of w; the half key by which
    the diagonal makes the mean larger is left out.
    """
    w = min(window or T, T)
    return w - w * w / (2 * T) if causal else w


def attention_flops(T: int, heads: int, d: int, *, causal: bool, window: int = 0) -> float:
    """Return the operations of a layer's scores and values, forward, per token: 4·H·d·keys."""
    return 4.0 * heads * d * keys_seen(T, causal=causal, window=window)


def forward_flops(config: Config, T: int, *, causal: bool) -> dict[str, float]:
    """Return the operations of a forward pass over T tokens, per token, by part."""
    c = config
    projected = (2 * c.n_heads + 2 * c.n_kv_heads) * c.d_head  # q, k, v, and the way out
    matrices = 3 if c.gated else 2
    return {
        "projections": 2.0 * c.n_layers * c.d_model * projected,
        "attention": sum(
            attention_flops(T, c.n_heads, c.d_head, causal=causal, window=window)
            for window in map(c.window_of, range(c.n_layers))
        ),
        "feed-forward": 2.0 * c.n_layers * matrices * c.d_model * c.d_ff,
        "head": 2.0 * c.vocab_size * c.d_model,
    }


def training_flops(config: Config, T: int, *, causal: bool) -> float:
    """Return the operations of a training step over T tokens, per token, forward and backward.

    What is computed a second time, to save memory, is not counted.
    """
    return 3.0 * sum(forward_flops(config, T, causal=causal).values())


def muon_flops(spec: ParamSpec) -> int:
    """Return the operations of a step of Muon on a weight: those of its products, 4r²s + 2r³ each.

    r and s are the smaller and the larger side of each matrix in it.
    """
    sides = (sorted((spec.shape[0], columns)) for columns in spec.parts)
    return sum(ITERATIONS * (4 * r * r * s + 2 * r**3) for r, s in sides)
