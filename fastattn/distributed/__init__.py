"""Attention over several processes: sequences in a ring or by heads, batches and heads by DTensor
rules.
"""

from fastattn.distributed.context import context_parallel_attention
from fastattn.distributed.sequence import shard_sequence, unshard_sequence
from fastattn.distributed.sharding import register_sharding_rules

__all__ = [
    "context_parallel_attention",
    "register_sharding_rules",
    "shard_sequence",
    "unshard_sequence",
]
