"""Attention on a GPU: more than 2^31 elements, offsets beyond 2^32, CUDA graphs, streams, threads,
devices, no synchronisation, deterministic results, memory errors.

`fastattn check` checks values; here, mostly, a call must give the same bits as the same call made
alone. Without a GPU every test runs on the CPU, with small tensors and without CUDA's features.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from fastattn.ops import _native
from fastattn.ops.attention import spec
from fastattn.testing.properties import DETERMINISTIC_ON_REQUEST, deterministic_algorithms

ROOT = Path(__file__).resolve().parents[2]
Inputs = dict[str, Any]


# -- devices --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Place:
    """A device and the backend that is tested on it."""

    device: torch.device
    backend: str

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.is_gpu else torch.float32

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def normal(self, *shape: int, grad: bool = True) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device, requires_grad=grad)

    def wants_memory(self, gib: float) -> None:
        if not self.is_gpu:
            return
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self.device)[0] / 2**30
        if free < gib:
            pytest.skip(f"needs {gib:.0f} GiB of GPU memory, {free:.0f} are free")


_ON_CPU = "reference" if _native.unavailable("cpu") else "cpu"
_PLACES = (
    pytest.param("cuda triton", marks=pytest.mark.gpu, id="triton"),
    pytest.param("cuda sm90", marks=pytest.mark.gpu, id="sm90"),
    pytest.param(f"cpu {_ON_CPU}", id="rehearsal"),
)


@pytest.fixture(params=_PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    kind, backend = request.param.split()
    with deterministic_algorithms(backend in DETERMINISTIC_ON_REQUEST):
        yield Place(torch.device(kind, 0 if kind == "cuda" else None), backend)


# -- calls ----------------------------------------------------------------------------------------
def results(place: Place, inputs: Inputs, dout: Tensor | None = None) -> tuple[Tensor, ...]:
    """out, lse and the gradients of inputs that require one. dlse is ones, dout by default too.

    Skips the test with the backend's reason if it refuses the call.
    """
    wanted = [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]
    try:
        out, lse = spec.attention(**{"return_lse": True} | inputs, backend=place.backend)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    gradients = (torch.ones_like(out) if dout is None else dout, torch.ones_like(lse))
    try:
        found = torch.autograd.grad((out, lse), wanted, gradients)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    return out.detach(), lse.detach(), *found


def assert_same(place: Place, got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """The same bits on a GPU; CPU kernels may divide a call of another size differently."""
    for n, (x, y) in enumerate(zip(got, expected, strict=True)):
        if place.is_gpu:
            assert torch.equal(x, y), f"result {n}: {(x != y).sum().item()} elements differ"
        else:
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def sample(place: Place, name: str, seed: int = 0) -> Inputs:
    """A sample with other random data; its NaN and inf stay."""
    found = next(s for s in spec.SAMPLES if s.name == name)
    inputs = found.inputs(place.device, place.dtype)
    generator = torch.Generator().manual_seed(seed)
    for x in inputs.values():
        if isinstance(x, Tensor) and x.requires_grad:
            noise = torch.randn(x.shape, generator=generator).to(x)
            with torch.no_grad():
                x.copy_(noise.where(x.isfinite(), x))
    return inputs


# Samples with different kernels, launches or workspaces.
FEATURES = (
    "plain", "causal", "window", "gqa", "key_lengths", "key_lengths_rows", "both_lengths",
    "bool_mask_keys", "bool_mask_rows", "bias_row", "bias_fp32", "prepared_mask_restricted",
    "prepared_bias_column", "dropout", "dropout_origin", "no_keys",
)  # fmt: skip


# -- large tensors --------------------------------------------------------------------------------
def _large(place: Place, gpu: int, rehearsal: int) -> int:
    return gpu if place.is_gpu else rehearsal


def _part(inputs: Mapping[str, Any], **slices: tuple[slice, ...]) -> Inputs:
    """Slices of some tensors as new leaves; other inputs unchanged."""
    part = dict(inputs)
    for name, where in slices.items():
        x = inputs[name]
        part[name] = x.detach()[where].clone().requires_grad_(x.requires_grad)
    return part


def test_queries_beyond_2_31_elements(place: Place) -> None:
    rows, tail = _large(place, (1 << 31) // 64, 1 << 10) + 512, 512
    place.wants_memory(28)
    inputs = {
        "q": place.normal(1, 1, rows, 64), "k": place.normal(1, 1, 200, 64),
        "v": place.normal(1, 1, 200, 64), "return_lse": False,
    }  # fmt: skip
    last = (..., slice(rows - tail, None), slice(None))
    # Only the last rows have a gradient, so only they contribute to dk and dv.
    dout = torch.zeros_like(inputs["q"])
    dout[last] = torch.randn_like(dout[last])

    def run(inputs: Inputs, dout: Tensor) -> tuple[Tensor, ...]:
        wanted = [inputs[name] for name in "qkv"]
        try:
            out = fastattn.attention(**inputs, backend=place.backend)
            return out.detach(), *torch.autograd.grad(out, wanted, dout)
        except NotImplementedError as refusal:
            pytest.skip(str(refusal))

    out, dq, dk, dv = run(inputs, dout)
    alone = run(_part(inputs, q=last), dout[last].clone())
    assert_same(place, (out[last], dq[last], dk, dv), alone)
    assert not dq[..., : rows - tail, :].any()


def test_keys_beyond_2_31_elements(place: Place) -> None:
    """A window allows the last queries to attend only to the last keys."""
    N, M, reach = _large(place, (1 << 31) // 64, 1 << 11) + 1024, 256, 512
    place.wants_memory(28)
    inputs = {
        "q": place.normal(1, 1, M, 64), "k": place.normal(1, 1, N, 64),
        "v": place.normal(1, 1, N, 64), "causal": "bottom_right", "window": (reach, 0),
    }  # fmt: skip
    last = (..., slice(N - 1024, None), slice(None))
    out, lse, dq, dk, dv = results(place, inputs)
    alone = results(place, _part(inputs, k=last, v=last))
    assert_same(place, (out, lse, dq, dk[last], dv[last]), alone)
    assert not dk[..., : N - 1024, :].any() and not dv[..., : N - 1024, :].any()


@pytest.mark.parametrize("rows_in_heads", [False, True])
def test_batches_beyond_2_31_elements(place: Place, rows_in_heads: bool) -> None:
    """And more heads than the limit of the second dimension of a grid."""
    B, H, S, D = _large(place, 4097, 3), 16, _large(place, 512, 64), 64
    place.wants_memory(44)
    shape = (B, S, H, D) if rows_in_heads else (B, H, S, D)
    inputs: Inputs = {}
    for name in "qkv":
        x = place.normal(*shape, grad=False)
        inputs[name] = (x.transpose(1, 2) if rows_in_heads else x).requires_grad_()
    inputs["key_lengths"] = torch.arange(B, device=place.device, dtype=torch.int32) % S + 1
    inputs["causal"] = "top_left"
    found = results(place, inputs)
    for at in (slice(B - 1, B), slice(B // 2, B // 2 + 1)):
        part = _part(inputs, **{name: (at,) for name in ("q", "k", "v", "key_lengths")})
        assert_same(place, [x[at] for x in found], results(place, part))


@pytest.mark.parametrize("prepared", [False, True])
def test_masks_with_more_heads_than_the_grid_limit(place: Place, prepared: bool) -> None:
    B, H = _large(place, 4097, 5), 16
    inputs: Inputs = {name: place.normal(B, H, 32, 16) for name in "qkv"}
    inputs["mask"] = torch.rand(B, H, 32, 32, device=place.device) < 0.8
    inputs["prepared"] = prepared
    found = results(place, inputs)
    part = _part(inputs, **{name: (slice(B - 1, B),) for name in ("q", "k", "v", "mask")})
    assert_same(place, [x[-1:] for x in found], results(place, part))


# -- CUDA graphs ----------------------------------------------------------------------------------
def _recorded(
    place: Place, call: Callable[[], tuple[Tensor, ...]]
) -> Callable[[], tuple[Tensor, ...]]:
    """Captures a call into a graph and returns a function that replays it; on a CPU, the call."""
    if not place.is_gpu:
        static = tuple(x.clone() for x in call())

        def repeat() -> tuple[Tensor, ...]:
            for x, y in zip(static, call(), strict=True):
                x.copy_(y)
            return static

        return repeat
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    host_memory = getattr(torch.cuda, "host_memory_stats", dict)
    before = host_memory().get("num_host_alloc")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # waiting for the device is an error in here
        captured = call()
    assert host_memory().get("num_host_alloc") == before, "capture took host memory"

    def replay() -> tuple[Tensor, ...]:
        graph.replay()
        return captured

    return replay


@pytest.mark.parametrize("name", FEATURES)
def test_a_graph_replays_with_new_data(place: Place, name: str) -> None:
    inputs = sample(place, name)
    replay = _recorded(place, lambda: results(place, inputs))
    for seed in (1, 2):
        fresh = sample(place, name, seed)
        with torch.no_grad():
            for key, x in inputs.items():
                if not isinstance(x, Tensor):
                    continue
                new = fresh[key]
                if "lengths" in key:
                    new = (new - seed).clamp_min(0)
                elif x.dtype == torch.bool:
                    new = new.roll(seed, -1)
                elif key == "dropout_seed":
                    new = new + 16 * seed
                elif key in ("q", "k", "v"):
                    new = new.where(new.isfinite(), 0)  # dead positions may now be live
                x.copy_(new)
        got = [x.clone() for x in replay()]
        assert_same(place, got, results(place, inputs))


# A process captures fastattn's first call, which loads kernels and, for Triton, compiles them.
_CAPTURED_FIRST = """
import contextlib
import sys
import torch
import fastattn
device, backend = sys.argv[1:]
torch.use_deterministic_algorithms(True, warn_only=True)
dtype = torch.bfloat16 if device == "cuda" else torch.float32
q, k, v = torch.randn(3, 2, 2, 200, 64, device=device, dtype=dtype).unbind()
x, w = torch.randn(64, 512, device=device, dtype=dtype), torch.ones(512, device=device, dtype=dtype)
tensors = [t.requires_grad_() for t in (q, k, v, x, w)]
ones = torch.ones_like(q), torch.ones_like(x)
torch.autograd.grad(q * k, (q, k), ones[0])  # torch has seen its own threads

