"""Checkpoints: complete or absent, and the same for any number of ranks.

A checkpoint is a folder ``step-N``::

    master.bin, m.bin, v.bin   the flat float32 arrays, each rank writing its slice at its offset
    tokenizer.myllm            so that the folder can be evaluated and generated from by itself
    manifest.json              written last: state, resolved run file, CRCs

It is written as ``step-N.tmp``: every file is fsynced, the manifest last, then the folder is
renamed and the rename fsynced; only then does ``latest`` name it. A power cut at any moment leaves
the checkpoint before it, or this one. CRCs are of blocks of 65,536 elements, the unit in which
slices are assigned, so any number of ranks can check exactly what it reads.
"""

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dist.comm import AllRanksError, Comm, together
from dist.files import replace_durably, sync_folder, write_durably
from dist.shards import TOKENIZER
from dist.step import Stepper
from reference.config import Config
from reference.global_norm import SUM_BLOCK
from reference.ops import Ops
from reference.params import decoder_layout
from reference.types import Array

FORMAT = "myllm-checkpoint"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
ARRAYS = ("master", "m", "v")


class State(NamedTuple):
    """What a run is, beside its arrays."""

    step: int  # steps done, those skipped by a guard included
    updates: int  # optimizer steps done
    position: int  # windows taken: the data cursor
    seed: int  # keys the data order and dropout, with step and position: there is no other RNG
    tokenizer_sha256: str | None
    config: dict[str, Any]  # the resolved run file
    monitor: dict[str, Any]  # best evaluation and what the guards remember


def folder_name(step: int) -> str:
    """Return the name of the checkpoint after ``step`` steps."""
    return f"step-{step:08d}"


# ---- writing -------------------------------------------------------------------------------------


def save(
    folder: Path, stepper: Stepper, state: State, comm: Comm, tokenizer: Path | None = None
) -> Path:
    """Write a checkpoint of all ranks into ``folder`` and point ``latest`` at it.

    Every rank calls it. Returns the checkpoint's path.

    Raises
    ------
    AllRanksError
        When any rank could not write: the disk is full, say. What was there before stays as it was.
    """
    name = folder_name(state.step)
    part = folder / f"{name}.tmp"

    def prepare() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if part.exists():
            shutil.rmtree(part)
        part.mkdir()
        for array in ARRAYS:
            (part / f"{array}.bin").touch()
        if tokenizer is not None:
            write_durably(part / TOKENIZER, tokenizer.read_bytes())

    def write_slices() -> dict[str, list[int]]:
        slices = {
            "master": stepper.master[stepper.low : stepper.high],
            "m": stepper.m,
            "v": stepper.v,
        }
        return {
            name: _write_slice(part / f"{name}.bin", stepper.low, stepper.ops.to_numpy(array))
            for name, array in slices.items()
        }

    def finish() -> None:
        manifest = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "parameters": stepper.layout.size,
            "block": SUM_BLOCK,
            **state._asdict(),
            "crc32": {name: [c for rank in crcs for c in rank[name]] for name in ARRAYS},
        }
        write_durably(part / MANIFEST, json.dumps(manifest).encode())
        sync_folder(part)
        whole = folder / name
        if whole.exists():  # of a run that went this far, was set back, and came again
            _remove(whole)
        part.rename(whole)
        sync_folder(folder)
        point(folder, "latest", name)

    try:
        together(comm, prepare, only=0)
        crcs = together(comm, write_slices)
        together(comm, finish, only=0)
    except AllRanksError as error:
        if comm.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
        raise AllRanksError(
            f"the checkpoint {folder / name} could not be written ({error}); what was saved before "
            "is untouched: see to it (is the disk full?), then run the same command again"
        ) from error
    return folder / name


def _bytes_of(array: Array) -> memoryview:
    return array.view(np.uint8).data


def _write_slice(path: Path, offset: int, array: Array) -> list[int]:
    """Write a slice at its element offset, durably, and return the CRC of each block."""
    data = np.ascontiguousarray(array, "<f4")
    with path.open("r+b", buffering=0) as file:
        file.seek(4 * offset)
        left = _bytes_of(data)
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())
    return [zlib.crc32(data[i : i + SUM_BLOCK].data) for i in range(0, len(data), SUM_BLOCK)]


def point(folder: Path, pointer: str, name: str) -> None:
    """Make ``latest`` or ``best`` name a checkpoint, in one step that cannot be half done."""
    replace_durably(folder / pointer, f"{name}\n".encode())


