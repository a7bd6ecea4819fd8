"""What a declaration of ``families.py`` means: fields to keys, parameters to tensors, and back.

A family says which keys of its configuration hold which fields of ours, which fields are always
the same, and which tensors make up each parameter of ours. Nothing else decides: a model belongs
to a family when its configuration comes back the same from being written and read.

RoPE here turns the coordinates 2j and 2j + 1 together; most others turn j and j + d/2. That is the
same function after the columns of queries and keys change places within each head, with their
biases and the gains of QK-norm.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from accel.transpose import transpose
from reference.config import Config
from reference.params import decoder_layout
from reference.types import Array

if TYPE_CHECKING:
    from dist.numbers import Kind

DROPOUT = {f.name for f in dataclasses.fields(Config) if f.name.startswith("dropout_")}
CHUNK = 1 << 20  # bytes of theirs that are converted at once, so that they stay in a cache


class Key(NamedTuple):
    """One field of ours in their configuration."""

    ours: str
    theirs: str  # what they call it, for a sentence
    read: Callable[[Mapping[str, Any]], Any]
    write: Callable[[Config], dict[str, Any]]


class Row(NamedTuple):
    """One parameter of ours in their tensors; ``{}`` stands for the number of the layer."""

    ours: str
    theirs: tuple[str, ...]  # side by side, they are the last axis of ours
    transposed: bool = False  # theirs are (out, in)
    turned: int = 0  # the first so many of them are heads that RoPE turns


class Tensor(NamedTuple):
    """One tensor of theirs: columns of a parameter of ours."""

    name: str
    shape: tuple[int, ...]  # as theirs
    ours: str
    columns: slice  # of the last axis of ours
    transposed: bool
    head: int  # width of the heads, along their first axis, whose halves RoPE turns; 0: as ours

    @property
    def by_rows(self) -> bool:
        """Whether rows of ours are rows of theirs."""
        return not self.transposed and len(self.shape) > 1

    def chunks(self, low: int, high: int, kind: "Kind") -> Iterator[tuple[int, int]]:
        """Yield stretches of rows low .. high - 1 of theirs, whole heads, of which none is large.

        Of a vector they are whole blocks. Where rows of ours are others, that is all of theirs.
        """
        if not self.by_rows:
            low, high = 0, self.shape[0]
        whole = (self.head or 1) * (kind.numbers if len(self.shape) == 1 else 1)
        rows = max(1, int(CHUNK / kind.width) // math.prod(self.shape[1:]) // whole) * whole
        for first in range(low, high, rows):
            yield first, min(first + rows, high)

    def part(self, low: int, high: int) -> tuple[int, ...]:
        """Return the shape of what rows low .. high - 1 of ours are among theirs."""
        return (high - low, *self.shape[1:]) if self.by_rows else self.shape

    # what is moved are elements (``numbers.Kind``): of ours down the columns where those of theirs
    # are along the rows of a transpose

    def take(self, first: int, ours: Array, theirs: Array) -> None:
        """Move rows of a part of ours, from its row ``first`` on, to where they lie among theirs.

        Parameters
        ----------
        ours : (n, ...) or (n,)
            Some rows of a matrix, or all of a vector.
        theirs : (rows of theirs, elements of one)
            All of the part; of a vector one row.
        """
        rows = ours if self.by_rows else ours[..., self.columns]
        if self.head:  # ours has both sides of a pair together, theirs all first sides, then others
            pairs = rows.reshape(*rows.shape[:-1], -1, self.head // 2, 2)
            rows = pairs.swapaxes(-1, -2).reshape(rows.shape)
        if self.transposed:
            transpose(rows, theirs[:, first : first + len(rows)])
        else:
            rows = rows.reshape(-1, theirs.shape[1])
            theirs[first : first + len(rows)] = rows

    def put(self, ours: Array, first: int, low: int, high: int, theirs: Array) -> None:
        """Move rows low .. high - 1 of theirs (n,) into rows of ours from the first on."""
        theirs = theirs.reshape(high - low, -1)
        if self.head:
            sides = theirs.reshape(-1, 2, self.head // 2, theirs.shape[1])
            theirs = sides.swapaxes(1, 2).reshape(theirs.shape)
        column = self.columns.start
        if self.transposed:
            transpose(theirs, ours[:, column + low : column + high])
        elif self.by_rows:
            ours[low - first : high - first] = theirs
        else:
            ours[column + low : column + high] = theirs[:, 0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models as others write it.

    Parameters
    ----------
    name : str
        What the format calls it, such as ``LlamaForCausalLM``.
    says : mapping
        Keys that are the same in every configuration that is written: whose it is, and what only
        its readers want.
    always : mapping
        Fields of ours that are the same in every model of it.
    keys : tuple of Key
    rows : tuple of Row
        Those whose parameter a model does not have are left out.
    half_split : bool
        RoPE turns the halves of a head together.
    demands : mapping
        Keys that must have this value, or be absent, for the model to be what we know.
    ignored : tuple of str
        Regular expressions of tensors that hold no weights.
    prefix : str
        What the names of all tensors but the head begin with, and may come without.
    """

    name: str
    says: Mapping[str, Any]
    always: Mapping[str, Any]
    keys: tuple[Key, ...]
    rows: tuple[Row, ...]
    half_split: bool = True
    demands: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    prefix: str = ""

    @property
    def head_names(self) -> tuple[str, ...]:
        """What the head is called."""
        return next((row.theirs for row in self.rows if row.ours == "head.weight"), ())

    @property
    def embedding_name(self) -> str:
        """What the table of tokens is called."""
        return next(row.theirs[0] for row in self.rows if row.ours == "embedding.weight")

    def describe(self, config: Config) -> dict[str, Any]:
        """Return a model's configuration in their keys."""
        written = dict(self.says)
        for key in self.keys:
            written |= key.write(config)
        return written

    def read(self, theirs: Mapping[str, Any], where: str) -> Config:
        """Return our configuration of a model of theirs.

        Raises
        ------
        ValueError
            When a key is missing or has a value that we do not know; the message names it.
        """
        for name, value in self.demands.items():
            found = theirs.get(name, value)
            if found != value and found is not None:
                raise ValueError(
                    f"{where}: {name} = {shown(found)} is a kind of {self.name} that is not "
                    f"known here; known is {name} = {shown(value)}"
                )
        try:
            fields = {key.ours: key.read(theirs) for key in self.keys}
            return self._made({**self.always, **fields})
        except ValueError as error:
            raise ValueError(f"{where} describes no model that can be imported: {error}") from None

    def _made(self, fields: Mapping[str, Any]) -> Config:
        names = {key.ours: key.theirs for key in self.keys}
        try:
            return Config(**fields)
        except ValueError as error:
            said = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), f"{error}")
            raise ValueError(said) from None

    def differs(self, config: Config) -> list[str]:
        """Return the fields of a model that this family cannot express, with what it has instead.

        Dropout is not among them: a trained model has none.
        """
        try:
            back = self.read(self.describe(config), self.name)
        except ValueError as error:  # such as GPT-2's heads that do not divide its width
            return [str(error)]
        theirs = _meaning(back)
        return [
            f"{name} = {shown(getattr(config, name))} (it has {shown(getattr(back, name))})"
            for name, value in _meaning(config).items()
            if not _same(value, theirs.get(name))
            # what means nothing there, such as RoPE's base without RoPE, is not what is lacking
            and (name in theirs or getattr(config, name) != getattr(back, name))
        ]

    def tensors(self, config: Config) -> list[Tensor]:
        """Return the tensors of a model, in the order of the rows, layer by layer.

        Raises
        ------
        ValueError
            When a parameter of the model has no place among them.
        """
        layout = decoder_layout(config)
        found = []
        for row in self.rows:
            for layer in range(config.n_layers) if "{}" in row.ours else range(1):
                ours = row.ours.format(layer)
                if ours not in layout.offsets:
                    break
                shape = layout.offsets[ours][1].shape
                names = [name.format(layer) for name in row.theirs]
                begin = 0
                widths = _widths(config, ours) if len(names) > 1 else (shape[-1],)
                for i, (name, width) in enumerate(zip(names, widths, strict=True)):
                    columns = slice(begin, begin + width)
                    begin += width
                    theirs = (width, *shape[:-1]) if row.transposed else (*shape[:-1], width)
                    turned = self.half_split and i < row.turned and config.position == "rope"
                    head = config.d_head if turned else 0
                    found.append(Tensor(name, theirs, ours, columns, row.transposed, head))
        placed = {tensor.ours for tensor in found}
        missing = [name for name in layout.offsets if name not in placed]
        if missing:
            raise ValueError(f"{self.name} has no place for the parameter {missing[0]}")
        return found


