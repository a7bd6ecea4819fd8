"""What a model of the family is: one frozen record, refused when it contradicts itself.

The letters in the comments are those of ``reference/README.md``.
"""

import dataclasses
from typing import Any, Literal, get_args

Norm = Literal["rmsnorm", "layernorm"]
NormPlacement = Literal["pre", "post"]
Position = Literal["rope", "learned", "sinusoidal", "alibi", "none"]
FeedForward = Literal["swiglu", "gelu", "gelu_tanh", "relu"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "norm": get_args(Norm),
    "norm_placement": get_args(NormPlacement),
    "position": get_args(Position),
    "ffn": get_args(FeedForward),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The shape and the choices of a decoder-only language model.

    Raises
    ------
    ValueError
        When a field is out of range or two fields contradict each other; the message names them.
    """

    vocab_size: int  # V
    d_model: int  # D, width of the residual stream
    n_layers: int  # L
    n_heads: int  # Hq, query heads
    n_kv_heads: int  # Hkv, key and value heads: Hq is multi-head, 1 multi-query, between them GQA
    d_head: int  # d, width of a head
    d_ff: int  # F, hidden width of the feed-forward
    context_length: int  # the longest T
    rope_base: float = 500_000.0  # read when position is "rope"
    norm_eps: float = 1e-5  # ε, inside the root
    norm: Norm = "rmsnorm"
    norm_placement: NormPlacement = "pre"  # post has no final norm: the last block ends in one
    position: Position = "rope"
    ffn: FeedForward = "swiglu"
    attn_bias: bool = False  # on the projections into and out of attention
    ffn_bias: bool = False
    head_bias: bool = False
    qk_norm: bool = False  # RMSNorm of each head's query and key, before RoPE (Qwen3)
    window: int | tuple[int, ...] = 0  # keys a query sees, itself too; 0: all; or one a layer
    tied: bool = True  # the head is the embedding table
    dropout_embedding: float = 0.0  # rate p, after the embedding and its positions
    dropout_attention: float = 0.0  # on attention probabilities
    dropout_residual: float = 0.0  # on each branch before it joins the residual stream

    def __post_init__(self) -> None:
        if isinstance(self.window, list):  # as TOML and JSON write it
            object.__setattr__(self, "window", tuple(self.window))
        for field in dataclasses.fields(self):
            self._check_type(field.name, field.type)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                given = getattr(self, name)
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {given!r}")
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
        windows = self.window if isinstance(self.window, tuple) else (self.window,)
        if not all(isinstance(w, int) and not isinstance(w, bool) and w >= 0 for w in windows):
            raise ValueError(
                f"window must be an integer >= 0 (0: no limit) or one for each layer, "
                f"got {self.window!r}"
            )
        if isinstance(self.window, tuple) and len(windows) != self.n_layers:
            raise ValueError(
                f"window has {len(windows)} entries, but the model has n_layers = {self.n_layers}: "
                "give one number for all layers, or one for each"
            )

    def _check_type(self, name: str, annotation: Any) -> None:
        value = getattr(self, name)
        if annotation is int:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        elif annotation is bool:
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be true or false, got {value!r}")
        elif annotation is float:
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise ValueError(f"{name} must be a number, got {value!r}")
            if name.startswith("dropout"):
                if not 0 <= value < 1:
                    raise ValueError(f"{name} is a probability in [0, 1), got {value!r}")
            elif not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a positive number, got {value!r}")

    def window_of(self, layer: int) -> int:
        """Return the window of a layer's attention; 0: no limit."""
        return self.window[layer] if isinstance(self.window, tuple) else self.window

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
