"""Compute with arrays between pages that nobody may touch: ``python -m tests.helpers.guarded``.

A kernel that reads or writes past an array ends the process. Each array of a model, and each that
an op makes, lies right behind a forbidden page (``start``) or right before one (``end``).
"""

import ctypes
import dataclasses
import math
import mmap
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from accel import load
from accel.cpu import memory
from reference.config import Config
from reference.generate import generate
from reference.ops import Ops
from reference.params import decoder_layout
from reference.presets import GPT2_SMALL, MYLLM_1B
from reference.types import Array
from tests.helpers.contract import DIFFERENTIABLE, cases, cotangent
from tests.helpers.models import MODELS, inputs, toy, weights

Place = Literal["start", "end"]

PAGE = mmap.PAGESIZE
WIDE = {"vocab_size": 601, "d_model": 66, "d_ff": 333, "d_head": 18}


def guarded(place: Place, align: int, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
    """Return an array that is aligned to so many bytes, full of NaN where it can be."""
    dtype = np.dtype(dtype)
    size = -(-(shape if isinstance(shape, int) else math.prod(shape)) * dtype.itemsize // align)
    size *= align
    pages = max(1, -(-size // PAGE))
    room = mmap.mmap(-1, (pages + 2) * PAGE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(room))
    for page in (0, pages + 1):
        if ctypes.CDLL(None, use_errno=True).mprotect(
            ctypes.c_void_p(first + page * PAGE), ctypes.c_size_t(PAGE), 0
        ):
            raise OSError(ctypes.get_errno(), "mprotect")
    start = PAGE if place == "start" else (pages + 1) * PAGE - size
    made: Array = np.ndarray(shape, dtype, room, start)
    if dtype.kind == "f":
        made.fill(np.nan)
    return made


def copy(place: Place, array: Array) -> Array:
    """Return the array between such pages."""
    made = guarded(place, array.itemsize, array.shape, array.dtype)
    made[...] = array
    return made


def each_op(ops: Ops, place: Place) -> None:
    """Run the ops on the contract's arguments, forward and backward."""
    for name in DIFFERENTIABLE:
        arrays, options = cases(np.float32)[name]
        given = [None if x is None else copy(place, x) for x in arrays]
        out, cache = getattr(ops, f"{name}_forward")(*given, **options)
        dout = cotangent(out)
        dout = copy(place, dout) if isinstance(dout, np.ndarray) else dout
        getattr(ops, f"{name}_backward")(dout, cache)


def model(ops: Ops, config: Config, place: Place) -> None:
    """Take a step of a model, and let it write."""
    layout = decoder_layout(config)
    put = partial(copy, place)
    master = {n: put(x) for n, x in layout.views(weights(config, np.float32)).items()}
    grads = {name: put(np.zeros_like(x)) for name, x in master.items()}
    given = {name: put(x) for name, x in inputs(config).items()}
    params = ops.parameters(master)
    loss = ops.gradient(params, config, *given.values(), grads)
    assert math.isfinite(loss.total)
    for name, spec in ((name, spec) for name, (_, spec) in layout.offsets.items()):
        m, v = (put(np.zeros_like(master[name])) for _ in range(2))
        if spec.parts:
            options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "parts": spec.parts}
            ops.muon(master[name], m, grads[name], **options)
        else:
            flat = [x.reshape(-1) for x in (master[name], m, v, grads[name])]
            assert math.isfinite(ops.global_norm(flat[3]))
            rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1}
            ops.adamw(*flat, step=1, n_decayed=flat[0].size // 2, **rates)
    params = ops.parameters(master)
    for _ in range(2):  # the second prompt meets what decoding keeps
        generate(ops, params, config, [[1, 2, 3], [4]], max_new_tokens=4)


def main(mode: str, place: Place) -> None:
    """Run everything in one mode."""
    ops = load("cpu", compute=mode)
    fresh = partial(guarded, place, memory.ALIGNMENT)
    _replace(fresh)
    each_op(ops, place)
    for config in (
        *MODELS.values(),
        toy(MYLLM_1B, **WIDE),
        toy(GPT2_SMALL, **WIDE),
        dataclasses.replace(toy(MYLLM_1B, **WIDE), d_ff=1100),
    ):
        model(ops, config, place)
    print("nothing was touched")


def _replace(fresh: Any) -> None:
    """Have every module of the backend take its arrays from ``fresh``."""
    before = {name: getattr(memory, name) for name in ("empty", "lasting")}
    for name, module in list(sys.modules.items()):
        if name.startswith("accel.cpu"):
            for made, function in before.items():
                if getattr(module, made, None) is function:
                    setattr(module, made, fresh)


if __name__ == "__main__":
    main(sys.argv[1], "start" if sys.argv[2] == "start" else "end")
