"""The few types that every op and every backend share."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# One alias for all arrays: NumPy's here, a backend's own (CuPy's, say) when a backend is passed in.
Array = npt.NDArray[Any]

Ids = npt.NDArray[np.int32]

Params = Mapping[str, Array]  # name -> the parameter
Grads = Mapping[str, Array]  # name -> view of the flat gradient, written by a backward


class Loss(NamedTuple):
    """What a loss op returns: a sum, so that ranks and micro-batches divide once, globally."""

    total: float  # sum of the negative log-likelihoods of the valid targets, in nats
    n_valid: int  # number of valid targets


class DropoutKey(NamedTuple):
    """Where in a run a dropout mask belongs; together with a position it determines one bit."""

    seed: int  # of the run, 0 .. 2⁶⁴ - 1
    step: int  # optimizer step, 0 .. 2³² - 1
    sample: int  # global index of the first sample of the batch, 0 .. 2³² - 1; the next follow on
    site: int  # which dropout of the model: see sites in reference/ops.py, 0 .. 2³² - 1


class Dropout(NamedTuple):
    """By what the mask of one dropout is drawn."""

    p: float  # chance of being dropped, in (0, 1)
    key: DropoutKey


class RopeScaling(NamedTuple):
    """How Llama 3 stretches RoPE to a context longer than it was trained with: see ``rope.py``."""

    factor: float  # by which slow pairs turn more slowly, >= 1
    low_freq_factor: float  # turns in the original context up to which a pair is slow, > 0
    high_freq_factor: float  # turns from which on a pair keeps its frequency, > low_freq_factor
    original_context: float  # tokens, > 0


class KVCache(NamedTuple):
    """Keys and values of the tokens seen so far, layer by layer, written by ``write_kv``."""

    k: Sequence[Array]  # of a layer: (B, S, Hkv, d), S the tokens that this layer keeps
    v: Sequence[Array]  # the same
