"""The feed-forward network in Triton: values and configs.

On a GPU the samples of the op run in tests/ops/test_ops.py. Without one, test_in_the_interpreter.py
runs this file in Triton's interpreter.
"""

import contextlib
import re
from functools import partial
from typing import Any

import pytest
import torch
from compiled_kernels import GENERATIONS, LEAST_SHARED_MEMORY, compiles
from op_examples import assert_same_bits
from torch import Tensor
from triton_values import DEVICE, NAN, apart, check, interpreted, launched_by, made, runs

from fastattn.ops import _env
from fastattn.ops._dropout import SECOND_STREAM, drop_rows
from fastattn.ops._op import OPS
from fastattn.ops.ffn import config, reference
from fastattn.ops.ffn import triton as launchers
from fastattn.ops.ffn.calls import BackwardCall, ForwardCall
from fastattn.ops.ffn.config import (
    SUMMED,
    Up,
    UpTile,
    candidates,
    elementwise_tile,
    rows_per_group,
    up_config,
)
from fastattn.ops.ffn.op import ACTIVATIONS
from fastattn.ops.ffn.spec import SPECS, make_inputs
from fastattn.ops.ffn.triton_steps import group_count
from fastattn.testing.compare import compare
from fastattn.testing.spec import Inputs, Sample

slow = pytest.mark.slow
[SPEC] = SPECS
BF16, FP16 = torch.bfloat16, torch.float16


# -- values ---------------------------------------------------------------------------------------
def _samples() -> list[Any]:
    """Two dtypes; one of them, in turns, is slow, and so are the largest samples."""
    return [
        pytest.param(
            sample,
            dtype,
            marks=() if i == n % 2 and sample.name not in ("many_rows", "blocks") else slow,
            id=f"{sample.name}-{str(dtype)[6:]}",
        )
        for n, sample in enumerate(SPEC.samples)
        for i, dtype in enumerate(sample.dtypes[:2])
    ]


@interpreted
@pytest.mark.parametrize("sample, dtype", _samples())
def test_sample(sample: Sample, dtype: torch.dtype) -> None:
    check(SPEC, sample, dtype)


# Small tiles, so that small tensors have several.
TILES = {
    "pointers": UpTile(32, 32, 16, 4, 1, subtiles=1, group=2),
    "persistent": UpTile(32, 64, 32, 4, 1, subtiles=2, group=2, programs=2),
    "descriptors": UpTile(64, 32, 32, 4, 1, subtiles=4, tma=True),
}


def _tiled(tiling: str | None) -> contextlib.AbstractContextManager[None]:
    """Inside, Triton computes the first product in these tiles, PyTorch without."""
    up = Up(None if tiling is None else TILES[tiling], "tested")
    return launched_by("ffn_fwd", partial(launchers.ffn_fwd_with_config, up))


def _fused() -> list[Any]:
    cases = [(a, "descriptors", BF16) for a in ACTIVATIONS]
    cases += [(a, "pointers", FP16) for a in ("relu", "gelu", "swiglu")]
    names = ("odd_sizes", "weights_transposed", "one_hidden", "row_stride")
    cases += [(name, "descriptors", BF16) for name in names]
    names = ("odd_sizes", "no_bias", "three_dimensions", "no_rows", "fp32_residual")
    cases += [(name, "persistent", BF16) for name in names]
    return cases


@runs
@pytest.mark.parametrize("name, tiling, dtype", _fused(), ids=str)
def test_first_product(name: str, tiling: str, dtype: torch.dtype) -> None:
    with _tiled(tiling):
        check(SPEC, SPEC.sample(name), dtype)


def _call(**options: Any) -> Sample:
    return made(make_inputs, "x w1 b1 w2 b2", "calls", **{"rows": (9,), **options})


