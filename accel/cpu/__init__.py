"""The functions of ``reference.ops`` for the CPU: Numba kernels and NumPy's own OpenBLAS."""

COMPILE_SECONDS = 60  # of a cold compile of all kernels here, on two cores; told to the first user
