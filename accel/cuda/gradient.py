"""The gradient of a micro-batch, recorded (``recorded.py``): ``reference/model.py``'s ``gradient``.

Ids, targets, mask and documents are copied to addresses of their own; the losses, and whether all
ids exist, are read when the backward is over. What is recorded lies in the device's own arena, as
all else of a training step.

Asked for one by one, as before, are the launches of a pass with dropout, whose key is among their
arguments, of one that has to say which layer is finished, and of one within another step.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from accel.cuda.device import Device
from accel.cuda.embedding import check, verdict
from accel.cuda.loss import total
from accel.cuda.recorded import Inputs, Recorded, RecordedOps, Results, kept
from reference import model
from reference.blocks import Recompute
from reference.checks import check_array, check_params, check_shape
from reference.config import Config
from reference.ops import Ops
from reference.params import decoder_layout
from reference.types import Array, DropoutKey, Grads, Loss


def gradient(
    ops: Ops,
    params: Mapping[str, Array],
    config: Config,
    ids: Array,
    targets: Array,
    mask: Array | None,
    documents: Array | None,
    grads: Grads,
    *,
    dropout_key: DropoutKey | None = None,
    recompute: Recompute = "auto",
    finished: Callable[[int], None] | None = None,
) -> Loss:
    """Write the gradient of the summed loss into ``grads``; return the loss.

    Where an id does not exist ``grads`` are written before that is said.

    Parameters
    ----------
    ops : module
        This backend in float32 or in bf16.
    """
    batch = ids, targets, mask, documents
    if dropout_key is not None or finished is not None or not ids.size:
        return model.gradient(
            *(ops, params, config, *batch, grads),
            dropout_key=dropout_key,
            recompute=recompute,
            finished=finished,
        )

    def make(device: Device) -> MicroBatch:
        _check(params, config, batch, grads)
        return MicroBatch(device, config, batch, recompute)

    like = (None if x is None else (x.shape, x.dtype) for x in batch)
    what = "gradient", ops, config, recompute, *params, *grads, *like
    return kept(make, what, params.values(), grads.values())(ops, params, batch, grads)


def _check(
    params: Mapping[str, Array], config: Config, batch: tuple[Any, ...], grads: Grads
) -> None:
    """Raise unless what a recorded pass does not look at again is as it should be."""
    layout = decoder_layout(config)
    check_params("gradient", params, layout)
    check_params("gradient", grads, layout, "the gradients")
    kinds = {"ids": np.int32, "targets": np.int32, "mask": np.bool_, "documents": np.int32}
    for (name, kind), x in zip(kinds.items(), batch, strict=True):
        if x is None and name in ("mask", "documents"):
            continue
        check_array("gradient", name, x)
        check_shape("gradient", name, x, batch[0].shape, "ids")
        if x.dtype != kind:
            raise ValueError(f"gradient: {name} must be {np.dtype(kind)}, got {x.dtype}")


class MicroBatch:
    """What computes the gradients of micro-batches of one kind.

    Parameters
    ----------
    device : Device
    config : Config
    batch : (ids, targets, mask, documents)
        Like those that will come.
    recompute : str
    """

    def __init__(
        self,
        device: Device,
        config: Config,
        batch: tuple[Array | None, ...],
        recompute: Recompute,
    ) -> None:
        self._config, self._recompute = config, recompute
        self._recorded = Recorded(device)
        self._inputs = Inputs(device, batch)

    def __call__(
        self, ops: Ops, params: Mapping[str, Array], batch: tuple[Any, ...], grads: Grads
    ) -> Loss:
        """Write the gradient of the summed loss into ``grads``; return the loss."""
        self._inputs.take(batch)
        V = self._config.vocab_size

        def read(results: Results) -> Loss:
            losses, of_ids, of_targets = results
            verdict("embedding", "ids", batch[0], of_ids, V, "table")
            n_valid = verdict("linear_cross_entropy", "targets", batch[1], of_targets, V)
            return Loss(total(losses), n_valid)

        return self._recorded(partial(self._run, ops, params, grads), read)

    def _run(self, ops: Ops, params: Mapping[str, Array], grads: Grads) -> Results:
        config, (ids, targets, mask, documents) = self._config, self._inputs.arrays
        found = check(ids, None, config.vocab_size), check(targets, mask, config.vocab_size)
        here = RecordedOps(ops, self._recorded, config.context_length)
        _, cache = model.loss_forward(
            here, params, config, ids, targets, mask, documents, recompute=self._recompute
        )
        model.loss_backward(1.0, cache, grads)
        return here.losses, *found
