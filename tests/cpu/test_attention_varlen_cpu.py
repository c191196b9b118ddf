"""Packed attention's CPU kernels beyond the samples that test_ops.py runs: every instruction
set, bits that depend neither on threads nor on the other sequences, layouts, memory.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from cpu_library import assert_threads_change_no_bit, needs_library
from torch import Tensor

import fastattn
from fastattn.testing.poison import poisoned_results
from fastattn.testing.spec import all_specs

SPEC = all_specs()["attention_varlen"]
pytestmark = needs_library
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _offsets(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _randn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _outputs_and_gradients(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, **options: Any
) -> list[Tensor]:
    """Outputs and gradients, also of options that require them."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    learned = [x for x in options.values() if isinstance(x, Tensor) and x.requires_grad]
    longest = (int(cu.diff().max()) if cu.numel() > 1 else 0 for cu in (cu_q, cu_k))
    outputs = fastattn.attention_varlen(
        *inputs, cu_q, cu_k, *longest, return_lse=True, backend="cpu", **options
    )
    gradients = [_randn(*x.shape, dtype=x.dtype, seed=9) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, [*inputs, *learned], gradients)]


LENGTHS = {
    "tiles": ((200, 0, 33, 1, 150), (200, 5, 33, 130, 0)),
    "few heads": ((500,), (700,)),
    "one query each": ((1, 1, 0, 1), (2500, 40, 7, 1024)),
    "few queries each": ((4, 1, 0, 3), (2500, 40, 7, 1024)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_threads_change_no_bit(lengths, dtype):
    cu_q, cu_k = (_offsets(*x) for x in lengths)
    q = _randn(int(cu_q[-1]) + 3, 4, 40, dtype=dtype, seed=1)
    k = _randn(int(cu_k[-1]) + 5, 2, 40, dtype=dtype, seed=2)
    v = _randn(int(cu_k[-1]) + 5, 2, 24, dtype=dtype, seed=3)
    options = {
        "causal": "bottom_right", "window": (600, -1), "dropout_p": 0.1,
        "dropout_seed": torch.tensor([5]),
        "sinks": _randn(4, dtype=torch.float32, seed=4).requires_grad_(),
        "alibi_slopes": _randn(4, dtype=torch.float32, seed=5).requires_grad_(), "softcap": 2.0,
    }  # fmt: skip
    assert_threads_change_no_bit(lambda: _outputs_and_gradients(q, k, v, cu_q, cu_k, **options))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_equals_a_call_of_attention(dtype: torch.dtype) -> None:
    """The same bits beside any other sequences; those of few queries run the decoding kernel."""
    lengths, key_lengths = (130, 1, 64, 1, 4, 3), (130, 2100, 200, 3, 1500, 60)
    cu_q, cu_k = _offsets(*lengths), _offsets(*key_lengths)
    q = _randn(sum(lengths), 4, 32, dtype=dtype, seed=1)
    k, v = (_randn(sum(key_lengths), 2, 32, dtype=dtype, seed=s) for s in (2, 3))
    options: dict[str, Any] = {"causal": "bottom_right", "return_lse": True, "backend": "cpu"}
    options |= {"softcap": 3.0, "sinks": torch.arange(4.0), "alibi_slopes": torch.arange(4.0) / 50}
    packed = fastattn.attention_varlen(q, k, v, cu_q, cu_k, 130, 2100, **options)
    bounds = zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)
    for (q0, q1), (k0, k1) in bounds:
        heads_first = (x[None].transpose(1, 2) for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
        out, lse = fastattn.attention(*heads_first, **options)
        assert torch.equal(packed[0][q0:q1], out[0].transpose(0, 1))
        assert torch.equal(packed[1][:, q0:q1], lse[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wanted", "qkv")
def test_a_single_gradient(dtype: torch.dtype, wanted: str) -> None:
    """A gradient computed alone, in fewer passes, has the same bits. In groups of heads, with tiles
    after a short sequence.
    """
    lengths, key_lengths = (20, 200, 5, 97), (130, 20, 300, 5)
    inputs = {"q": _randn(sum(lengths), 4, 16, dtype=dtype, seed=1)}
    for seed, name in enumerate("kv"):
        inputs[name] = _randn(sum(key_lengths), 2, 16, dtype=dtype, seed=seed)

    def gradients(names: str) -> dict[str, Tensor]:
        given = {n: x.detach().requires_grad_(n in names) for n, x in inputs.items()}
        offsets = (_offsets(*lengths), _offsets(*key_lengths))
        with poisoned_results():
            out = fastattn.attention_varlen(
                **given, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], max_seqlen_q=200,
                max_seqlen_k=300, backend="cpu",
            )  # fmt: skip
            wanted = torch.autograd.grad(out.float().square().sum(), [given[n] for n in names])
        return dict(zip(names, wanted, strict=True))

    together = gradients("qkv")
    assert all(x.isfinite().all() for x in together.values())
    assert torch.equal(gradients(wanted)[wanted], together[wanted])


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_projections_of_one_tensor(dtype: torch.dtype) -> None:
    """q, k and v as views of [T, 3, H, D] give the bits of their copies."""
    cu = _offsets(70, 33)
    views = _randn(103, 3, 2, 24, dtype=dtype, seed=1).unbind(1)
    assert not views[0].is_contiguous()
    strided = _outputs_and_gradients(*views, cu, cu, causal=True)
    dense = _outputs_and_gradients(*(x.contiguous() for x in views), cu, cu, causal=True)
    for one, other in zip(strided, dense, strict=True):
        assert torch.equal(one, other)
