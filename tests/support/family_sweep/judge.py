"""One model class before and after `fastattn.patch`: builds it, compares its results, and decides.

A difference counts as wrong only if it is larger than the rounding errors of the unpatched model,
which its results in fp64 show, and the results are not those of transformers' own other attention.
"""

import copy
import re
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from family_sweep import configs
from family_sweep.inputs import Inputs, Results, Variant, at, candidates, difference, run, variants
from torch import Tensor, nn
from torch.nn import functional as F

import fastattn
from fastattn import functional
from fastattn.integrations import huggingface

EQUAL, KEPT, NOT_BUILT, DIFFERENT, CRASH = "equal", "kept", "not built", "different", "crash"
WRONG = (DIFFERENT, CRASH)
# Largest difference of results that is not explained, relative to the largest value of the tensor.
TOLERANCE = 2e-5
# Rounding errors of a different order of operations, in errors of the unpatched model.
_ROUNDING = 8.0
_GRADIENT_TOLERANCE, _GRADIENT_TOLERANCE_FP64 = 1e-3, 1e-4
_MAX_PARAMETERS, _MAX_FORWARD_S = 80_000_000, 2.0
_ZEROS = "sdpa with zeros where all keys are masked"
_SDPA = F.scaled_dot_product_attention
_Outcomes = dict[str, Results]
_Gradients = dict[str, Tensor]


def check(kind: Any, config_kind: Any, *, full: bool = True) -> Iterator[dict[str, Any]]:
    """The row of a class; before it, one that counts if the process ends. full: also compares
    gradients, and the model made with `attn_implementation="fastattn"` instead of `patch`.
    """
    start = time.process_time()

    def row(status: str, reason: str, **more: Any) -> dict[str, Any]:
        seconds = round(time.process_time() - start, 2)
        return {"status": status, "reason": reason, "seconds": seconds, **more}

    try:
        subject = Subject(*build(kind, config_kind))
    except Exception as error:
        yield row(NOT_BUILT, str(error) if isinstance(error, NotBuiltError) else why(error))
        return
    yield row(CRASH, "the process ended")
    try:
        found = row(**_compare(subject, full))
        if full and found["status"] != DIFFERENT:
            found["direct"], fault = _direct(subject)
            found |= {"status": DIFFERENT, "reason": fault} if fault else {}
        yield found
    except Exception as error:
        yield row(CRASH, why(error))


def why(error: Exception) -> str:
    if found := re.search(r"requires the (\S+) library|No module named '(\w+)", str(error)):
        return f"needs {(found[1] or found[2]).lower()}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"


class NotBuiltError(Exception):
    """Why no small model of a class could be built and run."""


def build(kind: Any, config_kind: Any) -> tuple[Any, dict[str, Inputs]]:
    """A small model with random weights, and the inputs that it accepts."""
    errors: list[Exception] = []
    for size in configs.SIZES:
        accepted: dict[str, Inputs] = {}
        try:
            model = _small_model(kind, config_kind(**configs.arguments(config_kind, size)))
            _accept(model, accepted, errors)
        except Exception as error:
            errors.append(error)
        if accepted:
            return model, accepted
    raise NotBuiltError(why(errors[0]) if errors else "no inputs are known for it")


