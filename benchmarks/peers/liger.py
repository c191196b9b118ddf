"""Liger-Kernel's norms, in Triton."""

from torch import Tensor

from benchmarks.implementations import (
    Forward,
    Implementation,
    Task,
    needs_package,
    package_version,
)
from fastattn.testing.spec import Inputs


def _build(task: Task) -> Forward:
    from liger_kernel.transformers import functional

    def layer_norm(inputs: Inputs) -> Tensor:
        return functional.liger_layer_norm(
            inputs["x"], inputs["weight"], inputs["bias"], inputs["eps"]
        )

    def rms_norm(inputs: Inputs) -> Tensor:
        # In place it would write the gradient of x over that of the result.
        return functional.liger_rms_norm(
            inputs["x"], inputs["weight"], inputs["eps"], in_place=False
        )

    return {"layer_norm": layer_norm, "rms_norm": rms_norm}[task.op]


def _unsupported(task: Task) -> str | None:
    names = ("weight", "bias") if task.op == "layer_norm" else ("weight",)
    missing = [name for name in names if task.inputs.get(name) is None]
    return f"needs {' and '.join(missing)}" if missing else None


PEERS = (
    Implementation(
        "liger",
        ("layer_norm", "rms_norm"),
        _build,
        device_types=("cuda",),
        unavailable=needs_package("liger-kernel", "liger_kernel.transformers.functional"),
        unsupported=_unsupported,
        version=lambda: package_version("liger-kernel"),
        backend="triton",
    ),
)
