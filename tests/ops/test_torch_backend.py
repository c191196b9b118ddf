"""The backend `torch`, beyond the samples of test_ops.py."""

from collections.abc import Callable

import pytest
import torch
from attention_options import packing
from torch import Tensor

import fastattn
from fastattn.ops import _select
from fastattn.ops._op import OPS
from fastattn.ops.attention import torch_kernels
from fastattn.ops.attention.calls import BackwardCall, ForwardCall
from fastattn.ops.attention.torch_problem import Problem
from fastattn.ops.layer_norm import torch as norms
from fastattn.testing import all_specs
from fastattn.testing.check import check_sample
from fastattn.testing.oracle import Oracle, run_op
from fastattn.testing.spec import OpSpec

SPECS = all_specs()
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))


@pytest.mark.slow
@each_spec
def test_double_precision(spec: OpSpec) -> None:
    """In fp64 the backend and the reference agree up to the rounding of scores."""
    for sample in spec.samples:
        inputs = spec.widen(sample.inputs("cpu", torch.float32))
        results, expected = (run_op(spec, sample, inputs, b) for b in ("torch", "reference"))
        near = 1e-10
        if "lse" in expected:
            finite = expected["lse"][expected["lse"].isfinite()].abs().tolist()
            near = max(near, 4 * torch.finfo(torch.float64).eps * max(finite, default=0.0))
        for name, value in expected.items():
            torch.testing.assert_close(
                results[name], value, rtol=near, atol=near, msg=lambda m, n=name: f"{n}: {m}"
            )


@each_spec
def test_results_have_the_declared_layouts(spec: OpSpec) -> None:
    """aten's layouts differ, but compiled code relies on those of `outputs`."""
    for sample in spec.samples[::3]:
        inputs = sample.inputs("cpu", torch.float32)
        results, expected = (run_op(spec, sample, inputs, b) for b in ("torch", "reference"))
        for name, value in expected.items():
            assert results[name].stride() == value.stride(), (sample.name, name)


def _problem(**options: object) -> ForwardCall:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 4, 40, 16, generator=generator) for _ in range(3))
    lengths = torch.tensor([40, 0])
    call = ForwardCall(q, k, v, key_lengths=lengths, causal=1, scale=0.25)
    return call._replace(**options)  # type: ignore[arg-type]


