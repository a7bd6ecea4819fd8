"""The backend ``cuda``: CuPy for memory, cuBLAS for dense products, our own kernels for the rest.

Each ``.cu`` file lies beside the launcher that knows its tiles and grids; ``device.cuh`` holds what
all kernels share; ``device.py`` is the little that a launcher asks of a machine.
"""
