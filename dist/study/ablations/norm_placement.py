"""Where the norm stands, by depth: post-norm against pre-norm at 4, 16 and 64 layers.

Post-norm, norm(x + f(x)), is the original transformer (Vaswani et al. 2017); pre-norm, x +
f(norm(x)), keeps a path from the loss to every layer that no norm stands in. Gradient norms by
layer are taken before the first step; then each model is trained for a short while. Projections
into the stream start at 0.02/√(2L) here (``reference/params.py``), smaller than in those papers,
which is kind to deep post-norm.
"""

import numpy as np

from dist.study.ablations.lab import Claim, Curve, Finding, Lab, Plot, byte_model, smooth
from reference.config import Config
from reference.model import loss_backward, loss_forward

DEPTHS = (4, 16, 64)
STEPS = 120
LENGTH, COUNT = 64, 16


def config(placement: str, depth: int) -> Config:
    """Return a narrow model of a depth."""
    return byte_model(
        norm_placement=placement,
        **{"n_layers": depth, "d_model": 64, "n_heads": 2, "n_kv_heads": 2, "d_ff": 176},
        context_length=LENGTH,
    )


def gradient_by_layer(lab: Lab, choices: Config) -> list[float]:
    """Return the norm of the gradient of each layer's parameters, before the first step."""
    stepper = lab.stepper(choices)
    flat = np.zeros(stepper.layout.size, np.float32)
    grads = stepper.layout.views(flat)
    batch = lab.batch(LENGTH, COUNT, 0)
    loss, cache = loss_forward(lab.ops, stepper.params, choices, *batch[:3])
    loss_backward(1.0 / loss.n_valid, cache, grads)
    norms = []
    for layer in range(choices.n_layers):
        parts = [g for name, g in grads.items() if name.startswith(f"layers.{layer}.")]
        norms.append(float(np.sqrt(sum(float(np.sum(g.astype(np.float64) ** 2)) for g in parts))))
    return norms


def run(lab: Lab, share: float = 1.0) -> Finding:
    """Measure gradients at the start and train, at each depth, both ways."""
    first, curves, ends = [], [], {}
    norms: dict[tuple[str, int], list[float]] = {}
    for depth in DEPTHS:
        for placement in ("pre", "post"):
            choices = config(placement, depth)
            label = f"{placement}-norm, {depth} layers"
            norms[placement, depth] = gradient_by_layer(lab, choices)
            x = [i / (depth - 1) for i in range(depth)]
            first.append(Curve(label, x, norms[placement, depth]))
            steps = max(2, int(share * STEPS))
            _, losses = lab.train(label, choices, length=LENGTH, count=COUNT, steps=steps, lr=2e-3)
            curves.append(Curve(label, [float(i + 1) for i in range(steps)], smooth(losses)))
            ends[placement, depth] = float(np.mean(losses[-max(1, steps // 10) :]))

    def spread(placement: str) -> float:
        """How much larger the last layer's gradient is than the first's, at the largest depth."""
        return norms[placement, DEPTHS[-1]][-1] / norms[placement, DEPTHS[-1]][0]

    deep = DEPTHS[-1]
    claims = [
        Claim(
            "Xiong et al. 2020, theorem 1 and figure 3",
            "At the start, post-norm's gradients are larger the nearer a layer is to the loss; "
            "pre-norm's are not.",
            f"the last of {deep} layers beside the first: post-norm {spread('post'):.2g} times, "
            f"pre-norm {spread('pre'):.2g} times",
            spread("post") > 2 and spread("pre") < 2,
        ),
        Claim(
            "Wang et al. 2019; Xiong et al. 2020",
            f"Pre-norm can be trained at {deep} layers where post-norm cannot.",
            f"after {max(2, int(share * STEPS))} steps pre-norm {ends['pre', deep]:.2f} nats, "
            f"post-norm {ends['post', deep]:.2f}",
            ends["pre", deep] < ends["post", deep] - 0.3,
        ),
        Claim(
            "Liu et al. 2020, section 1",
            f"Where both can be trained, at {DEPTHS[0]} layers, post-norm is as good or better.",
            f"pre-norm {ends['pre', DEPTHS[0]]:.2f} nats, post-norm {ends['post', DEPTHS[0]]:.2f}",
            ends["post", DEPTHS[0]] <= ends["pre", DEPTHS[0]] + 0.02,
        ),
    ]
    plots = [
        Plot("Gradient norm by layer, at the start", "first layer to last", "‖dW‖", first, True),
        Plot("A short training", "step", "nats a byte", curves),
    ]
    head = ["layers", "pre-norm, nats", "post-norm, nats"]
    rows = [[str(n), f"{ends['pre', n]:.3f}", f"{ends['post', n]:.3f}"] for n in DEPTHS]
    return Finding(plots, [head, *rows], claims)
