"""Fused blocks read a module's current attributes, such as tensors assigned in place of parameters;
and which linear layers of modules run the op.
"""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from call_recorder import CallRecorder
from products import SetFaster
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
import fastattn.nn
from fastattn import nn as fnn
from fastattn.nn.fusion import linear


def _with_plain_tensors(layer: nn.Module) -> nn.Module:
    """A copy whose parameters are replaced by plain tensors of the same names."""
    layer = copy.deepcopy(layer)
    for name in ("linear1", "linear2", "norm1", "norm2", "self_attn.out_proj"):
        module = layer.get_submodule(name)
        for attribute in ("weight", "bias"):
            value: Tensor = getattr(module, attribute).detach()
            delattr(module, attribute)
            setattr(module, attribute, value * 1.25)
    return layer


@pytest.mark.parametrize("norm_first", [False, True])
def test_tensors_in_place_of_parameters(norm_first: bool) -> None:
    torch.manual_seed(0)
    options = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first}
    fast = fastattn.nn.TransformerEncoderLayer(16, 2, 32, **options)
    reference = nn.TransformerEncoderLayer(16, 2, 32, **options)
    reference.load_state_dict(fast.state_dict())
    x = torch.randn(2, 5, 16)
    before = fast(x)
    after, expected = _with_plain_tensors(fast)(x), _with_plain_tensors(reference)(x)
    torch.testing.assert_close(after, expected)
    assert not torch.allclose(after, before)


# -- linear layers --------------------------------------------------------------------------------
class _Subclass(Tensor):
    pass


