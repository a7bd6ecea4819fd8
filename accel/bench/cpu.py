"""``myllm bench cpu``: the cpu backend beside PyTorch, in one process, on the same threads.

Results and gradients are checked before anything is timed; ``timing.py`` says how. PyTorch is
optional: without it our own times are printed.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np

from accel import READING, load, offered
from accel.bench import bandwidth, llmc, report, scaling
from accel.bench.cases import OpCase, attention, products, small_ops
from accel.bench.report import Row
from accel.bench.timing import Function, alternate, check, relative_error, settled, within
from accel.bench.training import SMALL, Training, adamw, adamw_state, muon, muon_state
from accel.cpu.ops import SOURCES
from accel.threads import alone, available_cores, set_threads, threads
from reference.boundary import FEW
from reference.config import Config
from reference.ops import HOST, Ops, backend
from reference.presets import GPT2_SMALL
from reference.types import KVCache

NARROW = replace(SMALL, d_model=128, n_layers=4, n_heads=4, d_head=32, d_ff=352)
LARGE = replace(SMALL, d_model=512, n_layers=11, n_heads=8, d_ff=1408)


class Bars(NamedTuple):
    """What a step promises beside PyTorch's."""

    eager: float = 0.80  # float32 / eager
    compiled: float | None = 0.93  # float32 / compiled
    halves: float | None = 0.25  # bf16 / eager float32
    autocast: float = 0.68  # bf16 / autocast, the better of eager and compiled


class Step(NamedTuple):
    """A model to train."""

    name: str
    config: Config
    batch: int
    length: int
    bars: Bars = Bars()


STEPS = (
    Step("12.6 M, T = 512", SMALL, 8, 512),
    Step("12.6 M, T = 1024", SMALL, 4, 1024),
    Step("35 M, T = 1024", LARGE, 4, 1024),
)
GPT2 = Step("GPT-2 124 M, B·T = 4·64", GPT2_SMALL, 4, 64, Bars(0.85, None, None, 0.60))
MEMORY = {"float32": 0.40, "bf16": 0.35}  # of what PyTorch's float32 step takes
DECODE = {"float32": 0.55, "bf16": 0.40}  # of PyTorch's time in float32


def peers() -> Any:
    """Return the module of PyTorch's sides, or None without PyTorch."""
    if importlib.util.find_spec("torch") is None:
        return None
    from accel.bench import peer

    peer.set_threads(threads())
    return peer


