"""`python -m benchmarks.report RESULTS...`: tables and plots from result rows, nothing typed by
hand.

Writes report.md with its plots next to it, or with --html a single file. Every machine gets a plot
of the ratios to the best peers, op by op. Attention gets throughput and memory against sequence
length per head dim and a heat map of ratios to the best peer; other ops get bars and a heat map;
models get their memory; each dtype a roofline.
Plots need matplotlib; tables need nothing. `--stale` only lists figures measured on other sources,
`--update` only writes the headlines and the verified kernels between markers of a document, and a
plot per machine.
"""

import argparse
import html
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from benchmarks import plots, rows
from benchmarks.grids import (
    DIRECTIONS,
    UNITS,
    Grid,
    PeerRatios,
    absent_peers,
    by_machine,
    is_stale,
    machine_of,
    peer_ratios,
)
from benchmarks.implementations import can_import
from benchmarks.rows import Row, is_fastattn
from fastattn.ops import _verified

_RATES = ("tflops", "gbps")


# -- blocks of a report ----------------------------------------------------------------------------
@dataclass(frozen=True)
class Heading:
    level: int
    text: str


@dataclass(frozen=True)
class Text:
    """Markdown of paragraphs and flat lists."""

    text: str


@dataclass(frozen=True)
class Table:
    """Cells in Markdown; columns after the first are aligned right."""

    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Image:
    """A plot; text is its alternative text."""

    svg: Path
    text: str


Block = Heading | Text | Table | Image


def to_markdown(blocks: Sequence[Block], folder: Path) -> str:
    """Markdown; plots are links relative to `folder`."""
    parts = []
    for block in blocks:
        if isinstance(block, Heading):
            parts.append(f"{'#' * block.level} {block.text}\n")
        elif isinstance(block, Table):
            lines = ["| " + " | ".join(line) + " |" for line in (block.header, *block.lines)]
            lines.insert(1, "|---|" + "---:|" * (len(block.header) - 1))
            parts.append("\n".join(lines) + "\n")
        elif isinstance(block, Image):
            place = quote(block.svg.relative_to(folder).as_posix())
            parts.append(f"![{block.text}]({place})\n")
        else:
            parts.append(block.text.rstrip() + "\n")
    return "\n".join(parts)


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 78em; padding: 0 1em;
       color: #222; }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; }
