"""The forward of attention in Triton, compiled for GPUs that are not present: no spills,
tensor cores in use, shared memory within the limit.
"""

# ruff: noqa: E402  (where Triton is missing, none of the kernels can be imported)

import re
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
from attention_options import packing
from compiled_kernels import (
    GENERATIONS,
    GPUS,
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

from fastattn.ops.attention import prepared
from fastattn.ops.attention.calls import ForwardCall
from fastattn.ops.attention.triton import forward as kernels
from fastattn.ops.attention.triton.fwd_config import Features, forward_config

# Kernels divide by empty sums and select the result away, and dead rows hold NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": 2},
    "lengths": {"key_lengths": 1, "query_lengths": True},
    "row_lengths": {"key_lengths": 2, "causal": 1},
    "bool": {"mask": (torch.bool, (1, 1, 1024, 1024))},
    "padding": {"mask": (torch.bool, (2, 1, 1, 1024))},
    "column": {"mask": (torch.bool, (2, 1, 1024, 1))},
    "bias": {"mask": (torch.bfloat16, (1, 4, 1024, 1024))},
    "prepared": {"mask": (torch.bool, (1, 1, 1024, 1024)), "words": True},
    "dropout": {"dropout_p": 0.1, "causal": 2},
    "short": {"M": 1, "causal": 0},
    "softcap": {"softcap": 30.0, "causal": 2},
    "sinks": {"sinks": True, "causal": 2},
    "distance": {"distance": 1, "causal": 2},
    "distance_batch": {"distance": 2, "key_lengths": 1, "query_lengths": True, "causal": 3},
    "own_diagonals": {"key_lengths": 1, "query_lengths": True, "causal": 3},
}


