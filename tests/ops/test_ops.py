"""Every op x sample x dtype x backend, every error; the ops without the public functions."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attention_options import packing
from call_recorder import CallRecorder
from op_examples import (
    DEVICE,
    SPECS,
    as_tuple,
    backends_of,
    each_backend,
    example_inputs,
    results_of,
    varied_inputs,
)
from torch import Tensor

import fastattn
from fastattn.ops._op import Op
from fastattn.ops._select import OPS, explaining, op_of
from fastattn.ops.attention import spec as spec_of_attention
from fastattn.ops.attention.calls import ForwardCall
from fastattn.testing.check import check_sample
from fastattn.testing.oracle import Oracle
from fastattn.testing.rows import DTYPES
from fastattn.testing.spec import ErrorSample, Inputs, OpSpec, Sample


# -- values ---------------------------------------------------------------------------------------
def _samples() -> list[Any]:
    """`torch` runs the same code for fp16 as for bf16, and others differ in conversions: to save
    time, slow in fp16, for others every second sample. The oracle compares with the results of the
    reference in each dtype: it is judged in fp32 alone.
    """
    cases = []
    for (op, spec), dtype in itertools.product(SPECS.items(), DTYPES.values()):
        late = ("torch",) if dtype == torch.float16 else ()
        early = [b for b in backends_of(op) if b not in late]
        if dtype != torch.float32:
            early.remove("reference")
        for number, sample in enumerate(spec.samples):
            if dtype in sample.dtypes:
                id = f"{op}-{sample.name}-{str(dtype)[6:]}"
                marks = [pytest.mark.slow] * (dtype == torch.float16 and number % 2)
                cases.append(pytest.param(spec, sample, dtype, early, id=id, marks=marks))
                for b in late:
                    case = (spec, sample, dtype, [b])
                    cases.append(pytest.param(*case, id=f"{id}-{b}", marks=pytest.mark.slow))
    return cases


@pytest.mark.parametrize("spec, sample, dtype, backends", _samples())
def test_sample(spec: OpSpec, sample: Sample, dtype: torch.dtype, backends: list[str]) -> None:
    oracle = Oracle(spec, sample, dtype)
    rows = []
    for backend in backends:
        rows += check_sample(oracle, backend, DEVICE)
    failures = [row for row in rows if row.status == "FAIL"]
    assert not failures, failures
    if all(row.status == "refused" for row in rows):
        pytest.skip(rows[0].message)


@each_backend
def test_backend_runs_most_samples(spec: OpSpec, backend: str) -> None:
    """The test above skips refused samples; a backend must not refuse most of them."""
    refusals = []
    for sample in spec.samples:
        inputs = sample.inputs(DEVICE, sample.dtypes[0])
        with torch.no_grad(), explaining() as choices:
            spec.function(**inputs, backend=backend)
        explanation = choices[0]
        if explanation.chosen != backend:
            refusals.append(f"{sample.name}: {explanation.refusals[backend]}")
    if len(refusals) == len(spec.samples) and "native library" in refusals[0]:
        pytest.skip(refusals[0])
    assert len(refusals) < len(spec.samples) / 2, refusals


def _each_sample() -> list[Any]:
    return [
        pytest.param(spec, sample, id=f"{spec.name}-{sample.name}")
        for spec in SPECS.values()
        for sample in spec.samples
    ]


def _drawn_samples() -> list[Any]:
    return [
        pytest.param(spec, spec.drawn(n), id=f"{spec.name}-drawn-{n}")
        for spec in SPECS.values()
        if spec.drawn
        for n in range(60)
    ]


@pytest.mark.parametrize("spec, sample", _each_sample() + _drawn_samples())
def test_reference_equals_torch(spec: OpSpec, sample: Sample) -> None:
    """The reference and an independent form in PyTorch's operators agree in fp64."""
    inputs = spec.widen(sample.inputs("cpu", torch.float32))
    form = spec.torch_form(inputs)
    if form is None:
        pytest.skip("torch has no such operator")
    expected = results_of(spec, sample, inputs, form)
    actual = results_of(spec, sample, inputs, spec.function(**inputs, backend="reference"))
    near = 1e-10
    if "lse" in actual:  # the error grows with the scores, and that of a gradient with its size
        finite = actual["lse"][actual["lse"].isfinite()].abs().tolist()
        near = max(near, torch.finfo(torch.float64).eps * max(finite, default=0.0))
    for name, value in actual.items():
        largest = max([1.0, *value[value.isfinite()].abs().tolist()])
        torch.testing.assert_close(
            value, expected[name], rtol=near, atol=near * largest, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_samples_combine_every_two_restrictions() -> None:
    kinds = list(spec_of_attention.COMBINED.items())
    for (a, (_, values)), (b, (_, others)) in itertools.combinations(enumerate(kinds), 2):
        pairs = [(row[a], row[b]) for row in spec_of_attention.COMBINATIONS]
        missing = [pair for pair in itertools.product(values, others) if pair not in pairs]
        assert not missing, (kinds[a][0], kinds[b][0], missing)


# -- errors ---------------------------------------------------------------------------------------
def _each_error() -> list[Any]:
    return [
        pytest.param(spec, error, id=f"{spec.name}-{error.name}")
        for spec in SPECS.values()
        for error in spec.errors
    ]


@pytest.mark.parametrize("spec, error", _each_error())
def test_error(spec: OpSpec, error: ErrorSample) -> None:
    with pytest.raises(error.error, match=error.message):
        spec.function(**error.make())


def _vectors(**changes: Any) -> Inputs:
    return {
        "q": torch.zeros(2, 2, 3, 4),
        "k": torch.zeros(2, 2, 3, 4),
        "v": torch.zeros(2, 2, 3, 4),
    } | changes


def _weights(**changes: Any) -> Inputs:
    inputs = {"x": torch.zeros(3, 4), "w1": torch.zeros(8, 4), "b1": None}
    return inputs | {"w2": torch.zeros(4, 8), "b2": None} | changes


def _packed(**changes: Any) -> Inputs:
    inputs: Inputs = dict.fromkeys("qkv", torch.zeros(3, 2, 4))
    inputs |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 3]).int())
    return inputs | {"max_seqlen_q": 3, "max_seqlen_k": 3} | changes


