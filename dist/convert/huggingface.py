"""Hugging Face folders: ``config.json``, ``*.safetensors``, ``tokenizer.json`` and what goes along.

A ``.safetensors`` file is eight bytes with the length of a header, the header (JSON: name -> type,
shape, place), and the tensors. https://github.com/huggingface/safetensors
"""

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from dist.convert.families import HUGGING_FACE
from dist.convert.mapping import Family, Tensor, choose, named, shown
from dist.convert.tensors import Stored, write_tensors
from dist.convert.text import AROUND, check_fits, uses_of, with_uses
from dist.convert.transfer import Found, Written
from dist.evaluate import load_tokenizer
from dist.numbers import size_of
from dist.places import new_place, steadily
from dist.weights import Weights
from reference.config import Config
from tokenizer.files import read_json
from tokenizer.patterns import QWEN2
from tokenizer.vocabulary import Uses

if TYPE_CHECKING:
    from tokenizer import Tokenizer

CONFIG = "config.json"
TEMPLATE = "chat_template.jinja"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000  # of tensors in a file, where there is more than one tensor
MAX_HEADER = 100_000_000  # bytes, as the library has it
T = TypeVar("T")
TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

Offset = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Entry(msgspec.Struct):
    """What a header says of one tensor."""

    dtype: str
    shape: list[Offset]
    data_offsets: tuple[Offset, Offset]


class _Index(msgspec.Struct):
    """Which file holds which tensor."""

    weight_map: dict[str, str]


class _Token(msgspec.Struct):
    content: str


