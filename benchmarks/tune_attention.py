"""Candidate configs of attention in Triton for `benchmarks.tune`, likely ones first."""

import itertools
from dataclasses import replace
from typing import Any

import torch

from benchmarks.tune_attention_bwd import candidates as backward_candidates
from fastattn.ops.attention.triton.fwd_config import Features, ForwardConfig, forward_config
from fastattn.ops.attention.triton.tiles import split_width

# (BLOCK_M, BLOCK_N, warps, stages, edge_stages, registers per thread or None, overlap).
_FORWARD = {
    64: (
        (128, 128, 8, 2, 2, None, 1), (128, 64, 8, 3, 2, 128, 2), (128, 64, 8, 3, 2, None, 0),
        (128, 128, 8, 2, 2, None, 2), (128, 64, 8, 3, 2, None, 1), (64, 128, 4, 2, 2, None, 1),
        (64, 128, 4, 2, 2, None, 2), (128, 64, 4, 3, 2, None, 0), (128, 128, 8, 3, 2, None, 0),
        (64, 64, 4, 3, 2, None, 2), (64, 128, 4, 2, 2, None, 0), (128, 64, 8, 2, 2, 128, 2),
        (64, 64, 4, 3, 2, None, 0), (128, 64, 4, 3, 2, None, 2), (128, 128, 8, 3, 2, None, 1),
        (128, 64, 4, 3, 2, 168, 0), (128, 128, 8, 2, 1, None, 1), (128, 64, 8, 4, 2, 128, 2),
        (128, 128, 4, 2, 2, None, 0), (128, 32, 4, 4, 2, None, 0), (256, 64, 8, 2, 2, None, 0),
    ),
    128: (
        (128, 64, 8, 3, 2, None, 1), (128, 128, 8, 2, 2, None, 2), (128, 128, 8, 2, 2, None, 0),
        (128, 64, 8, 2, 2, None, 1), (128, 128, 8, 2, 2, None, 1), (128, 64, 8, 3, 2, None, 2),
        (64, 64, 4, 2, 2, None, 1), (64, 64, 4, 2, 2, None, 2), (128, 64, 8, 3, 2, None, 0),
        (64, 64, 4, 2, 2, None, 0), (128, 32, 8, 3, 2, 128, 1), (64, 64, 4, 3, 2, None, 0),
        (64, 128, 4, 2, 2, None, 1), (128, 32, 8, 4, 2, None, 1), (128, 64, 8, 2, 2, None, 2),
        (128, 64, 8, 3, 1, None, 1), (128, 128, 8, 2, 1, None, 2), (128, 64, 4, 2, 2, None, 0),
    ),
    256: (
        (128, 64, 8, 2, 1, None, 1), (128, 64, 8, 2, 1, None, 0), (128, 64, 8, 2, 1, None, 2),
        (64, 32, 4, 2, 2, None, 1), (64, 32, 4, 2, 2, None, 0), (128, 32, 8, 3, 2, None, 1),
        (64, 64, 4, 2, 1, None, 0), (128, 32, 8, 3, 2, None, 0), (128, 32, 8, 2, 2, None, 1),
        (64, 64, 8, 2, 2, None, 0), (64, 64, 4, 2, 1, None, 1), (64, 32, 4, 3, 2, None, 0),
        (128, 64, 8, 1, 1, None, 0), (64, 64, 4, 1, 1, None, 0),
    ),
}  # fmt: skip
# (BLOCK_M, BLOCK_N, warps, stages, edge_stages)
_SINGLE_PRECISION = (
    (64, 32, 4, 2, 1), (32, 32, 4, 2, 1), (64, 32, 4, 1, 1), (32, 32, 4, 1, 1), (64, 32, 8, 2, 1),
    (64, 64, 8, 2, 1), (32, 16, 4, 1, 1), (16, 32, 4, 1, 1), (128, 32, 8, 2, 1),
)  # fmt: skip


def candidates(
    arch: str, direction: str, dtype: torch.dtype, S: int, D: int, feature: str
) -> list[Any]:
    """Each once, the shipped one first. feature: one of `tune_task.FEATURES`."""
    dense = feature in ("mask", "bias")
    if direction == "bwd":
        edges = feature in ("causal", "window") or "lengths" in feature
        return backward_candidates(arch, dtype, D, D, edges, dense)
    shipped = forward_config(arch, dtype, D, D, S, Features(dense, feature == "dropout"))
    return list(dict.fromkeys([shipped, *_forward_rows(arch, dtype, D, dense, shipped)]))


def _forward_rows(
    arch: str, dtype: torch.dtype, D: int, dense: bool, shipped: ForwardConfig
) -> list[ForwardConfig]:
    two_tiles = split_width(D)[1] > 0  # else one, padded
    if dtype is torch.float32:
        precisions = ("tf32x3", "ieee") if arch.startswith("sm_") else ("ieee",)
        forms = (shipped.whole, not shipped.whole) if two_tiles else (shipped.whole,)
        return [
            ForwardConfig(*row, precision=precision, whole=whole)
            for precision, whole, row in itertools.product(precisions, forms, _SINGLE_PRECISION)
        ]
    width = 64 if D <= 64 else 128 if D <= 128 else 256
    rows = [
        ForwardConfig(*row[:5], tma=shipped.tma, maxnreg=row[5], overlap=row[6])
        for row in _FORWARD[width]
    ]
    # Loads through a list of mask tiles take one more stage.
    rows = [replace(row, stages=row.stages + 1) for row in rows] if dense else rows
    if shipped.tma:
        rows.insert(6, replace(rows[2], tma=False))
    if two_tiles:
        rows[1:1] = [replace(row, whole=True) for row in rows[:4]]
    return rows
