"""Every op under opcheck, torch.compile, torch.export, torch.func: the same bits as eager calls."""

from collections.abc import Callable, Iterator
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
    each_op,
    example_inputs,
    gradients_of,
    varied_inputs,
    weighted_loss,
)
from small_calls import op_name
from torch import Tensor
from torch.utils._pytree import tree_map

import fastattn
from fastattn.testing.spec import Inputs


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


# -- registration ---------------------------------------------------------------------------------
_QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")
# Tracing the second derivative takes seconds: once for every reference, with few arguments.
_ALL = (*_QUICK, "test_aot_dispatch_dynamic")


@pytest.mark.parametrize(
    "op, sample, dtype, utils",
    [
        ("attention", "key_lengths", torch.float32, _ALL),
        ("attention", "all_restrictions", torch.float32, _QUICK),
        ("attention", "key_lengths_rows", torch.bfloat16, _QUICK),
        ("attention", "packed", torch.float32, _QUICK),
        ("attention", "columns", torch.float16, _QUICK),
        ("attention", "no_keys", torch.float32, _QUICK),
        ("attention_varlen", "slack", torch.float32, _QUICK),
        ("attention_varlen", "dropout", torch.bfloat16, _QUICK),
        ("attention_with_weights", "plain", torch.float32, _QUICK),
        ("attention_with_weights", "all_scores", torch.float32, _QUICK),
        ("attention_with_weights", "dropout", torch.bfloat16, _QUICK),
        ("layer_norm", "no_weight", torch.float32, _ALL),
        ("layer_norm", "row_stride", torch.bfloat16, _QUICK),
        ("layer_norm", "no_rows", torch.float32, _QUICK),
        ("add_layer_norm", "fp32_residual", torch.bfloat16, _ALL),
        ("add_layer_norm", "dropout", torch.float32, _QUICK),
        ("rms_norm", "transposed", torch.float32, _ALL),
        ("rms_norm", "no_parameters", torch.bfloat16, _QUICK),
        ("ffn", "relu", torch.float32, _ALL),
        ("ffn", "fp32_residual", torch.bfloat16, _QUICK),
        ("ffn", "no_rows", torch.float32, _QUICK),
        ("linear", "plain", torch.float32, _ALL),
        ("linear", "no_bias", torch.bfloat16, _QUICK),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else str(value).removeprefix("torch."),
)
def test_opcheck(op: str, sample: str, dtype: torch.dtype, utils: tuple[str, ...]) -> None:
    inputs = SAMPLES[op, sample].inputs(DEVICE, dtype)
    with CallRecorder() as recorder:
        gradients_of(SPECS[op].function, inputs)
    calls = [call.name() for call, _, _ in recorder.calls]
    assert calls == [f"fastattn::{op_name(op, way)}" for way in ("fwd", "bwd")]
    for call, args, options in recorder.calls:
        fresh = tuple(
            x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x
            for x in args
        )
        torch.library.opcheck(call, fresh, options, test_utils=utils)
        # Named backends share the kernels of autograd and of fake tensors.
        named = (*fresh, "reference")
        torch.library.opcheck(call.overloadpacket.backend, named, test_utils=_QUICK)


# -- compile and export ---------------------------------------------------------------------------
@each_op
def test_compile(op: str) -> None:
    """One graph for every length, with the values and gradients of eager calls."""
    eager = SPECS[op].function
    compiled = torch.compile(eager, fullgraph=True, dynamic=True, backend="aot_eager")
    gradients_of(compiled, example_inputs(op, 7))
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in (2, 12, 33, 130):
            inputs = example_inputs(op, length)
            assert_same_bits(compiled(**inputs), eager(**inputs))
            assert_same_bits(gradients_of(compiled, inputs), gradients_of(eager, inputs))


# Further tensors of a call for a batch size, and its options.
GRAPHS: dict[str, tuple[Callable[[int], dict[str, Tensor]], dict[str, Any]]] = {
    "queries and keys": (lambda B: {}, {}),
    "alibi_slopes": (lambda B: {"alibi_slopes": torch.rand(B, 2)}, {}),
    "relative_bias": (
        lambda B: {"relative_bias": torch.randn(2, 8)}, {"relative_buckets": "t5"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_for_sizes_that_are_equal_or_not(name: str) -> None:
    """Sizes that differ in the example, such as M and N or B and H, may be equal later."""
    more, options = GRAPHS[name]

    class Module(torch.nn.Module):
        def forward(self, heads: tuple[Tensor, ...], more: dict[str, Tensor]) -> Tensor:
            return fastattn.attention(*heads, **more, **options)

    def inputs(B: int, M: int, N: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        return tuple(torch.randn(B, 2, length, 8) for length in (M, N, N)), more(B)

    example, module = inputs(3, 5, 7), Module()
    dims = tree_map(lambda x: dict.fromkeys(range(x.dim()), torch.export.Dim.AUTO), example)
    exported = torch.export.export(module, example, dynamic_shapes=dims).module()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(*example)
    for sizes in ((2, 6, 6), (4, 9, 4)):
        args = inputs(*sizes)
        expected = (module(*args),)
        assert_same_bits((exported(*args),), expected)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert_same_bits((compiled(*args),), expected)


def test_compile_with_numbers_that_change() -> None:
    q = torch.randn(1, 2, 5, 8)

    def both(number: float) -> Tensor:
        return fastattn.layer_norm(fastattn.attention(q, q, q, scale=number), eps=number)

    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend="aot_eager")
    for number in (0.25, 0.5, 2.0):
        assert_same_bits((compiled(number),), (both(number),))


@pytest.mark.parametrize("op", ["attention", "add_layer_norm", "ffn"])
def test_compiled_autograd(op: str) -> None:
    """The backward pass of an eager call, traced in one graph."""
    inputs = example_inputs(op, 7)
    expected = gradients_of(SPECS[op].function, inputs)
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(compiler):
        assert_same_bits(gradients_of(SPECS[op].function, inputs), expected)


def test_compiled_autograd_of_numbers_that_change() -> None:
    """A graph traced for one scale or window is not used for another."""
    q = torch.randn(1, 2, 5, 8, requires_grad=True)

    def gradient(scale: float, window: tuple[int, int]) -> tuple[Tensor, ...]:
        out = fastattn.attention(q, q, q, scale=scale, window=window)
        return torch.autograd.grad(out.sin().sum(), q)

    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    for numbers in ((0.25, (2, 0)), (2.0, (2, 0)), (2.0, (0, 2))):
        expected = gradient(*numbers)
        with torch._dynamo.compiled_autograd._enable(compiler):
            assert_same_bits(gradient(*numbers), expected)


@pytest.mark.parametrize("op", ["attention", "attention_varlen", "add_layer_norm", "ffn"])
def test_compiled_code_draws_its_seeds(op: str) -> None:
    inputs = example_inputs(op, 33)
    inputs = {n: x for n, x in inputs.items() if n not in ("dropout_seed", "dropout_stream")}
    compiled = torch.compile(SPECS[op].function, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.manual_seed(1)
    first, second = (as_tuple(compiled(**inputs))[0] for _ in range(2))
    torch.manual_seed(1)
    assert_same_bits(as_tuple(compiled(**inputs))[0], first)
    assert not torch.equal(first, second)


@pytest.mark.slow
def test_inductor() -> None:
    """All five ops in one graph, between operators for which inductor generates code."""

    def layer(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        B, S, D = x.shape
        q = (fastattn.rms_norm(x, w[0]) * 2).view(B, S, 2, D // 2).transpose(1, 2)  # [B, H, S, D]
        a = fastattn.attention(q, q, q, mask=mask, causal=True)
        a = a.transpose(1, 2).reshape(B, S, D).relu()
        y, z = fastattn.add_layer_norm(a, x, w[1], w[2], x_bias=w[3], return_sum=True)
        h = fastattn.ffn(y.tanh(), w, None, w.t(), None, "gelu", residual=z)
        return fastattn.layer_norm(h, w[4]).square()

    def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        y = function(*inputs)
        return y, *torch.autograd.grad(y.sin().sum(), inputs)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    generator = torch.Generator().manual_seed(0)
    for length in (5, 17):
        shapes = ((2, length, 16), (24, 16), (2, 1, 1, length))
        # Halved, so that sums of products have the magnitude that the tolerance assumes.
        inputs = [torch.randn(s, generator=generator).div(2).to(DEVICE) for s in shapes]
        inputs = [x.requires_grad_() for x in inputs]
        torch.testing.assert_close(gradients(compiled, *inputs), gradients(layer, *inputs))


@each_op
def test_export_keeps_the_op(op: str) -> None:
    example = example_inputs(op, 7)
    constants = {n: x for n, x in example.items() if not isinstance(x, Tensor)}

    class Module(torch.nn.Module):
        def forward(self, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
            return as_tuple(SPECS[op].function(**tensors | constants))

    def tensors(length: int) -> dict[str, Tensor]:
        return {
            n: x.detach() for n, x in example_inputs(op, length).items() if isinstance(x, Tensor)
        }

    auto = torch.export.Dim.AUTO
    shapes = {n: dict.fromkeys(range(x.dim()), auto) for n, x in tensors(7).items()}
    program = torch.export.export(Module(), (tensors(7),), dynamic_shapes=(shapes,))
    targets = [str(node.target) for node in program.graph.nodes]
    assert f"fastattn.{op_name(op)}.default" in targets
    for length in (7, 33):
        assert_same_bits(program.module()(tensors(length)), Module()(tensors(length)))


# -- functorch ------------------------------------------------------------------------------------
def _functional(op: str, inputs: Inputs) -> Callable[[dict[str, Tensor]], Tensor]:
    """The loss as a function of the differentiated tensors."""
    return lambda varied: weighted_loss(SPECS[op].function(**inputs | varied))


def _detached(inputs: Inputs) -> dict[str, Tensor]:
    return {name: inputs[name].detach() for name in varied_inputs(inputs)}


@each_op
def test_func_grad_of_grad(op: str) -> None:
    inputs = example_inputs(op, 5, torch.float64)
    names = varied_inputs(inputs)

    def penalty(varied: dict[str, Tensor]) -> Tensor:
        gradients = torch.func.grad(_functional(op, inputs))(varied)
        return sum(gradient.square().sum() for gradient in gradients.values())

    loss = weighted_loss(SPECS[op].function(**inputs))
    first = torch.autograd.grad(loss, [inputs[n] for n in names], create_graph=True)
    total = sum(gradient.square().sum() for gradient in first)
    second = torch.autograd.grad(total, [inputs[n] for n in names], materialize_grads=True)
    expected = dict(zip(names, second, strict=True))
    torch.testing.assert_close(torch.func.grad(penalty)(_detached(inputs)), expected)


@each_op
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_of_grad(op: str) -> None:
    examples = [example_inputs(op, 5, seed=seed) for seed in range(3)]
    batch = {
        name: torch.stack([e[name].detach() for e in examples])
        for name in varied_inputs(examples[0])
    }
    gradients = torch.func.vmap(torch.func.grad(_functional(op, examples[0])))(batch)
    values = torch.func.vmap(lambda varied: SPECS[op].function(**examples[0] | varied))(batch)
    for i, example in enumerate(examples):
        assert_same_bits(
            {n: g[i] for n, g in gradients.items()}, gradients_of(SPECS[op].function, example)
        )
        one = as_tuple(SPECS[op].function(**example))
        assert_same_bits([x[i] for x in as_tuple(values)], [x.detach() for x in one])


@each_op
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batched_gradients(op: str, dtype: torch.dtype) -> None:
    """torch.autograd.grad with a batch of output gradients, as in `jacobian`; also for the second
    derivative.
    """
    inputs = example_inputs(op, 5, dtype)
    varied = [inputs[n] for n in varied_inputs(inputs)]
    outputs = as_tuple(SPECS[op].function(**inputs))
    generator = torch.Generator().manual_seed(0)
    douts = [
        torch.where(x.isinf(), 0, torch.randn(3, *x.shape, generator=generator, dtype=x.dtype))
        for x in outputs
    ]
    options: Any = {"retain_graph": True, "materialize_grads": True}
    together = torch.autograd.grad(outputs, varied, douts, is_grads_batched=True, **options)
    for i in range(3):
        one = torch.autograd.grad(outputs, varied, [d[i] for d in douts], **options)
        assert_same_bits([g[i] for g in together], list(one))
    if dtype == torch.float64:
        first = torch.autograd.grad(weighted_loss(outputs), varied, create_graph=True)
        ddouts = [torch.randn(3, *g.shape, generator=generator, dtype=dtype) for g in first]
        second = torch.autograd.grad(first, varied, ddouts, is_grads_batched=True, **options)
        for i in range(3):
            one = torch.autograd.grad(first, varied, [d[i] for d in ddouts], **options)
            torch.testing.assert_close([g[i] for g in second], list(one))
