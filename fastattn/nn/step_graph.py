"""A decoding step or an encoding, recorded once and replayed, as a CUDA graph or a list of calls.

The step must run the same operations on the same tensors each time and read no value from the
device. A replay then runs only the operations, without the Python code between them; counters on
the host do not advance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn.ops import Call, interpreting, move_to_large_pages, replay


def recorded(
    step: Callable[[], None],
    rewind: Callable[[], None],
    device: torch.device,
    results: Callable[[], Sequence[Tensor] | None] | None = None,
    weights: Iterable[Tensor] = (),
) -> Callable[[], None]:
    """Return a function that does one step: a replay of `step`, recorded now or at its first call.

    results: the tensors made by a step that are read after it, until the next step begins; called
    after the first step. If given, a replay on a CPU computes all others in memory that they share:
    that of a result until it is written, and memory that is allocated for the replay alone, so that
    reading one of them after a step may crash. Else, and if it returns None, a replay computes each
    in memory of its own.
    weights: on a CPU they are moved to large pages (250 MB, one Zen 5 thread: the products of a
    step take 4.4 ms instead of 5.0 with 154 MB of them; moving takes 0.09 s).
    For a CUDA graph the step runs twice; `rewind` resets its tensors to the start, also before this
    returns.
    """
    if device.type == "cuda":
        return _cuda_graph(step, rewind, device)
    # Triton's interpreter launches kernels outside torch's dispatcher, so no tape records them.
    if device.type == "cpu" and not interpreting():
        move_to_large_pages(weights)
        return Tape(step, results)
    return step


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """So that a step contains the casts of its weights, which later steps must do again, and no
    other call gets their results.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def _cuda_graph(
    step: Callable[[], None], rewind: Callable[[], None], device: torch.device
) -> Callable[[], None]:
    with torch.cuda.device(device), _without_autocast_cache():
        rewind()
        # The first run compiles kernels and allocates workspaces, which a graph must not contain.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        rewind()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        rewind()
    return graph.replay


class Tape:
    """A step's operations on a CPU, recorded at the first call.

    Every tensor of that run is kept; with `results`, those that are not read after a step share
    memory, some of which is allocated for a replay alone. Views of kept tensors stay valid and are
    not replayed; an operation that allocates its result is replayed into that tensor, by its `out=`
    overload. `release` frees the memory of what is kept between replays, until `allocate`.
    """

    def __init__(
        self, step: Callable[[], None], results: Callable[[], Sequence[Tensor] | None] | None = None
    ) -> None:
        self._step: Callable[[], None] | None = step  # until it is recorded
        self._results = results
        self._replay: Callable[[], None] | None = None
        self._made: dict[torch.UntypedStorage, int] = {}  # with its bytes
        self._workspace = torch.UntypedStorage(0)
        self._workspace_size = 0

    def release(self) -> None:
        for storage in self._made:
            storage.resize_(0)

    def allocate(self) -> None:
        for storage, size in self._made.items():
            storage.resize_(size)

    @property
    def is_replayed(self) -> bool:
        """Whether a step was recorded; one whose operations depend on values is called again."""
        return self._step is None

    def __call__(self) -> None:
        if self._replay is None:
            self._replay = self._record()
        else:
            self._workspace.resize_(self._workspace_size)
            try:
                self._replay()
            finally:
                self._workspace.resize_(0)

    @torch.no_grad()
    def _record(self) -> Callable[[], None]:
        assert self._step is not None
        recorder = _Recorder()
        with _without_autocast_cache(), recorder:
            self._step()
        if recorder.depends_on_values:  # they may differ the next time
            return self._step
        results = None if self._results is None else self._results()
        if results is not None:
            recorder.share_memory(results, self._workspace)
            self._workspace_size = self._workspace.nbytes()
            self._workspace.resize_(0)
        self._made = recorder.made
        self._step = self._results = None  # which refer to the model
        return replay(recorder.calls)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.used: list[list[Tensor]] = []  # by each call: arguments and results
        self.made: dict[torch.UntypedStorage, int] = {}
        self.depends_on_values = False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        self._keep(func, args, kwargs, results)
        return results

    def _keep(self, func: OpOverload, args: Sequence[Any], kwargs: Any, results: Any) -> None:
        made = _tensors(results)
        self.depends_on_values |= not _DEPENDS_ON_VALUES.isdisjoint(func.tags)
        if func._schema.is_mutable or not func._schema.returns:
            self._add(Call(func, args, kwargs))
            return
        if not made:
            return  # no tensor result
        inputs = {tensor.untyped_storage().data_ptr() for tensor in _tensors([args, kwargs])}
        if all(tensor.untyped_storage().data_ptr() in inputs for tensor in made):
            return  # views
        for tensor in made:
            if (storage := tensor.untyped_storage()).data_ptr() not in inputs:
                self.made[storage] = storage.nbytes()
        if func.overloadpacket in _UNFILLED:
            return  # uninitialised: filled by a later call
        if func is _ATEN._to_copy.default:  # to another dtype, for example
            self._add(Call(_ATEN.copy_.default, (*made, *args), {}))
            return
        out = _out_form(func)
        if out is None or any(name in kwargs for name in _LAYOUT):
            self._add(Call(func, args, kwargs, made))
            return
        names = [a.name for a in out._schema.arguments if a.is_out]
        targets = dict(zip(names, made, strict=True))
        self._add(Call(out, args, kwargs | targets))

    def _add(self, call: Call) -> None:
        self.calls.append(call)
        self.used.append(_tensors([call.args, call.kwargs, call.targets]))

    def share_memory(self, results: Sequence[Tensor], workspace: torch.UntypedStorage) -> None:
        """Tensors that are not in use at the same time share memory: that of the largest of
        `results`, and `workspace`, resized to what does not fit there. An elementwise operation
        writes its result into an operand that no later call uses. `results` keep their memory.
        """
        kept = {tensor.untyped_storage() for tensor in results}
        tensors: dict[torch.UntypedStorage, dict[int, Tensor]] = {}
        last: dict[torch.UntypedStorage, int] = {}
        for i, used in enumerate(self.used):
            for tensor in used:
                storage = tensor.untyped_storage()
                if storage in self.made and storage not in kept:
                    tensors.setdefault(storage, {})[id(tensor)] = tensor
                    last[storage] = i
        firsts = {storage: i for i, used in reversed([*enumerate(self.used)])
                  for storage in (tensor.untyped_storage() for tensor in used)}  # fmt: skip
        for i, call in enumerate(self.calls):
            for given, into in _overwritable(call):
                joins = given != into and given in tensors and into in self.made
                if joins and last[given] == i == firsts[into]:
                    views = tensors.pop(given)
                    if into in kept:
                        _move(views, into)
                    else:
                        tensors[into] |= views
                    firsts[into] = firsts[given]
                    break
        sizes = self.made
        self.made = {storage: size for storage, size in sizes.items() if storage in kept}
        # Until the call that writes it, the memory of a result is free.
        arena = max(self.made, key=lambda s: self.made[s], default=workspace)
        capacity = arena.nbytes()
        in_arena = [_Placed(0, capacity, firsts.get(arena, 0), len(self.calls))]
        in_workspace: list[_Placed] = []
        for storage in sorted(tensors, key=lambda s: sizes[s], reverse=True):
            size, lifetime = sizes[storage], (firsts[storage], last[storage])
            memory, placed = arena, in_arena
            start = _free_offset(placed, size, *lifetime)
            if start + size > capacity:
                memory, placed = workspace, in_workspace
                start = _free_offset(placed, size, *lifetime)
                workspace.resize_(max(workspace.nbytes(), start + size))
            placed.append(_Placed(start, start + size, *lifetime))
            _move(tensors[storage], memory, start)


