"""Every op under autocast, in inference mode, on meta tensors and in threads; layouts of gradients;
checkpointing, jagged tensors, deterministic algorithms, AOTInductor.

test_ops.py checks values against fp64; here, modes must give the same bits as eager calls.
"""

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from call_recorder import CallRecorder
from op_examples import (
    DEVICE,
    SAMPLES,
    SPECS,
    as_tuple,
    assert_same_bits,
    each_backend,
    each_op,
    example_inputs,
    gradients_of,
    varied_inputs,
    weighted_loss,
)
from subprocesses import python_output
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fastattn
from fastattn import nn as fnn
from fastattn.ops._select import explaining
from fastattn.testing import check, oracle
from fastattn.testing.poison import poisoned_results
from fastattn.testing.properties import deterministic_algorithms
from fastattn.testing.spec import Inputs, OpSpec, Sample


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


# -- autocast -------------------------------------------------------------------------------------
def _autocast() -> Any:
    return torch.autocast(DEVICE.type, torch.bfloat16)


# The reference uses PyTorch's operators, which autocast would change.
each_choice = pytest.mark.parametrize("backend", [None, "reference"], ids=["", "reference"])


def _on_device(inputs: Inputs) -> Inputs:
    moved = {}
    for name, x in inputs.items():
        moved[name] = (
            x.detach().to(DEVICE).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        )
    return moved


@pytest.mark.parametrize("op, cast", [
    *((op, "qkv") for op in ("attention", "attention_varlen", "attention_with_weights")),
    ("ffn", ("x", "w1", "b1", "w2", "b2")),
])  # fmt: skip
@pytest.mark.parametrize("backward_inside", [False, True])
@each_choice
def test_autocast_computes_in_its_dtype(op, cast, backward_inside, backend):
    """As if inputs were converted before; masks and residuals are not, gradients are fp32."""
    inputs = _on_device(example_inputs(op, 33))
    function = partial(SPECS[op].function, backend=backend)

    def by_hand(**given: Any) -> Any:
        return function(**given | {name: given[name].bfloat16() for name in cast})

    def automatic(**given: Any) -> Any:
        with _autocast():
            return function(**given)

    results = automatic(**inputs)
    assert as_tuple(results)[0].dtype == (torch.float32 if op == "ffn" else torch.bfloat16)
    assert_same_bits(results, by_hand(**inputs))
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=backward_inside):
        gradients = gradients_of(automatic, inputs)
    assert_same_bits(gradients, gradients_of(by_hand, inputs))


@each_op
def test_autocast_does_not_change_second_derivatives(op: str) -> None:
    inputs = _on_device(example_inputs(op, 9))
    names = varied_inputs(inputs)
    tensors = [inputs[n] for n in names]

    def second(inside: bool) -> tuple[Tensor, ...]:
        loss = weighted_loss(SPECS[op].function(**inputs))
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=inside):
            first = torch.autograd.grad(loss, tensors, create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in first)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=inside):
            return torch.autograd.grad(penalty, tensors, materialize_grads=True)

    assert_same_bits(second(inside=True), second(inside=False))


@pytest.mark.parametrize("op", ["layer_norm", "add_layer_norm", "rms_norm"])
@each_choice
def test_autocast_does_not_cast_norms(op: str, backend: str | None) -> None:
    """y and z have the residual's dtype: the residual stream stays in fp32 with bf16 branches."""
    inputs = _on_device(example_inputs(op, 33))
    if op == "add_layer_norm":
        inputs["x"] = inputs["x"].detach().bfloat16().requires_grad_()
    function = partial(SPECS[op].function, backend=backend)
    results, gradients = function(**inputs), gradients_of(function, inputs)
    with _autocast():
        inside = function(**inputs)
        assert all(x.dtype == torch.float32 for x in as_tuple(inside))
        assert_same_bits(inside, results)
        assert_same_bits(gradients_of(function, inputs), gradients)


@each_op
def test_autocast_does_not_cast_fp64(op: str) -> None:
    inputs = _on_device(example_inputs(op, 5, torch.float64))
    results = SPECS[op].function(**inputs)
    with _autocast():
        assert_same_bits(SPECS[op].function(**inputs), results)


