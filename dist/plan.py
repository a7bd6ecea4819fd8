"""``myllm plan``: what a run will need, by arithmetic alone; nothing is allocated or opened.

With ``--minutes`` it first writes the run file (``sizing.py``): some steps are measured for that,
and short texts are read.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from accel.cpu.keeping import recompute
from accel.help import minutes, parser
from dist import config as run_file
from dist import gpu, network
from dist.commands import add_set
from dist.config import RunFile
from dist.monitor import bytes_text, duration, filled
from dist.shards import dtype_for
from dist.slices import ARRAYS, Cutting
from reference.config import DEEPEST, Config
from reference.flops import forward_flops, muon_flops, training_flops
from reference.kv import slots
from reference.params import Layout, decoder_layout

TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, table 3, to the nearest round number
CPU_LOGITS, CPU_ROWS = 8 << 20, 256  # of a chunk, as accel/cpu/loss.py has them
PROCESS = 160 << 20  # bytes: Python, its packages and machine code


class Plan(NamedTuple):
    """The figures of a run; bytes unless said otherwise."""

    parameters: int
    weights_alone: int  # of them, in matrices and tables
    parts: dict[str, int]  # of them, by part of the model
    block: int  # of them, those of one layer
    master: int  # float32, on every rank
    moments: int  # m and v, the slices of the rank that has most
    gradients: int  # the buffers of the tree, and the slices received
    weights: int  # copies that the ops read; 0 where they read the master
    flops: tuple[float, float]  # of a training step per token: all scores, the causal half
    muon: tuple[int, int]  # Muon's in a step: of all ranks, of the one that has most
    forward: dict[str, float]  # floating-point operations of a forward pass per token, by part
    kv_cache: int  # of one sequence of the whole context
    activations: dict[str, int]  # kept of a micro-batch for its backward, by run.recompute
    recompute: str  # which of these it is
    scores: int  # of one sequence and layer, if they were ever stored
    sent: int  # by each rank in a step
    steps: int
    exposures: int  # tokens read in all
    checkpoint: int
    disk: int  # checkpoints kept, the best, and the one being written
    data: int  # as many tokens on disk

    @property
    def states(self) -> int:
        """All that lies in memory beside what a step makes."""
        return self.master + self.moments + self.gradients + self.weights


def parameters_by_part(model: Config) -> dict[str, int]:
    """Return how many parameters each part has, over all layers."""
    parts = {
        "embedding": 0,
        "position": 0,
        "attention": 0,
        "feed-forward": 0,
        "head": 0,
        "norms": 0,
    }
    for name, (_, spec) in decoder_layout(model).offsets.items():
        words = name.replace("ffn", "feed-forward").split(".")
        part = words[2] if words[0] == "layers" else words[0]
        parts[part if part in parts else "norms"] += spec.size
    return {part: size for part, size in parts.items() if size}


def kv_cache_bytes(model: Config, item: int) -> int:
    """Return 2·Hkv·d·s·ΣS: keys and values of the S tokens that each layer keeps of a context."""
    kept = sum(slots(model, layer, model.context_length) for layer in range(model.n_layers))
    return 2 * kept * model.n_kv_heads * model.d_head * item


def activation_bytes(
    model: Config, tokens: int, item: int, operand: int | None = None
) -> dict[str, int]:
    """Return the bytes that a forward pass keeps for its backward, by ``run.recompute``.

    These are the arrays that a backend keeps between embedding and head, ``item`` bytes a number,
    or ``operand`` where only products and activations read it: the backend cpu rounds no others in
    bf16. Of each block: the input and output of both norms; q, k and v, after rotation only;
    attention's output and a float32 a head; the input and output of the activation. A norm keeps
    one or two float32 a token. With ``block``, one block at a time is whole, during its backward.
    """
    c = model
    operand = operand or item
    stream = 2 * (c.d_model * item + (4 if c.norm == "rmsnorm" else 8))
    norms = 2 * c.d_model * operand
    qkv = (c.n_heads + 2 * c.n_kv_heads) * c.d_head * operand
    attention = qkv + c.n_heads * (c.d_head * item + 4)
    if c.qk_norm:  # q and k as the norm reads them, as projected if v keeps these alive; a float32
        times = 2 if operand == item else 1
        attention += (c.n_heads + c.n_kv_heads) * (times * c.d_head * item + 4)
    hidden = (2 if c.gated else 1) * c.d_ff * operand
    product = c.d_ff * operand
    block = stream + norms + attention + hidden + product
    made_again = product + (norms if c.norm_placement == "pre" else 0)
    return {
        "none": tokens * c.n_layers * block,
        "norms": tokens * c.n_layers * (block - made_again),
        "block": tokens * (c.n_layers * c.d_model * item + block),
    }


def kept_bytes(run: RunFile, model: Config, tokens: int) -> dict[str, int]:
    """Return the same for a model of a run's backend and mode."""
    low = run.run.compute == "bf16"
    if run.run.backend == "cpu":
        return activation_bytes(model, tokens, 4, 2 if low else 4)
    return activation_bytes(model, tokens, 2 if low else 4)


