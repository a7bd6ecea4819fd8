"""The memory a process is said to have used is its own."""

import subprocess
import sys

from accel.process import peak_memory

MB = 1 << 20


def test_the_peak_rises_with_what_is_touched_and_never_falls() -> None:
    before = peak_memory()
    block = b"x" * (before + 64 * MB)
    assert peak_memory() >= len(block)
    del block
    assert peak_memory() >= before + 64 * MB


def test_a_small_process_of_a_large_parent_is_small() -> None:
    code = "from accel.process import peak_memory; print(peak_memory())"
    large = b"x" * (512 * MB)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < len(large)