# -- tensors without data -------------------------------------------------------------------------
def _layouts(spec: OpSpec, inputs: Inputs) -> list[tuple[Any, ...]]:
    """Shape, dtype and strides of every result and gradient."""
    outputs = as_tuple(spec.function(**inputs))
    ones = [torch.ones_like(x) for x in outputs]
    varied = [inputs[n] for n in varied_inputs(inputs)]
    gradients = torch.autograd.grad(outputs, varied, ones) if varied else ()
    return [(x.shape, x.dtype, x.stride()) for x in (*outputs, *gradients)]


@pytest.mark.parametrize("spec, sample", [
    pytest.param(SPECS[op], sample, id=f"{op}-{sample.name}")
    for (op, _), sample in list(SAMPLES.items())[::2]
])  # fmt: skip
def test_meta_and_fake_tensors(spec: OpSpec, sample: Sample) -> None:
    def replaced(change: Callable[[Tensor], Tensor]) -> Inputs:
        inputs = sample.inputs("cpu", sample.dtypes[0])
        if "page" in inputs:  # which pages there are depends on values
            inputs = spec.prepare(inputs)
        return {n: change(x) if isinstance(x, Tensor) else x for n, x in inputs.items()}

    def meta(x: Tensor) -> Tensor:
        y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return y.requires_grad_(x.requires_grad)

    mode = FakeTensorMode()
    fake = replaced(mode.from_tensor)
    real = _layouts(spec, replaced(lambda x: x))
    assert _layouts(spec, replaced(meta)) == real
    with mode:
        assert _layouts(spec, fake) == real


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [None, "torch", "reference"])
def test_attention_results_are_laid_out_like_q(dtype: torch.dtype, backend: str | None) -> None:
    """Results have [B, S, H, D] storage if inputs do, so that projections need no copy."""

    def storage(*shape: int, transposed: bool) -> Tensor:
        x = torch.randn(shape, device=DEVICE).to(dtype)
        return (x.transpose(1, 2) if transposed else x).detach().requires_grad_()

    for transposed in (False, True):
        q = storage(*((2, 9, 4, 16) if transposed else (2, 4, 9, 16)), transposed=transposed)
        k, v = (
            storage(*((2, 7, 2, D) if transposed else (2, 2, 7, D)), transposed=transposed)
            for D in (16, 32)
        )
        mask = torch.randn(4, 1, 7, device=DEVICE, requires_grad=True)
        out, lse = fastattn.attention(q, k, v, mask=mask, return_lse=True, backend=backend)
        assert out.shape == (2, 4, 9, 32) and out.dtype == dtype
        assert (out.transpose(1, 2) if transposed else out).is_contiguous()
        assert lse.shape == (2, 4, 9) and lse.dtype == torch.float32 and lse.is_contiguous()
        gradients = torch.autograd.grad(out.float().sum() + lse.sum(), (q, k, v, mask))
        for gradient, x in zip(gradients, (q, k, v, mask), strict=True):
            assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)
            assert gradient.stride() == x.stride()


# -- gradients ------------------------------------------------------------------------------------
def _reverse_strides(g: Tensor) -> Tensor:
    dims = tuple(reversed(range(g.dim())))
    return g.permute(dims).contiguous().permute(dims)


_OUTPUT_GRADIENT_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "reversed strides": _reverse_strides,
    "every second column": lambda g: torch.stack([g, g * torch.nan], -1).flatten(-2)[..., ::2],
    "wider rows": lambda g: torch.cat([g, g * torch.nan], -1)[..., : g.shape[-1]],
    "expanded rows": lambda g: g[..., :1, :].expand_as(g) if g.dim() > 1 else g,
    "expanded first": lambda g: g[:1].expand_as(g),
    "one number": lambda g: g.flatten()[0].expand_as(g),
}


@each_backend
@pytest.mark.parametrize("layout", _OUTPUT_GRADIENT_LAYOUTS)
def test_layouts_of_output_gradients(spec, backend, layout, monkeypatch):
    contiguous = oracle.output_gradients

    def output_gradients(*args: Any) -> tuple[Tensor, ...]:
        return tuple(_OUTPUT_GRADIENT_LAYOUTS[layout](g) for g in contiguous(*args))

    for module in (oracle, check):
        monkeypatch.setattr(module, "output_gradients", output_gradients)
    names = dict.fromkeys(("attention", "attention_varlen", "attention_with_weights"), "gqa")
    names |= {"ffn": "gelu"}
    name = names.get(spec.name, "four_dimensions")
    exact = oracle.Oracle(spec, SAMPLES[spec.name, name], torch.float32)
    rows = check.check_sample(exact, backend, DEVICE)
    if rows[0].status == "refused":
        pytest.skip(rows[0].message)
    assert all(row.status == "ok" for row in rows), rows


