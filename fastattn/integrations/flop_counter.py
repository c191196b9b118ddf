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

from fastattn.functional import ForwardCall

_MODULE = "torch.utils.flop_counter"
_FIELDS = len(ForwardCall._fields)


def attention_flops(*args: Any, **kwargs: Any) -> int:
    """Q Kᵀ and P V, for all keys of a block table."""
    call = ForwardCall(*args[:_FIELDS])
    return 2 * _pairs(call) * (call.q.shape[-1] + call.v.shape[-1])


def attention_backward_flops(*args: Any, **kwargs: Any) -> int:
    """Q Kᵀ recomputed, dO Vᵀ, Pᵀ dO, dS K and dSᵀ Q."""
    _dout, _dlse, _out, _lse, *forward = args
    call = ForwardCall(*forward[:_FIELDS])
    return 2 * _pairs(call) * (3 * call.q.shape[-1] + 2 * call.v.shape[-1])


def attention_with_weights_backward_flops(*args: Any, **kwargs: Any) -> int:
    """FLOPs of `attention_backward_flops`."""
    dout, dlse, _, *rest = args
    return attention_backward_flops(dout, dlse, *rest)


def _pairs(call: ForwardCall) -> int:
    """Pairs of a query and a key in all heads."""
    cu_q, cu_k, H = call.cu_seqlens_q, call.cu_seqlens_k, call.q.shape[1]
    if cu_q is None or cu_k is None:
        pages = 1 if call.block_table is None else call.block_table.shape[1]
        return call.q.shape[0] * H * call.q.shape[2] * call.k.shape[2] * pages
    if cu_q.is_meta or torch._subclasses.fake_tensor.is_fake(cu_q):
        return H * (cu_q.shape[0] - 1) * call.max_seqlen_q * call.max_seqlen_k
    lengths_q, lengths_k = cu_q.long().diff(), cu_k.long().diff()
    return H * int((lengths_q * lengths_k).sum())


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
    "attention_bwd": attention_backward_flops,
    "attention_with_weights_fwd": attention_flops,
    "attention_with_weights_bwd": attention_with_weights_backward_flops,
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
