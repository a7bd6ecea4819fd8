"""Muon: a step of the same length in every direction of a matrix."""

import math

import numpy as np

from reference.types import Array

A, B, C = 3.4445, -4.7750, 2.0315  # of the polynomial a s + b s³ + c s⁵
ITERATIONS = 5
TINY = 1e-30  # a norm below this counts as this: a matrix of zeros stays one
RMS = 0.2  # of the numbers in an update, in units of the learning rate


def orthogonalise(x: Array) -> Array:
    """Return x (I, O) with its singular values brought near 1, their directions as they are.

    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". Let X = U S Vᵀ
    be the singular value decomposition, S the diagonal of all s. What is wanted is U Vᵀ, the
    nearest orthogonal matrix, and no decomposition is needed for it. Products of X with its own
    transpose act on S alone, because UᵀU = VᵀV = I::

        X Xᵀ = U S² Uᵀ
        a X + b (X Xᵀ) X + c (X Xᵀ)² X = U (a S + b S³ + c S⁵) Vᵀ

    So one step, three products, applies p(s) = a s + b s³ + c s⁵ to every singular value at once
    (Newton-Schulz of the fifth order). It is to drive each s in (0, 1] towards 1:

    * X is divided by its Frobenius norm √Σs² before, so that no s is above 1.
    * Near 0, p(s) ≈ a s: a small s grows 3.4445 times a step, 485 times in five. The source made
      a large and took what comes next for good enough.
    * p maps [0.22, 1.21] into [0.68, 1.21], and four steps bring every s from 0.0016 to 1 into the
      former: after the fifth all lie between 0.68 and 1.21. They need not be 1; for an update that
      is near enough. The classical p, with a = 15/8, b = -10/8 and c = 3/8, goes to 1 itself
      (p(1) = 1, p'(1) = p''(1) = 0), and needs ten steps until all of these are above 0.68.

    X Xᵀ is (I, I). Of a tall X the other product is smaller, XᵀX = V S² Vᵀ, (O, O), and comes to
    the same: (X Xᵀ) X = X (XᵀX). So a tall matrix is multiplied from the right, where others
    transpose it, and it costs as little as its transpose.

    Ours differs from the source in two things: it works in the type of x, where the source has
    bfloat16, and it does not add 1e-7 to the norm.
    """
    norm = math.sqrt(float(np.sum(x.astype(np.float64) ** 2)))
    x = x / max(norm, TINY)
    wide = x.shape[0] <= x.shape[1]
    for _ in range(ITERATIONS):
        gram = x @ x.T if wide else x.T @ x
        p = B * gram + C * (gram @ gram)
        x = A * x + (p @ x if wide else x @ p)
    return x


def muon(
    master: Array,
    m: Array,
    grad: Array,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    parts: tuple[int, ...],
    grad_scale: float = 1.0,
) -> None:
    """Take one step of Muon on a matrix: master and m (I, O) are updated in place.

    Jordan et al. 2024, with momentum μ, on G = grad_scale · grad::

        M ← μ M + G                          running sum
        N = μ M + G                          Nesterov: the sum as the next step would have it
        Q = orthogonalise(N)                 ≈ U Vᵀ of N = U S Vᵀ
        θ ← θ - lr (0.2 √max(I, O) · Q + λ θ)

    A gradient of a matrix has few large singular values, and a step along it moves these
    directions alone; Muon moves all of them as far. The length of N drops out of Q, so M needs no
    bias correction, and a gradient's size counts only beside those before it.

    The factor is that of Liu et al. 2025, "Muon is scalable for LLM training", section 2.2. Q has
    r = min(I, O) singular values near 1, so ΣQ² ≈ r and the root mean square of its I·O numbers is
    √(r / (I·O)) = 1/√max(I, O). Times 0.2 √max(I, O) it is 0.2, about what AdamW's updates have:
    so one lr and one λ serve the matrices, which Muon steps, and all else, which AdamW does.

    Where a fused weight holds several matrices side by side (q, k and v; gate and up), each is one
    by itself: its directions are its own, not those of its neighbours.

    Parameters
    ----------
    master, m, grad : (I, O)
    parts : tuple of int
        The widths of the matrices side by side, O in all.
    grad_scale : float
        The clipping factor.
    """
    g = grad * grad_scale
    m[...] = momentum * m + g
    nesterov = momentum * m + g
    ends = np.cumsum(parts)
    for width, end in zip(parts, ends, strict=True):
        columns = slice(end - width, end)
        update = RMS * math.sqrt(max(len(g), width)) * orthogonalise(nesterov[:, columns])
        master[:, columns] -= lr * (update + weight_decay * master[:, columns])
