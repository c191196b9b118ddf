"""Attention and models over several processes: sequences in a ring or by heads, batches and heads
by DTensor rules, whole models by `parallelize`.
"""

from fastattn.distributed.context import context_parallel_attention
from fastattn.distributed.dtensor_rules import register_sharding_rules
from fastattn.distributed.losses import clip_grad_norm_, loss_sum, sum_over_data, sum_over_processes
from fastattn.distributed.parallelize import Plan, Report, parallelize
from fastattn.distributed.parameters import (
    full_state_dict,
    full_tensors,
    join_parts,
    split_parts,
    weight_blocks,
)
from fastattn.distributed.sequence import shard_sequence, unshard_sequence

__all__ = [
    "Plan",
    "Report",
    "clip_grad_norm_",
    "context_parallel_attention",
    "full_state_dict",
    "full_tensors",
    "join_parts",
    "loss_sum",
    "parallelize",
    "register_sharding_rules",
    "shard_sequence",
    "split_parts",
    "sum_over_data",
    "sum_over_processes",
    "unshard_sequence",
    "weight_blocks",
]
