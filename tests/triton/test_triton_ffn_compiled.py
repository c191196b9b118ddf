"""The feed-forward network in Triton, compiled for GPUs that are not present: no spills, tensor
cores in use, shared memory within the limit.
"""

# ruff: noqa: E402  (where Triton is missing, none of the kernels can be imported)

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
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

from fastattn.ops.ffn import triton as launchers
from fastattn.ops.ffn.calls import BackwardCall, ForwardCall
from fastattn.ops.ffn.config import (
    GATED,
    BackwardConfig,
    ForwardConfig,
    GemmTile,
    Product,
    tiles,
)

slow = pytest.mark.slow


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _launch_forward(
    config: ForwardConfig,
    activation: str,
    dtype: torch.dtype = torch.bfloat16,
    p: float = 0.0,
    residual: bool = True,
    sizes: tuple[int, int, int] = (8192, 1024, 4096),
) -> None:
    rows, D, F = sizes
    W = 2 * F if activation in GATED else F
    e = partial(_empty, dtype=dtype)
    call = ForwardCall(
        e(rows, D), e(W, D), e(W), e(D, F), e(D), e(rows, D) if residual else None,
        activation, p, p, _empty(1, dtype=torch.int64), 3,
    )  # fmt: skip
    launchers.ffn_fwd_with_config(config, call, e(rows, D), e(rows, W))


def _launch_backward(
    config: BackwardConfig,
    activation: str,
    dtype: torch.dtype = torch.bfloat16,
    p: float = 0.0,
    sizes: tuple[int, int, int] = (8192, 1024, 4096),
) -> None:
    rows, D, F = sizes
    W = 2 * F if activation in GATED else F
    e = partial(_empty, dtype=dtype)
    call = BackwardCall(
        e(rows, D), e(rows, D), e(W, D), e(W), e(D, F), e(D), e(rows, W), activation, p, p,
        _empty(1, dtype=torch.int64), 3, [True] * 5,
    )  # fmt: skip
    launchers.ffn_bwd_with_config(config, call, e(rows, D), e(W, D), e(W), e(D, F), e(D))


TORCH = Product(None, "torch.mm")
TORCH_FORWARD = ForwardConfig(TORCH, TORCH)
TORCH_BACKWARD = BackwardConfig(TORCH, TORCH, TORCH, TORCH)
PRODUCT_KERNELS = ("up_kernel", "down_kernel", "dhidden_kernel", "product_kernel")


def _wide_loads(code: str) -> int:
    """The number of loads of 16 bytes per thread."""
    return len(re.findall(r"LDG\.E\.128|(?:global|buffer)_load_dwordx4", code))


HOPPERS_GATE = ("sm_90", "swiglu")


@compiles
@pytest.mark.parametrize(
    "arch, activation, p",
    [
        pytest.param(arch, activation, p, marks=() if (arch, activation) == HOPPERS_GATE else slow)
        for arch in GENERATIONS
        for p, activation in sorted(in_turns(arch, (0.0, 0.1), ("relu", "gelu", "swiglu")))
    ],
)
def test_elementwise_kernels_compile(arch: str, activation: str, p: float) -> None:
    """Without spills, and with loads of 16 bytes."""
    with compiled_for(arch) as found:
        _launch_forward(TORCH_FORWARD, activation, p=p)
        _launch_backward(TORCH_BACKWARD, activation, p=p)
    kernels = by_name(found)
    names = {"finish_kernel", "drop_gradient_kernel", "differentiate_kernel", "sum_groups_kernel"}
    if activation != "relu" or p:
        names.add("activate_kernel")
    assert set(kernels) == names
    for kernel in kernels.values():
        assert spilled(kernel) == 0 and _wide_loads(instructions(kernel)) > 0


_PRODUCTS = ("up", "down", "dhidden", "dx", "dw1")
_ACTIVATIONS = ("relu", "gelu", "swiglu")
_WITH_ACTIVATION = ("up", "dhidden")


def _its_turn(product: str, activation: str, i: int) -> bool:
    """Whether a bf16 product is compiled for Hopper with its i-th tile and this activation. Each
    tile is compiled with some activation; dx and dw1, which have the same kernel, share the tiles.
    """
    if i == 0 or product == "down":
        return True
    if product == "up":
        return activation == _ACTIVATIONS[i % 3]
    if product == "dhidden":  # gated activations have other tiles
        return activation == ("relu", "gelu")[i % 2] or activation == "swiglu"
    return product == ("dx", "dw1")[i % 2]


