"""KernelBench's form, as it is: ``Model``, ``get_inputs`` and ``get_init_inputs``; ``ModelNew``.

    myllm verify --like problem.py --module solution.py

(Ouyang et al. 2025, "KernelBench: Can LLMs write efficient GPU kernels?"). The sizes of a problem
are its module's integers that ``get_inputs`` and ``get_init_inputs`` read; where there are none,
the axes of the inputs and the integers that a model is made with, found as in ``found.py``. They
are tried on PyTorch's meta device, where the largest costs nothing, and made small. Inputs come
from ``get_inputs`` itself, and as numbers that hurt beside: a ReLU is not tried by numbers of one
sign. ``ModelNew`` gets the weights of ``Model``, or, where its parameters have other names, is made
after the same seed.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from accel.verify.draw import MAX_ELEMENTS, Draw
from accel.verify.like.declared import (
    ArrayOf,
    DeclarationError,
    Declared,
    Sizes,
    floats,
    refuse_cotangents,
)
from accel.verify.like.found import arguments_of, reduced, sizes_taken, together
from accel.verify.like.frameworks import Torch, named_parts
from accel.verify.like.reference import Reference, Refused
from accel.verify.like.run import Pair
from accel.verify.subject import SubjectError
from reference.types import Array

NAMES = ("Model", "get_inputs", "get_init_inputs")


def is_problem(module: ModuleType) -> bool:
    """Say whether a file has KernelBench's form."""
    return all(callable(getattr(module, name, None)) for name in NAMES)


class Problem(Reference):
    """A problem: the reference whose inputs the file makes itself."""

    def draw(self, draw: Draw, sizes: Sizes) -> tuple[dict[str, Array], dict[str, Any]]:
        self.framework.torch.manual_seed(draw.pick(range(1000)))  # type: ignore[attr-defined]
        given = self.given(sizes)
        arrays, options = {}, {}
        extreme = draw.pick(list(self.declared.arrays), "extreme")
        for name, value in given.items():
            if name not in self.declared.arrays:
                options[name] = value
                continue
            arrays[name] = np.array(self.framework.take(value))
            spec = self.declared.arrays[name]
            if spec.kind == "float" and draw.pick((True, True, False), f"drawn {name}"):
                calm, kind = name != extreme, f"kind of {name}"
                x = floats(draw, arrays[name].shape, calm=calm, name=kind)
                arrays[name] = np.abs(x) if spec.bounds else x
        return arrays, options

    given: Callable[[Sizes], dict[str, Any]]
    init: Callable[[Sizes], tuple[Any, ...]]  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class Constants(Declared):
    """Sizes that are no axes: the file makes inputs of them."""

    accepts: Callable[[Sizes], bool] = lambda sizes: True

    @property
    def letters(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.known)

    def fits(self, sizes: Sizes) -> bool:
        """Say whether the model takes sizes; those that are left may be the small ones."""
        known = all(sizes.get(name, n[0]) in n for name, n in self.known)
        return known and self.accepts(self.small | sizes)


