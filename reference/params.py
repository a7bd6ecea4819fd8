"""Parameters: names, shapes and their one contiguous buffer.

All parameters of a model are views into one flat buffer, the master. The optimizer, the reduction
over ranks and the checkpoint then handle one array. Parameters that weight decay applies to come
first, so that "which elements decay" is one number.

The decay rule: a parameter with two axes or more (every matrix and table) decays; one with a single
axis (norm gains and shifts, biases) does not. A decayed gain would pull a normalised layer's output
towards zero rather than make the function simpler.

Weights are ``(in, out)``: y = x W. They start from a normal distribution with standard deviation
0.02 (Radford et al. 2018, GPT, section 4.1); projections into the residual stream are scaled by
1/√(number of residual branches) (Radford et al. 2019, GPT-2, section 2.3), which is 1/√(2L) for L
blocks of two branches.
"""

import math
import zlib
from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from reference.config import Config
from reference.types import Array

INIT_STD = 0.02


class ParamSpec(NamedTuple):
    """One parameter: its name, its shape and the distribution it starts from."""

    name: str
    shape: tuple[int, ...]
    std: float  # of the normal distribution it starts from; 0 for a constant
    mean: float = 0.0
    # of a matrix within a block: the columns of each that lies side by side in it; else none
    parts: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def decays(self) -> bool:
        return len(self.shape) >= 2


def weight(name: str, shape: tuple[int, ...], std: float = INIT_STD) -> ParamSpec:
    """Return the spec of a matrix or table."""
    return ParamSpec(name, shape, std)


def matrix(name: str, rows: int, *parts: int, std: float = INIT_STD) -> ParamSpec:
    """Return the spec of a block's matrix, or of several side by side, of so many columns each."""
    return ParamSpec(name, (rows, sum(parts)), std, parts=parts)


def bias(name: str, width: int) -> ParamSpec:
    """Return the spec of a bias, which starts at zero."""
    return ParamSpec(name, (width,), 0.0)


def norm_specs(config: Config, name: str) -> list[ParamSpec]:
    """Return the specs of a norm: a gain that starts at one, and LayerNorm's shift at zero."""
    specs = [ParamSpec(f"{name}.gain", (config.d_model,), 0.0, 1.0)]
    if config.norm == "layernorm":
        specs.append(bias(f"{name}.bias", config.d_model))
    return specs


def attention_specs(config: Config, name: str, residual_std: float) -> list[ParamSpec]:
    """Return the specs of self-attention: the fused q, k, v projection and the way out."""
    d = config.d_head
    out_of = config.n_heads * d
    kv_width = config.n_kv_heads * d
    fused = out_of + 2 * kv_width
    specs = [
        matrix(f"{name}.wqkv", config.d_model, out_of, kv_width, kv_width),
        matrix(f"{name}.wo", out_of, config.d_model, std=residual_std),
    ]
    if config.attn_bias or config.qkv_bias:
        specs.append(bias(f"{name}.bqkv", fused))
    if config.attn_bias:
        specs.append(bias(f"{name}.bo", config.d_model))
    if config.qk_norm:
        specs += [ParamSpec(f"{name}.{norm}.gain", (d,), 0.0, 1.0) for norm in ("q_norm", "k_norm")]
    return specs


def cross_attention_specs(config: Config, name: str, residual_std: float) -> list[ParamSpec]:
    """Return the specs of cross-attention: queries from here, keys and values from a memory."""
    d = config.d_head
    q_width, kv_width = config.n_heads * d, config.n_kv_heads * d
    specs = [
        matrix(f"{name}.wq", config.d_model, q_width),
        matrix(f"{name}.wkv", config.d_model, kv_width, kv_width),
        matrix(f"{name}.wo", q_width, config.d_model, std=residual_std),
    ]
    if config.attn_bias or config.qkv_bias:
        specs += [bias(f"{name}.bq", q_width), bias(f"{name}.bkv", 2 * kv_width)]
    if config.attn_bias:
        specs.append(bias(f"{name}.bo", config.d_model))
    return specs


def ffn_specs(config: Config, name: str, residual_std: float) -> list[ParamSpec]:
    """Return the specs of a feed-forward."""
    parts = (config.d_ff, config.d_ff) if config.gated else (config.d_ff,)
    w_in, b_in = ("w_gate_up", "b_gate_up") if config.gated else ("w_up", "b_up")
    specs = [
        matrix(f"{name}.{w_in}", config.d_model, *parts),
        matrix(f"{name}.w_down", config.d_ff, config.d_model, std=residual_std),
    ]
    if config.ffn_bias:
        specs += [bias(f"{name}.{b_in}", sum(parts)), bias(f"{name}.b_down", config.d_model)]
    return specs


