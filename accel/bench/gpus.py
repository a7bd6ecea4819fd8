"""GPUs, by what others have published of them; nothing is fitted to what our kernels took."""

from typing import NamedTuple


class Gpu(NamedTuple):
    """A GPU; all of a cycle are of one multiprocessor unless said otherwise."""

    architecture: str
    shared_limit: int  # bytes of shared memory of a block
    processors: int  # multiprocessors
    clock: float  # cycles a second at which the data sheet's operations are done
    tensor: int  # operations of dense bf16 products with float32 sums a cycle
    by_mma: float  # the share of them that mma.sync reaches
    fma: int  # float32 multiply-adds a cycle
    cache: float  # bytes a cycle that all multiprocessors together read of the second-level cache
    memory: float  # bytes a second
    product: float  # operations a second of the best large bf16 product that was measured
    link: float  # bytes a second to other GPUs, each way
    room: int  # bytes of memory

    @property
    def warpgroups(self) -> bool:
        """Whether it multiplies by wgmma."""
        return self.architecture == "sm_90a"


# Multiprocessors, clocks, operations, bandwidths and links: NVIDIA's H100 architecture white paper
# (989.4 TFLOP/s = 132 · 4,096 · 1.83 GHz), data sheets of the H100 SXM, the H200 SXM and the A100
# 80 GB SXM (312 = 108 · 2,048 · 1.41), and Ada architecture white paper, appendix A (165.2 = 128 ·
# 512 · 2.52). fma: CUDA C++ Programming Guide, "Arithmetic Instructions". by_mma and cache: Luo et
# al. 2024 (arXiv 2402.13499). product: S. Bekman, "Machine Learning Engineering", "Maximum
# Achievable Matmul FLOPS"; the RTX 4090 is not in it: its peak.
_HOPPER = Gpu(
    "sm_90a", 227 << 10, 132, 1.83e9, 4096, 0.62, 128, 3942, 3.35e12, 794.5e12, 450e9, 80 * 10**9
)
MODELS = {
    "H100": _HOPPER,
    "H200": _HOPPER._replace(memory=4.8e12, room=141 * 10**9),
    # the same by mma.sync: what is compiled for sm_90 has no wgmma
    "H200-mma": _HOPPER._replace(architecture="sm_90", memory=4.8e12, room=141 * 10**9),
    "A100": Gpu(
        "sm_80", 163 << 10, 108, 1.41e9, 2048, 1.0, 64, 2008, 2.039e12, 267.9e12, 300e9, 80 * 10**9
    ),
    "RTX4090": Gpu(
        "sm_89", 99 << 10, 128, 2.52e9, 512, 1.0, 128, 1708, 1.008e12, 165.2e12, 32e9, 24 * 10**9
    ),
}
