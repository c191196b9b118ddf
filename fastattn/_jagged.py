"""Jagged nested tensors as rows and offsets: `[B, H, j, D]` for `attention_varlen`, and
`[B, j, ...]` for ops on rows.
"""

from typing import Any

import torch
from torch import Tensor


def check(name: str, x: Any) -> None:
    """Raises unless x is a jagged nested tensor `[B, H, j, D]`: `[B, j, H, D]`, transposed."""
    if not isinstance(x, Tensor) or not x.is_nested or x.layout is not torch.jagged:
        got = f"{x.layout}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} must be a jagged nested tensor if q, k or v is one, got {got}")
    if x.dim() != 4 or x._ragged_idx != 2:  # type: ignore[attr-defined]
        raise ValueError(
            f"{name} must be [B, H, j, D], a jagged [B, j, H, D] transposed, got {list(x.shape)}"
        )
    if x.lengths() is not None:  # type: ignore[attr-defined]
        raise ValueError(f"{name} must have no gaps between its sequences, which `narrow` leaves")


def check_sequences(k: Any, v: Any) -> None:
    """Raises unless the sequences of v are those of k; compares values only of other offsets."""
    if k.shape[2] != v.shape[2] and not torch.equal(k.offsets(), v.offsets()):
        raise ValueError("v must have the sequence lengths of k, got others")


def pack(x: Any) -> tuple[Tensor, Tensor, int]:
    """x -> its rows `[T, H, D]`, int32 offsets `[B + 1]`, and a bound of the lengths."""
    return x.transpose(1, 2).values(), x.offsets().to(torch.int32), x._get_max_seqlen()


def unpack(rows: Tensor, like: Any) -> Tensor:
    """Rows `[T, H, ...]` -> `[B, H, j, ...]` with the sequences of `like`."""
    return with_rows(rows, like).transpose(1, 2)


def check_rows(name: str, x: Any) -> None:
    """Raises unless x is a jagged nested tensor `[B, j, ...]` whose rows `values()` are."""
    if x.layout is not torch.jagged or not x.is_contiguous():
        got = "another view of one" if x.layout is torch.jagged else f"a nested {x.layout}"
        raise TypeError(f"{name} must be dense or a contiguous jagged tensor, got {got}")


def with_rows(rows: Tensor, like: Any) -> Tensor:
    """Rows `[T, ...]` -> `[B, j, ...]` with the sequences of `like`."""
    return torch.nested.nested_tensor_from_jagged(
        rows,
        like.offsets(),
        # Only what is known: asking for a length waits for the device.
        min_seqlen=like._maybe_min_seqlen,
        max_seqlen=like._maybe_max_seqlen,
    )
