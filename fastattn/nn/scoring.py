"""Other score functions between queries and keys, and other weight functions than softmax.

`ScoredMultiheadAttention` replaces `torch.nn.MultiheadAttention` in a Transformer, with additive or
cosine scores; `AdditiveAttention` is Bahdanau's attention. Weight functions other than softmax run
unfused; cosine scores with softmax run on the fused op.

Shapes: B batch, H heads, M queries, N keys, D head dim.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn import functional
from fastattn.functional import Lengths
from fastattn.nn.attention import (
    UnpackedMultiheadAttention,
    allowed_mask,
    check_causal_hint,
    check_padded_inputs,
    check_sequences,
    matching_masks,
    merge_heads,
    project,
)
from fastattn.nn.fusion import DropoutStreams

SCORES = ("dot", "additive", "cosine")
WEIGHTS = ("softmax", "sparsemax", "sigmoid")


def attention_weights_of(scores: Tensor, allowed: Tensor | None, function: str) -> Tensor:
    """Converts scores `[..., N]` to weights; blocked keys and rows without a key get 0.

    softmax; sparsemax, the nearest point of the simplex (Martins and Astudillo 2016, algorithm 1);
    sigmoid, computed for each key alone: the weights do not sum to 1.
    """
    if function not in WEIGHTS:
        raise ValueError(f"function must be one of {WEIGHTS}, got {function!r}")
    if allowed is None:
        allowed = scores.new_ones((), dtype=torch.bool)
    if function == "sigmoid":
        return scores.sigmoid().masked_fill(~allowed, 0.0)
    # Half the lowest finite number, not -inf: the gradient of a row without a key stays finite.
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min / 2)
    weights = scores.softmax(dim=-1) if function == "softmax" else _sparsemax(scores)
    return weights.masked_fill(~allowed, 0.0)


def _sparsemax(scores: Tensor) -> Tensor:
    """max(scores - tau, 0), with the tau for which the weights sum to 1 (algorithm 1)."""
    scores = scores - scores.amax(dim=-1, keepdim=True)
    ordered, _ = scores.sort(dim=-1, descending=True)
    ranks = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=scores.dtype)
    sums = ordered.cumsum(dim=-1)
    support = (1.0 + ranks * ordered > sums).sum(dim=-1, keepdim=True)  # k(z)
    tau = (sums.gather(-1, support - 1) - 1.0) / support
    return (scores - tau).clamp(min=0.0)


class AdditiveAttention(nn.Module):
    """v tanh(W query + U key) scores (Bahdanau, Cho, Bengio 2015, appendix A.1.2).

    query_size, key_size: widths of the inputs; num_hiddens: width of the hidden layer. The context
    is the weighted sum of the values. weight_function: see `attention_weights_of`.
    """

    def __init__(
        self,
        query_size: int,
        key_size: int,
        num_hiddens: int,
        dropout: float = 0.0,
        weight_function: str = "softmax",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if weight_function not in WEIGHTS:
            raise ValueError(f"weight_function must be one of {WEIGHTS}, got {weight_function!r}")
        about: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.weight_function = weight_function
        self.q_proj = nn.Linear(query_size, num_hiddens, **about)
        self.k_proj = nn.Linear(key_size, num_hiddens, **about)
        self.score = nn.Linear(num_hiddens, 1, **about)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid_lens: Lengths | None = None,
        *,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """queries `[B, M, query_size]`, keys `[B, N, key_size]`, values `[B, N, V]` -> `[B, M, V]`.

        valid_lens: int32 or int64, `[B]` or `[B, M]`, or a list of B integers: keys at or beyond it
        are not attended. With `need_weights` the weights `[B, M, N]` are returned second.
        """
        sizes = (self.q_proj.in_features, self.k_proj.in_features, None)
        valid_lens = check_sequences(queries, keys, values, sizes, valid_lens)
        q, k = self.q_proj(queries)[:, :, None], self.k_proj(keys)[:, None]
        scores = self.score(torch.tanh(q + k))[..., 0]  # [B, M, N]
        allowed = None
        if valid_lens is not None:
            lengths = valid_lens[:, None] if valid_lens.dim() == 1 else valid_lens
            allowed = torch.arange(keys.shape[1], device=keys.device) < lengths[..., None]
        weights = self.dropout(attention_weights_of(scores, allowed, self.weight_function))
        context = weights.to(values.dtype) @ values
        return (context, weights) if need_weights else context


class ScoredMultiheadAttention(UnpackedMultiheadAttention):
    """`torch.nn.MultiheadAttention` with another score function, another weight function or both.

    scoring: "dot", scaled by D**-0.5; "additive", v_h tanh(q + k) with one vector for each head;
    "cosine", s_h cos(q, k) with a trained sharpness (as in Graves et al. 2014, equation 5).
    weight_function: see `attention_weights_of`. batch_first defaults to True. Additive scores need
    `[B, H, M, N, D]` numbers of memory.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        *,
        scoring: str = "dot",
        weight_function: str = "softmax",
        bias: bool = True,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, batch_first=batch_first, device=device, dtype=dtype
        )
        if scoring not in SCORES:
            raise ValueError(f"scoring must be one of {SCORES}, got {scoring!r}")
        if weight_function not in WEIGHTS:
            raise ValueError(f"weight_function must be one of {WEIGHTS}, got {weight_function!r}")
        self.scoring, self.weight_function = scoring, weight_function
        if scoring == "additive":
            vectors = torch.empty(num_heads, self.head_dim, device=device, dtype=dtype)
            self.score_weight = nn.Parameter(nn.init.normal_(vectors, std=self.head_dim**-0.5))
        if scoring == "cosine":
            # Cosines of independent vectors vary by D**-0.5: sqrt(D) gives scores of variance 1.
            sharpness = torch.full((num_heads,), math.sqrt(self.head_dim), device=device)
            self.sharpness = nn.Parameter(sharpness.to(dtype or torch.get_default_dtype()))

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As torch's, for batched inputs. `is_causal` is a hint; `attn_mask` is read regardless."""
        check_padded_inputs(self, query, key, value, key_padding_mask, attn_mask)
        check_causal_hint(is_causal, attn_mask)
        masks = matching_masks(attn_mask, key_padding_mask, query.dtype)
        q, k, v = project(self, query, key, value)  # [B, H, M, D]
        mask = allowed_mask(*masks, q.shape[0], self.num_heads)
        p = self.dropout if self.training else 0.0
        if not need_weights and self.weight_function == "softmax" and self.scoring != "additive":
            q, k, scale = self._comparable(q, k)
            streams = DropoutStreams(query.device)
            heads = functional.attention(
                q, k, v, mask=mask, scale=scale, dropout_p=p, **streams.take(p)
            )
            return self.out_proj(merge_heads(self, heads, 3)), None  # type: ignore[arg-type]
        allowed = mask
        scores = self._scores(q, k)
        if mask is not None and mask.dtype is not torch.bool:
            allowed = mask > torch.finfo(mask.dtype).min
            scores = scores + mask.masked_fill(~allowed, 0.0).to(scores.dtype)
        weights = attention_weights_of(scores, allowed, self.weight_function)
        weights = F.dropout(weights, p) if p > 0.0 else weights
        context = merge_heads(self, weights.to(v.dtype) @ v, 3)
        if not need_weights:
            return self.out_proj(context), None
        return self.out_proj(context), weights.mean(dim=1) if average_attn_weights else weights

    def _comparable(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, float]:
        """q, k and scale for which scale * (q @ k.T) is the score."""
        if self.scoring == "dot":
            return q, k, self.head_dim**-0.5
        q = F.normalize(q, dim=-1) * self.sharpness[:, None, None].to(q.dtype)
        return q, F.normalize(k, dim=-1), 1.0

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        if self.scoring == "additive":
            hidden = torch.tanh(q[:, :, :, None] + k[:, :, None])  # [B, H, M, N, D]
            return (hidden @ self.score_weight[:, None, :, None])[..., 0]
        q, k, scale = self._comparable(q, k)
        return (q * scale) @ k.transpose(-2, -1)
