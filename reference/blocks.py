"""The layers of a transformer, composed of ops: norm, attention, feed-forward, residual.

Nothing here does arithmetic on activations; every number comes out of an op of the module that was
passed in. So one composition serves every backend, and each backward is the forward read from the
last line to the first, with every op replaced by its backward.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from reference.config import Config
from reference.ops import (
    ATTENTION_BRANCH,
    ATTENTION_PROBABILITIES,
    CROSS_BRANCH,
    CROSS_PROBABILITIES,
    FFN_BRANCH,
    Ops,
    block_site,
)
from reference.params import Layout
from reference.types import Array, DropoutKey, Grads, Params

# What a forward does not keep, because the backward recomputes it, with the same bits:
#   auto    what the backend advises: none or norms
#   none    nothing is recomputed
#   norms   the outputs of pre-norms and of the activation, each from its kept input; those of
#           QK-norm are what attention reads, and are kept
#   block   all of a block but its input
Recompute = Literal["auto", "none", "norms", "block"]

# What a cached pass does with a layer's new keys and values: writes them down and returns the keys
# and values to attend to, and attention's options that say which of them are seen.
Remember = Callable[[int, Array, Array], tuple[Array, Array, dict[str, Any]]]


class Pass(NamedTuple):
    """What all layers of one forward and backward pass share."""

    ops: Ops
    config: Config
    params: Params
    dropout: DropoutKey | None  # None: nothing is dropped (evaluation); its site is filled in
    alibi: Array | None  # (Hq,) slopes when positions are ALiBi's
    layout: Layout  # of the parameters, and so of their gradients
    recompute: Recompute = "none"

    @property
    def keeps_norms(self) -> bool:
        """Whether branches keep their input; a post-norm's output is the residual stream."""
        return self.keeps_activations or self.config.norm_placement == "post"

    @property
    def keeps_activations(self) -> bool:
        """Whether the activation's output is kept."""
        return self.recompute != "norms"


class ResidualCache(NamedTuple):
    norm: Any
    branch: Any
    dropout: Any  # None where nothing was dropped
    x: Array | None  # (B, T, D) what the norm read, to make its output again


class AttentionBranchCache(NamedTuple):
    inputs: tuple[Any, ...]  # the projections into attention
    rope: Any  # of queries and keys together
    split: Any
    heads: tuple[Any, ...]  # QK-norm and RoPE of the queries, then of the keys
    attention: Any
    merge: Any
    out: Array  # (B, T, Hq·d) what the projection out of it read; attention keeps it, too
    output: Any  # that projection


class FeedForwardCache(NamedTuple):
    up: Any
    # one, which the backward takes out: the activation's cache, and (B, T, F or 2F) what it read,
    # where its output is to be made again
    activation: list[tuple[Any, Array | None]]
    down: Any


class BlockCache(NamedTuple):
    attention: ResidualCache
    cross: ResidualCache | None  # in a decoder that reads a memory
    ffn: ResidualCache


class BlockInput(NamedTuple):
    """What is kept of a block that the backward recomputes."""

    forward: Callable[[Array], tuple[Array, BlockCache]]
    x: Array  # (B, T, D)


# ---- norm, linear, RoPE, dropout: an op with what it needs looked up -----------------------------


def norm_forward(run: Pass, name: str, x: Array) -> tuple[Array, Any]:
    """Return the norm of x (B, T, D) by the kind that the config chose."""
    ops, params, eps = run.ops, run.params, run.config.norm_eps
    if run.config.norm == "layernorm":
        return ops.layernorm_forward(x, params[f"{name}.gain"], params[f"{name}.bias"], eps=eps)
    return ops.rmsnorm_forward(x, params[f"{name}.gain"], eps=eps)


def norm_backward(
    run: Pass, grads: Grads, name: str, dout: Array, cache: Any, plus: Array | None = None
) -> Array:
    """Write the gradients of gain and shift, return dx, with ``plus`` added where it is given."""
    if run.config.norm == "layernorm":
        out = (grads[f"{name}.gain"], grads[f"{name}.bias"])
        return run.ops.layernorm_backward(dout, cache, out=out, plus=plus)[0]
    return run.ops.rmsnorm_backward(dout, cache, out=grads[f"{name}.gain"], plus=plus)[0]


