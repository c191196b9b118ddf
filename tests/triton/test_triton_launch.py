"""Launches of Triton kernels: what the GPU's driver gets, which launches Triton specialises, how
often kernels are compiled, what caches keep alive. A stand-in for the driver records the launches;
nothing runs.
"""

import ctypes
import functools
import gc
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from compiled_kernels import without_code
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler.compiler import LazyDict
from triton.runtime.jit import JITFunction

from fastattn.ops import _cuda_driver, _env, _triton_launch
from fastattn.ops.attention.calls import BackwardCall, ForwardCall
from fastattn.ops.attention.triton import (
    backward,
    base_tiles,
    bwd_bind,
    call_shape,
    forward,
    mask_lists,
    tiles,
)
from fastattn.ops.ffn import triton as ffn
from fastattn.ops.ffn import triton_steps as steps
from fastattn.ops.ffn.calls import ForwardCall as FfnForwardCall
from fastattn.ops.ffn.config import Up, UpTile
from fastattn.ops.layer_norm import triton as norms
from fastattn.ops.layer_norm.calls import (
    AddLayerNormCall,
    LayerNormBackwardCall,
    LayerNormCall,
    RmsNormCall,
)

_wrap = nvidia.wrap_handle_tensordesc

pytestmark = [
    pytest.mark.skipif(_env.interpreting(), reason="the interpreter launches nothing"),
    pytest.mark.skipif(
        not hasattr(nvidia, "_BASE_ARGS_FORMAT"), reason="stands in for launchers of Triton 3.6"
    ),
]
# Positions of the hooks' arguments among a launcher's, and of a kernel's first argument.
_METADATA, _HOOKS, _FIRST = 10, (11, 12), 13


class _Launcher(nvidia.CudaLauncher):
    """Triton's launcher with a Python function where it compiles one in C."""

    launches: list[tuple[Any, ...]]

    def __init__(self, source: Any, metadata: Any):
        signature = dict(source.signature.items())
        layouts = getattr(metadata, "tensordesc_meta", None)
        self.launch = _wrap(self._note, signature, layouts)
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
    """For a Hopper GPU that is not present."""

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
    """The arguments of each launch."""
    noted: list[tuple[Any, ...]] = []
    monkeypatch.setattr(_Launcher, "launches", noted, raising=False)
    monkeypatch.setattr(nvidia, "CudaLauncher", _Launcher)
    monkeypatch.setattr(triton.runtime.driver, "_active", _Driver())
    monkeypatch.setattr(_env, "architecture", lambda *device: "sm_90")
    kernels = [
        value
        for module in (forward, bwd_bind, tiles, mask_lists, base_tiles, steps, norms)
        for value in vars(module).values()
        if isinstance(value, JITFunction)
    ]

    def forget() -> None:
        for plans in (forward, backward, ffn):
            plans._plans.clear()
        norms._forward_plans.clear()
        norms._backward_plans.clear()
        _cuda_driver._thread.__dict__.clear()
        for kernel in kernels:
            kernel.device_caches.clear()

    forget()
    with without_code():  # nothing is launched
        yield noted
    forget()


class _Call:
    """A forward and a backward on their own tensors. shift: of addresses, in elements."""

    def __init__(self, S: int = 256, D: int = 64, shift: int = 0, **options: Any):
        def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            numel = torch.Size(shape).numel()
            return torch.empty(numel + 16, dtype=dtype)[shift : shift + numel].view(shape)

        q, k, v, out, dout = (tensor(2, 2, S, D) for _ in range(5))
        lse = tensor(2, 2, S, dtype=torch.float32)
        p = options.get("dropout_p", 0.0)
        seed = torch.tensor([1, *options.get("origin", ())]) if p else None
        keys, queries = (
            tensor(2, dtype=torch.int32) if name in options.get("lengths", ()) else None
            for name in ("keys", "queries")
        )
        causal = options.get("causal", 0)
        self.fwd = ForwardCall(
            q, k, v, options.get("mask"), key_lengths=keys, query_lengths=queries, causal=causal,
            scale=0.125, dropout_p=p, dropout_seed=seed, dropout_stream=5,
        )  # fmt: skip
        needs = [True, True, True, False, False, False]
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        self.bwd = BackwardCall._make([dout, None, out, lse, *self.fwd, needs])
        self.results = [(out, lse), (*gradients, *[torch.empty(0)] * 3)]
        workspaces = (
            forward.attention_fwd_workspace(self.fwd),
            backward.attention_bwd_workspace(self.bwd),
        )
        self.scratch = [
            [torch.empty(s, dtype=t) for s, t, _ in workspace] for workspace in workspaces
        ]

    def __call__(self) -> None:
        forward.attention_fwd(self.fwd, *self.results[0], *self.scratch[0])
        backward.attention_bwd(self.bwd, *self.results[1], *self.scratch[1])

    def tensors(self) -> list[Tensor]:
        every = (*self.fwd, *self.bwd, *self.results[1], *self.scratch[0], *self.scratch[1])
        return [x for x in every if isinstance(x, Tensor)]


