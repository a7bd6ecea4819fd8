"""Every preset family beside a plain PyTorch model: logits, loss and every gradient in float64."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from reference import ops
from reference.model import logits, loss_backward, loss_forward
from reference.params import Layout, decoder_layout
from reference.presets import GPT2_SMALL, GPT2_TEXTBOOK, MYLLM_1B, ORIGINAL_DECODER
from reference.types import Array
from tests.peers.torch_models import Decoder
from tests.peers.weights import copy_in, gradients

torch = pytest.importorskip("torch", reason="needs the optional extra: pip install -e '.[peers]'")
F = torch.nn.functional

TOLERANCE = 1e-9  # of the norm: what float64 leaves after some thousand sums in another order

TOY: dict[str, Any] = {
    "vocab_size": 37,
    "d_model": 20,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 4,
    "d_head": 6,
    "d_ff": 23,
    "context_length": 16,
}
FAMILIES = {
    "myllm": replace(MYLLM_1B, **TOY | {"n_heads": 6, "n_kv_heads": 2}),
    "gpt2_small": replace(GPT2_SMALL, **TOY),
    "gpt2_textbook": replace(GPT2_TEXTBOOK, **TOY),
    "original_decoder": replace(ORIGINAL_DECODER, **TOY),
    "original_decoder, biased head": replace(ORIGINAL_DECODER, **TOY, head_bias=True),
    "multi-query": replace(MYLLM_1B, **TOY | {"n_kv_heads": 1}),
    "alibi": replace(MYLLM_1B, **TOY, position="alibi"),
    "alibi, six heads": replace(
        MYLLM_1B, **TOY | {"n_heads": 6, "n_kv_heads": 3}, position="alibi"
    ),
    "no positions, all biases": replace(
        MYLLM_1B, **TOY, position="none", attn_bias=True, ffn_bias=True, head_bias=True, tied=False
    ),
}


class Batch(NamedTuple):
    ids: Array  # (B, T)
    targets: Array  # (B, T), -100 where they do not count
    mask: Array | None  # (B, T)
    documents: Array | None  # (B, T)


def batch(seed: int, *, masked: bool, packed: bool, B: int = 3, T: int = 13) -> Batch:
    rng = np.random.default_rng(seed)
    ids, targets = rng.integers(0, TOY["vocab_size"], (2, B, T)).astype(np.int32)
    mask = documents = None
    if masked:
        mask = rng.random((B, T)) < 0.6
        mask[0] = False  # one row counts for nothing
        targets[~mask] = -100  # PyTorch's word for it; we must not read what is masked
    if packed:
        documents = np.cumsum(rng.random((B, T)) < 0.3, axis=1).astype(np.int32)
    return Batch(ids, targets, mask, documents)


def random_parameters(layout: Layout, seed: int) -> Array:
    """Return parameters that nothing is zero or one in, so that no term of a gradient hides."""
    noise = np.random.default_rng(seed).standard_normal(layout.size)
    return layout.init(seed, dtype=np.float64) + 0.2 * noise


def relative(ours: Array, theirs: Array) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@pytest.fixture
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("masked", [False, True], ids=["all targets", "masked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_matches_pytorch(family: str, masked: bool, packed: bool) -> None:
    config = FAMILIES[family]
    data = batch(seed=1, masked=masked, packed=packed)
    layout = decoder_layout(config)
    flat, grad = random_parameters(layout, seed=2), np.full(layout.size, np.nan)
    params, grads = layout.views(flat), layout.views(grad)

    z = logits(ops, params, config, data.ids, data.documents)
    loss, cache = loss_forward(
        ops, params, config, data.ids, data.targets, data.mask, data.documents
    )
    loss_backward(0.37, cache, grads)

    peer = Decoder(config)
    copy_in(peer.slots(), params)
    documents = None if data.documents is None else torch.from_numpy(data.documents)
    peer_z = peer(torch.from_numpy(data.ids).long(), documents)
    peer_loss = F.cross_entropy(
        peer_z.flatten(0, 1), torch.from_numpy(data.targets).long().flatten(), reduction="sum"
    )
    (0.37 * peer_loss).backward()

    assert relative(z, peer_z.detach().numpy()) <= TOLERANCE
    assert loss.total == pytest.approx(peer_loss.item(), rel=TOLERANCE)
    assert loss.n_valid == np.count_nonzero(data.targets >= 0)
    for name, theirs in gradients(peer.slots()).items():
        assert relative(grads[name], theirs) <= TOLERANCE, name
