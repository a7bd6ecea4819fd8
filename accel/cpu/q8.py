"""The ops that differ in the mode q8_0: decoding reads matrices of eight bits a weight.

Q8_0 is a format of llama.cpp: 32 numbers x of a row share a scale d = max|x| / 127, a float16, and
each is stored as q = x / d, rounded to an int8. A token takes as long to decode as the weights take
to be read, and here that is 34 bytes for 32 of them instead of 128.

The blocks run along the input of a product, as in a GGUF file, so these are the numbers that
``myllm export --dtype q8_0`` writes (but for widths that 32 does not divide: their last block is
shorter here). ``parameters`` rounds every matrix once. All ops see the rounded numbers as float32,
so a prompt is read with the same weights as the answer is written with; the arithmetic is float32.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.cpu.decode import decode
from accel.q8_0 import BLOCK, to_blocks
from reference.config import Config
from reference.types import KVCache

Array = npt.NDArray[Any]


class RoundedWeight(np.ndarray):
    """A matrix of rounded numbers in float32, with the blocks that they come from."""

    blocks: Array  # int8, as they lie in memory


def parameters(master: Mapping[str, Array]) -> dict[str, Array]:
    """Return what the ops read: copies of all matrices that are rounded to Q8_0.

    Raises
    ------
    ValueError
        When a weight cannot be rounded; it is named.
    """
    made = dict(master)
    for name, array in master.items():
        if array.ndim == 2:
            try:
                made[name] = _rounded(array, tiles=name.startswith("layers."))
            except ValueError as error:
                raise ValueError(f"{name} {error}: choose compute='float32'") from error
    return made


def _rounded(weight: Array, *, tiles: bool) -> Array:
    """Return a weight with its blocks: in tiles (in, out), or along the rows of a table (V, D)."""
    along = weight.T if tiles else weight  # (rows, what a product sums over)
    rows, width = along.shape
    n = -(-width // BLOCK)
    padded = np.zeros((-(-rows // BLOCK) * BLOCK if tiles else rows, n * BLOCK), np.float32)
    padded[:rows, :width] = along
    d, q = to_blocks(padded.reshape(-1, n, BLOCK))
    rounded = (d.astype(np.float32)[..., None] * q).reshape(padded.shape)[:rows, :width]
    if tiles:
        q = q.reshape(-1, BLOCK, n, BLOCK).transpose(0, 2, 3, 1).reshape(-1, n, BLOCK * BLOCK)
    scales = d.reshape(-1, BLOCK, n).transpose(0, 2, 1) if tiles else d[..., None]
    first = np.ascontiguousarray(scales).view(np.int8)
    found = np.ascontiguousarray(rounded.T if tiles else rounded).view(RoundedWeight)
    found.blocks = np.concatenate([first, q], axis=-1)
    return found


def decode_step(
    params: Mapping[str, Array],
    config: Config,
    token: Array,
    cache: KVCache,
    position: int | Array,
) -> Array:
    """Return the logits (B, V) after one more token of each row; matrices are read as blocks."""
    plain = {n: w for n, w in params.items() if w.ndim == 2 and not hasattr(w, "blocks")}
    rounded = {**params, **parameters(plain)}
    blocks = {name: w.blocks for name, w in rounded.items() if isinstance(w, RoundedWeight)}
    return decode(rounded, blocks, config, token, cache, position)
