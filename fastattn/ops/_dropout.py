"""The dropout bits of every op: a pure function of seed, stream and position.

One 32-bit hash decides four weights, one byte each. In attention these are the weights at rows
{r, r + 8} x columns {c, c + 8} of a 16 x 16 block, which one thread holds in a tensor-core
fragment. Row-wise ops use one hash for four neighbouring columns. csrc/common/dropout.h has the
same arithmetic (modulo 2^32) in C++; tests compare the two.

Attention's seed may have an origin: int64 [5] holds the seed, and the index of the first sequence,
head, query and key in a larger attention. The bits are those at these positions.
"""

import torch
from torch import Tensor

ROW_TAG = 0x243F6A88
COLUMN_TAG = 0x85A308D3
GOLDEN = 0x9E3779B9
# The bit that separates the streams of the two dropouts of an ffn call; public streams are smaller.
SECOND_STREAM = 1 << 31
_WORD = 0xFFFFFFFF


def draw_seed(device: torch.device | str) -> Tensor:
    """int64 [1] from PyTorch's random generator of `device`."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def threshold(p: float) -> int:
    """A weight is dropped if its byte is below this: floor(256 p + 0.5), but at least 1 if p > 0
    and at most 255 if p < 1.
    """
    if p <= 0.0:
        return 0
    if p >= 1.0:
        return 256
    return min(255, max(1, int(256.0 * p + 0.5)))


def keep_scale(p: float) -> float:
    """The factor of kept weights: 1 / (probability of keeping a weight), 0 if all are dropped."""
    t = threshold(p)
    return 0.0 if t == 256 else 256.0 / (256 - t)


# 32-bit words are held in int64 tensors. Products wrap modulo 2^64, so their low 32 bits are right.
def finalise(x: Tensor) -> Tensor:
    """A bijection of 32-bit words with good avalanche (Wellons's hash "lowbias32")."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def absorb(state: Tensor | int, value: Tensor | int) -> Tensor:
    return finalise(((state ^ value) + GOLDEN) & _WORD)  # type: ignore[arg-type]


def stream_key(tag: int, seed: Tensor, stream: int) -> Tensor:
    """The key of a seed and a stream. seed: int64 [1]; result: int64 [1]."""
    low, high = seed & _WORD, (seed >> 32) & _WORD
    return absorb(absorb(absorb(tag, low), high), stream)


def row_key(seed: Tensor, stream: int, b: Tensor | int, h: Tensor | int, unit: Tensor) -> Tensor:
    return absorb(absorb(absorb(stream_key(ROW_TAG, seed, stream), b), h), unit)


def column_key(seed: Tensor, stream: int, unit: Tensor) -> Tensor:
    return absorb(stream_key(COLUMN_TAG, seed, stream), unit)


def _from_origin(
    seed: Tensor, b: Tensor, h: Tensor, row_unit: Tensor, column_unit: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The seed without its origin, and the indices in the larger attention. `absorb` takes them
    modulo 2^32, so that sequences and heads repeat after 2^32, queries and keys after 2^33.
    """
    if seed.shape[0] == 1:
        return seed, b, h, row_unit, column_unit
    first_b, first_h, first_row, first_column = seed[1:].unbind()
    row_unit = row_unit + (first_row >> 4) * 8  # of the multiple of 16 at or below it
    column_unit = column_unit + (first_column >> 4) * 8
    return seed[:1], b + first_b, h + first_h, row_unit, column_unit


def attention_keep(seed: Tensor, stream: int, p: float, B: int, H: int, M: int, N: int) -> Tensor:
    """Which attention weights are kept: bool [B, H, M, N] on the seed's device."""
    b = torch.arange(B, device=seed.device).view(B, 1, 1)
    h = torch.arange(H, device=seed.device).view(1, H, 1)
    i = torch.arange(M, device=seed.device)
    j = torch.arange(N, device=seed.device)
    units = i // 16 * 8 + i % 8, j // 16 * 8 + j % 8
    seed, b, h, row_unit, column_unit = _from_origin(seed, b, h, *units)
    rows = row_key(seed, stream, b, h, row_unit)  # [B, H, M]
    columns = column_key(seed, stream, column_unit)  # [N]
    word = finalise(rows[..., None] ^ columns)  # [B, H, M, N]
    index = 2 * (i // 8 % 2)[:, None] + (j // 8 % 2)  # [M, N]
    return (word >> (8 * index)) & 0xFF >= threshold(p)


def row_keep(seed: Tensor, stream: int, p: float, rows: int, columns: int) -> Tensor:
    """Which elements of a row-wise op are kept: bool [rows, columns] on the seed's device."""
    r = torch.arange(rows, device=seed.device)
    c = torch.arange(columns, device=seed.device)
    key = row_key(seed, stream, r >> 32, 0, r & _WORD)  # [rows]
    word = finalise(key[:, None] ^ column_key(seed, stream, c // 4))  # [rows, columns]
    return (word >> (8 * (c % 4))) & 0xFF >= threshold(p)


# -- the same bits, faster ------------------------------------------------------------------------
# Each word is computed once, in 32 bits and in place, and read as four bytes (little-endian). Bytes
# are compared with threshold - 1, because 256 does not fit a byte.
def _as_int32(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x


def _finalised_words(rows: Tensor, columns: Tensor) -> Tensor:
    """finalise(rows ^ columns) as int32. Right shifts of int32 copy the sign, hence the masks."""
    x = rows.to(torch.int32)[..., None] ^ columns.to(torch.int32)
    shifted = x >> 16
    x ^= shifted.bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= shifted.copy_(x).bitwise_right_shift_(15).bitwise_and_(0x1FFFF)
    x *= _as_int32(0x846CA68B)
    x ^= shifted.copy_(x).bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    return x


def attention_dropped(
    seed: Tensor,
    stream: int,
    p: float,
    B: int,
    H: int,
    M: int,
    N: int,
    first: int = 0,
    first_head: int = 0,
    first_row: int = 0,
) -> Tensor:
    """Which attention weights are dropped: bool [B, H, M, N]. first, first_head, first_row: the
    first indices of the batch, of the heads and of the rows, the last one a multiple of 16; they
    are added to the seed's origin.
    """
    b = torch.arange(first, first + B, device=seed.device).view(B, 1, 1)
    h = torch.arange(first_head, first_head + H, device=seed.device).view(1, H, 1)
    R, C = (M + 15) // 16, (N + 15) // 16
    row_unit = torch.arange(first_row // 2, first_row // 2 + 8 * R, device=seed.device)
    column_unit = torch.arange(8 * C, device=seed.device)
    seed, b, h, row_unit, column_unit = _from_origin(seed, b, h, row_unit, column_unit)
    rows = row_key(seed, stream, b, h, row_unit)
    columns = column_key(seed, stream, column_unit)
    bytes_ = _finalised_words(rows, columns).view(torch.uint8).view(B, H, R, 8, C, 8, 2, 2)
    dropped = bytes_.permute(0, 1, 2, 6, 3, 4, 7, 5) <= threshold(p) - 1
    return dropped.reshape(B, H, 16 * R, 16 * C)[:, :, :M, :N]


def rows_dropped(seed: Tensor, stream: int, p: float, rows: int, columns: int) -> Tensor:
    """Which elements of a row-wise op are dropped: bool [rows, columns]."""
    if rows == 0:
        return torch.empty(0, columns, dtype=torch.bool, device=seed.device)
    r = torch.arange(rows, device=seed.device)
    key = row_key(seed, stream, r >> 32, 0, r & _WORD)
    units = column_key(seed, stream, torch.arange((columns + 3) // 4, device=seed.device))
    return _finalised_words(key, units).view(torch.uint8)[:, :columns] <= threshold(p) - 1


def drop_rows(x: Tensor, p: float, seed: Tensor | None, stream: int) -> Tensor:
    """x [..., N] with dropped elements 0 and kept ones scaled."""
    if p == 0.0:
        return x
    assert seed is not None
    N = x.shape[-1]
    keep = row_keep(seed, stream, p, x.numel() // N if N else 0, N).view(x.shape)
    return torch.where(keep, x * keep_scale(p), torch.zeros_like(x))
