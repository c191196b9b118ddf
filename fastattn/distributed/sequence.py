"""How a sequence is divided between the processes of a group.

With P processes, process r holds the r-th of P chunks. In the balanced layout it holds chunks r and
2 P - 1 - r of 2 P, so that with a causal restriction all processes have the same number of pairs.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def shard_sequence(
    x: Tensor, dim: int, *, balanced: bool = False, group: dist.ProcessGroup | None = None
) -> Tensor:
    """This process's shard of `x` along `dim`: 1 / P of it, or two chunks of 1 / (2 P) if balanced.

    Raises ValueError if the size is not divisible.
    """
    P, rank = place(group)
    count = chunk_count(P, balanced)
    if x.shape[dim] % count:
        raise ValueError(
            f"x must have a size along dim {dim} that {count} divides, got {x.shape[dim]}"
        )
    chunks = x.chunk(count, dim)
    if not balanced:
        return chunks[rank].contiguous()
    return torch.cat([chunks[c] for c in chunks_of(P, rank, balanced)], dim)


def unshard_sequence(
    shard: Tensor, dim: int, *, balanced: bool = False, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The whole tensor, on every process, from each process's `shard`. Records no gradient."""
    P, _ = place(group)
    shards = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(P)]
    dist.all_gather(shards, shard.detach().contiguous(), group)
    return join_shards(shards, dim, balanced)


def join_shards(shards: list[Tensor], dim: int, balanced: bool) -> Tensor:
    """The whole tensor from the shards of all processes, in the order of ranks."""
    if not balanced:
        return torch.cat(shards, dim)
    halves = [shard.chunk(2, dim) for shard in shards]
    ascending = [first for first, _ in halves]
    return torch.cat([*ascending, *(second for _, second in reversed(halves))], dim)


def split_into_shards(x: Tensor, dim: int, P: int, balanced: bool) -> list[Tensor]:
    """The shards of all processes, in the order of ranks: the inverse of `join_shards`."""
    if not balanced:
        return [*x.chunk(P, dim)]
    chunks = x.chunk(2 * P, dim)
    return [torch.cat([chunks[c] for c in chunks_of(P, rank, balanced)], dim) for rank in range(P)]


def chunk_count(P: int, balanced: bool) -> int:
    return 2 * P if balanced else P


def owner_of(P: int, chunk: int) -> int:
    """The process that holds a chunk."""
    return chunk if chunk < P else 2 * P - 1 - chunk


def chunks_of(P: int, rank: int, balanced: bool) -> tuple[int, ...]:
    """The numbers of a process's chunks, in the order in which its shard holds them."""
    return (rank, 2 * P - 1 - rank) if balanced else (rank,)


def place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """The number of processes, and this process's rank."""
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"group must contain the calling process, global rank {dist.get_rank()}")
    return dist.get_world_size(group), rank
