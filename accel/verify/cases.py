"""Inputs that hurt: for every op of the contract, a generator of cases.

A generator asks ``draw.pick(options)`` for every choice, the simplest option first. Hypothesis
answers in ``search.py``, which is why a failing case shrinks towards the first options; a plain
random generator answers for the golden vectors, and may in any other test.

Sizes are one, primes, and one past the tiles that kernels are cut into (16, 32, 64, 128, 256, …).
Values come from a generator whose seed is one of the choices.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from accel.tolerance import round_bf16
from reference.alibi import alibi_slopes
from reference.types import Array, DropoutKey

Option = TypeVar("Option")

WIDTHS = (1, 2, 3, 5, 7, 8, 16, 17, 31, 33, 64, 65, 127, 129)
WIDE = (*WIDTHS, 257, 1025)
SHAPES = (
    (1,),
    (2,),
    (3,),
    (1, 1),
    (2, 3),
    (3, 1),
    (5, 7),
    (17,),
    (2, 33),
    (3, 2, 5),
    (65,),
    (129,),
)
LENGTHS = (1, 2, 3, 5, 7, 16, 17, 31, 33, 64, 65, 129)
MAX_ELEMENTS = 20_000  # of an input
MAX_SCORES = 100_000  # of a table of attention scores or logits
LAYOUTS = ("plain", "strided", "transposed", "sliced", "reversed")


class Pick(Protocol):
    """Chooses one of some options, the first being the simplest."""

    def __call__(self, options: Sequence[Option], /) -> Option: ...


class Draft(NamedTuple):
    """The arguments of a forward, by the contract's parameter names."""

    arrays: dict[str, Any]  # in the order of the signature
    options: dict[str, Any]  # the keyword-only ones


class Draw:
    """What a generator draws from.

    Parameters
    ----------
    pick : Pick
    dtype : {"float64", "float32", "bf16"}
        Values are representable in it; bf16 comes as float32.
    offers : callable, optional
        ``offers(parameter)`` says whether the kernel takes an optional parameter: True, False, or
        "always" when it cannot do without.
    """

    def __init__(
        self,
        pick: Pick,
        dtype: str,
        offers: Callable[[str], bool | str] = lambda parameter: True,
    ) -> None:
        self.pick, self.dtype, self.offers = pick, dtype, offers
        self.rng = np.random.default_rng(pick(range(1000)))

    def wants(self, parameter: str) -> bool:
        """Say whether this case uses an optional parameter."""
        offered = self.offers(parameter)
        if offered == "always":
            return True
        return bool(offered) and self.pick((False, True))

    def rounded(self, x: Array) -> Array:
        """Return x in the dtype of the case."""
        if self.dtype == "bf16":
            return round_bf16(x)
        return np.asarray(x, np.dtype(self.dtype))

    def simple(self, *shape: int) -> Array:
        """Return quarters between -2 and 2: short to read, exact in every precision."""
        return self.rounded(self.rng.integers(-8, 9, shape) / 4)

    def normal(self, *shape: int, std: float = 1.0) -> Array:
        return self.rounded(std * self.rng.standard_normal(shape))

    def values(self, *shape: int, kinds: tuple[str, ...] = ("wide", "zero rows")) -> Array:
        """Return an input: quarters, normal, or one of the more extreme ``kinds``."""
        kind = self.pick(("simple", "normal", *kinds))
        if kind == "simple":
            return self.simple(*shape)
        x = self.rng.standard_normal(shape)
        if kind == "wide":  # magnitudes from 1e-3 to 30
            x *= 10.0 ** self.rng.uniform(-3, 1.5, shape)
        elif kind == "large":
            x *= 30
        elif kind == "faint":
            x *= 0.01
        elif kind == "tiny":
            x *= 10.0 ** self.rng.uniform(-4, -2, (*shape[:-1], 1))
        elif kind == "offset":  # far from zero beside its spread
            x += self.pick((8, 1000)) * self.rng.choice([-1, 1], (*shape[:-1], 1))
        elif kind == "zero rows":
            x *= self.rng.random((*shape[:-1], 1)) < 0.5
        return self.rounded(x)

    def shape_for(self, width: int) -> tuple[int, ...]:
        """Return leading axes that fit beside a last axis."""
        return self.pick([s for s in SHAPES if math.prod(s) * width <= MAX_ELEMENTS])

    def rows(self, widths: Sequence[int] = WIDE, **kinds: Any) -> Array:
        """Return an input (..., D)."""
        width = self.pick(widths)
        return self.values(*self.shape_for(width), width, **kinds)

    def key(self) -> DropoutKey:
        return DropoutKey(*(self.pick(of) for of in ((0, 7, 2**40 + 3), (0, 5), (0, 3), (0, 12))))


