"""The run file: one TOML file that says everything about a training run.

Tables ``[model] [data] [train] [optim] [run]``. A key that nobody reads is refused, because a
misspelled setting that is silently ignored costs a training run. ``--set table.key=value``
overrides; ``to_toml`` writes the resolved file, every default included.
"""

import dataclasses
import json
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from accel import AUTO, BACKENDS, COMPUTE, READING, Attention
from reference.blocks import Recompute
from reference.config import Config, Positive, Range, check_fields
from reference.schedule import Schedule, learning_rate

T = TypeVar("T")
Carrier = Literal["auto", "mpi", "nccl"]
OptimKind = Literal["adamw", "muon"]
# what decides the bits that a run learns: a resumed run must not differ in it unnoticed
LEARNING_TABLES = ("model", "data", "train", "optim")
Whole = Annotated[int, Range(0, 2**63 - 1, "a whole number >= 0")]
Count = Annotated[int, Range(1, 2**63 - 1, "a whole number >= 1")]
Seed = Annotated[int, Range(0, 2**64 - 1, "a whole number from 0 to 2^64 - 1")]
Fraction = Annotated[float, Range(0, 1, "a number from 0 to 1")]
NotNegative = Annotated[float, Range(0, sys.float_info.max, "a finite number >= 0")]
Share = Annotated[float, Range(0, 1 - 2**-53, "a number in [0, 1)")]

GREATEST = 2.0**128 - 2.0**104  # of float32, in which a run computes
PRESETS = Path(__file__).parent / "presets"


