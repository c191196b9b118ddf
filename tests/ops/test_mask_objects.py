"""Masks that are not plain tensors: torch's causal biases, subclasses of tensors, other objects."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import CausalVariant, causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask
from torch.testing._internal.two_tensor import TwoTensor

import fastattn

M, N = 5, 9
ALIGNED = [(causal_lower_right, "bottom_right"), (causal_upper_left, "top_left")]


class Annotated(Tensor):
    """A subclass with the default `__torch_function__`."""


class Functions(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def _inputs(queries: int = M, keys: int = N) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return (
        torch.randn(2, 4, queries, 8),
        torch.randn(2, 2, keys, 8),
        torch.randn(2, 2, keys, 8),
    )


@pytest.mark.parametrize("function, causal", ALIGNED)
@pytest.mark.parametrize("sizes", [(M, N), (N, N), (1, N)])
def test_a_causal_bias_is_an_alignment(function: Any, causal: Any, sizes: Any) -> None:
    q, k, v = _inputs(*sizes)
    bias = function(*sizes)
    expected = F.scaled_dot_product_attention(q, k, v, bias._materialize(), enable_gqa=True)
    torch.testing.assert_close(fastattn.attention(q, k, v, mask=bias), expected)
    weights = fastattn.attention_weights(q, k, mask=bias)
    torch.testing.assert_close(weights @ v.repeat_interleave(2, 1), expected)
    compiled = torch.compile(
        lambda *args: fastattn.attention(*args, mask=bias), fullgraph=True, backend="eager"
    )
    torch.testing.assert_close(compiled(q, k, v), expected)


@pytest.mark.parametrize("function, causal", ALIGNED)
@pytest.mark.parametrize(
    "options",
    [
        {"window": (2, 0)},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.1])},
        {"key_lengths": [9, 4]},
        {"dropout_p": 0.5, "dropout_seed": torch.tensor([3])},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_causal_bias_beside_other_arguments(function: Any, causal: Any, options: Any) -> None:
    q, k, v = _inputs()
    expected = fastattn.attention(q, k, v, causal=causal, **options)
    for given in (False, causal):
        actual = fastattn.attention(q, k, v, mask=function(M, N), causal=given, **options)
        assert torch.equal(actual, expected)


def test_a_causal_bias_that_does_not_fit() -> None:
    q, k, v = _inputs()
    for causal in ("top_left", "bottom_right_lengths", True):
        with pytest.raises(ValueError, match=r'causal must be False or "bottom_right" with mask='):
            fastattn.attention(q, k, v, mask=causal_lower_right(M, N), causal=causal)
    with pytest.raises(ValueError, match=r"5 queries and 9 keys, got causal_upper_left\(9, 9\)"):
        fastattn.attention_weights(q, k, mask=causal_upper_left(N, N))
    square = _inputs(N, N)
    for causal in (True, "top_left", "bottom_right"):
        mask = causal_lower_right(N, N)
        actual = fastattn.attention(*square, mask=mask, causal=causal)
        assert torch.equal(actual, fastattn.attention(*square, causal=True))


@pytest.mark.parametrize("mask", [torch.rand(M, N) > 0.3, torch.randn(M, N)], ids=["bool", "bias"])
def test_subclasses_whose_data_are_the_mask(mask: Tensor) -> None:
    q, k, v = _inputs()
    expected = fastattn.attention(q, k, v, mask=mask)
    parameter = nn.Parameter(mask, requires_grad=mask.is_floating_point())
    for given in (parameter, nn.Buffer(mask), mask.as_subclass(Annotated)):
        assert torch.equal(fastattn.attention(q, k, v, mask=given), expected)
        assert torch.equal(fastattn.prepare_mask(given).mask, mask)
    mapped = torch.vmap(lambda mask: fastattn.attention(q, k, v, mask=mask))(mask[None])
    torch.testing.assert_close(mapped[0], expected)
    twice: Any = fastattn.attention(q, k, v, mask=TwoTensor(mask, mask))
    assert torch.equal(twice.b, expected)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v, mask)]
        assert fastattn.attention(*fake[:3], mask=fake[3]).shape == q.shape


OTHERS: dict[str, Any] = {
    "functions": torch.zeros(M, N).as_subclass(Functions),
    "masked": torch.masked.masked_tensor(torch.zeros(M, N), torch.ones(M, N, dtype=torch.bool)),
    "view of a bias": causal_lower_right(M, N)[:, :1],
    "uninitialized": nn.UninitializedParameter(),
    "variant": CausalVariant.LOWER_RIGHT,
    "block mask": create_block_mask(
        lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu"
    ),
    "sparse": torch.zeros(M, N).to_sparse(),
    "nested": torch.nested.nested_tensor([torch.zeros(M, N)] * 2, layout=torch.jagged),
    "complex": torch.zeros(M, N, dtype=torch.complex64),
    "array": torch.zeros(M, N).numpy(),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_are_refused_by_name(name: str) -> None:
    q, k, v = _inputs()
    mask = OTHERS[name]
    with pytest.raises(TypeError, match="mask must "):
        fastattn.attention(q, k, v, mask=mask)
    with pytest.raises(TypeError, match="mask must "):
        fastattn.attention_weights(q, k, mask=mask)
    with pytest.raises(TypeError, match="mask must "):
        fastattn.prepare_mask(mask)


E, H = 16, 2


def _modules() -> dict[str, tuple[nn.Module, str]]:
    """Modules for one input, and the name of their mask."""
    layer = fastattn.nn.TransformerEncoderLayer(E, H, 16, 0.0, batch_first=True)
    return {
        "attention": (fastattn.nn.MultiheadAttention(E, H, batch_first=True), "attn_mask"),
        "positions": (
            fastattn.nn.PositionalMultiheadAttention(E, H, positions="alibi", batch_first=True),
            "attn_mask",
        ),
        "layer": (layer, "src_mask"),
        "stack": (fastattn.nn.TransformerEncoder(layer, 1), "mask"),
        "decoder": (
            fastattn.nn.TransformerDecoderLayer(E, H, 16, 0.0, batch_first=True), "tgt_mask"
        ),
    }  # fmt: skip


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("name", _modules())
def test_modules_and_mask_objects(name: str, need_weights: bool) -> None:
    """A subclass of tensors is handled by torch, what holds no mask is an error."""
    torch.manual_seed(0)
    module, argument = _modules()[name]
    count = {"attention": 3, "positions": 3, "decoder": 2}.get(name, 1)
    inputs = [torch.randn(1, M, E)] * count
    options = {"need_weights": need_weights} if count == 3 else {}
    values = torch.randn(M, M)
    results = [
        module(*inputs, **{argument: mask}, **options)
        for mask in (values, values.as_subclass(Functions))
        if name != "positions" or type(mask) is Tensor
    ]
    outputs = [y[0] if isinstance(y, tuple) else y for y in results]
    torch.testing.assert_close(outputs[-1].as_subclass(Tensor), outputs[0])
    for mask in (causal_lower_right(M, M), OTHERS["block mask"]):
        with pytest.raises(TypeError, match="mask must "):
            module(*inputs, **{argument: mask}, **options)
