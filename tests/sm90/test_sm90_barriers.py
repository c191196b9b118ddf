"""The tables of barriers at the top of the Hopper kernels' shared memory name each barrier once."""

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


@pytest.mark.parametrize(
    "file", ["forward/storage.cuh", "backward/storage.cuh", "backward/dmask_tiles.cuh"]
)
def test_table_of_barriers(file: str) -> None:
    source = (SM90 / file).read_text()
    # name, who arrives, count, parity, who waits
    row = r"^//   (\S+) +\S.* +(?:\d|(?:\d )?kGroups) +[01]  \S"
    names = [re.sub(r"\[\w+\]", "", name) for name in re.findall(row, source, re.M)]
    assert sorted(names) == sorted(_declared(source))
