"""`patch(model)` makes an existing model use fastattn, in place; `unpatch(model)` reverts it.

Modules of exactly torch's classes are converted (nn/conversion.py), and modules of other packages
whose code is known (foreign_modules.py). Models of Hugging Face `transformers` get fastattn as
their `attn_implementation`. The report lists what was not replaced, with the reason.
"""

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from fastattn.integrations import foreign_generation, foreign_modules, huggingface
from fastattn.nn.conversion import DROP_INS, convert_class, restore

# In the __dict__ of a `transformers` model: [(config, its previous attention implementation)].
_ATTENTION_BEFORE = "_fastattn_attention_before"


@dataclass
class PatchReport:
    """What `patch` changed in a model. As a context manager, reverts these changes on exit.

    replaced: module name -> previous class. attention: name of a `transformers` model -> its class
    and previous attention. generate: name of a model whose `generate` runs on a static cache ->
    the reasons for which calls ran the model's own path, with the number of these calls; it is kept
    up to date. kept: name of a module that was not replaced -> the reason.
    """

    model: nn.Module = field(repr=False)
    replaced: dict[str, str] = field(default_factory=dict)
    attention: dict[str, str] = field(default_factory=dict)
    generate: dict[str, dict[str, int]] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        kinds: dict[str, list[str]] = {}
        for name, kind in self.replaced.items():
            kinds.setdefault(kind, []).append(name or "the model itself")
        lines = [f"fastattn.patch: {len(self.replaced)} modules of {type(self.model).__name__}"]
        lines += [f"  {len(names):3d} {kind}: {_some(names)}" for kind, names in kinds.items()]
        for name, before in self.attention.items():
            lines.append(f"      attention of {name or 'the model itself'} ({before})")
        for name, calls in self.generate.items():
            lines.append(f"      generate of {name or 'the model itself'}")
            lines += [f"  {count:5d} calls by its own path: the call {why}"
                      for why, count in calls.items()]  # fmt: skip
        reasons: dict[str, list[str]] = {}
        for name, why in self.kept.items():
            reasons.setdefault(why, []).append(name or "the model itself")
        if reasons:
            lines.append("left as they were:")
        lines += [f"  {len(names):3d} {why}: {_some(names)}" for why, names in reasons.items()]
        return "\n".join(lines)

    def __enter__(self) -> "PatchReport":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Only what this call of patch changed.
        _revert(
            {
                name: module
                for name, module in self.model.named_modules()
                if name in self.replaced or name in self.attention or name in self.generate
            }
        )


def patch(model: nn.Module, *, quiet: bool = False) -> PatchReport:
    """Replaces the modules of `model` for which fastattn has drop-ins, in place.

    These are `nn.MultiheadAttention`, `nn.Transformer`, its encoder and decoder and their layers,
    `nn.LayerNorm` and `nn.RMSNorm`; the norms of `timm` and `transformers` models, and every module
    with the same code; modules whose `forward` calls `scaled_dot_product_attention`, such as timm's
    attention; and the attention of `transformers` models, Bloom's and MPT's included. `generate` of
    their encoder-decoders runs on a static cache. Results and gradients stay the same up to
    rounding, except that a query whose keys are all masked gets a zero context.

    Returns a report of what was and was not replaced, and prints it unless `quiet`.
    `unpatch(model)`, or leaving `with fastattn.patch(model):`, reverts it. Patching a model again
    replaces only what is new.
    """
    _check(model)
    report = PatchReport(model)
    for name, module in model.named_modules():
        if _is_transformers_model(module) and not any(
            name.startswith(f"{outer}.") or not outer for outer in report.attention
        ):
            _switch_attention(name, module, report)
        kind: Any = type(module)
        drop_in = DROP_INS.get(kind) or foreign_modules.drop_in(kind)
        why: str | None = None
        if drop_in is None:
            why = _why_kept(name, module, report)
        elif parametrize.is_parametrized(module):
            why = "is parametrized"
        elif "forward" in module.__dict__:
            why = "has its own forward"
        else:
            report.replaced[name] = kind.__name__
            convert_class(module, drop_in)
        if why is not None:
            report.kept[name] = why
    for name, module in model.named_modules():
        _switch_generation(name, module, report)
    if not quiet:
        print(report)
    return report


def unpatch(model: nn.Module) -> None:
    """Reverts `patch` or `fastattn.nn.convert`, also on copied and unpickled models.

    Raises RuntimeError, and changes nothing, if a module's class was changed afterwards, for
    example by a parametrization or `fully_shard`, or `fastattn.nn.set_heads` gave it heads that
    torch's class does not have.
    """
    _check(model)
    _revert(dict(model.named_modules()))


