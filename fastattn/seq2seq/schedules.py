"""Schedules as pure functions of the update number: learning rate, and share of true inputs."""

from __future__ import annotations

import math

DECAYS = ("linear", "exponential", "inverse-sigmoid")


def warmup_cosine(step: int, *, warmup_steps: int, total_steps: int, cycles: float = 0.5) -> float:
    """Return the factor for update `step`, counted from 0 as in `torch.optim`'s LambdaLR.

    It rises linearly from 0 at step 0 to 1 at `warmup_steps`, then follows
    `0.5 * (1 + cos(2 pi * cycles * progress))`, floored at 0, where progress goes from 0 to 1 at
    `total_steps`. The default, half a cycle, ends at 0.
    """
    if step < warmup_steps:
        return step / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return max(0.0, 0.5 * (1.0 + math.cos(2.0 * math.pi * cycles * progress)))


def truth_share(step: int, *, total_steps: int, decay: str, floor: float) -> float:
    """Return the share of true tokens among the decoder's inputs at update `step`, from 0.

    The decays of scheduled sampling (Bengio et al. 2015, section 2.4), from 1 down to `floor` over
    `total_steps`: "linear"; "exponential", k^i, with the k that leaves 1 % of the difference;
    "inverse-sigmoid", k / (k + exp(i / k)), with the k that reaches half of the difference at half
    of the steps: it begins and ends 1 / (1 + k) of the difference off.
    """
    if decay not in DECAYS:
        raise ValueError(f"decay must be one of {DECAYS}, got {decay!r}")
    progress = min(1.0, step / max(1, total_steps))
    if decay == "linear":
        left = 1.0 - progress
    elif decay == "exponential":
        left = 0.01**progress
    else:
        # k ln k = total_steps / 2; the sigmoid is then 1 / (1 + k^(2 progress - 1)).
        k = _solve_k_log_k(total_steps / 2)
        left = 1.0 / (1.0 + k ** (2.0 * progress - 1.0))
    return floor + (1.0 - floor) * left


def _solve_k_log_k(value: float) -> float:
    """The k > 1 with k ln k = value, by Newton's method, which converges from above."""
    k = math.e + value
    for _ in range(50):
        k -= (k * math.log(k) - value) / (math.log(k) + 1.0)
    return k
