"""Samples, errors and workloads of layer_norm, add_layer_norm and rms_norm."""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn import functional
from fastattn.testing.dropout import dropout_mask
from fastattn.testing.spec import (
    HALF_AND_SINGLE,
    ErrorSample,
    Inputs,
    OpSpec,
    Sample,
    Workload,
    entries_by_rows,
    widen,
)

_EPS = 1e-5
_SEED = 0x1234_5678_9ABC


def _randn(
    generator: torch.Generator, *shape: int, dtype: torch.dtype, offset: float = 0.0
) -> Tensor:
    return (torch.randn(*shape, generator=generator) + offset).to(dtype)


def make_inputs(
    generator: torch.Generator,
    dtype: torch.dtype,
    *,
    op: str,
    shape: tuple[int, ...],
    weight: bool = True,
    bias: bool = True,
    x_bias: bool = False,
    wide_parameters: bool = False,
    wide_residual: bool = False,
    offset: float = 0.0,
    constant: bool = False,
    amplitude: float = 1.0,
    layout: str = "contiguous",
    eps: float = _EPS,
    dropout_p: float = 0.0,
) -> Inputs:
    N = shape[-1]
    parameters = torch.float32 if wide_parameters else dtype
    x = _randn(generator, *shape, dtype=dtype, offset=offset)
    if constant:
        x = torch.full(shape, offset, dtype=dtype)
    if layout == "rows":  # a row stride larger than the row
        storage = _randn(generator, *shape[:-1], 2 * N, dtype=dtype, offset=offset)
        x = storage[..., :N]
    elif layout == "transposed":  # the last dimension is not contiguous
        x = _randn(generator, *shape[:-2], N, shape[-2], dtype=dtype, offset=offset).mT
    elif layout == "repeated":  # stride 0 over the rows
        x = _randn(generator, N, dtype=dtype, offset=offset).expand(shape)
    elif layout == "misaligned":  # one element behind an aligned address
        x = _randn(generator, math.prod(shape) + 1, dtype=dtype, offset=offset)[1:].view(shape)
    if amplitude != 1.0:
        x = x * amplitude
    inputs: Inputs = {"x": x}
    if op == "add_layer_norm":
        residual = torch.float32 if wide_residual else dtype
        inputs["residual"] = _randn(generator, *shape, dtype=residual)
    if weight:
        inputs["weight"] = (1 + 0.5 * torch.randn(N, generator=generator)).to(parameters)
    if bias and op != "rms_norm":
        inputs["bias"] = _randn(generator, N, dtype=parameters)
    if x_bias:
        inputs["x_bias"] = _randn(generator, N, dtype=parameters)
    if op == "add_layer_norm":
        inputs |= {"dropout_p": dropout_p, "return_sum": True}
        if dropout_p > 0:
            inputs |= {"dropout_seed": torch.tensor([_SEED]), "dropout_stream": 3}
    inputs["eps"] = eps
    return inputs


def _sample(op: str, name: str, reason: str, tags: tuple[str, ...] = (), **options: Any) -> Sample:
    dtypes = options.pop("dtypes", HALF_AND_SINGLE)
    return Sample(
        name,
        reason,
        partial(make_inputs, op=op, **options),
        ("x", "residual", "weight", "bias", "x_bias"),
        dtypes,
        frozenset(tags),
    )


