"""The computed times: from known rates, and as committed."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import scaling, volumes
from benchmarks.machines import ASSUMED, MEASURED, RESULTS, Group, machines, seconds
from benchmarks.volumes import Layout, Step
from fastattn.distributed import Plan
from fastattn.seq2seq.model import ModelConfig

MACHINE = machines()["h100"]
STEP = Step(ModelConfig(1024, 256, 8, 2, 2, 1024, dropout=0.0), 64, 128, 128, "bf16")


def test_rings_within_and_between_nodes() -> None:
    hop, net, launch = (f.value for f in (MACHINE.hop, MACHINE.network_hop, MACHINE.launch))
    link, network = MACHINE.link.value, MACHINE.network.value
    inside = seconds(MACHINE, "all_gather", Group(8, 1), 1e9)
    assert inside == pytest.approx(launch + 7 * hop + 1e9 / link)
    assert seconds(MACHINE, "all_reduce", Group(8, 1), 2e9) == pytest.approx(2 * inside)
    # 2 nodes of 8: all 8 network adapters of a node work, the links are slower than these.
    across = seconds(MACHINE, "reduce_scatter", Group(16, 1), 1e9)
    rate = min(link, 8 * network)
    assert across == pytest.approx(launch + 14 * hop + net + 1e9 / rate)
    # One device of each of 4 nodes.
    apart = seconds(MACHINE, "all_gather", Group(4, 8), 1e9)
    assert apart == pytest.approx(launch + 3 * net + 1e9 / network)
    assert seconds(MACHINE, "all_gather", Group(1, 8), 1e9) == 0


def test_direct_transfers() -> None:
    hop, net, launch = (f.value for f in (MACHINE.hop, MACHINE.network_hop, MACHINE.launch))
    link, network = MACHINE.link.value, MACHINE.network.value
    inside = seconds(MACHINE, "all_to_all", Group(4, 2), 3e9)
    assert inside == pytest.approx(launch + hop + 3e9 / link)
    # 8 of 15 others are on the other node.
    across = seconds(MACHINE, "all_to_all", Group(16, 1), 15e9)
    assert across == pytest.approx(launch + net + 8e9 / network)
    assert seconds(MACHINE, "send", Group(4, 2), 1e9) == pytest.approx(launch + hop + 1e9 / link)
    assert seconds(MACHINE, "send", Group(4, 8), 1e9) == pytest.approx(launch + net + 1e9 / network)


@pytest.mark.parametrize(
    ("gathers", "again", "scatters", "expected"),
    [
        ([0, 0], [0, 0], [0, 0], 12),  # 1 + 2 forward, 5 + 4 backward
        ([1, 1], [0, 0], [0, 0], 13),  # the first gather has nothing to overlap
        ([1, 4], [0, 0], [0, 0], 16),  # the second lasts 3 more than the first forward
        ([0, 0], [2, 3], [0, 0], 15),  # only that of the last block is exposed
        ([0, 0], [0, 0], [3, 7], 18),  # 7 during the 4 and 3 longer, then 3
    ],
)  # fmt: skip
def test_timeline(
    gathers: list[float], again: list[float], scatters: list[float], expected: float
) -> None:
    # The backward runs from the last block to the first: 5, then 4.
    assert scaling._timeline([1, 2], [4, 5], gathers, again, scatters) == expected


def test_one_device_has_the_time_of_its_work() -> None:
    time = scaling.step_time(MACHINE, STEP, Layout())
    blocks = volumes.blocks(STEP, Layout())
    products = 3 * sum(block.products for block in blocks) / MACHINE.products["bf16"].value
    assert time.products == pytest.approx(products)
    assert time.total == pytest.approx(
        time.products + time.attention + time.streams + time.optimizer
    )
    assert time.tensor == time.context == time.overlapped == 0
    assert time.shards == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_work_is_divided(method: str) -> None:
    whole = scaling.step_time(MACHINE, STEP, Layout())
    layout = Layout(2, 2, 2, Plan(context=method))  # type: ignore[arg-type]
    time = scaling.step_time(MACHINE, STEP, layout)
    assert time.products == pytest.approx(whole.products / 8)
    assert time.attention == pytest.approx(whole.attention / 8)
    assert min(time.tensor, time.context, time.shards, time.overlapped) > 0
    halves = scaling.step_time(MACHINE, STEP, replace(layout, accumulate=2))
    assert halves.products == pytest.approx(time.products)
    assert halves.shards > time.shards


def test_transfers_without_cost_leave_linear_scaling() -> None:
    free = replace(
        MACHINE,
        **{name: replace(getattr(MACHINE, name), value=0.0)
           for name in ("hop", "network_hop", "launch")},
        **{name: replace(getattr(MACHINE, name), value=math.inf) for name in ("link", "network")},
    )  # fmt: skip
    one = scaling.step_time(free, STEP, Layout()).total
    for sizes in ((8, 1, 1), (1, 1, 8)):
        assert scaling.step_time(free, STEP, Layout(*sizes)).total == pytest.approx(one / 8)


def test_tokens_from_which_transfers_are_hidden() -> None:
    free = replace(
        MACHINE,
        **{name: replace(getattr(MACHINE, name), value=0.0)
           for name in ("hop", "network_hop", "launch")},
    )  # fmt: skip
    tokens = scaling.hidden_from(free)
    # In one node, and with one device of each of four nodes.
    for place, tensor in (("ring in a node", 1), ("ring between nodes", 8)):
        for share, hidden in ((1.01, True), (0.99, False)):
            own = int(share * tokens[place])
            step = replace(STEP, batch=1, source=4 * own)
            layout = Layout(context=4, tensor=tensor)
            encoder = volumes.blocks(step, layout)[1]
            time = scaling._compute(free, step, layout, encoder, backward=True)
            assert (time.context == 0) == hidden, (place, share)
    rows = int(tokens["FSDP on whole nodes"])
    encoder = volumes.blocks(replace(STEP, batch=8 * rows, source=1), Layout(data=8))[1]
    products = encoder.products / free.products["bf16"].value
    gathers = 7 / 8 * 4 * encoder.parameters / min(free.link.value, 8 * free.network.value)
    assert 7 / 8 * products == pytest.approx(gathers, rel=0.01)


def test_layouts_that_parallelize_refuses() -> None:
    impossible = {
        "heads": Layout(tensor=16),
        "heads of a rank": Layout(tensor=4, context=4, plan=Plan(context="all_to_all")),
        "sentences": Layout(data=128),
        "source tokens": Layout(context=256),
    }
    for name, layout in impossible.items():
        assert str(volumes.refusal(STEP, layout)).startswith(f"{name}: "), name
    odd = replace(STEP, config=replace(STEP.config, vocabulary=1022))
    assert str(volumes.refusal(odd, Layout(tensor=4))).startswith("the vocabulary: ")
    assert volumes.refusal(odd, Layout(tensor=4, plan=Plan(vocabulary=False))) is None
    for layout in scaling.layouts(STEP, 32, "data, tensor, context by all-to-all"):
        assert layout.ranks == 32
        assert volumes.refusal(STEP, layout) is None


def test_only_layouts_that_fit_are_chosen() -> None:
    step = scaling.EXAMPLES["large"]
    assert scaling.best(MACHINE, step, scaling.layouts(step, 8, "data")) is None
    choice = scaling.best(MACHINE, step, scaling.layouts(step, 64, "data, tensor"))
    assert choice is not None
    assert choice.memory < MACHINE.memory.value


def test_measured_rates_replace_assumptions(tmp_path: Path) -> None:
    assert {f.origin for f in machines()["cpu"].products.values()} == {MEASURED}
    assert machines(tmp_path)["h100"].products["bf16"].origin == ASSUMED
    rows = [json.loads(line) for path in RESULTS.glob("*.jsonl") for line in path.open()]
    wanted = {"op": "ffn", "dtype": "bf16", "impl": "fastattn-cpu", "status": "ok"}
    row = next(row for row in rows if row | wanted == row)
    other = {"gpu": MACHINE.device, "ms_median": 2.0, "flops": 8e12, "ceiling_gbps": 2500.0}
    lines = [json.dumps(row | other | {"direction": d}) for d in ("fwd", "bwd")]
    (tmp_path / "gpu.jsonl").write_text("\n".join(lines) + "\n")
    measured = machines(tmp_path)["h100"]
    assert measured.products["bf16"].origin == measured.bandwidth.origin == MEASURED
    assert measured.products["bf16"].value == 4e15
    assert measured.bandwidth.value == 2.5e12
    assert measured.products["fp32"].origin == measured.attention["bf16"].origin == ASSUMED


def test_computed_steps_of_one_device_are_near_measured_ones() -> None:
    """Those that take long enough for the start of a kernel not to matter."""
    checks = {check.workload: check for check in scaling.checks()}
    assert len(checks) == 3
    for check in checks.values():
        if check.measured > 0.1:
            assert 1 / 1.5 < check.computed / check.measured < 1.5, check


def test_committed_rows_are_those_of_the_formulas() -> None:
    """Else `python -m benchmarks.scaling --record benchmarks/results` writes rows and pictures."""
    recorded = json.loads((RESULTS / "scaling.json").read_text())
    assert recorded.keys() == scaling.EXAMPLES.keys()
    for name, step in scaling.EXAMPLES.items():
        assert (RESULTS / f"scaling-{name}.svg").exists()
        for row in recorded[name]["fastest"]:
            layout = Layout(
                **row["mesh"], plan=Plan(context=row["method"]), accumulate=row["accumulate"]
            )
            milliseconds = 1e3 * scaling.step_time(machines()["h100"], step, layout).total
            assert milliseconds == pytest.approx(row["ms"], rel=1e-3), (name, row)
            gigabytes = volumes.memory(step, layout).total / 1e9
            assert gigabytes == pytest.approx(row["memory_gb"], rel=1e-2, abs=1e-3), (name, row)


def test_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["scaling", *options])
        scaling.main()
        return capsys.readouterr().out

    path = tmp_path / "rows.json"
    text = run("--machine", "h100x4", "--most", "8", "--json", str(path), "--width", "256")
    assert text.startswith("COMPUTED, not measured")
    rows = json.loads(path.read_text())
    assert rows["model"]["width"] == 256
    assert [row["ranks"] for row in rows["fastest"]] == [1, 2, 4, 8]
    text = run("--mesh", "data=2,tensor=4", "--plot", str(tmp_path / "picture"))
    assert "2 x 1 x 4" in text
    assert "computed, not measured" in (tmp_path / "picture.svg").read_text()
    sizes = "--width=768 --heads=12 --ffn-width=3072 --vocabulary=30000 --source=96 --target=96"
    assert "1 x 1 x 3" in run(*sizes.split(), "--mesh", "tensor=3")
    for wrong in (
        ["--mesh", "data=2,pipeline=2"],
        ["--machine", "h100xx"],
        ["--mesh", "tensor=16"],
        ["--mesh", "data=2,data=4"],
        ["--machine", "h100x0"],
        ["--batch", "0"],
        ["--width", "100"],
    ):
        with pytest.raises(SystemExit):
            run(*wrong)