def block_specs(
    config: Config, name: str, residual_std: float, *, cross: bool = False
) -> list[ParamSpec]:
    """Return the specs of one block; with ``cross`` it attends to a memory as well."""
    specs = norm_specs(config, f"{name}.attention_norm")
    specs += attention_specs(config, f"{name}.attention", residual_std)
    if cross:
        specs += norm_specs(config, f"{name}.cross_norm")
        specs += cross_attention_specs(config, f"{name}.cross", residual_std)
    specs += norm_specs(config, f"{name}.ffn_norm")
    specs += ffn_specs(config, f"{name}.ffn", residual_std)
    return specs


def embedding_specs(config: Config) -> list[ParamSpec]:
    """Return the specs of the table of tokens and, when positions are learned, theirs."""
    specs = [weight("embedding.weight", (config.vocab_size, config.d_model))]
    if config.position == "learned":
        specs.append(weight("position.weight", (config.context_length, config.d_model)))
    return specs


def head_specs(config: Config) -> list[ParamSpec]:
    """Return the specs of the head: a table of its own unless tied, and its bias if it has one."""
    specs = []
    if not config.tied:
        specs.append(weight("head.weight", (config.vocab_size, config.d_model)))
    if config.head_bias:
        specs.append(bias("head.bias", config.vocab_size))
    return specs


def decoder_specs(config: Config) -> list[ParamSpec]:
    """Return the specs of a decoder-only model, in the order of the forward pass."""
    residual_std = INIT_STD / math.sqrt(2 * config.n_layers)
    specs = embedding_specs(config)
    for layer in range(config.n_layers):
        specs += block_specs(config, f"layers.{layer}", residual_std)
    if config.norm_placement == "pre":
        specs += norm_specs(config, "final_norm")
    return specs + head_specs(config)


class Layout:
    """Where each parameter lies in the flat buffer: decayed ones first, else in the given order.

    Attributes
    ----------
    offsets : dict
        Name -> (first element, spec), in the order of the buffer.
    size : int
        Elements in the buffer: the number of parameters of the model.
    n_decayed : int
        The first ``n_decayed`` elements are those that weight decay applies to.
    """

    def __init__(self, specs: Iterable[ParamSpec]) -> None:
        specs = list(specs)
        ordered = [s for s in specs if s.decays] + [s for s in specs if not s.decays]
        self.offsets: dict[str, tuple[int, ParamSpec]] = {}
        self.size = 0
        for spec in ordered:
            if spec.name in self.offsets:
                raise ValueError(f"two parameters are called {spec.name!r}")
            self.offsets[spec.name] = (self.size, spec)
            self.size += spec.size
        self.n_decayed = sum(spec.size for spec in ordered if spec.decays)

    def views(self, flat: Array) -> dict[str, Array]:
        """Return the parameters as named views into ``flat``, an array of shape ``(size,)``.

        Raises
        ------
        ValueError
            When ``flat`` is not one contiguous axis of ``size`` elements.
        """
        if flat.shape != (self.size,) or not flat.flags.c_contiguous:
            raise ValueError(
                f"the flat buffer must be contiguous with shape ({self.size},), got {flat.shape}"
                f"{'' if flat.flags.c_contiguous else ', not contiguous'}"
            )
        return {
            name: flat[start : start + spec.size].reshape(spec.shape)
            for name, (start, spec) in self.offsets.items()
        }

    def init(self, seed: int, dtype: npt.DTypeLike = np.float32) -> Array:
        """Return a new flat buffer with the initial parameters, shape ``(size,)``.

        Each parameter draws from a stream of its own, keyed by the seed and its name, so a weight
        does not change when another layer is added, and is the same for every backend.
        """
        dtype = np.dtype(dtype)
        if dtype not in (np.float32, np.float64):
            raise ValueError(f"parameters are float32 or float64, not {dtype}")
        flat = np.empty(self.size, dtype)
        for name, view in self.views(flat).items():
            view[...] = self.draw(name, seed)
        return flat

    def draw(self, name: str, seed: int) -> Array:
        """Return the initial values of one parameter, float32."""
        spec = self.offsets[name][1]
        if not spec.std:
            return np.full(spec.shape, spec.mean, np.float32)
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        values = rng.standard_normal(spec.shape, dtype=np.float32)
        values *= np.float32(spec.std)
        return values


@lru_cache(16)  # each step of a model asks for its own
def decoder_layout(config: Config) -> Layout:
    """Return the layout of a decoder-only model."""
    return Layout(decoder_specs(config))


def check_names(params: Collection[str], layout: Layout, what: str = "the parameters") -> None:
    """Raise a ``ValueError`` that names what is missing or unknown in a set of parameter names."""
    missing = [name for name in layout.offsets if name not in params]
    unknown = [name for name in params if name not in layout.offsets]
    if missing or unknown:
        raise ValueError(
            f"{what} do not fit the config: "
            + "; ".join(
                f"{wrong} {', '.join(names[:4])}{' …' if len(names) > 4 else ''}"
                for wrong, names in (("missing", missing), ("unknown", unknown))
                if names
            )
        )
