"""Forward-mode differentiation of the ops: torch.func.jvp, jacfwd, torch.autograd.forward_ad.

Tangents are compared with the fp64 tangents of the reference, and checked by finite differences.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from call_recorder import CallRecorder
from forward_mode import check_tangents, computed
from op_examples import SPECS, as_tuple, example_inputs, varied_inputs
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from fastattn.ops.attention import tangents as formulas
from fastattn.ops.ffn.op import ACTIVATIONS, GATED_ACTIVATIONS
from fastattn.testing.spec import Inputs

pytestmark = pytest.mark.usefixtures("no_request")
each_op = pytest.mark.parametrize("op", SPECS)
Function = Callable[..., tuple[Tensor, ...]]


def _example(op: str, backend: str | None = None, **changes: Any) -> tuple[Function, list[Tensor]]:
    """(a function of the floating inputs -> the results, these inputs), in fp64."""
    inputs = example_inputs(op, 4, torch.float64) | changes
    if op == "attention_varlen":
        inputs |= {n: inputs[n].detach().transpose(0, 1).requires_grad_() for n in "qkv"}
        inputs["return_lse"] = True
    if op == "ffn" and inputs["activation"] not in GATED_ACTIVATIONS:
        inputs["w2"] = torch.randn(6, 24, dtype=torch.float64, requires_grad=True)
    names = varied_inputs(inputs)

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = inputs | dict(zip(names, tensors, strict=True))
        results = as_tuple(getattr(fastattn, op)(**given, backend=backend))
        return tuple(torch.where(x.isinf(), 0, x) for x in results)  # lse of empty rows

    return function, [inputs[n].detach().contiguous() for n in names]


def _loss(function: Function) -> Callable[..., Tensor]:
    return lambda *tensors: sum(x.sin().sum() for x in function(*tensors))  # type: ignore[return-value]


def _random_like(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in tensors)


# -- values ---------------------------------------------------------------------------------------
_QUICK = {"attention": 5, "attention_varlen": 3}  # every how many samples are not slow
SAMPLES = [  # fp16 has the code of bf16
    pytest.param(
        spec, sample, dtype, (1, 2**11)[i % 2],
        id=f"{spec.name}-{sample.name}-{str(dtype).removeprefix('torch.')}",
        marks=[pytest.mark.slow] * (i % _QUICK.get(spec.name, 2) > 0),
    )
    for spec in SPECS.values()
    for i, sample in enumerate(spec.samples)
    if sample.gradients
    for dtype in sample.dtypes
    if dtype != torch.float16
]  # fmt: skip


@pytest.mark.parametrize("spec, sample, dtype, scores", SAMPLES)
def test_tangents_of_samples(spec, sample, dtype, scores, monkeypatch):
    """In blocks of 16 queries, of one head or of several heads or elements of the batch."""
    monkeypatch.setattr(formulas, "_ROWS", 16)
    monkeypatch.setattr(formulas, "_SCORES", scores)
    check_tangents(spec, sample, dtype)


_ROWS: Inputs = {
    "causal": "top_left", "window": (2, -1), "query_lengths": torch.tensor([4, 3]), "scale": -0.7,
    "key_lengths": torch.tensor([[0, 4, 2, 3], [4, 4, 1, 9]]),
}  # fmt: skip


@pytest.mark.parametrize("op, changes, backend", [
    *(pytest.param(op, {}, by, id=f"{op}-{by}") for op in SPECS for by in (None, "reference")),
    pytest.param("attention", _ROWS, None, id="attention-rows"),
    *(pytest.param("ffn", {"activation": a}, None, id=f"ffn-{a}") for a in ACTIVATIONS),
])  # fmt: skip
def test_finite_differences(op: str, changes: Inputs, backend: str | None) -> None:
    function, tensors = _example(op, backend, **changes)
    leaves = tuple(x.requires_grad_() for x in tensors)
    options: dict[str, Any] = {"fast_mode": True}
    assert gradcheck(
        function, leaves, check_forward_ad=True, check_batched_forward_grad=True, **options
    )
    assert gradgradcheck(function, leaves, check_fwd_over_rev=True, **options)


# -- transforms -----------------------------------------------------------------------------------
@each_op
def test_transforms(op: str) -> None:
    """jacfwd, and second derivatives by each order of the two modes."""
    function, tensors = _example(op)
    every, loss, tangents = tuple(range(len(tensors))), _loss(function), _random_like(tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.testing.assert_close(
            jacfwd(function, every)(*tensors), jacrev(function, every)(*tensors)
        )
        expected = jacrev(jacrev(loss))(*tensors)
        torch.testing.assert_close(hessian(loss)(*tensors), expected)

    def directional(*tensors: Tensor) -> Tensor:
        return jvp(loss, tensors, tangents)[1]

    def dot(*tensors: Tensor) -> Tensor:
        pairs = zip(grad(loss, every)(*tensors), tangents, strict=True)
        return sum((g * t).sum() for g, t in pairs)  # type: ignore[return-value]

    product = grad(dot, every)(*tensors)  # of the Hessian and the tangents, by reverse mode alone
    torch.testing.assert_close(grad(directional, every)(*tensors), product)
    torch.testing.assert_close(jvp(grad(loss, every), tuple(tensors), tangents)[1], product)
    torch.testing.assert_close(  # by the tangents
        grad(lambda *given: jvp(loss, tuple(tensors), given)[1], every)(*tangents),
        grad(loss, every)(*tensors),
    )
    second = sum((g * t).sum() for g, t in zip(product, tangents, strict=True))
    torch.testing.assert_close(jvp(directional, tuple(tensors), tangents)[1], second)


@each_op
def test_primal_results_keep_their_bits(op: str) -> None:
    function, tensors = _example(op)
    results = jvp(function, tuple(tensors), _random_like(tensors))[0]
    for x, y in zip(results, function(*tensors), strict=True):
        assert torch.equal(x, y)


@each_op
def test_tensors_without_tangents_in_a_dual_level(op: str) -> None:
    function, tensors = _example(op)
    with forward_ad.dual_level():
        assert all(forward_ad.unpack_dual(x).tangent is None for x in function(*tensors))


def test_autocast_does_not_apply_to_tangents() -> None:
    q, t = torch.randn(2, 1, 2, 5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = jvp(lambda x: fastattn.rms_norm(x), (q,), (t,))[1]
    assert torch.equal(found, jvp(lambda x: fastattn.rms_norm(x), (q,), (t,))[1])


def test_errors_of_backends_keep_their_type() -> None:
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(NotImplementedError, match="backend sm90 runs on cuda tensors"):
        jvp(lambda x: fastattn.attention(x, x, x, backend="sm90"), (q,), (q,))


@pytest.mark.parametrize("op", ["attention", "attention_varlen", "add_layer_norm"])
def test_compiled(op: str) -> None:
    function, tensors = _example(op)
    tangents = _random_like(tensors)

    def both(*tensors: Tensor) -> Any:
        return jvp(function, tensors, tangents)

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(*tensors), both(*tensors))


# -- attention ------------------------------------------------------------------------------------
def _maps_views_of_dtypes() -> bool:
    """Whether torch.vmap can view a tensor as another dtype, as dropout's bytes need."""
    try:
        torch.vmap(lambda x: x.view(torch.uint8))(torch.zeros(2, 4, dtype=torch.int32))
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("name, values", [
    ("mask", torch.randn(3, 1, 1, 5, 5, generator=torch.Generator().manual_seed(4))),
    ("key_lengths", torch.tensor([[3], [5], [0]])),
    pytest.param(
        "dropout_seed",
        torch.tensor([[7], [8], [9]]),
        marks=pytest.mark.skipif(not _maps_views_of_dtypes(), reason="needs a later torch"),
    ),
])  # fmt: skip
def test_mapped_arguments(name: str, values: Tensor) -> None:
    q, t = torch.randn(2, 1, 2, 5, 8)
    options: dict[str, Any] = {"dropout_p": 0.5} if name == "dropout_seed" else {}

    def tangent(value: Tensor) -> Tensor:
        def function(x: Tensor) -> Tensor:
            return fastattn.attention(x, x, x, **options | {name: value})

        return jvp(function, (q,), (t,))[1]

    torch.testing.assert_close(torch.vmap(tangent)(values), torch.stack([*map(tangent, values)]))