def add(draw: Draw) -> Draft:
    """a + b with every kind of broadcasting."""
    b = draw.rows()
    cut = draw.pick(("same", "last", "leading", "ones", "both"))
    shape: tuple[int, ...] = b.shape
    if cut == "last":
        shape = shape[-1:]
    elif cut in ("leading", "both"):
        shape = shape[1:]
    if cut in ("ones", "both"):
        shape = tuple(n if draw.pick((True, False)) else 1 for n in shape)
    a = draw.values(*shape)
    return Draft({"a": b, "b": a} if draw.pick((True, False)) else {"a": a, "b": b}, {})


def scale(draw: Draw) -> Draft:
    factor = draw.pick((2.0, 0.3, -1.5, 0.0, 1.0))
    return Draft({"x": draw.rows()}, {"factor": factor})


def embedding(draw: Draw) -> Draft:
    """Ids that repeat, that name the first and the last row, and rows that nobody names."""
    V, D = draw.pick(WIDTHS), draw.pick(WIDTHS)
    shape = draw.shape_for(D)
    ids = draw.rng.integers(0, V, shape)
    kind = draw.pick(("random", "one id", "ends"))
    if kind == "one id":
        ids[...] = draw.pick(range(V))
    elif kind == "ends":
        ids = np.where(draw.rng.random(shape) < 0.5, 0, V - 1)
    return Draft({"ids": ids.astype(np.int32), "table": draw.values(V, D)}, {})


def linear(draw: Draw) -> Draft:
    widths = (*WIDTHS, 257)
    x = draw.rows(widths)
    weight = draw.values(x.shape[-1], draw.pick(widths))
    bias = draw.values(weight.shape[1]) if draw.wants("bias") else None
    return Draft({"x": x, "weight": weight, "bias": bias}, {})


def split_heads(draw: Draw) -> Draft:
    heads = draw.pick(((1, 1), (2, 1), (1,), (1, 2), (2, 1, 1), (4, 2, 2), (6, 3, 3), (3, 1, 2, 1)))
    B, T, d = draw.pick((1, 2, 3)), draw.pick(LENGTHS), draw.pick((1, 2, 3, 8, 17, 64))
    return Draft({"x": draw.values(B, T, sum(heads), d)}, {"heads": heads})


def merge_heads(draw: Draw) -> Draft:
    B, T, d = draw.pick((1, 2, 3)), draw.pick(LENGTHS), draw.pick((1, 2, 3, 8, 17, 64))
    return Draft({"x": draw.values(B, T, draw.pick((1, 2, 3, 7)), d)}, {})


def rmsnorm(draw: Draw) -> Draft:
    """Rows so small that ε decides, too."""
    eps = draw.pick((1e-5, 0.5, 1e-6))
    x = draw.rows(kinds=("tiny", "zero rows", "offset", "wide"))
    return Draft({"x": x, "gain": draw.values(x.shape[-1])}, {"eps": eps})


def layernorm(draw: Draw) -> Draft:
    arrays, options = rmsnorm(draw)
    return Draft({**arrays, "bias": draw.values(arrays["x"].shape[-1])}, options)


def rope(draw: Draw) -> Draft:
    B, T, H = draw.pick((1, 2, 3)), draw.pick(LENGTHS), draw.pick((1, 2, 3, 4, 7))
    d = draw.pick([n for n in (2, 4, 6, 8, 16, 34, 64, 128) if B * T * H * n <= 2 * MAX_ELEMENTS])
    options: dict[str, Any] = {"base": draw.pick((10_000.0, 500_000.0, 100.0))}
    if draw.wants("start"):
        kind = draw.pick(("int", "rows", "far"))
        options["start"] = draw.pick((1, 3, 77, -5))
        if kind == "rows":
            options["start"] = draw.rng.integers(-20, 200, B).astype(np.int64)
        elif kind == "far":
            options["start"] = 8_000
    if draw.wants("rotate_heads"):
        options["rotate_heads"] = draw.pick(range(H + 1))
    return Draft({"x": draw.values(B, T, H, d)}, options)


