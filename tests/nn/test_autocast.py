"""Transformers under autocast: what they cast and copy, and that neither dtypes at the boundaries
of modules nor the accuracy change by it.
"""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformer_twins import B, E, S, inputs, twins

import fastattn.nn as fnn

LAYERS, ROWS = 2, 20
BF16 = torch.bfloat16
both_orders = pytest.mark.parametrize("norm_first", [False, True])


class Casts(TorchDispatchMode):
    """The numbers of casts of activations between fp32 and bf16, and of copies of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        # Parameters have fewer rows.
        rows = args[0].numel() // E if isinstance(args[0], Tensor) else 0
        if name == "_to_copy" and rows >= 4 * E and args[0].dtype is not out.dtype:
            self.counts[f"to {out.dtype}".removeprefix("to torch.")] += 1
        elif name in ("stack", "cat", "clone", "slice_backward"):
            self.counts[name] += 1
        return out


def step(model: nn.Module, *args: Tensor, **options: Any) -> Tensor:
    with torch.autocast("cpu", BF16):
        result = model(*args, **options)
    loss(result).backward()
    return result


def loss(result: Tensor) -> Tensor:
    return (result * torch.linspace(-1, 1, result.numel()).view(result.shape).sin()).sum()


@both_orders
@pytest.mark.parametrize("packed", [False, True])
def test_casts_of_a_training_step(norm_first: bool, packed: bool) -> None:
    """The inputs of the products in two and three blocks are cast, the memory once, and their
    gradients.
    """
    _, fast = twins("Transformer", norm_first=norm_first, batch_first=True)
    src, tgt = (torch.randn(ROWS, 4, E, requires_grad=True) for _ in range(2))
    options = {"src_lengths": [4] * ROWS, "tgt_lengths": [4] * ROWS} if packed else {}
    with Casts() as casts:
        step(fast, src, tgt, **options)
    assert casts.counts["bfloat16"] == casts.counts["float32"] == 5 * LAYERS + 1
    # The gradients of q, k and v are copied once, into the order of their product.
    # Nor are parts of the gradient of a weight padded and added.
    assert casts.counts["clone"] == casts.counts["slice_backward"] == 0


@both_orders
@pytest.mark.parametrize("name", ["TransformerEncoder", "TransformerDecoder", "Transformer"])
def test_gradients_are_as_accurate_as_torchs(name: str, norm_first: bool) -> None:
    torch.manual_seed(1)
    reference, fast = twins(name, norm_first=norm_first, batch_first=True)
    exact, args = copy.deepcopy(reference).double(), inputs(name)

    def gradients(module: nn.Module, dtype: torch.dtype) -> Tensor:
        given = [x.detach().to(dtype).requires_grad_() for x in args]
        with torch.autocast("cpu", BF16):
            result = module(*given)
        loss(result).backward()
        leaves = *given, *module.parameters()
        return torch.cat([leaf.grad.flatten().double() for leaf in leaves])

    truth = gradients(exact, torch.float64)
    cost, error = ((gradients(m, torch.float32) - truth).norm() for m in (reference, fast))
    assert error <= 1.5 * cost


class Seen:
    """The dtypes of the tensors that hooked modules get."""

    def __init__(self, *modules: nn.Module) -> None:
        self.dtypes: list[torch.dtype] = []
        for module in modules:
            module.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = (*args, *kwargs.values())
        self.dtypes += [x.dtype for x in given if isinstance(x, Tensor) and x.is_floating_point()]


@both_orders
def test_modified_modules_get_the_dtypes_of_torch(norm_first: bool) -> None:
    reference, fast = twins("TransformerDecoder", norm_first=norm_first, batch_first=True)
    seen = [
        Seen(model.layers[0], model.layers[1].multihead_attn, model.layers[1].linear1)
        for model in (reference, fast)
    ]
    for model in (reference, fast):
        with torch.autocast("cpu", BF16):
            model(*inputs("TransformerDecoder"))
    assert set(seen[0].dtypes) == set(seen[1].dtypes) == {torch.float32}


# -- set_autocast_residual ------------------------------------------------------------------------
@both_orders
@pytest.mark.parametrize("name", ["TransformerEncoder", "TransformerDecoder", "Transformer"])
def test_residual_in_the_dtype_of_autocast(name: str, norm_first: bool) -> None:
    """As accurate as torch's layers on bf16 inputs, whose residual stream on a CPU is bf16, too."""
    torch.manual_seed(0)
    reference, fast = twins(name, norm_first=norm_first, batch_first=True)
    args = inputs(name)
    truth = copy.deepcopy(reference).double()(*(x.double() for x in args))
    expected = fast(*args)
    fnn.set_autocast_residual(fast)
    assert torch.equal(fast(*args), expected)  # nothing changes without autocast
    with torch.autocast("cpu", BF16):
        result = fast(*args)
        low = reference(*(x.to(BF16) for x in args))
        stack = fast.encoder if name == "Transformer" else fast
        assert stack.layers[0](*args[: 2 if name == "TransformerDecoder" else 1]).dtype is BF16
    assert result.dtype is torch.float32
    assert (result.double() - truth).norm() <= 2 * (low.double() - truth).norm()
    fnn.set_autocast_residual(fast, False)
    with torch.autocast("cpu", BF16):
        assert not torch.equal(fast(*args), result)


@both_orders
def test_casts_with_a_residual_in_the_dtype_of_autocast(norm_first: bool) -> None:
    """Both inputs, the memory, and the results of both stacks, or their gradients."""
    _, fast = twins("Transformer", norm_first=norm_first, batch_first=True)
    fnn.set_autocast_residual(fast)
    with Casts() as casts:
        step(fast, *(torch.randn(ROWS, 4, E, requires_grad=True) for _ in range(2)))
    assert casts.counts["bfloat16"] == casts.counts["float32"] == 5


@pytest.mark.parametrize("residual", [False, True])
def test_packed_rows(residual: bool) -> None:
    _, fast = twins("Transformer", batch_first=True)
    fnn.set_autocast_residual(fast, residual)
    src, tgt = inputs("Transformer")
    with torch.autocast("cpu", BF16):
        padded = fast(src, tgt)
        packed = fast(src, tgt, src_lengths=[S] * B, tgt_lengths=[tgt.shape[1]] * B)
    assert packed.dtype is torch.float32
    torch.testing.assert_close(packed, padded, atol=0.05, rtol=0.05)


def test_models_without_layers() -> None:
    with pytest.raises(ValueError, match="model must contain Transformer layers"):
        fnn.set_autocast_residual(nn.Linear(E, E))