@each_backend
def test_gradients_of_some_inputs(spec: OpSpec, backend: str) -> None:
    inputs = _on_device(example_inputs(spec.name, 33))
    with torch.no_grad(), explaining() as explanations:
        spec.function(**inputs, backend=backend)
    [explanation] = explanations
    if explanation.chosen != backend:
        pytest.skip(explanation.refusals[backend])

    def function(**given: Any) -> Any:
        return spec.function(**given, backend=backend)

    every = gradients_of(function, inputs)
    names = list(every)
    for wanted in [[n] for n in names] + [[m for m in names if m != n] for n in names]:
        some = {
            n: x.detach().requires_grad_(n in wanted) if isinstance(x, Tensor) else x
            for n, x in inputs.items()
        }
        with CallRecorder() as recorder, poisoned_results():
            weighted_loss(function(**some)).backward()
        for name in names:
            assert_same_bits(some[name].grad, every[name] if name in wanted else None)
        for op, args, options in recorder.calls:
            if op.name().endswith("_bwd"):
                needs = args[[a.name for a in op._schema.arguments].index("needs")]
                results = op(*args, **options)
                assert [x.shape == (0,) for x in results] == [not needed for needed in needs]


@pytest.mark.parametrize("op", ["attention", "add_layer_norm"])
@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_of_one_output(op: str, used: int, dtype: torch.dtype) -> None:
    """The backward op gets None, not zeros, for the gradient of the other output."""
    inputs = example_inputs(op, 5, dtype)
    names = varied_inputs(inputs)
    tensors = [inputs[n] for n in names]
    outputs = [torch.where(x.isinf(), 0, x) for x in SPECS[op].function(**inputs)]
    zero = outputs[1 - used].mul(0).sum()
    both = torch.autograd.grad(outputs[used].sin().sum() + zero, tensors, retain_graph=True)
    with CallRecorder() as recorder:
        one = torch.autograd.grad(outputs[used].sin().sum(), tensors)
    [(_, args, _)] = recorder.calls
    assert (args[used] is None, args[1 - used] is None) == (False, True)
    assert_same_bits(one, both)


def test_saved_memory() -> None:
    """Attention saves no tensor of M x N elements; ffn with relu saves one hidden tensor."""
    saved: list[tuple[int, ...]] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        q = torch.randn(1, 2, 60, 4, requires_grad=True)
        fastattn.attention(q, q, q, causal=True, dropout_p=0.1)
    assert max(torch.Size(shape).numel() for shape in saved) == q.numel(), saved
    saved.clear()
    x, w1, w2 = (torch.randn(s, requires_grad=True) for s in ((60, 4), (50, 4), (4, 50)))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        fastattn.ffn(x, w1, None, w2, None, dropout_p=0.1, output_dropout_p=0.1)
    assert saved.count((60, 50)) == 1 and len([s for s in saved if s != (1,)]) == 4, saved


# -- other modes ----------------------------------------------------------------------------------
@each_op
def test_inference_mode(op: str) -> None:
    inputs = _on_device(example_inputs(op, 33))
    expected = SPECS[op].function(**inputs)
    with torch.no_grad():
        assert_same_bits(SPECS[op].function(**inputs), expected)
    with torch.inference_mode():
        results = as_tuple(SPECS[op].function(**inputs))
        assert all(x.is_inference() for x in results)
        assert_same_bits(results, as_tuple(expected))


@each_op
def test_deterministic_algorithms(op: str) -> None:
    """No op raises, also compiled. `fastattn check` compares two runs of every sample."""
    inputs, function = _on_device(example_inputs(op, 33)), SPECS[op].function
    expected = gradients_of(function, inputs)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with deterministic_algorithms():
        for called in (function, compiled, compiled):
            assert_same_bits(gradients_of(called, inputs), expected)