class Table:
    """A table of the run file, whose values are checked when it is made."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source(Table):
    """A packed dataset and its share of the windows of a phase."""

    path: str  # a folder written by `myllm pack`, or a .bin file
    weight: Positive = 1.0  # its share, relative to those of the others


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase(Table):
    """A stretch of training on one mixture of sources."""

    tokens: Count  # exposures; rounded up to whole steps
    sources: tuple[Source, ...]  # what is mixed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data(Table):
    """Where windows come from: ``train`` alone, or ``phases`` one after the other."""

    train: str = ""  # a folder written by `myllm pack`, or a .bin file
    heldout: str | tuple[str, ...] = ""  # the same, for evaluation, or a list; empty: none
    phases: tuple[Phase, ...] = ()  # each a mixture of sources for a number of tokens
    isolate_documents: bool = False  # attention does not cross from one document into the next

    @property
    def heldout_sets(self) -> tuple[str, ...]:
        """The held-out sets, each of which is evaluated."""
        one = isinstance(self.heldout, str) and self.heldout
        return (one,) if one else tuple(self.heldout)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(Table):
    """The step: how much, how long, how fast."""

    micro_batch: Count  # windows in one forward and backward; the unit of the exact sum
    global_batch: Count  # windows of a step over all ranks: micro_batch · ranks · accumulation
    steps: Whole = 0  # 0: as many as the phases take
    lr: Positive  # peak
    warmup_steps: Whole = 0  # in which the rate rises from zero to its peak
    schedule: Schedule = "cosine"  # how the rate falls after that
    final_fraction: Fraction = 0.1  # of the peak, at the end
    decay_steps: Whole = 0  # of schedule "wsd"
    seed: Seed = 0  # of the initial weights, the data order and dropout
    # a checkpoint, or a run's folder, whose weights the run begins with, and whose model where
    # [model] says nothing else; step, schedule, moments, data order and best begin anew
    init: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optim(Table):
    """AdamW; or Muon on the matrices of the blocks, and AdamW on all else."""

    kind: OptimKind = "adamw"  # muon: orthogonal steps of the matrices of the blocks
    momentum: Share = 0.95  # of Muon's running sum of the gradient
    beta1: Share = 0.9  # of AdamW's running mean of the gradient
    beta2: Share = 0.95  # of its running mean of the square
    eps: Positive = 1e-8  # beside the root of that
    weight_decay: NotNegative = 0.1  # a step takes lr · this of each weight
    embedding_rate: Positive = 1.0  # of the token embedding, and of a head tied to it, × train.lr
    decay_all: bool = False  # gains, shifts and biases too, as the bare equation has it
    clip: NotNegative = 1.0  # greatest norm of the gradient; 0: no clipping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Table):
    """Everything that does not change what is learned: where, by what, how often."""

    out: str  # folder of the run
    backend: str = "cpu"  # cpu, cuda, or reference: slow, and all of it to be read
    compute: str = "float32"  # or bf16; auto: whichever is the faster here
    # kernels of a GPU's attention in bf16: wgmma (H100, H200), mma, or the slow, plain ones;
    # auto: of the right ones the fastest here
    attention: Attention = AUTO
    # algorithms of a GPU's matrix products in bf16: default (those that cuBLAS picks), or what a
    # run has chosen and written here; auto: of the right ones the fastest here
    products: str | tuple[str, ...] = AUTO
    comm: Carrier = "auto"  # how a GPU's arrays travel between ranks: nccl, mpi, or what is there
    overlap: bool = True  # exchange gradients while the backward computes; off: when it has ended
    # norms, block: recomputed in the backward, for less memory; auto: norms where it costs little
    recompute: Recompute = "auto"
    eval_every: Whole = 0  # steps; 0: at the end only
    eval_windows: Count = 64  # held-out windows looked at, of each set, from the first
    checkpoint_every: Whole = 0  # steps; 0: at the end, and when stopped
    keep: Count = 2  # newest checkpoints kept, beside the best
    patience: Count = 5  # steps in a row with a loss or norm that is not finite, then the run ends
    timeout: NotNegative = 0.0  # seconds at one piece of work, then a rank hangs; 0: measured, × 20
    log_every: Count = 10  # steps from one line to the next, where there is no terminal
    tensorboard: bool = False  # write event files for TensorBoard, too
    sample_every: Whole = 0  # steps; 0: never
    sample_prompt: str = ""  # what samples go on from; empty: a new line


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFile:
    """A whole run, checked."""

    model: Config
    data: Data
    train: Train
    optim: Optim
    run: Run

    def __post_init__(self) -> None:
        check(self)

    @property
    def window(self) -> int:
        """T, the tokens of a window."""
        return self.model.context_length

    @property
    def micro_batches(self) -> int:
        """M, the leaves of the sum of a step."""
        return self.train.global_batch // self.train.micro_batch

    @property
    def tokens_per_step(self) -> int:
        """Tokens that a step reads over all ranks."""
        return self.train.global_batch * self.window

    @property
    def phase_steps(self) -> tuple[int, ...]:
        """Steps of each phase; without phases, all steps are one phase."""
        if not self.data.phases:
            return (self.train.steps,)
        return tuple(-(-phase.tokens // self.tokens_per_step) for phase in self.data.phases)

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return sum(self.phase_steps)

    def lr(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        return learning_rate(
            step,
            peak=self.train.lr,
            warmup_steps=self.train.warmup_steps,
            total_steps=self.steps,
            schedule=self.train.schedule,
            final_fraction=self.train.final_fraction,
            decay_steps=self.train.decay_steps,
        )

    def accumulation(self, ranks: int) -> int:
        """Return a, the micro-batches of a step on each of ``ranks`` ranks.

        Raises
        ------
        ValueError
            When B = B_micro · W · a has no whole solution, or W is no power of two.
        """
        if ranks < 1 or ranks & (ranks - 1):
            raise ValueError(
                f"the number of ranks must be a power of two, so that they share the fixed tree "
                f"of the gradient sum evenly; got {ranks}"
            )
        if self.micro_batches % ranks:
            raise ValueError(
                f"train.global_batch ({self.train.global_batch}) must be train.micro_batch "
                f"({self.train.micro_batch}) · ranks ({ranks}) · accumulation steps: use at most "
                f"{self.micro_batches} ranks, or a smaller train.micro_batch"
            )
        return self.micro_batches // ranks

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the tables as plain values, as they come back from JSON or TOML."""
        tables = {f.name: dataclasses.asdict(getattr(self, f.name)) for f in _TABLES}
        return dict(json.loads(json.dumps(tables)))

    def to_toml(self) -> str:
        """Return the resolved run file, every default written out."""
        return "\n".join(
            "\n".join([f"[{name}]", *(f"{k} = {_toml(v)}" for k, v in table.items())]) + "\n"
            for name, table in self.to_dict().items()
        )


_TABLES = dataclasses.fields(RunFile)


