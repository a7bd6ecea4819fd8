"""What becomes of files, and how packed texts are told apart."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


def contents(folder: Path) -> dict[str, bytes]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def words(texts: Path, out: Path, name: str = "one") -> list[str]:
    tokenizer = str(texts / "one.tok")
    return ["pack", str(texts / f"{name}.jsonl"), "--tokenizer", tokenizer, "-o", str(out)]