def test_threads() -> None:
    inputs = {op: _on_device(example_inputs(op, 33)) for op in SPECS}
    expected = {op: gradients_of(SPECS[op].function, inputs[op]) for op in SPECS}
    failures: list[BaseException] = []
    start = threading.Barrier(5)

    def work(explain: bool) -> None:
        try:
            start.wait(timeout=60)
            for _ in range(5):
                for op in SPECS:
                    if explain:
                        with explaining() as explanations:
                            SPECS[op].function(**inputs[op])
                        assert explanations[0].chosen is not None
                    else:
                        assert_same_bits(gradients_of(SPECS[op].function, inputs[op]), expected[op])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i == 0,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_max_seqlen_may_depend_on_data() -> None:
    class Step(torch.nn.Module):
        def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
            longest = offsets.diff().max().item()
            return fastattn.attention_varlen(
                rows, rows, rows, offsets, offsets, longest, longest, causal=True
            )

    step, rows = Step(), torch.randn(12, 2, 8)
    offsets = torch.tensor([0, 4, 9, 12], dtype=torch.int32)
    expected = step(rows, offsets)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    exported = torch.export.export(step, (rows, offsets)).module()
    for program in (compiled, exported):
        assert program(rows, offsets).equal(expected)
        other = torch.tensor([0, 1, 11, 12], dtype=torch.int32)
        assert program(rows, other).equal(step(rows, other))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_may_depend_on_data() -> None:
    """Two sizes that are equal when the graph runs, but not known to be so."""

    def step(q: Tensor, k: Tensor, x: Tensor, queries: Tensor, keys: Tensor) -> list[Tensor]:
        few, lengths = k[:, :, :-1][:, :, keys.nonzero()[:, 0]], torch.tensor([5, 2, 3, 4])
        rows, columns = x[:4][queries], keys.nonzero()[:, 0]
        return [
            fastattn.attention(q, few, few, causal="bottom_right"),
            fastattn.attention(q[:, :, keys.nonzero()[:, 0]], few, few, causal=True),
            fastattn.attention(q[queries], k[keys], k[keys], key_lengths=lengths[keys]),
            fastattn.add_layer_norm(rows, x[:4][keys], None, None),
            fastattn.linear(x[:, queries.nonzero()[:, 0]], x[:5, columns]),
            fastattn.ffn(rows, x[:6], None, x[:6], None, "relu", residual=x[:4][keys]),
        ]

    inputs = [torch.randn(4, 2, 5, 8), torch.randn(4, 2, 5, 8), torch.randn(6, 6)]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for queries, keys in (([1, 0, 1, 1], [1, 1, 0, 1]), ([0, 0, 1, 1], [1, 1, 0, 0])):
        chosen = torch.tensor(queries).bool(), torch.tensor(keys).bool()
        results = compiled(*inputs, *chosen), step(*inputs, *chosen)
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected)


def test_numpy_scalars_are_accepted() -> None:
    np = pytest.importorskip("numpy")
    q = torch.randn(1, 2, 5, 8)
    expected = fastattn.attention(q, q, q, window=(2, 0), scale=0.5)
    found = fastattn.attention(q, q, q, window=(np.int64(2), np.int8(0)), scale=np.float32(0.5))
    assert found.equal(expected)
    for value in (True, np.bool_(True), torch.tensor(1), 1.0, "1"):
        with pytest.raises(TypeError, match="dropout_stream must be an integer"):
            fastattn.attention(q, q, q, dropout_p=0.5, dropout_stream=value)  # type: ignore[arg-type]


OPS = torch.ops.fastattn


# -- activation checkpointing ----------------------------------------------------------------------
def layer(dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(0)
    return fnn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)