_FEATURES: dict[str, dict[str, Any]] = {
    "mask, dropout of a part": {
        "mask": torch.ones(1, 1, 256, 256, dtype=torch.bool),
        "dropout_p": 0.5,
        "origin": (1, 2, 16, 32),
    },
    "padded, lengths": {"D": 80, "lengths": ("keys", "queries"), "causal": 3},
}


class _Norms:
    """A layer norm with its backward, and one of a sum with dropout."""

    def __init__(self, rows: int):
        x, row = torch.empty(rows, 512, dtype=torch.bfloat16), torch.empty(rows)
        w, seed = torch.empty(512, dtype=torch.bfloat16), torch.tensor([rows])
        self.fwd = (LayerNormCall(x, w, w, 1e-5), x, row, row)
        self.add = (AddLayerNormCall(x, x, w, w, w, 1e-5, 0.1, seed, rows), x, x, row, row)
        self.bwd = LayerNormBackwardCall(x, x, w, w, row, row, 1e-5, [True] * 3)
        workspace = norms.layer_norm_bwd_workspace(self.bwd)
        self.results = (x, w, w, *(torch.empty(s, dtype=t) for s, t, _ in workspace))

    def __call__(self) -> None:
        norms.layer_norm_fwd(*self.fwd)
        norms.add_layer_norm_fwd(*self.add)
        norms.layer_norm_bwd(self.bwd, *self.results)


class _Products:
    """First products of the FFN, whose descriptors have as many rows as the call."""

    def __init__(self) -> None:
        tile = UpTile(64, 64, 32, 4, 2, subtiles=1, tma=True)
        x, w = torch.empty(2, 64, 96, dtype=torch.bfloat16)
        self.relu = steps.UpProduct(tile, x, w, "relu", 0.0)
        self.gated = steps.UpProduct(tile, x, w, "swiglu", 0.0)

    def of(self, rows: int) -> Callable[[], None]:
        x, w = (torch.empty(n, 96, dtype=torch.bfloat16) for n in (rows, 64))
        hidden, a = (torch.empty(rows, n, dtype=torch.bfloat16) for n in (64, 32))

        def call() -> None:
            self.relu(x, w, None, hidden, hidden, None, 0)
            self.gated(x, w, None, hidden, a, None, 0)

        return call


def _maker(name: str) -> Callable[[int], Callable[[], None]]:
    """n -> a call on its own tensors, with the same kernels for every n."""
    if name == "norms":
        return lambda n: _Norms(16 * n)
    if name == "products":
        return _Products().of
    return lambda n: _Call(**_FEATURES[name])


@pytest.mark.parametrize("name", [*_FEATURES, "norms", "products"])
def test_bound_launches_pass_what_triton_passes(name: str, launches: list[tuple[Any, ...]]) -> None:
    """The driver gets the same arguments, also for other tensors than the first."""
    make = _maker(name)
    make(3)()  # binds the kernels
    count = len(launches)
    call = make(5)
    assert not _specialised(call)
    seen: list[Any] = []
    hook = knobs.runtime.launch_enter_hook
    hook.add(seen.append)
    try:
        assert _specialised(call) == count
    finally:
        hook.remove(seen.append)
    bound, by_triton = launches[count : 2 * count], launches[2 * count :]
    assert len(bound) == len(by_triton) == len(seen) == count >= 2
    for a, b in zip(bound, by_triton, strict=True):
        assert a[3] == a[_METADATA].get()["stream"] == 43  # of the device
        assert _comparable(a) == _comparable(b)
    assert name == "norms" or any("descriptor" in str(launch) for launch in bound)