def linear_forward(run: Pass, weight: str, bias: str, x: Array, **how: Any) -> tuple[Array, Any]:
    """Return x W, + b when the model has that bias; ``how``: the op's ``keep_x`` and ``plus``."""
    return run.ops.linear_forward(x, run.params[weight], run.params.get(bias), **how)


def linear_backward(
    run: Pass,
    grads: Grads,
    weight: str,
    bias: str,
    dout: Array,
    cache: Any,
    x: Array | None = None,
) -> Array:
    """Write the gradients of weight and bias, return dx; ``x`` unless the forward kept it."""
    return run.ops.linear_backward(dout, cache, x=x, out=(grads[weight], grads.get(bias)))[0]


def rope_forward(
    run: Pass, x: Array, start: int | Array, rotate_heads: int | None = None
) -> tuple[Array, Any]:
    """Return heads x (B, T, H, d) turned where positions are RoPE's, x itself otherwise."""
    if run.config.position != "rope":
        return x, None
    return run.ops.rope_forward(
        x,
        base=run.config.rope_base,
        start=start,
        rotate_heads=rotate_heads,
        scaling=run.config.rope_scaling,
    )


def rope_backward(run: Pass, dout: Array, cache: Any) -> Array:
    """Return dx."""
    return dout if cache is None else run.ops.rope_backward(dout, cache)


def dropout_forward(run: Pass, x: Array, p: float, site: int) -> tuple[Array, Any]:
    """Return x with elements dropped while training, x itself otherwise."""
    if run.dropout is None:
        return run.ops.dropout_forward(x, p=0.0)
    return run.ops.dropout_forward(x, p=p, key=run.dropout._replace(site=site))


# ---- the residual branch -------------------------------------------------------------------------


def residual_forward(
    run: Pass,
    name: str,
    x: Array,
    site: int,
    branch: Callable[..., tuple[Array, Any]],
) -> tuple[Array, ResidualCache]:
    """Return x with a branch joined in.

    pre-norm (GPT-2, Llama): x + dropout(branch(norm(x))), post-norm (Vaswani et al. 2017, section
    5.4): norm(x + dropout(branch(x))). The branch's last product adds x itself, as its ``plus``,
    unless dropout stands between them.
    """
    ops, pre, p = run.ops, run.config.norm_placement == "pre", run.config.dropout_residual
    h, norm_cache = norm_forward(run, name, x) if pre else (x, None)
    drops, dropout_cache = run.dropout is not None and p > 0, None
    out, branch_cache = branch(h, plus=None if drops else x)
    if drops:
        h, dropout_cache = dropout_forward(run, out, p, site)
        out = ops.add_forward(x, h)[0]
    if not pre:
        out, norm_cache = norm_forward(run, name, out)
    read = None if run.keeps_norms else x
    return out, ResidualCache(norm_cache, branch_cache, dropout_cache, read)


def residual_backward(
    run: Pass,
    grads: Grads,
    name: str,
    dout: Array,
    cache: ResidualCache,
    branch_backward: Callable[[Array, Any, Callable[[], Array | None]], Array],
) -> Array:
    """Write the parameter gradients, return dx: through the residual plus through the branch.

    A sum passes its gradient on to both sides, so the residual's is dout. The branch is also given
    a function that makes its input again, None when that was kept.
    """

    def again() -> Array | None:
        return None if cache.x is None else norm_forward(run, name, cache.x)[0]

    ops, pre = run.ops, run.config.norm_placement == "pre"
    if not pre:
        dout = norm_backward(run, grads, name, dout, cache.norm)
    dh = dout if cache.dropout is None else ops.dropout_backward(dout, cache.dropout)
    dh = branch_backward(dh, cache.branch, again)
    if pre:
        return norm_backward(run, grads, name, dh, cache.norm, plus=dout)
    return ops.add_forward(dout, dh)[0]


# ---- attention -----------------------------------------------------------------------------------


