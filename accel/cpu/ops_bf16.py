"""The backend ``cpu`` in bf16: products and attention in bfloat16, all else as in ``ops``.

What an activation reads is kept in bfloat16, too.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu import bf16, bf16_muon
from accel.cpu.halves import BF16
from accel.cpu.ops import RULES, SOURCES
from accel.threads import alone
from reference.boundary import Rules, offer
from reference.ops import OPS, backend

ROUNDING = Rules(
    {np.dtype(np.float32): "float32"},
    "products round it to bfloat16; load the backend with compute='float32' for other types",
    kept=(BF16,),
    few=alone,
)
_own = vars(bf16), vars(bf16_muon)
_sources = (*_own, *SOURCES)
_rounding = [op for op in OPS.values() if any(op.forward_name in names for names in _own)]
_reading = [op for op in OPS.values() if [x.kept for x in op.operands] == [True]]  # activations
globals().update(
    backend(__name__, RULES, *_sources)
    | offer(__name__, _rounding, (), ROUNDING, *_sources)
    | offer(__name__, _reading, (), RULES._replace(kept=(BF16,)), *_sources)
)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
