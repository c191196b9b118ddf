"""torch.nn.functional.scaled_dot_product_attention, each of its backends separately.

Lengths become a boolean mask of keys, made once. SDPA has no query lengths: rows beyond them are
computed like all others. Biases by distance become an additive mask of all pairs, made once unless
they are learned.
"""

import functools
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.implementations import (
    Forward,
    Implementation,
    Task,
    weights_are_too_large,
    with_dense_mask,
)
from fastattn import functional
from fastattn.testing.spec import Inputs


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool | str = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    if causal not in (False, True, "top_left") or (causal and mask is not None):
        raise NotImplementedError("takes a mask, or causality aligned with the top left")
    if mask is not None and mask.dtype not in (torch.bool, q.dtype):
        raise NotImplementedError("takes masks of q's dtype")
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout_p, bool(causal), scale=scale, enable_gqa=grouped
    )


@with_dense_mask
def sdpa_masked(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    return sdpa(q, k, v, mask=mask, scale=scale)


def _by(backend: SDPBackend, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Tensor:
        with sdpa_kernel(backend):
            try:
                return function(*args, **options)
            except RuntimeError as error:
                if not str(error).startswith(("No available kernel", "No viable backend")):
                    raise
                raise NotImplementedError("has no kernel for it") from error

    return call


sdpa_math = _by(SDPBackend.MATH, sdpa_masked)
sdpa_cudnn = _by(SDPBackend.CUDNN_ATTENTION, sdpa)
sdpa_flash = _by(SDPBackend.FLASH_ATTENTION, sdpa)
sdpa_efficient = _by(SDPBackend.EFFICIENT_ATTENTION, sdpa_masked)


def key_mask(inputs: Inputs) -> Tensor | None:
    """The mask that torch takes: the given one, or the keys in key_lengths, [B, 1, 1, N]."""
    if "key_lengths" not in inputs:
        return inputs.get("mask")
    lengths, N = inputs["key_lengths"], inputs["k"].shape[2]
    return torch.arange(N, device=lengths.device) < lengths.view(-1, 1, 1, 1)


def distance_bias(inputs: Inputs) -> Tensor:
    """Bias of ALiBi or a table for the scores of causal attention, [1, H, M, N] in q's dtype."""
    q, N = inputs["q"], inputs["k"].shape[2]
    places = torch.arange(N, device=q.device)
    d = places - torch.arange(q.shape[2], device=q.device)[:, None]
    if "alibi_slopes" in inputs:
        bias = -inputs["alibi_slopes"][:, None, None] * d.abs()
    else:
        table = inputs["relative_bias"]
        farthest = inputs["relative_max_distance"]
        bias = table[:, functional.t5_buckets(d, table.shape[1], farthest, causal=True)]
    return bias.masked_fill(d > 0, -torch.inf).to(q.dtype)[None]


def _has_bias(inputs: Inputs) -> bool:
    return "alibi_slopes" in inputs or "relative_bias" in inputs


def _unsupported(backend: SDPBackend | None, task: Task) -> str | None:
    inputs = task.inputs
    if _has_bias(inputs):
        if backend == SDPBackend.FLASH_ATTENTION:
            return "takes no mask"
        return weights_are_too_large(task, copies=4)
    if inputs.get("window") is not None:
        return "has no window"
    if inputs["causal"] == "bottom_right" or (inputs["causal"] and key_mask(inputs) is not None):
        return "takes a mask, or causality aligned with the top left"
    if backend == SDPBackend.MATH:
        return weights_are_too_large(task, copies=4)
    if backend == SDPBackend.FLASH_ATTENTION and key_mask(inputs) is not None:
        return "takes no mask"
    grouped = inputs["q"].shape[1] != inputs["k"].shape[1]
    if backend == SDPBackend.EFFICIENT_ATTENTION and grouped:
        return "has no grouped heads"
    if task.device.type == "cuda" and task.dtype == torch.float32:
        if backend != SDPBackend.EFFICIENT_ATTENTION:
            return "has no fp32"
    return None


def _build(backend: SDPBackend | None, task: Task) -> Forward:
    mask = key_mask(task.inputs)
    biased, learned = _has_bias(task.inputs), "relative_bias" in task.inputs
    if biased and not learned:
        mask = distance_bias(task.inputs)

    def attend(inputs: Inputs) -> Tensor:
        return sdpa(
            inputs["q"],
            inputs["k"],
            inputs["v"],
            mask=distance_bias(inputs) if learned else inputs.get("mask", mask),
            causal=inputs["causal"] and not biased,
            scale=inputs.get("scale"),
            dropout_p=inputs.get("dropout_p", 0.0),
        )

    def forward(inputs: Inputs) -> Tensor:
        if backend is None:
            return attend(inputs)
        with sdpa_kernel(backend):
            return attend(inputs)

    return forward


def _build_loop(task: Task) -> Forward:
    """Packed sequences, one call for each; the offsets are read on the host in advance."""
    offsets = [task.inputs[f"cu_seqlens_{x}"].tolist() for x in "qk"]
    ranges = [list(pairwise(each)) for each in offsets]
    causal, scale = bool(task.inputs["causal"]), task.inputs.get("scale")

    def forward(inputs: Inputs) -> Tensor:
        outs = [
            F.scaled_dot_product_attention(
                inputs["q"][None, :, q0:q1],
                inputs["k"][None, :, k0:k1],
                inputs["v"][None, :, k0:k1],
                is_causal=causal,
                scale=scale,
            )[0]
            for (q0, q1), (k0, k1) in zip(*ranges, strict=True)
        ]
        return torch.cat(outs, 1)

    return forward


def _peer(
    name: str, backend: SDPBackend | None, device_type: str, workloads: str = ""
) -> Implementation:
    return Implementation(
        name,
        ("attention",),
        partial(_build, backend),
        device_types=(device_type,),
        unsupported=partial(_unsupported, backend),
        backend=name.removeprefix("sdpa-"),
        scores=("alibi_slopes", "relative_bias"),
        workloads=workloads,
        draws_dropout=True,
        ignores_query_lengths=True,
    )


PEERS = (
    _peer("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION, "cuda"),
    _peer("sdpa-flash", SDPBackend.FLASH_ATTENTION, "cuda"),
    # The slowest of the three except for masks, which only it supports: a part of the plain grid.
    _peer(
        "sdpa-efficient",
        SDPBackend.EFFICIENT_ATTENTION,
        "cuda",
        r"mask|bias|dropout|padded|sentences|s(512|8192)_",
    ),
    # A call takes seconds with long sequences.
    _peer("sdpa-math", SDPBackend.MATH, "cuda", r"s(512|1024)_"),
    _peer("sdpa", None, "cpu"),
    Implementation("sdpa-loop", ("attention_varlen",), _build_loop, workloads="_s(512|1024)_"),
)