def _product_cases() -> list[Any]:
    """(arch, dtype, product, tile, activation): a few in every run, all in the slow run."""
    cases = []
    for arch in GENERATIONS:
        for dtype in (torch.bfloat16, torch.float32):
            every = arch == "sm_90" and dtype == torch.bfloat16
            pairs = in_turns(arch, _PRODUCTS, _ACTIVATIONS, whole=_PRODUCTS if every else ())
            if arch == "sm_90":
                pairs |= {(product, "swiglu") for product in _WITH_ACTIVATION}
            pairs = {pair for pair in pairs if pair[0] in _WITH_ACTIVATION}
            pairs |= {(product, "relu") for product in _PRODUCTS if product not in _WITH_ACTIVATION}
            for product, activation in sorted(pairs):
                known = tiles(arch, dtype, product, activation)
                # The tuner starts from the first one.
                for i, tile in enumerate(known if every else known[:1]):
                    if not _its_turn(product, activation, i):
                        continue
                    always = every and i == 0
                    always = always and (activation == "gelu" or product in ("down", "dw1"))
                    short = str(dtype).removeprefix("torch.")
                    size = f"{tile.block_m}x{tile.block_n}x{tile.warps}x{tile.stages}"
                    name = f"{arch}-{short}-{product}-{activation}-{size}-{tile.programs}"
                    case = (arch, dtype, product, tile, activation)
                    cases.append(pytest.param(*case, marks=() if always else slow, id=name))
    return cases


@compiles
@pytest.mark.parametrize("arch, dtype, product, tile, activation", _product_cases())
def test_triton_products_compile(
    arch: str,
    dtype: torch.dtype,
    product: str,
    tile: GemmTile,
    activation: str,
) -> None:
    """With dropout: tensor cores in use, no spills, shared memory within the limit."""
    if product == "dw1":
        tile = replace(tile, splits=4)
    change = {product: Product(tile, "tested")}
    with compiled_for(arch) as found:
        if product in ("up", "down"):
            _launch_forward(replace(TORCH_FORWARD, **change), activation, dtype, 0.1)
        else:
            _launch_backward(replace(TORCH_BACKWARD, **change), activation, dtype, 0.1)
    [kernel] = [k for name, k in by_name(found).items() if name in PRODUCT_KERNELS]
    assert kernel.metadata.shared <= LEAST_SHARED_MEMORY[arch]
    if dtype == torch.float32 and arch != "gfx942":
        # Three TF32 products, not one.
        assert "inputPrecision = tf32x3" in kernel.asm["ttir"]
    code = instructions(kernel)
    assert re.search(TENSOR[arch], code) and spilled(kernel) == 0
    if arch == "sm_90":
        # At most three waits: in the loop, after it, before the epilogue. ptxas adds more if it
        # serialises WGMMA (C7510 to C7515).
        assert code.count("WARPGROUP.DEPBAR") <= 3
        assert ("cp.async.bulk.tensor" in kernel.asm["ptx"]) == tile.tma
        # WGMMA overlaps with the next loads, except with three TF32 products.
        assert dtype == torch.float32 or "pendings = 1" in kernel.asm["ttgir"]


@compiles
@slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fits_on_consumer_blackwell(dtype: torch.dtype) -> None:
    """sm_120 gets sm_80's configs, but other passes of the compiler."""
    arch = "sm_120"

    def tile(product: str) -> Product:
        return Product(tiles(arch, dtype, product, "swiglu")[0], "tested")

    forward = ForwardConfig(tile("up"), tile("down"))
    backward = BackwardConfig(*map(tile, ("dhidden", "dx", "dw1", "dw2")))
    with allocated_for(arch) as found:
        _launch_forward(forward, "swiglu", dtype, 0.1)
        _launch_backward(backward, "swiglu", dtype, 0.1)
        _launch_forward(TORCH_FORWARD, "swiglu", dtype, 0.1)
        _launch_backward(TORCH_BACKWARD, "swiglu", dtype, 0.1)
    assert set(by_name(found)) >= {*PRODUCT_KERNELS, "activate_kernel", "differentiate_kernel"}
    check_memory(found, arch)


@compiles
def test_descriptors_only_for_aligned_strides() -> None:
    """The stride of rows of 1001 elements is not a multiple of 16 bytes."""
    tile = Product(GemmTile(64, 64, 64, 4, 2, tma=True), "tested")
    config = ForwardConfig(tile, TORCH)
    for sizes, tma in (((256, 1024, 128), True), ((256, 1001, 128), False)):
        with compiled_for("sm_90") as found:
            _launch_forward(config, "relu", sizes=sizes)
        assert ("cp.async.bulk.tensor" in by_name(found)["up_kernel"].asm["ptx"]) == tma
