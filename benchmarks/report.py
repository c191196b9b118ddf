"""`python -m benchmarks.report RESULTS...`: Markdown tables and plots from rows of result, nothing
typed by hand.

Attention gets lines of throughput against sequence length per head dim, with the measured ceiling,
and a heat map of ratios to the best peer; everything else gets bars. Plots are SVG and PNG and need
matplotlib; tables need nothing.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import rows
from benchmarks.rows import Row, is_ours

# What one reads off a figure, by op; all others are judged by the bytes they move.
_METRICS = {"attention": "tflops", "ffn": "tflops", "transformer": "tokens_per_s"}
_UNITS = {"tflops": "TFLOP/s", "gbps": "GB/s", "tokens_per_s": "tokens/s"}
_CEILINGS = {"tflops": "ceiling_tflops", "gbps": "ceiling_gbps"}
_DIRECTIONS = {"fwd": "forward", "bwd": "backward", "step": "training step"}
_PEER_COLOURS = {
    "sdpa-cudnn": "#3b6fb6",
    "sdpa": "#3b6fb6",
    "sdpa-flash": "#7aa6d8",
    "sdpa-efficient": "#9d7fc4",
    "sdpa-math": "#b8b8b8",
    "flex": "#4f9d69",
    "compile": "#4f9d69",
    "torch-compile": "#4f9d69",
    "eager": "#8c8c8c",
    "torch-eager": "#8c8c8c",
}
_OUR_COLOURS = {
    "fastattn-sm90": "#c8322b",
    "fastattn-triton": "#e8833a",
    "fastattn-cpu": "#c8322b",
    "fastattn": "#c8322b",
    "fastattn-compile": "#e8833a",
    "fastattn-reference": "#e0b7a0",
}
_SPARE_COLOURS = ("#6b4e16", "#14808a", "#a3458f", "#5f6b1f")


@dataclass(frozen=True)
class Grid:
    """The rows of one machine, op, direction and dtype."""

    machine: str
    op: str
    direction: str
    dtype: str
    rows: tuple[Row, ...]

    @property
    def metric(self) -> str:
        return _METRICS.get(self.op, "gbps")

    @property
    def name(self) -> str:
        return f"{self.op}_{self.direction}_{self.dtype}"

    @property
    def title(self) -> str:
        return f"{self.op}, {_DIRECTIONS[self.direction]}, {self.dtype}"

    @property
    def implementations(self) -> list[str]:
        """Ours first, then peers in the order in which they appear."""
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
        return next((r[key] for r in self.rows if key and r.get(key)), None)


def machine_of(row: Row) -> str:
    return str(row["gpu"] or f"{row['cpu']}, {row['threads']} threads")


def grids(results: Iterable[Row]) -> list[Grid]:
    found: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in results:
        key = (machine_of(row), row["op"], row["direction"], row["dtype"])
        found.setdefault(key, []).append(row)
    return [Grid(*key, tuple(group)) for key, group in found.items()]


# -- tables ----------------------------------------------------------------------------------------
def markdown(grid: Grid) -> str:
    """A row per workload, a column per implementation: the metric, ours against the best peer."""
    names = grid.implementations
    lines = [
        f"### {grid.title}",
        "",
        f"{_UNITS[grid.metric]}; × is the time of the best peer over ours.",
        "",
        "| workload | " + " | ".join(names) + " |",
        "|---|" + "---:|" * len(names),
    ]
    for workload in grid.workloads:
        cells = [_cell(grid.find(workload, name), grid.metric) for name in names]
        lines.append(f"| {workload} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: Row | None, metric: str) -> str:
    if row is None:
        return ""
    if row["status"] != "ok":
        return "–" if row["status"] == "refused" else str(row["status"])
    value = _number(row[metric] or 0.0)
    if is_ours(row) and row["ratio_best"]:
        return f"**{value}** (×{row['ratio_best']:.2f})"
    return value


def _number(value: float) -> str:
    if value >= 1e5:
        return f"{value / 1e6:.3f} M"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def header(results: Sequence[Row]) -> str:
    """What was measured where, as the rows say it."""
    lines = ["# Throughput", ""]
    for machine in dict.fromkeys(machine_of(r) for r in results):
        mine = [r for r in results if machine_of(r) == machine]
        facts = [machine]
        for key in ("torch", "triton", "cuda"):
            facts.append(f"{key} " + ", ".join(_distinct(mine, key)))
        facts.append("commit " + ", ".join(_distinct(mine, "commit")))
        facts.append(", ".join(_distinct(mine, "date")))
        clocks = [mhz for r in mine for mhz in r["clocks_mhz"] or ()]
        if clocks:
            facts.append(f"SM clock {min(clocks):.0f} to {max(clocks):.0f} MHz")
        lines.append("- " + "; ".join(facts))
        for dtype in _distinct(mine, "dtype"):
            row = next((r for r in mine if r["dtype"] == dtype and r["ceiling_tflops"]), None)
            if row is not None:
                lines.append(
                    f"  - ceilings measured in the same run, {dtype}: matrix product "
                    f"{row['ceiling_tflops']:.4g} TFLOP/s, copy {row['ceiling_gbps']:.4g} GB/s"
                )
    failed = [r for r in results if r["status"] == "FAIL"]
    lines += ["", f"{sum(r['status'] == 'ok' for r in results)} figures; {len(failed)} failures."]
    for r in failed:
        case = " ".join(r[k] for k in ("op", "direction", "workload", "dtype", "impl"))
        lines.append(f"- FAIL {case}: {r['message']}")
    return "\n".join(lines) + "\n"


def _distinct(results: Iterable[Row], key: str) -> list[str]:
    return list(dict.fromkeys(str(r[key]) for r in results if r[key] is not None)) or ["unknown"]


# -- plots -----------------------------------------------------------------------------------------
def _colour(name: str, spare: dict[str, str]) -> str:
    known = _OUR_COLOURS | _PEER_COLOURS
    next_spare = _SPARE_COLOURS[len(spare) % len(_SPARE_COLOURS)]
    return known[name] if name in known else spare.setdefault(name, next_spare)


def _plain(row: Row) -> bool:
    """Attention with nothing but causality."""
    return row["op"] == "attention" and bool(row["shape"]) and set(row["features"]) <= {"causal"}


def _cells(grid: Grid) -> list[Row]:
    """The grid of sequence lengths: plain attention of the commonest heads x head dim."""
    plain = [r for r in grid.rows if r["status"] == "ok" and _plain(r)]
    widths = [r["shape"]["q"][1] * r["shape"]["q"][3] for r in plain]
    commonest = max(widths, key=widths.count, default=0)
    return [r for r, width in zip(plain, widths, strict=True) if width == commonest]


def _cell_of(row: Row) -> tuple[int, bool, int]:
    """Head dim, causal, sequence length."""
    return row["shape"]["q"][3], "causal" in row["features"], row["shape"]["q"][2]


def plot_lengths(grid: Grid, folder: Path) -> list[Path]:
    """A panel per head dim and causality, a line per implementation."""
    cells = _cells(grid)
    panels = sorted({_cell_of(r)[:2] for r in cells})
    if len({_cell_of(r)[2] for r in cells}) < 2:
        return []
    dims = sorted({d for d, _ in panels})
    kinds = sorted({causal for _, causal in panels})
    figure, axes = _figure(len(kinds), len(dims), width=4.2, height=3.4)
    spare: dict[str, str] = {}
    for i, causal in enumerate(kinds):
        for j, D in enumerate(dims):
            axis = axes[i][j]
            for name in grid.implementations:
                points = sorted(
                    (_cell_of(r)[2], r[grid.metric], r)
                    for r in cells
                    if r["impl"] == name and _cell_of(r)[:2] == (D, causal)
                )
                if not points:
                    continue
                mine = name.startswith("fastattn")
                axis.plot(
                    [p[0] for p in points],
                    [p[1] for p in points],
                    color=_colour(name, spare),
                    linewidth=2.4 if mine else 1.4,
                    marker="o" if mine else "s",
                    markersize=5 if mine else 3.5,
                    zorder=3 if mine else 2,
                    label=name,
                )
            _finish(axis, f"head dim {D}" + (", causal" if causal else ""), grid)
            axis.set_xscale("log", base=2)
            lengths = sorted({_cell_of(r)[2] for r in cells})
            axis.set_xticks(lengths, [_length(S) for S in lengths])
            axis.set_xlabel("sequence length")
    return _save(
        figure,
        axes,
        f"attention against sequence length, {_subtitle(grid)}",
        folder / f"{grid.name}_lengths",
    )


def plot_bars(grid: Grid, folder: Path) -> list[Path]:
    """Everything that is no grid of lengths: a group of bars per workload."""
    drawn = _cells(grid)
    cells = [r for r in grid.rows if r["status"] == "ok" and r not in drawn]
    if not cells:
        return []
    workloads = list(dict.fromkeys(r["workload"] for r in cells))
    names = [n for n in grid.implementations if any(r["impl"] == n for r in cells)]
    width = max(5.0, 0.45 * len(workloads) * len(names) + 2.0)
    figure, axes = _figure(1, 1, width=min(width, 18.0), height=4.2)
    axis = axes[0][0]
    spare: dict[str, str] = {}
    step = 0.82 / len(names)
    for n, name in enumerate(names):
        found = [(i, grid.find(w, name)) for i, w in enumerate(workloads)]
        bars = [(i, r[grid.metric]) for i, r in found if r is not None and r["status"] == "ok"]
        axis.bar(
            [i - 0.41 + (n + 0.5) * step for i, _ in bars],
            [value for _, value in bars],
            0.92 * step,
            color=_colour(name, spare),
            label=name,
            zorder=2,
        )
    axis.set_xticks(range(len(workloads)), [w.replace("_", "\n") for w in workloads], fontsize=7)
    _finish(axis, "", grid)
    return _save(figure, axes, f"{grid.op}, {_subtitle(grid)}", folder / f"{grid.name}_bars")


def plot_ratios(group: Sequence[Grid], folder: Path) -> list[Path]:
    """Our best backend against the best peer: direction, head dim and causality by length."""
    from matplotlib.colors import TwoSlopeNorm

    ratios: dict[tuple[tuple[str, int, bool], int], float] = {}
    for grid in group:
        for r in _cells(grid):
            if is_ours(r) and r["ratio_best"]:
                D, causal, S = _cell_of(r)
                key = ((grid.direction, D, causal), S)
                ratios[key] = max(ratios.get(key, 0.0), r["ratio_best"])
    kinds = sorted({kind for kind, _ in ratios}, key=lambda k: (k[0] != "fwd", *k[1:]))
    lengths = sorted({S for _, S in ratios})
    if len(kinds) * len(lengths) < 2:
        return []
    figure, axes = _figure(1, 1, width=2.8 + 0.8 * len(lengths), height=1.6 + 0.38 * len(kinds))
    axis = axes[0][0]
    table = [[ratios.get((kind, S), float("nan")) for S in lengths] for kind in kinds]
    image = axis.imshow(table, cmap="RdYlGn", norm=TwoSlopeNorm(1.0, 0.5, 1.5), aspect="auto")
    for i, values in enumerate(table):
        for j, value in enumerate(values):
            if value == value:
                axis.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=8)
    axis.set_xticks(range(len(lengths)), [_length(S) for S in lengths])
    labels = [f"{_DIRECTIONS[d]} D{D}" + (" causal" if causal else "") for d, D, causal in kinds]
    axis.set_yticks(range(len(kinds)), labels, fontsize=8)
    axis.set_xlabel("sequence length")
    figure.colorbar(image, ax=axis, label="× best peer")
    grid = group[0]
    title = f"attention against the best peer\n{grid.machine}, {grid.dtype}"
    return _save(figure, axes, title, folder / f"attention_{grid.dtype}_ratios", legend=False)


def _figure(rows_: int, columns: int, *, width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows_), layout="constrained")
    return figure, figure.subplots(rows_, columns, squeeze=False)


def _finish(axis: Any, title: str, grid: Grid) -> None:
    ceiling = grid.ceiling()
    if ceiling is not None:
        axis.axhline(
            ceiling, color="#444444", linestyle="--", linewidth=1, label="ceiling", zorder=1
        )
    axis.set_title(title, fontsize=10)
    axis.set_ylabel(_UNITS[grid.metric])
    axis.set_ylim(bottom=0)
    axis.grid(axis="y", color="#dddddd", zorder=0)
    axis.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, axes: Any, title: str, path: Path, *, legend: bool = True) -> list[Path]:
    if legend:
        labels: dict[str, Any] = {}
        for axis in axes.flat:
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                labels.setdefault(label, handle)
        figure.legend(
            labels.values(),
            labels.keys(),
            loc="outside lower center",
            ncols=5,
            frameon=False,
            fontsize=8,
        )
    figure.suptitle(title, fontsize=11)
    paths = [path.with_suffix(".svg"), path.with_suffix(".png")]
    for each in paths:
        figure.savefig(each, dpi=130)
    return paths


def _subtitle(grid: Grid) -> str:
    return f"{_DIRECTIONS[grid.direction]}, {grid.dtype}\n{grid.machine}"


def _length(S: int) -> str:
    return f"{S // 1024}k" if S >= 1024 and S % 1024 == 0 else str(S)


# -- the command -----------------------------------------------------------------------------------
def write(results: Sequence[Row], folder: Path) -> Path:
    """report.md and its plots; returns the path of report.md."""
    folder.mkdir(parents=True, exist_ok=True)
    everything = grids(results)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("benchmarks.report: matplotlib is absent, so tables only", file=sys.stderr)
        drawn = False
    else:
        drawn = True
    parts = [header(results)]
    for machine in dict.fromkeys(grid.machine for grid in everything):
        mine = [grid for grid in everything if grid.machine == machine]
        parts.append(f"## {machine}\n")
        place = folder if len({g.machine for g in everything}) == 1 else folder / _slug(machine)
        place.mkdir(exist_ok=True)
        for dtype in dict.fromkeys(grid.dtype for grid in mine):
            attention = [g for g in mine if g.op == "attention" and g.dtype == dtype]
            if drawn and attention:
                parts += _images(plot_ratios(attention, place), folder)
        for grid in mine:
            if drawn:
                parts += _images(plot_lengths(grid, place), folder)
                parts += _images(plot_bars(grid, place), folder)
            parts.append(markdown(grid))
    path = folder / "report.md"
    path.write_text("\n".join(parts))
    return path


def _images(paths: Sequence[Path], folder: Path) -> list[str]:
    return [f"![{p.stem}]({p.relative_to(folder)})\n" for p in paths if p.suffix == ".svg"]


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text).strip("-").lower()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="files of rows (results.jsonl)")
    parser.add_argument(
        "--out", type=Path, help="folder of report.md (default: beside the first file)"
    )
    options = parser.parse_args(arguments)
    results = list(rows.read(options.results))
    if not results:
        parser.error(f"no rows in {', '.join(map(str, options.results))}")
    print(write(results, options.out or options.results[0].parent / "report"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
