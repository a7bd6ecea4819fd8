"""The classic course exercise: one ``adapters.py`` with ``run_rmsnorm``, ``run_rope``, and so on.

Its conventions differ from the contract's: weights are (out, in), a loss is a mean, gradients lie
in ``parameter.grad``, and of two pairs that are equally frequent BPE merges the lexicographically
greater. An adapter that is an op of the contract becomes one (``OPS_OF``), with all that verify
knows of it; the others are called here beside what is right (``TRIALS``).

Arrays are PyTorch's where the file imports PyTorch, NumPy's otherwise; ``from_numpy``, ``to_numpy``
and ``parameter`` in the file say what else they are.
"""

import dataclasses
import inspect
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from accel.verify import adapter_trials
from accel.verify.adapter_bpe import BPE
from accel.verify.adapter_trials import Arrays, Trial
from accel.verify.apart import TIMEOUT, Ended, Silent, Worker
from accel.verify.calls import Call, Raised, Verdict, changes, judge, outcome, short
from accel.verify.check import Options, check_subject
from accel.verify.load import as_subject, import_file
from accel.verify.report import AnyReport, Report, Test, failure_text
from accel.verify.search import Failure
from accel.verify.subject import Subject, SubjectError, positional_of
from reference.ops import OPS
from reference.types import Array, Loss
from reference.visibility import Visibility

TRIALS = (*adapter_trials.TRIALS, BPE)
CLOSE = 1e-4  # of the largest element, in float32

Run = Callable[..., Any]  # an adapter


@dataclasses.dataclass
class Found(AnyReport):
    """What was found of one adapters file, by its name."""

    seed: int
    verdicts: dict[str, Verdict | None] = dataclasses.field(default_factory=dict)  # by adapter
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def there(self) -> dict[str, Verdict]:
        """The verdicts of those that are there and written."""
        return {name: verdict for name, verdict in self.verdicts.items() if verdict}

    @property
    def found_right(self) -> bool:
        return all(verdict and verdict.right for verdict in self.verdicts.values())

    @property
    def found_verdict(self) -> str:
        right = sum(verdict.right for verdict in self.there.values())
        wrong, missing = len(self.there) - right, len(self.verdicts) - len(self.there)
        counts = f"{right} of {len(self.verdicts)} adapters right, {wrong} wrong"
        return f"{counts}, {missing} missing or not written yet"

    def found_tests(self) -> Iterator[Test]:
        """Yield a test for each adapter."""
        for name, verdict in self.verdicts.items():
            outcome = "" if verdict and verdict.right else "failure"
            text = verdict.text if verdict else ""
            yield Test("", name, outcome, said(verdict), text, self.seconds[name])

    def found_facts(self) -> dict[str, Any]:
        adapters = {
            name: {
                "ok": bool(verdict and verdict.right),
                "missing": verdict is None,
                "cases": verdict.calls if verdict else 0,
                "seconds": round(self.seconds[name], 3),
                "problem": verdict.text if verdict else "",
            }
            for name, verdict in self.verdicts.items()
        }
        return {"seed": self.seed, "adapters": adapters}


def said(verdict: Verdict | None) -> str:
    """Return what came of an adapter, in a word or two."""
    if verdict is None:
        return "missing"
    return f"ok in {verdict.calls} cases" if verdict.right else "FAIL"


# ---- adapters that are ops -----------------------------------------------------------------------


def _linear(run: Run, arrays: Arrays, x: Array, weight: Array) -> Array:
    return arrays.take(run(*weight.shape, arrays.give(weight.T), arrays.give(x)))


def _embedding(run: Run, arrays: Arrays, ids: Array, table: Array) -> Array:
    return arrays.take(run(*table.shape, arrays.give(table), arrays.give(ids.astype(np.int64))))


def _rmsnorm(run: Run, arrays: Arrays, x: Array, gain: Array, *, eps: float) -> Array:
    return arrays.take(run(len(gain), eps, arrays.give(gain), arrays.give(x)))


def _softmax(run: Run, arrays: Arrays, x: Array) -> Array:
    return arrays.take(run(arrays.give(x), -1))


def _cross_entropy(run: Run, arrays: Arrays, x: Array, head: Array, targets: Array) -> Loss:
    """The adapter gives the mean, of logits (N, V)."""
    logits = x.reshape(-1, x.shape[-1]) @ head.T
    ids = targets.reshape(-1).astype(np.int64)
    mean = arrays.take(run(arrays.give(logits), arrays.give(ids)))
    return Loss(float(mean) * len(ids), len(ids))


