"""Linear attention, in parallel and as a recurrence (Katharopoulos et al. 2020).

exp(q k) is replaced by phi(q) phi(k), phi = elu + 1 (section 3.2), so that the context of a query
is phi(q) S / phi(q) z with the sums S = sum phi(k) v and z = sum phi(k) over its keys. The sums do
not depend on the query: work grows linearly with the length, and causal decoding is a recurrence
over them (section 3.4) whose state has one size whatever the length of the prefix.

Shapes: B batch, H heads, M queries, N keys, D head dim.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn.functional import Lengths
from fastattn.nn.attention import check_sequences
from fastattn.nn.fusion import linear

# Positions whose pairs are computed as a matrix product; the sums are carried from one chunk to the
# next. Work per position: CHUNK + D products of D numbers.
CHUNK = 64


@dataclass
class LinearAttentionState:
    """The sums over the prefix, fp32 `[B, H, D, D + 1]`: S, and z in the last column."""

    sums: Tensor

    def restart(self) -> None:
        """Restarts at position 0, in the same tensor."""
        self.sums.zero_()


class LinearMultiheadAttention(nn.Module):
    """Multi-head attention with weights proportional to phi(q) phi(k), phi = elu + 1.

    Parameters have the names, shapes and initial values of `torch.nn.MultiheadAttention`'s with the
    same sizes. Batch comes first. The weights of a query sum to 1. Inside, numbers are fp32 (fp64
    for fp64 inputs).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}"
            )
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        # In the order in which torch's class draws its initial values.
        out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        weight = torch.empty(3 * embed_dim, embed_dim, device=device, dtype=dtype)
        self.in_proj_weight = nn.Parameter(nn.init.xavier_uniform_(weight))
        if bias:
            zeros = torch.zeros(3 * embed_dim, device=device, dtype=dtype)
            self.in_proj_bias = nn.Parameter(zeros)
        else:
            self.register_parameter("in_proj_bias", None)
        self.out_proj = out_proj
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid_lens: Lengths | None = None,
        *,
        causal: bool = False,
    ) -> Tensor:
        """queries `[B, M, E]`, keys and values `[B, N, E]` -> `[B, M, E]`, all queries in parallel.

        valid_lens: int32 or int64 `[B]`, or a list of B integers: keys at or beyond it are not
        attended; a length of 0 gives a zero context. causal: query i attends the keys up to i; M
        and N must then be equal.
        """
        sizes = (self.embed_dim,) * 3
        valid_lens = check_sequences(queries, keys, values, sizes, valid_lens)
        M, N = queries.shape[1], keys.shape[1]
        if causal and M != N:
            raise ValueError(f"keys must be as many as the {M} queries if causal, got {N}")
        if valid_lens is not None and valid_lens.dim() != 1:
            raise ValueError(f"valid_lens must be [B], got {list(valid_lens.shape)}")
        q, k, v = self._heads(queries, keys, values)
        return self._output(linear_attention(q, k, v, key_lengths=valid_lens, causal=causal))

    def init_state(self, batch_size: int) -> LinearAttentionState:
        """The state before the first position: `batch_size` * E * (D + 1) numbers."""
        weight, D = self.in_proj_weight, self.head_dim
        dtype = torch.promote_types(weight.dtype, torch.float32)
        shape = (batch_size, self.num_heads, D, D + 1)
        return LinearAttentionState(torch.zeros(shape, device=weight.device, dtype=dtype))

    @torch.no_grad()
    def step(self, x: Tensor, state: LinearAttentionState) -> Tensor:
        """The self-attention of the next positions x `[B, T, E]`, T >= 1, whose keys and values are
        added to `state`.

        Equal to the last T rows of `forward` over the whole prefix with `causal=True`. The tensor
        of the state keeps its shape and address, so a step can be captured as a CUDA graph. No
        gradients are recorded.
        """
        B = state.sums.shape[0]
        if x.dim() != 3 or x.shape[0] != B or x.shape[1] < 1 or x.shape[2] != self.embed_dim:
            raise ValueError(f"x must be [{B}, T, {self.embed_dim}], got {list(x.shape)}")
        q, k, v = self._heads(x, x, x)
        with torch.autocast(x.device.type, enabled=False):
            features = phi(_inner(q)), phi(_inner(k)), _with_ones(_inner(v))
            heads = _divided(_advance(*features, state.sums)).to(v.dtype)
        return self._output(heads)

    def _heads(self, queries: Tensor, keys: Tensor, values: Tensor) -> list[Tensor]:
        """Projects to q, k and v, `[B, H, S, D]`; a single product in self-attention."""
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if queries is keys is values:
            projected = linear(queries, weight, bias).chunk(3, dim=-1)
        else:
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            parts = zip((queries, keys, values), weight.chunk(3), biases, strict=True)
            projected = tuple(linear(*part) for part in parts)
        return [x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in projected]

    def _output(self, heads: Tensor) -> Tensor:
        return linear(heads.transpose(1, 2).flatten(-2), self.out_proj.weight, self.out_proj.bias)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, bias={self.in_proj_bias is not None}"


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, key_lengths: Tensor | None = None, causal: bool = False
) -> Tensor:
    """The context `[B, H, M, D]` of q `[B, H, M, D]` over k and v `[B, H, N, D]`, in v's dtype.

    key_lengths: `[B]`, the number of keys of each sequence. causal: M and N are equal.
    """
    if key_lengths is not None:
        padding = torch.arange(k.shape[2], device=k.device) >= key_lengths[:, None]  # [B, N]
        padding = padding[:, None, :, None]
        # phi(-inf) is 0. Padding may hold NaN, whose products with 0 are NaN.
        k, v = k.masked_fill(padding, -torch.inf), v.masked_fill(padding, 0.0)
    with torch.autocast(q.device.type, enabled=False):
        features, keys, ones = phi(_inner(q)), phi(_inner(k)), _with_ones(_inner(v))
        if causal:
            return _divided(_causal_sums(features, keys, ones)).to(v.dtype)
        return _divided(features @ (keys.mT @ ones)).to(v.dtype)


