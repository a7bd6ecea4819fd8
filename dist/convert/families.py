"""The families of models that others know, each declared once, for both directions.

Hugging Face's names are those of ``transformers``: the classes in ``models/llama``, ``mistral``,
``qwen2``,
``qwen3`` and ``gpt2``. GGUF's are those of llama.cpp: ``gguf-py/gguf/constants.py`` and
``src/llama-arch.cpp``. llm.c's arrays are in the order of its ``ParameterTensors``.
"""

import itertools
import re
from collections.abc import Mapping
from typing import Any

from dist.convert import rope
from dist.convert.mapping import Family, Key, Row, shown
from reference.config import Config

REQUIRED = object()


def key(ours: str, theirs: str, default: Any = REQUIRED, **names: str | tuple[str, ...]) -> Key:
    """Return a field that is one key of theirs.

    Parameters
    ----------
    ours, theirs : str
    default
        What an absent key or ``null`` means; a function of the configuration computes it.
    **names
        Values of ours -> what theirs are called, where that differs; of several the first is
        written.
    """
    called = {value: (name,) if isinstance(name, str) else name for value, name in names.items()}

    def read(found: Mapping[str, Any]) -> Any:
        value = found.get(theirs)
        if value is None and default is REQUIRED:
            raise ValueError(f"{theirs} is missing")
        if value is None:
            return default(found) if callable(default) else default
        if not names:
            return value
        for our_name, their_names in called.items():
            if value in their_names:
                return our_name
        known = ", ".join(itertools.chain(*called.values()))
        raise ValueError(f"{theirs} must be one of {known}, got {shown(value)}")

    def write(config: Config) -> dict[str, Any]:
        value = getattr(config, ours)
        return {theirs: called[value][0] if value in called else value}

    return Key(ours, theirs, read, write)


def whole(found: Mapping[str, Any], name: str) -> int:
    """Return a positive integer of a configuration, for arithmetic."""
    value = found.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {shown(value)}")
    return value


# ---- Hugging Face: RMSNorm, RoPE, SwiGLU ---------------------------------------------------------


def _write_llama_heads(config: Config) -> dict[str, Any]:
    if config.d_model % config.n_heads:  # LlamaConfig refuses it, Mistral's does not
        raise ValueError(f"n_heads = {config.n_heads} (it must divide d_model = {config.d_model})")
    return {"num_attention_heads": config.n_heads}


def _no_window(config: Config, layer: int) -> bool:
    return config.window_of(layer) % config.context_length == 0


def _read_mistral_window(found: Mapping[str, Any]) -> Any:
    return found.get("sliding_window", 4096) or 0  # of none, transformers takes 4096; null: none


def _write_mistral_window(config: Config) -> dict[str, Any]:
    return {"sliding_window": None if _no_window(config, 0) else config.window_of(0)}


def _write_qwen_windows(config: Config) -> dict[str, Any]:
    layers = range(config.n_layers)
    windows = [config.window_of(i) for i in layers if not _no_window(config, i)]
    kinds = ["full_attention" if _no_window(config, i) else "sliding_attention" for i in layers]
    return {
        "use_sliding_window": bool(windows),
        "sliding_window": windows[0] if windows else None,
        "max_window_layers": next((i for i in layers if not _no_window(config, i)), len(layers)),
        "layer_types": kinds,
    }


def _read_qwen_windows(found: Mapping[str, Any]) -> Any:
    if not found.get("use_sliding_window"):
        return 0
    window, kinds = whole(found, "sliding_window"), found.get("layer_types")
    n_layers = whole(found, "num_hidden_layers")
    if kinds is None:  # layers from this one on have the window
        first = found.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise ValueError(f"max_window_layers must be an integer, got {shown(first)}")
        first = min(max(first, 0), n_layers)
        return [0] * first + [window] * (n_layers - first)
    known = {"full_attention": 0, "sliding_attention": window}
    if not isinstance(kinds, list) or not all(isinstance(k, str) and k in known for k in kinds):
        raise ValueError(f"layer_types must be a list of {' and '.join(known)}")
    return [known[kind] for kind in kinds]


