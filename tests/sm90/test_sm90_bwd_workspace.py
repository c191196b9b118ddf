"""What the Hopper attention backward refuses, and the memory that it asks for."""

import ctypes

import pytest
import torch
from sm90_model import backward
from sm90_model.backward import CONFIGS
from torch import Tensor

from fastattn.ops.attention import sm90
from fastattn.ops.attention.calls import BackwardCall, PackedBackwardCall


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return backward.arithmetic(tmp_path_factory.mktemp("shim"))


def _call(M: int, D: int, E: int | None = None, N: int = 70, **given: object) -> BackwardCall:
    q, k = (torch.empty(2, 3, n, D, dtype=torch.bfloat16) for n in (M, N))
    v = k.new_empty(2, 3, N, D if E is None else E)
    names = {"dout": None, "dlse": None, "q": q, "k": k, "v": v, "mask": None, "mask_tiles": None,
             "key_lengths": None, "query_lengths": None, "out": None, "lse": None, "causal": 0,
             "window_left": -1, "window_right": -1, "scale": 1.0, "dropout_p": 0.0,
             "dropout_seed": None, "dropout_stream": 0,
             "needs": (True, True, True, False)}  # fmt: skip
    return BackwardCall(**(names | given))


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90, "unavailable", lambda: None)
    refuses = sm90.attention_bwd_unsupported
    assert refuses(_call(65, 64)) is None
    assert refuses(_call(65, 256, 8, key_lengths=torch.ones(2))) is None
    mask = torch.ones(1, 1, 65, 70)
    assert refuses(_call(65, 64, mask=mask.bool())) is None
    assert refuses(_call(65, 64, mask=mask.bool(), dropout_p=0.1)) is None
    assert refuses(_call(65, 64, mask=mask, dropout_p=0.1)) is None
    assert refuses(_call(65, 64, mask=mask)) is None
    needed = (True, True, True, True)
    assert refuses(_call(65, 64, mask=mask.bfloat16(), needs=needed)) is None
    assert refuses(_call(65, 64, mask=mask, needs=needed)) is None
    assert "torch.float64" in refuses(_call(65, 64, mask=mask.double()))
    assert refuses(_call(65, 64, dropout_p=0.1)) is None
    assert "[2, 65]" in refuses(_call(65, 64, key_lengths=torch.ones(2, 65)))
    assert "got 264" in refuses(_call(65, 264))


def _packed_call(T: int, D: int, sequences: int, **given: object) -> PackedBackwardCall:
    q, k = (torch.empty(n, 3, D, dtype=torch.bfloat16) for n in (T, 70))
    offsets = torch.zeros(sequences + 1, dtype=torch.int32)
    names = {"dout": None, "dlse": None, "q": q, "k": k, "v": k, "cu_seqlens_q": offsets,
             "cu_seqlens_k": offsets, "out": None, "lse": None, "max_seqlen_q": 9,
             "max_seqlen_k": 9, "causal": 0, "window_left": -1, "window_right": -1, "scale": 1.0,
             "dropout_p": 0.0, "dropout_seed": None, "dropout_stream": 0,
             "needs": (True, True, True)}  # fmt: skip
    return PackedBackwardCall(**(names | given))


def test_packed_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90, "unavailable", lambda: None)
    refuses = sm90.attention_varlen_bwd_unsupported
    assert refuses(_packed_call(65, 64, 3)) is None
    assert refuses(_packed_call(65, 64, 3, dropout_p=0.1)) is None
    assert "got 264" in refuses(_packed_call(65, 264, 3))


@pytest.mark.parametrize("M", [1, 63, 64, 65, 80, 96, 128, 129, 1000, 4097])
@pytest.mark.parametrize("sequences", [0, 1, 7])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_workspace_holds_every_block(
    native: ctypes.CDLL, M: int, sequences: int, dropout_p: float
) -> None:
    drops = {"dropout_p": dropout_p}
    for head_dim, c in CONFIGS.items():
        if sequences:
            workspace = sm90.attention_varlen_bwd_workspace(
                _packed_call(M, head_dim, sequences, **drops)
            )
            blocks, heads = native.packed_blocks(M, sequences, c.rows), 3
        else:
            workspace = sm90.attention_bwd_workspace(_call(M, head_dim, **drops))
            blocks, heads = -(-M // c.rows), 2 * 3
        lse_delta, dq_sum, dq_semaphores = (shape for shape, _, _ in workspace)
        # lse, delta, and a word for every two rows.
        assert 2 * lse_delta[0] >= (5 if dropout_p else 4) * heads * blocks * c.rows
        assert dq_sum[0] * dq_sum[1] >= heads * blocks * c.rows * head_dim
        assert dq_semaphores[0] >= 1 + heads * blocks * c.groups


@pytest.mark.parametrize("shape", [(2, 3, 65, 270), (2, 1, 1, 270), (1, 3, 65, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("lengths", [None, torch.ones(2)])
def test_workspace_of_a_mask(
    native: ctypes.CDLL, shape: tuple[int, ...], lengths: Tensor | None
) -> None:
    """Python allocates what the kernels lay out."""
    native.mask_words.restype = ctypes.c_longlong
    mask = torch.ones(shape, dtype=torch.bool)
    for head_dim in (8, 64, 96, 128, 192, 256):
        call = _call(65, head_dim, N=270, mask=mask, key_lengths=lengths)
        (words,), dtype, zeroed = sm90.attention_bwd_workspace(call)[-1]
        split = lengths is not None
        B, H, _, keys = shape
        assert words == native.mask_words(B, H, keys, 2, split, 65, 270, head_dim)
        assert (dtype, zeroed) == (torch.int32, False)


@pytest.mark.parametrize(
    ("shape", "count"), [((2, 3, 65, 270), 1), ((1, 3, 65, 270), 2), ((1, 1, 1, 270), 6)]
)
def test_splits_of_a_mask_gradient(shape: tuple[int, ...], count: int) -> None:
    """Where tiles are few, what they are broadcast over is shared out; never more than there is."""
    mask = torch.ones(shape)
    for needed in (False, True):
        call = _call(65, 64, N=270, mask=mask, needs=(True, True, True, needed))
        workspace = sm90.attention_bwd_workspace(call)[4:]
        wanted = [((count, *shape), torch.float32, False)] if needed and count > 1 else []
        assert workspace == wanted
