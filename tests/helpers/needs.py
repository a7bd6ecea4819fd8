"""What a test needs of the machine, asked of Linux and not of the code under test.

So code that wrongly refuses a processor fails its tests, where asking it would skip them.
"""

import os
import shutil
from pathlib import Path

import pytest


def _flags() -> set[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return {flag for line in lines if line.startswith("flags") for flag in line.split()}


HAS_BF16 = "avx512_bf16" in _flags()
if not HAS_BF16:  # the mode bf16 is then tested by its portable block
    os.environ.setdefault("MYLLM_BF16", "portable")
HAS_TILES = {"amx_tile", "amx_bf16"} <= _flags()


def tiles() -> None:
    """Skip where the processor has no AMX."""
    if not HAS_TILES:
        pytest.skip("the processor has no AMX-BF16 (asked of /proc/cpuinfo)")


def chromium() -> str:
    """Return the browser; skip without it, which MYLLM_REQUIRE_CHROMIUM=1 makes a failure."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        why = "needs Chromium: apt-get install chromium"
        if os.environ.get("MYLLM_REQUIRE_CHROMIUM"):
            pytest.fail(f"{why} (MYLLM_REQUIRE_CHROMIUM is set)")
        pytest.skip(why)
    return path
