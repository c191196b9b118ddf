"""The loss of a model that `parallelize` has divided, without gathering its logits, and the norm of
its gradients.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from fastattn.distributed import collectives
from fastattn.distributed.collectives import Group
from fastattn.distributed.shards import TokenSharding
from fastattn.nn.sharding import sharding_of


def loss_sum(
    model: nn.Module, logits: Tensor, targets: Tensor, *, smoothing: float = 0.0, ignore_index: int
) -> Tensor:
    """The sum of the smoothed cross-entropy over this process's tokens, in nats.

    Divide it by the number of targets of all processes of "data" that are not `ignore_index`, and
    call backward: gradients are sums over processes. `sum_over_processes` adds up the values. The
    loss of one token is that of `torch.nn.functional.cross_entropy(label_smoothing=...)`, in fp32.

    Args:
        model: a model after `parallelize`.
        logits: what it returned: of this process's tokens, and tokens of the vocabulary.
        targets: int64, those of the batch that the model was given.
    """
    sharding = _sharding(model)
    if logits.dim() > 2:  # those of forward_packed have a row for each target
        targets = sharding.targets(targets, ignore_index)
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets must be those of logits {list(logits.shape)}, got {list(targets.shape)}"
        )
    group = sharding.place.tensor if sharding.vocabulary else Group()
    kept = targets != ignore_index  # [...]
    loss = _cross_entropy(logits.float(), targets.where(kept, 0), smoothing, group)
    return loss.where(kept, 0.0).sum()


def _cross_entropy(logits: Tensor, targets: Tensor, smoothing: float, group: Group) -> Tensor:
    """The loss of each token; logits [..., V / T], this process's of the vocabulary."""
    columns = logits.shape[-1]
    highest = logits.detach().amax(dim=-1)
    if group.size > 1:
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group.group)
    logits = logits - highest[..., None]
    index, inside = group.index_in_part(targets, columns)
    chosen = logits.gather(-1, index[..., None])[..., 0]
    terms = [logits.exp().sum(dim=-1), chosen.where(inside, 0.0)]
    if smoothing:
        terms.append(logits.sum(dim=-1))
    total, chosen, *every = collectives.sum_whole(torch.stack(terms), group).unbind()
    lse = total.log()
    if not smoothing:
        return lse - chosen
    return torch.lerp(lse - chosen, lse - every[0] / (columns * group.size), smoothing)


def sum_over_processes(model: nn.Module, x: Tensor) -> Tensor:
    """The sum of x, such as a loss, over the processes of "data" and "context". No gradient."""
    place = _sharding(model).place
    return place.context.sum(place.data.sum(x.detach()))


def sum_over_data(model: nn.Module, x: Tensor) -> Tensor:
    """The sum of x, such as the number of a batch's targets, over the processes of "data"."""
    return _sharding(model).place.data.sum(x.detach())


def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` of a parallel model's parameters, in one collective for each
    dimension of the mesh. Returns the norm of all gradients before clipping, on every process.
    """
    gradients: list[Any] = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    for gradient in gradients:
        if not isinstance(gradient, DTensor):
            raise TypeError(
                "parameters must be those of a model after parallelize, with gradients that are "
                f"DTensors, got {type(gradient).__name__}"
            )
    mesh = gradients[0].device_mesh
    local = [gradient.to_local() for gradient in gradients]
    squares = [
        norm.float().square() / _copies(gradient)
        for norm, gradient in zip(torch._foreach_norm(local), gradients, strict=True)
    ]
    total = torch.stack(squares).sum()
    for dim in range(mesh.ndim):
        dist.all_reduce(total, group=mesh.get_group(dim))
    norm = total.sqrt()
    torch._foreach_mul_(local, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _copies(tensor: DTensor) -> int:
    """The number of processes that hold each value."""
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if isinstance(placement, Replicate))


def _sharding(model: nn.Module) -> TokenSharding:
    sharding = sharding_of(model)
    if not isinstance(sharding, TokenSharding):
        raise ValueError(f"model must be a model of tokens after parallelize, got {type(model)}")
    return sharding
