"""FlashAttention 2, 3 and 4, padded without masks and packed.

2 is the package flash-attn, 4 flash-attn-4. 3 has no package on the index: it is loaded from
flash_attn_3, from xFormers' copy, or from the shared library at FASTATTN_FA3_LIBRARY. They take
queries as [B, S, H, D]: the same memory with other strides.
"""

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.implementations import (
    Implementation,
    adapter,
    can_import,
    of_package,
    package_version,
    refusing,
)

_LIBRARY_VARIABLE = "FASTATTN_FA3_LIBRARY"
_FA3_MODULES = ("flash_attn_3._C", "xformers.flash_attn_3._C")
# (q, k, v, causal, scale, window, dropout_p, packing) -> out, all [B, S, H, D] or packed [T, H, D].
Attend = Callable[..., Any]


# -- as functions of q, k and v --------------------------------------------------------------------
def _why(
    widest: int,
    multiple: int,
    dropout: bool,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: Any = False,
    window: Any = None,
    dropout_p: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    **_: Any,
) -> str | None:
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"has no {q.dtype}"
    if q.shape[-1] != v.shape[-1]:
        return "takes equal head dims here"
    if q.shape[-1] > widest:
        return f"has head dims up to {widest}"
    if q.shape[-1] % multiple:
        return f"has head dims that are multiples of {multiple}"
    if dropout_p and not dropout:
        return "has no dropout"
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        square = torch.equal(cu_seqlens_q, cu_seqlens_k)
    else:
        square = q.shape[2] == k.shape[2]
        if causal == "bottom_right_lengths":
            return "takes no diagonal that lengths define"
    top_left = causal in (True, "top_left") or (window is not None and not causal)
    return "aligns causality with the bottom right" if top_left and not square else None


def _functions(
    name: str, attend: Attend, *, multiple: int = 1, dropout: bool = False
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Functions with arguments of `fastattn.attention`, and of `fastattn.attention_varlen`."""
    limits = refusing(partial(_why, 256, multiple, dropout))

    def call(q: Any, k: Any, v: Any, causal: Any, scale: Any, window: Any, *rest: Any) -> Tensor:
        out = attend(q, k, v, bool(causal), scale, window or (-1, -1), *rest)
        return out[0] if isinstance(out, tuple) else out

    @limits
    def padded(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: Any = False,
        scale: float | None = None,
        window: Any = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        rows = (x.transpose(1, 2) for x in (q, k, v))
        return call(*rows, causal, scale, window, dropout_p, {}).transpose(1, 2)

    @limits
    def packed(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        causal: Any = False,
        scale: float | None = None,
        window: Any = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        packing = {
            "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
            "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k,
        }  # fmt: skip
        return call(q, k, v, causal, scale, window, dropout_p, packing)

    padded.__name__, packed.__name__ = name, f"{name}_varlen"
    return padded, packed


# -- 2 ---------------------------------------------------------------------------------------------
def _second(q, k, v, causal, scale, window, dropout_p, packing):  # type: ignore[no-untyped-def]
    from flash_attn import flash_attn_interface as library

    call = library.flash_attn_varlen_func if packing else library.flash_attn_func
    options = {"dropout_p": dropout_p, "softmax_scale": scale, "causal": causal}
    return call(q, k, v, **packing, **options, window_size=window)


fa2, fa2_varlen = _functions("fa2", _second, dropout=True)


# -- 3 ---------------------------------------------------------------------------------------------
def third_is_missing() -> str | None:
    path = os.environ.get(_LIBRARY_VARIABLE)
    if path:
        return None if Path(path).is_file() else f"is not at {_LIBRARY_VARIABLE}={path}"
    if any(can_import(name) for name in _FA3_MODULES):
        return None
    return f"is not installed: neither flash_attn_3 nor xFormers' copy, no {_LIBRARY_VARIABLE}"


@functools.cache
def _third_operators() -> Any:
    path = os.environ.get(_LIBRARY_VARIABLE)
    if path:
        _preload_cudart_12()
        torch.ops.load_library(path)
    else:
        importlib.import_module(next(name for name in _FA3_MODULES if can_import(name)))
    return torch.ops.flash_attn_3


def _preload_cudart_12() -> None:
    """Libraries built with CUDA 12 need its runtime, which a torch for CUDA 13 does not include."""
    folders = []
    with contextlib.suppress(ImportError):
        found = importlib.util.find_spec("nvidia.cuda_runtime")
        folders = list(found.submodule_search_locations or ()) if found else []
    for name in (*[f"{folder}/lib/libcudart.so.12" for folder in folders], "libcudart.so.12"):
        with contextlib.suppress(OSError):
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
            return


class _Third(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        out, lse, *_ = _third_operators().fwd(q, k, v, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        # Written in place; whether they are also returned differs between releases.
        dq, dk, dv = grads = [torch.empty_like(x) for x in ctx.saved_tensors[:3]]
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        _third_operators().bwd(dout, *ctx.saved_tensors, dq=dq, dk=dk, dv=dv, **ctx.options)
        return *grads, None


def _third(q, k, v, causal, scale, window, dropout_p, packing):  # type: ignore[no-untyped-def]
    options = {"softmax_scale": scale, "is_causal": causal, **packing}
    options |= {"window_size_left": window[0], "window_size_right": window[1]}
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return _Third.apply(q, k, v, options)


fa3, fa3_varlen = _functions("fa3", _third, multiple=8)


# -- 4 ---------------------------------------------------------------------------------------------
def _fourth(q, k, v, causal, scale, window, dropout_p, packing):  # type: ignore[no-untyped-def]
    from flash_attn.cute import interface as library

    call = library.flash_attn_varlen_func if packing else library.flash_attn_func
    sides = tuple(None if side < 0 else side for side in window)
    return call(q, k, v, **packing, softmax_scale=scale, causal=causal, window_size=sides)


fa4, fa4_varlen = _functions("fa4", _fourth, multiple=8)


def _peers(name: str, **about: Any) -> list[Implementation]:
    return [
        adapter(name, op, globals()[function], device_types=("cuda",), backend=name, **about)
        for op, function in (("attention", name), ("attention_varlen", f"{name}_varlen"))
    ]


PEERS = (
    *_peers(
        "fa2", **of_package("flash-attn", "flash_attn.flash_attn_interface"), draws_dropout=True
    ),
    *_peers("fa3", unavailable=third_is_missing, version=partial(package_version, "flash_attn_3")),
    # Compiles for seconds at the first call of each head dim.
    *_peers("fa4", **of_package("flash-attn-4", "flash_attn.cute.interface"), compiles=True),
)
