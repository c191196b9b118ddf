"""Attention in Triton, compiled for GPUs that are not present: no spills in the loops that matter,
tensor cores in use, shared memory within the limit.
"""

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attention_options import packing
from compiled_kernels import (
    GENERATIONS,
    SHARED_MEMORY,
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
    spilled,
    spills_and_registers,
)
from torch import Tensor

from fastattn.ops.attention import prepared
from fastattn.ops.attention.calls import BackwardCall, ForwardCall
from fastattn.ops.attention.triton import backward, forward
from fastattn.ops.attention.triton.bwd_config import BwdConfig, BwdTile
from fastattn.ops.attention.triton.fwd_config import Features, forward_config

slow = pytest.mark.slow
# Kernels divide by empty sums and select the result away, and dead rows hold NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": 2},
    "lengths": {"key_lengths": 1, "query_lengths": True},
    "row_lengths": {"key_lengths": 2, "causal": 1},
    "bool": {"mask": (torch.bool, (2, 1, 1024, 1024))},
    "padding": {"mask": (torch.bool, (2, 1, 1, 1024))},
    "prepared": {"mask": (torch.bool, (2, 1, 1024, 1024)), "words": True},
    "bias": {"mask": (torch.bfloat16, (1, 4, 1024, 1024))},
    "dropout": {"dropout_p": 0.1, "causal": 2},
    "softcap": {"softcap": 30.0, "causal": 2},
    "sinks": {"sinks": True, "causal": 2},
    "distance": {"distance": 1, "causal": 2},
    "distance_batch": {"distance": 2, "key_lengths": 1, "query_lengths": True, "causal": 3},
    "own_diagonals": {"key_lengths": 1, "query_lengths": True, "causal": 3},
}
FORWARD = FEATURES | {
    "column": {"mask": (torch.bool, (2, 1, 1024, 1))},
    "short": {"M": 1, "causal": 0},
}
BACKWARD = FEATURES | {
    "grouped": {"causal": 2, "K": 2},
    "fp32_bias": {"mask": (torch.float32, (1, 4, 1, 1024)), "causal": 1},
    "fp32": {"dtype": torch.float32, "causal": 2},
    "ragged": {"M": 1001},
}


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _buffers(workspace: Any) -> list[Tensor]:
    return [_empty(*shape, dtype=dtype) for shape, dtype, _ in workspace]


def _call(
    D: int, *, E: int | None = None, M: int = 1024, N: int = 1024, K: int = 4,
    dtype: torch.dtype = torch.bfloat16, mask: tuple[torch.dtype, tuple[int, ...]] | None = None,
    words: bool = False, key_lengths: int = 0, query_lengths: bool = False, dropout_p: float = 0.0,
    sinks: bool = False, distance: int = 0, left: int = -1, **options: Any,
) -> ForwardCall:  # fmt: skip
    """Arguments of the op without memory."""
    dense = None if mask is None else _empty(*mask[1], dtype=mask[0])
    k, v = _empty(2, K, N, D, dtype=dtype), _empty(2, K, N, E or D, dtype=dtype)
    return ForwardCall(
        _empty(2, 4, M, D, dtype=dtype), k, v, dense,
        mask_tiles=prepared.classify(dense) if words else None,
        key_lengths=_empty(*(2, M)[:key_lengths], dtype=torch.int32) if key_lengths else None,
        query_lengths=_empty(2, dtype=torch.int32) if query_lengths else None,
        distance_bias=_empty(distance, 4, M + N - 1) if distance else None,
        sinks=_empty(4) if sinks else None, window_left=left, scale=0.125, dropout_p=dropout_p,
        dropout_seed=_empty(1, dtype=torch.int64) if dropout_p else None, dropout_stream=3,
        **options,
    )  # fmt: skip


def _launch(D: int, **options: Any) -> None:
    """A forward as the op would launch it."""
    call = _call(D, **options)
    q, out = call.q, _empty(2, 4, call.q.shape[2], call.v.shape[3], dtype=call.q.dtype)
    workspace = _buffers(forward.attention_fwd_workspace(call))
    forward.attention_fwd(call, out, _empty(*q.shape[:3]), *workspace)


