"""All that a GPU is wanted for, in parts of at most ten minutes, into one folder.

From the root of the repository, after ``pip install -e ".[cuda13,test]"``, or with no pip where
CuPy, Numba, pytest and Hypothesis are installed (the trainer alone needs more; what is missing is
said, and which part it keeps from running)::

    python -m tests.gpu [FOLDER] [--minutes 10]

Parts run in the order of what matters first: correctness, repeatability, the trainer, times of
attention, of the products and of a step, the step beside PyTorch's, races and accesses by
compute-sanitizer, the other kernels' times. When the minutes are up it stops; the same command
goes on after the last part, and of tests after the last test, that ended. FOLDER (gpu-results) gets
NAME.log of each part, NAME.tests of each part's tests, and NAME.status once a part is over: passed,
failed, or why it was skipped.

Exit status: 0 all is over and nothing failed, 1 something failed, 3 there is more to do.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.gpu import journal

MORE = 3  # exit status
TIMED = ("cupy", "numba")
TESTED = (*TIMED, "pytest", "hypothesis")
TRAINED = (*TESTED, "mpi4py", "filelock", "msgspec", "psutil", "regex", "threadpoolctl")
HANGS = 120  # seconds that a test is given after the time is up


class Part(NamedTuple):
    """One thing to run."""

    name: str
    minutes: float  # that it takes: it is not begun with less left, but for tests, which stop
    command: tuple[str, ...]  # after this Python's name
    needs: tuple[str, ...]  # modules
    tool: str = ""  # that it runs under

    @property
    def tests(self) -> bool:
        """Whether it is one of pytest's."""
        return "pytest" in self.command


def tests(*what: str) -> tuple[str, ...]:
    """Return the command of some tests; what other libraries warn of costs none its run."""
    return "-m", "pytest", "-q", "-rs", "-W", "default", "-p", "tests.gpu.journal", *what


def bench(*what: str) -> tuple[str, ...]:
    """Return the command of some rows of the benchmark."""
    return "-m", "dist", "bench", "cuda", "--parts", *what


CUDA = "tests/gpu/test_cuda.py"
# where threads of a block wait for each other: tiles, and sums over rows
SUMS = "norm or embedding or linear"  # of rows, of tokens, of biases and logits
TOKENS = "long_cache or (recorded_tokens and bf16)"
CORES = f"{TOKENS} or attention_on_tensor_cores or (bf16_keeps_to_the_rule and ({SUMS}))"
PARTS = (
    Part("correctness", 0.5, tests(CUDA, "-k", "not same_bits"), TESTED),
    Part("repeatability", 0.5, tests(CUDA, "-k", "same_bits"), TESTED),
    Part("trainer", 0.5, tests("tests/gpu/test_trainer.py"), TRAINED),
    Part("times", 3, bench("attention", "products", "step", "decode"), TIMED),
    Part(
        "step-beside-torch",
        4,
        bench("peer", "--peer", "torch", "--recompute", "norms"),
        (*TIMED, "torch"),
    ),
    Part("racecheck", 1, tests(CUDA, "-k", CORES), TESTED, "--tool=racecheck"),
    Part("memcheck", 1, tests(CUDA, "-k", CORES), TESTED, "--tool=memcheck"),
    Part("ops", 2, bench("ops"), TIMED),
)


def why_not(part: Part) -> str:
    """Say what keeps a part from running; nothing where nothing does."""
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if missing:
        return f"skipped: needs {', '.join(missing)}"
    if part.tool and shutil.which("compute-sanitizer") is None:
        return "skipped: needs compute-sanitizer, of the CUDA toolkit"
    return ""


def run(part: Part, folder: Path, until: float) -> str:
    """Run a part and return its status; empty when there is more of it to do."""
    kept = folder / f"{part.name}.tests"
    told = {"GPU_JOURNAL": str(kept.resolve()), "GPU_UNTIL": str(until)}
    under = ["compute-sanitizer", part.tool, "--error-exitcode=9"] if part.tool else []
    with (folder / f"{part.name}.log").open("ab") as log:
        process = subprocess.Popen(
            [*under, sys.executable, *part.command],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **told},
            start_new_session=True,
        )
        try:
            status = process.wait(max(0.0, until - time.time()) + HANGS * part.tests)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            # the test that hung is passed over next time; what is no test is not tried again
            return "" if part.tests else "failed: its time was up"
    if not part.tests:
        return "passed" if status == 0 else f"failed: exit status {status}"
    if status == 2 and time.time() > until:  # pytest was stopped
        return ""
    words = list(journal.read(kept).values())
    wrong = sum(word in ("failed", "began") for word in words)
    if status not in (0, 1, 5) or wrong or not words:  # 5: all had ended before
        return f"failed: {wrong} of {len(words)} tests, exit status {status}"
    skipped = words.count("skipped")
    return f"passed: {len(words) - skipped} tests" + (f", {skipped} skipped" if skipped else "")


def main(argv: Sequence[str], parts: Sequence[Part] = PARTS) -> int:
    """Go on where the last call stopped, and return the exit status."""
    p = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("folder", type=Path, nargs="?", default=Path("gpu-results"))
    p.add_argument("--minutes", type=float, default=10, help="until it stops (default 10)")
    given = p.parse_args(argv)
    until = time.time() + 60 * given.minutes - 5
    given.folder.mkdir(parents=True, exist_ok=True)
    statuses = []
    for part in parts:
        ended = given.folder / f"{part.name}.status"
        if not ended.exists():
            said = why_not(part)
            if not said and time.time() + 60 * part.minutes < until:
                print(f"{part.name} …", flush=True)
                said = run(part, given.folder, until)
            if not said:
                print(f"{part.name}: the time is up; the same command goes on here")
                return MORE
            ended.write_text(said + "\n", encoding="utf-8")
        statuses.append(ended.read_text(encoding="utf-8").strip())
        print(f"{part.name}: {statuses[-1]}", flush=True)
    return int(any(said.startswith("failed") for said in statuses))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
