"""Formulas for `torch.utils.flop_counter.FlopCounterMode`, so that it counts fastattn's ops.

They follow torch's: a multiplication and addition are two operations, only matrix products count,
and every pair of query and key counts whatever the mask. For packed sequences only pairs within a
sequence count, which reads the offsets; without data, the pairs that the maximum lengths allow.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_MODULE = "torch.utils.flop_counter"


def attention_flops(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **kwargs: Any) -> int:
    """Q Kᵀ and P V of q `[B, H, M, D]`, k `[B, K, N, D]`, v `[B, K, N, E]`."""
    B, H, M, D = q.shape
    return 2 * B * H * M * k.shape[2] * (D + v.shape[3])


def attention_paged_flops(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, *rest: Any, **kwargs: Any
) -> int:
    """FLOPs for all keys of the block table: k `[P, K, page, D]`, v `[P, K, page, E]`."""
    B, H, M, D = q.shape
    return 2 * B * H * M * block_table.shape[1] * k.shape[2] * (D + v.shape[3])


def attention_backward_flops(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **kw: Any
) -> int:
    """Q Kᵀ recomputed, dO Vᵀ, Pᵀ dO, dS K and dSᵀ Q."""
    B, H, M, D = q.shape
    return 2 * B * H * M * k.shape[2] * (3 * D + 2 * v.shape[3])


def attention_with_weights_backward_flops(
    dout: Tensor | None, dlse: Tensor | None, dweights: Tensor | None, *rest: Any, **kwargs: Any
) -> int:
    """FLOPs of `attention_backward_flops`."""
    return attention_backward_flops(dout, dlse, *rest)


def varlen_flops(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
    *rest: Any, **kwargs: Any,
) -> int:  # fmt: skip
    """`attention_flops` summed over sequences: q `[T, H, D]`, k `[S, K, D]`, v `[S, K, E]`."""
    H, D = q.shape[1:]
    return 2 * H * _pairs(cu_q, cu_k, max_q, max_k) * (D + v.shape[2])


def varlen_backward_flops(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor,
    cu_k: Tensor, out: Tensor, lse: Tensor, max_q: int, max_k: int, *rest: Any, **kwargs: Any,
) -> int:  # fmt: skip
    """`attention_backward_flops` summed over sequences."""
    H, D = q.shape[1:]
    return 2 * H * _pairs(cu_q, cu_k, max_q, max_k) * (3 * D + 2 * v.shape[2])


def ffn_flops(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, *rest: Any, **kwargs: Any
) -> int:
    """Both products: x `[..., D]`, w1 `[F or 2F, D]`, w2 `[E, F]`."""
    rows = x.numel() // max(1, x.shape[-1])
    return 2 * rows * (w1.numel() + w2.numel())


def ffn_backward_flops(
    dy: Tensor, x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None,
    hidden: Tensor, *rest: Any, **kwargs: Any,
) -> int:  # fmt: skip
    """The products of the required gradients; all but w2's need the hidden layer's gradient."""
    needs: Sequence[bool] = next(x for x in rest if isinstance(x, list | tuple))
    need_x, need_w1, need_b1, need_w2, _ = needs
    rows = x.numel() // max(1, x.shape[-1])
    through_hidden = need_x or need_w1 or need_b1
    return 2 * rows * (w1.numel() * (need_x + need_w1) + w2.numel() * (through_hidden + need_w2))


def linear_flops(x: Tensor, w: Tensor, *rest: Any, **kwargs: Any) -> int:
    """x `[..., D]`, w `[E, D]`."""
    return 2 * (x.numel() // max(1, x.shape[-1])) * w.numel()


def linear_backward_flops(
    dy: Tensor, x: Tensor | None, w: Tensor | None, needs: Sequence[bool], *rest: Any, **kwargs: Any
) -> int:
    """The products of the required gradients: dy `[..., E]` with w `[E, D]` and with x."""
    need_x, need_w, _ = needs
    columns = sum(t.shape[-1] for t, need in ((w, need_x), (x, need_w)) if need and t is not None)
    return 2 * dy.numel() * columns


FORMULAS: dict[str, Callable[..., int]] = {
    "attention_fwd": attention_flops,
    "attention_paged_fwd": attention_paged_flops,
    "attention_bwd": attention_backward_flops,
    "attention_with_weights_fwd": attention_flops,
    "attention_with_weights_bwd": attention_with_weights_backward_flops,
    "attention_varlen_fwd": varlen_flops,
    "attention_varlen_bwd": varlen_backward_flops,
    "ffn_fwd": ffn_flops,
    "ffn_bwd": ffn_backward_flops,
    "linear_fwd": linear_flops,
    "linear_bwd": linear_backward_flops,
}


def install() -> None:
    """Registers the formulas, now or when `torch.utils.flop_counter` is first imported.

    Importing that module imports Triton, so `import fastattn` does not.
    """
    module = sys.modules.get(_MODULE)
    if module is not None:
        _register(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register(module: ModuleType) -> None:
    for name, formula in FORMULAS.items():
        op = getattr(torch.ops.fastattn, name)
        if op not in module.flop_registry:
            module.register_flop_formula(op, get_raw=True)(formula)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch's module as usual and registers the formulas after it has executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                _register(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _pairs(cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> int:
    if cu_q.is_meta or torch._subclasses.fake_tensor.is_fake(cu_q):
        return (cu_q.shape[0] - 1) * max_q * max_k
    lengths_q, lengths_k = cu_q.long().diff(), cu_k.long().diff()
    return int((lengths_q * lengths_k).sum())