def _backward_call(sample: Sample, dtype: torch.dtype) -> BackwardCall:
    """With random output gradients, on the forward's own hidden tensor."""
    given = {n: x.detach() if isinstance(x, Tensor) else x
             for n, x in sample.inputs(DEVICE, dtype).items()}  # fmt: skip
    options = {name: given.get(name, 0.0) for name in ("dropout_p", "output_dropout_p")}
    options |= {"dropout_seed": given.get("dropout_seed"), "residual": given.get("residual")}
    call = ForwardCall(**{**given, **options, "dropout_stream": given.get("dropout_stream", 0)})
    y, hidden = OPS["ffn_fwd"](*call, backend="triton")
    return BackwardCall(torch.randn_like(y), *call[:5], hidden, *call[6:], [True] * 5)


def _gradients(call: BackwardCall) -> tuple[Tensor, ...]:
    return tuple(OPS["ffn_bwd"](*call, backend="triton"))


@interpreted
@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_needed_gradients_alone(activation: str) -> None:
    """A gradient has the same bits whether it is computed alone or with the others."""
    call = _backward_call(SPEC.sample(activation), torch.float32)
    together = _gradients(call)
    for i in range(5):
        alone = _gradients(call._replace(needs=[i == j for j in range(5)]))
        for j, (actual, expected) in enumerate(zip(alone, together, strict=True)):
            assert torch.equal(actual, expected) if i == j else actual.numel() == 0


@runs
@pytest.mark.parametrize("tiling", [None, "descriptors"])
def test_a_plan_is_for_any_number_of_rows(tiling: str | None) -> None:
    """But for one width."""
    plans = []
    for rows, out in ((0, 24), (70, 24), (13, 24), (70, 32)):
        with _tiled(tiling):
            sample = _call(rows=(rows,), hidden=40, out=out, output_dropout_p=0.1)
            check(SPEC, sample, BF16)
        plans.append(len(launchers._plans))
    assert plans[0] < plans[1] == plans[2] < plans[3]


_CHANGES: dict[str, dict[str, Any]] = {
    "wider input": {"D": 32, "out": 24},
    "wider output": {"out": 32},
    "fewer hidden": {"hidden": 32},
    "no biases": {"bias": False},
    "another activation": {"activation": "silu"},
    "gated": {"activation": "reglu"},
    "residual": {"residual": "same"},
    "fp32 residual": {"residual": "fp32"},
    "dropout 0.5": {"dropout_p": 0.5},
    "dropout 0.2": {"dropout_p": 0.2},
    "output dropout 0.5": {"output_dropout_p": 0.5},
    "output dropout 0.2": {"output_dropout_p": 0.2},
    "row stride": {"layout": "rows"},
    "transposed weights": {"layout": "weights"},
}


@runs
@pytest.mark.parametrize("tiling", [None, "pointers"])
@pytest.mark.parametrize("change", [*_CHANGES, "b1", "b2"])
def test_calls_that_differ_in_one_option(change: str, tiling: str | None) -> None:
    """A plan cached for one call is not used for the other; one bias may be absent."""

    def make(*args: Any) -> Inputs:
        return make_inputs(*args, rows=(9,), **_CHANGES.get(change, {})) | dict.fromkeys(
            {change} & {"b1", "b2"}
        )

    with _tiled(tiling):
        check(SPEC, _call(), FP16)
        check(SPEC, Sample("calls", "made here", make, ("x", "w1", "w2")), FP16)


@interpreted
@pytest.mark.parametrize("tiling", [None, "pointers"])
def test_calls_that_differ_in_strides(tiling: str | None) -> None:
    call = _backward_call(_call(residual="same", output_dropout_p=0.2), FP16)
    forward = ForwardCall(*call[1:6], torch.randn_like(call.dy), *call[7:-1])
    with _tiled(tiling):
        expected = tuple(OPS["ffn_fwd"](*forward, backend="triton"))
        for names in (("residual",), ("b1", "b2")):
            strided = forward._replace(**{name: apart(getattr(forward, name)) for name in names})
            assert_same_bits(tuple(OPS["ffn_fwd"](*strided, backend="triton")), expected)
    gradients = _gradients(call)
    for name in ("dy", "hidden", "x"):
        assert_same_bits(_gradients(call._replace(**{name: apart(getattr(call, name))})), gradients)
    columns_apart = torch.stack([call.hidden] * 2, 2)[..., 0]
    assert_same_bits(_gradients(call._replace(hidden=columns_apart)), gradients)


