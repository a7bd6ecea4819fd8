"""How tests are drawn and dealt out.

Hypothesis profiles: ``quick`` by default, ``HYPOTHESIS_PROFILE=long`` for a thorough run. With
``pytest -n``, every worker gets as many files, the quick ones first; each takes a share of the
processor.
"""

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import settings

from accel.system import cores
from tests.helpers import needs  # lets the mode bf16 run on every processor

assert needs

settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

LAST = ("/mpi/", "/peers/", "_bench.py", "mutants.py", "demo.py", "cold_warm.py", "test_kernels.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """One more than cores: what waits, for a clock, a disk or a process, leaves its core to it."""
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else cores() + 1


def pytest_configure(config: pytest.Config) -> None:
    """Beside others a worker, and what it starts, takes a share of the processor."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        from accel.verify import apart

        apart.MOST_JOBS = 1  # a second process would load, too, what one has checked by then
    if getattr(config.option, "numprocesses", None):
        os.environ.setdefault("MYLLM_THREADS", "2")
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # PyTorch's
        os.environ.setdefault("GOMP_SPINCOUNT", "0")  # a thread that waits leaves its core at once
        if config.option.dist == "load":  # the default; this one evens out what is left at the end
            config.option.dist = "worksteal"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look through what is imported and found, a million objects, for no garbage, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with long tests last, and deal the files out: workers begin with equal shares."""
    files = dict.fromkeys(str(item.path) for item in items)
    dealt = sorted(files, key=lambda path: path.endswith(LAST) or "/mpi/" in path)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    order = {path: (i % workers, i) for i, path in enumerate(dealt)}
    items.sort(key=lambda item: order[str(item.path)])