def _tensors(dtype: torch.dtype = torch.float32) -> tuple[Inputs, dict[str, Tensor]]:
    """(q, k and v of 4 heads in groups of 2 and several blocks of queries, their tangents)."""
    generator = torch.Generator().manual_seed(6)
    shapes = {"q": (2, 4, 130, 16), "k": (2, 2, 140, 16), "v": (2, 2, 140, 16)}
    inputs, tangents = (
        {n: torch.randn(x, generator=generator).to(dtype) for n, x in shapes.items()}
        for _ in range(2)
    )
    return inputs | {"return_lse": True}, tangents


def _dead_by(what: str) -> tuple[dict[str, Any], slice, slice]:
    """(restrictions of 130 queries and 140 keys, the dead rows and keys of the last entry)."""
    mask = torch.ones(2, 1, 130, 140, dtype=torch.bool)
    mask[1, :, 100:110] = False
    mask[1, :, :, 30:60] = False
    lengths = torch.full((2, 130), 140)
    lengths[1] = 70
    lengths[1, 90:] = 0
    both = {"key_lengths": torch.tensor([140, 70]), "query_lengths": torch.tensor([130, 97])}
    return {
        "lengths": (both, slice(97, 130), slice(70, 140)),
        "lengths of queries": ({"key_lengths": lengths}, slice(90, 130), slice(70, 140)),
        "mask": ({"mask": mask}, slice(100, 110), slice(30, 60)),
        "bias": (
            {"mask": torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)},
            slice(100, 110),
            slice(30, 60),
        ),
    }[what]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", ["lengths", "lengths of queries", "mask", "bias"])
