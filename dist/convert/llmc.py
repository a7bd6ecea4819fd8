"""llm.c's checkpoint of a GPT-2: 256 int32, then all arrays in the order of ``ParameterTensors``.

The header: magic, version (3: float32, 5: bfloat16), longest sequence, vocabulary, layers, heads,
width, and the vocabulary as it is padded, to a multiple of 128, in the table of tokens.

Source: ``gpt2_build_from_checkpoint`` of llm.c's ``train_gpt2.c`` and ``write_model`` of its
``train_gpt2.py``.
"""

import math
from pathlib import Path

import numpy as np

from dist.convert.families import LLM_C
from dist.convert.mapping import choose
from dist.convert.tensors import Stored, write_tensors
from dist.convert.transfer import Found, Written
from dist.numbers import size_of
from dist.places import new_place, steadily
from dist.weights import Weights

MAGIC = 20240326
VERSIONS = {3: "F32", 5: "BF16"}
HEADER_INTS = 256
FIELDS = ("max_seq_len", "vocab_size", "num_layers", "num_heads", "channels", "padded_vocab_size")
PADDING = 128  # rows of the table of tokens are padded to a multiple of it


def export(weights: Weights, path: Path, kind: str) -> Written:
    """Write a file that llm.c goes on from.

    Raises
    ------
    ValueError, OSError
        When it is no GPT-2 as llm.c has it, or the file is there already.
    """
    versions = {stored: version for version, stored in VERSIONS.items()}
    if kind not in versions:
        raise ValueError("llm.c's files hold float32 or bf16: choose one of them")
    config = weights.config
    family = choose((LLM_C,), config, "llm.c")
    described = family.describe(config)
    padded = -(-config.vocab_size // PADDING) * PADDING
    header = np.zeros(HEADER_INTS, "<i4")
    header[:2] = MAGIC, versions[kind]
    header[2:8] = [described.get(name, padded) for name in FIELDS]
    tensors = family.tensors(config)
    with new_place(path) as part, steadily(part) as file:
        file.write(header.tobytes())
        for tensor in write_tensors(file, weights, tensors, lambda _: kind):
            if tensor.ours == "embedding.weight":
                rows = padded - config.vocab_size
                file.write(bytes(size_of(rows * config.d_model, kind)))
    return Written(family, [])


def read(path: Path, *, with_tokenizer: bool) -> Found:
    """Return the model in a file; it holds no tokenizer.

    Raises
    ------
    ValueError, OSError
        When it is no such file, or damaged.
    """
    with path.open("rb") as file:
        raw = file.read(4 * HEADER_INTS)
    ints = np.frombuffer(raw[: len(raw) // 4 * 4], "<i4").tolist()
    if len(ints) < HEADER_INTS or ints[0] != MAGIC:
        raise ValueError(f"{path} is no checkpoint of llm.c: it does not begin as one")
    if ints[1] not in VERSIONS:
        raise ValueError(
            f"{path} has version {ints[1]} of llm.c's checkpoints; 3 and 5 are read (write it anew "
            "with a newer train_gpt2.py)"
        )
    kind = VERSIONS[ints[1]]
    described = dict(zip(FIELDS, ints[2:8], strict=True))
    config = LLM_C.read(described, str(path))
    padded = described["padded_vocab_size"]
    if padded < config.vocab_size:
        raise ValueError(f"{path} is damaged: it pads {config.vocab_size} tokens to {padded}")
    stored, at = {}, 4 * HEADER_INTS
    for tensor in LLM_C.tensors(config):
        stored[tensor.name] = Stored(path, kind, tensor.shape, at)
        rows = padded - config.vocab_size if tensor.ours == "embedding.weight" else 0
        at += size_of(math.prod(tensor.shape) + rows * config.d_model, kind)
    if path.stat().st_size != at:
        raise ValueError(
            f"{path} is damaged: its header asks for {at:,} bytes, and it has "
            f"{path.stat().st_size:,}"
        )
    return Found(LLM_C, config, stored, tuple(VERSIONS.values()), None, [])
