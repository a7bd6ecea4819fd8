"""The decoder family in plain PyTorch, as one writes it there, with autograd for its gradients.

Nothing here is taken from ``reference``: q, k and v are layers of their own, RoPE turns complex
numbers, attention is PyTorch's, and ALiBi's slopes follow the recursion of its authors' code.
"""

import math
from typing import Any

import pytest

from reference.config import Config
from tests.peers.weights import Slot, linear_bias, linear_weight, plain

torch = pytest.importorskip("torch", reason="needs the optional extra: pip install -e '.[peers]'")
nn, F = torch.nn, torch.nn.functional


def turn(x: Any, base: float) -> Any:
    """Apply RoPE to x (B, H, T, d): each pair of coordinates is a complex number."""
    T, d = x.shape[-2:]
    frequencies = 1.0 / base ** (torch.arange(0, d, 2, dtype=x.dtype) / d)
    angles = torch.outer(torch.arange(T, dtype=x.dtype), frequencies)
    z = torch.view_as_complex(x.unflatten(-1, (d // 2, 2)).contiguous())
    return torch.view_as_real(z * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def alibi_slopes(n: int) -> list[float]:
    """Return the slopes by the recursion in the code of ALiBi's authors."""
    if math.log2(n).is_integer():
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]
    closest = 2 ** math.floor(math.log2(n))
    return alibi_slopes(closest) + alibi_slopes(2 * closest)[0::2][: n - closest]


def sinusoids(length: int, width: int) -> Any:
    """Return the table of sines and cosines, with the frequencies as exp(-log)."""
    position = torch.arange(length).unsqueeze(1)
    rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    table = torch.zeros(length, width)
    table[:, 0::2] = torch.sin(position * rate)
    table[:, 1::2] = torch.cos(position * rate)
    return table


class SelfAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        D, d, bias = config.d_model, config.d_head, config.attn_bias
        self.config = config
        self.q = nn.Linear(D, config.n_heads * d, bias=bias)
        self.k = nn.Linear(D, config.n_kv_heads * d, bias=bias)
        self.v = nn.Linear(D, config.n_kv_heads * d, bias=bias)
        self.out = nn.Linear(config.n_heads * d, D, bias=bias)

    def forward(self, x: Any, mask: Any) -> Any:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.config.d_head)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        if self.config.position == "rope":
            q, k = turn(q, self.config.rope_base), turn(k, self.config.rope_base)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.out(o.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.kind = config.ffn
        if self.kind == "swiglu":
            self.gate = nn.Linear(config.d_model, config.d_ff, bias=config.ffn_bias)
        self.up = nn.Linear(config.d_model, config.d_ff, bias=config.ffn_bias)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.ffn_bias)

    def forward(self, x: Any) -> Any:
        h = self.up(x)
        if self.kind == "swiglu":
            return self.down(F.silu(self.gate(x)) * h)
        if self.kind == "relu":
            return self.down(F.relu(h))
        return self.down(F.gelu(h, approximate="tanh" if self.kind == "gelu_tanh" else "none"))


def norm(config: Config) -> Any:
    kind = nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm
    return kind(config.d_model, eps=config.norm_eps)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.pre = config.norm_placement == "pre"
        self.norm1, self.norm2 = norm(config), norm(config)
        self.attention, self.ffn = SelfAttention(config), FeedForward(config)

    def forward(self, x: Any, mask: Any) -> Any:
        if self.pre:
            x = x + self.attention(self.norm1(x), mask)
            return x + self.ffn(self.norm2(x))
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.ffn(x))


class Decoder(nn.Module):
    """The decoder-only language model that a config describes."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        if config.position == "learned":
            self.position = nn.Embedding(config.context_length, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = norm(config) if config.norm_placement == "pre" else nn.Identity()
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=config.head_bias)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Any, documents: Any = None) -> Any:
        """Return the logits (B, T, V) of ids (B, T)."""
        T, config = ids.shape[1], self.config
        x = self.embedding(ids)
        if config.position == "learned":
            x = x + self.position(torch.arange(T))
        if config.position == "sinusoidal":
            x = x + sinusoids(config.context_length, config.d_model)[:T]
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1)[None, None]
        if documents is not None:
            hidden = hidden | (documents[:, None, :, None] != documents[:, None, None, :])
        mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
        if config.position == "alibi":
            distance = torch.arange(T)[None, :] - torch.arange(T)[:, None]  # key - query
            mask = mask + torch.tensor(alibi_slopes(config.n_heads))[:, None, None] * distance
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))

    def slots(self) -> dict[str, Slot]:
        """Return where each parameter of ours lies in this model."""
        config = self.config
        slots = {"embedding.weight": plain(self.embedding.weight)}
        if config.position == "learned":
            slots["position.weight"] = plain(self.position.weight)
        for i, block in enumerate(self.blocks):
            name, a, f = f"layers.{i}", block.attention, block.ffn
            slots |= norm_slots(f"{name}.attention_norm", block.norm1)
            slots |= norm_slots(f"{name}.ffn_norm", block.norm2)
            slots[f"{name}.attention.wqkv"] = linear_weight(a.q, a.k, a.v)
            slots[f"{name}.attention.wo"] = linear_weight(a.out)
            if config.attn_bias:
                slots[f"{name}.attention.bqkv"] = linear_bias(a.q, a.k, a.v)
                slots[f"{name}.attention.bo"] = linear_bias(a.out)
            up, suffix = ((f.gate, f.up), "gate_up") if f.kind == "swiglu" else ((f.up,), "up")
            slots[f"{name}.ffn.w_{suffix}"] = linear_weight(*up)
            slots[f"{name}.ffn.w_down"] = linear_weight(f.down)
            if config.ffn_bias:
                slots[f"{name}.ffn.b_{suffix}"] = linear_bias(*up)
                slots[f"{name}.ffn.b_down"] = linear_bias(f.down)
        if config.norm_placement == "pre":
            slots |= norm_slots("final_norm", self.norm)
        if not config.tied:
            slots["head.weight"] = plain(self.head.weight)
        if config.head_bias:
            slots["head.bias"] = plain(self.head.bias)
        return slots


def norm_slots(name: str, module: Any) -> dict[str, Slot]:
    """Return the slots of a norm's gain and, when it has one, its shift."""
    slots = {f"{name}.gain": plain(module.weight)}
    if isinstance(module, nn.LayerNorm):
        slots[f"{name}.bias"] = plain(module.bias)
    return slots
