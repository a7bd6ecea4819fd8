"""RoPE by rotary-embedding-torch; ``PUBLIC.md`` has what was found.

pip install torch==2.13.0 rotary-embedding-torch
myllm verify --like accel/verify/examples/public_plain.py \
        --module accel/verify/examples/public_rotary_embedding_torch.py
"""

import torch
from rotary_embedding_torch import RotaryEmbedding


def rope(x: torch.Tensor, base: float) -> torch.Tensor:
    turn = RotaryEmbedding(x.shape[-1], theta=base, seq_before_head_dim=True)
    return turn.rotate_queries_or_keys(x)
