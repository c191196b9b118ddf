"""Tables of the rows that checks give."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from fastattn.ops import _env
from fastattn.testing.judge import KINDS
from fastattn.testing.lines import write_json
from fastattn.testing.properties import PROPERTIES
from fastattn.testing.rows import Row
from fastattn.testing.spec import all_specs

_SIZED = ("value", "gradient")  # kinds of rows that have an error
_MAX_SHOWN = 20  # failures, and reasons of a status


def print_report(rows: Sequence[Row], device: torch.device, verbose: bool) -> None:
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
    print(aligned(table, 3), end="\n\n")
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
            print(_line(row))
    print(_totals(rows))


def _largest_of_torch(rows: Sequence[Row]) -> str:
    """The largest error of PyTorch's operators, relative to the allowed error."""
    ratios = [r.torch_error / r.allowed for r in rows if r.allowed and r.torch_error is not None]
    return f"{max(ratios):.3g}" if ratios else ""


def aligned(table: Sequence[Sequence[str]], left: int) -> str:
    """A table as text, with the first `left` columns aligned to the left."""
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in table
    )


def _line(row: Row) -> str:
    size = f"error {row.error:.3g}, allowed {row.allowed:.3g} " if row.kind in _SIZED else ""
    at = f"{row.op} {row.backend} {row.dtype} {row.sample} {row.result} {row.kind}"
    return f"{row.status:8}{at}: {size}{row.message}".rstrip(" :")


def _totals(rows: Sequence[Row]) -> str:
    count = Counter(row.status for row in rows)
    end = f"{count['ok']} passed, {count['refused']} refused, {count['FAIL']} failed"
    others = ("imprecise", "differs", "raised", "skipped", "left out")
    return ", ".join([end, *(f"{count[s]} {s}" for s in others if count[s])])


def status_counts(rows: Iterable[Row]) -> Counter[str]:
    """How many results have each status; for checks without an error, how many samples."""
    found = {(r.dtype, r.sample, r.result if r.kind in _SIZED else "", r.status) for r in rows}
    return Counter(status for *_, status in found)


def nothing_checked(rows: Sequence[Row]) -> bool:
    return all(row.status in ("refused", "skipped", "raised", "left out") for row in rows)


@dataclass(frozen=True)
class Report:
    """What `check_implementation` found. require: the kinds of rows that count as failures."""

    rows: tuple[Row, ...]
    device: torch.device
    require: tuple[str, ...]

    def table(self, verbose: bool = False) -> str:
        """How many checks of each kind hold, the largest and the median error relative to the
        allowed error beside the largest of PyTorch's operators, and what does not hold. verbose:
        every row.
        """
        statuses = ("ok", "imprecise", "differs", "FAIL")
        header = ("check", "dtype", "required", *statuses, "worst", "median", "PyTorch")
        table: list[tuple[str, ...]] = [header]
        groups: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            if row.status in statuses:
                dtype = row.dtype if row.kind in _SIZED else ""
                groups.setdefault((row.kind, dtype), []).append(row)
        order = (*KINDS, "process")
        for (kind, dtype), rows in sorted(groups.items(), key=lambda item: order.index(item[0][0])):
            count = status_counts(rows)
            ratios = sorted(row.error / row.allowed for row in rows if row.allowed)
            sizes = (f"{ratios[-1]:.3g}", f"{median(ratios):.3g}") if ratios else ("", "")
            required = "yes" if kind in (*self.require, "process") else ""
            counts = (str(count[status]) for status in statuses)
            table.append((kind, dtype, required, *counts, *sizes, _largest_of_torch(rows)))
        name, op = self.rows[0].backend, self.rows[0].op
        texts = [f"{op} by {name} on {_env.device_name(self.device)}", "", aligned(table, 3), ""]
        for status in ("refused", "raised", "differs", "left out", "skipped"):
            messages = Counter(
                f"{row.kind}: {text}" if status == "differs" else text
                for row in self.rows
                if row.status == status
                for text in _reasons(row.message)
            )
            texts += [f"{status}: {n} x {text}" for text, n in messages.most_common(_MAX_SHOWN)]
        failed = [row for row in self.rows if row.status == "FAIL"]
        texts += map(_line, self.rows if verbose else failed[:_MAX_SHOWN])
        if not verbose and len(failed) > _MAX_SHOWN:
            texts.append(f"and {len(failed) - _MAX_SHOWN} more that failed")
        return "\n".join([*texts, _totals(self.rows)])

    def json(self, path: str | Path) -> None:
        """Writes the rows."""
        write_json(Path(path), [asdict(row) for row in self.rows])

    def raise_if_failed(self) -> None:
        """Raises AssertionError with the table if a row failed or nothing could be checked."""
        if any(row.status == "FAIL" for row in self.rows) or nothing_checked(self.rows):
            raise AssertionError(self.table())


def _reasons(message: str) -> list[str]:
    """Each argument that a signature lacks on its own, else the whole message."""
    parts = message.split("; ")
    return parts if all(part.startswith("takes no ") for part in parts) else [message]


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
    return (
        str(len(values)),
        f"{worst:.2f}",
        _largest_of_torch(values) or "-",
        *(str(sum(r.kind == kind and r.status == "ok" for r in rows)) for kind in PROPERTIES),
        str(sum(map(_refused, rows))),
        str(sum(r.status == "FAIL" for r in rows)),
    )
