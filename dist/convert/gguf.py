"""GGUF, the file of llama.cpp: metadata, the places of tensors, and the tensors.

::

    "GGUF", version 3, number of tensors, number of keys     uint32 and uint64, little-endian
    each key: name, type, value                              strings and lists have their length
    each tensor: name, lengths of axes (the last first), type, place
    padding to 32 bytes, and the tensors, each padded to 32

Source: ``docs/gguf.md`` of ggml.
"""

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from accel.q8_0 import BLOCK
from dist import checkpoint
from dist.convert import rope
from dist.convert.families import GGUF
from dist.convert.mapping import Tensor, choose, named, shown
from dist.convert.tensors import Stored, write_tensors
from dist.convert.text import GGUF_ENDS, gguf_keys, gguf_tokenizer, uses_of
from dist.convert.transfer import Found, Written
from dist.evaluate import load_tokenizer
from dist.numbers import size_of
from dist.places import Steady, new_place, steadily
from dist.weights import Weights

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32
# of the types of tensors: their number, and that of a file in which most are of this one
TYPES = {"F32": (0, 0), "F16": (1, 1), "Q8_0": (8, 7), "BF16": (30, 32)}
STRING, ARRAY, UINT32, INT32, FLOAT32, BOOL = 8, 9, 4, 5, 6, 7
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # type -> as struct calls it
PER_TENSOR = 24  # bytes of the least that a tensor takes, so that no count is believed unseen


# ---- out -----------------------------------------------------------------------------------------


def export(weights: Weights, path: Path, kind: str) -> Written:
    """Write a file that llama.cpp runs.

    Raises
    ------
    ValueError, OSError
        When no architecture expresses the model or its tokenizer, or the file is there already.
    """
    config = weights.config
    family = choose(GGUF, config, "GGUF")
    keys = {
        "general.architecture": family.name,
        "general.type": "model",
        "general.name": checkpoint.name_of(weights.path),
        "general.file_type": TYPES[kind][1],
        **({"general.quantization_version": 2} if kind == "Q8_0" else {}),
        **{name: value for name, value in family.describe(config).items() if "." in name},
    }
    notes = []
    if weights.tokenizer is None:
        keys["tokenizer.ggml.model"] = "no_vocab"
    else:
        tokenizer = load_tokenizer(weights.tokenizer, weights.manifest.tokenizer_sha256)
        uses = uses_of(tokenizer, weights.manifest.updates)
        keys |= gguf_keys(tokenizer, uses, config, str(weights.path))
        if more := uses.ends[len(GGUF_ENDS) :]:
            notes.append(
                f"GGUF names {len(GGUF_ENDS)} tokens at which a model stops, and {named(more)} "
                "are left out"
            )
        if tokenizer.vocabulary.nfc:
            notes.append(
                "llama.cpp does not bring text to NFC, as this tokenizer does: text in another "
                "form gets other ids there"
            )
    tensors = family.tensors(config)
    scaled = rope.divisors(config)
    kinds = {tensor.name: _kind_of(tensor, kind) for tensor in tensors}
    if kind == "Q8_0":
        kept = [name for name in kinds if kinds[name] == "F16"]
        if kept:
            notes.append(f"kept as F16, since {BLOCK} does not divide their width: {named(kept)}")
    with new_place(path) as part, steadily(part) as file:
        count = len(tensors) + (scaled is not None)
        file.write(MAGIC + struct.pack("<IQQ", VERSION, count, len(keys)))
        for name, value in keys.items():
            file.write(_string(name) + _value(value))
        at = 0
        places = [(tensor.name, tensor.shape, kinds[tensor.name]) for tensor in tensors]
        if scaled is not None:
            places.insert(0, (rope.GGUF_TENSOR, scaled.shape, "F32"))
        for name, shape, type_ in places:
            axes = shape[::-1]
            file.write(_string(name) + struct.pack(f"<I{len(axes)}Q", len(axes), *axes))
            file.write(struct.pack("<IQ", TYPES[type_][0], at))
            size = size_of(math.prod(shape), type_)
            at += size + -size % ALIGNMENT
        _pad(file)
        if scaled is not None:
            file.write(scaled.astype("<f4").tobytes())
            _pad(file)
        for _ in write_tensors(file, weights, tensors, lambda tensor: kinds[tensor.name]):
            _pad(file)
    return Written(family, notes)


