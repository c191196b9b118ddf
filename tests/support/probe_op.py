"""Ops defined by tests, `fastattn::probe<n>`, with backends in a temporary package."""

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn.ops import _env, _select
from fastattn.ops._op import Backend, Op

_numbers = itertools.count()
MakeOp = Callable[..., Op]


@pytest.fixture
def make_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeOp]:
    """make_op(order, backend=source, ...) defines an op y = x * factor, z = -y for the CPU.
    suffix: of its name.
    """
    monkeypatch.setattr(_env, "why_not_on", lambda backend, device: None)
    monkeypatch.syspath_prepend(tmp_path)
    defined = []

    def make(order: list[Backend], call_type: Any = None, suffix: str = "", **sources: str) -> Op:
        def outputs(x: Any, *_: Any) -> tuple[Tensor, ...]:
            like = x if call_type is None else x.x
            return torch.empty_like(like), torch.empty_like(like)

        public_name = f"probe{next(_numbers)}"
        name = public_name + suffix
        folder = tmp_path / f"{name}_package"
        folder.mkdir()
        (folder / "__init__.py").touch()
        for backend, source in sources.items():
            (folder / f"{backend}.py").write_text(source.replace("PROBE", name))
        op = Op(
            name, call_type or "Tensor x, float factor", "Tensor y, Tensor z", outputs, folder.name,
            order, public_name=public_name,
        )  # fmt: skip
        defined.append(op)
        return op

    yield make
    for op in defined:
        _select.OPS.pop(op.name)
        for module in [m for m in sys.modules if m.startswith(op.package)]:
            del sys.modules[module]


@pytest.fixture
def no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clears FASTATTN_BACKEND and the warnings already given."""
    monkeypatch.delenv(_env.BACKEND_VARIABLE, raising=False)
    monkeypatch.setattr(_select, "_warned", set())


def writes(value: float) -> str:
    """A backend that refuses nothing and sets y = value."""
    return f"def PROBE(x, factor, y, z):\n    y.fill_({value})\n    z.fill_(-{value})\n"


def refuses(why: str) -> str:
    return (
        "def PROBE(x, factor, y, z):\n    raise AssertionError('launched after refusing')\n"
        f"def PROBE_unsupported(x, factor):\n    return {why!r}\n"
    )


REFERENCE = "RETURNS_RESULTS = True\ndef PROBE(x, factor):\n    return x * factor, -x * factor\n"


def run_op(op: Op, backend: str | None = None, x: Tensor | None = None) -> Tensor:
    y, z = op(torch.ones(3) if x is None else x, 4.0, backend=op.choice(backend))
    assert torch.equal(z.nan_to_num(), -y.nan_to_num())
    return y


def value_of(op: Op, backend: str | None = None) -> float:
    return run_op(op, backend)[0].item()