def attention(draw: Draw) -> Draft:
    """Every way to mask, with groups of 1 to 7 query heads and more keys than queries or fewer.

    A forgotten mask shows best where scores are faint, so that nothing else can be off by much; and
    where they are below zero and values are above, so that a key of zeros draws all attention.
    """
    T = draw.pick(LENGTHS)
    relation = draw.pick(("S = T", "S > T", "any"))
    S = T
    if relation == "S > T":
        S = T + draw.pick((1, 2, 7, 16, 33, 64))
    elif relation == "any":
        S = draw.pick(LENGTHS)
    heads = [
        (B, Hkv, G)
        for B in (1, 2, 3)
        for Hkv in (1, 2, 3)
        for G in (1, 2, 3, 4, 5, 6, 7)
        if B * Hkv * G * T * S <= MAX_SCORES
    ]
    B, Hkv, G = draw.pick(heads)
    d = draw.pick((1, 2, 3, 4, 8, 16, 17, 33, 64, 65))
    dv = draw.pick((1, 2, 3, 8, 17, 40)) if draw.pick((False, True)) else d
    kinds = ("large", "wide", "faint")
    arrays: dict[str, Any] = {
        "q": draw.values(B, T, Hkv * G, d, kinds=kinds),
        "k": draw.values(B, S, Hkv, d, kinds=("wide", "zero rows")),
        "v": draw.values(B, S, Hkv, dv),
        "alibi": None,
        "key_mask": None,
        "documents": None,
    }
    if draw.pick((False, False, False, True)):
        arrays["q"], arrays["k"] = np.abs(arrays["q"]), -np.abs(arrays["k"])
        arrays["v"] = np.abs(arrays["v"])
    if draw.wants("alibi"):
        slopes = alibi_slopes(Hkv * G, np.float64)
        arrays["alibi"] = draw.rounded(draw.pick((slopes, draw.rng.random(Hkv * G))))
    if draw.wants("key_mask"):
        arrays["key_mask"] = _key_mask(draw, B, S)
    if S >= T and draw.wants("documents"):
        runs = np.cumsum(draw.rng.random((B, S)) < draw.pick((0.3, 0.03)), axis=1)
        mixed = draw.rng.integers(0, 3, (B, S))
        arrays["documents"] = draw.pick((runs, mixed)).astype(np.int32)
    options: dict[str, Any] = {}
    if draw.offers("causal"):
        options["causal"] = draw.pick((True, False))
    if draw.wants("scale"):
        options["scale"] = draw.pick((0.3, 1.0))
    if draw.offers("dropout_key") and draw.wants("dropout_p"):
        options["dropout_p"] = draw.pick((0.5, 0.1))
        options["dropout_key"] = draw.key()
    return Draft(arrays, options)


def _key_mask(draw: Draw, B: int, S: int) -> Array:
    """Return which keys may be seen (B, S): padding behind, before, holes, nothing, everything."""
    kind = draw.pick(("behind", "before", "holes", "nothing", "everything"))
    lengths = draw.rng.integers(0, S + 1, (B, 1))
    if kind == "behind":
        return np.asarray(np.arange(S) < np.maximum(lengths, 1))
    if kind == "before":
        return np.asarray(np.arange(S) >= np.minimum(lengths, S - 1))
    if kind == "holes":
        return np.asarray(draw.rng.random((B, S)) < 0.6)
    if kind == "everything":
        return np.ones((B, S), np.bool_)
    mask = np.ones((B, S), np.bool_)
    mask[draw.pick(range(B))] = False  # a row of the batch in which nothing may be seen
    return mask


def activation(draw: Draw) -> Draft:
    """Inputs far into both tails, and exact zeros."""
    return Draft({"x": draw.rows(kinds=("large", "wide", "zero rows"))}, {})


def swiglu(draw: Draw) -> Draft:
    return Draft({"x": draw.rows([2 * n for n in WIDE], kinds=("large", "wide", "zero rows"))}, {})


def dropout(draw: Draw) -> Draft:
    p = draw.pick((0.5, 0.1, 0.9, 0.0))
    return Draft({"x": draw.rows()}, {"p": p, "key": draw.key()})


