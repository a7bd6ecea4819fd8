"""The gradient of a micro-batch, recorded (``recorded.py``): ``reference/model.py``'s ``gradient``.

Ids, targets, mask and documents are copied to addresses of their own; the losses, and whether all
ids exist, are read when the backward is over. What is recorded lies in the device's own arena, as
all else of a training step.

Asked for one by one, as before, are the launches of a pass with dropout, whose key is among their
arguments, of one that has to say which layer is finished, and of one within another step.
"""

import functools
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

from accel.cuda.arrays import copy
from accel.cuda.device import Device, current
from accel.cuda.embedding import check, verdict
from accel.cuda.loss import total
from accel.cuda.recorded import Recorded, RecordedOps
from reference import model
from reference.blocks import Recompute
from reference.config import Config
from reference.ops import Ops
from reference.types import Array, DropoutKey, Grads, Loss

KINDS = 16  # of micro-batches whose launches are kept: a trainer has a few buffers for gradients

Results = tuple[Array, Array, Array]  # losses, and what was found out about ids and targets


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

    Parameters
    ----------
    ops : module
        This backend in float32 or in bf16.
    """
    device, batch = current(), (ids, targets, mask, documents)
    one_by_one = dropout_key is not None or finished is not None or not ids.size
    if one_by_one or device.arena.open:
        return model.gradient(
            *(ops, params, config, *batch, grads),
            dropout_key=dropout_key,
            recompute=recompute,
            finished=finished,
        )
    address = device.address
    given = (
        *((name, address(x)) for name, x in params.items()),
        *((name, address(x)) for name, x in grads.items()),
        *(None if x is None else (x.shape, x.dtype) for x in batch),
        *(params["embedding.weight"].dtype, ops),
    )
    return _micro_batch(device, config, recompute, given)(ops, params, batch, grads)


@functools.lru_cache(maxsize=KINDS)
def _micro_batch(
    device: Device, config: Config, recompute: Recompute, given: Hashable
) -> "MicroBatch":
    del given
    return MicroBatch(device, config, recompute)


class MicroBatch:
    """What computes the gradients of micro-batches of one kind.

    Parameters
    ----------
    device : Device
    config : Config
    recompute : str
    """

    def __init__(self, device: Device, config: Config, recompute: Recompute) -> None:
        self._device, self._config, self._recompute = device, config, recompute
        self._recorded = Recorded(device, device.arena)
        self._inputs: tuple[Any, ...] = ()  # as ``batch``, where they lie each time

    def __call__(
        self, ops: Ops, params: Mapping[str, Array], batch: tuple[Any, ...], grads: Grads
    ) -> Loss:
        """Write the gradient of the summed loss into ``grads``; return the loss.

        Parameters
        ----------
        batch : (ids, targets, mask, documents)
        """
        if not self._inputs:
            empty = self._device.empty
            self._inputs = tuple(None if x is None else empty(x.shape, x.dtype) for x in batch)
        for own, x in zip(self._inputs, batch, strict=True):
            if x is not None:
                copy(own, x)
        V = self._config.vocab_size

        def read(results: Results) -> Loss:
            losses, of_ids, of_targets = results
            verdict("embedding", "ids", batch[0], of_ids, V, "table")
            n_valid = verdict("linear_cross_entropy", "targets", batch[1], of_targets, V)
            return Loss(total(losses), n_valid)

        return self._recorded(partial(self._run, ops, params, grads), read)

    def _run(self, ops: Ops, params: Mapping[str, Array], grads: Grads) -> Results:
        config, (ids, targets, mask, documents) = self._config, self._inputs
        found = check(ids, None, config.vocab_size), check(targets, mask, config.vocab_size)
        here = RecordedOps(ops, self._recorded, config.context_length)
        _, cache = model.loss_forward(
            here, params, config, ids, targets, mask, documents, recompute=self._recompute
        )
        model.loss_backward(1.0, cache, grads)
        return here.losses, *found