def recomputed(run: RunFile, model: Config, tokens: int) -> str:
    """Return ``run.recompute``, or what its backend takes where that is ``"auto"``."""
    if run.run.recompute == "auto":
        return recompute(model, tokens) if run.run.backend == "cpu" else "none"
    return run.run.recompute


def score_bytes(model: Config, item: int) -> int:
    """Return Hq·T²·s, the scores of one layer and sequence that tiled attention never stores."""
    return model.n_heads * model.context_length**2 * item


def optimizer_work(run: RunFile, layout: Layout, ranks: int) -> tuple[int, tuple[int, int]]:
    """Return the bytes of moments on a rank at most, and Muon's operations: of all, of one at most.

    AdamW's moments are shared evenly. A matrix of Muon's has one rank, and a momentum but no v.
    """
    if run.optim.kind == "adamw":
        return 2 * 4 * -(-layout.size // ranks), (0, 0)
    cutting = Cutting.of(layout, run.optim.kind)
    bounds = cutting.bounds(layout, run.model.n_layers, ranks, beside=run.run.overlap)
    moments, work = [], []
    for rank in range(ranks):
        slices = [(b[rank], b[rank + 1]) for b in bounds]
        held = [cutting.held(array, slices) for array in ("m", "v")]
        moments.append(4 * sum(high - low for ranges in held for low, high in ranges))
        starts = (start for low, high in slices for start, _ in cutting.pieces(low, high))
        found = (cutting.matrices[start] for start in starts if start in cutting.matrices)
        work.append(sum(map(muon_flops, found)))
    return max(moments), (sum(work), max(work))


def make_plan(run: RunFile, ranks: int) -> Plan:
    """Return the figures of a run on ``ranks`` ranks.

    Raises
    ------
    ValueError
        When the ranks cannot share the batch.
    """
    accumulation, tokens = run.accumulation(ranks), run.train.micro_batch * run.window
    layout, T = decoder_layout(run.model), run.model.context_length
    n = layout.size
    low = run.run.compute == "bf16"
    buffers = accumulation.bit_length()  # log2(a) + 1
    moments, muon = optimizer_work(run, layout, ranks)
    cutting = Cutting.of(layout, run.optim.kind)
    checkpoint = 4 * sum(cutting.count(array) for array in ARRAYS)
    exposures = run.steps * run.tokens_per_step
    return Plan(
        parameters=n,
        weights_alone=layout.n_decayed,
        parts=parameters_by_part(run.model),
        block=sum(
            s.size for name, (_, s) in layout.offsets.items() if name.startswith("layers.0.")
        ),
        master=4 * n,
        moments=moments,
        gradients=4 * n * (buffers + (ranks > 1)),
        weights=2 * n if low and run.run.backend == "cuda" else 0,  # the cpu keeps no form of them
        flops=(
            training_flops(run.model, T, causal=False),
            training_flops(run.model, T, causal=True),
        ),
        muon=muon,
        forward=forward_flops(run.model, T, causal=False),
        kv_cache=kv_cache_bytes(run.model, 2 if low else 4),
        activations=kept_bytes(run, run.model, tokens),
        recompute=recomputed(run, run.model, tokens),
        scores=score_bytes(run.model, 2 if low else 4),
        sent=4 * 2 * n * (ranks - 1) // ranks,
        steps=run.steps,
        exposures=exposures,
        checkpoint=checkpoint,
        disk=checkpoint * (run.run.keep + 2),
        data=exposures * dtype_for(run.model.vocab_size).itemsize,
    )


def gpu_memory(run: RunFile, ranks: int, level: str) -> gpu.GpuMemory:
    """Return what a rank takes of its GPU at a level of ``run.recompute``."""
    p, item = make_plan(run, ranks), 2 if run.run.compute == "bf16" else 4
    states = p.states
    tokens = run.train.micro_batch * run.window
    return gpu.gpu_memory(states, run.model, p.activations[level], tokens, item)


def rank_memory(run: RunFile, ranks: int, level: str | None = None) -> int:
    """Return all that a rank holds: of its GPU's memory, or of the machine's.

    At a level of ``run.recompute``; None: as the run has it. On the backend cpu with the copy that
    a checkpoint is written from: the peaks of laptop and gpt2-small on one rank were within 1 % in
    float32, demo's 3 % below; laptop's in bf16, which packs its head for the loss, 2 % above.
    """
    p = make_plan(run, ranks)
    level = level or p.recompute
    if run.run.backend == "cuda":
        return gpu_memory(run, ranks, level).total
    tokens = run.train.micro_batch * run.window
    scratch = gpu.scratch_bytes(run.model, tokens, 4, _cpu_loss_bytes(run, tokens))
    states = p.states
    return states + p.activations[level] + scratch + p.checkpoint // ranks + PROCESS


def _cpu_loss_bytes(run: RunFile, tokens: int) -> int:
    """Return the bytes of a chunk of logits and, unless it is all of them, the head's gradient.

    In bf16 many rows need the head packed, forward and backward.
    """
    V, D = run.model.vocab_size, run.model.d_model
    rows = max(CPU_LOGITS // V, CPU_ROWS)
    packed = 4 * V * D if run.run.compute == "bf16" and tokens > CPU_ROWS else 0
    return 4 * V * (min(rows, tokens) + (0 if tokens <= min(rows, D) else D)) + packed


def fits(run: RunFile, ranks: int, needed: float) -> str:
    """Return which GPU holds so much, or whether this machine holds it for every rank."""
    if run.run.backend == "cuda":
        return next((f"{size} GB" for size in gpu.SIZES if needed <= size * 1e9), "none")
    return "yes" if ranks * needed <= psutil.virtual_memory().total else "no"


def largest_micro_batch(run: RunFile, ranks: int, level: str, limit: float) -> int:
    """Return the largest ``train.micro_batch`` that ``limit`` bytes hold; 0 when none does.

    The batch of the optimizer stays as it is, so a smaller micro-batch means more of them.
    """
    size = run.train.global_batch // ranks
    while size:
        if run.train.global_batch % (size * ranks) == 0:
            train = dataclasses.replace(run.train, micro_batch=size)
            if gpu_memory(dataclasses.replace(run, train=train), ranks, level).total <= limit:
                return size
        size //= 2
    return 0


def others(run: RunFile, ranks: int) -> list[str]:
    """Return the model with a layer less and one more, and with shorter windows, side by side."""
    model, item = run.model, 2 if run.run.compute == "bf16" else 4

    def line(what: str, values: Sequence[float], show: Callable[[float], str]) -> str:
        width = min(15, 60 // len(values))
        return f"  {what:<18}" + "".join(f"{show(value):>{width}}" for value in values)

    def memory(models: Iterable[Config]) -> list[str]:
        runs = [dataclasses.replace(run, model=m) for m in models]
        needed = [rank_memory(r, ranks) for r in runs]
        where = "fits a GPU of" if run.run.backend == "cuda" else "fits here"
        return [
            line("memory of a rank", needed, bytes_text),
            line(where, needed, lambda n: fits(run, ranks, n)),
        ]

    out = [""]
    if isinstance(model.window, int):  # else there is a window for each layer
        layers = [n for n in range(model.n_layers - 1, model.n_layers + 2) if 0 < n <= DEEPEST]
        models = [dataclasses.replace(model, n_layers=n) for n in layers]
        plans = [make_plan(dataclasses.replace(run, model=m), ranks) for m in models]
        states = [p.states for p in plans]
        kept = [p.activations[p.recompute] for p in plans]
        out += [
            line("layers", layers, str),
            line("parameters", [p.parameters for p in plans], lambda n: f"{n:,}"),
            line("state of a rank", states, bytes_text),
            line("activations", kept, bytes_text),
            line("operations/token", [p.flops[0] for p in plans], lambda n: f"{n:.4g}"),
            *memory(models),
        ]
    T = model.context_length
    lengths = [T >> i for i in range(4, -1, -1) if T >> i]
    contexts = [dataclasses.replace(model, context_length=n) for n in lengths]
    tokens = [run.train.micro_batch * n for n in lengths]
    kept = [
        kept_bytes(run, c, n)[recomputed(run, c, n)] for c, n in zip(contexts, tokens, strict=True)
    ]
    return [
        *out,
        line("context", lengths, lambda n: f"{n:,}"),
        line("activations", kept, bytes_text),
        line("KV cache", [kv_cache_bytes(c, item) for c in contexts], bytes_text),
        line(
            "operations/token",
            [training_flops(c, c.context_length, causal=False) for c in contexts],
            lambda n: f"{n:.4g}",
        ),
        *memory(contexts),
    ]


def machine_lines(run: RunFile, ranks: int) -> list[str]:
    """Return what all ranks hold on this machine, and whether it has as much."""
    p, here = make_plan(run, ranks), bytes_text(psutil.virtual_memory().total)
    out = ["", f"memory of all ranks, by run.recompute, beside the {here} here: by arithmetic"]
    for level in p.activations:
        needed = rank_memory(run, ranks, level)
        fitting = "fits" if fits(run, ranks, needed) == "yes" else "no room"
        set_so = "  (as set)" if level == p.recompute else ""
        all_ranks = f"{ranks * needed:>22,} bytes = {bytes_text(ranks * needed)}"
        out.append(f"  {level:<18}{all_ranks}  {fitting}{set_so}")
    return out


def gpu_lines(run: RunFile, ranks: int) -> list[str]:
    """Return what a GPU has to hold, and what fits one."""
    out = ["", "bytes of a rank's GPU, by run.recompute: by arithmetic"]
    p = make_plan(run, ranks)
    for level in p.activations:
        m = gpu_memory(run, ranks, level)
        fits = [str(size) for size in gpu.SIZES if m.total <= size * 1e9]
        set_so = "  (as set)" if level == p.recompute else ""
        fitting = f"fits {', '.join(fits)} GB" if fits else f"over {gpu.SIZES[-1]} GB"
        out.append(f"  {level:<18}{m.total:>22,} = {m.total / 1e9:.1f} GB  {fitting}{set_so}")
    m = gpu_memory(run, ranks, p.recompute)
    out += [
        f"    as set: the above {m.states / 1e9:.1f}, activations {m.activations / 1e9:.1f}, what "
        f"comes and goes {m.scratch / 1e9:.1f},",
        f"    gaps {m.gaps / 1e9:.1f}, cuBLAS's workspace and 1 GiB for CUDA and NCCL "
        f"{m.libraries / 1e9:.1f} GB",
    ]
    found: set[int] = set()
    for size in gpu.SIZES:
        most = {
            level: largest_micro_batch(run, ranks, level, size * 1e9) for level in p.activations
        }
        said = ", ".join(f"{n} ({level})" for level, n in most.items() if n)
        holds = f"train.micro_batch up to {said}" if said else "no micro-batch"
        out.append(f"  {f'{size} GB holds':<18}{holds}")
        found |= set(most.values())
    share = run.train.global_batch // ranks
    return out + ([f"  {'':<18}({share}: all that a rank has of global_batch)"] * (share in found))


def lines(run: RunFile, ranks: int, speed: float | None) -> list[str]:
    """Return the plan as people read it."""
    p, model = make_plan(run, ranks), run.model

    def size(n: int) -> str:
        return f"{n:>22,} bytes = {bytes_text(n)}"

    item = "bf16" if run.run.compute == "bf16" else "float32"
    rule = TOKENS_PER_PARAMETER * p.parameters
    total = sum(p.forward.values())
    per_rank = p.states
    out = [
        f"parameters          {p.parameters:>22,}",
        f"  weights alone     {p.weights_alone:>22,}  (matrices and tables, which decay)",
        *(
            f"  {part:<18}{n:>22,}  {n / p.parameters:.1%}"
            f"{' (the head, too)' if part == 'embedding' and model.tied else ''}"
            for part, n in p.parts.items()
        ),
        f"  each of {model.n_layers:>3} blocks {p.block:>21,}",
        "",
        f"{f'each of {ranks} ranks' if ranks > 1 else 'the rank'}, besides activations",
        f"  master, float32   {size(p.master)}",
        f"  m and v           {size(p.moments)}",
        f"  gradients         {size(p.gradients)}",
        f"  weights, {item:<9}{size(p.weights)}",
        f"  together          {size(per_rank)}",
        f"  sent in a step    {size(p.sent)}  (8N(W-1)/W)",
        "",
        f"activations of a micro-batch, {item}, by run.recompute",
        *(
            f"  {level:<18}{size(n)}{'  (as set)' if level == p.recompute else ''}"
            for level, n in p.activations.items()
        ),
        *(gpu_lines if run.run.backend == "cuda" else machine_lines)(run, ranks),
        *others(run, ranks),
        "",
        "floating-point operations",
        f"  training, a token {p.flops[0]:>22,.0f}  (6N + attention, all scores counted)",
        f"                    {p.flops[1]:>22,.0f}  (the causal half of the scores)",
        f"  training, a step  {p.flops[0] * run.tokens_per_step:>22.4g}",
    ]
    if run.optim.kind == "muon":
        step = p.flops[0] * run.tokens_per_step
        out += [
            f"  Muon, a step      {p.muon[0]:>22.4g}  {p.muon[0] / step:.1%} of the training",
            f"    of a rank, most {p.muon[1]:>22.4g}  {p.muon[1] / step * ranks:.1%} of its share",
        ]
    out += [
        f"  whole run         {p.flops[0] * p.exposures + p.muon[0] * p.steps:>22.4g}",
        *(
            f"  forward: {part:<12}{work:>19,.0f}  a token, {work / total:.1%}"
            for part, work in p.forward.items()
        ),
    ]
    many = kv_cache_bytes(model, 2 if item == "bf16" else 4) // model.n_kv_heads * model.n_heads
    out += [
        "",
        f"one sequence of {model.context_length:,} tokens, {item}",
        f"  KV cache          {size(p.kv_cache)}  ({model.n_kv_heads} KV heads)",
        f"  with {model.n_heads:>3} KV heads {size(many)}",
        f"  scores of a layer {size(p.scores)}  (never stored)",
        f"  and probabilities {size(2 * p.scores)}  (never stored)",
        "",
        "the run",
        f"  tokens a step     {run.tokens_per_step:>22,}  = {ranks} × "
        f"{run.accumulation(ranks)} × {run.train.micro_batch} windows of {run.window:,}",
        f"  steps             {p.steps:>22,}",
    ]
    if len(run.phase_steps) > 1:
        out += [f"    phase {i}         {s:>22,}" for i, s in enumerate(run.phase_steps, 1)]
    out += [
        f"  exposures         {p.exposures:>22,}",
        f"  20 a parameter    {rule:>22,}  the run is {p.exposures / rule:.3f} of it",
    ]
    if speed:
        seconds = p.exposures / speed
        out.append(f"  at {speed:,.0f} tokens/s: {seconds / 3600:,.1f} hours ({duration(seconds)})")
    out += [
        "",
        "disk",
        f"  a checkpoint      {size(p.checkpoint)}  (master, m, v)",
        f"  checkpoints       {size(p.disk)}  (at most {run.run.keep + 2})",
        f"    the {run.run.keep} newest, the best and the one being written",
        f"  tokens, read once {size(p.data)}",
    ]
    return out


def main(argv: Sequence[str]) -> int:
    """``myllm plan``."""
    args = parser(
        "plan",
        "Say what a run will need: memory, work, communication, time, disk. Nothing is allocated. "
        "With --minutes, write a run file for this machine: a few steps are timed, and the model "
        "and the number of steps chosen that make the most of the time.",
        "myllm plan myllm-1b --ranks 8 --speed 160000\n"
        "  myllm plan myllm-1b --ranks 64 --per-node 8 --network 50GB/s \\\n"
        "    --speed 1280000 --set train.global_batch=256\n"
        "  myllm plan --minutes 30 data/mine -o mine.toml && myllm train mine.toml",
    )
    args.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?",
        help="a TOML run file, or a preset's name; with --minutes the text to train on, packed or "
        "not",
    )
    add_set(args)
    args.add_argument("--ranks", type=int, default=1, help="MPI ranks that share it (1)")
    args.add_argument("--speed", type=float, help="tokens a second over all ranks, for the hours")
    args.add_argument("--minutes", type=minutes, help="of training on this machine, on all cores")
    args.add_argument("-o", "--out", type=Path, help="with --minutes: the run file (run.toml)")
    args.add_argument(
        "--network",
        metavar="RATE",
        help="what each machine's network carries each way, 50GB/s or 400Gbit/s: adds the time of "
        "the exchange; with --speed also its share of a step, and the batch that keeps it small",
    )
    args.add_argument("--per-node", type=int, help="ranks on each machine (default: all)")
    given = args.parse_args(argv)
    if given.per_node is not None and (given.network is None or given.per_node < 1):
        args.error("--per-node is a number of ranks, at least 1, and belongs with --network")
    if given.speed is not None and not 1e-3 <= given.speed < math.inf:
        args.error("--speed must be a number of tokens a second, at least 0.001")
    if given.config is None and given.minutes is None:
        args.error("CONFIG is needed, or --minutes")
    said: list[str] = []
    if given.minutes is not None:
        if given.overrides or given.speed is not None:
            args.error("--minutes measures the speed and writes a file: no --set, no --speed")
        from dist import sizing  # which loads a backend

        run, said = sizing.write_run_file(given.minutes, given.config, given.out, given.ranks)
        said = [filled(line) for line in said]
    elif given.out is not None:
        args.error("-o belongs with --minutes")
    else:
        run = run_file.load(given.config, given.overrides)
    said += lines(run, given.ranks, given.speed)
    if given.network is not None:
        size, per_node = decoder_layout(run.model).size, given.per_node or given.ranks
        said += network.lines(run, size, given.ranks, per_node, given.network, given.speed)
    print("\n".join(said))
    return 0
