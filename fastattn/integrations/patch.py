"""`patch(model)` makes an existing model use fastattn, in place; `unpatch(model)` reverts it.

Modules of exactly torch's classes are converted (nn/conversion.py), and modules of other packages
whose code is known (foreign_modules.py). Models of Hugging Face `transformers` get fastattn as
their `attn_implementation`: "fastattn" where they used SDPA or FlashAttention, "fastattn_eager"
where they ran eager attention (huggingface.py). The report lists what was not replaced, with the
reason. With an example, results before and after are compared (example.py).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from fastattn.integrations import foreign_generation, foreign_modules, huggingface
from fastattn.integrations.example import Conversion, Example
from fastattn.nn.conversion import DROP_INS, convert_class, restore

# In the __dict__ of a `transformers` model: [(config, its previous attention implementation)].
_ATTENTION_BEFORE = "_fastattn_attention_before"
# Names of classes that resemble a supported one, and what is said of those that are kept.
_RESEMBLING = (
    (re.compile(r"(LayerNorm|RMSNorm)$"), "not a norm of torch.nn"),
    (re.compile(r"(Attention|Attn|MHA)(XL|\dd)?$"), "which fastattn has no drop-in for"),
)


@dataclass
class PatchReport:
    """The changes that `patch` made in a model. As a context manager, reverts these changes on
    exit.

    replaced: module name -> previous class. attention: name of a `transformers` model -> its class
    and previous attention. generate: name of a model whose `generate` runs on a static cache ->
    the reasons for which calls ran the model's own path, with the number of these calls; it is kept
    up to date. already: module name -> what fastattn computed before this call: the module, whose
    previous class is named, or the attention of a `transformers` model. kept: name of a module that
    was not replaced -> the reason. example: how far the results for the example differ, None
    without one. unused: replaced modules that were not called in the example, so that nothing is
    known of their results.
    """

    model: nn.Module = field(repr=False)
    replaced: dict[str, str] = field(default_factory=dict)
    attention: dict[str, str] = field(default_factory=dict)
    generate: dict[str, dict[str, int]] = field(default_factory=dict)
    already: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    example: str | None = None
    unused: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"fastattn.patch: {len(self.replaced)} modules of {type(self.model).__name__}"]
        lines += _by_value(self.replaced)
        for name, before in self.attention.items():
            lines.append(f"      attention of {_shown(name)} ({before})")
        for name, calls in self.generate.items():
            lines.append(f"      generate of {_shown(name)}")
            lines += [f"  {count:5d} calls by its own path: the call {why}"
                      for why, count in calls.items()]  # fmt: skip
        if self.already:
            lines += ["used fastattn already:", *_by_value(self.already)]
        if self.kept:
            lines += ["left as they were:", *_by_value(self.kept)]
        if self.example is not None:
            lines.append(f"example: {self.example}")
        if self.unused:
            lines.append(
                f"  {len(self.unused):3d} replaced modules were not called: {_some(self.unused)}"
            )
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


def patch(
    model: nn.Module,
    *,
    example: Mapping[str, Any] | tuple[tuple[Any, ...], Mapping[str, Any]] | None = None,
    quiet: bool = False,
) -> PatchReport:
    """Replaces the modules of `model` for which fastattn has drop-ins, in place.

    These are `nn.MultiheadAttention`, `nn.Transformer`, its encoder and decoder and their layers,
    `nn.LayerNorm` and `nn.RMSNorm`; the norms of `timm` and `transformers` models, and every module
    with the same code; modules whose `forward` calls `scaled_dot_product_attention`, such as timm's
    attention; and the attention of `transformers` models that choose it by their configuration.
    `generate` of their encoder-decoders runs on a static cache. Results and gradients stay the same
    up to rounding, except that a query whose keys are all masked gets a zero context.

    example: keyword arguments of the model, or `(args, kwargs)`. The model runs on copies of them
    in eval mode without gradients, before and after, with the same random state; all tensors in its
    output are compared, except at the padding that arguments such as `attention_mask` mark, and
    where it gave NaN. Where a result differs by more than rounding explains, the modules
    responsible are found by bisection and reverted, and the report says so. Rounding is estimated
    by Monte Carlo arithmetic (Parker, 1997): three runs of the original model in which its inputs
    and the results of its modules are perturbed by rounding errors. Buffers that the model changes
    are restored; other state is not. With an example, modules that call
    `scaled_dot_product_attention` outside their `forward`, such as in a processor object, are
    replaced, too.

    Returns a report of what was and was not replaced, and prints it unless `quiet`.
    `unpatch(model)`, or leaving `with fastattn.patch(model):`, reverts it. Patching a model again
    replaces only what is new.

    Raises TypeError for a model or an example of another type, ValueError for an example that gives
    no finite outputs or others when it runs again, and what the model itself raises on the example;
    in all these cases the model is not patched.
    """
    _check(model)
    run = None if example is None else Example(model, example)
    report = PatchReport(model)
    try:
        _convert(report, run)
        if run is not None:
            _compare(run, report)
    except BaseException:
        report.__exit__(None, None, None)
        raise
    for name, module in model.named_modules():
        _switch_generation(name, module, report)
    if not quiet:
        print(report)
    return report


def _convert(report: PatchReport, run: Example | None) -> None:
    models: set[str] = set()  # those of transformers whose attention the report has
    for name, module in report.model.named_modules():
        if _is_transformers_model(module) and not _is_inside(name, models):
            _switch_attention(name, module, report)
            if name in (report.attention | report.already | report.kept):
                models.add(name)
        is_reported = _uses_interface(module) and _is_inside(name, models)
        calls_sdpa = run is not None and id(module) in run.sdpa_callers
        calls_sdpa = calls_sdpa and not (is_reported or _is_transformers_model(module))
        kind: Any = type(module)
        drop_in = DROP_INS.get(kind) or foreign_modules.drop_in(kind, calls_sdpa)
        why: str | None = None
        if (before := kind.__dict__.get("replaces")) is not None:
            known = [report.already[name]] if name in report.already else []
            report.already[name] = ", ".join([*known, before.__name__])
        elif drop_in is None:
            if calls_sdpa and foreign_modules.chooses_backend(kind):
                why = "chooses backends of scaled_dot_product_attention itself"
            elif not is_reported:
                why = _why_kept(module)
        elif parametrize.is_parametrized(module):
            why = "is parametrized"
        elif "forward" in module.__dict__:
            why = "has its own forward"
        else:
            report.replaced[name] = kind.__name__
            convert_class(module, drop_in)
        if why is not None:
            report.kept[name] = why


def unpatch(model: nn.Module) -> None:
    """Reverts `patch` or `fastattn.nn.convert`, also on copied and unpickled models.

    Raises RuntimeError, and changes nothing, if a module's class was changed afterwards, for
    example by a parametrization or `fully_shard`.
    """
    _check(model)
    _revert(dict(model.named_modules()))


def _revert(modules: dict[str, nn.Module]) -> None:
    restore(modules)
    for module in modules.values():
        module.__dict__.pop(foreign_generation.STATE, None)
        _set_attention(module.__dict__.pop(_ATTENTION_BEFORE, ()))


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


class _Implementations(list[tuple[Any, str]]):
    """Configurations of `transformers` and their attention. A process that unpickles a patched
    model thereby registers the attention that it needs.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _registered, (list(self),)


