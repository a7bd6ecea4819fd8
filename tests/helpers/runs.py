"""Small datasets and run files, for tests of training, and what a run left behind."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from accel import threads
from dist import checkpoint, cli, monitor
from dist.config import RunFile, from_tables
from dist.slices import ARRAYS
from dist.writer import ShardWriter
from reference.types import Array
from tokenizer import train_from_iterator

VOCAB = 40
EOS = 2
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards pack boxes".split()
# a rank that waits leaves its core at once: other tests run beside it
ENVIRONMENT = {
    **{"OPENBLAS_NUM_THREADS": "1", "MYLLM_THREADS": "1"},
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
}


def write_dataset(
    folder: Path, ids: Array, predict: Array | None = None, shard_tokens: int = 700, **facts: Any
) -> Path:
    """Pack ids as they are."""
    writer = ShardWriter(folder, VOCAB, shard_tokens)
    writer.write(ids.astype(np.int32), predict)
    manifest = {"vocab_size": VOCAB, "eos": EOS, "window": None, "documents": 1}
    writer.finish(**{**manifest, "tokenizer_sha256": None, **facts})
    return folder


def random_walk(n: int, seed: int = 0) -> Array:
    """Return ids that a model can learn to predict."""
    return np.cumsum(np.random.default_rng(seed).integers(0, 3, n)) % VOCAB


def tables(folder: Path, **overrides: Any) -> dict[str, dict[str, Any]]:
    """Return the tables of a small run on data in ``folder``; ``train__lr=1`` sets train.lr."""
    result: dict[str, dict[str, Any]] = {
        "model": {
            "vocab_size": VOCAB,
            "d_model": 16,
            "n_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 1,
            "d_head": 8,
            "d_ff": 24,
            "context_length": 12,
        },
        "data": {"train": str(folder / "train"), "heldout": str(folder / "heldout")},
        "train": {"micro_batch": 1, "global_batch": 8, "steps": 6, "lr": 1e-2},
        "optim": {},
        "run": {
            "out": str(folder / "run"),
            "backend": "reference",
            "eval_windows": 7,
            "log_every": 1,
        },
    }
    for name, value in overrides.items():
        table, _, key = name.partition("__")
        result[table][key] = value
    return result


def prepare(folder: Path, **overrides: Any) -> RunFile:
    """Write the datasets and return the run file."""
    ids = random_walk(1900)
    # unequal masks, and whole windows in which nothing is to be predicted
    predict = np.random.default_rng(1).random(len(ids)) < np.linspace(0, 1.2, len(ids))
    predict[:400] = False
    write_dataset(folder / "train", ids, predict)
    write_dataset(folder / "heldout", random_walk(200, seed=5))
    return from_tables(tables(folder, **overrides))


def with_run(config: RunFile, **changes: Any) -> RunFile:
    """Return the run file with other values in [run]."""
    return dataclasses.replace(config, run=dataclasses.replace(config.run, **changes))


def text(number: int) -> str:
    rng = np.random.default_rng(number)
    return " ".join(rng.choice(WORDS, int(rng.integers(5, 40)))) + f" {number}\n"


def prepare_texts(folder: Path, **overrides: Any) -> RunFile:
    """Train a tokenizer, pack texts with it, and return the run file of a model that reads them."""
    train_from_iterator([text(i) for i in range(100)], 320).save(folder / "t.tok")
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": text(i)}) for i in range(400)))
    words = [str(folder / "a.jsonl"), "--tokenizer", str(folder / "t.tok"), "--heldout", "0.1"]
    assert cli.main(["pack", *words, "-o", str(folder), "--processes", "1"]) == 0
    more = {"model__vocab_size": 330, "model__context_length": 48}  # more than the tokenizer's
    return from_tables(tables(folder, **more, **overrides))


def reference(*words: str) -> list[str]:
    """Return a command that computes by the reference."""
    return [*words, "--backend", "reference"]


def learned(folder: Path) -> Path:
    """Return the folder of a run whose model has learned a little."""
    changes: dict[str, Any] = {
        "train__steps": 60,
        "run__eval_every": 30,
        "run__sample_every": 60,
        "run__sample_prompt": "the quick",
        "run__eval_windows": 9999,
    }
    config = prepare_texts(folder, **changes)
    assert cli.main(["train", str(save_run_file(config, folder / "run.toml"))]) == 0
    return folder / "run"


def save_run_file(config: RunFile, path: Path) -> Path:
    path.write_text(config.to_toml(), encoding="utf-8")
    return path


def train(config: RunFile, *arguments: str) -> int:
    path = save_run_file(config, Path(config.run.out).with_suffix(".toml"))
    return cli.main(["train", str(path), *arguments])


@contextlib.contextmanager
def in_threads(n: int) -> Iterator[None]:
    """Let kernels of this process use so many threads."""
    before = threads.threads()
    threads.set_threads(n)
    try:
        yield
    finally:
        threads.set_threads(before)


def digest(config: RunFile) -> str:
    """Return a hash of everything that the newest checkpoint of a run holds."""
    path = checkpoint.to_resume(Path(config.run.out) / "checkpoints")
    assert path is not None
    arrays = b"".join((path / f"{name}.bin").read_bytes() for name in ARRAYS)
    state = msgspec.structs.replace(checkpoint.read_manifest(path), config={}, checksum="")
    return hashlib.sha256(arrays + repr(state).encode()).hexdigest()


def losses(config: RunFile) -> list[float]:
    return [r["loss"] for r in monitor.read_metrics(Path(config.run.out)) if "loss" in r]
