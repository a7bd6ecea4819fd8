"""Every preset family beside a plain PyTorch model: logits, loss and every gradient in float64."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from reference import encoder_decoder as seq2seq
from reference import model, ops
from reference.config import Config
from reference.params import Layout, decoder_layout
from reference.presets import MYLLM_1B
from reference.types import Array
from tests.helpers.models import MODELS, encoder_decoder, toy
from tests.helpers.torch_models import Decoder, EncoderDecoder
from tests.helpers.torch_weights import copy_in, gradients

torch = pytest.importorskip("torch", reason="needs the optional extra: pip install -e '.[peers]'")
F = torch.nn.functional

TOLERANCE = 1e-9  # of the norm: what float64 leaves after some thousand sums in another order

FAMILIES: dict[str, Config] = MODELS | {
    "multi_query": toy(MYLLM_1B, n_kv_heads=1),
    "groups_of_three": toy(MYLLM_1B, n_heads=6, n_kv_heads=2),
    "alibi_six_heads": toy(MYLLM_1B, position="alibi", n_heads=6, n_kv_heads=3),
    "all_biases": toy(MYLLM_1B, attn_bias=True, ffn_bias=True, head_bias=True, tied=False),
}
ENCODER_DECODERS = {
    "original": encoder_decoder(d_head=4),
    "all_biases_untied": encoder_decoder(d_head=4, attn_bias=True, head_bias=True, tied=False),
    "pre_norm_learned": encoder_decoder(
        d_head=4, norm_placement="pre", position="learned", ffn="gelu", attn_bias=True
    ),
}


class Batch(NamedTuple):
    ids: Array  # (B, T)
    targets: Array  # (B, T), -100 where they do not count
    mask: Array | None  # (B, T)
    documents: Array | None  # (B, T)


def batch(config: Config, seed: int, *, masked: bool, packed: bool = False) -> Batch:
    rng = np.random.default_rng(seed)
    B, T = 3, 11
    ids, targets = rng.integers(0, config.vocab_size, (2, B, T)).astype(np.int32)
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


def peer_loss(z: Any, targets: Array) -> Any:
    """Return PyTorch's summed cross-entropy of logits (B, T, V)."""
    flat = torch.from_numpy(targets).long().flatten()
    return F.cross_entropy(z.flatten(0, 1), flat, reduction="sum")


def assert_same(ours: Array, theirs: Array, what: str) -> None:
    error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    assert error <= TOLERANCE, f"{what}: relative error {error:.1e}"


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("packed", [False, True], ids=["one_document", "packed"])
@pytest.mark.parametrize("masked", [False, True], ids=["all_targets", "masked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_matches_pytorch(family: str, masked: bool, packed: bool) -> None:
    config = FAMILIES[family]
    data = batch(config, seed=1, masked=masked, packed=packed)
    layout = decoder_layout(config)
    params = layout.views(random_parameters(layout, seed=2))
    grads = layout.views(np.full(layout.size, np.nan))

    z = model.logits(ops, params, config, data.ids, data.documents)
    loss, cache = model.loss_forward(
        ops, params, config, data.ids, data.targets, data.mask, data.documents
    )
    model.loss_backward(0.37, cache, grads)

    peer = Decoder(config)
    copy_in(peer.slots(), params)
    documents = None if data.documents is None else torch.from_numpy(data.documents)
    their_z = peer(torch.from_numpy(data.ids).long(), documents)
    their_loss = peer_loss(their_z, data.targets)
    (0.37 * their_loss).backward()

    assert_same(z, their_z.detach().numpy(), "logits")
    assert_same(np.asarray(loss.total), their_loss.detach().numpy(), "loss")
    assert loss.n_valid == np.count_nonzero(data.targets >= 0)
    for name, theirs in gradients(peer.slots()).items():
        assert_same(grads[name], theirs, name)


@pytest.mark.parametrize("padded", [False, True], ids=["whole_source", "padded"])
@pytest.mark.parametrize("masked", [False, True], ids=["all_targets", "masked"])
@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_encoder_decoder_matches_pytorch(family: str, masked: bool, padded: bool) -> None:
    config = ENCODER_DECODERS[family]
    data = batch(config, seed=1, masked=masked)
    rng = np.random.default_rng(3)
    source = rng.integers(0, config.vocab_size, (len(data.ids), 7)).astype(np.int32)
    source_mask = np.arange(7) < np.array([[7], [1], [4]]) if padded else None
    layout = seq2seq.encoder_decoder_layout(config)
    params = layout.views(random_parameters(layout, seed=2))
    grads = layout.views(np.full(layout.size, np.nan))

    z = seq2seq.logits(ops, params, config, source, data.ids, source_mask)
    loss, cache = seq2seq.loss_forward(
        ops, params, config, source, data.ids, data.targets, source_mask, data.mask
    )
    seq2seq.loss_backward(0.37, cache, grads)

    peer = EncoderDecoder(config)
    copy_in(peer.slots(), params)
    their_z = peer(
        torch.from_numpy(source).long(),
        torch.from_numpy(data.ids).long(),
        None if source_mask is None else torch.from_numpy(source_mask),
    )
    their_loss = peer_loss(their_z, data.targets)
    (0.37 * their_loss).backward()

    assert_same(z, their_z.detach().numpy(), "logits")
    assert_same(np.asarray(loss.total), their_loss.detach().numpy(), "loss")
    for name, theirs in gradients(peer.slots()).items():
        assert_same(grads[name], theirs, name)


def test_an_error_of_one_part_in_a_million_is_seen() -> None:
    with pytest.raises(AssertionError, match=r"wo: relative error 1\.0e-06"):
        assert_same(np.ones(3) * (1 + 1e-6), np.ones(3), "wo")
