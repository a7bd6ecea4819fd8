"""Checkpoints with random weights, of the families that others know too."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dist import cli
from dist.weights import Part, write_weights
from reference.config import Config
from reference.params import decoder_layout
from reference.presets import GPT2_SMALL, MYLLM_1B
from reference.types import Array

if TYPE_CHECKING:
    import pytest

    from tokenizer import Tokenizer

TOY: dict[str, Any] = {
    "vocab_size": 61,
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 4,
    "d_head": 8,
    "d_ff": 48,
    "context_length": 32,
}
# the peers' own default base; its parameter is spelled differently from version to version
LLAMA = replace(MYLLM_1B, **TOY, n_kv_heads=2, rope_base=10_000.0)
MISTRAL = replace(LLAMA, window=5)
QWEN3 = replace(LLAMA, qk_norm=True, window=(0, 6))
QWEN2 = replace(LLAMA, qkv_bias=True)
# of eight pairs two keep their frequency, two lie between, and four are divided
LLAMA3 = replace(LLAMA, d_head=16, rope_factor=8.0, rope_original_context=64)
GPT2 = replace(GPT2_SMALL, **TOY, n_kv_heads=4)
FAMILIES = {
    "llama": LLAMA,
    # heads that do not add up to the width, one of keys and values, and every bias
    "llama_odd": replace(LLAMA, n_kv_heads=1, d_head=6, attn_bias=True, ffn_bias=True, tied=False),
    "three_heads": replace(LLAMA, n_heads=3, n_kv_heads=3),  # LlamaConfig refuses it, Mistral's not
    "smollm": replace(LLAMA, n_heads=3, n_kv_heads=1, d_model=24, rope_base=100_000.0),
    "mistral": MISTRAL,
    "llama3": LLAMA3,
    "llama3_otherwise": replace(
        LLAMA3, rope_factor=2.5, rope_low_freq_factor=0.5, rope_high_freq_factor=3.0, tied=False
    ),
    "qwen2": QWEN2,
    "qwen2_window": replace(QWEN2, window=(0, 6), tied=False, n_kv_heads=4),
    "qwen3": replace(QWEN3, d_head=10),
    "qwen3_bias": replace(QWEN3, attn_bias=True, tied=False, window=0),
    "gpt2": replace(GPT2, n_layers=3),
    "gpt2_untied_relu": replace(GPT2, tied=False, ffn="relu", d_ff=40),
}


def random_weights(config: Config, seed: int = 0) -> Array:
    """Return a flat buffer of weights in which no gain is one and no bias zero."""
    layout = decoder_layout(config)
    noise = np.random.default_rng(seed).standard_normal(layout.size, dtype=np.float32)
    return layout.init(seed) + np.float32(0.1) * noise


def write_random(
    path: Path, config: Config, tokenizer: "Tokenizer | None" = None, seed: int = 0
) -> dict[str, Array]:
    """Write a checkpoint with random weights and return them by name."""
    views = decoder_layout(config).views(random_weights(config, seed))
    write_weights(path, config, copied(views), tokenizer)
    return views


def copied(views: dict[str, Array]) -> Callable[[Part, Array], None]:
    """Return what writes such parameters, for ``write_weights``."""
    return lambda part, out: np.copyto(out, views[part.name][part.low : part.high])


def check_refused(
    config: Config, fields: list[str], out: str, folder: Path, capsys: "pytest.CaptureFixture[str]"
) -> None:
    """Assert that an export of this model is refused in one line that names the fields."""
    write_random(folder / "mine", config)
    assert cli.main(["export", str(folder / "mine"), str(folder / out)]) == 1
    said = capsys.readouterr().err
    assert all(field in said for field in fields) and said.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == ["mine"]


def parts_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header of a ``.safetensors`` file, and what comes behind."""
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    return json.loads(whole[8:end]), whole[end:]


def put_together(path: Path, header: dict[str, Any] | str, data: bytes) -> None:
    """Write such a file, of a header as it is or that is JSON already."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
