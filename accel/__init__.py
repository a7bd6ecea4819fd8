"""The same functions as ``reference``, made fast. ``accel.jit`` owns the cache of Numba kernels."""
