"""torch's operators, eager and under torch.compile: a model without any library."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.implementations import (
    ON_REQUEST,
    Forward,
    Implementation,
    Task,
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


def _layer_norm(inputs: Inputs) -> Tensor:
    x = inputs["x"]
    return F.layer_norm(x, x.shape[-1:], inputs["weight"], inputs["bias"], inputs["eps"])


def _add_layer_norm(inputs: Inputs) -> Tensor:
    x = inputs["x"] if inputs.get("x_bias") is None else inputs["x"] + inputs["x_bias"]
    p = inputs.get("dropout_p", 0.0)
    z = inputs["residual"] + (F.dropout(x, p) if p else x)
    return F.layer_norm(z, z.shape[-1:], inputs["weight"], inputs["bias"], inputs["eps"])


def _rms_norm(inputs: Inputs) -> Tensor:
    x = inputs["x"]
    return F.rms_norm(x, x.shape[-1:], inputs["weight"], inputs["eps"])


def _linear(inputs: Inputs) -> Tensor:
    return F.linear(inputs["x"], inputs["weight"], inputs["bias"])


def _ffn(inputs: Inputs) -> Tensor:
    hidden = F.linear(inputs["x"], inputs["w1"], inputs["b1"])
    activation = inputs["activation"]
    if activation in _GATED:
        gate, up = hidden.chunk(2, -1)
        hidden = _GATED[activation](gate) * up
    else:
        hidden = _ACTIVATIONS[activation](hidden)
    return F.linear(hidden, inputs["w2"], inputs["b2"])


def _ffn_unsupported(task: Task) -> str | None:
    inputs = task.inputs
    if (
        inputs.get("dropout_p")
        or inputs.get("output_dropout_p")
        or inputs.get("residual") is not None
    ):
        return "is set up without dropout and residual here"
    return None


_ROW_OPS: dict[str, Forward] = {
    "layer_norm": _layer_norm,
    "add_layer_norm": _add_layer_norm,
    "rms_norm": _rms_norm,
    "linear": _linear,
    "ffn": _ffn,
}


def _eager(op: str) -> Implementation:
    return Implementation(
        "eager",
        (op,),
        lambda task: _ROW_OPS[op],
        unsupported=_ffn_unsupported if op == "ffn" else lambda task: None,
        draws_dropout=True,
    )


def _compiled(name: str, op: str, mode: str | None, workloads: str = "") -> Implementation:
    return Implementation(
        name,
        (op,),
        lambda task: torch.compile(_ROW_OPS[op], dynamic=False, mode=mode),
        unsupported=_ffn_unsupported if op == "ffn" else lambda task: None,
        compiles=True,
        workloads=workloads,
        draws_dropout=True,
    )


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
    *[_eager(op) for op in _ROW_OPS],
    # On a CPU, where compiling takes 10 s, one shape of each op.
    *[_compiled("compile", op, None, r"32768x|8192x|16384x|2048x512(_relu)?$") for op in _ROW_OPS],
    # Minutes of search for each shape.
    _compiled("compile-max-autotune", "ffn", "max-autotune-no-cudagraphs", ON_REQUEST),
)
