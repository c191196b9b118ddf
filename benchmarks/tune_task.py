"""A task of `benchmarks.tune`: the Triton kernels of an op on a workload, in candidate configs.

Inputs, check and peer are those of the benchmarks. While results are checked, autograd calls the
kernels; then they are launched alone, with the same arguments and results.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.cases import DTYPES, specs
from fastattn.ops._op import OPS
from fastattn.ops.attention.spec_workloads import padded_workload
from fastattn.ops.ffn import spec as ffn
from fastattn.ops.layer_norm import spec as layer_norm
from fastattn.testing.spec import Workload

NORMS = ("layer_norm", "add_layer_norm", "rms_norm")
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"causal": True}, "window": {"causal": True, "window": ...},
    "lengths": {"padded": "keys"}, "both_lengths": {"padded": "both"},
    "mask": {"mask": "bool BMN"}, "bias": {"mask": "float HMN"}, "dropout": {"dropout_p": 0.1},
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """direction: fwd or bwd. shape: B, H, S, D of attention; rows and columns of other ops.
    feature: one of FEATURES, or the activation of ffn, of which the forward alone has candidates.
    """

    op: str
    direction: str
    dtype: str
    shape: tuple[int, ...]
    feature: str = ""

    @property
    def workload(self) -> Workload:
        if self.op == "attention":
            B, H, S, D = self.shape
            options = FEATURES[self.feature]
            options = options | ({"window": S // 8} if "window" in options else {})
            name = f"b{B}_h{H}_s{S}_d{D}_{self.feature}"
            return padded_workload(name, B, H, S, D, ("cuda",), **options)
        if self.op == "ffn":
            return ffn.workload(*self.shape, self.feature, ("cuda",))
        return layer_norm.workload(self.op, *self.shape, ("cuda",))

    @property
    def name(self) -> str:
        return f"{self.op} {self.direction} {self.workload.name} {self.dtype}"

    def candidates(self, arch: str) -> list[Any]:
        """Configs to try, each once, the shipped one first."""
        dtype = DTYPES[self.dtype]
        if self.op == "attention":
            from benchmarks import tune_attention

            return tune_attention.candidates(
                arch, self.direction, dtype, *self.shape[2:], self.feature
            )
        rows, N = self.shape
        if self.op == "ffn":
            from fastattn.ops.ffn.config import candidates

            width = 4 * N * (2 if self.feature in ffn.GATED_ACTIVATIONS else 1)
            return candidates(arch, dtype, rows, N, width, work=self.feature != "relu")
        from fastattn.ops.layer_norm import config

        if self.direction == "fwd":
            return config.forward_candidates(arch, N, self.op == "add_layer_norm")
        sums = 1 if self.op == "rms_norm" else 2
        return config.backward_candidates(arch, N, dtype.itemsize, 2, sums)

    def launcher(self, call: Any, results: tuple[Tensor, ...]) -> Callable[[Any], None]:
        """config -> a launch of the kernels, which writes the results."""
        if self.op == "attention":
            from fastattn.ops.attention.triton import backward, forward

            module = forward if self.direction == "fwd" else backward
            launch = getattr(module, f"attention_{self.direction}_with_config")
            return lambda config: launch(config, call, *results)
        if self.op == "ffn":
            from fastattn.ops.ffn.triton import ffn_fwd_with_config

            return lambda config: ffn_fwd_with_config(config, call, *results)
        from fastattn.ops.layer_norm import triton

        with mock.patch.object(triton, f"norm_{self.direction}") as norm:
            getattr(triton, f"{self.op}_{self.direction}")(call, *results)
        args = norm.call_args.args
        if self.direction == "fwd":
            return lambda config: triton.norm_fwd(*args, config=config)
        z, sums = args[2], sum(gradient is not None for gradient in args[11:])

        def backward(config: Any) -> None:
            layout = triton.norm_bwd_workspace(config, z, sums)
            workspace = OPS[f"{self.op}_bwd"].allocate_workspace(layout, z.device)
            triton.norm_bwd(*args, *workspace, config=config)

        return backward


class Candidate(TorchDispatchMode):
    """Inside, the op of a task is computed in a config, into results that were NaN. `launch`
    repeats the last call. kernels: those of the last call.
    """

    def __init__(self, task: Task, config: Any, *, compile_only: bool = False):
        super().__init__()
        self.task, self.config, self.compile_only = task, config, compile_only
        self.op = OPS[f"{task.op}_{task.direction}"]
        self.launch: Callable[[], None] = lambda: None
        self.kernels: list[Any] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op._schema.name != f"fastattn::{self.op.name}":
            return op(*args, **(kwargs or {}))
        call = self.op.as_call(args)
        results = self.op.allocate(call)
        for result in results:
            result.fill_(float("nan"))
        launch = self.task.launcher(call, results)
        self.launch = lambda: launch(self.config)
        with _collecting_kernels(self.compile_only) as self.kernels:
            self.launch()
        return self.op.as_declared(results)


@contextlib.contextmanager
def _collecting_kernels(compile_only: bool) -> Iterator[list[Any]]:
    """The kernels launched inside; with compile_only Triton compiles and caches without running."""
    from triton.runtime.jit import JITFunction

    kernels: list[Any] = []
    run = JITFunction.run

    def collect(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=warmup or compile_only, **options)
        kernels.append(kernel)
        return kernel

    with mock.patch.object(JITFunction, "run", collect):
        yield kernels


def compile_kernels(task: Task, config: Any) -> None:
    """Into Triton's cache, without tensors in memory."""
    workload, spec = task.workload, specs()[task.op]
    with FakeTensorMode(allow_non_fake_inputs=True):
        drawn = workload.make(torch.device("cpu"), DTYPES[task.dtype], torch.Generator())
    inputs = {
        name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        if isinstance(x, Tensor)
        else x
        for name, x in drawn.items()
    }
    leaves = [inputs[n].requires_grad_() for n in workload.gradients if n in inputs]
    with Candidate(task, config, compile_only=True):
        result = spec.function(**inputs)
        result = result[0] if isinstance(result, tuple) else result
        if task.direction == "bwd":
            torch.autograd.grad(result, leaves, torch.empty_like(result))
