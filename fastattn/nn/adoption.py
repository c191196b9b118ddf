"""Modules of torch's classes become ours, in place, and can go back.

They change their class and nothing else: parameters, buffers, hooks, names and `state_dict` stay
the same objects. A module remembers what it was, also in copies of it and after pickling. The
classes themselves are found by their base, `DropIn`.
"""

import inspect
from collections.abc import Mapping
from types import CodeType
from typing import Any, TypeVar

from torch import nn

AnyModule = TypeVar("AnyModule", bound=nn.Module)

DROP_INS: dict[type[nn.Module], type[nn.Module]] = {}  # PyTorch's class -> fastattn's
_BEFORE = "_fastattn_before"  # in the __dict__ of a module that may go back: what it was


class DropIn:
    """Base of a class that replaces its own last base, a class of torch.nn.

    `torch.jit.script`, which cannot compile the ops of fastattn, compiles `forward` of PyTorch's
    class. It reads the source of a method by `inspect`, which follows `__wrapped__`, and looks up
    its names in the method's globals. The modules stay as they are; what `__prepare_scriptable__`
    returns would replace them in their parents for good.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if DropIn not in cls.__bases__:
            return
        original: Any = cls.__bases__[-1]
        DROP_INS[original] = cls  # type: ignore[assignment]
        forward: Any = cls.__dict__["forward"]
        forward.__signature__ = inspect.signature(forward)  # else it would be that of __wrapped__
        forward.__wrapped__ = original.forward
        known = original.forward.__globals__
        for name in _names(original.forward.__code__) & known.keys():
            forward.__globals__.setdefault(name, known[name])


def _names(code: CodeType) -> set[str]:
    """The names that a function looks up among its globals, and those of attributes."""
    inner = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*inner)


def adopt(module: AnyModule) -> AnyModule:
    """Turns `module` and the modules in it, where exactly of torch's classes, into ours, in place.

    Parameters, buffers, hooks and names stay the same objects; subclasses, and modules with a
    forward of their own, are left alone. `fastattn.unpatch` takes it back.
    """
    for child in module.modules():
        if why_not(child) is None:
            become_ours(child)
    return module


def adopt_children(module: nn.Module) -> None:
    """What is ours from its construction on, and has nothing to go back to."""
    for child in module.children():
        for part in child.modules():
            if why_not(part) is None:
                become_ours(part, for_good=True)


def why_not(module: nn.Module) -> str | None:
    """Why a module cannot become ours, phrased to follow its name."""
    if type(module) not in DROP_INS:
        return f"is {type(module).__name__}, none of the classes of torch.nn that have a drop-in"
    return "has a forward of its own" if "forward" in module.__dict__ else None


def become_ours(module: nn.Module, *, for_good: bool = False) -> None:
    kind = type(module)
    before: dict[str, object] = {"class": kind}
    if isinstance(module, nn.TransformerEncoder):
        before["use_nested_tensor"] = module.use_nested_tensor
        module.use_nested_tensor = False
    module.__class__ = DROP_INS[kind]  # type: ignore[assignment]
    if not for_good:
        module.__dict__[_BEFORE] = before


def go_back(modules: Mapping[str, nn.Module]) -> None:
    """Takes back what `become_ours` did to modules, by name; leaves the others alone.

    Raises RuntimeError, and changes nothing, where something else has changed a module's class
    since.
    """
    for name, module in modules.items():
        before = module.__dict__.get(_BEFORE)
        if before is not None and type(module) is not DROP_INS[before["class"]]:
            ours = DROP_INS[before["class"]].__name__
            raise RuntimeError(
                f"{name or 'the model'} must be a {ours} of fastattn.nn, as patch left it, got "
                f"{type(module).__name__}: take back what came after patch first"
            )
    for module in modules.values():
        before = module.__dict__.pop(_BEFORE, {})
        module.__class__ = before.pop("class", type(module))
        for name, value in before.items():
            setattr(module, name, value)
