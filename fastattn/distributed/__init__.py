"""Attention over several processes: sequences in a ring, batches and heads by DTensor rules."""

from fastattn.distributed.ring import ring_attention, shard_sequence, unshard_sequence
from fastattn.distributed.sharding import register_sharding_rules

__all__ = ["register_sharding_rules", "ring_attention", "shard_sequence", "unshard_sequence"]
