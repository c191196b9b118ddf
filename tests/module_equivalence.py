"""How a module of ours is compared with torch's: one rule, one road, for outputs and gradients.

Three runs on the same values: torch's module in fp64 is the truth, torch's module in the tested
dtype shows what that dtype costs, ours may err twice as much plus a few roundings. `pairwise` makes
the grids: few cases that hold every pair of values of every two factors.
"""

import copy
import itertools
import random
from typing import Any

import torch
from torch import Tensor, nn

# Roundings of the largest value that another order of the same operations may add.
ROUNDINGS = 4


def assert_same(name: str, ours: Tensor, theirs: Tensor, truth: Tensor) -> None:
    """The rule. Errors are the largest of a tensor, sizes that of the largest true value."""
    assert ours.shape == truth.shape, f"{name}: shape {list(ours.shape)}, not {list(truth.shape)}"
    assert ours.dtype == theirs.dtype, f"{name}: {ours.dtype}, not {theirs.dtype}"
    if truth.numel() == 0:
        return
    error = (ours.double() - truth).abs().max().item()
    cost = (theirs.double() - truth).abs().max().item()
    size = truth.abs().max().item()
    allowed = 2 * cost + ROUNDINGS * torch.finfo(ours.dtype).eps * size
    assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g} (torch {cost:.3g})"


def run(
    module: nn.Module, args: tuple, kwargs: dict, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Results, and gradients of floating inputs and of parameters, for a fixed cotangent.

    Inputs that are one tensor stay one tensor: attention modules look at identity. Floating masks
    get no gradient unless they ask for it.
    """
    copies: dict[int, Any] = {}

    def moved(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) not in copies:
            y = x.detach().clone()
            if y.is_floating_point():
                y = y if dtype is None else y.to(dtype)
                y.requires_grad_(x.requires_grad or not name.endswith("mask"))
            copies[id(x)] = y
        return copies[id(x)]

    args = tuple(moved(str(i), x) for i, x in enumerate(args))
    kwargs = {name: moved(name, x) for name, x in kwargs.items()}
    module.zero_grad()
    outputs = module(*args, **kwargs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    results = {f"result {i}": x for i, x in enumerate(outputs) if x is not None}
    generator = torch.Generator().manual_seed(1)
    loss = sum(
        (x * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)).sum()
        for x in results.values()
    )
    loss.backward()
    for i, x in enumerate((*args, *kwargs.values())):
        if isinstance(x, Tensor) and x.requires_grad:
            results[f"gradient of input {i}"] = x.grad
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            results[f"gradient of {name}"] = parameter.grad
    return {name: x.detach() for name, x in results.items() if x is not None}


def assert_equivalent(theirs: nn.Module, ours: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Both modules, in one mode and with equal parameters, give the same results and gradients."""
    truth = run(copy.deepcopy(theirs).double(), args, kwargs, torch.float64)
    expected = run(theirs, args, kwargs, None)
    got = run(ours, args, kwargs, None)
    assert got.keys() == expected.keys()
    for name in truth:
        assert_same(name, got[name], expected[name], truth[name])


def pairwise(**factors: tuple) -> list[dict[str, Any]]:
    """Cases that hold every pair of values of every two factors at least once; always the same."""
    names = list(factors)
    chooser = random.Random(0)
    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(range(len(names)), 2)
        for x in range(len(factors[names[a]]))
        for y in range(len(factors[names[b]]))
    }

    def pairs(case: list[int]) -> set[tuple[int, int, int, int]]:
        return {(a, case[a], b, case[b]) for a, b in itertools.combinations(range(len(names)), 2)}

    cases = []
    while missing:
        a, x, b, y = min(missing)
        candidates = []
        for _ in range(40):
            case = [chooser.randrange(len(factors[name])) for name in names]
            case[a], case[b] = x, y
            candidates.append(case)
        best = max(candidates, key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        cases.append({name: factors[name][i] for name, i in zip(names, best, strict=True)})
    return cases


def label(case: dict[str, Any]) -> str:
    return "-".join(
        f"{name}={getattr(value, '__name__', value)}" for name, value in case.items()
    ).replace("torch.", "")
