"""In what a run differs: from what it was when it was saved, and from one rank to another."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel import AUTO
from dist.comm import AllRanksError
from dist.config import LEARNING_TABLES, Run, RunFile, from_tables


def same_learning(old: dict[str, Any], new: RunFile) -> list[str]:
    """Return the keys in which two runs would learn differently, as ``table.key: old -> new``."""
    before, fresh = from_tables(old).to_dict(), new.to_dict()  # an older file has fewer keys
    return [
        f"{table}.{key}: {before[table][key]!r} -> {value!r}"
        for table in LEARNING_TABLES
        for key, value in fresh[table].items()
        if before[table][key] != value
    ]


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
