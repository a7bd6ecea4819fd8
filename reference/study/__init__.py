"""The ladder: files that each show one thing, in the order in which they are best read.

Each rung is a module with a ``main`` that prints what it shows, and the first sentence of its
docstring says what that is: ``python -m reference.study.autoregression``.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

LADDER = (  # modules, the easiest first
    "reference.study.autoregression",
    "reference.study.losses",
    "reference.study.attention",
    "reference.study.classroom",
    "reference.study.mistakes",
    "reference.study.order",
    "reference.study.rnn",
    "reference.study.dropouts",
    "tokenizer.reference",
    "reference.study.one_token",
    "reference.study.gpt",
    "reference.study.tiled_attention",
    "reference.study.copy_task",
    "reference.study.ranks",
)


def shown(main: Callable[..., None], *arguments: Any) -> None:
    """Run what prints, to its end or until its reader (``head``, say) has read enough."""
    try:
        main(*arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
