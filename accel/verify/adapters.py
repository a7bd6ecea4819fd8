"""The classic course exercise: one ``adapters.py`` with ``run_rmsnorm``, ``run_rope``, and so on.

Its conventions differ from the contract's: weights are (out, in), a loss is a mean, gradients lie
in ``parameter.grad``, and of two pairs that are equally frequent BPE merges the lexicographically
greater. An adapter that is an op of the contract becomes one (``OPS_OF``), with all that verify
knows of it; the others are called here beside what is right (``TRIALS``).

Arrays are PyTorch's where the file imports PyTorch, NumPy's otherwise; ``from_numpy``, ``to_numpy``
and ``parameter`` in the file say what else they are.
"""

import dataclasses
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from accel.verify.adapter_trials import TRIALS, Arrays
from accel.verify.calls import Call, Raised, Verdict, judge, outcome
from accel.verify.check import Options, check_subject
from accel.verify.load import as_subject, import_file
from accel.verify.report import Report, failure_text
from accel.verify.subject import Subject, SubjectError
from reference.ops import OPS
from reference.types import Array, Loss
from reference.visibility import Visibility

CLOSE = 1e-4  # of the largest element, in float32

Run = Callable[..., Any]  # an adapter


class Found(NamedTuple):
    """What was found of one adapters file."""

    missing: list[str]  # adapters that are not there, or not written yet
    verdicts: dict[str, Verdict]  # by adapter


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
    return np.where(mask.any(-1, keepdims=True), out, 0).swapaxes(1, 2).astype(q.dtype)


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


# ---- all of one file -----------------------------------------------------------------------------


def check_adapters(module: Any, options: Options) -> Found:
    """Hold the adapters of a module to the reference, in this process."""
    arrays = Arrays.of(module)
    found = Found([], {})
    for name in ADAPTERS:
        if not callable(getattr(module, name, None)) or _unwritten(module, name, arrays):
            found.missing.append(name)
            continue
        verdicts = []
        if name in OPS_OF:
            verdicts.append(_as_op(module, name, arrays, options))
        for trial in TRIALS:
            if trial.adapter == name:
                verdicts.append(_trial(module, trial, arrays, options.seed))
        texts = [verdict.text for verdict in verdicts if verdict.text]
        calls = sum(verdict.calls for verdict in verdicts)
        found.verdicts[name] = Verdict(not texts, calls, "\n".join(texts))
    return found


def _unwritten(module: Any, name: str, arrays: Arrays) -> bool:
    """Whether an adapter raises NotImplementedError in the first case that there is."""
    if name in OPS_OF:
        text = _as_op(module, name, arrays, Options(examples=1, shrink=False)).text
        return "raised NotImplementedError" in text
    (trial, *_) = (trial for trial in TRIALS if trial.adapter == name)
    case = next(trial.cases(np.random.default_rng(0)))
    found = outcome(partial(trial.call, getattr(module, name), arrays, *case))
    return isinstance(found, Raised) and found.kind == "NotImplementedError"


def _as_op(module: Any, name: str, arrays: Arrays, options: Options) -> Verdict:
    op, of_contract = OPS_OF[name]
    forward = partial(of_contract, getattr(module, name), arrays)
    offered = SimpleNamespace(
        **{OPS[op].forward_name: forward}, __file__=module.__file__, DTYPES="float32"
    )
    subject: Subject = as_subject(offered, name)
    report: Report = check_subject(subject, dataclasses.replace(options, ops=(op,)))
    texts = []
    for failure in report.failures:
        failure.rerun = ""
        problem = re.sub(rf"^{OPS[op].forward_name}\b", name, failure.judged.problem)
        failure.judged = failure.judged._replace(problem=problem)
        texts.append(re.sub(rf"^FAIL {op}\b", f"FAIL {name}", failure_text(failure)))
    return Verdict(report.ok, report.cases, "\n".join(texts))


