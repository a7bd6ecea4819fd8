"""The memory a process is said to have used is its own."""

import subprocess
import sys

from reference.memory import memory

MB = 1 << 20


def test_the_peak_rises_with_what_is_touched_and_never_falls() -> None:
    before = memory()
    block = b"x" * (before + 64 * MB)
    assert memory() >= len(block)
    del block
    assert memory() >= before + 64 * MB


def test_a_small_process_of_a_large_parent_is_small() -> None:
    code = "from reference.memory import memory; print(memory())"
    large = b"x" * (512 * MB)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < len(large)
