"""Checkpoints: complete or absent, and the same for any number of ranks.

A checkpoint is a folder ``step-N``::

    master.bin, m.bin, v.bin   the flat float32 arrays, each rank writing its slice at its offset;
                               v, of a run with Muon, has what AdamW steps alone, without a gap;
                               what was imported (``weights.py``) has master.bin alone, or in its
                               place kept.bin, the parameters one behind the other as they came
    tokenizer.myllm            so that the folder can be evaluated and generated from by itself
    manifest.json              written last: state, resolved run file, CRCs, checksum of itself

It is written (``saving.py``) as ``step-N.tmp``: every file is fsynced, the manifest last, then the
folder is renamed and the rename fsynced; only then does ``latest`` name it. A power cut at any
moment leaves the checkpoint before it, or this one. CRCs are of blocks of 65,536 elements, of which
slices are made (with Muon blocks begin anew with every matrix, see ``slices.py``), so any number of
ranks can check exactly what it reads.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from accel import AUTO, DEFAULT, Attention, Products
from dist import manifest
from dist.comm import Comm, together
from dist.config import OptimKind
from dist.manifest import Count, Crc, crc32
from dist.monitor import Memory
from dist.slices import ARRAYS, Cutting, Range
from dist.step import Stepper
from reference.config import Config
from reference.global_norm import SUM_BLOCK
from reference.params import decoder_layout
from reference.types import Array

FORMAT = "myllm-checkpoint"
MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"  # the folder of a run that they lie in
STRETCH = 4 * SUM_BLOCK  # elements that are read and checked at once: they stay in a cache
KEPT = "kept"  # of what was imported: bytes
ADVICE = "take an older one: train has --from step-N, others are told RUN/checkpoints/step-N"


class State(manifest.Record, kw_only=True, frozen=True):
    """What a run is, beside its arrays."""

    format: str = FORMAT
    step: Count  # steps done, those skipped by a guard included
    updates: Count  # optimizer steps done
    position: Count  # windows taken: the data cursor
    # keys the data order and dropout, with step and position: there is no other RNG
    seed: Annotated[int, msgspec.Meta(ge=0)]
    tokenizer_sha256: str | None
    chats: bool | None = (
        None  # whether it learned from any, from its first weights on; None: unknown
    )
    config: dict[str, dict[str, Any]]  # the resolved run file
    # the checksums of the manifests of the packed sets that it learns from and is measured on
    data: dict[str, str] = msgspec.field(default_factory=dict)
    monitor: Memory

    @property
    def attention(self) -> Attention:
        """The path of attention that the run took; AUTO: there was but one, or it is not known."""
        found: Attention = self.config.get("run", {}).get("attention", AUTO)
        return found

    @property
    def products(self) -> Products:
        """The algorithms that the run multiplied by; AUTO: none were chosen, or are on a GPU."""
        run = self.config.get("run", {})
        found = run.get("products", DEFAULT if run.get("backend") == "cuda" else AUTO)
        return found if isinstance(found, str) else tuple(found)


class Manifest(State, kw_only=True, frozen=True):
    """A state, and how its arrays lie on disk."""

    parameters: Count
    block: int
    crc32: dict[str, tuple[Crc, ...]]  # by array, of its blocks
    # of numbers, by the names of the parameters that are kept in fewer bits than float32 has
    kinds: dict[str, str] = msgspec.field(default_factory=dict)


def folder_name(step: int) -> str:
    """Return the name of the checkpoint after ``step`` steps."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step of a folder that has the name and the manifest of a checkpoint of ours."""
    if re.fullmatch(r"step-[0-9]{8,}", path.name) is None or not (path / MANIFEST).is_file():
        return None
    return int(path.name.removeprefix("step-"))


def name_of(path: Path) -> str:
    """Return what the model in a checkpoint is called: after its run, where it is of one."""
    path = path.resolve()
    run = path.parent.parent.name if step_of(path) is not None else ""
    return run or path.name


def steps(folder: Path) -> list[int]:
    """Return the steps of the whole checkpoints in a folder, the oldest first."""
    found = (step_of(path) for path in folder.glob("step-*"))
    return sorted(step for step in found if step is not None)


