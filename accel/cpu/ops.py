"""The backend ``cpu`` in float32 (and float64, to check): the functions of ``reference.ops``."""

from typing import TYPE_CHECKING, Any

from accel.cpu import (
    activations,
    arrays,
    attention,
    decode,
    elementwise,
    embedding,
    keeping,
    linear,
    loss,
    memory,
    muon,
    norms,
    optimizer,
    rope,
)
from accel.threads import alone
from reference import kv
from reference.ops import HOST, backend

RULES = HOST._replace(few=alone)

SOURCES = (
    *(vars(activations), vars(arrays), vars(attention), vars(decode), vars(elementwise)),
    *(vars(embedding), vars(keeping), vars(linear), vars(loss), vars(memory), vars(muon)),
    *(vars(norms), vars(optimizer), vars(rope), vars(kv)),
)
globals().update(backend(__name__, RULES, *SOURCES))

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
