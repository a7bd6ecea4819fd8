"""The decoder-only language model, written once for every backend.

Token ids go in, and each position predicts the token after it::

    x = embedding(ids) [+ positions]          (B, T, D)
    x = block(x), L times: attention, then feed-forward, each joined to the residual stream
    x = norm(x)                               pre-norm models only
    z = x headᵀ                               (B, T, V), inside the loss

Every function takes an op module as its first argument: ``reference.ops``, or what ``accel.load``
returns. Arrays are that backend's own. MyLLM, GPT-2 and the post-norm decoder are configs
(``presets.py``), not classes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, get_args

import numpy as np

from reference.alibi import alibi_slopes
from reference.blocks import (
    BlockCache,
    BlockInput,
    Pass,
    Recompute,
    Remember,
    block_backward,
    block_forward,
    dropout_forward,
    norm_backward,
    norm_forward,
)
from reference.config import Config
from reference.kv import check_decode, held, room
from reference.ops import EMBEDDING_SITE, Ops
from reference.params import Layout, check_names, decoder_layout
from reference.sinusoidal import sinusoidal_table
from reference.types import Array, DropoutKey, Grads, KVCache, Loss, Params


class EmbedCache(NamedTuple):
    tokens: Any = None
    positions: Any = None  # of the lookup in a table of positions, when there is one
    add: Any = None
    dropout: Any = None


class ModelCache(NamedTuple):
    """What a forward keeps for one backward, which takes out of the lists what it has read."""

    run: Pass
    embed: EmbedCache
    blocks: list[BlockCache | BlockInput]
    final_norm: list[Any]  # one, of pre-norm models
    loss: list[Any]  # one


def loss_forward(
    ops: Ops,
    params: Params,
    config: Config,
    ids: Array,
    targets: Array,
    mask: Array | None = None,
    documents: Array | None = None,
    *,
    dropout_key: DropoutKey | None = None,
    need_backward: bool = True,
    recompute: Recompute = "auto",
) -> tuple[Loss, ModelCache]:
    """Return the summed loss of predicting ``targets`` from ``ids``, and the number that counted.

    Parameters
    ----------
    ops : module
        The backend.
    params : mapping
        Its ``parameters(master)``.
    ids : (B, T) int32
    targets : (B, T) int32
        ``targets[b, t]`` is the token after ``ids[b, t]``.
    mask : (B, T) bool, optional
        Which targets count; all, when None.
    documents : (B, T) int32, optional
        Isolates packed documents: attention stays within one. Positions do not restart.
    dropout_key : DropoutKey, optional
        Turns on the config's dropout; its site is filled in here. None: evaluation.
    need_backward : bool
        False promises that ``loss_backward`` will not be called.
    recompute : str
        What the backward recomputes, so that it need not be kept: ``"none"``, ``"norms"`` or
        ``"block"``, or ``"auto"`` for what ``ops.recompute`` says. Dropout is keyed, and an op on
        the same arrays gives the same bits, so the gradients are the same, bit for bit.

    Raises
    ------
    ValueError
        When shapes do not fit, T exceeds the context, or parameters are missing.
    """
    if recompute not in get_args(Recompute):
        raise ValueError(f"recompute must be one of {get_args(Recompute)}, got {recompute!r}")
    if recompute == "auto":
        recompute = ops.recompute(config, ids.size)
    run = start_pass(ops, params, config, decoder_layout(config), dropout_key, recompute)
    x, cache = hidden_forward(run, ids, documents, need_backward=need_backward)
    loss, loss_cache = ops.linear_cross_entropy_forward(
        x, head(run), targets, mask, params.get("head.bias"), need_backward=need_backward
    )
    return loss, cache._replace(loss=[loss_cache])


def loss_backward(
    dloss: float,
    cache: ModelCache,
    grads: Grads,
    finished: Callable[[int], None] | None = None,
) -> None:
    """Write the gradient of dloss · total into ``grads``, name -> view of the flat gradient.

    Every element is overwritten. To add up micro-batches, give each its own buffer and
    ``accumulate``. ``finished(layer)`` is called when the gradients of a layer, of those behind it
    and of an untied head are written, for who wants to send them on meanwhile. The cache is used
    up: the memory of what has been read serves what comes.
    """
    run = cache.run
    check_names(list(grads), run.layout, "the gradients")
    name = "embedding.weight" if run.config.tied else "head.weight"
    out = (grads[name], grads.get("head.bias"))
    dx = run.ops.linear_cross_entropy_backward(dloss, cache.loss.pop(), out=out)[0]
    if run.config.norm_placement == "pre":
        dx = norm_backward(run, grads, "final_norm", dx, cache.final_norm.pop())
    for layer in reversed(range(run.config.n_layers)):
        dx, _ = block_backward(run, grads, f"layers.{layer}", dx, cache.blocks.pop())
        if finished is not None:
            finished(layer)
    embed_backward(run, grads, dx, cache.embed, onto_tokens=run.config.tied)


def gradient(
    ops: Ops,
    params: Params,
    config: Config,
    ids: Array,
    targets: Array,
    mask: Array | None,
    documents: Array | None,
    grads: Grads,
    *,
    dropout_key: DropoutKey | None = None,
    recompute: Recompute = "auto",
    finished: Callable[[int], None] | None = None,
) -> Loss:
    """Write the gradient of the summed loss of a micro-batch into ``grads``; return the loss.

    In a step of the backend's own. The parameters are those of ``loss_forward`` and
    ``loss_backward``; what trains calls ``ops.gradient``, for which a backend may have another way.
    """
    with ops.step():
        loss, cache = loss_forward(
            ops,
            params,
            config,
            ids,
            targets,
            mask,
            documents,
            dropout_key=dropout_key,
            recompute=recompute,
        )
        loss_backward(1.0, cache, grads, finished)
        del cache  # before the step ends: its memory is given back, or laid out anew, there
    return loss


def logits(
    ops: Ops, params: Params, config: Config, ids: Array, documents: Array | None = None
) -> Array:
    """Return the logits (B, T, V) of every position of ids (B, T): for tests and short texts."""
    run = start_pass(ops, params, config, decoder_layout(config))
    x, _ = hidden_forward(run, ids, documents, need_backward=False)
    return ops.logits(x, head(run), params.get("head.bias"))


# ---- generation ----------------------------------------------------------------------------------


def prefill(
    ops: Ops,
    params: Params,
    config: Config,
    ids: Array,
    lengths: Array,
    cache: KVCache,
    *,
    start: int = 0,
) -> Array:
    """Read the prompts into the cache and return the logits (B, V) after each prompt's last token.

    Parameters
    ----------
    ids : (B, T) int32
        Prompts, padded at the end: causality keeps padding from being seen by any token before it,
        and decoding overwrites its cache entries before they can be read. Where a layer keeps
        fewer tokens than these, padding is left out, or it would take the slots of tokens.
    lengths : (B,) int, NumPy
        Tokens of each prompt, 1 .. T.
    cache : KVCache
        From ``ops.kv_cache``, empty, or with ``start`` tokens of each row in it.
    start : int
        Tokens of each row that were read before these, and are all in the cache still.

    Raises
    ------
    ValueError
        When lengths do not fit the ids, or the ids the cache.
    """
    B, T = ids.shape
    if np.shape(lengths) != (B,) or np.min(lengths) < 1 or np.max(lengths) > T:
        raise ValueError(f"prefill: lengths must be ({B},) with values in 1..{T}, got {lengths}")
    fits = room(config, cache)
    if start:  # what a window has let go of cannot be read again
        fits = min(k.shape[1] for k in cache.k)
    if start + T > fits:
        before = f"{start} before them and " if start else ""
        raise ValueError(
            f"prefill: the cache has room for {fits} tokens, the prompts have {before}{T}"
        )

    def remember(layer: int, k: Array, v: Array) -> tuple[Array, Array, dict[str, Any]]:
        kept = {"k": k, "v": v}
        n_slots = cache.k[layer].shape[1]
        if start:
            ops.write_kv(cache, k, v, layer=layer, position=start)
            seen = slice(0, start + T)  # the queries are the last T of them
            window = {"window": config.window_of(layer)}
            return cache.k[layer][:, seen], cache.v[layer][:, seen], window
        if T > n_slots:
            # a slot that holds nothing yet (position < 0) may take any token: it is not seen
            tokens = np.maximum(held(np.asarray(lengths) - 1, n_slots), 0)
            rows = ops.from_numpy((np.arange(B)[:, None] * T + tokens).astype(np.int32))
            for name, x in kept.items():
                picked, _ = ops.embedding_forward(rows, x.reshape(B * T, -1))
                kept[name] = picked.reshape(B, n_slots, *x.shape[2:])
        ops.write_kv(cache, **kept, layer=layer, position=0)
        return k, v, {"window": config.window_of(layer)}

    run = start_pass(ops, params, config, decoder_layout(config))
    x, _ = hidden_forward(run, ids, start=start, remember=remember, need_backward=False)
    # the head is applied to one row of each prompt; a lookup by row number picks them
    rows = ops.from_numpy((np.arange(B) * T + np.asarray(lengths) - 1).astype(np.int32))
    last, _ = ops.embedding_forward(rows, x.reshape(B * T, config.d_model))
    return ops.logits(last, head(run), params.get("head.bias"))


def decode_step(
    ops: Ops,
    params: Params,
    config: Config,
    token: Array,
    cache: KVCache,
    position: int | Array,
) -> Array:
    """Return the logits (B, V) after one more token of each row, extending the cache.

    Parameters
    ----------
    token : (B,) int32
    position : int or (B,) int, NumPy
        Where the token stands in its row, counted from 0.

    Raises
    ------
    ValueError
        When a position lies outside the cache.
    """
    positions = check_decode(config, token, cache, position)
    masks: dict[tuple[int, int], Array] = {}

    def remember(layer: int, k: Array, v: Array) -> tuple[Array, Array, dict[str, Any]]:
        window, n_slots = config.window_of(layer), cache.k[layer].shape[1]
        ops.write_kv(cache, k, v, layer=layer, position=positions % n_slots)
        used = min(n_slots, int(positions.max()) + 1)
        if (window, used) not in masks:
            where = held(positions, n_slots)[:, :used]
            first = np.maximum(positions - window + 1, 0) if window else 0 * positions
            masks[window, used] = ops.from_numpy(where >= first[:, None])
        mask = masks[window, used]
        return cache.k[layer][:, :used], cache.v[layer][:, :used], {"key_mask": mask}

    run = start_pass(ops, params, config, decoder_layout(config))
    x, _ = hidden_forward(
        run, token.reshape(-1, 1), start=positions, remember=remember, need_backward=False
    )
    return ops.logits(x.reshape(-1, config.d_model), head(run), params.get("head.bias"))


# ---- the parts -----------------------------------------------------------------------------------


def start_pass(
    ops: Ops,
    params: Params,
    config: Config,
    layout: Layout,
    dropout: DropoutKey | None = None,
    recompute: Recompute = "none",
) -> Pass:
    """Bundle what the layers of a pass share, after checking the parameters' names."""
    check_names(params, layout)
    alibi = None
    if config.position == "alibi":
        slopes = alibi_slopes(config.n_heads, constant_dtype(params))
        alibi = ops.from_numpy(slopes)
    return Pass(ops, config, params, dropout, alibi, layout, recompute)