def _layer() -> tuple[Tensor, nn.Parameter, nn.Parameter]:
    shapes = ((2, 5, 16), (12, 16), (12,))
    x, weight, bias = (torch.randn(s) for s in shapes)
    return x.requires_grad_(), nn.Parameter(weight), nn.Parameter(bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_cpu_tensors_run_the_op(dtype: torch.dtype, torch_is_faster: SetFaster) -> None:
    given = [t.detach().to(dtype) for t in _layer()]
    with CallRecorder() as recorder:
        y = linear(*given)
        linear(*given[:2])
    assert recorder.names.count("linear_fwd") == 2
    assert torch.equal(y, fastattn.linear(*given))


def _in_autocast(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return linear(x, weight, bias)


def _compiled(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.code)
        return graph

    y = torch.compile(linear, backend=keep, fullgraph=True)(x, weight, bias)
    assert len(graphs) == 1 and "fastattn" not in graphs[0]
    return y


def _traced(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    trace = torch.jit.trace(linear, (x, weight, bias), check_trace=False)
    assert "fastattn::" not in str(trace.graph)
    return trace(x, weight, bias)


OTHERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "fp64": lambda x, w, b: linear(x.double(), w.double(), b.double()),
    "meta": lambda x, w, b: linear(x.to("meta"), w.to("meta"), b.to("meta")),
    "subclass": lambda x, w, b: linear(x.as_subclass(_Subclass), w, b),
    "sparse": lambda x, w, b: linear(x, w.detach().to_sparse(), b),
    "bias of rows": lambda x, w, b: linear(x, w, b[:1].expand(1)),
    "autocast": _in_autocast,
    "compiled": _compiled,
    "traced": _traced,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", OTHERS)
def test_other_calls_use_pytorch(how: str) -> None:
    x, weight, bias = _layer()
    mode = contextlib.nullcontext() if how in ("compiled", "traced") else CallRecorder()
    with mode as recorder:
        y = OTHERS[how](x, weight, bias)
    assert y.shape == (2, 5, 12) and (recorder is None or "linear_fwd" not in recorder.names)
    if how not in ("meta", "autocast", "bias of rows"):
        torch.testing.assert_close(y.to(x.dtype), F.linear(x, weight, bias))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_use_pytorch(layout: torch.layout) -> None:
    x, weight, bias = (t.detach() for t in _layer())
    parts = [x[0], x[1, :3]]
    with CallRecorder() as recorder:
        y = linear(torch.nested.nested_tensor(parts, layout=layout), weight, bias)
    assert "linear_fwd" not in recorder.names
    for found, part in zip(y.unbind(), parts, strict=True):
        torch.testing.assert_close(found, F.linear(part, weight, bias))


def test_errors_equal_pytorchs() -> None:
    x, weight, _ = _layer()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        linear(x, weight[:, 1:])
    with pytest.raises(RuntimeError, match="at least 1D"):
        linear(x, weight[0, 0])


COMPILED: dict[str, tuple[Callable[[], nn.Module], int, dict[str, Any]]] = {
    "attention": (
        lambda: fastattn.nn.MultiheadAttention(16, 4, batch_first=True),
        3,
        {"need_weights": False},
    ),
    "length-masked": (lambda: fastattn.nn.LengthMaskedMultiheadAttention(*[16] * 4, 4), 3, {}),
    "add and norm": (lambda: fastattn.nn.AddNorm(16, 0.0), 2, {}),
    "layer": (lambda: fastattn.nn.TransformerDecoderLayer(16, 4, 32, 0.0), 2, {}),
}


@pytest.mark.filterwarnings("error:Dynamo detected")
@pytest.mark.parametrize("name", COMPILED)
def test_modules_that_are_compiled_alone_are_one_graph(name: str) -> None:
    torch._dynamo.reset()  # forgets which warnings it has given
    make, count, given = COMPILED[name]
    module, inputs = make(), torch.randn(count, 2, 3, 16)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*inputs, **given), module(*inputs, **given))


# -- launches --------------------------------------------------------------------------------------
class Launches(TorchDispatchMode):
    """Names of the ops that compute something: not of views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func._schema.name != "aten::_unsafe_view":
            self.names.append(func._schema.name.removeprefix("aten::"))
        return out


def launches(module: nn.Module, *args: Tensor, **options: object) -> list[str]:
    with Launches() as recorded:
        module(*args, **options)
    return recorded.names


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("dropout, training", [(0.0, True), (0.1, True), (0.1, False)])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_layers(kind, norm_first, activation, dropout, training):
    settings = {"batch_first": True, "norm_first": norm_first, "activation": activation}
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    norm = ["fastattn::layer_norm_fwd"] * norm_first
    linear = "fastattn::linear_fwd"
    attention = ["fastattn::attention_fwd", linear, "fastattn::add_layer_norm_fwd"]
    last = ["fastattn::ffn_fwd"] + ["fastattn::add_layer_norm_fwd"] * (not norm_first)
    if kind == "encoder":
        encoder = fnn.TransformerEncoderLayer(16, 2, 32, dropout, **settings)
        names = launches(encoder.train(training), x)
        expected = [*norm, linear, *attention, *last]
    else:
        decoder = fnn.TransformerDecoderLayer(16, 2, 32, dropout, **settings)
        names = launches(decoder.train(training), x, memory)
        expected = [*norm, linear, *attention, linear, linear, *attention, *last]
    seed = [name for name in names if name not in {*expected}]
    assert [name for name in names if name in {*expected}] == expected
    # One seed is drawn for all the dropouts of a layer.
    assert seed == (["randint"] if dropout and training else [])


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_layers_with_norms_that_are_not_fused(norm_first: bool, dropout: float) -> None:
    """The sum before the norm is one op, with the bits of the layer's seed."""
    layer = fnn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True, norm_first=norm_first)
    layer.norm1, layer.norm2 = fnn.RMSNorm(16), fnn.RMSNorm(16)
    names = launches(layer, torch.randn(2, 5, 16))
    norm, add = "fastattn::rms_norm_fwd", "fastattn::add_layer_norm_fwd"
    linear = "fastattn::linear_fwd"
    expected = [linear, "fastattn::attention_fwd", linear, add, norm, "fastattn::ffn_fwd"]
    expected = [norm, *expected] if norm_first else [*expected, add, norm]
    assert [name for name in names if name in {*expected}] == expected
    others = [name for name in names if name not in {*expected, "promote_types"}]
    assert others == ["randint"] * (dropout > 0.0)


@pytest.mark.parametrize("norm_first", [False, True])
def test_packed_layers(norm_first: bool) -> None:
    """Packed execution adds only the row indices, the gather and the scatter."""
    layer = fnn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=norm_first)
    short, long = (
        fnn.TransformerEncoder(layer, depth, enable_nested_tensor=False) for depth in (1, 3)
    )
    x = torch.randn(2, 5, 16)
    once, thrice = (launches(stack, x, src_lengths=[3, 5]) for stack in (short, long))
    layers = launches(layer, x)
    assert sorted(thrice) == sorted(once + layers * 2)
