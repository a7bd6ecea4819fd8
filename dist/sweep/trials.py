"""What a sweep consists of: every combination of the values of a grid, with every seed.

A grid is one or more axes. The keys of one axis go together, value by value; axes multiply::

    --grid train.lr=1e-3,3e-3 --grid model.d_model=64,128 model.d_ff=176,352        4 settings

All runs are resolved and checked before any of them starts.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accel import AUTO
from dist import checkpoint
from dist import config as run_file
from dist.config import LEARNING_TABLES, Run, RunFile
from dist.data import TrainingData, held_out
from dist.shards import MANIFEST, is_packed, read_manifest
from dist.sizing import SHARE, step_flops

FIGURES = ("backend", "compute", "attention", "products", "eval_windows")  # of [run]: its figures


class Axis(NamedTuple):
    """Keys that change together."""

    keys: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]  # of each setting, a value for each key, as written


class Budget(NamedTuple):
    """How long each run is: ``steps``, ``tokens``, ``flops`` or ``minutes``; "": as its file."""

    kind: str = ""
    amount: float = 0.0

    def steps(self, run: RunFile, seconds: float | None) -> int:
        """Return the steps of a run, of which one takes ``seconds``: of minutes only."""
        if self.kind == "steps":
            return int(self.amount)
        if self.kind == "tokens":
            return max(1, round(self.amount / run.tokens_per_step))
        if self.kind == "flops":
            return max(1, round(self.amount / step_flops(run)))
        if self.kind == "minutes":
            assert seconds is not None
            return max(1, int(SHARE * 60 * self.amount / seconds))
        return run.steps

    def apply(self, run: RunFile, seconds: float | None = None) -> RunFile:
        """Return the run with so many steps, of which warm-up and decay keep their share."""
        steps = self.steps(run, seconds)
        if steps == run.steps:
            return run
        share, train = steps / run.steps, run.train
        warmup = min(round(share * train.warmup_steps), steps)
        decay = min(round(share * train.decay_steps), steps - warmup)
        if train.decay_steps:
            decay = max(1, decay)
        changed = dataclasses.replace(train, steps=steps, warmup_steps=warmup, decay_steps=decay)
        return dataclasses.replace(run, train=changed)


class Trial(NamedTuple):
    """One run of a sweep."""

    settings: dict[str, Any]  # key -> value, of the grid
    shown: tuple[str, ...]  # the keys that differ between its settings and the others
    seed: int
    name: str  # of its folder: what it is, and a hash of all that decides its figures
    told: dict[str, dict[str, Any]]  # the tables of its run file, before the budget
    run: RunFile

    @property
    def label(self) -> str:
        """What people call it."""
        return label_of(self.settings, self.shown, self.seed)


def varied(settings: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return the keys whose values differ between settings; where none does, the first."""
    keys = tuple(settings[0]) if settings else ()
    differ = tuple(key for key in keys if any(s[key] != settings[0][key] for s in settings))
    return differ or keys[:1]


def label_of(settings: dict[str, Any], shown: Sequence[str], seed: int) -> str:
    """Return the settings and the seed in a few words."""
    return ", ".join([*(f"{k.partition('.')[2]} {settings[k]}" for k in shown), f"seed {seed}"])


