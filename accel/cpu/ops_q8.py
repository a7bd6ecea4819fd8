"""The backend ``cpu`` in q8_0: as in ``ops``, with matrices rounded to eight bits a weight."""

from typing import TYPE_CHECKING, Any

from accel.cpu import q8
from accel.cpu.ops import RULES, SOURCES
from reference.ops import backend

globals().update(backend(__name__, RULES, vars(q8), *SOURCES))

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