@pytest.mark.parametrize("op, argument, inputs", [
    ("attention", "q", _vectors(q=None)),
    ("attention", "k", _vectors(k=[1.0])),
    ("attention", "causal", _vectors(causal=["top_left"])),
    ("attention", "window", _vectors(window=(1.5, 2))),
    ("attention", "window", _vectors(window=("1", 2))),
    ("attention", "scale", _vectors(scale="large")),
    ("attention", "scale", _vectors(scale=10**400)),
    ("attention", "dropout_p", _vectors(dropout_p="0.1")),
    ("attention", "dropout_stream", _vectors(dropout_p=0.1, dropout_stream=1.5)),
    ("attention", "backend", _vectors(backend=3)),
    ("attention_varlen", "max_seqlen_q", _packed(max_seqlen_q=2**31)),
    ("attention_varlen", "max_seqlen_k", _packed(max_seqlen_k=2**40)),
    ("attention_varlen", "max_seqlen_k", _packed(max_seqlen_k=2**70)),
    ("attention_varlen", "max_seqlen_q", _packed(max_seqlen_q=-1)),
    ("attention_varlen", "max_seqlen_q", _packed(max_seqlen_q=True)),
    ("layer_norm", "eps", {"x": torch.zeros(3, 4), "eps": "small"}),
    ("layer_norm", "weight", {"x": torch.zeros(3, 4), "weight": [1.0] * 4}),
    ("add_layer_norm", "residual", {"x": torch.zeros(3, 4), "residual": None}),
    ("ffn", "x", _weights(x=None)),
    ("ffn", "w1", _weights(w1=None)),
    ("ffn", "w2", _weights(w2=None)),
    ("ffn", "activation", _weights(activation=["relu"])),
    ("ffn", "residual", _weights(residual=[1.0])),
    ("ffn", "residual", _weights(residual=torch.zeros(3, 4).int())),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_wrong_type_names_the_argument(op, argument, inputs, autocast):
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        pytest.raises((TypeError, ValueError), match=f"^{argument} must "),
    ):
        SPECS[op].function(**inputs)


_X = torch.zeros(3, 8)
_Q = torch.zeros(1, 2, 5, 8)
_SEED = r"dropout_seed must be int64 \[1\]"
# Only the public function checks these; kernels would raise other errors or none.
_WRONG: tuple[tuple[str, tuple[Any, ...], Inputs, type[Exception], str], ...] = (
    ("layer_norm", (3,), {}, TypeError, "x must be a tensor, got int"),
    ("add_layer_norm", (None, _X), {}, TypeError, "x must be a tensor, got NoneType"),
    ("attention", (None, _Q, _Q), {}, TypeError, "q must be a tensor, got NoneType"),
    ("linear", (3, _X), {}, TypeError, "x must be a tensor, got int"),
    ("layer_norm", (torch.tensor(1.0),), {}, ValueError, "x must have at least one dimension"),
    ("linear", (torch.tensor(1.0), _X), {}, ValueError, "x must have at least one dimension"),
    ("layer_norm", (_X.long(),), {}, TypeError, "x must be fp16, bf16, fp32 or fp64"),
    ("layer_norm", (_X, torch.ones(1, 8)), {}, ValueError, r"weight must be \[8\].*\[1, 8\]"),
    ("layer_norm", (_X, None, torch.ones(9)), {}, ValueError, r"bias must be \[8\].* got \[9\]"),
    ("layer_norm", (_X, torch.ones(8, device="meta")), {}, ValueError, "weight must be on"),
    ("rms_norm", (_X, torch.ones(1, 8)), {}, ValueError, r"weight must be \[8\]"),
    *(
        (norm, (_X,), {"eps": eps}, ValueError, "eps must be a finite number >= 0")
        for norm, eps in (
            ("layer_norm", float("nan")),
            ("rms_norm", float("inf")),
            ("rms_norm", -1),
        )
    ),
    ("layer_norm", (_X,), {"eps": True}, TypeError, "eps must be a number"),
    *(
        (op, args, {"backend": backend}, TypeError, "backend must be a name or None")
        for op, args in (("attention", (_Q,) * 3), ("layer_norm", (_X,)), ("linear", (_X, _X)))
        # numpy.array == "cpu" is elementwise.
        for backend in (3, ["cpu"], np.array(["cpu", "reference"]))
    ),
    ("linear", (_X, _X[0]), {}, ValueError, r"weight must be \[E, 8\]"),
    ("linear", (_X, None), {}, TypeError, "weight must be a tensor"),
    ("linear", (_X, _X, _X[:, 0].double()), {}, TypeError, "bias must have x's dtype"),
    ("linear", (_X, _X, _X[:1, 0]), {}, ValueError, r"bias must be \[3\]"),
    ("linear", (_X, _X, _X[:, :1]), {}, ValueError, r"bias must be \[3\]"),
    ("add_layer_norm", (_X, _X.view(3, 2, 4)), {}, ValueError, "residual must have x's shape"),
    ("add_layer_norm", (_X, _X), {"x_bias": torch.ones(8, 1)}, ValueError, "x_bias must be"),
    ("add_layer_norm", (_X, _X), {"dropout_p": 1.5}, ValueError, "dropout_p must be"),
    ("add_layer_norm", (_X, _X), {"dropout_p": _X}, TypeError, "dropout_p must be a number"),
    ("add_layer_norm", (_X, _X), {"dropout_stream": -1}, ValueError, "dropout_stream must be >= 0"),
    ("add_layer_norm", (_X, _X), {"dropout_stream": 2**70}, ValueError, "dropout_stream must be"),
    *(  # even without dropout
        ("add_layer_norm", (_X, _X), {"dropout_seed": seed}, ValueError, _SEED)
        for seed in (torch.ones(()), torch.ones(1), torch.ones(5, dtype=torch.int64))
    ),
    ("attention", (_Q, _Q.half(), _Q), {}, TypeError, "k must have q's dtype"),
    ("attention", (_Q, _Q.to("meta"), _Q), {}, ValueError, "k must be on cpu"),
    ("attention", (_Q,) * 3, {"scale": float("inf")}, ValueError, "scale must be finite"),
    ("attention", (_Q,) * 3, {"window": (None, 3)}, TypeError, r"two integers .*got \(None, 3\)"),
    ("attention", (_Q[:, :, :4], _Q, _Q), {"causal": True}, ValueError, "ambiguous"),
)


@pytest.mark.parametrize("op, args, options, error, message", _WRONG)
@pytest.mark.parametrize("graph", [False, True], ids=["", "graph"])
def test_wrong_arguments(op, args, options, error, message, graph):
    if graph and isinstance(args[0], Tensor) and args[0].is_floating_point():
        args = (args[0].detach().requires_grad_(), *args[1:])
    with pytest.raises(error, match=message):
        getattr(fastattn, op)(*args, **options)


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_packed_sequences_have_one_bottom_right_alignment(backend: str) -> None:
    """The op takes the code of bottom_right_lengths too; packed, both mean the same."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(rows, 2, 8) for rows in (7, 9, 9))
    offsets = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 7], [0, 5, 9]))
    packed = packing(*offsets, 4, 5)
    calls = (ForwardCall(q, k, v, **packed, causal=causal) for causal in (2, 3))
    outs = [torch.ops.fastattn.attention_fwd.backend(*call, backend)[0] for call in calls]
    assert outs[0].equal(outs[1])


def test_vmap_over_packed_queries_alone() -> None:
    """Folded into the tokens, those of the second element would belong to no sequence."""
    torch.manual_seed(0)
    offsets = torch.tensor([0, 3, 7], dtype=torch.int32)
    q, k = torch.randn(2, 7, 2, 8), torch.randn(7, 2, 8)

    def attend(x: Tensor) -> Tensor:
        return fastattn.attention_varlen(x, k, k, offsets, offsets, 4, 4)

    assert torch.equal(torch.vmap(attend)(q), torch.stack([attend(x) for x in q]))


_OFFSETS = torch.tensor([0, 3, 16], dtype=torch.int32)
_TABLE = torch.zeros(16, 1, dtype=torch.int32)


@pytest.mark.parametrize("given, message", [
    ({"mask": torch.ones(1, 1, 1, 1)}, "mask"),
    ({"key_lengths": torch.tensor([3])}, "lengths"),
    ({"query_lengths": torch.tensor([3])}, "lengths"),
    ({"block_table": _TABLE}, "block_table"),
    ({"cu_seqlens_k": None}, "together"),
    ({"cu_seqlens_q": None}, "together|4 dimensions"),
])  # fmt: skip
@pytest.mark.parametrize("backend", [None, "cpu", "torch", "reference"])
def test_packed_calls_refuse_what_they_do_not_read(backend, given, message):
    """fp64 runs no C++ kernel. The public function cannot make such calls."""
    for dtype in (torch.float32, torch.float64) if backend != "cpu" else (torch.float32,):
        x = torch.ones(16, 2, 8, dtype=dtype)
        packed = packing(_OFFSETS, _OFFSETS, 13, 13)
        call = ForwardCall(x, x, x, **packed)._replace(**given)
        lse = torch.zeros(2, 16, dtype=dtype)
        backward = (x, None, x, lse, *call, [True, True, True, False, False, False])
        with pytest.raises((RuntimeError, NotImplementedError), match=message):
            OPS["attention_fwd"](*call, backend=backend)
        with pytest.raises((RuntimeError, NotImplementedError), match=message):
            OPS["attention_bwd"](*backward, backend=backend)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**62, 2**63 - 1, 2**70])
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_windows_beyond_every_position_are_unlimited(causal, size, backend):
    q = torch.randn(1, 1, 5, 4)
    k = torch.randn(1, 1, 7, 4)
    for window, same in (((size, 0), (-1, 0)), ((0, size), (0, -1)), ((size, size), None)):
        options: Inputs = {"causal": causal, "backend": backend}
        wide = fastattn.attention(q, k, k, window=window, **options)
        assert torch.equal(wide, fastattn.attention(q, k, k, window=same, **options))


_OFFSETS = torch.tensor([0, 1, 3], dtype=torch.int32)
_SEEDED: Inputs = {"dropout_p": 0.5, "dropout_seed": torch.tensor([1])}
_LENGTHS: Inputs = {
    "mask": torch.ones(3, 3),
    "key_lengths": torch.tensor([2]),
    "query_lengths": torch.tensor([2]),
}
_ROWS = {"x": torch.ones(2, 3), "weight": torch.ones(3)}
# Calls of the public functions with all tensor arguments.
_COMPLETE: dict[str, Inputs] = {
    "attention": dict.fromkeys("qkv", torch.ones(1, 2, 3, 4)) | _LENGTHS | _SEEDED,
    "attention_varlen": dict.fromkeys("qkv", torch.ones(3, 2, 4))
    | {"cu_seqlens_q": _OFFSETS, "cu_seqlens_k": _OFFSETS, "max_seqlen_q": 2, "max_seqlen_k": 2}
    | _SEEDED,
    "attention_with_weights": dict.fromkeys("qkv", torch.ones(1, 2, 3, 4)) | _LENGTHS | _SEEDED,
    "attention_weights": dict.fromkeys("qk", torch.ones(1, 2, 3, 4)) | _LENGTHS,
    "add_layer_norm": _ROWS
    | {"residual": torch.ones(2, 3), "x_bias": torch.ones(3), "bias": torch.ones(3)}
    | _SEEDED,
    "ffn": {"x": torch.ones(2, 3), "w1": torch.ones(5, 3), "b1": torch.ones(5)}
    | {"w2": torch.ones(3, 5), "b2": torch.ones(3), "residual": torch.ones(2, 3)}
    | _SEEDED,
    "layer_norm": _ROWS | {"bias": torch.ones(3)},
    "linear": {"x": torch.ones(2, 3), "weight": torch.ones(5, 3), "bias": torch.ones(5)},
    "prepare_mask": {"mask": torch.ones(3, 3)},
    "rms_norm": _ROWS,
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "mkldnn": lambda x: x.to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([*x], dtype=x.dtype),
    "jagged": lambda x: torch.nested.nested_tensor([*x], dtype=x.dtype, layout=torch.jagged),
}


def _in_other_layouts() -> list[Any]:
    found = []
    for op, inputs in _COMPLETE.items():
        for argument, x in inputs.items():
            if not isinstance(x, Tensor):
                continue
            for layout in LAYOUTS:
                lacks = {"csr": x.dim() < 2, "jagged": x.dim() < 2}
                lacks["mkldnn"] = not x.is_floating_point() or x.dim() < 2
                takes_jagged = (op, argument) in (("attention", "q"), ("linear", "x"))
                if not lacks.get(layout) and not (takes_jagged and layout in ("nested", "jagged")):
                    found.append((op, argument, layout))
    return found


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("op, argument, layout", _in_other_layouts())
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_other_layouts_are_refused_by_name(op, argument, layout, autocast):
    inputs = _COMPLETE[op]
    function = getattr(fastattn, op)
    function(**inputs)
    x = LAYOUTS[layout](inputs[argument])
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        pytest.raises(TypeError, match=f"^{argument} must be a dense tensor, got "),
    ):
        function(**inputs | {argument: x})


@pytest.mark.parametrize("op", [op for op in _COMPLETE if op != "prepare_mask"])
def test_other_devices_are_refused_by_name(op: str) -> None:
    """All tensors must be on the first one's device."""
    (_, *others), function = _COMPLETE[op], getattr(fastattn, op)
    for argument in others:
        x = _COMPLETE[op][argument]
        if isinstance(x, Tensor):
            with pytest.raises(ValueError, match=f"^{argument} must be on cpu "):
                function(**_COMPLETE[op] | {argument: x.to("meta")})


# -- raw ops and launches -------------------------------------------------------------------------
@pytest.mark.parametrize("op", SPECS)
def test_raw_ops_are_differentiable(op: str) -> None:
    """torch.ops.fastattn.*_fwd, and *_bwd with its results, called without the public function."""
    inputs = example_inputs(op, 4, torch.float64)
    varied = [inputs[n] for n in varied_inputs(inputs)]
    with CallRecorder() as recorder:
        outputs = as_tuple(SPECS[op].function(**inputs, backend="reference"))
        torch.autograd.grad(outputs, varied, [torch.ones_like(x) for x in outputs])
    (fwd, fwd_args, _), (bwd, bwd_args, _) = recorder.calls
    for called, direction in ((fwd, "fwd"), (bwd, "bwd")):
        assert called.name() == f"fastattn::{op_of(op).public_name}_{direction}.backend"
    fwd_values = dict(zip([a.name for a in fwd._schema.arguments], fwd_args, strict=False))
    bwd_values = dict(zip([a.name for a in bwd._schema.arguments], bwd_args, strict=False))
    results = [r.name for r in fwd._schema.returns]
    moving = [
        name
        for name, x in (fwd_values | bwd_values).items()
        if isinstance(x, Tensor) and x.is_floating_point() and name not in results
    ]

    def call(op: Any, values: dict[str, Any], changes: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return as_tuple(op(*(changes.get(name, x) for name, x in values.items())))

    def forward(*tensors: Tensor) -> list[Tensor]:
        outputs = call(fwd, fwd_values, dict(zip(moving, tensors, strict=True)))
        return [torch.where(x.isinf(), 0, x) for x in outputs if x.requires_grad]

    def backward(*tensors: Tensor) -> tuple[Tensor, ...]:
        changes = dict(zip(moving, tensors, strict=True))
        outputs = call(fwd, fwd_values, changes)
        return call(bwd, bwd_values, changes | dict(zip(results, outputs, strict=True)))

    tensors = [(fwd_values | bwd_values)[n].detach().requires_grad_() for n in moving]
    assert all(x.requires_grad for x in backward(*tensors))
    assert torch.autograd.gradcheck(forward, tensors, fast_mode=True)
    assert torch.autograd.gradcheck(backward, tensors, fast_mode=True)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls with which backends are launched from Python."""
    calls: list[Any] = []
    find = Op._launcher

    def launcher(self: Op, backend: str) -> Any:
        launch = find(self, backend)
        return lambda call: (calls.append(call), launch(call))[1]

    monkeypatch.setattr(Op, "_launcher", launcher)
    return calls


@pytest.mark.parametrize("op", ["attention", "attention_varlen"])
@pytest.mark.parametrize("argument", ["q", "k", "v"])
def test_kernels_get_contiguous_rows(op: str, argument: str, launched: list[Any]) -> None:
    """As some kernels require."""
    inputs = _COMPLETE[op]
    columns = torch.randn(inputs[argument].shape).mT.contiguous().mT
    assert columns.stride(-1) > 1
    getattr(fastattn, op)(**inputs | {argument: columns}, backend="reference")
    [args] = launched
    assert [x.stride(-1) for x in args[:3]] == [1, 1, 1]


@pytest.mark.parametrize("op", [op for op in SPECS if op != "linear"])
def test_backward_kernels_get_contiguous_rows(op: str, launched: list[Any]) -> None:
    """The gradient of a sum is an expanded tensor."""
    name = next(iter(_COMPLETE[op]))
    inputs = _COMPLETE[op] | {name: _COMPLETE[op][name].clone().requires_grad_()}
    results = getattr(fastattn, op)(**inputs, backend="reference")
    sum(x.sum() for x in as_tuple(results)).backward()
    assert launched[-1][0].stride(-1) == 1
