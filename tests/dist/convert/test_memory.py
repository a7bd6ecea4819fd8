"""Weights stream: no more than one parameter is held at a time."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from accel.ahead import AHEAD
from dist import weights as weights_module
from dist.weights import Part, Weights, parts, write_weights
from reference.params import decoder_layout
from tests.helpers import ROOT
from tests.helpers.weights import LLAMA, write_random

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
    def draw(part: Part, out: np.ndarray) -> None:
        np.random.default_rng(len(part.name)).random(out=out, dtype=np.float32)

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
        ahead = 4 * min(2 * max(sizes), AHEAD)  # of the 500 MB that are promised
        assert needed <= 1.2 * 4 * max(sizes) + ahead + 96e6, (words, needed)


@pytest.mark.parametrize("stretch", [1, 5_000])
def test_rows_of_a_part_are_read_a_few_at_a_time(
    stretch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    views = write_random(tmp_path / "mine", replace(LLAMA, vocab_size=1_000, d_ff=100))
    monkeypatch.setattr(weights_module, "STRETCH", stretch)
    weights = Weights(tmp_path / "mine")
    for name, view in views.items():
        np.testing.assert_array_equal(weights.read(name), view)
        (whole,) = parts(weights.layout, name, whole=True)
        firsts, found = zip(*weights.rows(whole), strict=True)
        assert list(firsts) == [*np.cumsum([0, *map(len, found[:-1])])]
        if view.ndim == 2:
            assert all(
                len(rows) % 32 == 0 and rows.size <= max(stretch, 32 * view.shape[1])
                for rows in found[:-1]
            )


def test_a_block_is_checked_though_a_part_has_few_of_its_numbers(tmp_path: Path) -> None:
    """Those of a norm's gain, say: what is not wanted of a block is read all the same."""
    write_random(tmp_path / "mine", LLAMA)
    weights = Weights(tmp_path / "mine")
    start, spec = weights.layout.offsets["layers.1.ffn_norm.gain"]
    for at in (0, 4 * start, 4 * (weights.layout.size - 1)):
        with (tmp_path / "mine" / "master.bin").open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1]))
            file.flush()
            with pytest.raises(ValueError, match="do not have the CRC"):
                weights.read("layers.1.ffn_norm.gain")
            file.seek(at)
            file.write(bytes([byte]))
    assert weights.read("layers.1.ffn_norm.gain").shape == spec.shape


# prints how many pages the system found for the last of some arrays that were made and dropped
PAGES = """
import resource, sys, threading
import numpy as np
from accel.system import keep_memory

def work():
    for i in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        parts = [np.ones(int(sys.argv[2])) for _ in range(3)]
        del parts
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

if sys.argv[1] == "keep":
    keep_memory()
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it is Linux's C library that gives back")
@pytest.mark.parametrize("numbers", [1 << 15, 1 << 17])
def test_memory_that_is_freed_serves_again(numbers: int) -> None:
    found = {}
    for how in ("keep", "not"):
        words = [sys.executable, "-c", PAGES, how, str(numbers)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        found[how] = int(done.stdout)
    assert found["keep"] < 16 < 3 * 8 * numbers / 4096 / 2 < found["not"], found
