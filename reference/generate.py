"""Generation: predict, choose, append, repeat.

The prompt is read in one pass that fills the KV cache; then each step reads one token. Choosing
from the distribution over next tokens, in this order: lower the logits of what was said already,
divide them by the temperature, keep the k best (Fan et al. 2018), keep the smallest set that holds
probability p (nucleus sampling, Holtzman et al. 2020), keep what is not much less likely than the
best (min-p, Nguyen et al. 2024), draw.
"""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from reference.checks import check_ids
from reference.config import Config
from reference.model import prefill
from reference.ops import Ops
from reference.softmax import softmax
from reference.types import Array, Params


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    Raises
    ------
    ValueError
        When a setting is out of range.
    """

    temperature: float = 1.0  # 0 takes the most likely
    top_k: int | None = None  # keep the k largest
    top_p: float | None = None  # of those, the smallest set that holds p; never fewer than one
    min_p: float | None = None  # of those, what has at least min_p times the best one's probability
    # what stands in the text already has its logit divided by this (Keskar et al. 2019, section
    # 4.1), multiplied where it is negative, which dividing would raise; 1 changes nothing
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"sample: temperature must be >= 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"sample: top_k must be >= 1, got {self.top_k}")
        for name in ("top_p", "min_p"):
            p = getattr(self, name)
            if p is not None and not 0 < p <= 1:
                raise ValueError(f"sample: {name} is a probability in (0, 1], got {p}")
        if not 1e-9 <= self.repetition_penalty <= 1e9:  # of more, logits would overflow
            raise ValueError(
                f"sample: repetition_penalty must be 1e-9 to 1e9, got {self.repetition_penalty}"
            )


def filter_logits(
    logits: Array,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Array:
    """Return logits (V,), no NaN among them, with all but those kept at -inf (see ``Sampling``).

    Each setting keeps the best so many. Of equal logits lower ids are kept first.
    """
    if top_k is None and top_p is None and min_p is None:
        return logits  # nothing is left out, and nothing needs to be sorted
    best = np.sort(logits)[::-1]
    if top_k is not None:
        best = best[:top_k]
    if top_p is not None:
        before = np.cumsum(softmax(best.astype(np.float64)))
        # an entry stays while those better than it hold less than p
        best = best[np.concatenate([[True], before[:-1] < top_p])]
    if min_p is not None:
        best = best[best >= best[0] + np.log(min_p)]
    kept, equal = logits > best[-1], np.flatnonzero(logits == best[-1])
    kept[equal[: len(best) - np.count_nonzero(kept)]] = True
    return np.where(kept, logits, -np.inf)


def sample(
    logits: Array, rng: np.random.Generator, *, said: Collection[int] = (), **sampling: Any
) -> int:
    """Return one token id drawn from logits (V,).

    Parameters
    ----------
    said : collection of int
        The ids of the text so far, to which ``repetition_penalty`` applies.
    **sampling
        Fields of ``Sampling``.

    Raises
    ------
    ValueError
        When the logits are not finite or a setting is out of range.
    """
    how = Sampling(**sampling)
    if not np.isfinite(logits).all():
        raise ValueError("sample: the logits are not finite; has the model diverged?")
    logits = logits.astype(np.float64)
    if how.repetition_penalty != 1 and said:
        ids = np.unique(np.fromiter(said, np.int64))
        own = logits[ids]
        logits[ids] = np.where(own > 0, own / how.repetition_penalty, own * how.repetition_penalty)
    if how.temperature == 0:
        return int(np.argmax(logits))
    # The best is subtracted first, so that a temperature near 0 makes -inf of the others, not NaN.
    with np.errstate(over="ignore"):
        scaled = (logits - logits.max()) / how.temperature
    weights = np.exp(filter_logits(scaled, how.top_k, how.top_p, how.min_p))
    # by the inverse of the distribution function: one uniform number, one token
    edges = np.cumsum(weights)
    drawn = np.searchsorted(edges, rng.random() * edges[-1], side="right")
    # the product may be rounded up to the very end
    return int(drawn if drawn < len(edges) else np.flatnonzero(weights)[-1])


def generate(
    ops: Ops,
    params: Params,
    config: Config,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    seed: int = 0,
    stop: Collection[int] = (),
    **sampling: Any,
) -> list[list[int]]:
    """Return the continuation of each prompt, without the prompt.

    A row ends after ``max_new_tokens``, before a token in ``stop``, or when the context is full
    (``reference.session`` goes on). A row's draws depend on the seed and its own number alone, not
    on the rest of the batch. How they are made is said by fields of ``Sampling``.

    Raises
    ------
    ValueError
        When there is no prompt, or one is empty, too long for the context, or has an unknown id.
    """
    rows: list[list[int]] = [[] for _ in prompts]
    for tokens in stream(
        ops,
        params,
        config,
        prompts,
        max_new_tokens=max_new_tokens,
        seed=seed,
        stop=stop,
        **sampling,
    ):
        for row, token in zip(rows, tokens, strict=True):
            if token is not None:
                row.append(token)
    return rows


def stream(
    ops: Ops,
    params: Params,
    config: Config,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    seed: int = 0,
    stop: Collection[int] = (),
    **sampling: Any,
) -> Iterator[list[int | None]]:
    """Yield, step by step, each row's next token, or None for a row that has ended.

    The parameters are those of ``generate``.
    """
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    if not len(lengths) or lengths.min() < 1:
        raise ValueError("generate: needs a prompt of at least one token (a bos, if nothing else)")
    if lengths.max() > config.context_length:
        raise ValueError(
            f"generate: a prompt of {lengths.max()} tokens is longer than the model's context of "
            f"{config.context_length}; keep its end"
        )
    if max_new_tokens < 1:
        raise ValueError(f"generate: max_new_tokens must be at least 1, got {max_new_tokens}")
    B, T = len(prompts), int(lengths.max())
    ids = np.zeros((B, T), np.int32)
    for b, prompt in enumerate(prompts):
        given = np.asarray(prompt)
        if given.ndim != 1:
            raise ValueError(
                f"generate: prompts[{b}] must be one row of ids, got shape {given.shape}"
            )
        check_ids("generate", f"prompts[{b}]", given, config.vocab_size)
        ids[b, : len(given)] = given
    room = min(config.context_length, T + max_new_tokens)
    rngs = [np.random.default_rng([seed, b]) for b in range(B)]
    ended = np.zeros(B, np.bool_)
    chosen = np.zeros(B, np.int32)
    said = [[int(i) for i in prompt] for prompt in prompts]

    cache = ops.kv_cache(params, config, B, room)
    scores = prefill(ops, params, config, ops.from_numpy(ids), lengths, cache)
    position = lengths.copy()  # where each row's next token will stand
    for n in range(max_new_tokens):
        if n:
            # a row that has ended goes on reading its last place; the result is not used
            place = np.minimum(position, room - 1)
            scores = ops.decode_step(params, config, ops.from_numpy(chosen), cache, place)
            position = position + 1
        host = ops.to_numpy(scores)
        for row in np.flatnonzero(~ended):
            chosen[row] = sample(host[row], rngs[row], said=said[row], **sampling)
            said[row].append(int(chosen[row]))
            ended[row] = int(chosen[row]) in stop
        yield [None if end else int(token) for end, token in zip(ended, chosen, strict=True)]
        ended |= position >= config.context_length  # no room to read what was just chosen
        if ended.all():
            return
