"""``myllm bench cuda``: what each kernel, product and a whole training step take on this GPU.

First two ceilings are measured: bytes a second of a large copy on the GPU, and operations a second
of one large bf16 product. Then each op of MyLLM-1B at its training shapes, in time, the bytes or
operations that its arithmetic asks for, and their share of the ceiling; then a training step of
the model. Attention is checked against the reference at a small size in the process that is timed;
with ``--peer torch`` so are the loss and every gradient of a model, against PyTorch's. Times are
medians between events on the GPU, after a first call that compiles.
"""

import argparse
import dataclasses
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, get_args

import numpy as np
from rich.console import Console
from rich.table import Table

from accel.cuda.arrays import copy
from accel.cuda.device import zeros
from accel.cuda.linear import matmul
from reference import model
from reference import ops as reference
from reference.blocks import Recompute
from reference.config import Config
from reference.global_norm import clip_scale
from reference.ops import Ops
from reference.params import decoder_layout
from reference.presets import MYLLM_1B
from reference.types import Array, DropoutKey


class Row(NamedTuple):
    """One line of the table."""

    what: str
    ms: float
    bytes: float  # that its arithmetic moves at least; 0 for what is bound by arithmetic
    operations: float  # floating-point; 0 for what is bound by memory


def parser() -> argparse.ArgumentParser:
    """Return the command's arguments."""
    p = argparse.ArgumentParser(
        prog="myllm bench cuda",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  myllm bench cuda --batch 1 --layers 28",
    )
    p.add_argument("--batch", type=int, default=1, help="sequences of a micro-batch (default 1)")
    p.add_argument("--length", type=int, default=8192, help="tokens of a sequence (default 8192)")
    p.add_argument("--layers", type=int, default=28, help="layers of the model (default 28)")
    p.add_argument("--repeats", type=int, default=10, help="timed calls of an op (default 10)")
    p.add_argument(
        "--recompute",
        choices=get_args(Recompute),
        default="none",
        help="what our training step recomputes instead of keeping it (default none)",
    )
    p.add_argument("--peer", choices=["torch"], help="also time the same training step there")
    return p


def main(argv: list[str]) -> int:
    """Print the table; without a usable GPU, ``accel.load`` says what is missing."""
    arguments = parser().parse_args(argv)
    if min(arguments.batch, arguments.length, arguments.layers, arguments.repeats) < 1:
        print("myllm bench cuda: all numbers must be positive", file=sys.stderr)
        return 2
    import accel

    ops = accel.load("cuda", compute="bf16")
    import cupy

    peer = load_peer() if arguments.peer else None

    bench = Bench(ops, cupy, arguments.repeats)
    bench.check()
    memory, compute = bench.ceilings()
    rows = bench.op_rows(MYLLM_1B, arguments.batch, arguments.length, 1 << 28)
    tokens = arguments.batch * arguments.length
    config = dataclasses.replace(MYLLM_1B, n_layers=arguments.layers)
    shape = arguments.batch, arguments.length
    step_ms, peak = bench.training_step(config, *shape, arguments.recompute)

    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    runtime = cupy.cuda.runtime.runtimeGetVersion()
    console = Console()
    console.print(f"{name}, CUDA {runtime}, CuPy {cupy.__version__}")
    console.print(f"copy {memory / 1e12:.2f} TB/s, bf16 product {compute / 1e12:.0f} TFLOP/s\n")
    table = Table("op", "ms", "GB", "TB/s", "TFLOP/s", "of ceiling")
    for row in rows:
        speed, flops = row.bytes / row.ms * 1e3, row.operations / row.ms * 1e3
        share = flops / compute if row.operations else speed / memory
        table.add_row(
            row.what,
            f"{row.ms:.3f}",
            f"{row.bytes / 1e9:.2f}" if row.bytes else "",
            f"{speed / 1e12:.2f}" if row.bytes else "",
            f"{flops / 1e12:.0f}" if row.operations else "",
            f"{100 * share:.0f} %",
        )
    console.print(table)
    per_token = model_operations(config, arguments.length)
    rate = tokens / step_ms * 1e3
    console.print(
        f"training step, {arguments.layers} layers, {tokens:,} tokens: {step_ms:.1f} ms, "
        f"{rate:,.0f} tokens/s, {rate * per_token / 1e12:.0f} TFLOP/s, peak {peak / 2**30:.1f} GiB"
    )
    if peer is not None:
        small = dataclasses.replace(config, n_layers=min(2, config.n_layers))
        check_peer(ops, peer, small, 1, min(arguments.length, 256))
        console.print(str(bench.compare(peer, config, *shape, arguments.recompute)))
    return 0