def _registered(implementations: list[tuple[Any, str]]) -> _Implementations:
    huggingface.register()
    return _Implementations(implementations)


def _set_attention(implementations: Iterable[tuple[Any, str]]) -> None:
    """The implementations must list outer models first: transformers passes each to inner ones."""
    for config, implementation in implementations:
        config._attn_implementation = implementation


def _switch_attention(name: str, model: Any, report: PatchReport) -> None:
    """Sets fastattn as the attention of a `transformers` model and of the models it contains."""
    if not getattr(model, "_can_set_attn_implementation", lambda: False)():
        calls_sdpa = model.config._attn_implementation == "sdpa"
        if not calls_sdpa or not any(map(_is_replaceable, model.modules())):
            report.kept[name] = "has an attention that transformers cannot replace"
        return
    if not any(map(_uses_interface, model.modules())):
        return  # attentions that compute scores themselves are reported one by one
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
    before = _Implementations((c, c._attn_implementation) for c in configs.values())
    huggingface.register()
    model.set_attn_implementation(huggingface.NAME)
    after = [(config, _as_before(config, was)) for config, was in before]
    _set_attention(after)
    if [is_now for _, is_now in after] == [was for _, was in before]:
        report.already[name] = f"attention of {type(model).__name__}"
        return
    # Attention that an earlier call switched is reverted to its state before that call.
    known = {id(c): was for c, was in model.__dict__.get(_ATTENTION_BEFORE, ())}
    model.__dict__[_ATTENTION_BEFORE] = _Implementations(
        (c, known.get(id(c), was) if was in huggingface.NAMES else was) for c, was in before
    )
    report.attention[name] = f"{type(model).__name__}, {before[0][1]}"