def _compare(name: str, actual: Tensor, wide: Tensor, same: Tensor, mag: Tensor) -> None:
    result = compare(actual.cpu(), wide, same, mag, slice_dims=0)
    assert result.ok, f"{name}: {result.message}, allowed {result.allowed:.3g}"


@runs
def test_activations_of_extreme_values() -> None:
    """Activations of large values, infinity and NaN."""
    values = torch.tensor([0.0, -0.0, 1e-4, -1e-4, 0.3, -0.3, 3.0, -3.0, 9.0, -9.0, 40.0, -40.0,
                           1e4, -1e4, torch.inf, torch.nan])  # fmt: skip
    for dtype in (torch.float32, BF16, FP16):
        pre = values.to(dtype)[None].to(DEVICE)
        for name in ("relu", "gelu", "gelu_tanh", "silu"):
            actual = torch.empty_like(pre)
            launchers.steps.activate(len(values), dtype, name, 0.0)(1, pre, actual, None, 0)
            wide = reference._ACTIVATIONS[name][0](pre.double().cpu())
            same = reference._ACTIVATIONS[name][0](pre.float().cpu()).to(dtype)
            for a, w, s, x in zip(actual.cpu()[0], wide[0], same[0], pre.cpu()[0], strict=True):
                _compare(f"{name} of {x}", a, w, s, x.double().abs())