class Comparison(NamedTuple):
    """A training step of ours beside a peer's; alternating, medians."""

    peer: str
    ours_ms: float
    theirs_ms: float
    ours_bytes: int
    theirs_bytes: int

    def __str__(self) -> str:
        return (
            f"beside {self.peer}: step {self.ours_ms:.1f} / {self.theirs_ms:.1f} ms, ratio "
            f"{self.ours_ms / self.theirs_ms:.3f}; peak memory {self.ours_bytes / 2**30:.1f} / "
            f"{self.theirs_bytes / 2**30:.1f} GiB, ratio {self.ours_bytes / self.theirs_bytes:.3f}"
        )


def load_peer() -> Any:
    """Return the module of PyTorch's side.

    Raises
    ------
    ImportError
        When PyTorch is missing, or cannot use the GPU.
    """
    try:
        bench_torch = importlib.import_module("accel.cuda.bench_torch")
    except ImportError as error:
        raise ImportError(f"--peer torch needs PyTorch: pip install torch ({error})") from error
    why = bench_torch.missing()
    if why is not None:
        raise ImportError(why)
    return bench_torch


def check_peer(ops: Ops, peer: Any, config: Config, B: int, T: int, **how: Any) -> None:
    """Compare loss and gradients with the peer's at the shapes given.

    Raises
    ------
    ValueError
        When they differ by more than bf16 explains.
    """
    # far enough from the initial weights that no gradient is all rounding
    ours = TrainingStep(ops, config, B, T, spread=3.0)
    theirs = peer.Peer(config, ours.initial, ours.ids, ours.targets, **how)
    loss, gradients = theirs.gradient()
    errors = {"the loss": abs(ours.gradient() / loss - 1)}
    found = ours.layout.views(ops.to_numpy(ours.grad) / ours.ids.size)
    for name, gradient in gradients.items():
        size = float(np.linalg.norm(gradient))
        errors[f"the gradient of {name}"] = float(np.linalg.norm(found[name] - gradient)) / size
    for what, error in errors.items():
        if not error <= 8 * 2**-8:  # both round to 8 bits, each in some places of its own
            raise ValueError(
                f"{what} differs from the peer's by {error:.1e}: the times would mean nothing"
            )


def model_operations(config: Config, length: int) -> float:
    """Return the floating-point operations of training on one token.

    6 for each parameter in a product, and causal attention: 6·T·d a head, as a query sees T/2 keys
    on average and two products forward, four backward, take 2·d each. What is computed a second
    time is not counted.
    """
    matrices = decoder_layout(config).n_decayed
    return 6.0 * float(matrices) + config.n_layers * config.n_heads * 6.0 * length * config.d_head