def phi(x: Tensor) -> Tensor:
    """elu(x) + 1; exp(x) for negative x, where adding 1 to elu would round."""
    return torch.where(x > 0.0, x + 1.0, x.clamp(max=0.0).exp())


def _inner(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _with_ones(v: Tensor) -> Tensor:
    """v with a last column of ones, whose sum is that of the weights."""
    return torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)


def _divided(sums: Tensor) -> Tensor:
    """phi(q) S / phi(q) z of both side by side, `[..., D + 1]`; 0 without keys."""
    weights = sums[..., -1:]
    return sums[..., :-1] / torch.where(weights == 0.0, 1.0, weights)


def _causal_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """sum_{j <= i} (q_i k_j) v_j of q, k `[B, H, S, D]` and v `[B, H, S, D + 1]`.

    Within a chunk it is a masked product of CHUNK² pairs; what comes before a chunk is one sum.
    """
    S = q.shape[2]
    chunks = -(-S // CHUNK)
    q, k, v = (
        F.pad(x, (0, 0, 0, chunks * CHUNK - S)).unflatten(2, (chunks, CHUNK)) for x in (q, k, v)
    )  # [B, H, chunks, CHUNK, D]
    sums = k.mT @ v  # [B, H, chunks, D, D + 1]
    # Not `sums.cumsum(2) - sums`, whose rounding errors grow with the keys of the chunk itself.
    before = F.pad(sums[:, :, :-1].cumsum(dim=2), (0, 0, 0, 0, 1, 0))
    out = q @ before + (q @ k.mT).tril() @ v
    return out.flatten(2, 3)[:, :, :S]


def _advance(q: Tensor, k: Tensor, v: Tensor, sums: Tensor) -> Tensor:
    """The output at the next positions, whose sums are added to `sums` of the prefix in place."""
    if q.shape[2] == 1:
        return q @ sums.add_(k.mT * v)  # [B, H, D, 1] * [B, H, 1, D + 1]
    out = _causal_sums(q, k, v) + q @ sums
    sums.add_(k.mT @ v)
    return out
