"""Attention's CPU kernels beyond the samples that test_ops.py runs: every instruction set,
bits that do not depend on the threads, layouts, and memory.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cpu_library import assert_threads_change_no_bit, every_isa, needs_library
from torch import Tensor

import fastattn
from fastattn.ops import _select
from fastattn.ops._op import Op
from fastattn.ops.attention import cpu
from fastattn.ops.attention.spec_inputs import make_inputs
from fastattn.testing.oracle import Oracle, output_gradients, run_op
from fastattn.testing.poison import poisoned_results
from fastattn.testing.spec import OpSpec, Sample, all_specs

SPEC = all_specs()["attention"]
pytestmark = needs_library
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# -- instruction sets -----------------------------------------------------------------------------
def _check(dtype: torch.dtype, through: tuple[str, ...] = (), **options: Any) -> None:
    """Results and gradients against fp64. through: the results that have a gradient."""

    def douts(spec: OpSpec, sample: Sample, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        given = output_gradients(spec, sample, outputs)
        names = zip(given, spec.results, strict=True)
        return tuple(x * (not through or name in through) for x, name in names)

    leaves = ("q", "k", "v", "mask", "sinks", "relative_bias")
    sample = Sample("made", "made here", partial(make_inputs, **options), leaves)
    oracle = Oracle(SPEC, sample, dtype, douts)
    with poisoned_results():
        results = run_op(SPEC, sample, sample.inputs("cpu", dtype), "cpu", douts)
    for name, value in results.items():
        assert (comparison := oracle.judge(name, value)).ok, (name, comparison.message)


@every_isa
@pytest.mark.parametrize(
    "dtype, scale",
    # With a larger scale, gradients of lse overflow in fp16.
    [(torch.float32, 100.0), (torch.bfloat16, 100.0), (torch.float16, 0.125)],
)
@pytest.mark.parametrize("M", [65, 3])
def test_huge_scores(isa: str, M: int, dtype: torch.dtype, scale: float) -> None:
    """The rounding errors of scores and of lse are large; recomputed weights must not exceed 1."""
    _check(dtype, M=M, N=128, scale=scale, amplitude=1e4, key_amplitude=1e4)


def _attend(form: str, q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
    """The output of one sequence, [1, H, M, E]."""
    if form == "padded":
        return fastattn.attention(q, k, v, backend=backend)  # type: ignore[return-value]
    if form == "with weights":
        return fastattn.attention_with_weights(q, k, v, backend=backend)[0]
    ends = [torch.tensor([0, x.shape[2]], dtype=torch.int32) for x in (q, k)]
    packed = (x[0].transpose(0, 1) for x in (q, k, v))
    out = fastattn.attention_varlen(*packed, *ends, q.shape[2], k.shape[2], backend=backend)
    return out.transpose(0, 1)[None]  # type: ignore[union-attr]


@every_isa
@pytest.mark.parametrize("form", ["padded", "packed", "with weights"])
@pytest.mark.parametrize("M, H", [(1, 1), (2, 1), (8, 1), (2, 4), (16, 1)])
@pytest.mark.parametrize("amplitude", [300.0, 1e3, 1e4, 1e5])
def test_weights_of_scores_whose_products_cancel_sum_to_1(isa, form, M, H, amplitude):
    """Their rounding errors depend on the order of sums; the gradient of v does not show it."""
    N, D = 1100, 16
    noise = torch.rand(M, 8, generator=torch.Generator().manual_seed(0))
    q, k = torch.zeros(1, H, M, D), torch.zeros(1, 1, N, D)
    q[..., :8] = amplitude * (1 + 0.01 * noise)
    k[..., :8:2], k[..., 1:8:2] = amplitude, -amplitude
    v = _randn(1, 1, N, D).requires_grad_()
    _attend(form, q, k, v, "cpu").sum().backward()
    assert v.grad is not None
    assert v.grad.double().sum().item() / (D * M * H) == pytest.approx(1, rel=1e-3)


# -- threads --------------------------------------------------------------------------------------
def _randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _results_of_all_options(
    B: int, H: int, K: int, M: int, N: int, dtype: torch.dtype
) -> list[Tensor]:
    """Outputs and gradients of a call with every restriction, change of scores and dropout."""
    q = _randn(B, H, M, 40, dtype=dtype, seed=1).requires_grad_()
    k = _randn(B, K, N, 40, dtype=dtype, seed=2).requires_grad_()
    v = _randn(B, K, N, 24, dtype=dtype, seed=3).requires_grad_()
    mask = _randn(1, H, 1, N, seed=4).requires_grad_()
    sinks, slopes, table = (
        _randn(*shape, seed=seed).requires_grad_()
        for seed, shape in ((7, (H,)), (8, (B, H)), (9, (H, 32)))
    )
    outputs = fastattn.attention(
        q, k, v, mask=mask, key_lengths=torch.tensor([N, N // 2] * B)[:B], causal="bottom_right",
        query_lengths=torch.tensor([M, M - 5] * B)[:B], window=(N // 2, -1), dropout_p=0.1,
        dropout_seed=torch.tensor([5]), sinks=sinks, alibi_slopes=slopes, relative_bias=table,
        relative_buckets="t5", softcap=2.0, return_lse=True, backend="cpu",
    )  # fmt: skip
    gradients = [_randn(*x.shape, dtype=x.dtype, seed=6) for x in outputs]
    inputs = (q, k, v, mask, sinks, slopes, table)
    return [*outputs, *torch.autograd.grad(outputs, inputs, gradients)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B, H, K, M, N", [
    pytest.param(2, 4, 2, 260, 300, id="one pass over all gradients"),
    pytest.param(1, 2, 1, 300, 400, id="keys and queries in passes of their own"),
    # More tiles of keys than parts of the sums by distance.
    pytest.param(1, 2, 1, 40, 1200, id="keys and queries in passes of their own, many keys"),
    pytest.param(3, 8, 4, 1, 3000, id="one query"),
    pytest.param(2, 8, 4, 3, 2100, id="few queries"),
])  # fmt: skip
def test_threads_change_no_bit(B: int, H: int, K: int, M: int, N: int, dtype: torch.dtype) -> None:
    assert_threads_change_no_bit(lambda: _results_of_all_options(B, H, K, M, N, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_a_large_group(dtype: torch.dtype) -> None:
    """More heads of one group than a workspace holds give the same bits as fewer heads."""
    q = _randn(1, 100, 1, 24, dtype=dtype, seed=1)
    k, v = (_randn(1, 1, 1100, 24, dtype=dtype, seed=s) for s in (2, 3))
    together = fastattn.attention(q, k, v, return_lse=True, backend="cpu")
    for h in (0, 50, 95, 96, 99):
        alone = fastattn.attention(q[:, h : h + 1], k, v, return_lse=True, backend="cpu")
        for one, many in zip(alone, together, strict=True):
            assert torch.equal(one, many[:, h : h + 1]), h


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M", [2, 5, 8])
def test_a_short_sequence_has_the_bits_of_a_padded_batch(M: int, dtype: torch.dtype) -> None:
    """Its queries are few, but it attends to itself."""
    q, k, v = (_randn(2, 2, 20, 32, dtype=dtype, seed=s) for s in range(3))
    attend = partial(fastattn.attention, return_lse=True, backend="cpu")
    padded = attend(q, k, v, key_lengths=torch.tensor([20, M]))
    alone = attend(*(x[1:, :, :M] for x in (q, k, v)))
    assert all(torch.equal(one[0], many[1, :, :M]) for one, many in zip(alone, padded, strict=True))


# -- layouts of masks -----------------------------------------------------------------------------
@every_isa
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("mask_dtype", [torch.bool, *DTYPES, torch.float64])
def test_the_layout_of_a_mask_changes_no_bit(isa, mask_dtype, dtype):
    """Masks that kernels read in place or convert row by row, and values that block."""
    M, N, D = 101, 144, 16
    q, k, v = (_randn(1, 2, n, D, dtype=dtype, seed=n) for n in (M, N, N))
    mask = _randn(1, 2, M, N, seed=5)
    blocked = mask > 0.5
    if mask_dtype is torch.bool:
        mask = ~blocked
    else:
        mask = mask.to(mask_dtype)
        mask[blocked] = -torch.inf
        mask[..., ::7] = torch.finfo(mask_dtype).min
    apart = torch.stack([mask, mask], -1)[..., 0]
    assert apart.stride(-1) == 2

    lying, strided = (
        _outputs_and_gradients([q, k, v], mask=m, backend="cpu") for m in (mask, apart)
    )
    for one, other in zip(lying, strided, strict=True):
        assert torch.equal(one, other)


# -- requested gradients --------------------------------------------------------------------------
@pytest.mark.parametrize(
    "wanted",
    ["q", "k", "v", "mask", "qv", "kmask", "sinks", "relative_bias", "qrelative_bias", "vsinks"],
)
@pytest.mark.parametrize("through", ["out", "lse"])
def test_some_gradients(wanted: str, through: str) -> None:
    """The bits of a gradient do not depend on which others are requested."""
    inputs = {name: _randn(1, 2, 100, 16, seed=i) for i, name in enumerate("qkv")}
    inputs["mask"] = _randn(1, 2, 1, 100, seed=7)
    inputs["sinks"], inputs["relative_bias"] = _randn(2, seed=5), _randn(2, 9, seed=6)
    options: dict[str, Any] = {"relative_buckets": "clipped", "softcap": 2.0}

    def gradients(names: list[str]) -> dict[str, Tensor]:
        given = {n: x.clone().requires_grad_(n in names) for n, x in inputs.items()}
        with poisoned_results():
            out, lse = fastattn.attention(**given, **options, return_lse=True, backend="cpu")
            result = out if through == "out" else lse
            values = torch.autograd.grad(
                result, [given[n] for n in names], _randn(*result.shape, seed=8)
            )
        return dict(zip(names, values, strict=True))

    names = re.findall("mask|sinks|relative_bias|q|k|v", wanted)
    everything = gradients([*inputs])
    for name, value in gradients(names).items():
        assert torch.equal(value, everything[name]), name


@pytest.mark.parametrize("shape", [(2, 1, 1, 70), (1, 3, 40, 1), (1, 1, 40, 70), (1, 1, 1, 1)])
def test_mask_in_fp64(shape: tuple[int, ...]) -> None:
    """The lowest value of fp64 blocks, that of fp32 does not; the gradient is in fp64."""
    q, k, v = (_randn(2, 3, n, 8, seed=i).double() for i, n in enumerate((40, 70, 70)))
    mask = _randn(*shape, seed=9).double()
    if shape[-1] > 1:
        mask[..., ::5] = torch.finfo(torch.float64).min
        mask[..., 1::5] = torch.finfo(torch.float32).min  # does not block in fp64
    else:
        mask[..., 3::5, :] = -torch.inf  # dead rows, which have no gradient

    def results(dtype: torch.dtype, backend: str) -> tuple[Tensor, ...]:
        given = mask.clone().requires_grad_()
        out, lse = fastattn.attention(
            *(x.to(dtype) for x in (q, k, v)), mask=given, return_lse=True, backend=backend
        )
        dout, dlse = _randn(*out.shape, seed=10), _randn(*lse.shape, seed=11)
        total = (out.double() * dout).sum() + (lse.double() * dlse).sum()
        return out, lse, *torch.autograd.grad(total, given)

    for actual, exact in zip(
        results(torch.float32, "cpu"), results(torch.float64, "reference"), strict=True
    ):
        torch.testing.assert_close(actual.double(), exact.double(), rtol=1e-4, atol=1e-4)


# -- score modifications --------------------------------------------------------------------------
@every_isa
@pytest.mark.parametrize("through", ["out", "lse"])
@pytest.mark.parametrize("mask", ["inf BHM", "inf M", "float H"])
def test_a_value_for_all_keys_of_a_row_competes_with_the_sink(isa, mask, through):
    """Without sinks, such a mask changes no weight, and its gradient is that of lse."""
    _check(torch.float32, (through,), M=40, N=70, D=8, H=3, mask=mask, sinks=0.0)


@every_isa
def test_the_gradients_of_saturated_scores_are_0(isa: str) -> None:
    q, k, v = ((10 * _randn(1, 2, 20, 16, seed=i)).abs().requires_grad_() for i in range(3))
    for cap in (1.0, 3.0, 7.0):
        out = fastattn.attention(q, k, v, softcap=cap, backend="cpu")
        for gradient in torch.autograd.grad(out, (q, k), _randn(1, 2, 20, 16)):
            assert not gradient.any()


@every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("M, N", [(250, 1500), (1, 300)])
def test_a_value_for_each_distance(isa: str, M: int, N: int, dtype: torch.dtype) -> None:
    """Over several tiles and parts of the keys; each has a gradient of its own."""
    relative = ("clipped", 2 * N + 1, N)
    _check(dtype, B=1, H=1, M=M, N=N, D=16, relative=relative, causal="bottom_right")


@every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("restriction", ["bool", "-inf", "min", "causal", "window"])
@pytest.mark.parametrize("M, N", [(130, 260), (1, 300)])
def test_the_bias_of_a_distance_that_only_blocked_pairs_have_may_be_anything(
    isa: str, M: int, N: int, restriction: str, dtype: torch.dtype
) -> None:
    """The bits are those of a finite bias."""
    distance = torch.arange(N) - torch.arange(M)[:, None] - (N - M)
    pattern = distance % 3 == 0
    options: dict[str, Any] = {"causal": "bottom_right"}
    if restriction == "window":
        options["window"] = (40, 0)
        blocked = distance < -40
    elif restriction == "causal":
        blocked = distance > 0
    elif restriction == "bool":
        options["mask"], blocked = pattern, ~pattern
    else:
        lowest = -torch.inf if restriction == "-inf" else torch.finfo(torch.float32).min
        options["mask"] = _randn(M, N, seed=7).masked_fill(~pattern, lowest)
        blocked = ~pattern
    q, k, v, dout = (_randn(2, 2, n, 16, dtype=dtype, seed=i) for i, n in enumerate((M, N, N, M)))

    def results(filling: float) -> list[Tensor]:
        table = _randn(2, 2 * N + 1, seed=5)
        table[:, distance[blocked].unique() + N] = filling
        inputs = [x.detach().requires_grad_() for x in (q, k, v, table)]
        relative = {"relative_bias": inputs[3], "relative_buckets": "clipped"}
        outputs = fastattn.attention(
            *inputs[:3], **relative, **options, return_lse=True, backend="cpu"
        )
        return [*outputs, *torch.autograd.grad(outputs[0], inputs, dout)]

    finite = results(0.0)
    assert all(x.isfinite().all() for x in finite)
    for filling in (torch.nan, torch.inf):
        for one, other in zip(results(filling), finite, strict=True):
            assert torch.equal(one, other)


def test_slopes_in_any_layout() -> None:
    """The op's bias by distance, and its gradient, have the layout of the slopes."""
    q, k, v, dout = (_randn(3, 2, 40, 16, seed=i) for i in range(4))
    slopes = _randn(2, 3, seed=5).mT
    assert not slopes.is_contiguous()

    def results(slopes: Tensor, backend: str | None) -> list[Tensor]:
        slopes = slopes.detach().requires_grad_()
        out = fastattn.attention(q, k, v, alibi_slopes=slopes, backend=backend)
        return [out, *torch.autograd.grad(out, slopes, dout)]

    expected = results(slopes.contiguous(), "cpu")
    for backend in ("cpu", None):
        for one, other in zip(results(slopes, backend), expected, strict=True):
            assert torch.equal(one, other)