def pair(problem: ModuleType, solution: ModuleType, like: str, module: str) -> Pair:
    """Return a problem and its solution.

    Raises
    ------
    SubjectError
        When there is no ``ModelNew``, or the problem's sizes cannot be made small.
    """
    if not callable(getattr(solution, "ModelNew", None)):
        raise SubjectError(
            f"{module} has no ModelNew, which {like}, a KernelBench problem, asks for"
        )
    framework = Torch()
    torch = framework.torch
    with torch.device("meta"):
        example = arguments_of(problem.Model, problem.get_inputs())
        init = _listed(problem.get_init_inputs())
    arrays = {name: value for name, value in example.items() if isinstance(value, torch.Tensor)}
    try:
        refuse_cotangents(arrays)
    except DeclarationError as error:
        raise SubjectError(f"{like}: {error}") from None
    read = {n for f in (problem.get_inputs, problem.get_init_inputs) for n in f.__code__.co_names}
    base: dict[str, int] = {
        n: v for n, v in vars(problem).items() if n in read and type(v) is int and v > 1
    }
    if base:

        def made(sizes: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Any, ...]]:
            before = {name: getattr(problem, name) for name in base}
            vars(problem).update({name: sizes[name] for name in base})
            try:
                inputs = arguments_of(problem.Model, problem.get_inputs())
                return inputs, _listed(problem.get_init_inputs())
            finally:
                vars(problem).update(before)
    else:
        axes: dict[Any, int] = {
            (name, axis): n
            for name, value in arrays.items()
            for axis, n in enumerate(value.shape)
            if n > 1
        }
        axes |= {("", at): n for at, n in enumerate(init) if type(n) is int and n > 1}
        dtypes = {name: value.dtype for name, value in arrays.items()}

        def of_axes(sizes: Mapping[Any, int]) -> tuple[dict[str, Any], tuple[Any, ...]]:
            inputs = dict(example)
            for name, value in arrays.items():
                shape = [sizes.get((name, axis), n) for axis, n in enumerate(value.shape)]
                kind = dtypes[name]
                inputs[name] = (
                    torch.rand(shape, dtype=kind)
                    if kind.is_floating_point
                    else torch.zeros(shape, dtype=kind)
                )
            return inputs, tuple(sizes.get(("", at), n) for at, n in enumerate(init))

        def runs(sizes: Mapping[Any, int]) -> bool:
            return _runs(torch, problem.Model, *_meta(torch, of_axes, sizes))

        groups = _tied(axes, together(axes, runs), runs)
        named = {f"n{i}": group for i, group in enumerate(groups)}
        base = {name: axes[group[0]] for name, group in named.items()}

        def made(sizes: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Any, ...]]:
            return of_axes({key: sizes[name] for name, group in named.items() for key in group})

    remedy = f"give {like} SHAPES for Model, and the command --function Model=ModelNew"
    tried: dict[tuple[Any, ...], bool] = {}

    def accepts(sizes: Mapping[str, int], *, small: bool = True) -> bool:
        key = (*sorted(sizes.items()), small)
        if key not in tried:
            try:
                runs = _runs(torch, problem.Model, *_meta(torch, made, sizes), small=small)
            except Exception:  # whatever a file's own code makes of sizes that it cannot have
                runs = False
            tried[key] = runs
        return tried[key]

    small = reduced(base, partial(accepts, small=False), accepts)
    if not accepts(small):
        raise SubjectError(
            f"{like}: its sizes cannot be made small enough ({small} is still too large, or Model "
            f"does not run on PyTorch's meta device); {remedy}"
        )
    known = sizes_taken(small, accepts)
    kinds = {
        name: "float" if a.is_floating_point() else "bool" if a.dtype == torch.bool else "int"
        for name, a in arrays.items()
    }
    declared = Constants(
        {name: ArrayOf((), kind) for name, kind in kinds.items()},
        {},
        tuple(example),
        known=known,
        small=small,
        accepts=accepts,
    )

    def make(given: tuple[Any, ...]) -> Any:
        torch.manual_seed(0)
        return problem.Model(*given)

    reference = Problem("Model", problem.Model, framework, declared, make, remedy)
    reference.given = lambda sizes: made(sizes)[0]
    reference.init = lambda sizes: made(sizes)[1]
    try:
        _keep_positive(reference, small)
    except Refused as error:
        raise SubjectError(f"{like}: {error} with {small}; {remedy}") from None
    return Pair(reference, solution.ModelNew, framework)


def _tied(
    axes: Mapping[Any, int], groups: list[list[Any]], runs: Callable[[Mapping[Any, int]], bool]
) -> list[list[Any]]:
    """Return groups in which what a model is made with goes with the axes of the same size.

    The model may not look at a size that it is given, and a right solution may.
    """
    for n in {axes[key] for key in axes if key[0] == ""}:
        alike = [group for group in groups if axes[group[0]] == n]
        free = [group for group in alike if all(key[0] == "" for key in group)]
        if not free or len(free) == len(alike):
            continue
        one = [key for group in alike for key in group]
        groups = [group for group in groups if group not in alike]
        if any(runs({**axes, **dict.fromkeys(one, m)}) for m in (n + 1, 2 * n, n + 2)):
            groups.append(one)
    return groups


def _listed(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


def _meta(
    torch: Any, made: Any, sizes: Mapping[Any, int]
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    with torch.device("meta"):
        found: tuple[dict[str, Any], tuple[Any, ...]] = made(sizes)
    return found


def _runs(
    torch: Any, model: Any, inputs: dict[str, Any], init: tuple[Any, ...], *, small: bool = False
) -> bool:
    """Say whether a model takes these inputs, on the meta device."""
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    if small and max([t.numel() for t in tensors], default=0) > MAX_ELEMENTS:
        return False
    try:
        with torch.device("meta"), torch.no_grad():
            module = model(*init)
            parts = named_parts(module(*inputs.values()))
    except Exception:  # PyTorch refuses in many ways
        return False
    weights = sum(p.numel() for p in module.parameters())
    sizes = [getattr(part, "shape", ()) for part in parts.values()]
    if small and max([weights, *(int(np.prod(s)) for s in sizes)]) > MAX_ELEMENTS:
        return False
    return all(0 not in shape for shape in sizes)


def _keep_positive(reference: Problem, small: Mapping[str, int]) -> None:
    """Leave inputs positive where numbers of both signs give no number."""
    inputs, init = reference.given(dict(small)), reference.init(dict(small))
    options = {n: v for n, v in inputs.items() if n not in reference.declared.arrays}
    arrays = {n: np.array(reference.framework.take(inputs[n])) for n in reference.declared.arrays}
    state = reference.state(init)
    for name, a in arrays.items():
        if a.dtype.kind != "f" or not a.size or a.min() < 0:
            continue
        signs = np.where(np.arange(a.size).reshape(a.shape) % 2, 1, -1)
        signed = {**arrays, **state, name: (a * signs).astype(a.dtype)}
        results, _ = reference.results(signed, options, init, "float64")
        if not all(np.isfinite(r).all() for r in results.values() if r.dtype.kind == "f"):
            reference.declared.arrays[name] = ArrayOf((), "float", ((">=", "0"),))