@runs
def test_groups_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups as for very many rows: dropout of dy and its column sums, for a strided matrix."""
    rows, width, p, stream = 150, 37, 0.3, 2
    monkeypatch.setattr(
        launchers.steps, "rows_per_group", lambda *_: 2 * elementwise_tile(width, SUMMED).block_m
    )
    groups = group_count(rows, width)
    assert groups == 3
    dy = torch.randn(rows, 2 * width)[:, :width].to(DEVICE)
    seed = torch.tensor([1 << 40 | 7], device=DEVICE)
    dropped, sums = (torch.full((n, width), NAN, device=DEVICE) for n in (rows, groups))
    out = torch.empty(width, device=DEVICE)
    step = launchers.steps.drop_gradient(dy, torch.float32, p)
    step(rows, dy, dropped, sums, seed, stream)
    launchers.steps.SumOverGroups(width)(groups, sums, out)
    expected = drop_rows(dy, p, seed, stream + SECOND_STREAM)
    assert torch.equal(dropped, expected)
    wide = expected.double().cpu()
    _compare("sums", out, wide.sum(0), expected.sum(0).cpu(), wide.abs().sum(0))


# -- configs --------------------------------------------------------------------------------------
@compiles
def test_refuses_what_it_cannot_run() -> None:
    x, wide = torch.empty(3, 16), torch.empty(3, 16).double()
    many = torch.empty(1 << 31, 16, device="meta")

    def refusals(x: Tensor, other: Tensor) -> tuple[str, str]:
        tensors, options = (x, x, None, x, None), ("relu", 0.0, 0.0, None, 0)
        forward, backward = (
            ForwardCall(*tensors, other, *options),
            BackwardCall(other, *tensors, x, *options, [True] * 5),
        )
        reasons = launchers.ffn_fwd_unsupported(forward), launchers.ffn_bwd_unsupported(backward)
        return str(reasons[0]), str(reasons[1])

    assert refusals(x, x) == ("None", "None")
    for reason in refusals(wide, x):
        assert "got torch.float64 x" in reason
    for reason in refusals(x, wide):
        assert "got torch.float64 residual or gradient" in reason
    for reason in refusals(many, x):
        assert "handles up to 2147418112 rows, got 2147483648" in reason


def test_the_first_product_is_chosen_with_a_reason() -> None:
    """In Triton where an epilogue saves a pass over a large hidden tensor."""
    large = (16384, 1024, 4096)
    for arch in GENERATIONS:
        chosen = up_config(arch, BF16, *large, work=True)
        assert (chosen.tile is None) == (arch == "sm_100")
        assert chosen.measured is False and len(chosen.reason) > 40
        # A row of the table, not one made for the call: every call asks.
        assert up_config(arch, BF16, *large, work=True) is chosen
        for others, why in (
            (dict(work=False), "relu itself"),
            (dict(dtype=torch.float32), "precision follows torch.backends.cuda.matmul"),
            (dict(sizes=(16384, 4096, 4096)), "over 2048 features"),
            (dict(sizes=(256, 1024, 4096)), "fewer than 256 tiles"),
            (dict(sizes=(0, 8, 8)), "fewer than 256 tiles"),
        ):
            options: dict[str, Any] = dict(dtype=BF16, sizes=large, work=True) | others
            work, dtype = options["work"], options["dtype"]
            other = up_config(arch, dtype, *options["sizes"], work=work)
            assert other.tile is None
            assert why in other.reason or (other.reason == chosen.reason and arch == "sm_100")


@pytest.mark.parametrize("arch, reason", [
    ("sm_80", "153 / D .* A100"),
    ("sm_86", "76 / D .* RTX 3090"),
    ("sm_89", "164 / D .* RTX 4090"),
    ("sm_120", "117 / D .* RTX 5090"),
    ("sm_87", "153 / D .* A100"),
    ("gfx90a", "246 / D .* MI300X"),
])  # fmt: skip
def test_the_reason_names_the_rates_of_the_gpu(arch: str, reason: str) -> None:
    """Where its memory is fast for its products, fewer features are worth an epilogue."""
    chosen = up_config(arch, BF16, 16384, 1024, 4096, work=True)
    assert chosen.tile is not None and re.search(reason, chosen.reason)
    wide = up_config(arch, BF16, 16384, 1536, 4096, work=True)
    assert (wide.tile is None) == ("over 1085 features" in wide.reason) == (arch == "sm_86")


@runs
def test_calls_of_many_rows_take_the_first_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher follows the table, with biases or without, unless nothing is left to fuse."""
    monkeypatch.setattr(config, "_LEAST_TILES", 1)
    monkeypatch.setitem(config._UP, "sm_80", Up(TILES["pointers"], "tested"))
    monkeypatch.setattr(_env, "architecture", lambda *device: "sm_80")
    taken = []
    for options in ({}, {"activation": "gelu"}, {"bias": False}, {"dropout_p": 0.2}):
        launchers._plans.clear()
        check(SPEC, _call(rows=(40,), **options), FP16)
        [plan] = [p for p in launchers._plans.values() if hasattr(p, "up")]
        taken.append((plan.up is not None, plan.activate is not None))
    assert taken == [(False, False), (True, False), (True, False), (True, False)]


@compiles
def test_tuning_starts_from_the_default_config() -> None:
    for arch in GENERATIONS:
        for work in (False, True):
            sizes = (BF16, 16384, 1024, 4096)
            found = candidates(arch, *sizes, work=work)
            assert found[0] == up_config(arch, *sizes, work=work)
            assert len({up.tile for up in found}) == len(found) >= 2
            for tile in filter(None, (up.tile for up in found)):
                operands = (tile.block_m + tile.block_n) * tile.block_k * tile.stages
                assert 2 * operands <= LEAST_SHARED_MEMORY[arch], (arch, tile)
        assert len(candidates(arch, torch.float32, 16384, 1024, 4096, work=True)) == 1


@compiles
def test_groups_of_rows_cover_all_and_stay_few() -> None:
    for rows in (0, 1, 8, 63, 700, 16384, 1 << 20):
        for width in (1, 37, 512, 4096, 16384):
            each, groups = rows_per_group(rows, width), group_count(rows, width)
            assert groups * each >= rows > (groups - 1) * each
            assert groups <= 256
