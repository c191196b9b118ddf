"""The plots of a report: each function draws one kind and returns the paths of SVG files.

fastattn is drawn thick in warm colours, peers thin in cool ones; the measured ceiling is a dashed
line. Needs matplotlib; draws nothing if there are too few rows.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.grids import DIRECTIONS, UNITS, Grid, is_stale, peer_ratios
from benchmarks.rows import Row, exceeds_bytes, is_backend, is_fastattn

_COLOURS = {
    "#c8322b": "fastattn fastattn-sm90 fastattn-cuda fastattn-cpu",
    "#e8833a": "fastattn-triton fastattn-compile",
    "#8e1b4a": "fastattn-packed fastattn-automatic",
    "#e0b7a0": "fastattn-reference",
    "#3b6fb6": "sdpa-cudnn sdpa marian",
    "#7aa6d8": "sdpa-flash sdpa-loop",
    "#9d7fc4": "sdpa-efficient",
    "#b8b8b8": "sdpa-math",
    "#4f9d69": "flex compile torch-compile",
    "#8c8c8c": "eager torch-eager torch-prefix",
    "#6fb7c9": "fa2",
    "#14808a": "fa3",
    "#0b4f57": "fa4",
    "#5f6b1f": "xformers",
    "#a3458f": "liger",
    "#6b4e16": "quack",
    "#76a21e": "transformer-engine",
}
_SPARE_COLOURS = ("#6b4e16", "#14808a", "#a3458f", "#5f6b1f")
_MARKERS = {"fwd": "o", "bwd": "v", "step": "s", "decode": "D"}
_MAX_WORKLOADS = 40  # of one plot
_MODELS = ("transformer", "generation")
# Inches of a title's letter, and of a legend's key and letter, on average.
_TITLE_LETTER, _LEGEND_KEY, _LEGEND_LETTER = 0.09, 0.65, 0.065


def colour(name: str, spare: dict[str, str]) -> str:
    known = next((ink for ink, names in _COLOURS.items() if name in names.split()), None)
    return known or spare.setdefault(name, _SPARE_COLOURS[len(spare) % len(_SPARE_COLOURS)])


def of_machine(group: Sequence[Grid], folder: Path) -> list[Path]:
    paths = plot_peer_ratios(group, folder, "peer_ratios")
    for dtype in dict.fromkeys(grid.dtype for grid in group):
        of_dtype = [grid for grid in group if grid.dtype == dtype]
        paths += plot_ratios([g for g in of_dtype if g.op == "attention"], folder)
        paths += plot_all_ratios(of_dtype, folder)
        paths += plot_roofline([g for g in of_dtype if g.op not in _MODELS], folder)
    return paths


def of_grid(grid: Grid, folder: Path) -> list[Path]:
    paths = plot_lengths(grid, folder) + plot_bars(grid, folder)
    paths += plot_lengths(grid, folder, memory=True)
    return paths + (plot_bars(grid, folder, memory=True) if grid.op == "transformer" else [])


# -- attention against sequence length -------------------------------------------------------------
def _plain(row: Row) -> bool:
    """Attention with nothing but causality."""
    return row["op"] == "attention" and bool(row["shape"]) and set(row["features"]) <= {"causal"}


def _cells(grid: Grid) -> list[Row]:
    """The grid of sequence lengths: plain attention with the commonest heads x head dim."""
    if grid.op != "attention":
        return []
    plain = [r for r in grid.rows if r["status"] == "ok" and _plain(r)]
    widths = [r["shape"]["q"][1] * r["shape"]["q"][3] for r in plain]
    commonest = max(widths, key=widths.count, default=0)
    cells = [r for r, width in zip(plain, widths, strict=True) if width == commonest]
    return cells if len({_cell_of(r)[2] for r in cells}) > 1 else []


def _cell_of(row: Row) -> tuple[int, bool, int]:
    """Head dim, causal, sequence length."""
    return row["shape"]["q"][3], "causal" in row["features"], row["shape"]["q"][2]


def plot_lengths(grid: Grid, folder: Path, *, memory: bool = False) -> list[Path]:
    """A panel per head dim and causality, a line per implementation: throughput, or peak memory
    beyond the inputs.
    """
    key, unit, scale = _quantity(grid, memory)
    cells = [r for r in _cells(grid) if r.get(key)]
    panels = sorted({_cell_of(r)[:2] for r in cells})
    lengths = sorted({_cell_of(r)[2] for r in cells})
    if len(lengths) < 2:
        return []
    dims = sorted({d for d, _ in panels})
    kinds = sorted({causal for _, causal in panels})
    figure, axes = make_figure(len(kinds), len(dims), width=4.2, height=3.4)
    spare: dict[str, str] = {}
    for i, causal in enumerate(kinds):
        for j, D in enumerate(dims):
            axis = axes[i][j]
            for name in grid.implementations:
                points = sorted(
                    (_cell_of(r)[2], r[key] / scale)
                    for r in cells
                    if r["impl"] == name and _cell_of(r)[:2] == (D, causal)
                )
                if not points:
                    continue
                is_fastattn_line = name.startswith("fastattn")
                axis.plot(
                    [p[0] for p in points],
                    [p[1] for p in points],
                    color=colour(name, spare),
                    linewidth=2.4 if is_fastattn_line else 1.4,
                    marker="o" if is_fastattn_line else "s",
                    markersize=5 if is_fastattn_line else 3.5,
                    zorder=3 if is_fastattn_line else 2,
                    label=name,
                )
            ceiling = None if memory else grid.ceiling()
            _finish(axis, f"head dim {D}" + (", causal" if causal else ""), unit, ceiling)
            if memory:
                axis.set_yscale("log", base=2)
                axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            else:
                axis.set_ylim(bottom=0)
            axis.set_xscale("log", base=2)
            axis.set_xticks(lengths, [_length(S) for S in lengths])
            axis.set_xlabel("sequence length")
    what, kind = (
        ("memory of attention", "memory")
        if memory
        else ("attention against sequence length", "lengths")
    )
    return save(figure, axes, f"{what}, {_subtitle(grid)}", folder / f"{grid.name}_{kind}")


def _quantity(grid: Grid, memory: bool) -> tuple[str, str, float]:
    """The field of a row, its unit in a plot, and the factor between them."""
    if memory:
        return "peak_bytes", "peak memory, MiB", 2.0**20
    return grid.metric, UNITS[grid.metric], 1.0


# -- bars ------------------------------------------------------------------------------------------
def plot_bars(grid: Grid, folder: Path, *, memory: bool = False) -> list[Path]:
    """A group of bars per workload: throughput outside the grid of lengths, or peak memory of a
    model's step, with its parameters.
    """
    key, unit, scale = _quantity(grid, memory)
    drawn = [] if memory else _cells(grid)
    cells = [r for r in grid.rows if r["status"] == "ok" and r not in drawn]
    cells = [r for r in cells if r.get(key)] if memory else cells
    if not cells:
        return []
    workloads = list(dict.fromkeys(r["workload"] for r in cells))[:_MAX_WORKLOADS]
    names = [n for n in grid.implementations if any(r["impl"] == n for r in cells)]
    width = max(5.0, 0.22 * len(workloads) * len(names) + 1.1 * len(workloads))
    figure, axes = make_figure(1, 1, width=min(width, 22.0), height=4.2)
    axis = axes[0][0]
    spare: dict[str, str] = {}
    for n, name in enumerate(names):
        step = 0.82 / len(names)
        found = [(workloads.index(r["workload"]), r[key] / scale) for r in cells
                 if r["impl"] == name and r["workload"] in workloads and r[key]]  # fmt: skip
        axis.bar(
            [i - 0.41 + (n + 0.5) * step for i, _ in found],
            [value for _, value in found],
            0.92 * step,
            color=colour(name, spare),
            label=name,
            zorder=2,
        )
    axis.set_xticks(range(len(workloads)), [w.replace("_", "\n") for w in workloads], fontsize=7)
    _finish(axis, "", unit, None if memory else grid.ceiling())
    axis.set_ylim(bottom=0)
    what, kind = (f"memory of the {grid.op}", "memory") if memory else (grid.op, "bars")
    return save(figure, axes, f"{what}, {_subtitle(grid)}", folder / f"{grid.name}_{kind}")


# -- ratios ----------------------------------------------------------------------------------------
def plot_ratios(group: Sequence[Grid], folder: Path) -> list[Path]:
    """fastattn's best backend against the best peer: direction, head dim, causality by length."""
    ratios: dict[tuple[tuple[str, int, bool], int], float] = {}
    for grid in group:
        for r in _cells(grid):
            if is_backend(r) and r["ratio_best"]:
                D, causal, S = _cell_of(r)
                key = ((grid.direction, D, causal), S)
                ratios[key] = max(ratios.get(key, 0.0), r["ratio_best"])
    kinds = sorted({kind for kind, _ in ratios}, key=lambda k: (k[0] != "fwd", *k[1:]))
    lengths = sorted({S for _, S in ratios})
    if len(kinds) * len(lengths) < 2:
        return []
    table = [[ratios.get((kind, S), float("nan")) for S in lengths] for kind in kinds]
    labels = [f"{DIRECTIONS[d]} D{D}" + (" causal" if causal else "") for d, D, causal in kinds]
    grid = group[0]
    title = f"attention against the best peer\n{grid.machine}, {grid.dtype}"
    path = folder / f"attention_{grid.dtype}_ratios"
    return _heat_map(table, labels, [_length(S) for S in lengths], "sequence length", title, path)


