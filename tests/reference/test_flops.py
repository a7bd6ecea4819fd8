"""The operations of a model, by arithmetic, against counting."""

import dataclasses
from typing import Any

import pytest

from reference.flops import forward_flops, keys_seen, training_flops
from reference.params import decoder_layout
from reference.presets import GPT2_SMALL, MYLLM_1B, TINY


def test_training_counts_parameters_that_multiply_and_attention() -> None:
    full, causal = (training_flops(MYLLM_1B, 8_192, causal=causal) for causal in (False, True))
    attention = 12 * 28 * 8_192 * 14 * 128
    assert full - causal == attention / 2
    assert full - attention == 6 * decoder_layout(MYLLM_1B).n_decayed
    assert causal == pytest.approx(8.80e9, rel=0.005)  # of the design


@pytest.mark.parametrize("changes", [{}, {"tied": False}, {"ffn": "swiglu"}, {"n_kv_heads": 3}])
def test_a_lookup_multiplies_nothing_and_a_matrix_once(changes: dict[str, Any]) -> None:
    config = dataclasses.replace(GPT2_SMALL, **changes)
    matrices = {
        name: spec.size for name, (_, spec) in decoder_layout(config).offsets.items() if spec.decays
    }
    del matrices["position.weight"]
    if not config.tied:
        del matrices["embedding.weight"]
    parts = forward_flops(config, 100, causal=False)
    assert sum(parts.values()) - parts["attention"] == 2 * sum(matrices.values())


@pytest.mark.parametrize(("T", "window"), [(64, 0), (64, 1), (64, 10), (64, 64), (64, 100)])
def test_keys_seen_are_those_of_the_mask(T: int, window: int) -> None:
    seen = [min(t + 1, window or T) for t in range(T)]
    # the diagonal counts half: sums of t + 1 are T²/2, as everybody writes them
    assert keys_seen(T, causal=True, window=window) == pytest.approx(sum(seen) / T, abs=0.5)
    assert keys_seen(T, causal=False, window=window) == max(seen)


def test_a_window_wider_than_the_context_changes_nothing() -> None:
    assert keys_seen(64, causal=True, window=64) == keys_seen(64, causal=True) == 32
    assert training_flops(TINY, 8, causal=True) < training_flops(TINY, 8, causal=False)