def _kind_of(tensor: Tensor, kind: str) -> str:
    """Return how a tensor is stored; norms, biases and positions in float32, as llama.cpp has."""
    if len(tensor.shape) == 1 or tensor.name == "position_embd.weight":
        return "F32"
    return "F16" if kind == "Q8_0" and tensor.shape[-1] % BLOCK else kind


def _pad(file: Steady) -> None:
    file.write(b"\0" * (-file.tell() % ALIGNMENT))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """Return the type and the bytes of a value."""
    if isinstance(value, list):
        kind, _ = _typed(value[0] if value else "")  # of no merges, say
        count = struct.pack("<IIQ", ARRAY, kind, len(value))
        return count + b"".join(_typed(element)[1] for element in value)
    kind, data = _typed(value)
    return struct.pack("<I", kind) + data


def _typed(value: Any) -> tuple[int, bytes]:
    if isinstance(value, str):
        return STRING, _string(value)
    for python, kind in ((bool, BOOL), (np.int32, INT32), (int, UINT32), (float, FLOAT32)):
        if isinstance(value, python):
            return kind, struct.pack(f"<{SCALARS[kind]}", value)
    raise ValueError(f"GGUF has no type for {value!r}")


# ---- in ------------------------------------------------------------------------------------------


class _Reader:
    """Reads values of a file, and none beyond its end."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self.file = path, file
        self.size = path.stat().st_size

    def take(self, n: int) -> bytes:
        if n > self.size - self.file.tell():
            raise ValueError(f"{self.path} is damaged: it ends within its metadata")
        return self.file.read(n)

    def number(self, kind: str) -> Any:
        (value,) = struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))
        return value

    def string(self) -> str:
        data = self.take(self.number("Q"))
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{self.path} is damaged: {data[:40]!r} is no text") from None

    def count(self, least: int, what: str) -> int:
        """Return a number of things that take ``least`` bytes each, at least."""
        n = int(self.number("Q"))
        if n * least > self.size:
            raise ValueError(f"{self.path} is damaged: it cannot hold {n:,} {what}")
        return n

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind in SCALARS:
            value = self.number(SCALARS[kind])
            # of a float32 the shortest decimal that means it, as it was written
            return float(str(np.float32(value))) if kind == FLOAT32 else value
        if kind != ARRAY:
            raise ValueError(f"{self.path} is damaged: there is no type {kind} of metadata")
        inner = self.number("I")
        if inner == STRING:
            return [self.string() for _ in range(self.count(8, "strings"))]
        if inner not in SCALARS:
            raise ValueError(f"{self.path}: a list of lists in its metadata is not read")
        code = SCALARS[inner]
        n = self.count(struct.calcsize(f"<{code}"), "numbers")
        return list(struct.unpack(f"<{n}{code}", self.take(n * struct.calcsize(f"<{code}"))))


def header(path: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Return the metadata of a file and its tensors, by name.

    Raises
    ------
    ValueError, OSError
        When it is damaged, or of another version.
    """
    with path.open("rb") as file:
        reader = _Reader(path, file)
        if reader.size < 24 or file.read(4) != MAGIC:
            raise ValueError(f"{path} is no GGUF file: it does not begin as one")
        version = reader.number("I")
        if version not in (2, VERSION):
            raise ValueError(f"{path} has version {version} of GGUF; versions 2 and 3 are read")
        n_tensors = reader.count(PER_TENSOR, "tensors")
        keys: dict[str, Any] = {}
        for _ in range(reader.count(12, "keys")):
            name = reader.string()
            keys[name] = reader.value(reader.number("I"))
        places = [_place(reader) for _ in range(n_tensors)]
        alignment = keys.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise ValueError(f"{path}: general.alignment is {shown(alignment)}")
        data = file.tell() + -file.tell() % alignment
        size = reader.size
    names = {number: name for name, (number, _) in TYPES.items()}
    stored: dict[str, Stored] = {}
    for name, shape, number, offset in places:
        if name in stored:
            raise ValueError(f"{path} is damaged: it has the tensor {named([name])} twice")
        if number not in names:
            raise ValueError(
                f"{path}: the tensor {named([name])} is quantized in a way that is not read here "
                f"(type {number}); known are {', '.join(TYPES)}"
            )
        kind = names[number]
        if kind == "Q8_0" and (not shape or shape[-1] % BLOCK):
            raise ValueError(f"{path} is damaged: {BLOCK} does not divide a row of {named([name])}")
        if data + offset + size_of(math.prod(shape), kind) > size:
            raise ValueError(f"{path} is damaged: the tensor {named([name])} reaches past its end")
        stored[name] = Stored(path, kind, shape, data + offset)
    return keys, stored


