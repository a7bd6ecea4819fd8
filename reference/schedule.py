"""Learning-rate schedules: how long a step is, as training goes on."""

import math
from typing import Literal, get_args

Schedule = Literal["cosine", "linear", "constant", "wsd"]


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    total_steps: int,
    schedule: Schedule = "cosine",
    final_fraction: float = 0.1,
    decay_steps: int | None = None,
) -> float:
    """Return the learning rate of a step, counted from 1 as AdamW does.

    It rises linearly to ``peak``, reached at ``warmup_steps``, and then, with
    x = (step - warmup_steps) / (total_steps - warmup_steps) from 0 to 1 and f = final_fraction:

    * cosine: peak · (f + (1 - f) (1 + cos πx)/2), Loshchilov & Hutter 2017, eq. 5;
    * linear: peak · (1 - (1 - f) x);
    * constant: peak;
    * wsd (warm-up–stable–decay, Hu et al. 2024): peak until the last ``decay_steps``, then linearly
      down to f · peak (their decay is exponential).

    After ``total_steps`` it stays where it ended.

    Raises
    ------
    ValueError
        When the numbers contradict each other.
    """
    if schedule not in get_args(Schedule):
        known = ", ".join(get_args(Schedule))
        raise ValueError(f"schedule must be one of {known}, got {schedule!r}")
    if step < 1 or not 0 <= warmup_steps <= total_steps:
        raise ValueError(
            "learning_rate: steps count from 1 and 0 <= warmup_steps <= total_steps must hold, "
            f"got step {step}, warmup_steps {warmup_steps}, total_steps {total_steps}"
        )
    if not 0 <= peak < math.inf:
        raise ValueError(f"peak must be a finite learning rate >= 0, got {peak}")
    if not 0 <= final_fraction <= 1:
        raise ValueError(f"final_fraction must lie in [0, 1], got {final_fraction}")
    if schedule == "wsd" and (
        decay_steps is None or not 0 < decay_steps <= total_steps - warmup_steps
    ):
        raise ValueError(
            f"schedule 'wsd' needs decay_steps in 1..{total_steps - warmup_steps} "
            f"(total_steps - warmup_steps), got {decay_steps}"
        )
    if step < warmup_steps:
        return peak * step / warmup_steps
    step = min(step, total_steps)
    span = total_steps - warmup_steps
    if schedule == "wsd" and decay_steps is not None:
        x = max(0.0, 1 - (total_steps - step) / decay_steps)
    else:
        x = (step - warmup_steps) / span if span else 0.0
    if schedule == "constant":
        return peak
    if schedule == "cosine":
        return peak * (final_fraction + (1 - final_fraction) * (1 + math.cos(math.pi * x)) / 2)
    return peak * (1 - (1 - final_fraction) * x)