def _remove(path: Path) -> None:
    """Remove a checkpoint; it stops being one before the first of its files goes."""
    doomed = path.with_name(path.name + ".old")
    if doomed.exists():
        shutil.rmtree(doomed)
    path.rename(doomed)
    shutil.rmtree(doomed)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest checkpoints and the best, and what was half written."""
    kept = {pointed(folder, "best"), pointed(folder, "latest")}
    checkpoints = sorted(path for path in folder.glob("step-*") if not path.suffix)
    for path in checkpoints[:-keep]:
        if path not in kept:
            _remove(path)
    for path in [*folder.glob("step-*.tmp"), *folder.glob("step-*.old")]:
        shutil.rmtree(path)


# ---- reading -------------------------------------------------------------------------------------


def pointed(folder: Path, pointer: str = "latest") -> Path | None:
    """Return the checkpoint that ``latest`` or ``best`` names, or None."""
    path = folder / pointer
    if not path.exists():
        return None
    return folder / path.read_text(encoding="utf-8").strip()


def find(path: str | Path) -> Path:
    """Return the checkpoint meant by a path: itself, or the best or newest of a run folder.

    Raises
    ------
    FileNotFoundError
        When there is none.
    """
    path = Path(path)
    if (path / MANIFEST).exists():
        return path
    for folder in (path, path / "checkpoints"):
        for pointer in ("best", "latest"):
            found = pointed(folder, pointer)
            if found is not None:
                return found
    raise FileNotFoundError(f"{path} is no checkpoint and no folder of a run that has one")


def read_manifest(path: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest, checked to be one."""
    if not (path / MANIFEST).exists():
        raise FileNotFoundError(
            f"{path} is no whole checkpoint: it has no {MANIFEST}. If {path.parent / 'latest'} or "
            "'best' names it, write the name of another one there"
        )
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        good = manifest["format"] == FORMAT and manifest["format_version"] == FORMAT_VERSION
        good = good and manifest["block"] == SUM_BLOCK
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path / MANIFEST} is damaged ({error!r}); use an older one") from error
    if not good:
        raise ValueError(f"{path} is not a checkpoint of this version of MyLLM")
    return dict(manifest)


def read_state(path: Path) -> State:
    """Return the state in a checkpoint."""
    manifest = read_manifest(path)
    return State(**{field: manifest[field] for field in State._fields})


def _read_slice(path: Path, name: str, manifest: dict[str, Any], low: int, high: int) -> Array:
    """Return elements low .. high - 1 of an array, whole blocks, with their CRCs checked."""
    file_path = path / f"{name}.bin"
    expected = 4 * int(manifest["parameters"])
    size = file_path.stat().st_size
    if size != expected:
        raise ValueError(
            f"{file_path} should have {expected:,} bytes but has {size:,}: it is damaged"
        )
    data = np.empty(high - low, "<f4")
    with file_path.open("rb", buffering=0) as file:
        file.seek(4 * low)
        left = _bytes_of(data)
        while left:
            read = file.readinto(left)
            if not read:
                raise ValueError(f"{file_path} was cut short while it was being read")
            left = left[read:]
    crcs = manifest["crc32"][name][low // SUM_BLOCK :]
    for i, crc in zip(range(0, len(data), SUM_BLOCK), crcs, strict=False):
        if zlib.crc32(data[i : i + SUM_BLOCK].data) != crc:
            raise ValueError(
                f"{file_path} is damaged: elements {low + i} to {low + i + SUM_BLOCK} do not have "
                "the CRC they were written with; resume from an older checkpoint"
            )
    return data.astype(np.float32, copy=False)


def load_master(path: Path) -> Array:
    """Return the weights of a checkpoint: (parameters,) float32."""
    manifest = read_manifest(path)
    return _read_slice(path, "master", manifest, 0, int(manifest["parameters"]))


def load(path: Path, stepper: Stepper, comm: Comm) -> State:
    """Fill a stepper from a checkpoint, on every rank, however many wrote it.

    Raises
    ------
    AllRanksError
        When anything is damaged or does not fit the model.
    """

    def read() -> tuple[State, list[Array]]:
        manifest = read_manifest(path)
        if manifest["parameters"] != stepper.layout.size:
            raise ValueError(
                f"{path} holds {manifest['parameters']:,} parameters, the model has "
                f"{stepper.layout.size:,}"
            )
        whole, mine = (0, stepper.layout.size), (stepper.low, stepper.high)
        arrays = [
            _read_slice(path, name, manifest, *(whole if name == "master" else mine))
            for name in ARRAYS
        ]
        return State(**{field: manifest[field] for field in State._fields}), arrays

    loaded: list[tuple[State, list[Array]]] = []
    together(comm, lambda: loaded.append(read()))  # not its result: arrays are not to be sent
    state, arrays = loaded[0]
    for name, array in zip(ARRAYS, arrays, strict=True):  # one at a time: a GPU may be nearly full
        setattr(stepper, name, stepper.ops.from_numpy(array))
    stepper.updates = state.updates
    stepper.refresh()
    return state


class Model(NamedTuple):
    """A trained model, ready to be run."""

    ops: Ops
    config: Config
    params: dict[str, Array]
    path: Path
    state: State
    tokenizer: Path | None


def load_model(path: str | Path, backend: str, compute: str = "float32") -> Model:
    """Load the weights of a checkpoint, or of the best of a run folder, into a backend."""
    from accel import load as load_backend

    found = find(path)
    state = read_state(found)
    config = Config.from_dict(state.config["model"])
    layout = decoder_layout(config)
    master = load_master(found)
    ops = load_backend(backend, compute=compute)
    params = ops.parameters(layout.views(ops.from_numpy(master)))
    beside = found / TOKENIZER
    return Model(ops, config, params, found, state, beside if beside.exists() else None)
