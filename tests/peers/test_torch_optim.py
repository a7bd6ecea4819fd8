"""AdamW, Muon and the learning-rate schedule beside PyTorch's."""

from typing import Any

import numpy as np
import pytest

import accel
from reference.adamw import adamw
from reference.schedule import learning_rate
from tests.helpers import needs  # noqa: F401  (without bf16: its portable stand-in)

torch = pytest.importorskip("torch", reason="needs the optional extra: pip install -e '.[peers]'")


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_matches_pytorch_over_many_steps(weight_decay: float) -> None:
    rng = np.random.default_rng(0)
    n, n_decayed = 101, 67
    ours = rng.standard_normal(n)
    m, v = np.zeros(n), np.zeros(n)
    decayed = torch.tensor(ours[:n_decayed], requires_grad=True)
    kept = torch.tensor(ours[n_decayed:], requires_grad=True)
    peer = torch.optim.AdamW(
        [
            {"params": [decayed], "weight_decay": weight_decay},
            {"params": [kept], "weight_decay": 0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for step in range(1, 51):
        # some gradients are of the size of eps: it matters where it stands
        grad = rng.standard_normal(n) * 10.0 ** rng.integers(-10, 3, n)
        lr = 0.1 / step
        adamw(
            ours,
            m,
            v,
            grad,
            step=step,
            lr=lr,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=weight_decay,
            n_decayed=n_decayed,
        )
        decayed.grad, kept.grad = torch.from_numpy(grad).split([n_decayed, n - n_decayed])
        for group in peer.param_groups:
            group["lr"] = lr
        peer.step()
        theirs = torch.cat([decayed, kept]).detach().numpy()
        assert np.linalg.norm(ours - theirs) <= 1e-12 * np.linalg.norm(theirs), step


@pytest.mark.parametrize(("name", "mode"), [("reference", {}), ("cpu", {"compute": "bf16"})])
@pytest.mark.parametrize(("rows", "columns"), [(96, 40), (64, 64), (50, 200)])
@pytest.mark.parametrize("momentum", [0.95, 0.5])
def test_muon_goes_where_pytorch_s_goes(
    name: str, mode: dict[str, str], rows: int, columns: int, momentum: float
) -> None:
    """PyTorch's is all in bfloat16, which turns four steps by 0.3 %."""
    ops: Any = accel.load(name, **mode)
    rng = np.random.default_rng(rows)
    start = rng.standard_normal((rows, columns), dtype=np.float32)
    settings = {"lr": 0.05, "momentum": momentum, "weight_decay": 0.5}
    theirs = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **settings)
    ours, moment = start.copy(), np.zeros_like(start)
    for _ in range(4):
        grad = rng.standard_normal((rows, columns), dtype=np.float32)
        ops.muon(ours, moment, grad, **settings)
        theirs.grad = torch.from_numpy(grad)
        optimizer.step()
    end = theirs.detach().numpy()
    assert np.linalg.norm(ours - end) <= 0.01 * np.linalg.norm(end - start)


@pytest.mark.parametrize("final_fraction", [0.0, 0.1])
@pytest.mark.parametrize("warmup", [1, 2, 10])
def test_warm_up_and_cosine_match_pytorch(warmup: int, final_fraction: float) -> None:
    peak, total = 3e-4, 100
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, max(1, warmup - 1))
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, total - warmup, eta_min=final_fraction * peak
    )
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], [warmup - 1])
    for step in range(1, total + 1):
        ours = learning_rate(
            step,
            peak=peak,
            warmup_steps=warmup,
            total_steps=total,
            final_fraction=final_fraction,
        )
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-12 * peak)
        optimizer.step()
        scheduler.step()
