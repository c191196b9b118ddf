"""Checks of `attention` over keys and values in pages (its argument `block_table`)."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastattn._arguments import (
    check_device,
    check_heads,
    check_qkv,
    check_tensor,
    is_on_host,
    sizes,
)

_LAYOUTS = {"q": "[B, H, M, D]", "k": "[P, K, page, D]", "v": "[P, K, page, E]"}


def check_paged_inputs(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor
) -> tuple[int, int, int, int, int]:
    """The sizes B, H, M, D, N."""
    check_qkv(q, k, v, _LAYOUTS)
    (B, H, M, D), (P, K, page, key_D) = q.shape, k.shape
    check_heads(H, K, D, key_D, _layout_hint(H, page))
    if page == 0:
        raise ValueError(f"k must have at least one key in a page with block_table, got {sizes(k)}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v must be [{P}, {K}, {page}, E] like k, got {sizes(v)}")
    check_tensor("block_table", block_table)
    if block_table.dtype != torch.int32:
        raise TypeError(f"block_table must be int32, got {block_table.dtype}")
    if block_table.dim() != 2 or block_table.shape[0] != B:
        raise ValueError(f"block_table must be [{B}, T], got {sizes(block_table)}")
    check_device("block_table", block_table, q.device)
    return B, H, M, D, block_table.shape[1] * page


def _layout_hint(H: int, page: int) -> str:
    """For heads that do not fit but would if dimensions 1 and 2 of k were swapped."""
    if page == 0 or H % page != 0:
        return ""
    return "; if k and v are [P, page, K, D], pass k.transpose(1, 2) and v.transpose(1, 2)"


def check_block_table(
    block_table: Tensor, q: Tensor, k: Tensor, key_lengths: Tensor | None, dropout_p: float
) -> None:
    """The entries, where they can be read, and what attention over pages does not have."""
    if dropout_p > 0.0:
        raise ValueError(f"dropout_p must be 0 with block_table, got {dropout_p}")
    if not is_on_host(block_table) or not block_table.numel() or not q.shape[2]:
        return
    P, page = k.shape[0], k.shape[2]
    lowest, highest = torch.aminmax(block_table)
    if int(lowest) >= 0 and int(highest) < P:
        return
    outside = (block_table < 0) | (block_table >= P)
    if key_lengths is not None:
        longest = key_lengths if key_lengths.dim() == 1 else key_lengths.amax(1)
        outside &= torch.arange(block_table.shape[1]) * page < longest[:, None]
    if bool(outside.any()):
        b, t = (int(x) for x in outside.nonzero()[0])
        raise ValueError(
            f"block_table must hold pages from 0 to {P - 1} for keys before the key length, "
            f"got block_table[{b}, {t}] = {int(block_table[b, t])}"
        )


def first_differentiated(**tensors: Tensor | None) -> str | None:
    """The name of the first tensor that requires a gradient, where these are recorded, or has a
    tangent; None if there is none.
    """
    recorded, forward_mode = torch.is_grad_enabled(), forward_ad._current_level >= 0
    if not recorded and not forward_mode:
        return None
    for name, x in tensors.items():
        if x is None:
            continue
        if (recorded and x.requires_grad) or (
            forward_mode and forward_ad.unpack_dual(x).tangent is not None
        ):
            return name
    return None


def refuse_gradients(**tensors: Tensor | None) -> None:
    """Attention over pages has no derivative."""
    if (name := first_differentiated(**tensors)) is not None:
        raise ValueError(
            f"{name} must not require a gradient with block_table, which has no derivative: "
            f"pass {name}.detach(), or call attention under torch.no_grad()"
        )
