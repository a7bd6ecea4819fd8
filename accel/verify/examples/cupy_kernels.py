"""RMSNorm as CuPy RawKernels, a block of threads for each row: checked on a GPU.

    pip install -e . cupy-cuda13x
    myllm verify --module accel/verify/examples/cupy_kernels.py --partial

``rmsnorm_backward`` gives dx by one kernel and the gain's gradient by another, whose threads take a
column each and add its rows up in order, so that two runs give the same bits.
"""

from typing import Any

import cupy as cp
import numpy as np

DTYPES = ("float32",)
THREADS = 32

SUM = r"""
// the sum of a value over the block, in every thread
__device__ float block_sum(float value) {
    __shared__ float part[32];
    part[threadIdx.x] = value;
    __syncthreads();
    for (int half = 16; half > 0; half /= 2) {
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
        __syncthreads();
    }
    const float total = part[0];
    __syncthreads();  // read, before part is used again
    return total;
}
"""
FORWARD = cp.RawKernel(
    SUM
    + r"""
extern "C" __global__ void forward(const float* x, const float* g, float* y, float* r, int D,
                                   float eps) {
    x += (size_t)blockIdx.x * D;
    y += (size_t)blockIdx.x * D;
    float squares = 0;
    for (int i = threadIdx.x; i < D; i += 32) squares += x[i] * x[i];
    const float rstd = rsqrtf(block_sum(squares) / D + eps);
    for (int i = threadIdx.x; i < D; i += 32) y[i] = x[i] * rstd * g[i];
    if (threadIdx.x == 0) r[blockIdx.x] = rstd;
}
""",
    "forward",
)
BACKWARD = cp.RawKernel(
    SUM
    + r"""
extern "C" __global__ void backward(const float* dy, const float* x, const float* g,
                                    const float* r, float* dx, int D) {
    const size_t row = (size_t)blockIdx.x * D;
    const float rstd = r[blockIdx.x];
    float along = 0;
    for (int i = threadIdx.x; i < D; i += 32)
        along += dy[row + i] * g[i] * (x[row + i] * rstd);
    const float mean = block_sum(along) / D;
    for (int i = threadIdx.x; i < D; i += 32)
        dx[row + i] = rstd * (dy[row + i] * g[i] - x[row + i] * rstd * mean);
}
""",
    "backward",
)
GAIN = cp.RawKernel(
    r"""
extern "C" __global__ void gain(const float* dy, const float* x, const float* r, float* dg,
                                int rows, int D) {
    const int i = blockIdx.x * 32 + threadIdx.x;
    if (i >= D) return;
    float sum = 0;
    for (int row = 0; row < rows; ++row)
        sum += dy[(size_t)row * D + i] * (x[(size_t)row * D + i] * r[row]);
    dg[i] = sum;
}
""",
    "gain",
)


def from_numpy(array: Any) -> Any:
    """Bring an array of the checker to the GPU."""
    return cp.asarray(array)


def to_numpy(array: Any) -> Any:
    """Bring a result back, which waits for it."""
    return cp.asnumpy(array)


def rmsnorm_forward(x: Any, gain: Any, *, eps: float) -> tuple[Any, Any]:
    x, gain = cp.ascontiguousarray(x), cp.ascontiguousarray(gain)
    D = x.shape[-1]
    y, r = cp.empty(x.shape, np.float32), cp.empty(x.shape[:-1], np.float32)
    rows = r.size
    FORWARD((rows,), (THREADS,), (x, gain, y, r, np.int32(D), np.float32(eps)))
    return y, (x, gain, r)


def rmsnorm_backward(dout: Any, cache: Any) -> tuple[Any, Any]:
    x, gain, r = cache
    dout, D = cp.ascontiguousarray(dout), x.shape[-1]
    dx, dgain = cp.empty(x.shape, np.float32), cp.empty(D, np.float32)
    BACKWARD((r.size,), (THREADS,), (dout, x, gain, r, dx, np.int32(D)))
    blocks = -(-D // THREADS)
    GAIN((blocks,), (THREADS,), (dout, x, r, dgain, np.int32(r.size), np.int32(D)))
    return dx, dgain
