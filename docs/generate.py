"""MkDocs hook: what the pages show that is not typed: pictures of masks, scores and kernels,
tables of backends and the command line from the code, tables of results from `benchmarks/results`.

A page asks for a text by `{{ name }}` and for a picture by `images/<name>.svg`; nothing of it is
kept in the repository.
"""

import argparse
import html
import importlib.metadata
import io
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from mkdocs.structure.files import File, Files

import fastattn
from fastattn import cli
from fastattn.ops import _env, _select
from fastattn.ops._select import OPS, Backend, backend_table, explaining
from fastattn.seq2seq.plots import Curve, save_curves

matplotlib.use("svg")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks and the examples are not installed

from benchmarks import report, rows  # noqa: E402
from examples.ablations import EXPERIMENTS  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
BLUE, ORANGE, GREEN, GREY = "#3f51b5", "#ef6c00", "#2e7d32", "#cfd8dc"

# -- masks ----------------------------------------------------------------------------------------
M, N = 8, 12
MASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "key_lengths": ("key_lengths=[9]", {"key_lengths": torch.tensor([9])}),
    "both_lengths": (
        "key_lengths=[9], query_lengths=[5]",
        {"key_lengths": torch.tensor([9]), "query_lengths": torch.tensor([5])},
    ),
    "top_left": ('causal="top_left"', {"causal": "top_left"}),
    "bottom_right": ('causal="bottom_right"', {"causal": "bottom_right"}),
    "bottom_right_lengths": (
        'causal="bottom_right_lengths", key_lengths=[9], query_lengths=[5]',
        {
            "causal": "bottom_right_lengths",
            "key_lengths": torch.tensor([9]),
            "query_lengths": torch.tensor([5]),
        },
    ),
    "window": ("window=(2, 1)", {"window": (2, 1)}),
    "causal_window": (
        'causal="bottom_right", window=(3, -1)',
        {"causal": "bottom_right", "window": (3, -1)},
    ),
    "bool_mask": ("mask=chessboard of 2 x 2", {}),
    "everything": (
        'causal="bottom_right", key_lengths=[9], mask=...',
        {"causal": "bottom_right", "key_lengths": torch.tensor([9])},
    ),
}


def allowed_pairs(name: str) -> torch.Tensor:
    """Which pairs `attention` itself allows: bool [M, N], read off its weights."""
    options = dict(MASKS[name][1])
    if name in ("bool_mask", "everything"):
        i, j = torch.arange(M)[:, None] // 2, torch.arange(N)[None, :] // 2
        options["mask"] = (i + j) % 2 == 0
    q, k = torch.zeros(1, 1, M, 8), torch.zeros(1, 1, N, 8)
    return fastattn.attention_weights(q, k, **options)[0, 0] > 0


def draw_mask(name: str) -> str:
    pairs = allowed_pairs(name)
    figure, axes = plt.subplots(figsize=(3.4, 2.6))
    for i in range(M):
        live_row = bool(pairs[i].any())
        for j in range(N):
            color = BLUE if pairs[i, j] else GREY if live_row else "#ffccbc"
            axes.add_patch(plt.Rectangle((j, i), 0.92, 0.92, color=color))
    axes.set(xlim=(0, N), ylim=(M, 0), aspect="equal", xlabel="keys", ylabel="queries")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(MASKS[name][0], fontsize=9, family="monospace")
    for spine in axes.spines.values():
        spine.set_visible(False)
    return _svg(figure)


# -- scores ---------------------------------------------------------------------------------------
_TABLE = torch.tensor([[0.6, 0.2, -0.4, -1.1, 0.0, 0.9, -0.2, -0.8]])  # [H, buckets]
SCORES: dict[str, tuple[str, dict[str, Any]]] = {
    "alibi": (
        'alibi_slopes=[0.5], causal="bottom_right"',
        {"alibi_slopes": torch.tensor([0.5]), "causal": "bottom_right"},
    ),
    "relative": (
        'relative_bias of 8 buckets, "t5"',
        {"relative_bias": _TABLE, "relative_buckets": "t5", "relative_max_distance": 8},
    ),
    "softcap": ("softcap=5.0, scores from -20 to 20", {"softcap": 5.0}),
    "sinks": ('sinks=[1.0], causal="top_left"', {"sinks": torch.ones(1), "causal": "top_left"}),
}