_LLAMA_KEYS = (
    key("vocab_size", "vocab_size"),
    key("d_model", "hidden_size"),
    key("n_layers", "num_hidden_layers"),
    key("n_heads", "num_attention_heads"),
    key("n_kv_heads", "num_key_value_heads", lambda c: whole(c, "num_attention_heads")),
    key("d_head", "head_dim", lambda c: whole(c, "hidden_size") // whole(c, "num_attention_heads")),
    key("d_ff", "intermediate_size"),
    key("context_length", "max_position_embeddings"),
    key("norm_eps", "rms_norm_eps"),
    *rope.HUGGING_FACE_KEYS,
    key("tied", "tie_word_embeddings", False),
    key("dropout_attention", "attention_dropout", 0.0),
)
_LLAMA_ALWAYS = {
    "norm": "rmsnorm",
    "norm_placement": "pre",
    "position": "rope",
    "ffn": "swiglu",
    "attn_bias": False,
    "qkv_bias": False,
    "ffn_bias": False,
    "head_bias": False,
    "qk_norm": False,
    "window": 0,
}
_LLAMA_DEMANDS = {
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "quantization_config": None,
}
_LLAMA_ROWS = (
    Row("embedding.weight", ("model.embed_tokens.weight",)),
    Row("layers.{}.attention_norm.gain", ("model.layers.{}.input_layernorm.weight",)),
    Row(
        "layers.{}.attention.wqkv",
        tuple(f"model.layers.{{}}.self_attn.{x}_proj.weight" for x in "qkv"),
        transposed=True,
        turned=2,
    ),
    Row(
        "layers.{}.attention.bqkv",
        tuple(f"model.layers.{{}}.self_attn.{x}_proj.bias" for x in "qkv"),
        turned=2,
    ),
    Row("layers.{}.attention.q_norm.gain", ("model.layers.{}.self_attn.q_norm.weight",), turned=1),
    Row("layers.{}.attention.k_norm.gain", ("model.layers.{}.self_attn.k_norm.weight",), turned=1),
    Row("layers.{}.attention.wo", ("model.layers.{}.self_attn.o_proj.weight",), transposed=True),
    Row("layers.{}.attention.bo", ("model.layers.{}.self_attn.o_proj.bias",)),
    Row("layers.{}.ffn_norm.gain", ("model.layers.{}.post_attention_layernorm.weight",)),
    Row(
        "layers.{}.ffn.w_gate_up",
        ("model.layers.{}.mlp.gate_proj.weight", "model.layers.{}.mlp.up_proj.weight"),
        transposed=True,
    ),
    Row(
        "layers.{}.ffn.b_gate_up",
        ("model.layers.{}.mlp.gate_proj.bias", "model.layers.{}.mlp.up_proj.bias"),
    ),
    Row("layers.{}.ffn.w_down", ("model.layers.{}.mlp.down_proj.weight",), transposed=True),
    Row("layers.{}.ffn.b_down", ("model.layers.{}.mlp.down_proj.bias",)),
    Row("final_norm.gain", ("model.norm.weight",)),
    Row("head.weight", ("lm_head.weight",)),
)
_LLAMA_IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


def _without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in _LLAMA_ALWAYS.items() if name not in names}


def _like_llama(
    name: str, model_type: str, always: dict[str, Any], keys: tuple[Key, ...], **demands: Any
) -> Family:
    """Return a family with Llama's tensors and most of its keys, and ``keys`` beside them."""
    return Family(
        name=name,
        says={"architectures": [name], "model_type": model_type, "hidden_act": "silu"},
        always=always,
        keys=(*_LLAMA_KEYS, *keys),
        rows=_LLAMA_ROWS,
        demands={**_LLAMA_DEMANDS, **demands},
        ignored=_LLAMA_IGNORED,
    )


