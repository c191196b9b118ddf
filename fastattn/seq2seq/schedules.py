"""Learning-rate schedules: factors of the peak rate as pure functions of the update's number."""

from __future__ import annotations

import math


def warmup_cosine(step: int, *, warmup_steps: int, total_steps: int, cycles: float = 0.5) -> float:
    """Return the factor for update `step`, counted from 0, as `torch.optim`'s LambdaLR counts.

    It rises linearly from 0 at step 0 to 1 at `warmup_steps`, then follows
    `0.5 * (1 + cos(2 pi * cycles * progress))`, floored at 0, where progress goes from 0 to 1 at
    `total_steps`. Half a cycle, the default, ends at 0; other values of `cycles` end or turn
    elsewhere on the wave.
    """
    if step < warmup_steps:
        return step / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return max(0.0, 0.5 * (1.0 + math.cos(2.0 * math.pi * cycles * progress)))
