"""The public ops, and the smallest call of each."""

from typing import Any

import torch
from torch import Tensor

import fastattn
from fastattn.ops._select import op_of
from fastattn.testing import all_specs

OPS = tuple(all_specs())


def op_name(function: str, direction: str = "fwd") -> str:
    """The name of a public function's op; several functions may have one."""
    return f"{op_of(function).public_name}_{direction}"


def small_call(op: str) -> dict[str, Any]:
    """The arguments of a call without optional ones."""
    x = torch.ones(2, 3)
    if op in ("attention", "attention_with_weights"):
        q = torch.ones(1, 2, 3, 4)
        return {"q": q, "k": q, "v": q}
    if op == "attention_varlen":
        q, offsets = torch.ones(3, 2, 4), torch.tensor([0, 1, 3], dtype=torch.int32)
        inputs = {"q": q, "k": q, "v": q, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        return inputs | {"max_seqlen_q": 2, "max_seqlen_k": 2}
    if op == "ffn":
        return {"x": x, "w1": torch.ones(5, 3), "b1": None, "w2": torch.ones(3, 5), "b2": None}
    if op == "linear":
        return {"x": x, "weight": torch.ones(5, 3)}
    return {"x": x, "residual": x} if op == "add_layer_norm" else {"x": x}


def first_result(op: str, **arguments: Any) -> Tensor:
    """The result of a public op, or the first one."""
    results = getattr(fastattn, op)(**arguments)
    return results[0] if isinstance(results, tuple) else results
