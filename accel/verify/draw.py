"""What the generators of cases draw from: inputs that hurt.

A generator asks ``draw.pick(options, name)`` for every choice, the simplest option first. A dealer
answers in ``search.py``, ``shrink.py`` moves a failing case towards the first options; a plain
random generator answers for the golden vectors, and may in any other test. A name lets the
``HARD`` cases of a room, which come first, say what a choice has to be.

Sizes are one, primes, what models have (64, 128, 256, 768, 1,024, …), which whole tiles make up,
and one past the tiles that kernels are cut into (16, 32, 64, 128, 256, …); a few are one past what
an index of 15 or 16 bits can count, in arrays that are otherwise thin.
Values come from a generator whose seed is one of the choices.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from accel.tolerance import round_to
from reference.types import Array, DropoutKey

Option = TypeVar("Option")

USUAL = (1, 2, 3, 5, 7, 8, 16, 17, 31, 33, 64, 65, 127, 129, 257, 1025)
WIDE = tuple(sorted({*USUAL, 48, 128, 256, 512, 768, 1024}))
WIDTHS = tuple(n for n in WIDE if n < 256)
USUAL_SHAPES = (
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
SHAPES = (*USUAL_SHAPES, (64,), (128,), (256,))
# (leading axes, width) beyond the blocks of a sum, and beyond indices of 15 and 16 bits
LONG = (
    ((1031,), 5),
    ((4_099,), 3),
    ((3, 1367), 2),
    ((3,), 2_048),
    ((3,), 4_096),
    ((3,), 4_099),
    ((1,), 8_209),
    ((1,), 65_539),
    ((65_539,), 2),
)
FLAT = (1, 2, 3, 7, 17, 33, 129, 1025, 4097)
LONG_FLAT = (8_209, 32_771, 65_535, 65_536, 65_537, 131_075)
LENGTHS = (1, 2, 3, 5, 7, 16, 17, 31, 33, 64, 65, 128, 129)
LONG_LENGTHS = (257, 513, 1_025, 4_097, 65_537)
MAX_ELEMENTS = 20_000  # of an input, unless it is a long one
MAX_SCORES = 100_000  # of a table of attention scores or logits
LAYOUTS = ("plain", "strided", "transposed", "sliced", "reversed")
REPEATED = "one number"  # of a cotangent alone: with strides of 0, as that of a sum
# powers of ten of a row: sums of squares are finite still, squares are zero and inverses finite;
# the same of float16, which has less room
SCALES = {"huge": ((8, 16), (1.5, 3.5)), "minute": ((-34, -30), (-6, -4))}
SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Pick(Protocol):
    """Chooses one of some options, the first being the simplest."""

    def __call__(self, options: Sequence[Option], name: str = "", /) -> Option: ...


class Draft(NamedTuple):
    """The arguments of a forward, by the contract's parameter names."""

    arrays: dict[str, Any]  # in the order of the signature
    options: dict[str, Any]  # the keyword-only ones


class Draw:
    """What a generator draws from.

    Parameters
    ----------
    pick : Pick
    dtype : str
        A precision of ``accel/tolerance.py``. Values are representable in it, and come as float32
        in all but float64.
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
        return bool(offered) and self.pick((False, True), parameter)

    def rarely(self, name: str, of: int = 8) -> bool:
        """Return True in one case of so many."""
        return self.pick((*[False] * (of - 1), True), name)

    def rounded(self, x: Array) -> Array:
        """Return x in the dtype of the case."""
        return round_to(x, self.dtype)

    def simple(self, *shape: int) -> Array:
        """Return quarters between -2 and 2: short to read, exact in every precision."""
        return self.rounded(self.rng.integers(-8, 9, shape) / 4)

    def normal(self, *shape: int, std: float = 1.0) -> Array:
        return self.rounded(std * self.rng.standard_normal(shape))

    def values(
        self, *shape: int, kinds: tuple[str, ...] = ("wide", "zero rows"), name: str = ""
    ) -> Array:
        """Return an input: quarters, normal, or one of the more extreme ``kinds``."""
        kind = self.pick(("simple", "normal", *kinds), name)
        if kind == "simple":
            return self.simple(*shape)
        x = self.rng.standard_normal(shape)
        if kind == "wide":  # magnitudes from 1e-3 to 30; to 10 where the largest number is 65,504
            x *= 10.0 ** self.rng.uniform(-3, 1 if self.dtype == "float16" else 1.5, shape)
        elif kind == "large":
            x *= 30
        elif kind == "faint":
            x *= 0.01
        elif kind == "tiny":
            x *= 10.0 ** self.rng.uniform(-4, -2, (*shape[:-1], 1))
        elif kind == "offset":  # far from zero beside its spread
            x += self.pick((8, 1000), "offset") * self.rng.choice([-1, 1], (*shape[:-1], 1))
        elif kind == "apart":  # one number of a row above all others by more than exp can take
            x[..., self.rng.integers(shape[-1])] += 1500
        elif kind == "zero rows":
            x *= self.rng.random((*shape[:-1], 1)) < 0.5
        elif kind == "equal rows":
            x = x[..., :1] * 10.0 ** self.rng.uniform(-1, 1.5, (*shape[:-1], 1)) + 0 * x
        elif kind in SCALES:
            low, high = SCALES[kind][self.dtype == "float16"]
            x *= 10.0 ** self.rng.uniform(low, high, (*shape[:-1], 1))
        return self.rounded(x)

    def shape_for(self, width: int) -> tuple[int, ...]:
        """Return leading axes that fit beside a last axis."""
        return self.pick([s for s in SHAPES if math.prod(s) * width <= MAX_ELEMENTS], "shape")

    def shape(self, widths: Sequence[int] = WIDE, times: int = 1) -> tuple[int, ...]:
        """Return a shape (..., D), D a multiple of ``times``; now and then a long one."""
        if self.rarely("long", 12):
            leading, width = self.pick(LONG, "long shape")
            return (*leading, times * width)
        width = times * self.pick(widths, "width")
        return (*self.shape_for(width), width)

    def rows(self, widths: Sequence[int] = WIDE, *, times: int = 1, **kinds: Any) -> Array:
        """Return an input x (..., D)."""
        return self.values(*self.shape(widths, times), name="x", **kinds)

    def flat(self, lengths: Sequence[int] = FLAT, long: Sequence[int] = LONG_FLAT) -> int:
        """Return the length of a flat array."""
        return self.pick(long, "length") if self.rarely("long") else self.pick(lengths, "length")

    def key(self, batch: int) -> DropoutKey:
        """Return a key for a batch of so many samples: each number small, or as large as can be."""
        return DropoutKey(
            seed=self.pick((0, 7, 2**40 + 3, 2**63 + 5, 2**64 - 1), "seed"),
            step=self.pick((0, 5, 70_001, 2**31 + 7, 2**32 - 1), "step"),
            sample=self.pick((0, 3, 40_000, 2**31 + 1, 2**32 - batch), "sample"),
            site=self.pick((0, 12, 300, 70_003, 2**32 - 1), "site"),
        )
