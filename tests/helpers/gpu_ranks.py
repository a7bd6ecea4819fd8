"""Runs of ``myllm train`` on ranks with a GPU each, which the shim plays."""

import subprocess
import sys
from pathlib import Path

from dist import launch
from dist.config import RunFile
from tests.helpers import ROOT
from tests.helpers.runs import ENVIRONMENT, save_run_file


def train_on_ranks(
    config: RunFile, ranks: int, nccl: str, *arguments: str, seconds: str = ""
) -> tuple[int, str, str]:
    """Run ``myllm train`` with the shim for a GPU, ``seconds`` by rank of attention's paths."""
    path = save_run_file(config, Path(config.run.out).with_suffix(".toml"))
    words = [sys.executable]
    if ranks > 1:
        words = launch.command(*launch.find_mpirun(), ranks, [])[:-2]
    done = subprocess.run(
        [*words, "-m", "tests.cuda_shim.myllm", nccl, "train", str(path), *arguments],
        cwd=ROOT,
        env={**launch.environment(ranks), **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
        | (
            {"SHIM_SECONDS": seconds, "MYLLM_CACHE_DIR": f"{config.run.out}-cache"}
            if seconds
            else {}
        ),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr
