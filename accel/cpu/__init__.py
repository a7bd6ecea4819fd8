"""The functions of ``reference.ops`` for the CPU, as Numba kernels; no BLAS is called."""

COMPILE_SECONDS = 20  # told to the first user: accel/jit.py
