"""Who may see whom in one attention, in one record that every backend asks.

T queries look at S keys and are the last T of the S positions: query t stands at t' = t + (S - T).
A query sees a key u when every rule that is asked for allows it:

==========  ====================================================================================
causal      u ≤ t': no later position
window w    |t' - u| < w: with causal the last w positions, the query's own included (Jiang et
            al. 2023, "Mistral 7B", section 2, in the count of Hugging Face's code: the paper's
            i - W to i is one more), without it 2w - 1 around it, our choice (Beltagy et al. 2020,
            "Longformer", section 3.1, have ½w on either side)
key_mask    the key takes part; padding does not
documents   query and key belong to one document
==========  ====================================================================================

ALiBi forbids nothing; it lowers the score by m_h (t' - u) (Press et al. 2022), and so belongs here.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from reference.types import Array


class Visibility(NamedTuple):
    """The rules of one attention; the arrays are a backend's own."""

    queries: int  # T
    keys: int  # S
    causal: bool = True
    window: int = 0  # w; 0: no limit
    alibi: Array | None = None  # (Hq,) slopes m_h
    key_mask: Array | None = None  # (B, S) bool
    documents: Array | None = None  # (B, S) int32

    @property
    def distance(self) -> Array:
        """t' - u as (T, S)."""
        T, S = self.queries, self.keys
        return np.arange(S - T, S)[:, None] - np.arange(S)[None, :]

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return whether query t may see key u, as (1, T, S) or (B, T, S)."""
        T, S = self.queries, self.keys
        may = np.ones((1, T, S), np.bool_)
        if self.causal:
            may = may & (self.distance >= 0)
        if self.window:
            may = may & (np.abs(self.distance) < self.window)
        if self.key_mask is not None:
            may = may & self.key_mask[:, None, :]
        if self.documents is not None:
            may = may & (self.documents[:, S - T :, None] == self.documents[:, None, :])
        return may

    def keys_of(self, first: int, end: int) -> tuple[int, int]:
        """Return the range of keys that queries ``first`` .. ``end - 1`` can see.

        By position alone: a kernel walks over the tiles of keys in this range and no others.
        """
        shift = self.keys - self.queries
        low = first + shift - self.window + 1 if self.window else 0
        high = self.keys
        if self.causal:
            high = end + shift
        elif self.window:
            high = end + shift + self.window - 1
        low = min(max(low, 0), self.keys)
        return low, max(low, min(high, self.keys))

    def queries_of(self, first: int, end: int) -> tuple[int, int]:
        """Return the range of queries that can see keys ``first`` .. ``end - 1``, by position."""
        shift = self.keys - self.queries
        low = 0
        if self.causal:
            low = first - shift
        elif self.window:
            low = first - shift - self.window + 1
        high = end - shift + self.window - 1 if self.window else self.queries
        low = min(max(low, 0), self.queries)
        return low, max(low, min(high, self.queries))
