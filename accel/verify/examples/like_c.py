"""A kernel in C behind ctypes or cffi, held to ``like_torch.py`` or any other plain version.

myllm verify --like accel/verify/examples/like_torch.py \
        --module accel/verify/examples/like_c.py --function softmax --function gated
"""

import ctypes
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

DTYPES = "float32"
SOURCE = """
#include <math.h>
void softmax(const float *x, float *out, long rows, long n) {
    for (long r = 0; r < rows; r++, x += n, out += n) {
        float top = -INFINITY, sum = 0;
        for (long i = 0; i < n; i++) top = fmaxf(top, x[i]);
        for (long i = 0; i < n; i++) sum += out[i] = expf(x[i] - top);
        for (long i = 0; i < n; i++) out[i] /= sum;
    }
}
void gated(const float *x, const float *y, float *out, long n) {
    for (long i = 0; i < n; i++) out[i] = x[i] / (1 + expf(-x[i])) * y[i];
}
"""


def _library() -> str:
    folder = Path(tempfile.mkdtemp(prefix="like-c-"))
    (folder / "kernels.c").write_text(SOURCE, encoding="utf-8")
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", "kernels.so", "kernels.c", "-lm"]
    subprocess.run(command, cwd=folder, check=True)
    return str(folder / "kernels.so")


PATH = _library()
_by_ctypes = ctypes.CDLL(PATH)


def softmax(x: Any) -> Any:
    """By ctypes."""
    x = np.ascontiguousarray(x, np.float32)
    out = np.empty_like(x)
    rows, n = (ctypes.c_long(size) for size in x.shape)
    _by_ctypes.softmax(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(out.ctypes.data), rows, n)
    return out


def gated(x: Any, y: Any) -> Any:
    """By cffi."""
    import cffi

    ffi = cffi.FFI()
    ffi.cdef("void gated(const float *x, const float *y, float *out, long n);")
    x, y = (np.ascontiguousarray(a, np.float32) for a in (x, y))
    out = np.empty_like(x)
    given = [ffi.cast("float *", a.ctypes.data) for a in (x, y, out)]
    ffi.dlopen(PATH).gated(*given, x.size)
    return out