# -- layouts -------------------------------------------------------------------------------------
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads inside rows": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "rows of a larger tensor": lambda x: torch.cat([x, x], 3)[..., : x.shape[3]],
    "rows an odd number apart": lambda x: torch.cat([x, x[..., :1]], 3)[..., : x.shape[3]],
    "every other row": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "batch inside": lambda x: x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3),
    "last dimension not contiguous": lambda x: x.mT.contiguous().mT,
}


# -- results made by the library ------------------------------------------------------------------
PLAIN: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {  # B, H, K, M, N, D, E; options
    "one query": ((2, 4, 2, 1, 300, 64, 64), {}),
    "one query of a small head": ((1, 3, 3, 1, 5, 8, 24), {"scale": 0.3}),
    "few queries": ((2, 4, 2, 3, 300, 64, 64), {"causal": "bottom_right"}),
    "short": ((2, 3, 3, 16, 16, 64, 64), {"causal": True}),
    "odd": ((1, 4, 2, 33, 70, 24, 40), {"scale": -0.2}),
    "several tiles": ((1, 2, 2, 200, 200, 16, 16), {"causal": True}),
    "read in place": ((2, 3, 3, 160, 160, 64, 64), {"causal": True}),
    "no queries": ((2, 3, 3, 0, 5, 8, 8), {}),
    "no keys": ((2, 3, 3, 5, 0, 8, 8), {}),
    "no batch": ((0, 3, 3, 5, 5, 8, 8), {}),
    "no heads": ((2, 0, 0, 5, 5, 8, 8), {}),
}


