"""Checks of PyTorch's kernels, one line each, for tests of one's own.

    from accel.verify.torch import check

    check(MyNorm.apply, like=lambda x, g: F.rms_norm(x, g.shape, g), x="B T D", g="D")
    check(MyBlock, like=Block, init=("D", 4), x="B T D, D % 4")
    check(torch.ops.mine.gelu, like=F.gelu, x="... D", dtypes=["float32", "bf16"])

An ``autograd.Function``, a function, an ``nn.Module`` (its class, or made) or an op of
``torch.library`` is held to what it should be like, in this process; ``README.md`` says what shapes
may be. Nothing else of ``accel.verify`` imports PyTorch.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accel.verify.check import (
    Options,
    VerificationError,
    cases_of,
    check_subject,
    known_names,
)
from accel.verify.contract import DTYPES
from accel.verify.like.declared import DeclarationError
from accel.verify.like.frameworks import Torch
from accel.verify.like.run import Pair
from accel.verify.like.source import make_reference
from accel.verify.like.subject import LikeSubject
from accel.verify.report import Report
from accel.verify.subject import SubjectError

__all__ = ["check"]


def check(
    new: Any,
    *,
    like: Any,
    init: tuple[Any, ...] = (),
    dtypes: Iterable[str] = ("float32", "bf16"),
    seed: int = 0,
    examples: int | None = None,
    shrink: bool = True,
    save: str | Path | None = None,
    partial: bool = False,
    raises: bool = True,
    **shapes: Any,
) -> Report:
    """Hold a function or module to another.

    Parameters
    ----------
    new, like : callable, or class or instance of nn.Module
        They are called alike: by position, in the order of ``like``'s signature, or in that of
        ``shapes`` where it has none.
    init : tuple
        What modules are made with; letters as strings.
    dtypes : iterable of {"float32", "bf16", "float16", "float64", "tf32", "e4m3", "e5m2"}
    seed, examples, shrink, save, partial, raises
        As in ``accel.verify.check_module``.
    **shapes
        What the arguments are: ``x="B T D"``, ``eps=1e-5``.

    Raises
    ------
    VerificationError
        When a result is wrong, or ``new`` gives no gradient where ``like`` does; an
        ``AssertionError``, whose message is the report.
    SubjectError
        When the shapes cannot be read, or do not fit ``like``.
    """
    framework = Torch()
    name = str(getattr(like, "__name__", type(like).__name__))
    name = "function" if name == "<lambda>" else name
    try:
        declared = {"init": tuple(init), **shapes} if init else shapes
        reference = make_reference(name, like, framework, declared)
    except DeclarationError as error:
        raise SubjectError(f"{name}: {error}") from None
    title = str(getattr(new, "__qualname__", "") or getattr(new, "__name__", name))
    subject = LikeSubject(
        [Pair(reference, new, framework)], SimpleNamespace(), title, f"<check of {title}>"
    )
    options = Options(
        dtypes=known_names("dtype", dtypes, DTYPES),
        seed=seed,
        examples=examples,
        shrink=shrink,
        save=None if save is None else Path(save),
        partial=partial,
    )
    with _generators_kept(framework.torch):
        report = check_subject(subject, options)
    for failure in report.failures:
        count = cases_of(failure.case.spec, options)
        failure.rerun = (
            f"the same check(…, dtypes=[{failure.dtype!r}], seed={seed}, examples={count})"
        )
    if raises and not report.ok:
        raise VerificationError(report)
    return report


@contextmanager
def _generators_kept(torch: Any) -> Iterator[None]:
    """Leave PyTorch's generators to the program as they were: every call here begins at a seed."""
    cuda = torch.cuda
    begun = cuda.is_initialized()
    try:
        with torch.random.fork_rng(range(cuda.device_count()) if begun else ()):
            yield
    finally:
        if not begun and cuda.is_initialized():  # by what was checked: as torch.manual_seed has it
            cuda.manual_seed_all(torch.initial_seed())