def self_attention_forward(
    run: Pass,
    name: str,
    x: Array,
    block: int,
    *,
    causal: bool = True,
    key_mask: Array | None = None,
    documents: Array | None = None,
    start: int | Array = 0,
    remember: Remember | None = None,
    plus: Array | None = None,
) -> tuple[Array, AttentionBranchCache]:
    """Return self-attention of x (B, T, D), the first token at position ``start``, with ``plus``.

    With QK-norm queries and keys pass through RMSNorm, head by head, before they are turned (Henry
    et al. 2020, with a gain for each coordinate as in Qwen3): the gains alone set how large
    scores can be, whatever ``wqkv`` does.
    """
    ops, config = run.ops, run.config
    B, T, _ = x.shape
    heads = (config.n_heads, config.n_kv_heads, config.n_kv_heads)

    qkv, input_cache = linear_forward(
        run, f"{name}.wqkv", f"{name}.bqkv", x, keep_x=run.keeps_norms
    )
    qkv = qkv.reshape(B, T, sum(heads), config.d_head)
    rope_cache = None
    head_caches: tuple[Any, ...] = ()
    if not config.qk_norm:
        qkv, rope_cache = rope_forward(run, qkv, start, heads[0] + heads[1])
    (q, k, v), split_cache = ops.split_heads_forward(qkv, heads=heads)
    if config.qk_norm:
        q, q_cache = normed_heads_forward(run, f"{name}.q_norm", q, start)
        k, k_cache = normed_heads_forward(run, f"{name}.k_norm", k, start)
        head_caches = (q_cache, k_cache)
    seen: dict[str, Any] = {"key_mask": key_mask, "documents": documents, "causal": causal}
    seen["window"] = config.window_of(block)
    if remember is not None:
        k, v, seen = remember(block, k, v)
    site = block_site(block, ATTENTION_PROBABILITIES)
    out, caches = _attend_forward(run, name, site, plus, q, k, v, run.alibi, **seen)
    return out, AttentionBranchCache((input_cache,), rope_cache, split_cache, head_caches, *caches)


def self_attention_backward(
    run: Pass,
    grads: Grads,
    name: str,
    dout: Array,
    cache: AttentionBranchCache,
    again: Callable[[], Array | None],
) -> Array:
    """Write the parameter gradients, return dx (B, T, D); ``again`` gives x unless it was kept."""
    dq, dk, dv = _attend_backward(run, grads, name, dout, cache)
    if cache.heads:
        dq = normed_heads_backward(run, grads, f"{name}.q_norm", dq, cache.heads[0])
        dk = normed_heads_backward(run, grads, f"{name}.k_norm", dk, cache.heads[1])
    dqkv = run.ops.split_heads_backward((dq, dk, dv), cache.split)
    dqkv = rope_backward(run, dqkv, cache.rope)
    B, T, H, d = dqkv.shape
    dqkv = dqkv.reshape(B, T, H * d)
    input_cache, x = cache.inputs[0], again()
    return linear_backward(run, grads, f"{name}.wqkv", f"{name}.bqkv", dqkv, input_cache, x)


def normed_heads_forward(
    run: Pass, name: str, x: Array, start: int | Array
) -> tuple[Array, tuple[Any, Any]]:
    """Return QK-norm and then RoPE of the queries or the keys x (B, T, H, d)."""
    gain = run.params[f"{name}.gain"]
    x, norm_cache = run.ops.rmsnorm_forward(x, gain, eps=run.config.norm_eps)
    x, rope_cache = rope_forward(run, x, start)
    return x, (norm_cache, rope_cache)


def normed_heads_backward(
    run: Pass, grads: Grads, name: str, dout: Array, cache: tuple[Any, Any]
) -> Array:
    """Write the gradient of the gain, return dx."""
    norm_cache, rope_cache = cache
    dx = rope_backward(run, dout, rope_cache)
    return run.ops.rmsnorm_backward(dx, norm_cache, out=grads[f"{name}.gain"])[0]


