"""Byte-level byte-pair encoding: lossless, deterministic, compiled by Numba.

``reference`` is the plain layer, to be read; the rest is the fast one, held equal to it by tests.
"""

import importlib
from typing import TYPE_CHECKING

__all__ = [
    "GPT2",
    "GPT4",
    "DecodeStream",
    "Tokenizer",
    "Vocabulary",
    "from_huggingface",
    "from_tiktoken",
    "to_huggingface",
    "to_tiktoken",
    "train_from_iterator",
]

if TYPE_CHECKING:
    from tokenizer.interop import from_huggingface, from_tiktoken, to_huggingface, to_tiktoken
    from tokenizer.patterns import GPT2, GPT4
    from tokenizer.stream import DecodeStream
    from tokenizer.tokenizer import Tokenizer
    from tokenizer.training import train_from_iterator
    from tokenizer.vocabulary import Vocabulary
else:

    def __getattr__(name):
        """Import a module when it is asked for: ``python -m tokenizer.reference`` needs one."""
        if name in __all__:
            for home in ("patterns", "vocabulary", "tokenizer", "stream", "training", "interop"):
                found = vars(importlib.import_module(f"tokenizer.{home}")).get(name)
                if found is not None:
                    return found
        raise AttributeError(f"module 'tokenizer' has no attribute {name!r}")
