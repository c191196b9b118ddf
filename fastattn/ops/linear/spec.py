"""Samples, errors and workloads of linear."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn import functional
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


def make_inputs(
    generator: torch.Generator,
    dtype: torch.dtype,
    *,
    rows: tuple[int, ...] = (13,),
    D: int = 24,
    out: int = 40,
    bias: bool = True,
    layout: str = "contiguous",
) -> Inputs:
    def data(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    x = data(*rows, 2 * D)[..., :D] if layout == "rows" else data(*rows, D)
    weight = data(out, D, scale=max(D, 1) ** -0.5)
    if layout == "both":
        x = x.t().contiguous().t()
    if layout in ("weight", "both"):  # the last dimension is not contiguous
        weight = weight.t().contiguous().t()
    elif layout == "part":  # of a larger weight, as of packed projections
        weight = data(3 * out, D, scale=max(D, 1) ** -0.5)[out : 2 * out]
    return {"x": x, "weight": weight, "bias": data(out) if bias else None}


def _s(name: str, reason: str, *tags: str, **options: Any) -> Sample:
    make = partial(make_inputs, **options)
    return Sample(name, reason, make, ("x", "weight", "bias"), HALF_AND_SINGLE, frozenset(tags))


SAMPLES = (
    _s("plain", "weight and bias", "interpreter"),
    _s("no_bias", "the bias is optional", bias=False),
    _s("one_row", "a single token", "interpreter", rows=(1,), D=130, out=37),
    _s("no_rows", "empty batch", rows=(0,)),
    _s("one_feature", "D = 1 and one output", D=1, out=1),
    _s("no_features", "D = 0: the bias is left", D=0),
    _s("four_dimensions", "leading dimensions are rows", rows=(2, 3, 3)),
    _s("odd_sizes", "no tile divides them", rows=(63,), D=257, out=65),
    _s("blocks", "more rows and columns than a kernel's block", rows=(97,), D=9, out=513),
    _s("deep", "more depth than one chunk of a kernel", rows=(7,), D=1100, out=19),
    *[
        _s(
            f"aliasing_{rows}",
            "weight rows that caches map to the same lines, with enough rows that each "
            "instruction set copies them",
            rows=(rows,),
            D=2048,
            out=19,
        )
        for rows in (16, 27)
    ],
    _s("row_stride", "rows of a larger tensor", rows=(9,), layout="rows"),
    _s("weight_transposed", "a weight stored transposed", layout="weight"),
    _s(
        "both_transposed",
        "neither's last dimension is contiguous",
        layout="both",
        rows=(50,),
        out=150,
    ),
    _s("both_transposed_long", "and more rows than a block", layout="both", rows=(130,), out=150),
    _s("weight_part", "rows of a larger weight", "interpreter", layout="part"),
)


def _torch_form(inputs: Inputs) -> tuple[Tensor, ...]:
    y = inputs["x"] @ inputs["weight"].t()
    return (y if inputs["bias"] is None else y + inputs["bias"],)


def _magnitudes(inputs: Inputs, douts: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The formulas on absolute values."""
    x, weight = inputs["x"].abs(), inputs["weight"].abs()
    bias = None if inputs["bias"] is None else inputs["bias"].abs()
    dy = douts[0].abs()
    rows = dy.reshape(-1, dy.shape[-1])
    return {
        "y": F.linear(x, weight, bias),
        "dx": dy @ weight,
        "dweight": rows.t() @ x.reshape(rows.shape[0], x.shape[-1]),
        "dbias": rows.sum(0),
    }


def _slice_dims(name: str, result: Tensor) -> int:
    """Tokens share one slice, as the outputs of one matrix product do."""
    return 0


def _workload(rows: int, D: int, out: int) -> Workload:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        inputs = make_inputs(generator, dtype, rows=(rows,), D=D, out=out)
        return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}

    flops = 2.0 * rows * D * out
    moved = 4.0 * (rows * (D + out) + D * out)
    return Workload(
        f"{rows}x{D}x{out}",
        make,
        ("x", "weight", "bias"),
        flops,
        moved,
        2 * flops,
        2 * moved,
        (),
        ("cpu",),
    )


def _base(**changes: Any) -> Inputs:
    return {"x": torch.zeros(3, 4), "weight": torch.zeros(8, 4), "bias": None} | changes


def _error(name: str, error: type[Exception], message: str, **changes: Any) -> ErrorSample:
    return ErrorSample(name, partial(_base, **changes), error, message)


ERRORS = (
    _error("x", TypeError, "x must be fp16", x=torch.zeros(3, 4).int()),
    _error("weight", ValueError, r"weight must be \[E, 4\]", weight=torch.zeros(8, 5)),
    _error("weight_rank", ValueError, r"weight must be \[E, 4\]", weight=torch.zeros(4)),
    _error("bias", ValueError, r"bias must be \[8\]", bias=torch.zeros(4)),
    _error("dtype", TypeError, "weight must have x's dtype", weight=torch.zeros(8, 4).half()),
    _error("bias_dtype", TypeError, "bias must have x's dtype", bias=torch.zeros(8).half()),
)

SPECS = (
    OpSpec(
        "linear",
        functional.linear,
        ("y",),
        SAMPLES,
        ERRORS,
        # Projections and vocabulary of a small model: a step of decoding, a batch in training.
        tuple(_workload(rows, 256, out) for rows in (16, 2048) for out in (768, 8000)),
        _torch_form,
        _magnitudes,
        _slice_dims,
        widen,
        partial(entries_by_rows, names=("x",), results=("y", "dx")),
        entries_in_bits=False,  # tiles of a matrix product follow its number of rows
    ),
)
