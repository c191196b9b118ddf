"""torch's FlexAttention, compiled, with a block mask made once from lengths, causality or a mask.

The worker resets Dynamo before each shape, as for every peer that compiles: beyond its limit of
recompilations FlexAttention silently runs eagerly.
"""

import torch
from torch import Tensor

from benchmarks.implementations import Forward, Implementation, Task
from fastattn.testing.spec import Inputs

# A shape takes 10 to 20 s to compile, so only a part of the grid is measured by default.
_WORKLOADS = r"s8192_d128_causal$|s1024_d64_padded|s2048_d128_padded_both|s4096_d128_bool_mask"


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

    def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert bias is not None
        return score + bias[(*_within(bias, b, h), i, j)]

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
            score_mod=None if bias is None else biased,
            block_mask=block_mask,
            scale=inputs.get("scale"),
            enable_gqa=H != K,
        )

    return forward


def _within(mask: Tensor, b: Tensor, h: Tensor) -> tuple[Tensor | int, Tensor | int]:
    """The batch and head of a mask whose first dimensions may be 1."""
    return (b if mask.shape[0] > 1 else 0, h if mask.shape[1] > 1 else 0)


PEERS = (
    Implementation(
        "flex",
        ("attention",),
        _build,
        device_types=("cuda",),
        unsupported=_unsupported,
        backend="triton",
        compiles=True,
        workloads=_WORKLOADS,
        ignores_query_lengths=True,
    ),
)
