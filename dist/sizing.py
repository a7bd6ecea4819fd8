"""Which model to train in a given time on this machine: by the speed measured and a small sweep.

A training budget is C floating-point operations: those of a second, measured, times the seconds.
Hoffmann et al. 2022 find that parameters and tokens should then both grow as √C, Kaplan et al. 2020
that a flat optimum forgives a factor of two. Their runs are a million times longer than the minutes
here, in which the embedding is most of a model and a few hundred steps are all there is; so where
one size gives way to the next was measured: ``sweep/sizing/README.md``.
"""

import json
import shlex
import statistics
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import numpy as np

from accel import AUTO
from accel import load as load_backend
from dist import config, mode, warm
from dist.comm import Solo
from dist.config import RunFile
from dist.data import make_batch
from dist.documents import PIECE_BYTES, Document, read_documents
from dist.heldout import holds_out, place, too_little
from dist.pack import JOURNAL, SPLITS, Settings, plain_bytes
from dist.places import new_place
from dist.shards import Manifest, is_packed, read_manifest
from dist.step import Stepper, initial_weights
from reference.config import Config
from reference.flops import training_flops
from reference.params import decoder_layout
from tokenizer.files import LOCK
from tokenizer.read import expand
from tokenizer.records import is_rows

SHARE = 0.9  # of the time goes into steps; evaluations, checkpoints and the start take the rest
SECONDS = 0.5  # of steps to measure by
EVALUATIONS = 10  # of a run
LEAST_STEPS = 20
FEW_PIECES = 1000  # of text: a share of 0.01 may be a handful of documents
SHARES = (0.1, 0.2)  # of few pieces: the first that holds out enough
BYTES_A_TOKEN = 4  # of Python's library 4.0 with 4,096 ids; of 3 kB of it 3.7, of 60 kB 4.4
LEAST_HELD, LEAST_READ = 4, 2  # windows, by that estimate: some texts take twice as many bytes


