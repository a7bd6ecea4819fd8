"""The kernels under test: a module loaded, its arrays brought over, its functions called.

Nothing here trusts the module: whatever it raises becomes a ``KernelError`` with one clear line.
"""

import difflib
import inspect
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from accel.tolerance import round_float16
from accel.verify.contract import (
    DTYPES,
    Case,
    applies,
    contract_parameters,
    draw_case,
    expected,
    storable,
)
from accel.verify.cuts import cuts
from accel.verify.draw import Draw, Pick
from accel.verify.layouts import laid
from accel.verify.ops import room
from reference import ops as reference
from reference.contract import Op
from reference.ops import OPS, SERVICES
from reference.types import Array

GUARD_BYTES = 64  # on either side of an array: it stays aligned as vector loads want it
if TYPE_CHECKING:
    from accel.verify.calling import Judged
    from accel.verify.evidence import Evidence
    from accel.verify.guesses import Guesses

# where to go with an op that the contract has not
OTHERS = ". An op of your own is held to a reference of yours: myllm verify --like REF.py"
RESEMBLES = 0.85  # of difflib's ratio: rmsnorm_bakward, but not rmsnorm_tile


class SubjectError(ValueError):
    """The module cannot be checked at all."""


class KernelError(Exception):
    """A function of the module raised, or returned something that cannot be read."""


class Placed(NamedTuple):
    """An array as the kernel sees it, and what lies around it."""

    view: Any  # what is passed
    base: Any  # the buffer that view is cut from
    before: Array  # the buffer's content, to see whether anything was written
    around: Array | None = None  # which elements of the buffer are not the view's


