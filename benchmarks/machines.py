"""The machines of `benchmarks.scaling`: published figures with their source, measured ones where
rows of results exist.

A rate of a data sheet is a peak. The share of it that kernels reach is measured where the rows in
`benchmarks/results` are of that device; elsewhere it is an assumption, and marked as one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.rows import Row, is_fastattn, read

RESULTS = Path(__file__).resolve().parent / "results"
MEASURED, PUBLISHED, ASSUMED = "measured", "published", "assumed"


@dataclass(frozen=True)
class Figure:
    """A number with its origin: MEASURED, PUBLISHED or ASSUMED, and where."""

    value: float
    origin: str
    source: str


@dataclass(frozen=True)
class Machine:
    """Nodes of accelerators. Rates of one device and one direction of its links.

    products, attention: FLOP/s by dtype that matrix products and attention reach.
    memory: bytes of a device. bandwidth: bytes/s that memory-bound kernels reach.
    link: bytes/s to devices of the same node, network: to other nodes.
    hop, network_hop: seconds of one step of a ring, launch: of starting a collective.
    """

    name: str
    device: str
    node: int
    products: Mapping[str, Figure]
    attention: Mapping[str, Figure]
    memory: Figure
    bandwidth: Figure
    link: Figure
    network: Figure
    hop: Figure
    network_hop: Figure
    launch: Figure

    def figures(self) -> dict[str, Figure]:
        """All numbers by name."""
        rates = {f"matrix products, {d}, FLOP/s": f for d, f in self.products.items()}
        rates |= {f"attention, {d}, FLOP/s": f for d, f in self.attention.items()}
        return rates | {
            "memory, bytes": self.memory,
            "memory bandwidth, bytes/s": self.bandwidth,
            "link in a node, bytes/s": self.link,
            "network between nodes, bytes/s": self.network,
            "step of a ring in a node, s": self.hop,
            "step of a ring between nodes, s": self.network_hop,
            "start of a collective, s": self.launch,
        }


# Shares of the peak. FlashAttention-3 reports up to 0.75 on an H100, forward, and less backward.
_PRODUCT_SHARE, _ATTENTION_SHARE, _BANDWIDTH_SHARE, _LINK_SHARE = 0.7, 0.5, 0.8, 0.8
_NCCL = "constants of NCCL's cost model, src/graph/tuning.cc, ring, protocol Simple"
_NIC = "400 Gb/s network adapter for each GPU"


def _share_of(peak: float, share: float, source: str) -> Figure:
    return Figure(share * peak, ASSUMED, f"{share:g} of {peak:.4g}: {source}")


def _gpu(
    name: str,
    device: str,
    peaks: Mapping[str, float],
    memory: float,
    bandwidth: float,
    link: float,
    network: float,
    source: str,
    system: str,
) -> Machine:
    return Machine(
        name,
        device,
        8,
        {d: _share_of(peak, _PRODUCT_SHARE, source) for d, peak in peaks.items()},
        {d: _share_of(peak, _ATTENTION_SHARE, source) for d, peak in peaks.items()},
        Figure(memory, PUBLISHED, source),
        _share_of(bandwidth, _BANDWIDTH_SHARE, source),
        _share_of(link, _LINK_SHARE, source),
        _share_of(network, _LINK_SHARE, system),
        Figure(3.4e-6, PUBLISHED, _NCCL),
        Figure(9.6e-6, PUBLISHED, _NCCL),
        Figure(8.4e-6, PUBLISHED, _NCCL),
    )


# bf16: dense, without sparsity. fp32 without TF32, as fastattn computes it. Links in one direction,
# half of what data sheets add up.
_H100 = "NVIDIA H100 Tensor Core GPU data sheet, SXM"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet, SXM"
_B200 = "NVIDIA HGX B200 data sheet"
_MI300X = "AMD Instinct MI300X data sheet"
_GPUS = (
    _gpu(
        "h100", "NVIDIA H100 80GB HBM3", {"bf16": 989.4e12, "fp32": 66.9e12}, 80e9, 3.35e12,
        450e9, 50e9, _H100, f"DGX H100 data sheet: {_NIC}",
    ),
    _gpu(
        "h200", "NVIDIA H200", {"bf16": 989.4e12, "fp32": 66.9e12}, 141e9, 4.8e12,
        450e9, 50e9, _H200, f"DGX H200 data sheet: {_NIC}",
    ),
    _gpu(
        "b200", "NVIDIA B200", {"bf16": 2250e12, "fp32": 75e12}, 180e9, 8e12,
        900e9, 50e9, _B200, f"DGX B200 data sheet: {_NIC}",
    ),
    _gpu(
        "mi300x", "AMD Instinct MI300X", {"bf16": 1307.4e12, "fp32": 163.4e12}, 192e9, 5.3e12,
        448e9, 50e9, _MI300X, f"AMD reference cluster: {_NIC}",
    ),
)  # fmt: skip

_ETHERNET = "0.8 of 25 Gb/s Ethernet"
_CPU = Machine(
    "cpu",
    "AMD EPYC, family 26",
    1,
    {},
    {},
    Figure(32e9, ASSUMED, "32 GB for each process of 2 threads"),
    Figure(0.0, ASSUMED, ""),
    Figure(2.5e9, ASSUMED, _ETHERNET),
    Figure(2.5e9, ASSUMED, _ETHERNET),
    Figure(50e-6, ASSUMED, "TCP"),
    Figure(50e-6, ASSUMED, "TCP"),
    Figure(100e-6, ASSUMED, "gloo"),
)


def _fastest(rows: list[Row], ops: tuple[str, ...], dtype: str) -> Figure | None:
    """The rate of the workload with most FLOPs, forward and backward together."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        plain = row["op"] != "attention" or not row["features"]
        if row["op"] in ops and row["dtype"] == dtype and plain:
            cell = found.setdefault((row["op"], row["workload"]), {})
            best = cell.get(row["direction"])
            if best is None or row["ms_median"] < best["ms_median"]:
                cell[row["direction"]] = row
    cells = [cell for cell in found.values() if {"fwd", "bwd"} <= cell.keys()]
    if not cells:
        return None
    cell = max(cells, key=lambda cell: cell["fwd"]["flops"])
    ms = sum(row["ms_median"] for row in cell.values())
    rate = sum(row["flops"] for row in cell.values()) / ms * 1e3
    first = cell["fwd"]
    return Figure(rate, MEASURED, f"{first['op']} {first['workload']}, {first['date']}")


