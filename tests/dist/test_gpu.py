"""What ``myllm plan`` says of a GPU's memory is what the launchers ask for."""

from typing import get_args

import numpy as np
import pytest

from accel.bench.predict import MODELS, recording
from accel.cuda import device as devices
from accel.cuda import ops, ops_bf16
from dist import cli, config, gpu, plan
from reference.blocks import Recompute
from reference.config import Config
from reference.model import loss_backward, loss_forward
from reference.params import decoder_layout
from reference.presets import GPT2_SMALL, MYLLM_1B
from reference.types import Array

GB = 10**9


def zeros(layout_size: int) -> Array:
    return devices.empty((layout_size,), np.float32)


@pytest.mark.parametrize("recompute", sorted({*get_args(Recompute)} - {"auto"}))
@pytest.mark.parametrize(
    ("model", "B"),
    [(MYLLM_1B, 1), (MYLLM_1B, 2), (MYLLM_1B, 4), (GPT2_SMALL, 1), (GPT2_SMALL, 16)],
)
def test_a_step_asks_for_as_much_as_is_planned(model: Config, B: int, recompute: Recompute) -> None:
    """The launchers of a whole step, with nothing behind them; the block is what it came to."""
    bf16 = model is MYLLM_1B
    module, layout = ops_bf16 if bf16 else ops, decoder_layout(model)
    tokens = B * model.context_length
    with recording(MODELS["H100"]) as device:
        params = module.parameters(layout.views(zeros(layout.size)))
        gradients = layout.views(zeros(layout.size))
        ids = devices.empty((B, model.context_length), np.int32)
        with module.step():
            _, cache = loss_forward(module, params, model, ids, ids, recompute=recompute)
            loss_backward(1.0, cache, gradients)
            del cache
    item = 2 if bf16 else 4
    kept = plan.activation_bytes(model, tokens, item)[recompute]
    planned = gpu.gpu_memory(0, model, kept, tokens, item)
    asked = device.arena.capacity
    # a block made again, or a small model's, is counted with a chunk of logits that it never meets
    most = 1.08 if model is MYLLM_1B and recompute != "block" else 1.27
    assert asked <= planned.total - planned.libraries <= most * asked


def test_the_headline_s_micro_batch_of_four_fits_where_it_is_said_to() -> None:
    run = config.load("myllm-1b")
    assert (run.train.micro_batch, run.train.global_batch) == (4, 32)
    eight, one = (plan.gpu_memory(run, ranks, "none").total for ranks in (8, 1))
    assert 68 * GB < eight < 70 * GB < 80 * GB < one < 86 * GB
    assert plan.gpu_memory(run, 1, "norms").total < 70 * GB
    n = 1_055_231_744
    m = plan.gpu_memory(run, 1, "none")
    assert m.states == (4 + 8 + 4 * 4 + 2) * n  # eight micro-batches: four buffers
    assert m.scratch == 65_536 * (4 * 1_792 + 2 * 4_096) + 32_768 * 2 * 3 * 1_792
    assert m.libraries == 2**26 + 2**30


@pytest.mark.parametrize(
    ("ranks", "level", "gigabytes", "most"),
    [(8, "none", 80, 4), (1, "none", 80, 2), (1, "norms", 80, 4), (1, "none", 141, 8),
     (1, "none", 24, 0), (1, "block", 40, 4), (8, "none", 24, 0), (32, "none", 80, 1)],
)  # fmt: skip
def test_the_largest_micro_batch(ranks: int, level: str, gigabytes: int, most: int) -> None:
    run = config.load("myllm-1b", [f"train.micro_batch={min(4, 32 // ranks)}"])
    assert plan.largest_micro_batch(run, ranks, level, gigabytes * GB) == most


def test_the_command_says_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "myllm-1b", "--ranks", "1"]) == 0
    said = capsys.readouterr().out
    assert "= 84.1 GB  fits 141 GB  (as set)" in said
    assert "80 GB holds       train.micro_batch up to 2 (none), 4 (norms), 32 (block)" in said
    assert cli.main(["plan", "laptop"]) == 0
    assert "GPU" not in capsys.readouterr().out