def _comparable(x: Any) -> Any:
    """A launch's arguments, also in tuples: tensors as addresses, metadata as its values."""
    if isinstance(x, tuple):
        return tuple(map(_comparable, x))
    return x.data_ptr() if isinstance(x, Tensor) else x.get() if isinstance(x, LazyDict) else x


def _specialised(call: Callable[[], None]) -> int:
    """The number of launches of a call whose specialisation Triton looks up."""
    with mock.patch.object(JITFunction, "run", autospec=True, side_effect=JITFunction.run) as run:
        call()
    return run.call_count


def test_hooks_at_the_first_launch_do_not_affect_later_ones(launches):
    """A profiler may have kernels compiled in its own way."""
    call, seen = _Norms(48), list[Any]()
    hook = knobs.runtime.launch_exit_hook
    hook.add(seen.append)
    try:
        call()
        count = len(launches)
        assert _specialised(call) == count
    finally:
        hook.remove(seen.append)
    assert len(seen) == len(launches) == 2 * count
    assert _specialised(call) == count  # bound here
    assert not _specialised(call)
    hook.add(seen.append)
    try:
        assert _specialised(call) == count
    finally:
        hook.remove(seen.append)
    assert not _specialised(call)
    assert len(seen) == 3 * count and len(launches) == 6 * count


class _Libcuda:
    """CUDA's driver library, of a thread without a context, while a graph is captured."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.mode, self.context = 0, 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = self.context or None
        return 0

    def cuDeviceGet(self, handle: Any, device: int) -> int:
        handle._obj.value = device
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, handle: ctypes.c_int) -> int:
        context._obj.value = 100 + handle.value
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        self.context = context.value or 0
        return 0


def test_kernels_load_while_a_graph_is_captured(launches, monkeypatch):
    """Kernels load in the relaxed mode; launches are captured in the mode before."""
    cuda, modes = _Libcuda(), []
    monkeypatch.setattr(_cuda_driver, "_library", lambda: cuda)
    for question in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, question, lambda: True)
    load = _Utils.load_binary
    monkeypatch.setattr(
        _Utils, "load_binary", lambda *args: (modes.append(cuda.mode), load(*args))[1]
    )
    call = _Norms(48)
    call()
    assert len(modes) == len(launches) and set(modes) == {2} and cuda.mode == 0
    call()
    assert len(launches) == 2 * len(modes)


def test_descriptors_are_made_in_a_context(launches, monkeypatch):
    """In the first thread, and in one that has no context yet."""
    cuda, contexts = _Libcuda(), []
    monkeypatch.setattr(_cuda_driver, "_library", lambda: cuda)
    answers = {"is_initialized": True, "is_current_stream_capturing": False, "current_device": 3}
    for question, answer in answers.items():
        monkeypatch.setattr(torch.cuda, question, lambda answer=answer: answer)
    fill = _Utils.fill_tma_descriptor
    monkeypatch.setattr(
        _Utils,
        "fill_tma_descriptor",
        staticmethod(lambda *args: (contexts.append(cuda.context), fill(*args))[1]),
    )
    calls = _Call(), _Call()
    calls[0]()
    assert contexts and set(contexts) == {103}
    cuda.context = 0
    contexts.clear()
    thread = threading.Thread(target=calls[1])
    thread.start()
    thread.join()
    assert contexts and set(contexts) == {103}


def test_rows_and_dropout_change_without_compilation(launches: list[tuple[Any, ...]]) -> None:
    """No kernel is compiled or bound again."""
    _Norms(48)()
    plans = list(norms._forward_plans.values())
    call = _Norms(64)
    assert not _specialised(call)
    assert list(norms._forward_plans.values()) == plans
    add, *results = call.add
    norms.add_layer_norm_fwd(add._replace(dropout_p=0.5), *results)
    assert launches[-1][_FIRST + 12 : _FIRST + 14] == (128, 2.0)  # the threshold, 1 / (1 - p)
    assert launches[-1][_FIRST] is add.x


def test_unaligned_addresses_are_launched_by_triton(launches: list[tuple[Any, ...]]) -> None:
    _Call(lengths=("keys", "queries"))()
    count = len(launches)
    _Call(shift=1, lengths=("keys", "queries"))()
    shifted = launches[count:]
    assert len(shifted) == count
    assert not any("descriptor" in str(launch) for launch in shifted)  # none covers these


def _nothing(*args: Any) -> None:
    pass


def _bound(
    monkeypatch: pytest.MonkeyPatch, module: Any, bind: str, plan: Any, plans: str = "_plans"
) -> list[tuple[Any, ...]]:
    """The arguments of each call of `module.bind`, which is replaced by one that returns `plan`."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, bind, lambda *args: (seen.append(args), plan)[1])
    monkeypatch.setattr(module, plans, _triton_launch.LaunchCache())
    return seen


