"""``myllm bench cuda``: what each kernel, product and a whole training step take on this GPU.

First attention's path (unless ``--attention`` names one) and the algorithms of the products are
chosen, as a run at these shapes chooses them, and two ceilings are measured: bytes a second of a
large copy on the GPU, and operations a second of one large bf16 product. Then each product of a
training step is shown, by what was chosen beside cuBLAS's own choice, and each op of the family at
the shapes of a model (``--config``), in time, the bytes or operations that its arithmetic asks for,
and their share of the ceiling; then a training step of the model, and tokens that it writes (of one
text or of eight at once, until their logits are in the host's memory). Attention is checked against
the reference at a small size in the process that is timed; with ``--peer torch`` so are the loss
and every gradient of the model, against PyTorch's.

With ``--model H100`` nothing is measured and no GPU is needed: ``predict.py`` says what such a GPU
would take, by arithmetic, and with NVRTC and nvdisasm (pip install nvidia-cuda-nvdisasm).

Times of ops are medians between events on the GPU, after a first call that compiles. Many calls
are queued behind copies that keep the GPU busy, so that it goes from one to the next without
waiting for Python, which takes longer over a small op than the GPU does. Where it did wait, as for
ops that read from the device, the row says so. Times of steps and of tokens are a clock's, from an
idle GPU to an idle GPU. A step's peak memory is the most that CuPy's pool has held, the first step
included, whose arrays lie singly; beside it stands what the pool holds after the last.
"""

import dataclasses
import importlib
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, get_args

import numpy as np

from accel import AUTO, DEFAULT, Attention
from accel.bench import predict, report
from accel.bench.cases import OpCase
from accel.bench.gpus import MODELS
from accel.bench.report import Row
from accel.bench.timing import Function, check, medians, relative_error
from accel.bench.training import SETTINGS, Training
from accel.cuda import attention, paths, products
from accel.cuda.device import current, zeros
from accel.cuda.linear import matmul
from reference import ops as reference
from reference.blocks import Recompute
from reference.config import Config
from reference.flops import attention_flops, training_flops
from reference.ops import OPS, Ops
from reference.params import decoder_layout
from reference.presets import GPT2_SMALL, GPT2_TEXTBOOK, MYLLM_1B
from reference.types import Array, DropoutKey, KVCache

CONFIGS = {"myllm-1b": MYLLM_1B, "gpt2-small": GPT2_SMALL, "gpt2-textbook": GPT2_TEXTBOOK}
FEW, MANY = 8192, 32_768  # tokens of a micro-batch
ROOM = 80 * 10**9  # bytes of a GPU that has room for many: myllm plan
FILL = 1 << 28  # bytes that a copy moves to keep the GPU busy, about 0.2 ms
MOST_CALLS, SAMPLE = 50, 0.02  # of an op, queued at once; seconds that they shall take
DEVICE_TO_DEVICE = 3  # cudaMemcpyKind


