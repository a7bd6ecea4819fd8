"""The functions of ``reference.ops`` for the CPU, as Numba kernels; no BLAS is called."""

COMPILE_SECONDS = 60  # of a cold compile of all kernels here, on two cores; told to the first user
