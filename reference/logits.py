"""The head of a language model: one score for each entry of the vocabulary.

It is a linear layer whose weight is stored as (V, D), the shape of the embedding table that it may
be tied to (Press & Wolf 2017): z = x Eᵀ + b. Its backward is part of ``linear_cross_entropy.py``.
"""

from reference.types import Array


def logits(x: Array, E: Array, b: Array | None = None) -> Array:
    """Return z (..., V) of x (..., D), E (V, D) and b (V,)."""
    z = x @ E.T
    return z if b is None else z + b
