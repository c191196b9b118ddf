"""TransformerEngine's norms and attention: its modules, called with the parameters of the inputs.

Its attention needs [B, S, H, D] contiguous in memory: q, k and v are copied first, and the copies
are timed, too.
"""

from functools import partial
from typing import Any

from torch import Tensor
from torch.func import functional_call

from benchmarks.implementations import (
    Forward,
    Implementation,
    Task,
    needs_package,
    package_version,
)
from fastattn.testing.spec import Inputs


def _norm(task: Task) -> Forward:
    import transformer_engine.pytorch as te

    kind: Any = te.LayerNorm if task.op == "layer_norm" else te.RMSNorm
    names = ("weight", "bias") if task.op == "layer_norm" else ("weight",)
    module = kind(task.inputs["x"].shape[-1], eps=task.inputs["eps"]).to(task.device, task.dtype)

    def forward(inputs: Inputs) -> Tensor:
        return functional_call(module, {n: inputs[n] for n in names}, (inputs["x"],))

    return forward


def _norm_unsupported(task: Task) -> str | None:
    return None if task.inputs.get("weight") is not None else "needs weight"


def _attention(task: Task) -> Forward:
    import transformer_engine.pytorch as te

    q, k = task.inputs["q"], task.inputs["k"]
    module = te.DotProductAttention(
        q.shape[1],
        q.shape[3],
        num_gqa_groups=k.shape[1],
        attention_dropout=0.0,
        qkv_format="bshd",
        attn_mask_type="causal" if task.inputs["causal"] else "no_mask",
    )

    def forward(inputs: Inputs) -> Tensor:
        # With views it reads the wrong memory, because it relies on the shape.
        out = module(*(inputs[n].transpose(1, 2).contiguous() for n in ("q", "k", "v")))
        B, M = out.shape[:2]
        return out.view(B, M, q.shape[1], q.shape[3]).transpose(1, 2)

    return forward


def _attention_unsupported(task: Task) -> str | None:
    inputs = task.inputs
    if inputs.get("mask") is not None or "key_lengths" in inputs or inputs.get("dropout_p"):
        return "is set up without masks, lengths and dropout here"
    if inputs.get("window") is not None or inputs["causal"] == "bottom_right":
        return "is set up for top-left causality without windows here"
    return None if inputs.get("scale") is None else "is set up for its own scale here"


_peer = partial(
    Implementation,
    "transformer-engine",
    device_types=("cuda",),
    unavailable=needs_package("transformer-engine", "transformer_engine.pytorch"),
    version=lambda: package_version("transformer-engine"),
    backend="transformer-engine",
)
PEERS = (
    _peer(("layer_norm", "rms_norm"), _norm, unsupported=_norm_unsupported),
    _peer(("attention",), _attention, unsupported=_attention_unsupported),
)
