"""Keyword arguments of the public functions: those of functions that have overloads, for type
checkers, and hints at them for the names that other packages use.
"""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypedDict

from torch import Tensor

from fastattn._arguments import Causal, Lengths
from fastattn._scores import RelativeBuckets
from fastattn.ops.attention.op import PreparedMask


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments that `attention` and `attention_varlen` share, for type checkers."""

    causal: Causal
    window: tuple[int, int] | None
    scale: float | None
    alibi_slopes: Tensor | None
    softcap: float | None
    sinks: Tensor | None
    relative_bias: Tensor | None
    relative_buckets: RelativeBuckets | None
    relative_max_distance: int
    dropout_p: float
    dropout_seed: Tensor | None
    dropout_stream: int
    backend: str | None


class PaddedOptions(AttentionOptions, total=False):
    mask: Tensor | PreparedMask | None
    key_lengths: Lengths | None
    query_lengths: Lengths | None
    block_table: Tensor | None


class AddNormOptions(TypedDict, total=False):
    x_bias: Tensor | None
    dropout_p: float
    dropout_seed: Tensor | None
    dropout_stream: int
    backend: str | None


# Arguments of other packages' attention functions: fastattn's name, or what to do instead.
_SAME_AS = {
    "attn_mask": "mask",
    "attn_bias": "mask",
    "is_causal": "causal",
    "dropout": "dropout_p",
    "p": "dropout_p",
    "softmax_scale": "scale",
    "window_size": "window",
    "logits_soft_cap": "softcap",
    "s_aux": "sinks",
}
_INSTEAD = {
    "enable_gqa": "heads of k and v are shared without an argument",
    "key_padding_mask": "use key_lengths=, or mask= (True = may attend) of shape [B, 1, 1, N]",
    "need_weights": "use fastattn.attention_with_weights",
}


def refuse_unknown(function: Callable[..., Any], unknown: Mapping[str, Any]) -> NoReturn:
    """Raises Python's TypeError for an unknown keyword argument, with a hint at the known one."""
    given = next(iter(unknown))
    message = f"{function.__name__}() got an unexpected keyword argument {given!r}"
    known = function.__kwdefaults__ or {}
    if _SAME_AS.get(given) in known:
        message += f": use {_SAME_AS[given]}="
    elif given in _INSTEAD and "mask" in known:
        message += f": {_INSTEAD[given]}"
    raise TypeError(message)
