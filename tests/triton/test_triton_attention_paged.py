"""Attention over keys and values in pages in Triton: the cache of launches, and the code compiled
for GPUs that are not present. test_triton_attention.py has the samples.
"""

import itertools
import re
from typing import Any

import pytest
import torch
from compiled_kernels import (
    allocated_for,
    by_name,
    check_memory,
    check_registers,
    compiled_for,
    compiles,
    instructions,
)
from op_examples import assert_same_bits
from torch import Tensor
from triton_values import DEVICE, runs

from fastattn.ops.attention.calls import ForwardCall
from fastattn.ops.attention.triton import forward as kernels
from fastattn.ops.attention.triton.fwd_config import Features, forward_config

slow = pytest.mark.slow
# Kernels divide by empty sums and select the result away, and dead rows hold NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


# -- values ---------------------------------------------------------------------------------------
@runs
def test_cache_tells_block_tables_apart() -> None:
    """By their strides and sizes, and pages by their size."""
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(8, 32, 2, 16, generator=generator).half().to(DEVICE).transpose(1, 2)
    q = torch.randn(2, 2, 3, 16, generator=generator).half().to(DEVICE)
    table = torch.tensor([[5, 1, 3, 2], [0, 7, 6, 4]], dtype=torch.int32, device=DEVICE)
    tables = (table, table[:, :3], table.t().contiguous().t())
    for pages, t in itertools.product((k, k[:, :, :16]), tables):
        whole = torch.stack([torch.cat([pages[p] for p in row], 1) for row in t.tolist()])
        out, lse = torch.empty_like(q), torch.empty(2, 2, 3, device=DEVICE)
        expected = torch.empty_like(q), torch.empty(2, 2, 3, device=DEVICE)
        call = ForwardCall(q, pages, pages, scale=0.25, block_table=t)
        kernels.attention_fwd(call, out, lse)
        kernels.attention_fwd(ForwardCall(q, whole, whole, scale=0.25), *expected)
        assert_same_bits((out, lse), expected)


@pytest.mark.parametrize("page", [8, 48, 512])
def test_refuses_pages_of_other_sizes(page: int) -> None:
    q, k = torch.empty(1, 1, 1, 16), torch.empty(2, 1, page, 16)
    table = torch.zeros(1, 1, dtype=torch.int32)
    reason = str(kernels.attention_fwd_unsupported(ForwardCall(q, k, k, block_table=table)))
    assert reason == f"handles pages of 16, 32, 64, 128, 256 keys, got {page}"


# -- compiled -------------------------------------------------------------------------------------
def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _launch(
    D: int, page: int, M: int = 1, mask: torch.dtype | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    """1024 keys, grouped heads, lengths; page 0: contiguous keys."""
    q, out, lse = _empty(2, 8, M, D, dtype=dtype), _empty(2, 8, M, D, dtype=dtype), _empty(2, 8, M)
    dense = None if mask is None else _empty(2, 1, M, 1024, dtype=mask)
    table = _empty(2, 1024 // page, dtype=torch.int32) if page else None
    keys = (2048 // page, page) if page else (2, 1024)
    k = _empty(*keys, 2, D, dtype=dtype).transpose(1, 2)
    call = ForwardCall(
        q, k, k, dense, key_lengths=_empty(2, dtype=torch.int32), causal=3, scale=0.125,
        block_table=table,
    )  # fmt: skip
    workspace = kernels.attention_fwd_workspace(call)
    kernels.attention_fwd(call, out, lse.float(), *_buffers(workspace))


def _buffers(workspace: Any) -> list[Tensor]:
    return [_empty(*shape, dtype=dtype) for shape, dtype, _ in workspace]


def _forward(found: list[Any]) -> Any:
    return by_name(found)["attention_fwd_kernel"]


# Bytes of a thread (AMD: registers); 0 where nothing is stated. Tiles of 256 columns that are read
# by pointers leave too few registers; on sm_80 one query spills outside the loops.
_SPILLS = {("sm_90", 256, 1024): 144, ("sm_100", 256, 1024): 16, ("sm_80", 128, 1): 8}
_QUICKLY_COMPILED = {("sm_90", 128, 64, 1), ("sm_90", 64, 16, 1024)}


def _compiled() -> list[Any]:
    """(arch, D, page, queries): pages smaller than tiles, as large, and larger. Each with one query
    or with many, on Hopper with both.
    """
    cases = []
    for i, arch in enumerate(("sm_80", "sm_90", "sm_100", "gfx942")):
        for j, (D, page) in enumerate(((64, 16), (128, 64), (256, 256))):
            for M in (1, 1024) if arch == "sm_90" else ((1, 1024)[(i // 2 + j) % 2],):
                marks = () if (arch, D, page, M) in _QUICKLY_COMPILED else slow
                name = f"{arch}-{D}-page{page}-{M}"
                cases.append(pytest.param(arch, D, page, M, marks=marks, id=name))
    return cases


@compiles
@pytest.mark.parametrize("arch, D, page, M", _compiled())
def test_compiles(arch: str, D: int, page: int, M: int) -> None:
    """Keys and values are read 16 bytes at a time."""
    with compiled_for(arch) as found:
        _launch(D, page, M)
    kernel = _forward(found)
    check_memory(found, arch)
    check_registers(kernel, arch, _SPILLS.get((arch, D, M), 0))
    wide = r"LDGSTS\S*\.128|LDG\.E\.128|(?:global|buffer)_load_dwordx4"
    assert re.search(wide, instructions(kernel))


@compiles
@slow
@pytest.mark.parametrize("mask", [torch.bool, torch.bfloat16])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_masks_compile_without_spills(arch: str, mask: torch.dtype) -> None:
    with compiled_for(arch) as found:
        _launch(64, 16, 1024, mask)
    check_registers(_forward(found), arch, 0)


@compiles
@pytest.mark.parametrize("mask", [None, pytest.param(torch.bool, marks=slow)])
@pytest.mark.parametrize("D", [64, 128])
def test_as_many_tiles_are_on_their_way_as_without_pages(D: int, mask: torch.dtype | None) -> None:
    """The load pipeline has stages of its own for the numbers of pages."""
    rows = [forward_config("sm_80", torch.bfloat16, D, D, 1, Features(pages=p)) for p in (0, 1)]
    assert rows[1].stages > rows[0].stages > 1
    with allocated_for("sm_80") as found:
        for page in (0, 16, 256):
            _launch(D, page, mask=mask)
    contiguous, *paged = (k.metadata.shared for k in found if "fwd" in k.metadata.name)
    for shared in paged:
        assert contiguous <= shared <= contiguous + 1024


@compiles
@slow
@pytest.mark.parametrize("arch, D", [("sm_86", 64), ("sm_86", 256), ("sm_90", 256)])
def test_fits_in_shared_memory(arch: str, D: int) -> None:
    with allocated_for(arch) as found:
        for mask, dtype in ((torch.float64, torch.bfloat16), (torch.float32, torch.float32)):
            _launch(D, 16, 1024, mask, dtype)
    check_memory(found, arch)
