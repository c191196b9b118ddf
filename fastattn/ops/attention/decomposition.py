"""Attention by PyTorch's scaled dot product attention, for exported programs: the exporter to ONNX
translates it to ONNX's Attention operator where the opset has it.

fastattn differs from PyTorch in rows that have no allowed key (output 0, not NaN) and in positions
without any allowed pair, which may hold NaN: their values are replaced before and after the call.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fastattn.ops.attention import reference


def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_tiles: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    distance_bias: Tensor | None,
    sinks: Tensor | None,
    softcap: float,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
) -> tuple[Tensor, Tensor]:
    """Without dropout. `lse` is computed separately: programs that do not read it omit that."""
    if distance_bias is not None or sinks is not None or softcap > 0.0:
        return reference.attention_fwd(
            q, k, v, mask, None, key_lengths, query_lengths, distance_bias, sinks, softcap, causal,
            window_left, window_right, scale, 0.0, None, 0,
        )  # fmt: skip
    H, K, result = q.shape[1], k.shape[1], q.dtype
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    # With more keys than queries, those that causal leaves to no query may hold NaN.
    is_causal = causal == reference.TOP_LEFT and statically_known_true(q.shape[2] >= k.shape[2])
    restricted = (
        any(x is not None for x in (mask, key_lengths, query_lengths))
        or (causal and not is_causal)
        or window_left >= 0
        or window_right >= 0
        or statically_known_true(k.shape[2] == 0)
    )
    q, k, v = (x.to(dtype) for x in (q, k, v))
    if scale <= 0.0:  # the exporter takes its square root
        q, scale = q * scale, 1.0
    if restricted:
        allowed = reference.allowed_pairs(
            q, k, mask, key_lengths, query_lengths, causal, window_left, window_right
        )
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
    _, lse = reference.attention_fwd(
        q, k, v, mask, None, None, None, None, None, 0.0, causal, -1, -1, scale, 0.0, None, 0
    )
    return out.to(result), lse


def attention_paged_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    distance_bias: Tensor | None,
    sinks: Tensor | None,
    softcap: float,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    table = block_table.long()  # onnxruntime does not gather by int32
    k, v = (reference.keys_of_pages(x, table) for x in (k, v))
    return attention_fwd(
        q, k, v, mask, None, key_lengths, query_lengths, distance_bias, sinks, softcap, causal,
        window_left, window_right, scale, 0.0, None, 0,
    )  # fmt: skip


def _bias(allowed: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`allowed` as a mask, with the values of an additive mask."""
    if mask is None or mask.dtype == torch.bool:
        return allowed
    return torch.where(allowed, mask.to(dtype), -torch.inf)
