"""The family: published models and small ones, as configs of the same parts."""

from dataclasses import replace

from reference.config import Config

MYLLM_1B = Config(
    vocab_size=65_536,
    d_model=1_792,
    n_layers=28,
    n_heads=14,
    n_kv_heads=2,
    d_head=128,
    d_ff=4_864,
    context_length=8_192,
)

# As OpenAI released it: biases everywhere but the head, LayerNorm, the tanh form of GELU.
GPT2_SMALL = Config(
    vocab_size=50_257,
    d_model=768,
    n_layers=12,
    n_heads=12,
    n_kv_heads=12,
    d_head=64,
    d_ff=3_072,
    context_length=1_024,
    norm="layernorm",
    position="learned",
    ffn="gelu_tanh",
    attn_bias=True,
    ffn_bias=True,
)

# As textbooks draw it: exact GELU and no biases in the linear layers. Its weights alone are
# 12·d²·blocks + V·d + T·d = 124,318,464, since a block has 4·d² in attention and 8·d² in the
# feed-forward; the gains and shifts of 25 LayerNorms (two a block and the last) are 38,400 more.
GPT2_TEXTBOOK = replace(GPT2_SMALL, ffn="gelu", attn_bias=False, ffn_bias=False)

# The decoder stack of Vaswani et al. 2017 (base) on its own: norms after the residual, sinusoidal
# positions, biases in the feed-forward only. head_bias=True is the variant with a biased head.
ORIGINAL_DECODER = Config(
    vocab_size=37_000,
    d_model=512,
    n_layers=6,
    n_heads=8,
    n_kv_heads=8,
    d_head=64,
    d_ff=2_048,
    context_length=1_024,
    norm="layernorm",
    norm_placement="post",
    position="sinusoidal",
    ffn="relu",
    ffn_bias=True,
    tied=False,
    dropout_embedding=0.1,
    dropout_residual=0.1,
)

# MyLLM's architecture, as small as tests want it.
TINY = Config(
    vocab_size=61,
    d_model=16,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    d_head=6,
    d_ff=20,
    context_length=24,
)