def _with_measured(machine: Machine, rows: list[Row]) -> Machine:
    """The machine with what fastattn's rows of its device say instead of assumptions."""
    rows = [
        row
        for row in rows
        if machine.device in (row["gpu"], row["cpu"] if row["gpu"] is None else None)
        and row["status"] == "ok"
        and is_fastattn(row)
    ]
    rates: dict[str, dict[str, Figure]] = {"products": {}, "attention": {}}
    for dtype in ("fp32", "bf16"):
        for name, ops in (("products", ("linear", "ffn")), ("attention", ("attention",))):
            figure = _fastest(rows, ops, dtype)
            if figure is not None:
                rates[name][dtype] = figure
    copies = [row for row in rows if row["ceiling_gbps"]]
    if copies:
        latest = max(copies, key=lambda row: (row["date"], row["ceiling_gbps"]))
        copy = Figure(1e9 * latest["ceiling_gbps"], MEASURED, f"copy, {latest['date']}")
        machine = replace(machine, bandwidth=copy)
    return replace(
        machine,
        products={**machine.products, **rates["products"]},
        attention={**machine.attention, **rates["attention"]},
    )


def read_rows(results: Path = RESULTS) -> list[Row]:
    """The rows of results in a folder."""
    return list(read(sorted(results.glob("*.jsonl"))))


def machines(results: Path = RESULTS) -> dict[str, Machine]:
    """All machines by name, with measured rates from the rows in `results`."""
    rows = read_rows(results)
    return {machine.name: _with_measured(machine, rows) for machine in (*_GPUS, _CPU)}


# -- time of a transfer ----------------------------------------------------------------------------
@dataclass(frozen=True)
class Group:
    """A process group: `size` ranks, `stride` apart, on nodes of consecutive ranks."""

    size: int
    stride: int

    def in_node(self, machine: Machine) -> int:
        """The ranks of the group on one node."""
        return min(self.size, max(1, machine.node // self.stride))

    def nodes(self, machine: Machine) -> int:
        return -(-self.size // self.in_node(machine))


def _ring(machine: Machine, group: Group, sent: float) -> float:
    """One pass of a ring: `sent` bytes by each rank in size - 1 steps. All devices of a node that
    belong to the group use their network adapters in parallel.
    """
    if group.size == 1:
        return 0.0
    local, nodes = group.in_node(machine), group.nodes(machine)
    rate = machine.link.value
    if nodes > 1:
        network = local * machine.network.value
        rate = min(rate, network) if local > 1 else network
    steps = (group.size - nodes) * machine.hop.value + (nodes - 1) * machine.network_hop.value
    return machine.launch.value + steps + sent / rate


def _all_to_all(machine: Machine, group: Group, sent: float) -> float:
    """Each rank sends to all others directly; links and network work in parallel."""
    if group.size == 1:
        return 0.0
    local = group.in_node(machine)
    peers = group.size - 1
    inside, outside = sent * (local - 1) / peers, sent * (group.size - local) / peers
    seconds = max(inside / machine.link.value, outside / machine.network.value)
    hop = machine.hop if group.size == local else machine.network_hop
    return machine.launch.value + hop.value + seconds


def _send(machine: Machine, group: Group, sent: float) -> float:
    """To the next rank of a ring, all ranks at once: the slowest pair is the time."""
    if group.size == 1:
        return 0.0
    inside = group.nodes(machine) == 1
    rate, hop = (machine.link, machine.hop) if inside else (machine.network, machine.network_hop)
    return machine.launch.value + hop.value + sent / rate.value


_TIMES: dict[str, Callable[[Machine, Group, float], float]] = {
    "all_gather": _ring,
    "reduce_scatter": _ring,
    "all_to_all": _all_to_all,
    "send": _send,
}


def seconds(machine: Machine, operation: str, group: Group, sent: float) -> float:
    """The time of one collective, or of one transfer, of which each rank sends `sent` bytes."""
    if operation == "all_reduce":  # a reduce-scatter and an all-gather
        return 2 * _ring(machine, group, sent / 2)
    return _TIMES[operation](machine, group, sent)
