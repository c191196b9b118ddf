"""The feed-forward network in Triton: values and configs.

On a GPU every sample runs natively. Without one, test_in_the_interpreter.py runs this file
in Triton's interpreter, on the samples that are small enough.
"""

# ruff: noqa: E402  (the interpreter is patched before kernels are imported)

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn.ops import _env
from fastattn.ops._dropout import SECOND_STREAM, drop_rows, keep_scale

triton = pytest.importorskip("triton")
if _env.interpreting():
    import patched_interpreter

    patched_interpreter.install()

from compiled_kernels import GENERATIONS, LEAST_SHARED_MEMORY, compiles

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
from fastattn.ops.ffn.spec import SAMPLES, SPECS, make_inputs
from fastattn.ops.ffn.triton_steps import group_count
from fastattn.testing.compare import compare
from fastattn.testing.spec import Sample

DEVICE = _env.default_device()
NATIVE = DEVICE.type == "cuda"
runs = pytest.mark.skipif(
    not NATIVE and not _env.interpreting(),
    reason="runs on a GPU, or in the interpreter's own process",
)
slow = pytest.mark.slow
[SPEC] = SPECS
NAN = float("nan")
TENSORS = ("x", "w1", "b1", "w2", "b2", "residual")


# -- values ---------------------------------------------------------------------------------------


class Call:
    """A forward and a backward on a sample's data, by the launchers and by the reference."""

    def __init__(self, sample: Sample, dtype: torch.dtype):
        self.inputs = inputs = sample.inputs("cpu", dtype)
        get = inputs.get
        self.tensors = [None if (t := get(name)) is None else t.detach() for name in TENSORS]
        self.options = (
            inputs["activation"], get("dropout_p", 0.0), get("output_dropout_p", 0.0),
            get("dropout_seed"), get("dropout_stream", 0),
        )  # fmt: skip
        self.same = reference.ffn_fwd(*self.tensors, *self.options)
        generator = torch.Generator().manual_seed(1)
        y = self.same[0]
        # Rounded so that all dtypes have the same values.
        self.dy = torch.randn(y.shape, generator=generator).bfloat16().to(y.dtype)

    def _move(self, x: Any) -> Any:
        return x.to(DEVICE) if isinstance(x, Tensor) else x

    def forward(self, tile: UpTile | None = None) -> tuple[Tensor, Tensor]:
        """(y, hidden), by the launcher."""
        tensors = [self._move(t) for t in self.tensors]
        options = [self._move(o) for o in self.options]
        call = ForwardCall(*tensors, *options)
        assert launchers.ffn_fwd_unsupported(call) is None
        y, hidden = (torch.full_like(r, NAN, device=DEVICE) for r in self.same)
        if tile is not None:
            launchers.ffn_fwd_with_config(Up(tile, "tested"), call, y, hidden)
        else:
            workspace = [_buffer(*s) for s in launchers.ffn_fwd_workspace(call)]
            launchers.ffn_fwd(call, y, hidden, *workspace)
        return y, hidden

    def backward(self, needs: Sequence[bool] = (True,) * 5) -> list[Tensor]:
        """dx, dw1, db1, dw2, db2 by the launcher, on the reference's hidden tensor."""
        tensors = [self._move(t) for t in self.tensors[:5]]
        options = [self._move(o) for o in self.options]
        needs = [n and t is not None for n, t in zip(needs, tensors, strict=True)]
        call = BackwardCall(
            self._move(self.dy), *tensors, self._move(self.same[1]), *options, needs
        )
        assert launchers.ffn_bwd_unsupported(call) is None
        results = [
            torch.full_like(t, NAN) if n else torch.empty(0, device=DEVICE)
            for n, t in zip(needs, tensors, strict=True)
        ]
        workspace = [_buffer(*s) for s in launchers.ffn_bwd_workspace(call)]
        launchers.ffn_bwd(call, *results, *workspace)
        return results

    def wide(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor | None, ...], dict[str, Tensor]]:
        """In fp64: the forward, the backward, and the magnitudes of all results."""
        tensors = [None if t is None else t.double() for t in self.tensors]
        forward = reference.ffn_fwd(*tensors, *self.options)
        needs = [t is not None for t in tensors[:5]]
        backward = reference.ffn_bwd(
            self.dy.double(), *tensors[:5], forward[1], *self.options, needs
        )
        mags = SPEC.magnitudes(SPEC.widen(self.inputs), (self.dy.double(),))
        return forward, backward, {name: mag.detach() for name, mag in mags.items()}

    def check(self, tile: UpTile | None = None) -> None:
        """Checks all results against the error budget. tile: for the first product, else PyTorch's;
        the backward is not checked again.
        """
        forward, backward, mags = self.wide()
        y, hidden = self.forward(tile)
        x, w1, b1 = (None if t is None else t.double().abs() for t in self.tensors[:3])
        pre = torch.nn.functional.linear(x, w1, b1)
        if self.inputs["activation"] == "relu":
            pre = pre * keep_scale(self.options[1])
        _compare("hidden", hidden, forward[1], self.same[1], pre)
        _compare("y", y, forward[0], self.same[0], mags["y"])
        if tile is not None:
            return
        needs = [t is not None for t in self.tensors[:5]]
        same = reference.ffn_bwd(self.dy, *self.tensors[:5], self.same[1], *self.options, needs)
        for name, a, w, s in zip(TENSORS[:5], self.backward(), backward, same, strict=True):
            if w is not None:
                _compare(f"d{name}", a, w, s, mags[f"d{name}"])