def test_dead_positions_may_hold_anything(what: str, dtype: torch.dtype) -> None:
    """In inputs and tangents: the bits as if they held 0."""
    restrictions, rows, keys = _dead_by(what)

    def tangents_with(dead_input: float, dead_tangent: float) -> tuple[Tensor, ...]:
        inputs, tangents = _tensors(dtype)
        inputs |= restrictions
        for name, positions in {"q": rows, "k": keys, "v": keys}.items():
            inputs[name][1, :, positions] = dead_input
            tangents[name][1, :, positions] = dead_tangent
        if what == "bias":
            blocked = restrictions["mask"].isinf()
            tangents["mask"] = torch.ones(blocked.shape).masked_fill(blocked, dead_tangent)
        return computed(SPECS["attention"], inputs, tangents)

    found = tangents_with(torch.nan, torch.inf)
    for x, y in zip(found, tangents_with(0.0, 0.0), strict=True):
        assert torch.equal(x, y) and x.isfinite().all()
        assert (x[1, :, rows] == 0).all()


def test_nan_in_a_live_tangent_propagates() -> None:
    for name in "qkv":
        inputs, tangents = _tensors()
        tangents[name][0, 1, 129, 3] = torch.nan
        out, lse = computed(SPECS["attention"], inputs, tangents)
        expected = torch.zeros(out.shape, dtype=torch.bool)
        if name == "q":
            expected[0, 1, 129] = True
        elif name == "k":
            expected[0, 2:] = True  # the group of this key head
        else:
            expected[0, 2:, :, 3] = True
        assert torch.equal(out.isnan(), expected)
        assert torch.equal(lse.isnan(), expected.all(-1) if name != "v" else lse.isinf())


def test_columns_of_a_jacobian_share_a_call() -> None:
    q = torch.randn(1, 2, 5, 8)
    with CallRecorder() as recorder:
        found = jacfwd(lambda x: fastattn.attention(x, q, q))(q)
    assert recorder.names == ["attention_fwd"]
    torch.testing.assert_close(found, jacrev(lambda x: fastattn.attention(x, q, q))(q))


class _Largest(TorchDispatchMode):
    """The number of elements of the largest result of any operator."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = op(*args, **kwargs or {})
        for x in as_tuple(results):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return results


@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_linear_in_the_length(causal: bool) -> None:
    S = 4096
    q = torch.randn(1, 2, S, 8)
    with forward_ad.dual_level(), _Largest() as largest:
        x = forward_ad.make_dual(q, torch.randn_like(q))
        fastattn.attention(x, x, x, causal=causal)
    assert largest.elements <= formulas._ROWS * S