def main(argv: list[str]) -> int:
    """Print the table; without a usable GPU, ``accel.load`` says what is missing."""
    p = report.parser("cuda", __doc__ or "", "cuda --batch 1 --layers 28")
    p.add_argument(
        "--config", choices=list(CONFIGS), default="myllm-1b", help="the model (default myllm-1b)"
    )
    p.add_argument(
        "--batch",
        type=int,
        help=f"sequences of a micro-batch (default as many as have {MANY:,} tokens; {FEW:,} beside "
        f"a peer, and on GPUs with less than {ROOM // 10**9} GB)",
    )
    p.add_argument("--length", type=int, help="tokens of a sequence (default the model's context)")
    p.add_argument("--layers", type=int, help="layers of the model (default its own)")
    p.add_argument("--repeats", type=int, default=10, help="timed calls of an op (default 10)")
    p.add_argument(
        "--recompute",
        choices=get_args(Recompute),
        default="auto",
        help="what our training step recomputes instead of keeping it (default auto: nothing)",
    )
    p.add_argument(
        "--attention",
        choices=get_args(Attention),
        default=AUTO,
        help="by which kernels it goes (default auto: the fastest here)",
    )
    p.add_argument("--peer", choices=["torch"], help="also time the same training step there")
    p.add_argument(
        "--parts",
        nargs="+",
        choices=["products", "ops", "attention", "step", "decode", "peer"],
        metavar="PART",
        help="of %(choices)s (default all but attention alone, which ops has, too)",
    )
    p.add_argument(
        "--model",
        choices=list(MODELS),
        help="print what this GPU would take, by the machine code of the kernels; needs none",
    )
    given = report.parse(p, argv)
    numbers = given.batch, given.length, given.layers, given.repeats
    if min(1 if n is None else n for n in numbers) < 1:
        p.error("all numbers must be positive")
    if given.parts is not None and ("peer" in given.parts) != (given.peer is not None):
        p.error("--parts peer and --peer torch go together")
    whole = CONFIGS[given.config]
    layers, T = given.layers or whole.n_layers, given.length or whole.context_length
    config = dataclasses.replace(whole, n_layers=layers, context_length=T)
    if given.model is not None:
        shape = given.batch or default_batch(MODELS[given.model].room, T, False), T
        about = (
            f"predicted of an NVIDIA {given.model}, {shape[0]} sequences of {T:,}, {given.config}"
        )
        return report.run(
            p, given, about, {"the machine code": lambda: predict.rows(given.model, config, *shape)}
        )
    import accel

    ops = accel.load("cuda", compute="bf16")
    import cupy

    peer = load_peer() if given.peer else None
    bench = Bench(ops, cupy, given.repeats)
    room = cupy.cuda.runtime.memGetInfo()[1]
    shape = given.batch or default_batch(room, T, peer is not None), T
    path, chosen = paths.choose(paths.shapes_of(config, shape[0]), remember=False)
    attention.take(path if given.attention == AUTO else given.attention)
    named = "" if given.attention == AUTO else f"\n\nattention by {given.attention}, as asked"
    multiplied = products.choose(config, shape[0], given.recompute, remember=False)
    products.take(multiplied.products)
    bench.check()
    bench.measure_ceilings()

    def cases() -> Iterator[OpCase]:
        return bench.cases(config, *shape, 1 << 28)

    parts = {
        "products": lambda: product_rows(multiplied),
        "ops": lambda: bench.op_rows(cases()),
        "attention": lambda: bench.op_rows(case for case in cases() if case.op == "attention"),
        "step": lambda: bench.step(config, *shape, given.recompute),
        "decode": lambda: bench.decode(config),
    }
    if peer is not None:
        small = dataclasses.replace(config, n_layers=min(2, config.n_layers))
        check_peer(ops, peer, small, 1, min(T, 256))
        parts["peer"] = lambda: bench.compare(peer, config, *shape, given.recompute)
    asked_for = given.parts or [part for part in parts if part != "attention"]
    parts = {part: rows for part, rows in parts.items() if part in asked_for}
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    about = (
        f"{name}, CUDA {cupy.cuda.runtime.runtimeGetVersion()}, CuPy {cupy.__version__}, "
        f"{given.config}, {shape[0]} sequences of {T:,}\n\n"
        f"copy {bench.copied / 1e12:.2f} TB/s, bf16 product {bench.product / 1e12:.0f} TFLOP/s\n\n"
        f"{chosen}{named}\n\n{multiplied.said}"
    )
    return report.run(p, given, about, parts)


