"""Gradients: one op at a time, its backward first."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from dist.study.exercise import Exercise, Mistake


def _logits(rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    for shape, V in (((2,), 3), ((1,), 2), ((2, 3), 5), ((4,), 1), ((3, 2), 7)):
        z = rng.normal(size=(*shape, V))
        targets = rng.integers(0, V, shape)
        for mask in (np.ones(shape, bool), rng.random(shape) < 0.5):
            yield z.copy(), np.where(mask, targets, -100), mask
    yield np.array([[1000.0, 999.0]]), np.array([0]), np.array([True])
    yield np.array([[0.0, 1500.0, 0.0]]), np.array([0]), np.array([True])


EXERCISES = (
    Exercise(
        "relu",
        "reference.relu",
        """\
y = max(x, 0): what is positive passes, the rest becomes zero. Where x passed, y moves as x does, so
dx is dy there; where it did not, y does not move and dx is zero. The cache is x, and at x = 0 the
slope is taken to be zero.""",
        kernels="accel.cpu.elementwise",
    ),
    Exercise(
        "add",
        "reference.add",
        """\
y = a + b with NumPy's broadcasting: an array of one row may be added to many. An element that took
part in several elements of y gets the sum of their gradients, so da has a's shape again: sum dy
over every axis along which a was repeated. There may be axes in front that a lacks, and axes of
length 1 that were stretched.""",
    ),
    Exercise(
        "linear",
        "reference.linear",
        """\
y = x W + b: each output is a sum over inputs, y_no = Σ_i x_ni W_io + b_o. Follow one element: x_ni
reaches every y_no through W_io, W_io meets every row n through x_ni, and b_o is in every row. The
shapes leave no other choice: dx is x's, dW is W's, and rows may have any number of axes before.""",
    ),
    Exercise(
        "embedding",
        "reference.embedding",
        """\
y[n] = table[id_n]: a row for each token id. The gradient of a row is the sum of dy over every
position that looked it up; rows that nobody looked up get zero. An id may occur many times, and
table[ids] += dy counts it once.""",
    ),
    Exercise(
        "swiglu",
        "reference.swiglu",
        """\
x holds a gate g and then an up u side by side, and y = silu(g) u with silu(g) = g σ(g). The slope
of the sigmoid is σ' = σ (1 - σ), so by the product rule silu'(g) = σ + g σ (1 - σ). dx has the two
halves in the order in which x has them.""",
        kernels="accel.cpu.activations",
    ),
    Exercise(
        "gelu",
        "reference.gelu",
        """\
y = x Φ(x), Φ(x) the chance that a standard normal variable lies below x. Φ's derivative is the
density φ(x) = exp(-x²/2)/√(2π). x stands in y twice, so the product rule gives two terms.""",
        given=("_normal_cdf",),
    ),
    Exercise(
        "gelu_tanh",
        "reference.gelu_tanh",
        """\
y = ½ x (1 + h) with h = tanh(c (x + a x³)), c = √(2/π) and a = 0.044715: GPT-2's GELU. tanh' = 1 -
tanh², and the chain rule goes on into what stands inside tanh. x stands outside and inside, so the
product rule gives two terms.""",
    ),
    Exercise(
        "rmsnorm",
        "reference.rmsnorm",
        """\
y = x r g with r = 1/√(mean(x²) + ε): a row is divided by its root mean square, then scaled. Every
x_i reaches its own y_i directly and all y_j of the row through r, so dx has two terms; write n = x
r and dn = dy g first. The gain is shared by all rows, so dg sums over them.""",
        kernels="accel.cpu.norms",
    ),
    Exercise(
        "layernorm",
        "reference.layernorm",
        """\
y = n g + b with n = (x - μ) r, r = 1/√(var + ε): a row loses its mean, is divided by its standard
deviation, then scaled and shifted. x_i reaches all of its row through μ and through r, so dx has
three terms: dn itself, less its mean, less its part along n. The cache keeps n, and g and b are
shared by all rows.""",
        kernels="accel.cpu.norms",
    ),
    Exercise(
        "cross_entropy",
        "reference.cross_entropy",
        """\
The loss of logits z with target y is log Σ_j exp(z_j) - z_y, and its gradient is softmax(z) minus
one at the target. Rows where mask is False count for nothing, and their target need not be an entry
of the vocabulary. The loss is a sum over rows and not a mean, as ranks divide once, by the global
number.""",
        (
            Mistake(
                "is the one-hot of the target not taken off? The gradient is p - onehot(y).",
                {
                    "np.take_along_axis(p, at_target, axis=-1) - 1": "np.take_along_axis(p, "
                    "at_target, axis=-1)"
                },
            ),
            Mistake(
                "are masked rows not set to zero? They count for nothing.",
                {"return np.where(mask[..., None], p, 0)": "return p"},
            ),
            Mistake(
                "mean for sum? The loss is a sum over rows, so nothing divides by their number.",
                {"np.where(mask[..., None], p, 0)": "np.where(mask[..., None], p, 0) / mask.size"},
            ),
            Mistake(
                "mean over the rows that count? The loss is a sum, so nothing divides.",
                {"np.where(mask[..., None], p, 0)": "np.where(mask[..., None], p, 0) / mask.sum()"},
            ),
            Mistake(
                "is the sign turned? The gradient of the loss is p - onehot(y).",
                {"np.where(mask[..., None], p, 0)": "np.where(mask[..., None], -p, 0)"},
            ),
        ),
        function="dlogits",
        cases=_logits,
    ),
)