def score_matrix(name: str) -> torch.Tensor:
    """The scores that `attention` computes, [M, N], read off its weights and lse; -inf: blocked.
    For sinks the weights, [M, 1 + N], with those of the sink first.
    """
    # Without softcap, products of 0 leave what is added to them.
    rows = torch.linspace(-4.0, 4.0, M) if name == "softcap" else torch.zeros(M)
    q, k = rows.view(1, 1, M, 1), torch.linspace(-5.0, 5.0, N).view(1, 1, N, 1)
    options = SCORES[name][1]
    weights = fastattn.attention_weights(q, k, scale=1.0, **options)[0, 0]
    if name == "sinks":
        return torch.cat([1 - weights.sum(1, keepdim=True), weights], dim=1)
    _, lse = fastattn.attention(q, k, k, scale=1.0, return_lse=True, **options)
    return weights.log() + lse[0, 0, :, None]


def draw_scores(name: str) -> str:
    values = score_matrix(name)
    figure, axes = plt.subplots(figsize=(4.0, 2.6))
    if name == "sinks":
        values = torch.cat([values[:, :1], torch.full((M, 1), float("nan")), values[:, 1:]], dim=1)
        colors, low, high = "Blues", 0.0, 1.0
    else:
        high = values[values.isfinite()].abs().max().item()
        colors, low = "RdBu_r", -high
        values = values.masked_fill(values.isinf(), float("nan"))
    axes.set_facecolor("white" if name == "sinks" else GREY)
    image = axes.imshow(values, cmap=colors, vmin=low, vmax=high)
    if name == "sinks":
        blocked = torch.ones(M, N, dtype=torch.bool).triu(1)
        for i, j in blocked.nonzero().tolist():
            axes.add_patch(plt.Rectangle((j + 1.5, i - 0.5), 1, 1, color=GREY))
    axes.set(xlabel="the sink, keys" if name == "sinks" else "keys", ylabel="queries")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(SCORES[name][0], fontsize=9, family="monospace")
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.colorbar(image, label="weight" if name == "sinks" else "score", shrink=0.8)
    return _svg(figure)


# -- kernels --------------------------------------------------------------------------------------
def draw_hopper() -> str:
    """A tile of the forward kernel in time: who works while who waits. Not to scale."""
    figure, axes = plt.subplots(figsize=(9.5, 3.4))
    names = ["load warp (TMA)", "warpgroup 0: tensor cores", "warpgroup 0: softmax"]
    names += ["warpgroup 1: tensor cores", "warpgroup 1: softmax", "store warps (TMA)"]
    rows = {name: len(names) - 1 - i for i, name in enumerate(names)}

    def box(row: str, start: float, width: float, text: str, color: str) -> None:
        axes.barh(rows[row], width, left=start, height=0.72, color=color, edgecolor="white")
        axes.text(start + width / 2, rows[row], text, ha="center", va="center", fontsize=7.5,
                  color="white")  # fmt: skip

    for block, start in enumerate((0.0, 1.0, 2.0, 4.2, 7.2)):
        label = "QK3" if block == 0 else f"K{3 - block}" if block < 4 else "QK"
        box("load warp (TMA)", start, 0.5, label, GREEN)
        box("load warp (TMA)", start + 0.5, 0.5, f"V{3 - block}" if block < 4 else "V", GREEN)
    for group, shift in (("warpgroup 0", 1.2), ("warpgroup 1", 2.7)):
        box(f"{group}: tensor cores", shift, 1.0, "S3", BLUE)
        box(f"{group}: softmax", shift + 1.0, 1.5, "P3", ORANGE)
        time = shift + 2.5
        for n in (2, 1):
            box(f"{group}: tensor cores", time, 1.0, f"S{n}", BLUE)
            box(f"{group}: tensor cores", time + 1.0, 1.0, f"P{n + 1}V{n + 1}", "#7986cb")
            box(f"{group}: softmax", time + 1.0, 1.7, f"P{n}", ORANGE)
            time += 3.0
        box(f"{group}: tensor cores", time, 1.0, "P1V1", "#7986cb")
        box(f"{group}: softmax", time + 1.0, 0.5, "÷", ORANGE)
        box("store warps (TMA)", time + 1.5, 0.75, "O", GREEN)
    axes.set_yticks(list(rows.values()), list(rows), fontsize=8)
    axes.set_xticks([])
    axes.set_xlabel("time")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return _svg(figure)


