"""Dense masks and dropout of the Hopper forward without a GPU.

The kernels that classify a mask run on the host, thread by thread (sm90_on_host), and so does
what every consumer thread does to its scores afterwards. Compared with the reference's definitions.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from sm90_on_host.build import build, missing
from torch import Tensor

from fastattn.ops.attention import prepared, reference
from fastattn.ops.attention.calls import ForwardCall
from fastattn.ops.attention.sm90_bias import as_readable, is_readable
from fastattn.testing import dropout_mask

TESTS = Path(__file__).resolve().parent
TYPES = {torch.bool: 0, torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
UNLIMITED = 1 << 20


@pytest.fixture(scope="session")
def native() -> ctypes.CDLL:
    if reason := missing():
        pytest.skip(reason)
    return build(TESTS / "sm90_masks.cpp").library


@dataclass(frozen=True)
class Case:
    """shape: of the mask, 1 where it is broadcast."""

    shape: tuple[int, int, int, int]
    dtype: torch.dtype = torch.bool
    B: int = 2
    H: int = 2
    M: int = 150
    N: int = 200
    head_dim: int = 128
    query_lengths: list[int] | None = None
    key_lengths: list[int] | None = None
    causal: int = 0
    window: tuple[int, int] = (-1, -1)
    holes: float = 0.9  # of 40 x 50 tiles: the share that is all allowed or all blocked
    prepared: bool = False
    transposed: bool = False

    def mask(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)

        def draw(p: float, shape: tuple[int, ...] = self.shape) -> Tensor:
            return torch.rand(shape, generator=generator) < p

        # Tiles of different kinds, cut off at the mask's edges.
        B, H, M, N = self.shape
        coarse = (B, H, -(-M // 40), -(-N // 50))
        kinds = torch.rand(coarse, generator=generator)
        kinds = kinds.repeat_interleave(40, 2).repeat_interleave(50, 3)[:, :, :M, :N]
        allowed = torch.where(kinds < self.holes / 2, False, kinds < self.holes) | (
            (kinds >= self.holes) & draw(0.6)
        )
        allowed[..., : N // 9] = False  # dead keys at the beginning
        if self.transposed:
            allowed = allowed.transpose(2, 3).contiguous().transpose(2, 3)
        if self.dtype == torch.bool:
            return allowed
        values = torch.randn(self.shape, generator=generator) * draw(0.4)
        return torch.where(allowed, values.to(self.dtype), torch.finfo(self.dtype).min)


WHOLE = (2, 2, 150, 200)
CASES = {
    "batch and head": Case(WHOLE),
    "shared by all": Case((1, 1, 150, 200)),
    "shared by batch entries, lengths": Case(
        (1, 2, 150, 200), query_lengths=[70, 150], key_lengths=[200, 90]
    ),
    "key padding": Case((2, 1, 1, 200), holes=0.0),
    "query padding": Case((2, 1, 150, 1)),
    "head dim 64": Case(WHOLE, M=150, head_dim=64, causal=1),
    "head dim 192": Case((2, 1, 150, 200), head_dim=192, causal=2, window=(60, -1)),
    "head dim 256": Case((1, 2, 150, 203), N=203, head_dim=256, key_lengths=[0, 203]),
    "keys inside rows": Case((1, 1, 150, 200), transposed=True, causal=1),
    "nothing allowed": Case((1, 1, 150, 200), holes=2.0),
    "own diagonals": Case(
        (1, 2, 150, 200), causal=3, window=(90, -1), query_lengths=[70, 150], key_lengths=[200, 90]
    ),
    "nothing blocked": Case((1, 1, 1, 1), causal=1, query_lengths=[3, 150]),
    "prepared": Case(WHOLE, prepared=True, key_lengths=[130, 200]),
    "prepared, key padding": Case((2, 1, 1, 200), prepared=True),
    "bias": Case(WHOLE, torch.bfloat16),
    "fp32 bias of heads": Case((1, 2, 150, 200), torch.float32, causal=2, key_lengths=[120, 200]),
    "bias of a row": Case((2, 1, 1, 200), torch.float32, head_dim=64),
    "bias at head dim 256": Case(
        (1, 2, 150, 200), torch.bfloat16, head_dim=256, key_lengths=[120, 200]
    ),
    "fp32 bias at head dim 192": Case((2, 1, 150, 200), torch.float32, head_dim=192, causal=1),
    "prepared bias": Case((1, 2, 150, 200), torch.bfloat16, prepared=True, window=(30, 40)),
}


def _pointer(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def _strides(x: Tensor) -> list[int]:
    return [0 if n == 1 else step for n, step in zip(x.shape, x.stride(), strict=True)]


def _numbers(kind: type, values: list[int]) -> ctypes.Array:
    return (kind * len(values))(*values)


@pytest.mark.parametrize("name", CASES)
def test_masked_scores(native: ctypes.CDLL, name: str) -> None:
    """Every pair that may attend has its score, every other -inf, and values are zeroed only where
    no row of a tile has weights, everywhere that no query of the head does.
    """
    c, scale = CASES[name], 0.37
    B, H, M, N = c.B, c.H, c.M, c.N
    mask = c.mask()
    lengths = [
        None if x is None else torch.tensor(x, dtype=torch.int32)
        for x in (c.key_lengths, c.query_lengths)
    ]
    q, k = torch.empty(B, H, M, 1), torch.empty(B, H, N, 1)
    windows = dict(zip(("window_left", "window_right"), c.window, strict=True))
    call = ForwardCall(q, k, k, mask, None, *lengths, causal=c.causal, **windows)
    allowed = reference.allowed_pairs(call).expand(B, H, M, N)
    s = torch.randn(B, H, M, N, generator=torch.Generator().manual_seed(2))

    left, right = (UNLIMITED if n < 0 else n for n in c.window)
    bounds = _numbers(
        ctypes.c_int, [left, 0 if c.causal else right, N - M if c.causal == 2 else 0, c.causal == 3]
    )
    sizes = [B, H, M, N, c.head_dim, TYPES[c.dtype], *mask.shape, *_strides(mask)]
    tiles = prepared.classify(mask) if c.prepared else None
    tile_strides = [0] * 4 if tiles is None else _strides(tiles)
    scores = torch.cat([s.flatten(), torch.full((s.numel(),), -torch.inf)])
    tile_rows = 192 if c.head_dim <= 64 and c.dtype == torch.bool else 128
    row_tiles = -(-M // tile_rows)
    live = torch.zeros(B, H, row_tiles, N, dtype=torch.uint8)
    native.classify_and_mask(
        _numbers(ctypes.c_int64, sizes), _pointer(mask), _pointer(tiles),
        _numbers(ctypes.c_int64, tile_strides), bounds, _pointer(lengths[1]), _pointer(lengths[0]),
        ctypes.c_float(scale), _pointer(scores), _pointer(live),
    )  # fmt: skip

    wanted = s
    if c.dtype != torch.bool:
        wanted = s * scale + torch.where(mask <= torch.finfo(c.dtype).min, 0, mask).float()
    result = scores[s.numel() :].view(B, H, M, N)
    wanted = torch.where(allowed, wanted, -torch.inf)
    torch.testing.assert_close(result, wanted, rtol=1e-6, atol=1e-6)
    for tile in range(row_tiles):
        alive = allowed[:, :, tile * tile_rows : (tile + 1) * tile_rows].any(2)
        assert torch.equal(live[:, :, tile].bool(), alive)


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_readable_masks(dtype: torch.dtype, step: int) -> None:
    """The backward's copy has the same values in rows that TMA reads, each line once."""
    mask = torch.randn(1, 2, 30, 86).to(dtype)[..., ::step].expand(3, 2, 30, 86 // step)
    assert not is_readable(mask)
    copy = as_readable(mask)
    assert is_readable(copy)
    assert copy.stride(0) == 0
    assert torch.equal(copy, mask)
    assert as_readable(copy) is copy


@pytest.mark.parametrize(("p", "threshold"), [(0.1, 26), (0.5, 128), (0.999, 255)])
def test_dropped_weights(native: ctypes.CDLL, p: float, threshold: int) -> None:
    """The fragments' units are those of the published mask."""
    seed, stream, B, H = 0x1234_5678_9ABC, 3, 2, 2
    mask = dropout_mask(torch.tensor([seed]), stream, p, (B, H, 192, 384))
    for b, h, row, column in ((0, 0, 0, 0), (1, 1, 64, 256), (0, 1, 128, 128)):
        kept = torch.full((64, 128), -1.0)
        native.drop(
            ctypes.c_int64(seed), stream, b, h, threshold, row, column, _pointer(kept)
        )  # fmt: skip
        assert torch.equal(kept.bool(), mask[b, h, row : row + 64, column : column + 128].bool())
