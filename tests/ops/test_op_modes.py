"""Every op in the modes of PyTorch: opcheck, compile, export, functorch, autocast, meta, threads.

test_ops.py checks values against fp64; here, modes must give the same bits as eager calls.
"""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fastattn
from fastattn.ops import _env
from fastattn.ops._select import explaining
from fastattn.testing import all_specs, check
from fastattn.testing.poison import poisoned_results
from fastattn.testing.spec import Inputs, OpSpec, Sample

SPECS = all_specs()
SAMPLES = {(spec.name, sample.name): sample for spec in SPECS.values() for sample in spec.samples}
DEVICE = _env.default_device()

each_op = pytest.mark.parametrize("op", list(SPECS))


def _each_backend() -> list[Any]:
    return [
        pytest.param(spec, backend, id=f"{spec.name}-{backend}")
        for spec in SPECS.values()
        for backend in spec.backends
        if _env.refuses_device(backend, DEVICE) is None
    ]


each_backend = pytest.mark.parametrize("spec, backend", _each_backend())


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def _tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def _varied(inputs: Inputs) -> list[str]:
    return [name for name, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad]


def _example(op: str, length: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Inputs that use most features of an op; `length` is the number of rows."""
    generator = torch.Generator().manual_seed(1000 * seed + length)

    def data(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    dropout: Inputs = {"dropout_p": 0.2, "dropout_seed": torch.tensor([11]), "dropout_stream": 1}
    if op == "attention":
        inputs: Inputs = {
            "q": data(2, 4, length, 8),
            "k": data(2, 2, length + 3, 8),
            "v": data(2, 2, length + 3, 16),
            "mask": data(4, 1, length + 3),
            "key_lengths": torch.tensor([length, 3]),
        }
        return inputs | {"causal": "bottom_right", "return_lse": True} | dropout
    if op == "attention_varlen":  # heads first
        inputs = {
            name: data(heads, length + 3, 8) for name, heads in zip("qkv", (4, 2, 2), strict=True)
        }
        inputs |= {
            "cu_seqlens_q": torch.tensor([0, length, length + 1], dtype=torch.int32),
            "cu_seqlens_k": torch.tensor([0, 3, length + 3], dtype=torch.int32),
            "max_seqlen_q": length,
            "max_seqlen_k": length + 1,
        }
        return inputs | {"causal": "bottom_right"} | dropout
    if op == "ffn":
        inputs = {"x": data(length, 8), "w1": data(24, 8), "b1": data(24)}
        inputs |= {"w2": data(6, 12), "b2": data(6), "residual": data(length, 6)}
        return inputs | {"activation": "swiglu", "output_dropout_p": 0.1} | dropout
    if op == "linear":
        return {"x": data(2, length, 8), "weight": data(12, 8), "bias": data(12)}
    inputs = {"x": data(2, length, 8), "weight": data(8)}
    if op != "rms_norm":
        inputs["bias"] = data(8)
    if op == "add_layer_norm":
        inputs |= {"residual": data(2, length, 8), "x_bias": data(8), "return_sum": True} | dropout
    return inputs


def _loss(results: Any) -> Tensor:
    """A loss in which every element has its own weight; -inf of `lse` has weight 0."""
    return sum(torch.where(x.isinf(), 0, x).double().sin().sum() for x in _tuple(results))


def _gradients(function: Callable[..., Any], inputs: Inputs) -> dict[str, Tensor]:
    names = _varied(inputs)
    gradients = torch.autograd.grad(_loss(function(**inputs)), [inputs[n] for n in names])
    return dict(zip(names, gradients, strict=True))


def _assert_same(actual: Any, expected: Any) -> None:
    """The same bits and dtypes."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


# -- registration ---------------------------------------------------------------------------------
class _Recorder(TorchDispatchMode):
    """Records the calls of fastattn's ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "fastattn":
            self.calls.append((op, args, kwargs or {}))
        return op(*args, **kwargs or {})


_QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")
# Tracing the second derivative takes seconds: once for every op.
_ALL = (*_QUICK, "test_aot_dispatch_dynamic")


@pytest.mark.parametrize(
    "op, sample, dtype, utils",
    [
        ("attention", "all_restrictions", torch.float32, _ALL),
        ("attention", "key_lengths_rows", torch.bfloat16, _QUICK),
        ("attention", "packed", torch.float32, _QUICK),
        ("attention", "columns", torch.float16, _QUICK),
        ("attention", "no_keys", torch.float32, _QUICK),
        ("attention_varlen", "slack", torch.float32, _ALL),
        ("attention_varlen", "dropout", torch.bfloat16, _QUICK),
        ("layer_norm", "no_weight", torch.float32, _ALL),
        ("layer_norm", "row_stride", torch.bfloat16, _QUICK),
        ("layer_norm", "no_rows", torch.float32, _QUICK),
        ("add_layer_norm", "fp32_residual", torch.bfloat16, _ALL),
        ("add_layer_norm", "dropout", torch.float32, _QUICK),
        ("rms_norm", "transposed", torch.float32, _ALL),
        ("rms_norm", "no_parameters", torch.bfloat16, _QUICK),
        ("ffn", "swiglu", torch.float32, _ALL),
        ("ffn", "fp32_residual", torch.bfloat16, _QUICK),
        ("ffn", "no_rows", torch.float32, _QUICK),
        ("linear", "plain", torch.float32, _ALL),
        ("linear", "no_bias", torch.bfloat16, _QUICK),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else str(value).removeprefix("torch."),
)
def test_opcheck(op: str, sample: str, dtype: torch.dtype, utils: tuple[str, ...]) -> None:
    inputs = SAMPLES[op, sample].inputs(DEVICE, dtype)
    with _Recorder() as recorder:
        _gradients(SPECS[op].function, inputs)
    calls = [call.name() for call, _, _ in recorder.calls]
    assert calls == [f"fastattn::{op}_fwd", f"fastattn::{op}_bwd"]
    for call, args, options in recorder.calls:
        fresh = tuple(
            x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x
            for x in args
        )
        torch.library.opcheck(call, fresh, options, test_utils=utils)


# -- compile and export ---------------------------------------------------------------------------
@each_op
def test_compile(op: str) -> None:
    """One graph for every length, with the values and gradients of eager calls."""
    eager = SPECS[op].function
    compiled = torch.compile(eager, fullgraph=True, dynamic=True, backend="aot_eager")
    _gradients(compiled, _example(op, 7))
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in (2, 12, 33, 130):
            inputs = _example(op, length)
            _assert_same(compiled(**inputs), eager(**inputs))
            _assert_same(_gradients(compiled, inputs), _gradients(eager, inputs))


@each_op
def test_compile_without_gradients(op: str) -> None:
    eager = SPECS[op].function
    compiled = torch.compile(eager, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        compiled(**_example(op, 7))
        with torch.compiler.set_stance("fail_on_recompile"):
            for length in (2, 33):
                inputs = _example(op, length)
                _assert_same(compiled(**inputs), eager(**inputs))


def test_compile_with_numbers_that_change() -> None:
    """A module's scale, probability and eps, which dynamic shapes make symbolic."""
    q = torch.randn(1, 2, 5, 8)

    def both(number: float) -> Tensor:
        return fastattn.layer_norm(fastattn.attention(q, q, q, scale=number), eps=number)

    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend="aot_eager")
    for number in (0.25, 0.5, 2.0):
        _assert_same((compiled(number),), (both(number),))


