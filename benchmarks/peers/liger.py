"""Liger-Kernel's norms, in Triton."""

import functools
from typing import Any

from torch import Tensor

from benchmarks.implementations import (
    adapter,
    of_package,
    refusing,
    without_parameters,
)


@functools.cache
def _library() -> Any:
    from liger_kernel.transformers import functional

    return functional


@refusing(without_parameters)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return _library().liger_layer_norm(x, weight, bias, eps)


@refusing(without_parameters)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # In place it would write the gradient of x over that of the result.
    return _library().liger_rms_norm(x, weight, eps, in_place=False)


PEERS = tuple(
    adapter(
        "liger",
        op,
        function,
        device_types=("cuda",),
        **of_package("liger-kernel", "liger_kernel.transformers.functional"),
        backend="triton",
    )
    for op, function in (("layer_norm", layer_norm), ("rms_norm", rms_norm))
)
