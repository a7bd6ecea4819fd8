"""How others decide that a kernel is right: their shapes, inputs, precisions and tolerances.

Each is written anew from what its authors publish, at the commit that ``source`` names. Where their
sizes need a GPU, sizes are cut, and ``cut`` says so; tolerances, inputs and options are theirs. A
tool that takes any kernel (KernelBench, BackendBench, gpucheck) is given one for every op of the
contract, gradients too where it looks at any; a suite of tests (Liger-Kernel, flash-attention,
cs336) judges the ops that it has tests for.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from accel.verify.board.corpus import settings
from accel.verify.board.eager import stepwise
from accel.verify.board.outcome import Call, Result, copied, outcome, suits
from reference import ops
from reference.types import Array

# (op, result, what plain code should give, the float64 truth, precision) -> close enough?
Close = Callable[[str, Result, Array, Array, str], bool]


class Rule(NamedTuple):
    """One way to judge a kernel."""

    name: str
    says: str  # the rule in a line
    source: str
    precisions: tuple[str, ...]  # in which its authors run it
    calls: Callable[[str], list[Call]]  # of an op, as its authors make them; none: not tested
    close: Close
    repeats: int = 0  # calls that must agree bit by bit, where it asks that
    cut: str = ""
    plain: Any = ops  # whose error in the same precision is the measure, where a rule has one


def allclose(got: Array, want: Array, atol: float, rtol: float, equal_nan: bool = False) -> bool:
    """Say |got - want| ≤ atol + rtol |want| everywhere, as torch.allclose does."""
    if got.shape != want.shape:
        return False
    with np.errstate(all="ignore"):
        return bool(np.allclose(got, want, atol=atol, rtol=rtol, equal_nan=equal_nan))


def half(precision: str) -> bool:
    """Say whether a precision is a 16-bit one."""
    return precision == "bf16"


# ---- KernelBench ---------------------------------------------------------------------------------


def _kernelbench_close(op: str, r: Result, plain: Array, exact: Array, precision: str) -> bool:
    tolerance = 1e-2 if half(precision) else 1e-4
    return r.gradient or allclose(r.value, plain, tolerance, tolerance)


# ---- BackendBench --------------------------------------------------------------------------------


def _backendbench_close(op: str, r: Result, plain: Array, exact: Array, precision: str) -> bool:
    same = r.value.dtype == plain.dtype  # assert_close looks at the type as well
    return same and allclose(r.value, plain, 1e-2, 1e-2, equal_nan=True)


# ---- Liger-Kernel --------------------------------------------------------------------------------

# op -> atol and rtol in float32, then in bf16
LIGER: dict[str, tuple[tuple[float, float], tuple[float, float] | None]] = {
    "rmsnorm": ((1e-4, 1e-7), (5.0, 1e-5)),
    "layernorm": ((1e-5, 1e-5), None),
    "rope": ((1e-5, 1e-5), (1e-1, 1e-5)),
    "swiglu": ((1e-0, 1e-5), (1e4, 1e-2)),
    "gelu_tanh": ((1e-5, 1e-5), (1e-2, 1e-2)),
    "linear_cross_entropy": ((1e-5, 5e-4), (5e-3, 5e-2)),
    "embedding": ((1e-6, 1e-5), None),
    "softmax": ((1e-5, 1e-5), (5e-2, 5e-2)),
}


def _liger_close(op: str, r: Result, plain: Array, exact: Array, precision: str) -> bool:
    tolerance = LIGER[op][half(precision)]
    if tolerance is None:
        return True
    if op == "linear_cross_entropy" and r.name == "out":
        return True if r.value.dtype.kind == "i" else allclose(r.value, plain, *tolerance)
    return allclose(r.value, plain, *tolerance)


# ---- flash-attention -----------------------------------------------------------------------------


def _flash_close(op: str, r: Result, plain: Array, exact: Array, precision: str) -> bool:
    if r.value.shape != exact.shape:
        return False
    error = float(np.max(np.abs(r.value - exact), initial=0.0))
    own = float(np.max(np.abs(plain - exact), initial=0.0))
    return error <= (3 if r.gradient else 2) * own


# ---- cs336 ---------------------------------------------------------------------------------------

# op -> atol and rtol: of a snapshot 1e-2 and 1e-4 where a test does not say, of NumPy's
# assert_allclose, which softmax and the loss are compared by, rtol 1e-7
CS336 = {
    "linear": (1e-2, 1e-4),
    "embedding": (1e-2, 1e-4),
    "swiglu": (1e-5, 1e-4),
    "attention": (1e-6, 1e-4),
    "rmsnorm": (1e-6, 1e-4),
    "rope": (1e-6, 1e-4),
    "softmax": (1e-6, 1e-7),
    "linear_cross_entropy": (1e-4, 1e-7),
    "adamw": (1e-4, 1e-4),
}


def _cs336_close(op: str, r: Result, plain: Array, exact: Array, precision: str) -> bool:
    return allclose(r.value, plain, *CS336[op], equal_nan=True)


# ---- gpucheck ------------------------------------------------------------------------------------

GPUCHECK = {"float32": (1e-4, 1e-4), "bf16": (5e-2, 5e-2), "tf32": (5e-4, 5e-4)}


def _gpucheck_close(op: str, r: Result, plain: Array, exact: Array, precision: str) -> bool:
    return allclose(r.value, plain, *GPUCHECK[precision])


RULES = (
    Rule(
        "KernelBench",
        "allclose(atol = rtol = 1e-4, 1e-2 in half), one shape, 5 draws of torch.rand, forward",
        "github.com/ScalingIntelligence/KernelBench, src/eval.py at 01f92ad",
        ("float32",),
        settings.kernelbench,
        _kernelbench_close,
        cut="one shape of at most 2^18 numbers, powers of two as theirs are",
    ),
    Rule(
        "BackendBench",
        "assert_close(atol = rtol = 1e-2, NaN equals NaN) whatever is asked for, OpInfo's samples",
        "github.com/meta-pytorch/BackendBench, BackendBench/eval.py at 015f5cb",
        ("bf16", "float32"),
        settings.opinfo,
        _backendbench_close,
    ),
    Rule(
        "Liger-Kernel",
        "allclose with a tolerance of each test's own",
        "github.com/linkedin/Liger-Kernel, test/transformers at 030cb71, 078e932, 00fb8bf, "
        "0097d15, 0269730, 01010eb, 0a141c5, 1de3849",
        ("float32", "bf16"),
        settings.liger,
        _liger_close,
        cut="their largest shapes; those that they call weird are kept",
    ),
    Rule(
        "flash-attention",
        "max |err| ≤ 2 × that of plain code in the same precision, gradients 3 ×",
        "github.com/Dao-AILab/flash-attention, tests/test_flash_attn.py, test_flash_attn_output",
        ("bf16",),
        settings.flash,
        _flash_close,
        repeats=20,
        cut="batch 1, d = 32, 2 or 4 heads; one pairing of options in four where T ≥ 1023; "
        "20 repeats, not 250, in the search for races",
        plain=stepwise(ops, "attention"),
    ),
    Rule(
        "cs336",
        "allclose to a snapshot (rtol 1e-4) or to PyTorch (1e-7), atol of each test's own, forward",
        "github.com/stanford-cs336/assignment1-basics, tests/test_model.py, test_nn_utils.py, "
        "test_optimizer.py, conftest.py",
        ("float32",),
        settings.cs336,
        _cs336_close,
    ),
    Rule(
        "gpucheck",
        "assert_close(1e-4 in float32, 5e-2 in bf16) over fuzzed shapes and strides, 3 equal runs",
        "pypi.org/project/gpucheck 0.1.0; github.com/Akasxh/gpucheck at 24035aa",
        ("float32", "bf16"),
        settings.gpucheck,
        _gpucheck_close,
        repeats=3,
        cut="squares above 513; shapes with a zero",
    ),
)


# ---- judging -------------------------------------------------------------------------------------


class Judge:
    """A rule at work: it remembers what the plain code gives on its calls."""

    def __init__(self, rule: Rule, calls: Callable[[str], list[Call]] | None = None) -> None:
        self.rule, self.calls = rule, calls or rule.calls
        self.made: dict[str, list[Call]] = {}
        self.known: dict[tuple[str, int, str], dict[str, tuple[Array, Array]]] = {}

    def of(self, op: str) -> list[Call]:
        """Return the calls that it makes of an op."""
        if op not in self.made:
            self.made[op] = self.calls(op)
        return self.made[op]

    def expected(self, op: str, i: int, precision: str) -> dict[str, tuple[Array, Array]]:
        """Return (plain, exact) of each result of a call by name, made once."""
        if (op, i, precision) not in self.known:
            call = self.of(op)[i]
            taken = call._replace(
                arrays=tuple(copied(a, precision) for a in call.arrays),
                options={name: copied(o, precision) for name, o in call.options.items()},
                half=half(precision),
            )
            exact = outcome(ops, taken, "float64")
            plain = outcome(self.rule.plain, call, precision)
            measured = self.rule.plain is not ops  # else no tolerance is spent on plain sums
            self.known[op, i, precision] = {
                e.name: ((p if measured else _rounded(p, e, precision)).value, e.value)
                for p, e in zip(plain, exact, strict=True)
            }
        return self.known[op, i, precision]

    def catches(self, op: str, kernel: Any, precisions: tuple[str, ...]) -> str:
        """Return what it finds wrong with a kernel, or ""."""
        for precision in precisions:
            for i, call in enumerate(self.of(op)):
                if not suits(kernel, call):
                    continue
                with np.errstate(all="ignore"):
                    try:
                        found = outcome(kernel, call, precision)
                    except Exception as error:  # a kernel that raises has been found out
                        return f"raises {type(error).__name__}: {error}"
                    if why := self._looks(op, i, found, precision):
                        return f"{precision}, call {i}: {why}"
        return self._repeated(op, kernel, precisions[0]) if self.rule.repeats else ""

    def _looks(self, op: str, i: int, found: list[Result], precision: str) -> str:
        wanted = self.expected(op, i, precision)
        for result in found:
            if result.name not in wanted:
                return f"{result.name} is of no use"
            plain, exact = wanted[result.name]
            if result.name in ("shared", "written into an argument"):
                continue  # nobody looks
            if not self.rule.close(op, result, plain, exact, precision):
                return f"{result.name} is off"
        return ""

    def _repeated(self, op: str, kernel: Any, precision: str) -> str:
        calls = self.of(op)[:1]
        for call in calls:
            first = outcome(kernel, call, precision)
            for _ in range(self.rule.repeats - 1):
                again = outcome(kernel, call, precision)
                pairs = zip(first, again, strict=True)
                if not all(np.array_equal(a.value, b.value, equal_nan=True) for a, b in pairs):
                    return "two runs differ"
        return ""


def _rounded(plain: Result, exact: Result, precision: str) -> Result:
    """Return the truth, rounded to the type that plain code gives."""
    value = np.asarray(exact.value, plain.value.dtype)
    return Result(plain.name, copied(value, precision if value.dtype == np.float32 else None))