@pytest.mark.parametrize("op", ["attention", "add_layer_norm", "ffn"])
def test_compiled_autograd(op: str) -> None:
    """The backward pass of an eager call, traced in one graph."""
    inputs = _example(op, 7)
    expected = _gradients(SPECS[op].function, inputs)
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(compiler):
        _assert_same(_gradients(SPECS[op].function, inputs), expected)


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
            _assert_same(gradient(*numbers), expected)


@pytest.mark.parametrize("op", ["attention", "attention_varlen", "add_layer_norm", "ffn"])
def test_compiled_code_draws_its_seeds(op: str) -> None:
    """Without a seed, every call of the compiled graph has different dropout."""
    inputs = _example(op, 33)
    inputs = {n: x for n, x in inputs.items() if n not in ("dropout_seed", "dropout_stream")}
    compiled = torch.compile(SPECS[op].function, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.manual_seed(1)
    first, second = (_tuple(compiled(**inputs))[0] for _ in range(2))
    torch.manual_seed(1)
    _assert_same(_tuple(compiled(**inputs))[0], first)
    assert not torch.equal(first, second)


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
    example = _example(op, 7)
    constants = {n: x for n, x in example.items() if not isinstance(x, Tensor)}

    class Module(torch.nn.Module):
        def forward(self, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
            return _tuple(SPECS[op].function(**tensors | constants))

    def tensors(length: int) -> dict[str, Tensor]:
        return {n: x.detach() for n, x in _example(op, length).items() if isinstance(x, Tensor)}

    auto = torch.export.Dim.AUTO
    shapes = {n: dict.fromkeys(range(x.dim()), auto) for n, x in tensors(7).items()}
    program = torch.export.export(Module(), (tensors(7),), dynamic_shapes=(shapes,))
    targets = [str(node.target) for node in program.graph.nodes]
    assert f"fastattn.{op}_fwd.default" in targets
    for length in (7, 33):
        _assert_same(program.module()(tensors(length)), Module()(tensors(length)))


# -- functorch ------------------------------------------------------------------------------------
def _functional(op: str, inputs: Inputs) -> Callable[[dict[str, Tensor]], Tensor]:
    """The loss as a function of the differentiated tensors."""
    return lambda varied: _loss(SPECS[op].function(**inputs | varied))


def _detached(inputs: Inputs) -> dict[str, Tensor]:
    return {name: inputs[name].detach() for name in _varied(inputs)}


@each_op
def test_func_grad(op: str) -> None:
    inputs = _example(op, 5)
    gradients = torch.func.grad(_functional(op, inputs))(_detached(inputs))
    _assert_same(gradients, _gradients(SPECS[op].function, inputs))


@each_op
def test_func_grad_of_grad(op: str) -> None:
    inputs = _example(op, 5, torch.float64)
    names = _varied(inputs)

    def penalty(varied: dict[str, Tensor]) -> Tensor:
        gradients = torch.func.grad(_functional(op, inputs))(varied)
        return sum(gradient.square().sum() for gradient in gradients.values())

    loss = _loss(SPECS[op].function(**inputs))
    first = torch.autograd.grad(loss, [inputs[n] for n in names], create_graph=True)
    total = sum(gradient.square().sum() for gradient in first)
    second = torch.autograd.grad(total, [inputs[n] for n in names], materialize_grads=True)
    expected = dict(zip(names, second, strict=True))
    torch.testing.assert_close(torch.func.grad(penalty)(_detached(inputs)), expected)


@each_op
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_of_grad(op: str) -> None:
    examples = [_example(op, 5, seed=seed) for seed in range(3)]
    batch = {
        name: torch.stack([e[name].detach() for e in examples]) for name in _varied(examples[0])
    }
    gradients = torch.func.vmap(torch.func.grad(_functional(op, examples[0])))(batch)
    values = torch.func.vmap(lambda varied: SPECS[op].function(**examples[0] | varied))(batch)
    for i, example in enumerate(examples):
        _assert_same(
            {n: g[i] for n, g in gradients.items()}, _gradients(SPECS[op].function, example)
        )
        one = _tuple(SPECS[op].function(**example))
        _assert_same([x[i] for x in _tuple(values)], [x.detach() for x in one])


@each_op
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batched_gradients(op: str, dtype: torch.dtype) -> None:
    """torch.autograd.grad with a batch of output gradients, as in `jacobian`; also for the second
    derivative.
    """
    inputs = _example(op, 5, dtype)
    varied = [inputs[n] for n in _varied(inputs)]
    outputs = _tuple(SPECS[op].function(**inputs))
    generator = torch.Generator().manual_seed(0)
    douts = [
        torch.where(x.isinf(), 0, torch.randn(3, *x.shape, generator=generator, dtype=x.dtype))
        for x in outputs
    ]
    options: Any = {"retain_graph": True, "materialize_grads": True}
    together = torch.autograd.grad(outputs, varied, douts, is_grads_batched=True, **options)
    for i in range(3):
        one = torch.autograd.grad(outputs, varied, [d[i] for d in douts], **options)
        _assert_same([g[i] for g in together], list(one))
    if dtype == torch.float64:
        first = torch.autograd.grad(_loss(outputs), varied, create_graph=True)
        ddouts = [torch.randn(3, *g.shape, generator=generator, dtype=dtype) for g in first]
        second = torch.autograd.grad(first, varied, ddouts, is_grads_batched=True, **options)
        for i in range(3):
            one = torch.autograd.grad(first, varied, [d[i] for d in ddouts], **options)
            torch.testing.assert_close([g[i] for g in second], list(one))


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


@pytest.mark.parametrize(
    "op, cast",
    [("attention", "qkv"), ("attention_varlen", "qkv"), ("ffn", ("x", "w1", "b1", "w2", "b2"))],
)
@pytest.mark.parametrize("backward_inside", [False, True])
@each_choice
def test_autocast_computes_in_its_dtype(
    op: str, cast: tuple[str, ...], backward_inside: bool, backend: str | None
) -> None:
    """As if inputs were converted before; masks and residuals are not, gradients are fp32."""
    inputs = _on_device(_example(op, 33))
    function = partial(SPECS[op].function, backend=backend)

    def by_hand(**given: Any) -> Any:
        return function(**given | {name: given[name].bfloat16() for name in cast})

    def automatic(**given: Any) -> Any:
        with _autocast():
            return function(**given)

    results = automatic(**inputs)
    assert _tuple(results)[0].dtype == (torch.float32 if op == "ffn" else torch.bfloat16)
    _assert_same(results, by_hand(**inputs))
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=backward_inside):
        gradients = _gradients(automatic, inputs)
    _assert_same(gradients, _gradients(by_hand, inputs))


@each_op
def test_autocast_leaves_second_derivatives_alone(op: str) -> None:
    inputs = _on_device(_example(op, 9))
    names = _varied(inputs)
    tensors = [inputs[n] for n in names]

    def second(inside: bool) -> tuple[Tensor, ...]:
        loss = _loss(SPECS[op].function(**inputs))
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=inside):
            first = torch.autograd.grad(loss, tensors, create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in first)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=inside):
            return torch.autograd.grad(penalty, tensors, materialize_grads=True)

    _assert_same(second(inside=True), second(inside=False))