def _revert(modules: dict[str, nn.Module]) -> None:
    restore(modules)
    for module in modules.values():
        module.__dict__.pop(foreign_generation.STATE, None)
        # Outer models first.
        for config, implementation in module.__dict__.pop(_ATTENTION_BEFORE, ()):
            config._attn_implementation = implementation


def _check(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("model must not be compiled by torch.jit: patch it before")


def _is_transformers_model(module: nn.Module) -> bool:
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.")
        for base in type(module).__mro__
    )


def _switch_attention(name: str, model: Any, report: PatchReport) -> None:
    """Sets fastattn as the attention of a `transformers` model and of the models it contains."""
    if not getattr(model, "_can_set_attn_implementation", lambda: False)():
        implementation = model.config._attn_implementation
        if not any(_is_replaceable(module, implementation) for module in model.modules()):
            report.kept[name] = "has an attention that transformers cannot replace"
        return
    configs: dict[int, Any] = {}
    _collect_configs(model.config, configs)
    for module in model.modules():
        if _is_transformers_model(module):
            _collect_configs(module.config, configs)
    if any(config.output_attentions for config in configs.values()):
        report.kept[name] = "has config.output_attentions, which requires eager attention"
        return
    if (why := _why_unsupported(model)) is not None:
        report.kept[name] = why
        return
    before = [(config, config._attn_implementation) for config in configs.values()]
    if all(implementation == huggingface.NAME for _, implementation in before):
        return
    huggingface.register()
    model.set_attn_implementation(huggingface.NAME)
    model.__dict__.setdefault(_ATTENTION_BEFORE, before)
    report.attention[name] = f"{type(model).__name__}, {before[0][1]}"


def _switch_generation(name: str, module: Any, report: PatchReport) -> None:
    """Converts an encoder-decoder of `transformers` whose attention is fastattn's."""
    kind: Any = type(module)
    if (
        not _is_transformers_model(module)
        or not getattr(module.config, "is_encoder_decoder", False)
        or not hasattr(module, "generate")
        or module.config._attn_implementation != huggingface.NAME
        or "replaces" in kind.__dict__
    ):
        return
    if (why := foreign_generation.why_unsupported(module)) is not None:
        report.kept[name] = why
        return
    convert_class(module, foreign_generation.drop_in(kind))
    state = module.__dict__[foreign_generation.STATE] = foreign_generation.State()
    report.generate[name] = state.fallbacks


def _is_replaceable(module: nn.Module, implementation: str) -> bool:
    """Whether there is a drop-in for this attention itself, whose code goes by `implementation`."""
    kind: Any = type(module)
    kind = kind.__dict__.get("replaces", kind)
    if not kind.__name__.endswith("Attention") or foreign_modules.drop_in(kind) is None:
        return False
    return implementation == "sdpa" or not foreign_modules.calls_sdpa(kind.forward)


def _why_unsupported(model: nn.Module) -> str | None:
    """Which feature of the model's attention `huggingface.attention_forward` does not support."""
    for module in model.modules():
        if type(module).__name__.endswith("Indexer"):
            return "has a sparse attention, whose keys an indexer selects"
        if hasattr(module, "sink_proj"):
            return "has an attention with sinks of each query"
    return None


def _collect_configs(config: Any, configs: dict[int, Any]) -> None:
    configs.setdefault(id(config), config)
    for name in getattr(config, "sub_configs", ()):
        if (part := getattr(config, name, None)) is not None:
            _collect_configs(part, configs)


def _why_kept(name: str, module: nn.Module, report: PatchReport) -> str | None:
    """Why a module that resembles a supported one was not replaced; None for any other."""
    kind = type(module)
    if "replaces" in kind.__dict__ or kind.__module__.startswith("fastattn."):
        return None
    for base in DROP_INS:
        if isinstance(module, base):
            if parametrize.is_parametrized(module):
                return "is parametrized"
            return f"is {kind.__name__}, a subclass of nn.{base.__name__}"
    if isinstance(module, torch.jit.ScriptModule):
        return "is compiled by torch.jit"
    if kind.__name__.endswith(("LayerNorm", "RMSNorm")):
        return f"is {kind.__name__}, not a norm of torch.nn"
    switched = any(not outer or name.startswith(f"{outer}.") for outer in report.attention)
    if kind.__name__.endswith("Attention") and not switched:
        return f"is {kind.__name__}, which fastattn has no drop-in for"
    return None


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