def draw_tiles() -> str:
    """Query tiles against key blocks under a causal mask: skipped, full, edge."""
    figure, axes = plt.subplots(figsize=(4.6, 3.4))
    for i in range(6):
        for j in range(6):
            color, text = (GREY, "") if j > i else (BLUE, "full") if j < i else (ORANGE, "edge")
            axes.add_patch(plt.Rectangle((j, i), 0.94, 0.94, color=color))
            axes.text(j + 0.47, i + 0.5, text, ha="center", va="center", color="white", fontsize=8)
    for i in range(6):
        axes.annotate("", xy=(0.1, i + 0.85), xytext=(i + 0.85, i + 0.85),
                      arrowprops={"arrowstyle": "->", "color": "white"})  # fmt: skip
    _grid(axes, 6, "blocks of keys", "tiles of queries")
    return _svg(figure)


def draw_dropout() -> str:
    """The 2 x 2 lattice of weights whose bytes share a word."""
    figure, axes = plt.subplots(figsize=(4.4, 4.0))
    for i in range(16):
        for j in range(16):
            unit = (i % 8) * 8 + j % 8
            chosen = unit == 2 * 8 + 5
            axes.add_patch(plt.Rectangle((j, i), 0.92, 0.92, color=ORANGE if chosen else GREY))
            if chosen:
                axes.text(j + 0.46, i + 0.5, f"b{2 * (i // 8) + j // 8}", ha="center", va="center",
                          fontsize=7, color="white")  # fmt: skip
    _grid(axes, 16, "key j", "query i")
    return _svg(figure)


def draw_curves() -> str:
    """The curves of a recorded run of the demo."""
    record = json.loads((RESULTS / "demo.json").read_text())
    curves = {
        name: Curve(run["losses"], run["validations"]) for name, run in record["runs"].items()
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "curves.svg")
        save_curves(path, curves)
        return path.read_text()


def ablations() -> dict[str, Any]:
    """The recorded run of `examples.ablations`."""
    return json.loads((RESULTS / "ablations.json").read_text())


def draw_ablation(name: str) -> str:
    return _svg(EXPERIMENTS[name].draw(ablations()["experiments"][name]["values"]))


def _grid(axes: Axes, size: int, x: str, y: str) -> None:
    axes.set(xlim=(0, size), ylim=(size, 0), aspect="equal", xlabel=x, ylabel=y)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def _svg(figure: Any) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    return out.getvalue()


PICTURES: dict[str, Callable[[], str]] = {
    **{f"mask_{name}": lambda name=name: draw_mask(name) for name in MASKS},  # type: ignore[misc]
    **{f"scores_{name}": lambda name=name: draw_scores(name) for name in SCORES},  # type: ignore[misc]
    "hopper": draw_hopper,
    "tiles": draw_tiles,
    "dropout": draw_dropout,
    "demo-curves": draw_curves,
    **{f"ablation-{name}": lambda name=name: draw_ablation(name) for name in EXPERIMENTS},  # type: ignore[misc]
}


# -- tables ---------------------------------------------------------------------------------------
def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def backend_orders() -> str:
    """Every torch op with its backends in order of preference."""

    def cell(backend: Backend) -> str:
        return f"`{backend.name}`" + ("" if backend.automatic else " (where it has passed)")

    rows = [[f"`{op.name}`", " → ".join(map(cell, op.backends.values()))] for op in OPS.values()]
    return table(["op", "tried in this order"], rows)


def verified_kernels() -> str:
    """What passed or failed on GPUs, by the records that ship."""
    return report.to_markdown([report.verified()], Path())


def backends_here() -> str:
    """What `fastattn info` says on a machine without a GPU."""
    rows = [
        [f"`{row.op}`", row.backend, "yes" if row.available else f"no: {row.reason}"]
        for row in backend_table(torch.device("cpu"))
    ]
    return table(["op", "backend", "on a CPU"], rows)


