"""Positions beyond the trained length: sinusoids, RoPE, ALiBi, and none at all.

Four models that differ in nothing else read windows of 128 bytes and are then held to windows four
times as long. If a model has learned what distances mean, its loss goes on falling, as there is
more to see; if it has learned places, it meets places that it has never seen.
"""

import numpy as np

from dist.study.ablations.lab import Claim, Curve, Finding, Lab, Plot, byte_model

TRAINED, TRIED = 128, 512
NAMES = {"sinusoidal": "sinusoids", "rope": "RoPE", "alibi": "ALiBi", "none": "no positions"}
STEPS = 300
WORSE = 0.1  # nats that count as worse


def run(lab: Lab, share: float = 1.0) -> Finding:
    """Train the four, and return their loss by position."""
    inside: dict[str, float] = {}  # the loss just before the trained length ends
    beyond: dict[str, float] = {}  # and in the last quarter of what is tried
    curves = []
    for position, label in NAMES.items():
        config = byte_model(position=position, context_length=TRIED)
        stepper, _ = lab.train(
            label, config, length=TRAINED, count=16, steps=max(2, int(share * STEPS)), lr=3e-3
        )
        loss = lab.loss_by_position(stepper, TRIED, max(8, int(share * 64)))
        inside[position] = float(loss[TRAINED // 2 : TRAINED].mean())
        beyond[position] = float(loss[-TRIED // 4 :].mean())
        rows = loss.reshape(-1, 16).mean(axis=1)
        curves.append(Curve(label, [16 * i + 8 for i in range(len(rows))], rows.tolist()))

    def seen(position: str) -> str:
        return (
            f"{NAMES[position]}: {inside[position]:.2f} nats at positions {TRAINED // 2} to "
            f"{TRAINED}, {beyond[position]:.2f} at {TRIED - TRIED // 4} to {TRIED}"
        )

    claims = [
        Claim(
            "Press, Smith & Lewis 2022, figure 1",
            "ALiBi goes on beyond the trained length without getting worse.",
            seen("alibi"),
            beyond["alibi"] <= inside["alibi"] + WORSE,
        ),
        Claim(
            "Press, Smith & Lewis 2022, figure 1",
            "Sinusoids get worse as soon as texts are longer than in training.",
            seen("sinusoidal"),
            beyond["sinusoidal"] > inside["sinusoidal"] + WORSE,
        ),
        Claim(
            "Press, Smith & Lewis 2022, figure 1",
            "RoPE gets worse beyond the trained length as well, later than sinusoids.",
            seen("rope"),
            inside["rope"] + WORSE < beyond["rope"] < beyond["sinusoidal"],
        ),
        Claim(
            "Haviv et al. 2022, table 1",
            "A causal model without positions learns nearly as well within the trained length.",
            f"no positions {inside['none']:.2f} nats, the best of the others "
            f"{min(inside[p] for p in inside if p != 'none'):.2f}",
            inside["none"] <= min(inside[p] for p in inside if p != "none") + 2 * WORSE,
        ),
    ]
    title = f"Loss by position, trained on {TRAINED} bytes"
    plot = Plot(title, "position", "nats a byte", curves, mark=float(TRAINED))
    head = ["positions", f"nats within {TRAINED}", f"nats at {TRIED - TRIED // 4} to {TRIED}"]
    table = [head, *([NAMES[p], f"{inside[p]:.3f}", f"{beyond[p]:.3f}"] for p in NAMES)]
    assert np.isfinite(list(inside.values())).all()
    return Finding([plot], table, claims)
