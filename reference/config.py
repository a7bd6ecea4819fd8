"""What a model of the family is: one frozen record, refused when it contradicts itself.

The letters in the comments are those of ``reference/README.md``.
"""

import dataclasses
import sys
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from reference.types import RopeScaling

Norm = Literal["rmsnorm", "layernorm"]
NormPlacement = Literal["pre", "post"]
Position = Literal["rope", "learned", "sinusoidal", "alibi", "none"]
FeedForward = Literal["swiglu", "gelu", "gelu_tanh", "relu"]


class Range(NamedTuple):
    """The values of a field, the greatest included, and how they are called."""

    least: float
    most: float
    what: str


Count = Annotated[int, Range(1, 2**31 - 1, "a positive integer below 2^31")]  # as int32 holds
Width = Annotated[int, Range(1, 1 << 20, "a positive integer up to 2^20")]
DEEPEST = 10_000  # layers
Depth = Annotated[int, Range(1, DEEPEST, f"a positive integer up to {DEEPEST:,}")]
Rate = Annotated[float, Range(0, 1 - 2**-53, "a probability in [0, 1)")]
Factor = Annotated[float, Range(1, sys.float_info.max, "a number >= 1")]
Positive = Annotated[float, Range(sys.float_info.min, sys.float_info.max, "a positive number")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The shape and the choices of a decoder-only language model.

    Raises
    ------
    ValueError
        When a field is out of range or two fields contradict each other; the message names them.
    """

    vocab_size: Count  # V
    d_model: Width  # D, width of the residual stream
    n_layers: Depth  # L
    n_heads: Width  # Hq, query heads
    n_kv_heads: Width  # Hkv, key and value heads: Hq is multi-head, 1 multi-query, between them GQA
    d_head: Width  # d, width of a head
    d_ff: Width  # F, hidden width of the feed-forward
    context_length: Count  # the longest T
    rope_base: Positive = 500_000.0  # read when position is "rope"
    rope_factor: Factor = 1.0  # Llama 3's scaling: slow pairs turn this much more slowly; 1: none
    rope_low_freq_factor: Positive = 1.0  # turns in the original context up to which a pair is slow
    rope_high_freq_factor: Positive = 4.0  # turns from which on a pair keeps its frequency
    rope_original_context: Count = 8192  # tokens of the context before it was stretched
    norm_eps: Positive = 1e-5  # ε, inside the root
    norm: Norm = "rmsnorm"  # of the residual stream
    norm_placement: NormPlacement = "pre"  # post has no final norm: the last block ends in one
    position: Position = "rope"  # how a token's place is told
    ffn: FeedForward = "swiglu"  # its activation, which decides whether there is a gate
    attn_bias: bool = False  # on the projections into and out of attention
    qkv_bias: bool = False  # on those into attention alone (Qwen2)
    ffn_bias: bool = False  # on the projections of the feed-forward
    head_bias: bool = False  # on the logits
    qk_norm: bool = False  # RMSNorm of each head's query and key, before RoPE (Qwen3)
    window: int | tuple[int, ...] = 0  # keys a query sees, itself too; 0: all; or one a layer
    tied: bool = True  # the head is the embedding table
    dropout_embedding: Rate = 0.0  # p, after the embedding and its positions
    dropout_attention: Rate = 0.0  # on attention probabilities
    dropout_residual: Rate = 0.0  # on each branch before it joins the residual stream

    def __post_init__(self) -> None:
        if isinstance(self.window, list):  # as TOML and JSON write it
            object.__setattr__(self, "window", tuple(self.window))
        check_fields(self)
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.n_kv_heads}): "
                "each key/value head serves the same number of query heads"
            )
        if self.position == "rope" and self.d_head % 2:
            raise ValueError(
                f"position 'rope' rotates pairs of coordinates, so d_head must be even, "
                f"got {self.d_head}"
            )
        if self.position == "sinusoidal" and self.d_model % 2:
            raise ValueError(
                "position 'sinusoidal' pairs sines with cosines, so d_model must be even, "
                f"got {self.d_model}"
            )
        if self.rope_low_freq_factor >= self.rope_high_freq_factor:
            raise ValueError(
                f"rope_low_freq_factor ({self.rope_low_freq_factor}) must be below "
                f"rope_high_freq_factor ({self.rope_high_freq_factor}): between them the frequency "
                "goes over from one that is divided by rope_factor to one that is kept"
            )
        if self.attn_bias and self.qkv_bias:
            raise ValueError(
                "attn_bias and qkv_bias are both true: attn_bias has a bias on q, k and v already, "
                "so leave one of them out"
            )
        windows = self.window if isinstance(self.window, tuple) else (self.window,)
        for w in windows:
            if not isinstance(w, int) or isinstance(w, bool) or not 0 <= w < 2**31:
                raise ValueError(
                    f"window must be an integer >= 0 (0: no limit) and below 2^31, or one for each "
                    f"layer, got {self.window!r}"
                )
        if isinstance(self.window, tuple) and len(windows) != self.n_layers:
            raise ValueError(
                f"window has {len(windows)} entries, but the model has n_layers = {self.n_layers}: "
                "give one number for all layers, or one for each"
            )

    def window_of(self, layer: int) -> int:
        """Return the window of a layer's attention; 0: no limit."""
        return self.window[layer] if isinstance(self.window, tuple) else self.window

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate: then its first matrix holds that, then the up."""
        return self.ffn == "swiglu"

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """Llama 3's scaling of RoPE, if the model has it."""
        if self.position != "rope" or self.rope_factor == 1:
            return None
        low, high = float(self.rope_low_freq_factor), float(self.rope_high_freq_factor)
        original = float(self.rope_original_context)
        return RopeScaling(float(self.rope_factor), low, high, original)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, in order: what a checkpoint or TOML table holds."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Config":
        """Make a config from plain values; an unknown or missing field is named."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - set(known))
        if unknown:
            raise ValueError(f"unknown model field {unknown[0]!r}; known: {', '.join(known)}")
        required = [n for n, field in known.items() if field.default is dataclasses.MISSING]
        missing = [name for name in required if name not in fields]
        if missing:
            raise ValueError(f"the model needs {', '.join(missing)}")
        return cls(**fields)


def check_fields(record: Any) -> None:
    """Raise unless each value of a dataclass is what its field declares; the message names it."""
    for field in dataclasses.fields(record):
        _check(field.name, field.type, getattr(record, field.name))


def _check(name: str, declared: Any, value: object) -> None:
    if get_origin(declared) is Literal:
        if value not in get_args(declared):
            known = ", ".join(get_args(declared))
            raise ValueError(f"{name} must be one of {known}, got {value!r}")
    elif declared is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")
    elif declared is str:
        if not isinstance(value, str):
            raise ValueError(f"{name} must be a string, got {value!r}")
    elif get_origin(declared) is Annotated:
        kind, allowed = get_args(declared)
        right = not isinstance(value, bool) and isinstance(value, (int, kind))
        if not right or not allowed.least <= value <= allowed.most:
            raise ValueError(f"{name} must be {allowed.what}, got {value!r}")
