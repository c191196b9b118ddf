"""Samples, errors and workloads of ffn."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn import functional
from fastattn.ops.ffn.op import ACTIVATIONS, GATED_ACTIVATIONS
from fastattn.ops.ffn.reference import GATED
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

_SEED = 0x0FED_CBA9_8765_4321
_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


def make_inputs(
    generator: torch.Generator,
    dtype: torch.dtype,
    *,
    rows: tuple[int, ...] = (13,),
    D: int = 24,
    hidden: int = 40,
    out: int | None = None,
    activation: str = "relu",
    bias: bool = True,
    residual: str = "",
    dropout_p: float = 0.0,
    output_dropout_p: float = 0.0,
    amplitude: float = 1.0,
    layout: str = "contiguous",
) -> Inputs:
    out = D if out is None else out
    wide = hidden * (2 if activation in GATED_ACTIVATIONS else 1)

    def data(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    x = data(*rows, D, scale=amplitude)
    if layout == "rows":
        x = data(*rows, 2 * D)[..., :D]
    inputs: Inputs = {"x": x, "w1": data(wide, D, scale=D**-0.5)}
    inputs["b1"] = data(wide) if bias else None
    inputs["w2"] = data(out, hidden, scale=hidden**-0.5)
    if layout == "weights":  # the last dimension is not contiguous
        inputs["w1"], inputs["w2"] = (inputs[w].t().contiguous().t() for w in ("w1", "w2"))
    inputs["b2"] = data(out) if bias else None
    inputs["activation"] = activation
    if residual:
        inputs["residual"] = data(*rows, out)
        if residual == "fp32":
            inputs["residual"] = inputs["residual"].float()
    if dropout_p or output_dropout_p:
        inputs |= {
            "dropout_p": dropout_p,
            "output_dropout_p": output_dropout_p,
            "dropout_seed": torch.tensor([_SEED]),
            "dropout_stream": 2,
        }
    return inputs


def _s(name: str, reason: str, *tags: str, **options: Any) -> Sample:
    dtypes = options.pop("dtypes", HALF_AND_SINGLE)
    gradients = ("x", "w1", "b1", "w2", "b2", "residual")
    return Sample(name, reason, partial(make_inputs, **options), gradients, dtypes, frozenset(tags))


SAMPLES = (
    *[
        _s(a, "every activation, with everything around it", "interpreter", activation=a,
           residual="same", dropout_p=0.2, output_dropout_p=0.1)
        for a in ACTIVATIONS
    ],
    *[_s(f"{a}_plain", "no dropout, no residual", activation=a) for a in ACTIVATIONS],
    _s("no_bias", "biases are optional", bias=False, activation="gelu"),
    _s("one_row", "a single token", rows=(1,)),
    _s("no_rows", "empty batch", rows=(0,)),
    _s("three_dimensions", "leading dimensions are rows", rows=(3, 5), activation="silu"),
    _s("odd_sizes", "no tile divides them", "interpreter", rows=(65,), D=33, hidden=127, out=17),
    _s("sizes_257", "one more than whole tiles, one output", rows=(63,), D=65, hidden=257, out=1,
       activation="silu"),
    _s("blocks", "more rows and columns than a kernel's block, with the specified bits", rows=(97,),
       D=9, hidden=520, out=513, activation="gelu", residual="same", dropout_p=0.2,
       output_dropout_p=0.1),
    _s("many_rows", "the weights' gradients are long sums", rows=(2200,), D=40, hidden=72, out=24,
       residual="same", dropout_p=0.2, output_dropout_p=0.1),
    _s("one_feature", "D = 1", D=1, rows=(5,), activation="gelu"),
    _s("one_hidden", "F = 1", hidden=1, rows=(5,), activation="swiglu"),
    _s("weights_transposed", "weights stored transposed", layout="weights", activation="geglu"),
    _s("residual_alone", "no dropout", residual="same", rows=(3, 5)),
    _s("zero_inputs", "relu at its corner: gradient 0", amplitude=0.0, bias=False),
    _s("dropout_small", "p below 1/256 drops 1/256", rows=(63,), dropout_p=1e-4,
       output_dropout_p=1e-4),
    _s("aliasing", "rows of w2 that caches map to the same lines", rows=(27,), hidden=2048),
    _s("row_stride", "rows of a larger tensor", rows=(9,), layout="rows", activation="gelu"),
    _s("large_inputs", "flat and linear parts", amplitude=30.0, activation="gelu"),
    _s("large_inputs_tanh", "the cubic under tanh", amplitude=30.0, activation="gelu_tanh"),
    _s("dropout_all", "p = 1: only b2 and the residual are left", dropout_p=1.0, residual="same"),
    _s("output_dropout_all", "p = 1: only the residual is left", output_dropout_p=1.0,
       residual="same"),
    _s("fp32_residual", "the residual stream in fp32", residual="fp32", output_dropout_p=0.1,
       dtypes=(torch.bfloat16, torch.float16)),
)  # fmt: skip


def _drop(x: Tensor, p: float, inputs: Inputs, stream: int) -> Tensor:
    if not p:
        return x
    shape = (x.numel() // x.shape[-1], x.shape[-1])
    keep = dropout_mask(inputs["dropout_seed"], stream, p, shape).view(x.shape)
    t = min(255, max(1, int(256 * p + 0.5))) if p < 1 else 256
    return torch.where(keep, x * (256 / (256 - t) if t < 256 else 0), 0)


def _drop_both(inputs: Inputs) -> tuple[Any, Any]:
    stream = inputs.get("dropout_stream", 0)
    p, output_p = inputs.get("dropout_p", 0.0), inputs.get("output_dropout_p", 0.0)
    return (
        lambda x: _drop(x, p, inputs, stream),
        lambda x: _drop(x, output_p, inputs, stream + 2**31),
    )


def _torch_form(inputs: Inputs) -> tuple[Tensor, ...]:
    drop, drop_output = _drop_both(inputs)
    activation = inputs["activation"]
    pre = F.linear(inputs["x"], inputs["w1"], inputs["b1"])
    if activation in GATED:
        gate, up = pre.chunk(2, -1)
        a = _TORCH[GATED[activation]](gate) * up
    else:
        a = _TORCH[activation](pre)
    y = drop_output(F.linear(drop(a), inputs["w2"], inputs["b2"]))
    return (y if inputs.get("residual") is None else y + inputs["residual"],)


def _magnitudes(inputs: Inputs, douts: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The formulas on absolute values; the activations' derivatives are at most 1.13."""
    drop, drop_output = _drop_both(inputs)
    x, w1, w2 = inputs["x"].abs(), inputs["w1"].abs(), inputs["w2"].abs()
    b1 = None if inputs["b1"] is None else inputs["b1"].abs()
    b2 = None if inputs["b2"] is None else inputs["b2"].abs()
    pre = F.linear(x, w1, b1)
    gated = inputs["activation"] in GATED
    gate, up = pre.chunk(2, -1) if gated else (pre, torch.ones_like(pre))
    a = drop(gate * up)
    y = drop_output(F.linear(a, w2, b2))
    dy = drop_output(douts[0].abs())
    rows = dy.reshape(-1, dy.shape[-1])
    da = drop(dy @ w2)
    dpre = 1.13 * torch.cat([da * up, da * gate], -1) if gated else 1.13 * da
    flat = dpre.reshape(-1, dpre.shape[-1])
    residual = inputs.get("residual")
    return {
        "y": y if residual is None else y + residual.abs(),
        "dx": dpre @ w1,
        "dw1": flat.t() @ x.reshape(-1, x.shape[-1]),
        "db1": flat.sum(0),
        "dw2": rows.t() @ a.reshape(-1, a.shape[-1]),
        "db2": rows.sum(0),
        "dresidual": douts[0].abs(),
    }


