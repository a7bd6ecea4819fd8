"""The types of this package's signatures; shapes and dtypes stand in the docstrings."""

from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
Int = Any  # an integer of a kernel: int from Python, int64 or uint64 from another kernel
