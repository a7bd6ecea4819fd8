"""All that a GPU is wanted for, in one go: every GPU test, then ``myllm bench cuda``.

Run from the root of the repository, after ``pip install -e ".[cuda13,test]"``::

    python -m tests.gpu

With a PyTorch for CUDA installed (``pip install torch``), the benchmark also times its training
step in turn with ours.
"""

import importlib.util
import subprocess
import sys


def torch_has_a_gpu() -> bool:
    """Whether PyTorch is installed and can use the GPU."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def main() -> int:
    """Run the tests, then the benchmark; the status is that of the first to fail."""
    # what other libraries warn of is shown, and costs no test its run
    tests = [sys.executable, "-m", "pytest", "-q", "-rs", "-W", "default", "tests/gpu"]
    bench = [sys.executable, "-m", "dist", "bench", "cuda", *sys.argv[1:]]
    if "--peer" not in sys.argv and torch_has_a_gpu():
        bench += ["--peer", "torch"]
    status = [subprocess.run(command, check=False).returncode for command in (tests, bench)]
    return next((s for s in status if s), 0)


if __name__ == "__main__":
    sys.exit(main())
