"""The launch cache of GPU libraries (csrc/autograd/launch_cache.h), with an op of a library for CPU
tensors.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from probe_op import MakeOp
from torch import Tensor

from fastattn.ops import _env, _launch, _native
from fastattn.ops._op import Op
from fastattn.ops._select import Backend
from fastattn.testing import all_specs, poisoned_results
from fastattn.testing.properties import deterministic_algorithms
from fastattn.testing.spec import Inputs, OpSpec

pytestmark = pytest.mark.skipif(
    _native.extension() is None, reason=f"{_native.extension_unavailable() or 'not used'}"
)
_WORKSPACE = 24


class _Call(NamedTuple):
    x: Tensor
    other: Tensor | None
    factor: float
    name: str
    needs: Sequence[bool]


class _Library:
    """torch.ops.fastattn_probe.multiply: y = x * other * factor (other None: 1), z = -y."""

    def __init__(self, library: torch.library.Library) -> None:
        self.calls, self.size = 0, _WORKSPACE
        self.workspaces: list[int] = []
        library.define(
            "multiply(Tensor x, Tensor? other, float factor, int fixed, Tensor(a!) y, "
            "Tensor(b!) z, Tensor(c!)? workspace) -> int"
        )
        library.impl("multiply", self._multiply, "CPU")

    def _multiply(
        self, x: Tensor, other: Tensor | None, factor: float, fixed: int, y: Tensor, z: Tensor,
        workspace: Tensor | None,
    ) -> int:  # fmt: skip
        if fixed != 7:
            raise NotImplementedError("fixed must be 7")
        if factor > 0 and (workspace is None or workspace.numel() < self.size):
            return self.size
        self.calls += 1
        self.workspaces.append(0 if workspace is None else workspace.numel())
        torch.mul(x if other is None else x * other, factor, out=y)
        torch.neg(y, out=z)
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Library]:
    monkeypatch.setattr(_launch, "_LIBRARIES", ["probe"])
    monkeypatch.setattr(_launch, "_extension", _native.extension())
    with torch.library._scoped_library("fastattn_probe", "DEF") as scoped:
        yield _Library(scoped)


class _Probe:
    """An op under the cache. python: how many calls ran in Python."""

    def __init__(self, op: Op) -> None:
        self.op, self.python = op, 0

        def run(args: Sequence[Any], backend: str | None) -> tuple[Tensor, ...]:
            self.python += 1
            contiguous = [x.contiguous() if isinstance(x, Tensor) else x for x in args]
            call = op.as_call(contiguous)
            run = functools.partial(op._launcher("sm90"), call)
            return _launch.run_and_record(op.name, backend, args, contiguous, run)

        op.run = run  # type: ignore[method-assign]
        for overload in ("", ".backend"):
            _native.extension().cache_launches(op.name + overload, "CPU")

    def __call__(
        self, x: Tensor, other: Tensor | None = None, factor: float = 2.0, name: str = "a",
        needs: Sequence[bool] = (True, False), backend: str | None = None,
    ) -> Tensor:  # fmt: skip
        args = (x, other, factor, name, list(needs))
        y, z = self.op.default(*args) if backend is None else self.op.named(*args, backend)
        expected = (x if other is None else x * other) * factor
        assert torch.equal(y, expected) and torch.equal(z, -expected)
        return y  # type: ignore[no-any-return]


Make = Callable[..., _Probe]


@pytest.fixture
def make(make_op: MakeOp, library: _Library) -> Make:
    def probe(x: str = "call.x", after: str = "pass", fixed: int = 7) -> _Probe:
        source = (
            "import torch\n"
            "from fastattn.ops import _native\n"
            "def PROBE(call, y, z):\n"
            "    op = torch.ops.fastattn_probe.multiply.default\n"
            f"    args = ({x}, call.other, call.factor, {fixed}, y, z)\n"
            "    _native.call_with_workspace(op, call.x.device, *args)\n"
            f"    {after}\n"
        )
        return _Probe(make_op([Backend("sm90")], _Call, sm90=source))

    return probe


def test_the_launch_of_the_second_call_is_repeated(make: Make, library: _Library) -> None:
    probe = make()
    results = [probe(torch.randn(3, 4)) for _ in range(5)]
    assert probe.python == 2 and library.calls == 5
    assert len({y.data_ptr() for y in results}) == 5
    assert library.workspaces == [_WORKSPACE] * 5
    for _ in range(3):
        probe(torch.randn(3, 4), factor=-1.0)
    assert probe.python == 4 and library.workspaces[5:] == [0, 0, 0]


def test_launches_that_are_used_stay_in_a_full_cache(make: Make) -> None:
    """Also if the other layouts never repeat, as those of batches of varying length."""
    probe, x = make(), torch.randn(3, 4)
    for _ in range(2):
        probe(x)
    for i in range(4200):
        for _ in range(2):  # recorded
            probe.op.default(x, None, 3.0 + i, "a", [True, False])
        if i % 100 == 0:
            probe(x)
    in_python = probe.python
    probe(x)
    assert probe.python == in_python == 2 * 4201


def test_calls_of_a_named_backend(make: Make) -> None:
    probe = make()
    for backend in ("sm90", None, "another"):
        for _ in range(4):
            probe(torch.randn(3, 4), backend=backend)
    assert probe.python == 6


def test_new_layouts_are_not_recorded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = make()
    monkeypatch.setattr(_launch, "_Launches", None)
    for rows in range(1, 5):
        probe(torch.randn(rows, 4))
    assert probe.python == 4


_CHANGES: dict[str, dict[str, Any]] = {
    "sizes": {"x": torch.randn(4, 3)},
    "strides": {"x": torch.randn(4, 3).t()},
    "dtype": {"x": torch.randn(3, 4, dtype=torch.float64)},
    "alignment": {"x": torch.randn(13)[1:].view(3, 4)},
    "dimensions": {"x": torch.randn(1, 3, 4)},
    "another_tensor": {"other": torch.randn(3, 4)},
    "float": {"factor": 3.0},
    "string": {"name": "b"},
    "longer_string": {"name": "ab"},
    "flags": {"needs": (True, True)},
    "more_flags": {"needs": (True,) * 3},
}


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES.keys())
def test_other_layouts_and_values_run_in_python(make: Make, change: dict[str, Any]) -> None:
    probe = make()
    x = torch.randn(3, 4)
    for _ in range(3):
        probe(x)
    for _ in range(3):
        probe(**{"x": x, **change})
    assert probe.python == 4
    probe(torch.randn(3, 4))
    assert probe.python == 4


def test_deterministic_algorithms_have_launches_of_their_own(make: Make) -> None:
    probe = make()
    x = torch.randn(3, 4)
    for _ in range(3):
        probe(x)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            probe(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert probe.python == 4


def test_one_tensor_for_two_arguments(make: Make) -> None:
    """The library gets both from the first: other calls have two tensors."""
    probe = make()
    x = torch.randn(3, 4)
    for _ in range(3):
        probe(x, x)
    assert probe.python == 2
    for _ in range(3):
        probe(x, torch.randn(3, 4))
    assert probe.python == 4


@pytest.mark.parametrize(
    "x", [torch.randn(1, 4).expand(3, 4), torch.randn(4, 3).t()], ids=["0", "1"]
)
def test_arguments_are_made_contiguous(make: Make, x: Tensor) -> None:
    probe = make()
    for _ in range(4):
        probe(x, torch.randn(3, 4))
    assert probe.python == 2


@pytest.mark.parametrize("source", [
    *({"x": x} for x in ("call.x.clone()", "call.x + 0")),  # other tensors
    {"after": "_native.call_with_workspace(op, call.x.device, *args)"},  # two launches
    *({"after": work} for work in ("y.mul_(1.0)", "z.copy_(-y)", "torch.neg(y, out=z)")),
    {"after": "z.sum().item()"},
], ids=lambda source: next(iter(source.values())))  # fmt: skip
def test_what_cannot_be_repeated_is_recorded_once(make, source, monkeypatch):
    probe = make(**source)
    for _ in range(2):
        probe(torch.randn(3, 4))
    monkeypatch.setattr(_launch, "_Launches", None)
    for _ in range(2):
        probe(torch.randn(3, 4))
    assert probe.python == 4


def test_a_result_that_the_library_does_not_get(make: Make, make_op: MakeOp) -> None:
    source = (
        "import torch\n"
        "from fastattn.ops import _native\n"
        "def PROBE(call, y, z):\n"
        "    op = torch.ops.fastattn_probe.multiply.default\n"
        "    own = torch.empty_like(z)\n"
        "    _native.call_with_workspace(op, z.device, *call[:3], 7, y, own)\n"
        "    z.copy_(own)\n"
    )
    probe = _Probe(make_op([Backend("sm90")], _Call, sm90=source))
    for _ in range(3):
        probe(torch.randn(3, 4))
    assert probe.python == 3


def test_errors_keep_their_type(make: Make) -> None:
    probe = make(fixed=8)
    with pytest.raises(NotImplementedError, match="fixed must be 7"):
        probe(torch.randn(3, 4))


def test_errors_of_repeated_launches_keep_their_type(make: Make, library: _Library) -> None:
    probe = make()
    for _ in range(2):
        probe(torch.randn(3, 4))
    library.workspaces = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        probe(torch.randn(3, 4))
    assert probe.python == 2


def test_another_workspace_than_recorded(make: Make, library: _Library) -> None:
    probe = make()
    for _ in range(2):
        probe(torch.randn(3, 4))
    library.size = 2 * _WORKSPACE
    with pytest.raises(RuntimeError, match="no more workspace than in the call that was recorded"):
        probe(torch.randn(3, 4))


def test_poisoned_calls_run_in_python(make: Make) -> None:
    probe = make()
    x = torch.randn(3, 4)
    for _ in range(3):
        probe(x)
    with poisoned_results():
        for _ in range(3):
            probe(x)
    assert probe.python == 5
    for _ in range(3):
        probe(x)
    assert probe.python == 6


# -- the ops on a GPU -----------------------------------------------------------------------------
_OPS = ("attention", "attention_varlen", "layer_norm", "add_layer_norm", "rms_norm", "ffn")


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", _OPS)
def test_repeated_launches_have_the_bits_of_the_named_backend(name, deterministic, monkeypatch):
    """Every sample, with gradients, and other data in each of four calls, compared with calls in
    Python. Without deterministic algorithms only results are compared.
    """
    spec = all_specs()[name]
    backend = next(b for b in spec.backends if b in ("sm90", "cuda"))
    why = _env.why_not_on(backend, torch.device("cuda", 0)) or _native.unavailable(backend)
    if why:
        pytest.skip(f"backend {backend} {why}")
    in_python: set[str] = set()
    record = _launch.run_and_record
    monkeypatch.setattr(
        _launch, "run_and_record", lambda op, *call: in_python.add(op) or record(op, *call)
    )
    repeated = set()
    for sample in spec.samples:
        for dtype in {torch.bfloat16, torch.float16} & {*sample.dtypes}:
            calls = [_changed(sample.inputs("cuda", dtype)) for _ in range(4)]
            run = functools.partial(_results_and_gradients, spec, with_gradients=deterministic)
            with deterministic_algorithms(deterministic):
                try:
                    with poisoned_results():  # nothing is repeated
                        expected = [run(inputs, backend=backend) for inputs in calls]
                except NotImplementedError:
                    continue
                for named in (None, backend):
                    in_python.clear()
                    found = [run(inputs, backend=named) for inputs in calls[:3]]
                    in_first = {*in_python}
                    in_python.clear()
                    found.append(run(calls[3], backend=named))
                    repeated |= {(named, op) for op in in_first - in_python}
                    for pair in zip(chain(*found), chain(*expected), strict=True):
                        x, y = (value.nan_to_num(7.0) for value in pair)
                        assert torch.equal(x, y), sample.name
    assert {(b, f"{name}_{d}") for b in (None, backend) for d in ("fwd", "bwd")} <= repeated


def _changed(inputs: Inputs) -> Inputs:
    """With noise added to finite numbers of inputs that require a gradient and do not overlap."""
    with torch.no_grad():
        for x in inputs.values():
            if isinstance(x, Tensor) and x.requires_grad and 0 not in x.stride():
                x.copy_((x + torch.randn_like(x)).where(x.isfinite(), x))
    return inputs


def _results_and_gradients(
    spec: OpSpec, inputs: Inputs, *, backend: str | None, with_gradients: bool
) -> list[Tensor]:
    found = spec.function(**inputs, backend=backend)
    results = [found] if isinstance(found, Tensor) else list(found)
    wanted = [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]
    differentiable = [x for x in results if x.requires_grad]
    ones = [torch.ones_like(x) for x in differentiable]
    gradients = torch.autograd.grad(differentiable, wanted, ones) if wanted else ()
    return [*(x.detach() for x in results), *(gradients if with_gradients else ())]