def _trial(module: Any, trial: Any, arrays: Arrays, seed: int) -> Verdict:
    adapter = getattr(module, trial.adapter)

    def cases() -> Iterator[tuple[Any, ...]]:
        return trial.cases(np.random.default_rng(seed))

    def called(*case: Any) -> Any:
        return _single(trial.call(adapter, arrays, *case))

    calls = [Call(trial.text(*case), partial(called, *case)) for case in cases()]
    right = [trial.right(*case) for case in cases()]
    mistakes = [
        (says, lambda wrong=wrong: [outcome(partial(wrong, *case)) for case in cases()])
        for says, wrong in trial.mistakes
    ]
    return judge(trial.adapter, calls, right, mistakes, CLOSE)


def _single(value: Any) -> Any:
    """Return float64 as float32: a result may be wider than it has to be."""
    if isinstance(value, np.ndarray) and value.dtype == np.float64:
        return value.astype(np.float32)
    return [_single(part) for part in value] if isinstance(value, list) else value


# ---- the command ---------------------------------------------------------------------------------


def run(path: Path, out: Console, *, seed: int, examples: int | None, timeout: float) -> int:
    """Check an adapters file in a process of its own, say what was found, return the status.

    Raises
    ------
    SubjectError
        When there is no such file, it does not import, or it has no adapter at all.
    """
    found = _apart(path, seed, examples, timeout)

    def say(text: str, style: str = "") -> None:
        out.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    width = max(map(len, ADAPTERS))
    for name in ADAPTERS:
        if name in found.missing:
            say(f"{name:<{width}}  missing", "yellow")
        elif name in found.verdicts:
            verdict = found.verdicts[name]
            said = f"ok in {verdict.calls} cases" if verdict.right else "FAIL"
            say(f"{name:<{width}}  {said}", "" if verdict.right else "red")
    for verdict in found.verdicts.values():
        if verdict.text:
            say(f"\n{verdict.text}")
    wrong = [name for name, verdict in found.verdicts.items() if not verdict.right]
    right = len(found.verdicts) - len(wrong)
    counts = f"\n{right} of {len(ADAPTERS)} adapters right, {len(wrong)} wrong"
    say(f"{counts}, {len(found.missing)} missing or not written yet")
    return int(bool(wrong or found.missing))


def _apart(path: Path, seed: int, examples: int | None, timeout: float) -> Found:
    """Check in a new interpreter, which a file may crash or never give back."""
    with tempfile.TemporaryDirectory(prefix="myllm-verify-") as folder:
        answer = Path(folder) / "found"
        code = f"import sys; sys.path[:] = {sys.path!r}; from accel.verify.adapters import work; "
        words = [sys.executable, "-c", f"{code}work()", str(path), str(seed), str(examples or 0)]
        try:
            done = subprocess.run([*words, str(answer)], timeout=timeout, stdout=2, check=False)
        except subprocess.TimeoutExpired:
            raise SubjectError(
                f"{path}: no answer within {timeout:g} s (--timeout); is there an endless loop?"
            ) from None
        if not answer.exists():
            raise SubjectError(f"{path} ended the process with status {done.returncode}")
        found = pickle.loads(answer.read_bytes())
    if isinstance(found, str):
        raise SubjectError(found)
    assert isinstance(found, Found)
    return found


def work() -> None:
    """Check the file that the command line names, in the process, and write what was found."""
    path, seed, examples, answer = sys.argv[1:]
    found: Any
    try:
        module = import_file(path)
        if not any(hasattr(module, name) for name in ADAPTERS):
            raise SubjectError(f"{path} has no adapter: none of {', '.join(ADAPTERS)}")
        options = Options(seed=int(seed), examples=int(examples) or None)
        found = check_adapters(module, options)
    except (SubjectError, ImportError) as error:
        found = str(error)
    Path(answer).write_bytes(pickle.dumps(found))