class Bench:
    """The parts; each yields rows as it measures them."""

    def __init__(self, modes: list[str], peer: Any, *, quick: bool, compiled: bool) -> None:
        self.modes, self.peer, self.quick, self.compiled = modes, peer, quick, compiled

    def beside(
        self, what: str, bar: float | None, ours: Function, theirs: Function | None, **how: Any
    ) -> Row:
        """Time ours beside theirs, where there is one."""
        functions = {"ours": ours} | ({} if theirs is None else {"theirs": theirs})
        times = alternate(functions, quick=self.quick, **how)
        return Row(what, times["ours"], times.get("theirs"), None if theirs is None else bar)

    def step(self, step: Step, compiled: bool) -> Iterator[Row]:
        """Compare training steps, a mode after the other: memory is laid out for one kind of step.

        (Of two in turns each would find the places of the other.)
        """
        name, config, batch, length, bars = step
        for mode in self.modes:
            model = Training(load("cpu", compute=mode), config, batch, length)
            functions: dict[str, Function] = {"ours": model.step}
            if self.peer is not None:
                given = config, model.initial, model.ids, model.targets
                peer = partial(self.peer.Peer, *given)
                plain = peer(kind="float32")
                model.check(
                    f"{name}, {mode}", 1e-4 if mode == "float32" else 1e-1, *plain.gradient()
                )
                functions["float32 eager"] = plain.step
                if mode == "bf16":
                    functions["bf16 eager"] = peer(kind=mode).step
                if compiled:
                    functions[f"{mode} compiled"] = peer(kind=mode, compiled=True).step
            times = alternate(functions, sample=0.0, want=7, budget=120, quick=self.quick)
            ours, eager = times["ours"], times.get("float32 eager")
            if eager is None:
                yield Row(f"{name}, {mode}", ours)
            elif mode == "bf16":
                yield Row(f"{name}, bf16 / eager float32", ours, eager, bars.halves)
                best = min(seconds for side, seconds in times.items() if side.startswith("bf16 "))
                which = "autocast, better of two" if compiled else "autocast"
                yield Row(f"{name}, bf16 / {which}", ours, best, bars.autocast)
            else:
                yield Row(f"{name}, float32 / eager", ours, eager, bars.eager)
                if compiled:
                    other = times["float32 compiled"]
                    yield Row(f"{name}, float32 / compiled", ours, other, bars.compiled)

    def share(self, step: Step) -> Row:
        """Measure the part of a float32 step that is neither products nor attention."""
        from accel.cpu import attention, gemm

        model = Training(load("cpu"), step.config, step.batch, step.length)
        inner = gemm.gemm, attention.attention_forward, attention.attention_backward
        times = [within(model.step, *inner) for _ in range(3 if self.quick else 12)]
        inside, whole = np.median(times[2:], axis=0)
        what = f"{step.name}, outside products and attention / all"
        return Row(what, whole - inside, whole, 0.08)

    def ops(self, ops: Ops, cases: Iterable[OpCase], **how: Any) -> Iterator[Row]:
        """Compare ops, forward and backward together, within a step as in training."""
        for case in cases:
            with settled(ops, partial(case.run, ops)):
                yield from self.op(ops, case, **how)

    def op(self, ops: Ops, case: OpCase, *, mode: str = "float32", **how: Any) -> Iterator[Row]:
        """Compare an op; where PyTorch has one with ``out=``, with that as well."""
        ours = partial(case.run, ops)
        if self.peer is None:
            yield self.beside(case.what, case.bar, ours, None, **how)
            return
        theirs = self.peer.op(case)
        for mine, other in zip(ours(), self.peer.arrays(theirs()), strict=True):
            check(case.what, relative_error(mine, other), case.limit)
        if mode == "bf16":
            theirs = self.peer.op(case, self.peer.torch.bfloat16)
        yield self.beside(case.what, case.bar, ours, theirs, **how)
        if (into := self.peer.into(case)) is not None:
            what = f"{case.what}, torch with out="
            yield self.beside(what, 1.0, ours, into, sample=0.02, want=7, budget=8)

    def attention(self) -> Iterator[Row]:
        """Compare attention forward and backward."""
        for mode in self.modes:
            for batch, length in ((8, 512), (2, 2048), (1, 1021), (1, 8192)):
                case, ops = attention(length, batch, mode), load("cpu", compute=mode)
                yield from self.ops(ops, [case], mode=mode, sample=0.05, budget=25)

    def adamw(self) -> Row:
        """Compare AdamW."""
        ops, state, theirs = load("cpu"), adamw_state(), None
        if self.peer is not None:
            theirs, weights = self.peer.adamw(*state)
            mine = [array.copy() for array in state]
            adamw(ops, mine)()
            theirs()
            check("adamw", relative_error(mine[0], weights()), 1e-6)
        ours = adamw(ops, state)
        return self.beside("adamw, 12.6 M / fused", 0.9, ours, theirs, budget=15)

    def muon(self) -> Iterator[Row]:
        """Compare Muon, the products of which PyTorch makes of bfloat16 in any case."""
        for config in (NARROW, SMALL, LARGE):
            for mode in self.modes:
                what = f"muon, blocks {config.d_model} wide, {mode}"
                ops, matrices, theirs = load("cpu", compute=mode), muon_state(config), None
                ours = partial(muon, ops, matrices)
                if self.peer is not None:
                    theirs, weights = self.peer.muon(matrices)
                    mine = [w for matrix in matrices for w, _, _ in matrix.apart()]
                    before = [w.copy() for w in mine]
                    ours()
                    theirs()
                    for old, new, other in zip(before, mine, weights(), strict=True):
                        check(what, relative_error(new - old, other - old), 5e-2)
                with settled(ops, ours):
                    yield self.beside(what, None, ours, theirs, sample=0.02, want=7, budget=10)

    def small_ops(self) -> Iterator[Row]:
        """Compare the ops that are bound by memory."""
        yield from self.ops(load("cpu"), small_ops(), sample=0.01, want=5, budget=4)
        yield self.adamw()

    def products(self) -> Iterator[Row]:
        """Compare linear layers, by themselves: what they read is in a cache."""
        yield from self.ops(load("cpu"), products(), sample=0.01, want=9, budget=4)

    def few(self) -> Iterator[Row]:
        """Compare ops on a few kilobytes, which stay in one thread, with their work alone."""
        ops = load("cpu")
        bare = cast(Ops, SimpleNamespace(**backend("accel.cpu.ops", HOST, *SOURCES)))
        for case in small_ops([(16, 64)]):
            if sum(array.nbytes for array in case.arrays) <= FEW:
                own = alone(partial(case.run, bare))
                what = f"{case.what} / set to one thread"
                yield self.beside(what, None, partial(case.run, ops), own, sample=0.01, want=5)

    def memory(self) -> Iterator[Row]:
        """Compare what training adds to the resident memory, each side in a process of its own."""

        def added(side: str, mode: str) -> float:
            words = ["-m", "accel.bench.memory", side, mode, str(threads())]
            done = subprocess.run(
                [sys.executable, *words], capture_output=True, encoding="utf-8", check=False
            )
            if done.returncode:
                raise ValueError(f"the memory of {side} was not measured: {done.stderr.strip()}")
            return float(done.stdout.split()[-1])

        theirs = None if self.peer is None else added("torch", "float32")
        for mode in self.modes:
            what = f"memory of training, 12.6 M, {mode}"
            bar = None if theirs is None else MEMORY[mode]
            yield Row(what, added("ours", mode), theirs, bar, "B")

    def decode(self) -> Iterator[Row]:
        """Compare one token of one row, with 128 and 512 tokens before it."""
        for mode in (*self.modes, READING):
            model = Training(load("cpu", compute=mode), SMALL, 1, 8)
            for position in (128, 512):
                cache = model.ops.kv_cache(model.params, SMALL, 1, 1024)
                rng, theirs = np.random.default_rng(2), None
                for layer, k in enumerate(cache.k):
                    drawn = rng.standard_normal((2, *k.shape), np.float32)
                    model.ops.write_kv(cache, *drawn, layer=layer, position=0)
                token = np.array([7], np.int32)
                ours = partial(model.ops.decode_step, model.params, SMALL, token, cache, position)
                what = f"decode a token, {mode} weights / torch float32, position {position}"
                if self.peer is not None:
                    kept = KVCache(*(list(map(model.ops.to_numpy, layers)) for layers in cache))
                    theirs = self.peer.decoder(SMALL, model.initial, kept, position)
                    # Q8_0 rounds weights three times as coarsely as bfloat16
                    limit = {"float32": 1e-4, "bf16": 3e-2}.get(mode, 9e-2)
                    check(what, relative_error(ours(), theirs()), limit)
                yield self.beside(what, DECODE.get(mode), ours, theirs, sample=0.02, budget=15)


