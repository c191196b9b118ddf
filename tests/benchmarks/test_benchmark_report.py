"""Rows of results, and the reports made of them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import grids, plots, report, rows, run
from benchmarks.rows import ROOT, Row


def _synthetic_rows() -> list[Row]:
    environment = {
        "gpu": "Example GPU", "cpu": "Example CPU", "threads": 4, "torch": "2", "triton": "3",
    }  # fmt: skip
    ceiling = {"flops_per_s": 8e14, "bytes_per_s": 4e12}
    found: list[Row] = []
    for direction in ("fwd", "bwd"):
        for D in (64, 128):
            for causal in (False, True):
                for S in (512, 2048, 8192):
                    batch = []
                    for n, name in enumerate(("fastattn-triton", "sdpa-cudnn", "sdpa-flash")):
                        workload = f"s{S}_d{D}" + "_causal" * causal
                        shape = {"q": [1, 256 // D, S, D]}
                        features = ["causal"] if causal else []
                        flops = 4e11 * (S / 8192) ** 0.2
                        batch.append(
                            _synthetic("attention", direction, workload, name, 1.0 + 0.1 * n, shape,
                                       features, flops)
                        )  # fmt: skip
                    found += rows.complete(batch, environment, ceiling)
    for workload in ("32768x512", "32768x4096"):
        batch = [_synthetic("layer_norm", "fwd", workload, name, ms, {"x": [4, 4]}, [], bytes_=2e9)
                 for name, ms in (("fastattn-triton", 0.6), ("eager", 1.2))]  # fmt: skip
        wrong = _synthetic("layer_norm", "fwd", workload, "compile", 0.0, {"x": [4, 4]}, [])
        wrong = {**wrong, "status": "FAIL", "message": "y: slice [3]: error 2", "ms_median": None}
        found += rows.complete([*batch, wrong], environment, ceiling)
    return found


def _synthetic(
    op: str, direction: str, workload: str, implementation: str, ms: float, shape: dict[str, Any],
    features: list[str], flops: float = 0.0, bytes_: float = 0.0,
) -> Row:  # fmt: skip
    return {
        "op": op, "direction": direction, "workload": workload, "shape": shape, "dtype": "bf16",
        "features": features, "impl": implementation, "status": "ok", "message": "", "flops": flops,
        "bytes": bytes_, "ms_median": ms, "ms_p10": ms, "ms_p90": ms,
        "clocks_mhz": [1900.0, 1980.0],
    }  # fmt: skip


def test_runs_of_one_workload(tmp_path: Path) -> None:
    """The median of those on the same sources; implementations of earlier runs are kept. The
    machine of a GPU's rows is the GPU.
    """
    path = tmp_path / "results.jsonl"

    def run(commit: str, ms: float, where: Any = {}, **peers: float) -> None:  # noqa: B006
        names = {"fastattn-cpu": ms, "fastattn-reference": 3.0, **peers}
        batch = [_synthetic("ffn", "fwd", "x", name, ms, {}, []) for name, ms in names.items()]
        rows.append(path, [r | {"commit": commit} for r in rows.complete(batch, where, None)])

    def found() -> dict[str, float]:
        return {r["impl"]: r["ms_median"] for r in rows.read([path])}

    run("old", 0.1, eager=1.0, compile=2.0)
    run("new", 4.0, eager=4.8)
    assert found() == {
        "fastattn-cpu": 4.0, "fastattn-reference": 3.0, "eager": 4.8, "compile": 2.0
    }  # fmt: skip
    run("new", 2.0, eager=8.0)
    run("new", 1.0, eager=2.0)
    assert (found()["fastattn-cpu"], found()["eager"]) == (1.0, 2.0)
    run("new", 1.0, eager=1.0)  # the lower of two medians
    assert (found()["fastattn-cpu"], found()["eager"]) == (4.0, 4.8)
    run("new", 1.0, eager=9.0)
    run("new", 1.0)  # without its peer: the slowest of all
    assert (found()["fastattn-cpu"], found()["eager"]) == (4.0, 4.8)
    run("newest", 1.0, eager=0.5)
    assert (found()["fastattn-cpu"], found()["eager"]) == (1.0, 0.5)
    run("other", 7.0, {"cpu": "other"})
    assert sum(r["impl"] == "fastattn-cpu" for r in rows.read([path])) == 2
    path.unlink()
    run("a", 1.0, {"gpu": "Example GPU", "cpu": "a", "threads": 2})
    run("b", 2.0, {"gpu": "Example GPU"})
    assert found() == {"fastattn-cpu": 2.0, "fastattn-reference": 3.0}


def test_report_in_one_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, page = tmp_path / "results.jsonl", tmp_path / "report.html"
    found = _synthetic_rows()
    absent = rows.untimed("attention", "fa3", "absent", "fa3 is not installed")
    found += rows.complete([absent], {"gpu": "Example GPU", "cpu": "Example CPU"}, None)
    for row in found:
        if row["op"] == "attention" and row["status"] == "ok":
            row |= {"peak_bytes": 2**20 * row["shape"]["q"][2], "bytes": 1e9}
    step = [
        _synthetic("transformer", "step", "d512", name, 2.0, {"src": [1]}, [])
        | {"positions": 1000, "real_tokens": 1000, "peak_bytes": 2**30}
        for name in ("fastattn", "torch-eager")
    ]
    found += rows.complete(step, {"gpu": "Example GPU", "cpu": "Example CPU"}, None)
    rows.append(path, found)
    assert report.main([str(path), "--html", str(page)]) == 0
    text = page.read_text()
    assert "fa3 is not installed" in text and "not measured" not in text
    assert "SM clock 1900 to 1980 MHz" in text and "copy 4000 GB/s" in text
    assert "FAIL layer_norm fwd 32768x512 bf16 compile: y: slice [3]: error 2" in text
    assert "<td>32768x512</td><td><b>3333</b> (×2.00)</td><td>1667</td><td>FAIL</td>" in text
    assert "<td>s8192_d64</td><td><b>400</b> (×1.10)</td><td>364</td><td>333</td>" in text
    for title in ("time of fastattn, every workload", "roofline", "memory of attention",
                  "memory of the transformer", "fastattn's best backend against the best peer",
                  "attention against the best peer"):  # fmt: skip
        assert title in text, title
    assert "<svg" in text and not re.search(r'(src|href)="(?!#|data:)', text)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(ids)
    assert set(tmp_path.iterdir()) == {path, page}


def test_stale_rows_are_listed(tmp_path, capsys, monkeypatch):
    path = tmp_path / "results.jsonl"
    rows.append(path, _synthetic_rows())
    assert report.main([str(path), "--stale"]) == 0
    assert "of the current sources" in capsys.readouterr().out
    digest = rows.source_digest
    changed = {"attention": "0123456789ab"}
    for module in (rows, grids):
        monkeypatch.setattr(module, "source_digest", lambda op: changed.get(op) or digest(op))
    assert report.main([str(path), "--stale"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("attention fastattn-triton on Example GPU: 24 of 24 figures")
    assert line.endswith(f"{digest('attention')}, now 0123456789ab")
    table = report.table(grids.grids(rows.read([path]))[0])[-1]
    assert isinstance(table, report.Table) and "†" in table.lines[0][1]


def test_committed_rows_are_complete_and_in_the_readme() -> None:
    """Every row in benchmarks/results has every field and a machine's name, none is a failure of
    fastattn. The README's figures are those of the rows that they link to; each machine's picture
    shows the rows.
    """
    folder = ROOT / "benchmarks" / "results"
    paths = sorted(folder.glob("*.jsonl"))
    for path in paths:
        found = list(rows.read([path]))
        assert found
        for row in found:
            assert set(row) | {"busy", "kernel_ms"} == set(rows.FIELDS), path  # not in the first
            assert row["gpu"] or row["cpu"], path
            # A peer may exceed the budget, as torch's bf16 gradients of parameters do.
            assert row["status"] != "FAIL" or not row["impl"].startswith("fastattn"), path
    readme = (ROOT / "README.md").read_text()
    also = sorted((folder / "generation").glob("*.jsonl"))
    assert report.updated(readme, [*paths, *also], Path("benchmarks/results")) == readme
    links = re.findall(r"\| ([\d.]+) ms.*?\]\((\S+)#L(\d+)\)", readme)
    assert len(links) == len(report.HEADLINES)
    for milliseconds, path, number in links:
        row = json.loads((ROOT / path).read_text().splitlines()[int(number) - 1])
        assert float(milliseconds) == float(f"{row['ms_median']:.3g}")
    text = (ROOT / "docs" / "pages" / "translation.md").read_text()
    pictures = {path.name for path in folder.glob("*.svg")}
    elsewhere = {name for name in pictures if name.startswith("demo-")}
    assert elsewhere <= set(re.findall(r"\(images/(.*?)\)", text))
    machines = grids.by_machine(list(rows.read(paths)))
    assert pictures - elsewhere == {f"{report._slug(machine)}.svg" for machine in machines}
    for machine, group in machines.items():
        picture = (folder / f"{report._slug(machine)}.svg").read_text()
        means = re.findall(r">(\d+\.\d\d)  \w", picture)
        assert sorted(means) == sorted(f"{s.mean:.2f}" for s in grids.peer_ratios(group))


def test_summary_is_written_between_the_markers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, document = tmp_path / "results.jsonl", tmp_path / "README.md"
    rows.append(path, _synthetic_rows())
    alone = _synthetic("ffn", "fwd", "w", "fastattn-cpu", 1.0, {}, [])
    rows.append(path, rows.complete([alone], {"gpu": None, "cpu": "No peers", "threads": 1}, None))
    headline = report.HEADLINES[0]
    case = (headline.op, headline.direction, headline.workload)
    for day, ms in ("01", 1.0), ("03", 2.0), ("02", 3.0):  # the newest counts
        timed = [
            _synthetic(*case, name, time, {}, [])
            for name, time in (("fastattn-sm90", ms), ("sdpa-cudnn", 1.5 * ms))
        ]
        where = {"gpu": "Example GPU", "date": f"2026-01-{day}"}
        rows.append(path, rows.complete(timed, where, None))
    number = len(path.read_text().splitlines()) - 3
    document.write_text(f"Before\n{report._BEGIN}old\n{report._END}After\n")
    pictures: list[bytes] = []
    for _ in range(2):
        assert report.main([str(path), "--update", str(document)]) == 0
        text = document.read_text()
        assert text.startswith(f"Before\n{report._BEGIN}|  | workload | fastattn | ")
        assert (
            "| attention, forward | `b8_h16_s2048_d128`, bf16 | 2 ms (`sm90`) | cuDNN 1.50, "
            "FlashAttention-3 not measured | [Example GPU, 2026-01-03, "
        ) in text and f"](results.jsonl#L{number}) |" in text
        assert (
            "| generation, decoding | `d512_h8_b8_s32_new32`, fp32 | not measured |  |  |" in text
        )
        assert text.endswith(f".svg)\n{report._END}After\n") and "old" not in text
        assert "No peers" not in text
        assert "![fastattn and the best peers, Example GPU](example-gpu.svg)" in text
        pictures.append((tmp_path / "example-gpu.svg").read_bytes())
        assert b">layer_norm, forward</text>" in pictures[-1]
        assert b">2.00  eager</text>" in pictures[-1]
        assert set(tmp_path.iterdir()) == {path, document, tmp_path / "example-gpu.svg"}
    assert pictures[0] == pictures[1]
    blocks = report.summary(list(rows.read([path])), tmp_path, tables=True)
    text = report.to_markdown(blocks, tmp_path)
    assert "| attention, forward, bf16 | 13 | **1.13** | 1.10 | 1.50 | sdpa-cudnn |" in text
    assert "| layer_norm, forward, bf16 | 2 | **2.00** | 2.00 | 2.00 | eager |" in text
    document.write_text("no marks")
    with pytest.raises(ValueError, match="figures: begin"):
        report.updated(document.read_text(), [path], tmp_path)


def test_the_lower_ceiling_is_the_roof() -> None:
    ceiling = {"flops_per_s": 8e14, "bytes_per_s": 4e12}
    for flops, bytes_, roof in ((4e11, 4e8, 0.5), (4e11, 3e9, 0.75)):
        row = _synthetic("ffn", "fwd", "w", "eager", 1.0, {}, [], flops, bytes_)
        (found,) = rows.complete([row], {}, ceiling)
        assert found["roof"] == pytest.approx(roof)


def test_figures_above_a_ceiling_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    batch = [
        _synthetic("ffn", "fwd", "w", name, 1.0, {}, [], flops, 1e8)
        | {"positions": None, "peak_bytes": None}
        for name, flops in (("fastattn-cpu", 1.5e12), ("eager", 1e12))
    ]
    ceiling = {"flops_per_s": 1e15, "bytes_per_s": 4e12}
    found = rows.complete(batch, {"cpu": "Example", "threads": 2, "busy": 0.56}, ceiling)
    assert [rows.exceeds_flops(row) for row in found] == [True, False]
    assert "150.0 % of roof (above the measured matrix product)" in run.line(found[0])
    assert "100.0 % of roof  " in run.line(found[1])
    (_, text) = report.header(found)
    assert isinstance(text, report.Text)
    assert "1 of 2 figures are above this matrix product, by up to 50 %" in text.text
    assert "other processes took 56 % of the CPUs' time before the run" in text.text
    quiet = rows.complete(batch[1:], {"cpu": "Example", "threads": 2, "busy": 0.02}, ceiling)
    (_, text) = report.header(quiet)
    assert isinstance(text, report.Text)
    assert "above this" not in text.text and "other processes" not in text.text


@pytest.mark.parametrize("names", [1, 4, 9])
def test_titles_and_legends_fit_their_plots(names, monkeypatch, tmp_path):
    figures: list[Any] = []
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, *_, **__: figures.append(figure)
    )
    implementations = ["fastattn-reference", *(f"transformer-engine-{n}" for n in range(names))]
    batch = [_synthetic("ffn", "fwd", "w", name, 1.0, {}, [], 1e9) for name in implementations]
    about = {"cpu": "A processor with a long name and 64 cores", "threads": 64}
    (grid,) = grids.grids(rows.complete(batch, about, {"flops_per_s": 1e12, "bytes_per_s": 1e12}))
    plots.plot_bars(grid, tmp_path)
    figure = figures[0]
    figure.draw_without_rendering()
    for part in (figure.legends[0], figure._suptitle):
        box = part.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1, part


def test_numbers_are_written_with_few_digits(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    figures = {"ms_median": 1 / 3, "ms_rounds": [2 / 3, float("inf"), 4], "impl": "eager"}
    rows.append(path, [figures])
    assert json.loads(path.read_text()) == {
        "ms_median": 0.33333, "ms_rounds": [0.66667, None, 4], "impl": "eager",
    }  # fmt: skip


def test_rows_refuse_unknown_fields() -> None:
    bad = _synthetic("ffn", "fwd", "w", "eager", 1.0, {}, []) | {"speed": 3}
    with pytest.raises(ValueError, match="speed"):
        rows.complete([bad], {}, None)