def _small_model(kind: Any, config: Any) -> Any:
    if hasattr(config, "is_decoder") and re.search("CausalLM|LMHead", kind.__name__):
        config.is_decoder = not getattr(config, "is_encoder_decoder", False)
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
    except Exception as error:
        if "meta" not in str(error):  # raised by constructors that read values of tensors
            raise
        count = 0
    if count > _MAX_PARAMETERS:
        raise ValueError(f"{count / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    return configs.reinitialise(kind(config))


def _accept(model: nn.Module, found: dict[str, Inputs], errors: list[Exception]) -> None:
    """Adds the first inputs of each kind that give finite results."""
    for kind, given in candidates(model):
        instead = {"text and images": "text", "images": "text and images"}.get(kind)
        if kind in found or instead in found:
            continue
        start = time.process_time()
        try:
            if not any(x.numel() and x.isfinite().all() and x.any() for _, x in run(model, given)):
                raise ValueError(f"no finite results from {kind}")
            if (seconds := time.process_time() - start) > _MAX_FORWARD_S:
                raise ValueError(f"forward takes {seconds:.0f} s at the smallest")
            found[kind] = given
        except Exception as error:
            errors.append(error)


class Subject:
    """A model, the variants of its inputs, and its results before it was patched."""

    def __init__(self, model: Any, accepted: dict[str, Inputs]) -> None:
        self.model = model
        self.variants: list[Variant] = []
        self.before: _Outcomes = {}
        for variant in (v for item in accepted.items() for v in variants(model, *item)):
            try:
                self.before[variant.label] = run(model, variant.inputs)
            except Exception:  # a mask that the model does not take
                continue
            self.variants.append(variant)
        first = self.variants[0]
        if difference(self.before[first.label], run(model, first.inputs)):
            raise NotBuiltError("its results are not reproducible")

    def outcomes(self, model: Any, dtype: torch.dtype = torch.float32) -> _Outcomes:
        return {v.label: run(model, v.inputs, dtype=dtype) for v in self.variants}

    def differences(self, a: _Outcomes, b: _Outcomes) -> dict[str, float]:
        pairs = {v.label: [at(v.valid, x[v.label]) for x in (a, b)] for v in self.variants}
        return {label: difference(*pair) for label, pair in pairs.items()}

    def leaks(self, after: _Outcomes) -> dict[str, str]:
        """Inputs that change results that they did not change at all before."""
        found = {}
        for v in (v for v in self.variants if v.probed in self.before):
            before, now = (
                difference(*(at(v.unaffected, x[y], only=not v.valid) for y in (v.probed, v.label)))
                for x in (self.before, after)
            )
            if before == 0 < now:
                found[v.label] = f"{v.label}: changes other results by {now:.1g}, before by 0"
        return found

    def decide(self, after: _Outcomes) -> tuple[str, str, float]:
        """(status, reason, largest difference), while `self.model` is not patched."""
        own = self.model.config._attn_implementation
        errors, leaks = self.differences(self.before, after), self.leaks(after)
        if max(errors.values()) <= TOLERANCE and not leaks:
            return EQUAL, "", max(errors.values())
        try:
            exact = self.outcomes(copy.deepcopy(self.model).double(), torch.float64)
            rounding = self.differences(exact, self.before)
        except Exception:  # some code is written for fp32
            rounding = dict.fromkeys(errors, 0.0)
        found = {own: errors}

        def close(name: str) -> set[str]:
            return {x for x in errors if found[name][x] <= max(TOLERANCE, _ROUNDING * rounding[x])}

        if not leaks and len(close(own)) == len(errors):
            noise = f"rounding; before, fp64 shows {max(rounding.values()):.1g}"
            return EQUAL, noise, max(errors.values())
        found |= {name: self.differences(x, after) for name, x in self._alternatives()}
        wrong = {*errors}.difference(*map(close, found)) | (leaks.keys() & close(own))
        if wrong:
            reasons = (leaks.get(label, label) for label in sorted(wrong))
            return DIFFERENT, "; ".join(reasons), max(errors.values())
        worst = max(min(x[label] for x in found.values()) for label in errors)
        if len(close(_ZEROS)) == len(errors):
            return EQUAL, "but for queries whose keys are all masked", worst
        most = max((name for name in found if name != _ZEROS), key=lambda name: len(close(name)))
        others = {
            x: next(n for n in found if x in close(n)) for x in errors if x not in close(most)
        }
        reasons = (f"{label}: as {name}" for label, name in others.items())
        return f"equal to transformers' {most}", "; ".join(reasons), worst

    def _alternatives(self) -> Iterator[tuple[str, _Outcomes]]:
        """Results by other attentions of transformers."""
        with mock.patch.object(F, "scaled_dot_product_attention", _sdpa_with_zeros):
            yield _ZEROS, self.outcomes(self.model)
        for implementation in ("sdpa", "eager"):
            other = copy.deepcopy(self.model)
            try:
                other.set_attn_implementation(implementation)
                outcomes = self.outcomes(other)
            except Exception:  # not supported by the model
                continue
            yield implementation, outcomes

    def gradients(self, model: Any, variant: Variant, dtype: torch.dtype) -> _Gradients:
        model.zero_grad(set_to_none=True)
        loss = torch.zeros((), dtype=dtype)
        results = run(model, variant.inputs, dtype=dtype, grad=True)
        for i, (_, x) in enumerate(at(variant.valid, results)):
            if x.requires_grad and x.isfinite().all():
                weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(i))
                loss = loss + (x * weights.to(x.dtype)).sum()
        if loss.requires_grad:
            loss.backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return found


def _sdpa_with_zeros(*args: Any, **kwargs: Any) -> Tensor:
    """PyTorch's attention, but with zeros for queries whose keys are all masked."""
    mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
    out = _SDPA(*args, **kwargs)
    if mask is None:
        return out
    allowed = mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return out * allowed.any(-1, keepdim=True)


