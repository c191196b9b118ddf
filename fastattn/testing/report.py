"""Tables of the rows that checks give."""

from collections import Counter
from collections.abc import Sequence

import torch

from fastattn.ops import _env
from fastattn.testing.properties import PROPERTIES
from fastattn.testing.rows import Row
from fastattn.testing.spec import all_specs


def print_report(rows: list[Row], device: torch.device, verbose: bool) -> None:
    print(_env.device_name(device))
    print(", ".join(f"{name} {version}" for name, version in _env.versions().items()))
    print(
        "\nResults, and their largest error against fp64 relative to the allowed error, beside that"
        "\nof PyTorch's operators, which is explained below the table if it is above 1. Then the"
        "\nnumbers of samples whose results do not change in a second run, with a smaller batch,"
        "\nand with other values in padding.\n"
    )
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.backend, row.dtype), []).append(row)
    table = [("op", "backend", "dtype", "results", "worst", "PyTorch", *PROPERTIES)]
    table[0] += ("refused", "failed")
    table += [(*key, *_counts(group)) for key, group in groups.items()]
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    for line in table:
        cells = zip(line, widths, strict=True)
        print("  ".join(c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(cells)))
    print()
    for text in _torch_errors(rows):
        print(text)
    for op, backend, reason in sorted({(r.op, r.backend, r.message) for r in rows if _refused(r)}):
        named = reason.startswith("backend ")
        print(f"refused: {op}: {reason if named else ' '.join(('backend', backend, reason))}")
    skipped = Counter((r.op, r.backend) for r in rows if r.status == "skipped")
    for (op, backend), count in skipped.items():
        print(f"skipped: {op}: {count} samples of backend {backend} were not reached")
    for row in rows:
        if verbose or row.status == "FAIL":
            size = f"error {row.error:.3g}, allowed {row.allowed:.3g} "
            print(
                f"{row.status:8}{row.op} {row.backend} {row.dtype} {row.sample} {row.result} "
                f"{row.kind}: {size if row.kind == 'value' else ''}{row.message}".rstrip(" :")
            )
    passed, refused, failed, skips = (
        sum(r.status == s for r in rows) for s in ("ok", "refused", "FAIL", "skipped")
    )
    end = f", {skips} skipped" if skips else ""
    print(f"{passed} passed, {refused} refused, {failed} failed{end}")


def _torch_errors(rows: Sequence[Row]) -> list[str]:
    """Why PyTorch's operators exceed the allowed error: a sample for each op and dtype."""
    worst: dict[tuple[str, str], tuple[float, Row]] = {}
    for row in rows:
        ratio = row.torch_error / row.allowed if row.torch_error is not None and row.allowed else 0
        if ratio > max(1.0, worst.get((row.op, row.dtype), (0.0, row))[0]):
            worst[row.op, row.dtype] = (ratio, row)
    if not worst:
        return []
    lines = [
        "PyTorch's operators round what they compute to the dtype, also the logsumexp of scores,",
        "which fastattn keeps in fp32. inf: a result is not finite where it should be. Largest:",
    ]
    for (op, dtype), (ratio, row) in worst.items():
        reason = all_specs()[op].sample(row.sample).reason
        lines.append(f"  {op} {dtype}: {ratio:.3g}, {row.result} of {row.sample} ({reason})")
    return [*lines, ""]


def _refused(row: Row) -> bool:
    return row.status == "refused"


def _counts(rows: list[Row]) -> tuple[str, ...]:
    """The cells of the table's row for one op, backend and dtype, from "results" on."""
    values = [row for row in rows if row.kind == "value" and row.status in ("ok", "FAIL")]
    worst = max((r.error / r.allowed for r in values if r.allowed), default=0.0)
    peers = [r.torch_error / r.allowed for r in values if r.allowed and r.torch_error is not None]
    return (
        str(len(values)),
        f"{worst:.2f}",
        f"{max(peers):.3g}" if peers else "-",
        *(str(sum(r.kind == kind and r.status == "ok" for r in rows)) for kind in PROPERTIES),
        str(sum(map(_refused, rows))),
        str(sum(r.status == "FAIL" for r in rows)),
    )
