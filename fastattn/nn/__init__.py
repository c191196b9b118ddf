"""Modules: drop-ins for `torch.nn`'s Transformer family, and what a Transformer needs beside them.

The drop-ins subclass torch's modules: same constructors, parameter names, `state_dict`, masks and
results; `adopt` turns a model built of torch's classes into ours in place. `fastattn.nn.naive` is
the readable reference, imported on its own.
"""

from fastattn.nn.adoption import adopt
from fastattn.nn.attention import LengthMaskedMultiheadAttention, MultiheadAttention
from fastattn.nn.decoding import DecoderCache
from fastattn.nn.feed_forward import PositionWiseFFN
from fastattn.nn.norm import AddNorm, LayerNorm, RMSNorm
from fastattn.nn.positional import LearnedPositionalEncoding, SinusoidalPositionalEncoding
from fastattn.nn.power_norm import PowerNorm, TokenBatchNorm
from fastattn.nn.scoring import AdditiveAttention, ScoredMultiheadAttention
from fastattn.nn.transformer import (
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

__all__ = [
    "AddNorm",
    "AdditiveAttention",
    "DecoderCache",
    "LayerNorm",
    "LearnedPositionalEncoding",
    "LengthMaskedMultiheadAttention",
    "MultiheadAttention",
    "PositionWiseFFN",
    "PowerNorm",
    "RMSNorm",
    "ScoredMultiheadAttention",
    "SinusoidalPositionalEncoding",
    "TokenBatchNorm",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "adopt",
]
