"""The backend ``cpu`` in bf16: products and attention in bfloat16, all else as in ``ops``."""

from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu import bf16
from accel.cpu.ops import SOURCES
from reference.boundary import Rules
from reference.ops import backend

RULES = Rules(
    {np.dtype(np.float32): "float32, which the products of the mode bf16 round"},
    "load the backend with compute='float32' for other types",
)
globals().update(backend(__name__, RULES, vars(bf16), *SOURCES))

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
