"""Attention: probabilities, positions, who may see whom, and the whole."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from dist.study.exercise import Exercise, Mistake
from reference.softmax import softmax
from reference.study import tiled_attention

LONG = 512  # positions whose table has 2 MiB


def _probabilities(rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    for shape in ((2,), (1,), (3,), (2, 3), (2, 1, 4), (5, 7)):
        yield rng.normal(size=shape), softmax(rng.normal(size=shape))


def _tables(rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    for length, width in ((1, 2), (2, 2), (3, 4), (5, 6), (8, 16), (33, 34), (2, 3)):
        for dtype in (np.float64, np.float32):
            yield length, width, dtype


def _heads(rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    for n in range(-1, 21):
        for dtype in (np.float64, np.float32):
            yield n, dtype


def _who(rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    """Yield the rules of an attention, for a method of the record that they make."""
    for T, S in ((1, 1), (2, 2), (3, 3), (2, 3), (3, 2), (1, 4), (5, 7)):
        for causal, window in ((True, 0), (False, 0), (True, 1), (True, 2), (False, 2)):
            yield T, S, causal, window
        for causal in (True, False):
            mask = rng.random((2, S)) < 0.6
            yield T, S, causal, 0, None, mask
            if S >= T:
                documents = np.cumsum(rng.random((2, S)) < 0.4, axis=1)
                yield T, S, causal, 2, None, None, documents
                yield T, S, causal, 0, None, mask, documents


def _rows(rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    for n, piece in ((1, 1), (2, 1), (3, 2), (6, 2), (7, 3), (9, 9)):
        yield 3 * rng.normal(size=n), rng.normal(size=(n, 2)), piece
    yield np.array([1000.0, 999.0, 1001.0]), rng.normal(size=(3, 1)), 1


def _tiles(rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    for T, d in ((1, 1), (2, 2), (5, 3), (33, 2), (70, 4), (LONG, 2)):
        dO, Q, K, V = rng.normal(size=(4, T, d))
        yield dO, Q, K, V, *tiled_attention.forward(Q, K, V)


def _choices(rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    yield np.log([0.5, 0.3, 0.2]), None, 0.5
    yield np.log([0.2, 0.5, 0.3]), None, 0.6
    yield np.zeros(3), 2, None
    yield -0.01 * np.arange(20), 6, 0.5
    for n in (1, 2, 5, 9):
        z = rng.normal(size=n)
        for k in (None, 1, 3):
            for p in (None, 0.1, 0.7, 0.95):
                for m in (None, 0.3):
                    yield z.copy(), k, p, m


EXERCISES = (
    Exercise(
        "softmax",
        "reference.softmax",
        """\
p_i = exp(z_i) / Σ_j exp(z_j) over the last axis: scores become probabilities. A constant added to
every score changes nothing, so take the row's maximum off first, and exp never overflows. Every row
is a distribution of its own.""",
    ),
    Exercise(
        "softmax_backward",
        "reference.softmax",
        """\
Each p_i depends on every score: ∂p_i/∂z_j = p_i (δ_ij - p_j), δ_ij one where i = j, else zero. Sum
dp_i times that over i, and you need no matrix: what remains is p times something. What pushes all
probabilities up together must cancel, as they sum to one.""",
        (
            Mistake(
                "is the term Σ dp p missing? A score moves all probabilities, not its own alone.",
                {"(dp - np.sum(dp * p, axis=-1, keepdims=True))": "dp"},
            ),
            Mistake(
                "is it the diagonal alone, p (1 - p)? A score moves the other probabilities too.",
                {"(dp - np.sum(dp * p, axis=-1, keepdims=True))": "dp * (1 - p)"},
            ),
            Mistake(
                "is dp not weighted by p in the sum? It is Σ dp p.",
                {"np.sum(dp * p, axis=-1, keepdims=True)": "np.sum(dp, axis=-1, keepdims=True)"},
            ),
            Mistake(
                "mean for sum? It is Σ dp p, and nothing divides by the number of scores.",
                {
                    "np.sum(dp * p, axis=-1, keepdims=True)": "np.mean(dp * p, axis=-1, "
                    "keepdims=True)"
                },
            ),
            Mistake(
                "is the sum taken over all rows? Every row has its own.",
                {"np.sum(dp * p, axis=-1, keepdims=True)": "np.sum(dp * p)"},
            ),
        ),
        function="softmax_backward",
        cases=_probabilities,
    ),
    Exercise(
        "sinusoidal",
        "reference.sinusoidal",
        """\
