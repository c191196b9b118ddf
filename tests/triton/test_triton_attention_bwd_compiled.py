"""The backward of attention in Triton, compiled for GPUs that are not present: no spills
in the loops that matter, tensor cores in use, shared memory within the limit.
"""

# ruff: noqa: E402  (where Triton is missing, none of the kernels can be imported)

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
from attention_options import packing
from compiled_kernels import (
    SHARED_MEMORY,
    TARGETS,
    TENSOR,
    allocated_for,
    by_name,
    check_memory,
    check_registers,
    compiled_for,
    compiles,
    cross_section,
    instructions,
    loops,
    on_each_gpu,
    spills_and_registers,
)

from fastattn.ops.attention import prepared
from fastattn.ops.attention.calls import BackwardCall
from fastattn.ops.attention.triton import backward as launchers
from fastattn.ops.attention.triton.bwd_config import BwdConfig, BwdTile

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": 2},
    "grouped": {"causal": 2, "K": 2},
    "lengths": {"key_lengths": 1, "query_lengths": True},
    "row_lengths": {"key_lengths": 2, "causal": 1},
    "bool": {"mask": (torch.bool, (2, 1, 1024, 1024))},
    "padding": {"mask": (torch.bool, (2, 1, 1, 1024))},
    "prepared": {"mask": (torch.bool, (2, 1, 1024, 1024)), "words": True},
    "bias": {"mask": (torch.bfloat16, (1, 4, 1024, 1024))},
    "fp32_bias": {"mask": (torch.float32, (1, 4, 1, 1024)), "causal": 1},
    "dropout": {"dropout_p": 0.1, "causal": 2},
    "fp32": {"dtype": torch.float32, "causal": 2},
    "ragged": {"M": 1001},
    "softcap": {"softcap": 30.0, "causal": 2},
    "sinks": {"sinks": True, "causal": 2},
    "distance": {"distance": 1, "causal": 2},
    "distance_batch": {"distance": 2, "key_lengths": 1, "query_lengths": True, "causal": 3},
    "own_diagonals": {"key_lengths": 1, "query_lengths": True, "causal": 3},
}


