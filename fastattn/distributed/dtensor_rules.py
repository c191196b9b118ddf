"""DTensor sharding rules of the ops: attention over batch and heads, norms and FFN over rows.

After `register_sharding_rules()`, ops on DTensors run on the local shards, without communication
where batch, heads or rows are sharded; other shardings are gathered first, as usual in DTensor.
With dropout everything is replicated: an element's random bits depend on its index in the whole
tensor.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

# One sharding: argument or result -> its placement; tensors not named are replicated.
_Placements = Mapping[str, Placement]
_registered = False


def register_sharding_rules() -> None:
    """Registers the rules with DTensor; may be called again."""
    global _registered
    if _registered:
        return
    from torch.distributed.tensor.experimental import register_sharding

    rules: dict[str, Callable[[Mapping[str, Any]], Sequence[_Placements]]] = {
        "attention_fwd": _attention,
        "attention_bwd": _attention,
        "layer_norm_fwd": _by_rows,
        "layer_norm_bwd": _by_rows,
        "add_layer_norm_fwd": _by_rows,
        "add_layer_norm_bwd": _by_rows,
        "rms_norm_fwd": _by_rows,
        "rms_norm_bwd": _by_rows,
        "ffn_fwd": _by_rows,
        "ffn_bwd": _by_rows,
        "linear_fwd": _by_rows,
        "linear_bwd": _by_rows,
    }
    for name, rule in rules.items():
        packet = getattr(torch.ops.fastattn, name)
        for op in (packet.default, packet.backend):
            register_sharding(op)(_strategy(op, rule))
            _compare_all_arguments(op)
    _registered = True


def _compare_all_arguments(op: Any) -> None:
    """DTensor caches the placements and shapes of an op's results by its tensors and by the other
    arguments from `static_argnum` on. 0 includes `needs`, which decides the shapes of gradients.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.op_to_schema_info[op].static_argnum = 0


def _strategy(
    op: Any, rule: Callable[[Mapping[str, Any]], Sequence[_Placements]]
) -> Callable[..., Sequence[tuple[list[Any], list[Any]]]]:
    """The strategy for `register_sharding`: placements of the results and of the arguments."""
    names = [argument.name for argument in op._schema.arguments]
    results = [result.name for result in op._schema.returns]

    def strategy(*args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
        given = dict(zip(names, args, strict=False)) | kwargs
        ways: list[_Placements] = [{}]
        if not any(given.get(p) for p in ("dropout_p", "output_dropout_p")):
            ways += rule(given)
        unwanted = _unwanted(given, results)
        return [
            (
                [Replicate() if y in unwanted else way.get(y, Replicate()) for y in results],
                [
                    way.get(name, Replicate()) if hasattr(given[name], "placements") else None
                    for name in names
                    if name in given
                ],
            )
            for way in ways
        ]

    return strategy


def _unwanted(given: Mapping[str, Any], results: Sequence[str]) -> set[str]:
    """Gradients that are not required: results of shape [0]."""
    needs = given.get("needs")
    return (
        set() if needs is None else {y for y, need in zip(results, needs, strict=True) if not need}
    )


def _attention(given: Mapping[str, Any]) -> Sequence[_Placements]:
    """Over the batch, and over heads if each process gets whole groups of query heads; nothing but
    replication of packed sequences and of pages, whose tensors have other dimensions.
    """
    if given["cu_seqlens_q"] is not None or given["block_table"] is not None:
        return []
    k, mask = given["k"], given["mask"]
    ways = []
    for dim in (0, 1):
        if dim == 1 and k.shape[1] % _most_shards_of_heads(given):
            continue
        shard = Shard(dim)
        way: dict[str, Placement] = dict.fromkeys(
            ("q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv"), shard
        )
        if dim == 0:
            way |= {"key_lengths": shard, "query_lengths": shard}
        way["dmask"] = Partial()
        if mask is not None and mask.shape[dim] > 1:
            way |= {"mask": shard, "mask_tiles": shard, "dmask": shard}
        bias = given["distance_bias"]
        way["ddistance_bias"] = way["dsinks"] = Partial()
        if bias is not None and bias.shape[dim] > 1:
            way |= {"distance_bias": shard, "ddistance_bias": shard}
        if dim == 1:
            way |= {"sinks": Shard(0), "dsinks": Shard(0)}
        ways.append(way)
    return ways


def _most_shards_of_heads(given: Mapping[str, Any]) -> int:
    """The largest number of shards of the heads: the product of all mesh dimensions on which an
    argument is neither replicated nor sharded over the batch.
    """
    sharded = {
        i
        for x in given.values()
        for i, placement in enumerate(getattr(x, "placements", None) or ())
        if placement not in (Replicate(), Shard(0))
    }
    return math.prod(given["q"].mesh.shape[i] for i in sharded)


def _by_rows(given: Mapping[str, Any]) -> Sequence[_Placements]:
    """Over any dimension but the last; gradients of parameters are then partial sums."""
    rows = (
        "x", "residual", "y", "z", "mean", "rstd", "hidden", "dy", "dz", "dx", "dresidual",
    )  # fmt: skip
    parameters = ("dx_bias", "dweight", "dbias", "dw1", "db1", "dw2", "db2", "dw", "db")
    x = next(x for name in ("x", "z", "dy") if (x := given.get(name)) is not None)
    return [
        dict.fromkeys(rows, Shard(dim)) | dict.fromkeys(parameters, Partial())
        for dim in range(len(x.shape) - 1)
    ]