def _outputs_and_gradients(
    inputs: list[Tensor], view: Callable[[Tensor], Tensor] = lambda x: x, **options: Any
) -> list[Tensor]:
    """view: of the output gradient."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    without_graph = fastattn.attention(*inputs, return_lse=True, **options)
    outputs = fastattn.attention(*leaves, return_lse=True, **options)
    dout = _randn(*outputs[0].shape, dtype=inputs[0].dtype, seed=9)
    return [*without_graph, *outputs, *torch.autograd.grad(outputs[0], leaves, view(dout))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", [lambda x: x, *VIEWS.values()], ids=["contiguous", *VIEWS])
@pytest.mark.parametrize("case", PLAIN.values(), ids=PLAIN)
def test_automatic_and_named_calls_have_the_same_bits(case, view, dtype):
    """Results and workspace of the library, poisoned or not, and results made in Python; for every
    layout those of its contiguous copy.
    """
    (B, H, K, M, N, D, E), options = case
    shapes = ((B, H, M, D), (B, K, N, D), (B, K, N, E))
    dense = [_randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    inputs = [*map(view, dense)]
    named = _outputs_and_gradients(inputs, view, **options, backend="cpu")
    automatic = _outputs_and_gradients(inputs, view, **options)
    with poisoned_results():
        poisoned = _outputs_and_gradients(inputs, view, **options)
    contiguous = _outputs_and_gradients(dense, **options)
    for one, other, third, fourth in zip(named, automatic, poisoned, contiguous, strict=True):
        assert torch.equal(one, other) and torch.equal(one, third) and torch.equal(one, fourth)
        assert one.stride() == other.stride() == third.stride()


# -- layouts and memory ---------------------------------------------------------------------------
def test_gradients_of_overlapping_inputs() -> None:
    bases = [torch.randn(1, 2, 11, requires_grad=True) for _ in range(3)]
    windows = [base.unfold(2, 8, 1) for base in bases]
    got = torch.autograd.grad(fastattn.attention(*windows).sum(), bases)
    right = torch.autograd.grad(fastattn.attention(*windows, backend="reference").sum(), bases)
    torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)


def test_saved_tensors_may_come_back_in_another_layout() -> None:
    inputs = [torch.randn(2, 2, 4, 8, requires_grad=True) for _ in range(3)]
    calls = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor)
        return tensor.transpose(0, 1).contiguous()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.transpose(0, 1)):
        out = fastattn.attention(*inputs)
    saved = len(calls)
    got = torch.autograd.grad(out.sum(), inputs)
    assert len(calls) == saved == 5
    for x, y in zip(
        got, torch.autograd.grad(fastattn.attention(*inputs).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(x, y)


def test_more_positions_than_the_kernels_support_use_another_backend(monkeypatch):
    """The library and `unsupported` agree."""
    asked: list[str | None] = []

    def run(self: Op, args: Any, backend: str | None) -> tuple[Tensor, ...]:
        asked.append(backend)
        return self.allocate(args)

    q = torch.zeros(1, 1, 1, 1)
    most, more = (q.expand(1, 1, cpu._MAX_POSITIONS + i, 1) for i in (0, 1))
    assert fastattn.explain("attention", q, most, most).chosen == "cpu"
    assert fastattn.explain("attention", q, more, more).chosen == "torch"
    monkeypatch.setattr(Op, "run", run)
    fastattn.attention(q, more, more)
    assert asked == [_select.NOT_CPU]


@pytest.mark.parametrize("backend", [None, "cpu", "torch", "reference"])
@pytest.mark.parametrize("B, M, N", [(1, 0, 64), (1, 3, 0), (0, 3, 4)])
def test_biases_of_no_pairs_have_zero_gradients(B, M, N, backend):
    """Gradients of a sink are 0 too: out of no key is 0, and rows of no batch have no lse."""
    q, k = torch.randn(B, 2, M, 8), torch.randn(B, 2, N, 8)
    mask = torch.randn(1, 1, 1, N, requires_grad=True)
    table, sinks = torch.randn(2, 5, requires_grad=True), torch.randn(2, requires_grad=True)
    options: dict[str, Any] = {"relative_bias": table, "relative_buckets": "clipped"}
    with poisoned_results():
        out = fastattn.attention(q, k, k, mask=mask, sinks=sinks, **options, backend=backend)
        gradients = torch.autograd.grad(out.sum(), (mask, table, sinks))
    for gradient in gradients:
        assert torch.equal(gradient, torch.zeros_like(gradient))
