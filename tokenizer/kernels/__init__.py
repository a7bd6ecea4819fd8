"""Numba kernels of the tokenizer, and every constant they freeze.

This folder is hashed as a whole by ``accel.jit``: an edit of any file recompiles all of them.
"""

COMPILE_SECONDS = 8  # told to the first user: accel/jit.py