class _Placed(NamedTuple):
    """Bytes [start, end) of the shared memory, in use from one call to another, inclusive."""

    start: int
    end: int
    first: int
    last: int


_ALIGNMENT = 64  # bytes, as PyTorch's allocator


def _free_offset(placed: Sequence[_Placed], size: int, first: int, last: int) -> int:
    """The lowest offset of `size` bytes that are free from call `first` to call `last`."""
    start = 0
    for each in sorted(p for p in placed if p.first <= last and first <= p.last):
        if start + size <= each.start:
            break
        start = max(start, -(-each.end // _ALIGNMENT) * _ALIGNMENT)
    return start


def _overwritable(call: Call) -> list[tuple[torch.UntypedStorage, torch.UntypedStorage]]:
    """The storages of each operand that has the dtype and the layout of the result, and of the
    result, for an elementwise operation with `out`.
    """
    out = call.kwargs.get("out")
    if out is None or torch.Tag.pointwise not in call.op.tags:
        return []

    def form(x: Tensor) -> tuple[Any, ...]:
        return x.dtype, x.shape, x.stride(), x.storage_offset(), x.untyped_storage().nbytes()

    operands = _tensors(call.args)
    storages = [x.untyped_storage() for x in operands]
    return [
        (storage, out.untyped_storage())
        for x, storage in zip(operands, storages, strict=True)
        if form(x) == form(out) and storages.count(storage) == 1
    ]


def _move(views: dict[int, Tensor], storage: torch.UntypedStorage, start: int = 0) -> None:
    """To the same places of another storage, `start` bytes further on."""
    for tensor in views.values():
        offset = tensor.storage_offset() + start // tensor.itemsize
        tensor.set_(storage, offset, tensor.shape, tensor.stride())  # type: ignore[call-overload]


_DEPENDS_ON_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_ATEN = torch.ops.aten
_UNFILLED = (_ATEN.empty, _ATEN.empty_like, _ATEN.new_empty, _ATEN.empty_strided,
             _ATEN.new_empty_strided)  # fmt: skip


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [tensor for value in values for tensor in _tensors(value)]


def _out_form(func: OpOverload) -> OpOverload | None:
    """The overload of the same operation that writes into given tensors."""

    def inputs(overload: OpOverload) -> list[tuple[str, str]]:
        arguments = overload._schema.arguments
        return [(a.name, str(a.type)) for a in arguments if not a.is_out and a.name not in _LAYOUT]

    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        outs = sum(a.is_out for a in overload._schema.arguments)
        if outs == len(func._schema.returns) and inputs(overload) == inputs(func):
            return overload
    return None


# Arguments of factories that an `out` tensor determines.
_LAYOUT = ("dtype", "layout", "device", "pin_memory")
