"""Every barrier, wait and fence of the kernels, each to be removed, and what runs the kernels."""

import re
from collections.abc import Iterator
from typing import Any

from accel.cuda import ops, ops_bf16, sources
from tests.helpers.cuda_cases import Case, attention_cases, cases, long_attention_cases

# What runs the kernels of a file.
OPS_OF = {
    "elementwise": ("add", "scale", "relu", "gelu", "gelu_tanh", "swiglu", "dropout", "linear"),
    "layout": ("add", "split_heads"),
    "reduce": ("rmsnorm", "layernorm", "linear"),
    "norm": ("rmsnorm", "layernorm"),
    "embedding": ("embedding",),
    "rope": ("rope",),
    "loss": ("linear_cross_entropy",),
}
RUN = (*OPS_OF, "attention", "attention_mma", "attention_wgmma")

# Of what several files share: files whose kernels come to each of its barriers.
SHARED: dict[str, tuple[str, ...]] = {
    "device.cuh": ("norm", "loss"),
    "attention_tiles.cuh": RUN[-2:],
}

WAITS = (
    r"(sync_block|sync_warp|copy_wait<\d>|landed|fence_async|wgmma_(fence|wait<\d>))\(\)"
    r"|(my_turn|pass_on)\(group\)"
)


def runs(source: str) -> Iterator[tuple[Any, str, Case]]:
    """Yield (module, dtype, case) of everything that runs a kernel file."""
    if source in ("attention_mma", "attention_wgmma"):
        for case in (*attention_cases(((64, 64),)), *long_attention_cases(((64, 64),))):
            yield ops_bf16, "bf16", case
    elif source == "attention":
        for case in (*attention_cases(((5, 7),)), *long_attention_cases(((5, 7),))):
            yield ops, "float32", case
    else:
        for case in cases():
            if case[0] in OPS_OF[source]:
                yield ops, "float32", case


def synchronizations() -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Yield (file, place, sources whose kernels come to it) of every barrier, wait and fence."""
    files = {f"{source}.cu": (source,) for source in sources.SOURCES} | SHARED
    for file, users in files.items():
        for match in re.finditer(rf"^ *(if .*)?\b({WAITS});.*\n", sources.text_of(file), re.M):
            yield file, match.start(), users


def removal(file: str, place: int) -> tuple[str, tuple[str, str]]:
    """Return the line at a place of a file, and the edit that takes its barrier away."""
    text = sources.text_of(file)
    line = text[place : text.index("\n", place) + 1]
    # the line with as much of the text around it as makes it the only one
    for width in range(0, 2000, 20):
        before, after = text[max(0, place - width) : place], text[place + len(line) :][:width]
        if text.count(before + line + after) == 1:
            break
    return line, (before + line + after, before + after)
