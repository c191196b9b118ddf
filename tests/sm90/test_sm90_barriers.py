"""The tables of barriers at the top of the Hopper kernels' shared memory name each barrier once and
give the count that it is initialised with.
"""

import re
from pathlib import Path

import pytest

SM90 = Path(__file__).resolve().parents[2] / "csrc/attention/sm90"
# Members that are of another type, and the barriers in them.
MEMBERS = {"TileQueue queue;": "Slot queue.slots;"}
# Structures of barriers, and the members that have their type.
STRUCTURES = {"BiasRings": "bias.", "BiasBarriers": "bias."}


def _declared(source: str) -> set[str]:
    """The barriers of a file's structures: full and empty for a slot."""
    for member, barriers in MEMBERS.items():
        source = source.replace(member, barriers)
    found = set()
    for name, body in re.findall(r"struct (?:alignas\(.*?\) )?(\w+) \{\n(.*?)\n\};", source, re.S):
        for kind, names in re.findall(r"^  (Barrier|Slot) (.*);$", body, re.M):
            for member in re.findall(r"(?:^|, )([\w.]+)", names):
                barrier = STRUCTURES.get(name, "") + member
                found |= {f"{barrier}.full", f"{barrier}.empty"} if kind == "Slot" else {barrier}
    return found


def _initialised(source: str) -> dict[str, str]:
    """The counts of the barriers that a file's function initialises, as its table writes them."""
    body = source[source.index("_barriers(") : source.index("ptx::fence_mbarrier_init")]
    written = {"kWarpsPerGroup": "4", "Traits::kGroups": "kGroups"}
    written["Traits::kGroups * kWarpsPerGroup"] = "4 kGroups"
    written |= dict(re.findall(r"constexpr int (\w+) = (\d);", body))
    call = r" +([\w.]+?)(?:\[\w+\])?((?:\.|->)(?:full|empty))?\.init\((.*)\);"
    members: dict[str, list[str]] = {}  # of variables of loops
    found = {}
    for line in body.splitlines():
        if loop := re.match(r" +for \(.*?(\w+) : (.*)\) \{", line):
            variable, over = loop.groups()
            members[variable] = re.findall(r"shared\.([\w.]+)", over) or members[over]
        elif init := re.match(call, line):
            variable, kind, count = init.groups()
            for member in members.get(variable, [variable.removeprefix("shared.")]):
                found[member + (kind or "").replace("->", ".")] = written.get(count, count)
    return found


@pytest.mark.parametrize(
    "file",
    [
        "forward/fwd_storage.cuh",
        "backward/main/bwd_storage.cuh",
        "backward/dmask/dmask_tiles.cuh",
        "backward/distance/distance_tiles.cuh",
    ],
)
def test_table_of_barriers(file: str) -> None:
    source = (SM90 / file).read_text()
    # name, who arrives, count, parity, who waits
    row = r"^//   (\S+) +\S.*? +(\d|(?:\d )?kGroups) +[01]  \S"
    rows = [(re.sub(r"\[\w+\]", "", name), n) for name, n in re.findall(row, source, re.M)]
    assert sorted(name for name, _ in rows) == sorted(_declared(source))
    counts = _initialised(source)
    counts.pop("queue", None)  # by TileQueue::init
    assert counts == {name: n for name, n in rows if not name.startswith("queue.")}
