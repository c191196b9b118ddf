"""Calls that the Hopper attention and feed-forward network do not support."""

import pytest
import torch

from fastattn.ops.attention import sm90
from fastattn.ops.attention.calls import BackwardCall
from fastattn.ops.attention.calls import ForwardCall as AttentionCall
from fastattn.ops.ffn import sm90 as ffn
from fastattn.ops.ffn.calls import ForwardCall


def _call(M: int, D: int, E: int | None = None, N: int = 70, **given: object) -> BackwardCall:
    q, k = (torch.empty(2, 3, n, D, dtype=torch.bfloat16) for n in (M, N))
    v = k.new_empty(2, 3, N, D if E is None else E)
    needs = {"needs": (True, True, True, False, False, False)}
    return BackwardCall(None, None, q, q[..., 0], q, k, **{"v": v} | needs | given)  # type: ignore[arg-type]


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
    needed = (True,) * 6
    assert refuses(_call(65, 64, mask=mask.bfloat16(), needs=needed)) is None
    assert refuses(_call(65, 64, mask=mask, needs=needed)) is None
    assert "torch.float64" in refuses(_call(65, 64, mask=mask.double()))
    assert refuses(_call(65, 64, dropout_p=0.1)) is None
    assert "[2, 65]" in refuses(_call(65, 64, key_lengths=torch.ones(2, 65)))
    assert "got 264" in refuses(_call(65, 264))
    assert refuses(_call(65, 64, sinks=torch.ones(3), mask=mask.bool())) is None
    assert refuses(_call(65, 64, sinks=torch.ones(3), mask=mask)) is None
    distances = torch.ones(1, 3, 134)
    assert refuses(_call(65, 64, softcap=2.0, distance_bias=distances, mask=mask.bool())) is None
    assert refuses(_call(65, 64, softcap=2.0, distance_bias=distances, mask=mask)) is None
    column = torch.ones(1, 1, 65, 1)
    assert refuses(_call(65, 64, mask=column, softcap=2.0, distance_bias=distances)) is None
    assert refuses(_call(65, 64, sinks=torch.ones(3), mask=column)) is None


def _packed_call(T: int, D: int, sequences: int, **given: object) -> BackwardCall:
    q, k = (torch.empty(n, 3, D, dtype=torch.bfloat16) for n in (T, 70))
    offsets = torch.zeros(sequences + 1, dtype=torch.int32)
    packing = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 9}
    packing |= {"max_seqlen_k": 9} | given  # type: ignore[operator]
    return BackwardCall(None, None, q, q[..., 0], q, k, k, **packing)  # type: ignore[arg-type]


def test_packed_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90, "unavailable", lambda: None)
    refuses = sm90.attention_bwd_unsupported
    assert refuses(_packed_call(65, 64, 3)) is None
    assert refuses(_packed_call(65, 64, 3, dropout_p=0.1)) is None
    assert "got 264" in refuses(_packed_call(65, 264, 3))


def _paged_call(page: int, D: int = 64, **given: object) -> AttentionCall:
    q, k = (torch.empty(*shape, D, dtype=torch.bfloat16) for shape in ((2, 6, 5), (9, 3, page)))
    names = {"v": k, "block_table": torch.zeros(2, 4, dtype=torch.int32)}
    return AttentionCall(q, k, **names | given)  # type: ignore[arg-type]


def test_paged_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90, "unavailable", lambda: None)
    refuses = sm90.attention_fwd_unsupported
    for page in (16, 32, 64, 128, 256):
        assert refuses(_paged_call(page, key_lengths=torch.ones(2))) is None
    for page in (1, 8, 24, 512):
        assert f"pages of 16, 32, 64, 128, 256 keys, got {page}" in refuses(_paged_call(page))
    changed = {"softcap": 2.0, "sinks": torch.ones(6), "distance_bias": torch.ones(1, 6, 68)}
    assert refuses(_paged_call(16, 256, **changed)) is None
    assert "no mask" in refuses(_paged_call(16, mask=torch.ones(1, 1, 5, 64).bool()))
    assert "[2, 5]" in refuses(_paged_call(16, key_lengths=torch.ones(2, 5)))
    assert "got 264" in refuses(_paged_call(16, 264))
    wide = torch.empty(9, 3, 16, 128, dtype=torch.bfloat16)
    assert "contiguous last" in refuses(_paged_call(16, v=wide[..., ::2]))


def _ffn_call(rows: int, D: int, F: int, E: int, **given: object) -> ForwardCall:
    x, w1, w2 = (torch.empty(m, n, dtype=torch.bfloat16) for m, n in ((rows, D), (F, D), (E, F)))
    names = {"x": x, "w1": w1, "b1": None, "w2": w2, "b2": None, "residual": None,
             "activation": "gelu", "dropout_p": 0.0, "output_dropout_p": 0.0, "dropout_seed": None,
             "dropout_stream": 0}  # fmt: skip
    return ForwardCall(**(names | given))


def test_ffn_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ffn, "unavailable", lambda: None)
    refuses = ffn.ffn_fwd_unsupported
    assert refuses(_ffn_call(0, 8, 16, 24)) is None
    assert refuses(_ffn_call(65, 64, 72, 8, residual=torch.empty(65, 8))) is None
    assert "torch.float32" in refuses(_ffn_call(65, 64, 72, 8, x=torch.empty(65, 64)))
    residual = torch.empty(65, 8, dtype=torch.float16)
    assert "residual in torch.bfloat16" in refuses(_ffn_call(65, 64, 72, 8, residual=residual))
    for sizes in ((65, 7, 72, 8), (65, 64, 0, 8), (65, 64, 72, 12)):
        assert "multiples of 8" in refuses(_ffn_call(*sizes))
    across = torch.empty(64, 72, dtype=torch.bfloat16).t()
    assert "w1 with a contiguous" in refuses(_ffn_call(65, 64, 72, 8, w1=across))
    wide = torch.empty(65, 68, dtype=torch.bfloat16)
    assert "strides of x" in refuses(_ffn_call(65, 64, 72, 8, x=wide[:, :64]))
    assert "strides of x" in refuses(_ffn_call(65, 64, 72, 8, x=wide[:, None, :64]))
    assert refuses(_ffn_call(65, 64, 72, 8, x=torch.empty(5, 9, 64, dtype=wide.dtype))) is None
    assert "address" in refuses(_ffn_call(65, 64, 72, 8, x=wide.view(-1)[4:].view(-1)[:4160]
                                .view(65, 64)))  # fmt: skip