def _launch_backward(
    D: int, *, dout: bool = True, dq_alone: bool = False, config: BwdConfig | None = None,
    **options: Any,
) -> None:  # fmt: skip
    """A backward as the op would launch it."""
    call = _call(D, **options)
    out = _empty(*call.q.shape[:3], call.v.shape[3], dtype=call.q.dtype)
    lse = _empty(*call.q.shape[:3])
    bias = call.mask if call.mask is not None and call.mask.is_floating_point() else None
    given = (call.q, call.k, call.v, bias, call.distance_bias, call.sinks)
    needs = [x is not None and (i == 0 or not dq_alone) for i, x in enumerate(given)]
    results = [x if needed else _empty(0) for x, needed in zip(given, needs, strict=True)]
    gradients = (out, None) if dout else (None, lse)
    made = BackwardCall(*gradients, out, lse, *call, needs)
    if config is not None:
        backward.attention_bwd_with_config(config, made, *results)
        return
    backward.attention_bwd(made, *results, *_buffers(backward.attention_bwd_workspace(made)))


# -- forward --------------------------------------------------------------------------------------
def _tensor_instructions(kernel: Any, arch: str) -> int:
    code = instructions(kernel)
    if arch == "sm_90":
        # One wait a product; more are ptxas's way to serialise them (C7510 to C7515).
        assert code.count("WARPGROUP.DEPBAR") <= code.count("HGMMA") // 2
    return len(re.findall(TENSOR[arch], code))


_OUTSIDE_LOOPS = 8  # bytes, of sm_120
_OTHERS = ("sm_80", "sm_100", "gfx942", "sm_120")


def _tolerated_spills(arch: str, D: int, feature: str) -> int:
    """Limits in bytes a thread: none in loops over full tiles, few in those over edge tiles and
    under dense masks, whose rows are chosen for the head dims up to 128.
    """
    if feature in ("plain", "causal", "softcap", "sinks") and D <= 128:
        return _OUTSIDE_LOOPS if arch == "sm_120" else 0
    return 96


_ALWAYS_FORWARD: dict[str, dict[int, tuple[str, ...]]] = {
    "sm_80": {64: ("bool",), 128: ("causal",)},
    "sm_90": {64: ("causal", "bias"), 128: ("lengths", "distance")},
    "sm_100": {64: ("causal",)},
    "gfx942": {64: ("padding",)},
}


def _forwards() -> list[Any]:
    """All features on Hopper; the other GPUs share them out. sm_86 has the tiles of sm_80."""
    some = ("causal", "lengths", "bool", "bias", "dropout", "short", "distance")
    cases = cross_section("sm_90", _ALWAYS_FORWARD["sm_90"], (64,), FORWARD)
    cases += cross_section("sm_90", _ALWAYS_FORWARD["sm_90"], (80, 128, 192, 256), some)
    for i, arch in enumerate(_OTHERS):
        shared = [*FORWARD][i :: len(_OTHERS)]
        cases += cross_section(arch, _ALWAYS_FORWARD.get(arch, {}), (64, 128, 256), shared)
    return cases


@compiles
@pytest.mark.parametrize("arch, D, feature", _forwards())
def test_forward_compiles(arch: str, D: int, feature: str) -> None:
    with compiled_for(arch) as found:
        _launch(D, **FORWARD[feature])
    kernel = found[-1]
    assert kernel.metadata.name == "attention_fwd_kernel"
    check_memory(found, arch)
    assert _tensor_instructions(kernel, arch) > 0 or feature == "short"
    check_registers(kernel, arch, most := _tolerated_spills(arch, D, feature))
    if most == _OUTSIDE_LOOPS:
        assert not any(re.search(r"\b(STL|LDL)", line) for body in loops(kernel) for line in body)


# Features that take most shared memory: tiles of a wide mask beside those of keys and values.
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
# sm_80 has the rows of sm_86 and more shared memory; sm_120 has sm_86's.
_LARGEST_FORWARD = {
    "sm_90": ("distance",), "sm_100": ("distance",), "sm_86": LARGEST, "sm_120": ("bias", "fp32"),
    "gfx942": ("distance", "fp32"),
}  # fmt: skip


@compiles
@pytest.mark.parametrize(
    "arch, D, feature", on_each_gpu((64, 128, 256), _LARGEST_FORWARD, [("sm_86", 256, "fp32")])
)
def test_forward_fits_in_shared_memory(arch: str, D: int, feature: str) -> None:
    with allocated_for(arch) as found:
        _launch(D, **LARGEST[feature])
    assert "attention_fwd_kernel" in by_name(found)
    check_memory(found, arch)


