"""The norms' backward as FASTATTN_TRIALS=norm_rows builds it, on the simulator: thread blocks of
several rows of 512 to 1,024 columns.
"""

import ctypes
import re

import norms_on_host as on_host
import pytest
import test_norms_faults as faults
import test_norms_on_host as norms
import torch
from sm90_on_host.build import CSRC, Mutation, included, missing
from sm90_on_host.host_library import HostLibrary

from fastattn.ops.layer_norm import cuda
from fastattn.testing.oracle import Oracle, run_op
from fastattn.testing.poison import poisoned_results

pytestmark = pytest.mark.slow
_TRIAL = "FASTATTN_TRIAL_NORM_ROWS"
# The tiling is the bindings'.
_HOST = HostLibrary(
    on_host.TESTS / "norm_bindings.cpp", cuda, "fastattn_cuda_norm_rows", codes=2,
    defines=["fastattn_cuda=fastattn_cuda_norm_rows", _TRIAL],
)  # fmt: skip


@pytest.mark.parametrize("type_name", ["kBFloat16", "kFloat32"])
@pytest.mark.parametrize(
    ("op", "rows", "N"),
    [("layer_norm", 19, 512), ("layer_norm", 9, 1000), ("rms_norm", 21, 1024),
     ("add_layer_norm", 17, 520), ("add_layer_norm", 3, 2104)],
)  # fmt: skip
def test_norm(monkeypatch: pytest.MonkeyPatch, op: str, rows: int, N: int, type_name: str) -> None:
    if reason := missing():
        pytest.skip(reason)
    machine, dtype = on_host.machine(type_name, [_TRIAL]), on_host.NAMES[type_name]
    add = {"x_bias": True, "dropout_p": 0.3} if op == "add_layer_norm" else {}
    sample = norms._own(op, "together", "rows of one thread block", (rows, N), **add)
    oracle = Oracle(norms.SPECS[op], sample, dtype)

    def launch(name: str, problem: int, *types: str) -> str | None:
        return machine.call(name, ctypes.c_void_p(problem), *map(on_host.index_of, types))

    on_host.use(monkeypatch, launch, host=_HOST)
    on_host.replace(monkeypatch)
    with poisoned_results():
        results = run_op(norms.SPECS[op], sample, sample.inputs("cpu", dtype), "reference")
    for name, result in results.items():
        assert (comparison := oracle.judge(name, result)).ok, f"{name}: {comparison.message}"


@pytest.mark.parametrize(("N", "rows"), [(504, 4), (512, 16), (768, 8), (1024, 8), (1032, 1)])
def test_tilings(monkeypatch: pytest.MonkeyPatch, N: int, rows: int) -> None:
    if reason := missing():
        pytest.skip(reason)
    made: list[list[int]] = []

    def launch(_: str, problem: int, *types: str) -> None:
        numbers = (ctypes.c_int * 6)()
        _HOST.native.on_host_backward_tiling(ctypes.c_void_p(problem), numbers)
        made.append(list(numbers))

    on_host.use(monkeypatch, launch, multiprocessors=132, host=_HOST)
    norms._backward(1 << 18, N, torch.bfloat16)
    _, _, threads, found, strips, lines = made[0]
    together = 512 if 512 <= N <= 1024 else 128 if N <= 512 else threads
    assert (found, strips, found * threads) == (rows, 1, together)
    assert lines == 132 * 512 // together


def test_the_forward_is_as_without_the_trial() -> None:
    """What it includes has the trial's constant in `backward_tiling` alone."""
    source = CSRC / "layer_norm" / "norm_fwd_instance_cuda.cu"
    text = "".join(included(source, [CSRC]).values())
    assert text.count(_TRIAL) == 1
    assert len(re.findall(r"constexpr bool kRowsTogether = (?:true|false);", text)) == 2
    (tiling,) = re.findall(r"^inline Tiling backward_tiling\(.*?^}", text, re.DOTALL | re.MULTILINE)
    code = re.sub("//.*", "", text)
    assert code.count("kRowsTogether") == 2 + tiling.count("kRowsTogether") == 3


MUTATIONS = [
    Mutation("layer_norm/row_tile.cuh", "static_cast<int>(threadIdx.x) / tiling.threads", "0"),
    Mutation("layer_norm/row_tile.cuh", "first_warp + (threadIdx.x & (warps - 1))",
             "threadIdx.x & (warps - 1)"),
    Mutation("layer_norm/row_tile.cuh", "sm90::ptx::bar_sync(1 + row, threads_);",
             "sm90::ptx::bar_sync(1, threads_);"),
]  # fmt: skip


@pytest.mark.long
def test_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every barrier that is left out, and mutations of what is new."""
    cases = [faults._sample("layer_norm", (40, 520)), faults._sample("rms_norm", (35, 512))]
    faults.examine(monkeypatch, cases, MUTATIONS, [_TRIAL], _HOST)
