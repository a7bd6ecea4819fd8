"""``myllm bench cuda --model H100``: what a GPU that is not here would take, by arithmetic.

The launchers run as on a GPU, on arrays without memory, and what they ask for is written down: each
launch of a training step, and each product. A launch takes as long as the slowest of

    memory   the bytes of its arrays, each once, or as often as ``TIMES`` says
    tensor, shared memory, MUFU, FMA, light, issue
             what the way that is run most gives a multiprocessor to do, counted in the machine
             code that NVRTC makes for that GPU (``accel.cuda.machine_code``)

Attention's blocks walk over tiles. A round of the loop is played instruction by instruction
(``multiprocessor.py``), for the warps that share a multiprocessor; where that takes longer than any
unit is busy, it is bound by "waits". Blocks are then dealt out as the hardware does. Products of
cuBLAS take the speed that somebody measured of the best shapes; what one adds as it writes, which
takes an algorithm of cublasLt's, is read beside that, hidden behind nothing.

Left out: starts of kernels, what power does to the clock, how many bytes of memory a kernel has
under way, and ways that are run less often. GPUS.md says how much longer two GPUs took, and
``published.py`` what comes out for kernels that are not ours.
"""

import contextlib
import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from accel.bench.gpus import MODELS, Gpu
from accel.bench.multiprocessor import ISSUED, LIGHT_RATE, MUFU_RATE, SHARED, played, spent_on
from accel.bench.report import Row
from accel.bench.training import SETTINGS
from accel.cuda import attention, ops_bf16
from accel.cuda import device as devices
from accel.cuda.arena import Arena
from accel.cuda.compiler import cubin_file
from accel.cuda.device import Argument, Device, Multiply, Product
from accel.cuda.machine_code import WARP, Code, Counts, count, disassemble, hot_loop, way
from accel.cuda.order import dealt, turned
from accel.cuda.sources import signature
from reference.config import Config
from reference.flops import attention_flops, training_flops
from reference.model import loss_backward, loss_forward
from reference.params import decoder_layout
from reference.types import Array

# How often a kernel moves an array that it does not move once; 0: by its output's size, not its own
TIMES = {
    ("adamw", "master"): 2, ("adamw", "m"): 2, ("adamw", "v"): 2, ("accumulate", "dst"): 2,
    ("add_bias", "y"): 2, ("cross_entropy", "logits"): 3, ("embedding_forward", "table"): 0,
}  # fmt: skip
PRODUCTS = {"attention_forward": 2, "attention_dq": 3, "attention_dkv": 4}  # of a tile


class Launch(NamedTuple):
    """What a launcher asked for."""

    source: str
    kernel: str
    grid: tuple[int, int, int]
    threads: int
    given: Mapping[str, Any]  # the arguments by name
    defines: Mapping[str, int]

    @property
    def moved(self) -> float:
        """Bytes to and from memory."""
        arrays = {name: a for name, a in self.given.items() if isinstance(a, np.ndarray)}
        times = {name: TIMES.get((self.kernel, name), 1) for name in arrays}
        gathered = sum(arrays["out"].nbytes for n in times.values() if n == 0)
        return gathered + sum(times[name] * a.nbytes for name, a in arrays.items())

    @property
    def tiles(self) -> attention.Tiles:
        """How a kernel of attention on tensor cores is cut, but for the rows that it walks over."""
        ways = attention.TILES[self.source.removeprefix("attention_")][self.kernel]
        return next(t for t in ways if 32 * t.warps == self.threads)


class Prediction(NamedTuple):
    """What a kernel or a product is predicted to take."""

    seconds: float
    bound: str
    moved: float
    operations: float
    a_round: Mapping[str, float] = {}  # of attention's loop: cycles, played and by unit


class _Memory:
    """Memory that is not there; an array of it must never be read."""

    def __init__(self, at: int, shape: tuple[int, ...], dtype: npt.DTypeLike, owner: Any):
        self.owner = owner
        self.__array_interface__ = {
            "data": (at, False),
            "shape": shape,
            "typestr": np.dtype(dtype).str,
            "version": 3,
        }