def plot_all_ratios(group: Sequence[Grid], folder: Path) -> list[Path]:
    """The same for everything outside that heat map: workloads by direction."""
    ratios: dict[tuple[str, str, str], float] = {}
    for grid in group:
        drawn = _cells(grid)
        for r in grid.rows:
            if is_backend(r) and r["ratio_best"] and r not in drawn:
                key = (grid.op, r["workload"], grid.direction)
                ratios[key] = max(ratios.get(key, 0.0), r["ratio_best"])
    workloads = list(dict.fromkeys((op, workload) for op, workload, _ in ratios))
    workloads = sorted(workloads[:_MAX_WORKLOADS], key=lambda pair: pair[0])
    directions = [d for d in DIRECTIONS if any(key[2] == d for key in ratios)]
    if len(workloads) < 2:
        return []
    table = [[ratios.get((*w, d), float("nan")) for d in directions] for w in workloads]
    labels = [f"{op}  {workload}" for op, workload in workloads]
    grid = group[0]
    title = f"fastattn's best backend against the best peer\n{grid.machine}, {grid.dtype}"
    path = folder / f"{grid.dtype}_ratios"
    return _heat_map(table, labels, [DIRECTIONS[d] for d in directions], "", title, path)


def _heat_map(
    table: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    what: str,
    title: str,
    path: Path,
) -> list[Path]:
    from matplotlib.colors import LogNorm

    longest = max(map(len, rows))
    width = 1.6 + 0.085 * longest + 0.95 * len(columns)
    figure, axes = make_figure(1, 1, width=width, height=1.5 + 0.3 * len(rows))
    axis = axes[0][0]
    image = axis.imshow(table, cmap="RdYlGn", norm=LogNorm(0.5, 2.0), aspect="auto")
    for i, values in enumerate(table):
        for j, value in enumerate(values):
            if value == value:
                ink = "white" if value > 1.6 or value < 0.62 else "black"
                text = f"{value:.2f}"
                axis.text(j, i, text, ha="center", va="center", fontsize=8, color=ink)
    axis.set_xticks(range(len(columns)), columns, fontsize=8)
    axis.set_yticks(range(len(rows)), rows, fontsize=8)
    axis.set_xlabel(what)
    bar = figure.colorbar(image, ax=axis, label="× best peer", ticks=[0.5, 0.7, 1.0, 1.4, 2.0])
    bar.ax.minorticks_off()
    bar.ax.set_yticklabels(["≤ 0.5", "0.7", "1", "1.4", "≥ 2"])
    return save(figure, axes, title, path, legend=False)