_ATTENTION_BIAS = key("attn_bias", "attention_bias", False)
_QWEN_WINDOW = Key("window", "sliding_window", _read_qwen_windows, _write_qwen_windows)
LLAMA = _like_llama(
    "LlamaForCausalLM",
    "llama",
    _without("attn_bias", "ffn_bias"),
    (
        key("n_heads", "num_attention_heads")._replace(write=_write_llama_heads),
        _ATTENTION_BIAS,
        key("ffn_bias", "mlp_bias", False),
    ),
)
MISTRAL = _like_llama(
    "MistralForCausalLM",
    "mistral",
    _without("window"),
    (Key("window", "sliding_window", _read_mistral_window, _write_mistral_window),),
    attention_bias=False,
)
QWEN2 = _like_llama(
    "Qwen2ForCausalLM", "qwen2", {**_without("window"), "qkv_bias": True}, (_QWEN_WINDOW,)
)
QWEN3 = _like_llama(
    "Qwen3ForCausalLM",
    "qwen3",
    {**_without("window", "attn_bias"), "qk_norm": True},
    (_ATTENTION_BIAS, _QWEN_WINDOW),
)

# ---- Hugging Face: GPT-2 -------------------------------------------------------------------------

_GPT2_ALWAYS = {
    "norm": "layernorm",
    "norm_placement": "pre",
    "position": "learned",
    "attn_bias": True,
    "qkv_bias": False,
    "ffn_bias": True,
    "head_bias": False,
    "qk_norm": False,
    "window": 0,
}


def derived(ours: str, read: Any) -> Key:
    """Return a field that they compute from others."""
    return Key(ours, ours, read, lambda config: {})