def check(config: RunFile) -> None:
    """Raise a ``ValueError`` for what contradicts itself, naming the keys."""
    for table in _TABLES:
        for key, value in vars(getattr(config, table.name)).items():
            if isinstance(value, float) and value > GREATEST:
                raise ValueError(
                    f"{table.name}.{key} must be a number that float32 holds, {GREATEST:.1e} at "
                    f"most, got {value!r}"
                )
    train, data, run = config.train, config.data, config.run
    if train.global_batch % train.micro_batch:
        raise ValueError(
            f"train.global_batch ({train.global_batch}) must be a multiple of train.micro_batch "
            f"({train.micro_batch})"
        )
    if config.micro_batches & (config.micro_batches - 1):
        raise ValueError(
            f"a step must have a power of two micro-batches, but train.global_batch "
            f"({train.global_batch}) / train.micro_batch ({train.micro_batch}) is "
            f"{config.micro_batches}"
        )
    if not run.out:
        raise ValueError("run.out must name a folder for the run, got an empty name")
    if bool(data.train) == bool(data.phases):
        raise ValueError("[data] needs either train (a packed folder) or phases")
    paths = [Path(path) for path in data.heldout_sets]
    for text, path in zip(data.heldout_sets, paths, strict=True):
        if not text or paths.count(path) > 1:
            raise ValueError(f"each of data.heldout must be another packed folder, got {text!r}")
    if data.phases and train.steps:
        raise ValueError(
            f"train.steps ({train.steps}) and data.phases both say how long the run is: leave "
            "train.steps out"
        )
    for number, phase in enumerate(data.phases, 1):
        if not phase.sources:
            raise ValueError(f"phase {number} of data.phases needs sources")
    if run.compute == READING:
        raise ValueError(
            f"run.compute {run.compute!r} is for reading and writing with a trained model: nothing "
            "can be trained in eight bits; choose 'float32', 'bf16' or 'auto'"
        )
    for key, known in (("backend", BACKENDS), ("compute", (*COMPUTE, AUTO))):
        if getattr(run, key) not in known:
            said = ", ".join(known)
            raise ValueError(f"run.{key} must be one of {said}, got {getattr(run, key)!r}")
    if run.comm == "nccl" and run.backend != "cuda":
        raise ValueError(
            f"run.comm 'nccl' moves the arrays of GPUs, and run.backend {run.backend!r} has none; "
            "leave run.comm at 'auto'"
        )
    if run.attention != AUTO and run.backend != "cuda":
        raise ValueError(
            f"run.attention {run.attention!r} names kernels of GPUs, and run.backend "
            f"{run.backend!r} has none; leave run.attention at 'auto'"
        )
    if run.products != AUTO and run.backend != "cuda":
        raise ValueError(
            f"run.products names algorithms of GPUs, and run.backend {run.backend!r} has none; "
            "leave run.products at 'auto'"
        )
    if config.steps < 1:
        raise ValueError("train.steps must be at least 1")
    if train.warmup_steps > config.steps:
        raise ValueError(
            f"train.warmup_steps ({train.warmup_steps:,}) must not exceed the {config.steps:,} "
            "steps of the run"
        )
    try:
        config.lr(1)  # refuses a schedule that contradicts itself
    except ValueError as error:
        raise ValueError(f"[train]: {error}") from error


# ---- from and to TOML ----------------------------------------------------------------------------


def load(path: str | Path, overrides: Sequence[str] = (), grid: Sequence[str] = ()) -> RunFile:
    """Read a run file, or a preset by its name, and apply ``table.key=value`` overrides.

    Those of ``grid`` come last; they were given by ``--grid``, the others by ``--set``.

    Raises
    ------
    ValueError, OSError
        When it cannot be read, is no TOML, or a key or value is wrong; the message names it.
    """
    path = Path(path)
    preset = PRESETS / f"{path}.toml"
    if not path.is_file() and preset.is_file():
        path = preset  # also beside a folder of that name, such as the one `myllm demo` fills
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in PRESETS.glob("*.toml")))
        raise FileNotFoundError(
            f"there is no run file {path}, and no preset of that name ({known})"
        )
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors write a mark
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        from tokenizer.read import instead_of_text  # imports regex, which takes its time

        if found := instead_of_text(str(path)):
            raise ValueError(f"{path} is {found}") from error
        raise ValueError(f"{path} is not a TOML file: {error}") from error
    given: dict[str, str] = {}  # of a key, the words that its value comes from
    for option, words in (("--set", overrides), ("--grid", grid)):
        for word in words:
            given[apply_override(tables, word, option)] = f"{option} {word:.60}"
    try:
        _take_model(tables)
        run = from_tables(tables)
        _check_sources(run.data.phases)
        return run
    except ValueError as error:
        theirs = [word for name, word in given.items() if _speaks_of(str(error), name)]
        raise ValueError(f"{', '.join(theirs) or path}: {error}") from error


def _check_sources(phases: Sequence[Phase]) -> None:
    """Refuse a source that would not go on where it stopped; earlier runs may have such.

    Raises
    ------
    ValueError
        When it is named twice in one phase, or spelled otherwise in another.
    """
    spelled: dict[Path, str] = {}
    for number, phase in enumerate(phases, 1):
        names = [source.path for source in phase.sources]
        for name in names:
            first = spelled.setdefault(Path(name), name)
            if first != name:
                raise ValueError(
                    f"phase {number} of data.phases names {name}, which is {first}: spell it alike"
                )
            if names.count(name) > 1:
                raise ValueError(
                    f"phase {number} of data.phases names {name} twice: add the weights up"
                )


def _speaks_of(said: str, name: str) -> bool:
    """Whether what is said of a run file is about the key ``table.key``."""
    table, key = map(re.escape, name.split(".", 1))
    named = rf"\b{table}\.{key}\b|unknown table \[{table}\]|\[{table}\][^;]*\b{key}\b"
    return re.search(named, said) is not None


