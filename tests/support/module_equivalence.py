"""Compares a module of fastattn with PyTorch's: one rule for outputs and gradients.

PyTorch's module in fp64 gives the true values; in the tested dtype, it gives the error of that
dtype. fastattn's error may be twice that error plus a few roundings. If it is larger, PyTorch's
module runs again on slightly perturbed values, and the largest of its errors is used. `pairwise`
makes grids: few cases that contain every pair of values of any two factors.
"""

import copy
import itertools
import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import fastattn.nn

# Rounding errors of the largest value that another order of operations may add.
ROUNDINGS = 4


def assert_same(
    name: str, actual: Tensor, expected: Tensor, truth: Tensor, *others: Tensor,
    like: Tensor | None = None,
) -> None:  # fmt: skip
    """Checks the rule on the largest error and the largest true value of a tensor.

    others: PyTorch's results for perturbed values. like: true values of which the largest counts
    too.
    """
    shapes = f"shape {list(actual.shape)}, not {list(truth.shape)}"
    assert actual.shape == truth.shape, f"{name}: {shapes}"
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, not {expected.dtype}"
    error, allowed = error_and_allowed(actual, (expected, *others), truth, like)
    assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def error_and_allowed(
    actual: Tensor, expected: Iterable[Tensor], truth: Tensor, like: Tensor | None = None
) -> tuple[float, float]:
    if truth.numel() == 0:
        return 0.0, 0.0
    cost = max((x.double() - truth).abs().max().item() for x in expected)
    size = max(x.abs().max().item() for x in (truth, like) if x is not None)
    allowed = 2 * cost + ROUNDINGS * torch.finfo(actual.dtype).eps * size
    return (actual.double() - truth).abs().max().item(), allowed


def run(
    module: nn.Module, args: tuple, kwargs: dict, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Results, and gradients of floating inputs and of parameters, for a fixed cotangent.

    Inputs that are the same tensor stay the same tensor: attention modules check identity. Floating
    masks get a gradient only if they require one.
    """
    copies: dict[int, Any] = {}

    def moved(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) not in copies:
            y = _copy(x, dtype if x.is_floating_point() else None)
            if y.is_floating_point():
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


def _copy(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The same values with the same strides, gaps included."""
    x = x.detach()
    copied = x.clone() if dtype is None else x.to(dtype, copy=True)
    if copied.stride() == x.stride() or 0 in x.stride():
        return copied
    span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return copied.new_empty(span).as_strided(x.shape, x.stride()).copy_(copied)


def assert_equivalent(reference: nn.Module, fast: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Checks that both modules give the same results and gradients."""
    truth = run(copy.deepcopy(reference).double(), args, kwargs, torch.float64)
    expected = run(reference, args, kwargs, None)
    got = run(fast, args, kwargs, None)
    assert got.keys() == expected.keys()

    def like(name: str) -> Tensor | None:
        """The gradient of a key's bias is 0, a sum of terms as large as those of its weight's."""
        return truth.get(name.removesuffix("bias") + "weight") if name.endswith("bias") else None

    def close(name: str) -> bool:
        error, allowed = error_and_allowed(got[name], (expected[name],), truth[name], like(name))
        return error <= allowed

    others = [] if all(map(close, truth)) else _results_of_rounded_inputs(reference, args, kwargs)
    for name in truth:
        perturbed = [x[name] for x in others]
        assert_same(name, got[name], expected[name], truth[name], *perturbed, like=like(name))


def _results_of_rounded_inputs(
    reference: nn.Module, args: tuple, kwargs: dict
) -> list[dict[str, Tensor]]:
    """PyTorch's results with every input value randomly rounded up or down.

    They show errors that a single run may not: of values near a ReLU's corner and, in fp64, where
    PyTorch's module is also the truth, of rounding.
    """
    generator = torch.Generator().manual_seed(2)

    def rounded(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        if id(x) not in copies:
            signs = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
            y = x.detach().double() * (1 + signs.double() * torch.finfo(x.dtype).eps)
            copies[id(x)] = y.to(x.dtype).requires_grad_(x.requires_grad)
        return copies[id(x)]

    results = []
    for _ in range(8):
        copies: dict[int, Tensor] = {}
        module = copy.deepcopy(reference)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(rounded(parameter))
        given = {name: rounded(x) for name, x in kwargs.items()}
        results.append(run(module, tuple(map(rounded, args)), given, None))
    return results


def twins(
    name: str, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any
) -> tuple[nn.Module, nn.Module]:
    """PyTorch's module and fastattn's with the same random parameters, biases included."""
    reference = getattr(nn, name)(*args, **kwargs)
    fast = getattr(fastattn.nn, name)(*args, **kwargs)
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.3)
    fast.load_state_dict(reference.state_dict())
    return reference.to(dtype), fast.to(dtype)


def random_mask(*shape: int, dtype: torch.dtype = torch.bool) -> Tensor:
    """A mask as in torch.nn: bool, True = blocked, or floating; the first key is never blocked."""
    blocked = torch.rand(shape) < 0.4
    blocked[..., 0] = False
    if dtype is torch.bool:
        return blocked
    return torch.randn(shape).masked_fill(blocked, float("-inf")).to(dtype)


def pairwise(*, seed: tuple[str, ...] = (), **factors: tuple) -> list[dict[str, Any]]:
    """Deterministic cases that contain every pair of values of any two factors.

    seed: a string that selects other cases.
    """
    names = list(factors)
    chooser = random.Random(" ".join(seed))
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


def label(case: dict[str, Any] | str) -> str:
    if isinstance(case, str):
        return case
    return "-".join(
        f"{name}={getattr(value, '__name__', value)}" for name, value in case.items()
    ).replace("torch.", "")
