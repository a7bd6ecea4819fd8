"""Optimizer and ranks: a step, how long it is, and how ranks share it without changing a bit."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from dist.study.exercise import Exercise, Mistake, Options
from reference import ops
from reference.types import Array


def _norms(rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    for norm in (0.0, 0.25, 0.5, 1.0, 2.0, 1e-3, 1e6, float("nan"), float("inf")):
        for most in (1.0, 0.5):
            yield norm, most
    yield 1.0, 0.0


def _steps(rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    for step in (1, 2, 3, 4, 5, 7, 10, 12):
        for peak, warmup, fraction in ((1.0, 4, 0.0), (0.003, 4, 0.1), (0.003, 0, 0.1)):
            given = Options(peak=peak, warmup_steps=warmup, total_steps=10, final_fraction=fraction)
            for kind in ("cosine", "linear", "constant"):
                yield step, Options(given, schedule=kind)
            yield step, Options(given, schedule="wsd", decay_steps=3)
    for step in (9, 10, 12):  # nothing is left behind the warm-up
        for kind in ("cosine", "linear", "constant"):
            yield step, Options(given, schedule=kind, peak=1.0, warmup_steps=10, decay_steps=None)
    yield 0, given
    wrongs: tuple[dict[str, Any], ...] = (
        {"schedule": "step"},
        {"warmup_steps": 11},
        {"warmup_steps": -1},
        *({"peak": peak} for peak in (-1.0, math.inf, math.nan)),
        *({"final_fraction": fraction} for fraction in (-0.1, 1.1)),
        *({"schedule": "wsd", "decay_steps": n} for n in (None, 0, 11)),
    )
    for wrong in wrongs:
        yield 2, Options(given, **wrong)


class Adding:
    """``accumulate`` for one call: it counts its calls, and writes into nothing but the parts."""

    def __init__(self, parts: list[Array]) -> None:
        self.parts, self.calls = list(parts), 0

    def __repr__(self) -> str:
        return "accumulate"

    def __call__(self, left: Array, right: Array) -> None:
        if not any(np.shares_memory(left, part) for part in self.parts):
            raise ValueError("accumulate is to add to the parts that are given, not to copies")
        self.calls += 1
        ops.accumulate(left, right)

    def missing(self, _parts: list[Array]) -> str:
        """Say how often it was called, "" where that is once for each part but one."""
        due = len(self.parts) - 1
        return "" if self.calls == due else f"calls accumulate {self.calls} times, should be {due}"


def _leaves(rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    for n in (1, 2, 4, 8, 16):
        size = 10.0 ** rng.uniform(-4, 4, (n, 5))
        sign = rng.normal(size=(n, 5))
        parts = [*(size * sign).astype(np.float32)]
        yield Adding(parts), parts


def _slices(rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    for block in (1, 4):
        for cuts in ([0, 1], [0, 5], [0, 8], [0, 23], [0, 4, 5], [0, 8, 12, 32, 45]):
            for size in (1, 2, 4, 8):
                yield cuts, block, size


def _weights(rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    yield ((1.0,),)
    yield ((1.0, 1.0, 1.0),)
    yield ((0.8, 0.2),)
    for at in range(3):  # what is rounded to the nearest here adds up to 1,025
        yield (tuple(0.7 if i == at else 0.15 for i in range(3)),)
    for n in (2, 3, 5):
        yield (tuple(float(w) for w in rng.random(n) + 0.1),)
    yield ((1.0, 1e-6),)


def _windows(rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    for B, T in ((1, 2), (1, 3), (2, 4), (3, 7)):
        ids = [rng.integers(0, 5, T).astype(np.int32) for _ in range(B)]
        for eos in (None, 2):
            yield [(row, rng.random(T) < 0.7) for row in ids], eos


EXERCISES = (
    Exercise(
        "clip",
        "reference.global_norm",
        """\
A gradient whose norm is larger than max_norm is made that long, by one factor for all of it; a
smaller one is left as it is. So the factor is never above 1, and 1 for a norm of zero. A norm that
is not finite must not become a step: a ValueError, as for a max_norm that is not positive.""",
        (
            Mistake(
                "are small gradients made longer? The factor is never above 1.",
                {"min(1.0, max_norm / norm)": "max_norm / norm"},
            ),
            Mistake(
                "is 1e-6 added to the norm, as PyTorch does? Here it is not.",
                {"max_norm / norm)": "max_norm / (norm + 1e-6))"},
            ),
            Mistake(
                "does a norm of NaN or infinity become a step? It must be refused.",
                {"if not math.isfinite(norm):": "if False:"},
            ),
        ),
        function="clip_scale",
        cases=_norms,
    ),
    Exercise(
        "adamw",
        "reference.adamw",
        """\
