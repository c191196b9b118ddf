"""Modules of torch's classes become ours, in place, and can go back.

They change their class and nothing else: parameters, buffers, hooks, names and `state_dict` stay
the same objects. A module remembers what it was, also in copies of it and after pickling.
"""

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

from fastattn.nn.attention import MultiheadAttention
from fastattn.nn.norm import LayerNorm, RMSNorm
from fastattn.nn.transformer import (
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

AnyModule = TypeVar("AnyModule", bound=nn.Module)

DROP_INS: dict[type[nn.Module], type[nn.Module]] = {
    nn.LayerNorm: LayerNorm,
    nn.RMSNorm: RMSNorm,
    nn.MultiheadAttention: MultiheadAttention,
    nn.TransformerEncoderLayer: TransformerEncoderLayer,
    nn.TransformerDecoderLayer: TransformerDecoderLayer,
    nn.TransformerEncoder: TransformerEncoder,
    nn.TransformerDecoder: TransformerDecoder,
    nn.Transformer: Transformer,
}
_BEFORE = "_fastattn_before"  # in the __dict__ of a module that may go back: what it was


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
