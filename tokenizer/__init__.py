"""Byte-level byte-pair encoding: lossless, deterministic, compiled by Numba.

``reference`` is the plain layer, to be read; the rest is the fast one, held equal to it by tests.
"""

from tokenizer.interop import from_huggingface, from_tiktoken, to_huggingface, to_tiktoken
from tokenizer.patterns import GPT2, GPT4
from tokenizer.stream import DecodeStream
from tokenizer.tokenizer import Tokenizer
from tokenizer.training import train_from_iterator
from tokenizer.vocabulary import Vocabulary

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
