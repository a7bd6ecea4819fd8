"""A process of its own that prints by how many bytes training raises its peak of memory.

``python -m accel.bench.memory ours|torch float32|bf16 THREADS``, for ``myllm bench cpu``. What is
counted is alike on both sides: gradients, both moments and all that a step makes, over what is
resident with the weights, code and kernels loaded.
"""

import dataclasses
import gc
import sys

import psutil

from accel import load
from accel.bench.cpu import peers
from accel.bench.timing import Function
from accel.bench.training import SMALL, Training
from accel.threads import set_threads
from reference.config import Config

TINY = dataclasses.replace(SMALL, vocab_size=64, d_model=32, n_layers=1, d_ff=64)


def added(side: str, mode: str) -> int:
    """Return by how much three steps raise the peak of resident memory."""
    ops = load("cpu", compute=mode)

    def step_of(config: Config, B: int, T: int) -> Function:
        model = Training(ops, config, B, T)
        if side == "ours":
            return model.step
        given = config, model.initial, model.ids, model.targets
        step: Function = peers().Peer(*given, kind=mode).step
        return step

    step_of(TINY, 1, 8)()  # code and kernels are loaded, or compiled, before the baseline is taken
    step = step_of(SMALL, 8, 512)
    gc.collect()
    # resident now: the peak so far must not be above, or it hides the steps'
    baseline = psutil.Process().memory_info().rss
    for _ in range(3):
        step()
    return ops.memory() - baseline


if __name__ == "__main__":
    set_threads(int(sys.argv[3]))
    print(added(*sys.argv[1:3]))
