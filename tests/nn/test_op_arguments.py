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

import fastattn
import fastattn.nn as fnn
from fastattn.nn import attention, norm
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
    """What one test does not know to be valid is checked by the public function."""
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


def test_weights_with_other_truth_values_and_a_requested_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, x = fnn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    expected = module(x, x, x)[1]
    assert torch.equal(module(x, x, x, average_attn_weights=1)[1], expected)
    assert module(x, x, x, average_attn_weights=None)[1].shape == (2, 2, 5, 5)
    monkeypatch.setenv("FASTATTN_BACKEND", "triton")
    assert torch.equal(module(x, x, x)[1], expected)
