"""A case of a reference of one's own: a ``Case`` that needs no contract."""

import ast
import dataclasses
from collections.abc import Mapping
from typing import Any

from accel.verify.contract import Case
from reference.contract import Op, Operand
from reference.types import Array


class OwnOp(Op):
    """A function that the contract has not."""

    __slots__ = ()
    WEIGHT = 0.4  # of the usual number of cases: each takes some thirty runs of the reference


@dataclasses.dataclass(frozen=True)
class LikeCase(Case):
    """One call of a function; its cotangents are among the arrays: ``dout``, or ``dout[0]``."""

    signature: Op = dataclasses.field(default_factory=lambda: OwnOp("", ""))
    sizes: dict[str, Any] = dataclasses.field(default_factory=dict)  # by letter
    seed: int = 0  # of the neighbours that the bound is measured at

    @property
    def spec(self) -> Op:
        return self.signature

    def optional(self) -> list[str]:
        return []

    def exact(self) -> dict[str, Array]:
        """Return nothing: what is right is for the reference to say, where it can be run."""
        return {}

    def about(self) -> dict[str, Any]:
        """Return what a file has to say beside the arrays."""
        kinds = [(o.name, o.kind) for o in self.signature.operands]
        return {
            "like": {
                "options": repr(self.options),
                "sizes": repr(self.sizes),
                "seed": self.seed,
                "operands": kinds,
            }
        }

    @classmethod
    def of(cls, about: Mapping[str, Any], arrays: dict[str, Array]) -> "LikeCase":
        """Return the case of which a file has this to say.

        Raises
        ------
        KeyError, SyntaxError, ValueError
            When that is not what ``about`` gave.
        """
        like = about["like"]
        operands = tuple(Operand(name, "", kind) for name, kind in like["operands"])
        return cls(
            about["op"],
            about["dtype"],
            arrays,
            ast.literal_eval(like["options"]),
            None,
            dict(about["layouts"]),
            "",
            bool(about["interleaved"]),
            signature=OwnOp(about["op"], "", operands),
            sizes=ast.literal_eval(like["sizes"]),
            seed=int(like["seed"]),
        )