def _common(op: str) -> list[Sample]:
    s = partial(_sample, op)
    half = (torch.bfloat16, torch.float16)
    return [
        s("model", "a Transformer's width", shape=(2, 17, 512), tags=("interpreter",)),
        s("odd_width", "no vector width divides it", shape=(5, 257), tags=("interpreter",)),
        s("one_column", "variance 0: the result is the bias", shape=(7, 1), tags=("interpreter",)),
        s("three_columns", "narrower than any vector", shape=(33, 3), tags=("interpreter",)),
        s("one_dimension", "a vector is one row", shape=(63,)),
        s("one_row", "a single row", shape=(1, 65)),
        s("one_element", "one row of one column", shape=(1, 1)),
        s("width_127", "one less than whole vectors", shape=(63, 127)),
        s("four_dimensions", "leading dimensions are rows", shape=(2, 3, 5, 65)),
        s("no_rows", "empty batch", shape=(0, 64)),
        s("wide_row", "longer than any register tile", shape=(3, 20_000)),
        s("many_rows", "several blocks of rows per thread", shape=(1500, 24)),
        s("no_parameters", "weight and bias are optional", shape=(9, 65), weight=False, bias=False),
        s("far_from_zero", "the two-pass variance: x around 1000", shape=(9, 300), offset=1000.0),
        s("large_values", "squares overflow half precision", shape=(9, 130), amplitude=5e3),
        s("small_values", "eps outweighs the variance", shape=(9, 130), amplitude=1e-4),
        s("large_eps", "eps far above the variance", shape=(9, 63), eps=10.0),
        s("zero_eps", "eps may be 0", shape=(9, 63), eps=0.0),
        s("constant_rows", "no deviation at all", shape=(9, 100), offset=3.0, constant=True),
        s("row_stride", "rows of a larger tensor", shape=(6, 10, 80), layout="rows"),
        s("repeated", "one row many times, stride 0", shape=(9, 65), layout="repeated"),
        s("misaligned", "not at an aligned address", shape=(9, 257), layout="misaligned"),
        s("transposed", "last dimension not contiguous", shape=(4, 33, 48), layout="transposed"),
        s(
            "fp32_parameters",
            "as under autocast",
            shape=(19, 96),
            wide_parameters=True,
            dtypes=half,
        ),
    ]


_LAYER_NORM_SAMPLES = (
    *_common("layer_norm"),
    _sample("layer_norm", "no_bias", "bias alone is optional", shape=(9, 65), bias=False),
    _sample("layer_norm", "no_weight", "weight alone is optional", shape=(9, 65), weight=False),
)
_ADD_SAMPLES = (
    *_common("add_layer_norm"),
    _sample(
        "add_layer_norm",
        "x_bias",
        "the projection's bias is added here",
        shape=(9, 65),
        x_bias=True,
    ),
    _sample(
        "add_layer_norm",
        "dropout",
        "the specified bits",
        shape=(31, 130),
        x_bias=True,
        dropout_p=0.3,
        tags=("interpreter",),
    ),
    _sample(
        "add_layer_norm",
        "dropout_wide",
        "the specified bits beyond a kernel's block of columns",
        shape=(6, 2100),
        x_bias=True,
        dropout_p=0.3,
    ),
    _sample(
        "add_layer_norm",
        "dropout_small",
        "p below 1/256 drops 1/256",
        shape=(31, 130),
        dropout_p=1e-4,
    ),
    _sample(
        "add_layer_norm", "dropout_all", "p = 1 leaves the residual", shape=(5, 33), dropout_p=1.0
    ),
    _sample(
        "add_layer_norm",
        "fp32_residual",
        "the residual stream in fp32, as under autocast",
        shape=(9, 72),
        wide_residual=True,
        wide_parameters=True,
        x_bias=True,
        dropout_p=0.1,
        dtypes=(torch.bfloat16, torch.float16),
    ),
)


