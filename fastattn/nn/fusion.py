"""Tests whether a child module may be fused into an op, and what the modules of a block share.

A block is computed by a fused op only if each child is unmodified: it does exactly what its class
defines. A child with hooks, parametrizations, a replaced `forward` method or wrapped weights
(low-rank adapters, pruning, quantisation, sharding), or of a subclass, is called as a module.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook as has_any_global_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastattn import functional
from fastattn.functional import are_plain as are_plain
from fastattn.functional import fits_linear, new_dropout_seed
from fastattn.functional import runs_eagerly as runs_eagerly
from fastattn.nn.conversion import PLAIN_CLASSES
from fastattn.nn.sharding import SINGLE, Sharding


def is_plain_tensor(tensor: Tensor) -> bool:
    """Whether a tensor holds its values itself: no wrapper and no own `__torch_function__`."""
    kind = type(tensor)
    if kind is Tensor or kind is nn.Parameter:
        return not tensor.is_nested
    return not functional.overrides_functions(tensor) and not is_traceable_wrapper_subclass(tensor)


def is_recorded_inference(x: Tensor | None) -> bool:
    """Whether x was made in inference mode and gradients are recorded: autograd cannot save x."""
    if x is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    return x.is_inference()


def savable(*inputs: Tensor) -> tuple[Tensor, ...]:
    """The inputs of a module, copied if autograd cannot save them: torch's modules, whose operators
    copy their inputs in places, accept these. Inputs that are one tensor stay one.
    """
    if not any(is_recorded_inference(x) for x in inputs):
        return inputs
    copies = {id(x): x.clone() if x.is_inference() else x for x in inputs}
    return tuple(copies[id(x)] for x in inputs)


def has_its_own_forward(module: nn.Module, *classes: type[nn.Module]) -> bool:
    """Whether calling `module` runs the forward of its class, one of `classes`, and nothing else,
    apart from hooks of all modules.
    """
    state = module.__dict__
    return type(module) in classes and not (
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or "forward" in state
        or "weight" in state  # in place of the parameter
        or "bias" in state
    )


def is_unmodified(module: nn.Module, *classes: type[nn.Module]) -> bool:
    """Whether calling `module` does exactly what its class, one of `classes`, defines."""
    if not has_its_own_forward(module, *classes) or has_any_global_hook():
        return False
    for parameter in module._parameters.values():
        if (
            parameter is not None
            and (type(parameter) is not nn.Parameter or parameter.is_nested)
            and not is_plain_tensor(parameter)
        ):
            return False
    return True


def has_plain_parameters(module: nn.Module, names: frozenset[str], like: Tensor) -> bool:
    """Whether the module's parameters, those of these names among them, are dense CPU tensors in
    the dtype of `like`, which autograd can save.
    """
    dtype, saves = like.dtype, torch.is_grad_enabled()
    if not module._parameters.keys() >= names:
        return False
    for parameter in module._parameters.values():
        if parameter is not None and not (
            type(parameter) is nn.Parameter
            and parameter.dtype is dtype
            and parameter.is_cpu
            and parameter.layout is torch.strided
            and not (saves and parameter.is_inference())
        ):
            return False
    return True


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, checked: bool = False
) -> Tensor:
    """`fastattn.linear` for plain CPU tensors in eager code, else `F.linear`: compilers fuse it,
    tensor subclasses (quantised or sharded weights) override it, autocast caches the cast weight.

    checked: all this is known to be so.
    """
    if checked or fits_linear(x, weight, bias):
        if not functional.linear_runs_torch(x):
            return functional.linear_op(x, weight, bias)  # type: ignore[no-any-return]
    return F.linear(x, weight, bias)


@functools.cache
def in_class(kind: Any, names: frozenset[str]) -> bool:
    """Whether a class defines one of the attributes itself, such as a property."""
    return any(hasattr(kind, name) for name in names)


AFFINE = frozenset(("weight", "bias"))


def _is_plain(module: Any) -> bool:
    """Never in compiled code, whose guards would compare the set: other classes enter it later."""
    return not torch.compiler.is_compiling() and type(module) in PLAIN_CLASSES


def weight_and_bias(module: Any) -> tuple[Any, Any]:
    """(module.weight, module.bias), as `attribute` reads them."""
    state = module.__dict__
    if _is_plain(module) and "weight" not in state and "bias" not in state:
        found = state["_parameters"]
        if "weight" in found and "bias" in found:
            return found["weight"], found["bias"]
    return module.weight, module.bias


def attribute(module: Any, name: str) -> Any:
    """getattr(module, name), for parameters and submodules without `nn.Module.__getattr__`, which
    takes half a microsecond.
    """
    state = module.__dict__
    if _is_plain(module) and name not in state:
        if name in (found := state["_parameters"]) or name in (found := state["_modules"]):
            return found[name]
    return getattr(module, name)


def modules_of(module: nn.Module) -> list[nn.Module]:
    """The modules of `module.modules()`, breadth first. Its nested generators and names take seven
    times as long, for the modules of a small Transformer as long as a fifth of a decoding step.
    """
    found, seen = [module], {id(module)}
    for parent in found:
        for child in parent._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def inherits(module: nn.Module, base: type[nn.Module], method: str) -> bool:
    """Whether `module.method` is that of `base`, not overridden by a subclass or assignment."""
    return getattr(type(module), method) is getattr(base, method) and method not in module.__dict__


def active_p(dropout: nn.Module) -> float:
    """The probability that an `nn.Dropout` currently applies: 0 in evaluation."""
    return float(dropout.p) if dropout.training else 0.0  # type: ignore[arg-type]


class DropoutStreams:
    """The dropouts of one forward: one seed for all, streams 0, 1, 2 ... in the order of the calls.

    The seed is drawn at the first active dropout, so evaluation leaves the generator unchanged.

    checked: whether the blocks of the layer may call their ops without tests (`blocks.streams_of`).
    low_residual: whether the residual stream has autocast's dtype (`set_autocast_residual`).
    """

    checked = low_residual = False

    def __init__(self, device: torch.device, sharding: Sharding | None = None) -> None:
        self.device = device
        # Not as the default: torch.compile cannot trace an object that is a default value.
        self.sharding = SINGLE if sharding is None else sharding
        self.seed: Tensor | None = None
        self.stream = -1

    def take(self, *probabilities: float, of: str = "rows") -> dict[str, Any]:
        """The arguments `dropout_seed` and `dropout_stream` of the next op; of: see `Sharding`."""
        self.stream += 1
        if not any(probabilities):
            return {}
        if self.seed is None:
            self.seed = new_dropout_seed(self.device)
        seed = self.sharding.seed(self.seed, of)
        return {"dropout_seed": seed, "dropout_stream": self.stream}
