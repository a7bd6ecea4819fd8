"""``myllm bench cpu``: the cpu backend beside PyTorch, in one process, on the same threads.

Results and gradients are checked before anything is timed; ``bench_timing.py`` says how. PyTorch
is optional: without it our own times are printed.
"""

import argparse
import contextlib
import gc
import importlib.util
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from accel import bench_timing, load
from accel.bench_ops import OpCase, op_cases
from accel.bench_report import Row, about, chart, table
from accel.bench_timing import Array, Function, alternate, check, relative_error
from accel.threads import set_threads, threads
from reference.config import Config
from reference.memory import memory
from reference.model import loss_backward, loss_forward
from reference.ops import Ops
from reference.params import decoder_layout
from reference.presets import GPT2_SMALL
from reference.types import DropoutKey

SMALL = Config(
    vocab_size=8192,
    d_model=384,
    n_layers=6,
    n_heads=6,
    n_kv_heads=2,
    d_head=64,
    d_ff=1024,
    context_length=1024,
)
LARGE = Config(
    vocab_size=8192,
    d_model=512,
    n_layers=11,
    n_heads=8,
    n_kv_heads=2,
    d_head=64,
    d_ff=1408,
    context_length=1024,
)
PARTS = ("step", "compiled", "share", "gpt2", "attention", "ops", "memory", "decode")


# ---- our side ------------------------------------------------------------------------------------


class Ours:
    """A model of ours with its optimizer state, ready to train."""

    def __init__(self, config: Config, compute: str, batch: int, length: int) -> None:
        self.ops: Ops = load("cpu", compute=compute)
        self.config = config
        layout = decoder_layout(config)
        self.flat = layout.init(0)
        # far enough from initialisation that no gradient is all rounding error
        self.flat[: layout.n_decayed] *= 3
        self.grad, self.m, self.v = (np.zeros_like(self.flat) for _ in range(3))
        self.master, self.grads = layout.views(self.flat), layout.views(self.grad)
        self.n_decayed = layout.n_decayed
        rng = np.random.default_rng(1)
        shape = (batch, length)
        self.ids = rng.integers(0, config.vocab_size, shape).astype(np.int32)
        self.targets = rng.integers(0, config.vocab_size, shape).astype(np.int32)
        self.params = self.ops.parameters(self.master)
        self.steps = 0

    def gradient(self) -> float:
        """Return the mean loss; its gradient is then in ``grad``."""
        with self.ops.step():
            loss, cache = loss_forward(self.ops, self.params, self.config, self.ids, self.targets)
            loss_backward(1 / loss.n_valid, cache, self.grads)
            del cache
        return loss.total / loss.n_valid

    def step(self) -> float:
        """Take a training step."""
        loss = self.gradient()
        self.steps += 1
        self.ops.adamw(
            self.flat,
            self.m,
            self.v,
            self.grad,
            step=self.steps,
            lr=1e-5,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=0.1,
            n_decayed=self.n_decayed,
        )
        self.params = self.ops.parameters(self.master)
        return loss


def bf16_offered() -> bool:
    """Whether this machine has the mode bf16."""
    try:
        load("cpu", compute="bf16")
    except ImportError:
        return False
    return True


def peers() -> Any:
    """Return the module of PyTorch's sides, or None without PyTorch."""
    try:
        import torch
    except ImportError:
        return None
    from accel import bench_torch

    torch.set_num_threads(threads())
    return bench_torch


# ---- the parts -----------------------------------------------------------------------------------


