"""Five losses that could train a next-word model, and what goes wrong with each.

A model gives scores z (V,) for the next word; y is the word that came. The words after one context
follow a distribution q (V,), so what training minimises is Σ_y q_y ℓ(z, y). Cross-entropy,
ℓ = -log softmax(z)_y, is least exactly where softmax(z) = q, and its slope, softmax(z) - onehot(y),
is large when the model is wrong and zero only when it is right. The others:

zero-one, [argmax z ≠ y]
    What one would like to have few of. It is flat: a small change of z changes no argmax, the
    gradient is zero wherever it exists, and descent never takes a step.
squared error on ids, (ŷ - y)² with a single number ŷ as the prediction
    Treats names as amounts. It is least at the mean id, a word that may never follow, and numbering
    the words in another order gives another answer.
squared error on one-hots, ‖softmax(z) - onehot(y)‖² (Brier 1950)
    Is least at softmax(z) = q, as it should be. But it costs at most 2 however wrong the model is,
    and its slope carries a factor p from the softmax, so that a model that is wrong and sure of it
    hardly learns. It is not convex in z.
hinge, max(0, 1 + max_(j≠y) z_j - z_y) (Crammer & Singer 2001)
    Asks for a margin of one and no more. It depends on the majority only: q = (0.6, 0.4) and
    (0.9, 0.1) have the same best scores, from which neither q can be read. With no word above one
    half it is least where all scores are equal, and has learned nothing.
contrastive, -log (e^z_y / (e^z_y + e^z_j)) with a word j drawn from some noise n (V,)
    Tells the word that came from one that was drawn, and needs two scores where cross-entropy needs
    V (Gutmann & Hyvärinen 2010; van den Oord et al. 2018, eq. 4, with one word of noise). It is
    least at z = log(q / n): what it learns is how much likelier a word is here than in the noise.
    Where n is how often words occur, common words score low, and softmax(z) is not q, but
    softmax(z + log n) is: n must be known to read a probability from it.

The picture in the README of ``reference`` has each loss, and its slope, against the probability p
that the model gives to the word that came.

    python -m reference.study.losses
"""

from collections.abc import Callable

import numpy as np

from reference.softmax import softmax, softmax_backward
from reference.study import shown
from reference.study.poem import bigram_counts, encode
from reference.types import Array

ScoreLoss = Callable[[Array, int], tuple[float, Array]]  # (scores, word) -> loss, gradient


def zero_one(z: Array, y: int) -> float:
    """Return 1 when the best of the scores z (V,) is not y, else 0; its gradient is zero."""
    return float(np.argmax(z) != y)


def squared_error_on_ids(prediction: float, y: int) -> tuple[float, float]:
    """Return (prediction - y)² and its slope."""
    return (prediction - y) ** 2, 2 * (prediction - y)


def squared_error_on_onehots(z: Array, y: int) -> tuple[float, Array]:
    """Return ‖softmax(z) - onehot(y)‖² of scores z (V,), and its gradient (V,)."""
    p = softmax(z)
    error = p - _onehot(y, len(z))
    return float(error @ error), softmax_backward(2 * error, p)


def hinge(z: Array, y: int) -> tuple[float, Array]:
    """Return max(0, 1 + max_(j≠y) z_j - z_y) of scores z (V,), and a subgradient (V,)."""
    rival = int(np.argmax(np.where(np.arange(len(z)) == y, -np.inf, z)))
    loss = max(0.0, float(1 + z[rival] - z[y]))
    return loss, (loss > 0) * (_onehot(rival, len(z)) - _onehot(y, len(z)))


def contrastive(noise: Array) -> ScoreLoss:
    """Return the mean over words j drawn from ``noise`` (V,) of log(1 + e^(z_j - z_y))."""

    def loss(z: Array, y: int) -> tuple[float, Array]:
        mistaken = noise / (1 + np.exp(z[y] - z))  # drawn, and taken for the word that came
        return float(noise @ np.logaddexp(0, z - z[y])), mistaken - mistaken.sum() * _onehot(
            y, len(z)
        )

    return loss