m and v are running means of the gradient and of its square, both from zero, which dividing by 1 -
βᵗ undoes; t counts from 1. The step is m̂ / (√v̂ + ε), with ε outside the root. Weight decay is
decoupled: it is added to the step and not to the gradient, and only for the first n_decayed
elements.""",
    ),
    Exercise(
        "schedule",
        "reference.schedule",
        """\
The rate rises linearly to its peak, reached at warmup_steps, with step counted from 1. Then, with x
from 0 to 1 over the steps that are left, a cosine or a line brings it down to final_fraction of the
peak; wsd stays at the peak until the last decay_steps. After total_steps it stays where it ended. A
ValueError refuses another schedule, a step below 1, a warm-up below 0 or longer than total_steps, a
peak that is negative or not finite, a final_fraction outside 0 to 1, and for wsd decay_steps that
are missing, below 1 or more than follow the warm-up.""",
        (
            Mistake(
                "are steps counted from 0? The first is 1, and takes peak / warmup_steps already.",
                {"return peak * step / warmup_steps": "return peak * (step - 1) / warmup_steps"},
            ),
            Mistake(
                "are steps counted from 0? The first is 1, and takes peak / warmup_steps already.",
                {
                    "if step < warmup_steps:": "if 0 < warmup_steps and step <= warmup_steps:",
                    "return peak * step / warmup_steps": "return peak * (step - 1) / warmup_steps",
                },
            ),
            Mistake(
                "are steps counted from 0? The first is 1, and takes peak / warmup_steps already.",
                {"    if step < warmup_steps:\n": "    step -= 1\n    if step < warmup_steps:\n"},
            ),
            Mistake(
                "does the cosine end at zero? It ends at final_fraction of the peak.",
                {"(final_fraction + (1 - final_fraction) * (1 + math": "((1 + math"},
            ),
            Mistake(
                "does x start at step 0 rather than at the end of the warm-up?",
                {"x = (step - warmup_steps) / span if span else 0.0": "x = step / total_steps"},
            ),
            Mistake(
                "does the rate rise again after total_steps? It stays where it ended.",
                {"    step = min(step, total_steps)\n": ""},
            ),
            Mistake(
                "does the rate rise again after total_steps? It stays where it ended.",
                {
                    "    step = min(step, total_steps)\n": "",
                    "/ span if span else 0.0": "/ max(1, span)",
                },
            ),
        ),
        function="learning_rate",
        given=("Schedule",),
        cases=_steps,
    ),
    Exercise(
        "targets",
        "dist.data",
        """\
Each window gives ids, and its targets are the tokens one position later; the last position has
none, so its mask is False and its target 0. A target counts where that token is to be predicted,
so the mask moves along with the tokens. With eos a document ends with its eos: documents number
them from 0, the eos belonging to the one that it ends.""",
        (
            Mistake(
                "is each token asked to predict itself? The target is the token after it.",
                {"targets[:, :-1] = ids[:, 1:]": "targets[:, :-1] = ids[:, :-1]"},
            ),
            Mistake(
                "does the mask stay where the tokens were? It is the target's that counts.",
                {"mask[:, :-1] = predict[:, 1:]": "mask[:, :-1] = predict[:, :-1]"},
            ),
            Mistake(
                "does the first token become the last one's target? That one has none.",
                {
                    "targets[:, :-1] = ids[:, 1:]": "targets[...] = np.roll(ids, -1, axis=1)",
                },
            ),
            Mistake(
                "does the eos belong to the next document? It ends its own.",
                {"dtype=np.int32) - ends": "dtype=np.int32)"},
            ),
        ),
        function="make_batch",
        given=("Batch",),
        cases=_windows,
    ),
    Exercise(
        "tree_sum",
        "dist.reduction",
        """\