Position p gets the row sin(p ω_i), cos(p ω_i) for i = 0, 1, …, width/2 - 1, with ω_i =
10000^(-2i/width). Sine and cosine of one ω stand side by side, in columns 2i and 2i + 1. So a shift
by k is the same rotation of every pair, wherever it starts. An odd width is refused by a
ValueError.""",
        (
            Mistake(
                "is the exponent i/width where it is 2i/width?",
                {"np.arange(0, width, 2)": "np.arange(width // 2)"},
            ),
            Mistake(
                "do the cosines stand behind all the sines? They take turns.",
                {
                    "np.stack([np.sin(angle), np.cos(angle)], axis=-1)": "np.concatenate("
                    "[np.sin(angle), np.cos(angle)], axis=-1)"
                },
            ),
            Mistake(
                "are positions counted from 1? The first is 0.",
                {"np.arange(length)[:, None]": "np.arange(1, length + 1)[:, None]"},
            ),
            Mistake(
                "is the exponent's sign turned? Later pairs turn more slowly.",
                {"10_000.0 ** (-np.arange": "10_000.0 ** (np.arange"},
            ),
        ),
        function="sinusoidal_table",
        cases=_tables,
    ),
    Exercise(
        "rope",
        "reference.rope",
        """\
Each pair of coordinates (x_2j, x_2j+1) of the token at position t turns by the angle t ω_j, ω_j =
base^(-2j/d). A rotation's transpose is its inverse, so its gradient is turned back by the same
angle. Only the first rotate_heads heads turn, all of them when that is None. Where a scaling is
given, each ω_j is divided by what stretch says of it.""",
        given=("_rotate", "stretch"),
    ),
    Exercise(
        "alibi",
        "reference.alibi",
        """\
Each head lowers a score by its slope times the distance, and the slopes of n heads, n a power of
two, are 2^(-8/n), 2^(-16/n), …, 2^-8. For another number take the slopes of the next lower power of
two, then every second one of the next higher power's, from its first, until there are n. None or
fewer heads are refused by a ValueError.""",
        (
            Mistake(
                "are the further slopes the first ones of the next power? It is every second one.",
                {"[0::2][: n_heads - lower]": "[: n_heads - lower]"},
            ),
            Mistake(
                "do the exponents start at 0? The first slope is 2^(-8/n).",
                {"np.arange(1, n + 1) / n": "np.arange(n) / n"},
            ),
            Mistake(
                "is the formula for powers of two used for every n?",
                {
                    "lower = 2 ** int(math.log2(n_heads))": "lower = n_heads",
                },
            ),
        ),
        function="alibi_slopes",
        cases=_heads,
    ),
    Exercise(
        "visibility",
        "reference.visibility",
        """\
T queries are the last T of S positions: query t stands at t' = t + (S - T), and distance is t' - u
for key u. causal allows u ≤ t', window w allows |t' - u| < w, key_mask and documents are one for
each row of the batch. A key is seen when every rule that is asked for allows it.""",
        (
            Mistake(
                "is the window one too wide? The query's own position is one of the w.",
                {"np.abs(self.distance) < self.window": "np.abs(self.distance) <= self.window"},
            ),
            Mistake(
                "does the window end on one side alone? It is |t' - u| that is below w.",
                {"np.abs(self.distance) < self.window": "self.distance < self.window"},
            ),
            Mistake(
                "does a query not see its own position? causal allows u = t'.",
                {"self.distance >= 0": "self.distance > 0"},
            ),
            Mistake(
                "are the queries' documents taken from the first T positions? They are the last T.",
                {"self.documents[:, S - T :, None]": "self.documents[:, :T, None]"},
            ),
            Mistake(
                "is key_mask turned around? True takes part.",
                {"may & self.key_mask[:, None, :]": "may & ~self.key_mask[:, None, :]"},
            ),
        ),
        function="Visibility.allowed",
        cases=_who,
    ),
    Exercise(
        "attention",
        "reference.attention",
        """\
For one head s_tu = scale · q_t·k_u, P = softmax over the keys that t may see, o_t = Σ_u P_tu κ_tu
v_u, κ the dropout. Go back from the last line: dv and dP first, then ds through the softmax, then
dq and dk, both with the scale. G query heads read one key/value head, so its dk and dv are sums
over the group.""",
    ),
    Exercise(
        "online_softmax",
        "reference.study.tiled_attention",
        """\
