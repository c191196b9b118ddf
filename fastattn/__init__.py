"""fastattn: attention, feed-forward and norm kernels behind torch ops, and a drop-in Transformer
made of them.
"""

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