def _take_model(tables: dict[str, Any]) -> None:
    """Complete [model] with that of the checkpoint in train.init."""
    train, model = tables.get("train"), tables.get("model", {})
    init = train.get("init") if isinstance(train, dict) else None
    whole = isinstance(model, dict) and model.keys() >= {f.name for f in dataclasses.fields(Config)}
    if isinstance(init, str) and init and isinstance(model, dict) and not whole:
        from dist import checkpoint  # it reads run files, too

        try:
            begun = checkpoint.read_manifest(checkpoint.find(init))
        except FileNotFoundError:  # which a run that has begun with it no longer needs
            run = tables.get("run")
            out = run.get("out") if isinstance(run, dict) else None
            own = checkpoint.begun_with(init, Path(out)) if isinstance(out, str) else None
            if own is None:
                raise
            begun = own
        tables["model"] = {**checkpoint.model_of(begun).to_dict(), **model}


def apply_override(tables: dict[str, Any], override: str, option: str) -> str:
    """Set ``table.key=value`` in parsed tables, and return ``table.key``.

    The value is TOML, or else a bare string; ``option`` is what it was given by.
    """
    name, equals, text = override.partition("=")
    table, dot, key = name.strip().partition(".")
    if not (equals and dot and table and key):
        raise ValueError(f"{option} takes table.key=value, such as train.lr=3e-4; got {override!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        value = text.strip()
    inner = tables.setdefault(table, {})
    if not isinstance(inner, dict):
        raise ValueError(f"{option} {override}: {table} is not a table")
    inner[key] = value
    return f"{table}.{key}"


def from_tables(tables: Mapping[str, Any]) -> RunFile:
    """Make a run from parsed TOML; an unknown table or key is named."""
    known = [field.name for field in _TABLES]
    for name, table in tables.items():
        if name not in known or not isinstance(table, dict):
            raise ValueError(f"unknown table [{name}]; known: {', '.join(known)}")
    if "model" not in tables:
        raise ValueError("the table [model] is missing")
    data = dict(tables.get("data", {}))
    data["phases"] = _numbered(data.get("phases", []), "data.phases", _phase)
    return RunFile(
        model=_model(tables["model"]),
        data=_record(Data, data, "data"),
        train=_record(Train, tables.get("train", {}), "train"),
        optim=_record(Optim, tables.get("optim", {}), "optim"),
        run=_record(Run, tables.get("run", {}), "run"),
    )


def _model(table: dict[str, Any]) -> Config:
    try:
        return Config.from_dict(table)
    except ValueError as error:
        raise ValueError(f"[model]: {error}") from error


def _phase(table: Mapping[str, Any]) -> Phase:
    name = "data.phases.sources"
    sources = _numbered(table.get("sources", []), name, lambda t: _record(Source, t, name))
    return _record(Phase, {**table, "sources": sources}, "data.phases")


def _numbered(value: Any, name: str, make: Callable[[dict[str, Any]], T]) -> tuple[T, ...]:
    """Return what is made of each table of a list; of what is wrong with one its number is said."""
    made = []
    for number, table in enumerate(_list_of_tables(value, name), 1):
        try:
            made.append(make(table))
        except ValueError as error:
            raise ValueError(f"number {number} of {name}: {error}") from None
    return tuple(made)


def _list_of_tables(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, dict) for v in value):
        raise ValueError(f"{name} must be a list of tables")
    return list(value)


def _record(kind: type[T], table: Mapping[str, Any], name: str) -> T:
    """Make a table of a dictionary, with every key known, present and of the right type."""
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in table:
        if key not in fields:
            raise ValueError(f"unknown key {name}.{key}; known: {', '.join(fields)}")
    values = {}
    for key, field in fields.items():
        if key in table:
            values[key] = _typed(table[key], field.type, f"{name}.{key}")
        elif field.default is dataclasses.MISSING:
            raise ValueError(f"{name}.{key} is missing")
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{name}.{error}") from error


def _typed(value: Any, kind: Any, name: str) -> Any:
    """Return a value of TOML as its field has it."""
    if get_args(kind) == (str, tuple[str, ...]) and not isinstance(value, str):
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise ValueError(f"{name} must be a string or a list of strings, got {value!r}")
        return tuple(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError(
            f"{name} must be a number of 64 bits, got one of {value.bit_length()} bits"
        )
    number = get_origin(kind) is Annotated and get_args(kind)[0] is float
    return float(value) if number and type(value) is int else value


def _toml(value: Any) -> str:
    """Return a plain value as TOML; for these types JSON's strings and lists are TOML's too."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    return repr(value)