def constant_dtype(params: Params) -> type[np.floating[Any]]:
    """Return the dtype for constant tables: float64 for a model in float64, else float32."""
    return np.float64 if params["embedding.weight"].dtype == np.float64 else np.float32


def head(run: Pass) -> Array:
    """Return the head (V, D): the embedding table itself when tied."""
    return run.params["embedding.weight" if run.config.tied else "head.weight"]


def hidden_forward(
    run: Pass,
    ids: Array,
    documents: Array | None = None,
    *,
    start: int | Array = 0,
    remember: Remember | None = None,
    need_backward: bool = True,
) -> tuple[Array, ModelCache]:
    """Return what the head reads, (B, T, D), for ids (B, T), the first at position ``start``."""
    x, embed_cache = embed_forward(run, ids, start)
    x, cache = layers_forward(
        run, x, documents, start=start, remember=remember, need_backward=need_backward
    )
    return x, cache._replace(embed=embed_cache)


def layers_forward(
    run: Pass,
    x: Array,
    documents: Array | None = None,
    *,
    start: int | Array = 0,
    remember: Remember | None = None,
    need_backward: bool = True,
) -> tuple[Array, ModelCache]:
    """Return what the head reads, (B, T, D), for embedded tokens x (B, T, D)."""
    blocks: list[BlockCache | BlockInput] = []
    for layer in range(run.config.n_layers):
        forward = partial(
            block_forward,
            run,
            f"layers.{layer}",
            layer,
            documents=documents,
            start=start,
            remember=remember,
        )
        out, block_cache = forward(x)
        if need_backward:
            again = run.recompute == "block"
            blocks.append(BlockInput(forward, x) if again else block_cache)
        x = out
        del out, block_cache
    final_caches: list[Any] = []
    if run.config.norm_placement == "pre":
        x, final_cache = norm_forward(run, "final_norm", x)
        final_caches.append(final_cache)
    return x, ModelCache(run, EmbedCache(), blocks, final_caches, [])