class Size(NamedTuple):
    """A model and how it is trained."""

    flops: float  # the training budget from which on it is taken
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ff: int
    context_length: int
    global_batch: int  # windows of a step
    lr: float
    vocab_size: int  # of a tokenizer that is made for it
    embedding_rate: float = 1.0  # times lr; swept up to 256 wide: dist/sweep/rates, dist/sweep/muon
    weight_decay: float = 0.1  # likewise
    kind: str = "adamw"  # of optimizer: dist/sweep/muon
    qkv_bias: bool = False  # likewise

    def overrides(self, ranks: int) -> list[str]:
        """Return what it changes in a run file; of micro-batches two, or one a rank."""
        model = {field.name for field in fields(Config)} - {"vocab_size"}
        chosen = ((key, value) for key, value in self._asdict().items() if key in model)
        said = [f"model.{key}={json.dumps(value)}" for key, value in chosen]
        micro = max(1, self.global_batch // max(2, ranks))
        train = {"global_batch": self.global_batch, "micro_batch": micro, "lr": self.lr}
        said += [f"train.{key}={value}" for key, value in train.items()]
        optim = ("kind", "embedding_rate", "weight_decay")
        return said + [f"optim.{key}={getattr(self, key)}" for key in optim]


SIZES = (
    #    FLOP    D   L  Hq Hkv d   F     T  windows lr  vocabulary, embedding, decay, kind, bias
    Size(0.0, 64, 2, 2, 1, 32, 176, 128, 4, 8e-3, 4096, 6.0, 0.01, "muon", True),
    Size(8e12, 96, 3, 3, 1, 32, 256, 128, 4, 4e-3, 4096, 6.0, 0.01, "muon", True),
    Size(1.2e13, 128, 4, 4, 2, 32, 352, 256, 8, 4e-3, 4096, 3.0, 0.1, "muon", True),
    Size(1.5e14, 192, 4, 6, 2, 32, 512, 256, 8, 4e-3, 4096, 3.0, 0.1, "muon", True),
    Size(8e14, 256, 6, 4, 2, 64, 688, 256, 16, 4e-3, 8192, 3.0, 0.1, "muon", True),
    Size(5e15, 384, 8, 6, 2, 64, 1024, 512, 16, 1e-3, 16384),
)
TYPICAL = SIZES[2]  # of which the speed is measured


def choose(flops: float) -> Size:
    """Return the largest size that a budget is enough for."""
    return [size for size in SIZES if size.flops <= flops or size is SIZES[0]][-1]


def step_flops(run: RunFile) -> float:
    """Return the floating-point operations of a step of training."""
    return training_flops(run.model, run.window, causal=False) * run.tokens_per_step


def step_seconds(run: RunFile) -> float:
    """Return how long a step takes on this rank alone, on ids drawn at random."""
    r = run.run
    ops = load_backend(r.backend, compute=r.compute, attention=r.attention, products=r.products)
    layout, rng = decoder_layout(run.model), np.random.default_rng(0)
    weights = initial_weights(ops, layout, 0)
    stepper = Stepper(
        ops, run.model, run.optim, layout, Solo(), weights, 0, run.run.recompute, run.run.overlap
    )
    ids = rng.integers(0, run.model.vocab_size, (run.train.micro_batch, run.window), np.int32)
    batch = make_batch([(window, np.ones(len(window), np.bool_)) for window in ids])

    def once() -> float:
        started = time.perf_counter()
        stepper.update(stepper.gradient([batch] * run.micro_batches, 1, 0), 1e-6)
        return time.perf_counter() - started

    return statistics.median(mode.turns_of(once, SECONDS))


class Choice(NamedTuple):
    """A size, and why."""

    size: Size
    flops: float  # the budget
    speed: float  # floating-point operations a second
    seconds: float

    def __str__(self) -> str:
        larger = [size.flops for size in SIZES if size.flops > self.size.flops]
        next_from = f", a larger one from {larger[0]:.1e} on" if larger else ""
        return (
            f"model: {self.size.d_model} wide, {self.size.n_layers} layers, for {self.flops:.1e} "
            f"operations ({self.speed / 1e9:.0f} GFLOP/s for {100 * SHARE:.0f} % of "
            f"{self.seconds:.0f} s){next_from}"
        )


def choice_for(seconds: float, speed: float) -> Choice:
    """Return the size for a time to train in, at a speed in floating-point operations a second."""
    seconds = max(seconds, 0.0)
    flops = SHARE * seconds * speed
    return Choice(choose(flops), flops, speed, seconds)


def measured_speed(compute: str) -> float:
    """Return the floating-point operations a second of a step of training on this machine."""
    run = config.load("demo", [*TYPICAL.overrides(1), f"run.compute={compute}"])
    return step_flops(run) / step_seconds(run)


# ---- a run file ----------------------------------------------------------------------------------


class Texts(NamedTuple):
    """What there is to train on."""

    train: Path
    heldout: Path | None
    manifest: Manifest | None  # of the training set; None: nothing is packed yet
    size: int = 0  # bytes of text to be packed and trained on; 0: not known
    share: float | None = None  # of it to be held out; None: what `myllm pack` takes by itself
    unread: str = ""  # why they could not be read, in a sentence


def texts_of(path: str | None, out: Path) -> Texts:
    """Return the packed sets of a folder, or where they will be when its texts are packed."""
    for folder in (Path(path) / "train", Path(path)) if path else ():
        if is_packed(folder):
            heldout = folder.parent / "heldout"
            there = folder.name == "train" and is_packed(heldout)
            return Texts(folder, heldout if there else None, read_manifest(folder))
    here = {each.name for each in Path(path).iterdir()} if path and Path(path).is_dir() else set()
    if LOCK in here and here <= {LOCK, JOURNAL, *SPLITS}:
        raise ValueError(f"no packing in {path} has finished: give its `myllm pack` again")
    packed = out.with_name(f"{out.stem}-data")
    if path:
        expand([path])  # which refuses what holds no text
    return Texts(packed / "train", packed / "heldout", None)


def split_bytes(files: list[str], share: float) -> tuple[int, int]:
    """Return the bytes of text that ``myllm pack --heldout`` will train on and hold out."""

    def documents() -> Iterator[Document]:
        return read_documents(files, Settings("").field, None)

    sizes = [(place(document.content), document.n_bytes) for document in documents()]
    total = sum(size for _, size in sizes)
    by_hash = sum(size for where, size in sizes if where < share)
    more = too_little(by_hash, total, share)
    chosen = holds_out(documents(), share) if more else frozenset()
    held = sum(size for where, size in sizes if where < share or where in chosen)
    return total - held, held


def to_be_packed(texts: Texts, path: str, window: int) -> Texts:
    """Return texts with their size and a share to hold out: none where that is too little.

    Where there are few they are read, since it depends on each how many bytes are held out.

    Raises
    ------
    ValueError, OSError
        When there is too little to train on, or they cannot be read.
    """
    found, least = expand([path]), BYTES_A_TOKEN * window
    if found.streams or found.bytes_on_disk >= FEW_PIECES * PIECE_BYTES:
        rows = any(map(is_rows, found.files))  # of which text is a part, nobody knows how large
        return texts._replace(size=0 if rows else plain_bytes([path]))
    try:
        for share in SHARES:
            train, held = split_bytes(found.files, share)
            if min(train, held) >= LEAST_HELD * least:
                return texts._replace(size=train, share=share)
    except (ValueError, ImportError) as error:  # rows with another field, say
        return texts._replace(share=SHARES[0], unread=str(error))
    if train + held < LEAST_READ * least:
        raise ValueError(
            f"{path} holds {train + held:,} bytes of text, but a run needs some "
            f"{LEAST_READ * least:,} or more: its model reads {window} tokens at a time"
        )
    return texts._replace(heldout=None, size=train + held, share=0.0)


def write_run_file(
    minutes: float, path: str | None, out: Path | None, ranks: int
) -> tuple[RunFile, list[str]]:
    """Write a run file for so many minutes of all cores; return it, and what there is to say.

    Raises
    ------
    ValueError, OSError
        When the file is there already, the data cannot be read, or the ranks cannot share it.
    """
    out = out or Path("run.toml")
    if out.exists():
        raise ValueError(f"{out} is there already: name another by -o, or move it away")
    texts = texts_of(path, out)
    typical = run_of(TYPICAL, texts, out, 1, AUTO, ranks)
    typical.accumulation(ranks)
    typical, _ = mode.settled(typical, None)
    compute = typical.run.compute
    warm.compile_kernels(typical)
    choice = choice_for(60 * minutes, measured_speed(compute))
    if path and texts.manifest is None:
        texts = to_be_packed(texts, path, choice.size.context_length)
    seconds = step_seconds(run_of(choice.size, texts, out, 1, compute, ranks))
    steps = max(LEAST_STEPS, int(SHARE * 60 * minutes / seconds))
    run = run_of(choice.size, texts, out, steps, compute, ranks)
    run.accumulation(ranks)
    span = f"{minutes:g} minute{'s' * (minutes != 1)}"
    said = [f"{choice}.", f"{1e3 * seconds:.0f} ms a step: {steps:,} steps in {span}."]
    with new_place(out) as part:
        head = "".join(f"# {line}\n" for line in said)
        part.write_text(f"{head}\n{run.to_toml()}", encoding="utf-8")
    return run, [*said, *advice(run, texts, path, out, choice.size, ranks), ""]


def run_of(size: Size, texts: Texts, out: Path, steps: int, compute: str, ranks: int) -> RunFile:
    """Return the run of a size on some texts."""
    packed = texts.manifest
    words = [
        *size.overrides(ranks),
        f"model.vocab_size={packed.vocab_size if packed else size.vocab_size}",
        f"data.train={json.dumps(str(texts.train))}",
        f"data.heldout={json.dumps(str(texts.heldout or ''))}",
        *schedule(steps, EVALUATIONS),
        f"run.out={json.dumps(str(Path('runs') / out.stem))}",
        f"run.compute={compute}",
    ]
    if packed and packed.window:
        words.append(f"model.context_length={packed.window}")
    return config.load("demo", words)


def schedule(steps: int, evaluations: int) -> list[str]:
    """Return what a number of steps means for a run file."""
    every = max(1, steps // evaluations)
    return [
        f"train.steps={steps}",
        f"train.warmup_steps={min(40, steps // 10)}",
        f"run.eval_every={every}",
        f"run.checkpoint_every={every}",
    ]


def advice(
    run: RunFile, texts: Texts, path: str | None, out: Path, size: Size, ranks: int
) -> list[str]:
    """Return what to do next with a run file."""
    tokens, said, named = run.steps * run.tokens_per_step, [], path or "TEXTS"
    if texts.manifest is None:
        tok, have = out.with_suffix(".tok"), texts.size // BYTES_A_TOKEN
        what = f"{named}, by an estimate of {BYTES_A_TOKEN} bytes a token"
        text, packed, name = (shlex.quote(str(p)) for p in (named, texts.train.parent, tok))
        share = "" if texts.share is None else f" --heldout {texts.share:g}"
        said += [
            f"{named} is to be packed first:",
            f"  myllm tokenizer train {text} --vocab-size {size.vocab_size} -o {name}",
            f"  myllm pack {text} --tokenizer {name}{share} -o {packed}",
        ]
        if texts.unread:
            said.append(f"How much text that is cannot be told, nor packed so: {texts.unread}.")
    else:
        have, what = texts.manifest.tokens, str(texts.train)
    if have:
        times = tokens / have
        much = " (more than four times teaches less and less: Muennighoff et al. 2023)"
        said.append(
            f"It reads {tokens:,} tokens, {f'{times:.2g}' if times < 10 else f'{times:,.0f}'} "
            f"times the {have:,} of {what}{much if times > 4 else ''}."
        )
    if texts.heldout is None:
        none = f"Too little of {named} can be held out"
        none = none if texts.manifest is None else "No held-out text was packed"
        said.append(f"{none}, so nothing tells how good the model is.")
    shared = f" --ranks {ranks}" if ranks > 1 else ""
    return [*said, f"written: {out}; then:", f"  myllm train {shlex.quote(str(out))}{shared}"]