A row of scores s comes in pieces and is not kept: of those so far keep the maximum m, l = Σ e^(s -
m) and o = Σ e^(s - m) v. When a piece raises the maximum to m', what was summed is e^(m - m') too
large, so it is multiplied by that before the piece is added. Begin with m = -∞ and sums of nothing,
and yield (m, l, o) after each piece: as many as there are pieces.""",
        (
            Mistake(
                "is what was summed not brought to the new maximum? l and o times e^(m - m').",
                {"l * shrink + e.sum(), o * shrink + e @ v_piece": "l + e.sum(), o + e @ v_piece"},
            ),
            Mistake(
                "is (m, l, o) yielded before the first piece too? Yield it after each piece alone.",
                {
                    "    for u in range(0, len(s), piece):": "    yield m, l, o\n    for u in "
                    "range(0, len(s), piece):"
                },
            ),
            Mistake(
                "is l brought to the new maximum and o not?",
                {"o * shrink + e @ v_piece": "o + e @ v_piece"},
            ),
            Mistake(
                "is the maximum that of the piece alone? It is that of all scores so far.",
                {"m_new = max(m, float(s_piece.max()))": "m_new = float(s_piece.max())"},
            ),
        ),
        function="running",
        cases=_rows,
    ),
    Exercise(
        "tiled_backward",
        "reference.study.tiled_attention",
        """\
The backward of one causal head, tile by tile, from what the forward kept: a tile of P is made again
as e^(S - lse), and the whole table, T × T, never. The softmax's backward needs Σ dP P over a whole
row, but that is do·o, one number a row. Add up dQ for the rows, and dK and dV for the keys, of
every tile that the mask leaves.""",
        (
            Mistake(
                "is the whole T × T table made? Make one tile of it after the other.",
                {"TILE = 32  #": "TILE = 4096  #"},
            ),
            Mistake(
                "is δ missing? ds = P (dP - δ), δ = do·o.",
                {"dS = P * (dP - delta[rows])": "dS = P * dP"},
            ),
            Mistake(
                "is the scale missing in dQ and dK? S is Q Kᵀ/√d.",
                {
                    "scale * dS @ K[keys]": "dS @ K[keys]",
                    "scale * dS.T @ Q[rows]": "dS.T @ Q[rows]",
                },
            ),
            Mistake(
                "is the scale missing in dQ? S is Q Kᵀ/√d.",
                {"scale * dS @ K[keys]": "dS @ K[keys]"},
            ),
            Mistake(
                "is the scale missing in dK? S is Q Kᵀ/√d.",
                {"scale * dS.T @ Q[rows]": "dS.T @ Q[rows]"},
            ),
            Mistake(
                "does the last tile of keys overwrite dQ? It is a sum over them.",
                {"dQ[rows] += ": "dQ[rows] = "},
            ),
            Mistake(
                "is lse missing? Without it e^S is no share of its row.",
                {"np.exp(scores(Q, K, t, u) - lse[rows, None])": "np.exp(scores(Q, K, t, u))"},
            ),
        ),
        function="backward",
        given=("scores", "tiles_up_to"),
        cases=_tiles,
        memory=8 * LONG**2,
    ),
    Exercise(
        "sampling",
        "reference.generate",
        """\
Of the logits keep the top_k largest, of these the smallest set whose probability reaches top_p, and
put -inf for all others. The entry with which the sum reaches top_p stays, so at least one does.
Equal logits favour the lower id, and probabilities for top_p are those among the k kept. Of these
min_p leaves what has at least min_p times the probability of the best.""",
        (
            Mistake(
                "is the entry that reaches top_p left out? It stays.",
                {"np.concatenate([[True], before[:-1] < top_p])": "before <= top_p"},
            ),
            Mistake(
                "is one entry too many kept? Those before it reach top_p already.",
                {
                    "np.concatenate([[True], before[:-1] < top_p])": "np.concatenate([[True, True],"
                    " before[:-2] < top_p])[: len(before)]"
                },
            ),
            Mistake(
                "are probabilities those among all entries? top_p is of those among the k kept.",
                {
                    "np.cumsum(softmax(best.astype(np.float64)))": "np.cumsum("
                    "softmax(np.sort(logits)[::-1].astype(np.float64)))[: len(best)]"
                },
            ),
            Mistake(
                "do equal logits favour the higher id? The lower ones stay.",
                {"equal[: len(best)": "equal[::-1][: len(best)"},
            ),
            Mistake(
                "is min_p a probability by itself? It is a share of the best one's.",
                {
                    "best >= best[0] + np.log(min_p)": "np.maximum(softmax(best), best == best[0]) "
                    ">= min_p"
                },
            ),
        ),
        function="filter_logits",
        given=("Sampling",),
        cases=_choices,
    ),
)
