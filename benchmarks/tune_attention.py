"""Tasks of `benchmarks.tune` for attention: forward and backward, with one feature at a time.

Forward candidates are listed here, likely ones first; those of the backward are in
tune_attention_bwd.py. Results of the first and the last head are compared with the reference.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.tune_task import DTYPES, TOLERANCE, Case, normal_numbers

FEATURES = (
    "plain", "causal", "window", "lengths", "both_lengths", "mask", "bias", "dropout",
)  # fmt: skip
_DROPOUT_SEED = 1234

# (BLOCK_M, BLOCK_N, warps, stages, edge_stages, registers per thread or None, overlap).
_FORWARD = {
    64: (
        (128, 128, 8, 2, 2, None, 1), (128, 64, 8, 3, 2, 128, 2), (128, 64, 8, 3, 2, None, 0),
        (128, 128, 8, 2, 2, None, 2), (128, 64, 8, 3, 2, None, 1), (64, 128, 4, 2, 2, None, 1),
        (64, 128, 4, 2, 2, None, 2), (128, 64, 4, 3, 2, None, 0), (128, 128, 8, 3, 2, None, 0),
        (64, 64, 4, 3, 2, None, 2), (64, 128, 4, 2, 2, None, 0), (128, 64, 8, 2, 2, 128, 2),
        (64, 64, 4, 3, 2, None, 0), (128, 64, 4, 3, 2, None, 2), (128, 128, 8, 3, 2, None, 1),
        (128, 64, 4, 3, 2, 168, 0), (128, 128, 8, 2, 1, None, 1), (128, 64, 8, 4, 2, 128, 2),
        (128, 128, 4, 2, 2, None, 0), (128, 32, 4, 4, 2, None, 0), (256, 64, 8, 2, 2, None, 0),
    ),
    128: (
        (128, 64, 8, 3, 2, None, 1), (128, 128, 8, 2, 2, None, 2), (128, 128, 8, 2, 2, None, 0),
        (128, 64, 8, 2, 2, None, 1), (128, 128, 8, 2, 2, None, 1), (128, 64, 8, 3, 2, None, 2),
        (64, 64, 4, 2, 2, None, 1), (64, 64, 4, 2, 2, None, 2), (128, 64, 8, 3, 2, None, 0),
        (64, 64, 4, 2, 2, None, 0), (128, 32, 8, 3, 2, 128, 1), (64, 64, 4, 3, 2, None, 0),
        (64, 128, 4, 2, 2, None, 1), (128, 32, 8, 4, 2, None, 1), (128, 64, 8, 2, 2, None, 2),
        (128, 64, 8, 3, 1, None, 1), (128, 128, 8, 2, 1, None, 2), (128, 64, 4, 2, 2, None, 0),
    ),
    256: (
        (128, 64, 8, 2, 1, None, 1), (128, 64, 8, 2, 1, None, 0), (128, 64, 8, 2, 1, None, 2),
        (64, 32, 4, 2, 2, None, 1), (64, 32, 4, 2, 2, None, 0), (128, 32, 8, 3, 2, None, 1),
        (64, 64, 4, 2, 1, None, 0), (128, 32, 8, 3, 2, None, 0), (128, 32, 8, 2, 2, None, 1),
        (64, 64, 8, 2, 2, None, 0), (64, 64, 4, 2, 1, None, 1), (64, 32, 4, 3, 2, None, 0),
        (128, 64, 8, 1, 1, None, 0), (64, 64, 4, 1, 1, None, 0),
    ),
}  # fmt: skip
# (BLOCK_M, BLOCK_N, warps, stages, edge_stages)
_SINGLE_PRECISION = (
    (64, 32, 4, 2, 1), (32, 32, 4, 2, 1), (64, 32, 4, 1, 1), (32, 32, 4, 1, 1), (64, 32, 8, 2, 1),
    (64, 64, 8, 2, 1), (32, 16, 4, 1, 1), (16, 32, 4, 1, 1), (128, 32, 8, 2, 1),
)  # fmt: skip


@dataclass(frozen=True)
class AttentionTask:
    """direction: fwd or bwd. tokens: B * S. width: heads * D."""

    direction: str
    feature: str
    D: int
    S: int
    tokens: int
    width: int
    dtype: str

    unit = "TFLOP/s"

    @property
    def name(self) -> str:
        return f"{self.direction} {self.feature} D{self.D} S{self.S} {self.dtype}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, H, S, D."""
        return max(1, self.tokens // self.S), max(1, self.width // self.D), self.S, self.D

    def candidates(self, arch: str) -> list[Any]:
        return self._backward(arch) if self.direction == "bwd" else self._forward(arch)

    def _backward(self, arch: str) -> list[Any]:
        from benchmarks.tune_attention_bwd import candidates

        dtype, D = DTYPES[self.dtype], self.D
        edges = self._bounded or "lengths" in self.feature
        return candidates(arch, dtype, D, D, edges, self._dense)

    def _forward(self, arch: str) -> list[Any]:
        from fastattn.ops.attention.triton.fwd_config import Features, ForwardConfig, forward_config
        from fastattn.ops.attention.triton.tiles import split_width

        dtype, D = DTYPES[self.dtype], self.D
        features = Features(self._dense, self.feature == "dropout")
        shipped = forward_config(arch, dtype, D, D, self.S, features)
        two_tiles = split_width(D)[1] > 0  # else one, padded
        if dtype is torch.float32:
            precisions = ("tf32x3", "ieee") if arch.startswith("sm_") else ("ieee",)
            forms = (shipped.whole, not shipped.whole) if two_tiles else (shipped.whole,)
            return [shipped] + [
                ForwardConfig(*row, precision=precision, whole=whole)
                for precision, whole, row in itertools.product(precisions, forms, _SINGLE_PRECISION)
            ]
        width = 64 if D <= 64 else 128 if D <= 128 else 256
        rows = [
            ForwardConfig(*row[:5], tma=shipped.tma, maxnreg=row[5], overlap=row[6])
            for row in _FORWARD[width]
        ]
        # Loads through a list of mask tiles take one more stage.
        rows = [replace(row, stages=row.stages + 1) for row in rows] if self._dense else rows
        if shipped.tma:
            rows.insert(6, replace(rows[2], tma=False))
        if two_tiles:
            rows[1:1] = [replace(row, whole=True) for row in rows[:4]]
        return [shipped, *rows]

    @property
    def _bounded(self) -> bool:
        return self.feature in ("causal", "window")

    @property
    def _dense(self) -> bool:
        return self.feature in ("mask", "bias")

    def make(self, device: str) -> Case:
        """args: a ForwardCall; the results of a backward begin with out, lse and dout."""
        from fastattn.ops.attention.calls import ForwardCall

        B, H, S, D = self.shape
        dtype, numbers = DTYPES[self.dtype], normal_numbers(device)

        def normal(*shape: int) -> Tensor:
            return numbers(*shape).to(dtype)

        q, k, v = normal(B, H, S, D), normal(B, H, S, D), normal(B, H, S, D)
        mask = key_lengths = query_lengths = seed = None
        causal, left, p, pairs = 0, -1, 0.0, float(B * S * S)
        if self.feature == "causal":
            causal, pairs = 2, B * S * S / 2
        elif self.feature == "window":
            causal, left = 2, S // 8
            pairs = float(B * (S * (left + 1) - left * (left + 1) / 2))
        elif "lengths" in self.feature:
            spread = [S // 4 + (3 * S // 4) * b // max(1, B - 1) for b in range(B)]
            key_lengths = torch.tensor(spread, dtype=torch.int32, device=device)
            pairs = float(S * sum(spread))
            if self.feature == "both_lengths":
                query_lengths, pairs = key_lengths.clone(), float(sum(n * n for n in spread))
        elif self.feature == "mask":
            mask = numbers(1, 1, S, S) > -1.28  # 90 % are True
        elif self.feature == "bias":
            mask = normal(1, H, S, S)
        elif self.feature == "dropout":
            p, seed = 0.1, torch.tensor([_DROPOUT_SEED], device=device)
        call = ForwardCall(
            q, k, v, mask, None, key_lengths, query_lengths, causal=causal, window_left=left,
            scale=D**-0.5, dropout_p=p, dropout_seed=seed, dropout_stream=3,
        )  # fmt: skip
        out, lse = torch.empty_like(q), torch.empty(B, H, S, dtype=torch.float32, device=device)
        if self.direction == "fwd":
            return Case(call, (out, lse), 4 * H * D * pairs)
        dout = normal(B, H, S, D)
        none = q.new_empty(0)  # the other gradients
        gradients = (*(torch.empty_like(x) for x in (q, k, v)), none, none, none)
        return Case(call, (out, lse, dout, *gradients), 10 * H * D * pairs, first=3)

    def prepare(self, case: Case) -> None:
        """A backward needs the results of a forward, with the shipped tiling."""
        if self.direction == "fwd":
            return
        from fastattn.ops.attention import triton

        workspace = [
            torch.empty(shape, dtype=dtype, device=case.results[0].device)
            for shape, dtype, _ in triton.attention_fwd_workspace(case.args)
        ]
        triton.attention_fwd(case.args, *case.results[:2], *workspace)

    def launch(self, config: Any, case: Case) -> None:
        if self.direction == "fwd":
            from fastattn.ops.attention.triton.forward import attention_fwd_with_config

            attention_fwd_with_config(config, case.args, *case.results)
            return
        from fastattn.ops.attention.calls import BackwardCall
        from fastattn.ops.attention.triton.backward import attention_bwd_with_config

        out, lse, dout, *gradients = case.results
        a, needs = case.args, [True, True, True, False, False, False]
        call = BackwardCall._make([dout, None, out, lse, *a, needs])
        attention_bwd_with_config(config, call, *gradients)

    def wrong(self, case: Case) -> tuple[float, str | None]:
        B, H, _, _ = self.shape
        # Dropout bits depend on batch and head, and the reference numbers its heads from 0.
        heads = {(0, 0)} if self.feature == "dropout" else {(0, 0), (B - 1, H - 1)}
        worst = 0.0
        for b, h in sorted(heads):
            for name, got, right in self._compared(case, b, h):
                finite = right.isfinite()
                if not torch.equal(got.isfinite(), finite):
                    return float("inf"), f"{name}: non-finite values differ"
                difference = torch.where(finite, got.float() - right, 0)
                scale = torch.where(finite, right, 0).norm().clamp_min(1e-20)
                error = float(difference.norm() / scale)
                worst = max(worst, error)
                if not error <= TOLERANCE[DTYPES[self.dtype]]:
                    return worst, f"{name}: relative error {error:.2g}"
        return worst, None

    def _compared(self, case: Case, b: int, h: int) -> list[tuple[str, Tensor, Tensor]]:
        """(name, result, reference's result) of one head."""
        from fastattn.ops.attention import reference

        args, one = _head(case.args, b, h), (slice(b, b + 1), slice(h, h + 1))
        names: tuple[str, ...] = ("out", "lse")
        got: Sequence[Tensor] = case.results
        if self.direction == "fwd":
            expected: Sequence[Tensor | None] = reference.attention_fwd(*args)
        else:
            names = ("dq", "dk", "dv")
            out, lse, dout, *got = case.results
            backward: tuple[Any, ...] = (
                dout[one].float(), None, out[one].float(), lse[one], *args,
                [True, True, True, False, False, False],
            )  # fmt: skip
            expected = reference.attention_bwd(*backward)
        found = []
        for name, x, y in zip(names, got, expected, strict=False):
            assert y is not None
            found.append((name, x[one], y))
        return found

    def peer(self, case: Case) -> Callable[[], Any] | None:
        """cuDNN's attention, for the features that it supports."""
        if self.feature not in ("plain", "causal", "dropout") or self.dtype == "fp32":
            return None
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = (x.detach().requires_grad_(self.direction == "bwd") for x in case.args[:3])
        options = {"dropout_p": case.args[11], "is_causal": self.feature == "causal"}

        def forward() -> Tensor:
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

        if self.direction == "fwd":
            return forward
        out = forward()
        dout = case.results[2]
        return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def _head(args: tuple[Any, ...], b: int, h: int) -> tuple[Any, ...]:
    """The arguments of one head, in fp32."""
    q, k, v, mask, _, key_lengths, query_lengths, *rest = args
    data = [x[b : b + 1, h : h + 1].float() for x in (q, k, v)]
    if mask is not None:
        mask = mask[:, min(h, mask.shape[1] - 1)][:, None]
    lengths = [None if x is None else x[b : b + 1] for x in (key_lengths, query_lengths)]
    return (*data, mask, None, *lengths, *rest)