_BACKWARD_PLAN = bwd_bind.Plan(None, None, None, None, _nothing, (), None, None, None, 0)


@pytest.mark.parametrize("op, name", [
    *(("attention_fwd", name) for name in ("k", "v")),
    *(("attention_bwd", name) for name in ("q", "k", "v", "dout")),
    *(("ffn_fwd", name) for name in ("x", "w1")),
])  # fmt: skip
def test_descriptors_need_every_tensor_aligned(op, name, monkeypatch):
    """A call with one unaligned tensor has a plan of its own."""
    call: Any
    if op.startswith("attention"):
        attention, way = _Call(16, 16), int(op == "attention_bwd")
        call, run = (attention.fwd, attention.bwd)[way], (forward, backward)[way]
        results = (*attention.results[way], *attention.scratch[way])
        plan: Any = (forward._Plan(_nothing, None, None), _BACKWARD_PLAN)[way]
    else:
        x, b = torch.empty(16, 16, dtype=torch.bfloat16), torch.empty(16, dtype=torch.bfloat16)
        options, results = ("relu", 0.0, 0.0, None, 0), (torch.empty_like(x), torch.empty_like(x))
        call, run = FfnForwardCall(x, x, b, x, b, None, *options), ffn
        plan = ffn._ForwardPlan(None, False, None, None)
    bind = {"attention_bwd": "bind", "ffn_fwd": "_bind_forward"}
    bound = _bound(monkeypatch, run, bind.get(op, "_bind"), plan)
    tensor = getattr(call, name)
    shifted = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    for x in (tensor, shifted):
        getattr(run, op)(call._replace(**{name: x}), *results)
    flags = [args[3 if op == "attention_bwd" else -1] for args in bound]
    assert flags == [True, False]


def test_backward_is_bound_for_each_set_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    call = _Call(16, 16)
    bound = _bound(monkeypatch, backward, "bind", _BACKWARD_PLAN)
    dout, dlse = call.bwd.dout, torch.empty_like(call.bwd.lse)
    for gradients in 2 * ((dout, dlse), (dout, None), (None, dlse)):
        given = call.bwd._replace(dout=gradients[0], dlse=gradients[1])
        backward.attention_bwd(given, *call.results[1], *call.scratch[1])
    assert len(bound) == 3


def _norm(way: str) -> tuple[Callable[..., None], dict[str, Any]]:
    x, row, of_rows = torch.empty(4, 16, dtype=torch.float16), torch.empty(16), torch.empty(4)
    options = {"dropout_p": 0.0, "dropout_seed": None, "dropout_stream": 0}
    args = {"z": x, "weight": row, "mean": of_rows, "rstd": of_rows, **options}
    if way == "fwd":
        return norms.norm_fwd, args | {
            "x": x, "residual": x, "x_bias": row, "bias": row, "eps": 1e-5, "y": x
        }  # fmt: skip
    results = {"dx": x, "dresidual": x, "dweight": row, "dbias": row, "dx_bias": row}
    return norms.norm_bwd, args | results | {"dy": x, "dz": x, "partials": row}


