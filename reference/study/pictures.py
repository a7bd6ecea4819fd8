"""The pictures of these pages, each drawn from the functions that it shows.

python -m reference.study.pictures            # into reference/study/pictures
python -m reference.study.pictures FOLDER
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from reference import gelu, gelu_tanh, ops, relu, swiglu
from reference.schedule import learning_rate
from reference.study import classroom, losses, rnn, shown, svg
from reference.study.poem import POEM, between_marks

FOLDER = Path(__file__).parent / "pictures"


def losses_by_probability() -> str:
    """Each loss of ``losses.py``, and its slope, against the probability of the word that came."""
    p = np.linspace(0.005, 0.995, 199)
    scores = np.stack([np.zeros_like(p), np.log(p / (1 - p))], axis=1)  # of two words; 1 came
    by_score: dict[str, losses.ScoreLoss] = {
        "cross-entropy": losses.cross_entropy,
        "squared error on one-hots": losses.squared_error_on_onehots,
        "hinge": losses.hinge,
        "contrastive, even noise": losses.contrastive(np.array([0.5, 0.5])),
        "zero-one": lambda z, y: (losses.zero_one(z, y), np.zeros(2)),
    }
    found = {
        name: np.array([(value, slope[1]) for value, slope in (loss(z, 1) for z in scores)])
        for name, loss in by_score.items()
    }
    found["squared error on ids, ŷ = p"] = np.array([losses.squared_error_on_ids(x, 1) for x in p])
    value = {name: (p, pairs[:, 0]) for name, pairs in found.items()}
    slope = {name: (p, pairs[:, 1]) for name, pairs in found.items()}
    across = "p of the word that came (two words, ids 0 and 1)"
    by = "Slope, by the score of that word (of ids: by ŷ)"
    return svg.figure([
        svg.Panel("Loss", across, "loss", (0, 1), (0, 5), value),
        svg.Panel(by, across, "slope", (0, 1), (-2, 0.25), slope),
    ])  # fmt: skip


def activations() -> str:
    """ReLU, GELU and SwiGLU's gate, their slopes, and how far GELU's tanh form is off."""
    x = np.linspace(-4, 4, 162)  # not 0, where ReLU has a kink
    gate = np.stack([x, np.ones_like(x)], axis=1)  # a gate beside an up of one
    silu, cache = swiglu.forward(gate)
    one = np.ones_like(x)
    off = 1000 * (gelu_tanh.forward(x)[0] - gelu.forward(x)[0])
    values = {
        "relu": (x, relu.forward(x)[0]),
        "gelu": (x, gelu.forward(x)[0]),
        "silu, the gate of SwiGLU": (x, silu[:, 0]),
        "1000 · (gelu by tanh - gelu)": (x, off),
    }
    slopes = {
        "relu": (x, relu.backward(one, x)),
        "gelu": (x, gelu.backward(one, x)),
        "silu, the gate of SwiGLU": (x, swiglu.backward(np.ones_like(silu), cache)[:, 0]),
    }
    return svg.figure([
        svg.Panel("y", "x", "y", (-4, 4), (-0.5, 4), values),
        svg.Panel("dy/dx", "x", "slope", (-4, 4), (-0.25, 1.25), slopes),
    ])  # fmt: skip


def schedules() -> str:
    """The learning rate of 1,000 steps, by each schedule."""
    step = np.arange(1, 1001, 5)
    rate = partial(learning_rate, peak=1.0, warmup_steps=100, total_steps=1000, decay_steps=200)
    curves = {
        kind: (step, np.array([rate(int(n), schedule=kind) for n in step]))
        for kind in ("cosine", "linear", "constant", "wsd")
    }
    title = "100 steps of warm-up, then by schedule"
    across, up = "step", "learning rate / peak"
    return svg.figure([svg.Panel(title, across, up, (0, 1000), (0, 1.1), curves)])


def rope() -> str:
    """What ``rope.py`` turns by at each position, and what that makes of a score by distance."""
    d, T, base = 16, 129, 10_000.0
    t = np.arange(T)
    unit = np.zeros((1, T, 1, d))
    unit[..., 0::2] = 1  # every pair is (1, 0), and is turned to (cos, sin)
    turned, _ = ops.rope_forward(unit, base=base)
    pairs = turned[0, :, 0].reshape(T, d // 2, 2)
    angles = np.unwrap(np.arctan2(pairs[..., 1], pairs[..., 0]), axis=0)
    by_pair = {f"pair {j}": (t, angles[:, j]) for j in (0, 1, 2, 3)}
    score = {"mean of all 8 pairs": (t, turned[0, 0, 0] @ turned[0, :, 0].T / (d // 2))}
    score |= {f"pair {j}": (t, pairs[:, j, 0]) for j in (1, 2)}
    angle, equal = "Angle, d = 16, base 10,000", "Score of equal q and k"
    return svg.figure([
        svg.Panel(angle, "position t", "radians", (0, 128), (0, 40), by_pair),
        svg.Panel(equal, "distance t - u", "q·k / (d/2)", (0, 128), (-1, 1), score),
    ])  # fmt: skip


def attention_map() -> str:
    """Whom the words of two lines look at, in the head that learned to recite the poem."""
    ids, words = between_marks(POEM)
    p, _ = classroom.learn(ids, len(words))
    _, cache = classroom.forward(p, ids[:18])
    names = [words[i].replace("\n", "↵") for i in ids[:18]]
    return svg.heat_map(cache["P"], names, names, "row: the word that looks; column: looked at")


def recurrence() -> str:
    """How strongly each word reaches a loss at the end, in recurrence and in attention."""
    curves = {
        name: (np.arange(len(norms))[::-1], norms) for name, norms in rnn.reaches(T=64).items()
    }
    title = "Gradient of a loss at the last of 64 words"
    panel = svg.Panel(title, "steps before", "norm", (0, 63), (1e-8, 10), curves, log_y=True)
    return svg.figure([panel])


PICTURES = {
    "losses": losses_by_probability,
    "activations": activations,
    "schedules": schedules,
    "rope": rope,
    "attention_map": attention_map,
    "recurrence": recurrence,
}


def main(arguments: Sequence[str] = ()) -> None:
    """Write every picture into a folder."""
    parser = argparse.ArgumentParser(
        prog="python -m reference.study.pictures", description="Draw the pictures of these pages."
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=FOLDER, help="(the one they lie in)"
    )
    folder: Path = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        path = folder / f"{name}.svg"
        path.write_text(draw(), encoding="utf-8")
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    shown(main, sys.argv[1:])