def _launch(
    D: int,
    *,
    E: int | None = None,
    M: int = 1024,
    N: int = 1024,
    dtype: torch.dtype = torch.bfloat16,
    mask: tuple[torch.dtype, tuple[int, ...]] | None = None,
    words: bool = False,
    key_lengths: int = 0,
    query_lengths: bool = False,
    causal: int = 0,
    dropout_p: float = 0.0,
    softcap: float = 0.0,
    sinks: bool = False,
    distance: int = 0,
) -> None:
    """A forward as the op would launch it, on tensors without memory."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k, v = empty(2, 4, M, D), empty(2, 4, N, D), empty(2, 4, N, D if E is None else E)
    lengths = empty(*(2, M)[:key_lengths], dtype=torch.int32) if key_lengths else None
    dense = None if mask is None else empty(*mask[1], dtype=mask[0])
    call = ForwardCall(
        q, k, v, dense, prepared.classify(dense) if words else None, lengths,
        empty(2, dtype=torch.int32) if query_lengths else None, None, None, 0, 0,
        empty(distance, 4, M + N - 1, dtype=torch.float32) if distance else None,
        empty(4, dtype=torch.float32) if sinks else None, softcap, causal, -1, -1, 0.125, dropout_p,
        empty(1, dtype=torch.int64) if dropout_p else None, 3,
    )  # fmt: skip
    workspace = [
        empty(*shape, dtype=dtype) for shape, dtype, _ in kernels.attention_fwd_workspace(call)
    ]
    out, lse = empty(2, 4, M, v.shape[3]), empty(2, 4, M, dtype=torch.float32)
    kernels.attention_fwd(call, out, lse, *workspace)


def _tensor_instructions(kernel: Any, arch: str) -> int:
    code = instructions(kernel)
    if arch == "sm_90":
        # One wait a product; more are ptxas's way to serialise them (C7510 to C7515).
        assert code.count("WARPGROUP.DEPBAR") <= code.count("HGMMA") // 2
    return len(re.findall(TENSOR[arch], code))


_OUTSIDE_LOOPS = 8  # bytes, of sm_120


def _tolerated_spills(arch: str, D: int, feature: str) -> int:
    """Limits in bytes a thread: none in loops over full tiles, few in those over edge tiles and
    under dense masks, whose rows are chosen for the head dims up to 128.
    """
    if feature in ("plain", "causal", "softcap", "sinks") and D <= 128:
        return _OUTSIDE_LOOPS if arch == "sm_120" else 0
    return 96


_ALWAYS: dict[str, dict[int, tuple[str, ...]]] = {
    "sm_80": {64: ("bool",), 128: ("causal",)},
    "sm_90": {64: ("causal", "bias"), 128: ("lengths", "distance")},
    "sm_100": {64: ("causal",)},
    "gfx942": {64: ("padding",)},
}


def _shipped() -> list[Any]:
    """A cross-section always, a wider one in the slow run. sm_86 has the tiles of sm_80."""
    some = ("causal", "lengths", "bool", "bias", "dropout", "short", "distance")
    cases = cross_section("sm_90", _ALWAYS["sm_90"], (64,), FEATURES)
    cases += cross_section("sm_90", _ALWAYS["sm_90"], (80, 128, 192, 256), some)
    for arch in ("sm_80", "sm_100", "gfx942", "sm_120"):
        features = some if arch == "sm_120" else FEATURES
        cases += cross_section(arch, _ALWAYS.get(arch, {}), (64, 128, 256), features)
    return cases


@compiles
@pytest.mark.parametrize("arch, D, feature", _shipped())
def test_compiles(arch: str, D: int, feature: str) -> None:
    with compiled_for(arch) as found:
        _launch(D, **FEATURES[feature])
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
# sm_80 has the rows of sm_86 and more shared memory.
_LARGEST_ON = {arch: LARGEST for arch in GPUS if arch not in ("sm_80", "sm_89")}


@compiles
@pytest.mark.parametrize(
    "arch, D, feature", on_each_gpu((64, 128, 256), _LARGEST_ON, [("sm_86", 256, "fp32")])
)
def test_fits_in_shared_memory(arch: str, D: int, feature: str) -> None:
    with allocated_for(arch) as found:
        _launch(D, **LARGEST[feature])
    assert "attention_fwd_kernel" in by_name(found)
    check_memory(found, arch)


@compiles
@pytest.mark.slow
def test_ada_differs_from_ampere_in_the_order_of_instructions_alone() -> None:
    """So the tests above leave sm_89 out."""
    with compiled_for("sm_86") as ampere:
        _launch(64, causal=2)
    with compiled_for("sm_89") as ada:
        _launch(64, causal=2)
    assert ada[0].asm["ttgir"].replace("cuda:89", "cuda:86") == ampere[0].asm["ttgir"]
    assert spills_and_registers(ada[0]) == spills_and_registers(ampere[0])
    assert [len(body) for body in loops(ada[0])] == [len(body) for body in loops(ampere[0])]


@compiles
@pytest.mark.slow
@pytest.mark.parametrize(
    "arch, D", [(a, D) for a in GENERATIONS for D in (64, 128, 256) if a == "sm_90" or D != 64]
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
@pytest.mark.parametrize("D, E", [(256, 24), pytest.param(200, 72, marks=pytest.mark.slow)])
def test_narrow_values_compile_without_spills(D: int, E: int) -> None:
    """ptxas fails where one of many tiles is narrow: 3,000 spills a tile."""
    with compiled_for("sm_90") as found:
        _launch(D, E=E, dtype=torch.float32, causal=2)
    assert spilled(found[-1]) < 1000


@compiles
@pytest.mark.parametrize(
    "D, E, mask",
    [(256, 8, None), pytest.param(24, 8, torch.float64, marks=pytest.mark.slow)],
)
def test_narrow_values_have_the_descriptors_of_keys(
    D: int, E: int, mask: torch.dtype | None
) -> None:
    """Their upper halves, in constants that addresses are added to: ptxas 12.8 takes a half from a
    register that it has not set where values have another one than keys in the same place.
    """
    with compiled_for("sm_90") as found:
        _launch(D, E=E, mask=None if mask is None else (mask, (1, 1, 1024, 1024)), causal=1)
    constant = r"\b(?:or\.b64|add\.s64)\s+%rd\d+, %rd\d+, (-?\d{19});"
    upper_halves = {int(c) >> 32 for c in re.findall(constant, found[-1].asm["ptx"])}
    assert len(upper_halves) == 1


@compiles
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dtype": torch.float32, "causal": 2}, id="fp32", marks=pytest.mark.slow),
        pytest.param({"M": 1}, id="one query"),
    ],
)
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
        plan = kernels._bind(config, ForwardCall(q, k, k), q, aligned)
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
@pytest.mark.parametrize("arch", ["sm_90", pytest.param("gfx942", marks=pytest.mark.slow)])
def test_packed_compiles(arch: str) -> None:
    q = torch.empty(4096, 8, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(4096, 2, 64, dtype=torch.bfloat16, device="meta")
    offsets = torch.empty(9, dtype=torch.int32, device="meta")
    lse = torch.empty(8, 4096, device="meta")
    with compiled_for(arch) as found:
        packed = packing(offsets, offsets, 700, 700)
        kernels.attention_fwd(ForwardCall(q, k, k, **packed, causal=2, scale=0.125), q, lse)
    assert _tensor_instructions(found[-1], arch) > 0 and spilled(found[-1]) == 0


@compiles
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.bool, marks=pytest.mark.slow)]
)
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
@pytest.mark.parametrize("D", [64, 128])
def test_wide_masks_fit(D: int) -> None:
    with allocated_for("sm_90") as found:
        _launch(D, mask=(torch.float64, (1, 1, 1024, 1024)))
    check_memory(found, "sm_90")


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
