"""Cases of the benchmarks: groups of candidates on one workload, and how to select among them.

A case is one measurement, named op-direction-workload-dtype-implementation; a group holds the cases
of one op, workload and dtype. Workloads come from the ops' specifications, those of whole models
from `benchmarks.model` and `benchmarks.generation`.
"""

import functools
import itertools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.generation import DECODE_WORKLOADS, GENERATION, fastattn_decoders
from benchmarks.implementations import (
    Implementation,
    fastattn_backends,
    implementation_from_elsewhere,
    peers,
)
from benchmarks.model import MODEL, MODEL_WORKLOADS, fastattn_models
from fastattn.testing.spec import OpSpec, Workload, all_specs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DEFAULT_DTYPES = {"cuda": ("bf16",), "cpu": ("fp32", "bf16")}
_TRAINING_DTYPES = {"cuda": ("bf16",), "cpu": ("fp32",)}
# A few workloads that cover every op: the set of `--quick`.
_QUICK = re.compile(
    r"b8_h16_s2048_d128|b4_h16_s4096_d128_causal|b16_h16_s1024_d64_padded_both|32768x1024|16384x1024_relu"
    r"|b2_h8_s128_d64|b2_h8_s1024_d64_padded_both|2048x512|2048x512_relu|d512_h8_b64_s512|d128_h4_b4_s64"
    r"|b16_h16_s1024_d64_packed|b2_h8_s512_d64_packed|d512_h8_b32_s64_new128|d256_h4_b8_s24_new24|2048x256x768"
    r"|b8_h4_s128_d64_weights"
)


@dataclass(frozen=True)
class Group:
    """One op, workload and dtype, and the (implementation, direction) pairs to measure. part: of
    what a run measures.
    """

    op: str
    workload: str
    dtype: str
    device_type: str
    wanted: tuple[tuple[str, str], ...]
    part: str = ""

    @property
    def name(self) -> str:
        return f"{self.op}-{self.workload}-{self.dtype}"

    @property
    def cases(self) -> list[str]:
        return [
            case_name(self.op, direction, self.workload, self.dtype, implementation)
            for implementation, direction in self.wanted
        ]


def case_name(op: str, direction: str, workload: str, dtype: str, implementation: str) -> str:
    return f"{op}-{direction}-{workload}-{dtype}-{implementation}"


@functools.cache
def specs() -> dict[str, OpSpec]:
    return all_specs()


def ops() -> list[str]:
    """The ops that have workloads."""
    return [*[name for name, spec in specs().items() if spec.workloads], MODEL, GENERATION]


def directions(op: str, workload: Workload) -> tuple[str, ...]:
    if op in (MODEL, GENERATION):
        return ("step",) if op == MODEL else ("decode",)
    return ("fwd", "bwd") if workload.gradients else ("fwd",)


def workloads(op: str) -> tuple[Workload, ...]:
    models: dict[str, tuple[Workload, ...]] = {MODEL: MODEL_WORKLOADS, GENERATION: DECODE_WORKLOADS}
    return models[op] if op in models else specs()[op].workloads


def find_workload(op: str, name: str) -> Workload:
    return next(w for w in workloads(op) if w.name == name)


def implementations_of(
    op: str, device_type: str, peer_files: Sequence[Path] = ()
) -> list[Implementation]:
    """fastattn's first. peer_files: Python files of peers, or FOLDER/MODULE:ATTRIBUTE."""
    if op in (MODEL, GENERATION):
        found = (fastattn_models if op == MODEL else fastattn_decoders)(device_type)
    else:
        found = fastattn_backends(specs()[op], device_type)
    found += [implementation_from_elsewhere(op, p) for p in peer_files if ":" in p.name]
    found += peers(tuple(path for path in peer_files if ":" not in path.name))
    return [i for i in found if op in i.ops and device_type in i.device_types]


def groups(
    device_type: str,
    *,
    only_ops: Sequence[str] = (),
    match: str = "",
    dtypes: Sequence[str] = (),
    quick: bool = False,
    every_implementation: bool = False,
    peer_files: Sequence[Path] = (),
) -> list[Group]:
    """The groups of a device, alternating between ops, so that a shortened run covers each op.

    match: a regular expression of case names. every_implementation: also implementations that are
    limited to some workloads or to requests; a name that occurs in `match` is a request, too.
    """
    pattern = re.compile(match)
    by_op = []
    for op in only_ops or ops():
        candidates = [
            c for c in implementations_of(op, device_type, peer_files) if c.unavailable() is None
        ]
        defaults = (_TRAINING_DTYPES if op == MODEL else _DEFAULT_DTYPES)[device_type]
        found = []
        for workload in workloads(op):
            if device_type not in workload.device_types:
                continue
            if quick and not _QUICK.fullmatch(workload.name):
                continue
            for dtype in dtypes or defaults:
                wanted = tuple(
                    (c.name, direction)
                    for c in candidates
                    if every_implementation or c.name in match or _is_default(c, workload, quick)
                    for direction in directions(op, workload)
                    if direction in c.directions
                    and pattern.search(case_name(op, direction, workload.name, dtype, c.name))
                )
                if wanted:
                    found.append(Group(op, workload.name, dtype, device_type, wanted))
        by_op.append(found)
    return [g for round_ in itertools.zip_longest(*by_op) for g in round_ if g is not None]


def absent_peers(
    device_type: str, only_ops: Sequence[str] = (), peer_files: Sequence[Path] = ()
) -> dict[str, tuple[tuple[str, ...], str]]:
    """Peers that are unavailable on this machine: their ops and the reason."""
    found: dict[str, tuple[tuple[str, ...], str]] = {}
    for op in only_ops or ops():
        for c in implementations_of(op, device_type, peer_files):
            if (why := c.unavailable()) is not None:
                found[c.name] = ((*found.get(c.name, ((), ""))[0], op), why)
    return found


def _is_default(candidate: Implementation, workload: Workload, quick: bool) -> bool:
    if quick and candidate.compiles:
        return False
    return re.search(candidate.workloads, workload.name) is not None


def unfinished(items: Sequence[Group], finished: Collection[str]) -> list[Group]:
    """The groups without the directions of which every case is among the finished ones. Directions
    that are timed together are repeated together, for the ratios of their times.
    """
    found = []
    for group in items:
        open_directions = {
            direction
            for (_, direction), name in zip(group.wanted, group.cases, strict=True)
            if name not in finished
        }
        wanted = tuple(pair for pair in group.wanted if pair[1] in open_directions)
        if wanted:
            found.append(replace(group, wanted=wanted))
    return found


def spread(items: Sequence[Group]) -> list[Group]:
    """The same groups in golden-ratio steps, so that every prefix covers the whole grid."""
    counters: dict[str, itertools.count[int]] = {}
    ranks = []
    for group in items:
        i = next(counters.setdefault(group.op, itertools.count()))
        ranks.append((i * 0.618033988749895) % 1.0)
    return [group for _, group in sorted(zip(ranks, items, strict=True), key=lambda pair: pair[0])]