def cross_attention_forward(
    run: Pass,
    name: str,
    x: Array,
    memory: Array,
    block: int,
    *,
    key_mask: Array | None = None,
    plus: Array | None = None,
) -> tuple[Array, AttentionBranchCache]:
    """Return attention of x (B, T, D) over memory (B, S, D), an encoder's output, with ``plus``.

    Positions play no part here, as memory already carries its own, nor does QK-norm.
    """
    ops, config = run.ops, run.config
    d, kv_heads = config.d_head, config.n_kv_heads
    q, q_cache = linear_forward(run, f"{name}.wq", f"{name}.bq", x, keep_x=run.keeps_norms)
    kv, kv_cache = linear_forward(run, f"{name}.wkv", f"{name}.bkv", memory)
    q = q.reshape(*x.shape[:2], config.n_heads, d)
    kv = kv.reshape(*memory.shape[:2], 2 * kv_heads, d)
    (k, v), split_cache = ops.split_heads_forward(kv, heads=(kv_heads, kv_heads))
    site = block_site(block, CROSS_PROBABILITIES)
    out, caches = _attend_forward(run, name, site, plus, q, k, v, None, key_mask, causal=False)
    return out, AttentionBranchCache((q_cache, kv_cache), None, split_cache, (), *caches)


def cross_attention_backward(
    run: Pass,
    grads: Grads,
    name: str,
    dout: Array,
    cache: AttentionBranchCache,
    again: Callable[[], Array | None],
) -> tuple[Array, Array]:
    """Write the parameter gradients, return (dx, dmemory)."""
    dq, dk, dv = _attend_backward(run, grads, name, dout, cache)
    dkv = run.ops.split_heads_backward((dk, dv), cache.split)
    dq = dq.reshape(*dq.shape[:2], -1)
    dkv = dkv.reshape(*dkv.shape[:2], -1)
    q_cache, kv_cache = cache.inputs
    dx = linear_backward(run, grads, f"{name}.wq", f"{name}.bq", dq, q_cache, again())
    dmemory = linear_backward(run, grads, f"{name}.wkv", f"{name}.bkv", dkv, kv_cache)
    return dx, dmemory


def _attend_forward(
    run: Pass, name: str, site: int, plus: Array | None, *heads: Any, **seen: Any
) -> tuple[Array, tuple[Any, Any, Array, Any]]:
    """Return attention of q, k and v, its heads merged and projected, and what the caches hold."""
    wo, bo = f"{name}.wo", f"{name}.bo"
    if run.dropout is not None and run.config.dropout_attention:
        seen["dropout_p"] = run.config.dropout_attention
        seen["dropout_key"] = run.dropout._replace(site=site)
    out, attention_cache = run.ops.attention_forward(*heads, **seen)
    merged, merge_cache = run.ops.merge_heads_forward(out)
    out, output_cache = linear_forward(run, wo, bo, merged, keep_x=False, plus=plus)
    return out, (attention_cache, merge_cache, merged, output_cache)


def _attend_backward(
    run: Pass, grads: Grads, name: str, dout: Array, cache: AttentionBranchCache
) -> tuple[Array, Array, Array]:
    """Write the gradients of the way out, return (dq, dk, dv)."""
    dout = linear_backward(run, grads, f"{name}.wo", f"{name}.bo", dout, cache.output, cache.out)
    dout = run.ops.merge_heads_backward(dout, cache.merge)
    dq, dk, dv = run.ops.attention_backward(dout, cache.attention)
    return dq, dk, dv


# ---- feed-forward --------------------------------------------------------------------------------


def _up_names(config: Config, name: str) -> tuple[str, str]:
    if config.gated:
        return f"{name}.w_gate_up", f"{name}.b_gate_up"
    return f"{name}.w_up", f"{name}.b_up"


def feed_forward_forward(
    run: Pass, name: str, x: Array, *, plus: Array | None = None
) -> tuple[Array, FeedForwardCache]:
    """Return the feed-forward of x (B, T, D), with ``plus``: widen to F, activate, narrow again."""
    keep, down = run.keeps_activations, (f"{name}.w_down", f"{name}.b_down")
    h, up_cache = linear_forward(run, *_up_names(run.config, name), x, keep_x=run.keeps_norms)
    h = run.ops.keep(h)
    product, activation_cache = activation(run.ops, run.config.ffn)[0](h)
    out, down_cache = linear_forward(run, *down, product, keep_x=keep, plus=plus)
    activated = [(activation_cache, None if keep else h)]
    return out, FeedForwardCache(up_cache, activated, down_cache)


