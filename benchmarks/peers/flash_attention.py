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
    Forward,
    Implementation,
    Task,
    can_import,
    needs_package,
    package_version,
)
from fastattn.testing.spec import Inputs

_LIBRARY_VARIABLE = "FASTATTN_FA3_LIBRARY"
_FA3_MODULES = ("flash_attn_3._C", "xformers.flash_attn_3._C")
# (q, k, v, causal, scale, window, dropout_p, packing) -> out, all [B, S, H, D] or packed [T, H, D].
Attend = Callable[..., Any]


# -- what they support -----------------------------------------------------------------------------
def _unsupported(task: Task, *, widest: int, multiple: int, dropout: bool) -> str | None:
    inputs = task.inputs
    if task.dtype not in (torch.float16, torch.bfloat16):
        return f"has no {task.dtype}"
    if inputs.get("mask") is not None:
        return "takes no mask"
    if "key_lengths" in inputs:
        return "takes packed sequences, not padded ones with lengths"
    if inputs.get("dropout_p") and not dropout:
        return "has no dropout"
    if inputs["causal"] == "top_left" and inputs["q"].shape[-2] != inputs["k"].shape[-2]:
        return "aligns causality with the bottom right"
    if inputs["q"].shape[-1] > widest:
        return f"has head dims up to {widest}"
    if inputs["q"].shape[-1] % multiple:
        return f"has head dims that are multiples of {multiple}"
    return None


def _build(attend: Callable[[], Attend], task: Task) -> Forward:
    run = attend()
    packed = task.op == "attention_varlen"

    def forward(inputs: Inputs) -> Tensor:
        heads = (0, 1) if packed else (1, 2)  # the two dimensions to transpose
        out = run(
            *(inputs[n].transpose(*heads) for n in ("q", "k", "v")),
            bool(inputs["causal"]),
            inputs.get("scale"),
            inputs.get("window") or (-1, -1),
            inputs.get("dropout_p", 0.0),
            _packing(inputs) if packed else {},
        )
        return (out[0] if isinstance(out, tuple) else out).transpose(*heads)

    return forward


def _packing(inputs: Inputs) -> dict[str, Any]:
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return {name: inputs[name] for name in names}


# -- 2 ---------------------------------------------------------------------------------------------
def _second() -> Attend:
    from flash_attn import flash_attn_interface as library

    def attend(q, k, v, causal, scale, window, dropout_p, packing):  # type: ignore[no-untyped-def]
        call = library.flash_attn_varlen_func if packing else library.flash_attn_func
        options = {"dropout_p": dropout_p, "softmax_scale": scale, "causal": causal}
        return call(q, k, v, **packing, **options, window_size=window)

    return attend


# -- 3 ---------------------------------------------------------------------------------------------
def _third_is_missing() -> str | None:
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
        _third_operators().bwd(dout, *ctx.saved_tensors, dq=dq, dk=dk, dv=dv, **ctx.options)
        return *grads, None


def _third() -> Attend:
    _third_operators()

    def attend(q, k, v, causal, scale, window, dropout_p, packing):  # type: ignore[no-untyped-def]
        options = {"softmax_scale": scale, "is_causal": causal, **packing}
        options |= {"window_size_left": window[0], "window_size_right": window[1]}
        return _Third.apply(q, k, v, options)

    return attend


# -- 4 ---------------------------------------------------------------------------------------------
def _fourth() -> Attend:
    from flash_attn.cute import interface as library

    def attend(q, k, v, causal, scale, window, dropout_p, packing):  # type: ignore[no-untyped-def]
        call = library.flash_attn_varlen_func if packing else library.flash_attn_func
        sides = tuple(None if side < 0 else side for side in window)
        return call(q, k, v, **packing, softmax_scale=scale, causal=causal, window_size=sides)

    return attend


def _peer(
    name: str,
    attend: Callable[[], Attend],
    unavailable: Callable[[], str | None],
    distribution: str,
    *,
    multiple: int = 1,
    dropout: bool = False,
    compiles: bool = False,
) -> Implementation:
    return Implementation(
        name,
        ("attention", "attention_varlen"),
        partial(_build, attend),
        device_types=("cuda",),
        unavailable=unavailable,
        unsupported=partial(_unsupported, widest=256, multiple=multiple, dropout=dropout),
        version=partial(package_version, distribution),
        backend=name,
        compiles=compiles,
        draws_dropout=dropout,
    )


PEERS = (
    _peer(
        "fa2",
        _second,
        needs_package("flash-attn", "flash_attn.flash_attn_interface"),
        "flash-attn",
        dropout=True,
    ),
    _peer("fa3", _third, _third_is_missing, "flash_attn_3", multiple=8),
    # Compiles for seconds at the first call of each head dim.
    _peer(
        "fa4",
        _fourth,
        needs_package("flash-attn-4", "flash_attn.cute.interface"),
        "flash-attn-4",
        multiple=8,
        compiles=True,
    ),
)