@compiles
@slow
def test_ada_differs_from_ampere_in_the_order_of_instructions_alone() -> None:
    """So the tests above leave sm_89 out."""
    with compiled_for("sm_86") as ampere:
        _launch(64, causal=2)
    with compiled_for("sm_89") as ada:
        _launch(64, causal=2)
    with allocated_for("sm_86") as ampere_backward:
        _launch_backward(64, causal=2)
    with allocated_for("sm_89") as ada_backward:
        _launch_backward(64, causal=2)
    pairs = zip((*ada, *ada_backward), (*ampere, *ampere_backward), strict=True)
    for kernel, twin in pairs:
        assert kernel.asm["ttgir"].replace("cuda:89", "cuda:86") == twin.asm["ttgir"]
    assert spills_and_registers(ada[0]) == spills_and_registers(ampere[0])
    assert [len(body) for body in loops(ada[0])] == [len(body) for body in loops(ampere[0])]


@compiles
@slow
@pytest.mark.parametrize(
    "arch, D", [*zip(GENERATIONS, (128, 64, 256, 128), strict=True), ("sm_90", 256)]
)
def test_fp32_compiles(arch: str, D: int) -> None:
    """On NVIDIA three TF32 products, never one: that would be three times fewer instructions."""
    with compiled_for(arch) as found:
        _launch(D, dtype=torch.float32, causal=2)
    check_memory(found, arch)
    assert "ptx" not in found[-1].asm or "mma" in found[-1].asm["ptx"]
    if arch != "gfx942":
        assert "inputPrecision = tf32x3" in found[-1].asm["ttir"]


@compiles
@pytest.mark.parametrize("D, E", [(256, 24), pytest.param(200, 72, marks=slow)])
def test_narrow_values_compile_without_spills(D: int, E: int) -> None:
    """ptxas fails where one of many tiles is narrow: 3,000 spills a tile."""
    with compiled_for("sm_90") as found:
        _launch(D, E=E, dtype=torch.float32, causal=2)
    assert spilled(found[-1]) < 1000


@compiles
@pytest.mark.parametrize(
    "D, E, mask", [(256, 8, None), pytest.param(24, 8, torch.float64, marks=slow)]
)
def test_narrow_values_have_the_descriptors_of_keys(D, E, mask):
    """Their upper halves, in constants that addresses are added to: ptxas 12.8 takes a half from a
    register that it has not set where values have another one than keys in the same place.
    """
    with compiled_for("sm_90") as found:
        _launch(D, E=E, mask=None if mask is None else (mask, (1, 1, 1024, 1024)), causal=1)
    constant = r"\b(?:or\.b64|add\.s64)\s+%rd\d+, %rd\d+, (-?\d{19});"
    upper_halves = {int(c) >> 32 for c in re.findall(constant, found[-1].asm["ptx"])}
    assert len(upper_halves) == 1


@compiles
@pytest.mark.parametrize("options", [
    pytest.param({"dtype": torch.float32, "causal": 2}, id="fp32", marks=slow),
    pytest.param({"M": 1}, id="one query"),
])  # fmt: skip
def test_smaller_head_dims_take_no_more_products(options: dict[str, Any]) -> None:
    with compiled_for("sm_80") as found:
        _launch(80, **options)
        _launch(128, **options)
    small, large = (_tensor_instructions(kernel, "sm_80") for kernel in found)
    assert 0 < small <= large


@compiles
def test_few_queries_pad_only_narrow_second_tiles() -> None:
    def whole(D: int, E: int) -> bool:
        return forward_config("sm_90", torch.bfloat16, D, E, 1, Features()).whole

    assert whole(80, 80) and whole(192, 144) and whole(144, 128)
    assert not whole(144, 192) and not whole(40, 160) and not whole(96, 96)


@compiles
def test_register_cap_depends_on_strides_of_keys_and_values() -> None:
    """Addresses of their single elements do not fit below it; those of q are dead by then."""
    config = forward_config("sm_90", torch.bfloat16, 64, 64, 256, Features(dense=True))

    def cap(D: int, q_row: int, k_row: int, k_head: int | None = None, aligned: bool = True) -> Any:
        def meta(row: int, head: int) -> Tensor:
            strides = (4 * 256 * row, head, row, 1)
            return torch.empty_strided((2, 4, 256, D), strides, dtype=torch.bfloat16, device="meta")

        q, k = meta(q_row, 256 * q_row), meta(k_row, 256 * k_row if k_head is None else k_head)
        plan = forward._bind(config, ForwardCall(q, k, k), q, aligned)
        return plan.attend.func.options.get("maxnreg")  # type: ignore[attr-defined]

    assert config.maxnreg == 128
    assert cap(64, 64, 64) == cap(40, 40, 40) == 128
    assert cap(64, 65, 64) == 128  # descriptors read k and v, however q lies
    assert cap(57, 64, 64) == 128
    assert cap(64, 64, 64, k_head=0) == 128  # no descriptor covers what is expanded
    assert cap(57, 64, 64, k_head=0) is None  # rows of 57, whatever lies between them
    assert cap(57, 57, 57) is None
    assert cap(64, 64, 64, aligned=False) is None
    assert cap(40, 41, 40) is None  # one unit of strides for all that is read by address


