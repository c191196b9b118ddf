"""Calls of implementations from elsewhere: functions or modules with the arguments of a public
function of fastattn, or some of them.

The signature declares what is supported: a call with an argument that it lacks is refused, and so
is one that raises NotImplementedError. Arguments that have their default are not passed.
"""

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastattn import functional
from fastattn.ops.attention.calls import is_restricted
from fastattn.ops.attention.reference import allowed_pairs
from fastattn.testing.spec import Inputs, OpSpec

# Arguments of the public functions that no implementation from elsewhere gets.
_NOT_PASSED = ("return_lse", "return_sum", "backend")


@dataclass(frozen=True)
class Implementation:
    """A callable and the name under which it is reported."""

    name: str
    function: Callable[..., Any]

    @functools.cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        function = self.function
        if isinstance(function, torch.nn.Module):
            function = function.forward
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            signature = None
        if signature is None or isinstance(self.function, type):
            raise ValueError(
                f"{self.name} must be a function, or a module, with a signature that declares what "
                f"it supports, got {self.function!r}: wrap it in a function"
            )
        return dict(signature.parameters)

    def check_signature(self, op: str) -> None:
        """Raises ValueError if no call of the op has all arguments that it requires."""
        known, parameters = _public_arguments(op), self.parameters.values()
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        wrong = [
            f"{p.kind.description} {p.name}"
            for p in parameters
            if p.kind == p.POSITIONAL_ONLY
            or (p.kind not in variable and p.default is p.empty and p.name not in known)
        ]
        if not any(p.name in known or p.kind == p.VAR_KEYWORD for p in parameters):
            wrong.append(f"({', '.join(map(str, parameters))})")
        if wrong:
            raise ValueError(
                f"{self.name} must have parameters of fastattn.{op}, passed by name "
                f"({', '.join(known)}), got {wrong[0]}"
            )

    def call(self, spec: OpSpec, arguments: Inputs) -> tuple[Tensor, ...]:
        """At most as many outputs as the op has results, in the layout of the results."""
        found = self.function(**arguments)
        outputs = tuple(found) if isinstance(found, tuple | list) else (found,)
        outputs = tuple(x for x in outputs[: len(spec.results)] if x is not None)
        if not outputs or not all(isinstance(x, Tensor) for x in outputs):
            raise TypeError(f"must return a tensor or a tuple of tensors, got {type(found)}")
        return spec.outputs(outputs)

    def arguments(self, spec: OpSpec, inputs: Inputs) -> Inputs:
        """The arguments that differ from the function's defaults; raises NotImplementedError if it
        lacks one that differs from fastattn's.
        """
        defaults = _public_arguments(spec.name)
        takes_all = any(p.kind == p.VAR_KEYWORD for p in self.parameters.values())
        given, missing = {}, []
        for name, value in (defaults | spec.arguments(inputs)).items():
            if name in _NOT_PASSED:
                continue
            if name in self.parameters:
                if _differ(value, self.parameters[name].default):
                    given[name] = value
            elif _differ(value, defaults.get(name)):
                given[name] = value
                missing += [] if takes_all else [name]
        if missing:
            raise NotImplementedError("; ".join(f"takes no {name}" for name in missing))
        return given


@functools.cache
def _public_arguments(op: str) -> dict[str, Any]:
    """The arguments of the public function with their defaults, or `inspect.Parameter.empty`."""
    parameters = inspect.signature(getattr(functional, op)).parameters
    return {
        name: p.default
        for name, p in parameters.items()
        if name not in _NOT_PASSED and p.kind != p.VAR_KEYWORD
    }


def _differ(value: Any, default: Any) -> bool:
    tensors = isinstance(value, Tensor) or isinstance(default, Tensor)
    return value is not default and (tensors or value != default)


def load(name: str) -> Implementation:
    """The implementation with a name such as "my_kernels:my_attention". Python modules are also
    looked for in the current folder.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"an implementation must be named module:attribute, got {name!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} must exist, but {type(error).__name__}: {error}") from error
    return Implementation(name, found)


def dense_mask(
    q: Tensor,
    k: Tensor,
    *,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    query_lengths: Tensor | None = None,
    causal: Any = False,
    window: tuple[int, int] | None = None,
) -> Tensor | None:
    """All restrictions of a call of `fastattn.attention` in one mask, for kernels that take only a
    mask. causal=True is "top_left".

    Returns bool [B or 1, H or 1, M, N], True = may attend; if `mask` is floating, a mask of its
    dtype with -inf at blocked pairs; None if there is no restriction.
    """
    causal = "top_left" if causal is True else causal
    call = functional.attention_call(q, k, k, mask, key_lengths, query_lengths, causal, window)
    if not is_restricted(call):
        return None
    allowed, mask = allowed_pairs(call), call.mask
    if mask is None or mask.dtype == torch.bool:
        return allowed
    return torch.where(allowed, mask, -torch.inf)