class Bench:
    """The backend, and CuPy for its events and memory pool."""

    def __init__(self, ops: Any, cupy: Any, repeats: int):
        self.ops, self.cupy, self.repeats = ops, cupy, repeats

    def time(self, call: Callable[[], Any]) -> float:
        """Return the median time of a call in ms."""
        call()
        times = []
        for _ in range(self.repeats):
            begin, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(self.cupy.cuda.get_elapsed_time(begin, end))
        return float(statistics.median(times))

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
        for a, b in zip(got, wanted, strict=True):
            error = np.linalg.norm(self.ops.to_numpy(a) - b) / np.linalg.norm(b)
            if not error < 0.01:  # bf16 gives 0.003
                raise ValueError(
                    f"attention on this GPU is off by {error:.1e} from the reference: the times "
                    "would mean nothing; run python -m pytest tests/gpu"
                )

    def ceilings(self, n: int = 1 << 29, m: int = 8192) -> tuple[float, float]:
        """Return bytes a second of copying n floats, operations a second of an m × m product."""
        a, b = (zeros((n,), np.float32) for _ in range(2))
        memory = 8 * n / self.time(lambda: copy(b, a)) * 1e3
        x, y, out = (self.random(m, m) for _ in range(3))
        compute = 2 * m**3 / self.time(lambda: matmul(x, y, out)) * 1e3
        return memory, compute

    def op_rows(self, config: Config, B: int, T: int, flat_size: int) -> list[Row]:
        """Return the ops of a layer, of the head and on flat buffers, at a model's shapes."""
        ops, c = self.ops, config
        N, D, F, V, d = B * T, c.d_model, c.d_ff, c.vocab_size, c.d_head
        Hq, Hkv = c.n_heads, c.n_kv_heads
        H = Hq + 2 * Hkv
        rows: list[Row] = []

        def pair(
            name: str,
            forward: Callable[[], tuple[Any, Any]],
            dout: Any,
            moved: tuple[float, float] = (0, 0),
            operations: tuple[float, float] = (0, 0),
            **out: Any,
        ) -> None:
            cache = forward()[1]
            backward = getattr(ops, f"{name.split()[0]}_backward")
            rows.append(Row(f"{name} forward", self.time(forward), moved[0], operations[0]))
            ms = self.time(lambda: backward(dout, cache, **out))
            rows.append(Row(f"{name} backward", ms, moved[1], operations[1]))

        x = self.random(B, T, D)
        gain = ops.from_numpy(np.ones(D, np.float32))
        pair("add", lambda: ops.add_forward(x, x), x, (6 * N * D, 0))
        rows.pop()  # its backward copies nothing
        moved = (4.0 * N * D, 6.0 * N * D)
        pair("rmsnorm", lambda: ops.rmsnorm_forward(x, gain, eps=1e-5), x, moved)
        bias = ops.from_numpy(np.zeros(D, np.float32))
        pair("layernorm", lambda: ops.layernorm_forward(x, gain, bias, eps=1e-5), x, moved)
        key = DropoutKey(seed=0, step=1, sample=0, site=0)
        moved = (4.0 * N * D, 4.0 * N * D)
        pair("dropout", lambda: ops.dropout_forward(x, p=0.1, key=key), x, moved)
        h = self.random(B, T, 2 * F)
        half = self.random(B, T, F)
        for name in ("gelu", "gelu_tanh", "relu"):
            forward = partial(getattr(ops, f"{name}_forward"), half)
            pair(name, forward, half, (4.0 * N * F, 6.0 * N * F))
        pair("swiglu", lambda: ops.swiglu_forward(h), half, (6.0 * N * F, 10.0 * N * F))
        qkv = self.random(B, T, H, d)
        turn = {"base": c.rope_base, "rotate_heads": Hq + Hkv}
        moved = (4.0 * N * H * d, 4.0 * N * H * d)
        pair("rope", lambda: ops.rope_forward(qkv, **turn), qkv, moved)
        q, k, v = ops.split_heads_forward(qkv, heads=(Hq, Hkv, Hkv))[0]
        do = self.random(B, T, Hq, d)
        square = float(B) * Hq * T * T * d
        work = (2 * square, 5 * square)
        pair("attention (causal)", lambda: ops.attention_forward(q, k, v), do, operations=work)
        ids = np.broadcast_to(np.arange(T, dtype=np.int32) * 4 // T, (B, T))
        documents = ops.from_numpy(np.ascontiguousarray(ids))
        packed = partial(ops.attention_forward, q, k, v, documents=documents)
        quarter = (square / 2, 5 * square / 4)
        pair("attention (causal, 4 documents)", packed, do, operations=quarter)
        narrow = [self.random(B, T, 2 * heads, d // 2) for heads in (Hq, Hkv, Hkv)]
        do = self.random(B, T, 2 * Hq, d // 2)
        slim = partial(ops.attention_forward, *narrow)
        pair(f"attention (causal, width {d // 2})", slim, do, operations=work)
        for name, wide, to in (("qkv", D, H * d), ("gate/up", D, 2 * F), ("down", F, D)):
            a, w, dy = self.random(B, T, wide), self.random(wide, to), self.random(B, T, to)
            work = (2.0 * N * wide * to, 4.0 * N * wide * to)
            call = lambda a=a, w=w: ops.linear_forward(a, w)  # noqa: E731
            pair(f"linear ({name})", call, dy, operations=work)
        table = self.random(V, D)
        ids = ops.from_numpy(np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32))
        moved = (4.0 * N * D, 2.0 * N * D + 4.0 * V * D)
        pair("embedding", lambda: ops.embedding_forward(ids, table), x, moved)
        loss = lambda: ops.linear_cross_entropy_forward(x, table, ids)  # noqa: E731
        rows.append(Row("linear_cross_entropy", self.time(loss), 0, 6.0 * N * V * D))
        n = flat_size
        flat = [zeros((n,), np.float32) for _ in range(4)]
        rates = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
        step = lambda: ops.adamw(*flat, step=1, n_decayed=n, **rates)  # noqa: E731
        copies = ops.parameters({"weight": flat[0].reshape(1, n)})  # while held, adamw writes them
        rows.append(Row(f"adamw ({n:,} parameters)", self.time(step), 30.0 * n, 0))
        del copies
        add = lambda: ops.accumulate(flat[0], flat[1])  # noqa: E731
        rows.append(Row(f"accumulate ({n:,})", self.time(add), 12.0 * n, 0))
        norm = lambda: ops.square_sums(flat[0])  # noqa: E731
        rows.append(Row(f"square_sums ({n:,})", self.time(norm), 4.0 * n, 0))
        return rows

    def training_step(
        self, config: Config, B: int, T: int, recompute: Recompute = "none"
    ) -> tuple[float, int]:
        """Return the time of a training step in ms and the memory it needed in bytes."""
        self.cupy.get_default_memory_pool().free_all_blocks()
        step = TrainingStep(self.ops, config, B, T, recompute)
        step.step()  # shows how large the arena must be
        return self.time(step.step), self.held()

    def held(self) -> int:
        """Return the bytes of the GPU's memory that the backend holds."""
        return int(self.cupy.get_default_memory_pool().total_bytes())

    def compare(
        self, peer: Any, config: Config, B: int, T: int, recompute: Recompute, **how: Any
    ) -> Comparison:
        """Time our training step and a peer's in turn: ours first, then last, and so on."""
        self.cupy.get_default_memory_pool().free_all_blocks()
        ours = TrainingStep(self.ops, config, B, T, recompute)
        for _ in range(2):
            ours.step()
        peer.forget_peak()
        theirs = peer.Peer(config, ours.initial, ours.ids, ours.targets, **how)
        for _ in range(3):  # the compiler, and its second thoughts
            theirs.step()
        sides = {"ours": ours.step, "theirs": theirs.step}
        times: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(self.repeats):
            for name in list(sides) if turn % 2 == 0 else list(sides)[::-1]:
                times[name].append(self.wall(sides[name]))
        return Comparison(
            f"PyTorch {peer.torch.__version__}",
            statistics.median(times["ours"]),
            statistics.median(times["theirs"]),
            self.held(),
            peer.peak(),
        )

    def wall(self, call: Callable[[], Any]) -> float:
        """Return the time in ms until the GPU is done with a call, whichever library made it."""
        self.cupy.cuda.Device().synchronize()
        started = time.perf_counter()
        call()
        self.cupy.cuda.Device().synchronize()
        return 1e3 * (time.perf_counter() - started)


class TrainingStep:
    """A model of ours with its optimizer, ready to train on random tokens, all of them targets."""

    def __init__(
        self,
        ops: Ops,
        config: Config,
        B: int,
        T: int,
        recompute: Recompute = "none",
        spread: float = 1.0,
    ) -> None:
        self.ops, self.config, self.recompute = ops, config, recompute
        self.layout = decoder_layout(config)
        flat = self.layout.init(0)
        flat[: self.layout.n_decayed] *= np.float32(spread)
        self.initial = self.layout.views(flat)
        self.master = ops.from_numpy(flat)
        self.m, self.v, self.grad = (zeros(flat.shape, np.float32) for _ in range(3))
        rng = np.random.default_rng(0)
        self.ids, self.targets = (
            rng.integers(0, config.vocab_size, (B, T)).astype(np.int32) for _ in range(2)
        )
        self._given = ops.from_numpy(self.ids), ops.from_numpy(self.targets)
        self.params = ops.parameters(self.layout.views(self.master))
        self.steps = 0

    def gradient(self) -> float:
        """Return the mean loss; the gradient of the sum is then in ``grad``."""
        with self.ops.step():
            loss, cache = model.loss_forward(
                self.ops, self.params, self.config, *self._given, recompute=self.recompute
            )
            model.loss_backward(1.0, cache, self.layout.views(self.grad))
            del cache
        return loss.total / loss.n_valid

    def step(self) -> None:
        """Take a training step."""
        self.gradient()
        self.steps += 1
        n = self.ids.size
        self.ops.adamw(
            self.master,
            self.m,
            self.v,
            self.grad,
            step=self.steps,
            lr=1e-4,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=0.1,
            n_decayed=self.layout.n_decayed,
            grad_scale=clip_scale(self.ops.global_norm(self.grad) / n, 1.0) / n,
        )
        self.params = self.ops.parameters(self.layout.views(self.master))