def _attention(
    run: Run,
    arrays: Arrays,
    q: Array,
    k: Array,
    v: Array,
    key_mask: Array | None = None,
    *,
    causal: bool = True,
) -> Array:
    (T, Hq), S = q.shape[1:3], k.shape[1]
    allowed = Visibility(T, S, causal, key_mask=key_mask).allowed()[:, None]
    heads = [np.repeat(x, Hq // x.shape[2], axis=2).swapaxes(1, 2) for x in (q, k, v)]
    mask = np.broadcast_to(allowed, (len(q), Hq, T, S))
    given = None if allowed.all() else arrays.give(mask)
    out = arrays.take(run(*map(arrays.give, heads), given))
    # a query without keys is left open there
    return np.where(mask.any(-1, keepdims=True), out, 0).swapaxes(1, 2)


def _silu(run: Run, arrays: Arrays, x: Array) -> Array:
    gate, up = np.split(x, 2, axis=-1)
    return arrays.take(run(arrays.give(gate))) * up


OPS_OF: dict[str, tuple[str, Callable[..., Any]]] = {
    "run_linear": ("linear", _linear),
    "run_embedding": ("embedding", _embedding),
    "run_silu": ("swiglu", _silu),
    "run_softmax": ("softmax", _softmax),
    "run_rmsnorm": ("rmsnorm", _rmsnorm),
    "run_scaled_dot_product_attention": ("attention", _attention),
    "run_cross_entropy": ("linear_cross_entropy", _cross_entropy),
}
ADAPTERS = tuple(dict.fromkeys((*OPS_OF, *(trial.adapter for trial in TRIALS))))
KEEPS = (*OPS_OF, "run_swiglu", "run_rope")  # the arrays that they are given; others write to them


# ---- all of one file -----------------------------------------------------------------------------


class Adapter(NamedTuple):
    """One adapter of a file."""

    name: str
    run: Run
    arrays: Arrays
    file: str
    tell: Callable[[str], None]  # told how a call is written before it is made


class Keeping:
    """Calls an adapter, and says where it changes an array that it is given.

    A test gives the same array to PyTorch's function, a model to the next layer.
    """

    def __init__(self, run: Run, arrays: Arrays) -> None:
        self.run, self.arrays, self.says = run, arrays, ""
        self.first: list[Any] | None = None  # the arguments of the first call since it was None

    def __call__(self, *given: Any) -> Any:
        before = [self._values(each) for each in given]
        self.first = before if self.first is None else self.first
        found = self.run(*given)
        for says in changes(before, map(self._values, given)):
            says = f"{says}, as callers look at it again"
            self.says = min(self.says or says, says, key=len)
        return found

    def written(self) -> str:
        """Return how the first call is written."""
        try:
            taken = positional_of(inspect.signature(self.run).parameters.values())
        except (TypeError, ValueError):  # one that is not written in Python
            taken = []
        values = [short(value) for value in self.first or ()]
        named = [f"{p.name} = {value}" for p, value in zip(taken, values, strict=False)]
        return ", ".join([*named, *values[len(named) :]])

    def _values(self, given: Any) -> Any:
        number = given is None or isinstance(given, (int, float))
        return given if number else np.array(self.arrays.take(given))


def check_adapter(
    module: Any, name: str, options: Options, tell: Callable[[str], None] = lambda call: None
) -> Verdict | None:
    """Hold one adapter to the reference; None when it is missing, or not written yet."""
    run = getattr(module, name, None)
    if not callable(run):
        return None
    arrays = Arrays.of(module)
    keeping = Keeping(run, arrays)
    run = keeping if name in KEEPS else run
    adapter = Adapter(name, run, arrays, str(module.__file__), tell)
    if _unwritten(adapter):
        return None
    verdicts = [_trial(adapter, trial, options.seed) for trial in TRIALS if trial.adapter == name]
    if name in OPS_OF:
        verdicts.insert(0, _as_op(adapter, options))
    texts = [verdict.text for verdict in verdicts if verdict.text]
    if keeping.says:
        texts.insert(0, f"FAIL {name}: {keeping.says}")
    return Verdict(not texts, sum(verdict.calls for verdict in verdicts), "\n".join(texts))


def _unwritten(adapter: Adapter) -> bool:
    """Whether an adapter raises NotImplementedError in the first case that there is."""
    if adapter.name in OPS_OF:
        text = _as_op(adapter, Options(examples=1, shrink=False)).text
        return "raised NotImplementedError" in text
    (trial, *_) = (trial for trial in TRIALS if trial.adapter == adapter.name)
    found = outcome(partial(_called, adapter, trial, next(trial.cases(np.random.default_rng(0)))))
    return isinstance(found, Raised) and found.kind == "NotImplementedError"


def _as_op(adapter: Adapter, options: Options) -> Verdict:
    op, of_contract = OPS_OF[adapter.name]
    forward = partial(of_contract, adapter.run, adapter.arrays)
    offered = SimpleNamespace(
        **{OPS[op].forward_name: forward}, __file__=adapter.file, DTYPES="float32"
    )
    subject: Subject = as_subject(offered, adapter.name)

    def watch(kind: str, content: Any) -> None:
        if kind == "case":
            adapter.tell(f"{adapter.name} of {content.describe()}")

    subject.watch = watch
    report: Report = check_subject(subject, dataclasses.replace(options, ops=(op,)))
    texts = []
    for failure in report.failures:
        failure.rerun = ""
        problem = re.sub(rf"^{OPS[op].forward_name}\b", adapter.name, failure.judged.problem)
        failure.judged = failure.judged._replace(problem=problem)
        text = re.sub(rf"^FAIL {op}\b", f"FAIL {adapter.name}", failure_text(failure))
        texts.append(_as_called(adapter, subject, failure, text))
    return Verdict(report.ok, report.cases, "\n".join(texts))


def _as_called(adapter: Adapter, subject: Subject, failure: Failure, text: str) -> str:
    """Return what is said of a failure with the call that the adapter gets, not the op's."""
    if not isinstance(adapter.run, Keeping):
        return text
    adapter.run.first = None
    subject.run(failure.case)
    call = f"  smallest case: {adapter.name}({adapter.run.written()})\n"
    return re.sub(r"  smallest case: .*\n(    \w+ = .*\n)*", lambda found: call, text)


def _called(adapter: Adapter, trial: Trial, case: tuple[Any, ...]) -> Any:
    adapter.tell(trial.text(*case))
    return trial.call(adapter.run, adapter.arrays, *case)


def _trial(adapter: Adapter, trial: Trial, seed: int) -> Verdict:
    def cases() -> Iterator[tuple[Any, ...]]:
        return trial.cases(np.random.default_rng(seed))

    calls = [Call(trial.text(*case), partial(_called, adapter, trial, case)) for case in cases()]
    right = [trial.right(*case) for case in cases()]
    mistakes = [
        (says, lambda wrong=wrong: [outcome(partial(wrong, *case)) for case in cases()])
        for says, wrong in trial.mistakes
    ]
    return judge(trial.adapter, calls, right, mistakes, CLOSE, adapter.file)


# ---- the command ---------------------------------------------------------------------------------


def check_file(path: Path, options: Options, timeout: float, out: Console) -> Found:
    """Check an adapters file in a process of its own, and say what comes of each adapter.

    Raises
    ------
    SubjectError
        When there is no such file, it does not import, or it has no adapter at all.
    """
    found, width = Found(path.name, options.seed), max(map(len, ADAPTERS))
    began = time.monotonic()
    with out.status("") as status:  # on a terminal
        for name, verdict in each_apart(path, options, timeout, status.update):
            found.verdicts[name] = verdict
            found.seconds[name], began = time.monotonic() - began, time.monotonic()
            colour = "yellow" if verdict is None else "" if verdict.right else "red"
            say(out, f"{name:<{width}}  {said(verdict)}", colour)
    return found


def show(found: Found, out: Console) -> None:
    """Say what is wrong with each adapter, and how many are right."""
    for verdict in found.there.values():
        if verdict.text:
            say(out, f"\n{verdict.text}")
    say(out, f"\n{found.verdict}")


def say(out: Console, text: str, style: str = "") -> None:
    """Print a text as it is."""
    out.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


# ---- the process ---------------------------------------------------------------------------------


def each_apart(
    path: Path, options: Options, timeout: float, begin: Callable[[str], None] = lambda name: None
) -> Iterator[tuple[str, Verdict | None]]:
    """Yield what is found of each adapter, by processes which a file may crash or never give back.

    The adapter in which one ends is wrong, and the next process goes on after it. ``begin`` is told
    which adapter is next.
    """
    source = File(str(path))

    def fresh() -> Worker:  # importing a file may compile it, which is no call that hangs
        return Worker(source, timeout, loading=max(timeout, TIMEOUT))

    worker = fresh()
    try:
        for name in ADAPTERS:
            begin(name)
            call = ""
            try:
                for kind, content in worker.do(Job(name, options)):
                    if kind == "call":
                        call = content
                    else:
                        verdict = content
            except (Ended, SubjectError) as end:
                if not worker.loaded:
                    raise
                worker.end()
                worker = fresh()
                asks = " (--timeout): is there an endless loop?" if isinstance(end, Silent) else ""
                verdict = Verdict(False, 0, f"FAIL {name}: {end}{asks}\n  in {call}")
            yield name, verdict
    finally:
        worker.end()


class File(NamedTuple):
    """What a worker loads: a file of adapters."""

    module: str

    @property
    def name(self) -> str:
        return Path(self.module).name

    def load(self) -> ModuleType:
        """Import it, in the worker."""
        module = import_file(self.module)
        if not any(hasattr(module, name) for name in ADAPTERS):
            raise SubjectError(f"{self.module} has no adapter: none of {', '.join(ADAPTERS)}")
        return module


class Job(NamedTuple):
    """What a worker is asked to do: check one adapter."""

    adapter: str
    options: Options

    def do(self, module: ModuleType, tell: Callable[[str, Any], None]) -> None:
        """Do it, in the worker."""
        tell("found", check_adapter(module, self.adapter, self.options, partial(tell, "call")))
