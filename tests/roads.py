"""The three roads of a plain call: the node in C++, an autograd.Function, and the whole one."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn.ops import _native, _road
from fastattn.ops._op import OPS

NORMS = ("layer_norm", "add_layer_norm", "rms_norm")
PARAMETERS = {"layer_norm": 2, "add_layer_norm": 2, "rms_norm": 1, "linear": 1}
ROADS = (*NORMS, "attention", "linear")
each_norm = pytest.mark.parametrize("op", NORMS)
each_op = pytest.mark.parametrize("op", ROADS)

needs_library = pytest.mark.skipif(
    _native.unavailable("cpu") is not None, reason="needs the native library cpu"
)


def use_road(road: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if road == "extension" and (why := _native.extension_unavailable()):
        pytest.skip(why)
    if road == "python":
        monkeypatch.setattr(_road, "in_cpp", lambda *_: None)
    for name in ROADS:
        op = OPS[f"{name}_fwd"]
        used = op._no_road if road == "whole" else op.find_short_road
        monkeypatch.setattr(op, "short_road", used)


@pytest.fixture(params=["extension", "python", "whole"])
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_road(request.param, monkeypatch)
    return str(request.param)


@pytest.fixture(params=["extension", "python"])
def short_road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_road(request.param, monkeypatch)
    return str(request.param)


def make_inputs(op: str, shape: tuple[int, ...] = (3, 8), **types: torch.dtype) -> list[Tensor]:
    """x, residual for add_layer_norm, then the parameters (of linear a square weight); or q, k, v;
    all require gradients.
    """
    generator = torch.Generator().manual_seed(0)
    if op == "attention":
        shape = (*(1,) * (4 - len(shape)), *shape)
    rows = [shape] * {"attention": 3, "add_layer_norm": 2}.get(op, 1)
    made = [torch.randn(s, generator=generator) for s in rows]
    made = [x.to(types.get("dtype")) for x in made]
    if op == "linear":
        weight = torch.randn(shape[-1], shape[-1], generator=generator)
        made.append(weight.to(types.get("parameters")))
    for _ in range(PARAMETERS.get(op, 0)):
        made.append(torch.randn(shape[-1:], generator=generator).to(types.get("parameters")))
    return [x.requires_grad_() for x in made]


def call(op: str, inputs: list[Tensor], **options: Any) -> Any:
    return getattr(fastattn, op)(*inputs, **options)


def is_short(y: Tensor) -> bool:
    assert y.grad_fn is not None
    return not y.grad_fn.name().startswith("Plain")