def quotient(ours: str, theirs: str, by: str) -> Key:
    """Return a field that is one key of theirs divided by another."""
    found = derived(ours, lambda c: whole(c, theirs) // whole(c, by))
    return found._replace(theirs=f"{theirs} // {by}")


# one function to transformers, each written down anew
GELU_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "gelu_python_tanh")
GPT2 = Family(
    name="GPT2LMHeadModel",
    says={"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
    always=_GPT2_ALWAYS,
    keys=(
        key("vocab_size", "vocab_size"),
        key("d_model", "n_embd"),
        key("n_layers", "n_layer"),
        key("n_heads", "n_head"),
        derived("n_kv_heads", lambda c: whole(c, "n_head")),
        quotient("d_head", "n_embd", "n_head"),
        key("d_ff", "n_inner", lambda c: 4 * whole(c, "n_embd")),
        key("context_length", "n_positions"),
        key("norm_eps", "layer_norm_epsilon", 1e-5),
        key(
            *("ffn", "activation_function", "gelu_tanh"),
            gelu_tanh=GELU_TANH,
            gelu=("gelu", "gelu_python"),
            relu="relu",
        ),
        key("tied", "tie_word_embeddings", True),
        key("dropout_embedding", "embd_pdrop", 0.1),
        key("dropout_attention", "attn_pdrop", 0.1),
        key("dropout_residual", "resid_pdrop", 0.1),
    ),
    # GPT-2's Conv1D keeps (in, out), as we do, and q, k, v side by side
    rows=(
        Row("embedding.weight", ("transformer.wte.weight",)),
        Row("position.weight", ("transformer.wpe.weight",)),
        Row("layers.{}.attention_norm.gain", ("transformer.h.{}.ln_1.weight",)),
        Row("layers.{}.attention_norm.bias", ("transformer.h.{}.ln_1.bias",)),
        Row("layers.{}.attention.wqkv", ("transformer.h.{}.attn.c_attn.weight",)),
        Row("layers.{}.attention.bqkv", ("transformer.h.{}.attn.c_attn.bias",)),
        Row("layers.{}.attention.wo", ("transformer.h.{}.attn.c_proj.weight",)),
        Row("layers.{}.attention.bo", ("transformer.h.{}.attn.c_proj.bias",)),
        Row("layers.{}.ffn_norm.gain", ("transformer.h.{}.ln_2.weight",)),
        Row("layers.{}.ffn_norm.bias", ("transformer.h.{}.ln_2.bias",)),
        Row("layers.{}.ffn.w_up", ("transformer.h.{}.mlp.c_fc.weight",)),
        Row("layers.{}.ffn.b_up", ("transformer.h.{}.mlp.c_fc.bias",)),
        Row("layers.{}.ffn.w_down", ("transformer.h.{}.mlp.c_proj.weight",)),
        Row("layers.{}.ffn.b_down", ("transformer.h.{}.mlp.c_proj.bias",)),
        Row("final_norm.gain", ("transformer.ln_f.weight",)),
        Row("final_norm.bias", ("transformer.ln_f.bias",)),
        Row("head.weight", ("lm_head.weight",)),
    ),
    demands={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "quantization_config": None,
    },
    # the causal masks that older files hold
    ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
    prefix="transformer.",
)

HUGGING_FACE = (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2)

# ---- GGUF ----------------------------------------------------------------------------------------


def _gguf_keys(arch: str, eps: str) -> tuple[Key, ...]:
    """Return what all architectures call alike; ``tied`` is said by having a head or not."""
    return (
        key("vocab_size", f"{arch}.vocab_size"),
        key("context_length", f"{arch}.context_length"),
        key("d_model", f"{arch}.embedding_length"),
        key("n_layers", f"{arch}.block_count"),
        key("d_ff", f"{arch}.feed_forward_length"),
        key("n_heads", f"{arch}.attention.head_count"),
        key("norm_eps", f"{arch}.attention.{eps}"),
        key("tied", "tied"),
    )


def _gguf_rope_keys(arch: str) -> tuple[Key, ...]:
    heads = f"{arch}.attention.head_count"
    widths = [f"{arch}.{name}" for name in ("attention.value_length", "rope.dimension_count")]
    base = key("rope_base", f"{arch}.rope.freq_base", 10_000.0)
    scales = [f"{arch}.{name}" for name in ("rope.scaling.factor", "rope.scale_linear")]

    def read_head(found: Mapping[str, Any]) -> Any:
        width = found.get(f"{arch}.attention.key_length")
        if width is None:
            width = whole(found, f"{arch}.embedding_length") // whole(found, heads)
        for name in widths:
            if found.get(name, width) != width:
                raise ValueError(
                    f"{name} must be the width of keys, {width}, got {shown(found[name])}"
                )
        return width

    def read_base(found: Mapping[str, Any]) -> Any:
        # llama.cpp takes the first that is there, 0 for none, and "linear" where no type is said
        name = next((name for name in scales if found.get(name) is not None), None)
        if name and found[name] not in (0, 1) and found.get(f"{arch}.rope.scaling.type") is None:
            raise ValueError(f"{name} = {shown(found[name])} scales RoPE, which is not known here")
        return base.read(found)

    def write_head(config: Config) -> dict[str, Any]:
        return dict.fromkeys([f"{arch}.attention.key_length", *widths], config.d_head)

    return (
        *_gguf_keys(arch, "layer_norm_rms_epsilon"),
        key("n_kv_heads", f"{arch}.attention.head_count_kv", lambda c: whole(c, heads)),
        Key("d_head", f"{arch}.attention.key_length", read_head, write_head),
        base._replace(read=read_base),
    )


_GPT2_HEAD = quotient("d_head", "gpt2.embedding_length", "gpt2.attention.head_count")


def _write_gpt2_head(config: Config) -> dict[str, Any]:
    names = ("gpt2.attention.key_length", "gpt2.attention.value_length")
    return dict.fromkeys(names, config.d_head)


def _gguf_demands(arch: str) -> dict[str, Any]:
    return {
        f"{arch}.attention.sliding_window": None,
        f"{arch}.rope.scaling.type": "none",
        f"{arch}.rope.scaling.attn_factor": 1.0,
        f"{arch}.expert_count": 0,
        f"{arch}.attention.scale": None,
    }


_GGUF_ROWS = (
    Row("embedding.weight", ("token_embd.weight",)),
    Row("layers.{}.attention_norm.gain", ("blk.{}.attn_norm.weight",)),
    Row(
        "layers.{}.attention.wqkv",
        ("blk.{}.attn_q.weight", "blk.{}.attn_k.weight", "blk.{}.attn_v.weight"),
        transposed=True,
        turned=2,
    ),
    Row(
        "layers.{}.attention.bqkv",
        ("blk.{}.attn_q.bias", "blk.{}.attn_k.bias", "blk.{}.attn_v.bias"),
        turned=2,
    ),
    Row("layers.{}.attention.q_norm.gain", ("blk.{}.attn_q_norm.weight",), turned=1),
    Row("layers.{}.attention.k_norm.gain", ("blk.{}.attn_k_norm.weight",), turned=1),
    Row("layers.{}.attention.wo", ("blk.{}.attn_output.weight",), transposed=True),
    Row("layers.{}.attention.bo", ("blk.{}.attn_output.bias",)),
    Row("layers.{}.ffn_norm.gain", ("blk.{}.ffn_norm.weight",)),
    Row(
        "layers.{}.ffn.w_gate_up",
        ("blk.{}.ffn_gate.weight", "blk.{}.ffn_up.weight"),
        transposed=True,
    ),
    Row("layers.{}.ffn.b_gate_up", ("blk.{}.ffn_gate.bias", "blk.{}.ffn_up.bias")),
    Row("layers.{}.ffn.w_down", ("blk.{}.ffn_down.weight",), transposed=True),
    Row("layers.{}.ffn.b_down", ("blk.{}.ffn_down.bias",)),
    Row("final_norm.gain", ("output_norm.weight",)),
    Row("head.weight", ("output.weight",)),
)
GGUF_LLAMA = Family(
    name="llama",
    says={"general.architecture": "llama"},
    always=_without("attn_bias", "qkv_bias", "ffn_bias"),
    keys=(
        *_gguf_rope_keys("llama"),
        *rope.GGUF_KEYS,
        *(key(name, name) for name in ("attn_bias", "qkv_bias", "ffn_bias")),
    ),
    rows=_GGUF_ROWS,
    half_split=False,  # llama.cpp turns adjacent coordinates in this architecture alone
    demands=_gguf_demands("llama"),
    ignored=(re.escape(rope.GGUF_TENSOR),),  # its keys say it
)
GGUF_QWEN2 = Family(
    name="qwen2",
    says={"general.architecture": "qwen2"},
    always={**_LLAMA_ALWAYS, "qkv_bias": True},
    keys=(
        *_gguf_rope_keys("qwen2"),  # llama.cpp wants the heads to add up to the width here
        quotient("d_head", "qwen2.embedding_length", "qwen2.attention.head_count"),
    ),
    rows=_GGUF_ROWS,
    demands=_gguf_demands("qwen2"),
)
GGUF_QWEN3 = Family(
    name="qwen3",
    says={"general.architecture": "qwen3"},
    always={**_LLAMA_ALWAYS, "qk_norm": True},
    keys=_gguf_rope_keys("qwen3"),
    rows=_GGUF_ROWS,
    demands=_gguf_demands("qwen3"),
)
GGUF_GPT2 = Family(
    name="gpt2",
    says={"general.architecture": "gpt2"},
    always={**_GPT2_ALWAYS, "ffn": "gelu_tanh"},
    keys=(
        *_gguf_keys("gpt2", "layer_norm_epsilon"),
        derived("n_kv_heads", lambda c: whole(c, "gpt2.attention.head_count")),
        _GPT2_HEAD._replace(write=_write_gpt2_head),
    ),
    rows=(
        Row("embedding.weight", ("token_embd.weight",)),
        Row("position.weight", ("position_embd.weight",)),
        Row("layers.{}.attention_norm.gain", ("blk.{}.attn_norm.weight",)),
        Row("layers.{}.attention_norm.bias", ("blk.{}.attn_norm.bias",)),
        Row("layers.{}.attention.wqkv", ("blk.{}.attn_qkv.weight",), transposed=True),
        Row("layers.{}.attention.bqkv", ("blk.{}.attn_qkv.bias",)),
        Row("layers.{}.attention.wo", ("blk.{}.attn_output.weight",), transposed=True),
        Row("layers.{}.attention.bo", ("blk.{}.attn_output.bias",)),
        Row("layers.{}.ffn_norm.gain", ("blk.{}.ffn_norm.weight",)),
        Row("layers.{}.ffn_norm.bias", ("blk.{}.ffn_norm.bias",)),
        Row("layers.{}.ffn.w_up", ("blk.{}.ffn_up.weight",), transposed=True),
        Row("layers.{}.ffn.b_up", ("blk.{}.ffn_up.bias",)),
        Row("layers.{}.ffn.w_down", ("blk.{}.ffn_down.weight",), transposed=True),
        Row("layers.{}.ffn.b_down", ("blk.{}.ffn_down.bias",)),
        Row("final_norm.gain", ("output_norm.weight",)),
        Row("final_norm.bias", ("output_norm.bias",)),
        Row("head.weight", ("output.weight",)),
    ),
    demands=_gguf_demands("gpt2"),
)

GGUF = (GGUF_QWEN2, GGUF_LLAMA, GGUF_QWEN3, GGUF_GPT2)

# ---- llm.c ---------------------------------------------------------------------------------------

# Its file has no names: an array for each row, all layers one after the other.
LLM_C = Family(
    name="llm.c's GPT-2",
    says={},
    always={
        **_GPT2_ALWAYS,
        "ffn": "gelu_tanh",
        "norm_eps": 1e-5,
        "tied": True,
    },
    keys=(
        key("context_length", "max_seq_len"),
        key("vocab_size", "vocab_size"),
        key("n_layers", "num_layers"),
        key("n_heads", "num_heads"),
        key("d_model", "channels"),
        derived("n_kv_heads", lambda c: whole(c, "num_heads")),
        quotient("d_head", "channels", "num_heads"),
        derived("d_ff", lambda c: 4 * whole(c, "channels")),
    ),
    rows=(
        Row("embedding.weight", ("wte",)),
        Row("position.weight", ("wpe",)),
        Row("layers.{}.attention_norm.gain", ("ln1w.{}",)),
        Row("layers.{}.attention_norm.bias", ("ln1b.{}",)),
        Row("layers.{}.attention.wqkv", ("qkvw.{}",), transposed=True),
        Row("layers.{}.attention.bqkv", ("qkvb.{}",)),
        Row("layers.{}.attention.wo", ("attprojw.{}",), transposed=True),
        Row("layers.{}.attention.bo", ("attprojb.{}",)),
        Row("layers.{}.ffn_norm.gain", ("ln2w.{}",)),
        Row("layers.{}.ffn_norm.bias", ("ln2b.{}",)),
        Row("layers.{}.ffn.w_up", ("fcw.{}",), transposed=True),
        Row("layers.{}.ffn.b_up", ("fcb.{}",)),
        Row("layers.{}.ffn.w_down", ("fcprojw.{}",), transposed=True),
        Row("layers.{}.ffn.b_down", ("fcprojb.{}",)),
        Row("final_norm.gain", ("lnfw",)),
        Row("final_norm.bias", ("lnfb",)),
    ),
)
