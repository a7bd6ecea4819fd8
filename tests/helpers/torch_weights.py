"""Our parameters in a PyTorch module's, and its gradients back in ours."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest

from reference.types import Array

torch = pytest.importorskip("torch", reason="needs the optional extra: pip install -e '.[peers]'")

ALL = slice(None)


class Slot(NamedTuple):
    """Where one parameter of ours, (in, out) or (out,), lies in a PyTorch module."""

    parts: list[tuple[Any, Any]]  # (parameter, which of its rows); joined on the output axis
    transposed: bool  # nn.Linear keeps (out, in)


def linear_weight(*modules: Any) -> Slot:
    """Return the slot of one weight of ours that is several ``nn.Linear``, side by side."""
    return Slot([(module.weight, ALL) for module in modules], transposed=True)


def linear_bias(*modules: Any) -> Slot:
    """Return the slot of the bias of several ``nn.Linear``, side by side."""
    return Slot([(module.bias, ALL) for module in modules], transposed=False)


def plain(parameter: Any) -> Slot:
    """Return the slot of a parameter that both sides keep alike: a table, a gain, a bias."""
    return Slot([(parameter, ALL)], transposed=False)


def copy_in(slots: Mapping[str, Slot], params: Mapping[str, Array]) -> None:
    """Copy every parameter of ours into its slot."""
    assert slots.keys() == params.keys()
    with torch.no_grad():
        for name, (parts, transposed) in slots.items():
            ours = torch.from_numpy(params[name].T if transposed else params[name])
            axis = 0 if transposed else -1
            sizes = [parameter[rows].shape[axis] for parameter, rows in parts]
            for (parameter, rows), piece in zip(parts, ours.split(sizes, dim=axis), strict=True):
                parameter[rows] = piece.to(parameter.dtype)


def gradients(slots: Mapping[str, Slot]) -> dict[str, Array]:
    """Return the gradients that autograd left, under our names and in our layout."""
    grads = {}
    for name, (parts, transposed) in slots.items():
        pieces = [parameter.grad[rows].numpy() for parameter, rows in parts]
        grads[name] = np.concatenate([p.T if transposed else p for p in pieces], axis=-1)
    return grads