def gradients(function: Callable[[Tensor], Tensor], module: nn.Module) -> list[Tensor]:
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
    torch.manual_seed(2)
    y = function(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_the_dropout(reentrant: bool) -> None:
    module = layer()
    expected = gradients(module, module)
    if reentrant:  # its backward is called for parameters alone by .backward()
        x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
        torch.manual_seed(2)
        y = checkpoint(module, x, use_reentrant=True)
        y.square().sum().backward()
        got = [y, x.grad, *(p.grad for p in module.parameters())]
    else:
        got = gradients(lambda x: checkpoint(module, x, use_reentrant=False), module)
    for actual, whole in zip(got, expected, strict=True):
        assert torch.equal(actual, whole)


@pytest.mark.parametrize(
    ("saved", "runs"), [((), 2), ((OPS.attention_fwd.default, OPS.ffn_fwd.default), 1)]
)
def test_selective_checkpointing(saved: tuple[Any, ...], runs: int) -> None:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op in saved
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    module = layer()
    contexts = partial(create_selective_checkpoint_contexts, policy)
    with CallRecorder() as recorder:
        got = gradients(
            lambda x: checkpoint(module, x, use_reentrant=False, context_fn=contexts), module
        )
    for actual, whole in zip(got, gradients(module, module), strict=True):
        assert torch.equal(actual, whole)
    count = recorder.names.count
    assert count("attention_fwd") == count("ffn_fwd") == runs
    assert count("attention_bwd") == count("ffn_bwd") == 1


# -- jagged nested tensors -------------------------------------------------------------------------
def jagged(*shape: int, lengths: tuple[int, ...] = (3, 6, 0, 4)) -> tuple[Tensor, Tensor]:
    """Rows [T, *shape] that require grad, and a nested tensor [B, H, j, D] made from them."""
    rows = torch.randn(sum(lengths), *shape, requires_grad=True)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return rows, torch.nested.nested_tensor_from_jagged(rows, offsets).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True, "bottom_right"])
def test_jagged_attention(causal: Any) -> None:
    torch.manual_seed(0)
    rows = torch.randn(13, 6, 8, requires_grad=True)
    offsets = torch.tensor([0, 3, 9, 9, 13])
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(part, offsets).transpose(1, 2)
        for part in rows.split([2, 2, 2], dim=1)
    )
    out, lse = fastattn.attention(q, k, v, causal=causal, return_lse=True)
    assert out.shape == q.shape
    weights = torch.randn(13, 2, 8)
    (gradient,) = torch.autograd.grad((out.transpose(1, 2).values() * weights).sum(), rows)
    expected = []
    for start, end in itertools.pairwise(offsets.tolist()):
        parts = (x.transpose(0, 1)[None] for x in rows[start:end].split([2, 2, 2], dim=1))
        expected.append(fastattn.attention(*parts, causal=causal)[0].transpose(0, 1))
    whole = torch.cat(expected)
    torch.testing.assert_close(out.transpose(1, 2).values(), whole)
    torch.testing.assert_close(gradient, torch.autograd.grad((whole * weights).sum(), rows)[0])
    assert lse.transpose(1, 2).values().shape == (13, 2)


def test_jagged_queries_and_keys_of_different_lengths() -> None:
    rows_q, q = jagged(4, 8, lengths=(3, 1))
    rows_k, k = jagged(2, 8, lengths=(5, 2))
    out = fastattn.attention(q, k, k)
    first = fastattn.attention(
        *(x.transpose(0, 1)[None] for x in (rows_q[:3], rows_k[:5], rows_k[:5]))
    )
    torch.testing.assert_close(out.transpose(1, 2).values()[:3], first[0].transpose(0, 1))


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("shape", [(8,), (2, 8)])
def test_jagged_linear(shape: tuple[int, ...], compiles: bool) -> None:
    """The same bits as for the rows, and the same sequences as in PyTorch."""
    rows, _ = jagged(*shape)
    weight, bias = torch.randn(5, 8, requires_grad=True), torch.randn(5, requires_grad=True)
    x = torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 3, 9, 9, 13]))

    def linear(x: Tensor) -> Tensor:
        return fastattn.linear(x, weight, bias)

    if compiles:
        linear = torch.compile(linear, fullgraph=True, backend="aot_eager")
    y, expected = linear(x), fastattn.linear(rows, weight, bias)
    assert y.shape == torch.nn.functional.linear(x, weight, bias).shape
    assert torch.equal(y.values(), expected)
    factors = torch.randn_like(expected)
    found, wanted = (
        torch.autograd.grad((results * factors).sum(), (rows, weight, bias))
        for results in (y.values(), expected)
    )
    for gradient, like in zip(found, wanted, strict=True):
        assert torch.equal(gradient, like)


def test_jagged_linear_of_a_named_backend() -> None:
    _, x = jagged(8)
    for backend in ("torch", "reference"):
        explanation = fastattn.explain(
            "linear", x.transpose(1, 2), torch.randn(5, 8), backend=backend
        )
        assert explanation.chosen == backend