def _buffer(shape: tuple[int, ...], dtype: torch.dtype, zeroed: bool) -> Tensor:
    return torch.full(shape, 0.0 if zeroed else NAN, dtype=dtype, device=DEVICE)


def _compare(name: str, actual: Tensor, wide: Tensor, same: Tensor, mag: Tensor) -> None:
    result = compare(actual.cpu(), wide, same, mag, slice_dims=0)
    assert result.ok, f"{name}: {result.message}, allowed {result.allowed:.3g}"


def _sample(name: str) -> Sample:
    return next(s for s in SAMPLES if s.name == name)


def _samples() -> list[Any]:
    """In the interpreter two dtypes; one of them, alternately, only in the slow run, and so are the
    largest samples.
    """
    cases, large = [], ("many_rows", "blocks")
    for n, sample in enumerate(SAMPLES):
        for i, dtype in enumerate(sample.dtypes if NATIVE else sample.dtypes[:2]):
            quick = NATIVE or (i == n % 2 and sample.name not in large)
            marks = () if quick else slow
            id = f"{sample.name}-{str(dtype).removeprefix('torch.')}"
            cases.append(pytest.param(sample, dtype, marks=marks, id=id))
    return cases


@runs
@pytest.mark.parametrize("sample, dtype", _samples())
def test_sample(sample: Sample, dtype: torch.dtype) -> None:
    Call(sample, dtype).check()


# Small tiles, so that small tensors have several.
TILES = {
    "pointers": UpTile(32, 32, 16, 4, 1, subtiles=1, group=2),
    "persistent": UpTile(32, 64, 32, 4, 1, subtiles=2, group=2, programs=2),
    "descriptors": UpTile(64, 32, 32, 4, 1, subtiles=4, tma=True),
}


def _fused() -> list[Any]:
    cases = [(a, "descriptors", torch.bfloat16) for a in ACTIVATIONS]
    cases += [(a, "pointers", torch.float16) for a in ("relu", "gelu", "swiglu")]
    names = ("odd_sizes", "weights_transposed", "one_hidden", "row_stride")
    cases += [(name, "descriptors", torch.bfloat16) for name in names]
    names = ("odd_sizes", "no_bias", "three_dimensions", "no_rows", "fp32_residual")
    cases += [(name, "persistent", torch.bfloat16) for name in names]
    return cases


@runs
@pytest.mark.parametrize("name, tiling, dtype", _fused(), ids=str)
def test_first_product(name: str, tiling: str, dtype: torch.dtype) -> None:
    Call(_sample(name), dtype).check(TILES[tiling])


@runs
@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_needed_gradients_alone(activation: str) -> None:
    """A gradient has the same bits whether it is computed alone or with the others."""
    call = Call(_sample(activation), torch.float32)
    together = call.backward()
    for i in range(5):
        alone = call.backward([i == j for j in range(5)])
        for j, (actual, expected) in enumerate(zip(alone, together, strict=True)):
            assert torch.equal(actual, expected) if i == j else actual.numel() == 0


@runs
@pytest.mark.parametrize("tiling", [None, "descriptors"])
def test_a_plan_is_for_any_number_of_rows(tiling: str | None) -> None:
    """But for one width."""
    plans = []
    for rows, out in ((0, 24), (70, 24), (13, 24), (70, 32)):
        make = partial(make_inputs, rows=(rows,), hidden=40, out=out, output_dropout_p=0.1)
        call = Call(Sample("rows", "", make, ("x",)), torch.bfloat16)
        call.check(None if tiling is None else TILES[tiling])
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
@pytest.mark.parametrize("change", _CHANGES)
def test_calls_that_differ_in_one_option(change: str, tiling: str | None) -> None:
    """A plan cached for one call is not used for the other."""
    for options in ({}, _CHANGES[change]):
        make = partial(make_inputs, rows=(9,), **options)
        call = Call(Sample("calls", "", make, ("x",)), torch.float16)
        call.check(None if tiling is None else TILES[tiling])


