"""Compares a model's results for an example before and after conversion, for `patch`.

How far rounding alone may move a result is estimated by Monte Carlo arithmetic (D. S. Parker,
"Monte Carlo Arithmetic", UCLA CSD-970002, 1997): the original model runs with rounding errors added
to its inputs and to the results of its modules, in the narrowest dtype that each module computes
with. A copy of the model in fp64 would need two to four times its memory, and a model that names
its dtypes does not run in it. A result may differ by

    8 * the largest change in these runs + 4 * eps(dtype) * max|result|

in each row of its last dimension, or in the whole tensor where rows are short.
"""

import copy
import inspect
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from fastattn.nn.fusion import is_plain_tensor

_RUNS = 3
# Factor applied to the largest change in these runs: a maximum of few draws is too small.
_FACTOR = 8
# Largest relative rounding error of each dtype.
_UNITS = {
    dtype: torch.finfo(dtype).eps / 2
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
# Smallest last dimension whose rows are compared one by one.
_ROW = 16
# Largest share of its maximum by which an output may differ when the example runs twice.
_REPEATABLE = 1e-2
# Additive masks block by values from here on.
_BLOCKING = -1e3
# Padding masks -> whether True marks a token (else padding), and an argument whose presence means
# that the mask is that of another sequence than the model's output.
_PADDING_MASKS = {
    "attention_mask": (True, "decoder_"),
    "decoder_attention_mask": (True, None),
    "key_padding_mask": (False, None),
    "src_key_padding_mask": (False, "tgt"),
    "tgt_key_padding_mask": (False, None),
}


@dataclass
class Conversion:
    """One conversion of a model, which can be undone and done again.

    kind: the name of the class before.
    """

    name: str
    kind: str
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

    ran: ids of the modules that ran. sdpa_callers: ids of the innermost running modules at each
    call of `scaled_dot_product_attention`.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        self._model = model
        self._args, self._kwargs = _arguments(example)
        if any(x.is_meta for x in (*model.parameters(), *model.buffers())):
            raise ValueError("example needs a model with data, got one on the meta device")
        self._expected = self._run()
        self._padding_masks = _padding_masks(model, self._args, self._kwargs)
        self._count = sum(int(self._is_compared(n, x).sum()) for n, x in self._expected.items())
        if not self._count:
            raise ValueError("example must give finite outputs at real positions, got none")
        self._noise = [torch.zeros((), dtype=torch.float64) for _ in self._expected]
        self.ran: set[int] = set()
        self.sdpa_callers: set[int] = set()
        self._units: dict[int, float] = {}
        with _Observer(self):
            self._add_noise()
        for (name, x), noise in zip(self._expected.items(), self._noise, strict=True):
            if not float(noise.max()) <= _REPEATABLE * _largest(x):
                raise ValueError(
                    "example must give the same outputs twice with the same random state, but "
                    f"{_shown(name)} differed by {_relative(noise, x):.0e} of its maximum"
                )

    def estimate_rounding(self) -> None:
        """Measures how far the original model's results move with its rounding."""
        modules = [m for m in self._model.modules() if id(m) in self._units or not _children(m)]
        for seed in range(_RUNS):
            perturb = _Perturbation(seed, self._units)
            with ExitStack() as hooks:
                for module in modules:
                    hooks.callback(module.register_forward_hook(perturb.output).remove)
                self._add_noise(perturb)

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
            causes.append((cause, f"{why} on the example"))
            others = [c for c in left if c.kind == cause.kind and c is not cause]
            if cause.kind in kinds:
                why = f"is a {cause.kind}, of which two gave other results on the example"
                causes += [(other, why) for other in others]
            kinds.add(cause.kind)
            reverted = [conversion for conversion, _ in causes]
            left = [conversion for conversion in left if conversion not in reverted]
            for conversion in (*reverted, *left):
                conversion.set(conversion not in reverted)
        return causes

    def summary(self) -> str:
        """How far the results of the model, as it is now, are from those before."""
        errors = [(x, *pair) for x, pair in zip(*self._with(self._run()), strict=True)]
        error = max(_relative(error, x) for x, error, _ in errors)
        allowed = max(_relative(allowed, x) for x, _, allowed in errors)
        return (
            f"{self._count} values of {len(errors)} outputs compared, largest difference "
            f"{error:.1e} of an output's maximum, where rounding explains {allowed:.1e}"
        )

    def _with(self, got: dict[str, Tensor]) -> tuple[Iterable[Tensor], Iterable[Any]]:
        return self._expected.values(), self._compared(got)

    def _run(self, perturb: "_Perturbation | None" = None) -> dict[str, Tensor]:
        model = self._model
        modes = [(module, module.training) for module in model.modules()]
        buffers = [
            (module._buffers, name, buffer, buffer.clone(), buffer._version)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not is_lazy(buffer) and not buffer.is_inference()
        ]
        args, kwargs = _copied((self._args, self._kwargs), perturb)
        tensors = (*model.parameters(), *model.buffers())
        devices = {x.device.index for x in tensors if x.is_cuda}
        state = random.getstate()
        try:
            model.eval()
            with torch.random.fork_rng(devices), torch.no_grad():
                random.seed(0)
                for generator in (
                    torch.default_generator,
                    *(torch.cuda.default_generators[device] for device in devices),
                ):
                    generator.manual_seed(0)
                return dict(_tensors(model(*args, **kwargs)))
        finally:
            random.setstate(state)
            model.train(modes[0][1])
            for module, mode in modes:
                module.training = mode
            for holder, name, buffer, value, version in buffers:
                if buffer._version != version:
                    with torch.no_grad():
                        buffer.copy_(value)
                holder[name] = buffer

    def _add_noise(self, perturb: "_Perturbation | None" = None) -> None:
        changes = [error for error, _ in self._compared(self._run(perturb))]
        self._noise = [torch.maximum(a, b) for a, b in zip(self._noise, changes, strict=True)]

    def _why_different(self) -> str | None:
        try:
            got = self._run()
        except Exception as raised:
            lines = str(raised).strip().splitlines() or [""]
            return f"raised {type(raised).__name__}: {lines[0]}"
        if lost := [_shown(name) for name in self._expected if name not in got]:
            return f"its result lacked {lost[0]}"
        worst = [
            _relative(error, x)
            for x, (error, allowed) in zip(*self._with(got), strict=True)
            if not bool((error <= allowed).all())
        ]
        return f"its result differed by {max(worst):.0e} of its maximum" if worst else None

    def _compared(self, got: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """The largest difference in each row of each output, and the allowed one."""
        for (name, x), noise in zip(self._expected.items(), self._noise, strict=True):
            y = got.get(name)
            if y is None or y.shape != x.shape:  # such as the boxes that a detector found
                y = torch.full_like(x, math.inf, dtype=torch.float64)
            error = (y.double() - x.double()).abs().nan_to_num(math.inf, math.inf)
            error = torch.where(self._is_compared(name, x), error, 0)
            eps = torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0
            size = torch.where(x.isfinite(), x, 0).abs()
            yield _rows(error), _FACTOR * noise + 4 * eps * _rows(size)

    def _is_compared(self, name: str, x: Tensor) -> Tensor:
        """False where the original gives NaN, as for a query without keys, for which fastattn may
        give a number, and at the padding of an output [B, N, ...], [N, B, ...] or [B, H, N, ...].
        """
        compared = x.isfinite()
        for is_token, of_encoder in self._padding_masks:
            if of_encoder and "encoder" not in name:
                continue
            is_token = is_token.to(x.device)
            if x.dim() == 4 and (x.shape[0], x.shape[2]) == is_token.shape:
                return compared & is_token[:, None, :, None]
            layouts = [m for m in (is_token, is_token.T) if x.dim() > 2 and x.shape[:2] == m.shape]
            if layouts:  # both fit where B = N
                tokens = torch.stack(layouts).any(0)
                return compared & tokens.view(*tokens.shape, *[1] * (x.dim() - 2))
        return compared


class _Perturbation:
    """Moves floating-point values by -1, 0 or 1 times their largest rounding error.

    units: id of a module -> the largest relative rounding error of what it computes.
    """

    def __init__(self, seed: int, units: Mapping[int, float]) -> None:
        self._seed, self._units = seed, units
        self._generators: dict[torch.device, torch.Generator] = {}

    def output(self, module: nn.Module, args: Any, output: Any) -> Any:
        """A forward hook."""
        if type(output) is tuple:
            return tuple(self.value(part, self._units.get(id(module), 0.0)) for part in output)
        return self.value(output, self._units.get(id(module), 0.0))

    def value(self, x: Any, unit: float = 0.0) -> Any:
        if not isinstance(x, Tensor) or x.dtype not in _UNITS or not is_plain_tensor(x):
            return x
        if x.layout is not torch.strided or _is_additive_mask(x):
            return x
        if x.device not in self._generators:
            self._generators[x.device] = torch.Generator(x.device).manual_seed(self._seed)
        steps = torch.randint(-1, 2, x.shape, generator=self._generators[x.device], device=x.device)
        moved = x + x * (max(unit, _unit_of(x)) * steps).to(x.dtype)
        return torch.where(moved.isfinite(), moved, x)


class _Observer(TorchFunctionMode):
    """Collects for an example the modules that run, those that call SDPA, and the largest rounding
    error in each.
    """

    def __init__(self, example: Example) -> None:
        super().__init__()
        self._example = example
        self._running: list[int] = []
        self._exit = ExitStack()

    def __enter__(self) -> Any:
        start = torch_module.register_module_forward_pre_hook(self._start)
        stop = torch_module.register_module_forward_hook(self._stop, always_call=True)
        for hook in (start, stop):
            self._exit.callback(hook.remove)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._exit.close()

    def _start(self, module: nn.Module, args: Any) -> None:
        self._example.ran.add(id(module))
        self._running.append(id(module))

    def _stop(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and self._running:
            self._example.sdpa_callers.add(self._running[-1])
        result = func(*args, **(kwargs or {}))
        if self._running and isinstance(result, Tensor) and result.dtype in _UNITS:
            units, module = self._example._units, self._running[-1]
            units[module] = max(units.get(module, 0.0), _unit_of(result))
        return result


def _unit_of(x: Tensor) -> float:
    is_tf32 = x.is_cuda and x.dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return 2.0**-11 if is_tf32 else _UNITS[x.dtype]


def _is_additive_mask(x: Tensor) -> bool:
    """A perturbed one would choose among the keys of a query whose keys are all blocked."""
    blocked = x <= _BLOCKING
    return bool(blocked.any()) and bool((blocked | (x == 0)).all())


def _children(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple) and len(example) == 2:
        args, kwargs = example
        if isinstance(args, tuple) and isinstance(kwargs, Mapping):
            return args, dict(kwargs)
    kind = type(example).__name__
    if isinstance(example, tuple):
        kind = f"a tuple of ({', '.join(type(part).__name__ for part in example)})"
    raise TypeError(
        f"example must be a mapping of keyword arguments or a pair (tuple, mapping), got {kind}"
    )


def _padding_masks(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[Tensor, bool]]:
    """(True at tokens [B, N], whether it is the mask of the encoder of an encoder-decoder)."""
    signature = inspect.signature(model.forward)
    given = signature.bind(*args, **kwargs).arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    found = []
    for name, (marks_tokens, other) in _PADDING_MASKS.items():
        mask = given.get(name)
        if isinstance(mask, Tensor) and mask.dim() == 2:
            is_token = mask.bool() == marks_tokens
            is_other = other is not None and any(
                key.startswith(other) and value is not None for key, value in given.items()
            )
            if bool(is_token.any()):  # else it means something different
                found.append((is_token, is_other))
    return found


def _copied(inputs: Any, perturb: _Perturbation | None) -> Any:
    """Inputs for one run. What is given twice stays the same object."""
    memo: dict[int, Any] = {}

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if id(leaf) not in memo:
                clone = leaf.detach().clone()
                memo[id(leaf)] = clone if perturb is None else perturb.value(clone)
            return memo[id(leaf)]
        try:
            return copy.deepcopy(leaf, memo)
        except (RuntimeError, TypeError) as error:
            raise TypeError(
                f"example must hold inputs that can be copied, got {type(leaf).__name__}: {error}"
            ) from error

    return tree_map(copied, inputs)


def _tensors(
    value: Any, name: str = "", seen: frozenset[int] = frozenset()
) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a model's output, complex ones as real and sparse ones as dense."""
    if id(value) in seen or isinstance(value, nn.Module | type | str | bytes):
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Tensor):
        if value.is_nested:
            items = enumerate(value.unbind())
        else:
            value = torch.view_as_real(value) if value.is_complex() else value
            value = value if value.layout is torch.strided else value.to_dense()
            if value.numel():
                yield name, value.detach().clone()
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif hasattr(value, "__dict__"):  # such as a cache
        items = vars(value).items()
    for key, item in list(items):
        yield from _tensors(item, f"{name}.{key}", seen | {id(value)})


def _shown(name: str) -> str:
    return name.removeprefix(".") or "the output"


def _rows(x: Tensor) -> Tensor:
    """The maximum of each row of the last dimension, `[rows]`; `[1]` where rows are short."""
    is_long = x.dim() > 0 and x.shape[-1] >= _ROW
    return x.double().reshape(-1, x.shape[-1] if is_long else x.numel()).amax(-1)


def _largest(x: Tensor) -> float:
    return float(torch.where(x.isfinite(), x, 0).abs().double().max())


def _relative(error: Tensor, x: Tensor) -> float:
    return float(error.max()) / max(_largest(x), torch.finfo(torch.float64).tiny)