def test_jagged_linear_in_autocast() -> None:
    _, x = jagged(8)
    weight = torch.randn(5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = fastattn.linear(x.transpose(1, 2), weight, backend="reference")
    rows = x.transpose(1, 2).values()
    assert torch.equal(y.values(), torch.nn.functional.linear(rows.bfloat16(), weight.bfloat16()))


def test_jagged_errors() -> None:
    _, q = jagged(2, 8)
    with pytest.raises(TypeError, match="x must be dense or a contiguous jagged tensor, got"):
        fastattn.linear(q, torch.randn(5, 8))
    dense = torch.randn(4, 2, 6, 8)
    with pytest.raises(
        TypeError, match="k must be a jagged nested tensor if q, k or v is one, got torch"
    ):
        fastattn.attention(q, dense, dense)
    with pytest.raises(ValueError, match="mask must be None for nested q, k and v"):
        fastattn.attention(q, q, q, mask=torch.ones(6, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"q must be \[B, H, j, D\]"):
        untransposed = q.transpose(1, 2)
        fastattn.attention(untransposed, untransposed, untransposed)
    with pytest.raises(TypeError, match="k must be a dense tensor, got a nested tensor"):
        fastattn.attention(dense, q, q)
    with pytest.raises(TypeError, match="q must be a dense tensor, got a nested tensor"):
        fastattn.attention_weights(q, q)
    _, same = jagged(2, 8)
    assert fastattn.attention(q, q, same).shape == q.shape
    _, others = jagged(2, 8, lengths=(3, 5, 1, 4))
    with pytest.raises(ValueError, match="v must have the sequence lengths of k, got others"):
        fastattn.attention(q, q, others)
    _, fewer = jagged(2, 8, lengths=(3, 10))
    with pytest.raises(ValueError, match="k must have q's 4 sequences, got 2"):
        fastattn.attention(q, fewer, fewer)
    narrow = torch.nested.narrow(
        torch.randn(2, 6, 2, 8), 1, torch.tensor([1, 0]), torch.tensor([3, 4]), layout=torch.jagged
    ).transpose(1, 2)
    with pytest.raises(ValueError, match="q must have no gaps between its sequences"):
        fastattn.attention(narrow, narrow, narrow)


# -- ahead of time ---------------------------------------------------------------------------------
class Everything(nn.Module):
    """A module that calls each op once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = fnn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.norm = fnn.RMSNorm(16)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        heads = self.norm(self.layer(x)).unflatten(-1, (2, 8)).transpose(1, 2)
        out = fastattn.attention(heads, heads, heads, key_lengths=lengths, causal="top_left")
        return fastattn.add_layer_norm(out.transpose(1, 2).flatten(-2), x)


@pytest.mark.slow
def test_aot_inductor_in_a_python_process(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Everything().eval()
    x, lengths = torch.randn(3, 7, 16), torch.tensor([7, 2, 0])
    dynamic = {"x": {1: torch.export.Dim("S", min=2, max=64)}, "lengths": None}
    with torch.no_grad():
        exported = torch.export.export(model, (x, lengths), dynamic_shapes=dynamic)
        package = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(tmp_path / "model.pt2"), inductor_configs=_COMPILES_QUICKLY
        )
        loaded = torch._inductor.aoti_load_package(package)
        for S in (7, 12):
            x = torch.randn(3, S, 16)
            torch.testing.assert_close(loaded(x, lengths), model(x, lengths))
    torch.export.save(exported, tmp_path / "exported.pt2")
    with_ops, without = (_loads(tmp_path, first) for first in ("import fastattn", "pass"))
    assert with_ops == ["True", "True"]
    assert without[0].startswith("We ran into an error when deserializing the saved file")
    assert "Could not find schema for fastattn::attention_fwd" in without[1]


# Headers that one model includes are not worth precompiling.
_COMPILES_QUICKLY = {
    "aot_inductor.precompile_headers": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
}
_LOAD = """
{first}
import torch
arguments = torch.ones(3, 7, 16), torch.tensor([7, 2, 0])
for load in (
    lambda: torch.export.load("exported.pt2").module(),
    lambda: torch._inductor.aoti_load_package("model.pt2"),
):
    try:
        with torch.no_grad():
            print(bool(load()(*arguments).isfinite().all()))
    except RuntimeError as error:
        print(str(error).splitlines()[0])
"""


def _loads(folder: Path, first: str) -> list[str]:
    """Output of a process that loads and runs both files after the statement `first`."""
    env = os.environ | {"PYTHONPATH": str(Path(fastattn.__file__).parents[1])}
    return python_output("-c", _LOAD.format(first=first), cwd=folder, env=env).splitlines()