def _norms_bound(way: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    if way == "fwd":
        plan: Any = norms._ForwardPlan(_nothing, 1, 1)  # type: ignore[arg-type]
        return _bound(monkeypatch, norms, "_bind_forward", plan.launch, "_forward_plans")
    config = norms.norm_bwd_config(None, None, torch.empty(4, 16), 0)
    plan = norms._BackwardPlan(config, _nothing, None, None)  # type: ignore[arg-type]
    return _bound(monkeypatch, norms, "_bind_backward", plan, "_backward_plans")


@pytest.mark.parametrize("way, names", [
    ("fwd", ("x", "residual", "x_bias", "weight", "bias")),
    ("bwd", ("z", "dy", "dz", "weight", "dx", "dresidual", "dweight", "dbias", "dx_bias")),
])  # fmt: skip
def test_norms_are_bound_for_the_dtype_of_every_tensor(way, names, monkeypatch):
    bound = _norms_bound(way, monkeypatch)
    run, args = _norm(way)
    run(**args)
    for n, name in enumerate(names):
        for _ in range(2):
            run(**args | {name: args[name].bfloat16()})
        assert len(bound) == n + 2, name


@pytest.mark.parametrize("way", ["fwd", "bwd"])
def test_norms_are_bound_for_32_and_64_bit_numbers_of_rows(way, monkeypatch):
    bound = _norms_bound(way, monkeypatch)
    run, args = _norm(way)
    for rows, count in ((7, 1), ((1 << 31) - 1, 1), (1 << 31, 2), (9, 2)):
        many = {
            name: torch.empty((rows, *x.shape[1:]), dtype=x.dtype, device="meta")
            for name, x in args.items()
            if isinstance(x, Tensor) and x.shape[0] == 4
        }
        run(**args | many)
        assert len(bound) == count


def test_unaligned_addresses_have_their_own_kernel(launches: list[tuple[Any, ...]]) -> None:
    """The cache of plans does not distinguish alignments."""
    storage, row = torch.empty(48 * 512 + 16, dtype=torch.bfloat16), torch.empty(48)
    rows = [storage[shift : shift + 48 * 512].view(48, 512) for shift in (0, 1)]
    calls = [
        functools.partial(norms.rms_norm_fwd, RmsNormCall(x, None, 1e-5), x, row) for x in rows
    ]
    calls[0]()
    assert [_specialised(calls[n]) for n in (0, 1, 0)] == [0, 1, 0]


def test_products_of_unaligned_tensors_have_no_descriptors(launches: list[tuple[Any, ...]]) -> None:
    config = Up(UpTile(64, 64, 32, 4, 2, subtiles=1, tma=True), "tested")
    x = torch.empty(64 * 64 + 1, dtype=torch.bfloat16)[1:].view(64, 64)
    b = torch.empty(64, dtype=torch.bfloat16)
    call = FfnForwardCall(x, x, b, x, b, None, "relu", 0.0, 0.0, None, 0)
    ffn.ffn_fwd_with_config(config, call, torch.empty_like(x), torch.empty_like(x))
    assert launches and not any("descriptor" in str(launch) for launch in launches)


def test_descriptors_have_the_rows_of_their_call(launches: list[tuple[Any, ...]]) -> None:
    """Also in the same memory as the call before."""
    tile, n = UpTile(64, 64, 32, 4, 2, subtiles=1, tma=True), 64
    x, out = (torch.empty(n, n, dtype=torch.bfloat16) for _ in range(2))
    product = steps.UpProduct(tile, x, x, "relu", 0.0)
    for rows in (n, n, n // 2, n):
        product(x[:rows], x, None, out[:rows], out[:rows], None, 0)
        made = [y[1] for y in launches[-1] if isinstance(y, tuple) and y[0] == "descriptor"]
        assert [sizes for *_, sizes, _, _ in made] in ([], [(rows, n), (n, n)])
    assert made


def test_launch_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton_launch, "_MAX_CACHED", 3)
    cache = _triton_launch.LaunchCache()
    for n in range(10):
        assert cache.remember(n, -n) == -n == cache.get(n)
        assert len(cache) <= 3


def test_kernels_are_compiled_for_their_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_env, "architecture", lambda kind, index: f"{kind} {index}")
    for n, device in enumerate((torch.device("cuda"), torch.device("cuda", 1))):
        x = types.SimpleNamespace(device=device, is_cuda=True, get_device=lambda n=n: n)
        for architecture in (call_shape.architecture, ffn._arch, norms._arch):
            assert architecture(x) == f"cuda {n}"


def test_lengths_share_kernels(launches: list[tuple[Any, ...]]) -> None:
    """Kernels are specialised for multiples of a tile, 16 and 2 only."""
    for S in (1000, 1001, 1017, 1008, 1200, 1280, 1536, 130, 67):
        _Call(S, causal=1)()
    kernels = (forward.attention_fwd_kernel, bwd_bind.attention_bwd_dq_kernel)
    for kernel in (*kernels, bwd_bind.attention_bwd_dkdv_kernel):
        [cache] = kernel.device_caches.values()
        assert 1 <= len(cache[0]) <= 4, kernel


def test_launch_cache_keeps_no_memory_alive(launches: list[tuple[Any, ...]]) -> None:
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