class Subject:
    """A module with functions named like the contract's.

    Parameters
    ----------
    module : module or any object with such attributes
    name : str
        What to call it in messages.
    command : str
        What names it again: options of ``myllm verify``, such as ``--module mykernels.py``, or the
        arguments of ``check_op``, such as ``forward=my_forward``.
    alone : bool
        Whether a forward was given by itself on purpose, so that nobody misses its backward.
    """

    def __init__(self, module: Any, name: str, command: str, *, alone: bool = False) -> None:
        self.module, self.name, self.command, self.alone = module, name, command, alone
        self.native = not hasattr(module, "from_numpy") and not hasattr(module, "from_dlpack")
        self._from = getattr(module, "from_numpy", None)
        self._to = getattr(module, "to_numpy", None)
        self._file = str(getattr(module, "__file__", "") or "")
        self._activation = self._from is not None and "activation" in (_signature(self._from) or ())
        self._signatures: dict[str, Mapping[str, inspect.Parameter] | None] = {}
        self.notes: set[str] = set()
        # told ("case", Case) before a case is tried and ("calling", name) before a call
        self.watch: Callable[[str, Any], None] = lambda kind, content: None
        # what a kernel may raise; an interrupt too, in a process that has no other
        self.caught: tuple[type[BaseException], ...] = (Exception, SystemExit)

    def has(self, function: str) -> bool:
        return callable(getattr(self.module, function, None))

    def specs(self) -> list[Op]:
        """Return the ops of which the module has something, in the contract's order."""
        return [spec for spec in OPS.values() if any(self.has(name) for name in spec.names)]

    def has_backward(self, spec: Op) -> bool:
        return spec.backward and self.has(spec.backward_name)

    def declared_dtypes(self) -> tuple[str, ...] | None:
        """Return the precisions that the module says it works in: ``DTYPES = ("float32",)``."""
        declared = getattr(self.module, "DTYPES", None)
        if declared is None:
            return None
        declared = (declared,) if isinstance(declared, str) else tuple(declared)
        unknown = [d for d in declared if d not in DTYPES]
        if unknown or not declared:
            raise SubjectError(
                f"{self.name}: DTYPES must name some of {', '.join(DTYPES)}, got {declared}"
            )
        return declared

    def dtypes(self) -> tuple[str, ...]:
        """Return the precisions to check: those declared, or those that survive the crossing.

        A module whose ``from_numpy`` rounds to bf16 is checked in bf16; one that turns float64 into
        float32, or refuses it, is not checked in float64.
        """
        declared = self.declared_dtypes()
        if declared is not None:
            return declared
        x = np.random.default_rng(0).standard_normal(64)
        kept: list[str] = []
        for dtype in ("float32", "float64"):
            sent = x.astype(dtype)
            try:
                back = self.to_numpy(self.from_numpy(sent, activation=True))
            except KernelError:
                if not kept:
                    raise
                return tuple(kept)
            if np.array_equal(np.asarray(back, np.float64), sent.astype(np.float64)):
                kept.append(dtype)
        halves = np.array_equal(np.asarray(back, np.float64), round_float16(x))
        return tuple(kept) or (("float16",) if halves else ("bf16",))

    def signature(self, function: str) -> Mapping[str, inspect.Parameter] | None:
        """Return the parameters of a function of the module; None when they cannot be known."""
        if function not in self._signatures:
            found = _signature(getattr(self.module, function)) if self.has(function) else None
            self._signatures[function] = found
        return self._signatures[function]

    def parameter_offers(self, function: str) -> Callable[[str], bool | str]:
        """Return what tells whether a function takes an optional parameter of the contract."""
        parameters = self.signature(function) if hasattr(reference, function) else None
        if parameters is None:
            return lambda parameter: True
        positional = positional_of(parameters.values())
        names = [p.name for p in contract_parameters(function)]
        order = [p.name for p in positional_of(contract_parameters(function))]
        spec = next(spec for spec in OPS.values() if function in spec.names)
        # ``**options`` is for what changes a result, all but what only spares memory
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        forward = takes_any and function == spec.forward_name
        any_option = set(names) - set(spec.needs) if forward else set()

        def offers(parameter: str) -> bool | str:
            found = parameters.get(parameter)
            if found is None and parameter in order:
                # an array called something else, but it stands where the contract has it
                found = next(iter(positional[order.index(parameter) :]), None)
                if found is not None and found.name in names:
                    found = None
            if found is None:
                return parameter in any_option
            required = found.default is found.empty and not function.endswith("_backward")
            return "always" if required else True

        return offers

    def missing_features(self, spec: Op) -> list[str]:
        """Return the optional parameters that this module's functions lack."""
        lacking = []
        for function in spec.names:
            if self.has(function):
                offers = self.parameter_offers(function)
                lacking += [
                    p.name
                    for p in contract_parameters(function)
                    if p.default is not p.empty
                    and p.name not in room(spec.name).UNMISSED
                    and not offers(p.name)
                ]
        return lacking

    def untried(self, specs: Iterable[Op], *, among: Iterable[str] | None = None) -> list[str]:
        """Return what the module offers and no check of these ops tries, a sentence each.

        That is a forward without its backward, an option that the contract has not, and a function
        that is named nearly like one of the contract's (when given, of the ops ``among``).
        """
        said = []
        for spec in specs:
            if spec.backward and not self.alone:
                here, lacking = spec.names if self.has(spec.forward_name) else spec.names[::-1]
                if not self.has(lacking):
                    what = "no gradient" if lacking == spec.backward_name else "no value"
                    said.append(f"{here} has no {lacking} beside it: {what} was checked")
            for function in filter(self.has, spec.names):
                extra = self._extra_parameters(function)
                if extra:
                    said.append(
                        f"{function} takes {', '.join(f'{name}=' for name in extra)}, which the "
                        "contract has not"
                    )
        return said + [
            f"{name} is no function of the contract; {near} is"
            for name, near in self._resembling().items()
            if among is None or any(near in OPS[op].names for op in among)
        ]

    def _extra_parameters(self, function: str) -> list[str]:
        """Return the parameters of a function that no call by the contract gives."""
        parameters = self.signature(function)
        if parameters is None or not hasattr(reference, function):
            return []
        own = contract_parameters(function)
        names, count = {p.name for p in own}, len(positional_of(own))
        positional = positional_of(parameters.values())
        beyond = {p.name for p in positional[count:]}
        return [
            p.name
            for p in parameters.values()
            if p.name not in names
            and p.default is not p.empty
            and (p.kind is p.KEYWORD_ONLY or p.name in beyond)
        ]

    def _resembling(self) -> dict[str, str]:
        """Return the module's own functions named nearly like the contract's, with those names.

        What is imported, begins with an underscore, or lengthens the name of a function that is
        taken (``softmax_kernel``) is a helper.
        """
        known = {name.replace("_", ""): name for spec in OPS.values() for name in spec.names}
        taken = [name for spec in OPS.values() for name in spec.names if self.has(name)]
        # a backward that an op of the contract does not have
        known |= {
            f"{spec.name}_{end}".replace("_", ""): spec.forward_name
            for spec in OPS.values()
            if not spec.backward
            for end in ("forward", "backward")
        }
        home = (
            getattr(self.module, "__name__", None) if isinstance(self.module, ModuleType) else None
        )
        found = {}
        for name in dir(self.module):
            value = getattr(self.module, name, None)
            if name.startswith("_") or name in SERVICES or not callable(value):
                continue
            if inspect.isclass(value) or name in taken:
                continue
            made = getattr(value, "__module__", None)  # a C function has that of its type
            if home is not None and made not in (home, type(value).__module__):
                continue
            plainly = name.replace("_", "").lower()
            near = difflib.get_close_matches(plainly, known, n=1, cutoff=RESEMBLES)
            if near and (near[0] == plainly or not name.startswith(tuple(taken))):
                found[name] = known[near[0]]
        return found

    # ---- cases -------------------------------------------------------------------------------

    def applies(self, spec: Op, dtype: str) -> bool:
        """Say whether an op has cases of its own in a precision."""
        return applies(spec, dtype)

    def hard(self, spec: Op) -> tuple[Mapping[str, Any], ...]:
        """Return what the first cases of an op have to be."""
        return room(spec.name).HARD

    def draw(self, spec: Op, dtype: str, pick: Pick) -> Case:
        """Draw a case that this subject can be asked."""
        return draw_case(
            spec,
            Draw(pick, dtype, self.parameter_offers(spec.forward_name)),
            has_backward=self.has_backward(spec),
            backward_offers=self.parameter_offers(spec.backward_name),
        )

    def takes(self, case: Case) -> bool:
        """Say whether a case that was made simpler is one that may be drawn."""
        return storable(case)

    def run(self, case: Case) -> "list[Judged]":
        """Run a case and judge every result."""
        from accel.verify.trial import run_case  # which needs this module

        return run_case(self, case)

    def cuts(self, case: Case) -> Iterator[Case]:
        """Yield smaller cases, the boldest cuts first."""
        return cuts(case)

    def plain(self, case: Case) -> Mapping[str, Array]:
        """Return what plain code gives in the precision of a case."""
        return expected(case).plain

    @property
    def mistakes(self) -> "Guesses | None":
        """Return the mistakes that people make, if any are known."""
        from accel.verify.guesses import in_words  # which needs this module

        return in_words

    def hints(self, case: Case, judged: "Judged", evidence: "Evidence | None" = None) -> list[str]:
        """Return what may be wrong; the evidence is what other cases say."""
        from accel.verify.hints import hints_for  # which needs this module

        return hints_for(self, case, judged, evidence)

    # ---- arrays ------------------------------------------------------------------------------

    def from_numpy(self, array: Array, *, activation: bool = False) -> Any:
        """Give an array to the module."""
        if self._from is not None:
            extra = {"activation": activation} if self._activation else {}
            return self.call("from_numpy", self._from, array, **extra)
        if not self.native:
            return self.call("from_dlpack", self.module.from_dlpack, array)
        return array

    def to_numpy(self, value: Any) -> Array:
        """Take a result from the module."""
        # a backend on the CPU may keep bf16 in NumPy arrays of uint16, which only it can read
        known = isinstance(value, (np.ndarray, np.generic, int, float))
        bits = isinstance(value, np.ndarray) and value.dtype == np.uint16
        if bits and self._to is None:
            raise KernelError(
                "a result is uint16: if those are the bits of bf16, give the module a to_numpy "
                "that makes float32 of them"
            )
        if self._to is not None and (bits or not known):
            value = self.call("to_numpy", self._to, value)
        if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray):
            try:
                return np.from_dlpack(value)
            except (BufferError, RuntimeError, TypeError, ValueError):
                pass  # on a device, or needing gradients: __array__ may know a way
        try:
            array = np.asarray(value)
        except Exception as error:
            raise KernelError(
                f"a result of type {type(value).__name__} cannot become a NumPy array "
                f"({first_line(error)}); give the module a function to_numpy"
            ) from None
        if array.dtype.kind not in "fiub":
            raise KernelError(
                f"a result of type {type(value).__name__} is no array of numbers; "
                "give the module a function to_numpy"
            )
        return array

    def place(self, array: Array, layout: str, *, activation: bool) -> Placed:
        """Lay an array out as asked, with poison wherever the kernel has no business."""
        array = np.asarray(array)
        if layout == "reversed" and not self.native:
            layout = "strided"  # only NumPy has negative strides
        poison: Any = {"f": np.nan, "b": True}.get(array.dtype.kind, 0)
        if layout == "plain" and array.size and array.ndim:
            return self.guarded(array, GUARD_BYTES // array.itemsize, poison, activation=activation)
        base, taken = laid(array, layout, poison)
        given = self.from_numpy(base, activation=activation)
        before = self.to_numpy(given).copy()
        around = np.ones(base.shape, np.bool_)
        taken(around)[...] = False
        try:
            return Placed(taken(given), given, before, around)
        except (AttributeError, IndexError, TypeError, ValueError):
            return self._plain_instead(array, activation)

    def guarded(self, array: Array, guard: int, poison: Any, *, activation: bool = False) -> Placed:
        """Lay an array out without gaps, with so many of ``poison`` before and behind it."""
        inside = slice(guard, guard + array.size)
        base = np.full(array.size + 2 * guard, poison, array.dtype)
        base[inside] = array.reshape(-1)
        around = np.ones(base.shape, np.bool_)
        around[inside] = False
        given = self.from_numpy(base, activation=activation)
        before = self.to_numpy(given).copy()
        try:
            return Placed(given[inside].reshape(array.shape), given, before, around)
        except (AttributeError, IndexError, TypeError, ValueError):
            return self._plain_instead(array, activation)

    def _plain_instead(self, array: Array, activation: bool) -> Placed:
        self.notes.add("its arrays cannot be sliced, so none but contiguous inputs were tried")
        given = self.from_numpy(array.copy(), activation=activation)
        return Placed(given, given, self.to_numpy(given).copy())

    def fill(self, view: Any, array: Array, *, activation: bool) -> bool:
        """Put other numbers into an array that was placed; say whether that can be done."""
        try:
            view[...] = self.from_numpy(array, activation=activation)
        except (KernelError, RuntimeError, TypeError, ValueError):
            return False  # arrays that never change, as JAX's
        there = self.to_numpy(self.from_numpy(array, activation=activation))
        return np.array_equal(self.to_numpy(view), there, equal_nan=there.dtype.kind == "f")

    # ---- calls -------------------------------------------------------------------------------

    def step(self) -> AbstractContextManager[None]:
        """Return a backend's scope of reused memory; no other module's ``step`` is one."""
        backend = all(self.has(name) for name in SERVICES)
        return self.module.step() if backend else nullcontext()

    def call(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call into the module; whatever goes wrong is one line."""
        if what not in ("from_numpy", "from_dlpack", "to_numpy"):
            self.watch("calling", what)
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                return function(*args, **kwargs)
        except self.caught as error:
            raise KernelError(
                f"{what} raised {type(error).__name__}: {first_line(error)}"
                f"{line_of(error, self._file)}"
            ) from error


def _signature(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a function; None when it has no Python signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def positional_of(parameters: Iterable[inspect.Parameter]) -> list[inspect.Parameter]:
    """Return the parameters that may be given by position."""
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def line_of(error: BaseException, path: str) -> str:
    """Return where in a file an error came from, as `` (FILE.py:LINE)``; "" if not in it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    return f" ({Path(path).name}:{frames[-1].lineno})" if frames else ""


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or as much as a line may hold.

    Numba's first one names the stage of compiling, and the one after it what is wrong.
    """
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return lines[len(lines) > 1 and lines[0].startswith("Failed in nopython mode")][:200]
