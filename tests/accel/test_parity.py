"""Every backend offers the whole contract, and its results are the reference's.

``accel.verify`` draws the cases (sizes at and past tile edges, strides, masks, documents, groups of
heads) and holds results and gradients to the rule in ``accel/tolerance.py``.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import accel
from accel.cpu import memory
from accel.verify import check_op
from accel.verify.contract import DTYPES
from accel.verify.subject import applies
from reference import ops as reference
from reference.ops import NAMES, OPS, SERVICES
from tests.helpers import needs

CHECKED = sorted({name.removesuffix("_forward").removesuffix("_backward") for name in NAMES})
UNCHECKED = set(SERVICES)  # what every check uses


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(o, d) for o in CHECKED for d in DTYPES if o not in UNCHECKED and applies(OPS[o], d)],
)
def test_cpu_is_as_close_as_plain_code(op: str, dtype: str) -> None:
    if dtype == "bf16":
        needs.bf16()
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
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape, dtype=np.float32)

    ids = np.zeros((2, 3), np.int32)
    x = normal(2, 3, 8)
    q = normal(2, 3, 4, 2)
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "add": ((x, x), {}),
        "scale": ((x,), {"factor": 2.0}),
        "embedding": ((ids, normal(5, 8)), {}),
        "linear": ((x, normal(8, 4), normal(4)), {}),
        "split_heads": ((q,), {"heads": (2, 1, 1)}),
        "merge_heads": ((q,), {}),
        "rmsnorm": ((x, normal(8)), {"eps": 1e-5}),
        "layernorm": ((x, normal(8), normal(8)), {"eps": 1e-5}),
        "rope": ((q,), {"base": 1e4}),
        "attention": ((q, q, q), {}),
        "swiglu": ((x,), {}),
        "gelu": ((x,), {}),
        "gelu_tanh": ((x,), {}),
        "relu": ((x,), {}),
        "dropout": ((x,), {"p": 0.5, "key": reference.DropoutKey(1, 2, 3, 4)}),
        "linear_cross_entropy": ((x, normal(5, 8), ids), {}),
    }
    assert set(calls) == {n.removesuffix("_forward") for n in NAMES if n.endswith("_forward")}
    with reference_forbidden(monkeypatch):
        for op, (arrays, options) in calls.items():
            out, cache = getattr(ops, f"{op}_forward")(*arrays, **options)
            dout = 1.0 if op == "linear_cross_entropy" else out
            getattr(ops, f"{op}_backward")(dout, cache)
        ops.softmax(x)
        ops.logits(x, normal(5, 8))
        flat = normal(100)
        ops.global_norm(flat)
        ops.accumulate(flat, flat.copy())
        settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
        state = flat, np.zeros_like(flat), np.zeros_like(flat), flat.copy()
        ops.adamw(*state, step=1, n_decayed=50, **settings)