# -- ratios of all ops -----------------------------------------------------------------------------
_DTYPE_COLOURS = {"fp32": "#3b6fb6", "bf16": "#c8322b", "fp16": "#e8833a"}


def plot_peer_ratios(group: Sequence[Grid], folder: Path, name: str) -> list[Path]:
    """Every op and direction of a machine: the ratio to the best peer of each workload, hollow if
    it was measured on other sources; on the right their mean and these peers.
    """
    found = peer_ratios(group)
    if not found:
        return []
    labels = list(dict.fromkeys(f"{s.grid.op}, {DIRECTIONS[s.grid.direction]}" for s in found))
    dtypes = list(dict.fromkeys(s.grid.dtype for s in found))
    figure, axes = make_figure(1, 1, width=10.5, height=1.5 + 0.38 * len(labels))
    axis = axes[0][0]
    spare: dict[str, str] = {}
    for i, dtype in enumerate(dtypes):
        ink = _DTYPE_COLOURS.get(dtype) or colour(dtype, spare)
        axis.scatter([], [], s=14, color=ink, label=dtype)
        offset = 0.28 * (i - (len(dtypes) - 1) / 2)
        for s in (s for s in found if s.grid.dtype == dtype):
            height = labels.index(f"{s.grid.op}, {DIRECTIONS[s.grid.direction]}") + offset
            fill = ["none" if is_stale(r) else ink for r in s.rows]
            axis.scatter(
                s.ratios, [height] * len(s.ratios), s=14, facecolors=fill, edgecolors=ink,
                linewidths=0.9, zorder=3,
            )  # fmt: skip
            beside = axis.get_yaxis_transform()
            text = f"{s.mean:.2f}  {', '.join(s.peers)}"
            axis.text(1.01, height, text, transform=beside, va="center", fontsize=6, color=ink)
    axis.scatter(
        [],
        [],
        s=14,
        facecolors="none",
        edgecolors="#444444",
        label="measured on other sources than the current ones",
    )
    axis.axvline(1.0, color="#444444", linewidth=1.0, linestyle="--", zorder=1)
    axis.set_xscale("log", base=2)
    ticks = [
        t for t in (0.25, 0.5, 1, 2, 4, 8, 16, 32) if axis.get_xlim()[0] <= t <= axis.get_xlim()[1]
    ]
    axis.set_xticks(ticks, [f"{t:g}×" for t in ticks], fontsize=8)
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.set_xlabel("time of the best peer / time of fastattn, every workload", fontsize=8)
    axis.grid(axis="x", color="#dddddd", zorder=0)
    axis.spines[["top", "right"]].set_visible(False)
    shown = [r for s in found for r in s.rows]
    when = ", ".join(sorted({r["date"] for r in shown}))
    commits = ", ".join(dict.fromkeys(str(r["commit"]) for r in shown))
    title = f"{found[0].grid.machine}\n{when}, commit {commits}"
    return save(figure, axes, title, folder / name)


