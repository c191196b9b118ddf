"""Options in which two calls of attention may differ, to test caches of launches; and the op's
arguments for packed sequences.
"""

from typing import Any

from torch import Tensor

from fastattn._scores import score_arguments
from fastattn.ops.attention.calls import ForwardCall
from fastattn.ops.attention.prepared import classify
from fastattn.ops.attention.spec_inputs import (
    RELATIVE,
    dropout_of,
    restrictions,
    scale_of,
    scores_of,
)

# For attention with 20 queries, 40 keys and head dim 16.
CHANGES: dict[str, dict[str, Any]] = {
    "fewer queries": {"M": 19},
    "fewer keys": {"N": 36},
    "a wider head": {"D": 24},
    "wider values": {"E": 24},
    "grouped queries": {"K": 1},
    "heads inside rows": {"layout": "bshd"},
    "top left": {"causal": "top_left"},
    "bottom right": {"causal": "bottom_right"},
    "window on the left": {"window": (3, -1)},
    "keys ahead": {"window": (-1, 3)},
    "scale": {"scale": -0.5},
    "scale of 0": {"scale": 0.0, "causal": "top_left"},
    "half are dropped": {"dropout_p": 0.5},
    "the same, in a part": {"dropout_p": 0.5, "origin": (1, 2, 16, 32)},
    "a fifth is dropped": {"dropout_p": 0.2},
    "everything is dropped": {"dropout_p": 1.0},
    "key lengths": {"key_lengths": [33, 20]},
    "diagonals of lengths": {"key_lengths": [33, 20], "causal": "bottom_right_lengths"},
    "diagonals of query lengths": {"query_lengths": [20, 7], "causal": "bottom_right_lengths"},
    "key lengths of queries": {"key_lengths": "per query"},
    "query lengths": {"query_lengths": [20, 7]},
    "mask": {"mask": "bool BHMN"},
    "mask of one row": {"mask": "bool N"},
    "bias": {"mask": "float BHMN"},
    "sinks": {"sinks": 0.0},
    "soft cap": {"softcap": 2.0},
    "a higher soft cap": {"softcap": 4.0},
    "a bias by distance": {"alibi": "H"},
    "one for each batch entry": {"alibi": "BH"},
}
BASE: dict[str, Any] = {"M": 20, "N": 40, "D": 16, "E": 16}

# For attention_varlen.
PACKED_CHANGES: dict[str, dict[str, Any]] = {
    "more sequences": {"queries": [50, 30, 20], "keys": [60, 20, 20]},
    "a longer sequence": {"queries": [99, 1]},
    "top left": {"causal": "top_left"},
    "bottom right": {"causal": "bottom_right"},
    "window on the left": {"window": (3, -1)},
    "keys ahead": {"window": (-1, 3)},
    "scale": {"scale": -0.5},
    "half are dropped": {"dropout_p": 0.5},
    "the same, in a part": {"dropout_p": 0.5, "origin": (1, 2, 16, 32)},
    "a fifth is dropped": {"dropout_p": 0.2},
    "a longer sequence of keys": {"keys": [1, 99]},
    "a bias by distance": {"alibi": "H"},
    "one for each sequence": {"alibi": "BH"},
    "the same, dropped": {"keys": [1, 99], "dropout_p": 0.2},
}
PACKED_BASE: dict[str, Any] = {"queries": [50, 50], "keys": [40, 60], "D": 16}


def packing(cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> dict[str, Any]:
    """The fields of packed sequences in a call of the op."""
    offsets = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    return offsets | {"max_seqlen_q": max_q, "max_seqlen_k": max_k}


def packed_call(inputs: dict[str, Any]) -> ForwardCall:
    """The op's arguments of a sample of attention_varlen."""
    q, k, v = (inputs[name].transpose(0, 1) for name in "qkv")
    offsets = inputs["cu_seqlens_q"], inputs["cu_seqlens_k"]
    M, N = inputs["max_seqlen_q"], inputs["max_seqlen_k"]
    slopes, cap, sinks = (inputs.get(name) for name in ("alibi_slopes", "softcap", "sinks"))
    table, kind, distance = (inputs.get(name) for name in RELATIVE)
    causal, left, right = restrictions(inputs)[3:]
    scores = score_arguments(
        slopes, cap, sinks, table, kind, 128 if distance is None else distance,
        causal=causal, B=offsets[0].numel() - 1, M=M, N=N, q=q,
    )  # fmt: skip
    options = (*scores, causal, left, right, scale_of(inputs), *dropout_of(inputs))
    return ForwardCall(q, k, v, None, None, None, None, *offsets, M, N, *options)


def padded_call(inputs: dict[str, Any]) -> ForwardCall:
    """The op's arguments of a sample of attention."""
    q, k, v = (inputs[name] for name in "qkv")
    mask, *lengths, causal, left, right = restrictions(inputs)
    mask_tiles = classify(mask) if inputs.get("prepared") else None
    options = (*scores_of(inputs), causal, left, right, scale_of(inputs), *dropout_of(inputs))
    return ForwardCall(q, k, v, mask, mask_tiles, *lengths, None, None, 0, 0, *options)