PARTS: dict[str, Callable[[Bench], Iterable[Row]]] = {
    "step": lambda bench: (row for step in STEPS for row in bench.step(step, bench.compiled)),
    "share": lambda bench: map(bench.share, STEPS),
    "gpt2": lambda bench: bench.step(GPT2, False),
    "attention": Bench.attention,
    "ops": Bench.small_ops,
    "bytes": lambda bench: bandwidth.rows(load("cpu"), quick=bench.quick),
    "products": Bench.products,
    "muon": Bench.muon,
    "few": Bench.few,
    "busy": lambda bench: scaling.busy(quick=bench.quick),
    "memory": Bench.memory,
    "decode": Bench.decode,
}
APART = ("llmc",)  # what has to be asked for


def main(argv: list[str]) -> int:
    """Run ``myllm bench cpu``."""
    usual = [*PARTS, "compiled"]  # the last is PyTorch's compiler, in the part step
    known = [*usual, *APART]
    p = report.parser(
        "cpu",
        "Time the cpu backend beside PyTorch (optional) on the same threads.",
        "cpu --parts step,attention --threads 2 --chart bench.svg",
    )
    p.add_argument("--parts", help=f"of {', '.join(known)}; default: all but the last")
    p.add_argument("--scaling", action="store_true", help="speed on 1 … all cores, and of ranks")
    p.add_argument(
        "--llmc", type=Path, metavar="DIR", help="a checkout of llm.c, for the part llmc"
    )
    p.add_argument("--threads", type=int, default=None, help="default: the cores available")
    p.add_argument("--quick", action="store_true", help="two samples each: no figures to keep")
    given = report.parse(p, argv)
    if given.scaling and (given.parts or given.threads):
        p.error("--scaling takes every number of threads, and no other part")
    chosen = usual if given.parts is None else given.parts.split(",")
    unknown = [part for part in chosen if part not in known]
    if unknown:
        p.error(f"no part {unknown[0]!r}; known: {', '.join(known)}")
    if ("llmc" in chosen) != (given.llmc is not None):
        p.error("--parts llmc and --llmc DIR, a checkout of llm.c, go together")
    if given.threads is not None:
        set_threads(given.threads)
    modes = list(offered("cpu"))
    if given.scaling:
        about = f"{report.machine('numpy', 'numba')}, {available_cores()} cores"
        measured = {"scaling": partial(scaling.rows, modes, quick=given.quick)}
        return report.run(p, given, about, measured)
    bench = Bench(modes, peers(), quick=given.quick, compiled="compiled" in chosen)
    about = f"{report.machine('numpy', 'numba', 'torch')}, {threads()} threads"
    parts: dict[str, Callable[[], Iterable[Row]]] = {
        name: partial(part, bench) for name, part in PARTS.items() if name in chosen
    }
    if "llmc" in chosen:
        parts["llmc"] = partial(llmc.compare, given.llmc, modes, quick=given.quick)
    return report.run(p, given, about, parts)
