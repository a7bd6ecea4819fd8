"""A process that compiles the kernels and one that loads them from the cache compute the same bits.

They need not: what LLVM stores for a kernel holds copies of what it calls, optimised once more with
their caller, and where it was compiled its calls would go to the originals (``accel/jit.py``).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.cold_warm import PATTERNS
from tests.helpers.models import MODELS


def run(mode: str, cache: Path) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.cold_warm", mode],
        cwd=ROOT,
        env={**os.environ, "MYLLM_CACHE_DIR": str(cache), "MYLLM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout, done.stderr


# .ci/run begins with these, in MYLLM_KEEP_KERNELS: what follows finds the kernels there
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["float32", "float64", "bf16", "tokenizer"])
def test_kernels_just_compiled_and_kernels_loaded_give_the_same_bits(
    tmp_path: Path, mode: str
) -> None:
    cache = Path(os.environ.get("MYLLM_KEEP_KERNELS", tmp_path))
    cold, said = run(mode, cache)
    assert "compiling" in said
    warm, said = run(mode, cache)
    assert "compiling" not in said
    lines = PATTERNS if mode == "tokenizer" else MODELS
    assert cold == warm and len(cold.splitlines()) == len(lines)
