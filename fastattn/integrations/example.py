"""Compares a model's results for an example before and after conversion, for `patch`.

How far rounding alone may move a result is estimated by Monte Carlo arithmetic (D. S. Parker,
"Monte Carlo Arithmetic", UCLA CSD-970002, 1997): the original model runs with the floating-point
inputs and results of the modules to be converted perturbed by rounding errors of their dtype. A
copy of the model in fp64 would need two to four times its memory, and a model that names its dtypes
does not run in it. A result may differ by

    4 * the largest change in these runs + 4 * eps(dtype) * max|result|

in each row of its last dimension, or in the whole tensor where rows are short.
"""

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from fastattn.nn.fusion import is_plain_tensor

_RUNS = 3
_FACTOR = 4  # of the largest change in these runs: a maximum of few draws underestimates
_UNITS = {  # largest relative error of rounding
    dtype: torch.finfo(dtype).eps / 2
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
_ROW = 16  # smallest last dimension whose rows are compared one by one
# Arguments that mark padding, and whether True or 1 means a real position.
_PADDING = {
    "attention_mask": True,
    "decoder_attention_mask": True,
    "key_padding_mask": False,
    "src_key_padding_mask": False,
    "tgt_key_padding_mask": False,
    "memory_key_padding_mask": False,
}


@dataclass
class Conversion:
    """One conversion of a model, which can be undone and done again.

    modules: those whose computation it changes. kind: the name of their previous class.
    """

    name: str
    kind: str
    modules: list[nn.Module]
    convert: Callable[[], None]
    revert: Callable[[], None]
    is_attention: bool = False
    is_done: bool = True

    def set(self, done: bool) -> None:
        if done != self.is_done:
            (self.convert if done else self.revert)()
        self.is_done = done


class Example:
    """A model's results for an example, taken before anything of the model is converted.

    ran: ids of the modules that ran. sdpa_callers: ids of those that were running, innermost, when
    `scaled_dot_product_attention` was called.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        self._model = model
        self._args, self._kwargs = _arguments(example)
        self._expected = self._run()
        given = inspect.signature(model.forward).bind(*self._args, **self._kwargs).arguments
        given |= given.get("kwargs", {})
        self._padding = [
            marks.bool() == means_real
            for name, means_real in _PADDING.items()
            if isinstance(marks := given.get(name), Tensor) and marks.dim() == 2
        ]
        if not self._expected:
            raise ValueError("example must give floating-point outputs, got none")
        self._noise = [torch.zeros((), dtype=torch.float64) for _ in self._expected]
        self.ran: set[int] = set()
        self.sdpa_callers: set[int] = set()
        with _Observer(self.ran, self.sdpa_callers):
            self._add_noise()  # of a model whose results differ from run to run

    def estimate_rounding(self, modules: Iterable[nn.Module]) -> None:
        """Measures how far the original model's results move with the rounding of `modules`."""
        modules = list(modules)
        for seed in range(_RUNS):
            perturb = _Perturbation(seed)
            with ExitStack() as hooks:
                for module in modules:
                    first = module.register_forward_pre_hook(perturb.inputs, with_kwargs=True)
                    last = module.register_forward_hook(perturb.output)
                    hooks.callback(first.remove)
                    hooks.callback(last.remove)
                self._add_noise()

    def revert_causes(self, conversions: list[Conversion]) -> list[tuple[Conversion, str]]:
        """Reverts the conversions that change the results by more than rounding; with reasons.

        The last one of the shortest prefix of `conversions` that changes the results is a cause.
        Once two of a kind are found, all of that kind are reverted.
        """
        causes: list[tuple[Conversion, str]] = []
        kinds: set[str] = set()
        left = list(conversions)
        while left and (why := self._why_different()) is not None:
            low, high = 0, len(left)
            while high - low > 1:
                middle = (low + high) // 2
                for i, conversion in enumerate(left):
                    conversion.set(i < middle)
                found = self._why_different()
                low, high, why = (middle, high, why) if found is None else (low, middle, found)
            cause = left[high - 1]
            is_second = cause.kind in kinds
            kinds.add(cause.kind)
            for conversion in list(left):
                is_cause = conversion is cause or (is_second and conversion.kind == cause.kind)
                conversion.set(not is_cause)
                if is_cause:
                    causes.append((conversion, f"{why} on the example"))
                    left.remove(conversion)
        return causes

    def summary(self) -> str:
        """How far the results of the model, as it is now, are from those before."""
        results = list(self._compared(self._run()))
        scales = [max(_largest(x), 1e-300) for x in self._expected.values()]
        error, allowed = (
            max(float(pair[i].max()) / scale for pair, scale in zip(results, scales, strict=True))
            for i in range(2)
        )
        return (
            f"{len(results)} outputs compared, largest difference {error:.1e} of an output's "
            f"maximum, where rounding explains {allowed:.1e}"
        )

    def _run(self) -> dict[str, Tensor]:
        model = self._model
        in_training = [module for module in model.modules() if module.training]
        buffers = [
            (module._buffers, name, buffer, buffer.clone(), buffer._version)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_inference()
        ]
        args, kwargs = tree_map(_copy, (self._args, self._kwargs))
        tensors = (*model.parameters(), *model.buffers())
        devices = {x.device.index for x in tensors if x.is_cuda}
        try:
            for module in in_training:
                module.training = False
            with torch.random.fork_rng(devices), torch.no_grad():
                for generator in (
                    torch.default_generator,
                    *(torch.cuda.default_generators[device] for device in devices),
                ):
                    generator.manual_seed(0)
                return dict(_tensors(model(*args, **kwargs)))
        finally:
            for module in in_training:
                module.training = True
            for holder, name, buffer, value, version in buffers:
                if buffer._version != version:
                    with torch.no_grad():
                        buffer.copy_(value)
                holder[name] = buffer

    def _add_noise(self) -> None:
        changes = [error for error, _ in self._compared(self._run())]
        self._noise = [torch.maximum(a, b) for a, b in zip(self._noise, changes, strict=True)]

    def _why_different(self) -> str | None:
        try:
            got = self._run()
        except Exception as raised:
            lines = str(raised).strip().splitlines() or [""]
            return f"raised {type(raised).__name__}: {lines[0]}"
        if lost := [name.lstrip(".") for name in self._expected if name not in got]:
            return f"its result lacked {lost[0]}"
        worst = 0.0
        for (error, allowed), x in zip(self._compared(got), self._expected.values(), strict=True):
            if not bool((error <= allowed).all()):
                worst = max(worst, float(error.max()) / max(_largest(x), 1e-300))
        return f"its result differed by {worst:.0e}" if worst else None

    def _compared(self, got: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """The largest difference in each row of each output, and the allowed one."""
        for (name, x), noise in zip(self._expected.items(), self._noise, strict=True):
            y = got.get(name)
            if y is None or y.shape != x.shape:  # such as the boxes that a detector found
                y = torch.full_like(x, math.inf)
            error = (y.double() - x.double()).abs().nan_to_num(math.inf, math.inf)
            # Where the original gives NaN, as for a query without keys, fastattn may give a number.
            error = torch.where(x.isfinite() & self._is_real(x), error, 0)
            finite = torch.where(x.isfinite(), x, 0)
            yield _rows(error), _FACTOR * noise + 4 * torch.finfo(x.dtype).eps * _rows(finite.abs())

    def _is_real(self, x: Tensor) -> Tensor:
        """False at the positions of an output `[B, N, ...]` or `[N, B, ...]` that are padding."""
        real = torch.ones((), dtype=torch.bool, device=x.device)
        for marks in self._padding:
            for kept in (marks, marks.T):
                if x.shape[:2] == kept.shape:
                    real = real & kept.to(x.device).reshape(*kept.shape, *[1] * (x.dim() - 2))
                    break
        return real


class _Perturbation:
    """Hooks that move each floating-point value by -1, 0 or 1 times its largest rounding error."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        # A tensor given twice, as query and key, stays one tensor.
        return self._perturbed((args, kwargs), {})

    def output(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._perturbed(output, {})

    def _perturbed(self, value: Any, known: dict[int, Tensor]) -> Any:
        if type(value) in (tuple, list):
            return type(value)(self._perturbed(item, known) for item in value)
        if type(value) is dict:
            return {key: self._perturbed(item, known) for key, item in value.items()}
        if isinstance(value, Tensor) and value.dtype in _UNITS and is_plain_tensor(value):
            if id(value) not in known:
                known[id(value)] = self._moved(value)
            return known[id(value)]
        return value

    def _moved(self, x: Tensor) -> Tensor:
        if x.device not in self._generators:
            self._generators[x.device] = torch.Generator(x.device).manual_seed(self._seed)
        steps = torch.randint(-1, 2, x.shape, generator=self._generators[x.device], device=x.device)
        unit = _UNITS[x.dtype]
        if x.is_cuda and x.dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32:
            unit = 2.0**-11
        limits = torch.finfo(x.dtype)  # masks hold the smallest number
        moved = (x + x * (unit * steps).to(x.dtype)).clamp(limits.min, limits.max)
        return torch.where(x.isfinite(), moved, x)


class _Observer(TorchFunctionMode):
    """Collects the ids of the modules that run, and of those that call SDPA."""

    def __init__(self, ran: set[int], sdpa_callers: set[int]) -> None:
        super().__init__()
        self._ran, self._sdpa_callers = ran, sdpa_callers
        self._running: list[int] = []
        self._exit = ExitStack()

    def __enter__(self) -> Any:
        start = torch_module.register_module_forward_pre_hook(self._start)
        stop = torch_module.register_module_forward_hook(self._stop, always_call=True)
        for hook in (start, stop):
            self._exit.callback(hook.remove)
        # PyTorch's fast path of encoder layers does not call their modules.
        fast = torch.backends.mha.get_fastpath_enabled()
        self._exit.callback(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._exit.close()

    def _start(self, module: nn.Module, args: Any) -> None:
        self._ran.add(id(module))
        self._running.append(id(module))

    def _stop(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and self._running:
            self._sdpa_callers.add(self._running[-1])
        return func(*args, **(kwargs or {}))


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple) and [*map(type, example)] == [tuple, dict]:
        return example
    kind = type(example).__name__
    if isinstance(example, tuple):
        kind = f"a tuple of ({', '.join(type(part).__name__ for part in example)})"
    raise TypeError(
        f"example must be a mapping of keyword arguments or a pair (tuple, dict), got {kind}"
    )


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating-point and complex tensors in a model's output, complex ones as real."""
    if isinstance(value, Tensor):
        if value.is_complex():
            value = torch.view_as_real(value)
        if value.is_floating_point() and value.numel() and value.layout is torch.strided:
            yield name, value.detach().clone()
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif is_dataclass(value):
        items = ((part.name, getattr(value, part.name)) for part in fields(value))
    for key, item in items:
        yield from _tensors(item, f"{name}.{key}")


def _rows(x: Tensor) -> Tensor:
    """The maximum of each row of the last dimension, `[rows]`; `[1]` where rows are short."""
    is_long = x.dim() > 0 and x.shape[-1] >= _ROW
    return x.double().reshape(-1, x.shape[-1] if is_long else x.numel()).amax(-1)


def _largest(x: Tensor) -> float:
    return float(torch.where(x.isfinite(), x, 0).abs().max())
