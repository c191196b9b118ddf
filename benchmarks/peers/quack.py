"""quack's norms, in the CuTe language; its layer norm is a forward alone."""

from torch import Tensor

from benchmarks.implementations import (
    Forward,
    Implementation,
    Task,
    needs_package,
    package_version,
)
from fastattn.testing.spec import Inputs


def _layer_norm(task: Task) -> Forward:
    from quack.rmsnorm import layernorm_fwd

    # It wants fp32 parameters: converted once, as a model would hold them.
    weight, bias = (task.inputs[n].detach().float() for n in ("weight", "bias"))

    def forward(inputs: Inputs) -> Tensor:
        return layernorm_fwd(inputs["x"], weight, bias, eps=inputs["eps"])

    return forward


def _rms_norm(task: Task) -> Forward:
    from quack.rmsnorm import rmsnorm

    return lambda inputs: rmsnorm(inputs["x"], inputs["weight"], eps=inputs["eps"])


def _unsupported(task: Task) -> str | None:
    if task.inputs["x"].dim() != 2:
        return "takes [rows, N]"
    return "needs weight" if task.inputs.get("weight") is None else None


def _peer(op: str, **options: object) -> Implementation:
    return Implementation(
        "quack",
        (op,),
        _layer_norm if op == "layer_norm" else _rms_norm,
        device_types=("cuda",),
        unavailable=needs_package("quack-kernels", "quack.rmsnorm"),
        unsupported=_unsupported,
        version=lambda: package_version("quack-kernels"),
        backend="cute",
        compiles=True,  # for seconds, at the first call of a width
        **options,  # type: ignore[arg-type]
    )


PEERS = (_peer("layer_norm", directions=("fwd",)), _peer("rms_norm"))
