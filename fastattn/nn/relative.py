"""Positions inside attention: ALiBi, T5's relative positions, rotary positions.

Unlike an encoding added to the embeddings, these depend on the distance between query and key
alone. A module of positions belongs to one self-attention (`positional_attention`), or to those of
all layers of a stack. Its constants are not in the `state_dict`, learned parameters are.

Shapes: H heads, D head dim, S positions, N keys. The distance d of a key is its position minus the
query's.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from fastattn import functional
from fastattn.nn.tables import ComputedTable

PositionKind = Literal["alibi", "t5", "rotary"]
POSITION_KINDS: tuple[PositionKind, ...] = ("alibi", "t5", "rotary")


class AttentionPositions(nn.Module):
    """Base of the modules below: changes nothing. A subclass overrides `score_options` and `bias`,
    or `rotated`.
    """

    def score_options(self, device: torch.device) -> dict[str, Any]:
        """Keyword arguments of `attention` and `attention_varlen` for data on this device."""
        return {}

    def bias(self, d: Tensor) -> Tensor | None:
        """The bias of `score_options` for keys at the distances d `[N]`: `[H, N]`."""
        return None

    def rotated(self, q: Tensor, k: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """q and k `[..., S, H, D]` with their positions `at`, integers `[S]`."""
        return q, k


class AlibiPositions(ComputedTable, AttentionPositions):
    """Adds -slope * |d| to the scores, with a fixed slope for each head (Press et al. 2022).

    The slopes are the paper's: a geometric sequence from 2^(-8 / H), where H is a power of two;
    otherwise those of the next smaller power of two, followed by every second one of the next
    larger. In an encoder, keys on both sides are penalised alike.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        _head_dim(embed_dim, num_heads)
        self.num_heads = num_heads
        self._register_table(device)

    def _computed(self, device: torch.device | str) -> Tensor:
        return alibi_slopes(self.num_heads, device)

    def score_options(self, device: torch.device) -> dict[str, Any]:
        return {"alibi_slopes": self.table_on(device)}

    def bias(self, d: Tensor) -> Tensor:
        return -self.table_on(d.device)[:, None] * d.abs()

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"


class T5Positions(AttentionPositions):
    """Adds a learned number for each head and bucket of distances (Raffel et al. 2020, section 2.1)
    to the scores.

    `relative_bias` is `[H, buckets]`, initialised as in T5 with standard deviation embed_dim^-0.5.
    causal: buckets for earlier keys alone, as in T5's decoder; else half of them are for keys after
    the query. max_distance: the distance from which on the last bucket is used.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        causal: bool = False,
        buckets: int = 32,
        max_distance: int = 128,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim < 1:
            raise ValueError(
                f"embed_dim and num_heads must be at least 1, got {embed_dim} and {num_heads}"
            )
        least = 2 if causal else 4
        if buckets < least or (not causal and buckets % 2):
            wanted = "at least 2 with causal=True" if causal else "even and at least 4"
            raise ValueError(f"buckets must be {wanted}, got {buckets}")
        exact = buckets // least
        if max_distance <= exact:
            raise ValueError(f"max_distance must be greater than {exact}, got {max_distance}")
        self.embed_dim = embed_dim
        self.causal = causal
        self.max_distance = max_distance
        self.relative_bias = nn.Parameter(
            torch.empty(num_heads, buckets, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.relative_bias, std=self.embed_dim**-0.5)

    def score_options(self, device: torch.device) -> dict[str, Any]:
        return {
            "relative_bias": self.relative_bias,
            "relative_buckets": "t5_causal" if self.causal else "t5",
            "relative_max_distance": self.max_distance,
        }

    def bias(self, d: Tensor) -> Tensor:
        count = self.relative_bias.shape[1]
        index = functional.t5_buckets(d, count, self.max_distance, self.causal)
        return self.relative_bias.index_select(1, index)

    def extra_repr(self) -> str:
        heads, buckets = self.relative_bias.shape
        return (
            f"num_heads={heads}, causal={self.causal}, buckets={buckets}, "
            f"max_distance={self.max_distance}"
        )


class RotaryPositions(ComputedTable, AttentionPositions):
    """Rotates pairs of columns of q and k by angles that grow with the position (Su et al. 2021).

    Columns 2i and 2i + 1 of a head are rotated by position * base^(-2i / D) (equation 15), in fp32
    and rounded to the dtype of q and k.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        base: float = 10_000.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        head_dim = _head_dim(embed_dim, num_heads)
        if head_dim % 2:
            raise ValueError(
                f"rotary positions need an even head dim, got {head_dim}: embed_dim={embed_dim} "
                f"with num_heads={num_heads}"
            )
        if not base > 0.0:
            raise ValueError(f"base must be greater than 0, got {base}")
        self.head_dim, self.base = head_dim, base
        self._register_table(device)

    def _computed(self, device: torch.device | str) -> Tensor:
        even = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device)
        exponents = even / self.head_dim
        return (self.base**-exponents).float()  # [D / 2]

    def rotated(self, q: Tensor, k: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        angles = at[:, None, None] * self.table_on(q.device)  # [S, 1, D / 2]
        cos, sin = angles.cos(), angles.sin()
        return _rotated(q, cos, sin), _rotated(k, cos, sin)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, base={self.base}"


def make_positions(
    kind: PositionKind,
    embed_dim: int,
    num_heads: int,
    *,
    causal: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> AttentionPositions:
    """The module of a kind; causal: for a decoder, whose T5 buckets are for earlier keys alone."""
    if kind == "alibi":
        return AlibiPositions(embed_dim, num_heads, device)
    if kind == "t5":
        return T5Positions(embed_dim, num_heads, causal=causal, device=device, dtype=dtype)
    if kind == "rotary":
        return RotaryPositions(embed_dim, num_heads, device=device)
    raise ValueError(f"positions must be one of {POSITION_KINDS}, got {kind!r}")


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> Tensor:
    """The slopes of `AlibiPositions`, fp32 `[H]` (Press et al. 2022, section 3 and its code)."""
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    more = [2.0 ** (-4.0 * (i + 1) / power) for i in range(0, 2 * power, 2)]
    return torch.tensor(slopes + more[: num_heads - power], dtype=torch.float32, device=device)


def _head_dim(embed_dim: int, num_heads: int) -> int:
    if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
        raise ValueError(
            f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}"
        )
    return embed_dim // num_heads


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).to(x.dtype)
