"""Philox4x32-10: random words as a pure function of a key and a counter.

Salmon, Moraes, Dror & Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3. A
generator with a state would hand out different bits when the batch is split differently or a kernel
walks its tiles in another order. Here every element owns its counter, so that any backend, any
tiling and any number of ranks draw the same bits, and the backward can draw them again.
"""

import numpy as np
import numpy.typing as npt

from reference.types import Array, DropoutKey

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key after each round: golden ratio and √3 - 1
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

Words = npt.NDArray[np.uint32]


def philox(counter: tuple[Array, Array, Array, Array], key: tuple[int, int]) -> Words:
    """Return four random words for each counter: (..., 4) uint32.

    Parameters
    ----------
    counter : four integer arrays that broadcast, each value below 2³²
    key : two ints below 2³²
    """
    c0, c1, c2, c3 = (np.asarray(c, dtype=np.uint64) for c in counter)
    k0, k1 = key
    for _ in range(10):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    words = np.broadcast_arrays(c0, c1, c2, c3)
    return np.stack(words, axis=-1).astype(np.uint32)


def check_counters(batch: int, size: int, key: DropoutKey) -> DropoutKey:
    """Return the key in Python's integers; it and the samples must fit the counters."""
    limits = {"seed": 64, "step": 32, "sample": 32, "site": 32}
    for name, bits in limits.items():
        value = getattr(key, name)
        if np.ndim(value) != 0 or value != int(value) or not 0 <= value < 2**bits:
            raise ValueError(f"dropout: {name} must lie in 0..2^{bits} - 1, got {value}")
    key = DropoutKey(*(int(number) for number in key))  # NumPy's own would wrap in the sum
    if key.sample + batch > 2**32 or size > 2**34:
        raise ValueError(
            f"dropout: a batch of {batch} from sample {key.sample} with {size} elements each "
            "overflows the counters (2^32 samples, 2^34 elements)"
        )
    return key


def keep_mask(shape: tuple[int, ...], p: float, key: DropoutKey) -> npt.NDArray[np.bool_]:
    """Return which elements of an array (B, ...) dropout keeps: True with probability 1 - p.

    Element i of sample s (i counts within the sample, in C order) owns word i % 4 of the counter
    (i // 4, key.sample + s, step, site) under the seed's low and high half as key; it is dropped
    where the word is below floor(p·2³²).
    """
    batch, size = shape[0], int(np.prod(shape[1:], dtype=np.int64))
    block = np.arange(-(-size // 4))[None, :]
    sample = key.sample + np.arange(batch)[:, None]
    words = philox(
        (block, sample, np.asarray(key.step), np.asarray(key.site)),
        (key.seed & 0xFFFFFFFF, key.seed >> 32),
    )
    threshold = int(p * 2**32)
    return (words.reshape(batch, -1)[:, :size] >= threshold).reshape(shape)
