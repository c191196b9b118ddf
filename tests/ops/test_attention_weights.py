"""`attention_weights` on the samples of attention; with v the identity, attention returns them."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn.testing import all_specs
from fastattn.testing.spec import Inputs, Sample

SPEC = all_specs()["attention"]
# attention_weights has no dropout and takes no pages.
SAMPLES = [
    s for s in SPEC.samples if s.gradients and not s.inputs("cpu", torch.float32).get("dropout_p")
]
_NOT_TAKEN = ("v", "prepared", "return_lse", "dropout_p", "dropout_seed", "dropout_stream")


def _weights(inputs: Inputs, **chosen: Any) -> Tensor:
    inputs = {name: x for name, x in inputs.items() if name not in _NOT_TAKEN}
    return fastattn.attention_weights(**inputs, **chosen)


def _gradients(weights: Tensor, inputs: Inputs) -> list[Tensor]:
    wanted = [inputs[n] for n in ("q", "k", "mask") if n in inputs and inputs[n].requires_grad]
    loss = (weights * torch.linspace(-1, 1, weights.numel()).view_as(weights)).sum()
    return list(torch.autograd.grad(loss, wanted, materialize_grads=True))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_sample(sample: Sample) -> None:
    inputs = SPEC.widen(sample.inputs("cpu", torch.float32))
    B, K, N, _ = inputs["k"].shape
    identity = torch.eye(N, dtype=torch.float64).expand(B, K, N, N)
    expected = SPEC.torch_form(inputs | {"v": identity})
    assert expected is not None
    actual = _weights(inputs)
    close: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(actual, expected[0], **close)
    torch.testing.assert_close(_gradients(actual, inputs), _gradients(expected[0], inputs), **close)


@pytest.mark.parametrize("name", ["bshd", "gqa", "key_lengths_rows", "bias_dead", "bool_mask_rows"])
def test_selected_rows_and_heads(name: str) -> None:
    [sample] = [s for s in SAMPLES if s.name == name]
    inputs = sample.inputs("cpu", torch.float32)
    whole = _weights(inputs)
    assert whole.dtype == torch.float32
    H, M = whole.shape[1:3]
    for rows, heads in (
        (slice(3, 20, 4), slice(1, None)),
        (torch.tensor([M - 1, 0, 0], dtype=torch.int32), None),
        (None, torch.tensor([-1])),
        (torch.tensor([], dtype=torch.int64), slice(0, 0)),
    ):
        at_rows = torch.arange(M)[rows] if isinstance(rows, slice) else rows
        at_heads = torch.arange(H)[heads] if isinstance(heads, slice) else heads
        expected = whole if at_heads is None else whole[:, at_heads]
        expected = expected if at_rows is None else expected[:, :, at_rows]
        torch.testing.assert_close(_weights(inputs, rows=rows, heads=heads), expected)


@pytest.mark.parametrize("rows, strict", [
    (None, True), (slice(1, None), False), (slice(-2, None), True),
    (torch.tensor([0, -1]), False),
])  # fmt: skip
def test_export_keeps_sizes(rows: Tensor | slice | None, strict: bool) -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return fastattn.attention_weights(q, k, causal="bottom_right", rows=rows)

    def inputs(B: int, M: int, N: int) -> tuple[Tensor, Tensor]:
        return torch.randn(B, 4, M, 8), torch.randn(B, 2, N, 8)

    B, M, N = torch.export.Dim("B"), torch.export.Dim("M", min=3), torch.export.Dim("N")
    shapes = ({0: B, 2: M}, {0: B, 2: N})
    program = torch.export.export(Module(), inputs(2, 6, 7), dynamic_shapes=shapes, strict=strict)
    q, k = inputs(3, 9, 5)
    torch.testing.assert_close(program.module()(q, k), Module()(q, k))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_fp32(dtype: torch.dtype) -> None:
    [sample] = [s for s in SAMPLES if s.name == "bias_row"]
    inputs = sample.inputs("cpu", dtype)
    weights = _weights(inputs)
    assert weights.dtype == torch.float32
    exact = _weights(SPEC.widen(inputs))
    torch.testing.assert_close(weights.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changes, error, message", [
    ({"rows": torch.zeros(2)}, TypeError, "rows must be a slice or an int32 or int64 index"),
    ({"rows": 3}, TypeError, "rows must be a slice"),
    ({"heads": torch.zeros(1, 1).int()}, TypeError, "heads must be a slice"),
    ({"heads": torch.tensor([0]).to_sparse()}, TypeError, "heads must be a dense tensor"),
    ({"rows": slice(None, None, -1)}, ValueError, "rows must be a slice of integers with a"),
    ({"rows": slice(0.5, 2)}, TypeError, "rows must be a slice of integers with a step >= 1"),
    ({"rows": torch.tensor([0, 3])}, IndexError, "rows must hold positions from -3 to 2"),
    ({"heads": torch.tensor([-3])}, IndexError, "heads must hold positions from -2 to 1"),
    ({"q": torch.zeros(1, 2, 3)}, ValueError, "q must have 4 dimensions"),
    ({"k": torch.zeros(1, 2, 5, 7)}, ValueError, "k must have q's head dim 4, got 7"),
    ({"mask": torch.ones(9).bool()}, ValueError, "mask must be broadcastable"),
    ({"key_lengths": torch.ones(3).int()}, ValueError, r"key_lengths must be \[1\] or"),
    ({"causal": True}, ValueError, "ambiguous for 3 queries and 5 keys"),
    ({"scale": float("inf")}, ValueError, "scale must be finite"),
])  # fmt: skip
def test_errors_name_the_argument(changes, error, message):
    inputs: Inputs = {"q": torch.zeros(1, 2, 3, 4), "k": torch.zeros(1, 2, 5, 4)}
    with pytest.raises(error, match=message):
        fastattn.attention_weights(**inputs | changes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_the_softmax_in_fp32(dtype: torch.dtype) -> None:
    q, k = (3 * torch.randn(1, 2, 5, 8) for _ in range(2))
    expected = fastattn.attention_weights(q.to(dtype), k.to(dtype), scale=1e5)
    with torch.autocast("cpu", dtype=dtype):
        for function in (
            fastattn.attention_weights,
            torch.compile(fastattn.attention_weights, fullgraph=True, backend="eager"),
        ):
            weights = function(q, k, scale=1e5)
            assert weights.dtype == torch.float32 and weights.equal(expected)
    assert expected.isfinite().all()


def test_positions_may_be_mapped() -> None:
    q, rows = torch.randn(1, 2, 5, 4), torch.tensor([[0, -1], [3, 2]])
    found = torch.vmap(lambda rows: fastattn.attention_weights(q, q, rows=rows))(rows)
    expected = [fastattn.attention_weights(q, q, rows=chosen) for chosen in rows]
    torch.testing.assert_close(found, torch.stack(expected))
