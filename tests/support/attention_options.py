"""Options in which two calls of attention may differ, to test caches of launches; and what the op
for packed sequences takes.
"""

from typing import Any

from torch import Tensor

from fastattn._scores import score_arguments
from fastattn.ops.attention.spec_inputs import RELATIVE, restrictions

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


def packed_scores(inputs: dict[str, Any]) -> tuple[Tensor | None, Tensor | None, float]:
    """distance_bias, sinks and softcap of a sample of attention_varlen, as its op takes them."""
    slopes, cap, sinks = (inputs.get(name) for name in ("alibi_slopes", "softcap", "sinks"))
    table, kind, distance = (inputs.get(name) for name in RELATIVE)
    return score_arguments(
        slopes, cap, sinks, table, kind, 128 if distance is None else distance,
        causal=restrictions(inputs)[3], B=inputs["cu_seqlens_q"].numel() - 1,
        M=inputs["max_seqlen_q"], N=inputs["max_seqlen_k"], q=inputs["q"].transpose(0, 1),
    )  # fmt: skip
