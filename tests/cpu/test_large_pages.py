"""Memory that is in use moves to large pages; what it holds stays."""

import ctypes
import mmap
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fastattn.ops import library_unavailable, move_to_large_pages

PAGE = 2 << 20
_COLLAPSE = 25


def _memory(pages: int) -> tuple[mmap.mmap, int]:
    """Touched small pages, and the address of the first of `pages` large pages within."""
    memory = mmap.mmap(-1, (pages + 1) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, len(memory), mmap.PAGESIZE):
        memory[at] = 1
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return memory, -(-start // PAGE) * PAGE


def _large_bytes(address: int) -> int:
    """Bytes in large pages of the mapping that holds the address."""
    inside = False
    with open("/proc/self/smaps") as file:
        for line in file:
            first, *rest = line.split()
            if not first.endswith(":"):
                begin, end = (int(number, 16) for number in first.split("-"))
                inside = begin <= address < end
            elif inside and first == "AnonHugePages:":
                return int(rest[0]) << 10
    return 0


@pytest.fixture(scope="module", autouse=True)
def _needs_linux_that_moves_pages() -> Iterator[None]:
    if why := library_unavailable("cpu"):
        pytest.skip(why)
    _kept, address = _memory(1)
    libc = ctypes.CDLL(None)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), _COLLAPSE) != 0:
        pytest.skip("the system moves no memory to large pages")
    yield


def test_weights_move_and_keep_their_values() -> None:
    # 40 MB each: malloc maps more than 32 MB anew, not in a heap that may have large pages.
    weights = [torch.randn(160, 1 << 16) for _ in range(2)]
    before = [(w.data_ptr(), w.clone()) for w in weights]
    large = sum(_large_bytes(address) for address, _ in before)
    move_to_large_pages([weights[0], nn.Parameter(weights[1])[3:5]])
    for weight, (address, values) in zip(weights, before, strict=True):
        assert weight.data_ptr() == address
        assert torch.equal(weight, values)
    assert sum(_large_bytes(address) for address, _ in before) >= large + 2 * (40 << 20) - 4 * PAGE


def test_only_pages_move_that_are_covered_by_half() -> None:
    _kept, address = _memory(5)
    before = _large_bytes(address)
    quarter = PAGE // 4
    # A quarter of the first page, all of the second, a half of the third in two parts, a quarter of
    # the fourth.
    ranges = {3 * quarter: 5 * quarter, 8 * quarter: quarter, 11 * quarter: 2 * quarter}
    torch.ops.fastattn_cpu.move_to_large_pages(
        [address + offset for offset in ranges], list(ranges.values())
    )
    assert _large_bytes(address) == before + 2 * PAGE
