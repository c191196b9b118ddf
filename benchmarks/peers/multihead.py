"""torch.nn.MultiheadAttention as a function of queries, keys and values, for the conformance of
implementations: with projections by 1, which are exact.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.testing import dense_mask

PEERS = ()


def multihead(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Any = None,
    key_lengths: Any = None,
    causal: Any = False,
    need_weights: bool = False,
) -> Tensor:
    if q.shape[1] != k.shape[1] or v.shape != k.shape:
        raise NotImplementedError("takes equal numbers of heads and equal head dims")
    if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
        raise NotImplementedError("takes masks by head, but its projection mixes the heads")
    if causal == "bottom_right_lengths":
        raise NotImplementedError("takes no diagonal that lengths define")
    B, H, M, D = q.shape
    N = k.shape[2]
    blocked = dense_mask(q, k, mask=mask, causal=causal)
    if blocked is not None:
        blocked = ~blocked if blocked.dtype == torch.bool else blocked
        blocked = blocked.expand(B, H, M, N).reshape(B * H, M, N)
    padding = None
    if key_lengths is not None:
        if key_lengths.dim() == 2:
            raise NotImplementedError("takes a length per sequence")
        padding = torch.arange(N, device=k.device) >= key_lengths[:, None]
    module = nn.MultiheadAttention(H * D, H, bias=False, batch_first=True).to(q.device, q.dtype)
    with torch.no_grad():
        eye = torch.eye(H * D, device=q.device, dtype=q.dtype)
        module.in_proj_weight.copy_(eye.repeat(3, 1))
        module.out_proj.weight.copy_(eye)
    module.requires_grad_(False)
    inputs = (x.transpose(1, 2).reshape(B, x.shape[2], H * D) for x in (q, k, v))
    out, _ = module(*inputs, key_padding_mask=padding, attn_mask=blocked, need_weights=need_weights)
    return out.unflatten(2, (H, D)).transpose(1, 2)


multihead_weights = partial(multihead, need_weights=True)
