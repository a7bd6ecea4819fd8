"""The training loop of the study models: AdamW without weight decay, on one flat buffer."""

from collections.abc import Callable

import numpy as np

from reference.adamw import adamw
from reference.params import Layout
from reference.schedule import learning_rate
from reference.types import Array, Grads, Params

# writes the gradient of the mean loss into its second argument and returns the loss
LossAndGrads = Callable[[Params, Grads], float]


def fit(
    flat: Array, layout: Layout, loss_and_grads: LossAndGrads, *, steps: int, lr: float
) -> list[float]:
    """Train the parameters ``flat`` (P,) in place and return the loss before each step.

    The learning rate rises to ``lr`` over the first twentieth of the steps, while the moments of
    AdamW are still young, and then falls to zero in a straight line, so that the last steps settle.
    """
    grad, m, v = np.zeros_like(flat), np.zeros_like(flat), np.zeros_like(flat)
    params, grads = layout.views(flat), layout.views(grad)
    losses = []
    for step in range(1, steps + 1):
        losses.append(loss_and_grads(params, grads))
        adamw(
            flat,
            m,
            v,
            grad,
            step=step,
            lr=learning_rate(
                step,
                peak=lr,
                warmup_steps=steps // 20,
                total_steps=steps,
                schedule="linear",
                final_fraction=0.0,
            ),
            beta1=0.9,
            beta2=0.99,
            eps=1e-8,
            weight_decay=0.0,
            n_decayed=0,
        )
    return losses