@compiles
@pytest.mark.parametrize("arch", ["sm_90", pytest.param("gfx942", marks=slow)])
def test_packed_compiles(arch: str) -> None:
    q = torch.empty(4096, 8, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(4096, 2, 64, dtype=torch.bfloat16, device="meta")
    offsets = torch.empty(9, dtype=torch.int32, device="meta")
    lse = torch.empty(8, 4096, device="meta")
    with compiled_for(arch) as found:
        packed = packing(offsets, offsets, 700, 700)
        forward.attention_fwd(ForwardCall(q, k, k, **packed, causal=2, scale=0.125), q, lse)
    assert _tensor_instructions(found[-1], arch) > 0 and spilled(found[-1]) == 0


@compiles
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.bool, marks=slow)])
def test_masks_with_strides_of_eight_are_read_in_vectors(dtype: torch.dtype) -> None:
    """An address for every element would spill."""
    with compiled_for("sm_90") as found:
        _launch(64, M=1000, N=1016, mask=(dtype, (1, 4, 1000, 1016)))
    for body in loops(found[-1])[:2]:  # the third has no mask
        vectors = [x for x in body if re.search(rf"\bLDGSTS\S*\.{64 * dtype.itemsize}\b", x)]
        assert len(vectors) == 4 and not any(re.search(r"\bLDG\S*\.U(8|16)\b", x) for x in body)
    assert spilled(found[-1]) <= 8  # one address, by Triton 3.8


@compiles
def test_odd_strides_with_a_mask_do_not_spill() -> None:
    """Addresses of single elements need registers beyond the cap, which is lifted."""
    with compiled_for("sm_90") as found:
        _launch(57, mask=(torch.bool, (1, 1, 1024, 1024)))
    assert spilled(found[-1]) == 0


@compiles
def test_tma_is_used_on_hopper_where_strides_allow() -> None:
    with compiled_for("sm_90") as found:
        _launch(64)
        _launch(80)  # two tiles a row: pointers
    assert "cp.async.bulk.tensor" in found[0].asm["ptx"]
    assert "cp.async.bulk.tensor" not in found[1].asm["ptx"]


@compiles
def test_full_tiles_have_no_mask_instructions() -> None:
    """Without restrictions and with whole tiles there is one loop; restrictions add loops."""
    with compiled_for("sm_90") as found:
        _launch(64)
        _launch(64, causal=2)
        _launch(64, mask=(torch.bool, (1, 1, 1024, 1024)))
    counts = [
        kernel.asm["ttir"].count("scf.for") for kernel in found if "fwd" in kernel.metadata.name
    ]
    assert counts == [1, 2, 3]


# -- backward -------------------------------------------------------------------------------------
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
_ALWAYS_BACKWARD: dict[str, dict[int, tuple[str, ...]]] = {
    "sm_80": {64: ("causal",)},
    "sm_90": {64: ("bool",), 128: ("bias",)},
    "sm_100": {128: ("causal",)},
    "gfx942": {64: ("padding",)},
}


def _backwards() -> list[Any]:
    some, cases = ("causal", "lengths", "bool"), []
    cases += cross_section("sm_90", _ALWAYS_BACKWARD["sm_90"], (64,), BACKWARD)
    for arch in ("sm_90", *_OTHERS):
        always = _ALWAYS_BACKWARD.get(arch, {})
        cases += cross_section(arch, always, (64, 80, 128, 192, 256)[arch == "sm_90" :], some)
    return cases


@compiles
@pytest.mark.parametrize("arch, D, feature", _backwards())
def test_backward_compiles(arch: str, D: int, feature: str) -> None:
    with compiled_for(arch) as found:
        _launch_backward(D, **BACKWARD[feature])
    assert {kernel.metadata.name for kernel in found} >= set(MAIN)
    for kernel in found:
        _examine(kernel, arch)


# Where there are 99 KB, wide masks and others have rows of their own. All NVIDIA GPUs share those
# of fp32; sm_86 and sm_120 share all.
_LARGEST_BACKWARD = {
    **dict.fromkeys(("sm_80", "sm_90", "sm_100"), ("bounds", "distance")),
    "sm_86": LARGEST,
    "sm_120": ("bias", "fp32"),
    "gfx942": ("fp32", "distance"),
}


