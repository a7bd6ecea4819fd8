"""What the generators of cases draw from: inputs that hurt.

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
FLAT = (1, 2, 3, 7, 17, 33, 129, 1025, 4097)
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