def _launch(
    D: int,
    E: int | None = None,
    *,
    M: int = 1024,
    N: int = 1024,
    K: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    dout: bool = True,
    mask: tuple[torch.dtype, tuple[int, ...]] | None = None,
    words: bool = False,
    key_lengths: int = 0,
    query_lengths: bool = False,
    causal: int = 0,
    left: int = -1,
    dropout_p: float = 0.0,
    softcap: float = 0.0,
    sinks: bool = False,
    distance: int = 0,
    dq_alone: bool = False,
    config: BwdConfig | None = None,
) -> None:
    """A backward as the op would launch it, on tensors without memory."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    E = E or D
    q, k, v, out = empty(2, 4, M, D), empty(2, K, N, D), empty(2, K, N, E), empty(2, 4, M, E)
    lse = empty(2, 4, M, dtype=torch.float32)
    bias = None if mask is None else empty(*mask[1], dtype=mask[0])
    lengths = empty(*(2, M)[:key_lengths], dtype=torch.int32) if key_lengths else None
    sink = empty(4, dtype=torch.float32) if sinks else None
    by_distance = empty(distance, 4, M + N - 1, dtype=torch.float32) if distance else None
    needs = [True, True, True, bias is not None and bias.is_floating_point(), distance > 0, sinks]
    if dq_alone:
        needs[1:] = [False] * 5
    call = BackwardCall(
        out if dout else None, None if dout else lse, out, lse, q, k, v,
        bias, prepared.classify(bias) if words else None, lengths,
        empty(2, dtype=torch.int32) if query_lengths else None, None, None, 0, 0,
        by_distance, sink, softcap, causal, left, -1, 0.125, dropout_p,
        empty(1, dtype=torch.int64) if dropout_p else None, 3, None, needs,
    )  # fmt: skip
    gradients = zip((q, k, v, bias, by_distance, sink), needs, strict=True)
    results = [x if x is not None and needed else empty(0) for x, needed in gradients]
    if config is not None:
        launchers.attention_bwd_with_config(config, call, *results)
        return
    workspace = [
        empty(*shape, dtype=dtype) for shape, dtype, _ in launchers.attention_bwd_workspace(call)
    ]
    launchers.attention_bwd(call, *results, *workspace)


def _count(pattern: str, code: Sequence[str]) -> int:
    return sum(bool(re.search(pattern, line)) for line in code)


# The kernels over whole tiles; the others read masks or add up, once a call.
MAIN = ("attention_bwd_dq_kernel", "attention_bwd_dkdv_kernel")


def _examine(kernel: Any, arch: str) -> None:
    """Checks memory, tensor-core instructions, and spills in the loops that take most time."""
    name = kernel.metadata.name
    check_memory([kernel], arch)
    if arch == "gfx942":
        assert name not in MAIN or re.search(TENSOR[arch], instructions(kernel))
        check_registers(kernel, arch, 2 if name in MAIN else 0)
        return
    if name not in MAIN:
        return
    wanted = TENSOR[arch]
    if "tf32x3" in kernel.asm["ttir"]:  # blocks of 32: mma.sync everywhere
        wanted = r"\bHMMA"
    bodies = [body for body in loops(kernel) if _count(wanted, body)]
    assert bodies, f"{name} has no loop with {wanted}"
    # The first loop runs over full tiles: at most two registers out and in, of fp32's long loops
    # one instruction in 64.
    most = len(bodies[0]) // 64 if "tf32x3" in kernel.asm["ttir"] else 4
    assert _count(r"\b(STL|LDL)", bodies[0]) <= most, f"{name} spills in its loop over full tiles"
    if arch == "sm_90" and wanted == r"\bHGMMA":
        # More waits than that, and ptxas has serialised the products of a warpgroup.
        for body in bodies:
            assert _count(r"WARPGROUP\.DEPBAR", body) <= max(8, _count(wanted, body) // 2), name
    # Around those loops, and in those over edge tiles, a little may be kept in memory.
    check_registers(kernel, arch, 384)


# Features that always run; the slow run adds one feature at every head dim, on Hopper all at 64.
_ALWAYS: dict[str, dict[int, tuple[str, ...]]] = {
    "sm_80": {64: ("causal",)},
    "sm_90": {64: ("bool",), 128: ("bias",)},
    "sm_100": {128: ("causal",)},
    "gfx942": {64: ("padding",)},
}


def _shipped() -> list[Any]:
    some, cases = ("causal", "lengths", "bool"), []
    for arch in TARGETS:
        if arch == "sm_89":
            continue  # test_ada_gets_the_code_of_ampere
        features_of_64 = FEATURES if arch == "sm_90" else some[:1]
        for sizes, features in (((64,), features_of_64), ((80, 128, 192, 256), some)):
            cases += cross_section(arch, _ALWAYS.get(arch, {}), sizes, features)
    return cases


@compiles
@pytest.mark.parametrize("arch, D, feature", _shipped())
def test_compiles(arch: str, D: int, feature: str) -> None:
    with compiled_for(arch) as found:
        _launch(D, **FEATURES[feature])
    assert {kernel.metadata.name for kernel in found} >= set(MAIN)
    for kernel in found:
        _examine(kernel, arch)


# Features that take most shared memory: a mask's tiles beside operands, bounds, dropout's keys.
_BOUNDS: dict[str, Any] = {
    "causal": 2, "key_lengths": 1, "query_lengths": True, "dropout_p": 0.1,
}  # fmt: skip
LARGEST: dict[str, dict[str, Any]] = {
    "bias": _BOUNDS | {"mask": (torch.bfloat16, (2, 4, 1024, 1024))},
    "fp64_bias": _BOUNDS | {"mask": (torch.float64, (2, 4, 1024, 1024))},
    "bounds": _BOUNDS,
    "distance": _BOUNDS | {"mask": (torch.float64, (2, 4, 1024, 1024)), "distance": 2},
    "fp32": _BOUNDS | {"mask": (torch.float32, (2, 4, 1024, 1024)), "dtype": torch.float32},
}
# Where there are 99 KB, wide masks and others have rows of their own. All NVIDIA GPUs share those
# of fp32; sm_86 and sm_120 share all.
_LARGEST_ON = {
    **dict.fromkeys(("sm_80", "sm_90", "sm_100"), ("bounds", "fp64_bias", "distance")),
    "sm_86": LARGEST,
    "sm_120": ("bias", "fp32"),
    "gfx942": ("fp64_bias", "fp32", "distance"),
}


@compiles
@pytest.mark.parametrize(
    "arch, D, feature", on_each_gpu((64, 128, 256), _LARGEST_ON, [("sm_86", 256, "bias")])
)
def test_fits_in_shared_memory(arch: str, D: int, feature: str) -> None:
    with allocated_for(arch) as found:
        _launch(D, **LARGEST[feature])
    assert set(by_name(found)) >= set(MAIN)
    check_memory(found, arch)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_86", "sm_120"])
def test_fp32_of_head_dim_96_fits_in_shared_memory(arch: str) -> None:
    """Both its head dims are padded to 128."""
    with allocated_for(arch) as found:
        _launch(96, **LARGEST["fp32"])
    check_memory(found, arch)


@compiles
@pytest.mark.slow
def test_head_dim_192_fits_in_shared_memory() -> None:
    """A row of its own on sm_80."""
    with allocated_for("sm_80") as found:
        _launch(192, **LARGEST["bounds"])
    check_memory(found, "sm_80")


@compiles
@pytest.mark.slow
def test_ada_gets_the_code_of_ampere() -> None:
    """So the tests above leave sm_89 out."""
    with allocated_for("sm_86") as ampere:
        _launch(64, causal=2)
    with allocated_for("sm_89") as ada:
        _launch(64, causal=2)
    for kernel, twin in zip(ada, ampere, strict=True):
        assert kernel.asm["ttgir"].replace("cuda:89", "cuda:86") == twin.asm["ttgir"]


def _launch_packed(D: int, *, heads: int, left: int = -1, dropout_p: float = 0.0) -> None:
    """Eight sequences under causality, two heads of keys, on tensors without memory."""
    q, k = (torch.empty(4096, H, D, dtype=torch.bfloat16, device="meta") for H in (heads, 2))
    offsets = torch.empty(9, dtype=torch.int32, device="meta")
    seed = torch.empty(1, dtype=torch.int64, device="meta") if dropout_p else None
    call = BackwardCall(
        q, None, q, torch.empty(heads, 4096, device="meta"), q, k, k,
        **packing(offsets, offsets, 700, 700), causal=2, window_left=left, scale=0.125,
        dropout_p=dropout_p, dropout_seed=seed, needs=[True, True, True, False, False, False],
    )  # fmt: skip
    workspace = [
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype, _ in launchers.attention_bwd_workspace(call)
    ]
    none = torch.empty(0, device="meta")
    launchers.attention_bwd(call, q, k, k, none, none, none, *workspace)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_packed_compiles(arch: str, dropout_p: float) -> None:
    with compiled_for(arch) as found:
        _launch_packed(64, heads=8, left=200, dropout_p=dropout_p)
    assert {kernel.metadata.name for kernel in found} >= set(MAIN)
    for kernel in found:
        _examine(kernel, arch)


@compiles
@pytest.mark.parametrize("left", [pytest.param(-1, marks=pytest.mark.slow), 200])
@pytest.mark.parametrize("heads", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_packed_full_tiles_load_lse_and_delta_in_vectors(heads: int, left: int) -> None:
    """With 128 columns dk and dv leave no registers for the addresses of single rows."""
    with compiled_for("sm_90") as found:
        _launch_packed(128, heads=heads, left=left)
    dkdv = next(kernel for kernel in found if kernel.metadata.name == MAIN[1])
    full_tiles = loops(dkdv)[0]
    # Triton 3.6: each thread copies its 16 rows by two; 3.8: one row, the threads share them.
    assert 0 < _count(r"\bLDGSTS", full_tiles) <= 8 and not _count(r"\bLDG\.", full_tiles)
    assert _count(r"\b(STL|LDL)", full_tiles) <= 5


@compiles
@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_programs_of_dq_share_an_sm(packed: bool) -> None:
    """With dropout, which takes most registers, although no key of a row or column is hashed
    between four weights.
    """
    with compiled_for("sm_90") as found:
        if packed:
            _launch_packed(64, heads=8, dropout_p=0.1)
        else:
            _launch(64, key_lengths=1, query_lengths=True, causal=2, dropout_p=0.1)
    dq, dkdv = (kernel for kernel in found if kernel.metadata.name in MAIN)
    _examine(dq, "sm_90")
    _two_share_an_sm(dq)
    for kernel in (dq, dkdv):
        a_tile = max(loops(kernel), key=len)
        # 64 x 128 weights of 256 threads.
        assert _count(r"0x7feb352d", a_tile) == 64 * 128 // 256 // 4, kernel.metadata.name


def _two_share_an_sm(kernel: Any) -> None:
    registers, threads = spills_and_registers(kernel)[1], kernel.metadata.num_warps * 32
    assert 2 * registers * threads <= 1 << 16
    assert 2 * kernel.metadata.shared <= SHARED_MEMORY["sm_90"]


@compiles
def test_dq_with_exact_delta_does_not_spill() -> None:
    """With one loop more and a head dim of two tiles, below the register cap."""
    with compiled_for("sm_90") as found:
        _launch(40, causal=2, left=8, dropout_p=0.1, dq_alone=True)
    dq = next(kernel for kernel in found if kernel.metadata.name == MAIN[0])
    bodies = [body for body in loops(dq) if _count(TENSOR["sm_90"], body)]
    assert len(bodies) == 3 and not any(_count(r"\b(STL|LDL)", body) for body in bodies)
    _two_share_an_sm(dq)


@compiles
@pytest.mark.slow
def test_fp32_pads_small_head_dims_to_one_tile() -> None:
    """Two tiles triple the instructions, and spill."""
    with compiled_for("sm_80") as found:
        _launch(40, 64, dtype=torch.float32, causal=2)
    for kernel in found:
        _examine(kernel, "sm_80")


@compiles
@pytest.mark.slow
def test_odd_strides_do_not_spill() -> None:
    """Addresses of single elements need registers beyond the cap, which is lifted."""
    with compiled_for("sm_90") as found:
        _launch(57, M=1001, N=999, causal=2)
    for kernel in found:
        _examine(kernel, "sm_90")


@compiles
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_wide_masks_fit(dtype: torch.dtype) -> None:
    """On the GPUs with the least shared memory."""
    with allocated_for("sm_86") as found:
        _launch(64, mask=(dtype, (1, 4, 1024, 1024)))
    check_memory(found, "sm_86")


@compiles
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"N": 60, "dropout_p": 0.1}, id="few keys: delta is summed once more"),
        pytest.param({"M": 1, "N": 77, "dout": False}, id="one query, only lse counts"),
        pytest.param({"M": 77, "N": 1, "dout": False}, id="one key, only lse counts"),
        pytest.param({"M": 1, "N": 1, "K": 1, "dropout_p": 0.1}, id="sizes of 1 are constants"),
    ],
)
def test_rare_options_compile(options: dict[str, Any]) -> None:
    """Options that change nothing in the interpreter."""
    with allocated_for("sm_90") as found:
        _launch(64, **options)
    assert {kernel.metadata.name for kernel in found} >= set(MAIN)


@compiles
@pytest.mark.slow
def test_examination_finds_spills() -> None:
    """A tiling with more accumulators than registers fails the examination above."""
    config = BwdConfig(BwdTile(64, 32, 4, 2), BwdTile(64, 128, 4, 1))
    with compiled_for("sm_90") as found:
        _launch(128, causal=1, config=config)
    dkdv = next(kernel for kernel in found if kernel.metadata.name == MAIN[1])
    with pytest.raises(AssertionError, match="spills in its loop"):
        _examine(dkdv, "sm_90")


@compiles
def test_check_finds_too_much_shared_memory() -> None:
    config = BwdConfig(BwdTile(128, 128, 8, 2), BwdTile(128, 128, 8, 2))
    with allocated_for("sm_86") as found:
        _launch(128, config=config)
    with pytest.raises(AssertionError, match=r"RTX 3090 \(sm_86\) has 101376"):
        check_memory(found, "sm_86")