def embed_forward(
    run: Pass, ids: Array, start: int | Array = 0, site: int = EMBEDDING_SITE
) -> tuple[Array, EmbedCache]:
    """Return the embedding of ids (B, T), with positions added where the config says so."""
    ops, config = run.ops, run.config
    if ids.ndim != 2:
        raise ValueError(f"ids must be (B, T), got shape {ids.shape}")
    if ids.shape[1] > config.context_length:
        raise ValueError(
            f"a sequence of {ids.shape[1]} tokens exceeds context_length "
            f"({config.context_length}); cut it or use a longer context"
        )
    where = None
    if config.position in ("learned", "sinusoidal"):
        positions = np.expand_dims(start, -1) + np.arange(ids.shape[1])  # (T,) or (B, T)
        where = ops.from_numpy(positions.astype(np.int32))
    return embed_at(run, ids, where, site)


def embed_at(
    run: Pass, ids: Array, where: Array | None, site: int = EMBEDDING_SITE
) -> tuple[Array, EmbedCache]:
    """Return the embedding of ids (B, T), with that of positions ``where`` (T,) or (B, T) added.

    The positions, int32, are the backend's own; None where the config adds none.
    """
    ops, config = run.ops, run.config
    x, token_cache = ops.embedding_forward(ids, run.params["embedding.weight"])
    position_cache = add_cache = None
    if where is not None:
        if config.position == "learned":
            table = run.params["position.weight"]
        else:
            pe = sinusoidal_table(config.context_length, config.d_model, constant_dtype(run.params))
            table = ops.from_numpy(pe, activation=True)
        positions, position_cache = ops.embedding_forward(where, table)
        x, add_cache = ops.add_forward(x, positions)
    x, dropout_cache = dropout_forward(run, x, config.dropout_embedding, site)
    return x, EmbedCache(token_cache, position_cache, add_cache, dropout_cache)


def embed_backward(
    run: Pass,
    grads: Grads,
    dx: Array,
    cache: EmbedCache,
    *,
    onto_tokens: bool,
    onto_positions: bool = False,
) -> None:
    """Write the gradients of the tables of tokens and positions, or add ``onto`` what is there.

    A tied table has its gradient from the head already, and an encoder's lookups share the tables
    with a decoder's.
    """
    ops = run.ops
    dx = ops.dropout_backward(dx, cache.dropout)
    if cache.add is not None:
        dx, dpositions = ops.add_backward(dx, cache.add)
        if run.config.position == "learned":
            out = grads["position.weight"]
            ops.embedding_backward(dpositions, cache.positions, out=out, accumulate=onto_positions)
    out = grads["embedding.weight"]
    ops.embedding_backward(dx, cache.tokens, out=out, accumulate=onto_tokens)
