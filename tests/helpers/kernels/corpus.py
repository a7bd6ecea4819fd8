"""The planted kernels by op: ``myllm bench verify --also tests.helpers.kernels.corpus``."""

from collections.abc import Iterator
from typing import Any

from tests.helpers.kernels.patches import PATCHES
from tests.helpers.kernels.subtle import SUBTLE
from tests.helpers.kernels.wrong import WRITTEN


def corpus(op: str) -> Iterator[tuple[str, Any, str]]:
    """Yield (title, kernel, precision) of every planted mistake in an op."""
    for patch in PATCHES:
        if patch.op == op:
            yield patch.title, patch.kernel, "float32"
    for written in (*WRITTEN, *SUBTLE):
        if written.op == op:
            yield written.title, written.kernel, written.dtype
