"""In what a run differs: from what it was when it was saved, and from one rank to another."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accel import AUTO
from dist.comm import AllRanksError
from dist.config import LEARNING_TABLES, Run, RunFile, from_tables

NONE: Mapping[str, str] = MappingProxyType({})


def same_learning(
    old: dict[str, Any],
    new: RunFile,
    known_then: Mapping[str, str] = NONE,
    known_now: Mapping[str, str] = NONE,
) -> list[str]:
    """Return the keys in which two runs would learn differently, as ``table.key: old -> new``.

    Packed texts that lie elsewhere make no difference where their checksums are known, by path.
    """
    before, fresh = from_tables(old).to_dict(), new.to_dict()  # an older file has fewer keys
    return [
        f"{table}.{key}: {before[table][key]!r} -> {value!r}"
        for table in LEARNING_TABLES
        for key, value in fresh[table].items()
        if before[table][key] != value
        and _by_content(before[table][key], known_then) != _by_content(value, known_now)
    ]


def _by_content(value: Any, known: Mapping[str, str]) -> Any:
    """Return a value with the checksum of what lies there in place of each path.

    A second copy keeps its path: a run goes on in one where it stopped in that, not in the other.
    """
    if isinstance(value, dict):
        return {key: _by_content(inner, known) for key, inner in value.items()}
    if isinstance(value, list):
        return [_by_content(inner, known) for inner in value]
    found = known.get(str(Path(value))) if isinstance(value, str) else None
    return found if found is not None and list(known.values()).count(found) == 1 else value


def measured_on(run: RunFile, checksums: Mapping[str, str]) -> tuple[set[str], int]:
    """Return what a held-out loss is of: texts, by their checksums where these are known."""
    paths = [str(Path(path)) for path in run.data.heldout_sets]
    return {checksums.get(path, path) for path in paths}, run.run.eval_windows


def computes_by(run: Run) -> str:
    """Say what decides the last bits of what a run learns."""
    path = "" if run.attention == AUTO else f", attention by {run.attention}"
    if not isinstance(run.products, str):
        path += f", products by cublasLt {zlib.crc32(repr(run.products).encode()):08x}"
    return f"{run.backend} ({run.compute}{path})"


def the_same(opened: list[dict[str, str]]) -> None:
    """Refuse what one rank reads otherwise than another: a copy on its machine, say.

    Raises
    ------
    AllRanksError
        When any of it differs.
    """
    for rank, theirs in enumerate(opened):
        for path, known in opened[0].items():
            if theirs[path] != known:
                raise AllRanksError(
                    f"rank {rank} reads another {path} than rank 0: bring the same to all machines"
                )