def _as_before(config: Any, before: str) -> str:
    """The form of fastattn's attention that has the semantics of the previous one."""
    now: str = config._attn_implementation
    if now == huggingface.NAME and before in ("eager", huggingface.EAGER_NAME):
        return huggingface.EAGER_NAME
    return now


def _switch_generation(name: str, module: Any, report: PatchReport) -> None:
    """Converts an encoder-decoder of `transformers` whose attention is fastattn's."""
    kind: Any = type(module)
    if (
        not _is_transformers_model(module)
        or not getattr(module.config, "is_encoder_decoder", False)
        or not hasattr(module, "generate")
        or module.config._attn_implementation not in huggingface.NAMES
        or "replaces" in kind.__dict__
    ):
        return
    if (why := foreign_generation.why_unsupported(module)) is not None:
        report.kept[name] = why
        return
    convert_class(module, foreign_generation.drop_in(kind))
    state = module.__dict__[foreign_generation.STATE] = foreign_generation.State()
    report.generate[name] = state.fallbacks


def _compare(run: Example, report: PatchReport) -> None:
    """Reverts the conversions that change the results of the example."""
    conversions = []
    for name, module in report.model.named_modules():
        if name in report.attention:
            conversions.append(_attention_conversion(name, module))
        if name in report.replaced:
            conversions.append(_class_conversion(name, module))
    for conversion in conversions:
        conversion.set(False)
    run.estimate_rounding()
    for conversion in conversions:
        conversion.set(True)
    for conversion, why in run.revert_causes(conversions):
        report.kept[conversion.name] = why
        del (report.attention if conversion.is_attention else report.replaced)[conversion.name]
    report.example = run.summary()
    modules = dict(report.model.named_modules())
    report.unused += [name for name in report.replaced if id(modules[name]) not in run.ran]


def _class_conversion(name: str, module: nn.Module) -> Conversion:
    kind: Any = type(module)
    return Conversion(
        name,
        kind.__dict__["replaces"].__name__,
        convert=lambda: convert_class(module, kind),
        revert=lambda: restore({name: module}),
    )


def _attention_conversion(name: str, model: nn.Module) -> Conversion:
    before = model.__dict__[_ATTENTION_BEFORE]
    after = [(config, config._attn_implementation) for config, _ in before]

    def convert() -> None:
        model.__dict__[_ATTENTION_BEFORE] = before
        _set_attention(after)

    return Conversion(
        name,
        type(model).__name__,
        convert=convert,
        revert=lambda: _set_attention(model.__dict__.pop(_ATTENTION_BEFORE)),
        is_attention=True,
    )


def _uses_interface(module: nn.Module) -> bool:
    """Whether the code of a module calls the attention function that its configuration names."""
    kind: Any = type(module)
    is_named = "ALL_ATTENTION_FUNCTIONS" in foreign_modules.names_in(kind)
    return is_named and not _is_transformers_model(module)  # a model has methods that choose it


def _is_replaceable(module: nn.Module) -> bool:
    """Whether there is a drop-in for this attention, which calls SDPA itself."""
    kind: Any = type(module)
    kind = kind.__dict__.get("replaces", kind)
    return kind.__name__.endswith("Attention") and foreign_modules.drop_in(kind) is not None


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


def _why_kept(module: nn.Module) -> str | None:
    """Why a module that resembles a supported one was not replaced; None for any other."""
    kind = type(module)
    if kind.__module__.startswith("fastattn."):
        return None
    for base in DROP_INS:
        if isinstance(module, base):
            if parametrize.is_parametrized(module):
                return "is parametrized"
            return f"is {kind.__name__}, a subclass of nn.{base.__name__}"
    if isinstance(module, torch.jit.ScriptModule):
        return "is compiled by torch.jit"
    for pattern, why in _RESEMBLING:
        if pattern.search(kind.__name__):
            inner = (type(child).__name__ for child in module.modules() if child is not module)
            is_wrapper = any(map(pattern.search, inner))  # what it wraps is reported
            return None if is_wrapper else f"is {kind.__name__}, {why}"
    return None


def _is_inside(name: str, outer: Iterable[str]) -> bool:
    return any(not other or name.startswith(f"{other}.") for other in outer)


def _by_value(names: dict[str, str]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for name, value in names.items():
        groups.setdefault(value, []).append(_shown(name))
    return [f"  {len(group):3d} {value}: {_some(group)}" for value, group in groups.items()]


def _shown(name: str) -> str:
    return name or "the model itself"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
