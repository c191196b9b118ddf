"""The Hopper attention backward, computed without a GPU and judged like any backend.

The kernels run over the stand-in for the hardware of sm90_on_host, as test_sm90_on_host.py says of
the forward's. The forward is the reference's here, the launcher is the real one: workspace,
strides, descriptors, layouts, masks and the order of sums are those that a GPU would see.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fastattn.ops._op import OPS
from fastattn.ops.attention import sm90
from fastattn.ops.attention.spec import make_inputs
from fastattn.testing.check import Oracle, _run
from fastattn.testing.poison import poisoned_results
from fastattn.testing.spec import Sample, all_specs

TESTS = Path(__file__).resolve().parent
CSRC = TESTS.parent / "csrc"
CUDA = Path("/usr/local/cuda/include")
# What g++ does not read, and what stands for it.
DYNAMIC = "extern __shared__ __align__(sm90::kTileAlignment) char shared_memory[];"
ON_HOST = "char* shared_memory = on_host::shared;"
SPEC = all_specs()["attention"]
INSTANCES = (64, 96, 128, 192, 256)
pytestmark = pytest.mark.slow


def _sample(name: str, **options: object) -> Sample:
    return Sample(name, "every instance, every restriction", partial(make_inputs, **options),
                  ("q", "k", "v"))  # fmt: skip


OWN = tuple(
    sample
    for D in INSTANCES
    for sample in (
        _sample(f"causal_gqa_{D}", causal="bottom_right", H=4, K=2, M=150, N=200, D=D, B=1),
        _sample(f"lengths_{D}", M=140, N=150, D=D, layout="bshd", query_lengths=[140, 70],
                key_lengths=[33, 150]),
        _sample(f"window_{D}", window=(30, 20), M=140, N=260, D=D, B=1, H=1),
    )
)  # fmt: skip
# Of the op's own samples those that differ in what the kernels do.
CHOSEN = (
    "plain", "one_by_one", "one_query", "one_key", "s257", "d8", "d160", "d192_e128", "d256_e8",
    "bshd", "packed", "gqa", "gqa_window_e", "gqa_lengths", "top_left_tall",
    "bottom_right_tall", "window_self", "window_right", "key_lengths", "key_lengths_zero",
    "query_lengths", "both_lengths_causal", "scale_zero_lengths", "scale_negative",
    "extreme_logits_causal",
)  # fmt: skip
CASES = [s for s in SPEC.samples if s.name in CHOSEN] + [*OWN]


class Simulator:
    """Stands for torch.ops.fastattn_sm90."""

    def __init__(self, library: ctypes.CDLL):
        library.attention_bwd.restype = ctypes.c_char_p
        self.library = library
        self.attention_bwd = SimpleNamespace(default=self.run)

    def run(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
        key_lengths: Tensor | None, query_lengths: Tensor | None, out: Tensor, lse: Tensor,
        causal: int, left: int, right: int, scale: float, in_order: bool, dq: Tensor, dk: Tensor,
        dv: Tensor, statistics: Tensor, dq_sum: Tensor, turns: Tensor,
    ) -> None:  # fmt: skip
        (B, H, M, D), (K, N), E = q.shape, k.shape[1:3], v.shape[3]
        tensors = [q, k, v, out, dout, dq, dk, dv]
        strides = [s for x in tensors for s in x.stride()[:3]]
        lengths = [None if x is None else x.int() for x in (query_lengths, key_lengths)]
        band = (
            M + N if left < 0 else left,
            0 if causal else M + N if right < 0 else right,
            N - M if causal == 2 else 0,
        )
        failure = self.library.attention_bwd(
            min(d for d in INSTANCES if d >= max(D, E)),
            q.dtype == torch.float16,
            (ctypes.c_void_p * 8)(*(x.data_ptr() for x in tensors)),
            (ctypes.c_int64 * 24)(*strides),
            _pointer(lse),
            _pointer(dlse),
            (ctypes.c_int * 7)(B, H, K, M, N, D, E),
            *(_pointer(x) for x in lengths),
            (ctypes.c_int * 3)(*band),
            ctypes.c_float(scale),
            *(_pointer(x) for x in (statistics, dq_sum, turns)),
            in_order,
        )
        assert failure is None, failure


def _pointer(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Simulator:
    if shutil.which("g++") is None or not (CUDA / "cuda_bf16.h").is_file():
        pytest.skip("needs g++ and CUDA's headers")
    folder = tmp_path_factory.mktemp("sm90")
    kernels = (CSRC / "attention" / "attention_bwd_sm90.cuh").read_text()
    assert kernels.count(DYNAMIC) == 2
    (folder / "attention_bwd_on_host.cuh").write_text(kernels.replace(DYNAMIC, ON_HOST))
    library = folder / "attention_bwd.so"
    folders = [f"-I{path}" for path in (folder, TESTS / "sm90_on_host", TESTS, CSRC)]
    flags = ["-std=c++17", "-O2", "-fno-strict-aliasing", "-shared", "-fPIC", "-isystem", str(CUDA)]
    source = TESTS / "sm90_attention_bwd.cpp"
    subprocess.run(["g++", *flags, *folders, "-o", library, source], check=True)
    return Simulator(ctypes.CDLL(str(library)))


@pytest.fixture
def simulate(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From then on the reference's backward is the simulated one."""
    op = OPS["attention_bwd"]
    monkeypatch.setattr(sm90, "_library", simulator)
    monkeypatch.setattr(sm90, "unavailable", lambda: None)

    def launch(args: tuple, results: tuple[Tensor, ...]) -> None:
        assert sm90.attention_bwd_unsupported(*args) is None
        scratch = op.allocate_workspace(sm90.attention_bwd_workspace(*args), torch.device("cpu"))
        sm90.attention_bwd(*args, *results, *scratch)

    return lambda: monkeypatch.setitem(op._launchers, "reference", launch)


@pytest.mark.parametrize("sample", CASES, ids=lambda sample: sample.name)
def test_gradients(simulate: Callable[[], None], sample: Sample) -> None:
    dtype = torch.float16 if CASES.index(sample) % 3 == 0 else torch.bfloat16
    oracle = Oracle(SPEC, sample, dtype)
    simulate()
    with poisoned_results():
        results = _run(SPEC, sample, sample.inputs("cpu", dtype), "reference")
    for gradient in ("dq", "dk", "dv"):
        comparison = oracle.judge(gradient, results[gradient])
        assert comparison.ok, f"{gradient}: {comparison.message}"


def test_sums_in_any_order(simulate: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without turns dq is added to zeros."""
    monkeypatch.setattr(sm90, "_IN_ORDER", False)
    test_gradients(simulate, OWN[0])
