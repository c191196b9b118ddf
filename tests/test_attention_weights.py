"""`attention_weights` over the samples of attention: values with an identity, which shows them."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn.testing import all_specs
from fastattn.testing.spec import Inputs, Sample

SPEC = all_specs()["attention"]
# Weights are asked for without dropout.
SAMPLES = [s for s in SPEC.samples if not s.inputs("cpu", torch.float32).get("dropout_p")]
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
    theirs = SPEC.torch_form(inputs | {"v": identity})
    assert theirs is not None
    ours = _weights(inputs)
    close: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(ours, theirs[0], **close)
    torch.testing.assert_close(_gradients(ours, inputs), _gradients(theirs[0], inputs), **close)


@pytest.mark.parametrize("name", ["bshd", "gqa", "key_lengths_rows", "bias_dead", "bool_mask_rows"])
def test_chosen_rows_and_heads(name: str) -> None:
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single(dtype: torch.dtype) -> None:
    [sample] = [s for s in SAMPLES if s.name == "bias_row"]
    inputs = sample.inputs("cpu", dtype)
    weights = _weights(inputs)
    assert weights.dtype == torch.float32
    exact = _weights(SPEC.widen(inputs))
    torch.testing.assert_close(weights.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"rows": torch.zeros(2)}, TypeError, "rows must be a slice or an int32 or int64 index"),
        ({"rows": 3}, TypeError, "rows must be a slice"),
        ({"heads": torch.zeros(1, 1).int()}, TypeError, "heads must be a slice"),
        ({"q": torch.zeros(1, 2, 3)}, ValueError, "q must have 4 dimensions"),
        ({"k": torch.zeros(1, 2, 5, 7)}, ValueError, "k must have q's head dim 4, got 7"),
        ({"mask": torch.ones(9).bool()}, ValueError, "mask must be broadcastable"),
        ({"key_lengths": torch.ones(3).int()}, ValueError, r"key_lengths must be \[1\] or"),
        ({"causal": True}, ValueError, "ambiguous for 3 queries and 5 keys"),
        ({"scale": float("inf")}, ValueError, "scale must be finite"),
    ],
)
def test_errors_name_the_argument(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    inputs: Inputs = {"q": torch.zeros(1, 2, 3, 4), "k": torch.zeros(1, 2, 5, 4)}
    with pytest.raises(error, match=message):
        fastattn.attention_weights(**inputs | changes)