def step_rows(
    name: str, config: Config, batch: int, length: int, compiled: bool, modes: list[str]
) -> list[Row]:
    """Compare training steps."""
    torch = peers()
    models = {mode: Ours(config, mode, batch, length) for mode in modes}
    ours = {f"ours {mode}": model.step for mode, model in models.items()}
    theirs: dict[str, Function] = {}
    if torch is not None:
        first = next(iter(models.values()))
        peer = torch.Model(config, first.master)
        loss, gradients = peer.gradient(first.ids, first.targets)
        for mode, model in models.items():
            limit = 1e-4 if mode == "float32" else 1e-1
            check(f"loss of {name} in {mode}", abs(model.gradient() / loss - 1), limit)
            for key, gradient in gradients.items():
                error = relative_error(model.grads[key], gradient)
                check(f"gradient {key} of {name} in {mode}", error, limit)
        for kind in ("float32", "bf16"):
            if kind == "float32" or "bf16" in modes:
                theirs[f"torch {kind}"] = torch.trainer(config, first, kind, compiled=False)
                if compiled:
                    theirs[f"torch {kind} compiled"] = torch.trainer(
                        config, first, kind, compiled=True
                    )
    times = alternate({**ours, **theirs}, sample=0.0, want=7, budget=120)
    rows = []
    for mode in modes:
        mine = times[f"ours {mode}"]
        if not theirs:
            rows.append(Row("step", f"{name}, {mode}", None, mine, None))
        if mode == "float32" and theirs:
            rows.append(Row("step", f"{name}, float32 / eager", 0.83, mine, times["torch float32"]))
            if compiled:
                other = times["torch float32 compiled"]
                rows.append(Row("step", f"{name}, float32 / compiled", 0.98, mine, other))
        if mode == "bf16" and theirs:
            rows.append(
                Row("step", f"{name}, bf16 / eager float32", 0.27, mine, times["torch float32"])
            )
            best = min(times[k] for k in theirs if k.startswith("torch bf16"))
            bar = 0.85 if config is SMALL else 1.0
            which = "autocast, better of two" if compiled else "autocast"
            rows.append(Row("step", f"{name}, bf16 / {which}", bar, mine, best))
    return rows