th, td { padding: .25em .7em; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; font-family: ui-monospace, monospace; }
b { color: #a3231d; } svg { max-width: 100%; height: auto; } h2 { margin-top: 2em; }
"""


def to_html(blocks: Sequence[Block]) -> str:
    """One file that includes its plots."""
    parts = ['<!doctype html><html lang="en"><meta charset="utf-8"><title>Throughput</title>']
    parts.append(f"<style>{_STYLE}</style><body>")
    for n, block in enumerate(blocks):
        if isinstance(block, Heading):
            parts.append(f"<h{block.level}>{_inline(block.text)}</h{block.level}>")
        elif isinstance(block, Table):
            head = "".join(f"<th>{_inline(cell)}</th>" for cell in block.header)
            body = "".join(
                "<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in line) + "</tr>"
                for line in block.lines
            )
            parts.append(f"<table><tr>{head}</tr>{body}</table>")
        elif isinstance(block, Image):
            parts.append(_own_ids(block.svg.read_text().partition("<svg")[2], f"i{n}-"))
        else:
            parts += _html_of_text(block.text)
    return "\n".join(parts) + "\n</body></html>\n"


def _own_ids(svg: str, prefix: str) -> str:
    """Makes ids unique: plots on one page share a name space, and matplotlib reuses names."""
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}', svg)
    return "<svg" + svg.replace("url(#", f"url(#{prefix}")


def _html_of_text(text: str) -> list[str]:
    parts = []
    for paragraph in text.strip().split("\n\n"):
        lines = paragraph.split("\n")
        if all(line.lstrip().startswith("- ") for line in lines):
            items = "".join(f"<li>{_inline(line.lstrip()[2:])}</li>" for line in lines)
            parts.append(f"<ul>{items}</ul>")
        else:
            parts.append(f"<p>{_inline(' '.join(lines))}</p>")
    return parts


def _inline(text: str) -> str:
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html.escape(text))


# -- tables ----------------------------------------------------------------------------------------
def table(grid: Grid) -> list[Block]:
    """A row per workload, a column per implementation: the metric and the ratio to a peer."""
    names = grid.implementations
    lines = []
    for workload in grid.workloads:
        cells = [_cell(grid.find(workload, name), grid.metric) for name in names]
        lines.append((workload, *cells))
    note = f"{UNITS[grid.metric]}; ×: time of the best peer / time of fastattn."
    if any(is_stale(r) for r in grid.rows):
        note += " †: measured on other sources than the current ones."
    rates = Table(("workload", *names), tuple(lines))
    return [Heading(3, grid.title), Text(note), rates, *_kernel_table(grid)]


def _kernel_table(grid: Grid) -> list[Block]:
    """Milliseconds of a step of a model, and of its kernels by kind."""
    found = [r for r in grid.rows if r.get("kernel_ms")]
    kinds = dict.fromkeys(kind for r in found for kind in r["kernel_ms"])
    lines = []
    for r in found:
        times = (f"{r['kernel_ms'].get(kind, 0.0):.4g}" for kind in kinds)
        lines.append((f"{r['workload']} {r['impl']}", f"{r['ms_median']:.4g}", *times))
    note = "Milliseconds of a step, and of its kernels (on a CPU: operators) by kind."
    return [Text(note), Table(("", "step", *kinds), tuple(lines))] if found else []


def _cell(row: Row | None, metric: str) -> str:
    if row is None:
        return ""
    if row["status"] != "ok":
        return "–" if row["status"] == "refused" else str(row["status"])
    value = _number(row[metric] or 0.0)
    if not is_fastattn(row):
        return value
    value = f"**{value}**" + ("†" if is_stale(row) else "")
    return f"{value} (×{row['ratio_best']:.2f})" if row["ratio_best"] else value


def _number(value: float) -> str:
    if value >= 1e5:
        return f"{value / 1e6:.3f} M"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def header(results: Sequence[Row]) -> list[Block]:
    """Machines, versions and failures, from the rows."""
    lines = []
    measured = [r for r in results if r["status"] != "absent"]
    for machine in dict.fromkeys(machine_of(r) for r in results):
        of_machine = [r for r in measured if machine_of(r) == machine]
        facts = [machine]
        for key in ("torch", "triton", "cuda"):
            facts.append(f"{key} " + ", ".join(_distinct(of_machine, key)))
        facts.append("commit " + ", ".join(_distinct(of_machine, "commit")))
        facts.append(", ".join(_distinct(of_machine, "date")))
        clocks = [mhz for r in of_machine for mhz in r["clocks_mhz"] or ()]
        if clocks:
            facts.append(f"SM clock {min(clocks):.0f} to {max(clocks):.0f} MHz")
        power = [watts for r in of_machine for watts in r["power_w"] or ()]
        if power:
            facts.append(f"power {min(power):.0f} to {max(power):.0f} W")
        lines.append("- " + "; ".join(facts))
        busy = max((r.get("busy") or 0.0 for r in of_machine), default=0.0)
        if busy > rows.BUSY:
            lines.append(f"- **{rows.busy_warning(busy)}**")
        for dtype in _distinct(of_machine, "dtype"):
            under = [r for r in of_machine if r["dtype"] == dtype and r["ceiling_tflops"]]
            if under:
                flops, moved = (max(r[f"ceiling_{unit}"] for r in under) for unit in _RATES)
                lines.append(
                    f"- ceilings measured in the same run, {dtype}: matrix product "
                    f"{flops:.4g} TFLOP/s, copy {moved:.4g} GB/s"
                )
                lines += _above_ceilings(under)
        absent = absent_peers(r for r in results if machine_of(r) == machine)
        lines += [f"- absent: {why}" for why in absent.values()]
    if not any(r["gpu"] for r in measured):
        lines.append("- GPU: not measured")
    failed = [r for r in measured if r["status"] == "FAIL"]
    figures = sum(r["status"] == "ok" for r in measured)
    lines += ["", f"{figures} figures; {len(failed)} failures."]
    if failed:
        lines.append("")
    for r in failed:
        case = " ".join(r[k] for k in ("op", "direction", "workload", "dtype", "impl"))
        lines.append(f"- FAIL {case}: {r['message']}")
    return [Heading(1, "Throughput"), Text("\n".join(lines))]


def _above_ceilings(under: Sequence[Row]) -> list[str]:
    """Explanations of figures above the measured ceilings."""
    measured = [r for r in under if r["status"] == "ok"]
    fast = [r for r in measured if rows.exceeds_flops(r)]
    cached = [r for r in measured if rows.exceeds_bytes(r)]
    lines = []
    if fast:
        most = max(r["tflops"] / r["ceiling_tflops"] for r in fast)
        lines.append(
            f"- {len(fast)} of {len(measured)} figures are above this matrix product, by up to "
            f"{100 * (most - 1):.0f} %, also after it was measured again: PyTorch's product, which "
            "measures it, was slower than these kernels, or slowed down by other processes"
        )
    if cached:
        lines.append(
            f"- {len(cached)} of {len(measured)} figures are above this copy: part of their data "
            "was in the cache"
        )
    return lines


def _distinct(results: Iterable[Row], key: str) -> list[str]:
    return list(dict.fromkeys(str(r[key]) for r in results if r[key] is not None)) or ["unknown"]


def summary(results: Sequence[Row], folder: Path, *, tables: bool = False) -> list[Block]:
    """For a document: fastattn's fastest backend against the fastest peer, machine by machine, as a
    plot in `folder`, with `tables` also as a table.
    """
    found: list[Block] = []
    for machine, group in by_machine(results).items():
        if not (known := peer_ratios(group)):
            continue
        of_machine = [r for r in results if machine_of(r) == machine]
        versions, commits, dates = (
            ", ".join(_distinct(of_machine, key)) for key in ("torch", "commit", "date")
        )
        about = f"{machine}, torch {versions}, commit {commits}, {dates}"
        found.append(Text(f"{about}: time of the best peer / time of fastattn."))
        found.append(
            Image(folder / f"{_slug(machine)}.svg", f"fastattn and the best peers, {machine}")
        )
        if tables:
            columns = ("", "workloads", "geometric mean", "least", "most", "best peers")
            found.append(Table(columns, tuple(_line(ratios) for ratios in known)))
    if not any(r["gpu"] for r in results):
        found.append(Text("GPU: not measured."))
    return found


def _line(s: PeerRatios) -> tuple[str, ...]:
    mean, least, most = (f"{x:.2f}" for x in (s.mean, min(s.ratios), max(s.ratios)))
    return s.grid.title, str(len(s.ratios)), f"**{mean}**", least, most, ", ".join(s.peers)


def draw_summary(results: Sequence[Row], folder: Path) -> None:
    """Draws the plots of `summary` into `folder`."""
    for machine, group in by_machine(results).items():
        plots.plot_peer_ratios(group, folder, _slug(machine))


# -- a document's figures --------------------------------------------------------------------------
@dataclass(frozen=True)
class Headline:
    """A figure of the README: fastattn beside named peers. The newest row on a GPU, or on a CPU,
    is shown; a peer that was not timed in the same run is "not measured".
    """

    what: str
    on_gpu: bool
    op: str
    direction: str
    workload: str
    dtype: str
    peers: tuple[tuple[str, str], ...]  # (name, implementation)


_EAGER, _COMPILED = "eager PyTorch", "compiled PyTorch"
_FLASH = (("cuDNN", rows.CUDNN), ("FlashAttention-3", "fa3"))
_ATTENTION, _STEP = "b8_h16_s2048_d128", "d512_h8_b64_s512"
HEADLINES = (
    Headline("attention", True, "attention", "fwd", _ATTENTION, "bf16", _FLASH),
    Headline("attention", True, "attention", "bwd", _ATTENTION, "bf16", _FLASH),
    Headline("layer norm", True, "layer_norm", "fwd", "32768x2048", "bf16",
             ((_EAGER, "eager"), ("quack", "quack"))),
    Headline("feed-forward network", True, "ffn", "fwd", "16384x1024_gelu", "bf16",
             ((_EAGER, "eager"), (_COMPILED, "compile"))),
    Headline("`Transformer`", True, "transformer", "step", _STEP, "bf16",
             ((_EAGER, "torch-eager"), (_COMPILED, "torch-compile"))),
    Headline("attention, causal", False, "attention", "fwd", "b2_h8_s1024_d64_causal", "fp32",
             (("PyTorch", "sdpa"),)),
    Headline("`Transformer`", False, "transformer", "step", "d512_h8_b4_s128_padded", "fp32",
             ((_EAGER, "torch-eager"), (_COMPILED, "torch-compile"))),
    Headline("generation", False, "generation", "decode", "d512_h8_b8_s32_new32", "fp32",
             (("CTranslate2", "ctranslate2"), ("onnxruntime", "onnxruntime"))),
)  # fmt: skip


def headline_table(paths: Sequence[Path], seen: Path) -> Table:
    """A line per headline with a link to fastattn's row. seen: the folder of the first path
    relative to the document.
    """
    places = {}
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            place = Path(os.path.relpath(path, paths[0].parent))
            places.setdefault(line, f"{(seen / place).as_posix()}#L{number}")
    found = [{**json.loads(line), "place": place} for line, place in places.items()]
    header = ("", "workload", "fastattn", "time of the peer / time of fastattn", "measured")
    return Table(header, tuple(_headline(headline, found) for headline in HEADLINES))


def _headline(headline: Headline, found: Sequence[Row]) -> tuple[str, ...]:
    keys = ("op", "direction", "workload", "dtype")
    wanted = tuple(getattr(headline, key) for key in keys)
    same = [r for r in found if tuple(r[key] for key in keys) == wanted and r["status"] == "ok"]
    same = [r for r in same if bool(r["gpu"]) == headline.on_gpu]
    of_fastattn = [r for r in same if rows.is_backend(r)]
    what, case = f"{headline.what}, {DIRECTIONS[headline.direction]}", f"`{headline.workload}`"
    if not of_fastattn:
        return what, f"{case}, {headline.dtype}", "not measured", "", ""
    run = ("date", "commit", "gpu", "cpu", "threads")

    def peers_of(row: Row) -> dict[str, Row]:
        together = [r for r in same if all(r[key] == row[key] for key in run)]
        return {r["impl"]: r for r in together if r["impl"] in dict(headline.peers).values()}

    newest = max(r["date"] for r in of_fastattn)
    best = min(
        (r for r in of_fastattn if r["date"] == newest),
        key=lambda r: (-len(peers_of(r)), r["ms_median"]),
    )
    ratios, peers = [], peers_of(best)
    for name, implementation in headline.peers:
        peer = peers.get(implementation)
        ratio = f"{peer['ms_median'] / best['ms_median']:.2f}" if peer else "not measured"
        ratios.append(f"{name} {ratio}")
    backend = best["impl"].removeprefix("fastattn").removeprefix("-")
    time = f"{best['ms_median']:.3g} ms" + (f" (`{backend}`)" if backend else "")
    about = f"[{machine_of(best)}, {best['date']}, {best['commit']}]({best['place']})"
    return what, f"{case}, {headline.dtype}", time, ", ".join(ratios), about


def verified() -> Table:
    """The kernels that passed or failed on GPUs by the records that ship with the package."""
    ops: dict[tuple[str, ...], list[str]] = {}
    for file in _verified.files(_verified.SHIPPED):
        record, (architecture, _, backend) = _verified.read(file), file.stem.partition("-")
        dtypes: dict[tuple[str, ...], list[str]] = {}
        for entry in record["kernels"]:
            seen = tuple(str(entry.get(key)) for key in ("status", "device", "date", "commit"))
            dtypes.setdefault((entry["op"], *seen), []).append(entry["dtype"])
        for (op, status, *where), found in dtypes.items():
            key = architecture, f"`{backend}`", ", ".join(found), f"{status}: {', '.join(where)}"
            ops.setdefault(key, []).append(f"`{op}`")
    lines = tuple((gpu, by, ", ".join(names), *rest) for (gpu, by, *rest), names in ops.items())
    return Table(("architecture", "backend", "ops", "dtypes", "equivalence suite"), lines)


_BEGIN, _END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"


def updated(document: str, paths: Sequence[Path], pictures: Path) -> str:
    """The document with its headlines between the markers, the pictures of the newest GPU and CPU
    of all rows, and the verified kernels if it has markers for them. pictures: the folder of the
    first path relative to the document.
    """
    marks = [mark.replace("figures", "verified") for mark in (_BEGIN, _END)]
    if marks[0] in document:
        before, after = _around(document, *marks)
        document = before + to_markdown([verified()], Path()) + after
    before, after = _around(document, _BEGIN, _END)
    blocks: list[Block] = [headline_table(paths, pictures)]
    beside = [path for path in paths if path.parent == paths[0].parent]
    results = [r for r in rows.read(beside) if r["status"] == "ok"]
    for of_kind in ([r for r in results if r["gpu"]], [r for r in results if not r["gpu"]]):
        newest = max((r["date"] for r in of_kind), default=None)
        of_machine = {machine_of(r) for r in of_kind if r["date"] == newest}
        chosen = [r for r in of_kind if machine_of(r) == min(of_machine)]
        blocks += [block for block in summary(chosen, pictures) if isinstance(block, Image)]
    return before + to_markdown(blocks, Path()) + after


def _around(document: str, begin: str, end: str) -> tuple[str, str]:
    """The document before and after what is between two markers, with these."""
    before, first, rest = document.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise ValueError(f"a document to update must hold {begin.strip()} and {end.strip()}")
    return before + begin, end + after


# -- the report ------------------------------------------------------------------------------------
def blocks(results: Sequence[Row], folder: Path) -> list[Block]:
    """The whole report; its plots are written into `folder`."""
    drawn = can_import("matplotlib")
    if not drawn:
        print("benchmarks.report: matplotlib is absent, so tables only", file=sys.stderr)
    machines = by_machine(results)
    found = header(results)
    for machine, of_machine in machines.items():
        found.append(Heading(2, machine))
        place = folder if len(machines) == 1 else folder / _slug(machine)
        place.mkdir(parents=True, exist_ok=True)
        if drawn:
            found += _images(plots.of_machine(of_machine, place))
        for grid in of_machine:
            found += table(grid)
            if drawn:
                found += _images(plots.of_grid(grid, place))
    return found


def _images(paths: Sequence[Path]) -> list[Block]:
    return [Image(path, path.stem) for path in paths]


def write(results: Sequence[Row], folder: Path) -> Path:
    """report.md and its plots; returns the path of report.md."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.md"
    path.write_text(to_markdown(blocks(results, folder), folder))
    return path


def write_html(results: Sequence[Row], path: Path, before: Sequence[Block] = ()) -> Path:
    """Everything in one file, behind the blocks `before`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        found = blocks(results, Path(folder)) if results else []
        path.write_text(to_html([*before, *found]))
    return path


def stale(results: Iterable[Row]) -> list[str]:
    """A line per op and fastattn implementation that has stale figures."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in results:
        if is_fastattn(row) and row["status"] == "ok":
            found.setdefault((machine_of(row), row["op"], row["impl"]), []).append(row)
    lines = []
    for (machine, op, implementation), group in sorted(found.items()):
        old = [r for r in group if is_stale(r)]
        if old:
            digests = ", ".join(_distinct(old, "source_digest"))
            lines.append(
                f"{op} {implementation} on {machine}: {len(old)} of {len(group)} figures measured "
                f"on sources {digests}, now {rows.source_digest(op)}"
            )
    return lines


def _slug(text: str) -> str:
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    add = parser.add_argument
    add("results", nargs="+", type=Path, help="files of rows (results.jsonl)")
    add("--out", type=Path, help="folder of report.md (default: next to the first file)")
    add("--html", type=Path, metavar="FILE", help="write a single file instead")
    add(
        "--stale",
        action="store_true",
        help="list fastattn's figures of other sources; exit code 1 if any",
    )
    add(
        "--update",
        type=Path,
        metavar="DOCUMENT",
        help="write its figures between its markers, and a plot of each machine next to the first "
        "file; files of other folders are read for the figures alone",
    )
    options = parser.parse_args(arguments)
    missing = [str(path) for path in options.results if not path.is_file()]
    if missing:
        parser.error(f"RESULTS must be files of rows, there is no {', '.join(missing)}")
    results = list(rows.read(options.results))
    if not results:
        parser.error(f"no rows in {', '.join(map(str, options.results))}")
    if options.stale:
        lines = stale(results)
        print("\n".join(lines) if lines else "every figure of fastattn is of the current sources")
        return 1 if lines else 0
    if options.update:
        if not can_import("matplotlib"):
            parser.error("--update draws pictures, which needs matplotlib")
        pictures, document = options.results[0].parent, options.update
        beside = [path for path in options.results if path.parent == pictures]
        seen = Path(os.path.relpath(pictures, document.parent))
        text = updated(document.read_text(), options.results, seen)
        draw_summary(list(rows.read(beside)), pictures)
        document.write_text(text)
        print(options.update)
    elif options.html:
        print(write_html(results, options.html))
    else:
        print(write(results, options.out or options.results[0].parent / "report"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