def _widths(config: Config, name: str) -> tuple[int, ...]:
    """Return how wide the parts are that a parameter of ours has side by side."""
    if name.endswith("qkv"):
        kv = config.n_kv_heads * config.d_head
        return (config.n_heads * config.d_head, kv, kv)
    return (config.d_ff, config.d_ff)  # gate and up


def _meaning(config: Config) -> dict[str, Any]:
    """Return what of a config matters to a trained model."""
    fields = {name: value for name, value in config.to_dict().items() if name not in DROPOUT}
    most = config.context_length
    windows = {min(config.window_of(i) or most, most) for i in range(config.n_layers)}
    fields["window"] = (
        windows.pop() % most
        if len(windows) == 1
        else tuple(config.window_of(i) % most for i in range(config.n_layers))
    )
    for name in [name for name in fields if name.startswith("rope_")]:
        del fields[name]
    if config.position == "rope":
        fields["rope_base"] = config.rope_base
    if config.rope_scaling is not None:  # the original context counts in proportion to the turns
        factor, low, high, original = config.rope_scaling
        fields |= {"rope_factor": factor, "rope_low_freq_factor": low / original}
        fields["rope_high_freq_factor"] = high / original
    return fields


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=2**-23)  # GGUF holds float32
    return bool(one == other)


def shown(value: Any) -> str:
    """Return what a file says, for a sentence: on one line, and not all of it."""
    return repr(value)[:60]


def named(names: Sequence[str]) -> str:
    """Return the first of some names, for a sentence."""
    first = [name if name.isprintable() else repr(name) for name in names[:4]]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(name[:80] for name in first) + more


def choose(families: tuple[Family, ...], config: Config, what: str) -> Family:
    """Return the family that expresses a model.

    Raises
    ------
    ValueError
        When none does; the message names the fields that the nearest cannot.
    """
    differences = {family.name: family.differs(config) for family in families}
    for family in families:
        if not differences[family.name]:
            return family

    def distance(family: Family) -> tuple[int, int]:
        """Of as many differences, that with more of what the model has."""
        shared = [value and getattr(config, name) == value for name, value in family.always.items()]
        return len(differences[family.name]), -sum(map(bool, shared))

    nearest = min(families, key=distance).name
    raise ValueError(
        f"{what} cannot express this model; the nearest it has, {nearest}, cannot express "
        f"{', '.join(differences[nearest])}"
    )