def linear_cross_entropy(draw: Draw) -> Draft:
    """Masks of every kind; where a target is masked it need not be an entry of the vocabulary."""
    V, D = draw.pick((1, 2, 3, 5, 7, 17, 33, 65, 129, 257, 1025)), draw.pick(WIDTHS)
    shapes = [s for s in (*SHAPES, (257,), (3, 200)) if math.prod(s) * max(V, D) <= MAX_SCORES]
    shape = draw.pick(shapes)
    arrays: dict[str, Any] = {
        "x": draw.values(*shape, D, kinds=("wide", "large", "faint")),
        "head": draw.values(V, D),
        "targets": draw.rng.integers(0, V, shape).astype(np.int32),
        "mask": None,
        "bias": None,
    }
    if draw.pick((False, False, False, True)):  # a logit of zero, from beyond the head, would show
        arrays["x"], arrays["head"] = np.abs(arrays["x"]), -np.abs(arrays["head"])
    kind = draw.pick(("random", "one id", "ends"))
    if kind != "random":
        arrays["targets"] = np.full(shape, draw.pick(range(V)), np.int32)
    if kind == "ends":
        arrays["targets"] = np.where(draw.rng.random(shape) < 0.5, 0, V - 1).astype(np.int32)
    if draw.wants("mask"):
        kind = draw.pick(("holes", "last", "nothing", "everything"))
        mask = draw.rng.random(shape) < 0.6
        if kind != "holes":
            mask[...] = kind != "nothing"
        if kind == "last":
            mask[..., -1] = False
        arrays["mask"] = mask
        if draw.pick((False, True)):
            arrays["targets"] = np.where(mask, arrays["targets"], -100).astype(np.int32)
    if draw.wants("bias"):
        arrays["bias"] = draw.values(V)
    options = {}
    if draw.offers("need_backward") and draw.pick((False, False, False, True)):
        options["need_backward"] = False
    return Draft(arrays, options)


def softmax(draw: Draw) -> Draft:
    return Draft({"x": draw.rows(kinds=("large", "offset", "zero rows", "wide"))}, {})


def logits(draw: Draw) -> Draft:
    x = draw.rows(WIDTHS)
    V = draw.pick((*WIDTHS, 257))
    bias = draw.values(V) if draw.wants("bias") else None
    return Draft({"x": x, "head": draw.values(V, x.shape[-1]), "bias": bias}, {})


FLAT = (1, 2, 3, 7, 17, 33, 129, 1025, 4097)


def flat_sum(draw: Draw) -> Draft:
    """Lengths around the block of 65,536 elements, too."""
    n = draw.pick((*FLAT, 65_535, 65_536, 65_537, 131_075))
    return Draft({"x": draw.values(n, kinds=("wide",))}, {})


def accumulate(draw: Draw) -> Draft:
    shape = (draw.pick(FLAT),) if draw.pick((True, False)) else draw.shape_for(1)
    return Draft({"dst": draw.values(*shape), "src": draw.values(*shape)}, {})


def adamw(draw: Draw) -> Draft:
    """The first steps, where the bias corrections act, and late ones; ε of every weight."""
    n = draw.pick(FLAT)
    arrays = {
        "master": draw.values(n),
        "m": draw.values(n),
        "v": draw.values(n) ** 2,
        "grad": draw.values(n, kinds=("tiny", "wide")),
    }
    if draw.pick((False, True)):
        arrays["m"], arrays["v"] = 0 * arrays["m"], 0 * arrays["v"]
    options: dict[str, Any] = {
        "step": draw.pick((1, 2, 10, 1000)),
        "lr": draw.pick((0.1, 1e-3)),
        "beta1": draw.pick((0.9, 0.5)),
        "beta2": draw.pick((0.95, 0.999)),
        "eps": draw.pick((1e-8, 0.1)),
        "weight_decay": draw.pick((0.1, 0.0)),
        "n_decayed": draw.pick((n // 2, n, 0)),
    }
    if draw.wants("grad_scale"):
        options["grad_scale"] = draw.pick((0.5, 0.013))
    return Draft(arrays, options)


GENERATORS: dict[str, Callable[[Draw], Draft]] = {
    "add": add,
    "scale": scale,
    "embedding": embedding,
    "linear": linear,
    "split_heads": split_heads,
    "merge_heads": merge_heads,
    "rmsnorm": rmsnorm,
    "layernorm": layernorm,
    "rope": rope,
    "attention": attention,
    "swiglu": swiglu,
    "gelu": activation,
    "gelu_tanh": activation,
    "relu": activation,
    "dropout": dropout,
    "linear_cross_entropy": linear_cross_entropy,
    "softmax": softmax,
    "logits": logits,
    "square_sums": flat_sum,
    "global_norm": flat_sum,
    "accumulate": accumulate,
    "adamw": adamw,
}