def _norm_magnitudes(inputs: Inputs, z: Tensor, dy: Tensor, centred: bool) -> dict[str, Tensor]:
    """The formulas with (|x| + max|x|) * rstd, not centred, in place of the normalised value."""
    eps, weight = inputs["eps"], inputs.get("weight")
    w = torch.ones_like(z[..., :1]) if weight is None else weight.abs()
    mean = z.mean(-1, keepdim=True) if centred else torch.zeros_like(z[..., :1])
    rstd = ((z - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    spread = z.abs().amax(-1, keepdim=True) if z.shape[-1] else z.abs()
    xhat = (z.abs() + (spread if centred else 0)) * rstd
    bias = inputs.get("bias")
    g = dy.abs() * w
    dx = rstd * (g + g.mean(-1, keepdim=True) + xhat * (g * xhat).mean(-1, keepdim=True))
    return {
        "y": xhat * w + (0 if bias is None else bias.abs()),
        "dx": dx,
        "dweight": (dy.abs() * xhat).reshape(-1, z.shape[-1]).sum(0),
        "dbias": dy.abs().reshape(-1, z.shape[-1]).sum(0),
    }


def _layer_norm_magnitudes(inputs: Inputs, douts: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return _norm_magnitudes(inputs, inputs["x"], douts[0], centred=True)


def _rms_norm_magnitudes(inputs: Inputs, douts: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return _norm_magnitudes(inputs, inputs["x"], douts[0], centred=False)


def _dropped(x: Tensor, inputs: Inputs) -> Tensor:
    """Dropout by PyTorch operators with the mask of `testing.dropout_mask`."""
    p = inputs["dropout_p"]
    if p == 0:
        return x
    rows = x.numel() // x.shape[-1]
    keep = dropout_mask(inputs["dropout_seed"], inputs["dropout_stream"], p, (rows, x.shape[-1]))
    t = min(255, max(1, int(256 * p + 0.5))) if p < 1 else 256
    return torch.where(keep.view(x.shape), x * (256 / (256 - t) if t < 256 else 0), 0)


def _add_layer_norm_magnitudes(inputs: Inputs, douts: tuple[Tensor, ...]) -> dict[str, Tensor]:
    branch = inputs["x"].abs()
    if "x_bias" in inputs:
        branch = branch + inputs["x_bias"].abs()
    size = inputs["residual"].abs() + _dropped(branch, inputs)
    z = _add_layer_norm_torch(inputs)[1]
    mags = _norm_magnitudes(inputs, z, douts[0], centred=True)
    # Branch and residual may cancel in z.
    rstd = ((z - z.mean(-1, keepdim=True)).square().mean(-1, keepdim=True) + inputs["eps"]).rsqrt()
    w = inputs["weight"].abs() if "weight" in inputs else 1
    mags["y"] = mags["y"] + size * rstd * w
    dz = mags.pop("dx") + douts[1].abs()
    dx = _dropped(dz, inputs)
    return mags | {
        "z": size,
        "dx": dx,
        "dresidual": dz,
        "dx_bias": dx.reshape(-1, dx.shape[-1]).sum(0),
    }


def _layer_norm_torch(inputs: Inputs) -> tuple[Tensor, ...]:
    x = inputs["x"]
    return (F.layer_norm(x, x.shape[-1:], inputs.get("weight"), inputs.get("bias"), inputs["eps"]),)


def _add_layer_norm_torch(inputs: Inputs) -> tuple[Tensor, ...]:
    branch = inputs["x"] + inputs["x_bias"] if "x_bias" in inputs else inputs["x"]
    z = (inputs["residual"] + _dropped(branch, inputs)).to(inputs["residual"].dtype)
    y = F.layer_norm(z, z.shape[-1:], inputs.get("weight"), inputs.get("bias"), inputs["eps"])
    return y, z


def _rms_norm_torch(inputs: Inputs) -> tuple[Tensor, ...]:
    x = inputs["x"]
    return (F.rms_norm(x, x.shape[-1:], inputs.get("weight"), inputs["eps"]),)


_entries = partial(entries_by_rows, names=("x", "residual"), results=("y", "z", "dx", "dresidual"))


def _slice_dims(name: str, result: Tensor) -> int:
    """Each row is a slice; the gradient of a parameter is one slice."""
    return 0 if name in ("dweight", "dbias", "dx_bias") else result.dim() - 1


def workload(op: str, rows: int, N: int, devices: tuple[str, ...]) -> Workload:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        inputs = make_inputs(generator, dtype, op=op, shape=(rows, N))
        if op == "add_layer_norm":
            inputs["return_sum"] = False
        return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}

    # Moved forward: x, residual, z and y, or x and y; backward: dy, the norm's input and its
    # gradient, which is that of x and of the residual.
    tensors = 4 if op == "add_layer_norm" else 2
    return Workload(
        f"{rows}x{N}",
        make,
        ("x", "residual", "weight", "bias"),
        flops=8.0 * rows * N,
        bytes=2.0 * tensors * rows * N,
        backward_flops=14.0 * rows * N,
        backward_bytes=2.0 * 3 * rows * N,
        device_types=devices,
    )


def _workloads(op: str) -> tuple[Workload, ...]:
    gpu = [(32768, 512), (32768, 1024), (32768, 4096), (8192, 16384)]
    cpu = [(64, 512), (2048, 512), (512, 4096)]
    return tuple(
        [workload(op, rows, N, ("cuda",)) for rows, N in gpu]
        + [workload(op, rows, N, ("cpu",)) for rows, N in cpu]
    )


def _x(*shape: int) -> Tensor:
    return torch.zeros(shape)


_COMMON_ERRORS = (
    ErrorSample("scalar", lambda: {"x": torch.tensor(1.0)}, ValueError, "x must have at least one"),
    ErrorSample("integers", lambda: {"x": torch.zeros(3, 4).int()}, TypeError, "x must be fp16"),
    ErrorSample("list", lambda: {"x": [1.0]}, TypeError, "x must be a tensor"),
    ErrorSample(
        "weight", lambda: {"x": _x(3, 4), "weight": _x(3)}, ValueError, r"weight must be \[4\]"
    ),
    *[
        ErrorSample(
            f"eps_{eps}",
            partial(dict, x=_x(3, 4), eps=eps),
            ValueError,
            f"eps must be a finite number >= 0, got {eps}",
        )
        for eps in (-1e-5, math.nan, math.inf)
    ],
    ErrorSample(
        "backend",
        lambda: {"x": _x(3, 4), "backend": "nonsense"},
        ValueError,
        "backend must be one of",
    ),
)


def _with_residual(sample: ErrorSample) -> ErrorSample:
    def make() -> Inputs:
        inputs = sample.make()
        return {"residual": inputs["x"], **inputs}

    return ErrorSample(sample.name, make, sample.error, sample.message)


SPECS = (
    OpSpec(
        "layer_norm",
        functional.layer_norm,
        ("y",),
        _LAYER_NORM_SAMPLES,
        (
            *_COMMON_ERRORS,
            ErrorSample(
                "bias", lambda: {"x": _x(3, 4), "bias": _x(1, 4)}, ValueError, r"bias must be \[4\]"
            ),
        ),
        _workloads("layer_norm"),
        _layer_norm_torch,
        _layer_norm_magnitudes,
        _slice_dims,
        widen,
        _entries,
    ),
    OpSpec(
        "add_layer_norm",
        functional.add_layer_norm,
        ("y", "z"),
        _ADD_SAMPLES,
        (
            *[_with_residual(sample) for sample in _COMMON_ERRORS],
            ErrorSample(
                "residual",
                lambda: {"x": _x(3, 4), "residual": _x(2, 4)},
                ValueError,
                "residual must have x's shape",
            ),
            ErrorSample(
                "x_bias",
                lambda: {"x": _x(3, 4), "residual": _x(3, 4), "x_bias": _x(3)},
                ValueError,
                r"x_bias must be \[4\]",
            ),
            ErrorSample(
                "dropout_p",
                lambda: {"x": _x(3, 4), "residual": _x(3, 4), "dropout_p": 1.5},
                ValueError,
                "dropout_p must be between 0 and 1",
            ),
            ErrorSample(
                "dropout_seed",
                lambda: {
                    "x": _x(3, 4),
                    "residual": _x(3, 4),
                    "dropout_p": 0.5,
                    "dropout_seed": torch.zeros(2).long(),
                },
                ValueError,
                r"dropout_seed must be int64 \[1\]",
            ),
            ErrorSample(
                "dropout_stream",
                lambda: {"x": _x(3, 4), "residual": _x(3, 4), "dropout_stream": -1},
                ValueError,
                "dropout_stream must be >= 0",
            ),
        ),
        _workloads("add_layer_norm"),
        _add_layer_norm_torch,
        _add_layer_norm_magnitudes,
        _slice_dims,
        widen,
        _entries,
    ),
    OpSpec(
        "rms_norm",
        functional.rms_norm,
        ("y",),
        tuple(_common("rms_norm")),
        _COMMON_ERRORS,
        _workloads("rms_norm"),
        _rms_norm_torch,
        _rms_norm_magnitudes,
        _slice_dims,
        widen,
        _entries,
    ),
)