def _backward(call: ForwardCall, out: Tensor, lse: Tensor, backend: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    dout, dlse = torch.randn(out.shape, generator=generator), torch.randn(lse.shape)
    needs = [True, True, True, False, True, True]
    args = BackwardCall._make([dout.to(out.dtype), dlse, out, lse, *call, needs])
    return OPS["attention_bwd"](*args, backend=backend)


_SCORES = {
    "none": {},
    "sinks": {"sinks": torch.tensor([-2.0, 0.0, 4.0, 90.0])},
    "bias": {"distance_bias": torch.randn(1, 4, 79, generator=torch.Generator().manual_seed(8))},
    "softcap": {"softcap": 0.7},
}
_SCORES["all"] = {name: x for given in _SCORES.values() for name, x in given.items()}


@pytest.mark.parametrize("scores", _SCORES)
@pytest.mark.parametrize("saved_by", ["reference", "cpu"])
def test_backward_follows_another_backends_forward(saved_by: str, scores: str) -> None:
    """With rows without a key, whose lse is -inf or the sink."""
    call = _problem(**_SCORES[scores])
    forward = OPS["attention_fwd"]
    if why := _select.why_unsupported(forward, saved_by, call):
        pytest.skip(why)
    out, lse = forward(*call, backend=saved_by)
    torch.manual_seed(0)
    found = _backward(call, out, lse, "torch")
    torch.manual_seed(0)
    for actual, expected in zip(found, _backward(call, out, lse, "reference"), strict=True):
        torch.testing.assert_close(actual, expected)


def test_lse_of_rows_with_a_key_is_above_the_sink() -> None:
    """Also where its rounded value is the sink, by which a backward would take the row for dead."""
    sinks = torch.tensor([0.0, 30.0, 1e3, 1e8])
    call = _problem(sinks=sinks)
    lse = OPS["attention_fwd"](*call, backend="torch")[1]
    assert torch.equal(lse[1], sinks[:, None].expand(4, 40))
    assert torch.all(lse[0] > sinks[:, None])
    offsets = torch.tensor([[0, 30, 35], [0, 40, 40]], dtype=torch.int32)
    q, k, v = (x[0].transpose(0, 1) for x in call[:3])
    _, lse = fastattn.attention_varlen(
        q, k, v, *offsets, 30, 40, sinks=sinks, return_lse=True, backend="torch"
    )
    assert torch.all(lse[:, :30] > sinks[:, None])
    assert torch.equal(lse[:, 30:35], sinks[:, None].expand(4, 5))
    assert torch.all(lse[:, 35:].isneginf())


@pytest.mark.parametrize("value", [3e38, float("inf"), float("nan")])
def test_large_dead_values_are_replaced(value: float) -> None:
    """The product of a finite dead key and a query overflows."""
    clean = _problem(key_lengths=torch.tensor([40, 17]), causal=0)
    k, v = clean.k.clone(), clean.v.clone()
    k[1, :, 17:] = v[1, :, 17:] = value
    for a, b in zip(
        OPS["attention_fwd"](*clean, backend="torch"),
        OPS["attention_fwd"](*clean._replace(k=k, v=v), backend="torch"),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kernel", ["flash", "efficient"])
@pytest.mark.parametrize("K", [4, 2])
def test_cuda_calls_fit_their_schemas(kernel: str, K: int) -> None:
    """Shapes and dtypes by the meta functions of aten's operators, without a GPU."""
    q, k = (
        torch.empty(2, heads, rows, 32, dtype=torch.float16, device="meta")
        for heads, rows in ((4, 33), (K, 50))
    )
    bias = None if kernel == "flash" else torch.empty(2, 1, 1, 50, device="meta")
    problem = Problem(q, k, k, bias, False, None, 0.5, 1)
    forward: Callable[..., tuple[Tensor, ...]] = getattr(torch_kernels, f"_{kernel}_fwd")
    out, lse = forward(problem)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    gradients = getattr(torch_kernels, f"_{kernel}_bwd")(problem, out, out, lse)
    assert [x.shape for x in gradients] == [q.shape, k.shape, k.shape]
    assert {x.dtype for x in gradients} == {q.dtype}


def test_packed_cuda_calls_fit_their_schemas() -> None:
    q, k = (
        torch.empty(rows, heads, 32, dtype=torch.float16, device="meta")
        for rows, heads in ((33, 4), (50, 2))
    )
    offsets = torch.empty(4, dtype=torch.int32, device="meta")
    call = ForwardCall(q, k, k, **packing(offsets, offsets, 20, 30), causal=2, scale=0.5)
    problem = Problem(q, k, k, None, True, None, 0.5, 1)
    out, lse = torch_kernels.packed_fwd(problem, call)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (4, 33), torch.float32)
    gradients = torch_kernels.packed_bwd(problem, out, out, lse, call)  # type: ignore[arg-type]
    assert [x.shape for x in gradients] == [q.shape, k.shape, k.shape]


@pytest.mark.parametrize("causal", [0, 2])
def test_packed_rows_and_keys_that_are_live(causal: int) -> None:
    """Compared with the dead positions of attention_varlen's samples."""
    q, k = torch.ones(12, 1, 8), torch.ones(11, 1, 8)
    offsets = torch.tensor([[0, 2, 2, 7, 10], [0, 4, 6, 6, 8]], dtype=torch.int32)
    call = ForwardCall(q, k, k, **packing(*offsets, 5, 4), causal=causal, scale=0.5)
    rows, keys = (x.flatten().int().tolist() for x in torch_kernels.packed_live(call))
    assert rows == [1, 1] + [0] * 5 + [0 if causal else 1, 1, 1] + [0, 0]
    assert keys == [1, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0]
    lse = OPS["attention_fwd"](*call, backend="reference")[1]
    assert lse[0].isneginf().logical_not().int().tolist() == rows


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "add_layer_norm"])
def test_statistics_of_any_stride(op: str) -> None:
    """A transform may expand saved tensors."""
    x, w = torch.randn(4, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    inputs = [x, 2 * x] if op == "add_layer_norm" else [x]

    def function(x: Tensor) -> Tensor:
        return getattr(fastattn, op)(x, *inputs[1:], w, backend="torch")

    _, vjp = torch.func.vjp(function, x)
    dys = torch.randn(3, 4, 8, dtype=torch.float64)
    torch.testing.assert_close(torch.vmap(vjp)(dys)[0], torch.stack([vjp(dy)[0] for dy in dys]))


def test_sums_over_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(50, 8).bfloat16().requires_grad_()
    leaves = [x, *(torch.randn(8, requires_grad=True) for _ in range(2))]

    def gradients() -> tuple[Tensor, ...]:
        y = fastattn.layer_norm(*leaves, backend="torch")
        return torch.autograd.grad(y.float().sin().sum(), leaves)

    whole = gradients()
    monkeypatch.setattr(norms, "_CHUNK", 8 * 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for chunked, expected in zip(gradients(), whole, strict=True):
        torch.testing.assert_close(chunked, expected)


def test_gradients_do_not_alias_output_gradients() -> None:
    inputs = [torch.randn(3, 8, requires_grad=True) for _ in range(2)]
    dz = torch.randn(3, 8)
    _, z = fastattn.add_layer_norm(*inputs, return_sum=True, backend="torch")
    for gradient in torch.autograd.grad(z, inputs, dz):
        assert torch.equal(gradient, dz) and gradient.data_ptr() != dz.data_ptr()


def test_sums_have_the_parameters_dtype() -> None:
    """Results of the op itself; autograd would convert them."""
    x, w = torch.randn(3, 8).bfloat16(), torch.randn(8, 8).bfloat16()
    found = OPS["linear_bwd"](x, x, w, [True] * 3, backend="torch")
    assert [gradient.dtype for gradient in found] == [torch.bfloat16] * 3


def test_no_rows_with_dropout() -> None:
    for columns in (1, 3, 5):
        x = torch.randn(0, columns)
        assert fastattn.add_layer_norm(x, x, dropout_p=0.3, backend="torch").shape == x.shape


@pytest.mark.parametrize("number", [559, 613, 721, 1203])
def test_gradients_of_scores_whose_terms_cancel(number: int) -> None:
    """aten's fused kernels sum the products of a few packed queries in two orders."""
    spec = all_specs()["attention_varlen"]
    sample = spec.sample(f"drawn_{number}")
    assert "cancelling" in sample.reason
    rows = check_sample(Oracle(spec, sample, *sample.dtypes), "torch", torch.device("cpu"))
    assert rows and not [row for row in rows if row.status != "ok"]


def test_results_may_be_changed_in_place() -> None:
    x = torch.randn(2, 8, requires_grad=True)
    y = fastattn.rms_norm(x, backend="torch")
    expected = 2 * y.detach()
    assert torch.equal(y.mul_(2), expected)
    y.sum().backward()


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0])])
def test_rows_whose_biases_by_distance_are_all_infinite(sinks: Tensor | None) -> None:
    """The first query may attend to itself only, whose bias is -inf: its weight is 0, not NaN."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 6, 8, generator=generator) for _ in range(4))
    table = torch.randn(2, 5, generator=generator)
    table[:, 2] = -torch.inf
    inputs = [x.requires_grad_() for x in (q, k, v, table)]

    def results(backend: str) -> list[Tensor]:
        out, lse = fastattn.attention(
            q, k, v, causal=True, relative_bias=table, relative_buckets="clipped", sinks=sinks,
            return_lse=True, backend=backend,
        )  # fmt: skip
        return [out, lse, *torch.autograd.grad(out, inputs, dout)]

    for x, y in zip(results("torch"), results("reference"), strict=True):
        torch.testing.assert_close(x, y)
