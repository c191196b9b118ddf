"""`patch` on norms of other packages that only wrap one of torch, in the spellings in use."""

import importlib.util
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from call_recorder import CallRecorder
from torch import Tensor, nn

import fastattn
from fastattn.testing.compare import compare

N = 24
HEADER = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import rms_norm

x = torch.ones(3, 24)

class Own(nn.Module):
    def __init__(self, size, eps=1e-5):
        super().__init__()
        self.weight, self.scale, self.bias = (nn.Parameter(torch.ones(size)) for _ in range(3))
        self.normalized_shape, self.eps, self.dim = (size,), eps, size
"""
# A name of the class, its base and the code of its forward.
SPELLINGS: dict[str, tuple[str, str]] = {
    "Clip": (
        "nn.LayerNorm",
        "kind = x.dtype\n y = super().forward(x.type(torch.float32))\n return y.type(kind)",
    ),
    "OneLine": ("nn.LayerNorm", "return super().forward(hidden.float()).type(hidden.dtype)"),
    "TypeAs": ("nn.LayerNorm", "return super().forward(x.float()).type_as(x)"),
    "CastBack": ("nn.LayerNorm", "return super().forward(x).type_as(x)"),
    "Forwarded": ("nn.LayerNorm", "return super().forward(x)"),
    "Reassigned": (
        "nn.LayerNorm",
        "before = x.dtype\n x = F.layer_norm(x.to(torch.float32), self.normalized_shape, "
        "self.weight, self.bias, self.eps)\n return x.to(before)",
    ),
    "Optional": (
        "nn.LayerNorm",
        "y = nn.functional.layer_norm(values.float(), self.normalized_shape, "
        "self.weight.float() if self.weight is not None else None, "
        "self.bias.float() if self.bias is not None else None, self.eps)\n"
        " return y.type_as(values)",
    ),
    "Locals": (
        "nn.LayerNorm",
        "w = self.weight.float() if self.weight is not None else None\n"
        " b = self.bias.float() if self.bias is not None else None\n"
        " return F.layer_norm(x.float(), self.normalized_shape, w, b, self.eps).to(x.dtype)",
    ),
    "Number": ("Own", "return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)"),
    "Keywords": (
        "Own",
        "return torch.nn.functional.layer_norm(x, (x.size(-1),), bias=self.bias, "
        "weight=self.weight)",
    ),
    "NoParameters": (
        "Own",
        "return F.layer_norm(x.to(dtype=torch.float32), self.normalized_shape, None, None, "
        "eps=1e-5).to(x.dtype)",
    ),
    "RmsSuper": ("nn.RMSNorm", "return super().forward(x.float()).to(x.dtype)"),
    "RmsScale": (
        "Own",
        "return F.rms_norm(x.float(), (x.shape[-1],), self.scale.float(), self.eps).to(x.dtype)",
    ),
    "RmsByHand": (
        "Own",
        "wide = x.float()\n"
        " y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)\n"
        " return y * self.scale",
    ),
    "RmsNoEps": ("Own", "return F.rms_norm(x.float(), x.shape[-1:], self.weight).type_as(x)"),
    "RmsCastWeight": (
        "nn.RMSNorm",
        "w = self.weight.to(x.dtype) if self.weight is not None else None\n"
        " return F.rms_norm(x, self.normalized_shape, weight=w, eps=self.eps)",
    ),
}
OTHERS: dict[str, tuple[str, str]] = {
    "OtherEps": (
        "nn.LayerNorm",
        "return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, 2 * self.eps)",
    ),
    "Shifted": (
        "nn.LayerNorm",
        "return F.layer_norm(x, self.normalized_shape, self.weight + 1.0, self.bias, self.eps)",
    ),
    "NotCastBack": ("nn.LayerNorm", "return super().forward(x.float())"),
    "Half": ("nn.LayerNorm", "return super().forward(x.half()).to(x.dtype)"),
    "Group": ("nn.GroupNorm", "return super().forward(x.float()).type(x.dtype)"),
    "Twice": ("nn.LayerNorm", "return super().forward(super().forward(x.float())).to(x.dtype)"),
    "Changed": ("nn.LayerNorm", "y = x.zero_()\n return super().forward(x)"),
    "Overwritten": ("nn.LayerNorm", "y = x.zero_()\n y = x\n return super().forward(y)"),
    "Global": ("nn.LayerNorm", "return super().forward(x.float() if False else hidden)"),
    "GlobalX": ("Own", "return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)"),
    "Sum": ("nn.LayerNorm", "y = super().forward(x.float())\n return (x + y).to(x.dtype)"),
    "OneIsNone": (
        "nn.LayerNorm",
        "return F.layer_norm(x, self.normalized_shape, self.weight, "
        "self.bias if self.weight is not None else None, self.eps)",
    ),
    "Slice": ("Own", "return F.layer_norm(x, x.shape[-2:], self.weight, self.bias, self.eps)"),
}  # fmt: skip
ARGUMENTS = {"OneLine": "hidden", "Global": "hidden", "GlobalX": "hidden", "Optional": "values"}


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A module with the classes: their code is read from its file."""
    path: Path = tmp_path_factory.mktemp("norms") / "written_norms.py"
    text = HEADER
    for name, (base, body) in (SPELLINGS | OTHERS).items():
        argument = ARGUMENTS.get(name, "x")
        body = body.replace("\n", "\n       ")
        text += f"\nclass {name}({base}):\n    def forward(self, {argument}):\n        {body}\n"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("written_norms", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _made(classes: Any, name: str) -> nn.Module:
    kind = getattr(classes, name)
    module: nn.Module = kind(4, N) if name == "Group" else kind(N)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def _results(function: Callable[..., Tensor], x: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = function(x)
    dy = torch.linspace(-1.0, 1.0, y.numel(), dtype=y.dtype).view(y.shape)
    gradients = torch.autograd.grad(y, [x, *parameters], dy, allow_unused=True)
    return [y, *(g for g in gradients if g is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SPELLINGS)
def test_wrapped_norms(classes: Any, name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = _made(classes, name)
    exact = _made(classes, name)
    exact.load_state_dict(module.state_dict())
    exact.double()
    x = torch.randn(3, 5, N, dtype=dtype)
    parameters = list(module.parameters())
    same = _results(module, x, parameters)

    def in_fp64(x: Tensor) -> Tensor:
        """The published code without its cast to fp32."""
        weight = exact.scale if name in ("RmsScale", "RmsByHand") else exact.weight
        weight = weight.to(dtype).double() if name == "RmsCastWeight" else weight
        if name.startswith("Rms"):
            eps = {"RmsScale": 1e-5, "RmsByHand": 1e-5}.get(name)
            eps = torch.finfo(torch.float32).eps if eps is None else eps
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
        affine = (None, None) if name == "NoParameters" else (weight, exact.bias)
        return torch.nn.functional.layer_norm(x, (N,), *affine, 1e-5)  # type: ignore[arg-type]

    ref64 = _results(in_fp64, x.double(), list(exact.parameters()))
    assert fastattn.patch(module, quiet=True).replaced == {"": name}
    with CallRecorder() as ops, torch.no_grad():
        module(x)
    assert ops.names == ["rms_norm_fwd" if name.startswith("Rms") else "layer_norm_fwd"]
    got = _results(module, x, parameters)
    assert len(got) == len(same) == len(ref64)
    for a, b, c in zip(got, same, ref64, strict=True):
        assert a.dtype is b.dtype
        mag = torch.full_like(c, float(c.detach().abs().max()))
        comparison = compare(a, c, b, mag, 2 if c.dim() > 1 else 0)
        assert comparison.ok, comparison.message
    argument = ARGUMENTS.get(name, "x")
    assert torch.equal(module(**{argument: x}), got[0])
    with pytest.raises(TypeError):
        module(x, x)
    fastattn.unpatch(module)
    assert torch.equal(module(x), same[0])


@pytest.mark.parametrize("name", SPELLINGS)
def test_what_ops_do_not_cover_runs_the_published_code(classes: Any, name: str) -> None:
    """fp64 data, parameters in half precision and orders in memory."""
    torch.manual_seed(0)
    module = _made(classes, name)
    twin = getattr(classes, name)(N)
    twin.load_state_dict(module.state_dict())
    fastattn.patch(module, quiet=True)
    for own, given in itertools.product((torch.float32, torch.float64, torch.bfloat16), repeat=2):
        module.to(own), twin.to(own)
        for x in (torch.randn(2, 3, 4, N).transpose(0, 2), torch.randn(2, N, 5, 3).mT.mT):
            x = x if x.shape[-1] == N else x.permute(0, 2, 3, 1)
            outcomes: list[Any] = []
            for each in (twin, module):
                try:
                    outcomes.append(each(x.to(given)))
                except RuntimeError as error:
                    outcomes.append(str(error))
            expected, actual = outcomes
            if isinstance(expected, str):
                assert actual == expected
                continue
            assert actual.dtype is expected.dtype and actual.stride() == expected.stride()
            tolerance = 3e-2 if torch.bfloat16 in (own, given) else 1e-5
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
            if given is torch.float64:
                assert torch.equal(actual, expected)


def test_parameters_of_wrong_sizes_raise_torchs_errors(classes: Any) -> None:
    module, x = _made(classes, "Clip"), torch.randn(2, N)
    for wrong in (N - 1, (N // 3, 3)):
        module.weight = nn.Parameter(torch.ones(wrong))
        with pytest.raises(RuntimeError) as expected:
            module(x)
        fastattn.patch(module, quiet=True)
        with pytest.raises(RuntimeError, match=re.escape(str(expected.value))):
            module(x)
        fastattn.unpatch(module)


@pytest.mark.parametrize("name", ["Clip", "Optional", "Number", "RmsScale", "RmsCastWeight"])
def test_wrapped_norms_compile(classes: Any, name: str) -> None:
    module, x = _made(classes, name), torch.randn(2, 5, N)
    expected = module(x)
    fastattn.patch(module, quiet=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)


@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_stays(classes: Any, name: str) -> None:
    module = _made(classes, name)
    assert not fastattn.patch(module, quiet=True).replaced
    assert type(module) is getattr(classes, name)


def test_other_functions_under_the_same_names(classes: Any) -> None:
    """The globals of the code decide what it computes."""
    original = classes.F
    classes.F = type("F", (), {"layer_norm": staticmethod(lambda *args: args[0])})
    try:
        kind = type("Renamed", (classes.Number,), {"__doc__": None})
        assert not fastattn.patch(kind(N), quiet=True).replaced
    finally:
        classes.F = original


def test_norms_of_transformers_that_wrap() -> None:
    pytest.importorskip("transformers")
    from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

    module, x = OlmoLayerNorm(N), torch.randn(2, 5, N, dtype=torch.bfloat16)
    expected = module(x)
    assert fastattn.patch(module, quiet=True).replaced == {"": "OlmoLayerNorm"}
    torch.testing.assert_close(module(hidden_states=x), expected)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), expected)
