"""How implementations of the field do on the equivalence suite's samples:

    python -m benchmarks.conformance [--match REGEX] [--out FILE]

Each is a function with the arguments that it supports, as docs/pages/test-your-kernel.md describes,
in `benchmarks/peers`. The file has a row per implementation, dtype and kind of check, and per
failure; docs/pages/conformance.md shows `benchmarks/results/conformance/cpu.jsonl`.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.implementations import needs_package, package_version, peers
from fastattn.ops import _env
from fastattn.testing import Report, check_implementation, lines
from fastattn.testing.report import status_counts
from fastattn.testing.rows import Row

# Name -> op, function in `benchmarks.peers`, the package that it needs besides torch.
IMPLEMENTATIONS = {
    "scaled_dot_product_attention": ("attention", "sdpa:sdpa", ""),
    "scaled_dot_product_attention, dense mask": ("attention", "sdpa:sdpa_masked", ""),
    "scaled_dot_product_attention, math backend, dense mask": ("attention", "sdpa:sdpa_math", ""),
    "flex_attention, not compiled": ("attention", "flex:flex", ""),
    "nn.MultiheadAttention": ("attention", "multihead:multihead", ""),
    "nn.MultiheadAttention, need_weights=True": ("attention", "multihead:multihead_weights", ""),
    "onnxruntime, Attention of opset 23": ("attention", "onnxruntime:attention", "onnxruntime"),
    "transformers, eager attention of Llama": ("attention", "transformers:llama", "transformers"),
    "transformers, eager attention of Gemma 2": (
        "attention", "transformers:gemma2", "transformers",
    ),
    "transformers, eager attention of gpt-oss": (
        "attention", "transformers:gpt_oss", "transformers",
    ),
    "F.layer_norm": ("layer_norm", "torch_ops:layer_norm", ""),
    "F.rms_norm": ("rms_norm", "torch_ops:rms_norm", ""),
    "F.linear": ("linear", "torch_ops:linear", ""),
}  # fmt: skip
# On a GPU, besides the peers of the benchmarks that run on GPUs alone.
ON_GPU = {
    "scaled_dot_product_attention, cuDNN backend": ("attention", "sdpa:sdpa_cudnn", ""),
    "scaled_dot_product_attention, flash backend": ("attention", "sdpa:sdpa_flash", ""),
    "scaled_dot_product_attention, efficient backend, dense mask": (
        "attention", "sdpa:sdpa_efficient", "",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """function: its path, as `check_implementation` takes it. package: the one it needs besides
    torch.
    """

    name: str
    op: str
    function: str
    unavailable: Callable[[], str | None]
    package: str
    version: Callable[[], str]


def candidates(device_type: str) -> list[Candidate]:
    """The implementations that are checked on a kind of device."""
    found = []
    for name, (op, function, package) in (IMPLEMENTATIONS | ON_GPU).items():
        only = {"onnxruntime": "cpu"}.get(package, "cuda" if name in ON_GPU else device_type)
        if device_type == only:
            unavailable = needs_package(package, package or "torch")
            version = partial(package_version, package or "torch")
            path = f"benchmarks.peers.{function}"
            found.append(Candidate(name, op, path, unavailable, package, version))
    for peer in peers():
        if peer.function and peer.device_types == (device_type,):
            about = (peer.ops[0], peer.function, peer.unavailable, peer.name, peer.version)
            found.append(Candidate(f"{peer.name}, {peer.ops[0]}", *about))
    return found


def summary(name: str, report: Report, version: str) -> dict[str, Any]:
    """One line of the file: counts by kind of check, the median ratio of errors to the allowed ones
    in each dtype, reasons of refusals, and failures.
    """
    checks: dict[str, list[Row]] = {}
    ratios: dict[str, list[float]] = {}
    for row in report.rows:
        if row.status not in ("refused", "left out", "skipped", "raised"):
            checks.setdefault(row.kind, []).append(row)
            if row.allowed and row.status != "FAIL":
                ratios.setdefault(row.dtype, []).append(row.error / row.allowed)
    return {
        "implementation": name,
        "op": report.rows[0].op,
        "versions": version,
        "device": _env.device_name(report.device),
        "checks": {kind: status_counts(rows) for kind, rows in checks.items()},
        "median": {dtype: round(median(found), 3) for dtype, found in ratios.items()},
        **{
            status: Counter(row.message for row in report.rows if row.status == status)
            for status in ("refused", "raised")
        },
        "failures": [
            [row.dtype, row.sample, row.kind, row.result, row.message]
            for row in report.rows
            if row.status == "FAIL"
        ],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conformance")
    parser.add_argument("--match", default="", metavar="REGEX", help="only names that match")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=Path("build/conformance.jsonl"))
    options = parser.parse_args(arguments)
    for candidate in candidates(options.device):
        name = candidate.name
        if not re.search(options.match, name):
            continue
        if absent := candidate.unavailable():
            print(f"{name} {absent}", file=sys.stderr)
            continue
        report = check_implementation(candidate.function, candidate.op, device=options.device)
        version = f"torch {torch.__version__}"
        if package := candidate.package:
            version += f", {package} {candidate.version()}"
        lines.append(options.out, [summary(name, report, version)])
        print(report.table(), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