def support() -> str:
    """Which samples of the attention's spec each backend takes, wherever it can run at all."""
    from fastattn.ops.attention import sm90, spec

    backends, attention = OPS["attention_fwd"].backends, spec.SPECS[0].function
    rows = []
    # As if this machine had every device and compiler, and every kernel were verified; nothing is
    # computed.
    _select.forget_orders()
    with (
        mock.patch.object(_env, "why_not_on", lambda *_: None),
        mock.patch.object(_select, "_is_verified", lambda *_: True),
        mock.patch.object(sm90, "unavailable", lambda: None),
        torch.no_grad(),
    ):
        for sample in spec.SAMPLES:
            dtype = torch.bfloat16 if torch.bfloat16 in sample.dtypes else sample.dtypes[0]
            with explaining() as explanations:
                attention(**sample.inputs("cpu", dtype))
            refusals = [f"`{name}` {why}" for name, why in explanations[0].refusals.items()]
            rows.append([f"`{sample.name}`", sample.reason, "; ".join(refusals)])
    _select.forget_orders()
    return f"{len(rows)} samples of {', '.join(backends)}.\n\n" + table(
        ["sample", "why it is there", "what does not take it forward, in bf16"], rows
    )


def op_families() -> str:
    public = dict.fromkeys(op.public_name for op in OPS.values() if op.requestable)
    return ", ".join(f"`{name}`" for name in public)


def results() -> str:
    """The results of record: a plot and a table of ratios for each machine."""
    paths = sorted(RESULTS.glob("*.jsonl"))
    if not paths:
        return "No results of record have been committed yet."
    images = Path("images")
    return report.to_markdown(report.summary(list(rows.read(paths)), images, tables=True), Path())


def families() -> str:
    """The models of transformers, compared with themselves unpatched, as recorded."""
    lines = (RESULTS / "sweep" / "transformers.jsonl").read_text().splitlines()
    head, *classes = map(json.loads, lines)
    about = f"{head['date']}, transformers {head['transformers']}, torch {head['torch']}, commit "
    # Classes of a family that share a result share a row.
    shared: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    by_status: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(classes, key=lambda row: row["type"]):
        key = (row["type"], row["status"], row.get("attention", ""), row["reason"])
        shared.setdefault(key, []).append(row)
        by_status.setdefault(row["status"], []).append(row)
    counts = [
        [status, str(len(found)), str(len({row["type"] for row in found})),
         str(sum(bool(row.get("attention")) for row in found))]
        for status, found in sorted(by_status.items(), key=lambda item: -len(item[1]))
    ]  # fmt: skip
    body = []
    for (family, status, attention, reason), found in shared.items():
        names = ", ".join(f"`{row['class']}`" for row in found)
        worst = max((row["worst"] for row in found if "worst" in row), default=None)
        about_it = html.escape(reason, quote=False).replace("|", "\\|")
        error = "" if worst is None else f"{worst:.0e}"
        body.append([f"`{family}`", names, status, attention, error, about_it])
    direct = Counter(row["direct"].partition(":")[0] for row in classes if "direct" in row)
    made = ", ".join(f"{count} {status}" for status, count in direct.most_common())
    return "\n\n".join([
        f"{about}`{head['commit']}`.",
        table(["result", "classes", "families", "classes with replaced attention"], counts),
        f"Models made with `attn_implementation=\"fastattn\"`: {made}.",
        table(["family", "classes", "result", "replaced", "difference", "remarks"], body),
    ])  # fmt: skip


_CONVENTIONS = ("fresh memory", "rerun", "batch", "batch bits", "empty rows", "finite padding",
                "NaN padding")  # fmt: skip


def conformance() -> str:
    """What `benchmarks.conformance` found: counts of checks, and failures by sample."""
    paths = sorted((RESULTS / "conformance").glob("*.jsonl"))
    return "\n\n".join(_conformance_on(path.read_text().splitlines()) for path in paths)


