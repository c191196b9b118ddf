"""What `benchmarks.tune` knows of a task: the part that tasks of every op share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Root-mean-square error against the fp32 reference, relative; four times what correct kernels show.
TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 1e-5}
_SEED = 1234


@dataclass
class Case:
    """A task's tensors.

    args: of the launch, without results. results: what it writes, from `first` on; before that
    stands what a backward reads. work: bytes or FLOPs.
    """

    args: tuple[Any, ...]
    results: tuple[Tensor, ...]
    work: float
    first: int = 0


class Task(Protocol):
    """A frozen dataclass: what is to be tuned, and how to make, launch and judge it."""

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
        """Computes what a launch reads, where random numbers will not do."""

    def launch(self, config: Any, case: Case) -> None: ...

    def wrong(self, case: Case) -> tuple[float, str | None]:
        """(largest relative error, what is wrong)."""

    def peer(self, case: Case) -> Callable[[], Any] | None:
        """A call that computes the same by torch or a library, or None."""


def normal_numbers(device: str) -> Callable[..., Tensor]:
    """shape -> a tensor of them, fp32, from one seed."""
    generator = None if device == "meta" else torch.Generator(device).manual_seed(_SEED)
    return lambda *shape: torch.randn(shape, device=device, generator=generator)