# -- roofline --------------------------------------------------------------------------------------
def plot_roofline(group: Sequence[Grid], folder: Path) -> list[Path]:
    """FLOP per byte against TFLOP/s under the measured ceilings: fastattn and the best peer of each
    workload.
    """
    under = [r for g in group for r in g.rows if r.get("ceiling_tflops")]
    points: list[tuple[str, str, float, float]] = []
    for grid in group:
        for r in grid.rows:
            if r["status"] != "ok" or not (r["flops"] and r["bytes"]):
                continue
            if is_fastattn(r) or r["impl"] == r["best_peer"]:
                points.append((r["impl"], grid.direction, r["flops"] / r["bytes"], r["tflops"]))
    if not under or len(points) < 2:
        return []
    top = max(r["ceiling_tflops"] for r in under)
    slope = max(r["ceiling_gbps"] for r in under) / 1e3
    figure, axes = make_figure(1, 1, width=7.5, height=5.0)
    axis = axes[0][0]
    spare: dict[str, str] = {}
    for name in sorted({p[0] for p in points}, key=lambda n: (n.startswith("fastattn"), n)):
        is_fastattn_point = name.startswith("fastattn")
        for direction in dict.fromkeys(p[1] for p in points if p[0] == name):
            chosen = [p for p in points if p[:2] == (name, direction)]
            axis.scatter(
                [p[2] for p in chosen],
                [p[3] for p in chosen],
                s=34 if is_fastattn_point else 18,
                marker=_MARKERS[direction],
                color=colour(name, spare),
                alpha=0.9 if is_fastattn_point else 0.6,
                label=f"{name}, {DIRECTIONS[direction]}",
                zorder=3 if is_fastattn_point else 2,
            )
    low, high = min(p[2] for p in points) / 2, max(p[2] for p in points) * 2
    ridge = top / slope
    high = max(high, 2 * ridge)
    roof = [low, *([ridge] if low < ridge else []), high]
    axis.plot(
        roof,
        [min(top, slope * x) for x in roof],
        color="#444444",
        linestyle="--",
        linewidth=1.2,
        label=f"measured: {top:.4g} TFLOP/s, {1e3 * slope:.4g} GB/s from memory",
    )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("FLOP per byte of inputs and results")
    axis.set_ylabel("TFLOP/s")
    axis.grid(color="#dddddd", zorder=0)
    axis.spines[["top", "right"]].set_visible(False)
    grid = group[0]
    title = f"roofline\n{grid.machine}, {grid.dtype}"
    if any(exceeds_bytes(r) for g in group for r in g.rows if r["status"] == "ok"):
        title += "\nabove the slope: part of the data is in the cache"
    return save(figure, axes, title, folder / f"{grid.dtype}_roofline", columns=3)


