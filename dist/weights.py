"""Weights without the rest of a run: read from a checkpoint, or written as one, piece by piece.

No more than one parameter is held at a time.
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dist import checkpoint, manifest
from dist.monitor import Memory
from dist.places import new_place
from dist.shards import TOKENIZER
from reference.config import Config
from reference.global_norm import SUM_BLOCK
from reference.params import decoder_layout
from reference.types import Array

if TYPE_CHECKING:
    from tokenizer import Tokenizer


class Weights:
    """The weights of a checkpoint, or of the best of a run folder.

    Raises
    ------
    ValueError, OSError
        When there is none, or it is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = checkpoint.find(path)
        self.manifest = checkpoint.read_manifest(self.path)
        self.config = checkpoint.model_of(self.manifest)
        self.layout = decoder_layout(self.config)
        if self.layout.size != self.manifest.parameters:
            raise ValueError(
                f"{self.path} holds {self.manifest.parameters:,} parameters, but its config "
                f"describes {self.layout.size:,}"
            )

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer beside the weights, where there is one."""
        return self.path / TOKENIZER if self.manifest.tokenizer_sha256 else None

    def read(self, name: str) -> Array:
        """Return one parameter, float32, its CRCs checked."""
        start, spec = self.layout.offsets[name]
        low = start // SUM_BLOCK * SUM_BLOCK
        high = min(-(-(start + spec.size) // SUM_BLOCK) * SUM_BLOCK, self.layout.size)
        blocks = checkpoint.read_slice(self.path, "master", self.manifest, low, high)
        return blocks[start - low : start - low + spec.size].reshape(spec.shape)


def write_weights(
    path: Path,
    config: Config,
    parameter: Callable[[str, tuple[int, ...]], Array],
    tokenizer: "Tokenizer | None",
) -> None:
    """Write a checkpoint that holds weights alone.

    Parameters
    ----------
    path : Path
        A folder that is not there yet.
    config : Config
    parameter : callable
        Takes the name and shape of a parameter and returns it, float32; called once for each, in
        the order of the flat buffer.
    tokenizer : Tokenizer or None
    """
    if path.name.startswith("step-"):
        raise ValueError(f"{path} is named as a run names its checkpoints: choose another name")
    layout = decoder_layout(config)
    crcs = [0] * -(-layout.size // SUM_BLOCK)
    with new_place(path) as part:
        part.mkdir()
        with (part / "master.bin").open("wb") as file:
            at = 0
            for name, (start, spec) in layout.offsets.items():
                flat = np.ascontiguousarray(parameter(name, spec.shape), "<f4").reshape(-1)
                if at != start or flat.size != spec.size:
                    raise ValueError(f"{name} must have shape {spec.shape}")
                file.write(flat.data)
                done = 0
                while done < flat.size:  # blocks reach from one parameter into the next
                    size = min(SUM_BLOCK - at % SUM_BLOCK, flat.size - done)
                    block = at // SUM_BLOCK
                    crcs[block] = zlib.crc32(flat[done : done + size].data, crcs[block])
                    at, done = at + size, done + size
        if tokenizer is not None:
            tokenizer.save(part / TOKENIZER)
        manifest.write(
            part / checkpoint.MANIFEST,
            checkpoint.Manifest(
                format=checkpoint.FORMAT,
                step=0,
                updates=0,
                position=0,
                seed=0,
                tokenizer_sha256=None if tokenizer is None else tokenizer.sha256,
                config={"model": config.to_dict()},
                monitor=Memory(),
                parameters=layout.size,
                block=SUM_BLOCK,
                crc32={"master": tuple(crcs)},
            ),
        )
