"""Result rows grouped by machine, op, direction and dtype, and what is computed from a group."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import geometric_mean

from benchmarks.rows import Row, is_backend, source_digest

# The metric of each op; of other ops it is the bytes that they move.
_PRODUCTS = ("attention", "attention_varlen", "attention_with_weights", "ffn", "linear")
_METRICS = {
    **dict.fromkeys(_PRODUCTS, "tflops"),
    **dict.fromkeys(("transformer", "generation"), "tokens_per_s"),
}
UNITS = {"tflops": "TFLOP/s", "gbps": "GB/s", "tokens_per_s": "tokens/s"}
_CEILINGS = {"tflops": "ceiling_tflops", "gbps": "ceiling_gbps"}
DIRECTIONS = {"fwd": "forward", "bwd": "backward", "step": "training step", "decode": "decoding"}


@dataclass(frozen=True)
class Grid:
    """The rows of one machine, op, direction and dtype. op: ends with "_decode" for one query per
    head, whose metric is the bytes of the cache.
    """

    machine: str
    op: str
    direction: str
    dtype: str
    rows: tuple[Row, ...]

    @property
    def metric(self) -> str:
        return metric_of(self.rows[0])

    @property
    def name(self) -> str:
        return f"{self.op}_{self.direction}_{self.dtype}"

    @property
    def title(self) -> str:
        return f"{self.op}, {DIRECTIONS[self.direction]}, {self.dtype}"

    @property
    def implementations(self) -> list[str]:
        """fastattn's first, then peers in the order in which they appear."""
        names = list(dict.fromkeys(r["impl"] for r in self.rows))
        return sorted(names, key=lambda name: not name.startswith("fastattn"))

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(r["workload"] for r in self.rows))

    def find(self, workload: str, implementation: str) -> Row | None:
        cell = (workload, implementation)
        return next((r for r in self.rows if (r["workload"], r["impl"]) == cell), None)

    def ceiling(self) -> float | None:
        key = _CEILINGS.get(self.metric)
        return max((r[key] for r in self.rows if key and r.get(key)), default=None)


def metric_of(row: Row) -> str:
    if "decode" in (row["features"] or ()):
        return "gbps"
    return _METRICS.get(row["op"], "gbps")


def machine_of(row: Row) -> str:
    threads = "1 thread" if row["threads"] == 1 else f"{row['threads']} threads"
    return str(row["gpu"] or f"{row['cpu']}, {threads}")


def by_machine(results: Iterable[Row]) -> dict[str, list[Grid]]:
    found: dict[str, list[Grid]] = {}
    for grid in grids(results):
        found.setdefault(grid.machine, []).append(grid)
    return found


def grids(results: Iterable[Row]) -> list[Grid]:
    found: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in results:
        if row["status"] == "absent":
            continue
        op = row["op"] + ("_decode" if "decode" in (row["features"] or ()) else "")
        found.setdefault((machine_of(row), op, row["direction"], row["dtype"]), []).append(row)
    return [Grid(*key, tuple(group)) for key, group in found.items()]


@dataclass(frozen=True)
class PeerRatios:
    """The row of the fastest fastattn backend for each workload of a grid that has a peer; the
    ratio is the time of the fastest peer / that of the backend.
    """

    grid: Grid
    rows: tuple[Row, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(r["ratio_best"] for r in self.rows)

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(r["best_peer"] for r in self.rows))

    @property
    def mean(self) -> float:
        return geometric_mean(self.ratios)


def peer_ratios(group: Iterable[Grid]) -> list[PeerRatios]:
    """One for each grid with a peer, by op, direction and dtype."""
    found = []
    for grid in group:
        best: dict[str, Row] = {}
        for r in grid.rows:
            if r["ratio_best"] and is_backend(r):
                other = best.get(r["workload"])
                if other is None or r["ratio_best"] > other["ratio_best"]:
                    best[r["workload"]] = r
        if best:
            found.append(PeerRatios(grid, tuple(best.values())))
    return sorted(found, key=lambda s: (s.grid.op, s.grid.direction, s.grid.dtype))


def absent_peers(results: Iterable[Row]) -> dict[str, str]:
    """Peers without a measured row, and the reason."""
    reasons: dict[str, str] = {}
    present = set()
    for row in results:
        if row["status"] == "absent":
            reasons[row["impl"]] = row["message"]
        else:
            present.add(row["impl"])
    return {name: why for name, why in reasons.items() if name not in present}


def is_stale(row: Row) -> bool:
    """Whether a figure of fastattn was measured on other sources than the current ones."""
    return row["status"] == "ok" and bool(row["source_digest"]) and (
        row["source_digest"] != source_digest(row["op"])
    )  # fmt: skip