class Recorder:
    """A device that does nothing but write down what it is asked for."""

    def __init__(self, gpu: Gpu | Device):
        self.shared_limit, self.warpgroups = gpu.shared_limit, gpu.warpgroups
        self.processors = gpu.processors
        self.attention = ""
        self.products: dict[Product, Multiply] = {}
        self.recordings: OrderedDict[Hashable, Any] = OrderedDict()
        self.asked: list[Launch | Product] = []
        self.arena = Arena(self)
        self._end = 1 << 40  # of the addresses that were given out

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        at = self._end
        self._end += -(-max(1, math.prod(shape) * np.dtype(dtype).itemsize) // 256) * 256
        return np.asarray(_Memory(at, shape, dtype, None))

    def piece(
        self, block: Array, start: int, shape: tuple[int, ...], dtype: npt.DTypeLike, owner: Any
    ) -> Array:
        return np.asarray(_Memory(self.address(block) + start, shape, dtype, owner))

    def upload(self, array: Array) -> Array:
        return self.empty(array.shape, array.dtype)

    def download(self, array: Array) -> Array:
        """Return zeros; the check of ids finds none that is wrong."""
        if array.shape == (2,) and array.dtype == np.int32:
            return np.array([2**31 - 1, 1], np.int32)
        return np.zeros(array.shape, array.dtype)

    def address(self, array: Array) -> int:
        return int(array.ctypes.data)

    def identities(self, arrays: Iterable[Array]) -> Hashable:
        return tuple((self.address(x), x.shape, x.strides, x.dtype) for x in arrays)

    def launch(
        self,
        source: str,
        kernel: str,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Sequence[Argument],
        *,
        defines: Mapping[str, int],
        **_: Any,
    ) -> None:
        names = (name for name, _ in signature(source, kernel).parameters)
        sizes = [  # arrays of the same sizes, which keep no piece of the arena
            np.broadcast_to(np.zeros((), a.dtype), a.shape) if isinstance(a, np.ndarray) else a
            for a in arguments
        ]
        given = dict(zip(names, sizes, strict=True))
        self.asked.append(Launch(source, kernel, grid, threads, given, defines))

    def gemm_ex(self, product: Product, *_: Array) -> None:
        self.asked.append(product)

    def cublaslt(self) -> NoReturn:
        raise ImportError("nothing is computed here")

    def expired(self, block: Array) -> None:
        pass

    def trim(self) -> None:
        pass

    def clear(self, array: Array) -> None:
        pass

    def write(self, array: Array, values: Array) -> None:
        pass

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        return run

    def stream(self) -> int:
        return 0

    def name(self) -> str:
        return "predicted"

    def kind(self) -> str:
        return "predicted"

    def memory(self) -> int:
        return 0


@contextlib.contextmanager
def recording(gpu: Gpu | Device) -> Iterator[Recorder]:
    """Let the launchers write down what they ask of a GPU."""
    device = Recorder(gpu)
    before = devices.use(device)
    try:
        yield device
    finally:
        devices.use(before)


@functools.cache
def _code(source: str, kernel: str, defines: tuple[tuple[str, int], ...], to: str) -> Code:
    return disassemble(cubin_file(source, to, dict(defines)).read_bytes())[kernel]


def busy(c: Counts, gpu: Gpu, warps: float) -> dict[str, float]:
    """Return the cycles that each unit of a multiprocessor needs for so many warps."""
    rate = gpu.tensor * (1 if gpu.warpgroups and not c.ldsm else gpu.by_mma)
    return {
        "tensor": warps * c.flops / rate,
        "shared memory": warps * c.shared / SHARED,
        "MUFU": warps * WARP * c.mufu / MUFU_RATE,
        "FMA": warps * WARP * c.fma / gpu.fma,
        "light": warps * WARP * c.light / LIGHT_RATE,
        "issue": warps * c.issued / ISSUED,
    }


@functools.cache
def _loop(
    source: str,
    kernel: str,
    defines: tuple[tuple[str, int], ...],
    gpu: Gpu,
    warps: int,
    blocks: int,
) -> tuple[Counts, float, float, str]:
    """Return what a warp does in a round of a kernel's loop over tiles; cycles; those outside."""
    code = _code(source, kernel, defines, gpu.architecture)
    taken = hot_loop(code)
    a_round = count(taken)
    if not taken:
        return a_round, 0.0, 0.0, ""
    cycles, bound = round_of(taken, gpu, warps, blocks)
    outside = spent_on(way(code), gpu, warps, blocks) - cycles
    return a_round, cycles, max(0.0, outside), bound


def round_of(taken: Code, gpu: Gpu, warps: int, blocks: int = 1) -> tuple[float, str]:
    """Return the cycles of a round by all blocks on a multiprocessor, and what bounds it."""
    a_round = count(taken)
    units = busy(a_round, gpu, warps * blocks)
    read = sum(n * width for (stem, width), n in a_round.accesses.items() if stem != "STG")
    units["second-level cache"] = warps * blocks * WARP * read * gpu.processors / gpu.cache
    bound = max(units, key=lambda unit: units[unit])
    cycles = max(units[bound], played(taken, gpu, warps, blocks))
    return cycles, bound if cycles <= 1.05 * units[bound] else "waits"


def tiles_of_blocks(launch: Launch, rows: int) -> list[int]:
    """Return the tiles of ``rows`` rows of each block of attention, as they are handed out."""
    lengths = attention.blocks(launch.kernel, launch.tiles.block, rows, launch.given)
    alike = launch.grid[0] * launch.grid[1]
    return [n for n in turned(lengths, launch.given.get("rising", 0)) for _ in range(alike)]


def predict(asked: Launch | Product, gpu: Gpu) -> Prediction:
    """Return what one launch or product is predicted to take."""
    if not isinstance(asked, Launch):
        m, n, k = asked.m, asked.n, asked.k
        work, added = 2.0 * m * n * k, 2.0 * m * n * asked.apart
        moved = 2.0 * (m * k + k * n + m * n) + added
        return Prediction(work / gpu.product + added / gpu.memory, "tensor", moved, work)
    arguments = tuple(sorted(asked.defines.items()))
    warps = asked.threads // WARP
    blocks = asked.tiles.blocks if "HEAD" in asked.defines else 1
    a_round, cycles, outside, bound = _loop(
        asked.source, asked.kernel, arguments, gpu, warps, blocks
    )
    moved, shown = asked.moved, dict[str, float]()
    if a_round.flops:
        shown = {"a round": cycles, **busy(a_round, gpu, warps * blocks)}
        # of a row that is walked over
        products = 2 * PRODUCTS[asked.kernel] * asked.tiles.block * asked.defines["HEAD"]
        tiles = tiles_of_blocks(asked, warps * a_round.flops // products)
        each = [n * cycles + outside for n in tiles]
        seconds = dealt(each, gpu.processors * blocks) / gpu.clock
        work = float(sum(tiles) * warps * a_round.flops)
    else:
        code = _code(asked.source, asked.kernel, arguments, gpu.architecture)
        once = count(way(code))
        threads = math.prod(asked.grid) * asked.threads
        a_thread = sum(16 * n for (_, width), n in once.accesses.items() if width == 16)
        # loops are run as often as it takes to move the bytes; of loops without 16-byte accesses it
        # is not known
        rounds = max(1.0, moved / (threads * a_thread)) if a_thread else 0.0
        units = busy(once, gpu, threads / 32 * rounds)
        bound = max(units, key=lambda unit: units[unit])
        seconds, work = units[bound] / (gpu.processors * gpu.clock), 0.0
    if moved / gpu.memory >= seconds:
        bound = "memory"
    return Prediction(max(seconds, moved / gpu.memory), bound, moved, work, shown)


def step(config: Config, B: int, T: int, gpu: Gpu) -> dict[str, tuple[int, Prediction]]:
    """Return kernel -> (launches, all of them together) of a training step."""
    layout = decoder_layout(config)
    with recording(gpu) as device:
        master, m, v, grad = (device.empty((layout.size,), np.float32) for _ in range(4))
        params = ops_bf16.parameters(layout.views(master))
        device.asked.clear()  # not in every step
        ids = device.empty((B, T), np.int32)
        with ops_bf16.step():
            _, cache = loss_forward(ops_bf16, params, config, ids, ids)
            loss_backward(1.0, cache, layout.views(grad))
            del cache
        ops_bf16.global_norm(grad)
        settings = {"step": 1, "n_decayed": layout.n_decayed, "grad_scale": 1.0, **SETTINGS}
        ops_bf16.adamw(master, m, v, grad, **settings)
    found: dict[str, tuple[int, Prediction]] = {}
    for asked in device.asked:
        name = asked.kernel if isinstance(asked, Launch) else "products (cuBLAS)"
        one = predict(asked, gpu)
        n, sum_of = found.get(name, (0, Prediction(0.0, one.bound, 0.0, 0.0)))
        summed = ("seconds", "moved", "operations")
        both = {each: getattr(sum_of, each) + getattr(one, each) for each in summed}
        found[name] = n + 1, one._replace(**both)
    return found


def rows(name: str, config: Config, B: int, T: int) -> Iterator[Row]:
    """Yield the table: each kernel of a step, attention, the step, and eight GPUs."""
    gpu = MODELS[name]
    kernels = step(config, B, T, gpu)
    for kernel, (n, p) in sorted(kernels.items(), key=lambda item: -item[1][1].seconds):
        amount = f"{p.moved / 1e9:.2f} GB, {p.moved / p.seconds / 1e12:.2f} TB/s"
        if p.operations:
            amount += f", {p.operations / p.seconds / 1e12:.0f} TFLOP/s done"
        yield Row(f"{kernel}, {n} of a step", p.seconds, note=f"{p.bound}: {amount}")
        if p.a_round:
            played, *units = (f"{unit} {n:,.0f}" for unit, n in p.a_round.items())
            note = f"{played} cycles; busy: {', '.join(units)}"
            yield Row(f"{kernel}, its loop", p.a_round["a round"] / gpu.clock, note=note)
    layers = config.n_layers
    work = B * T * attention_flops(T, config.n_heads, config.d_head, causal=True)
    parts = {"forward": ("attention_forward",), "backward": ("attention_dq", "attention_dkv")}
    extra = ("attention_delta", "sum_heads")
    for what, names in parts.items():
        of = names + (extra if what == "backward" else ())
        seconds = sum(kernels[k][1].seconds for k in of if k in kernels) / layers
        asked = work * (1 if what == "forward" else 2.5)
        yield Row(
            f"attention (causal) {what}", seconds, note=f"{asked / seconds / 1e12:.0f} TFLOP/s"
        )
    seconds = sum(p.seconds for _, p in kernels.values())
    asked = B * T * training_flops(config, T, causal=True)
    note = f"{B * T / seconds:,.0f} tokens/s, {asked / seconds / 1e12:.0f} TFLOP/s"
    yield Row(f"training step, {layers} layers", seconds, note=note)
    alone = sum(kernels[k][1].seconds for k in ("adamw", "square_sums"))
    size, W = decoder_layout(config).size, 8
    # slices of the gradient to who owns them, the new weights back, and their copies in bf16
    sent = (W - 1) / W * size * (4 + 4) / gpu.link
    copied = (W - 1) / W * size * (4 + 2) / gpu.memory
    whole = seconds - alone * (W - 1) / W + sent + copied
    yield Row(f"the same on {W} GPUs", whole, note=f"{W * B * T / whole:,.0f} tokens/s")
