"""Modules and the interception of SDPA skip the checks of the public functions: they call the same
ops with the same arguments.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from call_recorder import CallRecorder
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
import fastattn.nn as fnn
from fastattn.nn import attention, norm
from fastattn.nn.blocks import streams_of
from fastattn.nn.fusion import DropoutStreams


class CallsSdpa(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def recorded(call: Callable[[], Any]) -> list[tuple[Any, ...]]:
    torch.manual_seed(0)
    with CallRecorder() as recorder:
        call()
    return [(op, *args) for op, args, _ in recorder.calls]


def assert_same_calls(module_call: Callable[[], Any], functional: Callable[[], Any]) -> None:
    found, wanted = recorded(module_call), recorded(functional)
    assert [len(call) for call in found] == [len(call) for call in wanted] != []
    for call, other in zip(found, wanted, strict=True):
        for x, y in zip(call, other, strict=True):
            if isinstance(y, Tensor):
                assert x.shape == y.shape and x.stride() == y.stride() and torch.equal(x, y)
            else:
                assert type(x) is type(y) and x == y


@pytest.mark.parametrize("request_", [None, "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
class TestSameCalls:
    @pytest.fixture(autouse=True)
    def environment(self, request_: Any, autocast: bool, monkeypatch: Any) -> Any:
        if request_:
            monkeypatch.setenv("FASTATTN_BACKEND", request_)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            yield

    @pytest.mark.parametrize("affine", [False, True])
    def test_layer_norm(self, affine: bool, dtype: torch.dtype) -> None:
        module = fnn.LayerNorm(8, elementwise_affine=affine, dtype=dtype)
        x = torch.randn(3, 8).to(dtype)
        assert_same_calls(
            lambda: module(x),
            lambda: fastattn.layer_norm(x, module.weight, module.bias, module.eps),
        )

    @pytest.mark.parametrize("p", [0.0, 0.25])
    def test_add_layer_norm(self, p: float, dtype: torch.dtype) -> None:
        module, dropout = fnn.LayerNorm(8, dtype=dtype), nn.Dropout(p)
        x, residual, x_bias = (torch.randn(s).to(dtype) for s in ((3, 8), (3, 8), (8,)))
        streams = DropoutStreams(x.device)
        streams.checked = not torch._C._is_any_autocast_enabled()

        def module_call() -> Any:
            streams.seed, streams.stream = None, 6
            return norm.fused_add_norm_and_sum(x, x_bias, residual, dropout, module, streams)

        def functional() -> Any:
            seed = fastattn.functional.new_dropout_seed("cpu") if p else None
            return fastattn.add_layer_norm(
                x, residual, module.weight, module.bias, module.eps, x_bias=x_bias, dropout_p=p,
                dropout_seed=seed, dropout_stream=7 if p else 0,
            )  # fmt: skip

        assert_same_calls(module_call, functional)

    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("sizes", [(4, 4, 8), (4, 6, 8), (4, 6, 5)])
    def test_sdpa(self, sizes: tuple[int, int, int], is_causal: bool, dtype: torch.dtype) -> None:
        M, N, E = sizes
        module = CallsSdpa()
        fastattn.patch(module, quiet=True)
        q, k, v = (torch.randn(2, 3, *s).to(dtype) for s in ((M, 8), (N, 8), (N, E)))
        kind: Any = "top_left" if is_causal else False
        assert_same_calls(
            lambda: module(q, k, v, is_causal), lambda: fastattn.attention(q, k, v, causal=kind)
        )

    @pytest.mark.parametrize("p", [0.0, 0.25])
    @pytest.mark.parametrize("causal", [False, "top_left"])
    def test_attention(self, causal: Any, p: float, dtype: torch.dtype) -> None:
        module = fnn.MultiheadAttention(24, 3, dropout=p)
        q, k, v = (torch.randn(2, 3, n, 8).to(dtype) for n in (5, 6, 6))

        def functional() -> Any:
            seed = fastattn.functional.new_dropout_seed("cpu") if p else None
            return fastattn.attention(q, k, v, causal=causal, dropout_p=p, dropout_seed=seed)

        streams = DropoutStreams(q.device)

        def module_call() -> Any:
            streams.seed, streams.stream = None, -1
            return attention.attend(module, q, k, v, streams, causal=causal)

        assert_same_calls(module_call, functional)


def test_invalid_parameters_raise_as_before() -> None:
    """Arguments that one test does not find valid are checked by the public function."""
    module, x = fnn.LayerNorm(8), torch.randn(3, 8)
    module.weight = nn.Parameter(torch.randn(1))
    with pytest.raises(ValueError, match=r"weight must be \[8\]"):
        module(x)
    streams, dropout = DropoutStreams(x.device), nn.Dropout(0.0)
    for name, sizes in (("weight", (8, 1)), ("x_bias", (1,))):
        parts = {"weight": torch.randn(8), "x_bias": None} | {name: torch.randn(sizes)}
        module.weight = nn.Parameter(parts["weight"])
        with pytest.raises(ValueError, match=rf"{name} must be \[8\]"):
            norm.fused_add_norm_and_sum(x, parts["x_bias"], x, dropout, module, streams)


def test_other_tensors_take_the_checked_path() -> None:
    q = torch.randn(2, 3, 4, 8)
    sdpa = CallsSdpa()
    fastattn.patch(sdpa, quiet=True)
    assert sdpa(q.to("meta"), q.to("meta"), q.to("meta"), False).shape == q.shape
    mixed = (q, q.double(), q.double(), False)
    with pytest.raises(RuntimeError):
        sdpa(*mixed)
    shared = torch.randn(2, 1, 4, 8)
    expected = F.scaled_dot_product_attention(q, shared, shared)
    torch.testing.assert_close(sdpa(q, shared, shared, False), expected)


# -- what the short checks must not miss ----------------------------------------------------------
@pytest.mark.parametrize("name", ["out_proj.bias", "in_proj_bias"])
def test_a_bias_on_another_device_raises(name: str) -> None:
    module = fnn.MultiheadAttention(16, 4, batch_first=True)
    owner = module.out_proj if name == "out_proj.bias" else module
    attribute = name.removeprefix("out_proj.")
    setattr(owner, attribute, torch.nn.Parameter(getattr(owner, attribute).to("meta")))
    x = torch.randn(2, 5, 16)
    with pytest.raises(RuntimeError, match="device"):
        module(x, x, x)


def test_a_property_of_a_subclass_is_read() -> None:
    class OneMore(fnn.LayerNorm):
        @property
        def weight(self) -> Any:
            return 1 + super().__getattr__("weight")

    class Twice(fnn.MultiheadAttention):
        @property
        def in_proj_weight(self) -> Any:
            return 2 * super().__getattr__("in_proj_weight")

    x = torch.randn(2, 5, 8)
    norm = OneMore(8)
    norm._parameters["weight"].data.fill_(1.0)  # what is initialised is the property's result
    expected = torch.nn.functional.layer_norm(x, (8,), torch.full((8,), 2.0), norm.bias)
    torch.testing.assert_close(norm(x), expected)
    norm = fnn.LayerNorm(8)
    norm.__dict__["weight"] = torch.full((8,), 2.0)
    torch.testing.assert_close(norm(x), expected)
    twice = Twice(8, 2, batch_first=True)
    twice._parameters["in_proj_weight"].data.normal_()
    plain = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    plain.load_state_dict(twice.state_dict())
    plain.in_proj_weight.data.mul_(2)
    for need_weights in (False, True):
        got, expected = (m(x, x, x, need_weights=need_weights)[0] for m in (twice, plain))
        torch.testing.assert_close(got, expected)


def test_weights_with_other_truth_values_and_a_requested_backend(monkeypatch):
    module, x = fnn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    expected = module(x, x, x)[1]
    assert torch.equal(module(x, x, x, average_attn_weights=1)[1], expected)
    assert module(x, x, x, average_attn_weights=None)[1].shape == (2, 2, 5, 5)
    monkeypatch.setenv("FASTATTN_BACKEND", "triton")
    assert torch.equal(module(x, x, x)[1], expected)


# -- layers whose children are tested once --------------------------------------------------------
def _layer(**options: Any) -> Any:
    torch.manual_seed(0)
    return fnn.TransformerDecoderLayer(16, 2, 24, 0.0, batch_first=True, **options).eval()


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", torch.tanh])
@pytest.mark.parametrize("causal", [False, True])
def test_checked_layers_compute_the_same(norm_first: bool, activation: Any, causal: bool) -> None:
    layer = _layer(norm_first=norm_first, activation=activation)
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 3, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(5) if causal else None
    inputs: Any = (x, memory, mask), {"tgt_is_causal": causal}
    assert streams_of(layer, x, memory).checked
    got = layer(*inputs[0], **inputs[1])
    layer.linear1.register_forward_hook(lambda *_: None)
    layer.norm2.register_forward_hook(lambda *_: None)
    assert not streams_of(layer, x, memory).checked
    torch.testing.assert_close(got, layer(*inputs[0], **inputs[1]))


def _replace_weight(layer: Any) -> None:
    layer.linear2.__dict__["weight"] = 2 * layer.linear2.weight.detach()


def _parametrize(layer: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(layer.self_attn.out_proj)


class Twice(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        context, weights = super().forward(*args, **kwargs)
        return 2 * context, weights


def _twice(layer: Any) -> Twice:
    twice = Twice(16, 2, batch_first=True)
    twice.load_state_dict(layer.self_attn.state_dict())
    return twice


def _unregister(layer: Any) -> None:
    layer.__dict__["self_attn"] = _twice(layer)
    del layer._modules["self_attn"]


def _hide(layer: Any) -> None:
    layer.__dict__["self_attn"] = _twice(layer)


def _override(layer: Any) -> None:
    twice, kind = _twice(layer), type(layer)
    layer.__class__ = type("Changed", (kind,), {"self_attn": property(lambda _: twice)})


def _move_to_buffers(layer: Any, *path: str) -> None:
    child = layer.get_submodule(path[0])
    value = child._parameters.pop(path[1])
    child.register_buffer(path[1], 2 * value.detach())


def _shadow_projection(layer: Any) -> None:
    layer.self_attn.__dict__["in_proj_weight"] = 2 * layer.self_attn.in_proj_weight.detach()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook": lambda layer: layer.dropout2.register_forward_hook(lambda *_: None),
    "forward": lambda layer: setattr(layer.norm3, "forward", lambda x: x),
    "weight": _replace_weight,
    "in_proj_weight": _shadow_projection,
    "parametrization": _parametrize,
    "another norm": lambda layer: setattr(layer, "norm1", nn.RMSNorm(16)),
    "no norm": lambda layer: setattr(layer, "norm2", nn.Identity()),
    "two dimensions": lambda layer: setattr(layer, "norm1", nn.LayerNorm((5, 16))),
    "another projection": lambda layer: setattr(layer, "linear1", nn.Sequential(layer.linear1)),
    "unregistered": _unregister,
    "hidden": _hide,
    "property": _override,
    "buffer": lambda layer: _move_to_buffers(layer, "linear1", "bias"),
    "buffer of attention": lambda layer: _move_to_buffers(layer, "self_attn", "in_proj_bias"),
    "adapter": lambda layer: layer.add_module("adapter", nn.Linear(16, 16)),
}
# The result is not PyTorch's: it refuses the first and the last, fastattn a sparse weight.
UNUSUAL: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda layer: layer.norm2.double(),
    "meta": lambda layer: layer.linear1.to("meta"),
    "sparse": lambda layer: setattr(
        layer.linear1, "weight", nn.Parameter(layer.linear1.weight.detach().to_sparse())
    ),
    "probability": lambda layer: (layer.train(), setattr(layer.dropout3, "p", 2.0)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_children_are_noticed(change: str) -> None:
    layer, pytorch = _layer(), nn.TransformerDecoderLayer(16, 2, 24, 0.0, batch_first=True).eval()
    pytorch.load_state_dict(layer.state_dict())
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 3, 16)
    assert streams_of(layer, x, memory).checked
    for changed in (layer, pytorch):
        torch.manual_seed(1)
        CHANGES[change](changed)
    assert not streams_of(layer, x, memory).checked
    with torch.no_grad():
        torch.testing.assert_close(layer(x, memory), pytorch(x, memory))


def test_inputs_parameters_and_modes_are_noticed() -> None:
    layer, x, memory = _layer(), torch.randn(2, 5, 16), torch.randn(2, 3, 16)
    for change in UNUSUAL.values():
        unusual = _layer()
        change(unusual)
        assert not streams_of(unusual, x, memory).checked
    assert not streams_of(layer, x, memory.double()).checked
    assert not streams_of(layer, x.to("meta"), memory.to("meta")).checked
    with torch.autocast("cpu", torch.bfloat16):
        assert not streams_of(layer, x, memory).checked
    with torch.inference_mode():
        unsaved = _layer()
        assert streams_of(unsaved, x, memory).checked
    assert not streams_of(unsaved, x, memory).checked
    for name, size, text in (
        ("linear1.weight", (24, 15), r"w1 must be \[F, 16\]"),
        ("norm1.weight", (1, 16), r"weight must be \[16\]"),
    ):
        wrong = _layer()
        child, _, parameter = name.partition(".")
        setattr(getattr(wrong, child), parameter, nn.Parameter(torch.randn(size)))
        with pytest.raises(ValueError, match=text):
            wrong(x, memory)
    for other in (layer, nn.TransformerDecoderLayer(16, 2, 24, 0.0, batch_first=True)):
        other.norm1 = nn.LayerNorm(8, elementwise_affine=False)
        with pytest.raises(RuntimeError, match="normalized_shape"):
            other(x, memory)


class Quarters(Tensor):
    """Holds its values divided by four, which some functions of PyTorch know."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def values(x: Any) -> Any:
            return 4 * x.as_subclass(Tensor) if isinstance(x, Quarters) else x

        kwargs = {name: values(x) for name, x in (kwargs or {}).items()}
        if func in (F.linear, F.multi_head_attention_forward):
            return func(*map(values, args), **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("which", ["key", "value", "both"])
def test_inputs_of_other_classes_are_noticed(which: str) -> None:
    module = fnn.MultiheadAttention(16, 2, batch_first=True)
    pytorch = nn.MultiheadAttention(16, 2, batch_first=True)
    pytorch.load_state_dict(module.state_dict())
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 3, 16)
    other = memory.as_subclass(Quarters)
    key, value = other if which != "value" else memory, other if which != "key" else memory
    torch.testing.assert_close(module(x, key, value), pytorch(x, key, value))
    layer = _layer()
    assert not streams_of(layer, x, other).checked
    nested = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(2, 16)])
    errors = []
    for attention_ in (module, pytorch):
        with pytest.raises(Exception) as raised:
            attention_(x, nested, nested)
        errors.append((type(raised.value), str(raised.value)))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("p", [1.5, -0.5, float("nan")])
def test_add_norm_refuses_other_probabilities(p: float) -> None:
    module = fnn.AddNorm(16)
    module.dropout.p = p
    with pytest.raises(ValueError, match="dropout_p must be"):
        module(torch.ones(3, 16), torch.randn(3, 16))


def test_an_error_in_the_op_of_a_norm_is_raised_at_once() -> None:
    seen = []

    class Fails(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, *_: Any) -> Any:
            seen.append(func)
            raise RuntimeError("refused")

    norm, x = fnn.LayerNorm(8), torch.randn(3, 8)
    with Fails(), pytest.raises(RuntimeError, match="refused"):
        norm(x)
    assert seen == [torch.ops.fastattn.layer_norm_fwd.default]
