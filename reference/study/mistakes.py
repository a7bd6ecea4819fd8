"""Four mistakes that teaching listings of a first transformer make, and how each is seen.

They train, they print losses that fall, and so they are copied. The model is ``classroom.py``'s.

1. **Generation feeds only the last word.** Each new word is predicted from the one before it, and
   the transformer that learned from whole prefixes answers as a bigram model would: after the same
   word always the same. *Seen* by comparing its next words with those from the whole prefix.
2. **A tied decoder is kept as a second parameter.** ``decoder.weight = encoder.weight`` makes one
   array with two names. An optimizer that is given both names steps it twice, each time by the
   whole gradient: the table learns at twice the rate, and its decay is doubled. *Seen* in one step:
   AdamW's first moves each number by lr (``reference/adamw.py``: m̂/√v̂ is ±1), here by 2 lr.
3. **Sinusoids with the place as base.** sin(k / 10000^(2i/D)) for place k and pair i is read as
   sin(k / k^(2i/D)). The right table has PE_k·PE_(k+n) = Σ_i cos(n ω_i), since sin a sin b + cos a
   cos b = cos(a - b): near and far look alike wherever they are. *Seen* in the spread of these
   products over k, which is then zero to rounding; and place 0 divides by zero.
4. **Three indices into a table of two axes.** A batch of ids is (B, T); ``E[b, t, w]`` is not the
   row of word w. *Seen* at once, as it raises. Its cousin with two is silent: ``E[w, u]`` is one
   number where ``E[[w, u]]`` is two rows, and broadcasting carries that number on without a word.

    python -m reference.study.mistakes
"""

from textwrap import fill

import numpy as np

from reference.adamw import adamw
from reference.sinusoidal import sinusoidal_table
from reference.study import classroom, shown
from reference.study.poem import POEM, between_marks
from reference.types import Array, Ids, Params

# ---- 1. generation that feeds only the last word -------------------------------------------------


def recite_by_last_word(p: Params, first: Ids, length: int) -> Ids:
    """Return ``length`` words, each predicted from the one before it alone: the mistake."""
    ids = first
    while len(ids) < length:
        z, _ = classroom.forward(p, ids[-1:])  # should be ids
        ids = np.append(ids, np.argmax(z[-1]))
    return ids


# ---- 2. one table under two names ----------------------------------------------------------------


def first_step(tied_twice: bool, lr: float = 0.01) -> dict[str, float]:
    """Return by how many lr AdamW's first step moved each parameter, on average."""
    ids, words = between_marks("the sea and the sun and the moon")
    layout = classroom.layout_of(len(words), classroom.TRANSFORMER)
    p = layout.views(layout.init(seed=0, dtype=np.float64))
    grads = layout.views(np.zeros(layout.size))
    classroom.loss_and_grads(p, grads, ids)
    before = {name: x.copy() for name, x in p.items()}
    given = [*p, "E"] if tied_twice else [*p]  # what the optimizer is told to step
    for name in given:
        x, g = p[name].reshape(-1), grads[name].reshape(-1)
        adamw(
            x, np.zeros_like(x), np.zeros_like(x), g, step=1, lr=lr,
            beta1=0.9, beta2=0.99, eps=1e-12, weight_decay=0.0, n_decayed=0,
        )  # fmt: skip
    return {
        name: float(np.mean(np.abs(p[name] - before[name])[grads[name] != 0]) / lr) for name in p
    }


# ---- 3. the place as base ------------------------------------------------------------------------


def place_as_base(length: int, width: int) -> Array:
    """Return the table (length, width) of places 1 … length with base k: the mistake."""
    k = np.arange(1, length + 1)[:, None]
    angle = k / k.astype(float) ** (np.arange(0, width, 2) / width)
    return np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(length, width)


def spread(table: Array, n: int) -> float:
    """Return the difference between the largest and the smallest PE_k·PE_(k+n)."""
    products = np.sum(table[:-n] * table[n:], axis=1)
    return float(products.max() - products.min())


# ---- 4. three indices into two axes --------------------------------------------------------------


def three_indices() -> str:
    """Return what NumPy says to ``E[b, t, w]`` where E is (V, D)."""
    try:
        np.zeros((5, 4))[0, 1, 2]
    except IndexError as error:
        return str(error)
    raise AssertionError("a table of two axes took three indices")


def main() -> None:
    """Make each mistake, and show by what it is seen."""
    ids, words = between_marks(POEM)
    p, _ = classroom.learn(ids, len(words))
    whole = classroom.recite(p, ids[:1], len(ids))
    last = recite_by_last_word(p, ids[:1], len(ids))
    print("Mistake 1, generation feeds only the last word: one model, asked in two ways\n")
    for name, said in (("whole prefix", whole), ("last word", last)):
        right = np.sum(said[1:] == ids[1:])
        shown = " ".join(words[i] for i in said[1:14]).replace("\n", "/")
        print(f"  {name:<14}{right:>3} of {len(ids) - 1} words right:\n    {shown} …")
    print()

    print("Mistake 2, a tied table that AdamW knows by two names: its first step\n")
    for name, twice in (("one name", False), ("two names", True)):
        moved = first_step(twice)
        print(f"  {name:<14}E moves by {moved['E']:.2f} lr, W_up by {moved['W_up']:.2f} lr")

    print("\nMistake 3, the place as base of the sinusoids: spread of PE_k·PE_(k+5), D = 48\n")
    print(f"  base 10000    {spread(sinusoidal_table(56, 48, np.float64), 5):.1e}")
    print(f"  base k        {spread(place_as_base(56, 48), 5):.1e}\n")

    print("Mistake 4, three indices into a table of two axes\n")
    says = f"  E[b, t, w]    IndexError: {three_indices()}"
    print(fill(says, 80, subsequent_indent=" " * 16))
    E = np.arange(20.0).reshape(5, 4)
    print(f"  E[1, 2]       {E[1, 2]:g}: one number, and no error")
    print(f"  E[[1, 2]]     the rows of words 1 and 2:\n    {E[[1, 2]].tolist()}")


if __name__ == "__main__":
    shown(main)
