"""How the Triton attention is launched: what the GPU's driver is given, how often kernels are
compiled, what is kept alive. The driver is replaced by one that writes down; nothing runs.
"""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn.ops import _env

triton = pytest.importorskip("triton")

from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia import driver as nvidia  # noqa: E402

from fastattn.ops.attention import triton as forward  # noqa: E402
from fastattn.ops.attention import triton_bwd as backward  # noqa: E402
from fastattn.ops.attention import triton_bwd_tiles, triton_tiles  # noqa: E402

pytestmark = pytest.mark.skipif(_env.interpreting(), reason="the interpreter launches nothing")
# Positions in a launcher's arguments of what is for profilers.
_METADATA, _HOOKS = 10, (11, 12)


class _Launcher(nvidia.CudaLauncher):
    """Triton's launcher with a Python function where it compiles one in C."""

    launches: list[tuple[Any, ...]]

    def __init__(self, source: Any, metadata: Any):
        signature = dict(source.signature.items())
        layouts = getattr(metadata, "tensordesc_meta", None)
        self.launch = nvidia.wrap_handle_tensordesc(self._note, signature, layouts)
        self.num_ctas, self.launch_cooperative_grid = 1, metadata.launch_cooperative_grid
        self.launch_pdl = metadata.launch_pdl
        self.global_scratch_size = self.profile_scratch_size = 0
        self.global_scratch_align = self.profile_scratch_align = 1

    @classmethod
    def _note(cls, *args: Any) -> None:
        for hook in (args[_HOOKS[0]], args[_HOOKS[1]]):
            if hook is not None:
                hook(args[_METADATA])
        cls.launches.append(args)


class _Utils:
    @staticmethod
    def load_binary(*args: Any) -> tuple[int, int, int, int, int]:
        return 1, 2, 32, 0, 1024

    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024, "multiprocessor_count": 132, "warpSize": 32}

    @staticmethod
    def fill_tma_descriptor(*args: Any) -> tuple[str, Any]:
        return "descriptor", tuple(tuple(x) if isinstance(x, list) else x for x in args)


class _Driver:
    """Of a Hopper GPU that is not there."""

    utils, launcher_cls = _Utils, _Launcher

    @staticmethod
    def get_current_target() -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    @staticmethod
    def get_current_device() -> int:
        return 3

    @staticmethod
    def get_current_stream(device: int) -> int:
        return 40 + device


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """What launchers were called with."""
    noted: list[tuple[Any, ...]] = []
    monkeypatch.setattr(_Launcher, "launches", noted, raising=False)
    monkeypatch.setattr(nvidia, "CudaLauncher", _Launcher)
    monkeypatch.setattr(triton.runtime.driver, "_active", _Driver())
    monkeypatch.setattr(_env, "architecture", lambda *device: "sm_90")
    kernels = [
        value
        for module in (forward, backward, triton_tiles, triton_bwd_tiles)
        for value in vars(module).values()
        if isinstance(value, triton.runtime.jit.JITFunction)
    ]

    def forget() -> None:
        forward._plans.clear()
        backward._plans.clear()
        for kernel in kernels:
            kernel.device_caches.clear()

    forget()
    yield noted
    forget()


class _Call:
    """A forward and a backward on tensors of their own. shift: of addresses, in elements."""

    def __init__(self, S: int = 256, D: int = 64, shift: int = 0, **options: Any):
        def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            numel = torch.Size(shape).numel()
            return torch.empty(numel + 16, dtype=dtype)[shift : shift + numel].view(shape)

        q, k, v, out, dout = (tensor(2, 2, S, D) for _ in range(5))
        lse = tensor(2, 2, S, dtype=torch.float32)
        p = options.get("dropout_p", 0.0)
        seed = torch.tensor([1]) if p else None
        rest = (None, None, None, options.get("causal", 0), -1, -1, 0.125, p, seed, 5)
        self.fwd = (q, k, v, options.get("mask"), *rest, out, lse)
        needs = [True, True, True, False]
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        self.bwd = (
            dout, None, *self.fwd[:7], out, lse, *rest[3:], needs, *gradients, torch.empty(0)
        )  # fmt: skip
        spaces = (
            forward.attention_fwd_workspace(*self.fwd[:-2]),
            backward.attention_bwd_workspace(*self.bwd[:-4]),
        )
        self.scratch = [[torch.empty(s, dtype=t) for s, t, _ in space] for space in spaces]

    def __call__(self) -> None:
        forward.attention_fwd(*self.fwd, *self.scratch[0])
        backward.attention_bwd(*self.bwd, *self.scratch[1])

    def tensors(self) -> list[Tensor]:
        every = (*self.fwd, *self.bwd, *self.scratch[0], *self.scratch[1])
        return [x for x in every if isinstance(x, Tensor)]


_FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": 2},
    "mask": {"mask": torch.ones(1, 1, 256, 256, dtype=torch.bool)},
    "dropout": {"dropout_p": 0.5},
    "padded": {"D": 80},
}


@pytest.mark.parametrize("feature", _FEATURES)
def test_launches_again_what_triton_launched(feature: str, launches: list[tuple[Any, ...]]) -> None:
    """The short road ends in the same call as Triton's own, on other tensors than the first."""
    _Call(**_FEATURES[feature])()  # the first launch of a kernel takes Triton's road
    count = len(launches)
    call = _Call(**_FEATURES[feature])
    call()
    # A profiler wants to know, so here it takes Triton's road.
    seen: list[Any] = []
    hook = knobs.runtime.launch_enter_hook
    hook.add(seen.append)
    try:
        call()
    finally:
        hook.remove(seen.append)
    short, long = launches[count : 2 * count], launches[2 * count :]
    assert len(short) == len(long) == len(seen) == count >= 3
    for a, b in zip(short, long, strict=True):
        assert all(a[at] is None for at in (_METADATA, *_HOOKS))
        assert a[3] == 43  # the stream of the device
        x, y = ([v.data_ptr() if isinstance(v, Tensor) else v for v in launch] for launch in (a, b))
        for at in (_METADATA, *_HOOKS):
            y[at] = None
        assert x == y
    assert any("descriptor" in str(launch) for launch in short)


def test_addresses_of_another_alignment_are_looked_up(launches: list[tuple[Any, ...]]) -> None:
    _Call()()
    count = len(launches)
    _Call(shift=1)()
    shifted = launches[count:]
    assert len(shifted) == count
    assert not any("descriptor" in str(launch) for launch in shifted)  # none covers these


def test_lengths_share_kernels(launches: list[tuple[Any, ...]]) -> None:
    """Lengths are told apart by whole tiles, 16 and 2, but no further."""
    for S in (1000, 1001, 1003, 1017, 1008, 1200, 1280, 1536, 130, 67):
        _Call(S, causal=1)()
    kernels = (forward.attention_fwd_kernel, backward.attention_bwd_dq_kernel)
    for kernel in (*kernels, backward.attention_bwd_dkdv_kernel):
        [cache] = kernel.device_caches.values()
        assert 1 <= len(cache[0]) <= 4, kernel


def test_remembered_launches_keep_no_memory_alive(launches: list[tuple[Any, ...]]) -> None:
    call = _Call()
    call()
    call()
    assert any("descriptor" in str(launch) for launch in launches)
    alive = [weakref.ref(x) for x in call.tensors()]
    assert len(alive) > 10
    launches.clear()
    del call
    gc.collect()
    assert not any(x() is not None for x in alive)
