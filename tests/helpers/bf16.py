"""Rounding to bfloat16, written once more for tests."""

import numpy as np

U32 = 2.0**-24  # unit roundoff of float32
U16 = 2.0**-9  # of bfloat16


def rounded(x):
    """Return x rounded to bfloat16, to nearest even, as float64."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)
