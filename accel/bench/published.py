"""Hold the model of a multiprocessor against kernels that are not ours, and published times.

``python -m accel.bench.published LIBRARY...`` reads machine code out of libraries (no GPU, nothing
is run), plays the loops and prints what follows beside what was measured. It needs

    pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm

FlashAttention-2 is in PyTorch's build for CUDA (``torch/lib/libtorch_cuda.so`` of its package). Its
figures are of 16,384 tokens in fp16, a model width of 2,048 and heads of 64 or 128: of the H100
by Shah et al. 2024, "FlashAttention-3" (arXiv 2407.08608), figures 5 and 6, with the clock fixed at
1,830 MHz (appendix C.1); of the A100 by Dao 2023, "FlashAttention-2" (arXiv 2307.08691), whose text
says that the kernels reach 73 % of 312 TFLOP/s forward and 63 % backward.

FlashAttention-3 is in the package ``fa3-fwd`` (``fa3_fwd/_C.abi3.so``), with products of warpgroups
that take turns. Nsight Compute counted 5,068,289 cycles in 3.53 ms of vLLM 0.30's build on an H100,
16,384 tokens in fp16, 32 heads of 128, 8 of keys (github.com/roy6n23/triton-fa2-forward,
bench/results/2026-10-04/ncu/fa3-vllm.details.csv). fa3-fwd has the same kernel in bf16. Its turns
are played, its producer of copies is not.

Tiles, warps and blocks a multiprocessor are those of the kernels' own launch templates. What was
measured was compiled by other compilers than what is read here. Tiles on the diagonal are taken for
whole ones, and what a block does outside of its loop (1 %) is left out.
"""

import argparse
import mmap
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from accel.bench.gpus import MODELS
from accel.bench.predict import round_of
from accel.bench.report import Row
from accel.cuda.machine_code import count, disassemble, hot_loop, tool
from accel.cuda.order import dealt

TOKENS, WIDTH = 16_384, 2_048
OWN = 128  # rows of a block


class Kernel(NamedTuple):
    """One of FlashAttention's kernels."""

    what: str
    name: str  # a pattern of its name in the library: half precision, nothing optional
    head: int
    walked: int  # rows of a tile that a block walks over
    products: int  # of a tile
    warps: int
    blocks: int  # that fit a multiprocessor
    measured: dict[str, float]  # TFLOP/s, by GPU
    width: int = WIDTH
    clock: float | None = None  # cycles a second when it was measured; None: the GPU's

    @property
    def causal(self) -> bool:
        """Whether a position sees only those before it."""
        return "causal" in self.what


_TRAITS = r"kernelI23Flash_%s_kernel_traitsI%s.*6half_t.*EELb0ELb%dELb0ELb0ELb1ELb1ELb0E"
_WIDE, _NARROW = "Li128ELi128ELi64ELi4E", "Li64ELi128ELi128ELi4E"
# causal, no window, no cap of scores, many lengths, no pages, …, heads of one key together
_TURNS = r"FlashAttnFwdSm90.*ILi128EEESA_SA_EEELi128ENS_10bfloat16_tEfNS_4arch4Sm90E" + "".join(
    f"Lb{flag}E" for flag in "100100011100"
)
KERNELS = (
    Kernel("forward, 128 wide", _TRAITS % ("fwd", _WIDE, 0), 128, 64, 2, 4, 2,
           {"H100": 370, "A100": 0.73 * 312}),
    Kernel("forward, 128 wide, causal", _TRAITS % ("fwd", _WIDE, 1), 128, 64, 2, 4, 2,
           {"H100": 335}),
    Kernel("forward, 64 wide", _TRAITS % ("fwd", _NARROW, 0), 64, 128, 2, 4, 2,
           {"H100": 324}),
    Kernel("backward, 128 wide", _TRAITS % ("bwd", "Li128ELi64ELi128ELi8E", 0), 128, 64, 5, 8, 1,
           {"H100": 322, "A100": 0.63 * 312}),
    Kernel("backward, 64 wide", _TRAITS % ("bwd", "Li64ELi128ELi128ELi8E", 0), 64, 128, 5, 8, 1,
           {"H100": 291}),
    Kernel("FlashAttention-3, forward, 128 wide, causal", _TURNS, 128, 128, 2, 8, 1,
           {"H100": 623}, 4_096, 5_068_289 / 3.53e-3),
)  # fmt: skip


def rows(library: Path, gpu_name: str) -> list[Row]:
    """Return a row for each kernel of a library that was measured on a GPU."""
    gpu = MODELS[gpu_name]
    with library.open("rb") as raw, mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        third = whole.find(b"FlashAttnFwdSm90") >= 0
    wanted = [k for k in KERNELS if gpu_name in k.measured and third == (k.name == _TURNS)]
    found: dict[str, Row] = {}
    if not wanted:
        return []
    with tempfile.TemporaryDirectory() as folder:
        which = f"{gpu.architecture if third else gpu.architecture.removesuffix('a')}.cubin"
        command: list[str | Path] = [tool("cuobjdump"), "-xelf", which, library.resolve()]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        for file in sorted(Path(folder).iterdir()):
            held = file.read_bytes()
            here = [k for k in wanted if re.search(k.name.encode(), held)]
            codes = disassemble(held) if here else {}
            for kernel in here:
                for name, code in codes.items():
                    if re.search(kernel.name, name):
                        loop = hot_loop(code)
                        flops = 2 * kernel.products * OWN * kernel.walked * kernel.head
                        if kernel.warps * count(loop).flops != flops:
                            raise ValueError(f"{name}: a round is not a tile's {flops} operations")
                        cycles, bound = round_of(loop, gpu, kernel.warps, kernel.blocks)
                        found[kernel.what] = _row(kernel, gpu_name, cycles, bound)
    missing = [k.what for k in wanted if k.what not in found]
    if missing:
        raise ValueError(f"{library} has no machine code for {which}: {', '.join(missing)}")
    return [found[kernel.what] for kernel in wanted]


def _row(kernel: Kernel, gpu_name: str, cycles: float, bound: str) -> Row:
    gpu = MODELS[gpu_name]
    heads = kernel.width // kernel.head
    blocks = range(TOKENS // OWN)
    walked = [(n + 1) * OWN if kernel.causal else TOKENS for n in blocks]
    # a head's blocks in order; the hardware hands them out so
    tiles = [n // kernel.walked for n in walked] * heads
    if kernel.name == _TURNS:  # whose own scheduler begins with the longest
        tiles.sort(reverse=True)
    seconds = dealt([n * cycles for n in tiles], gpu.processors * kernel.blocks)
    seconds /= kernel.clock or gpu.clock
    if kernel.products == 5:  # o, do and sums of dq in float32, by kernels before and after
        seconds += TOKENS * kernel.width * 14 / gpu.memory
    work = 2.0 * kernel.products * TOKENS**2 * kernel.width * (0.5 if kernel.causal else 1)
    published = kernel.measured[gpu_name]
    note = f"{work / seconds / 1e12:.0f} TFLOP/s beside {published:.0f} ({bound})"
    measured = work / published / 1e12
    return Row(f"{gpu_name}: {kernel.what}", seconds, measured, note=note)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("library", type=Path, nargs="+", help="libtorch_cuda.so, _C.abi3.so")
    given = parser.parse_args()
    for library in given.library:
        for gpu in ("H100", "A100"):
            for row in rows(library, gpu):
                print(row)


if __name__ == "__main__":
    main()
