"""AdamW: a step for each coordinate, as long as its gradient is steady."""

import numpy as np

from reference.checks import check_float, check_number, check_shape, check_writable
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

    Loshchilov & Hutter 2019, algorithm 2, on g = grad_scale · grad::

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
        λ acts on the first so many elements: those of parameters with two axes or more, which the
        layout puts first (``params.py`` says why).
    grad_scale : float
        The clipping factor.

    Raises
    ------
    ValueError
        When shapes or dtypes differ, an array to be written is read-only, or a number lies
        outside its range.
    """
    check_float("adamw", master=master, m=m, v=v, grad=grad)
    check_writable("adamw", master=master, m=m, v=v)
    sizes = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
    check_adamw(master, m, v, grad, step, n_decayed, (beta1, beta2), sizes, grad_scale)
    # float(): NumPy float64 scalars would lift the arithmetic of float32 arrays to float64
    lr, beta1, beta2, eps = float(lr), float(beta1), float(beta2), float(eps)
    n_decayed = int(n_decayed)
    g = grad * float(grad_scale)
    m[...] = beta1 * m + (1 - beta1) * g
    v[...] = beta2 * v + (1 - beta2) * g * g
    m_hat = m / (1 - beta1**step)
    v_hat = v / (1 - beta2**step)
    update = m_hat / (np.sqrt(v_hat) + eps)
    update[:n_decayed] += float(weight_decay) * master[:n_decayed]
    master -= lr * update


def check_adamw(
    master: Array,
    m: Array,
    v: Array,
    grad: Array,
    step: int,
    n_decayed: int,
    betas: tuple[float, float],
    sizes: dict[str, float],
    grad_scale: float,
) -> None:
    """Raise unless shapes and numbers are such that a step can be taken."""
    for name, array in (("m", m), ("v", v), ("grad", grad)):
        check_shape("adamw", name, array, master.shape, "master")
    if master.ndim != 1:
        raise ValueError(f"adamw: master must be flat, got shape {master.shape}")
    if step < 1 or step != int(step):
        raise ValueError(f"adamw: step counts from 1, got {step}")
    if not 0 <= n_decayed <= len(master) or n_decayed != int(n_decayed):
        raise ValueError(f"adamw: n_decayed must lie in 0..{len(master)}, got {n_decayed}")
    for name, beta in zip(("beta1", "beta2"), betas, strict=True):
        if np.ndim(beta) != 0 or not 0 <= beta < 1:
            raise ValueError(f"adamw: {name} must lie in [0, 1), got {beta}")
    for name, size in sizes.items():
        check_number("adamw", name, size, at_least=0)
    check_number("adamw", "grad_scale", grad_scale)
