"""fastattn: attention, feed-forward and norm kernels behind torch ops, and a drop-in Transformer
made of them.
"""

import importlib
from types import ModuleType

from fastattn.functional import (
    add_layer_norm,
    attention,
    attention_varlen,
    attention_weights,
    explain,
    ffn,
    layer_norm,
    new_dropout_seed,
    rms_norm,
)

_MODULES = ("nn", "seq2seq", "testing")


def __getattr__(name: str) -> ModuleType:
    """`fastattn.nn` and its like load when first used."""
    if name in _MODULES:
        return importlib.import_module(f"fastattn.{name}")
    raise AttributeError(f"module 'fastattn' has no attribute {name!r}")


__version__ = "0.1.0"
__all__ = [
    "add_layer_norm",
    "attention",
    "attention_varlen",
    "attention_weights",
    "explain",
    "ffn",
    "layer_norm",
    "new_dropout_seed",
    "rms_norm",
]
