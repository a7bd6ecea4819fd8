"""A case of a reference of one's own: a ``Case`` that needs no contract."""

import ast
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

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
    made: str = ""  # with what a module is, in words

    @property
    def spec(self) -> Op:
        return self.signature

    def optional(self) -> list[str]:
        return []

    def exact(self) -> dict[str, Array]:
        """Return nothing: what is right is for the reference to say, where it can be run."""
        return {}

    def describe(self) -> str:
        """Return the case in one line, with what a module is made with."""
        return super().describe() + (f"; made with {self.made}" if self.made else "")

    def about(self) -> dict[str, Any]:
        """Return what a file has to say beside the arrays."""
        kinds = [(o.name, o.kind) for o in self.signature.operands]
        return {
            "like": {
                "options": _to_json(self.options),
                "sizes": _to_json(self.sizes),
                "seed": self.seed,
                "made": self.made,
                "operands": kinds,
            }
        }

    @classmethod
    def of(cls, about: Mapping[str, Any], arrays: dict[str, Array]) -> "LikeCase":
        """Return the case of which a file has this to say.

        Raises
        ------
        AttributeError, KeyError, TypeError, ValueError
            When that is not what ``about`` gave, or an option is nothing that a file holds.
        """
        like = about["like"]
        operands = tuple(Operand(name, "", kind) for name, kind in like["operands"])
        read = _from_text if isinstance(like["options"], str) else _from_json
        return cls(
            about["op"],
            about["dtype"],
            arrays,
            read(like["options"]),
            None,
            dict(about["layouts"]),
            "",
            bool(about["interleaved"]),
            signature=OwnOp(about["op"], "", operands),
            sizes=read(like["sizes"]),
            seed=int(like["seed"]),
            made=str(like.get("made", "")),
        )


def _from_text(text: str) -> Any:
    """Return an option as earlier versions wrote it: as Python does."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        raise TypeError(f"{text} is no option") from None


def _to_json(value: Any) -> Any:
    """Return an option as JSON has it; what JSON has not is an object that says what it is."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, dict):
        return {"dict": [[_to_json(part) for part in pair] for pair in value.items()]}
    if isinstance(value, (tuple, list)):
        parts = [_to_json(part) for part in value]
        return parts if isinstance(value, list) else {"tuple": parts}
    known = value is None or isinstance(value, (bool, int, float, str))
    return value if known else {"other": repr(value)}


def _from_json(value: Any) -> Any:
    """Return the option that ``_to_json`` wrote."""
    if isinstance(value, list):
        return [_from_json(part) for part in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "other":
        raise ValueError(
            f"the case has an option {content}, which no file can hold; run the check of its "
            "function again, with the same seed"
        )
    return {"tuple": tuple, "dict": dict}[kind](_from_json(content))
