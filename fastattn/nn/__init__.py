"""Modules: drop-ins for `torch.nn`'s attention, Transformer and norm classes, and related layers.

The drop-ins subclass torch's modules and keep their constructors, parameter names, `state_dict`,
masks and results. `convert` changes a model built of torch's classes to these, in place.
`fastattn.nn.naive`, the readable reference, is imported explicitly.
"""

from fastattn.nn.attention import LengthMaskedMultiheadAttention, MultiheadAttention
from fastattn.nn.conversion import convert
from fastattn.nn.decoding import DecoderCache
from fastattn.nn.feed_forward import GatedActivation, PositionWiseFFN
from fastattn.nn.norm import AddNorm, LayerNorm, RMSNorm
from fastattn.nn.positional import LearnedPositionalEncoding, SinusoidalPositionalEncoding
from fastattn.nn.positional_attention import PositionalMultiheadAttention
from fastattn.nn.power_norm import PowerNorm, TokenBatchNorm
from fastattn.nn.relative import AlibiPositions, RotaryPositions, T5Positions
from fastattn.nn.scoring import AdditiveAttention, ScoredMultiheadAttention
from fastattn.nn.transformer import (
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
    set_autocast_residual,
)

__all__ = [
    "AddNorm",
    "AdditiveAttention",
    "AlibiPositions",
    "DecoderCache",
    "GatedActivation",
    "LayerNorm",
    "LearnedPositionalEncoding",
    "LengthMaskedMultiheadAttention",
    "MultiheadAttention",
    "PositionWiseFFN",
    "PositionalMultiheadAttention",
    "PowerNorm",
    "RMSNorm",
    "RotaryPositions",
    "ScoredMultiheadAttention",
    "SinusoidalPositionalEncoding",
    "T5Positions",
    "TokenBatchNorm",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "convert",
    "set_autocast_residual",
]