def pointed(folder: Path, pointer: str = "latest") -> Path | None:
    """Return the checkpoint that ``latest`` or ``best`` names, or None where there is no such file.

    Raises
    ------
    ValueError, OSError
        When it cannot be read, or does not name a checkpoint.
    """
    path = folder / pointer
    try:
        name = path.read_bytes().decode("ascii", "replace").strip()
    except FileNotFoundError:
        return None
    if re.fullmatch(r"step-[0-9]{8,}", name) is None:
        here = [found.name for found in sorted(folder.glob("step-*")) if found.is_dir()]
        raise ValueError(
            f"{path} does not name a checkpoint but says {name[:40]!r}: write the name of one "
            f"there, such as {here[-1] if here else 'step-00000100'}"
        )
    return folder / name


def to_resume(folder: Path, chosen: str | None = None) -> Path | None:
    """Return the checkpoint that a run goes on from; None when it has none yet.

    Parameters
    ----------
    folder : Path
    chosen : str, optional
        ``step-N``, in place of the one that ``latest`` names.

    Raises
    ------
    ValueError, OSError
        When it is not there.
    """
    known = steps(folder)
    pointed(folder, "best")  # which is read again when old ones are removed, hours later
    if chosen is not None:
        number = re.fullmatch(r"(?:step-)?0*([0-9]{1,18})", chosen)
        if number is None or int(number[1]) not in known:
            names = ", ".join(map(folder_name, known)) or "none"
            raise ValueError(f"{folder} has no checkpoint {chosen!r}; there are: {names}")
        return folder / folder_name(int(number[1]))
    newest = pointed(folder)
    if newest is None and known:  # a crash before the first was pointed at, or the file was lost
        return folder / folder_name(known[-1])
    return newest


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
    for folder in (path, path / CHECKPOINTS) if path.is_dir() else ():
        found = pointed(folder, "best") or to_resume(folder)
        if found is not None:
            return found
    name = f"{path}" if f"{path}".isprintable() else repr(f"{path}")
    files = (".gguf", ".bin", ".safetensors")
    theirs = path.suffix in files or (path / "config.json").is_file()
    hint = "; `myllm import` makes one of a model of others" if theirs else ""
    raise FileNotFoundError(f"{name} is no checkpoint and no folder of a run that has one{hint}")


def read_manifest(path: Path) -> Manifest:
    """Return a checkpoint's manifest, checked to be one."""
    if not (path / MANIFEST).exists():
        raise FileNotFoundError(
            f"{path} is no whole checkpoint: it has no {MANIFEST}; {ADVICE}. If "
            f"{path.parent / 'latest'} or 'best' names it, the name of another one may stand there"
        )
    found = manifest.read(path / MANIFEST, Manifest, FORMAT, ADVICE)
    counts = {name: len(crcs) for name, crcs in found.crc32.items()}
    try:
        cutting = cutting_of(found)
    except ValueError as error:
        raise ValueError(f"{path / MANIFEST} describes no model: {error}; {ADVICE}") from None
    blocks = {name: cutting.n_blocks(name) for name in counts}
    known = [{KEPT}] if found.kinds else [{*ARRAYS}, {"master"}]
    if found.block != SUM_BLOCK or counts != blocks or set(counts) not in known:
        raise ValueError(f"{path / MANIFEST} does not have a CRC for each block; {ADVICE}")
    if step_of(path) not in (None, found.step):
        raise ValueError(f"{path} holds the checkpoint of step {found.step}: it was renamed")
    return found


def begun_with(init: str, run: Path) -> Manifest | None:
    """Return what the newest checkpoint of a run folder says, if the run began with ``init``."""
    newest = to_resume(run / CHECKPOINTS)
    begun = None if newest is None else read_manifest(newest)
    if begun is None or begun.config.get("train", {}).get("init") != init:
        return None
    return begun


def read_resumable(path: Path) -> Manifest:
    """Return the manifest of a checkpoint that a run can go on from."""
    found = read_manifest(path)
    if set(found.crc32) != set(ARRAYS):
        raise ValueError(
            f"{path} holds weights alone, which a run cannot go on from: begin one with them, by "
            "train.init"
        )
    return found


def model_of(state: State) -> Config:
    """Return the config of a checkpoint's model."""
    return Config.from_dict(state.config.get("model", {}))


def kind_of(state: State) -> OptimKind:
    """Return the kind of optimizer that a checkpoint's run has; it had one before it had a name."""
    return "muon" if state.config.get("optim", {}).get("kind") == "muon" else "adamw"


