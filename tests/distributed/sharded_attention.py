"""Samples of attention computed by `context_parallel_attention`, compared with the references of
whole sequences.
"""

import dataclasses
import functools
import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastattn.distributed import context_parallel_attention, shard_sequence, unshard_sequence
from fastattn.ops.attention.calls import FEW_KEYS
from fastattn.ops.attention.spec import SPECS
from fastattn.ops.attention.spec_inputs import make_inputs
from fastattn.testing.oracle import Oracle, output_gradients
from fastattn.testing.spec import Inputs, Sample

SPEC = SPECS[0]
_WHOLE = ("alibi_slopes", "sinks", "relative_bias")
_MASKS = (
    "bool BHMN", "bool MN", "bool BN", "bool HMN", "bool HN", "rows BMN", "none MN", "float BHMN",
    "float HMN", "float BM", "float N", "float H", "min BMN", "inf MN", "min_rows HMN", "fp32 BMN",
)  # fmt: skip


def sample(name: str, **options: Any) -> Sample:
    """options: of `make_inputs`. Dead positions of its inputs hold NaN and inf."""
    leaves = ("q", "k", "v", "mask", *_WHOLE)
    return Sample(name, "", functools.partial(make_inputs, **options), leaves)


def random_sample(seed: int) -> tuple[Sample, dict[str, Any]]:
    """A sample for the processes of this group, and its layout and method."""
    r, P = random.Random(seed), dist.get_world_size()
    layout = {"balanced": r.random() < 0.5, "method": r.choice(["ring", "ring", "all_to_all"])}
    layout["key_balanced"] = r.choice([layout["balanced"], r.random() < 0.5])
    dropout_p = r.choice([0.0, 0.0, 0.3])
    sizes = (16, 32) if dropout_p and layout["method"] == "ring" else (1, 2, 3, 5, 8)
    M, N = (2 * P * r.choice(sizes) for _ in range(2))
    K = r.choice([P, 2 * P] if layout["method"] == "all_to_all" else [1, 2])
    causal = r.choice([False, "top_left", "bottom_right", "bottom_right_lengths"])
    lengths: list[Any] = [None, None, [r.randint(0, N), r.randint(0, N)]]
    if causal != "bottom_right_lengths":
        lengths.append("per query")
    ends = ((M, -1), (-1, N), (M // 2, N // 2), (3, 3))
    windows = [tuple(r.randint(min(0, end), end) for end in both) for both in ends]
    options = {
        "B": 2, "H": K * r.choice([1, 2]), "K": K, "M": M, "N": r.choice([M, N]),
        "D": r.choice([8, 16]), "E": r.choice([None, 8, 24]),
        "layout": r.choice(["bhsd", "bshd", "packed"]),
        "mask": r.choice([None, None, None, *_MASKS]), "causal": causal,
        "window": r.choice([None, None, *windows]), "key_lengths": r.choice(lengths),
        "query_lengths": r.choice([None, None, [r.randint(0, M), r.randint(0, M)]]),
        "alibi": r.choice([None, None, "H", "BH"]), "softcap": r.choice([None, None, 2.0]),
        "sinks": r.choice([None, None, 0.0, 2.0]),
        "relative": r.choice([None, None, ("t5", 8, 16), ("clipped", 9, 128)]),
        "dropout_p": dropout_p, "scale": r.choice([None, None, -0.4]),
    }  # fmt: skip
    return sample(f"random {seed} {options}", **options), layout


def check(given: Sample, dtype: torch.dtype, judge: int, **layout: Any) -> None:
    """Compares results and gradients with the error budget, on the process `judge` modulo P. In
    half precision the gradients of scores carry the rounding errors of the results of chunks, so
    only those of q, k and v are compared; of chunks of few keys, whose results are computed again,
    only that of v.
    """
    inputs = given.inputs("cpu", dtype)
    if dtype.itemsize == 2:
        few = inputs["k"].shape[2] <= FEW_KEYS * dist.get_world_size()
        given = dataclasses.replace(given, gradients=("v",) if few else ("q", "k", "v"))
    q, v = inputs["q"], inputs["v"]
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(dtype, torch.float32))
    outputs = (q.new_zeros(*q.shape[:3], v.shape[3]), lse.zero_())
    douts = output_gradients(SPEC, given, outputs)
    found = sharded_results(inputs, given.gradients, douts, **layout)
    if dist.get_rank() == judge % dist.get_world_size():
        oracle = Oracle(SPEC, given, dtype)
        assert found.keys() == oracle.exact.keys()
        comparisons = {name: oracle.judge(name, value) for name, value in found.items()}
        faults = {name: (c.message, c.allowed) for name, c in comparisons.items() if not c.ok}
        assert not faults, (given.name, dtype, layout, faults)


def sharded_results(
    inputs: Inputs, leaves: tuple[str, ...], douts: tuple[Tensor, ...], *, balanced: bool = False,
    key_balanced: bool | None = None, **options: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Results and gradients of the whole sequences, from those of each process."""
    of_keys = balanced if key_balanced is None else key_balanced
    layouts = {"k": of_keys, "v": of_keys}  # of other tensors: balanced

    def dim_of_sequence(name: str, x: Any) -> int | None:
        if name in ("q", "k", "v", "out", "lse"):
            return 2
        if name == "key_lengths" and x.dim() == 2:
            return 1
        return x.dim() - 2 if name == "mask" and x.dim() > 1 and x.shape[-2] > 1 else None

    def shard(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        dim = dim_of_sequence(name, x)
        x = x.detach().clone()
        return x if dim is None else shard_sequence(x, dim, balanced=layouts.get(name, balanced))

    def whole(name: str, x: Tensor) -> Tensor:
        dim = dim_of_sequence(name, x)
        if dim is not None:
            return unshard_sequence(x, dim, balanced=layouts.get(name, balanced))
        total = x.detach().double()
        dist.all_reduce(total)
        return total.to(x.dtype)

    shards = {name: shard(name, x) for name, x in inputs.items()}
    needed = {
        name: shards[name].requires_grad_()
        for name in leaves
        if name in shards and shards[name].is_floating_point()
    }
    results = context_parallel_attention(
        **shards, balanced=balanced, key_balanced=key_balanced, **options
    )
    assert isinstance(results, tuple)
    own_douts = [shard_sequence(x, 2, balanced=balanced) for x in douts]
    found = torch.autograd.grad(results, [*needed.values()], own_douts)
    return {name: whole(name, x) for name, x in zip(SPEC.results, results, strict=True)} | {
        f"d{name}": whole(name, x) for name, x in zip(needed, found, strict=True)
    }
