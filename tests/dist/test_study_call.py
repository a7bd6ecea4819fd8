"""Beside the right values of a function: what its call leaves alone, its types, its memory."""

from types import ModuleType

import pytest

from dist.study import blank
from dist.study.exercise import module_of
from dist.study.grade import grade_module
from dist.study.tracks import EXERCISES


def of(source: str) -> ModuleType:
    """A learner's module."""
    return module_of(f"import numpy as np\n{source}", "mine")


SUM = "np.sum(dp * p, axis=-1, keepdims=True)"
TABLE = """
def backward(dO, Q, K, V, O, lse):
    T, d = Q.shape
    S = np.where(np.tril(np.ones((T, T), bool)), Q @ K.T / d**0.5, -np.inf)
    P = np.exp(S - lse[:, None])
    dS = P * (dO @ V.T - np.sum(dO * O, axis=1, keepdims=True)) / d**0.5
    return dS @ K, dS.T @ Q, P.T @ dO
"""
ROWS = """
def backward(dO, Q, K, V, O, lse):
    T, d = Q.shape
    dQ, dK, dV = np.zeros_like(Q), np.zeros_like(K), np.zeros_like(V)
    for t in range(T):
        k = K[: t + 1]
        P = np.exp(k @ Q[t] / d**0.5 - lse[t])
        dS = P * (V[: t + 1] @ dO[t] - dO[t] @ O[t]) / d**0.5
        dQ[t] = dS @ k
        dK[: t + 1] += np.outer(dS, Q[t])
        dV[: t + 1] += np.outer(P, dO[t])
    return dQ, dK, dV
"""
WINDOWS = """
from dist.data import Batch, make_batch as right
def make_batch(windows, eos=None):
    ids, targets, mask, documents = right(windows, eos)
    {}
    return Batch(ids, targets, mask, documents)
"""
TREE_OF = """
def add_in_tree_order(accumulate, parts):
    while len(parts) > 1:
        {}
        parts = parts[::2]
    return parts[0]
"""
PAIRS = "for i in range(0, len(parts), 2): "
SHARED = """
def shares(weights):
    n = [int(1024 * w / sum(weights)) for w in weights]
    least = sorted(range(len(n)), key=lambda j: (n[j] - 1024 * weights[j] / sum(weights), j))
    for j in least[: 1024 - sum(n)]:
        n[j] += 1
    if 0 in n:
        raise ValueError("none")
    return {}
"""
CLIP = """
def clip_scale(norm, most):
    if not 0 <= norm < np.inf or most <= 0:
        raise ValueError("refused")
    return {}
"""
SEES = """
from reference import visibility
class Visibility(visibility.Visibility):
    def allowed(self):
        S, T = self.keys, self.queries
        may = self._replace(documents=None)
        may = visibility.Visibility.allowed(may) * 1
        if self.documents is not None:
            may = may * (self.documents[:, {1}, None] == self.documents[:, None])
        return may {0}
"""
# What a function gives beside right values, and what is said of it (None: it is right).
BESIDE = [
    ("softmax_backward", f"def softmax_backward(dp, p):\n    p *= dp - {SUM}\n    return p",
     "changes its argument 2"),
    ("softmax_backward", f"def softmax_backward(dp, p):\n    return (p * (dp - {SUM})).tolist()",
     "is a list, should be an array"),
    ("softmax_backward", f"def softmax_backward(dp, p):\n    return np.float32(p * (dp - {SUM}))",
     "has dtype float32, should have float64"),
    ("sampling", "from reference.generate import filter_logits as right\n"
     "def filter_logits(z, *how):\n    z[...] = right(z, *how)\n    return z",
     "changes its argument 1"),
    ("cross_entropy", "from reference.cross_entropy import dlogits as right\n"
     "def dlogits(z, y, mask):\n    out = right(z, y, mask)\n    z[...] = 0\n    return out",
     "changes its argument 1"),
    ("targets", WINDOWS.format("windows[0][0][:] = 0"), "changes its argument 1"),
    ("targets", WINDOWS.format("mask = mask.astype(int)"),
     "mask has dtype int64, should have bool"),
    ("targets", WINDOWS.format("documents = documents if eos is None else documents.astype(int)"),
     "documents has dtype int64, should have int32"),
    ("targets", WINDOWS.format("mask = ~mask"), "mask: first difference: the result[0, 0] is False"
     ", should be True"),
    ("targets", WINDOWS.format("pass"), None),
    ("tiled_backward", TABLE, "is the whole T × T table made?"),
    ("tiled_backward", ROWS, None),
    ("tiled_backward", TABLE.replace("- np.sum(dO * O, axis=1, keepdims=True)", ""),
     "is δ missing?"),
    ("tree_sum", TREE_OF.format("parts = [np.copy(p) for p in parts]\n        "
     f"{PAIRS}accumulate(parts[i], parts[i + 1])"), "to the parts that are given, not to copies"),
    ("tree_sum", TREE_OF.format(f"{PAIRS}parts[i] += parts[i + 1]"),
     "calls accumulate 0 times, should be 1"),
    ("tree_sum", TREE_OF.format(f"{PAIRS}accumulate(parts[i], parts[i + 1])"), None),
    ("tree_sum", TREE_OF.format("a, b, *parts = parts\n        accumulate(a, b)\n        "
     "parts += [a]\n        continue"), None),
    ("mixture", SHARED.format("[float(k) for k in n]"), "item 0 is 1024.0, of type float, should"),
    ("mixture", SHARED.format("np.array(n)"), "returns ndarray"),
    ("mixture", SHARED.format("[np.int64(k) for k in n]"), None),
    ("clip", CLIP.format("norm <= most or most / norm"), "is True, of type bool, should be"),
    ("clip", CLIP.format("1 if norm <= most else most / norm"), None),
    ("visibility", SEES.format("", "S - T:"), "has dtype int64, should have bool"),
    ("visibility", SEES.format("", ":T"), "are the queries' documents taken from the first T"),
    ("visibility", SEES.format("> 0", "S - T:"), None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "source", "says"), BESIDE, ids=lambda x: str(x)[:30])
def test_what_a_call_does_beside_right_values_is_told(
    name: str, source: str, says: str | None
) -> None:
    verdict = grade_module(EXERCISES[name], of(source))
    assert verdict.right == (says is None), verdict.text
    assert says is None or says in verdict.text


def test_whether_what_is_given_may_be_written_to_is_said() -> None:
    for exercise in EXERCISES.values():
        stays = "What it is given stays as it is." in blank.exercise_text(exercise, 1, "COMMAND")
        assert stays == (exercise.cases is not None and exercise.name != "tree_sum")


def test_a_generator_may_yield_one_array_again_and_again() -> None:
    text = """
import numpy as np
def running(s, v, piece):
    m, l, o = -np.inf, 0.0, np.zeros(v.shape[1])
    for i in range(0, len(s), piece):
        part = s[i : i + piece]
        new = max(m, part.max())
        shrink, e = np.exp(m - new), np.exp(part - new)
        m, l = new, l * shrink + e.sum()
        o *= shrink
        o += e @ v[i : i + piece]
        yield m, l, o
"""
    verdict = grade_module(EXERCISES["online_softmax"], module_of(text, "one_array"))
    assert verdict.right, verdict.text
