"""One decoding step, recorded once and replayed: as a CUDA graph, on a CPU as a list of calls.

The step must run the same operations on the same tensors each time and read no value from the
device. A replay then runs only the operations, in the memory of the recorded run, without the
Python code between them; counters on the host do not advance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn.ops import interpreting


def recorded(
    step: Callable[[], None], rewind: Callable[[], None], device: torch.device
) -> Callable[[], None]:
    """Return a function that does one step: a replay of `step`, recorded now or at its first call.

    For a CUDA graph the step runs twice; `rewind` resets its tensors to the start, also before this
    returns.
    """
    if device.type == "cuda":
        return _cuda_graph(step, rewind, device)
    # Triton's interpreter launches kernels outside torch's dispatcher, so no tape records them.
    if device.type == "cpu" and not interpreting():
        return Tape(step)
    return step


def _cuda_graph(
    step: Callable[[], None], rewind: Callable[[], None], device: torch.device
) -> Callable[[], None]:
    with torch.cuda.device(device):
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

    Every tensor of that run is kept. Views of kept tensors stay valid and are not replayed; an
    operation that allocates its result is replayed into that tensor, by its `out=` overload. Calls
    go to the overload's `_op`, without its Python wrapper. Between replays `release` frees the
    memory of what the step computes, until `allocate`.
    """

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step
        self._calls: list[Callable[[], Any]] | None = None
        self._made: dict[torch.UntypedStorage, int] = {}  # with its bytes

    def release(self) -> None:
        for storage in self._made:
            storage.resize_(0)

    def allocate(self) -> None:
        for storage, size in self._made.items():
            storage.resize_(size)

    @torch.no_grad()
    def __call__(self) -> None:
        if self._calls is None:
            recorder = _Recorder()
            with recorder:
                self._step()
            # A step whose operations depend on values may differ the next time.
            if recorder.depends_on_values:
                self._calls = [self._step]
            else:
                self._calls, self._made = recorder.calls, recorder.made
            return
        for call in self._calls:
            call()


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []
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
            self.calls.append(partial(func._op, *args, **kwargs))
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
        out = _out_form(func)
        if out is None or any(name in kwargs for name in _LAYOUT):
            self.calls.append(lambda: _copy(made, _tensors(func(*args, **kwargs))))
            return
        names = [a.name for a in out._schema.arguments if a.is_out]
        targets = dict(zip(names, made, strict=True))
        self.calls.append(partial(out._op, *args, **kwargs, **targets))


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


def _copy(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


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