_entries = partial(entries_by_rows, names=("x", "residual"), results=("y", "dx", "dresidual"))


def _slice_dims(name: str, result: Tensor) -> int:
    """The whole result is one slice."""
    return 0


def workload(rows: int, D: int, activation: str, devices: tuple[str, ...]) -> Workload:
    hidden = 4 * D

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        inputs = make_inputs(
            generator, dtype, rows=(rows,), D=D, hidden=hidden, activation=activation
        )
        return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}

    flops = 4.0 * rows * D * hidden * (1.5 if activation in GATED else 1.0)
    moved = 2.0 * (2 * rows * D + rows * hidden + 2 * D * hidden)
    return Workload(
        f"{rows}x{D}_{activation}",
        make,
        ("x", "w1", "b1", "w2", "b2"),
        flops,
        moved,
        2 * flops,
        2 * moved,
        (activation,),
        devices,
    )


_WORKLOADS = tuple(
    [workload(16384, 1024, a, ("cuda",)) for a in ("relu", "gelu", "swiglu")]
    + [workload(8192, 4096, a, ("cuda",)) for a in ("relu", "gelu")]
    + [workload(2048, 512, a, ("cpu",)) for a in ("relu", "gelu")]
    + [workload(rows, 128, "relu", ("cpu",)) for rows in (16, 256)]
)


def _base(**changes: Any) -> Inputs:
    inputs: Inputs = {
        "x": torch.zeros(3, 4),
        "w1": torch.zeros(8, 4),
        "b1": None,
        "w2": torch.zeros(4, 8),
        "b2": None,
    }
    return inputs | changes


def _error(name: str, error: type[Exception], message: str, **changes: Any) -> ErrorSample:
    return ErrorSample(name, partial(_base, **changes), error, message)


ERRORS = (
    _error("x", TypeError, "x must be fp16", x=torch.zeros(3, 4).int()),
    _error("activation", ValueError, "activation must be one of", activation="tanh"),
    _error("w1", ValueError, r"w1 must be \[F, 4\]", w1=torch.zeros(8, 5)),
    _error("w2", ValueError, r"w2 must be \[D, 8\]", w2=torch.zeros(4, 7)),
    _error("w2_gated", ValueError, r"w2 must be \[D, 4\]", activation="swiglu"),
    _error("odd_gate", ValueError, "w1 must have an even number", w1=torch.zeros(7, 4),
           activation="geglu"),
    _error("b1", ValueError, r"b1 must be \[8\]", b1=torch.zeros(4)),
    _error("b2", ValueError, r"b2 must be \[4\]", b2=torch.zeros(8)),
    _error("dtype", TypeError, "w2 must have x's dtype", w2=torch.zeros(4, 8).half()),
    _error("residual", ValueError, r"residual must be \[3, 4\]", residual=torch.zeros(3, 5)),
    _error("dropout_p", ValueError, "dropout_p must be between", dropout_p=2.0),
    _error("output_dropout_p", ValueError, "output_dropout_p must be", output_dropout_p=-1.0),
)  # fmt: skip

SPECS = (
    OpSpec(
        "ffn",
        functional.ffn,
        ("y",),
        SAMPLES,
        ERRORS,
        _WORKLOADS,
        _torch_form,
        _magnitudes,
        _slice_dims,
        widen,
        _entries,
        entries_in_bits=False,  # tiles of a matrix product depend on its number of rows
    ),
)
