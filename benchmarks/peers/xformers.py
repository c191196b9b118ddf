"""xFormers' memory_efficient_attention, which chooses among its own backends.

It takes queries as [B, S, H, D]; it supports lengths only for packed sequences, so it gets none.
"""

from typing import Any

import torch
from torch import Tensor

from benchmarks.implementations import (
    Forward,
    Implementation,
    Task,
    needs_package,
    package_version,
)
from fastattn.testing.spec import Inputs


def _unsupported(task: Task) -> str | None:
    inputs = task.inputs
    if "key_lengths" in inputs:
        return "takes packed sequences, not padded ones with lengths"
    if inputs.get("window") is not None or inputs["causal"] == "bottom_right":
        return "is set up for top-left causality without windows here"
    if inputs["q"].shape[1] != inputs["k"].shape[1]:
        return "is set up for as many key heads as query heads here"
    mask = inputs.get("mask")
    if mask is not None and (mask.dtype == torch.bool or mask.shape[-1] % 8):
        return "takes additive masks of rows of a multiple of 8"
    return None


def _build(task: Task) -> Forward:
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    q = task.inputs["q"]
    bias: Any = LowerTriangularMask() if task.inputs["causal"] else None
    if task.inputs.get("mask") is not None:
        bias = task.inputs["mask"].expand(*q.shape[:3], task.inputs["k"].shape[2])

    def forward(inputs: Inputs) -> Tensor:
        out = memory_efficient_attention(
            *(inputs[n].transpose(1, 2) for n in ("q", "k", "v")),
            attn_bias=bias,
            p=inputs.get("dropout_p", 0.0),
            scale=inputs.get("scale"),
        )
        return out.transpose(1, 2)

    return forward


PEERS = (
    Implementation(
        "xformers",
        ("attention",),
        _build,
        device_types=("cuda",),
        unavailable=needs_package("xformers", "xformers.ops"),
        unsupported=_unsupported,
        version=lambda: package_version("xformers"),
        backend="xformers",
        draws_dropout=True,
    ),
)
