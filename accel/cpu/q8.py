"""The ops that differ in the mode q8_0: decoding reads matrices of eight bits a weight.

Q8_0 is a format of llama.cpp: 32 numbers x of a row share a scale d = max|x| / 127, a float16, and
each is stored as q = x / d, rounded to an int8. A token takes as long to decode as the weights take
to be read, and here that is 34 bytes for 32 of them instead of 128.

The blocks run along the input of a product, as in a GGUF file, so these are the numbers that
``myllm export --dtype q8_0`` writes (but for widths that 32 does not divide: their last block is
shorter here, and the file keeps such a matrix as F16). ``parameters`` rounds every matrix once. All
ops see the rounded numbers as float32, so a prompt is read with the same weights as the answer is
written with; the arithmetic is float32.
"""

from collections.abc import Mapping

import numpy as np

from accel.ahead import in_order
from accel.cpu.decode import decode, is_table
from accel.cpu.memory import lasting
from accel.cpu.q8_kernels import SCALE, TILE
from accel.q8_0 import BLOCK, from_blocks, to_blocks
from reference.config import Config
from reference.types import Array, KVCache


class RoundedWeight(np.ndarray):
    """A matrix of rounded numbers in float32, with the tiles that they come from."""

    blocks: Array  # int8, as ``q8_kernels.py`` reads them


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
                made[name] = weight = np.empty(array.shape, np.float32).view(RoundedWeight)
                ours, rounded = (array.T, weight.T) if is_table(name) else (array, weight)
                weight.blocks = _tiles(ours, rounded)
            except ValueError as error:
                raise ValueError(f"{name} {error}: choose compute='float32'") from error
    return made


def _tiles(weight: Array, rounded: Array) -> Array:
    """Return the tiles of a weight (in, out), and write the numbers that they mean."""
    n_in, n_out = weight.shape
    across, deep = -(-n_out // BLOCK), -(-n_in // BLOCK)
    blocks = lasting((across, deep, TILE), np.int8)
    scales, numbers = blocks[..., : SCALE * BLOCK], blocks[..., SCALE * BLOCK :]

    def band(n: int) -> None:
        inputs = slice(n * BLOCK, min((n + 1) * BLOCK, n_in))
        x = np.zeros((across * BLOCK, BLOCK), np.float32)
        x[:n_out, : inputs.stop - inputs.start] = weight[inputs].T
        d, q = to_blocks(x)
        scales[:, n] = d.view(np.int8).reshape(across, -1)
        numbers[:, n] = q.reshape(across, BLOCK, BLOCK).swapaxes(1, 2).reshape(across, -1)
        from_blocks(d.astype(np.float32), q, x)
        rounded[inputs] = x[:n_out, : inputs.stop - inputs.start].T

    for _ in in_order(band, range(deep)):
        pass
    return blocks


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
