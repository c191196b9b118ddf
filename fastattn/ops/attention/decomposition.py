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
from fastattn.ops.attention.calls import CausalKind, ForwardCall


def attention_fwd(*args: Any) -> tuple[Tensor, Tensor]:
    """args: the fields of `ForwardCall`, without dropout. `lse` is computed separately: programs
    that do not read it omit that.
    """
    call = ForwardCall(*args)
    if call.block_table is not None:  # onnxruntime does not gather by int32
        call = reference.gathered(call._replace(block_table=call.block_table.long()))
    changed = call.distance_bias is not None or call.sinks is not None or call.softcap > 0.0
    if changed or call.cu_seqlens_q is not None:
        return reference.attention_fwd(*call._replace(mask_tiles=None, dropout_p=0.0))
    q, k, v, mask = call[:4]
    restrictions = call.key_lengths, call.query_lengths, call.causal
    windows, causal, scale = (call.window_left, call.window_right), call.causal, call.scale
    H, K, result = q.shape[1], k.shape[1], q.dtype
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    # With more keys than queries, those that causal leaves to no query may hold NaN.
    is_causal = causal == CausalKind.TOP_LEFT and statically_known_true(q.shape[2] >= k.shape[2])
    restricted = (
        any(x is not None for x in (mask, call.key_lengths, call.query_lengths))
        or (causal and not is_causal)
        or call.window_left >= 0
        or call.window_right >= 0
        or statically_known_true(k.shape[2] == 0)
    )
    q, k, v = (x.to(dtype) for x in (q, k, v))
    if scale <= 0.0:  # the exporter takes its square root
        q, scale = q * scale, 1.0
    if restricted:
        allowed = reference.allowed_pairs(q, k, mask, *restrictions, *windows)
        live_rows = allowed.any(-1)[..., None]  # [B or 1, H or 1, M, 1]
        heads = allowed.any(-2)  # [B or 1, H or 1, N]
        if heads.shape[1] == H and H != K:
            heads = heads.unflatten(1, (K, H // K)).any(2)
        live_keys = heads[..., None]
        q = torch.where(live_rows, q, 0)
        k, v = torch.where(live_keys, k, 0), torch.where(live_keys, v, 0)
        # Rows without an allowed key attend to all keys; their results are replaced.
        attended, mask, causal = allowed | ~live_rows, _bias(allowed, mask, dtype), 0
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
    _, lse = reference.attention_fwd(*ForwardCall(q, k, v, mask, causal=causal, scale=scale))
    return out.to(result), lse


def _bias(allowed: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`allowed` as a mask, with the values of an additive mask."""
    if mask is None or mask.dtype == torch.bool:
        return allowed
    return torch.where(allowed, mask.to(dtype), -torch.inf)
