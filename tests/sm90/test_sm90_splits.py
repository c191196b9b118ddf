"""When the Hopper forward uses split-KV: host arithmetic alone, no GPU."""

import pytest
import torch

from fastattn.ops.attention import sm90_workspace
from fastattn.ops.attention.calls import ForwardCall, PackedForwardCall

MULTIPROCESSORS = 132  # of an H200, for which other devices stand in


def _workspace(q, k, v, *, causal=0, window=(-1, -1), key_lengths=None, dropout_p=0.0):
    options = (causal, *window, 0.1, dropout_p, None, 0)
    call = ForwardCall(q, k, v, None, None, key_lengths, None, *options)
    return sm90_workspace.attention_fwd_workspace(call)


def _splits(workspace) -> int:
    return workspace[1][0][0] if len(workspace) > 1 else 1


def _decoding(B: int, H: int, K: int, M: int, N: int, D: int = 128):
    return (
        torch.empty(B, M, H, D, device="meta").transpose(1, 2),
        torch.empty(B, K, N, D, device="meta"),
        torch.empty(B, K, N, D, device="meta"),
    )


@pytest.mark.parametrize("tiles", [1, 3, 8, 16, 40, 57, 90])
@pytest.mark.parametrize("blocks", [8, 64, 1000])
@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("multiprocessors", [78, 114, 132])
def test_splits_fill_the_multiprocessors(
    tiles: int, blocks: int, rows: int, multiprocessors: int
) -> None:
    splits = sm90_workspace.num_splits(tiles, rows, blocks, 128, multiprocessors)
    assert 1 <= splits <= 128
    if splits > 1:
        assert blocks // splits >= 2
        assert blocks * 128 // splits >= 8 * rows

    def share(count: int) -> float:
        """The share of busy multiprocessors in all waves."""
        return tiles * count / (multiprocessors * -(-tiles * count // multiprocessors))

    assert share(splits) >= share(1)
    most = min(128, blocks // max(2, 8 * rows // 128))
    if most >= 2 and tiles < 0.8 * multiprocessors:
        assert share(splits) >= 0.85 * max(map(share, range(1, most + 1)))


@pytest.mark.parametrize(
    ("shape", "options", "cut"),
    [
        ((1, 16, 16, 1, 16384), {}, True),
        ((1, 32, 8, 1, 16384), {"causal": 2}, True),
        ((1, 32, 8, 1, 16384), {"causal": 1}, False),  # one key
        ((1, 32, 8, 1, 16384), {"causal": 2, "window": (500, 0)}, False),
        ((64, 32, 8, 1, 8192), {}, False),  # tiles enough
        ((4, 32, 8, 1, 8192), {}, True),
        ((4, 32, 8, 1, 512), {}, False),  # too short
        ((1, 8, 8, 1024, 1024), {}, False),
        ((1, 8, 8, 128, 16384), {}, True),
        ((1, 16, 16, 1, 16384), {"dropout_p": 0.1}, False),
    ],
)
def test_what_is_cut(shape: tuple[int, ...], options: dict, cut: bool) -> None:
    q, k, v = _decoding(*shape)
    workspace = _workspace(q, k, v, **options)
    assert (_splits(workspace) > 1 and workspace[1][1] == torch.float32) == cut
    if cut:
        (_, words), dtype, zeroed = workspace[1]
        assert words == q.shape[0] * q.shape[1] * q.shape[2] * (v.shape[3] + 2)
        assert (dtype, zeroed) == (torch.float32, False)
        assert workspace[0][0] in ((0,), (1,))


def test_merged_heads_count_once() -> None:
    """Query heads that share keys form one tile: 8 of them, not 32, fill the multiprocessors."""
    merged = _workspace(*_decoding(1, 32, 8, 1, 1 << 17))
    assert 0.8 * MULTIPROCESSORS < 8 * _splits(merged) <= MULTIPROCESSORS


def test_no_wave_is_left_half_empty() -> None:
    """32 tiles in 4 splits are one wave of an H200; in 7 they would be two."""
    assert _splits(_workspace(*_decoding(4, 32, 8, 1, 8192))) == 4


@pytest.mark.parametrize("shape", [(0, 4, 4, 1, 9000), (2, 0, 0, 1, 9000), (2, 4, 4, 0, 9000)])
def test_nothing_to_compute(shape: tuple[int, ...]) -> None:
    assert _workspace(*_decoding(*shape)) == []


@pytest.mark.parametrize(
    ("longest", "sequences", "keys", "cut", "ordered"),
    [
        (1, 4, 4096, True, False),
        (1, 500, 4096, False, True),
        (500, 16, 500, False, False),  # no tile is long
        (2048, 1, 2048, False, False),
        (2048, 2, 2048, False, True),
    ],
)
def test_packed(longest: int, sequences: int, keys: int, cut: bool, ordered: bool) -> None:
    q = torch.empty(longest * sequences, 8, 64, device="meta")
    k = torch.empty(sequences * keys, 8, 64, device="meta")
    offsets = torch.empty(sequences + 1, dtype=torch.int32, device="meta")
    call = PackedForwardCall(q, k, k, offsets, offsets, longest, keys, 0, -1, -1, 0.1, 0.0, None, 0)
    workspace = sm90_workspace.attention_varlen_fwd_workspace(call)
    assert (len(workspace) == 2) == cut
    assert workspace[0][0] == (1 + sequences * ordered,)