Floating-point addition is not associative, so the order of a sum decides its bits. Here neighbours
are added in pairs, 0 with 1 and 2 with 3, then the sums in pairs, until one is left: a tree that
depends on the number of parts alone. accumulate(left, right) adds the right one to the left in
place, and the sum is returned.""",
        (
            Mistake(
                "are they added one after the other? The bits then depend on how many a rank adds.",
                {
                    "        for left, right in zip(parts[::2], parts[1::2], strict=True):\n"
                    "            accumulate(left, right)\n"
                    "        parts = parts[::2]\n": "        accumulate(parts[0], parts[1])\n"
                    "        parts = [parts[0], *parts[2:]]\n"
                },
            ),
            Mistake(
                "is the first half paired with the second? Neighbours are paired, as ranks hold "
                "contiguous leaves.",
                {
                    "zip(parts[::2], parts[1::2], strict=True)": "zip(parts[: len(parts) // 2], "
                    "parts[len(parts) // 2 :], strict=True)",
                    "        parts = parts[::2]\n": "        parts = parts[: len(parts) // 2]\n",
                },
            ),
        ),
        function="add_in_tree_order",
        cases=_leaves,
        bits=True,
        in_place=True,
        asks=Adding.missing,
    ),
    Exercise(
        "zero_slices",
        "dist.slices",
        """\
ZeRO shares the optimizer's state: of each bucket, from cuts[b] to cuts[b + 1], each of W = size
ranks owns one slice, given by W + 1 offsets in the whole array. Slices are whole blocks counted
from the bucket's begin, so that norms are summed by the same blocks for every W; a bucket's last
block may be short. With n blocks in the buckets before, slice r of one of k blocks begins at its
block (k·r + (n mod W)) // W, so that those ranks that get one block more change from bucket to
bucket.""",
        (
            Mistake(
                "are slices cut within blocks? Each is a number of whole blocks.",
                {
                    "[min(high, low + block * end) for end in ends]": "[low + (high - low) * r "
                    "// size for r in range(size + 1)]"
                },
            ),
            Mistake(
                "is the last, short block forgotten? Round the number of blocks up.",
                {"blocks = -(-(high - low) // block)": "blocks = (high - low) // block"},
            ),
            Mistake(
                "does an offset lie behind the bucket? Its last block may be short.",
                {"min(high, low + block * end)": "low + block * end"},
            ),
            Mistake(
                "do the same ranks get more in every bucket? The blocks before count.",
                {"        before = (before + blocks) % size\n": ""},
            ),
            Mistake(
                "is n not taken modulo W? Slice 0 of a bucket begins where the bucket does.",
                {"before = (before + blocks) % size": "before = before + blocks"},
            ),
            Mistake(
                "do offsets count from the bucket's begin? They are places in the whole array.",
                {"min(high, low + block * end)": "min(high - low, block * end)"},
            ),
            Mistake(
                "are blocks counted from 0? Each bucket begins with a block of its own.",
                {"min(high, low + block * end)": "min(high, block * end)"},
            ),
        ),
        function="bounds_of_slices",
        cases=_slices,
    ),
    Exercise(
        "mixture",
        "dist.order",
        """\
Sources are mixed by weight, and in every MIX_BLOCK = 1,024 windows each has its exact share. Shares
are whole numbers that add up to 1,024: round each down, then give one more to those that lost most,
the first among equals. A source that would get none is refused by a ValueError.""",
        (
            Mistake(
                "do the shares add up to less than 1,024? What rounding takes must be given out.",
                {"        counts[j] += 1\n": "        pass\n"},
            ),
            Mistake(
                "is each share rounded to the nearest? Round all down, then give out what is left.",
                {
                    "[int(e) for e in exact]": "[round(e) for e in exact]",
                    "[: MIX_BLOCK - sum(counts)]": "[: max(0, MIX_BLOCK - sum(counts))]",
                },
            ),
            Mistake(
                "does what is left go to the first sources? It goes to those that lost most.",
                {"key=lambda j: (counts[j] - exact[j], j)": "key=lambda j: j"},
            ),
            Mistake(
                "does the last among equals get what is left? The first does.",
                {
                    "key=lambda j: (counts[j] - exact[j], j)": "key=lambda j: (counts[j] - "
                    "exact[j], -j)"
                },
            ),
            Mistake(
                "may a source get nothing? That is refused.",
                {"if 0 in counts:": "if False:"},
            ),
        ),
        function="shares",
        cases=_weights,
    ),
)
