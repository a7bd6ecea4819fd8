"""Weights stream: no more than one parameter is held at a time."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dist.weights import write_weights
from reference.params import decoder_layout
from tests.helpers import ROOT
from tests.helpers.weights import LLAMA

# 67 MB in each of ten largest tensors, 570 MB in all
CONFIG = replace(
    LLAMA, vocab_size=16_384, d_model=1024, n_layers=4, d_ff=8192, d_head=64, tied=False
)
CODE = """
import sys
from dist import cli
from dist.convert import commands, gguf, huggingface

def most():
    lines = open("/proc/self/status").read().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

before = most()
assert cli.main(sys.argv[1:]) == 0
print("needed", most() - before)
"""


@pytest.mark.slow
def test_export_and_import_need_little_more_than_the_largest_tensor(tmp_path: Path) -> None:
    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng(len(name)).random(shape, dtype=np.float32)

    write_weights(tmp_path / "mine", CONFIG, draw, None)
    sizes = [spec.size for _, spec in decoder_layout(CONFIG).offsets.values()]
    assert sum(sizes) > 8 * max(sizes)
    for words in (
        ["export", "mine", "hf"],
        ["export", "mine", "m.gguf"],
        ["export", "mine", "q.gguf", "--dtype", "q8_0"],
        ["import", "hf", "-o", "one"],
        ["import", "q.gguf", "-o", "two"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", CODE, *words],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "PATH": ""},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        needed = int(done.stdout.split("needed ")[1])
        print(f"{' '.join(words)}: {needed / 1e6:.0f} MB")
        assert needed <= 1.2 * 4 * max(sizes) + 64e6, (words, needed)