def feed_forward_backward(
    run: Pass,
    grads: Grads,
    name: str,
    dout: Array,
    cache: FeedForwardCache,
    again: Callable[[], Array | None],
) -> Array:
    """Write the parameter gradients, return dx."""
    forward, backward = activation(run.ops, run.config.ffn)
    activated, h = cache.activation.pop()
    product = None if h is None else forward(h)[0]
    dh = linear_backward(run, grads, f"{name}.w_down", f"{name}.b_down", dout, cache.down, product)
    del product
    dh = backward(dh, activated)
    del activated, h
    return linear_backward(run, grads, *_up_names(run.config, name), dh, cache.up, again())


def activation(
    ops: Ops, ffn: str
) -> tuple[Callable[[Array], tuple[Array, Any]], Callable[[Array, Any], Array]]:
    """Return the forward and backward of the activation that a config's ``ffn`` names."""
    return getattr(ops, f"{ffn}_forward"), getattr(ops, f"{ffn}_backward")


# ---- the block -----------------------------------------------------------------------------------


def block_forward(
    run: Pass,
    name: str,
    block: int,
    x: Array,
    *,
    memory: Array | None = None,
    memory_mask: Array | None = None,
    **attention_options: Any,
) -> tuple[Array, BlockCache]:
    """Return x (B, T, D) after one block: attention, cross-attention to a memory, feed-forward.

    Parameters
    ----------
    name : str
        Prefix of the block's parameters.
    block : int
        Its number, which its dropout sites follow from.
    memory : (B, S, D), optional
        An encoder's output; without it there is no cross-attention.
    memory_mask : (B, S) bool, optional
        False where the memory is padding.
    **attention_options
        Of ``self_attention_forward``.
    """
    attention = partial(
        self_attention_forward, run, f"{name}.attention", block=block, **attention_options
    )
    x, attention_cache = residual_forward(
        run, f"{name}.attention_norm", x, block_site(block, ATTENTION_BRANCH), attention
    )
    cross_cache = None
    if memory is not None:
        cross = partial(
            cross_attention_forward,
            run,
            f"{name}.cross",
            memory=memory,
            block=block,
            key_mask=memory_mask,
        )
        x, cross_cache = residual_forward(
            run, f"{name}.cross_norm", x, block_site(block, CROSS_BRANCH), cross
        )
    feed_forward = partial(feed_forward_forward, run, f"{name}.ffn")
    x, ffn_cache = residual_forward(
        run, f"{name}.ffn_norm", x, block_site(block, FFN_BRANCH), feed_forward
    )
    return x, BlockCache(attention_cache, cross_cache, ffn_cache)


def block_backward(
    run: Pass,
    grads: Grads,
    name: str,
    dx: Array,
    cache: BlockCache | BlockInput,
    dmemory: Array | None = None,
) -> tuple[Array, Array | None]:
    """Write the block's parameter gradients, return (dx, dmemory).

    Every block reads the same memory, so its gradient is a sum: ``dmemory`` goes in as the sum over
    the blocks above, None at the top, and comes out with this block's part added.
    """
    if isinstance(cache, BlockInput):
        cache = cache.forward(cache.x)[1]
    feed_forward = partial(feed_forward_backward, run, grads, f"{name}.ffn")
    dx = residual_backward(run, grads, f"{name}.ffn_norm", dx, cache.ffn, feed_forward)
    if cache.cross is not None:

        def cross(dout: Array, branch: Any, again: Callable[[], Array | None]) -> Array:
            nonlocal dmemory
            dh, part = cross_attention_backward(run, grads, f"{name}.cross", dout, branch, again)
            dmemory = part if dmemory is None else run.ops.add_forward(dmemory, part)[0]
            return dh

        dx = residual_backward(run, grads, f"{name}.cross_norm", dx, cache.cross, cross)
    attention = partial(self_attention_backward, run, grads, f"{name}.attention")
    dx = residual_backward(run, grads, f"{name}.attention_norm", dx, cache.attention, attention)
    return dx, dmemory