def _compare(subject: Subject, full: bool) -> dict[str, Any]:
    """Compares results, gradients, `unpatch` and a second `patch`."""
    model, first = subject.model, subject.variants[0]
    implementation = model.config._attn_implementation
    with mock.patch.object(functional, "attention", wraps=functional.attention) as calls:
        report = fastattn.patch(model, quiet=True)
        after = subject.outcomes(model)
    errors = subject.differences(subject.before, after)
    equal = [v for v in subject.variants if errors[v.label] <= TOLERANCE] or [first]
    trained = next((v for v in equal if "right padding" in v.label), equal[0])
    changed = _attempt(subject.gradients, model, trained, torch.float32) if full else ""
    again = fastattn.patch(model, quiet=True)
    twice = run(model, first.inputs)
    fastattn.unpatch(model)
    status, reason, worst = subject.decide(after)
    faults = [reason] if status == DIFFERENT else []
    if again.replaced or again.attention:
        faults.append(f"a second patch replaces {again.replaced | again.attention}")
    if difference(after[first.label], twice):
        faults.append("a second patch changes results")
    if max(subject.differences(subject.before, subject.outcomes(model)).values()):
        faults.append("unpatch does not revert the results")
    if model.config._attn_implementation != implementation:
        faults.append(f"unpatch leaves {model.config._attn_implementation}")
    if full and not faults and (fault := _gradient_fault(subject, trained, changed)):
        faults.append(fault)
    replaced = {about.rpartition(", ")[2] for about in report.attention.values()}
    replaced |= {kind for kind in report.replaced.values() if "Attention" in kind}
    if status == EQUAL:
        kept = [x for x in dict.fromkeys(report.kept.values()) if not re.search("Norm|gener", x)]
        status = KEPT if kept and not replaced else EQUAL
        reason = "; ".join(filter(None, [reason, *kept]))
    row = {"worst": float(f"{worst:.1e}"), "attention": ", ".join(sorted(replaced))}
    status, reason = (DIFFERENT, "; ".join(faults)) if faults else (status, reason)
    return {"status": status, "reason": reason, **row, "calls": calls.call_count}


def _attempt(function: Callable[..., _Gradients], *arguments: Any) -> _Gradients | str:
    try:
        return function(*arguments)
    except Exception as error:
        return why(error)


def _gradient_fault(subject: Subject, variant: Variant, after: _Gradients | str) -> str:
    before = _attempt(subject.gradients, subject.model, variant, torch.float32)
    if isinstance(before, str):  # a model for inference alone
        return ""
    if isinstance(after, str):
        return f"no gradients: {after}"
    worst, name = _gradient_difference(before, after)
    if worst <= _GRADIENT_TOLERANCE:
        return ""
    # Rounding may have crossed a kink: in fp64 both must agree.
    model = copy.deepcopy(subject.model).double()
    exact = subject.gradients(model, variant, torch.float64)
    fastattn.patch(model, quiet=True)
    exact_after = subject.gradients(model, variant, torch.float64)
    if (error := _gradient_difference(exact, exact_after)[0]) <= _GRADIENT_TOLERANCE_FP64:
        return ""
    return f"gradient of {name} differs by {worst:.1g}, in fp64 by {error:.1g} ({variant.label})"


def _gradient_difference(a: _Gradients, b: _Gradients) -> tuple[float, str]:
    """The largest difference relative to the gradient, or to 1e-3 of the largest of all."""
    if a.keys() != b.keys():
        return float("inf"), next(iter(a.keys() ^ b.keys()))
    sizes = {name: float(x.abs().max()) for name, x in a.items() if x.numel()}
    least = 1e-3 * max(sizes.values(), default=0.0) or 1e-30
    errors = ((float((a[n] - b[n]).abs().max()) / max(s, least), n) for n, s in sizes.items())
    return max(errors, default=(0.0, ""))


def _direct(subject: Subject) -> tuple[str, str]:
    """The same model made with `attn_implementation="fastattn"`: its status, and what is wrong."""
    huggingface.register()
    try:
        config = copy.deepcopy(subject.model.config)
        model = type(subject.model)._from_config(config, attn_implementation="fastattn")
        model.load_state_dict(subject.model.state_dict())
        outcomes = subject.outcomes(model.eval())
    except Exception as error:
        return f"refused: {why(error)}", ""
    status, reason, worst = subject.decide(outcomes)
    wrong = f"attn_implementation='fastattn' differs by {worst:.1g}: {reason}"
    return status, wrong if status == DIFFERENT else ""
