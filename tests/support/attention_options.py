"""Options in which two calls of attention may differ, to test caches of launches; and the op's
arguments for packed sequences.
"""

from typing import Any

from torch import Tensor

from fastattn.ops.attention.calls import ForwardCall
from fastattn.ops.attention.prepared import classify
from fastattn.ops.attention.spec_inputs import call_of

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


def padded_call(inputs: dict[str, Any]) -> ForwardCall:
    """The op's arguments of a sample of attention."""
    call = call_of(inputs)
    if call.mask is None or not inputs.get("prepared"):
        return call
    return call._replace(mask_tiles=classify(call.mask))
