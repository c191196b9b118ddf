"""The decompositions that torch's exporters find: each op in PyTorch's operators."""

from typing import Any

import pytest
import torch
from op_examples import SPECS, as_tuple
from torch._decomp import get_decompositions
from torch._inductor import lowering
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from fastattn.ops._select import OPS
from fastattn.testing.check import Oracle
from fastattn.testing.spec import OpSpec

FORWARDS = [name for name, op in OPS.items() if not op.is_backward]
TABLE = get_decompositions([getattr(torch.ops.fastattn, name) for name in FORWARDS])


class Decomposed(TorchDispatchMode):
    """Runs the decomposition of every op of fastattn."""

    calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.calls += func in TABLE
        return TABLE.get(func, func)(*args, **kwargs or {})


def test_every_forward_has_one() -> None:
    overloads = {"default", "backend"}
    assert {(op._schema.name, op._overloadname) for op in TABLE} == {
        (f"fastattn::{name}", overload) for name in FORWARDS for overload in overloads
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_samples(spec: OpSpec, dtype: torch.dtype) -> None:
    """Every third sample, by its error budget; those with dropout are refused."""
    for sample in spec.samples[:: 3 if dtype is torch.float32 else 7]:
        if dtype not in sample.dtypes or "slow" in sample.tags:
            continue
        inputs = sample.inputs("cpu", dtype)
        with torch.no_grad(), Decomposed() as mode:
            if inputs.get("dropout_p") or inputs.get("output_dropout_p"):
                with pytest.raises(NotImplementedError, match=r"call model\.eval\(\)"):
                    spec.function(**inputs)
                continue
            results = as_tuple(spec.function(**inputs))
        assert mode.calls
        oracle = Oracle(spec, sample, dtype)
        for name, result in zip(spec.results, results, strict=True):
            comparison = oracle.judge(name, result)
            assert comparison.ok, (sample.name, name, comparison)


def test_symbolic_shapes_use_the_fake_kernel() -> None:
    """Fake tensors of symbolic shapes would prefer the decomposition, which refuses dropout."""

    def call(q: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        out = fastattn.attention(q, q, q, dropout_p=0.5, dropout_seed=seed)
        assert isinstance(out, torch.Tensor)
        return out

    inputs = torch.randn(2, 2, 5, 8), torch.tensor([3])
    graph = make_fx(call, tracing_mode="symbolic")(*inputs).graph
    targets = [node.target for node in graph.nodes]
    assert torch.ops.fastattn.attention_fwd.default in targets


@pytest.mark.parametrize("backend", [None, "reference"])
def test_inductor_calls_the_op(backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In continuous integration, Inductor refuses to call ops that have a decomposition unless they
    are registered with it.
    """
    op = torch.ops.fastattn.attention_fwd
    overload = op.default if backend is None else op.backend
    monkeypatch.setenv("CI", "true")
    monkeypatch.delitem(lowering.lowerings, overload, raising=False)
    q = torch.randn(2, 2, 5, 8)

    def call() -> Any:
        return fastattn.attention(q, q, q, causal=True, backend=backend)

    with torch._inductor.config.patch(force_disable_caches=True):
        found, [code] = run_and_get_code(torch.compile(call, fullgraph=True))
    assert f"fastattn.attention_fwd.{overload._overloadname}" in code
    torch.testing.assert_close(found, call())


@pytest.mark.slow
def test_inductor_can_be_given_the_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    op = torch.ops.fastattn.rms_norm_fwd.default
    monkeypatch.setitem(lowering.decompositions, op, TABLE[op])
    monkeypatch.delitem(lowering.lowerings, op, raising=False)
    x = torch.randn(3, 8)

    def call() -> Any:
        return fastattn.rms_norm(x)

    # Inductor copies the table once, unless fallback_random is set.
    with torch._inductor.config.patch(force_disable_caches=True, fallback_random=True):
        found, [code] = run_and_get_code(torch.compile(call, fullgraph=True))
    assert "fastattn." not in code
    torch.testing.assert_close(found, call())


def test_exported_program_without_ops_of_fastattn() -> None:
    class Block(torch.nn.Module):
        def forward(self, q: torch.Tensor, lengths: torch.Tensor) -> Any:
            return fastattn.attention(q, q, q, key_lengths=lengths, causal=True)

    inputs = torch.randn(2, 2, 5, 8), torch.tensor([5, 0])
    exported = torch.export.export(Block(), inputs)
    targets = [node.target for node in exported.run_decompositions().graph.nodes]
    assert torch.ops.fastattn.attention_fwd.default in targets
    program = exported.run_decompositions(TABLE)
    assert not [node for node in program.graph.nodes if "fastattn" in str(node.target)]
    torch.testing.assert_close(program.module()(*inputs), Block()(*inputs))