def call():
    out = fastattn.attention(q, k, v, causal=True, backend=backend)
    y = fastattn.layer_norm(x, w)
    return out, y, *torch.autograd.grad((out, y), tensors, ones)

graph = torch.cuda.CUDAGraph() if device == "cuda" else None
with torch.cuda.graph(graph) if graph else contextlib.nullcontext():
    captured = call()
if graph:
    graph.replay()
for found, expected in zip(captured, call(), strict=True):
    assert torch.equal(found, expected)
print("captured")
"""


def test_the_first_call_may_be_captured(place: Place) -> None:
    command = [sys.executable, "-c", _CAPTURED_FIRST, place.device.type, place.backend]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if "NotImplementedError" in result.stderr:
        pytest.skip(result.stderr.strip().splitlines()[-1])
    assert result.stdout == "captured\n", result.stderr[-4000:]


# -- streams, threads, devices --------------------------------------------------------------------
_BUSY = ("causal", "bool_mask_rows", "bias_fp32", "dropout", "key_lengths_rows")


def _expected(place: Place, cases: Sequence[Inputs]) -> list[tuple[Tensor, ...]]:
    expected = [results(place, inputs) for inputs in cases]
    place.synchronize()
    return expected


@pytest.mark.parametrize("name", _BUSY)
def test_two_concurrent_streams(place: Place, name: str) -> None:
    cases = [sample(place, name, seed) for seed in (1, 2)]
    expected = _expected(place, cases)
    streams = [torch.cuda.Stream() if place.is_gpu else contextlib.nullcontext() for _ in cases]
    found: list[list[tuple[Tensor, ...]]] = [[], []]
    for _ in range(20 if place.is_gpu else 2):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream) if place.is_gpu else stream:
                found[n].append(results(place, cases[n]))
    place.synchronize()
    for right, several in zip(expected, found, strict=True):
        for got in several:
            assert_same(place, got, right)


def test_two_concurrent_threads(place: Place) -> None:
    """Each thread has its stream, and both bind launches for the same shapes at the same time."""
    rounds = 24 if place.is_gpu else 3
    lengths = [40 + 8 * n for n in range(rounds)]
    made: list[list[Inputs]] = [[], []]
    for cases in made:
        for S in lengths:
            inputs: Inputs = {name: place.normal(2, 2, S, 32) for name in "qkv"}
            inputs["mask"] = torch.rand(1, 1, S, S, device=place.device) < 0.8
            cases.append(inputs)
    results(place, made[0][0])  # a backend that refuses skips here
    place.synchronize()
    found: list[list[tuple[Tensor, ...]]] = [[], []]
    errors: list[BaseException] = []
    barrier = threading.Barrier(2)

    def work(n: int) -> None:
        try:
            stream = torch.cuda.Stream() if place.is_gpu else None
            barrier.wait()
            with torch.cuda.stream(stream):
                for inputs in made[n]:
                    found[n].append(results(place, inputs))
            if stream is not None:
                stream.synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for cases, several in zip(made, found, strict=True):
        for right, got in zip(_expected(place, cases), several, strict=True):
            assert_same(place, got, right)


@pytest.mark.parametrize("name", _BUSY)
def test_a_thread_without_a_cuda_context(place: Place, name: str) -> None:
    """Memory comes from PyTorch's cache, so nothing before fastattn's kernels makes a context."""
    cases = [sample(place, name, seed) for seed in (1, 2)]
    [_, expected] = _expected(place, cases)
    found: list[tuple[Tensor, ...]] = []
    thread = threading.Thread(target=lambda: found.append(results(place, cases[1])))
    thread.start()
    thread.join()
    [got] = found
    assert_same(place, got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "sm90"])
@pytest.mark.parametrize("name", _BUSY)
def test_another_device_than_the_current(backend: str, name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    places = [Place(torch.device("cuda", n), backend) for n in (0, 1)]
    with torch.cuda.device(0), deterministic_algorithms():
        here, there = (results(place, sample(place, name)) for place in places)
        again = results(places[0], sample(places[0], name))
        assert torch.cuda.current_device() == 0
    same_kind = torch.cuda.get_device_capability(0) == torch.cuda.get_device_capability(1)
    for x, y, z in zip(here, there, again, strict=True):
        assert y.device == places[1].device and torch.equal(x, z)
        if same_kind:
            assert torch.equal(x, y.to(x.device))


# -- synchronisation, determinism -----------------------------------------------------------------
class _RaisesOnSync(TorchDispatchMode):
    """Raises for PyTorch ops that make the host wait for the device."""

    asks = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.name().removeprefix("aten::").split(".")[0]
        assert not name.startswith(self.asks), f"{name} waits for the device"
        return op(*args, **kwargs or {})


@contextlib.contextmanager
def _without_synchronisation(place: Place) -> Iterator[None]:
    if not place.is_gpu:
        # CPU backends may read values; the code before them may not.
        with _RaisesOnSync():
            yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", FEATURES)
def test_no_synchronisation(place: Place, name: str) -> None:
    inputs = sample(place, name)
    expected = results(place, inputs)  # kernels are compiled and loaded here
    with _without_synchronisation(place):
        got = results(place, inputs)
    assert_same(place, got, expected)


def test_synchronisation_is_detected(place: Place) -> None:
    x = torch.ones(3, device=place.device)
    with pytest.raises((RuntimeError, AssertionError)), _without_synchronisation(place):
        x.sum().item()


def test_every_run_gives_the_same_bits_on_a_full_device(place: Place) -> None:
    """More programs than are resident at once, of different lengths, and the gradient of a bias."""
    B, H, S = _large(place, 4, 2), _large(place, 16, 2), _large(place, 2000, 50)
    inputs: Inputs = {name: place.normal(B, H, S, 64) for name in "qkv"}
    inputs["mask"] = place.normal(1, H, 1, S)
    inputs["causal"] = "top_left"
    first = results(place, inputs)
    for _ in range(20 if place.is_gpu else 2):
        assert all(map(torch.equal, results(place, inputs), first))


# -- memory ---------------------------------------------------------------------------------------

# Sizes that no tile divides, with every feature; each tensor has its own allocation.
_SMALL_CALLS = """
import sys
import torch
from fastattn.ops.attention import spec
device, backend = sys.argv[1:3]
ran = refused = 0
for sample in spec.SAMPLES:
    if sample.name not in sys.argv[3:]:
        continue
    inputs = sample.inputs(device, torch.bfloat16)
    wanted = [x for x in inputs.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    try:
        outputs = spec.attention(**inputs, backend=backend)
        torch.autograd.grad(outputs, wanted, [torch.ones_like(x) for x in outputs])
    except NotImplementedError:
        refused += 1
        continue
    ran += 1
if device == "cuda":
    torch.cuda.synchronize()
print(ran, "ran,", refused, "refused")
"""
_TOOLS = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
_MEMCHECK = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=_TOOLS)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_no_memory_errors(place: Place) -> None:
    command = [sys.executable, "-c", _SMALL_CALLS, place.device.type, place.backend, *FEATURES]
    if place.is_gpu:
        if _MEMCHECK is None:
            pytest.skip("needs compute-sanitizer")
        command = [_MEMCHECK, "--tool", "memcheck", "--error-exitcode", "99", *command]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1400
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-3000:]
    ran, refused = (int(word) for word in result.stdout.replace(",", "").split() if word.isdigit())
    assert ran + refused == len(FEATURES) and ran > 0
