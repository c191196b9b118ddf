"""Losses over padded sequences: smoothed cross-entropy, also of a linear head, guided attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def label_smoothed_cross_entropy(
    logits: Tensor, targets: Tensor, *, smoothing: float = 0.0, ignore_index: int
) -> Tensor:
    """Return the mean loss per target, in nats, over the targets that are not `ignore_index`.

    The target distribution gives `1 - smoothing` to the target and spreads `smoothing` evenly over
    the whole vocabulary: the value of `torch.nn.functional.cross_entropy(label_smoothing=...)`,
    in half its time on a CPU. Computed in fp32 whatever the logits' dtype.
    """
    log_p = F.log_softmax(logits.float(), dim=-1)  # [..., V]
    kept = targets != ignore_index  # [...]
    index = targets.where(kept, 0).unsqueeze(-1)
    nll = -log_p.gather(-1, index).squeeze(-1)
    if smoothing:
        nll = torch.lerp(nll, -log_p.mean(dim=-1), smoothing)
    return nll.where(kept, 0.0).sum() / kept.sum()


# Elements of the logits that are in memory together, 32 MiB in fp32: with fewer rows the products
# are slower (1000 rows of 256, V 32000, one Zen 3 thread, forward and backward: 1.15 s with 64 rows
# at a time, 0.81 with 256, 0.73 with 512, 1.18 with all logits).
CHUNK = 1 << 23


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    smoothing: float = 0.0,
    ignore_index: int,
) -> Tensor:
    """`label_smoothed_cross_entropy` of the logits `linear(hidden, weight)`, of which only
    those of a part of the rows are in memory at a time. Differentiable once; needs torch >= 2.13.
    """
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    rows = max(1, CHUNK // len(weight))
    loss: Tensor = F.linear_cross_entropy(
        hidden, weight, targets, ignore_index=ignore_index,
        options=nn.LinearCrossEntropyOptions(batch_chunk_size=rows, acc_policy="accurate"),
    )  # fmt: skip
    if not smoothing:
        return loss
    # -log p = logsumexp(logits) - logit: smoothing adds that of the target minus their mean.
    kept = targets != ignore_index
    index = targets.where(kept, 0)
    difference = (hidden * (F.embedding(index, weight) - weight.mean(0))).sum(-1)
    return loss + smoothing * difference.where(kept, 0.0).sum() / kept.sum()


def guided_attention_loss(
    weights: Tensor,
    target_lengths: Tensor,
    source_lengths: Tensor,
    *,
    width: float = 0.2,
) -> Tensor:
    """Return the distance of attention from the diagonal (Tachibana, Uenoyama, Aihara 2018).

    The mean over real pairs of A_nt W_nt, W_nt = 1 - exp(-(n / N - t / T)^2 / (2 width^2))
    (equations 7 and 8), for weights A [B, ..., T, N], lengths [B]: 0 on the diagonal. For nearly
    monotonic tasks, such as speech or closely related languages.
    """
    T, N = weights.shape[-2:]
    t, n = (torch.arange(size, device=weights.device)[None] for size in (T, N))
    tl, nl = target_lengths[:, None], source_lengths[:, None]
    real = (t < tl)[:, :, None] & (n < nl)[:, None]  # [B, T, N]
    distance = (n / nl)[:, None] - (t / tl)[:, :, None]
    penalty = (1.0 - torch.exp(-distance.square() / (2.0 * width**2))).masked_fill(~real, 0.0)
    shape = [len(penalty), *[1] * (weights.dim() - 3), T, N]
    per_head = weights[0, ..., 0, 0].numel()
    return (weights.float() * penalty.view(shape)).sum() / (real.sum() * per_head)
