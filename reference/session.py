"""A text that grows in turns: what it is given to read, and what the model writes.

The KV cache is kept from turn to turn, so that each token is read once. A model sees no more than
its context: when that is full, the text is cut to its last half, which is read anew from position
0, and goes on. So a token costs one reading, and one more for each half context that follows, while
half a context at least is always in sight.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from reference.checks import check_ids
from reference.config import Config
from reference.generate import Sampling, sample
from reference.kv import room
from reference.model import prefill
from reference.ops import Ops
from reference.types import Array, KVCache, Params


class Session:
    """One text, and the model that reads and continues it.

    Parameters
    ----------
    ops, params, config
        The model.
    keep : int
        Tokens at the beginning that are never cut away, such as a chat's instructions; the last
        half of what they leave of the context is kept behind them.
    """

    def __init__(self, ops: Ops, params: Params, config: Config, *, keep: int = 0) -> None:
        self.ops, self.params, self.config = ops, params, config
        self.ids: list[int] = []  # the text, as far as it is in sight
        self.forgotten = 0  # tokens that were cut away
        self.why = ""  # why the last turn ended: "stop" or "length"
        self.keep = keep
        self._cache: KVCache | None = None
        self._read = 0  # how many of ids are in the cache

    def read(self, ids: Sequence[int]) -> None:
        """Append to the text; it is read when the model writes next.

        Raises
        ------
        ValueError
            When the model has no such id.
        """
        if len(ids):
            check_ids("session", "ids", np.asarray(ids), self.config.vocab_size)
            self.ids += [int(i) for i in ids]

    def write(
        self,
        max_new_tokens: int,
        *,
        rng: np.random.Generator,
        stop: Collection[int] = (),
        **sampling: Any,
    ) -> Iterator[int]:
        """Yield what the model writes, up to a token in ``stop``, which joins the text unseen.

        A token is part of the text once it is yielded; who stops asking ends the turn.

        Parameters
        ----------
        **sampling
            Fields of ``reference.generate.Sampling``.

        Raises
        ------
        ValueError
            When there is no text yet, or a setting is out of range.
        """
        if max_new_tokens < 1:
            raise ValueError(f"generate: max_new_tokens must be at least 1, got {max_new_tokens}")
        if not self.ids:
            raise ValueError(
                "generate: needs a text of at least one token (a bos, if nothing else)"
            )
        Sampling(**sampling)
        self.why = "length"
        for n in range(max_new_tokens):
            scores = self.ops.to_numpy(self._scores(max_new_tokens - n))[0]
            chosen = sample(scores, rng, said=self.ids, **sampling)
            self.ids.append(chosen)
            if chosen in stop:
                self.why = "stop"
                return
            yield chosen

    def _scores(self, ahead: int) -> Array:
        """Read what has not been read, and return the logits (1, V) after it.

        A new cache has room for ``ahead`` tokens more.
        """
        context = self.config.context_length
        if len(self.ids) > context:
            keep = min(self.keep, context - 1)
            tail = max(1, (context - keep) // 2)
            self.forgotten += len(self.ids) - keep - tail
            self.ids = self.ids[:keep] + self.ids[-tail:]
            self._read = 0
        n = len(self.ids)
        if self._cache is None or room(self.config, self._cache) < n:
            length = min(context, max(n + ahead, 2 * n))
            self._cache, self._read = self.ops.kv_cache(self.params, self.config, 1, length), 0
        if self._read and n - self._read == 1:
            token = self.ops.from_numpy(np.array(self.ids[-1:], np.int32))
            found = self.ops.decode_step(self.params, self.config, token, self._cache, self._read)
        else:
            if any(k.shape[1] < n for k in self._cache.k):
                self._read = 0  # a window has let go of some: all is read again
            ids = np.array([self.ids[self._read :]], np.int32)
            found = prefill(
                self.ops,
                self.params,
                self.config,
                self.ops.from_numpy(ids),
                np.array([ids.shape[1]]),
                self._cache,
                start=self._read,
            )
        self._read = n
        return found
