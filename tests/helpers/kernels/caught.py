"""What of a search a test asks for: the cases drawn, or the results that are wrong.

Without the rest, which takes ten times as long: running the cases, and hints.
"""

from typing import Any

from accel.verify.calling import Judged
from accel.verify.check import Options, cases_of
from accel.verify.contract import Case
from accel.verify.load import as_subject
from accel.verify.search import search
from reference import ops
from reference.ops import OPS


def wrong_results(
    op: str,
    kernel: Any,
    wrong: str | None = None,
    dtype: str = "float32",
    *,
    rounds: tuple[int | None, ...] = (3, 15, None),
    seed: int = 0,
) -> set[str]:
    """Return the results that fail: "out", "dq", …; "" for a call that raises.

    Parameters
    ----------
    wrong : str, optional
        The result that has to be named; any, when None.
    rounds : tuple of int or None
        Numbers of cases, tried until it is named. Fewer are the first ones of more, so what is
        caught by few is caught by the default number, which None stands for.
    """
    subject, spec, names = as_subject(kernel), OPS[op], set[str]()
    for examples in rounds:
        count = cases_of(spec, Options(examples=examples))
        report = search(subject, spec, dtype, seed=seed, examples=count, shrink=False)
        names = {name for name, tally in report.results.items() if tally.failed}
        names |= {failure.name for failure in report.failures}
        if names if wrong is None else wrong in names:
            break
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
