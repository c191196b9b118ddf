"""The drop-in Transformer classes and PyTorch's: pairs with the same parameters, their inputs, and
the ops of a call.
"""

from typing import Any

import torch
from call_recorder import CallRecorder
from torch import Tensor, nn

import fastattn.nn as fnn

E, H, FFN = 16, 4, 24
B, S, T = 3, 7, 5
CLASSES = (
    "TransformerEncoderLayer", "TransformerDecoderLayer", "TransformerEncoder",
    "TransformerDecoder", "Transformer",
)  # fmt: skip


def build(
    package: Any, name: str, *, sizes: tuple[int, int, int] = (E, H, FFN), layers: int = 2,
    **kwargs: Any,
) -> nn.Module:  # fmt: skip
    """A module of torch.nn or fastattn.nn: MultiheadAttention, a norm or one of CLASSES."""
    width, heads, ffn = sizes
    if name.endswith("Norm"):
        return getattr(package, name)(width, **kwargs)
    kwargs = {"dropout": 0.0, **kwargs}
    if name == "MultiheadAttention":
        return package.MultiheadAttention(width, heads, **kwargs)
    if name.endswith("Layer"):
        return getattr(package, name)(*sizes, **kwargs)
    if name == "Transformer":
        return package.Transformer(width, heads, layers, layers, ffn, **kwargs)
    layer = getattr(package, name + "Layer")(*sizes, **kwargs)
    norm = package.LayerNorm(width) if kwargs.get("norm_first") else None
    return getattr(package, name)(layer, layers, norm)


def twins(name: str, **kwargs: Any) -> tuple[nn.Module, nn.Module]:
    """PyTorch's and fastattn's module with the same parameters; biases and norms are random."""
    reference, fast = build(nn, name, **kwargs), build(fnn, name, **kwargs)
    for parameter in reference.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=0.5, std=0.3)
    fast.load_state_dict(reference.state_dict())
    return reference, fast


def inputs(name: str, *, batch_first: bool = True) -> tuple[Tensor, ...]:
    """The tensors that the class requires: query, key and value, or src, tgt or both."""

    def sequence(length: int) -> Tensor:
        return torch.randn(B, length, E) if batch_first else torch.randn(length, B, E)

    if name == "MultiheadAttention":
        key = sequence(S)
        return sequence(T), key, key
    if name == "Transformer":
        return sequence(S), sequence(T)
    return (sequence(T), sequence(S)) if "Decoder" in name else (sequence(S),)


def causal_mask(size: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(size)


class Calls(CallRecorder):
    """Records the calls of the forward ops, by the names of the public functions."""

    @property
    def of(self) -> dict[str, int]:
        """How often each op was called."""
        ops = [call["op"] for call in self.arguments]
        return {op: ops.count(op) for op in ("attention", "layer_norm", "add_layer_norm", "ffn")}

    @property
    def arguments(self) -> list[dict[str, Any]]:
        """Arguments of each call, and its op."""
        return [
            {"op": name.removesuffix("_fwd")}
            | dict(zip((a.name for a in op._schema.arguments), args, strict=True))
            for name, (op, args, _) in zip(self.names, self.calls, strict=True)
        ]
