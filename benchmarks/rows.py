"""Result rows: one JSON object per line, all with the same fields, null where not applicable."""

import datetime
import functools
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastattn.testing import lines

SCHEMA = 1
ROOT = Path(__file__).resolve().parent.parent
FIELDS = (
    # where and when; busy: the share of the CPUs' time that other processes took before the run
    "schema", "date", "commit", "source_digest", "gpu", "cpu", "threads", "clocks_mhz", "power_w",
    "torch", "triton", "cuda", "busy",
    # what
    "op", "direction", "workload", "shape", "dtype", "features", "impl", "impl_version",
    "backend_used",
    # how: cache "cold" or "warm", clock "graph", "stream", "wall", "cpu" (one thread) or
    # "profiler"; how rows were measured that this suite did not write is in their message
    "cache", "copies", "clock", "launches", "ms_median", "ms_p10", "ms_p90", "ms_rounds",
    # rates; roof is the share of the ceilings below, in flops or bytes, whichever limits
    "flops", "bytes", "tflops", "gbps", "roof", "ceiling_tflops", "ceiling_gbps",
    "ratio_cudnn", "ratio_best", "best_peer",
    # models; kernel_ms: of a step, by kind of kernel
    "positions", "real_tokens", "tokens_per_s", "peak_bytes", "kernel_ms",
    # ok, FAIL (wrong, crashed or hung), refused (with its reason), skipped (could not be checked)
    # or absent (a peer that is not installed, one row per op)
    "error", "allowed_error", "status", "message",
)  # fmt: skip

Row = dict[str, Any]
CUDNN = "sdpa-cudnn"
_SOURCES_OF_ALL = (
    *("fastattn/ops/*.py", "fastattn/_arguments.py", "fastattn/functional.py"),
    *("csrc/common/*", "csrc/cpu/*"),
)
_ATTENTION_SOURCES = ("fastattn/ops/attention/**/*.py", "csrc/attention/**/*", "csrc/sm90/**/*")
_MODEL_SOURCES = ("fastattn/ops/**/*.py", "fastattn/nn/*.py", "csrc/**/*")
_SOURCES = {
    "attention": _ATTENTION_SOURCES,
    "attention_with_weights": _ATTENTION_SOURCES,
    "attention_varlen": _ATTENTION_SOURCES,
    "linear": ("fastattn/ops/linear/*.py", "csrc/ffn/**/*"),
    "ffn": ("fastattn/ops/ffn/*.py", "csrc/ffn/**/*", "csrc/sm90/**/*"),
    "transformer": _MODEL_SOURCES,
    "generation": (*_MODEL_SOURCES, "fastattn/seq2seq/*.py"),
}
_NORM_SOURCES = ("fastattn/ops/layer_norm/*.py", "csrc/layer_norm/*")


def is_fastattn(row: Mapping[str, Any]) -> bool:
    return str(row["impl"]).startswith("fastattn")


def is_backend(row: Mapping[str, Any]) -> bool:
    """Whether a row is of fastattn as it is used: not of the reference, nor of another build."""
    name = str(row["impl"])
    return is_fastattn(row) and name != "fastattn-reference" and "@" not in name


def complete(
    batch: Sequence[Mapping[str, Any]],
    environment: Mapping[str, Any],
    ceiling: Mapping[str, float] | None,
) -> list[Row]:
    """Rows that were timed together, with all values that follow from their times."""
    ok = [r for r in batch if r["status"] == "ok"]
    peers = [r for r in ok if not is_fastattn(r)]
    best = min(peers, key=lambda r: r["ms_median"], default=None)
    cudnn = next((r for r in peers if r["impl"] == CUDNN), None)
    rows = []
    for measured in batch:
        row: Row = dict.fromkeys(FIELDS)
        date = datetime.date.today().isoformat()
        row |= {"schema": SCHEMA, "date": date, "commit": lines.commit()}
        row |= {k: v for k, v in environment.items() if k in FIELDS}
        row |= measured
        if is_fastattn(row):
            row["source_digest"] = source_digest(row["op"])
        if row["status"] == "ok":
            _rate(row, ceiling)
            if best is not None:
                row |= {
                    "best_peer": best["impl"],
                    "ratio_best": best["ms_median"] / row["ms_median"],
                }
            if cudnn is not None:
                row["ratio_cudnn"] = cudnn["ms_median"] / row["ms_median"]
        unknown = row.keys() - set(FIELDS)
        if unknown:
            raise ValueError(f"a row has the fields of rows.FIELDS, got {sorted(unknown)} too")
        rows.append(row)
    return rows


def untimed(
    op: str, implementation: str, status: str, why: str, case: Sequence[str] = ("", "", "")
) -> Row:
    """The row of a case without a time, or of a peer that is absent. case: direction, workload,
    dtype.
    """
    names = ("op", "direction", "workload", "dtype", "impl", "status", "message")
    return dict(zip(names, (op, *case, implementation, status, why), strict=True))