def default_batch(room: int, length: int, peer: bool) -> int:
    """Return the sequences of a micro-batch on a GPU with ``room`` bytes of memory."""
    return max(1, (MANY if room >= ROOM and not peer else FEW) // length)


def product_rows(chosen: products.Choice) -> Iterator[Row]:
    """Yield what each product of a step takes, by what was chosen beside cuBLAS's own choice."""
    for p, times, seconds, best in chosen.timed:
        speed = f"{2e-12 * p.m * p.n * p.k / seconds[best]:.0f} TFLOP/s"
        note = f"{times} of a step, {speed}, {len(seconds) - 1} algorithms beside cuBLAS's"
        yield Row(f"product {products.name(p)}", seconds[best], seconds[DEFAULT], note=note)


def load_peer() -> Any:
    """Return the module of PyTorch's side.

    Raises
    ------
    ImportError
        When PyTorch is missing, or cannot use the GPU.
    """
    try:
        peer = importlib.import_module("accel.bench.peer")
    except ImportError as error:
        raise ImportError(f"--peer torch needs PyTorch: pip install torch ({error})") from error
    why = peer.missing()
    if why is not None:
        raise ImportError(why)
    return peer


def check_peer(
    ops: Ops, peer: Any, config: Config, B: int, T: int, *, device: str = "cuda"
) -> None:
    """Raise a ``ValueError`` when loss or gradients differ by more than bf16 explains."""
    ours = Training(ops, config, B, T, clip=True)
    given = config, ours.initial, ours.ids, ours.targets
    truth, theirs = (
        peer.Peer(*given, kind=kind, device=device).gradient() for kind in ("float32", "bf16")
    )
    # what 8 bits cost depends on the model: PyTorch's own bf16 tells
    cost = max(relative_error(theirs[1][name], gradient) for name, gradient in truth[1].items())
    ours.check("the model", max(2 * cost, 8 * 2**-8), *truth)


class Bench:
    """The backend, and CuPy for its events and memory pool."""

    copied = product = float("inf")  # the ceilings, a second
    waited = False  # whether the GPU had to wait for Python in the last sample

    def __init__(self, ops: Any, cupy: Any, repeats: int):
        self.ops, self.cupy, self.repeats = ops, cupy, repeats
        self._busy: list[Array] = []  # what is copied to keep the GPU busy

    def time(self, call: Function) -> float:
        """Return the median seconds of a call on the GPU, after one that compiles."""
        call()
        n = max(1, min(MOST_CALLS, int(SAMPLE / self.wall(call))))
        return medians({"call": call}, self.repeats, partial(self.queued, n=n))["call"]

    def queued(self, call: Function, n: int) -> float:
        """Return the seconds that the GPU spends on each of n calls that it finds in its queue."""
        self._busy = self._busy or [zeros((FILL,), np.uint8) for _ in range(2)]
        for copies in (4, 32, 256):
            begin, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
            for _ in range(copies):
                self.device_copy(*self._busy)
            begin.record()
            for _ in range(n):
                call()
            self.waited = bool(begin.done)  # the copies are over, and all calls were not yet queued
            end.record()
            end.synchronize()
            if not self.waited:
                break
        return 1e-3 * float(self.cupy.cuda.get_elapsed_time(begin, end)) / n

    def device_copy(self, to: Array, array: Array) -> None:
        """Copy an array to another by CUDA's own copy."""
        device = current()
        self.cupy.cuda.runtime.memcpyAsync(
            device.address(to),
            device.address(array),
            array.nbytes,
            DEVICE_TO_DEVICE,
            device.stream(),
        )

    def wall(self, call: Function) -> float:
        """Return the seconds until the GPU is done with a call, whichever library made it."""
        self.cupy.cuda.Device().synchronize()
        started = time.perf_counter()
        call()
        self.cupy.cuda.Device().synchronize()
        return time.perf_counter() - started

    def random(self, *shape: int) -> Array:
        """Return a bf16 array; rows repeat, so that large ones are quick to make."""
        n = int(np.prod(shape))
        some = np.random.default_rng(0).standard_normal(min(n, 1 << 20)).astype(np.float32)
        x: Array = np.resize(some, n).reshape(shape)
        given: Array = self.ops.from_numpy(x, activation=True)
        return given

    def check(self) -> None:
        """Compare attention at an awkward size with the reference, on this GPU."""
        rng = np.random.default_rng(0)
        sent = [
            rng.standard_normal((1, 333, heads, 128)).astype(np.float32) for heads in (4, 2, 2, 4)
        ]
        given = [self.ops.from_numpy(x, activation=True) for x in sent]
        exact = [self.ops.to_numpy(x).astype(np.float64) for x in given]
        out, cache = self.ops.attention_forward(*given[:3])
        want, want_cache = reference.attention_forward(*exact[:3])
        got = [out, *self.ops.attention_backward(given[3], cache)]
        wanted = [want, *reference.attention_backward(exact[3], want_cache)]
        for a, b in zip(got, wanted, strict=True):  # bf16 gives 0.003
            error = relative_error(self.ops.to_numpy(a), b)
            check(
                "attention on this GPU (try python -m pytest tests/gpu)",
                error,
                0.01,
                "the reference",
            )

    def measure_ceilings(self, n: int = 1 << 29, m: int = 8192) -> None:
        """Measure copying n floats and an m × m product."""
        a, b = (zeros((n,), np.float32) for _ in range(2))
        self.copied = 8 * n / self.time(lambda: self.device_copy(b, a))
        x, y, out = (self.random(m, m) for _ in range(3))
        self.product = 2 * m**3 / self.time(lambda: matmul(x, y, out))

    def row(self, what: str, call: Function, moved: float, operations: float) -> Row:
        """Time a call and hold it against the ceiling it has."""
        return self.said(what, self.time(call), moved, operations, waited=self.waited)

    def said(
        self, what: str, seconds: float, moved: float, operations: float, *, waited: bool = False
    ) -> Row:
        """Return a row that holds a time against the ceiling it has."""
        if operations:
            speed, least = f"{operations / seconds / 1e12:.0f} TFLOP/s", operations / self.product
        else:
            rate = moved / seconds / 1e12
            speed, least = f"{moved / 1e9:.2f} GB, {rate:.2f} TB/s", moved / self.copied
        note = f"{speed}, {least / seconds:.0%} of the ceiling"
        return Row(what, seconds, note=note + (", the GPU waits for Python" if waited else ""))

    def op_rows(self, cases: Iterable[OpCase]) -> Iterator[Row]:
        """Time ops, forward and backward each."""
        for case in cases:
            forward = case.forward(self.ops)
            both = case.dout is not None
            what = f"{case.what} forward" if both else case.what
            yield self.row(what, forward, case.moved[0], case.operations[0])
            if both:
                backward = partial(
                    getattr(self.ops, f"{case.op}_backward"), case.dout, forward()[1]
                )
                yield self.row(f"{case.what} backward", backward, case.moved[1], case.operations[1])
                if OPS[case.op].adds == "backward":
                    x = case.arrays[0]
                    adding = partial(backward, plus=self.random(*x.shape))
                    moved = case.moved[1] + x.nbytes
                    yield self.row(f"{case.what} backward, plus", adding, moved, 0)

    def cases(self, config: Config, B: int, T: int, flat_size: int) -> Iterator[OpCase]:
        """Yield the ops of a layer, of the head and on flat buffers, at a model's shapes."""
        ops, c = self.ops, config
        N, D, F, V, d = B * T, c.d_model, c.d_ff, c.vocab_size, c.d_head
        Hq, Hkv = c.n_heads, c.n_kv_heads
        H = Hq + 2 * Hkv
        # gradients of their own: what is read twice comes out of the cache the second time
        x, dx = (self.random(B, T, D) for _ in range(2))
        half, dhalf = (self.random(B, T, F) for _ in range(2))
        gain, bias = ops.from_numpy(np.ones(D, np.float32)), ops.from_numpy(np.zeros(D, np.float32))
        key = DropoutKey(seed=0, step=1, sample=0, site=0)
        eps = {"eps": c.norm_eps}

        def bound(
            op: str, arrays: Any, dout: Any, n: float, to: int, fro: int, **options: Any
        ) -> OpCase:
            """Return an op that moves so many bytes for each of n numbers."""
            return OpCase(op, op, arrays, dout, options, moved=(to * n, fro * n))

        yield bound("add", (x, dx), None, N * D, 6, 0)._replace(what="add forward")
        yield bound("rmsnorm", (x, gain), dx, N * D, 4, 6, **eps)
        yield bound("layernorm", (x, gain, bias), dx, N * D, 4, 6, **eps)
        yield bound("dropout", (x,), dx, N * D, 4, 4, p=0.1, key=key)
        for name in ("gelu", "gelu_tanh", "relu"):
            yield bound(name, (half,), dhalf, N * F, 4, 6)
        yield bound("swiglu", (self.random(B, T, 2 * F),), dhalf, N * F, 6, 10)
        qkv = self.random(B, T, H, d)
        turned = {"base": c.rope_base, "rotate_heads": Hq + Hkv}
        yield bound("rope", (qkv,), qkv, N * H * d, 4, 4, **turned)

        def attention(
            what: str, arrays: Any, dout: Any, share: float = 1, **options: Any
        ) -> OpCase:
            """Return attention; its backward makes the scores again, five products for two."""
            work = share * N * attention_flops(T, Hq, d, causal=True)
            return OpCase(what, "attention", arrays, dout, options, operations=(work, 2.5 * work))

        q, k, v = ops.split_heads_forward(qkv, heads=(Hq, Hkv, Hkv))[0]
        do = self.random(B, T, Hq, d)
        yield attention("attention (causal)", (q, k, v), do)
        ids = np.broadcast_to(np.arange(T, dtype=np.int32) * 4 // T, (B, T))
        documents = ops.from_numpy(np.ascontiguousarray(ids))
        yield attention(
            "attention (causal, 4 documents)", (q, k, v), do, 1 / 4, documents=documents
        )
        narrow = tuple(self.random(B, T, 2 * heads, d // 2) for heads in (Hq, Hkv, Hkv))
        do = self.random(B, T, 2 * Hq, d // 2)
        yield attention(f"attention (causal, width {d // 2})", narrow, do)
        for name, wide, to in (("qkv", D, H * d), ("gate/up", D, 2 * F), ("down", F, D)):
            a, w, dy = self.random(B, T, wide), self.random(wide, to), self.random(B, T, to)
            work = (2.0 * N * wide * to, 4.0 * N * wide * to)
            yield OpCase(f"linear ({name})", "linear", (a, w), dy, operations=work)
        table = self.random(V, D)
        ids = ops.from_numpy(np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32))
        moved = (4.0 * N * D, 2.0 * N * D + 4.0 * V * D)
        yield OpCase("embedding", "embedding", (ids, table), x, moved=moved)
        loss = "linear_cross_entropy"
        yield OpCase(loss, loss, (x, table, ids), operations=(6.0 * N * V * D, 0))
        n = flat_size
        flat = [zeros((n,), np.float32) for _ in range(4)]
        copies = ops.parameters({"weight": flat[0].reshape(1, n)})  # while held, adamw writes them
        options = {"step": 1, "n_decayed": n, **SETTINGS}
        what = f"adamw ({n:,} parameters)"
        yield OpCase(what, "adamw", tuple(flat), options=options, moved=(30.0 * n, 0))
        del copies
        yield OpCase(f"accumulate ({n:,})", "accumulate", tuple(flat[:2]), moved=(12.0 * n, 0))
        yield OpCase(f"square_sums ({n:,})", "square_sums", (flat[0],), moved=(4.0 * n, 0))

    def count_memory(self) -> None:
        """Give back what is free, and begin to measure memory anew."""
        self._busy = []  # no part of a step's memory
        device: Any = current()
        device.trim()
        device.most = 0

    def held(self) -> str:
        """Say what CuPy's pool holds now."""
        return f"{self.cupy.get_default_memory_pool().total_bytes() / 2**20:,.0f} MiB held after it"

    def step(self, config: Config, B: int, T: int, recompute: Recompute = "auto") -> Iterator[Row]:
        """Time a training step, and look at the memory it needed."""
        self.count_memory()
        ours = Training(self.ops, config, B, T, recompute=recompute, clip=True)
        ours.step()  # shows how large the arena must be
        work = B * T * training_flops(config, T, causal=True)
        ours.step()
        seconds = medians({"step": ours.step}, self.repeats, self.wall)["step"]
        row = self.said(f"training step, {config.n_layers} layers", seconds, 0, work)
        yield row._replace(note=f"{B * T / row.ours:,.0f} tokens/s, {row.note}")
        yield Row("its peak memory", self.ops.memory(), unit="B", note=self.held())

    def decode(self, config: Config) -> Iterator[Row]:
        """Time tokens that are written, until their logits are the host's."""
        self._busy = []
        layout, ops = decoder_layout(config), self.ops
        some = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
        flat = ops.from_numpy(np.resize(np.float32(0.02) * some, layout.size))
        params = ops.parameters(layout.views(flat))
        read = sum(x.nbytes for x in params.values())
        last = config.context_length - 1

        def step(token: Array, cache: KVCache, position: int) -> None:
            where = np.full(token.shape, position)
            ops.to_numpy(ops.decode_step(params, config, token, cache, where))

        cases = (1, min(512, last)), (1, last), (8, min(512, last))
        for rows, position in dict.fromkeys(cases):
            cache = ops.kv_cache(params, config, rows, config.context_length)
            one = partial(step, ops.from_numpy(np.zeros(rows, np.int32)), cache, position)
            for _ in range(3):  # by single launches, recorded, and sent again
                one()
            seconds = medians({"step": one}, 10 * self.repeats, self.wall)["step"]
            kept = sum(x[:, : position + 1].nbytes for x in (*cache.k, *cache.v))
            what = f"a token of {'1 row' if rows == 1 else f'{rows} rows'} at {position:,}"
            row = self.said(what, seconds, read + kept, 0)
            yield row._replace(note=f"{rows / seconds:,.0f} tokens/s, {row.note}")
            del cache, one

    def compare(
        self, peer: Any, config: Config, B: int, T: int, recompute: Recompute, **how: Any
    ) -> Iterator[Row]:
        """Time our training step and a peer's in turn: ours first, then last, and so on."""
        self.count_memory()
        ours = Training(self.ops, config, B, T, recompute=recompute, clip=True)
        for _ in range(2):
            ours.step()
        peer.forget_peak()
        how = {"kind": "bf16", "device": "cuda", "compiled": True, "clip": True} | how
        theirs = peer.Peer(config, ours.initial, ours.ids, ours.targets, **how)
        for _ in range(3):  # the compiler, and its second thoughts
            theirs.step()
        sides = {"ours": ours.step, "theirs": theirs.step}
        times = medians(sides, self.repeats, self.wall)
        name = f"PyTorch {peer.torch.__version__}"
        yield Row(f"training step / {name}", times["ours"], times["theirs"], 1.0)
        peaks = self.ops.memory(), peer.peak()
        yield Row(f"its peak memory / {name}", *peaks, 1.0, "B", self.held())
