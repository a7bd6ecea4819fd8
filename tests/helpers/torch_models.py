"""The decoder family in plain PyTorch, as one writes it there, with autograd for its gradients.

Nothing here is taken from ``reference``: q, k and v are layers of their own, RoPE turns complex
numbers, attention is PyTorch's, and ALiBi's slopes follow the recursion of its authors' code.
"""

import math
from typing import Any

import pytest

from reference.config import Config
from reference.encoder_decoder import EncoderDecoderConfig
from tests.helpers.torch_weights import ALL, Slot, linear_bias, linear_weight, plain

torch = pytest.importorskip("torch", reason="needs the optional extra: pip install -e '.[peers]'")
nn, F = torch.nn, torch.nn.functional


def turn(x: Any, config: Config) -> Any:
    """Apply RoPE to x (B, H, T, d): each pair of coordinates is a complex number."""
    T, d = x.shape[-2:]
    frequencies = 1.0 / config.rope_base ** (torch.arange(0, d, 2, dtype=x.dtype) / d)
    if config.rope_factor != 1:
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        turns = config.rope_original_context * frequencies / (2 * math.pi)
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = (1 - blend) * frequencies / config.rope_factor + blend * frequencies
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
    def __init__(self, config: Config, window: int = 0) -> None:
        super().__init__()
        D, d, bias = config.d_model, config.d_head, config.attn_bias or config.qkv_bias
        self.config, self.window = config, window
        self.q = nn.Linear(D, config.n_heads * d, bias=bias)
        self.k = nn.Linear(D, config.n_kv_heads * d, bias=bias)
        self.v = nn.Linear(D, config.n_kv_heads * d, bias=bias)
        self.out = nn.Linear(config.n_heads * d, D, bias=config.attn_bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(d, eps=config.norm_eps) for _ in range(2))

    def forward(self, x: Any, mask: Any) -> Any:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.config.d_head)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.window:
            T = x.shape[1]
            mask = mask.masked_fill(torch.ones(T, T).tril(-self.window).bool(), -torch.inf)
        if self.config.position == "rope":
            q, k = turn(q, self.config), turn(k, self.config)
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
    def __init__(self, config: Config, window: int) -> None:
        super().__init__()
        self.pre = config.norm_placement == "pre"
        self.norm1, self.norm2 = norm(config), norm(config)
        self.attention, self.ffn = SelfAttention(config, window), FeedForward(config)

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
        windows = config.window if isinstance(config.window, tuple) else [config.window] * 99
        self.blocks = nn.ModuleList(Block(config, w) for w in windows[: config.n_layers])
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
            if config.attn_bias or config.qkv_bias:
                slots[f"{name}.attention.bqkv"] = linear_bias(a.q, a.k, a.v)
            if config.attn_bias:
                slots[f"{name}.attention.bo"] = linear_bias(a.out)
            if config.qk_norm:
                slots |= norm_slots(f"{name}.attention.q_norm", a.q_norm)
                slots |= norm_slots(f"{name}.attention.k_norm", a.k_norm)
            up, suffix = ((f.gate, f.up), "gate_up") if f.kind == "swiglu" else ((f.up,), "up")
            slots[f"{name}.ffn.w_{suffix}"] = linear_weight(*up)
            slots[f"{name}.ffn.w_down"] = linear_weight(f.down)
            if config.ffn_bias:
                slots[f"{name}.ffn.b_{suffix}"] = linear_bias(*up)
                slots[f"{name}.ffn.b_down"] = linear_bias(f.down)
        if config.norm_placement == "pre":
            slots |= norm_slots("final_norm", self.norm)
        return slots | head_slots(config, self.head)


def head_slots(config: Config, head: Any) -> dict[str, Slot]:
    """Return the slots of the head that a model has beside its embedding."""
    slots = {} if config.tied else {"head.weight": plain(head.weight)}
    return slots | ({"head.bias": plain(head.bias)} if config.head_bias else {})


def norm_slots(name: str, module: Any) -> dict[str, Slot]:
    """Return the slots of a norm's gain and, when it has one, its shift."""
    slots = {f"{name}.gain": plain(module.weight)}
    if isinstance(module, nn.LayerNorm):
        slots[f"{name}.bias"] = plain(module.bias)
    return slots


