"""Kernels as tests of pytest: ``pytest --verify mykernels.py``.

Each op, precision and direction is a test of its own, ``mykernels.py::rmsnorm[float32-backward]``,
and one more test fails when the module offers something that was not tried. The ini option
``verify`` lists files that are always collected. The kernels run in processes of their own.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # pytest loads this file in every run, which must not wait for the rest
    from accel.verify.check import Options
    from accel.verify.report import Report

FILES = pytest.StashKey[list[Path]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("myllm verify", "kernels, held to the reference by myllm verify")
    add = group.addoption
    add(
        "--verify",
        action="append",
        default=[],
        metavar="FILE.py",
        help="hold the kernels of this file to the reference (may be repeated)",
    )
    add("--verify-seed", type=int, default=0, metavar="N", help="of the cases (default 0)")
    add("--verify-examples", type=int, metavar="N", help="cases of each op in each precision")
    add("--verify-budget", type=float, metavar="S", help="seconds in which to try cases")
    add("--verify-partial", action="store_true", help="not all that a file offers need be tried")
    parser.addini("verify", "files of kernels to hold to the reference", type="paths", default=[])


def pytest_configure(config: pytest.Config) -> None:
    given = [config.invocation_params.dir / name for name in config.getoption("--verify")]
    files = [path.resolve() for path in (*config.getini("verify"), *given)]
    config.stash[FILES] = list(dict.fromkeys(files))
    config.args += [str(path) for path in config.stash[FILES] if str(path) not in config.args]


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> "KernelFile | None":
    if file_path.resolve() in parent.config.stash[FILES]:
        return KernelFile.from_parent(parent, path=file_path)
    return None


class KernelFile(pytest.File):
    """The ops that one file offers."""

    def collect(self) -> Iterator[pytest.Item]:
        from accel.verify.apart import Source, plan_apart
        from accel.verify.subject import SubjectError
        from reference.ops import OPS

        self.reports: dict[str, Report] = {}
        self.source = Source(module=str(self.path))
        try:
            plan, self.bare = plan_apart(self.source, self.options())
        except SubjectError as error:
            raise self.CollectError(str(error)) from None
        for op, dtype, _ in plan:
            for direction in ("forward", "backward") if OPS[op].backward else ("forward",):
                yield KernelItem.from_parent(
                    self, name=f"{op}[{dtype}-{direction}]", of=(op, dtype, direction)
                )
        yield UntriedItem.from_parent(self, name="all is tried")

    def options(self, **which: Any) -> "Options":
        from accel.verify.check import Options

        option = self.config.getoption
        return Options(
            seed=option("--verify-seed"),
            examples=option("--verify-examples"),
            budget=option("--verify-budget"),
            partial=option("--verify-partial"),
            save=Path("verify-failures"),
            **which,
        )

    def report(self, op: str) -> "Report":
        """Return the report that has an op: of all ops that were selected, but not on xdist."""
        from accel.verify.apart import check_apart

        if op not in self.reports:
            own = [i for i in self.session.items if isinstance(i, KernelItem) and i.parent is self]
            if hasattr(self.config, "workerinput"):  # other processes have the other ops
                own = [item for item in own if item.of[0] == op]
            ops = tuple(dict.fromkeys(item.of[0] for item in own))
            report = check_apart(self.source, self.options(ops=ops))
            self.reports |= dict.fromkeys(ops, report)
        return self.reports[op]


class _Wrong(Exception):
    """What was found, as it is shown."""


class _Item(pytest.Item):
    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        if isinstance(excinfo.value, _Wrong):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


class KernelItem(_Item):
    """One direction of an op in one precision."""

    def __init__(self, *, of: tuple[str, str, str], **more: Any) -> None:
        super().__init__(**more)
        self.of = of

    def runtest(self) -> None:
        from accel.verify.report import by_direction, failure_text

        assert isinstance(self.parent, KernelFile)
        op, dtype, direction = self.of
        (found,) = [o for o in self.parent.report(op).ops if (o.op, o.dtype) == (op, dtype)]
        if found.not_offered:
            pytest.skip(f"{op} does not work in {dtype}: {found.not_offered}")
        failures = by_direction(found)
        if direction not in failures:
            pytest.skip(f"{op}_backward is not there")
        if failures[direction]:
            raise _Wrong("\n\n".join(failure_text(failure) for failure in failures[direction]))


class UntriedItem(_Item):
    """Fails when something that the file offers is not tried."""

    def runtest(self) -> None:
        assert isinstance(self.parent, KernelFile)
        report = self.parent.bare
        if report.untried:
            text = "\n".join(f"not tried: {sentence}" for sentence in report.untried)
            if report.partial:
                pytest.skip(text)
            raise _Wrong(f"{text}\n--verify-partial takes that for all right")
