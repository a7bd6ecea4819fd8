"""Every backend offers the whole contract, and its results are the reference's.

``accel.verify`` draws the cases (sizes at and past tile edges, strides, masks, documents, groups of
heads) and holds results and gradients to the rule in ``accel/tolerance.py``.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import accel
from accel.cpu import memory
from accel.verify import check_op
from accel.verify.contract import applies
from reference import ops as reference
from reference.ops import NAMES, OPS, SERVICES
from tests.helpers.contract import cases, cotangent

CHECKED = sorted({name.removesuffix("_forward").removesuffix("_backward") for name in NAMES})
UNCHECKED = set(SERVICES)  # what every check uses
DTYPES = ("float32", "float64", "bf16")


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(o, d) for o in CHECKED for d in DTYPES if o not in UNCHECKED and applies(OPS[o], d)],
)
def test_cpu_is_as_close_as_plain_code(op: str, dtype: str) -> None:
    ops = accel.load("cpu", compute="bf16" if dtype == "bf16" else "float32")
    # NaN in fresh memory shows any element that a kernel forgets to write
    with memory.poisoned():
        check_op(op, ops, dtypes=[dtype], examples=25)


@contextmanager
def reference_forbidden(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every op of the reference raise, wherever it is imported."""

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("an accel op called its reference op")

    import sys

    originals = {getattr(reference, name) for name in NAMES}
    with monkeypatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] in ("reference", "accel"):
                for attribute, value in list(vars(module).items()):
                    if inspect.isfunction(value) and value in originals:
                        patch.setattr(module, attribute, forbidden)
        yield


def test_no_op_calls_its_reference_op(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = accel.load("cpu")
    with reference_forbidden(monkeypatch):
        for op, (arrays, options) in cases(np.float32).items():
            out, cache = getattr(ops, f"{op}_forward")(*arrays, **options)
            getattr(ops, f"{op}_backward")(cotangent(out), cache)
        x, flat = np.ones((2, 3, 8), np.float32), np.ones(100, np.float32)
        ops.softmax(x)
        ops.logits(x, x[0])
        ops.global_norm(flat)
        ops.accumulate(flat, flat.copy())
        settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
        state = flat, np.zeros_like(flat), np.zeros_like(flat), flat.copy()
        ops.adamw(*state, step=1, n_decayed=50, **settings)