def share_row(name: str, config: Config, batch: int, length: int) -> Row:
    """Measure the part of a float32 step that is neither products nor attention."""
    from accel.cpu import linear, loss, ops

    model = Ours(config, "float32", batch, length)
    inside = 0.0

    def timed(function: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal inside
            begin = time.perf_counter()
            result = function(*args, **options)
            inside += time.perf_counter() - begin
            return result

        return run

    with contextlib.ExitStack() as stack:
        for module, function in (
            (linear, "gemm"),
            (loss, "gemm"),
            (ops, "attention_forward"),
            (ops, "attention_backward"),
        ):
            timer = timed(getattr(module, function))
            stack.enter_context(mock.patch.object(module, function, timer))
        times = []
        for _ in range(3 if bench_timing.quick else 12):
            inside, begin = 0.0, time.perf_counter()
            model.step()
            whole = time.perf_counter() - begin
            times.append((whole - inside, whole))
    outside, whole = (statistics.median(column) for column in zip(*times[2:], strict=True))
    what = f"{name}, float32, outside products and attention / the whole step"
    return Row("share", what, 0.08, outside, whole)


def attention_rows(modes: list[str]) -> list[Row]:
    """Compare attention forward and backward, causal, 8 query and 2 key/value heads of 64."""
    torch = peers()
    rows = []
    for mode in modes:
        ops = load("cpu", compute=mode)
        for batch, length in ((8, 512), (2, 2048), (1, 1021), (1, 8192)):
            rng = np.random.default_rng(0)
            qkv = rng.standard_normal((batch, length, 12, 64), dtype=np.float32)
            dout = rng.standard_normal((batch, length, 8, 64), dtype=np.float32)
            q, k, v = qkv[:, :, :8], qkv[:, :, 8:10], qkv[:, :, 10:]

            def ours(ops: Ops = ops, arrays: Any = (q, k, v), dout: Array = dout) -> Any:
                with ops.step():
                    out, cache = ops.attention_forward(*arrays)
                    return out, *ops.attention_backward(dout, cache)

            functions: dict[str, Function] = {"ours": ours}
            if torch is not None:
                functions["torch"] = torch.attention(q, k, v, dout, mode)
                for mine, other in zip(ours(), torch.attention_results(q, k, v, dout), strict=True):
                    limit = 1e-4 if mode == "float32" else 3e-2
                    check(f"attention at T = {length}", relative_error(mine, other), limit)
            times = alternate(functions, sample=0.05, budget=25)
            bars = {512: 0.55, 1021: None, 2048: 0.85, 8192: 1.0}
            bar = bars[length] if mode == "float32" else 0.7
            what = f"attention forward + backward, {mode}, T = {length}"
            rows.append(Row("attention", what, bar, times["ours"], times.get("torch")))
    return rows


def op_rows() -> list[Row]:
    """Compare the ops that are bound by memory, within one step as in training."""
    ops = load("cpu")
    with ops.step():
        return [*(row for case in op_cases() for row in _op_rows(ops, case)), *update_rows(ops)]


def _op_rows(ops: Ops, case: OpCase) -> list[Row]:
    """Compare an op forward and backward together; where PyTorch has one, with its ``out=``."""
    torch = peers()
    ours = partial(case.ours, ops, case.arrays, case.cotangent)
    functions: dict[str, Function] = {"ours": ours}
    if torch is not None:
        theirs = torch.op(case)
        for mine, other in zip(case.results(ops), torch.arrays(theirs()), strict=True):
            check(case.what, relative_error(mine, other), case.limit)
        functions["torch"] = theirs
    times = alternate(functions, sample=0.01, want=5, budget=4)
    rows = [Row("ops", case.what, case.bar, times["ours"], times.get("torch"))]
    if torch is not None and case.into is not None:
        functions = {"ours": ours, "torch": torch.into(case)}
        times = alternate(functions, sample=0.02, want=7, budget=8)
        what = f"{case.what}, torch with out="
        rows.append(Row("ops", what, 1.0, times["ours"], times["torch"]))
    return rows


def update_rows(ops: Ops) -> list[Row]:
    """Compare what has random bits or works in place: dropout, AdamW."""
    torch = peers()
    rng = np.random.default_rng(0)
    x, dout = (rng.standard_normal((4096, 384), dtype=np.float32) for _ in range(2))
    functions: dict[str, Function] = {"ours": dropped(ops, x, dout)}
    if torch is not None:
        functions["torch"] = torch.dropout(x, dout)
    times = alternate(functions, sample=0.02, want=7, budget=8)
    rows = [Row("ops", "dropout (4096, 384)", 0.35, times["ours"], times.get("torch"))]

    n = 12_600_000
    state = [rng.standard_normal(n, dtype=np.float32) for _ in range(4)]
    state[2] = np.abs(state[2])
    settings: dict[str, Any] = {
        "lr": 1e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
    }
    functions = {"ours": lambda: ops.adamw(*state, step=9, n_decayed=n, **settings)}
    if torch is not None:
        functions["torch"], theirs = torch.adamw(*state, **settings)
        mine = [array.copy() for array in state]
        ops.adamw(*mine, step=9, n_decayed=n, **settings)
        functions["torch"]()
        check("adamw", relative_error(mine[0], theirs()), 1e-6)
    times = alternate(functions, sample=0.05, want=9, budget=15)
    rows.append(Row("ops", "adamw, 12.6 M / fused", 0.9, times["ours"], times.get("torch")))
    return rows


def dropped(ops: Ops, x: Array, dout: Array) -> Function:
    """Return a function that runs dropout forward and backward."""

    def run() -> None:
        _, cache = ops.dropout_forward(x, p=0.1, key=DropoutKey(1, 2, 3, 4))
        ops.dropout_backward(dout, cache)

    return run


def memory_rows(modes: list[str]) -> list[Row]:
    """Compare what a training step adds to the resident memory, each in a process of its own."""
    theirs = _child("torch", "float32") if peers() is not None else None
    return [
        Row("memory", f"memory of a step, 12.6 M, {mode}", 0.45, _child("ours", mode), theirs)
        for mode in modes
    ]


def _child(side: str, mode: str) -> float:
    command = [sys.executable, "-m", "accel.bench", "--child", side, mode, str(threads())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["bytes"])


def measure_memory(side: str, mode: str) -> None:
    """In a process of its own: print by how much three steps raise the peak of resident memory."""
    model = Ours(SMALL, mode if side == "ours" else "float32", 8, 512)
    if side == "ours":
        step: Function = model.step
        tiny = Ours(SMALL, mode, 1, 8)
        tiny.step()  # kernels are loaded, or compiled, before the baseline is taken
        del tiny
    else:
        step = peers().trainer(SMALL, model, "float32", compiled=False)
        model.m = model.v = model.grad = np.zeros(0, np.float32)
    for array in (model.flat, model.m, model.v, model.grad):
        array += 0  # the pages of zeros are made before the baseline, too
    gc.collect()
    baseline = _resident()
    for _ in range(3):
        step()
    print(json.dumps({"bytes": memory() - baseline}))


def _resident() -> int:
    """Return the resident bytes now; the peak so far must not be above, or it hides the step's."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


def decode_rows(modes: list[str]) -> list[Row]:
    """Compare one token of one row, with 128 and 512 tokens before it."""
    torch = peers()
    rows = []
    for mode in modes:
        model = Ours(SMALL, mode, 1, 8)
        ops = model.ops
        for position in (128, 512):
            cache = ops.kv_cache(model.params, SMALL, 1, 1024)
            rng = np.random.default_rng(2)
            for layer in (*cache.k, *cache.v):
                layer[...] = rng.standard_normal(layer.shape)
            token = np.array([7], np.int32)
            ours = partial(ops.decode_step, model.params, SMALL, token, cache, position)
            functions: dict[str, Function] = {"ours": ours}
            if torch is not None:
                theirs = torch.decoder(SMALL, model.master, cache, position)
                limit = 1e-4 if mode == "float32" else 3e-2
                check("decode", relative_error(ours(), theirs()), limit)
                functions["torch"] = theirs
            times = alternate(functions, sample=0.02, budget=15)
            bar = 0.6 if mode == "float32" else 0.4
            what = f"decode a token, {mode} weights / torch float32, position {position}"
            rows.append(Row("decode", what, bar, times["ours"], times.get("torch")))
    return rows


def main(argv: list[str]) -> int:
    """Run ``myllm bench cpu``."""
    if argv[:1] == ["--child"]:
        set_threads(int(argv[3]))
        measure_memory(argv[1], argv[2])
        return 0
    parser = argparse.ArgumentParser(
        prog="myllm bench cpu",
        description="Time the cpu backend beside PyTorch (optional) on the same threads.",
        epilog="example: myllm bench cpu --parts step,attention --threads 2 --chart bench.svg",
    )
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--threads", type=int, default=None, help="default: the cores available")
    parser.add_argument("--chart", type=Path, help="a PNG or SVG file for the bar chart")
    parser.add_argument("--table", type=Path, help="a file for the table, in Markdown")
    parser.add_argument("--quick", action="store_true", help="two samples each: no figures to keep")
    options = parser.parse_args(argv)
    bench_timing.quick = options.quick
    chosen = options.parts.split(",")
    unknown = [part for part in chosen if part not in PARTS]
    if unknown:
        print(
            f"myllm bench cpu: no part {unknown[0]!r}; known: {', '.join(PARTS)}", file=sys.stderr
        )
        return 2
    for path in (options.table, options.chart):
        if path is not None and not path.resolve().parent.is_dir():
            print(f"myllm bench cpu: there is no folder {path.parent} to write to", file=sys.stderr)
            return 2
    if options.chart is not None:
        if options.chart.suffix not in (".png", ".svg"):
            print("myllm bench cpu: --chart takes a .png or .svg file", file=sys.stderr)
            return 2
        if importlib.util.find_spec("matplotlib") is None:
            print(
                "myllm bench cpu: --chart needs matplotlib; pip install 'myllm[plot]'",
                file=sys.stderr,
            )
            return 2
    if options.threads is not None:
        set_threads(options.threads)
    modes = ["float32", "bf16"] if bf16_offered() else ["float32"]
    compiled = "compiled" in chosen
    rows: list[Row] = []
    status = 0
    steps = (
        ("12.6 M, T = 512", SMALL, 8, 512),
        ("12.6 M, T = 1024", SMALL, 4, 1024),
        ("35 M, T = 1024", LARGE, 4, 1024),
    )
    jobs: dict[str, Callable[[], list[Row]]] = {
        "step": lambda: [row for step in steps for row in step_rows(*step, compiled, modes)],
        "share": lambda: [share_row(*step) for step in steps],
        "gpt2": lambda: step_rows("GPT-2 124 M, B·T = 4·64", GPT2_SMALL, 4, 64, False, modes),
        "attention": lambda: attention_rows(modes),
        "ops": op_rows,
        "memory": lambda: memory_rows(modes),
        "decode": lambda: decode_rows(modes),
    }
    for part, job in jobs.items():
        if part in chosen:
            print(f"measuring {part} …", file=sys.stderr, flush=True)
            try:
                new = job()
            except ValueError as error:  # a check failed: say so, and go on with the other parts
                print(error, file=sys.stderr)
                status = 1
                continue
            rows += new
            print(table(new), flush=True)
    text = f"{about()}\n\n{table(rows)}\n"
    print(f"\n{text}")
    if options.table is not None:
        options.table.write_text(text)
    if options.chart is not None:
        chart(rows, options.chart)
    return status


if __name__ == "__main__":
    os.environ.setdefault("MYLLM_THREADS", str(threads()))
    sys.exit(main(sys.argv[1:]))
