"""All that a GPU is wanted for, in one go: every GPU test, then ``myllm bench cuda``.

Run from the root of the repository, after ``pip install -e ".[cuda13,test]"``::

    python -m tests.gpu
"""

import subprocess
import sys


def main() -> int:
    """Run the tests, then the benchmark; the status is that of the first to fail."""
    tests = [sys.executable, "-m", "pytest", "-q", "-rs", "tests/gpu"]
    bench = [sys.executable, "-m", "dist", "bench", "cuda", *sys.argv[1:]]
    status = [subprocess.run(command, check=False).returncode for command in (tests, bench)]
    return next((s for s in status if s), 0)


if __name__ == "__main__":
    sys.exit(main())
