"""Modules of wrong kernels: the source of ``kernels.py`` with an edit in one section."""

import re
from pathlib import Path
from types import SimpleNamespace

from reference.ops import OPS

SOURCE = (Path(__file__).parent / "kernels.py").read_text(encoding="utf-8")
SECTIONS = re.split(r"(?m)^# ---- (\w+) ----\n", SOURCE)
SHARED = {"attention": ("dropout",), "decode_step": ("rmsnorm", "layernorm", "rope")}


def functions(source, op):
    """Run a source and return the functions that it has of one op."""
    scope = {"__name__": f"unseen_{op}"}
    exec(compile(source, f"<{op}>", "exec"), scope)
    return SimpleNamespace(**{name: scope[name] for name in OPS[op].names})


def right(op):
    return functions(SOURCE, op)


def edited(wrong):
    parts = list(SECTIONS)
    at = parts.index(wrong.op) + 1
    for old, new in wrong.edits:
        if old not in parts[at]:
            raise ValueError(f"{wrong.op} {wrong.name}: there is no {old!r}")
        parts[at] = parts[at].replace(old, new)
    return "".join(f"# ---- {p} ----\n" if i % 2 else p for i, p in enumerate(parts))


def build(wrong):
    return functions(edited(wrong), wrong.op)
