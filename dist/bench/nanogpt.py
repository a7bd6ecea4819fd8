"""One run of a trainer like nanoGPT's, in PyTorch, beside which ``myllm bench loss`` puts ours.

After Karpathy's nanoGPT (https://github.com/karpathy/nanoGPT, ``train.py``): its model (LayerNorm
without shifts, GELU, learned positions, tied head, no biases), windows drawn at random places of
the training tokens, AdamW fused by PyTorch, the gradient's norm clipped, warm-up and a cosine. What
it learns is said by a run file, and what came of it is written as ``myllm train`` writes it, so
that both are read alike. The clock stands still while it compiles and while it is evaluated.
"""

import time
from pathlib import Path

import numpy as np

from accel.system import cores
from dist import config as run_file
from dist.config import RunFile
from dist.data import Windows, held_out
from dist.monitor import Metrics
from reference.params import decoder_layout
from reference.types import Array

HOW = ("eager", "compiled")
IGNORED = -100  # PyTorch's target of a token that is not to be predicted


def train(path: Path, how: str) -> int:
    """Train as a run file says; ``how`` is one of ``HOW``."""
    from accel.bench import peer  # imports PyTorch

    run = run_file.load(path)
    tokens, (heldout,) = all_tokens(Windows(run.data.train, run)), held_out(run)
    rng = np.random.default_rng(run.train.seed)
    layout = decoder_layout(run.model)
    initial = layout.views(layout.init(run.train.seed))
    peer.set_threads(cores())
    model = peer.Peer(
        run.model,
        {name: weight for name, weight in initial.items() if not name.endswith(".bias")},
        *draw(tokens, run, np.random.default_rng(0)),
        kind=run.run.compute,
        compiled=how == "compiled",
        clip=run.optim.clip > 0,
        settings={"lr": run.train.lr, **vars(run.optim)},
    )
    model.gradient()  # compiles
    metrics = Metrics(Path(run.run.out), 0)
    for step in range(1, run.steps + 1):
        began, lr = time.perf_counter(), run.lr(step)
        model.take(*draw(tokens, run, rng), lr)
        loss = float(model.step())
        ms = 1e3 * (time.perf_counter() - began)
        metrics.write({"step": step, "loss": loss, "lr": lr, "ms": ms})
        if step == run.steps or (run.run.eval_every and step % run.run.eval_every == 0):
            held = []
            for ids, targets in heldout_batches(heldout, run):
                model.take(ids, targets)
                held.append((model.loss(), int((targets != IGNORED).sum())))
            total, count = sum(loss * n for loss, n in held), sum(n for _, n in held)
            metrics.write({"step": step, "heldout_loss": total / count})
    metrics.write({"step": run.steps, "save_ms": 0.0})  # nothing is kept, and it has ended
    metrics.close()
    return 0


def all_tokens(windows: Windows) -> Array:
    """Return the tokens of a packed set, one after the other."""
    return np.concatenate([windows.read(i)[0] for i in range(windows.dataset.n_windows)])


def draw(tokens: Array, run: RunFile, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return a batch (B, T) from random places, and its targets."""
    B, T = run.train.global_batch, run.window
    starts = rng.integers(0, len(tokens) - T, B)[:, None]
    return tokens[starts + np.arange(T)], tokens[starts + np.arange(1, T + 1)]


def heldout_batches(windows: Windows, run: RunFile) -> list[tuple[Array, Array]]:
    """Return the first ``run.eval_windows`` held-out windows, which are what ours is held to."""
    count, size = min(run.run.eval_windows, windows.dataset.n_windows), run.train.global_batch
    batches = [windows.batch(i, min(i + size, count)) for i in range(0, count, size)]
    return [(batch.ids, np.where(batch.mask, batch.targets, IGNORED)) for batch in batches]