@pytest.mark.parametrize("op", ["layer_norm", "add_layer_norm", "rms_norm"])
@each_choice
def test_autocast_leaves_norms_alone(op: str, backend: str | None) -> None:
    """y and z have the residual's dtype: the residual stream stays in fp32 with bf16 branches."""
    inputs = _on_device(_example(op, 33))
    if op == "add_layer_norm":
        inputs["x"] = inputs["x"].detach().bfloat16().requires_grad_()
    function = partial(SPECS[op].function, backend=backend)
    results, gradients = function(**inputs), _gradients(function, inputs)
    with _autocast():
        inside = function(**inputs)
        assert all(x.dtype == torch.float32 for x in _tuple(inside))
        _assert_same(inside, results)
        _assert_same(_gradients(function, inputs), gradients)


@each_op
def test_autocast_leaves_fp64_alone(op: str) -> None:
    inputs = _on_device(_example(op, 5, torch.float64))
    results = SPECS[op].function(**inputs)
    with _autocast():
        _assert_same(SPECS[op].function(**inputs), results)


# -- tensors without data -------------------------------------------------------------------------
def _layouts(spec: OpSpec, inputs: Inputs) -> list[tuple[Any, ...]]:
    """Shape, dtype and strides of every result and gradient."""
    outputs = _tuple(spec.function(**inputs))
    ones = [torch.ones_like(x) for x in outputs]
    gradients = torch.autograd.grad(outputs, [inputs[n] for n in _varied(inputs)], ones)
    return [(x.shape, x.dtype, x.stride()) for x in (*outputs, *gradients)]


