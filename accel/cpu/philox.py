"""Philox4x32-10 for kernels: the bits of ``reference/philox.py``, a counter at a time.

Salmon, Moraes, Dror & Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3. Ten
rounds of two 32 × 32 -> 64 bit products: about 60 instructions for four words, and a loop over
counters vectorises.
"""

import numpy as np

from accel.jit import jit

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@jit(nogil=True)
def philox(
    c0: np.uint64,
    c1: np.uint64,
    c2: np.uint64,
    c3: np.uint64,
    k0: np.uint64,
    k1: np.uint64,
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """Return the four words of counter (c0, c1, c2, c3) under the key (k0, k1).

    All are uint64 that hold 32-bit values.
    """
    c0, c1, c2, c3 = c0 & _LOW, c1 & _LOW, c2 & _LOW, c3 & _LOW  # tells the compiler as well
    k0, k1 = k0 & _LOW, k1 & _LOW
    for _ in range(10):
        product0 = _MULTIPLIER_0 * c0
        product1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0 = (k0 + _WEYL_0) & _LOW
        k1 = (k1 + _WEYL_1) & _LOW
    return c0, c1, c2, c3
