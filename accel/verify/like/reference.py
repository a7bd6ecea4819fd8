"""A reference of one's own: a function or module, what it takes, and what it gives."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from accel.verify.draw import Draw
from accel.verify.like.bound import Results
from accel.verify.like.case import LikeCase, OwnOp
from accel.verify.like.declared import HARD, Declared, Sizes
from accel.verify.like.frameworks import Framework, Function, NoGradient, NumPy, Torch, named_parts
from accel.verify.like.slopes import slopes
from reference.contract import Op, Operand
from reference.types import Array

STATE = "params."  # begins the names of a module's weights


class Refused(ValueError):
    """The reference raised."""

    @classmethod
    def by(cls, error: Exception) -> "Refused":
        """Return what says which error it raised."""
        says = (str(error).strip().splitlines() or [""])[0][:200]
        return cls(f"the reference raised {type(error).__name__}: {says}")


def cotangents_of(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the cotangents among the arrays of a case: ``dout``, ``dout[1]`` → out, out[1]."""
    return {name[1:]: a for name, a in arrays.items() if name.startswith("dout")}


@dataclasses.dataclass
class Reference:
    """One function of the reference file."""

    name: str
    function: Any  # a function, or the class or instance of a module
    framework: Framework
    declared: Declared
    # makes a module of what it is made with; None where the function is one
    make: Callable[[tuple[Any, ...]], Any] | None = None
    remedy: str = "do the shapes that are declared hold?"  # where it refuses what was drawn

    def __post_init__(self) -> None:
        self._made: dict[str, Any] = {}
        parameters = parameters_of(self.function) or {}
        self._by_name = {n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
        self.untaken: str | None = None  # why no gradient can be taken, "" where autograd has one

    @property
    def spec(self) -> Op:
        """The function as the report and the search know ops."""
        kinds: dict[str, Any] = {"float": "activation", "int": "ids", "bool": "mask"}
        return OwnOp(
            self.name,
            "",
            tuple(
                Operand(name, "", kinds[array.kind]) for name, array in self.declared.arrays.items()
            ),
        )

    # ---- cases -------------------------------------------------------------------------------

    def draw(self, draw: Draw, sizes: Sizes) -> tuple[dict[str, Array], dict[str, Any]]:
        """Draw arrays and options."""
        # one at a time is extreme: a product of two that are is beyond what anybody computes with
        extreme = draw.pick(list(self.declared.arrays), "extreme")
        arrays = {
            name: a.values(draw, sizes, calm=name != extreme, name=f"kind of {name}")
            for name, a in self.declared.arrays.items()
        }
        return arrays, {name: draw.pick(all) for name, all in self.declared.options.items()}

    def hard(self) -> tuple[dict[str, Any], ...]:
        """Return what the first cases have to be."""
        return tuple(
            {"extreme": name, f"drawn {name}": True, f"kind of {name}": kind, "offset": 1000}
            for kind in HARD
            for name, a in self.declared.arrays.items()
            if a.kind == "float"
        )

    def init(self, sizes: Sizes) -> tuple[Any, ...]:
        """Return what a module is made with."""
        return tuple(self.declared.words(given, sizes) for given in self.declared.init)

    def resolved(self, case: LikeCase) -> dict[str, Any]:
        """Return the options of a case with sizes for letters."""
        return {n: self.declared.words(given, case.sizes) for n, given in case.options.items()}

    # ---- calling -----------------------------------------------------------------------------

    def module(self, init: tuple[Any, ...]) -> Any:
        """Return the module that is made with these arguments, always the same one.

        Raises
        ------
        Refused
            When it cannot be made with them.
        """
        assert self.make is not None
        key = repr(init)
        if key not in self._made:
            if len(self._made) > 50:
                self._made.clear()
            try:
                self._made[key] = self.make(init)
            except Exception as error:  # whatever a file's own code makes of them
                raise Refused.by(error) from error
        return self._made[key]

    def state(self, init: tuple[Any, ...]) -> dict[str, Array]:
        """Return the weights of a module by the names they have in a case."""
        if self.make is None:
            return {}
        state = self.module(init).state_dict()
        return {
            f"{STATE}{name}": self.framework.take(tensor).copy()
            for name, tensor in state.items()
            if tensor.is_floating_point()
        }

    def function_of(self, options: Mapping[str, Any], init: tuple[Any, ...]) -> Function:
        """Return the reference as a function of arrays by name."""
        if self.make is None:
            return lambda given: self.call(self.function, given, options)
        assert isinstance(self.framework, Torch)
        torch, module = self.framework.torch, self.module(init)

        def run(given: Mapping[str, Any]) -> Any:
            state = {n.removeprefix(STATE): a for n, a in given.items() if n.startswith(STATE)}
            args, kwargs = self.arguments(given, options)
            torch.manual_seed(0)
            return torch.func.functional_call(module, state, tuple(args), kwargs)

        return run

    def call(self, function: Any, given: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        """Call a function with the reference's arguments, by position where it has positions."""
        args, kwargs = self.arguments(given, options)
        if isinstance(self.framework, Torch):
            self.framework.torch.manual_seed(0)
        return function(*args, **kwargs)

    def arguments(
        self, given: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return what a call is made with."""
        everything = {**given, **options}
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name in self.declared.order:
            if name in everything:
                if name in self._by_name or kwargs:
                    kwargs[name] = everything[name]
                else:
                    args.append(everything[name])
        return args, kwargs

    # ---- results -----------------------------------------------------------------------------

    def wanted(self, arrays: Mapping[str, Array]) -> list[str]:
        """Return the arrays that gradients are owed of."""
        kept = self.buffers
        return [
            name
            for name, a in arrays.items()
            if a.dtype.kind == "f" and not name.startswith("dout") and name not in kept
        ]

    @property
    def buffers(self) -> set[str]:
        """The arrays that a module keeps for itself, such as running means, which it may change."""
        if self.make is None or not self._made:
            return set()
        return {f"{STATE}{name}" for name, _ in next(iter(self._made.values())).named_buffers()}

    def results(
        self,
        arrays: Mapping[str, Array],
        options: Mapping[str, Any],
        init: tuple[Any, ...],
        dtype: str,
    ) -> tuple[Results, dict[str, str]]:
        """Return all results by name, floats in float64, and the precisions of the outputs.

        Gradients are there where cotangents are among the arrays and the framework has them.
        """
        function = self.function_of(options, init)
        inputs = {name: a for name, a in arrays.items() if not name.startswith("dout")}
        cotangents = cotangents_of(arrays)
        found: dict[str, Any] = {}
        try:
            with np.errstate(all="ignore"):
                if cotangents and not isinstance(self.framework, NumPy) and not self.untaken:
                    wanted = self.wanted(inputs)
                    out, found = self.framework.gradients(
                        function, inputs, dtype, wanted, cotangents
                    )
                    found = {f"d{name}": gradient for name, gradient in found.items()}
                    self.untaken = ""
                else:
                    out = self.framework.evaluate(function, inputs, dtype)
        except NoGradient as error:
            self.untaken = str(error)
            return self.results(arrays, options, init, dtype)
        except Exception as error:
            raise Refused.by(error) from error
        parts = named_parts(out)
        types = {name: self.framework.dtype_of(part) for name, part in parts.items()}
        return {name: self._taken(part) for name, part in {**parts, **found}.items()}, types

    def try_gradient(
        self,
        arrays: Mapping[str, Array],
        options: Mapping[str, Any],
        init: tuple[Any, ...],
        results: Results,
    ) -> None:
        """See whether autograd has a gradient of these results, if nobody has asked for one."""
        douts = {f"d{n}": np.ones_like(r) for n, r in results.items() if r.dtype.kind == "f"}
        if self.untaken is None and douts:
            self.results({**arrays, **douts}, options, init, "float64")

    def _taken(self, value: Any) -> Array:
        array = np.array(self.framework.take(value))
        return array.astype(np.float64) if array.dtype.kind == "f" else array

    def beside(
        self, case: LikeCase, arrays: Mapping[str, Array], dtype: str
    ) -> tuple[Results, dict[str, str]]:
        """Return ``results`` of a case with its arrays, or with others that are near them.

        Where it refuses what lies beyond a range that is declared, what does is as in the case.
        """
        options, init = self.resolved(case), self.init(case.sizes)
        try:
            return self.results(arrays, options, init, dtype)
        except Refused:
            kept = self.declared.brought_back(arrays, case.arrays, case.sizes, dtype)
            return self.results(kept, options, init, dtype)

    def evaluator(self, case: LikeCase) -> Callable[[Mapping[str, Array], str], Results]:
        """Return what evaluates the reference beside a case."""
        return lambda arrays, dtype: self.beside(case, arrays, dtype)[0]

    def slopes(self, case: LikeCase, arrays: Mapping[str, Array], rng: np.random.Generator) -> Any:
        """Return gradients beside a case, by differences, where there is no autograd."""
        run = self.evaluator(case)
        inputs = {name: a for name, a in arrays.items() if not name.startswith("dout")}
        return slopes(
            lambda given: run(given, "float64"),
            inputs,
            self.wanted(inputs),
            cotangents_of(arrays),
            rng,
        )


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a function or of a module's forward; None where nobody says."""
    if inspect.isclass(function) or hasattr(function, "forward"):
        try:
            found = dict(inspect.signature(function.forward).parameters)
        except (TypeError, ValueError):
            return None
        return {name: p for name, p in found.items() if name != "self"}
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
