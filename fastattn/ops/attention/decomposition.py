"""Attention by PyTorch's scaled dot product attention, for exported programs: the exporter to ONNX
translates it to ONNX's Attention operator where the opset has it.

fastattn differs from PyTorch in rows that have no allowed key (output 0, not NaN) and in positions
without any allowed pair, which may hold NaN: their values are replaced before and after the call.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fastattn.ops.attention import reference
from fastattn.ops.attention.calls import (
    CausalKind,
    ForwardCall,
    changes_scores,
    is_restricted,
    unrestricted,
)


def attention_fwd(*args: Any) -> tuple[Tensor, Tensor]:
    """args: the fields of `ForwardCall`, without dropout. `lse` is computed separately: programs
    that do not read it omit that.
    """
    call = ForwardCall(*args)
    if call.block_table is not None:  # onnxruntime does not gather by int32
        call = reference.gathered(call._replace(block_table=call.block_table.long()))
    if changes_scores(call) or call.cu_seqlens_q is not None:
        return reference.attention_fwd(*call._replace(mask_tiles=None, dropout_p=0.0))
    q, k, v, mask = call[:4]
    scale, (H, K), result = call.scale, (q.shape[1], k.shape[1]), q.dtype
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    # With more keys than queries, those that causal leaves to no query may hold NaN.
    square = statically_known_true(q.shape[2] >= k.shape[2])
    is_causal = call.causal == CausalKind.TOP_LEFT and square
    restricted = is_restricted(call._replace(causal=0) if is_causal else call)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    if scale <= 0.0:  # the exporter takes its square root
        q, scale = q * scale, 1.0
    if restricted or statically_known_true(k.shape[2] == 0):
        allowed = reference.allowed_pairs(call._replace(q=q, k=k))
        live_rows, live_keys = reference.live(allowed, H, K)
        q = torch.where(live_rows, q, 0)
        k, v = torch.where(live_keys, k, 0), torch.where(live_keys, v, 0)
        # Rows without an allowed key attend to all keys; their results are replaced.
        attended, mask, call = allowed | ~live_rows, _bias(allowed, mask, dtype), unrestricted(call)
        if mask.dtype != torch.bool:
            attended = torch.where(live_rows, mask, 0)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attended, scale=scale, enable_gqa=H != K
        )
        out = torch.where(live_rows, out, 0)
    else:
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, scale=scale, enable_gqa=H != K
        )
    changes: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "mask": mask,
        "mask_tiles": None,
        "scale": scale,
    }
    _, lse = reference.attention_fwd(*call._replace(**changes, dropout_p=0.0))
    return out.to(result), lse


def _bias(allowed: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`allowed` as a mask, with the values of an additive mask."""
    if mask is None or mask.dtype == torch.bool:
        return allowed
    return torch.where(allowed, mask.to(dtype), -torch.inf)
