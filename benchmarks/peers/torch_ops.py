"""torch's operators, eager and under torch.compile: a model without any library."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.implementations import (
    ON_REQUEST,
    Forward,
    Implementation,
    Task,
    adapter,
    weights_are_too_large,
)
from benchmarks.peers.sdpa import key_mask
from fastattn.testing.spec import Inputs

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
_GATED: dict[str, Callable[[Tensor], Tensor]] = {"reglu": F.relu, "geglu": F.gelu, "swiglu": F.silu}


def _attention(mask: Tensor | None, inputs: Inputs) -> Tensor:
    """softmax(q kᵀ) v with all weights in memory."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    G = q.shape[1] // k.shape[1]
    if G > 1:
        k, v = k.repeat_interleave(G, 1), v.repeat_interleave(G, 1)
    scale = inputs.get("scale")
    s = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
    p = torch.softmax(s, -1)
    dropout_p = inputs.get("dropout_p", 0.0)
    return (F.dropout(p, dropout_p) if dropout_p else p) @ v


def _build_attention(task: Task) -> Forward:
    mask = key_mask(task.inputs)
    if task.inputs.get("mask") is not None:
        return lambda inputs: _attention(inputs["mask"], inputs)
    if task.inputs["causal"]:
        M, N = task.inputs["q"].shape[2], task.inputs["k"].shape[2]
        mask = torch.ones(M, N, dtype=torch.bool, device=task.device).tril()
    return partial(_attention, mask)


def _attention_unsupported(task: Task) -> str | None:
    inputs = task.inputs
    if inputs.get("window") is not None or inputs["causal"] == "bottom_right":
        return "is set up for top-left causality without windows here"
    if inputs["causal"] and key_mask(inputs) is not None:
        return "is set up for a mask or causality here"
    return weights_are_too_large(task, copies=3)


def layer_norm(x: Tensor, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    x_bias: Any = None,
    dropout_p: float = 0.0,
) -> Tensor:
    x = x if x_bias is None else x + x_bias
    z = residual + (F.dropout(x, dropout_p) if dropout_p else x)
    return F.layer_norm(z, z.shape[-1:], weight, bias, eps)


def rms_norm(x: Tensor, weight: Any = None, eps: float | None = None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def linear(x: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    return F.linear(x, weight, bias)


def ffn(x: Tensor, w1: Tensor, b1: Any, w2: Tensor, b2: Any, *, activation: str = "gelu") -> Tensor:
    hidden = F.linear(x, w1, b1)
    if activation in _GATED:
        gate, up = hidden.chunk(2, -1)
        hidden = _GATED[activation](gate) * up
    else:
        hidden = _ACTIVATIONS[activation](hidden)
    return F.linear(hidden, w2, b2)


_ROW_OPS: dict[str, Callable[..., Tensor]] = {
    "layer_norm": layer_norm,
    "add_layer_norm": add_layer_norm,
    "rms_norm": rms_norm,
    "linear": linear,
    "ffn": ffn,
}
_compiled = partial(torch.compile, dynamic=False)

PEERS = (
    Implementation(
        "eager",
        ("attention",),
        _build_attention,
        unsupported=_attention_unsupported,
        workloads=r"s(64|128|512|1024)_|bias|dropout",
        draws_dropout=True,
        ignores_query_lengths=True,
    ),
    *[adapter("eager", op, function, draws_dropout=True) for op, function in _ROW_OPS.items()],
    # On a CPU, where compiling takes 10 s, one shape of each op.
    *[
        adapter(
            "compile",
            op,
            function,
            wrap=_compiled,
            compiles=True,
            workloads=r"32768x|8192x|16384x|2048x512(_relu)?$",
            draws_dropout=True,
        )
        for op, function in _ROW_OPS.items()
    ],
    # Minutes of search for each shape.
    adapter(
        "compile-max-autotune",
        "ffn",
        ffn,
        wrap=partial(_compiled, mode="max-autotune-no-cudagraphs"),
        compiles=True,
        workloads=ON_REQUEST,
    ),
)