def _conformance_on(lines: list[str]) -> str:
    rows = [json.loads(line) for line in lines]

    def cell(row: dict[str, Any], kind: str) -> str:
        count = row["checks"].get(kind, {})
        total = sum(count.values())
        text = f"{count.get('ok', 0)} of {total}" if total else ""
        return text + (f", {n} imprecise" if (n := count.get("imprecise")) else "")

    counts, failures, times = [], [], []
    for row in rows:
        name = f"`{row['op']}`: {row['implementation']}"
        medians = ", ".join(f"{dtype} {x:.2g}" for dtype, x in row["median"].items())
        raised = str(sum(row["raised"].values()) or "")
        counts.append([name, cell(row, "value"), cell(row, "gradient"), raised, medians])
        times.append([name, *(cell(row, kind) for kind in _CONVENTIONS)])
        found: dict[str, dict[str, list[str]]] = {}
        for dtype, sample, _, result, _ in row["failures"]:
            found.setdefault(sample, {}).setdefault(dtype, []).append(result)
        for sample, by_dtype in found.items():
            what = "; ".join(f"{dtype} {', '.join(names)}" for dtype, names in by_dtype.items())
            failures.append([name, f"`{sample}`", what])
    versions = sorted({row["versions"] for row in rows})
    return "\n\n".join([
        f"{rows[0]['device']}; {'; '.join(versions)}.",
        table(["implementation", "value", "gradient", "raised", "median error / allowed"], counts),
        "What only fastattn defines, or asks for:",
        table(["implementation", *_CONVENTIONS], times),
        "Failures, by sample:",
        table(["implementation", "sample", "results"], failures),
    ])  # fmt: skip


def generation_results() -> str:
    """Decoding beside other libraries on CPUs, and `generate` of patched models, as recorded."""
    parts = []
    for path in sorted((RESULTS / "generation").glob("*.jsonl")):
        measured = list(rows.read([path]))
        cases: dict[tuple[str, str], dict[str, Any]] = {}
        for row in measured:
            cases.setdefault((row["workload"], row["dtype"]), {})[row["impl"]] = row
        peers = ["ctranslate2", "onnxruntime", "marian"]
        body = []
        for (workload, dtype), found in cases.items():
            fastattn_ms = found["fastattn"]["ms_median"]
            times = [found[peer]["ms_median"] if peer in found else None for peer in peers]
            cells = [f"{ms:.0f} ms, {ms / fastattn_ms:.2f}" if ms else "" for ms in times]
            body.append([f"`{workload}`", dtype, f"{fastattn_ms:.0f} ms", *cells])
        commits = ", ".join(dict.fromkeys(row["commit"] for row in measured))
        parts.append(f"{measured[0]['cpu']}, threads: {measured[0]['threads']}, commits {commits}. "
                     "Of other libraries, also their time over fastattn's.\n\n"
                     + table(["workload", "dtype", "fastattn", *peers], body))  # fmt: skip
    for path in sorted((RESULTS / "generation").glob("*.json")):
        report_of = json.loads(path.read_text())
        body = [
            [
                row["model"],
                str(row["batch"]),
                str(row["beams"]),
                f"{row['ms_before']:.0f} ms",
                f"{row['ms_after']:.0f} ms",
                f"{row['ms_before'] / row['ms_after']:.2f}",
                f"{row['mib_before']:.1f} MiB",
                f"{row['mib_after']:.1f} MiB",
            ]
            for row in report_of["rows"]
        ]
        head = ["model", "batch", "beams", "before", "after", "ratio", "peak before", "peak after"]
        parts.append(f"`generate` before and after `fastattn.patch`, fp32: {report_of['device']}, "
                     f"threads: {report_of['threads']}, commit {report_of['commit']}.\n\n"
                     + table(head, body))  # fmt: skip
    return "\n\n".join(parts)


def _gpu_rows() -> list[rows.Row]:
    paths = sorted(RESULTS.glob("gpu-*.jsonl"))
    return [row for row in rows.read(paths) if row["status"] == "ok"]