@compiles
@pytest.mark.parametrize("arch, D, feature", [
    *on_each_gpu((64, 128, 256), _LARGEST_BACKWARD, [("sm_86", 256, "bias")]),
    pytest.param("sm_80", 192, "bounds", marks=slow),  # a row of its own
    # Both head dims are padded to 128.
    *(pytest.param(arch, 96, "fp32", marks=slow) for arch in ("sm_86", "sm_120")),
])  # fmt: skip
def test_backward_fits_in_shared_memory(arch: str, D: int, feature: str) -> None:
    with allocated_for(arch) as found:
        _launch_backward(D, **LARGEST[feature])
    assert set(by_name(found)) >= set(MAIN)
    check_memory(found, arch)


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
        for shape, dtype, _ in backward.attention_bwd_workspace(call)
    ]
    none = torch.empty(0, device="meta")
    backward.attention_bwd(call, q, k, k, none, none, none, *workspace)


@compiles
@slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_packed_backward_compiles(arch: str, dropout_p: float) -> None:
    with compiled_for(arch) as found:
        _launch_packed(64, heads=8, left=200, dropout_p=dropout_p)
    assert {kernel.metadata.name for kernel in found} >= set(MAIN)
    for kernel in found:
        _examine(kernel, arch)


@compiles
@pytest.mark.parametrize("left", [pytest.param(-1, marks=slow), 200])
@pytest.mark.parametrize("heads", [4, pytest.param(2, marks=slow)])
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
@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=slow)])
def test_two_programs_of_dq_share_an_sm(packed: bool) -> None:
    """With dropout, which takes most registers, although no key of a row or column is hashed
    between four weights.
    """
    with compiled_for("sm_90") as found:
        if packed:
            _launch_packed(64, heads=8, dropout_p=0.1)
        else:
            _launch_backward(64, key_lengths=1, query_lengths=True, causal=2, dropout_p=0.1)
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
        _launch_backward(40, causal=2, left=8, dropout_p=0.1, dq_alone=True)
    dq = next(kernel for kernel in found if kernel.metadata.name == MAIN[0])
    bodies = [body for body in loops(dq) if _count(TENSOR["sm_90"], body)]
    assert len(bodies) == 3 and not any(_count(r"\b(STL|LDL)", body) for body in bodies)
    _two_share_an_sm(dq)


@compiles
@slow
def test_fp32_pads_small_head_dims_to_one_tile() -> None:
    """Two tiles triple the instructions, and spill."""
    with compiled_for("sm_80") as found:
        _launch_backward(40, E=64, dtype=torch.float32, causal=2)
    for kernel in found:
        _examine(kernel, "sm_80")


@compiles
@slow
def test_odd_strides_do_not_spill() -> None:
    """Addresses of single elements need registers beyond the cap, which is lifted."""
    with compiled_for("sm_90") as found:
        _launch_backward(57, M=1001, N=999, causal=2)
    for kernel in found:
        _examine(kernel, "sm_90")


@compiles
@pytest.mark.parametrize("options", [
    pytest.param({"N": 60, "dropout_p": 0.1}, id="few keys: delta is summed once more"),
    pytest.param({"M": 1, "N": 77, "dout": False}, id="one query, only lse counts"),
    pytest.param({"M": 77, "N": 1, "dout": False}, id="one key, only lse counts"),
    pytest.param({"M": 1, "N": 1, "K": 1, "dropout_p": 0.1}, id="sizes of 1 are constants"),
])  # fmt: skip
def test_rare_options_compile(options: dict[str, Any]) -> None:
    """Options that change nothing in the interpreter."""
    with allocated_for("sm_90") as found:
        _launch_backward(64, **options)
    assert {kernel.metadata.name for kernel in found} >= set(MAIN)


@compiles
@slow
def test_examination_finds_spills() -> None:
    """A tiling with more accumulators than registers fails the examination above."""
    config = BwdConfig(BwdTile(64, 32, 4, 2), BwdTile(64, 128, 4, 1))
    with compiled_for("sm_90") as found:
        _launch_backward(128, causal=1, config=config)
    dkdv = next(kernel for kernel in found if kernel.metadata.name == MAIN[1])
    with pytest.raises(AssertionError, match="spills in its loop"):
        _examine(dkdv, "sm_90")


@compiles
def test_check_finds_too_much_shared_memory() -> None:
    config = BwdConfig(BwdTile(128, 128, 8, 2), BwdTile(128, 128, 8, 2))
    with allocated_for("sm_86") as found:
        _launch_backward(128, config=config)
    with pytest.raises(AssertionError, match=r"RTX 3090 \(sm_86\) has 101376"):
        check_memory(found, "sm_86")
