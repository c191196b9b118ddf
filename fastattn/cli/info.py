"""`fastattn info` and `fastattn check`: this machine's backends, and tests of their results."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastattn.cli.arguments import (
    DONE,
    add_command,
    add_device,
    chosen_device,
    device,
    input_errors,
    json_file,
    positive_int,
)

if TYPE_CHECKING:
    from fastattn.ops._select import BackendStatus


def add_info(commands: Any) -> None:
    parser = add_command(
        commands, "info", "print versions, the device and the backends of each op", _run_info
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--verbose", action="store_true", help="print a line for each backend")
    add_device(parser)


def _run_info(options: argparse.Namespace) -> int:
    device = chosen_device(options)
    import torch

    import fastattn
    from fastattn import ops

    rows, missing = ops.backend_table(device), ops.extension_unavailable()
    report = {
        "fastattn": fastattn.__version__,
        "versions": ops.versions(),
        "device": str(device),
        "device_name": ops.device_name(device),
        "threads": torch.get_num_threads(),
        "instruction_set": ops.cpu_instruction_set(),
        "backends": [asdict(row) for row in rows],
        "extension": {"available": missing is None, "reason": missing or ""},
    }
    if options.json:
        print(json.dumps(report, indent=2))
        return DONE
    versions = ", ".join(f"{name} {version}" for name, version in ops.versions().items())
    print(f"fastattn {fastattn.__version__}; {versions}")
    print(f"device {device}: {ops.device_name(device)}, {torch.get_num_threads()} CPU threads\n")
    print("Backends in the order in which they are tried:\n")
    for line in _table(rows) if options.verbose else _lines(rows):
        print(line)
    if device.type == "cpu" and (why := ops.library_unavailable("cpu")):
        print(f"\nOps on the CPU run PyTorch's operators: backend cpu {why}")
    elif device.type == "cpu":
        print(f"\nThe CPU kernels use the instruction set {ops.cpu_instruction_set()}")
    recorder = f"Python, which takes longer: {missing}" if missing else "the extension autograd"
    print(f"\nDerivatives are recorded by {recorder}")
    return DONE


def _lines(rows: Sequence[BackendStatus]) -> list[str]:
    """A line for each op: what is chosen, what runs on request, and why others do not run."""
    lines = []
    for op, found in itertools.groupby(rows, key=lambda row: row.op):
        automatic, requested = [], []
        missing: dict[str, list[str]] = {}
        for row in found:
            if not row.available:
                missing.setdefault(row.reason, []).append(row.backend)
            elif row.automatic or row.automatic_for:
                only = "" if row.automatic else f" ({', '.join(row.automatic_for)})"
                automatic.append(row.backend + only)
            else:
                requested.append(row.backend)
        first, *others = automatic or ["none is chosen"]
        parts = [f"{first}, then {', '.join(others)}" if others else first]
        parts += [f"on request {', '.join(requested)}"] if requested else []
        parts += [f"unavailable {', '.join(names)} ({why})" for why, names in missing.items()]
        lines.append(f"{op}: {'; '.join(parts)}")
    return lines


def _table(rows: Sequence[BackendStatus]) -> list[str]:
    """A line for each backend of each op."""
    table = [("op", "backend", "available", "automatic", "")]
    for row in rows:
        available = "yes" if row.available else "no"
        automatic = "yes" if row.automatic else ", ".join(row.automatic_for) or "no"
        table.append((row.op, row.backend, available, automatic, row.reason))
    widths = [max(len(line[i]) for line in table) for i in range(4)]
    return [
        "  ".join([*(x.ljust(n) for x, n in zip(line, widths, strict=False)), line[4]]).rstrip()
        for line in table
    ]


def add_check(commands: Any, *, with_options: bool) -> None:
    """with_options: add the options, which imports the test harness."""
    parser = add_command(
        commands, "check", "compare every op and backend with an fp64 reference", _run_check
    )
    if with_options:
        from fastattn.testing import check as equivalence

        equivalence.add_arguments(parser, device=device, count=positive_int, file=json_file)


def _run_check(options: argparse.Namespace) -> int:
    from fastattn.testing import check as equivalence

    with input_errors():
        return equivalence.run(options)