def cutting_of(described: Manifest) -> Cutting:
    """Return how the arrays of a checkpoint are cut."""
    if described.kinds:
        from dist.numbers import places  # and Numba with it: who reads none does without

        return Cutting(places(decoder_layout(model_of(described)), described.kinds)[""])
    if kind_of(described) == "muon":
        return Cutting.of(decoder_layout(model_of(described)), "muon")
    return Cutting(described.parameters)


def read_slices(path: Path, name: str, described: Manifest, slices: Sequence[Range]) -> Array:
    """Return elements low .. high - 1 of an array for each slice, with their blocks' CRCs checked.

    Slices are whole blocks; what is returned holds one after the other.
    """
    cutting, done = cutting_of(described), 0
    slices = cutting.held(name, slices)
    data = np.empty(sum(high - low for low, high in slices), "<f4")
    for low, high in slices:
        with reading(path, name, described, cutting, (low, high)) as read:
            while low < high:
                n = min(STRETCH, high - low)
                read(data[done : done + n])
                low, done = low + n, done + n
    return data.astype(np.float32, copy=False)


@contextlib.contextmanager
def reading(
    path: Path, name: str, described: Manifest, cutting: Cutting, blocks: Range
) -> Iterator[Callable[[Array], None]]:
    """Yield a function that fills memory with the next elements of some whole blocks of an array.

    The CRC of a block is checked when its last byte is read. ``cutting`` is
    ``cutting_of(described)``, and the memory is of the type that the elements have on the disk,
    little-endian float32 or what is ``KEPT``.

    Raises
    ------
    ValueError, OSError
        When the file does not hold what was written.
    """
    file_path = path / f"{name}.bin"
    advice = ADVICE if set(described.crc32) == {*ARRAYS} else "import it again"
    width = 1 if name == KEPT else 4  # bytes of an element
    if not file_path.exists():
        raise FileNotFoundError(f"{path} has no {file_path.name}: it was moved or lost; {advice}")
    expected, size = width * cutting.count(name), file_path.stat().st_size
    if size != expected:
        raise ValueError(
            f"{file_path} should have {expected:,} bytes but has {size:,}: it is damaged; {advice}"
        )
    numbers, crcs = cutting.numbers(name), described.crc32[name]
    coming = cutting.blocks(*blocks)
    start = end = at = blocks[0] * width
    crc = 0

    def read(data: Array) -> None:
        nonlocal start, end, at, crc
        new = left = data.view(np.uint8).data
        while left:
            n = file.readinto(left)
            if not n:
                raise ValueError(f"{file_path} was cut short while it was being read")
            left = left[n:]
        while new:
            if at == end:
                (start, end), crc = (width * edge for edge in next(coming)), 0
            crc = crc32(new[: end - at], crc)
            at, new = min(end, at + len(new)), new[end - at :]
            if at == end and crc != crcs[numbers[start // width]]:
                raise ValueError(
                    f"{file_path} is damaged: {'bytes' if name == KEPT else 'elements'} "
                    f"{start // width} to {end // width} do not have the CRC they were written "
                    f"with; {advice}"
                )

    with file_path.open("rb", buffering=0) as file:
        file.seek(width * cutting.offset(name, blocks[0]))
        yield read


def load(path: Path, stepper: Stepper, comm: Comm) -> State:
    """Fill a stepper from a checkpoint, on every rank, however many wrote it.

    Raises
    ------
    AllRanksError
        When anything is damaged or does not fit the model.
    """

    def read() -> tuple[State, list[Array]]:
        described = read_resumable(path)
        if described.parameters != stepper.layout.size:
            raise ValueError(
                f"{path} holds {described.parameters:,} parameters, the model has "
                f"{stepper.layout.size:,}"
            )
        kind, wanted = kind_of(described), stepper.optim.kind
        if kind != wanted:
            raise ValueError(
                f"{path} has the moments of optim.kind {kind!r}, of which {wanted!r} can make "
                f"nothing: keep {kind!r}, or begin another run with its weights, by train.init"
            )
        whole = [(0, stepper.layout.size)]
        arrays = [
            read_slices(path, name, described, whole if name == "master" else stepper.slices)
            for name in ARRAYS
        ]
        return described, arrays

    loaded: list[tuple[State, list[Array]]] = []
    together(comm, lambda: loaded.append(read()))  # not its result: arrays are not to be sent
    state, arrays = loaded[0]
    for name, array in zip(ARRAYS, arrays, strict=True):  # one at a time: a GPU may be nearly full
        setattr(stepper, name, stepper.ops.from_numpy(array))
    stepper.updates = state.updates
    stepper.refresh()
    return state
