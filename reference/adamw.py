"""AdamW: a step for each coordinate, as far as its gradient is steady."""

import numpy as np

from reference.types import Array


def adamw(
    master: Array,
    m: Array,
    v: Array,
    grad: Array,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    n_decayed: int,
    grad_scale: float = 1.0,
) -> None:
    """Take one step of AdamW: master, m and v (n,) are updated in place.

    Loshchilov & Hutter 2019, algorithm 2, for step t, parameters θ (master), learning rate lr and
    decay λ, on g = grad_scale · grad::

        m ← β₁ m + (1 - β₁) g                 running mean
        v ← β₂ v + (1 - β₂) g²                running uncentred variance
        m̂ = m / (1 - β₁ᵗ)    v̂ = v / (1 - β₂ᵗ)    undo the start at zero
        θ ← θ - lr (m̂ / (√v̂ + ε) + λ θ)

    ε stands outside the root. The decay λθ is decoupled: it is not part of g, so √v̂ does not
    rescale it. As in PyTorch and unlike the paper, lr multiplies it.

    Parameters
    ----------
    master, m, v, grad : (n,)
    step : int
        t, counted from 1.
    n_decayed : int
        λ acts on the elements before this one: those of parameters with two axes or more, which
        the layout puts first (``params.py`` says why).
    grad_scale : float
        The clipping factor.
    """
    g = grad * grad_scale
    m[...] = beta1 * m + (1 - beta1) * g
    v[...] = beta2 * v + (1 - beta2) * g * g
    m_hat = m / (1 - beta1**step)
    v_hat = v / (1 - beta2**step)
    update = m_hat / (np.sqrt(v_hat) + eps)
    update[:n_decayed] += weight_decay * master[:n_decayed]
    master -= lr * update
