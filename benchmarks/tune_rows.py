"""Tasks of `benchmarks.tune` for the ops on rows: norms and the feed-forward network.

Each op's config.py lists its candidates, the shipped row first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.tune_task import DTYPES, TOLERANCE, Case, normal_numbers
from fastattn.ops._op import OPS

NORMS = ("layer_norm", "add_layer_norm", "rms_norm")
_EPS = 1e-5


class _RowTask:
    """Common code of norms and the feed-forward network."""

    dtype: str

    def prepare(self, case: Case) -> None:
        pass

    def expected(self, case: Case) -> Sequence[Tensor | None]:
        raise NotImplementedError

    def wrong(self, case: Case) -> tuple[float, str | None]:
        worst = 0.0
        for n, (got, right) in enumerate(zip(case.results, self.expected(case), strict=True)):
            if right is None or got.shape != right.shape:
                continue  # not computed
            right = right.float()
            if not bool(got.isfinite().all()):
                return float("inf"), f"result {n}: not finite"
            error = float((got.float() - right).norm() / right.norm().clamp_min(1e-20))
            worst = max(worst, error)
            if not error <= TOLERANCE[DTYPES[self.dtype]]:
                return worst, f"result {n}: relative error {error:.2g}"
        return worst, None


@dataclass(frozen=True)
class NormTask(_RowTask):
    direction: str
    op: str
    rows: int
    N: int
    dtype: str

    unit = "GB/s"

    @property
    def name(self) -> str:
        return f"{self.op} {self.direction} {self.rows}x{self.N} {self.dtype}"

    @property
    def parameters(self) -> int:
        return 1 if self.op == "rms_norm" else 2

    def candidates(self, arch: str) -> list[Any]:
        from fastattn.ops.layer_norm import config

        if self.direction == "fwd":
            return config.forward_candidates(arch, self.N, self.op == "add_layer_norm")
        itemsize = DTYPES[self.dtype].itemsize
        return config.backward_candidates(arch, self.N, itemsize, 2, self.parameters)

    def make(self, device: str) -> Case:
        dtype, normal = DTYPES[self.dtype], normal_numbers(device)
        x = normal(self.rows, self.N).to(dtype)
        weight = (1 + 0.1 * normal(self.N)).to(dtype)
        bias = None if self.op == "rms_norm" else normal(self.N).to(dtype)
        size = x.numel() * x.element_size()
        if self.op == "add_layer_norm":
            residual = normal(self.rows, self.N).to(dtype)
            forward: tuple[Any, ...] = (x, residual, None, weight, bias, _EPS, 0.0, None, 0)
        elif self.op == "layer_norm":
            forward = (x, weight, bias, _EPS)
        else:
            forward = (x, weight, _EPS)
        results = OPS[f"{self.op}_fwd"].allocate(forward)
        if self.direction == "fwd":
            return Case(forward, results, size * (4 if self.op == "add_layer_norm" else 2))
        dy = normal(self.rows, self.N).to(dtype)
        z, mean, rstd = self._saved(forward, device)
        needs = [True] * self.parameters
        if self.op == "add_layer_norm":
            args: tuple[Any, ...] = (dy, None, z, None, weight, bias, mean, rstd, _EPS, dtype)
            args += (0.0, None, 0, [True, True, False, *needs])
        elif self.op == "layer_norm":
            args = (dy, z, weight, bias, mean, rstd, _EPS, [True, *needs])
        else:
            args = (dy, z, weight, rstd, _EPS, [True, *needs])
        results = OPS[f"{self.op}_bwd"].allocate(args)
        return Case(args, results, size * (4 if self.op == "add_layer_norm" else 3))

    def _saved(self, forward: tuple[Any, ...], device: str) -> tuple[Tensor, Any, Tensor]:
        """The normalised tensor, its mean and its reciprocal standard deviation."""
        z = forward[0] + forward[1] if self.op == "add_layer_norm" else forward[0]
        wide = z.float()
        if self.op == "rms_norm":
            return z, None, (wide.square().mean(-1) + _EPS).rsqrt()
        mean = wide.mean(-1)
        return z, mean, ((wide - mean[:, None]).square().mean(-1) + _EPS).rsqrt()

    def launch(self, config: Any, case: Case) -> None:
        from fastattn.ops.layer_norm import triton

        a, r = case.args, case.results
        mean: Tensor | None
        if self.direction == "fwd":
            if self.op == "add_layer_norm":
                triton.norm_fwd(*a, *r, config=config)
            elif self.op == "layer_norm":
                x, weight, bias, eps = a
                y, mean, rstd = r
                none = (eps, 0.0, None, 0)
                triton.norm_fwd(x, None, None, weight, bias, *none, y, None, mean, rstd,
                                config=config)  # fmt: skip
            else:
                x, weight, eps = a
                y, rstd = r
                triton.norm_fwd(x, None, None, weight, None, eps, 0.0, None, 0, y, None, None, rstd,
                                config=config)  # fmt: skip
            return
        if self.op == "add_layer_norm":
            (dy, _, z, _, weight, _, mean, rstd, *_), (dx, dresidual, _, dweight, dbias) = a, r
        elif self.op == "layer_norm":
            (dy, z, weight, _, mean, rstd, *_), (dx, dweight, dbias), dresidual = a, r, None
        else:
            (dy, z, weight, rstd, *_), (dx, dweight) = a, r
            mean = dresidual = dbias = None
        workspace = [
            torch.empty(shape, dtype=dtype, device=z.device)
            for shape, dtype, _ in triton.norm_bwd_workspace(config, z, self.parameters)
        ]
        dropout = (0.0, None, 0)
        triton.norm_bwd(dy, None, z, weight, mean, rstd, *dropout, dx, dresidual, dweight, dbias,
                        None, *workspace, config=config)  # fmt: skip

    def expected(self, case: Case) -> Sequence[Tensor | None]:
        from fastattn.ops.layer_norm import reference

        function = getattr(reference, f"{self.op}_{self.direction}")
        return function(*_widened(case.args))

    def peer(self, case: Case) -> Callable[[], Any] | None:
        """torch's op, if there is a single one."""
        if self.op == "add_layer_norm":
            return None
        x, weight, bias = (
            case.args[:3] if self.direction == "fwd" else (case.args[1], case.args[2], case.args[3])
        )
        leaves = [p.detach().requires_grad_() for p in (x, weight)]
        if self.op == "layer_norm":
            leaves.append(bias.detach().requires_grad_())

        def forward() -> Tensor:
            if self.op == "rms_norm":
                return F.rms_norm(leaves[0], (self.N,), leaves[1], _EPS)
            return F.layer_norm(leaves[0], (self.N,), leaves[1], leaves[2], _EPS)

        if self.direction == "fwd":
            return torch.no_grad()(forward)
        y = forward()
        return lambda: torch.autograd.grad(y, leaves, case.args[0], retain_graph=True)