def _rate(row: Row, ceiling: Mapping[str, float] | None) -> None:
    seconds = row["ms_median"] / 1e3
    if row["flops"]:
        row["tflops"] = row["flops"] / seconds / 1e12
    if row["bytes"]:
        row["gbps"] = row["bytes"] / seconds / 1e9
    if row["positions"]:
        row["tokens_per_s"] = row["positions"] / seconds
    if ceiling is not None:
        row["ceiling_tflops"] = ceiling["flops_per_s"] / 1e12
        row["ceiling_gbps"] = ceiling["bytes_per_s"] / 1e9
        minimum = max(
            (row["flops"] or 0.0) / ceiling["flops_per_s"],
            (row["bytes"] or 0.0) / ceiling["bytes_per_s"],
        )
        row["roof"] = minimum / seconds


# Share of the CPUs' time from which on other processes make times and ratios vary.
BUSY = 0.1


def busy_warning(busy: float) -> str:
    return (
        f"other processes took {100 * busy:.0f} % of the CPUs' time before the run: its times are "
        "longer than on an idle machine, and its ratios vary from run to run"
    )


# A ceiling is exceeded by more than the variation of a measurement.
_ABOVE = 1.05


def exceeds_flops(row: Mapping[str, Any]) -> bool:
    """Whether a row has more FLOP/s than the measured matrix product."""
    return bool(row["ceiling_tflops"] and (row["tflops"] or 0) > _ABOVE * row["ceiling_tflops"])


def exceeds_bytes(row: Mapping[str, Any]) -> bool:
    """Whether a row has more bytes/s than the measured copy, because its data are in the cache."""
    return bool(row["ceiling_gbps"] and (row["gbps"] or 0) > _ABOVE * row["ceiling_gbps"])


def measured_on(device: str, versions: Mapping[str, str]) -> dict[str, Any]:
    """Device, date, commit and versions, for a file of figures that are not rows of this suite."""
    date = datetime.date.today().isoformat()
    return {"device": device, "date": date, "commit": lines.commit(), "versions": dict(versions)}


@functools.cache
def source_digest(op: str) -> str:
    """A digest of the sources that determine an op's speed."""
    patterns = (*_SOURCES_OF_ALL, *_SOURCES.get(op, _NORM_SOURCES))
    files = sorted({path for p in patterns for path in ROOT.glob(p) if path.is_file()})
    digest = hashlib.sha256()
    for path in files:
        if path.suffix in (".so", ".pyc") or path.name.startswith("spec"):
            continue
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def append(path: Path, rows: Iterable[Row]) -> None:
    lines.append(path, [{k: _rounded(v) for k, v in row.items()} for row in rows])


def _rounded(value: Any) -> Any:
    """Five significant digits, more than the noise allows. JSON has no infinity."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    if isinstance(value, dict):
        return {name: _rounded(v) for name, v in value.items()}
    return value


def read_all(path: Path) -> Iterator[Row]:
    """Every row of a file, without incomplete lines, as a run that is killed may leave."""
    path.stat()  # raises if there is no file
    yield from lines.read(path)


def read(paths: Iterable[Path]) -> Iterator[Row]:
    """The rows of some files. If a workload was measured several times on one machine and the same
    sources, the run with the median ratio to the best peer; on other sources, the last run.
    """
    measured: dict[tuple[Any, ...], list[dict[str, Row]]] = {}
    for path in paths:
        for row in read_all(path):
            machine = ("gpu",) if row["gpu"] else ("cpu", "threads")
            keys = (*machine, "op", "direction", "workload", "dtype")
            runs = measured.setdefault(tuple(row.get(k) for k in keys), [{}])
            if row["impl"] in runs[-1]:
                runs.append({})
            runs[-1][row["impl"]] = row
    for runs in measured.values():
        same_sources = sorted((r for r in runs if _sources(r) == _sources(runs[-1])), key=_ratio)
        of_all = {name: row for run in runs for name, row in run.items()}
        yield from (of_all | same_sources[(len(same_sources) - 1) // 2]).values()


def is_current(row: Row, environment: Mapping[str, Any]) -> bool:
    """Whether a row is finished and of this machine, these versions and these sources."""
    if row["status"] in ("skipped", "absent"):
        return False
    machine = ("gpu", "cpu", "threads", "torch", "triton", "cuda")
    if any(row.get(key) != environment[key] for key in machine):
        return False
    return not is_fastattn(row) or row["source_digest"] == source_digest(row["op"])


def _sources(run: Mapping[str, Row]) -> dict[str, tuple[Any, Any]]:
    of_fastattn = {name: row for name, row in run.items() if is_fastattn(row)}
    return {n: (row.get("commit"), row.get("source_digest")) for n, row in of_fastattn.items()}


def _ratio(run: Mapping[str, Row]) -> float:
    """The largest `ratio_best` of fastattn's backends, 0 without one."""
    return max((r.get("ratio_best") or 0.0 for r in run.values() if is_fastattn(r)), default=0.0)