@runs
@pytest.mark.parametrize("bias", ["b1", "b2"])
def test_one_bias_may_be_absent(bias: str) -> None:
    """After a call with both biases."""
    make = partial(make_inputs, rows=(9,))
    Call(Sample("biases", "", make, ("x",)), torch.float16).check()

    def without(*args: Any) -> dict[str, Any]:
        return make(*args) | {bias: None}

    Call(Sample("biases", "", without, ("x",)), torch.float16).check()


@runs
@pytest.mark.parametrize("tiling", [None, "pointers"])
@pytest.mark.parametrize("name", ["residual", "dy", "hidden", "biases"])
def test_calls_that_differ_in_strides(name: str, tiling: str | None) -> None:
    make = partial(make_inputs, rows=(9,), residual="same", output_dropout_p=0.2)
    call = Call(Sample("strides", "", make, ("x",)), torch.float16)
    tile = None if tiling is None else TILES[tiling]
    call.check(tile)
    if name == "dy":
        call.dy = torch.cat([call.dy, call.dy], 1)[:, : call.dy.shape[1]]
    elif name == "hidden":
        call.same = (call.same[0], torch.stack([call.same[1]] * 2, 2)[..., 0])
    elif name == "biases":
        call.tensors = [torch.stack([t, t], 1)[:, 0] if t.dim() == 1 else t for t in call.tensors]
    else:
        residual = call.tensors[5]
        assert residual is not None
        call.tensors[5] = torch.cat([residual, residual], 1)[:, : residual.shape[1]]
    call.check(tile)


@runs
def test_activations_of_extreme_values() -> None:
    """Activations of large values, infinity and NaN."""
    values = torch.tensor([0.0, -0.0, 1e-4, -1e-4, 0.3, -0.3, 3.0, -3.0, 9.0, -9.0, 40.0, -40.0,
                           1e4, -1e4, torch.inf, torch.nan])  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
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
        chosen = up_config(arch, torch.bfloat16, *large, work=True)
        assert (chosen.tile is None) == (arch == "sm_100")
        assert chosen.measured is False and len(chosen.reason) > 40
        # A row of the table, not one made for the call: every call asks.
        assert up_config(arch, torch.bfloat16, *large, work=True) is chosen
        for others, why in (
            (dict(work=False), "relu itself"),
            (dict(dtype=torch.float32), "precision follows torch.backends.cuda.matmul"),
            (dict(sizes=(16384, 4096, 4096)), "over 2048 features"),
            (dict(sizes=(256, 1024, 4096)), "fewer than 256 tiles"),
            (dict(sizes=(0, 8, 8)), "fewer than 256 tiles"),
        ):
            options: dict[str, Any] = dict(dtype=torch.bfloat16, sizes=large, work=True) | others
            work, dtype = options["work"], options["dtype"]
            other = up_config(arch, dtype, *options["sizes"], work=work)
            assert other.tile is None
            assert why in other.reason or (other.reason == chosen.reason and arch == "sm_100")


@pytest.mark.parametrize(
    "arch, reason",
    [
        ("sm_80", "153 / D .* A100"),
        ("sm_86", "76 / D .* RTX 3090"),
        ("sm_89", "164 / D .* RTX 4090"),
        ("sm_120", "117 / D .* RTX 5090"),
        ("sm_87", "153 / D .* A100"),
        ("gfx90a", "246 / D .* MI300X"),
    ],
)
def test_the_reason_names_the_rates_of_the_gpu(arch: str, reason: str) -> None:
    """Where its memory is fast for its products, fewer features are worth an epilogue."""
    chosen = up_config(arch, torch.bfloat16, 16384, 1024, 4096, work=True)
    assert chosen.tile is not None and re.search(reason, chosen.reason)
    wide = up_config(arch, torch.bfloat16, 16384, 1536, 4096, work=True)
    assert (wide.tile is None) == ("over 1085 features" in wide.reason) == (arch == "sm_86")


@runs
def test_calls_of_many_rows_take_the_first_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher follows the table, with biases or without, unless nothing is left to fuse."""
    monkeypatch.setattr(config, "_LEAST_TILES", 1)
    monkeypatch.setitem(config._UP, "sm_80", Up(TILES["pointers"], "tested"))
    monkeypatch.setattr(_env, "architecture", lambda *device: "sm_80")
    taken = []
    for options in ({}, {"activation": "gelu"}, {"bias": False}, {"dropout_p": 0.2}):
        make = partial(make_inputs, rows=(40,), **options)
        launchers._plans.clear()
        Call(Sample("rows", "", make, ("x",)), torch.float16).check()
        [plan] = [p for p in launchers._plans.values() if hasattr(p, "up")]
        taken.append((plan.up is not None, plan.activate is not None))
    assert taken == [(False, False), (True, False), (True, False), (True, False)]


@compiles
def test_tuning_starts_from_the_default_config() -> None:
    for arch in GENERATIONS:
        for work in (False, True):
            sizes = (torch.bfloat16, 16384, 1024, 4096)
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