@dataclass(frozen=True)
class FfnTask(_RowTask):
    """The forward, whose first product has candidates."""

    rows: int
    D: int
    activation: str
    dtype: str

    direction = "fwd"
    unit = "TFLOP/s"

    @property
    def name(self) -> str:
        return f"ffn fwd {self.rows}x{self.D} {self.activation} {self.dtype}"

    @property
    def hidden(self) -> int:
        return 4 * self.D

    @property
    def inner(self) -> int:
        """The rows of w1."""
        from fastattn.ops.ffn.op import GATED_ACTIVATIONS

        return self.hidden * (2 if self.activation in GATED_ACTIVATIONS else 1)

    def candidates(self, arch: str) -> list[Any]:
        from fastattn.ops.ffn import config

        sizes, work = (self.rows, self.D, self.inner), self.activation != "relu"
        return list(config.candidates(arch, DTYPES[self.dtype], *sizes, work=work))

    def make(self, device: str) -> Case:
        dtype, normal, inner = DTYPES[self.dtype], normal_numbers(device), self.inner
        x = normal(self.rows, self.D).to(dtype)
        w1 = (normal(inner, self.D) * self.D**-0.5).to(dtype)
        w2 = (normal(self.D, self.hidden) * self.hidden**-0.5).to(dtype)
        b1, b2 = normal(inner).to(dtype), normal(self.D).to(dtype)
        flops = 2.0 * self.rows * self.D * (inner + self.hidden)
        args = (x, w1, b1, w2, b2, None, self.activation, 0.0, 0.0, None, 0)
        return Case(args, OPS["ffn_fwd"].allocate(args), flops)

    def launch(self, config: Any, case: Case) -> None:
        from fastattn.ops.ffn import triton
        from fastattn.ops.ffn.calls import ForwardCall

        triton.ffn_fwd_with_config(config, ForwardCall(*case.args), *case.results)

    def expected(self, case: Case) -> Sequence[Tensor | None]:
        from fastattn.ops.ffn import reference

        return reference.ffn_fwd(*_widened(case.args))

    def peer(self, case: Case) -> Callable[[], Any] | None:
        return None


def _widened(args: Sequence[Any]) -> list[Any]:
    """Arguments in fp32, dtypes among them included."""
    return [
        a.float()
        if isinstance(a, Tensor) and a.is_floating_point()
        else torch.float32
        if isinstance(a, torch.dtype)
        else a
        for a in args
    ]