def parse_axis(words: Sequence[str]) -> Axis:
    """Return the axis of one ``--grid``: ``key=value,value …``, and more keys beside it."""
    keys, columns = [], []
    for word in words:
        key, equals, text = word.partition("=")
        values = [value.strip() for value in _split(text)]
        if not equals or "." not in key or not all(values):
            raise ValueError(
                f"--grid takes table.key=value,value such as train.lr=1e-3,3e-3; got {word!r}"
            )
        keys.append(key.strip())
        columns.append(values)
    if len({len(values) for values in columns}) > 1:
        counts = ", ".join(f"{k}: {len(v)}" for k, v in zip(keys, columns, strict=True))
        raise ValueError(
            f"the keys of one --grid go together and need as many values each ({counts}); give "
            "keys that are to be combined a --grid each"
        )
    return Axis(tuple(keys), tuple(zip(*columns, strict=True)))


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def trials_of(
    path: str, overrides: Sequence[str], axes: Sequence[Axis], seeds: int, budget: Budget, out: Path
) -> list[Trial]:
    """Return all runs of a sweep, resolved and checked; only ``minutes`` leaves the steps open.

    Raises
    ------
    ValueError, OSError
        When a key or value is wrong, or a run cannot be begun with its data or weights.
    """
    keys = [key for axis in axes for key in axis.keys]
    _check_keys(keys, seeds, budget)
    resolved: list[tuple[dict[str, Any], RunFile]] = []
    for values in itertools.product(*(axis.values for axis in axes)):
        chosen = [text for row in values for text in row]
        words = [f"{key}={text}" for key, text in zip(keys, chosen, strict=True)]
        run = run_file.load(path, [*overrides, "run.out=-"], words)
        if "run.compute" in keys and run.run.compute == AUTO:
            raise ValueError(
                "--grid run.compute takes modes, not 'auto', which is settled once for all runs: "
                "give that by --set run.compute=auto"
            )
        if run.data.phases and budget.kind:
            raise ValueError(
                f"{path}: data.phases say how long a run is: leave --{budget.kind} out"
            )
        tables = run.to_dict()
        settings = {key: tables[key.partition(".")[0]][key.partition(".")[2]] for key in keys}
        resolved.append((settings, run))
    shown = varied([settings for settings, _ in resolved])
    found: dict[str, Trial] = {}
    for settings, run in resolved:
        for seed in range(run.train.seed, run.train.seed + seeds):
            train = dataclasses.replace(run.train, seed=seed)
            one = dataclasses.replace(run, train=train)
            told = one.to_dict()
            name = _name(told, settings, shown, budget, out)
            if name in found:
                raise ValueError(
                    f"--grid asks for the same run twice: {label_of(settings, shown, seed)}"
                )
            placed = dataclasses.replace(one.run, out=str(out / "runs" / name), keep=1)
            one = dataclasses.replace(one, run=placed)
            one.accumulation(1)
            if budget.kind != "minutes":
                one = budget.apply(one)
            found[name] = Trial(settings, shown, seed, name, told, one)
        TrainingData(one)
        held_out(one)
    return list(found.values())


def _check_keys(keys: list[str], seeds: int, budget: Budget) -> None:
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"--grid has {key} twice")
        if key in ("run.out", "run.keep"):
            raise ValueError(f"--grid cannot change {key}: a sweep gives each run its own folder")
        if key == "train.steps" and budget.kind:
            raise ValueError(f"--grid train.steps and --{budget.kind} both say how long a run is")
        if key == "train.seed" and seeds > 1:
            raise ValueError("--grid train.seed and --seeds both say which seeds: leave one out")


def _name(
    tables: dict[str, dict[str, Any]],
    settings: dict[str, Any],
    shown: tuple[str, ...],
    budget: Budget,
    out: Path,
) -> str:
    """Return the name of a run's folder, which it keeps when other keys are shown."""
    digest = _digest(tables, settings, budget)
    kept = [path.name for path in (out / "runs").glob(f"*-{digest}")]
    seed = tables["train"]["seed"]
    readable = re.sub(r"[^\w.+-]+", "_", label_of(settings, shown, seed))
    return min(kept, default=f"{readable[:80]}-{digest}")


def _digest(tables: dict[str, dict[str, Any]], settings: dict[str, Any], budget: Budget) -> str:
    usual = dataclasses.asdict(Run(out=""))
    decides = [{t: tables[t] for t in LEARNING_TABLES}, settings, budget.kind, float(budget.amount)]
    decides += [[key, tables["run"][key]] for key in FIGURES if tables["run"][key] != usual[key]]
    decides += [*texts(tables["data"]), *weights(tables["train"]["init"])]
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:8]


def texts(told: Any) -> list[str]:
    """Return the checksums of the packed texts that are named anywhere in a table."""
    if isinstance(told, str):
        manifest = Path(told) / MANIFEST
        packed = bool(told) and is_packed(Path(told))
        return [_checksum(manifest, manifest.stat().st_mtime_ns)] if packed else []
    within = told.values() if isinstance(told, dict) else told
    return (
        [found for each in within for found in texts(each)] if isinstance(within, Iterable) else []
    )


def weights(init: str) -> list[str]:
    """Return the checksum of the checkpoint that a run would begin with now, if with any."""
    return [checkpoint.read_manifest(checkpoint.find(init)).checksum] if init else []


@functools.lru_cache(1024)
def _checksum(path: Path, changed: int) -> str:
    return read_manifest(path.parent).checksum


def belongs(name: str, settings: dict[str, Any], seed: int, trial: Trial, budget: Budget) -> bool:
    """Whether a folder's run differs from a sweep's trial in its values and seed alone."""
    if settings.keys() != trial.settings.keys():
        return False
    tables = {name: dict(table) for name, table in trial.told.items()}
    for key, value in settings.items():
        table, _, inner = key.partition(".")
        tables[table][inner] = value
    tables["train"]["seed"] = seed
    try:
        return name.endswith("-" + _digest(tables, settings, budget))
    except (ValueError, OSError):  # its train.init is gone: nobody knows what that was
        return False
