"""Texts that are continued together: each may join, and leave, between any two steps.

Reading the weights is most of what a token costs, and a step reads them once for all rows
(continuous batching, Yu et al. 2022). The rows of the KV cache are places: the texts that are being
written stand in the first ones, so that a step takes a slice of the cache; where one leaves, the
last one moves into its place. A prompt is read by itself in the last place, a piece in each step,
so that the others need not wait for all of it.

What is computed of a row does not depend on the others: a prompt is read alone, in pieces that its
own length decides, and a step treats its rows apart. Whether that holds to the last bit is up to
the backend's products of matrices; on ``cpu`` it does.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np

from reference.checks import check_ids
from reference.config import Config
from reference.model import prefill
from reference.ops import Ops
from reference.types import Array, KVCache, Params

PIECE = 256  # tokens of a prompt that are read at once


class Row:
    """A text. Whoever is given logits for it appends the next token to ``ids``."""

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids = [int(i) for i in ids]
        self.read = 0  # how many of ids are in the cache


class Batch:
    """The rows that a model works on.

    Parameters
    ----------
    ops, params, config
        The model.
    size : int
        Places: texts that are worked on at once. Each has room for the model's whole context.
    """

    def __init__(self, ops: Ops, params: Params, config: Config, size: int) -> None:
        if size < 1:
            raise ValueError(f"batch: needs one place at least, got {size}")
        self.ops, self.params, self.config, self.size = ops, params, config, size
        self.waiting: deque[Row] = deque()
        self.rows: list[Row] = []  # being written: row j stands in place j
        self._reading: Row | None = None  # in the last place
        self._cache = ops.kv_cache(params, config, size, config.context_length)

    def __len__(self) -> int:
        return len(self.rows) + len(self.waiting) + (self._reading is not None)

    def join(self, row: Row) -> None:
        """Let a text wait for its place.

        Raises
        ------
        ValueError
            When it has no token, more than the context holds, or one that the model does not have.
        """
        if not 1 <= len(row.ids) <= self.config.context_length:
            raise ValueError(
                f"batch: a text must have from 1 to {self.config.context_length} tokens, the "
                f"model's context, got {len(row.ids)}"
            )
        check_ids("batch", "ids", np.asarray(row.ids), self.config.vocab_size)
        self.waiting.append(row)

    def leave(self, row: Row) -> None:
        """Forget a text, wherever it is."""
        if row is self._reading:
            self._reading = None
        elif row in self.rows:
            place = self.rows.index(row)
            last = self.rows.pop()
            if last is not row:
                self.rows[place] = last
                self._move(len(self.rows), place, last.read)
        else:
            self.waiting.remove(row)

    def step(self) -> list[tuple[Row, Array]]:
        """Read a token more of each text that is written, and on in the prompts.

        Returns
        -------
        list of (Row, (V,) array)
            The texts of which all is read, each with its logits. Before the next step each is given
            a token, or leaves; one that fills the context must leave.
        """
        return self._decode() + self._read_on()

    def _decode(self) -> list[tuple[Row, Array]]:
        if not self.rows:
            return []
        for row in self.rows:
            if len(row.ids) != row.read + 1:
                raise ValueError("batch: a row must be given one token after each step, or leave")
        tokens = self.ops.from_numpy(np.array([row.ids[-1] for row in self.rows], np.int32))
        position = np.array([row.read for row in self.rows])
        cache = self._places(0, len(self.rows))
        found = self.ops.decode_step(self.params, self.config, tokens, cache, position)
        for row in self.rows:
            row.read += 1
        return list(zip(self.rows, self.ops.to_numpy(found), strict=True))

    def _read_on(self) -> list[tuple[Row, Array]]:
        """Read prompts, one after the other, until a piece's number of tokens is read."""
        done: list[tuple[Row, Array]] = []
        tokens, last = 0, self.size - 1
        while tokens < PIECE and len(self.rows) < self.size:
            if self._reading is None and not self.waiting:
                break
            row = self._reading = self._reading or self.waiting.popleft()
            cache = self._places(last, self.size)
            # what a window has let go of cannot be read on from: such a prompt is read at once
            whole = len(row.ids) > min(k.shape[1] for k in cache.k)
            piece = row.ids[row.read : None if whole else row.read + PIECE]
            found = prefill(
                self.ops,
                self.params,
                self.config,
                self.ops.from_numpy(np.array([piece], np.int32)),
                np.array([len(piece)]),
                cache,
                start=row.read,
            )
            row.read += len(piece)
            tokens += len(piece)
            if row.read == len(row.ids):
                self._reading = None
                self._move(last, len(self.rows), row.read)
                self.rows.append(row)
                done.append((row, self.ops.to_numpy(found)[0]))
        return done

    def _places(self, first: int, stop: int) -> KVCache:
        k, v = self._cache
        return KVCache([layer[first:stop] for layer in k], [layer[first:stop] for layer in v])

    def _move(self, source: int, to: int, n_tokens: int) -> None:
        """Copy what a place holds to another one."""
        if source == to:
            return
        there = self._places(to, to + 1)
        for layer, (k, v) in enumerate(zip(*self._places(source, source + 1), strict=True)):
            used = slice(0, n_tokens)  # a ring has fewer slots, and all of them then
            self.ops.write_kv(there, k[:, used], v[:, used], layer=layer, position=0)
