"""fastattn: attention, feed-forward and norm kernels as PyTorch ops, and a drop-in Transformer that
uses them.

A process that loads a program saved by `torch.export.save` or compiled by AOTInductor must import
fastattn first, which registers the ops. Without it `aoti_load_package` raises "Could not find
schema for fastattn::attention_fwd", and `torch.export.load` fails to deserialize the file.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fastattn import _openmp  # noqa: F401  (before torch is loaded)
from fastattn.functional import (
    PreparedMask,
    add_layer_norm,
    attention,
    attention_varlen,
    attention_weights,
    attention_with_weights,
    decompositions,
    explain,
    ffn,
    layer_norm,
    linear,
    new_dropout_seed,
    prepare_mask,
    rms_norm,
)
from fastattn.integrations import flop_counter

if TYPE_CHECKING:
    from fastattn.integrations.patch import PatchReport, patch, unpatch

_MODULES = ("distributed", "functional", "integrations", "nn", "seq2seq", "testing")
_PATCHING = ("PatchReport", "patch", "unpatch")


def __getattr__(name: str) -> Any:
    """Imports submodules such as `fastattn.nn`, and `patch`, when they are first used."""
    if name in _MODULES:
        return importlib.import_module(f"fastattn.{name}")
    if name in _PATCHING:
        return getattr(importlib.import_module("fastattn.integrations.patch"), name)
    raise AttributeError(f"module 'fastattn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__version__"])


flop_counter.install()

__version__ = "0.1.0"
__all__ = [
    "PatchReport",
    "PreparedMask",
    "add_layer_norm",
    "attention",
    "attention_varlen",
    "attention_weights",
    "attention_with_weights",
    "decompositions",
    "explain",
    "ffn",
    "layer_norm",
    "linear",
    "new_dropout_seed",
    "patch",
    "prepare_mask",
    "rms_norm",
    "unpatch",
]