@pytest.mark.parametrize(
    "spec, sample",
    [
        pytest.param(SPECS[op], sample, id=f"{op}-{sample.name}")
        for (op, _), sample in SAMPLES.items()
    ],
)
def test_meta_and_fake_tensors(spec: OpSpec, sample: Sample) -> None:
    def replaced(change: Callable[[Tensor], Tensor]) -> Inputs:
        inputs = sample.inputs("cpu", sample.dtypes[0])
        return {n: change(x) if isinstance(x, Tensor) else x for n, x in inputs.items()}

    def meta(x: Tensor) -> Tensor:
        y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return y.requires_grad_(x.requires_grad)

    real = _layouts(spec, replaced(lambda x: x))
    assert _layouts(spec, replaced(meta)) == real
    with FakeTensorMode() as mode:
        assert _layouts(spec, replaced(mode.from_tensor)) == real


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
def test_layouts_of_output_gradients(
    spec: OpSpec, backend: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd passes gradients of any layout."""
    contiguous = check.output_gradients

    def output_gradients(*args: Any) -> tuple[Tensor, ...]:
        return tuple(_OUTPUT_GRADIENT_LAYOUTS[layout](g) for g in contiguous(*args))

    monkeypatch.setattr(check, "output_gradients", output_gradients)
    names = {"attention": "gqa", "attention_varlen": "gqa", "ffn": "gelu"}
    name = names.get(spec.name, "four_dimensions")
    oracle = check.Oracle(spec, SAMPLES[spec.name, name], torch.float32)
    rows = check.check_sample(oracle, backend, DEVICE)
    if rows[0].status == "refused":
        pytest.skip(rows[0].message)
    assert all(row.status == "ok" for row in rows), rows


@each_backend
def test_gradients_of_some_inputs(spec: OpSpec, backend: str) -> None:
    """Only needed gradients are computed, with the same bits."""
    inputs = _on_device(_example(spec.name, 33))
    with torch.no_grad(), explaining() as explanations:
        spec.function(**inputs, backend=backend)
    [explanation] = explanations
    if explanation.chosen != backend:
        pytest.skip(explanation.refusals[backend])

    def function(**given: Any) -> Any:
        return spec.function(**given, backend=backend)

    every = _gradients(function, inputs)
    names = list(every)
    for wanted in [[n] for n in names] + [[m for m in names if m != n] for n in names]:
        some = {
            n: x.detach().requires_grad_(n in wanted) if isinstance(x, Tensor) else x
            for n, x in inputs.items()
        }
        with _Recorder() as recorder, poisoned_results():
            _loss(function(**some)).backward()
        for name in names:
            _assert_same(some[name].grad, every[name] if name in wanted else None)
        for op, args, options in recorder.calls:
            if op.name().endswith("_bwd"):
                needs = args[[a.name for a in op._schema.arguments].index("needs")]
                results = op(*args, **options)
                assert [x.shape == (0,) for x in results] == [not needed for needed in needs]


@pytest.mark.parametrize("op", ["attention", "add_layer_norm"])
@pytest.mark.parametrize("used", [0, 1])
def test_gradient_of_one_output(op: str, used: int) -> None:
    """The backward op gets None, not zeros, for the gradient of the other output."""
    inputs = _example(op, 5, torch.float64)
    names = _varied(inputs)
    tensors = [inputs[n] for n in names]
    outputs = [torch.where(x.isinf(), 0, x) for x in SPECS[op].function(**inputs)]
    zero = outputs[1 - used].mul(0).sum()
    both = torch.autograd.grad(outputs[used].sin().sum() + zero, tensors, retain_graph=True)
    with _Recorder() as recorder:
        one = torch.autograd.grad(outputs[used].sin().sum(), tensors)
    [(_, args, _)] = recorder.calls
    assert (args[used] is None, args[1 - used] is None) == (False, True)
    _assert_same(one, both)


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


def test_checkpointing_repeats_the_dropout() -> None:
    x, residual = torch.randn(9, 33, requires_grad=True), torch.randn(9, 33)

    def block(x: Tensor) -> Tensor:
        return fastattn.add_layer_norm(x, residual, dropout_p=0.5)

    torch.manual_seed(3)
    expected = torch.autograd.grad(block(x).sin().sum(), x)
    torch.manual_seed(3)
    recomputed = torch.autograd.grad(checkpoint(block, x, use_reentrant=False).sin().sum(), x)
    _assert_same(recomputed, expected)


# -- other modes ----------------------------------------------------------------------------------
@each_op
def test_inference_mode(op: str) -> None:
    inputs = _on_device(_example(op, 33))
    expected = SPECS[op].function(**inputs)
    with torch.no_grad():
        _assert_same(SPECS[op].function(**inputs), expected)
    with torch.inference_mode():
        results = _tuple(SPECS[op].function(**inputs))
        assert all(x.is_inference() for x in results)
        _assert_same(results, _tuple(expected))


@each_op
def test_deterministic_algorithms(op: str) -> None:
    """Determinism is checked for every sample; here with torch.use_deterministic_algorithms."""
    inputs = _on_device(_example(op, 33))
    expected = _gradients(SPECS[op].function, inputs)
    torch.use_deterministic_algorithms(True)
    try:
        _assert_same(_gradients(SPECS[op].function, inputs), expected)
    finally:
        torch.use_deterministic_algorithms(False)


def test_threads() -> None:
    """Several threads call every op at once while another one calls `explain`."""
    inputs = {op: _on_device(_example(op, 33)) for op in SPECS}
    expected = {op: _gradients(SPECS[op].function, inputs[op]) for op in SPECS}
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
                        _assert_same(_gradients(SPECS[op].function, inputs[op]), expected[op])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i == 0,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_longest_sequence_may_be_data() -> None:
    """max_seqlen computed from data, in a compiled graph and an exported program."""

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


def test_numpys_numbers_are_numbers() -> None:
    np = pytest.importorskip("numpy")
    q = torch.randn(1, 2, 5, 8)
    expected = fastattn.attention(q, q, q, window=(2, 0), scale=0.5)
    found = fastattn.attention(q, q, q, window=(np.int64(2), np.int8(0)), scale=np.float32(0.5))
    assert found.equal(expected)
    for value in (True, np.bool_(True), torch.tensor(1), 1.0, "1"):
        with pytest.raises(TypeError, match="dropout_stream must be an integer"):
            fastattn.attention(q, q, q, dropout_p=0.5, dropout_stream=value)  # type: ignore[arg-type]