def hopper_attention() -> str:
    """Attention beside cuDNN on Hopper by sequence length, as recorded."""
    cells: dict[tuple[str, int, bool, str], dict[int, str]] = {}
    for row in _gpu_rows():
        if row["impl"] != "fastattn-sm90" or row["op"] != "attention" or not row["ratio_cudnn"]:
            continue
        batch, _, keys, dim = row["shape"]["k"]
        if batch * keys != 16384 or not set(row["features"]) <= {"causal"}:
            continue  # not of the grid
        key = (row["gpu"], dim, "causal" in row["features"], row["direction"])
        cells.setdefault(key, {})[keys] = f"{row['tflops']:.0f}, {row['ratio_cudnn']:.2f}"
    lengths = sorted({keys for found in cells.values() for keys in found})
    body = [
        [gpu, {"fwd": "forward", "bwd": "backward"}[direction], str(dim), "yes" if causal else "no",
         *[found.get(length, "") for length in lengths]]
        for (gpu, dim, causal, direction), found in sorted(cells.items())
    ]  # fmt: skip
    return table(["GPU", "direction", "head dim", "causal", *map(str, lengths)], body)


def hopper_rest() -> str:
    """What was measured on GPUs but attention, as recorded."""
    blocks = []
    for machine, grids in report.by_machine(_gpu_rows()).items():
        tables = [report.table(grid) for grid in grids if grid.op != "attention"]
        blocks += [report.Heading(3, machine)] if tables else []
        blocks += [block for found in tables for block in found]
    return report.to_markdown(blocks, Path())


def ablation_checks(name: str) -> str:
    """What was expected of an experiment, and what was found."""
    checks = [
        [check["expected"], check["source"], check["found"], "yes" if check["holds"] else "**no**"]
        for check in ablations()["experiments"][name]["checks"]
    ]
    return table(["expected", "source", "found", "holds"], checks)


def supported() -> str:
    """The versions that the package's metadata require."""
    about = importlib.metadata.metadata("fastattn")
    required = "\n".join(about.get_all("Requires-Dist") or ())
    (torch_from,) = re.findall(r"^torch>=([\d.]+)$", required, re.M)
    python_from = about["Requires-Python"].removeprefix(">=")
    name = f"fastattn {fastattn.__version__}"
    return f"{name} supports Python {python_from} and PyTorch {torch_from}, or newer."


def command_line() -> str:
    """Each command with its options, from the parsers."""
    (commands,) = (
        action
        for action in cli.make_parser(["check"])._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return "\n\n".join(map(_command, commands.choices.values()))


def _command(parser: argparse.ArgumentParser) -> str:
    parts = [f"## {parser.prog.split()[-1]}", parser.description or ""]
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        rows = [
            [f"`{_invocation(action)}`", formatter._expand_help(action) if action.help else ""]
            for action in group._group_actions
            if "--help" not in action.option_strings
        ]
        if rows:
            title = "" if group.title in ("options", "positional arguments") else group.title
            parts += [f"**{title}**"] if title else []
            parts.append(table(["argument", "meaning"], rows))
    return "\n\n".join(parts)


def _invocation(action: argparse.Action) -> str:
    """Such as "--layers LAYERS"."""
    flags = ", ".join(action.option_strings)
    if action.nargs == 0:
        return flags
    value = ", ".join(map(str, action.choices)) if action.choices else action.metavar
    return f"{flags} {value or action.dest.upper()}".strip()


def exit_codes() -> str:
    text = " ".join(cli.EPILOG.split())
    return text[0].upper() + text[1:] + "."


TEXTS: dict[str, Callable[[], str]] = {
    "backend_orders": backend_orders,
    "backends_here": backends_here,
    "verified_kernels": verified_kernels,
    "support": support,
    "op_families": op_families,
    "results": results,
    "families": families,
    "conformance": conformance,
    "generation_results": generation_results,
    "hopper_attention": hopper_attention,
    "hopper_rest": hopper_rest,
    "cli": command_line,
    "exit_codes": exit_codes,
    "supported": supported,
    "ablation_device": lambda: ablations()["device"],
    **{f"ablation_{name}": lambda name=name: ablation_checks(name) for name in EXPERIMENTS},  # type: ignore[misc]
}


# -- hooks ----------------------------------------------------------------------------------------
def on_files(files: Files, *, config: Any) -> Files:
    for name, draw in PICTURES.items():
        files.append(File.generated(config, f"images/{name}.svg", content=draw()))
    for plot in RESULTS.glob("*.svg"):
        files.append(File.generated(config, f"images/{plot.name}", content=plot.read_text()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    def text(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in TEXTS:
            raise KeyError(f"no generated text is called {name!r}")
        return TEXTS[name]()

    return re.sub(r"\{\{ (\w+) \}\}", text, markdown)
