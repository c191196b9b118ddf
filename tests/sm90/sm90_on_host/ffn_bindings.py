"""The feed-forward network's bindings for CPU tensors: what they launch runs on a simulator."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from sm90_on_host.build import HERE
from sm90_on_host.host_library import DTYPES, HostLibrary

from fastattn.ops.ffn import sm90

STEPS = ("kUp", "kUpGated", "kDown", "kDhidden", "kDhiddenGated", "kDx", "kDw")
HOST = HostLibrary(HERE / "ffn_bindings.cpp", sm90, "fastattn_sm90_on_host", codes=2)


@dataclass(frozen=True)
class Instance:
    """step: empty for a launch that is not a product."""

    dtype: str
    step: str


# The launch's name, the address of its problem, the instance -> an error message or None.
Launch = Callable[[str, int, Instance], str | None]


def use(patch: pytest.MonkeyPatch, launch: Launch) -> None:
    """From then on `launch` runs what the backend sm90 launches."""

    def run(op: str, problem: int, dtype: int, step: int) -> str | None:
        return launch(op, problem, Instance(DTYPES[dtype], STEPS[step] if step >= 0 else ""))

    HOST.use(patch, run)
