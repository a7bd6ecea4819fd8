"""Sweeps as tests run them."""

import json
from pathlib import Path
from typing import Any

from dist import cli


def sweep(folder: Path, out: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Return the status and results.json."""
    status = cli.main(["sweep", str(folder / "run.toml"), "-o", str(out), *words])
    return status, json.loads((out / "results.json").read_text())


def run_of(outcome: dict[str, Any]) -> Path:
    """Return the folder of an outcome's run."""
    return Path(outcome["folder"])
