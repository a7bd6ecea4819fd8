"""Predict the next number of a series from the last few, by least squares.

Yule 1927, "On a method of investigating periodicities in disturbed series". This is a language
model without the language: the past goes in, the next element comes out, and the loss is the mean
of squared errors. For a series s, with p numbers of context and a weight w for each, the prediction
ŷ_t of s_t is::

    ŷ_t = w_1 s_(t-p) + … + w_p s_(t-1)

Every number that has a whole past is an example, and all of them fit into one matrix: row t of X is
the true past (s_(t-p), …, s_(t-1)), and y_t = s_t is what came next. Feeding the true past, rather
than the model's own guesses, is called teacher forcing; no prediction then waits for another, and
X w gives all of them in one product. A transformer is trained in the same way, and a causal mask is
what keeps its rows from looking ahead.

The best w makes the gradient of ‖X w - y‖² vanish, 2 Xᵀ(X w - y) = 0, so::

    w = (XᵀX)⁻¹ Xᵀ y

which is the formula to remember and not the one to compute: neighbouring columns of X are almost
equal, and XᵀX has the square of the condition number of X (by how much solving can magnify errors).
``numpy.linalg.lstsq`` solves the same problem from the singular values of X itself.

    python -m reference.study.autoregression
"""

import numpy as np

from reference.study import shown
from reference.types import Array


def teacher_forced(series: Array, order: int) -> tuple[Array, Array]:
    """Return X (N, p), whose rows are the p = ``order`` numbers before each of y (N,).

    Raises
    ------
    ValueError
        When the series is not longer than ``order``.
    """
    if not 1 <= order < len(series):
        raise ValueError(
            f"order must lie in 1..{len(series) - 1} for a series of {len(series)} numbers, so "
            f"that one of them has a whole past, got {order}"
        )
    X = np.lib.stride_tricks.sliding_window_view(series, order)[:-1]
    return X, series[order:]


def fit(X: Array, y: Array) -> Array:
    """Return the w (p,) that minimises ‖X w - y‖²; the shortest, when several do."""
    return np.asarray(np.linalg.lstsq(X, y, rcond=None)[0])


def fit_by_normal_equations(X: Array, y: Array) -> Array:
    """Return (XᵀX)⁻¹ Xᵀ y, the formula as it is written: for comparison."""
    return np.asarray(np.linalg.inv(X.T @ X) @ X.T @ y)


def generate(past: Array, w: Array, n_new: int) -> Array:
    """Return ``n_new`` numbers that continue ``past``, each predicted from those before it.

    Here the model reads its own guesses, so that errors feed on errors: the difference between
    training and use that teacher forcing leaves open.
    """
    series = list(past[-len(w) :])
    for _ in range(n_new):
        series.append(np.dot(w, series[-len(w) :]))
    return np.array(series[len(w) :])


def two_tides(length: int, noise: float, seed: int = 0) -> Array:
    """Return a series (length,): two waves with periods of 12.4 and 24 hours, and some noise.

    Without noise four numbers of context tell the next one exactly: a wave of frequency ω obeys
    s_t = 2 cos(ω) s_(t-1) - s_(t-2), and two waves obey the product of two such rules.
    """
    hours = np.arange(length)
    waves = np.sin(2 * np.pi * hours / 12.4) + 0.5 * np.sin(2 * np.pi * hours / 24 + 1)
    return np.asarray(waves + noise * np.random.default_rng(seed).standard_normal(length))


def rms(errors: Array) -> float:
    """Return √mean(errors²)."""
    return float(np.sqrt(np.mean(errors**2)))


def exact_weights() -> Array:
    """Return the four weights that continue ``two_tides`` without noise, oldest number first."""
    # each rule as a polynomial: s_t - 2 cos(ω) s_(t-1) + s_(t-2) = 0
    fast, slow = (np.array([1, -2 * np.cos(2 * np.pi / period), 1]) for period in (12.4, 24))
    return np.asarray(-np.convolve(fast, slow)[:0:-1])


def main() -> None:
    """Fit the tides and print what teacher forcing and free running give."""
    train, test = 1_000, 240
    series = two_tides(train + test, noise=0.05)
    past, future = series[:train], series[train:]
    unforeseen = rms(future - two_tides(train + test, noise=0.0)[train:])
    print("Two tides, predicted hour by hour from the hours before\n")
    print(f"{'':<10}root mean square error on {test} hours never seen")
    print("hours of   reading the true   reading its own")
    print("context          past              guesses")
    for order in (1, 2, 4, 24):
        w = fit(*teacher_forced(past, order))
        X, y = teacher_forced(series[train - order :], order)
        print(f"{order:>5}{rms(X @ w - y):>17.4f}{rms(generate(past, w, test) - future):>19.4f}")
    print(f"The noise in those hours is {unforeseen:.4f}, and nothing before foretells it.\n")

    X, y = teacher_forced(two_tides(train, 0.0), 4)
    w, by_formula = fit(X, y), fit_by_normal_equations(X, y)
    print("Without noise four hours suffice. How far each solution is from the exact w:")
    exact = exact_weights()
    print(f"  lstsq on X          cond(X)   = {np.linalg.cond(X):8.1e}", end="")
    print(f"   error {np.max(np.abs(w - exact)):.1e}")
    print(f"  inverse of XᵀX      cond(XᵀX) = {np.linalg.cond(X.T @ X):8.1e}", end="")
    print(f"   error {np.max(np.abs(by_formula - exact)):.1e}")


if __name__ == "__main__":
    shown(main)