# -- shared ----------------------------------------------------------------------------------------
def make_figure(rows_: int, columns: int, *, width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows_), layout="constrained")
    return figure, figure.subplots(rows_, columns, squeeze=False)


def _finish(axis: Any, title: str, unit: str, ceiling: float | None) -> None:
    if ceiling is not None:
        axis.axhline(
            ceiling,
            color="#444444",
            linestyle="--",
            linewidth=1,
            zorder=1,
            label="measured copy from memory" if unit == UNITS["gbps"] else "measured product",
        )
    axis.set_title(title, fontsize=10)
    axis.set_ylabel(unit)
    axis.grid(axis="y", color="#dddddd", zorder=0)
    axis.spines[["top", "right"]].set_visible(False)


def save(
    figure: Any, axes: Any, title: str, path: Path, *, legend: bool = True, columns: int = 5
) -> list[Path]:
    import matplotlib

    title_width = _TITLE_LETTER * max(map(len, title.split("\n")))
    figure.set_figwidth(max(figure.get_figwidth(), title_width))
    if legend:
        labels: dict[str, Any] = {}
        for axis in axes.flat:
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                labels.setdefault(label, handle)
        columns = _legend_columns(list(labels), columns, figure.get_figwidth())
        figure.legend(
            labels.values(),
            labels.keys(),
            loc="outside lower center",
            ncols=columns,
            frameon=False,
            fontsize=8,
        )
    figure.suptitle(title, fontsize=11)
    svg = path.with_suffix(".svg")
    # Reproducible: the same rows give the same bytes with one matplotlib; text stays text.
    with matplotlib.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(svg, metadata={"Date": None, "Creator": None})
    return [svg]


def _legend_columns(labels: Sequence[str], most: int, width: float) -> int:
    """The number of columns, at most `most`, whose widths add up to at most `width` inches."""
    for columns in range(min(most, len(labels)), 1, -1):
        each, longer = divmod(len(labels), columns)  # the first ones hold one label more
        ends = [i * each + min(i, longer) for i in range(columns + 1)]
        letters = sum(max(map(len, labels[a:b])) for a, b in itertools.pairwise(ends))
        if columns * _LEGEND_KEY + letters * _LEGEND_LETTER <= width:
            return columns
    return 1


def _subtitle(grid: Grid) -> str:
    stale = any(is_stale(r) for r in grid.rows)
    note = "\nsome of fastattn measured on other sources" if stale else ""
    return f"{DIRECTIONS[grid.direction]}, {grid.dtype}\n{grid.machine}{note}"


def _length(S: int) -> str:
    return f"{S // 1024}k" if S >= 1024 and S % 1024 == 0 else str(S)
