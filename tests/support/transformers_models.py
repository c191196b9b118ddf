"""Tiny random models of `transformers`, and how their results compare with eager attention."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fastattn.integrations import huggingface

VOCABULARY = 40
SMALL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA_SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48,
}  # fmt: skip


def kind_of(model: str, config: str, **options: Any) -> Callable[[], Any]:
    """A function that returns the classes' pair (model, configuration with these options)."""

    def make() -> Any:
        if not hasattr(transformers, model):
            pytest.skip(f"these transformers have no {model}")
        return getattr(transformers, model), getattr(transformers, config)(**options)

    return make


def build(make: Callable[[], Any], implementation: str) -> nn.Module:
    huggingface.register()
    kind, config = make()
    torch.manual_seed(0)
    model = kind._from_config(copy.deepcopy(config), attn_implementation=implementation)
    assert model.config._attn_implementation == implementation
    # With random initialisation attention is nearly uniform; larger weights make it matter.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model.eval()


def tokens(side: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (3, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[2, :1] = 0
    if side == "right":
        mask = mask.flip(1)
    return ids.masked_fill(mask == 0, 0), mask


def outcome(model: nn.Module, inputs: dict[str, Tensor], real: Tensor | None) -> list[Tensor]:
    """The first result at real positions and the gradient of every parameter that has one."""
    y = model(**inputs)[0]
    y = y if real is None else y[real]
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad((y * weights).sum(), parameters, allow_unused=True)
    return [y, *(torch.zeros(()) if g is None else g for g in grads)]


def assert_equal(got: list[Tensor], expected: list[Tensor]) -> None:
    size = expected[0].abs().max()
    torch.testing.assert_close(got[0] / size, expected[0] / size, atol=3e-5, rtol=1e-4)
    # Some gradients, as of a key's bias, are only rounding errors: the largest one sets the scale.
    scale = max(gradient.abs().max() for gradient in expected[1:])
    for a, b in zip(got[1:], expected[1:], strict=True):
        torch.testing.assert_close(a / scale, b / scale, atol=3e-5, rtol=1e-4)


def assert_as_exact(got: list[Tensor], expected: list[Tensor], exact: list[Tensor]) -> None:
    """Compares with fp64: the error may be twice that of the model before patching."""
    size = float(exact[0].detach().abs().max())
    scale = max(float(gradient.abs().max()) for gradient in exact[1:])
    for i, (a, b, c) in enumerate(zip(got, expected, exact, strict=True)):
        error, error_before = (float((x - c).detach().abs().max()) for x in (a, b))
        assert error <= 2 * error_before + 1e-6 * (scale if i else size), i
