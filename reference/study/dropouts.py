"""Dropout in its two forms: scale the weights when predicting, or the kept values when training.

Dropout trains a network with parts missing: each value of a layer is zeroed with probability p,
anew at every step, so that none can rely on another. Predictions use all of them, and something
must make up for that. With x the values (n,), W the weights that read them, and k (n,) a draw of
zeros and ones that is one with probability 1 - p::

                training                     prediction
    original    z = (k ∘ x) W                z = x ((1 - p) W)       Srivastava et al. 2014, §4
    inverted    z = (k ∘ x / (1 - p)) W      z = x W                 as everybody has it today

Either way what the prediction computes is the mean of what training computes, with E[…] the mean
over draws and E[k] = 1 - p:

    E[(k ∘ x) W] = (1 - p) x W               E[(k ∘ x / (1 - p)) W] = x W

and with (1 - p) W_original = W_inverted the two agree in every line: one network, written twice.
Inverted needs nothing when predicting, which is why it won: a model that is exported, or read by
others, does not have to say that it was trained with dropout.

Two things remain. The mean is exact for what is linear in k alone: after a bend (relu) the scaled
network is near the mean over draws, and not it. And the same learning rate is not the same
training: seen in W_original, a step on W_inverted is 1/(1 - p)² times as long, one factor because
its gradient is that much larger, one because it is measured in smaller weights.

``reference/dropout.py`` is the inverted form, with draws that do not depend on who draws them.

    python -m reference.study.dropouts
"""

import itertools

import numpy as np

from reference.study import shown
from reference.types import Array


def original_training(x: Array, k: Array, W: Array) -> Array:
    """Return z of what is kept."""
    return (k * x) @ W


def original_prediction(x: Array, W: Array, p: float) -> Array:
    """Return z of everything, by weights scaled down."""
    return x @ ((1 - p) * W)


def inverted_training(x: Array, k: Array, W: Array, p: float) -> Array:
    """Return z of what is kept, scaled up."""
    return (k * x / (1 - p)) @ W


def inverted_prediction(x: Array, W: Array) -> Array:
    """Return z of everything, as it is."""
    return x @ W


def every_draw(n: int, p: float) -> tuple[Array, Array]:
    """Return all 2ⁿ draws k (2ⁿ, n), and the probability of each (2ⁿ,)."""
    k = np.array(list(itertools.product([0.0, 1.0], repeat=n)))
    return k, np.prod(np.where(k == 1, 1 - p, p), axis=1)


def relu(z: Array) -> Array:
    """Return max(z, 0)."""
    return np.maximum(z, 0)


def main() -> None:
    """Hold the forms to each other, and the prediction to the mean over all draws."""
    p, n = 0.25, 12
    rng = np.random.default_rng(0)
    x, W, A = rng.standard_normal(n), rng.standard_normal((n, 8)), rng.standard_normal(8)
    k, chance = every_draw(n, p)
    smaller = (1 - p) * W  # the weights of the inverted form
    training = np.abs(original_training(x, k, W) - inverted_training(x, k, smaller, p)).max()
    prediction = np.abs(original_prediction(x, W, p) - inverted_prediction(x, smaller)).max()
    print(f"{n} values, p = {p}: {len(k):,} possible draws. The original form with weights W, the")
    print("inverted with (1 - p) W, and the largest difference between them:\n")
    print(f"  in training, over all draws   {training:.0e}")
    print(f"  in prediction                 {prediction:.0e}\n")

    print("What training computes, its mean over all draws, beside the prediction:\n")
    z, z_all = inverted_training(x, k, W, p), inverted_prediction(x, W)
    for name, drawn, predicted in (
        ("a linear layer", z @ A, z_all @ A),
        ("with a relu behind it", relu(z) @ A, relu(z_all) @ A),
    ):
        print(f"  {name:<24}mean {chance @ drawn:7.4f}   prediction {predicted:7.4f}")

    dz = rng.standard_normal(8)
    step_original = np.outer(k[-2] * x, dz)  # the gradients of W, for one draw
    step_inverted = np.outer(k[-2] * x / (1 - p), dz) / (1 - p)  # seen in the original's weights
    ratio = np.linalg.norm(step_inverted) / np.linalg.norm(step_original)
    print(f"\nA step at the same rate is {ratio:.4f} times as long in the inverted form.")


if __name__ == "__main__":
    shown(main)