def cross_entropy(z: Array, y: int) -> tuple[float, Array]:
    """Return -log softmax(z)_y of scores z (V,), and its gradient (V,): p - onehot(y)."""
    top = np.max(z)
    lse = top + np.log(np.sum(np.exp(z - top)))
    return float(lse - z[y]), softmax(z) - _onehot(y, len(z))


def expected(loss: ScoreLoss, z: Array, q: Array) -> tuple[float, Array]:
    """Return Σ_y q_y ℓ(z, y) and its gradient (V,): what training minimises in one context."""
    total, gradient = 0.0, np.zeros(len(z))
    for y, chance in enumerate(q):
        value, slope = loss(z, y)
        total += float(chance) * value
        gradient += chance * slope
    return total, gradient


def descend(loss: ScoreLoss, z: Array, q: Array, *, steps: int, rate: float) -> Array:
    """Return the scores (V,) after plain gradient descent from z on the expected loss."""
    for _ in range(steps):
        z = z - rate * expected(loss, z, q)[1]
    return z


def main() -> None:
    """Print one failure of each loss, and how cross-entropy fares in the same place."""
    print("zero-one: flat. 10,000 random scores of 24 words, each moved by a millionth:")
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((10_000, 24))
    moved = scores + 1e-6 * rng.standard_normal(scores.shape)
    pairs = list(zip(scores, moved, strict=True))
    changed = sum(zero_one(a, 0) != zero_one(b, 0) for a, b in pairs)
    by_entropy = sum(cross_entropy(a, 0)[0] != cross_entropy(b, 0)[0] for a, b in pairs)
    print(f"  the loss changed {changed} times; cross-entropy {by_entropy:,} times\n")

    ids, vocabulary = encode()
    counts = bigram_counts(ids, len(vocabulary))[vocabulary.index("the")]
    q = counts / counts.sum()
    followers = np.flatnonzero(q)
    print("squared error on ids: a word that never follows. After 'the' the poem has (id)")
    print("  " + ", ".join(f"{vocabulary[y]} ({y}) {counts[y]:.0f} x" for y in followers))
    mean = float(q @ np.arange(len(q)))
    nearest = round(mean)
    print(f"  the mean id is {mean:.2f}: it predicts 'the {vocabulary[nearest]}'\n")

    print("squared error on one-hots: the surer of a wrong word, the less it learns.")
    print("  wrong by   squared error   its slope   cross-entropy   its slope")
    for margin in (0, 5, 10, 20):
        z = np.array([margin, 0.0])  # the word that came is the second
        brier, entropy = squared_error_on_onehots(z, 1), cross_entropy(z, 1)
        print(
            f"  {margin:>8}{brier[0]:>16.4f}{np.abs(brier[1]).max():>12.1e}"
            f"{entropy[0]:>16.4f}{np.abs(entropy[1]).max():>12.4f}"
        )

    print("\nhinge: hears the majority only. The scores it descends to, as probabilities, and")
    print("those of cross-entropy:")
    for chances in ((0.6, 0.4), (0.9, 0.1), (0.4, 0.3, 0.3)):
        start = np.linspace(-2, 2, len(chances))  # wrong: the rarest word scores best
        settled = [
            softmax(descend(loss, start, np.array(chances), steps=5_000, rate=0.01))
            for loss in (hinge, cross_entropy)
        ]
        shown = [" ".join(f"{p:.2f}" for p in p_settled) for p_settled in settled]
        true = " ".join(f"{chance:.2f}" for chance in chances)
        print(f"  true {true:<16} hinge {shown[0]:<16} cross-entropy {shown[1]}")

    print("\ncontrastive: learns what is likelier here than in the noise.")
    q, noise = np.array([0.5, 0.3, 0.2]), np.array([0.6, 0.3, 0.1])
    z = descend(contrastive(noise), np.zeros(3), q, steps=5_000, rate=0.1)
    for name, shown_p in (("true", q), ("noise", noise), ("softmax(z)", softmax(z)),
                          ("softmax(z + log noise)", softmax(z + np.log(noise)))):  # fmt: skip
        print(f"  {name:<24}" + " ".join(f"{chance:.2f}" for chance in shown_p))


def _onehot(y: int, size: int) -> Array:
    return np.asarray(np.eye(size)[y])


if __name__ == "__main__":
    shown(main)
