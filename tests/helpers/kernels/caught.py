"""What of a search a test asks for: the cases drawn, or the results that are wrong.

Without the rest, which takes ten times as long: running the cases, and hints. What a case should
give is worked out once for all the kernels that are tried on it.
"""

import hashlib
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

from accel.verify import luck, trial
from accel.verify.calling import Judged
from accel.verify.check import Options, cases_of
from accel.verify.contract import Case, Expected, expected
from accel.verify.load import as_subject
from accel.verify.search import search
from reference import ops
from reference.ops import OPS

KEPT = 100  # cases, which an op's first dozen stay among

_wanted: dict[bytes, Expected] = {}


def wanted(case: Case) -> Expected:
    """Return what a case should give."""
    key = hashlib.sha256(pickle.dumps(case)).digest()
    if key not in _wanted:
        if len(_wanted) == KEPT:
            _wanted.clear()
        _wanted[key] = expected(case)
    return _wanted[key]


@contextmanager
def worked_out_once() -> Iterator[None]:
    """Have what cases should give remembered."""
    with mock.patch.object(trial, "expected", wanted), mock.patch.object(luck, "expected", wanted):
        yield


class Named(Exception):
    """What was looked for is wrong, and no further case is tried."""


def wrong_results(
    op: str,
    kernel: Any,
    wrong: str | None = None,
    dtype: str = "float32",
    *,
    examples: int | None = None,
    seed: int = 0,
) -> set[str]:
    """Return the results that fail: "out", "dq", …; "" for a call that raises.

    Parameters
    ----------
    wrong : str, optional
        The result that has to be named, with which the search ends; any, when None.
    examples : int, optional
        The cases that are tried at most; as many as the command tries, when None.
    """
    subject, spec, names = as_subject(kernel), OPS[op], set[str]()

    def run(case: Case) -> list[Judged]:
        judged = trial.run_case(subject, case)
        names.update(j.name for j in judged if not j.ok)
        if names if wrong is None else wrong in names:
            raise Named
        return judged

    subject.run = run
    count = cases_of(spec, Options(examples=examples))
    with worked_out_once(), suppress(Named):
        search(subject, spec, dtype, seed=seed, examples=count, shrink=False)
    return names


def tried(op: str, examples: int | None = None, seed: int = 0) -> list[Case]:
    """Return the cases of an op that a search draws, none of which is run."""
    subject, spec, seen = as_subject(ops), OPS[op], list[Case]()

    def run(case: Case) -> list[Judged]:
        seen.append(case)
        return []

    subject.run = run
    count = cases_of(spec, Options(examples=examples))
    search(subject, spec, "float32", seed=seed, examples=count, shrink=False)
    return seen
