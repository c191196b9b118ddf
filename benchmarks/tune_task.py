"""The interface of a task that `benchmarks.tune` uses, for all ops."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Relative root-mean-square error against the fp32 reference: four times that of correct kernels.
TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 1e-5}
_SEED = 1234


@dataclass
class Case:
    """A task's tensors.

    args: of the launch, without results. results: written by the launch from `first` on; before
    are those that a backward reads. work: bytes or FLOPs.
    """

    args: tuple[Any, ...]
    results: tuple[Tensor, ...]
    work: float
    first: int = 0


class Task(Protocol):
    """A frozen dataclass: what to tune, and how to make its inputs, launch it and check it."""

    direction: str
    dtype: str

    @property
    def unit(self) -> str:
        """TFLOP/s or GB/s."""

    @property
    def name(self) -> str: ...

    def candidates(self, arch: str) -> list[Any]:
        """Configs to try, the shipped one first."""

    def make(self, device: str) -> Case: ...

    def prepare(self, case: Case) -> None:
        """Computes the inputs that cannot be random."""

    def launch(self, config: Any, case: Case) -> None: ...

    def wrong(self, case: Case) -> tuple[float, str | None]:
        """(largest relative error, error message or None)."""

    def peer(self, case: Case) -> Callable[[], Any] | None:
        """A call of torch or a library that computes the same, or None."""


def normal_numbers(device: str) -> Callable[..., Tensor]:
    """shape -> a tensor of normal random numbers, fp32, from one seed."""
    generator = None if device == "meta" else torch.Generator(device).manual_seed(_SEED)
    return lambda *shape: torch.randn(shape, device=device, generator=generator)