class EncoderDecoder(nn.Module):
    """The encoder–decoder of a config, of PyTorch's own layers.

    Their biases are all or none; where a config has none in attention, they are left at zero.
    """

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        assert config.ffn_bias and config.n_heads * config.d_head == config.d_model
        self.config = config
        pre = config.norm_placement == "pre"
        layer = {
            "d_model": config.d_model,
            "nhead": config.n_heads,
            "dim_feedforward": config.d_ff,
            "dropout": 0.0,
            "activation": {"relu": F.relu, "gelu": F.gelu}[config.ffn],
            "layer_norm_eps": config.norm_eps,
            "batch_first": True,
            "norm_first": pre,
        }
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        if config.position == "learned":
            self.position = nn.Embedding(config.context_length, config.d_model)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(**layer) for _ in range(config.n_encoder_layers)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(**layer) for _ in range(config.n_layers)
        )
        self.encoder_norm = norm(config) if pre else nn.Identity()
        self.norm = norm(config) if pre else nn.Identity()
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=config.head_bias)
        if config.tied:
            self.head.weight = self.embedding.weight
        if not config.attn_bias:
            for module in self.modules():
                if isinstance(module, nn.MultiheadAttention):
                    nn.init.zeros_(module.in_proj_bias)
                    nn.init.zeros_(module.out_proj.bias)

    def embed(self, ids: Any) -> Any:
        T = ids.shape[1]
        if self.config.position == "learned":
            return self.embedding(ids) + self.position(torch.arange(T))
        return self.embedding(ids) + sinusoids(T, self.config.d_model)

    def forward(self, source: Any, target: Any, source_mask: Any = None) -> Any:
        """Return the logits (B, T, V) after each token of target (B, T)."""
        padding = None if source_mask is None else ~source_mask
        memory = self.embed(source)
        for layer in self.encoder:
            memory = layer(memory, src_key_padding_mask=padding)
        memory, x = self.encoder_norm(memory), self.embed(target)
        later = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=later, memory_key_padding_mask=padding)
        return self.head(self.norm(x))

    def slots(self) -> dict[str, Slot]:
        """Return where each parameter of ours lies in this model."""
        config = self.config
        slots = {"embedding.weight": plain(self.embedding.weight)}
        if config.position == "learned":
            slots["position.weight"] = plain(self.position.weight)
        for i, layer in enumerate(self.encoder):
            slots |= self._block_slots(f"encoder.{i}", layer, layer.norm1, layer.norm2)
        for i, layer in enumerate(self.decoder):
            slots |= self._block_slots(f"layers.{i}", layer, layer.norm1, layer.norm3)
            slots |= norm_slots(f"layers.{i}.cross_norm", layer.norm2)
            # PyTorch keeps q, k and v of one attention in one matrix; ours for k and v is apart
            cross, D = layer.multihead_attn, config.d_model
            q, kv = slice(0, D), slice(D, 3 * D)
            slots |= {
                f"layers.{i}.cross.wq": Slot([(cross.in_proj_weight, q)], transposed=True),
                f"layers.{i}.cross.wkv": Slot([(cross.in_proj_weight, kv)], transposed=True),
                f"layers.{i}.cross.wo": linear_weight(cross.out_proj),
            }
            if config.attn_bias:
                slots |= {
                    f"layers.{i}.cross.bq": Slot([(cross.in_proj_bias, q)], transposed=False),
                    f"layers.{i}.cross.bkv": Slot([(cross.in_proj_bias, kv)], transposed=False),
                    f"layers.{i}.cross.bo": linear_bias(cross.out_proj),
                }
        if config.norm_placement == "pre":
            slots |= norm_slots("encoder_norm", self.encoder_norm)
            slots |= norm_slots("final_norm", self.norm)
        return slots | head_slots(config, self.head)

    def _block_slots(self, name: str, layer: Any, norm1: Any, norm2: Any) -> dict[str, Slot]:
        attention = layer.self_attn
        slots = {
            **norm_slots(f"{name}.attention_norm", norm1),
            **norm_slots(f"{name}.ffn_norm", norm2),
            f"{name}.attention.wqkv": Slot([(attention.in_proj_weight, ALL)], transposed=True),
            f"{name}.attention.wo": linear_weight(attention.out_proj),
            f"{name}.ffn.w_up": linear_weight(layer.linear1),
            f"{name}.ffn.b_up": linear_bias(layer.linear1),
            f"{name}.ffn.w_down": linear_weight(layer.linear2),
            f"{name}.ffn.b_down": linear_bias(layer.linear2),
        }
        if self.config.attn_bias:
            slots[f"{name}.attention.bqkv"] = plain(attention.in_proj_bias)
            slots[f"{name}.attention.bo"] = linear_bias(attention.out_proj)
        return slots
