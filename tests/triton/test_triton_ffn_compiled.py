"""The feed-forward network in Triton, compiled for GPUs that are not present: no spills, tensor
cores in use, shared memory within the limit.
"""

import re
from functools import partial
from typing import Any

import pytest
import torch
from compiled_kernels import (
    GENERATIONS,
    LEAST_SHARED_MEMORY,
    TENSOR,
    allocated_for,
    by_name,
    check_memory,
    compiled_for,
    compiles,
    in_turns,
    instructions,
    spilled,
)
from torch import Tensor

from fastattn.ops.ffn import triton as launchers
from fastattn.ops.ffn.calls import BackwardCall, ForwardCall
from fastattn.ops.ffn.config import _TILES, GATED, Up, UpTile, family

slow = pytest.mark.slow


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _launch_forward(
    tile: UpTile | None, activation: str, dtype: torch.dtype = torch.bfloat16, p: float = 0.0,
    residual: bool = True, sizes: tuple[int, int, int] = (8192, 1024, 4096),
) -> None:  # fmt: skip
    rows, D, F = sizes
    W = 2 * F if activation in GATED else F
    e = partial(_empty, dtype=dtype)
    call = ForwardCall(
        e(rows, D), e(W, D), e(W), e(D, F), e(D), e(rows, D) if residual else None,
        activation, p, p, _empty(1, dtype=torch.int64), 3,
    )  # fmt: skip
    launchers.ffn_fwd_with_config(Up(tile, "tested"), call, e(rows, D), e(rows, W))


def _launch_backward(
    activation: str, dtype: torch.dtype = torch.bfloat16, p: float = 0.0,
    sizes: tuple[int, int, int] = (8192, 1024, 4096),
) -> None:  # fmt: skip
    rows, D, F = sizes
    W = 2 * F if activation in GATED else F
    e = partial(_empty, dtype=dtype)
    call = BackwardCall(
        e(rows, D), e(rows, D), e(W, D), e(W), e(D, F), e(D), e(rows, W), activation, p, p,
        _empty(1, dtype=torch.int64), 3, [True] * 5,
    )  # fmt: skip
    workspace = [_empty(*size, dtype=d) for size, d, _ in launchers.ffn_bwd_workspace(call)]
    launchers.ffn_bwd(call, e(rows, D), e(W, D), e(W), e(D, F), e(D), *workspace)


def _wide_loads(code: str) -> int:
    """The number of loads of 16 bytes per thread."""
    return len(re.findall(r"LDG\.E\.128|(?:global|buffer)_load_dwordx4", code))


HOPPERS_GATE = ("sm_90", "swiglu")


@compiles
@pytest.mark.parametrize("arch, activation, p", [
    pytest.param(arch, activation, p, marks=() if (arch, activation) == HOPPERS_GATE else slow)
    for arch in GENERATIONS
    for p, activation in sorted(in_turns(arch, (0.0, 0.1), ("relu", "gelu", "swiglu")))
])  # fmt: skip
def test_elementwise_kernels_compile(arch: str, activation: str, p: float) -> None:
    """Without spills, and with loads of 16 bytes."""
    with compiled_for(arch) as found:
        _launch_forward(None, activation, p=p)
        _launch_backward(activation, p=p)
    kernels = by_name(found)
    names = {"finish_kernel", "drop_gradient_kernel", "differentiate_kernel", "sum_groups_kernel"}
    if activation != "relu" or p:
        names.add("activate_kernel")
    assert set(kernels) == names
    for kernel in kernels.values():
        assert spilled(kernel) == 0 and _wide_loads(instructions(kernel)) > 0


_ACTIVATIONS = ("relu", "gelu", "swiglu")


def _product_cases() -> list[Any]:
    """(arch, tile, activation): each tile with some activation, those in use with all of them."""
    cases = []
    for arch in GENERATIONS:
        for i, tile in enumerate(_TILES[family(arch)]):
            for activation in _ACTIVATIONS if i == 0 else (_ACTIVATIONS[i % 3],):
                quick = i == 0 and (arch, activation) == HOPPERS_GATE
                size = f"{tile.block_m}x{tile.block_n}x{tile.warps}x{tile.stages}"
                name = f"{arch}-{activation}-{size}-{tile.programs}"
                case = (arch, tile, activation)
                cases.append(pytest.param(*case, marks=() if quick else slow, id=name))
    return cases


@compiles
@pytest.mark.parametrize("arch, tile, activation", _product_cases())
def test_first_product_compiles(arch: str, tile: UpTile, activation: str) -> None:
    """With dropout: tensor cores in use, no spills, shared memory within the limit."""
    with compiled_for(arch) as found:
        _launch_forward(tile, activation, p=0.1)
    kernel = by_name(found)["up_kernel"]
    assert kernel.metadata.shared <= LEAST_SHARED_MEMORY[arch]
    code = instructions(kernel)
    assert re.search(TENSOR[arch], code) and spilled(kernel) == 0
    if arch == "sm_90":
        # At most three waits: in the loop, after it, before the epilogue. ptxas adds more if it
        # serialises WGMMA (C7510 to C7515).
        assert code.count("WARPGROUP.DEPBAR") <= 3
        assert ("cp.async.bulk.tensor" in kernel.asm["ptx"]) == tile.tma
        # WGMMA overlaps with the next loads.
        assert "pendings = 1" in kernel.asm["ttgir"]


@compiles
@slow
@pytest.mark.parametrize("arch", ["sm_89", "sm_120"])
def test_fits_on_consumer_gpus(arch: str) -> None:
    """They get sm_80's configs, but on sm_120 other passes of the compiler."""
    with allocated_for(arch) as found:
        for tile in (*_TILES[family(arch)], None):
            _launch_forward(tile, "swiglu", p=0.1)
        _launch_backward("swiglu", p=0.1)
    assert set(by_name(found)) >= {"up_kernel", "activate_kernel", "differentiate_kernel"}
    check_memory(found, arch)


@compiles
def test_descriptors_only_for_aligned_strides() -> None:
    """The stride of rows of 1001 elements is not a multiple of 16 bytes."""
    tile = UpTile(64, 64, 64, 4, 2, subtiles=1, tma=True)
    for sizes, tma in (((256, 1024, 128), True), ((256, 1001, 128), False)):
        with compiled_for("sm_90") as found:
            _launch_forward(tile, "relu", sizes=sizes)
        assert ("cp.async.bulk.tensor" in by_name(found)["up_kernel"].asm["ptx"]) == tma
