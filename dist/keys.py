"""Every key of a run file in one table, made from the declarations and the comments beside them.

python -m dist.keys              prints dist/KEYS.md
"""

import dataclasses
import inspect
import json
import re
from typing import Annotated, Any, Literal, get_args, get_origin

from dist.config import Data, Optim, Phase, Run, Source, Train
from reference.config import Config, Range

TABLES: dict[str, Any] = {
    "[model]": Config,
    "[data]": Data,
    "[[data.phases]]": Phase,
    "a source of a phase": Source,
    "[train]": Train,
    "[optim]": Optim,
    "[run]": Run,
}
WORDS = {int: "whole number", float: "number", bool: "true or false", str: "text"}
FIELD = re.compile(r" {4}(\w+): .*?(?:  # (.*))?")


def comments(kind: type) -> dict[str, str]:
    """Return what the comments beside and above a dataclass's fields say."""
    names = {field.name for field in dataclasses.fields(kind)}
    found: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(kind).splitlines():
        field = FIELD.fullmatch(line)
        if line.startswith("    # "):
            above.append(line.strip(" #"))
        elif field and field[1] in names:
            found[field[1]] = " ".join([*above, *filter(None, [field[2]])])
            above = []
    return found


def values(kind: Any) -> str:
    """Return which values a field takes, in words."""
    parts = get_args(kind)
    if get_origin(kind) is Annotated:
        return next(part.what for part in parts if isinstance(part, Range))
    if get_origin(kind) is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if get_origin(kind) is tuple:
        return f"list: {values(parts[0])}"
    if parts:  # a union
        return " or ".join(values(part) for part in parts)
    return WORDS.get(kind, "tables")


def table() -> str:
    """Return the page."""
    out = [
        "# Every key of a run file",
        "",
        "`python -m dist.keys` makes this page of `dist/config.py` and `reference/config.py`. A",
        "key without a default must be given; one that is not here is refused.",
    ]
    for name, kind in TABLES.items():
        said = comments(kind)
        out += ["", f"## {name}", "", "| key | value | default | |", "| --- | --- | --- | --- |"]
        for field in dataclasses.fields(kind):
            needed = field.default is dataclasses.MISSING
            default = "" if needed else f"`{json.dumps(field.default)}`"
            cells = [f"`{field.name}`", values(field.type), default, said[field.name]]
            out.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    print(table(), end="")