class _Template(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    """What is read of a ``tokenizer_config.json``."""

    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    pad_token: str | _Token | None = None
    chat_template: str | list[_Template] | None = None


class _Processor(msgspec.Struct):
    """What a ``tokenizer.json`` does to ids, or several of such; ``single`` is for one text."""

    type: str = ""
    single: list[dict[str, Any]] | Any = []
    processors: "list[_Processor]" = []

    @property
    def puts_tokens_around(self) -> bool:
        named = self.type == "TemplateProcessing" and any("SpecialToken" in x for x in self.single)
        by_kind = self.type in ("BertProcessing", "RobertaProcessing")
        return named or by_kind or any(each.puts_tokens_around for each in self.processors)


class _TokenizerFile(msgspec.Struct):
    """What is read of a ``tokenizer.json`` here."""

    post_processor: _Processor | None = None


class _Generation(msgspec.Struct):
    """What is read of a ``generation_config.json``, or of a ``config.json`` in its place."""

    eos_token_id: int | list[int] | None = None


# ---- out -----------------------------------------------------------------------------------------


def export(weights: Weights, folder: Path, kind: str) -> Written:
    """Write a folder that ``transformers`` loads.

    Raises
    ------
    ValueError, OSError
        When no family expresses the model, or the folder is there already.
    """
    config = weights.config
    family = choose(HUGGING_FACE, config, "Hugging Face's transformers")
    tokenizer = None
    if weights.tokenizer is not None:
        tokenizer = load_tokenizer(weights.tokenizer, weights.manifest.tokenizer_sha256)
        check_fits(tokenizer, config, str(weights.path))
    described = {**family.describe(config), "torch_dtype": TORCH_NAMES[kind]}
    generation: dict[str, Any] = {}
    notes = []
    with new_place(folder) as part:
        part.mkdir()
        if tokenizer is not None:
            from tokenizer import to_huggingface

            uses = uses_of(tokenizer, weights.manifest.updates)
            ids = tokenizer.special_tokens
            to_huggingface(tokenizer, part / "tokenizer.json")
            _write_json(part / "tokenizer_config.json", _tokenizer_config(tokenizer, uses, config))
            names = {"bos": uses.bos, "pad": uses.pad}
            generation = {f"{role}_token_id": ids[name] for role, name in names.items() if name}
            if uses.ends:
                generation["eos_token_id"] = sorted(ids[name] for name in uses.ends)
            own = tokenizer.vocabulary.pattern == QWEN2 and tokenizer.vocabulary.nfc
            if described["model_type"] == "qwen2" and not own:
                notes.append(
                    "AutoTokenizer of transformers 5 cuts the text of any Qwen2 as Qwen's own "
                    "tokenizer does, and gives other ids: load this one by "
                    "PreTrainedTokenizerFast.from_pretrained"
                )
        # without one, transformers takes the ids of the family's first model, such as 50256
        described |= {
            f"{role}_token_id": generation.get(f"{role}_token_id") for role in ("bos", "eos")
        }
        _write_json(part / CONFIG, described)
        _write_json(part / "generation_config.json", generation)
        _write_shards(weights, family.tensors(config), part, kind)
    return Written(family, notes)


def _tokenizer_config(tokenizer: "Tokenizer", uses: Uses, config: Config) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    said = {
        "bos_token": uses.bos,
        "eos_token": next(iter(uses.ends), ""),
        "pad_token": uses.pad,
        "chat_template": uses.chat_template,
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            str(i): {"content": name, **plain, "special": True}
            for name, i in sorted(tokenizer.special_tokens.items(), key=lambda item: item[1])
        },
        **{key: text for key, text in said.items() if text},
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.context_length,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_shards(weights: Weights, tensors: list[Tensor], folder: Path, kind: str) -> None:
    shards: list[list[Tensor]] = [[]]
    room = SHARD_BYTES
    for tensor in tensors:
        size = size_of(math.prod(tensor.shape), kind)
        if shards[-1] and size > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(tensor)
        room -= size
    count = len(shards)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    if count == 1:
        names = [ONE_FILE]
    else:
        total = sum(size_of(math.prod(t.shape), kind) for t in tensors)
        where = {t.name: name for name, held in zip(names, shards, strict=True) for t in held}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    for name, held in zip(names, shards, strict=True):
        _write_safetensors(folder / name, weights, held, kind)


def _write_safetensors(path: Path, weights: Weights, tensors: list[Tensor], kind: str) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        end = at + size_of(math.prod(tensor.shape), kind)
        header[tensor.name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": (at, end)}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with steadily(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in write_tensors(file, weights, tensors, lambda _: kind):
            pass


# ---- in ------------------------------------------------------------------------------------------


def read(folder: Path, *, with_tokenizer: bool) -> Found:
    """Return the model in a folder, as it lies in its files.

    Raises
    ------
    ValueError, OSError
        When it is of no known family, or a file cannot be read.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no model of Hugging Face: it has no {CONFIG}")
    try:
        described = read_json(path.read_bytes(), dict[str, Any])
    except ValueError as error:
        raise ValueError(f"{path} is no configuration: {error}") from None
    family = family_of(described, path)
    config = family.read(described, str(path))
    tokenizer, notes = None, list[str]()
    if with_tokenizer:
        tokenizer = _tokenizer(folder)
        if tokenizer is not None:
            check_fits(tokenizer, config, str(folder))
            tokenizer, notes = _with_uses(tokenizer, folder)
    return Found(family, config, _stored(folder), tuple(TORCH_NAMES), tokenizer, notes)


def family_of(described: dict[str, Any], path: Path) -> Family:
    """Return the family that a configuration says it is of."""
    said = described.get("architectures") or []
    for family in HUGGING_FACE:
        if said == [family.name] or (
            not said and described.get("model_type") == family.says["model_type"]
        ):
            return family
    known = ", ".join(family.name for family in HUGGING_FACE)
    what = shown(said or described.get("model_type"))
    raise ValueError(f"{path}: the architecture {what} is not known here; known are {known}")


def _tokenizer(folder: Path) -> "Tokenizer | None":
    from tokenizer import from_huggingface

    path = folder / "tokenizer.json"
    hint = "; --without-tokenizer imports the weights alone"
    if not path.is_file():
        for name in ("tokenizer.model", "vocab.json"):
            if (folder / name).is_file():
                what = (
                    "a SentencePiece vocabulary" if name == "tokenizer.model" else "an older form"
                )
                raise ValueError(
                    f"{folder / name} is {what}, which is not read: a tokenizer.json with "
                    f"byte-level BPE is needed{hint}"
                )
        return None
    try:
        return from_huggingface(path)
    except ValueError as error:
        raise ValueError(f"{error}{hint}") from None


def _with_uses(tokenizer: "Tokenizer", folder: Path) -> tuple["Tokenizer", list[str]]:
    """Return the tokenizer with what the files beside it say of its special tokens, and notes."""

    def read(name: str, form: type[T]) -> T | None:
        if not (folder / name).is_file():
            return None
        try:
            return read_json((folder / name).read_bytes(), form)
        except ValueError as error:
            raise ValueError(
                f"{folder / name} cannot be read: {error}; --without-tokenizer imports the weights "
                "alone"
            ) from None

    def name_of(token: str | _Token | None) -> str | None:
        return token.content if isinstance(token, _Token) else token

    said = read("tokenizer_config.json", _TokenizerConfig) or _TokenizerConfig()
    generations = (read(name, _Generation) for name in ("generation_config.json", CONFIG))
    ids = next((g.eos_token_id for g in generations if g and g.eos_token_id is not None), None)
    template, notes = said.chat_template, []
    if (folder / TEMPLATE).is_file():
        template = (folder / TEMPLATE).read_text(encoding="utf-8")
    if isinstance(template, list):
        of = {each.name: each.template for each in template}
        others = [each.name for each in template if each.name != "default"]
        notes = [f"its chat templates {named(others)} were left out"] * bool(others)
        template = of.get("default")
    processor = (read("tokenizer.json", _TokenizerFile) or _TokenizerFile()).post_processor
    notes += [AROUND] * (processor is not None and processor.puts_tokens_around)
    found, left_out = with_uses(
        tokenizer,
        bos=name_of(said.bos_token),
        ends=[name_of(said.eos_token), *(ids if isinstance(ids, list) else [ids])],
        pad=name_of(said.pad_token),
        chat_template=template,
    )
    return found, notes + left_out


def _stored(folder: Path) -> dict[str, Stored]:
    """Return every tensor of a folder, by name."""
    names = [ONE_FILE]
    if (folder / INDEX).is_file():
        try:
            index = read_json((folder / INDEX).read_bytes(), _Index)
        except ValueError as error:
            raise ValueError(f"{folder / INDEX} cannot be read: {error}") from None
        names = sorted(set(index.weight_map.values()))
        for name in names:
            if os.path.basename(name) != name or not name.endswith(".safetensors"):
                raise ValueError(f"{folder / INDEX} names {shown(name)}, no file of this folder")
            if not (folder / name).is_file():
                raise FileNotFoundError(
                    f"{folder / INDEX} names {name}, which is not there: fetch it, or, where "
                    f"{ONE_FILE} holds the whole model, remove the index"
                )
    elif not (folder / ONE_FILE).is_file():
        others = "; pytorch_model.bin is not read, since it may run code" * any(
            folder.glob("pytorch_model*.bin")
        )
        raise FileNotFoundError(f"{folder} has neither {ONE_FILE} nor {INDEX}{others}")
    found: dict[str, Stored] = {}
    for name in names:
        for tensor, at in safetensors(folder / name).items():
            if tensor in found:
                raise ValueError(
                    f"{found[tensor].path} and {folder / name} both hold {named([tensor])}"
                )
            found[tensor] = at
    return found


def _all_unlike(pairs: list[tuple[str, Any]]) -> None:
    """Refuse a JSON object that has a name twice."""
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"it has {named(twice)} more than once")


def safetensors(path: Path) -> dict[str, Stored]:
    """Return the tensors of a ``.safetensors`` file, by name.

    Raises
    ------
    ValueError, OSError
        When its header is damaged, or the tensors do not fill the file one behind the other.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER, size - 8):
            raise ValueError(f"{path} is damaged, or no safetensors file: its header is not whole")
        text = file.read(length)
    try:
        header = read_json(text, dict[str, msgspec.Raw])
        entries = {
            name: read_json(bytes(raw), _Entry)
            for name, raw in header.items()
            if name != "__metadata__"
        }
        json.loads(text, object_pairs_hook=_all_unlike)  # else of two of a name one would vanish
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path} has a header that cannot be read: {error}") from None
    found = {}
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        known = entry.dtype in TORCH_NAMES  # of others no more is asked until they are needed
        wrong = known and end - begin != size_of(math.prod(entry.shape), entry.dtype)
        if wrong or 8 + length + end > size:
            raise ValueError(
                f"{path} is damaged: the tensor {named([name])} has shape {tuple(entry.shape)[:8]} "
                f"and bytes {begin:,} to {end:,} of {size - 8 - length:,}"
            )
        found[name] = Stored(path, entry.dtype, tuple(entry.shape), 8 + length + begin)
    at, last = 0, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if begin != at:
            raise ValueError(
                f"{path} is damaged: the tensor {named([name])} begins at byte {begin:,}, but what "
                f"comes before, {last}, ends at {at:,}"
            )
        at, last = end, f"the tensor {named([name])}"
    if at != size - 8 - length:
        raise ValueError(
            f"{path} is damaged: {size - 8 - length - at:,} bytes follow {last}, and belong to none"
        )
    return found
