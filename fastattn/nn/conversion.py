"""In-place conversion of torch.nn modules to fastattn's drop-in classes, and back.

Conversion changes a module's class and nothing else: parameters, buffers, hooks, names and
`state_dict` stay the same objects. A converted module records its previous class, which copies and
pickles keep. Drop-in classes register themselves through their base, `DropIn`.
"""

import inspect
from collections.abc import Mapping
from types import CodeType
from typing import Any, ClassVar, TypeVar

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

AnyModule = TypeVar("AnyModule", bound=nn.Module)

DROP_INS: dict[type[nn.Module], type[nn.Module]] = {}  # PyTorch's class -> fastattn's
# Classes without attributes, such as properties, that have the name of a parameter or submodule.
PLAIN_CLASSES: set[Any] = {nn.Linear, NonDynamicallyQuantizableLinear}
_BEFORE = "_fastattn_before"  # in a converted module's __dict__: what `restore` sets again


class DropIn:
    """Base of a class that replaces its own last base, a class of torch.nn.

    `replaces`, in its own `__dict__`, is that class.
    """

    replaces: ClassVar[type[nn.Module]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if DropIn not in cls.__bases__:
            return
        original: Any = cls.__bases__[-1]
        DROP_INS[original] = cls  # type: ignore[assignment]
        PLAIN_CLASSES.update((original, cls))
        cls.replaces = original
        forward: Any = cls.__dict__["forward"]
        forward.__signature__ = inspect.signature(forward)  # else it would be that of __wrapped__
        script_original(forward, original.forward)


def script_original(forward: Any, original: Any) -> None:
    """Makes `torch.jit.script`, which cannot compile the ops of fastattn, compile the `original`
    method in place of `forward`.

    It reads the source of a method by `inspect`, which follows `__wrapped__`, and looks up its
    names in the method's globals. `__prepare_scriptable__` is not used, because the module that it
    returns permanently replaces this one in its parent.
    """
    forward.__wrapped__ = original
    known = original.__globals__
    for name in names(original.__code__) & known.keys():
        forward.__globals__.setdefault(name, known[name])


def names(code: CodeType) -> set[str]:
    """The names of globals and attributes in a function."""
    inner = (names(const) for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*inner)


def convert(module: AnyModule) -> AnyModule:
    """Converts `module` and its submodules to fastattn's drop-in classes, in place; returns it.

    Parameters, buffers, hooks and names stay the same objects. Subclasses of torch.nn's classes,
    and modules whose `forward` was replaced, are not converted. `fastattn.unpatch` reverts it.
    """
    for child in module.modules():
        if is_convertible(child):
            convert_class(child)
    return module


def convert_children(module: nn.Module) -> None:
    """Converts the submodules of a drop-in that is being constructed; `restore` skips them."""
    for child in module.children():
        for part in child.modules():
            if is_convertible(part):
                convert_class(part, reversible=False)


def is_convertible(module: nn.Module) -> bool:
    """Whether a module is exactly of a class of torch.nn that has a drop-in."""
    return type(module) in DROP_INS and "forward" not in module.__dict__


def convert_class(
    module: nn.Module, drop_in: type[nn.Module] | None = None, *, reversible: bool = True
) -> None:
    """Converts this module alone, to `drop_in`, or else to that of DROP_INS for its class."""
    kind = type(module)
    before: dict[str, object] = {"class": kind}
    if isinstance(module, nn.TransformerEncoder):
        before["use_nested_tensor"] = module.use_nested_tensor
        module.use_nested_tensor = False
    module.__class__ = drop_in or DROP_INS[kind]  # type: ignore[assignment]
    if kind in DROP_INS:
        module.__dict__["__module__"] = "torch.nn"  # torch.fx asks by it whether to trace inside
    if reversible:
        module.__dict__[_BEFORE] = before


def restore(modules: Mapping[str, nn.Module]) -> None:
    """Reverts `convert_class` on these modules, given by name; skips those not converted.

    Raises RuntimeError, and changes nothing, if a module's class was changed after conversion.
    """
    for name, module in modules.items():
        before = module.__dict__.get(_BEFORE)
        if before is None or type(module) is before["class"]:
            continue
        if type(module).__dict__.get("replaces") is not before["class"]:
            converted = before["class"].__name__
            raise RuntimeError(
                f"{name or 'the model'} must be fastattn's {converted}, as it was patched, "
                f"got {type(module).__name__}: first revert the later change of its class"
            )
    for module in modules.values():
        before = module.__dict__.pop(_BEFORE, {})
        if before:
            module.__dict__.pop("__module__", None)
        module.__class__ = before.pop("class", type(module))
        for name, value in before.items():
            setattr(module, name, value)