def _place(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    """Return the name, shape, type and place of a tensor."""
    name = reader.string()
    n_axes = reader.number("I")
    if n_axes > 8:
        raise ValueError(f"{reader.path} is damaged: the tensor {named([name])} has {n_axes} axes")
    axes = [reader.number("Q") for _ in range(n_axes)]
    return name, tuple(axes[::-1]), reader.number("I"), reader.number("Q")


def read(path: Path, *, with_tokenizer: bool) -> Found:
    """Return the model in a file.

    Raises
    ------
    ValueError, OSError
        When it is of no known architecture, or damaged.
    """
    keys, stored = header(path)
    arch = keys.get("general.architecture")
    family = next((family for family in GGUF if family.name == arch), None)
    if family is None:
        known = ", ".join(family.name for family in GGUF)
        raise ValueError(
            f"{path}: the architecture {shown(arch)} is not known here; known are {known}"
        )
    if keys.get("split.count", 1) not in (0, 1):
        raise ValueError(f"{path} is one of several parts: put them together (gguf-split --merge)")
    try:
        said = _said_by(stored, keys, family.name)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    config = family.read({**keys, **said}, str(path))
    divided = stored.get(rope.GGUF_TENSOR)
    if divided is not None and divided.shape != (config.d_head // 2,):
        raise ValueError(
            f"{path}: {rope.GGUF_TENSOR} has shape {divided.shape[:8]}, but a head has "
            f"{config.d_head // 2} pairs"
        )
    tokenizer, notes = None, list[str]()
    if with_tokenizer and keys.get("tokenizer.ggml.model", "no_vocab") != "no_vocab":
        try:
            tokenizer, notes = gguf_tokenizer(keys, config.vocab_size)
        except ValueError as error:
            raise ValueError(
                f"{path}: its tokenizer cannot be imported: {error}; --without-tokenizer imports "
                "the weights alone"
            ) from None
    return Found(family, config, stored, tuple(TYPES), tokenizer, notes)


def _said_by(stored: Mapping[str, Stored], keys: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """Return what a file says by the tensors that it has."""
    said: dict[str, Any] = {
        "tied": "output.weight" not in stored,
        "attn_bias": "blk.0.attn_output.bias" in stored,
        "qkv_bias": "blk.0.attn_q.bias" in stored and "blk.0.attn_output.bias" not in stored,
        "ffn_bias": "blk.0.ffn_up.bias" in stored,
        rope.GGUF_SAID: None,  # whatever a key of that name says
    }
    divided, base = stored.get(rope.GGUF_TENSOR), keys.get(f"{arch}.rope.freq_base", 10_000.0)
    if divided is not None and isinstance(base, int | float) and 0 < base < math.inf:
        if len(divided.shape) != 1 or divided.shape[0] > 1 << 20:
            raise ValueError(f"{rope.GGUF_TENSOR} has shape {divided.shape[:8]}")
        said[rope.GGUF_SAID] = rope.scaling_of(divided.rows(0, divided.shape[0]), base)
    table = stored.get("token_embd.weight")
    if (
        f"{arch}.vocab_size" not in keys and table is not None and table.shape
    ):  # older files leave it out
        said[f"{arch}.vocab_size"] = table.shape[0]
    return said
