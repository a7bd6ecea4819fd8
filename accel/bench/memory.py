"""A process of its own that prints by how many bytes training steps raise its peak of memory.

``python -m accel.bench.memory ours|torch float32|bf16 THREADS``, for ``myllm bench cpu``.
"""

import gc
import sys

import numpy as np
import psutil

from accel import load
from accel.bench.cpu import peers
from accel.bench.timing import Function
from accel.bench.training import SMALL, Training
from accel.threads import set_threads


def added(side: str, mode: str) -> int:
    """Return by how much three steps raise the peak of resident memory."""
    ops = load("cpu", compute=mode)
    model = Training(ops, SMALL, 8, 512)
    if side == "ours":
        step: Function = model.step
        tiny = Training(ops, SMALL, 1, 8)
        tiny.step()  # kernels are loaded, or compiled, before the baseline is taken
        del tiny
    else:
        given = SMALL, model.initial, model.ids, model.targets
        step = peers().Peer(*given, kind=mode).step
        model.m = model.v = model.grad = np.zeros(0, np.float32)
    for array in (model.master, model.m, model.v, model.grad):
        array += 0  # the pages of zeros are made before the baseline, too
    gc.collect()
    # resident now: the peak so far must not be above, or it hides the steps'
    baseline = psutil.Process().memory_info().rss
    for _ in range(3):
        step()
    return ops.memory() - baseline


if __name__ == "__main__":
    set_threads(int(sys.argv[3]))
    print(added(*sys.argv[1:3]))
