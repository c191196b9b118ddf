"""torch's FlexAttention, compiled, with a block mask made once from lengths, causality or a mask.
On a CPU it has no backward.

The worker resets Dynamo before each shape, as for every peer that compiles: beyond its limit of
recompilations FlexAttention silently runs eagerly.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.implementations import (
    ON_REQUEST,
    Forward,
    Implementation,
    Task,
    with_dense_mask,
)
from fastattn import functional
from fastattn.testing.spec import Inputs

# A shape takes 10 to 20 s to compile, so only a part of the grid is measured by default.
_WORKLOADS = (
    r"s8192_d128_causal$|s1024_d64_padded|s2048_d128_padded_both|s4096_d128_bool_mask"
    r"|_alibi$|_softcap$|_relative$"
)


@with_dense_mask
def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Not compiled, by a score modification that reads a dense mask."""
    from torch.nn.attention.flex_attention import flex_attention

    if mask is not None:
        mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])

    def changed(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        s = s if softcap is None else torch.tanh(s / softcap) * softcap
        if mask is None:
            return s
        if mask.dtype == torch.bool:
            return torch.where(mask[b, h, i, j], s, -torch.inf)
        return s + mask[b, h, i, j]

    out = flex_attention(q, k, v, changed, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    assert isinstance(out, Tensor)
    return out


def _unsupported(task: Task) -> str | None:
    if task.inputs.get("dropout_p"):
        return "has no dropout"
    if task.inputs["causal"] == "bottom_right" or task.inputs.get("window") is not None:
        return "is set up for top-left causality without windows here"
    return None


def _build(task: Task) -> Forward:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    inputs = task.inputs
    (B, H, M, _), (K, N) = inputs["q"].shape, inputs["k"].shape[1:3]
    causal = bool(inputs["causal"])
    key_lengths, query_lengths = inputs.get("key_lengths"), inputs.get("query_lengths")
    mask = inputs.get("mask")
    bias = mask if mask is not None and mask.is_floating_point() else None
    pattern = mask if bias is None else None  # bool, broadcastable to [B, H, M, N]

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        yes = (i >= j) if causal else (j < N)
        if key_lengths is not None:
            yes = yes & (j < key_lengths[b])
        if query_lengths is not None:
            yes = yes & (i < query_lengths[b])
        if pattern is not None:
            yes = yes & pattern[(*_within(pattern, b, h), i, j)]
        return yes

    softcap, slopes = inputs.get("softcap"), inputs.get("alibi_slopes")
    changed = bias is not None or softcap is not None or slopes is not None
    buckets = None
    if (table := inputs.get("relative_bias")) is not None:
        changed = True
        d = -torch.arange(M, device=task.device)
        farthest = inputs["relative_max_distance"]
        buckets = functional.t5_buckets(d, table.shape[1], farthest, causal=True)

    def score_change(inputs: Inputs) -> Callable[..., Tensor]:
        table = inputs.get("relative_bias")
        added = None if bias is None else inputs["mask"]

        def changed(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            if slopes is not None:
                score = score - slopes[h] * (i - j).abs()
            if table is not None and buckets is not None:
                score = score + table[h, buckets[(i - j).clamp(min=0)]]
            return score if added is None else score + added[(*_within(added, b, h), i, j)]

        return changed

    restricted = causal or pattern is not None or key_lengths is not None
    batches = B if pattern is not None or key_lengths is not None else None
    block_mask = (
        create_block_mask(allowed, batches, None, M, N, device=str(task.device))
        if restricted
        else None
    )
    flex = torch.compile(flex_attention, dynamic=False)

    def forward(inputs: Inputs) -> Tensor:
        return flex(
            inputs["q"],
            inputs["k"],
            inputs["v"],
            score_mod=score_change(inputs) if changed else None,
            block_mask=block_mask,
            scale=inputs.get("scale"),
            enable_gqa=H != K,
        )

    return forward


def _within(mask: Tensor, b: Tensor, h: Tensor) -> tuple[Tensor | int, Tensor | int]:
    """The batch and head of a mask whose first dimensions may be 1."""
    return (b if mask.shape[0] > 1 else 0, h if mask.shape[1] > 1 else 0)


_peer = partial(
    Implementation,
    "flex",
    ("attention",),
    _build,
    unsupported=_unsupported,
    compiles=True,
    scores=("alibi_slopes", "softcap", "relative_bias"),
    ignores_query_lengths=True,
)
PEERS = (
    _peer(device_types=("cuda",), backend="triton", workloads=_WORKLOADS),
    _peer(device_types=("cpu",), backend="c++", workloads=ON_REQUEST, directions=("fwd",)),
)
