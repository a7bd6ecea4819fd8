"""The backend ``cpu`` in bf16: products and attention in bfloat16, all else as in ``ops``."""

from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu import bf16
from accel.cpu.ops import SOURCES
from reference.boundary import Rules, offer
from reference.ops import NAMES, OPS

RULES = Rules(
    {np.dtype(np.float32): "float32, which the products of the mode bf16 round"},
    "load the backend with compute='float32' for other types",
)

globals().update(offer(OPS.values(), RULES, vars(bf16), *SOURCES))
__all__ = [*NAMES]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
